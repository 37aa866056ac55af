//! Checks for the fuzz target and a test: invariants that hold for any value in etcd.

use policy::{
    cluster::{self, ClusterGroupLimits, HostQuota, LeaderAction, QuotaLeader, ReportedDemand, Timing},
    throttle::{LimitKind, Limits},
    time::Instant,
};

use super::{
    etcd::{EtcdEvent, parse_events},
    etcd_values::{
        self, AskedHosts, GroupValue, HostGrants, HostIdentity, HostReports, HostReservations, PeerValue,
    },
    peer_message::PeerMessage,
};

const SECOND: u64 = 1_000_000_000;
const ALL: ReportedDemand =
    ReportedDemand { demand: [u64::MAX; 6], waiting_ns: 0, weight: 1, reserved: [0; 2] };

/// Parses bytes as a line of a watch, as each value, and as a message of another host.
///
/// # Panics
/// If reports make a leader grant more than the limits, or a grant makes a host use more.
pub fn etcd_values(bytes: &[u8]) {
    value(bytes);
    for event in parse_events(bytes).into_iter().flatten() {
        if let EtcdEvent::Put(key_value) = event {
            value(&key_value.value);
        }
    }
}

fn value(bytes: &[u8]) {
    let _ = etcd_values::read::<HostIdentity>(bytes);
    let _ = etcd_values::read::<PeerValue>(bytes);
    let _ = etcd_values::read::<AskedHosts>(bytes);
    // Messages of other hosts.
    if let Ok(message) = serde_json::from_slice::<PeerMessage>(bytes) {
        assert_eq!(serde_json::from_slice::<PeerMessage>(&message.line()).ok(), Some(message));
    }
    let _ = etcd_values::read::<etcd_values::LeaderValue>(bytes);
    let _ = etcd_values::read::<HostReservations>(bytes);
    if let Ok(group) = etcd_values::read::<GroupValue>(bytes)
        && let Ok(spec) = group.spec()
    {
        assert_eq!(GroupValue::from_spec(&spec, group.safe_share_ppm).spec(), Ok(spec));
    }
    if let Ok(reports) = etcd_values::read::<HostReports>(bytes) {
        check_leader(reports.groups.iter().map(|(name, report)| (name.as_str(), report.into())).collect());
    }
    for grant in
        etcd_values::read::<HostGrants>(bytes).into_iter().flat_map(|grants| grants.groups.into_values())
    {
        if let Ok(grant) = grant.read() {
            check_host(&grant);
        }
    }
}

/// Passes the reports to a leader, each as the report of one host.
fn check_leader(reports: Vec<(&str, cluster::HostReport)>) {
    let Some(term) = reports.iter().find_map(|(_, report)| report.followed_term) else { return };
    let mut limits = Limits::default();
    limits.limit_mut(LimitKind::IopsTotal).rate = 10_000;
    limits.limit_mut(LimitKind::BpsRead).rate = 1 << 30;
    let Ok(spec) = ClusterGroupLimits::new(1, limits, 16, None) else { return };
    let at = |seconds: u64| Instant::from_nanos(seconds * SECOND);
    let mut leader = QuotaLeader::new(term, spec, Timing::DEFAULT, at(0), at(0));
    for seconds in [1, 6, 7, 12] {
        leader.on_key_renewed(at(seconds));
        for (host, report) in &reports {
            leader.on_report(host, report.clone(), at(seconds));
        }
        if seconds == 7 {
            reports.iter().take(1).for_each(|(host, _)| leader.on_host_removed(host));
        }
        for action in leader.tick(at(seconds)) {
            let LeaderAction::Write(grants) = action else { panic!("it is elected still") };
            // Reports may claim more in total than the limits have; each grant must not.
            for (host, grant) in grants {
                let rates = LimitKind::ALL.map(|kind| (grant.leased[kind.index()], limits.limit(kind).rate));
                assert!(rates.iter().all(|(leased, limit)| leased <= limit), "{host}: {rates:?}");
            }
        }
    }
}

fn check_host(grant: &cluster::QuotaGrant) {
    let mut host = HostQuota::new(grant.instance, grant.spec, Timing::DEFAULT);
    host.on_leader(grant.term);
    let now = Instant::from_nanos(SECOND);
    let _ = host.tick(ALL, now);
    host.on_grant(&cluster::QuotaGrant { report_number: 1, ..*grant }, now, |_, _, _| [0; 6]);
    let parts = |host: &HostQuota| LimitKind::ALL.map(|kind| host.limits().limit(kind).rate);
    for (part, kind) in parts(&host).into_iter().zip(LimitKind::ALL) {
        let (fallback, limit) =
            (host.fallback_limits().limit(kind).rate, host.spec().limits().limit(kind).rate);
        assert!((fallback..=limit.max(fallback)).contains(&part), "{part} of {limit}");
    }
    host.expire_lease(Instant::MAX, |_, _, _| [0; 6]);
    assert_eq!(parts(&host), LimitKind::ALL.map(|kind| host.fallback_limits().limit(kind).rate));
}

#[cfg(test)]
mod tests {
    use openssl::base64;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn samples() -> Vec<Vec<u8>> {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = 1000;
        let spec = ClusterGroupLimits::new(7 << 32 | 5, limits, 16, None).unwrap();
        let term = cluster::Term { revision: 3, nonce: 4 };
        let mut host = HostQuota::new(9, spec, Timing::DEFAULT);
        host.on_leader(term);
        let report = host.tick(ALL, Instant::from_nanos(SECOND)).unwrap();
        let reports = [("a", &report), ("b", &report)].map(|(name, report)| (name.to_owned(), report.into()));
        let leased = [0, 0, 0, 100, 0, 0];
        let grant =
            cluster::QuotaGrant { term, instance: 9, report_number: 1, seq: 1, spec, leased, credit: [0; 6] };
        let grants = [("g".to_owned(), etcd_values::GrantValue::of(&grant, None))];
        let reports = etcd_values::write(&HostReports { groups: reports.into_iter().collect() });
        let line = json!({ "result": { "events": [{ "kv": {
            "key": base64::encode_block(b"k"), "value": base64::encode_block(&reports),
        } }] } });
        vec![
            reports,
            etcd_values::write(&HostGrants { groups: grants.into_iter().collect() }),
            etcd_values::write(&GroupValue::of(&limits, 16, None, 1, 1)),
            line.to_string().into_bytes(),
        ]
    }

    proptest! {
        #[test]
        fn damaged_values_are_rejected_or_harmless(
            sample in 0_usize..4, at in any::<prop::sample::Index>(), digits in "[0-9]{0,20}|[a-z\"{}]{1,3}",
        ) {
            let mut bytes = samples().swap_remove(sample);
            let at = at.index(bytes.len());
            // Replaces a whole number by another; elsewhere inserts text.
            let end = bytes[at..].iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(0).max(1) + at;
            bytes.splice(at..end, digits.into_bytes());
            etcd_values(&bytes);
        }
    }

    #[test]
    fn samples_parse() {
        for sample in samples() {
            etcd_values(&sample);
        }
        let read = etcd_values::read::<HostReports>(&samples()[0]).unwrap();
        assert_eq!(read.groups.len(), 2);
        assert_eq!(parse_events(&samples()[3]).unwrap().len(), 1);
    }
}
