//! Length of the values that hosts and the leader write to etcd.
//!
//! The daemon's encoding (`cluster/values.rs`) is above this crate; a test there checks that both
//! have the same length.

use policy::{
    cluster::{Grant, Report, Term, simulated::Word},
    throttle::{Limits, Setting},
};
use serde_json::{Map, Value, json};

/// Name of the group in the measured values.
const GROUP: &str = "group";

/// Length in bytes of a value with one group, whose name has five letters.
pub fn length(word: Word<'_>) -> u64 {
    let (group, of_group) = match word {
        Word::Report(report) => (GROUP, of_report(report)),
        Word::Grant(grant) => (GROUP, of_grant(grant)),
    };
    json!({ "groups": { group: of_group }, "version": 1 }).to_string().len() as u64
}

fn of_term(term: &Term) -> Value {
    json!({ "revision": term.revision, "nonce": term.nonce })
}

fn of_report(report: &Report) -> Value {
    json!({
        "instance": report.instance,
        "number": report.number,
        "follows": report.follows.as_ref().map(of_term),
        "seq": report.seq,
        "leased": report.leased,
        "spec": report.version,
        "safe": report.safe,
        "given": report.given,
        "demand": report.wants.demand,
        "waiting_ns": report.wants.waiting_ns,
        "weight": report.wants.weight,
        "reserved": report.wants.reserved,
    })
}

fn of_grant(grant: &Grant) -> Value {
    let limits = grant.spec.limits();
    let is_set = |setting: &Setting| limits.get(*setting) != Limits::default().get(*setting);
    let set = Setting::ALL.into_iter().filter(is_set);
    let limits: Map<_, _> =
        set.map(|setting| (setting.name().to_owned(), json!(limits.get(setting)))).collect();
    json!({
        "term": of_term(&grant.term),
        "instance": grant.instance,
        "answers": grant.answers,
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
