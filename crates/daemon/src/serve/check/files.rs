//! Files that a daemon writes: whether a start could open them. Nothing is made or opened.

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

/// Fails where the process could not write its number to the file. A daemon that has the file may
/// be the one of this config.
pub(super) fn pid_file(path: &Path, others: AddressConflictRule) -> anyhow::Result<()> {
    let why = || format!("pid file {}", path.display());
    // The file is never opened through a link.
    if let Ok(found) = fs::symlink_metadata(path) {
        ensure!(found.is_file(), "{}: is no file (choose another path)", why());
    }
    let directory = sandbox::directory_of(path);
    writable(directory).with_context(|| format!("{}: {}", why(), directory.display()))?;
    match others {
        AddressConflictRule::Rejected => PidFile::check(path),
        AddressConflictRule::Tolerated => Ok(()),
    }
}

/// Fails where the log could not be opened. A named pipe is opened only while a program reads it.
pub(super) fn log_file(path: &Path) -> anyhow::Result<()> {
    let why = || format!("log-file {}", path.display());
    let kind = match fs::metadata(path) {
        Ok(found) => found.file_type(),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let directory = sandbox::directory_of(path);
            return writable(directory).with_context(|| format!("{}: {}", why(), directory.display()));
        }
        Err(error) => return Err(error).with_context(why),
    };
    if kind.is_dir() || kind.is_block_device() || kind.is_socket() {
        bail!("{}: is no file (name a file in a directory that weir may write to)", why());
    }
    if kind.is_fifo() {
        tracing::warn!("{}: is a named pipe: a start fails while no program reads it", why());
    }
    writable(path).with_context(why)
}

fn writable(path: &Path) -> io::Result<()> {
    Ok(access(path, AccessFlags::W_OK)?)
}
