//! What has changed in memory, and the order in which it reaches the file.
//!
//! ```text
//!   1  refcount blocks │ slices of L2 tables that nothing in the file refers to yet   (data was written before)
//!      ── flush, of the data file too ──
//!   2  refcount table entries of new blocks, if any    ── flush ──
//!   3  slices of other L2 tables │ L1 entries of the new ones
//!      ── flush ──
//!   4  what the file no longer refers to may be released, once its readers have left
//! ```
//!
//! So everything that the file refers to is there. A crash between any two of these writes, or
//! within one (entries are written in the sectors that hold them), leaves an image in which every
//! entry is the old one or the new one, and both are right. At worst, some clusters keep a number
//! that is too high.
//!
//! All changes are written together: when a client flushes, when a slice needs room, and at the
//! end.
//!
//! Never holds the lock of [`Pending`] across an await. Never releases a cluster that the file may
//! still refer to.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering::Relaxed},
};

use super::{
    Qcow2,
    cache::Slice,
    l1::SECTOR_ENTRIES,
    refcounts::{Dirty, Held},
};
use reactor::error::{Error, Result};

/// So many places that wait to be given back are worth writing for.
const MOST_FREED: usize = 4096;

/// A place in the file that something referred to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Freed {
    /// In the file.
    pub(super) offset: u64,
    /// Bytes; every cluster they touch counts.
    pub(super) length: u64,
    /// What it was.
    pub(super) held: Held,
}

/// Changes that are not in the file.
#[derive(Debug, Default)]
pub(super) struct Pending {
    slices: Vec<Arc<Slice>>,
    /// Sectors of the L1 table.
    l1_sectors: BTreeSet<usize>,
    /// L2 tables whose L1 entry is not in the file, with a number that tells one from the next at
    /// the same place.
    new_tables: HashMap<usize, u64>,
    tables_made: u64,
    /// Not referred to in memory any more.
    freed: Vec<Freed>,
    /// Nor in the file.
    unused: Vec<Freed>,
    /// Changes are on their way.
    writing: bool,
}

/// What is written together.
#[derive(Debug, Default)]
struct Batch {
    /// With their place and content as they were taken.
    slices: Vec<(Arc<Slice>, u64, Vec<u8>)>,
    /// How many of the slices, the first ones, belong to tables that nothing in the file refers to.
    hidden: usize,
    l1_sectors: Vec<(usize, u64, Vec<u8>)>,
    new_tables: HashMap<usize, u64>,
    freed: Vec<Freed>,
}

impl Pending {
    /// A slice was changed.
    pub(super) fn changed(&mut self, slice: &Arc<Slice>) {
        if !slice.dirty.swap(true, Relaxed) {
            self.slices.push(Arc::clone(slice));
        }
    }

    /// An L1 entry was changed, to refer to a new L2 table.
    pub(super) fn new_table(&mut self, index: usize) {
        self.l1_sectors.insert(index / SECTOR_ENTRIES);
        self.tables_made += 1;
        self.new_tables.insert(index, self.tables_made);
    }

    /// Something is no longer referred to.
    pub(super) fn freed(&mut self, freed: Freed) {
        if let Some(last) = self.freed.last_mut()
            && matches!(freed.held, Held::Data { .. })
            && last.held == freed.held
            && last.offset + last.length == freed.offset
        {
            last.length += freed.length;
            return;
        }
        self.freed.push(freed);
    }

    /// Whether so much waits to be given back that it should be.
    pub(super) fn has_much_freed(&self) -> bool {
        self.freed.len() + self.unused.len() > MOST_FREED
    }

    /// Whether what leads to data of the disk is not in the file.
    fn leads_elsewhere(&self) -> bool {
        self.writing || !self.slices.is_empty() || !self.l1_sectors.is_empty()
    }

    fn is_clean(&self) -> bool {
        !self.leads_elsewhere() && self.freed.is_empty()
    }
}

impl Qcow2 {
    pub(super) fn pending(&self) -> MutexGuard<'_, Pending> {
        // A panic ends the process in release builds; in tests what follows is a failure anyway.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes everything that was written before the call durable, with the metadata that leads to
    /// it.
    ///
    /// # Errors
    /// The file's; then some of it may be lost, and is kept to be written the next time.
    pub async fn flush(&self) -> Result<()> {
        if !self.write_tables().await? {
            self.flush_files().await?;
        }
        self.give_back_later();
        Ok(())
    }

    /// See [`Image::would_lose`](crate::Image::would_lose).
    pub fn would_lose(&self) -> bool {
        self.pending().leads_elsewhere()
    }

    /// Whether metadata is not in the file yet.
    pub(super) fn is_dirty(&self) -> bool {
        !self.pending().is_clean() || self.refcounts.is_dirty()
    }

    /// Whether the entries of a range are in the file, durable, with everything that leads to them.
    pub(super) fn is_settled(&self, offset: u64, length: u64) -> bool {
        /// A longer range is not worth looking through.
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

    /// Writes all changed metadata, and says whether that came with a flush.
    pub(super) async fn write_tables(&self) -> Result<bool> {
        let image = self.clone();
        // Half a batch would be lost with a client that goes away.
        let written = reactor::spawn_to_end(async move { image.write_tables_to_end().await });
        written.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn write_tables_to_end(&self) -> Result<bool> {
        let _turn = self.writing.exclusive(0..1).await;
        self.file.mark_corrupt().await;
        let batch = self.take_batch();
        if self.file.is_corrupt() && !self.read_only {
            // Nothing may be written to it any more.
            self.put_back(batch);
            return Err(Error::IO);
        }
        let result = self.write_batch(&batch).await;
        match result {
            Ok(flushed) => {
                self.written(batch);
                Ok(flushed)
            }
            Err(error) => {
                self.put_back(batch);
                Err(error)
            }
        }
    }

    /// Copies what has changed, as of one moment.
    fn take_batch(&self) -> Batch {
        let mut pending = self.pending();
        let pending = &mut *pending;
        pending.writing = true;
        let mut batch = Batch::default();
        let l1 = self.l1.load();
        let mut slices = std::mem::take(&mut pending.slices);
        slices.sort_unstable_by_key(|slice| {
            (!pending.new_tables.contains_key(&self.table_of_slice(slice.number)), slice.number)
        });
        for slice in slices {
            slice.writing.store(true, Relaxed);
            slice.dirty.store(false, Relaxed);
            // A slice with changes has a table.
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

    async fn write_batch(&self, batch: &Batch) -> Result<bool> {
        let refcounts = self.refcounts.write(&self.file).await?;
        let result = self.write_in_order(batch, &refcounts).await;
        if result.is_err() {
            self.refcounts.keep(&refcounts);
        }
        result
    }

    async fn write_in_order(&self, batch: &Batch, refcounts: &Dirty) -> Result<bool> {
        let (hidden, visible) = batch.slices.split_at(batch.hidden);
        if hidden.is_empty() && visible.is_empty() && batch.l1_sectors.is_empty() && refcounts.is_empty() {
            // Nothing refers to freed clusters then: what did was written before.
            return Ok(false);
        }
        self.write_slices(hidden).await?;
        self.flush_files().await?;
        if self.refcounts.write_entries(&self.file, refcounts).await? {
            self.file.flush().await?;
        }
        if visible.is_empty() && batch.l1_sectors.is_empty() {
            return Ok(true);
        }
        self.write_slices(visible).await?;
        for (_, offset, bytes) in &batch.l1_sectors {
            self.file.write(*offset, bytes).await?;
        }
        self.file.flush().await?;
        Ok(true)
    }

    /// Makes guest data durable, wherever it lies, and what was written of the metadata.
    pub(super) async fn flush_files(&self) -> Result<()> {
        if let Some(data) = &self.data {
            data.flush().await?;
        }
        self.file.flush().await
    }

    /// Neighbours are written together.
    async fn write_slices(&self, slices: &[(Arc<Slice>, u64, Vec<u8>)]) -> Result<()> {
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

    fn written(&self, batch: Batch) {
        let mut pending = self.pending();
        pending.writing = false;
        for (slice, ..) in &batch.slices {
            slice.writing.store(false, Relaxed);
        }
        // One that was replaced meanwhile by yet another is not in the file.
        pending.new_tables.retain(|index, made| batch.new_tables.get(index) != Some(made));
        pending.unused.extend(batch.freed);
    }

    fn put_back(&self, batch: Batch) {
        let mut pending = self.pending();
        pending.writing = false;
        for (slice, ..) in &batch.slices {
            slice.writing.store(false, Relaxed);
            pending.changed(slice);
        }
        pending.l1_sectors.extend(batch.l1_sectors.iter().map(|(sector, ..)| *sector));
        // Their L1 entries may have reached the file, so their slices have to wait for the
        // refcounts the next time, as all others do.
        pending.new_tables.retain(|index, made| batch.new_tables.get(index) != Some(made));
        pending.freed.extend(batch.freed);
    }

    /// Gives back what nothing refers to, in a task of its own: it waits for requests in flight, of
    /// which the caller may be one.
    pub(super) fn give_back_later(&self) {
        if self.pending().unused.is_empty() {
            return;
        }
        let image = self.clone();
        reactor::spawn(async move {
            if let Err(error) = image.give_back().await {
                tracing::warn!("clusters that are not used any more could not be given back: {error}");
            }
        });
    }

    /// Gives back what nothing refers to, when nobody is inside who may still use it.
    pub(super) async fn give_back(&self) -> Result<()> {
        // Whoever closes the gate waits for this first, so that nothing is under way when nobody is
        // inside.
        let _turn = self.giving.exclusive(0..1).await;
        let unused = std::mem::take(&mut self.pending().unused);
        if unused.is_empty() {
            return Ok(());
        }
        self.gate.settle().await;
        self.give_back_all(unused).await
    }

    /// The same, for who knows that nobody is inside, and has the turn.
    pub(super) async fn give_back_quietly(&self) -> Result<()> {
        let unused = std::mem::take(&mut self.pending().unused);
        self.give_back_all(unused).await
    }

    async fn give_back_all(&self, unused: Vec<Freed>) -> Result<()> {
        for freed in unused {
            self.give_back_one(freed).await?;
        }
        Ok(())
    }

    async fn give_back_one(&self, freed: Freed) -> Result<()> {
        let clusters = self.clusters_of(freed.offset, freed.length);
        self.refcounts.give_back(&self.file, &self.overlap, clusters, freed.held).await
    }
}
