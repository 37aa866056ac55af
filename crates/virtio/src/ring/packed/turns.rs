//! Whose turn a descriptor of a packed ring is, and who wants to be told of it: the device's half
//! of the protocol, as far as it is about order (virtio 1.3 § 2.8.1 to § 2.8.10).
//!
//! ```text
//!   descriptor     address │ length, id, flags                written by both sides in turn
//!   suppression    position of the event │ flags              one written by each side
//! ```
//!
//! A descriptor changes hands with its flags, which are stored last and loaded first. Each side
//! hands over, then looks whether the other wants to be told; or asks to be told, then looks once
//! more. Between the two is a fence, so that one of them sees the other:
//!
//! ```text
//!   device                                 driver
//!   event = next           (listen)        flags of next: available     (publish)
//!   fence                                  fence
//!   next available? look again             event passed? kick
//! ```
//!
//! `crates/export/tests/model` tries this file in every interleaving.

use super::{
    Broken,
    cells::{Cells, Ordering, fence},
    chain::{DESCRIPTOR_BYTES, flag},
    position::{Position, Suppression},
};

/// The device's half.
#[derive(Debug)]
pub(super) struct Turns {
    size: u16,
    ring: Cells,
    /// What the driver wants to be told of, and what we do.
    driver: Suppression,
    device: Suppression,
    /// The descriptor to be taken next.
    next: Position,
    /// Where the next used descriptor goes.
    used: Position,
    /// How many descriptors are between the two: of chains that are out.
    out: u16,
    /// Descriptors given back that the driver was not asked about yet.
    unannounced: u32,
    /// Nobody knows what was announced before this ring was taken over.
    owes_call: bool,
    /// Whether the driver was told not to kick.
    silent: bool,
}

impl Turns {
    /// `cells`: descriptors, the driver's part, the device's part.
    pub(super) fn new(size: u16, event_idx: bool, cells: [Cells; 3], used: Position) -> Self {
        let [ring, driver, device] = cells;
        Self {
            size,
            ring,
            driver: Suppression::new(driver, event_idx),
            device: Suppression::new(device, event_idx),
            next: used,
            used,
            out: 0,
            unannounced: 0,
            owes_call: true,
            silent: false,
        }
    }

    /// The same ring in other memory.
    pub(super) fn set_cells(&mut self, event_idx: bool, cells: [Cells; 3]) {
        let [ring, driver, device] = cells;
        self.ring = ring;
        self.driver = Suppression::new(driver, event_idx);
        self.device = Suppression::new(device, event_idx);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.ring.is_lost() || self.driver.is_lost() || self.device.is_lost()
    }

    /// The descriptor to be taken next.
    pub(super) fn next(&self) -> Position {
        self.next
    }

    /// Where the next used descriptor goes.
    pub(super) fn used(&self) -> Position {
        self.used
    }

    /// Where the used descriptor goes that follows one of a chain of so many descriptors.
    pub(super) fn used_after(&self, descriptors: u16) -> Position {
        self.used.after(descriptors, self.size)
    }

    /// Goes on at `used`, with chains out of `out` descriptors in all, at most the ring's.
    pub(super) fn resume(&mut self, used: Position, out: u16) {
        (self.used, self.out) = (used, out);
        self.next = used.after(out, self.size);
    }

    /// The words of the descriptor there: its address, and its length, id and flags in one.
    #[inline]
    fn words(&self, at: Position) -> (u64, u64) {
        let offset = usize::from(at.index) * DESCRIPTOR_BYTES;
        // The flags with all that is in their word; whoever sees them sees the rest.
        let word = self.ring.load_u64(offset + 8, Ordering::Acquire);
        (self.ring.load_u64(offset, Ordering::Relaxed), word)
    }

    /// Whether the descriptor there is the device's.
    pub(super) fn is_available(&self, at: Position) -> bool {
        at.is_available(flags(self.words(at).1))
    }

    /// Takes the chain that the driver made available next, if there is one: tells `each` the words
    /// of its descriptors. Its id, and how many descriptors it has.
    ///
    /// # Errors
    /// A chain without an end, and what `each` says. Nothing is taken then.
    #[inline(always)]
    pub(super) fn take(
        &mut self,
        mut each: impl FnMut(u64, u64) -> Result<(), Broken>,
    ) -> Result<Option<(u16, u16)>, Broken> {
        // A full ring has come round to what is out, whatever the flags there say.
        if self.out == self.size {
            return Ok(None);
        }
        let (mut address, mut word) = self.words(self.next);
        if !self.next.is_available(flags(word)) {
            return Ok(None);
        }
        let mut length = 1;
        loop {
            each(address, word)?;
            if flags(word) & flag::NEXT == 0 {
                break;
            }
            if length == self.size - self.out {
                return Err(Broken::Endless);
            }
            (address, word) = self.words(self.next.after(length, self.size));
            length += 1;
        }
        self.next = self.next.after(length, self.size);
        self.out += length;
        Ok(Some(((word >> 32) as u16, length)))
    }

    /// The chain taken last, of so many descriptors, is to be taken again.
    pub(super) fn put_back(&mut self, descriptors: u16) {
        self.leave(descriptors);
        self.next = self.next.before(descriptors, self.size);
    }

    /// Gives a chain back to the driver, of whose buffers `written` bytes were written.
    #[inline]
    pub(super) fn publish(&mut self, id: u16, descriptors: u16, written: u32) {
        self.leave(descriptors);
        let at = self.used;
        let flags = if written > 0 { at.used() | flag::WRITE } else { at.used() };
        let word = u64::from(written) | u64::from(id) << 32 | u64::from(flags) << 48;
        // Whoever sees it sees what was written to the buffers.
        self.ring.store_u64(usize::from(at.index) * DESCRIPTOR_BYTES + 8, word, Ordering::Release);
        self.used = self.used_after(descriptors);
        self.unannounced = self.unannounced.saturating_add(u32::from(descriptors));
    }

    fn leave(&mut self, descriptors: u16) {
        let left = self.out.checked_sub(descriptors);
        self.out = left.expect("a ticket is given back once, to the ring that it is of");
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
        self.driver.wants(unannounced, self.used, self.size)
    }

    /// No kicks, please.
    pub(super) fn silence(&mut self) {
        if !self.silent {
            self.device.silence();
        }
        self.silent = true;
    }

    /// Asks for kicks. True: something was made available meanwhile, and nobody may kick for it.
    pub(super) fn listen(&mut self) -> bool {
        self.silent = false;
        self.device.ask(self.next);
        fence(Ordering::SeqCst);
        let word = self.ring.load_u64(usize::from(self.next.index) * DESCRIPTOR_BYTES + 8, Ordering::Relaxed);
        self.next.is_available(flags(word)) && self.out < self.size
    }
}

/// The flags in a descriptor's second word.
fn flags(word: u64) -> u16 {
    (word >> 48) as u16
}
