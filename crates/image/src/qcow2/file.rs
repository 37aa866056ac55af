//! The file of an image: reads and writes of metadata, growth, and the header.
//!
//! Also records that an image was found corrupt: from then on the image is read-only, and the
//! header is marked.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use super::{
    InvalidImage,
    header::{Qcow2Header, incompatible},
    header_change::{self, SECTOR},
    metadata_io,
};
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
};
use storage::{Durability, RangeLocks, ResizeError, Storage};

// A file grows by this fraction of its size, within the two bounds below, so that growth is rare.
const GROWTH_PART: u64 = 8;
const MIN_GROWTH: u64 = 1 << 20;
const MAX_GROWTH: u64 = 64 << 20;

/// The file of an image. See the head of this file.
#[derive(Debug)]
pub(super) struct ImageFile {
    storage: Storage,
    header: Mutex<StoredHeader>,
    /// Serializes changes of the header.
    header_lock: RangeLocks,
    /// Serializes changes of the file's size.
    size_lock: RangeLocks,
    corrupt: AtomicBool,
    /// True if the header has the corrupt mark, or marking it failed.
    marked: AtomicBool,
    /// Lower limit of truncation: the size at open time, because only `check` decides whether
    /// content that existed then is unused. 0 after the disk was shrunk or emptied.
    kept_bytes: AtomicU64,
    /// From this offset on the file contains only zeroes and data that was written since it was
    /// opened: the size before its first growth, or `u64::MAX`.
    zero_from: AtomicU64,
}

#[derive(Debug)]
struct StoredHeader {
    header: Qcow2Header,
    /// First cluster as in the file, without trailing zeroes: usually a few hundred bytes of 64
    /// KiB.
    start: Box<[u8]>,
}

impl StoredHeader {
    fn new(header: Qcow2Header, first_cluster: &[u8]) -> Self {
        let end = first_cluster.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Self { header, start: first_cluster[..end].into() }
    }

    /// First cluster, complete.
    fn first_cluster(&self) -> Vec<u8> {
        let mut bytes = self.start.to_vec();
        bytes.resize(self.header.cluster_bytes() as usize, 0);
        bytes
    }
}

impl ImageFile {
    /// `bytes` are those of the first cluster.
    pub(super) fn new(storage: Storage, header: Qcow2Header, bytes: &[u8]) -> Self {
        let is_corrupt = header.incompatible & incompatible::CORRUPT != 0;
        Self {
            kept_bytes: AtomicU64::new(storage.size_bytes()),
            zero_from: AtomicU64::new(u64::MAX),
            storage,
            header: Mutex::new(StoredHeader::new(header, bytes)),
            header_lock: RangeLocks::default(),
            size_lock: RangeLocks::default(),
            corrupt: AtomicBool::new(is_corrupt),
            marked: AtomicBool::new(is_corrupt),
        }
    }

    /// Resets the state after another process used the file. No request may be in flight.
    pub(super) fn reset_cached_header(&self, header: Qcow2Header, bytes: &[u8]) {
        let is_corrupt = header.incompatible & incompatible::CORRUPT != 0;
        self.kept_bytes.store(self.storage.size_bytes(), Relaxed);
        self.zero_from.store(u64::MAX, Relaxed);
        self.corrupt.store(is_corrupt, Relaxed);
        self.marked.store(is_corrupt, Relaxed);
        *self.stored_header() = StoredHeader::new(header, bytes);
    }

    pub(super) fn storage(&self) -> &Storage {
        &self.storage
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.storage.size_bytes()
    }

    fn stored_header(&self) -> MutexGuard<'_, StoredHeader> {
        // A poisoned lock is safe to use: both fields are replaced together by one assignment.
        self.header.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Header in the file.
    pub(super) fn header(&self) -> Qcow2Header {
        self.stored_header().header.clone()
    }

    /// Reports an invalid structure and returns the error for the request that found it.
    /// Background work, such as read-ahead, does not mark the image: a request that needs the
    /// structure finds it again.
    pub(super) fn report_invalid(&self, fault: &InvalidImage) -> Error {
        if reactor::is_in_background() {
            return Error::IO;
        }
        if !self.corrupt.swap(true, Relaxed) {
            tracing::error!(
                image = self.storage.description(),
                "the image is corrupt and becomes read-only: {fault} (`weir image check` shows the damage)"
            );
        }
        Error::IO
    }

    pub(super) fn is_corrupt(&self) -> bool {
        self.corrupt.load(Relaxed)
    }

    /// Makes the image read-only until it is opened again, because the content of its header in
    /// the file is unknown.
    fn stop_writing(&self, why: Error) {
        self.marked.store(true, Relaxed);
        if !self.corrupt.swap(true, Relaxed) {
            tracing::error!(
                image = self.storage.description(),
                "neither the new header nor the old one could be written ({why}); the image is \
                 read-only until it is opened again"
            );
        }
    }

    /// True if the file reads as zeroes from `offset` on, except for writes since it was opened.
    /// Never true on a block device: a device that was extended may contain old data.
    pub(super) fn is_zero_from(&self, offset: u64) -> bool {
        offset >= self.zero_from.load(Relaxed)
    }

    /// Sets the corrupt mark in the header if the image was found corrupt and is writable.
    pub(super) async fn mark_corrupt(&self) {
        if !self.is_corrupt() || self.storage.read_only() || self.marked.swap(true, Relaxed) {
            return;
        }
        let marked = self
            .update_header(|header| {
                // The mark is an incompatible feature bit, which version 2 does not have.
                if header.version >= 3 {
                    header.incompatible |= incompatible::CORRUPT;
                }
            })
            .await;
        if let Err(error) = marked {
            tracing::error!(
                image = self.storage.description(),
                "the image cannot be marked corrupt: {error}"
            );
        }
    }

    /// Reads metadata.
    pub(super) async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        // The file may end inside its last cluster, whose rest reads as zeroes.
        let end = self.size_bytes().next_multiple_of(self.stored_header().header.cluster_bytes());
        if offset.checked_add(length).is_none_or(|last| last > end) {
            let message = format!(
                "{length} bytes of metadata at {offset:#x} are beyond the end of the file ({end:#x})"
            );
            return Err(self.report_invalid(&InvalidImage::new(message)));
        }
        metadata_io::read(&self.storage, offset, length as usize).await
    }

    /// Writes metadata inside the file.
    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.storage.write(offset, IoBuffer::copy_of(bytes).into(), Durability::Cached).await
    }

    /// Writes guest data, and grows the file first if necessary.
    pub(super) async fn write_data(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        self.grow_to(offset + data.len() as u64).await?;
        self.storage.write(offset, data, durability).await
    }

    pub(super) async fn flush(&self) -> Result<()> {
        self.storage.flush().await
    }

    /// Grows the file to at least `end` bytes; added bytes read as zeroes.
    pub(super) async fn grow_to(&self, end: u64) -> Result<()> {
        if end <= self.size_bytes() {
            return Ok(());
        }
        let _lock = self.size_lock.exclusive(0..1).await;
        // Another task may have grown the file while this one waited.
        let size = self.size_bytes();
        if end <= size {
            return Ok(());
        }
        if !self.storage.can_grow() {
            // A block device may have been extended from outside.
            return if self.storage.refresh_size().await? >= end { Ok(()) } else { Err(Error::NO_SPACE) };
        }
        let more = (end / GROWTH_PART).clamp(MIN_GROWTH, MAX_GROWTH);
        let preferred = (end + more).next_multiple_of(MIN_GROWTH);
        match self.storage.resize(preferred).await {
            // A nearly full file system may still have space for the required minimum.
            Err(ResizeError::Failed(_) | ResizeError::TooLarge { .. }) => {
                metadata_io::set_size(&self.storage, end).await?;
            }
            result => result.map_err(metadata_io::to_io_error)?,
        }
        // Only after success, and to the smaller value: the bytes between the two were added as
        // zeroes.
        self.zero_from.fetch_min(size, Relaxed);
        Ok(())
    }

    /// Extends the file to a multiple of the cluster size, if it can grow.
    pub(super) async fn pad_to_cluster(&self, cluster_bytes: u64) -> Result<()> {
        let _lock = self.size_lock.exclusive(0..1).await;
        let padded = self.size_bytes().next_multiple_of(cluster_bytes);
        if padded == self.size_bytes() || !self.storage.can_grow() {
            return Ok(());
        }
        metadata_io::set_size(&self.storage, padded).await
    }

    /// Allows the file to shrink below its size at open time, after the disk was shrunk or
    /// emptied.
    pub(super) fn allow_truncation(&self) {
        self.kept_bytes.store(0, Relaxed);
    }

    /// Truncates the file to `end`, but not below its size at open time.
    pub(super) async fn truncate(&self, end: u64) -> Result<()> {
        let _lock = self.size_lock.exclusive(0..1).await;
        let end = end.max(self.kept_bytes.load(Relaxed));
        if end >= self.size_bytes() || !self.storage.can_grow() {
            return Ok(());
        }
        metadata_io::set_size(&self.storage, end).await
    }

    /// Changes the header durably. Everything written before the change becomes durable as well.
    pub(super) async fn update_header(&self, change: impl FnOnce(&mut Qcow2Header)) -> Result<()> {
        let _lock = self.header_lock.exclusive(0..1).await;
        let (old, old_bytes) = {
            let stored = self.stored_header();
            (stored.header.clone(), stored.first_cluster())
        };
        let mut header = old.clone();
        change(&mut header);
        let bytes = header_change::encode_change(&old_bytes, &old, &header).map_err(|invalid| {
            tracing::error!(image = self.storage.description(), "the header cannot be changed: {invalid}");
            Error::NO_SPACE
        })?;
        if let Err(error) = self.write_header(&old_bytes, &bytes).await {
            self.restore_header(&old, &old_bytes, &bytes, error).await;
            return Err(error);
        }
        // Published after both writes are durable, so that `header` never returns a header that a
        // crash could lose.
        *self.stored_header() = StoredHeader::new(header, &bytes);
        Ok(())
    }

    /// Restores the header after a failed change, or stops all writes: then the file may have
    /// either header.
    async fn restore_header(&self, old: &Qcow2Header, old_bytes: &[u8], new_bytes: &[u8], error: Error) {
        // The first sector only, if the others are valid with it: if this fails too, the new first
        // sector still needs them.
        let restored = match header_change::with_first_sector(new_bytes, old_bytes, old) {
            Some(restored) => restored,
            None => old_bytes.to_vec(),
        };
        match self.write_header(new_bytes, &restored).await {
            Ok(()) => *self.stored_header() = StoredHeader::new(old.clone(), &restored),
            Err(_) => self.stop_writing(error),
        }
    }

    /// Writes the sectors that differ, and no other. The first one comes last, after a flush, since
    /// it refers to the following ones.
    async fn write_header(&self, old: &[u8], new: &[u8]) -> Result<()> {
        let sectors = new.chunks(SECTOR).enumerate();
        let differ = sectors
            .filter(|(number, sector)| old.get(number * SECTOR..(number + 1) * SECTOR) != Some(*sector));
        let mut differ: Vec<_> = differ.collect();
        let first = differ.first().is_some_and(|(number, _)| *number == 0).then(|| differ.remove(0));
        if !differ.is_empty() {
            for (number, sector) in differ {
                self.write((number * SECTOR) as u64, sector).await?;
            }
            self.flush().await?;
        }
        if let Some((_, sector)) = first {
            self.write(0, sector).await?;
        }
        self.flush().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::header::tests::header;

    #[test]
    fn zeroes_at_the_end_of_the_first_cluster_take_no_memory() {
        let header = header();
        let bytes = header.encode().expect("valid");
        let stored = StoredHeader::new(header, &bytes);
        assert!(
            stored.start.len() < 1024 && bytes.len() >= 65536,
            "{} of {}",
            stored.start.len(),
            bytes.len()
        );
        assert_eq!(stored.first_cluster(), bytes);
    }
}
