//! Several descriptors of one FUSE file system (`linux/fuse.h`).

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
};

use super::op::Fd;

/// FUSE_DEV_IOC_CLONE: `_IOR(229, 0, uint32_t)` of linux/fuse.h.
const CLONE: u32 = nix::request_code_read!(229, 0, size_of::<u32>()) as u32;

/// Makes `device`, which was just opened, another descriptor of the file system behind `first`:
/// each request is read from one of them, and answered there.
///
/// # Errors
/// As `ioctl(2)`: `EINVAL` where one of them is no FUSE device, or `device` has a file system.
pub fn clone_fuse_device(first: &Fd, device: &OwnedFd) -> io::Result<()> {
    let number = first.as_fd().as_raw_fd().unsigned_abs();
    // SAFETY: the kernel reads one number, from `number`; whatever the descriptors are, it touches
    // no other memory of ours.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), CLONE.into(), &raw const number) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
