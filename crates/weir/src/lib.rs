//! The `weir` program: one command with a subcommand for each task.
//!
//! ```text
//!   cli                  the command line; options and work of a command are in its own module
//!   client               client of the daemon's control socket: reports, rates, changes
//!   cluster              the hosts that share limits
//!   attach               a disk as a device of this host; its keeper process; detach
//!   status, top          the running state; the same, live
//!   throttle, prefetch   settings of a disk or group, shown or changed
//!   adding               add and remove disks and groups
//!   added                keys of an added disk or group: as options, for a daemon, in a file
//!   reload               reload the config file
//!   resume               resume disks that an error has stopped
//!   saving               common part: send a change to the daemon and save it in the config file
//!   served               the disk that a daemon serves from an image, for `weir image`
//!   mount_helper         `mount -t weir`, an interface to `attach`
//!   complete, generate   shell completion; manual pages and scripts for shells
//!   qemu                 `qemu-nbd` and `qemu-storage-daemon`, interfaces to `serve`
//!   background           a server that continues in the background
//! ```
//!
//! A library, so that end-to-end tests and tools can call [`main`]; its API is not for other
//! crates. Never does work itself: the work of a command is in the module of its name.

mod added;
mod adding;
mod attach;
mod background;
mod cli;
mod client;
mod cluster;
mod complete;
mod generate;
mod mount_helper;
mod prefetch;
mod qemu;
mod record;
mod reload;
mod resume;
mod saving;
mod served;
mod status;
mod throttle;
mod top;
mod verify;

use std::{
    io::{Write as _, stderr, stdout},
    process::ExitCode,
    time::Duration,
};

use clap::error::ErrorKind;
use cli::{Cli, Command};
use console::{CommandFailure, print_error, logging};
use storage::rbd;

/// Longest wait for Ceph to close images at the end. A cluster that does not respond keeps them
/// open until it detects that this client is gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs the process's command line and returns its exit status.
pub fn main() -> ExitCode {
    complete::answer_shell(Cli::whole);
    if let Some(program) = qemu::called_as(std::env::args_os().next().as_ref()) {
        return program();
    }
    let command = match Cli::read() {
        Ok(Some(Cli { command })) => command,
        Ok(None) => return ExitCode::SUCCESS,
        Err(mut error) => {
            // Replacements for features of qemu-img are better advice than a similar name from
            // clap.
            let words: Vec<_> = std::env::args_os().skip(1).collect();
            let words: Vec<_> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            image_tool::advise(&mut error, &words);
            return answer(&error);
        }
    };
    let result = match command {
        Command::Serve(arguments) if arguments.is_to_daemonize() && !background::is_here() => {
            match background::start() {
                Ok(status) => return status,
                Err(error) => Err(error.into()),
            }
        }
        Command::Serve(arguments) => daemon::serve::run(*arguments, background::tell_ready),
        Command::CheckConfig(arguments) => daemon::serve::check_config(arguments),
        Command::Attach(arguments) => attach::run(*arguments),
        Command::Detach(arguments) => attach::detach(arguments),
        Command::AttachKeeper => attach::keep(),
        Command::UblkGuard => attach::guard(),
        Command::OnEventRunner => daemon::run_on_event(),
        Command::Status(arguments) => status::run(arguments),
        Command::Verify(arguments) => verify::run(arguments),
        Command::Throttle(arguments) => throttle::run(&arguments),
        Command::Cluster(command) => cluster::run(command),
        Command::Prefetch(arguments) => saving::run(&arguments),
        Command::Disk(command) => adding::disk(command),
        Command::Group(command) => adding::group(command),
        Command::Reload(arguments) => reload::run(arguments),
        Command::Resume(arguments) => resume::run(arguments),
        Command::Top(arguments) => top::run(arguments),
        Command::Probe(arguments) => lab::probe::run(arguments),
        Command::Image(command) => image_tool::run(*command, served::find),
        Command::Cgroup(command) => cgroup::run(command),
        Command::DockerPlugin(arguments) => container::run(arguments),
        Command::Bench(arguments) => lab::bench::run(*arguments),
        Command::Record(arguments) => record::run(arguments),
        Command::Trace(command) => lab::trace::convert::run(command),
        Command::Simulate(arguments) => lab::simulate::run(*arguments),
        Command::Advise(arguments) => lab::advise::run(*arguments),
        Command::Report(arguments) => lab::report::run(arguments),
        Command::Tune(arguments) => lab::tune::run(*arguments),
        Command::Generate(arguments) => generate::run(&arguments, Cli::whole()),
    };
    // After failures too: an image that was not closed stays locked for other clients.
    rbd::wait_for_closing(PATIENCE);
    // Before the error, so that messages appear in order.
    logging::flush();
    let (error, status) = match result {
        Ok(()) => return ExitCode::SUCCESS,
        Err(CommandFailure::Failed(error)) => (error, 1),
        Err(CommandFailure::Usage(error)) => (error, 2),
        Err(CommandFailure::Found(status)) => return ExitCode::from(status),
    };
    print_error(&error);
    ExitCode::from(status)
}

fn answer(error: &clap::Error) -> ExitCode {
    let text = error.render();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let written = stdout().write_all(text.to_string().as_bytes());
        return if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let text = text.to_string();
    let _ = write!(stderr(), "weir: {}", text.strip_prefix("error: ").unwrap_or(&text));
    ExitCode::from(2)
}
