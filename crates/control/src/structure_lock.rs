//! Lock on the structure of the running state: the set of disks, groups, exports and servers, and
//! the group of each disk.
//!
//! ```text
//!   exclusive   start, reload, listing of an unavailable disk: until applied or rolled back
//!   shared      commands of clients that change the structure, several at a time
//! ```
//!
//! Hence no client uses a name that a reload frees, or an object that it prepares, before the
//! reload is applied. A waiting exclusive holder precedes later shared ones. Status and I/O never
//! take the lock.

use std::cell::Cell;

use event_listener::Event;

#[derive(Debug, Default)]
pub struct StructureLock {
    is_alone: Cell<bool>,
    shared: Cell<usize>,
    /// Number of tasks that wait for the exclusive lock.
    exclusive_waiters: Cell<usize>,
    freed: Event,
}

/// Guard; releases the lock when dropped.
#[derive(Debug)]
pub struct StructureGuard<'a> {
    lock: &'a StructureLock,
    is_alone: bool,
}

/// Entry in the count of waiting tasks; removed also if the task is cancelled.
struct ExclusiveWaiter<'a>(&'a StructureLock);

impl StructureLock {
    /// True during a start, a reload or the listing of an unavailable disk.
    pub(crate) fn is_exclusively_locked(&self) -> bool {
        self.is_alone.get()
    }

    /// Acquires the exclusive lock; `None` if the lock is held in either mode.
    pub fn try_lock(&self) -> Option<StructureGuard<'_>> {
        let is_free = !self.is_alone.get() && self.shared.get() == 0;
        is_free.then(|| {
            self.is_alone.set(true);
            StructureGuard { lock: self, is_alone: true }
        })
    }

    /// Waits for the exclusive lock.
    pub(crate) async fn lock(&self) -> StructureGuard<'_> {
        self.exclusive_waiters.set(self.exclusive_waiters.get() + 1);
        let _waiting = ExclusiveWaiter(self);
        loop {
            // Registered before the attempt, or a release in between would be missed.
            let freed = self.freed.listen();
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            freed.await;
        }
    }

    /// Waits for a shared lock: until no task holds the exclusive lock or waits for it.
    pub(crate) async fn lock_shared(&self) -> StructureGuard<'_> {
        loop {
            let freed = self.freed.listen();
            if !self.is_alone.get() && self.exclusive_waiters.get() == 0 {
                self.shared.set(self.shared.get() + 1);
                return StructureGuard { lock: self, is_alone: false };
            }
            freed.await;
        }
    }
}

impl Drop for StructureGuard<'_> {
    fn drop(&mut self) {
        match self.is_alone {
            true => self.lock.is_alone.set(false),
            false => self.lock.shared.set(self.lock.shared.get() - 1),
        }
        self.lock.freed.notify(usize::MAX);
    }
}

impl Drop for ExclusiveWaiter<'_> {
    fn drop(&mut self) {
        self.0.exclusive_waiters.set(self.0.exclusive_waiters.get() - 1);
        self.0.freed.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use reactor::sim;

    use super::*;

    #[test]
    fn exclusive_lock_precedes_later_shared_locks() {
        sim::run(1, async {
            let lock = Rc::new(StructureLock::default());
            let (first, second) = (lock.lock_shared().await, lock.lock_shared().await);
            assert!(lock.try_lock().is_none() && !lock.is_exclusively_locked());
            let waiting = Rc::clone(&lock);
            let reload = reactor::spawn_joinable(async move {
                let guard = waiting.lock().await;
                reactor::yield_now().await;
                drop(guard);
                waiting.shared.get()
            });
            reactor::yield_now().await;
            // The reload has run, and is blocked by both guards.
            let waiting = Rc::clone(&lock);
            let command = reactor::spawn_joinable(async move { drop(waiting.lock_shared().await) });
            reactor::yield_now().await;
            drop(first);
            reactor::yield_now().await;
            assert!(!reload.is_finished() && !command.is_finished());
            drop(second);
            assert_eq!(reload.await, 0, "the command has waited");
            command.await;
            assert!(lock.try_lock().is_some());
        });
    }

    #[test]
    fn cancelled_exclusive_waiter_does_not_block_shared_locks() {
        sim::run(1, async {
            let lock = Rc::new(StructureLock::default());
            let guard = lock.lock_shared().await;
            let waiting = Rc::clone(&lock);
            let reload = reactor::spawn_joinable(async move { drop(waiting.lock().await) });
            reactor::yield_now().await;
            reload.cancel().await;
            drop(lock.lock_shared().await);
            drop(guard);
            assert!(lock.try_lock().is_some());
        });
    }
}
