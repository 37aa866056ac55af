//! What a reactor has done, for whoever asks from another thread. Never read by the reactor itself.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A sum that one thread alone adds to.
#[derive(Debug, Default)]
pub(super) struct Sum(AtomicU64);

impl Sum {
    /// Without a locked instruction: nobody else writes.
    pub(super) fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }
}

/// Of one reactor, since it began. Its own thread alone adds to it.
#[derive(Debug, Default)]
pub struct Figures {
    pub(super) turns: Sum,
    pub(super) submitted: Sum,
    pub(super) completed: Sum,
    pub(super) sleeps: Sum,
}

/// [`Figures`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingTotals {
    /// Rounds of its loop.
    pub turns: u64,
    /// Operations that the kernel took from the ring.
    pub submitted: u64,
    /// Operations that the kernel completed.
    pub completed: u64,
    /// How often there was nothing to do but wait.
    pub sleeps: u64,
}

impl Figures {
    /// What was done so far.
    pub fn totals(&self) -> RingTotals {
        let get = |sum: &Sum| sum.0.load(Relaxed);
        RingTotals {
            turns: get(&self.turns),
            submitted: get(&self.submitted),
            completed: get(&self.completed),
            sleeps: get(&self.sleeps),
        }
    }
}
