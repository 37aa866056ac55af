//! A promise of the cluster's limits that a disk or a group is served without.
//!
//! Only data: who leaves promises out, and makes them later, is `promises`.

use api::UnmetReservation;
use policy::throttle::NodeShare;

/// Of one disk or group.
#[derive(Clone, Debug)]
pub struct LeftOut {
    /// What it is to be promised, in operations and bytes per second.
    pub(super) wanted: [u64; 2],
    pub(super) why: String,
    pub(super) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Untold,
    Told,
    /// Promised again here, and others may not know it yet. Whether it was told that it was not.
    Tried(bool),
}

impl LeftOut {
    /// For `weir status`.
    pub(crate) fn status(&self) -> UnmetReservation {
        let [iops, bps] = self.wanted.map(|amount| (amount > 0).then_some(amount));
        UnmetReservation { iops_reservation: iops, bps_reservation: bps, why: self.why.clone() }
    }
}

/// By their names, as far as there are some.
pub(super) fn reservations(wanted: [u64; 2]) -> impl Iterator<Item = (&'static str, u64)> {
    ["iops-reservation", "bps-reservation"].into_iter().zip(wanted).filter(|(_, amount)| *amount > 0)
}

/// What a share promises, in operations and bytes per second.
pub(super) fn wanted_of(share: NodeShare) -> [u64; 2] {
    [share.iops_reservation(), share.bps_reservation()]
}
