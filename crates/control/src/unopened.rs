//! A disk of the config whose image is not open yet.
//!
//! Only data: who opens it and lists it is `coming_up`.

use std::{cell::RefCell, rc::Rc};

use api::UnavailableDisk;
use policy::time::{Duration, Instant};
use reactor::JoinHandle;
use settings::{PlacedDisk, DesiredState};

pub struct Unopened {
    name: String,
    /// When it was begun to open it.
    pub(super) since: Instant,
    /// What the config file says now: this disk, its group, its exports.
    pub(super) plan: RefCell<Rc<DesiredState>>,
    /// What was told of it last: why it could not be opened.
    pub(super) why: RefCell<Option<String>>,
    /// Opens it.
    pub(super) task: RefCell<Option<JoinHandle<()>>>,
}

impl Unopened {
    /// `name` is that of a disk of the plan.
    pub(super) fn new(name: &str, since: Instant, plan: Rc<DesiredState>) -> Self {
        Self {
            name: name.to_owned(),
            since,
            plan: RefCell::new(plan),
            why: RefCell::default(),
            task: RefCell::default(),
        }
    }

    /// Nobody opens it any more.
    pub(super) fn give_up(&self) {
        self.task.take();
    }

    pub(super) fn planned(&self) -> PlacedDisk {
        let plan = self.plan.borrow();
        plan.disks.iter().find(|disk| disk.name == self.name).expect("the plan has it").clone()
    }

    pub(super) fn group(&self) -> Option<String> {
        self.planned().group.clone()
    }

    pub(super) fn age(&self, now: Instant) -> Duration {
        now - self.since
    }

    /// For `weir status`.
    pub(super) fn status(&self, now: Instant) -> UnavailableDisk {
        UnavailableDisk {
            name: self.name.clone(),
            image: self.planned().image.to_string(),
            age_ns: self.age(now).as_nanos().try_into().unwrap_or(u64::MAX),
            reason: self.why.borrow().clone(),
        }
    }
}
