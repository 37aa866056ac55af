//! The part of the tree that runs for every request. Four steps: *wake* what has waited long enough
//! for its own limits; *pick* a way down from the root, turn by turn; *charge* every level on it;
//! *settle* these levels again, bottom up.

use super::super::cost::{BILLION, Cost};
use super::super::node::Waiter;
use super::super::price::{LONGEST_NS, SLICE_NS, WHOLE, part_of, slice_of};
use super::super::schedule::{Candidate, Phase, Service};
use super::{Decision, Held, MAX_LEVELS, NodeId, ROOT, Tree, lane_of, wake_item};
use crate::request::Direction;
use crate::time::Instant;
use core::ops::Range;

/// Where nothing above is limited, so many bytes count like an operation.
const BYTES_PER_OPERATION: u64 = 4096;
/// And an operation like so much time.
const UNLIMITED_OPERATION_NS: u64 = 10_000;

/// A large request gets at most this part of what a burst has left at a time, so the turns that it
/// takes grow with the logarithm of the burst, and no turn takes all of it.
const BURST_PART: u32 = 4;

#[derive(Clone, Copy, Debug)]
struct Step {
    slot: usize,
    phase: Phase,
    /// The request's price, at the scarcest limit down to this level.
    price_ns: u64,
    /// Operations, in billionths, by whichever level down to this one counts most.
    operations: u64,
}

/// From the root down to a disk, both included. Kept by the tree, so that nobody copies it.
#[derive(Debug)]
pub(super) struct Path {
    steps: [Step; MAX_LEVELS + 1],
    length: usize,
}

impl Path {
    pub(super) const fn new() -> Self {
        let step = Step { slot: ROOT, phase: Phase::Weight, price_ns: 0, operations: 0 };
        Self { steps: [step; MAX_LEVELS + 1], length: 0 }
    }

    const fn push(&mut self, slot: usize) {
        self.steps[self.length].slot = slot;
        self.steps[self.length].phase = Phase::Weight;
        self.length += 1;
    }
}

/// What a request may be charged at once, in parts of [`WHOLE`].
struct Terms {
    slice: u32,
    /// What has room in every bucket on the way.
    room: u32,
}

impl<T> Tree<T> {
    /// Whether a request of a disk may pass at once; it is charged if so. If not, [`Tree::request`]
    /// queues it. For callers to whom a token is not free.
    ///
    /// # Panics
    /// If the node has children: it is a group.
    pub fn pass(&mut self, disk: NodeId, direction: Direction, cost: &Cost, now: Instant) -> bool {
        let slot = self.slot_of_disk(disk);
        self.advance(now);
        let passes = self.nodes[slot].queue(direction).is_empty() && self.is_clear(slot, direction);
        if !passes {
            return false;
        }
        self.follow_up(slot);
        let terms = self.price(direction, cost);
        // What the last slice lacks is paid for by whoever comes next, as with every request.
        if terms.slice < WHOLE && terms.room.saturating_add(terms.slice) < WHOLE {
            return false;
        }
        self.charge(direction, cost, &(0..WHOLE));
        self.count(direction, cost, None);
        true
    }

    /// Charges a request of a disk that can wait no longer, whatever it finds. What comes after it
    /// pays for it: buckets that it makes run over hold that up until they have leaked.
    ///
    /// # Panics
    /// If the node has children: it is a group.
    pub fn charge_anyway(&mut self, disk: NodeId, direction: Direction, cost: &Cost, now: Instant) {
        let slot = self.slot_of_disk(disk);
        self.advance(now);
        self.follow_up(slot);
        let _ = self.price(direction, cost);
        self.charge(direction, cost, &(0..WHOLE));
        self.count(direction, cost, None);
    }

    fn slot_of_disk(&self, disk: NodeId) -> usize {
        let slot = self.slot(disk);
        assert!(
            self.nodes[slot].schedule.as_ref().is_none_or(|schedule| schedule.is_childless()),
            "requests are made of disks, not of groups"
        );
        slot
    }

    /// The next thing to do; never [`Decision::Idle`] with anything waiting.
    pub fn poll(&mut self, now: Instant) -> Decision<T> {
        self.advance(now);
        while let Some(direction) = self.pick() {
            if let Some(token) = self.serve(direction) {
                return Decision::Admit(token);
            }
        }
        match self.wakes.first() {
            Some((until, _)) => Decision::Wait { until },
            None => Decision::Idle,
        }
    }

    /// Serves the first request of the disk that was picked, or the next part of a large one.
    fn serve(&mut self, direction: Direction) -> Option<T> {
        let slot = self.path.steps[self.path.length - 1].slot;
        for step in &self.path.steps[..self.path.length] {
            self.nodes[step.slot].first = opposite(direction);
        }
        // Out of the queue while the tree is at work, since the price is asked of every level.
        let mut waiter = self.nodes[slot].queue_mut(direction).pop_front()?;
        let terms = self.price(direction, &waiter.cost);
        let from = waiter.paid;
        let part = terms.slice.max(terms.room / BURST_PART);
        let to = if terms.slice == WHOLE { WHOLE } else { from.saturating_add(part).min(WHOLE) };
        if to < WHOLE {
            waiter.paid = to;
            let cost = waiter.cost.clone();
            self.nodes[slot].queue_mut(direction).push_front(waiter);
            self.charge(direction, &cost, &(from..to));
            return None;
        }
        self.count_waiting(slot, direction, |waiting| waiting - 1);
        self.charge(direction, &waiter.cost, &(from..to));
        let waited_ns = self.now.nanos_since(waiter.since);
        self.held = self.hold(direction, &waiter);
        self.count(direction, &waiter.cost, Some(waited_ns));
        Some(waiter.token)
    }

    /// Which limit on the path held a request: its disk's own or its group's, if that was blocked
    /// for half of the wait; else that which let go last.
    ///
    /// Who waits at a group waits for the limits above it only after that, and where these are
    /// always asked for more, for a moment each time: nobody is helped by more of that. The limit
    /// that was blocked for the longest time is no answer either: a full group above is blocked
    /// always, for other members. 16 bytes per waiting request record how long disk and group had
    /// been blocked.
    fn hold(&self, direction: Direction, waiter: &Waiter<T>) -> Option<Held> {
        let steps = self.path.steps[1..self.path.length].iter().rev().enumerate();
        let freed = steps.filter_map(|(level, step)| {
            let node = &self.nodes[step.slot];
            let (kind, until) = node.freed(direction)?;
            let before = waiter.limited_ns.get(level);
            let limited_ns = before.map_or(0, |before| node.limited_ns(self.now).saturating_sub(*before));
            let is_most = limited_ns > 0 && limited_ns >= self.now.nanos_since(waiter.since) / 2;
            (until >= waiter.since).then_some((is_most, until, Held { level, kind }))
        });
        // Of those that let go together the disk's own.
        let later = |one: (bool, Instant, Held), other: (bool, Instant, Held)| {
            if !one.0 && (other.0 || other.1 > one.1) { other } else { one }
        };
        freed.reduce(later).map(|(_, _, held)| held)
    }

    /// What held the request that [`Tree::poll`] has admitted last; `None` where that was the turns
    /// of others alone.
    pub fn held(&self) -> Option<Held> {
        self.held
    }

    fn advance(&mut self, now: Instant) {
        self.pass_time(now);
        while let Some((until, item)) = self.wakes.first()
            && until <= self.now
        {
            self.settle_up(item as usize / 2, Direction::ALL[item as usize % 2]);
        }
    }

    /// Whether all buckets from a disk up have room, and nobody who could pass is overtaken.
    fn is_clear(&mut self, slot: usize, direction: Direction) -> bool {
        let (now, other, mut at) = (self.now, opposite(direction), slot);
        loop {
            let node = &mut self.nodes[at];
            let shared = node.shared;
            let overtakes = node.schedule.as_ref().is_some_and(|schedule| schedule.has_work(direction));
            let other_waits = shared && node.has_work(other);
            if let Some(buckets) = node.enforced(now) {
                let other_is_due = || other_waits && buckets.binding(other).is_none();
                if buckets.binding(direction).is_some() || overtakes || other_is_due() {
                    return false;
                }
            } else if overtakes || other_waits {
                return false;
            }
            if at == ROOT {
                return true;
            }
            at = node.parent;
        }
    }

    fn follow_up(&mut self, slot: usize) {
        self.path.length = 0;
        let mut at = slot;
        while at != ROOT {
            self.path.push(at);
            at = self.nodes[at].parent;
        }
        self.path.push(ROOT);
        self.path.steps[..self.path.length].reverse();
    }

    /// Follows the turns from the root to the disk that is next, and says in which direction.
    fn pick(&mut self) -> Option<Direction> {
        let Self { nodes, path, now, .. } = self;
        path.length = 0;
        let mut slot = ROOT;
        // By direction: whether a request of it may be chosen. Narrows on the way down.
        let mut open = Direction::ALL.map(|direction| nodes[ROOT].has_work(direction));
        // Where no limit applies, any child that is ready may be chosen.
        let mut limited = false;
        loop {
            path.push(slot);
            let node = &nodes[slot];
            let mut wanted = if open[node.first.index()] { node.first } else { opposite(node.first) };
            let Some(schedule) = node.schedule.as_ref().filter(|schedule| !schedule.is_childless()) else {
                return open[wanted.index()].then_some(wanted);
            };
            limited |= node.limited.is_some();
            let next = |direction: Direction| {
                open[direction.index()]
                    .then(|| schedule.next(direction, lane_of(node, direction), *now))
                    .flatten()
            };
            let other = opposite(wanted);
            let (mut chosen, rival) = (next(wanted)?, next(other));
            if let Some(rival) = rival
                && node.shared
                && rival.precedes(&chosen)
            {
                chosen = rival;
                wanted = other;
            }
            let child = chosen.child;
            path.steps[path.length - 1].phase = chosen.phase;
            // The child may prefer the other direction only where it is that direction's turn too.
            // A standing for both directions is a turn for either, or a child whose turns always
            // fall to one direction would never be served in the other.
            let other = opposite(wanted);
            let is_its_turn = |rival: Candidate| {
                rival.child == child || (node.shared || !limited) && schedule.offers(child, other)
            };
            open[other.index()] = next(other).is_some_and(is_its_turn);
            slot = schedule.slot(child);
        }
    }

    /// Works out what a request costs at every level, and how much of it may be paid now.
    fn price(&mut self, direction: Direction, cost: &Cost) -> Terms {
        let now = self.now;
        let mut price_ns = 0;
        let mut operations = cost.requests().saturating_mul(BILLION);
        for step in &mut self.path.steps[..self.path.length] {
            if let Some(limited) = &self.nodes[step.slot].limited {
                price_ns = price_ns.max(limited.buckets.price_ns(direction, cost));
                operations = operations.max(limited.buckets.operations(cost));
            }
            // What is unlimited so far is not contended, and this only keeps some order.
            let unlimited_ns = || {
                let by_bytes = cost.bytes() / BYTES_PER_OPERATION;
                cost.requests().max(by_bytes).saturating_mul(UNLIMITED_OPERATION_NS)
            };
            step.price_ns = if price_ns > 0 { price_ns } else { unlimited_ns() }.min(LONGEST_NS);
            step.operations = operations;
        }
        let mut terms = Terms { slice: WHOLE, room: WHOLE };
        if price_ns <= SLICE_NS {
            return terms;
        }
        // Rare from here on: what is large is asked about again, at the levels that hold it up.
        let (mut enforced_ns, mut operation_ns) = (0, 0);
        for step in &self.path.steps[..self.path.length] {
            if let Some(buckets) = self.nodes[step.slot].enforced(now) {
                enforced_ns = enforced_ns.max(buckets.price_ns(direction, cost));
                operation_ns = operation_ns.max(buckets.operation_ns(direction));
                terms.room = terms.room.min(buckets.room(direction, cost));
            }
        }
        terms.slice = slice_of(enforced_ns, operation_ns);
        terms
    }

    fn charge(&mut self, direction: Direction, cost: &Cost, part: &Range<u32>) {
        let now = self.now;
        for level in 0..self.path.length {
            let Step { slot, phase, price_ns, operations } = self.path.steps[level];
            let node = &mut self.nodes[slot];
            if let Some(buckets) = node.enforced(now) {
                buckets.charge_part(direction, cost, part);
            }
            if level + 1 == self.path.length {
                break;
            }
            let child = &mut self.nodes[self.path.steps[level + 1].slot];
            if let Some(promise) = &mut child.promise {
                promise.had(of_part(child.share.promised_ns(cost, operations), part), now);
            }
            let child = &*child;
            let number = child.number;
            let promised_ns = match phase {
                Phase::Promise => of_part(child.entitlement().promised_ns(cost, operations), part),
                Phase::Weight => 0,
            };
            let node = &mut self.nodes[slot];
            let lane = lane_of(node, direction);
            let service = Service { lane, phase, cost_ns: of_part(price_ns, part), promised_ns };
            if let Some(schedule) = &mut node.schedule {
                schedule.charge(number, service, now);
            }
        }
        let other = opposite(direction);
        for level in (1..self.path.length).rev() {
            let slot = self.path.steps[level].slot;
            self.settle(slot, direction, true);
            // Nothing to do, and nothing done before, for nearly all.
            if self.nodes[slot].waiting[other.index()] > 0 {
                let lane = lane_of(&self.nodes[self.nodes[slot].parent], direction);
                self.settle(slot, other, lane.covers(other));
            }
        }
    }

    fn count(&mut self, direction: Direction, cost: &Cost, waited_ns: Option<u64>) {
        for step in &self.path.steps[1..self.path.length] {
            self.nodes[step.slot].count(direction, cost, waited_ns, self.now);
        }
    }

    /// Brings a node's standing in one direction in line with its work and buckets. Says whether
    /// its parent may have to be settled too.
    fn settle(&mut self, slot: usize, direction: Direction, charged: bool) -> bool {
        let now = self.now;
        let node = &mut self.nodes[slot];
        let has_work = node.has_work(direction);
        let binding =
            if has_work { node.enforced(now).and_then(|buckets| buckets.binding(direction)) } else { None };
        let was_blocked = node.blocked[direction.index()];
        if was_blocked || binding.is_some() {
            node.set_blocked(direction, binding.map(|(_, kind)| kind), now);
            match binding {
                Some((wait_ns, _)) => {
                    let until = now + core::time::Duration::from_nanos(wait_ns);
                    self.wakes.set(wake_item(slot, direction), until);
                }
                None => self.wakes.remove(wake_item(slot, direction)),
            }
        }
        let ready = has_work && binding.is_none();
        let (parent, number) = (self.nodes[slot].parent, self.nodes[slot].number);
        let parent = &mut self.nodes[parent];
        let lane = lane_of(parent, direction);
        let Some(schedule) = &mut parent.schedule else { return false };
        let was_ready = schedule.offers(number, direction);
        if ready && (charged || !was_ready) {
            schedule.offer(number, direction, lane, now);
        } else if was_ready && !ready {
            schedule.withdraw(number, direction);
        }
        ready != was_ready
    }

    /// Settles a node and those above that it concerns.
    pub(super) fn settle_up(&mut self, slot: usize, direction: Direction) {
        let mut at = slot;
        while at != ROOT && self.settle(at, direction, false) {
            at = self.nodes[at].parent;
        }
    }

    pub(super) fn settle_both_up(&mut self, slot: usize) {
        for direction in Direction::ALL {
            self.settle_up(slot, direction);
        }
    }
}

fn of_part(ns: u64, part: &Range<u32>) -> u64 {
    // No more than `ns`.
    part_of(u128::from(ns), part) as u64
}

const fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Read => Direction::Write,
        Direction::Write => Direction::Read,
    }
}
