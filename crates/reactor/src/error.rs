//! The error of a request as reported to clients: a Linux error number.
//!
//! Small and `Copy`, because it is returned with every request. Details are logged at the origin.

use std::io;

/// Result of a request.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", io::Error::from_raw_os_error(*.0))]
pub struct Error(i32);

impl Error {
    /// The device or file system reported an I/O error, or returned less data than requested.
    pub const IO: Self = Self(libc::EIO);
    /// The request is invalid: beyond the end, not aligned, contradictory.
    pub const INVALID: Self = Self(libc::EINVAL);
    /// No space on the device or file system, or a write beyond the end.
    pub const NO_SPACE: Self = Self(libc::ENOSPC);
    /// Not permitted: a write to a read-only disk.
    pub const NOT_PERMITTED: Self = Self(libc::EPERM);
    /// The storage does not support this (fast).
    pub const UNSUPPORTED: Self = Self(libc::EOPNOTSUPP);
    /// The guest's memory for the data was unmapped.
    pub const FAULT: Self = Self(libc::EFAULT);
    /// The disk is being removed.
    pub const SHUTDOWN: Self = Self(libc::ESHUTDOWN);
    /// The operation exceeded its time limit.
    pub const TIMED_OUT: Self = Self(libc::ETIMEDOUT);

    /// An error with a Linux error number, such as one that a fault rule specifies.
    pub const fn from_errno(errno: i32) -> Self {
        Self(errno)
    }

    /// The Linux error number.
    pub const fn errno(self) -> i32 {
        self.0
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Remedy for an error caused by a lack of file descriptors (`EMFILE`, `ENFILE`); `None` for any
/// other error.
pub fn descriptor_remedy(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        libc::EMFILE => {
            Some("raise the descriptor limit of the process: `ulimit -n`, or LimitNOFILE= of its service")
        }
        libc::ENFILE => Some("raise the descriptor limit of the system: `sysctl fs.file-max`"),
        _ => None,
    }
}
