//! Levels of buckets for observers: capacity, burst balance, and when the balance is used up.
//!
//! ```text
//!   level
//!     ▲                       ╱ capacity: used up
//!     │                    ╱
//!     │             ● ─ now
//!     │      ○ older mark, 2 to 4 s before
//!     └──────────────────────────► time
//! ```
//!
//! The rate of the last seconds follows from two levels, so requests are not counted for it.

use super::{LEVEL_SCALE, LeakyBucket, NodeBuckets};
use crate::throttle::burst::{BurstBalance, FullBurst, WHOLE_PPM};
use crate::throttle::limits::{LimitKind, Limits};
use crate::throttle::stats::{BucketLevel, LimitLevel};
use crate::time::Instant;

/// Interval between two marks.
const MARK_INTERVAL_NS: u64 = 2_000_000_000;
/// Age after which a mark says nothing about the present rate, because no request came.
const MARK_EXPIRY_NS: u64 = 10_000_000_000;
/// Shortest time from which a trend is derived: a bucket without a burst fills in a tenth of that.
const MIN_TREND_NS: u64 = 1_000_000_000;

/// Levels of all buckets at an instant, in billionths of a unit.
#[derive(Clone, Copy, Debug)]
struct LevelMark {
    at: Instant,
    levels: [u128; 6],
}

/// Two earlier levels of each bucket.
#[derive(Clone, Copy, Debug)]
pub(super) struct LevelTrend {
    older: LevelMark,
    newer: LevelMark,
}

impl LevelTrend {
    /// A trend of empty buckets.
    pub(super) const fn new(now: Instant) -> Self {
        let mark = LevelMark { at: now, levels: [0; 6] };
        Self { older: mark, newer: mark }
    }
}

impl LeakyBucket {
    /// Balance of a burst, given an earlier level and the time since then.
    fn balance(&self, full_burst: FullBurst, trend: Option<(u128, u64)>) -> BurstBalance {
        let free = self.size.saturating_sub(self.level);
        // A bucket of a tiny limit may have no whole billionth; it is then always full.
        let free_ppm = free.saturating_mul(u128::from(WHOLE_PPM)).checked_div(self.size).unwrap_or(0);
        let passed = self.level.saturating_add(self.deferred);
        let full_in_ns = passed.checked_div(u128::from(self.rate)).unwrap_or(0);
        let used_up_in_ns = match trend {
            _ if free == 0 => Some(0),
            Some((before, elapsed_ns)) if self.level > before => {
                Some(scaled(elapsed_ns, free, self.level - before))
            }
            _ => None,
        };
        BurstBalance {
            full_burst,
            // At most `WHOLE_PPM`, because the free part is at most the size.
            free_ppm: free_ppm as u32,
            used_up_in_ns,
            full_in_ns: u64::try_from(full_in_ns).unwrap_or(u64::MAX),
        }
    }
}

/// `time_ns · part ÷ whole`; saturates.
fn scaled(time_ns: u64, part: u128, whole: u128) -> u64 {
    u64::try_from(u128::from(time_ns).saturating_mul(part) / whole).unwrap_or(u64::MAX)
}

/// A level in whole units. The capacity is rounded up, because the bucket of a limit of 5 IOPS
/// holds half an operation.
fn whole_units(level: u128, size: u128) -> BucketLevel {
    let whole = |billionths: u128| u64::try_from(billionths).unwrap_or(u64::MAX);
    BucketLevel { units: whole(level / LEVEL_SCALE), capacity: whole(size.div_ceil(LEVEL_SCALE)) }
}

impl NodeBuckets {
    /// Records the levels if the last mark is old enough. The buckets must be at the current
    /// instant.
    pub(super) fn mark_trend(&mut self) {
        let age_ns = self.now.nanos_since(self.trend.newer.at);
        if age_ns >= MARK_EXPIRY_NS {
            self.restart_trend();
        } else if age_ns >= MARK_INTERVAL_NS {
            self.trend = LevelTrend { older: self.trend.newer, newer: self.level_mark() };
        }
    }

    /// Forgets earlier levels, which a change of the limits makes incomparable.
    pub(super) fn restart_trend(&mut self) {
        let mark = self.level_mark();
        self.trend = LevelTrend { older: mark, newer: mark };
    }

    fn level_mark(&self) -> LevelMark {
        LevelMark { at: self.now, levels: self.buckets.each_ref().map(|bucket| bucket.level) }
    }

    /// Levels of a limit's buckets; `None` if the limit is not set. The limits are those in force.
    pub(in crate::throttle) fn limit_level(&self, kind: LimitKind, limits: &Limits) -> Option<LimitLevel> {
        let bucket = &self.buckets[kind.index()];
        if bucket.rate == 0 {
            return None;
        }
        let since_ns = self.now.nanos_since(self.trend.older.at);
        let trend = (since_ns >= MIN_TREND_NS).then(|| (self.trend.older.levels[kind.index()], since_ns));
        Some(LimitLevel {
            main: whole_units(bucket.level.saturating_add(bucket.deferred), bucket.size),
            burst_rate: (bucket.burst_rate > 0).then(|| {
                whole_units(bucket.burst_level.saturating_add(bucket.burst_deferred), bucket.burst_size)
            }),
            balance: limits.limit(kind).full_burst().map(|full_burst| bucket.balance(full_burst, trend)),
        })
    }
}
