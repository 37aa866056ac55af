//! Ownership of descriptors and notifications in a packed ring: the part of the device's half that
//! depends on memory ordering (virtio 1.3 § 2.8.1 to § 2.8.10).
//!
//! ```text
//!   descriptor     address │ length, id, flags                written by both sides in turn
//!   suppression    position of the event │ flags              one written by each side
//! ```
//!
//! A descriptor changes its owner with its flags, which are stored last and loaded first. Each side
//! publishes and then checks whether the peer wants a notification; or it requests notifications
//! and then checks the ring once more. A fence separates the two steps, so that at least one side
//! sees the store of its peer:
//!
//! ```text
//!   device                                 driver
//!   event = next           (request kicks) flags of next: available     (publish)
//!   fence                                  fence
//!   next available? look again             event passed? kick
//! ```
//!
//! `crates/virtio/tests/model` checks this file in every interleaving.

use super::{
    RingError,
    cells::{Cells, Ordering, fence},
    chain::{DESCRIPTOR_BYTES, flag},
    position::{EventSuppression, RingPosition},
};

/// The device's half.
#[derive(Debug)]
pub(super) struct DescriptorOwnership {
    size: u16,
    ring: Cells,
    /// Event suppression areas: the driver's, and the device's.
    driver: EventSuppression,
    device: EventSuppression,
    /// Position of the next descriptor to take.
    next: RingPosition,
    /// Position of the next used descriptor.
    used: RingPosition,
    /// Number of descriptors between the two: those of chains in flight.
    in_flight: u16,
    /// Number of descriptors returned since the last `wants_call`.
    unsignaled: u32,
    /// True until the first `wants_call`: an earlier device may have owed a call.
    owes_call: bool,
    /// True if kicks are suppressed.
    kicks_suppressed: bool,
}

impl DescriptorOwnership {
    /// `cells`: descriptors, the driver's area, the device's area.
    pub(super) fn new(size: u16, event_idx: bool, cells: [Cells; 3], used: RingPosition) -> Self {
        let [ring, driver, device] = cells;
        Self {
            size,
            ring,
            driver: EventSuppression::new(driver, event_idx),
            device: EventSuppression::new(device, event_idx),
            next: used,
            used,
            in_flight: 0,
            unsignaled: 0,
            owes_call: true,
            kicks_suppressed: false,
        }
    }

    /// Continues with the same ring in other memory.
    pub(super) fn set_cells(&mut self, event_idx: bool, cells: [Cells; 3]) {
        let [ring, driver, device] = cells;
        self.ring = ring;
        self.driver = EventSuppression::new(driver, event_idx);
        self.device = EventSuppression::new(device, event_idx);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.ring.is_lost() || self.driver.is_lost() || self.device.is_lost()
    }

    /// Position of the next descriptor to take.
    pub(super) fn next(&self) -> RingPosition {
        self.next
    }

    /// Position of the next used descriptor.
    pub(super) fn used(&self) -> RingPosition {
        self.used
    }

    /// Position of the used descriptor after that of a chain of `descriptors` descriptors.
    pub(super) fn used_after(&self, descriptors: u16) -> RingPosition {
        self.used.after(descriptors, self.size)
    }

    /// Continues at `used`, with `in_flight` descriptors in flight, at most the ring's size.
    pub(super) fn resume(&mut self, used: RingPosition, in_flight: u16) {
        (self.used, self.in_flight) = (used, in_flight);
        self.next = used.after(in_flight, self.size);
    }

    /// The words of a descriptor: its address, and its length, id and flags in one.
    #[inline]
    fn words(&self, at: RingPosition) -> (u64, u64) {
        let offset = usize::from(at.index) * DESCRIPTOR_BYTES;
        // Acquire on the word with the flags: if the device owns the descriptor, the address is
        // visible.
        let word = self.ring.load_u64(offset + 8, Ordering::Acquire);
        (self.ring.load_u64(offset, Ordering::Relaxed), word)
    }

    /// True if the descriptor belongs to the device.
    pub(super) fn is_available(&self, at: RingPosition) -> bool {
        at.is_available(flags(self.words(at).1))
    }

    /// Takes the next available chain; `None` if there is none. Calls `on_descriptor` with the
    /// words of its descriptors; returns its id and its number of descriptors.
    ///
    /// # Errors
    /// A chain without an end, and errors of `on_descriptor`. Nothing is taken then.
    #[inline(always)]
    pub(super) fn take(
        &mut self,
        mut on_descriptor: impl FnMut(u64, u64) -> Result<(), RingError>,
    ) -> Result<Option<(u16, u16)>, RingError> {
        // In a full ring the next position belongs to a chain in flight, whatever its flags are.
        if self.in_flight == self.size {
            return Ok(None);
        }
        let (mut address, mut word) = self.words(self.next);
        if !self.next.is_available(flags(word)) {
            return Ok(None);
        }
        let mut length = 1;
        loop {
            on_descriptor(address, word)?;
            if flags(word) & flag::NEXT == 0 {
                break;
            }
            // All descriptors that are not in flight belong to this chain, and none ends it.
            if length == self.size - self.in_flight {
                return Err(RingError::Endless);
            }
            (address, word) = self.words(self.next.after(length, self.size));
            length += 1;
        }
        self.next = self.next.after(length, self.size);
        self.in_flight += length;
        Ok(Some(((word >> 32) as u16, length)))
    }

    /// Makes the chain taken last available again.
    pub(super) fn put_back(&mut self, descriptors: u16) {
        self.release(descriptors);
        self.next = self.next.before(descriptors, self.size);
    }

    /// Returns a chain to the driver, with the number of bytes written to its buffers.
    #[inline]
    pub(super) fn publish(&mut self, id: u16, descriptors: u16, written: u32) {
        self.release(descriptors);
        let at = self.used;
        let flags = if written > 0 { at.used() | flag::WRITE } else { at.used() };
        let word = u64::from(written) | u64::from(id) << 32 | u64::from(flags) << 48;
        // Release: a driver that sees the flags sees the data in the buffers.
        self.ring.store_u64(usize::from(at.index) * DESCRIPTOR_BYTES + 8, word, Ordering::Release);
        self.used = self.used_after(descriptors);
        self.unsignaled = self.unsignaled.saturating_add(u32::from(descriptors));
    }

    fn release(&mut self, descriptors: u16) {
        let remaining = self.in_flight.checked_sub(descriptors);
        self.in_flight = remaining.expect("a ticket is given back once, to the ring that it is of");
    }

    /// True if the driver must be called for the descriptors published since the last call.
    pub(super) fn wants_call(&mut self) -> bool {
        let unannounced = std::mem::take(&mut self.unsignaled);
        if std::mem::take(&mut self.owes_call) {
            return true;
        }
        if unannounced == 0 {
            return false;
        }
        // Between publishing (`publish`) and the check of the driver's event: see the drawing.
        fence(Ordering::SeqCst);
        self.driver.wants(unannounced, self.used, self.size)
    }

    /// Suppresses kicks.
    pub(super) fn suppress_kicks(&mut self) {
        if !self.kicks_suppressed {
            self.device.disable();
        }
        self.kicks_suppressed = true;
    }

    /// Requests kicks. True if a chain was made available meanwhile, for which no kick may arrive.
    pub(super) fn enable_kicks(&mut self) -> bool {
        self.kicks_suppressed = false;
        self.device.request(self.next);
        // Between the request (above) and the check of the next descriptor: see the drawing.
        fence(Ordering::SeqCst);
        let word = self.ring.load_u64(usize::from(self.next.index) * DESCRIPTOR_BYTES + 8, Ordering::Relaxed);
        self.next.is_available(flags(word)) && self.in_flight < self.size
    }
}

/// Flags in a descriptor's second word.
fn flags(word: u64) -> u16 {
    (word >> 48) as u16
}
