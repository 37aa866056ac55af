//! Latencies as a histogram (Gil Tene's HdrHistogram), their percentiles, and the line they are
//! drawn as.
//!
//! Recording costs some nanoseconds, and the far percentiles are those of all requests.

use hdrhistogram::Histogram;

/// Longer ones count as an hour, so that a histogram never grows while it measures.
const LONGEST_NS: u64 = 3_600_000_000_000;
/// Significant digits. Each disk of a simulation has three histograms.
const DIGITS: u8 = 3;
const SIMULATED_DIGITS: u8 = 2;
/// 146 years; longer times count as that.
const LONGEST_SIMULATED_NS: u64 = 1 << 62;
const PERCENTILES: [(&str, f64); 5] =
    [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("p99.99", 0.9999)];
const POINTS: u32 = 200;

pub(super) type Latencies = Histogram<u64>;

pub(super) fn new() -> Latencies {
    Histogram::new_with_bounds(1, LONGEST_NS, DIGITS).expect("constants that are in range")
}

/// For simulated times of any length; [`note`] adds to it.
pub(super) fn growing() -> Latencies {
    Histogram::new(SIMULATED_DIGITS).expect("between 0 and 5 digits")
}

#[inline]
pub(super) fn note(latencies: &mut Latencies, ns: u64) {
    latencies.record(ns.min(LONGEST_SIMULATED_NS)).expect("it grows as it has to");
}

/// Reported percentiles: name and nanoseconds.
pub(super) fn percentiles(latencies: &Latencies) -> [(&'static str, u64); 5] {
    PERCENTILES.map(|(name, quantile)| (name, latencies.value_at_quantile(quantile)))
}

pub(super) fn percentile_names() -> [&'static str; 5] {
    PERCENTILES.map(|(name, _)| name)
}

/// Points (nanoseconds, share of requests within), without 0, which has no logarithm.
pub(super) fn distribution(latencies: &Latencies) -> Vec<(f64, f64)> {
    let shares = (0..POINTS).map(|point| f64::from(point) / f64::from(POINTS));
    let shares = shares.chain([0.999, 0.9999, 1.0]);
    let points = shares.map(|share| (latencies.value_at_quantile(share) as f64, share));
    points.filter(|&(ns, _)| ns > 0.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_count_those_that_took_no_time() {
        let mut times = growing();
        (0..90).for_each(|_| note(&mut times, 0));
        (1..=10).for_each(|number| note(&mut times, number * 1_000_000));
        assert_eq!((times.value_at_quantile(0.5), times.value_at_quantile(0.9)), (0, 0));
        let near = |quantile: f64, ms: f64| {
            let value = times.value_at_quantile(quantile) as f64 / 1e6;
            assert!((value / ms - 1.0).abs() < 0.01, "{quantile}: {value} ms");
        };
        near(0.91, 1.0);
        near(0.99, 9.0);
        near(1.0, 10.0);
        assert!((times.mean() / 550_000.0 - 1.0).abs() < 0.01, "{}", times.mean());
        assert_eq!(distribution(&times).last().unwrap().1, 1.0);
        assert_eq!(growing().value_at_quantile(0.99), 0);
    }

    #[test]
    fn times_of_any_length_are_noted() {
        let mut times = growing();
        for ns in [1, 1 << 20, 1 << 40, 1 << 60] {
            note(&mut times, ns);
        }
        assert_eq!(times.len(), 4);
        assert!(times.max() as f64 > 0.99 * (1_u64 << 60) as f64);
    }
}
