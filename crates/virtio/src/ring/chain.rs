//! A chain of descriptors: parsing, and all faults that it can have.
//!
//! A descriptor is copied once, then validated. An invalid chain is still a chain: its ticket is
//! returned to the driver, and its valid writable part may receive a status.

use reactor::guest::GuestBytes;

pub(super) use super::regions::DESCRIPTOR_BYTES;
use super::regions::{ChainMemory, Regions};

/// Maximum number of descriptors in one chain, including those of an indirect table. Linux's vhost
/// and QEMU have the same limit; a driver's `seg_max` is far below it.
pub const MAX_DESCRIPTORS: usize = 1024;

/// Maximum number of pieces of memory in one chain. A buffer that crosses borders of regions is
/// several pieces, and the front end determines the number and size of regions.
pub(super) const MAX_PLACES: usize = 1024;

/// `VIRTQ_DESC_F_…` (virtio 1.3 § 2.7.5, § 2.8.1), equal in both formats.
pub(super) mod flag {
    pub(in super::super) const NEXT: u16 = 1;
    pub(in super::super) const WRITE: u16 = 2;
    pub(in super::super) const INDIRECT: u16 = 4;
}

/// The right, and the obligation, to complete one chain: by `Virtqueue::complete`, or by
/// `Virtqueue::put_back` before it is started. If it is dropped, the driver waits for ever.
#[derive(Debug)]
#[must_use = "the driver waits for this chain"]
pub struct ChainTicket {
    /// The driver's identification of the chain: in a split ring its first descriptor, in a packed
    /// ring its buffer id.
    pub(super) id: u16,
    /// Number of descriptors of the ring that it occupies.
    pub(super) descriptors: u16,
    /// Its entry in the in-flight area of a packed ring.
    pub(super) slot: u16,
    /// Number of chains taken before it; `None` if it was taken before a crash. A position in the
    /// ring would be ambiguous: another chain can be there while this one is still in flight.
    pub(super) number: Option<u64>,
}

/// A chain, as taken from the ring.
#[derive(Debug)]
pub struct DescriptorChain {
    /// Ticket to return when the chain is completed.
    pub ticket: ChainTicket,
    /// Readable memory, then writable memory.
    pub(crate) segments: ChainMemory,
    /// Number of readable pieces.
    pub(crate) reads: usize,
    /// Number of descriptors, including those of an indirect table.
    pub descriptors: usize,
    /// Reason why it must not be executed. It then contains only the valid memory.
    pub fault: Option<ChainFault>,
}

impl DescriptorChain {
    /// Prefetches the memory that is accessed first and last: a request's header and status.
    pub fn prefetch(&self) {
        if let Some(first) = self.readable().first() {
            first.prefetch(0);
        }
        if let Some(last) = self.writable().last() {
            last.prefetch_to_write(last.bytes() - 1);
        }
    }

    /// Memory that the device reads.
    pub fn readable(&self) -> &[GuestBytes] {
        &self.segments[..self.reads]
    }

    /// Memory that the device writes.
    pub fn writable(&self) -> &[GuestBytes] {
        &self.segments[self.reads..]
    }
}

/// Fault of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A buffer, or an indirect table, is outside the guest's memory.
    #[error("a descriptor's buffer is outside the guest's memory")]
    Outside,
    /// More descriptors than its table has, so it loops, or more than [`MAX_DESCRIPTORS`].
    #[error("it loops, or has more than {MAX_DESCRIPTORS} descriptors")]
    TooLong,
    /// The next descriptor is outside the table.
    #[error("it continues at descriptor {0}, which is outside its table")]
    Next(u16),
    /// A readable buffer follows a writable one (§ 2.7.4.2).
    #[error("a readable buffer follows a writable one")]
    Order,
    /// More than [`MAX_PLACES`] pieces of memory.
    #[error("its buffers lie in more than {MAX_PLACES} pieces of memory")]
    Scattered,
    /// More than 2³² - 1 bytes.
    #[error("its buffers exceed 4 GiB")]
    TooLarge,
    /// An indirect descriptor although the feature was not negotiated.
    #[error("it has an indirect descriptor, which was not negotiated")]
    NotNegotiated,
    /// An indirect descriptor in an indirect table (§ 2.7.5.3.1).
    #[error("its indirect table refers to an indirect table")]
    Nested,
    /// An indirect descriptor that is not the last (§ 2.7.5.3.1).
    #[error("descriptors follow its indirect table")]
    IndirectNext,
    /// An indirect table of no descriptors, or of a partial one.
    #[error("its indirect table has {0} bytes")]
    Table(u32),
}

/// A copy of a descriptor. `link` is the next descriptor in a split ring, the buffer id in a packed
/// one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingDescriptor {
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) flags: u16,
    pub(super) link: u16,
}

impl RingDescriptor {
    /// From the two words of a descriptor of a split ring (§ 2.7.5) or its indirect tables.
    pub(super) fn split(address: u64, word: u64) -> Self {
        Self { address, bytes: word as u32, flags: (word >> 32) as u16, link: (word >> 48) as u16 }
    }

    /// From the two words of a descriptor of a packed ring (§ 2.8.13) or its indirect tables (§
    /// 2.8.7).
    pub(super) fn packed(address: u64, word: u64) -> Self {
        Self { address, bytes: word as u32, flags: (word >> 48) as u16, link: (word >> 32) as u16 }
    }

    pub(super) fn has(self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Order of the descriptors of an indirect table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableOrder {
    /// Linked by NEXT from the first on, as in split rings.
    Linked,
    /// Sequential, all of them, as in packed rings (§ 2.8.7).
    Sequential,
}

/// Parser state of a chain.
pub(super) struct ChainParser<'m> {
    regions: &'m Regions,
    indirect: Option<TableOrder>,
    segments: ChainMemory,
    reads: usize,
    /// True if a writable descriptor was seen, even one of zero bytes.
    writes: bool,
    bytes: u64,
    descriptors: usize,
    fault: Option<ChainFault>,
}

impl<'m> ChainParser<'m> {
    /// `indirect`: format of indirect tables; `None` if they were not negotiated.
    pub(super) fn new(regions: &'m Regions, indirect: Option<TableOrder>) -> Self {
        Self {
            regions,
            indirect,
            segments: ChainMemory::new(),
            reads: 0,
            writes: false,
            bytes: 0,
            descriptors: 0,
            fault: None,
        }
    }

    #[inline(always)]
    pub(super) fn finish(self, ticket: ChainTicket) -> DescriptorChain {
        let Self { segments: places, reads, descriptors, fault, .. } = self;
        DescriptorChain { ticket, segments: places, reads, descriptors, fault }
    }

    /// Records a fault. The first one is kept.
    pub(super) fn fault(&mut self, fault: ChainFault) {
        self.fault.get_or_insert(fault);
    }

    /// Parses the next descriptor of the ring.
    #[inline]
    pub(super) fn parse(&mut self, descriptor: RingDescriptor) {
        if !descriptor.has(flag::INDIRECT) {
            return self.parse_buffer(descriptor);
        }
        match self.indirect {
            None => self.fault(ChainFault::NotNegotiated),
            Some(_) if descriptor.has(flag::NEXT) => self.fault(ChainFault::IndirectNext),
            Some(order) => self.parse_table(descriptor, order),
        }
    }

    #[inline]
    // Checked before the addresses are resolved: the work for one chain stays bounded.
    fn parse_buffer(&mut self, descriptor: RingDescriptor) {
        if self.descriptors == MAX_DESCRIPTORS || self.segments.len() > MAX_PLACES {
            return self.fault(ChainFault::TooLong);
        }
        self.descriptors += 1;
        self.bytes += u64::from(descriptor.bytes);
        if self.bytes > u64::from(u32::MAX) {
            return self.fault(ChainFault::TooLarge);
        }
        self.writes |= descriptor.has(flag::WRITE);
        if self.writes && !descriptor.has(flag::WRITE) {
            return self.fault(ChainFault::Order);
        }
        if !self.regions.append_range(descriptor.address, descriptor.bytes as usize, &mut self.segments) {
            self.fault(ChainFault::Outside);
        }
        if self.segments.len() > MAX_PLACES {
            self.fault(ChainFault::Scattered);
        }
        // Everything before the first writable buffer is readable.
        if !self.writes {
            self.reads = self.segments.len();
        }
    }

    fn parse_table(&mut self, descriptor: RingDescriptor, order: TableOrder) {
        let length = descriptor.bytes as usize / DESCRIPTOR_BYTES;
        if length == 0 || !(descriptor.bytes as usize).is_multiple_of(DESCRIPTOR_BYTES) {
            return self.fault(ChainFault::Table(descriptor.bytes));
        }
        let RingDescriptor { address: table, bytes, .. } = descriptor;
        if table.checked_add(u64::from(bytes)).is_none() {
            return self.fault(ChainFault::Outside);
        }
        let mut index = 0;
        for read in 1.. {
            let at = table + (index * DESCRIPTOR_BYTES) as u64;
            // Read one at a time: a large table of which few entries are linked costs little.
            let Some((address, word)) = self.regions.descriptor(at) else {
                return self.fault(ChainFault::Outside);
            };
            let descriptor = match order {
                TableOrder::Linked => RingDescriptor::split(address, word),
                TableOrder::Sequential => RingDescriptor::packed(address, word),
            };
            if descriptor.has(flag::INDIRECT) {
                return self.fault(ChainFault::Nested);
            }
            self.parse_buffer(descriptor);
            let ends = match order {
                TableOrder::Linked => !descriptor.has(flag::NEXT),
                TableOrder::Sequential => read == length,
            };
            if ends {
                return;
            }
            // A linked table with more steps than entries loops.
            if read == length.min(MAX_DESCRIPTORS) {
                return self.fault(ChainFault::TooLong);
            }
            index = match order {
                TableOrder::Linked => usize::from(descriptor.link),
                TableOrder::Sequential => read,
            };
            if index >= length {
                return self.fault(ChainFault::Next(descriptor.link));
            }
        }
    }
}
