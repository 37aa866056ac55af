//! Disks that are added in several steps, each of which may fail: no event reports a disk before it
//! is complete.

use std::rc::Rc;

use export::nbd::Removal;

use super::{Refused, Registry};
use crate::change::Change;

/// Suppresses events about a disk of this name while it exists. Its drop announces the result.
pub(crate) struct Arrival {
    registry: Rc<Registry>,
    name: String,
}

impl Registry {
    /// # Errors
    /// A disk of this name is already being added.
    pub(crate) fn arrival(self: &Rc<Self>, name: &str) -> Result<Arrival, Refused> {
        if !self.disks.arriving.borrow_mut().insert(name.to_owned()) {
            return Err(Refused::Busy(name.to_owned()));
        }
        Ok(Arrival { registry: Rc::clone(self), name: name.to_owned() })
    }

    /// Removes an incomplete disk. Clients that have connected to its exports are disconnected.
    pub(crate) async fn take_back(self: &Rc<Self>, name: &str) -> Result<(), Refused> {
        self.remove_disk_and_exports(name, Removal::Hard).await
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.registry.disks.arriving.borrow_mut().remove(&self.name);
        self.registry.tell(&Change::Listed { name: std::mem::take(&mut self.name) });
    }
}
