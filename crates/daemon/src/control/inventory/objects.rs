//! What images and servers are given by its id, as `object-add` makes it: secrets, keys of TLS, and
//! rules about names. Whoever was given one keeps it when it is removed; nothing here is ever told.

use std::collections::btree_map::Entry;

use block::image::Secret;
use export::nbd;
use policy::access::Names;

use super::{Inventory, Refused};

impl Inventory {
    pub(crate) fn add_secret(&self, id: &str, secret: Secret) -> Result<(), Refused> {
        if self.secrets.borrow().contains_key(id) {
            return Err(Refused::NameTaken(id.to_owned()));
        }
        self.secrets.borrow_mut().insert(id.to_owned(), secret);
        Ok(())
    }

    pub(crate) fn secret(&self, id: &str) -> Result<Secret, Refused> {
        self.secrets.borrow().get(id).cloned().ok_or_else(|| Refused::NoSecret(id.to_owned()))
    }

    /// Whether there was one. Images that it opened stay open.
    pub(crate) fn remove_secret(&self, id: &str) -> bool {
        self.secrets.borrow_mut().remove(id).is_some()
    }

    pub(crate) fn secrets(&self) -> Vec<String> {
        self.secrets.borrow().keys().cloned().collect()
    }

    pub(crate) fn add_credentials(&self, id: &str, keys: nbd::TlsServer) -> Result<(), Refused> {
        match self.credentials.borrow_mut().entry(id.to_owned()) {
            Entry::Occupied(_) => Err(Refused::NameTaken(id.to_owned())),
            Entry::Vacant(free) => {
                free.insert(keys);
                Ok(())
            }
        }
    }

    pub(crate) fn credentials(&self, id: &str) -> Option<nbd::TlsServer> {
        self.credentials.borrow().get(id).cloned()
    }

    /// Whether there were any. Servers that have them keep them.
    pub(crate) fn remove_credentials(&self, id: &str) -> bool {
        self.credentials.borrow_mut().remove(id).is_some()
    }

    pub(crate) fn add_names(&self, id: &str, names: Names) -> Result<(), Refused> {
        match self.names.borrow_mut().entry(id.to_owned()) {
            Entry::Occupied(_) => Err(Refused::NameTaken(id.to_owned())),
            Entry::Vacant(free) => {
                free.insert(names);
                Ok(())
            }
        }
    }

    pub(crate) fn names(&self, id: &str) -> Option<Names> {
        self.names.borrow().get(id).cloned()
    }

    /// Whether there were any. Servers that have them keep them.
    pub(crate) fn remove_names(&self, id: &str) -> bool {
        self.names.borrow_mut().remove(id).is_some()
    }
}
