//! The alignment of offsets, lengths and memory that O_DIRECT requires for a file.
//!
//! Determined in this order: `statx` (STATX_DIOALIGN, Linux 6.1, not every file system), the
//! device's logical block size (BLKSSZGET), and trial reads, from 512 bytes upwards.

use std::os::fd::AsFd;

use nix::sys::uio::pread;
use rustix::fs::{AtFlags, StatxFlags, ioctl_blksszget, statx};

use super::FileKind;
use reactor::buffer::{ALIGNMENT, IoBuffer};

use crate::align::Alignment;

/// Smallest logical block size that Linux's file systems and devices use with O_DIRECT; the largest
/// is [`ALIGNMENT`], 4096.
const SMALLEST: usize = 512;

/// The alignment for a descriptor opened with O_DIRECT; `None` if the file does not support it.
pub(super) fn alignment(fd: impl AsFd, kind: FileKind) -> Option<Alignment> {
    let fd = fd.as_fd();
    if let Ok(stat) = statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
    {
        // Zero means no O_DIRECT on this file, for example because it is encrypted or its data is
        // journaled.
        return checked(u64::from(stat.stx_dio_offset_align), stat.stx_dio_mem_align as usize);
    }
    if kind == FileKind::BlockDevice
        && let Ok(block) = ioctl_blksszget(fd)
    {
        return checked(u64::from(block), block as usize);
    }
    let mut size = SMALLEST;
    while size <= ALIGNMENT {
        let mut buffer = IoBuffer::new(size);
        // Read at offset `size`, not 0, so that the offset's alignment is tried too. A read at the
        // end of the file also succeeds.
        if pread(fd, &mut buffer, size as i64).is_ok() {
            return checked(size as u64, size);
        }
        size *= 2;
    }
    None
}

/// Rejects a memory alignment above [`ALIGNMENT`], which buffers do not have. The offset's
/// alignment may be any power of two.
fn checked(offset: u64, memory: usize) -> Option<Alignment> {
    let usable = offset.is_power_of_two() && memory.is_power_of_two() && memory <= ALIGNMENT;
    usable.then_some(Alignment { offset, memory })
}
