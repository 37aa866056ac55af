//! Recordings: the requests of disks, their waiting and service times, and the limits in force.
//!
//! ```text
//!   file      mark, block, block, …
//!   mark      skippable frame: "weir recording 2\n", the clock at time 0: nanoseconds since 1970 (8 bytes)
//!   block     skippable frame: length of the next one (4 bytes); frame of zstd with a checksum
//!   content   0, then: requests lost before it, names of disks, names of limits, requests, shift, columns
//!             1, then: changes of limits (`limits.rs`)
//!   column    length in bytes, then a number for each request
//! ```
//!
//! Version 1 has no changes of limits, and its blocks lack the leading number. It is read but no
//! longer written. Files of newer versions, and blocks with another leading number, are rejected.
//!
//! All frames are those of RFC 8878, so `zstd -t` tests a recording; skippable ones have the magic
//! number 0x184D2A57. Numbers are little-endian; those without a size are LEB128: 7 bits a byte,
//! least significant first. A name is its length and its bytes. The columns, in order:
//!
//! | Column | For each request |
//! | --- | --- |
//! | arrival | nanoseconds since the previous one, for the first since time 0 |
//! | wait | nanoseconds until its limits admitted it |
//! | service | nanoseconds from then until it completed |
//! | offset | distance from the end of the disk's previous request (zigzag), shifted right |
//! | length | in bytes, shifted right |
//! | kind | 0 flush, 1 read, 2 write, 3 discard, 4 zeroes; plus 8 if it failed, 16 if unmeasured |
//! | disk | index into the names of disks |
//! | limit | 0, or 1 plus the index of the name of the limit that it waited for last |
//!
//! The previous request is the one in the same block; the first of a disk counts from 0. An
//! unmeasured request has 0 for wait and service.
//!
//! A truncated block, or one with a wrong checksum, is not used, and nothing after it is searched.
//! Requests are in order of arrival within a block; across blocks they may be late by up to the
//! duration of the longest request.

mod block;
mod limits;
mod read;
mod write;

pub use limits::{LimitChange, LimitOwner};
pub(super) use read::is_beginning;
pub use read::{RecordedRequest, RecordingReader};
pub use write::RecordingWriter;

pub use super::record::RequestOp;

/// A request of a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordingEntry {
    /// Arrival in nanoseconds since time 0 of the recording.
    pub arrival_ns: u64,
    /// Waiting and service time; `None` if they were not measured.
    pub times: Option<RecordedTimes>,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes; 0 only for a flush.
    pub length: u64,
    /// Operation.
    pub op: RequestOp,
    /// True if the request failed.
    pub has_failed: bool,
    /// Index into the names of disks.
    pub disk: u32,
    /// Limit that it waited for last: index into the names of limits.
    pub limit: Option<u32>,
}

/// Durations of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordedTimes {
    /// Nanoseconds until its limits admitted it.
    pub wait_ns: u64,
    /// Nanoseconds from admission to completion.
    pub service_ns: u64,
}

impl RecordedTimes {
    /// Nanoseconds from arrival to completion.
    pub fn latency_ns(self) -> u64 {
        self.wait_ns.saturating_add(self.service_ns)
    }
}

// Start of every recording, after the head of a skippable frame. The version follows.
const MAGIC: &[u8] = b"weir recording ";
// Version that is written.
const VERSION: u8 = 2;
// Type of a block: its first number since version 2.
const REQUESTS: u64 = 0;
const LIMITS: u64 = 1;
// Magic number of a skippable frame (RFC 8878, section 3.1.2), one of sixteen.
const SKIPPABLE: [u8; 4] = 0x184D_2A57_u32.to_le_bytes();

// Limit of requests in a block.
const MAX_ENTRIES: usize = 1 << 16;
// Size limit of a block before compression, in bytes.
const MAX_BYTES: usize = 16 << 20;
// Limit of names of each kind in a block.
const MAX_NAMES: usize = 1 << 16;

/// Decodes a decompressed block as each version, for the fuzz target. A block that decodes must
/// encode to the same block.
pub(super) fn check_block(bytes: &[u8]) {
    for version in 1..=VERSION {
        let Some(content) = read::BlockContent::decode(bytes, version) else { continue };
        let mut encoded = Vec::new();
        match &content {
            read::BlockContent::Requests(block) => {
                if version > 1 {
                    block::push_column(&mut encoded, REQUESTS);
                }
                block.encode(&mut encoded);
            }
            read::BlockContent::Limits(changes) => {
                block::push_column(&mut encoded, LIMITS);
                limits::encode(changes, &mut encoded);
            }
        }
        assert!(read::BlockContent::decode(&encoded, version).as_ref() == Some(&content), "another block");
    }
}

#[cfg(test)]
mod tests;
