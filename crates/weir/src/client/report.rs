//! The daemon's status with lookups by name, and the errors of failed lookups.

use std::ops::Deref;

use api::{
    DaemonStatus, DiskStatus, ExportStatus, GroupStatus, LatencyControlStatus, MemberSettings,
    PrefetchSettings, PrefetchStatus, ThrottleStatus, WatermarkStatus,
};
use policy::prefetch::{PrefetchMode, PrefetchSetting};
use serde::Serialize;
use settings::prefetch::short_name;

use super::latency::DiskRequestTimes;

/// A [`DaemonStatus`], with latencies from a second command.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct DaemonReport {
    pub(crate) status: DaemonStatus,
    /// Latency histograms, from a command of their own.
    pub(crate) latencies: DiskRequestTimes,
}

impl Deref for DaemonReport {
    type Target = DaemonStatus;

    fn deref(&self) -> &DaemonStatus {
        &self.status
    }
}

/// True if the export serves a virtual machine.
pub(crate) fn is_vhost_user(export: &ExportStatus) -> bool {
    export.kind == "vhost-user-blk"
}

/// Mounts and stacked devices of a device of this host: `/mnt/vm1 dm-0`.
pub(crate) fn device_users(export: &ExportStatus) -> Option<String> {
    let lists = [&export.mounts, &export.holders];
    let users: Vec<_> = lists.into_iter().flatten().flatten().map(String::as_str).collect();
    (!users.is_empty()).then(|| users.join(" "))
}

/// True if the mode of prefetching is not `off`.
pub(crate) fn prefetches(settings: &PrefetchSettings) -> bool {
    settings.mode != PrefetchMode::Off.name()
}

/// The mode of prefetching, and whether it has stopped itself: `auto`, `auto suspended`.
pub(crate) fn prefetch_state(settings: &PrefetchSettings, status: &PrefetchStatus) -> String {
    let is_closed = prefetches(settings) && status.suspended;
    format!("{}{}", settings.mode, if is_closed { " suspended" } else { "" })
}

/// Memory limit of prefetching, in bytes.
pub(crate) fn prefetch_memory(settings: &PrefetchSettings) -> u64 {
    settings.numbers.get(short_name(PrefetchSetting::Memory)).copied().unwrap_or(0)
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum StatusNode<'a> {
    Disk(&'a DiskStatus),
    Group(&'a GroupStatus),
}

impl<'a> StatusNode<'a> {
    /// `disk` or `group`: also the name of its table in the config file.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Disk(_) => "disk",
            Self::Group(_) => "group",
        }
    }

    pub(crate) fn settings(self) -> &'a MemberSettings {
        match self {
            Self::Disk(disk) => &disk.settings,
            Self::Group(group) => &group.settings,
        }
    }

    pub(crate) fn watermark_status(self) -> &'a WatermarkStatus {
        match self {
            Self::Disk(disk) => &disk.watermark_status,
            Self::Group(group) => &group.watermark_status,
        }
    }

    pub(crate) fn latency_control(self) -> &'a LatencyControlStatus {
        match self {
            Self::Disk(disk) => &disk.latency_control,
            Self::Group(group) => &group.latency_control,
        }
    }

    pub(crate) fn throttle(self) -> &'a ThrottleStatus {
        match self {
            Self::Disk(disk) => &disk.throttle,
            Self::Group(group) => &group.throttle,
        }
    }
}

impl DaemonReport {
    pub(crate) fn read(text: &str) -> Result<Self, serde_json::Error> {
        let mut status = DaemonStatus::from_json(text)?;
        // For the binary search in `group`.
        status.groups.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(Self { status, latencies: DiskRequestTimes::default() })
    }

    pub(crate) fn find(&self, name: &str) -> Option<StatusNode<'_>> {
        let disk = self.disks.iter().find(|disk| disk.name == name).map(StatusNode::Disk);
        disk.or_else(|| self.group(name).map(StatusNode::Group))
    }

    pub(crate) fn group(&self, name: &str) -> Option<&GroupStatus> {
        let found = self.groups.binary_search_by(|group| group.name.as_str().cmp(name)).ok()?;
        self.groups.get(found)
    }

    /// Groups above a member, nearest first. Bounded by the number of groups, even if a malformed
    /// report has a cycle.
    pub(crate) fn groups_above(&self, settings: &MemberSettings) -> Vec<&GroupStatus> {
        let mut above = Vec::new();
        let mut next = settings.group.as_deref();
        while let Some(group) = next.and_then(|name| self.group(name)) {
            // A report is external input: a cycle must not loop forever.
            if above.len() == self.groups.len() {
                break;
            }
            above.push(group);
            next = group.settings.group.as_deref();
        }
        above
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let disks = self.disks.iter().map(|disk| disk.name.as_str());
        disks.chain(self.groups.iter().map(|group| group.name.as_str()))
    }

    pub(crate) fn unknown_disk_error(&self, name: &str) -> String {
        let unknown = || format!("{name}: no disk has this name (`weir status` lists them)");
        self.unavailable_error(name).unwrap_or_else(unknown)
    }

    pub(crate) fn is_unavailable(&self, disk: &str) -> bool {
        self.unavailable.iter().any(|entry| entry.name == disk)
    }

    fn unavailable_error(&self, name: &str) -> Option<String> {
        self.is_unavailable(name)
            .then(|| format!("{name}: its image is not available yet (`weir status` shows the reason)"))
    }

    /// Error for a name of no disk and no group.
    pub(crate) fn unknown_name_error(&self, name: &str) -> String {
        if name.is_empty() {
            return "the name is empty (`weir status` lists disks and groups)".to_owned();
        }
        if let Some(why) = self.unavailable_error(name) {
            return why;
        }
        let advice = match settings::suggest::nearest(name, self.names()) {
            Some(near) => format!("did you mean {near:?}?"),
            None => "`weir status` lists them".to_owned(),
        };
        format!("{name}: no disk and no group has this name ({advice})")
    }
}
