//! Programs of QEMU that weir takes the place of, where a link of their name leads to it: scripts
//! that call them change nothing.
//!
//! ```text
//!   nbd              qemu-nbd: its options become those of `weir serve`
//!   storage_daemon   qemu-storage-daemon: its options are those of `weir serve`
//! ```
//!
//! Here is what both have in common: how they are called, what they say, and that they exit with 0
//! or 1. Never serves anything by itself.

mod nbd;
mod storage_daemon;

use std::{
    ffi::OsString,
    io::{Write as _, stderr},
    path::Path,
    process::ExitCode,
};

use clap::error::ErrorKind;
use console::{CommandFailure, print_error_as, logging, print};
use daemon::serve::ServeArgs;

use crate::background;

/// What is done in the place of the program that this one was called as.
pub(crate) fn called_as(program: Option<&OsString>) -> Option<fn() -> ExitCode> {
    match Path::new(program?).file_name()?.to_str()? {
        nbd::NAME => Some(nbd::main),
        storage_daemon::NAME => Some(storage_daemon::main),
        _ => None,
    }
}

/// Tells how it went, in the form of all errors; the status to exit with.
fn ended(name: &str, result: Result<(), CommandFailure>) -> ExitCode {
    // Before the error, which follows the log.
    logging::flush();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(CommandFailure::Failed(error) | CommandFailure::Usage(error)) => {
            print_error_as(name, &error);
            ExitCode::FAILURE
        }
        Err(CommandFailure::Found(_)) => ExitCode::FAILURE,
    }
}

/// Prints help where that was asked for, and says else what is wrong with a command line.
fn answer(name: &str, error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    if error.kind() == ErrorKind::DisplayHelp {
        return ended(name, print(&text).map_err(CommandFailure::from));
    }
    let _ = writeln!(stderr(), "{name}: {}\nTry `{name} --help' for more information.", what_is_wrong(&text));
    ExitCode::FAILURE
}

/// What clap's message has before the first empty line, as one line.
fn what_is_wrong(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let said = lines.join(" ");
    said.strip_prefix("error: ").map(str::to_owned).unwrap_or(said)
}

/// As clients of the control socket are told: which QEMU it is like, and what it is.
fn version(name: &str) -> Result<(), CommandFailure> {
    let (qemu, own) = (control::qemu_release(), env!("CARGO_PKG_VERSION"));
    Ok(print(&format!("{name} {qemu} (weir {own})\n"))?)
}

/// Serves; then calls `ready`, and tells whoever waits for the process in the background.
fn serve(arguments: ServeArgs, ready: impl FnOnce() + 'static) -> Result<(), CommandFailure> {
    daemon::serve::run(arguments, move || {
        ready();
        background::tell_ready();
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_clap_says_is_one_line_with_all_that_is_missing() {
        let text = "error: the following were not provided:\n  --config <FILE>\n  <IMAGE>\n\nUsage: weir\n";
        assert_eq!(what_is_wrong(text), "the following were not provided: --config <FILE> <IMAGE>");
        assert_eq!(what_is_wrong("error: no\n\n  tip: yes\n"), "no");
    }
}
