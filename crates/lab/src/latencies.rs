//! How long requests took: a histogram that keeps three digits of each (Gil Tene's HdrHistogram), what is told of it, and the line it is drawn as.
//!
//! Recording costs some nanoseconds however many there are, and the far percentiles are those of all requests, not of a sample.
//!
//! Never grows: what takes longer than an hour counts as an hour.

use hdrhistogram::Histogram;

/// Latencies above an hour count as one.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// Digits that are kept.
const DIGITS: u8 = 3;
/// The percentiles that are told and kept.
const PERCENTILES: [(&str, f64); 5] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("p99.99", 0.9999)];
/// Points of a distribution's line, at equal distances upwards.
const POINTS: u32 = 200;

/// Times in nanoseconds.
pub(super) type Latencies = Histogram<u64>;

/// An empty one.
pub(super) fn new() -> Latencies {
    Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("constants that are in range")
}

/// The percentiles that are told, each by its name and in nanoseconds.
pub(super) fn percentiles(latencies: &Latencies) -> [(&'static str, u64); 5] {
    PERCENTILES.map(|(name, quantile)| (name, latencies.value_at_quantile(quantile)))
}

/// The names of those.
pub(super) fn percentile_names() -> [&'static str; 5] {
    PERCENTILES.map(|(name, _)| name)
}

/// The share of requests that took no longer than so many nanoseconds, as points of a line: (nanoseconds, share).
pub(super) fn distribution(latencies: &Latencies) -> Vec<(f64, f64)> {
    let shares = (0..POINTS).map(|point| f64::from(point) / f64::from(POINTS));
    let shares = shares.chain([0.999, 0.9999, 1.0]);
    // Below a nanosecond there is nothing, and a logarithm of nothing neither.
    shares.map(|share| (latencies.value_at_quantile(share).max(1) as f64, share)).collect()
}
