//! Buckets for work that somebody else admits: how much of a burst is left, by what has passed.
//!
//! A [`Tree`](super::Tree) admits requests one by one. Where the kernel admits them (`io.max`),
//! only what has passed since the last look is known: a charge comes first, and then time leaks
//! out.
//!
//! Never decides a rate: [`steering`](crate::steering) does.

use super::bucket::Buckets;
use super::cost::Cost;
use super::enforcement::Enforcement;
use super::limits::{LimitKind, Limits};
use super::price::WHOLE;
use crate::request::Direction;
use crate::time::Instant;

/// The buckets of one set of limits.
#[derive(Clone, Debug)]
pub struct Ledger {
    limits: Limits,
    buckets: Buckets,
    enforcement: Enforcement,
}

impl Ledger {
    /// Empty buckets for these limits, which must be valid.
    pub fn new(limits: &Limits, now: Instant) -> Self {
        Self { limits: *limits, buckets: Buckets::new(limits, now), enforcement: Enforcement::Enforced }
    }

    /// The limits that it was made for.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// How these limits are applied at present.
    pub const fn enforcement(&self) -> Enforcement {
        self.enforcement
    }

    /// Applies the limits so from now on. What is in the buckets stays.
    pub fn enforce(&mut self, enforcement: Enforcement) {
        if enforcement.scale() != self.enforcement.scale() {
            self.buckets.rescale(&self.limits, enforcement.scale());
        }
        self.enforcement = enforcement;
    }

    /// Charges what has passed since the last time. While limits are lifted nothing is charged.
    pub fn charge(&mut self, direction: Direction, operations: u64, bytes: u64) {
        if (operations, bytes) == (0, 0) || self.enforcement == Enforcement::Lifted {
            return;
        }
        // As evenly as whole bytes can be: how they were spread is unknown.
        let operations = operations.max(1);
        let (each, longer) = (bytes / operations, bytes % operations);
        for (count, length) in [(operations - longer, each), (longer, each + 1)] {
            self.buckets.charge_part(direction, &Cost::equal(count, length), &(0..WHOLE));
        }
    }

    /// Lets run out what the time up to `now` leaks.
    pub fn leak_to(&mut self, now: Instant) {
        self.buckets.leak_to(now);
    }

    /// What is left of a burst, in whole units; `None` if the limit is not set.
    pub fn remaining(&self, kind: LimitKind) -> Option<u64> {
        self.buckets.remaining(kind)
    }

    /// How full each bucket is, in whole units, by [`LimitKind::index`]; for [`Ledger::restore`].
    pub fn levels(&self) -> [u64; 6] {
        LimitKind::ALL.map(|kind| self.buckets.level(kind))
    }

    /// Fills the buckets as far as they were.
    pub fn restore(&mut self, levels: [u64; 6]) {
        for kind in LimitKind::ALL {
            self.buckets.fill(kind, levels[kind.index()]);
        }
    }
}
