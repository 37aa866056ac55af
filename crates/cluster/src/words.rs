//! What the main thread and the one that speaks with etcd tell each other.

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

/// Other limits for a group.
#[derive(Clone, Debug, Default)]
pub struct Change {
    /// Name of the group.
    pub group: String,
    /// Limits to set.
    pub limits: Vec<(Setting, u64)>,
    /// Number of hosts that share the limit.
    pub hosts: Option<u32>,
    /// None within: all hosts' together are what they are at first.
    pub safe_share_ppm: Option<Option<u32>>,
    /// None at all: the group is removed, and nothing else is said.
    pub removes: bool,
    /// Who asks for it.
    pub by: Option<Actor>,
}

/// What arrives at the thread.
#[derive(Debug)]
pub(super) enum Input {
    /// To be written: all groups' last reports.
    Reports(Reports),
    Promises(Promises),
    /// To be promised if all hosts together have room for it.
    Promise(Promises, Sender<Result<(), Refusal>>),
    Change(Change, Sender<Result<Value, String>>),
    Status(Sender<ClusterReport>),
    /// A host that will not come back.
    Forget(String, Sender<Result<Value, String>>),
    /// A step of a disk's move.
    Move(Box<Step>, Sender<Outcome>),
    Stop,
    /// Of the session of this number.
    Watched(u64, Vec<Event>),
    Ended(u64, String),
}

/// What the main thread is told.
#[derive(Debug)]
pub(super) enum Word {
    /// Etcd answers, and this host has its name: reports are written from now on.
    Joined {
        instance: u64,
    },
    /// It does not, or the name is another's: leases run out.
    Apart {
        why: String,
        /// Until somebody has mended it.
        lasts: bool,
    },
    Led {
        leader: Option<(Term, String)>,
    },
    Group {
        name: String,
        spec: Spec,
        /// Who asked this host for it, where somebody did.
        by: Option<Actor>,
    },
    Granted {
        group: String,
        grant: policy::cluster::Grant,
    },
    /// Another host offers this one a disk.
    Offered(Box<Offered>),
    /// What another host says to an offer of this one.
    Answered {
        disk: String,
        answer: Answer,
    },
    /// Hosts that this one, which leads, has not heard of for long; none where it does not lead.
    Silent(Option<BTreeSet<String>>),
    /// All hosts', this one's included.
    Promises(BTreeMap<String, Promises>),
}
