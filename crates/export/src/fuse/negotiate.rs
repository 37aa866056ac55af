//! INIT: what the kernel can do, and what of it we want.
//!
//! The disk's data is kept once, by whoever serves the image: so files are opened for direct I/O
//! ([`OPEN_FLAGS`]), and the page cache holds only what is mapped.

use super::message::{Init, InitReply, MAJOR};

/// Bytes of a request at most: as much as the kernel does at a time, 256 pages of 4 KiB.
pub const MOST_BYTES: u32 = 1 << 20;
const PAGE_BYTES: u32 = 4096;
/// Since 7.28 (Linux 4.20) the reply says how many pages a request may have. weir needs Linux 6.1,
/// whose number is 7.37.
const LEAST_MINOR: u32 = 28;
/// That with `FUSE_DIRECT_IO_ALLOW_MMAP`.
const NEWEST_MINOR: u32 = 39;
/// Requests that nobody waits for (asynchronous direct I/O), at a time. The kernel's default of 12
/// is a disk's queue of 12.
const MOST_IN_BACKGROUND: u16 = 256;

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

/// `FOPEN_DIRECT_IO`, and `FOPEN_PARALLEL_DIRECT_WRITES` (since 6.2; ignored before): a disk keeps
/// no order between writes that are in flight at the same time.
pub(super) const OPEN_FLAGS: u32 = 1 | 1 << 6;

/// How to answer INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is agreed.
    Agreed(InitReply),
    /// The kernel is to ask again, in our version.
    AskAgain(InitReply),
    /// It is too old.
    TooOld,
}

/// Answers INIT.
pub fn negotiate(init: &Init) -> Answer {
    if init.major > MAJOR {
        return Answer::AskAgain(InitReply { minor: NEWEST_MINOR, ..InitReply::default() });
    }
    if init.major < MAJOR || init.minor < LEAST_MINOR {
        return Answer::TooOld;
    }
    Answer::Agreed(InitReply {
        minor: init.minor.min(NEWEST_MINOR),
        max_readahead: init.max_readahead,
        flags: init.flags & WANTED,
        max_background: MOST_IN_BACKGROUND,
        max_write: MOST_BYTES,
        max_pages: (MOST_BYTES / PAGE_BYTES) as u16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn init(major: u32, minor: u32, flags: u64) -> Init {
        Init { major, minor, max_readahead: 1 << 17, flags }
    }

    #[test]
    fn only_what_both_sides_know_is_agreed() {
        let Answer::Agreed(reply) = negotiate(&init(7, 45, u64::MAX)) else { panic!("it is new enough") };
        assert_eq!((reply.minor, reply.flags), (NEWEST_MINOR, WANTED));
        let Answer::Agreed(reply) = negotiate(&init(7, 37, flag::MAX_PAGES | 1 << 60)) else {
            panic!("it is new enough")
        };
        assert_eq!((reply.minor, reply.flags, reply.max_pages), (37, flag::MAX_PAGES, 256));
    }

    #[test]
    fn other_versions_ask_again_or_are_refused() {
        assert!(matches!(negotiate(&init(8, 0, 0)), Answer::AskAgain(_)));
        assert_eq!(negotiate(&init(6, 40, 0)), Answer::TooOld);
        assert_eq!(negotiate(&init(7, 27, 0)), Answer::TooOld);
    }
}
