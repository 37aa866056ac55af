//! Names and numbers of disks and limits in recordings.

use std::{collections::HashMap, sync::Arc};

use block::{disk::Disk, recorder::DroppedRecords};
use policy::throttle::{LevelCause, LimitKind, MAX_LEVELS, LimitPart, LimitSetting};

use super::limits::LimitsInForce;

/// Disk with the data that the engine needs.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) number: u32,
    pub(super) name: Arc<str>,
    /// Its groups, nearest first.
    groups: Vec<Arc<str>>,
    /// Numbers and names of limits, by level and kind.
    limits: Vec<(u32, Arc<str>)>,
    /// Its own limits, and those of its groups.
    pub(super) in_force: Vec<LimitsInForce>,
    /// Counter of its dropped records.
    pub(super) lost: Arc<DroppedRecords>,
}

impl Named {
    /// True if a recording of these disks and groups includes this disk; an empty list includes
    /// all.
    pub(super) fn is_one_of(&self, names: &[String]) -> bool {
        let is_own =
            |name: &String| **name == *self.name || self.groups.iter().any(|group| **name == **group);
        names.is_empty() || names.iter().any(is_own)
    }

    /// Number and name of a throttle cause, such as `iops-total`, or `bps-read@gold` for a group.
    pub(super) fn limit(&self, held: LevelCause) -> Option<(u32, &Arc<str>)> {
        let (number, name) = self.limits.get(held.level * LimitKind::ALL.len() + held.kind.index())?;
        Some((*number, name))
    }
}

#[cfg(test)]
impl Named {
    /// Disk without group and limits.
    pub(super) fn alone(number: u32, name: &str) -> Self {
        let (groups, limits, in_force) = (Vec::new(), Vec::new(), Vec::new());
        Self { number, name: name.into(), groups, limits, in_force, lost: Arc::default() }
    }
}

/// Assigned numbers. A name keeps its number.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    disks: HashMap<Arc<str>, u32>,
    limits: HashMap<Arc<str>, u32>,
}

impl Numbers {
    /// Describes a disk with its current groups.
    pub(super) fn name(&mut self, disk: &Disk) -> Named {
        let above = std::iter::successors(disk.throttle().group(), |group| group.parent().cloned());
        let above: Vec<_> = above.take(MAX_LEVELS).collect();
        let groups: Vec<Arc<str>> = above.iter().map(|group| group.name().into()).collect();
        let of_groups = above.iter().map(|group| LimitsInForce::of_group(group));
        let in_force = std::iter::once(LimitsInForce::of_disk(disk)).chain(of_groups).collect();
        let kinds =
            |at: &str| LimitKind::ALL.map(|kind| format!("{}{at}", LimitSetting::Limit(kind, LimitPart::Rate).name()));
        let names = kinds("").into_iter().chain(groups.iter().flat_map(|group| kinds(&format!("@{group}"))));
        let limits = names.map(|name| number(&mut self.limits, name.into())).collect();
        let (number, name) = number(&mut self.disks, Arc::clone(disk.name()));
        Named { number, name, groups, limits, in_force, lost: Arc::clone(disk.recording().dropped()) }
    }
}

fn number(known: &mut HashMap<Arc<str>, u32>, name: Arc<str>) -> (u32, Arc<str>) {
    let next = u32::try_from(known.len()).expect("fewer than there is memory for");
    (*known.entry(Arc::clone(&name)).or_insert(next), name)
}
