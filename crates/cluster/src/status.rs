//! The report of a cluster: hosts, their demand and quota, the leader.
//!
//! Read from etcd on request. Only the leader knows the age of a host's report: clocks of different
//! hosts are never compared.

use std::collections::BTreeMap;

use api::{
    AllDemand, ClusterGroup, ClusterHost, ClusterMember, ClusterReport, DemandValue, LimitValues,
    ReservedRates, UnreadableGroup,
};
use policy::{
    throttle::{LimitKind, LimitPart, LimitSetting},
    time::Instant,
};

use super::{
    environment::now,
    etcd::{EtcdClient, EtcdError, EtcdKeyValue},
    etcd_values::{self, HostGrants, HostIdentity, HostReports, ReportValue},
    keys::EtcdKey,
    leader::LeaderTerm,
    reservations::{capacity, max_reservable},
    session_state::SessionState,
};

/// Report without any data, if the agent does not answer.
pub(super) fn unavailable(why: &str) -> ClusterReport {
    ClusterReport { reason: Some(why.to_owned()), ..ClusterReport::default() }
}

/// Report while etcd is unreachable: the last known state and its age, if etcd has answered this
/// run at all. Demand and use are unknown.
pub(super) fn last_known(known: &SessionState, answered: Option<Instant>, why: &str) -> ClusterReport {
    ClusterReport {
        connected: false,
        joined: false,
        reason: Some(why.to_owned()),
        known_ms_ago: answered.and_then(|at| u64::try_from((now() - at).as_millis()).ok()),
        ..assemble(known, None, &[])
    }
}

/// Report with the hosts' demand and quota, read from etcd.
pub(super) async fn current(
    known: &SessionState,
    leading: Option<&LeaderTerm>,
    etcd: &mut EtcdClient,
) -> Result<ClusterReport, EtcdError> {
    let (_, found) = etcd.read(&[known.keys.below_all_hosts(), known.keys.reports()]).await?;
    Ok(ClusterReport { etcd: Some(etcd.member()), ..assemble(known, leading, &found) })
}

/// Assembles the report. `found` are the keys of hosts and their reports.
fn assemble(
    known: &SessionState,
    leading: Option<&LeaderTerm>,
    found: &[Vec<EtcdKeyValue>],
) -> ClusterReport {
    let keys = &known.keys;
    let (mut hosts, mut reports, mut grants) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for value in found.iter().flatten() {
        match keys.parse(&value.key) {
            Some(EtcdKey::Host(host)) => {
                drop(hosts.insert(host, etcd_values::read::<HostIdentity>(&value.value).ok()));
            }
            Some(EtcdKey::Report(host)) => {
                drop(etcd_values::read(&value.value).map(|read: HostReports| reports.insert(host, read)));
            }
            Some(EtcdKey::Grant(host)) => {
                drop(etcd_values::read(&value.value).map(|read: HostGrants| grants.insert(host, read)));
            }
            _ => {}
        }
    }
    // A stopped host is listed while its reservations wait for its next run.
    let waiting = known.reservations.iter().filter(|(_, reservations)| !reservations.groups.is_empty());
    let waiting = waiting.map(|(host, _)| &**host);
    let mut names: Vec<&str> = hosts.keys().chain(reports.keys()).copied().chain(waiting).collect();
    names.sort_unstable();
    names.dedup();
    let age = |host: &str| {
        let reported_at = leading?.last_report_at(host)?;
        u64::try_from((now() - reported_at).as_millis()).ok()
    };
    let lease_ms = u64::try_from(known.timing.lease.as_millis()).unwrap_or(u64::MAX);
    // A lease ends before the name does: a host that was silent for a lease has no quota.
    let may_have_lease = |host: &str| hosts.contains_key(host) && age(host).is_none_or(|ms| ms <= lease_ms);
    let host = |name: &&str| {
        let identity = hosts.get(name).and_then(Option::as_ref);
        ClusterHost {
            name: (*name).to_owned(),
            present: hosts.contains_key(name),
            weir: identity.map(|identity| identity.weir.clone()),
            pid: identity.map(|identity| identity.pid),
            last_report_ms_ago: age(name),
        }
    };
    let existing_groups = known.groups.iter().filter(|(_, stored)| !stored.group.removed);
    let groups = existing_groups.map(|(name, stored)| {
        let member = |host: &&str| {
            let report = reports.get(host)?.groups.get(name)?;
            let granted =
                grants.get(host).and_then(|grants| grants.groups.get(name)).map(|grant| grant.leased);
            let reserved =
                known.reservations.get(*host).and_then(|reservations| reservations.groups.get(name));
            Some(ClusterMember {
                host: (*host).to_owned(),
                demand: demand(report),
                waiting_ns: report.waiting_ns(),
                weight: report.weight(),
                in_force: in_force(report, may_have_lease(host)),
                fallback_share: by_kind(report.safe),
                granted: by_kind(granted.unwrap_or_default()),
                reserved: reserved.copied().unwrap_or_default().into(),
            })
        };
        let reserved =
            known.reservations.iter().filter_map(|(host, one)| Some((host, *one.groups.get(name)?)));
        let by: BTreeMap<String, [u64; 2]> = reserved.map(|(host, rates)| ((*host).clone(), rates)).collect();
        let committed = add(by.values());
        let limits = *stored.spec.limits();
        ClusterGroup {
            name: name.clone(),
            change: stored.group.number,
            limits: stored.group.limits.clone(),
            max_hosts: stored.group.hosts,
            fallback_share: by_kind(stored.spec.fallback_share()),
            fallback_share_ppm: stored.group.configured_share_ppm(),
            reserved: committed.into(),
            reserved_by: by.into_iter().map(|(host, promised)| (host, promised.into())).collect(),
            reservable: [0, 1].map(|unit| max_reservable(&limits, unit).unwrap_or(0)).into(),
            overcommitted: [0, 1]
                .map(|unit| {
                    max_reservable(&limits, unit).map_or(0, |max| committed[unit].saturating_sub(max))
                })
                .into(),
            hosts: names.iter().filter_map(member).collect(),
        }
    });
    let all = add(known.reservations.values().flat_map(|reservations| reservations.groups.values()));
    let unreadable =
        |(group, why): (&String, &String)| UnreadableGroup { group: group.clone(), reason: why.clone() };
    ClusterReport {
        connected: true,
        joined: known.joined.is_some(),
        leader: known.leader.as_ref().map(|(_, leader)| leader.clone()),
        hosts: names.iter().map(host).collect(),
        groups: groups.collect(),
        reserved: all.into(),
        capacity: ReservedRates::from(capacity(known.reservations.values())),
        unreadable_groups: known.unreadable_groups.iter().map(unreadable).collect(),
        ..ClusterReport::default()
    }
}

fn add<'a>(rates: impl Iterator<Item = &'a [u64; 2]>) -> [u64; 2] {
    rates.fold([0; 2], |sum, more| [0, 1].map(|unit| sum[unit].saturating_add(more[unit])))
}

/// Values by the limits' names, without zeros.
fn by_kind(numbers: policy::cluster::ByKind) -> LimitValues {
    let known = LimitKind::ALL.into_iter().filter(|kind| numbers[kind.index()] > 0);
    known.map(|kind| (limit_name(kind), numbers[kind.index()])).collect()
}

fn limit_name(kind: LimitKind) -> String {
    LimitSetting::Limit(kind, LimitPart::Rate).name().to_owned()
}

/// Quota that a host may use. A host that left or is partitioned has only its fallback share:
/// leases end long before its name does.
fn in_force(report: &ReportValue, may_have_lease: bool) -> LimitValues {
    let leased = |kind: LimitKind| if may_have_lease { report.leased[kind.index()] } else { 0 };
    by_kind(LimitKind::ALL.map(|kind| leased(kind).saturating_add(report.safe[kind.index()])))
}

fn demand(report: &ReportValue) -> BTreeMap<String, DemandValue> {
    let limited = LimitKind::ALL.into_iter().filter(|kind| report.safe[kind.index()] > 0);
    let demand = |kind: LimitKind| match report.demand[kind.index()] {
        u64::MAX => DemandValue::Unbounded(AllDemand::All),
        units => DemandValue::Rate(units),
    };
    limited.map(|kind| (limit_name(kind), demand(kind))).collect()
}
