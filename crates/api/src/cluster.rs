//! Hosts that share limits over etcd: the response of `x-weir-query-cluster`, which `weir cluster
//! status --json` prints.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{ClusterAgreement, LimitValues};

/// The hosts of a cluster and the groups whose limits they share, as known to one of them.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ClusterReport {
    /// Name of the cluster.
    pub name: String,
    /// Name of the host that reports.
    pub host: String,
    /// True if etcd answers. Otherwise the rest is the last known state.
    pub connected: bool,
    /// True if the host is registered under its name.
    pub joined: bool,
    /// Reason if `connected` is false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Age of the last response of etcd. Absent while etcd responds, and before its first response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub known_ms_ago: Option<u64>,
    /// The member of etcd that answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd: Option<String>,
    /// The host that grants quota leases. Absent while there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// How the host keeps its quotas while `connected` is false. Absent without that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agreement: Option<ClusterAgreement>,
    /// Hosts without whose agreement there is no leader while etcd is unreachable, with the reason.
    /// Known to one host only.
    #[serde(rename = "missing-hosts", skip_serializing_if = "BTreeMap::is_empty")]
    pub missing_hosts: BTreeMap<String, String>,
    /// Number of other hosts that the host is connected to. Absent without `peer-address`.
    #[serde(rename = "connected-peers", skip_serializing_if = "Option::is_none")]
    pub connected_peers: Option<u64>,
    /// Hosts that are registered, report, or have reservations.
    pub hosts: Vec<ClusterHost>,
    /// Groups whose limits the hosts share.
    pub groups: Vec<ClusterGroup>,
    /// Sum of the reservations on all hosts.
    #[serde(rename = "reserved")]
    pub reserved: ReservedRates,
    /// Lowest capacity that a host measured below its disks; 0 is unknown.
    pub capacity: ReservedRates,
    /// Groups in etcd that this version cannot read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unreadable_groups: Vec<UnreadableGroup>,
    /// The groups of the cluster on the host that reports.
    #[serde(rename = "local-groups")]
    pub local_groups: Vec<LocalQuota>,
}

/// Result of a change of a group's limits: the response of `x-weir-cluster-set` and
/// `x-weir-cluster-remove`.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ClusterGroupChange {
    /// Name of the group.
    pub group: String,
    /// Number of the change.
    pub change: u32,
    /// Limits of all hosts together.
    pub limits: LimitValues,
    /// Number of hosts that fallback shares are computed for.
    pub hosts: u32,
    /// True if a host has the group.
    pub used: bool,
    /// Fallback share of each host in millionths, where it is configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallback_share_ppm: Option<u32>,
}

/// Host whose data `x-weir-cluster-forget` has removed from etcd.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ForgottenHost {
    /// Its name.
    pub host: String,
    /// The key of its report.
    pub key: String,
}

/// A host of a cluster.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ClusterHost {
    /// Its name.
    pub name: String,
    /// True if its registration is valid.
    pub present: bool,
    /// Version of its daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weir: Option<String>,
    /// Process identifier of its daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Age of its last report; known to the leader alone.
    #[serde(rename = "last-report-ms-ago", skip_serializing_if = "Option::is_none")]
    pub last_report_ms_ago: Option<u64>,
}

/// A group whose limits several hosts share.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ClusterGroup {
    /// Its name.
    pub name: String,
    /// Number of the last change of its limits.
    pub change: u32,
    /// Limits of all hosts together.
    pub limits: LimitValues,
    /// Number of hosts that fallback shares are computed for.
    #[serde(rename = "max-hosts")]
    pub max_hosts: u32,
    /// Fallback share of each host, by the limit's name.
    #[serde(rename = "fallback-share")]
    pub fallback_share: LimitValues,
    /// Fallback share of each host in millionths, where it is configured.
    #[serde(rename = "fallback-share-ppm", skip_serializing_if = "Option::is_none")]
    pub fallback_share_ppm: Option<u32>,
    /// Sum of the reservations in the group on all hosts.
    #[serde(rename = "reserved")]
    pub reserved: ReservedRates,
    /// Reservations in the group by host.
    #[serde(rename = "reserved-by")]
    pub reserved_by: BTreeMap<String, ReservedRates>,
    /// Largest sum of reservations that the limits admit.
    #[serde(rename = "reservable")]
    pub reservable: ReservedRates,
    /// The part of the reservations that exceeds it.
    #[serde(rename = "overcommitted")]
    pub overcommitted: ReservedRates,
    /// Hosts that have disks in the group.
    pub hosts: Vec<ClusterMember>,
}

/// A host's part of a group.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ClusterMember {
    /// Name of the host.
    pub host: String,
    /// Rate that its disks would use, by the limit's name.
    pub demand: BTreeMap<String, DemandValue>,
    /// Time that its requests waited in the last interval.
    pub waiting_ns: u64,
    /// Sum of the weights of its disks.
    pub weight: u64,
    /// Quota in force: lease and fallback share.
    pub in_force: LimitValues,
    /// Its fallback share.
    #[serde(rename = "fallback-share")]
    pub fallback_share: LimitValues,
    /// Quota of the last grant.
    pub granted: LimitValues,
    /// Its reservations.
    #[serde(rename = "reserved")]
    pub reserved: ReservedRates,
}

/// Rate that the disks of a host would use.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum DemandValue {
    /// Operations or bytes per second.
    Rate(u64),
    /// As much as the limit admits: written as `"all"`.
    Unbounded(AllDemand),
}

/// The word `all`.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AllDemand {
    /// Written as `"all"`.
    All,
}

impl fmt::Display for AllDemand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("all")
    }
}

/// Reserved operations and bytes per second. Absent is none.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ReservedRates {
    /// Operations per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bps: Option<u64>,
}

impl From<[u64; 2]> for ReservedRates {
    /// From operations and bytes per second; 0 is none.
    fn from(rates: [u64; 2]) -> Self {
        let [iops, bps] = rates.map(|rate| (rate > 0).then_some(rate));
        Self { iops, bps }
    }
}

/// A group in etcd that this version cannot read.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct UnreadableGroup {
    /// Its name.
    pub group: String,
    /// Reason.
    pub reason: String,
}

/// The quota of the host that reports.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct LocalQuota {
    /// Name of the group.
    pub name: String,
    /// True if the host holds a lease. Otherwise its fallback share is in force.
    pub leased: bool,
}
