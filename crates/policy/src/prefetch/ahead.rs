//! What is to be read ahead, for which stream, and the units in which that is done.
//!
//! Never knows what is in memory.

use core::ops::Range;

use crate::throttle::Cost;

/// Bytes of a block, the unit in which "read" is remembered: the field's page.
pub(super) const BLOCK_BYTES: u64 = 4096;
/// Most bytes of a chunk: what one request usefully asks for, one bit a block.
pub(super) const CHUNK_MAX_BYTES: u64 = 1 << 20;

/// One that was forgotten is not found by it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StreamId {
    pub(super) index: u32,
    pub(super) generation: u32,
}

impl StreamId {
    pub(super) const NONE: Self = Self { index: u32::MAX, generation: 0 };
}

/// What is to be read ahead: one range of a sequential stream, several of a strided one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    pub(super) stream: StreamId,
    pub(super) first: u64,
    pub(super) length: u64,
    pub(super) step: i64,
    pub(super) count: u64,
    pub(super) size_bytes: u64,
    pub(super) on_trial: bool,
}

impl Ahead {
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

    /// The ranges, in the order in which they will be needed: whole blocks of the disk, not empty.
    ///
    /// Blocks, because while somebody writes, a reader may have one part from memory and one from
    /// the image: each sector must still be old or new as a whole.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { first, length, step, count, size_bytes, .. } = *self;
        (0..count.cast_signed()).map(move |index| {
            let offset = first.wrapping_add_signed(step * index);
            let Range { start, end } = whole_blocks(&(offset..offset + length));
            start..end.min(size_bytes)
        })
    }

    /// What reading it costs: an operation for each range.
    pub const fn cost(&self) -> Cost {
        Cost::equal(self.count, self.range_bytes())
    }

    pub(super) const fn range_bytes(&self) -> u64 {
        let is_aligned =
            self.first.is_multiple_of(BLOCK_BYTES) && self.step.unsigned_abs().is_multiple_of(BLOCK_BYTES);
        let begins_inside = if is_aligned { 0 } else { BLOCK_BYTES };
        self.length.next_multiple_of(BLOCK_BYTES) + begins_inside
    }
}

/// The blocks that a range touches, as they are read ahead and dropped ([`Ahead::ranges`]).
pub fn whole_blocks(range: &Range<u64>) -> Range<u64> {
    let start = range.start / BLOCK_BYTES * BLOCK_BYTES;
    start..range.end.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX)
}
