//! Reserved rates of several disks and groups together.
//!
//! A share with both reservations is used up as soon as one of them is. A sum may therefore have
//! both only if each of its parts has both.

use super::UNIT_BYTES;
use crate::throttle::NodeShare;

/// Sum of reservations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReservedSum {
    iops: u64,
    bps: u64,
    /// True if a part reserves only bytes.
    lacks_iops: bool,
    /// True if a part reserves only requests.
    lacks_bps: bool,
}

impl ReservedSum {
    pub(super) const fn of(share: NodeShare) -> Self {
        let (iops, bps) = (share.iops_reservation(), share.bps_reservation());
        Self { iops, bps, lacks_iops: iops == 0 && bps > 0, lacks_bps: bps == 0 && iops > 0 }
    }

    pub(super) const fn is_empty(self) -> bool {
        self.iops == 0 && self.bps == 0
    }

    fn combine(self, other: Self, rate: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            iops: rate(self.iops, other.iops),
            bps: rate(self.bps, other.bps),
            lacks_iops: self.lacks_iops || other.lacks_iops,
            lacks_bps: self.lacks_bps || other.lacks_bps,
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        self.combine(other, u64::saturating_add)
    }

    pub(super) fn minus(self, other: Self) -> Self {
        self.combine(other, u64::saturating_sub)
    }

    pub(super) fn max(self, other: Self) -> Self {
        self.combine(other, u64::max)
    }

    /// This fraction of the rates.
    pub(super) fn part(self, fraction: f64) -> Self {
        let part = |rate: u64| (rate as f64 * fraction + 0.5) as u64;
        Self { iops: part(self.iops), bps: part(self.bps), ..self }
    }

    /// Gives a share these reservations. If some parts reserve only requests and others only bytes,
    /// the bytes count as requests of [`UNIT_BYTES`].
    pub(super) const fn reserve(self, share: NodeShare) -> NodeShare {
        match (self.lacks_iops, self.lacks_bps) {
            (false, false) => share.with_reservation(self.iops, self.bps),
            (true, false) => share.with_reservation(0, self.bps),
            (false, true) => share.with_reservation(self.iops, 0),
            (true, true) => {
                let units = self.bps.div_ceil(UNIT_BYTES);
                share.with_reservation(self.iops.saturating_add(units), 0)
            }
        }
    }
}
