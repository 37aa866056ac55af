//! A thread with a reactor that runs jobs sent to it. A daemon has one or a few, and assigns each
//! connection to one of them.

use std::{cell::Cell, future::Future, io, sync::Arc, thread};

use super::{
    PollingMode, ReactorDriver, RingCounters, RingTotals,
    executor::{RemoteHandle, RemoteWork, TaskGroup},
    run, spawn,
    uring::has_uncancelled_operations,
    with_current,
};

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
    static NEVER_BLOCKS: Cell<bool> = const { Cell::new(false) };
}

/// Declares that this thread serves several disks, so that no system call on it may block on a
/// device, a file system or a server. Applies to each [`ReactorWorker`] from its start.
pub fn forbid_blocking() {
    NEVER_BLOCKS.set(true);
}

/// True if a system call on this thread may block on a device, a file system or a server: false
/// after [`forbid_blocking`].
pub fn may_block() -> bool {
    !NEVER_BLOCKS.get()
}

/// True on the thread of a [`ReactorWorker`]; false on a thread that called [`run`] itself, such as
/// the main thread.
pub fn is_worker() -> bool {
    IS_WORKER.get()
}

struct WorkerResult {
    result: io::Result<()>,
    /// True if the kernel has not completed all operations, so the thread may never exit.
    is_stuck: bool,
}

/// Call it before a system call that may block on a file system. Panics in debug builds on a thread
/// that must not block.
#[track_caller]
pub fn debug_assert_may_block() {
    debug_assert!(may_block(), "a blocking system call on a thread that must not block");
}

/// A thread that runs a reactor until it is stopped.
pub struct ReactorWorker {
    remote: Arc<RemoteHandle>,
    counters: Arc<RingCounters>,
    thread: thread::JoinHandle<()>,
    /// The reactor's result, sent at its end.
    result_receiver: std::sync::mpsc::Receiver<WorkerResult>,
    stop: async_channel::Sender<()>,
}

impl ReactorWorker {
    /// Starts a thread with this name.
    ///
    /// # Errors
    /// As [`run`]; fails also if no thread can be created.
    pub fn start(name: &str, polling: PollingMode) -> io::Result<Self> {
        let (stop, stopped) = async_channel::bounded::<()>(1);
        let (announce, announced) = std::sync::mpsc::channel();
        let (sender, result_receiver) = std::sync::mpsc::channel();
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            IS_WORKER.set(true);
            forbid_blocking();
            let result = run(polling, async move {
                let parts = with_current(|reactor| {
                    let ReactorDriver::Uring(uring) = &reactor.driver else {
                        unreachable!("a worker uses the io_uring driver")
                    };
                    (Arc::clone(reactor.executor.remote()), Arc::clone(&uring.counters))
                });
                // Cannot fail: `start` waits for this message.
                let _ = announce.send(parts);
                // Nothing is ever sent: this returns an error once `stop` closes the channel, or
                // the `ReactorWorker` was dropped.
                let _ = stopped.recv().await;
            });
            // Fails if the `ReactorWorker` was dropped.
            let _ = sender.send(WorkerResult { result, is_stuck: has_uncancelled_operations() });
        })?;
        match announced.recv() {
            Ok((remote, counters)) => Ok(Self { remote, counters, thread, result_receiver, stop }),
            // The thread ended before it announced itself, and has sent the reason.
            Err(_) => match result_receiver.recv() {
                Ok(WorkerResult { result: Err(error), .. }) => Err(error),
                Ok(_) | Err(_) => Err(io::Error::other("the worker thread ended during its start")),
            },
        }
    }

    /// Creates a future on the worker's thread and runs it there as a task, the first one of a new
    /// task group.
    pub fn spawn<F: Future<Output = ()> + 'static>(&self, make: impl FnOnce() -> F + Send + 'static) {
        self.spawn_in_group(TaskGroup::new(), make);
    }

    /// As [`ReactorWorker::spawn`], as a task of this group.
    pub fn spawn_in_group<F: Future<Output = ()> + 'static>(
        &self,
        group: TaskGroup,
        make: impl FnOnce() -> F + Send + 'static,
    ) {
        self.remote.send(RemoteWork::Job(group, Box::new(move || spawn(make()))));
    }

    /// Name of the thread.
    pub fn name(&self) -> &str {
        self.thread.thread().name().unwrap_or_default()
    }

    /// Counters of the reactor.
    pub fn counters(&self) -> RingTotals {
        self.counters.totals()
    }

    /// Stops the thread and waits for it, unless operations that the kernel cannot cancel are in
    /// flight: then the thread exits with the last of them. Tasks end as documented for [`run`].
    /// If disks on several workers share a throttle group, stop all of these workers: the timer
    /// that admits the group's requests runs on one of them.
    ///
    /// # Errors
    /// The error of [`run`].
    ///
    /// # Panics
    /// Propagates a panic of the worker's thread.
    pub fn stop(self) -> io::Result<()> {
        self.stop.close();
        match self.result_receiver.recv() {
            Ok(WorkerResult { result, is_stuck: true }) => result,
            Ok(WorkerResult { result, is_stuck: false }) => {
                let _ = self.thread.join();
                result
            }
            Err(_) => match self.thread.join() {
                Err(panic) => std::panic::resume_unwind(panic),
                Ok(()) => Err(io::Error::other("the worker thread ended without a result")),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        os::unix::net::UnixStream,
        sync::{
            Arc,
            atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
        },
    };

    use super::*;
    use crate::{buffer::IoBuffer, operation, reap_after_task, uring::TASKS_PER_ITERATION, yield_now};

    /// A worker with a task group of a thousand tasks that are always ready; counts how often they
    /// run.
    struct BusyWorker {
        worker: ReactorWorker,
        runs: Arc<AtomicUsize>,
        stopped: Arc<AtomicBool>,
    }

    impl BusyWorker {
        fn start() -> Self {
            Self::running(|| {})
        }

        /// Calls `operation` in each task, each time the task runs.
        fn running(operation: fn()) -> Self {
            let worker = ReactorWorker::start("busy", PollingMode::Off).expect("a thread");
            let (runs, stopped) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
            let group = TaskGroup::new();
            for _ in 0..1000 {
                let (runs, stopped) = (Arc::clone(&runs), Arc::clone(&stopped));
                worker.spawn_in_group(group, move || async move {
                    while !stopped.load(Relaxed) {
                        runs.fetch_add(1, Relaxed);
                        operation();
                        yield_now().await;
                    }
                });
            }
            Self { worker, runs, stopped }
        }

        /// Number of runs of the busy tasks until another task group has done `work`.
        fn runs_during<F: Future<Output = ()>>(self, work: impl FnOnce() -> F + Send + 'static) -> usize {
            let (done, outcome) = async_channel::bounded(1);
            let runs = Arc::clone(&self.runs);
            self.worker.spawn(move || async move {
                let before = runs.load(Relaxed);
                work().await;
                done.send(runs.load(Relaxed) - before).await.expect("it is waited for");
            });
            let run_count = outcome.recv_blocking().expect("it ends");
            self.stopped.store(true, Relaxed);
            self.worker.stop().expect("stops");
            run_count
        }
    }

    #[test]
    fn task_groups_alternate_whatever_their_size() {
        let runs = BusyWorker::start().runs_during(|| async {
            for _ in 0..100 {
                yield_now().await;
            }
        });
        assert!((99..=101).contains(&runs), "{runs} turns of the other task group within 100");
    }

    /// Number of runs of another task group's tasks while `count` operations complete one by one.
    fn runs_within_operations(busy: BusyWorker, count: usize) -> usize {
        let (local, mut peer) = UnixStream::pair().expect("sockets");
        peer.write_all(&vec![7; count]).expect("there is room");
        busy.runs_during(move || async move {
            let socket = operation::Fd::from(local);
            for _ in 0..count {
                let (received, _) = operation::receive(&socket, IoBuffer::new(1), 0).await;
                assert_eq!(received.expect("it was sent"), 1);
            }
        })
    }

    #[test]
    fn completion_waits_for_few_tasks_of_another_group() {
        let runs = runs_within_operations(BusyWorker::start(), 100);
        assert!(runs <= 2 * 100 * TASKS_PER_ITERATION, "{runs} turns within 100 operations");
    }

    #[test]
    fn completion_waits_for_one_long_task_of_another_group() {
        let runs = runs_within_operations(BusyWorker::running(reap_after_task), 100);
        assert!(runs <= 4 * 100, "{runs} turns within 100 operations");
    }
}
