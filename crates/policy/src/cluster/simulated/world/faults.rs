//! What goes wrong, and what is told otherwise: the store, limits, partitions, pauses, restarts.

use super::{Ask, COMES_BACK, Event, World, demand_of};
use crate::cluster::simulated::{MS, Machine};
use crate::cluster::{Host, Spec};

impl World {
    /// The store answers again. Its watches have ended.
    pub fn start_store(&mut self) {
        let was_down = self.store.is_down();
        self.store.start(self.now);
        if was_down && !self.setting.rereads {
            (0..self.places.len()).for_each(|place| self.come_back(place));
        }
    }

    /// Asks anew, soon, what has been missed.
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

    /// Of the limits before, `safe` was every host's for ever.
    pub fn set_spec(&mut self, spec: Spec, safe: f64) {
        self.store.set_spec(spec);
        self.audit.change(*spec.limits(), safe, self.now);
        self.look_at_all();
    }

    /// The store goes back to its mark, also where it has other limits.
    pub fn lose(&mut self, safe: f64) {
        let before = self.store.spec();
        self.store.lose(self.now);
        if self.store.spec() != before {
            self.audit.change(*self.store.spec().limits(), safe, self.now);
        }
        self.look_at_all();
    }

    /// Hosts first, then leaders.
    pub const fn places(&self) -> usize {
        self.places.len()
    }

    /// Nothing that a place sends arrives, or nothing that is sent to it; or everything again.
    pub fn cut(&mut self, place: usize, is_cut: bool) {
        let was_cut = core::mem::replace(&mut self.places[place].is_cut, is_cut);
        if was_cut && !is_cut && !self.setting.rereads {
            self.come_back(place);
        }
    }

    /// A process stands still for so many nanoseconds; what arrives waits for it.
    pub fn pause(&mut self, place: usize, length: u64) {
        let until = &mut self.places[place].paused_until;
        *until = (*until).max(self.now + length);
    }

    /// Whether it stands still.
    pub fn is_paused(&self, place: usize) -> bool {
        self.places[place].paused_until > self.now
    }

    /// Kills a process, and starts another in its place.
    pub fn restart(&mut self, place: usize) {
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
        let seed = self.seed.wrapping_add(place as u64 + 1) ^ run << 32;
        let host = Host::new(run, old.host.spec(), self.setting.timing);
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
