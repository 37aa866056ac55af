//! Unmet reservation: a reservation in a cluster's limits that a disk or group is served without.
//!
//! Data only; `unmet_reservations` decides when a reservation is unmet and when it is met.

use api::UnmetReservation;
use policy::throttle::NodeShare;

/// Unmet reservation of one disk or group.
#[derive(Clone, Debug)]
pub struct UnmetReservationEntry {
    /// Configured reservation, in operations and bytes per second.
    pub(super) wanted: [u64; 2],
    pub(super) why: String,
    pub(super) state: UnmetReservationState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnmetReservationState {
    Unreported,
    Reported,
    /// Booked again on this host, not yet confirmed by the cluster. True if the unmet reservation
    /// was already reported.
    BookedAgain(bool),
}

impl UnmetReservationEntry {
    /// Form in `weir status`.
    pub(crate) fn to_status(&self) -> UnmetReservation {
        let [iops, bps] = self.wanted.map(|amount| (amount > 0).then_some(amount));
        UnmetReservation { iops_reservation: iops, bps_reservation: bps, reason: self.why.clone() }
    }
}

/// The nonzero reservations with their keys.
pub(super) fn named_reservations(wanted: [u64; 2]) -> impl Iterator<Item = (&'static str, u64)> {
    ["iops-reservation", "bps-reservation"].into_iter().zip(wanted).filter(|(_, amount)| *amount > 0)
}

/// Reservation of a share, in operations and bytes per second.
pub(super) fn reservation_of(share: NodeShare) -> [u64; 2] {
    [share.iops_reservation(), share.bps_reservation()]
}
