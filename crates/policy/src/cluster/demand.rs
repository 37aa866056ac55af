//! Demand of a host for each limit, estimated from admitted requests and throttled time.
//!
//! A host that is throttled most of the time demands everything, because the load that its clients
//! would offer cannot be measured. Otherwise demand is the average rate plus a margin for its
//! variation, so that requests at random instants do not look like a change in each tick. A
//! deviation too large for chance, in one tick or in several on the same side of the average, and
//! two ticks without requests count at once, so that unused quota is freed.
//!
//! Never queries the tree: its statistics are an argument.

use super::ByKind;
use crate::counter;
use crate::throttle::{LimitKind, Stats};
use crate::time::{Instant, NANOS_PER_SECOND};

/// A limit that throttles for more than this fraction (1 / n) of a tick counts as throttling.
const HELD_BACK: u64 = 16;
/// Margin above the average rate, as a fraction (1 / n); at least one request per tick.
const HEADROOM: u64 = 64;
/// Weight of a new tick in the moving average (1 / n).
const FORGETS: u64 = 8;
/// Fixed-point scale of the averages: parts of a unit.
const PARTS: u128 = 256;

/// Demand of a host, as sent in its reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Units per second; `u64::MAX` for everything there is.
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
struct Usual {
    rate: u64,
    /// Mean absolute deviation of single ticks from the average.
    swing: u64,
    /// Units of one request, as measured last.
    one: u64,
    was_none: bool,
    /// Consecutive ticks on one side of the average: if above, their number, sum of deviations.
    run: (bool, u32, u64),
    /// Consecutive ticks in which this limit throttled for more than half of the time.
    held_ticks: u32,
    /// Ticks since the last change of the rate; an average exists only after some.
    ticks: u64,
    /// Last demand reported. Changes only if the difference exceeds the variation.
    said: u64,
}

/// Measurements of one limit in a tick.
#[derive(Clone, Copy)]
struct Tick {
    units: u64,
    /// Units of one request; 0 if none was admitted.
    one: u64,
    elapsed_ns: u64,
    /// Time for which this limit throttled requests.
    held_ns: u64,
}

impl Usual {
    /// Demand in units per second.
    fn wants(&mut self, tick: Tick) -> u64 {
        let a_second = |units: u128| {
            let parts = units.saturating_mul(PARTS) * u128::from(NANOS_PER_SECOND);
            u64::try_from(parts / u128::from(tick.elapsed_ns)).unwrap_or(u64::MAX)
        };
        if tick.one > 0 {
            self.one = tick.one;
        }
        let one = u128::from(self.one.max(1));
        let (now, one_more) = (a_second(tick.units.into()), a_second(one));
        let is_held = tick.held_ns > tick.elapsed_ns / HELD_BACK;
        let off = now.abs_diff(self.rate);
        let is_none = tick.units == 0;
        // Once the variation is known, a deviation that Poisson arrivals would allow is a change if
        // it exceeds four times that variation.
        let known = if self.ticks > FORGETS { self.swing.saturating_mul(4) } else { u64::MAX };
        let chance = self.chance(tick.elapsed_ns).min(known.saturating_add(one_more));
        let is_other = off > chance || self.drifts(now, off, chance) || (is_none && self.was_none);
        self.was_none = is_none;
        if is_other {
            self.run = Default::default();
        }
        // Two levels: a sixteenth of the tick counts as throttling, half of it as being throttled
        // mostly.
        let is_mostly = tick.held_ns > tick.elapsed_ns / 2;
        self.held_ticks = if is_mostly { self.held_ticks.saturating_add(1) } else { 0 };
        // A client that has just begun to wait needs slightly or much more than its quota:
        // everything is demanded. A client that has gradually used up its burst needs slightly
        // more.
        if is_held && (is_mostly || (is_other && now > self.rate)) {
            let is_all = self.held_ticks != 1 || is_other;
            (self.rate, self.swing, self.ticks, self.said) = (now, 0, 0, 0);
            return if is_all { u64::MAX } else { now.max(one_more).saturating_mul(2) / PARTS as u64 };
        }
        // A change falls into the middle of a tick, and the backlog is admitted in the next two.
        self.ticks = if is_other { 1 } else { self.ticks.saturating_add(1) };
        if self.ticks <= 3 {
            (self.rate, self.swing, self.said) = (now, 0, 0);
        } else {
            let forgets = (self.ticks - 2).min(FORGETS);
            let towards = |from: u64, to: u64| from - from / forgets + to / forgets;
            (self.rate, self.swing) = (towards(self.rate, now), towards(self.swing, off));
        }
        if self.rate == 0 {
            return 0;
        }
        let more = (self.rate / HEADROOM).max(one_more).max(self.swing);
        let wants = u128::from(self.rate) + u128::from(more);
        // The backlog must be admitted within a tick, or the host appears throttled and demands
        // everything.
        let held_ns = u128::from(tick.held_ns.max(tick.elapsed_ns / 2));
        let held = if is_held { wants * held_ns / u128::from(tick.elapsed_ns) } else { 0 };
        let wants = u64::try_from(wants + held).unwrap_or(u64::MAX);
        if wants.abs_diff(self.said) > self.swing.saturating_mul(2) {
            self.said = wants;
        }
        self.said / PARTS as u64
    }

    /// True if the deviations of consecutive ticks on one side of the average exceed chance, whose
    /// sum grows with the root of their number. The bound is a fifth higher than that of a single
    /// tick, because it is tested in each tick.
    fn drifts(&mut self, now: u64, off: u64, chance: u64) -> bool {
        let is_above = now > self.rate;
        let (was_above, ticks, sum) = self.run;
        // A small deviation ends the series too: it would dilute those that follow.
        self.run = match is_above == was_above && off > chance / 5 {
            true => (is_above, ticks.saturating_add(1), sum.saturating_add(off)),
            false => (is_above, 1, off),
        };
        let (_, ticks, sum) = self.run;
        let square = |value: u64| u128::from(value).pow(2);
        // sum / ticks.sqrt() > chance * 6 / 5, squared to stay with integers.
        ticks > 1 && square(sum) / 36 > (square(chance) / 25).saturating_mul(ticks.into())
    }

    /// Deviation of a tick that Poisson arrivals allow: half a request, plus 2.5 standard
    /// deviations (roots of the expected number).
    fn chance(&self, elapsed_ns: u64) -> u64 {
        let one = u128::from(self.one.max(1));
        let second = u128::from(NANOS_PER_SECOND);
        let expected = u128::from(self.rate) * u128::from(elapsed_ns) / second / one;
        let requests = expected.isqrt() * PARTS.isqrt() * 5 / 2 + PARTS / 2;
        u64::try_from(requests.saturating_mul(one) * second / u128::from(elapsed_ns)).unwrap_or(u64::MAX)
    }
}

/// Computes the demand of a host from consecutive statistics of its group.
#[derive(Clone, Debug)]
pub struct Demand {
    at: Instant,
    last: Stats,
    usual: [Usual; 6],
    /// Demand at the last call.
    demand: ByKind,
}

impl Demand {
    /// `stats` are the statistics of the group at the start.
    pub fn new(at: Instant, stats: Stats) -> Self {
        Self { at, last: stats, usual: [Usual::default(); 6], demand: ByKind::default() }
    }

    /// Demand since the last call, in units per second.
    ///
    /// An operation is a request, also with an `iops-size`: if requests are larger than that, the
    /// limit throttles them and the host demands everything.
    pub fn observe(&mut self, now: Instant, stats: Stats) -> ByKind {
        let elapsed_ns = now.nanos_since(self.at).max(1);
        let before = counters(&core::mem::replace(&mut self.last, stats));
        self.at = now;
        // A counter fell: the group was replaced, and its work since the last call is unknown.
        let Some([held_ns, read_requests, read_bytes, write_requests, written_bytes]) =
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
            let one = match (units, kind.counts_bytes()) {
                (0, _) => 0,
                (_, true) => bytes / requests,
                (_, false) => 1,
            };
            // Throttled time is attributed to the limit that binds at the end of the tick.
            let held_ns = if stats.binding == Some(kind) { held_ns } else { 0 };
            self.usual[kind.index()].wants(Tick { units, one, elapsed_ns, held_ns })
        });
        self.demand = demand;
        demand
    }
}

const fn counters(stats: &Stats) -> [u64; 5] {
    let Stats { reads, writes, limited_ns, .. } = stats;
    [*limited_ns, reads.requests, reads.bytes, writes.requests, writes.bytes]
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const TICK_NS: u64 = NANOS_PER_SECOND / 5;

    fn wants(usual: &mut Usual, requests: u64, held_percent: u64) -> u64 {
        let held_ns = TICK_NS / 100 * held_percent;
        usual.wants(Tick { units: requests, one: u64::from(requests > 0), elapsed_ns: TICK_NS, held_ns })
    }

    #[test]
    fn who_is_held_back_wants_all_and_who_stops_wants_nothing_soon() {
        let mut usual = Usual::default();
        assert_eq!(wants(&mut usual, 4, 30), u64::MAX, "it has just begun");
        assert_eq!(wants(&mut usual, 20, 100), u64::MAX);
        assert_eq!(wants(&mut usual, 20, 0), 105);
        assert_eq!(wants(&mut usual, 0, 0), 0, "twenty are no chance");
        for requests in [4, 6, 2, 5, 3, 6, 2, 5, 3, 4, 6, 2] {
            wants(&mut usual, requests, 0);
        }
        assert_ne!(wants(&mut usual, 0, 0), 0, "four that come as they like may be");
        assert_eq!(wants(&mut usual, 0, 0), 0);
        for _ in 0..2 * FORGETS {
            wants(&mut usual, 4, 0);
        }
        assert_eq!(wants(&mut usual, 0, 0), 0, "four that came evenly have stopped");
    }

    #[test]
    fn less_than_before_for_some_ticks_is_no_chance() {
        let mut usual = Usual::default();
        for _ in 0..5 {
            wants(&mut usual, 113, 0);
        }
        let [first, .., third] = [93, 84, 84].map(|count| wants(&mut usual, count, 0));
        assert!(first > 540, "the change may be in the middle of a tick: {first}");
        assert!(third < 84 * 5 + 20, "each alone could be chance: {third}");
    }

    #[test]
    fn what_comes_at_random_is_wanted_evenly_and_with_a_margin() {
        let mut usual = Usual::default();
        let counts = [10, 13, 7, 9, 14, 6, 11, 10, 8, 12].repeat(10);
        let all: Vec<u64> = counts.into_iter().map(|count| wants(&mut usual, count, 0)).collect();
        let late = &all[30..];
        assert!(late.iter().all(|wants| (55..=75).contains(wants)), "{late:?}");
        assert!(wants(&mut usual, 10, 45) > late[69], "waiting a little is more");
    }
}
