//! Hosts that reach each other without the store: agreements under all faults, and each line of the
//! table in `docs/cluster.md`.

use crate::seeds::for_each;
use policy::cluster::simulated::{
    ClientLoad, NANOS_PER_MS, NANOS_PER_S, SeededRandom, SimulatedClient, SimulatedCluster, SimulationConfig,
};
use policy::cluster::{
    AgreementRefusal, AgreementRequest, ClusterGroupLimits, PeerAgreement, PeerSet, Timing,
};
use policy::throttle::{LimitKind, Limits};
use policy::time::Instant;

const RATE: u64 = 3000;
const IOPS: usize = LimitKind::IopsTotal.index();
/// Clocks run up to half a percent fast or slow: their rates differ by up to 1 %.
const DRIFT_PPM: u64 = 5000;

fn setting(hosts: usize, late: Option<u64>) -> SimulationConfig {
    SimulationConfig {
        timing: Timing::DEFAULT,
        has_peers: true,
        drift_ppm: DRIFT_PPM,
        ..crate::setting(hosts, late)
    }
}

fn limits(random: &mut SeededRandom) -> Limits {
    let mut limits = Limits::default();
    let limit = limits.limit_mut(LimitKind::IopsTotal);
    limit.rate = RATE;
    if random.one_in(2) {
        limit.burst_rate = RATE * random.between(1, 3);
        limit.burst_length_s = random.between(1, 3);
    }
    limits
}

fn cluster(seed: u64, loads: &[ClientLoad], late: Option<u64>) -> SimulatedCluster {
    let mut random = SeededRandom::new(seed ^ 0x9ee5);
    let spec = ClusterGroupLimits::new(1, limits(&mut random), loads.len() as u32, None).unwrap();
    let clients: Vec<_> = loads.iter().map(|load| vec![SimulatedClient::new(*load, 4096, 100, 0)]).collect();
    SimulatedCluster::new(seed, spec, &clients, setting(loads.len(), late))
}

fn rates(cluster: &mut SimulatedCluster) -> Vec<u64> {
    cluster.quotas().iter().map(|rates| rates[IOPS]).collect()
}

const BUSY: ClientLoad = ClientLoad::Greedy(16);

/// Runs for this long, and returns the least quota of each host.
fn least(cluster: &mut SimulatedCluster, ms: u64) -> Vec<u64> {
    let end = cluster.now + ms * NANOS_PER_MS;
    let mut least = rates(cluster);
    while cluster.now < end {
        cluster.run_until(cluster.now + 100 * NANOS_PER_MS);
        let now = rates(cluster);
        least.iter_mut().zip(now).for_each(|(least, now)| *least = (*least).min(now));
        assert_eq!(cluster.violation(), None);
    }
    least
}

#[test]
fn hosts_keep_their_quotas_without_the_store_and_lend_what_they_do_not_use() {
    for_each("--test cluster", 8, |seed| {
        let mut cluster = cluster(seed, &[BUSY, BUSY, BUSY, ClientLoad::Idle], None);
        cluster.run_until(15 * NANOS_PER_S);
        let before = rates(&mut cluster);
        assert!(before[0] > RATE / 4, "{before:?}");
        cluster.store.stop();
        let least = least(&mut cluster, 60_000);
        assert!(cluster.has_agreement());
        for (least, before) in least.iter().zip(&before) {
            assert!(*least >= before * 9 / 10, "{least} of {before}");
        }
        cluster.set_load(0, 0, ClientLoad::Idle);
        cluster.set_load(3, 0, BUSY);
        cluster.run_until(cluster.now + 5 * NANOS_PER_S);
        let after = rates(&mut cluster);
        assert!(after[3] >= before[0] * 9 / 10, "{before:?} became {after:?}");
        // The store returns: again without a gap.
        cluster.start_store();
        let least = self::least(&mut cluster, 15_000);
        for host in 1..4 {
            assert!(least[host] >= after[host] * 9 / 10, "{least:?} of {after:?}");
        }
        assert!(!cluster.has_agreement() && cluster.has_leader());
    });
}

fn isolate(cluster: &mut SimulatedCluster, host: usize, hosts: usize, is_cut: bool) {
    for other in (0..hosts).filter(|other| *other != host) {
        cluster.set_cut(host, other, is_cut);
        cluster.set_cut(other, host, is_cut);
    }
}

#[test]
fn a_host_without_store_and_peers_falls_back_and_the_others_get_the_rest() {
    for_each("--test cluster", 8, |seed| {
        let mut cluster = cluster(seed, &[BUSY; 4], None);
        cluster.run_until(15 * NANOS_PER_S);
        let lost = seed as usize % 4;
        cluster.set_partitioned(lost, true);
        isolate(&mut cluster, lost, 4, true);
        cluster.run_until(cluster.now + 5100 * NANOS_PER_MS);
        assert_eq!(rates(&mut cluster)[lost], RATE / 20, "its fallback share");
        cluster.run_until(cluster.now + 5 * NANOS_PER_S);
        let rest: u64 = rates(&mut cluster).iter().sum();
        assert!(rest >= RATE * 95 / 100, "{rest}");
        assert_eq!(cluster.violation(), None);
    });
}

#[test]
fn a_host_without_the_store_keeps_its_quota_through_a_leader_that_it_reaches() {
    for_each("--test cluster", 8, |seed| {
        let mut cluster = cluster(seed, &[BUSY; 3], None);
        cluster.run_until(15 * NANOS_PER_S);
        let before = rates(&mut cluster);
        cluster.set_partitioned(seed as usize % 3, true);
        let least = least(&mut cluster, 30_000);
        for (least, before) in least.iter().zip(&before) {
            assert!(*least >= before * 9 / 10, "{least} of {before}");
        }
    });
}

#[test]
fn half_of_the_hosts_without_the_store_falls_back() {
    for_each("--test cluster", 8, |seed| {
        let mut cluster = cluster(seed, &[BUSY; 4], None);
        cluster.run_until(15 * NANOS_PER_S);
        for host in 0..2 {
            cluster.set_partitioned(host, true);
            for other in 2..4 {
                cluster.set_cut(host, other, true);
                cluster.set_cut(other, host, true);
            }
        }
        cluster.run_until(cluster.now + 10 * NANOS_PER_S);
        let now = rates(&mut cluster);
        assert_eq!(now[..2], [RATE / 20; 2]);
        assert!(now.iter().sum::<u64>() >= RATE * 95 / 100, "{now:?}");
        assert_eq!(cluster.violation(), None);
    });
}

#[test]
fn a_host_that_joins_cannot_lead_while_the_others_agree() {
    for_each("--test cluster", 8, |seed| {
        let mut cluster = cluster(seed, &[BUSY; 4], None);
        // The last host leaves and returns when the others have lost the store.
        cluster.run_until(15 * NANOS_PER_S);
        cluster.shut_down_host(3, 20 * NANOS_PER_S);
        cluster.run_until(cluster.now + 10 * NANOS_PER_S);
        (0..3).for_each(|host| cluster.set_partitioned(host, true));
        isolate(&mut cluster, 3, 4, true);
        cluster.run_until(cluster.now + 60 * NANOS_PER_S);
        assert_eq!(cluster.violation(), None);
        assert!(cluster.has_agreement());
        let now = rates(&mut cluster);
        assert_eq!(now[3], RATE / 20);
        assert!(now[..3].iter().sum::<u64>() >= RATE * 9 / 10, "{now:?}");
    });
}

#[test]
fn a_restored_or_replaced_store_exceeds_nothing() {
    for_each("--test cluster", 16, |seed| {
        let mut cluster = cluster(seed, &[BUSY; 3], None);
        cluster.run_until(2 * NANOS_PER_S);
        cluster.store.mark();
        cluster.run_until(15 * NANOS_PER_S);
        let before: u64 = rates(&mut cluster).iter().sum();
        cluster.store.stop();
        cluster.run_until(cluster.now + seed % 3 * 8 * NANOS_PER_S);
        if seed.is_multiple_of(2) {
            cluster.lose_writes(1.0);
        } else {
            cluster.replace_store();
        }
        cluster.run_until(cluster.now + 20 * NANOS_PER_S);
        assert_eq!(cluster.violation(), None);
        assert!(rates(&mut cluster).iter().sum::<u64>() >= before * 9 / 10);
    });
}

#[test]
fn a_replaced_store_fences_direct_grants_of_its_former_leader() {
    for_each("--test cluster", 16, |seed| {
        let mut cluster = cluster(seed, &[BUSY; 3], None);
        cluster.run_until(15 * NANOS_PER_S);
        let leader = cluster.leader().unwrap();
        let host = (leader + 1) % 3;
        cluster.set_partitioned(host, true);
        let before = least(&mut cluster, 10_000)[host];
        assert!(before > RATE / 4, "{before}");
        // The change of demand keeps the former leader granting.
        cluster.set_load((leader + 2) % 3, 0, ClientLoad::Idle);
        cluster.run_until(cluster.now + seed * 50 * NANOS_PER_MS);
        cluster.replace_store();
        least(&mut cluster, 20_000);
        assert!(cluster.has_leader());
    });
}

#[test]
fn limit_holds_under_all_partitions() {
    for_each("--test cluster", 40, run_seed);
}

fn load(random: &mut SeededRandom) -> ClientLoad {
    match random.below(4) {
        0 => ClientLoad::Idle,
        1 => ClientLoad::Paced(random.between(2, 50) * NANOS_PER_MS),
        _ => ClientLoad::Greedy(random.between(1, 16)),
    }
}

fn run_seed(seed: u64) {
    let mut random = SeededRandom::new(seed ^ 0xface);
    let hosts = random.between(2, 5) as usize;
    let loads: Vec<_> = (0..hosts).map(|_| load(&mut random)).collect();
    let late = (!random.one_in(3)).then_some(30);
    let mut cluster = cluster(seed, &loads, late);
    // A store that has lost the departure of a host lets that host lead: see `docs/cluster.md`.
    let has_departures = random.one_in(2);
    let mut has_agreed = false;
    while cluster.now < 40 * NANOS_PER_S {
        cluster.run_until(cluster.now + random.between(10 * NANOS_PER_MS, 1000 * NANOS_PER_MS));
        let host = random.below(hosts as u64) as usize;
        let other = random.below(hosts as u64) as usize;
        match random.below(32) {
            0 | 1 => cluster.set_partitioned(host, true),
            2 => (0..hosts).for_each(|host| cluster.set_partitioned(host, true)),
            3 | 4 => cluster.set_cut(host, other, true),
            5 => isolate(&mut cluster, host, hosts, true),
            6 => {
                // Two halves, of which one or none reaches the store.
                let reaches = random.one_in(2);
                for (one, two) in (0..hosts).flat_map(|one| (0..hosts).map(move |two| (one, two))) {
                    cluster.set_cut(one, two, (one % 2) != (two % 2));
                    cluster.set_partitioned(one, one % 2 == 0 || !reaches);
                }
            }
            7..=10 => (0..hosts).for_each(|host| cluster.set_partitioned(host, false)),
            11..=14 => (0..hosts).for_each(|host| isolate(&mut cluster, host, hosts, false)),
            15 | 16 => {
                let max_pause_ns = if random.one_in(3) { 8 * NANOS_PER_S } else { NANOS_PER_S };
                cluster.pause(host, random.between(NANOS_PER_MS, max_pause_ns));
            }
            17 => cluster.restart(host),
            18 if has_departures => cluster.shut_down_host(host, random.below(20 * NANOS_PER_S)),
            19..=21 => cluster.store.stop(),
            22..=24 => cluster.start_store(),
            25 if !has_departures => cluster.store.mark(),
            26 if !has_departures => cluster.lose_writes(1.0),
            27 if !has_departures && random.one_in(4) => cluster.replace_store(),
            28..=30 => cluster.set_load(host, 0, load(&mut random)),
            _ => {}
        }
        has_agreed |= cluster.has_agreement();
        assert_eq!(cluster.violation(), None);
    }
    assert!(has_agreed || cluster.admissions.iter().any(|(passed, _)| *passed > 0));
}

#[test]
fn a_new_run_agrees_only_once_the_store_has_its_list() {
    let at = |ms: u64| Instant::from_nanos((10_000 + ms) * NANOS_PER_MS);
    let members: PeerSet = ["0", "1"].map(|name| (name.to_owned(), true)).into();
    let names = members.keys().cloned().collect();
    let request = AgreementRequest { nonce: 7, number: 1, members: names, leads: false };
    let mut agreement = PeerAgreement::new("1", Timing::DEFAULT, at(0));
    agreement.add_members(members.clone());
    let refusal =
        |agreement: &mut PeerAgreement, ms: u64| agreement.on_request("0", &request, true, at(ms)).refusal;
    assert_eq!(refusal(&mut agreement, 3000), Some(AgreementRefusal::UnknownSender));
    agreement.set_members(members);
    // A store that has lost data: its former leader may act for one more term lease.
    agreement.hold_back(at(3000));
    assert!(!agreement.may_campaign(at(4900)) && !agreement.would_confirm("0", &request, at(4900)));
    assert_eq!(refusal(&mut agreement, 4900), Some(AgreementRefusal::Promised));
    assert!(agreement.may_campaign(at(5100)) && agreement.would_confirm("0", &request, at(5100)));
    assert_eq!(refusal(&mut agreement, 5100), None);
    assert!(!agreement.may_campaign(at(5100)));
}
