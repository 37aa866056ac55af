//! Memory between disks, in virtual time.

use std::{cell::RefCell, rc::Rc};

use super::*;
use crate::reactor::{now, sim, sleep_until, spawn_joinable, timeout};
use policy::time::Duration;

const MIB: u64 = 1 << 20;
const LARGEST: u64 = LEAST_REQUESTS / 2;

fn pause() -> Duration {
    Duration::from_millis(sim::random(|random| random.u64(..100)))
}

/// Clients of several disks take memory, keep it and give it back, in any order, and sometimes
/// give up: there is never more in use than there is, everybody gets what it waits for, and a
/// disk has its part at once, whatever the others do.
#[test]
fn memory_is_shared_between_disks() {
    for seed in 0..200 {
        sim::run(seed, async {
            let total = MIB * sim::random(|random| random.u64(65..3000));
            let budget = Budget::new(total);
            let count = sim::random(|random| random.usize(1..6));
            let accounts: Rc<Vec<_>> = Rc::new((0..count).map(|_| Account::new(&budget)).collect());
            let waited = Rc::new(RefCell::new(0));
            let client = |number: usize| {
                let (budget, accounts, waited) =
                    (Arc::clone(&budget), Rc::clone(&accounts), Rc::clone(&waited));
                async move {
                    let account = &accounts[number % accounts.len()];
                    for _ in 0..20 {
                        let bytes = sim::random(|random| random.u64(1..=LARGEST));
                        let at_once = account.used() + bytes <= budget.part.load(SeqCst);
                        let began = now();
                        let patience = if sim::random(fastrand::Rng::bool) {
                            Duration::from_secs(3600)
                        } else {
                            pause()
                        };
                        if timeout(patience, account.take(bytes)).await.is_err() {
                            continue;
                        }
                        *waited.borrow_mut() += u64::from(now() > began);
                        assert!(!at_once || now() == began, "its own part, and it waited");
                        let usage = budget.usage();
                        assert!(usage.requests <= usage.most_requests, "{usage:?}");
                        sleep_until(now() + pause()).await;
                        account.give_back(bytes);
                    }
                }
            };
            let clients: Vec<_> = (0..20).map(|number| spawn_joinable(client(number))).collect();
            for client in clients {
                client.await;
            }
            let usage = budget.usage();
            assert_eq!((usage.requests, usage.waiting), (0, 0));
            assert!(total > 1000 * MIB || *waited.borrow() > 0, "nobody had to wait");
        });
    }
}

#[test]
fn one_disk_leaves_the_others_as_much_as_it_has_beyond_its_part() {
    let budget = Budget::new(1024 * MIB);
    let (greedy, other) = (Account::new(&budget), Account::new(&budget));
    assert_eq!(budget.usage().most_requests, 256 * MIB);
    while greedy.try_take(MIB) {}
    assert_eq!(greedy.used(), (64 + 64) * MIB, "its part, and half of the common half");
    while other.try_take(MIB) {}
    assert_eq!(other.used(), (64 + 32) * MIB);
    assert!(greedy.is_over_its_part());
}

#[test]
fn what_is_set_aside_fits_or_is_refused() {
    let budget = Budget::new(256 * MIB);
    let account = Account::new(&budget);
    let refused = account.reserve("the caches of a", 193 * MIB).expect_err("64 MiB are for requests");
    assert_eq!(
        refused.to_string(),
        "the caches of a would need 193 MiB, and 192 MiB are left of the 256 MiB of memory that weir \
         may use (allow more with --memory, or make caches and read-ahead smaller)"
    );
    account.reserve("the caches of a", 192 * MIB).expect("as much as there is");
    assert!(!budget.take_page(1));
    account.reserve("the caches of a", 100 * MIB).expect("less");
    assert!(budget.take_page(92 * MIB) && !budget.take_page(1));
    account.reserve("the caches of a", 101 * MIB).expect_err("a disk in memory has it");
    budget.give_back_pages(MIB);
    account.reserve("the caches of a", 101 * MIB).expect("it has come back");
    drop(account);
    assert_eq!(budget.usage().reserved, 0);
}

fn watch<T: Holder + 'static>(budget: &Budget, client: &Arc<T>) {
    let watched: Arc<dyn Holder> = client.clone();
    budget.watch(Arc::downgrade(&watched));
}

#[derive(Debug)]
struct Silent(Arc<Account>, AtomicBool);

impl Holder for Silent {
    fn is_overdue(&self) -> bool {
        !self.1.load(SeqCst)
    }

    fn push_out(&self) {
        self.1.store(true, SeqCst);
        self.0.give_back(LARGEST);
    }
}

#[test]
fn who_keeps_others_waiting_has_to_go() {
    sim::run(1, async {
        let budget = Budget::new(0);
        let (silent, other, _third) = (Account::new(&budget), Account::new(&budget), Account::new(&budget));
        silent.take(LARGEST).await;
        let client = Arc::new(Silent(silent, AtomicBool::new(false)));
        watch(&budget, &client);
        let began = now();
        other.take(LARGEST).await;
        assert_eq!(now() - began, PATIENCE);
    });
}

/// A client that sends a header, and nothing behind it.
#[derive(Debug)]
struct Stuck {
    account: Arc<Account>,
    since: policy::time::Instant,
    end: Event,
}

/// How long it may keep the largest request: as `export` has it.
const ALLOWED: Duration = Duration::from_secs(10 + 32);

impl Stuck {
    async fn keep(account: Arc<Account>) {
        account.take(LARGEST).await;
        let stuck = Arc::new(Self { account, since: now(), end: Event::new() });
        let end = stuck.end.listen();
        watch(stuck.account.budget(), &stuck);
        end.await;
        stuck.account.give_back(LARGEST);
    }
}

impl Holder for Stuck {
    fn is_overdue(&self) -> bool {
        self.account.is_over_its_part() && now() > self.since + ALLOWED
    }

    fn push_out(&self) {
        self.end.notify(usize::MAX);
    }
}

/// However many clients of one disk keep what they can get, and come again once they were
/// pushed out: a request of another disk waits for one of them. Whether that disk has other
/// requests in flight makes no difference.
#[test]
fn no_disk_waits_for_more_than_one_client_of_another_that_keeps_memory() {
    let largest = (3..=8).map(|disks| (disks, LARGEST));
    for (disks, bytes) in largest.chain([(3, 20 * MIB), (100, LARGEST), (100, MIB)]) {
        sim::run(disks as u64, async move {
            let budget = Budget::new(128 * MIB);
            let accounts: Vec<_> = (0..disks).map(|_| Account::new(&budget)).collect();
            let stuck = |_| {
                let account = Arc::clone(&accounts[0]);
                spawn_joinable(async move {
                    loop {
                        Stuck::keep(Arc::clone(&account)).await;
                    }
                })
            };
            let stuck: Vec<_> = (0..60).map(stuck).collect();
            let ordinary = |number: usize| {
                let account = Arc::clone(&accounts[number]);
                async move {
                    if number.is_multiple_of(2) {
                        account.take(4096).await;
                    }
                    for _ in 0..3 {
                        sleep_until(now() + pause()).await;
                        let began = now();
                        account.take(bytes).await;
                        let waited = now() - began;
                        assert!(waited <= ALLOWED + 3 * PATIENCE, "{disks} disks: {waited:?}");
                        sleep_until(now() + Duration::from_millis(1)).await;
                        account.give_back(bytes);
                    }
                }
            };
            let ordinary: Vec<_> = (1..disks).map(|number| spawn_joinable(ordinary(number))).collect();
            for client in ordinary {
                client.await;
            }
            for client in stuck {
                client.cancel().await;
            }
        });
    }
}

/// A client whose end takes a while, and how often it was ended.
#[derive(Debug)]
struct Slow(Arc<Account>, AtomicU64);

impl Holder for Slow {
    fn is_overdue(&self) -> bool {
        self.0.used() > 0
    }

    fn push_out(&self) {
        self.1.fetch_add(1, SeqCst);
    }
}

/// Each end is a line of the log, so thirty that wait must not make thirty of one.
#[test]
fn a_client_is_pushed_out_once_however_many_wait() {
    sim::run(1, async {
        let budget = Budget::new(0);
        let (slow, other, _third) = (Account::new(&budget), Account::new(&budget), Account::new(&budget));
        slow.take(LARGEST).await;
        let client = Arc::new(Slow(slow, AtomicU64::new(0)));
        watch(&budget, &client);
        let wait = |_| {
            let other = Arc::clone(&other);
            spawn_joinable(async move {
                other.take(LARGEST).await;
                other.give_back(LARGEST);
            })
        };
        let waiting: Vec<_> = (0..30).map(wait).collect();
        sleep_until(now() + 5 * PATIENCE).await;
        assert_eq!(client.1.load(SeqCst), 1);
        client.0.give_back(LARGEST);
        for waiter in waiting {
            waiter.await;
        }
    });
}
