//! The main thread's side: this host's quota of each group.
//!
//! ```text
//!   each tick:   group's counters ─► Demand ─► Host ─► reports ─► the agent thread
//!   each message: leader, grant ────────────► Host ─► Group::divide, with the instant of its end
//! ```
//!
//! Trees check that instant themselves: if this task is late, or the process sleeps, the lease ends
//! all the same. Never waits for etcd.

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

/// Receiver of a quota: disks in a tree of this process, or control groups, which the kernel
/// limits.
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

    /// Counters of admitted requests; `None` while unknown.
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
                // The kernel has no reservations, and does not report waiting time.
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

    /// Applies limits. Returns the burst capacity that was given up; control groups have none.
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

    /// True if the last limits are in force: only then may a report say so.
    fn is_in_force(&self) -> bool {
        match self {
            Self::Disks(_) => true,
            Self::ControlGroups(lender) => lender.is_in_force(),
        }
    }
}

/// Converts an instant to the clock of the control groups' limits; `None` for no end.
fn end(until: Instant) -> Option<Instant> {
    // That clock is read first: preemption between the readings shortens the lease.
    let now = cgroup::watch::now();
    (until != Instant::MAX).then(|| now + (until - reactor::now()))
}

/// Local group that belongs to a cluster-wide limit.
struct Member {
    group: Place,
    /// `None` until the cluster has limits for the group; it is then unlimited.
    host: Option<Host>,
    /// `None` until the counters are known.
    demand: Option<Demand>,
    wants: Usage,
    left: Left,
    report: Option<Report>,
}

/// Effect of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The host has its quotas again.
    Joined,
    /// The host is disconnected, for this reason. `lasts`: an administrator has to act.
    Apart {
        why: String,
        lasts: bool,
    },
    Led(Option<String>),
}

/// All local groups that belong to cluster-wide limits.
pub(super) struct Hosts {
    name: String,
    timing: Timing,
    instance: u64,
    is_joined: bool,
    term: Option<Term>,
    members: BTreeMap<String, Member>,
    promises: BTreeMap<String, Promises>,
    own: Promises,
    /// True if reservations have to be sent again: etcd may not have received the last ones.
    tell_again: bool,
    /// Time spent in suspend at the last look.
    slept: Duration,
}

/// State of a local group, for `weir status`.
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

    /// Applies the limits that the host has, without adding burst capacity.
    fn put(&mut self, now: Instant) {
        let Some(host) = &self.host else { return };
        self.group.divide(host.limits(), [0; 6], Self::lent(host, host.next(), self.left), now);
    }

    /// Begins a run at the fallback share.
    fn begin(&mut self, instance: u64, spec: Spec, timing: Timing, now: Instant) {
        self.host = Some(Host::new(instance, spec, timing));
        self.report = None;
        self.put(now);
    }

    /// Ends expired leases; with `has_slept` all of them.
    fn run_out(&mut self, now: Instant, has_slept: bool) {
        let Self { group, host: Some(host), left, .. } = self else { return };
        let lent = Self::lent(host, Instant::MAX, *left);
        let was_leased = host.is_leased();
        let at_least = if has_slept { Instant::MAX } else { now };
        host.run_out(at_least, |limits, credit, at| group.divide(limits, credit, lent, at.min(now)));
        if was_leased && !host.is_leased() {
            tracing::debug!(group = %group.name(), "the lease has expired: the fallback share applies");
        }
    }

    fn on_grant(&mut self, grant: &Grant, now: Instant) {
        self.run_out(now, false);
        let Self { group, host: Some(host), left, .. } = self else { return };
        // An unexpected grant (stale, or of another leader) has no lease and is ignored.
        let Some(until) = host.lease_of(grant) else { return };
        let lent = Lent {
            until,
            safe: Host::new(0, grant.spec, Timing::DEFAULT).safe(),
            whole: *grant.spec.limits(),
            left: *left,
        };
        host.on_grant(grant, now, |limits, credit, at| group.divide(limits, credit, lent, at));
        // Needed for an equal grant as well: its lease ends later.
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

    /// True if there is a new report.
    fn tick(&mut self, now: Instant) -> bool {
        // A report acknowledges the last grant, so control groups' limits must be applied first.
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

    /// Adds a group, at its fallback share of these limits if there are any.
    pub(super) fn add(&mut self, group: &Arc<Group>, spec: Option<Spec>) {
        self.place(Place::Disks(Arc::clone(group)), spec);
    }

    /// Adds control groups, as [`add`](Self::add).
    pub(super) fn add_control_groups(&mut self, lender: Lender, spec: Option<Spec>) {
        self.place(Place::ControlGroups(lender), spec);
    }

    fn place(&mut self, group: Place, spec: Option<Spec>) {
        let now = reactor::now();
        let name = group.name().to_owned();
        let mut member = Member::new(group, now);
        member.left = self.left(&name, spec.as_ref().map(Spec::limits));
        if spec.is_none() {
            // The cluster owns the limits: local changes stay rejected until there are some.
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

    /// Rate of a group that this host may reserve, beside the reservations of all hosts.
    fn left(&self, group: &str, whole: Option<&Limits>) -> Left {
        promising::left(&self.promises, (&self.name, &self.own), group, whole)
    }

    /// Reservations of other hosts in a group, as text for a message; empty without any.
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

    /// This host's reservations, if they changed since the last call.
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

    /// Makes the next call of [`promised`](Self::promised) return the reservations again.
    pub(super) fn ask_again(&mut self) {
        self.tell_again = true;
    }

    /// Groups whose reservations exceed their limits, by unit (operations 0, bytes 1), each with
    /// the sum and the limit.
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

    /// Ends expired leases. Has to run before anything else looks at a lease.
    pub(super) fn run_out(&mut self, now: Instant) {
        let slept = outside::slept();
        // CLOCK_MONOTONIC stops during a suspend, so leases look younger than they are.
        let has_slept = slept > self.slept + Duration::from_millis(10);
        self.slept = self.slept.max(slept);
        self.members.values_mut().for_each(|member| member.run_out(now, has_slept));
    }

    /// Reports to write, if there are new ones.
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

    /// Handles a message. Returns its effect, and reports that cannot wait for the next tick.
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
                        // Lower limits take effect by a grant, after other hosts gave up their
                        // part.
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
            // No effect on limits.
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
