//! Faults and changes of configuration: store outages, limits, partitions, pauses, restarts.

use super::{Answer, Ask, COMES_BACK, Event, World, demand_of};
use crate::cluster::simulated::{MS, Machine};
use crate::cluster::{Host, Spec};

impl World {
    /// Restarts the store. Watches have ended, so every process reads again.
    pub fn start_store(&mut self) {
        let was_down = self.store.is_down();
        self.store.start(self.now);
        if was_down && !self.setting.rereads {
            (0..self.places.len()).for_each(|place| self.come_back(place));
        }
    }

    /// Schedules the read with which a process catches up after its watch has ended.
    fn come_back(&mut self, place: usize) {
        let at = self.now + self.random.below(COMES_BACK);
        let (run, hosts) = (self.places[place].run, self.machines.len());
        let ask = match place.checked_sub(hosts) {
            None => Ask::Host,
            Some(leader) if self.leaders[leader].is_some() => Ask::Read,
            Some(_) => return,
        };
        self.at(at, Event::AtStore(place, run, ask));
    }

    /// Changes the limits. `safe` is the fallback share under the old ones, which hosts may keep.
    pub fn set_spec(&mut self, spec: Spec, safe: f64) {
        self.store.set_spec(spec);
        self.audit.change(*spec.limits(), safe, self.now);
        self.look_at_all();
    }

    /// Restores the marked contents of the store, which may include other limits.
    pub fn lose(&mut self, safe: f64) {
        let before = self.store.spec();
        self.store.lose(self.now);
        if self.store.spec() != before {
            self.audit.change(*self.store.spec().limits(), safe, self.now);
        }
        self.look_at_all();
    }

    /// Number of processes: hosts first, then leaders.
    pub const fn places(&self) -> usize {
        self.places.len()
    }

    /// Partitions a process from the store, or reconnects it.
    pub fn cut(&mut self, place: usize, is_cut: bool) {
        let was_cut = core::mem::replace(&mut self.places[place].is_cut, is_cut);
        if was_cut && !is_cut && !self.setting.rereads {
            self.come_back(place);
        }
    }

    /// Suspends a process for `length` nanoseconds. Its messages wait.
    pub fn pause(&mut self, place: usize, length: u64) {
        let until = &mut self.places[place].paused_until;
        *until = (*until).max(self.now + length);
    }

    /// True if the process is suspended.
    pub fn is_paused(&self, place: usize) -> bool {
        self.places[place].paused_until > self.now
    }

    /// Shuts a host down, deregisters it if the store is reachable, and starts it again after
    /// `away` nanoseconds with the limits that the store has at the shutdown.
    pub fn leave(&mut self, host: usize, away: u64) {
        let mut spec = self.machines[host].host.spec();
        if !self.store.is_down() && !self.places[host].is_cut {
            spec = self.store.spec();
            self.store.leave(host);
            for leader in 0..self.leaders.len() {
                if self.leaders[leader].is_some() {
                    self.tell_leader(leader, Answer::Gone(host));
                }
            }
        }
        self.end(host);
        self.start(host, spec);
        self.pause(host, away);
    }

    /// Kills a process and starts another in its place.
    pub fn restart(&mut self, place: usize) {
        self.end(place);
        if place >= self.machines.len() {
            let (leader, run) = (place - self.machines.len(), self.places[place].run);
            self.leaders[leader] = None;
            return self.at(self.now + MS, Event::LeaderTicks(leader, run));
        }
        self.start(place, self.machines[place].host.spec());
    }

    fn end(&mut self, place: usize) {
        self.places[place].run += 1;
        self.places[place].paused_until = 0;
    }

    /// Starts another run of a host that knows these limits.
    fn start(&mut self, place: usize, spec: Spec) {
        let (run, now) = (self.places[place].run, self.places[place].local(self.now));
        let old = &self.machines[place];
        let bytes = old.clients.iter().map(|client| client.length).sum();
        self.audit.forgive(old.clients.len() as u64, bytes);
        let seed = self.seed.wrapping_add(place as u64 + 1) ^ run << 32;
        let host = Host::new(run, spec, self.setting.timing);
        let machine = Machine::new(host, &old.clients, seed, now);
        self.demands[place] = demand_of(&machine, now);
        self.machines[place] = machine;
        self.look(place);
        self.at(self.now + MS, Event::HostTicks(place, run));
        if !self.setting.rereads {
            self.ask(place, Ask::Host);
        }
    }
}
