//! A named group: limits that several disks, or several groups, share.
//!
//! Groups nest: a disk's request must be admitted by its own limits, its group's, and those of
//! every group above. A group exists as long as it has members, or is referenced.
//!
//! A group has no references to its disks, only their number: a disk references its group.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use policy::{
    latency_target::RateCap,
    schedule::{ConfiguredLimits, ScheduledLimits},
    throttle::{
        BucketSnapshot, CumulativeStats, Enforcement, InvalidLimit, Limits, MemberDemands, NodeId,
        QuotaLease, ReservableCapacity, ThrottleError, ThrottleStats, ThrottleSummary,
    },
    time::Instant,
    watermark::Watermark,
};

use super::{settings::GroupSettings, timer::arm, tree::SharedThrottleTree};

/// Disks and groups that share one set of limits.
#[derive(Debug)]
pub struct ThrottleGroup {
    name: Arc<str>,
    parent: Option<Arc<ThrottleGroup>>,
    pub(super) shared_tree: Arc<SharedThrottleTree>,
    pub(super) node: NodeId,
    /// Locked before the tree.
    settings: Mutex<GroupTerms>,
}

/// Settings and schedule of a group.
#[derive(Debug)]
struct GroupTerms {
    settings: GroupSettings,
    scheduled: ScheduledLimits,
}

impl ThrottleGroup {
    /// Creates an empty group, inside `parent` if there is one.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or a reservation that does not fit into `parent`.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn new(
        name: &str,
        settings: GroupSettings,
        parent: Option<&Arc<Self>>,
    ) -> Result<Arc<Self>, ThrottleError> {
        let now = reactor::now();
        let shared_tree =
            parent.map_or_else(|| SharedThrottleTree::new(now), |parent| Arc::clone(&parent.shared_tree));
        let share = settings.share;
        let scheduled = ScheduledLimits::default();
        let limits = scheduled.without_quota(&configured_limits(&settings))?;
        let node =
            shared_tree.lock().add(None, parent.map(|parent| parent.node), limits, share, None, now)?;
        let parent = parent.cloned();
        Ok(Arc::new(Self {
            name: name.into(),
            parent,
            shared_tree,
            node,
            settings: Mutex::new(GroupTerms { settings, scheduled }),
        }))
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The group that contains it.
    pub fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    /// Settings as they were given, or the limits of the quota. [`ThrottleGroup::limits`] are those
    /// in force.
    pub fn settings(&self) -> GroupSettings {
        self.lock().settings
    }

    /// Limits in force at this time.
    pub fn limits(&self) -> Limits {
        self.shared_tree.lock().tree().limits(self.node)
    }

    /// Schedule of its limits, with the entry that holds.
    pub fn scheduled(&self) -> ScheduledLimits {
        self.lock().scheduled.clone()
    }

    /// Changes the schedule of its limits, or the entry that holds. The settings stay.
    ///
    /// # Errors
    /// [`ThrottleError`]: an entry contradicts the settings; reservations inside exceed the limits
    /// of the entry; or the limits are the cluster's. Nothing is changed then.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set_scheduled(&self, scheduled: ScheduledLimits) -> Result<(), ThrottleError> {
        self.change(None, Some(scheduled))
    }

    /// Changes the settings, also for waiting requests, which are admitted at once if possible. All
    /// of them or none.
    ///
    /// Charges carry over to the new limits: a change grants no burst. (QEMU's begin with empty
    /// buckets.)
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, a reservation that does not fit into the parent, or
    /// reservations inside that exceed the new limits. Nothing is changed then.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set(&self, settings: GroupSettings) -> Result<(), ThrottleError> {
        self.change(Some(settings), None)
    }

    /// As [`ThrottleGroup::set`], also with another schedule.
    ///
    /// # Errors
    /// As there, or an entry of the schedule contradicts the settings.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set_both(&self, settings: GroupSettings, scheduled: ScheduledLimits) -> Result<(), ThrottleError> {
        self.change(Some(settings), Some(scheduled))
    }

    /// Changes what is given.
    fn change(
        &self,
        settings: Option<GroupSettings>,
        scheduled: Option<ScheduledLimits>,
    ) -> Result<(), ThrottleError> {
        let now = reactor::now();
        let mut current = self.lock();
        let settings = settings.unwrap_or(current.settings);
        let scheduled = scheduled.unwrap_or_else(|| current.scheduled.clone());
        // Lock order: the settings before the tree.
        let mut locked = self.shared_tree.lock();
        let limits = scheduled.without_quota(&configured_limits(&settings))?;
        let is_leased = locked.tree().lease(self.node).is_some();
        let changes_quota = settings.limits != current.settings.limits
            || !scheduled.schedule.entries.is_empty()
            || !settings.quota.is_none();
        if is_leased && (changes_quota || settings.watermark.percent() > 0) {
            return Err(ThrottleError::Leased);
        }
        // Under a quota lease the leased limits stay in force.
        locked.configure(self.node, limits, settings.share, now)?;
        locked.set_used_up_rate(self.node, scheduled.used_up_rate_bps(&settings.quota), now);
        *current = GroupTerms { settings, scheduled };
        drop(locked);
        drop(current);
        arm(self.shared_tree.admit_ready(now));
        Ok(())
    }

    /// Puts the host's quota of a cluster-wide limit in force, as of the instant `from`; `lease` is
    /// the quota lease. [`ThrottleGroup::set`] does not change the limits any more. Returns the
    /// burst capacity that is given up: see [`policy::throttle::ThrottleTree::set_quota`].
    ///
    /// # Errors
    /// [`InvalidLimit`] limits; nothing is changed.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set_quota(
        &self,
        limits: Limits,
        credit: [u64; 6],
        lease: QuotaLease,
        from: Instant,
    ) -> Result<[u64; 6], InvalidLimit> {
        let mut current = self.lock();
        let granted = self.shared_tree.lock().set_quota(self.node, limits, credit, lease, from)?;
        current.settings.limits = limits;
        drop(current);
        arm(self.shared_tree.admit_ready(reactor::now()));
        Ok(granted)
    }

    /// Renews the quota lease.
    pub fn renew_lease(&self, lease: QuotaLease) {
        self.shared_tree.lock().tree().set_lease(self.node, lease);
    }

    /// The quota lease, if its limits are part of a cluster-wide limit.
    pub fn quota_lease(&self) -> Option<QuotaLease> {
        self.shared_tree.lock().tree().lease(self.node)
    }

    /// Demand of its members that wait, or made requests since the last call.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn demand(&self) -> MemberDemands {
        let now = reactor::now();
        self.shared_tree.lock().tree().member_demands(self.node, now)
    }

    /// Reservation of the group: the larger of its setting and the sum inside, in operations and
    /// bytes per second.
    pub fn reserved(&self) -> [u64; 2] {
        self.shared_tree.lock().tree().reserved(self.node)
    }

    /// Counters of admitted requests, waiting requests and their throttle causes.
    ///
    /// Requests that no limit applies to, here or above or below, are not counted: they bypass the
    /// tree.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn stats(&self) -> ThrottleStats {
        let now = reactor::now();
        self.shared_tree.lock().tree().stats(self.node, now)
    }

    /// Its cumulative counters, for another process.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn counters(&self) -> CumulativeStats {
        let now = reactor::now();
        self.shared_tree.lock().tree().cumulative(self.node, now)
    }

    /// Adds the counters of another process.
    pub fn add_counters(&self, stats: &CumulativeStats) {
        self.shared_tree.lock().tree().add_cumulative(self.node, stats);
    }

    /// The part of [`ThrottleGroup::stats`] that is cheap to compute.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn brief_stats(&self) -> ThrottleSummary {
        let now = reactor::now();
        self.shared_tree.lock().tree().summary(self.node, now)
    }

    /// Levels of its buckets, for another process; `None` if it never had a limit.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn bucket_levels(&self) -> Option<BucketSnapshot> {
        self.shared_tree.lock().tree().snapshot(self.node, reactor::now())
    }

    /// Takes over the bucket levels of another process.
    ///
    /// # Errors
    /// [`InvalidLimit`] limits; nothing is changed.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn restore_levels(&self, levels: &BucketSnapshot) -> Result<(), InvalidLimit> {
        let now = reactor::now();
        self.shared_tree.lock().tree().restore(self.node, levels, now)?;
        arm(self.shared_tree.admit_ready(now));
        Ok(())
    }

    /// Number of its direct members, disks and groups.
    pub fn members(&self) -> usize {
        self.shared_tree.lock().tree().children(self.node).count()
    }

    /// Its watermark.
    pub fn watermark(&self) -> Watermark {
        self.lock().settings.watermark
    }

    /// Current enforcement of the group's limits, without those above and below.
    pub fn enforcement(&self) -> Enforcement {
        self.shared_tree.lock().tree().enforcement(self.node)
    }

    /// Enforcement by the watermark: a used-up quota is enforced at all times.
    pub fn watermark_enforcement(&self) -> Enforcement {
        self.shared_tree.lock().tree().set_enforcement(self.node)
    }

    /// Sets the enforcement of the group's limits, also for waiting requests. For the sampler of
    /// the device.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn enforce(&self, enforcement: Enforcement) {
        let now = reactor::now();
        self.shared_tree.lock().enforce(self.node, enforcement, now);
        arm(self.shared_tree.admit_ready(now));
    }

    /// Sets or removes the cap, also for waiting requests: a second set of limits, which a
    /// controller changes often. See
    /// [`policy::throttle::ThrottleTree::set_cap`].
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set_cap(&self, cap: Option<RateCap>) {
        let now = reactor::now();
        if self.shared_tree.lock().set_cap(self.node, cap.map(RateCap::limits), now) {
            arm(self.shared_tree.admit_ready(now));
        }
    }

    /// The cap in force.
    pub fn cap(&self) -> Option<Limits> {
        self.shared_tree.lock().tree().cap(self.node)
    }

    /// True if requests have waited for the cap since the last call, or wait for it now.
    pub fn take_cap_wait(&self) -> bool {
        self.shared_tree.lock().tree().take_cap_wait(self.node)
    }

    /// Sets the reservable capacity of the device below it, which bounds the reservations here and
    /// inside from now on.
    ///
    /// # Errors
    /// [`ThrottleError`] if the current reservations exceed it; nothing is changed then.
    pub fn set_device(&self, device: ReservableCapacity) -> Result<(), ThrottleError> {
        self.shared_tree.lock().tree().set_reservable(self.node, device)
    }

    /// Lifts all limits of its tree permanently: its own, those above and below, and those of all
    /// others there. Waiting requests are admitted, and later ones bypass the tree. For shutdown,
    /// so that requests in flight complete.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn lift_limits(&self) {
        arm(self.shared_tree.lift_limits(reactor::now()));
    }

    fn lock(&self) -> MutexGuard<'_, GroupTerms> {
        // Replaced as a whole, so a panic cannot leave it inconsistent.
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Settings of a group from which its limits in force are computed.
const fn configured_limits(settings: &GroupSettings) -> ConfiguredLimits {
    let &GroupSettings { limits, quota, share, .. } = settings;
    ConfiguredLimits { limits, quota, share, size_bytes: None }
}

impl Drop for ThrottleGroup {
    fn drop(&mut self) {
        // Members hold a reference, so there are none; and only disks have requests.
        let waiting = self.shared_tree.lock().remove(self.node);
        debug_assert!(waiting.is_empty(), "requests waited in a group itself");
    }
}
