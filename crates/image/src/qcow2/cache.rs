//! The L2 cache: slices of L2 tables in memory, looked up without locks and allocations.
//!
//! ```text
//!   guest cluster ─► slice number ─► set = number mod sets ─► 8 ways ─► entries
//!                                                             │ each an atomic pointer to a slice
//! ```
//!
//! A slice is `l2-cache-entry-size` bytes of an L2 table. Slices whose numbers are equal modulo
//! the number of sets compete for one set; the least recently used is evicted. Adjacent slices are
//! in different sets, so a disk whose slices all fit never suffers an eviction.
//!
//! Readers load a pointer and entries. All changes (inserting, evicting, changing entries) require
//! the lock of the image's [`PendingMetadata`](super::writeback::PendingMetadata), which is held
//! for nanoseconds.
//!
//! Never evicts a dirty slice. Never reads or writes the file.

use std::sync::{
    Arc,
    atomic::{
        AtomicBool, AtomicU32, AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use arc_swap::ArcSwapOption;

use storage::epoch_gate::{slot_of_thread, slots};

// Associativity of a set.
const WAYS: usize = 8;

/// A cached piece of an L2 table.
#[derive(Debug)]
pub(super) struct L2Slice {
    /// Number of the slice; it maps the guest clusters from `number × entries` on.
    pub(super) number: u64,
    /// Entries in native byte order; two words each if extended.
    words: Box<[AtomicU64]>,
    /// Sequence lock of extended entries: odd while a pair of words changes.
    version: AtomicU32,
    /// Clock of the cache at its last use.
    used: AtomicU32,
    /// True if it differs from the file.
    pub(super) dirty: AtomicBool,
    /// True if its changes are being written.
    pub(super) writing: AtomicBool,
}

impl L2Slice {
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

    /// Entry `index`: the word, and the bitmap of an extended one.
    pub(super) fn get(&self, index: usize, extended: bool) -> (u64, u64) {
        if !extended {
            return (self.words[index].load(Acquire), 0);
        }
        loop {
            let before = self.version.load(Acquire);
            let pair = (self.words[2 * index].load(Acquire), self.words[2 * index + 1].load(Acquire));
            // The loads above are acquire loads, so this one is not reordered before them.
            if before.is_multiple_of(2) && self.version.load(Acquire) == before {
                return pair;
            }
            std::hint::spin_loop();
        }
    }

    /// Changes an entry. The caller must hold the lock of `PendingMetadata`.
    pub(super) fn set(&self, index: usize, extended: bool, word: u64, map: u64) {
        if !extended {
            self.words[index].store(word, Release);
            return;
        }
        let version = self.version.load(Relaxed);
        // Acquire and release: the stores below must not be reordered before the odd version
        // becomes visible.
        self.version.swap(version.wrapping_add(1), std::sync::atomic::Ordering::AcqRel);
        self.words[2 * index].store(word, Release);
        self.words[2 * index + 1].store(map, Release);
        self.version.store(version.wrapping_add(2), Release);
    }

    /// Content as stored in the file, big-endian.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Acquire).to_be_bytes()).collect()
    }
}

/// Counters since the cache was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
    /// Lookups that hit the cache.
    pub hits: u64,
    /// Slices that were read from the file.
    pub misses: u64,
    /// Slices that were evicted.
    pub evictions: u64,
    /// Size of the cached slices in bytes.
    pub bytes: u64,
    /// Size limit in bytes.
    pub limit_bytes: u64,
    /// Bytes of the disk that a full cache maps; at most the disk's size.
    pub covered_bytes: u64,
}

#[derive(Debug)]
#[repr(align(128))]
#[derive(Default)]
struct HitCounter(AtomicU64);

/// The L2 cache. See the head of this file.
#[derive(Debug)]
pub(super) struct L2Cache {
    ways: Box<[ArcSwapOption<L2Slice>]>,
    sets: u64,
    slice_bytes: u64,
    /// Incremented by each insertion.
    clock: AtomicU32,
    hits: Box<[HitCounter]>,
    misses: AtomicU64,
    evictions: AtomicU64,
    slices: AtomicU64,
}

impl L2Cache {
    /// Creates a cache of at most `limit_bytes`, but of at least two slices of `slice_bytes`.
    pub(super) fn new(limit_bytes: u64, slice_bytes: u64) -> Self {
        let slices = (limit_bytes / slice_bytes).max(2);
        // Fewer slices than ways form a single set; otherwise a remainder below one set stays
        // unused.
        let sets = (slices / WAYS as u64).max(1);
        let ways = if slices < WAYS as u64 { slices } else { sets * WAYS as u64 };
        Self {
            ways: (0..ways).map(|_| ArcSwapOption::empty()).collect(),
            sets,
            slice_bytes,
            clock: AtomicU32::new(0),
            hits: (0..slots()).map(|_| HitCounter::default()).collect(),
            misses: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            slices: AtomicU64::new(0),
        }
    }

    fn set(&self, number: u64) -> &[ArcSwapOption<L2Slice>] {
        let ways = self.ways.len() / self.sets as usize;
        let first = (number % self.sets) as usize * ways;
        &self.ways[first..first + ways]
    }

    /// Applies `inspect` to a cached slice, without taking a reference; `None` on a miss.
    pub(super) fn with_slice<T>(&self, number: u64, inspect: impl FnOnce(&L2Slice) -> T) -> Option<T> {
        for way in self.set(number) {
            let guard = way.load();
            if let Some(slice) = guard.as_ref().filter(|slice| slice.number == number) {
                self.touch(slice);
                // Counters are per thread, so this causes no contention.
                self.hits[slot_of_thread()].0.fetch_add(1, Relaxed);
                return Some(inspect(slice));
            }
        }
        None
    }

    /// Returns a counted reference to a cached slice.
    pub(super) fn get(&self, number: u64) -> Option<Arc<L2Slice>> {
        let slice = self.set(number).iter().find_map(|way| {
            // Compared before cloning: the reference counts of other slices are shared with other
            // threads.
            let guard = way.load();
            guard.as_ref().filter(|slice| slice.number == number).cloned()
        })?;
        self.touch(&slice);
        Some(slice)
    }

    fn touch(&self, slice: &L2Slice) {
        // Written only if it changed, so that hits on a hot slice leave its cache line shared.
        let clock = self.clock.load(Relaxed);
        if slice.used.load(Relaxed) != clock {
            slice.used.store(clock, Relaxed);
        }
    }

    /// Inserts a slice and evicts the least recently used one of its set if necessary. Returns the
    /// slice if all of them are dirty; the caller must write them first.
    pub(super) fn insert(&self, slice: Arc<L2Slice>) -> Result<(), Arc<L2Slice>> {
        let clock = self.clock.fetch_add(1, Relaxed).wrapping_add(1);
        slice.used.store(clock, Relaxed);
        let set = self.set(slice.number);
        let mut victim = None;
        for way in set {
            let guard = way.load();
            let Some(cached) = guard.as_ref() else {
                drop(guard);
                way.store(Some(slice));
                self.misses.fetch_add(1, Relaxed);
                self.slices.fetch_add(1, Relaxed);
                return Ok(());
            };
            debug_assert_ne!(cached.number, slice.number, "a slice is loaded once");
            if cached.dirty.load(Relaxed) || cached.writing.load(Relaxed) {
                continue;
            }
            let age = clock.wrapping_sub(cached.used.load(Relaxed));
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

    /// Evicts clean slices that were not used since the clock was `since`, and returns the present
    /// clock. For `cache-clean-interval`.
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

    /// Evicts everything; no slice may be dirty.
    pub(super) fn clear(&self) {
        for way in &self.ways {
            way.store(None);
        }
        self.slices.store(0, Relaxed);
    }

    /// Counters; `slice_covers` is the number of guest bytes that a slice maps.
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

    fn slice(number: u64) -> Arc<L2Slice> {
        Arc::new(L2Slice::new(number, (0..8).map(|index| number * 100 + index)))
    }

    #[test]
    fn slices_that_fit_stay() {
        let cache = L2Cache::new(64 * 64, 64);
        for number in 0..64 {
            cache.insert(slice(number)).expect("room");
        }
        for number in 0..64 {
            assert_eq!(cache.with_slice(number, |slice| slice.get(3, false).0), Some(number * 100 + 3));
        }
        let statistics = cache.statistics(8, 512);
        assert_eq!((statistics.hits, statistics.misses, statistics.evictions), (64, 64, 0));
        assert_eq!((statistics.bytes, statistics.covered_bytes), (4096, 512));
    }

    #[test]
    fn least_recently_used_clean_slice_is_evicted() {
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
    fn unused_cache_is_freed() {
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
