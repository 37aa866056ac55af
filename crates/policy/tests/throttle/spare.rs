//! Read-ahead uses the capacity that guests leave, and does not affect them.

use crate::properties::{any_direction, any_enforcement, any_limits};
use crate::timeline::{limits, ms, s};
use policy::request::Direction::{self, Read, Write};
use policy::throttle::{
    AdmissionResult, Enforcement, LimitKind, LimitScale, Limits, NodeId, NodeShare, PollDecision,
    QueuedRequestId, RequestCost, SpareRefund, ThrottleStats, ThrottleTree,
};
use policy::time::{Duration, Instant};
use proptest::prelude::*;

/// A tree with one group, and a disk with each of these limits in it.
fn group<const N: usize>(of_group: &str, of_disks: [&str; N]) -> (ThrottleTree<u32>, NodeId, [NodeId; N]) {
    let mut tree = ThrottleTree::new(s(0));
    let group = tree.add(None, limits(of_group), NodeShare::default()).unwrap();
    let disks = of_disks.map(|text| tree.add(Some(group), limits(text), NodeShare::default()).unwrap());
    (tree, group, disks)
}

fn read_ahead(tree: &mut ThrottleTree<u32>, disk: NodeId, length: u64, now: Instant) -> bool {
    tree.try_admit_read_ahead(disk, &RequestCost::one(length), SpareRefund::NONE, now)
}

/// Number of read-aheads of this length that are admitted at an instant.
fn count_admitted(tree: &mut ThrottleTree<u32>, disk: NodeId, length: u64, now: Instant) -> usize {
    (0..).take_while(|_| read_ahead(tree, disk, length, now)).count()
}

#[track_caller]
fn admit(tree: &mut ThrottleTree<u32>, disk: NodeId, direction: Direction, length: u64, now: Instant) {
    assert!(tree.try_admit(disk, direction, &RequestCost::one(length), now));
}

#[track_caller]
fn queue(tree: &mut ThrottleTree<u32>, disk: NodeId, direction: Direction, now: Instant) -> QueuedRequestId {
    match tree.submit(disk, direction, RequestCost::one(1), 0, now) {
        AdmissionResult::Queued(ticket) => ticket,
        AdmissionResult::Admitted(_) => panic!("it did not wait"),
    }
}

fn full_refund(length: u64) -> SpareRefund {
    let mut refund = SpareRefund::NONE;
    refund.add(length, length);
    refund
}

#[test]
fn read_ahead_is_admitted_unless_the_bucket_is_overfull() {
    let (mut tree, _, [disk]) = group("bps-total=1000000", [""]);
    assert_eq!(
        count_admitted(&mut tree, disk, 100_000, s(0)),
        2,
        "one that fills it, and one whatever its size"
    );
    let just_before = Instant::from_nanos(ms(100).as_nanos() - 1);
    assert!(!read_ahead(&mut tree, disk, 1, just_before));
    assert!(read_ahead(&mut tree, disk, 1, ms(100)));
}

#[test]
fn read_ahead_does_not_change_guest_waits() {
    let (mut tree, _, [disk]) = group("bps-total=1000000", [""]);
    assert_eq!(count_admitted(&mut tree, disk, 10_000_000, s(0)), 1);
    admit(&mut tree, disk, Read, 60_000, s(0));
    admit(&mut tree, disk, Read, 60_000, s(0));
    queue(&mut tree, disk, Read, s(0));
    assert_eq!(tree.poll(s(0)), PollDecision::Wait { until: ms(20) });
    assert_eq!(tree.poll(ms(20)), PollDecision::Admit(0));
}

#[test]
fn guest_use_reduces_spare_capacity() {
    let (mut tree, _, [disk]) = group("bps-total=1000000", [""]);
    admit(&mut tree, disk, Write, 100_000, s(0));
    assert_eq!(count_admitted(&mut tree, disk, 100_000, s(0)), 1);
    admit(&mut tree, disk, Read, 50_000, ms(50));
    // 250,000 in total, of which one bucket may remain.
    assert!(!read_ahead(&mut tree, disk, 1, ms(149)));
    assert!(read_ahead(&mut tree, disk, 1, ms(150)));
}

#[test]
fn read_ahead_gets_all_that_guests_leave() {
    let (mut tree, _, [disk, other]) = group("bps-total=1000000", ["", ""]);
    let mut bytes = 0;
    for millisecond in 0..10_000 {
        if millisecond % 2 == 0 {
            admit(&mut tree, other, Write, 1000, ms(millisecond));
        }
        bytes += 500 * count_admitted(&mut tree, disk, 500, ms(millisecond));
    }
    // Half of ten seconds' worth, plus the bucket, one request over, minus a guest's level in it.
    assert_eq!(bytes, 5_000_000 - 500 + 100_000);
}

#[test]
fn used_read_ahead_is_refunded() {
    let (mut tree, _, [disk]) = group("bps-total=1000000,iops-read=100", [""]);
    assert_eq!(count_admitted(&mut tree, disk, 50_000, s(0)), 3);
    admit(&mut tree, disk, Read, 50_000, s(0));
    // The guest's 50,000 leak first, so all of the read-ahead remains.
    let now = ms(50);
    let mut half = SpareRefund::NONE;
    half.add(25_000, 50_000);
    assert!(
        !tree.try_admit_read_ahead(disk, &RequestCost::one(1), half, now),
        "125,000 in a bucket of 100,000"
    );
    assert!(
        tree.try_admit_read_ahead(disk, &RequestCost::one(1), half, now),
        "the refund of a rejected read-ahead counts"
    );
    assert!(!read_ahead(&mut tree, disk, 1, now));
    // A refund above the level does not carry over.
    assert!(tree.try_admit_read_ahead(disk, &RequestCost::one(100_000), full_refund(1 << 40), now));
    assert_eq!(count_admitted(&mut tree, disk, 100_000, now), 1);
}

#[test]
fn operations_are_refunded_with_the_bytes() {
    let (mut tree, _, [disk]) = group("iops-total=100,iops-size=4096", [""]);
    assert_eq!(count_admitted(&mut tree, disk, 40_960, s(0)), 2, "ten operations each");
    let mut quarter = SpareRefund::NONE;
    quarter.add(10_240, 40_960);
    for _ in 0..3 {
        assert!(!tree.try_admit_read_ahead(disk, &RequestCost::one(1), quarter, s(0)));
    }
    assert!(tree.try_admit_read_ahead(disk, &RequestCost::one(1), quarter, s(0)));
}

#[test]
fn read_ahead_uses_a_burst_at_its_rate() {
    let (mut tree, _, [disk]) = group("iops-total=100,iops-total-max=1000,iops-total-max-length=3", [""]);
    let passed: Vec<_> = (0..80)
        .map(|tenth| {
            (0..10).map(|step| count_admitted(&mut tree, disk, 1, ms(tenth * 100 + step * 10))).sum()
        })
        .collect();
    let in_second = |second: usize| passed[second * 10..(second + 1) * 10].iter().sum::<usize>();
    assert_eq!(in_second(0), 1000 + 100 - 10 + 1, "a tenth of a second's worth at once, one over");
    assert_eq!(in_second(1), 1000);
    assert_eq!(in_second(5), 100, "the burst is over");
    // A guest gets the whole burst, as without read-ahead.
    let guest: usize = (0..100)
        .map(|step| {
            (0..)
                .take_while(|_| tree.try_admit(disk, Read, &RequestCost::one(1), ms(8000 + step * 10)))
                .count()
        })
        .sum();
    assert_eq!(guest, 1000 + 100 - 10 + 1);
}

#[test]
fn waiting_requests_precede_read_ahead() {
    let (mut tree, _, [disk, other]) = group("iops-total=10", ["", ""]);
    admit(&mut tree, other, Read, 1, s(0));
    admit(&mut tree, other, Read, 1, s(0));
    let ticket = queue(&mut tree, other, Read, s(0));
    assert_eq!(tree.poll(s(0)), PollDecision::Wait { until: ms(100) });
    assert!(!read_ahead(&mut tree, disk, 1, ms(50)));
    // There is capacity again, but a request waits for it that has not been polled.
    assert!(!read_ahead(&mut tree, disk, 1, ms(100)));
    assert!(!read_ahead(&mut tree, other, 1, ms(100)));
    assert_eq!(tree.cancel(ticket), Some(0));
    assert!(read_ahead(&mut tree, disk, 1, ms(100)));
}

#[test]
fn own_limit_blocks_own_read_ahead_only() {
    let (mut tree, _, [disk, other]) = group("iops-total=1000", ["", "iops-total=10"]);
    admit(&mut tree, other, Read, 1, s(0));
    admit(&mut tree, other, Read, 1, s(0));
    queue(&mut tree, other, Read, s(0));
    assert!(matches!(tree.poll(s(0)), PollDecision::Wait { .. }));
    assert!(!read_ahead(&mut tree, other, 1, s(0)));
    assert!(read_ahead(&mut tree, disk, 1, s(0)));
}

#[test]
fn waiting_writes_precede_read_ahead_under_a_shared_limit() {
    let (mut tree, _, [disk, writer]) = group("iops-total=10", ["", ""]);
    admit(&mut tree, writer, Write, 1, s(0));
    admit(&mut tree, writer, Write, 1, s(0));
    queue(&mut tree, writer, Write, s(0));
    assert!(!read_ahead(&mut tree, disk, 1, ms(100)), "there is room, and it is the write's");
    assert_eq!(tree.poll(ms(100)), PollDecision::Admit(0));
    assert!(!read_ahead(&mut tree, disk, 1, ms(199)));
    assert!(read_ahead(&mut tree, disk, 1, ms(200)));

    let (mut tree, _, [disk]) = group("iops-total=1000", ["iops-write=10"]);
    admit(&mut tree, disk, Write, 1, s(0));
    admit(&mut tree, disk, Write, 1, s(0));
    queue(&mut tree, disk, Write, s(0));
    assert!(matches!(tree.poll(s(0)), PollDecision::Wait { .. }));
    assert!(read_ahead(&mut tree, disk, 1, ms(99)), "the write has to wait whatever reads do");
    assert!(!read_ahead(&mut tree, disk, 1, ms(100)), "and now it need not");
    assert_eq!(tree.poll(ms(100)), PollDecision::Admit(0));
    assert!(read_ahead(&mut tree, disk, 1, ms(100)));
}

#[test]
fn every_level_limits_read_ahead() {
    let (mut tree, _, [disk, slow]) = group("bps-total=1000000", ["", "bps-read=1000"]);
    assert_eq!(count_admitted(&mut tree, slow, 200, s(0)), 1);
    assert_eq!(count_admitted(&mut tree, disk, 100_000, s(0)), 1, "200 there are also the group's");
    let (mut tree, _, [disk]) = group("", [""]);
    assert!((0..1000).all(|_| read_ahead(&mut tree, disk, u64::MAX, s(0))));
}

#[test]
fn lifted_and_scaled_limits_apply_to_read_ahead() {
    // While limits are lifted, read-ahead is not charged.
    let (mut tree, group, [disk]) = group("bps-total=1000000", [""]);
    tree.enforce(group, Enforcement::Lifted, s(0));
    assert!((0..10).all(|_| read_ahead(&mut tree, disk, 1 << 30, s(0))));
    tree.enforce(group, Enforcement::Enforced, s(0));
    assert_eq!(count_admitted(&mut tree, disk, 100_000, s(0)), 2, "nothing was charged meanwhile");
    tree.enforce(group, Enforcement::Scaled(LimitScale::from_thousandths(3000)), s(0));
    assert_eq!(count_admitted(&mut tree, disk, 100_000, s(0)), 2, "300,000 fill it");
    assert!(!read_ahead(&mut tree, disk, 1, ms(33)));
    assert!(read_ahead(&mut tree, disk, 1, ms(34)), "and it leaks three times as fast");
}

#[test]
fn read_ahead_counts_after_a_limit_change() {
    let (mut tree, group, [disk]) = group("bps-total=1000000", [""]);
    assert_eq!(count_admitted(&mut tree, disk, 100_000, s(0)), 2);
    tree.configure(group, limits("bps-total=1000000"), NodeShare::default(), s(0)).unwrap();
    assert!(!read_ahead(&mut tree, disk, 1, s(0)), "the same as before");
    tree.configure(group, limits("bps-total=2000000"), NodeShare::default(), s(0)).unwrap();
    assert_eq!(count_admitted(&mut tree, disk, 100_000, s(0)), 1, "200,000 of 200,000 are taken");
}

#[derive(Clone, Debug)]
enum Step {
    Request(usize, Direction, u64),
    Poll,
    Cancel(usize),
    Enforce(usize, Enforcement),
    Limit(usize, Limits),
    Cap(usize, Option<Limits>),
    Pass(u64),
    /// Read-ahead: disk, length, refund, and how much later than the present.
    ReadAhead(usize, u64, u64, u64),
}

fn any_step() -> impl Strategy<Value = Step> {
    let node = 0..NODES;
    prop_oneof![
        8 => (node.clone(), any_direction(), 0..300_000u64).prop_map(|(at, direction, length)| Step::Request(at, direction, length)),
        4 => Just(Step::Poll),
        1 => (0..16usize).prop_map(Step::Cancel),
        1 => (node.clone(), any_enforcement()).prop_map(|(at, enforcement)| Step::Enforce(at, enforcement)),
        1 => (node.clone(), any_limits()).prop_map(|(at, limits)| Step::Limit(at, limits)),
        1 => (node.clone(), prop::option::of(any_limits())).prop_map(|(at, cap)| Step::Cap(at, cap)),
        4 => (0..100_000_000u64).prop_map(Step::Pass),
        8 => (node, 0..2_000_000u64, 0..1_000_000u64, prop_oneof![Just(0), 0..50_000_000u64])
            .prop_map(|(at, length, refunded, later)| Step::ReadAhead(at, length, refunded, later)),
    ]
}

const NODES: usize = 8;

/// A host with two tenants of two disks each, and a disk beside them.
fn host(all: &[Limits]) -> (ThrottleTree<u32>, [NodeId; NODES]) {
    let mut tree = ThrottleTree::new(s(0));
    let mut add =
        |at: usize, parent| tree.add(parent, all[at], NodeShare::new(100 + at as u32).unwrap()).unwrap();
    let host = add(0, None);
    let [first, second] = [1, 2].map(|at| add(at, Some(host)));
    let disks =
        [(3, first), (4, first), (5, second), (6, second), (7, host)].map(|(at, group)| add(at, Some(group)));
    (tree, [host, first, second, disks[0], disks[1], disks[2], disks[3], disks[4]])
}

/// All results of a tree during the steps, and its statistics afterwards.
fn run(all: &[Limits], steps: &[Step], with_read_ahead: bool) -> (Vec<String>, [ThrottleStats; NODES]) {
    let (mut tree, nodes) = host(all);
    let disk = |at: usize| nodes[3 + at % 5];
    let (mut results, mut tickets, mut now, mut token) = (Vec::new(), Vec::new(), s(0), 0);
    for step in steps {
        match step {
            Step::Request(at, direction, length) => {
                token += 1;
                let result = tree.submit(disk(*at), *direction, RequestCost::one(*length), token, now);
                results.push(format!("{result:?}"));
                if let AdmissionResult::Queued(ticket) = result {
                    tickets.push(ticket);
                }
            }
            Step::Poll => results.push(format!("{:?}", tree.poll(now))),
            Step::Cancel(at) if !tickets.is_empty() => {
                let ticket = tickets.swap_remove(*at % tickets.len());
                results.push(format!("{:?}", tree.cancel(ticket)));
            }
            Step::Cancel(_) => {}
            Step::Enforce(at, enforcement) => tree.enforce(nodes[*at], *enforcement, now),
            Step::Limit(at, limits) => {
                tree.configure(nodes[*at], *limits, tree.share(nodes[*at]), now).unwrap();
            }
            Step::Cap(at, cap) => tree.set_cap(nodes[*at], *cap, now).unwrap(),
            Step::Pass(elapsed_ns) => now += Duration::from_nanos(*elapsed_ns),
            Step::ReadAhead(at, length, refunded, later_ns) if with_read_ahead => {
                let later = now + Duration::from_nanos(*later_ns);
                tree.try_admit_read_ahead(
                    disk(*at),
                    &RequestCost::one(*length),
                    full_refund(*refunded),
                    later,
                );
            }
            Step::ReadAhead(..) => {}
        }
    }
    loop {
        // Drain at the exact deadlines, which must be the same with and without read-ahead.
        let decision = tree.poll(now);
        results.push(format!("{decision:?}"));
        match decision {
            PollDecision::Admit(_) => {}
            PollDecision::Wait { until } => now = until,
            PollDecision::Idle => return (results, nodes.map(|node| tree.stats(node, now))),
        }
    }
}

/// Load of a disk's device under limits of the disk and of its group.
struct SpareDevice {
    tree: ThrottleTree<u32>,
    disk: NodeId,
    limits: [Limits; 2],
    now: Instant,
    /// Lengths of all requests and read-aheads, by direction.
    submitted: [Vec<u64>; 2],
    largest: u64,
    in_memory: Vec<u64>,
    refund: SpareRefund,
}

#[derive(Clone, Debug)]
enum SpareStep {
    Guest(Direction, u64),
    /// A guest reads prefetched data.
    Hit,
    Ahead(u64),
}

fn any_spare_step() -> impl Strategy<Value = SpareStep> {
    prop_oneof![
        2 => (any_direction(), 1..200_000u64).prop_map(|(direction, length)| SpareStep::Guest(direction, length)),
        1 => Just(SpareStep::Hit),
        4 => (1..200_000u64).prop_map(SpareStep::Ahead),
    ]
}

fn units(kind: LimitKind, iops_size: u64, length: u64) -> u128 {
    match u128::from(length) {
        length if kind.counts_bytes() => length * BILLION,
        length if iops_size > 0 && length > iops_size.into() => (length * BILLION).div_ceil(iops_size.into()),
        _ => BILLION,
    }
}

const BILLION: u128 = 1_000_000_000;

impl SpareDevice {
    fn new(limits: [Limits; 2]) -> Self {
        let mut tree = ThrottleTree::new(s(0));
        let group = tree.add(None, limits[0], NodeShare::default()).unwrap();
        let disk = tree.add(Some(group), limits[1], NodeShare::default()).unwrap();
        Self {
            tree,
            disk,
            limits,
            now: s(0),
            submitted: [Vec::new(), Vec::new()],
            largest: 1,
            in_memory: Vec::new(),
            refund: SpareRefund::NONE,
        }
    }

    fn step(&mut self, step: &SpareStep) {
        match *step {
            SpareStep::Guest(direction, length) => {
                if self.tree.try_admit(self.disk, direction, &RequestCost::one(length), self.now) {
                    self.count(direction, length);
                }
                self.has_done_at_most(2);
            }
            SpareStep::Hit => {
                if let Some(length) = self.in_memory.last().copied()
                    && self.tree.try_admit(self.disk, Read, &RequestCost::one(length), self.now)
                {
                    self.in_memory.pop();
                    // The guest was charged for the read, so the spare level is refunded at the
                    // next read-ahead.
                    self.refund.add(length, length);
                }
            }
            SpareStep::Ahead(length) => {
                let given_back = core::mem::take(&mut self.refund);
                if self.tree.try_admit_read_ahead(self.disk, &RequestCost::one(length), given_back, self.now)
                {
                    self.in_memory.push(length);
                    self.count(Read, length);
                    self.has_done_at_most(1);
                }
            }
        }
    }

    fn count(&mut self, direction: Direction, length: u64) {
        self.submitted[direction.index()].push(length);
        self.largest = self.largest.max(length);
    }

    /// The load is bounded by the leaked amount plus this many buckets, each overrun by a request.
    fn has_done_at_most(&self, buckets: u128) {
        let ns = u128::from(self.now.as_nanos());
        for limits in &self.limits {
            for kind in LimitKind::ALL.into_iter().filter(|kind| limits.limit(*kind).rate > 0) {
                let units = |length: &u64| units(kind, limits.iops_size, *length);
                let applying = Direction::ALL
                    .into_iter()
                    .filter(|direction| LimitKind::applying_to(*direction).contains(&kind));
                let sum: u128 =
                    applying.flat_map(|direction| &self.submitted[direction.index()]).map(units).sum();
                let limit = limits.limit(kind);
                let at_most =
                    |rate: u64, size: u128| ns * u128::from(rate) + buckets * (size + units(&self.largest));
                let tenth = |rate: u64| u128::from(rate) * BILLION / 10;
                let size = match limit.burst_rate {
                    0 => tenth(limit.rate),
                    burst_rate => u128::from(burst_rate) * u128::from(limit.burst_length_s) * BILLION,
                };
                assert!(sum <= at_most(limit.rate, size), "{kind:?}: {sum}");
                if limit.burst_length_s > 1 {
                    assert!(
                        sum <= at_most(limit.burst_rate, tenth(limit.burst_rate)),
                        "{kind:?}: {sum} in a burst"
                    );
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn read_ahead_is_invisible_to_guests(
        limits in prop::collection::vec(any_limits(), NODES),
        steps in prop::collection::vec(any_step(), 1..120),
    ) {
        prop_assert_eq!(run(&limits, &steps, true), run(&limits, &steps, false));
    }

    /// At the time of a read-ahead, the load is bounded by rate, one bucket, and the read-ahead
    /// itself. At other times guests may have used a bucket of their own on top.
    #[test]
    fn a_device_does_no_more_than_the_limits_let_pass(
        limits in prop::array::uniform2(any_limits()),
        asks in prop::collection::vec((0..100_000_000u64, any_spare_step()), 1..200),
    ) {
        let mut device = SpareDevice::new(limits);
        for (elapsed_ns, step) in asks {
            device.now += Duration::from_nanos(elapsed_ns);
            device.step(&step);
        }
    }
}
