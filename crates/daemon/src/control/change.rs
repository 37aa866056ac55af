//! What happened to the things that run. A listener is called at once, on the main thread, after
//! the change is done: it may look at the inventory.

use std::rc::Rc;

use block::disk::Failure;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Its last client is gone.
    ExportDeleted { id: String },
    /// A disk or a group came or went.
    Listed { name: String },
    /// The device failed a request of a disk. Of many in a second, the first and the last.
    Failed { disk: String, failure: Failure },
    /// A disk has stopped at an error; before, none was stopped.
    Stopped,
    /// What was stopped goes on.
    Resumed,
    /// This host has its part of the cluster's limits; or not, for a reason: then the safe share
    /// holds once leases have run out.
    Cluster { name: String, apart: Option<String> },
    /// A disk or a group has other limits, another weight, another group.
    SettingsChanged { name: String },
}

pub(crate) type Listener = Rc<dyn Fn(&Change)>;
