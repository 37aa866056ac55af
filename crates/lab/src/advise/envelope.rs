//! How long each request would wait for a bucket, computed from arrivals alone.
//!
//! A request that finds the level L of a bucket of size B waits (L - B) / r: while somebody waits
//! the bucket does not run empty, so what it holds does not depend on who was let pass when. So one
//! pass with an endless bucket (Lindley's recursion, 1952) tells the waits for every size of it:
//!
//! ```text
//!   D = time in which the level runs out at the rate: rises by units / rate, falls with time, not below 0
//!   wait = D - B / rate
//! ```
//!
//! A request worth more than [`SLICE_S`] of the rate passes with its last slice (`policy`'s
//! `throttle/price.rs`), so all before that counts with the level; where slices are larger because
//! there is room, it passes up to one slice sooner than is computed. Two buckets that count the
//! same units hold a request as long as the slower of them does by itself; buckets of operations
//! and of bytes together may hold it longer, and reads that pass writes may be held otherwise one
//! by one, not as a whole. A simulation has the last word.
//!
//! Times are floating-point seconds: exact to nanoseconds for levels of hours.

use policy::throttle::{Limit, Unit};
use recording::Op;

use super::arrivals::Arrival;

/// As in `policy`'s `throttle/price.rs`.
const SLICE_S: f64 = 0.09;
/// A bucket without a burst has so much of its rate.
pub(super) const NO_BURST_S: f64 = 0.1;

/// Of a histogram: an eighth of a microsecond and less is nothing, and each doubling has so many
/// steps.
const STEP_BITS: u32 = 6;
const FIRST: u64 = (1.25e-7_f64).to_bits() >> (52 - STEP_BITS);
const STEPS: usize = 60 << STEP_BITS;

/// When requests come, and how many units each takes of a limit.
pub(super) fn demand(
    arrivals: impl Iterator<Item = Arrival>,
    unit: Unit,
) -> impl Iterator<Item = (u64, f64)> {
    let moving = arrivals.filter(|arrival| arrival.op != Op::Flush);
    moving.map(move |Arrival { at_ns, length, .. }| {
        (at_ns, if unit == Unit::Iops { 1.0 } else { length as f64 })
    })
}

/// An endless bucket.
#[derive(Clone, Copy, Debug)]
struct Level {
    rate: f64,
    /// Seconds in which what has come runs out.
    out_s: f64,
    slice: f64,
}

impl Level {
    fn new(rate: f64, unit: Unit) -> Self {
        let slice = SLICE_S * rate;
        Self { rate, out_s: 0.0, slice: if unit == Unit::Iops { slice.max(1.0) } else { slice } }
    }

    /// What a request that comes so long after the one before waits for, in seconds of the rate.
    #[inline(always)]
    fn meet(&mut self, after_s: f64, units: f64) -> f64 {
        let level_s = (self.out_s - after_s).max(0.0);
        self.out_s = level_s + units / self.rate;
        if units <= self.slice { level_s } else { level_s + self.before_last(units) }
    }

    #[cold]
    fn before_last(&self, units: f64) -> f64 {
        ((units / self.slice).ceil() - 1.0) * self.slice / self.rate
    }
}

/// What requests found at one rate.
#[derive(Clone, Debug)]
pub(super) struct Lane {
    level: Level,
    counts: Vec<u32>,
    /// Of a bucket without burst, those that waited too long.
    pub(super) over: u64,
}

impl Lane {
    pub(super) const fn rate(&self) -> f64 {
        self.level.rate
    }

    /// The least size of a bucket, in seconds of the rate, with which no more than so many requests
    /// wait longer than that; within a step of the histogram, above.
    pub(super) fn size_s(&self, allowed: u64, wait_s: f64) -> f64 {
        let mut above = 0;
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

/// One pass for many rates.
pub(super) fn measure(
    demand: impl Iterator<Item = (u64, f64)>,
    unit: Unit,
    rates: &[f64],
    wait_s: f64,
) -> Vec<Lane> {
    let lane = |&rate: &f64| Lane { level: Level::new(rate, unit), counts: vec![0; STEPS], over: 0 };
    let mut lanes: Vec<Lane> = rates.iter().map(lane).collect();
    let mut before = 0;
    for (at_ns, units) in demand {
        let after_s = (at_ns - before) as f64 / 1e9;
        before = at_ns;
        for lane in &mut lanes {
            let found_s = lane.level.meet(after_s, units);
            lane.over += u64::from(exceeds(found_s, NO_BURST_S, wait_s));
            let step = (found_s.to_bits() >> (52 - STEP_BITS)).wrapping_sub(FIRST);
            // Below the first, 0 included, it has wrapped around, and is nothing.
            if let Some(count) = lane.counts.get_mut(step as usize) {
                *count = count.saturating_add(1);
            }
        }
    }
    lanes
}

/// Whether a wait is longer, beyond what floating point makes of it.
#[inline(always)]
fn exceeds(found_s: f64, size_s: f64, wait_s: f64) -> bool {
    found_s - size_s > wait_s + 1e-9
}

/// The bucket of a limit, or the two of a burst longer than a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buckets {
    level: Level,
    size_s: f64,
    burst: Option<Level>,
}

impl Buckets {
    #[cfg(test)]
    pub(super) fn new(limit: Limit, unit: Unit) -> Self {
        Self::scaled(limit, unit, 1.0)
    }

    /// As if the rates were so many times what they are, with bursts of the same length.
    pub(super) fn scaled(limit: Limit, unit: Unit, times: f64) -> Self {
        let Limit { rate, burst_rate, burst_length_s } = limit;
        let size_s = match burst_rate {
            0 => NO_BURST_S,
            _ => burst_rate as f64 * burst_length_s as f64 / rate as f64,
        };
        let level = Level::new(rate as f64 * times, unit);
        // A slice is one of the rate, whatever it is charged to.
        let burst = Level { rate: burst_rate as f64 * times, ..level };
        Self { level, size_s, burst: (burst_rate > 0 && burst_length_s > 1).then_some(burst) }
    }

    /// How long a request waits that comes so long after the one before.
    #[inline]
    pub(super) fn wait_s(&mut self, after_s: f64, units: f64) -> f64 {
        let wait_s = self.level.meet(after_s, units) - self.size_s;
        let burst_s = self.burst.as_mut().map_or(0.0, |burst| burst.meet(after_s, units) - NO_BURST_S);
        wait_s.max(burst_s).max(0.0)
    }

    #[inline]
    pub(super) fn exceeds(&mut self, after_s: f64, units: f64, wait_s: f64) -> bool {
        exceeds(self.wait_s(after_s, units), 0.0, wait_s)
    }

    /// Which part a request meets of what the bucket may hold before it waits too long, of the
    /// fuller of two; and whether it does.
    #[inline]
    pub(super) fn fills(&mut self, after_s: f64, units: f64, wait_s: f64) -> (f64, bool) {
        let found_s = self.level.meet(after_s, units);
        let (mut fills, mut over) = (found_s / (self.size_s + wait_s), exceeds(found_s, self.size_s, wait_s));
        if let Some(burst) = &mut self.burst {
            let found_s = burst.meet(after_s, units);
            fills = fills.max(found_s / (NO_BURST_S + wait_s));
            over |= exceeds(found_s, NO_BURST_S, wait_s);
        }
        (fills, over)
    }
}

/// How many requests wait longer than that for a limit.
pub(super) fn over(
    demand: impl Iterator<Item = (u64, f64)>,
    unit: Unit,
    limit: Limit,
    times: f64,
    wait_s: f64,
) -> u64 {
    let (mut buckets, mut before) = (Buckets::scaled(limit, unit, times), 0);
    let mut over = 0;
    for (at_ns, units) in demand {
        over += u64::from(buckets.exceeds((at_ns - before) as f64 / 1e9, units, wait_s));
        before = at_ns;
    }
    over
}
