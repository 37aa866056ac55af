//! Length of the values that hosts and the leader write to etcd.
//!
//! The encoding (`values.rs` of crate `cluster`) is above this crate; a test there checks that both
//! have the same length.

use policy::{
    cluster::{HostReport, QuotaGrant, Term, simulated::StoreValue},
    throttle::{LimitSetting, Limits},
};
use serde_json::{Map, Value, json};

/// Name of the group in the measured values.
const GROUP: &str = "group";

/// Length in bytes of a value with one group, whose name has five letters.
pub fn length(value: StoreValue<'_>) -> u64 {
    let (group, of_group) = match value {
        StoreValue::Report(report) => (GROUP, of_report(report)),
        StoreValue::Grant(grant) => (GROUP, of_grant(grant)),
    };
    json!({ "groups": { group: of_group }, "version": 1 }).to_string().len() as u64
}

fn of_term(term: &Term) -> Value {
    json!({ "revision": term.revision, "nonce": term.nonce })
}

fn of_report(report: &HostReport) -> Value {
    json!({
        "instance": report.instance,
        "number": report.report_number,
        "follows": report.followed_term.as_ref().map(of_term),
        "seq": report.seq,
        "leased": report.leased,
        "spec": report.version,
        "safe": report.fallback,
        "given": report.released_capacity,
        "demand": report.demand.demand,
        "waiting_ns": report.demand.waiting_ns,
        "weight": report.demand.weight,
        "reserved": report.demand.reserved,
    })
}

fn of_grant(grant: &QuotaGrant) -> Value {
    let limits = grant.spec.limits();
    let is_set = |setting: &LimitSetting| limits.get(*setting) != Limits::default().get(*setting);
    let set = LimitSetting::ALL.into_iter().filter(is_set);
    let limits: Map<_, _> =
        set.map(|setting| (setting.name().to_owned(), json!(limits.get(setting)))).collect();
    json!({
        "term": of_term(&grant.term),
        "instance": grant.instance,
        "answers": grant.report_number,
        "seq": grant.seq,
        "spec": {
            "number": grant.spec.version() >> 32,
            "nonce": grant.spec.version() & 0xffff_ffff,
            "limits": limits,
            "hosts": grant.spec.hosts(),
        },
        "leased": grant.leased,
        "credit": grant.credit,
    })
}
