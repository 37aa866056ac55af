//! `qemu-storage-daemon`: a link to weir of this name takes that program's command line, whose
//! options `weir serve` has too. What weir does not have is refused by name; docs/from-qemu.md
//! lists it.

use std::{env, ffi::OsString, process::ExitCode};

use super::{answer, ended, serve, version};
use crate::{background, cli::Cli};

/// The name of the link.
pub(super) const NAME: &str = "qemu-storage-daemon";

/// Does what the process's command line says; the status to exit with, which is 0 or 1.
pub(super) fn main() -> ExitCode {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    if words.iter().any(|word| word == "-V" || word == "--version") {
        return ended(NAME, version(NAME));
    }
    // It says nothing as long as nothing is wrong.
    let mut before = vec![OsString::from("--log=error")];
    let named =
        |word: &OsString| ["--qmp", "--monitor"].iter().any(|name| word.to_string_lossy().starts_with(name));
    if !words.iter().any(named) {
        // Where nobody asked for a control socket there is none.
        before.push("--no-control".into());
    }
    let arguments = match Cli::serve(before.into_iter().chain(words)) {
        Ok(arguments) => arguments,
        Err(error) => return answer(NAME, &error),
    };
    if arguments.is_to_daemonize() && !background::is_here() {
        return background::start().unwrap_or_else(|error| ended(NAME, Err(error.into())));
    }
    ended(NAME, serve(arguments, || {}))
}
