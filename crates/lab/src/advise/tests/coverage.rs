//! Coverage of the confidence intervals: how often they contain the demand of another day of the
//! same kind, which they are about, and of ten days together.
//!
//! `WEIR_SEEDS=n` uses n days of each kind instead of a few. The counts are printed
//! (`--nocapture`); the same seeds always give the same counts.

use std::collections::BTreeMap;

use policy::throttle::LimitKind;

use super::{
    super::{
        arrival_curve::late_requests,
        confidence::{ConfidenceInterval, limit_interval},
        neighbours::{NeighbourAdvice, NeighbourPlan, Neighbours, cost},
        simulate_all,
    },
    *,
};

/// Number of days of each kind.
fn seeds(usual: u64) -> u64 {
    std::env::var("WEIR_SEEDS").map_or(usual, |number| number.parse().expect("WEIR_SEEDS is a number"))
}

/// Counts by case: intervals that contain the truth, and ratios of upper to lower ends.
#[derive(Default)]
struct CoverageTally {
    cases: u64,
    /// For another day, and for ten days together.
    contained: [u64; 2],
    widths: Vec<f64>,
}

impl CoverageTally {
    fn note(&mut self, contained: [bool; 2], width: f64) {
        self.cases += 1;
        self.contained.iter_mut().zip(contained).for_each(|(sum, held)| *sum += u64::from(held));
        self.widths.push(width);
    }

    fn median(&self) -> f64 {
        let mut widths = self.widths.clone();
        widths.sort_by(f64::total_cmp);
        widths[widths.len() / 2]
    }

    fn add(&mut self, other: &Self) {
        self.cases += other.cases;
        self.contained.iter_mut().zip(other.contained).for_each(|(sum, held)| *sum += held);
        self.widths.extend(&other.widths);
    }

    fn shown(&self, name: &str) -> String {
        let ([day, days], cases) = (self.contained, self.cases);
        let width = self.median();
        format!("{name}: {day} of {cases} hold another day, {days} ten together; {width:.2} times wide")
    }
}

/// Fails if the coverage is below the nominal 95 of 100. With few cases one more interval may miss,
/// and ten days together contain rarer moments.
#[allow(clippy::print_stdout, reason = "what was counted is what a soak is for")]
fn assert_coverage(tallies: &BTreeMap<String, CoverageTally>) {
    let mut all = CoverageTally::default();
    for (name, tally) in tallies {
        println!("{}", tally.shown(name));
        all.add(tally);
    }
    let (summary, missed) = (all.shown("all"), all.contained.map(|held| all.cases - held));
    println!("{summary}");
    assert!(all.cases > 0 && missed[0] <= 1 + all.cases / 20, "{summary}");
    assert!(missed[1] <= 1 + all.cases / 8, "{summary}");
    assert!(all.median() < 2.0, "it says something: {summary}");
}

/// Single requests of one disk, with varying lengths.
struct Disk {
    arrivals: TraceArrivals,
    random: fastrand::Rng,
    at_s: f64,
}

impl Disk {
    fn new(seed: u64) -> Self {
        Self { arrivals: TraceArrivals::default(), random: fastrand::Rng::with_seed(seed), at_s: 0.0 }
    }

    /// A value from an exponential distribution.
    fn drawn(&mut self, mean: f64) -> f64 {
        -(1.0 - self.random.f64()).ln() * mean
    }

    fn push_request(&mut self) {
        let length = [4096, 4096, 16_384, 65_536][self.random.usize(..4)];
        push(&mut self.arrivals, (self.at_s * 1e9) as u64, 0, RequestOp::Read, length);
    }
}

/// A rate that changes every few seconds, and is occasionally three times the usual.
fn uneven(seed: u64, seconds: u64) -> TraceArrivals {
    let mut disk = Disk::new(seed);
    let (mut rate, mut until_s) = (0.0, 0.0);
    while disk.at_s < seconds as f64 {
        if disk.at_s >= until_s {
            rate = [20.0, 60.0, 100.0, 300.0][disk.random.usize(..4)];
            until_s = disk.at_s + disk.random.f64() * 20.0;
        }
        disk.at_s += disk.drawn(1.0 / rate);
        disk.push_request();
    }
    disk.arrivals
}

/// Bursts of 200 every four seconds, and occasionally of a thousand.
fn rushes(seed: u64, seconds: u64) -> TraceArrivals {
    let mut disk = Disk::new(seed);
    while disk.at_s < seconds as f64 {
        disk.at_s += disk.drawn(4.0);
        for _ in 0..=disk.drawn(200.0) as u64 {
            disk.push_request();
            disk.at_s += 20e-6;
        }
    }
    disk.arrivals
}

/// Random arrivals without bursts.
fn even(seed: u64, seconds: u64) -> TraceArrivals {
    let mut disk = Disk::new(seed);
    while disk.at_s < seconds as f64 {
        disk.at_s += disk.drawn(0.01);
        disk.push_request();
    }
    disk.arrivals
}

fn noisy(seed: u64, seconds: u64) -> TraceArrivals {
    let (both, mut alone) = (noisy_neighbour(seed, seconds), TraceArrivals::default());
    both.streams[1].iter().for_each(|arrival| push(&mut alone, arrival.at_ns, 0, arrival.op, arrival.length));
    alone
}

type Kind = (&'static str, fn(u64, u64) -> TraceArrivals);

#[test]
fn interval_coverage_matches_its_confidence() {
    const TARGETS: [(f64, u64); 4] = [(99.0, 10), (95.0, 10), (99.0, 200), (99.9, 50)];
    const DAY_S: u64 = 1000;
    let kinds: [Kind; 4] = [("noisy", noisy), ("uneven", uneven), ("rushes", rushes), ("even", even)];
    let mut tallies = BTreeMap::<String, CoverageTally>::new();
    for (name, day_of) in kinds {
        let days = day_of(7, 10 * DAY_S);
        for seed in 0..seeds(8) {
            let (percent, wait_ms) = TARGETS[seed as usize % TARGETS.len()];
            let (target, unit) = (
                LatencyTarget::new(percent, wait_ms * MS),
                ReservationUnit::ALL[seed as usize / TARGETS.len() % 2],
            );
            let (terms, day) = (terms(target, 60.0), day_of(seed + 100, DAY_S));
            let requests = || day.streams[0].iter();
            let SmallestLimits { limit, .. } =
                smallest(requests, unit, &amount(&day, &[0], unit), &terms).expect("there is one");
            let found = limit_interval(
                demand(requests(), unit),
                unit,
                limit,
                &terms,
                TraceBlocks::new(day.length_ns),
            );
            let ConfidenceInterval { low, high } = found.expect("it is long enough");
            let holds = |arrivals: &TraceArrivals| {
                let does = |factor: f64| {
                    let stream = &arrivals.streams[0];
                    let over = late_requests(demand(stream.iter(), unit), unit, limit, factor, terms.wait_s);
                    over <= target.allowed_late(stream.requests)
                };
                (low == 0.0 || !does(low * 0.99)) && (high.is_infinite() || does(high))
            };
            let tally = tallies.entry(format!("{name}, {}", target.name())).or_default();
            tally.note([holds(&day_of(seed + 100_000, DAY_S)), holds(&days)], high / low);
        }
    }
    assert_coverage(&tallies);
}

/// A neighbour whose rate changes every few seconds, and occasionally exceeds the device's
/// capacity.
fn uneven_neighbour(seed: u64, seconds: u64) -> TraceArrivals {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut requests, mut rate, mut ticks) = (vec![(0, 0), (0, 1)], 0, 0);
    for tick in 0..seconds * 10 {
        if ticks == 0 {
            (rate, ticks) = ([0, 10, 40, 120][random.usize(..4)], random.u32(1..100));
        }
        ticks -= 1;
        requests.extend((0..10).map(|_| (tick * S / 10 + random.u64(..S / 10), 0)));
        requests.extend((0..rate).map(|_| (tick * S / 10 + random.u64(..S / 10), 1)));
    }
    requests.sort_unstable();
    let mut arrivals = TraceArrivals::default();
    requests.iter().for_each(|&(at, disk)| push(&mut arrivals, at, disk, RequestOp::Read, 4096));
    arrivals
}

/// The advice for the first of two disks on a device.
fn advice_for_first(arrivals: &TraceArrivals, target: LatencyTarget) -> NeighbourAdvice {
    let mut all_tenants = tenants(arrivals, Some(DEVICE));
    all_tenants.restrict_target(&["a".to_owned()]).unwrap();
    let (stop, judge) = (AtomicBool::new(false), criterion(target, true, arrivals));
    let search =
        AdviseSearch { tenants: &all_tenants, arrivals, criterion: judge, over_s: 60.0, stop: &stop };
    let needs = [0, 1].map(|tenant| search.limits_alone(tenant, &[cost(&search, tenant).0]).unwrap());
    let before = simulate_all(&search, &all_tenants.world).unwrap();
    Neighbours::new(search, &[0, 1], &needs, &before).best_plan().unwrap()
}

/// True if the first disk keeps its target with this rate in a plan's limit.
fn keeps(arrivals: &TraceArrivals, plan: &NeighbourPlan, rate: f64, target: LatencyTarget) -> bool {
    let rate = rate as u64;
    let (mut world, limits) = (
        tenants(arrivals, Some(DEVICE)).world,
        limits_of([Some(RateLimit { rate, ..RateLimit::NONE }), None]),
    );
    match &plan.group {
        Some((_, shares)) => {
            world.disks.iter_mut().zip(shares).for_each(|(disk, share)| disk.settings.share = *share);
            world.add_common_group(limits);
        }
        None => world.disks[1].settings.limits = limits,
    }
    let trial = SimulatedTrial { world: &world, disks: &[0, 1], tenants: &[0, 1], count: 2 };
    let criterion = criterion(target, true, arrivals);
    trial.run(arrivals.merged(&[0, 1]), &criterion, &AtomicBool::new(false)).unwrap()[0].holds(&target)
}

#[test]
fn shared_device_interval_coverage_matches_its_confidence() {
    const DAY_S: u64 = 200;
    let kinds: [(Kind, u64); 3] = [
        (("noisy neighbour", noisy_neighbour), 20),
        (("uneven neighbour", uneven_neighbour), 40),
        (("busy neighbour", busy_neighbour), 120),
    ];
    let mut tallies = BTreeMap::<String, CoverageTally>::new();
    for ((name, day_of), wait_ms) in kinds {
        let (target, days) = (LatencyTarget::new(99.0, wait_ms * MS), day_of(7, 10 * DAY_S));
        for seed in 0..seeds(1) {
            let NeighbourAdvice { plan, interval, .. } = advice_for_first(&day_of(seed + 100, DAY_S), target);
            let Some(ConfidenceInterval { low, high }) = interval else { continue };
            let (plan_kind, limits) = match &plan.group {
                Some((limits, _)) => ("group", *limits),
                None => ("limit", plan.limits[1].expect("the noisy is limited")),
            };
            let rate = limits.limit(LimitKind::IopsTotal).rate as f64;
            // The highest sufficient rate must lie between them.
            let holds = |arrivals: &TraceArrivals| {
                let keeps = |factor: f64| keeps(arrivals, &plan, rate * factor, target);
                (low == 0.0 || keeps(low * 0.99)) && (high.is_infinite() || !keeps(high * 1.01))
            };
            let tally = tallies.entry(format!("{name}, {plan_kind}")).or_default();
            tally.note([holds(&day_of(seed + 100_000, DAY_S)), holds(&days)], high / low);
        }
    }
    assert_coverage(&tallies);
}
