//! The leader's side: which host may have how much, and what must be given up before.
//!
//! ```text
//!     limit ▕ safe shares of all hosts │ A: in force or on its way │ B │ ... │ free ▏
//!                                        ▲ the most of both,                   │
//!                                        │ until acknowledged or run out       ▼
//!                                        └── lowered first ◄─── divide() ───► raised out of this alone
//! ```
//!
//! One grant at a time is on its way to a host. Room for bursts goes the same way as the rates.
//!
//! Never raises one host before another has given up as much. Never trusts that what it wrote, or
//! what others wrote before, is still in the store, nor that it reached anybody.

use super::{ByKind, Claim, Grant, Report, Spec, Term, Timing, Usage, divide, zip};
use crate::throttle::LimitKind;
use crate::time::Instant;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

/// A part of a host that is off by less than this part of itself, and half that of the limit, is
/// left as it is.
const NOTICED: u64 = 64;

/// As [`NOTICED`], of what a host would get besides all that it wants.
const SPARE: u64 = 2;

/// What the leader asks of the program around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Write these grants, by the host's name, in a transaction that holds only while the store's
    /// leader key is this term's. If it does not hold, call [`Leader::depose`].
    Write(Vec<(String, Grant)>),
    /// It leads no more: drop it, and stand for election again, with another nonce.
    StandDown,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    leased: ByKind,
    version: u64,
    until: Instant,
}

/// What is known of a host.
#[derive(Clone, Debug)]
struct Member {
    last: Report,
    heard: Instant,
    /// Whether it has named this leader, so that what it says it holds is true.
    follows: bool,
    seq: u64,
    held: ByKind,
    version: u64,
    /// By this leader's clock no part of `held` is in force from here on.
    until: Instant,
    sent: Option<Sent>,
    answered: u64,
    given: ByKind,
    credit: ByKind,
    /// It has given up its place: nothing of it counts once its lease has run out.
    is_gone: bool,
    /// Room that was given up with the next acknowledgement may have been replaced already.
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

    /// The most that may be in force there.
    fn bound(&self) -> ByKind {
        zip(self.held, self.sent.map_or([0; 6], |sent| sent.leased), u64::max)
    }

    fn run_out(&mut self, now: Instant) {
        if self.until <= now {
            self.is_void |= self.held != [0; 6];
            self.held = [0; 6];
        }
        if self.sent.is_some_and(|sent| sent.until <= now) {
            self.sent = None;
            self.is_void = true;
        }
    }

    /// Whether something that it has or may get is a part of other limits.
    fn has_other(&self, version: u64) -> bool {
        (self.held != [0; 6] && self.version != version)
            || self.sent.is_some_and(|sent| sent.version != version)
    }
}

/// An elected leader of a group.
///
/// # Protocol
///
/// 1. Made once the election is won. [`Leader::kept_alive`] whenever the key's lease was prolonged,
///    with the instant at which that was *asked for*.
/// 2. [`Leader::on_spec`] and [`Leader::on_report`] with what the store holds, in any order and as
///    often as it is read.
/// 3. [`Leader::tick`] at [`Leader::next`]; what it returns is done once, and need not succeed.
///
/// Instants are of a clock that goes on while the process or the machine sleeps.
#[derive(Debug)]
pub struct Leader {
    term: Term,
    spec: Spec,
    timing: Timing,
    valid_until: Instant,
    is_deposed: bool,
    /// Leases of leaders before may be in force until here.
    unknown_until: Instant,
    /// What hosts held when they named this leader first.
    found: ByKind,
    /// Whose that is.
    counted: BTreeSet<String>,
    members: BTreeMap<String, Member>,
    /// Room for bursts that was given up and nobody has yet; at most what is free can hold.
    room: ByKind,
    next: Instant,
    ticked: Instant,
}

impl Leader {
    /// The winner of an election that was asked for at `asked` and won by `won`, since when nobody
    /// else has lent anything of this group.
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

    /// The lease of its key was prolonged by a request that was sent at `asked`.
    pub fn kept_alive(&mut self, asked: Instant) {
        let until = asked + self.timing.term_lease().saturating_sub(self.timing.margin());
        self.valid_until = self.valid_until.max(until);
    }

    /// Its key has gone, or is another's.
    pub const fn depose(&mut self) {
        self.is_deposed = true;
    }

    /// Which election it won.
    pub const fn term(&self) -> Term {
        self.term
    }

    /// When to call [`Leader::tick`].
    pub const fn next(&self) -> Instant {
        self.next
    }

    /// More hosts take part than the limits are set up for: their safe shares are too many.
    pub fn is_crowded(&self) -> bool {
        self.members.len() > self.spec.hosts() as usize
    }

    /// Other limits for the group. What hosts have of the old ones is lowered before anybody is
    /// raised; a host that cannot be reached keeps the safe share that it knows of.
    pub fn on_spec(&mut self, spec: Spec, now: Instant) {
        if spec != self.spec {
            self.spec = spec;
            // Room for a burst of other limits is of another size.
            self.room = [0; 6];
            self.hurry(now);
        }
    }

    /// What a host says, by its name. One that was read before, or of an earlier run, changes
    /// nothing; nor does another run while the first may hold a lease.
    pub fn on_report(&mut self, name: &str, report: Report, now: Instant) {
        let report = report.bounded();
        let late = now + self.timing.lease + self.timing.margin();
        if !self.members.contains_key(name) {
            self.members.insert(String::from(name), Member::new(report.clone(), now));
        }
        let Some(member) = self.members.get_mut(name) else { return };
        member.run_out(now);
        if report.instance != member.last.instance {
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
        // What says that the lease should go on, and nothing else, waits for the next tick.
        let same = Report { number: report.number, ..member.last.clone() };
        let waiting_ns = report.wants.waiting_ns;
        let is_news = Report { wants: Usage { waiting_ns, ..same.wants }, ..same } != report
            || !member.follows
            || member.sent.is_some();
        if report.follows == Some(self.term) {
            if !member.follows {
                member.follows = true;
                (member.held, member.until, member.version) = (report.leased, late, report.version);
                (member.given, member.seq) = (report.given, report.seq);
                // A later run can hold nothing but what this leader gave to it.
                if self.counted.insert(String::from(name)) {
                    self.found = zip(self.found, report.leased, u64::saturating_add);
                }
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

    /// A host's report was taken away: it has ended in order, or somebody says that it will not
    /// come back. What it holds counts until its lease has run out; then nothing of it does.
    pub fn on_gone(&mut self, name: &str) {
        if let Some(member) = self.members.get_mut(name) {
            member.is_gone = true;
        }
    }

    /// Whether a lease of this host may be in force, of this leader's or of one before. If not,
    /// what was granted to it last is worth nothing to anybody, and may be taken away once its
    /// report has gone.
    pub fn may_hold(&self, name: &str, now: Instant) -> bool {
        let holds = |member: &Member| {
            (member.held != [0; 6] && now < member.until)
                || member.sent.is_some_and(|sent| sent.leased != [0; 6] && now < sent.until)
        };
        now < self.unknown_until || self.members.get(name).is_some_and(holds)
    }

    /// Sooner than at the next tick, but not for each report alone.
    fn hurry(&mut self, now: Instant) {
        self.next = self.next.min((self.ticked + self.timing.tick / 8).max(now));
    }

    /// What is to be written now.
    pub fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.is_deposed || now >= self.valid_until {
            self.is_deposed = true;
            self.next = Instant::MAX;
            return Vec::from([Action::StandDown]);
        }
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

    /// What all safe shares take, also of hosts that have not been heard of, and of hosts that know
    /// other limits.
    fn set_aside(&self) -> ByKind {
        let safe = self.spec.safe();
        let hosts = u64::from(self.spec.hosts()).max(self.members.len() as u64);
        let others = self.members.values().filter(|member| member.last.version != self.spec.version());
        others.fold(safe.map(|safe| safe.saturating_mul(hosts)), |sum, member| {
            zip(sum, zip(member.last.safe, safe, u64::saturating_sub), u64::saturating_add)
        })
    }

    /// What may be leased in all.
    fn leasable(&self) -> ByKind {
        zip(self.spec.rates(), self.set_aside(), u64::saturating_sub)
    }

    /// What nobody has, and nobody can have that is not known.
    fn free(&self, now: Instant) -> ByKind {
        let found = if now < self.unknown_until { self.found } else { [u64::MAX; 6] };
        let there_is = zip(self.leasable(), found, u64::min);
        self.members.values().fold(there_is, |free, member| zip(free, member.bound(), u64::saturating_sub))
    }

    /// What each host that can be reached should have besides its safe share.
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
        let count = claims.len() as u64;
        let available =
            zip(self.leasable(), safe.map(|safe| safe.saturating_mul(count)), u64::saturating_add);
        let parts = divide(available, &claims).into_iter();
        names.zip(parts.map(|part| zip(part, safe, u64::saturating_sub))).collect()
    }

    /// What each host is to have next, where that is something else.
    fn changes(&self, free: ByKind, targets: &BTreeMap<String, ByKind>) -> BTreeMap<String, ByKind> {
        let (rates, version) = (self.spec.rates(), self.spec.version());
        // Parts of two limits at once may be more than either.
        let mixed = self.members.values().any(|member| member.has_other(version));
        let (over, safe) = (self.is_over(), self.spec.safe());
        let open = || {
            targets.iter().filter_map(|(name, target)| {
                let member = self.members.get(name)?;
                // A larger safe share comes out of what others have given up.
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
                // With the safe share that comes with other limits no more than before.
                let less = safe[at].saturating_sub(member.last.safe[at]);
                let less = if member.last.version == version { 0 } else { less };
                let (held, target) = (member.held[at].saturating_sub(less), target[at]);
                // What nobody wants moves with what somebody wants, and not for its own sake.
                let wants = member.last.wants.demand[at].saturating_sub(safe[at]);
                let is_spare = held >= wants && target > held && member.last.wants.waiting_ns == 0;
                let is_worth = |at, held: u64, target: u64| {
                    is_worth(at, held, target)
                        && (!is_spare || held.abs_diff(target) > held.max(target) / SPARE)
                };
                if target < held {
                    // Little of many is much for who is short.
                    let is_little = !is_worth(at, held, target)
                        && (wanted[at] <= u128::from(free[at]) || held - target <= held / (8 * NOTICED));
                    return if over[at] || !is_little { target } else { held };
                }
                if mixed || !is_worth(at, held, target) {
                    return held;
                }
                let more = u128::from(target - held);
                // The same part for all of what they want, where that is more than there is.
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

    /// Where hosts have more than there is, because there was more before.
    fn is_over(&self) -> [bool; 6] {
        let leasable = self.leasable();
        let bounds = self.members.values().map(Member::bound);
        let held = bounds.fold([0; 6], |sum, bound| zip(sum, bound, u64::saturating_add));
        LimitKind::ALL.map(|kind| held[kind.index()] > leasable[kind.index()])
    }

    /// The grants to write: changes, and answers to reports that have none.
    fn write(&mut self, free: ByKind, changes: BTreeMap<String, ByKind>) -> Vec<(String, Grant)> {
        let (spec, term, late) = (self.spec, self.term, self.timing.lease + self.timing.margin());
        let room = self.room;
        let mut grants = Vec::new();
        for (name, member) in self.members.iter_mut().filter(|(_, member)| member.follows) {
            let until = member.heard + late;
            if let Some(leased) = changes.get(name) {
                let more = zip(*leased, member.held, u64::saturating_sub);
                // As much of the room as it gets of what is free.
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
                // Not again as a part of other limits: then it waits for its lease to run out.
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
            let leased = member.sent.map_or(member.held, |sent| sent.leased);
            // Of what a host says that it holds, not more than there is.
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
