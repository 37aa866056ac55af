//! A disk's side of throttling: its own settings, the group it is in, and the wait of each of its
//! requests.
//!
//! Never reorders a disk's requests of one direction, and never drops one. A request whose task is
//! dropped withdraws itself.

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

/// A disk among the others that share its limits. Leaves its group when dropped.
#[derive(Debug)]
pub struct Member {
    seat: Seat<Option<Arc<Group>>>,
}

impl Member {
    /// Takes a place in `group`, or one of its own.
    ///
    /// # Errors
    /// [`Refused`]: limits that break a rule, or a reservation that the group cannot keep.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(settings: DiskSettings, group: Option<&Arc<Group>>) -> Result<Self, Refused> {
        Ok(Self { seat: Seat::new(settings, destination(group), reactor::now())? })
    }

    /// The settings in force.
    pub fn settings(&self) -> DiskSettings {
        self.seat.lock().settings
    }

    /// Puts other settings in force, also for the requests that wait: those that may pass do so at
    /// once. All of them or none.
    ///
    /// Other limits take over what has been charged: changing them grants no burst. (QEMU's begin
    /// with empty buckets.)
    ///
    /// # Errors
    /// [`Refused`]: limits that break a rule, or a reservation that the group cannot keep.
    /// Everything stays as it was.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn set(&self, settings: DiskSettings) -> Result<(), Refused> {
        let now = reactor::now();
        let mut place = self.seat.lock();
        place.arbiter.lock().configure(place.node, settings.limits, settings.share, now)?;
        place.settings = settings;
        let arbiter = Arc::clone(&place.arbiter);
        drop(place);
        arm(arbiter.release(now));
        Ok(())
    }

    /// The group it is in.
    pub fn group(&self) -> Option<Arc<Group>> {
        self.seat.lock().kept.clone()
    }

    /// Leaves its group for `group`, or for none. The requests that wait move along, in their
    /// order: those that may pass there do so at once.
    ///
    /// Its own limits keep what has been charged, and those of `group` are charged what it can have
    /// passed under those of the group before: a move grants no burst. Its counters begin anew
    /// where it arrives, and [`Member::stats`] adds them up.
    ///
    /// # Errors
    /// [`Refused`] if `group` cannot keep its reservation; then it stays where it is.
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

    /// Puts settings in force and moves to `group`, or out of any: both or neither, as
    /// [`Member::set`] and [`Member::move_to`] do.
    ///
    /// # Errors
    /// [`Refused`]: limits that break a rule, or a reservation that `group` cannot keep. Everything
    /// stays as it was.
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

    /// What has passed, what waits and for what, by the disk's own limits and all above.
    ///
    /// Requests that no limit holds for are not counted: they do not ask.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn stats(&self) -> Stats {
        self.seat.stats(reactor::now())
    }

    /// What it counts, for another process.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn counted(&self) -> Counted {
        self.seat.counted(reactor::now())
    }

    /// Counts on from what another process has counted.
    pub fn count_on(&self, counted: &Counted) {
        self.seat.count_on(counted);
    }

    /// What of [`Member::stats`] costs next to nothing.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn brief(&self) -> Brief {
        self.seat.brief(reactor::now())
    }

    /// How full its own buckets are, for another process; `None` where it never had a limit.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn filled(&self) -> Option<Filled> {
        let place = self.seat.lock();
        place.arbiter.lock().tree().filled(place.node, reactor::now())
    }

    /// Has its own limits take over what has passed in another process.
    ///
    /// # Errors
    /// [`Invalid`] limits; nothing has changed.
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

    /// The watermark set for the disk itself.
    pub fn watermark(&self) -> Watermark {
        self.settings().watermark
    }

    /// How far its own limits are enforced.
    pub fn enforcement(&self) -> Enforcement {
        let place = self.seat.lock();
        place.arbiter.lock().tree().enforcement(place.node)
    }

    /// Enforces its own limits so much from now on, also for the requests that wait. For whoever
    /// watches the device.
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

    /// Lifts every limit in its tree for good: its own, those of its groups, and those of all
    /// others there. What waits passes now, what comes is not asked. For the end, when what is in
    /// flight is to be finished.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn lift(&self) {
        let arbiter = Arc::clone(&self.seat.lock().arbiter);
        arm(arbiter.lift(reactor::now()));
    }

    /// Waits until a request of this direction and cost may pass, and charges it. A dropped future
    /// takes it back, if it has not passed. Says which limit held it, if one did.
    pub async fn admit(&self, direction: Direction, cost: Cost) -> Option<Held> {
        if self.seat.is_open() {
            return None;
        }
        // By the turn's clock: whoever passes at once, which is most, is spared reading it.
        if let Asked::Waits(passage, arbiter) = self.seat.ask(direction, cost, reactor::recently()) {
            arm(arbiter.release(reactor::now()));
            drop(arbiter);
            return passage.await;
        }
        None
    }

    /// Charges a request that can wait no longer and passes in any case: those after it pay for it.
    pub fn admit_anyway(&self, direction: Direction, cost: &Cost) {
        if !self.seat.is_open() {
            self.seat.charge(direction, cost, reactor::recently());
        }
    }

    /// Asks for requests to pass without waiting, one after the other, and charges those that do;
    /// `answer` is called for each, in a decision: it must not ask for anything here.
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

    /// Whether a read of this cost may be made ahead of any request for it; if so it is charged to
    /// what the guests of its groups leave of their limits, which no request ever waits for. If
    /// not, it is to be left: nothing says when it may be made.
    ///
    /// `given_back` is what requests have had from memory of what was read ahead, since this was
    /// asked last: it is taken note of in either case, so begin a new sum. Where nothing is limited
    /// it need not be, and nothing was charged.
    ///
    /// Waits for nobody but whoever holds a lock for a decision; does not allocate, wakes nobody.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn spare(&self, cost: &Cost, given_back: GivenBack) -> bool {
        // The turn's clock is never ahead of another thread's; that it may be behind only says no a
        // little too often.
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
