//! Allocation status of files, by SEEK_DATA and SEEK_HOLE.

use std::os::fd::AsFd;

use nix::{errno::Errno, unistd::Whence};

use super::calls;
use reactor::error::{Error, Result};

use crate::{Extent, MAX_EXTENTS, push_extent};

/// Returns the extents of a range; blocks. Moves the descriptor's position, which no other code
/// uses; concurrent calls do not affect each other's results.
pub(super) fn extents(fd: &impl AsFd, offset: u64, length: u64) -> Result<Vec<Extent>> {
    let end = offset.checked_add(length).ok_or(Error::INVALID)?;
    let mut extents = Vec::new();
    let mut at = offset;
    while at < end && extents.len() < MAX_EXTENTS {
        let (hole, next) = run_at(fd, at, end)?;
        push_extent(&mut extents, Extent { length: next - at, hole, zero: hole });
        at = next;
    }
    Ok(extents)
}

/// Returns whether `at` is in a hole, and where the run ends, at most `end` and always beyond `at`.
fn run_at(fd: &impl AsFd, at: u64, end: u64) -> Result<(bool, u64)> {
    match seek(fd, at, Whence::SeekData) {
        Ok(data) if data > at => Ok((true, data.min(end))),
        Ok(_) => match seek(fd, at, Whence::SeekHole) {
            // Otherwise the file changed between the two calls. Reporting data is always correct.
            Ok(hole) if hole > at => Ok((false, hole.min(end))),
            _ => Ok((false, end)),
        },
        // No data up to the end of the file.
        Err(Errno::ENXIO) => Ok((true, end)),
        // The file system does not support it.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => Ok((false, end)),
        Err(errno) => Err(Error::from_errno(errno as i32)),
    }
}

fn seek(fd: &impl AsFd, offset: u64, whence: Whence) -> nix::Result<u64> {
    let offset = i64::try_from(offset).map_err(|_| Errno::EINVAL)?;
    calls::seek(fd, offset, whence)
}
