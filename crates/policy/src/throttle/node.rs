//! A disk or a group of the tree: settings, waiting requests, and statistics.
//!
//! Independent of its neighbours. An idle node takes a few hundred bytes and no time.

use super::bucket::NodeBuckets;
use super::cap::NodeCap;
use super::cause::CauseKind;
use super::cost::RequestCost;
use super::enforcement::{Enforcement, LimitScale};
use super::limits::{LimitKind, Limits};
use super::reservation_monitor::ReservationMonitor;
use super::reservations::{ReservableCapacity, reserved_by};
use super::scheduler::ChildScheduler;
use super::share::NodeShare;
use super::stats::{AdmissionCounters, CumulativeStats, ThrottleStats, ThrottleSummary, WaitHistograms};
use crate::request::Direction;
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Time after which a node's own limit no longer counts as the cause of waiting requests.
const CAUSE_EXPIRY_NS: u64 = crate::time::NANOS_PER_SECOND;

/// Identifies a disk or a group of one tree. Never valid again after the node was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeId {
    pub(super) slot: usize,
    /// Distinguishes the node from earlier ones in the same slot.
    pub(super) generation: u64,
}

/// Identifies a waiting request for [`ThrottleTree::cancel`](super::ThrottleTree::cancel).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueuedRequestId {
    pub(super) node: NodeId,
    pub(super) direction: Direction,
    /// Rises with every request queued in the tree.
    pub(super) number: u64,
}

#[derive(Debug)]
pub(super) struct QueuedRequest<T> {
    pub(super) number: u64,
    pub(super) since: Instant,
    pub(super) cost: RequestCost,
    /// Part of [`WHOLE_REQUEST`](super::slicing::WHOLE_REQUEST) that has been charged so far, in
    /// slices.
    pub(super) charged_parts: u32,
    /// Throttled time of its disk and of the group above when the request was queued, in
    /// nanoseconds.
    pub(super) throttled_ns: [u64; 2],
    pub(super) token: T,
}

/// Limits and their buckets. Boxed, because most nodes have none.
#[derive(Clone, Debug)]
pub(super) struct NodeLimits {
    pub(super) limits: Limits,
    pub(super) buckets: NodeBuckets,
}

impl NodeLimits {
    fn new(now: Instant) -> Self {
        let limits = Limits::default();
        Self { limits, buckets: NodeBuckets::new(&limits, now) }
    }

    /// Changes the limits, which take over the admitted work: see `bucket.rs`. Limits set while
    /// lifted throttle nothing yet, and later ones inherit no burst from them.
    pub(super) fn set(&mut self, limits: &Limits, enforcement: Enforcement, now: Instant) {
        self.buckets.leak_to(now);
        match enforcement {
            Enforcement::Lifted => self.buckets.run_at(limits),
            enforced => self.buckets.change(limits, enforced.scale()),
        }
        self.limits = *limits;
    }

    /// Changes the enforcement of the limits.
    pub(super) fn enforce(&mut self, before: Enforcement, enforcement: Enforcement, now: Instant) {
        self.buckets.leak_to(now);
        if enforcement == Enforcement::Lifted {
            return self.buckets.run_at(&self.limits);
        }
        if before == Enforcement::Lifted {
            self.buckets.change(&self.limits, LimitScale::ONE);
        }
        self.buckets.rescale(&self.limits, enforcement.scale());
    }
}

/// A quota by volume that is used up.
#[derive(Clone, Copy, Debug)]
pub(super) struct UsedUpQuota {
    /// Limits without it.
    pub(super) limits: Limits,
    /// `quota-rate`, in bytes per second.
    pub(super) rate_bps: u64,
}

/// Work charged to a disk, to continue in another tree or group.
#[derive(Clone, Debug)]
pub struct CarriedCharges {
    /// Charged to its own limits.
    pub(super) own: Option<Box<NodeLimits>>,
    /// Charged to groups that it leaves, from its parent upwards; then contents it carried for
    /// higher levels.
    pub(super) left_groups: Vec<Option<Box<NodeLimits>>>,
    /// Charged to groups that remain above it.
    pub(super) common_groups: Vec<Option<Box<NodeLimits>>>,
}

/// A disk or a group; see the [module documentation](self).
#[derive(Debug)]
pub(super) struct ThrottleNode<T> {
    pub(super) generation: u64,
    pub(super) present: bool,
    /// True if a limit on both directions together is set here or above.
    pub(super) has_shared_limit: bool,
    pub(super) parent: usize,
    pub(super) number: u32,
    pub(super) level: usize,
    pub(super) limited: Option<Box<NodeLimits>>,
    /// The last limits, if none are set now: new ones take over their admitted work.
    pub(super) past_limits: Option<Box<NodeLimits>>,
    /// Independent of the limits: see `cap.rs`.
    pub(super) cap: Option<Box<NodeCap>>,
    /// Contents that a disk carried into the groups above, from its parent upwards and
    /// beyond the top level, as if it alone had filled their buckets.
    pub(super) carried: Vec<Option<Box<NodeLimits>>>,
    /// In force, as in [`ThrottleNode::effective_enforcement`].
    pub(super) enforcement: Enforcement,
    /// As the caller has set it.
    pub(super) set_enforcement: Enforcement,
    /// Boxed, because it is rare.
    pub(super) used_up: Option<Box<UsedUpQuota>>,
    pub(super) share: NodeShare,
    /// `None` until the first child, because most nodes are disks.
    pub(super) schedule: Option<Box<ChildScheduler>>,
    /// Direction preferred on ties: the one not served last.
    pub(super) first: Direction,
    queues: [VecDeque<QueuedRequest<T>>; 2],
    /// Requests of the whole subtree, by direction.
    pub(super) waiting: [usize; 2],
    pub(super) counters: [AdmissionCounters; 2],
    /// Number of counted requests when the demand was measured last
    /// ([`ThrottleTree::member_demands`](super::ThrottleTree::member_demands)).
    pub(super) requests_seen: u64,
    /// By direction: true if requests wait for this node's own limits or its cap.
    pub(super) blocked: [bool; 2],
    /// Start of the current state: throttled by its own limits or its cap, or not.
    blocked_or_free_since: Instant,
    /// By direction: the last cause for which requests waited here, and until when.
    last_throttled: [Option<(CauseKind, Instant)>; 2],
    throttled_ns: u64,
    last_cause: Option<CauseKind>,
    waits: Option<Box<WaitHistograms>>,
    /// `None` unless the node itself has a reservation.
    pub(super) reservation_monitor: Option<Box<ReservationMonitor>>,
    /// Reservable capacity of the device below.
    pub(super) device: ReservableCapacity,
    /// Sum of the children's reservations, by unit.
    pub(super) reserved_below: [u64; 2],
}

impl<T> ThrottleNode<T> {
    /// The node's share of its parent, with the larger of the node's reservation and the sum below
    /// it.
    pub(super) fn entitlement(&self) -> NodeShare {
        let [iops, bps] = reserved_by(self.share, self.reserved_below);
        self.share.with_reservation(iops, bps)
    }

    pub(super) fn new(parent: usize, level: usize, limits: Limits, share: NodeShare, now: Instant) -> Self {
        let mut node = Self {
            generation: 0,
            present: true,
            has_shared_limit: false,
            parent,
            number: 0,
            level,
            limited: None,
            past_limits: None,
            cap: None,
            carried: Vec::new(),
            enforcement: Enforcement::Enforced,
            set_enforcement: Enforcement::Enforced,
            used_up: None,
            share,
            schedule: None,
            first: Direction::Read,
            queues: [VecDeque::new(), VecDeque::new()],
            waiting: [0; 2],
            counters: [AdmissionCounters::default(); 2],
            requests_seen: 0,
            blocked: [false; 2],
            blocked_or_free_since: now,
            last_throttled: [None; 2],
            throttled_ns: 0,
            last_cause: None,
            waits: None,
            reservation_monitor: None,
            device: ReservableCapacity::default(),
            reserved_below: [0; 2],
        };
        node.set_limits(limits, now);
        node.set_share(share, now);
        node
    }

    pub(super) fn limits(&self) -> Limits {
        self.limited.as_ref().map_or_else(Limits::default, |limited| limited.limits)
    }

    /// Limits without those of a used-up quota.
    pub(super) fn limits_without_quota(&self) -> Limits {
        self.used_up.as_ref().map_or_else(|| self.limits(), |used_up| used_up.limits)
    }

    /// These limits together with those of a used-up quota, which are raised to the reservations.
    pub(super) fn limits_with_quota(&self, limits: &Limits) -> Limits {
        let Some(used_up) = &self.used_up else { return *limits };
        let [_, reserved_bps] = reserved_by(self.share, self.reserved_below);
        limits.with_used_up_rate(used_up.rate_bps, reserved_bps)
    }

    /// Enforcement as it was set; a used-up quota is enforced at all times.
    pub(super) const fn effective_enforcement(&self) -> Enforcement {
        if self.used_up.is_some() { Enforcement::Enforced } else { self.set_enforcement }
    }

    /// Limits of the cap; unlimited without one.
    pub(super) fn cap_limits(&self) -> Limits {
        self.cap.as_ref().map_or_else(Limits::default, |cap| cap.limits())
    }

    /// Sets limits under the current enforcement. They take over the work admitted under the
    /// previous ones: see `bucket.rs`.
    pub(super) fn set_limits(&mut self, limits: Limits, now: Instant) {
        let before = self.limited.take().or_else(|| self.past_limits.take());
        if limits.is_unlimited() {
            self.past_limits = before;
            return;
        }
        let mut limited = before.unwrap_or_else(|| Box::new(NodeLimits::new(now)));
        limited.set(&limits, self.enforcement, now);
        self.limited = Some(limited);
    }

    /// Sets the share. A changed reservation resets its statistics.
    pub(super) fn set_share(&mut self, share: NodeShare, now: Instant) {
        let reservations =
            |node_share: &NodeShare| (node_share.iops_reservation(), node_share.bps_reservation());
        if !share.is_reserved() {
            self.reservation_monitor = None;
        } else if self.reservation_monitor.is_none() || reservations(&self.share) != reservations(&share) {
            self.reservation_monitor = Some(Box::new(ReservationMonitor::new(self.waiting != [0; 2], now)));
        }
        self.share = share;
    }

    /// Changes this host's quota of limits that are divided over hosts: see `bucket/quota.rs`. No
    /// capacity is given up while limits are scaled or lifted.
    pub(super) fn set_quota(&mut self, limits: Limits, credit: [u64; 6], now: Instant) -> [u64; 6] {
        if self.enforcement != Enforcement::Enforced || limits.is_unlimited() {
            self.set_limits(limits, now);
            return [0; 6];
        }
        let before = self.limited.take().or_else(|| self.past_limits.take());
        let mut limited = before.unwrap_or_else(|| Box::new(NodeLimits::new(now)));
        limited.buckets.leak_to(now);
        let released = limited.buckets.set_quota(&limits, credit);
        limited.limits = limits;
        self.limited = Some(limited);
        released
    }

    /// Changes the enforcement of the limits.
    pub(super) fn enforce(&mut self, enforcement: Enforcement, now: Instant) {
        let before = core::mem::replace(&mut self.enforcement, enforcement);
        if let Some(limited) = &mut self.limited {
            limited.enforce(before, enforcement, now);
        }
    }

    /// Contents of the node's own limits, or of its last ones, for
    /// [`ThrottleNode::inherit_contents`].
    pub(super) fn charged_contents(&self) -> Option<Box<NodeLimits>> {
        self.limited.as_ref().or(self.past_limits.as_ref()).cloned()
    }

    /// Takes over the contents of another node.
    pub(super) fn inherit_contents(&mut self, charged: Box<NodeLimits>, now: Instant) {
        let limits = self.limits();
        self.limited = None;
        // As if the contents were those of limits that were set here before.
        self.past_limits = Some(charged);
        self.set_limits(limits, now);
    }

    /// Nanoseconds until a request may be admitted here, and the cause with the longest wait;
    /// `None` if it may be now. Advances the buckets to `now`.
    pub(super) fn longest_wait(&mut self, direction: Direction, now: Instant) -> Option<(u64, CauseKind)> {
        let by_limit = match &mut self.limited {
            Some(limited) if self.enforcement != Enforcement::Lifted => {
                limited.buckets.leak_to(now);
                limited.buckets.longest_wait(direction)
            }
            _ => None,
        };
        let by_limit = by_limit.map(|(wait_ns, kind)| (wait_ns, CauseKind::Limit(kind)));
        match &mut self.cap {
            None => by_limit,
            Some(cap) => cap.longest_wait(by_limit, direction, now),
        }
    }

    /// The buckets that requests wait for, advanced to `now`: those of the limits unless they are
    /// lifted, and those of the cap.
    pub(super) fn enforced_buckets(&mut self, now: Instant) -> impl Iterator<Item = &mut NodeBuckets> {
        self.enforced_buckets_unadvanced().for_each(|buckets| buckets.leak_to(now));
        self.enforced_buckets_unadvanced()
    }

    /// As [`ThrottleNode::enforced_buckets`], without advancing them.
    pub(super) fn enforced_buckets_unadvanced(&mut self) -> impl Iterator<Item = &mut NodeBuckets> {
        let limited = self.limited.as_mut().filter(|_| self.enforcement != Enforcement::Lifted);
        let of_limits = limited.map(|limited| &mut limited.buckets);
        of_limits.into_iter().chain(self.cap.as_mut().map(|cap| &mut cap.buckets))
    }

    /// True if limits or a cap are set, even if the limits are lifted.
    pub(super) const fn has_buckets(&self) -> bool {
        self.limited.is_some() || self.cap.is_some()
    }

    /// The buckets of the limits, even if those are lifted, and of the cap.
    pub(super) fn all_buckets(&self) -> impl Iterator<Item = &NodeBuckets> {
        let of_limits = self.limited.as_ref().map(|limited| &limited.buckets);
        of_limits.into_iter().chain(self.cap.as_ref().map(|cap| &cap.buckets))
    }

    /// True if a request in or below this node is ready as far as all levels below are concerned.
    pub(super) fn has_work(&self, direction: Direction) -> bool {
        match &self.schedule {
            Some(schedule) if schedule.has_work(direction) => true,
            _ => !self.queues[direction.index()].is_empty(),
        }
    }

    pub(super) fn queue(&self, direction: Direction) -> &VecDeque<QueuedRequest<T>> {
        &self.queues[direction.index()]
    }

    pub(super) fn queue_mut(&mut self, direction: Direction) -> &mut VecDeque<QueuedRequest<T>> {
        &mut self.queues[direction.index()]
    }

    /// Removes a request from its queue, if it still waits. Found by binary search in O(log n).
    pub(super) fn remove_queued(&mut self, direction: Direction, number: u64) -> Option<QueuedRequest<T>> {
        let queue = self.queue_mut(direction);
        let at = queue.binary_search_by_key(&number, |waiter| waiter.number).ok()?;
        queue.remove(at)
    }

    pub(super) fn set_blocked(&mut self, direction: Direction, cause: Option<CauseKind>, now: Instant) {
        let was_blocked = self.blocked != [false; 2];
        self.blocked[direction.index()] = cause.is_some();
        let is_blocked = self.blocked != [false; 2];
        if was_blocked && !is_blocked {
            self.throttled_ns += now.nanos_since(self.blocked_or_free_since);
        }
        if was_blocked != is_blocked {
            self.blocked_or_free_since = now;
        }
        if cause.is_some() {
            self.last_cause = cause;
        }
        if let Some(cap) = &mut self.cap {
            cap.has_waited |= cause == Some(CauseKind::LatencyTarget);
        }
        // While blocked, the end of the block is updated at each check; afterwards it stays.
        let last_throttled = &mut self.last_throttled[direction.index()];
        *last_throttled = cause.or(last_throttled.map(|(kind, _)| kind)).map(|kind| (kind, now));
    }

    /// The last cause for which requests of this direction waited here, and until when.
    pub(super) fn last_throttled(&self, direction: Direction) -> Option<(CauseKind, Instant)> {
        self.last_throttled[direction.index()]
    }

    pub(super) fn count(
        &mut self,
        direction: Direction,
        cost: &RequestCost,
        waited_ns: Option<u64>,
        now: Instant,
    ) {
        self.counters[direction.index()].count(cost, waited_ns);
        if let Some(waited_ns) = waited_ns {
            let waits = self.waits.get_or_insert_with(|| Box::new(WaitHistograms::new(now)));
            waits.add(waited_ns, cost.requests(), now);
        }
    }

    /// Time for which requests waited for this node's limits or its cap, in nanoseconds.
    pub(super) fn throttled_ns(&self, now: Instant) -> u64 {
        let so_far = if self.blocked == [false; 2] { 0 } else { now.nanos_since(self.blocked_or_free_since) };
        self.throttled_ns + so_far
    }

    pub(super) fn summary(&self, now: Instant) -> ThrottleSummary {
        let is_blocked = self.blocked != [false; 2];
        let since = now.nanos_since(self.blocked_or_free_since);
        // Requests that pass this node at once may wait for a group above it.
        let is_throttled = is_blocked || (self.waiting != [0; 2] && since < CAUSE_EXPIRY_NS);
        ThrottleSummary {
            throttled_ns: self.throttled_ns(now),
            throttle_cause: self.last_cause.filter(|_| is_throttled),
            waiting: self.waiting,
            reservation_times: self.reservation_monitor.as_ref().map(|monitor| monitor.times(now)),
        }
    }

    pub(super) fn cumulative(&self, now: Instant) -> CumulativeStats {
        let ThrottleSummary { throttled_ns: limited_ns, reservation_times: kept, .. } = self.summary(now);
        let mut stats = CumulativeStats {
            passed: self.counters,
            throttled_ns: limited_ns,
            reservation_times: kept,
            ..CumulativeStats::default()
        };
        if let Some(waits) = &self.waits {
            waits.export(&mut stats);
        }
        stats
    }

    pub(super) fn add_cumulative(&mut self, stats: &CumulativeStats, now: Instant) {
        let CumulativeStats {
            passed,
            throttled_ns: limited_ns,
            reservation_times: kept,
            waits,
            longest_wait_ns: _,
        } = stats;
        for (counters, more) in self.counters.iter_mut().zip(passed) {
            *counters = counters.sum(*more);
            // These requests were made in another process and are not new demand here.
            self.requests_seen = self.requests_seen.saturating_add(more.requests);
        }
        self.throttled_ns = self.throttled_ns.saturating_add(*limited_ns);
        if let (Some(monitor), Some(kept)) = (&mut self.reservation_monitor, kept) {
            monitor.add_times(*kept);
        }
        if !waits.is_empty() {
            self.waits.get_or_insert_with(|| Box::new(WaitHistograms::new(now))).add_cumulative(stats);
        }
    }

    pub(super) fn stats(&self, now: Instant) -> ThrottleStats {
        let ThrottleSummary {
            throttled_ns: limited_ns,
            throttle_cause: binding,
            waiting,
            reservation_times: kept,
        } = self.summary(now);
        let buckets = self.limited.as_ref().map(|limited| {
            let mut buckets = limited.buckets.clone();
            buckets.leak_to(now);
            buckets
        });
        let tokens = LimitKind::ALL.map(|kind| buckets.as_ref()?.admittable_units(kind));
        let levels =
            LimitKind::ALL.map(|kind| buckets.as_ref()?.limit_level(kind, &self.limited.as_ref()?.limits));
        ThrottleStats {
            reads: self.counters[Direction::Read.index()],
            writes: self.counters[Direction::Write.index()],
            waits: self.waits.as_ref().map(|waits| waits.all()).unwrap_or_default(),
            recent_waits: self.waits.as_ref().map(|waits| waits.recent(now)).unwrap_or_default(),
            throttled_ns: limited_ns,
            throttle_cause: binding,
            tokens,
            levels,
            waiting,
            reservation: kept,
        }
    }
}
