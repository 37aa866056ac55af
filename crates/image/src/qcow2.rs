//! qcow2, QEMU's copy-on-write format: written from its specification (QEMU's
//! docs/interop/qcow2.rst).
//!
//! ```text
//!   read, write, zero, status ─► lookup ─► l1 ─► cache ─► entry      where a guest's bytes are
//!          │                       │
//!          ▼                       ▼
//!   refcounts, overlap      writeback ─► file ─► header              what is free; what is written, and when
//! ```
//!
//! - `header`, `entry`: the numbers in the file, and what they mean. Pure.
//! - `open`: what is checked and read before the first request. `bytes`: the same for callers that
//!   do not open an image.
//! - `create`: the metadata of a new image.
//! - `compress`, `luks`: how a cluster's bytes are changed on their way. Pure.
//! - `gate`: who is inside, so that nothing is reused or changed as a whole while requests use it.
//! - `check`: whether an image is consistent, and repairs, without opening it.
//! - `snapshot`, `bitmap`: what else an image keeps.
//! - `fuzzing`: what the fuzz targets do with images of any bytes.
//! - `handover`: another process has the image for a while.
//! - `quiet`: changes to an image as a whole, with nobody inside; `resize`, `preallocate`,
//!   `backing`, and the end, [`Qcow2::close`].
//!
//! Order of locks, of which a task may hold several: pass of the gate, guest range, L2 table or
//! slice, writing, refcounts, file. `Pending` and the state of the refcounts are held for
//! nanoseconds, inside all of them.
//!
//! An image is hostile input: every offset, size and count is checked before it is used, and an
//! error names the place.

pub mod amend;
mod backing;
mod big_endian;
pub mod bitmap;
mod bytes;
mod cache;
mod cache_settings;
pub mod check;
pub mod compress;
pub mod create;
pub mod entry;
mod file;
pub mod fuzzing;
mod gate;
mod handover;
pub mod header;
mod header_change;
mod l1;
mod lookup;
pub mod luks;
mod numbers;
mod open;
mod overlap;
mod preallocate;
mod quiet;
mod read;
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
    sync::{Arc, atomic::Ordering::Acquire},
};

use self::header::Header;
pub use self::{
    bytes::{MetadataError, read_header},
    cache::CacheStatistics,
    cache_settings::{CacheSettings, CacheSizes, InvalidCache, L2Size},
    lookup::{Piece, What},
    open::{OpenFailure, Opened, Parts},
    refcounts::RefcountStatistics,
};
use reactor::error::{Error, Result};
use storage::{BlockSize, Storage};

/// What is wrong with an image, and where: for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

impl Invalid {
    pub(crate) fn new(what: impl Into<String>) -> Self {
        Self(what.into())
    }
}

/// An open image. Clones are the same image.
///
/// Requests come from any worker, and take `&self`. Metadata that they change stays in memory until
/// a flush; so [`Qcow2::close`] must be the last thing that is done with it, or what was not
/// flushed is lost.
#[derive(Clone, Debug)]
pub struct Qcow2(Arc<Opened>);

impl Deref for Qcow2 {
    type Target = Opened;

    fn deref(&self) -> &Opened {
        &self.0
    }
}

impl Qcow2 {
    /// The virtual disk, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size.load(Acquire)
    }

    /// The header, as it is in the file now.
    pub fn header(&self) -> Header {
        self.file.header()
    }

    /// Whether writes fail: it was opened so, or found corrupt.
    pub fn is_read_only(&self) -> bool {
        self.read_only || self.file.is_corrupt()
    }

    /// Format and storage, for people.
    pub fn description(&self) -> String {
        format!("qcow2, {}", self.file.storage().description())
    }

    /// The alignment that costs least: below a cluster (or subcluster), a first write copies what
    /// is around it.
    pub fn block_size(&self) -> BlockSize {
        let below = self.storage().block_size();
        let minimum =
            if self.cipher.is_some() { below.minimum.max(luks::SECTOR_BYTES as u32) } else { below.minimum };
        BlockSize { minimum, preferred: below.preferred.max(1 << self.shape.subcluster_bits()) }
    }

    /// Whether zeroing whole clusters is faster than writing zeroes.
    pub fn can_zero_fast(&self) -> bool {
        self.shape.version >= 3
    }

    /// What the L2 cache has done.
    pub fn cache_statistics(&self) -> CacheStatistics {
        self.cache.load().statistics(self.slice_covers(), self.size_bytes())
    }

    /// What the refcount cache has done.
    pub fn refcount_statistics(&self) -> RefcountStatistics {
        self.refcounts.statistics()
    }

    /// Where guest data lies.
    pub fn storage(&self) -> &Storage {
        self.data.as_ref().unwrap_or(self.file.storage())
    }

    /// The files that are written to.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Storage> {
        std::iter::once(self.file.storage()).chain(&self.data)
    }

    /// What is not allocated is read from here.
    pub fn backing(&self) -> Option<&crate::Image> {
        self.backing.as_deref()
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
