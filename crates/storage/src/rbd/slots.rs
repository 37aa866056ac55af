//! Limit on the requests of one image in flight at the cluster, and their start times.
//!
//! A cluster that does not answer holds every request, and its memory. So each request first
//! acquires a slot (`RbdRequestSlot`), and releases it when its memory is free, even after its
//! caller was cancelled. Without a free slot a request waits; other images are not affected.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{
        AtomicU64, AtomicUsize,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use policy::time::{Duration, Instant};

use reactor::{OperationPermit, OperationPermits};

/// Number of slots: more than a deep queue needs. librbd itself submits 1024 at a time for all
/// images of a connection (`objecter_inflight_ops`).
pub(super) const SLOTS: usize = 256;

/// The slots of one image.
#[derive(Debug)]
pub(super) struct RbdRequestSlots {
    /// Start time of the request in each slot, in nanoseconds; 0 if it is free.
    since: Box<[AtomicU64]>,
    /// Indices of free slots: at least one for each free permit.
    free: Mutex<Vec<usize>>,
    permits: Arc<OperationPermits>,
    /// Number of requests in flight that change the image.
    changes: AtomicUsize,
}

/// A slot, released when dropped.
#[derive(Debug)]
pub struct RbdRequestSlot {
    slots: Arc<RbdRequestSlots>,
    index: usize,
    is_change: bool,
    // Dropped last, so that there is a free index for each free permit.
    _permit: OperationPermit,
}

impl RbdRequestSlots {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            since: (0..SLOTS).map(|_| AtomicU64::new(0)).collect(),
            free: Mutex::new((0..SLOTS).rev().collect()),
            permits: OperationPermits::new(SLOTS),
            changes: AtomicUsize::new(0),
        })
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        // A panic while pushing to a Vec leaves it valid.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free slot, in the order of arrival.
    pub(super) async fn acquire(self: &Arc<Self>) -> RbdRequestSlot {
        let permit = self.permits.acquire().await;
        let index = self.free().pop().expect("a place for each permit");
        self.since[index].store(reactor::coarse_now().as_nanos().max(1), Relaxed);
        RbdRequestSlot { slots: Arc::clone(self), index, is_change: false, _permit: permit }
    }

    /// True if a request in flight changes the image.
    pub(super) fn has_changes(&self) -> bool {
        self.changes.load(Acquire) > 0
    }

    /// Age of the oldest request in flight.
    pub(super) fn oldest_age(&self, now: Instant) -> Option<Duration> {
        let since = self.since.iter().map(|since| since.load(Relaxed)).filter(|&since| since > 0).min()?;
        Some(Duration::from_nanos(now.as_nanos().saturating_sub(since)))
    }
}

impl RbdRequestSlot {
    /// Marks the request as one that changes the image.
    pub(super) fn for_change(mut self) -> Self {
        self.slots.changes.fetch_add(1, Relaxed);
        self.is_change = true;
        self
    }
}

impl Drop for RbdRequestSlot {
    fn drop(&mut self) {
        if self.is_change {
            self.slots.changes.fetch_sub(1, Release);
        }
        self.slots.since[self.index].store(0, Relaxed);
        self.slots.free().push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::{now, sim, sleep_until, spawn_joinable};

    #[test]
    fn requests_wait_for_a_slot_and_report_the_oldest() {
        sim::run(1, async {
            let slots = RbdRequestSlots::new();
            assert_eq!(slots.oldest_age(now()), None);
            // The instant 0 means a free slot.
            sleep_until(now() + Duration::from_millis(1)).await;
            let mut acquired = Vec::new();
            for _ in 0..SLOTS {
                acquired.push(slots.acquire().await);
                sleep_until(now() + Duration::from_millis(1)).await;
            }
            assert_eq!(slots.oldest_age(now()), Some(Duration::from_millis(SLOTS as u64)));
            let late = {
                let slots = Arc::clone(&slots);
                spawn_joinable(async move { slots.acquire().await })
            };
            sleep_until(now() + Duration::from_secs(1)).await;
            assert!(!late.is_finished());
            drop(acquired.remove(0));
            let late = late.await;
            sleep_until(now() + Duration::from_millis(5)).await;
            drop(acquired);
            assert_eq!(slots.oldest_age(now()), Some(Duration::from_millis(5)));
            drop(late);
            assert_eq!(slots.oldest_age(now()), None);
        });
    }
}
