//! What the FUSE device can do beyond reading and writing.

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
};

use super::op::Fd;

// FUSE_DEV_IOC_CLONE: `_IOR(229, 0, uint32_t)` of linux/fuse.h.
nix::ioctl_read!(clone_device, 229, 0, u32);

/// Makes `device`, which was just opened, another descriptor of the file system behind `first`:
/// each request is read from one of them, and answered there.
///
/// # Errors
/// As `ioctl(2)`: `EINVAL` where one of them is no FUSE device, or `device` has a file system.
pub fn clone_fuse_device(first: &Fd, device: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsFd as _;
    let mut number = u32::try_from(first.as_fd().as_raw_fd()).map_err(io::Error::other)?;
    // SAFETY: the kernel reads one number there; whatever the descriptors are, no memory of ours
    // is touched otherwise.
    unsafe { clone_device(device.as_raw_fd(), &raw mut number) }?;
    Ok(())
}
