//! A leaky bucket: how much of one kind of work has passed, and how long the next must wait; and the six of a group.
//!
//! The level rises by what is admitted and leaks at the configured rate. Nothing here knows the time: callers pass
//! the instant, so the daemon, the simulator and the tests run the same arithmetic.
//!
//! ```text
//!      add(units)             burst_rate · length ─┬─ more than full: wait
//!          │                  (rate / 10 if none)  │
//!          ▼                                       │
//!     ▕▔▔▔▔▔▔▔▏                           level ───┤
//!     ▕ level ▏──► leaks at `rate`              0 ─┴─
//!
//!     With a length above 1 the same units also go into a second one, which leaks at `burst_rate` and holds
//!     `burst_rate / 10`: it spreads the burst over its length.
//! ```
//!
//! Levels are whole billionths of a unit. A rate in units per second is then a leak in billionths per nanosecond,
//! without a remainder: no rounding, no drift, and a wait that is right to the nanosecond.
//!
//! Never refuses: a request larger than the bucket is added whole and paid for by those after it.

use super::cost::Cost;
use super::limits::{Limit, LimitKind, Limits};
use crate::request::Direction;
use crate::time::{Duration, Instant};

/// Billionths in a unit.
const UNIT: u128 = 1_000_000_000;

/// One bucket, or the two that a burst longer than a second needs. Rate 0 lets everything pass and keeps no level.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Billionths per nanosecond (which is units per second).
    rate: u64,
    /// The level up to which requests pass.
    size: u128,
    level: u128,
    /// 0 if the burst has no rate of its own to keep.
    burst_rate: u64,
    burst_size: u128,
    burst_level: u128,
}

impl Bucket {
    fn new(limit: Limit) -> Self {
        let Limit { rate, burst_rate, burst_length_s } = limit;
        let size = if burst_rate == 0 {
            tenth_of_a_second(rate)
        } else {
            u128::from(burst_rate) * u128::from(burst_length_s) * UNIT
        };
        let burst_rate = if burst_length_s > 1 { burst_rate } else { 0 };
        let burst_size = tenth_of_a_second(burst_rate);
        Self { rate, size, level: 0, burst_rate, burst_size, burst_level: 0 }
    }

    /// Lets `elapsed_ns` worth run out.
    fn leak(&mut self, elapsed_ns: u64) {
        // At most 10¹⁵ × 2⁶⁴ < 2¹¹⁴.
        let leaked = |rate: u64| u128::from(rate) * u128::from(elapsed_ns);
        self.level = self.level.saturating_sub(leaked(self.rate));
        if self.burst_rate > 0 {
            self.burst_level = self.burst_level.saturating_sub(leaked(self.burst_rate));
        }
    }

    /// Nanoseconds until a request may pass; 0 if it may now.
    ///
    /// After exactly that time, and not a nanosecond before, the answer is 0. Where both levels are too high the
    /// slower decides. (QEMU asks the second only once the first has run down, and then waits again.)
    fn wait_ns(&self) -> u64 {
        let main = wait_until_full(self.level, self.size, self.rate);
        main.max(wait_until_full(self.burst_level, self.burst_size, self.burst_rate))
    }

    /// Pours in what was admitted, in billionths of a unit.
    fn add(&mut self, billionths: u128) {
        self.level = self.level.saturating_add(billionths);
        if self.burst_rate > 0 {
            self.burst_level = self.burst_level.saturating_add(billionths);
        }
    }
}

const fn tenth_of_a_second(rate: u64) -> u128 {
    rate as u128 * (UNIT / 10)
}

fn wait_until_full(level: u128, size: u128, rate: u64) -> u64 {
    // Not `level >= size`: a bucket that is exactly full admits, which is what makes excess / rate the whole wait.
    if rate == 0 || level <= size {
        return 0;
    }
    u64::try_from((level - size).div_ceil(u128::from(rate))).unwrap_or(u64::MAX)
}

/// The six buckets of a group, at one instant.
#[derive(Clone, Debug)]
pub(super) struct Buckets {
    buckets: [Bucket; 6],
    iops_size: u64,
    unlimited: bool,
    /// Levels are as of this instant.
    now: Instant,
}

impl Buckets {
    /// Empty buckets for these limits, which must be valid.
    pub(super) fn new(limits: &Limits, now: Instant) -> Self {
        Self {
            buckets: LimitKind::ALL.map(|kind| Bucket::new(limits.limit(kind))),
            iops_size: limits.iops_size,
            unlimited: limits.is_unlimited(),
            now,
        }
    }

    /// The instant of the levels: the latest ever passed to [`Buckets::leak_to`].
    pub(super) const fn now(&self) -> Instant {
        self.now
    }

    /// Brings all levels to `now`. An instant before the last changes nothing: two workers read the clock before
    /// they take turns here, and what has leaked does not come back.
    pub(super) fn leak_to(&mut self, now: Instant) {
        let elapsed_ns = now.nanos_since(self.now);
        if elapsed_ns == 0 {
            return;
        }
        self.now = now;
        if self.unlimited {
            return;
        }
        for bucket in &mut self.buckets {
            if bucket.rate > 0 {
                bucket.leak(elapsed_ns);
            }
        }
    }

    /// Time until a request of this direction may pass; zero if it may now. The slowest of its four buckets decides.
    pub(super) fn wait(&self, direction: Direction) -> Duration {
        if self.unlimited {
            return Duration::ZERO;
        }
        let waits = LimitKind::applying_to(direction).map(|kind| self.buckets[kind.index()].wait_ns());
        Duration::from_nanos(waits.into_iter().fold(0, u64::max))
    }

    /// Whether a limit is set that both directions draw from.
    pub(super) const fn directions_share(&self) -> bool {
        self.buckets[LimitKind::BpsTotal.index()].rate > 0
            || self.buckets[LimitKind::IopsTotal.index()].rate > 0
    }

    /// Charges an admitted request to its four buckets.
    pub(super) fn charge(&mut self, direction: Direction, cost: &Cost) {
        if self.unlimited {
            return;
        }
        for kind in LimitKind::applying_to(direction) {
            let bucket = &mut self.buckets[kind.index()];
            if bucket.rate > 0 {
                bucket.add(if kind.counts_bytes() {
                    u128::from(cost.bytes()) * UNIT
                } else {
                    cost.operations(self.iops_size)
                });
            }
        }
    }
}

#[cfg(test)]
mod tests;
