//! The throttle tree of groups and disks (`SharedThrottleTree`): the decisions of `policy` behind a
//! lock, and the tasks that they wake.
//!
//! There is one for each top-level group, and one for each disk without a group: disks without
//! common limits share no lock.
//!
//! ```text
//!   request ─┐                   ┌─ admitted waiters, BATCH at a time ──► woken without the lock
//!   set ─────┼─► lock ─► policy ─┤
//!   timer ───┘                   └─ wait until t ──► t, unless a timer fires by then: caller arms one
//! ```
//!
//! Time is an argument, and timers are returned as instants, so that the model check runs it
//! without a reactor. The lock is held for a decision or a batch of them, never across an `.await`,
//! never while a task is woken.
//!
//! Never loses a request: a request that leaves policy is admitted, or returned to the slot that
//! moves or cancels it.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::BuildHasherDefault,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering as Order},
    },
};

use policy::{
    throttle::{
        Enforcement, InvalidLimit, LevelCause as HeldBy, Limits, NodeId, NodeShare, PollDecision, QuotaLease,
        ThrottleError, ThrottleTree,
    },
    time::Instant,
};

use super::{
    sync::{AtomicBool, Mutex, MutexGuard, Ordering},
    waiter::ThrottleWaiter,
};

/// Maximum number of waiters admitted under one hold of the lock. If limits are lifted for
/// thousands of requests at once, other threads get the lock in between.
const BATCH: usize = 32;

/// Flag of a disk: true if no limit applies to its requests, which then bypass the tree.
pub(super) type UnlimitedFlag = Arc<AtomicBool>;

/// The nodes of a tree; disks with the flags to update. The hash has no random key, so that a
/// simulation with the same seed is deterministic.
type Nodes = HashMap<NodeId, Option<UnlimitedFlag>, BuildHasherDefault<DefaultHasher>>;

/// A tree with its lock: see the head of this file.
#[derive(Debug)]
pub(super) struct SharedThrottleTree {
    /// Unique among all trees of the process. Locks of two trees are acquired in this order.
    id: u64,
    state: Mutex<SharedThrottleTreeState>,
}

#[derive(Debug)]
struct SharedThrottleTreeState {
    tree: ThrottleTree<Arc<ThrottleWaiter>>,
    /// Instant of the earliest armed timer. A timer that was armed for a later instant still fires,
    /// and finds nothing to do.
    timer: Option<Instant>,
    /// All nodes; disks with their flags.
    nodes: Nodes,
    /// True if all limits are lifted permanently.
    lifted: bool,
}

/// An admitted request, and its throttle cause.
type AdmittedWaiter = (Arc<ThrottleWaiter>, Option<HeldBy>);

/// A locked tree.
pub(super) struct LockedTree<'a> {
    id: u64,
    state: MutexGuard<'a, SharedThrottleTreeState>,
}

/// A timer to arm: at this instant, call [`SharedThrottleTree::fire`].
#[derive(Debug)]
#[must_use = "what waits would wait forever"]
pub(super) struct TreeTimer {
    pub(super) shared_tree: Arc<SharedThrottleTree>,
    pub(super) at: Instant,
}

impl SharedThrottleTree {
    /// Creates an empty tree.
    pub(super) fn new(now: Instant) -> Arc<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let state = SharedThrottleTreeState {
            tree: ThrottleTree::new(now),
            timer: None,
            nodes: Nodes::default(),
            lifted: false,
        };
        let id = NEXT_ID.fetch_add(1, Order::Relaxed);
        Arc::new(Self { id, state: Mutex::new(state) })
    }

    /// Locks the tree.
    pub(super) fn lock(&self) -> LockedTree<'_> {
        // A panic under the lock is a bug in policy; its counters may be inconsistent, but no
        // reference dangles.
        LockedTree { id: self.id, state: self.state.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Locks two trees in the global order; only one if they are the same.
    pub(super) fn lock_both<'a>(one: &'a Self, other: &'a Self) -> (LockedTree<'a>, Option<LockedTree<'a>>) {
        match one.id.cmp(&other.id) {
            // The same tree: a second lock of its mutex would deadlock.
            std::cmp::Ordering::Equal => (one.lock(), None),
            std::cmp::Ordering::Less => {
                let first = one.lock();
                (first, Some(other.lock()))
            }
            std::cmp::Ordering::Greater => {
                let first = other.lock();
                (one.lock(), Some(first))
            }
        }
    }

    /// Admits and wakes all requests that the limits allow by now. Returns a timer for the rest,
    /// unless an armed one fires early enough.
    pub(super) fn admit_ready(self: &Arc<Self>, now: Instant) -> Option<TreeTimer> {
        let mut admitted = Vec::new();
        loop {
            let (has_more, timer) = self.lock().next_batch(now, &mut admitted);
            // Without the lock: waking a task may run other code.
            for (waiter, cause) in admitted.drain(..) {
                waiter.admit(cause);
            }
            if !has_more {
                return timer.map(|at| TreeTimer { shared_tree: Arc::clone(self), at });
            }
        }
    }

    /// Handles the timer for `at`.
    pub(super) fn fire(self: &Arc<Self>, at: Instant, now: Instant) -> Option<TreeTimer> {
        {
            let mut locked = self.lock();
            // Only if no earlier timer has replaced it.
            if locked.state.timer == Some(at) {
                locked.state.timer = None;
            }
        }
        self.admit_ready(now)
    }

    /// Lifts all limits of the tree permanently.
    pub(super) fn lift_limits(self: &Arc<Self>, now: Instant) -> Option<TreeTimer> {
        {
            let mut locked = self.lock();
            let SharedThrottleTreeState { tree, nodes, lifted, .. } = &mut *locked.state;
            // At shutdown every disk of the tree calls this; the first call has lifted the limits.
            if *lifted {
                return None;
            }
            *lifted = true;
            for &node in nodes.keys() {
                // First, because a used-up quota is not lifted.
                tree.set_used_up_rate(node, 0, now);
                tree.enforce(node, Enforcement::Lifted, now);
                tree.set_cap(node, None, now).expect("no limits are valid");
            }
            locked.update_flags();
        }
        self.admit_ready(now)
    }
}

impl LockedTree<'_> {
    /// Number of the tree, which determines the order of locks.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// The tree.
    pub(super) fn tree(&mut self) -> &mut ThrottleTree<Arc<ThrottleWaiter>> {
        &mut self.state.tree
    }

    /// Adds a group, or a disk with its flag. With `replaced`, the reservation of that node is
    /// replaced: the caller removes it next.
    pub(super) fn add(
        &mut self,
        replaced: Option<NodeId>,
        parent: Option<NodeId>,
        limits: Limits,
        share: NodeShare,
        flag: Option<UnlimitedFlag>,
        now: Instant,
    ) -> Result<NodeId, ThrottleError> {
        let SharedThrottleTreeState { tree, nodes, lifted, .. } = &mut *self.state;
        let node = match replaced {
            Some(replaced) => tree.add_replacing(replaced, parent, limits, share)?,
            None => tree.add(parent, limits, share)?,
        };
        if *lifted {
            tree.enforce(node, Enforcement::Lifted, now);
        }
        if let Some(flag) = &flag {
            flag.store(*lifted || tree.is_unlimited(node), Ordering::Relaxed);
        }
        nodes.insert(node, flag);
        Ok(node)
    }

    /// Sets the enforcement of a node's limits. Call [`SharedThrottleTree::admit_ready`]
    /// afterwards.
    pub(super) fn enforce(&mut self, node: NodeId, enforcement: Enforcement, now: Instant) {
        if !self.state.lifted {
            self.state.tree.enforce(node, enforcement, now);
        }
    }

    /// Sets or removes the cap of a node; returns false if it has this cap already, or limits are
    /// lifted permanently. Call [`SharedThrottleTree::admit_ready`] after a change.
    ///
    /// # Panics
    /// Panics if the cap's limits are invalid.
    pub(super) fn set_cap(&mut self, node: NodeId, cap: Option<Limits>, now: Instant) -> bool {
        let SharedThrottleTreeState { tree, nodes, lifted, .. } = &mut *self.state;
        let before = tree.cap(node);
        if *lifted || before == cap {
            return false;
        }
        tree.set_cap(node, cap, now).expect("valid limits");
        if before.is_some() != cap.is_some() {
            match nodes.get(&node) {
                // No node is below a disk, so only its own flag changes.
                Some(Some(flag)) => flag.store(tree.is_unlimited(node), Ordering::Relaxed),
                _ => self.update_flags(),
            }
        }
        true
    }

    /// Removes a node without children; returns its waiting requests.
    pub(super) fn remove(
        &mut self,
        node: NodeId,
    ) -> Vec<policy::throttle::ReturnedRequest<Arc<ThrottleWaiter>>> {
        self.state.nodes.remove(&node);
        self.state.tree.remove(node)
    }

    /// Puts limits and share in force: both or neither. Call [`SharedThrottleTree::admit_ready`]
    /// afterwards.
    ///
    /// Charges carry over to the new limits: a change grants no burst.
    pub(super) fn configure(
        &mut self,
        node: NodeId,
        limits: Limits,
        share: NodeShare,
        now: Instant,
    ) -> Result<(), ThrottleError> {
        let was_unlimited = self.state.tree.limits(node).is_unlimited();
        // Flags depend on whether a node has limits, not on their values.
        self.state.tree.configure(node, limits, share, now)?;
        self.update_flags_if_changed(node, was_unlimited);
        Ok(())
    }

    /// Puts the limit of a used-up quota by volume in force, or removes it (0): see
    /// [`policy::throttle::ThrottleTree::set_used_up_rate`]. No effect once limits are lifted
    /// permanently. Call [`SharedThrottleTree::admit_ready`] afterwards.
    pub(super) fn set_used_up_rate(&mut self, node: NodeId, rate_bps: u64, now: Instant) {
        if !self.state.lifted {
            let was_unlimited = self.state.tree.limits(node).is_unlimited();
            self.state.tree.set_used_up_rate(node, rate_bps, now);
            self.update_flags_if_changed(node, was_unlimited);
        }
    }

    fn update_flags_if_changed(&mut self, node: NodeId, was_unlimited: bool) {
        if was_unlimited != self.state.tree.limits(node).is_unlimited() {
            self.update_flags();
        }
    }

    /// Puts the host's quota of a cluster-wide limit in force; returns the burst capacity that is
    /// given up. Call [`SharedThrottleTree::admit_ready`] afterwards.
    pub(super) fn set_quota(
        &mut self,
        node: NodeId,
        limits: Limits,
        credit: [u64; 6],
        lease: QuotaLease,
        now: Instant,
    ) -> Result<[u64; 6], InvalidLimit> {
        let was_unlimited = self.state.tree.limits(node).is_unlimited();
        let granted = self.state.tree.set_quota(node, limits, credit, now)?;
        self.state.tree.set_lease(node, lease);
        if was_unlimited != limits.is_unlimited() {
            self.update_flags();
        }
        Ok(granted)
    }

    /// Updates the flags of all disks from their limits and those above them.
    fn update_flags(&mut self) {
        let SharedThrottleTreeState { tree, nodes, lifted, .. } = &*self.state;
        for (&node, flag) in nodes {
            if let Some(flag) = flag {
                flag.store(*lifted || tree.is_unlimited(node), Ordering::Relaxed);
            }
        }
    }

    /// Removes the requests that can be admitted, at most a batch. Returns whether there may be
    /// more, and otherwise the instant for which to arm a timer, if any.
    fn next_batch(mut self, now: Instant, admitted: &mut Vec<AdmittedWaiter>) -> (bool, Option<Instant>) {
        let SharedThrottleTreeState { tree, timer, .. } = &mut *self.state;
        while admitted.len() < BATCH {
            match tree.poll(now) {
                PollDecision::Admit(waiter) => admitted.push((waiter, tree.last_cause())),
                PollDecision::Idle => return (false, None),
                // An earlier deadline needs a new timer; the later one then finds nothing to do.
                PollDecision::Wait { until } => {
                    let armed = timer.is_none_or(|timer| until < timer);
                    if armed {
                        *timer = Some(until);
                    }
                    return (false, armed.then_some(until));
                }
            }
        }
        (true, None)
    }
}
