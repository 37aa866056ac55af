//! The packed ring (virtio 1.3 § 2.8): one ring of descriptors that both sides write to. Two flags
//! and the wrap counters determine the owner of each descriptor.
//!
//! ```text
//!           used ▼ completed, in any order      next ▼
//!   … available │ used │ taken │ taken │ taken │ available │ …
//!                        their descriptors are overwritten
//! ```
//!
//! Used descriptors are written one after another. Each stands for its whole chain, whose other
//! descriptors are skipped.

mod ownership;

use std::collections::VecDeque;

use self::ownership::DescriptorOwnership;
use super::{
    RingError, cells,
    chain::{
        self, ChainFault, ChainParser, ChainTicket, DescriptorChain, MAX_DESCRIPTORS, RingDescriptor,
        TableOrder,
    },
    inflight::{InflightQueueArea, PackedLog},
    layout::RingLayout,
    position::{self, RingPosition},
    regions::Regions,
};

/// The device's half of a packed ring.
#[derive(Debug)]
pub(super) struct PackedRing {
    size: u16,
    indirect: Option<TableOrder>,
    ownership: DescriptorOwnership,
    /// Number of chains in flight.
    in_flight: u16,
    /// Number of chains taken from the ring and not put back.
    next_number: u64,
    log: Option<PackedLog>,
    /// Chains that were in flight when the previous device ended, to be taken first: their entries
    /// in the in-flight area and their lengths.
    resumed: VecDeque<(u16, u16)>,
}

impl PackedRing {
    /// # Errors
    /// A base that is outside the ring.
    pub(super) fn new(layout: &RingLayout, base: u32) -> Result<Self, RingError> {
        let size = layout.size;
        let next = RingPosition::from_bits(base as u16);
        let used = RingPosition::from_bits((base >> 16) as u16);
        if next.index >= size || used.index >= size {
            return Err(RingError::Base { base, size });
        }
        Ok(Self {
            size,
            indirect: layout.indirect.then_some(TableOrder::Sequential),
            // Starts at the used position, not at the available one. The descriptors between the
            // two are in flight, and after a crash their content is unknown: they are taken
            // again.
            ownership: DescriptorOwnership::new(size, layout.event_idx, layout.cells(), used),
            in_flight: 0,
            next_number: 0,
            log: None,
            resumed: VecDeque::new(),
        })
    }

    /// Opens an in-flight area. Chains that the previous device had taken come first. The position
    /// where the ring continues is that of the area, which the front end does not know.
    pub(super) fn resume(&mut self, inflight: InflightQueueArea) -> Result<(), RingError> {
        let ownership = &self.ownership;
        let is_published = |at: RingPosition| !ownership.is_available(at);
        let (log, remains) = PackedLog::open(inflight, self.size, ownership.used(), is_published)?;
        if let Some(remains) = remains {
            let descriptors = remains.chains.iter().map(|&(_, length)| length).sum();
            self.ownership.resume(remains.used, descriptors);
            self.in_flight = remains.chains.len() as u16;
            self.resumed = remains.chains.into();
        }
        self.log = Some(log);
        Ok(())
    }

    pub(super) fn set_cells(&mut self, layout: &RingLayout) {
        self.ownership.set_cells(layout.event_idx, layout.cells());
    }

    #[inline(always)]
    pub(super) fn take(&mut self, regions: &Regions) -> Result<Option<DescriptorChain>, RingError> {
        if let Some((slot, length)) = self.resumed.pop_front() {
            return self.resume_chain(regions, slot, length).map(Some);
        }
        if let Some(log) = &mut self.log {
            log.begin_chain();
        }
        let mut parser = ChainParser::new(regions, self.indirect);
        let mut read = 0;
        let taken = self.ownership.take(|address, word| {
            let descriptor = RingDescriptor::packed(address, word);
            if let Some(log) = &mut self.log {
                log.log_descriptor(descriptor)?;
            }
            read += 1;
            if read <= MAX_DESCRIPTORS {
                parser.parse(descriptor);
            } else {
                // Continue to the end of the chain, whose last descriptor has the id.
                parser.fault(ChainFault::TooLong);
            }
            Ok(())
        })?;
        let Some((id, descriptors)) = taken else { return Ok(None) };
        let slot = self.log.as_mut().map_or(0, PackedLog::commit_chain);
        let number = Some(self.next_number);
        self.next_number += 1;
        self.in_flight += 1;
        Ok(Some(parser.finish(ChainTicket { id, descriptors, slot, number })))
    }

    /// The chain whose copy is in the in-flight area.
    fn resume_chain(&self, regions: &Regions, first: u16, length: u16) -> Result<DescriptorChain, RingError> {
        let log = self.log.as_ref().expect("the log contains the chain");
        let mut parser = ChainParser::new(regions, self.indirect);
        let mut slot = first;
        let mut id = 0;
        for number in 1..=length {
            let (descriptor, next) = log.descriptor(slot)?;
            if usize::from(number) <= MAX_DESCRIPTORS {
                parser.parse(descriptor);
            } else {
                parser.fault(ChainFault::TooLong);
            }
            (slot, id) = (next, descriptor.link);
        }
        Ok(parser.finish(ChainTicket { id, descriptors: length, slot: first, number: None }))
    }

    pub(super) fn complete(&mut self, ticket: &ChainTicket, written: u32) {
        self.in_flight -= 1;
        // Logged before the driver can see the used descriptor, and cleared after: see `inflight`.
        if let Some(log) = &mut self.log {
            log.begin_publish(ticket.slot, self.ownership.used_after(ticket.descriptors));
        }
        self.ownership.publish(ticket.id, ticket.descriptors, written);
        if let Some(log) = &mut self.log {
            log.end_publish(ticket.slot);
        }
    }

    /// Makes the chain available again; false if it is not the last one taken.
    pub(super) fn put_back(&mut self, ticket: &ChainTicket) -> bool {
        // Only the chain taken last: an older one is followed by chains in flight.
        if ticket.number.is_none_or(|number| number + 1 != self.next_number) {
            return false;
        }
        self.next_number -= 1;
        self.in_flight -= 1;
        self.ownership.put_back(ticket.descriptors);
        if let Some(log) = &mut self.log {
            log.put_back(ticket.slot);
        }
        true
    }

    pub(super) fn taken(&self) -> u16 {
        self.in_flight
    }

    pub(super) fn is_lost(&self) -> bool {
        self.ownership.is_lost()
    }

    pub(super) fn wants_call(&mut self) -> bool {
        self.ownership.wants_call()
    }

    pub(super) fn suppress_kicks(&mut self) {
        self.ownership.suppress_kicks();
    }

    pub(super) fn enable_kicks(&mut self) -> bool {
        self.ownership.enable_kicks() || !self.resumed.is_empty()
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.ownership.next().bits()) | u32::from(self.ownership.used().bits()) << 16
    }

    /// Closes the in-flight area, if no chain is in it.
    pub(super) fn close(self) {
        if let Some(log) = self.log.filter(|_| self.in_flight == 0) {
            log.close();
        }
    }
}
