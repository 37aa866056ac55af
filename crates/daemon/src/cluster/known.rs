//! What the thread knows of the cluster, with one member of etcd.

use std::collections::BTreeMap;

use async_channel::Sender;
use policy::cluster::{Term, Timing};

use super::{etcd::KeyValue, keys::Keys, stored::Stored, values::Promises, words::Input};

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
    pub(super) promises: BTreeMap<String, Promises>,
    /// The revision up to which promises of others are known.
    pub(super) promises_at: i64,
    pub(super) leader: Option<(Term, String)>,
    /// The leader's key is no leader's, as of this revision: to be deleted.
    pub(super) usurped: Option<i64>,
    /// The lease of this host's key, while it has that.
    pub(super) joined: Option<i64>,
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
            promises: BTreeMap::new(),
            promises_at: 0,
            leader: None,
            usurped: None,
            joined: None,
            namesake: None,
        }
    }
}
