//! A trace through the throttle layer, compared with the tree of buckets alone, driven as `weir
//! simulate` drives it: each request is admitted at the same instant, to the nanosecond.
//!
//! So a daemon behaves as simulated, as far as its timers are on time. `make bench`
//! (`simulate-agrees`) measures the delay of real timers.

use std::{cell::RefCell, rc::Rc};

use block::layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup, ThrottleMember};
use policy::{
    request::Direction,
    throttle::{
        AdmissionResult, LimitKind, Limits, NodeShare, PollDecision, RateLimit, RequestCost, ThrottleTree,
    },
    time::{Duration, Instant},
};
use reactor::{now, sim, sleep_until, spawn_joinable};

use crate::{client::chance, seeds};

const DISKS: usize = 3;
const REQUESTS: usize = 300;

/// A request of a trace.
#[derive(Clone, Copy, Debug)]
struct ReplayRequest {
    at: Instant,
    disk: usize,
    direction: Direction,
    length: u64,
}

/// A group, its disks, and their requests.
#[derive(Clone, Debug)]
struct Trace {
    group: Limits,
    disks: [(Limits, NodeShare); DISKS],
    requests: Vec<ReplayRequest>,
}

#[test]
fn the_layer_admits_a_trace_like_the_tree_alone() {
    let mut waited = 0;
    let seeds = seeds::for_each("--test simulation", 200, |seed| {
        let (trace, passed) = sim::run(seed, async {
            let trace = Trace::draw();
            let passed = through_the_layer(&trace).await;
            (trace, passed)
        });
        assert_eq!(passed, alone(&trace), "{trace:#?}");
        waited +=
            trace.requests.iter().zip(&passed).filter(|(request, passed)| **passed > request.at).count();
    });
    assert!(waited as u64 > seeds * REQUESTS as u64 / 4, "{waited} requests waited: too little happened");
}

impl Trace {
    fn draw() -> Self {
        let mut at = Instant::ZERO;
        let request = |_| {
            // No two requests at one instant, whose order would depend on the scheduler.
            at += Duration::from_nanos(sim::random(|random| random.u64(1..15_000_000)));
            let length = sim::random(|random| [512, 4096, 8192, 32_768][random.usize(..4)]);
            let direction = if chance(50) { Direction::Read } else { Direction::Write };
            ReplayRequest { at, disk: sim::random(|random| random.usize(..DISKS)), direction, length }
        };
        Self {
            requests: (0..REQUESTS).map(request).collect(),
            group: draw_limits(100),
            disks: [(); DISKS].map(|()| {
                let weight = sim::random(|random| random.u32(1..1000));
                (draw_limits(30), NodeShare::new(weight).expect("in range"))
            }),
        }
    }
}

/// Draws limits that throttle about half of the requests, in this percentage of cases.
fn draw_limits(percent: u32) -> Limits {
    let mut limits = Limits::default();
    if !chance(percent) {
        return limits;
    }
    let kinds: &[LimitKind] =
        if chance(50) { &[LimitKind::IopsTotal] } else { &[LimitKind::IopsRead, LimitKind::BpsWrite] };
    for kind in kinds {
        let unit = if kind.counts_bytes() { 10_000 } else { 1 };
        let rate = sim::random(|random| random.u64(40..160)) * unit;
        let burst_rate = if chance(50) { 0 } else { rate * sim::random(|random| random.u64(1..4)) };
        let burst_length_s = if burst_rate > 0 && chance(50) { 2 } else { 1 };
        *limits.limit_mut(*kind) = RateLimit { rate, burst_rate, burst_length_s, ..RateLimit::NONE };
    }
    if chance(30) {
        limits.iops_size = 8192;
    }
    limits
}

/// Instants at which the layer admits each request.
async fn through_the_layer(trace: &Trace) -> Vec<Instant> {
    let settings = GroupSettings { limits: trace.group, ..GroupSettings::default() };
    let group = ThrottleGroup::new("group", settings, None).expect("drawn valid");
    let members = trace.disks.map(|(limits, share)| {
        let settings = DiskSettings { limits, share, ..DiskSettings::default() };
        Rc::new(ThrottleMember::new(settings, 0, Some(&group)).expect("no reservations"))
    });
    let passed = Rc::new(RefCell::new(vec![Instant::MAX; trace.requests.len()]));
    let requests: Vec<_> = trace
        .requests
        .iter()
        .enumerate()
        .map(|(number, &ReplayRequest { at, disk, direction, length })| {
            let (member, passed) = (Rc::clone(&members[disk]), Rc::clone(&passed));
            spawn_joinable(async move {
                sleep_until(at).await;
                member.admit(direction, RequestCost::one(length)).await;
                passed.borrow_mut()[number] = now();
            })
        })
        .collect();
    for request in requests {
        request.await;
    }
    passed.take()
}

/// Instants at which the tree admits each request, with exact timers.
fn alone(trace: &Trace) -> Vec<Instant> {
    let mut tree = ThrottleTree::new(Instant::ZERO);
    let group = tree.add(None, trace.group, NodeShare::default()).expect("drawn valid");
    let disks =
        trace.disks.map(|(limits, share)| tree.add(Some(group), limits, share).expect("no reservations"));
    let mut passed = vec![Instant::MAX; trace.requests.len()];
    let mut timer = Instant::MAX;
    let poll = |tree: &mut ThrottleTree<usize>, now: Instant, passed: &mut [Instant]| loop {
        match tree.poll(now) {
            PollDecision::Admit(number) => passed[number] = now,
            PollDecision::Wait { until } => return until,
            PollDecision::Idle => return Instant::MAX,
        }
    };
    for (number, &ReplayRequest { at, disk, direction, length }) in trace.requests.iter().enumerate() {
        // Timers that fire before the request arrives.
        while timer <= at {
            timer = poll(&mut tree, timer, &mut passed);
        }
        match tree.submit(disks[disk], direction, RequestCost::one(length), number, at) {
            AdmissionResult::Admitted(number) => passed[number] = at,
            AdmissionResult::Queued(_) => timer = poll(&mut tree, at, &mut passed),
        }
    }
    // All requests have arrived: only timers are left.
    while timer < Instant::MAX {
        timer = poll(&mut tree, timer, &mut passed);
    }
    passed
}
