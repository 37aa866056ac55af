//! The host's side: which part of the group's limits is in force on this host, and until when.
//!
//! Never grants itself more than its fallback share. Never lets a lease outlive the report that it
//! answers by more than [`Timing::lease`].

use super::{ByKind, Grant, Report, Spec, Term, Timing, Usage, zip};
use crate::throttle::{LimitKind, Limits};
use crate::time::{Instant, NANOS_PER_SECOND};
use alloc::collections::VecDeque;

/// Number of reports whose send time is kept. Leases expire before that many reports are sent.
const REMEMBERED: usize = 64;
/// Number of earlier leaders whose state is kept.
const PAST: usize = 8;
/// A change of demand is reported if it exceeds all of these: this fraction (1 / n) of the demand;
/// the smaller of a quarter of that fraction of the limit and 1 / [`OF_EQUAL`] of an equal share;
/// two requests in a tick.
const NOTICED: u64 = 64;
/// Fraction (1 / n) of an equal share below which a change is not reported.
const OF_EQUAL: u64 = 16;

/// A host that takes part in a group.
///
/// # Protocol
///
/// 1. A group's node is added without limits and at once given [`Host::limits`] by
///    [`Tree::divide`](crate::throttle::Tree::divide) without credit, so it begins with full
///    buckets. The spec is the store's, or the last one known.
/// 2. Call [`Host::run_out`] **before any call of the tree** at an instant not before
///    [`Host::next`], also after a pause. That is one comparison for each request.
/// 3. Call [`Host::on_leader`] with the leader's key, then [`Host::on_grant`], whenever they are
///    read.
/// 4. Call [`Host::tick`] each [`Timing::tick`] and after a grant, and write the report that it
///    returns to the store. The write may fail.
///
/// `divide` is [`Tree::divide`](crate::throttle::Tree::divide) for the group: its arguments are the
/// limits, the credit and the instant from which they hold; it returns the capacity given up.
/// Instants are of a clock that includes time in which the process or the machine is suspended.
#[derive(Debug)]
pub struct Host {
    instance: u64,
    spec: Spec,
    timing: Timing,
    follows: Option<Term>,
    /// The first report that names the followed leader.
    follows_from: u64,
    number: u64,
    sent: VecDeque<(u64, Instant)>,
    seq: u64,
    /// Number of the latest report that a grant in force answered.
    answered: u64,
    leased: ByKind,
    until: Instant,
    given: ByKind,
    credit: ByKind,
    /// State of earlier leaders. One may return if the store answers late.
    past: VecDeque<(Term, u64, ByKind, ByKind)>,
    told: Option<Usage>,
    is_urgent: bool,
}

impl Host {
    /// A host at its fallback share. `instance` is larger than that of any earlier run of this
    /// host.
    pub const fn new(instance: u64, spec: Spec, timing: Timing) -> Self {
        Self {
            instance,
            spec,
            timing,
            follows: None,
            follows_from: 1,
            number: 0,
            sent: VecDeque::new(),
            seq: 0,
            answered: 0,
            leased: [0; 6],
            until: Instant::ZERO,
            given: [0; 6],
            credit: [0; 6],
            past: VecDeque::new(),
            told: None,
            is_urgent: true,
        }
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.spec.part(self.rates())
    }

    /// The rates in force, in units per second.
    pub fn rates(&self) -> ByKind {
        zip(self.spec.safe(), self.leased, u64::saturating_add)
    }

    /// The limits that apply without a lease.
    pub fn safe(&self) -> Limits {
        self.spec.part(self.spec.safe())
    }

    /// The limits of the whole group as this host knows them. Store them for its next start.
    pub const fn spec(&self) -> Spec {
        self.spec
    }

    /// True if [`Host::tick`] should be called at once, with the last measured demand.
    pub const fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// True if the host has a lease; without one, only its fallback share is in force.
    pub fn is_leased(&self) -> bool {
        self.leased != [0; 6]
    }

    /// End of the lease; [`Instant::MAX`] without one.
    pub fn next(&self) -> Instant {
        if self.is_leased() { self.until } else { Instant::MAX }
    }

    /// Falls back to the fallback share if the lease has expired, as of the instant of expiry.
    pub fn run_out(&mut self, now: Instant, divide: impl FnOnce(Limits, ByKind, Instant) -> ByKind) {
        if now >= self.next() {
            self.leased = [0; 6];
            self.is_urgent = true;
            // Not counted in `given`: the leader has treated this capacity as void since the
            // expiry, and may have granted it to other hosts.
            let _lost = divide(self.limits(), [0; 6], self.until);
        }
    }

    /// Follows the leader that the leader's key names. Grants of other leaders are ignored from
    /// here on; the lease in force stays.
    pub fn on_leader(&mut self, leader: Term) {
        if self.follows == Some(leader) {
            return;
        }
        if let Some(before) = self.follows.replace(leader) {
            self.past.push_back((before, self.seq, self.given, self.credit));
            if self.past.len() > PAST {
                self.past.pop_front();
            }
        }
        // Answers to reports sent before this instant do not prove that this leader was known here.
        self.follows_from = self.number + 1;
        // A leader that returns still accounts in its own totals, so they must continue, not
        // restart.
        let known = self.past.iter().rev().find(|(term, ..)| *term == leader);
        (self.seq, self.given, self.credit) =
            known.map_or((0, [0; 6], [0; 6]), |(_, seq, given, credit)| (*seq, *given, *credit));
        self.is_urgent = true;
    }

    /// End of the lease of a grant; `None` if this run has no record of the report it answers.
    pub fn lease_of(&self, grant: &Grant) -> Option<Instant> {
        let sent = self.sent.iter().find(|(number, _)| *number == grant.answers);
        sent.map(|(_, at)| *at + self.timing.lease)
    }

    /// Puts a grant in force. Ignores it unless it is for this run, from the followed leader, not
    /// older than the one in force, and still valid.
    pub fn on_grant(
        &mut self,
        grant: &Grant,
        now: Instant,
        divide: impl FnOnce(Limits, ByKind, Instant) -> ByKind,
    ) {
        let is_mine = grant.instance == self.instance && self.follows == Some(grant.term);
        let is_old = grant.answers < self.follows_from.max(self.answered) || grant.seq < self.seq.max(1);
        let Some(until) = self.lease_of(grant).filter(|_| is_mine && !is_old) else { return };
        // After an expiry `run_out` must come first, or capacity of the expired lease would be
        // kept.
        if until <= now || now >= self.next() {
            return;
        }
        self.answered = grant.answers;
        self.until = until;
        let before = self.limits();
        let is_new = grant.seq > self.seq;
        let rates = grant.spec.rates();
        // Whatever the store contains, no host gets more than the leasable rate of all hosts.
        let most = zip(rates, grant.spec.safe(), u64::saturating_sub);
        (self.seq, self.spec, self.leased) = (grant.seq, grant.spec, zip(grant.leased, most, u64::min));
        // Credits are cumulative: only the part that is new since the last grant is added.
        let credit = zip(grant.credit, self.credit, u64::saturating_sub);
        let credit = zip(credit, grant.spec.size(rates), u64::min);
        self.credit = zip(self.credit, grant.credit, u64::max);
        if is_new || before != self.limits() {
            let given = divide(self.limits(), credit, now);
            self.given = zip(self.given, given, u64::saturating_add);
            self.is_urgent = true;
        }
    }

    /// The report to send now, if any: the demand changed, another grant is in force, or the lease
    /// must be extended.
    pub fn tick(&mut self, wants: Usage, now: Instant) -> Option<Report> {
        let since = self.sent.back().map_or(Instant::ZERO, |(_, at)| *at);
        let (age, tick) = (now - since, self.timing.tick);
        // Two fifths of a lease remain for the answer. Reports are sent more often while it is
        // missing.
        let is_late =
            age >= self.timing.lease * 3 / 5 || (age >= tick * 2 && self.misses_an_answer(&wants, now));
        let told = self.told.filter(|told| !self.differs(told, &wants));
        if !self.is_urgent && !is_late && (told.is_some() || self.told.is_none()) {
            return None;
        }
        // A change within the noise is reported as the old value, so that the leader moves nothing.
        let wants = told.map_or(wants, |told| Usage { waiting_ns: wants.waiting_ns, ..told });
        self.is_urgent = false;
        self.told = Some(wants);
        self.number += 1;
        self.sent.push_back((self.number, now));
        if self.sent.len() > REMEMBERED {
            self.sent.pop_front();
        }
        Some(Report {
            instance: self.instance,
            number: self.number,
            follows: self.follows,
            seq: self.seq,
            leased: if now < self.next() { self.leased } else { [0; 6] },
            version: self.spec.version(),
            safe: self.spec.safe(),
            given: self.given,
            wants,
        })
    }

    /// True if an answer is overdue: the lease ends soon, or there is none and demand exceeds the
    /// fallback share. A host in any other state has nothing to repeat.
    fn misses_an_answer(&self, wants: &Usage, now: Instant) -> bool {
        if self.is_leased() {
            return self.until - now < self.timing.lease / 3;
        }
        let safe = self.spec.safe();
        LimitKind::ALL.into_iter().any(|kind| {
            let at = kind.index();
            safe[at] > 0 && wants.demand[at] > safe[at]
        })
    }

    fn differs(&self, told: &Usage, wants: &Usage) -> bool {
        let [bytes, requests] =
            [LimitKind::BpsTotal, LimitKind::IopsTotal].map(|kind| told.demand[kind.index()]);
        let request = bytes / requests.max(1);
        let tick_ns = (self.timing.tick.as_nanos() as u64).max(1);
        let ticks = (NANOS_PER_SECOND / tick_ns).max(1);
        let noticed = |kind: LimitKind| {
            let (at, whole) = (kind.index(), self.spec.limits().limit(kind).rate);
            let (told, wants) = (told.demand[at].min(whole), wants.demand[at].min(whole));
            let size = if kind.counts_bytes() { request.max(1) } else { 1 };
            // Two requests more or less in a tick are chance, whatever the rate.
            let noise = size.saturating_mul(2).saturating_mul(ticks);
            // A change that is small for the group as a whole is not worth a report either.
            let few = (whole / u64::from(self.spec.hosts()) / OF_EQUAL).min(whole / (NOTICED * 4));
            told.abs_diff(wants) > few.max(told / NOTICED).max(noise)
        };
        // The weight matters only to a host whose demand is not met. Otherwise which disks are
        // active in a tick is chance.
        let is_held = wants.demand.contains(&u64::MAX);
        (is_held && (told.weight, told.reserved) != (wants.weight, wants.reserved))
            || LimitKind::ALL.into_iter().any(noticed)
    }
}
