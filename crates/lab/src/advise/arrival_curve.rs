//! Waiting times of requests at a bucket, computed from the arrival curve alone.
//!
//! A request that meets the level L in a bucket of size B waits (L - B) / r: while a request waits
//! the bucket does not run empty, so its level does not depend on the order of admission. One pass
//! with an unbounded bucket (Lindley's recursion, 1952) therefore gives the waits for every size:
//!
//! ```text
//!   D = time in which the level drains at the rate: rises by units / rate, falls with time, not below 0
//!   wait = D - B / rate
//! ```
//!
//! A request worth more than [`SLICE_S`] of the rate is admitted with its last slice (`policy`'s
//! `throttle/slicing.rs`), so all slices before count towards the level; where slices are larger
//! because the bucket has capacity, it is admitted up to one slice sooner than computed. Two
//! buckets of the same unit delay a request as long as the slower of them alone; buckets of
//! operations and of bytes together may delay it longer. Reads that overtake writes may be delayed
//! by another time than computed one by one, but not in total. A simulation confirms every result.
//!
//! Times are floating-point seconds: exact to nanoseconds for levels of hours.

use policy::throttle::{RateLimit, ReservationUnit};
use recording::RequestOp;

use super::arrivals::TraceArrival;

/// As in `policy`'s `throttle/slicing.rs`.
const SLICE_S: f64 = 0.09;
/// Size of a bucket without a burst, in seconds of its rate.
pub(super) const NO_BURST_S: f64 = 0.1;

/// Histogram of waits: from an eighth of a microsecond, with this many bits for each doubling.
const STEP_BITS: u32 = 6;
const FIRST: u64 = (1.25e-7_f64).to_bits() >> (52 - STEP_BITS);
const STEPS: usize = 60 << STEP_BITS;

/// Arrival times, and the units that each request costs.
pub(super) fn demand(
    arrivals: impl Iterator<Item = TraceArrival>,
    unit: ReservationUnit,
) -> impl Iterator<Item = (u64, f64)> {
    let moving = arrivals.filter(|arrival| arrival.op != RequestOp::Flush);
    moving.map(move |TraceArrival { at_ns, length, .. }| {
        (at_ns, if unit == ReservationUnit::Iops { 1.0 } else { length as f64 })
    })
}

/// Level of a bucket of unbounded size.
#[derive(Clone, Copy, Debug)]
struct UnboundedBucket {
    rate: f64,
    /// Seconds until the level has drained.
    out_s: f64,
    slice: f64,
}

impl UnboundedBucket {
    fn new(rate: f64, unit: ReservationUnit) -> Self {
        // A single operation is never divided, so a slice has at least one.
        let slice = SLICE_S * rate;
        Self { rate, out_s: 0.0, slice: if unit == ReservationUnit::Iops { slice.max(1.0) } else { slice } }
    }

    /// Level in seconds of the rate that a request meets, `after_s` after the previous one.
    #[inline(always)]
    fn arrive(&mut self, after_s: f64, units: f64) -> f64 {
        let level_s = (self.out_s - after_s).max(0.0);
        self.out_s = level_s + units / self.rate;
        if units <= self.slice { level_s } else { level_s + self.before_last(units) }
    }

    #[cold]
    fn before_last(&self, units: f64) -> f64 {
        ((units / self.slice).ceil() - 1.0) * self.slice / self.rate
    }
}

/// Waits at one rate.
#[derive(Clone, Debug)]
pub(super) struct RateHistogram {
    level: UnboundedBucket,
    counts: Vec<u32>,
    /// Requests that wait too long at a bucket without a burst.
    pub(super) over: u64,
}

impl RateHistogram {
    pub(super) const fn rate(&self) -> f64 {
        self.level.rate
    }

    /// Smallest bucket, in seconds of the rate, at which at most `allowed` requests wait longer
    /// than `wait_s`; rounded up to a step of the histogram.
    pub(super) fn size_s(&self, allowed: u64, wait_s: f64) -> f64 {
        let mut above = 0;
        // From the longest waits down, until more requests than allowed would be late.
        for (step, &count) in self.counts.iter().enumerate().rev() {
            above += u64::from(count);
            if above > allowed {
                let upper = f64::from_bits((FIRST + step as u64 + 1) << (52 - STEP_BITS));
                return (upper - wait_s).max(0.0);
            }
        }
        0.0
    }
}

/// Waits at many rates, in one pass over the requests.
pub(super) fn measure_rates(
    demand: impl Iterator<Item = (u64, f64)>,
    unit: ReservationUnit,
    rates: &[f64],
    wait_s: f64,
) -> Vec<RateHistogram> {
    let histogram = |&rate: &f64| RateHistogram {
        level: UnboundedBucket::new(rate, unit),
        counts: vec![0; STEPS],
        over: 0,
    };
    let mut lanes: Vec<RateHistogram> = rates.iter().map(histogram).collect();
    let mut before = 0;
    for (at_ns, units) in demand {
        let after_s = (at_ns - before) as f64 / 1e9;
        before = at_ns;
        for histogram in &mut lanes {
            let found_s = histogram.level.arrive(after_s, units);
            histogram.over += u64::from(exceeds(found_s, NO_BURST_S, wait_s));
            // The bits of a positive float order like its value: exponent and leading mantissa bits
            // select the step.
            let step = (found_s.to_bits() >> (52 - STEP_BITS)).wrapping_sub(FIRST);
            // Waits below the first step wrap around to an index out of range: they are not
            // counted.
            if let Some(count) = histogram.counts.get_mut(step as usize) {
                *count = count.saturating_add(1);
            }
        }
    }
    lanes
}

/// True if a wait is too long, beyond the error of floating point.
#[inline(always)]
fn exceeds(found_s: f64, size_s: f64, wait_s: f64) -> bool {
    found_s - size_s > wait_s + 1e-9
}

/// The bucket of a limit, or the two of a burst longer than a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitBuckets {
    level: UnboundedBucket,
    size_s: f64,
    burst: Option<UnboundedBucket>,
}

impl LimitBuckets {
    #[cfg(test)]
    pub(super) fn new(limit: RateLimit, unit: ReservationUnit) -> Self {
        Self::scaled(limit, unit, 1.0)
    }

    /// A bucket with scaled rates and unchanged burst length.
    pub(super) fn scaled(limit: RateLimit, unit: ReservationUnit, factor: f64) -> Self {
        let RateLimit { rate, burst_rate, .. } = limit;
        let size_s = limit.capacity() / rate as f64;
        let level = UnboundedBucket::new(rate as f64 * factor, unit);
        // A slice is defined by the rate, also for the burst bucket.
        let burst = UnboundedBucket { rate: burst_rate as f64 * factor, ..level };
        Self { level, size_s, burst: limit.has_burst_rate_bucket().then_some(burst) }
    }

    /// Wait of a request, `after_s` after the previous one.
    #[inline]
    pub(super) fn wait_s(&mut self, after_s: f64, units: f64) -> f64 {
        let wait_s = self.level.arrive(after_s, units) - self.size_s;
        // Both buckets must admit a request; each is charged in any case.
        let burst_s = self.burst.as_mut().map_or(0.0, |burst| burst.arrive(after_s, units) - NO_BURST_S);
        wait_s.max(burst_s).max(0.0)
    }

    #[inline]
    pub(super) fn exceeds(&mut self, after_s: f64, units: f64, wait_s: f64) -> bool {
        exceeds(self.wait_s(after_s, units), 0.0, wait_s)
    }

    /// Level that a request meets, relative to the level at which it waits too long, of the fuller
    /// of the two buckets; and true if it does wait too long.
    #[inline]
    pub(super) fn fills(&mut self, after_s: f64, units: f64, wait_s: f64) -> (f64, bool) {
        let found_s = self.level.arrive(after_s, units);
        let (mut fills, mut over) = (found_s / (self.size_s + wait_s), exceeds(found_s, self.size_s, wait_s));
        if let Some(burst) = &mut self.burst {
            let found_s = burst.arrive(after_s, units);
            fills = fills.max(found_s / (NO_BURST_S + wait_s));
            over |= exceeds(found_s, NO_BURST_S, wait_s);
        }
        (fills, over)
    }
}

/// Number of requests that wait longer than `wait_s` at a limit.
pub(super) fn late_requests(
    demand: impl Iterator<Item = (u64, f64)>,
    unit: ReservationUnit,
    limit: RateLimit,
    factor: f64,
    wait_s: f64,
) -> u64 {
    let (mut buckets, mut before) = (LimitBuckets::scaled(limit, unit, factor), 0);
    let mut over = 0;
    for (at_ns, units) in demand {
        over += u64::from(buckets.exceeds((at_ns - before) as f64 / 1e9, units, wait_s));
        before = at_ns;
    }
    over
}
