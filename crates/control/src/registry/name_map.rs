//! Map of disks, groups or exports by name, with a single operation that visits all entries.
//!
//! A command about one disk must not visit all disks, or adding thousands one by one takes
//! quadratic time. Lookups and full passes are therefore separate operations, and tests count the
//! passes.
//!
//! Never holds a borrow while it calls foreign code, except in [`NameMap::any`].

use std::{cell::RefCell, collections::BTreeMap};

/// Entries sorted by name.
#[derive(Debug)]
pub(super) struct NameMap<T>(RefCell<BTreeMap<String, T>>);

impl<T> Default for NameMap<T> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<T: Clone> NameMap<T> {
    pub(super) fn get(&self, name: &str) -> Option<T> {
        self.0.borrow().get(name).cloned()
    }

    pub(super) fn contains(&self, name: &str) -> bool {
        self.0.borrow().contains_key(name)
    }

    pub(super) fn insert(&self, name: String, entry: T) {
        self.0.borrow_mut().insert(name, entry);
    }

    pub(super) fn remove(&self, name: &str) -> Option<T> {
        self.0.borrow_mut().remove(name)
    }

    /// Copies of all entries. Visits each of them.
    pub(super) fn all(&self) -> Vec<T> {
        let entries = self.0.borrow();
        count(entries.len());
        entries.values().cloned().collect()
    }

    /// True if the condition holds for an entry. Visits all entries in the worst case; the
    /// condition must not change the map.
    pub(super) fn any(&self, condition: impl Fn(&T) -> bool) -> bool {
        let entries = self.0.borrow();
        count(entries.len());
        entries.values().any(condition)
    }
}

#[cfg(not(test))]
fn count(_: usize) {}

#[cfg(test)]
use visits::count;

/// Work counter of tests: entries visited by full passes on this thread.
#[cfg(test)]
pub(crate) mod visits {
    use std::cell::Cell;

    thread_local! { static VISITS: Cell<u64> = const { Cell::new(0) }; }

    pub(super) fn count(entries: usize) {
        VISITS.set(VISITS.get() + entries as u64);
    }

    /// Visits since the last call.
    pub(crate) fn take_count() -> u64 {
        VISITS.take()
    }
}
