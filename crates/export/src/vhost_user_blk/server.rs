//! A running export: its front ends, in sequence, and the queues of the connected one.
//!
//! ```text
//!   front end ─► connection ─► Effect::Start ─► a queue on one of the workers
//!                    ▲                              │
//!                    └── stopped, with its base ◄───┘
//! ```
//!
//! The connection lives on the thread that calls [`Server::serve`]; each queue stays on one worker.
//! A front end has left when its last queue has ended.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    fmt::Display,
    future::pending,
    io,
    rc::Rc,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

use async_channel::{Receiver, Sender};
use event_listener::Event;

use super::{
    connection::{Arrived, Connection, Ended, Inbox, Rested},
    device::{Device, Export},
    features::virtio,
    front_ends::{FrontEnds, SILENCE},
    handover::held,
    happening::{Happening, Process, Told},
    inflight::Loss,
    queue::{Order, Queue, bell},
    session::{Effect, Refusal, Session},
    vain::Vain,
    vring::RingSettings,
};
use crate::{
    afterwards,
    race::{First, first},
};
use block::disk::Disk;
use policy::time::{Duration, Instant};
use reactor::{Notifier, Party, Worker, op::Fd, seldom::Seldom};

/// Threads that run queues.
#[derive(Clone)]
pub enum Threads {
    /// Each queue on the next of these.
    Workers(Rc<Vec<Worker>>),
    /// All on the serving thread: for tests and simulation.
    Here,
}

/// Counters of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Rings that are being served.
    pub queues: usize,
    /// Requests taken from rings.
    pub requests: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Kicks received from guests.
    pub kicks: u64,
    /// Calls sent to guests.
    pub calls: u64,
    /// Bounce copies of data that could not move directly between a guest's memory and the disk:
    /// see [`reactor::buffer::guest_copies`].
    pub copies: u64,
    /// Process of the connected front end.
    pub front_end: Option<Process>,
}

/// One export of a disk to virtual machines.
#[derive(Debug)]
pub struct Server {
    device: Arc<Device>,
    /// Task group of all rings: an export has one share of each worker, however many rings it has.
    party: Party,
    connected: AtomicUsize,
    /// Process of the connected front end.
    process: Mutex<Option<Process>>,
    served: AtomicBool,
    /// The connected front end has sent nothing yet.
    silent: AtomicBool,
    queues: AtomicUsize,
    stopping: AtomicBool,
    /// State of the connected front end, once it is quiesced.
    rested: Mutex<Option<Rested>>,
    /// A front end transferred from another process, until it is served.
    arrived: Mutex<Option<Arrived>>,
    /// Notified when the server stops, quiesces or resumes, when a front end connects, disconnects
    /// or is quiesced, and when the disk was resized.
    changed: Event,
    arrivals: Seldom,
    departures: Seldom,
    refusals: Seldom,
    silences: Seldom,
    vain: Vain,
    resizes: AtomicU64,
}

impl Server {
    /// Creates a server; it accepts front ends from [`Server::serve`] on.
    pub fn new(export: Export) -> Arc<Self> {
        Self::of(Device::new(export))
    }

    /// Creates a server that reports events to `told`.
    pub fn told_to(told: Arc<dyn Told>, export: Export) -> Arc<Self> {
        Self::of(Device::new(export).told_to(told))
    }

    fn of(device: Device) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::new(device),
            party: Party::new(),
            connected: AtomicUsize::new(0),
            process: Mutex::default(),
            served: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            queues: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            rested: Mutex::default(),
            arrived: Mutex::default(),
            changed: Event::new(),
            arrivals: Seldom::default(),
            departures: Seldom::default(),
            refusals: Seldom::default(),
            silences: Seldom::default(),
            vain: Vain::default(),
            resizes: AtomicU64::new(0),
        })
    }

    /// Serves front ends until [`Server::close`].
    ///
    /// # Errors
    /// As [`FrontEnds::serve`].
    pub async fn serve(self: Arc<Self>, mut front_ends: FrontEnds, threads: Threads) -> io::Result<()> {
        if let Some(arrived) = &*self.arrived() {
            front_ends.begin_with(arrived.socket.clone());
        }
        front_ends.belong_to(&self.device);
        while !self.stopping.load(SeqCst) {
            let is_silent = || self.silent.load(SeqCst);
            let serving = front_ends.serve(is_silent, |socket| self.attend(socket, threads.clone()));
            if let First::One(result) = first(serving, self.until_nobody_is_let_in()).await {
                return result;
            }
            self.wait_while(|server| server.device.is_resting() && !server.stopping.load(SeqCst)).await;
        }
        Ok(())
    }

    /// Stops accepting and quiesces the connected front end: its rings stop as if it had asked for
    /// that. False if that takes longer than `patience`.
    pub async fn come_to_rest(&self, patience: Duration) -> bool {
        self.device.rest(true);
        self.changed.notify(usize::MAX);
        let at_rest = self.wait_while(|server| server.connections() > 0 && server.rested().is_none());
        reactor::timeout(patience, at_rest).await.is_ok()
    }

    /// State of the quiesced front end for another process; returned once.
    pub fn take_rested(&self) -> Option<Rested> {
        self.rested().take()
    }

    /// Resumes after [`Server::come_to_rest`].
    pub fn go_on(&self) {
        self.device.rest(false);
        *self.rested() = None;
        self.changed.notify(usize::MAX);
    }

    /// Takes over a front end of another process; call it before [`Server::serve`].
    ///
    /// # Errors
    /// The state does not fit this export: see [`Session::heard`].
    pub fn take_over(&self, rested: Rested) -> Result<(), Refusal> {
        let Rested { socket, said, bytes, descriptors, used_ns } = rested;
        let (session, outputs) = Session::heard(self.device.offer(), said)?;
        let inbox = Inbox::of(bytes, descriptors)?;
        *self.arrived() = Some(Arrived { socket, session, outputs, inbox, used_ns });
        Ok(())
    }

    fn rested(&self) -> MutexGuard<'_, Option<Rested>> {
        self.rested.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrived(&self) -> MutexGuard<'_, Option<Arrived>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of connected front ends: 0 or 1.
    pub fn connections(&self) -> usize {
        self.connected.load(SeqCst)
    }

    /// True if a front end has ever been connected.
    pub fn has_served(&self) -> bool {
        self.served.load(SeqCst)
    }

    /// Current counters.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            queues: self.queues.load(Relaxed),
            requests: self.device.requests.load(Relaxed),
            in_flight: self.device.in_flight.load(Relaxed),
            kicks: self.device.kicks.load(Relaxed),
            calls: self.device.calls.load(Relaxed),
            copies: self.device.copies.load(Relaxed),
            front_end: self.process().clone(),
        }
    }

    /// Adds the counters of the old process.
    pub fn count_on(&self, requests: u64, kicks: u64, calls: u64, copies: u64) {
        let device = &self.device;
        for (count, more) in [
            (&device.requests, requests),
            (&device.kicks, kicks),
            (&device.calls, calls),
            (&device.copies, copies),
        ] {
            count.fetch_add(more, Relaxed);
        }
    }

    /// Reports the disk's size to the guest if it has changed.
    pub fn look_at_size(&self) {
        self.resizes.fetch_add(1, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Stops accepting and disconnects the front end: its requests in flight complete, those that
    /// wait for limits stay in the ring. Wait for the end with [`Server::wait_while`].
    pub fn close(&self) {
        // Stored before `changed`, whose listeners then read it.
        self.stopping.store(true, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Waits until `busy` is false; `busy` is evaluated now and after every change.
    pub async fn wait_while(&self, busy: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed.listen();
            if !busy(self) {
                return;
            }
            changed.await;
        }
    }

    async fn until_nobody_is_let_in(&self) {
        let is_open = |server: &Self| !server.stopping.load(SeqCst) && !server.device.is_resting();
        self.wait_while(|server| is_open(server) || server.connections() > 0).await;
    }

    /// Serves one front end until it has left.
    async fn attend(self: &Arc<Self>, socket: Fd, threads: Threads) {
        let id = &self.device.export.id;
        self.connected.fetch_add(1, SeqCst);
        let _presence = Presence(self);
        self.served.store(true, SeqCst);
        self.changed.notify(usize::MAX);
        let process = Process::of(&socket);
        self.process().clone_from(&process);
        let pid = process.as_ref().map(|process| process.pid);
        // Before the offer reads the size: a later resize is then noticed in `run`.
        let resizes = self.resizes.load(SeqCst);
        let arrived = self.arrived().take();
        self.silent.store(arrived.is_none(), SeqCst);
        // The old process has already reported a transferred front end.
        let used_ns = arrived.as_ref().and_then(|arrived| arrived.used_ns);
        let before = |ns| Instant::from_nanos(reactor::now().as_nanos().saturating_sub(ns));
        let began = used_ns.map(before);
        let connection = if let Some(arrived) = arrived {
            let connection = Connection::taken_over(Arc::clone(id), arrived);
            // The old process has flushed everything; writes cached in this process begin now.
            if let Some(loss) = connection.loss() {
                loss.flushed(loss.noted(), || false);
            }
            connection
        } else {
            let now = reactor::recently();
            if !self.vain.is_known(pid, now)
                && let Some(left_out) = self.arrivals.line(now)
            {
                tracing::info!(export = %id, process = pid, left_out, "a front end has connected");
            }
            Connection::new(Arc::clone(id), socket, Session::new(self.device.offer()))
        };
        let mut attendance = Attendance {
            server: self,
            connection,
            process,
            began,
            threads,
            turn: 0,
            queues: HashMap::new(),
            stopped: async_channel::unbounded(),
            resizes,
            told: false,
        };
        let ended = match first(attendance.run(), self.tell_silence(pid)).await {
            First::One(ended) => ended,
            First::Other(never) => match never {},
        };
        // Queues first: only after they have ended are their writes complete and can be flushed.
        attendance.end().await;
        attendance.leave_nothing_to_lose().await;
        attendance.tell_end(&ended);
        self.device.remember_write_cache(attendance.connection.write_cache());
        drop(attendance);
        self.device.begin_anew();
    }
}

impl Server {
    /// Logs once that a front end has sent nothing for long. A virtual machine sends when it gets
    /// the disk, which may be later; a client of another protocol never does.
    async fn tell_silence(&self, pid: Option<u32>) -> Infallible {
        reactor::sleep_until(reactor::now() + SILENCE).await;
        if self.silent.load(SeqCst)
            && let Some(left_out) = self.silences.line(reactor::recently())
        {
            tracing::info!(
                export = %self.device.export.id, process = pid, left_out,
                "whoever has connected has said nothing for {} s: is it an NBD client? This socket is for vhost-user-blk, and --nbd has one for NBD (a virtual machine that gets the disk later speaks then)",
                SILENCE.as_secs()
            );
        }
        pending().await
    }
}

/// A connected front end; dropped when it has left.
struct Presence<'s>(&'s Server);

impl Drop for Presence<'_> {
    fn drop(&mut self) {
        let Self(server) = self;
        *server.rested() = None;
        *server.process() = None;
        server.connected.fetch_sub(1, SeqCst);
        server.changed.notify(usize::MAX);
    }
}

/// Time for a flush after a front end or a ring has ended. If it takes longer, writes may be lost.
const TO_FLUSH: Duration = Duration::from_secs(5);
/// Number of orders that a queue has not processed. Each may hold a descriptor; beyond it the front
/// end waits.
const MOST_ORDERS: usize = 16;

type Report = (u16, u32);

struct Attendance<'s> {
    server: &'s Arc<Server>,
    connection: Connection,
    process: Option<Process>,
    /// Time at which it began to use the disk.
    began: Option<Instant>,
    threads: Threads,
    /// Index of the next worker.
    turn: usize,
    queues: HashMap<u16, Sender<Order>>,
    stopped: (Sender<Report>, Receiver<Report>),
    resizes: u64,
    /// The state was published, quiesced.
    told: bool,
}

enum News {
    Effect(Effect),
    Stopped(Report),
    Changed,
}

impl Attendance<'_> {
    /// Runs until the front end disconnects or is disconnected.
    async fn run(&mut self) -> Ended {
        loop {
            let changed = self.server.changed.listen();
            if self.server.stopping.load(SeqCst) {
                return Ended::Left;
            }
            self.rest_or_wake();
            let resizes = self.server.resizes.load(SeqCst);
            if resizes != self.resizes {
                self.resizes = resizes;
                self.connection.resize(self.server.device.disk().size_bytes());
            }
            match self.news(changed).await {
                Ok(News::Effect(effect)) => {
                    if let Err(ended) = self.carry_out_unless_left(effect).await {
                        return ended;
                    }
                }
                Ok(News::Stopped((ring, base))) => self.ring_stopped(ring, base),
                Ok(News::Changed) => {}
                Err(ended) => return ended,
            }
        }
    }

    /// Quiesces or resumes the connection as the server requires. If no file descriptor is left for
    /// the state, the front end stays in this process.
    fn rest_or_wake(&mut self) {
        let wanted = self.server.device.is_resting();
        match (wanted, self.connection.is_resting()) {
            (true, false) => self.connection.rest(),
            (false, true) => self.connection.wake(),
            _ => {}
        }
        if wanted && self.connection.is_at_rest() && !self.told {
            match self.connection.told(self.began.map(|began| reactor::now().nanos_since(began))) {
                Ok(rested) => {
                    (*self.server.rested(), self.told) = (Some(rested), true);
                    self.server.changed.notify(usize::MAX);
                }
                Err(error) => {
                    let export = &self.server.device.export.id;
                    tracing::warn!(%export, %error, "a front end cannot be passed on");
                }
            }
        }
        self.told &= wanted;
    }

    async fn news(&mut self, changed: event_listener::EventListener) -> Result<News, Ended> {
        let reports = self.stopped.1.clone();
        let report = async {
            match reports.recv().await {
                Ok(report) => News::Stopped(report),
                Err(_) => pending().await,
            }
        };
        let ours = first(report, async {
            changed.await;
            News::Changed
        });
        match first(ours, self.connection.step()).await {
            First::One(First::One(news) | First::Other(news)) => Ok(news),
            First::Other(effect) => {
                self.server.silent.store(false, SeqCst);
                Ok(effect?.map_or(News::Changed, News::Effect))
            }
        }
    }

    /// Executes an effect. A busy queue processes its orders later; if the front end disconnects
    /// meanwhile, the wait ends, because all queues end then.
    async fn carry_out_unless_left(&mut self, effect: Effect) -> Result<(), Ended> {
        let hung_up = self.connection.hung_up();
        match first(self.carry_out(effect), hung_up).await {
            First::One(()) => Ok(()),
            First::Other(_) => Err(Ended::Left),
        }
    }

    async fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Start { ring, settings } => self.start(ring, *settings),
            Effect::Stop { ring } => self.order(ring, Order::Stop { abandoned: false }).await,
            Effect::Fault { ring, why, error } => {
                cannot_serve(&self.server.device, ring, &why, error);
            }
            Effect::Memory { memory, rings } => {
                let (in_use, all_in_use) = async_channel::bounded(1);
                for (ring, places) in rings {
                    self.order(ring, Order::Memory(memory.clone(), places, in_use.clone())).await;
                }
                drop(in_use);
                // The reply that may follow confirms that every write is logged from now on.
                let _ = all_in_use.recv().await;
            }
            Effect::Event { ring, kind, event } => {
                let bell = bell(&self.server.device, ring, event);
                self.order(ring, Order::Event(kind, bell)).await;
            }
            Effect::WriteCache(on) => {
                self.server.device.set_write_cache(on, self.connection.write_cache());
            }
        }
    }

    async fn order(&self, ring: u16, order: Order) {
        if let Some(queue) = self.queues.get(&ring) {
            // Fails if the queue has just ended; its report follows.
            let _ = queue.send(order).await;
        }
    }

    fn start(&mut self, ring: u16, settings: RingSettings) {
        self.begin();
        let (orders, received) = async_channel::bounded(MOST_ORDERS);
        self.queues.insert(ring, orders);
        let (server, reports) = (Arc::clone(self.server), self.stopped.0.clone());
        server.queues.fetch_add(1, Relaxed);
        let serve = move || serve_ring(server, ring, settings, received, reports);
        match &self.threads {
            Threads::Workers(workers) => {
                workers[self.turn % workers.len()].spawn_as(self.server.party, serve);
                self.turn += 1;
            }
            Threads::Here => reactor::spawn(serve()),
        }
    }

    /// Reports the use of the disk when the first ring starts; a front end that only connects does
    /// not use it.
    fn begin(&mut self) {
        if self.began.is_none() {
            self.began = Some(reactor::now());
            self.server.vain.forget();
            self.server.device.tell(&Happening::Came { process: self.process.as_ref() }, 0);
        }
    }

    fn tell_end(&self, ended: &Ended) {
        let Server { device, departures, refusals, vain, .. } = &**self.server;
        let (now, process) = (reactor::recently(), self.process.as_ref());
        if let Some(began) = self.began {
            if let Some(left_out) = ended.fault().and_then(|_| refusals.line(now)) {
                device.tell(&Happening::Disconnected { process, why: ended }, left_out);
            }
            return device.tell(&Happening::Went { process, lasted: reactor::now() - began }, 0);
        }
        let (seldom, queues) = match ended.fault() {
            Some(_) => (refusals, None),
            // When the server stops, the number of queues explains nothing about the disconnect.
            None if self.server.stopping.load(SeqCst) => (departures, None),
            None => (departures, self.connection.queues_asked_for()),
        };
        let pid = process.map(|process| process.pid);
        let why = format!("{ended}, of {queues:?} queues");
        let told = seldom.line(now).and_then(|unseen| vain.went(pid, &why, unseen, now));
        let Some(left_out) = told else { return };
        let export = &device.export.id;
        match (ended.fault(), queues) {
            (Some(why), _) => device.tell(&Happening::Disconnected { process, why }, left_out),
            (None, Some(queues)) => tracing::warn!(
                %export, process = pid, queues, left_out,
                "the front end has left once it knew how many queues there are: a machine that has more is not served (give this export as many as the machine has; start a machine anew that does not connect again)"
            ),
            (None, None) => tracing::info!(%export, process = pid, left_out, "the front end has left"),
        }
    }

    fn ring_stopped(&mut self, ring: u16, base: u32) {
        self.queues.remove(&ring);
        self.connection.stopped(ring, base);
    }

    /// Ends the queues that still run. Their replies are not read, but the guest's memory may still
    /// be there, and another front end may connect with it.
    async fn end(&mut self) {
        // Dropping the senders stops the queues, however many orders are queued.
        let mut running: HashSet<u16> = self.queues.drain().map(|(ring, _)| ring).collect();
        while !running.is_empty() {
            let Ok((ring, _)) = self.stopped.1.recv().await else { return };
            running.remove(&ring);
        }
    }

    /// Flushes, so that a guest that connects to another process after an orderly end has lost
    /// nothing. Skipped for a quiesced front end: it continues there, or here.
    async fn leave_nothing_to_lose(&self) {
        if let Some(loss) = self.connection.loss().filter(|_| !self.connection.is_at_rest()) {
            leave_nothing_to_lose(self.server.device.disk(), loss).await;
        }
    }
}

/// Flushes writes that would be lost with this process.
async fn leave_nothing_to_lose(disk: &Disk, loss: &Loss) {
    let noted = loss.noted();
    // Flushes the image, because a disk that is stopped by an error would hold the flush back.
    let is_kept =
        !disk.would_lose() || matches!(reactor::timeout(TO_FLUSH, disk.image().flush()).await, Ok(Ok(())));
    if is_kept {
        loss.flushed(noted, || disk.would_lose());
    }
}

async fn serve_ring(
    server: Arc<Server>,
    ring: u16,
    mut settings: RingSettings,
    orders: Receiver<Order>,
    reports: Sender<Report>,
) {
    let (base, error, loss) = (settings.base, settings.error.clone(), settings.loss.clone());
    let late = orders.clone();
    let disk = server.device.disk();
    // A disk in migration may still be locked by the source host; see `handover.rs`.
    let base = match held(disk, &mut settings, &orders).await {
        Ok(Some(rewired)) => {
            if disk.is_handed_over() {
                // The source host may have resized the image.
                server.look_at_size();
            }
            let knows = |feature| settings.features & feature != 0;
            let needed = server.device.export.offer.segments() + 2;
            // Linux waits forever for space for a request that is longer than the whole ring.
            let is_short =
                knows(virtio::SEG_MAX) && !knows(virtio::INDIRECT_DESC) && u32::from(settings.size) < needed;
            let size = settings.size;
            let base = match Queue::new(ring, settings, Arc::clone(&server.device)) {
                Ok(queue) => {
                    if is_short {
                        server.device.tell_short_ring(size);
                    }
                    server.device.ring_begins(ring);
                    rewired.into_iter().for_each(|(kind, bell)| queue.set_bell(kind, bell));
                    queue.serve(orders).await
                }
                Err(why) => {
                    cannot_serve(&server.device, ring, &why, error);
                    base
                }
            };
            // A stopped machine may continue at another process, for example one that QEMU has
            // stopped and whose disk is migrated meanwhile. A quiesced ring is not stopped, and for
            // a front end that has disconnected `Attendance::leave_nothing_to_lose` flushes.
            if let Some(loss) = loss.filter(|_| !server.device.is_resting() && !late.is_closed()) {
                leave_nothing_to_lose(disk, &loss).await;
            }
            disk.let_go().await;
            base
        }
        Ok(None) => base,
        Err(why) => {
            cannot_serve(&server.device, ring, &why, error);
            base
        }
    };
    // Late orders are dropped, because the sender may wait for their channel to close.
    late.close();
    while late.try_recv().is_ok() {}
    afterwards::give_memory_back();
    server.queues.fetch_sub(1, Relaxed);
    let _ = reports.try_send((ring, base));
}

/// Reports a ring that was not started, to the observer and by the ring's error event.
fn cannot_serve(device: &Device, ring: u16, why: &dyn Display, error: Option<Fd>) {
    device.ring_broke(ring, why);
    if let Some(error) = bell(device, ring, error) {
        error.ring(&Notifier::default());
    }
}

#[cfg(test)]
mod tests;
