//! What `weir cluster status` is told: hosts, what they want, what they may have, who leads.
//!
//! Read from etcd when it is asked for. How long ago a host reported the leader alone knows: no
//! clocks of two hosts are compared.

use std::collections::BTreeMap;

use policy::{
    throttle::{LimitKind, Part, Setting},
    time::Instant,
};
use serde_json::{Map, Value, json};

use super::{
    etcd::{Error, Etcd, KeyValue},
    keys::Key,
    known::Known,
    leading::Leading,
    outside::now,
    promising::{capacity, most},
    values::{self, Grants, Identity, Report, Reports},
};

/// Where nobody can be asked.
pub(super) fn apart(why: &str) -> Value {
    json!({ "connected": false, "reason": why, "groups": [], "hosts": [] })
}

/// Where etcd cannot be asked: what it said last, and how long ago that is, if it has answered this
/// run at all. What hosts want and use now nobody knows.
pub(super) fn last(known: &Known, answered: Option<Instant>, why: &str) -> Value {
    let mut answer = shown(known, None, &[]);
    (answer["connected"], answer["joined"], answer["reason"]) = (json!(false), json!(false), json!(why));
    if let Some(age) = answered.and_then(|at| u64::try_from((now() - at).as_millis()).ok()) {
        answer["known-ms-ago"] = json!(age);
    }
    answer
}

/// All of it.
pub(super) async fn connected(
    known: &Known,
    leading: Option<&Leading>,
    etcd: &mut Etcd,
) -> Result<Value, Error> {
    let (_, found) = etcd.read(&[known.keys.of_hosts(), known.keys.reports()]).await?;
    let mut answer = shown(known, leading, &found);
    answer["etcd"] = json!(etcd.member());
    Ok(answer)
}

/// `found`: what stands in etcd of hosts and their reports.
fn shown(known: &Known, leading: Option<&Leading>, found: &[Vec<KeyValue>]) -> Value {
    let keys = &known.keys;
    let (mut hosts, mut reports, mut grants) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for value in found.iter().flatten() {
        match keys.read(&value.key) {
            Some(Key::Host(host)) => drop(hosts.insert(host, values::read::<Identity>(&value.value).ok())),
            Some(Key::Report(host)) => {
                drop(values::read(&value.value).map(|read: Reports| reports.insert(host, read)));
            }
            Some(Key::Grant(host)) => {
                drop(values::read(&value.value).map(|read: Grants| grants.insert(host, read)));
            }
            _ => {}
        }
    }
    // A host that has ended waits with what it promises.
    let waiting = known.promises.iter().filter(|(_, promises)| !promises.groups.is_empty());
    let waiting = waiting.map(|(host, _)| &**host);
    let mut names: Vec<&str> = hosts.keys().chain(reports.keys()).copied().chain(waiting).collect();
    names.sort_unstable();
    names.dedup();
    let age = |host: &str| {
        let heard = leading?.heard(host)?;
        u64::try_from((now() - heard).as_millis()).ok()
    };
    let lease_ms = u64::try_from(known.timing.lease.as_millis()).unwrap_or(u64::MAX);
    // Who was not heard of for a lease has none, whether its name is still its own or not.
    let may_have_lease = |host: &str| hosts.contains_key(host) && age(host).is_none_or(|ms| ms <= lease_ms);
    let host = |name: &&str| {
        let mut entry = json!({ "name": name, "present": hosts.contains_key(name) });
        if let Some(Some(identity)) = hosts.get(name) {
            entry["weir"] = json!(identity.weir);
            entry["pid"] = json!(identity.pid);
        }
        if let Some(age) = age(name) {
            entry["heard-ms-ago"] = json!(age);
        }
        entry
    };
    let there = known.groups.iter().filter(|(_, stored)| !stored.group.removed);
    let groups = there.map(|(name, stored)| {
        let member = |host: &&str| {
            let report = reports.get(host)?.groups.get(name)?;
            let granted =
                grants.get(host).and_then(|grants| grants.groups.get(name)).map(|grant| grant.leased);
            let promised = known.promises.get(*host).and_then(|promises| promises.groups.get(name));
            Some(json!({
                "host": host,
                "demand": wants(report),
                "waiting-ns": report.waiting_ns(),
                "weight": report.weight(),
                "in-force": in_force(report, may_have_lease(host)),
                "safe-share": by_kind(report.safe),
                "granted": by_kind(granted.unwrap_or_default()),
                "promised": promises(promised.copied().unwrap_or_default()),
            }))
        };
        let promised = known.promises.iter().filter_map(|(host, one)| Some((host, one.groups.get(name)?)));
        let by: BTreeMap<_, _> = promised.collect();
        let committed = add(by.values().copied());
        let limits = *stored.spec.limits();
        let mut shown = json!({
            "name": name,
            "change": stored.group.number,
            "limits": stored.group.limits,
            "most-hosts": stored.group.hosts,
            "safe-share": by_kind(stored.spec.safe()),
            "promised": promises(committed),
            "promised-by": by.iter().map(|(host, promised)| ((*host).clone(), promises(**promised))).collect::<Map<_, _>>(),
            "promisable": promises([0, 1].map(|unit| most(&limits, unit).unwrap_or(0))),
            "overpromised": promises([0, 1].map(|unit| {
                most(&limits, unit).map_or(0, |there| committed[unit].saturating_sub(there))
            })),
            "hosts": names.iter().filter_map(member).collect::<Vec<_>>(),
        });
        if let Some(ppm) = stored.group.safe_share_ppm {
            shown["safe-share-ppm"] = json!(ppm);
        }
        shown
    });
    let groups: Vec<_> = groups.collect();
    let all = add(known.promises.values().flat_map(|promises| promises.groups.values()));
    let mut answer = json!({
        "connected": true,
        "joined": known.joined.is_some(),
        "hosts": names.iter().map(host).collect::<Vec<_>>(),
        "groups": groups,
        "promised": promises(all),
        "capacity": promises(capacity(known.promises.values())),
    });
    if !known.not_understood.is_empty() {
        let one = |(group, why): (&String, &String)| json!({ "group": group, "reason": why });
        answer["not-understood"] = known.not_understood.iter().map(one).collect();
    }
    if let Some((_, leader)) = &known.leader {
        answer["leader"] = json!(leader);
    }
    answer
}

fn add<'a>(promises: impl Iterator<Item = &'a [u64; 2]>) -> [u64; 2] {
    promises.fold([0; 2], |sum, more| [0, 1].map(|unit| sum[unit].saturating_add(more[unit])))
}

fn promises([iops, bps]: [u64; 2]) -> Value {
    let known = [("iops", iops), ("bps", bps)].into_iter().filter(|(_, figure)| *figure > 0);
    Value::Object(known.map(|(name, figure)| (name.to_owned(), json!(figure))).collect::<Map<_, _>>())
}

/// By the limits' names; what is 0 is left out.
fn by_kind(numbers: policy::cluster::ByKind) -> Value {
    let name = |kind| Setting::Limit(kind, Part::Rate).name().to_owned();
    let known = LimitKind::ALL.into_iter().filter(|kind| numbers[kind.index()] > 0);
    Value::Object(known.map(|kind| (name(kind), json!(numbers[kind.index()]))).collect::<Map<_, _>>())
}

/// What a host may use. One that has gone, or is cut off, has no lease any more: those end long
/// before its name does.
fn in_force(report: &Report, may_have_lease: bool) -> Value {
    let leased = |kind: LimitKind| if may_have_lease { report.leased[kind.index()] } else { 0 };
    by_kind(LimitKind::ALL.map(|kind| leased(kind).saturating_add(report.safe[kind.index()])))
}

/// `"all"` where it would take all there is.
fn wants(report: &Report) -> Value {
    let name = |kind| Setting::Limit(kind, Part::Rate).name().to_owned();
    let limited = LimitKind::ALL.into_iter().filter(|kind| report.safe[kind.index()] > 0);
    let want = |kind: LimitKind| match report.demand[kind.index()] {
        u64::MAX => json!("all"),
        units => json!(units),
    };
    Value::Object(limited.map(|kind| (name(kind), want(kind))).collect::<Map<_, _>>())
}
