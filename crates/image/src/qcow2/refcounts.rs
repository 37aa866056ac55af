//! Allocation of clusters: the refcount table and its blocks, and the search for free clusters.
//!
//! ```text
//!   refcount table ─► refcount block ─► refcount of each cluster: 0 free, 1 used, more: shared
//!     (in memory)     (some in memory, the rest in the file)              with snapshots
//! ```
//!
//! Refcounts are raised in memory on allocation and reach the file before any reference to the
//! cluster does ([`writeback`](super::writeback)). They are lowered only after the last reference
//! in the file is gone. A crash therefore leaves refcounts that are too high (leaks), never too
//! low. For this reason a block may be written at any time, and dirty blocks are written on
//! eviction.
//!
//! Searches and changes are serialized by `change_lock`.
//!
//! Never allocates a cluster that contains metadata, even if its refcount is 0: the image is
//! marked corrupt instead.

mod table;

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

pub(super) use self::table::RefcountTable;
use super::{
    file::ImageFile,
    header,
    overlap::MetadataClusters,
    refcount_entries::{self, get, put},
};
use reactor::error::{Error, Result};
use storage::RangeLocks;

/// Content of a cluster that is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FreedContent {
    /// Metadata, protected by the overlap check until now, or clusters of a snapshot.
    Metadata,
    /// Guest data, or an allocation that was not used. `unmapped`: no new cluster replaces it, so
    /// the storage may discard it.
    Data { unmapped: bool },
    /// Compressed guest data, which may share its clusters with other compressed data.
    Compressed,
}

/// Refcounts of an image, shared by all workers.
#[derive(Debug)]
pub(super) struct Refcounts {
    cluster_bits: u32,
    order: u32,
    change_lock: RangeLocks,
    state: Mutex<RefcountState>,
    /// Limit of cached blocks; exceeded only if all are dirty.
    max_blocks: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug)]
struct RefcountState {
    table_offset: u64,
    table: RefcountTable,
    /// Indices of table entries that differ from the file.
    dirty_entries: BTreeSet<usize>,
    blocks: BTreeMap<usize, RefcountBlock>,
    clock: u64,
    /// Lower bound of the first free cluster.
    first_free: u64,
    /// Blocks without a free cluster, as found by earlier searches. Later searches skip them
    /// without reading them.
    full: BTreeSet<usize>,
    /// Clusters from here on were not allocated since the image was opened. Their content may
    /// still be nonzero: see [`ImageFile::is_zero_from`].
    untouched: u64,
    /// End of the last compressed cluster, inside a host cluster with space left; 0 if there is
    /// none.
    compressed_end: u64,
}

#[derive(Debug)]
struct RefcountBlock {
    bytes: Vec<u8>,
    dirty: bool,
    used: u64,
}

/// A run of clusters that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AllocatedRun {
    /// Offset of the first cluster in the file.
    pub(super) offset: u64,
    /// Number of consecutive clusters.
    pub(super) clusters: u64,
    /// True if the clusters read as zeroes.
    pub(super) untouched: bool,
}

/// Counters of the refcount cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefcountStatistics {
    /// Lookups that hit the cache.
    pub hits: u64,
    /// Blocks that were read from the file.
    pub misses: u64,
    /// Size of the cached blocks in bytes.
    pub bytes: u64,
    /// Size limit of the cached blocks in bytes.
    pub limit_bytes: u64,
}

/// Metadata that must be written in this order: blocks, then the table entries that refer to new
/// blocks.
#[derive(Debug, Default)]
pub(super) struct DirtyRefcounts {
    /// Offset in the file and content.
    pub(super) blocks: Vec<(u64, Vec<u8>)>,
    /// Offset in the file and content of table entries.
    pub(super) entries: Vec<(u64, [u8; 8])>,
    indices: Vec<usize>,
    entry_indices: Vec<usize>,
}

impl RefcountState {
    fn new(header: &header::Qcow2Header, table: RefcountTable) -> Self {
        Self {
            table_offset: header.refcount_table_offset,
            table,
            dirty_entries: BTreeSet::new(),
            blocks: BTreeMap::new(),
            clock: 0,
            first_free: 0,
            full: BTreeSet::new(),
            untouched: 0,
            compressed_end: 0,
        }
    }
}

impl Refcounts {
    /// `table` was read from the file and checked.
    pub(super) fn new(header: &header::Qcow2Header, table: RefcountTable, cache_bytes: u64) -> Self {
        Self {
            cluster_bits: header.cluster_bits,
            order: header.refcount_order,
            change_lock: RangeLocks::default(),
            state: Mutex::new(RefcountState::new(header, table)),
            max_blocks: AtomicU64::new((cache_bytes >> header.cluster_bits).max(1)),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Discards all state after another process used the file.
    pub(super) fn replace(&self, header: &header::Qcow2Header, table: RefcountTable) {
        *self.lock() = RefcountState::new(header, table);
    }

    fn lock(&self) -> MutexGuard<'_, RefcountState> {
        // A poisoned lock is safe to use: every field is changed by a single assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_cache_bytes(&self, bytes: u64) {
        self.max_blocks.store((bytes >> self.cluster_bits).max(1), Relaxed);
    }

    pub(super) fn statistics(&self) -> RefcountStatistics {
        let bytes = (self.lock().blocks.len() as u64) << self.cluster_bits;
        let limit_bytes = self.max_blocks.load(Relaxed) << self.cluster_bits;
        let (hits, misses) = (self.hits.load(Relaxed), self.misses.load(Relaxed));
        RefcountStatistics { hits, misses, bytes, limit_bytes }
    }

    /// Number of clusters that a block covers.
    fn block_entries(&self) -> u64 {
        1 << (self.cluster_bits + 3 - self.order)
    }

    fn block_of(&self, cluster: u64) -> (usize, usize) {
        let entries = self.block_entries();
        ((cluster / entries) as usize, (cluster % entries) as usize)
    }

    /// Allocates 1 to `wanted` consecutive clusters.
    pub(super) async fn allocate(
        &self,
        file: &ImageFile,
        metadata: &MetadataClusters,
        wanted: u64,
    ) -> Result<AllocatedRun> {
        let _lock = self.change_lock.exclusive(0..1).await;
        self.allocate_run(file, metadata, 1, wanted).await
    }

    /// Allocates exactly `wanted` consecutive clusters.
    pub(super) async fn allocate_all(
        &self,
        file: &ImageFile,
        metadata: &MetadataClusters,
        wanted: u64,
    ) -> Result<AllocatedRun> {
        let _lock = self.change_lock.exclusive(0..1).await;
        self.allocate_run(file, metadata, wanted, wanted).await
    }

    async fn allocate_run(
        &self,
        file: &ImageFile,
        metadata: &MetadataClusters,
        min_clusters: u64,
        max_clusters: u64,
    ) -> Result<AllocatedRun> {
        let mut start = self.lock().first_free;
        loop {
            let run = self.find(file, start, min_clusters, max_clusters).await?;
            // A run may extend into an area without a refcount block, which must exist before the
            // run is used.
            if let Some(block) = self.first_missing_block(&run) {
                // The new block takes a cluster of the run; the search continues after it.
                let is_block_added = self.add_block(file, metadata, block, run.start).await?;
                start = run.start + u64::from(is_block_added);
                continue;
            }
            // A refcount of 0 for a metadata cluster means that the image is corrupt: fail before
            // the write.
            metadata.check(
                file,
                run.start << self.cluster_bits,
                (run.end - run.start) << self.cluster_bits,
            )?;
            let run = self.with_file_space(file, run, min_clusters).await?;
            for cluster in run.clone() {
                self.put(cluster, 1);
            }
            let mut state = self.lock();
            // "Untouched" allows the caller to skip writing zeroes.
            let is_new = file.is_zero_from(run.start << self.cluster_bits);
            let untouched = is_new && run.start >= state.untouched;
            state.untouched = state.untouched.max(run.end);
            // With `min_clusters` above 1, smaller gaps before the run are still free.
            if min_clusters == 1 || state.first_free >= run.start {
                state.first_free = run.end;
            }
            return Ok(AllocatedRun {
                offset: run.start << self.cluster_bits,
                clusters: run.end - run.start,
                untouched,
            });
        }
    }

    /// Grows the file to contain the run. If it cannot grow that far, shortens the run to what
    /// fits, but not below `min_clusters`.
    async fn with_file_space(
        &self,
        file: &ImageFile,
        run: Range<u64>,
        min_clusters: u64,
    ) -> Result<Range<u64>> {
        match file.grow_to(run.end << self.cluster_bits).await {
            Ok(()) => Ok(run),
            Err(error) => {
                let file_clusters = file.size_bytes() >> self.cluster_bits;
                if error == Error::NO_SPACE && run.start + min_clusters <= file_clusters {
                    Ok(run.start..run.end.min(file_clusters))
                } else {
                    Err(error)
                }
            }
        }
    }

    /// Finds the first run of `min_clusters` to `max_clusters` free clusters from `start` on.
    async fn find(
        &self,
        file: &ImageFile,
        start: u64,
        min_clusters: u64,
        max_clusters: u64,
    ) -> Result<Range<u64>> {
        let mut run = start..start;
        loop {
            let cluster = run.end;
            let (block, index) = self.block_of(cluster);
            if cluster >= header::OFFSET_LIMIT >> self.cluster_bits {
                return Err(Error::NO_SPACE);
            }
            // Blocks known to be full are skipped without reading them.
            if self.lock().full.contains(&block) {
                let next = (block as u64 + 1) * self.block_entries();
                if run.end - run.start >= min_clusters {
                    return Ok(run);
                }
                run = next..next;
            } else if self.has_block(block) {
                self.load(file, block).await?;
                let mut state = self.lock();
                let mut is_full = index == 0;
                // The block was loaded above and is still cached: only the holder of `change_lock`
                // evicts blocks.
                let bytes = &state.blocks[&block].bytes;
                for index in index..self.block_entries() as usize {
                    if get(bytes, self.order, index) == 0 {
                        is_full = false;
                        run.end += 1;
                        if run.end - run.start == max_clusters {
                            return Ok(run);
                        }
                    } else if run.end - run.start >= min_clusters {
                        return Ok(run);
                    } else {
                        run = run.end + 1..run.end + 1;
                    }
                }
                if is_full {
                    state.full.insert(block);
                }
            } else {
                // An area without a block is free: absent blocks mean refcount 0.
                run.end = run.start.max(run.end) + (self.block_entries() - index as u64);
                if run.end - run.start >= max_clusters {
                    run.end = run.start + max_clusters;
                    return Ok(run);
                }
            }
        }
    }

    fn has_block(&self, block: usize) -> bool {
        self.lock().table.get(block) != 0
    }

    fn first_missing_block(&self, run: &Range<u64>) -> Option<usize> {
        let (first, last) = (self.block_of(run.start).0, self.block_of(run.end - 1).0);
        (first..=last).find(|block| !self.has_block(*block))
    }

    /// Creates a refcount block in the free cluster `at` and returns true. If the table is too
    /// short it is grown instead, the cluster stays free and the result is false.
    async fn add_block(
        &self,
        file: &ImageFile,
        metadata: &MetadataClusters,
        block: usize,
        at: u64,
    ) -> Result<bool> {
        if block >= self.lock().table.entries() {
            self.grow_table(file, metadata, block).await?;
            return Ok(false);
        }
        let offset = at << self.cluster_bits;
        metadata.check(file, offset, 1 << self.cluster_bits)?;
        file.grow_to((at + 1) << self.cluster_bits).await?;
        {
            let mut state = self.lock();
            let state = &mut *state;
            state.clock += 1;
            let bytes = vec![0; 1 << self.cluster_bits];
            state.blocks.insert(block, RefcountBlock { bytes, dirty: true, used: state.clock });
            state.table.set(block, offset);
            state.dirty_entries.insert(block);
            state.untouched = state.untouched.max(at + 1);
        }
        metadata.add(offset, 1 << self.cluster_bits);
        // The refcount of cluster `at` is in the new block itself, or in an existing block if the
        // run begins before the area that the new block covers.
        let (covering_block, _) = self.block_of(at);
        self.load(file, covering_block).await?;
        self.put(at, 1);
        Ok(true)
    }

    /// Moves the refcount table to a larger area, after the last cluster that the old table can
    /// cover.
    ///
    /// The writes are ordered so that the image is valid at every moment: the new table and its
    /// blocks, a flush, then the header.
    async fn grow_table(&self, file: &ImageFile, metadata: &MetadataClusters, block: usize) -> Result<()> {
        let (old_table, old_offset) = {
            let state = self.lock();
            (state.table.clone(), state.table_offset)
        };
        let cluster_bytes = 1_u64 << self.cluster_bits;
        let entries = self.block_entries();
        let per_cluster = cluster_bytes / 8;
        let old_entries = old_table.entries() as u64;
        let first = old_entries * entries;
        // Grows by half, plus the table's own clusters and the blocks that cover them.
        let mut table_clusters = ((block as u64 + 1) * 3 / 2 + 1).div_ceil(per_cluster);
        let blocks = loop {
            let blocks = (1..).find(|blocks| blocks * entries >= table_clusters + blocks).unwrap_or(1);
            if old_entries + blocks <= table_clusters * per_cluster {
                break blocks;
            }
            table_clusters += 1;
        };
        if table_clusters << self.cluster_bits > header::MAX_REFCOUNT_TABLE.max(cluster_bytes) {
            return Err(Error::NO_SPACE);
        }
        let end = first + table_clusters + blocks;
        if end >= header::OFFSET_LIMIT >> self.cluster_bits {
            return Err(Error::NO_SPACE);
        }
        metadata.check(file, first << self.cluster_bits, (end - first) << self.cluster_bits)?;
        file.grow_to(end << self.cluster_bits).await?;
        let mut table = old_table.clone();
        table.grow((table_clusters * per_cluster) as usize);
        let mut new_blocks = Vec::new();
        for number in 0..blocks {
            let mut bytes = vec![0; cluster_bytes as usize];
            for index in 0..entries.min((end - first).saturating_sub(number * entries)) {
                put(&mut bytes, self.order, index as usize, 1);
            }
            let block = (old_entries + number) as usize;
            table.set(block, (first + table_clusters + number) << self.cluster_bits);
            new_blocks.push((block, bytes));
        }
        let offset = first << self.cluster_bits;
        // The new table also refers to blocks that were added since the last flush, so they must
        // be written.
        let dirty = self.collect_dirty();
        let write = async {
            for (offset, bytes) in &dirty.blocks {
                file.write(*offset, bytes).await?;
            }
            for (block, bytes) in &new_blocks {
                file.write(table.get(*block), bytes).await?;
            }
            file.write(offset, &table.bytes()).await?;
            file.flush().await?;
            file.update_header(|header| {
                header.refcount_table_offset = offset;
                header.refcount_table_clusters = table_clusters as u32;
            })
            .await
        };
        if let Err(error) = write.await {
            self.restore_dirty(&dirty);
            return Err(error);
        }
        metadata.add(offset, (end - first) << self.cluster_bits);
        {
            let mut state = self.lock();
            let state = &mut *state;
            state.table = table;
            state.table_offset = offset;
            state.dirty_entries.clear();
            for (block, bytes) in new_blocks {
                state.clock += 1;
                state.blocks.insert(block, RefcountBlock { bytes, dirty: false, used: state.clock });
            }
            state.untouched = state.untouched.max(end);
        }
        // The header no longer refers to the old table.
        metadata.remove(old_offset, old_entries * 8);
        let old = old_offset >> self.cluster_bits;
        self.decrement(file, old..old + (old_entries * 8).div_ceil(cluster_bytes)).await?;
        Ok(())
    }

    /// Increments the refcounts of allocated clusters; either all or none.
    pub(super) async fn increment(&self, file: &ImageFile, clusters: Range<u64>) -> Result<()> {
        let _lock = self.change_lock.exclusive(0..1).await;
        // Checked first for all clusters, so that an error leaves no partial change.
        for cluster in clusters.clone() {
            let now = self.read(file, cluster).await?;
            if now == 0 || now == refcount_entries::max_refcount(self.order) {
                return Err(Error::INVALID);
            }
        }
        for cluster in clusters {
            let now = self.read(file, cluster).await?;
            self.put(cluster, now + 1);
        }
        Ok(())
    }

    /// Frees clusters that nothing in the file refers to.
    pub(super) async fn free_clusters(
        &self,
        file: &ImageFile,
        metadata: &MetadataClusters,
        clusters: Range<u64>,
        content: FreedContent,
    ) -> Result<()> {
        // Held until the discard completes: a cluster that was allocated again meanwhile would
        // lose its data.
        let _lock = self.change_lock.exclusive(0..1).await;
        if content != FreedContent::Metadata {
            let length = (clusters.end - clusters.start) << self.cluster_bits;
            metadata.check(file, clusters.start << self.cluster_bits, length)?;
        }
        for freed in self.decrement(file, clusters).await? {
            let (offset, length) =
                (freed.start << self.cluster_bits, (freed.end - freed.start) << self.cluster_bits);
            if content == FreedContent::Metadata {
                metadata.remove(offset, length);
            }
            if matches!(content, FreedContent::Metadata | FreedContent::Data { unmapped: true }) {
                // Only a hint: a failed discard wastes space and nothing else.
                let _ = file.storage().discard(offset, length).await;
            }
        }
        Ok(())
    }

    /// Frees blocks whose only reference, if any, is to themselves. No other metadata may be dirty
    /// or change meanwhile.
    pub(super) async fn drop_empty_blocks(
        &self,
        file: &ImageFile,
        metadata: &MetadataClusters,
    ) -> Result<()> {
        let _lock = self.change_lock.exclusive(0..1).await;
        let blocks: Vec<_> = self.lock().table.blocks().collect();
        let mut dropped = Vec::new();
        for (block, offset) in blocks {
            self.load(file, block).await?;
            let (own_block, own_index) = self.block_of(offset >> self.cluster_bits);
            let place = {
                let mut state = self.lock();
                let bytes = &state.blocks[&block].bytes;
                let counts = |index| get(bytes, self.order, index) != 0;
                let itself = |index| own_block == block && index == own_index;
                if (0..self.block_entries() as usize).any(|index| counts(index) && !itself(index)) {
                    continue;
                }
                state.table.set(block, 0);
                state.blocks.remove(&block);
                state.full.remove(&block);
                state.dirty_entries.remove(&block);
                state.table_offset + block as u64 * 8
            };
            // The references are removed durably before the clusters are freed, or a crash could
            // leave a table entry that points to reused space.
            file.write(place, &[0; 8]).await?;
            dropped.push((offset, own_block == block));
        }
        if dropped.is_empty() {
            return Ok(());
        }
        file.flush().await?;
        for (offset, by_itself) in dropped {
            let cluster = offset >> self.cluster_bits;
            if !by_itself {
                self.decrement(file, cluster..cluster + 1).await?;
            }
            {
                let mut state = self.lock();
                state.first_free = state.first_free.min(cluster);
            }
            metadata.remove(offset, 1 << self.cluster_bits);
            let _ = file.storage().discard(offset, 1 << self.cluster_bits).await;
        }
        Ok(())
    }

    /// Decrements refcounts and returns the runs of clusters that became free.
    async fn decrement(&self, file: &ImageFile, clusters: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut freed: Vec<Range<u64>> = Vec::new();
        for cluster in clusters {
            let now = self.read(file, cluster).await?;
            // A refcount of 0 is damage that `check` reports. Skipping the cluster loses no data.
            let Some(decremented) = now.checked_sub(1) else { continue };
            self.put(cluster, decremented);
            if decremented > 0 {
                continue;
            }
            let mut state = self.lock();
            state.first_free = state.first_free.min(cluster);
            state.full.remove(&self.block_of(cluster).0);
            if state.compressed_end >> self.cluster_bits == cluster {
                state.compressed_end = 0;
            }
            drop(state);
            match freed.last_mut() {
                Some(last) if last.end == cluster => last.end += 1,
                _ => freed.push(cluster..cluster + 1),
            }
        }
        Ok(freed)
    }

    /// Refcount of a cluster.
    pub(super) async fn get(&self, file: &ImageFile, cluster: u64) -> Result<u64> {
        let _lock = self.change_lock.exclusive(0..1).await;
        self.read(file, cluster).await
    }

    async fn read(&self, file: &ImageFile, cluster: u64) -> Result<u64> {
        let (block, index) = self.block_of(cluster);
        if !self.has_block(block) {
            return Ok(0);
        }
        self.load(file, block).await?;
        Ok(get(&self.lock().blocks[&block].bytes, self.order, index))
    }

    /// Sets a refcount; its block must be loaded.
    fn put(&self, cluster: u64, value: u64) {
        let (block, index) = self.block_of(cluster);
        let mut state = self.lock();
        if let Some(block) = state.blocks.get_mut(&block) {
            put(&mut block.bytes, self.order, index, value);
            block.dirty = true;
        }
    }

    /// Allocates `length` bytes for compressed data, which may share a cluster with other
    /// compressed data.
    pub(super) async fn allocate_bytes(
        &self,
        file: &ImageFile,
        metadata: &MetadataClusters,
        length: u64,
    ) -> Result<u64> {
        let _lock = self.change_lock.exclusive(0..1).await;
        let cluster_bytes = 1_u64 << self.cluster_bits;
        let end = self.lock().compressed_end;
        // The last cluster can be shared if it has space and its refcount can be incremented.
        let tail = if end.is_multiple_of(cluster_bytes) { 0 } else { cluster_bytes - end % cluster_bytes };
        let last = end >> self.cluster_bits;
        let is_shared = tail > 0 && self.read(file, last).await? < refcount_entries::max_refcount(self.order);
        if is_shared && length <= tail {
            let number = self.read(file, last).await?;
            self.put(last, number + 1);
            self.lock().compressed_end = end + length;
            return Ok(end);
        }
        let allocated = self.allocate_run(file, metadata, 1, 1).await?;
        // The data begins in the last cluster and ends in the newly allocated next one.
        if is_shared && allocated.offset >> self.cluster_bits == last + 1 {
            let number = self.read(file, last).await?;
            self.put(last, number + 1);
            self.lock().compressed_end = end + length;
            return Ok(end);
        }
        self.lock().compressed_end = allocated.offset + length;
        Ok(allocated.offset)
    }

    /// Loads a block into the cache. The caller must hold `change_lock`.
    async fn load(&self, file: &ImageFile, block: usize) -> Result<()> {
        let offset = {
            let mut state = self.lock();
            state.clock += 1;
            let clock = state.clock;
            if let Some(block) = state.blocks.get_mut(&block) {
                block.used = clock;
                self.hits.fetch_add(1, Relaxed);
                return Ok(());
            }
            state.table.get(block)
        };
        self.misses.fetch_add(1, Relaxed);
        self.evict_clean_blocks(file).await?;
        let bytes = file.read(offset, 1 << self.cluster_bits).await?;
        let mut state = self.lock();
        let used = state.clock;
        state.blocks.insert(block, RefcountBlock { bytes, dirty: false, used });
        Ok(())
    }

    /// Evicts least recently used blocks until one more fits. Dirty ones are written first.
    async fn evict_clean_blocks(&self, file: &ImageFile) -> Result<()> {
        loop {
            let (block, offset, dirty) = {
                let mut state = self.lock();
                if (state.blocks.len() as u64) < self.max_blocks.load(Relaxed) {
                    return Ok(());
                }
                let Some((&number, block)) = state.blocks.iter().min_by_key(|(_, block)| block.used) else {
                    return Ok(());
                };
                let dirty = block.dirty.then(|| block.bytes.clone());
                if dirty.is_none() {
                    state.blocks.remove(&number);
                    continue;
                }
                (number, state.table.get(number), dirty)
            };
            if let Some(bytes) = dirty {
                file.write(offset, &bytes).await?;
                let mut state = self.lock();
                // Unchanged since the write: only the holder of `change_lock` changes blocks.
                state.blocks.remove(&block);
            }
        }
    }

    /// Copies all dirty metadata and marks it clean.
    fn collect_dirty(&self) -> DirtyRefcounts {
        let mut state = self.lock();
        let state = &mut *state;
        let mut dirty = DirtyRefcounts::default();
        for (number, block) in state.blocks.iter_mut().filter(|(_, block)| block.dirty) {
            block.dirty = false;
            dirty.blocks.push((state.table.get(*number), block.bytes.clone()));
            dirty.indices.push(*number);
        }
        for entry in std::mem::take(&mut state.dirty_entries) {
            let place = state.table_offset + entry as u64 * 8;
            dirty.entries.push((place, state.table.get(entry).to_be_bytes()));
            dirty.entry_indices.push(entry);
        }
        dirty
    }

    /// Writes dirty blocks and returns them with the table entries to be written after the next
    /// flush.
    pub(super) async fn write(&self, file: &ImageFile) -> Result<DirtyRefcounts> {
        // Excludes eviction, which also writes blocks.
        let _lock = self.change_lock.exclusive(0..1).await;
        let dirty = self.collect_dirty();
        for (offset, bytes) in &dirty.blocks {
            if let Err(error) = file.write(*offset, bytes).await {
                self.restore_dirty(&dirty);
                return Err(error);
            }
        }
        Ok(dirty)
    }

    /// Writes the table entries that refer to new blocks. The blocks must have been flushed.
    /// Returns true if there were any, which then need another flush.
    pub(super) async fn write_entries(&self, file: &ImageFile, written: &DirtyRefcounts) -> Result<bool> {
        for (offset, entry) in &written.entries {
            let moved = {
                let state = self.lock();
                !(state.table_offset..state.table_offset + state.table.entries() as u64 * 8).contains(offset)
            };
            // The table was moved since then, and written completely at its new offset.
            if moved {
                continue;
            }
            file.write(*offset, entry).await?;
        }
        Ok(!written.entries.is_empty())
    }

    /// Marks metadata dirty again after a failed write.
    pub(super) fn restore_dirty(&self, dirty: &DirtyRefcounts) {
        let mut state = self.lock();
        for number in &dirty.indices {
            if let Some(block) = state.blocks.get_mut(number) {
                block.dirty = true;
            }
        }
        state.dirty_entries.extend(dirty.entry_indices.iter().copied());
    }

    /// True if any metadata is dirty.
    pub(super) fn is_dirty(&self) -> bool {
        let state = self.lock();
        !state.dirty_entries.is_empty() || state.blocks.values().any(|block| block.dirty)
    }

    /// End of the last allocated cluster, for truncating the file.
    pub(super) async fn used_end(&self, file: &ImageFile) -> Result<u64> {
        let _lock = self.change_lock.exclusive(0..1).await;
        let mut cluster = file.size_bytes().div_ceil(1 << self.cluster_bits);
        // Skips whole blocks: a sparse file can be arbitrarily long.
        let (table_entries, entries) = (self.lock().table.entries() as u64, self.block_entries());
        cluster = cluster.min(table_entries.saturating_mul(entries));
        while cluster > 0 {
            let (block, last) = self.block_of(cluster - 1);
            if self.has_block(block) {
                self.load(file, block).await?;
                let state = self.lock();
                let bytes = &state.blocks[&block].bytes;
                if let Some(used) = (0..=last).rev().find(|index| get(bytes, self.order, *index) > 0) {
                    cluster -= (last - used) as u64;
                    break;
                }
            }
            cluster -= last as u64 + 1;
        }
        Ok(cluster << self.cluster_bits)
    }
}

impl DirtyRefcounts {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.entries.is_empty()
    }
}
