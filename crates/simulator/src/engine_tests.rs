//! The engine compared with independent arithmetic, exact to the nanosecond, and one mechanism at
//! a time.

use std::sync::atomic::AtomicBool;

use policy::{
    device_model::DeviceRates,
    latency_target::{LatencySettings, PercentileTarget, TargetDirections},
    throttle::{LimitKind, Limits, RateLimit},
    time::NANOS_PER_SECOND,
};
use proptest::prelude::*;

use super::*;
use crate::{
    client::ClientSpec,
    device::{DevicePlacement, ServiceTimeSpec, StationSpec},
    world::{DiskSettings, UNKNOWN_SIZE},
};

const MS: u64 = 1_000_000;

fn disk(limits: Limits) -> DiskSpec {
    DiskSpec {
        name: "vm1".to_owned(),
        settings: DiskSettings { limits, ..DiskSettings::default() },
        group: None,
        prefetch: policy::prefetch::PrefetchConfig::off(),
        size_bytes: UNKNOWN_SIZE,
        place: DevicePlacement::default(),
        sampled_device: None,
    }
}

fn limits(set: &[(LimitKind, RateLimit)]) -> Limits {
    let mut limits = Limits::default();
    for &(kind, limit) in set {
        *limits.limit_mut(kind) = limit;
    }
    limits
}

fn rate(rate: u64) -> RateLimit {
    RateLimit { rate, ..RateLimit::NONE }
}

fn alone(disk: DiskSpec) -> WorldSpec {
    WorldSpec { disks: vec![disk], ..WorldSpec::default() }
}

fn run(
    world: &WorldSpec,
    requests: impl IntoIterator<Item = SimulatedRequest>,
) -> (SimulationEngine, Vec<ResultRow>) {
    let mut engine = SimulationEngine::new(world, true).unwrap();
    requests.into_iter().for_each(|request| engine.arrive(request, &NOT_STOPPED));
    while engine.run(1000) {}
    engine.settle();
    let rows = engine.take_rows().collect();
    (engine, rows)
}

static NOT_STOPPED: AtomicBool = AtomicBool::new(false);

fn read(at_ns: u64, length: u64) -> SimulatedRequest {
    SimulatedRequest { at_ns, disk: 0, op: RequestOp::Read, offset: 0, length }
}

/// Model of QEMU's docs/throttle.txt in billionths of a unit: one queue, one direction.
struct NaiveModel {
    buckets: Vec<(u128, u128, u128, bool)>,
    iops_size: u128,
    now: u128,
}

impl NaiveModel {
    const UNIT: u128 = NANOS_PER_SECOND as u128;

    fn new(limits: &Limits, direction: Direction) -> Self {
        let mut buckets = Vec::new();
        for kind in LimitKind::applying_to(direction) {
            let RateLimit { rate, burst_rate, burst_length_s, .. } = limits.limit(kind);
            let (rate, max, length) = (u128::from(rate), u128::from(burst_rate), u128::from(burst_length_s));
            if rate == 0 {
                continue;
            }
            let size = if max == 0 { rate * Self::UNIT / 10 } else { max * length * Self::UNIT };
            buckets.push((rate, size, 0, kind.counts_bytes()));
            if length > 1 {
                buckets.push((max, max * Self::UNIT / 10, 0, kind.counts_bytes()));
            }
        }
        Self { buckets, iops_size: limits.iops_size.into(), now: 0 }
    }

    /// Time of admission of a request that arrives at `at`, behind all previous ones.
    fn pass(&mut self, at: u64, length: u64) -> u64 {
        let start = self.now.max(at.into());
        let elapsed = start - self.now;
        let mut wait = 0;
        for (rate, size, level, _) in &mut self.buckets {
            *level = level.saturating_sub(*rate * elapsed);
            wait = wait.max(level.saturating_sub(*size).div_ceil(*rate));
        }
        let length = u128::from(length);
        for (rate, _, level, counts_bytes) in &mut self.buckets {
            let operations = if self.iops_size > 0 && length > self.iops_size {
                (length * Self::UNIT).div_ceil(self.iops_size)
            } else {
                Self::UNIT
            };
            *level = level.saturating_sub(*rate * wait);
            *level += if *counts_bytes { length * Self::UNIT } else { operations };
        }
        self.now = start + wait;
        u64::try_from(self.now).unwrap()
    }
}

fn a_limit(rates: std::ops::Range<u64>) -> impl Strategy<Value = RateLimit> {
    (rates, prop::option::of((1..20_u64, 1..8_u64))).prop_map(|(rate, burst)| match burst {
        None => RateLimit { rate, ..RateLimit::NONE },
        Some((times, length)) => {
            RateLimit { rate, burst_rate: rate * times, burst_length_s: length, ..RateLimit::NONE }
        }
    })
}

/// Limits on operations and bytes, common or by direction, with and without bursts and
/// `iops-size`.
fn some_limits() -> impl Strategy<Value = Limits> {
    let iops = prop::option::of(a_limit(12..5000));
    let bps = prop::option::of(a_limit(100_000..50_000_000));
    let size = prop_oneof![Just(0), 512..20_000_u64];
    (iops, bps, size, any::<[bool; 2]>()).prop_map(|(iops, bps, iops_size, [split_iops, split_bps])| {
        use LimitKind::{BpsRead, BpsTotal, BpsWrite, IopsRead, IopsTotal, IopsWrite};
        let mut limits = Limits::default();
        let mut set = |kinds: &[LimitKind], limit: Option<RateLimit>| {
            for kind in kinds {
                *limits.limit_mut(*kind) = limit.unwrap_or_default();
            }
        };
        set(if split_iops { &[IopsRead, IopsWrite] } else { &[IopsTotal] }, iops);
        set(if split_bps { &[BpsRead, BpsWrite] } else { &[BpsTotal] }, bps);
        limits.iops_size = if iops.is_some() { iops_size } else { 0 };
        limits
    })
}

/// Size limit of requests without slices: 90 ms at the scarcest limit. The policy tests slices.
fn largest(limits: &Limits) -> u64 {
    let mut largest = 4 << 20;
    for kind in LimitKind::ALL {
        let rate = limits.limit(kind).rate;
        if rate > 0 && kind.counts_bytes() {
            largest = largest.min(rate * 85 / 1000);
        } else if rate > 0 && limits.iops_size > 0 {
            largest = largest.min(limits.iops_size.max(limits.iops_size * rate * 85 / 1000));
        }
    }
    largest.max(1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn waits_are_those_of_a_naive_model_to_the_nanosecond(
        limits in some_limits(),
        arrivals in prop::collection::vec((prop_oneof![Just(0), 0..1000_u64, 0..20 * MS, 0..3000 * MS], 1..u64::MAX, any::<bool>()), 1..300),
    ) {
        // Directions that share a limit alternate, which the model does not support: use one
        // direction.
        let shares = [LimitKind::IopsTotal, LimitKind::BpsTotal].iter().any(|kind| limits.limit(*kind).rate > 0);
        let largest = largest(&limits);
        let mut at = 0;
        let requests: Vec<SimulatedRequest> = arrivals.iter().map(|&(after, length, write)| {
            at += after;
            let op = if write && !shares { RequestOp::Write } else { RequestOp::Read };
            SimulatedRequest { at_ns: at, disk: 0, op, offset: 0, length: 1 + length % largest }
        }).collect();
        let (engine, mut rows) = run(&alone(disk(limits)), requests.iter().copied());
        let mut models = Direction::ALL.map(|direction| NaiveModel::new(&limits, direction));
        prop_assert_eq!(rows.len(), requests.len());
        // Each direction is admitted in order; restore the order of arrival.
        for direction in Direction::ALL {
            let of_direction = |request: &SimulatedRequest| request.op.direction() == Some(direction);
            let passed = rows.extract_if(.., |row| of_direction(&row.request));
            for (request, row) in requests.iter().filter(|request| of_direction(request)).zip(passed.collect::<Vec<_>>()) {
                prop_assert_eq!(&row.request, request);
                let expect = models[direction.index()].pass(request.at_ns, request.length);
                prop_assert_eq!(row.admitted_ns, expect, "{:?} under {:?}", request, limits);
                prop_assert_eq!(row.completed_ns, row.admitted_ns, "there is no device");
                prop_assert_eq!(row.bucket == LimitingBucket::NONE, row.admitted_ns == request.at_ns);
            }
        }
        let (statistics, queue, throttle_times) = engine.disk(0);
        prop_assert_eq!(statistics.requests, requests.len() as u64);
        let total_ns: u64 = throttle_times.times().iter().map(|(_, ns)| ns).sum();
        prop_assert!(total_ns >= queue.throttled_ns && total_ns <= 2 * queue.throttled_ns, "{} of {}", total_ns, queue.throttled_ns);
    }
}

#[test]
fn a_burst_of_2000_for_60_s_then_100() {
    let burst = RateLimit { rate: 100, burst_rate: 2000, burst_length_s: 60, ..RateLimit::NONE };
    let world = alone(disk(limits(&[(LimitKind::IopsTotal, burst)])));
    let (_, rows) = run(&world, (0..130_000).map(|_| read(0, 4096)));
    let between = |from: u64, to: u64| {
        let passed = |row: &&ResultRow| (from..to).contains(&(row.admitted_ns / NANOS_PER_SECOND));
        rows.iter().filter(passed).count()
    };
    assert!(between(0, 60).abs_diff(120_000) <= 300, "{}", between(0, 60));
    assert!(between(70, 80).abs_diff(1000) <= 2, "{}", between(70, 80));
}

#[test]
fn flush_is_never_throttled() {
    let world = alone(disk(limits(&[(LimitKind::IopsTotal, rate(1))])));
    let flush = SimulatedRequest { op: RequestOp::Flush, length: 0, ..read(10, 0) };
    let (_, rows) = run(&world, [read(0, 512), read(1, 512), read(2, 512), flush]);
    let row = rows.iter().find(|row| row.request.op == RequestOp::Flush).unwrap();
    assert_eq!((row.admitted_ns, row.bucket), (10, LimitingBucket::NONE));
}

#[test]
fn result_names_the_throttling_limit() {
    let world = WorldSpec {
        groups: vec![DiskGroupSpec {
            name: "gold".to_owned(),
            settings: DiskSettings {
                limits: limits(&[(LimitKind::BpsRead, rate(1_000_000))]),
                ..DiskSettings::default()
            },
            parent: None,
        }],
        disks: vec![DiskSpec { group: Some(0), ..disk(limits(&[(LimitKind::IopsTotal, rate(100))])) }],
        ..WorldSpec::default()
    };
    let (engine, rows) =
        run(&world, (0..13).map(|_| read(0, 1)).chain((0..8).map(|_| read(5000 * MS, 60_000))));
    let names: Vec<_> = rows.iter().map(|row| row.bucket.name(&["gold"])).collect();
    assert_eq!(names[..11], ["-"; 11]);
    assert_eq!(names[11..13], ["iops-total"; 2]);
    assert_eq!(names[13..15], ["-"; 2]);
    assert_eq!(names[15..], ["bps-read@gold"; 6]);
    let (_, queue, throttle_times) = engine.disk(0);
    let names: Vec<_> = throttle_times.times().iter().map(|(bucket, _)| bucket.name(&["gold"])).collect();
    assert_eq!(names, ["bps-read@gold", "iops-total"]);
    assert_eq!((queue.longest, engine.group(0).longest), (6, 6));
    assert_eq!(engine.group(0).throttled_ns, queue.throttled_ns);
}

#[test]
fn clients_wait_for_completions() {
    let station =
        StationSpec { read: ServiceTimeSpec::fixed(5 * MS), parallel: Some(1), ..StationSpec::default() };
    let place = DevicePlacement { station: Some(0), budget: None };
    let world = WorldSpec { stations: vec![station], ..alone(DiskSpec { place, ..disk(Limits::default()) }) };
    let client = ClientSpec {
        disk: 0,
        op: RequestOp::Read,
        length: 4096,
        region: 0..8192,
        random: None,
        depth: 2,
        think_ns: MS,
        count: Some(5),
        time: 0..u64::MAX,
    };
    let mut engine = SimulationEngine::new(&world, true).unwrap();
    engine.add_client(ClosedLoopClient::new(client));
    while engine.run(1000) {}
    engine.settle();
    let rows: Vec<ResultRow> = engine.take_rows().collect();
    let times: Vec<_> =
        rows.iter().map(|row| (row.request.at_ns / MS, row.completed_ns / MS, row.request.offset)).collect();
    assert_eq!(times, [(0, 5, 0), (0, 10, 4096), (6, 15, 0), (11, 20, 4096), (16, 25, 0)]);
}

#[test]
fn sequential_reader_hits_its_read_ahead() {
    let station = StationSpec { read: ServiceTimeSpec::fixed(MS), ..StationSpec::default() };
    let place = DevicePlacement { station: Some(0), budget: None };
    let prefetch = policy::prefetch::PrefetchConfig::default();
    let run_with = |prefetch| {
        let disk = DiskSpec { place, prefetch, size_bytes: 1 << 30, ..disk(Limits::default()) };
        let world = WorldSpec { stations: vec![station], ..alone(disk) };
        let reads = (0..1000)
            .map(|number| SimulatedRequest { offset: number * 4096, ..read(number * 100_000, 4096) });
        let (engine, rows) = run(&world, reads);
        let served: u64 = rows.iter().map(|row| row.completed_ns - row.admitted_ns).sum();
        (served / 1000, engine.prefetch(0))
    };
    let (without, none) = run_with(policy::prefetch::PrefetchConfig::off());
    let (with, stats) = run_with(prefetch);
    assert_eq!((without, none), (MS, None));
    assert!(with < MS / 5, "{with}");
    let stats = stats.unwrap();
    assert!(stats.hit_rate().unwrap() > 0.9, "{stats:?}");
    assert!(stats.accuracy().unwrap() > 0.9, "{stats:?}");
}

fn watched(watermark: u8) -> WorldSpec {
    let hold = DiskSettings {
        limits: limits(&[(LimitKind::BpsWrite, rate(1 << 20))]),
        watermark: policy::watermark::Watermark::new(watermark).unwrap(),
        ..DiskSettings::default()
    };
    let place = DevicePlacement { station: None, budget: Some(0) };
    let disk = DiskSpec { settings: hold, place, sampled_device: Some(place), ..disk(Limits::default()) };
    let budgets = vec![DeviceRates { bytes: Some(22 << 20), ..DeviceRates::default() }];
    WorldSpec { budgets, ..alone(disk) }
}

#[test]
fn a_watermark_lifts_limits_while_the_device_has_room() {
    // 4 MiB/s of 22.
    let writes = || {
        (0..160).map(|number| SimulatedRequest { op: RequestOp::Write, ..read(number * 62_500_000, 1 << 18) })
    };
    let longest = |watermark| {
        let (_, rows) = run(&watched(watermark), writes());
        rows.iter().map(|row| row.admitted_ns - row.request.at_ns).max().unwrap()
    };
    assert!(longest(90) < MS, "{}", longest(90));
    assert!(longest(0) > 1000 * MS, "{}", longest(0));
}

/// Results of `db` at depth 1, with these settings, beside `loud` at depth 64 on a station of four
/// servers for 20 s; and a disk elsewhere at depth 64.
fn beside_loud(latency: LatencySettings) -> [Vec<ResultRow>; 3] {
    let millisecond = ServiceTimeSpec { base_ns: MS, byte_ns: 0.0 };
    let station = StationSpec { read: millisecond, parallel: Some(4), ..StationSpec::default() };
    let on = |station, latency| DiskSpec {
        settings: DiskSettings { latency, ..DiskSettings::default() },
        place: DevicePlacement { station: Some(station), budget: None },
        ..disk(Limits::default())
    };
    let none = LatencySettings::default();
    let disks = vec![on(0, latency), on(0, none), on(1, none)];
    let world = WorldSpec { disks, stations: vec![station, station], ..WorldSpec::default() };
    let mut engine = SimulationEngine::new(&world, true).unwrap();
    for (disk, depth) in [(0, 1), (1, 64), (2, 64)] {
        engine.add_client(ClosedLoopClient::new(ClientSpec {
            disk,
            op: RequestOp::Read,
            length: 4096,
            region: 0..1 << 20,
            random: None,
            depth,
            think_ns: 0,
            count: None,
            time: 0..20 * NANOS_PER_SECOND,
        }));
    }
    while engine.run(1000) {}
    let rows: Vec<ResultRow> = engine.take_rows().collect();
    [0, 1, 2].map(|disk| rows.iter().filter(|row| row.request.disk == disk).copied().collect())
}

#[test]
fn latency_target_throttles_the_other_disk() {
    let target = PercentileTarget::new(5 * MS, 9900, TargetDirections::All);
    let late = |rows: &[ResultRow]| {
        let settled = rows.iter().filter(|row| row.request.at_ns > 5 * NANOS_PER_SECOND);
        let late = settled.clone().filter(|row| row.completed_ns - row.admitted_ns > 5 * MS).count();
        late as f64 / settled.count() as f64
    };
    let without = beside_loud(LatencySettings::default());
    let with = beside_loud(LatencySettings { target, ..LatencySettings::default() });
    assert!(late(&without[0]) > 0.9, "it waits behind 64 requests");
    assert!(late(&with[0]) < 0.01, "{}", late(&with[0]));
    let share = with[1].len() as f64 / without[1].len() as f64;
    assert!(share > 0.6, "the other disk has {share} of its throughput");
    assert_eq!(with[2], without[2], "another device is not affected");
}

#[test]
fn idle_time_costs_no_samples() {
    // Overload, idleness, overload: a controller forgets its state within a second.
    let burst = |from: u64| {
        (0..400).map(move |number| SimulatedRequest {
            op: RequestOp::Write,
            ..read(from + number * 10_000_000, 1 << 18)
        })
    };
    let second_burst = |gap_ns: u64| {
        let (engine, rows) = run(&watched(90), burst(0).chain(burst(gap_ns)));
        assert!(engine.scheduled() < 20_000, "{} events", engine.scheduled());
        rows[400..].iter().map(|row| row.admitted_ns - gap_ns).collect::<Vec<_>>()
    };
    let after_a_minute = second_burst(60_000 * MS);
    assert!(after_a_minute.iter().zip(0..).any(|(passed, number)| *passed > number * 10_000_000));
    assert_eq!(second_burst(365 * 86_400 * 1000 * MS), after_a_minute);
    let (_, rows) = run(&watched(90), [read(0, 512), read(u64::MAX, 512)]);
    assert_eq!(rows.len(), 2);
}

/// A disk in two nested groups with limits of their own, one beside it with a reservation, and one
/// whose limits a watermark lifts from time to time.
fn crowded() -> WorldSpec {
    let group = |iops, parent| DiskGroupSpec {
        name: "group".to_owned(),
        settings: DiskSettings {
            limits: limits(&[(LimitKind::IopsTotal, rate(iops))]),
            ..DiskSettings::default()
        },
        parent,
    };
    let member = |weight, reservation, group| {
        let mut disk =
            DiskSpec { group: Some(group), ..disk(limits(&[(LimitKind::BpsWrite, rate(1 << 20))])) };
        disk.settings.share =
            policy::throttle::NodeShare::new(weight).unwrap().with_reservation(reservation, 0);
        disk
    };
    let mut world = watched(50);
    world.groups = vec![group(900, None), group(400, Some(0))];
    world.disks.extend([member(100, 0, 1), member(300, 0, 1), member(100, 150, 0)]);
    world
}

#[test]
fn a_backlog_changes_no_result() {
    let mut random = fastrand::Rng::with_seed(11);
    let world = crowded();
    let mut at_ns = 0;
    let requests: Vec<SimulatedRequest> = (0..6000)
        .map(|_| {
            at_ns += if random.u8(..20) == 0 { random.u64(..40 * MS) } else { 0 };
            let op = RequestOp::ALL[random.usize(..RequestOp::ALL.len())];
            let (disk, length) = (random.usize(..4), 512 << random.u32(..10));
            SimulatedRequest { at_ns, disk, op, offset: random.u64(..1 << 30), length }
        })
        .collect();
    let rows = |heads| {
        let mut engine =
            SimulationEngine { max_tree_requests: heads, ..SimulationEngine::new(&world, true).unwrap() };
        requests.iter().for_each(|request| engine.arrive(*request, &NOT_STOPPED));
        let backlogged = engine.backlogged;
        while engine.run(1000) {}
        engine.settle();
        let queue = |disk: usize| (engine.disk(disk).1.longest, engine.disk(disk).1.throttled_ns);
        let queues: Vec<_> = (0..4).map(queue).collect();
        let throttle_times: Vec<_> = (0..4).map(|disk| engine.disk(disk).2.times()).collect();
        (backlogged, engine.take_rows().collect::<Vec<_>>(), queues, throttle_times)
    };
    let (backlogged, all, queues, throttle_times) = rows(usize::MAX);
    assert_eq!((backlogged, all.len()), (0, requests.len()), "without a backlog the tree has all");
    for heads in [2, TREE_REQUESTS] {
        let (backlogged, rows, heads_queues, heads_throttle_times) = rows(heads);
        assert!(backlogged > 1000, "{backlogged} requests wait behind others");
        assert!(rows == all, "the same requests at the same instants");
        assert_eq!((heads_queues, heads_throttle_times), (queues.clone(), throttle_times.clone()));
    }
}

#[test]
fn backlog_memory_is_bounded() {
    let world = alone(disk(limits(&[(LimitKind::IopsTotal, rate(100))])));
    let mut engine = SimulationEngine::new(&world, false).unwrap();
    for _ in 0..200_000 {
        engine.arrive(read(0, 512), &NOT_STOPPED);
    }
    assert!(engine.waiting() > 199_000);
    assert!(engine.waiting.requests.len() <= TREE_REQUESTS + 1, "{}", engine.waiting.requests.len());
    assert!(engine.memory.bytes() < 210_000, "{}", engine.memory.bytes());
}
