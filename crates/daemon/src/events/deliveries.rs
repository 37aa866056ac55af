//! How many events were handed on, and how many were not. Belongs to the main thread.

use std::cell::Cell;

#[derive(Debug, Default)]
pub(crate) struct Deliveries {
    pub(crate) delivered: Cell<u64>,
    pub(crate) failed: Cell<u64>,
    /// Left out, because others waited.
    pub(crate) skipped: Cell<u64>,
}

impl Deliveries {
    pub(crate) fn add(count: &Cell<u64>, more: u64) {
        count.set(count.get().saturating_add(more));
    }
}
