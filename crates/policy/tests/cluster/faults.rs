//! All faults at random for half a minute.

use crate::seeds::for_each;
use crate::{TIMING, setting};
use policy::cluster::simulated::{
    ClientLoad, NANOS_PER_MS, NANOS_PER_S, SeededRandom, SimulatedClient, SimulatedCluster,
};
use policy::cluster::{ClusterGroupLimits, Timing};
use policy::throttle::{LimitKind, Limits};

const SECONDS: u64 = 30;

#[test]
fn limit_holds_and_no_host_starves_under_all_faults() {
    for_each("--test cluster", 100, run_seed);
}

fn limits(random: &mut SeededRandom, bytes: bool) -> Limits {
    let mut limits = Limits::default();
    let iops = random.between(60, 400);
    for (kind, rate) in [(LimitKind::IopsTotal, iops), (LimitKind::BpsTotal, iops * 4096)] {
        if kind.counts_bytes() && !bytes {
            continue;
        }
        let limit = limits.limit_mut(kind);
        limit.rate = rate;
        if random.one_in(2) {
            limit.burst_rate = rate * random.between(1, 4);
            limit.burst_length_s = random.between(1, 4);
        }
    }
    limits
}

fn load(random: &mut SeededRandom) -> ClientLoad {
    match random.below(4) {
        0 => ClientLoad::Idle,
        1 => ClientLoad::Paced(random.between(5, 100) * NANOS_PER_MS),
        _ => ClientLoad::Greedy(random.between(1, 8)),
    }
}

fn run_seed(seed: u64) {
    let mut random = SeededRandom::new(seed ^ 0x5eed);
    let hosts = random.between(2, 5) as usize;
    // If limits change, old fallback shares must fit into all limits that follow.
    let changes = random.one_in(3);
    let max_ppm = if changes { 100_000 } else { 900_000 } / hosts as u64;
    let random_ppm =
        |random: &mut SeededRandom| (!random.one_in(3)).then(|| random.between(1, max_ppm) as u32);
    let (safe_ppm, bytes) = (random_ppm(&mut random), random.one_in(2));
    let spec = ClusterGroupLimits::new(1, limits(&mut random, bytes), hosts as u32, safe_ppm).unwrap();
    let clients: Vec<Vec<SimulatedClient>> = (0..hosts)
        .map(|_| {
            let client = |random: &mut SeededRandom| {
                let length = [512, 4096, 8192][random.below(3) as usize];
                SimulatedClient::new(load(random), length, random.between(1, 300) as u32, random.below(30))
            };
            (0..random.between(1, 2)).map(|_| client(&mut random)).collect()
        })
        .collect();
    let leaders = random.between(1, 3) as usize;
    let late = (!random.one_in(3)).then_some(30);
    let mut setting = setting(leaders, late);
    if seed.is_multiple_of(4) {
        // As in the daemon: quota leases are longer than that of the leader's key.
        setting.timing = Timing::DEFAULT;
    }
    // A host that leaves is forgotten, along with the fallback share of old limits that it knows.
    let leaves = !changes && random.one_in(2);
    let mut cluster = SimulatedCluster::new(seed, spec, &clients, setting);
    let mut version = 1;
    // Time since which each host has had a greedy client without a fault.
    let mut since = vec![u64::MAX; hosts];
    // The smallest fallback share so far, which a host may still use.
    let mut max_wait_ns = 0;
    while cluster.now < SECONDS * NANOS_PER_S {
        cluster.run_until(cluster.now + random.between(10 * NANOS_PER_MS, 500 * NANOS_PER_MS));
        let process = random.below(cluster.process_count() as u64) as usize;
        match random.below(24) {
            0 | 1 => cluster.set_partitioned(process, true),
            // Faults are repaired more often than caused, so that the cluster also makes progress.
            2..=5 => (0..cluster.process_count()).for_each(|place| cluster.set_partitioned(place, false)),
            6 | 7 => {
                let max_pause_ns = if random.one_in(3) { 8 * NANOS_PER_S } else { NANOS_PER_S };
                cluster.pause(process, random.between(NANOS_PER_MS, max_pause_ns));
                if process < hosts {
                    since[process] = u64::MAX;
                }
            }
            8 => {
                cluster.restart(process);
                if process < hosts {
                    since[process] = u64::MAX;
                }
            }
            9 => cluster.store.stop(),
            17 if process < hosts && leaves => {
                cluster.shut_down_host(process, random.below(8 * NANOS_PER_S));
                since[process] = u64::MAX;
            }
            10..=12 => cluster.start_store(),
            13 => cluster.store.mark(),
            14 => cluster.lose_writes(0.1),
            15 if changes => {
                version += 1;
                let safe_ppm = random_ppm(&mut random);
                cluster.set_spec(
                    ClusterGroupLimits::new(version, limits(&mut random, bytes), hosts as u32, safe_ppm)
                        .unwrap(),
                    0.1,
                );
            }
            16..=20 => {
                let host = random.below(hosts as u64) as usize;
                let client = random.below(cluster.machines[host].clients.len() as u64) as usize;
                cluster.set_load(host, client, load(&mut random));
            }
            _ => {}
        }
        assert_eq!(cluster.violation(), None);
        for (host, since) in since.iter_mut().enumerate() {
            let is_greedy = |client: &SimulatedClient| matches!(client.load, ClientLoad::Greedy(_));
            if !cluster.machines[host].clients.iter().any(is_greedy) || cluster.is_paused(host) {
                *since = u64::MAX;
                continue;
            }
            // Starvation is measured from the last admission, or from when the host became greedy.
            *since = cluster.admissions[host].1.max((*since).min(cluster.now));
            // The smallest fallback share is one operation or byte per second, so a request takes
            // long.
            let limits = cluster.machines[host].host.fallback_limits();
            let iops = limits.limit(LimitKind::IopsTotal).rate;
            let bps = limits.limit(LimitKind::BpsTotal).rate;
            let longest =
                NANOS_PER_S + 3 * NANOS_PER_S / iops + (6 * 8192 * NANOS_PER_S).checked_div(bps).unwrap_or(0);
            max_wait_ns = max_wait_ns.max(longest);
            assert!(
                cluster.now - *since <= max_wait_ns,
                "host {host} starves at {} ms: {limits:?}",
                cluster.now / NANOS_PER_MS
            );
        }
    }
    // At a byte per second nothing may have been admitted yet.
    assert!(max_wait_ns >= SECONDS * NANOS_PER_S || cluster.admissions.iter().any(|(passed, _)| *passed > 0));
}

/// Grants of hosts that have left are deleted, and no others.
#[test]
fn grants_of_departed_hosts_are_deleted_after_their_lease() {
    for_each("--test cluster", 20, |seed| {
        let mut random = SeededRandom::new(seed ^ 0x1eaf);
        let spec = ClusterGroupLimits::new(1, limits(&mut random, false), 3, None).unwrap();
        let clients = [const { SimulatedClient::new(ClientLoad::Greedy(4), 4096, 100, 0) }; 3]
            .map(|client| vec![client]);
        let mut cluster = SimulatedCluster::new(seed, spec, &clients, setting(2, None));
        cluster.run_until(8 * NANOS_PER_S);
        assert!(!cluster.store.has_orphaned_grants());
        let before = cluster.machines[0].host.rates();
        cluster.shut_down_host(1, 60 * NANOS_PER_S);
        cluster.run_until(cluster.now + TIMING.lease.as_nanos() as u64 / 4);
        assert!(cluster.store.has_orphaned_grants(), "a lease may be in force");
        // A new leader does not know of the old grants.
        if let Some(leader) = cluster.leader().filter(|_| random.one_in(2)) {
            cluster.restart(leader);
        }
        cluster.run_until(cluster.now + 10 * NANOS_PER_S);
        assert!(!cluster.store.has_orphaned_grants());
        assert!(before.iter().zip(cluster.machines[0].host.rates()).all(|(before, now)| *before <= now));
        cluster.run_until(90 * NANOS_PER_S);
        assert!(cluster.machines[1].host.is_leased(), "it is back");
        assert_eq!(cluster.violation(), None);
    });
}
