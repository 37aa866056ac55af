//! What a cluster lends to groups of control groups here, and what those say.
//!
//! ```text
//!   the daemon's cluster ── a part, until when, the safe share ──► Lending ──► watch ──► io.max
//!                        ◄── that it is in force, what passed ────
//! ```
//!
//! The watch looks at each turn, a tenth of a second apart at most, and takes a part back by its
//! own clock. The safe share stands in the file of limits before a part is said to be in force:
//! the guard falls back to that.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use policy::{
    throttle::{Limits, Stats},
    time::{Duration, Instant},
};

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
    /// By the watch's clock.
    until: Instant,
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
            let limits = if now < account.until { account.part } else { account.safe };
            Due { group: name.clone(), limits, number: account.number }
        };
        self.accounts().iter().map(due).collect()
    }

    /// When a part ends.
    pub(super) fn next(&self, now: Instant) -> Option<Instant> {
        self.accounts().values().map(|account| account.until).filter(|until| *until > now).min()
    }

    pub(super) fn told(&self, due: &Due, is_in_force: bool, doing: Option<Doing>) {
        if let Some(account) = self.accounts().get_mut(&due.group) {
            if is_in_force {
                account.in_force = due.number;
            }
            account.doing = doing.or(account.doing);
        }
    }
}

impl Lender {
    /// Which group.
    pub fn name(&self) -> &str {
        &self.group
    }

    /// Lends a part for so long, `None` for ever; then the safe share holds. Neither has bursts:
    /// those of control groups are not divided.
    pub fn lend(&self, part: &Limits, safe: &Limits, lasts: Option<Duration>) {
        let until = lasts.map_or(Instant::MAX, |lasts| super::now() + lasts);
        let (part, safe) = (without_bursts(part), without_bursts(safe));
        if let Some(account) = self.lending.accounts().get_mut(&self.group) {
            if (account.part, account.safe) != (part, safe) {
                account.number += 1;
            }
            (account.part, account.safe, account.until) = (part, safe, until);
        }
    }

    /// The same part with another end, or another safe share.
    pub fn prolong(&self, safe: &Limits, lasts: Option<Duration>) {
        let part = self.lending.accounts().get(&self.group).map(|account| account.part);
        if let Some(part) = part {
            self.lend(&part, safe, lasts);
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
