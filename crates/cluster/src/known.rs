//! What the thread knows of the cluster, with one member of etcd.

use std::collections::BTreeMap;

use async_channel::Sender;
use policy::cluster::{Term, Timing};

use super::{etcd::KeyValue, keys::Keys, stored::Stored, values::Promises, words::Input};

/// Of a host's keys in etcd.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leases {
    /// Of its name.
    pub(super) name: i64,
    /// Of what is promised there, which waits longer for its next run.
    pub(super) promises: i64,
}

/// Begun anew with each member, but for limits and settings.
pub(super) struct Known {
    pub(super) cluster: settings::Cluster,
    pub(super) timing: Timing,
    pub(super) keys: Keys,
    /// Where watches hand on what they see.
    pub(super) inbox: Sender<Input>,
    /// Of the session.
    pub(super) number: u64,
    pub(super) groups: BTreeMap<String, Stored>,
    /// Groups of which something stands in etcd that is not understood, and why not: it is left
    /// alone, and nobody here has more of them than the safe share.
    pub(super) not_understood: BTreeMap<String, String>,
    pub(super) promises: BTreeMap<String, Promises>,
    /// The revision up to which promises of others are known.
    pub(super) promises_at: i64,
    pub(super) leader: Option<(Term, String)>,
    /// The leader's key is no leader's, as of this revision: to be deleted.
    pub(super) usurped: Option<i64>,
    /// What keeps this host's keys, while it has its name.
    pub(super) joined: Option<Leases>,
    /// What stands at this host's name if another daemon has it, which may end before its lease.
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
