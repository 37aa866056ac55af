//! Memory between the clients of a disk, and the cost of waiting, in virtual time.

use std::{
    cell::Cell,
    future::{Future, poll_fn},
    pin::pin,
};

use super::*;

/// Counts the polls of `future`.
async fn count_polls<T>(polls: Rc<Cell<u64>>, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    poll_fn(|context| {
        polls.set(polls.get() + 1);
        future.as_mut().poll(context)
    })
    .await
}

/// 200 clients hold all memory that they are granted of a disk. A small request of another client
/// of the disk is served after the first of them was disconnected.
#[test]
fn a_small_request_waits_for_one_client_of_its_disk_that_holds_memory() {
    for (total, bytes) in [(128 * MIB, 4096), (16 << 30, 4096), (128 * MIB, MIB)] {
        sim::run(1, async move {
            let budget = MemoryBudget::new(total);
            let (disk, _other) = (MemoryAccount::new(&budget), MemoryAccount::new(&budget));
            let hostile_clients = spawn_hostile_clients(&disk, 200);
            sleep_until(now() + Duration::from_millis(1)).await;
            for _ in 0..3 {
                let began = now();
                disk.acquire(&FairQueueFlow::default(), bytes).await;
                let waited = now() - began;
                assert!(waited <= MIN_GRACE + 2 * CHECK_INTERVAL, "{bytes} bytes of {total}: {waited:?}");
                disk.release(bytes);
            }
            cancel_all(hostile_clients).await;
        });
    }
}

/// Clients of one disk that always have a request waiting are served equally in bytes.
#[test]
fn clients_of_a_disk_are_served_equally() {
    for seed in 0..3 {
        sim::run(seed, async {
            let budget = MemoryBudget::new(0);
            let (disk, _other) = (MemoryAccount::new(&budget), MemoryAccount::new(&budget));
            let served: Rc<Vec<_>> = Rc::new((0..8).map(|_| Cell::new(0_u64)).collect());
            let flows: Vec<_> = (0..8).map(|_| Rc::new(FairQueueFlow::default())).collect();
            let request = |number: usize| {
                let (disk, served) = (Arc::clone(&disk), Rc::clone(&served));
                let flow = Rc::clone(&flows[number]);
                async move {
                    // From 64 KiB to 8 MiB.
                    let bytes = (64 << 10) << number;
                    loop {
                        disk.acquire(&flow, bytes).await;
                        served[number].set(served[number].get() + bytes);
                        sleep_until(now() + Duration::from_millis(10) + random_pause()).await;
                        disk.release(bytes);
                    }
                }
            };
            // Several concurrent requests of each client, so that at least one always waits.
            let requests = (0..8).flat_map(|number| (0..(256_usize >> number).max(8)).map(move |_| number));
            let clients: Vec<_> = requests.map(|number| spawn_joinable(request(number))).collect();
            sleep_until(now() + Duration::from_secs(10)).await;
            let (min, max) =
                (served.iter().map(Cell::get).min().unwrap(), served.iter().map(Cell::get).max().unwrap());
            assert!(min > 32 * MIB, "{served:?}");
            assert!(max <= 2 * min, "{served:?}");
            cancel_all(clients).await;
        });
    }
}

/// The work in a second does not depend on the product of waiting requests and clients: one waiting
/// request checks for clients without progress, and no check visits a client that is on schedule.
#[test]
fn waiting_requests_are_not_polled_until_memory_is_returned() {
    const CLIENTS: u64 = 2000;
    sim::run(1, async {
        let budget = MemoryBudget::new(0);
        let (first, second, _third) =
            (MemoryAccount::new(&budget), MemoryAccount::new(&budget), MemoryAccount::new(&budget));
        first.acquire(&FairQueueFlow::default(), LARGEST).await;
        let clients: Vec<_> = (0..CLIENTS).map(|_| Stalled::new(&first)).collect();
        // Until then no client is overdue.
        let until = now() + MIN_GRACE;
        let polls: Rc<Cell<u64>> = Rc::default();
        let wait = |_| {
            let (second, polls) = (Arc::clone(&second), Rc::clone(&polls));
            spawn_joinable(count_polls(polls, async move {
                second.acquire(&FairQueueFlow::default(), LARGEST).await;
                second.release(LARGEST);
            }))
        };
        let waiting: Vec<_> = (0..CLIENTS).map(wait).collect();
        sleep_until(until).await;
        let visits = || clients.iter().map(|client| client.visits.load(SeqCst)).sum::<u64>();
        assert!(visits() <= 2 * CLIENTS, "{} visits", visits());
        assert!(polls.get() <= CLIENTS + 10, "{} polls", polls.get());
        // As many clients as requests wait are disconnected at the first check after the grace.
        sleep_until(now() + 20 * CHECK_INTERVAL).await;
        assert!(visits() <= 4 * CLIENTS, "{} visits", visits());
        assert!(clients.iter().all(|client| client.disconnect_count.load(SeqCst) == 1));
        assert!(polls.get() <= CLIENTS + 40, "{} polls", polls.get());
        // A request is woken when it is served, and otherwise only to check for clients without
        // progress.
        first.release(LARGEST);
        for task in waiting {
            task.await;
        }
        assert!(polls.get() <= 4 * CLIENTS, "{} polls", polls.get());
    });
}

/// A waiting request of one disk does not force requests of another disk, within its part, to take
/// the lock.
#[test]
fn disk_within_its_part_takes_no_lock_while_others_wait() {
    sim::run(1, async {
        let budget = MemoryBudget::new(0);
        let (first, second) = (MemoryAccount::new(&budget), MemoryAccount::new(&budget));
        let hostile_clients = spawn_hostile_clients(&first, 10);
        sleep_until(now() + Duration::from_millis(1)).await;
        assert!(budget.usage().waiting > 0);
        let locked = budget.lock();
        assert!(second.try_acquire(MIB));
        second.release(MIB);
        drop(locked);
        cancel_all(hostile_clients).await;
    });
}

/// The grace is divided by the number of waiting requests.
#[test]
fn grace_is_divided_by_the_number_of_waiting_requests() {
    let seconds = [0, 1, 2, 5, 10, 11, 1_000_000].map(|waiting| grace(waiting).as_secs_f64());
    assert_eq!(seconds, [10.0, 10.0, 5.0, 2.0, 1.0, 1.0, 1.0]);
}

/// A client that transfers data at the slowest rate is not disconnected, and one that stops is.
#[test]
fn client_with_progress_is_not_disconnected() {
    #[derive(Debug)]
    struct Slow(HolderEntry, AtomicU64, AtomicU64);
    impl MemoryHolder for Slow {
        fn on_schedule_until(&self) -> Option<Instant> {
            Some(Instant::from_nanos(self.1.load(SeqCst)))
        }
        fn disconnect(&self) {
            self.2.fetch_add(1, SeqCst);
        }
        fn listing(&self) -> &HolderEntry {
            &self.0
        }
    }
    sim::run(1, async {
        let budget = MemoryBudget::new(0);
        let (disk, _other) = (MemoryAccount::new(&budget), MemoryAccount::new(&budget));
        disk.acquire(&FairQueueFlow::default(), LARGEST).await;
        let slow =
            Arc::new(Slow(HolderEntry::default(), AtomicU64::new(now().as_nanos()), AtomicU64::new(0)));
        disk.watch(&slow);
        let waiting: Vec<_> = (0..20)
            .map(|_| {
                let disk = Arc::clone(&disk);
                spawn_joinable(async move { disk.acquire(&FairQueueFlow::default(), LARGEST).await })
            })
            .collect();
        for _ in 0..100 {
            sleep_until(now() + Duration::from_millis(500)).await;
            slow.1.store(now().as_nanos(), SeqCst);
        }
        assert_eq!(slow.2.load(SeqCst), 0);
        sleep_until(now() + MIN_GRACE + CHECK_INTERVAL).await;
        assert_eq!(slow.2.load(SeqCst), 1);
        cancel_all(waiting).await;
    });
}

/// Clients that have disconnected leave nothing behind, whether requests waited or not.
#[test]
fn disconnected_clients_are_not_listed() {
    let budget = MemoryBudget::new(0);
    let disk = MemoryAccount::new(&budget);
    sim::run(1, async move {
        for _ in 0..100 {
            drop(Stalled::new(&disk));
        }
        let kept = Stalled::new(&disk);
        let listed = budget.lock().requests.holders(1).expect("the account").len();
        assert_eq!(listed, 1);
        drop(kept);
    });
}
