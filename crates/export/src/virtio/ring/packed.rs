//! The packed ring (virtio 1.3 § 2.8): one ring of descriptors that both sides write to. Two flags
//! and the wrap counters tell whose turn a descriptor is.
//!
//! ```text
//!            used ▼ given back, in any order      next ▼
//!   … available │ used │ taken │ taken │ taken │ available │ …
//!                        their descriptors are written over
//! ```
//!
//! Used descriptors follow each other; each stands for the whole of its chain, whose other
//! descriptors are skipped.

use std::collections::VecDeque;

use super::{
    Broken,
    cells::{Cells, Ordering, fence},
    chain::{
        Chain, ChainFault, DESCRIPTOR_BYTES, Descriptor, Gathering, MAX_DESCRIPTORS, Order, Ticket, flag,
    },
    inflight::{Inflight, PackedLog},
    layout::Layout,
    position::{Position, Suppression},
    regions::Regions,
};

/// The device's half of a packed ring.
#[derive(Debug)]
pub(super) struct Packed {
    size: u16,
    indirect: Option<Order>,
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
    /// How many chains that are.
    taken: u16,
    /// How many were taken from the ring and not put back.
    numbers: u64,
    /// Descriptors given back that the driver was not asked about yet.
    unannounced: u32,
    /// Nobody knows what was announced before this ring was taken over.
    owes_call: bool,
    silent: bool,
    log: Option<PackedLog>,
    /// Chains that were out when the one before us ended, to be served first: their entries in the
    /// in-flight area and their lengths.
    again: VecDeque<(u16, u16)>,
}

impl Packed {
    /// # Errors
    /// A base that is outside the ring, or whose halves are not of one ring.
    pub(super) fn new(layout: &Layout, base: u32) -> Result<Self, Broken> {
        let size = layout.size;
        let (ring, driver, device) = parts(layout);
        let next = Position::from_bits(base as u16);
        let used = Position::from_bits((base >> 16) as u16);
        if next.index >= size || used.index >= size {
            return Err(Broken::Base { base, size });
        }
        Ok(Self {
            size,
            indirect: layout.indirect.then_some(Order::Rowed),
            ring,
            driver,
            device,
            // What lies between the two is out, and after a crash nobody knows what it was: it is
            // taken once more.
            next: used,
            used,
            out: 0,
            taken: 0,
            numbers: 0,
            unannounced: 0,
            owes_call: true,
            silent: false,
            log: None,
            again: VecDeque::new(),
        })
    }

    /// Takes up an in-flight area. Where one before us had taken chains, they come first, and the
    /// area knows where the ring goes on: the front end does not.
    pub(super) fn resume(&mut self, inflight: Inflight) -> Result<(), Broken> {
        let ring = &self.ring;
        let is_published = |at: Position| !at.is_available(flags(ring, at, Ordering::Acquire));
        let (log, remains) = PackedLog::open(inflight, self.size, self.used, is_published)?;
        if let Some(remains) = remains {
            self.out = remains.chains.iter().map(|&(_, length)| length).sum();
            self.taken = remains.chains.len() as u16;
            self.used = remains.used;
            self.next = remains.used.after(self.out, self.size);
            self.again = remains.chains.into();
        }
        self.log = Some(log);
        Ok(())
    }

    pub(super) fn set_cells(&mut self, layout: &Layout) {
        (self.ring, self.driver, self.device) = parts(layout);
    }

    #[inline(always)]
    pub(super) fn take(&mut self, regions: &Regions) -> Result<Option<Chain>, Broken> {
        if let Some((slot, length)) = self.again.pop_front() {
            return self.take_again(regions, slot, length).map(Some);
        }
        // A full ring has come round to what is out, whatever the flags there say.
        if self.out == self.size {
            return Ok(None);
        }
        let (mut descriptor, available) = self.descriptor(self.next);
        if !available {
            return Ok(None);
        }
        if let Some(log) = &mut self.log {
            log.start();
        }
        let mut gathering = Gathering::new(regions, self.indirect);
        let mut length = 1;
        loop {
            if let Some(log) = &mut self.log {
                log.note(descriptor)?;
            }
            if usize::from(length) <= MAX_DESCRIPTORS {
                gathering.take(descriptor);
            } else {
                // Its end has to be found all the same: there is its id.
                gathering.fault(ChainFault::TooLong);
            }
            if !descriptor.has(flag::NEXT) {
                break;
            }
            if length == self.size - self.out {
                return Err(Broken::Endless);
            }
            descriptor = self.descriptor(self.next.after(length, self.size)).0;
            length += 1;
        }
        let slot = self.log.as_mut().map_or(0, PackedLog::taken);
        let number = Some(self.numbers);
        self.numbers += 1;
        self.next = self.next.after(length, self.size);
        self.out += length;
        self.taken += 1;
        Ok(Some(gathering.finish(Ticket { id: descriptor.link, descriptors: length, slot, number })))
    }

    /// The chain whose copy is in the in-flight area.
    fn take_again(&self, regions: &Regions, first: u16, length: u16) -> Result<Chain, Broken> {
        let log = self.log.as_ref().expect("it told of the chain");
        let mut gathering = Gathering::new(regions, self.indirect);
        let mut slot = first;
        let mut id = 0;
        for number in 1..=length {
            let (descriptor, next) = log.descriptor(slot)?;
            if usize::from(number) <= MAX_DESCRIPTORS {
                gathering.take(descriptor);
            } else {
                gathering.fault(ChainFault::TooLong);
            }
            (slot, id) = (next, descriptor.link);
        }
        Ok(gathering.finish(Ticket { id, descriptors: length, slot: first, number: None }))
    }

    /// What is there, and whether it is the driver's to give.
    fn descriptor(&self, at: Position) -> (Descriptor, bool) {
        let offset = usize::from(at.index) * DESCRIPTOR_BYTES;
        // The flags with all that is in their word; whoever sees them sees the rest.
        let word = self.ring.load_u64(offset + 8, Ordering::Acquire);
        let descriptor = Descriptor::packed(self.ring.load_u64(offset, Ordering::Relaxed), word);
        (descriptor, at.is_available(descriptor.flags))
    }

    pub(super) fn complete(&mut self, ticket: &Ticket, written: u32) {
        self.back(ticket);
        let at = self.used;
        self.used = at.after(ticket.descriptors, self.size);
        if let Some(log) = &mut self.log {
            log.publishing(ticket.slot, self.used);
        }
        let offset = usize::from(at.index) * DESCRIPTOR_BYTES;
        let flags = if written > 0 { at.used() | flag::WRITE } else { at.used() };
        let word = u64::from(written) | u64::from(ticket.id) << 32 | u64::from(flags) << 48;
        self.ring.store_u64(offset + 8, word, Ordering::Release);
        if let Some(log) = &mut self.log {
            log.published(ticket.slot);
        }
        self.unannounced = self.unannounced.saturating_add(u32::from(ticket.descriptors));
    }

    /// Whether it was the chain taken last, and is to be taken again.
    pub(super) fn put_back(&mut self, ticket: &Ticket) -> bool {
        if ticket.number.is_none_or(|number| number + 1 != self.numbers) {
            return false;
        }
        self.numbers -= 1;
        self.back(ticket);
        self.next = self.next.before(ticket.descriptors, self.size);
        if let Some(log) = &mut self.log {
            log.forgotten(ticket.slot);
        }
        true
    }

    fn back(&mut self, ticket: &Ticket) {
        let left = self.out.checked_sub(ticket.descriptors);
        self.out = left.expect("a ticket is given back once, to the ring that it is of");
        self.taken -= 1;
    }

    pub(super) fn taken(&self) -> u16 {
        self.taken
    }

    pub(super) fn is_lost(&self) -> bool {
        self.ring.is_lost() || self.driver.is_lost() || self.device.is_lost()
    }

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

    pub(super) fn silence(&mut self) {
        if !self.silent {
            self.device.silence();
        }
        self.silent = true;
    }

    pub(super) fn listen(&mut self) -> bool {
        self.silent = false;
        self.device.ask(self.next);
        fence(Ordering::SeqCst);
        let available = self.next.is_available(flags(&self.ring, self.next, Ordering::Relaxed));
        (available && self.out < self.size) || !self.again.is_empty()
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.next.bits()) | u32::from(self.used.bits()) << 16
    }

    /// Lets go of the in-flight area, where no chain is in it.
    pub(super) fn close(self) {
        if let Some(log) = self.log.filter(|_| self.taken == 0) {
            log.close();
        }
    }
}

/// Descriptors, driver's part, device's part.
fn parts(layout: &Layout) -> (Cells, Suppression, Suppression) {
    let [ring, driver, device] = layout.cells();
    (ring, Suppression::new(driver, layout.event_idx), Suppression::new(device, layout.event_idx))
}

/// The flags of the descriptor there.
fn flags(ring: &Cells, at: Position, order: Ordering) -> u16 {
    ring.load_u16(usize::from(at.index) * DESCRIPTOR_BYTES + 14, order)
}
