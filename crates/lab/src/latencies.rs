//! Latency histograms (Gil Tene's HdrHistogram), their percentiles, and points of their charts.
//!
//! Recording costs a few nanoseconds, so every request is recorded and counts in the extreme
//! percentiles.

use console::figures;
use hdrhistogram::Histogram;
use serde::Serialize;
use simulator::latencies::SIMULATED_DIGITS;
pub(super) use simulator::latencies::{Latencies, growing, note};

/// Longer latencies count as an hour, so that a histogram never grows while it measures.
const MAX_NS: u64 = 3_600_000_000_000;
/// Significant digits.
const DIGITS: u8 = 3;
const PERCENTILES: [(&str, f64); 5] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("p99.99", 0.9999)];
/// Minimum distance between points of a distribution: this share of the requests, or this factor in
/// time.
const STEP: f64 = 0.005;
const FACTOR: f64 = 1.02;

pub(super) fn new() -> Latencies {
    Histogram::new_with_bounds(1, MAX_NS, DIGITS).expect("constants that are in range")
}

/// Histogram of one second of a run, the source of [`Counts`].
pub(super) fn one_second() -> Latencies {
    Histogram::new_with_bounds(1, MAX_NS, SIMULATED_DIGITS).expect("constants that are in range")
}

/// Latencies in nanoseconds, within 1 %, each with its number of requests.
pub(super) type Counts = Vec<(u64, u64)>;

/// Drains `latencies`.
pub(super) fn take_counts(latencies: &mut Latencies) -> Counts {
    let counts = latencies.iter_recorded().map(|step| (step.value_iterated_to(), step.count_at_value()));
    let counts = counts.collect();
    latencies.reset();
    counts
}

pub(super) fn from_counts(counts: &Counts) -> Latencies {
    let mut latencies = one_second();
    counts.iter().for_each(|&(ns, count)| latencies.saturating_record_n(ns, count));
    latencies
}

/// Times in nanoseconds.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Percentiles {
    pub(crate) mean: f64,
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p99: u64,
    pub(crate) p99_9: u64,
    pub(crate) max: u64,
}

impl Percentiles {
    pub(crate) fn of(times: &Latencies) -> Self {
        let [p50, p90, p99, p99_9] = [0.5, 0.9, 0.99, 0.999].map(|share| times.value_at_quantile(share));
        Self { mean: times.mean(), p50, p90, p99, p99_9, max: times.max() }
    }

    /// Formats all but the mean, for a table.
    pub(crate) fn shown(&self) -> [String; 5] {
        let Self { p50, p90, p99, p99_9, max, .. } = *self;
        [p50, p90, p99, p99_9, max].map(figures::time)
    }
}

/// Times of any length; mean and maximum are exact, percentiles within 1 %.
pub(super) struct ExactTimes {
    times: Latencies,
    sum_ns: u128,
    max_ns: u64,
}

impl Default for ExactTimes {
    fn default() -> Self {
        Self { times: growing(), sum_ns: 0, max_ns: 0 }
    }
}

impl ExactTimes {
    pub(super) fn note(&mut self, ns: u64) {
        note(&mut self.times, ns);
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    /// Number of recorded times.
    pub(super) fn count(&self) -> u64 {
        self.times.len()
    }

    pub(super) fn percentiles(&self) -> Percentiles {
        let Percentiles { p50, p90, p99, p99_9, .. } = Percentiles::of(&self.times);
        // A histogram rounds up, which may exceed the exact maximum.
        let [p50, p90, p99, p99_9] = [p50, p90, p99, p99_9].map(|ns| ns.min(self.max_ns));
        let mean = self.sum_ns as f64 / self.count().max(1) as f64;
        Percentiles { mean, p50, p90, p99, p99_9, max: self.max_ns }
    }
}

/// Reported percentiles: name and nanoseconds.
pub(super) fn percentiles(latencies: &Latencies) -> [(&'static str, u64); 5] {
    PERCENTILES.map(|(name, quantile)| (name, latencies.value_at_quantile(quantile)))
}

/// A percentile of each second that has enough requests for it.
pub(super) fn percentile_of_each<'a>(seconds: impl Iterator<Item = &'a Latencies>, name: &str) -> Vec<f64> {
    let quantile =
        PERCENTILES.iter().find(|(known, _)| *known == name).map_or(1.0, |(_, quantile)| *quantile);
    // At least one request must lie above the quantile.
    let has_enough = |latencies: &&Latencies| latencies.len() as f64 * (1.0 - quantile) >= 1.0;
    seconds.filter(has_enough).map(|latencies| latencies.value_at_quantile(quantile) as f64).collect()
}

pub(super) fn percentile_names() -> [&'static str; 5] {
    PERCENTILES.map(|(name, _)| name)
}

/// Points (nanoseconds, share of requests that took at most that long) for a logarithmic axis,
/// which has no 0. The first point is the share of requests that took no time; in the tail, where
/// few requests lie, every different time is a point.
pub(super) fn distribution(latencies: &Latencies) -> Vec<(f64, f64)> {
    let (mut points, mut within) = (Vec::<(f64, f64)>::new(), 0);
    for step in latencies.iter_recorded() {
        within += step.count_at_value();
        let (ns, share) = (step.value_iterated_to() as f64, within as f64 / latencies.len() as f64);
        let is_last = within == latencies.len();
        let is_distinct = |&(last_ns, last): &(f64, f64)| share - last >= STEP || ns >= FACTOR * last_ns;
        if ns > 0.0 && points.is_empty() {
            points.push((ns, (within - step.count_at_value()) as f64 / latencies.len() as f64));
        }
        if ns > 0.0 && (is_last || points.len() == 1 || points.last().is_none_or(is_distinct)) {
            points.push((ns, share));
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_count_zero_latencies() {
        let mut times = growing();
        (0..90).for_each(|_| note(&mut times, 0));
        (1..=10).for_each(|number| note(&mut times, number * 1_000_000));
        assert_eq!((times.value_at_quantile(0.5), times.value_at_quantile(0.9)), (0, 0));
        let assert_near = |quantile: f64, ms: f64| {
            let value = times.value_at_quantile(quantile) as f64 / 1e6;
            assert!((value / ms - 1.0).abs() < 0.01, "{quantile}: {value} ms");
        };
        assert_near(0.91, 1.0);
        assert_near(0.99, 9.0);
        assert_near(1.0, 10.0);
        assert!((times.mean() / 550_000.0 - 1.0).abs() < 0.01, "{}", times.mean());
        let points = distribution(&times);
        assert_eq!(
            (points[0].1, points.last().unwrap().1),
            (0.9, 1.0),
            "it begins with those that took no time"
        );
        assert_eq!(growing().value_at_quantile(0.99), 0);
    }

    #[test]
    fn mean_and_maximum_are_exact() {
        let mut times = ExactTimes::default();
        for ns in [1, 1_000_003, 123_456_789, u64::MAX] {
            times.note(ns);
        }
        let percentiles = times.percentiles();
        assert_eq!(
            (percentiles.max, percentiles.mean),
            (u64::MAX, (u128::from(u64::MAX) + 124_456_793) as f64 / 4.0)
        );
        let mut single = ExactTimes::default();
        single.note(1_000_003);
        let percentiles = single.percentiles();
        assert_eq!(
            (percentiles.p50, percentiles.p99_9, percentiles.max, percentiles.mean),
            (1_000_003, 1_000_003, 1_000_003, 1_000_003.0)
        );
        assert_eq!(ExactTimes::default().percentiles().mean, 0.0);
    }

    #[test]
    fn distribution_has_its_tail_in_few_points() {
        let mut times = growing();
        (0..10_000).for_each(|_| note(&mut times, 4_000_000));
        (1..=30).for_each(|number| note(&mut times, 4_000_000 * number));
        let points = distribution(&times);
        assert_eq!(points.len(), 31);
        assert_eq!((points[0].0, points[0].1), (points[1].0, 0.0), "it begins at the bottom");
        assert!((points[2].0 / 8e6 - 1.0).abs() < 0.01 && points[2].1 < 0.998, "{:?}", points[2]);
        assert_eq!(points[30].1, 1.0);
        let mut even = new();
        (1..=1_000_000).for_each(|ns| even.record(1000 + ns).unwrap());
        assert!(distribution(&even).len() < 500);
    }

    #[test]
    fn latencies_of_any_length_are_recorded() {
        let mut times = growing();
        for ns in [1, 1 << 20, 1 << 40, 1 << 60] {
            note(&mut times, ns);
        }
        assert_eq!(times.len(), 4);
        assert!(times.max() as f64 > 0.99 * (1_u64 << 60) as f64);
    }
}
