//! User interface of the commands: numbers, tables, progress, errors, exit status, signals.
//!
//! ```text
//!   figures, table              numbers and columns for people
//!   progress, foreground        a bar on a terminal, lines elsewhere
//!   screen, input, keys         full-screen commands such as `weir top`
//!   signals, signal_cleanup     signals as messages; changes undone before a signal ends a command
//!   logging                     log of the daemon and of other long-running commands
//!   descriptors                 limit of open files of a process
//! ```
//!
//! This file holds the exit status (0 success, 1 failure, 2 wrong command line), the form of an
//! error, `weir: <what>: <why> (<what to do>)` on standard error, and the reactor for a command's
//! I/O.
//!
//! Never depends on a particular command.

pub mod descriptors;
pub mod figures;
pub mod foreground;
pub mod input;
pub mod keys;
pub mod logging;
pub mod progress;
pub mod screen;
pub mod signal_cleanup;
pub mod signals;
pub mod table;

use std::io::{self, ErrorKind, Write as _, stderr, stdout};

use anyhow::Context as _;
use logging::JournalPriority;
use policy::time::Duration;
use reactor::{PollingMode, error::descriptor_remedy, sanitize::is_unsafe_for_display};

/// Environment variable that is set for a server in the background. Its parent waits until every
/// copy of the server's standard error is closed.
pub const IN_BACKGROUND: &str = "WEIR_IN_BACKGROUND";

/// Reason for an exit status other than 0.
#[derive(Debug)]
pub enum CommandFailure {
    /// The command line is invalid: status 2.
    Usage(anyhow::Error),
    /// The command failed: status 1.
    Failed(anyhow::Error),
    /// The command succeeded and its result is an exit status (such as 3 for leaked clusters). The
    /// result is already printed.
    Found(u8),
}

impl<E: Into<anyhow::Error>> From<E> for CommandFailure {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// Prints an error in the common form.
pub fn print_error(error: &anyhow::Error) {
    print_error_as("weir", error);
}

/// Prints an error in the common form, with another program name than `weir`.
pub fn print_error_as(program: &str, error: &anyhow::Error) {
    print_notice_as(program, &JournalPriority::ERROR, &error_line(error));
}

/// Text of an error, as [`print_error`] prints it.
pub fn error_text(error: &anyhow::Error) -> String {
    error_line(error)
}

/// Error and its causes in one line, each text once: the text of an error often includes that of
/// its cause. `(os error N)` is removed, and a remedy for that error is appended unless the line
/// already ends with one.
fn error_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        // Context and cause may overlap: "disk a: vm1" with the cause "vm1: locked" is "disk a:
        // vm1: locked".
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
    let mut hint = "";
    while let Some((before, number, after)) = system_error(&line) {
        hint = remedy(&io::Error::from_raw_os_error(number));
        line = format!("{before}{after}");
    }
    if !hint.is_empty() && !line.ends_with(')') {
        line = format!("{line} ({hint})");
    }
    line
}

/// Splits a text at its first ` (os error N)`: text before, N, text after.
fn system_error(text: &str) -> Option<(&str, i32, &str)> {
    let (before, rest) = text.split_once(" (os error ")?;
    let (number, after) = rest.split_once(')')?;
    Some((before, number.parse().ok()?, after))
}

/// General remedy for an error of the operating system.
fn remedy(error: &io::Error) -> &'static str {
    if let Some(remedy) = descriptor_remedy(error) {
        return remedy;
    }
    match error.kind() {
        ErrorKind::NotFound => "check the path",
        ErrorKind::NotADirectory => "check the path: a part of it is a file",
        ErrorKind::IsADirectory => "name a file in that directory",
        ErrorKind::PermissionDenied => "check the owner and mode of the file and its directories",
        ErrorKind::ReadOnlyFilesystem => "choose a writable file system",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free space, or choose another file system",
        ErrorKind::ConnectionRefused | ErrorKind::HostUnreachable | ErrorKind::TimedOut => {
            "check that the server runs, and its address"
        }
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted => {
            "the peer closed the connection; check that it still runs"
        }
        ErrorKind::AddrInUse | ErrorKind::ResourceBusy => "stop its user, or choose another",
        ErrorKind::Unsupported => "the file system or device does not support this; use another",
        ErrorKind::InvalidInput => "check the kind of the file",
        _ => "rejected by the operating system; see `dmesg`",
    }
}

/// Prints a notice on standard error.
pub fn print_notice(text: &str) {
    print_notice_as("weir", &JournalPriority::NOTICE, text);
}

fn print_notice_as(program: &str, priority: &JournalPriority, text: &str) {
    // Names in the text may come from clients or from files: control characters would reach the
    // terminal.
    let text = text.replace(|c| is_unsafe_for_display(c) && c != '\n' && c != '\t', "?");
    let _ = writeln!(stderr(), "{priority}{program}: {text}");
}

/// Error text if no reactor can be started.
pub const NO_RING: &str = "io_uring cannot be used (see kernel.io_uring_disabled)";

/// Runs a command's I/O to its end, on a reactor in this thread.
///
/// # Errors
/// Returns the error of `work`, or fails if io_uring is not available.
pub fn on_reactor<T: 'static>(
    work: impl Future<Output = Result<T, CommandFailure>> + 'static,
) -> Result<T, CommandFailure> {
    let result = reactor::run(PollingMode::Off, work);
    // Closed files release their locks: the next command can then open the same images.
    reactor::wait_for_closings(CLOSE_TIMEOUT);
    result.context(NO_RING)?
}

// Longest time that the end of a command waits for files that are being closed. Reached only if a
// file system does not respond.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Prints results. Ends the process with status 0 if the reader has closed the pipe.
///
/// # Errors
/// Fails if standard output cannot be written for another reason.
pub fn print(text: &str) -> anyhow::Result<()> {
    match stdout().write_all(text.as_bytes()) {
        // The reader of `weir status | head` ends before the output does: no error. Rust ignores
        // SIGPIPE.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => logging::exit(0),
        result => result.context("standard output cannot be written"),
    }
}

/// Prints results as JSON.
///
/// # Errors
/// Fails if standard output cannot be written.
pub fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value).context("cannot be written as JSON")?;
    print(&(text + "\n"))
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn error_text_has_each_cause_once_and_a_remedy() {
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
                "x: Operation not supported (the file system or device does not support this; use another)",
            ),
            (
                anyhow::Error::new(io::Error::from_raw_os_error(104)).context("x"),
                "x: Connection reset by peer (the peer closed the connection; check that it still runs)",
            ),
            (
                anyhow::Error::new(io::Error::from_raw_os_error(24)).context("x"),
                "x: Too many open files (raise the descriptor limit of the process: `ulimit -n`, \
                 or LimitNOFILE= of its service)",
            ),
            (
                anyhow::Error::new(io::Error::from_raw_os_error(23)).context("x"),
                "x: Too many open files in system (raise the descriptor limit of the system: \
                 `sysctl fs.file-max`)",
            ),
            (anyhow!("x: odd (os error what)"), "x: odd (os error what)"),
        ] {
            assert_eq!(error_line(&error), expect);
        }
    }
}
