//! A bound on how many operations run at once, for waiters on any thread.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use event_listener::Event;

/// A number of permits. An operation holds one while it runs; further operations wait.
#[derive(Debug)]
pub(crate) struct Permits {
    free: AtomicUsize,
    freed: Event,
}

/// One of [`Permits`], returned when dropped.
#[derive(Debug)]
pub(crate) struct Permit(Arc<Permits>);

impl Permits {
    /// `count` permits, all free.
    pub(crate) fn new(count: usize) -> Arc<Self> {
        Arc::new(Self { free: AtomicUsize::new(count), freed: Event::new() })
    }

    /// Waits for a permit.
    pub(crate) async fn take(self: &Arc<Self>) -> Permit {
        loop {
            if let Some(permit) = self.try_take() {
                return permit;
            }
            // Listens before it looks again, or the last permit could be returned in between.
            let freed = self.freed.listen();
            if let Some(permit) = self.try_take() {
                return permit;
            }
            freed.await;
        }
    }

    /// Number of free permits.
    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.free.load(SeqCst)
    }

    fn try_take(self: &Arc<Self>) -> Option<Permit> {
        let taken = self.free.fetch_update(SeqCst, SeqCst, |free| free.checked_sub(1));
        taken.is_ok().then(|| Permit(Arc::clone(self)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.free.fetch_add(1, SeqCst);
        self.0.freed.notify_additional(1);
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use super::*;
    use crate::reactor::{sim, spawn_joinable, yield_now};

    #[test]
    fn no_more_run_than_there_are_permits_and_all_run() {
        for seed in 0..50 {
            sim::run(seed, async {
                let permits = Permits::new(3);
                let (running, most) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
                let tasks: Vec<_> = (0..20)
                    .map(|_| {
                        let (permits, running, most) =
                            (Arc::clone(&permits), Rc::clone(&running), Rc::clone(&most));
                        spawn_joinable(async move {
                            let _permit = permits.take().await;
                            running.set(running.get() + 1);
                            most.set(most.get().max(running.get()));
                            yield_now().await;
                            running.set(running.get() - 1);
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                assert!(most.get() <= 3 && most.get() > 0);
            });
        }
    }
}
