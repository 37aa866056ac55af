//! The eight error numbers of NBD, and the mapping from errors of Linux.
//!
//! "Error values" fixes the numbers on the wire. Most equal Linux's; nothing here relies on that.

/// An error of the protocol ("Error values").
#[allow(missing_docs, reason = "the specification explains its own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted: a write to a read-only export.
    Perm = 1,
    Io = 5,
    /// "Error values" asks servers to avoid it.
    NoMem = 12,
    /// The request is malformed, in the wrong phase or outside the export.
    Inval = 22,
    /// Also a write past the end.
    NoSpc = 28,
    /// The request is longer than a reply can be.
    Overflow = 75,
    /// Only for WRITE_ZEROES with FAST_ZERO: zeroing would not be fast.
    NotSup = 95,
    Shutdown = 108,
}

impl Errno {
    /// Number on the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Error for any request except WRITE_ZEROES with FAST_ZERO. Errors that the specification does
    /// not mention become EIO, so that a client never takes a disk failure for its own mistake.
    pub const fn from_linux(raw: i32) -> Self {
        match raw {
            libc::EPERM | libc::EACCES | libc::EROFS => Self::Perm,
            libc::ENOMEM => Self::NoMem,
            // ENOTSUP is reserved for fast zeroing, so a missing operation becomes EINVAL.
            libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS => Self::Inval,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpc,
            libc::EOVERFLOW => Self::Overflow,
            libc::ESHUTDOWN => Self::Shutdown,
            _ => Self::Io,
        }
    }

    /// [`Errno::from_linux`] for WRITE_ZEROES with FAST_ZERO, the only request that may be answered
    /// "not supported".
    pub const fn from_linux_fast_zero(raw: i32) -> Self {
        match raw {
            libc::EOPNOTSUPP | libc::ENOSYS => Self::NotSup,
            _ => Self::from_linux(raw),
        }
    }
}

#[cfg(test)]
mod tests {
    use nbd::proto::to_linux;

    use super::*;

    #[test]
    fn linux_errors_become_the_specified_ones() {
        for (raw, expected) in [
            (libc::EROFS, Errno::Perm),
            (libc::EDQUOT, Errno::NoSpc),
            (libc::EFBIG, Errno::NoSpc),
            (libc::EOPNOTSUPP, Errno::Inval),
            (libc::ETIMEDOUT, Errno::Io),
            (0, Errno::Io),
            (-5, Errno::Io),
        ] {
            assert_eq!(Errno::from_linux(raw), expected, "errno {raw}");
        }
    }

    #[test]
    fn not_supported_is_only_for_fast_zero() {
        assert_eq!(Errno::from_linux_fast_zero(libc::EOPNOTSUPP), Errno::NotSup);
        assert_eq!(Errno::from_linux_fast_zero(libc::ENOSPC), Errno::NoSpc);
        assert_eq!(Errno::from_linux(libc::EOPNOTSUPP), Errno::Inval);
    }

    #[test]
    fn codes_match_the_specification() {
        for (errno, code, raw) in [
            (Errno::Perm, 1, libc::EPERM),
            (Errno::Io, 5, libc::EIO),
            (Errno::NoMem, 12, libc::ENOMEM),
            (Errno::Inval, 22, libc::EINVAL),
            (Errno::NoSpc, 28, libc::ENOSPC),
            (Errno::Overflow, 75, libc::EOVERFLOW),
            (Errno::Shutdown, 108, libc::ESHUTDOWN),
        ] {
            assert_eq!((Errno::from_linux(raw), errno.code(), to_linux(code)), (errno, code, raw));
        }
        assert_eq!((Errno::NotSup.code(), to_linux(95)), (95, libc::EOPNOTSUPP));
        assert_eq!(to_linux(77), libc::EINVAL);
    }
}
