//! How many events were handed on, and how many were not. Belongs to the main thread.

use std::cell::Cell;

/// Counters of events that were delivered to a command or a web server.
#[derive(Debug, Default)]
pub struct Deliveries {
    /// Delivered events.
    pub delivered: Cell<u64>,
    /// Events whose delivery failed.
    pub failed: Cell<u64>,
    /// Left out, because others waited.
    pub skipped: Cell<u64>,
}

impl Deliveries {
    /// Delivered, failed, skipped.
    pub fn numbers(&self) -> [u64; 3] {
        [&self.delivered, &self.failed, &self.skipped].map(Cell::get)
    }

    /// Counts on from what another daemon has counted.
    pub(crate) fn count_on(&self, [delivered, failed, skipped]: [u64; 3]) {
        Self::add(&self.delivered, delivered);
        Self::add(&self.failed, failed);
        Self::add(&self.skipped, skipped);
    }

    /// Adds to a counter.
    pub fn add(count: &Cell<u64>, more: u64) {
        count.set(count.get().saturating_add(more));
    }
}
