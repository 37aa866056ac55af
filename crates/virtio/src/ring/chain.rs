//! A chain of descriptors: what the driver describes with it, and all that can be wrong with it.
//!
//! A descriptor is copied once, then judged. A chain that is wrong is still a chain: its ticket
//! goes back to the driver, and what of it could be read may take a status.

use reactor::guest::Place;

pub(super) use super::regions::DESCRIPTOR_BYTES;
use super::regions::{Places, Regions};

/// Descriptors of one chain, those of an indirect table included. What Linux's vhost and QEMU
/// allow; a driver's `seg_max` is far below it.
pub const MAX_DESCRIPTORS: usize = 1024;

/// Pieces of memory of one chain. A buffer that crosses from region into region is several, and a
/// guest's regions may be as many and as small as its front end likes.
pub(super) const MAX_PLACES: usize = 1024;

/// `VIRTQ_DESC_F_…` (virtio 1.3 § 2.7.5, § 2.8.1), the same in both kinds of ring.
pub(super) mod flag {
    pub(in super::super) const NEXT: u16 = 1;
    pub(in super::super) const WRITE: u16 = 2;
    pub(in super::super) const INDIRECT: u16 = 4;
}

/// The right, and the duty, to complete one chain: `Ring::complete`, or `Ring::put_back` before it
/// was begun. One that is dropped is a request that the driver waits for.
#[derive(Debug)]
#[must_use = "the driver waits for this chain"]
pub struct Ticket {
    /// What the driver knows the chain by: in a split ring its first descriptor, in a packed ring
    /// its buffer id.
    pub(super) id: u16,
    /// How many descriptors of the ring it takes.
    pub(super) descriptors: u16,
    /// Its entry in the in-flight area of a packed ring.
    pub(super) slot: u16,
    /// How many chains had been taken before it. A place in the ring would not do: another chain is
    /// there while this one is still out. `None`: it was taken before a crash.
    pub(super) number: Option<u64>,
}

/// What a driver asks for.
#[derive(Debug)]
pub struct Chain {
    /// To be given back when it is done.
    pub ticket: Ticket,
    /// What the device reads, then what it writes.
    pub(crate) places: Places,
    /// How many of them it reads.
    pub(crate) reads: usize,
    /// Descriptors in all, those of an indirect table included.
    pub descriptors: usize,
    /// Why it must not be carried out. Its places are those that could be read.
    pub fault: Option<ChainFault>,
}

impl Chain {
    /// Has the processor fetch what is touched first and last: a request's header and status.
    pub fn prefetch(&self) {
        if let Some(first) = self.readable().first() {
            first.prefetch(0);
        }
        if let Some(last) = self.writable().last() {
            last.prefetch_to_write(last.bytes() - 1);
        }
    }

    /// What the device reads.
    pub fn readable(&self) -> &[Place] {
        &self.places[..self.reads]
    }

    /// What the device writes.
    pub fn writable(&self) -> &[Place] {
        &self.places[self.reads..]
    }
}

/// What is wrong with a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainFault {
    /// A buffer, or an indirect table, is not in the guest's memory.
    #[error("a descriptor's buffer is outside the guest's memory")]
    Outside,
    /// More descriptors than the table it lies in, so it loops, or than [`MAX_DESCRIPTORS`].
    #[error("it loops, or has more than {MAX_DESCRIPTORS} descriptors")]
    TooLong,
    /// It goes on at a descriptor that its table does not have.
    #[error("it goes on at descriptor {0}, which its table does not have")]
    Next(u16),
    /// A buffer to read comes after one to write (§ 2.7.4.2).
    #[error("a buffer to read follows one to write")]
    Order,
    /// More than [`MAX_PLACES`].
    #[error("its buffers lie in more than {MAX_PLACES} pieces of memory")]
    Scattered,
    /// More than 2³² - 1 bytes.
    #[error("its buffers exceed 4 GiB")]
    TooLarge,
    /// An indirect descriptor without the feature.
    #[error("it has an indirect descriptor, which was not negotiated")]
    NotNegotiated,
    /// An indirect descriptor in an indirect table (§ 2.7.5.3.1).
    #[error("its indirect table refers to an indirect table")]
    Nested,
    /// An indirect descriptor that is not the last (§ 2.7.5.3.1).
    #[error("descriptors follow its indirect table")]
    IndirectNext,
    /// An indirect table of no descriptors, or of a part of one.
    #[error("its indirect table has {0} bytes")]
    Table(u32),
}

/// A descriptor, as it was when it was read. `link` is the next descriptor in a split ring, the
/// buffer id in a packed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) address: u64,
    pub(super) bytes: u32,
    pub(super) flags: u16,
    pub(super) link: u16,
}

impl Descriptor {
    /// Of a split ring (§ 2.7.5) and its indirect tables: its two words.
    pub(super) fn split(address: u64, rest: u64) -> Self {
        Self { address, bytes: rest as u32, flags: (rest >> 32) as u16, link: (rest >> 48) as u16 }
    }

    /// Of a packed ring (§ 2.8.13) and its indirect tables (§ 2.8.7): its two words.
    pub(super) fn packed(address: u64, rest: u64) -> Self {
        Self { address, bytes: rest as u32, flags: (rest >> 48) as u16, link: (rest >> 32) as u16 }
    }

    pub(super) fn has(self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// How the descriptors of an indirect table follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// By NEXT and their links, from the first on: those of a split ring.
    Linked,
    /// All of them, one after the other: those of a packed ring (§ 2.8.7).
    Rowed,
}

/// What a chain has been found to be so far.
pub(super) struct Gathering<'m> {
    regions: &'m Regions,
    indirect: Option<Order>,
    places: Places,
    reads: usize,
    /// Whether a descriptor to write was seen, be it of no bytes.
    writes: bool,
    bytes: u64,
    descriptors: usize,
    fault: Option<ChainFault>,
}

impl<'m> Gathering<'m> {
    /// `indirect`: how indirect tables are read, where they were negotiated.
    pub(super) fn new(regions: &'m Regions, indirect: Option<Order>) -> Self {
        Self {
            regions,
            indirect,
            places: Places::new(),
            reads: 0,
            writes: false,
            bytes: 0,
            descriptors: 0,
            fault: None,
        }
    }

    #[inline(always)]
    pub(super) fn finish(self, ticket: Ticket) -> Chain {
        let Self { places, reads, descriptors, fault, .. } = self;
        Chain { ticket, places, reads, descriptors, fault }
    }

    /// Notes what is wrong. The first fault is the one that is told.
    pub(super) fn fault(&mut self, fault: ChainFault) {
        self.fault.get_or_insert(fault);
    }

    /// Takes the next descriptor of the ring.
    #[inline]
    pub(super) fn take(&mut self, descriptor: Descriptor) {
        if !descriptor.has(flag::INDIRECT) {
            return self.buffer(descriptor);
        }
        match self.indirect {
            None => self.fault(ChainFault::NotNegotiated),
            Some(_) if descriptor.has(flag::NEXT) => self.fault(ChainFault::IndirectNext),
            Some(order) => self.table(descriptor, order),
        }
    }

    #[inline]
    fn buffer(&mut self, descriptor: Descriptor) {
        if self.descriptors == MAX_DESCRIPTORS || self.places.len() > MAX_PLACES {
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
        if !self.regions.places(descriptor.address, descriptor.bytes as usize, &mut self.places) {
            self.fault(ChainFault::Outside);
        }
        if self.places.len() > MAX_PLACES {
            self.fault(ChainFault::Scattered);
        }
        if !self.writes {
            self.reads = self.places.len();
        }
    }

    fn table(&mut self, descriptor: Descriptor, order: Order) {
        let length = descriptor.bytes as usize / DESCRIPTOR_BYTES;
        if length == 0 || !(descriptor.bytes as usize).is_multiple_of(DESCRIPTOR_BYTES) {
            return self.fault(ChainFault::Table(descriptor.bytes));
        }
        let Descriptor { address: table, bytes, .. } = descriptor;
        if table.checked_add(u64::from(bytes)).is_none() {
            return self.fault(ChainFault::Outside);
        }
        let mut index = 0;
        for read in 1.. {
            let at = table + (index * DESCRIPTOR_BYTES) as u64;
            let Some((address, rest)) = self.regions.descriptor(at) else {
                return self.fault(ChainFault::Outside);
            };
            let descriptor = match order {
                Order::Linked => Descriptor::split(address, rest),
                Order::Rowed => Descriptor::packed(address, rest),
            };
            if descriptor.has(flag::INDIRECT) {
                return self.fault(ChainFault::Nested);
            }
            self.buffer(descriptor);
            let ends = match order {
                Order::Linked => !descriptor.has(flag::NEXT),
                Order::Rowed => read == length,
            };
            if ends {
                return;
            }
            if read == length.min(MAX_DESCRIPTORS) {
                return self.fault(ChainFault::TooLong);
            }
            index = match order {
                Order::Linked => usize::from(descriptor.link),
                Order::Rowed => read,
            };
            if index >= length {
                return self.fault(ChainFault::Next(descriptor.link));
            }
        }
    }
}
