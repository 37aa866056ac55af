//! The tree of disks and groups, and the choice of the request that is admitted next.
//!
//! ```text
//!                       ( root: no limits )
//!                         │                │
//!                  group "host"          disk         each node: limits, cap, enforcement, share
//!                    │        │
//!             group "gold"   disk                     inner nodes: a scheduler (scheduler.rs)
//!               │      │
//!             disk    disk                            leaves: queues of requests
//! ```
//!
//! The caller protects the tree with one lock, which is held for nanoseconds. A token of the caller
//! represents a waiting request.
//!
//! A node with waiting requests is in its parent's heap until a limit throttles it. Then it is in
//! the heap of wake-ups instead, and the levels above do not see it. A decision therefore takes
//! O(log n) for each level, where n is the number of busy nodes.
//!
//! The tree never rejects, loses or reorders requests: each token is returned exactly once, and the
//! requests of a disk in one direction are admitted in order of arrival.

use super::cause::CauseKind;
use super::cost::RequestCost;
use super::enforcement::Enforcement;
use super::heap::IndexedHeap;
use super::limits::{InvalidLimit, LimitKind, Limits};
use super::node::{NodeId, QueuedRequest, QueuedRequestId, ThrottleNode};
use super::reservations::{
    CapacitySupply, MAX_LEVELS, ReservableCapacity, ReservationExceeded, ThrottleError, reserved_by,
};
use super::scheduler::{ChildScheduler, TagLane};
use super::share::NodeShare;
use super::stats::{ThrottleStats, ThrottleSummary};
use crate::request::Direction;
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::vec::Vec;

mod cap;
mod lease;
mod moves;
mod serve;
mod spare;
mod transfer;
mod used_up;

pub use lease::{MemberDemands, QuotaLease};
use serve::ServicePath;

const ROOT: usize = 0;

/// Result of submitting a request.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum AdmissionResult<T> {
    /// Admitted and charged.
    Admitted(T),
    /// Queued. Call [`ThrottleTree::poll`] next, which returns the time of the next decision.
    Queued(QueuedRequestId),
}

/// Result of polling the tree.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum PollDecision<T> {
    /// This request is admitted and charged. There may be more: poll again.
    Admit(T),
    /// Nothing can be admitted before `until`. Then a request is admitted, or a slice of a large
    /// one is charged.
    Wait {
        /// Time of the next poll.
        until: Instant,
    },
    /// No request waits.
    Idle,
}

/// Throttle cause: the limit that a request waited for last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LevelCause {
    /// Level of the node with the limit: 0 is the disk, 1 its group, and so on upwards.
    pub level: usize,
    /// Kind of the limit, or the node's cap.
    pub kind: CauseKind,
}

/// A waiting request of a node that was removed. Slices that were charged are not refunded.
#[derive(Debug, PartialEq, Eq)]
pub struct ReturnedRequest<T> {
    /// Direction of the request.
    pub direction: Direction,
    /// Cost of the request.
    pub cost: RequestCost,
    /// Token of the request.
    pub token: T,
}

/// A throttle tree: disks with limits of their own and of the groups they belong to. All levels
/// apply at once.
///
/// `T` is a token for a waiting request.
///
/// # Protocol
///
/// 1. Call [`add`](ThrottleTree::add) once for every group and disk;
///    [`try_admit`](ThrottleTree::try_admit) or [`submit`](ThrottleTree::submit) once for every
///    read, write, write-zeroes and discard of a disk. Flushes move no data and are not submitted.
/// 2. After a request was queued, after a change of settings, after a removal, and when the timer
///    fires: call [`poll`](ThrottleTree::poll) until it returns something other than
///    [`PollDecision::Admit`]; on [`PollDecision::Wait`], arm one timer for the whole tree. A late
///    timer loses no more than a bucket can hold (a tenth of a second without a configured burst);
///    a spurious one is harmless.
/// 3. [`remove`](ThrottleTree::remove) returns waiting requests, which the caller must complete.
///
/// All instants must come from one clock; an instant before the latest one counts as the latest.
///
/// Order: first come, first served within a disk and direction. Between siblings: reservations that
/// are due, then by weight (`scheduler.rs`); each request or slice is one service. Between
/// directions: the same rule if they share a limit, otherwise alternation.
///
/// All methods panic if the [`NodeId`] was removed.
#[derive(Debug)]
pub struct ThrottleTree<T> {
    nodes: Vec<ThrottleNode<T>>,
    vacant: Vec<usize>,
    /// Throttled nodes by the time at which they can continue, one item for each direction
    /// ([`wake_item`]).
    wakes: IndexedHeap<Instant>,
    now: Instant,
    next_number: u64,
    path: ServicePath,
    /// Throttle cause of the request admitted last.
    last_cause: Option<LevelCause>,
    /// True once a disk has carried bucket contents from another group or tree into this one. Until
    /// then, a change of a group's limits need not visit the disks below the group.
    has_moved: bool,
    /// Quota leases, by slot, of nodes whose limits are divided over hosts. Few, so a linear search
    /// is enough.
    leases: Vec<(usize, QuotaLease)>,
    /// The earliest end of a lease.
    lease_ends: Instant,
}

impl<T> ThrottleTree<T> {
    /// An empty tree.
    pub fn new(now: Instant) -> Self {
        let mut root = ThrottleNode::new(ROOT, 0, Limits::default(), NodeShare::default(), now);
        root.schedule = Some(Box::new(ChildScheduler::new()));
        Self {
            nodes: Vec::from([root]),
            vacant: Vec::new(),
            wakes: IndexedHeap::new(),
            now,
            next_number: 0,
            path: ServicePath::new(),
            last_cause: None,
            has_moved: false,
            leases: Vec::new(),
            lease_ends: Instant::MAX,
        }
    }

    /// Adds a disk or a group with empty buckets, at the top level or below a group.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits; a reservation that does not fit; more than
    /// [`MAX_LEVELS`].
    ///
    /// # Panics
    /// Panics if requests wait in `parent` itself, because then it is a disk.
    pub fn add(
        &mut self,
        parent: Option<NodeId>,
        limits: Limits,
        share: NodeShare,
    ) -> Result<NodeId, ThrottleError> {
        self.add_node(None, parent, limits, share)
    }

    /// Adds a disk that replaces `replaced`, which the caller removes next. The reservation of
    /// `replaced` is cancelled first, which frees its capacity for the new disk.
    ///
    /// # Errors
    /// [`ThrottleError`], as [`ThrottleTree::add`]; the tree is unchanged.
    ///
    /// # Panics
    /// As [`ThrottleTree::add`].
    pub fn add_replacing(
        &mut self,
        replaced: NodeId,
        parent: Option<NodeId>,
        limits: Limits,
        share: NodeShare,
    ) -> Result<NodeId, ThrottleError> {
        self.add_node(Some(self.slot(replaced)), parent, limits, share)
    }

    fn add_node(
        &mut self,
        replaced: Option<usize>,
        parent: Option<NodeId>,
        limits: Limits,
        share: NodeShare,
    ) -> Result<NodeId, ThrottleError> {
        limits.validate_in_force()?;
        let parent = parent.map_or(ROOT, |parent| self.slot(parent));
        let level = self.nodes[parent].level + 1;
        if level > MAX_LEVELS {
            return Err(ThrottleError::TooDeep);
        }
        let has_waiting =
            Direction::ALL.iter().any(|direction| !self.nodes[parent].queue(*direction).is_empty());
        assert!(!has_waiting, "a disk with requests waiting cannot become a group");
        let reserved = reserved_by(share, [0; 2]);
        CapacitySupply { limits, device: ReservableCapacity::default() }.check(reserved)?;
        let freed = replaced.map(|replaced| self.reserved_without(replaced)).unwrap_or_default();
        self.check_reservations(parent, [0; 2], reserved, &freed)?;

        // All checks precede the first change, so an error leaves the tree unchanged.
        if let Some(replaced) = replaced {
            self.apply_share(replaced, self.nodes[replaced].share.with_reservation(0, 0));
        }
        let mut node = ThrottleNode::new(parent, level, limits, share, self.now);
        let slot = self.vacant.pop().unwrap_or(self.nodes.len());
        let schedule = self.nodes[parent].schedule.get_or_insert_with(|| Box::new(ChildScheduler::new()));
        node.number = schedule.add_child(slot as u32, share);
        node.has_shared_limit = self.nodes[parent].has_shared_limit || has_total_limit(&limits);
        if slot == self.nodes.len() {
            self.nodes.push(node);
        } else {
            node.generation = self.nodes[slot].generation + 1;
            self.nodes[slot] = node;
        }
        self.update_reserved(parent, [0; 2], reserved);
        Ok(self.id(slot))
    }

    /// Removes a node and returns its waiting requests in order of arrival.
    ///
    /// # Panics
    /// Panics if it has children.
    pub fn remove(&mut self, node: NodeId) -> Vec<ReturnedRequest<T>> {
        let slot = self.slot(node);
        let node = &mut self.nodes[slot];
        assert!(
            node.schedule.as_ref().is_none_or(|schedule| schedule.is_empty()),
            "a group with members cannot be removed"
        );
        let mut waiters = Vec::new();
        for direction in Direction::ALL {
            let queue = core::mem::take(self.nodes[slot].queue_mut(direction));
            self.update_waiting(slot, direction, |waiting| waiting - queue.len());
            waiters.extend(queue.into_iter().map(|waiter| (direction, waiter)));
            self.settle_up(slot, direction);
        }
        waiters.sort_unstable_by_key(|(_, waiter)| waiter.number);

        let node = &mut self.nodes[slot];
        node.present = false;
        self.remove_lease(slot);
        let node = &self.nodes[slot];
        let (parent, number, freed) =
            (node.parent, node.number, reserved_by(node.share, node.reserved_below));
        if let Some(schedule) = &mut self.nodes[parent].schedule {
            schedule.remove_child(number);
        }
        self.update_reserved(parent, freed, [0; 2]);
        self.vacant.push(slot);
        let returned = |(direction, waiter): (Direction, QueuedRequest<T>)| ReturnedRequest {
            direction,
            cost: waiter.cost,
            token: waiter.token,
        };
        waiters.into_iter().map(returned).collect()
    }

    /// Changes limits and share at once, also for waiting requests: poll afterwards.
    ///
    /// Work that was admitted under the old limits counts under the new ones: over any window,
    /// admitted work is at most the leak of the limits in force, plus one burst, however often they
    /// change. (QEMU starts with empty buckets and grants a burst with each change.) Leased limits
    /// ([`ThrottleTree::set_lease`]) are not changed.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or reservations that do not fit. The tree is unchanged,
    /// levels included.
    pub fn configure(
        &mut self,
        node: NodeId,
        limits: Limits,
        share: NodeShare,
        now: Instant,
    ) -> Result<(), ThrottleError> {
        limits.validate_in_force()?;
        let slot = self.slot(node);
        self.advance_to(now);
        let current = &self.nodes[slot];
        let (old, new) =
            (reserved_by(current.share, current.reserved_below), reserved_by(share, current.reserved_below));
        let limits = match self.lease(node) {
            Some(_) => self.check_supply(slot, new).map(|()| current.limits_without_quota())?,
            None => CapacitySupply { limits, device: current.device }.check(new).map(|()| limits)?,
        };
        self.check_reservations(self.nodes[slot].parent, old, new, &[])?;
        if share != self.nodes[slot].share {
            self.apply_share(slot, share);
        }
        self.apply_configured(slot, limits);
        Ok(())
    }

    /// Sets the quota of a node: this host's part of limits that are divided over hosts
    /// ([`cluster`](crate::cluster)). Poll afterwards.
    ///
    /// A larger bucket gains capacity only by `credit`. Returns the capacity that a smaller bucket
    /// gives up. Both are in whole units, by [`LimitKind::index`]. The first quota begins with full
    /// buckets, so it grants no burst. Reservations below the node are not checked: they may exceed
    /// the quota.
    ///
    /// # Errors
    /// [`InvalidLimit`] limits change nothing.
    pub fn set_quota(
        &mut self,
        node: NodeId,
        limits: Limits,
        credit: [u64; 6],
        now: Instant,
    ) -> Result<[u64; 6], InvalidLimit> {
        limits.validate_in_force()?;
        let slot = self.slot(node);
        self.advance_to(now);
        Ok(self.apply_quota(slot, limits, credit))
    }

    /// Sets the reservable capacity of the device below a node: reservations at and below the node
    /// must fit into it.
    ///
    /// # Errors
    /// [`ThrottleError`] if existing reservations exceed it. The previous capacity stays in force.
    pub fn set_reservable(&mut self, node: NodeId, device: ReservableCapacity) -> Result<(), ThrottleError> {
        let slot = self.slot(node);
        let node = &mut self.nodes[slot];
        CapacitySupply { limits: Limits::default(), device }
            .check(reserved_by(node.share, node.reserved_below))?;
        node.device = device;
        Ok(())
    }

    /// Changes the enforcement of a node's limits: poll afterwards. Bucket levels are kept. While a
    /// quota by volume is used up, all limits of the node are enforced.
    pub fn enforce(&mut self, node: NodeId, enforcement: Enforcement, now: Instant) {
        let slot = self.slot(node);
        self.advance_to(now);
        self.nodes[slot].set_enforcement = enforcement;
        self.apply_enforcement(slot);
    }

    fn apply_enforcement(&mut self, slot: usize) {
        let node = &mut self.nodes[slot];
        let (before, enforcement) = (node.enforcement, node.effective_enforcement());
        if before == enforcement {
            return;
        }
        node.enforce(enforcement, self.now);
        self.apply_enforcement_to_carried(slot, before);
        self.settle_both_up(slot);
    }

    /// Submits a request of a disk. If it must wait, `token` is returned by a later poll.
    ///
    /// # Panics
    /// Panics if the node has children, because then it is a group.
    pub fn submit(
        &mut self,
        disk: NodeId,
        direction: Direction,
        cost: RequestCost,
        token: T,
        now: Instant,
    ) -> AdmissionResult<T> {
        if self.try_admit(disk, direction, &cost, now) {
            return AdmissionResult::Admitted(token);
        }
        let number = self.next_number;
        self.next_number += 1;
        let parent = self.nodes[disk.slot].parent;
        let limited_ns = [disk.slot, parent].map(|slot| self.nodes[slot].throttled_ns(self.now));
        let waiter = QueuedRequest {
            number,
            since: self.now,
            cost,
            charged_parts: 0,
            throttled_ns: limited_ns,
            token,
        };
        let queue = self.nodes[disk.slot].queue_mut(direction);
        let is_first = queue.is_empty();
        queue.push_back(waiter);
        self.update_waiting(disk.slot, direction, |waiting| waiting + 1);
        // A request behind another one changes no schedule.
        if is_first {
            self.settle_up(disk.slot, direction);
        }
        AdmissionResult::Queued(QueuedRequestId { node: disk, direction, number })
    }

    /// Cancels a waiting request; slices that were charged are not refunded. `None` if it was
    /// admitted, cancelled or returned before.
    pub fn cancel(&mut self, ticket: QueuedRequestId) -> Option<T> {
        let QueuedRequestId { node: NodeId { slot, generation }, direction, number } = ticket;
        let node = self.nodes.get_mut(slot).filter(|node| node.present && node.generation == generation)?;
        let waiter = node.remove_queued(direction, number)?;
        self.update_waiting(slot, direction, |waiting| waiting - 1);
        self.settle_up(slot, direction);
        Some(waiter.token)
    }

    /// True if no limit or cap is set at this node or above, so that its requests need not be
    /// submitted.
    pub fn is_unlimited(&self, node: NodeId) -> bool {
        self.path_up(self.slot(node)).all(|slot| !self.nodes[slot].has_buckets())
    }

    /// A node's own limits as set.
    pub fn limits(&self, node: NodeId) -> Limits {
        self.nodes[self.slot(node)].limits()
    }

    /// A node's share of its parent.
    pub fn share(&self, node: NodeId) -> NodeShare {
        self.nodes[self.slot(node)].share
    }

    /// Enforcement of a node's limits.
    pub fn enforcement(&self, node: NodeId) -> Enforcement {
        self.nodes[self.slot(node)].enforcement
    }

    /// Enforcement of a node's limits as set by [`ThrottleTree::enforce`].
    pub fn set_enforcement(&self, node: NodeId) -> Enforcement {
        self.nodes[self.slot(node)].set_enforcement
    }

    /// The group that contains a node; `None` at the top level.
    pub fn parent(&self, node: NodeId) -> Option<NodeId> {
        let parent = self.nodes[self.slot(node)].parent;
        (parent != ROOT).then(|| self.id(parent))
    }

    /// Members of a group, in no particular order.
    pub fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let schedule = self.nodes[self.slot(node)].schedule.as_ref();
        schedule.into_iter().flat_map(|schedule| schedule.slots()).map(|slot| self.id(slot))
    }

    /// Number of requests of this direction that wait at or below a node.
    pub fn waiting(&self, node: NodeId, direction: Direction) -> usize {
        self.nodes[self.slot(node)].waiting[direction.index()]
    }

    /// Statistics of a node as of `now`.
    pub fn stats(&self, node: NodeId, now: Instant) -> ThrottleStats {
        self.nodes[self.slot(node)].stats(self.now.max(now))
    }

    /// The part of [`ThrottleTree::stats`] that is cheap to compute.
    pub fn summary(&self, node: NodeId, now: Instant) -> ThrottleSummary {
        self.nodes[self.slot(node)].summary(self.now.max(now))
    }

    fn apply_limits(&mut self, slot: usize, limits: Limits) {
        let before = self.nodes[slot].limits();
        self.nodes[slot].set_limits(limits, self.now);
        self.apply_limits_to_carried(slot, &before);
        self.update_shared_limits(slot);
        self.settle_both_up(slot);
    }

    fn apply_share(&mut self, slot: usize, share: NodeShare) {
        let node = &mut self.nodes[slot];
        let parent = node.parent;
        let (old, new) =
            (reserved_by(node.share, node.reserved_below), reserved_by(share, node.reserved_below));
        node.set_share(share, self.now);
        self.update_reserved(parent, old, new);
        self.update_entitlement(slot);
    }

    fn update_entitlement(&mut self, slot: usize) {
        let node = &self.nodes[slot];
        let (parent, number, entitlement) = (node.parent, node.number, node.entitlement());
        if let Some(schedule) = &mut self.nodes[parent].schedule {
            for direction in Direction::ALL {
                // Keys in the heaps depend on the share, so the child is withdrawn and offered
                // again.
                schedule.withdraw(number, direction);
            }
            schedule.set_share(number, entitlement);
        }
        self.settle_both_up(slot);
    }

    fn slot(&self, id: NodeId) -> usize {
        let node = &self.nodes[id.slot];
        assert!(node.present && node.generation == id.generation, "the node was removed");
        id.slot
    }

    fn id(&self, slot: usize) -> NodeId {
        NodeId { slot, generation: self.nodes[slot].generation }
    }

    /// A node and its ancestors, without the root.
    fn path_up(&self, slot: usize) -> impl Iterator<Item = usize> + '_ {
        let up = |slot: usize| (slot != ROOT).then_some(slot);
        core::iter::successors(up(slot), move |slot| up(self.nodes[*slot].parent))
    }

    fn update_waiting(&mut self, slot: usize, direction: Direction, change: impl Fn(usize) -> usize) {
        let mut at = slot;
        loop {
            let node = &mut self.nodes[at];
            let waiting = &mut node.waiting[direction.index()];
            *waiting = change(*waiting);
            if let Some(monitor) = &mut node.reservation_monitor {
                monitor.set_waiting(node.waiting != [0; 2], self.now);
            }
            if at == ROOT {
                return;
            }
            at = self.nodes[at].parent;
        }
    }

    /// Checks, upwards from `slot`, that a child's reservation may change from `old` to `new`. For
    /// nodes in `freed`, the sums given there are used instead of the current ones.
    fn check_reservations(
        &self,
        slot: usize,
        old: [u64; 2],
        new: [u64; 2],
        freed: &[(usize, [u64; 2])],
    ) -> Result<(), ReservationExceeded> {
        if new == [0; 2] {
            // Needs no capacity, even where the reservations exceed it because it has fallen: the
            // quota of a lease does.
            return Ok(());
        }
        let (mut old, mut new) = (old, new);
        for slot in self.path_up(slot) {
            let node = &self.nodes[slot];
            let before =
                freed.iter().find(|(at, _)| *at == slot).map_or(node.reserved_below, |(_, sum)| *sum);
            let reserved = replace_in_sum(before, old, new);
            self.check_supply(slot, reserved)?;
            (old, new) = (reserved_by(node.share, before), reserved_by(node.share, reserved));
        }
        Ok(())
    }

    /// Sums of reservations in each ancestor of a node, without those of the node.
    fn reserved_without(&self, slot: usize) -> Vec<(usize, [u64; 2])> {
        let node = &self.nodes[slot];
        let (mut old, mut new) = (reserved_by(node.share, node.reserved_below), [0; 2]);
        let above = self.path_up(node.parent).map(|slot| {
            let node = &self.nodes[slot];
            let reserved = replace_in_sum(node.reserved_below, old, new);
            (old, new) = (reserved_by(node.share, node.reserved_below), reserved_by(node.share, reserved));
            (slot, reserved)
        });
        above.collect()
    }

    /// Records, upwards from `slot`, that a child's reservation has changed from `old` to `new`.
    fn update_reserved(&mut self, slot: usize, old: [u64; 2], new: [u64; 2]) {
        let (mut at, mut old, mut new) = (slot, old, new);
        while at != ROOT && old != new {
            let node = &mut self.nodes[at];
            let reserved = replace_in_sum(node.reserved_below, old, new);
            (old, new) = (reserved_by(node.share, node.reserved_below), reserved_by(node.share, reserved));
            node.reserved_below = reserved;
            let above = node.parent;
            // The limit of a used-up quota follows the reservations.
            self.apply_configured(at, self.nodes[at].limits_without_quota());
            if old != new {
                // The parent's scheduler orders this node by its reservation, including the sum.
                self.update_entitlement(at);
            }
            at = above;
        }
    }

    /// Recomputes, downwards from `slot`, where the two directions share a limit. If that changes,
    /// tags change their meaning and are reset.
    fn update_shared_limits(&mut self, slot: usize) {
        let mut below = Vec::from([slot]);
        while let Some(slot) = below.pop() {
            let above = self.nodes[self.nodes[slot].parent].has_shared_limit;
            let node = &mut self.nodes[slot];
            let shared = above || has_total_limit(&node.limits()) || has_total_limit(&node.cap_limits());
            if shared == node.has_shared_limit {
                continue;
            }
            node.has_shared_limit = shared;
            if let Some(schedule) = &mut node.schedule {
                schedule.reset_tags();
                below.extend(schedule.slots());
            }
        }
    }
}

fn has_total_limit(limits: &Limits) -> bool {
    limits.limit(LimitKind::BpsTotal).rate > 0 || limits.limit(LimitKind::IopsTotal).rate > 0
}

fn replace_in_sum(sum: [u64; 2], old: [u64; 2], new: [u64; 2]) -> [u64; 2] {
    // Saturates: if nothing bounds the reservations, their sum may exceed 64 bits.
    [0, 1].map(|unit| (sum[unit] - old[unit].min(sum[unit])).saturating_add(new[unit]))
}

const fn wake_item(slot: usize, direction: Direction) -> u32 {
    (slot * 2 + direction.index()) as u32
}

const fn lane_of<T>(node: &ThrottleNode<T>, direction: Direction) -> TagLane {
    TagLane::new(direction, node.has_shared_limit)
}
