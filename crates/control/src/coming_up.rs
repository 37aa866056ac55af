//! Unavailable disks: disks of the config whose storage did not answer at the start. They are
//! retried in the background.
//!
//! ```text
//!   start ─► not open after eight seconds ─► unavailable ─► the start continues without it
//!                                            │
//!                       open ─► listed with its exports, by the config of that moment
//!                         └ fails ─► reported, retried after ten seconds
//! ```
//!
//! A disk is listed while this task holds the same lock (`turns`) that reloads hold. A reload
//! includes unavailable disks: it updates their config, and abandons those that the file no longer
//! contains. A client that removes such a disk abandons it as well. The name stays reserved.

use std::rc::{Rc, Weak};

use anyhow::{anyhow, ensure};
use api::UnavailableDisk;
use image::Image;
use policy::time::Duration;
use settings::{PlacedDisk, DesiredState};
use storage::rate::RateBudgets;

use super::{
    opening::{Opened, Opening, Silent, State},
    reconcile::{Difference, Occasion, Reconciliation, source::Fresh},
    registry::{Door, Registry, RunningExport},
    unopened::Unopened,
    wanted::{self, Wanted, Way},
};
use crate::events::{Kind, News};

/// Interval between two attempts to open an image.
const AGAIN: Duration = Duration::from_secs(10);

impl Registry {
    /// Continues without a disk of the plan and retries it in the background.
    pub(crate) fn put_off(self: &Rc<Self>, (name, plan): (&str, Rc<DesiredState>), silent: Silent) {
        let Silent { opening, since, state } = silent;
        let one = Rc::new(Unopened::new(name, since, plan));
        let first = match state {
            State::Trying(opened) => Some(opened),
            State::Failed(error) => {
                one.why.replace(Some(format!("{error:#}")));
                None
            }
        };
        self.bring_up(name, one, (opening, first));
    }

    fn bring_up(self: &Rc<Self>, name: &str, one: Rc<Unopened>, way: (Opening, Option<Opened>)) {
        let task = bring_up(Rc::downgrade(self), name.to_owned(), Rc::clone(&one), way);
        one.task.replace(Some(reactor::spawn_joinable(task)));
        if let Some(before) = self.disks.unavailable.borrow_mut().insert(name.to_owned(), one) {
            before.give_up();
        }
    }

    /// Reports the disks that the start continues without.
    pub fn tell_unopened(&self) {
        let all: Vec<_> = self.disks.unavailable.borrow().keys().cloned().collect();
        all.iter().for_each(|name| self.tell_of_unopened(name));
    }

    pub(super) fn tell_of_unopened(&self, name: &str) {
        let Some(one) = self.disks.unavailable.borrow().get(name).cloned() else { return };
        let why = one.why.borrow().clone();
        let image = one.planned().image.to_string();
        let message = match &why {
            None => format!("disk {name}: {image} does not answer; everything else is served meanwhile"),
            Some(why) => {
                format!("disk {name}: cannot be opened, retrying every {} s: {why}", AGAIN.as_secs())
            }
        };
        let news = News::new(Kind::DiskUnopened, message).of_disk(name);
        self.events.tell(news.with("image", image).with("reason", why));
    }

    /// True if this attempt is still the current one for the name.
    fn awaits(&self, name: &str, one: &Rc<Unopened>) -> bool {
        self.disks.unavailable.borrow().get(name).is_some_and(|known| Rc::ptr_eq(known, one))
    }

    /// Lists a disk whose image is now open, with its exports. Atomic.
    async fn list_unopened(
        self: &Rc<Self>,
        name: &str,
        one: &Rc<Unopened>,
        image: Image,
    ) -> anyhow::Result<()> {
        ensure!(!self.lifecycle.leaving.get(), "an upgrade is in progress");
        let (planned, plan) = (one.planned(), one.plan.borrow().clone());
        let difference = Difference::of_disk(&plan, name);
        // Without a difference the config no longer contains the disk; dropping the image closes
        // it.
        let images = difference.new_disks.first().map(|&index| (index, image)).into_iter().collect();
        let _arrival = self.arrival(name)?;
        // Before `apply`, which checks that the name is free.
        self.disks.unavailable.borrow_mut().remove(name);
        let mut work = Reconciliation::new(Occasion::Retry, self, &plan, None, RateBudgets::default());
        work.apply(&difference, images, &mut Fresh).await?;
        // Booked after listing, with failure tolerated: the disk was part of a start that
        // succeeded.
        self.promise_late(name, [planned.settings.iops_reservation, planned.settings.bps_reservation]);
        if let Some(cluster) = self.cluster() {
            cluster.record_lowered_reservations(&**self);
        }
        tracing::info!(disk = name, after_s = one.age(reactor::now()).as_secs(), "its image is open now");
        Ok(())
    }

    /// Puts a disk back into the retry queue after listing it failed, and removes its remains.
    async fn wait_again(self: &Rc<Self>, name: &str, one: &Rc<Unopened>) {
        let place = |export: Rc<RunningExport>| match &export.door {
            Door::Nbd(serving, number) => Some((Rc::clone(serving), export.name.clone(), *number)),
            Door::Own(..) => None,
        };
        let places: Vec<_> = self.exports.of_disk(name).into_iter().filter_map(place).collect();
        // First, so that the server keeps the export's position for the next attempt.
        places.iter().for_each(|(serving, name, number)| serving.server.reserve_again(name, *number));
        if self.disks.get(name).is_ok()
            && let Err(error) = self.take_back(name).await
        {
            tracing::error!(
                "disk {name}: could not be added completely, and its remains could not be removed: {error}"
            );
            places.iter().for_each(|(serving, name, _)| serving.server.release_reserved(name));
            return;
        }
        // A client may have added another disk with this name in the meantime.
        if self.check_name(name).is_ok() {
            self.disks.unavailable.borrow_mut().insert(name.to_owned(), Rc::clone(one));
        }
    }

    /// Configs of all unavailable disks.
    pub(super) fn unopened_disks(&self) -> Vec<PlacedDisk> {
        self.disks.unavailable.borrow().values().map(|one| one.planned()).collect()
    }

    /// Applies a new config to an unavailable disk. A new `opening` replaces the running attempt.
    pub(super) fn plan_unopened(self: &Rc<Self>, name: &str, plan: Rc<DesiredState>, opening: Option<Opening>) {
        let Some(one) = self.disks.unavailable.borrow().get(name).cloned() else { return };
        // Positions of exports that the new plan lacks are released before the plan is replaced.
        let wanted = Wanted::all(&plan);
        self.expect_no_more(name, &one, |old| !wanted.contains(old));
        match opening {
            None => drop(one.plan.replace(plan)),
            Some(opening) => {
                self.bring_up(name, Rc::new(Unopened::new(name, one.since, plan)), (opening, None));
            }
        }
    }

    /// Abandons an unavailable disk. Returns false if there is none with this name.
    pub(crate) fn give_up_unopened(&self, name: &str) -> bool {
        let Some(one) = self.disks.unavailable.borrow_mut().remove(name) else { return false };
        one.give_up();
        self.expect_no_more(name, &one, |_| true);
        true
    }

    /// Releases the positions that NBD servers hold for exports which are no longer planned.
    fn expect_no_more(&self, name: &str, one: &Unopened, is_gone: impl Fn(&Wanted) -> bool) {
        let wanted = Wanted::all(&one.plan.borrow());
        for export in wanted.iter().filter(|export| export.disk == name && is_gone(export)) {
            if let Way::Nbd { endpoint, name, .. } = &export.way
                && let Some(serving) = wanted::server(self, endpoint)
            {
                serving.server.release_reserved(name);
            }
        }
    }

    /// Unavailable disks, for `weir status`.
    pub(super) fn unavailable_disks(&self) -> Vec<UnavailableDisk> {
        let now = reactor::now();
        self.disks.unavailable.borrow().values().map(|one| one.status(now)).collect()
    }
}

/// Opens the image, retrying as long as necessary, and lists its disk.
async fn bring_up(
    registry: Weak<Registry>,
    name: String,
    one: Rc<Unopened>,
    (opening, mut first): (Opening, Option<Opened>),
) {
    loop {
        // The migration's target may hold the disk although the lock of this host's image is free
        // again: a dead host loses its lock.
        let moved = registry.upgrade().and_then(|registry| registry.cluster()?.moved_to(&name));
        let opened = match first.take() {
            _ if moved.is_some() => Err(anyhow!("the disk has moved to host {}", moved.unwrap_or_default())),
            Some(first) => first.await,
            None => opening.clone().open().await,
        };
        // Weak until here: a task that waits for storage must not keep the registry alive.
        let Some(registry) = registry.upgrade() else { return };
        // The lock is released before the sleep below; a reload may run between two attempts.
        let listed = {
            let _turn = registry.lifecycle.turns.take().await;
            if registry.lifecycle.ending.get() || !registry.awaits(&name, &one) {
                return;
            }
            match opened {
                Ok(image) => registry.list_unopened(&name, &one, image).await,
                Err(error) => Err(error),
            }
        };
        let Err(error) = listed else { return };
        if !registry.awaits(&name, &one) {
            registry.wait_again(&name, &one).await;
        }
        let why = format!("{error:#}");
        // Reported once per reason, not once per attempt.
        if one.why.borrow().as_ref() != Some(&why) {
            one.why.replace(Some(why));
            registry.tell_of_unopened(&name);
        }
        drop(registry);
        reactor::sleep_until(reactor::now() + AGAIN).await;
    }
}
