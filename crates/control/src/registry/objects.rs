//! Objects of `object-add`, by id: secrets, TLS credentials and name rules. Images and servers that
//! use an object keep it after its removal. Never logs or returns a secret.
//!
//! Clients of the control socket can add any number of objects, so number and size are bounded, and
//! each object is charged to the memory budget.

use std::{cell::RefCell, collections::BTreeMap};

use image::secret::{MAX_SECRET, Secret};
use policy::access::NameRules;
use reactor::memory::MemoryBudget;

use super::RegistryError;
use crate::fdsets::DescriptorSets;

/// Maximum number of objects of all kinds.
const MAX_OBJECTS: usize = 1024;
/// Bytes charged for an object in addition to its content, for its id and list entry.
const OVERHEAD_BYTES: u64 = 512;
/// Bytes charged for TLS credentials: OpenSSL's context with a certificate chain.
const CREDENTIALS_BYTES: u64 = 64 << 10;
/// Maximum content of an object in bytes: the longest secret; rules have the same bound.
const MAX_OBJECT_BYTES: usize = MAX_SECRET;

/// Object of one kind.
#[derive(Clone)]
pub(crate) enum NamedObject {
    Secret(Secret),
    Credentials(tls::TlsServer),
    Names(NameRules),
}

impl NamedObject {
    /// Size of its content in bytes.
    fn bytes(&self) -> usize {
        match self {
            Self::Secret(secret) => secret.expose().len(),
            Self::Credentials(_) => CREDENTIALS_BYTES as usize,
            Self::Names(NameRules { rules, .. }) => {
                rules.iter().map(|rule| size_of_val(rule) + rule.pattern.len()).sum()
            }
        }
    }
}

/// Object with its charge to the memory budget, which its drop returns.
struct ChargedObject {
    object: NamedObject,
    charged: u64,
}

impl Drop for ChargedObject {
    fn drop(&mut self) {
        // Cannot fail: lowering a reservation always succeeds.
        let _ = MemoryBudget::process().reserve("objects", self.charged, 0);
    }
}

/// All objects of a daemon by id, and the descriptor sets that clients passed.
#[derive(Default)]
pub(crate) struct ObjectRegistry {
    listed: RefCell<BTreeMap<String, ChargedObject>>,
    pub(crate) descriptors: DescriptorSets,
}

impl ObjectRegistry {
    /// # Errors
    /// The id is in use, the object is too large, or a bound is reached.
    pub(crate) fn add(&self, id: &str, object: NamedObject) -> Result<(), RegistryError> {
        let mut objects = self.listed.borrow_mut();
        // Checked before the charge: a rejected object must not stay charged.
        if objects.contains_key(id) {
            return Err(RegistryError::NameTaken(id.to_owned()));
        }
        let bytes = object.bytes();
        if bytes > MAX_OBJECT_BYTES {
            return Err(RegistryError::ObjectTooLarge { id: id.to_owned(), bytes, most: MAX_OBJECT_BYTES });
        }
        if objects.len() >= MAX_OBJECTS {
            return Err(RegistryError::TooManyObjects { id: id.to_owned(), most: MAX_OBJECTS });
        }
        let charged = bytes as u64 + OVERHEAD_BYTES;
        let reserved = MemoryBudget::process().reserve("objects", 0, charged);
        reserved.map_err(|error| RegistryError::NoMemory { id: id.to_owned(), error })?;
        objects.insert(id.to_owned(), ChargedObject { object, charged });
        Ok(())
    }

    /// Removes an object; returns true if it existed. Images and servers that use it keep it.
    pub(crate) fn remove(&self, id: &str) -> bool {
        self.listed.borrow_mut().remove(id).is_some()
    }

    pub(crate) fn contains(&self, id: &str) -> bool {
        self.listed.borrow().contains_key(id)
    }

    fn get(&self, id: &str) -> Option<NamedObject> {
        self.listed.borrow().get(id).map(|entry| entry.object.clone())
    }

    pub(crate) fn secret(&self, id: &str) -> Result<Secret, RegistryError> {
        match self.get(id) {
            Some(NamedObject::Secret(secret)) => Ok(secret),
            _ => Err(RegistryError::UnknownSecret(id.to_owned())),
        }
    }

    pub(crate) fn secrets(&self) -> Vec<String> {
        let objects = self.listed.borrow();
        let secrets = objects.iter().filter(|(_, entry)| matches!(entry.object, NamedObject::Secret(_)));
        secrets.map(|(id, _)| id.clone()).collect()
    }

    pub(crate) fn credentials(&self, id: &str) -> Option<tls::TlsServer> {
        match self.get(id)? {
            NamedObject::Credentials(keys) => Some(keys),
            _ => None,
        }
    }

    pub(crate) fn names(&self, id: &str) -> Option<NameRules> {
        match self.get(id)? {
            NamedObject::Names(names) => Some(names),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(bytes: usize) -> NamedObject {
        NamedObject::Secret(Secret::new(vec![7; bytes]))
    }

    #[test]
    fn objects_are_bounded_and_charged() {
        reactor::sim::run(1, async {
            let objects = ObjectRegistry::default();
            let refused = objects.add("large", secret(900 << 10)).expect_err("above 64 KiB");
            assert!(refused.to_string().contains("921600 bytes; an object has at most 65536"), "{refused}");
            let rules = NameRules::any_of((0..10_000).map(|number| format!("name{number}")));
            objects.add("rules", NamedObject::Names(rules)).expect_err("above 64 KiB");
            // Other tests of this process use the budget as well, so only a lower bound holds.
            for number in 0..MAX_OBJECTS {
                objects.add(&format!("s{number}"), secret(1000)).expect("within the bounds");
            }
            let charged = MAX_OBJECTS as u64 * (1000 + OVERHEAD_BYTES);
            assert!(MemoryBudget::process().usage().reserved >= charged);
            let refused = objects.add("more", secret(1)).expect_err("one too many");
            assert!(refused.to_string().contains("has 1024 objects already"), "{refused}");
            assert!(objects.remove("s5") && !objects.remove("s5"));
            objects.add("more", secret(1)).expect("there is room again");
            assert!(objects.secret("more").is_ok() && objects.names("more").is_none());
        });
    }
}
