//! Disks that move to another group, in this tree or another: what they take along.
//!
//! ```text
//!            host ──────── host          stays above: nothing is charged again
//!              │             │
//!   level 2   gold  ──────► blue         each level of its own to the one as far above the disk
//!              │             │
//!   level 1   left  ──────► right
//!              │             │
//!             disk ───────► disk         its own limits: all of it
//! ```
//!
//! What a disk takes along of a group's buckets is at most what it has passed itself
//! (`bucket/brought.rs`). The group that it leaves gets nothing back, the group where it arrives is
//! never more than full with it, and keeps its rate.
//!
//! A disk keeps what it brought, so that it takes it along once more, and for limits that do not
//! hold where it is. That leaks as it would in a bucket of the group's that it alone had filled:
//! whatever changes the group's limits changes it as well. Costs nothing while nothing moves.

use super::super::enforcement::Enforcement;
use super::super::limits::{LimitKind, Limits};
use super::super::node::{Charged, Limited, Node, NodeId};
use super::{ROOT, Tree};
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::vec::Vec;

impl<T> Tree<T> {
    /// What was charged to a disk's limits and, as far as it can have been this disk, to those of
    /// the groups above: for [`Tree::take_over`], before it is removed.
    ///
    /// Groups that are also above `beside`, where it is to go on if that is in this tree, have been
    /// charged already, and are left out.
    ///
    /// # Panics
    /// If either was removed.
    pub fn charged(&self, disk: NodeId, beside: Option<NodeId>, now: Instant) -> Charged {
        let now = self.now.max(now);
        let disk = &self.nodes[self.slot(disk)];
        let above: Vec<usize> = self.path_up(disk.parent).collect();
        let common = beside.map_or(0, |beside| {
            let other: Vec<usize> = self.path_up(self.nodes[self.slot(beside)].parent).collect();
            above.iter().rev().zip(other.iter().rev()).take_while(|(one, other)| one == other).count()
        });
        let part = |(level, slot): (usize, &usize)| self.nodes[*slot].part_of(disk, level, now);
        let mut apart: Vec<_> = above.iter().enumerate().map(part).collect();
        apart.extend(disk.brought.iter().skip(above.len()).cloned());
        let own = above.len() - common;
        let common = apart.drain(own..above.len()).collect();
        Charged { own: disk.charged(), apart, common }
    }

    /// Has a disk's limits, and those of the groups above, take over what was charged elsewhere, as
    /// [`Tree::configure`] does: poll afterwards.
    ///
    /// # Panics
    /// If the node was removed.
    pub fn take_over(&mut self, disk: NodeId, charged: Charged, now: Instant) {
        let slot = self.slot(disk);
        self.pass_time(now);
        let now = self.now;
        let Charged { own, apart: mut brought, mut common } = charged;
        if let Some(own) = own {
            self.nodes[slot].take_over(own, now);
        }
        let above: Vec<usize> = self.path_up(self.nodes[slot].parent).collect();
        let groups = &above[..above.len().saturating_sub(common.len())];
        if brought.len() < groups.len() {
            brought.resize(groups.len(), None);
        }
        for (group, brought) in groups.iter().zip(&mut brought) {
            if let Some(brought) = brought {
                self.nodes[*group].join(brought, now);
            }
        }
        let beyond = brought.split_off(groups.len());
        brought.append(&mut common);
        brought.extend(beyond);
        while brought.pop_if(|last| last.is_none()).is_some() {}
        self.has_moved |= !brought.is_empty();
        self.nodes[slot].brought = brought;
        self.settle_both_up(slot);
        for group in above {
            self.settle_both_up(group);
        }
    }

    /// Has what disks brought to a group follow its limits, which were others before.
    pub(super) fn follow_limits(&mut self, group: usize, before: &Limits) {
        let now = self.now;
        self.each_brought(group, |group, brought| group.follow(brought, before, now));
    }

    /// The same where its limits are enforced otherwise. What was brought while they were lifted is
    /// held against the burst of limits that were in force where it passed, and the group's bucket
    /// is at least as full.
    pub(super) fn follow_enforcement(&mut self, group: usize, before: Enforcement) {
        let now = self.now;
        self.each_brought(group, |group, brought| {
            let Some(limited) = &mut group.limited else { return };
            brought.enforce(before, group.enforcement, now);
            if before == Enforcement::Lifted {
                limited.buckets.hold(&brought.buckets);
            }
        });
    }

    fn each_brought(&mut self, group: usize, mut visit: impl FnMut(&mut Node<T>, &mut Limited)) {
        if !self.has_moved {
            return;
        }
        let level = self.nodes[group].level;
        let mut below: Vec<usize> = self.below(group).collect();
        while let Some(slot) = below.pop() {
            below.extend(self.below(slot));
            let up = self.nodes[slot].level - level - 1;
            let Some(mut brought) = self.nodes[slot].brought.get_mut(up).and_then(Option::take) else {
                continue;
            };
            visit(&mut self.nodes[group], &mut brought);
            self.nodes[slot].brought[up] = Some(brought);
        }
    }

    fn below(&self, slot: usize) -> impl Iterator<Item = usize> + '_ {
        debug_assert!(slot != ROOT, "nothing is limited there");
        self.nodes[slot].schedule.iter().flat_map(|schedule| schedule.slots())
    }
}

impl<T> Node<T> {
    /// What a disk below has of this group's limits, or of the last there were, `level` up from it.
    fn part_of(&self, disk: &Self, level: usize, now: Instant) -> Option<Box<Limited>> {
        let mut brought = disk.brought.get(level).cloned().flatten();
        if let Some(brought) = &mut brought {
            brought.buckets.leak_to(now);
        }
        let Some(limited) = self.limited.as_ref().or(self.past.as_ref()) else { return brought };
        let mut part = limited.clone();
        part.buckets.leak_to(now);
        let came_with = brought.as_ref().map(|brought| &brought.buckets);
        let in_force = self.limited.is_some() && self.enforcement != Enforcement::Lifted;
        part.buckets.keep(came_with, disk.counters, in_force);
        (!part.buckets.are_empty()).then_some(part)
    }

    /// Takes what a disk brings.
    fn join(&mut self, brought: &mut Limited, now: Instant) {
        self.follow(brought, &Limits::default(), now);
    }

    /// Has what a disk brought follow the limits here, and takes it where there was no limit
    /// before.
    fn follow(&mut self, brought: &mut Limited, before: &Limits, now: Instant) {
        let Some(limited) = &mut self.limited else { return };
        brought.set(&limited.limits, self.enforcement, now);
        limited.buckets.leak_to(now);
        limited.buckets.join(&brought.buckets, |kind: LimitKind| before.limit(kind).rate == 0);
    }
}
