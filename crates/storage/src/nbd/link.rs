//! The link to a server: successive sessions, and what happens between them.
//!
//! ```text
//!            ┌────────── first use ────────────────┐
//!   Ready ───┘                                     ▼
//!     ▲                                          Open ── a connection breaks ──► Down
//!     └── Moving ◄── to a worker, or a resize ─────┘ ▲                            │
//!                                                    └─ reconnected, writes resent ┘
//! ```
//!
//! A *session* is a set of connections that began together to the same server. If the server
//! declares that a flush on one connection covers the writes of all (`NBD_FLAG_CAN_MULTI_CONN`),
//! each thread that uses the disk has a connection. Otherwise there is one, and all other threads
//! send their requests to the thread that has it. The main thread has it while the image is opened;
//! it moves to the first worker that uses it.
//!
//! If one connection of a session breaks, all are closed, since the server may have been replaced.
//! From then on the link tries to reconnect, at once and then with growing pauses, for as long as
//! the disk exists. A session without any reply counts as a failed attempt. A request waits for
//! at most `reconnect_delay` after a break, and after the first break that it experienced: so a
//! request that crashes the server each time fails in the end. After reconnecting:
//! 1. writes that were acknowledged and never flushed are written again ([`Unflushed`]);
//! 2. requests that were in flight are sent again by their callers. None of them had a reply, so
//!    their mutual order is free, and each of them is idempotent. If another connection of a
//!    session replies to a change after the session has ended, the reply does not count: the new
//!    server may not have the change;
//! 3. only then new requests are sent.
//!
//! A server is rejected, and retried like an unreachable one, if it cannot continue the disk
//! ([`NbdLink::check_compatible`]) or fails to repeat acknowledged writes. It is compared with the
//! properties of the export when the disk was opened, not with those of the previous server, which
//! may temporarily have had more.
//!
//! With no reconnect delay, nothing is kept. If a break then loses writes that no flush had
//! covered, every later flush fails, since it could not make them durable.
//!
//! Never sends any other request on its own.

mod reconnect;

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use async_channel::Sender;
use event_listener::Event;
use policy::time::{Duration, Instant};

use self::reconnect::{ReconnectAttempt, reconnect};
use super::{
    connection::{self, BreakCause, ConnectionOwner, ConnectionRoute, LocalConnection},
    operation::{self, ConnectionJob, NbdOperation, NbdResult},
    unflushed::{NbdChange, Unflushed},
};
use nbd::{
    client::{
        self, CONNECTION_LOST, EstablishedConnection, HandshakeOptions, NbdAddress, NbdConnectError,
        NbdExportInfo, shake_hands, with_timeout,
    },
    stream::NbdStream,
    uri::Uri,
};
use reactor::{
    buffer::Segments,
    error::{Error, Result},
    log_rate_limit::LogRateLimit,
    now,
    operation::Fd,
    spawn, spawn_detached, timeout,
};

use crate::flushes::Flushes;

/// Timeout of connecting and the handshake together.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// First pause between attempts to connect, and the longest.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(100);
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(5);
/// Number of log lines about breaks that are written at once, before the limit of one a second.
const UNLIMITED_LOG_LINES: u64 = 3;
/// Maximum number of unflushed writes in flight while they are written again.
const REPEATED_WRITES_IN_FLIGHT: usize = 64;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Opens streams to the server.
pub(super) enum NbdDialer {
    Socket(Vec<NbdAddress>),
    /// In the simulation.
    Simulated(Box<dyn Fn() -> io::Result<NbdStream> + Send + Sync>),
}

impl std::fmt::Debug for NbdDialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket(addresses) => addresses.fmt(f),
            Self::Simulated(_) => f.write_str("simulated"),
        }
    }
}

impl NbdDialer {
    async fn dial(&self) -> std::result::Result<NbdStream, NbdConnectError> {
        match self {
            Self::Socket(addresses) => {
                let addresses = addresses.clone();
                let socket =
                    reactor::run_blocking(move || client::dial_any(&addresses, CONNECT_TIMEOUT)).await?;
                Ok(NbdStream::Plain(Fd::from(socket)))
            }
            Self::Simulated(make) => Ok(make()?),
        }
    }
}

/// Parameters of a link.
#[derive(Debug)]
pub(super) struct LinkConfig {
    pub(super) name: String,
    pub(super) dialler: NbdDialer,
    pub(super) options: HandshakeOptions,
    /// URI from which keys and certificates are read again for each connection but the first;
    /// `None` without TLS.
    pub(super) keys: Option<Uri>,
    pub(super) reconnect_delay: Duration,
    /// True if the disk is never written to.
    pub(super) read_only: bool,
    /// True if flushes reach the server: false with the cache mode `unsafe`.
    pub(super) flushes: bool,
}

impl LinkConfig {
    /// Connects and negotiates the export.
    pub(super) async fn establish(&self) -> std::result::Result<EstablishedConnection, NbdConnectError> {
        self.establish_with(&self.options).await
    }

    /// As [`LinkConfig::establish`], with the current content of the key and certificate files;
    /// with the previous keys if the files are unreadable.
    async fn establish_again(&self) -> std::result::Result<EstablishedConnection, NbdConnectError> {
        let mut options = self.options.clone();
        if let Some(uri) = self.keys.clone()
            && let Ok(Ok(tls)) =
                timeout(CONNECT_TIMEOUT, reactor::run_blocking(move || uri.credentials())).await
        {
            options.tls = tls;
        }
        self.establish_with(&options).await
    }

    async fn establish_with(
        &self,
        options: &HandshakeOptions,
    ) -> std::result::Result<EstablishedConnection, NbdConnectError> {
        with_timeout(CONNECT_TIMEOUT, async { shake_hands(self.dialler.dial().await?, options).await }).await
    }
}

/// The link of one disk: see the head of this file.
#[derive(Debug)]
pub(super) struct NbdLink {
    id: u64,
    config: LinkConfig,
    /// Properties of the export when the disk was opened; each later server must provide them.
    opened: NbdExportInfo,
    /// Size of the disk: whole blocks.
    size_bytes: AtomicU64,
    state: Mutex<LinkState>,
    changed: Event,
    /// Lets writers that exceed the bound of [`Unflushed`] share a flush.
    write_flushes: Flushes,
    /// Notified when a kept change has ended.
    change_ended: Event,
    in_flight: Mutex<BTreeMap<u64, Instant>>,
    next_request: AtomicU64,
    reconnections: AtomicU64,
    failure_log: LogRateLimit,
    break_log: LogRateLimit,
    reconnect_log: LogRateLimit,
}

#[derive(Debug)]
struct LinkState {
    session: u64,
    /// Beginning of the session.
    began: Instant,
    /// True if the server has replied in it.
    has_answered: bool,
    /// Pause before the next attempt, counted from the beginning of the session.
    pause: Duration,
    export: NbdExportInfo,
    stage: LinkStage,
    unflushed: Unflushed,
    /// If no writes are kept: number of writes that the server has acknowledged, and how many of
    /// them a flush has covered.
    written: u64,
    covered: u64,
    /// Number of breaks by the server or the network.
    breaks: u64,
    /// True if written data is lost, or may be.
    has_lost_writes: bool,
}

#[derive(Debug)]
enum LinkStage {
    /// Connected, not used yet.
    Ready(Box<EstablishedConnection>),
    Open {
        jobs: Vec<Sender<ConnectionJob>>,
        /// True if the first of them is on a worker thread.
        is_at_work: bool,
    },
    /// In transit between two threads.
    Moving,
    Down {
        /// Instant at which waiting requests fail.
        until: Instant,
        is_tried: bool,
    },
}

enum ConnectionLocation {
    Local(Box<EstablishedConnection>),
    Keeper(Sender<ConnectionJob>),
}

enum LinkStep {
    Route(ConnectionRoute),
    /// Evaluate the stage again.
    Retry,
    Fetch(u64, Sender<ConnectionJob>),
    Wait(Instant),
}

/// State of a remote disk, for `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdLinkStatus {
    /// True if there is a connection.
    pub is_connected: bool,
    /// Number of reconnects.
    pub reconnections: u64,
    /// Bytes kept until they are flushed.
    pub unflushed_bytes: u64,
}

impl NbdLink {
    pub(super) fn new(config: LinkConfig, established: EstablishedConnection) -> Arc<Self> {
        let export = established.export().clone();
        let state = LinkState {
            session: 0,
            began: now(),
            has_answered: false,
            pause: FIRST_PAUSE,
            export: export.clone(),
            stage: LinkStage::Ready(Box::new(established)),
            unflushed: Unflushed::default(),
            written: 0,
            covered: 0,
            breaks: 0,
            has_lost_writes: false,
        };
        Arc::new(Self {
            id: NEXT_ID.fetch_add(1, Relaxed),
            config,
            size_bytes: AtomicU64::new(whole_blocks(export.size_bytes, &export)),
            opened: export,
            state: Mutex::new(state),
            changed: Event::new(),
            write_flushes: Flushes::default(),
            change_ended: Event::new(),
            in_flight: Mutex::default(),
            next_request: AtomicU64::new(0),
            reconnections: AtomicU64::new(0),
            failure_log: LogRateLimit::default(),
            break_log: LogRateLimit::default(),
            reconnect_log: LogRateLimit::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LinkState> {
        // Each change of the state is complete before any code that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Properties of the export at the current server.
    pub(super) fn export(&self) -> NbdExportInfo {
        self.lock().export.clone()
    }

    /// Size of the disk, as it was opened or resized, in whole blocks.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    pub(super) fn has_lost_writes(&self) -> bool {
        self.lock().has_lost_writes
    }

    pub(super) fn remote(&self) -> NbdLinkStatus {
        let state = self.lock();
        NbdLinkStatus {
            is_connected: !matches!(state.stage, LinkStage::Down { .. }),
            reconnections: self.reconnections.load(Relaxed),
            unflushed_bytes: state.unflushed.bytes(),
        }
    }

    pub(super) fn oldest_request(&self) -> Option<Duration> {
        let in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        in_flight.first_key_value().map(|(_, began)| reactor::real_time() - *began)
    }

    /// Longest pause between sessions without any reply.
    fn longest_pause(&self) -> Duration {
        (self.config.reconnect_delay / 4).clamp(FIRST_PAUSE, MAX_PAUSE)
    }

    fn retries(&self) -> bool {
        !self.config.reconnect_delay.is_zero()
    }

    /// True if writes are kept until they are flushed, if the server supports flushes.
    fn keeps(&self) -> bool {
        self.retries() && self.config.flushes
    }

    /// Executes a request, and repeats it after each break until there is a reply or the time is
    /// over.
    pub(super) async fn execute(self: &Arc<Self>, operation: NbdOperation) -> Result<NbdResult> {
        self.execute_then(operation, |_| {}).await
    }

    /// As [`NbdLink::execute`]; `on_success` records a success under the lock, before the session
    /// of the reply can end.
    async fn execute_then(
        self: &Arc<Self>,
        operation: NbdOperation,
        on_success: impl FnOnce(&mut LinkState),
    ) -> Result<NbdResult> {
        let _in_flight = self.track();
        let mut until = None;
        loop {
            let route = self.route().await?;
            match route.execute(&operation).await {
                // Not executed, or by a thread that has ended.
                None => {}
                Some(Err(CONNECTION_LOST)) if self.retries() => {
                    self.report_break(&route);
                    if *until.get_or_insert(now() + self.config.reconnect_delay) <= now() {
                        return Err(Error::IO);
                    }
                }
                Some(Err(CONNECTION_LOST)) => return Err(Error::IO),
                Some(Ok(result)) => {
                    let mut state = self.lock();
                    // A change counts only if its session has not ended: the writes that were
                    // repeated to the next server do not include it.
                    if state.session == route.session() || !operation.is_change() || !self.retries() {
                        state.has_answered = true;
                        on_success(&mut state);
                        return Ok(result);
                    }
                }
                Some(Err(error)) => {
                    self.lock().has_answered = true;
                    return Err(error);
                }
            }
            drop(route);
            reactor::yield_now().await;
        }
    }

    /// Reports a break at once; the connection's keeper reports it too, but perhaps later.
    fn report_break(self: &Arc<Self>, route: &ConnectionRoute) {
        if let ConnectionRoute::Own(local) = route
            && let Some(why) = local.client().fault()
        {
            self.connection_lost(local.session(), BreakCause::Server, &why);
        }
    }

    /// Writes; without freezing or copying the data if the request is never repeated.
    pub(super) async fn write(self: &Arc<Self>, offset: u64, data: Segments, force: bool) -> Result<()> {
        if !self.retries() {
            let _in_flight = self.track();
            let breaks = self.lock().breaks;
            if let ConnectionRoute::Own(local) = self.route().await? {
                let result = operation::write(local.client(), offset, data, force).await;
                return self.count_write(breaks, force, result);
            }
        }
        let data = Arc::new(data.joined().freeze());
        self.change(NbdChange::Data { offset, data }, force).await
    }

    /// Writes or zeroes, and keeps the change until it is flushed.
    pub(super) async fn change(self: &Arc<Self>, change: NbdChange, force: bool) -> Result<()> {
        if !self.keeps() {
            let breaks = self.lock().breaks;
            let result = self.execute(NbdOperation::Change { change, force }).await;
            return self.count_write(breaks, force, result.map(drop));
        }
        // A FUA write is not kept, so it needs no space, unless it overlaps kept data.
        if !force || self.lock().unflushed.overlaps(&change) {
            self.make_room().await?;
        }
        let number = self.lock().unflushed.begin(change.clone(), force);
        let kept_change = KeptChange { link: self, number };
        let _change = self.write_flushes.begin_change();
        let answered = |state: &mut LinkState| {
            let may_be_forgotten = state.export.can_flush();
            state.unflushed.answered(number, may_be_forgotten);
        };
        let result = self.execute_then(NbdOperation::Change { change, force }, answered).await;
        kept_change.finish(result.is_ok());
        result.map(drop)
    }

    /// Returns once there is space to keep another change.
    async fn make_room(self: &Arc<Self>) -> Result<()> {
        loop {
            let change_ended = self.change_ended.listen();
            if self.lock().unflushed.has_room() {
                return Ok(());
            }
            self.write_flushes.run(|| self.flush()).await?;
            if !self.lock().unflushed.has_room() {
                // The remaining changes have no reply yet, or received it during the flush.
                change_ended.await;
            }
        }
    }

    /// Counts a write that is not kept; `breaks` is the number of breaks before it.
    fn count_write(&self, breaks: u64, force: bool, result: Result<()>) -> Result<()> {
        let result = result.map_err(|error| if error == CONNECTION_LOST { Error::IO } else { error });
        let mut state = self.lock();
        if result.is_ok() && !force && self.config.flushes && state.export.can_flush() {
            state.written += 1;
            // The reply was received before the break, but is processed after it.
            state.has_lost_writes |= state.breaks != breaks && !self.retries();
        }
        result
    }

    /// Flushes all acknowledged writes.
    ///
    /// # Errors
    /// The server's error; [`Error::IO`] if writes are lost.
    pub(super) async fn flush(self: &Arc<Self>) -> Result<()> {
        if !self.config.flushes {
            return Ok(());
        }
        let (number, written) = {
            let mut state = self.lock();
            // Under one lock: the flush covers exactly the writes that are counted here.
            (state.unflushed.begin_flush(), state.written)
        };
        if self.has_lost_writes() {
            return Err(Error::IO);
        }
        let mut is_lost = false;
        let flushed = |state: &mut LinkState| {
            // A break during the flush may have lost writes that the new server never had.
            is_lost = state.has_lost_writes;
            if !is_lost {
                state.unflushed.end_flush(number);
                state.covered = state.covered.max(written);
            }
        };
        self.execute_then(NbdOperation::Flush, flushed).await?;
        if is_lost { Err(Error::IO) } else { Ok(()) }
    }

    fn track(&self) -> RequestTimer<'_> {
        let number = self.next_request.fetch_add(1, Relaxed);
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner).insert(number, now());
        RequestTimer { link: self, number }
    }

    /// Waits for a path to the server.
    async fn route(self: &Arc<Self>) -> Result<ConnectionRoute> {
        // The usual case; the loop below costs an allocation.
        if let Some(local) = self.local_connection() {
            return Ok(ConnectionRoute::Own(local));
        }
        loop {
            let changed = self.changed.listen();
            match self.next_step() {
                LinkStep::Route(route) => return Ok(route),
                LinkStep::Retry => {}
                LinkStep::Fetch(session, jobs) => {
                    let link = Arc::clone(self);
                    // Runs to its end even if this request is cancelled, or the connection would
                    // stay in transit for ever.
                    spawn_detached(async move { link.fetch_connection(session, jobs).await }).await;
                }
                LinkStep::Wait(until) if until <= now() => return Err(Error::IO),
                LinkStep::Wait(until) => {
                    let _ = timeout(until - now(), changed).await;
                }
            }
        }
    }

    /// This thread's own connection, if it has one.
    fn local_connection(&self) -> Option<LocalConnection> {
        let state = self.lock();
        matches!(state.stage, LinkStage::Open { .. })
            .then(|| LocalConnection::of(self.id, state.session))
            .flatten()
    }

    fn next_step(self: &Arc<Self>) -> LinkStep {
        self.start_reconnect();
        let mut state = self.lock();
        let session = state.session;
        match &mut state.stage {
            LinkStage::Open { jobs, is_at_work } => {
                if let Some(local) = LocalConnection::of(self.id, session) {
                    return LinkStep::Route(ConnectionRoute::Own(local));
                }
                let Some(first) = jobs.first().cloned() else { return LinkStep::Retry };
                // The connection was opened on the main thread: move it to the first worker that
                // uses it.
                if !*is_at_work && reactor::is_worker() {
                    jobs.clear();
                    state.stage = LinkStage::Moving;
                    return LinkStep::Fetch(session, first);
                }
                if state.export.can_multi_conn()
                    && reactor::is_worker()
                    && connection::may_open(self.id, session)
                {
                    drop(state);
                    let link = Arc::clone(self);
                    spawn(async move { link.open_another(session).await });
                }
                LinkStep::Route(ConnectionRoute::Other(session, first))
            }
            LinkStage::Ready(_) => {
                let LinkStage::Ready(established) = std::mem::replace(&mut state.stage, LinkStage::Moving)
                else {
                    unreachable!("matched above")
                };
                let jobs = vec![connection::start_keeper(self, session, *established)];
                state.stage = LinkStage::Open { jobs, is_at_work: reactor::is_worker() };
                self.changed.notify(usize::MAX);
                LinkStep::Retry
            }
            // Bounded by the time that connecting may take.
            LinkStage::Moving => LinkStep::Wait(now() + CONNECT_TIMEOUT),
            LinkStage::Down { until, .. } => LinkStep::Wait(*until),
        }
    }

    /// Starts a reconnect task, unless one is running.
    fn start_reconnect(self: &Arc<Self>) {
        let must_start = match &mut self.lock().stage {
            LinkStage::Down { is_tried, .. } => !std::mem::replace(is_tried, true),
            _ => false,
        };
        if must_start {
            spawn(reconnect(ReconnectAttempt { link: Arc::downgrade(self) }));
        }
    }

    /// Opens a connection of this thread, in addition to the existing ones. If that fails, its
    /// requests use connections of other threads for the rest of the session.
    async fn open_another(self: &Arc<Self>, session: u64) {
        let established = match self.config.establish().await {
            Ok(established) => established,
            Err(error) => return self.log_rejection(&error.full_message()),
        };
        let mut state = self.lock();
        if state.session == session
            && established.export().is_same_export(&state.export)
            && let LinkStage::Open { jobs, .. } = &mut state.stage
        {
            jobs.push(connection::start_keeper(self, session, established));
        }
    }

    /// Takes the connection from another thread, for the next request that needs one.
    async fn fetch_connection(self: &Arc<Self>, session: u64, jobs: Sender<ConnectionJob>) {
        if let Some(established) = self.retire_connection(session, jobs).await {
            let mut state = self.lock();
            if state.session == session && matches!(state.stage, LinkStage::Moving) {
                state.session += 1;
                state.stage = LinkStage::Ready(Box::new(established));
            }
        }
        self.changed.notify(usize::MAX);
    }

    /// Takes the connection from another thread and returns it; the stage must be `Moving`. If the
    /// connection breaks, the stage becomes `Down`.
    async fn retire_connection(
        self: &Arc<Self>,
        session: u64,
        jobs: Sender<ConnectionJob>,
    ) -> Option<EstablishedConnection> {
        let (reply_sender, reply_receiver) = async_channel::bounded(1);
        let retired = match jobs.send(ConnectionJob::Leave(reply_sender)).await {
            Ok(()) => reply_receiver.recv().await.ok().flatten(),
            Err(_) => None,
        };
        if retired.is_none() {
            self.connection_lost(session, BreakCause::Server, "it broke while moving to another thread");
        }
        retired
    }

    /// Sets the stage to `Moving`, so that no new request uses the connection, and returns where
    /// the connection is.
    fn set_moving(&self) -> Option<(u64, ConnectionLocation)> {
        let mut state = self.lock();
        let session = state.session;
        let found = match std::mem::replace(&mut state.stage, LinkStage::Moving) {
            LinkStage::Ready(established) => ConnectionLocation::Local(established),
            LinkStage::Open { jobs, .. } => ConnectionLocation::Keeper(jobs.into_iter().next()?),
            other => {
                state.stage = other;
                return None;
            }
        };
        Some((session, found))
    }

    /// Releases the connection, for the thread that uses it next.
    pub(super) async fn release_connection(self: &Arc<Self>) {
        match self.set_moving() {
            Some((session, ConnectionLocation::Keeper(jobs))) => self.fetch_connection(session, jobs).await,
            Some((_, ConnectionLocation::Local(established))) => {
                self.lock().stage = LinkStage::Ready(established);
            }
            None => {}
        }
    }

    /// Reconnects and reads the current properties of the export. Waits for requests in flight;
    /// later requests wait.
    ///
    /// # Errors
    /// The server cannot be reached.
    pub(super) async fn reopen(self: &Arc<Self>) -> Result<()> {
        self.flush().await?;
        let Some((session, location)) = self.set_moving() else { return Err(Error::IO) };
        let old_connection = match location {
            ConnectionLocation::Local(established) => *established,
            ConnectionLocation::Keeper(jobs) => {
                self.retire_connection(session, jobs).await.ok_or(Error::IO)?
            }
        };
        client::NbdClient::start(old_connection).disconnect().await;
        let reopened = match self.config.establish().await {
            Ok(established) => match self.check_compatible(established.export(), 0) {
                Ok(()) => Some(established),
                Err(why) => {
                    self.log_rejection(&why);
                    None
                }
            },
            Err(error) => {
                self.log_rejection(&error.full_message());
                None
            }
        };
        let mut state = self.lock();
        state.session += 1;
        let result = match reopened {
            Some(established) => {
                state.export = established.export().clone();
                self.size_bytes.store(whole_blocks(state.export.size_bytes, &self.opened), Relaxed);
                state.stage = LinkStage::Ready(Box::new(established));
                Ok(())
            }
            None => {
                state.stage = LinkStage::Down { until: now() + self.config.reconnect_delay, is_tried: false };
                Err(Error::IO)
            }
        };
        drop(state);
        self.changed.notify(usize::MAX);
        result
    }
}

/// Rounds a size down to whole blocks of this server.
fn whole_blocks(size_bytes: u64, export: &NbdExportInfo) -> u64 {
    size_bytes & !(u64::from(export.minimum_block) - 1)
}

impl ConnectionOwner for NbdLink {
    fn id(&self) -> u64 {
        self.id
    }

    /// Ends the session of the lost connection.
    fn connection_lost(self: &Arc<Self>, session: u64, cause: BreakCause, why: &str) {
        let forgotten = {
            let mut state = self.lock();
            // Several connections of a session may report its end; only the first counts.
            if state.session != session || matches!(state.stage, LinkStage::Down { .. }) {
                return;
            }
            state.session += 1;
            state.pause = match std::mem::take(&mut state.has_answered) {
                true => FIRST_PAUSE,
                // Waiting requests must not time out because of the pause.
                false => (2 * state.pause).clamp(FIRST_PAUSE, self.longest_pause()),
            };
            state.breaks += u64::from(cause == BreakCause::Server);
            let limit = match cause {
                BreakCause::Server => self.config.reconnect_delay,
                BreakCause::Thread => self.config.reconnect_delay.max(CONNECT_TIMEOUT),
            };
            // Drops the senders of jobs, so the remaining connections of the session end.
            state.stage = LinkStage::Down { until: now() + limit, is_tried: false };
            let forgotten = cause == BreakCause::Server
                && self.config.flushes
                && state.export.can_flush()
                && !self.retries()
                && state.written > state.covered;
            state.has_lost_writes |= forgotten;
            forgotten
        };
        let nbd = &self.config.name;
        if cause == BreakCause::Server
            && let Some(suppressed) = self.break_log.try_log_burst(now(), UNLIMITED_LOG_LINES)
        {
            tracing::warn!(%nbd, why, suppressed, "the connection to the server is lost");
        }
        if forgotten {
            tracing::error!(
                %nbd,
                "writes since the last flush may be lost with the server, so flushes fail from now \
                 on (open the disk again; with reconnect-delay they would be replayed)"
            );
        }
        self.changed.notify(usize::MAX);
        // Reconnects even if no request waits, so that the next one finds a connection.
        if cause == BreakCause::Server {
            self.start_reconnect();
        }
    }
}

/// A request that waits for its reply.
struct RequestTimer<'a> {
    link: &'a NbdLink,
    number: u64,
}

impl Drop for RequestTimer<'_> {
    fn drop(&mut self) {
        self.link.in_flight.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

/// A change that is kept. If its caller is cancelled, the change may have taken effect.
struct KeptChange<'a> {
    link: &'a NbdLink,
    number: u64,
}

impl KeptChange<'_> {
    fn finish(self, is_done: bool) {
        if !is_done {
            self.link.lock().unflushed.fail(self.number);
        }
    }
}

impl Drop for KeptChange<'_> {
    fn drop(&mut self) {
        self.link.lock().unflushed.cancel(self.number);
        self.link.change_ended.notify(usize::MAX);
    }
}
