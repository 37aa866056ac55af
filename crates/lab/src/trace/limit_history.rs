//! The limits of disks and groups over time, as recordings have them.
//!
//! ```text
//!   recordings ─► changes by owner and time ─► a disk's limits and those of its groups ─► lines of a chart
//! ```
//!
//! A disk's groups are those that it, and each group above it, was a member of at the time. Memory
//! is bounded: changes beyond [`MOST_CHANGES`] are counted and not kept.

use std::{collections::HashMap, ops::Range};

use policy::throttle::MAX_LEVELS;

use super::recording::{LimitChange, LimitOwner};
use crate::limit_lines::LimitRates;

/// Largest number of changes that are kept.
const MOST_CHANGES: usize = 100_000;
/// Largest number of bytes of their names.
const MOST_NAME_BYTES: usize = 64 << 20;

/// Changes of limits by owner.
#[derive(Debug, Default)]
pub(crate) struct LimitHistory {
    /// By time once [`LimitHistory::sort`] was called.
    disks: HashMap<String, Vec<LimitChange>>,
    groups: HashMap<String, Vec<LimitChange>>,
    changes: usize,
    name_bytes: usize,
    dropped: u64,
}

impl LimitHistory {
    /// Keeps a change unless it repeats the previous one of the owner.
    pub(crate) fn note(&mut self, change: LimitChange) {
        let bytes = change.name.len() + change.group.as_ref().map_or(0, String::len);
        if self.changes == MOST_CHANGES || self.name_bytes + bytes > MOST_NAME_BYTES {
            self.dropped += 1;
            return;
        }
        let by_name = match change.owner {
            LimitOwner::Disk => &mut self.disks,
            LimitOwner::Group => &mut self.groups,
        };
        let known = by_name.entry(change.name.clone()).or_default();
        if known.last().is_none_or(|last| !is_repeated(last, &change)) {
            known.push(change);
            self.changes += 1;
            self.name_bytes += bytes;
        }
    }

    /// Number of changes that were not kept.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Counts further changes that were not kept.
    pub(crate) fn drop_further(&mut self, changes: u64) {
        self.dropped += changes;
    }

    /// True if no recording has limits.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes == 0
    }

    /// Removes all changes, those of an owner in the order of their notes.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = LimitChange> + use<> {
        let Self { disks, groups, .. } = std::mem::take(self);
        disks.into_values().chain(groups.into_values()).flatten()
    }

    /// Puts the changes of each owner in the order of time.
    pub(crate) fn sort(&mut self) {
        for changes in self.disks.values_mut().chain(self.groups.values_mut()) {
            changes.sort_by_key(|change| change.at_ns);
            changes.dedup_by(|later, earlier| is_repeated(earlier, later));
        }
    }

    /// The limits that applied to a disk, its own and those of its groups.
    pub(crate) fn limits_of(&self, disk: &str) -> LimitRates {
        let mut limits = LimitRates::default();
        let changes = self.disks.get(disk).map_or(&[][..], Vec::as_slice);
        self.add(&mut limits, None, changes, 0..u64::MAX, MAX_LEVELS);
        limits
    }

    /// `of` is the group that the changes belong to, and `levels` the groups above the disk that
    /// remain. A recording is untrusted: its groups may form a circle.
    fn add(
        &self,
        limits: &mut LimitRates,
        of: Option<&str>,
        changes: &[LimitChange],
        during: Range<u64>,
        levels: usize,
    ) {
        // Only changes of that time are looked at, so a level costs at most one pass over all.
        let first = changes.partition_point(|change| change.at_ns <= during.start).saturating_sub(1);
        for (place, change) in changes.iter().enumerate().skip(first) {
            if change.at_ns >= during.end {
                break;
            }
            let end_ns = changes.get(place + 1).map_or(u64::MAX, |next| next.at_ns);
            let during = change.at_ns.max(during.start)..end_ns.min(during.end);
            if during.is_empty() {
                continue;
            }
            limits.add_during(of, &change.limits, change.watermark, during.clone());
            let above = change.group.as_ref().filter(|_| levels > 0);
            if let Some((group, changes)) = above.and_then(|group| self.groups.get_key_value(group)) {
                self.add(limits, Some(group), changes, during, levels - 1);
            }
        }
    }
}

fn is_repeated(earlier: &LimitChange, later: &LimitChange) -> bool {
    *earlier == LimitChange { at_ns: earlier.at_ns, ..later.clone() }
}

#[cfg(test)]
mod tests {
    use policy::{
        throttle::{LimitKind, Limits},
        watermark::Watermark,
    };

    use super::*;
    use crate::{limit_lines::lines_of, result::Series};

    const S: u64 = 1_000_000_000;

    fn change(at_s: u64, owner: LimitOwner, name: &str, group: Option<&str>, iops: u64) -> LimitChange {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = iops;
        let (name, group) = (name.to_owned(), group.map(str::to_owned));
        LimitChange { at_ns: at_s * S, owner, name, group, limits, watermark: Watermark::ALWAYS }
    }

    fn drawn(history: &LimitHistory, disk: &str) -> Vec<(String, Vec<(f64, f64)>)> {
        let rates = [Series { name: "done".to_owned(), points: vec![(0.0, 90.0), (30.0, 90.0)] }];
        let lines = lines_of(&history.limits_of(disk).iops, &rates).0;
        lines.into_iter().map(|line| (line.name, line.points)).collect()
    }

    #[test]
    fn a_change_of_a_limit_is_a_step() {
        let mut history = LimitHistory::default();
        for (at_s, iops) in [(0, 100), (10, 100), (20, 200)] {
            history.note(change(at_s, LimitOwner::Disk, "vm1", None, iops));
        }
        let points = vec![(0.0, 100.0), (20.0, 200.0), (30.0, 200.0)];
        assert_eq!(drawn(&history, "vm1"), [("iops-total 100 → 200".to_owned(), points)]);
        assert_eq!(drawn(&history, "vm2"), []);
    }

    #[test]
    fn a_group_s_limit_applies_while_the_disk_is_a_member() {
        let mut history = LimitHistory::default();
        history.note(change(20, LimitOwner::Disk, "vm1", None, 0));
        history.note(change(0, LimitOwner::Disk, "vm1", None, 0));
        history.note(change(10, LimitOwner::Disk, "vm1", Some("gold"), 0));
        history.note(change(0, LimitOwner::Group, "gold", Some("host"), 100));
        history.note(change(15, LimitOwner::Group, "gold", Some("host"), 150));
        history.note(change(0, LimitOwner::Group, "host", None, 200));
        history.sort();
        let gold = vec![(10.0, 100.0), (15.0, 150.0), (20.0, 150.0)];
        let host = vec![(10.0, 200.0), (20.0, 200.0)];
        let expected =
            [("iops-total 100 → 150 of gold".to_owned(), gold), ("iops-total 200 of host".to_owned(), host)];
        assert_eq!(drawn(&history, "vm1"), expected);
    }

    #[test]
    fn groups_in_a_circle_end() {
        let mut history = LimitHistory::default();
        history.note(change(0, LimitOwner::Disk, "vm1", Some("a"), 0));
        history.note(change(0, LimitOwner::Group, "a", Some("b"), 100));
        history.note(change(0, LimitOwner::Group, "b", Some("a"), 150));
        let names: Vec<_> = drawn(&history, "vm1").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["iops-total 100 of a", "iops-total 150 of b"]);
    }

    #[test]
    fn changes_are_bounded() {
        let mut history = LimitHistory::default();
        for number in 0..MOST_CHANGES as u64 + 5 {
            history.note(change(number, LimitOwner::Disk, "vm1", None, 1 + number % 7));
        }
        assert_eq!((history.changes, history.dropped()), (MOST_CHANGES, 5));
    }
}
