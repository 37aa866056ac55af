//! Nodes with a quota lease: their limits are a host's quota of limits over many hosts, valid until
//! the lease ends.
//!
//! ```text
//!   lease: 6000 ─────────────┐ until
//!                            └────── fallback share: 66, from that instant on
//!   reservations below are checked against the cluster-wide limit, less those of other hosts
//! ```
//!
//! The tree checks the clock before it admits a request, so a process that was suspended while its
//! lease expired does not use the leased quota, whichever method is called first. The check is one
//! comparison.
//!
//! Never extends a lease: the caller does ([`ThrottleTree::set_lease`]), by the rules of
//! [`cluster`](crate::cluster).

use super::super::limits::Limits;
use super::super::node::NodeId;
use super::super::reservations::{CapacitySupply, ReservationBound, ReservationExceeded, ReservationUnit};
use super::{ROOT, ThrottleTree, reserved_by};
use crate::request::Direction;
use crate::time::Instant;
use alloc::vec::Vec;

/// Quota lease of a node, in addition to the limits in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaLease {
    /// End of the lease, from which `fallback` is in force; [`Instant::MAX`] for never.
    pub until: Instant,
    /// Limits without a lease. Must be valid, as must `whole`.
    pub fallback: Limits,
    /// Limits of all hosts together.
    pub cluster_limits: Limits,
    /// Bounds for reservations here, besides `whole`, with their source: operations and bytes per
    /// second; `None` is no bound.
    pub reservation_bounds: [Option<(u64, ReservationBound)>; 2],
}

/// Demand of the members of a group, for the division of limits over hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberDemands {
    /// Sum of the weights of members that wait or have sent requests since the last call.
    pub weight: u64,
    /// Sum of those members' reservations, in operations and bytes per second.
    pub reserved: [u64; 2],
    /// Age of the oldest waiting request, in nanoseconds.
    pub waiting_ns: u64,
}

impl<T> ThrottleTree<T> {
    /// Sets the lease of a node. Existing reservations stay, even if they exceed its bounds.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn set_lease(&mut self, node: NodeId, lease: QuotaLease) {
        let slot = self.slot(node);
        self.remove_lease(slot);
        self.leases.push((slot, lease));
        self.lease_ends = self.leases.iter().map(|(_, lease)| lease.until).min().unwrap_or(Instant::MAX);
    }

    /// The lease of a node, if it has one.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn lease(&self, node: NodeId) -> Option<QuotaLease> {
        self.lease_at(self.slot(node))
    }

    /// Sum of the reservations at and below a node, in operations and bytes per second.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn reserved(&self, node: NodeId) -> [u64; 2] {
        let node = &self.nodes[self.slot(node)];
        reserved_by(node.share, node.reserved_below)
    }

    /// Demand of the members that wait or have sent requests since the last call.
    ///
    /// # Panics
    /// Panics if the node was removed.
    pub fn member_demands(&mut self, group: NodeId, now: Instant) -> MemberDemands {
        let slot = self.slot(group);
        let mut demands = MemberDemands::default();
        for child in self.slots_below(slot) {
            let node = &mut self.nodes[child];
            let requests =
                node.counters.iter().fold(0_u64, |sum, direction| sum.saturating_add(direction.requests));
            let is_new = core::mem::replace(&mut node.requests_seen, requests) != requests;
            if is_new || node.waiting != [0; 2] {
                demands.weight += u64::from(node.share.weight());
                let reserved = reserved_by(node.share, node.reserved_below);
                demands.reserved = [0, 1].map(|unit| demands.reserved[unit].saturating_add(reserved[unit]));
            }
        }
        if self.nodes[slot].waiting != [0; 2] {
            demands.waiting_ns = self.oldest_waiting_since(slot).map_or(0, |since| now.nanos_since(since));
        }
        demands
    }

    pub(super) fn expire_leases_by(&mut self, now: Instant) {
        if now >= self.lease_ends {
            self.expire_leases(now);
        }
    }

    pub(super) fn advance_to(&mut self, now: Instant) {
        self.expire_leases_by(now);
        self.now = self.now.max(now);
    }

    pub(super) fn remove_lease(&mut self, slot: usize) {
        self.leases.retain(|(leased_slot, _)| *leased_slot != slot);
    }

    pub(super) fn check_supply(&self, slot: usize, reserved: [u64; 2]) -> Result<(), ReservationExceeded> {
        let node = &self.nodes[slot];
        let lease = self.lease_at(slot);
        // Not the limits in force: they are this host's current quota, which follows demand, or
        // those of a used-up quota by volume, which follow the reservations.
        let limits = lease.map_or_else(|| node.limits_without_quota(), |lease| lease.cluster_limits);
        let name_bound = |overbooked: ReservationExceeded| match (overbooked.bound, lease) {
            (ReservationBound::Limit, Some(_)) => {
                ReservationExceeded { bound: ReservationBound::Whole, ..overbooked }
            }
            _ => overbooked,
        };
        CapacitySupply { limits, device: node.device }.check(reserved).map_err(name_bound)?;
        let bounds = lease.map_or([None; 2], |lease| lease.reservation_bounds);
        for unit in ReservationUnit::ALL {
            let requested = reserved[unit.index()];
            let exceeded = bounds[unit.index()].filter(|(left, _)| requested > *left && requested > 0);
            if let Some((available, bound)) = exceeded {
                return Err(ReservationExceeded { unit, requested, available, bound });
            }
        }
        Ok(())
    }

    fn lease_at(&self, slot: usize) -> Option<QuotaLease> {
        self.leases.iter().find(|(leased_slot, _)| *leased_slot == slot).map(|(_, lease)| *lease)
    }

    #[cold]
    fn expire_leases(&mut self, now: Instant) {
        // In order of expiry, because time advances to each end: otherwise an earlier one would
        // leak at its leased rate for too long.
        while let Some((at, _)) = self
            .leases
            .iter()
            .enumerate()
            .map(|(at, (_, lease))| (at, lease.until))
            .min_by_key(|(_, until)| *until)
            .filter(|(_, until)| *until <= now)
        {
            let (slot, lease) = &mut self.leases[at];
            let (slot, fallback) = (*slot, lease.fallback);
            let until = core::mem::replace(&mut lease.until, Instant::MAX);
            self.now = self.now.max(until);
            // Not reported: the leader has treated this capacity as void since the expiry.
            let _lost = self.apply_quota(slot, fallback, [0; 6]);
        }
        self.lease_ends = self.leases.iter().map(|(_, lease)| lease.until).min().unwrap_or(Instant::MAX);
    }

    pub(super) fn apply_quota(&mut self, slot: usize, limits: Limits, credit: [u64; 6]) -> [u64; 6] {
        let before = self.nodes[slot].limits();
        let released = self.nodes[slot].set_quota(limits, credit, self.now);
        self.apply_limits_to_carried(slot, &before);
        self.update_shared_limits(slot);
        self.settle_both_up(slot);
        released
    }

    fn slots_below(&self, slot: usize) -> Vec<usize> {
        let schedule = self.nodes[slot].schedule.as_ref();
        schedule.into_iter().flat_map(|schedule| schedule.slots()).collect()
    }

    /// Time at which the oldest waiting request at or below a node was queued.
    fn oldest_waiting_since(&self, slot: usize) -> Option<Instant> {
        debug_assert!(slot != ROOT, "the root is not a group");
        let fronts = Direction::ALL.map(|direction| self.nodes[slot].queue(direction).front());
        let own_since = fronts.into_iter().flatten().map(|waiter| waiter.since);
        let below = self.slots_below(slot).into_iter();
        let below = below.filter(|child| self.nodes[*child].waiting != [0; 2]);
        own_since.chain(below.filter_map(|child| self.oldest_waiting_since(child))).min()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{AdmissionResult, PollDecision};
    use super::*;
    use crate::throttle::{LimitKind, Limits, NodeShare, RequestCost, ThrottleError};
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
    fn lease(bounds: [Option<(u64, ReservationBound)>; 2]) -> (ThrottleTree<u32>, NodeId) {
        let mut tree = ThrottleTree::new(at(0));
        let group = tree.add(None, Limits::default(), NodeShare::default()).unwrap();
        tree.set_quota(group, iops(1000), [0; 6], at(0)).unwrap();
        tree.set_lease(
            group,
            QuotaLease {
                until: at(1000),
                fallback: iops(100),
                cluster_limits: iops(10_000),
                reservation_bounds: bounds,
            },
        );
        (tree, group)
    }

    #[test]
    fn expired_lease_falls_back_at_the_next_call() {
        let (mut tree, group) = lease([None; 2]);
        let disk = tree.add(Some(group), Limits::default(), NodeShare::default()).unwrap();
        assert_eq!(tree.limits(group), iops(1000));
        let mut passed = 0;
        // The process is suspended from here until the lease has ended.
        while tree.try_admit(disk, Direction::Read, &RequestCost::one(4096), at(999)) {
            passed += 1;
        }
        assert_eq!(passed, 101, "a tenth of a second, and the request that overruns the bucket");
        // Capacity leaked in the last millisecond; the fallback share adds none.
        assert!(tree.try_admit(disk, Direction::Read, &RequestCost::one(4096), at(1000)));
        assert!(!tree.try_admit(disk, Direction::Read, &RequestCost::one(4096), at(1000)));
        assert_eq!(tree.limits(group), iops(100));
        assert!(matches!(
            tree.submit(disk, Direction::Read, RequestCost::one(4096), 7, at(1000)),
            AdmissionResult::Queued(_)
        ));
        assert_eq!(tree.poll(at(1001)), PollDecision::Wait { until: at(1010) });
    }

    #[test]
    fn reservations_are_checked_against_whole_limit_and_other_hosts() {
        let reserve = |tree: &mut ThrottleTree<u32>, group, iops| {
            tree.add(Some(group), Limits::default(), NodeShare::default().with_reservation(iops, 0))
        };
        let (mut tree, group) = lease([None; 2]);
        reserve(&mut tree, group, 2000).expect("more than the part, and less than the whole");
        assert_eq!(tree.reserved(group), [2000, 0]);
        let Err(ThrottleError::Overbooked(overbooked)) = reserve(&mut tree, group, 8001) else { panic!() };
        assert_eq!((overbooked.available, overbooked.bound), (10_000, ReservationBound::Whole));
        let (mut tree, group) = lease([Some((1500, ReservationBound::Cluster)), None]);
        let Err(ThrottleError::Overbooked(overbooked)) = reserve(&mut tree, group, 2000) else { panic!() };
        assert_eq!((overbooked.available, overbooked.bound), (1500, ReservationBound::Cluster));
        reserve(&mut tree, group, 1500).unwrap();
    }

    #[test]
    fn weight_change_keeps_the_quota() {
        let (mut tree, group) = lease([None; 2]);
        tree.configure(group, Limits::default(), NodeShare::new(200).unwrap(), at(5)).unwrap();
        assert_eq!(tree.limits(group), iops(1000));
        tree.configure(group, Limits::default(), NodeShare::new(100).unwrap(), at(2000)).unwrap();
        assert_eq!(tree.limits(group), iops(100));
    }

    #[test]
    fn waiting_and_active_members_have_demand() {
        let (mut tree, group) = lease([None; 2]);
        let share = |weight| NodeShare::new(weight).unwrap();
        let first = tree.add(Some(group), Limits::default(), share(10)).unwrap();
        let second = tree.add(Some(group), Limits::default(), share(20).with_reservation(7, 0)).unwrap();
        tree.add(Some(group), Limits::default(), share(40)).unwrap();
        assert_eq!(tree.member_demands(group, at(0)), MemberDemands::default());
        assert!(tree.try_admit(first, Direction::Read, &RequestCost::one(1), at(0)));
        assert_eq!(tree.member_demands(group, at(0)).weight, 10);
        assert_eq!(tree.member_demands(group, at(0)).weight, 0, "no requests since the last call");
        while tree.try_admit(second, Direction::Read, &RequestCost::one(1), at(0)) {}
        assert!(matches!(
            tree.submit(second, Direction::Read, RequestCost::one(1), 1, at(0)),
            AdmissionResult::Queued(_)
        ));
        tree.member_demands(group, at(0));
        let demands = tree.member_demands(group, at(30));
        assert_eq!(demands, MemberDemands { weight: 20, reserved: [7, 0], waiting_ns: 30_000_000 });
    }
}
