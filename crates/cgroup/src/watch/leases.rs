//! Quota that a cluster leases to groups of control groups, and their demand.
//!
//! ```text
//!   the daemon's cluster ── quota, lease end, fallback share ──► CgroupLeases ──► watch ──► io.max
//!                        ◄── in force, counters ────────────────
//! ```
//!
//! The watch checks at each turn, at most a tenth of a second apart, and revokes quota by its own
//! clock [`WATCH_AHEAD`] before the end of its lease. The kernel has no leases, so the guard
//! revokes it as well, [`GUARD_AHEAD`] before that end, if the watch has not: it receives the
//! deadline before the kernel receives the quota. The fallback share is in the limits file before
//! quota is acknowledged as in force, because the guard falls back to that file.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use policy::{
    throttle::{Limits, ThrottleStats},
    time::{Duration, Instant},
};

/// Time before the end of a lease at which the watch revokes the quota: more than a turn ahead of
/// the guard, which then has nothing to do.
const WATCH_AHEAD: Duration = Duration::from_millis(750);
/// Time before the end of a lease at which the guard revokes the quota; covers scheduling delays
/// and several thousand writes.
const GUARD_AHEAD: Duration = Duration::from_millis(500);

/// Groups of control groups whose limits belong to a cluster.
#[derive(Clone, Debug)]
pub struct CgroupLeases(Arc<Mutex<BTreeMap<String, GroupLease>>>);

/// Handle of one group.
#[derive(Clone, Debug)]
pub struct CgroupLessor {
    leases: CgroupLeases,
    group: String,
}

/// Demand of a group's control groups since the watch started.
#[derive(Clone, Copy, Debug)]
pub struct CgroupDemand {
    /// Counters of all control groups together.
    pub stats: ThrottleStats,
    /// Sum of the weights of those active in the last seconds.
    pub weight: u64,
}

#[derive(Clone, Debug, Default)]
struct GroupLease {
    quota: Limits,
    fallback: Limits,
    /// End of the lease, by [`now`](super::now).
    until: Instant,
    /// End of the lease of the quota that the kernel has, if it exceeds the fallback share.
    held_until: Option<Instant>,
    /// Number of changes, and the number of the change in force.
    number: u64,
    in_force: u64,
    demand: Option<CgroupDemand>,
}

/// Limits that must be in force now.
#[derive(Clone, Debug)]
pub(super) struct DueLimits {
    pub(super) group: String,
    pub(super) limits: Limits,
    number: u64,
    /// End of the lease; `None` for the fallback share.
    until: Option<Instant>,
}

impl CgroupLeases {
    /// Creates groups of these names, without limits until quota is leased.
    pub fn new<'a>(groups: impl IntoIterator<Item = &'a str>) -> Self {
        let groups = groups.into_iter().map(|name| (name.to_owned(), GroupLease::default()));
        Self(Arc::new(Mutex::new(groups.collect())))
    }

    /// Handle of the group with this name.
    pub fn lessor(&self, group: &str) -> CgroupLessor {
        CgroupLessor { leases: self.clone(), group: group.to_owned() }
    }

    fn accounts(&self) -> MutexGuard<'_, BTreeMap<String, GroupLease>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fallback_shares(&self) -> BTreeMap<String, Limits> {
        self.accounts().iter().map(|(name, account)| (name.clone(), account.fallback)).collect()
    }

    pub(super) fn due(&self, now: Instant) -> Vec<DueLimits> {
        let due = |(name, account): (&String, &GroupLease)| {
            // Decided here by time, independently of the cluster's messages, which may be late.
            let holds = now < account.revoked_at();
            DueLimits {
                group: name.clone(),
                limits: if holds { account.quota } else { account.fallback },
                number: account.number,
                until: Some(account.until).filter(|until| holds && *until < Instant::MAX),
            }
        };
        self.accounts().iter().map(due).collect()
    }

    /// Replaces all quota by the fallback shares.
    pub(super) fn to_fallback(due: Vec<DueLimits>, fallback: &BTreeMap<String, Limits>) -> Vec<DueLimits> {
        let with_fallback = |due: DueLimits| DueLimits {
            limits: fallback.get(&due.group).copied().unwrap_or_default(),
            until: None,
            ..due
        };
        due.into_iter().map(with_fallback).collect()
    }

    /// Next time at which a lease is revoked.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        self.accounts().values().map(GroupLease::revoked_at).filter(|at| *at > now).min()
    }

    /// Time by which the guard must have revoked the quota in the kernel, including the quota that
    /// is being written now.
    pub(super) fn guard_deadline(&self, due: &[DueLimits]) -> Option<Instant> {
        let accounts = self.accounts();
        let until = |due: &DueLimits| {
            let account = accounts.get(&due.group)?;
            match due.until {
                // A renewed lease of the same quota: only its deadline moves.
                Some(until) if account.in_force == due.number => Some(until),
                // Until the kernel has the new quota, the lease of the old one counts as well.
                until => until.into_iter().chain(account.held_until).min(),
            }
        };
        let first = due.iter().filter_map(until).min()?;
        Some(Instant::from_nanos(first.as_nanos().saturating_sub(GUARD_AHEAD.as_nanos() as u64)))
    }

    pub(super) fn acknowledge(&self, due: &DueLimits, is_in_force: bool, demand: Option<CgroupDemand>) {
        if let Some(account) = self.accounts().get_mut(&due.group) {
            if is_in_force {
                (account.in_force, account.held_until) = (due.number, due.until);
            }
            // The last known demand stays while the group has no pool.
            account.demand = demand.or(account.demand);
        }
    }
}

impl GroupLease {
    fn revoked_at(&self) -> Instant {
        match self.until {
            Instant::MAX => Instant::MAX,
            until => Instant::from_nanos(until.as_nanos().saturating_sub(WATCH_AHEAD.as_nanos() as u64)),
        }
    }
}

impl CgroupLessor {
    /// Name of the group.
    pub fn name(&self) -> &str {
        &self.group
    }

    /// Leases quota until the given time by [`now`](super::now), or without an end if `None`;
    /// afterwards the fallback share is in force. Bursts are dropped: the bursts of control groups
    /// are not divided among hosts.
    pub fn lease(&self, quota: &Limits, fallback: &Limits, until: Option<Instant>) {
        let until = until.unwrap_or(Instant::MAX);
        let (quota, fallback) = (without_bursts(quota), without_bursts(fallback));
        if let Some(account) = self.leases.accounts().get_mut(&self.group) {
            // A renewal keeps the number, so that the guard sees no change.
            if (account.quota, account.fallback) != (quota, fallback) {
                account.number += 1;
            }
            (account.quota, account.fallback, account.until) = (quota, fallback, until);
        }
    }

    /// Renews the lease of the same quota, with a new end or fallback share.
    pub fn renew(&self, fallback: &Limits, until: Option<Instant>) {
        let quota = self.leases.accounts().get(&self.group).map(|account| account.quota);
        if let Some(quota) = quota {
            self.lease(&quota, fallback, until);
        }
    }

    /// True if the kernel has the quota that was leased last.
    pub fn is_in_force(&self) -> bool {
        self.leases.accounts().get(&self.group).is_some_and(|account| account.in_force == account.number)
    }

    /// Demand of the group; `None` until it is known.
    pub fn demand(&self) -> Option<CgroupDemand> {
        self.leases.accounts().get(&self.group)?.demand
    }
}

fn without_bursts(limits: &Limits) -> Limits {
    let mut plain = *limits;
    for kind in policy::throttle::LimitKind::ALL {
        let limit = plain.limit_mut(kind);
        (limit.burst_rate, limit.burst_length_s, limit.burst_for_s) = (0, 1, 0);
    }
    plain
}
