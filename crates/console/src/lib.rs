//! How a command of weir speaks: numbers, tables, progress, errors, exit status, signals.
//!
//! ```text
//!   figures, table       numbers and columns for people
//!   progress             a bar on a terminal, lines elsewhere
//!   screen, input, keys  the whole terminal: `weir top` and its like
//!   signals, undo        signals as messages; what is undone before one ends a command
//!   logging              the log of the daemon and of the watch
//!   descriptors          how many files a process may have open
//! ```
//!
//! Here itself: the exit status (0 done, 1 failed, 2 wrong use of the command line), the form of an
//! error, `weir: <what>: <why> (<what to do>)` on standard error, and a reactor to do I/O on.
//!
//! Never knows what a command does, nor which there are.

pub mod descriptors;
pub mod figures;
pub mod input;
pub mod keys;
pub mod logging;
pub mod progress;
pub mod screen;
pub mod signals;
pub mod table;
pub mod undo;

use std::{
    io::{ErrorKind, Write as _, stderr, stdout},
    process::exit,
};

use anyhow::Context as _;
use block::reactor::{self, Polling};

/// Why a command did not do what it was asked, which decides the exit status.
#[derive(Debug)]
pub enum Failure {
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

/// Says what is wrong, in the form of all errors.
pub fn complain(error: &anyhow::Error) {
    say(&format!("{error:#}"));
}

/// Says on standard error what the user should know.
pub fn say(text: &str) {
    // Names in the text may be somebody else's choice.
    let _ =
        writeln!(stderr(), "weir: {}", text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "?"));
}

/// Why there is no reactor.
pub const NO_RING: &str = "io_uring cannot be used (see kernel.io_uring_disabled)";

/// Runs a command's I/O to its end, on a reactor of its own.
///
/// # Errors
/// The command's, or that there is no io_uring.
pub fn on_reactor<T: 'static>(
    work: impl Future<Output = Result<T, Failure>> + 'static,
) -> Result<T, Failure> {
    reactor::run(Polling::OFF, work).context(NO_RING)?
}

/// Prints results. Ends the program with status 0 where nobody reads them any more.
///
/// # Errors
/// If standard output cannot be written for another reason.
pub fn print(text: &str) -> anyhow::Result<()> {
    match stdout().write_all(text.as_bytes()) {
        // `weir status | head`: whoever reads has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => exit(0),
        result => result.context("standard output cannot be written"),
    }
}

/// Prints results for a program.
///
/// # Errors
/// If standard output is closed.
pub fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value).context("this cannot be told as JSON")?;
    print(&(text + "\n"))
}
