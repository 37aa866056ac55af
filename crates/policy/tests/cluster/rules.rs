//! Reactions of a host and its leader to single messages, without a network.

use crate::TIMING;
use policy::cluster::{
    ClusterGroupLimits, DivisionError, HostQuota, HostReport, LeaderAction, QuotaGrant, QuotaLeader,
    ReportedDemand, Term,
};
use policy::throttle::{LimitKind, Limits};
use policy::time::{Duration, Instant};

const ONE: Term = Term { revision: 1, nonce: 1 };
const TWO: Term = Term { revision: 2, nonce: 2 };
const ALL: ReportedDemand =
    ReportedDemand { demand: [u64::MAX; 6], waiting_ns: 0, weight: 100, reserved: [0; 2] };

fn at(ms: u64) -> Instant {
    Instant::from_nanos(ms * policy::cluster::simulated::NANOS_PER_MS)
}

fn spec() -> ClusterGroupLimits {
    let mut limits = Limits::default();
    limits.limit_mut(LimitKind::IopsTotal).rate = 1000;
    ClusterGroupLimits::new(1, limits, 2, Some(100_000)).unwrap()
}

fn iops(host: &HostQuota) -> u64 {
    host.limits().limit(LimitKind::IopsTotal).rate
}

fn accept(host: &mut HostQuota, grant: &QuotaGrant, now: Instant) {
    host.on_grant(grant, now, |_, _, _| [0; 6]);
}

fn report(host: &mut HostQuota, leader: Term, now: Instant) -> HostReport {
    host.on_leader(leader);
    host.tick(ALL, now).unwrap()
}

fn grants(leader: &mut QuotaLeader, now: Instant) -> Vec<QuotaGrant> {
    let written = |action| match action {
        LeaderAction::Write(grants) => grants.into_iter().map(|(_, grant)| grant).collect(),
        LeaderAction::StandDown => Vec::new(),
    };
    leader.tick(now).into_iter().flat_map(written).collect()
}

/// A leader for which leases of earlier leaders have expired.
fn settled() -> QuotaLeader {
    let mut leader = QuotaLeader::new(ONE, spec(), TIMING, at(0), at(0));
    leader.on_key_renewed(at(4000));
    leader
}

#[test]
fn lease_starts_with_report_and_falls_back() {
    let (mut leader, mut host) = (settled(), HostQuota::new(1, spec(), TIMING));
    leader.on_report("a", report(&mut host, ONE, at(4000)), at(4500));
    let grant = grants(&mut leader, at(4500))[0];
    accept(&mut host, &grant, at(4600));
    assert_eq!((iops(&host), host.lease_end()), (900, at(6000)), "all but the other host's fallback share");
    // Called late, after a pause: the fallback share applies as of the end of the lease.
    host.expire_lease(at(9000), |limits, _, since| {
        assert_eq!((limits.limit(LimitKind::IopsTotal).rate, since), (100, at(6000)));
        [0; 6]
    });
    accept(&mut host, &grant, at(9000));
    assert_eq!(iops(&host), 100, "the same grant again");
}

#[test]
fn foreign_grants_are_ignored() {
    let (mut leader, mut host) = (settled(), HostQuota::new(2, spec(), TIMING));
    leader.on_report("a", report(&mut host, ONE, at(4000)), at(4000));
    let grant = grants(&mut leader, at(4000))[0];
    accept(&mut host, &QuotaGrant { instance: 1, ..grant }, at(4001));
    accept(&mut host, &QuotaGrant { term: TWO, ..grant }, at(4001));
    accept(&mut host, &QuotaGrant { report_number: 7, ..grant }, at(4001));
    let mut moved_on = HostQuota::new(2, spec(), TIMING);
    report(&mut moved_on, ONE, at(4000));
    moved_on.on_leader(TWO);
    accept(&mut moved_on, &grant, at(4001));
    moved_on.on_leader(ONE);
    // Back at the first leader: this grant answers a report from before the change and is void.
    accept(&mut moved_on, &grant, at(4001));
    assert_eq!((iops(&host), iops(&moved_on)), (100, 100));
}

#[test]
fn no_raise_before_acknowledged_release() {
    let mut leader = settled();
    let [mut first, mut second] = [1, 1].map(|instance| HostQuota::new(instance, spec(), TIMING));
    leader.on_report("one", report(&mut first, ONE, at(4000)), at(4000));
    accept(&mut first, &grants(&mut leader, at(4000))[0], at(4001));
    leader.on_report("one", first.tick(ALL, at(4001)).unwrap(), at(4001));
    leader.on_report("other", report(&mut second, ONE, at(4001)), at(4001));
    let lowered = grants(&mut leader, at(4030));
    let leased: Vec<u64> = lowered.iter().map(|grant| grant.leased[LimitKind::IopsTotal.index()]).collect();
    // The first host is lowered; the second gets nothing until that is acknowledged.
    assert_eq!(leased, [400, 0]);
    accept(&mut first, &lowered[0], at(4031));
    accept(&mut second, &lowered[1], at(4031));
    leader.on_report("other", second.tick(ALL, at(4031)).unwrap(), at(4031));
    assert_eq!(grants(&mut leader, at(4060)).len(), 0, "not acknowledged yet");
    leader.on_report("one", first.tick(ALL, at(4061)).unwrap(), at(4061));
    let raised = grants(&mut leader, at(4090));
    accept(&mut second, raised.last().unwrap(), at(4091));
    assert_eq!((iops(&first), iops(&second)), (500, 500));
}

#[test]
fn new_leader_waits_one_lease_for_unknown_quota() {
    let (mut leader, mut host) =
        (QuotaLeader::new(TWO, spec(), TIMING, at(0), at(0)), HostQuota::new(1, spec(), TIMING));
    leader.on_report("a", report(&mut host, TWO, at(0)), at(0));
    let leased = |grants: Vec<QuotaGrant>| grants.last().map_or(0, |grant| grant.leased.iter().sum());
    assert_eq!(leased(grants(&mut leader, at(0))), 0);
    leader.on_key_renewed(at(1900));
    leader.on_report("a", host.tick(ALL, at(1900)).unwrap(), at(1900));
    assert_eq!(leased(grants(&mut leader, at(1999))), 0);
    host.on_leader(TWO);
    leader.on_report("a", host.tick(ALL, at(2900)).unwrap(), at(2900));
    let _answer = grants(&mut leader, at(2900));
    assert!(
        leader.tick(at(1900) + Duration::from_secs(2)).contains(&LeaderAction::StandDown),
        "its key may be gone"
    );
}

#[test]
fn departed_host_keeps_lease_and_frees_fallback_share() {
    let (mut leader, mut host) = (settled(), HostQuota::new(1, spec(), TIMING));
    leader.on_report("a", report(&mut host, ONE, at(4000)), at(4000));
    accept(&mut host, &grants(&mut leader, at(4000))[0], at(4000));
    // A host with other limits, under which its fallback share would be larger for ever.
    let safe = [0, 0, 0, 700, 0, 0];
    let ghost = HostReport {
        version: 7,
        fallback: safe,
        ..report(&mut HostQuota::new(1, spec(), TIMING), TWO, at(4000))
    };
    leader.on_report("ghost", ghost, at(4100));
    leader.on_report("a", host.tick(ALL, at(4100)).unwrap(), at(4100));
    let less = grants(&mut leader, at(4300))[0].leased[3];
    assert!(less <= 200, "700 of 1000 are set aside: {less}");
    leader.on_host_removed("ghost");
    leader.on_host_removed("a");
    assert!(grants(&mut leader, at(4400)).is_empty());
    // Until the lease of the host that left has expired, its quota is not free.
    let mut two = HostQuota::new(1, spec(), TIMING);
    leader.on_report("b", report(&mut two, ONE, at(4400)), at(4400));
    assert_eq!(grants(&mut leader, at(4500))[0].leased[3], 0, "the whole is in force yet");
    leader.on_report("b", two.tick(ALL, at(5500)).unwrap(), at(5500));
    leader.on_key_renewed(at(6000));
    leader.on_report(
        "b",
        {
            let mut next = HostQuota::new(2, spec(), TIMING);
            report(&mut next, ONE, at(7000))
        },
        at(7000),
    );
    assert_eq!(grants(&mut leader, at(7000))[0].leased[3], 800, "all but the fallback shares");
    // The host reports again, and its grants continue in sequence.
    leader.on_host_removed("b");
    let late_report = host.tick(ALL, at(10_000)).unwrap();
    leader.on_key_renewed(at(10_000));
    leader.on_report("a", late_report.clone(), at(10_000));
    let new_grants = grants(&mut leader, at(10_000));
    assert_eq!((new_grants.len(), new_grants[0].leased[3]), (1, 800));
    assert!(new_grants[0].seq > late_report.seq, "else it would be an old one");
}

#[test]
fn a_new_host_waits_until_its_fallback_share_is_free() {
    let limits = *spec().limits();
    let spec = ClusterGroupLimits::new(1, limits, 1, Some(200_000)).unwrap();
    let mut leader = QuotaLeader::new(ONE, spec, TIMING, at(0), at(0));
    leader.on_key_renewed(at(4000));
    let mut first = HostQuota::new(1, spec, TIMING);
    let mut second = HostQuota::new_uncounted(1, spec, TIMING);
    leader.on_report("one", report(&mut first, ONE, at(4000)), at(4000));
    accept(&mut first, &grants(&mut leader, at(4000))[0], at(4001));
    assert_eq!((iops(&first), iops(&second)), (1000, 1));
    leader.on_report("one", first.tick(ALL, at(4001)).unwrap(), at(4001));
    leader.on_report("two", report(&mut second, ONE, at(4002)), at(4002));
    let lowered = grants(&mut leader, at(4030));
    assert_eq!((lowered.len(), lowered[0].leased[LimitKind::IopsTotal.index()]), (1, 300));
    accept(&mut first, &lowered[0], at(4031));
    leader.on_report("one", first.tick(ALL, at(4032)).unwrap(), at(4032));
    let granted = grants(&mut leader, at(4060));
    accept(&mut second, granted.last().unwrap(), at(4061));
    assert!(iops(&first) + iops(&second) <= 1000 && iops(&second) >= 200, "{}", iops(&second));
}

#[test]
fn fallback_shares_must_fit() {
    let limits = *spec().limits();
    assert_eq!(ClusterGroupLimits::new(1, limits, 0, None), Err(DivisionError::Hosts(0)));
    let too_low = Err(DivisionError::TooLow(LimitKind::IopsTotal, 1000, 1001));
    assert_eq!(
        ClusterGroupLimits::new(1, limits, 2, Some(500_001)).map(|spec| spec.fallback_share()[3]),
        Ok(500)
    );
    assert_eq!(
        ClusterGroupLimits::new(1, limits, 2, Some(501_000)),
        Err(DivisionError::FallbackShare(501_000, 2))
    );
    assert_eq!(ClusterGroupLimits::new(1, limits, 1001, None), too_low, "one a second each");
}
