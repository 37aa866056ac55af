//! The way to a server: conversations with it, one after the other, and what happens between them.
//!
//! ```text
//!            ┌──────── the first to use it ────────┐
//!   Ready ───┘                                     ▼
//!     ▲                                          Open ── a connection breaks ──► Down
//!     └── Moving ◄── a worker wants it, or a size ─┘ ▲                            │
//!                                                    └── connected, written again ┘
//! ```
//!
//! A *session* is a set of connections that began together in trust: where the server says that a
//! flush on one covers the writes of all (multi-conn), each thread that uses the disk has a
//! connection; otherwise there is one, and the other threads hand their requests to the thread that
//! has it. It was the main thread's while the image was opened; the first worker that wants it gets
//! it.
//!
//! If one connection of a session breaks, all end: nobody knows whether the server is still the
//! same. From then on it is tried to connect again, at once and then ever more seldom, for as long
//! as the disk exists; a session in which nothing was answered counts as an attempt that failed.
//! Requests wait for that as long as `reconnect_delay` says, counted from the break, and from the
//! first one that they met themselves: a request that breaks each connection fails too. Once
//! connected:
//! 1. what was acknowledged and never flushed is written again ([`Unflushed`]);
//! 2. requests that were in flight are asked again, by those who asked. None of them had been
//!    answered, so their order among each other is free, and each of them does the same when it is
//!    done twice. What another connection of a session answers to a change once the session is over
//!    does not count: the server that was written again does not know of it;
//! 3. only then what came later.
//!
//! A server that cannot go on where the last one ended ([`Link::suits`]), or does not take again
//! what was acknowledged, is refused, and tried again like one that is not there. It is measured by
//! how the disk was opened, not by how the last server was: one that had more for a while obliges
//! nobody.
//!
//! Where nothing is kept (no delay), and something was written that no flush had covered, every
//! flush fails from then on: it could not keep its promise.
//!
//! Never asks anything of its own accord but that.

mod again;

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

use self::again::{Trying, reconnect};
use super::{
    ask::{self, Answer, Ask, Job},
    lane::{self, Break, Home, Own, Way},
    unflushed::{Change, Unflushed},
};
use nbd::{
    client::{self, About, Address, Established, GONE, NotConnected, Wanted, shake_hands, within},
    stream::Stream,
    uri::Uri,
};
use reactor::{
    buffer::Segments,
    error::{Error, Result},
    now,
    op::Fd,
    seldom::Seldom,
    spawn, spawn_to_end, timeout,
};

use crate::flushes::Flushes;

/// For connecting and the handshake together.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Between attempts to connect: at first, and at most.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(100);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Lines of the log about breaks that are written at once, before it is one a second.
const BREAKS_IN_FULL: u64 = 3;
/// Writes that are written again at once.
const AGAIN_AT_ONCE: usize = 64;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Makes streams to the server.
pub(super) enum Dialler {
    Socket(Vec<Address>),
    /// In simulation.
    Simulated(Box<dyn Fn() -> io::Result<Stream> + Send + Sync>),
}

impl std::fmt::Debug for Dialler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Socket(addresses) => addresses.fmt(f),
            Self::Simulated(_) => f.write_str("simulated"),
        }
    }
}

impl Dialler {
    async fn dial(&self) -> std::result::Result<Stream, NotConnected> {
        match self {
            Self::Socket(addresses) => {
                let addresses = addresses.clone();
                let socket = reactor::blocking(move || client::dial_any(&addresses, PATIENCE)).await?;
                Ok(Stream::Plain(Fd::from(socket)))
            }
            Self::Simulated(make) => Ok(make()?),
        }
    }
}

/// How a link is made, and how it goes on after a break.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) name: String,
    pub(super) dialler: Dialler,
    pub(super) wanted: Wanted,
    /// Where keys and certificates are read again for each connection but the first; none without
    /// TLS.
    pub(super) keys: Option<Uri>,
    pub(super) reconnect_delay: Duration,
    /// Nothing is written.
    pub(super) read_only: bool,
    /// Whether flushes mean anything: not with the cache mode `unsafe`.
    pub(super) flushes: bool,
}

impl Terms {
    /// A conversation that has come to the export.
    pub(super) async fn establish(&self) -> std::result::Result<Established, NotConnected> {
        self.establish_with(&self.wanted).await
    }

    /// The same, with keys and certificates as their files have them now; or as they were, where
    /// they cannot be read any more.
    async fn establish_again(&self) -> std::result::Result<Established, NotConnected> {
        let mut wanted = self.wanted.clone();
        if let Some(place) = self.keys.clone()
            && let Ok(Ok(tls)) = timeout(PATIENCE, reactor::blocking(move || place.credentials())).await
        {
            wanted.tls = tls;
        }
        self.establish_with(&wanted).await
    }

    async fn establish_with(&self, wanted: &Wanted) -> std::result::Result<Established, NotConnected> {
        within(PATIENCE, async { shake_hands(self.dialler.dial().await?, wanted).await }).await
    }
}

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Link {
    id: u64,
    terms: Terms,
    /// What the disk was opened with: each server later on has to have that.
    opened: About,
    /// Of the disk: whole blocks.
    size_bytes: AtomicU64,
    state: Mutex<State>,
    changed: Event,
    /// Those who write more than is kept flush together.
    behind: Flushes,
    /// A change that is kept has ended.
    ended: Event,
    in_flight: Mutex<BTreeMap<u64, Instant>>,
    next_request: AtomicU64,
    reconnections: AtomicU64,
    complaints: Seldom,
    breaks_told: Seldom,
    returns_told: Seldom,
}

#[derive(Debug)]
struct State {
    session: u64,
    /// When it began.
    began: Instant,
    /// Whether something was answered in it.
    has_answered: bool,
    /// Before the next attempt, counted from the beginning of the session.
    pause: Duration,
    about: About,
    stage: Stage,
    unflushed: Unflushed,
    /// Writes that the server has answered, and how many of them a flush has covered: where none
    /// are kept.
    written: u64,
    covered: u64,
    /// How often the server, or the way to it, was lost.
    breaks: u64,
    /// Something that was written is gone, or may be.
    lost: bool,
}

#[derive(Debug)]
enum Stage {
    /// Nobody has gone on with it yet.
    Ready(Box<Established>),
    Open {
        jobs: Vec<Sender<Job>>,
        /// Whether the first of them is on a thread for requests.
        is_at_work: bool,
    },
    /// It is between two threads.
    Moving,
    Down {
        /// When requests give up waiting.
        until: Instant,
        is_tried: bool,
    },
}

enum Where {
    Here(Box<Established>),
    There(Sender<Job>),
}

enum Step {
    Go(Way),
    /// Look again.
    Again,
    Fetch(u64, Sender<Job>),
    Wait(Instant),
}

/// What `status` tells of a disk that is somewhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Whether there is a connection.
    pub is_connected: bool,
    /// How often one was made anew.
    pub reconnections: u64,
    /// Bytes that are kept until they are flushed.
    pub unflushed_bytes: u64,
}

impl Link {
    pub(super) fn new(terms: Terms, established: Established) -> Arc<Self> {
        let about = established.about().clone();
        let state = State {
            session: 0,
            began: now(),
            has_answered: false,
            pause: FIRST_PAUSE,
            about: about.clone(),
            stage: Stage::Ready(Box::new(established)),
            unflushed: Unflushed::default(),
            written: 0,
            covered: 0,
            breaks: 0,
            lost: false,
        };
        Arc::new(Self {
            id: NEXT_ID.fetch_add(1, Relaxed),
            terms,
            size_bytes: AtomicU64::new(whole_blocks(about.size_bytes, &about)),
            opened: about,
            state: Mutex::new(state),
            changed: Event::new(),
            behind: Flushes::default(),
            ended: Event::new(),
            in_flight: Mutex::default(),
            next_request: AtomicU64::new(0),
            reconnections: AtomicU64::new(0),
            complaints: Seldom::default(),
            breaks_told: Seldom::default(),
            returns_told: Seldom::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change of it is complete before anything could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the server says of the export now.
    pub(super) fn about(&self) -> About {
        self.lock().about.clone()
    }

    /// Of the disk, as it was opened or resized: whole blocks of that server.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    pub(super) fn has_lost_writes(&self) -> bool {
        self.lock().lost
    }

    pub(super) fn remote(&self) -> Remote {
        let state = self.lock();
        Remote {
            is_connected: !matches!(state.stage, Stage::Down { .. }),
            reconnections: self.reconnections.load(Relaxed),
            unflushed_bytes: state.unflushed.bytes(),
        }
    }

    pub(super) fn oldest_request(&self) -> Option<Duration> {
        let in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        in_flight.first_key_value().map(|(_, began)| reactor::real_time() - *began)
    }

    /// Between sessions in which nothing is answered.
    fn longest_pause(&self) -> Duration {
        (self.terms.reconnect_delay / 4).clamp(FIRST_PAUSE, LONGEST_PAUSE)
    }

    fn retries(&self) -> bool {
        !self.terms.reconnect_delay.is_zero()
    }

    /// Whether what is written is kept until it is flushed, where the server has flushes.
    fn keeps(&self) -> bool {
        self.retries() && self.terms.flushes
    }

    /// Asks, again after each break, until there is an answer or no more time.
    pub(super) async fn ask(self: &Arc<Self>, ask: Ask) -> Result<Answer> {
        self.ask_then(ask, |_| {}).await
    }

    /// The same; `then` notes that it succeeded, before the session of the answer can end.
    async fn ask_then(self: &Arc<Self>, ask: Ask, then: impl FnOnce(&mut State)) -> Result<Answer> {
        let _in_flight = self.enter();
        let mut until = None;
        loop {
            let way = self.way().await?;
            match way.ask(&ask).await {
                // It was not asked, or only by a thread that has ended.
                None => {}
                Some(Err(GONE)) if self.retries() => {
                    self.note_break(&way);
                    if *until.get_or_insert(now() + self.terms.reconnect_delay) <= now() {
                        return Err(Error::IO);
                    }
                }
                Some(Err(GONE)) => return Err(Error::IO),
                Some(Ok(answer)) => {
                    let mut state = self.lock();
                    if state.session == way.session() || !ask.is_lasting() || !self.retries() {
                        state.has_answered = true;
                        then(&mut state);
                        return Ok(answer);
                    }
                }
                Some(Err(error)) => {
                    self.lock().has_answered = true;
                    return Err(error);
                }
            }
            drop(way);
            reactor::yield_now().await;
        }
    }

    /// The connection's keeper tells too, but perhaps later.
    fn note_break(self: &Arc<Self>, way: &Way) {
        if let Way::Own(own) = way
            && let Some(why) = own.client().fault()
        {
            self.lose(own.session(), Break::Server, &why);
        }
    }

    /// Writes once: where nothing is asked again, nothing has to be frozen or copied.
    pub(super) async fn write(self: &Arc<Self>, offset: u64, data: Segments, force: bool) -> Result<()> {
        if !self.retries() {
            let _in_flight = self.enter();
            let breaks = self.lock().breaks;
            if let Way::Own(own) = self.way().await? {
                let result = ask::write(own.client(), offset, data, force).await;
                return self.written(breaks, force, result);
            }
        }
        let data = Arc::new(data.joined().freeze());
        self.change(Change::Data { offset, data }, force).await
    }

    /// Writes or zeroes, and keeps that until it is flushed.
    pub(super) async fn change(self: &Arc<Self>, change: Change, force: bool) -> Result<()> {
        if !self.keeps() {
            let breaks = self.lock().breaks;
            let result = self.ask(Ask::Change { change, force }).await;
            return self.written(breaks, force, result.map(drop));
        }
        if !force || self.lock().unflushed.overlaps(&change) {
            self.make_room().await?;
        }
        let number = self.lock().unflushed.begin(change.clone(), force);
        let kept = Kept { link: self, number };
        let _change = self.behind.change();
        let answered = |state: &mut State| {
            let may_be_forgotten = state.about.can_flush();
            state.unflushed.answered(number, may_be_forgotten);
        };
        let result = self.ask_then(Ask::Change { change, force }, answered).await;
        kept.ended(result.is_ok());
        result.map(drop)
    }

    /// Returns once one more change may be kept.
    async fn make_room(self: &Arc<Self>) -> Result<()> {
        loop {
            let ended = self.ended.listen();
            if self.lock().unflushed.has_room() {
                return Ok(());
            }
            self.behind.run(|| self.flush()).await?;
            if !self.lock().unflushed.has_room() {
                // What is left has not been answered, or was while it was flushed.
                ended.await;
            }
        }
    }

    /// Counts a write of which nothing is kept; `breaks` is how many there were before it.
    fn written(&self, breaks: u64, force: bool, result: Result<()>) -> Result<()> {
        let result = result.map_err(|error| if error == GONE { Error::IO } else { error });
        let mut state = self.lock();
        if result.is_ok() && !force && self.terms.flushes && state.about.can_flush() {
            state.written += 1;
            // Its answer came before the break, and is heard after it.
            state.lost |= state.breaks != breaks && !self.retries();
        }
        result
    }

    /// # Errors
    /// The server's; [`Error::IO`] where something is lost.
    pub(super) async fn flush(self: &Arc<Self>) -> Result<()> {
        if !self.terms.flushes {
            return Ok(());
        }
        let (number, written) = {
            let mut state = self.lock();
            (state.unflushed.begin_flush(), state.written)
        };
        if self.has_lost_writes() {
            return Err(Error::IO);
        }
        let mut is_lost = false;
        let flushed = |state: &mut State| {
            // While it was asked, a server may have come that does not have everything.
            is_lost = state.lost;
            if !is_lost {
                state.unflushed.flushed(number);
                state.covered = state.covered.max(written);
            }
        };
        self.ask_then(Ask::Flush, flushed).await?;
        if is_lost { Err(Error::IO) } else { Ok(()) }
    }

    fn enter(&self) -> InFlight<'_> {
        let number = self.next_request.fetch_add(1, Relaxed);
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner).insert(number, now());
        InFlight { link: self, number }
    }

    /// A way to the server, as soon as there is one.
    async fn way(self: &Arc<Self>) -> Result<Way> {
        // Nearly always; what follows costs an allocation.
        if let Some(own) = self.here() {
            return Ok(Way::Own(own));
        }
        loop {
            let changed = self.changed.listen();
            match self.step() {
                Step::Go(way) => return Ok(way),
                Step::Again => {}
                Step::Fetch(session, jobs) => {
                    let link = Arc::clone(self);
                    // Also where whoever asks goes: it would be between the two for ever.
                    spawn_to_end(async move { link.fetch(session, jobs).await }).await;
                }
                Step::Wait(until) if until <= now() => return Err(Error::IO),
                Step::Wait(until) => {
                    let _ = timeout(until - now(), changed).await;
                }
            }
        }
    }

    /// This thread's own connection, if it has one.
    fn here(&self) -> Option<Own> {
        let state = self.lock();
        matches!(state.stage, Stage::Open { .. }).then(|| Own::of(self.id, state.session)).flatten()
    }

    fn step(self: &Arc<Self>) -> Step {
        self.try_again();
        let mut state = self.lock();
        let session = state.session;
        match &mut state.stage {
            Stage::Open { jobs, is_at_work } => {
                if let Some(own) = Own::of(self.id, session) {
                    return Step::Go(Way::Own(own));
                }
                let Some(first) = jobs.first().cloned() else { return Step::Again };
                if !*is_at_work && reactor::is_worker() {
                    jobs.clear();
                    state.stage = Stage::Moving;
                    return Step::Fetch(session, first);
                }
                if state.about.has_common_flushes() && reactor::is_worker() && lane::may_try(self.id, session)
                {
                    drop(state);
                    let link = Arc::clone(self);
                    spawn(async move { link.open_another(session).await });
                }
                Step::Go(Way::Other(session, first))
            }
            Stage::Ready(_) => {
                let Stage::Ready(established) = std::mem::replace(&mut state.stage, Stage::Moving) else {
                    unreachable!("matched above")
                };
                let jobs = vec![lane::start(self, session, *established)];
                state.stage = Stage::Open { jobs, is_at_work: reactor::is_worker() };
                self.changed.notify(usize::MAX);
                Step::Again
            }
            // Not for longer than connecting may take.
            Stage::Moving => Step::Wait(now() + PATIENCE),
            Stage::Down { until, .. } => Step::Wait(*until),
        }
    }

    /// Has somebody try to connect, if nobody does.
    fn try_again(self: &Arc<Self>) {
        let is_mine = match &mut self.lock().stage {
            Stage::Down { is_tried, .. } => !std::mem::replace(is_tried, true),
            _ => false,
        };
        if is_mine {
            spawn(reconnect(Trying { link: Arc::downgrade(self) }));
        }
    }

    /// A connection of this thread's own, beside those that there are. If none is to be had, others
    /// are asked for as long as the session lasts.
    async fn open_another(self: &Arc<Self>, session: u64) {
        let established = match self.terms.establish().await {
            Ok(established) => established,
            Err(error) => return self.complain(&error.in_full()),
        };
        let mut state = self.lock();
        if state.session == session
            && established.about().is_alike(&state.about)
            && let Stage::Open { jobs, .. } = &mut state.stage
        {
            jobs.push(lane::start(self, session, established));
        }
    }

    /// Gets the conversation from the thread that has it, for whoever asks next.
    async fn fetch(self: &Arc<Self>, session: u64, jobs: Sender<Job>) {
        if let Some(established) = self.take(session, jobs).await {
            let mut state = self.lock();
            if state.session == session && matches!(state.stage, Stage::Moving) {
                state.session += 1;
                state.stage = Stage::Ready(Box::new(established));
            }
        }
        self.changed.notify(usize::MAX);
    }

    /// The same, for who asks; the stage is to be `Moving`. If the connection breaks, it is not any
    /// more.
    async fn take(self: &Arc<Self>, session: u64, jobs: Sender<Job>) -> Option<Established> {
        let (tell, told) = async_channel::bounded(1);
        let left = match jobs.send(Job::Leave(tell)).await {
            Ok(()) => told.recv().await.ok().flatten(),
            Err(_) => None,
        };
        if left.is_none() {
            self.lose(session, Break::Server, "it broke as it was to go to another thread");
        }
        left
    }

    /// Where the conversation is, which nobody begins anything with from here on.
    fn set_moving(&self) -> Option<(u64, Where)> {
        let mut state = self.lock();
        let session = state.session;
        let found = match std::mem::replace(&mut state.stage, Stage::Moving) {
            Stage::Ready(established) => Where::Here(established),
            Stage::Open { jobs, .. } => Where::There(jobs.into_iter().next()?),
            other => {
                state.stage = other;
                return None;
            }
        };
        Some((session, found))
    }

    /// Leaves the conversation to whoever asks next.
    pub(super) async fn leave(self: &Arc<Self>) {
        match self.set_moving() {
            Some((session, Where::There(jobs))) => self.fetch(session, jobs).await,
            Some((_, Where::Here(established))) => self.lock().stage = Stage::Ready(established),
            None => {}
        }
    }

    /// Speaks to the server anew, and learns what it says of the export now. What is in flight is
    /// waited for, and what comes meanwhile waits.
    ///
    /// # Errors
    /// Where the server cannot be reached.
    pub(super) async fn reopen(self: &Arc<Self>) -> Result<()> {
        self.flush().await?;
        let Some((session, place)) = self.set_moving() else { return Err(Error::IO) };
        let before = match place {
            Where::Here(established) => *established,
            Where::There(jobs) => self.take(session, jobs).await.ok_or(Error::IO)?,
        };
        client::Client::start(before).disconnect().await;
        let anew = match self.terms.establish().await {
            Ok(established) => match self.suits(established.about(), 0) {
                Ok(()) => Some(established),
                Err(why) => {
                    self.complain(&why);
                    None
                }
            },
            Err(error) => {
                self.complain(&error.in_full());
                None
            }
        };
        let mut state = self.lock();
        state.session += 1;
        let result = match anew {
            Some(established) => {
                state.about = established.about().clone();
                self.size_bytes.store(whole_blocks(state.about.size_bytes, &self.opened), Relaxed);
                state.stage = Stage::Ready(Box::new(established));
                Ok(())
            }
            None => {
                state.stage = Stage::Down { until: now() + self.terms.reconnect_delay, is_tried: false };
                Err(Error::IO)
            }
        };
        drop(state);
        self.changed.notify(usize::MAX);
        result
    }
}

/// In whole blocks of this server.
fn whole_blocks(size_bytes: u64, about: &About) -> u64 {
    size_bytes & !(u64::from(about.minimum_block) - 1)
}

impl Home for Link {
    fn id(&self) -> u64 {
        self.id
    }

    /// With it, the session is.
    fn lose(self: &Arc<Self>, session: u64, by: Break, why: &str) {
        let forgotten = {
            let mut state = self.lock();
            if state.session != session || matches!(state.stage, Stage::Down { .. }) {
                return;
            }
            state.session += 1;
            state.pause = match std::mem::take(&mut state.has_answered) {
                true => FIRST_PAUSE,
                // Whoever waits meanwhile is not to give up because of it.
                false => (2 * state.pause).clamp(FIRST_PAUSE, self.longest_pause()),
            };
            state.breaks += u64::from(by == Break::Server);
            let patience = match by {
                Break::Server => self.terms.reconnect_delay,
                Break::Thread => self.terms.reconnect_delay.max(PATIENCE),
            };
            // Those who could send jobs go, so what is left of the session ends.
            state.stage = Stage::Down { until: now() + patience, is_tried: false };
            let forgotten = by == Break::Server
                && self.terms.flushes
                && state.about.can_flush()
                && !self.retries()
                && state.written > state.covered;
            state.lost |= forgotten;
            forgotten
        };
        let nbd = &self.terms.name;
        if by == Break::Server
            && let Some(left_out) = self.breaks_told.line_of(now(), BREAKS_IN_FULL)
        {
            tracing::warn!(%nbd, why, left_out, "the connection to the server is lost");
        }
        if forgotten {
            tracing::error!(
                %nbd,
                "what was written since the last flush may be lost with the server, so flushes fail from now on (open the disk again; with reconnect-delay it would be written again)"
            );
        }
        self.changed.notify(usize::MAX);
        // Whether somebody asks or not: the next one should find it there.
        if by == Break::Server {
            self.try_again();
        }
    }
}

/// A request that waits for its answer.
struct InFlight<'a> {
    link: &'a Link,
    number: u64,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.link.in_flight.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

/// A change that is kept. Where nobody waits for its outcome any more, it may have taken effect.
struct Kept<'a> {
    link: &'a Link,
    number: u64,
}

impl Kept<'_> {
    fn ended(self, is_done: bool) {
        if !is_done {
            self.link.lock().unflushed.failed(self.number);
        }
    }
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.link.lock().unflushed.abandoned(self.number);
        self.link.ended.notify(usize::MAX);
    }
}
