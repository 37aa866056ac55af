//! Checks the sum of the quotas in force on all hosts against the limit after each event.

use super::SimulatedCluster;
use crate::cluster::simulated::NANOS_PER_MS;
use crate::cluster::{ByKind, QuotaGrant, zip_with};
use crate::throttle::LimitKind;
use crate::time::Instant;
use alloc::format;

impl SimulatedCluster {
    pub(super) fn has_lease(&self, host: usize) -> bool {
        let (machine, place) = (&self.machines[host].host, &self.processes[host]);
        machine.is_leased() && place.to_local(self.now) < machine.lease_end().as_nanos()
    }

    /// True if the lease in force on a host came from this grant or would be extended by it. A
    /// lease of an earlier run is not, even if the store has lost later grants.
    pub(super) fn is_grant_in_use(&self, host: usize, grant: &QuotaGrant) -> bool {
        let (machine, place) = (&self.machines[host].host, &self.processes[host]);
        let is_valid = |until: Instant| place.to_local(self.now) < until.as_nanos();
        self.has_lease(host)
            && grant.instance == place.run
            && machine.lease_end_of(grant).is_some_and(is_valid)
    }

    /// Quota in force on a host. A host without a lease may know limits that the store has lost or
    /// that a leader has not read; it counts with the smaller fallback share.
    fn quota_on(&self, host: usize) -> ByKind {
        let machine = &self.machines[host].host;
        if self.has_lease(host) {
            return machine.rates();
        }
        let (fallback, stored) = (machine.spec().fallback_share(), self.store.spec());
        if machine.spec().version() == stored.version() {
            return fallback;
        }
        zip_with(fallback, stored.fallback_share(), u64::min)
    }

    pub(super) fn check_host(&mut self, host: usize) {
        let now = self.quota_on(host);
        let before = core::mem::replace(&mut self.in_force[host], now);
        self.sum = core::array::from_fn(|at| self.sum[at] - before[at] + now[at]);
        if self.exceeded_limit().is_some() {
            // Leases of other hosts may have expired since their last event.
            self.check_all();
        }
        self.max_in_force = zip_with(self.max_in_force, self.sum, u64::max);
        if let Some(kind) = self.exceeded_limit() {
            let (sum, limit) = (self.sum[kind.index()], self.audit.rate(kind));
            let violation_text =
                format!("{kind:?}: {sum} of {limit} in force at {} ms", self.now / NANOS_PER_MS);
            self.violation.get_or_insert(violation_text);
        }
    }

    fn exceeded_limit(&self) -> Option<LimitKind> {
        LimitKind::ALL.into_iter().find(|kind| self.sum[kind.index()] > self.audit.rate(*kind))
    }

    pub(super) fn check_all(&mut self) {
        self.in_force = (0..self.machines.len()).map(|host| self.quota_on(host)).collect();
        let sum = |sum, quota: &ByKind| zip_with(sum, *quota, u64::saturating_add);
        self.sum = self.in_force.iter().fold([0; 6], sum);
    }

    /// Sum of the quotas in force on all hosts. May include a lease that has just expired.
    pub const fn in_force(&self) -> ByKind {
        self.sum
    }

    /// Maximum of the sum so far.
    pub const fn max_in_force(&self) -> ByKind {
        self.max_in_force
    }

    /// The first violation: quotas in force above the limit, or admissions above limit plus burst.
    pub fn violation(&mut self) -> Option<&str> {
        self.check_all();
        (0..self.machines.len().min(1)).for_each(|host| self.check_host(host));
        self.violation.as_deref()
    }
}
