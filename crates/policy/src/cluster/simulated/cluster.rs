//! Hosts, leaders and a store on one virtual clock that none of them can read: each process has its
//! own clock, up to 200 ppm fast or slow. Messages are delayed, and may be late or lost.
//!
//! After every event the sum of the quotas in force, in whole units, is checked against the limit;
//! admissions go to the [`AdmissionAudit`]. The first excess is recorded as a violation.

mod events;
mod faults;
mod in_force;
mod peers;

use super::{
    AdmissionAudit, ClientLoad, NANOS_PER_MS, NANOS_PER_S, SeededRandom, SimulatedClient, SimulatedHost,
    SimulatedStore,
};
use crate::cluster::{
    ByKind, ClusterGroupLimits, DemandEstimator, HostQuota, HostReport, LeaderAction, NAME_LEASE, QuotaGrant,
    QuotaLeader, Term, Timing,
};
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use events::{ClusterEvent, RegistrationAnswer, SimulatedProcess, StoreRequest, StoreResponse};
use peers::SimulatedPeer;

/// Interval at which a host renews its name.
const NAME_RENEWAL_NS: u64 = NAME_LEASE.as_nanos() as u64 / 3;
/// Latest time after a restart of the store at which hosts query it again.
const MAX_REREAD_DELAY: u64 = 2 * NANOS_PER_S;

/// Parameters of a [`SimulatedCluster`].
#[derive(Clone, Copy, Debug)]
pub struct SimulationConfig {
    /// Timing of hosts and leaders.
    pub timing: Timing,
    /// Minimum and maximum delay of a message in nanoseconds, including the store's processing
    /// time.
    pub delay_ns: (u64, u64),
    /// If set, one message in this many is delayed by up to three seconds.
    pub late: Option<u64>,
    /// Maximum deviation of clocks in either direction, in ppm.
    pub drift_ppm: u64,
    /// Number of processes that stand for election.
    pub leaders: usize,
    /// True if hosts reach each other: each host's process then also stands for election, and
    /// `leaders` must be the number of hosts.
    pub has_peers: bool,
    /// If true, every process reads everything at each tick, as if its watch had just ended. If
    /// false, processes rely on watches and read again after one has ended, as the daemon does.
    pub rereads: bool,
    /// Maximum number of grants in one transaction.
    pub max_grants_per_transaction: usize,
    /// Size in bytes of a value as written to the store.
    pub value_bytes: fn(StoreValue<'_>) -> u64,
}

/// A value in the store.
#[derive(Clone, Copy, Debug)]
pub enum StoreValue<'a> {
    /// Written by a host.
    Report(&'a HostReport),
    /// Written by a leader.
    Grant(&'a QuotaGrant),
}

/// The simulated cluster.
#[derive(Debug)]
pub struct SimulatedCluster {
    config: SimulationConfig,
    seed: u64,
    /// True time: nanoseconds since the start, without drift.
    pub now: u64,
    random: SeededRandom,
    /// The store between hosts and leaders.
    pub store: SimulatedStore,
    audit: AdmissionAudit,
    /// The hosts' processes.
    pub machines: Vec<SimulatedHost>,
    /// Admitted requests of each host, and the time of the last admission.
    pub admissions: Vec<(u64, u64)>,
    demands: Vec<DemandEstimator>,
    next_host_runs: Vec<u64>,
    next_name_renewals: Vec<u64>,
    leaders: Vec<Option<QuotaLeader>>,
    next_leader_runs: Vec<u64>,
    key_renewed_at: Vec<Instant>,
    /// Processes: hosts first, then leaders.
    processes: Vec<SimulatedProcess>,
    events: BTreeMap<(u64, u64), ClusterEvent>,
    number: u64,
    /// Quota in force on each host. May still include a lease that has expired since.
    in_force: Vec<ByKind>,
    sum: ByKind,
    max_in_force: ByKind,
    violation: Option<String>,
    /// Each host's side of agreements, if hosts reach each other.
    peers: Vec<SimulatedPeer>,
    /// Directed pairs of hosts whose messages are lost.
    cut: BTreeSet<(usize, usize)>,
}

impl SimulatedCluster {
    /// Hosts that know these limits and are at their fallback share, each with its clients.
    ///
    /// # Panics
    /// Panics if the reservations on a host exceed the limits.
    pub fn new(
        seed: u64,
        spec: ClusterGroupLimits,
        clients: &[Vec<SimulatedClient>],
        setting: SimulationConfig,
    ) -> Self {
        let mut random = SeededRandom::new(seed);
        let drift = setting.drift_ppm;
        // Clocks start at unrelated values, at least 10 s, so that no code can rely on a common
        // epoch and times before the start remain representable.
        let mut new_process = || SimulatedProcess {
            ppm: random.below(2 * drift + 1) as i64 - drift as i64,
            offset: random.below(1000 * NANOS_PER_S) + 10 * NANOS_PER_S,
            paused_until: 0,
            is_partitioned: false,
            run: 1,
        };
        let own_processes = if setting.has_peers { 0 } else { setting.leaders };
        let processes: Vec<_> = (0..clients.len() + own_processes).map(|_| new_process()).collect();
        let new_host = |(at, clients): (usize, &Vec<SimulatedClient>)| {
            let seed = seed.wrapping_add(at as u64 + 1);
            SimulatedHost::new(
                HostQuota::new(1, spec, setting.timing),
                clients,
                seed,
                processes[at].to_local(0),
            )
        };
        let machines: Vec<_> = clients.iter().enumerate().map(new_host).collect();
        let demands = machines
            .iter()
            .zip(&processes)
            .map(|(machine, place)| demand_of(machine, place.to_local(0)))
            .collect();
        let all = || clients.iter().flatten();
        let lease = setting.timing.term_lease().as_nanos() as u64;
        let bytes = all().map(|client| client.length).sum();
        let hosts = machines.len();
        let mut cluster = Self {
            config: setting,
            seed,
            now: 0,
            random,
            store: SimulatedStore::new(spec, lease),
            // Changed limits reach all hosts within four leases, elections included.
            audit: AdmissionAudit::new(*spec.limits(), all().count() as u64, bytes, 4 * lease, drift),
            admissions: [(0, 0)].repeat(hosts),
            demands,
            next_host_runs: [0].repeat(hosts),
            next_name_renewals: [0].repeat(hosts),
            machines,
            leaders: (0..setting.leaders).map(|_| None).collect(),
            next_leader_runs: [0].repeat(setting.leaders),
            key_renewed_at: [Instant::ZERO].repeat(setting.leaders),
            peers: Vec::new(),
            cut: BTreeSet::new(),
            processes,
            events: BTreeMap::new(),
            number: 0,
            in_force: [[0; 6]].repeat(hosts),
            sum: [0; 6],
            max_in_force: [0; 6],
            violation: None,
        };
        cluster.begin();
        cluster
    }

    fn begin(&mut self) {
        let tick = self.tick();
        for host in 0..self.machines.len() {
            let at = self.random.below(tick);
            self.schedule(at, ClusterEvent::HostTicks(host, 1));
            self.schedule(at, ClusterEvent::HostRuns(host, at));
            self.next_host_runs[host] = at;
            self.next_name_renewals[host] = self.random.below(NAME_RENEWAL_NS);
        }
        for leader in 0..self.leaders.len() {
            let at = self.random.below(tick);
            self.schedule(at, ClusterEvent::LeaderTicks(leader, 1));
        }
        if self.config.has_peers {
            self.peers = (0..self.machines.len()).map(|host| self.new_peer(host)).collect();
        }
        self.check_all();
    }

    /// The process of a leader.
    const fn leader_place(&self, leader: usize) -> usize {
        if self.config.has_peers { leader } else { self.machines.len() + leader }
    }

    const fn tick(&self) -> u64 {
        self.config.timing.tick.as_nanos() as u64
    }

    fn schedule(&mut self, at: u64, event: ClusterEvent) {
        self.number += 1;
        self.events.insert((at, self.number), event);
    }

    fn delay(&mut self) -> u64 {
        let (from, to) = self.config.delay_ns;
        if self.config.late.is_some_and(|late| self.random.one_in(late)) {
            self.random.between(5 * NANOS_PER_MS, 3 * NANOS_PER_S)
        } else {
            self.random.between(from, to)
        }
    }

    fn local(&self, process_index: usize) -> Instant {
        Instant::from_nanos(self.processes[process_index].to_local(self.now))
    }

    /// Processes all events before `end`.
    pub fn run_until(&mut self, end: u64) {
        while let Some((&key, _)) = self.events.first_key_value()
            && key.0 < end
        {
            self.now = self.now.max(key.0);
            if let Some(event) = self.events.remove(&key) {
                self.dispatch(event);
            }
        }
        self.now = self.now.max(end);
    }

    fn dispatch(&mut self, event: ClusterEvent) {
        let (place, run) = match &event {
            ClusterEvent::HostTicks(host, run) | ClusterEvent::ToHost(host, run, ..) => (*host, *run),
            ClusterEvent::HostRuns(host, _) => (*host, self.processes[*host].run),
            ClusterEvent::LeaderTicks(leader, run) | ClusterEvent::ToLeader(leader, run, _) => {
                (self.leader_place(*leader), *run)
            }
            ClusterEvent::LeaderRuns(leader, _) => {
                let place = self.leader_place(*leader);
                (place, self.processes[place].run)
            }
            ClusterEvent::ToPeer(host, run, ..) | ClusterEvent::Registered(host, run, ..) => (*host, *run),
            ClusterEvent::PeerRuns(host, _) => (*host, self.processes[*host].run),
            // The store has no local clock and cannot be paused.
            ClusterEvent::AtStore(place, run, _) => (*place, *run),
        };
        let event = match event {
            ClusterEvent::AtStore(place, run, request) => {
                if !self.store.is_down() {
                    self.process_at_store(place, run, request);
                }
                return;
            }
            event => event,
        };
        // An event for an earlier run of the process is lost, as a message to a closed connection
        // is.
        if self.processes[place].run != run {
            return;
        }
        if self.processes[place].paused_until > self.now {
            return self.schedule(self.processes[place].paused_until, event);
        }
        match event {
            ClusterEvent::HostTicks(host, run) => {
                self.schedule(self.now + self.tick(), ClusterEvent::HostTicks(host, run));
                self.host_ticks(host);
            }
            ClusterEvent::HostRuns(host, at) => {
                if self.next_host_runs[host] == at {
                    self.host_runs(host);
                }
            }
            ClusterEvent::ToHost(host, _, leader, grant) => self.deliver_to_host(host, leader, grant),
            ClusterEvent::LeaderTicks(leader, run) => self.leader_ticks(leader, run),
            ClusterEvent::LeaderRuns(leader, at) => {
                if self.next_leader_runs[leader] == at {
                    self.run_leader(leader);
                }
            }
            ClusterEvent::ToLeader(leader, _, response) => self.deliver_to_leader(leader, response),
            ClusterEvent::ToPeer(host, _, from, message) => self.deliver_to_peer(host, from, message),
            ClusterEvent::PeerRuns(host, at) => {
                if self.peers[host].next == at {
                    self.peer_runs(host);
                }
            }
            ClusterEvent::Registered(host, _, answer) => self.on_registered(host, &answer),
            ClusterEvent::AtStore(..) => {}
        }
    }

    fn host_ticks(&mut self, host: usize) {
        if self.config.rereads {
            self.send_to_store(host, StoreRequest::Host);
        } else if self.now >= self.next_name_renewals[host] {
            self.next_name_renewals[host] = self.now + NAME_RENEWAL_NS;
            self.send_to_store(host, StoreRequest::Name);
        }
        if self.config.has_peers {
            self.register(host);
            self.peer_runs(host);
        }
        let now = self.local(host);
        self.machines[host].expire_lease(now.as_nanos());
        self.check_host(host);
        self.host_runs(host);
        let machine = &self.machines[host];
        let demand = self.demands[host].observe(now, machine.tree.stats(machine.group, now));
        let machine = &mut self.machines[host];
        machine.last = machine.usage(demand, now.as_nanos());
        self.report(host);
    }

    fn send_to_store(&mut self, process_index: usize, request: StoreRequest) {
        if !self.processes[process_index].is_partitioned {
            let (at, run) = (self.now + self.delay(), self.processes[process_index].run);
            self.schedule(at, ClusterEvent::AtStore(process_index, run, request));
        }
    }

    fn host_runs(&mut self, host: usize) {
        let now = self.processes[host].to_local(self.now);
        let machine = &mut self.machines[host];
        let mut passed = Vec::new();
        machine.run(now, |client| passed.push(client));
        for client in passed {
            let result = self.audit.admit(self.machines[host].clients[client].length, self.now);
            if let Err(violation) = result {
                self.violation.get_or_insert(violation);
            }
            self.admissions[host] = (self.admissions[host].0 + 1, self.now);
        }
        let machine = &self.machines[host];
        let next = self.processes[host].to_true_time(machine.next).max(self.now + 1);
        if machine.next < u64::MAX {
            self.next_host_runs[host] = next;
            self.schedule(next, ClusterEvent::HostRuns(host, next));
        }
    }

    fn report(&mut self, host: usize) {
        let now = self.local(host);
        let machine = &mut self.machines[host];
        if let Some(report) = machine.host.tick(machine.last, now) {
            if self.config.has_peers && !self.reaches_store(host) {
                self.report_to_peers(host, &report);
            }
            self.send_to_store(host, StoreRequest::Report(Box::new(report)));
        }
    }

    fn deliver_to_host(&mut self, host: usize, leader: Option<Term>, grant: Option<QuotaGrant>) {
        let now = self.local(host);
        let machine = &mut self.machines[host];
        machine.expire_lease(now.as_nanos());
        let SimulatedHost { host: state, tree, group, .. } = machine;
        if let Some(leader) = leader {
            state.on_leader(leader);
        }
        if let Some(grant) = grant {
            state.on_grant(&grant, now, |limits, credit, at| {
                // Limits scaled down from valid ones are valid.
                tree.set_quota(*group, limits, credit, at).unwrap_or_default()
            });
            machine.install_lease();
        }
        self.host_runs(host);
        self.check_host(host);
        if self.machines[host].host.is_urgent() {
            self.report(host);
        }
    }

    fn process_at_store(&mut self, process_index: usize, run: u64, request: StoreRequest) {
        let (hosts, now) = (self.machines.len(), self.now);
        let response = match request {
            StoreRequest::Host => {
                self.store.traffic.reads += 1;
                return self.notify_host(process_index);
            }
            StoreRequest::Name => {
                self.store.traffic.renewals += 1;
                return;
            }
            StoreRequest::Report(report) => {
                let bytes = (self.config.value_bytes)(StoreValue::Report(&report));
                self.store.report(process_index, (*report).clone(), bytes);
                for leader in (0..self.leaders.len())
                    .filter(|leader| self.leaders[*leader].is_some())
                    .collect::<Vec<_>>()
                {
                    self.store.traffic.events += 1;
                    self.store.traffic.sent_bytes += bytes;
                    let read = Vec::from([(process_index, (*report).clone())]);
                    self.notify_leader(leader, StoreResponse::Read(self.store.spec(), read));
                }
                return;
            }
            StoreRequest::Register(registration) => {
                let (asks, present) = self.store.register(process_index, &registration);
                let revision = self.store.revision();
                let number = registration.number.1;
                if !self.processes[process_index].is_partitioned {
                    let at = self.now + self.delay();
                    let answer = RegistrationAnswer { number, revision, asks, present };
                    self.schedule(at, ClusterEvent::Registered(process_index, run, answer));
                }
                return;
            }
            StoreRequest::Deregister(term, host) => {
                self.store.deregister(host, Some(term), now);
                return;
            }
            StoreRequest::Campaign(..)
                if self.config.has_peers && !self.store.is_asked_by_all(process_index) =>
            {
                return;
            }
            StoreRequest::Campaign(nonce, sent_at) => {
                let Some(term) = self.store.campaign(nonce, now) else { return };
                // Two watch events for each host: deletion of the old key and creation of the new
                // one.
                self.store.traffic.events += 2 * hosts as u64;
                for host in 0..hosts {
                    self.notify_host(host);
                }
                StoreResponse::Elected(term, self.store.spec(), sent_at)
            }
            StoreRequest::KeepAlive(term, sent_at) => {
                if self.store.keep_alive(term, now) {
                    StoreResponse::Renewed(sent_at)
                } else {
                    StoreResponse::Deposed(term)
                }
            }
            StoreRequest::Read => {
                self.store.traffic.reads += 1;
                StoreResponse::Read(self.store.spec(), self.store.reports())
            }
            // Split transactions: each succeeds or fails alone, as in the daemon.
            StoreRequest::Write(term, grants) => {
                let bytes =
                    grants.iter().map(|(_, grant)| (self.config.value_bytes)(StoreValue::Grant(grant))).sum();
                if self.store.grant(term, &grants, bytes, now) {
                    self.store.traffic.events += grants.len() as u64;
                    self.store.traffic.sent_bytes += bytes;
                    for (host, _) in &grants {
                        self.notify_host(*host);
                    }
                    if !self.config.has_peers {
                        return;
                    }
                    StoreResponse::Written(term, grants)
                } else {
                    StoreResponse::Deposed(term)
                }
            }
            StoreRequest::DeleteGrant(term, host, grant) => {
                if self.store.delete_grant(term, host, &grant, now) && self.is_grant_in_use(host, &grant) {
                    let violation = format!("a lease of host {host} is in force, and its grant was deleted");
                    self.violation.get_or_insert(violation);
                }
                return;
            }
        };
        if self.processes[process_index].run == run {
            let number = if self.config.has_peers { process_index } else { process_index - hosts };
            self.notify_leader(number, response);
        }
    }

    fn notify_host(&mut self, host: usize) {
        let (leader, grant) = (self.store.leader(self.now), self.store.grant_of(host));
        if !self.processes[host].is_partitioned {
            let (at, run) = (self.now + self.delay(), self.processes[host].run);
            self.schedule(at, ClusterEvent::ToHost(host, run, leader, grant));
        }
    }

    fn notify_leader(&mut self, leader: usize, response: StoreResponse) {
        let process = self.processes[self.leader_place(leader)];
        if !process.is_partitioned {
            let at = self.now + self.delay();
            self.schedule(at, ClusterEvent::ToLeader(leader, process.run, response));
        }
    }

    fn leader_ticks(&mut self, number: usize, run: u64) {
        let process_index = self.leader_place(number);
        self.schedule(self.now + self.tick(), ClusterEvent::LeaderTicks(number, run));
        let now = self.local(process_index);
        let rereads = self.config.rereads;
        match self.leaders[number].as_ref().map(QuotaLeader::term) {
            None if self.config.has_peers && !self.may_campaign(number) => {}
            Some(term) if term.revision == 0 => self.run_leader(number),
            None => {
                // A process that watches the leader's key campaigns only once the key is gone.
                if rereads || (!self.store.is_down() && self.store.leader(self.now).is_none()) {
                    let nonce = self.random.below(u64::MAX);
                    self.send_to_store(process_index, StoreRequest::Campaign(nonce, now));
                }
            }
            Some(term) => {
                if rereads {
                    self.send_to_store(process_index, StoreRequest::Read);
                }
                if rereads || now - self.key_renewed_at[number] >= self.config.timing.key_renewal_interval() {
                    self.key_renewed_at[number] = now;
                    self.send_to_store(process_index, StoreRequest::KeepAlive(term, now));
                }
                self.delete_stale_grants(number, now);
                if self.config.has_peers {
                    self.deregister_silent_hosts(number, term);
                }
                self.run_leader(number);
            }
        }
    }

    /// Requests the deletion of grants that are no longer valid.
    fn delete_stale_grants(&mut self, number: usize, now: Instant) {
        let Some(leader) = &self.leaders[number] else { return };
        let (term, departed) = (leader.term(), self.store.grants_of_departed_hosts().into_iter());
        let expired: Vec<_> =
            departed.filter(|(host, _)| !leader.may_have_lease(&host.to_string(), now)).collect();
        for (host, grant) in expired {
            self.send_to_store(
                self.leader_place(number),
                StoreRequest::DeleteGrant(term, host, Box::new(grant)),
            );
        }
    }

    fn deliver_to_leader(&mut self, number: usize, response: StoreResponse) {
        let place = self.leader_place(number);
        let now = self.local(place);
        let may_lead = !self.config.has_peers || self.may_campaign(number);
        let leader = &mut self.leaders[number];
        match (response, leader) {
            (StoreResponse::Elected(..), None) if !may_lead => {}
            (StoreResponse::Elected(term, spec, sent_at), leader @ None) => {
                *leader = Some(QuotaLeader::new(term, spec, self.config.timing, sent_at, now));
                self.key_renewed_at[number] = sent_at;
                if self.config.has_peers {
                    self.peers[number].begin_term(now);
                }
                self.send_to_store(place, StoreRequest::Read);
            }
            (StoreResponse::Renewed(sent_at), Some(leader)) => leader.on_key_renewed(sent_at),
            (StoreResponse::Deposed(term), Some(leader)) if leader.term() == term => leader.depose(),
            (StoreResponse::Written(term, grants), Some(leader)) if leader.term() == term => {
                self.send_grants_to_peers(place, term, &grants);
            }
            (StoreResponse::HostRemoved(host), Some(leader)) => leader.on_host_removed(&host.to_string()),
            (StoreResponse::Read(spec, reports), Some(leader)) => {
                leader.on_spec(spec, now);
                for (host, report) in reports {
                    if let Some(peer) = self.peers.get_mut(number) {
                        peer.note_report(host, report.report_number, now);
                    }
                    leader.on_report(&host.to_string(), report, now);
                }
            }
            _ => {}
        }
        self.run_leader(number);
    }

    /// Runs the leader if it is due, and schedules its next run.
    fn run_leader(&mut self, number: usize) {
        let process_index = self.leader_place(number);
        let now = self.local(process_index);
        let Some(leader) = self.leaders[number].as_mut() else { return };
        if now >= leader.next() {
            let term = leader.term();
            for action in leader.tick(now) {
                match action {
                    LeaderAction::Write(grants) => self.write(process_index, term, grants),
                    LeaderAction::StandDown => {
                        self.leaders[number] = None;
                        return;
                    }
                }
            }
        }
        let Some(leader) = &self.leaders[number] else { return };
        let next = self.processes[process_index].to_true_time(leader.next().as_nanos()).max(self.now + 1);
        if self.next_leader_runs[number] <= self.now || next < self.next_leader_runs[number] {
            self.next_leader_runs[number] = next;
            self.schedule(next, ClusterEvent::LeaderRuns(number, next));
        }
    }

    fn write(&mut self, place: usize, term: Term, grants: Vec<(String, QuotaGrant)>) {
        let number = |(name, grant): (String, QuotaGrant)| Some((name.parse().ok()?, grant));
        let grants: Vec<(usize, QuotaGrant)> = grants.into_iter().filter_map(number).collect();
        // A leader that reaches the store sends them after the write.
        if self.config.has_peers && (term.revision == 0 || !self.reaches_store(place)) {
            self.send_grants_to_peers(place, term, &grants);
        }
        if term.revision == 0 {
            return;
        }
        for part in grants.chunks(self.config.max_grants_per_transaction) {
            self.send_to_store(place, StoreRequest::Write(term, part.to_vec()));
        }
    }

    /// True if some process is leader.
    pub fn has_leader(&self) -> bool {
        self.leaders.iter().any(Option::is_some)
    }

    /// The process that leads, if any.
    pub fn leader(&self) -> Option<usize> {
        self.leaders.iter().position(Option::is_some).map(|number| self.leader_place(number))
    }

    /// Changes the load of a client.
    pub fn set_load(&mut self, host: usize, client: usize, load: ClientLoad) {
        let now = self.processes[host].to_local(self.now);
        self.machines[host].clients[client].start_load(load, now);
        self.next_host_runs[host] = self.now;
        self.schedule(self.now, ClusterEvent::HostRuns(host, self.now));
    }
}

fn demand_of(machine: &SimulatedHost, now: u64) -> DemandEstimator {
    let now = Instant::from_nanos(now);
    DemandEstimator::new(now, machine.tree.stats(machine.group, now))
}
