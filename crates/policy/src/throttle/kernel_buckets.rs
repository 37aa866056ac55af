//! Leaky buckets for I/O that the kernel throttles: how much of a burst remains, from measured I/O.
//!
//! A [`ThrottleTree`](super::ThrottleTree) admits single requests. If the kernel admits them
//! (`io.max`), only their sum since the last measurement is known: the caller charges it, and then
//! leaks the levels up to the time of the measurement.
//!
//! Never decides a rate: [`steering`](crate::steering) does.

use super::bucket::NodeBuckets;
use super::cost::RequestCost;
use super::enforcement::Enforcement;
use super::limits::{LimitKind, Limits};
use super::slicing::WHOLE_REQUEST;
use crate::request::Direction;
use crate::time::Instant;

/// The buckets of one set of limits.
#[derive(Clone, Debug)]
pub struct KernelBuckets {
    limits: Limits,
    buckets: NodeBuckets,
    enforcement: Enforcement,
}

impl KernelBuckets {
    /// Empty buckets. The limits must be valid.
    pub fn new(limits: &Limits, now: Instant) -> Self {
        Self { limits: *limits, buckets: NodeBuckets::new(limits, now), enforcement: Enforcement::Enforced }
    }

    /// The limits of the buckets.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Current enforcement of the limits.
    pub const fn enforcement(&self) -> Enforcement {
        self.enforcement
    }

    /// Changes the enforcement. The levels stay the same.
    pub fn enforce(&mut self, enforcement: Enforcement) {
        if enforcement.scale() != self.enforcement.scale() {
            self.buckets.rescale(&self.limits, enforcement.scale());
        }
        self.enforcement = enforcement;
    }

    /// Charges I/O since the last measurement. Does nothing while limits are lifted.
    pub fn charge(&mut self, direction: Direction, operations: u64, bytes: u64) {
        if (operations, bytes) == (0, 0) || self.enforcement == Enforcement::Lifted {
            return;
        }
        // Sizes of single requests are unknown: assumed equal, apart from the remainder of the
        // division, which makes some of them longer by one byte.
        let operations = operations.max(1);
        let (each, longer) = (bytes / operations, bytes % operations);
        for (count, length) in [(operations - longer, each), (longer, each + 1)] {
            self.buckets.charge_part(direction, &RequestCost::equal(count, length), &(0..WHOLE_REQUEST));
        }
    }

    /// Leaks until `now`.
    pub fn leak_to(&mut self, now: Instant) {
        self.buckets.leak_to(now);
    }

    /// Remaining capacity in whole units; `None` if the limit is not set.
    pub fn remaining(&self, kind: LimitKind) -> Option<u64> {
        self.buckets.remaining(kind)
    }

    /// Levels in whole units, by [`LimitKind::index`]; for [`KernelBuckets::restore`].
    pub fn levels(&self) -> [u64; 6] {
        LimitKind::ALL.map(|kind| self.buckets.level(kind))
    }

    /// Sets the levels to those that [`KernelBuckets::levels`] returned.
    pub fn restore(&mut self, levels: [u64; 6]) {
        for kind in LimitKind::ALL {
            self.buckets.set_level(kind, levels[kind.index()]);
        }
    }
}
