//! Events, requests to the store and its answers, and processes with clocks of their own.

use crate::cluster::simulated::store::PeerRegistration;
use crate::cluster::{AgreementAnswer, AgreementRequest, ClusterGroupLimits, HostReport, QuotaGrant, Term};
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

#[derive(Debug)]
pub(super) enum ClusterEvent {
    HostTicks(usize, u64),
    HostRuns(usize, u64),
    ToHost(usize, u64, Option<Term>, Option<QuotaGrant>),
    LeaderTicks(usize, u64),
    LeaderRuns(usize, u64),
    ToLeader(usize, u64, StoreResponse),
    AtStore(usize, u64, StoreRequest),
    /// Receiver, its run, sender, message.
    ToPeer(usize, u64, usize, SimulatedPeerMessage),
    PeerRuns(usize, u64),
    Registered(usize, u64, RegistrationAnswer),
}

/// Message between two hosts.
#[derive(Clone, Debug)]
pub(super) enum SimulatedPeerMessage {
    Ask(AgreementRequest),
    Answer(AgreementAnswer),
    Release(u64),
    Report(Box<HostReport>),
    /// The sender leads this term.
    Leads(Term),
    Grant(Box<QuotaGrant>),
}

#[derive(Debug)]
pub(super) enum StoreRequest {
    Host,
    Name,
    Report(Box<HostReport>),
    Campaign(u64, Instant),
    KeepAlive(Term, Instant),
    Read,
    Write(Term, Vec<(usize, QuotaGrant)>),
    DeleteGrant(Term, usize, Box<QuotaGrant>),
    Register(PeerRegistration),
    Deregister(Term, usize),
}

#[derive(Clone, Debug)]
pub(super) enum StoreResponse {
    Elected(Term, ClusterGroupLimits, Instant),
    Renewed(Instant),
    Deposed(Term),
    Read(ClusterGroupLimits, Vec<(usize, HostReport)>),
    HostRemoved(usize),
    /// Grants of this term were written.
    Written(Term, Vec<(usize, QuotaGrant)>),
}

/// Answer to a registration.
#[derive(Clone, Debug)]
pub(super) struct RegistrationAnswer {
    pub(super) number: u64,
    pub(super) revision: u64,
    /// Hosts that the host asks, according to the store.
    pub(super) asks: BTreeSet<usize>,
    /// Hosts that the store knows.
    pub(super) present: BTreeSet<usize>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct SimulatedProcess {
    pub(super) ppm: i64,
    pub(super) offset: u64,
    pub(super) paused_until: u64,
    pub(super) is_partitioned: bool,
    /// Number of the run. Events for earlier runs are dropped.
    pub(super) run: u64,
}

impl SimulatedProcess {
    pub(super) fn to_local(self, now: u64) -> u64 {
        let drift = i128::from(now) * i128::from(self.ppm) / 1_000_000;
        (i128::from(now) + drift) as u64 + self.offset
    }

    /// True time of an instant of this clock, rounded up.
    pub(super) fn to_true_time(self, local: u64) -> u64 {
        let since = i128::from(local.saturating_sub(self.offset));
        (since * 1_000_000 / i128::from(1_000_000 + self.ppm)) as u64 + 1
    }
}
