//! This host's connections to the other hosts: it keeps its quota while etcd is unreachable, and
//! reports to a leader that it reaches directly.
//!
//! ```text
//!                       etcd: addresses of all hosts, and the hosts that each one asks
//!                         ▲
//!   EtcdAgent ── session ─┘        with a session: confirms nothing; a leader answers direct reports
//!       │
//!       └─ without a session ──►   Peers ── agreement (policy) ──► leads, or follows the leader
//!                                    │
//!                                    └── PeerLink, PeerListener ◄──► other hosts
//! ```
//!
//! `policy::cluster::PeerAgreement` has the rules. Belongs to the agent, so that etcd's answers and
//! promises to other hosts are handled in one order. Never waits for a connection.

mod link;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::{SocketAddr, TcpListener},
};

use async_channel::Sender;
use policy::{
    cluster::{
        AgreementAnswer, AgreementMessage, AgreementRefusal, AgreementRequest, LeaderAction,
        MAX_AGREEING_HOSTS, PeerAgreement, PeerSet, QuotaLeader, Term, Timing,
    },
    time::{Duration, Instant},
};

use super::{
    environment::{now, random},
    etcd::EtcdParameters,
    etcd_values::{GrantValue, HostGrants, HostReports},
    messages::{AgentInput, AgentMessage, PeerStatus},
    peer_message::{PeerMessage, PeerRefusal},
    session_state::SessionState,
};
use link::{LinkContext, PeerLink, PeerListener};

/// Time between a change of the known hosts and the write of the hosts that this one asks: many
/// hosts may start at once.
const REGISTRATION_DELAY: Duration = Duration::from_millis(300);
/// Time for which hosts that a restored etcd has lost are still asked.
const RESTORED_FOR: Duration = Duration::from_secs(600);

/// Hosts that are asked, with the addresses of those that have one.
type AskedAddresses = BTreeMap<String, Option<SocketAddr>>;

/// Binds the address of this host, before the sandbox is entered.
pub(super) fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    link::bind(address)
}

/// A leader by agreement.
struct AgreementLeader {
    term: Term,
    since: Instant,
    won_at: Instant,
    groups: BTreeMap<String, QuotaLeader>,
}

/// State of the connections and agreements of this run.
pub(super) struct Peers {
    context: LinkContext,
    timing: Timing,
    own_address: SocketAddr,
    _listener: PeerListener,
    links: BTreeMap<String, PeerLink>,
    agreement: PeerAgreement,
    /// Addresses of the other hosts, as far as they are known.
    addresses: BTreeMap<String, SocketAddr>,
    /// Hosts in etcd: those with an address, and others that take part.
    present: PeerSet,
    /// Hosts that etcd has as asked by this one, and their addresses.
    registered: Option<AskedAddresses>,
    register_at: Option<Instant>,
    /// Set while etcd may have lost hosts: it was restored or replaced.
    restored_until: Option<Instant>,
    /// True while this run has its host's name in the cluster.
    is_member: bool,
    /// Another host that leads, according to its own message.
    followed: Option<(String, Instant)>,
    /// Term that the main thread follows by a message of another host.
    followed_term: Option<(Term, String)>,
    /// Number of hosts of the agreement that this host follows.
    agreed: usize,
    leading: Option<AgreementLeader>,
    /// Nonce of the last term that this host led by agreement.
    led: u64,
    /// Hosts that report to this one directly, with the time of their last report.
    direct: BTreeMap<String, Instant>,
    own_reports: Option<HostReports>,
    status: PeerStatus,
}

impl Peers {
    /// Starts the listener. Has to be called on the agent's runtime.
    pub(super) fn new(
        cluster: &settings::ClusterConfig,
        own_address: SocketAddr,
        listener: TcpListener,
        terms: &EtcdParameters,
        timing: Timing,
        inbox: Sender<AgentInput>,
    ) -> io::Result<Self> {
        let context =
            LinkContext { cluster: cluster.name.clone(), host: cluster.host.clone(), terms: terms.clone() };
        Ok(Self {
            _listener: PeerListener::new(context.clone(), listener, inbox)?,
            agreement: PeerAgreement::new(&cluster.host, timing, now()),
            context,
            timing,
            own_address,
            links: BTreeMap::new(),
            addresses: BTreeMap::new(),
            present: PeerSet::new(),
            registered: None,
            register_at: None,
            restored_until: None,
            is_member: false,
            followed: None,
            followed_term: None,
            agreed: 0,
            leading: None,
            led: 0,
            direct: BTreeMap::new(),
            own_reports: None,
            status: PeerStatus::default(),
        })
    }

    pub(super) const fn own_address(&self) -> SocketAddr {
        self.own_address
    }

    /// This host's key in etcd was deleted, or its contents are unknown.
    pub(super) fn register_again(&mut self) {
        self.registered = None;
        self.register_at = Some(now());
    }

    /// Records whether this run has its host's name; without it, it takes no part.
    pub(super) fn set_member(&mut self, is_member: bool) {
        if is_member && !self.is_member {
            // Another process may have had the name until now, and may have made a promise.
            self.agreement.hold_back(now());
        }
        self.is_member = is_member;
        self.connect();
    }

    /// True if this host may campaign in etcd.
    pub(super) fn may_campaign(&self) -> bool {
        self.agreement.may_campaign(now())
    }

    /// The hosts that are known from etcd have changed: those with an address, and those without.
    pub(super) fn on_hosts(&mut self, addresses: &BTreeMap<String, SocketAddr>, others: BTreeSet<String>) {
        let host = &self.context.host;
        let known = addresses.iter().filter(|(name, _)| *name != host).take(MAX_AGREEING_HOSTS);
        let mut has_moved = false;
        for (name, address) in known {
            has_moved |= self.addresses.insert(name.clone(), *address) != Some(*address);
        }
        let mut present: PeerSet = others.into_iter().map(|name| (name, false)).collect();
        present.extend(addresses.keys().map(|name| (name.clone(), true)));
        present.insert(host.clone(), true);
        self.agreement.add_members(present.clone());
        if has_moved || self.present != present || self.registered.is_none() {
            self.register_at.get_or_insert(now() + REGISTRATION_DELAY);
        }
        self.present = present;
        self.connect();
    }

    /// Opens the missing connections, and closes those to hosts that are not asked any more. A run
    /// without its host's name has none: they would replace those of the process that has it.
    fn connect(&mut self) {
        let members = self.agreement.members();
        let is_wanted = |name: &String| self.is_member && members.contains_key(name);
        let wanted = self.addresses.iter().filter(|(name, _)| is_wanted(name));
        let wanted: BTreeMap<String, SocketAddr> =
            wanted.map(|(name, address)| (name.clone(), *address)).collect();
        self.links.retain(|name, link| wanted.get(name) == Some(&link.address));
        for (name, address) in wanted {
            let (context, host) = (&self.context, name.clone());
            self.links.entry(name).or_insert_with(|| PeerLink::new(context.clone(), host, address));
        }
    }

    /// etcd was restored from a copy, or replaced: hosts that it lacks are still asked. Its former
    /// leader may not know it yet, and grants quotas directly until its key would have expired.
    pub(super) fn on_restored(&mut self) {
        self.agreement.hold_back(now());
        self.restored_until = Some(now() + RESTORED_FOR);
        self.register_again();
    }

    /// The hosts to write to etcd as asked by this one, if a write is due, and those among the
    /// hosts asked so far that are missing from it.
    pub(super) fn due_registration(&mut self) -> Option<(AskedAddresses, AskedAddresses)> {
        let at = now();
        self.register_at.filter(|due| at >= *due)?;
        let is_complete = self.agreement.members().keys().all(|name| self.present.contains_key(name));
        // Hosts that cannot be removed yet are tried again.
        self.register_at = (!is_complete).then(|| at + self.timing.lease);
        if is_complete {
            self.restored_until = None;
        }
        let is_restored = self.restored_until.is_some_and(|until| at < until);
        let own = (&self.context.host, Some(self.own_address));
        let addresses = self.agreement.members().iter().map(|(name, has_address)| {
            let address = if name == own.0 { own.1 } else { self.addresses.get(name).copied() };
            (name.clone(), address.filter(|_| *has_address))
        });
        let (asks, dropped): (AskedAddresses, AskedAddresses) =
            addresses.partition(|(name, _)| is_restored || self.present.contains_key(name));
        let is_new = self.registered.as_ref() != Some(&asks) || !dropped.is_empty();
        is_new.then_some((asks, dropped))
    }

    /// Records the result of a registration: with `is_written` false it is tried again.
    pub(super) fn on_registered(&mut self, asks: AskedAddresses, is_written: bool) {
        if !is_written {
            self.register_at = Some(now() + self.timing.lease / 5);
            return;
        }
        let members = asks.keys().map(|name| (name.clone(), self.present.get(name) == Some(&true)));
        let members: PeerSet = members.collect();
        self.agreement.set_members(members);
        // Hosts that appeared meanwhile.
        self.agreement.add_members(self.present.clone());
        if self.present.keys().any(|name| !asks.contains_key(name)) {
            self.register_at = Some(now() + REGISTRATION_DELAY);
        }
        self.registered = Some(asks);
        self.connect();
    }

    pub(super) const fn register_at(&self) -> Option<Instant> {
        self.register_at
    }

    fn send(&self, to: &str, message: &PeerMessage) {
        if let Some(link) = self.links.get(to) {
            link.send(message);
        }
    }

    fn send_to_all(&self, message: &PeerMessage) {
        self.links.values().for_each(|link| link.send(message));
    }

    /// True if both hosts take part.
    pub(super) fn is_peer(&self, from: &str) -> bool {
        self.is_member && self.agreement.members().contains_key(from)
    }

    /// True if this message is a request that this host would confirm if it led nothing.
    pub(super) fn would_confirm(&self, from: &str, message: &PeerMessage) -> bool {
        let PeerMessage::Ask { nonce, number, members, leads } = message else { return false };
        let request =
            AgreementRequest { nonce: *nonce, number: *number, members: members.clone(), leads: *leads };
        self.is_member && self.agreement.would_confirm(from, &request, now())
    }

    /// True if the host reported directly within the last lease.
    pub(super) fn is_direct(&self, host: &str) -> bool {
        self.direct.get(host).is_some_and(|at| now() < *at + self.timing.lease)
    }

    /// True if any host reported directly within the last lease.
    pub(super) fn has_direct(&self) -> bool {
        self.direct.keys().any(|host| self.is_direct(host))
    }

    /// Direct reports of a host to this one, which leads `term` through etcd: those of known
    /// groups. `None` if the host takes no part.
    pub(super) fn on_direct_report(
        &mut self,
        from: &str,
        mut reports: HostReports,
        term: Term,
        known: &SessionState,
    ) -> Option<HostReports> {
        if !self.is_peer(from) {
            return None;
        }
        reports.groups.retain(|group, _| known.groups.contains_key(group));
        self.direct.insert(from.to_owned(), now());
        if reports.groups.values().any(|report| report.followed_term() != Some(term)) {
            self.send(from, &PeerMessage::Leads { term: term.into() });
        }
        Some(reports)
    }

    /// Sends grants of this leader to a host.
    pub(super) fn send_grants(&self, host: &str, grants: &HostGrants) {
        self.send(host, &PeerMessage::Grant { grants: grants.clone() });
    }

    /// Handles a message while this host has a session with etcd, or without one. With `is_free`,
    /// there is no session and this host does not lead through etcd.
    pub(super) fn on_message(
        &mut self,
        from: &str,
        message: PeerMessage,
        has_session: bool,
        is_free: bool,
        known: &SessionState,
    ) -> Vec<AgentMessage> {
        let mut out = Vec::new();
        if !self.is_peer(from) && !matches!(message, PeerMessage::Ask { .. }) {
            return out;
        }
        let at = now();
        match message {
            PeerMessage::Ask { nonce, number, members, leads } => {
                let hosts = members.len();
                let request = AgreementRequest { nonce, number, members, leads };
                let is_free = is_free && self.is_member;
                let answer = self.agreement.on_request(from, &request, is_free, at);
                if leads && answer.refusal.is_none() {
                    self.agreed = hosts;
                    self.follow(from, Term { revision: 0, nonce }, &mut out);
                }
                self.send(from, &PeerMessage::answer(answer, &self.addresses));
            }
            PeerMessage::Answer { nonce, number, refusal } => {
                if let Some(PeerRefusal::MoreHosts(hosts)) = &refusal
                    && self.agreement.is_current(nonce)
                {
                    let room = MAX_AGREEING_HOSTS.saturating_sub(self.addresses.len());
                    for (name, address) in hosts.iter().take(room) {
                        if let Some(address) = address.filter(|_| settings::parse_cluster_name(name).is_ok())
                        {
                            self.addresses.entry(name.clone()).or_insert(address);
                        }
                    }
                }
                let refusal = refusal.map(PeerRefusal::into_policy);
                self.agreement.on_answer(from, AgreementAnswer { nonce, number, refusal }, at);
                self.connect();
                out.extend(self.tick(is_free, known));
            }
            PeerMessage::Release { nonce } => self.agreement.on_release(from, nonce),
            PeerMessage::Leads { term } if !has_session => {
                self.agreed = 0;
                self.follow(from, (&term).into(), &mut out);
            }
            PeerMessage::Grant { grants } if !has_session => {
                if known.leader.as_ref().is_some_and(|(_, leader)| leader == from) {
                    self.followed = Some((from.to_owned(), at));
                }
                out.extend(granted(grants, known));
            }
            PeerMessage::Report { reports } => {
                self.on_report(from, &reports);
                out.extend(self.lead(known));
            }
            PeerMessage::Leads { .. } | PeerMessage::Grant { .. } | PeerMessage::Ping => {}
        }
        out
    }

    fn follow(&mut self, leader: &str, term: Term, out: &mut Vec<AgentMessage>) {
        self.followed = Some((leader.to_owned(), now()));
        let followed = Some((term, leader.to_owned()));
        if self.followed_term != followed {
            self.followed_term.clone_from(&followed);
            out.push(AgentMessage::LeaderChanged { leader: followed });
        }
    }

    /// The session with etcd has begun: its leader is followed.
    pub(super) fn on_session(&mut self, known: &SessionState) -> Vec<AgentMessage> {
        (self.followed, self.followed_term, self.agreed) = (None, None, 0);
        // Ends the candidacy.
        self.tick(false, known)
    }

    /// Sends this host's reports to the leader, while there is no session with etcd.
    pub(super) fn report(&mut self, reports: HostReports, known: &SessionState) -> Vec<AgentMessage> {
        self.own_reports = Some(reports.clone());
        if !self.is_member {
            return Vec::new();
        }
        if self.leading.is_some() {
            let host = self.context.host.clone();
            self.on_report(&host, &reports);
            return self.lead(known);
        }
        let message = PeerMessage::Report { reports };
        match self.followed.as_ref().filter(|(_, at)| now() < *at + self.timing.term_lease()) {
            Some((leader, _)) => self.send(leader, &message),
            None => self.send_to_all(&message),
        }
        Vec::new()
    }

    /// A report to this host, which leads by agreement.
    fn on_report(&mut self, from: &str, reports: &HostReports) {
        let at = now();
        let Some(leading) = &mut self.leading else { return };
        for (group, report) in &reports.groups {
            if let Some(leader) = leading.groups.get_mut(group) {
                leader.on_report(from, report.into(), at);
            }
        }
        let term = leading.term;
        if from != self.context.host && reports.groups.values().any(|one| one.followed_term() != Some(term)) {
            self.send(from, &PeerMessage::Leads { term: term.into() });
        }
    }

    /// Time of the next call of [`Peers::tick`], without a session.
    pub(super) fn next(&self) -> Instant {
        let leaders = self.leading.iter().flat_map(|leading| leading.groups.values());
        leaders.map(QuotaLeader::next).fold(self.agreement.next(), Instant::min)
    }

    /// Performs what is due. `is_free` as for [`Peers::on_message`].
    pub(super) fn tick(&mut self, is_free: bool, known: &SessionState) -> Vec<AgentMessage> {
        let is_free = is_free && self.is_member;
        let mut out = Vec::new();
        for message in self.agreement.tick(is_free, random(), now()) {
            self.send_to_all(&match message {
                AgreementMessage::Request(request) => PeerMessage::request(request),
                AgreementMessage::Release(nonce) => PeerMessage::Release { nonce },
            });
        }
        let agreed = self.agreement.term(now());
        match (agreed, &mut self.leading) {
            (Some((term, since)), Some(leading)) if leading.term == term => leading.since = since,
            (Some((term, since)), None) if self.led != term.nonce => {
                self.led = term.nonce;
                self.leading = Some(AgreementLeader { term, since, won_at: now(), groups: BTreeMap::new() });
                self.agreed = self.agreement.members().len();
                let host = self.context.host.clone();
                self.follow(&host, term, &mut out);
            }
            (None, None) => {}
            _ => {
                self.leading = None;
                self.agreement.resign(now());
            }
        }
        out.extend(self.lead(known));
        let status = self.current_status();
        if status != self.status {
            self.status = status.clone();
            out.push(AgentMessage::Peers(status));
        }
        out
    }

    /// Divides the limits of all groups, if this host leads by agreement.
    fn lead(&mut self, known: &SessionState) -> Vec<AgentMessage> {
        let at = now();
        let Some(leading) = &mut self.leading else { return Vec::new() };
        self.followed = Some((self.context.host.clone(), at));
        let is_understood = |name: &String| !known.unreadable_groups.contains_key(name);
        leading.groups.retain(|name, _| known.groups.contains_key(name) && is_understood(name));
        let mut grants: BTreeMap<String, HostGrants> = BTreeMap::new();
        for (name, stored) in known.groups.iter().filter(|(name, _)| is_understood(name)) {
            let leader = leading.groups.entry(name.clone()).or_insert_with(|| {
                QuotaLeader::new(leading.term, stored.spec, self.timing, leading.since, leading.won_at)
            });
            leader.on_key_renewed(leading.since);
            if at < leader.next() {
                continue;
            }
            for action in leader.tick(at) {
                match action {
                    LeaderAction::Write(written) => {
                        for (host, grant) in written {
                            let value = GrantValue::of(&grant, stored.group.safe_share_ppm);
                            grants.entry(host).or_default().groups.insert(name.clone(), value);
                        }
                    }
                    LeaderAction::StandDown => {
                        self.leading = None;
                        self.agreement.resign(at);
                        return Vec::new();
                    }
                }
            }
        }
        let own = grants.remove(&self.context.host);
        grants.iter().for_each(|(host, grants)| self.send_grants(host, grants));
        own.map(|grants| granted(grants, known)).unwrap_or_default()
    }

    fn current_status(&self) -> PeerStatus {
        let at = now();
        let leader = self.followed.as_ref().filter(|(_, since)| at < *since + self.timing.lease);
        let why = |refusal: Option<AgreementRefusal>| match refusal {
            None => "does not answer",
            Some(AgreementRefusal::ReachesStore) => "reaches etcd",
            Some(AgreementRefusal::Promised) => "agrees with another host",
            Some(AgreementRefusal::UnknownSender) => "has not read etcd since its start",
            Some(AgreementRefusal::MoreHosts(_)) => "knows more hosts",
        };
        let missing = self.agreement.missing(at);
        PeerStatus {
            leader: leader.map(|(leader, _)| leader.clone()),
            hosts: if leader.is_some() { self.agreed } else { 0 },
            missing: match leader {
                Some(_) => BTreeMap::new(),
                None => missing.into_iter().map(|(name, refusal)| (name, why(refusal))).collect(),
            },
        }
    }

    /// Number of other hosts that this one is connected to.
    pub(super) fn connected(&self) -> usize {
        self.links.values().filter(|link| link.is_connected()).count()
    }
}

/// Messages to the main thread for grants of a leader. Unreadable grants are dropped: the lease
/// runs out.
pub(super) fn granted(grants: HostGrants, known: &SessionState) -> Vec<AgentMessage> {
    let is_understood = |group: &String| !known.unreadable_groups.contains_key(group);
    let groups = grants.groups.into_iter().filter(|(group, _)| is_understood(group));
    groups
        .filter_map(|(group, grant)| Some(AgentMessage::Granted { group, grant: grant.read().ok()? }))
        .collect()
}
