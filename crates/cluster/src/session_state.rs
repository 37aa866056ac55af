//! State of the cluster as the agent has read it from one member of etcd.

use std::{collections::BTreeMap, net::SocketAddr};

use async_channel::Sender;
use policy::cluster::{Term, Timing};

use super::{
    etcd::EtcdKeyValue, etcd_values::HostReservations, keys::EtcdKeys, limit_file::StoredGroup,
    messages::AgentInput,
};

/// Leases of a host's keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostLeases {
    /// Lease of its name.
    pub(super) name: i64,
    /// Lease of its reservations, which outlives a run.
    pub(super) reservations: i64,
}

/// State of a session. All but the limits and settings is read anew with each member.
pub(super) struct SessionState {
    pub(super) cluster: settings::ClusterConfig,
    pub(super) timing: Timing,
    pub(super) keys: EtcdKeys,
    /// Queue for watch events.
    pub(super) inbox: Sender<AgentInput>,
    /// Number of the session.
    pub(super) number: u64,
    pub(super) groups: BTreeMap<String, StoredGroup>,
    /// Groups with an unreadable value in etcd, with the reason. The value is not changed, and
    /// hosts keep their fallback share.
    pub(super) unreadable_groups: BTreeMap<String, String>,
    pub(super) reservations: BTreeMap<String, HostReservations>,
    /// Addresses of hosts.
    pub(super) peers: BTreeMap<String, SocketAddr>,
    /// Latest revision that was read, and the id of its etcd cluster: a lower revision or another
    /// id shows that etcd was restored or replaced.
    pub(super) revision: i64,
    pub(super) etcd_cluster: Option<String>,
    /// Revision up to which reservations are known.
    pub(super) reservations_revision: i64,
    pub(super) leader: Option<(Term, String)>,
    /// Revision of a value at the leader's key that is no leader's and has to be deleted.
    pub(super) foreign_leader_revision: Option<i64>,
    /// Leases of this host's keys; `None` unless it has its name.
    pub(super) joined: Option<HostLeases>,
    /// Value at this host's name if another daemon has it. That daemon may end before its lease.
    pub(super) namesake: Option<EtcdKeyValue>,
}

impl SessionState {
    pub(super) fn new(
        cluster: settings::ClusterConfig,
        timing: Timing,
        inbox: Sender<AgentInput>,
        groups: BTreeMap<String, StoredGroup>,
    ) -> Self {
        Self {
            keys: EtcdKeys::new(&cluster.name),
            cluster,
            timing,
            inbox,
            number: 0,
            groups,
            unreadable_groups: BTreeMap::new(),
            reservations: BTreeMap::new(),
            peers: BTreeMap::new(),
            revision: 0,
            etcd_cluster: None,
            reservations_revision: 0,
            leader: None,
            foreign_leader_revision: None,
            joined: None,
            namesake: None,
        }
    }
}
