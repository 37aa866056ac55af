//! A histogram of latencies in logarithmic steps: waits for limits, and completions of a device.
//!
//! ```text
//!   16 steps in each octave     │ │ │ │ │   │   │   │   │       │       │
//!   from about 16 µs            └─┴─┴─┴─┴───┴───┴───┴───┴───────┴───────┴──► ns, to 73 minutes
//! ```
//!
//! Less than 2 KiB, because 10,000 disks may have three each. Never keeps single values, except the
//! largest.

use alloc::boxed::Box;

/// Bits of a unit of the histogram: 2¹⁰ ns, about a microsecond.
const UNIT_BITS: u32 = 10;
/// Steps in an octave. A value counts as the middle of its step, an error of at most 1/32.
const STEPS: u64 = 16;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Range of the histogram: 2⁴² ns, 73 minutes. Longer latencies count as that.
const OCTAVES: usize = 32 - STEP_BITS as usize + 1;
const ALL_STEPS: usize = OCTAVES * STEPS as usize;

/// A histogram of latencies in nanoseconds, accurate to 3.2 % or 1 µs.
#[derive(Clone, Debug)]
pub struct LatencyHistogram {
    counts: Box<[u32; ALL_STEPS]>,
    max_ns: u64,
}

impl Default for LatencyHistogram {
    fn default() -> Self {
        Self::new()
    }
}

impl LatencyHistogram {
    /// An empty histogram.
    pub fn new() -> Self {
        Self { counts: Box::new([0; ALL_STEPS]), max_ns: 0 }
    }

    /// Adds `requests` of the same latency.
    pub fn add(&mut self, latency_ns: u64, requests: u64) {
        self.max_ns = self.max_ns.max(latency_ns);
        self.add_to_step(step_of(latency_ns), u32::try_from(requests).unwrap_or(u32::MAX));
    }

    fn add_to_step(&mut self, step: usize, requests: u32) {
        if let Some(sum) = self.counts[step].checked_add(requests) {
            self.counts[step] = sum;
        } else {
            // After four billion requests only the proportions are kept.
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.counts[step] = self.counts[step].saturating_add(requests);
        }
    }

    /// Adds all latencies of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.max_ns = self.max_ns.max(other.max_ns);
        for (count, more) in self.counts.iter_mut().zip(other.counts.iter()) {
            *count = count.saturating_add(*more);
        }
    }

    /// Removes all latencies.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        self.max_ns = 0;
    }

    /// Number of latencies.
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|count| u64::from(*count)).sum()
    }

    /// The longest latency in nanoseconds, exact; 0 if there is none.
    pub const fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The latency, in nanoseconds, that `permyriad` of 10,000 latencies do not exceed; 0 if there
    /// is none. The 99th percentile is 9900.
    pub fn percentile_ns(&self, permyriad: u16) -> u64 {
        let rank = (u128::from(self.count()) * u128::from(permyriad)).div_ceil(10_000);
        let mut counted = 0;
        for (step, count) in self.counts.iter().enumerate() {
            counted += u128::from(*count);
            if counted >= rank && *count > 0 {
                return middle_of(step).min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// Number of latencies longer than `bound_ns`. Those of the step that contains the bound are
    /// divided in proportion.
    pub fn count_above(&self, bound_ns: u64) -> f64 {
        let step = step_of(bound_ns);
        let (first_ns, width_ns) = bounds_of(step);
        let above: u64 = self.counts[step + 1..].iter().map(|count| u64::from(*count)).sum();
        let part = (first_ns + width_ns).saturating_sub(bound_ns) as f64 / width_ns as f64;
        above as f64 + f64::from(self.counts[step]) * part.min(1.0)
    }

    /// Steps with latencies, and their numbers, for [`LatencyHistogram::add_steps`].
    pub fn steps(&self) -> impl Iterator<Item = (u16, u32)> + '_ {
        (0..).zip(self.counts.iter().copied()).filter(|(_, count)| *count > 0)
    }

    /// Adds latencies of another process. An unknown step counts as the longest.
    pub fn add_steps(&mut self, steps: &[(u16, u32)], max_ns: u64) {
        self.max_ns = self.max_ns.max(max_ns);
        for &(step, count) in steps {
            let sum = &mut self.counts[usize::from(step).min(ALL_STEPS - 1)];
            *sum = sum.saturating_add(count);
        }
    }
}

fn step_of(ns: u64) -> usize {
    let units = ns >> UNIT_BITS;
    let octave = (u64::BITS - units.leading_zeros()).saturating_sub(STEP_BITS + 1);
    // The first two octaves have a step for each value below 2 × STEPS.
    let step = if units < STEPS { units } else { STEPS * u64::from(octave) + (units >> octave) };
    (step as usize).min(ALL_STEPS - 1)
}

/// Start and width of a step in nanoseconds.
fn bounds_of(step: usize) -> (u64, u64) {
    let (octave, within) = (step as u64 / STEPS, step as u64 % STEPS);
    let (first, width) =
        if octave == 0 { (within, 1) } else { ((within + STEPS) << (octave - 1), 1 << (octave - 1)) };
    (first << UNIT_BITS, width << UNIT_BITS)
}

/// Middle of a step in nanoseconds.
fn middle_of(step: usize) -> u64 {
    let (first_ns, width_ns) = bounds_of(step);
    first_ns + width_ns / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn latencies_are_accurate_to_a_32nd_or_512_ns(ns in prop_oneof![0..100_000u64, 0..1u64 << 42]) {
            let reported_ns = middle_of(step_of(ns));
            prop_assert!(reported_ns.abs_diff(ns) <= (ns / 32).max(512), "{ns} is reported as {reported_ns}");
            prop_assert_eq!(step_of(reported_ns), step_of(ns));
        }
    }

    #[test]
    fn percentiles_and_maximum() {
        let mut histogram = LatencyHistogram::new();
        assert_eq!((histogram.percentile_ns(9900), histogram.max_ns()), (0, 0));
        histogram.add(100_000, 98);
        histogram.add(1_000_000, 1);
        histogram.add(u64::MAX, 1);
        let (p50_ns, p99_ns) = (histogram.percentile_ns(5000), histogram.percentile_ns(9900));
        assert!(p50_ns.abs_diff(100_000) <= 3_200, "{p50_ns}");
        assert!(p99_ns.abs_diff(1_000_000) <= 32_000, "{p99_ns}");
        assert_eq!(histogram.max_ns(), u64::MAX);
    }

    #[test]
    fn step_of_the_bound_is_divided() {
        let mut histogram = LatencyHistogram::new();
        let (first_ns, width_ns) = bounds_of(step_of(5_000_000));
        histogram.add(first_ns + width_ns / 2, 100);
        histogram.add(first_ns + width_ns, 7);
        histogram.add(u64::MAX, 3);
        assert_eq!(histogram.count_above(first_ns), 110.0);
        assert_eq!(histogram.count_above(first_ns + width_ns / 4), 85.0);
        assert_eq!(histogram.count_above(first_ns + width_ns), 10.0);
        assert_eq!(histogram.count_above(1), 110.0);
    }

    #[test]
    fn full_counter_halves_the_histogram() {
        let mut histogram = LatencyHistogram::new();
        histogram.add(1_000, u64::from(u32::MAX));
        histogram.add(1 << 30, 1 << 31);
        let percentiles =
            |histogram: &LatencyHistogram| (histogram.percentile_ns(5000), histogram.percentile_ns(9900));
        let half_of_each = percentiles(&histogram);
        histogram.add(1_000, 2);
        assert_eq!(percentiles(&histogram), half_of_each);
        assert!(half_of_each.0 < 1_024 && half_of_each.1 > 1 << 29);
    }
}
