//! Disks that come in several steps, each of which may fail: nothing is told of one before all of
//! it is there.

use std::rc::Rc;

use export::nbd::Removal;

use super::{Refused, Registry};
use crate::change::Change;

/// While it is held, no event is of a disk of this name; then it is there, or never was.
pub(crate) struct Arrival {
    registry: Rc<Registry>,
    name: String,
}

impl Registry {
    /// # Errors
    /// A disk of this name is on its way already.
    pub(crate) fn arrival(self: &Rc<Self>, name: &str) -> Result<Arrival, Refused> {
        if !self.disks.arriving.borrow_mut().insert(name.to_owned()) {
            return Err(Refused::Busy(name.to_owned()));
        }
        Ok(Arrival { registry: Rc::clone(self), name: name.to_owned() })
    }

    /// Has a disk go again that did not come whole. Whoever has connected to one of its exports
    /// meanwhile is disconnected.
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
