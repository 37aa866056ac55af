//! The search against brute force, and the loop from a recording to a limit that works.

mod coverage;

use std::sync::atomic::AtomicBool;

use block::layer::throttle::DiskSettings;
use console::figures;
use policy::{
    latency_target::{PercentileTarget, TargetDirections},
    throttle::{NodeShare, RateLimit, ReservationUnit},
};
use recording::{DiskId, RequestOp, TraceRecord};
use simulator::{
    engine::SimulationEngine,
    request::SimulatedRequest,
    world::{DiskGroupSpec, UNKNOWN_SIZE},
};

use super::{
    advice::{Advice, TenantAdvice},
    advise,
    arrival_curve::{LimitBuckets, demand},
    arrivals::{TraceArrival, TraceArrivals},
    confidence::{ConfidenceInterval, TraceBlocks},
    interval_text,
    packing::{AvailableDevices, pack},
    search::{SearchTerms, SmallestLimits, capacity, smallest},
    target::LatencyTarget,
    tenant_limits::{AdviseSearch, amount, limits_of},
    tenants::Tenants,
    trial::{SimulatedTrial, TrialCriterion},
};
use crate::{latencies::Percentiles, simulate::SimulationSetup};

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

/// Reads of one disk, in bursts with idle time between them.
fn bursty(seed: u64, count: usize) -> TraceArrivals {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut arrivals, mut at) = (TraceArrivals::default(), 0);
    for number in 0..count {
        at += match random.u32(..20) {
            0 => random.u64(..2 * S),
            1..6 => random.u64(..30 * MS),
            _ => random.u64(..MS),
        };
        let length = [4096, 4096, 16_384, 262_144][random.usize(..4)];
        push(&mut arrivals, if number == 0 { 0 } else { at }, 0, RequestOp::Read, length);
    }
    arrivals
}

fn push(arrivals: &mut TraceArrivals, time_ns: u64, disk: u32, op: RequestOp, length: u64) {
    let record = TraceRecord { time_ns, offset: 0, length, line: 1, disk: DiskId(disk), file: 0, op };
    arrivals.push(&record, ["a", "b", "c", "d", "e"][disk as usize]);
}

fn setup(device: Option<&str>) -> SimulationSetup {
    let terms = crate::simulate::DefaultDiskSettings {
        group: None,
        disk: settings::ThrottleConfig::default(),
        prefetch: policy::prefetch::PrefetchConfig::off(),
    };
    let device = device.map(|text| crate::simulate::device_of(&text.parse().unwrap(), None).unwrap());
    SimulationSetup::of_terms(&terms, UNKNOWN_SIZE, None, None, device)
}

fn tenants(arrivals: &TraceArrivals, device: Option<&str>) -> Tenants {
    Tenants::of_setup(&setup(device), arrivals.streams.iter().map(|stream| stream.name.as_str())).unwrap()
}

/// The wait of each request by the policy's own decisions.
fn waits(arrivals: &TraceArrivals, limit: RateLimit, unit: ReservationUnit) -> Vec<u64> {
    let mut world = tenants(arrivals, None).world;
    let mut by_unit = [None; 2];
    by_unit[unit.index()] = Some(limit);
    world.disks[0].settings.limits = limits_of(by_unit);
    let mut engine = SimulationEngine::new(&world, true).unwrap();
    for TraceArrival { at_ns, op, length } in arrivals.streams[0].iter() {
        engine.arrive(SimulatedRequest { at_ns, disk: 0, op, offset: 0, length }, &AtomicBool::new(false));
    }
    while engine.run(1000) {}
    engine.take_rows().map(|row| row.admitted_ns - row.request.at_ns).collect()
}

#[test]
fn computed_waits_match_the_throttle_policy() {
    for seed in 0..40 {
        let arrivals = bursty(seed, 400);
        let mut random = fastrand::Rng::with_seed(1000 + seed);
        for unit in ReservationUnit::ALL {
            let rate = if unit == ReservationUnit::Iops {
                random.u64(20..800)
            } else {
                random.u64(200_000..40_000_000)
            };
            for limit in [
                RateLimit { rate, ..RateLimit::NONE },
                RateLimit { rate, burst_rate: rate * 2, burst_length_s: 1, ..RateLimit::NONE },
                RateLimit { rate, burst_rate: rate * 3, burst_length_s: 4, ..RateLimit::NONE },
            ] {
                let expected = waits(&arrivals, limit, unit);
                let (mut buckets, mut before) = (LimitBuckets::new(limit, unit), 0);
                let slice = 0.09 * rate as f64;
                let mut sliced = 0;
                for (expected, (at_ns, units)) in
                    expected.iter().zip(demand(arrivals.streams[0].iter(), unit))
                {
                    let after_s = (at_ns - std::mem::replace(&mut before, at_ns)) as f64 / 1e9;
                    let beyond = buckets.wait_s(after_s, units) * 1e9 - *expected as f64;
                    // A timer fires at whole nanoseconds. A large request may be admitted a slice
                    // sooner.
                    let is_sliced = unit == ReservationUnit::Bps && units > slice;
                    sliced += u32::from(is_sliced);
                    let max_beyond = if is_sliced { 90e6 } else { 1000.0 };
                    assert!(
                        (-1000.0..=max_beyond).contains(&beyond),
                        "seed {seed}, {limit:?}, {at_ns}: {beyond}"
                    );
                }
                assert!(sliced < 200, "most are whole");
            }
        }
    }
}

fn terms(target: LatencyTarget, over_s: f64) -> SearchTerms {
    SearchTerms { target, wait_s: target.time_s(), over_s }
}

/// Every limit of a grid is simulated with the policy's own decisions.
#[test]
fn no_lower_limit_in_a_grid_meets_the_target() {
    for seed in 0..12 {
        let arrivals = bursty(seed, 300);
        let target = LatencyTarget::new(99.0, [0, 10 * MS, 100 * MS][seed as usize % 3]);
        let terms = terms(target, 20.0);
        let found = smallest(
            || arrivals.streams[0].iter(),
            ReservationUnit::Iops,
            &amount(&arrivals, &[0], ReservationUnit::Iops),
            &terms,
        )
        .unwrap();
        let allowed = target.allowed_late(300) as usize;
        let holds = |limit: RateLimit| {
            waits(&arrivals, limit, ReservationUnit::Iops)
                .iter()
                .filter(|&&wait| wait > target.time_ns)
                .count()
                <= allowed
        };
        assert!(holds(found.limit), "seed {seed}: {found:?}");
        assert!(holds(RateLimit { rate: found.steady, ..RateLimit::NONE }), "seed {seed}: {found:?}");
        assert!(
            !holds(RateLimit { rate: found.steady * 97 / 100 - 1, ..RateLimit::NONE }),
            "seed {seed}: {found:?}"
        );
        let mut min_capacity = f64::INFINITY;
        let busiest = amount(&arrivals, &[0], ReservationUnit::Iops).busiest.ceil() as u64;
        for step in 0..60 {
            let rate = (found.steady as f64 * 0.93_f64.powi(step)).ceil() as u64;
            if rate < busiest {
                break;
            }
            for burst in 0..24 {
                let burst_rate = if burst == 0 { 0 } else { (rate as f64 * 1.2_f64.powi(burst - 1)) as u64 };
                for burst_length_s in if burst == 0 { 1..=1 } else { 1..=3 } {
                    let limit = RateLimit { rate, burst_rate, burst_length_s, ..RateLimit::NONE };
                    if capacity(limit, 20.0) < min_capacity && holds(limit) {
                        min_capacity = capacity(limit, 20.0);
                    }
                }
            }
        }
        let cost = capacity(found.limit, 20.0);
        assert!(cost <= min_capacity * 1.05, "seed {seed}: {found:?} takes {cost}, and {min_capacity} does");
    }
}

fn criterion(target: LatencyTarget, is_latency: bool, arrivals: &TraceArrivals) -> TrialCriterion {
    TrialCriterion { target, is_latency, blocks: TraceBlocks::new(arrivals.length_ns) }
}

/// The advice for a trace, as the command gives it.
fn advised(
    arrivals: &TraceArrivals,
    device: Option<&str>,
    selected: &[&str],
    target: LatencyTarget,
) -> Advice {
    let mut all_tenants = tenants(arrivals, device);
    all_tenants.restrict_target(&selected.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
    let (stop, judge) = (AtomicBool::new(false), criterion(target, device.is_some(), arrivals));
    let search =
        AdviseSearch { tenants: &all_tenants, arrivals, criterion: judge, over_s: 60.0, stop: &stop };
    advise(&search, None, &|_| ()).unwrap()
}

fn line<'a>(advice: &'a Advice, name: &str) -> &'a TenantAdvice {
    advice.tenants.iter().find(|line| line.name == name).unwrap()
}

/// Latencies of all disks with a limit on one of them, as `weir simulate` computes them.
fn simulated(
    arrivals: &TraceArrivals,
    device: &str,
    limits: &[(usize, &figures::SettingValues)],
) -> Vec<Percentiles> {
    let mut world = tenants(arrivals, Some(device)).world;
    for (disk, set) in limits {
        for (name, value) in *set {
            let setting = policy::throttle::LimitSetting::from_name(name).unwrap();
            world.disks[*disk].settings.limits.set(setting, *value).unwrap();
        }
    }
    let mut engine = SimulationEngine::new(&world, false).unwrap();
    let all: Vec<usize> = (0..arrivals.streams.len()).collect();
    for (disk, TraceArrival { at_ns, op, length }) in arrivals.merged(&all) {
        engine.arrive(SimulatedRequest { at_ns, disk, op, offset: 0, length }, &AtomicBool::new(false));
    }
    while engine.run(1000) {}
    all.iter().map(|&disk| Percentiles::of(&engine.disk(disk).0.latency)).collect()
}

/// A quiet disk with some 100 requests per second, and one with occasional bursts of 150.
fn noisy_neighbour(seed: u64, seconds: u64) -> TraceArrivals {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut requests = vec![(0, 0), (0, 1)];
    for tick in 0..seconds * 10 {
        requests.extend((0..10).map(|_| (tick * S / 10 + random.u64(..S / 10), 0)));
        if random.u32(..10) == 0 {
            requests.extend((0..150).map(|_| (tick * S / 10 + random.u64(..5 * MS), 1)));
        }
    }
    requests.sort_unstable();
    let mut arrivals = TraceArrivals::default();
    requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, RequestOp::Read, 4096));
    arrivals
}

/// A thousand reads per second.
const DEVICE: &str = "read=1ms,parallel=1";

#[test]
fn advised_limits_quiet_a_noisy_neighbour() {
    let recorded = noisy_neighbour(1, 600);
    let before = simulated(&recorded, DEVICE, &[]);
    assert!(before[0].p99 > 100 * MS, "it is slow: {:?}", before[0]);
    let target = LatencyTarget::new(99.0, 20 * MS);
    let advice = advised(&recorded, Some(DEVICE), &["a"], target);
    assert!(advice.kept, "{}", advice.text(true));
    let (quiet, noisy) = (line(&advice, "a"), line(&advice, "b"));
    let predicted = quiet.after.unwrap().latency_ns as f64;
    assert!(predicted <= 20.2 * MS as f64 && predicted > 5.0 * MS as f64, "{predicted}");
    match &noisy.set {
        Some(set) => {
            // `weir simulate` for the same requests, and for another day of the same kind.
            let same = simulated(&recorded, DEVICE, &[(1, set)])[0].p99 as f64;
            assert!((same / predicted - 1.0).abs() < 0.011, "{same}, not {predicted}");
            let applied = simulated(&noisy_neighbour(2, 600), DEVICE, &[(1, set)])[0].p99 as f64;
            assert!((applied / predicted - 1.0).abs() < 0.15, "{applied}, not {predicted}");
            assert!(noisy.set_between.is_some());
        }
        None => assert!(
            advice.commands[0].starts_with("weir group add shared --iops-total "),
            "{:?}",
            advice.commands
        ),
    }
    let repeated = advised(&recorded, Some(DEVICE), &["a"], target);
    assert_eq!(repeated.text(true), advice.text(true), "the same again");
}

/// A disk with some 100 requests per second beside one that always has 32 more requests than the
/// device has completed, in batches.
fn steady_neighbour(seconds: u64) -> TraceArrivals {
    let mut random = fastrand::Rng::with_seed(7);
    let mut requests = vec![(0, 0), (0, 1)];
    for tick in 0..seconds * 10 {
        requests.extend((0..10).map(|_| (tick * S / 10 + random.u64(..S / 10), 0)));
        requests.extend((0..80).map(|_| (tick * S / 10 + random.u64(..20 * MS), 1)));
    }
    requests.sort_unstable();
    let mut arrivals = TraceArrivals::default();
    requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, RequestOp::Read, 4096));
    arrivals
}

#[test]
fn latency_target_is_advised_beside_limits() {
    let recorded = steady_neighbour(20);
    let advice = advised(&recorded, Some(DEVICE), &["a"], LatencyTarget::new(99.0, 30 * MS));
    let text = advice.text(true);
    let (quiet, noisy) = (line(&advice, "a"), line(&advice, "b"));
    let target_ns = quiet.latency_target_ns.unwrap();
    let (with_target, noisy_with_target) =
        (quiet.with_latency_target.unwrap(), noisy.with_latency_target.unwrap());
    assert!(with_target.latency_ns <= target_ns * 101 / 100, "{with_target:?}");
    assert_eq!(noisy.latency_target_ns, None);
    assert!(noisy_with_target.wait_ns > 0, "it is throttled");
    let plan = advice.latency_target.as_ref().unwrap();
    let shown = format!("{}ms", target_ns / MS);
    assert_eq!(plan.commands, [format!("weir throttle a --latency-target {shown}")]);
    let parsed = settings::config::parse("new.toml", &plan.config, std::path::Path::new("")).unwrap();
    let desired = settings::DesiredState::new(parsed, 0).unwrap();
    assert_eq!(desired.disks[0].settings.latency.target_ns, target_ns);
    assert!(text.contains("Or, instead of limits, a latency target:"), "{text}");
    // The same results as `weir simulate`, which runs the same controller.
    let mut world = tenants(&recorded, Some(DEVICE)).world;
    world.disks[0].settings.latency = desired.disks[0].settings.to_disk_settings().latency;
    let mut engine = SimulationEngine::new(&world, false).unwrap();
    for (disk, TraceArrival { at_ns, op, length }) in recorded.merged(&[0, 1]) {
        engine.arrive(SimulatedRequest { at_ns, disk, op, offset: 0, length }, &AtomicBool::new(false));
    }
    while engine.run(1000) {}
    assert_eq!(Percentiles::of(&engine.disk(0).0.latency).p99, with_target.latency_ns);
    // All with a target: there is nothing to throttle.
    let of_all = advised(&recorded, Some(DEVICE), &[], LatencyTarget::new(99.0, 30 * MS));
    assert!(of_all.latency_target.is_none());
    // No percentile that the daemon keeps.
    let low = advised(&recorded, Some(DEVICE), &["a"], LatencyTarget::new(40.0, 30 * MS));
    assert!(low.latency_target.is_none());
}

/// The target in the advice is the smallest that the controller keeps, if it does not keep the one
/// asked for.
#[test]
fn latency_target_that_is_not_kept_is_raised() {
    let recorded = steady_neighbour(20);
    // Little more than the device takes for a request.
    let asked_ns = 1_100_000;
    let advice = advised(&recorded, Some(DEVICE), &["a"], LatencyTarget::new(99.0, asked_ns));
    let quiet = line(&advice, "a");
    let target_ns = quiet.latency_target_ns.unwrap();
    assert!(target_ns > asked_ns && target_ns < quiet.before.unwrap().latency_ns, "{target_ns}");
    assert!(quiet.with_latency_target.unwrap().latency_ns <= target_ns * 101 / 100);
}

#[test]
fn limits_that_cause_a_miss_are_reported() {
    let arrivals = noisy_neighbour(1, 60);
    let outcome_of = |rate: u64| {
        let mut all_tenants = tenants(&arrivals, Some(DEVICE));
        all_tenants.restrict_target(&["a".to_owned()]).unwrap();
        all_tenants.world.disks[0].settings.limits =
            limits_of([Some(RateLimit { rate, ..RateLimit::NONE }), None]);
        let (stop, criterion) =
            (AtomicBool::new(false), criterion(LatencyTarget::new(99.0, 20 * MS), true, &arrivals));
        let search =
            AdviseSearch { tenants: &all_tenants, arrivals: &arrivals, criterion, over_s: 60.0, stop: &stop };
        let advice = advise(&search, None, &|_| ()).unwrap();
        (advice.kept, advice.remarks.iter().any(|remark| remark.starts_with("a: its own limits, of the ")))
    };
    // Its demand is some 100 per second.
    assert_eq!((outcome_of(50), outcome_of(10_000)), ((false, true), (true, false)));
}

#[test]
fn limit_of_the_noisy_disk_is_the_loosest_of_a_scan() {
    for seed in 10..14 {
        let arrivals = noisy_neighbour(seed, 30);
        let target = LatencyTarget::new(99.0, 30 * MS);
        let advice = advised(&arrivals, Some(DEVICE), &["a"], target);
        let Some(set) = &line(&advice, "b").set else { continue };
        let rate = set["iops-total"];
        let p99 = |rate: u64| {
            let set = figures::SettingValues::from([("iops-total".to_owned(), rate)]);
            simulated(&arrivals, DEVICE, &[(1, &set)])[0].p99
        };
        assert!(p99(rate) <= 30 * MS * 101 / 100, "seed {seed}");
        let highest = (1..=200).map(|step| step * 10).filter(|&rate| p99(rate) <= 30 * MS).max().unwrap();
        assert!(rate * 108 / 100 >= highest, "seed {seed}: {rate}, and {highest} does");
    }
}

/// A disk with occasional bursts of 60, and one that keeps the device busy all the time.
fn busy_neighbour(seed: u64, seconds: u64) -> TraceArrivals {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut requests = vec![(0, 0), (0, 1)];
    for tick in 0..seconds * 10 {
        requests.extend((0..85).map(|_| (tick * S / 10 + random.u64(..S / 10), 1)));
        if random.u32(..10) == 0 {
            requests.extend((0..60).map(|_| (tick * S / 10 + random.u64(..5 * MS), 0)));
        }
    }
    requests.sort_unstable();
    let mut arrivals = TraceArrivals::default();
    requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, RequestOp::Read, 4096));
    arrivals
}

/// Number of late requests beyond the allowance, in one group of this rate with these weights.
fn weighed(arrivals: &TraceArrivals, rate: u64, weights: &[u32], target: LatencyTarget) -> Vec<u64> {
    let mut world = tenants(arrivals, Some(DEVICE)).world;
    for (disk, weight) in world.disks.iter_mut().zip(weights) {
        disk.settings.share = NodeShare::new(*weight).unwrap();
    }
    world.add_common_group(limits_of([Some(RateLimit { rate, ..RateLimit::NONE }), None]));
    let trial = SimulatedTrial { world: &world, disks: &[0, 1], tenants: &[0, 1], count: 2 };
    let criterion = criterion(target, true, arrivals);
    let results = trial.run(arrivals.merged(&[0, 1]), &criterion, &AtomicBool::new(false)).unwrap();
    results.iter().map(|result| result.late.saturating_sub(target.allowed_late(result.requests))).collect()
}

/// Every group of a grid is simulated: its size, and the weight of the quiet disk.
#[test]
fn no_larger_group_in_a_grid_meets_the_target() {
    let mut advised_weights = 0;
    for seed in 20..24 {
        let (arrivals, target) = (busy_neighbour(seed, 30), LatencyTarget::new(99.0, 120 * MS));
        let advice = advised(&arrivals, Some(DEVICE), &["a"], target);
        let number = |line: usize, option: &str| -> Option<u64> {
            let mut arguments =
                advice.commands.get(line)?.split(' ').skip_while(|argument| *argument != option);
            arguments.nth(1)?.parse().ok()
        };
        let (Some(rate), Some(weight)) = (number(0, "--iops-total"), number(1, "--weight")) else { continue };
        advised_weights += 1;
        assert!(advice.kept, "seed {seed}: {:?}", advice.commands);
        assert_eq!(number(2, "--weight"), Some(100), "{:?}", advice.commands);
        let holds = |rate: u64, weight: u32| weighed(&arrivals, rate, &[weight, 100], target)[0] == 0;
        assert!(holds(rate, weight as u32), "seed {seed}: {:?}", advice.commands);
        for other in [100, 200, 300, 500, 1000, 2000, 5000, 10_000] {
            let larger = (1..).map(|step| rate * (104 + 3 * step) / 100).take_while(|rate| *rate <= 1000);
            let larger: Vec<_> = larger.filter(|rate| holds(*rate, other)).collect();
            assert!(larger.is_empty(), "seed {seed}: {rate} at weight {weight}, {larger:?} at {other}");
        }
    }
    assert!(advised_weights > 0, "weights are advised somewhere");
}

#[test]
fn impossible_target_names_a_possible_one() {
    // Twice the capacity of the device.
    let mut arrivals = TraceArrivals::default();
    (0..4000).for_each(|number| push(&mut arrivals, number * MS, (number % 2) as u32, RequestOp::Read, 4096));
    let advice = advised(&arrivals, Some("read=2ms,parallel=1"), &[], LatencyTarget::new(99.0, 10 * MS));
    assert!(!advice.kept);
    let remarks = advice.remarks.join("\n");
    assert!(remarks.contains("the device cannot meet the target for all"), "{remarks}");
    assert!(remarks.contains("--keep p99="), "{remarks}");
    // Less than the service time of one request.
    let advice = advised(&arrivals, Some("read=2ms,parallel=9"), &["a"], LatencyTarget::new(99.0, 0));
    let remarks = advice.remarks.join("\n");
    assert!(remarks.contains("a: without limits and alone on its device its p99 is 2.0ms"), "{remarks}");
    assert!(!advice.kept && advice.commands.is_empty());
}

#[test]
fn unusual_traces_get_partial_advice() {
    let target = LatencyTarget::new(99.0, 10 * MS);
    let mut flushes = TraceArrivals::default();
    (0..100).for_each(|number| push(&mut flushes, number * S, 0, RequestOp::Flush, 0));
    let advice = advised(&flushes, None, &[], target);
    assert_eq!(advice.remarks, ["a: sends only flushes, which limits do not throttle."]);
    assert!(advice.kept && advice.commands.is_empty());

    let mut single = TraceArrivals::default();
    push(&mut single, 0, 0, RequestOp::Write, 4096);
    let advice = advised(&single, None, &[], target);
    let too_short = "a: the trace is too short: p99 needs 1000 requests, but there are only 1.";
    assert!(advice.remarks[0].starts_with(too_short));
    assert_eq!(advice.commands, ["weir throttle a --bps-total 40K --iops-total 10"]);

    let mut jumping = TraceArrivals::default();
    (0..2000).for_each(|number| push(&mut jumping, number * MS, 0, RequestOp::Read, 4096));
    (0..2000).for_each(|number| {
        push(&mut jumping, (u64::MAX >> 1) + number * MS, 0, RequestOp::Read, u64::MAX >> 2);
    });
    let advice = advised(&jumping, None, &[], target);
    assert!(advice.remarks[0].contains("only 2 of its"), "{:?}", advice.remarks);
    let advice = advised(&jumping, Some(DEVICE), &[], LatencyTarget::new(99.0, 0));
    assert!(!advice.kept);
}

/// Tries all assignments of disks to this number of devices.
fn fits_on(arrivals: &TraceArrivals, device: &str, count: usize, target: LatencyTarget) -> bool {
    let disks = arrivals.streams.len();
    (0..count.pow(disks as u32)).any(|mut assignment| {
        let device_of: Vec<usize> = (0..disks).map(|_| (assignment % count, assignment /= count).0).collect();
        (0..count).all(|place| {
            let together: Vec<usize> = (0..disks).filter(|&disk| device_of[disk] == place).collect();
            let all_tenants = tenants(arrivals, Some(device));
            let tenant_world = all_tenants.world_of(&all_tenants.world, &together);
            let trial = SimulatedTrial {
                world: &tenant_world.world,
                disks: &tenant_world.disks,
                tenants: &tenant_world.tenant_of,
                count: together.len(),
            };
            let criterion = criterion(target, true, arrivals);
            let results = trial.run(arrivals.merged(&together), &criterion, &AtomicBool::new(false)).unwrap();
            results.iter().all(|result| result.holds(&target))
        })
    })
}

#[test]
fn packing_uses_the_fewest_devices() {
    for seed in 0..8 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut requests = Vec::new();
        for disk in 0..5 {
            let gap = random.u64(2..12) * MS;
            requests.extend((0..4 * S / gap).map(|number| (number * gap + random.u64(..gap), disk)));
        }
        requests.sort_unstable();
        let mut arrivals = TraceArrivals::default();
        (0..5).for_each(|disk| push(&mut arrivals, 0, disk, RequestOp::Read, 4096));
        requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, RequestOp::Read, 4096));
        let target = LatencyTarget::new(99.0, 8 * MS);
        let all_tenants = tenants(&arrivals, None);
        let (stop, criterion) = (AtomicBool::new(false), criterion(target, true, &arrivals));
        let search =
            AdviseSearch { tenants: &all_tenants, arrivals: &arrivals, criterion, over_s: 60.0, stop: &stop };
        let device = "read=2ms,parallel=1";
        let supply =
            AvailableDevices::Identical(crate::simulate::device_of(&device.parse().unwrap(), None).unwrap());
        let packing = pack(&search, &supply).unwrap();
        assert!(packing.left_over.is_empty(), "seed {seed}");
        let mut all: Vec<usize> = packing.devices.iter().flat_map(|packed| packed.tenants.clone()).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert!(
            packing.devices.iter().all(|packed| packed.results.iter().all(|result| result.holds(&target)))
        );
        let count = packing.devices.len();
        assert!(count >= packing.at_least);
        assert!(
            count == 1 || !fits_on(&arrivals, device, count - 1, target),
            "seed {seed}: {count} are too many"
        );
    }
}

#[test]
fn missing_upper_end_of_an_interval_is_reported() {
    let arrivals = noisy_neighbour(1, 1);
    let tenants = tenants(&arrivals, None);
    let criterion = criterion(LatencyTarget::new(99.0, 10 * MS), true, &arrivals);
    let stop = AtomicBool::new(false);
    let search =
        AdviseSearch { tenants: &tenants, arrivals: &arrivals, criterion, over_s: 60.0, stop: &stop };
    let limits = limits_of([Some(RateLimit { rate: 1000, ..RateLimit::NONE }), None]);
    let text_of = |low, high| interval_text(&search, "b", &limits, ConfidenceInterval { low, high });
    let prefix = "b: iops-total 1000 is for this trace";
    let days = "on 95 of 100 other days made of the same tenths it would be";
    assert_eq!(text_of(0.5, 2.0), format!("{prefix}; {days} between 500 and 2.0K."));
    assert_eq!(
        text_of(0.5, f64::INFINITY),
        format!("{prefix}; {days} at least 500, and this trace does not show how much at most.")
    );
    assert_eq!(
        text_of(0.0, f64::INFINITY),
        format!("{prefix}, whose tenths differ too much to estimate it for other days.")
    );
    let limits = limits_of([None, Some(RateLimit { rate: 2187 << 10, ..RateLimit::NONE })]);
    let text = interval_text(&search, "b", &limits, ConfidenceInterval { low: 0.5, high: 2.0 });
    assert!(text.starts_with("b: bps-total 2187K is for this trace; "), "{text}");
}

#[test]
fn limit_of_a_spared_disk_without_device_is_explained() {
    let arrivals = noisy_neighbour(1, 1);
    let stop = AtomicBool::new(false);
    let remark = |selected: Option<&str>, device: Option<&str>| {
        let mut all_tenants = tenants(&arrivals, device);
        all_tenants.restrict_target(&selected.map(str::to_owned).into_iter().collect::<Vec<_>>()).unwrap();
        let criterion = criterion(LatencyTarget::new(99.0, 10 * MS), all_tenants.has_device, &arrivals);
        let search =
            AdviseSearch { tenants: &all_tenants, arrivals: &arrivals, criterion, over_s: 60.0, stop: &stop };
        let advice = advise(&search, None, &|_| ()).unwrap();
        advice.remarks.into_iter().find(|remark| remark.contains("without a device"))
    };
    let name = tenants(&arrivals, None).tenants[0].name.clone();
    let text = remark(Some(&name), None).expect("a remark");
    assert!(text.starts_with(&format!("{name}: this is the smallest limit of the disk itself.")), "{text}");
    assert_eq!(remark(None, None), None, "all disks are to be limited");
}

/// Disks of one group with this rate, on a device.
fn grouped(arrivals: &TraceArrivals, rate: u64, device: Option<&str>) -> Tenants {
    let mut tenants = tenants(arrivals, device);
    tenants.world.add_common_group(limits_of([Some(RateLimit { rate, ..RateLimit::NONE }), None]));
    tenants.world.groups[0].name = "all".into();
    tenants.determine_tenants();
    tenants
}

#[test]
fn member_is_spared_within_its_existing_group() {
    let (arrivals, target) = (busy_neighbour(20, 30), LatencyTarget::new(99.0, 70 * MS));
    let advice_for = |rate: u64, device: Option<&str>, selected: &str, target: LatencyTarget| {
        let mut all_tenants = grouped(&arrivals, rate, device);
        all_tenants.restrict_target(&[selected.to_owned()]).unwrap();
        let (stop, criterion) = (AtomicBool::new(false), criterion(target, device.is_some(), &arrivals));
        let search =
            AdviseSearch { tenants: &all_tenants, arrivals: &arrivals, criterion, over_s: 60.0, stop: &stop };
        advise(&search, None, &|_| ()).unwrap()
    };
    // Without a device they compete for the group's limit.
    let advice = advice_for(900, None, "a", target);
    let (a, b) = (line(&advice, "a"), line(&advice, "b"));
    assert!(advice.kept && a.has_target && !b.has_target, "{}", advice.text(true));
    assert!(a.before.unwrap().wait_ns > 100 * MS, "{}", advice.text(true));
    let weight = a.joins.as_ref().map(|joins| joins.weight).unwrap();
    let command = format!("weir throttle a --weight {weight} --group all");
    assert_eq!(advice.commands, [&*command, "weir throttle b --weight 100 --group all"]);
    // They share a device, so the noisy one gets a limit.
    let advice = advice_for(0, Some(DEVICE), "a", target);
    assert!(advice.kept, "{}", advice.text(true));
    let command = &advice.commands[..];
    assert!(command.len() == 1 && command[0].starts_with("weir throttle b --iops-total "), "{command:?}");
    // The group's limit stays, and makes the target impossible.
    let remarks = advice_for(50, None, "a", target).remarks.join("\n");
    assert!(remarks.contains("a: without own limits and alone in all its p99 is "), "{remarks}");
    // No competition.
    let advice = advice_for(100_000, None, "a", target);
    assert_eq!(
        advice.remarks.last().unwrap(),
        "a, b: together in all they meet the target without any limit."
    );
    // The group itself is advised upon as before.
    let advice = advice_for(1000, None, "all", target);
    assert_eq!((advice.tenants.len(), advice.tenants[0].kind), (1, "group"));
    let error =
        grouped(&arrivals, 1000, None).restrict_target(&["all".to_owned(), "a".to_owned()]).unwrap_err();
    assert!(error.starts_with("all: so is a disk in it"), "{error}");
}

#[test]
fn remark_on_a_target_quotes_the_printed_figures() {
    // A limit of the file on the noisy disk, which a target that is met without limits does not
    // replace.
    let recorded = steady_neighbour(20);
    let mut all_tenants = tenants(&recorded, Some(DEVICE));
    all_tenants.world.disks[1].settings.limits =
        limits_of([Some(RateLimit { rate: 850, ..RateLimit::NONE }), None]);
    all_tenants.determine_tenants();
    all_tenants.restrict_target(&["a".to_owned()]).unwrap();
    let (stop, judge) =
        (AtomicBool::new(false), criterion(LatencyTarget::new(99.0, 500 * MS), true, &recorded));
    let search = AdviseSearch {
        tenants: &all_tenants,
        arrivals: &recorded,
        criterion: judge,
        over_s: 60.0,
        stop: &stop,
    };
    let advice = advise(&search, None, &|_| ()).unwrap();
    let noisy = line(&advice, "b").after.unwrap();
    let remark = advice.remarks.iter().find(|remark| remark.contains("instead of limits")).unwrap();
    let figures = format!("within {} with the limits of the config file", figures::time(noisy.latency_ns));
    assert!(remark.contains(&figures), "{figures}: {remark}");
}

#[test]
fn nested_latency_targets_are_not_advised() {
    let arrivals = busy_neighbour(20, 1);
    let target = PercentileTarget::new(5 * MS, 9900, TargetDirections::All);
    // b in inner in outer in outermost; a in outer. `aside`, in outer, has no disk in the trace.
    let nested = || {
        let mut tenants = tenants(&arrivals, Some(DEVICE));
        for (name, parent) in
            [("outermost", None), ("outer", Some(0)), ("inner", Some(1)), ("aside", Some(1))]
        {
            let settings = DiskSettings::default();
            tenants.world.groups.push(DiskGroupSpec { name: name.into(), settings, parent });
        }
        tenants.world.disks[0].group = Some(1);
        tenants.world.disks[1].group = Some(2);
        tenants.determine_tenants();
        tenants
    };
    let may = |tenants: &Tenants, name: &str| {
        let tenant = tenants.tenants.iter().position(|tenant| tenant.name == name).unwrap();
        tenants.may_have_latency_target(tenant)
    };
    let of = |selected: &[&str], targeted: Option<usize>| {
        let mut tenants = nested();
        if let Some(group) = targeted {
            tenants.world.groups[group].settings.latency.target = target;
        }
        tenants.restrict_target(&selected.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
        selected.iter().map(|name| may(&tenants, name)).collect::<Vec<_>>()
    };
    assert_eq!([of(&["outer"], None), of(&["inner"], None)], [[true], [true]]);
    assert_eq!(of(&["outer", "inner"], None), [false, false], "advised together");
    assert_eq!(of(&["outer"], Some(3)), [false], "a group that the trace lacks");
    assert_eq!(of(&["outer"], Some(2)), [false], "the target of a tenant below");
    assert_eq!(of(&["inner"], Some(0)), [false], "a group above");
    assert_eq!(of(&["outer"], Some(1)), [true], "its own target is replaced");
    // An open group in a group that is a tenant.
    assert_eq!(of(&["b", "outer"], None), [false, false]);
}

#[test]
fn throttled_recording_is_remarked() {
    let mut arrivals = busy_neighbour(20, 5);
    let remarks_of = |arrivals: &TraceArrivals| {
        advised(arrivals, None, &[], LatencyTarget::new(99.0, MS)).remarks.join("\n")
    };
    // Occasional throttling of a burst is no reason for a remark.
    arrivals.streams[0].throttled = arrivals.streams[0].requests / 20;
    assert!(!remarks_of(&arrivals).contains("limits throttled"), "{}", remarks_of(&arrivals));
    arrivals.streams[0].throttled = arrivals.streams[0].requests / 2;
    assert!(
        remarks_of(&arrivals).contains("a: limits throttled 50 % of its requests during the recording."),
        "{}",
        remarks_of(&arrivals)
    );
}

#[test]
fn unknown_tenant_is_rejected() {
    let arrivals = noisy_neighbour(1, 1);
    let error = tenants(&arrivals, None).restrict_target(&["bb".to_owned()]).unwrap_err();
    assert!(error.starts_with("bb: the trace has no requests of"), "{error}");
}
