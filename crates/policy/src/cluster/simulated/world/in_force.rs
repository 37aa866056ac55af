//! Checks the sum of the quotas in force on all hosts against the limit after each event.

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

    /// True if the lease in force on a host came from this grant or would be extended by it. A
    /// lease of an earlier run is not, even if the store has lost later grants.
    pub(super) fn is_worth_something(&self, host: usize, grant: &Grant) -> bool {
        let (machine, place) = (&self.machines[host].host, &self.places[host]);
        let lasts = |until: Instant| place.local(self.now) < until.as_nanos();
        self.has_lease(host) && grant.instance == place.run && machine.lease_of(grant).is_some_and(lasts)
    }

    /// Quota in force on a host. A host without a lease may know limits that the store has lost or
    /// that a leader has not read; it counts with the smaller fallback share.
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
            // Leases of other hosts may have expired since their last event.
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

    /// Sum of the quotas in force on all hosts. May include a lease that has just expired.
    pub const fn in_force(&self) -> ByKind {
        self.sum
    }

    /// Maximum of the sum so far.
    pub const fn most_in_force(&self) -> ByKind {
        self.most
    }

    /// The first violation: quotas in force above the limit, or admissions above limit plus burst.
    pub fn violation(&mut self) -> Option<&str> {
        self.look_at_all();
        (0..self.machines.len().min(1)).for_each(|host| self.look(host));
        self.violation.as_deref()
    }
}
