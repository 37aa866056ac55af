//! Histograms of latencies (Gil Tene's HdrHistogram) that grow with the longest latency.

use hdrhistogram::Histogram;

/// Significant digits. Each disk of a simulation has three histograms.
pub const SIMULATED_DIGITS: u8 = 2;
// 146 years; longer times count as this.
const MAX_SIMULATED_NS: u64 = 1 << 62;

/// Latencies in nanoseconds.
pub type Latencies = Histogram<u64>;

/// Creates a histogram for simulated times of any length; [`note`] adds to it.
pub fn growing() -> Latencies {
    Histogram::new(SIMULATED_DIGITS).expect("between 0 and 5 digits")
}

/// Adds a latency in nanoseconds.
#[inline]
pub fn note(latencies: &mut Latencies, ns: u64) {
    latencies.record(ns.min(MAX_SIMULATED_NS)).expect("it grows as it has to");
}
