//! Who is inside: a count of requests in flight that shares no cache line between threads.
//!
//! ```text
//!   enter ─► counts in its thread's slot, under the current generation ─► … ─► leaves the slot it counted in
//!   settle:  changes the generation, waits until all slots' counts of the old one are zero
//!   close:   keeps newcomers out, settles both generations; dropping the result lets them in again
//! ```
//!
//! Two things need it. Requests that looked up a cluster earlier may still read or write it after
//! it is released; it is used again only when they have left ([`Gate::settle`]). And a change of
//! the whole image (a snapshot, a resize) needs nobody inside ([`Gate::close`]).
//!
//! Why nobody slips through: whoever enters counts first and looks at the state again afterwards;
//! whoever settles changes the state first and reads the counts afterwards. All four accesses are
//! sequentially consistent. So either the one sees the new state and leaves, or the other sees the
//! count.

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

use storage::RangeLocks;

/// Largest number of slots: 8 KiB of memory for each count that has them.
const MOST_SLOTS: usize = 64;
/// In the state: which of the two generations is counted.
const GENERATION: usize = 1;
/// In the state: nobody is let in.
const CLOSED: usize = 2;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Gate {
    state: AtomicUsize,
    slots: Box<[Slot]>,
    /// How many wait for counts to fall.
    waiting: AtomicUsize,
    changed: Event,
    /// One at a time settles or closes.
    turn: RangeLocks,
}

/// On a cache line of its own, and the one that processors fetch with it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Slot {
    inside: [AtomicUsize; 2],
}

/// Somebody inside. Dropping it leaves.
#[derive(Debug)]
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    slot: usize,
    generation: usize,
}

/// Nobody is inside until this is dropped.
#[derive(Debug)]
pub(super) struct Closed<'a> {
    gate: &'a Gate,
    _turn: storage::RangeGuard<'a>,
}

/// Number of slots in anything that has one for each thread: at least one more than there are
/// processors, as the main thread has one as well. Threads beyond this number share slots.
pub(super) fn slots() -> usize {
    static SLOTS: LazyLock<usize> = LazyLock::new(|| {
        let processors = available_parallelism().map_or(MOST_SLOTS, usize::from);
        (processors + 1).min(MOST_SLOTS)
    });
    *SLOTS
}

/// The number of this thread's slot, below [`slots`].
pub(super) fn slot_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static SLOT: usize = NEXT.fetch_add(1, Relaxed) % slots());
    SLOT.with(|slot| *slot)
}

impl Gate {
    pub(super) fn new() -> Self {
        Self {
            state: AtomicUsize::new(0),
            slots: (0..slots()).map(|_| Slot::default()).collect(),
            waiting: AtomicUsize::new(0),
            changed: Event::new(),
            turn: RangeLocks::default(),
        }
    }

    /// Waits while the gate is closed.
    pub(super) async fn enter(&self) -> Pass<'_> {
        loop {
            if let Some(pass) = self.try_enter() {
                return pass;
            }
            let listener = self.changed.listen();
            // Opened before it listened: nobody would tell it.
            if self.state.load(SeqCst) & CLOSED != 0 {
                listener.await;
            }
        }
    }

    fn try_enter(&self) -> Option<Pass<'_>> {
        let slot = slot_of_thread();
        loop {
            let state = self.state.load(SeqCst);
            if state & CLOSED != 0 {
                return None;
            }
            let generation = state & GENERATION;
            self.slots[slot].inside[generation].fetch_add(1, SeqCst);
            let pass = Pass { gate: self, slot, generation };
            if self.state.load(SeqCst) == state {
                return Some(pass);
            }
        }
    }

    /// Waits until everybody has left who was inside when this was called.
    pub(super) async fn settle(&self) {
        let _turn = self.turn.exclusive(0..1).await;
        self.settle_in_turn().await;
    }

    async fn settle_in_turn(&self) {
        let old = self.state.fetch_xor(GENERATION, SeqCst) & GENERATION;
        self.emptied(old).await;
    }

    /// Keeps newcomers out and waits until nobody is inside. Whoever is inside must not wait for
    /// what comes after this.
    pub(super) async fn close(&self) -> Closed<'_> {
        let turn = self.turn.exclusive(0..1).await;
        let closed = Closed { gate: self, _turn: turn };
        self.state.fetch_or(CLOSED, SeqCst);
        self.emptied(0).await;
        self.emptied(1).await;
        closed
    }

    async fn emptied(&self, generation: usize) {
        self.waiting.fetch_add(1, SeqCst);
        let waiting = Waiting(self);
        loop {
            let listener = self.changed.listen();
            if self.slots.iter().all(|slot| slot.inside[generation].load(SeqCst) == 0) {
                break;
            }
            listener.await;
        }
        drop(waiting);
    }
}

struct Waiting<'a>(&'a Gate);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, SeqCst);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.slots[self.slot].inside[self.generation].fetch_sub(1, SeqCst);
        if self.gate.waiting.load(SeqCst) > 0 {
            self.gate.changed.notify(usize::MAX);
        }
    }
}

impl Drop for Closed<'_> {
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
    fn who_was_inside_is_waited_for_and_who_comes_later_is_not() {
        for seed in 0..100 {
            sim::run(seed, async {
                let gate = Rc::new(Gate::new());
                let first = gate.enter().await;
                let settled = Rc::new(Cell::new(false));
                let task = spawn_joinable({
                    let (gate, settled) = (Rc::clone(&gate), Rc::clone(&settled));
                    async move {
                        gate.settle().await;
                        settled.set(true);
                    }
                });
                while gate.waiting.load(SeqCst) == 0 {
                    yield_now().await;
                }
                yield_now().await;
                assert!(!settled.get(), "somebody is inside");
                let second = gate.enter().await;
                drop(first);
                task.await;
                assert!(settled.get());
                drop(second);
            });
        }
    }

    #[test]
    fn a_closed_gate_has_nobody_inside() {
        for seed in 0..200 {
            sim::run(seed, async {
                let gate = Rc::new(Gate::new());
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
                                    let _pass = gate.enter().await;
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
