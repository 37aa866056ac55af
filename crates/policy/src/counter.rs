//! Growth of cumulative counters between two readings, and the rates that follow from it.
//!
//! ```text
//!      counter ▲            ╱ now             growth = now - before
//!              │      ╱────╱                  rate   = growth / elapsed
//!              │ ────╱ before
//!              │
//!              │ ────╮ before                 A counter that falls has no growth: its object was
//!              │     ╰──── now                replaced, or lost a part of its totals.
//! ```
//!
//! The value after a fall is not the growth: a v1 cgroup counts the work of its living descendants,
//! and when one is removed, the counter falls to a total that was collected over hours.
//!
//! Some kernel counters have 32 bits and wrap around. [`growth_of_32_bits`] accepts a wrap-around
//! if the growth is below 2³¹.

use crate::time::{Duration, NANOS_PER_SECOND};

/// Growth of one counter; `None` if it fell.
pub const fn growth(before: u64, now: u64) -> Option<u64> {
    now.checked_sub(before)
}

/// Growth of all counters of an object; `None` if any of them fell, because then the object was
/// replaced, and no counter has a known growth.
pub fn growths<const N: usize>(before: &[u64; N], now: &[u64; N]) -> Option<[u64; N]> {
    let mut growth_of = [0; N];
    for ((by, before), now) in growth_of.iter_mut().zip(before).zip(now) {
        *by = growth(*before, *now)?;
    }
    Some(growth_of)
}

/// Growth of a counter of 32 bits; `None` if it fell by less than 2³¹.
pub const fn growth_of_32_bits(before: u64, now: u64) -> Option<u64> {
    if now >= before {
        return growth(before, now);
    }
    // A counter above 32 bits cannot have wrapped, and a wrap of 2³¹ or more is taken for a reset.
    let wrapped = (now as u32).wrapping_sub(before as u32);
    if before <= u32::MAX as u64 && wrapped < 1 << 31 { Some(wrapped as u64) } else { None }
}

/// Growth of the counters of one object over a non-zero time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterGrowth<const N: usize> {
    /// Growth of each counter.
    pub by: [u64; N],
    /// Time between the readings.
    pub elapsed: Duration,
}

impl<const N: usize> CounterGrowth<N> {
    /// Returns `None` if any counter fell or no time has passed.
    pub fn between(before: &[u64; N], now: &[u64; N], elapsed: Duration) -> Option<Self> {
        let by = growths(before, now)?;
        (!elapsed.is_zero()).then_some(Self { by, elapsed })
    }

    /// Rate of one counter, in its units per second.
    pub fn per_second(&self, index: usize) -> f64 {
        self.by[index] as f64 / self.elapsed.as_secs_f64()
    }

    /// Busy share of the elapsed time, 0 to 1, of a counter that counts nanoseconds.
    pub fn share_of_time(&self, index: usize) -> f64 {
        (self.per_second(index) / NANOS_PER_SECOND as f64).min(1.0)
    }

    /// Share of counter `part` in the growth of `part` and `rest`; `None` if neither has grown.
    pub fn ratio(&self, part: usize, rest: usize) -> Option<f64> {
        let (part, rest) = (self.by[part], self.by[rest]);
        let total = part.saturating_add(rest);
        (total > 0).then(|| part as f64 / total as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_counter_that_falls_has_no_growth() {
        assert_eq!(growth(7, 9), Some(2));
        assert_eq!(growth(9, 7), None);
        assert_eq!(growths(&[1, 9], &[5, 9]), Some([4, 0]));
        assert_eq!(growths(&[1, 9], &[5, 8]), None, "nor have those beside it");
        assert_eq!(CounterGrowth::between(&[9], &[7], Duration::from_secs(1)), None);
        assert_eq!(CounterGrowth::between(&[7], &[9], Duration::ZERO), None, "in no time nothing has a rate");
    }

    #[test]
    fn rates_and_shares() {
        let growth =
            CounterGrowth::between(&[0, 0, 5], &[10, 500_000_000, 35], Duration::from_secs(2)).unwrap();
        assert_eq!((growth.per_second(0), growth.share_of_time(1)), (5.0, 0.25));
        assert_eq!((growth.ratio(0, 2), growth.ratio(2, 0)), (Some(0.25), Some(0.75)));
        let idle = CounterGrowth::between(&[1, 1], &[1, 1], Duration::from_secs(2)).unwrap();
        assert_eq!(idle.ratio(0, 1), None);
    }

    #[test]
    fn a_counter_of_32_bits_wraps_and_a_replaced_one_does_not() {
        assert_eq!(growth_of_32_bits((1 << 32) - 10, 40), Some(50));
        assert_eq!(growth_of_32_bits(5000, 40), None);
        assert_eq!(growth_of_32_bits(u64::MAX, 4), None, "it has more bits");
        assert_eq!(growth_of_32_bits(1 << 40, (1 << 40) + 3), Some(3));
    }

    proptest! {
        #[test]
        fn growth_below_half_of_32_bits_is_found_at_any_place(before: u32, by in 0..1_u32 << 31) {
            let now = before.wrapping_add(by);
            prop_assert_eq!(growth_of_32_bits(before.into(), now.into()), Some(by.into()));
        }
    }
}
