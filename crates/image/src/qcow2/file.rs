//! The file that an image is in: metadata read and written as bytes, space added behind the last
//! cluster, the header kept.
//!
//! It also records that an image is corrupt: from then on nothing writes to it, and its header says
//! so.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use super::{
    Invalid, bytes,
    header::{Header, incompatible},
    header_change,
};
use reactor::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
};
use storage::{Durability, RangeLocks, ResizeError, Storage};

/// A file is made longer by this part of itself, so that it happens seldom: between the two bounds
/// below.
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
    /// It is not cut before here: what it had when it was opened is for `check` to judge.
    kept_bytes: AtomicU64,
    /// From here on the file has only what was written since it was opened, and zeroes: it was made
    /// longer here.
    zero_from: AtomicU64,
}

#[derive(Debug)]
struct Kept {
    header: Header,
    /// The first cluster as in the file, without the zeroes at its end: mostly a few hundred bytes
    /// of 64 KiB.
    start: Box<[u8]>,
}

impl Kept {
    fn new(header: Header, first_cluster: &[u8]) -> Self {
        let end = first_cluster.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Self { header, start: first_cluster[..end].into() }
    }

    /// The whole first cluster.
    fn first_cluster(&self) -> Vec<u8> {
        let mut bytes = self.start.to_vec();
        bytes.resize(self.header.cluster_bytes() as usize, 0);
        bytes
    }
}

impl ImageFile {
    /// `bytes` are those of the first cluster.
    pub(super) fn new(storage: Storage, header: Header, bytes: &[u8]) -> Self {
        let is_corrupt = header.incompatible & incompatible::CORRUPT != 0;
        Self {
            kept_bytes: AtomicU64::new(storage.size_bytes()),
            zero_from: AtomicU64::new(u64::MAX),
            storage,
            header: Mutex::new(Kept::new(header, bytes)),
            header_turn: RangeLocks::default(),
            size_turn: RangeLocks::default(),
            corrupt: AtomicBool::new(is_corrupt),
            marked: AtomicBool::new(is_corrupt),
        }
    }

    /// Another has had the file, and nothing is as it was. Nobody uses it yet.
    pub(super) fn changed_hands(&self, header: Header, bytes: &[u8]) {
        let is_corrupt = header.incompatible & incompatible::CORRUPT != 0;
        self.kept_bytes.store(self.storage.size_bytes(), Relaxed);
        self.zero_from.store(u64::MAX, Relaxed);
        self.corrupt.store(is_corrupt, Relaxed);
        self.marked.store(is_corrupt, Relaxed);
        *self.kept() = Kept::new(header, bytes);
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

    /// Says that something in the image is wrong, and gives the error for the request that found
    /// it. What is found in the background, by looking where nobody has asked, is not held against
    /// the image: who asks finds it himself.
    pub(super) fn found(&self, what: &Invalid) -> Error {
        if reactor::is_in_background() {
            return Error::IO;
        }
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

    /// Keeps everything from being written until the image is opened again: what its header says is
    /// not known.
    fn stop_writing(&self, why: Error) {
        self.marked.store(true, Relaxed);
        if !self.corrupt.swap(true, Relaxed) {
            tracing::error!(
                image = self.storage.description(),
                "the header could not be written ({why}), nor what it was before; the image is read-only until it is opened again"
            );
        }
    }

    /// Whether the file reads as zeroes from `offset` on, where nothing was written since it was
    /// opened. Never on a block device: one that was made longer has what somebody else left there.
    pub(super) fn is_zero_from(&self, offset: u64) -> bool {
        offset >= self.zero_from.load(Relaxed)
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
    pub(super) async fn make_room(&self, end: u64) -> Result<()> {
        if end <= self.size_bytes() {
            return Ok(());
        }
        let _turn = self.size_turn.exclusive(0..1).await;
        let size = self.size_bytes();
        if end <= size {
            return Ok(());
        }
        if !self.storage.can_grow() {
            // Its owner may have made it longer.
            return if self.storage.refresh_size().await? >= end { Ok(()) } else { Err(Error::NO_SPACE) };
        }
        let more = (end / GROWTH_PART).clamp(LEAST_GROWTH, MOST_GROWTH);
        let wanted = (end + more).next_multiple_of(LEAST_GROWTH);
        match self.storage.resize(wanted).await {
            // A file system that is nearly full may still have as much as is needed now.
            Err(ResizeError::Failed(_) | ResizeError::TooLarge { .. }) => {
                bytes::set_size(&self.storage, end).await?;
            }
            result => result.map_err(bytes::error_of)?,
        }
        self.zero_from.fetch_min(size, Relaxed);
        Ok(())
    }

    /// Has the file end with a whole cluster, if it can be made longer.
    pub(super) async fn make_whole(&self, cluster_bytes: u64) -> Result<()> {
        let _turn = self.size_turn.exclusive(0..1).await;
        let whole = self.size_bytes().next_multiple_of(cluster_bytes);
        if whole == self.size_bytes() || !self.storage.can_grow() {
            return Ok(());
        }
        bytes::set_size(&self.storage, whole).await
    }

    /// The disk was made shorter, or empty: the file may become shorter than it was, too.
    pub(super) fn may_be_cut(&self) {
        self.kept_bytes.store(0, Relaxed);
    }

    /// Cuts off what the file has behind `end`, but not more than by what it was made longer since
    /// it was opened.
    pub(super) async fn cut(&self, end: u64) -> Result<()> {
        let _turn = self.size_turn.exclusive(0..1).await;
        let end = end.max(self.kept_bytes.load(Relaxed));
        if end >= self.size_bytes() || !self.storage.can_grow() {
            return Ok(());
        }
        bytes::set_size(&self.storage, end).await
    }

    /// Changes the header and makes that durable. What the file had before the change is durable
    /// too.
    pub(super) async fn update_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let _turn = self.header_turn.exclusive(0..1).await;
        let (old, old_bytes) = {
            let kept = self.kept();
            (kept.header.clone(), kept.first_cluster())
        };
        let mut header = old.clone();
        change(&mut header);
        let bytes = header_change::changed(&old_bytes, &old, &header).map_err(|invalid| {
            tracing::error!(image = self.storage.description(), "the header cannot be changed: {invalid}");
            Error::NO_SPACE
        })?;
        if let Err(error) = self.write_header(&old_bytes, &bytes).await {
            if self.write_header(&bytes, &old_bytes).await.is_err() {
                self.stop_writing(error);
            }
            return Err(error);
        }
        *self.kept() = Kept::new(header, &bytes);
        Ok(())
    }

    /// The sectors that differ; the first one last, since it leads to the others.
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
        let kept = Kept::new(header, &bytes);
        assert!(kept.start.len() < 1024 && bytes.len() >= 65536, "{} of {}", kept.start.len(), bytes.len());
        assert_eq!(kept.first_cluster(), bytes);
    }
}
