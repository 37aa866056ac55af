//! Buckets transferred to another process: nothing is admitted that the first would not have
//! admitted.

use policy::{
    request::Direction,
    throttle::{BucketSnapshot, LimitKind, Limits, NodeId, NodeShare, RateLimit, RequestCost, ThrottleTree},
    time::{Duration, Instant},
};
use proptest::prelude::*;

const STEP: Duration = Duration::from_millis(1);

/// A group and a disk in it, running since `epoch` of a separate clock.
struct UpgradedProcess {
    tree: ThrottleTree<()>,
    nodes: [NodeId; 2],
    epoch: Instant,
}

impl UpgradedProcess {
    fn new(limits: [Limits; 2], epoch: Instant) -> Self {
        let mut tree = ThrottleTree::new(epoch);
        let group = tree.add(None, limits[0], NodeShare::default()).unwrap();
        let disk = tree.add(Some(group), limits[1], NodeShare::default()).unwrap();
        Self { tree, nodes: [group, disk], epoch }
    }

    /// A process that takes over at `at`, in the time of the first one.
    fn after(&self, limits: [Limits; 2], epoch: Instant, at: Duration) -> Self {
        let mut next = Self::new(limits, epoch);
        for (from, to) in self.nodes.into_iter().zip(next.nodes) {
            let filled: Option<BucketSnapshot> = self.tree.snapshot(from, self.epoch + at);
            if let Some(filled) = filled {
                next.tree.restore(to, &filled, epoch + at).unwrap();
            }
        }
        next
    }

    /// Number of requests admitted at this time if more wait than fit.
    fn pass(&mut self, at: Duration) -> u64 {
        let (now, cost) = (self.epoch + at, RequestCost::one(4096));
        (0..).take_while(|_| self.tree.try_admit(self.nodes[1], Direction::Write, &cost, now)).count() as u64
    }
}

fn limits(rate: u64, burst_rate: u64, burst_length_s: u64) -> Limits {
    let mut limits = Limits::default();
    *limits.limit_mut(LimitKind::IopsTotal) =
        RateLimit { rate, burst_rate, burst_length_s, ..RateLimit::NONE };
    limits
}

proptest! {
    #[test]
    fn the_same_passes_at_the_same_times(
        group in (100_u64..1000, 1_u64..4, 1_u64..4),
        disk in (100_u64..1000, 1_u64..4, 1_u64..4),
        epochs in proptest::collection::vec((1_u64..500, 0_u64..1_000_000_000_000), 1..8),
    ) {
        let to_limits = |(rate, times, length)| limits(rate, rate * times, length);
        let both = [to_limits(group), to_limits(disk)];
        let mut alone = UpgradedProcess::new(both, Instant::ZERO);
        let mut current = UpgradedProcess::new(both, Instant::ZERO);
        let mut takeovers = epochs.into_iter();
        let mut next = takeovers.next();
        let mut since = 0;
        for step in 0..2000_u32 {
            let at = STEP * step;
            if let Some((after, epoch)) = next && since == after {
                current = current.after(both, Instant::from_nanos(epoch), at);
                (next, since) = (takeovers.next(), 0);
            }
            since += 1;
            prop_assert_eq!(current.pass(at), alone.pass(at), "at {:?}", at);
        }
    }
}

#[test]
fn new_limits_inherit_charges_of_the_old_process() {
    let (before, after) = ([Limits::default(), limits(100, 1000, 1)], [Limits::default(), limits(100, 0, 1)]);
    let mut old = UpgradedProcess::new(before, Instant::ZERO);
    assert_eq!(old.pass(Duration::ZERO), 1001);
    let mut new = old.after(after, Instant::from_nanos(7), Duration::ZERO);
    assert_eq!(new.pass(Duration::ZERO), 0, "a burst was had already");
    let in_a_second: u64 = (1..=1000).map(|step| new.pass(STEP * step)).sum();
    assert!(in_a_second <= 101, "{in_a_second}");
}

#[test]
fn invalid_limits_are_rejected() {
    let mut process = UpgradedProcess::new([Limits::default(), limits(100, 0, 1)], Instant::ZERO);
    let wrong = BucketSnapshot { limits: limits(100, 10, 1), levels: Default::default() };
    assert!(process.tree.restore(process.nodes[1], &wrong, Instant::ZERO).is_err());
    let full = BucketSnapshot {
        limits: limits(100, 0, 1),
        levels: [policy::throttle::BucketContents {
            main: u128::MAX,
            deferred: u128::MAX,
            burst: u128::MAX,
            burst_deferred: u128::MAX,
        }; 6],
    };
    process.tree.restore(process.nodes[1], &full, Instant::ZERO).unwrap();
    assert_eq!(process.pass(Duration::from_secs(3600)), 0);
}

/// Requests that a stopping process admits because they cannot wait delay later ones, also in the
/// next process.
#[test]
fn final_admissions_delay_later_requests() {
    let limits = [limits(100, 0, 1), limits(50, 0, 1)];
    let mut first = UpgradedProcess::new(limits, Instant::from_nanos(7));
    let at = Duration::from_secs(10);
    let burst = first.pass(at);
    let (now, cost) = (first.epoch + at, RequestCost::one(4096));
    for _ in 0..200 {
        first.tree.charge_unconditionally(first.nodes[1], Direction::Write, &cost, now);
    }
    assert_eq!(first.tree.stats(first.nodes[1], now).writes.requests, burst + 200);
    let mut second = first.after(limits, Instant::from_nanos(1 << 40), at);
    let mut passed = burst + 200;
    for step in 1..=10_000 {
        let at = at + STEP * step;
        passed += second.pass(at);
        // The disk's own limit, which is the lower one.
        let max_passed = 50 * u64::from(step) / 1000 + burst;
        assert!(passed <= max_passed.max(burst + 200), "{passed} after {step} ms");
    }
    assert!((500 + burst - 1..=500 + burst).contains(&passed), "{passed} in 10 s");
}
