//! An export at work: its front ends, one after the other, and the queues of the one that is
//! connected.
//!
//! ```text
//!   front end ─► connection ─► Effect::Start ─► a queue on one of the workers
//!                    ▲                              │
//!                    └── stopped, with its base ◄───┘
//! ```
//!
//! The connection lives on the thread that calls [`Server::serve`]; each queue lives on one worker
//! and never moves. A front end that goes is over when its last queue is.

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

/// Where queues run.
#[derive(Clone)]
pub enum Threads {
    /// Each on the next of these.
    Workers(Rc<Vec<Worker>>),
    /// All on the thread that serves: for tests and simulation.
    Here,
}

/// What an export's front ends did so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Rings that are served now.
    pub queues: usize,
    /// Requests that were taken.
    pub requests: u64,
    /// Of these, how many are being carried out.
    pub in_flight: u64,
    /// How often guests announced requests.
    pub kicks: u64,
    /// How often guests were told that requests had ended.
    pub calls: u64,
    /// How often data was copied because it could not go straight between a guest's memory and the
    /// disk: see [`reactor::buffer::guest_copies`].
    pub copies: u64,
    /// The process of the front end that is connected.
    pub front_end: Option<Process>,
}

/// One export of a disk to virtual machines.
#[derive(Debug)]
pub struct Server {
    device: Arc<Device>,
    /// Of all rings, however many there are.
    party: Party,
    connected: AtomicUsize,
    /// Of the one that is connected.
    process: Mutex<Option<Process>>,
    served: AtomicBool,
    /// The front end that is connected has yet to say anything.
    silent: AtomicBool,
    queues: AtomicUsize,
    stopping: AtomicBool,
    /// The front end that is connected, once it is at rest.
    rested: Mutex<Option<Rested>>,
    /// One that comes from another process, until it is served.
    arrived: Mutex<Option<Arrived>>,
    /// It stops or rests or goes on, a front end has come or gone or is at rest, or the disk has
    /// another length.
    changed: Event,
    arrivals: Seldom,
    departures: Seldom,
    refusals: Seldom,
    silences: Seldom,
    vain: Vain,
    resizes: AtomicU64,
}

impl Server {
    /// Nobody is let in before [`Server::serve`].
    pub fn new(export: Export) -> Arc<Self> {
        Self::of(Device::new(export))
    }

    /// The same, and what happens is told.
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

    /// Lets nobody in any more, and has the front end that is connected come to rest, for so long
    /// at most: its rings stop as if it had told them to. Whether it has.
    pub async fn come_to_rest(&self, patience: Duration) -> bool {
        self.device.rest(true);
        self.changed.notify(usize::MAX);
        let at_rest = self.wait_while(|server| server.connections() > 0 && server.rested().is_none());
        reactor::timeout(patience, at_rest).await.is_ok()
    }

    /// The front end that is at rest, for another process; it is taken once.
    pub fn take_rested(&self) -> Option<Rested> {
        self.rested().take()
    }

    /// Goes on as before [`Server::come_to_rest`].
    pub fn go_on(&self) {
        self.device.rest(false);
        *self.rested() = None;
        self.changed.notify(usize::MAX);
    }

    /// Takes a front end of another process, before [`Server::serve`], which goes on with it.
    ///
    /// # Errors
    /// It is not one of this export: see [`Session::heard`].
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

    /// Front ends that are connected: none or one.
    pub fn connections(&self) -> usize {
        self.connected.load(SeqCst)
    }

    /// Whether a front end has ever been connected.
    pub fn has_served(&self) -> bool {
        self.served.load(SeqCst)
    }

    /// What it did so far.
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

    /// Counts on from what another process has counted: requests, kicks, calls and copies.
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

    /// The disk may have another length: tells the guest.
    pub fn look_at_size(&self) {
        self.resizes.fetch_add(1, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Lets nobody in any more, and has the one that is connected go: its requests in flight are
    /// finished, those that wait for limits are left to it. [`Server::wait_while`] tells when it
    /// has gone.
    pub fn close(&self) {
        self.stopping.store(true, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Waits until `busy` is false: it is asked now, and whenever something has changed.
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

    /// Serves one front end to its end.
    async fn attend(self: &Arc<Self>, socket: Fd, threads: Threads) {
        let id = &self.device.export.id;
        self.connected.fetch_add(1, SeqCst);
        let _presence = Presence(self);
        self.served.store(true, SeqCst);
        self.changed.notify(usize::MAX);
        let process = Process::of(&socket);
        self.process().clone_from(&process);
        let pid = process.as_ref().map(|process| process.pid);
        // Before the size is looked at: what changes later is told.
        let resizes = self.resizes.load(SeqCst);
        let arrived = self.arrived().take();
        self.silent.store(arrived.is_none(), SeqCst);
        // Whoever has come from another process was told of there.
        let used_ns = arrived.as_ref().and_then(|arrived| arrived.used_ns);
        let before = |ns| Instant::from_nanos(reactor::now().as_nanos().saturating_sub(ns));
        let began = used_ns.map(before);
        let connection = if let Some(arrived) = arrived {
            let connection = Connection::taken_over(Arc::clone(id), arrived);
            // The process before has flushed all, and what is kept in memory begins here.
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
        attendance.end().await;
        attendance.leave_nothing_to_lose().await;
        attendance.tell_end(&ended);
        self.device.remember_write_cache(attendance.connection.write_cache());
        drop(attendance);
        self.device.begin_anew();
    }
}

impl Server {
    /// Says so once where a front end has said nothing for long: one of a machine speaks when the
    /// machine gets the disk, which may be later, and whoever takes this for another socket never.
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

/// A front end that is connected; dropped when it has gone, or nobody serves it any more.
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

/// For a flush once a front end or a ring of it has gone. Where it takes longer, something may be
/// lost.
const TO_FLUSH: Duration = Duration::from_secs(5);
/// Orders that a queue has not taken yet. Each may hold a descriptor; past it the front end waits.
const MOST_ORDERS: usize = 16;

type Report = (u16, u32);

struct Attendance<'s> {
    server: &'s Arc<Server>,
    connection: Connection,
    process: Option<Process>,
    /// When it has begun to use the disk, if it has.
    began: Option<Instant>,
    threads: Threads,
    /// Which worker is next.
    turn: usize,
    queues: HashMap<u16, Sender<Order>>,
    stopped: (Sender<Report>, Receiver<Report>),
    resizes: u64,
    /// The server has it, at rest.
    told: bool,
}

enum News {
    Effect(Effect),
    Stopped(Report),
    Changed,
}

impl Attendance<'_> {
    /// Until the front end goes, or must.
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

    /// As the server wants it now. Where no descriptor is left to tell another process of the front
    /// end, it stays.
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

    /// A queue that is busy takes its orders later. If the front end goes meanwhile, the rest of
    /// them does not matter any more: all queues end.
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
                // The reply that may follow promises that nothing is written beside a log any more.
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
            // A queue that has just ended has reported it.
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

    /// It uses the disk from its first ring on: whoever connects and says nothing does not.
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
            // Where all front ends have to go, it says nothing of this one.
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

    /// Ends the queues that still run. Nobody is there to take their answers, but the guest's
    /// memory may be, and another front end may come with it.
    async fn end(&mut self) {
        // Without whoever orders, a queue ends as if it was told to, however many orders wait.
        let mut running: HashSet<u16> = self.queues.drain().map(|(ring, _)| ring).collect();
        while !running.is_empty() {
            let Ok((ring, _)) = self.stopped.1.recv().await else { return };
            running.remove(&ring);
        }
    }

    /// Who comes back to another process, after this has ended in order, has lost nothing. One that
    /// rests is another process's, or will go on.
    async fn leave_nothing_to_lose(&self) {
        if let Some(loss) = self.connection.loss().filter(|_| !self.connection.is_at_rest()) {
            leave_nothing_to_lose(self.server.device.disk(), loss).await;
        }
    }
}

/// Writes what would be lost with this process.
async fn leave_nothing_to_lose(disk: &Disk, loss: &Loss) {
    let noted = loss.noted();
    // Of the image: a disk that an error has stopped would hold it back.
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
    let base = match held(disk, &mut settings, &orders).await {
        Ok(Some(rewired)) => {
            if disk.is_handed_over() {
                // Whoever had the image may have given it another size.
                server.look_at_size();
            }
            let knows = |feature| settings.features & feature != 0;
            let needed = server.device.export.offer.segments() + 2;
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
            // A machine that stops may go on at another process, as one that QEMU has stopped whose
            // disk is taken over or handed over meanwhile. At rest it is not stopped; and of one
            // that has gone the end of its front end sees to it.
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
    // Orders that came too late: somebody may wait for them to be gone.
    late.close();
    while late.try_recv().is_ok() {}
    afterwards::give_memory_back();
    server.queues.fetch_sub(1, Relaxed);
    let _ = reports.try_send((ring, base));
}

/// Says what is wrong with a ring that has not begun, to whoever is told and by its event.
fn cannot_serve(device: &Device, ring: u16, why: &dyn Display, error: Option<Fd>) {
    device.ring_broke(ring, why);
    if let Some(error) = bell(device, ring, error) {
        error.ring(&Notifier::default());
    }
}

#[cfg(test)]
mod tests;
