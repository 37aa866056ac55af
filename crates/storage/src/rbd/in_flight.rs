//! Limit on the requests of one image in flight at the cluster, and their start times.
//!
//! A cluster that does not answer holds every request, and its memory. So each request first
//! acquires a slot (`Place`), and releases it when its memory is free, even after its caller was
//! cancelled. Without a free slot a request waits; other images are not affected.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use policy::time::{Duration, Instant};

use reactor::{Permit, Permits};

/// Number of slots: more than a deep queue needs. librbd itself submits 1024 at a time for all
/// images of a connection (`objecter_inflight_ops`).
pub(super) const MOST: usize = 256;

/// The slots of one image.
#[derive(Debug)]
pub(super) struct InFlight {
    /// Start time of the request in each slot, in nanoseconds; 0 if it is free.
    since: Box<[AtomicU64]>,
    /// Indices of free slots: at least one for each free permit.
    free: Mutex<Vec<usize>>,
    permits: Arc<Permits>,
}

/// A slot, released when dropped.
#[derive(Debug)]
pub struct Place {
    of: Arc<InFlight>,
    index: usize,
    // Dropped last, so that there is a free index for each free permit.
    _permit: Permit,
}

impl InFlight {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            since: (0..MOST).map(|_| AtomicU64::new(0)).collect(),
            free: Mutex::new((0..MOST).rev().collect()),
            permits: Permits::new(MOST),
        })
    }

    fn free(&self) -> MutexGuard<'_, Vec<usize>> {
        // A panic while pushing to a Vec leaves it valid.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a free slot, in the order of arrival.
    pub(super) async fn enter(self: &Arc<Self>) -> Place {
        let permit = self.permits.take().await;
        let index = self.free().pop().expect("a place for each permit");
        self.since[index].store(reactor::recently().as_nanos().max(1), Relaxed);
        Place { of: Arc::clone(self), index, _permit: permit }
    }

    /// Age of the oldest request in flight.
    pub(super) fn oldest(&self, now: Instant) -> Option<Duration> {
        let since = self.since.iter().map(|since| since.load(Relaxed)).filter(|&since| since > 0).min()?;
        Some(Duration::from_nanos(now.as_nanos().saturating_sub(since)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.since[self.index].store(0, Relaxed);
        self.of.free().push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::{now, sim, sleep_until, spawn_joinable};

    #[test]
    fn who_finds_no_place_waits_for_one_and_the_oldest_is_known() {
        sim::run(1, async {
            let places = InFlight::new();
            assert_eq!(places.oldest(now()), None);
            // The instant 0 means a free slot.
            sleep_until(now() + Duration::from_millis(1)).await;
            let mut taken = Vec::new();
            for _ in 0..MOST {
                taken.push(places.enter().await);
                sleep_until(now() + Duration::from_millis(1)).await;
            }
            assert_eq!(places.oldest(now()), Some(Duration::from_millis(MOST as u64)));
            let late = {
                let places = Arc::clone(&places);
                spawn_joinable(async move { places.enter().await })
            };
            sleep_until(now() + Duration::from_secs(1)).await;
            assert!(!late.is_finished());
            drop(taken.remove(0));
            let late = late.await;
            sleep_until(now() + Duration::from_millis(5)).await;
            drop(taken);
            assert_eq!(places.oldest(now()), Some(Duration::from_millis(5)));
            drop(late);
            assert_eq!(places.oldest(now()), None);
        });
    }
}
