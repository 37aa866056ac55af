//! Properties of every tree, whatever its shape, limits, shares and requests.

use crate::naive::Levels;
use crate::timeline::{Timeline, Workload};
use policy::request::Direction;
use policy::throttle::{
    AdmissionResult, Enforcement, LimitKind, LimitScale, Limits, NodeId, NodeShare, PollDecision,
    QueuedRequestId, RequestCost, ReturnedRequest, ThrottleTree,
};
use policy::time::{Duration, Instant};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};

/// Valid limits of every shape: some kinds unlimited, total or split, with and without bursts.
pub(crate) fn any_limits() -> impl Strategy<Value = Limits> {
    let any_limit = (0..5_000u64, 0..6u64, 1..8u64);
    (prop::array::uniform6(any_limit), any::<[bool; 2]>(), prop_oneof![Just(0), 512..65_536u64]).prop_map(
        |(numbers, use_total, iops_size)| {
            let mut limits = Limits::default();
            for (kind, (rate, factor, length)) in LimitKind::ALL.into_iter().zip(numbers) {
                let is_total = matches!(kind, LimitKind::BpsTotal | LimitKind::IopsTotal);
                if rate < 1000 || is_total != use_total[usize::from(kind.counts_bytes())] {
                    continue;
                }
                let rate = if kind.counts_bytes() { rate * 1000 } else { rate };
                limits.limit_mut(kind).rate = rate;
                limits.limit_mut(kind).burst_rate = rate * factor;
                limits.limit_mut(kind).burst_length_s = if factor == 0 { 1 } else { length };
                limits.iops_size = if kind.counts_bytes() { 0 } else { iops_size };
            }
            limits
        },
    )
}

pub(crate) fn any_direction() -> impl Strategy<Value = Direction> {
    prop::sample::select(&Direction::ALL[..])
}

fn any_share() -> impl Strategy<Value = NodeShare> {
    (
        1..=10_000u32,
        prop_oneof![3 => Just(0), 1 => 1..2000u64],
        prop_oneof![3 => Just(0), 1 => 1..2_000_000u64],
    )
        .prop_map(|(weight, iops, bps)| NodeShare::new(weight).unwrap().with_reservation(iops, bps))
}

pub(crate) fn any_enforcement() -> impl Strategy<Value = Enforcement> {
    prop_oneof![
        Just(Enforcement::Enforced),
        Just(Enforcement::Lifted),
        (1000..20_000u64)
            .prop_map(|thousandths| Enforcement::Scaled(LimitScale::from_thousandths(thousandths))),
    ]
}

/// A bound on operations and bytes, as a controller sets it.
fn any_cap() -> impl Strategy<Value = Option<Limits>> {
    let limits = |rate| {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = rate;
        limits.limit_mut(LimitKind::BpsTotal).rate = rate * 1000;
        limits
    };
    prop::option::of((1000..5_000u64).prop_map(limits))
}

#[derive(Clone, Debug)]
enum Step {
    /// A disk, or a group with one disk in it, at the top level or below an existing group.
    Add(usize, bool, Limits, NodeShare),
    Remove(usize),
    Request(usize, Direction, Vec<u64>),
    Cancel(usize),
    Limit(usize, Limits),
    Share(usize, NodeShare),
    Enforce(usize, Enforcement),
    Cap(usize, Option<Limits>),
    /// Time passes; sometimes an instant before the last one is used.
    Pass(u64, u64),
    /// Time advances exactly to the deadline.
    Meet,
}

/// Requests up to this size are never charged in slices under [`any_limits`].
const SMALL: u64 = 8_000;

fn any_step(largest: u64) -> impl Strategy<Value = Step> {
    let node = 0..16usize;
    prop_oneof![
        4 => (node.clone(), any::<bool>(), any_limits(), any_share())
            .prop_map(|(below, group, limits, share)| Step::Add(below, group, limits, share)),
        1 => node.clone().prop_map(Step::Remove),
        30 => (node.clone(), any_direction(), prop_oneof![4 => (0..largest, 1..4usize).prop_map(|(length, count)| vec![length; count]),
                1 => prop::collection::vec(0..largest, 1..4)])
            .prop_map(|(disk, direction, lengths)| Step::Request(disk, direction, lengths)),
        3 => (0..64usize).prop_map(Step::Cancel),
        1 => (node.clone(), any_limits()).prop_map(|(node, limits)| Step::Limit(node, limits)),
        1 => (node.clone(), any_share()).prop_map(|(node, share)| Step::Share(node, share)),
        1 => (node.clone(), any_enforcement()).prop_map(|(node, enforcement)| Step::Enforce(node, enforcement)),
        2 => (node, any_cap()).prop_map(|(node, cap)| Step::Cap(node, cap)),
        4 => (0..200_000_000u64, 0..5_000_000u64).prop_map(|(forward, backward)| Step::Pass(forward, backward)),
        4 => Just(Step::Meet),
    ]
}

/// A set of buckets of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum BucketSet {
    Limits,
    Cap,
}

/// A tree, and its expected state: the waiting requests in order.
struct Checked {
    tree: ThrottleTree<u64>,
    now: Instant,
    groups: Vec<NodeId>,
    disks: Vec<NodeId>,
    tickets: Vec<(QueuedRequestId, u64)>,
    waiting: HashMap<(NodeId, Direction), VecDeque<(u64, RequestCost)>>,
    owner: HashMap<u64, (NodeId, Direction)>,
    next_token: u64,
    completed: u64,
    /// Expected levels of limits and caps; `None` if requests are charged in slices or enforcement
    /// changes.
    levels: Option<HashMap<(NodeId, BucketSet), Levels>>,
}

impl Checked {
    fn new(limits: Limits, exact: bool) -> Self {
        let mut checked = Self {
            tree: ThrottleTree::new(Instant::ZERO),
            now: Instant::ZERO,
            groups: Vec::new(),
            disks: Vec::new(),
            tickets: Vec::new(),
            waiting: HashMap::new(),
            owner: HashMap::new(),
            next_token: 0,
            completed: 0,
            levels: exact.then(HashMap::new),
        };
        checked.add(0, true, limits, NodeShare::default());
        checked
    }

    fn waiting_in_all(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }

    /// A node and its groups.
    fn path(&self, node: NodeId) -> Vec<NodeId> {
        core::iter::successors(Some(node), |node| self.tree.parent(*node)).collect()
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Add(below, group, limits, share) => self.add(*below, *group, *limits, *share),
            Step::Remove(at) => self.remove(*at),
            Step::Request(at, direction, lengths) => self.request(*at, *direction, lengths),
            Step::Cancel(at) => self.cancel(*at),
            Step::Limit(at, limits) => {
                let node = self.node(*at);
                let before = self.tree.limits(node);
                let is_accepted = self.tree.configure(node, *limits, self.tree.share(node), self.now).is_ok();
                assert_eq!(self.tree.limits(node), if is_accepted { *limits } else { before });
                if let Some(levels) = &mut self.levels
                    && is_accepted
                    && *limits != before
                {
                    levels.get_mut(&(node, BucketSet::Limits)).unwrap().change(*limits, self.now);
                }
            }
            Step::Share(at, share) => {
                let node = self.node(*at);
                let before = self.tree.share(node);
                let is_accepted = self.tree.configure(node, self.tree.limits(node), *share, self.now).is_ok();
                assert_eq!(self.tree.share(node), if is_accepted { *share } else { before });
            }
            Step::Enforce(at, enforcement) if self.levels.is_none() => {
                self.tree.enforce(self.node(*at), *enforcement, self.now);
            }
            Step::Enforce(..) => {}
            Step::Cap(at, cap) => self.set_cap(self.node(*at), *cap),
            Step::Pass(ahead, back) => {
                self.poll_all();
                self.now += Duration::from_nanos(*ahead);
                // Workers read the clock before they acquire the lock, so an instant may be older
                // than the last.
                let older = Instant::from_nanos(self.now.as_nanos().saturating_sub(*back));
                self.poll_all();
                self.poll_all_at(older);
            }
            Step::Meet => {
                self.poll_all();
                self.meet_deadline();
            }
        }
        self.poll_all();
    }

    fn set_cap(&mut self, node: NodeId, cap: Option<Limits>) {
        self.tree.set_cap(node, cap, self.now).unwrap();
        assert_eq!(self.tree.cap(node), cap);
        let (Some(levels), now, key) = (&mut self.levels, self.now, (node, BucketSet::Cap)) else { return };
        match cap {
            None => {
                levels.remove(&key);
            }
            Some(limits) => {
                let levels = levels.entry(key).or_insert_with(|| Levels::new(Limits::default(), now));
                levels.change_filled(limits, now);
            }
        }
    }

    /// The buckets that requests of a disk wait for and are charged to.
    fn bucket_sets(&self, disk: NodeId) -> Vec<(NodeId, BucketSet)> {
        let path = self.path(disk).into_iter();
        let sets = path.flat_map(|node| [BucketSet::Limits, BucketSet::Cap].map(|set| (node, set)));
        sets.filter(|set| self.levels.as_ref().is_some_and(|levels| levels.contains_key(set))).collect()
    }

    fn node(&self, at: usize) -> NodeId {
        let all = self.groups.len() + self.disks.len();
        *self.groups.iter().chain(&self.disks).nth(at % all).unwrap()
    }

    fn add(&mut self, below: usize, group: bool, limits: Limits, share: NodeShare) {
        let parent = self.groups.get(below).copied();
        let Ok(node) = self.tree.add(parent, limits, share) else { return };
        if let Some(levels) = &mut self.levels {
            levels.insert((node, BucketSet::Limits), Levels::new(limits, self.now));
        }
        if group {
            self.groups.push(node);
            let at = self.groups.len() - 1;
            self.add(at, false, Limits::default(), NodeShare::default());
        } else {
            self.disks.push(node);
        }
    }

    fn request(&mut self, at: usize, direction: Direction, lengths: &[u64]) {
        if self.disks.is_empty() {
            return;
        }
        let disk = self.disks[at % self.disks.len()];
        let token = self.next_token;
        self.next_token += 1;
        // The naive buckets count operations of equal requests only.
        let cost = RequestCost::merged(if self.levels.is_some() { &lengths[..1] } else { lengths });
        match self.tree.submit(disk, direction, cost.clone(), token, self.now) {
            AdmissionResult::Admitted(admitted) => {
                assert_eq!(admitted, token);
                let queue = self.waiting.get(&(disk, direction));
                assert!(queue.is_none_or(VecDeque::is_empty), "overtook a request before it");
                self.on_admitted(disk, direction, &cost);
            }
            AdmissionResult::Queued(ticket) => {
                self.tickets.push((ticket, token));
                self.owner.insert(token, (disk, direction));
                self.waiting.entry((disk, direction)).or_default().push_back((token, cost));
            }
        }
    }

    fn on_admitted(&mut self, disk: NodeId, direction: Direction, cost: &RequestCost) {
        self.completed += 1;
        let sets = self.bucket_sets(disk);
        if let Some(levels) = &mut self.levels {
            for set in sets {
                let levels = levels.get_mut(&set).unwrap();
                assert!(levels.admit(direction, self.now), "{set:?} has no room");
                levels.charge(direction, cost);
            }
        }
    }

    fn cancel(&mut self, at: usize) {
        if self.tickets.is_empty() {
            return;
        }
        let (ticket, token) = self.tickets.swap_remove(at % self.tickets.len());
        let queue = self.waiting.entry(self.owner[&token]).or_default();
        let position = queue.iter().position(|(waiting, _)| *waiting == token);
        assert_eq!(self.tree.cancel(ticket), position.map(|_| token));
        if let Some(place) = position {
            queue.remove(place);
            self.completed += 1;
        }
    }

    fn remove(&mut self, at: usize) {
        if self.disks.is_empty() {
            return;
        }
        let disk = self.disks.swap_remove(at % self.disks.len());
        let mut expected: Vec<_> = Direction::ALL
            .into_iter()
            .flat_map(|direction| {
                let queue = self.waiting.remove(&(disk, direction)).unwrap_or_default();
                queue.into_iter().map(move |(token, cost)| ReturnedRequest { direction, cost, token })
            })
            .collect();
        // Tokens are numbered in order of arrival, across both directions.
        expected.sort_unstable_by_key(|returned| returned.token);
        let removed = self.tree.remove(disk);
        assert_eq!(removed, expected);
        self.completed += removed.len() as u64;
    }

    /// Polls until nothing more is admitted; returns the deadline if requests wait.
    fn poll_all_at(&mut self, now: Instant) -> Option<Instant> {
        loop {
            match self.tree.poll(now) {
                PollDecision::Admit(token) => {
                    let (disk, direction) = self.owner[&token];
                    let first = self.waiting.get_mut(&(disk, direction)).unwrap().pop_front();
                    let (first, cost) = first.unwrap();
                    assert_eq!(first, token, "not the first of its queue");
                    self.on_admitted(disk, direction, &cost);
                }
                PollDecision::Wait { until } => {
                    // A deadline in the past would make the caller poll in a busy loop.
                    assert!(self.waiting_in_all() > 0 && until > now);
                    self.assert_none_admissible();
                    return Some(until);
                }
                PollDecision::Idle => {
                    assert_eq!(self.waiting_in_all(), 0, "idle while requests wait");
                    return None;
                }
            }
        }
    }

    /// Every waiting request is throttled by some level on its path.
    fn assert_none_admissible(&mut self) {
        let waiting: Vec<_> =
            self.waiting.iter().filter(|(_, queue)| !queue.is_empty()).map(|(key, _)| *key).collect();
        for (disk, direction) in waiting {
            let sets = self.bucket_sets(disk);
            if let Some(levels) = &mut self.levels {
                let is_admissible =
                    sets.iter().all(|set| levels.get_mut(set).unwrap().admit(direction, self.now));
                assert!(!is_admissible, "{disk:?} could {direction:?}");
            }
        }
    }

    fn poll_all(&mut self) -> Option<Instant> {
        self.poll_all_at(self.now)
    }

    /// Nothing is admitted a nanosecond before the deadline; if all requests are small, one is
    /// admitted at it.
    fn meet_deadline(&mut self) -> bool {
        let Some(until) = self.poll_all() else { return false };
        // Both sides of the deadline: it must be neither too late nor too early.
        let (waiting, before) = (self.waiting_in_all(), Instant::from_nanos(until.as_nanos() - 1));
        if before >= self.now {
            self.now = before;
            assert_eq!(self.poll_all(), Some(until), "the deadline moved");
            assert_eq!(self.waiting_in_all(), waiting, "the deadline was too late");
        }
        self.now = until;
        let next = self.poll_all();
        assert!(next.is_none_or(|next| next > until));
        true
    }

    fn assert_waiting_counts(&self) {
        for direction in Direction::ALL {
            let waiting = |node: &NodeId| self.tree.waiting(*node, direction);
            for disk in &self.disks {
                assert_eq!(waiting(disk), self.waiting.get(&(*disk, direction)).map_or(0, VecDeque::len));
            }
            for group in &self.groups {
                assert_eq!(
                    waiting(group),
                    self.tree.children(*group).map(|child| waiting(&child)).sum::<usize>()
                );
            }
        }
    }

    fn run(&mut self, steps: &[Step]) {
        for step in steps {
            self.take(step);
            self.assert_waiting_counts();
        }
        let mut deadlines = 0;
        while self.meet_deadline() {
            deadlines += 1;
            assert!(deadlines < 1_000_000, "it never ends");
        }
        assert_eq!(self.completed, self.next_token);
    }
}

proptest! {
    /// Each level is charged exactly the admitted work; nothing is admitted without capacity at
    /// every level; nothing waits with capacity at every level.
    #[test]
    fn small_requests_are_admitted_exactly_when_every_level_has_capacity(
        limits in any_limits(),
        steps in prop::collection::vec(any_step(SMALL), 1..150),
    ) {
        Checked::new(limits, true).run(&steps);
    }

    #[test]
    fn requests_are_returned_once_and_in_order_despite_changes(
        limits in any_limits(),
        steps in prop::collection::vec(any_step(300_000), 1..150),
    ) {
        Checked::new(limits, false).run(&steps);
    }

    #[test]
    fn admissions_per_second_are_bounded_by_rate_and_burst(
        limits in any_limits(),
        workloads in prop::collection::vec((any_direction(), 0..40_000u64, 1..16u64, 50..5_000u64), 1..6),
        late_ms in 0..10u64,
    ) {
        let mut disks = Timeline::with_limits(limits).with_late_timers(Duration::from_millis(late_ms));
        for (direction, length, depth, latency_us) in &workloads {
            let latency = Duration::from_micros(*latency_us);
            let workload = Workload { direction: *direction, ..Workload::READS };
            disks.add(workload.with_length(*length).depth(*depth).latency(latency));
        }
        disks.run_until(crate::timeline::s(6));
        // A window of one second may contain one request that overran the bucket at its beginning.
        let largest = workloads.iter().map(|(_, length, ..)| *length).max().unwrap_or(0);
        for kind in LimitKind::ALL.into_iter().filter(|kind| limits.limit(*kind).rate > 0) {
            let applies = |direction| LimitKind::applying_to(direction).contains(&kind);
            let peak = disks.peak_per_second(|direction, bytes| match (applies(direction), kind.counts_bytes()) {
                (false, _) => 0,
                (true, true) => bytes,
                (true, false) => 1,
            });
            let one_over = if kind.counts_bytes() { largest } else { 1 };
            prop_assert!(peak <= allowance(&limits, kind) + one_over, "{:?}: {} in a second", kind, peak);
        }
    }
}

/// Units that may be admitted in a second, besides the one request that overruns the bucket.
fn allowance(limits: &Limits, kind: LimitKind) -> u64 {
    let limit = limits.limit(kind);
    let size =
        if limit.burst_rate == 0 { limit.rate.div_ceil(10) } else { limit.burst_rate * limit.burst_length_s };
    let sustained_units = limit.rate + size;
    if limit.burst_length_s > 1 {
        // The second bucket bounds the rate within a long burst.
        sustained_units.min(limit.burst_rate + limit.burst_rate.div_ceil(10))
    } else {
        sustained_units
    }
}
