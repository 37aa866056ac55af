//! What a cluster lends to groups of control groups here, and what those say.
//!
//! ```text
//!   the daemon's cluster ── a part, until when, the safe share ──► Lending ──► watch ──► io.max
//!                        ◄── that it is in force, what passed ────
//! ```
//!
//! The watch looks at each turn, a tenth of a second apart at most, and takes a part back by its
//! own clock, [`WATCH_AHEAD`] of the end of its lease. The kernel knows no leases, so the guard
//! takes it back as well, [`GUARD_AHEAD`] of that end, if the watch has not: it knows the instant
//! before the kernel has the part. The safe share stands in the file of limits before a part is
//! said to be in force: the guard falls back to that.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use policy::{
    throttle::{Limits, Stats},
    time::{Duration, Instant},
};

/// How long before the end of a lease the watch takes back what is lent: a turn and more before the
/// guard, which then has nothing to do.
const WATCH_AHEAD: Duration = Duration::from_millis(750);
/// The same for the guard, which may have to wait for a processor, and for some thousand files.
const GUARD_AHEAD: Duration = Duration::from_millis(500);

/// Groups of control groups whose limits are a cluster's.
#[derive(Clone, Debug)]
pub struct Lending(Arc<Mutex<BTreeMap<String, Account>>>);

/// One of these groups.
#[derive(Clone, Debug)]
pub struct Lender {
    lending: Lending,
    group: String,
}

/// What a group's control groups have done since the watch knows them.
#[derive(Clone, Copy, Debug)]
pub struct Doing {
    /// Of all together.
    pub stats: Stats,
    /// Of those that did something in the last seconds.
    pub weight: u64,
}

#[derive(Clone, Debug, Default)]
struct Account {
    part: Limits,
    safe: Limits,
    /// When the lease ends, by [`now`](super::now).
    until: Instant,
    /// When the lease ends by which the kernel has more than the safe share.
    held_until: Option<Instant>,
    /// Counts changes, and which of them is in force.
    number: u64,
    in_force: u64,
    doing: Option<Doing>,
}

/// What is to hold now.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) group: String,
    pub(super) limits: Limits,
    number: u64,
    /// Of a part; `None` of the safe share.
    until: Option<Instant>,
}

impl Lending {
    /// For groups of these names, which have no limits before something is lent.
    pub fn new<'a>(groups: impl IntoIterator<Item = &'a str>) -> Self {
        let groups = groups.into_iter().map(|name| (name.to_owned(), Account::default()));
        Self(Arc::new(Mutex::new(groups.collect())))
    }

    /// One of them.
    pub fn lender(&self, group: &str) -> Lender {
        Lender { lending: self.clone(), group: group.to_owned() }
    }

    fn accounts(&self) -> MutexGuard<'_, BTreeMap<String, Account>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn safe_shares(&self) -> BTreeMap<String, Limits> {
        self.accounts().iter().map(|(name, account)| (name.clone(), account.safe)).collect()
    }

    pub(super) fn due(&self, now: Instant) -> Vec<Due> {
        let due = |(name, account): (&String, &Account)| {
            let holds = now < account.taken_back_at();
            Due {
                group: name.clone(),
                limits: if holds { account.part } else { account.safe },
                number: account.number,
                until: Some(account.until).filter(|until| holds && *until < Instant::MAX),
            }
        };
        self.accounts().iter().map(due).collect()
    }

    /// The safe shares alone.
    pub(super) fn safe(due: Vec<Due>, safe: &BTreeMap<String, Limits>) -> Vec<Due> {
        let safe =
            |due: Due| Due { limits: safe.get(&due.group).copied().unwrap_or_default(), until: None, ..due };
        due.into_iter().map(safe).collect()
    }

    /// When a part is taken back.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        self.accounts().values().map(Account::taken_back_at).filter(|at| *at > now).min()
    }

    /// When the guard is to have taken back what the kernel has, also what it is told now.
    pub(super) fn guarded_until(&self, due: &[Due]) -> Option<Instant> {
        let accounts = self.accounts();
        let until = |due: &Due| {
            let account = accounts.get(&due.group)?;
            match due.until {
                // The same part goes on.
                Some(until) if account.in_force == due.number => Some(until),
                // Until the kernel has taken this one, it has the one before.
                until => until.into_iter().chain(account.held_until).min(),
            }
        };
        let first = due.iter().filter_map(until).min()?;
        Some(Instant::from_nanos(first.as_nanos().saturating_sub(GUARD_AHEAD.as_nanos() as u64)))
    }

    pub(super) fn told(&self, due: &Due, is_in_force: bool, doing: Option<Doing>) {
        if let Some(account) = self.accounts().get_mut(&due.group) {
            if is_in_force {
                (account.in_force, account.held_until) = (due.number, due.until);
            }
            account.doing = doing.or(account.doing);
        }
    }
}

impl Account {
    fn taken_back_at(&self) -> Instant {
        match self.until {
            Instant::MAX => Instant::MAX,
            until => Instant::from_nanos(until.as_nanos().saturating_sub(WATCH_AHEAD.as_nanos() as u64)),
        }
    }
}

impl Lender {
    /// Which group.
    pub fn name(&self) -> &str {
        &self.group
    }

    /// Lends a part until then by [`now`](super::now), `None` for ever; before that the safe share
    /// holds again. Neither has bursts: those of control groups are not divided.
    pub fn lend(&self, part: &Limits, safe: &Limits, until: Option<Instant>) {
        let until = until.unwrap_or(Instant::MAX);
        let (part, safe) = (without_bursts(part), without_bursts(safe));
        if let Some(account) = self.lending.accounts().get_mut(&self.group) {
            if (account.part, account.safe) != (part, safe) {
                account.number += 1;
            }
            (account.part, account.safe, account.until) = (part, safe, until);
        }
    }

    /// The same part with another end, or another safe share.
    pub fn prolong(&self, safe: &Limits, until: Option<Instant>) {
        let part = self.lending.accounts().get(&self.group).map(|account| account.part);
        if let Some(part) = part {
            self.lend(&part, safe, until);
        }
    }

    /// Whether the kernel has what was lent last.
    pub fn is_in_force(&self) -> bool {
        self.lending.accounts().get(&self.group).is_some_and(|account| account.in_force == account.number)
    }

    /// What they did; `None` while nobody knows.
    pub fn doing(&self) -> Option<Doing> {
        self.lending.accounts().get(&self.group)?.doing
    }
}

fn without_bursts(limits: &Limits) -> Limits {
    let mut plain = *limits;
    for kind in policy::throttle::LimitKind::ALL {
        let limit = plain.limit_mut(kind);
        (limit.burst_rate, limit.burst_length_s) = (0, 1);
    }
    plain
}
