//! Divides a copy into items: the ranges that tasks copy.
//!
//! Items begin and end at block boundaries of the target, so that no two of them write to one
//! block. Pure arithmetic: never reads data.

use std::ops::Range;

use crate::disk::Kind;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) range: Range<u64>,
    /// Never [`Kind::Below`].
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) struct Planner {
    /// Items of data begin at multiples of this, in bytes; data is extended to it.
    align: u64,
    /// Items of data do not cross multiples of this, which is a multiple of `align`.
    unit: u64,
    size: u64,
    done: u64,
    /// Last piece, which may still grow.
    last: Option<(Range<u64>, Kind)>,
    /// Zeroes in the last, incomplete block; data that follows in the same block absorbs them.
    begun: Vec<Range<u64>>,
}

impl Planner {
    pub(super) fn new(size: u64, align: u64, unit: u64) -> Self {
        Self { align, unit, size, done: 0, last: None, begun: Vec::new() }
    }

    /// Adds the next piece, which begins where the last one ended, and appends the items that are
    /// complete.
    pub(super) fn piece(&mut self, range: Range<u64>, kind: Kind, items: &mut Vec<Item>) {
        match &mut self.last {
            Some((last, same)) if *same == kind => last.end = range.end,
            _ => {
                self.complete(items);
                self.last = Some((range, kind));
            }
        }
        // Data becomes items at once; otherwise a large image of data would be a single late item.
        if let Some((last, Kind::Data)) = &mut self.last {
            let last = last.clone();
            self.data(last, items);
        }
    }

    /// Appends the remaining items.
    pub(super) fn finish(&mut self, items: &mut Vec<Item>) {
        self.complete(items);
        self.zero_what_was_begun(items);
    }

    fn complete(&mut self, items: &mut Vec<Item>) {
        let Some((range, kind)) = self.last.take() else { return };
        match kind {
            Kind::Data => self.data(range, items),
            // The target's own backing file provides these ranges.
            Kind::Below => {}
            Kind::Zero => {
                // Only whole blocks of zeroes are final; the rest waits for what follows in the
                // block.
                let block = range.end - range.end % self.align;
                let start = range.start.max(self.done);
                if self.begun.first().is_some_and(|begun| begun.start < block) {
                    self.zero_what_was_begun(items);
                }
                if start < block {
                    self.zero(start..block, items);
                }
                // May be empty: `zero` ignores empty ranges.
                self.begun.push(start.max(block)..range.end);
            }
        }
    }

    fn zero_what_was_begun(&mut self, items: &mut Vec<Item>) {
        for range in std::mem::take(&mut self.begun) {
            self.zero(range, items);
        }
    }

    fn zero(&mut self, range: Range<u64>, items: &mut Vec<Item>) {
        if !range.is_empty() {
            self.done = range.end;
            items.push(Item { range, kind: Kind::Zero });
        }
    }

    fn data(&mut self, range: Range<u64>, items: &mut Vec<Item>) {
        // Starts after blocks that an earlier item already covers.
        let mut at = (range.start - range.start % self.align).max(self.done);
        if self.begun.first().is_some_and(|begun| begun.start < at) {
            self.zero_what_was_begun(items);
        }
        // These zeroes are in the first block of the data, which covers them.
        self.begun.clear();
        let end = range.end.next_multiple_of(self.align).min(self.size);
        while at < end {
            let next = (at + 1).next_multiple_of(self.unit).min(end);
            items.push(Item { range: at..next, kind: Kind::Data });
            at = next;
        }
        self.done = self.done.max(end);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plan(size: u64, align: u64, unit: u64, pieces: &[(u64, Kind)]) -> Vec<Item> {
        let mut planner = Planner::new(size, align, unit);
        let (mut at, mut items) = (0, Vec::new());
        for &(length, kind) in pieces {
            planner.piece(at..at + length, kind, &mut items);
            at += length;
        }
        planner.finish(&mut items);
        items
    }

    fn item(range: Range<u64>, kind: Kind) -> Item {
        Item { range, kind }
    }

    #[test]
    fn data_is_widened_to_blocks_and_cut_at_units() {
        let pieces = [(5, Kind::Zero), (1, Kind::Data), (4, Kind::Below), (30, Kind::Data), (3, Kind::Zero)];
        assert_eq!(
            plan(43, 4, 16, &pieces),
            [
                item(0..4, Kind::Zero),
                item(4..8, Kind::Data),
                item(8..16, Kind::Data),
                item(16..32, Kind::Data),
                item(32..40, Kind::Data),
                item(40..43, Kind::Zero),
            ]
        );
    }

    proptest! {
        #[test]
        fn all_data_is_copied_nothing_twice_and_zeroes_stay_where_they_are(
            pieces in prop::collection::vec((1_u64..40, prop_oneof![Just(Kind::Data), Just(Kind::Zero), Just(Kind::Below)]), 1..20),
            align in prop_oneof![Just(1_u64), Just(4), Just(8)],
        ) {
            let size = pieces.iter().map(|(length, _)| length).sum();
            let truth: Vec<Kind> = pieces.iter().flat_map(|&(length, kind)| vec![kind; length as usize]).collect();
            let items = plan(size, align, 16, &pieces);
            let mut end = 0;
            let mut copied = vec![None; truth.len()];
            for Item { range, kind } in items {
                prop_assert!(range.start >= end && range.end > range.start && range.end <= size);
                end = range.end;
                copied[range.start as usize..range.end as usize].fill(Some(kind));
                if kind == Kind::Data {
                    prop_assert!(range.end - range.start <= 16);
                    prop_assert!(range.start % align == 0);
                    prop_assert!(range.end % align == 0 || range.end == size);
                }
            }
            for (truth, copied) in truth.iter().zip(copied) {
                match truth {
                    Kind::Data => prop_assert_eq!(copied, Some(Kind::Data)),
                    Kind::Zero => prop_assert!(copied.is_some()),
                    Kind::Below => prop_assert!(copied != Some(Kind::Zero)),
                }
            }
        }
    }
}
