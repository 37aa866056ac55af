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

use anyhow::ensure;
use block::{image::Image, reactor};
use policy::time::{Duration, Instant};
use serde_json::Value;
use settings::{Disk, Plan};

use super::{
    assemble::{self, Opening},
    inventory::Inventory,
    unopened::Unopened,
    wanted::Wanted,
};
use crate::events::{Kind, News};

/// How long until an image is opened again that could not be.
const AGAIN: Duration = Duration::from_secs(10);

/// An image that is being opened.
pub(crate) type Opened = reactor::JoinHandle<anyhow::Result<Image>>;

impl Inventory {
    /// Goes on without a disk of the plan, whose image has been being opened since then.
    pub(crate) fn put_off(
        self: &Rc<Self>,
        (name, plan): (&str, Rc<Plan>),
        since: Instant,
        way: (Opening, Opened),
    ) {
        let one = Rc::new(Unopened::new(name, since, plan));
        self.bring_up(name, one, (way.0, Some(way.1)));
    }

    fn bring_up(self: &Rc<Self>, name: &str, one: Rc<Unopened>, way: (Opening, Option<Opened>)) {
        self.unopened.borrow_mut().insert(name.to_owned(), Rc::clone(&one));
        reactor::spawn(bring_up(Rc::downgrade(self), name.to_owned(), one, way));
    }

    /// Tells of those that a start goes on without.
    pub(crate) fn tell_unopened(&self) {
        let all = self.unopened.borrow().clone();
        all.iter().for_each(|(name, one)| self.tell_of_unopened(name, one, None));
    }

    fn tell_of_unopened(&self, name: &str, one: &Unopened, why: Option<String>) {
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
        self.events.tell(news.with("image", image).with("reason", why.clone()));
        one.why.replace(why);
    }

    /// Whether it is this one that is to come up.
    fn awaits(&self, name: &str, one: &Rc<Unopened>) -> bool {
        self.unopened.borrow().get(name).is_some_and(|known| Rc::ptr_eq(known, one))
    }

    /// Lists a disk whose image is open now, with its exports: whole or not at all.
    async fn list_unopened(
        self: &Rc<Self>,
        name: &str,
        one: &Rc<Unopened>,
        image: Image,
    ) -> anyhow::Result<()> {
        ensure!(!self.leaving.get(), "another weir is about to take over");
        let (planned, plan) = (one.planned(), one.plan.borrow().clone());
        let group = one.group().map(|group| self.group(&group)).transpose()?;
        let _arrival = self.arrival(name)?;
        self.unopened.borrow_mut().remove(name);
        let listed = async {
            assemble::list(self, &planned, group.as_ref(), Ok(image))?;
            for export in Wanted::all(&plan).iter().filter(|export| export.disk == name) {
                export.add(self).await?;
            }
            anyhow::Ok(())
        };
        if let Err(error) = listed.await {
            if self.disk(name).is_ok() {
                self.take_back(name).await?;
            }
            self.unopened.borrow_mut().insert(name.to_owned(), Rc::clone(one));
            return Err(error);
        }
        if let Some(cluster) = self.cluster() {
            cluster.promise(&**self);
        }
        tracing::info!(disk = name, after_s = one.age(reactor::now()).as_secs(), "its image is open now");
        Ok(())
    }

    /// As the config has them.
    pub(super) fn unopened_disks(&self) -> Vec<Disk> {
        self.unopened.borrow().values().map(|one| one.planned()).collect()
    }

    /// What the config file says now holds for one of them, which is opened in another way from now
    /// on if there is one.
    pub(super) fn plan_unopened(self: &Rc<Self>, name: &str, plan: Rc<Plan>, opening: Option<Opening>) {
        let Some(one) = self.unopened.borrow().get(name).cloned() else { return };
        match opening {
            None => drop(one.plan.replace(plan)),
            Some(opening) => {
                self.bring_up(name, Rc::new(Unopened::new(name, one.since, plan)), (opening, None));
            }
        }
    }

    /// For `weir status`.
    pub(super) fn describe_unopened(&self) -> Vec<Value> {
        let now = reactor::now();
        self.unopened.borrow().values().map(|one| one.described(now)).collect()
    }
}

/// Opens the image, as often as it takes, and lists its disk.
async fn bring_up(
    inventory: Weak<Inventory>,
    name: String,
    one: Rc<Unopened>,
    (opening, mut first): (Opening, Option<Opened>),
) {
    loop {
        let opened = match first.take() {
            Some(first) => first.await,
            None => opening.clone().open().await,
        };
        let Some(inventory) = inventory.upgrade() else { return };
        {
            let _turn = inventory.turns.take().await;
            if inventory.ending.get() || !inventory.awaits(&name, &one) {
                return;
            }
            let listed = match opened {
                Ok(image) => inventory.list_unopened(&name, &one, image).await,
                Err(error) => Err(error),
            };
            let Err(error) = listed else { return };
            let why = format!("{error:#}");
            if one.why.borrow().as_ref() != Some(&why) {
                inventory.tell_of_unopened(&name, &one, Some(why));
            }
        }
        drop(inventory);
        reactor::sleep_until(reactor::now() + AGAIN).await;
    }
}
