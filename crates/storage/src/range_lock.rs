//! Locks on byte ranges. A plain write costs two atomic additions, and nothing else, while there is
//! no exclusive lock.
//!
//! A read-modify-write rewrites bytes around its own. Between its read and its write no other
//! request may write there, so it locks its blocks *exclusively*. Every other write locks its range
//! *shared*: such writes may overlap each other, because the contract leaves their order open.
//!
//! Exclusive locks are rare, so shared ones have a fast path that accesses no list:
//!
//! ```text
//!   shared:     fast += 1 ;  exclusive == 0 ? ── yes ──► done; at the end  fast -= 1
//!                                  └─ no ─► fast -= 1, queue in the table
//!   exclusive:  exclusive += 1 ;  queue in the table until  fast == 0  and no earlier entry overlaps
//! ```
//!
//! Why a conflict is never missed: all four accesses are sequentially consistent, so all threads
//! agree on their order. Consider a fast writer F (adds to `fast`, then reads `exclusive`) and a
//! modifier M (adds to `exclusive`, then reads `fast`). If F's read precedes M's addition, then F's
//! addition precedes M's read, and M sees it and waits. Otherwise F sees M and queues. Two entries
//! in the table are compared under its mutex. M waits for every fast writer before it, whatever its
//! range. This costs M at most one write's time, and no new fast writer can start while M exists,
//! so M is not starved. Of entries that overlap, the first to arrive is granted first, so no entry
//! is starved.
//!
//! Why no wake-up is lost: M reads `fast` and stores its waker while it holds the mutex. The writer
//! that brings `fast` to zero then reads `exclusive`, sees M (whose addition precedes its read of
//! `fast`), and locks the mutex to wake it.
//!
//! Never holds the mutex across an await, nor while it wakes.

use std::{
    future::poll_fn,
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Poll, Waker},
};

/// The locks of one storage, shared by its worker threads.
#[derive(Debug, Default)]
pub struct RangeLocks {
    /// Number of exclusive locks, held or waited for.
    exclusive: AtomicUsize,
    /// Number of shared locks on the fast path.
    fast: AtomicUsize,
    table: Mutex<RangeLockTable>,
}

#[derive(Debug, Default)]
struct RangeLockTable {
    next_id: u64,
    /// In order of arrival.
    entries: Vec<RangeLockEntry>,
}

#[derive(Debug)]
struct RangeLockEntry {
    id: u64,
    range: Range<u64>,
    exclusive: bool,
    /// Waker of its owner, while it waits.
    waker: Option<Waker>,
}

impl RangeLockEntry {
    fn conflicts(&self, other: &Self) -> bool {
        let overlap = self.range.start < other.range.end && other.range.start < self.range.end;
        overlap && (self.exclusive || other.exclusive)
    }
}

/// A lock that is held or waited for; dropping it releases it.
#[derive(Debug)]
pub struct RangeLockGuard<'a> {
    locks: &'a RangeLocks,
    path: RangeLockPath,
}

#[derive(Debug)]
enum RangeLockPath {
    Fast,
    Queued { id: u64, exclusive: bool },
}

impl RangeLocks {
    /// Waits until no part of `range` is held exclusively.
    pub async fn shared(&self, range: Range<u64>) -> RangeLockGuard<'_> {
        self.fast.fetch_add(1, SeqCst);
        let fast = RangeLockGuard { locks: self, path: RangeLockPath::Fast };
        if self.exclusive.load(SeqCst) == 0 {
            return fast;
        }
        // An exclusive lock exists or is waited for. Release the fast count before queueing, or the
        // modifier would wait for this writer, which waits for the modifier.
        drop(fast);
        self.queue(range, false).await
    }

    /// Waits until no part of `range` is held by another request.
    pub async fn exclusive(&self, range: Range<u64>) -> RangeLockGuard<'_> {
        self.exclusive.fetch_add(1, SeqCst);
        self.queue(range, true).await
    }

    async fn queue(&self, range: Range<u64>, exclusive: bool) -> RangeLockGuard<'_> {
        let id = self.enqueue(range, exclusive);
        // From here on the guard removes the entry, also if the future is dropped while it waits.
        let guard = RangeLockGuard { locks: self, path: RangeLockPath::Queued { id, exclusive } };
        poll_fn(|context| {
            let mut table = self.lock();
            let at = table.position(id);
            let entry = &table.entries[at];
            // Ids grow and entries are pushed in the same order, so earlier entries come first.
            let blocked = table.entries[..at].iter().any(|earlier| earlier.conflicts(entry))
                || exclusive && self.fast.load(SeqCst) > 0;
            table.entries[at].waker = blocked.then(|| context.waker().clone());
            if blocked { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
        guard
    }

    fn enqueue(&self, range: Range<u64>, exclusive: bool) -> u64 {
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        table.entries.push(RangeLockEntry { id, range, exclusive, waker: None });
        id
    }

    fn lock(&self) -> MutexGuard<'_, RangeLockTable> {
        // The table is changed by single pushes, removals and assignments: a panic elsewhere cannot
        // leave it inconsistent.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn release_fast(&self) {
        // Every exclusive entry may have waited for `fast` to reach zero.
        if self.fast.fetch_sub(1, SeqCst) == 1 && self.exclusive.load(SeqCst) > 0 {
            let wakers: Vec<_> = {
                let mut table = self.lock();
                table
                    .entries
                    .iter_mut()
                    .filter(|entry| entry.exclusive)
                    .filter_map(|e| e.waker.take())
                    .collect()
            };
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    fn release_queued(&self, id: u64) {
        let wakers: Vec<_> = {
            let mut table = self.lock();
            let at = table.position(id);
            let released = table.entries.remove(at);
            let later = &mut table.entries[at..];
            later
                .iter_mut()
                .filter(|entry| entry.conflicts(&released))
                .filter_map(|e| e.waker.take())
                .collect()
        };
        wakers.into_iter().for_each(Waker::wake);
    }
}

impl RangeLockTable {
    fn position(&self, id: u64) -> usize {
        self.entries.binary_search_by_key(&id, |entry| entry.id).expect("an entry stays until its guard goes")
    }
}

impl Drop for RangeLockGuard<'_> {
    fn drop(&mut self) {
        match self.path {
            RangeLockPath::Fast => self.locks.release_fast(),
            RangeLockPath::Queued { id, exclusive } => {
                // After the entry is gone: a writer that still reads the old count only queues
                // needlessly.
                self.locks.release_queued(id);
                if exclusive {
                    self.locks.exclusive.fetch_sub(1, SeqCst);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        rc::Rc,
        sync::{
            Arc,
            atomic::{AtomicI32, AtomicU32},
        },
    };

    use policy::time::Duration;

    use super::*;
    use reactor::{PollingMode, now, run, sim, sleep_until, spawn_joinable, yield_now};

    #[test]
    fn overlapping_owners_are_never_together_whatever_the_order() {
        for seed in 0..300 {
            sim::run(seed, async {
                let locks = Rc::new(RangeLocks::default());
                // Positive: the number of shared owners of the cell; negative: an exclusive owner.
                let cells: Rc<[Cell<i32>; 8]> = Rc::default();
                let tasks: Vec<_> = (0..24)
                    .map(|_| {
                        let (locks, cells) = (Rc::clone(&locks), Rc::clone(&cells));
                        spawn_joinable(async move {
                            let (exclusive, start, length, pause) = sim::random(|random| {
                                (random.u8(..4) == 0, random.u64(..6), random.u64(1..=2), random.u64(..50))
                            });
                            sleep_until(now() + Duration::from_nanos(pause)).await;
                            let range = start..start + length;
                            let guard = if exclusive {
                                locks.exclusive(range.clone()).await
                            } else {
                                locks.shared(range.clone()).await
                            };
                            for cell in &cells[start as usize..(start + length) as usize] {
                                assert!(if exclusive { cell.get() == 0 } else { cell.get() >= 0 });
                                cell.set(cell.get() + if exclusive { -1 } else { 1 });
                            }
                            sleep_until(now() + Duration::from_nanos(10)).await;
                            yield_now().await;
                            for cell in &cells[start as usize..(start + length) as usize] {
                                cell.set(cell.get() - if exclusive { -1 } else { 1 });
                            }
                            drop(guard);
                        })
                    })
                    .collect();
                for task in tasks {
                    task.await;
                }
                assert_eq!(locks.fast.load(SeqCst), 0);
                assert_eq!(locks.exclusive.load(SeqCst), 0);
                assert!(locks.lock().entries.is_empty());
            });
        }
    }

    #[test]
    fn cancelled_waiter_leaves_no_entry() {
        sim::run(3, async {
            let locks = Rc::new(RangeLocks::default());
            let writer = locks.shared(0..1).await;
            let waiting = {
                let locks = Rc::clone(&locks);
                spawn_joinable(async move {
                    locks.exclusive(0..1).await;
                })
            };
            while locks.exclusive.load(SeqCst) == 0 {
                assert!(!waiting.is_finished(), "granted although a writer is there");
                yield_now().await;
            }
            waiting.cancel().await;
            drop(writer);
            locks.exclusive(0..1).await;
            assert_eq!(locks.exclusive.load(SeqCst), 0);
        });
    }

    /// Spins long enough for another thread to enter, if the lock does not exclude it.
    fn dawdle() {
        for _ in 0..200 {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn threads_exclude_each_other_and_never_miss_a_wake_up() {
        let shared: Arc<(RangeLocks, AtomicI32, AtomicU32)> = Arc::default();
        let threads: Vec<_> = (0..4)
            .map(|thread| {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || {
                    run(PollingMode::Off, async move {
                        let (locks, owners, rounds) = &*shared;
                        for round in 0..20_000_u32 {
                            if (round + thread) % 16 == 0 {
                                let _guard = locks.exclusive(0..10).await;
                                assert_eq!(owners.fetch_sub(1, SeqCst), 0, "exclusive among others");
                                dawdle();
                                owners.fetch_add(1, SeqCst);
                            } else {
                                let _guard = locks.shared(5..15).await;
                                assert!(owners.fetch_add(1, SeqCst) >= 0, "shared beside an exclusive one");
                                dawdle();
                                owners.fetch_sub(1, SeqCst);
                            }
                            rounds.fetch_add(1, SeqCst);
                        }
                    })
                    .expect("io_uring works");
                })
            })
            .collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert_eq!(shared.1.load(SeqCst), 0);
        assert_eq!(shared.2.load(SeqCst), 80_000);
    }
}
