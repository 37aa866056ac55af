//! The file that an image is in: metadata read and written as bytes, room made behind the last cluster, the header kept.
//!
//! Also where it is noted that an image is corrupt: from then on nothing writes to it, and its header says so.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use super::{
    Invalid, bytes,
    header::{Header, incompatible},
};
use crate::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
    storage::{Durability, RangeLocks, ResizeError, Storage},
};

/// A file is made longer by this part of itself, so that it happens seldom: between the two bounds below.
const GROWTH_PART: u64 = 8;
const LEAST_GROWTH: u64 = 1 << 20;
const MOST_GROWTH: u64 = 64 << 20;

/// The header is written in sectors: those that did not change stay.
const SECTOR: usize = 512;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct ImageFile {
    storage: Storage,
    header: Mutex<Kept>,
    /// One task at a time changes the header, or the file's size.
    header_turn: RangeLocks,
    size_turn: RangeLocks,
    corrupt: AtomicBool,
    /// The header says that it is corrupt, or cannot.
    marked: AtomicBool,
}

#[derive(Debug)]
struct Kept {
    header: Header,
    /// As in the file.
    bytes: Vec<u8>,
}

impl ImageFile {
    /// `bytes` are those of the first cluster.
    pub(super) fn new(storage: Storage, header: Header, bytes: Vec<u8>) -> Self {
        let is_corrupt = header.incompatible & incompatible::CORRUPT != 0;
        Self {
            storage,
            header: Mutex::new(Kept { header, bytes }),
            header_turn: RangeLocks::default(),
            size_turn: RangeLocks::default(),
            corrupt: AtomicBool::new(is_corrupt),
            marked: AtomicBool::new(is_corrupt),
        }
    }

    pub(super) fn storage(&self) -> &Storage {
        &self.storage
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.storage.size_bytes()
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // Both halves are replaced by whole values.
        self.header.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The header as it is in the file.
    pub(super) fn header(&self) -> Header {
        self.kept().header.clone()
    }

    /// Says that something in the image is wrong, and gives the error for the request that found it.
    pub(super) fn found(&self, what: &Invalid) -> Error {
        if !self.corrupt.swap(true, Relaxed) {
            tracing::error!(
                image = self.storage.description(),
                "the image is corrupt, and read-only from now on: {what} (`weir image check` shows the damage)"
            );
        }
        Error::IO
    }

    pub(super) fn is_corrupt(&self) -> bool {
        self.corrupt.load(Relaxed)
    }

    /// Has the header say that the image is corrupt, if it was found so and is not read-only.
    pub(super) async fn mark_corrupt(&self) {
        if !self.is_corrupt() || self.storage.read_only() || self.marked.swap(true, Relaxed) {
            return;
        }
        let marked = self
            .update_header(|header| {
                // Version 2 has no such bit.
                if header.version >= 3 {
                    header.incompatible |= incompatible::CORRUPT;
                }
            })
            .await;
        if let Err(error) = marked {
            tracing::error!(image = self.storage.description(), "it cannot be marked corrupt: {error}");
        }
    }

    /// Metadata.
    ///
    /// # Errors
    /// [`Error::IO`] where the file ends before it; then the image is corrupt.
    pub(super) async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        // What lies behind the end in the last cluster reads as zeroes.
        let end = self.size_bytes().next_multiple_of(self.kept().header.cluster_bytes());
        if offset.checked_add(length).is_none_or(|last| last > end) {
            let what = format!(
                "{length} bytes of metadata at {offset:#x} lie beyond the end of the file ({end:#x})"
            );
            return Err(self.found(&Invalid::new(what)));
        }
        bytes::read(&self.storage, offset, length as usize).await
    }

    /// Metadata, inside the file.
    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.storage.write(offset, Buffer::copy_of(bytes).into(), Durability::Cached).await
    }

    /// Guest data.
    pub(super) async fn write_data(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        self.make_room(offset + data.len() as u64).await?;
        self.storage.write(offset, data, durability).await
    }

    pub(super) async fn flush(&self) -> Result<()> {
        self.storage.flush().await
    }

    /// Makes the file reach to `end` at least; what is added reads as zeroes.
    ///
    /// # Errors
    /// [`Error::NO_SPACE`] where it cannot, as on a block device.
    pub(super) async fn make_room(&self, end: u64) -> Result<()> {
        if end <= self.size_bytes() {
            return Ok(());
        }
        let _turn = self.size_turn.exclusive(0..1).await;
        let size = self.size_bytes();
        if end <= size {
            return Ok(());
        }
        let more = (end / GROWTH_PART).clamp(LEAST_GROWTH, MOST_GROWTH);
        let wanted = (end + more).next_multiple_of(LEAST_GROWTH);
        match self.storage.resize(wanted).await {
            Ok(()) => Ok(()),
            // A file system that is nearly full may still have as much as is needed now.
            Err(ResizeError::Failed(_) | ResizeError::TooLarge { .. }) => {
                self.resize(end.next_multiple_of(self.multiple())).await
            }
            Err(error) => Err(error_of(error)),
        }
    }

    /// Has the file end with a whole cluster, and a whole block of the storage.
    pub(super) async fn make_whole(&self, cluster_bytes: u64) -> Result<()> {
        let _turn = self.size_turn.exclusive(0..1).await;
        let size = self.size_bytes();
        let whole = size.next_multiple_of(cluster_bytes.max(self.multiple()));
        if whole == size { Ok(()) } else { self.resize(whole).await }
    }

    /// Gives the file exactly this size, or a little more where it has to end with a block.
    pub(super) async fn cut(&self, end: u64) -> Result<()> {
        let _turn = self.size_turn.exclusive(0..1).await;
        let end = end.next_multiple_of(self.multiple());
        if end >= self.size_bytes() {
            return Ok(());
        }
        self.resize(end).await
    }

    fn multiple(&self) -> u64 {
        u64::from(self.storage.block_size().minimum).max(SECTOR as u64)
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.storage.resize(size).await.map_err(error_of)
    }

    /// Changes the header and makes that durable. What the file had before the change is durable too.
    ///
    /// # Errors
    /// [`Error::NO_SPACE`] if it does not fit any more; the file's. The header kept is then the old one.
    pub(super) async fn update_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let _turn = self.header_turn.exclusive(0..1).await;
        let (mut header, old) = {
            let kept = self.kept();
            (kept.header.clone(), kept.bytes.clone())
        };
        change(&mut header);
        let bytes = header.encode().map_err(|invalid| {
            tracing::error!(image = self.storage.description(), "the header cannot be changed: {invalid}");
            Error::NO_SPACE
        })?;
        for (number, sector) in bytes.chunks(SECTOR).enumerate() {
            let at = number * SECTOR;
            if old.get(at..at + sector.len()) != Some(sector) {
                self.write(at as u64, sector).await?;
            }
        }
        self.flush().await?;
        *self.kept() = Kept { header, bytes };
        Ok(())
    }
}

fn error_of(error: ResizeError) -> Error {
    match error {
        ResizeError::Failed(error) => error,
        ResizeError::ReadOnly => Error::NOT_PERMITTED,
        ResizeError::Device { .. } | ResizeError::Unaligned { .. } | ResizeError::TooLarge { .. } => {
            Error::NO_SPACE
        }
    }
}
