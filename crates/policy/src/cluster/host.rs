//! A host's side: which part of the group's limits is in force here, and until when.
//!
//! Never grants itself anything but its safe share. Never lets a lease outlive the report that it
//! answers by more than [`Timing::lease`].

use super::{ByKind, Grant, Report, Spec, Term, Timing, Usage, zip};
use crate::throttle::{LimitKind, Limits};
use crate::time::{Instant, NANOS_PER_SECOND};
use alloc::collections::VecDeque;

/// Reports whose time of sending is remembered: a lease is over before so many are sent.
const REMEMBERED: usize = 64;
/// Leaders before that are remembered.
const PAST: usize = 8;
/// A demand that differs by less than this part of itself, or a quarter of that of the limit and
/// [`OF_EQUAL`] of an equal share, or two requests in a tick, is not worth a report.
const NOTICED: u64 = 64;
/// A part of an equal share that is not worth a report.
const OF_EQUAL: u64 = 16;

/// A host that takes part in a group.
///
/// # Protocol
///
/// 1. A group's node is added without limits and at once given [`Host::limits`] by
///    [`Tree::divide`](crate::throttle::Tree::divide), without credit: so it begins with full
///    buckets. The spec is the store's, or the last one known.
/// 2. **Before anything is asked of the tree** at an instant not before [`Host::next`],
///    [`Host::run_out`] is called: also after a pause. That is one comparison for a request.
/// 3. [`Host::on_leader`] with the leader's key, then [`Host::on_grant`], whenever they were read.
/// 4. [`Host::tick`] each [`Timing::tick`] and after a grant; what it returns is written to the
///    store. Whether that succeeds does not matter here.
///
/// `divide` is [`Tree::divide`](crate::throttle::Tree::divide) for the group: limits, credit, the
/// instant from which they hold, and what is given up. Instants are of a clock that goes on while
/// the process or the machine sleeps.
#[derive(Debug)]
pub struct Host {
    instance: u64,
    spec: Spec,
    timing: Timing,
    follows: Option<Term>,
    /// The first report that names that leader.
    follows_from: u64,
    number: u64,
    sent: VecDeque<(u64, Instant)>,
    seq: u64,
    /// The latest report that a grant in force answered.
    answered: u64,
    leased: ByKind,
    until: Instant,
    given: ByKind,
    credit: ByKind,
    /// What was agreed with leaders before, who may come back where the store answers late.
    past: VecDeque<(Term, u64, ByKind, ByKind)>,
    told: Option<Usage>,
    is_urgent: bool,
}

impl Host {
    /// A host at its safe share. `instance` is larger than that of any earlier run of this host.
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

    /// What is in force.
    pub fn limits(&self) -> Limits {
        self.spec.part(self.rates())
    }

    /// The rates of what is in force, in units per second.
    pub fn rates(&self) -> ByKind {
        zip(self.spec.safe(), self.leased, u64::saturating_add)
    }

    /// What is in force without a lease.
    pub fn safe(&self) -> Limits {
        self.spec.part(self.spec.safe())
    }

    /// The whole group's limits as this host knows them: to be kept for its next start.
    pub const fn spec(&self) -> Spec {
        self.spec
    }

    /// Whether [`Host::tick`] should be called at once, with the demand as it was last.
    pub const fn is_urgent(&self) -> bool {
        self.is_urgent
    }

    /// Whether it has a lease; otherwise its safe share alone is in force.
    pub fn is_leased(&self) -> bool {
        self.leased != [0; 6]
    }

    /// When the lease ends; never, without one.
    pub fn next(&self) -> Instant {
        if self.is_leased() { self.until } else { Instant::MAX }
    }

    /// Falls to the safe share if the lease has ended, as of that instant.
    pub fn run_out(&mut self, now: Instant, divide: impl FnOnce(Limits, ByKind, Instant) -> ByKind) {
        if now >= self.next() {
            self.leased = [0; 6];
            self.is_urgent = true;
            // The leader cannot tell this room from what it has given to others since.
            let _lost = divide(self.limits(), [0; 6], self.until);
        }
    }

    /// Whom the leader's key names. Grants of others count no more; what is in force stays.
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
        self.follows_from = self.number + 1;
        let known = self.past.iter().rev().find(|(term, ..)| *term == leader);
        (self.seq, self.given, self.credit) =
            known.map_or((0, [0; 6], [0; 6]), |(_, seq, given, credit)| (*seq, *given, *credit));
        self.is_urgent = true;
    }

    /// Until when a grant holds, if it answers a report that this run remembers.
    pub fn lease_of(&self, grant: &Grant) -> Option<Instant> {
        let sent = self.sent.iter().find(|(number, _)| *number == grant.answers);
        sent.map(|(_, at)| *at + self.timing.lease)
    }

    /// Puts a grant in force, if it is for this run, by the leader that it follows, not older than
    /// the one in force, and its lease has not ended. Others change nothing.
    pub fn on_grant(
        &mut self,
        grant: &Grant,
        now: Instant,
        divide: impl FnOnce(Limits, ByKind, Instant) -> ByKind,
    ) {
        let is_mine = grant.instance == self.instance && self.follows == Some(grant.term);
        let is_old = grant.answers < self.follows_from.max(self.answered) || grant.seq < self.seq.max(1);
        let Some(until) = self.lease_of(grant).filter(|_| is_mine && !is_old) else { return };
        if until <= now || now >= self.next() {
            return;
        }
        self.answered = grant.answers;
        self.until = until;
        let before = self.limits();
        let is_new = grant.seq > self.seq;
        let rates = grant.spec.rates();
        // Whatever is written there, no host has more than all hosts may have.
        let most = zip(rates, grant.spec.safe(), u64::saturating_sub);
        (self.seq, self.spec, self.leased) = (grant.seq, grant.spec, zip(grant.leased, most, u64::min));
        let credit = zip(grant.credit, self.credit, u64::saturating_sub);
        let credit = zip(credit, grant.spec.size(rates), u64::min);
        self.credit = zip(self.credit, grant.credit, u64::max);
        if is_new || before != self.limits() {
            let given = divide(self.limits(), credit, now);
            self.given = zip(self.given, given, u64::saturating_add);
            self.is_urgent = true;
        }
    }

    /// What to tell the leader now, if there is anything: another demand, another grant in force,
    /// or that the lease should go on.
    pub fn tick(&mut self, wants: Usage, now: Instant) -> Option<Report> {
        let since = self.sent.back().map_or(Instant::ZERO, |(_, at)| *at);
        let (age, tick) = (now - since, self.timing.tick);
        // So that two fifths of a lease are left for the answer; more often once it is missing.
        let is_late =
            age >= self.timing.lease * 3 / 5 || (age >= tick * 2 && self.misses_an_answer(&wants, now));
        let told = self.told.filter(|told| !self.differs(told, &wants));
        if !self.is_urgent && !is_late && (told.is_some() || self.told.is_none()) {
            return None;
        }
        // What differs by chance alone is told as before: then nobody has to move.
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

    /// Its lease ends soon; or it has none and wants more than its safe share. Others have said
    /// what there is to say.
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
            let noise = size.saturating_mul(2).saturating_mul(ticks);
            let few = (whole / u64::from(self.spec.hosts()) / OF_EQUAL).min(whole / (NOTICED * 4));
            told.abs_diff(wants) > few.max(told / NOTICED).max(noise)
        };
        // Who gets all it wants needs no weight; which disks ask in a tick is chance.
        let is_held = wants.demand.contains(&u64::MAX);
        (is_held && (told.weight, told.reserved) != (wants.weight, wants.reserved))
            || LimitKind::ALL.into_iter().any(noticed)
    }
}
