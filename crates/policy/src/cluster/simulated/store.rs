//! Model of etcd as weir uses it, with its faults: it stops, or restarts without its last writes.
//! Counts the requests it receives.

use crate::cluster::{ClusterGroupLimits, HostReport, QuotaGrant, Term};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

#[derive(Clone, Debug)]
struct StoreContents {
    revision: u64,
    leader: Option<Term>,
    spec: ClusterGroupLimits,
    reports: BTreeMap<usize, HostReport>,
    grants: BTreeMap<usize, QuotaGrant>,
    /// Hosts that take part in agreements, and the last registration of each.
    peers: BTreeMap<usize, PeerRegistration>,
}

/// Registration of a host for agreements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerRegistration {
    /// Run of the host, and number of the registration in that run: a late one is ignored.
    pub(super) number: (u64, u64),
    /// Hosts that it asks.
    pub(super) asks: BTreeSet<usize>,
    /// Hosts of `asks` that are removed from it if the store does not know them any more.
    pub(super) dropped: BTreeSet<usize>,
}

/// Number of messages and bytes that the store has received and sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreTraffic {
    /// Reports written.
    pub reports: u64,
    /// Transactions that write or delete grants.
    pub transactions: u64,
    /// Grants written.
    pub grants: u64,
    /// Lease renewals: of the leader's key and of hosts' names.
    pub renewals: u64,
    /// Attempts to become leader.
    pub campaigns: u64,
    /// Reads, except by watches.
    pub reads: u64,
    /// Watch events sent.
    pub events: u64,
    /// Bytes of values written.
    pub written_bytes: u64,
    /// Bytes of values sent in watch events.
    pub sent_bytes: u64,
}

impl StoreTraffic {
    /// Number of requests received.
    pub const fn requests(&self) -> u64 {
        self.reports + self.transactions + self.renewals + self.campaigns + self.reads
    }

    /// Difference to an earlier reading.
    #[must_use]
    pub const fn since(&self, before: &Self) -> Self {
        Self {
            reports: self.reports - before.reports,
            transactions: self.transactions - before.transactions,
            grants: self.grants - before.grants,
            renewals: self.renewals - before.renewals,
            campaigns: self.campaigns - before.campaigns,
            reads: self.reads - before.reads,
            events: self.events - before.events,
            written_bytes: self.written_bytes - before.written_bytes,
            sent_bytes: self.sent_bytes - before.sent_bytes,
        }
    }
}

/// The store. Hosts and leaders access it through the
/// [`SimulatedCluster`](super::SimulatedCluster).
#[derive(Debug)]
pub struct SimulatedStore {
    state: StoreContents,
    marked: Option<StoreContents>,
    ttl: u64,
    leader_until: u64,
    is_down: bool,
    /// Traffic since the creation.
    pub traffic: StoreTraffic,
}

impl SimulatedStore {
    pub(super) const fn new(spec: ClusterGroupLimits, ttl: u64) -> Self {
        let state = StoreContents {
            revision: 1,
            leader: None,
            spec,
            reports: BTreeMap::new(),
            grants: BTreeMap::new(),
            peers: BTreeMap::new(),
        };
        Self { state, marked: None, ttl, leader_until: 0, is_down: false, traffic: ZERO }
    }

    /// True if the store answers no requests.
    pub const fn is_down(&self) -> bool {
        self.is_down
    }

    /// Stops answering requests.
    pub const fn stop(&mut self) {
        self.is_down = true;
    }

    /// Marks the current contents, which
    /// [`SimulatedCluster::lose_writes`](super::SimulatedCluster::lose_writes) restores.
    pub fn mark(&mut self) {
        self.marked = Some(self.state.clone());
    }

    /// Loses all writes since the mark. The leases that remain start again in full, as in etcd.
    pub(super) fn restore_mark(&mut self, now: u64) {
        if let Some(marked) = self.marked.take() {
            self.state = marked;
            self.start(now);
        }
    }

    pub(super) const fn start(&mut self, now: u64) {
        self.is_down = false;
        self.leader_until = now + self.ttl;
    }

    pub(super) const fn leader(&mut self, now: u64) -> Option<Term> {
        // The lease expires lazily, at the next access.
        if now >= self.leader_until {
            self.state.leader = None;
        }
        self.state.leader
    }

    /// Starts with the limits only, as another etcd to which the leader has written its copy of
    /// them.
    pub(super) fn lose_all(&mut self, now: u64) {
        self.state = StoreContents {
            revision: 1,
            leader: None,
            spec: self.state.spec,
            reports: BTreeMap::new(),
            grants: BTreeMap::new(),
            peers: BTreeMap::new(),
        };
        self.start(now);
    }

    /// Number of the last write.
    pub(super) const fn revision(&self) -> u64 {
        self.state.revision
    }

    /// Registers a host. Returns the hosts that it asks by now, and those that the store knows.
    pub(super) fn register(
        &mut self,
        host: usize,
        registration: &PeerRegistration,
    ) -> (BTreeSet<usize>, BTreeSet<usize>) {
        let PeerRegistration { number, asks, dropped } = registration;
        let is_late = self.state.peers.get(&host).is_some_and(|last| last.number > *number);
        if !is_late {
            let is_gone = |name: &usize| dropped.contains(name) && !self.state.peers.contains_key(name);
            let asks: BTreeSet<usize> = asks.iter().filter(|name| !is_gone(name)).copied().collect();
            let registration = PeerRegistration { number: *number, asks, dropped: BTreeSet::new() };
            let last = self.state.peers.insert(host, registration);
            if last.is_none_or(|last| last.asks != self.state.peers[&host].asks) {
                self.state.revision += 1;
            }
        }
        (self.state.peers[&host].asks.clone(), self.state.peers.keys().copied().collect())
    }

    /// Removes a host from those that take part in agreements, if the leader of this term asks for
    /// it, or without a term the host itself.
    pub(super) fn deregister(&mut self, host: usize, term: Option<Term>, now: u64) {
        if term.is_none() || self.leader(now) == term {
            self.state.revision += 1;
            self.state.peers.remove(&host);
        }
    }

    /// True if every host asks this one for an agreement.
    pub(super) fn is_asked_by_all(&self, host: usize) -> bool {
        self.state.peers.contains_key(&host)
            && self.state.peers.iter().all(|(name, peer)| *name == host || peer.asks.contains(&host))
    }

    pub(super) const fn campaign(&mut self, nonce: u64, now: u64) -> Option<Term> {
        self.traffic.campaigns += 1;
        if self.leader(now).is_some() {
            return None;
        }
        self.state.revision += 1;
        self.state.leader = Some(Term { revision: self.state.revision, nonce });
        self.leader_until = now + self.ttl;
        self.state.leader
    }

    pub(super) fn keep_alive(&mut self, term: Term, now: u64) -> bool {
        self.traffic.renewals += 1;
        let is_leader = self.leader(now) == Some(term);
        if is_leader {
            self.leader_until = now + self.ttl;
        }
        is_leader
    }

    pub(super) fn report(&mut self, host: usize, report: HostReport, bytes: u64) {
        self.state.revision += 1;
        self.traffic.reports += 1;
        self.traffic.written_bytes += bytes;
        self.state.reports.insert(host, report);
    }

    /// Returns true if the transaction succeeded.
    pub(super) fn grant(&mut self, term: Term, grants: &[(usize, QuotaGrant)], bytes: u64, now: u64) -> bool {
        self.traffic.transactions += 1;
        let is_leader = self.leader(now) == Some(term);
        if is_leader {
            self.state.revision += 1;
            self.traffic.grants += grants.len() as u64;
            self.traffic.written_bytes += bytes;
            self.state.grants.extend(grants.iter().copied());
        }
        is_leader
    }

    /// A host shuts down and deletes its report.
    pub(super) fn remove_report(&mut self, host: usize) {
        self.state.revision += 1;
        self.state.reports.remove(&host);
    }

    /// Grants of hosts without a report.
    pub(super) fn grants_of_departed_hosts(&self) -> Vec<(usize, QuotaGrant)> {
        let has_left = |(host, _): &(&usize, &QuotaGrant)| !self.state.reports.contains_key(host);
        self.state.grants.iter().filter(has_left).map(|(host, grant)| (*host, *grant)).collect()
    }

    /// Deletes a grant unless this term has ended or the host has returned. Returns true if it did.
    pub(super) fn delete_grant(&mut self, term: Term, host: usize, grant: &QuotaGrant, now: u64) -> bool {
        self.traffic.transactions += 1;
        let may_delete = self.leader(now) == Some(term) && !self.state.reports.contains_key(&host);
        let deletes = may_delete && self.state.grants.get(&host) == Some(grant);
        if deletes {
            self.state.revision += 1;
            self.state.grants.remove(&host);
        }
        deletes
    }

    /// True if there is a grant of a host without a report.
    pub fn has_orphaned_grants(&self) -> bool {
        !self.grants_of_departed_hosts().is_empty()
    }

    pub(super) fn reports(&self) -> Vec<(usize, HostReport)> {
        self.state.reports.iter().map(|(host, report)| (*host, report.clone())).collect()
    }

    pub(super) fn grant_of(&self, host: usize) -> Option<QuotaGrant> {
        self.state.grants.get(&host).copied()
    }

    pub(super) const fn set_spec(&mut self, spec: ClusterGroupLimits) {
        self.state.revision += 1;
        self.state.spec = spec;
    }

    /// The limits that the store contains.
    pub const fn spec(&self) -> ClusterGroupLimits {
        self.state.spec
    }
}

const ZERO: StoreTraffic = StoreTraffic {
    reports: 0,
    transactions: 0,
    grants: 0,
    renewals: 0,
    campaigns: 0,
    reads: 0,
    events: 0,
    written_bytes: 0,
    sent_bytes: 0,
};
