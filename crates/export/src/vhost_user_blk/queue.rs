//! A queue: one ring of a front end, on one worker, from its start to its stop.
//!
//! ```text
//!   kick ─► bell ─► news ─┐                        tasks, one an I/O
//!   orders ───────► news ─┤   turn: take ─► parse ─► merge ─► disk ─┐
//!   completions ──► news ─┘         announce ◄── into the ring ◄────┘
//!                                   one call for many
//! ```
//!
//! While there is something to do the driver is asked for no kicks. Where there is nothing, the
//! queue looks again for a while before it asks for one and sleeps: see [`Patrol`].
//!
//! A queue that is stopped takes nothing more. What waits for its limits, or because an error has
//! stopped the disk, goes back into the ring, what has begun ends, and then it says where the ring
//! goes on.

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    future::{Future, pending},
    rc::Rc,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use event_listener::Event;
use policy::merge::{Candidate, Operation};
use smallvec::SmallVec;

use super::{
    bell::Bell,
    device::{Counted, Device},
    features::virtio,
    idle::Idle,
    inflight::Loss,
    patrol::Patrol,
    session::EventKind,
    vring::{RingPlaces, RingSettings},
};
use crate::{
    intake::{Intake, Mergeable},
    race::{First, first},
};
use ::virtio::{
    block::{self as requests, Data, Kind, Request},
    ring::{Broken, Chain, Inflight, Layout, MAX_DESCRIPTORS, Places, Ring, Ticket},
};
use block::disk::Patience;
use reactor::{
    Launcher, Notifier, Signal,
    guest::{Memory, Place},
    memory::MemoryFlow,
    op::Fd,
};
use storage::RangeLocks;

/// Requests that are taken in one go, so that completions are not kept waiting for long.
const MOST_TAKEN: usize = 256;
/// Descriptors that are read in one go: two of the longest chains.
const MOST_DESCRIPTORS: usize = 2 * MAX_DESCRIPTORS;
/// More than so many keep the thread busy for as long as dozens of small requests do. A machine
/// that makes its chains as long as it can would otherwise take a turn of tasks for milliseconds,
/// and the completions of its neighbours wait.
const MANY_DESCRIPTORS: usize = 512;

/// Chains whose headers are on their way from another processor's cache while the next are taken.
const FETCHED: usize = 16;
/// Kicks of a ring in which nothing ever was, after which the guest's memory is in doubt: one may
/// be the front end's own (QEMU's, as it starts a ring), the second is a driver's.
const KICKS_FOR_NOTHING: u64 = 2;
/// Chains that are given back before the driver is called for them.
const MOST_UNANNOUNCED: usize = 16;

/// What its export tells a queue.
#[derive(Debug)]
pub(super) enum Order {
    /// Take nothing more. `abandoned`: nobody is there any more.
    Stop {
        abandoned: bool,
    },
    /// Other memory. The channel closes when it is in use, or the queue has ended.
    Memory(Memory, RingPlaces, async_channel::Sender<Infallible>),
    Event(EventKind, Option<Bell>),
}

/// A request that was taken from the ring.
pub(super) struct Incoming {
    pub(super) ticket: Ticket,
    pub(super) request: Request,
    /// Rises with every request of the queue.
    number: u64,
    /// It cannot go back, and waits for its limits whatever happens.
    pub(super) must_go: bool,
}

impl Incoming {
    /// Where its data is.
    ///
    /// # Panics
    /// If it has none.
    pub(super) fn places(&self) -> &Data {
        match &self.request.kind {
            Kind::Read { into: places, .. } | Kind::Write { from: places, .. } | Kind::Id(places) => places,
            _ => unreachable!("it has no data"),
        }
    }

    /// Whether its data was handed on, so that it cannot be tried again.
    pub(super) fn is_spent(&self) -> bool {
        matches!(&self.request.kind, Kind::Read { into: places, .. } | Kind::Write { from: places, .. } if places.is_empty())
    }
}

impl Mergeable for Incoming {
    fn candidate(&self) -> Candidate {
        let (operation, offset) = match self.request.kind {
            Kind::Read { offset, .. } => (Operation::Read, offset),
            Kind::Write { offset, .. } => (Operation::Write, offset),
            _ => (Operation::Barrier, 0),
        };
        let length = if operation == Operation::Barrier { 0 } else { self.request.bytes() };
        Candidate { operation, offset, length, key: 0 }
    }
}

struct Bells {
    kick: Option<Bell>,
    call: Option<Bell>,
    error: Option<Bell>,
}

pub(super) struct Queue {
    number: u16,
    pub(super) device: Arc<Device>,
    ring: RefCell<Ring>,
    pub(super) loss: Option<Arc<Loss>>,
    memory: RefCell<Memory>,
    /// The memory has changed since requests began that are in flight: see [`Queue::ended`].
    memory_changed: Cell<bool>,
    /// See [`Queue::is_lost`].
    lost: Cell<bool>,
    bells: RefCell<Bells>,
    notifier: Notifier,
    /// Another kick is to be heard.
    rewired: Event,
    /// Chains given back for which the driver was not called.
    unannounced: Cell<usize>,
    /// What waited for its limits when the queue was stopped.
    returned: RefCell<Vec<Incoming>>,
    in_flight: Cell<usize>,
    taken: Cell<u64>,
    kicks: Cell<u64>,
    news: Signal,
    stopping: Cell<bool>,
    abandoned: Cell<bool>,
    /// For those that wait for their limits.
    pub(super) stop: Event,
    pub(super) patience: Arc<Patience>,
    /// Its share of the disk's memory while requests wait for it.
    pub(super) flow: MemoryFlow,
    /// Held by the large request that is under way.
    pub(super) large: RangeLocks,
}

impl Queue {
    /// Takes up a ring.
    ///
    /// # Errors
    /// What cannot be about it.
    pub(super) fn new(number: u16, settings: RingSettings, device: Arc<Device>) -> Result<Rc<Self>, Broken> {
        let RingSettings { size, places, memory, features, base, inflight, loss, kick, call, error } =
            settings;
        let bell = |event| bell(&device, number, event);
        let bells = Bells { kick: bell(kick), call: bell(call), error: bell(error) };
        let has = |feature| features & feature != 0;
        let layout = Layout {
            size,
            descriptors: places.descriptors,
            driver: places.driver,
            device: places.device,
            packed: has(virtio::RING_PACKED),
            event_idx: has(virtio::EVENT_IDX),
            indirect: has(virtio::INDIRECT_DESC),
        };
        let ring = match inflight {
            None => Ring::new(layout, memory.clone(), base)?,
            Some(area) => Ring::with_inflight(layout, memory.clone(), base, Inflight::new(area))?,
        };
        Ok(Rc::new(Self {
            number,
            device,
            ring: RefCell::new(ring),
            loss,
            memory: RefCell::new(memory),
            memory_changed: Cell::new(false),
            lost: Cell::new(false),
            bells: RefCell::new(bells),
            notifier: Notifier::default(),
            rewired: Event::new(),
            unannounced: Cell::new(0),
            returned: RefCell::default(),
            in_flight: Cell::new(0),
            taken: Cell::new(0),
            kicks: Cell::new(0),
            news: Signal::default(),
            stopping: Cell::new(false),
            abandoned: Cell::new(false),
            stop: Event::new(),
            patience: Arc::default(),
            flow: MemoryFlow::default(),
            large: RangeLocks::default(),
        }))
    }

    /// Before it serves: events of a simulation.
    #[cfg(test)]
    pub(super) fn hang(&self, kick: Option<Bell>, call: Bell) {
        let mut bells = self.bells.borrow_mut();
        (bells.kick, bells.call) = (kick, Some(call));
    }

    /// Serves the ring until it is ordered to stop, or its driver makes it meaningless; where the
    /// ring goes on.
    pub(super) async fn serve(self: Rc<Self>, orders: async_channel::Receiver<Order>) -> u32 {
        let bell = reactor::spawn_joinable(Rc::clone(&self).hear());
        let obeying = reactor::spawn_joinable(Rc::clone(&self).obey(orders));
        if let Err(why) = self.run().await {
            self.break_off(&why);
        }
        self.wait_for_the_rest().await;
        bell.cancel().await;
        obeying.cancel().await;
        let this = Rc::into_inner(self).expect("its tasks have ended");
        let ring = this.ring.into_inner();
        // A front end that has gone does not know where the ring stopped: the in-flight area does.
        if this.abandoned.get() { ring.base() } else { ring.stop() }
    }

    async fn run(self: &Rc<Self>) -> Result<(), Broken> {
        let mut intake = Intake::default();
        let mut launcher = Launcher::new();
        let mut patrol = Patrol::default();
        // A device before us may have owed a call.
        self.call();
        while !self.stopping.get() {
            self.ring.borrow_mut().silence();
            let taken = self.take(&mut intake);
            // Also those that came before what breaks the ring.
            self.start(&mut intake, &mut launcher, Self::carry_out);
            let ended = self.announce();
            if taken? > 0 || ended {
                patrol.found();
            } else if !patrol.goes_on(reactor::now()) && !self.ring.borrow_mut().listen() {
                if self.taken.get() == 0 && self.kicks.get() >= KICKS_FOR_NOTHING {
                    self.device.doubt_memory(self.number);
                }
                let began = reactor::now();
                self.news.wait().await;
                patrol.slept(reactor::now() - began);
                continue;
            }
            // However much there is to do here, others have their turn.
            reactor::yield_now().await;
        }
        Ok(())
    }

    /// Takes what is in the ring; how many.
    fn take(&self, intake: &mut Intake<Incoming>) -> Result<usize, Broken> {
        let mut ring = self.ring.borrow_mut();
        if ring.is_lost() || self.is_lost() {
            return Err(Broken::Lost);
        }
        let limits = self.device.limits();
        let (mut taken, mut descriptors) = (0, 0);
        let mut chains: SmallVec<[Chain; FETCHED]> = SmallVec::new();
        let mut outcome = Ok(());
        let mut is_over = false;
        while !is_over {
            while chains.len() < FETCHED && !is_over {
                match ring.take() {
                    Ok(Some(chain)) => {
                        chain.prefetch();
                        taken += 1;
                        descriptors += chain.descriptors;
                        is_over = taken == MOST_TAKEN || descriptors >= MOST_DESCRIPTORS;
                        chains.push(chain);
                    }
                    Ok(None) => is_over = true,
                    Err(why) => (outcome, is_over) = (Err(why), true),
                }
            }
            for chain in chains.drain(..) {
                self.parse(chain, &limits, &mut ring, intake);
            }
        }
        drop(ring);
        if descriptors > MANY_DESCRIPTORS {
            reactor::was_long();
        }
        if taken > 0 {
            self.in_flight.set(self.in_flight.get() + taken);
            self.device.in_flight.fetch_add(taken as u64, Relaxed);
            self.device.requests.fetch_add(taken as u64, Relaxed);
        }
        outcome.map(|()| taken)
    }

    fn parse(&self, chain: Chain, limits: &requests::Device, ring: &mut Ring, intake: &mut Intake<Incoming>) {
        let fault = chain.fault;
        let (ticket, request) = requests::parse(chain, limits);
        if let Some(fault) = fault {
            tracing::debug!(export = %self.device.export.id, queue = self.number, %fault, "a malformed request");
        }
        let number = self.taken.get();
        self.taken.set(number + 1);
        match request {
            Some(request) => intake.push(Incoming { ticket, request, number, must_go: false }),
            None => {
                ring.complete(ticket, 0);
                self.unannounced.set(self.unannounced.get() + 1);
            }
        }
    }

    fn start<F>(
        self: &Rc<Self>,
        intake: &mut Intake<Incoming>,
        launcher: &mut Launcher<Counted<F>>,
        carry_out: impl Fn(Rc<Self>, Incoming) -> F,
    ) where
        F: Future<Output = ()> + 'static,
    {
        if intake.is_empty() {
            return;
        }
        if self.device.disk().is_instant() {
            return self.start_now(intake, |incoming| {
                launcher.launch(self.counted(carry_out(Rc::clone(self), incoming)));
            });
        }
        intake.start(
            launcher,
            |only| self.counted(carry_out(Rc::clone(self), only)),
            |parts| self.counted(Rc::clone(self).read_merged(parts)),
            |parts| self.counted(Rc::clone(self).write_merged(parts)),
        );
    }

    fn counted<F>(&self, io: F) -> Counted<F> {
        Counted { io, device: Arc::clone(&self.device) }
    }

    /// A request has been answered in the guest's memory, of which so many bytes were written: it
    /// goes back. A driver that is awake finds it; others are called for many at a time, and not
    /// only at the end of a turn, so that they wake up while we go on.
    pub(super) fn ended(&self, ticket: Ticket, written: u32) {
        self.ring.borrow_mut().complete(ticket, written);
        let count = self.unannounced.get() + 1;
        self.unannounced.set(count);
        if count == MOST_UNANNOUNCED {
            self.announce();
        }
        self.news.raise();
    }

    /// A request was not begun, or is to be tried again, and the queue is stopping, or is about to:
    /// its memory is lost.
    pub(super) fn give_back(&self, incoming: Incoming) {
        self.returned.borrow_mut().push(incoming);
        self.less(1);
        self.news.raise();
    }

    /// Nobody is there to answer, and the next front end finds it in the in-flight area.
    pub(super) fn forget(&self, _: Ticket) {
        self.less(1);
        self.news.raise();
    }

    fn less(&self, count: usize) {
        self.in_flight.set(self.in_flight.get() - count);
        self.device.in_flight.fetch_sub(count as u64, Relaxed);
    }

    /// Calls the driver if it wants that for what was given back. Whether there was something.
    fn announce(&self) -> bool {
        let count = self.unannounced.take();
        if count > 0 {
            self.less(count);
            self.call();
        }
        count > 0
    }

    fn call(&self) {
        if !self.ring.borrow_mut().wants_call() {
            return;
        }
        self.call_anyway();
    }

    /// Raises the news when the driver kicks, or now and then if it cannot.
    async fn hear(self: Rc<Self>) {
        let mut idle = Idle::default();
        loop {
            let mut rewired = self.rewired.listen();
            let kick = self.bells.borrow().kick.clone();
            let pause = idle.pause(self.taken.get(), kick.is_some());
            if !pause.is_zero() && reactor::timeout(pause, &mut rewired).await.is_ok() {
                idle = Idle::default();
                continue;
            }
            let Some(kick) = kick else {
                self.news.raise();
                continue;
            };
            match first(kick.heard(), rewired).await {
                First::One(Ok(())) => {
                    self.device.kicks.fetch_add(1, Relaxed);
                    self.kicks.set(self.kicks.get() + 1);
                    self.news.raise();
                }
                First::One(Err(why)) => {
                    self.device.warn_of_event(self.number, &why);
                    self.bells.borrow_mut().kick = None;
                }
                First::Other(()) => idle = Idle::default(),
            }
        }
    }

    async fn obey(self: Rc<Self>, orders: async_channel::Receiver<Order>) {
        loop {
            let rests = self.device.rests();
            if self.device.is_resting() {
                // It may have stopped before, and then nobody orders it to.
                self.stop.notify(usize::MAX);
            }
            let order = match first(orders.recv(), rests).await {
                First::One(Ok(order)) => order,
                First::One(Err(_)) => break,
                First::Other(()) => continue,
            };
            match order {
                Order::Stop { abandoned } => self.stop(abandoned),
                Order::Memory(memory, places, _in_use) => self.set_memory(memory, places),
                Order::Event(kind, bell) => self.set_bell(kind, bell),
            }
        }
        // Whoever ordered has gone.
        self.stop(true);
        pending::<()>().await;
    }

    pub(super) fn set_bell(&self, kind: EventKind, bell: Option<Bell>) {
        match kind {
            EventKind::Kick => {
                self.bells.borrow_mut().kick = bell;
                self.rewired.notify(usize::MAX);
                // The last one may have been rung, and was not heard.
                self.news.raise();
            }
            EventKind::Call => {
                self.bells.borrow_mut().call = bell;
                // What was completed meanwhile called nobody.
                self.call_anyway();
            }
            EventKind::Error => self.bells.borrow_mut().error = bell,
        }
    }

    fn call_anyway(&self) {
        if let Some(call) = &self.bells.borrow().call {
            call.ring(&self.notifier);
            self.device.calls.fetch_add(1, Relaxed);
        }
    }

    fn stop(&self, abandoned: bool) {
        let had_stopped = self.stopping.replace(true);
        self.abandoned.set(self.abandoned.get() || abandoned);
        if abandoned || !had_stopped {
            self.patience.lose();
        }
        self.stop.notify(usize::MAX);
        self.news.raise();
    }

    /// Whether memory of the front end has gone, now or before. What is read into it would become
    /// memory of ours, so the queue ends.
    pub(super) fn is_lost(&self) -> bool {
        let is_lost = self.lost.get() || self.memory.borrow().is_lost();
        self.lost.set(is_lost);
        is_lost
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.get()
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.get()
    }

    fn set_memory(&self, memory: Memory, places: RingPlaces) {
        let RingPlaces { descriptors, driver, device } = places;
        let changed = self.ring.borrow_mut().set_memory(memory.clone(), descriptors, driver, device);
        match changed {
            Ok(()) => {
                *self.memory.borrow_mut() = memory;
                self.memory_changed.set(true);
            }
            Err(why) => self.break_off(&why),
        }
    }

    /// Marks what a request has written, for a log that may have come after it began.
    pub(super) fn mark(&self, address: u64, bytes: usize) {
        if !self.memory_changed.get() || self.memory.borrow().log().is_none() {
            return;
        }
        let mut places = Places::new();
        // It may lie in other regions now.
        self.memory.borrow().places(address, bytes, &mut places);
        places.iter().for_each(Place::mark_dirty);
    }

    fn break_off(&self, why: &Broken) {
        self.device.ring_broke(self.number, why);
        if let Some(error) = &self.bells.borrow().error {
            error.ring(&self.notifier);
        }
        self.stop(false);
    }

    /// Until nothing is in flight. What was not begun goes back, the newest first; what cannot go
    /// back is carried out.
    async fn wait_for_the_rest(self: &Rc<Self>) {
        loop {
            self.announce();
            if self.in_flight.get() > 0 {
                self.news.wait().await;
                continue;
            }
            let mut returned = self.returned.take();
            if returned.is_empty() {
                return;
            }
            if !self.abandoned.get() {
                // What cannot go back waits for the disk.
                self.patience.regain();
            }
            returned.sort_by_key(|incoming| incoming.number);
            while let Some(Incoming { ticket, request, number, .. }) = returned.pop() {
                let Err(ticket) = self.ring.borrow_mut().put_back(ticket) else { continue };
                if self.abandoned.get() {
                    // It stays in the in-flight area.
                    continue;
                }
                self.in_flight.set(self.in_flight.get() + 1);
                self.device.in_flight.fetch_add(1, Relaxed);
                let again = Incoming { ticket, request, number, must_go: true };
                reactor::spawn(self.counted(Rc::clone(self).carry_out(again)));
            }
        }
    }
}

/// The bell that an event is. Without it, a ring is served as if it had been given none.
pub(super) fn bell(device: &Device, number: u16, event: Option<Fd>) -> Option<Bell> {
    let bell = Bell::new(event?);
    bell.inspect_err(|why| device.warn_of_event(number, why)).ok()
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
