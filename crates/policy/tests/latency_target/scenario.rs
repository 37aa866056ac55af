//! Scenarios: a device, a load that changes, and the judgement of a law.
//!
//! Judged are the windows of 10 s that begin at least 2 s after a change and end before the next.

use policy::cluster::simulated::SeededRandom;
use policy::latency_target::{
    LatencyController, MemberClass, MemberSample, PercentileTarget, RateCap, TargetDirections, TargetState,
};
use policy::throttle::{LimitKind, Limits, NodeShare};
use policy::time::Instant;

use crate::device::{Allowance, ClientModel, MS, ParallelDevice, S, Sample, Simulation, value_at};

pub(crate) const BOUND_NS: u64 = 5 * MS;
/// The bound of judged windows.
pub(crate) const JUDGED_NS: u64 = 5_500_000;
const SETTLING_NS: u64 = 2 * S;
const WINDOW_NS: u64 = 10 * S;
/// Distance of two changes: a judged window begins in half a second.
const SEGMENT_NS: u64 = SETTLING_NS + WINDOW_NS + S / 2;

/// A control law. The first client has a target of [`BOUND_NS`] at the 99th percentile.
pub(crate) trait Law {
    /// Interval between steps in nanoseconds.
    fn interval_ns(&self) -> u64 {
        50 * MS
    }

    /// Allowances of all clients.
    fn step(&mut self, now_ns: u64, samples: &[Sample]) -> Vec<Allowance>;
}

/// weir's controller, with the settings of each client. Checks the invariants in each step.
pub(crate) struct WeirLaw {
    controller: LatencyController,
    settings: Vec<MemberRole>,
    max_rate: f64,
}

/// Settings of a member.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemberRole {
    pub(crate) class: MemberClass,
    pub(crate) share: NodeShare,
    pub(crate) floor: u64,
}

impl MemberRole {
    pub(crate) fn new(class: MemberClass, weight: u32, iops_reservation: u64, floor: u64) -> Self {
        let share = NodeShare::new(weight).unwrap().with_reservation(iops_reservation, 0);
        Self { class, share, floor }
    }

    /// The client with a target.
    pub(crate) fn target() -> Self {
        let target = PercentileTarget::new(BOUND_NS, 9900, TargetDirections::All).unwrap();
        Self::new(MemberClass::Target(target), 100, 0, 0)
    }
}

impl WeirLaw {
    /// A client with a target and three without.
    pub(crate) fn equal() -> Self {
        let ordinary = MemberRole::new(MemberClass::Ordinary, 100, 0, 40);
        Self::new(vec![MemberRole::target(), ordinary, ordinary, ordinary])
    }

    pub(crate) fn new(settings: Vec<MemberRole>) -> Self {
        Self { controller: LatencyController::new(), settings, max_rate: 0.0 }
    }

    fn check(&mut self, samples: &[Sample]) {
        let requests: u64 = samples.iter().map(|sample| sample.requests).sum();
        self.max_rate = self.max_rate.max(requests as f64 * 1e9 / self.interval_ns() as f64);
        let caps: Vec<Option<u64>> = (0..self.settings.len() as u64)
            .map(|client| self.controller.cap(client).map(RateCap::units_per_s))
            .collect();
        let is_controlling = self.controller.state(0) == Some(TargetState::Controlling);
        assert!(caps[0].is_none(), "the member with the target is capped");
        assert!(caps[1..].iter().all(|cap| cap.is_some() == is_controlling), "{caps:?} without a cause");
        let minimum = |settings: &MemberRole| settings.floor.max(settings.share.iops_reservation());
        for (cap, settings) in caps.iter().zip(&self.settings) {
            assert!(cap.is_none_or(|cap| cap >= minimum(settings)), "{cap:?} is below that of {settings:?}");
        }
        let minima: u64 = self.settings.iter().map(minimum).sum();
        let sum: u64 = caps.iter().flatten().sum();
        // Minima are rounded up and raised by 3 % at most.
        assert!(sum as f64 <= (2.0 * self.max_rate).max(1.03 * minima as f64 + 4.0), "{caps:?} is too much");
    }
}

impl Law for WeirLaw {
    fn step(&mut self, now_ns: u64, samples: &[Sample]) -> Vec<Allowance> {
        let member = |(key, (sample, settings)): (u64, (_, &MemberRole))| {
            let MemberRole { class, share, floor } = *settings;
            let sample: &Sample = sample;
            MemberSample {
                key,
                class,
                share,
                floor: Some(floor),
                requests: sample.requests,
                bytes: sample.bytes,
                in_flight: [sample.in_flight.into(), 0],
                mean_in_flight: 0.0,
                is_waiting: sample.is_waiting,
                latencies: Some(&sample.latencies),
            }
        };
        let members: Vec<_> = (0..).zip(samples.iter().zip(&self.settings)).map(member).collect();
        self.controller.step(Instant::from_nanos(now_ns), &members);
        self.check(samples);
        let limits = |client: u64| self.controller.cap(client).map(RateCap::limits);
        let allowance = |client| Allowance { limits: limits(client).unwrap_or_default(), window: None };
        (0..samples.len() as u64).map(allowance).collect()
    }
}

/// Constant limits.
pub(crate) struct StaticLimits {
    /// Operations per second of all clients except the first, together.
    pub(crate) iops: u64,
}

impl Law for StaticLimits {
    fn step(&mut self, _: u64, samples: &[Sample]) -> Vec<Allowance> {
        shared_rate(self.iops as f64, samples.len())
    }
}

/// Allowances of equal parts of a rate for all clients except the first.
pub(crate) fn shared_rate(iops: f64, clients: usize) -> Vec<Allowance> {
    let mut limits = Limits::default();
    limits.limit_mut(LimitKind::IopsTotal).rate = ((iops / (clients - 1) as f64) as u64).max(1);
    let limited = Allowance { limits, window: None };
    (0..clients).map(|client| if client == 0 { Allowance::default() } else { limited }).collect()
}

/// A device, its clients, and the instants at which speed or load change.
#[derive(Clone, Debug)]
pub(crate) struct LoadScenario {
    pub(crate) device: ParallelDevice,
    pub(crate) clients: Vec<ClientModel>,
    pub(crate) changes: Vec<u64>,
}

/// A change of the three disks' load or of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// Queue depth of each of the three.
    Depth(u32),
    /// Speed of the device.
    Speed(f64),
}

impl LoadScenario {
    /// A client at depth 1 beside three that each change depth, on a device that changes speed.
    pub(crate) fn new(servers: usize, mean_ns: f64, sigma: f64, changes: &[Change]) -> Self {
        let mut scenario = Self {
            device: ParallelDevice { servers, mean_ns, sigma, speeds: vec![(0, 1.0)] },
            clients: vec![ClientModel { depths: vec![(0, 1)], bytes: 4096 }],
            changes: Vec::new(),
        };
        let mut depths = vec![(0, 0)];
        for (index, change) in (0..).zip(changes) {
            let at = S / 2 + index * SEGMENT_NS;
            scenario.changes.push(at);
            match *change {
                Change::Depth(depth) => depths.push((at, depth)),
                Change::Speed(speed) => scenario.device.speeds.push((at, speed)),
            }
        }
        scenario.clients.resize(4, ClientModel { depths, bytes: 4096 });
        scenario
    }

    /// The device of the requirement: p99 is 1 ms alone, and 30 ms beside three disks at depth 64.
    pub(crate) fn required(changes: &[Change]) -> Self {
        Self::new(3, 0.43e6, 0.4, changes)
    }

    /// A random device, on which the three are switched on, and a random change. The client alone
    /// has a 99th percentile of at most 70 % of the bound.
    pub(crate) fn random(seed: u64) -> Self {
        let mut random = SeededRandom::new(seed);
        let servers = random.between(1, 6) as usize;
        let capacity = random.between(3000, 10_000) as f64;
        let sigma = random.between(20, 50) as f64 / 100.0;
        let depth = [32, 64, 96][random.below(3) as usize];
        let change = match random.below(5) {
            0 => Change::Depth(depth * 2),
            1 => Change::Depth(depth / 2),
            2 => Change::Speed(random.between(120, 250) as f64 / 100.0),
            _ => Change::Speed(random.between(40, 90) as f64 / 100.0),
        };
        let slowest = if let Change::Speed(speed) = change { speed.min(1.0) } else { 1.0 };
        // The 99th percentile of a lognormal distribution, relative to its mean.
        let percentile = (2.326 * sigma - sigma * sigma / 2.0).exp();
        let max_mean_ns = 0.7 * BOUND_NS as f64 * slowest / percentile;
        let mean_ns = (servers as f64 * 1e9 / capacity).min(0.8e6).min(max_mean_ns);
        Self::new(servers, mean_ns, sigma, &[Change::Depth(depth), change])
    }

    fn end(&self, segment: usize) -> u64 {
        self.changes.get(segment + 1).copied().unwrap_or(self.changes[segment] + SEGMENT_NS)
    }

    /// Runs a law.
    pub(crate) fn run(&self, seed: u64, law: &mut dyn Law) -> Run {
        let mut simulation = Simulation::new(self.device.clone(), &self.clients, seed);
        let mut completed = vec![(0, 0)];
        while simulation.now < self.end(self.changes.len() - 1) {
            let allowances = law.step(simulation.now, &simulation.take_samples());
            for (client, allowance) in allowances.into_iter().enumerate() {
                simulation.allow(client, allowance);
            }
            simulation.run_until(simulation.now + law.interval_ns());
            let others = (1..self.clients.len()).map(|client| simulation.completed(client)).sum();
            completed.push((simulation.now, others));
        }
        let segment = |segment: usize| {
            let (from, until) = (self.changes[segment], self.end(segment));
            Segment::new(&simulation.latencies, &completed, from, until)
        };
        Run {
            segments: (0..self.changes.len()).map(segment).collect(),
            completed: (0..self.clients.len()).map(|client| simulation.completed(client)).collect(),
        }
    }

    /// Result of constant limits under the load and the speed of a segment, in a run of their own.
    pub(crate) fn with_static_limits(&self, seed: u64, segment: usize, iops: u64) -> Segment {
        let at = self.changes[segment];
        let mut constant = self.clone();
        constant.changes = vec![S / 2];
        constant.device.speeds = vec![(0, value_at(&self.device.speeds, at))];
        for client in &mut constant.clients[1..] {
            client.depths = vec![(0, 0), (S / 2, value_at(&client.depths, at))];
        }
        constant.run(seed, &mut StaticLimits { iops }).segments[0]
    }

    /// IOPS of the others in a segment with the best constant limit that keeps all judged windows.
    pub(crate) fn oracle(&self, seed: u64, segment: usize) -> f64 {
        let (mut low, mut high) = (0, 40_000);
        let mut best = 0.0_f64;
        while high - low > 50 {
            let iops = (low + high) / 2;
            let result = self.with_static_limits(seed, segment, iops);
            if result.worst_ns <= JUDGED_NS {
                (low, best) = (iops, best.max(result.others_iops));
            } else {
                high = iops;
            }
        }
        best
    }
}

/// Result of a law.
pub(crate) struct Run {
    pub(crate) segments: Vec<Segment>,
    /// Completed requests of each client.
    pub(crate) completed: Vec<u64>,
}

/// Result between two changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    /// Time after which at most twice the allowed share is late, for at least a second.
    pub(crate) settled_ns: u64,
    /// Largest 99th percentile of the judged windows.
    pub(crate) worst_ns: u64,
    /// IOPS of the others after the settling time.
    pub(crate) others_iops: f64,
}

impl Segment {
    fn new(latencies: &[(u64, u64)], completed: &[(u64, u64)], from: u64, until: u64) -> Self {
        let starts = (from + SETTLING_NS..=until - WINDOW_NS).step_by((S / 8) as usize);
        let worst_ns = starts.map(|start| percentile_99(latencies, start, start + WINDOW_NS)).max();
        let at = |instant| completed[completed.partition_point(|(at, _)| *at < instant)];
        let (first, last) = (at(from + SETTLING_NS), at(until));
        let others_iops = (last.1 - first.1) as f64 * 1e9 / (last.0 - first.0) as f64;
        Self { settled_ns: settled_ns(latencies, from, until), worst_ns: worst_ns.unwrap_or(0), others_iops }
    }
}

fn between(latencies: &[(u64, u64)], from: u64, until: u64) -> &[(u64, u64)] {
    let index = |instant| latencies.partition_point(|(at, _)| *at < instant);
    &latencies[index(from)..index(until)]
}

fn percentile_99(latencies: &[(u64, u64)], from: u64, until: u64) -> u64 {
    let mut window: Vec<u64> = between(latencies, from, until).iter().map(|(_, latency)| *latency).collect();
    window.sort_unstable();
    let rank = (window.len() * 99).div_ceil(100);
    rank.checked_sub(1).map_or(u64::MAX, |index| window[index])
}

/// Start of the first second, since `from`, in which at most twice the allowed share of completions
/// is late.
fn settled_ns(latencies: &[(u64, u64)], from: u64, until: u64) -> u64 {
    let is_settled = |start: &u64| {
        let second = between(latencies, *start, start + S);
        let late = second.iter().filter(|(_, latency)| *latency > BOUND_NS).count();
        !second.is_empty() && late * 50 <= second.len()
    };
    (from..until).step_by((100 * MS) as usize).find(is_settled).map_or(until - from, |start| start - from)
}
