//! The main thread's side: which part of each group's limits is in force here.
//!
//! ```text
//!   each tick:  group's counters ─► Demand ─► Host ─► reports ─► the thread that speaks with etcd
//!   each word:  leader, grant ─────────────► Host ─► Group::divide, with the instant of its end
//! ```
//!
//! Trees look at that instant themselves: when this task is late, or the process sleeps, what was
//! lent ends all the same. Never waits for etcd.

use std::{collections::BTreeMap, sync::Arc};

use block::layer::throttle::Group;
use cgroup::watch::Lender;
use policy::{
    cluster::{ByKind, Demand, Grant, Host, Spec, Term, Timing, Usage},
    throttle::{Lent, Limits, Stats, Wanted},
    time::{Duration, Instant},
};

use super::{
    outside,
    promising::{self, Left, most},
    values::{Promises, Report, Reports},
    words::Word,
};

/// Whom a part is for: disks in a tree of this process, or control groups, which the kernel limits.
enum Place {
    Disks(Arc<Group>),
    ControlGroups(Lender),
}

impl Place {
    fn name(&self) -> &str {
        match self {
            Self::Disks(group) => group.name(),
            Self::ControlGroups(lender) => lender.name(),
        }
    }

    /// What has passed so far; `None` while nobody knows.
    fn stats(&self) -> Option<Stats> {
        match self {
            Self::Disks(group) => Some(group.stats()),
            Self::ControlGroups(lender) => lender.doing().map(|doing| doing.stats),
        }
    }

    fn wanted(&self) -> Wanted {
        match self {
            Self::Disks(group) => group.wanted(),
            Self::ControlGroups(lender) => {
                let weight = lender.doing().map_or(0, |doing| doing.weight);
                // The kernel keeps no promises, and does not tell how long one waits.
                Wanted { weight, reserved: [0; 2], waiting_ns: 0 }
            }
        }
    }

    fn promised(&self) -> [u64; 2] {
        match self {
            Self::Disks(group) => group.promised(),
            Self::ControlGroups(_) => [0; 2],
        }
    }

    fn lend(&self, lent: Lent) {
        match self {
            Self::Disks(group) => group.lend(lent),
            Self::ControlGroups(lender) => lender.prolong(&lent.safe, end(lent.until)),
        }
    }

    /// What is given up of room for bursts; control groups have none.
    fn divide(&self, limits: Limits, credit: ByKind, lent: Lent, at: Instant) -> ByKind {
        match self {
            // Parts of valid limits are valid.
            Self::Disks(group) => group.divide(limits, credit, lent, at).unwrap_or_default(),
            Self::ControlGroups(lender) => {
                lender.lend(&limits, &lent.safe, end(lent.until));
                [0; 6]
            }
        }
    }

    /// Whether what was divided last holds already: only then a report may say so.
    fn is_in_force(&self) -> bool {
        match self {
            Self::Disks(_) => true,
            Self::ControlGroups(lender) => lender.is_in_force(),
        }
    }
}

/// The same instant by the clock of control groups' limits; `None` for ever.
fn end(until: Instant) -> Option<Instant> {
    // Whoever is stopped between the two clocks has less time, not more.
    let now = cgroup::watch::now();
    (until != Instant::MAX).then(|| now + (until - reactor::now()))
}

/// A group of this host whose limits are the cluster's.
struct Member {
    group: Place,
    /// None before the cluster has limits for it: then it has none here.
    host: Option<Host>,
    /// None while nobody knows what passes.
    demand: Option<Demand>,
    wants: Usage,
    left: Left,
    report: Option<Report>,
}

/// What has become of a word, or of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// It has its part again.
    Joined,
    /// Etcd is away, or the name is another's, for this reason; some last until somebody has mended
    /// them.
    Apart {
        why: String,
        lasts: bool,
    },
    Led(Option<String>),
}

/// All groups of this host that take part.
pub(super) struct Hosts {
    name: String,
    timing: Timing,
    instance: u64,
    is_joined: bool,
    term: Option<Term>,
    members: BTreeMap<String, Member>,
    promises: BTreeMap<String, Promises>,
    own: Promises,
    /// Etcd may have been away when that was to be told.
    tell_again: bool,
    /// How far the clock that sleeps lags behind the one that does not.
    slept: Duration,
}

/// A host's standing in a group, for `weir status`.
#[derive(Clone, Debug)]
pub struct Standing {
    pub group: String,
    pub is_leased: bool,
}

impl Member {
    fn new(group: Place, now: Instant) -> Self {
        let demand = group.stats().map(|stats| Demand::new(now, stats));
        Self { group, host: None, demand, wants: Usage::default(), left: [None; 2], report: None }
    }

    fn lent(host: &Host, until: Instant, left: Left) -> Lent {
        Lent { until, safe: host.safe(), whole: *host.spec().limits(), left }
    }

    /// Puts what the host has in force, without new room.
    fn put(&mut self, now: Instant) {
        let Some(host) = &self.host else { return };
        self.group.divide(host.limits(), [0; 6], Self::lent(host, host.next(), self.left), now);
    }

    /// A new run, at its safe share.
    fn begin(&mut self, instance: u64, spec: Spec, timing: Timing, now: Instant) {
        self.host = Some(Host::new(instance, spec, timing));
        self.report = None;
        self.put(now);
    }

    /// What is lent ends if its time has come; `has_slept`: whatever the clock says.
    fn run_out(&mut self, now: Instant, has_slept: bool) {
        let Self { group, host: Some(host), left, .. } = self else { return };
        let lent = Self::lent(host, Instant::MAX, *left);
        let was_leased = host.is_leased();
        let at_least = if has_slept { Instant::MAX } else { now };
        host.run_out(at_least, |limits, credit, at| group.divide(limits, credit, lent, at.min(now)));
        if was_leased && !host.is_leased() {
            tracing::debug!(group = %group.name(), "the lease has run out: the safe share holds");
        }
    }

    fn on_grant(&mut self, grant: &Grant, now: Instant) {
        self.run_out(now, false);
        let Self { group, host: Some(host), left, .. } = self else { return };
        let Some(until) = host.lease_of(grant) else { return };
        let lent = Lent {
            until,
            safe: Host::new(0, grant.spec, Timing::DEFAULT).safe(),
            whole: *grant.spec.limits(),
            left: *left,
        };
        host.on_grant(grant, now, |limits, credit, at| group.divide(limits, credit, lent, at));
        // Also where only its end is another.
        group.lend(Self::lent(host, host.next(), *left));
    }

    fn look(&mut self, now: Instant) {
        let wanted = self.group.wanted();
        self.wants = Usage {
            demand: self.observe(now),
            waiting_ns: wanted.waiting_ns,
            weight: wanted.weight,
            reserved: wanted.reserved,
        };
    }

    fn observe(&mut self, now: Instant) -> ByKind {
        let Some(stats) = self.group.stats() else { return [0; 6] };
        self.demand.get_or_insert_with(|| Demand::new(now, stats)).observe(now, stats)
    }

    /// Whether there is another report.
    fn tick(&mut self, now: Instant) -> bool {
        if !self.group.is_in_force() {
            return false;
        }
        let Some(report) = self.host.as_mut().and_then(|host| host.tick(self.wants, now)) else {
            return false;
        };
        self.report = Some(Report::from(&report));
        true
    }
}

impl Hosts {
    pub(super) fn new(name: &str, timing: Timing) -> Self {
        Self {
            name: name.to_owned(),
            timing,
            instance: 0,
            is_joined: false,
            term: None,
            members: BTreeMap::new(),
            promises: BTreeMap::new(),
            own: Promises::default(),
            tell_again: false,
            slept: outside::slept(),
        }
    }

    /// A group takes part, at its safe share of these limits if there are some.
    pub(super) fn add(&mut self, group: &Arc<Group>, spec: Option<Spec>) {
        self.place(Place::Disks(Arc::clone(group)), spec);
    }

    /// The same for control groups.
    pub(super) fn add_control_groups(&mut self, lender: Lender, spec: Option<Spec>) {
        self.place(Place::ControlGroups(lender), spec);
    }

    fn place(&mut self, group: Place, spec: Option<Spec>) {
        let now = reactor::now();
        let name = group.name().to_owned();
        let mut member = Member::new(group, now);
        member.left = self.left(&name, spec.as_ref().map(Spec::limits));
        if spec.is_none() {
            // Not one host's to set meanwhile.
            let (safe, whole) = (Limits::default(), Limits::default());
            member.group.lend(Lent { until: Instant::MAX, safe, whole, left: [None; 2] });
        }
        if let Some(spec) = spec {
            member.begin(self.instance, spec, self.timing, now);
            if let (Some(term), Some(host)) = (self.term, &mut member.host) {
                host.on_leader(term);
            }
        }
        self.members.insert(name, member);
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.members.remove(name);
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    pub(super) fn standings(&self) -> Vec<Standing> {
        let standing = |(name, member): (&String, &Member)| {
            let host = member.host.as_ref()?;
            Some(Standing { group: name.clone(), is_leased: host.is_leased() })
        };
        self.members.iter().filter_map(standing).collect()
    }

    /// What others leave of a group's limits, and of what is below all hosts, to be promised here.
    fn left(&self, group: &str, whole: Option<&Limits>) -> Left {
        promising::left(&self.promises, (&self.name, &self.own), group, whole)
    }

    /// What others have promised of a group, as words; empty where nobody has.
    pub(super) fn elsewhere(&self, group: &str) -> String {
        promising::elsewhere(&self.promises, &self.name, group)
    }

    fn leave_others_theirs(&mut self) {
        let left: BTreeMap<_, _> = self
            .members
            .iter()
            .map(|(name, member)| {
                let whole = member.host.as_ref().map(|host| *host.spec().limits());
                (name.clone(), self.left(name, whole.as_ref()))
            })
            .collect();
        for (name, left) in left {
            let Some(member) = self.members.get_mut(&name) else { continue };
            member.left = left;
            if let Some(host) = &member.host {
                member.group.lend(Member::lent(host, host.next(), left));
            }
        }
    }

    /// What is promised here now, where that is something else than before.
    pub(super) fn promised(&mut self, capacity: [u64; 2]) -> Option<Promises> {
        let promised = self.members.iter().map(|(name, member)| (name.clone(), member.group.promised()));
        let groups = promised.filter(|(_, promised)| *promised != [0; 2]).collect();
        let members = Some(self.members.keys().cloned().collect());
        let own = Promises { groups, capacity, members };
        if !std::mem::take(&mut self.tell_again) && own == self.own {
            return None;
        }
        self.own = own.clone();
        self.leave_others_theirs();
        Some(own)
    }

    /// Has what is promised here asked for again.
    pub(super) fn ask_again(&mut self) {
        self.tell_again = true;
    }

    /// Groups of which more is promised on all hosts than their limits have, and what of both in
    /// operations (0) or bytes (1) per second.
    pub(super) fn overpromised(&self, specs: &BTreeMap<String, Spec>) -> BTreeMap<(String, usize), [u64; 2]> {
        let mut over = BTreeMap::new();
        for (name, promised) in promising::sums(self.promises.values()) {
            let Some(spec) = specs.get(name) else { continue };
            for unit in [0, 1] {
                if let Some(there) = most(spec.limits(), unit).filter(|there| promised[unit] > *there) {
                    over.insert((name.to_owned(), unit), [promised[unit], there]);
                }
            }
        }
        over
    }

    /// Looks at the clock, before anything else.
    pub(super) fn run_out(&mut self, now: Instant) {
        let slept = outside::slept();
        // A machine that was asleep: its monotonic clock stood still, and leases have run out.
        let has_slept = slept > self.slept + Duration::from_millis(10);
        self.slept = self.slept.max(slept);
        self.members.values_mut().for_each(|member| member.run_out(now, has_slept));
    }

    /// What is to be reported, if there is something.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Reports> {
        self.run_out(now);
        self.members.values_mut().for_each(|member| member.look(now));
        self.report(now)
    }

    fn report(&mut self, now: Instant) -> Option<Reports> {
        if !self.is_joined {
            return None;
        }
        let mut is_new = false;
        for member in self.members.values_mut() {
            is_new |= member.tick(now);
        }
        is_new.then(|| Reports { groups: self.reports() })
    }

    fn reports(&self) -> BTreeMap<String, Report> {
        let report = |(name, member): (&String, &Member)| Some((name.clone(), member.report.clone()?));
        self.members.iter().filter_map(report).collect()
    }

    /// Does what a word says. Also says what is to be reported at once.
    pub(super) fn hear(&mut self, word: Word, now: Instant) -> (Option<Turn>, Option<Reports>) {
        self.run_out(now);
        let mut turn = None;
        match word {
            Word::Joined { instance } => {
                (self.is_joined, self.tell_again) = (true, true);
                if instance != self.instance {
                    self.instance = instance;
                    for member in self.members.values_mut() {
                        if let Some(spec) = member.host.as_ref().map(Host::spec) {
                            member.begin(instance, spec, self.timing, now);
                        }
                    }
                    self.follow();
                }
                turn = Some(Turn::Joined);
            }
            Word::Apart { why, lasts } => {
                self.is_joined = false;
                turn = Some(Turn::Apart { why, lasts });
            }
            Word::Led { leader } => {
                self.term = leader.as_ref().map(|(term, _)| *term);
                self.follow();
                turn = Some(Turn::Led(leader.map(|(_, host)| host)));
            }
            Word::Group { name, spec, .. } => {
                let left = self.left(&name, Some(spec.limits()));
                if let Some(member) = self.members.get_mut(&name) {
                    member.left = left;
                    match &member.host {
                        // By a grant, once others have given up what these limits have less.
                        Some(host) => member.group.lend(Member::lent(host, host.next(), left)),
                        None => {
                            member.begin(self.instance, spec, self.timing, now);
                            self.follow();
                        }
                    }
                }
            }
            Word::Granted { group, grant } => {
                if let Some(member) = self.members.get_mut(&group) {
                    member.on_grant(&grant, now);
                }
            }
            // No limit changes by them.
            Word::Offered(_) | Word::Answered { .. } | Word::Silent(_) => {}
            Word::Promises(promises) => {
                self.promises = promises;
                self.leave_others_theirs();
            }
        }
        let is_urgent = self.members.values().any(|member| member.host.as_ref().is_some_and(Host::is_urgent));
        (turn, if is_urgent { self.report(now) } else { None })
    }

    fn follow(&mut self) {
        let Some(term) = self.term else { return };
        for host in self.members.values_mut().filter_map(|member| member.host.as_mut()) {
            host.on_leader(term);
        }
    }
}
