//! A throttle group: disks that share one set of limits, and the decision which of their requests passes next.
//!
//! Lives behind one lock that several workers take for nanoseconds. Knows no timers and no tasks: what waits is
//! represented by the caller's own token, handed back when its time has come.
//!
//! Never rejects, loses or reorders a request: each token comes out exactly once, through [`Admission::Admitted`],
//! [`Decision::Admit`], [`Group::cancel`] or [`Group::leave`], and a member's requests of one direction pass in the
//! order in which they came.

use super::bucket::Buckets;
use super::cost::Cost;
use super::limits::{Invalid, Limits};
use super::member::{Member, MemberId, Waiter};
use super::node::Ticket;
use super::share::Share;
use super::stats::Counters;
use super::tree::{Admission, Decision};
use crate::request::Direction;
use crate::time::{Duration, Instant};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

/// Disks under shared limits.
///
/// `T` stands for a waiting request: whatever the caller needs to set it going.
///
/// # Protocol
///
/// 1. [`join`](Group::join) once a disk, [`request`](Group::request) once for every read, write, write-zeroes and
///    discard. Flushes move no data and are not asked about.
/// 2. After a request was queued, after [`set_limits`](Group::set_limits), and when a timer has fired: call
///    [`poll`](Group::poll) until it no longer says [`Decision::Admit`]; then, if it says [`Decision::Wait`], have
///    one timer for the whole group fire at that instant. A timer that fires late costs nothing that a bucket cannot
///    hold (a tenth of a second's worth, where no burst is configured); one that fires for nothing does no harm.
/// 3. [`leave`](Group::leave) gives back what still waits; the caller decides what becomes of it.
///
/// Instants come from one clock, and may arrive slightly out of order; an earlier one counts as the latest so far.
///
/// # Order
///
/// First come, first served within a member and a direction. Between members with work waiting, turns: one request
/// each. Between directions, each passes as its own limits allow; where a total limit makes both wait, they
/// alternate. A request that finds nothing before it and room in its buckets passes at once. What counts as before it:
/// anything of its direction that waits, and anything of the other direction that could pass now out of a total limit
/// (its timer is late, or a poll is due).
#[derive(Debug)]
pub struct Group<T> {
    limits: Limits,
    buckets: Buckets,
    members: Vec<Member<T>>,
    vacant: Vec<usize>,
    /// By direction: the slots whose turn it is, next first. Every slot with work waiting is in it, exactly once.
    rings: [VecDeque<usize>; 2],
    /// By direction: requests waiting in all members together.
    waiting: [usize; 2],
    /// Which direction is asked first, so that neither always wins what both may have.
    first: Direction,
    next_number: u64,
    counters: Counters,
}

impl<T> Group<T> {
    /// A group without members, its buckets empty. Refuses limits that are not [valid](Limits::validate).
    pub fn new(limits: Limits, now: Instant) -> Result<Self, Invalid> {
        limits.validate()?;
        Ok(Self {
            limits,
            buckets: Buckets::new(&limits, now),
            members: Vec::new(),
            vacant: Vec::new(),
            rings: [VecDeque::new(), VecDeque::new()],
            waiting: [0; 2],
            first: Direction::Read,
            next_number: 0,
            counters: Counters::default(),
        })
    }

    /// The limits in force.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Puts other limits in force, at once and for the requests that wait too: poll afterwards.
    ///
    /// Buckets begin empty again, as QEMU's do, so whoever changes limits all the time grants a burst each time.
    /// Limits that are not valid are refused and leave the old in force, levels included.
    pub fn set_limits(&mut self, limits: Limits, now: Instant) -> Result<(), Invalid> {
        limits.validate()?;
        self.limits = limits;
        self.buckets = Buckets::new(&limits, now.max(self.buckets.now()));
        Ok(())
    }

    /// Adds a member. Costs nothing until it has work waiting.
    pub fn join(&mut self, share: Share) -> MemberId {
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.members.push(Member::vacant());
            self.members.len() - 1
        });
        let member = &mut self.members[slot];
        member.generation += 1;
        member.present = true;
        member.share = share;
        member.counters = Counters::default();
        MemberId { slot, generation: member.generation }
    }

    /// Removes a member and gives back its waiting requests, uncharged, in the order in which they came.
    ///
    /// Empty if it has left already.
    pub fn leave(&mut self, id: MemberId) -> Vec<T> {
        let Some(member) = self.member(id) else { return Vec::new() };
        member.present = false;
        let mut waiters = Vec::new();
        for direction in Direction::ALL {
            let queue = core::mem::take(self.members[id.slot].queue(direction));
            self.waiting[direction.index()] -= queue.len();
            waiters.extend(queue);
        }
        waiters.sort_unstable_by_key(|waiter| waiter.number);
        self.vacant.push(id.slot);
        waiters.into_iter().map(|waiter| waiter.token).collect()
    }

    /// Whether a request may pass at once; it is charged if so. If not, [`Group::request`] queues it.
    ///
    /// For callers to whom a token is not free: most requests never wait.
    ///
    /// # Panics
    ///
    /// If the member has left: a disk asks only while it is a member.
    pub fn pass(&mut self, member: MemberId, direction: Direction, cost: &Cost, now: Instant) -> bool {
        assert!(self.member(member).is_some(), "a request of a member that has left its group");
        self.buckets.leak_to(now);
        let passes = self.has_nothing_before_it(direction) && self.buckets.wait(direction).is_zero();
        if passes {
            self.charge(member.slot, direction, cost, None);
        }
        passes
    }

    /// Asks for a request to pass. If it must wait, `token` comes out later.
    ///
    /// # Panics
    ///
    /// If the member has left: a disk asks only while it is a member.
    pub fn request(
        &mut self,
        member: MemberId,
        direction: Direction,
        cost: Cost,
        token: T,
        now: Instant,
    ) -> Admission<T> {
        if self.pass(member, direction, &cost, now) {
            return Admission::Admitted(token);
        }
        Admission::Queued(self.enqueue(member, direction, cost, token))
    }

    /// Takes back a request that waits. `None` if it has been admitted, cancelled or given back already.
    pub fn cancel(&mut self, ticket: Ticket) -> Option<T> {
        let waiter = self.member(ticket.node)?.take(ticket.direction, ticket.number)?;
        self.waiting[ticket.direction.index()] -= 1;
        Some(waiter.token)
    }

    /// The next thing to do. O(1), however many members there are.
    ///
    /// With anything waiting it is never [`Decision::Idle`].
    pub fn poll(&mut self, now: Instant) -> Decision<T> {
        self.buckets.leak_to(now);
        let mut soonest: Option<Duration> = None;
        for direction in [self.first, opposite(self.first)] {
            if self.waiting[direction.index()] == 0 {
                continue;
            }
            let wait = self.buckets.wait(direction);
            if wait.is_zero() {
                return Decision::Admit(self.admit_next(direction));
            }
            soonest = Some(soonest.map_or(wait, |other| other.min(wait)));
        }
        match soonest {
            Some(wait) => Decision::Wait { until: self.buckets.now() + wait },
            None => Decision::Idle,
        }
    }

    /// How many requests wait, of this direction and of all members.
    pub const fn waiting(&self, direction: Direction) -> usize {
        self.waiting[direction.index()]
    }

    /// What has passed, of all members, also those that have left.
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// What has passed of one member; `None` if it has left.
    pub fn member_counters(&self, id: MemberId) -> Option<Counters> {
        self.members.get(id.slot).filter(|member| member.is(id)).map(|member| member.counters)
    }

    /// The share that a member joined with; `None` if it has left.
    pub fn share(&self, id: MemberId) -> Option<Share> {
        self.members.get(id.slot).filter(|member| member.is(id)).map(|member| member.share)
    }

    fn member(&mut self, id: MemberId) -> Option<&mut Member<T>> {
        self.members.get_mut(id.slot).filter(|member| member.is(id))
    }

    /// Whether nothing waits that has a right to go before a new request of this direction.
    fn has_nothing_before_it(&self, direction: Direction) -> bool {
        let other = opposite(direction);
        let other_is_due = || self.buckets.directions_share() && self.buckets.wait(other).is_zero();
        self.waiting(direction) == 0 && (self.waiting(other) == 0 || !other_is_due())
    }

    fn enqueue(&mut self, id: MemberId, direction: Direction, cost: Cost, token: T) -> Ticket {
        let number = self.next_number;
        self.next_number += 1;
        let member = &mut self.members[id.slot];
        member.queue(direction).push_back(Waiter { number, since: self.buckets.now(), cost, token });
        self.waiting[direction.index()] += 1;
        let in_ring = &mut member.in_ring[direction.index()];
        if !*in_ring {
            *in_ring = true;
            self.rings[direction.index()].push_back(id.slot);
        }
        Ticket { node: id, direction, number }
    }

    /// Admits the first request of the member whose turn it is. Something of this direction must be waiting.
    ///
    /// The picking rule is here and nowhere else: round robin.
    fn admit_next(&mut self, direction: Direction) -> T {
        let ring = &mut self.rings[direction.index()];
        loop {
            let slot = ring.pop_front().expect("what waits is in the ring");
            let member = &mut self.members[slot];
            let queue = member.queue(direction);
            let next = queue.pop_front();
            let more = !queue.is_empty();
            member.in_ring[direction.index()] = more;
            if more {
                ring.push_back(slot);
            }
            // Nothing, if all that waited was cancelled: that member's turn is void, paid for by its joining the ring.
            let Some(waiter) = next else { continue };
            self.waiting[direction.index()] -= 1;
            self.first = opposite(direction);
            let waited_ns = self.buckets.now().nanos_since(waiter.since);
            self.charge(slot, direction, &waiter.cost, Some(waited_ns));
            return waiter.token;
        }
    }

    fn charge(&mut self, slot: usize, direction: Direction, cost: &Cost, waited_ns: Option<u64>) {
        self.buckets.charge(direction, cost);
        self.members[slot].counters.count(cost, waited_ns);
        self.counters.count(cost, waited_ns);
    }
}

const fn opposite(direction: Direction) -> Direction {
    match direction {
        Direction::Read => Direction::Write,
        Direction::Write => Direction::Read,
    }
}
