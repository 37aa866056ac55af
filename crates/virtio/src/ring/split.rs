//! The split ring (virtio 1.3 § 2.7): a descriptor table, an available ring of heads, and a used
//! ring to which they are returned in any order.

mod indices;

use std::collections::VecDeque;

use self::indices::Indices;
use super::{
    RingError, cells,
    cells::{Cells, Ordering},
    chain::{
        ChainFault, ChainParser, ChainTicket, DESCRIPTOR_BYTES, DescriptorChain, MAX_DESCRIPTORS,
        RingDescriptor, TableOrder, flag,
    },
    inflight::{InflightQueueArea, SplitLog},
    layout::RingLayout,
    regions::Regions,
};

/// Distance, in entries, at which descriptors are prefetched.
const AHEAD: u16 = 8;

/// The device's half of a split ring.
#[derive(Debug)]
pub(super) struct SplitRing {
    size: u16,
    indirect: Option<TableOrder>,
    table: Cells,
    indices: Indices,
    /// Heads in flight. A head that is made available twice is an error: it would be returned
    /// twice, and the number of requests in flight would be unbounded.
    is_in_flight: Box<[bool]>,
    /// Number of chains in flight.
    in_flight: u16,
    /// Number of chains taken from the ring and not put back.
    taken_count: u64,
    log: Option<SplitLog>,
    /// Heads that were in flight when the previous device ended, to be taken first.
    resumed: VecDeque<u16>,
}

impl SplitRing {
    pub(super) fn new(layout: &RingLayout, base: u32) -> Self {
        let size = layout.size;
        let [table, available, used] = layout.cells();
        Self {
            size,
            indirect: layout.indirect.then_some(TableOrder::Linked),
            table,
            indices: Indices::new(size, layout.event_idx, available, used, base as u16),
            is_in_flight: vec![false; usize::from(size)].into(),
            in_flight: 0,
            taken_count: 0,
            log: None,
            resumed: VecDeque::new(),
        }
    }

    /// Opens an in-flight area. Chains that the previous device had taken come first. The next
    /// available index follows from their number, not from the front end's base, which does not
    /// include them.
    pub(super) fn resume(&mut self, inflight: InflightQueueArea) -> Result<(), RingError> {
        let published = self.indices.published();
        let (log, heads) = SplitLog::open(inflight, self.size, published)?;
        if let Some(heads) = heads {
            for &head in &heads {
                self.is_in_flight[usize::from(head)] = true;
            }
            self.in_flight = heads.len() as u16;
            // Every taken entry is either in the used ring or in flight.
            self.indices.set_next(published.wrapping_add(self.in_flight));
            self.resumed = heads.into();
        }
        self.log = Some(log);
        Ok(())
    }

    pub(super) fn set_cells(&mut self, layout: &RingLayout) {
        let [table, available, used] = layout.cells();
        self.table = table;
        self.indices.set_cells(available, used);
    }

    #[inline(always)]
    pub(super) fn take(&mut self, regions: &Regions) -> Result<Option<DescriptorChain>, RingError> {
        if let Some(head) = self.resumed.pop_front() {
            return Ok(Some(self.chain(regions, head, None)));
        }
        let Some(head) = self.indices.take()? else { return Ok(None) };
        // Only a prefetch: the guest may change the entry before it is taken.
        if let Some(upcoming) = self.indices.peek(AHEAD) {
            self.table.prefetch(usize::from(upcoming) * DESCRIPTOR_BYTES);
        }
        let is_in_flight = &mut self.is_in_flight[usize::from(head)];
        if *is_in_flight {
            return Err(RingError::AlreadyInFlight(head));
        }
        *is_in_flight = true;
        self.in_flight += 1;
        let number = self.taken_count;
        self.taken_count += 1;
        if let Some(log) = &mut self.log {
            log.log_taken(head);
        }
        Ok(Some(self.chain(regions, head, Some(number))))
    }

    #[inline(always)]
    fn chain(&self, regions: &Regions, head: u16, number: Option<u64>) -> DescriptorChain {
        let ticket = ChainTicket { id: head, descriptors: 1, slot: head, number };
        let mut parser = ChainParser::new(regions, self.indirect);
        let mut index = head;
        for read in 1.. {
            let descriptor = self.descriptor(index);
            parser.parse(descriptor);
            // The table of an indirect descriptor ends the chain, also if NEXT is set.
            if descriptor.flags & (flag::NEXT | flag::INDIRECT) != flag::NEXT {
                break;
            }
            if read == usize::from(self.size).min(MAX_DESCRIPTORS) {
                parser.fault(ChainFault::TooLong);
                break;
            }
            index = descriptor.link;
            if index >= self.size {
                parser.fault(ChainFault::Next(index));
                break;
            }
        }
        parser.finish(ticket)
    }

    fn descriptor(&self, index: u16) -> RingDescriptor {
        let offset = usize::from(index) * DESCRIPTOR_BYTES;
        let address = self.table.load_u64(offset, Ordering::Relaxed);
        RingDescriptor::split(address, self.table.load_u64(offset + 8, Ordering::Relaxed))
    }

    pub(super) fn complete(&mut self, ticket: &ChainTicket, written: u32) {
        self.mark_returned(ticket.id);
        match &mut self.log {
            None => self.indices.publish(ticket.id, written),
            // Logged before the used index moves, cleared after: see `inflight`.
            Some(log) => {
                log.begin_publish(ticket.id);
                self.indices.publish(ticket.id, written);
                log.end_publish(ticket.id, self.indices.published());
            }
        }
    }

    /// Makes the chain available again; false if it is not the last one taken.
    pub(super) fn put_back(&mut self, ticket: &ChainTicket) -> bool {
        // Only the chain taken last: its entry precedes the next one to take.
        if ticket.number.is_none_or(|number| number + 1 != self.taken_count) {
            return false;
        }
        self.taken_count -= 1;
        self.mark_returned(ticket.id);
        self.indices.put_back();
        if let Some(log) = &mut self.log {
            log.clear(ticket.id);
        }
        true
    }

    fn mark_returned(&mut self, head: u16) {
        let was_in_flight = std::mem::take(&mut self.is_in_flight[usize::from(head)]);
        assert!(was_in_flight, "a ticket is given back once, to the ring that it is of");
        self.in_flight -= 1;
    }

    pub(super) fn taken(&self) -> u16 {
        self.in_flight
    }

    pub(super) fn is_lost(&self) -> bool {
        self.table.is_lost() || self.indices.is_lost()
    }

    pub(super) fn wants_call(&mut self) -> bool {
        self.indices.wants_call()
    }

    pub(super) fn suppress_kicks(&mut self) {
        self.indices.suppress_kicks();
    }

    pub(super) fn enable_kicks(&mut self) -> bool {
        self.indices.enable_kicks() || !self.resumed.is_empty()
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.indices.next())
    }

    /// Closes the in-flight area, if no chain is in it.
    pub(super) fn close(self) {
        if let Some(log) = self.log.filter(|_| self.in_flight == 0) {
            log.close();
        }
    }
}
