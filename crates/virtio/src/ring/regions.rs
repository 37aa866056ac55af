//! Lookup of guest memory for a ring: frequent, and mostly in the same region as the last one.

use std::{cell::Cell, sync::atomic::Ordering};

use reactor::guest::{GuestBytes, GuestMemory};
use smallvec::SmallVec;

/// Size of a descriptor in bytes, in both formats and in indirect tables.
pub(super) const DESCRIPTOR_BYTES: usize = 16;

/// Guest memory of a chain, in order. A buffer that crosses a border of regions has several pieces.
pub type ChainMemory = SmallVec<[GuestBytes; 4]>;

/// The regions of a guest, accessed without a reference to any of them.
#[derive(Debug)]
pub(super) struct Regions {
    memory: GuestMemory,
    /// Index of the region of the last lookup.
    last: Cell<usize>,
}

impl Regions {
    pub(super) fn new(memory: GuestMemory) -> Self {
        Self { memory, last: Cell::new(0) }
    }

    /// The region that contains all of the bytes, and their offset in it.
    #[inline]
    fn find(&self, address: u64, bytes: usize) -> Option<(&GuestBytes, usize)> {
        let within = |region: &GuestBytes| {
            let offset = usize::try_from(address.checked_sub(region.guest_address())?).ok()?;
            (offset.checked_add(bytes)? <= region.bytes()).then_some(offset)
        };
        let regions = self.memory.whole_regions();
        if let Some(region) = regions.get(self.last.get())
            && let Some(offset) = within(region)
        {
            return Some((region, offset));
        }
        // Regions are sorted by address and do not overlap.
        let next_index = regions.partition_point(|region| region.guest_address() <= address);
        let index = next_index.checked_sub(1)?;
        let offset = within(&regions[index])?;
        self.last.set(index);
        Some((&regions[index], offset))
    }

    /// Appends the memory of a range, in order; nothing for an empty one. False if a part is
    /// outside.
    #[inline]
    pub(super) fn append_range(&self, address: u64, bytes: usize, into: &mut ChainMemory) -> bool {
        if bytes == 0 {
            return true;
        }
        match self.find(address, bytes) {
            Some((region, offset)) => {
                into.push(region.part(offset, bytes));
                true
            }
            None => self.memory.ranges(address, bytes, into),
        }
    }

    /// Copies the two words of a descriptor of an indirect table, once. It may be unaligned, and
    /// cross a border of regions. `None` if it is outside.
    #[inline]
    pub(super) fn descriptor(&self, address: u64) -> Option<(u64, u64)> {
        if let Some((region, offset)) = self.find(address, DESCRIPTOR_BYTES)
            && address.is_multiple_of(8)
        {
            // An address that is aligned in the guest is aligned in this process too.
            let load_word = |offset| region.load_u64(offset, Ordering::Relaxed);
            return Some((load_word(offset), load_word(offset + 8)));
        }
        let mut bytes = [0; DESCRIPTOR_BYTES];
        let mut pieces = ChainMemory::new();
        if !self.memory.ranges(address, DESCRIPTOR_BYTES, &mut pieces) {
            return None;
        }
        let mut unfilled = &mut bytes[..];
        for piece in &pieces {
            let (front, tail) = unfilled.split_at_mut(piece.bytes());
            piece.read(0, front);
            unfilled = tail;
        }
        let load_word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight of sixteen"));
        Some((load_word(&bytes[..8]), load_word(&bytes[8..])))
    }
}
