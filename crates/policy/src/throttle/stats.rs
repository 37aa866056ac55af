//! Statistics of a node: admitted requests, waits, and the current throttle cause. The histogram of
//! waits is allocated at the first wait.

use super::burst::BurstBalance;
use super::cause::CauseKind;
use super::cost::RequestCost;
use super::reservation_monitor::ReservationTimes;
use crate::histogram::LatencyHistogram;
use crate::time::Instant;
use alloc::vec::Vec;

/// Requests admitted by a node in one direction since it was added. Merged requests count as the
/// client sent them. Saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionCounters {
    /// Admitted requests.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that waited.
    pub throttled: u64,
    /// Sum of their waits in nanoseconds.
    pub waited_ns: u64,
}

impl AdmissionCounters {
    pub(super) const fn count(&mut self, cost: &RequestCost, waited_ns: Option<u64>) {
        self.requests = self.requests.saturating_add(cost.requests());
        self.bytes = self.bytes.saturating_add(cost.bytes());
        if let Some(waited_ns) = waited_ns {
            self.throttled = self.throttled.saturating_add(cost.requests());
            self.waited_ns = self.waited_ns.saturating_add(waited_ns.saturating_mul(cost.requests()));
        }
    }

    /// Sum of two counters.
    pub const fn sum(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            bytes: self.bytes.saturating_add(other.bytes),
            throttled: self.throttled.saturating_add(other.throttled),
            waited_ns: self.waited_ns.saturating_add(other.waited_ns),
        }
    }
}

/// Distribution of waits, of requests that waited. All zero without any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitSummary {
    /// Median in nanoseconds, accurate to 3.2 % or 1 µs.
    pub p50_ns: u64,
    /// 99th percentile in nanoseconds, accurate to 3.2 % or 1 µs.
    pub p99_ns: u64,
    /// The longest wait, exact.
    pub max_ns: u64,
}

impl WaitSummary {
    fn of(waits: &LatencyHistogram) -> Self {
        Self { p50_ns: waits.percentile_ns(5000), p99_ns: waits.percentile_ns(9900), max_ns: waits.max_ns() }
    }
}

/// Level of a bucket, in bytes or operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketLevel {
    /// Admitted units that have not leaked. Above `capacity` after a request larger than the
    /// bucket, or after the limit was lowered.
    pub units: u64,
    /// Level above which requests wait, at least 1.
    pub capacity: u64,
}

/// Levels of a limit's buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitLevel {
    /// The bucket that leaks at the rate. Its capacity is the burst capacity, or a tenth of a
    /// second at the rate without a burst.
    pub main: BucketLevel,
    /// The second bucket, which leaks at the burst rate and limits the rate of a burst; `None`
    /// unless the burst is longer than a second. It is full during a burst.
    pub burst_rate: Option<BucketLevel>,
    /// The part of the burst that is available; `None` without a burst rate.
    pub balance: Option<BurstBalance>,
}

/// Statistics of a node at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleStats {
    /// Admitted reads.
    pub reads: AdmissionCounters,
    /// Admitted writes and discards.
    pub writes: AdmissionCounters,
    /// Waits of admitted requests, whatever the cause, since the node was added.
    pub waits: WaitSummary,
    /// Waits of requests admitted in the last [`RECENT_NS`] to twice that.
    pub recent_waits: WaitSummary,
    /// Time for which requests waited for this node's own limits or its cap, in either direction,
    /// in nanoseconds.
    pub throttled_ns: u64,
    /// The limit of this node that requests wait for, or waited for in the last second; or the cap.
    pub throttle_cause: Option<CauseKind>,
    /// Units that may be admitted before requests wait for a limit, by
    /// [`LimitKind::index`](super::LimitKind::index); `None` without a limit.
    pub tokens: [Option<u64>; 6],
    /// Bucket levels by [`LimitKind::index`](super::LimitKind::index); `None` without a limit.
    pub levels: [Option<LimitLevel>; 6],
    /// Requests that wait here or below, by direction.
    pub waiting: [usize; 2],
    /// Result of monitoring its own reservation; `None` without one.
    pub reservation: Option<ReservationTimes>,
}

/// The cumulative counters of [`ThrottleStats`]. An upgrade transfers them to the new process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CumulativeStats {
    /// Admitted requests, by direction.
    pub passed: [AdmissionCounters; 2],
    /// As [`ThrottleStats::throttled_ns`].
    pub throttled_ns: u64,
    /// As [`ThrottleStats::reservation`].
    pub reservation_times: Option<ReservationTimes>,
    /// Histogram of waits: step and number of requests, for the steps with any.
    pub waits: Vec<(u16, u32)>,
    /// The longest wait in nanoseconds.
    pub longest_wait_ns: u64,
}

/// Throttled time of a disk or a group in an interval, in nanoseconds: by its own limits (`own_ns`)
/// or those of groups above (`above_ns`). The largest counts. Time of groups counts at most as much
/// as the waits that ended in the interval (`waited_ns`), unless requests still wait.
pub fn throttled_with_groups_ns(
    own_ns: u64,
    above_ns: impl IntoIterator<Item = u64>,
    waited_ns: u64,
    still_waits: bool,
) -> u64 {
    let max_above_ns = if still_waits { u64::MAX } else { waited_ns };
    own_ns.max(above_ns.into_iter().max().unwrap_or(0).min(max_above_ns))
}

/// The part of [`ThrottleStats`] that is cheap to compute, for callers that poll thousands of
/// nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleSummary {
    /// As [`ThrottleStats::throttled_ns`].
    pub throttled_ns: u64,
    /// As [`ThrottleStats::throttle_cause`].
    pub throttle_cause: Option<CauseKind>,
    /// As [`ThrottleStats::waiting`].
    pub waiting: [usize; 2],
    /// As [`ThrottleStats::reservation`].
    pub reservation_times: Option<ReservationTimes>,
}

/// Minimum time for which a wait counts as recent, in nanoseconds; the maximum is twice that.
pub const RECENT_NS: u64 = 10_000_000_000;

/// All waits since the start, and the recent ones: two alternating histograms, the older of which
/// is dropped when the newer is [`RECENT_NS`] old.
#[derive(Clone, Debug)]
pub(super) struct WaitHistograms {
    all: LatencyHistogram,
    /// The newer one first.
    recent: [LatencyHistogram; 2],
    /// Start of the newer one.
    newer_since: Instant,
}

impl WaitHistograms {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            all: LatencyHistogram::new(),
            recent: [LatencyHistogram::new(), LatencyHistogram::new()],
            newer_since: now,
        }
    }

    pub(super) fn add(&mut self, wait_ns: u64, requests: u64, now: Instant) {
        let age_ns = now.nanos_since(self.newer_since);
        if age_ns >= RECENT_NS {
            self.recent.swap(0, 1);
            self.recent[0] = LatencyHistogram::new();
            // Nothing was recorded for a whole period, so the older histogram is out of date as
            // well.
            if age_ns >= 2 * RECENT_NS {
                self.recent[1] = LatencyHistogram::new();
            }
            self.newer_since = now;
        }
        self.all.add(wait_ns, requests);
        self.recent[0].add(wait_ns, requests);
    }

    pub(super) fn all(&self) -> WaitSummary {
        WaitSummary::of(&self.all)
    }

    /// Writes all waits to `stats`, for [`WaitHistograms::add_cumulative`].
    pub(super) fn export(&self, stats: &mut CumulativeStats) {
        stats.waits = self.all.steps().collect();
        stats.longest_wait_ns = self.all.max_ns();
    }

    /// Adds waits of another process; they are not recent. An unknown step counts as the longest.
    pub(super) fn add_cumulative(&mut self, stats: &CumulativeStats) {
        self.all.add_steps(&stats.waits, stats.longest_wait_ns);
    }

    pub(super) fn recent(&self, now: Instant) -> WaitSummary {
        match now.nanos_since(self.newer_since) {
            age_ns if age_ns >= 2 * RECENT_NS => WaitSummary::default(),
            age_ns if age_ns >= RECENT_NS => WaitSummary::of(&self.recent[0]),
            _ => {
                let mut merged = self.recent[0].clone();
                merged.merge(&self.recent[1]);
                WaitSummary::of(&merged)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_waits_expire() {
        let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
        let mut waits = WaitHistograms::new(at(100));
        waits.add(1 << 30, 1000, at(100));
        for second in 111..130 {
            waits.add(1 << 20, 10, at(second));
            let longest = if second < 121 { 1 << 30 } else { 1 << 20 };
            assert_eq!(waits.recent(at(second)).max_ns, longest, "at {second} s");
        }
        assert!(waits.recent(at(130)).p99_ns < 1 << 21 && waits.all().p99_ns > 1 << 29);
        assert_ne!(waits.recent(at(140)), WaitSummary::default());
        assert_eq!(waits.recent(at(141)), WaitSummary::default(), "nothing has waited for long");
    }
}
