//! A bound on the number of concurrent operations, for waiters on any thread.
//!
//! Waiters receive permits in the order of arrival. A returned permit passes to the first waiter
//! directly, so an operation that arrives later cannot get it.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

/// A number of permits. An operation holds one while it runs; further operations wait.
#[derive(Debug)]
pub struct OperationPermits(Mutex<PermitQueue>);

#[derive(Debug)]
struct PermitQueue {
    free: usize,
    next_ticket: u64,
    /// Waiters by ticket, in the order of arrival. Empty if a permit is free.
    waiting: BTreeMap<u64, Waker>,
}

/// One of [`OperationPermits`], returned when dropped.
#[derive(Debug)]
pub struct OperationPermit(Arc<OperationPermits>);

impl OperationPermits {
    /// `count` permits, all free.
    pub fn new(count: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(PermitQueue { free: count, next_ticket: 0, waiting: BTreeMap::new() })))
    }

    /// Waits for a permit. The order is that of the first polls.
    pub fn acquire(self: &Arc<Self>) -> impl Future<Output = OperationPermit> + use<> {
        AcquirePermit { permits: Arc::clone(self), ticket: None }
    }

    /// Number of free permits.
    pub fn free(&self) -> usize {
        self.lock().free
    }

    fn lock(&self) -> MutexGuard<'_, PermitQueue> {
        // Every change of the state is complete before a panic could occur.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a permit to the first waiter, or makes it free.
    fn release(&self) {
        let first = {
            let mut state = self.lock();
            let first = state.waiting.pop_first();
            if first.is_none() {
                state.free += 1;
            }
            first
        };
        if let Some((_, waker)) = first {
            waker.wake();
        }
    }
}

struct AcquirePermit {
    permits: Arc<OperationPermits>,
    /// Set while waiting. A ticket that is no longer in the queue owns a permit.
    ticket: Option<u64>,
}

impl Future for AcquirePermit {
    type Output = OperationPermit;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<OperationPermit> {
        let permits = Arc::clone(&self.permits);
        let mut state = permits.lock();
        match self.ticket {
            None if state.free > 0 => state.free -= 1,
            None => {
                let ticket = state.next_ticket;
                state.next_ticket += 1;
                state.waiting.insert(ticket, context.waker().clone());
                self.ticket = Some(ticket);
                return Poll::Pending;
            }
            Some(ticket) => {
                if let Some(waker) = state.waiting.get_mut(&ticket) {
                    waker.clone_from(context.waker());
                    return Poll::Pending;
                }
                self.ticket = None;
            }
        }
        drop(state);
        Poll::Ready(OperationPermit(permits))
    }
}

impl Drop for AcquirePermit {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket
            // The permit was assigned to this waiter, but it was dropped before the next poll.
            && self.permits.lock().waiting.remove(&ticket).is_none()
        {
            self.permits.release();
        }
    }
}

impl Drop for OperationPermit {
    fn drop(&mut self) {
        self.0.release();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::{Cell, RefCell},
        pin::pin,
        rc::Rc,
    };

    use super::*;
    use crate::{sim, spawn_joinable, yield_now};

    #[test]
    fn permits_bound_concurrency_and_all_operations_run() {
        for seed in 0..50 {
            sim::run(seed, async {
                let permits = OperationPermits::new(3);
                let (running, max_running) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
                let tasks: Vec<_> = (0..20)
                    .map(|_| {
                        let (permits, running, max_running) =
                            (Arc::clone(&permits), Rc::clone(&running), Rc::clone(&max_running));
                        spawn_joinable(async move {
                            let _permit = permits.acquire().await;
                            running.set(running.get() + 1);
                            max_running.set(max_running.get().max(running.get()));
                            yield_now().await;
                            running.set(running.get() - 1);
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                assert!(max_running.get() <= 3 && max_running.get() > 0);
                assert_eq!(permits.free(), 3);
            });
        }
    }

    #[test]
    fn a_later_arrival_does_not_overtake_a_waiter() {
        for seed in 0..50 {
            sim::run(seed, async move {
                let permits = OperationPermits::new(1);
                let order = Rc::new(RefCell::new(Vec::new()));
                let permit = permits.acquire().await;
                let mut tasks = Vec::new();
                for number in 0..5 {
                    let (task_permits, task_order) = (Arc::clone(&permits), Rc::clone(&order));
                    tasks.push(spawn_joinable(async move {
                        let _permit = task_permits.acquire().await;
                        task_order.borrow_mut().push(number);
                        yield_now().await;
                    }));
                    while permits.lock().waiting.len() <= number {
                        yield_now().await;
                    }
                }
                drop(permit);
                let last = permits.acquire().await;
                order.borrow_mut().push(5);
                drop(last);
                for task in tasks {
                    task.await;
                }
                assert_eq!(*order.borrow(), [0, 1, 2, 3, 4, 5], "seed {seed}");
            });
        }
    }

    #[test]
    fn cancelled_waiter_passes_its_permit_on() {
        sim::run(1, async {
            let permits = OperationPermits::new(1);
            let held = permits.acquire().await;
            let mut context = Context::from_waker(Waker::noop());
            {
                let mut first = pin!(permits.acquire());
                assert!(first.as_mut().poll(&mut context).is_pending());
                drop(held);
                assert_eq!(permits.free(), 0, "it belongs to the waiter");
            }
            assert_eq!(permits.free(), 1);
            let _held = permits.acquire().await;
            {
                let mut second = pin!(permits.acquire());
                assert!(second.as_mut().poll(&mut context).is_pending());
            }
            assert!(permits.lock().waiting.is_empty());
        });
    }
}
