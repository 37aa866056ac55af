//! Nodes with a quota lease: their limits are a part of limits over many hosts, valid until an
//! instant.
//!
//! ```text
//!   lease: 6000 ─────────────┐ until
//!                            └────── fallback share: 66, from that instant on
//!   reservations below are checked against the whole limit, less those of other hosts
//! ```
//!
//! The tree checks the clock before it admits anything, so a process that was suspended while its
//! lease expired uses nothing of it, whichever call comes first. That is one comparison.
//!
//! Never extends a lease: the caller does ([`Tree::lend`]), by the rules of
//! [`cluster`](crate::cluster).

use super::super::booking::{Bound, Overbooked, Supply, Unit};
use super::super::limits::Limits;
use super::super::node::NodeId;
use super::{ROOT, Tree, demand};
use crate::request::Direction;
use crate::time::Instant;
use alloc::vec::Vec;

/// Quota lease of a node, in addition to the limits in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lent {
    /// End of the lease, from which `safe` is in force; [`Instant::MAX`] for never.
    pub until: Instant,
    /// Limits without a lease. Must be valid, as must `whole`.
    pub safe: Limits,
    /// Limits of all hosts together.
    pub whole: Limits,
    /// Bounds for reservations here, besides `whole`, with their source: operations and bytes per
    /// second; `None` is no bound.
    pub left: [Option<(u64, Bound)>; 2],
}

/// Demand of the members of a group, for the division of limits over hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Sum of the weights of members that wait or have sent requests since the last call.
    pub weight: u64,
    /// Sum of those members' reservations, in operations and bytes per second.
    pub reserved: [u64; 2],
    /// Age of the oldest waiting request, in nanoseconds.
    pub waiting_ns: u64,
}

impl<T> Tree<T> {
    /// Sets the lease of a node. Existing reservations stay, even if they exceed its bounds.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn lend(&mut self, node: NodeId, lent: Lent) {
        let slot = self.slot(node);
        self.take_back(slot);
        self.lent.push((slot, lent));
        self.lease_ends = self.lent.iter().map(|(_, lent)| lent.until).min().unwrap_or(Instant::MAX);
    }

    /// The lease of a node, if it has one.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn lent(&self, node: NodeId) -> Option<Lent> {
        self.lent_at(self.slot(node))
    }

    /// Sum of the reservations at and below a node, in operations and bytes per second.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn promised(&self, node: NodeId) -> [u64; 2] {
        let node = &self.nodes[self.slot(node)];
        demand(node.share, node.promised)
    }

    /// Demand of the members that wait or have sent requests since the last call.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn wanted(&mut self, group: NodeId, now: Instant) -> Wanted {
        let slot = self.slot(group);
        let mut wanted = Wanted::default();
        for child in self.slots_below(slot) {
            let node = &mut self.nodes[child];
            let asked = node.counters.iter().fold(0_u64, |sum, one| sum.saturating_add(one.requests));
            let is_new = core::mem::replace(&mut node.seen, asked) != asked;
            if is_new || node.waiting != [0; 2] {
                wanted.weight += u64::from(node.share.weight());
                let reserved = demand(node.share, node.promised);
                wanted.reserved = [0, 1].map(|unit| wanted.reserved[unit].saturating_add(reserved[unit]));
            }
        }
        if self.nodes[slot].waiting != [0; 2] {
            wanted.waiting_ns = self.oldest(slot).map_or(0, |since| now.nanos_since(since));
        }
        wanted
    }

    pub(super) fn run_out_by(&mut self, now: Instant) {
        if now >= self.lease_ends {
            self.run_out(now);
        }
    }

    pub(super) fn pass_time(&mut self, now: Instant) {
        self.run_out_by(now);
        self.now = self.now.max(now);
    }

    pub(super) fn take_back(&mut self, slot: usize) {
        self.lent.retain(|(known, _)| *known != slot);
    }

    pub(super) fn check_supply(&self, slot: usize, promised: [u64; 2]) -> Result<(), Overbooked> {
        let node = &self.nodes[slot];
        let lent = self.lent_at(slot);
        // Not the limits in force: those are a host's momentary part, which demand changes all the
        // time.
        let limits = lent.map_or_else(|| node.limits(), |lent| lent.whole);
        let whole = |overbooked: Overbooked| match (overbooked.bound, lent) {
            (Bound::Limit, Some(_)) => Overbooked { bound: Bound::Whole, ..overbooked },
            _ => overbooked,
        };
        Supply { limits, device: node.device }.check(promised).map_err(whole)?;
        let left = lent.map_or([None; 2], |lent| lent.left);
        for unit in Unit::ALL {
            let asked = promised[unit.index()];
            let left = left[unit.index()].filter(|(left, _)| asked > *left && asked > 0);
            if let Some((available, bound)) = left {
                return Err(Overbooked { unit, asked, available, bound });
            }
        }
        Ok(())
    }

    fn lent_at(&self, slot: usize) -> Option<Lent> {
        self.lent.iter().find(|(known, _)| *known == slot).map(|(_, lent)| *lent)
    }

    #[cold]
    fn run_out(&mut self, now: Instant) {
        // In order of expiry, because time advances to each end: otherwise an earlier one would
        // leak at its leased rate for too long.
        while let Some((at, _)) = self
            .lent
            .iter()
            .enumerate()
            .map(|(at, (_, lent))| (at, lent.until))
            .min_by_key(|(_, until)| *until)
            .filter(|(_, until)| *until <= now)
        {
            let (slot, lent) = &mut self.lent[at];
            let (slot, safe) = (*slot, lent.safe);
            let until = core::mem::replace(&mut lent.until, Instant::MAX);
            self.now = self.now.max(until);
            // Not reported: the leader has treated this capacity as void since the expiry.
            let _lost = self.put_part(slot, safe, [0; 6]);
        }
        self.lease_ends = self.lent.iter().map(|(_, lent)| lent.until).min().unwrap_or(Instant::MAX);
    }

    pub(super) fn put_part(&mut self, slot: usize, limits: Limits, credit: [u64; 6]) -> [u64; 6] {
        let before = self.nodes[slot].limits();
        let given = self.nodes[slot].divide(limits, credit, self.now);
        self.follow_limits(slot, &before);
        self.share_lanes(slot);
        self.settle_both_up(slot);
        given
    }

    fn slots_below(&self, slot: usize) -> Vec<usize> {
        let schedule = self.nodes[slot].schedule.as_ref();
        schedule.into_iter().flat_map(|schedule| schedule.slots()).collect()
    }

    /// Time at which the oldest waiting request at or below a node was queued.
    fn oldest(&self, slot: usize) -> Option<Instant> {
        debug_assert!(slot != ROOT, "the root is not a group");
        let fronts = Direction::ALL.map(|direction| self.nodes[slot].queue(direction).front());
        let own = fronts.into_iter().flatten().map(|waiter| waiter.since);
        let below = self.slots_below(slot).into_iter();
        let below = below.filter(|child| self.nodes[*child].waiting != [0; 2]);
        own.chain(below.filter_map(|child| self.oldest(child))).min()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Admission, Decision};
    use super::*;
    use crate::throttle::{Cost, LimitKind, Limits, Refused, Share};
    use crate::time::Duration;

    fn iops(rate: u64) -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = rate;
        limits
    }

    fn at(ms: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(ms)
    }

    /// A group with 1000 of 10,000 IOPS until 1 s; its fallback share is 100.
    fn lent(left: [Option<(u64, Bound)>; 2]) -> (Tree<u32>, NodeId) {
        let mut tree = Tree::new(at(0));
        let group = tree.add(None, Limits::default(), Share::default()).unwrap();
        tree.divide(group, iops(1000), [0; 6], at(0)).unwrap();
        tree.lend(group, Lent { until: at(1000), safe: iops(100), whole: iops(10_000), left });
        (tree, group)
    }

    #[test]
    fn who_asks_first_after_the_end_finds_the_safe_share() {
        let (mut tree, group) = lent([None; 2]);
        let disk = tree.add(Some(group), Limits::default(), Share::default()).unwrap();
        assert_eq!(tree.limits(group), iops(1000));
        let mut passed = 0;
        // The process is suspended from here until the lease has ended.
        while tree.pass(disk, Direction::Read, &Cost::one(4096), at(999)) {
            passed += 1;
        }
        assert_eq!(passed, 101, "a tenth of a second, and the one that makes it run over");
        // Capacity leaked in the last millisecond; the fallback share adds none.
        assert!(tree.pass(disk, Direction::Read, &Cost::one(4096), at(1000)));
        assert!(!tree.pass(disk, Direction::Read, &Cost::one(4096), at(1000)));
        assert_eq!(tree.limits(group), iops(100));
        assert!(matches!(
            tree.request(disk, Direction::Read, Cost::one(4096), 7, at(1000)),
            Admission::Queued(_)
        ));
        assert_eq!(tree.poll(at(1001)), Decision::Wait { until: at(1010) });
    }

    #[test]
    fn promises_are_judged_by_the_whole_and_by_what_others_leave() {
        let promised = |tree: &mut Tree<u32>, group, iops| {
            tree.add(Some(group), Limits::default(), Share::default().with_reservation(iops, 0))
        };
        let (mut tree, group) = lent([None; 2]);
        promised(&mut tree, group, 2000).expect("more than the part, and less than the whole");
        assert_eq!(tree.promised(group), [2000, 0]);
        let Err(Refused::Overbooked(overbooked)) = promised(&mut tree, group, 8001) else { panic!() };
        assert_eq!((overbooked.available, overbooked.bound), (10_000, Bound::Whole));
        let (mut tree, group) = lent([Some((1500, Bound::Cluster)), None]);
        let Err(Refused::Overbooked(overbooked)) = promised(&mut tree, group, 2000) else { panic!() };
        assert_eq!((overbooked.available, overbooked.bound), (1500, Bound::Cluster));
        promised(&mut tree, group, 1500).unwrap();
    }

    #[test]
    fn a_weight_changes_and_the_part_stays() {
        let (mut tree, group) = lent([None; 2]);
        tree.configure(group, Limits::default(), Share::new(200).unwrap(), at(5)).unwrap();
        assert_eq!(tree.limits(group), iops(1000));
        tree.configure(group, Limits::default(), Share::new(100).unwrap(), at(2000)).unwrap();
        assert_eq!(tree.limits(group), iops(100));
    }

    #[test]
    fn who_waits_or_asked_wants_something() {
        let (mut tree, group) = lent([None; 2]);
        let share = |weight| Share::new(weight).unwrap();
        let one = tree.add(Some(group), Limits::default(), share(10)).unwrap();
        let other = tree.add(Some(group), Limits::default(), share(20).with_reservation(7, 0)).unwrap();
        tree.add(Some(group), Limits::default(), share(40)).unwrap();
        assert_eq!(tree.wanted(group, at(0)), Wanted::default());
        assert!(tree.pass(one, Direction::Read, &Cost::one(1), at(0)));
        assert_eq!(tree.wanted(group, at(0)).weight, 10);
        assert_eq!(tree.wanted(group, at(0)).weight, 0, "since the last look nobody asked");
        while tree.pass(other, Direction::Read, &Cost::one(1), at(0)) {}
        assert!(matches!(tree.request(other, Direction::Read, Cost::one(1), 1, at(0)), Admission::Queued(_)));
        tree.wanted(group, at(0));
        let wanted = tree.wanted(group, at(30));
        assert_eq!(wanted, Wanted { weight: 20, reserved: [7, 0], waiting_ns: 30_000_000 });
    }
}
