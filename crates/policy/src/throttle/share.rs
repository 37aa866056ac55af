//! Share of a disk or a group among its siblings: a weight, and a reservation.
//!
//! Independent of the resulting rate, which depends on the siblings' demand.

use super::cost::{BILLION, RequestCost};
use super::slicing::time_for;

/// Share of a node in its parent's capacity.
///
/// Siblings share contended capacity by weight. A reservation is a rate that is served first; it
/// counts towards the share, so a busy node gets the larger of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeShare {
    weight: u32,
    iops_reservation: u64,
    bps_reservation: u64,
}

impl NodeShare {
    /// Valid weights.
    pub const WEIGHTS: core::ops::RangeInclusive<u32> = 1..=10_000;

    /// A share without a reservation; `None` if the weight is outside of [`NodeShare::WEIGHTS`].
    pub fn new(weight: u32) -> Option<Self> {
        Self::WEIGHTS.contains(&weight).then_some(Self { weight, iops_reservation: 0, bps_reservation: 0 })
    }

    /// Adds a reservation of operations (counted by `iops-size`) and bytes per second; 0 reserves
    /// nothing. If both are reserved, the reservation is used up as soon as one of them is.
    #[must_use]
    pub const fn with_reservation(self, iops: u64, bps: u64) -> Self {
        Self { iops_reservation: iops, bps_reservation: bps, ..self }
    }

    /// The weight; 100 by default.
    pub const fn weight(self) -> u32 {
        self.weight
    }

    /// Reserved operations per second; 0 if none.
    pub const fn iops_reservation(self) -> u64 {
        self.iops_reservation
    }

    /// Reserved bytes per second; 0 if none.
    pub const fn bps_reservation(self) -> u64 {
        self.bps_reservation
    }

    pub(super) const fn is_reserved(self) -> bool {
        self.iops_reservation > 0 || self.bps_reservation > 0
    }

    /// Time of the reservation that a request uses up, in nanoseconds.
    pub(super) fn reservation_ns(self, cost: &RequestCost, operations: u64) -> u64 {
        let time_at = |billionths, rate| if rate == 0 { 0 } else { time_for(billionths, rate) };
        time_at(u128::from(operations), self.iops_reservation)
            .max(time_at(u128::from(cost.bytes()) * u128::from(BILLION), self.bps_reservation))
    }
}

impl Default for NodeShare {
    fn default() -> Self {
        Self { weight: 100, iops_reservation: 0, bps_reservation: 0 }
    }
}
