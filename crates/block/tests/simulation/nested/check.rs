//! Log of the events in a forest, and the properties that they must have.
//!
//! - Each request ends once. Requests of one disk and direction are admitted in order.
//! - With small requests, every bucket on the path is modelled: an admitted request finds room in
//!   all of them, and while a request waits, one of them is full.
//! - With any size: in any second no node admits more than its limits allow, their burst, and
//!   prepaid slices of large requests.
//! - The counters of every level equal the admitted requests.

use std::collections::BTreeMap;

use policy::{
    request::Direction,
    throttle::{Enforcement, LimitKind, Limits, ThrottleStats},
    time::{Duration, Instant},
};
use reactor::now;

use crate::bucket::{Buckets, Charge, SLACK_S};

/// Change of a node.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "few values, in a test")]
pub(super) enum Change {
    Limits(Limits),
    Enforced(Enforcement),
    Moved(Option<usize>),
}

#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "it is copied, and a simulation has few")]
pub(super) enum Event {
    Asked,
    Passed,
    GaveUp,
    Changed(usize, Change),
    /// All limits are lifted permanently.
    Lifted,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) at: Instant,
    event: Event,
    /// Number of the request, unless the event is a change.
    request: usize,
}

#[derive(Clone, Copy, Debug)]
struct Request {
    disk: usize,
    charge: Charge,
    /// True if no limit applied when it was made, so that it is not counted.
    free: bool,
    has_ended: bool,
}

#[derive(Default)]
pub(super) struct Log {
    pub(super) entries: Vec<Entry>,
    requests: Vec<Request>,
    /// Initial parent and limits of every node, groups first.
    began: Vec<(Option<usize>, Limits)>,
    groups: usize,
    is_lifted: bool,
}

impl Log {
    /// Adds a group, or after all groups a disk.
    pub(super) fn add(&mut self, parent: Option<usize>, limits: Limits, is_disk: bool) {
        self.began.push((parent, limits));
        self.groups += usize::from(!is_disk);
    }

    fn push(&mut self, request: usize, event: Event) {
        self.entries.push(Entry { at: now(), event, request });
    }

    pub(super) fn requested(&mut self, disk: usize, charge: Charge, unlimited: bool) -> usize {
        let free = unlimited || self.is_lifted;
        self.requests.push(Request { disk, charge, free, has_ended: false });
        let request = self.requests.len() - 1;
        self.push(request, Event::Asked);
        request
    }

    pub(super) fn ended(&mut self, request: usize, passed: bool) {
        let had_ended = std::mem::replace(&mut self.requests[request].has_ended, true);
        assert!(!had_ended, "a request ended twice");
        self.push(request, if passed { Event::Passed } else { Event::GaveUp });
    }

    pub(super) fn changed(&mut self, node: usize, change: Change) {
        self.push(usize::MAX, Event::Changed(node, change));
    }

    pub(super) fn lifted(&mut self) {
        self.is_lifted = true;
        self.push(usize::MAX, Event::Lifted);
    }

    /// Disk and direction of each waiting request.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (usize, Direction)> + '_ {
        let waiting = self.requests.iter().filter(|request| !request.has_ended);
        waiting.map(|request| (request.disk, request.charge.direction))
    }

    /// Panics if a property is violated. `stats` are the final statistics of the nodes.
    pub(super) fn check(&self, exact: bool, stats: &[ThrottleStats]) {
        assert!(
            self.requests.iter().all(|request| request.has_ended),
            "a request neither passed nor was given back"
        );
        self.check_order();
        let mut tree = NaiveTree::new(self);
        let mut windows: Vec<Window> = self.began.iter().map(|(_, limits)| Window::new(*limits)).collect();
        let mut counted = vec![[[0_u64; 2]; 2]; self.began.len()];
        for instant in self.entries.chunk_by(|one, next| one.at == next.at) {
            if exact {
                // Before the events of this instant are applied.
                tree.check_not_late(instant[0].at);
            }
            for entry in instant {
                if let Event::Changed(node, change) = entry.event {
                    windows[node].change(change);
                } else if matches!(entry.event, Event::Lifted) {
                    windows
                        .iter_mut()
                        .for_each(|window| window.change(Change::Enforced(Enforcement::Lifted)));
                } else if matches!(entry.event, Event::Passed) {
                    let request = self.requests[entry.request];
                    let direction = request.charge.direction.index();
                    for node in tree.path(self.groups + request.disk) {
                        windows[node].pass(entry.at, request.disk, &request.charge);
                        if !request.free {
                            counted[node][direction][0] += request.charge.operations as u64;
                            counted[node][direction][1] += request.charge.bytes as u64;
                        }
                    }
                }
                tree.take(entry, self);
            }
            tree.settle(exact);
        }
        windows.iter().for_each(Window::check);
        let counters = |stats: &ThrottleStats| {
            [stats.reads, stats.writes].map(|counters| [counters.requests, counters.bytes])
        };
        assert_eq!(stats.iter().map(counters).collect::<Vec<_>>(), counted, "counters of all nodes");
        assert!(stats.iter().all(|stats| stats.waiting == [0; 2]), "something waits when all is over");
    }

    /// Checks the order of admission; requests are numbered in order of arrival. Tasks that are
    /// admitted at the same instant may run in any order.
    fn check_order(&self) {
        let mut highest = BTreeMap::new();
        for instant in self.entries.chunk_by(|one, next| one.at == next.at) {
            // Compared with earlier instants only: within one instant any order is valid.
            let mut now_highest = highest.clone();
            for entry in instant.iter().filter(|entry| matches!(entry.event, Event::Passed)) {
                let request = self.requests[entry.request];
                let queue = (request.disk, request.charge.direction.index());
                let before = highest.get(&queue);
                assert!(
                    before.is_none_or(|before| *before < entry.request),
                    "{entry:?} passed after {before:?}"
                );
                let latest = now_highest.entry(queue).or_insert(entry.request);
                *latest = entry.request.max(*latest);
            }
            highest = now_highest;
        }
    }
}

/// Naive model of every node's buckets.
struct NaiveTree {
    nodes: Vec<NaiveNode>,
    groups: usize,
    /// Number of waiting requests, by disk and direction.
    waiting: Vec<[usize; 2]>,
    /// Maximum overfill of the buckets that a disk has left.
    over: Vec<f64>,
    now: Instant,
}

struct NaiveNode {
    parent: Option<usize>,
    limits: Limits,
    buckets: Buckets,
    enforcement: Enforcement,
    /// Charges of this instant.
    charges: Vec<Charge>,
}

impl NaiveTree {
    fn new(log: &Log) -> Self {
        let node = |(parent, limits): &(Option<usize>, Limits)| NaiveNode {
            parent: *parent,
            limits: *limits,
            buckets: Buckets::new(limits, Instant::ZERO),
            enforcement: Enforcement::Enforced,
            charges: Vec::new(),
        };
        Self {
            nodes: log.began.iter().map(node).collect(),
            groups: log.groups,
            waiting: vec![[0; 2]; log.began.len() - log.groups],
            over: vec![0.0; 2 * LimitKind::ALL.len()],
            now: Instant::ZERO,
        }
    }

    fn path(&self, from: usize) -> Vec<usize> {
        std::iter::successors(Some(from), |node| self.nodes[*node].parent).collect()
    }

    /// Checks that every waiting request had a full bucket on its path until now, since the last
    /// event.
    fn check_not_late(&mut self, at: Instant) {
        let waited_s = (at - self.now).as_secs_f64();
        for (disk, waiting) in self.waiting.iter().enumerate() {
            for direction in Direction::ALL.into_iter().filter(|direction| waiting[direction.index()] > 0) {
                let path = self.path(self.groups + disk);
                let enforced = path
                    .iter()
                    .map(|node| &self.nodes[*node])
                    .filter(|node| node.enforcement != Enforcement::Lifted);
                let wait_s = enforced.map(|node| node.buckets.wait_s(direction)).fold(0.0, f64::max);
                assert!(
                    waited_s <= wait_s + SLACK_S,
                    "{direction:?}s of disk {disk} waited from {:?} to {at:?}, though there was \
                     room after {wait_s} s",
                    self.now
                );
            }
        }
        self.nodes.iter_mut().for_each(|node| node.buckets.leak_to(at));
        self.now = at;
    }

    /// Moves the charges of a disk. Its part of a group's bucket is not modelled, so the new
    /// group's may be full afterwards.
    fn move_node(&mut self, disk: usize, to: Option<usize>) {
        let before = self.path(disk);
        for node in &before[1..] {
            for (max, over) in self.over.iter_mut().zip(self.nodes[*node].buckets.over()) {
                *max = max.max(over);
            }
        }
        let after = to.map_or(Vec::new(), |to| self.path(to));
        for node in after.into_iter().filter(|node| !before.contains(node)) {
            self.nodes[node].buckets.joined(&self.over);
        }
    }

    fn take(&mut self, entry: &Entry, log: &Log) {
        if let Event::Changed(disk, Change::Moved(parent)) = entry.event {
            self.move_node(disk, parent);
        }
        match entry.event {
            Event::Changed(at, change) => {
                let node = &mut self.nodes[at];
                match change {
                    Change::Limits(limits) => {
                        node.limits = limits;
                        node.charges.clear();
                        node.buckets.change(&limits);
                    }
                    Change::Enforced(enforcement) => {
                        node.enforcement = enforcement;
                        node.buckets.enforce(enforcement);
                    }
                    Change::Moved(parent) => {
                        // The new node takes over the charges, and is enforced until the next
                        // change of enforcement.
                        node.parent = parent;
                        node.enforcement = Enforcement::Enforced;
                        node.buckets.enforce(Enforcement::Enforced);
                        node.charges.clear();
                    }
                }
            }
            Event::Lifted => self.nodes.iter_mut().for_each(|node| node.enforcement = Enforcement::Lifted),
            Event::Asked => *self.waits(entry, log) += 1,
            Event::GaveUp => *self.waits(entry, log) -= 1,
            Event::Passed => {
                *self.waits(entry, log) -= 1;
                let request = log.requests[entry.request];
                for node in self.path(self.groups + request.disk) {
                    if self.nodes[node].enforcement != Enforcement::Lifted {
                        self.nodes[node].charges.push(request.charge);
                    }
                }
            }
        }
    }

    fn waits(&mut self, entry: &Entry, log: &Log) -> &mut usize {
        let request = log.requests[entry.request];
        &mut self.waiting[request.disk][request.charge.direction.index()]
    }

    /// Checks that the charges of this instant fit, in some order.
    fn settle(&mut self, exact: bool) {
        for node in &mut self.nodes {
            let charges = std::mem::take(&mut node.charges);
            if exact {
                node.buckets.charge(&charges);
            }
        }
    }
}

/// Charges of a node while its limits and their enforcement were constant.
struct Window {
    limits: Limits,
    enforcement: Enforcement,
    passed: Vec<(Instant, usize, Charge)>,
}

impl Window {
    fn new(limits: Limits) -> Self {
        Self { limits, enforcement: Enforcement::Enforced, passed: Vec::new() }
    }

    fn pass(&mut self, at: Instant, disk: usize, charge: &Charge) {
        self.passed.push((at, disk, *charge));
    }

    fn change(&mut self, change: Change) {
        self.check();
        self.passed.clear();
        match change {
            Change::Limits(limits) => self.limits = limits,
            Change::Enforced(enforcement) => self.enforcement = enforcement,
            Change::Moved(_) => self.enforcement = Enforcement::Enforced,
        }
    }

    fn check(&self) {
        let factor = match self.enforcement {
            Enforcement::Enforced => 1.0,
            Enforcement::Scaled(scale) => scale.thousandths() as f64 / 1000.0,
            Enforcement::Lifted => return,
        };
        for kind in LimitKind::ALL.into_iter().filter(|kind| self.limits.limit(*kind).rate > 0) {
            let limit = self.limits.limit(kind);
            let [rate, burst_rate, length] =
                [limit.rate, limit.burst_rate, limit.burst_length_s].map(|value| value as f64);
            // Without a burst rate the bucket holds a tenth of a second's worth.
            let mut max_units = rate + if burst_rate == 0.0 { rate / 10.0 } else { burst_rate * length };
            // The second bucket bounds a second to the burst rate and a tenth of it.
            if length > 1.0 {
                max_units = max_units.min(burst_rate * 1.1);
            }
            self.check_kind(kind, max_units * factor);
        }
    }

    /// Checks any second: at most `max_units`, the request that overfills the bucket, and prepaid
    /// slices of large requests.
    fn check_kind(&self, kind: LimitKind, max_units: f64) {
        let mut largest = BTreeMap::new();
        let mut passed = Vec::new();
        for (at, disk, charge) in &self.passed {
            if LimitKind::applying_to(charge.direction).contains(&kind) {
                let units = self.units(kind, charge);
                let queue_max = largest.entry((disk, charge.direction.index())).or_insert(0.0_f64);
                *queue_max = queue_max.max(units);
                passed.push((*at, units));
            }
        }
        let over = largest.values().copied().fold(0.0, f64::max);
        let paid_before: f64 = largest.values().sum();
        let (mut first, mut sum) = (0, 0.0);
        for (at, units) in &passed {
            sum += units;
            // Slides the window of one second.
            while passed[first].0 + Duration::from_secs(1) < *at {
                sum -= passed[first].1;
                first += 1;
            }
            assert!(
                sum <= (max_units + over + paid_before) * (1.0 + 1e-9),
                "{kind:?}: {sum} passed in the second before {at:?}; {max_units}, {over} and {paid_before} may"
            );
        }
    }

    fn units(&self, kind: LimitKind, charge: &Charge) -> f64 {
        if kind.counts_bytes() {
            charge.bytes
        } else if self.limits.iops_size > 0 && charge.operations == 1.0 {
            (charge.bytes / self.limits.iops_size as f64).max(1.0)
        } else {
            charge.operations
        }
    }
}
