//! Messages between the main thread and the agent thread.

use std::collections::{BTreeMap, BTreeSet};

use api::ClusterReport;
use async_channel::Sender;
use policy::{
    cluster::{Spec, Term},
    throttle::Setting,
};
use serde_json::Value;

use super::{
    etcd::Event,
    offers::{Answer, Offered, Outcome, Step},
    promising::Refusal,
    values::{Promises, Reports},
};
use crate::actor::Actor;

/// Change of a group's limits.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// Name of the group.
    pub group: String,
    /// Limits to set.
    pub limits: Vec<(Setting, u64)>,
    /// Number of hosts that share the limit.
    pub hosts: Option<u32>,
    /// Fallback share of a host; `Some(None)` restores the default.
    pub safe_share_ppm: Option<Option<u32>>,
    /// True to remove the group; all other fields are then ignored.
    pub removes: bool,
    /// Originator of the change.
    pub by: Option<Actor>,
}

/// Message to the agent thread.
#[derive(Debug)]
pub(super) enum Input {
    /// Reports of all groups, to be written.
    Reports(Reports),
    Promises(Promises),
    /// Reservations to write if the sum over all hosts fits.
    Promise(Promises, Sender<Result<(), Refusal>>),
    Change(Change, Sender<Result<Value, String>>),
    Status(Sender<ClusterReport>),
    /// Name of a host that will not return.
    Forget(String, Sender<Result<Value, String>>),
    /// Step of a disk's migration.
    Move(Box<Step>, Sender<Outcome>),
    Stop,
    /// Events for the session of this number.
    Watched(u64, Vec<Event>),
    Ended(u64, String),
}

/// Message to the main thread.
#[derive(Debug)]
pub(super) enum Word {
    /// This host has its name in etcd. Reports are written from now on.
    Joined {
        instance: u64,
    },
    /// etcd is unreachable, or another process has the name. Leases run out.
    Apart {
        why: String,
        /// True if an administrator has to act.
        lasts: bool,
    },
    Led {
        leader: Option<(Term, String)>,
    },
    Group {
        name: String,
        spec: Spec,
        /// Originator, if this host made the change.
        by: Option<Actor>,
    },
    Granted {
        group: String,
        grant: policy::cluster::Grant,
    },
    /// Another host offers this one a disk.
    Offered(Box<Offered>),
    /// Answer of another host to an offer.
    Answered {
        disk: String,
        answer: Answer,
    },
    /// Hosts that stopped reporting; `None` unless this host leads.
    Silent(Option<BTreeSet<String>>),
    /// Reservations of all hosts, including this one.
    Promises(BTreeMap<String, Promises>),
}
