//! `QueueRegionPacked`: an entry for each descriptor in flight, with a copy of it, since the device
//! overwrites the ring's. The entries of a chain are linked, and so are free entries.
//!
//! The header has each value twice: before the current operation (`old_…`) and after it. The
//! specification's fields are separate; here related fields are stored as one word, so that a crash
//! cannot come between them: an index is never combined with another index's wrap counter.

use super::{
    InflightQueueArea, RingDescriptor, RingError, SIZE_AT, VERSION, VERSION_AT,
    cells::{Cells, Ordering},
    close,
    position::RingPosition,
};

pub(super) const HEADER: usize = 32;
/// `free_head`, followed by `old_free_head`.
const FREE: usize = 12;
/// `used_idx`, `old_used_idx`, their wrap counters of one byte each, and padding.
const USED: usize = 16;

pub(super) const ENTRY: usize = 32;
/// One byte, followed by padding.
const IN_FLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
/// Buffer id, flags, length.
const WORD: usize = 16;
const ADDRESS: usize = 24;

/// Chains that were in flight when the previous device ended.
pub(in super::super) struct InflightChains {
    /// Position of the next used descriptor.
    pub(in super::super) used: RingPosition,
    /// First entry and number of descriptors of each chain, in the order of taking.
    pub(in super::super) chains: Vec<(u16, u16)>,
}

/// The area of a packed ring.
#[derive(Debug)]
pub(in super::super) struct PackedLog {
    cells: Cells,
    size: u16,
    /// First free entry; `size` if there is none.
    free: u16,
    used: RingPosition,
    counter: u64,
    /// The chain that is being logged: first entry, last entry, length so far.
    current_chain: (u16, u16, u16),
}

fn at(slot: u16, field: usize) -> usize {
    HEADER + usize::from(slot) * ENTRY + field
}

const NO_SUCH_ENTRY: RingError = RingError::Inflight("it names an entry outside the area");

impl PackedLog {
    /// Opens an area. `used` is the position of the next used descriptor according to the front
    /// end; `is_published` returns whether there is a used descriptor at a position of the ring.
    /// Returns the chains that the driver still waits for, if the area was in use.
    pub(in super::super) fn open(
        inflight: InflightQueueArea,
        size: u16,
        used: RingPosition,
        is_published: impl Fn(RingPosition) -> bool,
    ) -> Result<(Self, Option<InflightChains>), RingError> {
        let (cells, in_use) = inflight.open(size, true)?;
        let mut log = Self { cells, size, free: 0, used, counter: 0, current_chain: (0, 0, 0) };
        if !in_use {
            log.begin();
            return Ok((log, None));
        }
        log.recover(is_published)?;
        let chains = log.chains()?;
        Ok((log, Some(chains)))
    }

    fn begin(&mut self) {
        for slot in 0..self.size {
            self.cells.store_u64(at(slot, 0), 0, Ordering::Relaxed);
            self.cells.store_u16(at(slot, NEXT), slot + 1, Ordering::Relaxed);
        }
        self.cells.store_u64(0, 0, Ordering::Relaxed);
        self.cells.store_u16(SIZE_AT, self.size, Ordering::Relaxed);
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
        // Last: after a crash before this store the area is still new.
        self.cells.store_u16(VERSION_AT, VERSION, Ordering::Release);
    }

    fn store_free(&self, new: u16, old: u16) {
        self.cells.store_u32(FREE, u32::from(new) | u32::from(old) << 16, Ordering::Release);
    }

    fn store_used(&self, new: RingPosition, old: RingPosition) {
        let indices = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) | u64::from(old.wrap) << 8;
        self.cells.store_u64(USED, indices | wraps << 32, Ordering::Release);
    }

    /// Completes the interrupted operation if the driver has seen it, else rolls it back.
    fn recover(&mut self, is_published: impl Fn(RingPosition) -> bool) -> Result<(), RingError> {
        let free = self.cells.load_u32(FREE, Ordering::Relaxed);
        let word = self.cells.load_u64(USED, Ordering::Relaxed);
        let position = |index: u64, wrap: u64| {
            let position = RingPosition { index: index as u16, wrap: wrap & 0xff != 0 };
            (position.index < self.size).then_some(position).ok_or(NO_SUCH_ENTRY)
        };
        let used = position(word, word >> 32)?;
        let old_used = position(word >> 16, word >> 40)?;
        // Compared with the wrap counter: a chain as long as the ring leaves the index unchanged.
        let forward = used != old_used && is_published(old_used);
        (self.free, self.used) = if forward { (free as u16, used) } else { ((free >> 16) as u16, old_used) };
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
        Ok(())
    }

    /// Finds the chains in flight: all entries that are not free.
    fn chains(&mut self) -> Result<InflightChains, RingError> {
        // The free list includes entries that a crash left partly logged or partly cleared.
        let mut visited = vec![false; usize::from(self.size)];
        let mut remaining = self.size;
        let mut slot = self.free;
        while slot < self.size && !std::mem::replace(&mut visited[usize::from(slot)], true) {
            self.clear_flag(slot);
            remaining -= 1;
            slot = self.next(slot);
        }
        let mut heads = Vec::new();
        for slot in 0..self.size {
            if self.cells.load_u16(at(slot, IN_FLIGHT), Ordering::Relaxed) & 0xff != 0 {
                heads.push((self.cells.load_u64(at(slot, COUNTER), Ordering::Relaxed), slot));
            }
        }
        // By sequence number, which is the order of taking.
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let mut chains = Vec::with_capacity(heads.len());
        for (_, head) in heads {
            let length = self.cells.load_u16(at(head, NUM), Ordering::Relaxed);
            let last = self.cells.load_u16(at(head, LAST), Ordering::Relaxed);
            let mut slot = head;
            for number in 1..=length {
                if slot >= self.size || std::mem::replace(&mut visited[usize::from(slot)], true) {
                    return Err(RingError::Inflight("its chains overlap"));
                }
                remaining -= 1;
                if number == length && slot != last {
                    return Err(RingError::Inflight("one of its chains has a wrong last entry"));
                }
                slot = self.next(slot);
            }
            if length == 0 {
                return Err(RingError::Inflight("one of its chains has no descriptors"));
            }
            chains.push((head, length));
        }
        // Every entry must be free or in exactly one chain.
        if remaining != 0 {
            return Err(RingError::Inflight("it has entries that are neither free nor in a chain"));
        }
        Ok(InflightChains { used: self.used, chains })
    }

    fn next(&self, slot: u16) -> u16 {
        self.cells.load_u16(at(slot, NEXT), Ordering::Relaxed)
    }

    /// The copy of the descriptor in `slot`, and the next slot. Only for chains returned by
    /// `chains`, whose entries this device has not changed since.
    pub(in super::super) fn descriptor(&self, slot: u16) -> Result<(RingDescriptor, u16), RingError> {
        if slot >= self.size {
            return Err(NO_SUCH_ENTRY);
        }
        let word = self.cells.load_u64(at(slot, WORD), Ordering::Relaxed);
        let address = self.cells.load_u64(at(slot, ADDRESS), Ordering::Relaxed);
        let descriptor = RingDescriptor {
            address,
            bytes: (word >> 32) as u32,
            flags: (word >> 16) as u16,
            link: word as u16,
        };
        Ok((descriptor, self.next(slot)))
    }

    /// Begins a chain.
    pub(in super::super) fn begin_chain(&mut self) {
        self.current_chain = (self.free, self.free, 0);
    }

    /// Logs the next descriptor of the chain. Its entry stays in the free list until
    /// `commit_chain`.
    pub(in super::super) fn log_descriptor(&mut self, descriptor: RingDescriptor) -> Result<(), RingError> {
        let (head, last, length) = self.current_chain;
        let slot = if length == 0 { head } else { self.next(last) };
        if slot >= self.size {
            return Err(NO_SUCH_ENTRY);
        }
        let word = u64::from(descriptor.link)
            | u64::from(descriptor.flags) << 16
            | u64::from(descriptor.bytes) << 32;
        self.cells.store_u64(at(slot, WORD), word, Ordering::Relaxed);
        self.cells.store_u64(at(slot, ADDRESS), descriptor.address, Ordering::Relaxed);
        self.current_chain = (head, slot, length + 1);
        Ok(())
    }

    /// Marks the logged chain as in flight; returns its first entry.
    pub(in super::super) fn commit_chain(&mut self) -> u16 {
        let (head, last, length) = self.current_chain;
        self.cells.store_u16(at(head, LAST), last, Ordering::Relaxed);
        self.cells.store_u16(at(head, NUM), length, Ordering::Relaxed);
        self.cells.store_u64(at(head, COUNTER), self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        // Release: the entry is complete before it counts as in flight.
        self.cells.store_u16(at(head, IN_FLIGHT), 1, Ordering::Release);
        self.free = self.next(last);
        // The commit point: before this store the chain is free, after it it is in flight.
        self.store_free(self.free, self.free);
        head
    }

    /// Logs that a used descriptor for the chain of `slot` is about to be published, and that the
    /// next one will be at `used`.
    pub(in super::super) fn begin_publish(&mut self, slot: u16, used: RingPosition) {
        self.prepend_to_free(slot);
        // New and old value: after a crash `recover` chooses between them.
        self.store_free(slot, self.free);
        self.store_used(used, self.used);
        (self.free, self.used) = (slot, used);
    }

    /// Logs that the used descriptor is published.
    pub(in super::super) fn end_publish(&mut self, slot: u16) {
        self.clear_flag(slot);
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
    }

    /// Logs that the chain of `slot` was returned to the ring without being executed.
    pub(in super::super) fn put_back(&mut self, slot: u16) {
        self.prepend_to_free(slot);
        self.free = slot;
        self.store_free(slot, slot);
        self.clear_flag(slot);
    }

    /// Appends the free list to the chain of `slot`.
    fn prepend_to_free(&self, slot: u16) {
        let last = self.cells.load_u16(at(slot, LAST), Ordering::Relaxed);
        // If a malicious front end has changed `LAST`, only its own queue loses free entries.
        if last < self.size {
            self.cells.store_u16(at(last, NEXT), self.free, Ordering::Release);
        }
    }

    fn clear_flag(&self, slot: u16) {
        self.cells.store_u16(at(slot, IN_FLIGHT), 0, Ordering::Release);
    }

    pub(in super::super) fn close(self) {
        close(&self.cells);
    }
}
