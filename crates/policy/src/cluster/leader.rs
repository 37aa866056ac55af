//! The leader's side: the quota of each host, and the quota that must be given up first.
//!
//! ```text
//!   limit ▕ fallback shares of all hosts │ A: in force or in transit │ B │ ... │ free ▏
//!                                          ▲ the larger of both,               │
//!                                          │ until acknowledged or expired     ▼
//!                                          └── lowered first ◄─ divide() ──► raised from free only
//! ```
//!
//! At most one grant for each host is unacknowledged. Burst capacity moves like the rates.
//!
//! Never raises one host before another has given up as much. Never assumes that its writes, or
//! those of earlier leaders, are still in the store or have reached a host.

use super::{ByKind, Claim, Grant, Report, Spec, Term, Timing, Usage, divide, zip};
use crate::throttle::LimitKind;
use crate::time::Instant;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

/// A host whose quota differs from its target by less than this fraction (1 / n) of itself, and
/// half that fraction of the limit, is not changed.
const NOTICED: u64 = 64;

/// As [`NOTICED`], for quota above the host's demand.
const SPARE: u64 = 2;

/// Request of the leader to the program that runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write these grants, keyed by the host's name, in one transaction that compares the leader
    /// key of the store with this term. If the comparison fails, call [`Leader::depose`].
    Write(Vec<(String, Grant)>),
    /// Leadership is lost: drop the leader and stand for election again, with another nonce.
    StandDown,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    leased: ByKind,
    version: u64,
    until: Instant,
}

/// State of one host.
#[derive(Clone, Debug)]
struct Member {
    last: Report,
    heard: Instant,
    /// True if the host has named this leader, so that its report of the lease in force is
    /// reliable.
    follows: bool,
    seq: u64,
    held: ByKind,
    version: u64,
    /// Instant, by this leader's clock, from which no part of `held` is in force.
    until: Instant,
    sent: Option<Sent>,
    answered: u64,
    given: ByKind,
    credit: ByKind,
    /// The host has left the group. It is forgotten once its lease has expired.
    is_gone: bool,
    /// True if capacity given up with the next acknowledgement may have been granted to others
    /// already, and must not be counted again.
    is_void: bool,
}

impl Member {
    const fn new(report: Report, now: Instant) -> Self {
        Self {
            version: report.version,
            last: report,
            heard: now,
            follows: false,
            seq: 0,
            held: [0; 6],
            until: now,
            sent: None,
            answered: 0,
            given: [0; 6],
            credit: [0; 6],
            is_gone: false,
            is_void: false,
        }
    }

    /// The largest rates that may be in force on the host.
    fn bound(&self) -> ByKind {
        zip(self.held, self.sent.map_or([0; 6], |sent| sent.leased), u64::max)
    }

    fn run_out(&mut self, now: Instant) {
        // An expired lease frees the quota without an acknowledgement, so capacity that a later one
        // reports as given up is void.
        if self.until <= now {
            self.is_void |= self.held != [0; 6];
            self.held = [0; 6];
        }
        if self.sent.is_some_and(|sent| sent.until <= now) {
            self.sent = None;
            self.is_void = true;
        }
    }

    /// True if a lease in force or in transit is a part of limits of another version.
    fn has_other(&self, version: u64) -> bool {
        (self.held != [0; 6] && self.version != version)
            || self.sent.is_some_and(|sent| sent.version != version)
    }
}

/// An elected leader of a group.
///
/// # Protocol
///
/// 1. Create it once the election is won. Call [`Leader::kept_alive`] whenever the lease of the key
///    was renewed, with the instant at which the renewal was *sent*.
/// 2. Call [`Leader::on_spec`] and [`Leader::on_report`] with the contents of the store, in any
///    order and as often as they are read.
/// 3. Call [`Leader::tick`] at [`Leader::next`], and execute each returned action once. An action
///    may fail.
///
/// Instants are of a clock that includes time in which the process or the machine is suspended.
#[derive(Debug)]
pub struct Leader {
    term: Term,
    spec: Spec,
    timing: Timing,
    valid_until: Instant,
    is_deposed: bool,
    /// Leases of earlier leaders may be in force until this instant.
    unknown_until: Instant,
    /// Sum of the leases that hosts held when they first named this leader.
    found: ByKind,
    /// Hosts that are included in `found`.
    counted: BTreeSet<String>,
    members: BTreeMap<String, Member>,
    /// Burst capacity that hosts have given up and no host has got yet; at most as much as the free
    /// quota can hold.
    room: ByKind,
    next: Instant,
    ticked: Instant,
}

impl Leader {
    /// The winner of an election that was requested at `asked` and won by `won`. No other leader of
    /// this group has granted anything since `won`.
    pub fn new(term: Term, spec: Spec, timing: Timing, asked: Instant, won: Instant) -> Self {
        let mut leader = Self {
            term,
            spec,
            timing,
            valid_until: asked,
            is_deposed: false,
            unknown_until: won + timing.lease + timing.margin(),
            found: [0; 6],
            counted: BTreeSet::new(),
            members: BTreeMap::new(),
            room: [0; 6],
            next: won,
            ticked: Instant::ZERO,
        };
        leader.kept_alive(asked);
        leader
    }

    /// Records that the lease of the leader's key was renewed by a request sent at `asked`.
    pub fn kept_alive(&mut self, asked: Instant) {
        let until = asked + self.timing.term_lease().saturating_sub(self.timing.margin());
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

    /// Time of the next call of [`Leader::tick`].
    pub const fn next(&self) -> Instant {
        self.next
    }

    /// True if more hosts take part than the limits allow for: the fallback shares exceed their
    /// sum.
    pub fn is_crowded(&self) -> bool {
        self.members.len() > self.spec.hosts() as usize
    }

    /// Changes the limits of the group. Quota under the old limits is lowered before any host is
    /// raised. An unreachable host keeps the fallback share that it knows.
    pub fn on_spec(&mut self, spec: Spec, now: Instant) {
        if spec != self.spec {
            self.spec = spec;
            // The unit of burst capacity differs between limits, so old capacity cannot be kept.
            self.room = [0; 6];
            self.hurry(now);
        }
    }

    /// Processes a host's report. Ignores one that was read before or is of an earlier run, and one
    /// of a later run while the current run may hold a lease.
    pub fn on_report(&mut self, name: &str, report: Report, now: Instant) {
        let report = report.bounded();
        let late = now + self.timing.lease + self.timing.margin();
        if !self.members.contains_key(name) {
            self.members.insert(String::from(name), Member::new(report.clone(), now));
        }
        let Some(member) = self.members.get_mut(name) else { return };
        member.run_out(now);
        if report.instance != member.last.instance {
            // Two runs must not hold leases at once: their sum could exceed the accounted quota.
            let is_over = member.bound() == [0; 6] && report.instance > member.last.instance;
            if !is_over {
                return;
            }
            *member = Member::new(report.clone(), now);
        } else if member.follows && report.number <= member.last.number {
            return;
        }
        if report.number > member.last.number {
            (member.heard, member.is_gone) = (now, false);
        }
        // A report that only extends the lease waits for the next tick.
        let same = Report { number: report.number, ..member.last.clone() };
        let waiting_ns = report.wants.waiting_ns;
        // A longer wait alone is no news: it changes with every report of a throttled host.
        let is_news = Report { wants: Usage { waiting_ns, ..same.wants }, ..same } != report
            || !member.follows
            || member.sent.is_some();
        if report.follows == Some(self.term) {
            if !member.follows {
                member.follows = true;
                (member.held, member.until, member.version) = (report.leased, late, report.version);
                (member.given, member.seq) = (report.given, report.seq);
                // Counted once for each name: a later run can hold only what this leader granted.
                if self.counted.insert(String::from(name)) {
                    self.found = zip(self.found, report.leased, u64::saturating_add);
                }
            // An acknowledgement of the grant in transit: it replaces `held` only now, because
            // until then either of the two may have been in force.
            } else if let Some(sent) = member.sent.filter(|_| report.seq == member.seq) {
                (member.held, member.until, member.version) = (sent.leased, sent.until, sent.version);
                member.sent = None;
                if !member.is_void {
                    let given = zip(report.given, member.given, u64::saturating_sub);
                    self.room = zip(self.room, given, u64::saturating_add);
                }
                member.is_void = false;
                member.given = report.given;
            }
        }
        member.last = report;
        if is_news {
            self.hurry(now);
        }
    }

    /// Records that a host's report was deleted: the host has shut down, or an administrator has
    /// removed it. Its lease counts until it expires.
    pub fn on_gone(&mut self, name: &str) {
        if let Some(member) = self.members.get_mut(name) {
            member.is_gone = true;
        }
    }

    /// True if a lease of this host may be in force, granted by this leader or an earlier one. If
    /// false, its last grant is worthless and may be deleted once its report is gone.
    pub fn may_hold(&self, name: &str, now: Instant) -> bool {
        let holds = |member: &Member| {
            (member.held != [0; 6] && now < member.until)
                || member.sent.is_some_and(|sent| sent.leased != [0; 6] && now < sent.until)
        };
        now < self.unknown_until || self.members.get(name).is_some_and(holds)
    }

    /// Schedules a tick before the regular one, but not for each report alone.
    fn hurry(&mut self, now: Instant) {
        self.next = self.next.min((self.ticked + self.timing.tick / 8).max(now));
    }

    /// The actions to execute now.
    pub fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.is_deposed || now >= self.valid_until {
            self.is_deposed = true;
            self.next = Instant::MAX;
            return Vec::from([Action::StandDown]);
        }
        // Expire leases first: the free quota and the targets depend on them.
        (self.ticked, self.next) = (now, now + self.timing.tick);
        self.members.values_mut().for_each(|member| member.run_out(now));
        self.members.retain(|_, member| !member.is_gone || member.bound() != [0; 6]);
        let free = self.free(now);
        self.room = zip(self.room, self.spec.size(free), u64::min);
        let targets = self.targets(now);
        let changes = self.changes(free, &targets);
        let grants = self.write(free, changes);
        if grants.is_empty() { Vec::new() } else { Vec::from([Action::Write(grants)]) }
    }

    /// Sum of all fallback shares, including those of hosts not heard of, and of hosts that use
    /// other limits.
    fn set_aside(&self) -> ByKind {
        let safe = self.spec.safe();
        let hosts = u64::from(self.spec.hosts()).max(self.members.len() as u64);
        let others = self.members.values().filter(|member| member.last.version != self.spec.version());
        others.fold(safe.map(|safe| safe.saturating_mul(hosts)), |sum, member| {
            zip(sum, zip(member.last.safe, safe, u64::saturating_sub), u64::saturating_add)
        })
    }

    /// Rates that may be leased in total.
    fn leasable(&self) -> ByKind {
        zip(self.spec.rates(), self.set_aside(), u64::saturating_sub)
    }

    /// Quota that is not leased, excluding quota that an earlier leader may have granted.
    fn free(&self, now: Instant) -> ByKind {
        // While leases of earlier leaders may be in force, only quota that hosts have reported to
        // this leader is known to be exclusively its own.
        let found = if now < self.unknown_until { self.found } else { [u64::MAX; 6] };
        let there_is = zip(self.leasable(), found, u64::min);
        self.members.values().fold(there_is, |free, member| zip(free, member.bound(), u64::saturating_sub))
    }

    /// Target quota of each reachable host, besides its fallback share.
    fn targets(&self, now: Instant) -> BTreeMap<String, ByKind> {
        let safe = self.spec.safe();
        let alive =
            |member: &&Member| member.follows && !member.is_gone && now < member.heard + self.timing.lease;
        let names = self.members.iter().filter(|(_, member)| alive(member)).map(|(name, _)| name.clone());
        let claim = |member: &Member| Claim {
            floor: safe,
            weight: member.last.wants.weight,
            reserved: member.last.wants.reserved,
            demand: member.last.wants.demand,
            waiting_ns: member.last.wants.waiting_ns,
        };
        let claims: Vec<Claim> = self.members.values().filter(alive).map(claim).collect();
        // The claims' floors are fallback shares, which are not part of the leasable rates.
        let count = claims.len() as u64;
        let available =
            zip(self.leasable(), safe.map(|safe| safe.saturating_mul(count)), u64::saturating_add);
        let parts = divide(available, &claims).into_iter();
        names.zip(parts.map(|part| zip(part, safe, u64::saturating_sub))).collect()
    }

    /// Next quota of each host whose quota changes.
    fn changes(&self, free: ByKind, targets: &BTreeMap<String, ByKind>) -> BTreeMap<String, ByKind> {
        let (rates, version) = (self.spec.rates(), self.spec.version());
        // Parts of two versions of the limits may together exceed both, so none is raised.
        let mixed = self.members.values().any(|member| member.has_other(version));
        let (over, safe) = (self.is_over(), self.spec.safe());
        let open = || {
            targets.iter().filter_map(|(name, target)| {
                let member = self.members.get(name)?;
                // A larger fallback share is backed by quota that other hosts must give up first.
                let waits = over.contains(&true)
                    && (0..6).any(|at| member.held[at] + member.last.safe[at] < safe[at]);
                (member.sent.is_none() && !waits).then_some((name, member, target))
            })
        };
        let is_worth = |at: usize, one: u64, other: u64| {
            one.abs_diff(other) > (rates[at] / (2 * NOTICED)).min(one.max(other) / NOTICED)
        };
        let mut wanted = [0_u128; 6];
        for (_, member, target) in open() {
            for (at, sum) in wanted.iter_mut().enumerate() {
                let (held, target) = (member.held[at], target[at]);
                if target > held && is_worth(at, held, target) {
                    *sum += u128::from(target - held);
                }
            }
        }
        let next = |member: &Member, target: &ByKind| -> ByKind {
            core::array::from_fn(|at| {
                // The fallback share that comes with the new limits replaces a part of the lease,
                // so that the sum of both does not rise.
                let less = safe[at].saturating_sub(member.last.safe[at]);
                let less = if member.last.version == version { 0 } else { less };
                let (held, target) = (member.held[at].saturating_sub(less), target[at]);
                // Quota above the demand is moved only if the gain is large.
                let wants = member.last.wants.demand[at].saturating_sub(safe[at]);
                let is_spare = held >= wants && target > held && member.last.wants.waiting_ns == 0;
                let is_worth = |at, held: u64, target: u64| {
                    is_worth(at, held, target)
                        && (!is_spare || held.abs_diff(target) > held.max(target) / SPARE)
                };
                if target < held {
                    // A small surplus of many hosts adds up for one that lacks quota, so it is
                    // taken if the raises exceed the free quota.
                    let is_little = !is_worth(at, held, target)
                        && (wanted[at] <= u128::from(free[at]) || held - target <= held / (8 * NOTICED));
                    return if over[at] || !is_little { target } else { held };
                }
                if mixed || !is_worth(at, held, target) {
                    return held;
                }
                let more = u128::from(target - held);
                // If the raises exceed the free quota, each is scaled by the same factor.
                let share = more * u128::from(free[at]) / wanted[at].max(1);
                held + more.min(share) as u64
            })
        };
        open()
            .map(|(name, member, target)| (name.clone(), next(member, target)))
            .filter(|(name, next)| {
                let member = &self.members[name];
                *next != member.held || member.last.version != version || member.seq == 0
            })
            .collect()
    }

    /// For each limit, true if more is leased than may be, because the limits were lowered.
    fn is_over(&self) -> [bool; 6] {
        let leasable = self.leasable();
        let bounds = self.members.values().map(Member::bound);
        let held = bounds.fold([0; 6], |sum, bound| zip(sum, bound, u64::saturating_add));
        LimitKind::ALL.map(|kind| held[kind.index()] > leasable[kind.index()])
    }

    /// The grants to write: changes, and answers to unanswered reports.
    fn write(&mut self, free: ByKind, changes: BTreeMap<String, ByKind>) -> Vec<(String, Grant)> {
        let (spec, term, late) = (self.spec, self.term, self.timing.lease + self.timing.margin());
        let room = self.room;
        let mut grants = Vec::new();
        for (name, member) in self.members.iter_mut().filter(|(_, member)| member.follows) {
            let until = member.heard + late;
            if let Some(leased) = changes.get(name) {
                let more = zip(*leased, member.held, u64::saturating_sub);
                // Burst capacity in proportion to the free quota that the host gets.
                let credit = core::array::from_fn(|at| {
                    let part = u128::from(room[at]) * u128::from(more[at]) / u128::from(free[at].max(1));
                    part as u64
                });
                self.room = zip(self.room, credit, u64::saturating_sub);
                member.credit = zip(member.credit, credit, u64::saturating_add);
                member.seq = member.seq.saturating_add(1);
                member.sent = Some(Sent { leased: *leased, version: spec.version(), until });
            } else if member.last.number <= member.answered {
                continue;
            } else if let Some(sent) = &mut member.sent {
                // A grant under old limits is not extended: it must expire.
                if sent.version != spec.version() {
                    continue;
                }
                sent.until = until;
            } else if member.seq > 0 && member.held != [0; 6] && member.version == spec.version() {
                member.until = until;
            } else {
                continue;
            }
            member.answered = member.last.number;
            // A repeated grant carries the same contents, so it does not matter which copy the host
            // reads.
            let leased = member.sent.map_or(member.held, |sent| sent.leased);
            // A host may report a larger lease than the limit.
            let leased = zip(leased, spec.rates(), u64::min);
            let grant = Grant {
                term,
                instance: member.last.instance,
                answers: member.last.number,
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
