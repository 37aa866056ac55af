//! Disks and groups that are added in several steps, each of which may fail: no event reports an
//! object before it is complete.

use std::rc::Rc;

use export::nbd::Removal;

use super::{Registry, RegistryError};
use crate::change::RegistryChange;

/// Suppresses events about a disk or group of this name while it exists. Its drop announces the
/// result.
pub(crate) struct IncompleteObject {
    registry: Rc<Registry>,
    name: String,
}

impl Registry {
    /// # Errors
    /// A disk or group of this name is already being added.
    pub(crate) fn begin_adding(self: &Rc<Self>, name: &str) -> Result<IncompleteObject, RegistryError> {
        if !self.disks.incomplete.borrow_mut().insert(name.to_owned()) {
            return Err(RegistryError::Busy(name.to_owned()));
        }
        Ok(IncompleteObject { registry: Rc::clone(self), name: name.to_owned() })
    }

    /// Removes an incomplete disk. Clients that have connected to its exports are disconnected.
    pub(crate) async fn remove_incomplete(self: &Rc<Self>, name: &str) -> Result<(), RegistryError> {
        self.remove_disk_and_exports(name, Removal::Hard).await
    }
}

impl Drop for IncompleteObject {
    fn drop(&mut self) {
        self.registry.disks.incomplete.borrow_mut().remove(&self.name);
        self.registry.notify(&RegistryChange::Listed { name: std::mem::take(&mut self.name) });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use block::layer::throttle::{GroupSettings, ThrottleGroup};

    use super::*;
    use crate::{events::Kind, watch};

    #[test]
    fn changes_of_an_incomplete_group_are_not_reported() {
        reactor::sim::run(1, async {
            let registry = Registry::new(None, Rc::new(|_| ()));
            let _watch = watch::watch_registry(&registry, BTreeSet::new());
            for is_rolled_back in [true, false] {
                let arrival = registry.begin_adding("g").expect("a new name");
                let group = ThrottleGroup::new("g", GroupSettings::default(), None).expect("no reservation");
                registry.add_group(&group).expect("a new name");
                registry.notify(&RegistryChange::SettingsChanged { name: "g".to_owned() });
                if is_rolled_back {
                    registry.remove_group("g").expect("it has no members");
                }
                drop(arrival);
            }
            let kinds: Vec<_> = registry.events.since(0).iter().map(|event| event.kind).collect();
            assert_eq!(kinds, [Kind::GroupAdded]);
        });
    }
}
