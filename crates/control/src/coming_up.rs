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

/// How long until an image is opened again that could not be.
const AGAIN: Duration = Duration::from_secs(10);

impl Registry {
    /// Goes on without a disk of the plan.
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

    /// Tells of those that a start goes on without.
    pub fn tell_unopened(&self) {
        let all: Vec<_> = self.disks.unavailable.borrow().keys().cloned().collect();
        all.iter().for_each(|name| self.tell_of_unopened(name));
    }

    pub(super) fn tell_of_unopened(&self, name: &str) {
        let Some(one) = self.disks.unavailable.borrow().get(name).cloned() else { return };
        let why = one.why.borrow().clone();
        let image = one.planned().image.to_string();
        let message = match &why {
            None => format!(
                "disk {name}: {image} does not answer, and is not open yet: all else is served meanwhile"
            ),
            Some(why) => {
                format!(
                    "disk {name}: it cannot be opened, and is tried again each {} s: {why}",
                    AGAIN.as_secs()
                )
            }
        };
        let news = News::new(Kind::DiskUnopened, message).of_disk(name);
        self.events.tell(news.with("image", image).with("reason", why));
    }

    /// Whether it is this one that is to come up.
    fn awaits(&self, name: &str, one: &Rc<Unopened>) -> bool {
        self.disks.unavailable.borrow().get(name).is_some_and(|known| Rc::ptr_eq(known, one))
    }

    /// Lists a disk whose image is open now, with its exports: whole or not at all.
    async fn list_unopened(
        self: &Rc<Self>,
        name: &str,
        one: &Rc<Unopened>,
        image: Image,
    ) -> anyhow::Result<()> {
        ensure!(!self.lifecycle.leaving.get(), "another weir is about to take over");
        let (planned, plan) = (one.planned(), one.plan.borrow().clone());
        let difference = Difference::of_disk(&plan, name);
        let images = difference.new_disks.first().map(|&index| (index, image)).into_iter().collect();
        let _arrival = self.arrival(name)?;
        self.disks.unavailable.borrow_mut().remove(name);
        let mut work = Reconciliation::new(Occasion::Retry, self, &plan, None, RateBudgets::default());
        work.apply(&difference, images, &mut Fresh).await?;
        self.promise_late(name, [planned.settings.iops_reservation, planned.settings.bps_reservation]);
        if let Some(cluster) = self.cluster() {
            cluster.record_lowered_reservations(&**self);
        }
        tracing::info!(disk = name, after_s = one.age(reactor::now()).as_secs(), "its image is open now");
        Ok(())
    }

    /// Has one that did not come whole wait again. What was there of it may take its time to go.
    async fn wait_again(self: &Rc<Self>, name: &str, one: &Rc<Unopened>) {
        let place = |export: Rc<RunningExport>| match &export.door {
            Door::Nbd(serving, number) => Some((Rc::clone(serving), export.name.clone(), *number)),
            Door::Own(..) => None,
        };
        let places: Vec<_> = self.exports.of_disk(name).into_iter().filter_map(place).collect();
        // First: nobody gets another in between.
        places.iter().for_each(|(serving, name, number)| serving.server.reserve_again(name, *number));
        if self.disks.get(name).is_ok()
            && let Err(error) = self.take_back(name).await
        {
            tracing::error!("disk {name}: it did not come whole, and what is there of it stays: {error}");
            places.iter().for_each(|(serving, name, _)| serving.server.release_reserved(name));
            return;
        }
        if self.check_name(name).is_ok() {
            self.disks.unavailable.borrow_mut().insert(name.to_owned(), Rc::clone(one));
        }
    }

    /// As the config has them.
    pub(super) fn unopened_disks(&self) -> Vec<PlacedDisk> {
        self.disks.unavailable.borrow().values().map(|one| one.planned()).collect()
    }

    /// What the config file says now holds for one of them, which is opened in another way from now
    /// on if there is one.
    pub(super) fn plan_unopened(self: &Rc<Self>, name: &str, plan: Rc<DesiredState>, opening: Option<Opening>) {
        let Some(one) = self.disks.unavailable.borrow().get(name).cloned() else { return };
        let wanted = Wanted::all(&plan);
        self.expect_no_more(name, &one, |old| !wanted.contains(old));
        match opening {
            None => drop(one.plan.replace(plan)),
            Some(opening) => {
                self.bring_up(name, Rc::new(Unopened::new(name, one.since, plan)), (opening, None));
            }
        }
    }

    /// Gives up a disk that is not open yet; whether it was one.
    pub(crate) fn give_up_unopened(&self, name: &str) -> bool {
        let Some(one) = self.disks.unavailable.borrow_mut().remove(name) else { return false };
        one.give_up();
        self.expect_no_more(name, &one, |_| true);
        true
    }

    /// Exports of it that do not come any more leave their place to others.
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

    /// For `weir status`.
    pub(super) fn unavailable_disks(&self) -> Vec<UnavailableDisk> {
        let now = reactor::now();
        self.disks.unavailable.borrow().values().map(|one| one.status(now)).collect()
    }
}

/// Opens the image, as often as it takes, and lists its disk.
async fn bring_up(
    registry: Weak<Registry>,
    name: String,
    one: Rc<Unopened>,
    (opening, mut first): (Opening, Option<Opened>),
) {
    loop {
        // A host that has died may let go of its lock while the disk is another's.
        let moved = registry.upgrade().and_then(|registry| registry.cluster()?.moved_to(&name));
        let opened = match first.take() {
            _ if moved.is_some() => Err(anyhow!("the disk has moved to host {}", moved.unwrap_or_default())),
            Some(first) => first.await,
            None => opening.clone().open().await,
        };
        let Some(registry) = registry.upgrade() else { return };
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
        if one.why.borrow().as_ref() != Some(&why) {
            one.why.replace(Some(why));
            registry.tell_of_unopened(&name);
        }
        drop(registry);
        reactor::sleep_until(reactor::now() + AGAIN).await;
    }
}
