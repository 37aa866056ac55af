//! A queue: one ring of a front end, on one worker, from its start to its stop.
//!
//! ```text
//!   kick ─► eventfd ─► wakeup ─┐                   one task per I/O
//!   orders ──────────► wakeup ─┤ turn: take ─► parse ─► merge ─► disk ─┐
//!   completions ─────► wakeup ─┘       announce ◄── used ring ◄────────┘
//!                                      one call for many completions
//! ```
//!
//! While requests arrive, kicks are disabled. When none are left and none is in flight, the queue
//! polls for a while before it enables kicks and sleeps: see [`BusyPolling`].
//!
//! A queue that is stopped takes no further request. Requests that wait for limits, or for a disk
//! that an error has stopped, go back into the ring; started ones complete; then the queue reports
//! the index at which the ring continues.

use std::{
    cell::{Cell, RefCell},
    convert::Infallible,
    future::{Future, pending},
    rc::Rc,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use event_listener::Event;
use policy::merge::{MergeCandidate, MergeOperation};
use smallvec::SmallVec;

use super::{
    backoff::IdleBackoff,
    busy_polling::BusyPolling,
    device::{CopyCountingIo, VhostUserDevice},
    features::virtio,
    inflight::UnflushedWrites,
    session::EventKind,
    vring::{RingAreas, RingSettings},
    vring_event::VringEvent,
};
use crate::batch::{MergeBatch, Mergeable};
use ::virtio::{
    block::{self as requests, BlkOperation, BlkRequest, Data},
    ring::{
        ChainMemory, ChainTicket, DescriptorChain, InflightQueueArea, MAX_DESCRIPTORS, RingError, RingLayout,
        Virtqueue,
    },
};
use block::disk::CancelToken;
use reactor::{
    EventfdNotifier, Signal, TaskSpawner,
    guest::{GuestBytes, GuestMemory},
    memory::FairQueueFlow,
    operation::Fd,
    select::{FirstReady, first},
};
use storage::RangeLocks;

/// Maximum number of requests taken in one turn, so that completions are not delayed for long.
const MAX_REQUESTS_PER_TURN: usize = 256;
/// Maximum number of descriptors read in one turn: two of the longest chains.
const MAX_DESCRIPTORS_PER_TURN: usize = 2 * MAX_DESCRIPTORS;
/// Number of descriptors above which a turn counts as long: they occupy the thread like dozens of
/// small requests. Otherwise a guest with chains of maximum length could use a turn of tasks for
/// milliseconds and delay the completions of its neighbours.
const MANY_DESCRIPTORS: usize = 512;

/// Number of chains whose headers are prefetched from another processor's cache while the next are
/// taken.
const FETCHED: usize = 16;
/// Kicks of an always empty ring after which the guest's memory is in doubt. One may be the front
/// end's own (QEMU kicks a ring that it starts); the second is the driver's.
const MAX_FRUITLESS_KICKS: u64 = 2;
/// Number of completions after which the driver is called during a turn.
const MAX_UNANNOUNCED: usize = 16;

/// Order of the export to a queue.
#[derive(Debug)]
pub(super) enum QueueOrder {
    /// Take no further request. `abandoned`: the front end has disconnected.
    Stop {
        abandoned: bool,
    },
    /// Replace the memory. The channel closes when the new memory is in use or the queue has ended.
    Memory(GuestMemory, RingAreas, async_channel::Sender<Infallible>),
    Event(EventKind, Option<VringEvent>),
}

/// A request that was taken from the ring.
pub(super) struct VringRequest {
    pub(super) ticket: ChainTicket,
    pub(super) request: BlkRequest,
    /// Sequence number of the request in the queue.
    number: u64,
    /// True if the request cannot go back into the ring: it waits for admission even while the
    /// queue stops.
    pub(super) must_complete: bool,
}

impl VringRequest {
    /// Buffers of the request's data.
    ///
    /// # Panics
    /// If it has none.
    pub(super) fn buffers(&self) -> &Data {
        match &self.request.kind {
            BlkOperation::Read { into: buffers, .. }
            | BlkOperation::Write { from: buffers, .. }
            | BlkOperation::Id(buffers) => buffers,
            _ => unreachable!("it has no data"),
        }
    }

    /// True if the buffers were moved to the disk, so that the request cannot be retried.
    pub(super) fn data_was_moved(&self) -> bool {
        matches!(&self.request.kind, BlkOperation::Read { into: places, .. } | BlkOperation::Write { from: places, .. } if places.is_empty())
    }
}

impl Mergeable for VringRequest {
    fn candidate(&self) -> MergeCandidate {
        let (operation, offset) = match self.request.kind {
            BlkOperation::Read { offset, .. } => (MergeOperation::Read, offset),
            BlkOperation::Write { offset, .. } => (MergeOperation::Write, offset),
            _ => (MergeOperation::Barrier, 0),
        };
        let length = if operation == MergeOperation::Barrier { 0 } else { self.request.bytes() };
        MergeCandidate { operation, offset, length, key: 0 }
    }
}

struct VringEvents {
    kick: Option<VringEvent>,
    call: Option<VringEvent>,
    error: Option<VringEvent>,
}

pub(super) struct VhostUserQueue {
    number: u16,
    pub(super) device: Arc<VhostUserDevice>,
    ring: RefCell<Virtqueue>,
    pub(super) loss: Option<Arc<UnflushedWrites>>,
    memory: RefCell<GuestMemory>,
    /// True if memory was replaced while requests in flight still use the old one: see
    /// [`VhostUserQueue::mark_dirty`].
    memory_changed: Cell<bool>,
    /// See [`VhostUserQueue::is_lost`].
    lost: Cell<bool>,
    events: RefCell<VringEvents>,
    notifier: EventfdNotifier,
    /// Notified when the kick event was replaced.
    kick_replaced: Event,
    /// Number of completions for which the driver was not called yet.
    unannounced: Cell<usize>,
    /// Requests that waited for limits when the queue was stopped.
    returned: RefCell<Vec<VringRequest>>,
    in_flight: Cell<usize>,
    taken: Cell<u64>,
    kicks: Cell<u64>,
    wakeup: Signal,
    stopping: Cell<bool>,
    abandoned: Cell<bool>,
    /// Wakes requests that wait for limits.
    pub(super) stop: Event,
    pub(super) cancel_token: Arc<CancelToken>,
    /// Share of the disk's memory while requests wait for it.
    pub(super) flow: FairQueueFlow,
    /// Held by the large request that is being executed.
    pub(super) large: RangeLocks,
}

impl VhostUserQueue {
    /// Creates a queue for a ring.
    ///
    /// # Errors
    /// Fails if the settings or the in-flight area contradict each other.
    pub(super) fn new(
        number: u16,
        settings: RingSettings,
        device: Arc<VhostUserDevice>,
    ) -> Result<Rc<Self>, RingError> {
        let RingSettings { size, areas: places, memory, features, base, inflight, loss, kick, call, error } =
            settings;
        let open_event = |event| vring_event(&device, number, event);
        let bells = VringEvents { kick: open_event(kick), call: open_event(call), error: open_event(error) };
        let has_feature = |feature| features & feature != 0;
        let layout = RingLayout {
            size,
            descriptors: places.descriptors,
            driver: places.driver,
            device: places.device,
            packed: has_feature(virtio::RING_PACKED),
            event_idx: has_feature(virtio::EVENT_IDX),
            indirect: has_feature(virtio::INDIRECT_DESC),
        };
        let ring = match inflight {
            None => Virtqueue::new(layout, memory.clone(), base)?,
            Some(area) => {
                Virtqueue::with_inflight(layout, memory.clone(), base, InflightQueueArea::new(area))?
            }
        };
        Ok(Rc::new(Self {
            number,
            device,
            ring: RefCell::new(ring),
            loss,
            memory: RefCell::new(memory),
            memory_changed: Cell::new(false),
            lost: Cell::new(false),
            events: RefCell::new(bells),
            notifier: EventfdNotifier::default(),
            kick_replaced: Event::new(),
            unannounced: Cell::new(0),
            returned: RefCell::default(),
            in_flight: Cell::new(0),
            taken: Cell::new(0),
            kicks: Cell::new(0),
            wakeup: Signal::default(),
            stopping: Cell::new(false),
            abandoned: Cell::new(false),
            stop: Event::new(),
            cancel_token: Arc::default(),
            flow: FairQueueFlow::default(),
            large: RangeLocks::default(),
        }))
    }

    /// Replaces the events by simulated ones before the queue serves.
    #[cfg(test)]
    pub(super) fn set_simulated_events(&self, kick: Option<VringEvent>, call: VringEvent) {
        let mut events = self.events.borrow_mut();
        (events.kick, events.call) = (kick, Some(call));
    }

    /// Serves the ring until an order to stop or a violation by the driver; returns the index at
    /// which the ring continues.
    pub(super) async fn serve(self: Rc<Self>, orders: async_channel::Receiver<QueueOrder>) -> u32 {
        let kick_task = reactor::spawn_joinable(Rc::clone(&self).watch_kick());
        let order_task = reactor::spawn_joinable(Rc::clone(&self).execute_orders(orders));
        if let Err(why) = self.run().await {
            self.fail(&why);
        }
        self.drain().await;
        kick_task.cancel().await;
        order_task.cancel().await;
        let this = Rc::into_inner(self).expect("its tasks have ended");
        let ring = this.ring.into_inner();
        // A front end that has disconnected did not receive the base; the next one uses the
        // in-flight area.
        if this.abandoned.get() { ring.base() } else { ring.stop() }
    }

    async fn run(self: &Rc<Self>) -> Result<(), RingError> {
        let mut batch = MergeBatch::default();
        let mut spawner = TaskSpawner::new();
        let mut polling = BusyPolling::default();
        // An earlier process may have died between a completion and its call.
        self.call();
        while !self.stopping.get() {
            self.ring.borrow_mut().suppress_kicks();
            let taken = self.take_requests(&mut batch);
            // Requests in front of a violation are valid and are executed.
            self.start(&mut batch, &mut spawner, Self::execute);
            let announced = self.announce_completions();
            if taken? > 0 || announced {
                polling.record_progress();
            // With requests in flight, a completion wakes this task, and a driver that submits one
            // at a time submits nothing before: the ring is polled only after the last completion.
            // `enable_kicks` looks once more: a request added in between may come without a kick.
            } else if (self.in_flight.get() > 0 || !polling.should_poll(reactor::now()))
                && !self.ring.borrow_mut().enable_kicks()
            {
                if self.taken.get() == 0 && self.kicks.get() >= MAX_FRUITLESS_KICKS {
                    self.device.warn_of_unshared_memory(self.number);
                }
                let began = reactor::now();
                self.wakeup.wait().await;
                polling.record_sleep(reactor::now() - began);
                continue;
            }
            // Yields after each turn, so that a busy ring cannot starve the worker's other tasks.
            reactor::yield_now().await;
        }
        Ok(())
    }

    /// Takes requests from the ring; returns their number.
    fn take_requests(&self, batch: &mut MergeBatch<VringRequest>) -> Result<usize, RingError> {
        let mut ring = self.ring.borrow_mut();
        if ring.is_truncated() || self.is_lost() {
            return Err(RingError::MemoryTruncated);
        }
        let limits = self.device.limits();
        let (mut taken, mut descriptors) = (0, 0);
        let mut chains: SmallVec<[DescriptorChain; FETCHED]> = SmallVec::new();
        let mut outcome = Ok(());
        let mut is_done = false;
        while !is_done {
            while chains.len() < FETCHED && !is_done {
                match ring.take() {
                    Ok(Some(chain)) => {
                        chain.prefetch();
                        taken += 1;
                        descriptors += chain.descriptors;
                        is_done = taken == MAX_REQUESTS_PER_TURN || descriptors >= MAX_DESCRIPTORS_PER_TURN;
                        chains.push(chain);
                    }
                    Ok(None) => is_done = true,
                    Err(error) => (outcome, is_done) = (Err(error), true),
                }
            }
            // Parsed after the whole batch was taken, when the prefetched headers have arrived.
            for chain in chains.drain(..) {
                self.parse(chain, &limits, &mut ring, batch);
            }
        }
        drop(ring);
        if descriptors > MANY_DESCRIPTORS {
            // Makes the worker look at completions before it runs the next task.
            reactor::reap_after_task();
        }
        if taken > 0 {
            self.in_flight.set(self.in_flight.get() + taken);
            self.device.in_flight.fetch_add(taken as u64, Relaxed);
            self.device.requests.fetch_add(taken as u64, Relaxed);
        }
        outcome.map(|()| taken)
    }

    fn parse(
        &self,
        chain: DescriptorChain,
        limits: &requests::BlkDeviceConfig,
        ring: &mut Virtqueue,
        batch: &mut MergeBatch<VringRequest>,
    ) {
        let fault = chain.fault;
        let (ticket, request) = requests::parse(chain, limits);
        if let Some(fault) = fault {
            tracing::debug!(export = %self.device.export.id, queue = self.number, %fault, "a malformed request");
        }
        let number = self.taken.get();
        self.taken.set(number + 1);
        match request {
            Some(request) => batch.push(VringRequest { ticket, request, number, must_complete: false }),
            None => {
                ring.complete(ticket, 0);
                self.unannounced.set(self.unannounced.get() + 1);
            }
        }
    }

    fn start<F>(
        self: &Rc<Self>,
        batch: &mut MergeBatch<VringRequest>,
        spawner: &mut TaskSpawner<CopyCountingIo<F>>,
        execute_one: impl Fn(Rc<Self>, VringRequest) -> F,
    ) where
        F: Future<Output = ()> + 'static,
    {
        if batch.is_empty() {
            return;
        }
        if let Some(disk) = self.device.disk().instant() {
            return self.execute_immediately(&disk, batch, |incoming| {
                spawner.spawn(self.counted(execute_one(Rc::clone(self), incoming)));
            });
        }
        batch.start(
            spawner,
            |only| self.counted(execute_one(Rc::clone(self), only)),
            |parts| self.counted(Rc::clone(self).read_merged(parts)),
            |parts| self.counted(Rc::clone(self).write_merged(parts)),
        );
    }

    fn counted<F>(&self, io: F) -> CopyCountingIo<F> {
        CopyCountingIo { io, device: Arc::clone(&self.device) }
    }

    /// Completes a request whose reply was written to the guest's memory, `written` bytes of it.
    /// The driver is called once for many completions, but not only at the end of a turn, so that a
    /// sleeping driver wakes up while this thread continues.
    pub(super) fn complete(&self, ticket: ChainTicket, written: u32) {
        self.ring.borrow_mut().complete(ticket, written);
        let count = self.unannounced.get() + 1;
        self.unannounced.set(count);
        if count == MAX_UNANNOUNCED {
            self.announce_completions();
        }
        self.wakeup.raise();
    }

    /// Returns a request that was not executed, or is to be retried, while the queue is stopping or
    /// about to stop because its memory is lost.
    pub(super) fn return_request(&self, incoming: VringRequest) {
        self.returned.borrow_mut().push(incoming);
        self.count_out(1);
        self.wakeup.raise();
    }

    /// Drops a request without a reply; the next front end finds it in the in-flight area.
    pub(super) fn drop_request(&self, _: ChainTicket) {
        self.count_out(1);
        self.wakeup.raise();
    }

    fn count_out(&self, count: usize) {
        self.in_flight.set(self.in_flight.get() - count);
        self.device.in_flight.fetch_sub(count as u64, Relaxed);
    }

    /// Counts out completions and calls the driver if it requested that; true if there were any.
    fn announce_completions(&self) -> bool {
        let count = self.unannounced.take();
        if count > 0 {
            self.count_out(count);
            self.call();
        }
        count > 0
    }

    fn call(&self) {
        // The driver suppresses calls while it polls the used ring.
        if !self.ring.borrow_mut().wants_call() {
            return;
        }
        self.call_always();
    }

    /// Wakes the queue when the driver kicks, or periodically if there is no kick.
    async fn watch_kick(self: Rc<Self>) {
        let mut idle = IdleBackoff::default();
        loop {
            let mut kick_replaced = self.kick_replaced.listen();
            let kick = self.events.borrow().kick.clone();
            let pause = idle.pause(self.taken.get(), kick.is_some());
            if !pause.is_zero() && reactor::timeout(pause, &mut kick_replaced).await.is_ok() {
                idle = IdleBackoff::default();
                continue;
            }
            let Some(kick) = kick else {
                self.wakeup.raise();
                continue;
            };
            match first(kick.wait(), kick_replaced).await {
                FirstReady::One(Ok(())) => {
                    self.device.kicks.fetch_add(1, Relaxed);
                    self.kicks.set(self.kicks.get() + 1);
                    self.wakeup.raise();
                }
                FirstReady::One(Err(why)) => {
                    self.device.warn_of_event(self.number, &why);
                    self.events.borrow_mut().kick = None;
                }
                FirstReady::Other(()) => idle = IdleBackoff::default(),
            }
        }
    }

    async fn execute_orders(self: Rc<Self>, orders: async_channel::Receiver<QueueOrder>) {
        loop {
            let quiesce_changed = self.device.listen_to_quiesce();
            if self.device.is_quiescing() {
                // The front end may have stopped the ring before the upgrade; then no order will
                // follow.
                self.stop.notify(usize::MAX);
            }
            let order = match first(orders.recv(), quiesce_changed).await {
                FirstReady::One(Ok(order)) => order,
                FirstReady::One(Err(_)) => break,
                FirstReady::Other(()) => continue,
            };
            match order {
                QueueOrder::Stop { abandoned } => self.stop(abandoned),
                QueueOrder::Memory(memory, areas, _in_use) => self.set_memory(memory, areas),
                QueueOrder::Event(kind, event) => self.set_event(kind, event),
            }
        }
        // The sender was dropped: the front end has disconnected.
        self.stop(true);
        pending::<()>().await;
    }

    pub(super) fn set_event(&self, kind: EventKind, event: Option<VringEvent>) {
        match kind {
            EventKind::Kick => {
                self.events.borrow_mut().kick = event;
                self.kick_replaced.notify(usize::MAX);
                // A signal on the old kick may not have been read.
                self.wakeup.raise();
            }
            EventKind::Call => {
                self.events.borrow_mut().call = event;
                // Completions since the last call may not have been signalled.
                self.call_always();
            }
            EventKind::Error => self.events.borrow_mut().error = event,
        }
    }

    fn call_always(&self) {
        if let Some(call) = &self.events.borrow().call {
            call.signal(&self.notifier);
            self.device.calls.fetch_add(1, Relaxed);
        }
    }

    fn stop(&self, abandoned: bool) {
        let had_stopped = self.stopping.replace(true);
        self.abandoned.set(self.abandoned.get() || abandoned);
        if abandoned || !had_stopped {
            self.cancel_token.cancel();
        }
        self.stop.notify(usize::MAX);
        self.wakeup.raise();
    }

    /// True if memory of the front end was truncated, now or earlier. Reads into it would go to
    /// memory of this process, so the queue ends.
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

    fn set_memory(&self, memory: GuestMemory, areas: RingAreas) {
        let RingAreas { descriptors, driver, device } = areas;
        let changed = self.ring.borrow_mut().set_memory(memory.clone(), descriptors, driver, device);
        match changed {
            Ok(()) => {
                *self.memory.borrow_mut() = memory;
                self.memory_changed.set(true);
            }
            Err(why) => self.fail(&why),
        }
    }

    /// Marks memory written by a request in the dirty log, which may be newer than the request.
    pub(super) fn mark_dirty(&self, address: u64, bytes: usize) {
        if !self.memory_changed.get() || self.memory.borrow().log().is_none() {
            return;
        }
        let mut ranges = ChainMemory::new();
        // The new memory may divide the range into other regions.
        self.memory.borrow().ranges(address, bytes, &mut ranges);
        ranges.iter().for_each(GuestBytes::mark_dirty);
    }

    fn fail(&self, why: &RingError) {
        self.device.report_ring_broken(self.number, why);
        if let Some(error) = &self.events.borrow().error {
            error.signal(&self.notifier);
        }
        self.stop(false);
    }

    /// Waits until no request is in flight. Requests that were not executed go back into the ring,
    /// the newest first; those that cannot are executed.
    async fn drain(self: &Rc<Self>) {
        loop {
            self.announce_completions();
            if self.in_flight.get() > 0 {
                self.wakeup.wait().await;
                continue;
            }
            let mut returned = self.returned.take();
            if returned.is_empty() {
                return;
            }
            if !self.abandoned.get() {
                // Requests that cannot go back have to wait for the disk.
                self.cancel_token.reset();
            }
            returned.sort_by_key(|incoming| incoming.number);
            while let Some(VringRequest { ticket, request, number, .. }) = returned.pop() {
                // Only the newest available entries can go back. A request behind which another was
                // completed cannot.
                let Err(ticket) = self.ring.borrow_mut().put_back(ticket) else { continue };
                if self.abandoned.get() {
                    // Stays in the in-flight area for the next front end.
                    continue;
                }
                self.in_flight.set(self.in_flight.get() + 1);
                self.device.in_flight.fetch_add(1, Relaxed);
                let retried = VringRequest { ticket, request, number, must_complete: true };
                reactor::spawn(self.counted(Rc::clone(self).execute(retried)));
            }
        }
    }
}

/// Wraps an eventfd. A ring with an invalid event is served as if the front end had passed none.
pub(super) fn vring_event(device: &VhostUserDevice, number: u16, event: Option<Fd>) -> Option<VringEvent> {
    let opened = VringEvent::new(event?);
    opened.inspect_err(|why| device.warn_of_event(number, why)).ok()
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
