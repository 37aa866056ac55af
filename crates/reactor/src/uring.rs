//! The real reactor's driver: one io_uring, the operations in flight on it, and waiting for them.
//!
//! An operation owns the memory that the kernel accesses. If its future is dropped early, the
//! memory moves into the table of operations in flight and stays there until the operation
//! completes. The buffer of a cancelled request is therefore never reused too early.
//!
//! Submissions are batched: an iteration of the reactor's loop first runs the ready tasks and then
//! enters the kernel once. The kernel processes completions only in that call (`DEFER_TASKRUN`), so
//! they never interrupt a task.

use std::{
    cell::{Cell, RefCell, RefMut},
    future::Future,
    io,
    os::fd::AsRawFd,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use io_uring::{IoUring, opcode, squeue, types};
use policy::time::{Duration, Instant, NANOS_PER_SECOND};
use slab::Slab;

use super::{
    Reactor, ReactorDriver, RingCounters, polling_monitor::PollingMonitor, real_now,
    registered_buffers::RegisteredBufferTable, ring_restrictions, wake_up, with_current,
};

/// Submission queue entries; a larger batch is submitted in parts.
const SUBMISSIONS: u32 = 256;
/// Completion queue entries; the kernel keeps those that overflow (`IORING_FEAT_NODROP`).
const COMPLETIONS: u32 = 4096;
/// Time for which [`super::linger`] lets completions accumulate, in microseconds: a few requests of
/// a fast client.
const LINGER_US: u32 = 8;
/// Polling limit of [`PollingMode::Auto`]: the time between two completions of a busy disk. With 50
/// µs a thread sleeps so often that the kernel still migrates it.
const AUTO_LIMIT: Duration = Duration::from_micros(200);
/// Number of queued reads or writes at which they are submitted before the end of an iteration.
/// Otherwise the first of, say, twelve requests would wait for all others, and the device would
/// have less to do concurrently (docs/decisions/0023). The kernel also holds back the requests of
/// one call until its end. Each call costs a VM exit on a virtual machine, so writes, which a
/// device stores in its cache, are held back for longer.
pub(super) const MAX_QUEUED_READS: usize = 4;
pub(super) const MAX_QUEUED_WRITES: usize = 8;
/// Number of tasks that run between two checks of the ring, so that a busy task, or a task group
/// with many tasks, does not delay the completions of other groups.
pub(super) const TASKS_PER_ITERATION: usize = 64;
/// User data of the read of the eventfd, which is not in the table.
const EVENT: u64 = u64::MAX;
/// User data of cancellations, which are not in the table either: their outcome shows in the
/// operation that they cancel.
const CANCELLATION: u64 = u64::MAX - 1;

/// Polling for completions before sleeping.
///
/// Waking a sleeping thread takes tens of microseconds on a virtual machine (the hypervisor has to
/// wake the idle processor), as long as a request of a fast device. The reactor therefore polls,
/// but only while completions arrive faster than the limit: an idle daemon sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollingMode {
    /// Sleeps whenever there is nothing to do.
    Off,
    /// Polls while measurements show that it is worth its cost ([`policy::polling`]).
    Auto,
    /// Polls for up to this time; zero is [`PollingMode::Off`].
    UpTo(Duration),
}

impl std::fmt::Display for PollingMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::UpTo(limit) => write!(f, "{limit:?}"),
        }
    }
}

/// How long to wait for a completion.
#[derive(Clone, Copy)]
enum CompletionWait {
    No,
    Forever,
    For(Duration),
    /// At least [`LINGER_US`], whatever completes; then as `For`.
    Lingering(Duration),
}

/// Limit of the kernel's threads for operations on files (`IORING_REGISTER_IOWQ_MAX_WORKERS`),
/// reduced by the kernel to `RLIMIT_NPROC`. Its default is four for each processor; operations on
/// one file system that has stopped answering would occupy all of them, and block all other files.
/// Files of `storage` bound their own operations.
const FILE_THREADS: u32 = 1 << 20;
/// Time that the end of a ring waits for operations that the kernel does not cancel.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(2);

thread_local! {
    static HAS_UNCANCELLED: Cell<bool> = const { Cell::new(false) };
}

/// True if a ring of this thread ended while the kernel was still executing operations.
pub(super) fn has_uncancelled_operations() -> bool {
    HAS_UNCANCELLED.get()
}

/// Timeout of a wait that another event ends.
const FOREVER: Duration = Duration::from_secs(3600);

enum OperationSlot {
    /// In flight, awaited by a task (or not polled yet).
    Awaited(Option<Waker>),
    /// Completed, result not fetched yet.
    Complete(i32),
    /// In flight, future dropped; owns the memory in use. Never read, only dropped.
    Abandoned(OrphanHandler),
    /// As `Abandoned`, but only the end of the ring ends it: see [`RingOperation::uncancellable`].
    Uncancellable(OrphanHandler),
}

/// Disposes of an operation's resource when its future was dropped; called with the result. Owns
/// the memory that the kernel accesses until then.
type OrphanHandler = Box<dyn FnOnce(i32)>;

pub(super) struct UringDriver {
    ring: RefCell<IoUring>,
    slots: RefCell<Slab<OperationSlot>>,
    /// Tasks to wake after the completion queue was read; kept to reuse its memory.
    woken: RefCell<Vec<Waker>>,
    event_armed: Cell<bool>,
    /// Destination of reads of the eventfd. Boxed, because the kernel writes to it.
    event_counter: Box<Cell<u64>>,
    polling: PollingMode,
    polling_monitor: Option<RefCell<PollingMonitor>>,
    /// Moving average of the time between becoming idle and the next completion.
    typical_gap_ns: Cell<u64>,
    /// True if [`super::linger`] was called since the last wait.
    linger: Cell<bool>,
    /// True if [`super::reap_after_task`] was called: this iteration runs no further tasks.
    reap_requested: Cell<bool>,
    /// Result of [`UringDriver::coarse_now`] in this iteration, once it was called.
    coarse_now: Cell<Option<Instant>>,
    /// True if the kernel can wait for a minimum time (since 6.12).
    can_linger: bool,
    /// Number of device reads and writes queued since the last submission.
    queued_device_io: Cell<usize>,
    buffers: RefCell<RegisteredBufferTable>,
    pub(super) counters: Arc<RingCounters>,
}

impl UringDriver {
    pub(super) fn new(polling: PollingMode) -> io::Result<Self> {
        let ring = build().map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring has no deferred task work; Linux 6.1 or later is needed",
            ),
            _ => error,
        })?;
        let can_linger = ring.params().is_feature_min_timeout();
        let polling_monitor = (polling == PollingMode::Auto).then(|| RefCell::new(PollingMonitor::new()));
        Ok(Self {
            ring: RefCell::new(ring),
            polling_monitor,
            slots: RefCell::default(),
            woken: RefCell::default(),
            event_armed: Cell::new(false),
            event_counter: Box::default(),
            polling,
            typical_gap_ns: Cell::new(u64::MAX),
            linger: Cell::new(false),
            reap_requested: Cell::new(false),
            coarse_now: Cell::new(None),
            can_linger,
            queued_device_io: Cell::new(0),
            buffers: RefCell::default(),
            counters: Arc::default(),
        })
    }

    /// Runs ready tasks, fires timers, submits, reaps; waits if there is nothing else to do.
    pub(super) fn iterate(reactor: &Reactor) {
        let ReactorDriver::Uring(uring) = &reactor.driver else {
            unreachable!("entered with the io_uring driver")
        };
        uring.coarse_now.set(None);
        uring.counters.iterations.add(1);
        reactor.executor.receive();
        for _ in 0..TASKS_PER_ITERATION {
            let Some(runnable) = reactor.executor.pop() else { break };
            runnable.run();
            if uring.reap_requested.take() {
                break;
            }
        }
        // After the tasks, which may have taken long: timers that became due meanwhile fire now.
        let next_timer = fire_timers(reactor);
        uring.arm_event(reactor);
        if reactor.executor.is_idle() {
            uring.wait(reactor, next_timer);
        } else {
            uring.enter(CompletionWait::No);
        }
        uring.reap();
    }

    /// The time on the clock, which is read at most once in an iteration.
    pub(super) fn coarse_now(&self) -> Instant {
        self.coarse_now.get().unwrap_or_else(|| {
            let now = real_now();
            self.coarse_now.set(Some(now));
            now
        })
    }

    pub(super) fn linger(&self) {
        self.linger.set(self.can_linger);
    }

    pub(super) fn reap_after_task(&self) {
        self.reap_requested.set(true);
    }

    /// Submits the queue and processes completions; waits as specified.
    fn enter(&self, wait: CompletionWait) {
        self.queued_device_io.set(0);
        let mut ring = self.ring.borrow_mut();
        let (queued, deferred) = {
            let submission = ring.submission();
            (submission.len(), submission.taskrun() || submission.cq_overflow())
        };
        let result = match wait {
            CompletionWait::No if queued == 0 && !deferred => return,
            CompletionWait::No => {
                const GETEVENTS: u32 = 1; // IORING_ENTER_GETEVENTS: run deferred task work even if nothing is awaited
                let queued = u32::try_from(queued).expect("the queue has 256 entries");
                // SAFETY: no argument structure is passed, so nothing has to outlive the call.
                unsafe { ring.submitter().enter::<()>(queued, 0, GETEVENTS, None) }
            }
            CompletionWait::Forever => ring.submit_and_wait(1),
            CompletionWait::For(time) => {
                let timespec = types::Timespec::from(time);
                ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&timespec))
            }
            CompletionWait::Lingering(time) => {
                let timespec = types::Timespec::from(time);
                let arguments = types::SubmitArgs::new().timespec(&timespec).min_wait_usec(LINGER_US);
                // A number that cannot be reached in the time, so the minimum time decides, and
                // after it one completion is enough.
                ring.submitter().submit_with_args(SUBMISSIONS as usize, &arguments)
            }
        };
        match result.map_err(|error| error.raw_os_error()) {
            // EBUSY, EAGAIN: the kernel is short of resources; reaping completions frees some, and
            // the next iteration submits the rest.
            Ok(taken) => self.counters.submitted.add(taken as u64),
            Err(Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)) => {}
            Err(error) => panic!("io_uring_enter failed with {error:?}; this is a bug in weir"),
        }
    }

    /// Waits for a completion, a wake-up from another thread, or `next_timer`. Polls first if that
    /// has paid off recently.
    fn wait(&self, reactor: &Reactor, next_timer: Option<Instant>) {
        let may_linger = self.linger.take();
        let began = if self.polling == PollingMode::Off { Instant::ZERO } else { real_now() };
        let limit = self.limit(began);
        let may_poll = !limit.is_zero();
        if may_poll && !may_linger && self.typical_gap_ns.get() <= duration_ns(limit) {
            self.enter(CompletionWait::No);
            if self.poll(reactor, (began + limit).min(next_timer.unwrap_or(Instant::MAX))) {
                self.enter(CompletionWait::No);
                self.record_gap(began, limit);
                wake_up::notify_wake_up();
                return;
            }
        }
        if !reactor.executor.prepare_sleep() {
            self.enter(CompletionWait::No);
            return;
        }
        self.counters.sleeps.add(1);
        let time = next_timer.map(|instant| instant - real_now());
        self.enter(match (may_linger, time) {
            (true, time) => CompletionWait::Lingering(time.unwrap_or(FOREVER)),
            (false, Some(time)) => CompletionWait::For(time),
            (false, None) => CompletionWait::Forever,
        });
        reactor.executor.wake_up();
        wake_up::notify_wake_up();
        if may_poll {
            self.record_gap(began, limit);
        }
    }

    /// How long to poll now.
    fn limit(&self, now: Instant) -> Duration {
        match (self.polling, &self.polling_monitor) {
            (PollingMode::UpTo(limit), _) => limit,
            (_, Some(monitor)) if monitor.borrow_mut().should_poll(now) => AUTO_LIMIT,
            _ => Duration::ZERO,
        }
    }

    /// Polls until there is something to do, or until `deadline`. Returns true in the first case.
    fn poll(&self, reactor: &Reactor, deadline: Instant) -> bool {
        loop {
            if self.has_completions() || !reactor.executor.is_idle() {
                return true;
            }
            if real_now() >= deadline {
                return false;
            }
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
    }

    fn has_completions(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        !ring.completion().is_empty() || ring.submission().taskrun()
    }

    /// Records an idle time. One long pause resets the average at once, while short ones lower it
    /// slowly, so polling begins only in a steady stream.
    fn record_gap(&self, began: Instant, limit: Duration) {
        let gap = real_now().nanos_since(began);
        let limit = duration_ns(limit);
        let gap = gap.min(limit.saturating_mul(16));
        let typical = self.typical_gap_ns.get().min(limit.saturating_mul(16));
        self.typical_gap_ns.set(typical - typical / 8 + gap / 8);
    }

    /// Reads completions off the ring and wakes their tasks.
    fn reap(&self) {
        let mut woken = self.woken.take();
        let mut orphans = Vec::new();
        {
            let mut ring = self.ring.borrow_mut();
            let mut slots = self.slots.borrow_mut();
            let completions = ring.completion();
            if let Some(monitor) = &self.polling_monitor {
                monitor.borrow_mut().count(completions.len());
            }
            self.counters.completed.add(completions.len() as u64);
            for completion in completions {
                match completion.user_data() {
                    EVENT => {
                        self.event_armed.set(false);
                        continue;
                    }
                    CANCELLATION => continue,
                    _ => {}
                }
                let key = usize::try_from(completion.user_data()).expect("keys are indices of the table");
                match &mut slots[key] {
                    OperationSlot::Awaited(waker) => {
                        woken.extend(waker.take());
                        slots[key] = OperationSlot::Complete(completion.result());
                    }
                    OperationSlot::Abandoned(_) | OperationSlot::Uncancellable(_) => {
                        if let OperationSlot::Abandoned(orphan) | OperationSlot::Uncancellable(orphan) =
                            slots.remove(key)
                        {
                            orphans.push((orphan, completion.result()));
                        }
                    }
                    OperationSlot::Complete(_) => unreachable!("one completion for one operation"),
                }
            }
        }
        // Outside of the borrows: waking and dropping run foreign code.
        for (orphan, result) in orphans {
            orphan(result);
        }
        for waker in woken.drain(..) {
            waker.wake();
        }
        *self.woken.borrow_mut() = woken;
    }

    /// Keeps one read of the eventfd in flight, for wake-ups from other threads.
    fn arm_event(&self, reactor: &Reactor) {
        if self.event_armed.replace(true) {
            return;
        }
        // Announced before the last check for arrivals: see `RemoteHandle::send`.
        let fd = types::Fd(reactor.executor.remote().event.as_raw_fd());
        let entry = opcode::Read::new(fd, self.event_counter.as_ptr().cast(), 8).build().user_data(EVENT);
        // SAFETY: `event_counter` is boxed and lives as long as the ring; `cancel_all` ends the
        // read before either is dropped.
        unsafe { self.push(&entry) };
    }

    /// # Safety
    /// The memory that `entry` points to must stay valid until its completion has been reaped.
    unsafe fn push(&self, entry: &squeue::Entry) {
        loop {
            // SAFETY: guaranteed by the caller.
            if unsafe { self.ring.borrow_mut().submission().push(entry) }.is_ok() {
                return;
            }
            // The queue is full: submit it. If the kernel is short of resources, completions must
            // be reaped first.
            self.enter(CompletionWait::No);
            self.reap();
        }
    }

    /// Counts an operation of a device, and submits the queue once `max_queued` are counted. If the
    /// kernel is short of resources, the submission at the end of the iteration tries again.
    fn count_and_submit(&self, max_queued: usize) {
        let queued_io = self.queued_device_io.get() + 1;
        self.queued_device_io.set(queued_io);
        if queued_io >= max_queued {
            self.queued_device_io.set(0);
            let mut ring = self.ring.borrow_mut();
            let queued = u32::try_from(ring.submission().len()).expect("the queue has 256 entries");
            // SAFETY: no argument structure is passed, so nothing has to outlive the call.
            let taken = unsafe { ring.submitter().enter::<()>(queued, 0, 0, None) };
            self.counters.submitted.add(taken.unwrap_or(0) as u64);
        }
    }

    /// The table of registered buffers, registered at the first call.
    ///
    /// # Errors
    /// As `io_uring_register(2)`.
    pub(super) fn buffers(&self) -> io::Result<RefMut<'_, RegisteredBufferTable>> {
        let mut table = self.buffers.borrow_mut();
        table.register(|count| self.ring.borrow().submitter().register_buffers_sparse(count))?;
        Ok(table)
    }

    pub(super) fn drop_wakers(&self) {
        let mut wakers = Vec::new();
        for (_, slot) in self.slots.borrow_mut().iter_mut() {
            if let OperationSlot::Awaited(waker) = slot {
                wakers.extend(waker.take());
            }
        }
    }

    /// Cancels the operations in flight and waits until the kernel has completed them, except those
    /// that only the end of the ring ends. (`IORING_REGISTER_SYNC_CANCEL` exists since Linux 6.0.)
    ///
    /// An operation on a file system that does not answer may never complete: after
    /// [`CANCEL_TIMEOUT`] its memory is leaked to the kernel.
    pub(super) fn cancel_all(&self) {
        let deadline = real_now() + CANCEL_TIMEOUT;
        let in_flight = || {
            let has_completed = |slot: &OperationSlot| {
                matches!(slot, OperationSlot::Complete(_) | OperationSlot::Uncancellable(_))
            };
            let waiting = self.slots.borrow().iter().any(|(_, slot)| !has_completed(slot));
            waiting || self.event_armed.get()
        };
        while in_flight() {
            if real_now() >= deadline && !self.event_armed.get() {
                HAS_UNCANCELLED.set(true);
                return;
            }
            self.enter(CompletionWait::No);
            // An error means that there was nothing left to cancel, or that it is too late to: then
            // the operation completes by itself.
            let _ = self.ring.borrow().submitter().register_sync_cancel(
                Some(types::Timespec::new().nsec(1_000_000)),
                types::CancelBuilder::any(),
            );
            self.enter(CompletionWait::For(Duration::from_millis(1)));
            self.reap();
        }
    }
}

fn build() -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_cqsize(COMPLETIONS).setup_clamp();
    builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let registered = [ring_restrictions::registering::BUFFERS, ring_restrictions::registering::SYNC_CANCEL];
    ring_restrictions::build(
        &mut builder,
        SUBMISSIONS,
        Some(FILE_THREADS),
        &ring_restrictions::OPERATIONS,
        &registered,
    )
}

impl Drop for UringDriver {
    fn drop(&mut self) {
        // The kernel destroys the ring some time after its descriptor is closed, without a
        // notification.
        for (_, slot) in std::mem::take(self.slots.get_mut()) {
            // Abandoned operations remain only if the cancellation timed out. Their memory is
            // leaked.
            if let OperationSlot::Uncancellable(orphan) | OperationSlot::Abandoned(orphan) = slot {
                std::mem::forget(orphan);
            }
        }
    }
}

/// Fires the timers that are due; returns the deadline of the next one.
fn fire_timers(reactor: &Reactor) -> Option<Instant> {
    if reactor.timers.borrow().is_empty() {
        return None;
    }
    let now = real_now();
    loop {
        let due = reactor.timers.borrow_mut().pop_due(now);
        let Some(waker) = due else { break };
        waker.wake();
    }
    reactor.timers.borrow().earliest()
}

fn duration_ns(duration: Duration) -> u64 {
    duration.as_secs().saturating_mul(NANOS_PER_SECOND).saturating_add(u64::from(duration.subsec_nanos()))
}

/// An operation in flight. Yields the kernel's result and the resource.
pub(super) struct RingOperation<R: 'static> {
    reactor: Rc<Reactor>,
    key: usize,
    /// `None` once returned.
    resource: Option<R>,
    /// Called with the resource and the result if the future was dropped.
    on_orphan: fn(R, i32),
    is_detached: bool,
}

impl<R: 'static> RingOperation<R> {
    /// Queues `entry`; it is submitted at the end of this iteration at the latest.
    ///
    /// # Safety
    /// All memory and file descriptors that `entry` refers to must be owned by `resource`, at
    /// addresses that do not change when `resource` is moved.
    ///
    /// # Panics
    /// Panics in simulation, which has no kernel.
    pub(super) unsafe fn start(entry: &squeue::Entry, resource: R) -> Self {
        let reactor = with_current(Rc::clone);
        let ReactorDriver::Uring(uring) = &reactor.driver else {
            panic!("a system call was requested in simulation")
        };
        let key = uring.slots.borrow_mut().insert(OperationSlot::Awaited(None));
        let entry = entry.clone().user_data(key as u64);
        // SAFETY: `resource` is kept until completion: by this `RingOperation`, or in the slot if
        // the operation is dropped before.
        unsafe { uring.push(&entry) };
        Self {
            reactor,
            key,
            resource: Some(resource),
            on_orphan: |resource, _| drop(resource),
            is_detached: false,
        }
    }

    /// Marks an operation that the kernel cannot cancel: if it is dropped early, it stays in
    /// flight, and if the reactor ends before it does, its resource is leaked to the kernel.
    pub(super) fn uncancellable(mut self) -> Self {
        self.is_detached = true;
        self
    }

    /// For device reads and writes, and requests to other servers: submits the queue now if it
    /// holds `max_queued` of them.
    pub(super) fn submit_at(self, max_queued: usize) -> Self {
        self.uring().count_and_submit(max_queued);
        self
    }

    /// Sets what happens to resource and result if the future is dropped and the operation
    /// completes nonetheless.
    pub(super) fn on_orphan(mut self, orphan: fn(R, i32)) -> Self {
        self.on_orphan = orphan;
        self
    }

    fn uring(&self) -> &UringDriver {
        let ReactorDriver::Uring(uring) = &self.reactor.driver else { unreachable!("checked in `start`") };
        uring
    }
}

impl<R: Unpin + 'static> Future for RingOperation<R> {
    type Output = (io::Result<u32>, R);
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let result = {
            let mut slots = self.uring().slots.borrow_mut();
            match &mut slots[self.key] {
                OperationSlot::Complete(result) => {
                    let result = *result;
                    slots.remove(self.key);
                    result
                }
                OperationSlot::Awaited(waker) => {
                    match waker {
                        Some(waker) => waker.clone_from(context.waker()),
                        None => *waker = Some(context.waker().clone()),
                    }
                    return Poll::Pending;
                }
                OperationSlot::Abandoned(_) | OperationSlot::Uncancellable(_) => {
                    unreachable!("abandoned only in drop")
                }
            }
        };
        let resource = self.resource.take().expect("polled after completion");
        let result = u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Poll::Ready((result, resource))
    }
}

impl<R: 'static> Drop for RingOperation<R> {
    fn drop(&mut self) {
        let Some(resource) = self.resource.take() else { return };
        let uring = self.uring();
        let mut slots = uring.slots.borrow_mut();
        // Completed, but not fetched: the resource is disposed of here.
        match &mut slots[self.key] {
            OperationSlot::Complete(result) => {
                let result = *result;
                slots.remove(self.key);
                drop(slots);
                (self.on_orphan)(resource, result);
            }
            slot => {
                let orphan = self.on_orphan;
                let orphan: OrphanHandler = Box::new(move |result| orphan(resource, result));
                let after = if self.is_detached {
                    OperationSlot::Uncancellable(orphan)
                } else {
                    OperationSlot::Abandoned(orphan)
                };
                let before = std::mem::replace(slot, after);
                drop(slots);
                drop(before);
                if !self.is_detached {
                    self.cancel();
                }
            }
        }
    }
}

impl<R: 'static> RingOperation<R> {
    /// Requests cancellation of the operation. Whether that succeeds or not, its completion frees
    /// the slot.
    fn cancel(&self) {
        let entry = opcode::AsyncCancel::new(self.key as u64).build().user_data(CANCELLATION);
        // SAFETY: the entry refers to no memory.
        unsafe { self.uring().push(&entry) };
    }
}
