//! A read-ahead request: the stream it is for and its ranges, in whole blocks.
//!
//! Independent of the contents of the cache.

use core::ops::Range;

use crate::throttle::RequestCost;

/// Size of a block in bytes: the page size. A chunk tracks in blocks which parts have been read.
pub(super) const BLOCK_BYTES: u64 = 4096;
/// Maximum size of a chunk in bytes: the largest useful request, tracked with one bit for each
/// block.
pub(super) const CHUNK_MAX_BYTES: u64 = 1 << 20;

/// Identifies a stream. The ID of a forgotten stream never identifies a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl StreamId {
    pub(super) const NONE: Self = Self { index: u32::MAX, generation: 0 };
}

/// Read-ahead to perform: one range of a sequential stream, or several of a strided one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAhead {
    pub(super) stream: StreamId,
    pub(super) first: u64,
    pub(super) length: u64,
    pub(super) step: i64,
    pub(super) count: u64,
    pub(super) size_bytes: u64,
    /// True until clients have read enough of the stream's data: the bytes are charged to the
    /// credit of the [gate](super::gate).
    pub(super) on_trial: bool,
}

impl ReadAhead {
    #[cfg(test)]
    pub(super) const NOTHING: Self = Self {
        stream: StreamId::NONE,
        first: 0,
        length: BLOCK_BYTES,
        step: 0,
        count: 0,
        size_bytes: 0,
        on_trial: false,
    };

    /// The ranges in the order in which they will be needed: whole blocks of the disk, not empty.
    ///
    /// Whole blocks, so that no range ends inside a sector. Otherwise a read during a write could
    /// get a part of a sector from the cache and the rest from the image: neither the old sector
    /// nor the new one.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { first, length, step, count, size_bytes, .. } = *self;
        (0..count.cast_signed()).map(move |index| {
            let offset = first.wrapping_add_signed(step * index);
            let Range { start, end } = whole_blocks(&(offset..offset + length));
            start..end.min(size_bytes)
        })
    }

    /// Cost for the throttle layer: one operation for each range.
    pub const fn cost(&self) -> RequestCost {
        RequestCost::equal(self.count, self.range_bytes())
    }

    pub(super) const fn range_bytes(&self) -> u64 {
        let is_aligned =
            // A range that begins inside a block may touch one more block than its length suggests.
            self.first.is_multiple_of(BLOCK_BYTES) && self.step.unsigned_abs().is_multiple_of(BLOCK_BYTES);
        let begins_inside = if is_aligned { 0 } else { BLOCK_BYTES };
        self.length.next_multiple_of(BLOCK_BYTES) + begins_inside
    }
}

/// The blocks that a range touches: the unit of read-ahead and invalidation
/// ([`ReadAhead::ranges`]).
pub fn whole_blocks(range: &Range<u64>) -> Range<u64> {
    let start = range.start / BLOCK_BYTES * BLOCK_BYTES;
    start..range.end.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX)
}
