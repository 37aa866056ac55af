//! Cost of a decision of the throttle tree, including all bookkeeping.
//!
//! One iteration admits one request in a group at its limit: two calls of `poll` (one admits, one
//! returns the next deadline) and one of `submit`. `idle` is one disk with a constant load, alone
//! or among 10,000 idle ones. `spare` measures admission of read-ahead, accepted and refused, and a
//! request that is admitted at once while spare levels are in use.
//!
//! Results are those of the fastest of many batches, because other work on the machine only adds
//! time.

use criterion::{Bencher, BenchmarkId, Criterion, criterion_group, criterion_main};
use policy::request::Direction;
use policy::throttle::{
    AdmissionResult, LimitKind, Limits, NodeId, NodeShare, PollDecision, RequestCost, SpareRefund,
    ThrottleTree,
};
use policy::time::{Duration, Instant};
use std::hint::black_box;
use std::time::Instant as Clock;

const IOPS: u64 = 100_000;

fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.limit_mut(LimitKind::IopsTotal).rate = IOPS;
    limits
}

/// A group at its limit, and disks that always have more requests.
struct SaturatedGroup {
    tree: ThrottleTree<u32>,
    disks: Vec<NodeId>,
    now: Instant,
}

impl SaturatedGroup {
    /// Disks in groups of their own, nested `levels` deep.
    fn new(disks: u32, levels: usize, reserved: bool) -> Self {
        let mut tree = ThrottleTree::new(Instant::ZERO);
        let mut group = tree.add(None, limits(), NodeShare::default()).unwrap();
        for _ in 1..levels {
            group = tree.add(Some(group), limits(), NodeShare::default()).unwrap();
        }
        let disks = (0..disks)
            .map(|number| {
                let share = NodeShare::new(1 + number % 1000).unwrap();
                let share = if reserved { share.with_reservation(1, 0) } else { share };
                tree.add(Some(group), Limits::default(), share).unwrap()
            })
            .collect();
        let mut busy = Self { tree, disks, now: Instant::ZERO };
        for number in 0..busy.disks.len() as u32 {
            for _ in 0..4 {
                busy.submit_until_queued(number);
            }
        }
        busy
    }

    fn submit_until_queued(&mut self, number: u32) {
        let (disk, now) = (self.disks[number as usize], self.now);
        // Until the bucket is full, requests are admitted at once.
        while let AdmissionResult::Admitted(_) =
            self.tree.submit(disk, Direction::Read, RequestCost::one(4096), number, now)
        {}
    }

    /// Adds disks without requests to the group of the first one.
    fn add_idle(&mut self, disks: u32) {
        let group = self.tree.parent(self.disks[0]).unwrap();
        for _ in 0..disks {
            self.tree.add(Some(group), Limits::default(), NodeShare::default()).unwrap();
        }
    }

    fn decide(&mut self) {
        self.now += Duration::from_nanos(1_000_000_000 / IOPS);
        loop {
            match self.tree.poll(self.now) {
                PollDecision::Admit(number) => self.submit_until_queued(black_box(number)),
                PollDecision::Wait { until } => {
                    black_box(until);
                    return;
                }
                PollDecision::Idle => unreachable!("there is always more"),
            }
        }
    }
}

/// Runs batches of steps and reports every iteration with the time of the fastest batch.
fn fastest(iterations: u64, mut step: impl FnMut()) -> Duration {
    const BATCH: u32 = 500;
    let mut shortest = Duration::MAX;
    for _ in 0..iterations.div_ceil(u64::from(BATCH)) {
        let begin = Clock::now();
        for _ in 0..BATCH {
            step();
        }
        shortest = shortest.min(begin.elapsed());
    }
    shortest.mul_f64(iterations as f64 / f64::from(BATCH))
}

/// Measures a step with criterion.
fn timed(mut step: impl FnMut()) -> impl FnMut(&mut Bencher<'_>) {
    move |bencher: &mut Bencher<'_>| bencher.iter_custom(|iterations| fastest(iterations, &mut step))
}

fn busy(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("busy");
    for disks in [1, 10, 100, 1000, 10_000] {
        let mut busy = SaturatedGroup::new(disks, 1, false);
        group.bench_function(BenchmarkId::from_parameter(disks), timed(|| busy.decide()));
    }
    for disks in [10, 10_000] {
        let mut busy = SaturatedGroup::new(disks, 1, true);
        group.bench_function(BenchmarkId::new("promised", disks), timed(|| busy.decide()));
        let mut busy = SaturatedGroup::new(disks, 3, false);
        group.bench_function(BenchmarkId::new("three levels", disks), timed(|| busy.decide()));
    }
    // 1000 of 10,000 members of a group wait. At most twice the time of 10 members, all of which
    // wait (`busy/10`).
    let mut busy = SaturatedGroup::new(1000, 1, false);
    busy.add_idle(9000);
    group.bench_function(BenchmarkId::new("of 10000", 1000), timed(|| busy.decide()));
    group.finish();
}

fn idle(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("idle");
    for disks in [0, 10_000] {
        // At the limit, and below it, where requests are admitted at once.
        let mut busy = SaturatedGroup::new(1, 1, false);
        busy.add_idle(disks);
        group.bench_function(BenchmarkId::new("at the limit", disks), timed(|| busy.decide()));

        let mut tree = ThrottleTree::<u32>::new(Instant::ZERO);
        let host = tree.add(None, limits(), NodeShare::default()).unwrap();
        let all: Vec<_> = (0..=disks)
            .map(|_| tree.add(Some(host), Limits::default(), NodeShare::default()).unwrap())
            .collect();
        let (disk, mut now) = (all[all.len() / 2], Instant::ZERO);
        group.bench_function(
            BenchmarkId::new("below it", disks),
            timed(|| {
                now += Duration::from_nanos(2_000_000_000 / IOPS);
                assert!(tree.try_admit(disk, Direction::Read, black_box(&RequestCost::one(4096)), now));
            }),
        );
    }
    group.finish();
}

fn spare(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("spare");
    let ahead = RequestCost::one(8 * 4096);
    let mut used = SpareRefund::NONE;
    used.add(8 * 4096, 8 * 4096);
    for (name, refund) in [("yes", used), ("no", SpareRefund::NONE)] {
        let mut tree = ThrottleTree::<u32>::new(Instant::ZERO);
        let host = tree.add(None, limits(), NodeShare::default()).unwrap();
        let disk = tree.add(Some(host), Limits::default(), NodeShare::default()).unwrap();
        // Overruns the bucket; a refund of the same amount reverses it.
        while tree.try_admit_read_ahead(disk, &ahead, SpareRefund::NONE, Instant::ZERO) {}
        group.bench_function(
            name,
            timed(|| {
                let admitted = tree.try_admit_read_ahead(disk, black_box(&ahead), refund, Instant::ZERO);
                assert_eq!(admitted, name == "yes");
            }),
        );
    }

    let mut in_operations = limits();
    in_operations.iops_size = 4096;
    let mut tree = ThrottleTree::<u32>::new(Instant::ZERO);
    let host = tree.add(None, in_operations, NodeShare::default()).unwrap();
    let disk = tree.add(Some(host), Limits::default(), NodeShare::default()).unwrap();
    let mut now = Instant::ZERO;
    // Too much to leak during the measurement.
    assert!(tree.try_admit_read_ahead(disk, &RequestCost::one(u64::MAX), SpareRefund::NONE, now));
    group.bench_function(
        "request below the limit",
        timed(|| {
            now += Duration::from_nanos(2_000_000_000 / IOPS);
            assert!(tree.try_admit(disk, Direction::Read, black_box(&RequestCost::one(4096)), now));
        }),
    );
    group.finish();
}

criterion_group! {
    name = decisions;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(30);
    targets = busy, idle, spare
}
criterion_main!(decisions);
