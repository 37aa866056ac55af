//! Messages between hosts: agreements without the store, and reports and grants that do not pass
//! through it.

use super::SimulatedCluster;
use super::events::{ClusterEvent, RegistrationAnswer, SimulatedPeerMessage, StoreRequest};
use crate::cluster::simulated::store::PeerRegistration;
use crate::cluster::{
    AgreementMessage, ByKind, HostReport, PeerAgreement, PeerSet, QuotaGrant, QuotaLeader, Term,
};
use crate::time::{Duration, Instant};
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::ToString as _;
use alloc::vec::Vec;

/// Time without an answer of the store after which a host counts as cut off: the timeout of a
/// request.
const STORE_TIMEOUT: Duration = Duration::from_secs(1);

/// A host's state besides its quota.
#[derive(Debug)]
pub(super) struct SimulatedPeer {
    agreement: PeerAgreement,
    answered: Option<Instant>,
    /// Host that leads, according to its own message, and when that message arrived.
    leader: Option<(usize, Instant)>,
    /// Number of the last registration.
    registrations: u64,
    /// Hosts that the store knew when it was last read, and its revision.
    present: BTreeSet<usize>,
    revision: u64,
    /// True after the store's revision fell, until all known hosts have registered again.
    is_restored: bool,
    /// If this host leads: the last report of each host, by number, and when it arrived.
    reported: BTreeMap<usize, (u64, Instant)>,
    /// Nonce of the last term that this host led by agreement.
    led: u64,
    /// If this host leads: when each host last reported to it directly.
    direct: BTreeMap<usize, Instant>,
    /// Time of the next call.
    pub(super) next: u64,
}

impl SimulatedPeer {
    pub(super) fn begin_term(&mut self, now: Instant) {
        self.direct.clear();
        self.reported.values_mut().for_each(|(_, at)| *at = now);
    }

    pub(super) fn note_report(&mut self, host: usize, number: u64, now: Instant) {
        let last = self.reported.entry(host).or_insert((number, now));
        if last.0 != number {
            *last = (number, now);
        }
    }
}

impl SimulatedCluster {
    pub(super) fn new_peer(&self, host: usize) -> SimulatedPeer {
        SimulatedPeer {
            agreement: PeerAgreement::new(&host.to_string(), self.config.timing, self.local(host)),
            answered: None,
            leader: None,
            registrations: 0,
            present: BTreeSet::new(),
            revision: 0,
            is_restored: false,
            reported: BTreeMap::new(),
            led: 0,
            direct: BTreeMap::new(),
            next: u64::MAX,
        }
    }

    pub(super) fn reaches_store(&self, host: usize) -> bool {
        let answered = self.peers[host].answered;
        answered.is_some_and(|answered| self.local(host) < answered + STORE_TIMEOUT)
    }

    pub(super) fn may_campaign(&self, host: usize) -> bool {
        self.reaches_store(host) && self.peers[host].agreement.may_campaign(self.local(host))
    }

    /// True if a host leads by agreement.
    pub fn has_agreement(&self) -> bool {
        self.leaders.iter().flatten().any(|leader| leader.term().revision == 0)
    }

    /// Writes the hosts that a host asks to the store. The answer also shows that the store can be
    /// reached.
    pub(super) fn register(&mut self, host: usize) {
        let run = self.processes[host].run;
        let peer = &mut self.peers[host];
        peer.registrations += 1;
        let asks: BTreeSet<usize> =
            peer.agreement.members().keys().filter_map(|name| name.parse().ok()).chain([host]).collect();
        let dropped = if peer.is_restored {
            BTreeSet::new()
        } else {
            asks.difference(&peer.present).copied().collect()
        };
        let registration = PeerRegistration { number: (run, peer.registrations), asks, dropped };
        self.send_to_store(host, StoreRequest::Register(registration));
    }

    pub(super) fn on_registered(&mut self, host: usize, answer: &RegistrationAnswer) {
        let now = self.local(host);
        let peer = &mut self.peers[host];
        peer.answered = Some(now);
        if answer.revision < peer.revision {
            peer.is_restored = true;
            peer.agreement.hold_back(now);
        }
        (peer.revision, peer.present) = (answer.revision, answer.present.clone());
        let set = |hosts: &BTreeSet<usize>| -> PeerSet {
            hosts.iter().map(|host| (host.to_string(), true)).collect()
        };
        let is_complete = peer
            .agreement
            .members()
            .keys()
            .all(|name| name.parse().is_ok_and(|host| answer.present.contains(&host)));
        if is_complete {
            peer.is_restored = false;
        }
        // A later registration may have written a longer list.
        if answer.number == peer.registrations && !peer.is_restored {
            peer.agreement.set_members(set(&answer.asks));
        }
        peer.agreement.add_members(set(&answer.present));
    }

    /// Removes hosts from those that take part in agreements if they have been silent for long.
    pub(super) fn deregister_silent_hosts(&mut self, leader: usize, term: Term) {
        let (now, lease) = (self.local(leader), self.config.timing.lease);
        let silent: Vec<usize> = self.peers[leader]
            .reported
            .iter()
            .filter(|(host, (_, at))| **host != leader && now >= *at + lease * 3)
            .map(|(host, _)| *host)
            .collect();
        for host in silent {
            self.peers[leader].reported.remove(&host);
            self.send_to_store(leader, StoreRequest::Deregister(term, host));
        }
    }

    fn send_to_peer(&mut self, from: usize, to: usize, message: SimulatedPeerMessage) {
        if !self.cut.contains(&(from, to)) {
            let (at, run) = (self.now + self.delay(), self.processes[to].run);
            self.schedule(at, ClusterEvent::ToPeer(to, run, from, message));
        }
    }

    fn send_to_all_peers(&mut self, from: usize, message: &SimulatedPeerMessage) {
        for to in (0..self.machines.len()).filter(|to| *to != from) {
            self.send_to_peer(from, to, message.clone());
        }
    }

    /// Sends a report to the leader if it is known, else to all hosts: the leader answers.
    pub(super) fn report_to_peers(&mut self, host: usize, report: &HostReport) {
        let now = self.local(host);
        let report = SimulatedPeerMessage::Report(Box::new(report.clone()));
        let known = self.peers[host].leader.filter(|(_, at)| now < *at + self.config.timing.term_lease());
        match known {
            Some((leader, _)) => self.send_to_peer(host, leader, report),
            None => {
                self.send_to_all_peers(host, &report);
                // A leader that neither reaches the store nor is reached by another host does not
                // extend its own lease.
                let lease = self.config.timing.lease;
                let is_reached = self.peers[host].direct.values().any(|at| now < *at + lease);
                if is_reached {
                    self.send_to_peer(host, host, report);
                }
            }
        }
    }

    pub(super) fn send_grants_to_peers(&mut self, leader: usize, term: Term, grants: &[(usize, QuotaGrant)]) {
        let (now, lease) = (self.local(leader), self.config.timing.lease);
        for (host, grant) in grants {
            let is_direct = self.peers[leader].direct.get(host).is_some_and(|at| now < *at + lease);
            if is_direct || term.revision == 0 {
                self.send_to_peer(leader, *host, SimulatedPeerMessage::Grant(Box::new(*grant)));
            }
        }
    }

    /// Runs a host's side of agreements, and its leadership by agreement.
    pub(super) fn peer_runs(&mut self, host: usize) {
        let now = self.local(host);
        let leads_by_store = self.leaders[host].as_ref().is_some_and(|leader| leader.term().revision > 0);
        let is_free = !self.reaches_store(host) && !leads_by_store;
        let nonce = self.random.below(u64::MAX);
        let messages = self.peers[host].agreement.tick(is_free, nonce, now);
        for message in messages {
            let message = match message {
                AgreementMessage::Request(request) => SimulatedPeerMessage::Ask(request),
                AgreementMessage::Release(nonce) => SimulatedPeerMessage::Release(nonce),
            };
            self.send_to_all_peers(host, &message);
        }
        self.follow_agreement(host, now);
        let peer = &self.peers[host];
        let next = self.processes[host].to_true_time(peer.agreement.next().as_nanos()).max(self.now + 1);
        self.peers[host].next = next;
        self.schedule(next, ClusterEvent::PeerRuns(host, next));
    }

    /// Creates or drops the leader of this host's agreement.
    fn follow_agreement(&mut self, host: usize, now: Instant) {
        let agreed = self.peers[host].agreement.term(now);
        let leads = self.leaders[host].as_ref().map(QuotaLeader::term);
        match (agreed, leads) {
            // The leader stood down: its term must not begin again.
            (Some((term, _)), None) if self.peers[host].led == term.nonce => {
                self.peers[host].agreement.resign(now);
            }
            (Some((term, since)), None) => {
                self.peers[host].led = term.nonce;
                let spec = self.machines[host].host.spec();
                self.leaders[host] = Some(QuotaLeader::new(term, spec, self.config.timing, since, now));
                self.peers[host].begin_term(now);
                self.peers[host].leader = Some((host, now));
                self.deliver_to_host(host, Some(term), None);
                self.run_leader(host);
            }
            (Some((term, since)), Some(led)) if led == term => {
                self.peers[host].leader = Some((host, now));
                if let Some(leader) = &mut self.leaders[host] {
                    leader.on_key_renewed(since);
                }
            }
            (_, Some(led)) if led.revision == 0 => self.leaders[host] = None,
            _ => {}
        }
    }

    pub(super) fn deliver_to_peer(&mut self, host: usize, from: usize, message: SimulatedPeerMessage) {
        let now = self.local(host);
        match message {
            SimulatedPeerMessage::Ask(request) => {
                // A leader that has lost the store gives up for the agreement.
                let agreement = &self.peers[host].agreement;
                if !self.reaches_store(host) && agreement.would_confirm(&from.to_string(), &request, now) {
                    self.leaders[host].take_if(|leader| leader.term().revision > 0);
                }
                let is_free = !self.reaches_store(host) && self.leaders[host].is_none();
                let answer = self.peers[host].agreement.on_request(&from.to_string(), &request, is_free, now);
                if request.leads && answer.refusal.is_none() {
                    self.peers[host].leader = Some((from, now));
                    let term = Term { revision: 0, nonce: request.nonce };
                    self.deliver_to_host(host, Some(term), None);
                }
                self.send_to_peer(host, from, SimulatedPeerMessage::Answer(answer));
            }
            SimulatedPeerMessage::Answer(answer) => {
                let had_term = self.peers[host].agreement.term(now).is_some();
                self.peers[host].agreement.on_answer(&from.to_string(), answer, now);
                self.follow_agreement(host, now);
                if self.peers[host].agreement.term(now).is_some() != had_term {
                    self.peer_runs(host);
                }
            }
            SimulatedPeerMessage::Release(nonce) => {
                self.peers[host].agreement.on_release(&from.to_string(), nonce);
            }
            SimulatedPeerMessage::Leads(term) => {
                if !self.reaches_store(host) {
                    self.peers[host].leader = Some((from, now));
                    self.deliver_to_host(host, Some(term), None);
                }
            }
            SimulatedPeerMessage::Grant(grant) => {
                self.peers[host].leader = Some((from, now));
                self.deliver_to_host(host, None, Some(*grant));
            }
            SimulatedPeerMessage::Report(report) => {
                let Some(leader) = &mut self.leaders[host] else { return };
                let (term, followed, number) = (leader.term(), report.followed_term, report.report_number);
                leader.on_report(&from.to_string(), *report, now);
                self.peers[host].note_report(from, number, now);
                self.peers[host].direct.insert(from, now);
                if followed != Some(term) {
                    self.send_to_peer(host, from, SimulatedPeerMessage::Leads(term));
                }
                self.run_leader(host);
            }
        }
    }

    /// Rates in force on each host.
    pub fn quotas(&mut self) -> Vec<ByKind> {
        self.check_all();
        self.in_force.clone()
    }
}
