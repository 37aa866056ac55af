//! A chunk: the data of one read-ahead, with a bitmap of the blocks that have been read.
//!
//! It is the unit of memory and eviction. Writes may cut holes into its [extents](super::extents);
//! it stays in memory until its last extent is removed.

use core::ops::Range;

use super::read_ahead::{BLOCK_BYTES, ReadAhead, StreamId};
use crate::time::Instant;

/// Memory of a buffer in bytes: allocators of I/O memory round up to a power of two, at least a
/// page.
pub(super) fn footprint(length: u64) -> u64 {
    length.max(BLOCK_BYTES).next_power_of_two()
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockBitmap([u64; 4]);

impl BlockBitmap {
    fn contains(&self, block: u64) -> bool {
        self.0[(block / 64) as usize] >> (block % 64) & 1 == 1
    }

    /// Adds the blocks that `from..to` (bytes, not empty) touches; returns how many were new.
    pub(super) fn add(&mut self, from: u64, to: u64) -> u64 {
        let (first, last) = (from / BLOCK_BYTES, (to - 1) / BLOCK_BYTES);
        let mut added = 0;
        for (index, word) in self.0.iter_mut().enumerate() {
            let base = index as u64 * 64;
            if last < base || first >= base + 64 {
                continue;
            }
            let (low, high) = (first.max(base) - base, last.min(base + 63) - base);
            let mask = (u64::MAX >> (63 - (high - low))) << low;
            added += u64::from((mask & !*word).count_ones());
            *word |= mask;
        }
        added
    }
}

#[derive(Debug)]
pub(super) struct CacheChunk<T> {
    /// The caller's token for the data.
    pub(super) token: T,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) extent_count: u32,
    /// Blocks that were read or invalidated; the remaining ones are open.
    pub(super) settled_blocks: BlockBitmap,
    pub(super) open_blocks: u64,
    pub(super) stream: StreamId,
    /// True if its bytes were charged to the credit of the [gate](super::gate).
    pub(super) on_trial: bool,
    /// Bytes charged for the whole range that the chunk is a part of.
    pub(super) charged_bytes: u64,
    /// Time of the request; `None` once the data has arrived.
    pub(super) requested_at: Option<Instant>,
}

impl<T> CacheChunk<T> {
    pub(super) fn new(token: T, range: &Range<u64>, ahead: &ReadAhead, now: Instant) -> Self {
        let (offset, length) = (range.start, range.end - range.start);
        Self {
            token,
            offset,
            length,
            extent_count: 1,
            settled_blocks: BlockBitmap::default(),
            open_blocks: length.div_ceil(BLOCK_BYTES),
            stream: ahead.stream,
            on_trial: ahead.on_trial,
            charged_bytes: ahead.range_bytes(),
            requested_at: Some(now),
        }
    }

    /// Marks bytes as read or invalidated; returns how many were neither.
    pub(super) fn settle(&mut self, from: u64, to: u64) -> u64 {
        let before = self.open_bytes();
        self.open_blocks -= self.settled_blocks.add(from, to);
        before - self.open_bytes()
    }

    fn open_bytes(&self) -> u64 {
        // The last block of the disk may be shorter.
        let last = (self.length - 1) / BLOCK_BYTES;
        let missing =
            if self.settled_blocks.contains(last) { 0 } else { (last + 1) * BLOCK_BYTES - self.length };
        self.open_blocks * BLOCK_BYTES - missing
    }

    /// Marks all open bytes as settled; returns their number.
    pub(super) fn settle_rest(&mut self) -> u64 {
        let bytes = self.open_bytes();
        self.open_blocks = 0;
        self.settled_blocks = BlockBitmap([u64::MAX; 4]);
        bytes
    }

    pub(super) fn footprint(&self) -> u64 {
        footprint(self.length)
    }
}

#[cfg(test)]
mod tests {
    use super::super::read_ahead::CHUNK_MAX_BYTES;
    use super::*;
    use alloc::collections::BTreeSet;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_are_counted_once(ranges in prop::collection::vec((0..CHUNK_MAX_BYTES, 1..200_000_u64), 1..20)) {
            let (mut blocks, mut model) = (BlockBitmap::default(), BTreeSet::new());
            for (from, length) in ranges {
                let to = (from + length).min(CHUNK_MAX_BYTES);
                let before = model.len();
                model.extend(from / BLOCK_BYTES..=(to - 1) / BLOCK_BYTES);
                prop_assert_eq!(blocks.add(from, to) as usize, model.len() - before);
            }
        }
    }

    #[test]
    fn footprint_is_the_next_power_of_two() {
        assert_eq!([1, 4096, 4097, 98304, 131_072].map(footprint), [4096, 4096, 8192, 131_072, 131_072]);
    }
}
