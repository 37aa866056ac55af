//! Which clusters of the file are in use: the refcount table and its blocks, and the search for
//! free clusters.
//!
//! ```text
//!   refcount table ─► refcount block ─► a number for each cluster: 0 free, 1 used once, more: shared
//!     (in memory)       (some in memory, the rest in the file)                    with snapshots
//! ```
//!
//! Numbers rise in memory when a cluster is taken, and reach the file before anything that refers
//! to the cluster does ([`writeback`](super::writeback)). They fall only when nothing in the file
//! refers to the cluster any more. So a crash leaves numbers that are too high and never too low. A
//! block may therefore be written at any time, and is written when others need its space.
//!
//! One task at a time searches or changes; the others wait for their turn.
//!
//! Never allocates a cluster with metadata, even if the numbers say that it is free: such an image
//! is marked as corrupt.

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
    numbers::{self, get, put},
    overlap::Metadata,
};
use reactor::error::{Error, Result};
use storage::RangeLocks;

/// What a cluster held that is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// Metadata, which it is protected as until then, or what a snapshot had.
    Metadata,
    /// Guest data, or nothing yet. `unmapped`: nothing took its place, so the storage may be told
    /// that it is not needed.
    Data { unmapped: bool },
    /// Compressed guest data: others may have a part of the same clusters.
    Compressed,
}

/// What there is to know about refcounts, shared by the workers.
#[derive(Debug)]
pub(super) struct Refcounts {
    cluster_bits: u32,
    order: u32,
    turn: RangeLocks,
    state: Mutex<State>,
    /// Blocks in memory, at most, unless all have changes.
    most_blocks: AtomicU64,
    hits: AtomicU64,
    misses: AtomicU64,
}

#[derive(Debug)]
struct State {
    table_offset: u64,
    table: RefcountTable,
    /// Entries of the table that are not in the file yet.
    dirty_entries: BTreeSet<usize>,
    blocks: BTreeMap<usize, Block>,
    clock: u64,
    /// No cluster before this one is free.
    first_free: u64,
    /// Nor one of these blocks', which a search was through: it need not read them again.
    full: BTreeSet<usize>,
    /// Clusters from here on were never handed out since the image was opened. What the file had
    /// then is not zero all the same: see [`ImageFile::is_zero_from`].
    untouched: u64,
    /// Where the last compressed cluster ended, inside a cluster that has room.
    compressed_end: u64,
}

#[derive(Debug)]
struct Block {
    bytes: Vec<u8>,
    dirty: bool,
    used: u64,
}

/// Clusters that were found free and are in use from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Of the first, in the file.
    pub(super) offset: u64,
    /// How many, one after the other.
    pub(super) clusters: u64,
    /// They read as zeroes.
    pub(super) untouched: bool,
}

/// The refcount cache, in figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefcountStatistics {
    /// Lookups that found their block.
    pub hits: u64,
    /// Blocks that had to be read.
    pub misses: u64,
    /// Memory the blocks take now, in bytes.
    pub bytes: u64,
    /// The most that they may take, in bytes.
    pub limit_bytes: u64,
}

/// Metadata that must reach the file in this order: blocks, then entries of the table that refer to
/// new ones.
#[derive(Debug, Default)]
pub(super) struct Dirty {
    /// Offset in the file and content.
    pub(super) blocks: Vec<(u64, Vec<u8>)>,
    /// Likewise, of single entries.
    pub(super) entries: Vec<(u64, [u8; 8])>,
    indices: Vec<usize>,
    entry_indices: Vec<usize>,
}

impl State {
    fn new(header: &header::Header, table: RefcountTable) -> Self {
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
    /// `table` as it is in the file, checked.
    pub(super) fn new(header: &header::Header, table: RefcountTable, cache_bytes: u64) -> Self {
        Self {
            cluster_bits: header.cluster_bits,
            order: header.refcount_order,
            turn: RangeLocks::default(),
            state: Mutex::new(State::new(header, table)),
            most_blocks: AtomicU64::new((cache_bytes >> header.cluster_bits).max(1)),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Another has had the file: nothing that is in memory holds any more.
    pub(super) fn replace(&self, header: &header::Header, table: RefcountTable) {
        *self.lock() = State::new(header, table);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Changed by single assignments: a panic elsewhere leaves it whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_cache_bytes(&self, bytes: u64) {
        self.most_blocks.store((bytes >> self.cluster_bits).max(1), Relaxed);
    }

    pub(super) fn statistics(&self) -> RefcountStatistics {
        let bytes = (self.lock().blocks.len() as u64) << self.cluster_bits;
        let limit_bytes = self.most_blocks.load(Relaxed) << self.cluster_bits;
        let (hits, misses) = (self.hits.load(Relaxed), self.misses.load(Relaxed));
        RefcountStatistics { hits, misses, bytes, limit_bytes }
    }

    /// Clusters that a block has numbers for.
    fn block_entries(&self) -> u64 {
        1 << (self.cluster_bits + 3 - self.order)
    }

    fn block_of(&self, cluster: u64) -> (usize, usize) {
        let entries = self.block_entries();
        ((cluster / entries) as usize, (cluster % entries) as usize)
    }

    /// Takes up to `wanted` clusters that follow each other, one at least.
    pub(super) async fn take(&self, file: &ImageFile, metadata: &Metadata, wanted: u64) -> Result<Found> {
        let _turn = self.turn.exclusive(0..1).await;
        self.take_run(file, metadata, 1, wanted).await
    }

    /// Takes exactly so many clusters that follow each other.
    pub(super) async fn take_all(&self, file: &ImageFile, metadata: &Metadata, wanted: u64) -> Result<Found> {
        let _turn = self.turn.exclusive(0..1).await;
        self.take_run(file, metadata, wanted, wanted).await
    }

    async fn take_run(&self, file: &ImageFile, metadata: &Metadata, least: u64, most: u64) -> Result<Found> {
        let mut start = self.lock().first_free;
        loop {
            let run = self.find(file, start, least, most).await?;
            if let Some(block) = self.first_missing_block(&run) {
                // The block lies where free clusters were found, and those behind it are looked at
                // again.
                let took_it = self.add_block(file, metadata, block, run.start).await?;
                start = run.start + u64::from(took_it);
                continue;
            }
            metadata.check(
                file,
                run.start << self.cluster_bits,
                (run.end - run.start) << self.cluster_bits,
            )?;
            let run = self.with_room(file, run, least).await?;
            for cluster in run.clone() {
                self.put(cluster, 1);
            }
            let mut state = self.lock();
            let is_new = file.is_zero_from(run.start << self.cluster_bits);
            let untouched = is_new && run.start >= state.untouched;
            state.untouched = state.untouched.max(run.end);
            // With `least` above one, smaller gaps before the run are still free.
            if least == 1 || state.first_free >= run.start {
                state.first_free = run.end;
            }
            return Ok(Found {
                offset: run.start << self.cluster_bits,
                clusters: run.end - run.start,
                untouched,
            });
        }
    }

    /// Makes the file long enough for a run; where it cannot be, for as much of it as fits, `least`
    /// clusters at least.
    async fn with_room(&self, file: &ImageFile, run: Range<u64>, least: u64) -> Result<Range<u64>> {
        match file.make_room(run.end << self.cluster_bits).await {
            Ok(()) => Ok(run),
            Err(error) => {
                let there = file.size_bytes() >> self.cluster_bits;
                if error == Error::NO_SPACE && run.start + least <= there {
                    Ok(run.start..run.end.min(there))
                } else {
                    Err(error)
                }
            }
        }
    }

    /// The first free run of at least `least` clusters from `start` on; no longer than `most`.
    async fn find(&self, file: &ImageFile, start: u64, least: u64, most: u64) -> Result<Range<u64>> {
        let mut run = start..start;
        loop {
            let cluster = run.end;
            let (block, index) = self.block_of(cluster);
            if cluster >= header::OFFSET_LIMIT >> self.cluster_bits {
                return Err(Error::NO_SPACE);
            }
            if self.lock().full.contains(&block) {
                let next = (block as u64 + 1) * self.block_entries();
                if run.end - run.start >= least {
                    return Ok(run);
                }
                run = next..next;
            } else if self.has_block(block) {
                self.load(file, block).await?;
                let mut state = self.lock();
                let mut is_full = index == 0;
                // There since the turn is ours: only who has it drops blocks.
                let bytes = &state.blocks[&block].bytes;
                for index in index..self.block_entries() as usize {
                    if get(bytes, self.order, index) == 0 {
                        is_full = false;
                        run.end += 1;
                        if run.end - run.start == most {
                            return Ok(run);
                        }
                    } else if run.end - run.start >= least {
                        return Ok(run);
                    } else {
                        run = run.end + 1..run.end + 1;
                    }
                }
                if is_full {
                    state.full.insert(block);
                }
            } else {
                run.end = run.start.max(run.end) + (self.block_entries() - index as u64);
                if run.end - run.start >= most {
                    run.end = run.start + most;
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

    /// Makes a refcount block in the free cluster `at`; or makes the table longer, if that has to
    /// come first, and leaves the cluster.
    async fn add_block(&self, file: &ImageFile, metadata: &Metadata, block: usize, at: u64) -> Result<bool> {
        if block >= self.lock().table.entries() {
            self.grow_table(file, metadata, block).await?;
            return Ok(false);
        }
        let offset = at << self.cluster_bits;
        metadata.check(file, offset, 1 << self.cluster_bits)?;
        file.make_room((at + 1) << self.cluster_bits).await?;
        {
            let mut state = self.lock();
            let state = &mut *state;
            state.clock += 1;
            let bytes = vec![0; 1 << self.cluster_bits];
            state.blocks.insert(block, Block { bytes, dirty: true, used: state.clock });
            state.table.set(block, offset);
            state.dirty_entries.insert(block);
            state.untouched = state.untouched.max(at + 1);
        }
        metadata.add(offset, 1 << self.cluster_bits);
        // Its own number is in itself, or in a block that is there: a run begins where the block
        // before it ends.
        let (own, _) = self.block_of(at);
        self.load(file, own).await?;
        self.put(at, 1);
        Ok(true)
    }

    /// Moves the refcount table to where there is room for a larger one: behind everything that the
    /// old one can describe.
    ///
    /// Written at once, in an order in which the image is valid at any moment: the new table and
    /// its blocks, then the header.
    async fn grow_table(&self, file: &ImageFile, metadata: &Metadata, block: usize) -> Result<()> {
        let (old_table, old_offset) = {
            let state = self.lock();
            (state.table.clone(), state.table_offset)
        };
        let cluster_bytes = 1_u64 << self.cluster_bits;
        let entries = self.block_entries();
        let per_cluster = cluster_bytes / 8;
        let old_entries = old_table.entries() as u64;
        let first = old_entries * entries;
        // Half as much again, and room for the table itself and the blocks that count it.
        let mut table_clusters = ((block as u64 + 1) * 3 / 2 + 1).div_ceil(per_cluster);
        let blocks = loop {
            let blocks = (1..).find(|blocks| blocks * entries >= table_clusters + blocks).unwrap_or(1);
            if old_entries + blocks <= table_clusters * per_cluster {
                break blocks;
            }
            table_clusters += 1;
        };
        if table_clusters << self.cluster_bits > header::LARGEST_REFCOUNT_TABLE.max(cluster_bytes) {
            return Err(Error::NO_SPACE);
        }
        let end = first + table_clusters + blocks;
        if end >= header::OFFSET_LIMIT >> self.cluster_bits {
            return Err(Error::NO_SPACE);
        }
        metadata.check(file, first << self.cluster_bits, (end - first) << self.cluster_bits)?;
        file.make_room(end << self.cluster_bits).await?;
        let mut table = old_table.clone();
        table.grow((table_clusters * per_cluster) as usize);
        let mut made = Vec::new();
        for number in 0..blocks {
            let mut bytes = vec![0; cluster_bytes as usize];
            for index in 0..entries.min((end - first).saturating_sub(number * entries)) {
                put(&mut bytes, self.order, index as usize, 1);
            }
            let block = (old_entries + number) as usize;
            table.set(block, (first + table_clusters + number) << self.cluster_bits);
            made.push((block, bytes));
        }
        let offset = first << self.cluster_bits;
        // Blocks that were added since the last time belong to the table too, so they have to be
        // there.
        let dirty = self.collect_dirty();
        let write = async {
            for (offset, bytes) in &dirty.blocks {
                file.write(*offset, bytes).await?;
            }
            for (block, bytes) in &made {
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
            self.keep(&dirty);
            return Err(error);
        }
        metadata.add(offset, (end - first) << self.cluster_bits);
        {
            let mut state = self.lock();
            let state = &mut *state;
            state.table = table;
            state.table_offset = offset;
            state.dirty_entries.clear();
            for (block, bytes) in made {
                state.clock += 1;
                state.blocks.insert(block, Block { bytes, dirty: false, used: state.clock });
            }
            state.untouched = state.untouched.max(end);
        }
        // Nothing refers to the old table any more.
        metadata.remove(old_offset, old_entries * 8);
        let old = old_offset >> self.cluster_bits;
        self.lower(file, old..old + (old_entries * 8).div_ceil(cluster_bytes)).await?;
        Ok(())
    }

    /// Adds one to the numbers of clusters, which are in use. All or nothing.
    pub(super) async fn raise(&self, file: &ImageFile, clusters: Range<u64>) -> Result<()> {
        let _turn = self.turn.exclusive(0..1).await;
        for cluster in clusters.clone() {
            let now = self.read(file, cluster).await?;
            if now == 0 || now == numbers::largest(self.order) {
                return Err(Error::INVALID);
            }
        }
        for cluster in clusters {
            let now = self.read(file, cluster).await?;
            self.put(cluster, now + 1);
        }
        Ok(())
    }

    /// Gives clusters back that nothing in the file refers to any more.
    pub(super) async fn give_back(
        &self,
        file: &ImageFile,
        metadata: &Metadata,
        clusters: Range<u64>,
        held: Held,
    ) -> Result<()> {
        // Held to the end: nobody may take a cluster that is about to be discarded.
        let _turn = self.turn.exclusive(0..1).await;
        if held != Held::Metadata {
            let length = (clusters.end - clusters.start) << self.cluster_bits;
            metadata.check(file, clusters.start << self.cluster_bits, length)?;
        }
        for freed in self.lower(file, clusters).await? {
            let (offset, length) =
                (freed.start << self.cluster_bits, (freed.end - freed.start) << self.cluster_bits);
            if held == Held::Metadata {
                metadata.remove(offset, length);
            }
            if matches!(held, Held::Metadata | Held::Data { unmapped: true }) {
                // A hint: what it does not do costs room and nothing else.
                let _ = file.storage().discard(offset, length).await;
            }
        }
        Ok(())
    }

    /// Gives back the blocks that count nothing, or nothing but themselves. Only while nothing else
    /// of the metadata is changed or waits to be written.
    pub(super) async fn drop_empty_blocks(&self, file: &ImageFile, metadata: &Metadata) -> Result<()> {
        let _turn = self.turn.exclusive(0..1).await;
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
                self.lower(file, cluster..cluster + 1).await?;
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

    /// Lowers numbers, and returns what is free then, each with its neighbours.
    async fn lower(&self, file: &ImageFile, clusters: Range<u64>) -> Result<Vec<Range<u64>>> {
        let mut freed: Vec<Range<u64>> = Vec::new();
        for cluster in clusters {
            let now = self.read(file, cluster).await?;
            // A number that is too low already is for `check` to find; nothing is lost by leaving
            // it.
            let Some(less) = now.checked_sub(1) else { continue };
            self.put(cluster, less);
            if less > 0 {
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

    /// A cluster's number.
    pub(super) async fn get(&self, file: &ImageFile, cluster: u64) -> Result<u64> {
        let _turn = self.turn.exclusive(0..1).await;
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

    /// Sets a number; its block is loaded.
    fn put(&self, cluster: u64, value: u64) {
        let (block, index) = self.block_of(cluster);
        let mut state = self.lock();
        if let Some(block) = state.blocks.get_mut(&block) {
            put(&mut block.bytes, self.order, index, value);
            block.dirty = true;
        }
    }

    /// Room for `length` bytes of compressed data, which may share a cluster with others.
    pub(super) async fn take_bytes(&self, file: &ImageFile, metadata: &Metadata, length: u64) -> Result<u64> {
        let _turn = self.turn.exclusive(0..1).await;
        let cluster_bytes = 1_u64 << self.cluster_bits;
        let end = self.lock().compressed_end;
        // The last cluster may have one more tenant, if it has room and its number too.
        let tail = if end.is_multiple_of(cluster_bytes) { 0 } else { cluster_bytes - end % cluster_bytes };
        let last = end >> self.cluster_bits;
        let is_shared = tail > 0 && self.read(file, last).await? < numbers::largest(self.order);
        if is_shared && length <= tail {
            let number = self.read(file, last).await?;
            self.put(last, number + 1);
            self.lock().compressed_end = end + length;
            return Ok(end);
        }
        let found = self.take_run(file, metadata, 1, 1).await?;
        // Data that begins in the last cluster and ends in the next one.
        if is_shared && found.offset >> self.cluster_bits == last + 1 {
            let number = self.read(file, last).await?;
            self.put(last, number + 1);
            self.lock().compressed_end = end + length;
            return Ok(end);
        }
        self.lock().compressed_end = found.offset + length;
        Ok(found.offset)
    }

    /// Brings a block into memory. Whoever has the turn calls it.
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
        self.make_room(file).await?;
        let bytes = file.read(offset, 1 << self.cluster_bits).await?;
        let mut state = self.lock();
        let used = state.clock;
        state.blocks.insert(block, Block { bytes, dirty: false, used });
        Ok(())
    }

    /// Drops the blocks not used for longest until one more fits. What was changed is written
    /// first.
    async fn make_room(&self, file: &ImageFile) -> Result<()> {
        loop {
            let (block, offset, dirty) = {
                let mut state = self.lock();
                if (state.blocks.len() as u64) < self.most_blocks.load(Relaxed) {
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
                // Only who has the turn changes blocks, so it is as it was written.
                state.blocks.remove(&block);
            }
        }
    }

    /// Copies of what is not in the file.
    fn collect_dirty(&self) -> Dirty {
        let mut state = self.lock();
        let state = &mut *state;
        let mut dirty = Dirty::default();
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

    /// Has changes written: blocks, then what refers to new ones, each followed by a flush.
    pub(super) async fn write(&self, file: &ImageFile) -> Result<Dirty> {
        // Nobody else writes blocks meanwhile, to make room.
        let _turn = self.turn.exclusive(0..1).await;
        let dirty = self.collect_dirty();
        for (offset, bytes) in &dirty.blocks {
            if let Err(error) = file.write(*offset, bytes).await {
                self.keep(&dirty);
                return Err(error);
            }
        }
        Ok(dirty)
    }

    /// After a flush: writes the entries of the table that refer to blocks which are in the file
    /// now. Says whether there were any, which need another flush.
    pub(super) async fn write_entries(&self, file: &ImageFile, written: &Dirty) -> Result<bool> {
        for (offset, entry) in &written.entries {
            let moved = {
                let state = self.lock();
                !(state.table_offset..state.table_offset + state.table.entries() as u64 * 8).contains(offset)
            };
            // The table has been moved since, and was written as a whole.
            if moved {
                continue;
            }
            file.write(*offset, entry).await?;
        }
        Ok(!written.entries.is_empty())
    }

    /// Takes back that something was written, after an error.
    pub(super) fn keep(&self, dirty: &Dirty) {
        let mut state = self.lock();
        for number in &dirty.indices {
            if let Some(block) = state.blocks.get_mut(number) {
                block.dirty = true;
            }
        }
        state.dirty_entries.extend(dirty.entry_indices.iter().copied());
    }

    /// Whether anything waits to be written.
    pub(super) fn is_dirty(&self) -> bool {
        let state = self.lock();
        !state.dirty_entries.is_empty() || state.blocks.values().any(|block| block.dirty)
    }

    /// The end of the last cluster in use, as far as is known; for cutting the file off behind it.
    pub(super) async fn end_of_use(&self, file: &ImageFile) -> Result<u64> {
        let _turn = self.turn.exclusive(0..1).await;
        let mut cluster = file.size_bytes().div_ceil(1 << self.cluster_bits);
        // Block by block: a sparse file may be as long as it likes.
        let (most, entries) = (self.lock().table.entries() as u64, self.block_entries());
        cluster = cluster.min(most.saturating_mul(entries));
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

impl Dirty {
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty() && self.entries.is_empty()
    }
}
