//! A disk's side of throttling: its own settings, its group, and the waits of its requests.
//!
//! Never reorders a disk's requests of one direction, and never drops one. Dropping a request's
//! task cancels the request.

use std::sync::Arc;

use policy::{
    request::Direction,
    throttle::{Brief, Cost, Counted, Enforcement, Filled, GivenBack, Held, Invalid, Refused, Stats},
    watermark::Watermark,
};

use super::{
    arbiter::Arbiter,
    group::Group,
    seat::{Asked, Destination, Seat},
    settings::DiskSettings,
    timer::arm,
};

/// A disk in a throttle tree. Leaves its group when dropped.
#[derive(Debug)]
pub struct Member {
    seat: Seat<Option<Arc<Group>>>,
}

impl Member {
    /// Adds the disk to `group`, or to a new tree.
    ///
    /// # Errors
    /// [`Refused`]: invalid limits, or a reservation that does not fit into the group.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(settings: DiskSettings, group: Option<&Arc<Group>>) -> Result<Self, Refused> {
        Ok(Self { seat: Seat::new(settings, destination(group), reactor::now())? })
    }

    /// Settings in force.
    pub fn settings(&self) -> DiskSettings {
        self.seat.lock().settings
    }

    /// Changes the settings, also for waiting requests, which are admitted at once if possible. All
    /// of them or none.
    ///
    /// Charges carry over to the new limits: a change grants no burst. (QEMU's begin with empty
    /// buckets.)
    ///
    /// # Errors
    /// [`Refused`]: invalid limits, or a reservation that does not fit into the group. Nothing is
    /// changed then.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn set(&self, settings: DiskSettings) -> Result<(), Refused> {
        let now = reactor::now();
        // Settings and tree change under the slot's lock, so a move cannot come in between.
        let mut place = self.seat.lock();
        place.arbiter.lock().configure(place.node, settings.limits, settings.share, now)?;
        place.settings = settings;
        let arbiter = Arc::clone(&place.arbiter);
        drop(place);
        arm(arbiter.release(now));
        Ok(())
    }

    /// Its group.
    pub fn group(&self) -> Option<Arc<Group>> {
        self.seat.lock().kept.clone()
    }

    /// Moves from its group to `group`, or to none. Waiting requests move along in order, and are
    /// admitted at once if possible.
    ///
    /// The disk's limits keep their charges, and those of `group` are charged with the most that it
    /// may have used under those of the old group: a move grants no burst. Its counters restart in
    /// the new tree, and [`Member::stats`] adds them up.
    ///
    /// # Errors
    /// [`Refused`] if its reservation does not fit into `group`; then it does not move.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn move_to(&self, group: Option<&Arc<Group>>) -> Result<(), Refused> {
        if !self.is_in(group) {
            let alarms = self.seat.move_to(destination(group), None, reactor::now())?;
            alarms.into_iter().for_each(arm);
        }
        Ok(())
    }

    /// Changes settings and moves to `group`, or out of any: both or neither, as [`Member::set`]
    /// and [`Member::move_to`] do.
    ///
    /// # Errors
    /// [`Refused`]: invalid limits, or a reservation that does not fit into `group`. Nothing is
    /// changed then.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn place(&self, settings: DiskSettings, group: Option<&Arc<Group>>) -> Result<(), Refused> {
        if self.is_in(group) {
            return self.set(settings);
        }
        let alarms = self.seat.move_to(destination(group), Some(settings), reactor::now())?;
        alarms.into_iter().for_each(arm);
        Ok(())
    }

    fn is_in(&self, group: Option<&Arc<Group>>) -> bool {
        match (&self.seat.lock().kept, group) {
            (Some(current), Some(group)) => Arc::ptr_eq(current, group),
            (None, None) => true,
            _ => false,
        }
    }

    /// Counters of admitted requests, waiting requests and their throttle causes, among the disk's
    /// own limits and all above.
    ///
    /// Requests that no limit applies to are not counted: they bypass the tree.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn stats(&self) -> Stats {
        self.seat.stats(reactor::now())
    }

    /// Its cumulative counters, for another process.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn counted(&self) -> Counted {
        self.seat.counted(reactor::now())
    }

    /// Adds the counters of another process.
    pub fn count_on(&self, counted: &Counted) {
        self.seat.count_on(counted);
    }

    /// The part of [`Member::stats`] that is cheap to compute.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn brief(&self) -> Brief {
        self.seat.brief(reactor::now())
    }

    /// Levels of the disk's buckets, for another process; `None` if it never had a limit.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn filled(&self) -> Option<Filled> {
        let place = self.seat.lock();
        place.arbiter.lock().tree().filled(place.node, reactor::now())
    }

    /// Takes over the bucket levels of another process.
    ///
    /// # Errors
    /// [`Invalid`] limits; nothing is changed.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn fill(&self, filled: &Filled) -> Result<(), Invalid> {
        let now = reactor::now();
        let place = self.seat.lock();
        place.arbiter.lock().tree().fill(place.node, filled, now)?;
        let arbiter = Arc::clone(&place.arbiter);
        drop(place);
        arm(arbiter.release(now));
        Ok(())
    }

    /// Watermark of the disk itself.
    pub fn watermark(&self) -> Watermark {
        self.settings().watermark
    }

    /// Current enforcement of the disk's limits.
    pub fn enforcement(&self) -> Enforcement {
        let place = self.seat.lock();
        place.arbiter.lock().tree().enforcement(place.node)
    }

    /// Sets the enforcement of the disk's limits, also for waiting requests. For the sampler of the
    /// device.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn enforce(&self, enforcement: Enforcement) {
        let now = reactor::now();
        let place = self.seat.lock();
        place.arbiter.lock().enforce(place.node, enforcement, now);
        let arbiter = Arc::clone(&place.arbiter);
        drop(place);
        arm(arbiter.release(now));
    }

    /// Lifts all limits of its tree for good: its own, those of its groups, and those of all others
    /// there. Waiting requests are admitted, and later ones bypass the tree. For shutdown, so that
    /// requests in flight complete.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn lift(&self) {
        let arbiter = Arc::clone(&self.seat.lock().arbiter);
        arm(arbiter.lift(reactor::now()));
    }

    /// Waits until a request of this direction and cost is admitted, and charges it. Dropping the
    /// future before cancels the request. Returns the throttle cause, if it waited.
    pub async fn admit(&self, direction: Direction, cost: Cost) -> Option<Held> {
        if self.seat.is_open() {
            return None;
        }
        // The clock of the reactor's turn: most requests are admitted at once and save reading it.
        if let Asked::Waits(passage, arbiter) = self.seat.ask(direction, cost, reactor::recently()) {
            arm(arbiter.release(reactor::now()));
            drop(arbiter);
            return passage.await;
        }
        None
    }

    /// Charges a request that must not wait and is admitted in any case: later requests wait for
    /// it.
    pub fn admit_anyway(&self, direction: Direction, cost: &Cost) {
        if !self.seat.is_open() {
            self.seat.charge(direction, cost, reactor::recently());
        }
    }

    /// Asks for admission of a batch of requests, in order and without waiting, and charges those
    /// that are admitted. `answer` is called for each under the locks: it must not call this
    /// member.
    pub fn admit_now(
        &self,
        requests: impl Iterator<Item = (Direction, Cost)>,
        mut answer: impl FnMut(&Cost, bool),
    ) {
        if self.seat.is_open() {
            return requests.for_each(|(_, cost)| answer(&cost, true));
        }
        self.seat.pass(requests, reactor::recently(), answer);
    }

    /// Asks for a read-ahead of this cost. If it is admitted, it is charged to spare capacity of
    /// its groups, which no request waits for. If not, it must be dropped: there is no later
    /// admission.
    ///
    /// `given_back` is the cost of requests served from the prefetch cache since the last call. It
    /// is recorded in either case, so begin a new sum. If nothing is limited it is ignored, and
    /// nothing was charged.
    ///
    /// Waits for short locks only; does not allocate, and wakes no task.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn spare(&self, cost: &Cost, given_back: GivenBack) -> bool {
        // The turn's clock is never ahead of another thread's. If it is behind, a read-ahead may be
        // rejected unnecessarily.
        self.seat.is_open() || self.seat.spare(cost, given_back, reactor::recently())
    }
}

fn destination(group: Option<&Arc<Group>>) -> Destination<Option<Arc<Group>>> {
    match group {
        Some(group) => Destination {
            arbiter: Arc::clone(&group.arbiter),
            parent: Some(group.node),
            kept: Some(Arc::clone(group)),
        },
        None => Destination { arbiter: Arbiter::new(reactor::now()), parent: None, kept: None },
    }
}
