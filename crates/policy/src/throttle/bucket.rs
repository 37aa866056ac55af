//! A leaky bucket: measures admitted work and computes waits; and the six buckets of a node.
//!
//! The level rises by admitted work and leaks at the configured rate. Time is an argument.
//!
//! ```text
//!      add(units)                       capacity ──┬─ above: wait
//!          │                  (see burst.rs)       │
//!          ▼                                       │
//!     ▕▔▔▔▔▔▔▔▏                           level ───┤
//!     ▕ level ▏──► leaks at `rate`              0 ─┴─
//! ```
//!
//! With a length above 1, or with `burst-for`, the units also enter a second bucket, which leaks at
//! `burst_rate` and holds `burst_rate / 10`. It limits the rate within the burst.
//!
//! Levels are whole billionths of a unit, so a leak is exact to the nanosecond.
//!
//! Read-ahead has its own levels on top, which guests never wait for (`bucket/spare.rs`). Observers
//! see the free part as the balance of a burst (`bucket/balance.rs`).
//!
//! Never rejects: a request larger than the bucket is added whole, and later requests wait for it.
//!
//! A new limit takes over the level of the old one, so that changing a limit yields no extra burst.
//! Work that a smaller bucket cannot hold is deferred, and no request waits for it:
//!
//! ```text
//!     ▕       ▏
//!     ▕       ▏ ─┬─ size of the larger bucket = ceiling
//!     ▕▓level▓▏  │                       ▕▓level▓▏ ─── size of the smaller bucket: full, not more
//!     ▕▓▓▓▓▓▓▓▏  │   a smaller limit     ▕▒▒▒▒▒▒▒▏
//!     ▕▓▓▓▓▓▓▓▏  │   ──────────────►     ▕▒▒▒▒▒▒▒▏ deferred: leaks once the level is 0,
//!     ▕▓▓▓▓▓▓▓▏  │   ◄──────────────     ▕▒▒▒▒▒▒▒▏           counts again in a larger bucket
//! ```
//!
//! Level plus deferred work leaks at the rates in force and rises by admitted work. Requests are
//! admitted only below the ceiling, which never exceeds the largest size so far. This gives the
//! guarantee: over any window, admitted work is at most the leak of the rates in force, plus one
//! burst (the largest in force), plus the one request that overruns the bucket. The wait after a
//! change is at most the cost of that request under the new rate, however long the previous burst
//! was.

use super::burst::{LEVEL_SCALE, tenth_of_a_second};
use super::cost::RequestCost;
use super::enforcement::LimitScale;
use super::limits::{LimitKind, Limits, RateLimit};
use super::slicing::{WHOLE_REQUEST, proportional_part, time_for};
use crate::request::Direction;
use crate::time::Instant;
use core::ops::Range;

mod balance;
mod carried;
mod quota;
mod snapshot;
mod spare;

pub use snapshot::{BucketContents, BucketSnapshot};

use balance::LevelTrend;
use spare::SpareLevels;

/// One bucket, or two if the burst is longer than a second. With rate 0 there is no limit.
#[derive(Clone, Copy, Debug)]
struct LeakyBucket {
    /// Billionths per nanosecond, which equals units per second.
    rate: u64,
    size: u128,
    level: u128,
    /// Work admitted under other limits that exceeds this bucket.
    deferred: u128,
    /// 0 unless the burst is longer than a second.
    burst_rate: u64,
    burst_size: u128,
    burst_level: u128,
    burst_deferred: u128,
}

impl LeakyBucket {
    fn new(limit: RateLimit) -> Self {
        Self::scaled(limit, LimitScale::ONE)
    }

    /// An empty bucket with the limit's rates and sizes multiplied by `scale`.
    fn scaled(limit: RateLimit, scale: LimitScale) -> Self {
        let burst_rate = if limit.has_burst_rate_bucket() { limit.burst_rate } else { 0 };
        // At most 10¹⁵ × 10³.
        let times = |rate: u64| scale.times(u128::from(rate)) as u64;
        Self {
            rate: times(limit.rate),
            size: scale.times(limit.capacity_billionths()),
            level: 0,
            deferred: 0,
            burst_rate: times(burst_rate),
            burst_size: scale.times(tenth_of_a_second(burst_rate)),
            burst_level: 0,
            burst_deferred: 0,
        }
    }

    /// Changes the limit and keeps the admitted work.
    ///
    /// A limit that is removed keeps its levels unchanged. They do not leak meanwhile: work is then
    /// charged to other limits, and must not reduce the level here as well.
    fn change(&mut self, limit: RateLimit, scale: LimitScale, excess_treatment: ExcessTreatment) {
        let mut new = Self::scaled(limit, scale);
        if new.rate == 0 {
            (self.rate, self.burst_rate) = (0, 0);
            return;
        }
        (new.level, new.deferred) =
            carry_level(self.size, self.level, self.deferred, new.size, excess_treatment);
        if new.burst_rate == 0 {
            new.burst_size = self.burst_size;
            (new.burst_level, new.burst_deferred) = (self.burst_level, self.burst_deferred);
        } else {
            (new.burst_level, new.burst_deferred) = carry_level(
                self.burst_size,
                self.burst_level,
                self.burst_deferred,
                new.burst_size,
                excess_treatment,
            );
        }
        *self = new;
    }

    /// Leaks at the rates of a limit that is not enforced.
    const fn run_at(&mut self, limit: RateLimit) {
        let has_burst_rate = limit.rate > 0 && limit.has_burst_rate_bucket();
        (self.rate, self.burst_rate) = (limit.rate, if has_burst_rate { limit.burst_rate } else { 0 });
    }

    /// Capacity, in billionths of a unit, until the bucket is full.
    fn room(&self) -> u128 {
        let main = self.size.saturating_sub(self.level);
        if self.burst_rate == 0 { main } else { main.min(self.burst_size.saturating_sub(self.burst_level)) }
    }

    fn leak(&mut self, elapsed_ns: u64) {
        // At most 10¹⁸ × 2⁶⁴ < 2¹²⁴.
        let leaked = |rate: u64| u128::from(rate) * u128::from(elapsed_ns);
        drain(&mut self.level, &mut self.deferred, leaked(self.rate));
        if self.burst_rate > 0 {
            drain(&mut self.burst_level, &mut self.burst_deferred, leaked(self.burst_rate));
        }
    }

    /// Exact time in nanoseconds until a request may be admitted; 0 if it may be now.
    ///
    /// The longer wait of the two levels applies. (QEMU checks the second level only once the first
    /// has leaked.)
    fn wait_ns(&self) -> u64 {
        let main = wait_until_not_overfull(self.level, self.size, self.rate);
        main.max(wait_until_not_overfull(self.burst_level, self.burst_size, self.burst_rate))
    }

    fn add(&mut self, billionths: u128) {
        self.level = self.level.saturating_add(billionths);
        if self.burst_rate > 0 {
            self.burst_level = self.burst_level.saturating_add(billionths);
        }
    }
}

/// Reduces a level by `leaked`, and deferred work by the remainder.
fn drain(level: &mut u128, deferred: &mut u128, leaked: u128) {
    if *deferred > 0 {
        *deferred = deferred.saturating_sub(leaked.saturating_sub(*level));
    }
    *level = level.saturating_sub(leaked);
}

/// Treatment of work that a smaller bucket cannot hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ExcessTreatment {
    Deferred,
    Charged,
}

/// Level and deferred work after a change of the bucket's size.
fn carry_level(
    size: u128,
    level: u128,
    deferred: u128,
    new_size: u128,
    excess_treatment: ExcessTreatment,
) -> (u128, u128) {
    let (ceiling, passed) = (size.saturating_add(deferred), level.saturating_add(deferred));
    let max_deferred = if excess_treatment == ExcessTreatment::Deferred { passed } else { deferred };
    let deferred = ceiling.saturating_sub(new_size).min(max_deferred);
    (passed - deferred, deferred)
}

fn wait_until_not_overfull(level: u128, size: u128, rate: u64) -> u64 {
    // Not `level >= size`: a full bucket admits, so excess / rate is the whole wait.
    if rate == 0 || level <= size {
        return 0;
    }
    let excess = level - size;
    match u64::try_from(excess) {
        // The common case. A 128-bit division is a library call.
        Ok(excess) => excess.div_ceil(rate),
        Err(_) => u64::try_from(excess.div_ceil(u128::from(rate))).unwrap_or(u64::MAX),
    }
}

/// The limits that are set, of the four that apply to a direction.
#[derive(Clone, Copy, Debug)]
struct ApplyingLimits {
    kinds: [LimitKind; 4],
    count: usize,
}

impl ApplyingLimits {
    fn new(limits: &Limits, direction: Direction) -> Self {
        let mut set = Self { kinds: LimitKind::applying_to(direction), count: 0 };
        for kind in LimitKind::applying_to(direction) {
            if limits.limit(kind).rate > 0 {
                set.kinds[set.count] = kind;
                set.count += 1;
            }
        }
        set
    }

    fn kinds(&self) -> &[LimitKind] {
        &self.kinds[..self.count]
    }
}

#[derive(Clone, Debug)]
pub(super) struct NodeBuckets {
    buckets: [LeakyBucket; 6],
    applying: [ApplyingLimits; 2],
    iops_size: u64,
    /// The smallest `iops-size` so far; 0 if there was none.
    min_iops_size: u64,
    /// Instant of the levels.
    now: Instant,
    spare: SpareLevels,
    trend: LevelTrend,
}

impl NodeBuckets {
    /// Empty buckets. The limits must be valid.
    pub(super) fn new(limits: &Limits, now: Instant) -> Self {
        Self {
            buckets: LimitKind::ALL.map(|kind| LeakyBucket::new(limits.limit(kind))),
            applying: Direction::ALL.map(|direction| ApplyingLimits::new(limits, direction)),
            iops_size: limits.iops_size,
            min_iops_size: limits.iops_size,
            now,
            spare: SpareLevels::default(),
            trend: LevelTrend::new(now),
        }
    }

    /// Advances all levels to `now`. An earlier instant changes nothing.
    pub(super) fn leak_to(&mut self, now: Instant) {
        let elapsed_ns = now.nanos_since(self.now);
        if elapsed_ns == 0 {
            return;
        }
        self.now = now;
        // Spare levels leak first: their leak is the part of the rate that the guests' levels do
        // not use, computed from those levels before they leak.
        if self.spare.in_use {
            self.leak_spare(elapsed_ns);
        }
        for bucket in &mut self.buckets {
            if bucket.rate > 0 {
                bucket.leak(elapsed_ns);
            }
        }
        self.mark_trend();
    }

    /// Nanoseconds until a request may be admitted and the limit with the longest wait; `None` if
    /// it may be now.
    pub(super) fn longest_wait(&self, direction: Direction) -> Option<(u64, LimitKind)> {
        let mut longest = None;
        for (kind, bucket) in self.applying(direction) {
            let wait_ns = bucket.wait_ns();
            if wait_ns > longest.map_or(0, |(longest_ns, _)| longest_ns) {
                longest = Some((wait_ns, kind));
            }
        }
        longest
    }

    /// Scales the limits. When a watermark lowers the scale because the device is busy, requests
    /// wait for the work admitted at the higher scale.
    pub(super) fn rescale(&mut self, limits: &Limits, scale: LimitScale) {
        for kind in LimitKind::ALL {
            self.buckets[kind.index()].change(limits.limit(kind), scale, ExcessTreatment::Charged);
        }
        self.restart_trend();
    }

    /// Changes the limits, which must be valid. The buckets must be at the current instant.
    pub(super) fn change(&mut self, limits: &Limits, scale: LimitScale) {
        for kind in LimitKind::ALL {
            self.buckets[kind.index()].change(limits.limit(kind), scale, ExcessTreatment::Deferred);
        }
        self.set_applying(limits);
    }

    /// Leaks at the rates of these limits, which must be valid and are not enforced. Until
    /// [`NodeBuckets::change`], no request waits, and the bucket sizes stay as they were.
    pub(super) fn run_at(&mut self, limits: &Limits) {
        for kind in LimitKind::ALL {
            self.buckets[kind.index()].run_at(limits.limit(kind));
        }
        self.set_applying(limits);
    }

    fn set_applying(&mut self, limits: &Limits) {
        self.restart_trend();
        self.applying = Direction::ALL.map(|direction| ApplyingLimits::new(limits, direction));
        self.iops_size = limits.iops_size;
        // For the upper bound on past operations (`carried.rs`): the smallest `iops-size` gives the
        // largest number.
        if limits.iops_size > 0 && (self.min_iops_size == 0 || limits.iops_size < self.min_iops_size) {
            self.min_iops_size = limits.iops_size;
        }
        self.drop_unlimited_spare();
    }

    fn applying(&self, direction: Direction) -> impl Iterator<Item = (LimitKind, &LeakyBucket)> {
        let kinds = self.applying[direction.index()].kinds().iter();
        kinds.map(|kind| (*kind, &self.buckets[kind.index()]))
    }

    /// Operations that a request counts as, in billionths.
    pub(super) fn operations(&self, cost: &RequestCost) -> u64 {
        if self.iops_size == 0 {
            return cost.requests().saturating_mul(LEVEL_SCALE as u64);
        }
        u64::try_from(cost.operations(self.iops_size)).unwrap_or(u64::MAX)
    }

    /// Time that a request needs of the scarcest limit; 0 without limits. See [`time_for`].
    pub(super) fn cost_ns(&self, direction: Direction, cost: &RequestCost) -> u64 {
        let prices =
            self.applying(direction).map(|(kind, bucket)| time_for(self.units(kind, cost), bucket.rate));
        prices.fold(0, u64::max)
    }

    /// Time that a single operation needs of the scarcest limit on operations; 0 without such a
    /// limit.
    pub(super) fn operation_ns(&self, direction: Direction) -> u64 {
        let operations = self.applying(direction).filter(|(kind, _)| !kind.counts_bytes());
        operations.map(|(_, bucket)| time_for(LEVEL_SCALE, bucket.rate)).fold(0, u64::max)
    }

    /// Fraction of a request, in parts of [`WHOLE_REQUEST`], that fits into all its buckets.
    pub(super) fn room(&self, direction: Direction, cost: &RequestCost) -> u32 {
        let mut min_room = WHOLE_REQUEST;
        for (kind, bucket) in self.applying(direction) {
            let units = self.units(kind, cost);
            let room = bucket.room();
            if room < units {
                // Below `WHOLE_REQUEST`, because room < units.
                min_room = min_room.min((room.saturating_mul(u128::from(WHOLE_REQUEST)) / units) as u32);
            }
        }
        min_room
    }

    pub(super) fn charge_part(&mut self, direction: Direction, cost: &RequestCost, part: &Range<u32>) {
        let applying = self.applying[direction.index()];
        for kind in applying.kinds() {
            let units = proportional_part(self.units(*kind, cost), part);
            self.buckets[kind.index()].add(units);
        }
    }

    /// Whole units that may be admitted at once before requests wait; `None` if the limit is not
    /// set.
    pub(super) fn admittable_units(&self, kind: LimitKind) -> Option<u64> {
        let bucket = &self.buckets[kind.index()];
        (bucket.rate > 0).then(|| u64::try_from(bucket.room() / LEVEL_SCALE).unwrap_or(u64::MAX))
    }

    /// Whole units until the main bucket is full, ignoring the burst rate; `None` if not set.
    pub(super) fn remaining(&self, kind: LimitKind) -> Option<u64> {
        let bucket = &self.buckets[kind.index()];
        let remaining = bucket.size.saturating_sub(bucket.level) / LEVEL_SCALE;
        (bucket.rate > 0).then(|| u64::try_from(remaining).unwrap_or(u64::MAX))
    }

    /// Admitted work that has not leaked, in whole units, including deferred work.
    pub(super) fn level(&self, kind: LimitKind) -> u64 {
        let bucket = &self.buckets[kind.index()];
        u64::try_from(bucket.level.saturating_add(bucket.deferred) / LEVEL_SCALE).unwrap_or(u64::MAX)
    }

    /// Sets the level of a limit's bucket, if it is set. Units above its size are deferred.
    pub(super) fn set_level(&mut self, kind: LimitKind, units: u64) {
        let bucket = &mut self.buckets[kind.index()];
        if bucket.rate > 0 {
            let passed = u128::from(units) * LEVEL_SCALE;
            bucket.level = passed.min(bucket.size);
            bucket.deferred = passed - bucket.level;
        }
        self.restart_trend();
    }

    /// Units of a request for this limit, in billionths.
    fn units(&self, kind: LimitKind, cost: &RequestCost) -> u128 {
        if kind.counts_bytes() {
            u128::from(cost.bytes()) * LEVEL_SCALE
        } else {
            cost.operations(self.iops_size)
        }
    }
}

#[cfg(test)]
mod tests;
