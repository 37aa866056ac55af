//! Arbitrary values in the store, written by another program: they cause no panic, no hang, and no
//! quota above the limit.

use policy::cluster::{Action, Grant, Host, Leader, Report, Spec, Term, Timing, Usage};
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

fn report() -> impl Strategy<Value = Report> {
    let usage = (by_kind(), number(), number(), prop::array::uniform2(number()))
        .prop_map(|(demand, waiting_ns, weight, reserved)| Usage { demand, waiting_ns, weight, reserved });
    let counts = (number(), number(), number(), number());
    (counts, follows(), by_kind(), by_kind(), by_kind(), usage).prop_map(
        |((instance, number, seq, version), follows, leased, safe, given, wants)| Report {
            instance,
            number,
            follows,
            seq,
            leased,
            version,
            safe,
            given,
            wants,
        },
    )
}

fn spec() -> Spec {
    let mut limits = Limits::default();
    let limit = limits.limit_mut(LimitKind::IopsTotal);
    (limit.rate, limit.burst_rate, limit.burst_length_s) = (RATE, 2 * RATE, 10);
    limits.limit_mut(LimitKind::BpsWrite).rate = RATE << 12;
    Spec::new(1, limits, 4, None).unwrap()
}

proptest! {
    #[test]
    fn a_leader_gives_no_host_more_than_there_is_whatever_reports_say(
        reports in prop::collection::vec((0..4_u8, report(), 0..3000_u64), 1..60),
    ) {
        let mut now = Instant::ZERO + Duration::from_secs(10);
        let mut leader = Leader::new(TERM, spec(), Timing::DEFAULT, now, now);
        for (host, report, ms) in reports {
            now += Duration::from_millis(ms);
            leader.kept_alive(now);
            leader.on_report(&format!("host{host}"), report, now);
            for action in leader.tick(now) {
                let Action::Write(grants) = action else { continue };
                for (name, grant) in grants {
                    let leased = grant.leased[LimitKind::IopsTotal.index()];
                    prop_assert!(leased <= RATE, "{name} has {leased} of {RATE}");
                }
            }
        }
    }

    #[test]
    fn a_host_takes_any_grant_and_goes_on(
        grants in prop::collection::vec((by_kind(), by_kind(), number(), 0..8_u64, 0..3000_u64), 1..60),
    ) {
        let mut now = Instant::ZERO + Duration::from_secs(10);
        let mut host = Host::new(7, spec(), Timing::DEFAULT);
        host.on_leader(TERM);
        let all = Usage { demand: [u64::MAX; 6], waiting_ns: 1, weight: 100, reserved: [0; 2] };
        for (leased, credit, seq, answers, ms) in grants {
            now += Duration::from_millis(ms);
            host.tick(all, now);
            let grant = Grant { term: TERM, instance: 7, answers, seq, spec: spec(), leased, credit };
            host.on_grant(&grant, now, |_, credit, _| credit);
            prop_assert!(host.limits().validate().is_ok(), "{:?}", host.limits());
            host.run_out(now, |_, credit, _| credit);
        }
    }
}
