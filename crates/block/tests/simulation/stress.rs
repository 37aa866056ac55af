//! The shared parts of the throttle layer under real threads: two workers, one group, more requests
//! than its limit admits.
//!
//! The simulation runs on one thread, so this test looks for races: wake-ups lost between workers,
//! a timer that both assume to be armed, counters that drift. Real time passes, but no
//! assertion depends on how much.

use std::{
    sync::{Arc, mpsc},
    time,
};

use block::layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup, ThrottleMember};
use policy::{
    request::Direction,
    throttle::{AdmissionCounters, LimitKind, Limits, RateLimit, RequestCost},
    time::Duration,
};
use reactor::{PollingMode, ReactorWorker, timeout, yield_now};

/// Tasks on each worker, and requests of each task.
const TASKS: u64 = 50;
const REQUESTS: u64 = 2000;
/// Requests a second: most requests wait, and the test takes most of a second.
const RATE: u64 = 250_000;
/// Timeout that only a lost wake-up exceeds.
const FOREVER: Duration = Duration::from_secs(60);

/// Number of admitted requests of two workers, and the counters of their group: reads and writes.
fn drive(cancel_after: fn(u64) -> Option<Duration>) -> (u64, [AdmissionCounters; 2]) {
    let workers = ["one", "two"]
        .map(|name| ReactorWorker::start(name, PollingMode::Off).expect("io_uring works on a test machine"));
    let (announce, announced) = mpsc::channel();
    // Created on a worker: a group uses the clock of its reactor.
    workers[0].spawn(move || async move {
        let mut limits = Limits::default();
        *limits.limit_mut(LimitKind::IopsTotal) = RateLimit { rate: RATE, ..RateLimit::NONE };
        let settings = GroupSettings { limits, ..GroupSettings::default() };
        announce
            .send(ThrottleGroup::new("shared", settings, None).expect("valid"))
            .expect("the receiver waits");
    });
    let group = announced.recv_timeout(FOREVER).expect("a worker makes a group");
    let (done, finished) = mpsc::channel();
    for worker in &workers {
        for task in 0..TASKS {
            let (group, done) = (Arc::clone(&group), done.clone());
            worker.spawn(move || async move {
                let member =
                    ThrottleMember::new(DiskSettings::default(), 0, Some(&group)).expect("no reservations");
                let mut passed = 0;
                for request in 0..REQUESTS {
                    passed += u64::from(
                        admit_one(&member, request + task, cancel_after(request * TASKS + task)).await,
                    );
                    // Tasks yield at different requests, so that their order varies.
                    if request % 64 == task {
                        yield_now().await;
                    }
                }
                done.send(passed).expect("the receiver waits");
            });
        }
    }
    drop(done);
    let passed = (0..2 * TASKS).map(|_| finished.recv_timeout(FOREVER).expect("no task waits forever")).sum();
    let (announce, announced) = mpsc::channel();
    workers[0].spawn(move || async move {
        let stats = group.stats();
        announce.send([stats.reads, stats.writes]).expect("the receiver waits");
    });
    let counted = announced.recv_timeout(FOREVER).expect("a worker looks");
    for worker in workers {
        worker.stop().expect("stops");
    }
    (passed, counted)
}

/// Returns true if it was admitted before the timeout.
async fn admit_one(member: &ThrottleMember, request: u64, cancel_after: Option<Duration>) -> bool {
    let direction = Direction::ALL[request as usize % 2];
    let admission = member.admit(direction, RequestCost::one(4096));
    match cancel_after {
        None => drop(admission.await),
        Some(cancel_after) => return timeout(cancel_after, admission).await.is_ok(),
    }
    true
}

#[test]
fn threads_that_share_a_group_lose_no_request() {
    let started = time::Instant::now();
    let (passed, [reads, writes]) = drive(|_| None);
    assert_eq!(passed, 2 * TASKS * REQUESTS);
    assert_eq!((reads.requests + writes.requests, reads.bytes + writes.bytes), (passed, passed * 4096));
    // A tenth of a second's worth is admitted at once, the rest at the rate; less time would mean
    // that a thread bypassed the common count.
    let min_elapsed = Duration::from_secs_f64((passed - RATE / 10 - 1) as f64 / RATE as f64);
    assert!(
        started.elapsed() >= min_elapsed,
        "{passed} requests at {RATE} a second took {:?}",
        started.elapsed()
    );
}

#[test]
fn cancellations_affect_no_other_request() {
    // Every third request is cancelled, after about the time that requests wait here.
    let (passed, counted) =
        drive(|request| (request % 3 == 0).then(|| Duration::from_micros(request * 7919 % 500)));
    let submitted = 2 * TASKS * REQUESTS;
    let counted: u64 = counted.iter().map(|counters| counters.requests).sum();
    // A request that is admitted while it is cancelled is counted, but its caller does not see it.
    assert!(passed <= counted && counted <= submitted, "{passed} seen, {counted} counted, {submitted} asked");
    assert!(passed >= submitted - submitted / 3 - 1, "those that wait to the end pass: {passed}");
}
