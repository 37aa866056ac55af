//! Arbitrary values in the store, written by another program: they cause no panic, no hang, and no
//! quota above the limit.

use policy::cluster::{
    ClusterGroupLimits, HostQuota, HostReport, LeaderAction, QuotaGrant, QuotaLeader, ReportedDemand, Term,
    Timing,
};
use policy::throttle::{LimitKind, Limits};
use policy::time::{Duration, Instant};
use proptest::prelude::*;

const TERM: Term = Term { revision: 1, nonce: 1 };
const RATE: u64 = 10_000;

/// Small numbers, and large ones that overflow sums.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..4_u64, 0..2 * RATE, Just(u64::MAX), Just(u64::MAX / 2 + 1), any::<u64>()]
}

fn by_kind() -> impl Strategy<Value = [u64; 6]> {
    prop::array::uniform6(number())
}

fn follows() -> impl Strategy<Value = Option<Term>> {
    let other = (number(), number()).prop_map(|(revision, nonce)| Some(Term { revision, nonce }));
    prop_oneof![3 => Just(Some(TERM)), 1 => Just(None), 1 => other]
}

fn report() -> impl Strategy<Value = HostReport> {
    let usage = (by_kind(), number(), number(), prop::array::uniform2(number())).prop_map(
        |(demand, waiting_ns, weight, reserved)| ReportedDemand { demand, waiting_ns, weight, reserved },
    );
    let counts = (number(), number(), number(), number());
    (counts, follows(), by_kind(), by_kind(), by_kind(), usage).prop_map(
        |((instance, number, seq, version), follows, leased, safe, released, reported_demand)| HostReport {
            instance,
            report_number: number,
            followed_term: follows,
            seq,
            leased,
            version,
            fallback: safe,
            released_capacity: released,
            demand: reported_demand,
        },
    )
}

fn spec() -> ClusterGroupLimits {
    let mut limits = Limits::default();
    let limit = limits.limit_mut(LimitKind::IopsTotal);
    (limit.rate, limit.burst_rate, limit.burst_length_s) = (RATE, 2 * RATE, 10);
    limits.limit_mut(LimitKind::BpsWrite).rate = RATE << 12;
    ClusterGroupLimits::new(1, limits, 4, None).unwrap()
}

proptest! {
    #[test]
    fn hostile_reports_never_yield_more_than_the_limit(
        reports in prop::collection::vec((0..4_u8, report(), 0..3000_u64), 1..60),
    ) {
        let mut now = Instant::ZERO + Duration::from_secs(10);
        let mut leader = QuotaLeader::new(TERM, spec(), Timing::DEFAULT, now, now);
        for (host, report, ms) in reports {
            now += Duration::from_millis(ms);
            leader.on_key_renewed(now);
            leader.on_report(&format!("host{host}"), report, now);
            for action in leader.tick(now) {
                let LeaderAction::Write(grants) = action else { continue };
                for (name, grant) in grants {
                    let leased = grant.leased[LimitKind::IopsTotal.index()];
                    prop_assert!(leased <= RATE, "{name} has {leased} of {RATE}");
                }
            }
        }
    }

    #[test]
    fn hostile_grants_do_not_break_a_host(
        grants in prop::collection::vec((by_kind(), by_kind(), number(), 0..8_u64, 0..3000_u64), 1..60),
    ) {
        let mut now = Instant::ZERO + Duration::from_secs(10);
        let mut host = HostQuota::new(7, spec(), Timing::DEFAULT);
        host.on_leader(TERM);
        let all = ReportedDemand { demand: [u64::MAX; 6], waiting_ns: 1, weight: 100, reserved: [0; 2] };
        for (leased, credit, seq, answers, ms) in grants {
            now += Duration::from_millis(ms);
            host.tick(all, now);
            let grant = QuotaGrant { term: TERM, instance: 7, report_number: answers, seq, spec: spec(), leased, credit };
            host.on_grant(&grant, now, |_, credit, _| credit);
            prop_assert!(host.limits().validate().is_ok(), "{:?}", host.limits());
            host.expire_lease(now, |_, credit, _| credit);
        }
    }
}
