//! The eight error numbers NBD knows, and which of them an error of Linux becomes.
//!
//! The wire's numbers are fixed by "Error values"; that most equal Linux's is a coincidence nothing
//! here relies on.

/// An error of the protocol ("Error values").
#[allow(missing_docs, reason = "the specification explains its own names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted: a write to a read-only export.
    Perm = 1,
    Io = 5,
    /// The specification asks servers to avoid it.
    NoMem = 12,
    /// The request is malformed, out of place or outside the export.
    Inval = 22,
    /// Also a write past the end.
    NoSpc = 28,
    /// Longer than can be answered.
    Overflow = 75,
    /// Only for WRITE_ZEROES with FAST_ZERO: it would not be fast.
    NotSup = 95,
    Shutdown = 108,
}

impl Errno {
    /// On the wire.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// What a raw Linux `errno` becomes, for any request but WRITE_ZEROES with FAST_ZERO.
    ///
    /// What the specification does not mention is an I/O error, so that a client never mistakes a
    /// fault of the disk for one of its own.
    pub const fn from_linux(raw: i32) -> Self {
        match raw {
            libc::EPERM | libc::EACCES | libc::EROFS => Self::Perm,
            libc::ENOMEM => Self::NoMem,
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

/// What a number on the wire means to a client; EINVAL where it is not known ("Error values").
pub const fn to_linux(code: u32) -> i32 {
    match code {
        1 => libc::EPERM,
        5 => libc::EIO,
        12 => libc::ENOMEM,
        28 => libc::ENOSPC,
        75 => libc::EOVERFLOW,
        95 => libc::EOPNOTSUPP,
        108 => libc::ESHUTDOWN,
        _ => libc::EINVAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_errors_become_the_specified_ones() {
        for (raw, expected) in [
            (libc::EPERM, Errno::Perm),
            (libc::EROFS, Errno::Perm),
            (libc::EIO, Errno::Io),
            (libc::ENOMEM, Errno::NoMem),
            (libc::EINVAL, Errno::Inval),
            (libc::ENOSPC, Errno::NoSpc),
            (libc::EDQUOT, Errno::NoSpc),
            (libc::EFBIG, Errno::NoSpc),
            (libc::EOVERFLOW, Errno::Overflow),
            (libc::EOPNOTSUPP, Errno::Inval),
            (libc::ESHUTDOWN, Errno::Shutdown),
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
    fn a_client_understands_what_the_server_means() {
        for raw in [
            libc::EPERM,
            libc::EIO,
            libc::ENOMEM,
            libc::EINVAL,
            libc::ENOSPC,
            libc::EOVERFLOW,
            libc::ESHUTDOWN,
        ] {
            assert_eq!(to_linux(Errno::from_linux(raw).code()), raw);
        }
        assert_eq!(to_linux(Errno::NotSup.code()), libc::EOPNOTSUPP);
        assert_eq!(to_linux(77), libc::EINVAL);
    }

    #[test]
    fn codes_are_the_specification_s() {
        let all = [
            Errno::Perm,
            Errno::Io,
            Errno::NoMem,
            Errno::Inval,
            Errno::NoSpc,
            Errno::Overflow,
            Errno::NotSup,
            Errno::Shutdown,
        ];
        assert_eq!(all.map(Errno::code), [1, 5, 12, 22, 28, 75, 95, 108]);
    }
}
