//! Indices and notifications of a split ring: the part of the device's half that depends on memory
//! ordering (virtio 1.3 § 2.7.6 to § 2.7.10).
//!
//! ```text
//!   available   flags │ idx │ ring[size] │ used_event         written by the driver
//!   used        flags │ idx │ ring[size] │ avail_event        written by the device
//! ```
//!
//! Each side publishes and then checks whether the peer wants a notification; or it requests
//! notifications and then checks the peer's index once more. A fence separates the two steps, so
//! that at least one side sees the store of its peer:
//!
//! ```text
//!   device                                 driver
//!   avail_event = idx    (request kicks)   idx = idx + 1         (publish)
//!   fence                                  fence
//!   idx moved? look again                  avail_event passed? kick
//! ```
//!
//! `crates/virtio/tests/model` checks this file in every interleaving.

use super::{
    RingError,
    cells::{Cells, Ordering, fence},
};

const FLAGS: usize = 0;
const IDX: usize = 2;
const RING: usize = 4;
/// Flag of the used ring: kicks are suppressed (`VIRTQ_USED_F_NO_NOTIFY`).
const NO_NOTIFY: u16 = 1;
/// Flag of the available ring: calls are suppressed (`VIRTQ_AVAIL_F_NO_INTERRUPT`).
const NO_INTERRUPT: u16 = 1;

/// The device's half.
#[derive(Debug)]
pub(super) struct Indices {
    size: u16,
    event_idx: bool,
    available: Cells,
    used: Cells,
    /// Index of the next available entry to take.
    next: u16,
    /// Last loaded value of the driver's index.
    driver_index: u16,
    /// Number of published used entries, modulo 2¹⁶.
    published: u16,
    /// Number of published entries since the last `wants_call`.
    unsignaled: u32,
    /// True until the first `wants_call`: an earlier device may have owed a call.
    owes_call: bool,
    /// True if kicks are suppressed.
    kicks_suppressed: bool,
}

impl Indices {
    /// `base`: index of the first available entry to take.
    pub(super) fn new(size: u16, event_idx: bool, available: Cells, used: Cells, base: u16) -> Self {
        let published = used.load_u16(IDX, Ordering::Relaxed);
        Self {
            size,
            event_idx,
            available,
            used,
            next: base,
            driver_index: base,
            published,
            unsignaled: 0,
            owes_call: true,
            kicks_suppressed: false,
        }
    }

    /// Continues with the same rings in other memory.
    pub(super) fn set_cells(&mut self, available: Cells, used: Cells) {
        (self.available, self.used) = (available, used);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.available.is_lost() || self.used.is_lost()
    }

    /// Index of the next available entry to take.
    pub(super) fn next(&self) -> u16 {
        self.next
    }

    /// Index of the used ring.
    pub(super) fn published(&self) -> u16 {
        self.published
    }

    /// Continues taking at this index.
    pub(super) fn set_next(&mut self, next: u16) {
        (self.next, self.driver_index) = (next, next);
    }

    /// Takes the next available head; `None` if there is none.
    ///
    /// # Errors
    /// An invalid index or head. Nothing is taken then.
    pub(super) fn take(&mut self) -> Result<Option<u16>, RingError> {
        if self.next == self.driver_index {
            // Acquire pairs with the driver's publication: its entries and descriptors are visible.
            let driver_index = self.available.load_u16(IDX, Ordering::Acquire);
            // A distance above the ring's size also covers an index that went backwards.
            if driver_index.wrapping_sub(self.next) > self.size {
                return Err(RingError::IndexJump { from: self.next, to: driver_index, size: self.size });
            }
            self.driver_index = driver_index;
            if driver_index == self.next {
                return Ok(None);
            }
        }
        let entry = usize::from(self.next % self.size);
        let head = self.available.load_u16(RING + 2 * entry, Ordering::Relaxed);
        if head >= self.size {
            return Err(RingError::Head { head, size: self.size });
        }
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    /// The head `ahead` entries behind the next one, if the driver is known to have made it
    /// available. The guest may change it before it is taken.
    pub(super) fn peek(&self, ahead: u16) -> Option<u16> {
        if self.driver_index.wrapping_sub(self.next) <= ahead {
            return None;
        }
        let entry = usize::from(self.next.wrapping_add(ahead) % self.size);
        Some(self.available.load_u16(RING + 2 * entry, Ordering::Relaxed))
    }

    /// Makes the last taken entry available again.
    pub(super) fn put_back(&mut self) {
        self.next = self.next.wrapping_sub(1);
    }

    /// Returns a head to the driver, with the number of bytes written to its buffers.
    pub(super) fn publish(&mut self, head: u16, written: u32) {
        let entry = RING + 8 * usize::from(self.published % self.size);
        self.used.store_u32(entry, u32::from(head), Ordering::Relaxed);
        // Relaxed is enough for the entry: the index below publishes it with Release.
        self.used.store_u32(entry + 4, written, Ordering::Relaxed);
        self.published = self.published.wrapping_add(1);
        self.used.store_u16(IDX, self.published, Ordering::Release);
        self.unsignaled = self.unsignaled.saturating_add(1);
    }

    /// True if the driver must be called for the entries published since the last call.
    pub(super) fn wants_call(&mut self) -> bool {
        let unsignaled = std::mem::take(&mut self.unsignaled);
        if std::mem::take(&mut self.owes_call) {
            return true;
        }
        if unsignaled == 0 {
            return false;
        }
        // Between publishing (above) and the check of the driver's event: see the drawing.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.available.load_u16(RING + 2 * usize::from(self.size), Ordering::Relaxed);
            // Number of entries published after the one that the driver waits for
            // (`vring_need_event`, § 2.7.7.1).
            let distance = self.published.wrapping_sub(event).wrapping_sub(1);
            u32::from(distance) < unsignaled
        } else {
            self.available.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0
        }
    }

    /// Suppresses kicks. With an event index there is nothing to store: the requested event has
    /// passed, until the index wraps.
    pub(super) fn suppress_kicks(&mut self) {
        if !self.kicks_suppressed && !self.event_idx {
            self.used.store_u16(FLAGS, NO_NOTIFY, Ordering::Relaxed);
        }
        self.kicks_suppressed = true;
    }

    /// Requests kicks. True if an entry was made available meanwhile, for which no kick may arrive.
    pub(super) fn enable_kicks(&mut self) -> bool {
        self.kicks_suppressed = false;
        if self.event_idx {
            self.used.store_u16(RING + 8 * usize::from(self.size), self.next, Ordering::Relaxed);
        } else {
            self.used.store_u16(FLAGS, 0, Ordering::Relaxed);
        }
        // Between the request (above) and the check of the driver's index: see the drawing.
        fence(Ordering::SeqCst);
        self.available.load_u16(IDX, Ordering::Relaxed) != self.next
    }
}
