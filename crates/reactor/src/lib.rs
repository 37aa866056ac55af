//! A single-threaded reactor: runs the tasks of requests, fires timers and performs I/O through one
//! io_uring.
//!
//! A task belongs to the thread that spawned it and never moves, so tasks of one reactor share
//! state without locks. Only wake-ups and jobs cross threads, through a queue and an eventfd.
//!
//! ```text
//!   tasks ──► run ready tasks ──► fire timers ──► submit all at once, reap all at once ─┐
//!     ▲                                                                                 │
//!     └──────────────── woken by completions, timers, other threads ◄───────────────────┘
//! ```
//!
//! There are two drivers. [`run`] drives tasks with the real clock and kernel; [`sim::run`] drives
//! the same tasks with a virtual clock, no kernel, and an order of execution drawn from a seed.
//! Code of the data path does not depend on the driver: it calls [`now`], [`sleep_until`] and
//! [`spawn`], and only storages and streams over real files call [`operation`].
//!
//! The crate also contains what all crates of the data path share: memory for I/O ([`buffer`]) and
//! of virtual machines ([`guest`]), the memory budget ([`memory`]), errors of requests ([`error`]),
//! small files named by users ([`regular_file`]), and rate-limited logs ([`log_rate_limit`],
//! [`sanitize`](mod@sanitize)).
//!
//! Never holds a borrow or a lock while it polls a task.

mod blocking_threads;
pub mod buffer;
mod counters;
pub mod error;
mod executor;
mod fuse;
pub mod guest;
pub mod log_rate_limit;
pub mod memory;
mod notifier;
pub mod operation;
mod permits;
mod polling_monitor;
mod priority;
mod registered_buffers;
pub mod regular_file;
mod ring_restrictions;
pub mod sanitize;
pub mod select;
mod signal;
pub mod sim;
mod task_spawner;
mod timer;
pub mod ublk;
mod uring;
mod wake_up;
mod worker;

use std::{cell::RefCell, future::Future, pin::Pin, rc::Rc, sync::OnceLock, time::Instant as Clock};

use policy::time::Instant;

pub use blocking_threads::{join_transient_threads, use_transient_threads};
pub use counters::{RingCounters, RingTotals};
use executor::Executor;
pub use executor::{JoinHandle, TaskGroup};
pub use fuse::clone_fuse_device;
pub use notifier::{
    EventfdNotifier, create_spare as set_notifiers_aside, spare_descriptors as notifiers_set_aside_for,
};
pub use operation::wait_for_closings;
pub use permits::{OperationPermit, OperationPermits};
pub use priority::{in_background, is_in_background};
pub use signal::Signal;
pub use task_spawner::TaskSpawner;
pub use timer::{Sleep, Timeout, timeout};
pub use uring::PollingMode;
pub use wake_up::next_wake_up;
pub use worker::debug_assert_may_block;
pub use worker::{ReactorWorker, forbid_blocking, is_worker, may_block};

/// The reactor of a thread. [`ReactorDriver`] is the part that differs in simulation.
struct Reactor {
    executor: Executor,
    timers: RefCell<timer::TimerQueue>,
    driver: ReactorDriver,
}

enum ReactorDriver {
    /// Boxed, because it is much larger than the simulated one.
    Uring(Box<uring::UringDriver>),
    Sim(sim::SimulatedDriver),
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Reactor>>> = const { RefCell::new(None) };
}

/// Calls `f` with this thread's reactor.
///
/// # Panics
/// Panics outside of [`run`], [`sim::run`] and a [`ReactorWorker`].
fn with_current<T>(f: impl FnOnce(&Rc<Reactor>) -> T) -> T {
    CURRENT.with_borrow(|current| f(current.as_ref().expect("no reactor runs on this thread")))
}

/// True if a reactor runs on this thread. False while the thread exits.
pub fn has_reactor() -> bool {
    CURRENT.try_with(|current| current.try_borrow().is_ok_and(|current| current.is_some())).unwrap_or(false)
}

/// Nanoseconds on the monotonic clock since the first call in this process. One epoch for all
/// threads, because groups of disks are shared between them.
fn real_now() -> Instant {
    static EPOCH: OnceLock<Clock> = OnceLock::new();
    let elapsed = EPOCH.get_or_init(Clock::now).elapsed();
    Instant::from_nanos(u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX))
}

/// Current instant on the clock of all real reactors, for threads without a reactor.
pub fn real_time() -> Instant {
    real_now()
}

/// Current instant on the clock of this thread's reactor.
///
/// # Panics
/// Panics without a reactor on this thread.
pub fn now() -> Instant {
    with_current(|reactor| match &reactor.driver {
        ReactorDriver::Uring(_) => real_now(),
        ReactorDriver::Sim(sim) => sim.now(),
    })
}

/// Instant of the first call in this iteration of the reactor's loop: earlier than now by at most
/// the run time of the tasks since.
///
/// For statistics of every request, where reading the clock would cost more than a few microseconds
/// of error. Not for deadlines: one that has passed may seem to lie in the future.
///
/// # Panics
/// Panics without a reactor on this thread.
pub fn coarse_now() -> Instant {
    with_current(|reactor| match &reactor.driver {
        ReactorDriver::Uring(uring) => uring.coarse_now(),
        ReactorDriver::Sim(sim) => sim.now(),
    })
}

/// Runs `future` as a new task on this thread. It is polled once before this function returns (in
/// simulation the seed decides).
///
/// # Panics
/// Panics without a reactor on this thread.
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    let reactor = with_current(Rc::clone);
    let (runnable, task) = reactor.executor.make_task(future);
    task.detach();
    reactor.launch(runnable);
}

/// As [`spawn`], with a handle to await the result. Dropping the handle cancels the task.
///
/// # Panics
/// Panics without a reactor on this thread.
pub fn spawn_joinable<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let (runnable, task) = with_current(Rc::clone).executor.make_task(future);
    runnable.schedule();
    task
}

/// As [`spawn`], with a handle to await the result. Dropping the handle detaches the task. The
/// result is `None` if the reactor ended before the task did.
///
/// For operations that must be completed even if their client disconnects.
///
/// # Panics
/// Panics without a reactor on this thread.
pub fn spawn_detached<T: 'static>(future: impl Future<Output = T> + 'static) -> DetachedTask<T> {
    let reactor = with_current(Rc::clone);
    let (runnable, task) = reactor.executor.make_task(future);
    reactor.launch(runnable);
    DetachedTask(Some(task.fallible()))
}

/// Handle of a task that completes even if it is not awaited: see [`spawn_detached`].
#[derive(Debug)]
#[must_use = "the handle returns the task's result"]
pub struct DetachedTask<T>(Option<async_task::FallibleTask<T>>);

impl<T> Future for DetachedTask<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut std::task::Context<'_>) -> std::task::Poll<Option<T>> {
        match &mut self.0 {
            Some(task) => Pin::new(task).poll(context),
            None => std::task::Poll::Ready(None),
        }
    }
}

impl<T> Drop for DetachedTask<T> {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.detach();
        }
    }
}

/// Waits until `deadline`; ready at once if it has passed.
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep::new(deadline)
}

/// Lets the other ready tasks run first: all of the same task group ([`TaskGroup`]), and those of
/// other groups as far as the executor schedules them before this group.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if yielded {
            return std::task::Poll::Ready(());
        }
        yielded = true;
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

/// Marks this thread as one that other processes' writeback depends on (`PR_SET_IO_FLUSHER`): when
/// it allocates memory, the kernel does not reclaim by writing to the device that the thread
/// serves, which would deadlock.
///
/// # Errors
/// As `prctl(2)`: `EPERM` without `CAP_SYS_RESOURCE`.
pub fn set_io_flusher() -> std::io::Result<()> {
    const PR_SET_IO_FLUSHER: libc::c_int = 57; // linux/prctl.h
    // SAFETY: this prctl changes how the kernel allocates for this thread and accesses no memory of
    // the process.
    let result = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Hint that no client of this thread waits for latency: before its next sleep, the reactor lets
/// completions accumulate for some microseconds and reaps them together. For callers whose client
/// has a backlog.
///
/// No effect in simulation, and on kernels before 6.12.
pub fn linger() {
    with_current(|reactor| {
        if let ReactorDriver::Uring(uring) = &reactor.driver {
            uring.linger();
        }
    });
}

/// Hint that this task has run for as long as many others: completions are reaped before the next
/// task runs. For tasks whose amount of work a client decides.
///
/// No effect in simulation.
pub fn reap_after_task() {
    with_current(|reactor| {
        if let ReactorDriver::Uring(uring) = &reactor.driver {
            uring.reap_after_task();
        }
    });
}

/// Runs `f` on another thread and waits for it: for blocking system calls that io_uring lacks
/// (SEEK_HOLE, opening a file). The number of threads is unbounded, so callers must bound the
/// number of concurrent calls for a file, client or disk. If the future is dropped, `f` runs to its
/// end. In simulation `f` runs in place.
///
/// # Panics
/// Panics if `f` does, or if no thread can be created.
pub async fn run_blocking<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    if is_simulated() { f() } else { blocking_threads::run(f).await }
}

/// Runs `f` on another thread and waits for it: for long computations (compression, key
/// derivation). The number of threads is bounded, except between [`use_transient_threads`] and
/// [`join_transient_threads`]: then each call has a thread that exits after it. In simulation `f`
/// runs in place.
///
/// # Panics
/// Panics if `f` does.
pub async fn run_computation<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> T {
    if is_simulated() {
        f()
    } else if blocking_threads::uses_transient_threads() {
        blocking_threads::run(f).await
    } else {
        blocking::unblock(f).await
    }
}

fn is_simulated() -> bool {
    with_current(|reactor| matches!(reactor.driver, ReactorDriver::Sim(_)))
}

/// Runs `future`, and all tasks that it spawns, on this thread until `future` completes. Then tasks
/// that are ready or wait for timers or I/O are dropped, and their I/O is cancelled and awaited.
/// Tasks that wait for each other or for another thread are leaked with everything they own, so end
/// them before `future` completes.
///
/// # Errors
/// Fails if io_uring is unavailable: missing in the kernel, or forbidden
/// (`kernel.io_uring_disabled`, seccomp).
///
/// # Panics
/// Panics if a reactor runs on this thread already.
pub fn run<T: 'static>(
    polling: PollingMode,
    future: impl Future<Output = T> + 'static,
) -> std::io::Result<T> {
    let executor = Executor::new()?;
    let driver = ReactorDriver::Uring(Box::new(uring::UringDriver::new(polling)?));
    Ok(Reactor::enter(executor, driver, Box::pin(future), uring::UringDriver::iterate))
}

impl Reactor {
    /// Installs a reactor on this thread, runs it until `future` completes, and shuts it down.
    /// Boxed, so that it is compiled once for all futures, of which tests have hundreds.
    fn enter<T: 'static>(
        executor: Executor,
        driver: ReactorDriver,
        future: Pin<Box<dyn Future<Output = T>>>,
        run_turn: fn(&Self),
    ) -> T {
        let reactor = Rc::new(Self { executor, timers: RefCell::default(), driver });
        CURRENT.with_borrow_mut(|current| {
            assert!(current.is_none(), "a reactor runs on this thread already");
            *current = Some(Rc::clone(&reactor));
        });
        let _leave = ShutdownGuard;
        reactor.executor.enter();
        let result = Rc::new(RefCell::new(None));
        let slot = Rc::clone(&result);
        let (runnable, main) = reactor.executor.make_task(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
            with_current(|reactor| reactor.executor.finish());
        });
        // The wake-up of the main task may be the last event: `finish` ends the loop before the
        // driver would wait for another one.
        runnable.schedule();
        while !reactor.executor.is_finished() {
            run_turn(&reactor);
        }
        drop(main);
        let value = result.borrow_mut().take();
        value.expect("the loop above ends once it is there")
    }

    /// Polls a new task at once, so that a task that can complete need not be queued; in simulation
    /// the seed decides.
    fn launch(&self, task: async_task::Runnable) {
        let at_once = match &self.driver {
            ReactorDriver::Uring(_) => true,
            ReactorDriver::Sim(sim) => sim.random_bool(),
        };
        if at_once {
            task.run();
        } else {
            task.schedule();
        }
    }

    /// Drops the remaining tasks that are in the reactor's queues and timers, and waits for their
    /// I/O.
    // Dropping wakers makes tasks ready, and dropping those drops more timers and wakers:
    // repeated until no task is left. I/O is cancelled last, because dropped tasks abandon more.
    fn shut_down(&self) {
        loop {
            let timers = std::mem::take(&mut *self.timers.borrow_mut());
            drop(timers);
            if let ReactorDriver::Uring(uring) = &self.driver {
                uring.drop_wakers();
            }
            if self.executor.drop_ready() == 0 {
                break;
            }
        }
        if let ReactorDriver::Uring(uring) = &self.driver {
            uring.cancel_all();
        }
        self.executor.leave();
    }
}

/// Shuts the reactor down, also if a task panics.
struct ShutdownGuard;

impl Drop for ShutdownGuard {
    fn drop(&mut self) {
        let reactor = with_current(Rc::clone);
        reactor.shut_down();
        CURRENT.with_borrow_mut(|current| *current = None);
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, io::Read, os::unix::net::UnixStream};

    use policy::time::Duration;

    use super::*;
    use crate::buffer::IoBuffer;

    fn real<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
        run(PollingMode::Off, future).expect("io_uring works on a test machine")
    }

    /// The order in which tasks with a different number of yields finish.
    fn finishing_order(seed: u64) -> Vec<u32> {
        sim::run(seed, async {
            let order = Rc::new(RefCell::new(Vec::new()));
            let tasks: Vec<_> = (0..8)
                .map(|task| {
                    let order = Rc::clone(&order);
                    spawn_joinable(async move {
                        for _ in 0..task % 3 {
                            yield_now().await;
                        }
                        order.borrow_mut().push(task);
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            order.take()
        })
    }

    #[test]
    fn a_seed_decides_the_order_of_execution() {
        assert_eq!(finishing_order(7), finishing_order(7));
        assert!((0..20).any(|seed| finishing_order(seed) != finishing_order(7)));
    }

    #[test]
    fn simulated_time_passes_only_when_nothing_is_ready() {
        sim::run(1, async {
            let started = now();
            sleep_until(started + Duration::from_secs(3600)).await;
            assert_eq!(now() - started, Duration::from_secs(3600));
            let limited = timeout(Duration::from_secs(5), sleep_until(Instant::MAX)).await;
            assert_eq!(limited, Err(Timeout));
            assert_eq!(now() - started, Duration::from_secs(3605));
        });
    }

    #[test]
    #[should_panic(expected = "seed 42: hang")]
    fn a_simulated_hang_names_its_seed() {
        sim::run(42, std::future::pending::<()>());
    }

    #[test]
    fn real_timers_fire_in_order_and_not_early() {
        real(async {
            let started = now();
            let order = Rc::new(RefCell::new(Vec::new()));
            let tasks = [30, 10, 20].map(|ms| {
                let order = Rc::clone(&order);
                spawn_joinable(async move {
                    sleep_until(started + Duration::from_millis(ms)).await;
                    assert!(now() - started >= Duration::from_millis(ms));
                    order.borrow_mut().push(ms);
                })
            });
            for task in tasks {
                task.await;
            }
            assert_eq!(*order.borrow(), [10, 20, 30]);
        });
    }

    #[test]
    fn another_thread_wakes_a_sleeping_reactor() {
        let (sender, receiver) = async_channel::bounded(1);
        let thread =
            std::thread::spawn(move || real(async move { receiver.recv().await.expect("the sender lives") }));
        let worker = ReactorWorker::start("test", PollingMode::Off).expect("a thread");
        worker.spawn(move || async move { sender.send(42).await.expect("the receiver lives") });
        assert_eq!(thread.join().expect("no panic"), 42);
        worker.stop().expect("stops");
    }

    #[test]
    fn an_operation_dropped_in_flight_keeps_its_memory_until_the_kernel_is_done() {
        real(async {
            let (local, peer) = UnixStream::pair().expect("sockets");
            let fd = operation::Fd::from(local);
            let address = Rc::new(Cell::new(0));
            let seen = Rc::clone(&address);
            let copy = fd.clone();
            let reading = spawn_joinable(async move {
                let buffer = IoBuffer::new(4096);
                seen.set(buffer.as_ptr() as usize);
                operation::receive(&copy, buffer, 0).await.0
            });
            while address.get() == 0 {
                yield_now().await;
            }
            yield_now().await;
            drop(reading);
            yield_now().await;
            // The buffer returns to the pool only after the cancellation is complete. Until then a
            // new buffer has another address.
            drop(peer);
            let (result, _) = operation::receive(&fd, IoBuffer::new(4096), 0).await;
            assert_eq!(result.expect("end of file"), 0);
        });
    }

    #[test]
    fn polling_finds_completions_too() {
        let polling = PollingMode::UpTo(Duration::from_micros(200));
        run(polling, async {
            let (local, mut peer) = UnixStream::pair().expect("sockets");
            let fd = operation::Fd::from(local);
            let echo = std::thread::spawn(move || {
                let mut bytes = [0; 1000];
                peer.read_exact(&mut bytes).expect("a thousand bytes");
                bytes
            });
            for round in 0..1000_u32 {
                let (sent, _) = operation::send(&fd, IoBuffer::copy_of(&[round as u8]).into()).await;
                assert_eq!(sent.expect("sent"), 1);
            }
            let bytes = echo.join().expect("no panic");
            assert!(bytes.iter().enumerate().all(|(index, &byte)| byte == index as u8));
        })
        .expect("io_uring works");
    }
}
