//! What a disk or a group is entitled to when its siblings want the same: a weight, and a promise.
//!
//! Never says what somebody gets: that depends on what the others want.

use super::cost::{BILLION, Cost};
use super::price::divide;

/// What a node is entitled to when its parent is short.
///
/// Siblings share by weight what is contended. A reservation is a rate that comes first; what a
/// node gets by it counts towards its share, so a busy node gets the larger of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    weight: u32,
    iops_reservation: u64,
    bps_reservation: u64,
}

impl Share {
    /// The range of weights.
    pub const WEIGHTS: core::ops::RangeInclusive<u32> = 1..=10_000;

    /// A share of this weight that promises nothing, or `None` outside [`Share::WEIGHTS`].
    pub fn new(weight: u32) -> Option<Self> {
        Self::WEIGHTS.contains(&weight).then_some(Self { weight, iops_reservation: 0, bps_reservation: 0 })
    }

    /// The same weight, with a promise of so many operations (counted by `iops-size`) and bytes per
    /// second; 0 promises nothing. With both, it ends with whichever is used up first.
    #[must_use]
    pub const fn with_reservation(self, iops: u64, bps: u64) -> Self {
        Self { iops_reservation: iops, bps_reservation: bps, ..self }
    }

    /// The weight; 100 by default.
    pub const fn weight(self) -> u32 {
        self.weight
    }

    /// Operations per second that are promised; 0 is no promise.
    pub const fn iops_reservation(self) -> u64 {
        self.iops_reservation
    }

    /// Bytes per second that are promised; 0 is no promise.
    pub const fn bps_reservation(self) -> u64 {
        self.bps_reservation
    }

    pub(super) const fn is_reserved(self) -> bool {
        self.iops_reservation > 0 || self.bps_reservation > 0
    }

    /// How many nanoseconds of the promise a request uses up.
    pub(super) fn promised_ns(self, cost: &Cost, operations: u64) -> u64 {
        let of = |billionths, rate| if rate == 0 { 0 } else { divide(billionths, rate) };
        of(u128::from(operations), self.iops_reservation)
            .max(of(u128::from(cost.bytes()) * u128::from(BILLION), self.bps_reservation))
    }
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 100, iops_reservation: 0, bps_reservation: 0 }
    }
}
