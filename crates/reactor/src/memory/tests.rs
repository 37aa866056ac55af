//! Memory between disks, in virtual time.

use std::{cell::RefCell, rc::Rc};

use super::*;
use crate::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout};
use event_listener::Event;
use policy::time::Duration;

const MIB: u64 = 1 << 20;
const LARGEST: u64 = MIN_REQUEST_BYTES / 2;

fn random_pause() -> Duration {
    Duration::from_millis(sim::random(|random| random.u64(..100)))
}

/// Clients of several disks take memory, hold it and return it, in any order, and sometimes cancel:
/// the limit is never exceeded, every request is served, and a disk's own part is available at
/// once, regardless of other disks.
#[test]
fn memory_is_shared_between_disks() {
    for seed in 0..200 {
        sim::run(seed, async {
            let total = MIB * sim::random(|random| random.u64(65..3000));
            let budget = MemoryBudget::new(total);
            let count = sim::random(|random| random.usize(1..6));
            let accounts: Rc<Vec<_>> = Rc::new((0..count).map(|_| MemoryAccount::new(&budget)).collect());
            let waited = Rc::new(RefCell::new(0));
            let client = |number: usize| {
                let (budget, accounts, waited) =
                    (Arc::clone(&budget), Rc::clone(&accounts), Rc::clone(&waited));
                async move {
                    let account = &accounts[number % accounts.len()];
                    let flow = FairQueueFlow::default();
                    for _ in 0..20 {
                        let bytes = sim::random(|random| random.u64(1..=LARGEST));
                        let at_once = account.used() + bytes <= budget.account_part.load(SeqCst);
                        let began = now();
                        let max_wait = if sim::random(fastrand::Rng::bool) {
                            Duration::from_secs(3600)
                        } else {
                            random_pause()
                        };
                        if timeout(max_wait, account.acquire(&flow, bytes)).await.is_err() {
                            continue;
                        }
                        *waited.borrow_mut() += u64::from(now() > began);
                        assert!(!at_once || now() == began, "its own part, and it waited");
                        let usage = budget.usage();
                        assert!(usage.requests <= usage.max_requests, "{usage:?}");
                        sleep_until(now() + random_pause()).await;
                        account.release(bytes);
                    }
                }
            };
            let clients: Vec<_> = (0..20).map(|number| spawn_joinable(client(number))).collect();
            for client in clients {
                client.await;
            }
            let usage = budget.usage();
            assert_eq!((usage.requests, usage.waiting), (0, 0));
            assert!(total > 1000 * MIB || *waited.borrow() > 0, "no request had to wait");
        });
    }
}

#[test]
fn common_half_is_shared_equally_beyond_the_parts() {
    let budget = MemoryBudget::new(1024 * MIB);
    let (greedy, other) = (MemoryAccount::new(&budget), MemoryAccount::new(&budget));
    assert_eq!(budget.usage().max_requests, 256 * MIB);
    while greedy.try_acquire(MIB) {}
    assert_eq!(greedy.used(), (64 + 64) * MIB, "its part, and half of the common half");
    while other.try_acquire(MIB) {}
    assert_eq!(other.used(), (64 + 32) * MIB);
}

#[test]
fn reservations_fit_or_fail() {
    let budget = MemoryBudget::new(256 * MIB);
    let account = MemoryAccount::new(&budget);
    let error = account.reserve("the caches of a", 193 * MIB).expect_err("64 MiB are for requests");
    assert_eq!(
        error.to_string(),
        "the caches of a: 193 MiB are required, and 192 MiB are free of the 256 MiB of the memory budget \
         (raise --memory, or make caches and read-ahead smaller)"
    );
    account.reserve("the caches of a", 192 * MIB).expect("as much as there is");
    assert!(!budget.charge_page(1));
    account.reserve("the caches of a", 100 * MIB).expect("less");
    assert!(budget.charge_page(92 * MIB) && !budget.charge_page(1));
    account.reserve("the caches of a", 101 * MIB).expect_err("reserved by a disk in memory");
    budget.release_pages(MIB);
    account.reserve("the caches of a", 101 * MIB).expect("the reservation was released");
    drop(account);
    assert_eq!(budget.usage().reserved, 0);
}

#[test]
fn clients_can_connect_while_a_memory_disk_uses_the_whole_budget() {
    let budget = MemoryBudget::new(256 * MIB);
    assert!(budget.charge_page(192 * MIB) && !budget.charge_page(1));
    let first = ConnectionMemory::new(&budget, 3 * MIB).expect("a 64th of the budget is kept");
    assert!(ConnectionMemory::new(&budget, 2 * MIB).is_none());
    assert_eq!(budget.usage().connections, 3 * MIB);
    drop(first);
    drop(ConnectionMemory::new(&budget, 4 * MIB).expect("all of it"));
    // Memory that connections have used after pages were returned is not available for pages.
    budget.release_pages(MIB);
    let _connection = ConnectionMemory::new(&budget, MIB).expect("as much as is left");
    assert!(!budget.charge_page(1));
}

/// A client that holds memory without progress since an instant; counts visits and disconnects.
#[derive(Debug)]
struct Stalled {
    account: Arc<MemoryAccount>,
    since: Instant,
    listing: HolderEntry,
    visits: AtomicU64,
    disconnect_count: AtomicU64,
    disconnected: Event,
}

impl Stalled {
    fn new(account: &Arc<MemoryAccount>) -> Arc<Self> {
        let stalled = Arc::new(Self {
            account: Arc::clone(account),
            since: now(),
            listing: HolderEntry::default(),
            visits: AtomicU64::new(0),
            disconnect_count: AtomicU64::new(0),
            disconnected: Event::new(),
        });
        account.watch(&stalled);
        stalled
    }

    /// Charges the largest request and holds it until the client is disconnected.
    async fn hold(account: Arc<MemoryAccount>) {
        account.acquire(&FairQueueFlow::default(), LARGEST).await;
        let stalled = Self::new(&account);
        stalled.disconnected.listen().await;
        account.release(LARGEST);
    }
}

impl MemoryHolder for Stalled {
    fn on_schedule_until(&self) -> Option<Instant> {
        self.visits.fetch_add(1, SeqCst);
        Some(self.since)
    }

    fn disconnect(&self) {
        self.disconnect_count.fetch_add(1, SeqCst);
        self.disconnected.notify(usize::MAX);
    }

    fn listing(&self) -> &HolderEntry {
        &self.listing
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        self.account.forget(&self.listing);
    }
}

/// Clients that hold the largest request of `account` without progress, and reconnect whenever they
/// are disconnected.
fn spawn_hostile_clients(account: &Arc<MemoryAccount>, count: usize) -> Vec<JoinHandle<()>> {
    let client = |_| {
        let account = Arc::clone(account);
        spawn_joinable(async move {
            loop {
                Stalled::hold(Arc::clone(&account)).await;
            }
        })
    };
    (0..count).map(client).collect()
}

async fn cancel_all(clients: Vec<JoinHandle<()>>) {
    for client in clients {
        client.cancel().await;
    }
}

#[test]
fn a_client_without_progress_is_disconnected_after_the_grace() {
    sim::run(1, async {
        let budget = MemoryBudget::new(0);
        let (stalled, other, _third) =
            (MemoryAccount::new(&budget), MemoryAccount::new(&budget), MemoryAccount::new(&budget));
        let holding = spawn_joinable(Stalled::hold(Arc::clone(&stalled)));
        sleep_until(now() + Duration::from_millis(1)).await;
        let began = now();
        other.acquire(&FairQueueFlow::default(), LARGEST).await;
        let waited = now() - began;
        assert!(waited <= GRACE && waited >= GRACE - CHECK_INTERVAL, "{waited:?}");
        holding.await;
    });
}

/// Any number of clients of one disk hold all memory they get, and reconnect after they were
/// disconnected: a request of another disk waits for one of them. It does not matter if that disk
/// has other requests in flight.
#[test]
fn disk_waits_for_at_most_one_foreign_holder() {
    let largest = (3..=8).map(|disks| (disks, LARGEST));
    for (disks, bytes) in largest.chain([(3, 20 * MIB), (100, LARGEST), (100, MIB)]) {
        sim::run(disks as u64, async move {
            let budget = MemoryBudget::new(128 * MIB);
            let accounts: Vec<_> = (0..disks).map(|_| MemoryAccount::new(&budget)).collect();
            let stuck = spawn_hostile_clients(&accounts[0], 60);
            let ordinary = |number: usize| {
                let account = Arc::clone(&accounts[number]);
                async move {
                    let flow = FairQueueFlow::default();
                    if number.is_multiple_of(2) {
                        account.acquire(&flow, 4096).await;
                    }
                    for _ in 0..3 {
                        sleep_until(now() + random_pause()).await;
                        let began = now();
                        account.acquire(&flow, bytes).await;
                        let waited = now() - began;
                        assert!(waited <= GRACE + 3 * CHECK_INTERVAL, "{disks} disks: {waited:?}");
                        sleep_until(now() + Duration::from_millis(1)).await;
                        account.release(bytes);
                    }
                }
            };
            let ordinary: Vec<_> = (1..disks).map(|number| spawn_joinable(ordinary(number))).collect();
            for client in ordinary {
                client.await;
            }
            cancel_all(stuck).await;
        });
    }
}

/// Disconnecting takes time and logs a line, so no client is disconnected twice.
#[test]
fn a_client_is_disconnected_once_however_many_requests_wait() {
    sim::run(1, async {
        let budget = MemoryBudget::new(0);
        let (slow, other, _third) =
            (MemoryAccount::new(&budget), MemoryAccount::new(&budget), MemoryAccount::new(&budget));
        slow.acquire(&FairQueueFlow::default(), LARGEST).await;
        let client = Stalled::new(&slow);
        let wait = |_| {
            let other = Arc::clone(&other);
            spawn_joinable(async move {
                other.acquire(&FairQueueFlow::default(), LARGEST).await;
                other.release(LARGEST);
            })
        };
        let waiting: Vec<_> = (0..30).map(wait).collect();
        sleep_until(now() + 5 * CHECK_INTERVAL).await;
        assert_eq!(client.disconnect_count.load(SeqCst), 1);
        // A transfer that continues does not list it again.
        slow.watch(&client);
        sleep_until(now() + 5 * CHECK_INTERVAL).await;
        assert_eq!(client.disconnect_count.load(SeqCst), 1);
        slow.release(LARGEST);
        for waiter in waiting {
            waiter.await;
        }
    });
}

mod fairness;
