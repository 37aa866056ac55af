//! Unavailable disk: in the config, but its image is not open yet.
//!
//! Data only; `coming_up` opens and lists it.

use std::{cell::RefCell, rc::Rc};

use api::UnavailableDisk;
use policy::time::{Duration, Instant};
use reactor::JoinHandle;
use settings::{PlacedDisk, DesiredState};

pub struct Unopened {
    name: String,
    /// Time of the first attempt.
    pub(super) since: Instant,
    /// Current config, with the disk, its group and its exports.
    pub(super) plan: RefCell<Rc<DesiredState>>,
    /// Last reported reason; another reason is reported again.
    pub(super) why: RefCell<Option<String>>,
    /// Task that opens it.
    pub(super) task: RefCell<Option<JoinHandle<()>>>,
}

impl Unopened {
    /// `name` must be a disk of the plan.
    pub(super) fn new(name: &str, since: Instant, plan: Rc<DesiredState>) -> Self {
        Self {
            name: name.to_owned(),
            since,
            plan: RefCell::new(plan),
            why: RefCell::default(),
            task: RefCell::default(),
        }
    }

    /// Stops the attempts.
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

    /// Form in `weir status`.
    pub(super) fn status(&self, now: Instant) -> UnavailableDisk {
        UnavailableDisk {
            name: self.name.clone(),
            image: self.planned().image.to_string(),
            age_ns: self.age(now).as_nanos().try_into().unwrap_or(u64::MAX),
            reason: self.why.borrow().clone(),
        }
    }
}
