//! The queue of tasks that are ready, and the way into it from other threads.
//!
//! Tasks come from `async-task`: one allocation each, and wakers that may be used from any thread.
//! A wake-up from the own thread pushes to a plain queue. One from another thread goes to a locked
//! list with an eventfd, which is written only when the reactor sleeps.
//!
//! Tasks belong to a [`Party`], which they inherit from who spawns them. Parties take turns, one
//! task each, so one with many tasks keeps nobody waiting for all of them; within a party the
//! oldest is first.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    future::Future,
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use async_task::Runnable;
use nix::sys::eventfd::{EfdFlags, EventFd};

/// A task's result, to be awaited; dropping it cancels the task.
pub type JoinHandle<T> = async_task::Task<T>;

/// Queues for parties: where there are more, some share one, and its turns (stochastic fairness
/// queueing, McKenney, INFOCOM 1990).
const QUEUES: u32 = u64::BITS;

/// Those whose tasks have turns together: all that work for one client, on every thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Party {
    queue: u32,
}

impl Party {
    /// Of what no client asks for.
    const HOUSE: Self = Self { queue: 0 };

    /// Another than those before it, as far as there are queues.
    #[expect(clippy::new_without_default, reason = "each is another")]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self { queue: 1 + NEXT.fetch_add(1, Ordering::Relaxed) % (QUEUES - 1) }
    }
}

/// Tasks that can go on.
struct Ready {
    queues: [VecDeque<Runnable>; QUEUES as usize],
    /// A bit for each queue that has some.
    waiting: u64,
    /// Whose turn it is, or was last.
    turn: Party,
}

impl Ready {
    const fn new() -> Self {
        Self { queues: [const { VecDeque::new() }; QUEUES as usize], waiting: 0, turn: Party::HOUSE }
    }

    fn push(&mut self, party: Party, task: Runnable) {
        self.queues[party.queue as usize].push_back(task);
        self.waiting |= 1 << party.queue;
    }

    /// The oldest of whoever is next.
    fn pop(&mut self) -> Option<Runnable> {
        if self.waiting == 0 {
            return None;
        }
        let after = self.turn.queue + 1;
        let queue = (after + self.waiting.rotate_right(after).trailing_zeros()) % QUEUES;
        self.turn = Party { queue };
        let tasks = &mut self.queues[queue as usize];
        let task = tasks.pop_front();
        if tasks.is_empty() {
            self.waiting &= !(1 << queue);
        }
        task
    }

    fn len(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }

    /// The one with so many before it.
    fn remove(&mut self, mut index: usize) -> Option<Runnable> {
        for (queue, tasks) in (0..QUEUES).zip(&mut self.queues) {
            if index >= tasks.len() {
                index -= tasks.len();
                continue;
            }
            self.turn = Party { queue };
            let task = tasks.swap_remove_back(index);
            if tasks.is_empty() {
                self.waiting &= !(1 << queue);
            }
            return task;
        }
        None
    }
}

/// A closure for another thread's reactor.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// What arrived from other threads.
pub(super) enum Arrival {
    Task(Party, Runnable),
    Job(Party, Job),
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
    static READY: RefCell<Ready> = const { RefCell::new(Ready::new()) };
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
        // A hundred functions around each kind of future take longer to be compiled than a second
        // allocation costs the tests.
        #[cfg(debug_assertions)]
        let future = Box::pin(future) as std::pin::Pin<Box<dyn Future<Output = T>>>;
        async_task::spawn_local(future, self.scheduler())
    }

    /// What a new task is told to do when it can go on.
    fn scheduler(&self) -> impl Fn(Runnable) + Send + Sync + use<> {
        let remote = Arc::clone(&self.remote);
        let party = READY.with_borrow(|ready| ready.turn);
        move |runnable| {
            if HERE.get() == remote.id {
                READY.with_borrow_mut(|ready| ready.push(party, runnable));
            } else {
                remote.send(Arrival::Task(party, runnable));
            }
        }
    }

    /// The oldest ready task of the party that is next.
    pub(super) fn pop(&self) -> Option<Runnable> {
        READY.with_borrow_mut(Ready::pop)
    }

    /// The ready task at `pick(count)`; in simulation the seed picks.
    pub(super) fn pop_any(&self, pick: impl FnOnce(usize) -> usize) -> Option<Runnable> {
        READY.with_borrow_mut(|ready| {
            if ready.waiting == 0 {
                return None;
            }
            let index = pick(ready.len());
            ready.remove(index)
        })
    }

    /// Nothing to run, and something to wait for.
    pub(super) fn is_idle(&self) -> bool {
        !self.finished.get()
            && READY.with_borrow(|ready| ready.waiting == 0)
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
                Arrival::Task(party, task) => READY.with_borrow_mut(|ready| ready.push(party, task)),
                Arrival::Job(party, job) => {
                    READY.with_borrow_mut(|ready| ready.turn = party);
                    job();
                }
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
        let ready = READY.replace(Ready::new());
        arrivals.len() + ready.len()
    }
}
