//! Moves of disks to another group, in this tree or another: the bucket contents that a disk
//! carries along.
//!
//! ```text
//!            host ──────── host          above both: already charged there
//!              │             │
//!   level 2   gold  ──────► blue         levels above the disk: carried to the same level
//!              │             │
//!   level 1   left  ──────► right
//!              │             │
//!             disk ───────► disk         the disk's own limits: carried completely
//! ```
//!
//! A disk carries at most the contents of a group's buckets that its own requests can have caused
//! (`bucket/carried.rs`). The group that it leaves is not refunded. The group that it joins is at
//! most full afterwards, and keeps its rate.
//!
//! The disk stores the contents that it carried: another move carries them again, and its new
//! groups may lack the limits that they belong to. The stored contents leak like a group's bucket
//! that only this disk has filled, and follow changes of the group's limits. Without moves this
//! costs nothing.

use super::super::enforcement::Enforcement;
use super::super::limits::{LimitKind, Limits};
use super::super::node::{CarriedCharges, NodeId, NodeLimits, ThrottleNode};
use super::{ROOT, ThrottleTree};
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::vec::Vec;

impl<T> ThrottleTree<T> {
    /// Bucket contents of a disk, and the part of its groups' contents that the disk can have
    /// caused, for [`ThrottleTree::add_carried_charges`]. Call it before the disk is removed.
    ///
    /// `replacement` is the node that replaces the disk, if it is in this tree. Groups above both
    /// nodes have been charged already, so their part is carried but not charged again.
    ///
    /// # Panics
    /// Panics if either was removed.
    pub fn carried_charges(&self, disk: NodeId, replacement: Option<NodeId>, now: Instant) -> CarriedCharges {
        let now = self.now.max(now);
        let disk = &self.nodes[self.slot(disk)];
        let above: Vec<usize> = self.path_up(disk.parent).collect();
        let common_count = replacement.map_or(0, |replacement| {
            let other_above: Vec<usize> = self.path_up(self.nodes[self.slot(replacement)].parent).collect();
            above
                .iter()
                .rev()
                .zip(other_above.iter().rev())
                .take_while(|(group, other_group)| group == other_group)
                .count()
        });
        let part = |(level, slot): (usize, &usize)| self.nodes[*slot].carried_part(disk, level, now);
        let mut left_groups: Vec<_> = above.iter().enumerate().map(part).collect();
        left_groups.extend(disk.carried.iter().skip(above.len()).cloned());
        // `above` runs upwards, so the common groups are its last ones.
        let left_count = above.len() - common_count;
        let common_groups = left_groups.drain(left_count..above.len()).collect();
        CarriedCharges { own: disk.charged_contents(), left_groups, common_groups }
    }

    /// Adds the contents that a disk carries to its limits and to those of the groups above. Poll
    /// afterwards.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn add_carried_charges(&mut self, disk: NodeId, charged: CarriedCharges, now: Instant) {
        let slot = self.slot(disk);
        self.advance_to(now);
        let now = self.now;
        let CarriedCharges { own: own_contents, left_groups: mut carried, common_groups: mut common } =
            charged;
        if let Some(own_contents) = own_contents {
            self.nodes[slot].inherit_contents(own_contents, now);
        }
        let above: Vec<usize> = self.path_up(self.nodes[slot].parent).collect();
        let groups = &above[..above.len().saturating_sub(common.len())];
        if carried.len() < groups.len() {
            carried.resize(groups.len(), None);
        }
        for (group, group_carried) in groups.iter().zip(&mut carried) {
            if let Some(group_carried) = group_carried {
                self.nodes[*group].add_carried(group_carried, now);
            }
        }
        let beyond = carried.split_off(groups.len());
        carried.append(&mut common);
        carried.extend(beyond);
        // Without the empty levels at the end, `has_moved` remains false for a disk that carries
        // nothing.
        while carried.pop_if(|last| last.is_none()).is_some() {}
        self.has_moved |= !carried.is_empty();
        self.nodes[slot].carried = carried;
        self.settle_both_up(slot);
        for group in above {
            self.settle_both_up(group);
        }
    }

    /// Applies changed limits of a group to the contents that disks have carried into it.
    pub(super) fn apply_limits_to_carried(&mut self, group: usize, before: &Limits) {
        let now = self.now;
        self.for_each_carried(group, |group, carried| group.convert_carried(carried, before, now));
    }

    /// Applies changed enforcement of a group to the contents that disks have carried into it.
    /// If its limits were lifted, its buckets are raised to at least the carried level, because
    /// they may lack contents that were carried in meanwhile.
    pub(super) fn apply_enforcement_to_carried(&mut self, group: usize, before: Enforcement) {
        let now = self.now;
        self.for_each_carried(group, |group, carried| {
            let Some(limited) = &mut group.limited else { return };
            carried.enforce(before, group.enforcement, now);
            if before == Enforcement::Lifted {
                limited.buckets.raise_to_carried(&carried.buckets);
            }
        });
    }

    fn for_each_carried(
        &mut self,
        group: usize,
        mut visit: impl FnMut(&mut ThrottleNode<T>, &mut NodeLimits),
    ) {
        if !self.has_moved {
            return;
        }
        let level = self.nodes[group].level;
        let mut below: Vec<usize> = self.child_slots(group).collect();
        while let Some(slot) = below.pop() {
            below.extend(self.child_slots(slot));
            let up = self.nodes[slot].level - level - 1;
            let Some(mut carried) = self.nodes[slot].carried.get_mut(up).and_then(Option::take) else {
                continue;
            };
            visit(&mut self.nodes[group], &mut carried);
            self.nodes[slot].carried[up] = Some(carried);
        }
    }

    fn child_slots(&self, slot: usize) -> impl Iterator<Item = usize> + '_ {
        debug_assert!(slot != ROOT, "nothing is limited there");
        self.nodes[slot].schedule.iter().flat_map(|schedule| schedule.slots())
    }
}

impl<T> ThrottleNode<T> {
    /// The part of this group's bucket contents that a disk can have caused; `level` is the number
    /// of groups between them. If the group has no limits now, the part under its last limits.
    fn carried_part(&self, disk: &Self, level: usize, now: Instant) -> Option<Box<NodeLimits>> {
        let mut carried = disk.carried.get(level).cloned().flatten();
        if let Some(carried) = &mut carried {
            carried.buckets.leak_to(now);
        }
        let Some(limited) = self.limited.as_ref().or(self.past_limits.as_ref()) else { return carried };
        let mut part = limited.clone();
        part.buckets.leak_to(now);
        let carried_buckets = carried.as_ref().map(|carried| &carried.buckets);
        let in_force = self.limited.is_some() && self.enforcement != Enforcement::Lifted;
        part.buckets.reduce_to_disk(carried_buckets, disk.counters, in_force);
        (!part.buckets.are_empty()).then_some(part)
    }

    /// Adds the contents that a disk carries.
    fn add_carried(&mut self, carried: &mut NodeLimits, now: Instant) {
        self.convert_carried(carried, &Limits::default(), now);
    }

    /// Converts the contents that a disk carried to the limits of this group, and adds those of
    /// kinds that were unlimited before.
    fn convert_carried(&mut self, carried: &mut NodeLimits, before: &Limits, now: Instant) {
        let Some(limited) = &mut self.limited else { return };
        carried.set(&limited.limits, self.enforcement, now);
        limited.buckets.leak_to(now);
        limited.buckets.add_carried(&carried.buckets, |kind: LimitKind| before.limit(kind).rate == 0);
    }
}
