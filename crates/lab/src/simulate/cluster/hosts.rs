//! Demand of each host, and its ideal share of the limits, which quotas in force are compared with.

use policy::{
    cluster::{
        ByKind, ClusterGroupLimits, QuotaClaim, divide_quota,
        simulated::{ClientLoad, NANOS_PER_S, SeededRandom, SimulatedClient},
    },
    throttle::LimitKind,
};

use super::spec::ClusterSpec;

/// Relative distance from the ideal share within which a host counts as near.
const NEAR_IDEAL: f64 = 0.05;
/// A request completes a millisecond after admission (`policy::cluster::simulated`).
const DONE_A_SECOND: f64 = 1000.0;
const MAX_DEPTH: f64 = 256.0;
/// Bound on a busy host's demand, in multiples of an equal share.
const MAX_TIMES: f64 = 20.0;

/// Demand of a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum HostDemand {
    Busy,
    Idle,
    /// Requests per second.
    Bounded(f64),
}

/// All hosts with their ideal shares.
#[derive(Debug)]
pub(super) struct SimulatedHosts {
    spec: ClusterSpec,
    limits: ClusterGroupLimits,
    pub(super) roles: Vec<HostDemand>,
    /// Units of each limit that a request costs.
    units: [f64; 6],
    /// Requests per second that the limits admit in total.
    pub(super) max_requests: f64,
    /// Ideal requests per second of each host.
    pub(super) ideal: Vec<f64>,
}

impl SimulatedHosts {
    pub(super) fn new(spec: &ClusterSpec, limits: ClusterGroupLimits, random: &mut SeededRandom) -> Self {
        let bytes = spec.size as f64;
        // As in the daemon, a large request counts as several operations.
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
            host if host < busy => HostDemand::Busy,
            host if host < busy + idle || wants <= 0.0 => HostDemand::Idle,
            _ => HostDemand::Bounded(wants),
        };
        let mut roles: Vec<_> = (0..spec.hosts).map(role).collect();
        // Roles are independent of host numbers, by which weights and reservations are assigned.
        shuffle(&mut roles, random);
        let mut hosts =
            Self { spec: spec.clone(), limits, roles, units, max_requests: most, ideal: Vec::new() };
        hosts.update_ideal();
        hosts
    }

    const fn is_heavy(&self, host: usize) -> bool {
        host < self.spec.hosts * self.spec.heavy as usize / 100
    }

    const fn weight(&self, host: usize) -> u32 {
        if self.is_heavy(host) { self.spec.weight } else { 100 }
    }

    /// Reservation of each disk of this host.
    const fn reservation(&self, host: usize) -> u64 {
        if self.spec.has_reservation(host) { self.spec.reservation } else { 0 }
    }

    pub(super) fn clients(&self) -> Vec<Vec<SimulatedClient>> {
        let client = |host: usize| {
            SimulatedClient::new(self.load(host), self.spec.size, self.weight(host), self.reservation(host))
        };
        (0..self.spec.hosts).map(|host| vec![client(host); self.spec.disks]).collect()
    }

    /// Load on each disk of a host.
    pub(super) fn load(&self, host: usize) -> ClientLoad {
        let disks = self.spec.disks as f64;
        match self.roles[host] {
            HostDemand::Idle => ClientLoad::Idle,
            // Enough for many times its share, but a backlog that drains soon after the load stops.
            HostDemand::Busy => {
                let per_host = self.max_requests.min(self.max_requests / self.spec.hosts as f64 * MAX_TIMES);
                ClientLoad::Greedy((2.0 * per_host / disks / DONE_A_SECOND).clamp(2.0, MAX_DEPTH) as u64)
            }
            HostDemand::Bounded(requests) => {
                let mean = (NANOS_PER_S as f64 * disks / requests).max(1.0) as u64;
                if self.spec.is_random { ClientLoad::Random(mean) } else { ClientLoad::Paced(mean) }
            }
        }
    }

    /// Swaps the roles of a share of the busy and idle hosts. Returns the changed hosts.
    pub(super) fn change(&mut self, random: &mut SeededRandom) -> Vec<usize> {
        let is_either = |host: &usize| !matches!(self.roles[*host], HostDemand::Bounded(_));
        let mut either: Vec<usize> = (0..self.roles.len()).filter(is_either).collect();
        shuffle(&mut either, random);
        let count = (self.spec.hosts * self.spec.change as usize).div_ceil(100);
        either.truncate(count);
        for host in &either {
            self.roles[*host] =
                if self.roles[*host] == HostDemand::Busy { HostDemand::Idle } else { HostDemand::Busy };
        }
        self.update_ideal();
        either
    }

    pub(super) fn somebody_is_busy(&self) -> bool {
        self.roles.contains(&HostDemand::Busy)
    }

    /// Computes the ideal shares: the whole limit is divided, without a reserve.
    fn update_ideal(&mut self) {
        let claim = |(host, role): (usize, &HostDemand)| {
            let disks = self.spec.disks as u64;
            let wants = match role {
                HostDemand::Busy => f64::INFINITY,
                HostDemand::Idle => 0.0,
                HostDemand::Bounded(requests) => *requests,
            };
            QuotaClaim {
                floor: [0; 6],
                weight: u64::from(self.weight(host)) * disks,
                reserved: [self.reservation(host) * disks, 0],
                demand: self.units.map(|units| (wants * units).ceil() as u64),
                waiting_ns: 0,
            }
        };
        let claims: Vec<_> = self.roles.iter().enumerate().map(claim).collect();
        let rates = LimitKind::ALL.map(|kind| self.limits.limits().limit(kind).rate);
        // The leader's own algorithm, with perfect knowledge of all demand.
        let parts = divide_quota(rates, &claims);
        self.ideal = parts.into_iter().map(|part| self.requests(part)).collect();
    }

    /// Requests per second that these rates admit.
    pub(super) fn requests(&self, rates: ByKind) -> f64 {
        requests(&self.limits, rates, &self.units)
    }

    /// Deviation of a host's quota from its ideal, and true if the host counts as near.
    pub(super) fn deviation(&self, host: usize, quota: f64) -> (f64, bool) {
        let ideal = self.ideal[host];
        let deviation = match self.roles[host] {
            HostDemand::Busy => (quota - ideal).abs(),
            // A surplus of a host with bounded demand harms no other host.
            HostDemand::Bounded(wants) => (ideal.min(wants) - quota).max(0.0),
            HostDemand::Idle => 0.0,
        };
        // Rates are whole numbers, so a difference of one is tolerated.
        (deviation, deviation <= ideal * NEAR_IDEAL + 1.0)
    }
}

fn requests(limits: &ClusterGroupLimits, rates: ByKind, units: &[f64; 6]) -> f64 {
    let set = LimitKind::ALL.into_iter().filter(|kind| limits.limits().limit(*kind).rate > 0);
    set.map(|kind| rates[kind.index()] as f64 / units[kind.index()]).fold(f64::INFINITY, f64::min)
}

/// Fisher-Yates shuffle.
pub(super) fn shuffle<T>(items: &mut [T], random: &mut SeededRandom) {
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::Limits;

    use super::*;

    fn hosts(text: &str, iops: u64) -> SimulatedHosts {
        let spec: ClusterSpec = text.parse().unwrap();
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = iops;
        let limits = ClusterGroupLimits::new(1, limits, spec.hosts as u32, None).unwrap();
        SimulatedHosts::new(&spec, limits, &mut SeededRandom::new(1))
    }

    #[test]
    fn ideal_shares_follow_weights_and_reservations() {
        let all_busy = hosts("hosts=4,disks=1,busy=100,idle=0,heavy=25%,weight=200", 1000);
        assert_eq!(all_busy.ideal, [400.0, 200.0, 200.0, 200.0]);
        let reserved = hosts("hosts=4,disks=2,busy=100,idle=0,reserved=25%,reservation=200", 1000);
        assert_eq!(reserved.ideal, [200.0, 200.0, 200.0, 400.0]);
        assert_eq!(reserved.spec.total_reservation(), 400);
        let bounded = hosts("hosts=4,disks=1,busy=50,idle=0,wants=50", 1000);
        let want = |role: &HostDemand| if *role == HostDemand::Busy { 375.0 } else { 125.0 };
        assert_eq!(bounded.ideal, bounded.roles.iter().map(want).collect::<Vec<_>>());
    }

    #[test]
    fn changed_hosts_swap_roles() {
        let mut hosts = hosts("hosts=10,disks=1,busy=50,idle=50,change=30%", 1000);
        let before = hosts.roles.clone();
        let changed = hosts.change(&mut SeededRandom::new(2));
        assert_eq!(changed.len(), 3);
        let differ = (0..10).filter(|host| before[*host] != hosts.roles[*host]);
        let mut changed = changed;
        changed.sort_unstable();
        assert_eq!(differ.collect::<Vec<_>>(), changed);
        assert!((hosts.ideal.iter().sum::<f64>() - 1000.0).abs() < 20.0, "{:?}", hosts.ideal);
    }
}
