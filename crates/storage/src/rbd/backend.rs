//! Operations of an image of a cluster: the interface between [`RbdStorage`](super::RbdStorage) and
//! the library, [`librbd`](super::librbd), which tests replace by an in-memory fake.
//!
//! The backend keeps a request's slot ([`RbdRequestSlot`]) and memory until nothing of the request
//! is in flight, even after its caller was cancelled. Errors are the Linux error numbers that the
//! library reports.

#![allow(async_fn_in_trait, reason = "futures stay on the thread that polls them, so they need not be Send")]

use std::{fmt::Debug, ops::Range, sync::Arc};

use super::{resize_notifier::ResizeNotifier, slots::RbdRequestSlot};
use reactor::{buffer::Segments, error::Result};

/// Result of resuming an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResumeOutcome {
    /// This client may write to it; its size in bytes.
    Resumed(u64),
    /// Another client holds its lock and keeps it: its address, if known.
    LockedElsewhere(Option<String>),
}

/// Operations of an image.
pub trait RbdBackend: Debug + Send + Sync + 'static {
    /// Reads at `offset` into `target`; returns the number of bytes read.
    async fn read(&self, slot: RbdRequestSlot, offset: u64, target: Segments) -> (Result<usize>, Segments);
    /// Writes all of `data`.
    async fn write(&self, slot: RbdRequestSlot, offset: u64, data: Segments) -> Result<()>;
    /// Returns once all writes that have completed are on stable storage.
    async fn flush(&self, slot: RbdRequestSlot) -> Result<()>;
    /// Zeroes a range; allocates it if `is_thick`.
    async fn write_zeroes(
        &self,
        slot: RbdRequestSlot,
        offset: u64,
        length: u64,
        is_thick: bool,
    ) -> Result<()>;
    /// Discards a range.
    async fn discard(&self, slot: RbdRequestSlot, offset: u64, length: u64) -> Result<()>;
    /// Resizes the image.
    async fn resize(&self, size_bytes: u64) -> Result<()>;
    /// Current size in bytes, as this client knows it from notifications.
    async fn size_bytes(&self) -> Result<u64>;
    /// Size read from the cluster, for clients that receive no notifications; `ENOENT` if the
    /// image, or the snapshot, no longer exists. `None` if the cluster cannot report it.
    async fn stored_size(&self) -> Result<Option<u64>>;
    /// Allocated pieces of a range, in order, at most `max_pieces`; a full list may be truncated.
    /// `None` if they can only be found by a query of every object.
    async fn allocated(&self, range: Range<u64>, max_pieces: usize) -> Result<Option<Vec<Range<u64>>>>;
    /// Releases the lock, so that another client may write; this one does not until it resumes. The
    /// cache was flushed before.
    async fn release_lock(&self) -> Result<()>;
    /// Resumes the image after this or another client released it, and drops the cache. First calls
    /// [`RbdBackend::blocklist`] for `new_clients`.
    async fn resume(&self, new_clients: &[u64]) -> Result<ResumeOutcome>;
    /// Blocklists those of these clients, by number, that still have the image open for writing.
    /// Their operations in flight do not take effect, and their lock is free. Never this client.
    async fn blocklist(&self, clients: &[u64]) -> Result<()>;
    /// Notification that a client may have changed the image's size or snapshots. It may be
    /// spurious, but is never missed.
    fn resize_notifier(&self) -> &Arc<ResizeNotifier>;
    /// Closes the image, once nothing is in flight; other clients may open it then.
    async fn close(&self) -> Result<()>;
}
