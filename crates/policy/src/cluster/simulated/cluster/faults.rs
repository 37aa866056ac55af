//! Faults and changes of configuration: store outages, limits, partitions, pauses, restarts.

use super::{ClusterEvent, MAX_REREAD_DELAY, SimulatedCluster, StoreRequest, StoreResponse, demand_of};
use crate::cluster::simulated::{NANOS_PER_MS, SimulatedHost};
use crate::cluster::{ClusterGroupLimits, HostQuota};

impl SimulatedCluster {
    /// Restarts the store. Watches have ended, so every process reads again.
    pub fn start_store(&mut self) {
        let was_down = self.store.is_down();
        self.store.start(self.now);
        if was_down && !self.config.rereads {
            (0..self.processes.len()).for_each(|place| self.schedule_reread(place));
        }
    }

    /// Schedules the read with which a process catches up after its watch has ended.
    fn schedule_reread(&mut self, place: usize) {
        let at = self.now + self.random.below(MAX_REREAD_DELAY);
        let (run, hosts) = (self.processes[place].run, self.machines.len());
        if self.config.has_peers && self.leaders[place].is_some() {
            self.schedule(at, ClusterEvent::AtStore(place, run, StoreRequest::Read));
        }
        let request = match place.checked_sub(hosts) {
            None => StoreRequest::Host,
            Some(leader) if self.leaders[leader].is_some() => StoreRequest::Read,
            Some(_) => return,
        };
        self.schedule(at, ClusterEvent::AtStore(place, run, request));
    }

    /// Changes the limits. Hosts may keep `fallback_fraction` of the old ones, their fallback
    /// share.
    pub fn set_spec(&mut self, spec: ClusterGroupLimits, fallback_fraction: f64) {
        self.store.set_spec(spec);
        self.audit.change(*spec.limits(), fallback_fraction, self.now);
        self.check_all();
    }

    /// Restores the marked contents of the store, which may include other limits.
    pub fn lose_writes(&mut self, fallback_fraction: f64) {
        let before = self.store.spec();
        self.store.restore_mark(self.now);
        if self.store.spec() != before {
            self.audit.change(*self.store.spec().limits(), fallback_fraction, self.now);
        }
        self.check_all();
    }

    /// Number of processes: hosts first, then leaders.
    pub const fn process_count(&self) -> usize {
        self.processes.len()
    }

    /// Partitions a process from the store, or reconnects it.
    pub fn set_partitioned(&mut self, place: usize, is_partitioned: bool) {
        let was_partitioned = core::mem::replace(&mut self.processes[place].is_partitioned, is_partitioned);
        if was_partitioned && !is_partitioned && !self.config.rereads {
            self.schedule_reread(place);
        }
    }

    /// Suspends a process for `length` nanoseconds. Its messages wait.
    pub fn pause(&mut self, place: usize, length: u64) {
        let until = &mut self.processes[place].paused_until;
        *until = (*until).max(self.now + length);
    }

    /// True if the process is suspended.
    pub fn is_paused(&self, place: usize) -> bool {
        self.processes[place].paused_until > self.now
    }

    /// Shuts a host down, deregisters it if the store is reachable, and starts it again after
    /// `downtime_ns` with the limits that the store has at the shutdown.
    pub fn shut_down_host(&mut self, host: usize, downtime_ns: u64) {
        let mut spec = self.machines[host].host.spec();
        if !self.store.is_down() && !self.processes[host].is_partitioned {
            spec = self.store.spec();
            self.store.remove_report(host);
            if self.config.has_peers {
                self.store.deregister(host, None, self.now);
            }
            for leader in 0..self.leaders.len() {
                if self.leaders[leader].is_some() {
                    self.notify_leader(leader, StoreResponse::HostRemoved(host));
                }
            }
        }
        self.end_run(host);
        self.start_host(host, spec);
        self.pause(host, downtime_ns);
    }

    /// Kills a process and starts another in its place.
    pub fn restart(&mut self, place: usize) {
        self.end_run(place);
        if place >= self.machines.len() {
            let (leader, run) = (place - self.machines.len(), self.processes[place].run);
            self.leaders[leader] = None;
            return self.schedule(self.now + NANOS_PER_MS, ClusterEvent::LeaderTicks(leader, run));
        }
        self.start_host(place, self.machines[place].host.spec());
    }

    fn end_run(&mut self, place: usize) {
        self.processes[place].run += 1;
        self.processes[place].paused_until = 0;
        if self.config.has_peers {
            self.leaders[place] = None;
            self.peers[place] = self.new_peer(place);
            let run = self.processes[place].run;
            self.schedule(self.now + NANOS_PER_MS, ClusterEvent::LeaderTicks(place, run));
        }
    }

    /// Loses the messages from one host to another, or delivers them again.
    pub fn set_cut(&mut self, from: usize, to: usize, is_cut: bool) {
        if is_cut {
            self.cut.insert((from, to));
        } else {
            self.cut.remove(&(from, to));
        }
    }

    /// Replaces the store by one that has only the limits.
    pub fn replace_store(&mut self) {
        self.store.lose_all(self.now);
        self.check_all();
    }

    /// Starts another run of a host that knows these limits.
    fn start_host(&mut self, place: usize, spec: ClusterGroupLimits) {
        let (run, now) = (self.processes[place].run, self.processes[place].to_local(self.now));
        let old = &self.machines[place];
        let bytes = old.clients.iter().map(|client| client.length).sum();
        self.audit.forget_process_excess(old.clients.len() as u64, bytes);
        let seed = self.seed.wrapping_add(place as u64 + 1) ^ run << 32;
        let host = HostQuota::new(run, spec, self.config.timing);
        let machine = SimulatedHost::new(host, &old.clients, seed, now);
        self.demands[place] = demand_of(&machine, now);
        self.machines[place] = machine;
        self.check_host(place);
        self.schedule(self.now + NANOS_PER_MS, ClusterEvent::HostTicks(place, run));
        if !self.config.rereads {
            self.send_to_store(place, StoreRequest::Host);
        }
    }
}
