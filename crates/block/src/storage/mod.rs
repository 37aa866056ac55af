//! Where bytes live. A storage reads, writes, flushes, zeroes and discards, and owns what the cache mode means.
//!
//! ```text
//!   fault ─► rate ─► delay ─► (file ─► align │ memory │ null │ simulated)
//!   wrappers, each optional      what is at the bottom
//! ```
//!
//! One enum rather than a trait object: the futures of the hot path then live inside the request's own task and cost no
//! allocation. Wrappers box the future of what they wrap, since they nest.
//!
//! Contract of every storage:
//! - Offsets and lengths are inside [`Storage::size_bytes`] and aligned to nothing; `align` sees to what the device wants.
//! - `read` fills the whole buffer, or fails. Holes read as zeroes.
//! - A write is visible to reads that start after it completed. It survives a crash once a later flush has completed, or at once
//!   if it was made with [`Durability::Synchronous`].
//! - Overlapping requests in flight may take effect in any order, but never change bytes outside their own range.

pub use crate::reactor::op::Durability;
use crate::{
    buffer::{Buffer, Segments},
    error::Result,
};

/// How zeroes may come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroOptions {
    /// The range may be deallocated, as long as it reads as zeroes afterwards.
    pub may_unmap: bool,
    /// Fail with [`Error::UNSUPPORTED`](crate::error::Error::UNSUPPORTED) at once if it would be no faster than writing.
    pub only_if_fast: bool,
    /// As for writes.
    pub durability: Durability,
}

/// A run of a disk that is alike: NBD's `base:allocation`, SEEK_HOLE and SEEK_DATA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes, never zero.
    pub length: u64,
    /// Nothing is allocated there.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

/// Storage of any kind.
#[derive(Debug)]
pub enum Storage {}
