//! Read-ahead in the buckets: a second level in each, which guests never wait for.
//!
//! ```text
//!     read-ahead fits while both levels together do not exceed the size
//!
//!     ▕       ▏ ─┬─ size
//!     ▕ spare ▏  │          leaks with the remaining rate once the level below is empty
//!     ▕▓level▓▏ ─┴───────►  leaks first, at `rate`: admitted requests of guests
//! ```
//!
//! Both together behave like one ordinary leaky bucket, so read-ahead uses what guests leave. The
//! lower level equals that of a bucket without read-ahead and is never changed here.
//!
//! Never advances the guests' levels: read-ahead is recorded as of their last request, plus the
//! capacity that will have leaked unused until the read-ahead arrived.

use super::{LEVEL_SCALE, LeakyBucket, NodeBuckets};
use crate::request::Direction;
use crate::throttle::cost::RequestCost;
use crate::throttle::limits::LimitKind;
use crate::throttle::refund::SpareRefund;
use crate::time::Instant;

const WRITE_ONLY_KINDS: [LimitKind; 2] = [LimitKind::BpsWrite, LimitKind::IopsWrite];

#[derive(Clone, Debug, Default)]
pub(super) struct SpareLevels {
    /// True if any level is above 0. Without read-ahead, this check is its only cost for guests.
    pub(super) in_use: bool,
    levels: [SpareLevel; 6],
}

/// Read-ahead in one bucket, in billionths of a unit, as of the buckets' instant.
#[derive(Clone, Copy, Debug, Default)]
struct SpareLevel {
    main: u128,
    /// 0 unless the burst is longer than a second.
    burst: u128,
}

impl SpareLevel {
    const fn is_empty(self) -> bool {
        self.main == 0 && self.burst == 0
    }

    /// Leaks the part of `elapsed_ns` that guests leave. Must precede the leak of the bucket
    /// itself.
    fn leak(&mut self, bucket: &LeakyBucket, elapsed_ns: u64) {
        let remaining_leak = |rate: u64, level: u128| leak_in(rate, elapsed_ns).saturating_sub(level);
        self.main = self.main.saturating_sub(remaining_leak(bucket.rate, bucket.level));
        self.burst = self.burst.saturating_sub(remaining_leak(bucket.burst_rate, bucket.burst_level));
    }

    /// True if the bucket, including this level, does not exceed its size after `elapsed_ns`.
    fn fits(self, bucket: &LeakyBucket, elapsed_ns: u64) -> bool {
        let level = |spare: u128, level: u128, rate: u64| {
            level.saturating_add(spare).saturating_sub(leak_in(rate, elapsed_ns))
        };
        level(self.main, bucket.level, bucket.rate) <= bucket.size
            && (bucket.burst_rate == 0
                || level(self.burst, bucket.burst_level, bucket.burst_rate) <= bucket.burst_size)
    }

    /// Adds read-ahead that arrives `elapsed_ns` after the buckets' instant.
    fn add(&mut self, bucket: &LeakyBucket, billionths: u128, elapsed_ns: u64) {
        let add = |spare: u128, level: u128, rate: u64| {
            // While a bucket is empty, the capacity that it could leak is lost: it must not be
            // available to read-ahead that arrives later.
            let unused_leak = leak_in(rate, elapsed_ns).saturating_sub(level.saturating_add(spare));
            spare.saturating_add(unused_leak).saturating_add(billionths)
        };
        self.main = add(self.main, bucket.level, bucket.rate);
        if bucket.burst_rate > 0 {
            self.burst = add(self.burst, bucket.burst_level, bucket.burst_rate);
        }
    }

    fn refund(&mut self, billionths: u128) {
        self.main = self.main.saturating_sub(billionths);
        self.burst = self.burst.saturating_sub(billionths);
    }
}

/// Leak in `elapsed_ns`, in billionths of a unit. At most 10¹⁸ × 2⁶⁴ < 2¹²⁴.
const fn leak_in(rate: u64, elapsed_ns: u64) -> u128 {
    rate as u128 * elapsed_ns as u128
}

impl NodeBuckets {
    /// Must precede the leak of the guests' levels. Called only if there are spare levels.
    pub(super) fn leak_spare(&mut self, elapsed_ns: u64) {
        let Self { buckets, spare, .. } = self;
        spare.in_use = false;
        for (levels, bucket) in spare.levels.iter_mut().zip(buckets) {
            if !levels.is_empty() {
                levels.leak(bucket, elapsed_ns);
                spare.in_use |= !levels.is_empty();
            }
        }
    }

    /// Drops the read-ahead of limits that were removed, which would never leak.
    pub(super) fn drop_unlimited_spare(&mut self) {
        let Self { buckets, spare, .. } = self;
        for (levels, bucket) in spare.levels.iter_mut().zip(buckets) {
            levels.main = if bucket.rate > 0 { levels.main } else { 0 };
            levels.burst = if bucket.burst_rate > 0 { levels.burst } else { 0 };
        }
    }

    /// True if read-ahead may be charged: no bucket that applies to reads exceeds its size, spare
    /// level included.
    pub(in crate::throttle) fn has_spare(&self, now: Instant) -> bool {
        self.without_spare(now).is_none()
    }

    /// The first limit on reads whose bucket has no spare capacity.
    pub(in crate::throttle) fn without_spare(&self, now: Instant) -> Option<LimitKind> {
        let elapsed_ns = now.nanos_since(self.now);
        self.applying(Direction::Read)
            .find(|(kind, bucket)| !self.spare.levels[kind.index()].fits(bucket, elapsed_ns))
            .map(|(kind, _)| kind)
    }

    pub(in crate::throttle) fn charge_spare(&mut self, cost: &RequestCost, now: Instant) {
        let elapsed_ns = now.nanos_since(self.now);
        let applying = self.applying[Direction::Read.index()];
        for kind in applying.kinds() {
            let units = self.units(*kind, cost);
            self.spare.levels[kind.index()].add(&self.buckets[kind.index()], units, elapsed_ns);
            self.spare.in_use = true;
        }
    }

    /// Refunds read-ahead that guests have been charged for.
    pub(in crate::throttle) fn refund_spare(&mut self, refund: SpareRefund) {
        if !self.spare.in_use {
            return;
        }
        let applying = self.applying[Direction::Read.index()];
        for kind in applying.kinds() {
            let units = if kind.counts_bytes() {
                u128::from(refund.bytes()) * LEVEL_SCALE
            } else {
                refund.operations(self.iops_size)
            };
            self.spare.levels[kind.index()].refund(units);
        }
    }

    /// True if writes wait for a limit that does not apply to reads.
    pub(in crate::throttle) fn throttles_writes_only(&self, now: Instant) -> bool {
        let elapsed_ns = now.nanos_since(self.now);
        WRITE_ONLY_KINDS.iter().any(|kind| self.buckets[kind.index()].wait_ns() > elapsed_ns)
    }
}

#[cfg(test)]
#[path = "spare_tests.rs"]
mod tests;
