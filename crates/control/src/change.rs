//! What happened to the things that run. A listener is called at once, on the main thread, after
//! the change is done: it may look at the registry.

use std::rc::Rc;

use block::disk::RequestFailure;

/// Change of the running state.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants name their fields")]
pub enum Change {
    /// Its last client is gone.
    ExportDeleted { id: String },
    /// A disk or a group came or went.
    Listed { name: String },
    /// The device failed a request of a disk. Of many in a second, the first and the last.
    Failed { disk: String, failure: RequestFailure },
    /// A disk has stopped at an error; before, none was stopped.
    Stopped,
    /// Disks that were stopped go on: all, or one of them.
    Resumed { all: bool },
    /// A disk or a group has other limits, another weight, another group.
    SettingsChanged { name: String },
    /// The config file was read again, and all of that is done, or undone.
    Reloaded,
}

pub(crate) type Listener = Rc<dyn Fn(&Change)>;
