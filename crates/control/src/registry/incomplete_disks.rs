//! Disks that are added in several steps, each of which may fail: no event reports a disk before it
//! is complete.

use std::rc::Rc;

use export::nbd::Removal;

use super::{Registry, RegistryError};
use crate::change::RegistryChange;

/// Suppresses events about a disk of this name while it exists. Its drop announces the result.
pub(crate) struct IncompleteDisk {
    registry: Rc<Registry>,
    name: String,
}

impl Registry {
    /// # Errors
    /// A disk of this name is already being added.
    pub(crate) fn begin_adding(self: &Rc<Self>, name: &str) -> Result<IncompleteDisk, RegistryError> {
        if !self.disks.incomplete.borrow_mut().insert(name.to_owned()) {
            return Err(RegistryError::Busy(name.to_owned()));
        }
        Ok(IncompleteDisk { registry: Rc::clone(self), name: name.to_owned() })
    }

    /// Removes an incomplete disk. Clients that have connected to its exports are disconnected.
    pub(crate) async fn remove_incomplete(self: &Rc<Self>, name: &str) -> Result<(), RegistryError> {
        self.remove_disk_and_exports(name, Removal::Hard).await
    }
}

impl Drop for IncompleteDisk {
    fn drop(&mut self) {
        self.registry.disks.incomplete.borrow_mut().remove(&self.name);
        self.registry.notify(&RegistryChange::Listed { name: std::mem::take(&mut self.name) });
    }
}
