//! What an image of a cluster does, between [`Rbd`](super::Rbd) and the library: the seam where the
//! real one, [`librbd`](super::librbd), has a twin in memory for tests.
//!
//! Each request takes a [`Place`], which its backend keeps until nothing of the request is under
//! way any more, whether somebody still waits for it or not; and likewise the memory. Errors are
//! those of Linux that the library reports.

#![allow(async_fn_in_trait, reason = "futures stay on the thread that polls them, so they need not be Send")]

use std::{fmt::Debug, ops::Range, sync::Arc};

use super::{bell::Bell, in_flight::Place};
use reactor::{buffer::Segments, error::Result};

/// What became of taking an image up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It is written to from here; its size in bytes.
    Ours(u64),
    /// Another client has its lock, and keeps it: its address, if that is known.
    Anothers(Option<String>),
}

/// What is asked of an image's library.
pub trait Backend: Debug + Send + Sync + 'static {
    /// Fills `target` with what is at `offset`; returns how many bytes that were.
    async fn read(&self, place: Place, offset: u64, target: Segments) -> (Result<usize>, Segments);
    /// Writes all of `data`.
    async fn write(&self, place: Place, offset: u64, data: Segments) -> Result<()>;
    /// Returns once all writes that have ended are on stable storage.
    async fn flush(&self, place: Place) -> Result<()>;
    /// Makes a range zero, allocated if `is_thick`.
    async fn write_zeroes(&self, place: Place, offset: u64, length: u64, is_thick: bool) -> Result<()>;
    /// Gives a range up.
    async fn discard(&self, place: Place, offset: u64, length: u64) -> Result<()>;
    /// Gives it another size.
    async fn resize(&self, size_bytes: u64) -> Result<()>;
    /// The size in bytes as the cluster has it now.
    async fn size_bytes(&self) -> Result<u64>;
    /// The same, asked of the cluster where this client is told of nothing: `ENOENT` where the
    /// image, or the snapshot, is no more. None where nobody can tell.
    async fn stored_size(&self) -> Result<Option<u64>>;
    /// What is allocated in a range, in order, at most so many pieces, of which the last may have
    /// more behind it; none where that is not known without looking at every object.
    async fn allocated(&self, range: Range<u64>, most: usize) -> Result<Option<Vec<Range<u64>>>>;
    /// Another client may write to it, and this one does not until it takes it up again. What the
    /// cache has was flushed.
    async fn give_up(&self) -> Result<()>;
    /// Takes it up, here or where another gave it up, and forgets what the cache has. First
    /// [`Backend::shut_out`] for these.
    async fn take_up(&self, heirs: &[u64]) -> Result<Taken>;
    /// Has the cluster take nothing more from those of these clients, by their numbers, that still
    /// have the image open to write to it, whatever of theirs is under way; a lock of theirs is
    /// free then. Never from this client.
    async fn shut_out(&self, clients: &[u64]) -> Result<()>;
    /// Rings once somebody has changed the image's size, or its snapshots: perhaps too often, never
    /// too seldom.
    fn bell(&self) -> &Arc<Bell>;
    /// Ends its use, once nothing is under way; others may have it then.
    async fn close(&self) -> Result<()>;
}
