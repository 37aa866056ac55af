//! Hosts, leaders and a store on one virtual clock that none of them can read: each process has its
//! own clock, up to 200 ppm fast or slow. Messages are delayed, and may be late or lost.
//!
//! After every event the sum of the quotas in force, in whole units, is checked against the limit;
//! admissions go to the [`Audit`]. The first excess is recorded as a violation.

mod events;
mod faults;
mod in_force;

use super::{Audit, Client, Load, MS, Machine, Random, S, Store};
use crate::cluster::{Action, ByKind, Demand, Grant, Host, Leader, NAME_LEASE, Report, Spec, Term, Timing};
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString as _};
use alloc::vec::Vec;
use events::{Answer, Ask, Event, Place};

/// Interval at which a host renews its name.
const KEEP_NAME: u64 = NAME_LEASE.as_nanos() as u64 / 3;
/// Latest time after a restart of the store at which hosts query it again.
const COMES_BACK: u64 = 2 * S;

/// Parameters of a [`World`].
#[derive(Clone, Copy, Debug)]
pub struct Setting {
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
    /// If true, every process reads everything at each tick, as if its watch had just ended. If
    /// false, processes rely on watches and read again after one has ended, as the daemon does.
    pub rereads: bool,
    /// Maximum number of grants in one transaction.
    pub operations: usize,
    /// Size in bytes of a value as written to the store.
    pub bytes: fn(Word<'_>) -> u64,
}

/// A value in the store.
#[derive(Clone, Copy, Debug)]
pub enum Word<'a> {
    /// Written by a host.
    Report(&'a Report),
    /// Written by a leader.
    Grant(&'a Grant),
}

/// The simulated cluster.
#[derive(Debug)]
pub struct World {
    setting: Setting,
    seed: u64,
    /// True time: nanoseconds since the start, without drift.
    pub now: u64,
    random: Random,
    /// The store between hosts and leaders.
    pub store: Store,
    audit: Audit,
    /// The hosts' processes.
    pub machines: Vec<Machine>,
    /// Admitted requests of each host, and the time of the last admission.
    pub passed: Vec<(u64, u64)>,
    demands: Vec<Demand>,
    runs_at: Vec<u64>,
    named_at: Vec<u64>,
    leaders: Vec<Option<Leader>>,
    leads_at: Vec<u64>,
    kept_at: Vec<Instant>,
    /// Processes: hosts first, then leaders.
    places: Vec<Place>,
    events: BTreeMap<(u64, u64), Event>,
    number: u64,
    /// Quota in force on each host. May still include a lease that has expired since.
    in_force: Vec<ByKind>,
    sum: ByKind,
    most: ByKind,
    violation: Option<String>,
}

impl World {
    /// Hosts that know these limits and are at their fallback share, each with its clients.
    ///
    /// # Panics
    /// Panics if the reservations on a host exceed the limits.
    pub fn new(seed: u64, spec: Spec, clients: &[Vec<Client>], setting: Setting) -> Self {
        let mut random = Random::new(seed);
        let drift = setting.drift_ppm;
        // Clocks start at unrelated values, at least 10 s, so that no code can rely on a common
        // epoch and times before the start remain representable.
        let mut place = || Place {
            ppm: random.below(2 * drift + 1) as i64 - drift as i64,
            offset: random.below(1000 * S) + 10 * S,
            paused_until: 0,
            is_cut: false,
            run: 1,
        };
        let places: Vec<_> = (0..clients.len() + setting.leaders).map(|_| place()).collect();
        let machine = |(at, clients): (usize, &Vec<Client>)| {
            let seed = seed.wrapping_add(at as u64 + 1);
            Machine::new(Host::new(1, spec, setting.timing), clients, seed, places[at].local(0))
        };
        let machines: Vec<_> = clients.iter().enumerate().map(machine).collect();
        let demands =
            machines.iter().zip(&places).map(|(machine, place)| demand_of(machine, place.local(0))).collect();
        let all = || clients.iter().flatten();
        let lease = setting.timing.term_lease().as_nanos() as u64;
        let bytes = all().map(|client| client.length).sum();
        let hosts = machines.len();
        let mut world = Self {
            setting,
            seed,
            now: 0,
            random,
            store: Store::new(spec, lease),
            // Changed limits reach all hosts within four leases, elections included.
            audit: Audit::new(*spec.limits(), all().count() as u64, bytes, 4 * lease),
            passed: [(0, 0)].repeat(hosts),
            demands,
            runs_at: [0].repeat(hosts),
            named_at: [0].repeat(hosts),
            machines,
            leaders: (0..setting.leaders).map(|_| None).collect(),
            leads_at: [0].repeat(setting.leaders),
            kept_at: [Instant::ZERO].repeat(setting.leaders),
            places,
            events: BTreeMap::new(),
            number: 0,
            in_force: [[0; 6]].repeat(hosts),
            sum: [0; 6],
            most: [0; 6],
            violation: None,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        let tick = self.tick();
        for host in 0..self.machines.len() {
            let at = self.random.below(tick);
            self.at(at, Event::HostTicks(host, 1));
            self.at(at, Event::HostRuns(host, at));
            self.runs_at[host] = at;
            self.named_at[host] = self.random.below(KEEP_NAME);
        }
        for leader in 0..self.leaders.len() {
            let at = self.random.below(tick);
            self.at(at, Event::LeaderTicks(leader, 1));
        }
        self.look_at_all();
    }

    const fn tick(&self) -> u64 {
        self.setting.timing.tick.as_nanos() as u64
    }

    fn at(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.insert((at, self.number), event);
    }

    fn delay(&mut self) -> u64 {
        let (from, to) = self.setting.delay_ns;
        if self.setting.late.is_some_and(|late| self.random.one_in(late)) {
            self.random.between(5 * MS, 3 * S)
        } else {
            self.random.between(from, to)
        }
    }

    fn local(&self, place: usize) -> Instant {
        Instant::from_nanos(self.places[place].local(self.now))
    }

    /// Processes all events before `end`.
    pub fn run_until(&mut self, end: u64) {
        while let Some((&key, _)) = self.events.first_key_value()
            && key.0 < end
        {
            self.now = self.now.max(key.0);
            if let Some(event) = self.events.remove(&key) {
                self.happen(event);
            }
        }
        self.now = self.now.max(end);
    }

    fn happen(&mut self, event: Event) {
        let hosts = self.machines.len();
        let (place, run) = match &event {
            Event::HostTicks(host, run) | Event::ToHost(host, run, ..) => (*host, *run),
            Event::HostRuns(host, _) => (*host, self.places[*host].run),
            Event::LeaderTicks(leader, run) | Event::ToLeader(leader, run, _) => (hosts + leader, *run),
            Event::LeaderRuns(leader, _) => (hosts + leader, self.places[hosts + leader].run),
            // The store has no local clock and cannot be paused.
            Event::AtStore(place, run, _) => (*place, *run),
        };
        let event = match event {
            Event::AtStore(place, run, ask) => {
                if !self.store.is_down() {
                    self.at_store(place, run, ask);
                }
                return;
            }
            event => event,
        };
        // An event for an earlier run of the process is lost, as a message to a closed connection
        // is.
        if self.places[place].run != run {
            return;
        }
        if self.places[place].paused_until > self.now {
            return self.at(self.places[place].paused_until, event);
        }
        match event {
            Event::HostTicks(host, run) => {
                self.at(self.now + self.tick(), Event::HostTicks(host, run));
                self.host_ticks(host);
            }
            Event::HostRuns(host, at) => {
                if self.runs_at[host] == at {
                    self.host_runs(host);
                }
            }
            Event::ToHost(host, _, leader, grant) => self.host_hears(host, leader, grant),
            Event::LeaderTicks(leader, run) => self.leader_ticks(leader, run),
            Event::LeaderRuns(leader, at) => {
                if self.leads_at[leader] == at {
                    self.lead(leader);
                }
            }
            Event::ToLeader(leader, _, answer) => self.leader_hears(leader, answer),
            Event::AtStore(..) => {}
        }
    }

    fn host_ticks(&mut self, host: usize) {
        if self.setting.rereads {
            self.ask(host, Ask::Host);
        } else if self.now >= self.named_at[host] {
            self.named_at[host] = self.now + KEEP_NAME;
            self.ask(host, Ask::Name);
        }
        let now = self.local(host);
        self.machines[host].look_at_the_clock(now.as_nanos());
        self.look(host);
        self.host_runs(host);
        let machine = &self.machines[host];
        let demand = self.demands[host].observe(now, machine.tree.stats(machine.group, now));
        let machine = &mut self.machines[host];
        machine.last = machine.usage(demand, now.as_nanos());
        self.report(host);
    }

    fn ask(&mut self, place: usize, ask: Ask) {
        if !self.places[place].is_cut {
            let (at, run) = (self.now + self.delay(), self.places[place].run);
            self.at(at, Event::AtStore(place, run, ask));
        }
    }

    fn host_runs(&mut self, host: usize) {
        let now = self.places[host].local(self.now);
        let machine = &mut self.machines[host];
        let mut passed = Vec::new();
        machine.run(now, |client| passed.push(client));
        for client in passed {
            let done = self.audit.passed(self.machines[host].clients[client].length, self.now);
            if let Err(why) = done {
                self.violation.get_or_insert(why);
            }
            self.passed[host] = (self.passed[host].0 + 1, self.now);
        }
        let machine = &self.machines[host];
        let next = self.places[host].real(machine.next).max(self.now + 1);
        if machine.next < u64::MAX {
            self.runs_at[host] = next;
            self.at(next, Event::HostRuns(host, next));
        }
    }

    fn report(&mut self, host: usize) {
        let now = self.local(host);
        let machine = &mut self.machines[host];
        if let Some(report) = machine.host.tick(machine.last, now) {
            self.ask(host, Ask::Report(Box::new(report)));
        }
    }

    fn host_hears(&mut self, host: usize, leader: Option<Term>, grant: Option<Grant>) {
        let now = self.local(host);
        let machine = &mut self.machines[host];
        machine.look_at_the_clock(now.as_nanos());
        let Machine { host: state, tree, group, .. } = machine;
        if let Some(leader) = leader {
            state.on_leader(leader);
        }
        if let Some(grant) = grant {
            state.on_grant(&grant, now, |limits, credit, at| {
                // Limits scaled down from valid ones are valid.
                tree.divide(*group, limits, credit, at).unwrap_or_default()
            });
            machine.lend();
        }
        self.host_runs(host);
        self.look(host);
        if self.machines[host].host.is_urgent() {
            self.report(host);
        }
    }

    fn at_store(&mut self, place: usize, run: u64, ask: Ask) {
        let (hosts, now) = (self.machines.len(), self.now);
        let answer = match ask {
            Ask::Host => {
                self.store.traffic.reads += 1;
                return self.tell_host(place);
            }
            Ask::Name => {
                self.store.traffic.keeps += 1;
                return;
            }
            Ask::Report(report) => {
                let bytes = (self.setting.bytes)(Word::Report(&report));
                self.store.report(place, (*report).clone(), bytes);
                for leader in (0..self.leaders.len())
                    .filter(|leader| self.leaders[*leader].is_some())
                    .collect::<Vec<_>>()
                {
                    self.store.traffic.events += 1;
                    self.store.traffic.sent_bytes += bytes;
                    let read = Vec::from([(place, (*report).clone())]);
                    self.tell_leader(leader, Answer::Read(self.store.spec(), read));
                }
                return;
            }
            Ask::Campaign(nonce, asked) => {
                let Some(term) = self.store.campaign(nonce, now) else { return };
                // Two watch events for each host: deletion of the old key and creation of the new
                // one.
                self.store.traffic.events += 2 * hosts as u64;
                for host in 0..hosts {
                    self.tell_host(host);
                }
                Answer::Elected(term, self.store.spec(), asked)
            }
            Ask::KeepAlive(term, asked) => {
                if self.store.keep_alive(term, now) {
                    Answer::Kept(asked)
                } else {
                    Answer::Deposed(term)
                }
            }
            Ask::Read => {
                self.store.traffic.reads += 1;
                Answer::Read(self.store.spec(), self.store.reports())
            }
            // Split transactions: each succeeds or fails alone, as in the daemon.
            Ask::Write(term, grants) => {
                let bytes = grants.iter().map(|(_, grant)| (self.setting.bytes)(Word::Grant(grant))).sum();
                if self.store.grant(term, &grants, bytes, now) {
                    self.store.traffic.events += grants.len() as u64;
                    self.store.traffic.sent_bytes += bytes;
                    for (host, _) in grants {
                        self.tell_host(host);
                    }
                    return;
                }
                Answer::Deposed(term)
            }
            Ask::Sweep(term, host, grant) => {
                if self.store.sweep(term, host, &grant, now) && self.is_worth_something(host, &grant) {
                    let why = format!("a lease of host {host} is in force, and its grant was taken away");
                    self.violation.get_or_insert(why);
                }
                return;
            }
        };
        if self.places[place].run == run {
            self.tell_leader(place - hosts, answer);
        }
    }

    fn tell_host(&mut self, host: usize) {
        let (leader, grant) = (self.store.leader(self.now), self.store.grant_of(host));
        if !self.places[host].is_cut {
            let (at, run) = (self.now + self.delay(), self.places[host].run);
            self.at(at, Event::ToHost(host, run, leader, grant));
        }
    }

    fn tell_leader(&mut self, leader: usize, answer: Answer) {
        let place = self.places[self.machines.len() + leader];
        if !place.is_cut {
            let at = self.now + self.delay();
            self.at(at, Event::ToLeader(leader, place.run, answer));
        }
    }

    fn leader_ticks(&mut self, number: usize, run: u64) {
        let place = self.machines.len() + number;
        self.at(self.now + self.tick(), Event::LeaderTicks(number, run));
        let now = self.local(place);
        let rereads = self.setting.rereads;
        match self.leaders[number].as_ref().map(Leader::term) {
            None => {
                // A process that watches the leader's key campaigns only once the key is gone.
                if rereads || (!self.store.is_down() && self.store.leader(self.now).is_none()) {
                    let nonce = self.random.below(u64::MAX);
                    self.ask(place, Ask::Campaign(nonce, now));
                }
            }
            Some(term) => {
                if rereads {
                    self.ask(place, Ask::Read);
                }
                if rereads || now - self.kept_at[number] >= self.setting.timing.keep() {
                    self.kept_at[number] = now;
                    self.ask(place, Ask::KeepAlive(term, now));
                }
                self.sweep(number, now);
                self.lead(number);
            }
        }
    }

    /// Requests the deletion of grants that are no longer valid.
    fn sweep(&mut self, number: usize, now: Instant) {
        let Some(leader) = &self.leaders[number] else { return };
        let (term, left) = (leader.term(), self.store.left().into_iter());
        let over: Vec<_> = left.filter(|(host, _)| !leader.may_hold(&host.to_string(), now)).collect();
        for (host, grant) in over {
            self.ask(self.machines.len() + number, Ask::Sweep(term, host, Box::new(grant)));
        }
    }

    fn leader_hears(&mut self, number: usize, answer: Answer) {
        let now = self.local(self.machines.len() + number);
        let leader = &mut self.leaders[number];
        match (answer, leader) {
            (Answer::Elected(term, spec, asked), leader @ None) => {
                *leader = Some(Leader::new(term, spec, self.setting.timing, asked, now));
                self.kept_at[number] = asked;
                self.ask(self.machines.len() + number, Ask::Read);
            }
            (Answer::Kept(asked), Some(leader)) => leader.kept_alive(asked),
            (Answer::Deposed(term), Some(leader)) if leader.term() == term => leader.depose(),
            (Answer::Gone(host), Some(leader)) => leader.on_gone(&host.to_string()),
            (Answer::Read(spec, reports), Some(leader)) => {
                leader.on_spec(spec, now);
                for (host, report) in reports {
                    leader.on_report(&host.to_string(), report, now);
                }
            }
            _ => {}
        }
        self.lead(number);
    }

    /// Runs the leader if it is due, and schedules its next run.
    fn lead(&mut self, number: usize) {
        let place = self.machines.len() + number;
        let now = self.local(place);
        let Some(leader) = self.leaders[number].as_mut() else { return };
        if now >= leader.next() {
            let term = leader.term();
            for action in leader.tick(now) {
                match action {
                    Action::Write(grants) => self.write(place, term, grants),
                    Action::StandDown => {
                        self.leaders[number] = None;
                        return;
                    }
                }
            }
        }
        let Some(leader) = &self.leaders[number] else { return };
        let next = self.places[place].real(leader.next().as_nanos()).max(self.now + 1);
        if self.leads_at[number] <= self.now || next < self.leads_at[number] {
            self.leads_at[number] = next;
            self.at(next, Event::LeaderRuns(number, next));
        }
    }

    fn write(&mut self, place: usize, term: Term, grants: Vec<(String, Grant)>) {
        let number = |(name, grant): (String, Grant)| Some((name.parse().ok()?, grant));
        let grants: Vec<(usize, Grant)> = grants.into_iter().filter_map(number).collect();
        for part in grants.chunks(self.setting.operations) {
            self.ask(place, Ask::Write(term, part.to_vec()));
        }
    }

    /// True if some process is leader.
    pub fn is_led(&self) -> bool {
        self.leaders.iter().any(Option::is_some)
    }

    /// The process that leads, if any.
    pub fn leader(&self) -> Option<usize> {
        self.leaders.iter().position(Option::is_some).map(|number| self.machines.len() + number)
    }

    /// Changes the load of a client.
    pub fn set_load(&mut self, host: usize, client: usize, load: Load) {
        let now = self.places[host].local(self.now);
        self.machines[host].clients[client].begin(load, now);
        self.runs_at[host] = self.now;
        self.at(self.now, Event::HostRuns(host, self.now));
    }
}

fn demand_of(machine: &Machine, now: u64) -> Demand {
    let now = Instant::from_nanos(now);
    Demand::new(now, machine.tree.stats(machine.group, now))
}
