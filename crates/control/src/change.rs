//! Notifications of changes to the running state. A listener runs synchronously on the main thread
//! after the change is complete, and may use the registry.

use std::rc::Rc;

use api::JobReport;
use block::disk::RequestFailure;
use policy::request::Direction;

/// Change of the running state.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants name their fields")]
pub enum RegistryChange {
    /// The last client of a removed export has disconnected.
    ExportDeleted { id: String },
    /// A disk or a group was added or removed.
    Listed { name: String },
    /// The device failed a request of a disk. Limited to the first and the last in each second.
    Failed { disk: String, failure: RequestFailure },
    /// A disk stopped at an I/O error, and no other disk was stopped.
    Stopped,
    /// Stopped disks were resumed: all of them, or one.
    Resumed { all: bool },
    /// The limits, weight or group of a disk or group changed.
    SettingsChanged { name: String },
    /// The state of a job changed; `state` is its name.
    JobChanged { id: String, state: &'static str },
    /// I/O of a job has failed, which ends it.
    JobIoFailed { id: String, direction: Direction },
    /// A job is ready to be completed.
    JobReady { job: Box<JobReport> },
    /// A job has concluded.
    JobEnded { job: Box<JobReport> },
    /// A reload finished: applied or rolled back.
    Reloaded,
}

pub(crate) type ChangeListener = Rc<dyn Fn(&RegistryChange)>;
