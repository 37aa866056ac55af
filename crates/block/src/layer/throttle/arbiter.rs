//! The arbiter of one tree of groups and disks: policy's decisions behind a lock, and whom they
//! wake.
//!
//! There is one for each group that is in no other group, and one for each disk without a group:
//! disks that share no limit share no lock.
//!
//! ```text
//!   ask ─┐                     ┌─ admitted waiters, BATCH at a time ──► woken, the lock released
//!   set ─┼─► lock ─► policy ───┤
//!   timer┘                     └─ "nothing before t" ──► t, if no timer fires by then: the caller arms one
//! ```
//!
//! It takes the time as an argument and returns timers as instants, so that the model check runs it
//! without a reactor. The lock is held for a decision or a batch of them, never across an `.await`,
//! never while a task is woken.
//!
//! Never loses a request: what leaves policy is admitted, or goes to the seat that moves or cancels
//! it.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::BuildHasherDefault,
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU64, Ordering as Order},
    },
};

use policy::{
    throttle::{Decision, Enforcement, Held as HeldBy, Invalid, Lent, Limits, NodeId, Refused, Share, Tree},
    time::Instant,
};

use super::{
    sync::{AtomicBool, Mutex, MutexGuard, Ordering},
    waiter::Waiter,
};

/// Waiters admitted under one hold of the lock. Where limits are lifted for thousands at once,
/// others get their turn in between.
const BATCH: usize = 32;

/// Whether a disk's requests may pass without being asked about: no limit is set on its way up.
pub(super) type Gate = Arc<AtomicBool>;

/// Which disks there are in a tree, to tell them when their gates open or close. Hashed without a
/// random key: a seed repeats exactly.
type Nodes = HashMap<NodeId, Option<Gate>, BuildHasherDefault<DefaultHasher>>;

/// A tree with its lock. See the file's documentation.
#[derive(Debug)]
pub(super) struct Arbiter {
    /// Tells this tree from every other there was or will be. Locks are taken in this order.
    id: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tree: Tree<Arc<Waiter>>,
    /// When the timer in force fires. One that was armed for later still fires, and finds nothing
    /// to do.
    timer: Option<Instant>,
    /// Every node; disks with their gates.
    nodes: Nodes,
    /// The limits hold no more, whatever is set.
    lifted: bool,
}

/// A request that may pass, and what held it.
type Admitted = (Arc<Waiter>, Option<HeldBy>);

/// An arbiter, its lock held.
pub(super) struct Held<'a> {
    id: u64,
    state: MutexGuard<'a, State>,
}

/// A timer to be armed: at this instant, [`Arbiter::fire`].
#[derive(Debug)]
#[must_use = "what waits would wait forever"]
pub(super) struct Alarm {
    pub(super) arbiter: Arc<Arbiter>,
    pub(super) at: Instant,
}

impl Arbiter {
    /// For a tree that is still empty.
    pub(super) fn new(now: Instant) -> Arc<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let state = State { tree: Tree::new(now), timer: None, nodes: Nodes::default(), lifted: false };
        let id = NEXT_ID.fetch_add(1, Order::Relaxed);
        Arc::new(Self { id, state: Mutex::new(state) })
    }

    /// Takes the lock.
    pub(super) fn lock(&self) -> Held<'_> {
        // A panic under the lock is a bug in policy; the counts it leaves may be off, but nothing
        // dangles.
        Held { id: self.id, state: self.state.lock().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Takes the locks of two arbiters, in the order that everybody takes them in; of one only, if
    /// they are the same.
    pub(super) fn lock_both<'a>(one: &'a Self, other: &'a Self) -> (Held<'a>, Option<Held<'a>>) {
        match one.id.cmp(&other.id) {
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

    /// Admits and wakes all that may pass by now. Gives back the timer that the rest needs, if none
    /// is armed that fires in time.
    pub(super) fn release(self: &Arc<Self>, now: Instant) -> Option<Alarm> {
        let mut admitted = Vec::new();
        loop {
            let (more, alarm) = self.lock().decide(now, &mut admitted);
            for (waiter, held) in admitted.drain(..) {
                waiter.admit(held);
            }
            if !more {
                return alarm.map(|at| Alarm { arbiter: Arc::clone(self), at });
            }
        }
    }

    /// What is to be done when the timer for `at` fires.
    pub(super) fn fire(self: &Arc<Self>, at: Instant, now: Instant) -> Option<Alarm> {
        {
            let mut held = self.lock();
            if held.state.timer == Some(at) {
                held.state.timer = None;
            }
        }
        self.release(now)
    }

    /// Lifts every limit in the tree, for good.
    pub(super) fn lift(self: &Arc<Self>, now: Instant) -> Option<Alarm> {
        {
            let mut held = self.lock();
            let State { tree, nodes, lifted, .. } = &mut *held.state;
            // At the end of the daemon every disk of the tree calls this.
            if *lifted {
                return None;
            }
            *lifted = true;
            for &node in nodes.keys() {
                tree.enforce(node, Enforcement::Lifted, now);
            }
            held.open_gates();
        }
        self.release(now)
    }
}

impl Held<'_> {
    /// The arbiter's.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// The tree, to ask and to be asked.
    pub(super) fn tree(&mut self) -> &mut Tree<Arc<Waiter>> {
        &mut self.state.tree
    }

    /// Adds a group, or a disk with its gate; in place of one that is to be removed next, if there
    /// is one.
    pub(super) fn add(
        &mut self,
        leaving: Option<NodeId>,
        parent: Option<NodeId>,
        limits: Limits,
        share: Share,
        gate: Option<Gate>,
        now: Instant,
    ) -> Result<NodeId, Refused> {
        let State { tree, nodes, lifted, .. } = &mut *self.state;
        let node = match leaving {
            Some(leaving) => tree.add_in_place_of(leaving, parent, limits, share)?,
            None => tree.add(parent, limits, share)?,
        };
        if *lifted {
            tree.enforce(node, Enforcement::Lifted, now);
        }
        if let Some(gate) = &gate {
            gate.store(*lifted || tree.is_unlimited(node), Ordering::Relaxed);
        }
        nodes.insert(node, gate);
        Ok(node)
    }

    /// Enforces a node's limits so much from now on. Afterwards, [`Arbiter::release`].
    pub(super) fn enforce(&mut self, node: NodeId, enforcement: Enforcement, now: Instant) {
        if !self.state.lifted {
            self.state.tree.enforce(node, enforcement, now);
        }
    }

    /// Removes a node that has nothing below it; what waits there comes back.
    pub(super) fn remove(&mut self, node: NodeId) -> Vec<policy::throttle::Returned<Arc<Waiter>>> {
        self.state.nodes.remove(&node);
        self.state.tree.remove(node)
    }

    /// Puts limits and share in force: both or neither. Afterwards, [`Arbiter::release`].
    ///
    /// Limits that are the same as before stay in force with what has been charged: whoever changes
    /// a weight gets no new burst.
    pub(super) fn configure(
        &mut self,
        node: NodeId,
        limits: Limits,
        share: Share,
        now: Instant,
    ) -> Result<(), Refused> {
        let was_unlimited = self.state.tree.limits(node).is_unlimited();
        self.state.tree.configure(node, limits, share, now)?;
        if was_unlimited != limits.is_unlimited() {
            self.open_gates();
        }
        Ok(())
    }

    /// Puts a part in force of limits that are divided over hosts; returns the room for bursts that
    /// is given up. Afterwards, [`Arbiter::release`].
    pub(super) fn divide(
        &mut self,
        node: NodeId,
        limits: Limits,
        credit: [u64; 6],
        lent: Lent,
        now: Instant,
    ) -> Result<[u64; 6], Invalid> {
        let was_unlimited = self.state.tree.limits(node).is_unlimited();
        let given = self.state.tree.divide(node, limits, credit, now)?;
        self.state.tree.lend(node, lent);
        if was_unlimited != limits.is_unlimited() {
            self.open_gates();
        }
        Ok(given)
    }

    /// Opens and closes the disks' gates as their limits, and those above them, now say.
    fn open_gates(&mut self) {
        let State { tree, nodes, lifted, .. } = &*self.state;
        for (&node, gate) in nodes {
            if let Some(gate) = gate {
                gate.store(*lifted || tree.is_unlimited(node), Ordering::Relaxed);
            }
        }
    }

    /// Takes out what may pass, at most a batch. Says whether there may be more, and otherwise when
    /// to look again if no timer does.
    fn decide(mut self, now: Instant, admitted: &mut Vec<Admitted>) -> (bool, Option<Instant>) {
        let State { tree, timer, .. } = &mut *self.state;
        while admitted.len() < BATCH {
            match tree.poll(now) {
                Decision::Admit(waiter) => admitted.push((waiter, tree.held())),
                Decision::Idle => return (false, None),
                Decision::Wait { until } => {
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
