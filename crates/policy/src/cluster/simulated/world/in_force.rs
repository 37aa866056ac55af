//! What is in force on all hosts together, held against the limit after each event.

use super::World;
use crate::cluster::simulated::MS;
use crate::cluster::{ByKind, Grant, zip};
use crate::throttle::LimitKind;
use crate::time::Instant;
use alloc::format;

impl World {
    pub(super) fn has_lease(&self, host: usize) -> bool {
        let (machine, place) = (&self.machines[host].host, &self.places[host]);
        machine.is_leased() && place.local(self.now) < machine.next().as_nanos()
    }

    /// Whether what is in force on a host came with this grant, or would be prolonged by it. One
    /// that an earlier run had is not, though the store has lost what was granted since.
    pub(super) fn is_worth_something(&self, host: usize, grant: &Grant) -> bool {
        let (machine, place) = (&self.machines[host].host, &self.places[host]);
        let lasts = |until: Instant| place.local(self.now) < until.as_nanos();
        self.has_lease(host) && grant.instance == place.run && machine.lease_of(grant).is_some_and(lasts)
    }

    /// What is in force on a host. One without a lease that knows other limits, which the store has
    /// lost or a leader has not heard of, counts as if it knew these.
    fn in_force_on(&self, host: usize) -> ByKind {
        let machine = &self.machines[host].host;
        if self.has_lease(host) {
            return machine.rates();
        }
        let (safe, known) = (machine.spec().safe(), self.store.spec());
        if machine.spec().version() == known.version() {
            return safe;
        }
        zip(safe, known.safe(), u64::min)
    }

    pub(super) fn look(&mut self, host: usize) {
        let now = self.in_force_on(host);
        let before = core::mem::replace(&mut self.in_force[host], now);
        self.sum = core::array::from_fn(|at| self.sum[at] - before[at] + now[at]);
        if self.over().is_some() {
            // Of others, what was in force may have ended since.
            self.look_at_all();
        }
        self.most = zip(self.most, self.sum, u64::max);
        if let Some(kind) = self.over() {
            let (sum, most) = (self.sum[kind.index()], self.audit.rate(kind));
            let why = format!("{kind:?}: {sum} of {most} in force at {} ms", self.now / MS);
            self.violation.get_or_insert(why);
        }
    }

    fn over(&self) -> Option<LimitKind> {
        LimitKind::ALL.into_iter().find(|kind| self.sum[kind.index()] > self.audit.rate(*kind))
    }

    pub(super) fn look_at_all(&mut self) {
        self.in_force = (0..self.machines.len()).map(|host| self.in_force_on(host)).collect();
        let sum = |sum, one: &ByKind| zip(sum, *one, u64::saturating_add);
        self.sum = self.in_force.iter().fold([0; 6], sum);
    }

    /// What is in force on all hosts together; a host's lease that has just ended may count still.
    pub const fn in_force(&self) -> ByKind {
        self.sum
    }

    /// The most that was in force at any instant.
    pub const fn most_in_force(&self) -> ByKind {
        self.most
    }

    /// Where more was in force than the limit, or more has passed than that and a burst: the first
    /// time, if there was one.
    pub fn violation(&mut self) -> Option<&str> {
        self.look_at_all();
        (0..self.machines.len().min(1)).for_each(|host| self.look(host));
        self.violation.as_deref()
    }
}
