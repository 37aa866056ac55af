//! Requests that the device failed: counted, logged, reported; returned to the client with the
//! error, or kept waiting until the disk is resumed.
//!
//! ```text
//!   attempt ─► fails ─► stop? ── no ──► the client receives the error
//!      ▲                  │
//!      └── resume ◄── disk stopped: this request and all later ones wait
//! ```
//!
//! Names and defaults are QEMU's `rerror` and `werror`, except for `werror`'s default: clients of a
//! server expect errors. There is no `ignore`: it would acknowledge lost data, and return content
//! that was never written.

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
    log_rate_limit::LogRateLimit,
    select::first,
};

use crate::recorder::DiskOperation;

/// Policy for requests that the device failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Return the error to the client.
    #[default]
    Report,
    /// Stop the disk if the device is full; return other errors. For writes only.
    Enospc,
    /// Stop the disk.
    Stop,
}

impl OnError {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Report, Self::Enospc, Self::Stop];
    /// Policies for reads, which cannot fail for lack of space.
    pub const READ_POLICIES: [Self; 2] = [Self::Report, Self::Stop];

    /// Name, as users write it.
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
                "is not supported: lost writes would be acknowledged (use report, enospc or stop)".to_owned()
            }
            _ => "is not an error policy (report, enospc, stop)".to_owned(),
        })
    }
}

/// Error policies of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPolicies {
    /// For reads: one of [`OnError::READ_POLICIES`].
    pub read: OnError,
    /// For all other requests.
    pub write: OnError,
}

impl ErrorPolicies {
    /// True if an error may stop the disk.
    pub fn may_stop(self) -> bool {
        self != Self::default()
    }
}

/// Class of requests whose errors are counted separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ErrorClass {
    Read,
    /// Writes and write-zeroes.
    Write,
    Flush,
    Discard,
}

impl DiskOperation {
    fn kind(self) -> ErrorClass {
        match self {
            Self::Read => ErrorClass::Read,
            Self::Write | Self::WriteZeroes => ErrorClass::Write,
            Self::Flush => ErrorClass::Flush,
            Self::Discard => ErrorClass::Discard,
        }
    }

    /// Name in the log.
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

/// Number of requests that the device failed since the disk was opened. A request that waited and
/// failed again counts again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Errors {
    /// Reads.
    pub reads: u64,
    /// Writes and write-zeroes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards.
    pub discards: u64,
}

/// A failure, for an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestFailure {
    /// Read for reads, write for all other requests.
    pub direction: Direction,
    /// Error of the device.
    pub error: Error,
    /// True if it stopped the disk.
    pub stops: bool,
}

/// Cancel token for requests that wait on a stopped disk. Once cancelled, they fail with the error
/// that stopped the disk.
#[derive(Debug, Default)]
pub struct CancelToken {
    is_cancelled: AtomicBool,
    event: Event,
}

impl CancelToken {
    /// Cancels the waiting requests.
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::SeqCst);
        self.event.notify(usize::MAX);
    }

    /// Resets the token, for later attempts.
    pub fn reset(&self) {
        self.is_cancelled.store(false, Ordering::SeqCst);
    }
}

/// The failures of a disk. Shared by all threads; outlives the disk for the reporter of events.
#[derive(Debug, Default)]
pub struct Failures {
    counts: [AtomicU64; 4],
    /// One rate limit for each class, so that none hides another.
    logs: [LogRateLimit; 4],
    /// Copy of `state.stopped_by.is_some()`, which every request reads.
    stopped: AtomicBool,
    /// Copy of `state.policies.may_stop()`.
    may_stop: AtomicBool,
    state: Mutex<FailureState>,
    resumed: Event,
    reported: Event,
    /// Number of requests that waited and have not completed another attempt since.
    waiting: AtomicUsize,
    retried: Event,
}

#[derive(Debug, Default)]
struct FailureState {
    policies: ErrorPolicies,
    stopped_by: Option<Error>,
    /// True once the disk is being closed: errors no longer stop it.
    is_closing: bool,
    /// Failures that were not reported yet.
    unreported: UnreportedFailures,
}

/// The last failure of each direction, unless an earlier one stopped the disk.
#[derive(Debug, Default)]
struct UnreportedFailures([Option<RequestFailure>; 2]);

impl UnreportedFailures {
    fn put(&mut self, failure: RequestFailure) {
        let last = &mut self.0[failure.direction.index()];
        if !last.is_some_and(|last| last.stops) {
            *last = Some(failure);
        }
    }

    /// Removes and returns the failure that stopped the disk; without one, any failure, or none
    /// with `only_stops`.
    fn take(&mut self, only_stops: bool) -> Option<RequestFailure> {
        let stops = self.0.iter_mut().find_map(|failure| failure.take_if(|failure| failure.stops));
        stops.or_else(|| self.0.iter_mut().filter(|_| !only_stops).find_map(Option::take))
    }
}

impl Failures {
    fn lock(&self) -> MutexGuard<'_, FailureState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of failures so far.
    pub fn errors(&self) -> Errors {
        let get = |kind: ErrorClass| self.counts[kind as usize].load(Ordering::Relaxed);
        Errors {
            reads: get(ErrorClass::Read),
            writes: get(ErrorClass::Write),
            flushes: get(ErrorClass::Flush),
            discards: get(ErrorClass::Discard),
        }
    }

    /// Adds the counts of another process that served the disk before.
    pub fn add_errors(&self, errors: Errors) {
        let Errors { reads, writes, flushes, discards } = errors;
        for (kind, count) in [
            (ErrorClass::Read, reads),
            (ErrorClass::Write, writes),
            (ErrorClass::Flush, flushes),
            (ErrorClass::Discard, discards),
        ] {
            self.counts[kind as usize].fetch_add(count, Ordering::Relaxed);
        }
    }

    /// Policies in force.
    pub fn policies(&self) -> ErrorPolicies {
        self.lock().policies
    }

    /// Changes the policies for later failures. A stopped disk stays stopped.
    pub fn set_policies(&self, policies: ErrorPolicies) {
        self.lock().policies = policies;
        self.may_stop.store(policies.may_stop(), Ordering::Relaxed);
    }

    /// The error that stopped the disk, while it is stopped.
    pub fn stopped_by(&self) -> Option<Error> {
        self.lock().stopped_by
    }

    /// Resumes a stopped disk: failed requests are retried. False if it was not stopped.
    pub fn resume(&self) -> bool {
        let mut state = self.lock();
        let was_stopped = state.stopped_by.take().is_some();
        self.stopped.store(false, Ordering::SeqCst);
        drop(state);
        self.resumed.notify(usize::MAX);
        was_stopped
    }

    /// Waits until all requests that waited before [`Failures::resume`] have been retried, or the
    /// disk has stopped again; returns the error in that case.
    pub async fn wait_until_retried(&self) -> Option<Error> {
        loop {
            let retried = self.retried.listen();
            // A retry that stops the disk again does so before it decrements `waiting`.
            let waiting = self.waiting.load(Ordering::SeqCst);
            let stopped_by = self.stopped_by();
            if waiting == 0 || stopped_by.is_some() {
                return stopped_by;
            }
            retried.await;
        }
    }

    /// Ends waiting permanently, before the disk is closed: waiting requests fail with their error,
    /// and later requests do not wait.
    pub fn stop_waiting(&self) {
        self.lock().is_closing = true;
        self.resume();
    }

    /// Waits for a failure that was not reported yet, and returns it. Of several in one direction,
    /// only the one that stopped the disk is returned, or else the last. With `only_stops`, waits
    /// for a failure that stops the disk.
    pub async fn next(&self, only_stops: bool) -> RequestFailure {
        loop {
            let reported = self.reported.listen();
            if let Some(failure) = self.lock().unreported.take(only_stops) {
                return failure;
            }
            reported.await;
        }
    }

    /// True if a request that begins now may have to wait, and so must keep its data.
    pub fn may_wait(&self) -> bool {
        self.may_stop.load(Ordering::Relaxed) || self.stopped.load(Ordering::Acquire)
    }

    /// Counts and reports the failure of a request that does not wait.
    pub(super) fn report(&self, request: &RequestInfo<'_>, error: Error) {
        if is_of_device(error) {
            self.report_and_check(request, error, false);
        }
    }

    /// Attempts `request` until its result can be returned to the client. After a failure,
    /// `may_hold` returns whether a retry is possible.
    pub(super) async fn run_until_done<T>(
        &self,
        request: RequestInfo<'_>,
        may_hold: impl Fn() -> bool,
        mut attempt: impl AsyncFnMut() -> Result<T>,
    ) -> Result<T> {
        let mut failed = None;
        loop {
            // Held until the result of the next attempt is known.
            let _waiting = if self.stopped.load(Ordering::Acquire) {
                let waiting = WaitingRequest::new(self);
                // Cancelled: the error is the request's own if it was attempted, else the one that
                // stopped the disk.
                self.wait_for_resume(request.cancel_token)
                    .await
                    .map_err(|stopped_by| failed.unwrap_or(stopped_by))?;
                Some(waiting)
            } else {
                None
            };
            match attempt().await {
                Err(error) if is_of_device(error) => {
                    if !self.report_and_check(&request, error, may_hold()) {
                        return Err(error);
                    }
                    failed = Some(error);
                }
                result => return result,
            }
        }
    }

    /// Waits until the disk is resumed; fails with the error that stopped it if the token is
    /// cancelled.
    async fn wait_for_resume(&self, cancel_token: Option<&CancelToken>) -> Result<()> {
        // Never notified; stands in for a missing cancel token.
        let never = Event::new();
        loop {
            let resumed = self.resumed.listen();
            let cancelled = cancel_token.map_or(&never, |cancel_token| &cancel_token.event).listen();
            let Some(stopped_by) = self.stopped_by() else { return Ok(()) };
            // Checked after listening: a cancellation in between is not missed.
            if cancel_token.is_some_and(|cancel_token| cancel_token.is_cancelled.load(Ordering::SeqCst)) {
                return Err(stopped_by);
            }
            first(resumed, cancelled).await;
            if self.lock().is_closing {
                return Err(stopped_by);
            }
        }
    }

    /// Counts and reports a failure; returns true if its request must wait.
    fn report_and_check(&self, request: &RequestInfo<'_>, error: Error, may_hold: bool) -> bool {
        let direction = request.operation.direction();
        let mut state = self.lock();
        let policy = match direction {
            Direction::Read => state.policies.read,
            Direction::Write => state.policies.write,
        };
        let is_held = may_hold && policy.stops(error) && !state.is_closing;
        if !is_held && request.operation == DiskOperation::Read && request.requests > 1 {
            // The merged requests are retried one by one, and each retry reports its own failure.
            return false;
        }
        // Only the first failure stops the disk; requests that fail later wait too.
        let stops = is_held && state.stopped_by.is_none();
        if stops {
            state.stopped_by = Some(error);
            // Under the lock, so that `stopped` and `stopped_by` agree.
            self.stopped.store(true, Ordering::Release);
        }
        state.unreported.put(RequestFailure { direction, error, stops });
        drop(state);
        self.counts[request.operation.kind() as usize].fetch_add(request.requests, Ordering::Relaxed);
        self.reported.notify(usize::MAX);
        self.log(request, error);
        if stops {
            let disk = request.disk;
            tracing::error!(disk, %error, "the disk is stopped: its requests wait until it is resumed");
        }
        is_held
    }

    fn log(&self, request: &RequestInfo<'_>, error: Error) {
        if let Some(suppressed) = self.logs[request.operation.kind() as usize].try_log(reactor::coarse_now())
        {
            let RequestInfo { disk, operation, offset, length, .. } = *request;
            tracing::error!(disk, request = operation.name(), offset, length, %error, suppressed, "a request failed");
        }
    }
}

/// A request that waits, or is being retried.
struct WaitingRequest<'a>(&'a Failures);

impl<'a> WaitingRequest<'a> {
    fn new(failures: &'a Failures) -> Self {
        failures.waiting.fetch_add(1, Ordering::SeqCst);
        Self(failures)
    }
}

impl Drop for WaitingRequest<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
        self.0.retried.notify(usize::MAX);
    }
}

/// Description of a request for its failures.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestInfo<'a> {
    pub(super) disk: &'a str,
    pub(super) operation: DiskOperation,
    pub(super) offset: u64,
    pub(super) length: u64,
    /// Number of merged client requests.
    pub(super) requests: u64,
    pub(super) cancel_token: Option<&'a CancelToken>,
}

/// True for errors of the device. Invalid requests, unsupported fast operations and faults in the
/// client's memory are the client's errors.
fn is_of_device(error: Error) -> bool {
    let request_errors =
        [Error::INVALID, Error::NOT_PERMITTED, Error::UNSUPPORTED, Error::SHUTDOWN, Error::FAULT];
    !request_errors.contains(&error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_direction_hides_the_other() {
        let failure = |direction, error, stops| RequestFailure { direction, error, stops };
        let (read, write) = (Direction::Read, Direction::Write);
        let mut unreported = UnreportedFailures::default();
        for (direction, error) in [(write, Error::NO_SPACE), (read, Error::INVALID), (read, Error::IO)] {
            unreported.put(failure(direction, error, false));
        }
        assert_eq!(unreported.take(true), None, "nothing has stopped it");
        assert_eq!(unreported.take(false), Some(failure(read, Error::IO, false)));
        assert_eq!(unreported.take(false), Some(failure(write, Error::NO_SPACE, false)));
        assert_eq!(unreported.take(false), None);
        // A failure that stopped the disk comes first, and is not replaced.
        unreported.put(failure(read, Error::IO, false));
        unreported.put(failure(write, Error::NO_SPACE, true));
        unreported.put(failure(write, Error::IO, false));
        assert_eq!(unreported.take(true), Some(failure(write, Error::NO_SPACE, true)));
        assert_eq!(unreported.take(false), Some(failure(read, Error::IO, false)));
    }
}
