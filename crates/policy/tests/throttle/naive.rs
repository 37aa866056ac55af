//! A second, naive implementation of the buckets, to check a tree against. Has no slices, scales or
//! schedules.

use policy::request::Direction;
use policy::throttle::{LimitKind, Limits, RequestCost};
use policy::time::Instant;

const UNIT: u128 = 1_000_000_000;

/// Admitted work that has not leaked, and the ceiling below which more is admitted; in billionths.
#[derive(Clone, Copy, Default)]
struct Level {
    passed: u128,
    ceiling: u128,
}

impl Level {
    /// Lowers the ceiling to this size, as far as the admitted work plus one bucket allows.
    fn bound(&mut self, size: u128) {
        self.ceiling = self.ceiling.min(self.passed + size).max(size);
    }

    fn leak(&mut self, billionths: u128, size: u128) {
        self.passed = self.passed.saturating_sub(billionths);
        self.bound(size);
    }
}

/// Levels of a node's six buckets: the main level, and that of a burst longer than a second.
pub(crate) struct Levels {
    limits: Limits,
    /// The last limits, while there are none.
    last_limits: Limits,
    levels: [[Level; 2]; 6],
    now: Instant,
}

/// Leak rates and sizes of both levels of a limit; 0 for a level that does not exist.
fn rates_and_sizes(limits: &Limits, kind: LimitKind) -> [(u128, u128); 2] {
    let limit = limits.limit(kind);
    let (rate, burst) = (u128::from(limit.rate), u128::from(limit.burst_rate));
    let size = if burst == 0 { rate * UNIT / 10 } else { burst * u128::from(limit.burst_length_s) * UNIT };
    let second = if limit.burst_length_s > 1 { burst } else { 0 };
    [(rate, size), (second, second * UNIT / 10)]
}

impl Levels {
    pub(crate) fn new(limits: Limits, now: Instant) -> Self {
        let mut levels = Self {
            limits: Limits::default(),
            last_limits: Limits::default(),
            levels: Default::default(),
            now,
        };
        levels.change(limits, now);
        levels
    }

    /// Changes the limits and keeps the admitted work.
    pub(crate) fn change(&mut self, limits: Limits, now: Instant) {
        self.leak_to(now);
        if limits.is_unlimited() && !self.limits.is_unlimited() {
            self.last_limits = self.limits;
        }
        self.limits = limits;
        for kind in LimitKind::ALL {
            for (level, (rate, size)) in
                self.levels[kind.index()].iter_mut().zip(rates_and_sizes(&limits, kind))
            {
                if rate > 0 {
                    level.bound(size);
                }
            }
        }
    }

    /// Changes the limits as a quota without credit: capacity that the change adds comes filled.
    pub(crate) fn change_filled(&mut self, limits: Limits, now: Instant) {
        self.leak_to(now);
        let room_before = LimitKind::ALL.map(|kind| self.room(kind));
        self.change(limits, now);
        for kind in LimitKind::ALL {
            let rooms = self.room(kind).into_iter().zip(room_before[kind.index()]);
            for (level, (room, before)) in self.levels[kind.index()].iter_mut().zip(rooms) {
                level.passed += (room - before).max(0).cast_unsigned();
            }
        }
    }

    /// Capacity until each level of a limit is full; negative after an overrun, 0 if it does not
    /// exist.
    fn room(&self, kind: LimitKind) -> [i128; 2] {
        let rates = rates_and_sizes(&self.limits, kind).map(|(rate, _)| rate);
        [0, 1].map(|at| {
            let Level { passed, ceiling } = self.levels[kind.index()][at];
            if rates[at] == 0 { 0 } else { ceiling.cast_signed() - passed.cast_signed() }
        })
    }

    fn leak_to(&mut self, now: Instant) {
        let elapsed = u128::from(now.nanos_since(self.now));
        self.now = self.now.max(now);
        let limits = if self.limits.is_unlimited() { self.last_limits } else { self.limits };
        for kind in LimitKind::ALL {
            for (level, (rate, size)) in
                self.levels[kind.index()].iter_mut().zip(rates_and_sizes(&limits, kind))
            {
                if rate > 0 {
                    level.leak(elapsed * rate, size);
                }
            }
        }
    }

    pub(crate) fn admit(&mut self, direction: Direction, now: Instant) -> bool {
        self.leak_to(now);
        LimitKind::applying_to(direction).into_iter().all(|kind| {
            let levels = self.levels[kind.index()].iter().zip(rates_and_sizes(&self.limits, kind));
            levels.into_iter().all(|(level, (rate, _))| rate == 0 || level.passed <= level.ceiling)
        })
    }

    /// Charges an admission. Only for single or equal requests.
    pub(crate) fn charge(&mut self, direction: Direction, cost: &RequestCost) {
        for kind in LimitKind::applying_to(direction) {
            let units = if kind.counts_bytes() {
                u128::from(cost.bytes()) * UNIT
            } else {
                let request_bytes = cost.bytes() / cost.requests();
                let exceeds_iops_size = self.limits.iops_size > 0 && request_bytes > self.limits.iops_size;
                let each_units = if exceeds_iops_size {
                    (u128::from(request_bytes) * UNIT).div_ceil(self.limits.iops_size.into())
                } else {
                    UNIT
                };
                u128::from(cost.requests()) * each_units
            };
            for (level, (rate, _)) in
                self.levels[kind.index()].iter_mut().zip(rates_and_sizes(&self.limits, kind))
            {
                level.passed += if rate > 0 { units } else { 0 };
            }
        }
    }
}
