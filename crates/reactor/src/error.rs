//! Why a request failed, as clients are told: an error number of Linux's, with its usual name.
//!
//! Small and `Copy`, because it travels with every request; what else is known is logged where the
//! error arises.

use std::io;

/// The outcome of a request on its way back.
pub type Result<T> = std::result::Result<T, Error>;

/// A request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", io::Error::from_raw_os_error(*.0))]
pub struct Error(i32);

impl Error {
    /// The device or file system reported an I/O error, or delivered less than it should have.
    pub const IO: Self = Self(libc::EIO);
    /// The request makes no sense: beyond the end, not aligned, contradictory.
    pub const INVALID: Self = Self(libc::EINVAL);
    /// No room on the device or file system, or a write beyond the end.
    pub const NO_SPACE: Self = Self(libc::ENOSPC);
    /// Not permitted: a write to a read-only disk.
    pub const NOT_PERMITTED: Self = Self(libc::EPERM);
    /// The storage cannot do this (fast).
    pub const UNSUPPORTED: Self = Self(libc::EOPNOTSUPP);
    /// Memory of a guest's that the data is in, or is wanted in, is not there any more.
    pub const FAULT: Self = Self(libc::EFAULT);
    /// The disk is going away.
    pub const SHUTDOWN: Self = Self(libc::ESHUTDOWN);
    /// It takes longer than it may.
    pub const TIMED_OUT: Self = Self(libc::ETIMEDOUT);

    /// From an error number of Linux's, e.g. one that a fault rule names.
    pub const fn from_errno(errno: i32) -> Self {
        Self(errno)
    }

    /// The error number.
    pub const fn errno(self) -> i32 {
        self.0
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// What to do about an error of the system that says that descriptors ran out (`EMFILE`, `ENFILE`);
/// `None` of another.
pub fn what_gives_descriptors(error: &io::Error) -> Option<&'static str> {
    match error.raw_os_error()? {
        libc::EMFILE => Some("let it have more descriptors: `ulimit -n`, or LimitNOFILE= of its service"),
        libc::ENFILE => Some("let the system have more descriptors: `sysctl fs.file-max`"),
        _ => None,
    }
}
