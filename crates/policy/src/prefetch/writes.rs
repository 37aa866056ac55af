//! The writes in flight. Their ranges are not read ahead, because a read during a write may return
//! old data.

use alloc::vec::Vec;
use core::ops::Range;

/// Identifies a write in flight.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the written range is excluded from read-ahead until the write ends"]
pub struct WriteId(u32);

#[derive(Debug, Default)]
pub(super) struct WritesInFlight {
    slots: Vec<Option<Range<u64>>>,
    vacant: Vec<u32>,
}

impl WritesInFlight {
    pub(super) fn begin(&mut self, range: Range<u64>) -> WriteId {
        if let Some(slot) = self.vacant.pop() {
            self.slots[slot as usize] = Some(range);
            return WriteId(slot);
        }
        self.slots.push(Some(range));
        WriteId((self.slots.len() - 1) as u32)
    }

    pub(super) fn end(&mut self, WriteId(slot): WriteId) {
        self.slots[slot as usize] = None;
        self.vacant.push(slot);
    }

    pub(super) fn overlaps(&self, range: &Range<u64>) -> bool {
        // Without a write in flight, the common case, no range is compared.
        self.vacant.len() < self.slots.len()
            && self.slots.iter().flatten().any(|write| write.start < range.end && range.start < write.end)
    }
}
