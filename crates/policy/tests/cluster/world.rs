//! Hosts, leaders and a store on one virtual clock, which nobody sees: each has its own, that runs
//! up to 200 ppm fast or slow. Messages take their time, and may be late, or lost.
//!
//! After every event, what is in force on all hosts is at most the limit, in whole numbers; what
//! passes goes to the [`Audit`].

use crate::audit::Audit;
use crate::client::{Client, Load, Machine};
use crate::store::Store;
use crate::{MS, Random, S};
use policy::cluster::{Action, Demand, Grant, Host, Leader, Report, Spec, Term, Timing};
use policy::throttle::LimitKind;
use policy::time::{Duration, Instant};
use std::collections::BTreeMap;

pub(crate) const TIMING: Timing = Timing { tick: Duration::from_millis(200), lease: Duration::from_secs(2) };
const TICK: u64 = 200 * MS;
const LEASE: u64 = 2 * S;

enum Event {
    HostTicks(usize, u64),
    HostRuns(usize, u64),
    ToHost(usize, u64, Option<Term>, Option<Grant>),
    LeaderTicks(usize, u64),
    ToLeader(usize, u64, Answer),
    AtStore(usize, u64, Ask),
}

enum Ask {
    Host,
    Report(Box<Report>),
    Campaign(u64, Instant),
    KeepAlive(Term, Instant),
    Read,
    Write(Term, Vec<(usize, Grant)>),
}

#[derive(Clone)]
enum Answer {
    Elected(Term, Spec, Instant),
    Kept(Instant),
    Deposed(Term),
    Read(Spec, Vec<(usize, Report)>),
}

#[derive(Clone, Copy)]
struct Place {
    ppm: i64,
    offset: u64,
    paused_until: u64,
    is_cut: bool,
    /// Rises with each start: what was meant for an earlier run is lost.
    run: u64,
}

impl Place {
    fn local(&self, now: u64) -> u64 {
        let off = i128::from(now) * i128::from(self.ppm) / 1_000_000;
        (i128::from(now) + off) as u64 + self.offset
    }

    /// Not before this instant of its clock.
    fn real(&self, local: u64) -> u64 {
        let since = i128::from(local.saturating_sub(self.offset));
        (since * 1_000_000 / i128::from(1_000_000 + self.ppm)) as u64 + 1
    }
}

pub(crate) struct World {
    pub(crate) now: u64,
    pub(crate) random: Random,
    pub(crate) store: Store,
    pub(crate) audit: Audit,
    pub(crate) machines: Vec<Machine>,
    /// Requests that have passed, by host, and the last instant at which one did.
    pub(crate) passed: Vec<(u64, u64)>,
    demands: Vec<Demand>,
    runs_at: Vec<u64>,
    leaders: Vec<Option<Leader>>,
    /// Hosts first, then leaders.
    places: Vec<Place>,
    events: BTreeMap<(u64, u64), Event>,
    number: u64,
    /// Late messages: one in so many, if any.
    late: Option<u64>,
}

impl World {
    pub(crate) fn new(
        seed: u64,
        spec: Spec,
        clients: Vec<Vec<Client>>,
        leaders: usize,
        late: Option<u64>,
    ) -> Self {
        let mut random = Random::new(seed);
        let place = |random: &mut Random| Place {
            ppm: random.below(401) as i64 - 200,
            offset: random.below(1000 * S) + 10 * S,
            paused_until: 0,
            is_cut: false,
            run: 1,
        };
        let places: Vec<_> = (0..clients.len() + leaders).map(|_| place(&mut random)).collect();
        let machine = |(at, clients): (usize, &Vec<Client>)| {
            Machine::new(Host::new(1, spec, TIMING), clients, places[at].local(0))
        };
        let machines: Vec<_> = clients.iter().enumerate().map(machine).collect();
        let demands =
            machines.iter().zip(&places).map(|(machine, place)| demand_of(machine, place.local(0))).collect();
        let all = || clients.iter().flatten();
        let audit = Audit::new(
            *spec.limits(),
            all().count() as u64,
            all().map(|client| client.length).sum(),
            4 * LEASE,
        );
        let mut world = Self {
            now: 0,
            random,
            store: Store::new(spec, LEASE),
            audit,
            passed: vec![(0, 0); machines.len()],
            demands,
            runs_at: vec![0; machines.len()],
            machines,
            leaders: (0..leaders).map(|_| None).collect(),
            places,
            events: BTreeMap::new(),
            number: 0,
            late,
        };
        for host in 0..world.machines.len() {
            let at = world.random.below(TICK);
            world.at(at, Event::HostTicks(host, 1));
            world.at(at, Event::HostRuns(host, at));
            world.runs_at[host] = at;
        }
        for leader in 0..leaders {
            let at = world.random.below(TICK);
            world.at(at, Event::LeaderTicks(leader, 1));
        }
        world
    }

    fn at(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.insert((at, self.number), event);
    }

    fn delay(&mut self) -> u64 {
        if self.late.is_some_and(|late| self.random.one_in(late)) {
            self.random.between(5 * MS, 3 * S)
        } else {
            self.random.between(MS / 5, 3 * MS)
        }
    }

    fn local(&self, place: usize) -> Instant {
        Instant::from_nanos(self.places[place].local(self.now))
    }

    pub(crate) fn run_until(&mut self, end: u64) {
        while let Some((&key, _)) = self.events.first_key_value()
            && key.0 < end
        {
            let event = self.events.remove(&key).unwrap();
            self.now = self.now.max(key.0);
            self.happen(event);
        }
        self.now = self.now.max(end);
    }

    fn happen(&mut self, event: Event) {
        let hosts = self.machines.len();
        let (place, run) = match &event {
            Event::HostTicks(host, run) | Event::ToHost(host, run, ..) => (*host, *run),
            Event::HostRuns(host, _) => (*host, self.places[*host].run),
            Event::LeaderTicks(leader, run) | Event::ToLeader(leader, run, _) => (hosts + leader, *run),
            Event::AtStore(place, run, ask) => {
                let (place, run) = (*place, *run);
                if !self.store.is_down {
                    let Event::AtStore(_, _, ask) = event else { unreachable!() };
                    self.at_store(place, run, ask);
                } else {
                    let _lost: &Ask = ask;
                }
                return;
            }
        };
        if self.places[place].run != run {
            return;
        }
        if self.places[place].paused_until > self.now {
            return self.at(self.places[place].paused_until, event);
        }
        match event {
            Event::HostTicks(host, run) => {
                self.at(self.now + TICK, Event::HostTicks(host, run));
                self.ask(host, Ask::Host);
                let now = self.local(host);
                self.machines[host].look_at_the_clock(now.as_nanos());
                self.host_runs(host);
                let machine = &self.machines[host];
                let demand = self.demands[host].observe(now, machine.tree.stats(machine.group, now));
                self.report(host, demand);
            }
            Event::HostRuns(host, at) => {
                if self.runs_at[host] == at {
                    self.host_runs(host);
                }
            }
            Event::ToHost(host, _, leader, grant) => self.host_hears(host, leader, grant),
            Event::LeaderTicks(leader, run) => self.leader_ticks(leader, run),
            Event::ToLeader(leader, _, answer) => self.leader_hears(leader, answer),
            Event::AtStore(..) => unreachable!(),
        }
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
            self.audit.passed(self.machines[host].clients[client].length, self.now);
            self.passed[host] = (self.passed[host].0 + 1, self.now);
        }
        let machine = &self.machines[host];
        let next = self.places[host].real(machine.next).max(self.now + 1);
        if machine.next < u64::MAX {
            self.runs_at[host] = next;
            self.at(next, Event::HostRuns(host, next));
        }
    }

    fn report(&mut self, host: usize, demand: [u64; 6]) {
        let now = self.local(host);
        let machine = &mut self.machines[host];
        let wants = machine.usage(demand, now.as_nanos());
        machine.last_demand = demand;
        if let Some(report) = machine.host.tick(wants, now) {
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
            state
                .on_grant(&grant, now, |limits, credit, at| tree.divide(*group, limits, credit, at).unwrap());
            machine.lend();
        }
        self.host_runs(host);
        self.check();
        if self.machines[host].host.is_urgent() {
            let demand = self.machines[host].last_demand;
            self.report(host, demand);
        }
    }

    fn at_store(&mut self, place: usize, run: u64, ask: Ask) {
        let (hosts, now) = (self.machines.len(), self.now);
        let answer = match ask {
            Ask::Host => return self.tell_host(place),
            Ask::Report(report) => {
                self.store.report(place, (*report).clone());
                for leader in 0..self.leaders.len() {
                    let spec = self.store.spec();
                    self.tell_leader(leader, Answer::Read(spec, vec![(place, (*report).clone())]));
                }
                return;
            }
            Ask::Campaign(nonce, asked) => {
                let Some(term) = self.store.campaign(nonce, now) else { return };
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
            Ask::Read => Answer::Read(self.store.spec(), self.store.reports()),
            Ask::Write(term, grants) => {
                if self.store.grant(term, &grants, now) {
                    for (host, _) in grants {
                        self.tell_host(host);
                    }
                    return;
                }
                Answer::Deposed(term)
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
        self.at(self.now + TICK, Event::LeaderTicks(number, run));
        let now = self.local(place);
        match self.leaders[number].as_ref().map(Leader::term) {
            None => {
                let nonce = self.random.below(u64::MAX);
                self.ask(place, Ask::Campaign(nonce, now));
            }
            Some(term) => {
                self.ask(place, Ask::KeepAlive(term, now));
                self.ask(place, Ask::Read);
                self.lead(number);
            }
        }
    }

    fn leader_hears(&mut self, number: usize, answer: Answer) {
        let now = self.local(self.machines.len() + number);
        let leader = &mut self.leaders[number];
        match (answer, leader) {
            (Answer::Elected(term, spec, asked), leader @ None) => {
                *leader = Some(Leader::new(term, spec, TIMING, asked, now));
                self.ask(self.machines.len() + number, Ask::Read);
            }
            (Answer::Kept(asked), Some(leader)) => leader.kept_alive(asked),
            (Answer::Deposed(term), Some(leader)) if leader.term() == term => leader.depose(),
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

    fn lead(&mut self, number: usize) {
        let place = self.machines.len() + number;
        let now = self.local(place);
        let Some(leader) = self.leaders[number].as_mut() else { return };
        if now < leader.next() {
            // What hurries has a tick of its own below; others come with the next.
            let (next, run) = (leader.next(), self.places[place].run);
            if next.as_nanos() < now.as_nanos() + TICK / 2 {
                let at = self.places[place].real(next.as_nanos()).max(self.now + MS);
                self.at(at, Event::ToLeader(number, run, Answer::Kept(Instant::ZERO)));
            }
            return;
        }
        let term = leader.term();
        for action in leader.tick(now) {
            match action {
                Action::Write(grants) => {
                    let grants =
                        grants.into_iter().map(|(name, grant)| (name.parse().unwrap(), grant)).collect();
                    self.ask(place, Ask::Write(term, grants));
                }
                Action::StandDown => self.leaders[number] = None,
            }
        }
    }

    /// What is in force on all hosts is at most the limit. A host without a lease that knows other
    /// limits, which the store has lost or a leader has not heard of, counts as if it knew these.
    pub(crate) fn check(&self) {
        let known = self.store.spec();
        for kind in LimitKind::ALL {
            let rate = |(machine, place): (&Machine, &Place)| {
                let has_lease =
                    machine.host.is_leased() && place.local(self.now) < machine.host.next().as_nanos();
                if has_lease {
                    return machine.host.limits().limit(kind).rate;
                }
                let safe = machine.host.safe().limit(kind).rate;
                let knows = machine.host.spec().version() == known.version();
                if knows { safe } else { safe.min(known.safe()[kind.index()]) }
            };
            let sum: u64 = self.machines.iter().zip(&self.places).map(rate).sum();
            let most = self.audit.rate(kind);
            assert!(sum <= most, "{kind:?}: {sum} of {most} in force at {} ms", self.now / MS);
        }
    }

    pub(crate) fn set_load(&mut self, host: usize, client: usize, load: Load) {
        self.machines[host].clients[client].load = load;
        self.machines[host].clients[client].due(self.places[host].local(self.now));
        self.runs_at[host] = self.now;
        self.at(self.now, Event::HostRuns(host, self.now));
    }

    /// Of the limits before, `safe` was every host's for ever.
    pub(crate) fn set_spec(&mut self, spec: Spec, safe: f64) {
        self.store.set_spec(spec);
        self.audit.change(*spec.limits(), safe, self.now);
    }

    /// The store goes back to its mark, also where it has other limits.
    pub(crate) fn lose(&mut self, safe: f64) {
        let before = self.store.spec();
        self.store.lose(self.now);
        if self.store.spec() != before {
            self.audit.change(*self.store.spec().limits(), safe, self.now);
        }
    }

    /// Hosts first, then leaders.
    pub(crate) fn places(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn cut(&mut self, place: usize, is_cut: bool) {
        self.places[place].is_cut = is_cut;
    }

    pub(crate) fn pause(&mut self, place: usize, length: u64) {
        let until = &mut self.places[place].paused_until;
        *until = (*until).max(self.now + length);
    }

    pub(crate) fn is_paused(&self, place: usize) -> bool {
        self.places[place].paused_until > self.now
    }

    /// Kills a process, and starts another in its place.
    pub(crate) fn restart(&mut self, place: usize) {
        self.places[place].run += 1;
        self.places[place].paused_until = 0;
        let run = self.places[place].run;
        if place >= self.machines.len() {
            self.leaders[place - self.machines.len()] = None;
            return self.at(self.now + MS, Event::LeaderTicks(place - self.machines.len(), run));
        }
        let now = self.places[place].local(self.now);
        let old = &self.machines[place];
        let bytes = old.clients.iter().map(|client| client.length).sum();
        self.audit.forgive(old.clients.len() as u64, bytes);
        let machine = Machine::new(Host::new(run, old.host.spec(), TIMING), &old.clients, now);
        self.demands[place] = demand_of(&machine, now);
        self.machines[place] = machine;
        self.at(self.now + MS, Event::HostTicks(place, run));
    }
}

fn demand_of(machine: &Machine, now: u64) -> Demand {
    let now = Instant::from_nanos(now);
    Demand::new(now, machine.tree.stats(machine.group, now))
}
