//! The L2 cache: slices of L2 tables in memory, found without a lock and without an allocation.
//!
//! ```text
//!   guest cluster ─► slice number ─► set = number mod sets ─► 8 ways ─► entries
//!                                                             │ each an atomic pointer to a slice
//! ```
//!
//! A slice is `l2-cache-entry-size` bytes of an L2 table. Slices with the same number modulo the
//! number of sets compete for one set; the least recently used of them makes room. Neighbouring
//! slices are in different sets, so a disk whose slices all fit never loses one.
//!
//! Readers load a pointer and entries. Everything that changes the cache (loading, evicting,
//! changing entries) is done by whoever holds the image's [`Pending`](super::writeback::Pending), a
//! lock that is held for nanoseconds.
//!
//! Never evicts a slice whose changes are not in the file, and never reads or writes the file
//! itself.

use std::sync::{
    Arc,
    atomic::{
        AtomicBool, AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use arc_swap::ArcSwapOption;

use super::gate::{slot_of_thread, slots};

/// Ways of a set.
const WAYS: usize = 8;

/// A piece of an L2 table, in memory.
#[derive(Debug)]
pub(super) struct Slice {
    /// Its number: guest clusters from `number × entries` on.
    pub(super) number: u64,
    /// As in the image, in the processor's byte order; two words each with extended entries.
    words: Box<[AtomicU64]>,
    /// Odd while a pair of words is changed.
    version: AtomicU32,
    /// When it was last used, by the cache's clock.
    used: AtomicU32,
    /// It has changes that are not in the file.
    pub(super) dirty: AtomicBool,
    /// Its changes are on their way.
    pub(super) writing: AtomicBool,
}

impl Slice {
    pub(super) fn new(number: u64, words: impl Iterator<Item = u64>) -> Self {
        Self {
            number,
            words: words.map(AtomicU64::new).collect(),
            version: AtomicU32::new(0),
            used: AtomicU32::new(0),
            dirty: AtomicBool::new(false),
            writing: AtomicBool::new(false),
        }
    }

    /// Entry `index`: the word, and the map of an extended one.
    pub(super) fn get(&self, index: usize, extended: bool) -> (u64, u64) {
        if !extended {
            return (self.words[index].load(Acquire), 0);
        }
        loop {
            let before = self.version.load(Acquire);
            let pair = (self.words[2 * index].load(Acquire), self.words[2 * index + 1].load(Acquire));
            // The loads above are acquiring, so this one cannot come before them.
            if before.is_multiple_of(2) && self.version.load(Acquire) == before {
                return pair;
            }
            std::hint::spin_loop();
        }
    }

    /// Changes an entry. One at a time: by the holder of `Pending`.
    pub(super) fn set(&self, index: usize, extended: bool, (word, map): (u64, u64)) {
        if !extended {
            self.words[index].store(word, Release);
            return;
        }
        let version = self.version.load(Relaxed);
        self.version.swap(version.wrapping_add(1), std::sync::atomic::Ordering::AcqRel);
        self.words[2 * index].store(word, Release);
        self.words[2 * index + 1].store(map, Release);
        self.version.store(version.wrapping_add(2), Release);
    }

    /// The bytes as they belong into the file.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Acquire).to_be_bytes()).collect()
    }
}

/// What a cache has done, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Lookups that found their slice.
    pub hits: u64,
    /// Slices that had to be read.
    pub misses: u64,
    /// Slices that made room for others.
    pub evictions: u64,
    /// Memory the slices take now, in bytes.
    pub bytes: u64,
    /// What it may take, in bytes.
    pub limit_bytes: u64,
    /// How much of the disk it covers when it is full, in bytes; no more than the disk.
    pub covered_bytes: u64,
}

#[derive(Debug)]
#[repr(align(128))]
#[derive(Default)]
struct Hits(AtomicU64);

/// See the head of this file.
#[derive(Debug)]
pub(super) struct L2Cache {
    ways: Box<[ArcSwapOption<Slice>]>,
    sets: u64,
    slice_bytes: u64,
    /// Rises with every slice that is loaded.
    clock: AtomicU32,
    hits: Box<[Hits]>,
    misses: AtomicU64,
    evictions: AtomicU64,
    slices: AtomicU64,
}

impl L2Cache {
    /// A cache of at least two slices of `slice_bytes` each, and no more memory than `limit_bytes`
    /// beyond that.
    pub(super) fn new(limit_bytes: u64, slice_bytes: u64) -> Self {
        let slices = (limit_bytes / slice_bytes).max(2);
        // With fewer slices than ways there is a single set; otherwise what is left over is not
        // used.
        let sets = (slices / WAYS as u64).max(1);
        let ways = if slices < WAYS as u64 { slices } else { sets * WAYS as u64 };
        Self {
            ways: (0..ways).map(|_| ArcSwapOption::empty()).collect(),
            sets,
            slice_bytes,
            clock: AtomicU32::new(0),
            hits: (0..slots()).map(|_| Hits::default()).collect(),
            misses: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            slices: AtomicU64::new(0),
        }
    }

    fn set(&self, number: u64) -> &[ArcSwapOption<Slice>] {
        let ways = self.ways.len() / self.sets as usize;
        let first = (number % self.sets) as usize * ways;
        &self.ways[first..first + ways]
    }

    /// Looks at a slice where it is, if it is there.
    pub(super) fn with<T>(&self, number: u64, look: impl FnOnce(&Slice) -> T) -> Option<T> {
        for way in self.set(number) {
            let guard = way.load();
            if let Some(slice) = guard.as_ref().filter(|slice| slice.number == number) {
                self.touch(slice);
                // Each thread has its own count, so this is no contention.
                self.hits[slot_of_thread()].0.fetch_add(1, Relaxed);
                return Some(look(slice));
            }
        }
        None
    }

    /// A slice, to be kept beyond a look.
    pub(super) fn get(&self, number: u64) -> Option<Arc<Slice>> {
        let slice = self.set(number).iter().find_map(|way| {
            // Compared where it is: a count of users that others change too is not touched for
            // nothing.
            let guard = way.load();
            guard.as_ref().filter(|slice| slice.number == number).cloned()
        })?;
        self.touch(&slice);
        Some(slice)
    }

    fn touch(&self, slice: &Slice) {
        let clock = self.clock.load(Relaxed);
        if slice.used.load(Relaxed) != clock {
            slice.used.store(clock, Relaxed);
        }
    }

    /// Puts a slice in; one that was not used for longest makes room. Gives it back if all of its
    /// set have changes that are not in the file: they have to be written first.
    pub(super) fn insert(&self, slice: Arc<Slice>) -> Result<(), Arc<Slice>> {
        let clock = self.clock.fetch_add(1, Relaxed).wrapping_add(1);
        slice.used.store(clock, Relaxed);
        let set = self.set(slice.number);
        let mut victim = None;
        for way in set {
            let guard = way.load();
            let Some(held) = guard.as_ref() else {
                drop(guard);
                way.store(Some(slice));
                self.misses.fetch_add(1, Relaxed);
                self.slices.fetch_add(1, Relaxed);
                return Ok(());
            };
            debug_assert_ne!(held.number, slice.number, "a slice is loaded once");
            if held.dirty.load(Relaxed) || held.writing.load(Relaxed) {
                continue;
            }
            let age = clock.wrapping_sub(held.used.load(Relaxed));
            if victim.is_none_or(|(oldest, _)| age > oldest) {
                victim = Some((age, way));
            }
        }
        let Some((_, way)) = victim else { return Err(slice) };
        way.store(Some(slice));
        self.misses.fetch_add(1, Relaxed);
        self.evictions.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Drops slices that were not used since the clock showed `since`, and says what it shows now.
    /// For `cache-clean-interval`.
    pub(super) fn drop_unused(&self, since: u32) -> u32 {
        let clock = self.clock.fetch_add(1, Relaxed).wrapping_add(1);
        for way in &self.ways {
            let is_unused = way.load().as_ref().is_some_and(|slice| {
                let is_clean = !slice.dirty.load(Relaxed) && !slice.writing.load(Relaxed);
                is_clean && clock.wrapping_sub(slice.used.load(Relaxed)) > clock.wrapping_sub(since)
            });
            if is_unused {
                way.store(None);
                self.slices.fetch_sub(1, Relaxed);
            }
        }
        clock
    }

    /// Drops everything; nothing in it has changes that are not in the file.
    pub(super) fn clear(&self) {
        for way in &self.ways {
            way.store(None);
        }
        self.slices.store(0, Relaxed);
    }

    /// Figures; `slice_covers` is how much of the disk a slice describes.
    pub(super) fn statistics(&self, slice_covers: u64, disk_bytes: u64) -> CacheStatistics {
        let slices = self.ways.len() as u64;
        CacheStatistics {
            hits: self.hits.iter().map(|hits| hits.0.load(Relaxed)).sum(),
            misses: self.misses.load(Relaxed),
            evictions: self.evictions.load(Relaxed),
            bytes: self.slices.load(Relaxed) * self.slice_bytes,
            limit_bytes: slices * self.slice_bytes,
            covered_bytes: slices.saturating_mul(slice_covers).min(disk_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(number: u64) -> Arc<Slice> {
        Arc::new(Slice::new(number, (0..8).map(|word| number * 100 + word)))
    }

    #[test]
    fn slices_that_fit_stay() {
        let cache = L2Cache::new(64 * 64, 64);
        for number in 0..64 {
            cache.insert(slice(number)).expect("room");
        }
        for number in 0..64 {
            assert_eq!(cache.with(number, |slice| slice.get(3, false).0), Some(number * 100 + 3));
        }
        let statistics = cache.statistics(8, 512);
        assert_eq!((statistics.hits, statistics.misses, statistics.evictions), (64, 64, 0));
        assert_eq!((statistics.bytes, statistics.covered_bytes), (4096, 512));
    }

    #[test]
    fn the_one_not_used_for_longest_goes_and_never_a_dirty_one() {
        let cache = L2Cache::new(3 * 64, 64);
        for number in 0..3 {
            cache.insert(slice(number)).expect("room");
        }
        let dirty = cache.get(0).expect("there");
        dirty.dirty.store(true, Relaxed);
        cache.insert(slice(3)).expect("0 is dirty, 1 was not used for longest");
        assert!(cache.get(1).is_none() && cache.get(0).is_some());
        for number in [2, 3] {
            cache.get(number).expect("there").dirty.store(true, Relaxed);
        }
        assert!(cache.insert(slice(4)).is_err(), "nothing may go");
    }

    #[test]
    fn a_cache_that_is_not_used_is_given_back() {
        let cache = L2Cache::new(1 << 20, 64);
        cache.insert(slice(1)).expect("room");
        cache.insert(slice(2)).expect("room");
        let clock = cache.drop_unused(0);
        assert_eq!(cache.statistics(8, 0).bytes, 128, "used within the interval");
        cache.get(2).expect("used");
        cache.drop_unused(clock);
        assert!(cache.get(1).is_none() && cache.get(2).is_some());
    }
}
