//! The throttle layer's handshakes in every interleaving: threads that ask for admission, wait,
//! cancel, move disks and change limits, checked by `loom` in all orders that the locks allow, with
//! weak memory.
//!
//! The files under test are the layer's own, compiled a second time with the checker's locks and
//! flags instead of `std`'s; policy decides as it does in the daemon. For small configurations,
//! these properties are verified exhaustively, not only sampled:
//!
//! - an admitted request is woken, whichever thread admits it and whenever its task first polls: a
//!   lost wake-up would be a deadlock;
//! - a cancellation removes the cancelled request, or nothing if it was admitted already;
//! - a move takes all requests of its disk along and none of another disk, whatever happens to
//!   them meanwhile;
//! - the lock order has no cycles.
//!
//! Time is an argument here: a thread that receives a timer lets it fire.

#[path = "../../src/layer/throttle/settings.rs"]
#[allow(dead_code, unreachable_pub, reason = "public in the crate; the model needs a part of it")]
mod settings;
#[path = "../../src/layer/throttle/slot.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod slot;
#[path = "../../src/layer/throttle/tree.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod tree;
#[path = "../../src/layer/throttle/waiter.rs"]
mod waiter;

/// Replaces `super::sync` of the files.
mod sync {
    pub(super) use loom::sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    };
}

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
};

use loom::{future::block_on, thread};
use policy::{
    request::Direction,
    throttle::{LimitKind, Limits, NodeId, NodeShare, RateLimit, RequestCost, SpareRefund},
    time::Instant,
};

use settings::DiskSettings;
use slot::{AdmitOutcome, SlotDestination, ThrottleSlot, WaitingAdmission};
use tree::{SharedThrottleTree, TreeTimer};

const START: Instant = Instant::ZERO;
/// Instant at which all requests that wait in these tests can be admitted.
const LATE: Instant = Instant::from_nanos(3600 * 1_000_000_000);

/// A tree of one group with this limit in operations per second.
fn group(iops: u64) -> (Arc<SharedThrottleTree>, NodeId) {
    let tree = SharedThrottleTree::new(START);
    let node = tree.lock().add(None, None, limits(iops), NodeShare::default(), None, START).expect("valid");
    (tree, node)
}

fn limits(iops: u64) -> Limits {
    let mut limits = Limits::default();
    *limits.limit_mut(LimitKind::IopsTotal) = RateLimit { rate: iops, ..RateLimit::NONE };
    limits
}

type Disk = Arc<ThrottleSlot<()>>;

fn destination((tree, node): &(Arc<SharedThrottleTree>, NodeId)) -> SlotDestination<()> {
    SlotDestination { shared_tree: Arc::clone(tree), parent: Some(*node), owner_data: () }
}

fn disk(group: &(Arc<SharedThrottleTree>, NodeId)) -> Disk {
    Arc::new(
        ThrottleSlot::new(DiskSettings::default(), 0, destination(group), START).expect("no reservations"),
    )
}

fn submit(disk: &Disk) -> AdmitOutcome<'_, ()> {
    disk.admit(Direction::Read, RequestCost::one(4096), START)
}

/// Returns the first request that waits, after admitting as many as possible. No timer is armed for
/// it.
fn submit_until_one_waits(disk: &Disk) -> WaitingAdmission<'_, ()> {
    loop {
        if let AdmitOutcome::Waiting(admission, _) = submit(disk) {
            return admission;
        }
    }
}

/// Admits as many requests as possible. The first that waits is cancelled before a timer is armed.
fn fill(disk: &Disk) {
    while matches!(submit(disk), AdmitOutcome::Admitted) {}
}

/// Fires a timer, and those that it returns.
fn fire(mut timer: Option<TreeTimer>) {
    while let Some(TreeTimer { shared_tree: tree, at }) = timer {
        timer = tree.fire(at, at);
    }
}

/// Admits a request as its task would, including timers.
fn admit(disk: &Disk) {
    if let AdmitOutcome::Waiting(admission, tree) = submit(disk) {
        let timer = tree.admit_ready(START);
        let mut admission = pin!(admission);
        let first = admission.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        fire(timer);
        if first.is_pending() {
            block_on(admission);
        }
    }
}

fn waiting((tree, node): &(Arc<SharedThrottleTree>, NodeId)) -> [usize; 2] {
    tree.lock().tree().stats(*node, LATE).waiting
}

#[test]
fn two_waiting_requests_are_both_woken() {
    loom::model(|| {
        let group = group(10);
        let disks = [disk(&group), disk(&group)];
        // So that both requests below must wait.
        fill(&disks[0]);
        let other = Arc::clone(&disks[1]);
        let thread = thread::spawn(move || admit(&other));
        admit(&disks[0]);
        thread.join().expect("it passes");
        assert_eq!(waiting(&group), [0, 0]);
    });
}

#[test]
fn new_limits_wake_waiters_without_a_timer() {
    loom::model(|| {
        let group = group(10);
        let disk = disk(&group);
        fill(&disk);
        let other = Arc::clone(&disk);
        let thread = thread::spawn(move || {
            if let AdmitOutcome::Waiting(admission, tree) = submit(&other) {
                // The timer never fires: only the new limits can admit the request.
                let _never_fires = tree.admit_ready(START);
                block_on(admission);
            }
        });
        let (tree, node) = &group;
        tree.lock().configure(*node, Limits::default(), NodeShare::default(), START).expect("valid");
        assert!(tree.admit_ready(START).is_none(), "nothing waits where nothing is limited");
        thread.join().expect("it passes");
    });
}

#[test]
fn lifting_admits_waiting_and_new_requests() {
    loom::model(|| {
        let group = group(10);
        let disk = disk(&group);
        fill(&disk);
        let other = Arc::clone(&disk);
        let thread = thread::spawn(move || {
            if other.is_unlimited() {
                return;
            }
            if let AdmitOutcome::Waiting(admission, tree) = submit(&other) {
                // The timer never fires: only lifting the limits can admit the request.
                let _never_fires = tree.admit_ready(START);
                block_on(admission);
            }
        });
        assert!(group.0.lift_limits(START).is_none());
        thread.join().expect("it passes");
        assert!(disk.is_unlimited());
    });
}

#[test]
fn cancellation_removes_one_request_or_none() {
    loom::model(|| {
        let group = group(10);
        let disks = [disk(&group), disk(&group)];
        let cancelled = submit_until_one_waits(&disks[0]);
        let other = Arc::clone(&disks[1]);
        // Waits until it is admitted, whatever happens to the request before it.
        let waiting_thread = thread::spawn(move || admit(&other));
        let tree = Arc::clone(&group.0);
        let timer_thread = thread::spawn(move || fire(tree.admit_ready(LATE)));
        drop(cancelled);
        for thread in [waiting_thread, timer_thread] {
            thread.join().expect("it ends");
        }
        assert_eq!(waiting(&group), [0, 0]);
    });
}

#[test]
fn waiting_requests_move_with_the_disk() {
    loom::model(|| {
        let (from, to) = (group(10), group(10));
        let disk = disk(&from);
        let moved_disk = Arc::clone(&disk);
        let admission = submit_until_one_waits(&disk);
        let destination = destination(&to);
        let thread = thread::spawn(move || {
            for timer in moved_disk.move_to(destination, None, None, START).expect("no reservations") {
                fire(timer);
            }
        });
        // Admits requests in `from` while the thread moves the disk.
        fire(from.0.admit_ready(LATE));
        block_on(admission);
        thread.join().expect("it moves");
        assert_eq!((waiting(&from), waiting(&to)), ([0, 0], [0, 0]));
    });
}

/// The cancelled request waits in `from`, was admitted there, or waits in `to` among others with
/// equal tickets.
#[test]
fn cancellation_during_a_move_affects_no_other_request() {
    loom::model(|| {
        let (from, to) = (group(10), group(10));
        let (disk, neighbour) = (disk(&from), disk(&to));
        let neighbour_admission = submit_until_one_waits(&neighbour);
        let cancelled = submit_until_one_waits(&disk);
        let moved_disk = Arc::clone(&disk);
        let destination = destination(&to);
        let thread = thread::spawn(move || {
            let _unarmed = moved_disk.move_to(destination, None, None, START).expect("no reservations");
        });
        let tree = Arc::clone(&from.0);
        let timer_thread = thread::spawn(move || fire(tree.admit_ready(LATE)));
        drop(cancelled);
        for thread in [thread, timer_thread] {
            thread.join().expect("it ends");
        }
        assert_eq!((waiting(&from), waiting(&to)), ([0, 0], [1, 0]));
        fire(to.0.admit_ready(LATE));
        assert!(is_ready(neighbour_admission), "it waited for nothing but its turn");
    });
}

#[test]
fn a_request_during_a_move_is_admitted() {
    loom::model(|| {
        let (from, to) = (group(10), group(10));
        let disk = disk(&from);
        fill(&disk);
        let requesting_disk = Arc::clone(&disk);
        let thread = thread::spawn(move || admit(&requesting_disk));
        for timer in disk.move_to(destination(&to), None, None, START).expect("no reservations") {
            fire(timer);
        }
        thread.join().expect("it passes");
        assert_eq!((waiting(&from), waiting(&to)), ([0, 0], [0, 0]));
    });
}

#[test]
fn disks_that_change_places_do_not_block_each_other() {
    loom::model(|| {
        let (first, second) = (group(10), group(10));
        let (first_disk, second_disk) = (disk(&first), disk(&second));
        let (to_second, to_first) = (destination(&second), destination(&first));
        let moved_disk = Arc::clone(&first_disk);
        let thread = thread::spawn(move || {
            let _unarmed = moved_disk.move_to(to_second, None, None, START).expect("no reservations");
        });
        let _unarmed = second_disk.move_to(to_first, None, None, START).expect("no reservations");
        thread.join().expect("it moves");
    });
}

/// Read-ahead takes no tokens from a waiting request, before, during or after the move of the disk
/// that reads ahead.
#[test]
fn read_ahead_during_a_move_delays_no_request() {
    loom::model(|| {
        let (from, to) = (group(10), group(10));
        let (disk, neighbour) = (disk(&from), disk(&to));
        let neighbour_admission = submit_until_one_waits(&neighbour);
        let reading_ahead = Arc::clone(&disk);
        let thread = thread::spawn(move || {
            for _ in 0..2 {
                reading_ahead.try_read_ahead(&RequestCost::one(4096), SpareRefund::NONE, START);
            }
        });
        let _unarmed = disk.move_to(destination(&to), None, None, START).expect("no reservations");
        thread.join().expect("it ends");
        assert!(
            !disk.try_read_ahead(&RequestCost::one(4096), SpareRefund::NONE, LATE),
            "a waiter has not been notified yet"
        );
        fire(to.0.admit_ready(LATE));
        assert!(is_ready(neighbour_admission), "it waited for nothing but its turn");
        assert!(disk.try_read_ahead(&RequestCost::one(4096), SpareRefund::NONE, LATE));
    });
}

fn is_ready(admission: WaitingAdmission<'_, ()>) -> bool {
    pin!(admission).as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
}
