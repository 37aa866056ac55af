//! qcow2, QEMU's copy-on-write format, implemented from its specification (QEMU's
//! docs/interop/qcow2.rst).
//!
//! ```text
//!   read, write, zero, status ─► lookup ─► l1 ─► cache ─► entry    maps guest offsets
//!          │                       │
//!          ▼                       ▼
//!   refcounts, overlap      writeback ─► file ─► header            allocates; orders metadata
//! ```
//!
//! - `header`, `entry`: encoding of the structures in the file. Pure.
//! - `open`: checks and reads before the first request. `metadata_io`: access to metadata for
//!   callers that do not open an image.
//! - `create`: the metadata of a new image.
//! - `compress`, `luks`: transformations of a cluster's bytes. Pure.
//! - `gate`: epochs of requests, so that clusters are reused and metadata is replaced only
//!   when no request uses them.
//! - `check`: consistency check and repair of an image that is not open.
//! - `snapshot`, `bitmap`: internal snapshots and dirty bitmaps.
//! - `fuzzing`: entry points of the fuzz targets.
//! - `handover`: use by several processes in turn.
//! - `drained`, `exclusive`: changes of the whole image while no request is in flight: `resize`,
//!   `preallocate`, and [`Qcow2Image::close`].
//! - `backing`, `populate`: the backing chain, which may change while the image is used.
//!
//! Lock order, for tasks that hold several: guard of the gate (`RequestGuard`), guest range, L2
//! table or slice, metadata writing, refcounts, file. The mutexes of `PendingMetadata` and of the
//! refcounts' state are innermost and held for nanoseconds.
//!
//! An image is hostile input: every offset, size and count is checked before use, and an
//! error names the structure and its offset.

pub mod amend;
mod backing;
mod big_endian;
pub mod bitmap;
mod cache;
mod cache_settings;
pub mod check;
pub mod compress;
pub mod create;
mod drained;
pub mod entry;
mod exclusive;
mod file;
pub mod fuzzing;
mod handover;
pub mod header;
mod header_change;
mod l1;
mod lookup;
pub mod luks;
mod metadata_io;
mod open;
mod overlap;
mod populate;
mod preallocate;
mod read;
mod refcount_entries;
mod refcounts;
mod resize;
pub mod snapshot;
mod status;
#[cfg(test)]
mod tests;
mod write;
mod writeback;
mod zero;

use std::{
    ops::Deref,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Release},
    },
};

use self::{backing::BackingLink, header::Qcow2Header};
pub use self::{
    cache::CacheStatistics,
    cache_settings::{CacheSettings, CacheSizes, InvalidCache, L2CacheSize},
    drained::ExclusiveImage,
    lookup::{GuestMapping, MappedRun},
    metadata_io::{MetadataError, read_header},
    open::{OpenFailure, Qcow2Components, Qcow2State},
    populate::{COPY_BYTES as POPULATE_BYTES, Populated},
    refcounts::RefcountStatistics,
};
use reactor::error::{Error, Result};
use storage::{BlockSize, Storage};

/// Description of an invalid structure and its location, as text for users.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidImage(String);

impl InvalidImage {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

/// An open image. Clones refer to the same image and the same backing image, which
/// [can be replaced](ExclusiveImage::replace_backing).
///
/// Requests may come from any worker. Changed metadata stays in memory until a flush,
/// so [`Qcow2Image::close`] must be the last call; otherwise unflushed changes are lost.
#[derive(Clone, Debug)]
pub struct Qcow2Image {
    state: Arc<Qcow2State>,
    /// What unallocated clusters are read from.
    below: Option<Arc<BackingLink>>,
    /// Number of changes of `below` until this one.
    generation: u64,
}

impl Deref for Qcow2Image {
    type Target = Qcow2State;

    fn deref(&self) -> &Qcow2State {
        &self.state
    }
}

impl Qcow2Image {
    /// Size of the virtual disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size.load(Acquire)
    }

    /// Current header in the file.
    pub fn header(&self) -> Qcow2Header {
        self.file.header()
    }

    /// True if writes fail: the image was opened read-only or found corrupt.
    pub fn is_read_only(&self) -> bool {
        self.read_only.load(Acquire) || self.file.is_corrupt()
    }

    /// Makes the image read-only for good. Everything must be in the file, as after
    /// [`Qcow2Image::write_for_handover`], and no change may be in flight.
    pub(crate) fn make_read_only(&self) {
        self.read_only.store(true, Release);
        // Bitmaps do not record any more: they are those of the file.
        self.invalidate_recording();
    }

    /// True if no cluster of the disk is allocated in this image: all content is that of the
    /// backing file, or zeroes.
    pub fn is_empty(&self) -> bool {
        self.l1.load().tables().next().is_none()
    }

    /// Format and storage, as text for logs.
    pub fn description(&self) -> String {
        format!("qcow2, {}", self.file.storage().description())
    }

    /// Request alignment. Below the preferred size, a cluster or subcluster, a first write
    /// copies the surrounding data.
    pub fn block_size(&self) -> BlockSize {
        let below = self.storage().block_size();
        let minimum =
            if self.cipher.is_some() { below.minimum.max(luks::SECTOR_BYTES as u32) } else { below.minimum };
        BlockSize { minimum, preferred: below.preferred.max(1 << self.shape.subcluster_bits()) }
    }

    /// True if zeroing whole clusters is faster than writing zeroes. Version 2 has no zero
    /// flag in its L2 entries.
    pub fn can_zero_fast(&self) -> bool {
        self.shape.version >= 3
    }

    /// Counters of the L2 cache.
    pub fn cache_statistics(&self) -> CacheStatistics {
        self.cache.load().statistics(self.slice_coverage(), self.size_bytes())
    }

    /// Counters of the refcount cache.
    pub fn refcount_statistics(&self) -> RefcountStatistics {
        self.refcounts.statistics()
    }

    /// Storage that holds guest data: the external data file, if there is one.
    pub fn storage(&self) -> &Storage {
        self.data.as_ref().unwrap_or(self.file.storage())
    }

    /// Files that are written to: the qcow2 file and the external data file.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Storage> {
        std::iter::once(self.file.storage()).chain(&self.data)
    }

    /// Image that unallocated clusters are read from.
    pub fn backing(&self) -> Option<&crate::Image> {
        self.shared_backing().map(|image| &**image)
    }

    pub(super) fn entry_bytes_bits(&self) -> u32 {
        self.slice_size_bits.load(Acquire) as u32
    }

    fn is_inside(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.size_bytes())
    }

    fn check_change(&self, offset: u64, length: u64) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        if self.is_inside(offset, length) { Ok(()) } else { Err(Error::INVALID) }
    }
}
