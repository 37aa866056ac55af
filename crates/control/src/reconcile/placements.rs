//! Limits, shares, reservations and groups of several disks and groups, applied together.
//!
//! A valid final state need not be reachable one object at a time: a reservation that moves from
//! one disk to another fits only after the first disk has released it. Therefore all changing
//! objects first release their reservations, then change limits and groups, then book them again.

use std::sync::Arc;

use anyhow::Context as _;
use block::{
    disk::Disk,
    layer::throttle::{GroupSettings, ThrottleGroup},
};
use policy::{
    schedule::ScheduledLimits,
    throttle::{NodeShare, ThrottleError},
};

use super::change_report::{self, NamedValue};

/// Settings of a disk or group, and the group that contains a disk.
#[derive(Clone)]
pub(crate) struct MemberPlacement {
    pub(crate) node: GroupOrDisk,
    pub(crate) settings: GroupSettings,
    pub(crate) scheduled: ScheduledLimits,
    pub(crate) group: Option<Arc<ThrottleGroup>>,
}

#[derive(Clone)]
pub(crate) enum GroupOrDisk {
    Group(Arc<ThrottleGroup>),
    Disk(Arc<Disk>),
}

impl MemberPlacement {
    /// Current settings.
    pub(crate) fn current(node: &GroupOrDisk) -> Self {
        match node {
            GroupOrDisk::Group(group) => {
                let (settings, scheduled) = (group.settings(), group.scheduled());
                Self { node: node.clone(), settings, scheduled, group: group.parent().cloned() }
            }
            GroupOrDisk::Disk(disk) => {
                let (settings, scheduled) = (disk.throttle().settings().into(), disk.throttle().scheduled());
                Self { node: node.clone(), settings, scheduled, group: disk.throttle().group() }
            }
        }
    }

    pub(crate) fn without_reservations(mut self) -> Self {
        self.settings.share = without_reservation(self.settings.share);
        self
    }

    /// Applies the settings.
    ///
    /// # Errors
    /// Reason of the rejection; the object is unchanged.
    pub(crate) fn apply(&self) -> Result<(), ThrottleError> {
        match &self.node {
            // A quota changes the limits concurrently; keep those in force.
            GroupOrDisk::Group(group) if group.quota_lease().is_some() => {
                group.set(GroupSettings { limits: group.settings().limits, ..self.settings })
            }
            GroupOrDisk::Group(group) => group.set_both(self.settings, self.scheduled.clone()),
            GroupOrDisk::Disk(disk) => {
                disk.throttle().place(self.settings.into(), Some(self.scheduled.clone()), self.group.as_ref())
            }
        }
    }

    /// Settings by name.
    pub(crate) fn values(&self) -> Vec<NamedValue> {
        let group = self.group.as_ref().map_or("", |group| group.name());
        let schedule = &self.scheduled.schedule;
        match self.node {
            GroupOrDisk::Group(_) => change_report::throttle_values(&self.settings, schedule, group),
            GroupOrDisk::Disk(_) => change_report::disk_throttle_values(&self.settings, schedule, group),
        }
    }

    /// Kind and name of the object.
    pub(crate) fn kind_and_name(&self) -> (&'static str, String) {
        match &self.node {
            GroupOrDisk::Group(group) => ("group", group.name().to_owned()),
            GroupOrDisk::Disk(disk) => ("disk", disk.name().to_string()),
        }
    }
}

pub(crate) fn without_reservation(share: NodeShare) -> NodeShare {
    share.with_reservation(0, 0)
}

/// Applies all placements. Groups must precede their members.
///
/// # Errors
/// The first placement that is rejected; others may be in force by then. Applying the previous
/// placements always succeeds.
pub(crate) fn apply_all(placements: &[MemberPlacement]) -> anyhow::Result<()> {
    let apply = |placement: &MemberPlacement| {
        placement.apply().with_context(|| {
            let (kind, name) = placement.kind_and_name();
            format!("{kind} {name}")
        })
    };
    for placement in placements {
        apply(&MemberPlacement::current(&placement.node).without_reservations())?;
    }
    for placement in placements {
        apply(&placement.clone().without_reservations())?;
    }
    placements.iter().try_for_each(apply)
}
