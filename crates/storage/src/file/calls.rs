//! System calls on an open file that may wait for its file system; each runs on a thread that may
//! block. No other module of the data path makes such calls.
//!
//! `fstat`, `lseek` and `fcntl` wait for the server on FUSE, NFS, CIFS and 9P, although they return
//! at once on a local file system. [`FileIsolation::call`] provides a thread.
//!
//! [`FileIsolation::call`]: super::isolation::FileIsolation::call

use std::os::fd::AsFd;

use nix::unistd::{Whence, ftruncate, lseek};
use rustix::fs::{Advice, AtFlags, StatxFlags, fadvise, statx};

use reactor::{
    debug_assert_may_block,
    error::{Error, Result},
};

use crate::FileStamp;

fn failed(errno: nix::errno::Errno) -> Error {
    Error::from_errno(errno as i32)
}

/// The size of a file or a block device, in bytes.
pub(super) fn size(fd: impl AsFd) -> Result<u64> {
    debug_assert_may_block();
    // Seeking works for files and devices alike; the position of the descriptor is not used.
    lseek(fd, 0, Whence::SeekEnd).map(i64::unsigned_abs).map_err(failed)
}

pub(super) fn seek(fd: impl AsFd, offset: i64, whence: Whence) -> nix::Result<u64> {
    debug_assert_may_block();
    lseek(fd, offset, whence).map(i64::unsigned_abs)
}

pub(super) fn truncate(fd: impl AsFd, size_bytes: i64) -> Result<()> {
    debug_assert_may_block();
    ftruncate(fd, size_bytes).map_err(failed)
}

/// Bytes allocated to the file.
pub(super) fn allocated_bytes(fd: impl AsFd) -> Result<u64> {
    debug_assert_may_block();
    let status = nix::sys::stat::fstat(fd).map_err(failed)?;
    Ok(status.st_blocks.unsigned_abs() * 512)
}

pub(super) fn stamp(fd: impl AsFd) -> Result<FileStamp> {
    debug_assert_may_block();
    let status = nix::sys::stat::fstat(fd).map_err(failed)?;
    Ok(FileStamp {
        modified_s: status.st_mtime,
        modified_ns: status.st_mtime_nsec,
        size_bytes: status.st_size,
    })
}

/// Reads attributes from the server of a remote file system, past any cached ones.
pub(super) fn ping(fd: impl AsFd) -> Result<()> {
    debug_assert_may_block();
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    // Errors are ignored: they also show that the server answers.
    let _ = statx(fd, "", flags, StatxFlags::SIZE | StatxFlags::MTIME);
    Ok(())
}

/// Drops clean pages, which another host may have overwritten.
pub(super) fn drop_clean_pages(fd: impl AsFd) {
    debug_assert_may_block();
    let _ = fadvise(fd, 0, None, Advice::DontNeed);
}
