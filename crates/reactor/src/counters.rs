//! Counters of a reactor, for readers on other threads. Never read by the reactor itself.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter that a single thread writes.
#[derive(Debug, Default)]
pub(super) struct SingleWriterCounter(AtomicU64);

impl SingleWriterCounter {
    /// Without an atomic read-modify-write, because there is one writer.
    pub(super) fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }
}

/// Counters of one reactor since its start. Only its own thread writes them.
#[derive(Debug, Default)]
pub struct RingCounters {
    pub(super) iterations: SingleWriterCounter,
    pub(super) submitted: SingleWriterCounter,
    pub(super) completed: SingleWriterCounter,
    pub(super) sleeps: SingleWriterCounter,
}

/// Values of [`RingCounters`] at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingTotals {
    /// Iterations of the loop.
    pub iterations: u64,
    /// Operations submitted to the ring.
    pub submitted: u64,
    /// Operations completed by the kernel.
    pub completed: u64,
    /// Waits in the kernel without any ready task.
    pub sleeps: u64,
}

impl RingCounters {
    /// Current values.
    pub fn totals(&self) -> RingTotals {
        let get = |sum: &SingleWriterCounter| sum.0.load(Relaxed);
        RingTotals {
            iterations: get(&self.iterations),
            submitted: get(&self.submitted),
            completed: get(&self.completed),
            sleeps: get(&self.sleeps),
        }
    }
}
