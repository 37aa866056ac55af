//! INIT: negotiation of the protocol's version and features.
//!
//! The process that serves the image is the only cache of its data: files are opened for direct I/O
//! ([`OPEN_FLAGS`]), and the page cache only holds mapped pages.

use super::message::{Init, InitReply, MAJOR};

/// Longest request in bytes: the kernel's own bound, 256 pages of 4 KiB.
pub const MAX_REQUEST_BYTES: u32 = 1 << 20;
const PAGE_BYTES: u32 = 4096;
/// Since 7.28 (Linux 4.20) the reply has the number of pages of a request. weir needs Linux 6.1,
/// which has 7.37.
const MIN_MINOR: u32 = 28;
/// The version with `FUSE_DIRECT_IO_ALLOW_MMAP`.
const NEWEST_MINOR: u32 = 39;
/// Number of background requests (asynchronous direct I/O) at a time. The kernel's default of 12
/// would limit the disk's queue depth to 12.
const MAX_BACKGROUND_REQUESTS: u16 = 256;

/// `FUSE_…` of INIT.
mod flag {
    pub(super) const ASYNC_READ: u64 = 1;
    pub(super) const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub(super) const BIG_WRITES: u64 = 1 << 5;
    pub(super) const ASYNC_DIO: u64 = 1 << 15;
    pub(super) const MAX_PAGES: u64 = 1 << 22;
    pub(super) const INIT_EXT: u64 = 1 << 30;
    /// Shared mappings of a file that is open for direct I/O; Linux 6.6.
    pub(super) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

const WANTED: u64 = flag::ASYNC_READ
    | flag::ATOMIC_O_TRUNC
    | flag::BIG_WRITES
    | flag::ASYNC_DIO
    | flag::MAX_PAGES
    | flag::INIT_EXT
    | flag::DIRECT_IO_ALLOW_MMAP;

/// `FOPEN_DIRECT_IO`, and `FOPEN_PARALLEL_DIRECT_WRITES` (since 6.2; ignored before): a disk does
/// not order writes that are in flight together.
pub(super) const OPEN_FLAGS: u32 = 1 | 1 << 6;

/// Result of the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InitOutcome {
    /// Success.
    Agreed(InitReply),
    /// The kernel has a newer major version and has to repeat INIT with the version of the reply.
    RetryVersion(InitReply),
    /// The kernel is too old.
    TooOld,
}

/// Negotiates a reply to INIT.
pub fn negotiate(init: &Init) -> InitOutcome {
    if init.major > MAJOR {
        // A newer kernel repeats INIT with the version of this reply (fuse.h, "Version
        // negotiation").
        return InitOutcome::RetryVersion(InitReply { minor: NEWEST_MINOR, ..InitReply::default() });
    }
    if init.major < MAJOR || init.minor < MIN_MINOR {
        return InitOutcome::TooOld;
    }
    InitOutcome::Agreed(InitReply {
        minor: init.minor.min(NEWEST_MINOR),
        max_readahead: init.max_readahead,
        flags: init.flags & WANTED,
        max_background: MAX_BACKGROUND_REQUESTS,
        max_write: MAX_REQUEST_BYTES,
        max_pages: (MAX_REQUEST_BYTES / PAGE_BYTES) as u16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(major: u32, minor: u32, flags: u64) -> Init {
        Init { major, minor, max_readahead: 1 << 17, flags }
    }

    #[test]
    fn only_common_features_are_negotiated() {
        let InitOutcome::Agreed(reply) = negotiate(&init(7, 45, u64::MAX)) else {
            panic!("it is new enough")
        };
        assert_eq!((reply.minor, reply.flags), (NEWEST_MINOR, WANTED));
        let InitOutcome::Agreed(reply) = negotiate(&init(7, 37, flag::MAX_PAGES | 1 << 60)) else {
            panic!("it is new enough")
        };
        assert_eq!((reply.minor, reply.flags, reply.max_pages), (37, flag::MAX_PAGES, 256));
    }

    #[test]
    fn newer_major_versions_renegotiate_and_older_ones_are_rejected() {
        assert!(matches!(negotiate(&init(8, 0, 0)), InitOutcome::RetryVersion(_)));
        assert_eq!(negotiate(&init(6, 40, 0)), InitOutcome::TooOld);
        assert_eq!(negotiate(&init(7, 27, 0)), InitOutcome::TooOld);
    }
}
