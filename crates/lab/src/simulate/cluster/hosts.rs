//! What each host wants, and which part of the limits it should have: the ideal that parts in force
//! are held against.

use policy::{
    cluster::{
        ByKind, Claim, Spec, divide,
        simulated::{Client, Load, Random, S},
    },
    throttle::LimitKind,
};

use super::spec::ClusterSpec;

/// Within so much of its ideal share a host has it: 1/20.
const NEAR: f64 = 0.05;
/// Each request is done a millisecond after it passed (`policy::cluster::simulated`).
const DONE_A_SECOND: f64 = 1000.0;
const MOST_DEPTH: f64 = 256.0;
/// Of an equal share, what a busy host may use.
const MOST_TIMES: f64 = 20.0;

/// What a host wants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Role {
    Busy,
    Idle,
    /// Requests a second.
    Wants(f64),
}

/// All hosts, as they are meant to be.
#[derive(Debug)]
pub(super) struct Hosts {
    spec: ClusterSpec,
    limits: Spec,
    pub(super) roles: Vec<Role>,
    /// How many units of each limit a request is.
    units: [f64; 6],
    /// Requests a second that the limits let pass in all.
    pub(super) most: f64,
    /// Requests a second that each host should have.
    pub(super) ideal: Vec<f64>,
}

impl Hosts {
    pub(super) fn new(spec: &ClusterSpec, limits: Spec, random: &mut Random) -> Self {
        let bytes = spec.size as f64;
        let operations = match limits.limits().iops_size {
            0 => 1.0,
            size => (bytes / size as f64).max(1.0),
        };
        let units = LimitKind::ALL.map(|kind| if kind.counts_bytes() { bytes } else { operations });
        let rates = LimitKind::ALL.map(|kind| limits.limits().limit(kind).rate);
        let most = requests(&limits, rates, &units);
        let share = most / spec.hosts as f64;
        let count = |percent: u64| spec.hosts * percent as usize / 100;
        let (busy, idle) = (count(spec.busy), count(spec.idle));
        let wants = share * spec.wants as f64 / 100.0;
        let role = |host: usize| match host {
            host if host < busy => Role::Busy,
            host if host < busy + idle || wants <= 0.0 => Role::Idle,
            _ => Role::Wants(wants),
        };
        let mut roles: Vec<_> = (0..spec.hosts).map(role).collect();
        shuffle(&mut roles, random);
        let mut hosts = Self { spec: spec.clone(), limits, roles, units, most, ideal: Vec::new() };
        hosts.judge();
        hosts
    }

    const fn is_heavy(&self, host: usize) -> bool {
        host < self.spec.hosts * self.spec.heavy as usize / 100
    }

    const fn weight(&self, host: usize) -> u32 {
        if self.is_heavy(host) { self.spec.weight } else { 100 }
    }

    /// What a disk of this host is promised.
    const fn reservation(&self, host: usize) -> u64 {
        if self.spec.promises(host) { self.spec.reservation } else { 0 }
    }

    pub(super) fn clients(&self) -> Vec<Vec<Client>> {
        let one = |host: usize| {
            Client::new(self.load(host), self.spec.size, self.weight(host), self.reservation(host))
        };
        (0..self.spec.hosts).map(|host| vec![one(host); self.spec.disks]).collect()
    }

    /// What each disk of a host is asked for.
    pub(super) fn load(&self, host: usize) -> Load {
        let disks = self.spec.disks as f64;
        match self.roles[host] {
            Role::Idle => Load::Idle,
            // Enough for many times its share, and soon done when it stops.
            Role::Busy => {
                let most = self.most.min(self.most / self.spec.hosts as f64 * MOST_TIMES);
                Load::Greedy((2.0 * most / disks / DONE_A_SECOND).clamp(2.0, MOST_DEPTH) as u64)
            }
            Role::Wants(requests) => {
                let mean = (S as f64 * disks / requests).max(1.0) as u64;
                if self.spec.is_random { Load::Random(mean) } else { Load::Paced(mean) }
            }
        }
    }

    /// So many that are busy or idle become the other. Returns who.
    pub(super) fn change(&mut self, random: &mut Random) -> Vec<usize> {
        let is_either = |host: &usize| !matches!(self.roles[*host], Role::Wants(_));
        let mut either: Vec<usize> = (0..self.roles.len()).filter(is_either).collect();
        shuffle(&mut either, random);
        let count = (self.spec.hosts * self.spec.change as usize).div_ceil(100);
        either.truncate(count);
        for host in &either {
            self.roles[*host] = if self.roles[*host] == Role::Busy { Role::Idle } else { Role::Busy };
        }
        self.judge();
        either
    }

    pub(super) fn somebody_is_busy(&self) -> bool {
        self.roles.contains(&Role::Busy)
    }

    /// The ideal: the whole limit divided, and nothing set aside.
    fn judge(&mut self) {
        let claim = |(host, role): (usize, &Role)| {
            let disks = self.spec.disks as u64;
            let wants = match role {
                Role::Busy => f64::INFINITY,
                Role::Idle => 0.0,
                Role::Wants(requests) => *requests,
            };
            Claim {
                floor: [0; 6],
                weight: u64::from(self.weight(host)) * disks,
                reserved: [self.reservation(host) * disks, 0],
                demand: self.units.map(|units| (wants * units).ceil() as u64),
                waiting_ns: 0,
            }
        };
        let claims: Vec<_> = self.roles.iter().enumerate().map(claim).collect();
        let rates = LimitKind::ALL.map(|kind| self.limits.limits().limit(kind).rate);
        let parts = divide(rates, &claims);
        self.ideal = parts.into_iter().map(|part| self.requests(part)).collect();
    }

    /// Requests a second that such rates let pass.
    pub(super) fn requests(&self, rates: ByKind) -> f64 {
        requests(&self.limits, rates, &self.units)
    }

    /// How far what a host has is off from what it should have, and whether it is near.
    pub(super) fn off(&self, host: usize, has: f64) -> (f64, bool) {
        let ideal = self.ideal[host];
        let off = match self.roles[host] {
            Role::Busy => (has - ideal).abs(),
            // More than it wants takes nothing from anybody.
            Role::Wants(wants) => (ideal.min(wants) - has).max(0.0),
            Role::Idle => 0.0,
        };
        // Whole numbers: one more or less is none.
        (off, off <= ideal * NEAR + 1.0)
    }
}

fn requests(limits: &Spec, rates: ByKind, units: &[f64; 6]) -> f64 {
    let set = LimitKind::ALL.into_iter().filter(|kind| limits.limits().limit(*kind).rate > 0);
    set.map(|kind| rates[kind.index()] as f64 / units[kind.index()]).fold(f64::INFINITY, f64::min)
}

/// Fisher and Yates.
pub(super) fn shuffle<T>(items: &mut [T], random: &mut Random) {
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::Limits;

    use super::*;

    fn hosts(text: &str, iops: u64) -> Hosts {
        let spec: ClusterSpec = text.parse().unwrap();
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = iops;
        let limits = Spec::new(1, limits, spec.hosts as u32, None).unwrap();
        Hosts::new(&spec, limits, &mut Random::new(1))
    }

    #[test]
    fn the_ideal_is_fair_by_weight_and_promise() {
        let all_busy = hosts("hosts=4,disks=1,busy=100,idle=0,heavy=25%,weight=200", 1000);
        assert_eq!(all_busy.ideal, [400.0, 200.0, 200.0, 200.0]);
        let promised = hosts("hosts=4,disks=2,busy=100,idle=0,promised=25%,reservation=200", 1000);
        assert_eq!(promised.ideal, [200.0, 200.0, 200.0, 400.0]);
        assert_eq!(promised.spec.promised(), 400);
        let others = hosts("hosts=4,disks=1,busy=50,idle=0,wants=50", 1000);
        let want = |role: &Role| if *role == Role::Busy { 375.0 } else { 125.0 };
        assert_eq!(others.ideal, others.roles.iter().map(want).collect::<Vec<_>>());
    }

    #[test]
    fn who_changes_becomes_the_other() {
        let mut hosts = hosts("hosts=10,disks=1,busy=50,idle=50,change=30%", 1000);
        let before = hosts.roles.clone();
        let changed = hosts.change(&mut Random::new(2));
        assert_eq!(changed.len(), 3);
        let differ = (0..10).filter(|host| before[*host] != hosts.roles[*host]);
        let mut changed = changed;
        changed.sort_unstable();
        assert_eq!(differ.collect::<Vec<_>>(), changed);
        assert!((hosts.ideal.iter().sum::<f64>() - 1000.0).abs() < 20.0, "{:?}", hosts.ideal);
    }
}
