//! Cloning of FUSE device descriptors (`linux/fuse.h`).

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use super::operation::Fd;

/// FUSE_DEV_IOC_CLONE: `_IOR(229, 0, uint32_t)` of linux/fuse.h.
const CLONE: u32 = nix::request_code_read!(229, 0, size_of::<u32>()) as u32;

/// Connects `device`, which was just opened, to the file system of `first`. Each request is read
/// from one of the descriptors and must be answered on it.
///
/// # Errors
/// As `ioctl(2)`: `EINVAL` if one of them is not a FUSE device, or `device` already has a file
/// system.
pub fn clone_fuse_device(first: &Fd, device: &OwnedFd) -> io::Result<()> {
    let number = first.as_fd().as_raw_fd().unsigned_abs();
    // SAFETY: the kernel reads one number from `number`; whatever the descriptors are, it accesses
    // no other memory of the process.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), CLONE.into(), &raw const number) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
