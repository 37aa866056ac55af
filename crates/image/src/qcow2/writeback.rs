//! Dirty metadata, and the order in which it is written to the file.
//!
//! ```text
//!   0  data of the guest
//!   1  refcount blocks │ slices of L2 tables that nothing in the file refers to yet
//!      ── flush, of the data file too ──
//!   2  refcount table entries of new blocks, if any    ── flush ──
//!   3  slices of other L2 tables │ L1 entries of the new ones
//!      ── flush ──
//!   4  clusters that the file no longer refers to may be freed, once their reads have completed
//! ```
//!
//! Everything that the file refers to is therefore in the file. A crash between any two of these
//! writes, or within one (entries are written in whole sectors), leaves an image in which every
//! entry is either the old or the new one, both valid. At worst some refcounts are too high.
//!
//! All dirty metadata is written together: on a client's flush, when a slice must be evicted, and
//! on close.
//!
//! Never holds the lock of [`PendingMetadata`] across an await. Never frees a cluster that the file
//! may still refer to.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
};

use super::{
    Qcow2Image,
    cache::L2Slice,
    l1::SECTOR_ENTRIES,
    refcounts::{DirtyRefcounts, FreedContent},
};
use reactor::error::{Error, Result};

// Limit of clusters or runs that wait to be freed; beyond it metadata is written so that they can
// be.
const MAX_FREED: usize = 4096;

/// A range of the file that is no longer referenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnreferencedRange {
    /// Offset in the file.
    pub(super) offset: u64,
    /// Length in bytes; every cluster that it touches counts.
    pub(super) length: u64,
    /// Former content.
    pub(super) content: FreedContent,
}

/// Changes in memory that are not in the file.
#[derive(Debug, Default)]
pub(super) struct PendingMetadata {
    slices: Vec<Arc<L2Slice>>,
    /// Dirty sectors of the L1 table.
    l1_sectors: BTreeSet<usize>,
    /// L2 tables whose L1 entry is not in the file, by index. The value distinguishes successive
    /// tables of one index.
    new_tables: HashMap<usize, u64>,
    tables_created: u64,
    /// Ranges that nothing in memory refers to, but the file may.
    freed: Vec<UnreferencedRange>,
    /// Ranges that neither memory nor the file refers to.
    unused: Vec<UnreferencedRange>,
    /// True if a batch is being written.
    writing: bool,
}

/// Changes that are written together.
#[derive(Debug, Default)]
struct MetadataBatch {
    /// Each with its offset and the content to write.
    slices: Vec<(Arc<L2Slice>, u64, Vec<u8>)>,
    /// Number of slices, at the front, that belong to tables which the file does not refer to yet.
    hidden: usize,
    l1_sectors: Vec<(usize, u64, Vec<u8>)>,
    new_tables: HashMap<usize, u64>,
    freed: Vec<UnreferencedRange>,
}

impl PendingMetadata {
    /// Marks a slice dirty.
    pub(super) fn mark_dirty(&mut self, slice: &Arc<L2Slice>) {
        if !slice.dirty.swap(true, Relaxed) {
            self.slices.push(Arc::clone(slice));
        }
    }

    /// Records that an L1 entry refers to a new L2 table.
    pub(super) fn new_table(&mut self, index: usize) {
        self.l1_sectors.insert(index / SECTOR_ENTRIES);
        self.tables_created += 1;
        self.new_tables.insert(index, self.tables_created);
    }

    /// Records that a range is no longer referenced in memory.
    pub(super) fn add_unreferenced(&mut self, freed: UnreferencedRange) {
        // Neighbouring data clusters are merged to one discard; compressed ones share clusters and
        // are not.
        if let Some(last) = self.freed.last_mut()
            && matches!(freed.content, FreedContent::Data { .. })
            && last.content == freed.content
            && last.offset + last.length == freed.offset
        {
            last.length += freed.length;
            return;
        }
        self.freed.push(freed);
    }

    /// True if more than `MAX_FREED` ranges wait to be freed: metadata should then be written.
    pub(super) fn has_many_unreferenced(&self) -> bool {
        self.freed.len() + self.unused.len() > MAX_FREED
    }

    /// True if the mapping of guest data in memory differs from the file.
    fn has_dirty_mappings(&self) -> bool {
        self.writing || !self.slices.is_empty() || !self.l1_sectors.is_empty()
    }

    fn is_clean(&self) -> bool {
        !self.has_dirty_mappings() && self.freed.is_empty()
    }
}

impl Qcow2Image {
    pub(super) fn pending(&self) -> MutexGuard<'_, PendingMetadata> {
        // A panic ends the process in release builds; a test has failed by then.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes all completed writes durable, with the metadata that maps them.
    ///
    /// # Errors
    /// Errors of the file. Metadata stays dirty and is written by the next flush.
    pub async fn flush(&self) -> Result<()> {
        if !self.write_tables().await? {
            self.flush_files().await?;
        }
        self.free_later();
        Ok(())
    }

    /// See [`Image::has_volatile_writes`](crate::Image::has_volatile_writes).
    pub fn has_volatile_writes(&self) -> bool {
        self.pending().has_dirty_mappings()
    }

    /// True if any metadata is dirty.
    pub(super) fn is_dirty(&self) -> bool {
        !self.pending().is_clean() || self.refcounts.is_dirty()
    }

    /// True if the entries of a range, and everything they depend on, are durable.
    pub(super) fn is_durable(&self, offset: u64, length: u64) -> bool {
        // Longer ranges are not examined: a flush costs less.
        const MOST: u64 = 1024;
        let pending = self.pending();
        let (first, last) = (self.slice_number(offset), self.slice_number(offset + length.saturating_sub(1)));
        let is_written = |number| {
            let table = self.table_of_slice(number);
            let slice = self.cache.load().get(number);
            !pending.new_tables.contains_key(&table)
                && slice.is_none_or(|slice| !slice.dirty.load(Relaxed) && !slice.writing.load(Relaxed))
        };
        pending.is_clean() || last - first < MOST && (first..=last).all(is_written)
    }

    /// Writes all dirty metadata. Returns true if that included a flush.
    pub(super) async fn write_tables(&self) -> Result<bool> {
        let image = self.clone();
        // Must run to completion even if the client disconnects: a dropped batch would be lost.
        let written = reactor::spawn_detached(async move { image.write_tables_to_end().await });
        written.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn write_tables_to_end(&self) -> Result<bool> {
        let _lock = self.writing.exclusive(0..1).await;
        self.file.mark_corrupt().await;
        let batch = self.take_batch();
        if self.file.is_corrupt() && !self.read_only.load(Relaxed) {
            // A corrupt image must not be written to.
            self.requeue(batch);
            return Err(Error::IO);
        }
        let result = self.write_batch(&batch).await;
        match result {
            Ok(flushed) => {
                self.complete_batch(batch);
                Ok(flushed)
            }
            Err(error) => {
                self.requeue(batch);
                Err(error)
            }
        }
    }

    /// Copies all dirty metadata, atomically, and marks it clean.
    fn take_batch(&self) -> MetadataBatch {
        let mut pending = self.pending();
        let pending = &mut *pending;
        pending.writing = true;
        let mut batch = MetadataBatch::default();
        let l1 = self.l1.load();
        let mut slices = std::mem::take(&mut pending.slices);
        // New tables first: `hidden` splits the batch into phases 1 and 3.
        slices.sort_unstable_by_key(|slice| {
            (!pending.new_tables.contains_key(&self.table_of_slice(slice.number)), slice.number)
        });
        for slice in slices {
            slice.writing.store(true, Relaxed);
            slice.dirty.store(false, Relaxed);
            // Dirty slices always belong to an L2 table.
            let Some(offset) = self.slice_offset(slice.number) else { continue };
            batch.hidden += usize::from(pending.new_tables.contains_key(&self.table_of_slice(slice.number)));
            let bytes = slice.bytes();
            batch.slices.push((slice, offset, bytes));
        }
        for sector in std::mem::take(&mut pending.l1_sectors) {
            let (offset, bytes) = l1.sector(sector);
            batch.l1_sectors.push((sector, offset, bytes));
        }
        batch.new_tables.clone_from(&pending.new_tables);
        batch.freed = std::mem::take(&mut pending.freed);
        batch
    }

    async fn write_batch(&self, batch: &MetadataBatch) -> Result<bool> {
        let refcounts = self.refcounts.write(&self.file).await?;
        let result = self.write_in_order(batch, &refcounts).await;
        if result.is_err() {
            self.refcounts.restore_dirty(&refcounts);
        }
        result
    }

    async fn write_in_order(&self, batch: &MetadataBatch, refcounts: &DirtyRefcounts) -> Result<bool> {
        let (hidden, visible) = batch.slices.split_at(batch.hidden);
        if hidden.is_empty() && visible.is_empty() && batch.l1_sectors.is_empty() && refcounts.is_empty() {
            // Freed ranges need no write here: the changes that removed their references were
            // written before.
            return Ok(false);
        }
        // Phase 1. The flush orders data, refcounts and new tables before everything that refers
        // to them.
        self.write_slices(hidden).await?;
        self.flush_files().await?;
        if self.refcounts.write_entries(&self.file, refcounts).await? {
            self.file.flush().await?;
        }
        if visible.is_empty() && batch.l1_sectors.is_empty() {
            return Ok(true);
        }
        // Phase 3: the file begins to refer to the new tables and clusters.
        self.write_slices(visible).await?;
        for (_, offset, bytes) in &batch.l1_sectors {
            self.file.write(*offset, bytes).await?;
        }
        self.file.flush().await?;
        Ok(true)
    }

    /// Makes guest data and written metadata durable, in both files.
    pub(super) async fn flush_files(&self) -> Result<()> {
        if let Some(data) = &self.data {
            data.flush().await?;
        }
        self.file.flush().await
    }

    /// Writes slices; adjacent ones in one request.
    async fn write_slices(&self, slices: &[(Arc<L2Slice>, u64, Vec<u8>)]) -> Result<()> {
        const MOST: usize = 1 << 20;
        let mut at = 0;
        while at < slices.len() {
            let (_, offset, first) = &slices[at];
            let mut bytes = first.clone();
            at += 1;
            while let Some((_, next, more)) = slices.get(at)
                && offset + bytes.len() as u64 == *next
                && bytes.len() < MOST
            {
                bytes.extend(more);
                at += 1;
            }
            self.file.write(*offset, &bytes).await?;
        }
        Ok(())
    }

    fn complete_batch(&self, batch: MetadataBatch) {
        let mut pending = self.pending();
        pending.writing = false;
        for (slice, ..) in &batch.slices {
            slice.writing.store(false, Relaxed);
        }
        // A table that was replaced again meanwhile is not in the file.
        pending.new_tables.retain(|index, generation| batch.new_tables.get(index) != Some(generation));
        pending.unused.extend(batch.freed);
    }

    fn requeue(&self, batch: MetadataBatch) {
        let mut pending = self.pending();
        pending.writing = false;
        for (slice, ..) in &batch.slices {
            slice.writing.store(false, Relaxed);
            pending.mark_dirty(slice);
        }
        pending.l1_sectors.extend(batch.l1_sectors.iter().map(|(sector, ..)| *sector));
        // Their L1 entries may have reached the file. The tables no longer count as new, so that
        // the next attempt writes their slices after the refcounts.
        pending.new_tables.retain(|index, generation| batch.new_tables.get(index) != Some(generation));
        pending.freed.extend(batch.freed);
    }

    /// Frees unused ranges in a spawned task: freeing waits for requests in flight, of which the
    /// caller may be one.
    pub(super) fn free_later(&self) {
        if self.pending().unused.is_empty() {
            return;
        }
        let image = self.clone();
        reactor::spawn(async move {
            if let Err(error) = image.free_unreferenced().await {
                tracing::warn!("unused clusters could not be freed: {error}");
            }
        });
    }

    /// Frees unused ranges after all requests that may still use them have completed.
    pub(super) async fn free_unreferenced(&self) -> Result<()> {
        // `quiesce` takes this lock before it closes the gate, so that freeing is never in
        // progress then.
        let _lock = self.freeing.exclusive(0..1).await;
        let unused = std::mem::take(&mut self.pending().unused);
        if unused.is_empty() {
            return Ok(());
        }
        self.gate.wait_for_earlier_requests().await;
        self.free_all_unreferenced(unused).await
    }

    /// Like [`Self::free_unreferenced`], for callers that hold `freeing` while no request is in
    /// flight.
    pub(super) async fn free_unreferenced_exclusive(&self) -> Result<()> {
        let unused = std::mem::take(&mut self.pending().unused);
        self.free_all_unreferenced(unused).await
    }

    async fn free_all_unreferenced(&self, unused: Vec<UnreferencedRange>) -> Result<()> {
        for freed in unused {
            self.free_range(freed).await?;
        }
        Ok(())
    }

    async fn free_range(&self, freed: UnreferencedRange) -> Result<()> {
        let clusters = self.clusters_of(freed.offset, freed.length);
        self.refcounts.free_clusters(&self.file, &self.overlap, clusters, freed.content).await
    }
}
