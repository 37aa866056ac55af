//! Limits, shares, promises and groups of several disks and groups, put in force together.
//!
//! What is allowed together need not be allowed one after the other: a promise that moves from one
//! disk to another is too much until the first has given it up. So all that change give up their
//! promises, take their places, and get their promises then.

use std::sync::Arc;

use anyhow::Context as _;
use block::{
    disk::Disk,
    layer::throttle::{DiskSettings, ThrottleGroup, GroupSettings},
};
use policy::throttle::{ThrottleError, NodeShare};

use super::applied::{self, Named};

/// A disk or a group, what it is held to, and of a disk the group that it is in.
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
    /// As it is now.
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

    /// Puts it in force.
    ///
    /// # Errors
    /// Why it cannot be; then it is as it was.
    pub(crate) fn take(&self) -> Result<(), ThrottleError> {
        let GroupSettings { limits, share, watermark } = self.settings;
        match &self.node {
            // What is lent of a cluster's limits changes meanwhile, and is not a seat's.
            Node::Group(group) if group.quota_lease().is_some() => {
                group.set(GroupSettings { limits: group.settings().limits, ..self.settings })
            }
            Node::Group(group) => group.set(self.settings),
            Node::Disk(disk) => {
                disk.throttle().configure_and_move(DiskSettings { limits, share, watermark }, self.group.as_ref())
            }
        }
    }

    /// Its settings, each by its name.
    pub(crate) fn values(&self) -> Vec<Named> {
        applied::of_throttle(&self.settings, self.group.as_ref().map_or("", |group| group.name()))
    }

    /// What it is, and its name.
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

/// Puts all in force, groups being there before what is in them.
///
/// # Errors
/// The first that cannot be; then some are in force. What was before can always be put again.
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
