//! Recordings: what disks were asked, how long each request took, and which limits were in force.
//!
//! ```text
//!   file      mark, block, block, …
//!   mark      skippable frame: "weir recording 2\n", the clock of time 0: nanoseconds since 1970 (8 bytes)
//!   block     skippable frame: bytes of the next one (4 bytes); frame of zstd with a checksum
//!   in there  0, then: requests lost before it, names of disks, names of limits, requests, shift, columns
//!             1, then: changes of limits (`limits.rs`)
//!   column    bytes, then a number for each request
//! ```
//!
//! A version 1 has no changes of limits, and its blocks lack the number that they begin with. It is
//! read and no longer written. A file of a newer version, and a block that begins with another
//! number, are refused.
//!
//! All frames are those of RFC 8878, so `zstd -t` tests a recording; skippable ones have the magic
//! number 0x184D2A57.
//! Numbers are little-endian: those without a size are LEB128, 7 bits a byte, the lowest first. A
//! name is its length and its bytes. The columns, in their order:
//!
//! | Column | For each request |
//! | --- | --- |
//! | arrival | nanoseconds since the one before, the first since time 0 |
//! | wait | nanoseconds until its limits had let it pass and it went on |
//! | service | nanoseconds from then until it was complete |
//! | offset | its distance from the end of the disk's last request in the block (zigzag), shifted right |
//! | length | in bytes, shifted right |
//! | kind | 0 flush, 1 read, 2 write, 3 discard, 4 zeroes; and 8 if it failed, 16 if its wait and service were not measured and are 0 |
//! | disk | its place among the names |
//! | limit | 0, or 1 and the place of the name of that which it waited for last |
//!
//! Nothing is taken from a block that is cut off, or whose checksum is wrong, and nothing behind it
//! is looked for. Requests are in the order of their arrival within a block; across
//! blocks they may be as late as the longest request took.

mod block;
mod limits;
mod read;
mod write;

pub use limits::{LimitChange, LimitOwner};
pub(super) use read::is_beginning;
pub use read::{Blocks, Told};
pub use write::Writer;

pub use super::record::Op;

/// A request of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Nanoseconds since the recording's time 0.
    pub arrival_ns: u64,
    /// `None` where nobody measured them.
    pub times: Option<Times>,
    /// Bytes.
    pub offset: u64,
    /// In bytes; 0 only for a flush.
    pub length: u64,
    /// What it did.
    pub op: Op,
    /// Whether it ended with an error.
    pub has_failed: bool,
    /// Its place among the names of disks.
    pub disk: u32,
    /// What it waited for last: its place among the names of limits.
    pub limit: Option<u32>,
}

/// How long a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Nanoseconds until its limits let it pass.
    pub wait_ns: u64,
    /// Nanoseconds from then until it was complete.
    pub service_ns: u64,
}

impl Times {
    /// Both together, in nanoseconds.
    pub fn latency_ns(self) -> u64 {
        self.wait_ns.saturating_add(self.service_ns)
    }
}

/// How every recording begins, behind the head of a skippable frame. The version follows.
const MAGIC: &[u8] = b"weir recording ";
/// Version that is written.
const VERSION: u8 = 2;
/// Kind of a block: its first number since version 2.
const REQUESTS: u64 = 0;
const LIMITS: u64 = 1;
/// The magic number of a skippable frame (RFC 8878, section 3.1.2), one of sixteen.
const SKIPPABLE: [u8; 4] = 0x184D_2A57_u32.to_le_bytes();

/// Requests of a block.
const MOST_ENTRIES: usize = 1 << 16;
/// Bytes of a block before it is compressed.
const MOST_BYTES: usize = 16 << 20;
/// Names of each kind in a block.
const MOST_NAMES: usize = 1 << 16;

/// Decodes a decompressed block of each version, for the fuzz target: a decoded block is encoded
/// and decoded to the same.
pub(super) fn check_block(bytes: &[u8]) {
    for version in 1..=VERSION {
        let Some(content) = read::Content::decode(bytes, version) else { continue };
        let mut again = Vec::new();
        match &content {
            read::Content::Requests(block) => {
                if version > 1 {
                    block::push(&mut again, REQUESTS);
                }
                block.encode(&mut again);
            }
            read::Content::Limits(changes) => {
                block::push(&mut again, LIMITS);
                limits::encode(changes, &mut again);
            }
        }
        assert!(read::Content::decode(&again, version).as_ref() == Some(&content), "another block");
    }
}

#[cfg(test)]
mod tests;
