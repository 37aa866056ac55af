//! Registry of groups and unmet reservations. Holds state only: changes that notify listeners are
//! methods of [`Registry`](super::Registry).

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use block::layer::throttle::ThrottleGroup;

use super::{NameMap, RegistryError};
use crate::unmet_reservation::UnmetReservationEntry;

/// All groups of a daemon.
#[derive(Default)]
pub struct GroupRegistry {
    by_name: NameMap<Arc<ThrottleGroup>>,
    /// Groups that clients of the control socket added; they are in no config file.
    pub(crate) added_by_clients: RefCell<BTreeSet<String>>,
    /// Unmet reservations, by the name of their disk or group.
    pub unmet: RefCell<BTreeMap<String, UnmetReservationEntry>>,
}

impl GroupRegistry {
    pub(super) fn insert(&self, group: &Arc<ThrottleGroup>) {
        self.by_name.insert(group.name().to_owned(), Arc::clone(group));
    }

    pub(super) fn remove(&self, name: &str) {
        self.by_name.remove(name);
        // A later group of this name may come from the config, and books its own reservation.
        self.added_by_clients.borrow_mut().remove(name);
        self.unmet.borrow_mut().remove(name);
    }

    pub(super) fn find(&self, name: &str) -> Option<Arc<ThrottleGroup>> {
        self.by_name.get(name)
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.by_name.contains(name)
    }

    /// All groups, by name.
    pub fn all(&self) -> Vec<Arc<ThrottleGroup>> {
        self.by_name.all()
    }

    /// The group with this name.
    ///
    /// # Errors
    /// [`RegistryError::UnknownGroup`] if no group has this name.
    pub fn get(&self, name: &str) -> Result<Arc<ThrottleGroup>, RegistryError> {
        self.by_name.get(name).ok_or_else(|| RegistryError::UnknownGroup(name.to_owned()))
    }
}
