//! Disks of the config that come up after the start, because what they lie on did not answer.
//!
//! ```text
//!   start ─► not open in eight seconds ─► put off ─► the start goes on without it
//!                                            │
//!                       open ─► listed, with its exports, as the config has it by then
//!                         └ fails ─► told, and tried again in ten seconds
//! ```
//!
//! Listed in the turn of a reload, which has them in mind: what the file says of them now holds
//! once they are open, and those that it does not have any more are given up. So does who removes
//! one. The name stays its own.

#[cfg(test)]
mod tests;

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
        let (planned, plan) = (one.planned(), one.plan());
        let difference = Difference::of_disk(&plan, name);
        // Without a difference the config no longer contains the disk; dropping the image closes
        // it.
        let images = difference.new_disks.first().map(|&index| (index, image)).into_iter().collect();
        let _arrival = self.arrival(name)?;
        // Before `apply`, which checks that the name is free.
        self.disks.unavailable.borrow_mut().remove(name);
        let mut work = Reconciliation::new(Occasion::Retry, self, &plan, None, RateBudgets::default());
        if let Err(error) = work.apply(&difference, images, &mut Fresh).await {
            self.wait_again(name, one, &mut work).await;
            return Err(error);
        }
        // Booked after listing, with failure tolerated: the disk was part of a start that
        // succeeded.
        self.promise_late(name, [planned.settings.iops_reservation, planned.settings.bps_reservation]);
        if let Some(cluster) = self.cluster() {
            cluster.record_lowered_reservations(&**self);
        }
        tracing::info!(disk = name, after_s = one.age(reactor::now()).as_secs(), "its image is open now");
        Ok(())
    }

    /// Rolls back the steps of a retry that failed, and has the disk wait again. No event reports
    /// any of it: the disk still arrives.
    async fn wait_again(self: &Rc<Self>, name: &str, one: &Rc<Unopened>, work: &mut Reconciliation<'_>) {
        let place = |export: Rc<RunningExport>| match &export.door {
            Door::Nbd(serving, number) => Some((Rc::clone(serving), export.name.clone(), *number)),
            Door::Own(..) => None,
        };
        let places: Vec<_> = self.exports.of_disk(name).into_iter().filter_map(place).collect();
        // First, so that the server keeps the export's position for the next attempt.
        places.iter().for_each(|(serving, name, number)| serving.server.reserve_again(name, *number));
        work.undo().await;
        if self.disks.get(name).is_ok() {
            tracing::error!("disk {name}: could not be added completely, and its remains could not be removed");
            places.iter().for_each(|(serving, name, _)| serving.server.release_reserved(name));
            return;
        }
        // A client may have added another disk with this name in the meantime.
        self.disks.unavailable.borrow_mut().insert(name.to_owned(), Rc::clone(one));
    }

    /// Configs of all unavailable disks.
    pub(super) fn unopened_disks(&self) -> Vec<PlacedDisk> {
        self.disks.unavailable.borrow().values().map(|one| one.planned()).collect()
    }

    /// What the config file says now holds for one of them, which is opened in another way from now
    /// on if there is one.
    pub(super) fn plan_unopened(
        self: &Rc<Self>,
        name: &str,
        plan: Rc<DesiredState>,
        way: Option<(Opening, Option<Opened>)>,
    ) {
        let Some(one) = self.disks.unavailable.borrow().get(name).cloned() else { return };
        // Positions of exports that the new plan lacks are released before the plan is replaced.
        let wanted = Wanted::of_disk(&plan, name);
        self.expect_no_more(name, &one, |old| !wanted.contains(old));
        match way {
            None => one.plan_anew(plan),
            Some(way) => self.bring_up(name, Rc::new(Unopened::new(name, one.since, plan)), way),
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
        for export in Wanted::of_disk(&one.plan(), name).iter().filter(|export| is_gone(export)) {
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
            return;
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
