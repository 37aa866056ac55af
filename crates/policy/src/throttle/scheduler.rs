//! Scheduler for the children of one node.
//!
//! ```text
//!   children that are ready, in a heap by tag for each direction
//!
//!     reservations  R = 12.1 ms  R = 13.0 ms          R ≤ now: served first, the smallest
//!     weights       S = 40   S = 41   S = 41   S = 55    otherwise the smallest start tag
//!                    ▲ virtual time follows the start tags of served requests
//! ```
//!
//! **By weight**: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). A child is served at
//! its start tag S = max(F, floor), after which F = S + cost / weight. v, the node's virtual time,
//! is the S served last. Busy children therefore keep equal F, whatever a single request costs.
//!
//! A child that was idle starts at the *floor*: v as of 20 to 40 ms ago, but at most 20 ms of its
//! own cost below v. (In the paper the floor is v itself, but a client with a queue depth of 1
//! always returns just after v has advanced.) However many children return at once, together they
//! catch up the service of that time, and busy children wait no longer than that.
//!
//! **By reservation**: mClock's constraint phase (Gulati, Merchant, Varman, OSDI 2010). A child
//! with a reservation has a tag in real time, R: when its next request is due. R advances only when
//! a request is served because it was due. Every service advances F, so it counts towards the share
//! by weight.
//!
//! **No starvation**: reservations may use all that the limits admit, but one part in a hundred is
//! served by weight. Reservations advance F ahead of v only up to a bound, so a child that loses
//! its reservation is soon served by weight again.
//!
//! A child has one set of tags for both directions if they share a limit, otherwise one for each
//! ([`TagLane`]): under a limit on writes, a child that writes much should not read less.
//!
//! Never looks at buckets: the tree offers a child when it is ready, and withdraws it.

use super::heap::IndexedHeap;
use super::share::NodeShare;
use super::slicing::SLICE_NS;
use crate::request::Direction;
use crate::time::Instant;
use alloc::vec::Vec;

/// Service that a child may catch up after it was idle: that of this time, and at most this much of
/// its own cost. Without it, a client with a queue depth of 1 would lose a service whenever a
/// completion or a timer is late. The credit is a burst at the siblings' expense.
const IDLE_CREDIT_NS: u64 = 20_000_000;

/// Reservation that a child may catch up after it was idle: its request may become due during
/// another child's slice.
const RESERVATION_CREDIT_NS: u64 = SLICE_NS + IDLE_CREDIT_NS;

/// Reservation that a busy child may catch up: a slow service delays all children, at every level.
/// Bounded, so that a device that was slow for long does not serve all arrears at once.
const ARREARS_NS: u64 = 1_000_000_000;

/// Maximum by which service by reservation advances F ahead of v, in time of the child's own cost.
const MAX_LEAD_NS: u64 = SLICE_NS;

/// Fraction (1 / n) of the service that remains by weight if reservations take everything.
const WEIGHT_PHASE_PART: u64 = 100;

/// Bits of virtual time for a nanosecond at weight 1: precise for every weight up to 10,000.
const VIRTUAL_BITS: u32 = 14;

/// Virtual time above which it is moved back. The largest step is 2⁶⁰, so nothing overflows.
const MAX_VIRTUAL_TIME: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagLane {
    /// Tags of both directions.
    Shared,
    /// Tags of one direction.
    Separate(Direction),
}

impl TagLane {
    pub(super) const fn new(direction: Direction, shared: bool) -> Self {
        if shared { Self::Shared } else { Self::Separate(direction) }
    }

    const fn index(self) -> usize {
        match self {
            Self::Shared => 0,
            Self::Separate(direction) => direction.index(),
        }
    }

    /// True if a charge in this lane changes this direction's tags.
    pub(super) fn covers(self, direction: Direction) -> bool {
        self == Self::Shared || self == Self::Separate(direction)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SchedulePhase {
    /// By reservation, because it is due.
    Reservation,
    /// By weight.
    Weight,
}

/// Key of the weight heap. Of equal start tags, the one offered first is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WeightKey {
    start: u64,
    order: u32,
}

/// The next child to serve, and the reason. The smaller of two is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScheduleCandidate {
    pub(super) phase: SchedulePhase,
    /// R by reservation, S by weight.
    tag: u64,
    pub(super) child: u32,
}

impl ScheduleCandidate {
    /// True if this candidate is strictly preferred to one of the opposite direction.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        (self.phase, self.tag) < (other.phase, other.tag)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ServiceCharge {
    pub(super) lane: TagLane,
    pub(super) phase: SchedulePhase,
    /// Time that the service needs of the scarcest limit.
    pub(super) cost_ns: u64,
    /// Time that the service needs of the child's reservation; 0 without one.
    pub(super) reservation_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct ScheduledChild {
    slot: u32,
    reserved: bool,
    /// 2³² / weight.
    inverse_weight: u64,
    /// [`IDLE_CREDIT_NS`] in virtual time.
    credit: u64,
    /// Finish tags F, by lane.
    finish: [u64; 2],
    /// Tag R: time at which its reservation is next due, in nanoseconds.
    due: u64,
}

impl ScheduledChild {
    fn virtual_time(&self, ns: u64) -> u64 {
        virtual_time(ns, self.inverse_weight)
    }

    /// Start tag S.
    fn start(&self, lane: TagLane, clock: &VirtualClock) -> u64 {
        let floor = clock.previous_mark.max(clock.now.saturating_sub(self.credit));
        self.finish[lane.index()].max(floor)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct VirtualClock {
    /// Virtual time v.
    now: u64,
    /// v as of `marked_at`.
    latest_mark: u64,
    /// v as of the previous mark.
    previous_mark: u64,
    marked_at: Instant,
    /// Cost that may be served by reservation before the next service by weight.
    allowance_ns: u64,
}

impl VirtualClock {
    /// Records v every [`IDLE_CREDIT_NS`].
    fn tick(&mut self, now: Instant) {
        if now.nanos_since(self.marked_at) >= IDLE_CREDIT_NS {
            *self = Self { previous_mark: self.latest_mark, latest_mark: self.now, marked_at: now, ..*self };
        }
    }
}

#[derive(Debug)]
pub(super) struct ChildScheduler {
    children: Vec<Option<ScheduledChild>>,
    vacant: Vec<u32>,
    by_weight: [IndexedHeap<WeightKey>; 2],
    by_reservation: [IndexedHeap<u64>; 2],
    /// By lane.
    clocks: [VirtualClock; 2],
    next_order: u32,
}

impl ChildScheduler {
    pub(super) const fn new() -> Self {
        Self {
            children: Vec::new(),
            vacant: Vec::new(),
            by_weight: [IndexedHeap::new(), IndexedHeap::new()],
            by_reservation: [IndexedHeap::new(), IndexedHeap::new()],
            clocks: [VirtualClock {
                now: 0,
                latest_mark: 0,
                previous_mark: 0,
                marked_at: Instant::ZERO,
                allowance_ns: 0,
            }; 2],
            next_order: 0,
        }
    }

    pub(super) fn add_child(&mut self, slot: u32, share: NodeShare) -> u32 {
        let child = Some(ScheduledChild {
            slot,
            reserved: share.is_reserved(),
            inverse_weight: inverse_weight(share),
            credit: virtual_time(IDLE_CREDIT_NS, inverse_weight(share)),
            finish: [0; 2],
            due: 0,
        });
        if let Some(vacant) = self.vacant.pop() {
            self.children[vacant as usize] = child;
            vacant
        } else {
            self.children.push(child);
            self.children.len() as u32 - 1
        }
    }

    /// Removes a child, which must have been withdrawn.
    pub(super) fn remove_child(&mut self, child: u32) {
        debug_assert!(!Direction::ALL.iter().any(|direction| self.is_offered(child, *direction)));
        self.children[child as usize] = None;
        self.vacant.push(child);
    }

    /// Changes a child's share; its tags stay. The child must have been withdrawn.
    pub(super) fn set_share(&mut self, child: u32, share: NodeShare) {
        let child = self.child_mut(child);
        child.reserved = share.is_reserved();
        child.inverse_weight = inverse_weight(share);
        child.credit = virtual_time(IDLE_CREDIT_NS, child.inverse_weight);
    }

    pub(super) fn slot(&self, child: u32) -> usize {
        self.child(child).slot as usize
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        self.children.iter().flatten().map(|child| child.slot as usize)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.children.len() == self.vacant.len()
    }

    pub(super) const fn has_work(&self, direction: Direction) -> bool {
        !self.by_weight[direction.index()].is_empty()
    }

    pub(super) fn is_offered(&self, child: u32, direction: Direction) -> bool {
        self.by_weight[direction.index()].contains(child)
    }

    /// Offers a child that is ready, or updates its keys after a charge.
    pub(super) fn offer(&mut self, child: u32, direction: Direction, lane: TagLane, now: Instant) {
        let order = self.next_order;
        self.next_order = order.wrapping_add(1);
        self.clocks[lane.index()].tick(now);
        let start = self.child(child).start(lane, &self.clocks[lane.index()]);
        self.by_weight[direction.index()].set(child, WeightKey { start, order });
        if self.child(child).reserved {
            let was_idle = !Direction::ALL
                .iter()
                .any(|direction| self.by_reservation[direction.index()].contains(child));
            let due = &mut self.child_mut(child).due;
            // Must not be applied to a busy child: it would lose the arrears of slow services.
            if was_idle {
                *due = (*due).max(now.as_nanos().saturating_sub(RESERVATION_CREDIT_NS));
            }
            let due = *due;
            self.by_reservation[direction.index()].set(child, due);
        }
    }

    pub(super) fn withdraw(&mut self, child: u32, direction: Direction) {
        self.by_weight[direction.index()].remove(child);
        self.by_reservation[direction.index()].remove(child);
    }

    pub(super) fn next_candidate(
        &self,
        direction: Direction,
        lane: TagLane,
        now: Instant,
    ) -> Option<ScheduleCandidate> {
        let (key, child) = self.by_weight[direction.index()].first()?;
        // R may be due, but the weight phase has its fraction first.
        if let Some((due, child)) = self.by_reservation[direction.index()].first()
            && due <= now.as_nanos()
            && self.clocks[lane.index()].allowance_ns > 0
        {
            return Some(ScheduleCandidate { phase: SchedulePhase::Reservation, tag: due, child });
        }
        Some(ScheduleCandidate { phase: SchedulePhase::Weight, tag: key.start, child })
    }

    /// Charges a child for a service. If it is on offer, it must be offered again or withdrawn.
    pub(super) fn charge(&mut self, number: u32, service: ServiceCharge, now: Instant) {
        let ServiceCharge { lane, phase, cost_ns, reservation_ns: promised_ns } = service;
        let clock = &mut self.clocks[lane.index()];
        let child = self.children[number as usize].as_mut().expect("a child that has not left");
        clock.tick(now);
        let start = child.start(lane, clock);
        let step = child.virtual_time(cost_ns.max(1));
        // The tag is computed from the same start as the offer, unless the floor has risen since.
        let finish = start + step;
        match phase {
            SchedulePhase::Weight => {
                child.finish[lane.index()] = finish;
                // v never falls: a child that starts at the floor may have S below v.
                clock.now = clock.now.max(start);
                clock.allowance_ns = cost_ns.max(1).saturating_mul(WEIGHT_PHASE_PART - 1);
            }
            SchedulePhase::Reservation => {
                // Service by reservation counts towards the share, but only up to a bound (see the
                // module documentation).
                let latest = clock.now + child.virtual_time(MAX_LEAD_NS) + step;
                child.finish[lane.index()] = finish.min(latest);
                // Arrears are bounded here, credit of an idle child in `offer`.
                let earliest = now.as_nanos().saturating_sub(ARREARS_NS);
                child.due = child.due.max(earliest).saturating_add(promised_ns);
                clock.allowance_ns = clock.allowance_ns.saturating_sub(cost_ns.max(1));
            }
        }
        if clock.now > MAX_VIRTUAL_TIME {
            self.rebase(lane);
        }
    }

    /// Resets the start and finish tags: the limits by which costs are measured have changed. Tags
    /// R are in real time and stay.
    pub(super) fn reset_tags(&mut self) {
        self.clocks = [VirtualClock::default(); 2];
        for child in self.children.iter_mut().flatten() {
            child.finish = [0; 2];
        }
        for heap in &mut self.by_weight {
            heap.map_keys(|_| WeightKey { start: 0, order: 0 });
        }
    }

    /// Moves the lane's virtual time back; at most once in weeks.
    #[cold]
    fn rebase(&mut self, lane: TagLane) {
        // Start tags are at most the credit behind v. A tag further behind belongs to an idle
        // child, which starts at the floor anyway.
        let clock = &mut self.clocks[lane.index()];
        let shift = clock.now - MAX_VIRTUAL_TIME / 2;
        clock.now -= shift;
        clock.latest_mark = clock.latest_mark.saturating_sub(shift);
        clock.previous_mark = clock.previous_mark.saturating_sub(shift);
        for child in self.children.iter_mut().flatten() {
            child.finish[lane.index()] = child.finish[lane.index()].saturating_sub(shift);
        }
        for direction in Direction::ALL {
            if lane.covers(direction) {
                let move_back = |key: WeightKey| WeightKey { start: key.start.saturating_sub(shift), ..key };
                self.by_weight[direction.index()].map_keys(move_back);
            }
        }
    }

    fn child(&self, number: u32) -> &ScheduledChild {
        self.children[number as usize].as_ref().expect("a child that has not left")
    }

    fn child_mut(&mut self, number: u32) -> &mut ScheduledChild {
        self.children[number as usize].as_mut().expect("a child that has not left")
    }
}

const fn virtual_time(ns: u64, inverse_weight: u64) -> u64 {
    // 2⁴⁶ × 2³² at most, shifted back to 2⁶⁰.
    ((ns as u128 * inverse_weight as u128) >> (32 - VIRTUAL_BITS)) as u64
}

const fn inverse_weight(share: NodeShare) -> u64 {
    (1 << 32) / share.weight() as u64
}
