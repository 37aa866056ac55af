//! A group by name: limits that several disks, or several groups, keep together.
//!
//! Groups nest: a disk's request passes its own limits, its group's, and those of every group
//! above, and all of them hold at once. A group lives as long as it has members, or somebody holds
//! it.
//!
//! Never knows which disks are in it, only their number: a disk knows its group.

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
    /// Its lock is taken before the arbiter's.
    settings: Mutex<GroupSettings>,
}

impl Group {
    /// A group with nothing in it, inside `parent` if there is one.
    ///
    /// # Errors
    /// [`Refused`]: limits that break a rule, or a reservation that `parent` cannot keep.
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

    /// The group it is in.
    pub fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    /// The settings in force.
    pub fn settings(&self) -> GroupSettings {
        *self.lock()
    }

    /// Puts other settings in force, also for the requests that wait: those that may pass do so at
    /// once. All of them or none.
    ///
    /// Other limits begin with empty buckets, as QEMU's do; limits that stay the same keep what has
    /// been charged.
    ///
    /// # Errors
    /// [`Refused`]: limits that break a rule, a reservation that the parent cannot keep, or
    /// reservations inside that would exceed the new limits. Everything stays as it was.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn set(&self, settings: GroupSettings) -> Result<(), Refused> {
        let now = reactor::now();
        let mut current = self.lock();
        let mut held = self.arbiter.lock();
        let is_lent = held.tree().lent(self.node).is_some();
        if is_lent && (settings.limits != current.limits || settings.watermark.percent() > 0) {
            return Err(Refused::Lent);
        }
        held.configure(self.node, settings.limits, settings.share, now)?;
        // What is lent stays.
        *current = GroupSettings { limits: held.tree().limits(self.node), ..settings };
        drop(held);
        drop(current);
        arm(self.arbiter.release(now));
        Ok(())
    }

    /// Puts a part of limits in force that are divided over hosts, as of that instant; `lent` says
    /// until when, and what holds then. [`Group::set`] does not change them any more. Returns the
    /// room for bursts that is given up: see [`policy::throttle::Tree::divide`].
    ///
    /// # Errors
    /// [`Invalid`] limits; nothing has changed.
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

    /// Says anew until when its limits hold, and what holds then.
    pub fn lend(&self, lent: Lent) {
        self.arbiter.lock().tree().lend(self.node, lent);
    }

    /// What is lent to it, if its limits are divided over hosts.
    pub fn lent(&self) -> Option<Lent> {
        self.arbiter.lock().tree().lent(self.node)
    }

    /// What its members want that wait, or asked since this was called last.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn wanted(&self) -> Wanted {
        let now = reactor::now();
        self.arbiter.lock().tree().wanted(self.node, now)
    }

    /// What is promised to it and inside, in operations and bytes per second.
    pub fn promised(&self) -> [u64; 2] {
        self.arbiter.lock().tree().promised(self.node)
    }

    /// What has passed here, what waits and for what.
    ///
    /// Requests that no limit holds for, here or above or below, are not counted: they do not ask.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn stats(&self) -> Stats {
        let now = reactor::now();
        self.arbiter.lock().tree().stats(self.node, now)
    }

    /// What it counts, for another process.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn counted(&self) -> Counted {
        let now = reactor::now();
        self.arbiter.lock().tree().counted(self.node, now)
    }

    /// Counts on from what another process has counted.
    pub fn count_on(&self, counted: &Counted) {
        self.arbiter.lock().tree().count_on(self.node, counted);
    }

    /// What of [`Group::stats`] costs next to nothing.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn brief(&self) -> Brief {
        let now = reactor::now();
        self.arbiter.lock().tree().brief(self.node, now)
    }

    /// How full its buckets are, for another process; `None` where it never had a limit.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn filled(&self) -> Option<Filled> {
        self.arbiter.lock().tree().filled(self.node, reactor::now())
    }

    /// Has its limits take over what has passed in another process.
    ///
    /// # Errors
    /// [`Invalid`] limits; nothing has changed.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn fill(&self, filled: &Filled) -> Result<(), Invalid> {
        let now = reactor::now();
        self.arbiter.lock().tree().fill(self.node, filled, now)?;
        arm(self.arbiter.release(now));
        Ok(())
    }

    /// How many disks and groups are in it, those inside its groups not counted.
    pub fn members(&self) -> usize {
        self.arbiter.lock().tree().children(self.node).count()
    }

    /// The watermark set for it.
    pub fn watermark(&self) -> Watermark {
        self.lock().watermark
    }

    /// How far its own limits are enforced.
    pub fn enforcement(&self) -> Enforcement {
        self.arbiter.lock().tree().enforcement(self.node)
    }

    /// Enforces its own limits so much from now on, also for the requests that wait. For whoever
    /// watches the device.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn enforce(&self, enforcement: Enforcement) {
        let now = reactor::now();
        self.arbiter.lock().enforce(self.node, enforcement, now);
        arm(self.arbiter.release(now));
    }

    /// Says what can be promised of the device below it: what is promised here and inside fits into
    /// it from now on.
    ///
    /// # Errors
    /// [`Refused`] if more is promised already; then nothing has changed.
    pub fn set_device(&self, device: Reservable) -> Result<(), Refused> {
        self.arbiter.lock().tree().set_device(self.node, device)
    }

    /// Lifts every limit in its tree for good: its own, those above and below, and those of all
    /// others there. What waits passes now, what comes is not asked. For the end, when what is in
    /// flight is to be finished.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn lift(&self) {
        arm(self.arbiter.lift(reactor::now()));
    }

    fn lock(&self) -> MutexGuard<'_, GroupSettings> {
        // Replaced as a whole.
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What is in it holds it, so nothing is; and only disks have requests.
        let waiting = self.arbiter.lock().remove(self.node);
        debug_assert!(waiting.is_empty(), "requests waited in a group itself");
    }
}
