//! The search against brute force, and the loop from a recording to a limit that works.

mod coverage;

use std::sync::atomic::AtomicBool;

use console::figures;
use policy::throttle::{Limit, Share, Unit};
use recording::{DiskId, Op, Record};
use simulator::{engine::Engine, request::Request, world::UNKNOWN_SIZE};

use super::{
    advice::{Advice, Line},
    advise,
    arrivals::{Arrival, Arrivals},
    certainty::{Blocks, Interval},
    envelope::{Buckets, demand},
    house::House,
    lies_between,
    need::{Search, amount, limits_of},
    packing::{Supply, pack},
    search::{Smallest, Terms, capacity, smallest},
    target::Target,
    trial::{Judge, Trial},
};
use crate::{latencies::Percentiles, simulate::Setup};

const MS: u64 = 1_000_000;
const S: u64 = 1000 * MS;

/// Reads of one disk, in bursts with idle time between them.
fn bursty(seed: u64, count: usize) -> Arrivals {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut arrivals, mut at) = (Arrivals::default(), 0);
    for number in 0..count {
        at += match random.u32(..20) {
            0 => random.u64(..2 * S),
            1..6 => random.u64(..30 * MS),
            _ => random.u64(..MS),
        };
        let length = [4096, 4096, 16_384, 262_144][random.usize(..4)];
        push(&mut arrivals, if number == 0 { 0 } else { at }, 0, Op::Read, length);
    }
    arrivals
}

fn push(arrivals: &mut Arrivals, time_ns: u64, disk: u32, op: Op, length: u64) {
    let record = Record { time_ns, offset: 0, length, line: 1, disk: DiskId(disk), file: 0, op };
    arrivals.push(&record, ["a", "b", "c", "d", "e"][disk as usize]);
}

fn setup(device: Option<&str>) -> Setup {
    let terms = crate::simulate::Terms {
        group: None,
        disk: settings::Settings::default(),
        prefetch: policy::prefetch::Settings::off(),
    };
    let device = device.map(|text| crate::simulate::device_of(&text.parse().unwrap(), None).unwrap());
    Setup::of_terms(&terms, UNKNOWN_SIZE, (None, None), device)
}

fn house(arrivals: &Arrivals, device: Option<&str>) -> House {
    House::of_setup(&setup(device), arrivals.streams.iter().map(|stream| stream.name.as_str())).unwrap()
}

/// The wait of each request by the policy's own decisions.
fn waits(arrivals: &Arrivals, limit: Limit, unit: Unit) -> Vec<u64> {
    let mut world = house(arrivals, None).world;
    let mut by_unit = [None; 2];
    by_unit[unit.index()] = Some(limit);
    world.disks[0].hold.limits = limits_of(by_unit);
    let mut engine = Engine::new(&world, true).unwrap();
    for Arrival { at_ns, op, length } in arrivals.streams[0].iter() {
        engine.arrive(Request { at_ns, disk: 0, op, offset: 0, length }, &AtomicBool::new(false));
    }
    while engine.run(1000) {}
    engine.take_rows().map(|row| row.admitted_ns - row.request.at_ns).collect()
}

#[test]
fn waits_computed_from_arrivals_are_those_of_the_policy() {
    for seed in 0..40 {
        let arrivals = bursty(seed, 400);
        let mut random = fastrand::Rng::with_seed(1000 + seed);
        for unit in Unit::ALL {
            let rate = if unit == Unit::Iops { random.u64(20..800) } else { random.u64(200_000..40_000_000) };
            for limit in [
                Limit { rate, ..Limit::NONE },
                Limit { rate, burst_rate: rate * 2, burst_length_s: 1 },
                Limit { rate, burst_rate: rate * 3, burst_length_s: 4 },
            ] {
                let expected = waits(&arrivals, limit, unit);
                let (mut buckets, mut before) = (Buckets::new(limit, unit), 0);
                let slice = 0.09 * rate as f64;
                let mut sliced = 0;
                for (expected, (at_ns, units)) in
                    expected.iter().zip(demand(arrivals.streams[0].iter(), unit))
                {
                    let after_s = (at_ns - std::mem::replace(&mut before, at_ns)) as f64 / 1e9;
                    let beyond = buckets.wait_s(after_s, units) * 1e9 - *expected as f64;
                    // A timer fires at whole nanoseconds. A large request may be admitted a slice
                    // sooner.
                    let is_sliced = unit == Unit::Bps && units > slice;
                    sliced += u32::from(is_sliced);
                    let most = if is_sliced { 90e6 } else { 1000.0 };
                    assert!((-1000.0..=most).contains(&beyond), "seed {seed}, {limit:?}, {at_ns}: {beyond}");
                }
                assert!(sliced < 200, "most are whole");
            }
        }
    }
}

fn terms(target: Target, over_s: f64) -> Terms {
    Terms { target, wait_s: target.time_s(), over_s }
}

/// Every limit of a grid is simulated with the policy's own decisions.
#[test]
fn no_limit_of_a_grid_does_with_less_than_what_was_found() {
    for seed in 0..12 {
        let arrivals = bursty(seed, 300);
        let target = Target::new(99.0, [0, 10 * MS, 100 * MS][seed as usize % 3]);
        let terms = terms(target, 20.0);
        let found =
            smallest(|| arrivals.streams[0].iter(), Unit::Iops, &amount(&arrivals, &[0], Unit::Iops), &terms)
                .unwrap();
        let allowed = target.allowed(300) as usize;
        let holds = |limit: Limit| {
            waits(&arrivals, limit, Unit::Iops).iter().filter(|&&wait| wait > target.time_ns).count()
                <= allowed
        };
        assert!(holds(found.limit), "seed {seed}: {found:?}");
        assert!(holds(Limit { rate: found.steady, ..Limit::NONE }), "seed {seed}: {found:?}");
        assert!(!holds(Limit { rate: found.steady * 97 / 100 - 1, ..Limit::NONE }), "seed {seed}: {found:?}");
        let mut least = f64::INFINITY;
        let busiest = amount(&arrivals, &[0], Unit::Iops).busiest.ceil() as u64;
        for step in 0..60 {
            let rate = (found.steady as f64 * 0.93_f64.powi(step)).ceil() as u64;
            if rate < busiest {
                break;
            }
            for burst in 0..24 {
                let burst_rate = if burst == 0 { 0 } else { (rate as f64 * 1.2_f64.powi(burst - 1)) as u64 };
                for burst_length_s in if burst == 0 { 1..=1 } else { 1..=3 } {
                    let limit = Limit { rate, burst_rate, burst_length_s };
                    if capacity(limit, 20.0) < least && holds(limit) {
                        least = capacity(limit, 20.0);
                    }
                }
            }
        }
        let cost = capacity(found.limit, 20.0);
        assert!(cost <= least * 1.05, "seed {seed}: {found:?} takes {cost}, and {least} does");
    }
}

fn judge(target: Target, whole: bool, arrivals: &Arrivals) -> Judge {
    Judge { target, whole, blocks: Blocks::new(arrivals.length_ns) }
}

/// The advice for a trace, as the command gives it.
fn advised(arrivals: &Arrivals, device: Option<&str>, whom: &[&str], target: Target) -> Advice {
    let mut house = house(arrivals, device);
    house.choose(&whom.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
    let (stop, judge) = (AtomicBool::new(false), judge(target, device.is_some(), arrivals));
    let search = Search { house: &house, arrivals, judge, over_s: 60.0, stop: &stop };
    advise(&search, None, &|_| ()).unwrap()
}

fn line<'a>(advice: &'a Advice, name: &str) -> &'a Line {
    advice.tenants.iter().find(|line| line.name == name).unwrap()
}

/// Latencies of all disks with a limit on one of them, as `weir simulate` computes them.
fn simulated(arrivals: &Arrivals, device: &str, limits: &[(usize, &figures::Limits)]) -> Vec<Percentiles> {
    let mut world = house(arrivals, Some(device)).world;
    for (disk, set) in limits {
        for (name, value) in *set {
            let setting = policy::throttle::Setting::from_name(name).unwrap();
            world.disks[*disk].hold.limits.set(setting, *value).unwrap();
        }
    }
    let mut engine = Engine::new(&world, false).unwrap();
    let all: Vec<usize> = (0..arrivals.streams.len()).collect();
    for (disk, Arrival { at_ns, op, length }) in arrivals.of(&all) {
        engine.arrive(Request { at_ns, disk, op, offset: 0, length }, &AtomicBool::new(false));
    }
    while engine.run(1000) {}
    all.iter().map(|&disk| Percentiles::of(&engine.disk(disk).0.latency)).collect()
}

/// A quiet disk with some 100 requests per second, and one with occasional bursts of 150.
fn noisy_neighbour(seed: u64, seconds: u64) -> Arrivals {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut requests = vec![(0, 0), (0, 1)];
    for tick in 0..seconds * 10 {
        requests.extend((0..10).map(|_| (tick * S / 10 + random.u64(..S / 10), 0)));
        if random.u32(..10) == 0 {
            requests.extend((0..150).map(|_| (tick * S / 10 + random.u64(..5 * MS), 1)));
        }
    }
    requests.sort_unstable();
    let mut arrivals = Arrivals::default();
    requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, Op::Read, 4096));
    arrivals
}

/// A thousand reads per second.
const DEVICE: &str = "read=1ms,parallel=1";

#[test]
fn a_noisy_neighbour_is_recorded_advised_upon_and_quiet() {
    let recorded = noisy_neighbour(1, 600);
    let before = simulated(&recorded, DEVICE, &[]);
    assert!(before[0].p99 > 100 * MS, "it is slow: {:?}", before[0]);
    let target = Target::new(99.0, 20 * MS);
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
    let again = advised(&recorded, Some(DEVICE), &["a"], target);
    assert_eq!(again.text(true), advice.text(true), "the same again");
}

#[test]
fn whoever_is_kept_from_the_target_by_its_own_limits_is_told() {
    let arrivals = noisy_neighbour(1, 60);
    let said = |rate: u64| {
        let mut house = house(&arrivals, Some(DEVICE));
        house.choose(&["a".to_owned()]).unwrap();
        house.world.disks[0].hold.limits = limits_of([Some(Limit { rate, ..Limit::NONE }), None]);
        let (stop, judge) = (AtomicBool::new(false), judge(Target::new(99.0, 20 * MS), true, &arrivals));
        let search = Search { house: &house, arrivals: &arrivals, judge, over_s: 60.0, stop: &stop };
        let advice = advise(&search, None, &|_| ()).unwrap();
        (advice.kept, advice.remarks.iter().any(|remark| remark.starts_with("a: its own limits, of the ")))
    };
    // Its demand is some 100 per second.
    assert_eq!((said(50), said(10_000)), ((false, true), (true, false)));
}

#[test]
fn limits_of_the_noisy_are_as_loose_as_a_scan_of_all_finds() {
    for seed in 10..14 {
        let arrivals = noisy_neighbour(seed, 30);
        let target = Target::new(99.0, 30 * MS);
        let advice = advised(&arrivals, Some(DEVICE), &["a"], target);
        let Some(set) = &line(&advice, "b").set else { continue };
        let rate = set["iops-total"];
        let p99 = |rate: u64| {
            let set = figures::Limits::from([("iops-total".to_owned(), rate)]);
            simulated(&arrivals, DEVICE, &[(1, &set)])[0].p99
        };
        assert!(p99(rate) <= 30 * MS * 101 / 100, "seed {seed}");
        let highest = (1..=200).map(|step| step * 10).filter(|&rate| p99(rate) <= 30 * MS).max().unwrap();
        assert!(rate * 108 / 100 >= highest, "seed {seed}: {rate}, and {highest} does");
    }
}

/// A disk with occasional bursts of 60, and one that keeps the device busy all the time.
fn busy_neighbour(seed: u64, seconds: u64) -> Arrivals {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut requests = vec![(0, 0), (0, 1)];
    for tick in 0..seconds * 10 {
        requests.extend((0..85).map(|_| (tick * S / 10 + random.u64(..S / 10), 1)));
        if random.u32(..10) == 0 {
            requests.extend((0..60).map(|_| (tick * S / 10 + random.u64(..5 * MS), 0)));
        }
    }
    requests.sort_unstable();
    let mut arrivals = Arrivals::default();
    requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, Op::Read, 4096));
    arrivals
}

/// Number of late requests beyond the allowance, in one group of this rate with these weights.
fn weighed(arrivals: &Arrivals, rate: u64, weights: &[u32], target: Target) -> Vec<u64> {
    let mut world = house(arrivals, Some(DEVICE)).world;
    for (disk, weight) in world.disks.iter_mut().zip(weights) {
        disk.hold.share = Share::new(*weight).unwrap();
    }
    world.put_together(limits_of([Some(Limit { rate, ..Limit::NONE }), None]));
    let trial = Trial { world: &world, disks: &[0, 1], tenants: &[0, 1], count: 2 };
    let judge = judge(target, true, arrivals);
    let felt = trial.run(arrivals.of(&[0, 1]), &judge, &AtomicBool::new(false)).unwrap();
    felt.iter().map(|felt| felt.over.saturating_sub(target.allowed(felt.requests))).collect()
}

/// Every group of a grid is simulated: its size, and the weight of the quiet disk.
#[test]
fn no_group_of_a_grid_is_larger_than_the_one_whose_weights_are_advised() {
    let mut advised_weights = 0;
    for seed in 20..24 {
        let (arrivals, target) = (busy_neighbour(seed, 30), Target::new(99.0, 120 * MS));
        let advice = advised(&arrivals, Some(DEVICE), &["a"], target);
        let number = |line: usize, option: &str| -> Option<u64> {
            let mut words = advice.commands.get(line)?.split(' ').skip_while(|word| *word != option);
            words.nth(1)?.parse().ok()
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
fn what_cannot_be_kept_is_said_with_what_could_be() {
    // Twice the capacity of the device.
    let mut arrivals = Arrivals::default();
    (0..4000).for_each(|number| push(&mut arrivals, number * MS, (number % 2) as u32, Op::Read, 4096));
    let advice = advised(&arrivals, Some("read=2ms,parallel=1"), &[], Target::new(99.0, 10 * MS));
    assert!(!advice.kept);
    let said = advice.remarks.join("\n");
    assert!(said.contains("the device cannot do it for all"), "{said}");
    assert!(said.contains("--keep p99="), "{said}");
    // Less than the service time of one request.
    let advice = advised(&arrivals, Some("read=2ms,parallel=9"), &["a"], Target::new(99.0, 0));
    let said = advice.remarks.join("\n");
    assert!(said.contains("a: without limits and alone on its device its p99 is 2.0ms"), "{said}");
    assert!(!advice.kept && advice.commands.is_empty());
}

#[test]
fn odd_traces_are_advised_upon_as_far_as_they_go() {
    let target = Target::new(99.0, 10 * MS);
    let mut flushes = Arrivals::default();
    (0..100).for_each(|number| push(&mut flushes, number * S, 0, Op::Flush, 0));
    let advice = advised(&flushes, None, &[], target);
    assert_eq!(advice.remarks, ["a: it only flushes, which no limit holds."]);
    assert!(advice.kept && advice.commands.is_empty());

    let mut one = Arrivals::default();
    push(&mut one, 0, 0, Op::Write, 4096);
    let advice = advised(&one, None, &[], target);
    assert!(advice.remarks[0].starts_with("a: too short to say: p99 takes 1000 requests, and there are 1."));
    assert_eq!(advice.commands, ["weir throttle a --bps-total 40K --iops-total 10"]);

    let mut jumping = Arrivals::default();
    (0..2000).for_each(|number| push(&mut jumping, number * MS, 0, Op::Read, 4096));
    (0..2000)
        .for_each(|number| push(&mut jumping, (u64::MAX >> 1) + number * MS, 0, Op::Read, u64::MAX >> 2));
    let advice = advised(&jumping, None, &[], target);
    assert!(advice.remarks[0].contains("only 2 of its"), "{:?}", advice.remarks);
    let advice = advised(&jumping, Some(DEVICE), &[], Target::new(99.0, 0));
    assert!(!advice.kept);
}

/// Tries all assignments of disks to this number of devices.
fn fits_on(arrivals: &Arrivals, device: &str, count: usize, target: Target) -> bool {
    let disks = arrivals.streams.len();
    (0..count.pow(disks as u32)).any(|mut way| {
        let places: Vec<usize> = (0..disks).map(|_| (way % count, way /= count).0).collect();
        (0..count).all(|place| {
            let together: Vec<usize> = (0..disks).filter(|&disk| places[disk] == place).collect();
            let house = house(arrivals, Some(device));
            let room = house.room(&house.world, &together);
            let trial = Trial {
                world: &room.world,
                disks: &room.disks,
                tenants: &room.tenant_of,
                count: together.len(),
            };
            let judge = judge(target, true, arrivals);
            let felt = trial.run(arrivals.of(&together), &judge, &AtomicBool::new(false)).unwrap();
            felt.iter().all(|felt| felt.holds(&target))
        })
    })
}

#[test]
fn no_way_to_put_disks_onto_fewer_devices_keeps_the_target() {
    for seed in 0..8 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut requests = Vec::new();
        for disk in 0..5 {
            let gap = random.u64(2..12) * MS;
            requests.extend((0..4 * S / gap).map(|number| (number * gap + random.u64(..gap), disk)));
        }
        requests.sort_unstable();
        let mut arrivals = Arrivals::default();
        (0..5).for_each(|disk| push(&mut arrivals, 0, disk, Op::Read, 4096));
        requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, Op::Read, 4096));
        let target = Target::new(99.0, 8 * MS);
        let house = house(&arrivals, None);
        let (stop, judge) = (AtomicBool::new(false), judge(target, true, &arrivals));
        let search = Search { house: &house, arrivals: &arrivals, judge, over_s: 60.0, stop: &stop };
        let device = "read=2ms,parallel=1";
        let supply = Supply::Any(crate::simulate::device_of(&device.parse().unwrap(), None).unwrap());
        let packing = pack(&search, &supply).unwrap();
        assert!(packing.left_over.is_empty(), "seed {seed}");
        let mut all: Vec<usize> = packing.devices.iter().flat_map(|packed| packed.tenants.clone()).collect();
        all.sort_unstable();
        assert_eq!(all, [0, 1, 2, 3, 4]);
        assert!(packing.devices.iter().all(|packed| packed.felt.iter().all(|felt| felt.holds(&target))));
        let count = packing.devices.len();
        assert!(count >= packing.at_least);
        assert!(
            count == 1 || !fits_on(&arrivals, device, count - 1, target),
            "seed {seed}: {count} are too many"
        );
    }
}

#[test]
fn an_interval_without_an_upper_end_says_so() {
    let arrivals = noisy_neighbour(1, 1);
    let house = house(&arrivals, None);
    let judge = judge(Target::new(99.0, 10 * MS), true, &arrivals);
    let stop = AtomicBool::new(false);
    let search = Search { house: &house, arrivals: &arrivals, judge, over_s: 60.0, stop: &stop };
    let limits = limits_of([Some(Limit { rate: 1000, ..Limit::NONE }), None]);
    let said = |low, high| lies_between(&search, "b", &limits, Interval { low, high });
    let this = "b: iops-total 1000 is for this trace";
    let days = "on 95 of 100 other days made of the same tenths it would be";
    assert_eq!(said(0.5, 2.0), format!("{this}; {days} between 500 and 2.0K."));
    assert_eq!(
        said(0.5, f64::INFINITY),
        format!("{this}; {days} at least 500, and this trace does not show how much at most.")
    );
    assert_eq!(
        said(0.0, f64::INFINITY),
        format!("{this}, whose tenths differ too much to estimate it for other days.")
    );
    let limits = limits_of([None, Some(Limit { rate: 2187 << 10, ..Limit::NONE })]);
    let said = lies_between(&search, "b", &limits, Interval { low: 0.5, high: 2.0 });
    assert!(said.starts_with("b: bps-total 2187K is for this trace; "), "{said}");
}

#[test]
fn a_limit_of_a_spared_disk_is_explained_without_a_device() {
    let arrivals = noisy_neighbour(1, 1);
    let stop = AtomicBool::new(false);
    let remark = |whom: Option<&str>, device: Option<&str>| {
        let mut house = house(&arrivals, device);
        house.choose(&whom.map(str::to_owned).into_iter().collect::<Vec<_>>()).unwrap();
        let judge = judge(Target::new(99.0, 10 * MS), house.has_device, &arrivals);
        let search = Search { house: &house, arrivals: &arrivals, judge, over_s: 60.0, stop: &stop };
        let advice = advise(&search, None, &|_| ()).unwrap();
        advice.remarks.into_iter().find(|remark| remark.contains("without a device"))
    };
    let name = house(&arrivals, None).tenants[0].name.clone();
    let said = remark(Some(&name), None).expect("a remark");
    assert!(
        said.starts_with(&format!("{name}: the limit is the smallest that it can have itself.")),
        "{said}"
    );
    assert_eq!(remark(None, None), None, "all disks are to be limited");
}

/// Disks of one group with this rate, on a device.
fn grouped(arrivals: &Arrivals, rate: u64, device: Option<&str>) -> House {
    let mut house = house(arrivals, device);
    house.world.put_together(limits_of([Some(Limit { rate, ..Limit::NONE }), None]));
    house.world.groups[0].name = "all".into();
    house.settle();
    house
}

#[test]
fn a_member_is_spared_in_its_group_as_it_is() {
    let (arrivals, target) = (busy_neighbour(20, 30), Target::new(99.0, 70 * MS));
    let of = |rate: u64, device: Option<&str>, whom: &str, target: Target| {
        let mut house = grouped(&arrivals, rate, device);
        house.choose(&[whom.to_owned()]).unwrap();
        let (stop, judge) = (AtomicBool::new(false), judge(target, device.is_some(), &arrivals));
        let search = Search { house: &house, arrivals: &arrivals, judge, over_s: 60.0, stop: &stop };
        advise(&search, None, &|_| ()).unwrap()
    };
    // Without a device they compete for the group's limit.
    let advice = of(900, None, "a", target);
    let (a, b) = (line(&advice, "a"), line(&advice, "b"));
    assert!(advice.kept && a.asked && !b.asked, "{}", advice.text(true));
    assert!(a.before.unwrap().wait_ns > 100 * MS, "{}", advice.text(true));
    let weight = a.joins.as_ref().map(|joins| joins.weight).unwrap();
    let command = format!("weir throttle a --weight {weight} --group all");
    assert_eq!(advice.commands, [&*command, "weir throttle b --weight 100 --group all"]);
    // They share a device, so the noisy one gets a limit.
    let advice = of(0, Some(DEVICE), "a", target);
    assert!(advice.kept, "{}", advice.text(true));
    let command = &advice.commands[..];
    assert!(command.len() == 1 && command[0].starts_with("weir throttle b --iops-total "), "{command:?}");
    // The group's limit stays, and makes the target impossible.
    let said = of(50, None, "a", target).remarks.join("\n");
    assert!(said.contains("a: without limits of its own and alone in all its p99 is "), "{said}");
    // No competition.
    let advice = of(100_000, None, "a", target);
    assert_eq!(advice.remarks.last().unwrap(), "a, b: together in all the target is kept without any limit.");
    // The group itself is advised upon as before.
    let advice = of(1000, None, "all", target);
    assert_eq!((advice.tenants.len(), advice.tenants[0].kind), (1, "group"));
    let error = grouped(&arrivals, 1000, None).choose(&["all".to_owned(), "a".to_owned()]).unwrap_err();
    assert!(error.starts_with("all: so is a disk in it"), "{error}");
}

#[test]
fn whoever_was_held_when_it_was_recorded_may_want_more() {
    let mut arrivals = busy_neighbour(20, 5);
    let said = |arrivals: &Arrivals| advised(arrivals, None, &[], Target::new(99.0, MS)).remarks.join("\n");
    // Occasional throttling of a burst is no reason for a remark.
    arrivals.streams[0].held = arrivals.streams[0].requests / 20;
    assert!(!said(&arrivals).contains("limits held"), "{}", said(&arrivals));
    arrivals.streams[0].held = arrivals.streams[0].requests / 2;
    assert!(
        said(&arrivals).contains("a: limits held 50 % of its requests when it was recorded."),
        "{}",
        said(&arrivals)
    );
}

#[test]
fn who_is_not_in_the_trace_is_not_advised_upon() {
    let arrivals = noisy_neighbour(1, 1);
    let error = house(&arrivals, None).choose(&["bb".to_owned()]).unwrap_err();
    assert!(error.starts_with("bb: the trace has no requests of"), "{error}");
}
