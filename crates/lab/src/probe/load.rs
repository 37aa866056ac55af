//! One kind of load on an image, and its measured rate.
//!
//! [`DEPTH`] requests are in flight all the time. The result is the median rate of several time
//! windows, so a pause in one of them has no effect; for a slow device windows are joined. The
//! spread of the windows is reported as well: it reveals devices whose rate depends on their
//! history.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
};

use anyhow::{Context as _, ensure};
use image::Image;
use policy::{
    request::Direction,
    time::{Duration, Instant},
};
use reactor::{buffer::IoBuffer, now, sleep_until, spawn_joinable};
use storage::Durability;

/// Number of requests in flight, enough to keep every queue of a disk busy.
pub(crate) const DEPTH: usize = 32;
/// Number of compared windows, after one that is discarded: a device needs a moment to reach its
/// speed.
const WINDOWS: u32 = 7;
/// Largest spread of a rate that counts as steady.
const STEADY: f64 = 0.3;
/// Factors of the measuring time for the two repetitions of a rate that varies.
const LONGER: [u32; 2] = [2, 4];
/// Minimum average of completions in a window, to limit random error; windows with fewer are
/// joined.
const MIN_COMPLETIONS: u64 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbePattern {
    Random,
    Sequential,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProbeLoad {
    pub(super) pattern: ProbePattern,
    pub(super) direction: Direction,
    /// Length of a request: a power of two.
    pub(super) block_bytes: usize,
}

impl ProbeLoad {
    /// All loads. Reads come first, because writes fill the device's caches and would speed up or
    /// slow down the reads after them.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let directions = [Direction::Read, Direction::Write];
        directions.into_iter().flat_map(|direction| {
            [ProbePattern::Random, ProbePattern::Sequential].into_iter().flat_map(move |pattern| {
                [4096, 1 << 20].into_iter().map(move |block_bytes| Self { pattern, direction, block_bytes })
            })
        })
    }

    pub(super) fn name(&self) -> &'static str {
        match (self.pattern, self.direction) {
            (ProbePattern::Random, Direction::Read) => "random read",
            (ProbePattern::Random, Direction::Write) => "random write",
            (ProbePattern::Sequential, Direction::Read) => "sequential read",
            (ProbePattern::Sequential, Direction::Write) => "sequential write",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ProbeResult {
    pub(super) load: ProbeLoad,
    /// Operations per second, the median of the windows. Fractional, because few large requests
    /// complete in a second. 0 if too few requests were completed for a rate.
    pub(super) rate: f64,
    /// Difference between the fastest and the slowest window, relative to the median. Infinite
    /// without a rate.
    pub(super) spread: f64,
}

impl ProbeResult {
    /// Rate in whole operations per second, at least 1: in a record, 0 stands for a rate that was
    /// not measured.
    pub(super) fn iops(&self) -> u64 {
        (self.rate.round() as u64).max(1)
    }

    pub(super) fn is_steady(&self) -> bool {
        self.spread <= STEADY
    }

    pub(super) fn bps(&self) -> u64 {
        (self.rate * self.load.block_bytes as f64).round() as u64
    }
}

#[derive(Clone, Debug)]
pub(super) struct ProbedRange {
    pub(super) image: Rc<Image>,
    /// Measured range from the start; at least one block of every load.
    pub(super) size_bytes: u64,
    /// Incompressible bytes, as many as the largest block.
    pub(super) noise: Rc<[u8]>,
}

#[derive(Debug)]
struct ProbeRun {
    load: ProbeLoad,
    field: ProbedRange,
    end: Instant,
    random: RefCell<fastrand::Rng>,
    next: Cell<u64>,
    /// Time and number of the last completion.
    done: Cell<(Instant, u64)>,
    failed: RefCell<Option<reactor::error::Error>>,
}

impl ProbedRange {
    /// Measures a load. While the rate varies, the measurement is repeated, at most twice, with the
    /// factors [`LONGER`] of the time. `longer` is called before each repetition; the last result
    /// counts.
    ///
    /// # Errors
    /// Fails on a failed request, or on too few completed requests for a rate.
    pub(super) async fn measure_steadily(
        &self,
        load: ProbeLoad,
        time: Duration,
        mut longer: impl FnMut(Duration),
    ) -> anyhow::Result<ProbeResult> {
        let mut figure = self.measure(load, time).await?;
        for factor in LONGER {
            if figure.is_steady() {
                break;
            }
            longer(time * factor);
            figure = self.measure(load, time * factor).await?;
        }
        ensure!(
            figure.rate > 0.0,
            "{} of {} bytes: too few requests were completed for a rate in {} seconds (give more --seconds)",
            load.name(),
            load.block_bytes,
            (time * LONGER[LONGER.len() - 1]).as_secs()
        );
        Ok(figure)
    }

    pub(super) async fn measure(&self, load: ProbeLoad, time: Duration) -> anyhow::Result<ProbeResult> {
        // One window more than compared: the first is the warm-up.
        let window = time / (WINDOWS + 1);
        let began = now();
        let run = ProbeRun::start(self, load, began + window * (WINDOWS + 1));
        let tasks: Vec<_> = (0..DEPTH).map(|_| spawn_joinable(Rc::clone(&run).requests())).collect();
        let mut marks = Vec::new();
        for number in 1..=WINDOWS + 1 {
            let end = began + window * number;
            sleep_until(end).await;
            // Each window ends exactly at its last completion.
            let (last, done) = run.done.get();
            // A window without completions ends at its nominal end.
            let is_silent = marks.last().is_some_and(|&(_, before)| before == done);
            marks.push((if is_silent { end } else { last }, done));
        }
        for task in tasks {
            task.await;
        }
        run.outcome().with_context(|| format!("{} of {} bytes", load.name(), load.block_bytes))?;
        Ok(figure(load, &marks))
    }

    /// Writes sequentially until the end or `time`; returns the bytes written.
    pub(super) async fn fill(&self, time: Duration, progress: impl Fn(u64)) -> anyhow::Result<u64> {
        let load = ProbeLoad {
            pattern: ProbePattern::Sequential,
            direction: Direction::Write,
            block_bytes: self.noise.len(),
        };
        let block = load.block_bytes as u64;
        let blocks = self.size_bytes / block;
        let end = now() + time;
        let run = ProbeRun::start(self, load, end);
        let task = |run: Rc<ProbeRun>| async move {
            while run.next.get() < blocks && now() < run.end && run.failed.borrow().is_none() {
                let at = run.next.replace(run.next.get() + 1) * block;
                run.request(at).await;
            }
        };
        let tasks: Vec<_> = (0..DEPTH).map(|_| spawn_joinable(task(Rc::clone(&run)))).collect();
        for task in tasks {
            task.await;
            progress(run.done.get().1 * block);
        }
        run.outcome().context("writing the file to be measured")?;
        Ok(run.done.get().1 * block)
    }
}

impl ProbeRun {
    fn start(field: &ProbedRange, load: ProbeLoad, end: Instant) -> Rc<Self> {
        Rc::new(Self {
            load,
            field: field.clone(),
            end,
            random: RefCell::new(fastrand::Rng::new()),
            next: Cell::new(0),
            done: Cell::new((now(), 0)),
            failed: RefCell::new(None),
        })
    }

    async fn requests(self: Rc<Self>) {
        while now() < self.end && self.failed.borrow().is_none() {
            let at = self.offset();
            self.request(at).await;
        }
    }

    fn offset(&self) -> u64 {
        // Offsets are multiples of the block size, as O_DIRECT requires.
        let block = self.load.block_bytes as u64;
        let blocks = self.field.size_bytes / block;
        let number = match self.load.pattern {
            ProbePattern::Random => self.random.borrow_mut().u64(0..blocks),
            ProbePattern::Sequential => self.next.replace(self.next.get() + 1) % blocks,
        };
        number * block
    }

    async fn request(&self, at: u64) {
        let image = &self.field.image;
        let result = match self.load.direction {
            Direction::Read => image.read(at, self.load.block_bytes).await.map(drop),
            Direction::Write => {
                let data = IoBuffer::copy_of(&self.field.noise[..self.load.block_bytes]);
                image.write(at, data.into(), Durability::Cached).await
            }
        };
        match result {
            Ok(()) => self.done.set((now(), self.done.get().1 + 1)),
            // Only the first error is kept.
            Err(error) => drop(self.failed.borrow_mut().get_or_insert(error)),
        }
    }

    fn outcome(&self) -> Result<(), reactor::error::Error> {
        self.failed.borrow_mut().take().map_or(Ok(()), Err)
    }
}

/// Result of a load. `marks` has the time of each window's last completion, and the number of
/// completions until then.
fn figure(load: ProbeLoad, marks: &[(Instant, u64)]) -> ProbeResult {
    let windows = marks.len() - 1;
    // The first mark is the end of the warm-up.
    let completed = marks[windows].1 - marks[0].1;
    let counted =
        // An odd number of windows, so that the median is one of them.
        (1..=windows).rev().filter(|count| count % 2 == 1).find(|count| completed / *count as u64 >= MIN_COMPLETIONS);
    // The spread is taken over single windows, the median over joined ones.
    let (each, long) = (rates(marks, windows), rates(marks, counted.unwrap_or(1)));
    let median = long[long.len() / 2];
    let range = each[windows - 1] - each[0];
    ProbeResult { load, rate: median, spread: if median > 0.0 { range / median } else { f64::INFINITY } }
}

/// Ascending rates of groups of windows, measured between last completions: nominal ends would add
/// a random error of one completion.
fn rates(marks: &[(Instant, u64)], count: usize) -> Vec<f64> {
    let mark = |number: usize| marks[number * (marks.len() - 1) / count];
    let rate = |number: usize| {
        let ((from, before), (until, done)) = (mark(number), mark(number + 1));
        if done > before { (done - before) as f64 / (until - from).as_secs_f64() } else { 0.0 }
    };
    let mut rates: Vec<f64> = (0..count).map(rate).collect();
    rates.sort_by(f64::total_cmp);
    rates
}

#[cfg(test)]
mod tests {
    use image::open_raw;
    use reactor::sim;
    use storage::OpenOptions;

    use super::*;

    const LOAD: ProbeLoad =
        ProbeLoad { pattern: ProbePattern::Random, direction: Direction::Read, block_bytes: 4096 };

    #[test]
    fn median_is_used_and_range_is_reported() {
        let figure = figure(LOAD, &marks(1, [100, 5, 90, 110, 95, 120, 100]));
        assert_eq!((figure.iops(), figure.bps()), (100, 409_600));
        assert!((figure.spread - 1.15).abs() < 1e-9);
        let figure = super::figure(LOAD, &marks(1, [0; 7]));
        assert!(figure.rate == 0.0 && !figure.is_steady(), "{figure:?}");
    }

    #[test]
    fn few_completions_join_windows() {
        // Windows of 100 ms with rates of 20, 30 or 40 per second; 29 on average.
        let figure = figure(LOAD, &marks(10, [2, 4, 2, 3, 2, 4, 3]));
        assert!((figure.rate - 20.0 / 0.7).abs() < 1e-9 && figure.spread > 0.5, "{figure:?}");
        // Joined to three windows: 60, 30 and 60; the pause in one does not count.
        let figure = super::figure(LOAD, &marks(10, [6, 6, 6, 0, 6, 6, 6]));
        assert!((figure.rate - 60.0).abs() < 1e-9, "{figure:?}");
    }

    fn marks(a_second: u64, completed: [u64; WINDOWS as usize]) -> Vec<(Instant, u64)> {
        let mut done = 0;
        let ends = (0..).map(|number| Instant::from_nanos(number * 1_000_000_000 / a_second));
        let marks = [0].into_iter().chain(completed).zip(ends);
        marks
            .map(|(completed, end)| {
                done += completed;
                (end, done)
            })
            .collect()
    }

    #[test]
    fn each_pattern_is_measured_once_reads_first() {
        let all: Vec<_> = ProbeLoad::all().collect();
        assert_eq!(all.len(), 8);
        assert!(all[..4].iter().all(|load| load.direction == Direction::Read));
        assert!(all.iter().enumerate().all(|(index, load)| !all[..index].contains(load)));
    }

    fn measured(
        spec: &'static str,
        options: OpenOptions,
        load: ProbeLoad,
        size_bytes: u64,
        time: Duration,
    ) -> anyhow::Result<ProbeResult> {
        sim::run(1, async move {
            let image = Rc::new(open_raw(spec, options).unwrap());
            let field = ProbedRange { image, size_bytes, noise: vec![7; 1 << 20].into() };
            field.measure(load, time).await
        })
    }

    fn rate(rate: &str) -> OpenOptions {
        OpenOptions { rate: Some(rate.parse().unwrap()), ..OpenOptions::default() }
    }

    #[test]
    fn simulated_device_is_measured_correctly() {
        for load in ProbeLoad::all() {
            let options = rate("bytes=100M,iops=2000");
            let figure = measured("memory:64M", options, load, 64 << 20, Duration::from_secs(8)).unwrap();
            let expect = if load.block_bytes == 4096 { 2000.0 } else { 100.0 };
            let error = (figure.rate / expect - 1.0).abs();
            assert!(error < 0.03 && figure.spread < 0.06, "{figure:?}");
        }
    }

    #[test]
    fn slow_device_is_measured_within_a_percent() {
        // 3 or 4 requests of 1 MiB in each window.
        let load = ProbeLoad {
            pattern: ProbePattern::Sequential,
            direction: Direction::Write,
            block_bytes: 1 << 20,
        };
        let (options, time) = (rate("bytes=13500000"), Duration::from_secs(2));
        let figure = measured("memory:64M", options, load, 64 << 20, time).unwrap();
        assert!((figure.bps() as f64 / 13_500_000.0 - 1.0).abs() < 0.01, "{figure:?}");
    }

    #[test]
    fn varying_rate_is_measured_for_longer() {
        // The competing load is active in some seconds.
        let with_competitor = |is_active: fn(u64) -> bool| {
            sim::run(1, async move {
                let image = Rc::new(open_raw("memory:64M", rate("iops=2000")).unwrap());
                let began = now();
                for _ in 0..4 * DEPTH {
                    let image = Rc::clone(&image);
                    reactor::spawn(async move {
                        loop {
                            match now().nanos_since(began) / 1_000_000_000 {
                                60.. => break,
                                second if is_active(second) => drop(image.read(0, 4096).await),
                                _ => sleep_until(now() + Duration::from_millis(100)).await,
                            }
                        }
                    });
                }
                let field = ProbedRange { image, size_bytes: 64 << 20, noise: vec![7; 1 << 20].into() };
                let mut repeated = Vec::new();
                let time = Duration::from_secs(8);
                let figure = field.measure_steadily(LOAD, time, |time| repeated.push(time.as_secs())).await;
                (figure.unwrap(), repeated)
            })
        };
        let (figure, repeated) = with_competitor(|second| second < 4);
        assert!((figure.rate / 2000.0 - 1.0).abs() < 0.03 && figure.is_steady(), "{figure:?}");
        assert_eq!(repeated, [16]);
        assert_eq!(with_competitor(|_| false).1, [0; 0]);
        // It is active in a part of every measurement.
        let (figure, repeated) = with_competitor(|second| second / 6 % 2 == 0);
        assert!(!figure.is_steady(), "{figure:?}");
        assert_eq!(repeated, [16, 32]);
    }

    #[test]
    fn too_few_completions_give_no_rate() {
        // Requests complete one second apart.
        let error = sim::run(1, async move {
            let image = Rc::new(open_raw("memory:64M", rate("iops=1")).unwrap());
            let field = ProbedRange { image, size_bytes: 64 << 20, noise: vec![7; 1 << 20].into() };
            field.measure_steadily(LOAD, Duration::from_millis(80), |_| ()).await.unwrap_err()
        });
        let error = error.to_string();
        assert!(error.starts_with("random read of 4096 bytes: too few requests were completed"), "{error}");
        assert!(error.ends_with("(give more --seconds)"), "{error}");
    }

    #[test]
    fn rate_below_one_is_not_zero() {
        let figure = ProbeResult { load: LOAD, rate: 0.3, spread: 0.0 };
        assert_eq!(figure.iops(), 1);
    }

    #[test]
    fn failed_request_ends_the_measurement() {
        let faults = vec!["kind=read,error=EIO,offset=4M-8M".parse().unwrap()];
        let options = OpenOptions { faults, ..OpenOptions::default() };
        let failed = measured("null:8M", options, LOAD, 8 << 20, Duration::from_millis(10)).unwrap_err();
        assert!(format!("{failed:#}").starts_with("random read of 4096 bytes: "), "{failed:#}");
    }
}
