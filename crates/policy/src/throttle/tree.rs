//! The tree of disks and groups, and the decision which request passes next.
//!
//! ```text
//!                       ( root: limits nothing )
//!                         │                │
//!                  group "host"          disk         each node: limits, how they are enforced, a share
//!                    │        │
//!             group "gold"   disk                     inner nodes: whose turn it is (schedule.rs)
//!               │      │
//!             disk    disk                            leaves: what waits, in order
//! ```
//!
//! Used behind one lock, held for nanoseconds. The caller's own token stands for what waits.
//!
//! Only nodes with waiting work are in any of the heaps, and only as far up as they could pass. A
//! node whose limits are used up is in the heap of wakes alone. So a decision costs O(log n) for
//! each level, where n counts the busy nodes.
//!
//! Never rejects, loses or reorders: each token comes out exactly once, and a disk's requests of
//! one direction pass in the order in which they came.

use super::booking::{MAX_LEVELS, Overbooked, Refused, Reservable, Supply, demand};
use super::cost::Cost;
use super::enforcement::Enforcement;
use super::heap::Heap;
use super::limits::{Invalid, LimitKind, Limits};
use super::node::{Node, NodeId, Ticket, Waiter};
use super::schedule::{Lane, Schedule};
use super::share::Share;
use super::stats::{Brief, Stats};
use crate::request::Direction;
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::vec::Vec;

mod carry;
mod lent;
mod moves;
mod serve;
mod spare;

pub use lent::{Lent, Wanted};
use serve::Path;

const ROOT: usize = 0;

/// The answer to a request.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Admission<T> {
    /// It may pass now, and has been charged.
    Admitted(T),
    /// It waits. [`Tree::poll`] says until when, so call that next.
    Queued(Ticket),
}

/// What is to be done now.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub enum Decision<T> {
    /// This request may pass now, and has been charged. There may be more: poll again.
    Admit(T),
    /// Nothing may pass before `until`; then something does, or a large request pays another part.
    Wait {
        /// When to poll again.
        until: Instant,
    },
    /// Nothing waits.
    Idle,
}

/// The limit that a request waited for last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Held {
    /// Whose limit: 0 is the disk's own, 1 its group's, and so on up.
    pub level: usize,
    /// Which.
    pub kind: LimitKind,
}

/// A request that a removed node gives back. What it had paid of its price is lost.
#[derive(Debug, PartialEq, Eq)]
pub struct Returned<T> {
    /// Which way it goes.
    pub direction: Direction,
    /// What it costs.
    pub cost: Cost,
    /// What stands for it.
    pub token: T,
}

/// Disks under limits of their own and of the groups they are in. All levels hold at once.
///
/// `T` stands for a waiting request.
///
/// # Protocol
///
/// 1. [`add`](Tree::add) once for every group and disk; [`pass`](Tree::pass) or
///    [`request`](Tree::request) once for every read, write, write-zeroes and discard of a disk.
///    Flushes move no data and are not asked about.
/// 2. After a request was queued, after any change of a setting, after a removal, and when a timer
///    has fired: call [`poll`](Tree::poll) until it no longer says [`Decision::Admit`]; then, if it
///    says [`Decision::Wait`], have one timer for the whole tree fire at that instant. A timer that
///    fires late costs nothing that a bucket cannot hold (a tenth of a second's worth, where no
///    burst is configured); one that fires for nothing does no harm.
/// 3. [`remove`](Tree::remove) gives back what still waits; the caller decides what becomes of it.
///
/// Instants come from one clock; an earlier one counts as the latest so far.
///
/// Order: first come, first served within a disk and a direction. Between siblings: promises that
/// are due, then by weight (`schedule.rs`), each request or slice a turn. Between directions: the
/// same rule where they draw from a common limit, else in alternation.
///
/// All methods panic if the [`NodeId`] was removed.
#[derive(Debug)]
pub struct Tree<T> {
    nodes: Vec<Node<T>>,
    vacant: Vec<usize>,
    /// Nodes with work that waits for their own limits, a direction each ([`wake_item`]).
    wakes: Heap<Instant>,
    now: Instant,
    next_number: u64,
    path: Path,
    /// Of the request that was admitted last.
    held: Option<Held>,
    /// A disk has brought something from elsewhere: until then nobody looks for what one did.
    has_moved: bool,
    /// Parts of limits over many hosts, by their slots: few.
    lent: Vec<(usize, Lent)>,
    /// The first instant at which one of them runs out.
    lease_ends: Instant,
}

impl<T> Tree<T> {
    /// A tree without nodes.
    pub fn new(now: Instant) -> Self {
        let mut root = Node::new(ROOT, 0, Limits::default(), Share::default(), now);
        root.schedule = Some(Box::new(Schedule::new()));
        Self {
            nodes: Vec::from([root]),
            vacant: Vec::new(),
            wakes: Heap::new(),
            now,
            next_number: 0,
            path: Path::new(),
            held: None,
            has_moved: false,
            lent: Vec::new(),
            lease_ends: Instant::MAX,
        }
    }

    /// Adds a disk or a group, on top or below a group, with empty buckets.
    ///
    /// # Errors
    /// [`Refused`]: invalid limits; a reservation that does not fit; more than [`MAX_LEVELS`].
    ///
    /// # Panics
    /// If requests wait in `parent` itself: it is a disk.
    pub fn add(&mut self, parent: Option<NodeId>, limits: Limits, share: Share) -> Result<NodeId, Refused> {
        self.add_beside(None, parent, limits, share)
    }

    /// Adds a disk, as [`Tree::add`] does, where another is to be removed next: what that one was
    /// promised is free for this one, and its own no more.
    ///
    /// # Errors
    /// [`Refused`], as [`Tree::add`]; everything stays as it was then.
    ///
    /// # Panics
    /// As [`Tree::add`].
    pub fn add_in_place_of(
        &mut self,
        leaving: NodeId,
        parent: Option<NodeId>,
        limits: Limits,
        share: Share,
    ) -> Result<NodeId, Refused> {
        self.add_beside(Some(self.slot(leaving)), parent, limits, share)
    }

    fn add_beside(
        &mut self,
        leaving: Option<usize>,
        parent: Option<NodeId>,
        limits: Limits,
        share: Share,
    ) -> Result<NodeId, Refused> {
        limits.validate()?;
        let parent = parent.map_or(ROOT, |parent| self.slot(parent));
        let level = self.nodes[parent].level + 1;
        if level > MAX_LEVELS {
            return Err(Refused::TooDeep);
        }
        let waits = Direction::ALL.iter().any(|direction| !self.nodes[parent].queue(*direction).is_empty());
        assert!(!waits, "a disk with requests waiting cannot become a group");
        let wanted = demand(share, [0; 2]);
        Supply { limits, device: Reservable::default() }.check(wanted)?;
        let freed = leaving.map(|leaving| self.promised_without(leaving)).unwrap_or_default();
        self.check_promises(parent, [0; 2], wanted, &freed)?;

        if let Some(leaving) = leaving {
            self.apply_share(leaving, self.nodes[leaving].share.with_reservation(0, 0));
        }
        let mut node = Node::new(parent, level, limits, share, self.now);
        let slot = self.vacant.pop().unwrap_or(self.nodes.len());
        let schedule = self.nodes[parent].schedule.get_or_insert_with(|| Box::new(Schedule::new()));
        node.number = schedule.join(slot as u32, share);
        node.shared = self.nodes[parent].shared || draws_together(&limits);
        if slot == self.nodes.len() {
            self.nodes.push(node);
        } else {
            node.generation = self.nodes[slot].generation + 1;
            self.nodes[slot] = node;
        }
        self.promise(parent, [0; 2], wanted);
        Ok(self.id(slot))
    }

    /// Removes a node and gives back its waiting requests, in the order in which they came.
    ///
    /// # Panics
    /// If it has children.
    pub fn remove(&mut self, node: NodeId) -> Vec<Returned<T>> {
        let slot = self.slot(node);
        let node = &mut self.nodes[slot];
        assert!(
            node.schedule.as_ref().is_none_or(|schedule| schedule.is_childless()),
            "a group with members"
        );
        let mut waiters = Vec::new();
        for direction in Direction::ALL {
            let queue = core::mem::take(self.nodes[slot].queue_mut(direction));
            self.count_waiting(slot, direction, |waiting| waiting - queue.len());
            waiters.extend(queue.into_iter().map(|waiter| (direction, waiter)));
            self.settle_up(slot, direction);
        }
        waiters.sort_unstable_by_key(|(_, waiter)| waiter.number);

        let node = &mut self.nodes[slot];
        node.present = false;
        self.take_back(slot);
        let node = &self.nodes[slot];
        let (parent, number, freed) = (node.parent, node.number, demand(node.share, node.promised));
        if let Some(schedule) = &mut self.nodes[parent].schedule {
            schedule.leave(number);
        }
        self.promise(parent, freed, [0; 2]);
        self.vacant.push(slot);
        let give_back = |(direction, waiter): (Direction, Waiter<T>)| Returned {
            direction,
            cost: waiter.cost,
            token: waiter.token,
        };
        waiters.into_iter().map(give_back).collect()
    }

    /// Puts limits and a share in force at once, also for requests that wait: poll afterwards.
    ///
    /// Other limits take over what has passed under those before: over any window no more passes
    /// than the limits in force allowed, and one burst, however often they change. (QEMU's begin
    /// with empty buckets, and grant a burst with each change.) Limits that are lent
    /// ([`Tree::lend`]) stay as they are.
    ///
    /// # Errors
    /// [`Refused`]: invalid limits, or promises that cannot be kept. Everything stays as it was
    /// then, levels included.
    pub fn configure(
        &mut self,
        node: NodeId,
        limits: Limits,
        share: Share,
        now: Instant,
    ) -> Result<(), Refused> {
        limits.validate()?;
        let slot = self.slot(node);
        self.pass_time(now);
        let here = &self.nodes[slot];
        let (old, new) = (demand(here.share, here.promised), demand(share, here.promised));
        let limits = match self.lent(node) {
            Some(_) => self.check_supply(slot, new).map(|()| here.limits())?,
            None => Supply { limits, device: here.device }.check(new).map(|()| limits)?,
        };
        self.check_promises(self.nodes[slot].parent, old, new, &[])?;
        let here = &self.nodes[slot];
        let (other_limits, other_share) = (limits != here.limits(), share != here.share);
        if other_share {
            self.apply_share(slot, share);
        }
        if other_limits {
            self.apply_limits(slot, limits);
        }
        Ok(())
    }

    /// Puts a part of limits in force that are divided over hosts ([`cluster`](crate::cluster)):
    /// poll afterwards.
    ///
    /// Buckets that grow have no more room than before but for `credit`, and what a smaller bucket
    /// no longer has room for is returned; both in whole units by [`LimitKind::index`]. The first
    /// part comes full. Promises below are not asked: a part may be too small for them.
    ///
    /// # Errors
    /// [`Invalid`] limits change nothing.
    pub fn divide(
        &mut self,
        node: NodeId,
        limits: Limits,
        credit: [u64; 6],
        now: Instant,
    ) -> Result<[u64; 6], Invalid> {
        limits.validate()?;
        let slot = self.slot(node);
        self.pass_time(now);
        Ok(self.put_part(slot, limits, credit))
    }

    /// Says what can be promised of the device below a node: reservations at and below the node
    /// must fit in it.
    ///
    /// # Errors
    /// If more is promised already. What was known before stays in force then.
    pub fn set_device(&mut self, node: NodeId, device: Reservable) -> Result<(), Refused> {
        let slot = self.slot(node);
        let node = &mut self.nodes[slot];
        Supply { limits: Limits::default(), device }.check(demand(node.share, node.promised))?;
        node.device = device;
        Ok(())
    }

    /// Says how a node's limits are applied: poll afterwards. What is in its buckets stays.
    pub fn enforce(&mut self, node: NodeId, enforcement: Enforcement, now: Instant) {
        let slot = self.slot(node);
        self.pass_time(now);
        let node = &mut self.nodes[slot];
        let before = node.enforcement;
        if before == enforcement {
            return;
        }
        node.enforce(enforcement, self.now);
        self.follow_enforcement(slot, before);
        self.settle_both_up(slot);
    }

    /// Asks for a request of a disk to pass. If it must wait, `token` comes out later.
    ///
    /// # Panics
    /// If the node has children: it is a group.
    pub fn request(
        &mut self,
        disk: NodeId,
        direction: Direction,
        cost: Cost,
        token: T,
        now: Instant,
    ) -> Admission<T> {
        if self.pass(disk, direction, &cost, now) {
            return Admission::Admitted(token);
        }
        let number = self.next_number;
        self.next_number += 1;
        let around = self.nodes[disk.slot].parent;
        let limited_ns = [disk.slot, around].map(|slot| self.nodes[slot].limited_ns(self.now));
        let waiter = Waiter { number, since: self.now, cost, paid: 0, limited_ns, token };
        let queue = self.nodes[disk.slot].queue_mut(direction);
        let is_first = queue.is_empty();
        queue.push_back(waiter);
        self.count_waiting(disk.slot, direction, |waiting| waiting + 1);
        // Behind another it changes nothing for anybody.
        if is_first {
            self.settle_up(disk.slot, direction);
        }
        Admission::Queued(Ticket { node: disk, direction, number })
    }

    /// Takes back a request that waits, uncharged but for the part that a large one has paid.
    /// `None` if it has been admitted, cancelled or given back already.
    pub fn cancel(&mut self, ticket: Ticket) -> Option<T> {
        let Ticket { node: NodeId { slot, generation }, direction, number } = ticket;
        let node = self.nodes.get_mut(slot).filter(|node| node.present && node.generation == generation)?;
        let waiter = node.take(direction, number)?;
        self.count_waiting(slot, direction, |waiting| waiting - 1);
        self.settle_up(slot, direction);
        Some(waiter.token)
    }

    /// Whether no limit is set from this node up: requests need not be asked about.
    pub fn is_unlimited(&self, node: NodeId) -> bool {
        self.path_up(self.slot(node)).all(|slot| self.nodes[slot].limited.is_none())
    }

    /// A node's own limits, as they are set.
    pub fn limits(&self, node: NodeId) -> Limits {
        self.nodes[self.slot(node)].limits()
    }

    /// A node's share of its parent.
    pub fn share(&self, node: NodeId) -> Share {
        self.nodes[self.slot(node)].share
    }

    /// How a node's limits are applied.
    pub fn enforcement(&self, node: NodeId) -> Enforcement {
        self.nodes[self.slot(node)].enforcement
    }

    /// The group a node is in; `None` on top.
    pub fn parent(&self, node: NodeId) -> Option<NodeId> {
        let parent = self.nodes[self.slot(node)].parent;
        (parent != ROOT).then(|| self.id(parent))
    }

    /// The members of a group, in no particular order.
    pub fn children(&self, node: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        let schedule = self.nodes[self.slot(node)].schedule.as_ref();
        schedule.into_iter().flat_map(|schedule| schedule.slots()).map(|slot| self.id(slot))
    }

    /// Requests of this direction that wait at or below a node.
    pub fn waiting(&self, node: NodeId, direction: Direction) -> usize {
        self.nodes[self.slot(node)].waiting[direction.index()]
    }

    /// A node's counters and waits, as of `now`.
    pub fn stats(&self, node: NodeId, now: Instant) -> Stats {
        self.nodes[self.slot(node)].stats(self.now.max(now))
    }

    /// What of [`Tree::stats`] costs next to nothing.
    pub fn brief(&self, node: NodeId, now: Instant) -> Brief {
        self.nodes[self.slot(node)].brief(self.now.max(now))
    }

    fn apply_limits(&mut self, slot: usize, limits: Limits) {
        let before = self.nodes[slot].limits();
        self.nodes[slot].set_limits(limits, self.now);
        self.follow_limits(slot, &before);
        self.share_lanes(slot);
        self.settle_both_up(slot);
    }

    fn apply_share(&mut self, slot: usize, share: Share) {
        let node = &mut self.nodes[slot];
        let parent = node.parent;
        let (old, new) = (demand(node.share, node.promised), demand(share, node.promised));
        node.set_share(share, self.now);
        self.promise(parent, old, new);
        self.entitle(slot);
    }

    fn entitle(&mut self, slot: usize) {
        let node = &self.nodes[slot];
        let (parent, number, entitlement) = (node.parent, node.number, node.entitlement());
        if let Some(schedule) = &mut self.nodes[parent].schedule {
            for direction in Direction::ALL {
                schedule.withdraw(number, direction);
            }
            schedule.set_share(number, entitlement);
        }
        self.settle_both_up(slot);
    }

    fn slot(&self, id: NodeId) -> usize {
        let node = &self.nodes[id.slot];
        assert!(node.present && node.generation == id.generation, "a node that was removed");
        id.slot
    }

    fn id(&self, slot: usize) -> NodeId {
        NodeId { slot, generation: self.nodes[slot].generation }
    }

    /// A node and all above it, the root left out.
    fn path_up(&self, slot: usize) -> impl Iterator<Item = usize> + '_ {
        let up = |slot: usize| (slot != ROOT).then_some(slot);
        core::iter::successors(up(slot), move |slot| up(self.nodes[*slot].parent))
    }

    fn count_waiting(&mut self, slot: usize, direction: Direction, change: impl Fn(usize) -> usize) {
        let mut at = slot;
        loop {
            let node = &mut self.nodes[at];
            let waiting = &mut node.waiting[direction.index()];
            *waiting = change(*waiting);
            if let Some(promise) = &mut node.promise {
                promise.waits(node.waiting != [0; 2], self.now);
            }
            if at == ROOT {
                return;
            }
            at = self.nodes[at].parent;
        }
    }

    /// Checks, up from `slot`, that a child's demand may change from `old` to `new`; what nodes in
    /// `freed` promise is taken from there.
    fn check_promises(
        &self,
        slot: usize,
        old: [u64; 2],
        new: [u64; 2],
        freed: &[(usize, [u64; 2])],
    ) -> Result<(), Overbooked> {
        let (mut old, mut new) = (old, new);
        for slot in self.path_up(slot) {
            let node = &self.nodes[slot];
            let before = freed.iter().find(|(at, _)| *at == slot).map_or(node.promised, |(_, left)| *left);
            let promised = exchange(before, old, new);
            self.check_supply(slot, promised)?;
            (old, new) = (demand(node.share, before), demand(node.share, promised));
        }
        Ok(())
    }

    /// What is promised in each node above this one, if nothing is to this one.
    fn promised_without(&self, slot: usize) -> Vec<(usize, [u64; 2])> {
        let node = &self.nodes[slot];
        let (mut old, mut new) = (demand(node.share, node.promised), [0; 2]);
        let above = self.path_up(node.parent).map(|slot| {
            let node = &self.nodes[slot];
            let promised = exchange(node.promised, old, new);
            (old, new) = (demand(node.share, node.promised), demand(node.share, promised));
            (slot, promised)
        });
        above.collect()
    }

    /// Notes, up from `slot`, that a child's demand has changed from `old` to `new`.
    fn promise(&mut self, slot: usize, old: [u64; 2], new: [u64; 2]) {
        let (mut at, mut old, mut new) = (slot, old, new);
        while at != ROOT && old != new {
            let node = &mut self.nodes[at];
            let promised = exchange(node.promised, old, new);
            (old, new) = (demand(node.share, node.promised), demand(node.share, promised));
            node.promised = promised;
            let above = node.parent;
            if old != new {
                // A promise is worth what every level above makes of it.
                self.entitle(at);
            }
            at = above;
        }
    }

    /// Works out anew, from `slot` down, where the two directions draw from a common limit. Where
    /// that changes, tags change their meaning, so earlier charges are forgotten.
    fn share_lanes(&mut self, slot: usize) {
        let mut below = Vec::from([slot]);
        while let Some(slot) = below.pop() {
            let above = self.nodes[self.nodes[slot].parent].shared;
            let node = &mut self.nodes[slot];
            let shared = above || draws_together(&node.limits());
            if shared == node.shared {
                continue;
            }
            node.shared = shared;
            if let Some(schedule) = &mut node.schedule {
                schedule.forget();
                below.extend(schedule.slots());
            }
        }
    }
}

fn draws_together(limits: &Limits) -> bool {
    limits.limit(LimitKind::BpsTotal).rate > 0 || limits.limit(LimitKind::IopsTotal).rate > 0
}

fn exchange(sum: [u64; 2], old: [u64; 2], new: [u64; 2]) -> [u64; 2] {
    // Saturates where somebody promises 2⁶⁴: that is refused unless nothing bounds it.
    [0, 1].map(|unit| (sum[unit] - old[unit].min(sum[unit])).saturating_add(new[unit]))
}

const fn wake_item(slot: usize, direction: Direction) -> u32 {
    (slot * 2 + direction.index()) as u32
}

const fn lane_of<T>(node: &Node<T>, direction: Direction) -> Lane {
    Lane::new(direction, node.shared)
}
