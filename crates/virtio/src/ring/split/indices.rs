//! The indices of a split ring and who wants to be told of them: the device's half of the protocol,
//! as far as it is about order (virtio 1.3 § 2.7.6 to § 2.7.10).
//!
//! ```text
//!   available   flags │ idx │ ring[size] │ used_event         written by the driver
//!   used        flags │ idx │ ring[size] │ avail_event        written by the device
//! ```
//!
//! Each side publishes, then looks whether the other wants to be told; or asks to be told, then
//! looks once more. Between the two is a fence, so that one of them sees the other:
//!
//! ```text
//!   device                                 driver
//!   avail_event = idx    (listen)          idx = idx + 1         (publish)
//!   fence                                  fence
//!   idx moved? look again                  avail_event passed? kick
//! ```
//!
//! `crates/export/tests/model` tries this file in every interleaving.

use super::{
    Broken,
    cells::{Cells, Ordering, fence},
};

const FLAGS: usize = 0;
const IDX: usize = 2;
const RING: usize = 4;
/// Of the used ring: the driver need not kick (`VIRTQ_USED_F_NO_NOTIFY`).
const NO_NOTIFY: u16 = 1;
/// Of the available ring: the device need not call (`VIRTQ_AVAIL_F_NO_INTERRUPT`).
const NO_INTERRUPT: u16 = 1;

/// The device's half.
#[derive(Debug)]
pub(super) struct Indices {
    size: u16,
    event_idx: bool,
    available: Cells,
    used: Cells,
    /// The available entry to be taken next.
    next: u16,
    /// The driver's index when it was last looked at.
    seen: u16,
    /// Entries of the used ring that are published.
    published: u16,
    /// Those of them that the driver was not asked about yet.
    unannounced: u32,
    /// Nobody knows what was announced before this ring was taken over.
    owes_call: bool,
    /// Whether the driver was told not to kick.
    silent: bool,
}

impl Indices {
    /// `base`: the available entry to be taken first.
    pub(super) fn new(size: u16, event_idx: bool, available: Cells, used: Cells, base: u16) -> Self {
        let published = used.load_u16(IDX, Ordering::Relaxed);
        Self {
            size,
            event_idx,
            available,
            used,
            next: base,
            seen: base,
            published,
            unannounced: 0,
            owes_call: true,
            silent: false,
        }
    }

    /// The same rings in other memory.
    pub(super) fn set_cells(&mut self, available: Cells, used: Cells) {
        (self.available, self.used) = (available, used);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.available.is_lost() || self.used.is_lost()
    }

    /// The available entry to be taken next.
    pub(super) fn next(&self) -> u16 {
        self.next
    }

    /// The index of the used ring.
    pub(super) fn published(&self) -> u16 {
        self.published
    }

    /// Takes from there on.
    pub(super) fn set_next(&mut self, next: u16) {
        (self.next, self.seen) = (next, next);
    }

    /// The head that the driver made available next, and takes it.
    ///
    /// # Errors
    /// An index or a head that cannot be. Nothing is taken then.
    pub(super) fn take(&mut self) -> Result<Option<u16>, Broken> {
        if self.next == self.seen {
            // Whoever sees the index sees what it makes available.
            let seen = self.available.load_u16(IDX, Ordering::Acquire);
            if seen.wrapping_sub(self.next) > self.size {
                return Err(Broken::Jump { from: self.next, to: seen, size: self.size });
            }
            self.seen = seen;
            if seen == self.next {
                return Ok(None);
            }
        }
        let entry = usize::from(self.next % self.size);
        let head = self.available.load_u16(RING + 2 * entry, Ordering::Relaxed);
        if head >= self.size {
            return Err(Broken::Head { head, size: self.size });
        }
        self.next = self.next.wrapping_add(1);
        Ok(Some(head))
    }

    /// The head so many entries behind the next, if the driver is known to have made it available.
    /// It may be another one, or none, once it is taken.
    pub(super) fn peek(&self, ahead: u16) -> Option<u16> {
        if self.seen.wrapping_sub(self.next) <= ahead {
            return None;
        }
        let entry = usize::from(self.next.wrapping_add(ahead) % self.size);
        Some(self.available.load_u16(RING + 2 * entry, Ordering::Relaxed))
    }

    /// The entry taken last is to be taken again.
    pub(super) fn put_back(&mut self) {
        self.next = self.next.wrapping_sub(1);
    }

    /// Gives a head back to the driver, of whose buffers `written` bytes were written.
    pub(super) fn publish(&mut self, head: u16, written: u32) {
        let entry = RING + 8 * usize::from(self.published % self.size);
        self.used.store_u32(entry, u32::from(head), Ordering::Relaxed);
        self.used.store_u32(entry + 4, written, Ordering::Relaxed);
        self.published = self.published.wrapping_add(1);
        self.used.store_u16(IDX, self.published, Ordering::Release);
        self.unannounced = self.unannounced.saturating_add(1);
    }

    /// Whether the driver is to be called for what was published since this was last asked.
    pub(super) fn wants_call(&mut self) -> bool {
        let unannounced = std::mem::take(&mut self.unannounced);
        if std::mem::take(&mut self.owes_call) {
            return true;
        }
        if unannounced == 0 {
            return false;
        }
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.available.load_u16(RING + 2 * usize::from(self.size), Ordering::Relaxed);
            // How many were published behind the one that the driver waits for.
            let behind = self.published.wrapping_sub(event).wrapping_sub(1);
            u32::from(behind) < unannounced
        } else {
            self.available.load_u16(FLAGS, Ordering::Relaxed) & NO_INTERRUPT == 0
        }
    }

    /// No kicks, please. With an event index it has nothing to say: the event that was asked for
    /// is past, until the index comes round.
    pub(super) fn silence(&mut self) {
        if !self.silent && !self.event_idx {
            self.used.store_u16(FLAGS, NO_NOTIFY, Ordering::Relaxed);
        }
        self.silent = true;
    }

    /// Asks for kicks. True: something was made available meanwhile, and nobody may kick for it.
    pub(super) fn listen(&mut self) -> bool {
        self.silent = false;
        if self.event_idx {
            self.used.store_u16(RING + 8 * usize::from(self.size), self.next, Ordering::Relaxed);
        } else {
            self.used.store_u16(FLAGS, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.available.load_u16(IDX, Ordering::Relaxed) != self.next
    }
}
