//! Unavailable disk: in the config, but its image is not open yet.
//!
//! Data only; `retry_queue` opens and lists it.

use std::{
    cell::RefCell,
    path::{self, PathBuf},
    rc::Rc,
};

use api::UnavailableDisk;
use policy::time::{Duration, Instant};
use reactor::JoinHandle;
use settings::{DesiredState, DiskWithOrigins, ListenEndpoint};

pub struct UnavailableDiskEntry {
    name: String,
    /// Time of the first attempt.
    pub(super) since: Instant,
    /// Current config, with the disk, its group and its exports.
    plan: RefCell<Rc<DesiredState>>,
    /// Names and endpoints of the disk's exports in `plan`.
    reserved: RefCell<Rc<[ReservedEndpoint]>>,
    /// Last reported reason; another reason is reported again.
    pub(super) reported_reason: RefCell<Option<String>>,
    /// Task that opens it.
    pub(super) task: RefCell<Option<JoinHandle<()>>>,
}

impl UnavailableDiskEntry {
    /// `name` must be a disk of the plan.
    pub(super) fn new(name: &str, since: Instant, plan: Rc<DesiredState>) -> Self {
        let reserved = RefCell::new(ReservedEndpoint::of_disk_exports(&plan, name).into());
        Self {
            name: name.to_owned(),
            since,
            plan: RefCell::new(plan),
            reserved,
            reported_reason: RefCell::default(),
            task: RefCell::default(),
        }
    }

    /// Stops the attempts.
    pub(super) fn cancel(&self) {
        self.task.take();
    }

    pub(super) fn plan(&self) -> Rc<DesiredState> {
        Rc::clone(&self.plan.borrow())
    }

    pub(super) fn reserved_endpoints(&self) -> Rc<[ReservedEndpoint]> {
        Rc::clone(&self.reserved.borrow())
    }

    /// Replaces the config after a reload; the disk must be in it.
    pub(super) fn replace_config(&self, plan: Rc<DesiredState>) {
        self.reserved.replace(ReservedEndpoint::of_disk_exports(&plan, &self.name).into());
        self.plan.replace(plan);
    }

    pub(super) fn config(&self) -> DiskWithOrigins {
        let plan = self.plan.borrow();
        plan.disks.iter().find(|disk| disk.name == self.name).expect("the plan has it").clone()
    }

    pub(super) fn group(&self) -> Option<String> {
        self.config().group.clone()
    }

    pub(super) fn age(&self, now: Instant) -> Duration {
        now - self.since
    }

    /// Form in `weir status`.
    pub(super) fn to_status(&self, now: Instant) -> UnavailableDisk {
        UnavailableDisk {
            name: self.name.clone(),
            image: self.config().image.to_string(),
            age_ns: self.age(now).as_nanos().try_into().unwrap_or(u64::MAX),
            reason: self.reported_reason.borrow().clone(),
        }
    }
}

/// Name or endpoint that no export of another disk may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ReservedEndpoint {
    /// Name of an export at an NBD server.
    NbdExportName(ListenEndpoint, String),
    /// Absolute path of an endpoint of a single export.
    EndpointPath(PathBuf),
}

impl ReservedEndpoint {
    /// Names and endpoints of the disk's exports in a plan.
    fn of_disk_exports(plan: &DesiredState, disk: &str) -> Vec<Self> {
        let index = plan.disks.iter().position(|planned| planned.name == disk);
        let names = plan.servers.iter().flat_map(|server| {
            let served = server.exports.iter().filter(|export| Some(export.disk) == index);
            served.map(|export| Self::NbdExportName(server.endpoint.clone(), export.name.clone()))
        });
        let exports = plan.exports.iter().filter(|export| Some(export.disk) == index);
        let paths = exports.filter_map(|export| path::absolute(export.target.path()?).ok());
        names.chain(paths.map(Self::EndpointPath)).collect()
    }
}
