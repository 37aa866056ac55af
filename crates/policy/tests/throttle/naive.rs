//! Buckets as the definition has them, written down a second time: what a tree is checked against.
//! Knows nothing of slices, scales or who shares with whom.

use policy::request::Direction;
use policy::throttle::{Cost, LimitKind, Limits};
use policy::time::Instant;

const UNIT: u128 = 1_000_000_000;

/// One node's levels in billionths: main, and of a burst that has a rate to keep.
pub(crate) struct Levels {
    limits: Limits,
    levels: [(u128, u128); 6],
    now: Instant,
}

impl Levels {
    pub(crate) fn new(limits: Limits, now: Instant) -> Self {
        Self { limits, levels: [(0, 0); 6], now }
    }

    pub(crate) fn admit(&mut self, direction: Direction, now: Instant) -> bool {
        let elapsed = u128::from(now.nanos_since(self.now));
        self.now = self.now.max(now);
        for kind in LimitKind::ALL {
            let (level, burst_level) = &mut self.levels[kind.index()];
            let limit = self.limits.limit(kind);
            *level = level.saturating_sub(elapsed * u128::from(limit.rate));
            *burst_level = burst_level.saturating_sub(elapsed * u128::from(limit.burst_rate));
        }
        LimitKind::applying_to(direction).into_iter().all(|kind| {
            let (level, burst_level) = self.levels[kind.index()];
            let limit = self.limits.limit(kind);
            let size = match limit.burst_rate {
                0 => u128::from(limit.rate) * UNIT / 10,
                burst_rate => u128::from(burst_rate) * u128::from(limit.burst_length_s) * UNIT,
            };
            let burst_has_room =
                limit.burst_length_s == 1 || burst_level <= u128::from(limit.burst_rate) * UNIT / 10;
            limit.rate == 0 || level <= size && burst_has_room
        })
    }

    /// Pours in what passes. Only for lone requests or equal ones.
    pub(crate) fn charge(&mut self, direction: Direction, cost: &Cost) {
        for kind in LimitKind::applying_to(direction) {
            let units = if kind.counts_bytes() {
                u128::from(cost.bytes()) * UNIT
            } else {
                let each = cost.bytes() / cost.requests();
                let over = self.limits.iops_size > 0 && each > self.limits.iops_size;
                let one = if over {
                    (u128::from(each) * UNIT).div_ceil(self.limits.iops_size.into())
                } else {
                    UNIT
                };
                u128::from(cost.requests()) * one
            };
            let (level, burst_level) = &mut self.levels[kind.index()];
            *level += units;
            *burst_level += units;
        }
    }
}
