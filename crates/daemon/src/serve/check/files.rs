//! Checks that a start could open the files that a daemon writes. Never creates or opens them.

use std::{
    fs,
    io::{self, ErrorKind},
    os::unix::fs::FileTypeExt as _,
    path::Path,
};

use anyhow::{Context as _, bail, ensure};
use control::listen::AddressConflictRule;
use nix::unistd::{AccessFlags, access};

use crate::pid_file::PidFile;

/// Fails if the daemon could not write its pid file. With `AddressConflictRule::Tolerated`, another
/// daemon may hold the file: it may be the daemon of this config.
pub(super) fn check_pid_file(path: &Path, conflict_rule: AddressConflictRule) -> anyhow::Result<()> {
    let why = || format!("pid file {}", path.display());
    // Symlinks are not followed: the daemon does not open its pid file through one.
    if let Ok(found) = fs::symlink_metadata(path) {
        ensure!(found.is_file(), "{}: is not a regular file (choose another path)", why());
    }
    let directory = sandbox::directory_of(path);
    check_writable(directory).with_context(|| format!("{}: {}", why(), directory.display()))?;
    match conflict_rule {
        AddressConflictRule::Rejected => PidFile::check(path),
        AddressConflictRule::Tolerated => Ok(()),
    }
}

/// Fails if the log file could not be opened. A named pipe causes a warning only: opening it
/// requires a reader, which a start may find.
pub(super) fn check_log_file(path: &Path) -> anyhow::Result<()> {
    let why = || format!("log-file {}", path.display());
    let kind = match fs::metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let directory = sandbox::directory_of(path);
            return check_writable(directory).with_context(|| format!("{}: {}", why(), directory.display()));
        }
        Err(error) => return Err(error).with_context(why),
    };
    if kind.is_dir() || kind.is_block_device() || kind.is_socket() {
        bail!("{}: is not a regular file or pipe (name a file in a directory that weir may write to)", why());
    }
    if kind.is_fifo() {
        tracing::warn!("{}: is a named pipe: a start fails unless a program reads it", why());
    }
    check_writable(path).with_context(why)
}

fn check_writable(path: &Path) -> io::Result<()> {
    Ok(access(path, AccessFlags::W_OK)?)
}
