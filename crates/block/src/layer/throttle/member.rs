//! A disk's side of throttling: its own settings, its group, and the waits of its requests.
//!
//! Never reorders a disk's requests of one direction, and never drops one. Dropping a request's
//! task cancels the request.

use std::sync::{Arc, MutexGuard};

use policy::{
    latency_target::RateCap,
    request::Direction,
    schedule::ScheduledLimits,
    throttle::{
        BucketSnapshot, CumulativeStats, Enforcement, InvalidLimit, LevelCause, Limits, RequestCost,
        SpareRefund, ThrottleError, ThrottleStats, ThrottleSummary,
    },
    time::Instant,
    watermark::Watermark,
};

use super::{
    group::ThrottleGroup,
    settings::DiskSettings,
    slot::{AdmitOutcome, SlotDestination, SlotLocation, ThrottleSlot},
    timer::arm,
    tree::SharedThrottleTree,
};

type MemberLocation<'a> = MutexGuard<'a, SlotLocation<Option<Arc<ThrottleGroup>>>>;

/// A disk in a throttle tree. Leaves its group when dropped.
#[derive(Debug)]
pub struct ThrottleMember {
    slot: ThrottleSlot<Option<Arc<ThrottleGroup>>>,
}

impl ThrottleMember {
    /// Adds a disk of this size to `group`, or to a new tree.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or a reservation that does not fit into the group.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn new(
        settings: DiskSettings,
        size_bytes: u64,
        group: Option<&Arc<ThrottleGroup>>,
    ) -> Result<Self, ThrottleError> {
        Ok(Self { slot: ThrottleSlot::new(settings, size_bytes, destination(group), reactor::now())? })
    }

    /// Settings as they were given. [`ThrottleMember::limits`] are those in force.
    pub fn settings(&self) -> DiskSettings {
        self.slot.lock().settings
    }

    /// Schedule of its limits, with the entry that holds.
    pub fn scheduled(&self) -> ScheduledLimits {
        self.slot.lock().scheduled.clone()
    }

    /// Changes the schedule of its limits, or the entry that holds. The settings stay.
    ///
    /// # Errors
    /// [`ThrottleError`]: an entry contradicts the settings, or a reservation does not fit into the
    /// limits of the entry. Nothing is changed then.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set_scheduled(&self, scheduled: ScheduledLimits) -> Result<(), ThrottleError> {
        self.change(None, Some(scheduled))
    }

    /// Limits in force, at this time and at the size of the disk.
    pub fn limits(&self) -> Limits {
        let location = self.slot.lock();
        location.shared_tree.lock().tree().limits(location.node)
    }

    /// Sets the size of the disk, which its limits may follow. A limit for each GiB is at least the
    /// reservation of the disk. Concurrent calls take `size_bytes` in order, so that the last one
    /// puts the limits of the present size in force.
    ///
    /// # Errors
    /// [`ThrottleError`] if a reservation does not fit into the limits at this size, or the
    /// settings contradict the schedule. The previous limits stay in force until the settings are
    /// changed.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set_size(&self, size_bytes: impl FnOnce() -> u64) -> Result<(), ThrottleError> {
        let mut location = self.slot.lock();
        let size_bytes = size_bytes();
        if size_bytes == location.size_bytes {
            return Ok(());
        }
        location.size_bytes = size_bytes;
        let (settings, scheduled) = (location.settings, location.scheduled.clone());
        configure(location, settings, scheduled)
    }

    /// Changes the settings, also for waiting requests, which are admitted at once if possible. All
    /// of them or none.
    ///
    /// Charges carry over to the new limits: a change grants no burst. (QEMU's begin with empty
    /// buckets.)
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or a reservation that does not fit into the group.
    /// Nothing is changed then.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set(&self, settings: DiskSettings) -> Result<(), ThrottleError> {
        self.change(Some(settings), None)
    }

    /// Changes what is given.
    fn change(
        &self,
        settings: Option<DiskSettings>,
        scheduled: Option<ScheduledLimits>,
    ) -> Result<(), ThrottleError> {
        // Settings and tree change under the slot's lock, so a move cannot come in between.
        let location = self.slot.lock();
        let settings = settings.unwrap_or(location.settings);
        let scheduled = scheduled.unwrap_or_else(|| location.scheduled.clone());
        configure(location, settings, scheduled)
    }

    /// Its group.
    pub fn group(&self) -> Option<Arc<ThrottleGroup>> {
        self.slot.lock().owner_data.clone()
    }

    /// Moves from its group to `group`, or to none. Waiting requests move along in order, and are
    /// admitted at once if possible.
    ///
    /// The disk's limits keep their charges, and those of `group` are charged with the most that it
    /// may have used under those of the old group: a move grants no burst. Its counters restart in
    /// the new tree, and [`ThrottleMember::stats`] adds them up.
    ///
    /// # Errors
    /// [`ThrottleError`] if its reservation does not fit into `group`; then it does not move.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn move_to(&self, group: Option<&Arc<ThrottleGroup>>) -> Result<(), ThrottleError> {
        if !self.is_in(group) {
            let timers = self.slot.move_to(destination(group), None, None, reactor::now())?;
            timers.into_iter().for_each(arm);
        }
        Ok(())
    }

    /// Changes settings and moves to `group`, or out of any: both or neither, as
    /// [`ThrottleMember::set`] and [`ThrottleMember::move_to`] do.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or a reservation that does not fit into `group`. Nothing
    /// is changed then.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn configure_and_move(
        &self,
        settings: DiskSettings,
        group: Option<&Arc<ThrottleGroup>>,
    ) -> Result<(), ThrottleError> {
        self.place(settings, None, group)
    }

    /// As [`ThrottleMember::configure_and_move`], also with another schedule if one is given.
    ///
    /// # Errors
    /// As there, or an entry of the schedule contradicts the settings.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn place(
        &self,
        settings: DiskSettings,
        scheduled: Option<ScheduledLimits>,
        group: Option<&Arc<ThrottleGroup>>,
    ) -> Result<(), ThrottleError> {
        if self.is_in(group) {
            return self.change(Some(settings), scheduled);
        }
        let timers = self.slot.move_to(destination(group), Some(settings), scheduled, reactor::now())?;
        timers.into_iter().for_each(arm);
        Ok(())
    }

    fn is_in(&self, group: Option<&Arc<ThrottleGroup>>) -> bool {
        match (&self.slot.lock().owner_data, group) {
            (Some(current), Some(group)) => Arc::ptr_eq(current, group),
            (None, None) => true,
            _ => false,
        }
    }

    /// Counters of admitted requests, waiting requests and their throttle causes, among the disk's
    /// own limits and all above.
    ///
    /// Requests that no limit applies to are not counted: they bypass the tree.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn stats(&self) -> ThrottleStats {
        self.slot.stats(reactor::now())
    }

    /// Its cumulative counters, for another process.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn counters(&self) -> CumulativeStats {
        self.slot.counters(reactor::now())
    }

    /// Adds the counters of another process.
    pub fn add_counters(&self, stats: &CumulativeStats) {
        self.slot.add_counters(stats);
    }

    /// The part of [`ThrottleMember::stats`] that is cheap to compute.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn brief_stats(&self) -> ThrottleSummary {
        self.slot.brief(reactor::now())
    }

    /// Levels of the disk's buckets, for another process; `None` if it never had a limit.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn bucket_levels(&self) -> Option<BucketSnapshot> {
        let location = self.slot.lock();
        location.shared_tree.lock().tree().snapshot(location.node, reactor::now())
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
        let location = self.slot.lock();
        location.shared_tree.lock().tree().restore(location.node, levels, now)?;
        let shared_tree = Arc::clone(&location.shared_tree);
        drop(location);
        arm(shared_tree.admit_ready(now));
        Ok(())
    }

    /// Watermark of the disk itself.
    pub fn watermark(&self) -> Watermark {
        self.settings().watermark
    }

    /// Current enforcement of the disk's limits.
    pub fn enforcement(&self) -> Enforcement {
        let location = self.slot.lock();
        location.shared_tree.lock().tree().enforcement(location.node)
    }

    /// Enforcement by the watermark: a used-up quota is enforced at all times.
    pub fn watermark_enforcement(&self) -> Enforcement {
        let location = self.slot.lock();
        location.shared_tree.lock().tree().set_enforcement(location.node)
    }

    /// Sets the enforcement of the disk's limits, also for waiting requests. For the sampler of the
    /// device.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn enforce(&self, enforcement: Enforcement) {
        let now = reactor::now();
        let location = self.slot.lock();
        location.shared_tree.lock().enforce(location.node, enforcement, now);
        let shared_tree = Arc::clone(&location.shared_tree);
        drop(location);
        arm(shared_tree.admit_ready(now));
    }

    /// Sets or removes the cap, also for waiting requests: a second set of limits, which a
    /// controller changes often, and which a move to another group removes. See
    /// [`policy::throttle::ThrottleTree::set_cap`].
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn set_cap(&self, cap: Option<RateCap>) {
        let now = reactor::now();
        let location = self.slot.lock();
        if location.shared_tree.lock().set_cap(location.node, cap.map(RateCap::limits), now) {
            admit_ready(location, now);
        }
    }

    /// The cap in force.
    pub fn cap(&self) -> Option<Limits> {
        let location = self.slot.lock();
        location.shared_tree.lock().tree().cap(location.node)
    }

    /// True if requests have waited for the cap since the last call, or wait for it now.
    pub fn take_cap_wait(&self) -> bool {
        let location = self.slot.lock();
        location.shared_tree.lock().tree().take_cap_wait(location.node)
    }

    /// Lifts all limits of its tree permanently: its own, those of its groups, and those of all
    /// others there. Waiting requests are admitted, and later ones bypass the tree. For shutdown,
    /// so that requests in flight complete.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn lift_limits(&self) {
        let shared_tree = Arc::clone(&self.slot.lock().shared_tree);
        arm(shared_tree.lift_limits(reactor::now()));
    }

    /// Waits until a request of this direction and cost is admitted, and charges it. Dropping the
    /// future before cancels the request. Returns the throttle cause, if it waited.
    pub async fn admit(&self, direction: Direction, cost: RequestCost) -> Option<LevelCause> {
        if self.slot.is_unlimited() {
            return None;
        }
        // The clock of the reactor's turn: most requests are admitted at once and save reading it.
        if let AdmitOutcome::Waiting(admission, shared_tree) =
            self.slot.admit(direction, cost, reactor::coarse_now())
        {
            arm(shared_tree.admit_ready(reactor::now()));
            drop(shared_tree);
            return admission.await;
        }
        None
    }

    /// Charges a request that must not wait and is admitted in any case: later requests wait for
    /// it.
    pub fn charge_unconditionally(&self, direction: Direction, cost: &RequestCost) {
        if !self.slot.is_unlimited() {
            self.slot.charge_unconditionally(direction, cost, reactor::coarse_now());
        }
    }

    /// Asks for admission of a batch of requests, in order and without waiting, and charges those
    /// that are admitted. `on_decision` is called for each under the locks: it must not call this
    /// member.
    pub fn try_admit_batch(
        &self,
        requests: impl Iterator<Item = (Direction, RequestCost)>,
        mut on_decision: impl FnMut(&RequestCost, bool),
    ) {
        if self.slot.is_unlimited() {
            return requests.for_each(|(_, cost)| on_decision(&cost, true));
        }
        self.slot.try_admit_batch(requests, reactor::coarse_now(), on_decision);
    }

    /// Asks for a read-ahead of this cost. If it is admitted, it is charged to spare capacity of
    /// its groups, which no request waits for. If not, it must be dropped: there is no later
    /// admission.
    ///
    /// `refund` is the cost of requests served from the prefetch cache since the last call. It
    /// is recorded in either case, so the caller begins a new sum. If nothing is limited it is
    /// ignored, and nothing was charged.
    ///
    /// Waits for short locks only; does not allocate, and wakes no task.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn try_read_ahead(&self, cost: &RequestCost, refund: SpareRefund) -> bool {
        // The turn's clock is never ahead of another thread's. If it is behind, a read-ahead may be
        // rejected unnecessarily.
        self.slot.is_unlimited() || self.slot.try_read_ahead(cost, refund, reactor::coarse_now())
    }

    /// As [`ThrottleMember::try_read_ahead`], for background work of this cost, which asks again if
    /// it is refused. A cap that refuses it counts as [waited for](ThrottleMember::take_cap_wait).
    ///
    /// # Errors
    /// The limit or cap without spare capacity, if it is known.
    pub(super) fn try_background(&self, cost: &RequestCost) -> Result<(), Option<LevelCause>> {
        if self.slot.is_unlimited() {
            return Ok(());
        }
        self.slot.try_background(cost, reactor::coarse_now())
    }
}

/// Puts settings and a schedule in force, also for waiting requests.
fn configure(
    mut location: MemberLocation<'_>,
    settings: DiskSettings,
    scheduled: ScheduledLimits,
) -> Result<(), ThrottleError> {
    let now = reactor::now();
    location.configure(settings, scheduled, now)?;
    admit_ready(location, now);
    Ok(())
}

/// Admits the requests that a change has made ready, after the lock is released.
fn admit_ready(location: MemberLocation<'_>, now: Instant) {
    let shared_tree = Arc::clone(&location.shared_tree);
    drop(location);
    arm(shared_tree.admit_ready(now));
}

fn destination(group: Option<&Arc<ThrottleGroup>>) -> SlotDestination<Option<Arc<ThrottleGroup>>> {
    match group {
        Some(group) => SlotDestination {
            shared_tree: Arc::clone(&group.shared_tree),
            parent: Some(group.node),
            owner_data: Some(Arc::clone(group)),
        },
        None => SlotDestination {
            shared_tree: SharedThrottleTree::new(reactor::now()),
            parent: None,
            owner_data: None,
        },
    }
}
