//! Limits, shares, reservations and groups of several disks and groups, applied together.
//!
//! A valid final state need not be reachable one object at a time: a reservation that moves from
//! one disk to another does not fit until the first gives it up. Therefore all changing objects
//! first give up their reservations, then change limits and groups, then book their reservations.

use std::sync::Arc;

use anyhow::Context as _;
use block::{
    disk::Disk,
    layer::throttle::{DiskSettings, ThrottleGroup, GroupSettings},
};
use policy::throttle::{ThrottleError, NodeShare};

use super::applied::{self, Named};

/// Settings of a disk or group, and the group that contains a disk.
#[derive(Clone)]
pub(crate) struct Seat {
    pub(crate) node: Node,
    pub(crate) settings: GroupSettings,
    pub(crate) group: Option<Arc<ThrottleGroup>>,
}

#[derive(Clone)]
pub(crate) enum Node {
    Group(Arc<ThrottleGroup>),
    Disk(Arc<Disk>),
}

impl Seat {
    /// Current settings.
    pub(crate) fn now(node: &Node) -> Self {
        match node {
            Node::Group(group) => {
                Self { node: node.clone(), settings: group.settings(), group: group.parent().cloned() }
            }
            Node::Disk(disk) => {
                let DiskSettings { limits, share, watermark } = disk.throttle().settings();
                let settings = GroupSettings { limits, share, watermark };
                Self { node: node.clone(), settings, group: disk.throttle().group() }
            }
        }
    }

    pub(crate) fn without_promises(mut self) -> Self {
        self.settings.share = promising_nothing(self.settings.share);
        self
    }

    /// Applies the settings.
    ///
    /// # Errors
    /// Reason of the rejection; the object is unchanged.
    pub(crate) fn take(&self) -> Result<(), ThrottleError> {
        let GroupSettings { limits, share, watermark } = self.settings;
        match &self.node {
            // A quota changes the limits concurrently; keep those in force.
            Node::Group(group) if group.quota_lease().is_some() => {
                group.set(GroupSettings { limits: group.settings().limits, ..self.settings })
            }
            Node::Group(group) => group.set(self.settings),
            Node::Disk(disk) => {
                disk.throttle().configure_and_move(DiskSettings { limits, share, watermark }, self.group.as_ref())
            }
        }
    }

    /// Settings by name.
    pub(crate) fn values(&self) -> Vec<Named> {
        applied::of_throttle(&self.settings, self.group.as_ref().map_or("", |group| group.name()))
    }

    /// Kind and name of the object.
    pub(crate) fn named(&self) -> (&'static str, String) {
        match &self.node {
            Node::Group(group) => ("group", group.name().to_owned()),
            Node::Disk(disk) => ("disk", disk.name().to_string()),
        }
    }
}

pub(crate) fn promising_nothing(share: NodeShare) -> NodeShare {
    share.with_reservation(0, 0)
}

/// Applies all seats. Groups must precede their members.
///
/// # Errors
/// The first seat that is rejected; others may be in force by then. Applying the previous seats
/// always succeeds.
pub(crate) fn put(seats: &[Seat]) -> anyhow::Result<()> {
    let take = |seat: &Seat| {
        seat.take().with_context(|| {
            let (kind, name) = seat.named();
            format!("{kind} {name}")
        })
    };
    for seat in seats {
        take(&Seat::now(&seat.node).without_promises())?;
    }
    for seat in seats {
        take(&seat.clone().without_promises())?;
    }
    seats.iter().try_for_each(take)
}
