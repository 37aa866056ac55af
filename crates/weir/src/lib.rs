//! The `weir` program as a library: one command, a subcommand for each thing it does.
//!
//! It is a library so that fuzz targets reach the parsers of bytes that strangers send. It is no interface for others: what is
//! public serves [`main`] and those targets alone, and changes with them.
//!
//! Here is only what the subcommands have in common: the exit status (0 done, 1 failed, 2 wrong use of the command line), the form of
//! an error, `weir: <what>: <why> (<what to do>)` on standard error, a reactor to do I/O on, and where results go.

mod cgroup;
mod cli;
mod client;
mod config;
mod control;
mod figures;
mod image;
mod lab;
mod listen;
mod logging;
mod pid_file;
mod plan;
mod prefetch;
mod probe;
mod progress;
mod saving;
mod secret;
mod serve;
mod signals;
mod status;
mod suggest;
mod table;
mod throttle;
mod top;
mod undo;
mod whole_file;

#[doc(hidden)]
pub use cgroup::kernel::fuzzing as kernel_fuzzing;
#[doc(hidden)]
pub use control::qmp::fuzzing;
#[doc(hidden)]
pub use lab::trace::fuzzing as trace_fuzzing;

use std::{
    io::{Write as _, stderr, stdout},
    process::ExitCode,
};

use anyhow::Context as _;
use block::reactor::{self, Polling};
use clap::{Parser as _, error::ErrorKind};

use cli::{Cli, Command};

/// Why a command did not do what it was asked, which decides the exit status.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The command line makes no sense.
    Usage(anyhow::Error),
    /// It does, but what it asks for did not work.
    Failed(anyhow::Error),
    /// It did, and what it found is an exit status of its own; everything has been said.
    Found(u8),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Does what the process's command line says; returns the status to exit with.
pub fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(Cli { command: Command::Serve(arguments) }) => serve::run(*arguments),
        Ok(Cli { command: Command::Status(arguments) }) => status::run(arguments),
        Ok(Cli { command: Command::Throttle(arguments) }) => throttle::run(*arguments),
        Ok(Cli { command: Command::Prefetch(arguments) }) => prefetch::run(arguments),
        Ok(Cli { command: Command::Top(arguments) }) => top::run(arguments),
        Ok(Cli { command: Command::Probe(arguments) }) => probe::run(arguments),
        Ok(Cli { command: Command::Image(command) }) => image::run(*command),
        Ok(Cli { command: Command::Cgroup(command) }) => cgroup::run(command),
        Ok(Cli { command: Command::Bench(arguments) }) => lab::bench(*arguments),
        Ok(Cli { command: Command::Simulate(arguments) }) => lab::simulate(*arguments),
        Ok(Cli { command: Command::Report(arguments) }) => lab::report(arguments),
        Ok(Cli { command: Command::Tune(arguments) }) => lab::tune(*arguments),
        Err(mut error) => {
            let words: Vec<_> = std::env::args_os().skip(1).take(2).collect();
            let words: Vec<_> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
            image::advise(&mut error, &words);
            return answer(&error);
        }
    };
    let (error, status) = match result {
        Ok(()) => return ExitCode::SUCCESS,
        Err(Failure::Failed(error)) => (error, 1),
        Err(Failure::Usage(error)) => (error, 2),
        Err(Failure::Found(status)) => return ExitCode::from(status),
    };
    complain(&error);
    ExitCode::from(status)
}

/// Says what is wrong, in the form of all errors.
pub(crate) fn complain(error: &anyhow::Error) {
    say(&format!("{error:#}"));
}

/// Says on standard error what the user should know.
pub(crate) fn say(text: &str) {
    // Where standard error is closed there is nobody to tell.
    // Names in it may be somebody else's choice; lines may be several.
    let _ =
        writeln!(stderr(), "weir: {}", text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "?"));
}

/// Why there is no reactor.
pub(crate) const NO_RING: &str = "io_uring cannot be used (see kernel.io_uring_disabled)";

/// Runs a command's I/O to its end, on a reactor of its own.
///
/// # Errors
/// The command's, or that there is no io_uring.
pub(crate) fn on_reactor<T: 'static>(
    work: impl Future<Output = Result<T, Failure>> + 'static,
) -> Result<T, Failure> {
    reactor::run(Polling::OFF, work).context(NO_RING)?
}

/// Prints results.
///
/// # Errors
/// If standard output is closed.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    stdout().write_all(text.as_bytes()).context("standard output cannot be written")
}

/// Prints results for a program.
///
/// # Errors
/// If standard output is closed.
pub(crate) fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value).context("this cannot be told as JSON")?;
    print(&(text + "\n"))
}

/// Prints what clap has to say: help and version where results go, everything else as an error.
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
