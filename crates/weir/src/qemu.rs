//! Programs of QEMU that weir replaces through links of their names, so that scripts work
//! unchanged.
//!
//! ```text
//!   nbd              qemu-nbd: its options are translated to those of `weir serve`
//!   storage_daemon   qemu-storage-daemon: its options are those of `weir serve`
//! ```
//!
//! This module has their common parts: dispatch by name, error format, and the exit statuses 0 and
//! 1. Never serves a disk itself.

mod nbd;
mod storage_daemon;

use std::{
    ffi::OsString,
    io::{Write as _, stderr},
    path::Path,
    process::ExitCode,
};

use clap::error::ErrorKind;
use console::{CommandFailure, logging, print, print_error_as};
use daemon::serve::ServeArgs;

use crate::background;

/// Entry point of the program whose name this process was called by.
pub(crate) fn entry_point(program: Option<&OsString>) -> Option<fn() -> ExitCode> {
    match Path::new(program?).file_name()?.to_str()? {
        nbd::NAME => Some(nbd::main),
        storage_daemon::NAME => Some(storage_daemon::main),
        _ => None,
    }
}

/// Reports the result in the program's error format and returns the exit status.
fn exit_status(name: &str, result: Result<(), CommandFailure>) -> ExitCode {
    // Before the error, so that messages appear in order.
    logging::flush();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(CommandFailure::Failed(error) | CommandFailure::Usage(error)) => {
            print_error_as(name, &error);
            ExitCode::FAILURE
        }
        // The finding has been printed already.
        Err(CommandFailure::Found(_)) => ExitCode::FAILURE,
    }
}

/// Prints the requested help, or the error of a command line.
fn print_clap_error(name: &str, error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    if error.kind() == ErrorKind::DisplayHelp {
        return exit_status(name, print(&text).map_err(CommandFailure::from));
    }
    let _ = writeln!(stderr(), "{name}: {}\nTry `{name} --help' for more information.", error_line(&text));
    ExitCode::FAILURE
}

/// The part of clap's message before the first empty line, as one line.
fn error_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    let said = lines.join(" ");
    said.strip_prefix("error: ").map(str::to_owned).unwrap_or(said)
}

/// Prints the emulated QEMU release, as in QMP's greeting, and the version of weir.
fn version(name: &str) -> Result<(), CommandFailure> {
    let (qemu, weir_version) = (control::qemu_release(), env!("CARGO_PKG_VERSION"));
    Ok(print(&format!("{name} {qemu} (weir {weir_version})\n"))?)
}

/// Serves. Once ready, calls `ready` and reports readiness to the foreground process.
fn serve(arguments: ServeArgs, ready: impl FnOnce() + 'static) -> Result<(), CommandFailure> {
    daemon::serve::run(arguments, move || {
        ready();
        background::report_ready();
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_errors_become_one_line() {
        let text = "error: the following were not provided:\n  --config <FILE>\n  <IMAGE>\n\nUsage: weir\n";
        assert_eq!(error_line(text), "the following were not provided: --config <FILE> <IMAGE>");
        assert_eq!(error_line("error: no\n\n  tip: yes\n"), "no");
    }
}
