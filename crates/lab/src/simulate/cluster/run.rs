//! Runs the simulated cluster: changes demand, injects faults, and samples once a tick.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicBool, Ordering},
};

use policy::{
    cluster::{
        ClusterGroupLimits,
        simulated::{
            NANOS_PER_MS, NANOS_PER_S, SeededRandom, SimulatedCluster, SimulationConfig, StoreTraffic,
        },
    },
    throttle::LimitKind,
};
use simulator::cluster_values;

use super::{hosts::SimulatedHosts, hosts::shuffle, spec::ClusterSpec};

/// Grants in one transaction, as in the daemon: etcd's own bound.
const OPERATIONS: usize = 128;

/// State at the end of a tick.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClusterSample {
    pub(super) at_ns: u64,
    /// Requests per second since the last sample.
    pub(super) passed: f64,
    /// Sum of all quotas in force, as a share of the limit; the largest over all limits.
    pub(super) in_force: f64,
    /// Share of hosts near their ideal.
    pub(super) near: f64,
    /// Sum of all hosts' deviations, as a share of the limit.
    pub(super) off: f64,
    /// True if a host has more demand than quota.
    pub(super) is_wanted: bool,
    /// Cumulative traffic.
    pub(super) traffic: StoreTraffic,
    /// Ticks since the last change, or since the start.
    pub(super) since: u64,
    /// Number of changes so far.
    pub(super) phase: usize,
}

#[derive(Debug)]
pub(super) struct ClusterOutcome {
    pub(super) samples: Vec<ClusterSample>,
    /// Time of each change, and the number of hosts that changed.
    pub(super) changes: Vec<(u64, usize)>,
    /// Time and description of each fault.
    pub(super) faults: Vec<(u64, String)>,
    /// Phases with a fault in them or in the previous phase.
    pub(super) disturbed: Vec<usize>,
    /// Maximum of the quotas in force at any instant, as a share of the limit.
    pub(super) max_in_force: f64,
    pub(super) violation: Option<String>,
    pub(super) max_requests: f64,
    pub(super) partial: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClusterFault {
    LeaderDies,
    EtcdStops,
    EtcdStarts,
    Cut,
    Healed,
    Crash,
}

struct ClusterRun<'a> {
    spec: &'a ClusterSpec,
    world: SimulatedCluster,
    hosts: SimulatedHosts,
    random: SeededRandom,
    faults: BTreeMap<(u64, usize), ClusterFault>,
    cut: Vec<usize>,
    limits: ClusterGroupLimits,
    passed: u64,
    changed_at: u64,
    outcome: ClusterOutcome,
}

/// Runs until the end, or until `stop`. The callback receives the progress in nanoseconds.
pub(super) fn run(
    spec: &ClusterSpec,
    limits: ClusterGroupLimits,
    seed: u64,
    stop: &AtomicBool,
    report_progress: impl Fn(u64),
) -> ClusterOutcome {
    let mut run = ClusterRun::new(spec, limits, seed);
    let tick = spec.timing.tick.as_nanos() as u64;
    let every = (spec.every.as_nanos() as u64).div_ceil(tick);
    for number in 1..=(spec.seconds * NANOS_PER_S).div_ceil(tick) {
        if stop.load(Ordering::Relaxed) {
            // The samples until now are still evaluated.
            run.outcome.partial = Some(crate::result::INTERRUPTED.to_owned());
            break;
        }
        // Between ticks the world runs by events; samples are taken at whole ticks.
        run.world.run_until(number * tick);
        run.sample();
        report_progress(number * tick);
        run.inject_faults();
        // After the sample, which still belongs to the old phase.
        if number % every == 0 && spec.change > 0 {
            run.change();
        }
    }
    run.finish()
}

impl<'a> ClusterRun<'a> {
    fn new(spec: &'a ClusterSpec, limits: ClusterGroupLimits, seed: u64) -> Self {
        let mut random = SeededRandom::new(seed);
        let hosts = SimulatedHosts::new(spec, limits, &mut random);
        // Uniform between half and one and a half times the mean.
        let latency = spec.latency.as_nanos() as u64;
        let setting = SimulationConfig {
            timing: spec.timing,
            delay_ns: (latency / 2, latency * 3 / 2),
            late: None,
            drift_ppm: spec.drift_ppm,
            leaders: spec.candidates,
            has_peers: false,
            rereads: false,
            max_grants_per_transaction: OPERATIONS,
            value_bytes: cluster_values::length,
        };
        let world = SimulatedCluster::new(seed, limits, &hosts.clients(), setting);
        let outcome = ClusterOutcome {
            samples: Vec::new(),
            changes: Vec::new(),
            faults: Vec::new(),
            disturbed: Vec::new(),
            max_in_force: 0.0,
            violation: None,
            max_requests: hosts.max_requests,
            partial: None,
        };
        let faults = faults(spec, &mut random);
        let cut = Vec::new();
        Self { spec, world, hosts, random, faults, cut, limits, passed: 0, changed_at: 0, outcome }
    }

    fn share_of_limit(&self, in_force: [u64; 6]) -> f64 {
        let part = |kind: LimitKind| match self.limits.limits().limit(kind).rate {
            0 => 0.0,
            rate => in_force[kind.index()] as f64 / rate as f64,
        };
        LimitKind::ALL.into_iter().map(part).fold(0.0, f64::max)
    }

    fn sample(&mut self) {
        let tick = self.spec.timing.tick.as_nanos() as u64;
        let passed: u64 = self.world.admissions.iter().map(|(passed, _)| passed).sum();
        let (mut near, mut deviation_sum) = (0_usize, 0.0);
        for (host, machine) in self.world.machines.iter().enumerate() {
            let (deviation, is_near) = self.hosts.deviation(host, self.hosts.requests(machine.host.rates()));
            deviation_sum += deviation;
            near += usize::from(is_near);
        }
        self.outcome.samples.push(ClusterSample {
            at_ns: self.world.now,
            passed: (passed - self.passed) as f64 * NANOS_PER_S as f64 / tick as f64,
            in_force: self.share_of_limit(self.world.in_force()),
            near: near as f64 / self.spec.hosts as f64,
            off: deviation_sum / self.hosts.max_requests,
            is_wanted: self.hosts.somebody_is_busy(),
            traffic: self.world.store.traffic,
            since: (self.world.now - self.changed_at) / tick,
            phase: self.outcome.changes.len(),
        });
        self.passed = passed;
    }

    fn change(&mut self) {
        let changed = self.hosts.change(&mut self.random);
        for host in &changed {
            for disk in 0..self.spec.disks {
                self.world.set_load(*host, disk, self.hosts.load(*host));
            }
        }
        self.changed_at = self.world.now;
        self.outcome.changes.push((self.world.now, changed.len()));
    }

    fn inject_faults(&mut self) {
        while let Some((&key, _)) = self.faults.first_key_value()
            && key.0 <= self.world.now
        {
            let Some(fault) = self.faults.remove(&key) else { return };
            let description = self.inject(fault);
            let phase = self.outcome.changes.len();
            // Recovery may extend into the next phase.
            self.outcome.disturbed.extend([phase, phase + 1]);
            self.outcome.faults.push((self.world.now, description));
        }
    }

    fn inject(&mut self, fault: ClusterFault) -> String {
        match fault {
            ClusterFault::LeaderDies => {
                let Some(leader) = self.world.leader() else { return "there is no leader".to_owned() };
                self.world.restart(leader);
                "the leader dies".to_owned()
            }
            ClusterFault::EtcdStops => {
                self.world.store.stop();
                "etcd stops".to_owned()
            }
            ClusterFault::EtcdStarts => {
                self.world.start_store();
                "etcd is back".to_owned()
            }
            ClusterFault::Cut => {
                let mut all: Vec<_> = (0..self.spec.hosts).collect();
                shuffle(&mut all, &mut self.random);
                all.truncate(self.spec.hosts.div_ceil(100));
                all.iter().for_each(|host| self.world.set_partitioned(*host, true));
                let description = format!("{} cut off", all.len());
                self.cut.extend(all);
                description
            }
            ClusterFault::Healed => {
                let cut = std::mem::take(&mut self.cut);
                cut.iter().for_each(|host| self.world.set_partitioned(*host, false));
                format!("{} reached again", cut.len())
            }
            ClusterFault::Crash => {
                let host = self.random.below(self.spec.hosts as u64) as usize;
                self.world.restart(host);
                "a host crashes and starts".to_owned()
            }
        }
    }

    fn finish(mut self) -> ClusterOutcome {
        self.outcome.violation = self.world.violation().map(str::to_owned);
        self.outcome.max_in_force = self.share_of_limit(self.world.max_in_force());
        self.outcome
    }
}

/// Schedules faults after the first quarter of the time, when there is a leader and quotas.
fn faults(spec: &ClusterSpec, random: &mut SeededRandom) -> BTreeMap<(u64, usize), ClusterFault> {
    let mut faults = BTreeMap::new();
    let mut add = |at: u64, fault: ClusterFault| {
        let number = faults.len();
        faults.insert((at, number), fault);
    };
    let away = spec.faults.away.as_nanos() as u64;
    let end = spec.seconds * NANOS_PER_S;
    let planned = [
        (spec.faults.leader_deaths, ClusterFault::LeaderDies, None),
        (spec.faults.etcd_stops, ClusterFault::EtcdStops, Some(ClusterFault::EtcdStarts)),
        (spec.faults.cuts, ClusterFault::Cut, Some(ClusterFault::Healed)),
        (spec.faults.crashes, ClusterFault::Crash, None),
    ];
    for (count, begins, ends) in planned {
        for _ in 0..count {
            // Whole milliseconds, for readable reports.
            let at = end / 4 + random.below((end * 3 / 4).max(1)) / NANOS_PER_MS * NANOS_PER_MS;
            add(at, begins);
            if let Some(ends) = ends {
                add(at + away, ends);
            }
        }
    }
    faults
}
