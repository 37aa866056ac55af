//! A leaky bucket: how much has passed, and how long the next must wait; and the six of a node.
//!
//! The level rises by what is admitted and leaks at the configured rate. Callers pass the time.
//!
//! ```text
//!      add(units)             burst_rate · length ─┬─ more than full: wait
//!          │                  (rate / 10 if none)  │
//!          ▼                                       │
//!     ▕▔▔▔▔▔▔▔▏                           level ───┤
//!     ▕ level ▏──► leaks at `rate`              0 ─┴─
//! ```
//!
//! With a length above 1 the same units also enter a second bucket, which leaks at `burst_rate` and
//! holds `burst_rate / 10`. It spreads the burst over its length.
//!
//! Levels are whole billionths of a unit, so a leak is exact to the nanosecond.
//!
//! Read-ahead has its own levels on top, which guests never wait for (`bucket/spare.rs`).
//!
//! Never refuses: a request larger than the bucket is added whole, and the requests after it pay
//! for it.
//!
//! Another limit takes over what passed under the one before, so that nobody gains by changing it.
//! What a smaller bucket cannot hold is deferred, and nobody waits for it:
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
//! Both together leak at the rates in force and rise by what passes. Requests pass only below the
//! ceiling, which is never above the largest size that there was. Hence the promise: over any
//! window no more passes than the rates in force allowed, one burst (the largest in force), and
//! the one request that makes a bucket run over. The wait after a change is at most what that
//! request costs under the new rate, however long the burst before was.

use super::cost::Cost;
use super::enforcement::Scale;
use super::limits::{Limit, LimitKind, Limits};
use super::price::{WHOLE, divide, part_of};
use super::stats::Level;
use crate::request::Direction;
use crate::time::Instant;
use core::ops::Range;

mod brought;
mod filled;
mod part;
mod spare;

pub use filled::{Contents, Filled};

use spare::Spare;

/// Billionths in a unit.
const UNIT: u128 = 1_000_000_000;

/// One bucket, or the two that a burst longer than a second needs. Rate 0 lets everything pass.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Billionths per nanosecond (which is units per second).
    rate: u64,
    size: u128,
    level: u128,
    /// What passed under other limits and found no room here.
    deferred: u128,
    /// 0 if the burst has no rate of its own to keep.
    burst_rate: u64,
    burst_size: u128,
    burst_level: u128,
    burst_deferred: u128,
}

impl Bucket {
    fn new(limit: Limit) -> Self {
        Self::scaled(limit, Scale::ONE)
    }

    /// An empty bucket whose rates and sizes are so many times those of the limit.
    fn scaled(limit: Limit, scale: Scale) -> Self {
        let Limit { rate, burst_rate, burst_length_s } = limit;
        let size = if burst_rate == 0 {
            tenth_of_a_second(rate)
        } else {
            u128::from(burst_rate) * u128::from(burst_length_s) * UNIT
        };
        let burst_rate = if burst_length_s > 1 { burst_rate } else { 0 };
        // At most 10¹⁵ × 10³.
        let times = |rate: u64| scale.times(u128::from(rate)) as u64;
        Self {
            rate: times(rate),
            size: scale.times(size),
            level: 0,
            deferred: 0,
            burst_rate: times(burst_rate),
            burst_size: scale.times(tenth_of_a_second(burst_rate)),
            burst_level: 0,
            burst_deferred: 0,
        }
    }

    /// Puts another limit in force, which takes over what has passed.
    ///
    /// A limit that is taken away keeps its levels as they are. They do not leak meanwhile: what
    /// passes then is charged to other limits, and must not be free here as well.
    fn change(&mut self, limit: Limit, scale: Scale, rest: Rest) {
        let mut new = Self::scaled(limit, scale);
        if new.rate == 0 {
            (self.rate, self.burst_rate) = (0, 0);
            return;
        }
        (new.level, new.deferred) = take_over(self.size, self.level, self.deferred, new.size, rest);
        if new.burst_rate == 0 {
            new.burst_size = self.burst_size;
            (new.burst_level, new.burst_deferred) = (self.burst_level, self.burst_deferred);
        } else {
            (new.burst_level, new.burst_deferred) =
                take_over(self.burst_size, self.burst_level, self.burst_deferred, new.burst_size, rest);
        }
        *self = new;
    }

    /// Leaks as another limit would, which does not hold.
    const fn run_at(&mut self, limit: Limit) {
        let is_long = limit.rate > 0 && limit.burst_length_s > 1;
        (self.rate, self.burst_rate) = (limit.rate, if is_long { limit.burst_rate } else { 0 });
    }

    /// What may be added, in billionths of a unit, before the bucket is more than full.
    fn room(&self) -> u128 {
        let main = self.size.saturating_sub(self.level);
        if self.burst_rate == 0 { main } else { main.min(self.burst_size.saturating_sub(self.burst_level)) }
    }

    fn leak(&mut self, elapsed_ns: u64) {
        // At most 10¹⁸ × 2⁶⁴ < 2¹²⁴.
        let leaked = |rate: u64| u128::from(rate) * u128::from(elapsed_ns);
        run_out(&mut self.level, &mut self.deferred, leaked(self.rate));
        if self.burst_rate > 0 {
            run_out(&mut self.burst_level, &mut self.burst_deferred, leaked(self.burst_rate));
        }
    }

    /// Nanoseconds until a request may pass, exactly; 0 if it may now.
    ///
    /// The slower level decides. (QEMU asks the second only once the first has run down.)
    fn wait_ns(&self) -> u64 {
        let main = wait_until_full(self.level, self.size, self.rate);
        main.max(wait_until_full(self.burst_level, self.burst_size, self.burst_rate))
    }

    fn add(&mut self, billionths: u128) {
        self.level = self.level.saturating_add(billionths);
        if self.burst_rate > 0 {
            self.burst_level = self.burst_level.saturating_add(billionths);
        }
    }
}

/// Lets `leaked` run out of a level, and what is more out of what is deferred.
fn run_out(level: &mut u128, deferred: &mut u128, leaked: u128) {
    if *deferred > 0 {
        *deferred = deferred.saturating_sub(leaked.saturating_sub(*level));
    }
    *level = level.saturating_sub(leaked);
}

/// What becomes of what a smaller bucket cannot hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rest {
    Deferred,
    WaitedFor,
}

/// The level and what is deferred in a bucket of another size.
fn take_over(size: u128, level: u128, deferred: u128, new_size: u128, rest: Rest) -> (u128, u128) {
    let (ceiling, passed) = (size.saturating_add(deferred), level.saturating_add(deferred));
    let most = if rest == Rest::Deferred { passed } else { deferred };
    let deferred = ceiling.saturating_sub(new_size).min(most);
    (passed - deferred, deferred)
}

const fn tenth_of_a_second(rate: u64) -> u128 {
    rate as u128 * (UNIT / 10)
}

fn wait_until_full(level: u128, size: u128, rate: u64) -> u64 {
    // Not `level >= size`: a full bucket admits, so excess / rate is the whole wait.
    if rate == 0 || level <= size {
        return 0;
    }
    let excess = level - size;
    match u64::try_from(excess) {
        // Nearly always: the wide division takes a library call.
        Ok(excess) => excess.div_ceil(rate),
        Err(_) => u64::try_from(excess.div_ceil(u128::from(rate))).unwrap_or(u64::MAX),
    }
}

/// Those of the four limits for a direction that are set.
#[derive(Clone, Copy, Debug)]
struct Applying {
    kinds: [LimitKind; 4],
    count: usize,
}

impl Applying {
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
pub(super) struct Buckets {
    buckets: [Bucket; 6],
    applying: [Applying; 2],
    iops_size: u64,
    /// The smallest that there was; 0 if there was none.
    least_iops_size: u64,
    /// Levels are as of this instant.
    now: Instant,
    spare: Spare,
}

impl Buckets {
    /// For valid limits.
    pub(super) fn new(limits: &Limits, now: Instant) -> Self {
        Self {
            buckets: LimitKind::ALL.map(|kind| Bucket::new(limits.limit(kind))),
            applying: Direction::ALL.map(|direction| Applying::new(limits, direction)),
            iops_size: limits.iops_size,
            least_iops_size: limits.iops_size,
            now,
            spare: Spare::default(),
        }
    }

    /// Brings all levels to `now`. An instant before the last changes nothing.
    pub(super) fn leak_to(&mut self, now: Instant) {
        let elapsed_ns = now.nanos_since(self.now);
        if elapsed_ns == 0 {
            return;
        }
        self.now = now;
        if self.spare.in_use {
            self.leak_spare(elapsed_ns);
        }
        for bucket in &mut self.buckets {
            if bucket.rate > 0 {
                bucket.leak(elapsed_ns);
            }
        }
    }

    /// Nanoseconds until a request may pass, and the limit it waits for longest.
    pub(super) fn binding(&self, direction: Direction) -> Option<(u64, LimitKind)> {
        let mut longest = None;
        for (kind, bucket) in self.applying(direction) {
            let wait_ns = bucket.wait_ns();
            if wait_ns > longest.map_or(0, |(longest_ns, _)| longest_ns) {
                longest = Some((wait_ns, kind));
            }
        }
        longest
    }

    /// The same limits, so many times as fast and as large. A watermark narrows them when others
    /// want the device: what passed while they were wide is waited for.
    pub(super) fn rescale(&mut self, limits: &Limits, scale: Scale) {
        for kind in LimitKind::ALL {
            self.buckets[kind.index()].change(limits.limit(kind), scale, Rest::WaitedFor);
        }
    }

    /// Puts other limits in force, which must be valid. They take over what has passed until now,
    /// at which instant the buckets must be.
    pub(super) fn change(&mut self, limits: &Limits, scale: Scale) {
        for kind in LimitKind::ALL {
            self.buckets[kind.index()].change(limits.limit(kind), scale, Rest::Deferred);
        }
        self.apply(limits);
    }

    /// Has what has passed run out as these limits, which must be valid, would have it. They are
    /// lifted: until they hold, by [`Buckets::change`], nobody waits, and the sizes are those that
    /// held last.
    pub(super) fn run_at(&mut self, limits: &Limits) {
        for kind in LimitKind::ALL {
            self.buckets[kind.index()].run_at(limits.limit(kind));
        }
        self.apply(limits);
    }

    fn apply(&mut self, limits: &Limits) {
        self.applying = Direction::ALL.map(|direction| Applying::new(limits, direction));
        self.iops_size = limits.iops_size;
        if limits.iops_size > 0 && (self.least_iops_size == 0 || limits.iops_size < self.least_iops_size) {
            self.least_iops_size = limits.iops_size;
        }
        self.forget_spare_of_no_limit();
    }

    fn applying(&self, direction: Direction) -> impl Iterator<Item = (LimitKind, &Bucket)> {
        let kinds = self.applying[direction.index()].kinds().iter();
        kinds.map(|kind| (*kind, &self.buckets[kind.index()]))
    }

    /// Operations a request counts as here, in billionths.
    pub(super) fn operations(&self, cost: &Cost) -> u64 {
        if self.iops_size == 0 {
            return cost.requests().saturating_mul(UNIT as u64);
        }
        u64::try_from(cost.operations(self.iops_size)).unwrap_or(u64::MAX)
    }

    /// How long the scarcest limit takes for a request; 0 without limits. See [`divide`].
    pub(super) fn price_ns(&self, direction: Direction, cost: &Cost) -> u64 {
        let prices =
            self.applying(direction).map(|(kind, bucket)| divide(self.units(kind, cost), bucket.rate));
        prices.fold(0, u64::max)
    }

    /// How long the scarcest limit on operations takes for one; 0 without such a limit.
    pub(super) fn operation_ns(&self, direction: Direction) -> u64 {
        let operations = self.applying(direction).filter(|(kind, _)| !kind.counts_bytes());
        operations.map(|(_, bucket)| divide(UNIT, bucket.rate)).fold(0, u64::max)
    }

    /// The fraction of a request, in parts of [`WHOLE`], that has room in all its buckets.
    pub(super) fn room(&self, direction: Direction, cost: &Cost) -> u32 {
        let mut least = WHOLE;
        for (kind, bucket) in self.applying(direction) {
            let units = self.units(kind, cost);
            let room = bucket.room();
            if room < units {
                // Below WHOLE, since room < units.
                least = least.min((room.saturating_mul(u128::from(WHOLE)) / units) as u32);
            }
        }
        least
    }

    pub(super) fn charge_part(&mut self, direction: Direction, cost: &Cost, part: &Range<u32>) {
        let applying = self.applying[direction.index()];
        for kind in applying.kinds() {
            let units = part_of(self.units(*kind, cost), part);
            self.buckets[kind.index()].add(units);
        }
    }

    /// Whole units that may pass at once before requests wait; `None` if the limit is not set.
    pub(super) fn tokens(&self, kind: LimitKind) -> Option<u64> {
        let bucket = &self.buckets[kind.index()];
        (bucket.rate > 0).then(|| u64::try_from(bucket.room() / UNIT).unwrap_or(u64::MAX))
    }

    /// Whole units until the bucket is full, whatever the rate of a burst; `None` if not set.
    pub(super) fn remaining(&self, kind: LimitKind) -> Option<u64> {
        let bucket = &self.buckets[kind.index()];
        let remaining = bucket.size.saturating_sub(bucket.level) / UNIT;
        (bucket.rate > 0).then(|| u64::try_from(remaining).unwrap_or(u64::MAX))
    }

    /// What has passed and not run out yet, in whole units, what is deferred included.
    pub(super) fn level(&self, kind: LimitKind) -> u64 {
        let bucket = &self.buckets[kind.index()];
        u64::try_from(bucket.level.saturating_add(bucket.deferred) / UNIT).unwrap_or(u64::MAX)
    }

    /// The level with the bucket's capacity and the time it takes to run out; `None` if the limit
    /// is not set.
    pub(super) fn level_now(&self, kind: LimitKind) -> Option<Level> {
        let bucket = &self.buckets[kind.index()];
        let rate = u128::from(bucket.rate);
        let empty_in_ns = bucket.level.saturating_add(bucket.deferred).checked_div(rate)?;
        let empty_in_ns = u64::try_from(empty_in_ns).unwrap_or(u64::MAX);
        // Rounded up, because a limit of 5 has a bucket of half an operation.
        let capacity = u64::try_from(bucket.size.div_ceil(UNIT)).unwrap_or(u64::MAX);
        Some(Level { units: self.level(kind), capacity, empty_in_ns })
    }

    /// Fills this limit's bucket with so many units, if it is set; what is more than full is
    /// deferred.
    pub(super) fn fill(&mut self, kind: LimitKind, units: u64) {
        let bucket = &mut self.buckets[kind.index()];
        if bucket.rate > 0 {
            let passed = u128::from(units) * UNIT;
            bucket.level = passed.min(bucket.size);
            bucket.deferred = passed - bucket.level;
        }
    }

    /// In billionths of the limit's unit.
    fn units(&self, kind: LimitKind, cost: &Cost) -> u128 {
        if kind.counts_bytes() { u128::from(cost.bytes()) * UNIT } else { cost.operations(self.iops_size) }
    }
}

#[cfg(test)]
mod tests;
