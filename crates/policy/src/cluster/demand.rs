//! What a host would use of each limit, judged by what passed and whether anything was held back.
//!
//! A host that its part holds back wants all there is: how much more its clients would ask for,
//! nobody can know. Others want a little more than what passed. Looks at the last tick alone, so
//! that what a host no longer uses is free after one.
//!
//! Never asks the tree anything: its statistics are an argument.

use super::ByKind;
use crate::throttle::{LimitKind, Stats};
use crate::time::Instant;

/// Held back for more than this part of the time is held back.
const HELD_BACK: u64 = 16;
/// What others want beyond what passed, of it; a request more in each tick at least.
const HEADROOM: u64 = 64;

/// What a host wants, as it stands in its reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// In units per second; `u64::MAX` for all there is.
    pub demand: ByKind,
    /// How long the request has waited for the group's limits that waits longest, in nanoseconds.
    pub waiting_ns: u64,
    /// Of the disks that want something, together.
    pub weight: u64,
    /// Promised to those disks: operations and bytes per second.
    pub reserved: [u64; 2],
}

/// Compares what a group's statistics say with what they said a tick before.
#[derive(Clone, Debug)]
pub struct Demand {
    at: Instant,
    last: Stats,
}

impl Demand {
    /// From the group's statistics at the start.
    pub const fn new(at: Instant, stats: Stats) -> Self {
        Self { at, last: stats }
    }

    /// The demand of the time since the last call, in units per second.
    ///
    /// Operations are requests, also with an `iops-size`: where those are larger, the limit holds
    /// them back, and then the host wants all.
    pub fn observe(&mut self, now: Instant, stats: Stats) -> ByKind {
        let elapsed_ns = now.nanos_since(self.at).max(1);
        let held_ns = stats.limited_ns.saturating_sub(self.last.limited_ns);
        let held_back = stats.binding.filter(|_| held_ns > elapsed_ns / HELD_BACK);
        let passed = |kind: LimitKind| {
            let units = |stats: &Stats| {
                let of = |counters: crate::throttle::Counters| {
                    if kind.counts_bytes() { counters.bytes } else { counters.requests }
                };
                match kind {
                    LimitKind::BpsTotal | LimitKind::IopsTotal => {
                        of(stats.reads).saturating_add(of(stats.writes))
                    }
                    LimitKind::BpsRead | LimitKind::IopsRead => of(stats.reads),
                    LimitKind::BpsWrite | LimitKind::IopsWrite => of(stats.writes),
                }
            };
            units(&stats).saturating_sub(units(&self.last))
        };
        let demand = LimitKind::ALL.map(|kind| {
            if held_back == Some(kind) {
                return u64::MAX;
            }
            let (units, bytes) = (passed(kind), passed(LimitKind::BpsTotal));
            let requests = passed(LimitKind::IopsTotal).max(1);
            let one = if units == 0 {
                0
            } else if kind.counts_bytes() {
                bytes / requests
            } else {
                1
            };
            let wanted = u128::from(units) + u128::from(one.max(units / HEADROOM));
            u64::try_from(wanted * 1_000_000_000 / u128::from(elapsed_ns)).unwrap_or(u64::MAX)
        });
        (self.at, self.last) = (now, stats);
        demand
    }
}
