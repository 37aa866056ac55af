//! Limits that change all the time admit no more than constant ones: in any window, at most what
//! the limits in force allowed, plus one burst, whatever the sequence of changes.

use crate::properties::{any_direction, any_enforcement};
use crate::timeline::{Timeline, Workload, limits, ms, s};
use policy::request::Direction;
use policy::throttle::{
    Enforcement, LimitKind, Limits, NodeId, NodeShare, PollDecision, RequestCost, ThrottleTree,
};
use policy::time::{Duration, Instant};
use proptest::prelude::*;

const LARGEST: u64 = 16 << 10;
/// Number of checked nodes: two groups at the top, three below them, and a disk that moves between
/// the latter.
const NODES: usize = 6;
const DISK: usize = 5;
/// The groups between which the disk moves, and their parents.
const GROUPS: [(usize, usize); 3] = [(2, 0), (3, 1), (4, 0)];
/// Additional accounts: whichever group is above the disk, by level.
const LEVELS: usize = 2;
/// Number of requests by which a window may be exceeded: one that overruns a bucket, and one that
/// was charged partly before the window.
const ON_THE_WAY: f64 = 2.0;

/// Limits from one to a hundred thousand per second, some with long bursts, one of each unit.
fn any_limits() -> impl Strategy<Value = Limits> {
    let rate = prop_oneof![1 => Just(0u64), 2 => 1..20u64, 2 => 20..2_000u64, 1 => 2_000..100_000u64];
    let any_kind = (0..3usize, rate, 0..40u64, 1..8u64);
    (any_kind.clone(), any_kind, prop_oneof![2 => Just(0u64), 1 => 512..8_192u64]).prop_map(
        |(bps, iops, iops_size)| {
            let mut limits = Limits::default();
            for (first, (offset, rate, factor, length)) in [(0, bps), (3, iops)] {
                let limit = limits.limit_mut(LimitKind::ALL[first + offset]);
                limit.rate = if first == 0 { rate * 4096 } else { rate };
                limit.burst_rate = limit.rate * factor;
                limit.burst_length_s = if limit.burst_rate == 0 { 1 } else { length };
            }
            limits.iops_size = if iops.1 > 0 { iops_size } else { 0 };
            limits
        },
    )
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "few values, in a test")]
enum Step {
    Limit(usize, Limits),
    /// Restores the previous limits.
    Back(usize),
    Weight(u32),
    Enforce(usize, Enforcement),
    /// Moves the disk to one of the groups, or out of all.
    Move(usize),
    /// A client that keeps one request waiting, for a duration.
    Busy(Direction, u64, Duration),
    Idle(Duration),
}

fn any_step() -> impl Strategy<Value = Step> {
    let time = || {
        prop_oneof![0..1_000_000u64, 0..200_000_000u64, 0..8_000_000_000u64].prop_map(Duration::from_nanos)
    };
    let node = 0..NODES;
    prop_oneof![
        3 => (node.clone(), any_limits()).prop_map(|(node, limits)| Step::Limit(node, limits)),
        3 => node.clone().prop_map(Step::Back),
        1 => (1..10_000u32).prop_map(Step::Weight),
        1 => (node.clone(), any_enforcement()).prop_map(|(node, enforcement)| Step::Enforce(node, enforcement)),
        3 => (0..=GROUPS.len()).prop_map(Step::Move),
        6 => (any_direction(), 0..LARGEST, time()).prop_map(|(direction, length, time)| Step::Busy(direction, length, time)),
        2 => time().prop_map(Step::Idle),
    ]
}

/// Account of one limit of one node: admitted minus allowed units at each step, and the largest
/// bucket in force since the previous step.
#[derive(Default)]
struct Account {
    balance: f64,
    steps: Vec<(f64, f64)>,
}

struct World {
    tree: ThrottleTree<()>,
    now: Instant,
    nodes: [NodeId; NODES],
    before: [Limits; NODES],
    /// The last limits, with their factor: while there are none, or they are lifted, admitted work
    /// leaks as if they applied.
    last: [(Limits, f64); NODES + LEVELS],
    /// Nodes above the disk, from its parent upwards.
    above: Vec<usize>,
    /// Accounts of the nodes, then those of the levels.
    accounts: [[Account; 6]; NODES + LEVELS],
    /// Number of requests that a step may admit, to bound the duration of a case.
    passed: u32,
}

impl World {
    fn new() -> Self {
        let mut tree = ThrottleTree::new(Instant::ZERO);
        let mut add = |parent| tree.add(parent, Limits::default(), NodeShare::default()).unwrap();
        let (first, second) = (add(None), add(None));
        let nodes = [first, second, add(Some(first)), add(Some(second)), add(Some(first)), add(None)];
        let before = [Limits::default(); NODES];
        let accounts = Default::default();
        let last = [(Limits::default(), 1.0); NODES + LEVELS];
        Self { tree, now: Instant::ZERO, nodes, before, last, above: Vec::new(), accounts, passed: 0 }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Limit(node, limits) => self.limit(node, limits),
            Step::Back(node) => self.limit(node, self.before[node]),
            Step::Weight(weight) => {
                let disk = self.nodes[DISK];
                let share = NodeShare::new(weight).unwrap();
                self.tree.configure(disk, self.tree.limits(disk), share, self.now).unwrap();
            }
            Step::Enforce(node, enforcement) => self.tree.enforce(self.nodes[node], enforcement, self.now),
            Step::Move(to) => self.move_to(to),
            Step::Busy(direction, length, time) => self.busy(direction, length, self.now + time),
            Step::Idle(time) => self.pass_time(self.now + time),
        }
        self.note();
    }

    fn limit(&mut self, node: usize, limits: Limits) {
        let id = self.nodes[node];
        self.before[node] = self.tree.limits(id);
        self.tree.configure(id, limits, self.tree.share(id), self.now).unwrap();
    }

    /// Moves the disk like the block layer does.
    fn move_to(&mut self, to: usize) {
        let above = GROUPS.get(to).map_or(Vec::new(), |(group, top)| vec![*group, *top]);
        let old = self.nodes[DISK];
        let parent = above.first().map(|group| self.nodes[*group]);
        let (limits, enforcement) = (self.tree.limits(old), self.tree.enforcement(old));
        let new = self.tree.add_replacing(old, parent, limits, NodeShare::default()).unwrap();
        self.tree.enforce(new, enforcement, self.now);
        // The new node is added before the old one is removed, so that groups above both are
        // recognized and not charged twice.
        let charged = self.tree.carried_charges(old, Some(new), self.now);
        self.tree.remove(old);
        self.tree.add_carried_charges(new, charged, self.now);
        (self.nodes[DISK], self.above) = (new, above);
    }

    fn busy(&mut self, direction: Direction, length: u64, end: Instant) {
        let disk = self.nodes[DISK];
        let cost = RequestCost::one(length);
        for _ in 0..400 {
            if self.now >= end {
                return;
            }
            // Both methods are used: `try_admit` for admission at once, `submit` to wait.
            if self.tree.try_admit(disk, direction, &cost, self.now) {
                self.count(direction, length);
                continue;
            }
            let ticket = match self.tree.submit(disk, direction, cost.clone(), (), self.now) {
                policy::throttle::AdmissionResult::Queued(ticket) => ticket,
                policy::throttle::AdmissionResult::Admitted(()) => unreachable!("try_admit has just failed"),
            };
            loop {
                match self.tree.poll(self.now) {
                    PollDecision::Admit(()) => {
                        self.count(direction, length);
                        break;
                    }
                    PollDecision::Wait { until } if until <= end => self.pass_time(until),
                    _ => {
                        self.tree.cancel(ticket);
                        return self.pass_time(end);
                    }
                }
            }
        }
    }

    /// The limits that apply to a node now, with their factor.
    fn in_force(&self, node: usize) -> Option<(Limits, f64)> {
        let id = self.nodes[node];
        let limits = self.tree.limits(id);
        match self.tree.enforcement(id) {
            Enforcement::Lifted => None,
            Enforcement::Enforced => Some((limits, 1.0)),
            Enforcement::Scaled(scale) => Some((limits, scale.thousandths() as f64 / 1000.0)),
        }
    }

    fn pass_time(&mut self, until: Instant) {
        let seconds = (until - self.now).as_secs_f64();
        // Limits that were lifted or removed keep leaking here, as they do in the tree.
        for (node, (limits, factor)) in self.last.iter().enumerate() {
            for kind in LimitKind::ALL {
                self.accounts[node][kind.index()].balance -=
                    limits.limit(kind).rate as f64 * factor * seconds;
            }
        }
        self.now = until;
    }

    fn count(&mut self, direction: Direction, length: u64) {
        self.passed += 1;
        // An admission counts for each node on the path, and for each level whatever group is
        // there: moving between groups must not admit more than staying in one.
        let levels = self.above.iter().enumerate().map(|(level, node)| (*node, NODES + level));
        let nodes = self.above.iter().chain([&DISK]).map(|node| (*node, *node));
        for (node, account) in levels.chain(nodes) {
            let Some((limits, _)) = self.in_force(node) else { continue };
            for kind in LimitKind::applying_to(direction) {
                if limits.limit(kind).rate > 0 {
                    self.accounts[account][kind.index()].balance += units(kind, length, limits.iops_size);
                }
            }
        }
    }

    fn note(&mut self) {
        let levels = (0..LEVELS).map(|level| (self.above.get(level).copied(), NODES + level));
        for (node, account) in (0..NODES).map(|node| (Some(node), node)).chain(levels) {
            let in_force = node.and_then(|node| self.in_force(node));
            let limits = node.map_or_else(Limits::default, |node| self.tree.limits(self.nodes[node]));
            if !limits.is_unlimited() {
                self.last[account] = (limits, in_force.map_or(1.0, |(_, factor)| factor));
            }
            for kind in LimitKind::ALL {
                let size = in_force.map_or(0.0, |(limits, factor)| size_of(&limits, kind) * factor);
                let account = &mut self.accounts[account][kind.index()];
                account.steps.push((account.balance, size));
            }
        }
    }

    fn check(&self) {
        for (node, accounts) in self.accounts.iter().enumerate() {
            for (kind, account) in LimitKind::ALL.iter().zip(accounts) {
                account
                    .check(if kind.counts_bytes() { LARGEST as f64 } else { LARGEST as f64 / 512.0 }, || {
                        format!("node {node}, {kind:?}, {} passed", self.passed)
                    });
            }
        }
    }
}

impl Account {
    /// Over every window: at most one burst and the requests in progress.
    fn check(&self, request: f64, context: impl Fn() -> String) {
        for (first, (start, _)) in self.steps.iter().enumerate() {
            let mut burst: f64 = 0.0;
            for (last, (end, size)) in self.steps.iter().enumerate().skip(first) {
                // The burst of a window is the largest bucket that was in force within it.
                burst = burst.max(*size);
                let admitted = end - start;
                let max_growth = burst + ON_THE_WAY * request;
                assert!(
                    admitted <= max_growth * 1.000_001 + 1e-3,
                    "{}: {admitted} of {max_growth} from {first} to {last}",
                    context()
                );
            }
        }
    }
}

fn units(kind: LimitKind, length: u64, iops_size: u64) -> f64 {
    match kind.counts_bytes() {
        true => length as f64,
        false if iops_size > 0 && length > iops_size => length as f64 / iops_size as f64,
        false => 1.0,
    }
}

fn size_of(limits: &Limits, kind: LimitKind) -> f64 {
    let limit = limits.limit(kind);
    match limit.burst_rate {
        0 => limit.rate as f64 / 10.0,
        burst_rate => (burst_rate * limit.burst_length_s) as f64,
    }
}

proptest! {
    #[test]
    fn no_sequence_of_changes_gives_more(steps in prop::collection::vec(any_step(), 1..60)) {
        let mut world = World::new();
        world.note();
        for step in steps {
            world.take(step);
        }
        world.check();
    }

    /// As `no_sequence_of_changes_gives_more`, for a client that moves from group to group, most of
    /// them with equal limits, to get a burst each time.
    #[test]
    fn no_sequence_of_moves_gives_more(
        limits in prop::collection::vec(prop_oneof![Just(Limits::default()), any_limits()], 3),
        steps in prop::collection::vec(prop_oneof![
            2 => any_step(),
            3 => (0..=GROUPS.len()).prop_map(Step::Move),
            3 => (any_direction(), 0..LARGEST, 0..100_000_000u64)
                .prop_map(|(direction, length, ns)| Step::Busy(direction, length, Duration::from_nanos(ns))),
        ], 1..60),
    ) {
        let mut world = World::new();
        for (nodes, limits) in [&[0, 1][..], &[2, 3, 4], &[DISK]].into_iter().zip(limits) {
            nodes.iter().for_each(|node| world.limit(*node, limits));
        }
        world.note();
        for step in steps {
            world.take(step);
        }
        world.check();
    }
}

/// A burst that was configured while limits were lifted has never been in force and is not granted:
/// neither to a disk that moves through, nor to the node itself.
#[test]
fn limits_never_enforced_grant_no_burst() {
    use Step::{Busy, Enforce, Idle, Limit, Move};
    let read = |length, ns| Busy(Direction::Read, length, Duration::from_nanos(ns));
    let small = limits("bps-total=12288,bps-total-max=233472");
    let (large, none) = (limits("bps-total=81920,bps-total-max=245760"), Limits::default());
    let lifted = |node| Enforce(node, Enforcement::Lifted);
    let enforced = |node| Enforce(node, Enforcement::Enforced);
    let cases = [
        // In the group itself.
        vec![
            Limit(2, small),
            Move(0),
            read(976, 1),
            lifted(2),
            Limit(2, large),
            Limit(2, small),
            enforced(2),
        ],
        // Moving through a group in which it was set.
        vec![
            Limit(2, small),
            Limit(4, small),
            lifted(3),
            Limit(3, large),
            Move(0),
            read(976, 1),
            Move(1),
            Move(2),
        ],
        // Moving through a group in which it was in force before.
        vec![
            Limit(2, small),
            Limit(3, large),
            lifted(3),
            Limit(4, small),
            Move(2),
            read(976, 1),
            Move(1),
            Idle(ms(90) - Instant::ZERO),
            Move(2),
        ],
        // Staying in a group until other limits apply there.
        vec![
            Limit(2, small),
            Limit(3, large),
            lifted(3),
            Move(0),
            read(976, 1),
            Move(1),
            Limit(3, none),
            Limit(3, small),
            enforced(3),
        ],
    ];
    for (number, steps) in cases.into_iter().enumerate() {
        let mut world = World::new();
        world.note();
        for step in steps {
            world.take(step);
        }
        let full = world.passed;
        world.take(read(976, 1));
        world.check();
        assert!(full > 200 && world.passed <= full + 2, "case {number}: {full}, then {}", world.passed);
    }
}

/// Ten changes per second, like an autoscaler: 500 and 501 admit what 500 admits.
#[test]
fn alternating_limits_give_no_burst_each_time() {
    for (first, second, max_rate) in [
        ("iops-total=500", "iops-total=501", 505),
        ("iops-total=500", "iops-total=500,bps-total=1000000000", 505),
        ("iops-total=500,iops-total-max=20000,iops-total-max-length=5", "iops-total=500", 505),
        ("iops-total=500", "iops-total=1", 255),
    ] {
        let mut disk = Timeline::new(first);
        disk.add(Workload::READS.depth(32));
        disk.run_until(s(300));
        for tenth in 1..=100 {
            disk.change_limits(if tenth % 2 == 0 { first } else { second });
            disk.run_until(ms(300_000 + tenth * 100));
        }
        let passed = disk.admitted_between(s(300), s(310));
        assert!(passed <= max_rate * 10, "{first} and {second}: {passed} in 10 s");
        assert!(passed >= max_rate * 10 * 95 / 100, "{first} and {second}: {passed} in 10 s");
    }
}

/// After a burst of a hundred thousand, a limit of ten admits ten per second at once.
#[test]
fn lower_limit_applies_without_lockout() {
    let mut disk = Timeline::new("iops-total=500,iops-total-max=20000,iops-total-max-length=5");
    disk.add(Workload::READS.depth(32));
    disk.run_until(s(100));
    disk.change_limits("iops-total=10");
    assert_eq!(disk.admitted_between(s(100), s(110)), 100);
    // Earlier admissions count again as far as the larger bucket holds them.
    disk.change_limits("iops-total=500,iops-total-max=20000,iops-total-max-length=5");
    let admitted = disk.admitted_between(s(110), s(111));
    assert!((499..=501).contains(&admitted), "{admitted}");
}
