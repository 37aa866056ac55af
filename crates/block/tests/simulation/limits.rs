//! Trees of groups and disks alone, without images: tasks ask, wait and give up, while limits change and disks move from group to group. Every
//! admission is held against naive buckets, one set for each level.
//!
//! - Never too early: what passes finds room in every bucket on its way up.
//! - Never too late: while a request waits, some bucket on its way up has no room; at the very nanosecond when all have, it or one like it passes.
//! - In order: of one disk's requests of one direction, none passes before one that came earlier.
//! - Every request passes, or is given up: moves and changes lose none.
//! - The counters count exactly what passed, at the disk and at each group it was in.
//!
//! Requests are no larger than a slice here, so that they are charged when they pass; `shares` has the large ones.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use block::{
    layer::throttle::{DiskSettings, Group, GroupSettings, Member},
    reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout},
};
use policy::{
    request::Direction,
    throttle::{Cost, Limit, LimitKind, Limits, Stats},
    time::Duration,
};

use crate::{
    bucket::Charge,
    client::chance,
    ledger::{Event, Ledger},
    seeds,
};

const FOREVER: Duration = Duration::from_secs(24 * 3600);

#[test]
fn limits_are_exact_at_every_level() {
    let (mut waited, mut moved) = (0, 0);
    let seeds = seeds::for_each("--test simulation", "limits_are_exact_at_every_level", 2000, |seed| {
        let (more_waited, more_moved) = sim::run(seed, contend());
        waited += more_waited;
        moved += more_moved;
    });
    assert!(seeds < 100 || waited > 10 * seeds, "only {waited} requests of {seeds} seeds had to wait");
    assert!(seeds < 100 || moved > seeds / 4, "only {moved} moves in {seeds} seeds");
}

/// What runs: groups, each perhaps in an earlier one, and disks.
struct World {
    groups: Vec<Arc<Group>>,
    disks: Vec<Member>,
    ledger: RefCell<Ledger>,
    moves: RefCell<u64>,
}

/// One run; returns how many requests had to wait, and how often a disk moved.
async fn contend() -> (u64, u64) {
    let world = Rc::new(World::draw());
    let mut tasks = Vec::new();
    for disk in 0..world.disks.len() {
        for _ in 0..sim::random(|random| random.usize(1..=5)) {
            let requests = sim::random(|random| random.usize(1..30));
            tasks.push(spawn_joinable(Rc::clone(&world).ask_repeatedly(disk, requests)));
        }
    }
    let changing: Vec<JoinHandle<()>> = vec![
        spawn_joinable(Rc::clone(&world).change_limits()),
        spawn_joinable(Rc::clone(&world).change_groups()),
    ];
    for task in tasks {
        timeout(FOREVER, task).await.expect("all pass within a day of virtual time");
    }
    for task in changing {
        task.cancel().await;
    }
    let ledger = world.ledger.borrow();
    ledger.check();
    world.check_counters(&ledger);
    let waited = world.disks.iter().map(|disk| throttled(&disk.stats())).sum();
    (waited, *world.moves.borrow())
}

fn throttled(stats: &Stats) -> u64 {
    stats.reads.throttled + stats.writes.throttled
}

/// Any of the six limits that go together; often none.
fn draw_limits() -> Limits {
    let mut limits = Limits::default();
    let mut draw = |kind: LimitKind, least: f64| {
        if !chance(35) {
            return;
        }
        *limits.limit_mut(kind) = sim::random(|random| {
            let rate = (least * 10_f64.powf(2.0 * random.f64())) as u64;
            let burst_rate = if random.bool() { 0 } else { rate * random.u64(1..8) };
            let burst_length_s = if burst_rate == 0 { 1 } else { random.u64(1..5) };
            Limit { rate, burst_rate, burst_length_s }
        });
    };
    // Such that the largest request, three operations and 48 KiB, is no more than a slice of 90 ms.
    if chance(50) {
        draw(LimitKind::IopsTotal, 40.0);
    } else {
        draw(LimitKind::IopsRead, 40.0);
        draw(LimitKind::IopsWrite, 40.0);
    }
    if chance(50) {
        draw(LimitKind::BpsTotal, 600_000.0);
    } else {
        draw(LimitKind::BpsRead, 600_000.0);
        draw(LimitKind::BpsWrite, 600_000.0);
    }
    limits
}

impl World {
    fn draw() -> Self {
        let mut ledger = Ledger::default();
        let mut groups: Vec<Arc<Group>> = Vec::new();
        for index in 0..sim::random(|random| random.usize(0..=4)) {
            let parent = Some(sim::random(|random| random.usize(..=index))).filter(|&parent| parent < index);
            let limits = draw_limits();
            let settings = GroupSettings { limits, ..GroupSettings::default() };
            let group = Group::new("group", settings, parent.map(|parent| &groups[parent]));
            groups.push(group.expect("nothing is promised"));
            ledger.add(limits, parent);
        }
        let mut disks = Vec::new();
        for _ in 0..sim::random(|random| random.usize(1..=4)) {
            let group = draw_group(groups.len());
            let limits = draw_limits();
            let settings = DiskSettings { limits, ..DiskSettings::default() };
            let disk = Member::new(settings, group.map(|group| &groups[group]));
            disks.push(disk.expect("nothing is promised"));
            ledger.add(limits, group);
        }
        Self { groups, disks, ledger: RefCell::new(ledger), moves: RefCell::new(0) }
    }

    /// The ledger's number of a disk.
    fn node(&self, disk: usize) -> usize {
        self.groups.len() + disk
    }

    /// Puts other limits in force now and then.
    async fn change_limits(self: Rc<Self>) {
        while chance(60) {
            pause().await;
            let limits = draw_limits();
            let node = sim::random(|random| random.usize(..self.groups.len() + self.disks.len()));
            let old = match self.groups.get(node) {
                Some(group) => group.settings().limits,
                None => self.disks[node - self.groups.len()].settings().limits,
            };
            if limits != old {
                self.ledger.borrow_mut().push(node, Direction::Read, 0, Event::Limits(limits));
            }
            match self.groups.get(node) {
                Some(group) => group.set(GroupSettings { limits, ..group.settings() }),
                None => {
                    let disk = &self.disks[node - self.groups.len()];
                    disk.set(DiskSettings { limits, ..disk.settings() })
                }
            }
            .expect("nothing is promised");
        }
    }

    /// Moves a disk now and then.
    async fn change_groups(self: Rc<Self>) {
        while chance(60) {
            pause().await;
            let disk = sim::random(|random| random.usize(..self.disks.len()));
            let group = draw_group(self.groups.len());
            let old = self.disks[disk].group();
            let new = group.map(|group| &self.groups[group]);
            if old.as_ref().map(Arc::as_ptr) == new.map(Arc::as_ptr) {
                continue;
            }
            self.ledger.borrow_mut().push(self.node(disk), Direction::Read, 0, Event::Moved(group));
            self.disks[disk].move_to(new).expect("nothing is promised");
            *self.moves.borrow_mut() += 1;
        }
    }

    async fn ask_repeatedly(self: Rc<Self>, disk: usize, times: usize) {
        for _ in 0..times {
            if chance(30) {
                sleep_until(now() + Duration::from_micros(sim::random(|random| random.u64(..50_000)))).await;
            }
            self.ask(disk).await;
        }
    }

    async fn ask(&self, disk: usize) {
        let direction = if chance(50) { Direction::Read } else { Direction::Write };
        let lengths: Vec<u64> = sim::random(|random| {
            let count = if random.u8(..4) == 0 { random.usize(1..4) } else { 1 };
            (0..count).map(|_| random.u64(1..16_384)).collect()
        });
        let cost = Cost::merged(&lengths);
        let charge = Charge { direction, bytes: cost.bytes() as f64, operations: cost.requests() as f64 };
        let request = self.ledger.borrow_mut().begin(self.node(disk), direction);
        let patience = match sim::random(|random| random.u8(..12)) {
            0 => Duration::ZERO,
            1 => Duration::from_micros(sim::random(|random| random.u64(..200_000))),
            _ => FOREVER,
        };
        // Polls the admission first, so what was admitted by then is known to have been.
        let event = match timeout(patience, self.disks[disk].admit(direction, cost)).await {
            Ok(()) => Event::Passed(charge),
            Err(_) => Event::GaveUp,
        };
        self.ledger.borrow_mut().push(self.node(disk), direction, request, event);
    }

    fn check_counters(&self, ledger: &Ledger) {
        let counted = ledger.count();
        let groups = self.groups.iter().map(|group| group.stats());
        let disks = self.disks.iter().map(Member::stats);
        for (node, (stats, expect)) in groups.chain(disks).zip(counted).enumerate() {
            let requests = stats.reads.requests + stats.writes.requests;
            assert_eq!((requests, stats.reads.bytes + stats.writes.bytes), expect, "node {node}");
            assert_eq!(stats.waiting, [0, 0], "node {node}");
        }
    }
}

/// None of so many groups, or one of them.
fn draw_group(groups: usize) -> Option<usize> {
    let index = sim::random(|random| random.usize(..=groups));
    (index < groups).then_some(index)
}

/// Until an odd nanosecond, when nothing else happens: then it is clear what was in force when.
async fn pause() {
    let pause = sim::random(|random| 10_f64.powf(6.0 + 3.0 * random.f64()) as u64 | 1);
    sleep_until(now() + Duration::from_nanos(pause)).await;
}
