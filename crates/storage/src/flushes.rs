//! Flushes of one device: one at a time, and none if nothing was changed since the last.
//!
//! ```text
//!   changes end    1   2         3   4             5
//!   flushes          ├── A: 1, 2 ──┤├── B: 3, 4 ──┤  ├── C: 5 ──┤
//!   requested        A     B, B  B         C
//! ```
//!
//! All callers that request a flush share the next one to begin. If nothing was changed since the
//! last one began, the request completes at once. So the device receives at most one flush for each
//! change, however many a client sends. QEMU's block layer counts in the same way.
//!
//! Changes are counted at the device, below every format: an image's own writes (tables, copies,
//! snapshots) count like a guest's.
//!
//! The first flush always reaches the device: earlier writers, and whether they flushed, are
//! unknown. A failed flush covers nothing, so the next one reaches the device as well and reports
//! whether the failure persists.

use std::{
    future::Future,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use event_listener::Event;

use reactor::error::Result;

/// The flushes of one device.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// Number of changes that have ended.
    changes: AtomicU64,
    state: Mutex<FlushesState>,
    completed: Event,
}

#[derive(Debug, Default)]
struct FlushesState {
    running: bool,
    /// Number of flushes that have ended.
    count: u64,
    /// The changes that the last flush would cover, and its result.
    last: Option<(u64, Result<()>)>,
    /// The changes that are on stable storage.
    durable: Option<u64>,
}

impl Flushes {
    /// Begins a change of the device, which ends when the value is dropped: after the change has
    /// completed, failed or been cancelled, and before its result is returned to the client.
    pub(super) fn begin_change(&self) -> UnflushedChange<'_> {
        UnflushedChange(&self.changes)
    }

    /// Returns once all changes that ended before the call are on stable storage. Calls `flush` at
    /// most once; another caller's flush may serve instead.
    ///
    /// # Errors
    /// Errors of `flush`.
    pub(super) async fn run<F: Future<Output = Result<()>>>(&self, flush: impl FnOnce() -> F) -> Result<()> {
        let required = self.changes.load(Ordering::Acquire);
        let first = self.lock().count;
        let covered = loop {
            // Listen before looking at the state, so that a flush that ends in between is not
            // missed.
            let completed = self.completed.listen();
            {
                let mut state = self.lock();
                if state.durable.is_some_and(|durable| durable >= required) {
                    return Ok(());
                }
                // A flush that began after these changes and ended after the call: share its
                // result. An older failure is not this caller's: it makes another attempt.
                if let Some((covered, result)) = state.last
                    && state.count > first
                    && covered >= required
                {
                    return result;
                }
                if !state.running {
                    state.running = true;
                    // Read when the flush begins: changes that end during it are left to the next
                    // one.
                    break self.changes.load(Ordering::Acquire);
                }
            }
            completed.await;
        };
        let mut running = RunningFlush { flushes: self, outcome: None };
        let result = flush().await;
        running.outcome = Some((covered, result));
        result
    }

    fn lock(&self) -> MutexGuard<'_, FlushesState> {
        // Each change of the state is complete before any code that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Flushes::begin_change`].
#[must_use = "the change lasts until it is dropped"]
pub(super) struct UnflushedChange<'a>(&'a AtomicU64);

impl Drop for UnflushedChange<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// A flush in progress. If its caller is cancelled, another caller starts over.
struct RunningFlush<'a> {
    flushes: &'a Flushes,
    outcome: Option<(u64, Result<()>)>,
}

impl Drop for RunningFlush<'_> {
    fn drop(&mut self) {
        {
            let mut state = self.flushes.lock();
            state.running = false;
            if let Some((covered, result)) = self.outcome {
                state.count += 1;
                state.last = self.outcome;
                if result.is_ok() {
                    state.durable = Some(covered);
                }
            }
        }
        // Without an outcome the flush was cancelled. A waiter then finds `running` false and
        // begins one.
        self.flushes.completed.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use policy::time::Duration;

    use super::*;
    use reactor::{error::Error, now, sim, sleep_until, spawn_joinable, timeout};

    /// A device whose flush takes a second.
    #[derive(Clone, Default)]
    struct SlowFlushDisk {
        flushes: Rc<Flushes>,
        reached: Rc<Cell<u64>>,
        error: Rc<Cell<Option<Error>>>,
    }

    impl SlowFlushDisk {
        async fn flush(self) -> Result<()> {
            let device = || async {
                self.reached.set(self.reached.get() + 1);
                sleep_until(now() + Duration::from_secs(1)).await;
                self.error.get().map_or(Ok(()), Err)
            };
            self.flushes.run(device).await
        }

        async fn flush_many(&self, count: usize) -> Vec<Result<()>> {
            let tasks: Vec<_> = (0..count).map(|_| spawn_joinable(self.clone().flush())).collect();
            let mut results = Vec::new();
            for task in tasks {
                results.push(task.await);
            }
            results
        }
    }

    #[test]
    fn a_thousand_flushes_reach_the_device_once_per_change() {
        sim::run(1, async {
            let disk = SlowFlushDisk::default();
            assert!(disk.flush_many(1000).await.iter().all(Result::is_ok));
            assert_eq!(disk.reached.get(), 1, "earlier writers are unknown");
            assert!(disk.flush_many(1000).await.iter().all(Result::is_ok));
            assert_eq!(disk.reached.get(), 1);
            drop(disk.flushes.begin_change());
            assert!(disk.flush_many(1000).await.iter().all(Result::is_ok));
            assert_eq!(disk.reached.get(), 2);
        });
    }

    #[test]
    fn changes_during_a_flush_need_another_flush() {
        sim::run(1, async {
            let disk = SlowFlushDisk::default();
            let first = spawn_joinable(disk.clone().flush());
            sleep_until(now() + Duration::from_millis(500)).await;
            drop(disk.flushes.begin_change());
            let began = now();
            assert!(disk.flush_many(10).await.iter().all(Result::is_ok));
            assert_eq!((now() - began).as_nanos(), 1_500_000_000, "the rest of the first, and the second");
            assert_eq!((first.await, disk.reached.get()), (Ok(()), 2));
        });
    }

    #[test]
    fn a_failed_flush_fails_all_waiters_and_is_retried() {
        sim::run(1, async {
            let disk = SlowFlushDisk::default();
            disk.error.set(Some(Error::IO));
            assert!(disk.flush_many(10).await.iter().all(|result| *result == Err(Error::IO)));
            assert_eq!(disk.reached.get(), 1);
            assert_eq!(disk.clone().flush().await, Err(Error::IO));
            disk.error.set(None);
            assert_eq!((disk.clone().flush().await, disk.reached.get()), (Ok(()), 3));
        });
    }

    #[test]
    fn a_waiter_replaces_a_cancelled_flush() {
        sim::run(1, async {
            let disk = SlowFlushDisk::default();
            let cancel_after = Duration::from_millis(300);
            let first = spawn_joinable(timeout(cancel_after, disk.clone().flush()));
            sleep_until(now() + Duration::from_millis(100)).await;
            let second = spawn_joinable(disk.clone().flush());
            assert!(first.await.is_err());
            assert_eq!((second.await, disk.reached.get()), (Ok(()), 2));
        });
    }
}
