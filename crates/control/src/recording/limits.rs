//! Limits of a disk or group in the form that the recorder passes to its outputs.

use std::{collections::HashMap, sync::Arc};

use block::{disk::Disk, layer::throttle::ThrottleGroup};
use policy::{throttle::Limits, watermark::Watermark};
use recording::{LimitChange, LimitOwner};

/// Kind and name of a disk or group.
pub(super) type LimitKey = (LimitOwner, Arc<str>);

/// Limits in force, by disk and group of a recording.
pub(super) type LimitsByOwner = HashMap<LimitKey, OwnerLimits>;

/// Limits of a disk or group, and its parent group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnerLimits {
    owner: LimitOwner,
    name: Arc<str>,
    group: Option<Arc<str>>,
    limits: Limits,
    watermark: Watermark,
}

impl OwnerLimits {
    /// Own limits of a disk.
    pub(super) fn of_disk(disk: &Disk) -> Self {
        let settings = disk.throttle().settings();
        Self {
            owner: LimitOwner::Disk,
            name: Arc::clone(disk.name()),
            group: disk.throttle().group().map(|group| group.name().into()),
            limits: disk.throttle().limits(),
            watermark: settings.watermark,
        }
    }

    /// Own limits of a group.
    pub(super) fn of_group(group: &ThrottleGroup) -> Self {
        let settings = group.settings();
        Self {
            owner: LimitOwner::Group,
            name: group.name().into(),
            group: group.parent().map(|group| group.name().into()),
            limits: group.limits(),
            watermark: settings.watermark,
        }
    }

    /// Absence of limits, for a disk or group that was removed.
    pub(super) fn removed((owner, name): LimitKey) -> Self {
        let (limits, watermark) = (Limits::default(), Watermark::ALWAYS);
        Self { owner, name, group: None, limits, watermark }
    }

    pub(super) fn key(&self) -> LimitKey {
        (self.owner, Arc::clone(&self.name))
    }

    /// True if neither the owner nor a group above it limits anything.
    pub(super) fn is_none(&self) -> bool {
        self.limits.is_unlimited() && self.group.is_none()
    }

    /// Record of these limits from an instant on.
    pub(super) fn change(&self, at_ns: u64) -> LimitChange {
        let Self { owner, name, group, limits, watermark } = self;
        LimitChange {
            at_ns,
            owner: *owner,
            name: name.to_string(),
            group: group.as_ref().map(ToString::to_string),
            limits: *limits,
            watermark: *watermark,
        }
    }
}

#[cfg(test)]
impl OwnerLimits {
    /// Group with a limit of `iops-total`.
    pub(super) fn of_group_with(name: &str, iops: u64) -> Self {
        let mut limits = Limits::default();
        limits.limit_mut(policy::throttle::LimitKind::IopsTotal).rate = iops;
        Self { limits, ..Self::removed((LimitOwner::Group, name.into())) }
    }
}
