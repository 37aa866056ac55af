//! The host's side: which part of the group's limits is in force on this host, and until when.
//!
//! Without a grant, a host uses no more than its fallback share. A lease ends at most
//! [`Timing::lease`] after the report that it answers was sent.

use super::{ByKind, ClusterGroupLimits, HostReport, QuotaGrant, ReportedDemand, Term, Timing, zip_with};
use crate::throttle::{LimitKind, Limits};
use crate::time::{Instant, NANOS_PER_SECOND};
use alloc::collections::VecDeque;

/// Number of reports whose send time is kept. Leases expire before that many reports are sent.
const MAX_SENT_REPORTS: usize = 64;
/// Number of earlier leaders whose state is kept.
const MAX_PAST_LEADERS: usize = 8;
/// A change of demand is reported if it exceeds all of these: this fraction (1 / n) of the demand;
/// the smaller of a quarter of that fraction of the limit and 1 / [`EQUAL_SHARE_THRESHOLD`] of an
/// equal share; two requests in a tick.
const REPORT_THRESHOLD: u64 = 64;
/// Fraction (1 / n) of an equal share below which a change is not reported.
const EQUAL_SHARE_THRESHOLD: u64 = 16;

/// A host that takes part in a group.
///
/// # Protocol
///
/// 1. A group's node is added without limits and at once given [`HostQuota::limits`] by
///    [`ThrottleTree::set_quota`](crate::throttle::ThrottleTree::set_quota) without credit, so it
///    begins with full buckets. The spec is the store's, or the last one known.
/// 2. Call [`HostQuota::expire_lease`] **before any call of the tree** at an instant not before
///    [`HostQuota::lease_end`], also after a pause. That is one comparison for each request.
/// 3. Call [`HostQuota::on_leader`] with the leader's key, then [`HostQuota::on_grant`], whenever
///    they are read.
/// 4. Call [`HostQuota::tick`] each [`Timing::tick`] and after a grant, and write the report that
///    it returns to the store. The write may fail.
///
/// `divide` is [`ThrottleTree::set_quota`](crate::throttle::ThrottleTree::set_quota) for the group:
/// its arguments are the limits, the credit and the instant from which they hold; it returns the
/// capacity given up. Instants are of a clock that includes time in which the process or the
/// machine is suspended.
#[derive(Debug)]
pub struct HostQuota {
    instance: u64,
    spec: ClusterGroupLimits,
    timing: Timing,
    followed_term: Option<Term>,
    /// The first report that names the followed leader.
    first_report_of_term: u64,
    number: u64,
    sent: VecDeque<(u64, Instant)>,
    seq: u64,
    /// Number of the latest report that a grant in force answered.
    last_answered_report: u64,
    leased: ByKind,
    until: Instant,
    released_capacity: ByKind,
    credit: ByKind,
    /// State of earlier leaders. One may return if the store answers late.
    past_leaders: VecDeque<(Term, u64, ByKind, ByKind)>,
    reported: Option<ReportedDemand>,
    is_urgent: bool,
    /// False until a leader has reserved the fallback share of this host.
    is_counted: bool,
}

impl HostQuota {
    /// A host at its fallback share. `instance` is larger than that of any earlier run of this
    /// host.
    pub const fn new(instance: u64, spec: ClusterGroupLimits, timing: Timing) -> Self {
        Self {
            instance,
            spec,
            timing,
            followed_term: None,
            first_report_of_term: 1,
            number: 0,
            sent: VecDeque::new(),
            seq: 0,
            last_answered_report: 0,
            leased: [0; 6],
            until: Instant::ZERO,
            released_capacity: [0; 6],
            credit: [0; 6],
            past_leaders: VecDeque::new(),
            reported: None,
            is_urgent: true,
            is_counted: true,
        }
    }

    /// As [`HostQuota::new`], for a host that is new to a group whose limits are divided among all
    /// its hosts already: until its first grant it has 1 unit per second, since the others use the
    /// rest.
    pub const fn new_uncounted(instance: u64, spec: ClusterGroupLimits, timing: Timing) -> Self {
        let mut host = Self::new(instance, spec, timing);
        host.is_counted = false;
        host
    }

    /// The rates without a lease, in units per second.
    fn fallback_rates(&self) -> ByKind {
        let share = self.spec.fallback_share();
        if self.is_counted { share } else { share.map(|rate| rate.min(1)) }
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.spec.scaled_limits(self.rates())
    }

    /// The rates in force, in units per second.
    pub fn rates(&self) -> ByKind {
        zip_with(self.fallback_rates(), self.leased, u64::saturating_add)
    }

    /// The limits that apply without a lease.
    pub fn fallback_limits(&self) -> Limits {
        self.spec.scaled_limits(self.fallback_rates())
    }

    /// The limits of the whole group as this host knows them. Store them for its next start.
    pub const fn spec(&self) -> ClusterGroupLimits {
        self.spec
    }

    /// True if [`HostQuota::tick`] should be called at once, with the last measured demand.
    pub const fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// True if the host has a lease; without one, only its fallback share is in force.
    pub fn is_leased(&self) -> bool {
        self.leased != [0; 6]
    }

    /// End of the lease; [`Instant::MAX`] without one.
    pub fn lease_end(&self) -> Instant {
        if self.is_leased() { self.until } else { Instant::MAX }
    }

    /// Falls back to the fallback share if the lease has expired, as of the instant of expiry.
    pub fn expire_lease(&mut self, now: Instant, divide: impl FnOnce(Limits, ByKind, Instant) -> ByKind) {
        if now >= self.lease_end() {
            self.leased = [0; 6];
            self.is_urgent = true;
            // Not counted in `released_capacity`: the leader has treated this capacity as void
            // since the expiry, and may have granted it to other hosts.
            let _lost = divide(self.limits(), [0; 6], self.until);
        }
    }

    /// Follows the leader that the leader's key names. Grants of other leaders are ignored from
    /// here on; the lease in force stays.
    pub fn on_leader(&mut self, leader: Term) {
        if self.followed_term == Some(leader) {
            return;
        }
        if let Some(before) = self.followed_term.replace(leader) {
            self.past_leaders.push_back((before, self.seq, self.released_capacity, self.credit));
            if self.past_leaders.len() > MAX_PAST_LEADERS {
                self.past_leaders.pop_front();
            }
        }
        // Answers to reports sent before this instant do not prove that this leader was known here.
        self.first_report_of_term = self.number + 1;
        // A leader that returns still accounts in its own totals, so they must continue, not
        // restart.
        let past = self.past_leaders.iter().rev().find(|(term, ..)| *term == leader);
        (self.seq, self.released_capacity, self.credit) =
            past.map_or((0, [0; 6], [0; 6]), |(_, seq, released, credit)| (*seq, *released, *credit));
        self.is_urgent = true;
    }

    /// End of the lease of a grant; `None` if this run has no record of the report it answers.
    pub fn lease_end_of(&self, grant: &QuotaGrant) -> Option<Instant> {
        let sent = self.sent.iter().find(|(number, _)| *number == grant.report_number);
        sent.map(|(_, at)| *at + self.timing.lease)
    }

    /// Puts a grant in force. Ignores it unless it is for this run, from the followed leader, not
    /// older than the one in force, and still valid.
    pub fn on_grant(
        &mut self,
        grant: &QuotaGrant,
        now: Instant,
        divide: impl FnOnce(Limits, ByKind, Instant) -> ByKind,
    ) {
        let is_addressed = grant.instance == self.instance && self.followed_term == Some(grant.term);
        let is_old = grant.report_number < self.first_report_of_term.max(self.last_answered_report)
            || grant.seq < self.seq.max(1);
        let Some(until) = self.lease_end_of(grant).filter(|_| is_addressed && !is_old) else { return };
        // After an expiry `expire_lease` must come first, or capacity of the expired lease would be
        // kept.
        if until <= now || now >= self.lease_end() {
            return;
        }
        self.last_answered_report = grant.report_number;
        self.until = until;
        let before = self.limits();
        self.is_counted = true;
        let is_new = grant.seq > self.seq;
        let rates = grant.spec.rates();
        // Whatever the store contains, no host gets more than the leasable rate of all hosts.
        let max_leased = zip_with(rates, grant.spec.fallback_share(), u64::saturating_sub);
        (self.seq, self.spec, self.leased) =
            (grant.seq, grant.spec, zip_with(grant.leased, max_leased, u64::min));
        // Credits are cumulative: only the part that is new since the last grant is added.
        let credit = zip_with(grant.credit, self.credit, u64::saturating_sub);
        let credit = zip_with(credit, grant.spec.scaled_capacity(rates), u64::min);
        self.credit = zip_with(self.credit, grant.credit, u64::max);
        if is_new || before != self.limits() {
            let released = divide(self.limits(), credit, now);
            self.released_capacity = zip_with(self.released_capacity, released, u64::saturating_add);
            self.is_urgent = true;
        }
    }

    /// The report to send now, if any: the demand changed, another grant is in force, or the lease
    /// must be extended.
    pub fn tick(&mut self, demand: ReportedDemand, now: Instant) -> Option<HostReport> {
        let since = self.sent.back().map_or(Instant::ZERO, |(_, at)| *at);
        let (age, tick) = (now - since, self.timing.tick);
        // Two fifths of a lease remain for the answer. Reports are sent more often while it is
        // missing.
        let is_late =
            age >= self.timing.lease * 3 / 5 || (age >= tick * 2 && self.is_answer_overdue(&demand, now));
        let unchanged = self.reported.filter(|earlier| !self.is_reportable_change(earlier, &demand));
        if !self.is_urgent && !is_late && (unchanged.is_some() || self.reported.is_none()) {
            return None;
        }
        // A change within the noise is reported as the old value, so that the leader moves nothing.
        let demand = unchanged
            .map_or(demand, |unchanged| ReportedDemand { waiting_ns: demand.waiting_ns, ..unchanged });
        self.is_urgent = false;
        self.reported = Some(demand);
        self.number += 1;
        self.sent.push_back((self.number, now));
        if self.sent.len() > MAX_SENT_REPORTS {
            self.sent.pop_front();
        }
        Some(HostReport {
            instance: self.instance,
            report_number: self.number,
            followed_term: self.followed_term,
            seq: self.seq,
            leased: if now < self.lease_end() { self.leased } else { [0; 6] },
            version: self.spec.version(),
            fallback: self.fallback_rates(),
            released_capacity: self.released_capacity,
            demand,
        })
    }

    /// True if an answer is overdue: the lease ends soon, or there is none and demand exceeds the
    /// fallback share. A host in any other state has nothing to repeat.
    fn is_answer_overdue(&self, demand: &ReportedDemand, now: Instant) -> bool {
        if self.is_leased() {
            return self.until - now < self.timing.lease / 3;
        }
        let fallback = self.fallback_rates();
        LimitKind::ALL.into_iter().any(|kind| {
            let at = kind.index();
            fallback[at] > 0 && demand.demand[at] > fallback[at]
        })
    }

    fn is_reportable_change(&self, reported: &ReportedDemand, demand: &ReportedDemand) -> bool {
        let [bytes, requests] =
            [LimitKind::BpsTotal, LimitKind::IopsTotal].map(|kind| reported.demand[kind.index()]);
        let request = bytes / requests.max(1);
        let tick_ns = (self.timing.tick.as_nanos() as u64).max(1);
        let ticks = (NANOS_PER_SECOND / tick_ns).max(1);
        let is_noticeable = |kind: LimitKind| {
            let (at, limit_rate) = (kind.index(), self.spec.limits().limit(kind).rate);
            let (reported_units, demand_units) =
                (reported.demand[at].min(limit_rate), demand.demand[at].min(limit_rate));
            let size = if kind.counts_bytes() { request.max(1) } else { 1 };
            // Two requests more or less in a tick are random variation, whatever the rate.
            let noise = size.saturating_mul(2).saturating_mul(ticks);
            // Neither does a change that is small compared with the group's limit cause a report.
            let min_change = (limit_rate / u64::from(self.spec.hosts()) / EQUAL_SHARE_THRESHOLD)
                .min(limit_rate / (REPORT_THRESHOLD * 4));
            reported_units.abs_diff(demand_units)
                > min_change.max(reported_units / REPORT_THRESHOLD).max(noise)
        };
        // The weight matters only to a host whose demand is not met. On other hosts the set of
        // active disks varies randomly from tick to tick.
        let is_throttled = demand.demand.contains(&u64::MAX);
        (is_throttled && (reported.weight, reported.reserved) != (demand.weight, demand.reserved))
            || LimitKind::ALL.into_iter().any(is_noticeable)
    }
}
