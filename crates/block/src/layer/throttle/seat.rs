//! A disk's seat in a tree: where its requests ask, and how it moves to another tree while some of
//! them wait.
//!
//! ```text
//!   ask, cancel ──► the seat's lock ──► the arbiter's lock ──► the waiter's lock
//!   move ─────────► the seat's lock ──► both arbiters' locks, the older first ──► the waiters' locks
//! ```
//!
//! Locks are always taken from left to right, so there is no deadlock. A request that asks or gives
//! up holds the seat's lock until it holds the arbiter's, so a move is either before it or after
//! it. A waiting request is in exactly one tree's queue, or has been taken out by whoever is about
//! to admit it. The waiter knows which ([`Position`]), so that giving up after a move withdraws the
//! right request from the right tree.
//!
//! Knows nothing of reactors: the time is an argument, and timers are returned to the caller.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, PoisonError},
    task::{Context, Poll},
};

use policy::{
    request::Direction,
    throttle::{Admission, Brief, Cost, Counted, Counters, GivenBack, Held, NodeId, Refused, Stats},
    time::Instant,
};

use super::{
    arbiter::{Alarm, Arbiter, Gate},
    settings::DiskSettings,
    sync::{AtomicBool, Mutex, MutexGuard, Ordering},
    waiter::{Position, Waiter},
};

/// A disk's seat. `K` is what its owner keeps with the place and changes with it.
#[derive(Debug)]
pub(super) struct Seat<K> {
    place: Mutex<Place<K>>,
    gate: Gate,
}

/// Where a seat is.
#[derive(Debug)]
pub(super) struct Place<K> {
    pub(super) arbiter: Arc<Arbiter>,
    pub(super) node: NodeId,
    pub(super) settings: DiskSettings,
    pub(super) kept: K,
    /// What happened in the seats before this one.
    earlier: Earlier,
}

/// The part of [`Stats`] that adds up over seats.
#[derive(Debug, Default)]
struct Earlier {
    reads: Counters,
    writes: Counters,
    limited_ns: u64,
    max_wait_ns: u64,
}

/// Where a seat is to be: in which tree, below which group.
#[derive(Debug)]
pub(super) struct Destination<K> {
    pub(super) arbiter: Arc<Arbiter>,
    pub(super) parent: Option<NodeId>,
    pub(super) kept: K,
}

/// The answer to a request.
#[derive(Debug)]
pub(super) enum Asked<'a, K> {
    /// It passes, and has been charged.
    Passed,
    /// It waits, in that tree. [`Arbiter::release`] comes next.
    Waits(Passage<'a, K>, Arc<Arbiter>),
}

/// A request that waits to pass. Ready when it may; dropped before, it is taken back.
#[derive(Debug)]
pub(super) struct Passage<'a, K> {
    seat: &'a Seat<K>,
    waiter: Arc<Waiter>,
}

impl<K> Seat<K> {
    /// Takes a seat.
    pub(super) fn new(settings: DiskSettings, at: Destination<K>, now: Instant) -> Result<Self, Refused> {
        let gate = Gate::new(AtomicBool::new(false));
        let Destination { arbiter, parent, kept } = at;
        let DiskSettings { limits, share, .. } = settings;
        let node = arbiter.lock().add(None, parent, limits, share, Some(Arc::clone(&gate)), now)?;
        Ok(Self {
            place: Mutex::new(Place { arbiter, node, settings, kept, earlier: Earlier::default() }),
            gate,
        })
    }

    /// Takes the seat's lock. Before any arbiter's.
    pub(super) fn lock(&self) -> MutexGuard<'_, Place<K>> {
        // The place is replaced as a whole, after everything that could panic.
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nothing limits the disk now, so that its requests need not ask.
    pub(super) fn is_open(&self) -> bool {
        // Relaxed: a request that just misses new limits is one that came before them.
        self.gate.load(Ordering::Relaxed)
    }

    /// Asks for a request to pass.
    pub(super) fn ask(&self, direction: Direction, cost: Cost, now: Instant) -> Asked<'_, K> {
        let place = self.lock();
        let mut held = place.arbiter.lock();
        if held.tree().pass(place.node, direction, &cost, now) {
            return Asked::Passed;
        }
        let waiter = Arc::new(Waiter::default());
        match held.tree().request(place.node, direction, cost, Arc::clone(&waiter), now) {
            Admission::Admitted(_) => Asked::Passed,
            Admission::Queued(ticket) => {
                waiter.queued_at(Position { arbiter: held.id(), ticket });
                Asked::Waits(Passage { seat: self, waiter }, Arc::clone(&place.arbiter))
            }
        }
    }

    /// Asks for requests to pass at once, one after the other, and charges those that do. For the
    /// others nothing has happened. Under the locks.
    pub(super) fn pass(
        &self,
        requests: impl Iterator<Item = (Direction, Cost)>,
        now: Instant,
        mut answer: impl FnMut(&Cost, bool),
    ) {
        let place = self.lock();
        let mut held = place.arbiter.lock();
        for (direction, cost) in requests {
            answer(&cost, held.tree().pass(place.node, direction, &cost, now));
        }
    }

    /// Charges a request that passes in any case.
    pub(super) fn charge(&self, direction: Direction, cost: &Cost, now: Instant) {
        let place = self.lock();
        place.arbiter.lock().tree().charge_anyway(place.node, direction, cost, now);
    }

    /// Asks whether something may be read ahead, and charges it to what guests leave if so. See
    /// [`policy::throttle::Tree::spare`].
    pub(super) fn spare(&self, cost: &Cost, given_back: GivenBack, now: Instant) -> bool {
        let place = self.lock();
        place.arbiter.lock().tree().spare(place.node, cost, given_back, now)
    }

    /// What happened here and in the seats before: counters and the longest wait of all,
    /// percentiles of the waits since it came here.
    pub(super) fn stats(&self, now: Instant) -> Stats {
        let place = self.lock();
        let mut stats = place.arbiter.lock().tree().stats(place.node, now);
        let earlier = &place.earlier;
        stats.reads = stats.reads.plus(earlier.reads);
        stats.writes = stats.writes.plus(earlier.writes);
        stats.limited_ns = stats.limited_ns.saturating_add(earlier.limited_ns);
        stats.waits.max_ns = stats.waits.max_ns.max(earlier.max_wait_ns);
        stats
    }

    /// The same, for another process.
    pub(super) fn counted(&self, now: Instant) -> Counted {
        let place = self.lock();
        let mut counted = place.arbiter.lock().tree().counted(place.node, now);
        let Earlier { reads, writes, limited_ns, max_wait_ns } = place.earlier;
        for (passed, earlier) in counted.passed.iter_mut().zip([reads, writes]) {
            *passed = passed.plus(earlier);
        }
        counted.limited_ns = counted.limited_ns.saturating_add(limited_ns);
        counted.longest_wait_ns = counted.longest_wait_ns.max(max_wait_ns);
        counted
    }

    /// Counts on from what another process has counted.
    pub(super) fn count_on(&self, counted: &Counted) {
        let place = self.lock();
        place.arbiter.lock().tree().count_on(place.node, counted);
    }

    pub(super) fn brief(&self, now: Instant) -> Brief {
        let place = self.lock();
        let brief = place.arbiter.lock().tree().brief(place.node, now);
        Brief { limited_ns: brief.limited_ns.saturating_add(place.earlier.limited_ns), ..brief }
    }

    /// Takes a request back that nobody waits for any more. Nothing to do if it has been admitted,
    /// or is about to be told so.
    fn cancel(&self, waiter: &Waiter) {
        let place = self.lock();
        let mut held = place.arbiter.lock();
        let position = waiter.waits_at().filter(|position| position.arbiter == held.id());
        if let Some(Position { ticket, .. }) = position {
            drop(held.tree().cancel(ticket));
        }
    }

    /// Takes another seat, with other settings if there are any; the requests that wait here wait
    /// there, in their order, and those that may pass there do.
    pub(super) fn move_to(
        &self,
        to: Destination<K>,
        settings: Option<DiskSettings>,
        now: Instant,
    ) -> Result<[Option<Alarm>; 2], Refused> {
        let mut place = self.lock();
        let settings = settings.unwrap_or(place.settings);
        let from = Arc::clone(&place.arbiter);
        let mut admitted = Vec::new();
        {
            let (mut old, mut other) = Arbiter::lock_both(&from, &to.arbiter);
            let DiskSettings { limits, share, .. } = settings;
            let gate = Some(Arc::clone(&self.gate));
            // What was promised to it is not promised twice where both places have the same groups
            // above.
            let leaving = other.is_none().then_some(place.node);
            let new = other.as_mut().unwrap_or(&mut old);
            let node = new.add(leaving, to.parent, limits, share, gate, now)?;
            let past = old.tree().stats(place.node, now);
            let beside = leaving.map(|_| node);
            let charged = old.tree().charged(place.node, beside, now);
            let waiting = old.remove(place.node);
            let new = other.as_mut().unwrap_or(&mut old);
            new.tree().take_over(node, charged, now);
            for request in waiting {
                let waiter = Arc::clone(&request.token);
                match new.tree().request(node, request.direction, request.cost, request.token, now) {
                    Admission::Admitted(waiter) => admitted.push(waiter),
                    Admission::Queued(ticket) => waiter.queued_at(Position { arbiter: new.id(), ticket }),
                }
            }
            place.earlier.add(&past);
            place.node = node;
            place.settings = settings;
        }
        let kept = std::mem::replace(&mut place.kept, to.kept);
        place.arbiter = Arc::clone(&to.arbiter);
        drop(place);
        // The group that was left may go with this, and takes its arbiter's lock.
        drop(kept);
        for waiter in admitted {
            // It moved to where nothing holds it.
            waiter.admit(None);
        }
        // Those it left behind may have waited for it.
        Ok([from.release(now), to.arbiter.release(now)])
    }
}

impl Earlier {
    fn add(&mut self, past: &Stats) {
        self.reads = self.reads.plus(past.reads);
        self.writes = self.writes.plus(past.writes);
        self.limited_ns = self.limited_ns.saturating_add(past.limited_ns);
        self.max_wait_ns = self.max_wait_ns.max(past.waits.max_ns);
    }
}

impl<K> Future for Passage<'_, K> {
    /// What held it.
    type Output = Option<Held>;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Held>> {
        self.waiter.poll(context)
    }
}

impl<K> Drop for Passage<'_, K> {
    fn drop(&mut self) {
        if self.waiter.waits_at().is_some() {
            self.seat.cancel(&self.waiter);
        }
    }
}

impl<K> Drop for Seat<K> {
    fn drop(&mut self) {
        // Its requests hold the disk, which holds this: when it goes, nothing of it waits.
        let place = self.lock();
        let waiting = place.arbiter.lock().remove(place.node);
        debug_assert!(waiting.is_empty(), "a disk went while requests of it waited");
    }
}
