//! Decisions of the cache; that it never returns stale data and never exceeds its memory limit.

use super::*;
use crate::prefetch::PrefetchSetting;
use alloc::collections::VecDeque;
use alloc::vec;
use core::cell::Cell;
use proptest::prelude::*;

const K: u64 = 1 << 10;
const DISK: u64 = 1 << 30;
const NOW: Instant = Instant::ZERO;

/// A cache and a disk that completes immediately. A token is the number of the read-ahead.
struct CacheBench {
    cache: PrefetchCache<u32>,
    disk_bytes: u64,
    last_token: u32,
    /// Ranges read ahead, in order.
    fetched: Vec<Range<u64>>,
    in_flight: VecDeque<FetchId>,
}

impl CacheBench {
    fn new(settings: PrefetchConfig) -> Self {
        let mut cache = PrefetchCache::default();
        cache.set(settings).unwrap();
        Self { cache, disk_bytes: DISK, last_token: 0, fetched: Vec::new(), in_flight: VecDeque::new() }
    }

    fn with(setting: PrefetchSetting, value: u64) -> Self {
        let mut settings = PrefetchConfig::default();
        settings.set(setting, value);
        Self::new(settings)
    }

    /// A read whose read-ahead stays in flight.
    fn lookup(&mut self, offset: u64, length: u64) -> CacheLookup<u32> {
        let range = offset..offset + length;
        let (found, ahead) = self.cache.read(range, 1, self.disk_bytes, |_, _| true);
        if let Some(ahead) = ahead {
            for range in ahead.ranges() {
                let last_token = &mut self.last_token;
                let fetches = self.cache.begin(&ahead, range, NOW, || {
                    *last_token += 1;
                    *last_token
                });
                for fetch in fetches {
                    self.fetched.push(fetch.range);
                    self.in_flight.push_back(fetch.id);
                }
            }
        }
        found
    }

    fn arrive(&mut self) {
        for id in core::mem::take(&mut self.in_flight) {
            self.cache.complete(id, NOW);
        }
    }

    /// A read of 4 KiB whose read-ahead completes before the next one. Returns true for a hit.
    fn read(&mut self, offset: u64) -> bool {
        let found = self.lookup(offset, 4 * K);
        self.arrive();
        is_hit(&found)
    }

    fn hits(&mut self, offsets: impl IntoIterator<Item = u64>) -> usize {
        offsets.into_iter().filter(|offset| self.read(*offset)).count()
    }

    fn write(&mut self, offset: u64, length: u64) {
        let write = self.cache.write_begins(offset..offset + length);
        self.cache.write_ends(write);
    }
}

fn is_hit(found: &CacheLookup<u32>) -> bool {
    match found {
        CacheLookup::Nothing => false,
        CacheLookup::Whole(_) => true,
        CacheLookup::Parts(parts) => parts.iter().all(|part| matches!(part, CachePart::Cached(_))),
    }
}

fn blocks(count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(|block| block * 4 * K)
}

#[test]
fn after_three_requests_in_a_row_all_are_hits() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    assert_eq!(bench.hits(blocks(3)), 0);
    assert_eq!(bench.fetched, vec![12 * K..140 * K]);
    assert_eq!(bench.hits(blocks(10_000).skip(3)), 9_997);
    let stats = bench.cache.stats();
    assert_eq!((stats.hits, stats.misses, stats.wasted_bytes), (9_997, 3, 0));
    assert_eq!(stats.streams, 1);
}

#[test]
fn read_ahead_is_disjoint_and_ends_with_the_disk() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.disk_bytes = 10 * 1024 * K + 512;
    bench.hits(blocks(2560));
    let mut at = 12 * K;
    for range in &bench.fetched {
        assert_eq!(range.start, at);
        at = range.end;
    }
    assert_eq!(at, bench.disk_bytes);
}

#[test]
fn backward_and_strided_scans_are_read_ahead_too() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    assert!(bench.hits((0..1000).rev().map(|block| block * 4 * K)) >= 997);
    for step in [64 * K, 1024 * K] {
        let mut bench = CacheBench::new(PrefetchConfig::default());
        assert!(bench.hits((0..900).map(|request| request * step)) >= 896, "every {step}");
        let mut bench = CacheBench::new(PrefetchConfig::default());
        assert!(bench.hits((0..900).rev().map(|request| request * step)) >= 896, "every {step}, backward");
    }
}

#[test]
fn a_hundred_readers_in_turn_have_hits_each() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    let mut misses = [0; 100];
    for step in 0..500 {
        for (reader, misses) in misses.iter_mut().enumerate() {
            *misses += u32::from(!bench.read(reader as u64 * (10 << 20) + step * 4 * K));
        }
    }
    assert!(misses.iter().all(|misses| *misses < 50), "{misses:?}");
}

#[test]
fn two_strided_scans_in_turn_are_found() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    let offsets = (0..200_u64).flat_map(|step| [step * 40_960, (DISK / 2) + step * 122_880]);
    assert!(bench.hits(offsets) > 380);
}

#[test]
fn several_readers_of_one_file_read_it_from_the_disk_once() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    for offset in blocks(4000) {
        // Four readers, each slightly behind the one before.
        for lag in 0..4 {
            let lag = lag * 37 * 4 * K;
            if offset >= lag {
                bench.read(offset - lag);
            }
        }
    }
    let stats = bench.cache.stats();
    assert!(stats.misses < 100, "{stats:?}");
    assert!(stats.read_ahead_bytes < 4000 * 4 * K + 4096 * K, "{stats:?}");
}

#[test]
fn requests_that_overtake_each_other_are_one_stream() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    // A queue depth of eight, completing in any order.
    let (mut offsets, mut random): (Vec<_>, _) = (blocks(4000).collect(), fastrand());
    for batch in offsets.chunks_mut(8) {
        (1..8).for_each(|at| batch.swap(at, random() as usize % (at + 1)));
    }
    assert!(bench.hits(offsets) > 3900);
    // A second stream may have been detected where requests went a few steps backward.
    assert!(bench.cache.stats().streams <= 2);
}

#[test]
fn chunks_in_flight_are_awaited_not_read_twice() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.hits(blocks(2));
    assert_eq!(bench.lookup(8 * K, 4 * K), CacheLookup::Nothing);
    let CacheLookup::Whole(cached) = bench.lookup(12 * K, 4 * K) else { panic!("it is on its way") };
    assert_eq!(cached, CachedRange { token: 1, range: 0..4 * K });
    bench.arrive();
    let CacheLookup::Whole(cached) = bench.lookup(16 * K, 4 * K) else { panic!("it is there") };
    assert_eq!(cached, CachedRange { token: 1, range: 4 * K..8 * K });
    assert_eq!(bench.cache.stats().waited, 1);
}

#[test]
fn partial_hit_reads_only_missing_part() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.hits(blocks(3));
    let Range { start, end } = bench.fetched[0];
    let expect = CacheLookup::Parts(vec![
        CachePart::Cached(CachedRange { token: 1, range: end - start - 4 * K..end - start }),
        CachePart::Missing(end..end + 4 * K),
    ]);
    assert_eq!(bench.lookup(end - 4 * K, 8 * K), expect);
    assert_eq!(bench.cache.stats().partial_hits, 1);
}

#[test]
fn large_requests_bypass_the_cache() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    for request in 0..10 {
        assert_eq!(bench.lookup(request * 128 * K, 128 * K), CacheLookup::Nothing);
    }
    assert_eq!((bench.cache.stats().skipped, bench.fetched.len()), (10, 0));
    // Small requests merged into a large one count as small.
    let (_, ahead) = bench.cache.read(0..128 * K, 32, DISK, |_, _| true);
    assert_eq!((ahead, bench.cache.stats().skipped), (None, 10));
}

#[test]
fn write_invalidates_only_its_range() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.hits(blocks(3));
    bench.write(21 * K, 6 * K);
    assert!(bench.read(12 * K) && bench.read(16 * K));
    assert!(!bench.read(20 * K) && !bench.read(24 * K));
    assert!(bench.read(28 * K));
    assert_eq!(bench.cache.stats().wasted_bytes, 8 * K);
}

#[test]
fn write_invalidates_chunks_in_flight() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.hits(blocks(2));
    bench.lookup(8 * K, 4 * K);
    let write = bench.cache.write_begins(0..16 * K);
    bench.arrive();
    assert!(!is_hit(&bench.lookup(12 * K, 4 * K)), "begun before the write");
    assert!(is_hit(&bench.lookup(16 * K, 4 * K)), "not overlapped");
    bench.cache.write_ends(write);
}

#[test]
fn no_read_ahead_during_a_write() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.hits(blocks(2));
    let write = bench.cache.write_begins(100 * K..101 * K);
    bench.read(8 * K);
    assert_eq!(bench.fetched, []);
    bench.cache.write_ends(write);
    bench.hits(blocks(1000).skip(3));
    assert!(bench.cache.stats().hits > 900);
}

#[test]
fn failed_read_ahead_leaves_nothing_behind() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.hits(blocks(2));
    bench.lookup(8 * K, 4 * K);
    for id in core::mem::take(&mut bench.in_flight) {
        bench.cache.fail(id);
    }
    assert_eq!(bench.cache.stats().memory_bytes, 0);
    assert!(!bench.read(12 * K));
}

#[test]
fn short_runs_close_the_gate_until_a_long_one() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    let mut random = fastrand();
    for _ in 0..20_000 {
        let start = random() % (DISK / 4096 - 3) * 4096;
        bench.hits([start, start + 4 * K, start + 8 * K]);
    }
    let stats = bench.cache.stats();
    assert!(stats.is_gate_closed);
    assert!(stats.read_ahead_bytes < (4 << 20) + 20_000 * 12 * K / 50, "{stats:?}");
    bench.hits(blocks(4000));
    assert!(bench.cache.stats().hits > 3000, "a continuing stream opens the gate: {:?}", bench.cache.stats());
    let mut always = CacheBench::new(PrefetchConfig { mode: PrefetchMode::On, ..PrefetchConfig::default() });
    for start in 0..1000 {
        always.hits([start << 20, (start << 20) + 4 * K, (start << 20) + 8 * K]);
    }
    assert!(always.fetched.len() >= 900, "with `on` it never closes");
}

#[test]
fn random_reads_read_nothing_ahead() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    let mut random = fastrand();
    bench.hits((0..100_000).map(|_| random() % (DISK / 4096) * 4096));
    let stats = bench.cache.stats();
    assert!(stats.read_ahead_bytes < 4 << 20, "{stats:?}");
}

#[test]
fn refused_read_ahead_is_retried() {
    let mut bench = CacheBench::new(PrefetchConfig::default());
    bench.hits(blocks(2));
    let (_, ahead) = bench.cache.read(8 * K..12 * K, 1, DISK, |_, _| false);
    assert_eq!(ahead, None);
    assert!(!bench.read(12 * K));
    assert_eq!(bench.fetched[0].start, 16 * K);
}

#[test]
fn the_window_grows_to_its_maximum_and_no_further() {
    let mut bench = CacheBench::with(PrefetchSetting::WindowMax, 512 * K);
    for offset in blocks(4000) {
        bench.lookup(offset, 4 * K);
        // Slow storage: read-ahead arrives after it was needed.
        if bench.in_flight.len() > 2 {
            bench.arrive();
        }
    }
    let largest = bench.fetched.iter().map(|range| range.end - range.start).max();
    assert_eq!(largest, Some(256 * K));
}

#[test]
fn settings_apply_to_cached_data_at_once() {
    let mut bench = CacheBench::with(PrefetchSetting::Memory, 64 << 20);
    bench.hits(blocks(3000));
    let before = bench.cache.stats().memory_bytes;
    assert!(before > 1 << 20);
    bench.cache.set(PrefetchConfig { memory_bytes: 256 * K, ..PrefetchConfig::default() }).unwrap();
    assert!(bench.cache.stats().memory_bytes <= 256 * K);
    assert!(bench.cache.set(PrefetchConfig { memory_bytes: 1, ..PrefetchConfig::default() }).is_err());
    assert_eq!(bench.cache.settings().memory_bytes, 256 * K);
    bench.cache.set(PrefetchConfig::off()).unwrap();
    assert_eq!(bench.cache.stats().memory_bytes, 0);
    assert_eq!(bench.hits(blocks(100)), 0);
    bench.cache.set(PrefetchConfig::default()).unwrap();
    assert!(bench.hits(blocks(100)) > 90);
}

/// Deterministic pseudo-random numbers.
fn fastrand() -> impl FnMut() -> u64 {
    let mut state = 1_u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state >> 20
    }
}

#[derive(Clone, Debug)]
enum CacheEvent {
    Read { at: u64, length: u64 },
    Scan { at: u64, step: i64, count: u64 },
    WriteBegins { at: u64, length: u64 },
    WriteEnds,
    Arrives { index: usize },
    Fails { index: usize },
    Set { memory: u64, mode: PrefetchMode },
}

fn event() -> impl Strategy<Value = CacheEvent> {
    let at = 0..200_u64;
    prop_oneof![
        4 => (at.clone(), 1..20_u64).prop_map(|(at, length)| CacheEvent::Read { at, length }),
        6 => (at.clone(), -8..9_i64, 1..40_u64).prop_map(|(at, step, count)| CacheEvent::Scan { at, step, count }),
        3 => (at, 1..30_u64).prop_map(|(at, length)| CacheEvent::WriteBegins { at, length }),
        3 => Just(CacheEvent::WriteEnds),
        6 => (0..8_usize).prop_map(|index| CacheEvent::Arrives { index }),
        1 => (0..8_usize).prop_map(|index| CacheEvent::Fails { index }),
        1 => (256..2048_u64, 0..3_usize).prop_map(|(memory, mode)| CacheEvent::Set { memory: memory * K, mode: PrefetchMode::ALL[mode] }),
    ]
}

/// Unit of the model: half a block, so that ranges are not aligned to blocks.
const UNIT: u64 = 2 * K;
const UNITS: usize = 260;

/// A disk whose contents are the number of the last write to each unit, as chunks saw it.
struct DiskModel {
    versions: Vec<u32>,
    /// For each token: the contents of its chunk when it was begun.
    seen: Vec<Vec<u32>>,
    writing: VecDeque<(WriteId, Range<usize>)>,
    next: u32,
}

proptest! {
    #[test]
    fn never_stale_and_never_above_its_memory(events in prop::collection::vec(event(), 1..120)) {
        let mut cache = PrefetchCache::<usize>::default();
        cache.set(PrefetchConfig { window_min_bytes: 8 * K, ..PrefetchConfig::default() }).unwrap();
        let mut model = DiskModel { versions: vec![0; UNITS], seen: Vec::new(), writing: VecDeque::new(), next: 0 };
        let mut in_flight: Vec<FetchId> = Vec::new();
        let exceeded_bytes = Cell::new(0);
        for event in events {
            let mut reads = Vec::new();
            match event {
                CacheEvent::Read { at, length } => reads.push((at, length)),
                CacheEvent::Scan { at, step, count } => {
                    reads.extend((0..count).map(|index| (at.wrapping_add_signed(step * index as i64), 2)));
                }
                CacheEvent::WriteBegins { at, length } => {
                    let units = at as usize..((at + length) as usize).min(UNITS);
                    let id = cache.write_begins(units.start as u64 * UNIT..units.end as u64 * UNIT);
                    model.writing.push_back((id, units));
                }
                CacheEvent::WriteEnds => {
                    if let Some((id, units)) = model.writing.pop_front() {
                        model.next += 1;
                        model.versions[units].fill(model.next);
                        cache.write_ends(id);
                    }
                }
                CacheEvent::Arrives { index } if !in_flight.is_empty() => {
                    cache.complete(in_flight.swap_remove(index % in_flight.len()), NOW);
                }
                CacheEvent::Fails { index } if !in_flight.is_empty() => {
                    cache.fail(in_flight.swap_remove(index % in_flight.len()));
                }
                CacheEvent::Set { memory, mode } => {
                    // A chunk in flight stays above a lowered limit until it has arrived.
                    exceeded_bytes.set(exceeded_bytes.get().max(cache.stats().memory_bytes));
                    cache.set(PrefetchConfig { memory_bytes: memory, mode, window_min_bytes: 8 * K, ..PrefetchConfig::default() }).unwrap();
                }
                _ => {}
            }
            for (at, length) in reads {
                if at.saturating_add(length) > UNITS as u64 {
                    continue;
                }
                let range = at * UNIT..(at + length) * UNIT;
                let (found, ahead) = cache.read(range.clone(), 1, UNITS as u64 * UNIT, |_, _| true);
                let parts = match found {
                    CacheLookup::Nothing => vec![CachePart::Missing(range.clone())],
                    CacheLookup::Whole(cached) => vec![CachePart::Cached(cached)],
                    CacheLookup::Parts(parts) => parts,
                };
                let mut unit = at as usize;
                for part in parts {
                    let bytes = match &part {
                        CachePart::Missing(range) => range.end - range.start,
                        CachePart::Cached(cached) => {
                            let first = (cached.range.start / UNIT) as usize;
                            for index in 0..((cached.range.end - cached.range.start) / UNIT) as usize {
                                prop_assert_eq!(model.seen[cached.token][first + index], model.versions[unit + index]);
                            }
                            cached.range.end - cached.range.start
                        }
                    };
                    unit += (bytes / UNIT) as usize;
                }
                prop_assert_eq!(unit as u64, at + length);
                if let Some(ahead) = ahead {
                    for range in ahead.ranges() {
                        let seen = &mut model.seen;
                        prop_assert!(range.start % 4096 == 0 && (range.end % 4096 == 0 || range.end == UNITS as u64 * UNIT));
                        let fetches = cache.begin(&ahead, range, NOW, || { seen.push(Vec::new()); seen.len() - 1 });
                        for fetch in fetches {
                            let units = (fetch.range.start / UNIT) as usize..fetch.range.end.div_ceil(UNIT) as usize;
                            model.seen[fetch.token] = model.versions[units].to_vec();
                            in_flight.push(fetch.id);
                        }
                    }
                }
            }
            if in_flight.is_empty() {
                exceeded_bytes.set(0);
            }
            let stats = cache.stats();
            let bound = cache.settings().memory_bytes.max(exceeded_bytes.get());
            prop_assert!(stats.memory_bytes <= bound, "{} above {}", stats.memory_bytes, bound);
            prop_assert!(stats.used_bytes + stats.wasted_bytes <= stats.read_ahead_bytes);
        }
        in_flight.drain(..).for_each(|id| cache.complete(id, NOW));
        cache.set(PrefetchConfig::off()).unwrap();
        prop_assert_eq!(cache.stats().memory_bytes, 0);
        prop_assert_eq!(cache.stats().streams, 0);
        let stats = cache.stats();
        prop_assert_eq!(stats.used_bytes + stats.wasted_bytes, stats.read_ahead_bytes);
    }
}
