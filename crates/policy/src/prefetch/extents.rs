//! Map from ranges of the disk to parts of chunks: an ordered map of disjoint extents.
//!
//! ```text
//!   disk     ──▕▁▁▁▁ extent ▁▁▁▁▏──▕▁ extent ▁▏────▕▁ extent ▁▏──
//!   chunks       ▕▁▁▁▁▁▁▁ 7 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▏        ▕▁▁▁▁ 3 ▁▁▁▁▏
//! ```
//!
//! A write removes its range from the map. The rest of a chunk is still found.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Range;

/// A part of a chunk, keyed by its offset on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkExtent {
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) chunk: u32,
    pub(super) chunk_offset: u64,
}

impl ChunkExtent {
    pub(super) const fn end(&self) -> u64 {
        self.offset + self.length
    }

    pub(super) fn within(&self, range: &Range<u64>) -> Self {
        let offset = self.offset.max(range.start);
        let end = self.end().min(range.end);
        Self {
            offset,
            length: end - offset,
            chunk: self.chunk,
            chunk_offset: self.chunk_offset + (offset - self.offset),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct ExtentValue {
    length: u64,
    chunk: u32,
    chunk_offset: u64,
}

#[derive(Debug, Default)]
pub(super) struct ExtentMap(BTreeMap<u64, ExtentValue>);

impl ExtentMap {
    /// Extents that overlap the range, in descending order.
    pub(super) fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = ChunkExtent> {
        let start = range.start;
        let before = self.0.range(..range.end).rev();
        before
            .map(|(&offset, &ExtentValue { length, chunk, chunk_offset: from })| ChunkExtent {
                offset,
                length,
                chunk,
                chunk_offset: from,
            })
            // Extents are sorted and disjoint: if one ends before the range, so do all below it.
            .take_while(move |extent| extent.end() > start)
    }

    pub(super) fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut end = range.end;
        for extent in self.overlapping(range) {
            if extent.end() < end {
                gaps.push(extent.end()..end);
            }
            end = extent.offset;
        }
        if range.start < end {
            gaps.push(range.start..end);
        }
        gaps.reverse();
        gaps
    }

    /// Inserts an extent that overlaps no other.
    pub(super) fn insert(&mut self, extent: ChunkExtent) {
        let ChunkExtent { offset, length, chunk, chunk_offset: from } = extent;
        self.0.insert(offset, ExtentValue { length, chunk, chunk_offset: from });
    }

    /// Removes a range. Calls `cut` with each removed part and the change in the number of extents
    /// of its chunk (-1, 0 or 1).
    pub(super) fn remove_range(&mut self, range: &Range<u64>, mut cut: impl FnMut(ChunkExtent, i32)) {
        loop {
            let Some(extent) = self.overlapping(range).next() else { return };
            self.0.remove(&extent.offset);
            let removed = extent.within(range);
            let left = ChunkExtent { length: removed.offset - extent.offset, ..extent };
            let right = ChunkExtent {
                offset: removed.end(),
                length: extent.end() - removed.end(),
                chunk_offset: removed.chunk_offset + removed.length,
                ..extent
            };
            // What remains on either side of the removed part goes back into the map.
            let mut extents = -1;
            for rest in [left, right] {
                if rest.length > 0 {
                    self.insert(rest);
                    extents += 1;
                }
            }
            cut(removed, extents);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use proptest::prelude::*;

    const SIZE: usize = 200;

    fn flat(extents: &ExtentMap) -> Vec<Option<(u32, u64)>> {
        let mut bytes = vec![None; SIZE];
        for extent in extents.overlapping(&(0..SIZE as u64)) {
            for at in 0..extent.length {
                let byte = &mut bytes[(extent.offset + at) as usize];
                assert!(byte.is_none(), "two extents overlap");
                *byte = Some((extent.chunk, extent.chunk_offset + at));
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn matches_a_byte_map(steps in prop::collection::vec((any::<bool>(), 0..SIZE as u64, 1..60u64), 1..60)) {
            let mut extents = ExtentMap::default();
            let mut model = vec![None; SIZE];
            for (chunk, (insert, start, length)) in steps.into_iter().enumerate() {
                let chunk = chunk as u32;
                let range = start..(start + length).min(SIZE as u64);
                let covered = (0..SIZE as u64).filter(|at| range.contains(at) && model[*at as usize].is_none());
                let gaps = extents.gaps(&range);
                prop_assert_eq!(gaps.iter().cloned().flatten().collect::<Vec<_>>(), covered.collect::<Vec<_>>());
                if insert {
                    for gap in gaps {
                        extents.insert(ChunkExtent { offset: gap.start, length: gap.end - gap.start, chunk, chunk_offset: 0 });
                        (gap.clone()).for_each(|at| model[at as usize] = Some((chunk, at - gap.start)));
                    }
                } else {
                    let mut removed_bytes = 0;
                    extents.remove_range(&range, |part, _| removed_bytes += part.length);
                    let before = range.clone().filter(|at| model[*at as usize].take().is_some()).count();
                    prop_assert_eq!(removed_bytes, before as u64);
                }
                prop_assert_eq!(&flat(&extents), &model);
            }
        }
    }
}
