//! Counters of deliveries of events. Belongs to the main thread.

use std::cell::Cell;

/// Counters of events that were delivered to a command or a web server.
#[derive(Debug, Default)]
pub struct DeliveryCounters {
    /// Delivered events.
    pub delivered: Cell<u64>,
    /// Events whose delivery failed.
    pub failed: Cell<u64>,
    /// Events skipped because the queue was full.
    pub skipped: Cell<u64>,
}

impl DeliveryCounters {
    /// The counters in the order delivered, failed, skipped.
    pub fn counts(&self) -> [u64; 3] {
        [&self.delivered, &self.failed, &self.skipped].map(Cell::get)
    }

    /// Adds the counters of the old process.
    pub(crate) fn add_counts(&self, [delivered, failed, skipped]: [u64; 3]) {
        Self::add_saturating(&self.delivered, delivered);
        Self::add_saturating(&self.failed, failed);
        Self::add_saturating(&self.skipped, skipped);
    }

    /// Adds to a counter, saturating.
    pub fn add_saturating(count: &Cell<u64>, more: u64) {
        count.set(count.get().saturating_add(more));
    }
}
