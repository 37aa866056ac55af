//! One sample: the operations per second of one pattern on one disk in one slice of time.
//!
//! ```text
//!   ├ batch ┤ batch ┤ batch ┤ … ┤ flush ┤      a slice of time, divided into batches of requests
//! ```
//!
//! Slices are short, so that every configuration is measured in each round. Reads start with a cold
//! page cache, except cached reads; the result is the median batch of the steady part. Writes
//! include a flush at the end, after the same amount for every configuration.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use block::disk::Disk;

use super::{
    configurations::{AccessOrder, CLUSTERS, DiskConfiguration, PatternOperation, RequestPattern},
    images::TuneImages,
    search::MeasurementTurn,
    stop::TuneStop,
    target::OVERLAY_BYTES,
};
use crate::{
    load::{FlushSpec, LoadSpec, OffsetPattern, run_job},
    statistics::{median, steady},
};

/// Range of the length of a slice: in shorter ones the start dominates, and longer ones add no
/// information.
pub(super) const SLICES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_millis(200);
/// Batches of a slice, fewer at high depths; finding the steady part takes ten.
const BATCHES: u32 = 24;
const LARGEST_BATCH: f64 = 1e6;
const REREAD_BYTES: u64 = 16 << 20;
/// Bytes written before a slice's flush, in small and large requests, time permitting.
const SMALL_WRITES_BYTES: u64 = 4 << 20;
const LARGE_WRITES_BYTES: u64 = 32 << 20;
const BYTE: u8 = 0xA5;

#[derive(Debug)]
pub(super) struct SampleMeter {
    images: TuneImages,
    slice: Duration,
    pub(super) stop: TuneStop,
    random: fastrand::Rng,
    rates: HashMap<(DiskConfiguration, RequestPattern), f64>,
}

#[derive(Clone, Debug, Default)]
struct SampleSeries {
    rates: Vec<f64>,
    requests: u64,
    elapsed: Duration,
}

impl SampleMeter {
    pub(super) fn new(images: TuneImages, slice: Duration, stop: TuneStop, seed: u64) -> Self {
        Self { images, slice, stop, random: fastrand::Rng::with_seed(seed), rates: HashMap::new() }
    }

    pub(super) async fn measure_turn(
        &mut self,
        turn: &MeasurementTurn,
        mut record: impl FnMut(RequestPattern, f64),
    ) -> Result<(), TurnError> {
        let configuration = turn.configuration;
        let disk = self.images.open(&configuration).await.map_err(TurnError::NotOpened)?;
        // One open disk for all patterns, because opening costs more than a slice.
        for &pattern in &turn.patterns {
            if self.stop.is_due() {
                break;
            }
            let measured = if pattern.operation == PatternOperation::FirstWrite {
                self.first_write(&configuration, pattern).await
            } else {
                self.sample(&disk, &configuration, pattern).await
            };
            if let Some(rate) = measured.with_context(|| format!("{configuration}: {pattern}"))? {
                record(pattern, rate);
            }
        }
        disk.close().await.with_context(|| configuration.to_string())?;
        Ok(())
    }

    async fn first_write(
        &mut self,
        configuration: &DiskConfiguration,
        pattern: RequestPattern,
    ) -> anyhow::Result<Option<f64>> {
        // A new overlay for each sample: only an empty one has no allocated clusters.
        let disk = self.images.open_overlay(configuration).await?;
        let measured = self.sample(&disk, configuration, pattern).await;
        let closed = disk.close().await;
        drop(disk);
        self.images.remove_overlay().await?;
        // The overlay is removed also after an error; the error of the measurement precedes that of
        // closing.
        let measured = measured?;
        closed?;
        Ok(measured)
    }

    async fn sample(
        &mut self,
        disk: &Arc<Disk>,
        configuration: &DiskConfiguration,
        pattern: RequestPattern,
    ) -> anyhow::Result<Option<f64>> {
        let disk_bytes = self.images.place.size_bytes;
        // Rereads use a part that fits into the page cache.
        let size_bytes = match pattern.operation {
            PatternOperation::Reread => disk_bytes.min(REREAD_BYTES),
            _ => disk_bytes,
        };
        match pattern.operation {
            PatternOperation::Read => self.images.drop_from_page_cache(disk).await?,
            PatternOperation::Reread => warm(disk, size_bytes).await?,
            PatternOperation::Write | PatternOperation::SyncWrite | PatternOperation::FirstWrite => {}
        }
        let stop = self.stop.clone();
        let series = self.batches(disk, configuration, pattern, size_bytes, &stop).await?;
        if series.requests == 0 || self.stop.is_interrupted() {
            return Ok(None);
        }
        if !pattern.writes() {
            // Reads need no flush, so their batches are complete measurements.
            return Ok(Some(steady_rate(&series.rates)));
        }
        let began = Instant::now();
        disk.flush().await.context("the last flush failed")?;
        let elapsed = series.elapsed + began.elapsed();
        // Untimed: a mode that ignores flushes may be fast, but must not slow down the next sample
        // by its writeback.
        self.images.drop_from_page_cache(disk).await?;
        Ok(Some(series.requests as f64 / elapsed.as_secs_f64().max(1e-9)))
    }

    /// Runs batches for a slice of time, after one to calibrate their size if necessary.
    async fn batches(
        &mut self,
        disk: &Arc<Disk>,
        configuration: &DiskConfiguration,
        pattern: RequestPattern,
        size_bytes: u64,
        stop: &TuneStop,
    ) -> anyhow::Result<SampleSeries> {
        let mut walk = BatchOffsets::new(pattern, size_bytes, &mut self.random);
        let max_requests = most_requests(pattern, size_bytes);
        let mut series = SampleSeries::default();
        let mut rate = self.rates.get(&(*configuration, pattern)).copied();
        while series.elapsed < self.slice && series.requests < max_requests && !stop.is_due() {
            // The rate of the last batch determines the size of the next.
            let wanted = rate.map_or(0.0, |rate| rate * self.slice.as_secs_f64() / f64::from(BATCHES));
            let count = (wanted.min(LARGEST_BATCH) as u64)
                .max(pattern.depth.into())
                .min(max_requests - series.requests);
            let outcome = run_job(walk.load(count), Arc::clone(disk)).await?;
            let is_first = rate.is_none();
            let now = count as f64 / outcome.elapsed.as_secs_f64().max(1e-9);
            rate = Some(now);
            // The first batch only calibrates, unless it took too long to be discarded.
            if !is_first
                || outcome.elapsed * 4 > self.slice
                || pattern.operation == PatternOperation::FirstWrite
            {
                series.rates.push(now);
                series.requests += count;
                series.elapsed += outcome.elapsed;
            }
        }
        // At most twice the median, so that a fast last batch does not make the next slice's first
        // too large.
        if let (Some(rate), false) = (rate, series.rates.is_empty()) {
            self.rates.insert((*configuration, pattern), rate.min(median(&series.rates) * 2.0));
        }
        Ok(series)
    }

    /// Random reads, starting with cold caches: (seconds, operations per second) of each batch.
    pub(super) async fn cold_cache_curve(
        &mut self,
        configuration: &DiskConfiguration,
        time: Duration,
    ) -> anyhow::Result<Vec<(f64, f64)>> {
        let disk = self.images.open(configuration).await?;
        self.images.drop_from_page_cache(&disk).await?;
        let pattern = RequestPattern {
            order: AccessOrder::Random,
            operation: PatternOperation::Read,
            block_bytes: 4096,
            depth: 1,
        };
        let mut walk = BatchOffsets::new(pattern, self.images.place.size_bytes, &mut self.random);
        let stop = self.stop.within(time);
        let mut points = Vec::new();
        let began = Instant::now();
        let mut count = 8;
        while !stop.is_due() {
            let outcome = run_job(walk.load(count), Arc::clone(&disk)).await?;
            let rate = count as f64 / outcome.elapsed.as_secs_f64().max(1e-9);
            points.push((began.elapsed().as_secs_f64(), rate));
            // About fifty points, independently of the disk's speed.
            count = ((rate * time.as_secs_f64() / 50.0) as u64).clamp(8, 1 << 20);
        }
        disk.close().await?;
        Ok(points)
    }
}

#[derive(Debug)]
pub(super) enum TurnError {
    NotOpened(anyhow::Error),
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for TurnError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

fn steady_rate(rates: &[f64]) -> f64 {
    median(&rates[steady(rates)])
}

/// Bound on requests, equal for every configuration, because writes share the flush's cost;
/// unbounded for reads.
fn most_requests(pattern: RequestPattern, size_bytes: u64) -> u64 {
    let written = if pattern.block_bytes < 1 << 20 { SMALL_WRITES_BYTES } else { LARGE_WRITES_BYTES };
    let all = written / pattern.block_bytes;
    match pattern.operation {
        PatternOperation::Read | PatternOperation::Reread => u64::MAX,
        PatternOperation::Write | PatternOperation::SyncWrite => all,
        // Assumes that each request allocates one of the largest clusters.
        PatternOperation::FirstWrite => {
            let cluster_bytes = CLUSTERS.into_iter().max().unwrap_or(pattern.block_bytes);
            all.min(OVERLAY_BYTES.min(size_bytes) / pattern.block_bytes.max(cluster_bytes)).max(1)
        }
    }
}

async fn warm(disk: &Arc<Disk>, size_bytes: u64) -> anyhow::Result<()> {
    let pattern = RequestPattern {
        order: AccessOrder::Sequential,
        operation: PatternOperation::Reread,
        block_bytes: 1 << 20,
        depth: 4,
    };
    let mut walk = BatchOffsets { pattern, size_bytes, offset: 0, seed: 0 };
    run_job(walk.load(size_bytes >> 20), Arc::clone(disk)).await?;
    Ok(())
}

#[derive(Clone, Copy, Debug)]
struct BatchOffsets {
    pattern: RequestPattern,
    size_bytes: u64,
    offset: u64,
    seed: u64,
}

impl BatchOffsets {
    fn new(pattern: RequestPattern, size_bytes: u64, random: &mut fastrand::Rng) -> Self {
        let blocks = size_bytes / pattern.block_bytes;
        Self { pattern, size_bytes, offset: random.u64(..blocks) * pattern.block_bytes, seed: random.u64(..) }
    }

    fn load(&mut self, count: u64) -> LoadSpec {
        let Self { pattern, size_bytes, .. } = *self;
        let block = pattern.block_bytes;
        let is_random = pattern.order == AccessOrder::Random;
        let load = LoadSpec {
            count,
            depth: pattern.depth,
            readers: 1,
            block_bytes: usize::try_from(block).unwrap_or(usize::MAX),
            pattern: OffsetPattern {
                offset: if is_random { 0 } else { self.offset },
                step_bytes: block,
                last: size_bytes - block,
                backward: false,
                random: is_random.then_some(self.seed),
                run: 1,
            },
            write: pattern.writes().then_some(BYTE),
            flush: (pattern.operation == PatternOperation::SyncWrite)
                .then_some(FlushSpec { interval: 1, drain: true }),
        };
        self.seed = self.seed.wrapping_add(1);
        self.offset = (self.offset / block + count) % (size_bytes / block) * block;
        load
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(order: AccessOrder, operation: PatternOperation) -> RequestPattern {
        RequestPattern { order, operation, block_bytes: 1 << 20, depth: 1 }
    }

    #[test]
    fn sequential_batches_continue_and_random_ones_differ() {
        let mut walk = BatchOffsets {
            offset: 0,
            seed: 7,
            size_bytes: 10 << 20,
            pattern: pattern(AccessOrder::Sequential, PatternOperation::Read),
        };
        let begins: Vec<_> = [4, 4, 4].map(|count| walk.load(count).pattern.offset >> 20).to_vec();
        assert_eq!(begins, [0, 4, 8], "and the last goes on at the beginning");
        assert_eq!(walk.load(1).pattern.offset >> 20, 2);
        let mut walk =
            BatchOffsets { pattern: pattern(AccessOrder::Random, PatternOperation::SyncWrite), ..walk };
        let loads = [walk.load(1), walk.load(1)];
        assert_ne!(loads[0].pattern.random, loads[1].pattern.random);
        assert_eq!(loads[0].flush, Some(FlushSpec { interval: 1, drain: true }));
        assert_eq!(loads[0].write, Some(BYTE));
    }

    #[test]
    fn slow_start_of_a_slice_is_discarded() {
        let rate = |batch: u32| if batch < BATCHES * 5 / 12 { 50.0 } else { 100.0 + f64::from(batch % 5) };
        let rates: Vec<f64> = (0..BATCHES).map(rate).collect();
        assert!((steady_rate(&rates) - 102.0).abs() < 1e-9, "{}", steady_rate(&rates));
        assert!(median(&rates) < 101.0, "with its beginning it would be another");
    }

    #[test]
    fn write_amount_is_equal_and_overlays_are_bounded() {
        let small = RequestPattern {
            block_bytes: 4096,
            ..pattern(AccessOrder::Random, PatternOperation::FirstWrite)
        };
        assert_eq!(most_requests(small, 1 << 30), 32, "each may allocate 2 MiB");
        assert_eq!(most_requests(small, 16 << 20), 8);
        assert_eq!(most_requests(pattern(AccessOrder::Random, PatternOperation::Write), 1 << 30), 32);
        assert_eq!(most_requests(pattern(AccessOrder::Random, PatternOperation::Read), 1 << 30), u64::MAX);
    }
}
