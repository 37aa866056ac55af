//! Requests that the cluster has: how many at most, and since when the oldest.
//!
//! A cluster that stands still keeps every request, and the memory with it, until it goes on. So
//! each takes a place first, and gives it back when its memory is free again, also where nobody
//! waits for it any more. Without a place it waits, and others do not notice.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use policy::time::{Duration, Instant};

use reactor::{Permit, Permits};

/// Places: more than a deep queue takes. librbd itself passes on 1024 at a time for all images of a
/// connection (`objecter_inflight_ops`).
pub(super) const MOST: usize = 256;

/// The places of one image.
#[derive(Debug)]
pub(super) struct InFlight {
    /// When the request in it began, in nanoseconds; 0: none is.
    since: Box<[AtomicU64]>,
    /// As many as there are permits that no request holds, or more for a moment.
    free: Mutex<Vec<usize>>,
    permits: Arc<Permits>,
}

/// A place, given back when dropped.
#[derive(Debug)]
pub struct Place {
    of: Arc<InFlight>,
    index: usize,
    /// Returned after the place.
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

    /// A place, once there is one, in the order of arrival.
    pub(super) async fn enter(self: &Arc<Self>) -> Place {
        let permit = self.permits.take().await;
        let index = self.free().pop().expect("a place for each permit");
        self.since[index].store(reactor::recently().as_nanos().max(1), Relaxed);
        Place { of: Arc::clone(self), index, _permit: permit }
    }

    /// How long the oldest has been under way.
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
            // The instant 0 stands for none.
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
