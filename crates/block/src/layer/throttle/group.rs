//! A named group: limits that several disks, or several groups, share.
//!
//! Groups nest: a disk's request must be admitted by its own limits, its group's, and those of
//! every group above. A group exists as long as it has members, or is referenced.
//!
//! A group has no references to its disks, only their number: a disk references its group.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use policy::{
    throttle::{
        Brief, Counted, Enforcement, Filled, Invalid, Lent, Limits, NodeId, Refused, Reservable, Stats,
        Wanted,
    },
    time::Instant,
    watermark::Watermark,
};

use super::{arbiter::Arbiter, settings::GroupSettings, timer::arm};

/// Disks and groups that share one set of limits.
#[derive(Debug)]
pub struct Group {
    name: Arc<str>,
    parent: Option<Arc<Group>>,
    pub(super) arbiter: Arc<Arbiter>,
    pub(super) node: NodeId,
    /// Locked before the arbiter.
    settings: Mutex<GroupSettings>,
}

impl Group {
    /// Creates an empty group, inside `parent` if there is one.
    ///
    /// # Errors
    /// [`Refused`]: invalid limits, or a reservation that does not fit into `parent`.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(
        name: &str,
        settings: GroupSettings,
        parent: Option<&Arc<Self>>,
    ) -> Result<Arc<Self>, Refused> {
        let now = reactor::now();
        let arbiter = parent.map_or_else(|| Arbiter::new(now), |parent| Arc::clone(&parent.arbiter));
        let GroupSettings { limits, share, .. } = settings;
        let node = arbiter.lock().add(None, parent.map(|parent| parent.node), limits, share, None, now)?;
        let parent = parent.cloned();
        Ok(Arc::new(Self { name: name.into(), parent, arbiter, node, settings: Mutex::new(settings) }))
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The group that contains it.
    pub fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    /// Settings in force.
    pub fn settings(&self) -> GroupSettings {
        *self.lock()
    }

    /// Changes the settings, also for waiting requests, which are admitted at once if possible. All
    /// of them or none.
    ///
    /// Charges carry over to the new limits: a change grants no burst. (QEMU's begin with empty
    /// buckets.)
    ///
    /// # Errors
    /// [`Refused`]: invalid limits, a reservation that does not fit into the parent, or
    /// reservations inside that exceed the new limits. Nothing is changed then.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn set(&self, settings: GroupSettings) -> Result<(), Refused> {
        let now = reactor::now();
        let mut current = self.lock();
        // Lock order: the settings before the arbiter.
        let mut held = self.arbiter.lock();
        let is_lent = held.tree().lent(self.node).is_some();
        if is_lent && (settings.limits != current.limits || settings.watermark.percent() > 0) {
            return Err(Refused::Lent);
        }
        held.configure(self.node, settings.limits, settings.share, now)?;
        // Under a quota lease the leased limits stay in force.
        *current = GroupSettings { limits: held.tree().limits(self.node), ..settings };
        drop(held);
        drop(current);
        arm(self.arbiter.release(now));
        Ok(())
    }

    /// Puts the host's quota of a cluster-wide limit in force, as of the instant `from`; `lent` is
    /// the quota lease. [`Group::set`] does not change the limits any more. Returns the burst
    /// capacity that is given up: see [`policy::throttle::Tree::divide`].
    ///
    /// # Errors
    /// [`Invalid`] limits; nothing is changed.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn divide(
        &self,
        limits: Limits,
        credit: [u64; 6],
        lent: Lent,
        from: Instant,
    ) -> Result<[u64; 6], Invalid> {
        let mut current = self.lock();
        let given = self.arbiter.lock().divide(self.node, limits, credit, lent, from)?;
        current.limits = limits;
        drop(current);
        arm(self.arbiter.release(reactor::now()));
        Ok(given)
    }

    /// Renews the quota lease.
    pub fn lend(&self, lent: Lent) {
        self.arbiter.lock().tree().lend(self.node, lent);
    }

    /// The quota lease, if its limits are part of a cluster-wide limit.
    pub fn lent(&self) -> Option<Lent> {
        self.arbiter.lock().tree().lent(self.node)
    }

    /// Demand of its members that wait, or made requests since the last call.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn wanted(&self) -> Wanted {
        let now = reactor::now();
        self.arbiter.lock().tree().wanted(self.node, now)
    }

    /// Reservation of the group: the larger of its setting and the sum inside, in operations and
    /// bytes per second.
    pub fn promised(&self) -> [u64; 2] {
        self.arbiter.lock().tree().promised(self.node)
    }

    /// Counters of admitted requests, waiting requests and their throttle causes.
    ///
    /// Requests that no limit applies to, here or above or below, are not counted: they bypass the
    /// tree.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn stats(&self) -> Stats {
        let now = reactor::now();
        self.arbiter.lock().tree().stats(self.node, now)
    }

    /// Its cumulative counters, for another process.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn counted(&self) -> Counted {
        let now = reactor::now();
        self.arbiter.lock().tree().counted(self.node, now)
    }

    /// Adds the counters of another process.
    pub fn count_on(&self, counted: &Counted) {
        self.arbiter.lock().tree().count_on(self.node, counted);
    }

    /// The part of [`Group::stats`] that is cheap to compute.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn brief(&self) -> Brief {
        let now = reactor::now();
        self.arbiter.lock().tree().brief(self.node, now)
    }

    /// Levels of its buckets, for another process; `None` if it never had a limit.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn filled(&self) -> Option<Filled> {
        self.arbiter.lock().tree().filled(self.node, reactor::now())
    }

    /// Takes over the bucket levels of another process.
    ///
    /// # Errors
    /// [`Invalid`] limits; nothing is changed.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn fill(&self, filled: &Filled) -> Result<(), Invalid> {
        let now = reactor::now();
        self.arbiter.lock().tree().fill(self.node, filled, now)?;
        arm(self.arbiter.release(now));
        Ok(())
    }

    /// Number of its direct members, disks and groups.
    pub fn members(&self) -> usize {
        self.arbiter.lock().tree().children(self.node).count()
    }

    /// Its watermark.
    pub fn watermark(&self) -> Watermark {
        self.lock().watermark
    }

    /// Current enforcement of the group's limits, without those above and below.
    pub fn enforcement(&self) -> Enforcement {
        self.arbiter.lock().tree().enforcement(self.node)
    }

    /// Sets the enforcement of the group's limits, also for waiting requests. For the sampler of
    /// the device.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn enforce(&self, enforcement: Enforcement) {
        let now = reactor::now();
        self.arbiter.lock().enforce(self.node, enforcement, now);
        arm(self.arbiter.release(now));
    }

    /// Sets the reservable capacity of the device below it, which bounds the reservations here and
    /// inside from now on.
    ///
    /// # Errors
    /// [`Refused`] if the current reservations exceed it; nothing is changed then.
    pub fn set_device(&self, device: Reservable) -> Result<(), Refused> {
        self.arbiter.lock().tree().set_device(self.node, device)
    }

    /// Lifts all limits of its tree for good: its own, those above and below, and those of all
    /// others there. Waiting requests are admitted, and later ones bypass the tree. For shutdown,
    /// so that requests in flight complete.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn lift(&self) {
        arm(self.arbiter.lift(reactor::now()));
    }

    fn lock(&self) -> MutexGuard<'_, GroupSettings> {
        // Replaced as a whole, so a panic cannot leave it inconsistent.
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Members hold a reference, so there are none; and only disks have requests.
        let waiting = self.arbiter.lock().remove(self.node);
        debug_assert!(waiting.is_empty(), "requests waited in a group itself");
    }
}
