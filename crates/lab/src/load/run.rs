//! One job: a task for each request that may be in flight.
//!
//! ```text
//!   task 1 ─► take ─► request ─► completed ─┐      a draining flush: tasks in `take` wait until the last request in flight
//!   task 2 ─► take ─► …                     │      has completed; its task submits the flush and wakes the waiting tasks
//!      …  ◄─────────────────────────────────┘
//! ```
//!
//! In an open loop, a task takes the next due time from the schedule and waits for it. Requests
//! that are late because all tasks are busy need no memory: the schedule generates their due times
//! when a task is free. For each request, only the data path allocates, and the clock is read once.
//! Each reader has a separate position and separate tasks.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    rc::Rc,
    sync::Arc,
    task::{Poll, Waker},
};

use policy::time::{Duration, Instant};
use reactor::{
    buffer::{ALIGNMENT, IoBuffer},
    error::Result,
    now, spawn_joinable,
};

use super::{
    FailedLoad, LoadJob, LoadOutcome, LoadTarget,
    measured::{LoadRecorder, RequestKind, SentRequest},
    offsets::{LoadReader, OffsetGenerator},
    open_loop::ArrivalSchedule,
};

enum NextAction {
    Request { offset: u64, kind: RequestKind },
    Flush,
    Wait,
    Done,
}

struct RunningJob {
    job: LoadJob,
    target: LoadTarget,
    /// Data of a write, from [`RunningJob::first`] on, aligned for any device; empty for reads.
    content: Arc<[u8]>,
    first: usize,
    offsets: OffsetGenerator,
    readers: Vec<LoadReader>,
    kinds: RefCell<fastrand::Rng>,
    schedule: Option<RefCell<ArrivalSchedule>>,
    recorder: RefCell<LoadRecorder>,
    from: Instant,
    until: Instant,
    sent: Cell<u64>,
    /// Number of due times after the ramp that tasks have taken. Each leads to a request, unless
    /// the load ends first.
    scheduled: Cell<u64>,
    answered: Cell<u64>,
    written: Cell<u64>,
    in_flight: Cell<u32>,
    flush: Cell<FlushState>,
    failed: Cell<Option<(SentRequest, reactor::error::Error)>>,
    waiting: RefCell<Vec<Waker>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FlushState {
    NotDue,
    Due,
    InFlight,
}

pub(crate) async fn run_job(
    job: impl Into<LoadJob>,
    target: impl Into<LoadTarget>,
) -> std::result::Result<LoadOutcome, FailedLoad> {
    let run = Rc::new(RunningJob::new(job.into(), target.into()));
    let tasks: Vec<_> = (0..run.job.load.depth)
        .flat_map(|_| 0..run.readers.len())
        .map(|reader| spawn_joinable(Rc::clone(&run).task(reader)))
        .collect();
    // The tasks end by themselves; awaiting them in order costs nothing.
    let all = async {
        for task in tasks {
            task.await;
        }
    };
    // Only a remote target is abandoned, because it may never complete a request. Requests to a
    // local disk complete, and the kernel uses their buffers until then.
    let overdue = if run.target.may_never_answer() {
        run.job.stop.unless_overdue(all).await.is_none()
    } else {
        all.await;
        false
    };
    let end = now();
    let outcome = LoadOutcome {
        elapsed: end - run.from,
        slowest: run.readers.iter().map(|reader| reader.answered.get()).min().unwrap_or_default(),
        // A flush in flight is not counted in `in_flight`.
        unanswered: if overdue { run.in_flight.get().max(1).into() } else { 0 },
        measured: run.recorder.replace(LoadRecorder::new(end)).end(run.behind(end)),
    };
    match run.failed.get() {
        Some((request, error)) => Err(FailedLoad { request, error, outcome: Box::new(outcome) }),
        None => Ok(outcome),
    }
}

impl RunningJob {
    fn new(job: LoadJob, target: LoadTarget) -> Self {
        let load = &job.load;
        let content: Arc<[u8]> =
            load.write.map_or_else(Vec::new, |byte| vec![byte; load.block_bytes + ALIGNMENT]).into();
        // One seed for everything: the same options send the same requests at the same times.
        let seed = load.pattern.random.unwrap_or_default();
        // Offsets are drawn by one generator, not by the tasks: their order does not depend on
        // completions.
        let offsets =
            OffsetGenerator::new(load.pattern.clone(), load.block_bytes as u64, job.locality, job.part);
        let began = now();
        let from = began + job.ramp;
        let schedule = |arrivals| RefCell::new(ArrivalSchedule::new(arrivals, began, seed, job.part));
        Self {
            first: content.as_ptr().align_offset(ALIGNMENT),
            content,
            readers: offsets.readers(load.readers, job.part),
            offsets,
            // Independent of the seed of the offsets: the mix of reads and writes must not change
            // the offsets.
            kinds: RefCell::new(fastrand::Rng::with_seed(job.part.seed(!seed))),
            schedule: job.arrivals.map(schedule),
            recorder: RefCell::new(LoadRecorder::new(from)),
            from,
            until: job.runtime.map_or(Instant::MAX, |runtime| from + runtime),
            sent: Cell::new(0),
            scheduled: Cell::new(0),
            answered: Cell::new(0),
            written: Cell::new(0),
            in_flight: Cell::new(0),
            flush: Cell::new(FlushState::NotDue),
            failed: Cell::new(None),
            waiting: RefCell::default(),
            target,
            job,
        }
    }

    async fn task(self: Rc<Self>, reader: usize) {
        let reader = &self.readers[reader];
        let mut at = now();
        let mut due = None;
        loop {
            // A due time that was not used because of a flush stays valid for the next turn.
            if let (None, Some(schedule)) = (due, &self.schedule) {
                due = self.wait_until_due(schedule, at).await;
                if due.is_none() {
                    break;
                }
                at = now();
            }
            // Without a schedule a request is due when the task is free: a closed loop.
            match self.next_action(reader, due.unwrap_or(at), at) {
                NextAction::Request { offset, kind } => {
                    if let Some(due) = due {
                        self.recorder.borrow_mut().sent(due, at);
                    }
                    let began = due.take().unwrap_or(at);
                    let result = self.request(offset, kind).await;
                    at = now();
                    self.in_flight.set(self.in_flight.get() - 1);
                    self.record_completion(reader, SentRequest { kind, offset }, began, at, result);
                }
                NextAction::Flush => {
                    let result = self.target.flush().await;
                    let began = at;
                    at = now();
                    // A flush without draining never blocks the writes, and its state is already
                    // reset.
                    if self.flush.get() == FlushState::InFlight {
                        self.flush.set(FlushState::NotDue);
                    }
                    self.recorder.borrow_mut().answered(RequestKind::Flush, began, at);
                    self.record_failure(SentRequest { kind: RequestKind::Flush, offset: 0 }, result);
                    self.wake();
                }
                NextAction::Wait => {
                    self.wait().await;
                    at = now();
                }
                NextAction::Done => break,
            }
        }
        // Tasks may be waiting for a flush that will not be submitted any more.
        self.wake();
    }

    async fn wait_until_due(&self, schedule: &RefCell<ArrivalSchedule>, at: Instant) -> Option<Instant> {
        // Counted when the due time is taken, or many tasks would wait for the last request.
        if self.is_over(at) || self.scheduled.get() >= self.job.load.count {
            return None;
        }
        let due = schedule.borrow().next();
        // The due time is left in the schedule, which `behind` reads.
        if due >= self.until {
            return None;
        }
        schedule.borrow_mut().take();
        if due >= self.from {
            self.scheduled.set(self.scheduled.get() + 1);
        }
        let early = due - at;
        if early > Duration::ZERO {
            self.job.stop.wait(early).await;
        }
        Some(due)
    }

    fn behind(&self, end: Instant) -> Duration {
        let Some(schedule) = &self.schedule else { return Duration::ZERO };
        if self.sent.get() >= self.job.load.count {
            return Duration::ZERO;
        }
        // The time between the first unsent request and the end of the run.
        self.until.min(end) - schedule.borrow().next()
    }

    fn is_over(&self, at: Instant) -> bool {
        self.failed.get().is_some() || self.job.stop.is_stopped() || at >= self.until
    }

    fn next_action(&self, reader: &LoadReader, due: Instant, at: Instant) -> NextAction {
        if self.is_over(at) {
            return NextAction::Done;
        }
        let drain = self.job.load.flush.is_some_and(|flush| flush.drain);
        match self.flush.get() {
            FlushState::NotDue => {}
            // As in qemu-img bench: the flush covers every write before it.
            FlushState::Due if drain && self.in_flight.get() > 0 => return NextAction::Wait,
            FlushState::Due => {
                self.flush.set(if drain { FlushState::InFlight } else { FlushState::NotDue });
                return NextAction::Flush;
            }
            FlushState::InFlight => return NextAction::Wait,
        }
        let sent = self.sent.get();
        if sent == self.job.load.count {
            return NextAction::Done;
        }
        // The ramp's requests are not counted, so the number of measured requests is as configured.
        if due >= self.from {
            self.sent.set(sent + 1);
        }
        self.in_flight.set(self.in_flight.get() + 1);
        let kind = self.kind();
        if kind == RequestKind::Write {
            let written = self.written.get() + 1;
            self.written.set(written);
            // The flush is due after this write; the next task submits it.
            if self.job.load.flush.is_some_and(|flush| written.is_multiple_of(flush.interval)) {
                self.flush.set(FlushState::Due);
            }
        }
        NextAction::Request { offset: self.offsets.next(reader), kind }
    }

    fn kind(&self) -> RequestKind {
        let percent = self.job.read_percent;
        let reads =
            self.job.load.write.is_none() || percent > 0 && self.kinds.borrow_mut().u8(..100) < percent;
        if reads { RequestKind::Read } else { RequestKind::Write }
    }

    async fn request(&self, offset: u64, kind: RequestKind) -> Result<()> {
        let length = self.job.load.block_bytes;
        if kind == RequestKind::Read {
            return self.target.read(offset, length).await;
        }
        self.target.write(offset, IoBuffer::view_of(&self.content, self.first..self.first + length)).await
    }

    fn record_completion(
        &self,
        reader: &LoadReader,
        request: SentRequest,
        began: Instant,
        at: Instant,
        result: Result<()>,
    ) {
        if result.is_ok() {
            self.answered.set(self.answered.get() + 1);
            self.job.answered.set(self.answered.get());
            reader.answered.set(reader.answered.get() + 1);
            self.recorder.borrow_mut().answered(request.kind, began, at);
        }
        self.record_failure(request, result);
    }

    fn record_failure(&self, request: SentRequest, result: Result<()>) {
        // Later failures are consequences or duplicates.
        if let (Err(error), None) = (result, self.failed.get()) {
            self.failed.set(Some((request, error)));
            self.wake();
        }
    }

    async fn wait(&self) {
        let mut waited = false;
        poll_fn(|context| {
            if waited {
                return Poll::Ready(());
            }
            waited = true;
            // Woken at most once: `wake` empties the list.
            self.waiting.borrow_mut().push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn wake(&self) {
        for waker in self.waiting.take() {
            waker.wake();
        }
    }
}
