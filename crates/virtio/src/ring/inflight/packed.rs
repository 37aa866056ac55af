//! `QueueRegionPacked`: an entry for each descriptor that is out, with a copy of it, since the
//! device writes over the ring's. Entries of a chain are linked; those that are free, too.
//!
//! The header has each of its values twice, as it was before what is being done now and as it will
//! be. The specification's fields are single; here those that belong together are stored as one
//! word, so that no end comes between them: an index is never seen with another's wrap counter.

use super::{
    Broken, Descriptor, Inflight, SIZE_AT, VERSION, VERSION_AT,
    cells::{Cells, Ordering},
    close,
    position::Position,
};

pub(super) const HEADER: usize = 32;
/// `free_head`, and `old_free_head` behind it.
const FREE: usize = 12;
/// `used_idx`, `old_used_idx`, their wrap counters of one byte each, and padding.
const USED: usize = 16;

pub(super) const ENTRY: usize = 32;
/// One byte, with padding behind it.
const IN_FLIGHT: usize = 0;
const NEXT: usize = 2;
const LAST: usize = 4;
const NUM: usize = 6;
const COUNTER: usize = 8;
/// Buffer id, flags, length.
const WORD: usize = 16;
const ADDRESS: usize = 24;

/// Chains that were out at the end of the one before us.
pub(in super::super) struct Remains {
    /// Where the next used descriptor goes.
    pub(in super::super) used: Position,
    /// The first entries of the chains, and how many descriptors each has, in the order in which
    /// they were taken.
    pub(in super::super) chains: Vec<(u16, u16)>,
}

/// The area of a packed ring.
#[derive(Debug)]
pub(in super::super) struct PackedLog {
    cells: Cells,
    size: u16,
    /// The first free entry; `size` if there is none.
    free: u16,
    used: Position,
    counter: u64,
    /// The chain that is being noted: its first entry, its last, and its length so far.
    noting: (u16, u16, u16),
}

fn at(slot: u16, field: usize) -> usize {
    HEADER + usize::from(slot) * ENTRY + field
}

const NO_SUCH_ENTRY: Broken = Broken::Inflight("it names an entry that it does not have");

impl PackedLog {
    /// Takes up an area. `used`: where the front end says that the next used descriptor goes.
    /// `is_published`: whether there is a used descriptor at a place of the ring. Of an area that
    /// was in use, what the driver still waits for.
    pub(in super::super) fn open(
        inflight: Inflight,
        size: u16,
        used: Position,
        is_published: impl Fn(Position) -> bool,
    ) -> Result<(Self, Option<Remains>), Broken> {
        let (cells, in_use) = inflight.open(size, true)?;
        let mut log = Self { cells, size, free: 0, used, counter: 0, noting: (0, 0, 0) };
        if !in_use {
            log.begin();
            return Ok((log, None));
        }
        log.settle(is_published)?;
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
        self.cells.store_u16(VERSION_AT, VERSION, Ordering::Release);
    }

    fn store_free(&self, new: u16, old: u16) {
        self.cells.store_u32(FREE, u32::from(new) | u32::from(old) << 16, Ordering::Release);
    }

    fn store_used(&self, new: Position, old: Position) {
        let indices = u64::from(new.index) | u64::from(old.index) << 16;
        let wraps = u64::from(new.wrap) | u64::from(old.wrap) << 8;
        self.cells.store_u64(USED, indices | wraps << 32, Ordering::Release);
    }

    /// Ends what was being done: forward if the driver has seen it, else back.
    fn settle(&mut self, is_published: impl Fn(Position) -> bool) -> Result<(), Broken> {
        let free = self.cells.load_u32(FREE, Ordering::Relaxed);
        let word = self.cells.load_u64(USED, Ordering::Relaxed);
        let position = |index: u64, wrap: u64| {
            let position = Position { index: index as u16, wrap: wrap & 0xff != 0 };
            (position.index < self.size).then_some(position).ok_or(NO_SUCH_ENTRY)
        };
        let used = position(word, word >> 32)?;
        let old_used = position(word >> 16, word >> 40)?;
        // With the wrap counter: a chain as long as the ring leaves the index where it is.
        let forward = used != old_used && is_published(old_used);
        (self.free, self.used) = if forward { (free as u16, used) } else { ((free >> 16) as u16, old_used) };
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
        Ok(())
    }

    /// The chains that are out, found by what is not free.
    fn chains(&mut self) -> Result<Remains, Broken> {
        // What a crash left half noted or half forgotten is in the list of free entries.
        let mut seen = vec![false; usize::from(self.size)];
        let mut left = self.size;
        let mut slot = self.free;
        while slot < self.size && !std::mem::replace(&mut seen[usize::from(slot)], true) {
            self.forget(slot);
            left -= 1;
            slot = self.next(slot);
        }
        let mut heads = Vec::new();
        for slot in 0..self.size {
            if self.cells.load_u16(at(slot, IN_FLIGHT), Ordering::Relaxed) & 0xff != 0 {
                heads.push((self.cells.load_u64(at(slot, COUNTER), Ordering::Relaxed), slot));
            }
        }
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        let mut chains = Vec::with_capacity(heads.len());
        for (_, head) in heads {
            let length = self.cells.load_u16(at(head, NUM), Ordering::Relaxed);
            let last = self.cells.load_u16(at(head, LAST), Ordering::Relaxed);
            let mut slot = head;
            for number in 1..=length {
                if slot >= self.size || std::mem::replace(&mut seen[usize::from(slot)], true) {
                    return Err(Broken::Inflight("its chains overlap"));
                }
                left -= 1;
                if number == length && slot != last {
                    return Err(Broken::Inflight("one of its chains does not end where it should"));
                }
                slot = self.next(slot);
            }
            if length == 0 {
                return Err(Broken::Inflight("one of its chains has no descriptors"));
            }
            chains.push((head, length));
        }
        if left != 0 {
            return Err(Broken::Inflight("it has entries that are neither free nor in a chain"));
        }
        Ok(Remains { used: self.used, chains })
    }

    fn next(&self, slot: u16) -> u16 {
        self.cells.load_u16(at(slot, NEXT), Ordering::Relaxed)
    }

    /// The copy of the descriptor in `slot`, and the slot behind it. Of a chain of `chains` only,
    /// whose entries nobody of ours has changed since.
    pub(in super::super) fn descriptor(&self, slot: u16) -> Result<(Descriptor, u16), Broken> {
        if slot >= self.size {
            return Err(NO_SUCH_ENTRY);
        }
        let word = self.cells.load_u64(at(slot, WORD), Ordering::Relaxed);
        let address = self.cells.load_u64(at(slot, ADDRESS), Ordering::Relaxed);
        let descriptor =
            Descriptor { address, bytes: (word >> 32) as u32, flags: (word >> 16) as u16, link: word as u16 };
        Ok((descriptor, self.next(slot)))
    }

    /// A chain follows.
    pub(in super::super) fn start(&mut self) {
        self.noting = (self.free, self.free, 0);
    }

    /// Notes the next descriptor of the chain. Until `taken` it is in free entries.
    pub(in super::super) fn note(&mut self, descriptor: Descriptor) -> Result<(), Broken> {
        let (head, last, length) = self.noting;
        let slot = if length == 0 { head } else { self.next(last) };
        if slot >= self.size {
            return Err(NO_SUCH_ENTRY);
        }
        let word = u64::from(descriptor.link)
            | u64::from(descriptor.flags) << 16
            | u64::from(descriptor.bytes) << 32;
        self.cells.store_u64(at(slot, WORD), word, Ordering::Relaxed);
        self.cells.store_u64(at(slot, ADDRESS), descriptor.address, Ordering::Relaxed);
        self.noting = (head, slot, length + 1);
        Ok(())
    }

    /// The noted chain is out from now on; the entry that it is found by.
    pub(in super::super) fn taken(&mut self) -> u16 {
        let (head, last, length) = self.noting;
        self.cells.store_u16(at(head, LAST), last, Ordering::Relaxed);
        self.cells.store_u16(at(head, NUM), length, Ordering::Relaxed);
        self.cells.store_u64(at(head, COUNTER), self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.cells.store_u16(at(head, IN_FLIGHT), 1, Ordering::Release);
        self.free = self.next(last);
        // Before this store it is free, behind it it is out.
        self.store_free(self.free, self.free);
        head
    }

    /// A used descriptor for the chain of `slot` is about to be seen by the driver, and the next
    /// one will go to `used`.
    pub(in super::super) fn publishing(&mut self, slot: u16, used: Position) {
        self.link(slot);
        self.store_free(slot, self.free);
        self.store_used(used, self.used);
        (self.free, self.used) = (slot, used);
    }

    /// The driver can see it.
    pub(in super::super) fn published(&mut self, slot: u16) {
        self.forget(slot);
        self.store_free(self.free, self.free);
        self.store_used(self.used, self.used);
    }

    /// The chain of `slot` goes back to the ring.
    pub(in super::super) fn forgotten(&mut self, slot: u16) {
        self.link(slot);
        self.free = slot;
        self.store_free(slot, slot);
        self.forget(slot);
    }

    /// Puts the list of free entries behind the chain of `slot`.
    fn link(&self, slot: u16) {
        let last = self.cells.load_u16(at(slot, LAST), Ordering::Relaxed);
        // A front end that changes it leaks entries of its own queue.
        if last < self.size {
            self.cells.store_u16(at(last, NEXT), self.free, Ordering::Release);
        }
    }

    fn forget(&self, slot: u16) {
        self.cells.store_u16(at(slot, IN_FLIGHT), 0, Ordering::Release);
    }

    pub(in super::super) fn close(self) {
        close(&self.cells);
    }
}
