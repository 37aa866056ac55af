//! Names and numbers of disks and limits in recordings.

use std::{collections::HashMap, sync::Arc};

use block::{disk::Disk, recorder::DroppedRecords};
use policy::throttle::{CauseKind, LevelCause, LimitKind, LimitPart, LimitSetting, MAX_LEVELS};

use super::limits::OwnerLimits;

/// A disk, with the data that the recording engine needs.
#[derive(Debug)]
pub(super) struct RecordedDiskEntry {
    pub(super) number: u32,
    pub(super) name: Arc<str>,
    /// Its groups, nearest first.
    groups: Vec<Arc<str>>,
    /// Numbers and names of limits, by level and kind.
    limits: Vec<(u32, Arc<str>)>,
    /// Limits of the disk and of its groups.
    pub(super) owner_limits: Vec<OwnerLimits>,
    /// Counter of records that were dropped because a buffer was full.
    pub(super) dropped: Arc<DroppedRecords>,
}

impl RecordedDiskEntry {
    /// True if a recording of these disks and groups includes this disk. An empty list includes all
    /// disks.
    pub(super) fn is_recorded_by(&self, names: &[String]) -> bool {
        let matches =
            |name: &String| **name == *self.name || self.groups.iter().any(|group| **name == **group);
        names.is_empty() || names.iter().any(matches)
    }

    /// Number and name of a throttle cause, such as `iops-total`, or `bps-read@gold` for a group.
    pub(super) fn cause_name(&self, cause: LevelCause) -> Option<(u32, &Arc<str>)> {
        let CauseKind::Limit(kind) = cause.kind else { return None };
        let (number, name) = self.limits.get(cause.level * LimitKind::ALL.len() + kind.index())?;
        Some((*number, name))
    }
}

#[cfg(test)]
impl RecordedDiskEntry {
    /// Disk without group and limits.
    pub(super) fn without_group(number: u32, name: &str) -> Self {
        let (groups, limits, in_force) = (Vec::new(), Vec::new(), Vec::new());
        Self { number, name: name.into(), groups, limits, owner_limits: in_force, dropped: Arc::default() }
    }
}

/// Numbers of all disks and limits recorded so far. A name keeps its number.
#[derive(Debug, Default)]
pub(super) struct RecordingNumbers {
    disks: HashMap<Arc<str>, u32>,
    limits: HashMap<Arc<str>, u32>,
}

impl RecordingNumbers {
    /// Assigns numbers to a disk and to the limits of the disk and its current groups.
    pub(super) fn describe(&mut self, disk: &Disk) -> RecordedDiskEntry {
        let above = std::iter::successors(disk.throttle().group(), |group| group.parent().cloned());
        let above: Vec<_> = above.take(MAX_LEVELS).collect();
        let groups: Vec<Arc<str>> = above.iter().map(|group| group.name().into()).collect();
        let of_groups = above.iter().map(|group| OwnerLimits::of_group(group));
        let in_force = std::iter::once(OwnerLimits::of_disk(disk)).chain(of_groups).collect();
        let kinds = |at: &str| {
            LimitKind::ALL.map(|kind| format!("{}{at}", LimitSetting::Limit(kind, LimitPart::Rate).name()))
        };
        let names = kinds("").into_iter().chain(groups.iter().flat_map(|group| kinds(&format!("@{group}"))));
        let limits = names.map(|name| number_of(&mut self.limits, name.into())).collect();
        let (number, name) = number_of(&mut self.disks, Arc::clone(disk.name()));
        RecordedDiskEntry {
            number,
            name,
            groups,
            limits,
            owner_limits: in_force,
            dropped: Arc::clone(disk.recording().dropped()),
        }
    }
}

fn number_of(numbers: &mut HashMap<Arc<str>, u32>, name: Arc<str>) -> (u32, Arc<str>) {
    let next = u32::try_from(numbers.len()).expect("fewer than 2^32 names");
    (*numbers.entry(Arc::clone(&name)).or_insert(next), name)
}
