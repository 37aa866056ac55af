//! What weir asks of etcd, with its faults: it stops, and it comes back with less than it held.

use policy::cluster::{Grant, Report, Spec, Term};
use std::collections::BTreeMap;

#[derive(Clone)]
struct State {
    revision: u64,
    leader: Option<Term>,
    spec: Spec,
    reports: BTreeMap<usize, Report>,
    grants: BTreeMap<usize, Grant>,
}

pub(crate) struct Store {
    state: State,
    marked: Option<State>,
    ttl: u64,
    leader_until: u64,
    pub(crate) is_down: bool,
    pub(crate) writes: u64,
}

impl Store {
    pub(crate) fn new(spec: Spec, ttl: u64) -> Self {
        let state =
            State { revision: 1, leader: None, spec, reports: BTreeMap::new(), grants: BTreeMap::new() };
        Self { state, marked: None, ttl, leader_until: 0, is_down: false, writes: 0 }
    }

    /// Remembers what it holds: [`Store::lose`] goes back to this.
    pub(crate) fn mark(&mut self) {
        self.marked = Some(self.state.clone());
    }

    /// Loses what was written since the mark. Leases start anew, as etcd's do.
    pub(crate) fn lose(&mut self, now: u64) {
        if let Some(marked) = self.marked.take() {
            self.state = marked;
            self.start(now);
        }
    }

    pub(crate) fn start(&mut self, now: u64) {
        self.is_down = false;
        self.leader_until = now + self.ttl;
    }

    pub(crate) fn leader(&mut self, now: u64) -> Option<Term> {
        if now >= self.leader_until {
            self.state.leader = None;
        }
        self.state.leader
    }

    pub(crate) fn campaign(&mut self, nonce: u64, now: u64) -> Option<Term> {
        if self.leader(now).is_some() {
            return None;
        }
        self.state.revision += 1;
        self.state.leader = Some(Term { revision: self.state.revision, nonce });
        self.leader_until = now + self.ttl;
        self.state.leader
    }

    pub(crate) fn keep_alive(&mut self, term: Term, now: u64) -> bool {
        let holds = self.leader(now) == Some(term);
        if holds {
            self.leader_until = now + self.ttl;
        }
        holds
    }

    pub(crate) fn report(&mut self, host: usize, report: Report) {
        self.state.revision += 1;
        self.writes += 1;
        self.state.reports.insert(host, report);
    }

    /// Whether the transaction held.
    pub(crate) fn grant(&mut self, term: Term, grants: &[(usize, Grant)], now: u64) -> bool {
        let holds = self.leader(now) == Some(term);
        if holds {
            self.state.revision += 1;
            self.writes += 1;
            self.state.grants.extend(grants.iter().copied());
        }
        holds
    }

    pub(crate) fn reports(&self) -> Vec<(usize, Report)> {
        self.state.reports.iter().map(|(host, report)| (*host, report.clone())).collect()
    }

    pub(crate) fn grant_of(&self, host: usize) -> Option<Grant> {
        self.state.grants.get(&host).copied()
    }

    pub(crate) fn set_spec(&mut self, spec: Spec) {
        self.state.revision += 1;
        self.state.spec = spec;
    }

    pub(crate) fn spec(&self) -> Spec {
        self.state.spec
    }
}
