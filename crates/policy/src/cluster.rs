//! One group's limits over many hosts: who may use how much of them, and for how long.
//!
//! ```text
//!                demand, what it holds               a part, as a lease
//!     [Host] ──────────────────────────► [Leader] ─────────────────────────► [Host]
//!       │                                   │  divide()                        │
//!       ▼ Tree::divide                      ▼ fenced by its term               ▼
//!     safe share + lease              the store (etcd) carries the words     safe share + lease
//! ```
//!
//! A host decides alone about each request, within its part. The leader moves parts. Rules that
//! keep the sum of what is in force at or below the limit:
//!
//! 1. Every host has its **safe share** ([`Spec::safe`]) by right and for ever; those of all hosts
//!    are set aside. Only the rest is leased.
//! 2. A lease answers one report of that host, and ends [`Timing::lease`] after the host *sent* it,
//!    by the host's clock. So a late, repeated or restored grant is worth no more than when it was
//!    written.
//! 3. Nobody is raised but out of what is free: what another host has acknowledged to have given
//!    up, or what its lease has run out of, by the leader's clock with a margin.
//! 4. A host obeys one leader, the one whose term it named in the report that is answered. A new
//!    leader counts on what hosts report in its own term, never on what the store remembers.
//! 5. Until one lease after its election a leader passes on only what hosts gave up to it: others
//!    may hold what it does not know of. So it learns nothing, and moves at once.
//! 6. A leader acts only while its own lease, by its own clock, has not run out, and writes in a
//!    transaction on its key.
//! 7. Room for a burst moves with the rates, and arises nowhere but by time
//!    ([`Tree::divide`](crate::throttle::Tree::divide)). A host begins with full buckets.
//!
//! What the store must do: one key for the leader with a lease of [`Timing::lease`]; a transaction
//! on that key; a key for each host's report, one for each grant. It may lose what it wrote last.
//!
//! Never does I/O, never reads a clock, never knows what the store is.

mod demand;
mod division;
mod host;
mod leader;
pub mod simulated;

pub use demand::{Demand, Usage};
pub use division::{Claim, divide};
pub use host::Host;
pub use leader::{Action, Leader};

use crate::throttle::{LimitKind, Limits, MAX_VALUE, Part, Setting};
use crate::time::Duration;
use alloc::format;
use alloc::string::String;
use core::fmt;

/// A number for each limit, by [`LimitKind::index`].
pub type ByKind = [u64; 6];

/// The most hosts that may take part in a group.
pub const MAX_HOSTS: u32 = 10_000;

/// What all safe shares together are by default, in millionths of the limit: shares then come
/// within 5 % of the ideal also where one host alone is busy.
const SAFE_OF_ALL: u64 = 20_000;

/// How long a host's name stays taken after it was taken or prolonged: three times as long as until
/// it is prolonged.
pub const NAME_LEASE: Duration = Duration::from_secs(60);

/// The limits of a group over all its hosts, and what each host has of them without a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    version: u64,
    limits: Limits,
    hosts: u32,
    safe_ppm: u32,
}

/// Why a group cannot be divided so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indivisible {
    /// No host, or more than [`MAX_HOSTS`].
    Hosts(u32),
    /// The rate of this limit is less than 1 unit a second for each host.
    TooLow(LimitKind, u64, u32),
    /// All hosts' safe shares, of so many millionths each, are more than there is.
    SafeShare(u32, u32),
}

impl Indivisible {
    /// What is wrong and what helps, for somebody who says by this name how many hosts there are.
    pub fn told(&self, name: &str) -> String {
        match self {
            Self::Hosts(hosts) => format!("hosts: {hosts} is not between 1 and {MAX_HOSTS}"),
            Self::TooLow(kind, rate, hosts) => format!(
                "{}: {rate} is too low: each of up to {hosts} hosts may use 1 a second without etcd (set \
                 at least {hosts}, or fewer {name})",
                Setting::Limit(*kind, Part::Rate).name()
            ),
            Self::SafeShare(ppm, hosts) => format!(
                "safe-share: {} % for each of up to {hosts} hosts is more than there is (set at most {} %, \
                 or fewer {name})",
                f64::from(*ppm) / 10_000.0,
                f64::from(1_000_000 / hosts) / 10_000.0
            ),
        }
    }
}

impl fmt::Display for Indivisible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told("hosts"))
    }
}

impl core::error::Error for Indivisible {}

impl Spec {
    /// Valid limits for up to `hosts` hosts. `safe_ppm` is the safe share of one host in millionths
    /// of the limits; by default all of them have 2 % together. `version` is another one for each
    /// other content.
    ///
    /// # Errors
    /// [`Indivisible`].
    pub fn new(version: u64, limits: Limits, hosts: u32, safe_ppm: Option<u32>) -> Result<Self, Indivisible> {
        if !(1..=MAX_HOSTS).contains(&hosts) {
            return Err(Indivisible::Hosts(hosts));
        }
        let safe_ppm = safe_ppm.unwrap_or((SAFE_OF_ALL / u64::from(hosts)) as u32);
        let spec = Self { version, limits, hosts, safe_ppm };
        for kind in LimitKind::ALL {
            let rate = limits.limit(kind).rate;
            if u128::from(spec.safe()[kind.index()]) * u128::from(hosts) > u128::from(rate) {
                let is_low = u64::from(safe_ppm) * u64::from(hosts) <= 1_000_000;
                return Err(match is_low {
                    true => Indivisible::TooLow(kind, rate, hosts),
                    false => Indivisible::SafeShare(safe_ppm, hosts),
                });
            }
        }
        Ok(spec)
    }

    /// Tells this content from any other.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Of all hosts together.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The most hosts that take part.
    pub const fn hosts(&self) -> u32 {
        self.hosts
    }

    /// What each host may use without a lease, in units per second: at least 1 of each limit that
    /// is set.
    pub fn safe(&self) -> ByKind {
        self.rates().map(|rate| match rate {
            0 => 0,
            _ => (u128::from(rate) * u128::from(self.safe_ppm) / 1_000_000).max(1) as u64,
        })
    }

    fn rates(&self) -> ByKind {
        LimitKind::ALL.map(|kind| self.limits.limit(kind).rate)
    }

    /// The limits of a host that has so much of each rate: bursts have the same part, and last as
    /// long.
    fn part(&self, rates: ByKind) -> Limits {
        let mut part = self.limits;
        for kind in LimitKind::ALL {
            let (whole, rate) = (self.limits.limit(kind), rates[kind.index()]);
            if whole.rate > 0 {
                let burst = u128::from(whole.burst_rate) * u128::from(rate) / u128::from(whole.rate);
                let limit = part.limit_mut(kind);
                // At least 1: 0 would be no limit. At least the rate, as the whole burst is.
                (limit.rate, limit.burst_rate) = (rate.max(1), burst as u64);
            }
        }
        part
    }

    /// The units that the buckets of so much of each rate hold.
    fn size(&self, rates: ByKind) -> ByKind {
        LimitKind::ALL.map(|kind| {
            let (whole, rate) = (self.limits.limit(kind), u128::from(rates[kind.index()]));
            let size = match (whole.rate, whole.burst_rate) {
                (0, _) => 0,
                (_, 0) => rate / 10,
                (all, burst) => rate * u128::from(burst) * u128::from(whole.burst_length_s) / u128::from(all),
            };
            size as u64
        })
    }
}

/// How often hosts and the leader look, and how long a lease lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Between two looks of a host at its demand, and of the leader at the division.
    pub tick: Duration,
    /// Of a part.
    pub lease: Duration,
}

/// Of the leader's key, where parts last longer: the least that etcd takes, so that another is soon
/// elected. It is one key, so that is few messages.
const TERM_LEASE: Duration = Duration::from_secs(2);

impl Timing {
    /// By `docs/decisions/0040-one-limit-over-hosts.md`.
    pub const DEFAULT: Self = Self { tick: Duration::from_millis(200), lease: Duration::from_secs(5) };

    /// Of the leader's key.
    pub fn term_lease(&self) -> Duration {
        self.lease.min(TERM_LEASE)
    }

    /// How often the leader's key is prolonged.
    pub fn keep(&self) -> Duration {
        self.term_lease() / 3
    }

    /// What clocks may differ by over a lease: 1 in 1000, where 400 ppm are asked for.
    fn margin(&self) -> Duration {
        self.lease / 1000
    }
}

/// One election. `nonce` is drawn for each, so that no two are equal, even where the store has lost
/// the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The revision of the leader's key, by which transactions are fenced.
    pub revision: u64,
    /// Drawn at random.
    pub nonce: u64,
}

/// What a host tells the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The run of the host's process: larger in a later one.
    pub instance: u64,
    /// Rises by one with each report of a run.
    pub number: u64,
    /// The leader whose grants, and nobody else's, it accepts in answer to this.
    pub follows: Option<Term>,
    /// The last grant of that leader that is in force or has been; 0 for none.
    pub seq: u64,
    /// What it uses besides its safe share, in units per second.
    pub leased: ByKind,
    /// The version of the limits that it has.
    pub version: u64,
    /// Its safe share.
    pub safe: ByKind,
    /// Room for bursts, in units, that grants of that leader have taken from it so far.
    pub given: ByKind,
    /// What it wants.
    pub wants: Usage,
}

impl Report {
    /// No rate above what any limit may be, so that sums of all hosts' do not overflow, whoever has
    /// written them. What a host wants may be all there is.
    fn bounded(mut self) -> Self {
        let most = |rate: u64| rate.min(MAX_VALUE);
        (self.leased, self.safe) = (self.leased.map(most), self.safe.map(most));
        self.wants.reserved = self.wants.reserved.map(most);
        self
    }
}

/// What the leader lets a host use, as an answer to a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// By whom.
    pub term: Term,
    /// To which run of the host.
    pub instance: u64,
    /// Which report it answers, from whose sending the lease counts.
    pub answers: u64,
    /// Rises with each other content.
    pub seq: u64,
    /// The limits that this is a part of.
    pub spec: Spec,
    /// Besides the safe share, in units per second.
    pub leased: ByKind,
    /// Room for bursts, in units, that comes with the grants of this leader so far.
    pub credit: ByKind,
}

fn zip(one: ByKind, other: ByKind, of: impl Fn(u64, u64) -> u64) -> ByKind {
    core::array::from_fn(|at| of(one[at], other[at]))
}
