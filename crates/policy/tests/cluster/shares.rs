//! Without faults every host has its share three ticks after a change of demand.

use crate::seeds::for_each;
use crate::setting;
use policy::cluster::ClusterGroupLimits;
use policy::cluster::simulated::{
    ClientLoad, NANOS_PER_MS, NANOS_PER_S, SeededRandom, SimulatedClient, SimulatedCluster,
};
use policy::throttle::{LimitKind, Limits};

const RATE: u64 = 2000;

#[test]
fn shares_are_within_five_percent_three_ticks_after_a_change() {
    for_each("--test cluster", 8, run_seed);
}

/// Weighted max-min fair shares, reservations first: raises all until nothing is left.
fn ideal(hosts: &[(f64, f64, f64)]) -> Vec<f64> {
    let at = |level: f64| -> Vec<f64> {
        let part = |&(demand, weight, reserved): &(f64, f64, f64)| {
            (level * weight).clamp(reserved.min(demand), demand)
        };
        hosts.iter().map(part).collect()
    };
    let mut level = 0.0;
    while level < 1e4 && at(level).iter().sum::<f64>() < RATE as f64 {
        level += 0.01;
    }
    at(level)
}

fn run_seed(seed: u64) {
    let mut random = SeededRandom::new(seed ^ 0xfa1e);
    let mut limits = Limits::default();
    limits.limit_mut(LimitKind::IopsTotal).rate = RATE;
    let hosts = random.between(2, 6) as usize;
    let spec = ClusterGroupLimits::new(1, limits, hosts as u32, Some(20_000 / hosts as u32)).unwrap();
    let client = |random: &mut SeededRandom| {
        let reserved = if random.one_in(3) { random.between(50, 300) } else { 0 };
        vec![SimulatedClient::new(ClientLoad::Greedy(16), 4096, random.between(100, 300) as u32, reserved)]
    };
    let clients: Vec<_> = (0..hosts).map(|_| client(&mut random)).collect();
    let mut cluster = SimulatedCluster::new(seed, spec, &clients, setting(2, None));
    // Time for the election, and for the lease that a new leader waits for.
    cluster.run_until(5 * NANOS_PER_S);
    for _ in 0..6 {
        {
            let host = random.below(hosts as u64) as usize;
            let load = match random.below(3) {
                0 => ClientLoad::Idle,
                1 => ClientLoad::Paced(NANOS_PER_S / random.between(50, 600)),
                _ => ClientLoad::Greedy(16),
            };
            cluster.set_load(host, 0, load);
        }
        cluster.run_until(cluster.now + 3 * 200 * NANOS_PER_MS);
        let before = cluster.admissions.clone();
        cluster.run_until(cluster.now + 2 * NANOS_PER_S);
        let host_demand = |host: usize| {
            let client = &clients[host][0];
            let demand = match cluster.machines[host].clients[0].load {
                ClientLoad::Idle => 0.0,
                ClientLoad::Greedy(_) => f64::INFINITY,
                ClientLoad::Paced(pace) | ClientLoad::Random(pace) => NANOS_PER_S as f64 / pace as f64,
            };
            (demand, f64::from(client.weight), client.reserved as f64)
        };
        let ideal = ideal(&(0..hosts).map(host_demand).collect::<Vec<_>>());
        // A host below its quota keeps a margin, so that it can show more demand: one request in a
        // tick, or a fraction of its rate. Greedy hosts go without that quota.
        let has_margin =
            |host: &usize| (0.0..f64::INFINITY).contains(&host_demand(*host).0) && ideal[*host] > 0.0;
        let margin = |host: usize| (host_demand(host).0 / 64.0).max(1.0 / 0.2);
        let margins: f64 = (0..hosts).filter(has_margin).map(margin).sum();
        for (host, ideal) in ideal.into_iter().enumerate() {
            let rate = (cluster.admissions[host].0 - before[host].0) as f64 / 2.0;
            // The backlog of a client that has stopped is still admitted.
            let waited = if ideal == 0.0 { 16.0 / 2.0 } else { 1.0 };
            let (demand, ..) = host_demand(host);
            let taken_margin = if ideal < demand { margins } else { 0.0 };
            assert!(
                (rate - ideal).abs() <= ideal * 0.05 + waited + taken_margin,
                "host {host} has {rate} instead of {ideal} at {} ms: {:?}, with {:?}",
                cluster.now / NANOS_PER_MS,
                (0..hosts).map(host_demand).collect::<Vec<_>>(),
                cluster
                    .machines
                    .iter()
                    .map(|at| at.host.limits().limit(LimitKind::IopsTotal).rate)
                    .collect::<Vec<_>>(),
            );
        }
    }
}
