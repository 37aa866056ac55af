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
pub mod foreground;
pub mod input;
pub mod keys;
pub mod logging;
pub mod progress;
pub mod screen;
pub mod signals;
pub mod table;
pub mod undo;

use std::io::{self, ErrorKind, Write as _, stderr, stdout};

use anyhow::Context as _;
use logging::Priority;
use policy::time::Duration;
use reactor::{Polling, error::what_gives_descriptors, plain::is_hidden};

/// The variable that is set for a server in the background: who started it waits until nobody has
/// its standard error any more.
pub const IN_BACKGROUND: &str = "WEIR_IN_BACKGROUND";

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
    complain_as("weir", error);
}

/// The same where the program was called by another name.
pub fn complain_as(program: &str, error: &anyhow::Error) {
    say_as(program, &Priority::ERROR, &told(error));
}

/// An error and its causes in one line, each text once: a cause may repeat what it is the cause of.
/// Numbers of the system's errors, which say nothing to people, become what to do.
fn told(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let last = line.rsplit(": ").next().unwrap_or_default();
        let repeated = text.strip_prefix(last).and_then(|rest| rest.strip_prefix(": "));
        let text = repeated.unwrap_or(&text);
        if line.contains(text) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(text);
    }
    let mut remedy = "";
    while let Some((before, number, after)) = system_error(&line) {
        remedy = what_helps(&io::Error::from_raw_os_error(number));
        line = format!("{before}{after}");
    }
    if !remedy.is_empty() && !line.ends_with(')') {
        line = format!("{line} ({remedy})");
    }
    line
}

/// The first ` (os error N)` of a text: what is before it, the number, what is behind.
fn system_error(text: &str) -> Option<(&str, i32, &str)> {
    let (before, rest) = text.split_once(" (os error ")?;
    let (number, after) = rest.split_once(')')?;
    Some((before, number.parse().ok()?, after))
}

/// What to do about an error of the system, where nobody knows better.
fn what_helps(error: &io::Error) -> &'static str {
    if let Some(remedy) = what_gives_descriptors(error) {
        return remedy;
    }
    match error.kind() {
        ErrorKind::NotFound => "check the path",
        ErrorKind::NotADirectory => "check the path: a part of it is a file",
        ErrorKind::IsADirectory => "name a file in it",
        ErrorKind::PermissionDenied => "check the owner and the mode of it and of its directories",
        ErrorKind::ReadOnlyFilesystem => "choose a place that can be written to",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room, or choose another place",
        ErrorKind::ConnectionRefused | ErrorKind::HostUnreachable | ErrorKind::TimedOut => {
            "does the server run, and is that its address?"
        }
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted => {
            "the other side has ended the connection; does it still run?"
        }
        ErrorKind::AddrInUse | ErrorKind::ResourceBusy => "stop what uses it, or choose another",
        ErrorKind::Unsupported => "the file system or the device cannot do it; try another",
        ErrorKind::InvalidInput => "is it the right kind of file?",
        _ => "the system refused it; its log (`dmesg`) may say more",
    }
}

/// Says on standard error what the user should know.
pub fn say(text: &str) {
    say_as("weir", &Priority::NOTICE, text);
}

fn say_as(program: &str, priority: &Priority, text: &str) {
    // Names in the text may be somebody else's choice.
    let text = text.replace(|c| is_hidden(c) && c != '\n' && c != '\t', "?");
    let _ = writeln!(stderr(), "{priority}{program}: {text}");
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
    let result = reactor::run(Polling::Off, work);
    // So that the next command finds the images unlocked.
    reactor::wait_for_closings(TO_CLOSE);
    result.context(NO_RING)?
}

/// Time that the end of a command waits for files that are still being closed. It is reached only
/// if a file system does not answer.
const TO_CLOSE: Duration = Duration::from_secs(2);

/// Prints results. Ends the program with status 0 where nobody reads them any more.
///
/// # Errors
/// If standard output cannot be written for another reason.
pub fn print(text: &str) -> anyhow::Result<()> {
    match stdout().write_all(text.as_bytes()) {
        // `weir status | head`: whoever reads has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => logging::exit(0),
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

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn an_error_says_everything_once_and_what_to_do() {
        let missing = || io::Error::from_raw_os_error(2);
        for (error, expect) in [
            (anyhow!("vm1: locked (stop it)").context("vm1"), "vm1: locked (stop it)"),
            (anyhow!("vm1: locked (stop it)").context("disk a: vm1"), "disk a: vm1: locked (stop it)"),
            (anyhow!("vm1: locked"), "vm1: locked"),
            (
                anyhow::Error::new(missing()).context(format!("TLS: k: {} (make one)", missing())),
                "TLS: k: No such file or directory (make one)",
            ),
            (
                anyhow::Error::new(missing()).context("image root /x"),
                "image root /x: No such file or directory (check the path)",
            ),
            (
                anyhow::Error::new(io::Error::from_raw_os_error(95)).context("x"),
                "x: Operation not supported (the file system or the device cannot do it; try another)",
            ),
            (
                anyhow::Error::new(io::Error::from_raw_os_error(104)).context("x"),
                "x: Connection reset by peer (the other side has ended the connection; does it still run?)",
            ),
            (
                anyhow::Error::new(io::Error::from_raw_os_error(24)).context("x"),
                "x: Too many open files (raise the descriptor limit of the process: `ulimit -n`, or LimitNOFILE= of its service)",
            ),
            (
                anyhow::Error::new(io::Error::from_raw_os_error(23)).context("x"),
                "x: Too many open files in system (raise the descriptor limit of the system: `sysctl fs.file-max`)",
            ),
            (anyhow!("x: odd (os error what)"), "x: odd (os error what)"),
        ] {
            assert_eq!(told(&error), expect);
        }
    }
}
