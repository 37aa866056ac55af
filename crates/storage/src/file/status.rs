//! Which parts of a file are holes, by SEEK_DATA and SEEK_HOLE.

use std::os::fd::AsFd;

use nix::{errno::Errno, unistd::Whence};

use super::calls;
use reactor::error::{Error, Result};

use crate::{Extent, MOST_EXTENTS, push_extent};

/// The extents of a range; blocks. The descriptor's position is nobody's, so moving it harms
/// nobody; each call's answer is its own.
pub(super) fn extents(fd: &impl AsFd, offset: u64, length: u64) -> Result<Vec<Extent>> {
    let end = offset.checked_add(length).ok_or(Error::INVALID)?;
    let mut extents = Vec::new();
    let mut at = offset;
    while at < end && extents.len() < MOST_EXTENTS {
        let (hole, next) = run_at(fd, at, end)?;
        push_extent(&mut extents, Extent { length: next - at, hole, zero: hole });
        at = next;
    }
    Ok(extents)
}

/// Whether there is a hole at `at`, and where that changes, at most `end`. Always moves on.
fn run_at(fd: &impl AsFd, at: u64, end: u64) -> Result<(bool, u64)> {
    match seek(fd, at, Whence::SeekData) {
        Ok(data) if data > at => Ok((true, data.min(end))),
        Ok(_) => match seek(fd, at, Whence::SeekHole) {
            // Not beyond: the file changed between the two calls. Data is never wrong.
            Ok(hole) if hole > at => Ok((false, hole.min(end))),
            _ => Ok((false, end)),
        },
        // No data up to the end of the file.
        Err(Errno::ENXIO) => Ok((true, end)),
        // The file system does not know.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => Ok((false, end)),
        Err(errno) => Err(Error::from_errno(errno as i32)),
    }
}

fn seek(fd: &impl AsFd, offset: u64, whence: Whence) -> nix::Result<u64> {
    let offset = i64::try_from(offset).map_err(|_| Errno::EINVAL)?;
    calls::seek(fd, offset, whence)
}
