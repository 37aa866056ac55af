//! Shares in trees of groups under saturation, compared with shares computed analytically.
//!
//! One limit on top; below it groups and disks of different weights, some with reservations;
//! requests of half a kilobyte or of several slices, in both directions.
//!
//! - Each disk receives, within a few percent, its share of the limit distributed down the tree by
//!   weight ([`Node::check_shares`]): at most its limits and those of its groups, and at least its
//!   reservation.
//! - So equal disks receive the same, and every reservation is met.
//! - Neither reads nor writes of a disk wait for ever behind the other direction.

use std::{cell::Cell, rc::Rc, sync::Arc};

use block::layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup, ThrottleMember};
use policy::{
    request::Direction,
    throttle::{LimitKind, Limits, NodeShare, RateLimit, RequestCost},
    time::{Duration, Instant},
};
use reactor::{now, sim, sleep_until, spawn};

use crate::{client::chance, seeds};

/// At the beginning requests consume the bucket's burst capacity, which is not divided by shares.
const WARM_UP_S: u64 = 5;
const MEASURED_S: u64 = 60;

/// Precision of the scheduler's tags, in seconds of the limit's rate: a slice, and the service that
/// a disk may catch up.
const GRAIN_S: f64 = 0.25;
const SLICE_S: f64 = 0.09;

/// Part of the rate that is distributed by weight even if everything is reserved: a hundredth,
/// rounded up to whole requests. The largest value that 10,000 seeds needed is 0.01247.
const BY_WEIGHT: f64 = 0.013;

#[test]
fn trees_share_by_weight_and_meet_reservations() {
    seeds::for_each("--test simulation", 100, |seed| {
        sim::run(seed, run());
    });
}

/// A group or a disk, in the analytical model.
struct Node {
    limit: f64,
    reservation: f64,
    weight: f64,
    children: Vec<Node>,
    disk: Option<Rc<Disk>>,
}

/// A disk, and the results of its requests.
struct Disk {
    member: ThrottleMember,
    length: u64,
    /// Units of the limit that a request is charged.
    units: f64,
    admitted_units: Cell<f64>,
    longest_wait: [Cell<Duration>; 2],
    wait_since: [Cell<Instant>; 2],
    tasks: [usize; 2],
}

async fn run() {
    let kind = if chance(50) { LimitKind::IopsTotal } else { LimitKind::BpsTotal };
    let rate = sim::random(|random| random.u64(50..200)) * if kind.counts_bytes() { 10_000 } else { 1 };
    let group =
        ThrottleGroup::new("top", settings(kind, rate, NodeShare::default()), None).expect("drawn valid");
    let mut reservable = (rate as f64 * 0.2).floor();
    let top = Node {
        limit: rate as f64,
        reservation: 0.0,
        weight: 100.0,
        children: draw_children(&group, kind, rate as f64, 1, &mut reservable),
        disk: None,
    };
    let mut disks = Vec::new();
    top.collect(&mut disks);
    for disk in &disks {
        start(disk);
    }
    sleep_until(Instant::ZERO + Duration::from_secs(WARM_UP_S)).await;
    // Discards the warm-up.
    disks.iter().for_each(|disk| disk.admitted_units.set(0.0));
    sleep_until(Instant::ZERO + Duration::from_secs(WARM_UP_S + MEASURED_S)).await;
    top.check_shares(rate as f64, rate as f64, 0.0, rate as f64, &format!("{kind:?} {rate}"));
}

fn settings(kind: LimitKind, rate: u64, share: NodeShare) -> GroupSettings {
    GroupSettings { limits: limits(kind, rate), share, ..GroupSettings::default() }
}

fn limits(kind: LimitKind, rate: u64) -> Limits {
    let mut limits = Limits::default();
    *limits.limit_mut(kind) = RateLimit { rate, ..RateLimit::NONE };
    limits
}

/// Draws two to four groups or disks below a group; `reservable` is the rate that can still be
/// reserved.
fn draw_children(
    parent: &Arc<ThrottleGroup>,
    kind: LimitKind,
    rate: f64,
    level: usize,
    reservable: &mut f64,
) -> Vec<Node> {
    let count = sim::random(|random| random.usize(2..=4));
    (0..count)
        .map(|_| {
            let is_group = level < 3 && chance(30);
            let bound = reservable.floor();
            // A group's own reservation covers those of its disks, and more.
            let reservation = if !is_group && chance(30) { (bound * 0.5).floor() } else { 0.0 };
            *reservable -= reservation;
            let weight = sim::random(|random| [50, 100, 100, 200, 400][random.usize(..5)]);
            let reserved = reservation as u64;
            let share = NodeShare::new(weight).expect("in range");
            let share = if kind.counts_bytes() {
                share.with_reservation(0, reserved)
            } else {
                share.with_reservation(reserved, 0)
            };
            let limits = Limits::default();
            let mut node = Node {
                limit: f64::INFINITY,
                reservation,
                weight: f64::from(weight),
                children: Vec::new(),
                disk: None,
            };
            if is_group {
                let settings = GroupSettings { limits, share, ..GroupSettings::default() };
                let group = ThrottleGroup::new("group", settings, Some(parent)).expect("it fits");
                let mut below = bound.min(*reservable);
                let before = below;
                node.children = draw_children(&group, kind, rate, level + 1, &mut below);
                *reservable -= before - below;
                // Within its group, a disk's reservation counts only as far as the group has one
                // among its siblings.
                node.reservation = node.reserved_rate();
                let reserved = node.reservation as u64;
                let share = if kind.counts_bytes() {
                    share.with_reservation(0, reserved)
                } else {
                    share.with_reservation(reserved, 0)
                };
                group.set(GroupSettings { share, ..settings }).expect("it is booked already");
            } else {
                let settings = DiskSettings { limits, share, ..DiskSettings::default() };
                let member = ThrottleMember::new(settings, 0, Some(parent)).expect("it fits");
                node.disk = Some(Rc::new(Disk::draw(member, kind, rate)));
            }
            node
        })
        .collect()
}

impl Disk {
    fn draw(member: ThrottleMember, kind: LimitKind, rate: f64) -> Self {
        let length = sim::random(|random| match random.u8(..3) {
            0 => 16_384,
            1 => random.u64(8_192..65_536),
            // A few slices.
            _ => (rate * 0.4 * random.f64()) as u64 + 65_536,
        });
        let units = if kind.counts_bytes() { length as f64 } else { 1.0 };
        // Enough in each direction that one always waits.
        let tasks = if chance(50) {
            [3, 3]
        } else if chance(50) {
            [4, 0]
        } else {
            [0, 4]
        };
        Self {
            member,
            length,
            units,
            admitted_units: Cell::new(0.0),
            longest_wait: Default::default(),
            wait_since: [Cell::new(Instant::ZERO), Cell::new(Instant::ZERO)],
            tasks,
        }
    }
}

fn start(disk: &Rc<Disk>) {
    for direction in Direction::ALL {
        for _ in 0..disk.tasks[direction.index()] {
            spawn(submit_forever(Rc::clone(disk), direction));
        }
    }
}

async fn submit_forever(disk: Rc<Disk>, direction: Direction) {
    let (longest, since) = (&disk.longest_wait[direction.index()], &disk.wait_since[direction.index()]);
    loop {
        disk.member.admit(direction, RequestCost::one(disk.length)).await;
        disk.admitted_units.set(disk.admitted_units.get() + disk.units);
        longest.set(longest.get().max(now() - since.replace(now())));
    }
}

impl Node {
    fn collect(&self, disks: &mut Vec<Rc<Disk>>) {
        disks.extend(self.disk.clone());
        self.children.iter().for_each(|child| child.collect(disks));
    }

    /// Maximum rate.
    fn max_rate(&self) -> f64 {
        let below =
            if self.disk.is_some() { f64::INFINITY } else { self.children.iter().map(Self::max_rate).sum() };
        self.limit.min(below)
    }

    /// Reservation of the node, or the sum below it.
    fn reserved_rate(&self) -> f64 {
        self.reservation.max(self.children.iter().map(Self::reserved_rate).sum())
    }

    /// Distributes `rate` to this node's children, and checks the results of its disks. `grain` is
    /// the rate of the limit on top; `path` describes the nodes above, for a failure.
    fn check_shares(&self, rate: f64, grain: f64, surplus: f64, top: f64, path: &str) {
        if let Some(disk) = &self.disk {
            disk.check(rate, grain, surplus, top, path);
            return;
        }
        let shares = |level: f64| {
            let share =
                move |child: &Self| (child.weight * level).min(child.max_rate()).max(child.reserved_rate());
            self.children.iter().map(share).collect::<Vec<f64>>()
        };
        // Bisects for the level at which the children together use the rate.
        let (mut low, mut high) = (0.0, rate);
        for _ in 0..100 {
            let midpoint = (low + high) / 2.0;
            if shares(midpoint).iter().sum::<f64>() < rate { low = midpoint } else { high = midpoint }
        }
        for (child, share) in self.children.iter().zip(shares(low)) {
            let Self { limit, reservation, weight, .. } = child;
            let all = shares(low);
            let path = format!(
                "{path}\n  of {all:?}: {share} (limit {limit}, reservation {reservation}, weight {weight})"
            );
            child.check_shares(share, rate, surplus + BY_WEIGHT * rate, top, &path);
        }
    }
}

impl Disk {
    fn check(&self, rate: f64, grain: f64, surplus: f64, top: f64, path: &str) {
        let expected = rate * MEASURED_S as f64;
        // Tolerance: four percent, the part that goes by weight, some requests, and the precision
        // of tags.
        let slack = expected * 0.04
            + surplus * MEASURED_S as f64
            + 3.0 * self.units
            + GRAIN_S * grain.min(4.0 * rate);
        let admitted = self.admitted_units.get();
        assert!(
            (admitted - expected).abs() <= slack,
            "{admitted} passed in {MEASURED_S} s, of {} at once; {expected} is its share, in\n{path}",
            self.units
        );
        for direction in Direction::ALL.into_iter().filter(|direction| self.tasks[direction.index()] > 0) {
            // Directions alternate, so every second request is of this one. A request of a sibling
            // may consume a slice of the limit on top, which takes this disk's share long to
            // refill.
            let most_s = 4.0 * (self.units / rate) + 2.0 * (SLICE_S * top / rate) + 4.0 * GRAIN_S;
            let longest = self.longest_wait[direction.index()]
                .get()
                .max(now() - self.wait_since[direction.index()].get());
            assert!(
                longest.as_secs_f64() <= most_s,
                "no {direction:?} passed for {longest:?}, though one of {} at {rate} a second \
                 takes much less, in\n{path}",
                self.units
            );
        }
    }
}
