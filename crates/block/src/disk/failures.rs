//! What becomes of requests that the device fails: counted, logged, told; answered with the error,
//! or held until somebody has made room and says so.
//!
//! ```text
//!   attempt ─► fails ─► stop? ── no ──► the client has the error
//!      ▲                  │
//!      └── resume ◄── disk stopped: this request and all later ones wait, unanswered
//! ```
//!
//! Words and defaults are QEMU's `rerror` and `werror`, but for `werror`'s default: a server's
//! clients have been told of errors so far. There is no `ignore`: it would acknowledge what is
//! lost, and answer reads with what was never written.

use std::{
    fmt,
    str::FromStr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use event_listener::Event;
use policy::request::Direction;

use reactor::{
    error::{Error, Result},
    seldom::Seldom,
};

use crate::recorder::Operation;

/// What is done about a request that the device failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The client has the error.
    #[default]
    Report,
    /// The disk stops where the device is full; other errors are reported. For writes alone.
    Enospc,
    /// The disk stops.
    Stop,
}

impl OnError {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::Report, Self::Enospc, Self::Stop];
    /// Those that reads may have: there is no room that a read could lack.
    pub const OF_READS: [Self; 2] = [Self::Report, Self::Stop];

    /// As users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Enospc => "enospc",
            Self::Stop => "stop",
        }
    }

    fn stops(self, error: Error) -> bool {
        match self {
            Self::Report => false,
            Self::Enospc => error == Error::NO_SPACE,
            Self::Stop => true,
        }
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for OnError {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| match text {
            "ignore" => {
                "is not to be had: lost data would be called safe (use report, enospc or stop)".to_owned()
            }
            _ => "is not a policy for errors; there are report, enospc and stop".to_owned(),
        })
    }
}

/// What is done about errors of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicies {
    /// Of reads: one of [`OnError::OF_READS`].
    pub read: OnError,
    /// Of everything else.
    pub write: OnError,
}

impl ErrorPolicies {
    /// Whether there are errors that stop the disk.
    pub fn may_stop(self) -> bool {
        self != Self::default()
    }
}

/// How errors are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    /// Of data or zeroes.
    Write,
    Flush,
    Discard,
}

impl Operation {
    fn kind(self) -> Kind {
        match self {
            Self::Read => Kind::Read,
            Self::Write | Self::WriteZeroes => Kind::Write,
            Self::Flush => Kind::Flush,
            Self::Discard => Kind::Discard,
        }
    }

    /// In the log.
    fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::WriteZeroes => "write-zeroes",
            Self::Flush => "flush",
            Self::Discard => "discard",
        }
    }
}

/// Requests that the device failed since the disk was opened; one that was held and failed again
/// counts again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Errors {
    /// Reads.
    pub reads: u64,
    /// Writes, of zeroes too.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
}

/// A failure, to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Whether it was a read; all else writes.
    pub direction: Direction,
    /// What the device said.
    pub error: Error,
    /// Whether the disk was stopped by it.
    pub stops: bool,
}

/// Whether somebody still waits for what a stopped disk holds. Once lost, it answers with the error
/// that stopped it.
#[derive(Debug, Default)]
pub struct Patience {
    lost: AtomicBool,
    event: Event,
}

impl Patience {
    /// Nobody waits any more.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
        self.event.notify(usize::MAX);
    }

    /// Somebody waits again, for what is attempted from now on.
    pub fn regain(&self) {
        self.lost.store(false, Ordering::SeqCst);
    }
}

/// The failures of a disk. Shared by all threads; outlives the disk for those who tell of it.
#[derive(Debug, Default)]
pub struct Failures {
    counts: [AtomicU64; 4],
    /// For each kind, so that none hides another.
    logs: [Seldom; 4],
    /// As `state.stopped_by`, to be looked at by every request.
    stopped: AtomicBool,
    /// As `state.policies`.
    may_stop: AtomicBool,
    state: Mutex<State>,
    resumed: Event,
    news: Event,
    /// Requests that were held and have not been tried again since.
    held: AtomicUsize,
    tried: Event,
}

#[derive(Debug, Default)]
struct State {
    policies: ErrorPolicies,
    stopped_by: Option<Error>,
    /// The disk does not stop any more.
    lifted: bool,
    /// Nobody has been told of them.
    untold: Untold,
}

/// The last failure of each direction, unless an earlier one stopped the disk.
#[derive(Debug, Default)]
struct Untold([Option<Failure>; 2]);

impl Untold {
    fn put(&mut self, failure: Failure) {
        let last = &mut self.0[failure.direction.index()];
        if !last.is_some_and(|last| last.stops) {
            *last = Some(failure);
        }
    }

    /// One that stopped the disk, or else any if that will do.
    fn take(&mut self, only_stops: bool) -> Option<Failure> {
        let stops = self.0.iter_mut().find_map(|failure| failure.take_if(|failure| failure.stops));
        stops.or_else(|| self.0.iter_mut().filter(|_| !only_stops).find_map(Option::take))
    }
}

impl Failures {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many there were.
    pub fn errors(&self) -> Errors {
        let get = |kind: Kind| self.counts[kind as usize].load(Ordering::Relaxed);
        Errors {
            reads: get(Kind::Read),
            writes: get(Kind::Write),
            flushes: get(Kind::Flush),
            discards: get(Kind::Discard),
        }
    }

    /// Counts on from what another process has counted.
    pub fn count_on(&self, errors: Errors) {
        let Errors { reads, writes, flushes, discards } = errors;
        for (kind, more) in
            [(Kind::Read, reads), (Kind::Write, writes), (Kind::Flush, flushes), (Kind::Discard, discards)]
        {
            self.counts[kind as usize].fetch_add(more, Ordering::Relaxed);
        }
    }

    /// What is done about them.
    pub fn policies(&self) -> ErrorPolicies {
        self.lock().policies
    }

    /// Does something else about those to come. A disk that is stopped stays so.
    pub fn set_policies(&self, policies: ErrorPolicies) {
        self.lock().policies = policies;
        self.may_stop.store(policies.may_stop(), Ordering::Relaxed);
    }

    /// The error that stopped the disk, while it is stopped.
    pub fn stopped_by(&self) -> Option<Error> {
        self.lock().stopped_by
    }

    /// Lets a stopped disk go on: what failed is tried again. False if it was not stopped.
    pub fn resume(&self) -> bool {
        let mut state = self.lock();
        let was_stopped = state.stopped_by.take().is_some();
        self.stopped.store(false, Ordering::SeqCst);
        drop(state);
        self.resumed.notify(usize::MAX);
        was_stopped
    }

    /// Waits until all that was held before [`Failures::resume`] has been tried again, or the disk
    /// has stopped again: the error then.
    pub async fn tried(&self) -> Option<Error> {
        loop {
            let tried = self.tried.listen();
            // Whoever stops it does that before it counts as tried.
            let held = self.held.load(Ordering::SeqCst);
            let stopped_by = self.stopped_by();
            if held == 0 || stopped_by.is_some() {
                return stopped_by;
            }
            tried.await;
        }
    }

    /// For a disk that comes to its end: what is held is answered with its error, and nothing is
    /// held from now on.
    pub fn lift(&self) {
        self.lock().lifted = true;
        self.resume();
    }

    /// Waits for a failure that nobody has been told of; of several reads, or writes, the last,
    /// unless an earlier one stopped the disk. With `only_stops`, waits for one that stops it.
    pub async fn next(&self, only_stops: bool) -> Failure {
        loop {
            let news = self.news.listen();
            if let Some(failure) = self.lock().untold.take(only_stops) {
                return failure;
            }
            news.await;
        }
    }

    /// Whether a request that begins now may be held, and so must keep its data.
    pub fn may_hold(&self) -> bool {
        self.may_stop.load(Ordering::Relaxed) || self.stopped.load(Ordering::Acquire)
    }

    /// Counts and tells the failure of a request that is not held.
    pub(super) fn tell(&self, request: &Request<'_>, error: Error) {
        if is_of_device(error) {
            self.holds(request, error, false);
        }
    }

    /// Does `request` until it has come to an end that its client is to know. After a failure,
    /// `may_hold` says whether it could be tried again at all.
    pub(super) async fn until_done<T>(
        &self,
        request: Request<'_>,
        may_hold: impl Fn() -> bool,
        mut attempt: impl AsyncFnMut() -> Result<T>,
    ) -> Result<T> {
        let mut failed = None;
        loop {
            // Until its next attempt has been judged.
            let _held = if self.stopped.load(Ordering::Acquire) {
                let held = Held::new(self);
                self.wait(request.patience).await.map_err(|stopped_by| failed.unwrap_or(stopped_by))?;
                Some(held)
            } else {
                None
            };
            match attempt().await {
                Err(error) if is_of_device(error) => {
                    if !self.holds(&request, error, may_hold()) {
                        return Err(error);
                    }
                    failed = Some(error);
                }
                result => return result,
            }
        }
    }

    /// Until the disk goes on; fails with what stopped it if nobody waits for it to.
    async fn wait(&self, patience: Option<&Patience>) -> Result<()> {
        let never = Event::new();
        loop {
            let resumed = self.resumed.listen();
            let lost = patience.map_or(&never, |patience| &patience.event).listen();
            let Some(stopped_by) = self.stopped_by() else { return Ok(()) };
            if patience.is_some_and(|patience| patience.lost.load(Ordering::SeqCst)) {
                return Err(stopped_by);
            }
            either(resumed, lost).await;
            if self.lock().lifted {
                return Err(stopped_by);
            }
        }
    }

    /// Counts and tells a failure, and says whether its request is held.
    fn holds(&self, request: &Request<'_>, error: Error, may_hold: bool) -> bool {
        let direction = request.operation.direction();
        let mut state = self.lock();
        let policy = match direction {
            Direction::Read => state.policies.read,
            Direction::Write => state.policies.write,
        };
        let is_held = may_hold && policy.stops(error) && !state.lifted;
        if !is_held && request.operation == Operation::Read && request.requests > 1 {
            // Each is tried alone now, and tells for itself.
            return false;
        }
        let stops = is_held && state.stopped_by.is_none();
        if stops {
            state.stopped_by = Some(error);
            self.stopped.store(true, Ordering::Release);
        }
        state.untold.put(Failure { direction, error, stops });
        drop(state);
        self.counts[request.operation.kind() as usize].fetch_add(request.requests, Ordering::Relaxed);
        self.news.notify(usize::MAX);
        self.log(request, error);
        if stops {
            let disk = request.disk;
            tracing::error!(disk, %error, "the disk is stopped: its requests wait until it is resumed");
        }
        is_held
    }

    fn log(&self, request: &Request<'_>, error: Error) {
        if let Some(left_out) = self.logs[request.operation.kind() as usize].line(reactor::recently()) {
            let Request { disk, operation, offset, length, .. } = *request;
            tracing::error!(disk, request = operation.name(), offset, length, %error, left_out, "a request failed");
        }
    }
}

/// A request that is held, or is being tried again.
struct Held<'a>(&'a Failures);

impl<'a> Held<'a> {
    fn new(failures: &'a Failures) -> Self {
        failures.held.fetch_add(1, Ordering::SeqCst);
        Self(failures)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
        self.0.tried.notify(usize::MAX);
    }
}

/// A request, as far as its failures are concerned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) disk: &'a str,
    pub(super) operation: Operation,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Of the client's.
    pub(super) requests: u64,
    pub(super) patience: Option<&'a Patience>,
}

/// What breaks a rule, cannot be had fast, or is about its own memory, is the client's affair.
fn is_of_device(error: Error) -> bool {
    let others = [Error::INVALID, Error::NOT_PERMITTED, Error::UNSUPPORTED, Error::SHUTDOWN, Error::FAULT];
    !others.contains(&error)
}

async fn either(first: impl Future<Output = ()>, second: impl Future<Output = ()>) {
    let (mut first, mut second) = (std::pin::pin!(first), std::pin::pin!(second));
    std::future::poll_fn(|context| {
        match first.as_mut().poll(context).is_ready() || second.as_mut().poll(context).is_ready() {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_direction_hides_the_other() {
        let failure = |direction, error, stops| Failure { direction, error, stops };
        let (read, write) = (Direction::Read, Direction::Write);
        let mut untold = Untold::default();
        for (direction, error) in [(write, Error::NO_SPACE), (read, Error::INVALID), (read, Error::IO)] {
            untold.put(failure(direction, error, false));
        }
        assert_eq!(untold.take(true), None, "nothing has stopped it");
        assert_eq!(untold.take(false), Some(failure(read, Error::IO, false)));
        assert_eq!(untold.take(false), Some(failure(write, Error::NO_SPACE, false)));
        assert_eq!(untold.take(false), None);
        // What stopped the disk comes first, and stays.
        untold.put(failure(read, Error::IO, false));
        untold.put(failure(write, Error::NO_SPACE, true));
        untold.put(failure(write, Error::IO, false));
        assert_eq!(untold.take(true), Some(failure(write, Error::NO_SPACE, true)));
        assert_eq!(untold.take(false), Some(failure(read, Error::IO, false)));
    }
}
