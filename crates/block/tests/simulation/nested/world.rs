//! A forest of groups and disks, the settings made in it, and possible next changes.
//!
//! Keeps its own record of every setting and predicts which changes are rejected: a reservation
//! that does not fit somewhere above it, and invalid limits. A change whose result differs from the
//! prediction is a failure.

use std::{cell::RefCell, sync::Arc};

use block::layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup, ThrottleMember};
use policy::throttle::{
    Enforcement, LimitKind, LimitScale, Limits, NodeShare, RateLimit, ThrottleError, ThrottleStats,
};
use reactor::sim;

use super::{
    EventTotals, SharedLog,
    check::{Change, Log},
};
use crate::client::chance;

/// A group or a disk.
enum Handle {
    Group(Arc<ThrottleGroup>),
    Disk(Box<ThrottleMember>),
}

/// Recorded settings of a node. Groups come first, each after its parent.
#[derive(Clone, Copy)]
struct Node {
    parent: Option<usize>,
    limits: Limits,
    share: NodeShare,
}

pub(super) struct World {
    handles: Vec<Handle>,
    groups: usize,
    nodes: RefCell<Vec<Node>>,
    /// True if no request is larger than a slice.
    pub(super) exact: bool,
    pub(super) log: SharedLog,
    pub(super) totals: RefCell<EventTotals>,
}

impl World {
    /// Draws nested groups, up to four levels, and some disks in and beside them.
    pub(super) fn draw(exact: bool) -> Self {
        let groups = sim::random(|random| random.usize(0..=5));
        let disks = sim::random(|random| random.usize(1..=6));
        let (mut nodes, mut handles): (Vec<Node>, Vec<Handle>) = (Vec::new(), Vec::new());
        let mut log = Log::default();
        for at in 0..groups + disks {
            // A parent among the groups drawn so far, or none.
            let candidate = sim::random(|random| random.usize(..=at.min(groups)));
            let depth = |node| std::iter::successors(Some(node), |node: &usize| nodes[*node].parent).count();
            let parent =
                (candidate < at.min(groups) && (at >= groups || depth(candidate) < 4)).then_some(candidate);
            let node = Node { parent, limits: draw_limits(exact), share: NodeShare::default() };
            let group = parent.map(|parent| group_of(&handles, parent));
            let (limits, share) = (node.limits, node.share);
            handles.push(if at < groups {
                let settings = GroupSettings { limits, share, ..GroupSettings::default() };
                Handle::Group(ThrottleGroup::new("group", settings, group).expect("drawn valid"))
            } else {
                let settings = DiskSettings { limits, share, ..DiskSettings::default() };
                Handle::Disk(Box::new(ThrottleMember::new(settings, 0, group).expect("drawn valid")))
            });
            log.add(parent, limits, at >= groups);
            nodes.push(node);
        }
        Self {
            handles,
            groups,
            nodes: RefCell::new(nodes),
            exact,
            log: SharedLog::new(log),
            totals: RefCell::default(),
        }
    }

    pub(super) fn disks(&self) -> usize {
        self.handles.len() - self.groups
    }

    pub(super) fn member(&self, disk: usize) -> &ThrottleMember {
        match &self.handles[self.groups + disk] {
            Handle::Disk(member) => member,
            Handle::Group(_) => unreachable!("groups come first"),
        }
    }

    /// True if no limit applies to a disk.
    pub(super) fn is_unlimited(&self, disk: usize) -> bool {
        let nodes = self.nodes.borrow();
        path(&nodes, self.groups + disk).all(|node| nodes[node].limits.is_unlimited())
    }

    /// Number of throttled requests, from the disks' own statistics.
    pub(super) fn throttled(&self) -> u64 {
        let stats = (self.groups..self.handles.len()).map(|disk| self.stats(disk));
        stats.map(|stats| stats.reads.throttled + stats.writes.throttled).sum()
    }

    /// Checks that waiting requests are counted at every level, and that each waits for a full
    /// bucket.
    pub(super) fn observe(&self) {
        let nodes = self.nodes.borrow();
        let stats: Vec<_> = (0..nodes.len()).map(|node| self.stats(node)).collect();
        let mut waiting = vec![[0; 2]; nodes.len()];
        for (disk, direction) in self.log.borrow().waiting() {
            path(&nodes, self.groups + disk).for_each(|node| waiting[node][direction.index()] += 1);
            let full = path(&nodes, self.groups + disk).any(|node| {
                let full = |kind: LimitKind| stats[node].tokens[kind.index()] == Some(0);
                self.enforcement(node) != Enforcement::Lifted
                    && LimitKind::applying_to(direction).into_iter().any(full)
            });
            assert!(full, "{direction:?}s of disk {disk} wait, though every bucket on the way has room");
        }
        let counted: Vec<_> = stats.iter().map(|stats| stats.waiting).collect();
        assert_eq!(counted, waiting, "by node and direction, what waits");
    }

    /// Changes a setting, moves a disk, or changes the enforcement of limits.
    pub(super) fn change(&self) {
        let node = sim::random(|random| random.usize(..self.handles.len()));
        match sim::random(|random| random.u8(..6)) {
            0 | 1 => self.set(node),
            2 => self.enforce(node),
            _ => self.move_disk(sim::random(|random| random.usize(..self.disks()))),
        }
    }

    fn set(&self, at: usize) {
        let before = self.nodes.borrow()[at];
        let after = self.draw_settings(before);
        self.attempt(at, after, &limits_changed(before, after), || match &self.handles[at] {
            Handle::Group(group) => {
                group.set(GroupSettings { limits: after.limits, share: after.share, ..group.settings() })
            }
            Handle::Disk(disk) => {
                disk.set(DiskSettings { limits: after.limits, share: after.share, ..disk.settings() })
            }
        });
    }

    /// Draws other limits or another share, or both; some are invalid.
    fn draw_settings(&self, mut node: Node) -> Node {
        if chance(60) {
            node.limits = draw_limits(self.exact);
        }
        if chance(10) {
            // A total together with one of its parts is invalid.
            node.limits.limit_mut(LimitKind::IopsTotal).rate = 1000;
            node.limits.limit_mut(LimitKind::IopsRead).rate = 1000;
        }
        if chance(60) {
            node.share = draw_share();
        }
        node
    }

    /// Moves a disk to another group, sometimes with other settings.
    fn move_disk(&self, disk: usize) {
        let at = self.groups + disk;
        let parent = sim::random(|random| random.usize(..=self.groups));
        let parent = (parent < self.groups).then_some(parent);
        let before = self.nodes.borrow()[at];
        let group = parent.map(|parent| group_of(&self.handles, parent));
        // A move to its own group changes nothing.
        let changes_parent = parent != before.parent;
        let waits = changes_parent && self.stats(at).waiting != [0; 2];
        let mut changes: Vec<_> = changes_parent.then_some(Change::Moved(parent)).into_iter().collect();
        let member = self.member(disk);
        let is_accepted = if chance(50) {
            let after = Node { parent, ..self.draw_settings(before) };
            changes.extend(limits_changed(before, after));
            let settings = DiskSettings { limits: after.limits, share: after.share, ..member.settings() };
            self.attempt(at, after, &changes, || member.configure_and_move(settings, group))
        } else {
            self.attempt(at, Node { parent, ..before }, &changes, || member.move_to(group))
        };
        if is_accepted && waits {
            self.totals.borrow_mut().moved_waiting += 1;
        }
    }

    /// Makes a change that must succeed exactly if it is valid and fits; a rejected one must change
    /// nothing.
    fn attempt(
        &self,
        at: usize,
        after: Node,
        changes: &[Change],
        make: impl FnOnce() -> Result<(), ThrottleError>,
    ) -> bool {
        let before = self.nodes.borrow()[at];
        // Changed in the record first, to predict the result.
        self.nodes.borrow_mut()[at] = after;
        let fits = after.limits.validate().is_ok() && reservations_fit(&self.nodes.borrow());
        if !fits {
            self.nodes.borrow_mut()[at] = before;
        }
        let all = || (0..self.handles.len()).map(|node| self.stats(node)).collect::<Vec<_>>();
        let stats = all();
        if fits {
            // Logged before the change, which may admit requests.
            changes.iter().for_each(|change| self.log.borrow_mut().changed(at, *change));
        }
        let result = make();
        assert_eq!(result.is_ok(), fits, "a change of node {at}: {result:?}");
        self.check_settings();
        let mut totals = self.totals.borrow_mut();
        if fits {
            totals.changed += 1;
        } else {
            assert_eq!(all(), stats, "a rejected change changes nothing");
            totals.refused += 1;
        }
        fits
    }

    fn enforce(&self, at: usize) {
        let enforcement = match sim::random(|random| random.u8(..3)) {
            0 => Enforcement::Enforced,
            1 => Enforcement::Lifted,
            _ => Enforcement::Scaled(LimitScale::from_thousandths(sim::random(|random| {
                random.u64(1000..10_000)
            }))),
        };
        self.log.borrow_mut().changed(at, Change::Enforced(enforcement));
        match &self.handles[at] {
            Handle::Group(group) => group.enforce(enforcement),
            Handle::Disk(disk) => disk.enforce(enforcement),
        }
        assert_eq!(self.enforcement(at), enforcement);
    }

    /// Lifts all limits.
    pub(super) fn lift(&self) {
        self.log.borrow_mut().lifted();
        for handle in &self.handles {
            match handle {
                Handle::Group(group) => group.lift_limits(),
                Handle::Disk(disk) => disk.lift_limits(),
            }
        }
    }

    /// Checks that all settings are those that were made.
    fn check_settings(&self) {
        for (handle, node) in self.handles.iter().zip(&*self.nodes.borrow()) {
            let (limits, share, parent) = match handle {
                Handle::Group(group) => {
                    (group.settings().limits, group.settings().share, group.parent().cloned())
                }
                Handle::Disk(disk) => (disk.settings().limits, disk.settings().share, disk.group()),
            };
            assert_eq!((limits, share), (node.limits, node.share));
            let is_parent = match (&parent, node.parent) {
                (Some(parent), Some(at)) => Arc::ptr_eq(parent, group_of(&self.handles, at)),
                (None, None) => true,
                _ => false,
            };
            assert!(is_parent, "in another group than it was put in");
        }
    }

    /// Final checks, after all requests have ended.
    pub(super) fn check_end(&self) {
        self.check_settings();
        let log = self.log.borrow();
        let stats: Vec<_> = (0..self.handles.len()).map(|node| self.stats(node)).collect();
        log.check(self.exact, &stats);
    }

    fn stats(&self, at: usize) -> ThrottleStats {
        match &self.handles[at] {
            Handle::Group(group) => group.stats(),
            Handle::Disk(disk) => disk.stats(),
        }
    }

    fn enforcement(&self, at: usize) -> Enforcement {
        match &self.handles[at] {
            Handle::Group(group) => group.enforcement(),
            Handle::Disk(disk) => disk.enforcement(),
        }
    }
}

fn group_of(handles: &[Handle], at: usize) -> &Arc<ThrottleGroup> {
    match &handles[at] {
        Handle::Group(group) => group,
        Handle::Disk(_) => unreachable!("disks contain nothing"),
    }
}

/// Effect of new settings on the buckets: unchanged limits keep their charges.
fn limits_changed(before: Node, after: Node) -> Vec<Change> {
    if after.limits == before.limits { Vec::new() } else { vec![Change::Limits(after.limits)] }
}

/// A node and all nodes above it.
fn path(nodes: &[Node], from: usize) -> impl Iterator<Item = usize> + '_ {
    std::iter::successors(Some(from), |node| nodes[*node].parent)
}

/// True if all reservations, of each node and below it, are within its limits.
fn reservations_fit(nodes: &[Node]) -> bool {
    let mut below = vec![[0; 2]; nodes.len()];
    // In reverse, children precede their parents, so sums below a node are complete.
    for (at, node) in nodes.iter().enumerate().rev() {
        let reserved = [node.share.iops_reservation(), node.share.bps_reservation()];
        let kinds = [
            [LimitKind::IopsTotal, LimitKind::IopsRead, LimitKind::IopsWrite],
            [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite],
        ];
        for unit in 0..2 {
            let demand: u64 = reserved[unit].max(below[at][unit]);
            let [total, read, write] = kinds[unit].map(|kind| node.limits.limit(kind).rate);
            // Separate limits bound a reservation only if both directions have one.
            let sum = if read > 0 && write > 0 { read + write } else { u64::MAX };
            if demand > if total > 0 { total } else { sum } {
                return false;
            }
            if let Some(parent) = node.parent {
                below[parent][unit] += demand;
            }
        }
    }
    true
}

/// Draws any valid combination of the six limits, or none.
fn draw_limits(exact: bool) -> Limits {
    let mut limits = Limits::default();
    let mut draw = |kind: LimitKind, min_rate: f64| {
        if !chance(40) {
            return;
        }
        *limits.limit_mut(kind) = sim::random(|random| {
            let rate = (min_rate * 10_f64.powf(2.5 * random.f64())) as u64;
            let burst_rate = if random.bool() { 0 } else { rate * random.u64(1..8) };
            let burst_length_s = if burst_rate == 0 { 1 } else { random.u64(1..5) };
            RateLimit { rate, burst_rate, burst_length_s, ..RateLimit::NONE }
        });
    };
    // The largest exact request is at most a slice of 90 ms.
    let (least_iops, least_bps) = if exact { (45.0, 560_000.0) } else { (5.0, 50_000.0) };
    if chance(50) {
        draw(LimitKind::IopsTotal, least_iops);
    } else {
        draw(LimitKind::IopsRead, least_iops);
        draw(LimitKind::IopsWrite, least_iops);
    }
    if chance(50) {
        draw(LimitKind::BpsTotal, least_bps);
    } else {
        draw(LimitKind::BpsRead, least_bps);
        draw(LimitKind::BpsWrite, least_bps);
    }
    let limits_operations =
        LimitKind::ALL.iter().any(|kind| !kind.counts_bytes() && limits.limit(*kind).rate > 0);
    if !exact && limits_operations && chance(30) {
        limits.iops_size = 4096;
    }
    limits
}

fn draw_share() -> NodeShare {
    let draw_reservation =
        |largest: f64| if chance(40) { sim::random(|random| largest.powf(random.f64()) as u64) } else { 0 };
    let share = NodeShare::new(sim::random(|random| random.u32(NodeShare::WEIGHTS))).expect("in range");
    share.with_reservation(draw_reservation(1000.0), draw_reservation(10_000_000.0))
}
