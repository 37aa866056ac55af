//! The leader's side: the quota of each host, and the quota that must be given up first.
//!
//! ```text
//!   limit ▕ fallback shares of all hosts │ A: in force or in transit │ B │ ... │ free ▏
//!                                          ▲ the larger of both,               │
//!                                          │ until acknowledged or expired     ▼
//!                                          └── lowered first ◄─ division ──► raised from free only
//! ```
//!
//! At most one grant for each host is unacknowledged. Burst capacity moves like the rates.
//!
//! Never raises one host before another has given up as much. Never assumes that its writes, or
//! those of earlier leaders, are still in the store or have reached a host.

use super::{
    ByKind, ClusterGroupLimits, HostReport, QuotaClaim, QuotaGrant, ReportedDemand, Term, Timing,
    divide_quota, zip_with,
};
use crate::throttle::LimitKind;
use crate::time::Instant;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

/// A host whose quota differs from its target by less than this fraction (1 / n) of itself, and
/// half that fraction of the limit, is not changed.
const CHANGE_THRESHOLD: u64 = 64;

/// As [`CHANGE_THRESHOLD`], for quota above the host's demand.
const SPARE_CHANGE_THRESHOLD: u64 = 2;

/// Request of the leader to the program that runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderAction {
    /// Write these grants, keyed by the host's name, in one transaction that compares the leader
    /// key of the store with this term. If the comparison fails, call [`QuotaLeader::depose`].
    Write(Vec<(String, QuotaGrant)>),
    /// Leadership is lost: drop the leader and stand for election again, with another nonce.
    StandDown,
}

#[derive(Clone, Copy, Debug)]
struct UnacknowledgedGrant {
    leased: ByKind,
    version: u64,
    until: Instant,
}

/// State of one host.
#[derive(Clone, Debug)]
struct HostState {
    last: HostReport,
    last_heard: Instant,
    /// True if the host has named this leader, so that its report of the lease in force is
    /// reliable.
    follows: bool,
    seq: u64,
    lease: ByKind,
    version: u64,
    /// Instant, by this leader's clock, from which no part of `lease` is in force.
    until: Instant,
    unacknowledged: Option<UnacknowledgedGrant>,
    answered_report: u64,
    released_capacity: ByKind,
    credit: ByKind,
    /// True if the host has left the group; it is forgotten once its lease has expired.
    has_left: bool,
    /// True if capacity given up with the next acknowledgement may have been granted to others
    /// already, and must not be counted again.
    is_release_void: bool,
}

impl HostState {
    const fn new(report: HostReport, now: Instant) -> Self {
        Self {
            version: report.version,
            last: report,
            last_heard: now,
            follows: false,
            seq: 0,
            lease: [0; 6],
            until: now,
            unacknowledged: None,
            answered_report: 0,
            released_capacity: [0; 6],
            credit: [0; 6],
            has_left: false,
            is_release_void: false,
        }
    }

    /// The largest rates that may be in force on the host.
    fn max_in_force(&self) -> ByKind {
        zip_with(self.lease, self.unacknowledged.map_or([0; 6], |sent| sent.leased), u64::max)
    }

    fn expire(&mut self, now: Instant) {
        // An expired lease frees the quota without an acknowledgement, so capacity that a later one
        // reports as given up is void.
        if self.until <= now {
            self.is_release_void |= self.lease != [0; 6];
            self.lease = [0; 6];
        }
        if self.unacknowledged.is_some_and(|sent| sent.until <= now) {
            self.unacknowledged = None;
            self.is_release_void = true;
        }
    }

    /// True if a lease in force or in transit is a part of limits of another version.
    fn has_other_version(&self, version: u64) -> bool {
        (self.lease != [0; 6] && self.version != version)
            || self.unacknowledged.is_some_and(|sent| sent.version != version)
    }
}

/// An elected leader of a group.
///
/// # Protocol
///
/// 1. Create it once the election is won. Call [`QuotaLeader::on_key_renewed`] whenever the lease
///    of the key was renewed, with the instant at which the renewal was *sent*.
/// 2. Call [`QuotaLeader::on_spec`] and [`QuotaLeader::on_report`] with the contents of the store,
///    in any order and as often as they are read.
/// 3. Call [`QuotaLeader::tick`] at [`QuotaLeader::next`], and execute each returned action once.
///    An action may fail.
///
/// Instants are of a clock that includes time in which the process or the machine is suspended.
#[derive(Debug)]
pub struct QuotaLeader {
    term: Term,
    spec: ClusterGroupLimits,
    timing: Timing,
    valid_until: Instant,
    is_deposed: bool,
    /// Leases of earlier leaders may be in force until this instant.
    unknown_until: Instant,
    /// Sum of the leases that hosts held when they first named this leader.
    quota_found: ByKind,
    /// Hosts that are included in `quota_found`.
    counted_hosts: BTreeSet<String>,
    members: BTreeMap<String, HostState>,
    /// Burst capacity that hosts have given up and no host has got yet; at most as much as the free
    /// quota can hold.
    released_capacity: ByKind,
    next: Instant,
    ticked: Instant,
}

impl QuotaLeader {
    /// Creates the leader of an election that was requested at `requested_at` and won at `won_at`
    /// or earlier. No other leader of this group has granted anything since `won_at`.
    pub fn new(
        term: Term,
        spec: ClusterGroupLimits,
        timing: Timing,
        requested_at: Instant,
        won_at: Instant,
    ) -> Self {
        let mut leader = Self {
            term,
            spec,
            timing,
            valid_until: requested_at,
            is_deposed: false,
            unknown_until: won_at + timing.lease + timing.clock_margin(),
            quota_found: [0; 6],
            counted_hosts: BTreeSet::new(),
            members: BTreeMap::new(),
            released_capacity: [0; 6],
            next: won_at,
            ticked: Instant::ZERO,
        };
        leader.on_key_renewed(requested_at);
        leader
    }

    /// Records that the lease of the leader's key was renewed by a request sent at `requested_at`.
    pub fn on_key_renewed(&mut self, requested_at: Instant) {
        let until = requested_at + self.timing.term_lease().saturating_sub(self.timing.clock_margin());
        self.valid_until = self.valid_until.max(until);
    }

    /// Records that the leader's key was deleted or has another owner.
    pub const fn depose(&mut self) {
        self.is_deposed = true;
    }

    /// The election that this leader won.
    pub const fn term(&self) -> Term {
        self.term
    }

    /// Time of the next call of [`QuotaLeader::tick`].
    pub const fn next(&self) -> Instant {
        self.next
    }

    /// True if more hosts take part than the limits allow for: the fallback shares exceed their
    /// sum.
    pub fn has_too_many_hosts(&self) -> bool {
        self.members.len() > self.spec.hosts() as usize
    }

    /// Number of hosts that take part.
    pub fn host_count(&self) -> u32 {
        u32::try_from(self.members.len()).unwrap_or(u32::MAX)
    }

    /// Changes the limits of the group. Quota under the old limits is lowered before any host is
    /// raised. An unreachable host keeps the fallback share that it knows.
    pub fn on_spec(&mut self, spec: ClusterGroupLimits, now: Instant) {
        if spec != self.spec {
            self.spec = spec;
            // The unit of burst capacity differs between limits, so old capacity cannot be kept.
            self.released_capacity = [0; 6];
            self.schedule_tick(now);
        }
    }

    /// Processes a host's report. Ignores one that was read before or is of an earlier run, and one
    /// of a later run while the current run may hold a lease.
    pub fn on_report(&mut self, name: &str, report: HostReport, now: Instant) {
        let report = report.clamped();
        let latest_end = now + self.timing.lease + self.timing.clock_margin();
        if !self.members.contains_key(name) {
            self.members.insert(String::from(name), HostState::new(report.clone(), now));
        }
        let Some(member) = self.members.get_mut(name) else { return };
        member.expire(now);
        if report.instance != member.last.instance {
            // Two runs must not hold leases at once: their sum could exceed the accounted quota.
            let has_ended = member.max_in_force() == [0; 6] && report.instance > member.last.instance;
            if !has_ended {
                return;
            }
            *member = HostState::new(report.clone(), now);
        } else if member.follows && report.report_number <= member.last.report_number {
            return;
        }
        if report.report_number > member.last.report_number {
            (member.last_heard, member.has_left) = (now, false);
        }
        // A report that only extends the lease waits for the next tick.
        let renewal = HostReport { report_number: report.report_number, ..member.last.clone() };
        let waiting_ns = report.demand.waiting_ns;
        // A longer wait alone is not a change: it differs in every report of a throttled host.
        let is_change = HostReport { demand: ReportedDemand { waiting_ns, ..renewal.demand }, ..renewal }
            != report
            || !member.follows
            || member.unacknowledged.is_some();
        if report.followed_term == Some(self.term) {
            if !member.follows {
                member.follows = true;
                (member.lease, member.until, member.version) = (report.leased, latest_end, report.version);
                (member.released_capacity, member.seq) = (report.released_capacity, report.seq);
                // Counted once for each name: a later run can hold only what this leader granted.
                if self.counted_hosts.insert(String::from(name)) {
                    self.quota_found = zip_with(self.quota_found, report.leased, u64::saturating_add);
                }
            // An acknowledgement of the grant in transit: it replaces `lease` only now, because
            // until then either of the two may have been in force.
            } else if let Some(sent) = member.unacknowledged.filter(|_| report.seq == member.seq) {
                (member.lease, member.until, member.version) = (sent.leased, sent.until, sent.version);
                member.unacknowledged = None;
                if !member.is_release_void {
                    let released =
                        zip_with(report.released_capacity, member.released_capacity, u64::saturating_sub);
                    self.released_capacity = zip_with(self.released_capacity, released, u64::saturating_add);
                }
                member.is_release_void = false;
                member.released_capacity = report.released_capacity;
            }
        }
        member.last = report;
        if is_change {
            self.schedule_tick(now);
        }
    }

    /// Records that a host's report was deleted: the host has shut down, or an administrator has
    /// removed it. Its lease counts until it expires.
    pub fn on_host_removed(&mut self, name: &str) {
        if let Some(member) = self.members.get_mut(name) {
            member.has_left = true;
        }
    }

    /// True if a lease of this host may be in force, granted by this leader or an earlier one. If
    /// false, the host's last grant is no longer valid and may be deleted once the host's report
    /// has been deleted.
    pub fn may_have_lease(&self, name: &str, now: Instant) -> bool {
        let may_hold = |member: &HostState| {
            (member.lease != [0; 6] && now < member.until)
                || member.unacknowledged.is_some_and(|sent| sent.leased != [0; 6] && now < sent.until)
        };
        now < self.unknown_until || self.members.get(name).is_some_and(may_hold)
    }

    /// Schedules a tick before the regular one, but not for each report alone.
    fn schedule_tick(&mut self, now: Instant) {
        self.next = self.next.min((self.ticked + self.timing.tick / 8).max(now));
    }

    /// The actions to execute now.
    pub fn tick(&mut self, now: Instant) -> Vec<LeaderAction> {
        if self.is_deposed || now >= self.valid_until {
            self.is_deposed = true;
            self.next = Instant::MAX;
            return Vec::from([LeaderAction::StandDown]);
        }
        // Expire leases first: the free quota and the targets depend on them.
        (self.ticked, self.next) = (now, now + self.timing.tick);
        self.members.values_mut().for_each(|member| member.expire(now));
        self.members.retain(|_, member| !member.has_left || member.max_in_force() != [0; 6]);
        let free = self.free_quota(now);
        self.released_capacity = zip_with(self.released_capacity, self.spec.scaled_capacity(free), u64::min);
        let targets = self.target_quotas(now);
        let changes = self.next_quotas(free, &targets);
        let grants = self.build_grants(free, changes);
        if grants.is_empty() { Vec::new() } else { Vec::from([LeaderAction::Write(grants)]) }
    }

    /// Sum of all fallback shares, including those of hosts that have not reported, and of hosts
    /// that use other limits.
    fn reserved_for_fallback(&self) -> ByKind {
        let fallback = self.spec.fallback_share();
        let hosts = u64::from(self.spec.hosts()).max(self.members.len() as u64);
        let on_other_version =
            self.members.values().filter(|member| member.last.version != self.spec.version());
        on_other_version.fold(fallback.map(|safe| safe.saturating_mul(hosts)), |sum, member| {
            zip_with(sum, zip_with(member.last.fallback, fallback, u64::saturating_sub), u64::saturating_add)
        })
    }

    /// Rates that may be leased in total.
    fn leasable(&self) -> ByKind {
        zip_with(self.spec.rates(), self.reserved_for_fallback(), u64::saturating_sub)
    }

    /// Quota that is not leased, excluding quota that an earlier leader may have granted.
    fn free_quota(&self, now: Instant) -> ByKind {
        // While leases of earlier leaders may be in force, only quota that hosts have reported to
        // this leader is known to be exclusively its own.
        let known = if now < self.unknown_until { self.quota_found } else { [u64::MAX; 6] };
        let distributable = zip_with(self.leasable(), known, u64::min);
        self.members
            .values()
            .fold(distributable, |free, member| zip_with(free, member.max_in_force(), u64::saturating_sub))
    }

    /// Target quota of each reachable host, besides its fallback share.
    fn target_quotas(&self, now: Instant) -> BTreeMap<String, ByKind> {
        let fallback = self.spec.fallback_share();
        let is_reachable = |member: &&HostState| {
            member.follows && !member.has_left && now < member.last_heard + self.timing.lease
        };
        let names =
            self.members.iter().filter(|(_, member)| is_reachable(member)).map(|(name, _)| name.clone());
        let claim = |member: &HostState| QuotaClaim {
            floor: fallback,
            weight: member.last.demand.weight,
            reserved: member.last.demand.reserved,
            demand: member.last.demand.demand,
            waiting_ns: member.last.demand.waiting_ns,
        };
        let claims: Vec<QuotaClaim> = self.members.values().filter(is_reachable).map(claim).collect();
        // The claims' floors are fallback shares, which are not part of the leasable rates.
        let count = claims.len() as u64;
        let available =
            zip_with(self.leasable(), fallback.map(|safe| safe.saturating_mul(count)), u64::saturating_add);
        let parts = divide_quota(available, &claims).into_iter();
        names.zip(parts.map(|part| zip_with(part, fallback, u64::saturating_sub))).collect()
    }

    /// Next quota of each host whose quota changes.
    fn next_quotas(&self, free: ByKind, targets: &BTreeMap<String, ByKind>) -> BTreeMap<String, ByKind> {
        let (rates, version) = (self.spec.rates(), self.spec.version());
        // Parts of two versions of the limits may together exceed both, so none is raised.
        let mixed = self.members.values().any(|member| member.has_other_version(version));
        let (exceeded, fallback) = (self.exceeded_limits(), self.spec.fallback_share());
        let candidates = || {
            targets.iter().filter_map(|(name, target)| {
                let member = self.members.get(name)?;
                // A larger fallback share is backed by quota that other hosts must give up first.
                let must_wait = exceeded.contains(&true)
                    && (0..6).any(|at| member.lease[at] + member.last.fallback[at] < fallback[at]);
                (member.unacknowledged.is_none() && !must_wait).then_some((name, member, target))
            })
        };
        let is_worth_changing = |at: usize, current: u64, proposed: u64| {
            current.abs_diff(proposed)
                > (rates[at] / (2 * CHANGE_THRESHOLD)).min(current.max(proposed) / CHANGE_THRESHOLD)
        };
        let mut total_raises = [0_u128; 6];
        for (_, member, target) in candidates() {
            for (at, sum) in total_raises.iter_mut().enumerate() {
                let (leased, target) = (member.lease[at], target[at]);
                if target > leased && is_worth_changing(at, leased, target) {
                    *sum += u128::from(target - leased);
                }
            }
        }
        let next = |member: &HostState, target: &ByKind| -> ByKind {
            core::array::from_fn(|at| {
                // The fallback share that comes with the new limits replaces a part of the lease,
                // so that the sum of both does not rise.
                let fallback_growth = fallback[at].saturating_sub(member.last.fallback[at]);
                let fallback_growth = if member.last.version == version { 0 } else { fallback_growth };
                let (leased, target) = (member.lease[at].saturating_sub(fallback_growth), target[at]);
                // Quota above the demand is moved only if the gain is large.
                let demand = member.last.demand.demand[at].saturating_sub(fallback[at]);
                let is_spare = leased >= demand && target > leased && member.last.demand.waiting_ns == 0;
                let is_worth_changing = |at, leased: u64, target: u64| {
                    is_worth_changing(at, leased, target)
                        && (!is_spare
                            || leased.abs_diff(target) > leased.max(target) / SPARE_CHANGE_THRESHOLD)
                };
                if target < leased {
                    // A small surplus of many hosts adds up for one that lacks quota, so it is
                    // taken if the raises exceed the free quota.
                    let is_negligible = !is_worth_changing(at, leased, target)
                        && (total_raises[at] <= u128::from(free[at])
                            || leased - target <= leased / (8 * CHANGE_THRESHOLD));
                    return if exceeded[at] || !is_negligible { target } else { leased };
                }
                if mixed || !is_worth_changing(at, leased, target) {
                    return leased;
                }
                let increase = u128::from(target - leased);
                // If the raises exceed the free quota, each is scaled by the same factor.
                let share = increase * u128::from(free[at]) / total_raises[at].max(1);
                leased + increase.min(share) as u64
            })
        };
        candidates()
            .map(|(name, member, target)| (name.clone(), next(member, target)))
            .filter(|(name, next)| {
                let member = &self.members[name];
                *next != member.lease || member.last.version != version || member.seq == 0
            })
            .collect()
    }

    /// For each limit, true if more is leased than may be, because the limits were lowered.
    fn exceeded_limits(&self) -> [bool; 6] {
        let leasable = self.leasable();
        let bounds = self.members.values().map(HostState::max_in_force);
        let leased = bounds.fold([0; 6], |sum, bound| zip_with(sum, bound, u64::saturating_add));
        LimitKind::ALL.map(|kind| leased[kind.index()] > leasable[kind.index()])
    }

    /// The grants to write: changes, and answers to unanswered reports.
    fn build_grants(&mut self, free: ByKind, changes: BTreeMap<String, ByKind>) -> Vec<(String, QuotaGrant)> {
        let (spec, term, lease_with_margin) =
            (self.spec, self.term, self.timing.lease + self.timing.clock_margin());
        let released = self.released_capacity;
        let mut grants = Vec::new();
        for (name, member) in self.members.iter_mut().filter(|(_, member)| member.follows) {
            let until = member.last_heard + lease_with_margin;
            if let Some(leased) = changes.get(name) {
                let increase = zip_with(*leased, member.lease, u64::saturating_sub);
                // Burst capacity in proportion to the free quota that the host gets.
                let credit = core::array::from_fn(|at| {
                    let part =
                        u128::from(released[at]) * u128::from(increase[at]) / u128::from(free[at].max(1));
                    part as u64
                });
                self.released_capacity = zip_with(self.released_capacity, credit, u64::saturating_sub);
                member.credit = zip_with(member.credit, credit, u64::saturating_add);
                member.seq = member.seq.saturating_add(1);
                member.unacknowledged =
                    Some(UnacknowledgedGrant { leased: *leased, version: spec.version(), until });
            } else if member.last.report_number <= member.answered_report {
                continue;
            } else if let Some(sent) = &mut member.unacknowledged {
                // A grant under old limits is not extended: it must expire.
                if sent.version != spec.version() {
                    continue;
                }
                sent.until = until;
            } else if member.seq > 0 && member.lease != [0; 6] && member.version == spec.version() {
                member.until = until;
            } else {
                continue;
            }
            member.answered_report = member.last.report_number;
            // A repeated grant carries the same contents, so it does not matter which copy the host
            // reads.
            let leased = member.unacknowledged.map_or(member.lease, |sent| sent.leased);
            // A host may report a larger lease than the limit.
            let leased = zip_with(leased, spec.rates(), u64::min);
            let grant = QuotaGrant {
                term,
                instance: member.last.instance,
                report_number: member.last.report_number,
                seq: member.seq,
                spec,
                leased,
                credit: member.credit,
            };
            grants.push((name.clone(), grant));
        }
        grants
    }
}
