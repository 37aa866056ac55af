//! What weir asks of etcd, with its faults: it stops, and it comes back with less than it held.
//! Counts what it is asked.

use crate::cluster::{Grant, Report, Spec, Term};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

#[derive(Clone, Debug)]
struct State {
    revision: u64,
    leader: Option<Term>,
    spec: Spec,
    reports: BTreeMap<usize, Report>,
    grants: BTreeMap<usize, Grant>,
}

/// What has come to the store and left it so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Puts of reports.
    pub reports: u64,
    /// Transactions with grants.
    pub transactions: u64,
    /// Grants in these.
    pub grants: u64,
    /// Leases that were prolonged: the leader's, and those of hosts' names.
    pub keeps: u64,
    /// Elections that somebody stood for.
    pub campaigns: u64,
    /// Reads, other than by watches.
    pub reads: u64,
    /// Changes that were sent to those who watch.
    pub events: u64,
    /// Bytes of values that were written.
    pub written_bytes: u64,
    /// Bytes of values that were sent to those who watch.
    pub sent_bytes: u64,
}

impl Traffic {
    /// Messages that have arrived.
    pub const fn asked(&self) -> u64 {
        self.reports + self.transactions + self.keeps + self.campaigns + self.reads
    }

    /// Since an earlier count.
    #[must_use]
    pub const fn since(&self, before: &Self) -> Self {
        Self {
            reports: self.reports - before.reports,
            transactions: self.transactions - before.transactions,
            grants: self.grants - before.grants,
            keeps: self.keeps - before.keeps,
            campaigns: self.campaigns - before.campaigns,
            reads: self.reads - before.reads,
            events: self.events - before.events,
            written_bytes: self.written_bytes - before.written_bytes,
            sent_bytes: self.sent_bytes - before.sent_bytes,
        }
    }
}

/// The store. It is asked by way of the [`World`](super::World).
#[derive(Debug)]
pub struct Store {
    state: State,
    marked: Option<State>,
    ttl: u64,
    leader_until: u64,
    is_down: bool,
    /// Counted so far.
    pub traffic: Traffic,
}

impl Store {
    pub(super) const fn new(spec: Spec, ttl: u64) -> Self {
        let state =
            State { revision: 1, leader: None, spec, reports: BTreeMap::new(), grants: BTreeMap::new() };
        Self { state, marked: None, ttl, leader_until: 0, is_down: false, traffic: ZERO }
    }

    /// Whether it answers nobody.
    pub const fn is_down(&self) -> bool {
        self.is_down
    }

    /// Answers nobody from now on.
    pub const fn stop(&mut self) {
        self.is_down = true;
    }

    /// Remembers what it holds: [`World::lose`](super::World::lose) goes back to this.
    pub fn mark(&mut self) {
        self.marked = Some(self.state.clone());
    }

    /// Loses what was written since the mark. Leases start anew, as etcd's do.
    pub(super) fn lose(&mut self, now: u64) {
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
        if now >= self.leader_until {
            self.state.leader = None;
        }
        self.state.leader
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
        self.traffic.keeps += 1;
        let holds = self.leader(now) == Some(term);
        if holds {
            self.leader_until = now + self.ttl;
        }
        holds
    }

    pub(super) fn report(&mut self, host: usize, report: Report, bytes: u64) {
        self.state.revision += 1;
        self.traffic.reports += 1;
        self.traffic.written_bytes += bytes;
        self.state.reports.insert(host, report);
    }

    /// Whether the transaction held.
    pub(super) fn grant(&mut self, term: Term, grants: &[(usize, Grant)], bytes: u64, now: u64) -> bool {
        self.traffic.transactions += 1;
        let holds = self.leader(now) == Some(term);
        if holds {
            self.state.revision += 1;
            self.traffic.grants += grants.len() as u64;
            self.traffic.written_bytes += bytes;
            self.state.grants.extend(grants.iter().copied());
        }
        holds
    }

    /// A host has ended in order, and takes its report away.
    pub(super) fn leave(&mut self, host: usize) {
        self.state.revision += 1;
        self.state.reports.remove(&host);
    }

    /// Grants of hosts that have left.
    pub(super) fn left(&self) -> Vec<(usize, Grant)> {
        let has_left = |(host, _): &(&usize, &Grant)| !self.state.reports.contains_key(host);
        self.state.grants.iter().filter(has_left).map(|(host, grant)| (*host, *grant)).collect()
    }

    /// Takes a grant away, while this term leads and the host has not come back. Whether it did.
    pub(super) fn sweep(&mut self, term: Term, host: usize, grant: &Grant, now: u64) -> bool {
        self.traffic.transactions += 1;
        let is_so = self.leader(now) == Some(term) && !self.state.reports.contains_key(&host);
        let holds = is_so && self.state.grants.get(&host) == Some(grant);
        if holds {
            self.state.revision += 1;
            self.state.grants.remove(&host);
        }
        holds
    }

    /// Whether something is granted to a host that is not there.
    pub fn has_leftovers(&self) -> bool {
        !self.left().is_empty()
    }

    pub(super) fn reports(&self) -> Vec<(usize, Report)> {
        self.state.reports.iter().map(|(host, report)| (*host, report.clone())).collect()
    }

    pub(super) fn grant_of(&self, host: usize) -> Option<Grant> {
        self.state.grants.get(&host).copied()
    }

    pub(super) const fn set_spec(&mut self, spec: Spec) {
        self.state.revision += 1;
        self.state.spec = spec;
    }

    /// The limits that it holds.
    pub const fn spec(&self) -> Spec {
        self.state.spec
    }
}

const ZERO: Traffic = Traffic {
    reports: 0,
    transactions: 0,
    grants: 0,
    keeps: 0,
    campaigns: 0,
    reads: 0,
    events: 0,
    written_bytes: 0,
    sent_bytes: 0,
};
