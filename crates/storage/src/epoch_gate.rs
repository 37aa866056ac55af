//! Epochs of requests: a count of requests in flight that shares no cache line between threads.
//!
//! ```text
//!   enter: increments its thread's slot of the current generation; the guard decrements that slot
//!   wait_for_earlier_requests: switches the generation, waits until the old one's slots are zero
//!   close: blocks new requests, waits for both generations; dropping the result unblocks
//! ```
//!
//! Two operations of qcow2 need it. A freed cluster may still be read or written by requests that
//! looked it up earlier, so it is reused only when they have completed
//! ([`EpochGate::wait_for_earlier_requests`]). A change of the whole image (snapshot, resize)
//! requires that no request is in flight ([`EpochGate::close`]). A disk needs the latter for a
//! point in time of its content.
//!
//! Correctness: `enter` increments first and loads the state again afterwards;
//! `wait_for_earlier_requests` changes the state first and loads the counts afterwards. All four
//! accesses are sequentially consistent, so either `enter` sees the new state and backs out, or
//! `wait_for_earlier_requests` sees the count.
//!
//! [`RequestGuard`] is the guard of a request, [`ExclusiveGuard`] that of exclusive access.

use std::{
    sync::{
        LazyLock,
        atomic::{
            AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread::available_parallelism,
};

use event_listener::Event;

use super::{RangeGuard, RangeLocks};

// 8 KiB of memory for each set of counters.
const MAX_SLOTS: usize = 64;
/// Bit of the state: generation that new requests are counted in.
const GENERATION: usize = 1;
/// Bit of the state: new requests wait.
const CLOSED: usize = 2;

/// Epoch gate. See the head of this file.
#[derive(Debug)]
pub struct EpochGate {
    state: AtomicUsize,
    slots: Box<[RequestCountSlot]>,
    /// Number of tasks that wait for counts to reach zero.
    waiters: AtomicUsize,
    changed: Event,
    /// Serializes `wait_for_earlier_requests` and `close`.
    close_lock: RangeLocks,
}

// Two cache lines: processors prefetch the adjacent one.
#[derive(Debug, Default)]
#[repr(align(128))]
struct RequestCountSlot {
    inside: [AtomicUsize; 2],
}

/// Guard of a request in flight; dropping it ends the request.
#[derive(Debug)]
pub struct RequestGuard<'a> {
    gate: &'a EpochGate,
    slot: usize,
    generation: usize,
}

/// Guard of exclusive access: no request is in flight until it is dropped.
#[derive(Debug)]
pub struct ExclusiveGuard<'a> {
    gate: &'a EpochGate,
    _lock: RangeGuard<'a>,
}

/// Number of slots in structures with one per thread: at least the number of processors plus one
/// for the main thread. Further threads share slots.
pub fn slots() -> usize {
    static SLOTS: LazyLock<usize> = LazyLock::new(|| {
        let processors = available_parallelism().map_or(MAX_SLOTS, usize::from);
        (processors + 1).min(MAX_SLOTS)
    });
    *SLOTS
}

/// Slot of this thread, below [`slots`].
pub fn slot_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static SLOT: usize = NEXT.fetch_add(1, Relaxed) % slots());
    SLOT.with(|slot| *slot)
}

impl Default for EpochGate {
    fn default() -> Self {
        Self {
            state: AtomicUsize::new(0),
            slots: (0..slots()).map(|_| RequestCountSlot::default()).collect(),
            waiters: AtomicUsize::new(0),
            changed: Event::new(),
            close_lock: RangeLocks::default(),
        }
    }
}

impl EpochGate {
    /// Counts a request; waits while the gate is closed.
    pub async fn enter(&self) -> RequestGuard<'_> {
        loop {
            if let Some(guard) = self.try_enter() {
                return guard;
            }
            let listener = self.changed.listen();
            // The gate may have been opened before `listen`, whose notification would then be
            // missed.
            if self.state.load(SeqCst) & CLOSED != 0 {
                listener.await;
            }
        }
    }

    /// Counts a request; `None` while the gate is closed.
    pub fn try_enter(&self) -> Option<RequestGuard<'_>> {
        let slot = slot_of_thread();
        loop {
            let state = self.state.load(SeqCst);
            if state & CLOSED != 0 {
                return None;
            }
            let generation = state & GENERATION;
            // First count, then check the state again: see the head of this file.
            self.slots[slot].inside[generation].fetch_add(1, SeqCst);
            let guard = RequestGuard { gate: self, slot, generation };
            if self.state.load(SeqCst) == state {
                return Some(guard);
            }
        }
    }

    /// Waits for all requests that were in flight at the time of the call.
    pub async fn wait_for_earlier_requests(&self) {
        let _turn = self.close_lock.exclusive(0..1).await;
        self.wait_for_earlier_requests_in_order().await;
    }

    async fn wait_for_earlier_requests_in_order(&self) {
        let old = self.state.fetch_xor(GENERATION, SeqCst) & GENERATION;
        self.wait_until_drained(old).await;
    }

    /// Blocks new requests and waits until none is in flight. A task that holds a guard must not
    /// await it: deadlock.
    pub async fn close(&self) -> ExclusiveGuard<'_> {
        let lock = self.close_lock.exclusive(0..1).await;
        // Created before the first await, so that cancellation opens the gate again.
        let closed = ExclusiveGuard { gate: self, _lock: lock };
        self.state.fetch_or(CLOSED, SeqCst);
        self.wait_until_drained(0).await;
        self.wait_until_drained(1).await;
        closed
    }

    async fn wait_until_drained(&self, generation: usize) {
        // Announced before the counts are read, or the last guard could be dropped without a
        // notification.
        self.waiters.fetch_add(1, SeqCst);
        let waiter = DrainWaiter(self);
        loop {
            let listener = self.changed.listen();
            if self.slots.iter().all(|slot| slot.inside[generation].load(SeqCst) == 0) {
                break;
            }
            listener.await;
        }
        drop(waiter);
    }
}

impl ExclusiveGuard<'_> {
    /// True if it is a guard of this gate.
    pub fn is_of(&self, gate: &EpochGate) -> bool {
        std::ptr::eq(self.gate, gate)
    }
}

struct DrainWaiter<'a>(&'a EpochGate);

impl Drop for DrainWaiter<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, SeqCst);
    }
}

impl Drop for RequestGuard<'_> {
    fn drop(&mut self) {
        self.gate.slots[self.slot].inside[self.generation].fetch_sub(1, SeqCst);
        if self.gate.waiters.load(SeqCst) > 0 {
            self.gate.changed.notify(usize::MAX);
        }
    }
}

impl Drop for ExclusiveGuard<'_> {
    fn drop(&mut self) {
        self.gate.state.fetch_and(!CLOSED, SeqCst);
        self.gate.changed.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use policy::time::Duration;

    use super::*;
    use reactor::{now, sim, sleep_until, spawn_joinable, yield_now};

    #[test]
    fn wait_covers_only_earlier_requests() {
        for seed in 0..100 {
            sim::run(seed, async {
                let gate = Rc::new(EpochGate::default());
                let first = gate.enter().await;
                let done = Rc::new(Cell::new(false));
                let task = spawn_joinable({
                    let (gate, done) = (Rc::clone(&gate), Rc::clone(&done));
                    async move {
                        gate.wait_for_earlier_requests().await;
                        done.set(true);
                    }
                });
                while gate.waiters.load(SeqCst) == 0 {
                    yield_now().await;
                }
                yield_now().await;
                assert!(!done.get(), "a request is still in flight");
                let second = gate.enter().await;
                drop(first);
                task.await;
                assert!(done.get());
                drop(second);
            });
        }
    }

    #[test]
    fn closed_gate_admits_no_request() {
        for seed in 0..200 {
            sim::run(seed, async {
                let gate = Rc::new(EpochGate::default());
                let inside = Rc::new(Cell::new(0));
                let tasks: Vec<_> = (0..10)
                    .map(|number| {
                        let (gate, inside) = (Rc::clone(&gate), Rc::clone(&inside));
                        spawn_joinable(async move {
                            for _ in 0..20 {
                                let pause = sim::random(|random| random.u64(..100));
                                sleep_until(now() + Duration::from_nanos(pause)).await;
                                if number == 0 {
                                    let _closed = gate.close().await;
                                    assert_eq!(inside.get(), 0);
                                    yield_now().await;
                                    assert_eq!(inside.get(), 0);
                                } else {
                                    let _guard = gate.enter().await;
                                    inside.set(inside.get() + 1);
                                    yield_now().await;
                                    inside.set(inside.get() - 1);
                                }
                            }
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
            });
        }
    }
}
