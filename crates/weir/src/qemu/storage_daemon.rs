//! `qemu-storage-daemon`: a link to weir of this name accepts that program's command line, whose
//! options `weir serve` supports. Unsupported options are rejected by name; docs/from-qemu.md lists
//! them.

use std::{env, ffi::OsString, process::ExitCode};

use super::{exit_status, print_clap_error, serve, version};
use crate::{background, cli::Cli};

/// Name of the link.
pub(super) const NAME: &str = "qemu-storage-daemon";

/// Runs the process's command line and returns the exit status, 0 or 1.
pub(super) fn main() -> ExitCode {
    let tokens: Vec<OsString> = env::args_os().skip(1).collect();
    // Before parsing: `weir serve --version` prints another text.
    if tokens.iter().any(|token| token == "-V" || token == "--version") {
        return exit_status(NAME, version(NAME));
    }
    // qemu-storage-daemon prints errors only.
    let mut before = vec![OsString::from("--log=error")];
    let named = |token: &OsString| {
        ["--qmp", "--monitor"].iter().any(|name| token.to_string_lossy().starts_with(name))
    };
    if !tokens.iter().any(named) {
        // It has no control socket by default.
        before.push("--qmp=none".into());
    }
    let arguments = match Cli::serve(before.into_iter().chain(tokens)) {
        Ok(arguments) => arguments,
        Err(error) => return print_clap_error(NAME, &error),
    };
    if arguments.is_to_daemonize() && !background::is_background() {
        return background::start().unwrap_or_else(|error| exit_status(NAME, Err(error.into())));
    }
    exit_status(NAME, serve(arguments, || {}))
}
