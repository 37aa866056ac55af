//! The part of the tree that runs for every request, in four steps: *wake* nodes whose limits admit
//! again; *pick* a path from the root by the schedules; *charge* every level of it; *settle* these
//! levels again, bottom up.

use super::super::cost::{BILLION, RequestCost};
use super::super::node::QueuedRequest;
use super::super::scheduler::{ScheduleCandidate, SchedulePhase, ServiceCharge};
use super::super::slicing::{MAX_COST_NS, SLICE_NS, WHOLE_REQUEST, proportional_part, slice_size};
use super::{LevelCause, MAX_LEVELS, NodeId, PollDecision, ROOT, ThrottleTree, lane_of, wake_item};
use crate::request::Direction;
use crate::time::Instant;
use core::ops::Range;

/// Bytes that count as an operation if no limit applies above.
const BYTES_PER_OPERATION: u64 = 4096;
/// Cost of such an operation.
const UNLIMITED_OPERATION_NS: u64 = 10_000;

/// A large request gets at most this fraction (1 / n) of the remaining burst at a time, so the
/// number of its slices is logarithmic in the burst, and no slice uses all of it.
const BURST_FRACTION: u32 = 4;

#[derive(Clone, Copy, Debug)]
struct PathStep {
    slot: usize,
    phase: SchedulePhase,
    /// Cost of the request at the scarcest limit down to this level.
    price_ns: u64,
    /// Operations, in billionths, by the level down to this one that counts most.
    operations: u64,
}

/// Path from the root to a disk, both included. A field of the tree, so that it is not copied.
#[derive(Debug)]
pub(super) struct ServicePath {
    steps: [PathStep; MAX_LEVELS + 1],
    length: usize,
}

impl ServicePath {
    pub(super) const fn new() -> Self {
        let step = PathStep { slot: ROOT, phase: SchedulePhase::Weight, price_ns: 0, operations: 0 };
        Self { steps: [step; MAX_LEVELS + 1], length: 0 }
    }

    const fn push(&mut self, slot: usize) {
        self.steps[self.length].slot = slot;
        self.steps[self.length].phase = SchedulePhase::Weight;
        self.length += 1;
    }
}

/// Parts of a request that may be charged now, in units of [`WHOLE_REQUEST`].
struct ChargeableParts {
    slice: u32,
    /// Part that fits into every bucket on the path.
    room: u32,
}

impl<T> ThrottleTree<T> {
    /// Admits and charges a request of a disk if that is possible at once; returns true if it did.
    /// Otherwise call [`ThrottleTree::submit`]. For callers that avoid creating a token.
    ///
    /// # Panics
    /// Panics if the node has children, because then it is a group.
    pub fn try_admit(
        &mut self,
        disk: NodeId,
        direction: Direction,
        cost: &RequestCost,
        now: Instant,
    ) -> bool {
        let slot = self.slot_of_disk(disk);
        self.advance(now);
        // A request must not overtake earlier ones of its disk, nor ready ones of its siblings.
        let may_admit = self.nodes[slot].queue(direction).is_empty() && self.can_admit(slot, direction);
        if !may_admit {
            return false;
        }
        self.build_path(slot);
        let parts = self.compute_costs(direction, cost);
        // The last slice may overrun the buckets, as any request may; the next request waits for
        // it.
        if parts.slice < WHOLE_REQUEST && parts.room.saturating_add(parts.slice) < WHOLE_REQUEST {
            return false;
        }
        self.charge(direction, cost, &(0..WHOLE_REQUEST));
        self.count(direction, cost, None);
        true
    }

    /// Charges a request of a disk that cannot wait, whatever the levels. Later requests wait until
    /// buckets that it overruns have leaked.
    ///
    /// # Panics
    /// Panics if the node has children, because then it is a group.
    pub fn charge_unconditionally(
        &mut self,
        disk: NodeId,
        direction: Direction,
        cost: &RequestCost,
        now: Instant,
    ) {
        let slot = self.slot_of_disk(disk);
        self.advance(now);
        self.build_path(slot);
        let _ = self.compute_costs(direction, cost);
        self.charge(direction, cost, &(0..WHOLE_REQUEST));
        self.count(direction, cost, None);
    }

    fn slot_of_disk(&self, disk: NodeId) -> usize {
        let slot = self.slot(disk);
        assert!(
            self.nodes[slot].schedule.as_ref().is_none_or(|schedule| schedule.is_empty()),
            "requests are submitted to disks, not to groups"
        );
        slot
    }

    /// The next decision. Never [`PollDecision::Idle`] while requests wait.
    pub fn poll(&mut self, now: Instant) -> PollDecision<T> {
        self.advance(now);
        while let Some(direction) = self.pick() {
            if let Some(token) = self.serve(direction) {
                return PollDecision::Admit(token);
            }
        }
        match self.wakes.first() {
            Some((until, _)) => PollDecision::Wait { until },
            None => PollDecision::Idle,
        }
    }

    /// Serves the first request of the picked disk, or the next slice of a large one.
    fn serve(&mut self, direction: Direction) -> Option<T> {
        let slot = self.path.steps[self.path.length - 1].slot;
        for step in &self.path.steps[..self.path.length] {
            self.nodes[step.slot].first = opposite(direction);
        }
        // Removed from the queue, because computing its price borrows every level.
        let mut waiter = self.nodes[slot].queue_mut(direction).pop_front()?;
        let parts = self.compute_costs(direction, &waiter.cost);
        // At least a slice, but more while a burst lasts: charging a large burst slice by slice
        // would take too many steps.
        let start = waiter.charged_parts;
        let part = parts.slice.max(parts.room / BURST_FRACTION);
        let end = if parts.slice == WHOLE_REQUEST {
            WHOLE_REQUEST
        } else {
            start.saturating_add(part).min(WHOLE_REQUEST)
        };
        if end < WHOLE_REQUEST {
            // Back to the front of the queue: the remaining slices keep the order of arrival.
            waiter.charged_parts = end;
            let cost = waiter.cost.clone();
            self.nodes[slot].queue_mut(direction).push_front(waiter);
            self.charge(direction, &cost, &(start..end));
            return None;
        }
        self.update_waiting(slot, direction, |waiting| waiting - 1);
        self.charge(direction, &waiter.cost, &(start..end));
        let waited_ns = self.now.nanos_since(waiter.since);
        self.last_cause = self.throttle_cause(direction, &waiter);
        self.count(direction, &waiter.cost, Some(waited_ns));
        Some(waiter.token)
    }

    /// Finds the throttle cause of a request: the limit or cap of its disk or group, if that
    /// throttled for half of the wait; otherwise the one on the path that released it last.
    ///
    /// A request throttled by a group waits for the limits above only afterwards, and if those are
    /// always busy, briefly each time: raising them would not help. The limit that throttled for
    /// the longest time would be wrong too: a busy group above throttles all the time, because of
    /// other members. To decide this, each waiting request stores the throttled times of disk and
    /// group (16 bytes).
    fn throttle_cause(&self, direction: Direction, waiter: &QueuedRequest<T>) -> Option<LevelCause> {
        let steps = self.path.steps[1..self.path.length].iter().rev().enumerate();
        let causes = steps.filter_map(|(level, step)| {
            let node = &self.nodes[step.slot];
            let (kind, until) = node.last_throttled(direction)?;
            let before = waiter.throttled_ns.get(level);
            let throttled_ns = before.map_or(0, |before| node.throttled_ns(self.now).saturating_sub(*before));
            let held_longest = throttled_ns > 0 && throttled_ns >= self.now.nanos_since(waiter.since) / 2;
            (until >= waiter.since).then_some((held_longest, until, LevelCause { level, kind }))
        });
        // Of several that released it together, the disk's own.
        let choose = |first: (bool, Instant, LevelCause), second: (bool, Instant, LevelCause)| {
            if !first.0 && (second.0 || second.1 > first.1) { second } else { first }
        };
        causes.reduce(choose).map(|(_, _, cause)| cause)
    }

    /// Throttle cause of the request that [`ThrottleTree::poll`] admitted last; `None` if it only
    /// waited for the scheduler.
    pub fn last_cause(&self) -> Option<LevelCause> {
        self.last_cause
    }

    fn advance(&mut self, now: Instant) {
        self.advance_to(now);
        while let Some((until, item)) = self.wakes.first()
            && until <= self.now
        {
            self.settle_up(item as usize / 2, Direction::ALL[item as usize % 2]);
        }
    }

    /// True if all buckets from a disk up have capacity and no ready request is overtaken.
    fn can_admit(&mut self, slot: usize, direction: Direction) -> bool {
        let (now, other, mut at) = (self.now, opposite(direction), slot);
        loop {
            let node = &mut self.nodes[at];
            let shared = node.has_shared_limit;
            let overtakes = node.schedule.as_ref().is_some_and(|schedule| schedule.has_work(direction));
            let other_waits = shared && node.has_work(other);
            if overtakes || node.longest_wait(direction, now).is_some() {
                return false;
            }
            // A waiting request of the opposite direction that could be admitted as well has
            // precedence: it arrived first, and `poll` decides when it is admitted.
            if other_waits && node.longest_wait(other, now).is_none() {
                return false;
            }
            if at == ROOT {
                return true;
            }
            at = node.parent;
        }
    }

    fn build_path(&mut self, slot: usize) {
        self.path.length = 0;
        let mut at = slot;
        while at != ROOT {
            self.path.push(at);
            at = self.nodes[at].parent;
        }
        self.path.push(ROOT);
        self.path.steps[..self.path.length].reverse();
    }

    /// Follows the schedules from the root to the next disk, and returns the direction to serve.
    fn pick(&mut self) -> Option<Direction> {
        let Self { nodes, path, now, .. } = self;
        path.length = 0;
        let mut slot = ROOT;
        // Directions in which a request may be chosen. Narrows on the way down.
        let mut eligible = Direction::ALL.map(|direction| nodes[ROOT].has_work(direction));
        // While no limit applies, any ready child may be chosen.
        let mut is_limited = false;
        loop {
            path.push(slot);
            let node = &nodes[slot];
            let mut preferred = if eligible[node.first.index()] { node.first } else { opposite(node.first) };
            let Some(schedule) = node.schedule.as_ref().filter(|schedule| !schedule.is_empty()) else {
                return eligible[preferred.index()].then_some(preferred);
            };
            is_limited |= node.has_buckets();
            let next = |direction: Direction| {
                eligible[direction.index()]
                    .then(|| schedule.next_candidate(direction, lane_of(node, direction), *now))
                    .flatten()
            };
            let other = opposite(preferred);
            let (mut chosen, rival) = (next(preferred)?, next(other));
            // Under a shared limit the directions compete by tag; otherwise they alternate
            // (`node.first`).
            if let Some(rival) = rival
                && node.has_shared_limit
                && rival.precedes(&chosen)
            {
                chosen = rival;
                preferred = other;
            }
            let child = chosen.child;
            path.steps[path.length - 1].phase = chosen.phase;
            // The child may prefer the opposite direction only if it is scheduled there as well.
            // With common tags it is scheduled in either; otherwise a child that is always
            // scheduled in one direction would never be served in its opposite.
            let other = opposite(preferred);
            let is_its_turn = |rival: ScheduleCandidate| {
                rival.child == child
                    || (node.has_shared_limit || !is_limited) && schedule.is_offered(child, other)
            };
            eligible[other.index()] = next(other).is_some_and(is_its_turn);
            slot = schedule.slot(child);
        }
    }

    /// Computes the cost of a request at every level, and the part that may be charged now.
    fn compute_costs(&mut self, direction: Direction, cost: &RequestCost) -> ChargeableParts {
        let now = self.now;
        let mut price_ns = 0;
        let mut operations = cost.requests().saturating_mul(BILLION);
        for step in &mut self.path.steps[..self.path.length] {
            self.nodes[step.slot].all_buckets().for_each(|buckets| {
                price_ns = price_ns.max(buckets.cost_ns(direction, cost));
                operations = operations.max(buckets.operations(cost));
            });
            // Without a limit there is no contention; this only keeps some order.
            let unlimited_ns = || {
                let by_bytes = cost.bytes() / BYTES_PER_OPERATION;
                cost.requests().max(by_bytes).saturating_mul(UNLIMITED_OPERATION_NS)
            };
            step.price_ns = if price_ns > 0 { price_ns } else { unlimited_ns() }.min(MAX_COST_NS);
            step.operations = operations;
        }
        let mut parts = ChargeableParts { slice: WHOLE_REQUEST, room: WHOLE_REQUEST };
        if price_ns <= SLICE_NS {
            return parts;
        }
        // Only for large requests, which are rare: the cost is computed again, from the levels
        // whose limits are enforced.
        let (mut enforced_ns, mut operation_ns) = (0, 0);
        for step in &self.path.steps[..self.path.length] {
            for buckets in self.nodes[step.slot].enforced_buckets(now) {
                enforced_ns = enforced_ns.max(buckets.cost_ns(direction, cost));
                operation_ns = operation_ns.max(buckets.operation_ns(direction));
                parts.room = parts.room.min(buckets.room(direction, cost));
            }
        }
        parts.slice = slice_size(enforced_ns, operation_ns);
        parts
    }

    fn charge(&mut self, direction: Direction, cost: &RequestCost, part: &Range<u32>) {
        let now = self.now;
        // Top down: buckets and schedule of each level. Settling follows bottom up, because a
        // node's offer to its parent depends on its own state.
        for level in 0..self.path.length {
            let PathStep { slot, phase, price_ns, operations } = self.path.steps[level];
            let node = &mut self.nodes[slot];
            node.enforced_buckets(now).for_each(|buckets| buckets.charge_part(direction, cost, part));
            if level + 1 == self.path.length {
                // The reservation is monitored with the node's own share, but scheduled with the
                // entitlement, which includes reservations of its members.
                break;
            }
            let child = &mut self.nodes[self.path.steps[level + 1].slot];
            if let Some(monitor) = &mut child.reservation_monitor {
                monitor.add_service(of_part(child.share.reservation_ns(cost, operations), part), now);
            }
            let child = &*child;
            let number = child.number;
            let reservation_ns = match phase {
                SchedulePhase::Reservation => {
                    of_part(child.entitlement().reservation_ns(cost, operations), part)
                }
                SchedulePhase::Weight => 0,
            };
            let node = &mut self.nodes[slot];
            let lane = lane_of(node, direction);
            let service = ServiceCharge { lane, phase, cost_ns: of_part(price_ns, part), reservation_ns };
            if let Some(schedule) = &mut node.schedule {
                schedule.charge(number, service, now);
            }
        }
        let other = opposite(direction);
        for level in (1..self.path.length).rev() {
            let slot = self.path.steps[level].slot;
            self.settle(slot, direction, true);
            // Nearly always false.
            if self.nodes[slot].waiting[other.index()] > 0 {
                let lane = lane_of(&self.nodes[self.nodes[slot].parent], direction);
                self.settle(slot, other, lane.covers(other));
            }
        }
    }

    fn count(&mut self, direction: Direction, cost: &RequestCost, waited_ns: Option<u64>) {
        for step in &self.path.steps[1..self.path.length] {
            self.nodes[step.slot].count(direction, cost, waited_ns, self.now);
        }
    }

    /// Updates a node's place in its parent's schedule and in the heap of wake-ups to its requests
    /// and buckets. Returns true if the parent may have to be settled too.
    fn settle(&mut self, slot: usize, direction: Direction, charged: bool) -> bool {
        let now = self.now;
        let node = &mut self.nodes[slot];
        let has_work = node.has_work(direction);
        let binding = if has_work { node.longest_wait(direction, now) } else { None };
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
        // A node is offered to its parent only if its own limits admit, so `pick` never descends
        // into a throttled subtree.
        let ready = has_work && binding.is_none();
        let (parent, number) = (self.nodes[slot].parent, self.nodes[slot].number);
        let parent = &mut self.nodes[parent];
        let lane = lane_of(parent, direction);
        let Some(schedule) = &mut parent.schedule else { return false };
        let was_ready = schedule.is_offered(number, direction);
        if ready && (charged || !was_ready) {
            schedule.offer(number, direction, lane, now);
        } else if was_ready && !ready {
            schedule.withdraw(number, direction);
        }
        ready != was_ready
    }

    /// Settles a node and those ancestors that are affected.
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
    // At most `ns`.
    proportional_part(u128::from(ns), part) as u64
}

const fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Read => Direction::Write,
        Direction::Write => Direction::Read,
    }
}
