//! The `weir` program: one command with a subcommand for each task.
//!
//! ```text
//!   cli                  the command line; options and work of a command are in its own module
//!   client               client of the daemon's control socket: reports, rates, changes
//!   cluster              the hosts that share limits
//!   attach               a disk as a device of this host; its keeper process; detach
//!   status, top          the running state; the same, live
//!   verify               limits and other guarantees, checked against the daemon's counters
//!   bitmap               dirty bitmaps of a disk in use
//!   backup, mirror, jobs copy a disk while it is used, or move it; jobs, shown and controlled
//!   snapshot             keep the content of disks at one instant
//!   stream               copy backing files into the image of a disk
//!   new_image            files that these commands create for the daemon
//!   record               requests of disks, recorded into a file
//!   throttle, prefetch   settings of a disk or group, shown or changed
//!   disks_and_groups     add, remove and move disks and groups
//!   added_keys           keys of an added disk or group: as options, for a daemon, in a file
//!   reload               reload the config file
//!   resume               resume disks that an error has stopped
//!   settings_command     common part: send a change to the daemon and save it in the config file
//!   served               the disk that a daemon serves from an image, for `weir image`
//!   mount_helper         `mount -t weir`, an interface to `attach`
//!   complete, generate   shell completion; manual pages and scripts for shells
//!   qemu                 `qemu-nbd` and `qemu-storage-daemon`, interfaces to `serve`
//!   background           a server that continues in the background
//! ```
//!
//! A library, so that end-to-end tests and tools can call [`main`]; its API is not for other
//! crates. Never does work itself: the work of a command is in the module of its name.

mod added_keys;
mod attach;
mod background;
mod backup;
mod bitmap;
mod cli;
mod client;
mod cluster;
mod complete;
mod disk_copy;
mod disks_and_groups;
mod generate;
mod jobs;
mod mirror;
mod mount_helper;
mod new_image;
mod prefetch;
mod qemu;
mod record;
mod reload;
mod resume;
mod served;
mod settings_command;
mod snapshot;
mod status;
mod stream;
mod throttle;
mod top;
mod verify;

use std::{
    io::{Write as _, stderr, stdout},
    process::ExitCode,
    time::Duration,
};

use clap::error::ErrorKind;
use cli::{Cli, WeirCommand};
use console::{CommandFailure, logging, print_error};
use storage::rbd;

/// Longest wait for Ceph to close images at the end. A cluster that does not respond keeps them
/// open until it detects that this client is gone.
const CEPH_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs the process's command line and returns its exit status.
pub fn main() -> ExitCode {
    complete::complete(Cli::full_command);
    if let Some(program) = qemu::entry_point(std::env::args_os().next().as_ref()) {
        return program();
    }
    let command = match Cli::read() {
        Ok(Some(Cli { command })) => command,
        Ok(None) => return ExitCode::SUCCESS,
        Err(mut error) => {
            // Replacements for features of qemu-img are better advice than a similar name from
            // clap.
            let words: Vec<_> = std::env::args_os().skip(1).collect();
            let words: Vec<_> =
                words.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
            image_tool::advise(&mut error, &words);
            return print_clap_error(&error);
        }
    };
    let result = match command {
        WeirCommand::Serve(arguments) if arguments.is_to_daemonize() && !background::is_background() => {
            match background::start() {
                Ok(status) => return status,
                Err(error) => Err(error.into()),
            }
        }
        WeirCommand::Serve(arguments) => daemon::serve::run(*arguments, background::report_ready),
        WeirCommand::CheckConfig(arguments) => daemon::serve::check_config(arguments),
        WeirCommand::Attach(arguments) => attach::run(*arguments),
        WeirCommand::Detach(arguments) => attach::detach(arguments),
        WeirCommand::AttachKeeper => attach::keep(),
        WeirCommand::UblkGuard => attach::guard(),
        WeirCommand::OnEventRunner => daemon::run_on_event(),
        WeirCommand::Status(arguments) => status::run(arguments),
        WeirCommand::Verify(arguments) => verify::run(arguments),
        WeirCommand::Throttle(arguments) => throttle::run(&arguments),
        WeirCommand::Cluster(command) => cluster::run(command),
        WeirCommand::Prefetch(arguments) => settings_command::run(&arguments),
        WeirCommand::Disk(command) => disks_and_groups::disk(command),
        WeirCommand::Group(command) => disks_and_groups::group(command),
        WeirCommand::Bitmap(arguments) => bitmap::run(arguments),
        WeirCommand::Backup(arguments) => backup::run(*arguments),
        WeirCommand::Mirror(arguments) => mirror::run(*arguments),
        WeirCommand::Snapshot(arguments) => snapshot::run(*arguments),
        WeirCommand::Stream(arguments) => stream::run(*arguments),
        WeirCommand::Jobs(arguments) => jobs::list(arguments),
        WeirCommand::Job(command) => jobs::run(command),
        WeirCommand::Reload(arguments) => reload::run(arguments),
        WeirCommand::Resume(arguments) => resume::run(arguments),
        WeirCommand::Top(arguments) => top::run(arguments),
        WeirCommand::Probe(arguments) => lab::probe::run(arguments),
        WeirCommand::Image(command) => image_tool::run(*command, served::find),
        WeirCommand::Cgroup(command) => cgroup::run(command),
        WeirCommand::DockerPlugin(arguments) => container::run(arguments),
        WeirCommand::Bench(arguments) => lab::bench::run(*arguments),
        WeirCommand::Record(arguments) => record::run(arguments),
        WeirCommand::Trace(command) => lab::trace::convert::run(command),
        WeirCommand::Simulate(arguments) => lab::simulate::run(*arguments),
        WeirCommand::Advise(arguments) => lab::advise::run(*arguments),
        WeirCommand::Report(arguments) => lab::report::run(arguments),
        WeirCommand::Tune(arguments) => lab::tune::run(*arguments),
        WeirCommand::Generate(arguments) => generate::run(&arguments, Cli::full_command()),
    };
    // After failures too: an image that was not closed stays locked for other clients.
    rbd::wait_for_closing(CEPH_CLOSE_TIMEOUT);
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

fn print_clap_error(error: &clap::Error) -> ExitCode {
    let text = error.render();
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let written = stdout().write_all(text.to_string().as_bytes());
        return if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let text = text.to_string();
    let _ = write!(stderr(), "weir: {}", text.strip_prefix("error: ").unwrap_or(&text));
    ExitCode::from(2)
}
