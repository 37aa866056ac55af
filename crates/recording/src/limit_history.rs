//! Limits of disks and groups over time, from recordings.
//!
//! ```text
//!   recordings ─► changes by owner and time ─► limits of a disk and of its groups ─► lines of a chart
//! ```
//!
//! The groups of a disk are those that it, and each group above it, belonged to at the time.
//! Memory is bounded: changes beyond [`MAX_CHANGES`] are counted and dropped.

use std::{collections::HashMap, ops::Range};

use policy::throttle::MAX_LEVELS;

use super::file::{LimitChange, LimitOwner};

// Limit of changes that are stored.
const MAX_CHANGES: usize = 100_000;
// Limit of the bytes of their names.
const MAX_NAME_BYTES: usize = 64 << 20;

/// Changes of limits by owner.
#[derive(Debug, Default)]
pub struct LimitHistory {
    /// Sorted by time after [`LimitHistory::sort`].
    disks: HashMap<String, Vec<LimitChange>>,
    groups: HashMap<String, Vec<LimitChange>>,
    changes: usize,
    name_bytes: usize,
    dropped: u64,
}

impl LimitHistory {
    /// Stores a change unless it repeats the owner's previous one.
    pub fn note(&mut self, change: LimitChange) {
        let bytes = change.name.len() + change.group.as_ref().map_or(0, String::len);
        if self.changes == MAX_CHANGES || self.name_bytes + bytes > MAX_NAME_BYTES {
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

    /// Number of changes that were dropped.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Adds to the number of changes that were dropped.
    pub(crate) fn drop_further(&mut self, changes: u64) {
        self.dropped += changes;
    }

    /// True if no recording contains limits.
    pub fn is_empty(&self) -> bool {
        self.changes == 0
    }

    /// Removes and returns all changes; those of an owner in the order in which they were stored.
    pub fn drain(&mut self) -> impl Iterator<Item = LimitChange> + use<> {
        let Self { disks, groups, .. } = std::mem::take(self);
        disks.into_values().chain(groups.into_values()).flatten()
    }

    /// Sorts the changes of each owner by time.
    pub fn sort(&mut self) {
        for changes in self.disks.values_mut().chain(self.groups.values_mut()) {
            // Stable: of several changes at one instant the last one stored remains in force.
            changes.sort_by_key(|change| change.at_ns);
            // Recordings that overlap or follow each other repeat the limits at their start.
            changes.dedup_by(|later, earlier| is_repeated(earlier, later));
        }
    }

    /// Calls `visitor` for each period with the limits that applied to a disk, its own and those
    /// of its groups. Periods of one owner are sorted by time and do not overlap.
    pub fn visit(&self, disk: &str, visitor: &mut dyn FnMut(RecordedLimitPeriod<'_>)) {
        let changes = self.disks.get(disk).map_or(&[][..], Vec::as_slice);
        self.visit_levels(visitor, None, changes, 0..u64::MAX, MAX_LEVELS);
    }

    /// Visits the limits of one owner and then those of the groups above it; the group is `None`
    /// for the disk itself. `levels` is the remaining depth. It bounds the recursion, since groups
    /// in an untrusted recording may form a cycle.
    fn visit_levels(
        &self,
        visitor: &mut dyn FnMut(RecordedLimitPeriod<'_>),
        owner: Option<&str>,
        changes: &[LimitChange],
        during: Range<u64>,
        levels: usize,
    ) {
        // Visits only changes of that period, so a level costs at most one pass over all changes.
        let first = changes.partition_point(|change| change.at_ns <= during.start).saturating_sub(1);
        for (place, change) in changes.iter().enumerate().skip(first) {
            if change.at_ns >= during.end {
                break;
            }
            let end_ns = changes.get(place + 1).map_or(u64::MAX, |next| next.at_ns);
            let during_ns = change.at_ns.max(during.start)..end_ns.min(during.end);
            if during_ns.is_empty() {
                continue;
            }
            visitor(RecordedLimitPeriod { group: owner, change, during_ns: during_ns.clone() });
            let above = change.group.as_ref().filter(|_| levels > 0);
            if let Some((group, changes)) = above.and_then(|group| self.groups.get_key_value(group)) {
                // Only for the period in which the owner belonged to this group.
                self.visit_levels(visitor, Some(group), changes, during_ns, levels - 1);
            }
        }
    }
}

/// Limits that applied to a disk for some period.
#[derive(Debug)]
pub struct RecordedLimitPeriod<'a> {
    /// Group with the limits; `None` for the disk's own limits.
    pub group: Option<&'a str>,
    /// Change that put them in force.
    pub change: &'a LimitChange,
    /// Period in nanoseconds since time 0 of the recording.
    pub during_ns: Range<u64>,
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

    #[test]
    fn changes_are_bounded() {
        let mut history = LimitHistory::default();
        for number in 0..MAX_CHANGES as u64 + 5 {
            let mut limits = Limits::default();
            limits.limit_mut(LimitKind::IopsTotal).rate = 1 + number % 7;
            let (name, watermark) = ("vm1".to_owned(), Watermark::ALWAYS);
            history.note(LimitChange {
                at_ns: number,
                owner: LimitOwner::Disk,
                name,
                group: None,
                limits,
                watermark,
            });
        }
        assert_eq!((history.changes, history.dropped()), (MAX_CHANGES, 5));
    }
}
