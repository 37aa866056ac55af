//! A running export: its front ends, in sequence, and the queues of the connected one.
//!
//! ```text
//!   front end ─► connection ─► Effect::Start ─► a queue on one of the workers
//!                    ▲                              │
//!                    └── stopped, with its base ◄───┘
//! ```
//!
//! The connection lives on the thread that calls [`VhostUserServer::serve`]; each queue stays on
//! one worker. A front end has left when its last queue has ended.

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
    connection::{FrontEndEnd, QuiescedFrontEnd, TransferredFrontEnd, VhostUserConnection, VhostUserInbox},
    device::{VhostUserDevice, VhostUserExport},
    events::{ExportObserver, FrontEndEvent, PeerProcess},
    features::virtio,
    front_ends::{FrontEnds, SILENCE_TIMEOUT},
    futile_attempts::FutileAttempts,
    inflight::UnflushedWrites,
    migration::wait_for_image,
    queue::{QueueOrder, VhostUserQueue, vring_event},
    session::{Effect, RequestRejection, VhostUserSession},
    vring::RingSettings,
};
use crate::trim;
use block::disk::Disk;
use policy::time::{Duration, Instant};
use reactor::{
    EventfdNotifier, ReactorWorker, TaskGroup,
    log_rate_limit::LogRateLimit,
    operation::Fd,
    select::{FirstReady, first},
};

/// Threads that run queues.
#[derive(Clone)]
pub enum Threads {
    /// Each queue on the next of these.
    Workers(Rc<Vec<ReactorWorker>>),
    /// All on the serving thread: for tests and simulation.
    Here,
}

/// Counters of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostUserStatistics {
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
    pub front_end: Option<PeerProcess>,
}

/// One export of a disk to virtual machines.
#[derive(Debug)]
pub struct VhostUserServer {
    device: Arc<VhostUserDevice>,
    /// Task group of all rings: an export has one share of each worker, however many rings it has.
    task_group: TaskGroup,
    connected: AtomicUsize,
    /// Process of the connected front end.
    process: Mutex<Option<PeerProcess>>,
    served: AtomicBool,
    /// True while the connected front end has sent nothing.
    silent: AtomicBool,
    queues: AtomicUsize,
    stopping: AtomicBool,
    /// State of the connected front end, once it is quiesced.
    quiesced_state: Mutex<Option<QuiescedFrontEnd>>,
    /// A front end transferred from another process, until it is served.
    transferred: Mutex<Option<TransferredFrontEnd>>,
    /// Notified when the server stops, quiesces or resumes, when a front end connects, disconnects
    /// or is quiesced, and when the disk was resized.
    changed: Event,
    arrivals: LogRateLimit,
    departures: LogRateLimit,
    refusals: LogRateLimit,
    silences: LogRateLimit,
    futile_attempts: FutileAttempts,
    resizes: AtomicU64,
}

impl VhostUserServer {
    /// Creates a server; it accepts front ends from [`VhostUserServer::serve`] on.
    pub fn new(export: VhostUserExport) -> Arc<Self> {
        Self::of(VhostUserDevice::new(export))
    }

    /// Creates a server that reports events to an observer.
    pub fn with_observer(observer: Arc<dyn ExportObserver>, export: VhostUserExport) -> Arc<Self> {
        Self::of(VhostUserDevice::new(export).with_observer(observer))
    }

    fn of(device: VhostUserDevice) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::new(device),
            task_group: TaskGroup::new(),
            connected: AtomicUsize::new(0),
            process: Mutex::default(),
            served: AtomicBool::new(false),
            silent: AtomicBool::new(false),
            queues: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            quiesced_state: Mutex::default(),
            transferred: Mutex::default(),
            changed: Event::new(),
            arrivals: LogRateLimit::default(),
            departures: LogRateLimit::default(),
            refusals: LogRateLimit::default(),
            silences: LogRateLimit::default(),
            futile_attempts: FutileAttempts::default(),
            resizes: AtomicU64::new(0),
        })
    }

    /// Serves front ends until [`VhostUserServer::close`].
    ///
    /// # Errors
    /// As [`FrontEnds::serve`].
    pub async fn serve(self: Arc<Self>, mut front_ends: FrontEnds, threads: Threads) -> io::Result<()> {
        if let Some(transferred) = &*self.transferred() {
            front_ends.set_first(transferred.socket.clone());
        }
        front_ends.set_device(&self.device);
        while !self.stopping.load(SeqCst) {
            let is_silent = || self.silent.load(SeqCst);
            let serving = front_ends.serve(is_silent, |socket| self.serve_front_end(socket, threads.clone()));
            if let FirstReady::One(result) = first(serving, self.wait_until_not_accepting()).await {
                return result;
            }
            self.wait_while(|server| server.device.is_quiescing() && !server.stopping.load(SeqCst)).await;
        }
        Ok(())
    }

    /// Stops accepting and quiesces the connected front end: its rings stop as if it had requested
    /// that. False after the timeout.
    pub async fn quiesce(&self, timeout: Duration) -> bool {
        self.device.set_quiescing(true);
        self.changed.notify(usize::MAX);
        let at_rest = self.wait_while(|server| server.connections() > 0 && server.quiesced().is_none());
        reactor::timeout(timeout, at_rest).await.is_ok()
    }

    /// State of the quiesced front end for another process; returned once.
    pub fn take_quiesced(&self) -> Option<QuiescedFrontEnd> {
        self.quiesced().take()
    }

    /// Resumes after [`VhostUserServer::quiesce`].
    pub fn resume(&self) {
        self.device.set_quiescing(false);
        *self.quiesced() = None;
        self.changed.notify(usize::MAX);
    }

    /// Takes over a front end of another process; call it before [`VhostUserServer::serve`].
    ///
    /// # Errors
    /// Fails if the state does not fit this export: see [`VhostUserSession::from_messages`].
    pub fn adopt(&self, quiesced: QuiescedFrontEnd) -> Result<(), RequestRejection> {
        let QuiescedFrontEnd { socket, messages: said, bytes, descriptors, used_ns } = quiesced;
        let (session, outputs) = VhostUserSession::from_messages(self.device.offer(), said)?;
        let inbox = VhostUserInbox::of(bytes, descriptors)?;
        *self.transferred() = Some(TransferredFrontEnd { socket, session, outputs, inbox, used_ns });
        Ok(())
    }

    fn quiesced(&self) -> MutexGuard<'_, Option<QuiescedFrontEnd>> {
        self.quiesced_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn transferred(&self) -> MutexGuard<'_, Option<TransferredFrontEnd>> {
        self.transferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn process(&self) -> MutexGuard<'_, Option<PeerProcess>> {
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
    pub fn statistics(&self) -> VhostUserStatistics {
        VhostUserStatistics {
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
    pub fn add_counts(&self, requests: u64, kicks: u64, calls: u64, copies: u64) {
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
    pub fn refresh_size(&self) {
        self.resizes.fetch_add(1, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Stops accepting and disconnects the front end: its requests in flight complete, those that
    /// wait for limits stay in the ring. Wait for the end with [`VhostUserServer::wait_while`].
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

    async fn wait_until_not_accepting(&self) {
        let is_open = |server: &Self| !server.stopping.load(SeqCst) && !server.device.is_quiescing();
        self.wait_while(|server| is_open(server) || server.connections() > 0).await;
    }

    /// Serves one front end until it has left.
    async fn serve_front_end(self: &Arc<Self>, socket: Fd, threads: Threads) {
        let id = &self.device.export.id;
        self.connected.fetch_add(1, SeqCst);
        let _presence = ConnectedGuard(self);
        self.served.store(true, SeqCst);
        self.changed.notify(usize::MAX);
        let process = PeerProcess::of_peer(&socket);
        self.process().clone_from(&process);
        let pid = process.as_ref().map(|process| process.pid);
        // Before the offer reads the size: a later resize is then noticed in `run`.
        let resizes = self.resizes.load(SeqCst);
        let transferred = self.transferred().take();
        self.silent.store(transferred.is_none(), SeqCst);
        // The old process has already reported a transferred front end.
        let used_ns = transferred.as_ref().and_then(|transferred| transferred.used_ns);
        let before = |ns| Instant::from_nanos(reactor::now().as_nanos().saturating_sub(ns));
        let began = used_ns.map(before);
        let connection = if let Some(transferred) = transferred {
            let connection = VhostUserConnection::from_transferred(Arc::clone(id), transferred);
            // The old process has flushed everything; writes cached in this process begin now.
            if let Some(loss) = connection.loss() {
                loss.flushed(loss.recorded_writes(), || false);
            }
            connection
        } else {
            let now = reactor::coarse_now();
            if !self.futile_attempts.was_logged_recently(pid, now)
                && let Some(suppressed) = self.arrivals.try_log(now)
            {
                tracing::info!(export = %id, process = pid, suppressed, "a front end has connected");
            }
            VhostUserConnection::new(Arc::clone(id), socket, VhostUserSession::new(self.device.offer()))
        };
        let mut front_end = ServedFrontEnd {
            server: self,
            connection,
            process,
            began,
            threads,
            next_worker: 0,
            queues: HashMap::new(),
            stopped: async_channel::unbounded(),
            resizes,
            is_published: false,
        };
        let end = match first(front_end.run(), self.log_silence(pid)).await {
            FirstReady::One(end) => end,
            FirstReady::Other(never) => match never {},
        };
        // Queues first: only after they have ended are their writes complete and can be flushed.
        front_end.end().await;
        front_end.leave_nothing_to_lose().await;
        front_end.report_end(&end);
        self.device.remember_write_cache(front_end.connection.write_cache());
        drop(front_end);
        self.device.reset_front_end();
    }
}

impl VhostUserServer {
    /// Logs once that a front end has sent nothing for long. A virtual machine sends when it gets
    /// the disk, which may be later; a client of another protocol never does.
    async fn log_silence(&self, pid: Option<u32>) -> Infallible {
        reactor::sleep_until(reactor::now() + SILENCE_TIMEOUT).await;
        if self.silent.load(SeqCst)
            && let Some(suppressed) = self.silences.try_log(reactor::coarse_now())
        {
            tracing::info!(
                export = %self.device.export.id, process = pid, suppressed,
                "the connected process has sent nothing for {} s: is it an NBD client? (this \
                 socket is for vhost-user-blk, --nbd is for NBD; a virtual machine that gets the \
                 disk later will send then)",
                SILENCE_TIMEOUT.as_secs()
            );
        }
        pending().await
    }
}

/// A connected front end; dropped when it has left.
struct ConnectedGuard<'s>(&'s VhostUserServer);

impl Drop for ConnectedGuard<'_> {
    fn drop(&mut self) {
        let Self(server) = self;
        *server.quiesced() = None;
        *server.process() = None;
        server.connected.fetch_sub(1, SeqCst);
        server.changed.notify(usize::MAX);
    }
}

/// Time for a flush after a front end or a ring has ended. If it takes longer, writes may be lost.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// Number of orders that a queue has not processed. Each may hold a descriptor; beyond it the front
/// end waits.
const MAX_QUEUED_ORDERS: usize = 16;

type Report = (u16, u32);

struct ServedFrontEnd<'s> {
    server: &'s Arc<VhostUserServer>,
    connection: VhostUserConnection,
    process: Option<PeerProcess>,
    /// Time at which it began to use the disk.
    began: Option<Instant>,
    threads: Threads,
    /// Index of the next worker.
    next_worker: usize,
    queues: HashMap<u16, Sender<QueueOrder>>,
    stopped: (Sender<Report>, Receiver<Report>),
    resizes: u64,
    /// True if the state of the quiesced front end was published.
    is_published: bool,
}

enum ServedFrontEndEvent {
    Effect(Effect),
    Stopped(Report),
    Changed,
}

impl ServedFrontEnd<'_> {
    /// Runs until the front end disconnects or is disconnected.
    async fn run(&mut self) -> FrontEndEnd {
        loop {
            let changed = self.server.changed.listen();
            if self.server.stopping.load(SeqCst) {
                return FrontEndEnd::Disconnected;
            }
            self.quiesce_or_resume();
            let resizes = self.server.resizes.load(SeqCst);
            if resizes != self.resizes {
                self.resizes = resizes;
                self.connection.resize(self.server.device.disk().size_bytes());
            }
            match self.next_event(changed).await {
                Ok(ServedFrontEndEvent::Effect(effect)) => {
                    if let Err(end) = self.execute_unless_disconnected(effect).await {
                        return end;
                    }
                }
                Ok(ServedFrontEndEvent::Stopped((ring, base))) => self.ring_stopped(ring, base),
                Ok(ServedFrontEndEvent::Changed) => {}
                Err(end) => return end,
            }
        }
    }

    /// Quiesces or resumes the connection as the server requires. If no file descriptor is left for
    /// the state, the front end stays in this process.
    fn quiesce_or_resume(&mut self) {
        let must_quiesce = self.server.device.is_quiescing();
        match (must_quiesce, self.connection.is_quiescing()) {
            (true, false) => self.connection.quiesce(),
            (false, true) => self.connection.resume(),
            _ => {}
        }
        if must_quiesce && self.connection.is_quiesced() && !self.is_published {
            match self.connection.transferred_state(self.began.map(|began| reactor::now().nanos_since(began)))
            {
                Ok(state) => {
                    (*self.server.quiesced(), self.is_published) = (Some(state), true);
                    self.server.changed.notify(usize::MAX);
                }
                Err(error) => {
                    let export = &self.server.device.export.id;
                    tracing::warn!(%export, %error, "cannot transfer a front end");
                }
            }
        }
        self.is_published &= must_quiesce;
    }

    async fn next_event(
        &mut self,
        changed: event_listener::EventListener,
    ) -> Result<ServedFrontEndEvent, FrontEndEnd> {
        let reports = self.stopped.1.clone();
        let report = async {
            match reports.recv().await {
                Ok(report) => ServedFrontEndEvent::Stopped(report),
                Err(_) => pending().await,
            }
        };
        let internal_event = first(report, async {
            changed.await;
            ServedFrontEndEvent::Changed
        });
        match first(internal_event, self.connection.step()).await {
            FirstReady::One(FirstReady::One(event) | FirstReady::Other(event)) => Ok(event),
            FirstReady::Other(effect) => {
                self.server.silent.store(false, SeqCst);
                Ok(effect?.map_or(ServedFrontEndEvent::Changed, ServedFrontEndEvent::Effect))
            }
        }
    }

    /// Executes an effect. A busy queue processes its orders later; if the front end disconnects
    /// meanwhile, the wait ends, because all queues end then.
    async fn execute_unless_disconnected(&mut self, effect: Effect) -> Result<(), FrontEndEnd> {
        let hung_up = self.connection.hung_up();
        match first(self.execute(effect), hung_up).await {
            FirstReady::One(()) => Ok(()),
            FirstReady::Other(_) => Err(FrontEndEnd::Disconnected),
        }
    }

    async fn execute(&mut self, effect: Effect) {
        match effect {
            Effect::Start { ring, settings } => self.start(ring, *settings),
            Effect::Stop { ring } => self.order(ring, QueueOrder::Stop { abandoned: false }).await,
            Effect::Fault { ring, why, error } => {
                report_unserved_ring(&self.server.device, ring, &why, error);
            }
            Effect::Memory { memory, rings } => {
                let (in_use, all_in_use) = async_channel::bounded(1);
                for (ring, areas) in rings {
                    self.order(ring, QueueOrder::Memory(memory.clone(), areas, in_use.clone())).await;
                }
                drop(in_use);
                // The reply that may follow confirms that every write is logged from now on.
                let _ = all_in_use.recv().await;
            }
            Effect::Event { ring, kind, event } => {
                let ring_event = vring_event(&self.server.device, ring, event);
                self.order(ring, QueueOrder::Event(kind, ring_event)).await;
            }
            Effect::WriteCache(on) => {
                self.server.device.set_write_cache(on, self.connection.write_cache());
            }
        }
    }

    async fn order(&self, ring: u16, order: QueueOrder) {
        if let Some(queue) = self.queues.get(&ring) {
            // Fails if the queue has just ended; its report follows.
            let _ = queue.send(order).await;
        }
    }

    fn start(&mut self, ring: u16, settings: RingSettings) {
        self.report_connected();
        let (orders, received) = async_channel::bounded(MAX_QUEUED_ORDERS);
        self.queues.insert(ring, orders);
        let (server, reports) = (Arc::clone(self.server), self.stopped.0.clone());
        server.queues.fetch_add(1, Relaxed);
        let serve = move || serve_ring(server, ring, settings, received, reports);
        match &self.threads {
            Threads::Workers(workers) => {
                workers[self.next_worker % workers.len()].spawn_in_group(self.server.task_group, serve);
                self.next_worker += 1;
            }
            Threads::Here => reactor::spawn(serve()),
        }
    }

    /// Reports the use of the disk when the first ring starts; a front end that only connects does
    /// not use it.
    fn report_connected(&mut self) {
        if self.began.is_none() {
            self.began = Some(reactor::now());
            self.server.futile_attempts.forget();
            self.server.device.report(&FrontEndEvent::Connected { process: self.process.as_ref() }, 0);
        }
    }

    fn report_end(&self, ended: &FrontEndEnd) {
        let VhostUserServer { device, departures, refusals, futile_attempts: vain, .. } = &**self.server;
        let (now, process) = (reactor::coarse_now(), self.process.as_ref());
        if let Some(began) = self.began {
            if let Some(suppressed) = ended.fault().and_then(|_| refusals.try_log(now)) {
                device.report(&FrontEndEvent::ProtocolError { process, why: ended }, suppressed);
            }
            return device
                .report(&FrontEndEvent::Disconnected { process, duration: reactor::now() - began }, 0);
        }
        let (log_limit, queues) = match ended.fault() {
            Some(_) => (refusals, None),
            // When the server stops, the number of queues explains nothing about the disconnect.
            None if self.server.stopping.load(SeqCst) => (departures, None),
            None => (departures, self.connection.requested_queues()),
        };
        let pid = process.map(|process| process.pid);
        let why = format!("{ended}, of {queues:?} queues");
        let logged = log_limit.try_log(now).and_then(|unseen| vain.record_attempt(pid, &why, unseen, now));
        let Some(suppressed) = logged else { return };
        let export = &device.export.id;
        match (ended.fault(), queues) {
            (Some(why), _) => device.report(&FrontEndEvent::ProtocolError { process, why }, suppressed),
            (None, Some(queues)) => tracing::warn!(
                %export, process = pid, queues, suppressed,
                "the front end disconnected after querying the number of queues: the virtual machine \
                 probably has more (give this export as many; stop and start the machine if it \
                 does not reconnect)"
            ),
            (None, None) => {
                tracing::info!(%export, process = pid, suppressed, "the front end has disconnected");
            }
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
        if let Some(loss) = self.connection.loss().filter(|_| !self.connection.is_quiesced()) {
            leave_nothing_to_lose(self.server.device.disk(), loss).await;
        }
    }
}

/// Flushes writes that would be lost with this process.
async fn leave_nothing_to_lose(disk: &Disk, loss: &UnflushedWrites) {
    let recorded = loss.recorded_writes();
    // Flushes the image, because a disk that is stopped by an error would hold the flush back.
    let is_durable = !disk.has_volatile_writes()
        || matches!(reactor::timeout(FLUSH_TIMEOUT, disk.image().flush()).await, Ok(Ok(())));
    if is_durable {
        loss.flushed(recorded, || disk.has_volatile_writes());
    }
}

async fn serve_ring(
    server: Arc<VhostUserServer>,
    ring: u16,
    mut settings: RingSettings,
    orders: Receiver<QueueOrder>,
    reports: Sender<Report>,
) {
    let (base, error, loss) = (settings.base, settings.error.clone(), settings.loss.clone());
    let late = orders.clone();
    let disk = server.device.disk();
    // A disk in migration may still be locked by the source host; see `migration.rs`.
    let base = match wait_for_image(disk, &mut settings, &orders).await {
        Ok(Some(replaced)) => {
            if disk.has_handover() {
                // The source host may have resized the image.
                server.refresh_size();
            }
            let has_feature = |feature| settings.features & feature != 0;
            let needed = server.device.export.offer.segments() + 2;
            // Linux waits forever for space for a request that is longer than the whole ring.
            let is_short = has_feature(virtio::SEG_MAX)
                && !has_feature(virtio::INDIRECT_DESC)
                && u32::from(settings.size) < needed;
            let size = settings.size;
            let base = match VhostUserQueue::new(ring, settings, Arc::clone(&server.device)) {
                Ok(queue) => {
                    if is_short {
                        server.device.warn_of_short_ring(size);
                    }
                    server.device.report_ring_served(ring);
                    replaced.into_iter().for_each(|(kind, event)| queue.set_event(kind, event));
                    queue.serve(orders).await
                }
                Err(why) => {
                    report_unserved_ring(&server.device, ring, &why, error);
                    base
                }
            };
            // A stopped machine may continue at another process, for example one that QEMU has
            // stopped and whose disk is migrated meanwhile. A quiesced ring is not stopped, and for
            // a front end that has disconnected `ServedFrontEnd::leave_nothing_to_lose` flushes.
            if let Some(loss) = loss.filter(|_| !server.device.is_quiescing() && !late.is_closed()) {
                leave_nothing_to_lose(disk, &loss).await;
            }
            disk.release().await;
            base
        }
        Ok(None) => base,
        Err(why) => {
            report_unserved_ring(&server.device, ring, &why, error);
            base
        }
    };
    // Late orders are dropped, because the sender may wait for their channel to close.
    late.close();
    while late.try_recv().is_ok() {}
    trim::trim_memory_soon();
    server.queues.fetch_sub(1, Relaxed);
    let _ = reports.try_send((ring, base));
}

/// Reports a ring that was not started, to the observer and by the ring's error event.
fn report_unserved_ring(device: &VhostUserDevice, ring: u16, why: &dyn Display, error: Option<Fd>) {
    device.report_ring_broken(ring, why);
    if let Some(error) = vring_event(device, ring, error) {
        error.signal(&EventfdNotifier::default());
    }
}

#[cfg(test)]
mod tests;
