//! State of the cluster as the agent knows it from one member of etcd.

use std::collections::BTreeMap;

use async_channel::Sender;
use policy::cluster::{Term, Timing};

use super::{etcd::KeyValue, keys::Keys, stored::Stored, values::Promises, words::Input};

/// Leases of a host's keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leases {
    /// Lease of its name.
    pub(super) name: i64,
    /// Lease of its reservations, which outlives a run.
    pub(super) promises: i64,
}

/// State of a session. All but the limits and settings is read anew with each member.
pub(super) struct Known {
    pub(super) cluster: settings::Cluster,
    pub(super) timing: Timing,
    pub(super) keys: Keys,
    /// Queue for watch events.
    pub(super) inbox: Sender<Input>,
    /// Number of the session.
    pub(super) number: u64,
    pub(super) groups: BTreeMap<String, Stored>,
    /// Groups with an unreadable value in etcd, with the reason. The value is left alone, and hosts
    /// keep their fallback share.
    pub(super) not_understood: BTreeMap<String, String>,
    pub(super) promises: BTreeMap<String, Promises>,
    /// Revision up to which reservations are known.
    pub(super) promises_at: i64,
    pub(super) leader: Option<(Term, String)>,
    /// Revision of a value at the leader's key that is no leader's and has to be deleted.
    pub(super) usurped: Option<i64>,
    /// Leases of this host's keys; `None` unless it has its name.
    pub(super) joined: Option<Leases>,
    /// Value at this host's name if another daemon has it. That daemon may end before its lease.
    pub(super) namesake: Option<KeyValue>,
}

impl Known {
    pub(super) fn new(
        cluster: settings::Cluster,
        timing: Timing,
        inbox: Sender<Input>,
        groups: BTreeMap<String, Stored>,
    ) -> Self {
        Self {
            keys: Keys::of(&cluster.name),
            cluster,
            timing,
            inbox,
            number: 0,
            groups,
            not_understood: BTreeMap::new(),
            promises: BTreeMap::new(),
            promises_at: 0,
            leader: None,
            usurped: None,
            joined: None,
            namesake: None,
        }
    }
}
