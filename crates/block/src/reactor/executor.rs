//! The queue of tasks that are ready, and the way into it from other threads.
//!
//! Tasks come from `async-task`: one allocation each, and wakers that may be used from any thread.
//! A wake-up from the own thread pushes to a plain queue. One from another thread goes to a locked
//! list with an eventfd, which is written only when the reactor sleeps.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::Future,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use async_task::Runnable;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A task's result, to be awaited; dropping it cancels the task.
pub type JoinHandle<T> = async_task::Task<T>;

/// A closure for another thread's reactor.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// What arrived from other threads.
pub(super) enum Arrival {
    Task(Runnable),
    Job(Job),
}

/// The part of a reactor that other threads may touch.
pub(super) struct Remote {
    id: u64,
    arrivals: Mutex<Vec<Arrival>>,
    /// Set while the reactor waits in the kernel, or is about to: only then is the eventfd worth a
    /// system call.
    asleep: AtomicBool,
    /// Anything in `arrivals`; lets the reactor look without taking the lock.
    pending: AtomicBool,
    pub(super) event: EventFd,
}

impl Remote {
    fn lock(&self) -> MutexGuard<'_, Vec<Arrival>> {
        // A panic while pushing to a Vec leaves it valid.
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn send(&self, arrival: Arrival) {
        self.lock().push(arrival);
        // SeqCst with `sleep`: either we see it asleep, or it sees this before it goes to sleep.
        self.pending.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // Fails only when the counter is about to overflow, and then the reactor wakes anyway.
            let _ = self.event.write(1);
        }
    }
}

thread_local! {
    /// The id of the reactor on this thread; 0 is none.
    static HERE: Cell<u64> = const { Cell::new(0) };
    static READY: RefCell<VecDeque<Runnable>> = const { RefCell::new(VecDeque::new()) };
}

pub(super) struct Executor {
    remote: Arc<Remote>,
    /// The main task is done: the reactor must not wait for anything more.
    finished: Cell<bool>,
}

impl Executor {
    pub(super) fn new() -> io::Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self {
            remote: Arc::new(Remote {
                id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
                arrivals: Mutex::default(),
                asleep: AtomicBool::new(false),
                pending: AtomicBool::new(false),
                event,
            }),
            finished: Cell::new(false),
        })
    }

    pub(super) fn finish(&self) {
        self.finished.set(true);
    }

    pub(super) fn is_finished(&self) -> bool {
        self.finished.get()
    }

    pub(super) fn remote(&self) -> &Arc<Remote> {
        &self.remote
    }

    pub(super) fn enter(&self) {
        HERE.set(self.remote.id);
    }

    pub(super) fn leave(&self) {
        HERE.set(0);
    }

    pub(super) fn make_task<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> (Runnable, JoinHandle<T>) {
        let remote = Arc::clone(&self.remote);
        async_task::spawn_local(future, move |runnable| {
            if HERE.get() == remote.id {
                READY.with_borrow_mut(|ready| ready.push_back(runnable));
            } else {
                remote.send(Arrival::Task(runnable));
            }
        })
    }

    /// The oldest ready task.
    pub(super) fn pop(&self) -> Option<Runnable> {
        READY.with_borrow_mut(VecDeque::pop_front)
    }

    /// The ready task at `pick(count)`; in simulation the seed picks.
    pub(super) fn pop_any(&self, pick: impl FnOnce(usize) -> usize) -> Option<Runnable> {
        READY.with_borrow_mut(|ready| {
            if ready.is_empty() {
                return None;
            }
            let index = pick(ready.len());
            ready.swap_remove_back(index)
        })
    }

    /// Nothing to run, and something to wait for.
    pub(super) fn is_idle(&self) -> bool {
        !self.finished.get()
            && READY.with_borrow(VecDeque::is_empty)
            && !self.remote.pending.load(Ordering::SeqCst)
    }

    /// Takes in what other threads sent.
    pub(super) fn receive(&self) {
        if !self.remote.pending.swap(false, Ordering::SeqCst) {
            return;
        }
        let arrivals = std::mem::take(&mut *self.remote.lock());
        for arrival in arrivals {
            match arrival {
                Arrival::Task(runnable) => READY.with_borrow_mut(|ready| ready.push_back(runnable)),
                Arrival::Job(job) => job(),
            }
        }
    }

    /// Announces that the reactor is about to wait in the kernel. False if something has arrived:
    /// then it must not.
    pub(super) fn fall_asleep(&self) -> bool {
        self.remote.asleep.store(true, Ordering::SeqCst);
        let may_sleep = !self.remote.pending.load(Ordering::SeqCst);
        if !may_sleep {
            self.remote.asleep.store(false, Ordering::SeqCst);
        }
        may_sleep
    }

    pub(super) fn wake_up(&self) {
        self.remote.asleep.store(false, Ordering::SeqCst);
    }

    /// Drops the tasks that are ready; returns how many there were.
    pub(super) fn drop_ready(&self) -> usize {
        // Jobs are dropped unrun: they would make new tasks.
        let arrivals = std::mem::take(&mut *self.remote.lock());
        let ready = READY.with_borrow_mut(std::mem::take);
        arrivals.len() + ready.len()
    }
}
