//! A disk's slot in a throttle tree (`ThrottleSlot`): admission of its requests, and its move to
//! another tree while some of them wait.
//!
//! ```text
//!   submit, cancel ──► the slot's lock ──► the tree's lock ──► the waiter's lock
//!   move ────────────► the slot's lock ──► both trees' locks, the older first ──► the waiters' locks
//! ```
//!
//! Locks are always acquired from left to right, so there is no deadlock. A request that is
//! submitted or cancelled holds the slot's lock until it holds the tree's, so a move is either
//! before it or after it. A waiting request is in exactly one tree's queue, or was removed
//! by a thread that is about to admit it. The waiter stores its [`WaiterPosition`], so that a
//! cancellation after a move removes the right request from the right tree.
//!
//! Independent of the reactor: time is an argument, and timers are returned to the caller.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, PoisonError},
    task::{Context, Poll},
};

use policy::{
    request::Direction,
    schedule::{ConfiguredLimits, ScheduledLimits},
    throttle::{
        AdmissionCounters, AdmissionResult, CumulativeStats, LevelCause, NodeId, RequestCost, SpareRefund,
        ThrottleError, ThrottleStats, ThrottleSummary,
    },
    time::Instant,
};

use super::{
    settings::DiskSettings,
    sync::{AtomicBool, Mutex, MutexGuard, Ordering},
    tree::{SharedThrottleTree, TreeTimer, UnlimitedFlag},
    waiter::{ThrottleWaiter, WaiterPosition},
};

/// A disk's slot. `K` is data of its owner that changes together with the location.
#[derive(Debug)]
pub(super) struct ThrottleSlot<K> {
    location: Mutex<SlotLocation<K>>,
    unlimited_flag: UnlimitedFlag,
}

/// Location of a slot in a tree.
#[derive(Debug)]
pub(super) struct SlotLocation<K> {
    pub(super) shared_tree: Arc<SharedThrottleTree>,
    pub(super) node: NodeId,
    pub(super) settings: DiskSettings,
    /// Size of the disk, which its limits may follow.
    pub(super) size_bytes: u64,
    /// Limits that replace those of the settings at times.
    pub(super) scheduled: ScheduledLimits,
    pub(super) owner_data: K,
    /// Statistics of the nodes that the disk had before its last move.
    earlier: EarlierStats,
}

/// The cumulative part of [`ThrottleStats`].
#[derive(Debug, Default)]
struct EarlierStats {
    reads: AdmissionCounters,
    writes: AdmissionCounters,
    limited_ns: u64,
    max_wait_ns: u64,
}

/// Target of a move: the tree, and the group in it.
#[derive(Debug)]
pub(super) struct SlotDestination<K> {
    pub(super) shared_tree: Arc<SharedThrottleTree>,
    pub(super) parent: Option<NodeId>,
    pub(super) owner_data: K,
}

/// Result of a request for admission.
#[derive(Debug)]
pub(super) enum AdmitOutcome<'a, K> {
    /// It is admitted, and has been charged.
    Admitted,
    /// It waits, in that tree. Call [`SharedThrottleTree::admit_ready`] next.
    Waiting(WaitingAdmission<'a, K>, Arc<SharedThrottleTree>),
}

/// A waiting request. Ready when it is admitted; dropping it before cancels the request.
#[derive(Debug)]
pub(super) struct WaitingAdmission<'a, K> {
    slot: &'a ThrottleSlot<K>,
    waiter: Arc<ThrottleWaiter>,
}

impl<K> ThrottleSlot<K> {
    /// Adds the disk to a tree.
    pub(super) fn new(
        settings: DiskSettings,
        size_bytes: u64,
        at: SlotDestination<K>,
        now: Instant,
    ) -> Result<Self, ThrottleError> {
        let flag = UnlimitedFlag::new(AtomicBool::new(false));
        let SlotDestination { shared_tree: arbiter, parent, owner_data: kept } = at;
        let scheduled = ScheduledLimits::default();
        let limits = scheduled.without_quota(&configured_limits(&settings, size_bytes))?;
        let share = settings.share;
        let node = arbiter.lock().add(None, parent, limits, share, Some(Arc::clone(&flag)), now)?;
        Ok(Self {
            location: Mutex::new(SlotLocation {
                shared_tree: arbiter,
                node,
                settings,
                size_bytes,
                scheduled,
                owner_data: kept,
                earlier: EarlierStats::default(),
            }),
            unlimited_flag: flag,
        })
    }

    /// Locks the slot; precedes any tree's lock.
    pub(super) fn lock(&self) -> MutexGuard<'_, SlotLocation<K>> {
        // The location is replaced as a whole, after all code that could panic.
        self.location.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if no limit applies to the disk now, so that its requests bypass the tree.
    pub(super) fn is_unlimited(&self) -> bool {
        // Relaxed: a request that loads the old flag is ordered before the new limits.
        self.unlimited_flag.load(Ordering::Relaxed)
    }

    /// Asks for admission of a request.
    pub(super) fn admit(&self, direction: Direction, cost: RequestCost, now: Instant) -> AdmitOutcome<'_, K> {
        let location = self.lock();
        let mut locked = location.shared_tree.lock();
        if locked.tree().try_admit(location.node, direction, &cost, now) {
            return AdmitOutcome::Admitted;
        }
        // Allocated only for a request that must wait; most are admitted above.
        let waiter = Arc::new(ThrottleWaiter::default());
        match locked.tree().submit(location.node, direction, cost, Arc::clone(&waiter), now) {
            AdmissionResult::Admitted(_) => AdmitOutcome::Admitted,
            AdmissionResult::Queued(ticket) => {
                waiter.set_position(WaiterPosition { tree_id: locked.id(), ticket });
                AdmitOutcome::Waiting(
                    WaitingAdmission { slot: self, waiter },
                    Arc::clone(&location.shared_tree),
                )
            }
        }
    }

    /// Asks for admission of a batch of requests, in order, and charges those that are admitted.
    /// Has no effect on the rest. Calls `on_decision` under the locks.
    pub(super) fn try_admit_batch(
        &self,
        requests: impl Iterator<Item = (Direction, RequestCost)>,
        now: Instant,
        mut on_decision: impl FnMut(&RequestCost, bool),
    ) {
        let location = self.lock();
        let mut locked = location.shared_tree.lock();
        for (direction, cost) in requests {
            on_decision(&cost, locked.tree().try_admit(location.node, direction, &cost, now));
        }
    }

    /// Charges a request that is admitted in any case.
    pub(super) fn charge_unconditionally(&self, direction: Direction, cost: &RequestCost, now: Instant) {
        let location = self.lock();
        location.shared_tree.lock().tree().charge_unconditionally(location.node, direction, cost, now);
    }

    /// Asks for a read-ahead, and charges it to spare capacity if it is admitted. See
    /// [`policy::throttle::ThrottleTree::try_admit_read_ahead`].
    pub(super) fn try_read_ahead(&self, cost: &RequestCost, refund: SpareRefund, now: Instant) -> bool {
        let location = self.lock();
        location.shared_tree.lock().tree().try_admit_read_ahead(location.node, cost, refund, now)
    }

    /// As [`ThrottleSlot::try_read_ahead`], for background work, which asks again if it is refused.
    ///
    /// # Errors
    /// The limit or cap without spare capacity, if it is known.
    pub(super) fn try_background(&self, cost: &RequestCost, now: Instant) -> Result<(), Option<LevelCause>> {
        let location = self.lock();
        let mut locked = location.shared_tree.lock();
        let refund = SpareRefund::default();
        if locked.tree().try_admit_read_ahead(location.node, cost, refund, now) {
            return Ok(());
        }
        locked.tree().record_cap_wait(location.node, now);
        Err(locked.tree().spare_cause(location.node, now))
    }

    /// Statistics of the current node and of earlier ones: counters and the longest wait of all
    /// nodes, percentiles of the waits since the last move.
    pub(super) fn stats(&self, now: Instant) -> ThrottleStats {
        let location = self.lock();
        let mut stats = location.shared_tree.lock().tree().stats(location.node, now);
        let earlier = &location.earlier;
        stats.reads = stats.reads.sum(earlier.reads);
        stats.writes = stats.writes.sum(earlier.writes);
        stats.throttled_ns = stats.throttled_ns.saturating_add(earlier.limited_ns);
        stats.waits.max_ns = stats.waits.max_ns.max(earlier.max_wait_ns);
        stats
    }

    /// The cumulative counters, for another process.
    pub(super) fn counters(&self, now: Instant) -> CumulativeStats {
        let location = self.lock();
        let mut stats = location.shared_tree.lock().tree().cumulative(location.node, now);
        let EarlierStats { reads, writes, limited_ns, max_wait_ns } = location.earlier;
        for (passed, earlier) in stats.passed.iter_mut().zip([reads, writes]) {
            *passed = passed.sum(earlier);
        }
        stats.throttled_ns = stats.throttled_ns.saturating_add(limited_ns);
        stats.longest_wait_ns = stats.longest_wait_ns.max(max_wait_ns);
        stats
    }

    /// Adds the counters of another process.
    pub(super) fn add_counters(&self, stats: &CumulativeStats) {
        let location = self.lock();
        location.shared_tree.lock().tree().add_cumulative(location.node, stats);
    }

    pub(super) fn brief(&self, now: Instant) -> ThrottleSummary {
        let location = self.lock();
        let summary = location.shared_tree.lock().tree().summary(location.node, now);
        ThrottleSummary {
            throttled_ns: summary.throttled_ns.saturating_add(location.earlier.limited_ns),
            ..summary
        }
    }

    /// Cancels a waiting request. Does nothing if it is admitted, or about to be.
    fn cancel(&self, waiter: &ThrottleWaiter) {
        let location = self.lock();
        let mut locked = location.shared_tree.lock();
        // A request that was removed from its queue and is about to be admitted may still have the
        // position of an earlier tree.
        let position = waiter.position().filter(|position| position.tree_id == locked.id());
        if let Some(WaiterPosition { ticket, .. }) = position {
            drop(locked.tree().cancel(ticket));
        }
    }

    /// Moves to another tree or group, optionally with new settings. Waiting requests move along in
    /// order, and are admitted if the new limits allow it.
    pub(super) fn move_to(
        &self,
        to: SlotDestination<K>,
        settings: Option<DiskSettings>,
        scheduled: Option<ScheduledLimits>,
        now: Instant,
    ) -> Result<[Option<TreeTimer>; 2], ThrottleError> {
        let mut location = self.lock();
        let settings = settings.unwrap_or(location.settings);
        let scheduled = scheduled.unwrap_or_else(|| location.scheduled.clone());
        let from = Arc::clone(&location.shared_tree);
        let mut admitted = Vec::new();
        {
            // Both trees stay locked for the whole move: no request can be admitted in between, or
            // overtake another one.
            let (mut old, mut other) = SharedThrottleTree::lock_both(&from, &to.shared_tree);
            let limits = scheduled.without_quota(&configured_limits(&settings, location.size_bytes))?;
            let share = settings.share;
            let flag = Some(Arc::clone(&self.unlimited_flag));
            // Within one tree, the reservation must not be counted twice in the groups above both
            // nodes.
            let replaced = other.is_none().then_some(location.node);
            let new = other.as_mut().unwrap_or(&mut old);
            let node = new.add(replaced, to.parent, limits, share, flag, now)?;
            new.set_used_up_rate(node, scheduled.used_up_rate_bps(&settings.quota), now);
            // Statistics and charges are read before the node is removed.
            let old_stats = old.tree().stats(location.node, now);
            let replacement = replaced.map(|_| node);
            // Charges of the old limits carry over, so that a move grants no burst.
            let charged = old.tree().carried_charges(location.node, replacement, now);
            let waiting = old.remove(location.node);
            let new = other.as_mut().unwrap_or(&mut old);
            new.tree().add_carried_charges(node, charged, now);
            // In queue order, so that the order of the disk's requests is kept.
            for request in waiting {
                let waiter = Arc::clone(&request.token);
                match new.tree().submit(node, request.direction, request.cost, request.token, now) {
                    AdmissionResult::Admitted(waiter) => admitted.push(waiter),
                    AdmissionResult::Queued(ticket) => {
                        waiter.set_position(WaiterPosition { tree_id: new.id(), ticket });
                    }
                }
            }
            location.earlier.add(&old_stats);
            location.node = node;
            location.settings = settings;
            location.scheduled = scheduled;
        }
        let owner_data = std::mem::replace(&mut location.owner_data, to.owner_data);
        location.shared_tree = Arc::clone(&to.shared_tree);
        drop(location);
        // Dropped without locks: this may drop the old group, which locks its tree.
        drop(owner_data);
        for waiter in admitted {
            // No limit of the new tree has throttled it, so there is no throttle cause.
            waiter.admit(None);
        }
        // Requests of other disks in the old tree may have waited for the ones that moved.
        Ok([from.admit_ready(now), to.shared_tree.admit_ready(now)])
    }
}

/// Settings of a disk of this size, from which its limits in force are computed.
const fn configured_limits(settings: &DiskSettings, size_bytes: u64) -> ConfiguredLimits {
    let &DiskSettings { limits, share, quota, .. } = settings;
    ConfiguredLimits { limits, quota, share, size_bytes: Some(size_bytes) }
}

impl<K> SlotLocation<K> {
    /// Puts settings in force, with the entry of a schedule that holds, at the size of the disk.
    /// Call [`SharedThrottleTree::admit_ready`] next.
    pub(super) fn configure(
        &mut self,
        settings: DiskSettings,
        scheduled: ScheduledLimits,
        now: Instant,
    ) -> Result<(), ThrottleError> {
        let limits = scheduled.without_quota(&configured_limits(&settings, self.size_bytes))?;
        let mut locked = self.shared_tree.lock();
        locked.configure(self.node, limits, settings.share, now)?;
        locked.set_used_up_rate(self.node, scheduled.used_up_rate_bps(&settings.quota), now);
        drop(locked);
        self.settings = settings;
        self.scheduled = scheduled;
        Ok(())
    }
}

impl EarlierStats {
    fn add(&mut self, stats: &ThrottleStats) {
        self.reads = self.reads.sum(stats.reads);
        self.writes = self.writes.sum(stats.writes);
        self.limited_ns = self.limited_ns.saturating_add(stats.throttled_ns);
        self.max_wait_ns = self.max_wait_ns.max(stats.waits.max_ns);
    }
}

impl<K> Future for WaitingAdmission<'_, K> {
    /// Throttle cause.
    type Output = Option<LevelCause>;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<LevelCause>> {
        self.waiter.poll(context)
    }
}

impl<K> Drop for WaitingAdmission<'_, K> {
    fn drop(&mut self) {
        if self.waiter.position().is_some() {
            self.slot.cancel(&self.waiter);
        }
    }
}

impl<K> Drop for ThrottleSlot<K> {
    fn drop(&mut self) {
        // Requests reference the disk, which owns this slot: no request can be waiting here.
        let location = self.lock();
        let waiting = location.shared_tree.lock().remove(location.node);
        debug_assert!(waiting.is_empty(), "a disk went while requests of it waited");
    }
}
