//! A request that needs I/O, from its receipt to its reply.
//!
//! Only data, and the rules of merging: `queue.rs` receives requests, `execute.rs` executes them,
//! `encode.rs` encodes them for another process.

use policy::merge::{MergeCandidate, MergeOperation as Merging};
use reactor::buffer::Segments;
use storage::Durability;

use super::message::FuseOperation;
use crate::batch::Mergeable;

/// A request that needs I/O.
pub(super) struct FuseIncomingRequest {
    pub(super) unique: u64,
    /// Bytes of the disk's memory that are charged to it.
    pub(super) charged_bytes: usize,
    pub(super) work: FuseWork,
}

pub(super) enum FuseWork {
    /// Inside the disk, not empty.
    Read { offset: u64, length: usize },
    /// Inside the disk, not empty.
    Write { offset: u64, data: Segments, durability: Durability },
    /// Write from `offset`, or from the end of the disk, that extends past the end.
    Extend { offset: Option<u64>, data: Segments, durability: Durability, may_grow: bool },
    /// Any request that moves no data to or from the client.
    Other(FuseOperation),
}

impl FuseWork {
    /// Length of the data that the request carries.
    pub(super) fn data_bytes(&self) -> u64 {
        match self {
            Self::Write { data, .. } | Self::Extend { data, .. } => data.len() as u64,
            Self::Read { .. } | Self::Other(_) => 0,
        }
    }
}

impl Mergeable for FuseIncomingRequest {
    fn candidate(&self) -> MergeCandidate {
        match &self.work {
            FuseWork::Read { offset, length } => {
                MergeCandidate { operation: Merging::Read, offset: *offset, length: *length as u64, key: 0 }
            }
            FuseWork::Write { offset, data, durability } => MergeCandidate {
                operation: Merging::Write,
                offset: *offset,
                length: data.len() as u64,
                // Writes of different durability are not merged.
                key: u32::from(*durability == Durability::Synchronous),
            },
            FuseWork::Extend { .. } | FuseWork::Other(_) => {
                MergeCandidate { operation: Merging::Barrier, offset: 0, length: 0, key: 0 }
            }
        }
    }
}
