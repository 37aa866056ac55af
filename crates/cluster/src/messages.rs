//! Messages between the main thread and the agent thread.

use std::collections::{BTreeMap, BTreeSet};

use api::{ClusterGroupChange, ClusterReport, ForgottenHost};
use async_channel::Sender;
use policy::{
    cluster::{ClusterGroupLimits, Term},
    throttle::LimitSetting,
};
use tokio::sync::OwnedSemaphorePermit;

use super::{
    etcd::EtcdEvent,
    etcd_values::{HostReports, HostReservations},
    migration_offer::{MigrationAnswer, MigrationStep, ReceivedOffer, StepOutcome},
    peer_message::PeerMessage,
    reservations::ReservationRefusal,
};
use crate::actor::ChangeOrigin;

/// Change of a group's limits.
#[derive(Clone, Debug, Default)]
pub struct GroupLimitChange {
    /// Name of the group.
    pub group: String,
    /// Limits to set.
    pub limits: Vec<(LimitSetting, u64)>,
    /// Number of hosts that share the limit.
    pub hosts: Option<u32>,
    /// Fallback share of a host; `Some(None)` restores the default.
    pub safe_share_ppm: Option<Option<u32>>,
    /// True to remove the group; all other fields are then ignored.
    pub removes: bool,
    /// Originator of the change.
    pub by: Option<ChangeOrigin>,
}

/// Message to the agent thread.
#[derive(Debug)]
pub(super) enum AgentInput {
    /// Reports of all groups, to be written.
    Reports(HostReports),
    Reservations(HostReservations),
    /// Reservations to write if the sum over all hosts fits.
    ReserveIfFits(HostReservations, Sender<Result<(), ReservationRefusal>>),
    Change(GroupLimitChange, Sender<Result<ClusterGroupChange, String>>),
    Status(Sender<ClusterReport>),
    /// Name of a host that will not return.
    Forget(String, Sender<Result<ForgottenHost, String>>),
    /// Step of a disk's migration.
    Move(Box<MigrationStep>, Sender<StepOutcome>),
    /// Message of another host, and its share of the queue.
    Peer(String, Box<PeerMessage>, OwnedSemaphorePermit),
    Stop,
    /// Events for the session of this number.
    Watched(u64, Vec<EtcdEvent>),
    Ended(u64, String),
}

/// How this host works while etcd is unreachable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PeerStatus {
    /// Leader that this host reaches.
    pub(super) leader: Option<String>,
    /// Number of hosts that agreed on the leader; 0 if etcd elected it.
    pub(super) hosts: usize,
    /// Hosts without whose agreement there is no leader, each with the reason; known to one host
    /// only.
    pub(super) missing: BTreeMap<String, &'static str>,
}

/// Message to the main thread.
#[derive(Debug)]
pub(super) enum AgentMessage {
    /// This host has its name in etcd. Reports are written from now on.
    Joined {
        instance: u64,
    },
    /// etcd is unreachable, or another process has the name. Leases run out.
    Disconnected {
        why: String,
        /// True if an administrator has to act.
        is_permanent: bool,
    },
    LeaderChanged {
        leader: Option<(Term, String)>,
    },
    Group {
        name: String,
        spec: ClusterGroupLimits,
        /// Originator, if this host made the change.
        by: Option<ChangeOrigin>,
    },
    Granted {
        group: String,
        grant: policy::cluster::QuotaGrant,
    },
    /// Another host offers this one a disk.
    Offered(Box<ReceivedOffer>),
    /// Answer of another host to an offer.
    Answered {
        disk: String,
        answer: MigrationAnswer,
    },
    /// Hosts that stopped reporting; `None` unless this host is the leader.
    Silent(Option<BTreeSet<String>>),
    /// How this host works without etcd has changed.
    Peers(PeerStatus),
    /// Reservations of all hosts, including this one.
    Reservations(BTreeMap<String, HostReservations>),
}
