//! One group's limits over many hosts: quota leases, granted by an elected leader.
//!
//! ```text
//!                demand, lease in force            grant of a quota lease
//!      host ───────────────────────────►  leader  ─────────────────────────►  host
//!       │                                   │  divides the limit               │
//!       ▼ set_quota of the tree             ▼ fenced by its term               ▼
//!     fallback share + lease          the store (etcd) holds the messages    fallback share + lease
//! ```
//!
//! A host admits each request alone, within its quota. The leader moves quota between hosts. These
//! rules keep the sum of the quotas in force at or below the limit:
//!
//! 1. Every host may always use its **fallback share** ([`ClusterGroupLimits::fallback_share`]).
//!    The fallback shares of all hosts are reserved; only the remainder is leased.
//! 2. A lease answers one report of its host and ends [`Timing::lease`] after the host *sent* that
//!    report, by the host's clock. A late, repeated or restored grant is therefore never valid
//!    longer than the original.
//! 3. A host's quota is raised only from free quota: quota that another host has acknowledged to
//!    have given up, or whose lease has expired by the leader's clock plus a margin.
//! 4. A host obeys one leader, the one whose term it named in the report that is answered. A new
//!    leader relies on what hosts report in its own term, never on old contents of the store.
//! 5. For one lease after its election, a leader grants only quota that hosts report to it: hosts
//!    that have not reported yet may hold the rest. A leader therefore needs no hand-over from its
//!    predecessor and can act at once.
//! 6. A leader acts only until its own lease expires by its own clock, and writes in a transaction
//!    on its key.
//! 7. Burst capacity moves with the rates and accrues only with time
//!    ([`ThrottleTree::set_quota`](crate::throttle::ThrottleTree::set_quota)). A host begins with
//!    full buckets.
//!
//! While no host reaches the store, one host leads by agreement of all others (`agreement`), and
//! reports and grants travel between the hosts directly.
//!
//! Required of the store: a key for the leader with a lease of [`Timing::term_lease`], transactions
//! on that key, a key for each host's report and one for each grant. It may lose its last writes.
//!
//! Never does I/O, never reads a clock, never depends on which store is used.

mod agreement;
mod demand;
mod division;
mod host;
mod leader;
pub mod simulated;

pub use agreement::{
    AgreementAnswer, AgreementMessage, AgreementRefusal, AgreementRequest, MAX_AGREEING_HOSTS, PeerAgreement,
    PeerSet,
};
pub use demand::{DemandEstimator, ReportedDemand};
pub use division::{QuotaClaim, divide_quota};
pub use host::HostQuota;
pub use leader::{LeaderAction, QuotaLeader};

use crate::throttle::{LimitKind, LimitPart, LimitSetting, Limits, MAX_VALUE};
use crate::time::Duration;
use alloc::format;
use alloc::string::String;
use core::fmt;

/// One value for each limit, indexed by [`LimitKind::index`].
pub type ByKind = [u64; 6];

/// Maximum number of hosts in a group.
pub const MAX_HOSTS: u32 = 10_000;

/// Default sum of all fallback shares, in millionths of the limit: what an operator would reserve
/// for hosts that are cut off. Other hosts cannot use it.
const DEFAULT_FALLBACK_SUM_PPM: u64 = 200_000;

/// Time that a host's name stays reserved after its last renewal; three renewal intervals.
pub const NAME_LEASE: Duration = Duration::from_secs(60);

/// The limits of a group over all its hosts, and the fallback share of each host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterGroupLimits {
    version: u64,
    limits: Limits,
    hosts: u32,
    fallback_ppm: u32,
}

/// Reason why limits cannot be divided among hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DivisionError {
    /// No hosts, or more than [`MAX_HOSTS`].
    Hosts(u32),
    /// The rate of this limit is below 1 unit per second and host: limit, rate, number of hosts.
    TooLow(LimitKind, u64, u32),
    /// The fallback shares exceed the limit: millionths for each host, number of hosts.
    FallbackShare(u32, u32),
}

impl DivisionError {
    /// Message with a remedy; `name` is the key or option that sets the number of hosts.
    pub fn message(&self, name: &str) -> String {
        match self {
            Self::Hosts(hosts) => format!("hosts: {hosts} is not between 1 and {MAX_HOSTS}"),
            Self::TooLow(kind, rate, hosts) => format!(
                "{}: {rate} is too low: each of up to {hosts} hosts may use 1 unit per second \
                 without etcd (set at least {hosts}, or fewer {name})",
                LimitSetting::Limit(*kind, LimitPart::Rate).name()
            ),
            Self::FallbackShare(ppm, hosts) => format!(
                "fallback-share: {} % for each of up to {hosts} hosts exceeds 100 % in total (set \
                 at most {} %, or fewer {name})",
                f64::from(*ppm) / 10_000.0,
                f64::from(1_000_000 / hosts) / 10_000.0
            ),
        }
    }
}

impl fmt::Display for DivisionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message("hosts"))
    }
}

impl core::error::Error for DivisionError {}

impl ClusterGroupLimits {
    /// Limits for up to `hosts` hosts. `safe_ppm` is the fallback share of one host in millionths
    /// of the limits; by default all hosts together have 20 %. Specs with different contents must
    /// have different `version`s.
    ///
    /// # Errors
    /// [`DivisionError`] if a fallback share is below 1 unit per second or all exceed the limit.
    pub fn new(
        version: u64,
        limits: Limits,
        hosts: u32,
        safe_ppm: Option<u32>,
    ) -> Result<Self, DivisionError> {
        if !(1..=MAX_HOSTS).contains(&hosts) {
            return Err(DivisionError::Hosts(hosts));
        }
        let safe_ppm = safe_ppm.unwrap_or(Self::default_fallback_ppm(hosts));
        let spec = Self { version, limits, hosts, fallback_ppm: safe_ppm };
        for kind in LimitKind::ALL {
            let rate = limits.limit(kind).rate;
            if u128::from(spec.fallback_share()[kind.index()]) * u128::from(hosts) > u128::from(rate) {
                // `fallback_share()` rounds up to 1 unit, so the sum may be too large although that
                // of the ppm is not.
                let is_low = u64::from(safe_ppm) * u64::from(hosts) <= 1_000_000;
                return Err(match is_low {
                    true => DivisionError::TooLow(kind, rate, hosts),
                    false => DivisionError::FallbackShare(safe_ppm, hosts),
                });
            }
        }
        Ok(spec)
    }

    /// Default fallback share of one host, in millionths of the limits.
    pub const fn default_fallback_ppm(hosts: u32) -> u32 {
        // Below a million.
        (DEFAULT_FALLBACK_SUM_PPM / if hosts == 0 { 1 } else { hosts as u64 }) as u32
    }

    /// Identifies the contents: equal for equal specs only.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Limits of all hosts together.
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Maximum number of hosts.
    pub const fn hosts(&self) -> u32 {
        self.hosts
    }

    /// Fallback share: the rates that each host may use without a lease, in units per second. At
    /// least 1 for each limit that is set.
    pub fn fallback_share(&self) -> ByKind {
        self.rates().map(|rate| match rate {
            0 => 0,
            _ => (u128::from(rate) * u128::from(self.fallback_ppm) / 1_000_000).max(1) as u64,
        })
    }

    fn rates(&self) -> ByKind {
        LimitKind::ALL.map(|kind| self.limits.limit(kind).rate)
    }

    /// Limits of a host with these rates. Burst rates are scaled like the rates; burst lengths
    /// stay.
    fn scaled_limits(&self, rates: ByKind) -> Limits {
        let mut scaled = self.limits;
        for kind in LimitKind::ALL {
            let (cluster_limit, rate) = (self.limits.limit(kind), rates[kind.index()]);
            if cluster_limit.rate > 0 {
                let burst =
                    u128::from(cluster_limit.burst_rate) * u128::from(rate) / u128::from(cluster_limit.rate);
                let limit = scaled.limit_mut(kind);
                // At least 1, because 0 means no limit.
                (limit.rate, limit.burst_rate) = (rate.max(1), burst as u64);
            }
        }
        scaled
    }

    /// Capacity of the buckets of a host with these rates, in units.
    fn scaled_capacity(&self, rates: ByKind) -> ByKind {
        LimitKind::ALL.map(|kind| {
            let (cluster_limit, rate) = (self.limits.limit(kind), u128::from(rates[kind.index()]));
            // At most 10¹⁵ units, of which a host's rate is a part.
            let capacity = cluster_limit.capacity_billionths() / 1_000_000_000;
            let size = (rate * capacity).checked_div(u128::from(cluster_limit.rate)).unwrap_or(0);
            size as u64
        })
    }
}

/// Tick of hosts and leader, and duration of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Interval at which a host measures its demand and the leader divides the limits.
    pub tick: Duration,
    /// Duration of a quota lease.
    pub lease: Duration,
}

/// Longest lease of the leader's key: the minimum of etcd, so that a failed leader is replaced
/// soon. There is one such key for a group, so that renewals cost few messages.
const TERM_LEASE: Duration = Duration::from_secs(2);

impl Timing {
    /// Values from `docs/decisions/0040-cluster-limits-are-leased.md`.
    pub const DEFAULT: Self = Self { tick: Duration::from_millis(200), lease: Duration::from_secs(5) };

    /// Duration of the lease on the leader's key.
    pub fn term_lease(&self) -> Duration {
        self.lease.min(TERM_LEASE)
    }

    /// Interval at which the leader's key is renewed.
    pub fn key_renewal_interval(&self) -> Duration {
        self.term_lease() / 3
    }

    /// Allowed difference of two clocks over a lease: 1 in 64, where the requirement on clocks is
    /// that their rates differ by at most 1 %.
    fn clock_margin(&self) -> Duration {
        self.lease / 64
    }
}

/// One election. A random `nonce` distinguishes elections even if the store has lost the first one
/// and reuses its revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// Revision of the leader's key, used to fence transactions.
    pub revision: u64,
    /// Random number.
    pub nonce: u64,
}

/// Report of a host to the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostReport {
    /// Identifies a run of the daemon on the host; larger in each later run.
    pub instance: u64,
    /// Number of the report, rising by one within a run.
    pub report_number: u64,
    /// The only leader whose grants the host accepts as answers to this report.
    pub followed_term: Option<Term>,
    /// The latest grant of that leader that is or was in force; 0 for none.
    pub seq: u64,
    /// Leased rates in force besides the fallback share, in units per second.
    pub leased: ByKind,
    /// Version of the limits that the host uses.
    pub version: u64,
    /// Fallback share that the host uses.
    pub fallback: ByKind,
    /// Burst capacity that the host has given up under grants of that leader so far, in units.
    pub released_capacity: ByKind,
    /// Measured demand.
    pub demand: ReportedDemand,
}

impl HostReport {
    /// Caps rates at the largest valid limit, so that sums over all hosts cannot overflow whatever
    /// the store contains. A demand may be `u64::MAX`.
    fn clamped(mut self) -> Self {
        let cap = |rate: u64| rate.min(MAX_VALUE);
        (self.leased, self.fallback) = (self.leased.map(cap), self.fallback.map(cap));
        self.demand.reserved = self.demand.reserved.map(cap);
        self
    }
}

/// Grant of a quota lease, the leader's answer to a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaGrant {
    /// Term of the leader that granted it.
    pub term: Term,
    /// Instance of the host that it is for.
    pub instance: u64,
    /// Number of the report that it answers. The lease begins when that report was sent.
    pub report_number: u64,
    /// Rises with each change of the contents.
    pub seq: u64,
    /// The limits that the quota is a part of.
    pub spec: ClusterGroupLimits,
    /// Leased rates besides the fallback share, in units per second.
    pub leased: ByKind,
    /// Burst capacity added by the grants of this leader so far, in units.
    pub credit: ByKind,
}

fn zip_with(one: ByKind, other: ByKind, combine: impl Fn(u64, u64) -> u64) -> ByKind {
    core::array::from_fn(|at| combine(one[at], other[at]))
}
