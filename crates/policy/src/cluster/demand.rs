//! Demand of a host for each limit, estimated from admitted requests and throttled time.
//!
//! A host that is throttled most of the time demands everything, because the load that its clients
//! would offer cannot be measured. Otherwise demand is the average rate plus a margin for its
//! variation, so that requests at random instants do not appear as a change in each tick. A
//! deviation that random arrivals do not explain, in one tick or in several on the same side of the
//! average, changes the demand at once, as do two ticks without requests: unused quota is freed.
//!
//! Never queries the tree: its statistics are an argument.

use super::ByKind;
use crate::counter;
use crate::throttle::{CauseKind, LimitKind, ThrottleStats};
use crate::time::{Instant, NANOS_PER_SECOND};

/// A limit that throttles for more than this fraction (1 / n) of a tick counts as throttling.
const THROTTLED_FRACTION: u64 = 16;
/// Margin above the average rate, as a fraction (1 / n); at least one request per tick.
const HEADROOM: u64 = 64;
/// Weight of a new tick in the moving average (1 / n).
const AVERAGING_TICKS: u64 = 8;
/// Fixed-point scale of the averages: parts of a unit.
const FIXED_POINT_SCALE: u128 = 256;

/// Demand of a host, as sent in its reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedDemand {
    /// Units per second; `u64::MAX` for as much as the limit allows.
    pub demand: ByKind,
    /// Age of the oldest request that waits for the group's limits, in nanoseconds.
    pub waiting_ns: u64,
    /// Sum of the weights of the disks with demand.
    pub weight: u64,
    /// Sum of those disks' reservations: operations and bytes per second.
    pub reserved: [u64; 2],
}

/// Moving average of one limit's admitted units, in parts of a unit per second.
#[derive(Clone, Copy, Debug, Default)]
struct RateEstimate {
    rate: u64,
    /// Mean absolute deviation of single ticks from the average.
    deviation: u64,
    /// Units of one request, as measured last.
    request_units: u64,
    was_idle: bool,
    /// Run of consecutive ticks on one side of the average: true if above it, number of ticks, sum
    /// of their deviations.
    same_side_run: (bool, u32, u64),
    /// Consecutive ticks in which this limit throttled for more than half of the time.
    throttled_ticks: u32,
    /// Ticks since the last change of the rate; an average exists only after some.
    ticks: u64,
    /// Last demand reported. Changes only if the difference exceeds the variation.
    reported: u64,
}

/// Measurements of one limit in a tick.
#[derive(Clone, Copy)]
struct TickSample {
    units: u64,
    /// Units of one request; 0 if none was admitted.
    request_units: u64,
    elapsed_ns: u64,
    /// Time for which this limit throttled requests.
    throttled_ns: u64,
}

impl RateEstimate {
    /// Demand in units per second.
    fn update_demand(&mut self, tick: TickSample) -> u64 {
        let per_second = |units: u128| {
            let parts = units.saturating_mul(FIXED_POINT_SCALE) * u128::from(NANOS_PER_SECOND);
            u64::try_from(parts / u128::from(tick.elapsed_ns)).unwrap_or(u64::MAX)
        };
        if tick.request_units > 0 {
            self.request_units = tick.request_units;
        }
        let request_units = u128::from(self.request_units.max(1));
        let (now, one_more) = (per_second(tick.units.into()), per_second(request_units));
        let is_throttled = tick.throttled_ns > tick.elapsed_ns / THROTTLED_FRACTION;
        let deviation = now.abs_diff(self.rate);
        let is_idle = tick.units == 0;
        // Once the variation is known, a deviation that Poisson arrivals would allow is a change if
        // it exceeds four times that variation.
        let max_deviation =
            if self.ticks > AVERAGING_TICKS { self.deviation.saturating_mul(4) } else { u64::MAX };
        let tolerance = self.poisson_tolerance(tick.elapsed_ns).min(max_deviation.saturating_add(one_more));
        let is_change =
            deviation > tolerance || self.is_drift(now, deviation, tolerance) || (is_idle && self.was_idle);
        self.was_idle = is_idle;
        if is_change {
            self.same_side_run = Default::default();
        }
        // Two levels: a sixteenth of the tick counts as throttling, half of it as being throttled
        // mostly.
        let is_mostly_throttled = tick.throttled_ns > tick.elapsed_ns / 2;
        self.throttled_ticks = if is_mostly_throttled { self.throttled_ticks.saturating_add(1) } else { 0 };
        // A client that has just begun to wait needs slightly or much more than its quota:
        // everything is demanded. A client that has gradually used up its burst needs slightly
        // more.
        if is_throttled && (is_mostly_throttled || (is_change && now > self.rate)) {
            let demands_everything = self.throttled_ticks != 1 || is_change;
            (self.rate, self.deviation, self.ticks, self.reported) = (now, 0, 0, 0);
            return if demands_everything {
                u64::MAX
            } else {
                now.max(one_more).saturating_mul(2) / FIXED_POINT_SCALE as u64
            };
        }
        // A change falls into the middle of a tick, and the backlog is admitted in the next two.
        self.ticks = if is_change { 1 } else { self.ticks.saturating_add(1) };
        if self.ticks <= 3 {
            (self.rate, self.deviation, self.reported) = (now, 0, 0);
        } else {
            let averaging_ticks = (self.ticks - 2).min(AVERAGING_TICKS);
            let move_towards = |from: u64, to: u64| from - from / averaging_ticks + to / averaging_ticks;
            (self.rate, self.deviation) =
                (move_towards(self.rate, now), move_towards(self.deviation, deviation));
        }
        if self.rate == 0 {
            return 0;
        }
        let margin = (self.rate / HEADROOM).max(one_more).max(self.deviation);
        let demand = u128::from(self.rate) + u128::from(margin);
        // The backlog must be admitted within a tick; otherwise the host would appear throttled and
        // demand everything.
        let backlog_ns = u128::from(tick.throttled_ns.max(tick.elapsed_ns / 2));
        let backlog = if is_throttled { demand * backlog_ns / u128::from(tick.elapsed_ns) } else { 0 };
        let demand = u64::try_from(demand + backlog).unwrap_or(u64::MAX);
        if demand.abs_diff(self.reported) > self.deviation.saturating_mul(2) {
            self.reported = demand;
        }
        self.reported / FIXED_POINT_SCALE as u64
    }

    /// True if the deviations of consecutive ticks on one side of the average exceed chance, whose
    /// sum grows with the root of their number. The bound is a fifth higher than that of a single
    /// tick, because it is tested in each tick.
    fn is_drift(&mut self, now: u64, deviation: u64, tolerance: u64) -> bool {
        let is_above = now > self.rate;
        let (was_above, ticks, sum) = self.same_side_run;
        // A small deviation ends the series too: it would dilute those that follow.
        self.same_side_run = match is_above == was_above && deviation > tolerance / 5 {
            true => (is_above, ticks.saturating_add(1), sum.saturating_add(deviation)),
            false => (is_above, 1, deviation),
        };
        let (_, ticks, sum) = self.same_side_run;
        let square = |value: u64| u128::from(value).pow(2);
        // sum / ticks.sqrt() > chance * 6 / 5, squared to stay with integers.
        ticks > 1 && square(sum) / 36 > (square(tolerance) / 25).saturating_mul(ticks.into())
    }

    /// Deviation of a tick that Poisson arrivals allow: half a request, plus 2.5 standard
    /// deviations (roots of the expected number).
    fn poisson_tolerance(&self, elapsed_ns: u64) -> u64 {
        let request_units = u128::from(self.request_units.max(1));
        let second = u128::from(NANOS_PER_SECOND);
        let expected = u128::from(self.rate) * u128::from(elapsed_ns) / second / request_units;
        let requests = expected.isqrt() * FIXED_POINT_SCALE.isqrt() * 5 / 2 + FIXED_POINT_SCALE / 2;
        u64::try_from(requests.saturating_mul(request_units) * second / u128::from(elapsed_ns))
            .unwrap_or(u64::MAX)
    }
}

/// Computes the demand of a host from consecutive statistics of its group.
#[derive(Clone, Debug)]
pub struct DemandEstimator {
    at: Instant,
    last: ThrottleStats,
    estimates: [RateEstimate; 6],
    /// Demand at the last call.
    demand: ByKind,
}

impl DemandEstimator {
    /// `stats` are the statistics of the group at the start.
    pub fn new(at: Instant, stats: ThrottleStats) -> Self {
        Self { at, last: stats, estimates: [RateEstimate::default(); 6], demand: ByKind::default() }
    }

    /// Demand since the last call, in units per second.
    ///
    /// An operation is a request, also with an `iops-size`: if requests are larger than that, the
    /// limit throttles them and the host demands everything.
    pub fn observe(&mut self, now: Instant, stats: ThrottleStats) -> ByKind {
        let elapsed_ns = now.nanos_since(self.at).max(1);
        let before = counters(&core::mem::replace(&mut self.last, stats));
        self.at = now;
        // A counter fell: the group was replaced, and its work since the last call is unknown.
        let Some([throttled_ns, read_requests, read_bytes, write_requests, written_bytes]) =
            counter::growths(&before, &counters(&stats))
        else {
            return self.demand;
        };
        let passed = |kind: LimitKind| {
            let [read, written] = match kind.counts_bytes() {
                true => [read_bytes, written_bytes],
                false => [read_requests, write_requests],
            };
            match kind {
                LimitKind::BpsTotal | LimitKind::IopsTotal => read.saturating_add(written),
                LimitKind::BpsRead | LimitKind::IopsRead => read,
                LimitKind::BpsWrite | LimitKind::IopsWrite => written,
            }
        };
        let (bytes, requests) = (passed(LimitKind::BpsTotal), passed(LimitKind::IopsTotal).max(1));
        let demand = LimitKind::ALL.map(|kind| {
            let units = passed(kind);
            let request_units = match (units, kind.counts_bytes()) {
                (0, _) => 0,
                (_, true) => bytes / requests,
                (_, false) => 1,
            };
            // Throttled time is attributed to the limit that binds at the end of the tick.
            let is_cause = stats.throttle_cause == Some(CauseKind::Limit(kind));
            let throttled_ns = if is_cause { throttled_ns } else { 0 };
            self.estimates[kind.index()].update_demand(TickSample {
                units,
                request_units,
                elapsed_ns,
                throttled_ns,
            })
        });
        self.demand = demand;
        demand
    }
}

const fn counters(stats: &ThrottleStats) -> [u64; 5] {
    let ThrottleStats { reads, writes, throttled_ns: limited_ns, .. } = stats;
    [*limited_ns, reads.requests, reads.bytes, writes.requests, writes.bytes]
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const TICK_NS: u64 = NANOS_PER_SECOND / 5;

    fn update(estimate: &mut RateEstimate, requests: u64, throttled_percent: u64) -> u64 {
        let throttled_ns = TICK_NS / 100 * throttled_percent;
        estimate.update_demand(TickSample {
            units: requests,
            request_units: u64::from(requests > 0),
            elapsed_ns: TICK_NS,
            throttled_ns,
        })
    }

    #[test]
    fn throttled_host_demands_all_and_idle_host_soon_nothing() {
        let mut estimate = RateEstimate::default();
        assert_eq!(update(&mut estimate, 4, 30), u64::MAX, "it has just begun");
        assert_eq!(update(&mut estimate, 20, 100), u64::MAX);
        assert_eq!(update(&mut estimate, 20, 0), 105);
        assert_eq!(update(&mut estimate, 0, 0), 0, "twenty are no chance");
        for requests in [4, 6, 2, 5, 3, 6, 2, 5, 3, 4, 6, 2] {
            update(&mut estimate, requests, 0);
        }
        assert_ne!(update(&mut estimate, 0, 0), 0, "four that come as they like may be");
        assert_eq!(update(&mut estimate, 0, 0), 0);
        for _ in 0..2 * AVERAGING_TICKS {
            update(&mut estimate, 4, 0);
        }
        assert_eq!(update(&mut estimate, 0, 0), 0, "four that came evenly have stopped");
    }

    #[test]
    fn several_ticks_below_average_are_a_change() {
        let mut estimate = RateEstimate::default();
        for _ in 0..5 {
            update(&mut estimate, 113, 0);
        }
        let [first, .., third] = [93, 84, 84].map(|count| update(&mut estimate, count, 0));
        assert!(first > 540, "the change may be in the middle of a tick: {first}");
        assert!(third < 84 * 5 + 20, "each alone could be chance: {third}");
    }

    #[test]
    fn random_arrivals_yield_steady_demand_with_margin() {
        let mut estimate = RateEstimate::default();
        let counts = [10, 13, 7, 9, 14, 6, 11, 10, 8, 12].repeat(10);
        let all: Vec<u64> = counts.into_iter().map(|count| update(&mut estimate, count, 0)).collect();
        let settled = &all[30..];
        assert!(settled.iter().all(|wants| (55..=75).contains(wants)), "{settled:?}");
        assert!(update(&mut estimate, 10, 45) > settled[69], "waiting a little is more");
    }
}
