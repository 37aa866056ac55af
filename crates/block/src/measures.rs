//! Latencies and throttle causes of a disk's requests.
//!
//! ```text
//!   completed ─► latency, by operation ─┐
//!             └► wait, by direction ────┼─► histograms that convert exactly to both formats of
//!   throttled ─► seconds, by limit ─────┘   Prometheus: 1, 2, 5, 10 … and powers of ⁴√2
//! ```
//!
//! Created by the first reader: a disk that is not measured pays one load. All threads count with
//! relaxed atomics, so values that are read together may differ by a request. Counters are never
//! reset.

use std::sync::{
    LazyLock, OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use policy::{
    request::Direction,
    throttle::{CauseKind, LevelCause, LimitKind},
    time::Instant,
};

use crate::recorder::{DiskOperation, RequestRecord};

/// Round upper bounds, for display, in nanoseconds: from 20 µs to 10 s.
pub const ROUND_BOUNDS_NS: [u64; 18] = [
    20_000,
    50_000,
    100_000,
    200_000,
    500_000,
    1_000_000,
    2_000_000,
    5_000_000,
    10_000_000,
    20_000_000,
    50_000_000,
    100_000_000,
    200_000_000,
    500_000_000,
    1_000_000_000,
    2_000_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// Buckets per octave, as a power of 2: the schema of Prometheus's native histograms. The relative
/// error of a value is at most a tenth.
pub const SCHEMA: i32 = 2;
/// Range of the exponents, in seconds: from 7.6 µs to 68 minutes. Smaller and larger values have
/// one bucket each.
const EXPONENTS: std::ops::RangeInclusive<i32> = -17..=12;

/// Bounds of both formats, merged: each bucket of either format is a whole number of these.
static BOUNDS: LazyLock<Box<[BucketBound]>> = LazyLock::new(|| {
    let steps = 1 << SCHEMA;
    let indices = EXPONENTS.start() * steps..=EXPONENTS.end() * steps;
    let native = |index: i32| (f64::from(index) / f64::from(steps)).exp2() * 1e9;
    let exact = |index| BucketBound { at_most_ns: native(index) as u64, index };
    let mut bounds: Vec<_> = indices.clone().map(exact).collect();
    for at_most_ns in ROUND_BOUNDS_NS {
        let index = indices.clone().find(|&index| at_most_ns <= native(index) as u64);
        // A round bound splits the native bucket that contains it.
        bounds.extend(index.map(|index| BucketBound { at_most_ns, index }));
    }
    bounds.sort_by_key(|bound| bound.at_most_ns);
    // 1 s is a bound of both formats.
    bounds.dedup_by_key(|bound| bound.at_most_ns);
    bounds.into()
});

/// Upper bound of a bucket.
#[derive(Clone, Copy, Debug)]
struct BucketBound {
    at_most_ns: u64,
    /// Index of the native bucket that contains it.
    index: i32,
}

/// Histogram of durations.
#[derive(Debug, Default)]
pub struct Histogram {
    /// One more than the number of bounds. Allocated by the first request, since idle disks are
    /// measured too.
    counts: OnceLock<Box<[AtomicU64]>>,
    sum_ns: AtomicU64,
}

/// Snapshot of a [`Histogram`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramSnapshot {
    counts: Vec<u64>,
    /// Sum of all durations, in nanoseconds.
    pub sum_ns: u64,
}

impl Histogram {
    fn counts(&self) -> &[AtomicU64] {
        self.counts.get_or_init(|| (0..=BOUNDS.len()).map(|_| AtomicU64::new(0)).collect())
    }

    fn add(&self, took_ns: u64, times: u64) {
        // Bounds are inclusive: a value equal to a bound is in the bucket that ends there.
        let bucket = BOUNDS.partition_point(|bound| bound.at_most_ns < took_ns);
        self.counts()[bucket].fetch_add(times, Relaxed);
        // Zero waits are the usual case and save an atomic operation.
        if took_ns > 0 {
            self.sum_ns.fetch_add(took_ns.saturating_mul(times), Relaxed);
        }
    }

    /// Adds another process's counts. Counts beyond the last bucket are added to it.
    fn count_on(&self, snapshot: &HistogramSnapshot) {
        for (bucket, count) in snapshot.counts.iter().enumerate().filter(|(_, more)| **more > 0) {
            self.counts()[bucket.min(BOUNDS.len())].fetch_add(*count, Relaxed);
        }
        self.sum_ns.fetch_add(snapshot.sum_ns, Relaxed);
    }

    /// Snapshot of the counts.
    pub fn snapshot(&self) -> HistogramSnapshot {
        let counts = match self.counts.get() {
            Some(counts) => counts.iter().map(|count| count.load(Relaxed)).collect(),
            None => vec![0; BOUNDS.len() + 1],
        };
        HistogramSnapshot { counts, sum_ns: self.sum_ns.load(Relaxed) }
    }
}

impl HistogramSnapshot {
    /// Creates a snapshot from counts by bucket.
    pub fn new(counts: Vec<u64>, sum_ns: u64) -> Self {
        Self { counts, sum_ns }
    }

    /// Counts by bucket, in ascending order; all snapshots have the same bounds.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The quantile, from 0 to 1, of counts by bucket, in nanoseconds: the middle of its
    /// bucket, with a relative error of at most a tenth. `None` without counts.
    pub fn quantile_ns(counts: &[u64], quantile: f64) -> Option<u64> {
        let sum: u64 = counts.iter().sum();
        // Nearest rank: the first bucket that includes at least this part of the counts.
        let rank = ((sum as f64 * quantile).ceil() as u64).clamp(1, sum.max(1));
        let mut cumulative = 0;
        let bucket = counts.iter().position(|count| {
            cumulative += count;
            cumulative >= rank
        })?;
        // The last bucket has no upper bound; its lower bound is the best estimate.
        let (above_ns, at_most_ns) = Self::bounds_ns(bucket);
        Some(above_ns.midpoint(at_most_ns.unwrap_or(above_ns)))
    }

    /// Bounds of a bucket: exclusive lower and inclusive upper bound; the last has no upper bound.
    pub fn bounds_ns(bucket: usize) -> (u64, Option<u64>) {
        let bound = |bucket: usize| BOUNDS.get(bucket).map(|bound| bound.at_most_ns);
        let before = bucket.checked_sub(1).map(|before| before.min(BOUNDS.len() - 1));
        (before.and_then(bound).unwrap_or(0), bound(bucket))
    }

    /// Total count.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Counts by [`ROUND_BOUNDS_NS`]: each greater than the bound before and at most this one; the
    /// last count has no upper bound.
    pub fn round_counts(&self) -> [u64; ROUND_BOUNDS_NS.len() + 1] {
        Self::round_of(&self.counts)
    }

    /// As [`HistogramSnapshot::round_counts`], for counts by bucket.
    pub fn round_of(counts: &[u64]) -> [u64; ROUND_BOUNDS_NS.len() + 1] {
        let mut sums = [0; ROUND_BOUNDS_NS.len() + 1];
        for (bucket, count) in counts.iter().enumerate() {
            let at_most_ns = BOUNDS.get(bucket).map_or(u64::MAX, |bound| bound.at_most_ns);
            sums[ROUND_BOUNDS_NS.partition_point(|&bound| bound < at_most_ns)] += count;
        }
        sums
    }

    /// Native buckets that are not empty, in ascending order: `(i, n)` means that `n` values were
    /// at most 2<sup>i/4</sup> seconds and greater than the bound before. The first includes all
    /// smaller values, the last all larger ones.
    pub fn native_counts(&self) -> Vec<(i32, u64)> {
        let mut buckets: Vec<(i32, u64)> = Vec::new();
        for (bucket, &count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let overflow = || EXPONENTS.end() * (1 << SCHEMA) + 1;
            let index = BOUNDS.get(bucket).map_or_else(overflow, |bound| bound.index);
            match buckets.last_mut() {
                Some((last, sum)) if *last == index => *sum += count,
                _ => buckets.push((index, count)),
            }
        }
        buckets
    }
}

/// Class of operations in latencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationClass {
    /// Reads.
    Read,
    /// Writes, write-zeroes and discards.
    Write,
    /// Flushes.
    Flush,
}

impl OperationClass {
    /// All classes.
    pub const ALL: [Self; 3] = [Self::Read, Self::Write, Self::Flush];

    fn of(operation: DiskOperation) -> Self {
        match operation {
            DiskOperation::Read => Self::Read,
            DiskOperation::Write | DiskOperation::WriteZeroes | DiskOperation::Discard => Self::Write,
            DiskOperation::Flush => Self::Flush,
        }
    }
}

/// Owner of the limit that throttled a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CauseLevel {
    /// The disk.
    Disk,
    /// The disk's group.
    Group,
    /// A group above that.
    Above,
}

impl CauseLevel {
    /// All owners.
    pub const ALL: [Self; 3] = [Self::Disk, Self::Group, Self::Above];
}

/// Time during which at least one request waited: overlapping waits count once. Assumes that waits
/// end in the order in which they began, as those of one disk and direction do; otherwise the sum
/// is too small.
#[derive(Debug, Default)]
struct CoveredTime {
    until_ns: AtomicU64,
    sum_ns: AtomicU64,
}

impl CoveredTime {
    fn add(&self, from: Instant, until: Instant) {
        let (from_ns, until_ns) = (from.as_nanos(), until.as_nanos());
        // Only the part behind the latest end so far is new.
        let before_ns = self.until_ns.fetch_max(until_ns, Relaxed);
        self.sum_ns.fetch_add(until_ns.saturating_sub(from_ns.max(before_ns)), Relaxed);
    }
}

/// Measurement of one disk.
#[derive(Debug, Default)]
pub struct Measures {
    latency: [Histogram; 3],
    /// Part of the latencies of writes, in nanoseconds.
    discarding_ns: AtomicU64,
    waits: [Histogram; 2],
    waiting: [CoveredTime; 2],
    /// By [`CauseLevel`], [`LimitKind::index`] and direction.
    throttled: [[[CoveredTime; 2]; 6]; 3],
}

/// Snapshot of [`Measures`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuresSnapshot {
    /// By [`OperationClass`].
    pub latency: [HistogramSnapshot; 3],
    /// Sum of the latencies of discards in nanoseconds, a part of that of writes.
    pub discarding_ns: u64,
    /// By direction.
    pub waits: [HistogramSnapshot; 2],
    /// Time with a waiting request, in nanoseconds, by direction.
    pub waiting_ns: [u64; 2],
    /// Time by throttle cause, in nanoseconds, by [`CauseLevel`], [`LimitKind::index`] and
    /// direction.
    pub held_ns: [[[u64; 2]; 6]; 3],
}

impl Measures {
    /// Snapshot of everything, for another process.
    pub fn snapshot(&self) -> MeasuresSnapshot {
        let covered = |both: &[CoveredTime; 2]| both.each_ref().map(|covered| covered.sum_ns.load(Relaxed));
        MeasuresSnapshot {
            latency: self.latency.each_ref().map(Histogram::snapshot),
            discarding_ns: self.discarding_ns(),
            waits: self.waits.each_ref().map(Histogram::snapshot),
            waiting_ns: covered(&self.waiting),
            held_ns: self.throttled.each_ref().map(|kinds| kinds.each_ref().map(covered)),
        }
    }

    /// Adds the values of another process that served the disk before.
    pub fn count_on(&self, measured: &MeasuresSnapshot) {
        let MeasuresSnapshot { latency, discarding_ns, waits, waiting_ns, held_ns } = measured;
        self.discarding_ns.fetch_add(*discarding_ns, Relaxed);
        let histograms = self.latency.iter().chain(&self.waits).zip(latency.iter().chain(waits));
        histograms.for_each(|(histogram, added)| histogram.count_on(added));
        let sums = self.waiting.iter().chain(self.throttled.as_flattened().as_flattened());
        for (sum, added) in sums.zip(waiting_ns.iter().chain(held_ns.as_flattened().as_flattened())) {
            sum.sum_ns.fetch_add(*added, Relaxed);
        }
    }

    /// Counts a completed request: its latency if it succeeded, and its wait in any case.
    pub(crate) fn count(&self, finished: &RequestRecord) {
        let RequestRecord {
            operation,
            requests,
            arrived,
            admitted,
            completed: ended,
            throttle_cause: held,
            has_failed,
            ..
        } = *finished;
        if !has_failed {
            let (took_ns, requests) = (ended.nanos_since(arrived), requests.into());
            self.latency[OperationClass::of(operation) as usize].add(took_ns, requests);
            if operation == DiskOperation::Discard {
                self.discarding_ns.fetch_add(took_ns.saturating_mul(requests), Relaxed);
            }
        }
        // Flushes are not throttled, so they have no wait.
        if operation == DiskOperation::Flush {
            return;
        }
        let direction = operation.direction();
        let waited_ns = admitted.nanos_since(arrived);
        self.waits[direction.index()].add(waited_ns, requests.into());
        if waited_ns > 0 {
            self.waiting[direction.index()].add(arrived, admitted);
            // All groups above the disk's group count as `CauseLevel::Above`.
            if let Some(LevelCause { level, kind: CauseKind::Limit(kind) }) = held {
                self.throttled[level.min(2)][kind.index()][direction.index()].add(arrived, admitted);
            }
        }
    }

    /// Latencies of successful requests, from arrival to completion.
    pub fn latency(&self, class: OperationClass) -> HistogramSnapshot {
        self.latency[class as usize].snapshot()
    }

    /// Sum of the latencies of discards in nanoseconds, a part of that of writes.
    pub fn discarding_ns(&self) -> u64 {
        self.discarding_ns.load(Relaxed)
    }

    /// Waits of requests for admission, including zero waits.
    pub fn waits(&self, direction: Direction) -> HistogramSnapshot {
        self.waits[direction.index()].snapshot()
    }

    /// Time during which at least one request waited for any limit, in nanoseconds. A wait is
    /// counted when its request completes.
    pub fn waiting_ns(&self, direction: Direction) -> u64 {
        self.waiting[direction.index()].sum_ns.load(Relaxed)
    }

    /// As [`Measures::waiting_ns`], for requests whose last throttle cause was this limit.
    pub fn throttled_ns(&self, level: CauseLevel, kind: LimitKind, direction: Direction) -> u64 {
        self.throttled[level as usize][kind.index()][direction.index()].sum_ns.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use policy::time::Duration;

    use super::*;

    fn at(us: u64) -> Instant {
        Instant::ZERO + Duration::from_micros(us)
    }

    fn read(arrived_us: u64, admitted_us: u64, ended_us: u64) -> RequestRecord {
        let waits = admitted_us > arrived_us;
        RequestRecord {
            disk: 0,
            operation: DiskOperation::Read,
            offset: 0,
            length: 4096,
            requests: 1,
            has_failed: false,
            arrived: at(arrived_us),
            admitted: at(admitted_us),
            throttle_cause: waits
                .then_some(LevelCause { level: 1, kind: CauseKind::Limit(LimitKind::IopsTotal) }),
            completed: at(ended_us),
        }
    }

    #[test]
    fn a_value_at_a_bound_is_in_the_bucket_that_ends_there() {
        for (bucket, bound) in ROUND_BOUNDS_NS.into_iter().enumerate() {
            let histogram = Histogram::default();
            histogram.add(bound, 1);
            histogram.add(bound + 1, 10);
            let round = histogram.snapshot().round_counts();
            assert_eq!((round[bucket], round[bucket + 1]), (1, 10), "{bound} ns");
        }
    }

    #[test]
    fn native_buckets_match_their_bounds() {
        for ns in [0, 1, 7_629, 7_630, 20_000, 65_537, 1_000_000_000, 1_000_000_001, 3 * 3_600_000_000_000] {
            let histogram = Histogram::default();
            histogram.add(ns, 3);
            let native = histogram.snapshot().native_counts();
            let [(index, 3)] = native[..] else { panic!("{ns} ns: {native:?}") };
            let bound = |index: i32| (f64::from(index) / 4.0).exp2();
            let seconds = ns as f64 / 1e9;
            assert!(seconds <= bound(index) || index == 49, "{ns} ns in {index}");
            assert!(seconds > bound(index - 1) || index == -68, "{ns} ns in {index}");
        }
    }

    #[test]
    fn ranks_are_accurate_to_a_tenth() {
        let histogram = Histogram::default();
        for ns in 1..=1000 {
            histogram.add(ns * 100_000, 1);
        }
        let snapshot = histogram.snapshot();
        for quantile in [0.01, 0.5, 0.9, 0.99, 1.0] {
            let ns = HistogramSnapshot::quantile_ns(snapshot.counts(), quantile).unwrap() as f64;
            let exact = quantile * 1e8;
            assert!((ns / exact - 1.0).abs() < 0.1, "{quantile}: {ns} instead of {exact}");
        }
        assert_eq!(HistogramSnapshot::quantile_ns(&[0; 3], 0.5), None);
        assert_eq!(HistogramSnapshot::quantile_ns(&[], 0.5), None);
    }

    #[test]
    fn both_kinds_of_buckets_have_all() {
        let histogram = Histogram::default();
        (0..64).for_each(|power| histogram.add(1 << power, 2));
        let snapshot = histogram.snapshot();
        assert_eq!(snapshot.count(), 128);
        assert_eq!(snapshot.round_counts().iter().sum::<u64>(), 128);
        assert_eq!(snapshot.native_counts().iter().map(|(_, count)| count).sum::<u64>(), 128);
    }

    #[test]
    fn overlapping_waits_count_once() {
        let measures = Measures::default();
        for finished in [read(0, 10, 12), read(5, 20, 25), read(30, 30, 31), read(40, 45, 50)] {
            measures.count(&finished);
        }
        let throttled_ns = |level, kind| measures.throttled_ns(level, kind, Direction::Read);
        assert_eq!(throttled_ns(CauseLevel::Group, LimitKind::IopsTotal), 25_000);
        assert_eq!(throttled_ns(CauseLevel::Disk, LimitKind::IopsTotal), 0);
        assert_eq!(throttled_ns(CauseLevel::Group, LimitKind::BpsTotal), 0);
        assert_eq!(measures.waiting_ns(Direction::Read), 25_000);
        let (latency, waits) = (measures.latency(OperationClass::Read), measures.waits(Direction::Read));
        assert_eq!((latency.count(), latency.sum_ns), (4, 43_000));
        assert_eq!((waits.count(), waits.sum_ns), (4, 30_000));
    }

    #[test]
    fn counts_of_another_process_are_added() {
        let (one, other) = (Measures::default(), Measures::default());
        for finished in [read(0, 10, 12), read(5, 20, 25), read(30, 30, 31)] {
            one.count(&finished);
            other.count(&finished);
        }
        other.count_on(&one.snapshot());
        for (counts, doubled) in [
            (one.latency(OperationClass::Read), other.latency(OperationClass::Read)),
            (one.waits(Direction::Read), other.waits(Direction::Read)),
        ] {
            assert!(counts.counts().iter().zip(doubled.counts()).all(|(one, two)| 2 * one == *two));
            assert_eq!((2 * counts.count(), 2 * counts.sum_ns), (doubled.count(), doubled.sum_ns));
        }
        let throttled_ns = |measures: &Measures| {
            measures.throttled_ns(CauseLevel::Group, LimitKind::IopsTotal, Direction::Read)
        };
        assert_eq!((throttled_ns(&one), throttled_ns(&other)), (20_000, 40_000));
        assert_eq!(other.waiting_ns(Direction::Read), 40_000);
    }

    #[test]
    fn failed_requests_count_as_waits_only() {
        let measures = Measures::default();
        measures.count(&RequestRecord { has_failed: true, requests: 3, ..read(0, 10, 12) });
        assert_eq!(measures.latency(OperationClass::Read).count(), 0);
        assert_eq!(measures.waits(Direction::Read).count(), 3);
    }
}
