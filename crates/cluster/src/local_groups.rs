//! The main thread's side: this host's quota of each group.
//!
//! ```text
//!   each tick:   group's counters ─► DemandEstimator ─► HostQuota ─► reports ─► the agent thread
//!   each message: leader, grant ─────────────────────► HostQuota ─► ThrottleGroup::set_quota, with the end of the lease
//! ```
//!
//! Trees check that instant themselves: if this task is late, or the process sleeps, the lease ends
//! all the same. Never waits for etcd.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use block::layer::throttle::ThrottleGroup;
use cgroup::watch::CgroupLessor;
use policy::{
    cluster::{
        ByKind, ClusterGroupLimits, DemandEstimator, HostQuota, QuotaGrant, ReportedDemand, Term, Timing,
    },
    throttle::{LimitKind, LimitPart, LimitSetting, Limits, MemberDemands, QuotaLease, ThrottleStats},
    time::{Duration, Instant},
};

use super::{
    environment,
    etcd_values::{HostReports, HostReservations, ReportValue},
    messages::AgentMessage,
    reservations::{self, MAX_NAMED_HOSTS, ReservableRates, max_reservable},
};

/// Receiver of a quota: disks in a tree of this process, or control groups, which the kernel
/// limits.
enum QuotaTarget {
    Disks(Arc<ThrottleGroup>),
    ControlGroups(CgroupLessor),
}

impl QuotaTarget {
    fn name(&self) -> &str {
        match self {
            Self::Disks(group) => group.name(),
            Self::ControlGroups(lessor) => lessor.name(),
        }
    }

    /// Counters of admitted requests; `None` while unknown.
    fn stats(&self) -> Option<ThrottleStats> {
        match self {
            Self::Disks(group) => Some(group.stats()),
            Self::ControlGroups(lessor) => lessor.demand().map(|doing| doing.stats),
        }
    }

    fn demand(&self) -> MemberDemands {
        match self {
            Self::Disks(group) => group.demand(),
            Self::ControlGroups(lessor) => {
                let weight = lessor.demand().map_or(0, |doing| doing.weight);
                // The kernel has no reservations, and does not report waiting time.
                MemberDemands { weight, reserved: [0; 2], waiting_ns: 0 }
            }
        }
    }

    fn reserved(&self) -> [u64; 2] {
        match self {
            Self::Disks(group) => group.reserved(),
            Self::ControlGroups(_) => [0; 2],
        }
    }

    fn extend_lease(&self, lease: QuotaLease) {
        match self {
            Self::Disks(group) => group.renew_lease(lease),
            Self::ControlGroups(lessor) => lessor.renew(&lease.fallback, cgroup_instant(lease.until)),
        }
    }

    /// Applies limits. Returns the burst capacity that was given up; control groups have none.
    fn divide(&self, limits: Limits, credit: ByKind, lease: QuotaLease, at: Instant) -> ByKind {
        match self {
            // Parts of valid limits are valid.
            Self::Disks(group) => group.set_quota(limits, credit, lease, at).unwrap_or_default(),
            Self::ControlGroups(lessor) => {
                lessor.lease(&limits, &lease.fallback, cgroup_instant(lease.until));
                [0; 6]
            }
        }
    }

    /// True if the last limits are in force: only then may a report acknowledge them.
    fn is_in_force(&self) -> bool {
        match self {
            Self::Disks(_) => true,
            Self::ControlGroups(lessor) => lessor.is_in_force(),
        }
    }
}

/// Converts an instant to the clock of the control groups' limits; `None` for no end.
fn cgroup_instant(until: Instant) -> Option<Instant> {
    // That clock is read first: preemption between the readings shortens the lease.
    let now = cgroup::watch::now();
    (until != Instant::MAX).then(|| now + (until - reactor::now()))
}

/// Local group that belongs to a cluster-wide limit.
struct LocalGroup {
    group: QuotaTarget,
    /// `None` until the cluster has limits for the group; it is then unlimited.
    host: Option<HostQuota>,
    /// `None` until the counters are known.
    demand: Option<DemandEstimator>,
    wants: ReportedDemand,
    left: ReservableRates,
    report: Option<ReportValue>,
}

/// Effect of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MembershipEvent {
    /// The host has its quotas again.
    Joined,
    /// The host is disconnected, for this reason. `lasts`: an administrator has to act.
    Disconnected {
        why: String,
        lasts: bool,
    },
    LeaderChanged(Option<String>),
}

/// All local groups that belong to cluster-wide limits.
pub(super) struct LocalGroups {
    name: String,
    timing: Timing,
    instance: u64,
    is_joined: bool,
    /// True if other hosts can be reached without etcd.
    has_peers: bool,
    /// Hosts for which leaders reserved fallback shares at the start; `None` once this host is one
    /// of them.
    reporting: Option<BTreeSet<String>>,
    term: Option<Term>,
    members: BTreeMap<String, LocalGroup>,
    reservations: BTreeMap<String, HostReservations>,
    own_reservations: HostReservations,
    /// True if reservations have to be sent again: etcd may not have received the last ones.
    resend: bool,
    /// Time spent in suspend when it was last checked.
    slept: Duration,
}

/// State of a local group, for `weir status`.
#[derive(Clone, Debug)]
pub struct LocalGroupState {
    pub group: String,
    pub is_leased: bool,
}

impl LocalGroup {
    fn new(group: QuotaTarget, now: Instant) -> Self {
        let demand = group.stats().map(|stats| DemandEstimator::new(now, stats));
        Self { group, host: None, demand, wants: ReportedDemand::default(), left: [None; 2], report: None }
    }

    fn lease(host: &HostQuota, until: Instant, left: ReservableRates) -> QuotaLease {
        QuotaLease {
            until,
            fallback: host.fallback_limits(),
            cluster_limits: *host.spec().limits(),
            reservation_bounds: left,
        }
    }

    /// Applies the limits that the host has, without adding burst capacity.
    fn apply_limits(&mut self, now: Instant) {
        let Some(host) = &self.host else { return };
        self.group.divide(host.limits(), [0; 6], Self::lease(host, host.lease_end(), self.left), now);
    }

    /// Begins a run at the fallback share.
    fn begin(
        &mut self,
        instance: u64,
        spec: ClusterGroupLimits,
        is_counted: bool,
        timing: Timing,
        now: Instant,
    ) {
        let new = if is_counted { HostQuota::new } else { HostQuota::new_uncounted };
        self.host = Some(new(instance, spec, timing));
        self.report = None;
        self.apply_limits(now);
    }

    /// Ends expired leases; with `has_slept` all of them.
    fn run_out(&mut self, now: Instant, has_slept: bool) {
        let Self { group, host: Some(host), left, .. } = self else { return };
        let lease = Self::lease(host, Instant::MAX, *left);
        let was_leased = host.is_leased();
        let at_least = if has_slept { Instant::MAX } else { now };
        host.expire_lease(at_least, |limits, credit, at| group.divide(limits, credit, lease, at.min(now)));
        if was_leased && !host.is_leased() {
            tracing::debug!(group = %group.name(), "the lease has expired: the fallback share applies");
        }
    }

    fn on_grant(&mut self, grant: &QuotaGrant, now: Instant) {
        self.run_out(now, false);
        let Self { group, host: Some(host), left, .. } = self else { return };
        // An unexpected grant (stale, or of another leader) has no lease and is ignored.
        let Some(until) = host.lease_end_of(grant) else { return };
        let lease = QuotaLease {
            until,
            fallback: HostQuota::new(0, grant.spec, Timing::DEFAULT).fallback_limits(),
            cluster_limits: *grant.spec.limits(),
            reservation_bounds: *left,
        };
        host.on_grant(grant, now, |limits, credit, at| group.divide(limits, credit, lease, at));
        // Needed for an equal grant as well: its lease ends later.
        group.extend_lease(Self::lease(host, host.lease_end(), *left));
    }

    fn measure(&mut self, now: Instant) {
        let wanted = self.group.demand();
        self.wants = ReportedDemand {
            demand: self.observe(now),
            waiting_ns: wanted.waiting_ns,
            weight: wanted.weight,
            reserved: wanted.reserved,
        };
    }

    fn observe(&mut self, now: Instant) -> ByKind {
        let Some(stats) = self.group.stats() else { return [0; 6] };
        self.demand.get_or_insert_with(|| DemandEstimator::new(now, stats)).observe(now, stats)
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
        self.report = Some(ReportValue::from(&report));
        true
    }
}

impl LocalGroups {
    pub(super) fn new(name: &str, timing: Timing, has_peers: bool) -> Self {
        Self {
            name: name.to_owned(),
            timing,
            instance: 0,
            is_joined: false,
            has_peers,
            reporting: None,
            term: None,
            members: BTreeMap::new(),
            reservations: BTreeMap::new(),
            own_reservations: HostReservations::default(),
            resend: false,
            slept: environment::suspended_time(),
        }
    }

    /// Sets the hosts for which leaders reserved fallback shares at the start.
    pub(super) fn set_reporting(&mut self, hosts: Option<BTreeSet<String>>) {
        self.reporting = hosts.filter(|hosts| !hosts.contains(&self.name));
    }

    /// True if a leader has reserved a fallback share for this host, or has one left.
    fn is_counted(&self, spec: &ClusterGroupLimits) -> bool {
        self.reporting.as_ref().is_none_or(|hosts| hosts.len() < spec.hosts() as usize)
    }

    /// Adds a group, at its fallback share of these limits if there are any.
    pub(super) fn add(&mut self, group: &Arc<ThrottleGroup>, spec: Option<ClusterGroupLimits>) {
        self.place(QuotaTarget::Disks(Arc::clone(group)), spec);
    }

    /// Adds control groups, as [`add`](Self::add).
    pub(super) fn add_control_groups(&mut self, lessor: CgroupLessor, spec: Option<ClusterGroupLimits>) {
        self.place(QuotaTarget::ControlGroups(lessor), spec);
    }

    fn place(&mut self, group: QuotaTarget, spec: Option<ClusterGroupLimits>) {
        let now = reactor::now();
        let name = group.name().to_owned();
        let mut member = LocalGroup::new(group, now);
        member.left = self.reservable(&name, spec.as_ref().map(ClusterGroupLimits::limits));
        if spec.is_none() {
            // The cluster owns the limits: local changes stay rejected until there are some.
            let (safe, full_limits) = (Limits::default(), Limits::default());
            member.group.extend_lease(QuotaLease {
                until: Instant::MAX,
                fallback: safe,
                cluster_limits: full_limits,
                reservation_bounds: [None; 2],
            });
        }
        if let Some(spec) = spec {
            member.begin(self.instance, spec, self.is_counted(&spec), self.timing, now);
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

    pub(super) fn states(&self) -> Vec<LocalGroupState> {
        let state = |(name, member): (&String, &LocalGroup)| {
            let host = member.host.as_ref()?;
            Some(LocalGroupState { group: name.clone(), is_leased: host.is_leased() })
        };
        self.members.iter().filter_map(state).collect()
    }

    /// Quotas in force of the first groups, as text for a message.
    pub(super) fn quotas(&self) -> String {
        let quota = |(name, member): (&String, &LocalGroup)| {
            let rates = member.host.as_ref()?.rates();
            let set = LimitKind::ALL.into_iter().filter(|kind| rates[kind.index()] > 0);
            let set = set.map(|kind| {
                let setting = LimitSetting::Limit(kind, LimitPart::Rate);
                format!("{} {}", setting.name(), rates[kind.index()])
            });
            let set: Vec<_> = set.collect();
            (!set.is_empty()).then(|| format!("group {name}: {}", set.join(", ")))
        };
        let quotas: Vec<_> = self.members.iter().filter_map(quota).take(MAX_NAMED_HOSTS).collect();
        quotas.join("; ")
    }

    /// Rate of a group that this host may reserve, beside the reservations of all hosts.
    fn reservable(&self, group: &str, limits: Option<&Limits>) -> ReservableRates {
        reservations::reservable(&self.reservations, &self.name, &self.own_reservations, group, limits)
    }

    /// Reservations of other hosts in a group, as text for a message; empty without any.
    pub(super) fn reserved_elsewhere(&self, group: &str) -> String {
        reservations::reservations_elsewhere(&self.reservations, &self.name, group)
    }

    fn update_reservable(&mut self) {
        let left: BTreeMap<_, _> = self
            .members
            .iter()
            .map(|(name, member)| {
                let limits = member.host.as_ref().map(|host| *host.spec().limits());
                (name.clone(), self.reservable(name, limits.as_ref()))
            })
            .collect();
        for (name, left) in left {
            let Some(member) = self.members.get_mut(&name) else { continue };
            member.left = left;
            if let Some(host) = &member.host {
                member.group.extend_lease(LocalGroup::lease(host, host.lease_end(), left));
            }
        }
    }

    /// This host's reservations, if they changed since the last call.
    pub(super) fn update_reservations(&mut self, capacity: [u64; 2]) -> Option<HostReservations> {
        let reserved = self.members.iter().map(|(name, member)| (name.clone(), member.group.reserved()));
        let groups = reserved.filter(|(_, reserved)| *reserved != [0; 2]).collect();
        let members = Some(self.members.keys().cloned().collect());
        let reservations = HostReservations { groups, capacity, members };
        if !std::mem::take(&mut self.resend) && reservations == self.own_reservations {
            return None;
        }
        self.own_reservations = reservations.clone();
        self.update_reservable();
        Some(reservations)
    }

    /// Makes the next call of [`update_reservations`](Self::update_reservations) return the reservations again.
    pub(super) fn resend_reservations(&mut self) {
        self.resend = true;
    }

    /// Groups whose reservations exceed their limits, by unit (operations 0, bytes 1), each with
    /// the sum and the limit.
    pub(super) fn overbooked(
        &self,
        specs: &BTreeMap<String, ClusterGroupLimits>,
    ) -> BTreeMap<(String, usize), [u64; 2]> {
        let mut excess = BTreeMap::new();
        for (name, reserved) in reservations::sums(self.reservations.values()) {
            let Some(spec) = specs.get(name) else { continue };
            for unit in [0, 1] {
                if let Some(there) = max_reservable(spec.limits(), unit).filter(|max| reserved[unit] > *max) {
                    excess.insert((name.to_owned(), unit), [reserved[unit], there]);
                }
            }
        }
        excess
    }

    /// Ends expired leases. Has to run before anything else looks at a lease.
    pub(super) fn run_out(&mut self, now: Instant) {
        let slept = environment::suspended_time();
        // CLOCK_MONOTONIC stops during a suspend, so leases look younger than they are.
        let has_slept = slept > self.slept + Duration::from_millis(10);
        self.slept = self.slept.max(slept);
        self.members.values_mut().for_each(|member| member.run_out(now, has_slept));
    }

    /// Reports to write, if there are new ones.
    pub(super) fn tick(&mut self, now: Instant) -> Option<HostReports> {
        self.run_out(now);
        self.members.values_mut().for_each(|member| member.measure(now));
        self.report(now)
    }

    fn report(&mut self, now: Instant) -> Option<HostReports> {
        // Without etcd, a leader may be reached directly. Before the first registration, a report
        // has no run that it belongs to.
        let is_possible = self.is_joined || (self.has_peers && self.instance > 0);
        if !is_possible {
            return None;
        }
        let mut is_new = false;
        for member in self.members.values_mut() {
            is_new |= member.tick(now);
        }
        is_new.then(|| HostReports { groups: self.reports() })
    }

    fn reports(&self) -> BTreeMap<String, ReportValue> {
        let report = |(name, member): (&String, &LocalGroup)| Some((name.clone(), member.report.clone()?));
        self.members.iter().filter_map(report).collect()
    }

    /// Handles a message. Returns its effect, and reports that cannot wait for the next tick.
    pub(super) fn handle_message(
        &mut self,
        message: AgentMessage,
        now: Instant,
    ) -> (Option<MembershipEvent>, Option<HostReports>) {
        self.run_out(now);
        let mut event = None;
        match message {
            AgentMessage::Joined { instance } => {
                (self.is_joined, self.resend) = (true, true);
                if instance != self.instance {
                    self.instance = instance;
                    let counted: Vec<bool> = self
                        .members
                        .values()
                        .map(|member| member.host.as_ref().is_none_or(|host| self.is_counted(&host.spec())))
                        .collect();
                    for (member, is_counted) in self.members.values_mut().zip(counted) {
                        if let Some(spec) = member.host.as_ref().map(HostQuota::spec) {
                            member.begin(instance, spec, is_counted, self.timing, now);
                        }
                    }
                    self.follow();
                }
                event = Some(MembershipEvent::Joined);
            }
            AgentMessage::Disconnected { why, is_permanent: lasts } => {
                self.is_joined = false;
                event = Some(MembershipEvent::Disconnected { why, lasts });
            }
            AgentMessage::LeaderChanged { leader } => {
                self.term = leader.as_ref().map(|(term, _)| *term);
                self.follow();
                event = Some(MembershipEvent::LeaderChanged(leader.map(|(_, host)| host)));
            }
            AgentMessage::Group { name, spec, .. } => {
                let left = self.reservable(&name, Some(spec.limits()));
                let is_counted = self.is_counted(&spec);
                if let Some(member) = self.members.get_mut(&name) {
                    member.left = left;
                    match &member.host {
                        // Lower limits take effect by a grant, after other hosts gave up their
                        // part.
                        Some(host) => {
                            member.group.extend_lease(LocalGroup::lease(host, host.lease_end(), left));
                        }
                        None => {
                            member.begin(self.instance, spec, is_counted, self.timing, now);
                            self.follow();
                        }
                    }
                }
            }
            AgentMessage::Granted { group, grant } => {
                self.reporting = None;
                if let Some(member) = self.members.get_mut(&group) {
                    member.on_grant(&grant, now);
                }
            }
            // No effect on limits.
            AgentMessage::Offered(_)
            | AgentMessage::Answered { .. }
            | AgentMessage::Silent(_)
            | AgentMessage::Peers(_) => {}
            AgentMessage::Reservations(reservations) => {
                self.reservations = reservations;
                self.update_reservable();
            }
        }
        let is_urgent =
            self.members.values().any(|member| member.host.as_ref().is_some_and(HostQuota::is_urgent));
        (event, if is_urgent { self.report(now) } else { None })
    }

    fn follow(&mut self) {
        let Some(term) = self.term else { return };
        for host in self.members.values_mut().filter_map(|member| member.host.as_mut()) {
            host.on_leader(term);
        }
    }
}
