//! Whose turn it is among the children of one node.
//!
//! ```text
//!   children that could pass now, a heap by tag for each direction
//!
//!     promises   R = 12.1 ms  R = 13.0 ms             R ≤ now: goes first, the smallest
//!     turns      S = 40   S = 41   S = 41   S = 55    else the smallest start tag
//!                 ▲ virtual time follows the start tags of what is served
//! ```
//!
//! **By weight**: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996). A child is served at
//! its start tag S = max(F, floor), and then F = S + cost / weight. v, the node's virtual time, is
//! the S that was served last. So busy children keep equal F, whatever a single request costs.
//!
//! A child that was idle starts at the *floor*: v as it was 20 to 40 ms ago, if that is not more
//! than 20 ms of its own cost below v. (In the textbook the floor is v itself, but a client that
//! waits for each answer comes just after v has moved on.) However many children return at once,
//! together they catch up what passed in that time, and busy children wait no longer than that.
//!
//! **By promise**: mClock's constraint phase (Gulati, Merchant, Varman, OSDI 2010). A child with a
//! reservation has a tag in real time, R: when its next request is due. R moves on only when a
//! request is served because it was due. Every service moves F on, so it counts towards the share
//! by weight.
//!
//! **Nobody starves**: promises may take all that the limits let pass, but one turn in a hundred
//! goes by weight. Promises move F ahead of v only up to a bound, so a child that loses its promise
//! soon has turns again.
//!
//! A child has one standing for both directions if these draw from a common limit, otherwise one
//! for each ([`Lane`]): under a limit on writes, a child that writes much should not read less.
//!
//! Never looks at buckets: the tree offers a child when it can pass, and withdraws it.

use super::heap::Heap;
use super::price::SLICE_NS;
use super::share::Share;
use crate::request::Direction;
use crate::time::Instant;
use alloc::vec::Vec;

/// How long ago a child may have missed its turns and still have them by weight, and the most of
/// its own cost they are worth. A client with one request in flight misses a turn whenever an
/// answer or a timer is late. Credit is also a burst over the siblings.
const CREDIT_NS: u64 = 20_000_000;

/// How much of its promise a child that was idle may catch up: a promise can come due while
/// somebody else's slice is being paid for.
const PROMISE_CREDIT_NS: u64 = SLICE_NS + CREDIT_NS;

/// How much of it a child that was busy may catch up: each slow turn makes everybody late at every
/// level. Bounded, because what a slow device could not give should not be had all at once.
const ARREARS_NS: u64 = 1_000_000_000;

/// How far service by promise may move F ahead of v, in time of the child's own cost.
const LEAD_NS: u64 = SLICE_NS;

/// Of what passes where promises take everything, one part in so many still goes by weight.
const WEIGHT_PHASE_PART: u64 = 100;

/// Bits of virtual time for a nanosecond at weight 1: rounds well for every weight up to 10,000.
const VIRTUAL_BITS: u32 = 14;

/// Virtual time is moved back when it passes this. The largest step is 2⁶⁰: nothing overflows.
const LATEST: u64 = 1 << 62;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Of both directions.
    Shared,
    /// Of this direction alone.
    Of(Direction),
}

impl Lane {
    pub(super) const fn new(direction: Direction, shared: bool) -> Self {
        if shared { Self::Shared } else { Self::Of(direction) }
    }

    const fn index(self) -> usize {
        match self {
            Self::Shared => 0,
            Self::Of(direction) => direction.index(),
        }
    }

    /// Whether a charge in this lane moves this direction's tags.
    pub(super) fn covers(self, direction: Direction) -> bool {
        self == Self::Shared || self == Self::Of(direction)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    /// Its promise is due.
    Promise,
    /// By weight.
    Weight,
}

/// Of equal tags, who was offered first goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    start: u64,
    order: u32,
}

/// Who would be served next, and why. The smaller of two goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) phase: Phase,
    /// R by promise, S by weight.
    tag: u64,
    pub(super) child: u32,
}

impl Candidate {
    /// Whether this one has a strictly better claim than another, of another direction.
    pub(super) fn precedes(&self, other: &Self) -> bool {
        (self.phase, self.tag) < (other.phase, other.tag)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Service {
    pub(super) lane: Lane,
    pub(super) phase: Phase,
    /// Time it takes of the scarcest limit.
    pub(super) cost_ns: u64,
    /// Time it takes of the promise; 0 without one.
    pub(super) promised_ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Child {
    slot: u32,
    reserved: bool,
    /// 2³² / weight.
    inverse_weight: u64,
    /// [`CREDIT_NS`] in virtual time.
    credit: u64,
    /// By lane: F.
    finish: [u64; 2],
    /// R: when its promise is next due.
    due: u64,
}

impl Child {
    fn virtual_time(&self, ns: u64) -> u64 {
        virtual_time(ns, self.inverse_weight)
    }

    /// S.
    fn start(&self, lane: Lane, clock: &Clock) -> u64 {
        let floor = clock.before.max(clock.now.saturating_sub(self.credit));
        self.finish[lane.index()].max(floor)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    /// v.
    now: u64,
    /// v as it was at `marked`.
    mark: u64,
    /// v as it was at the mark before that one.
    before: u64,
    marked: Instant,
    /// How much may be served by promise before a turn by weight.
    allowance_ns: u64,
}

impl Clock {
    /// Notes v every [`CREDIT_NS`].
    fn tick(&mut self, now: Instant) {
        if now.nanos_since(self.marked) >= CREDIT_NS {
            *self = Self { before: self.mark, mark: self.now, marked: now, ..*self };
        }
    }
}

#[derive(Debug)]
pub(super) struct Schedule {
    children: Vec<Option<Child>>,
    vacant: Vec<u32>,
    turns: [Heap<Turn>; 2],
    promises: [Heap<u64>; 2],
    /// By lane.
    clocks: [Clock; 2],
    next_order: u32,
}

impl Schedule {
    pub(super) const fn new() -> Self {
        Self {
            children: Vec::new(),
            vacant: Vec::new(),
            turns: [Heap::new(), Heap::new()],
            promises: [Heap::new(), Heap::new()],
            clocks: [Clock { now: 0, mark: 0, before: 0, marked: Instant::ZERO, allowance_ns: 0 }; 2],
            next_order: 0,
        }
    }

    pub(super) fn join(&mut self, slot: u32, share: Share) -> u32 {
        let child = Some(Child {
            slot,
            reserved: share.is_reserved(),
            inverse_weight: inverse(share),
            credit: virtual_time(CREDIT_NS, inverse(share)),
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
    pub(super) fn leave(&mut self, child: u32) {
        debug_assert!(!Direction::ALL.iter().any(|direction| self.offers(child, *direction)));
        self.children[child as usize] = None;
        self.vacant.push(child);
    }

    /// Changes a child's share. What it has been charged stays. It must have been withdrawn.
    pub(super) fn set_share(&mut self, child: u32, share: Share) {
        let child = self.child_mut(child);
        child.reserved = share.is_reserved();
        child.inverse_weight = inverse(share);
        child.credit = virtual_time(CREDIT_NS, child.inverse_weight);
    }

    pub(super) fn slot(&self, child: u32) -> usize {
        self.child(child).slot as usize
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = usize> + '_ {
        self.children.iter().flatten().map(|child| child.slot as usize)
    }

    pub(super) fn is_childless(&self) -> bool {
        self.children.len() == self.vacant.len()
    }

    pub(super) const fn has_work(&self, direction: Direction) -> bool {
        !self.turns[direction.index()].is_empty()
    }

    pub(super) fn offers(&self, child: u32, direction: Direction) -> bool {
        self.turns[direction.index()].contains(child)
    }

    /// Says that this child could pass, also when it still could but has been charged since.
    pub(super) fn offer(&mut self, child: u32, direction: Direction, lane: Lane, now: Instant) {
        let order = self.next_order;
        self.next_order = order.wrapping_add(1);
        self.clocks[lane.index()].tick(now);
        let start = self.child(child).start(lane, &self.clocks[lane.index()]);
        self.turns[direction.index()].set(child, Turn { start, order });
        if self.child(child).reserved {
            let was_idle =
                !Direction::ALL.iter().any(|direction| self.promises[direction.index()].contains(child));
            let due = &mut self.child_mut(child).due;
            if was_idle {
                *due = (*due).max(now.as_nanos().saturating_sub(PROMISE_CREDIT_NS));
            }
            let due = *due;
            self.promises[direction.index()].set(child, due);
        }
    }

    pub(super) fn withdraw(&mut self, child: u32, direction: Direction) {
        self.turns[direction.index()].remove(child);
        self.promises[direction.index()].remove(child);
    }

    pub(super) fn next(&self, direction: Direction, lane: Lane, now: Instant) -> Option<Candidate> {
        let (turn, child) = self.turns[direction.index()].first()?;
        if let Some((due, child)) = self.promises[direction.index()].first()
            && due <= now.as_nanos()
            && self.clocks[lane.index()].allowance_ns > 0
        {
            return Some(Candidate { phase: Phase::Promise, tag: due, child });
        }
        Some(Candidate { phase: Phase::Weight, tag: turn.start, child })
    }

    /// Charges a child. If it is on offer, it must be offered again or withdrawn.
    pub(super) fn charge(&mut self, number: u32, service: Service, now: Instant) {
        let Service { lane, phase, cost_ns, promised_ns } = service;
        let clock = &mut self.clocks[lane.index()];
        let child = self.children[number as usize].as_mut().expect("a child that has not left");
        clock.tick(now);
        let start = child.start(lane, clock);
        let step = child.virtual_time(cost_ns.max(1));
        let finish = start + step;
        match phase {
            Phase::Weight => {
                child.finish[lane.index()] = finish;
                clock.now = clock.now.max(start);
                clock.allowance_ns = cost_ns.max(1).saturating_mul(WEIGHT_PHASE_PART - 1);
            }
            Phase::Promise => {
                let latest = clock.now + child.virtual_time(LEAD_NS) + step;
                child.finish[lane.index()] = finish.min(latest);
                let earliest = now.as_nanos().saturating_sub(ARREARS_NS);
                child.due = child.due.max(earliest).saturating_add(promised_ns);
                clock.allowance_ns = clock.allowance_ns.saturating_sub(cost_ns.max(1));
            }
        }
        if clock.now > LATEST {
            self.move_back(lane);
        }
    }

    /// The limits that charges were measured by have changed.
    pub(super) fn forget(&mut self) {
        self.clocks = [Clock::default(); 2];
        for child in self.children.iter_mut().flatten() {
            child.finish = [0; 2];
        }
        for turns in &mut self.turns {
            turns.map_keys(|_| Turn { start: 0, order: 0 });
        }
    }

    /// Moves the lane's virtual time back. Once in weeks, at the soonest.
    #[cold]
    fn move_back(&mut self, lane: Lane) {
        // Start tags are behind v by the credit at most; whoever is further behind is idle.
        let clock = &mut self.clocks[lane.index()];
        let by = clock.now - LATEST / 2;
        clock.now -= by;
        clock.mark = clock.mark.saturating_sub(by);
        clock.before = clock.before.saturating_sub(by);
        for child in self.children.iter_mut().flatten() {
            child.finish[lane.index()] = child.finish[lane.index()].saturating_sub(by);
        }
        for direction in Direction::ALL {
            if lane.covers(direction) {
                let back = |turn: Turn| Turn { start: turn.start.saturating_sub(by), ..turn };
                self.turns[direction.index()].map_keys(back);
            }
        }
    }

    fn child(&self, number: u32) -> &Child {
        self.children[number as usize].as_ref().expect("a child that has not left")
    }

    fn child_mut(&mut self, number: u32) -> &mut Child {
        self.children[number as usize].as_mut().expect("a child that has not left")
    }
}

const fn virtual_time(ns: u64, inverse_weight: u64) -> u64 {
    // 2⁴⁶ × 2³² at most, shifted back to 2⁶⁰.
    ((ns as u128 * inverse_weight as u128) >> (32 - VIRTUAL_BITS)) as u64
}

const fn inverse(share: Share) -> u64 {
    (1 << 32) / share.weight() as u64
}
