//! The queue of ready tasks, and its entry for other threads.
//!
//! Tasks are those of `async-task`: one allocation each, with wakers that work on any thread. A
//! wake-up on the task's own thread pushes to a plain queue. One from another thread pushes to a
//! locked list and writes an eventfd, but only if the reactor sleeps.
//!
//! Tasks belong to a task group ([`TaskGroup`]) that they inherit from the task that spawns them.
//! Groups are served round robin, one task each, so a group with many tasks does not delay the
//! others. Within a group the oldest task runs first.

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

/// Handle to await a task's result; dropping it cancels the task.
pub type JoinHandle<T> = async_task::Task<T>;

/// Number of queues. If there are more groups, some groups share a queue and its share of the
/// processor (stochastic fairness queueing, McKenney, INFOCOM 1990).
const QUEUES: u32 = u64::BITS;

/// A task group, scheduled as one: all tasks that work for one client, on every thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskGroup {
    queue: u32,
}

impl TaskGroup {
    /// The group of tasks that no client has caused.
    const BACKGROUND: Self = Self { queue: 0 };

    /// A new group. It shares a queue only if there are more groups than queues.
    #[expect(clippy::new_without_default, reason = "each is another")]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        Self { queue: 1 + NEXT.fetch_add(1, Ordering::Relaxed) % (QUEUES - 1) }
    }
}

/// Ready tasks.
struct ReadyQueues {
    queues: [VecDeque<Runnable>; QUEUES as usize],
    /// One bit for each queue that is not empty.
    waiting: u64,
    /// The group served now, or last.
    current: TaskGroup,
}

impl ReadyQueues {
    const fn new() -> Self {
        Self {
            queues: [const { VecDeque::new() }; QUEUES as usize],
            waiting: 0,
            current: TaskGroup::BACKGROUND,
        }
    }

    fn push(&mut self, group: TaskGroup, task: Runnable) {
        self.queues[group.queue as usize].push_back(task);
        self.waiting |= 1 << group.queue;
    }

    /// Removes the oldest task of the next group.
    fn pop(&mut self) -> Option<Runnable> {
        if self.waiting == 0 {
            return None;
        }
        // Rotated so that bit 0 is the queue after the current one: the lowest set bit is the next
        // queue with tasks, in round-robin order.
        let after = self.current.queue + 1;
        let queue = (after + self.waiting.rotate_right(after).trailing_zeros()) % QUEUES;
        self.current = TaskGroup { queue };
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

    /// Removes the task at `index`, counted over all queues.
    fn remove(&mut self, mut index: usize) -> Option<Runnable> {
        for (queue, tasks) in (0..QUEUES).zip(&mut self.queues) {
            if index >= tasks.len() {
                index -= tasks.len();
                continue;
            }
            self.current = TaskGroup { queue };
            let task = tasks.swap_remove_back(index);
            if tasks.is_empty() {
                self.waiting &= !(1 << queue);
            }
            return task;
        }
        None
    }
}

/// A closure to run on another thread's reactor.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Work sent by another thread.
pub(super) enum RemoteWork {
    Task(TaskGroup, Runnable),
    Job(TaskGroup, Job),
}

/// The part of a reactor that other threads access.
pub(super) struct RemoteHandle {
    id: u64,
    arrivals: Mutex<Vec<RemoteWork>>,
    /// True while the reactor waits in the kernel or is about to. Only then is the eventfd written,
    /// which is a system call.
    asleep: AtomicBool,
    /// True if `arrivals` may not be empty, so that the reactor can check without the lock.
    pending: AtomicBool,
    pub(super) event: EventFd,
}

impl RemoteHandle {
    fn lock(&self) -> MutexGuard<'_, Vec<RemoteWork>> {
        // A panic while pushing to a Vec leaves it valid.
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn send(&self, arrival: RemoteWork) {
        self.lock().push(arrival);
        // SeqCst, paired with `prepare_sleep`: either this thread sees the reactor asleep, or the
        // reactor sees `pending` before it sleeps.
        self.pending.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            // Fails only if the counter would overflow, and then the reactor wakes anyway.
            let _ = self.event.write(1);
        }
    }
}

thread_local! {
    /// ID of the reactor on this thread; 0 if none.
    static REACTOR_ID: Cell<u64> = const { Cell::new(0) };
    static READY: RefCell<ReadyQueues> = const { RefCell::new(ReadyQueues::new()) };
}

pub(super) struct Executor {
    remote: Arc<RemoteHandle>,
    /// True if the main task has completed: the reactor must not wait any more.
    finished: Cell<bool>,
}

impl Executor {
    pub(super) fn new() -> io::Result<Self> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self {
            remote: Arc::new(RemoteHandle {
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

    pub(super) fn remote(&self) -> &Arc<RemoteHandle> {
        &self.remote
    }

    pub(super) fn enter(&self) {
        REACTOR_ID.set(self.remote.id);
    }

    pub(super) fn leave(&self) {
        REACTOR_ID.set(0);
    }

    pub(super) fn make_task<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> (Runnable, JoinHandle<T>) {
        // Boxed in debug builds: monomorphizing a hundred functions for each kind of future takes
        // longer to compile than the second allocation takes to run.
        #[cfg(debug_assertions)]
        let future = Box::pin(future) as std::pin::Pin<Box<dyn Future<Output = T>>>;
        async_task::spawn_local(future, self.schedule_fn())
    }

    /// Creates the schedule function of a new task.
    fn schedule_fn(&self) -> impl Fn(Runnable) + Send + Sync + use<> {
        let remote = Arc::clone(&self.remote);
        let group = READY.with_borrow(|ready| ready.current);
        move |runnable| {
            if REACTOR_ID.get() == remote.id {
                READY.with_borrow_mut(|ready| ready.push(group, runnable));
            } else {
                remote.send(RemoteWork::Task(group, runnable));
            }
        }
    }

    /// Removes the oldest ready task of the next group.
    pub(super) fn pop(&self) -> Option<Runnable> {
        READY.with_borrow_mut(ReadyQueues::pop)
    }

    /// Removes the ready task at index `pick(count)`; in simulation the seed picks.
    pub(super) fn pop_any(&self, pick: impl FnOnce(usize) -> usize) -> Option<Runnable> {
        READY.with_borrow_mut(|ready| {
            if ready.waiting == 0 {
                return None;
            }
            let index = pick(ready.len());
            ready.remove(index)
        })
    }

    /// True if no task is ready and the main task has not completed.
    pub(super) fn is_idle(&self) -> bool {
        !self.finished.get()
            && READY.with_borrow(|ready| ready.waiting == 0)
            && !self.remote.pending.load(Ordering::SeqCst)
    }

    /// Moves work sent by other threads to the queues.
    pub(super) fn receive(&self) {
        // Cleared before the list is taken: work that arrives in between sets it again.
        if !self.remote.pending.swap(false, Ordering::SeqCst) {
            return;
        }
        let arrivals = std::mem::take(&mut *self.remote.lock());
        for arrival in arrivals {
            match arrival {
                RemoteWork::Task(group, task) => READY.with_borrow_mut(|ready| ready.push(group, task)),
                RemoteWork::Job(group, job) => {
                    READY.with_borrow_mut(|ready| ready.current = group);
                    job();
                }
            }
        }
    }

    /// Announces that the reactor is about to wait in the kernel. Returns false if work has
    /// arrived; then it must not wait.
    pub(super) fn prepare_sleep(&self) -> bool {
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

    /// Drops the ready tasks and returns their number.
    pub(super) fn drop_ready(&self) -> usize {
        // Jobs are dropped without running, because they would spawn new tasks.
        let arrivals = std::mem::take(&mut *self.remote.lock());
        let ready = READY.replace(ReadyQueues::new());
        arrivals.len() + ready.len()
    }
}
