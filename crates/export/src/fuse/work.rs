//! A request that takes I/O, from when it was taken to its answer.
//!
//! Only data, and how it may be merged with others: `queue.rs` takes requests, `execute.rs` carries
//! them out, `told.rs` tells another process of them.

use policy::merge::{Candidate, Operation as Merging};
use reactor::buffer::Segments;
use storage::Durability;

use super::message::Operation;
use crate::intake::Mergeable;

/// A request that takes I/O.
pub(super) struct Incoming {
    pub(super) unique: u64,
    /// What it has of the disk's memory.
    pub(super) kept: usize,
    pub(super) work: Work,
}

pub(super) enum Work {
    /// Inside the disk, and not empty.
    Read { offset: u64, length: usize },
    /// Inside the disk, and not empty.
    Write { offset: u64, data: Segments, durability: Durability },
    /// From `offset` or from the disk's end on, and past that.
    Extend { offset: Option<u64>, data: Segments, durability: Durability, may_grow: bool },
    /// Anything that moves no data to or from the client.
    Other(Operation),
}

impl Work {
    /// That it brings.
    pub(super) fn data_bytes(&self) -> u64 {
        match self {
            Self::Write { data, .. } | Self::Extend { data, .. } => data.len() as u64,
            Self::Read { .. } | Self::Other(_) => 0,
        }
    }
}

impl Mergeable for Incoming {
    fn candidate(&self) -> Candidate {
        match &self.work {
            Work::Read { offset, length } => {
                Candidate { operation: Merging::Read, offset: *offset, length: *length as u64, key: 0 }
            }
            Work::Write { offset, data, durability } => Candidate {
                operation: Merging::Write,
                offset: *offset,
                length: data.len() as u64,
                key: u32::from(*durability == Durability::Synchronous),
            },
            Work::Extend { .. } | Work::Other(_) => {
                Candidate { operation: Merging::Barrier, offset: 0, length: 0, key: 0 }
            }
        }
    }
}
