//! Divides a copy into items: the ranges that tasks copy.
//!
//! Items begin and end at block boundaries of the target, so that no two of them write to one
//! block. Pure arithmetic: never reads data.

use std::ops::Range;

use crate::disk::ExtentKind;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CopyItem {
    pub(super) range: Range<u64>,
    /// Never [`ExtentKind::Below`].
    pub(super) kind: ExtentKind,
}

#[derive(Debug)]
pub(super) struct CopyPlanner {
    /// Items of data begin at multiples of this, in bytes; data is extended to it.
    align: u64,
    /// Items of data do not cross multiples of this, which is a multiple of `align`.
    unit: u64,
    size: u64,
    done: u64,
    /// Last piece, which may still grow.
    last: Option<(Range<u64>, ExtentKind)>,
    /// Zeroes in the last, incomplete block; data that follows in the same block absorbs them.
    partial_zeroes: Vec<Range<u64>>,
}

impl CopyPlanner {
    pub(super) fn new(size: u64, align: u64, unit: u64) -> Self {
        Self { align, unit, size, done: 0, last: None, partial_zeroes: Vec::new() }
    }

    /// Adds the next piece, which begins where the last one ended, and appends the items that are
    /// complete.
    pub(super) fn add_piece(&mut self, range: Range<u64>, kind: ExtentKind, items: &mut Vec<CopyItem>) {
        match &mut self.last {
            Some((last, same)) if *same == kind => last.end = range.end,
            _ => {
                self.complete(items);
                self.last = Some((range, kind));
            }
        }
        // Data becomes items at once; otherwise a large image of data would be a single late item.
        if let Some((last, ExtentKind::Data)) = &mut self.last {
            let last = last.clone();
            self.data(last, items);
        }
    }

    /// Appends the remaining items.
    pub(super) fn finish(&mut self, items: &mut Vec<CopyItem>) {
        self.complete(items);
        self.zero_partial_item(items);
    }

    fn complete(&mut self, items: &mut Vec<CopyItem>) {
        let Some((range, kind)) = self.last.take() else { return };
        match kind {
            ExtentKind::Data => self.data(range, items),
            // The target's own backing file provides these ranges.
            ExtentKind::Below => {}
            ExtentKind::Zero => {
                // Only whole blocks of zeroes are final; the rest waits for what follows in the
                // block.
                let block = range.end - range.end % self.align;
                let start = range.start.max(self.done);
                if self.partial_zeroes.first().is_some_and(|zeroes| zeroes.start < block) {
                    self.zero_partial_item(items);
                }
                if start < block {
                    self.zero(start..block, items);
                }
                // May be empty: `zero` ignores empty ranges.
                self.partial_zeroes.push(start.max(block)..range.end);
            }
        }
    }

    fn zero_partial_item(&mut self, items: &mut Vec<CopyItem>) {
        for range in std::mem::take(&mut self.partial_zeroes) {
            self.zero(range, items);
        }
    }

    fn zero(&mut self, range: Range<u64>, items: &mut Vec<CopyItem>) {
        if !range.is_empty() {
            self.done = range.end;
            items.push(CopyItem { range, kind: ExtentKind::Zero });
        }
    }

    fn data(&mut self, range: Range<u64>, items: &mut Vec<CopyItem>) {
        // Starts after blocks that an earlier item already covers.
        let mut at = (range.start - range.start % self.align).max(self.done);
        if self.partial_zeroes.first().is_some_and(|zeroes| zeroes.start < at) {
            self.zero_partial_item(items);
        }
        // These zeroes are in the first block of the data, which covers them.
        self.partial_zeroes.clear();
        let end = range.end.next_multiple_of(self.align).min(self.size);
        while at < end {
            let next = (at + 1).next_multiple_of(self.unit).min(end);
            items.push(CopyItem { range: at..next, kind: ExtentKind::Data });
            at = next;
        }
        self.done = self.done.max(end);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plan(size: u64, align: u64, unit: u64, pieces: &[(u64, ExtentKind)]) -> Vec<CopyItem> {
        let mut planner = CopyPlanner::new(size, align, unit);
        let (mut at, mut items) = (0, Vec::new());
        for &(length, kind) in pieces {
            planner.add_piece(at..at + length, kind, &mut items);
            at += length;
        }
        planner.finish(&mut items);
        items
    }

    fn item(range: Range<u64>, kind: ExtentKind) -> CopyItem {
        CopyItem { range, kind }
    }

    #[test]
    fn data_is_widened_to_blocks_and_cut_at_units() {
        let pieces = [
            (5, ExtentKind::Zero),
            (1, ExtentKind::Data),
            (4, ExtentKind::Below),
            (30, ExtentKind::Data),
            (3, ExtentKind::Zero),
        ];
        assert_eq!(
            plan(43, 4, 16, &pieces),
            [
                item(0..4, ExtentKind::Zero),
                item(4..8, ExtentKind::Data),
                item(8..16, ExtentKind::Data),
                item(16..32, ExtentKind::Data),
                item(32..40, ExtentKind::Data),
                item(40..43, ExtentKind::Zero),
            ]
        );
    }

    proptest! {
        #[test]
        fn all_data_is_copied_exactly_once(
            pieces in prop::collection::vec((1_u64..40, prop_oneof![Just(ExtentKind::Data), Just(ExtentKind::Zero), Just(ExtentKind::Below)]), 1..20),
            align in prop_oneof![Just(1_u64), Just(4), Just(8)],
        ) {
            let size = pieces.iter().map(|(length, _)| length).sum();
            let expected: Vec<ExtentKind> = pieces.iter().flat_map(|&(length, kind)| vec![kind; length as usize]).collect();
            let items = plan(size, align, 16, &pieces);
            let mut end = 0;
            let mut copied = vec![None; expected.len()];
            for CopyItem { range, kind } in items {
                prop_assert!(range.start >= end && range.end > range.start && range.end <= size);
                end = range.end;
                copied[range.start as usize..range.end as usize].fill(Some(kind));
                if kind == ExtentKind::Data {
                    prop_assert!(range.end - range.start <= 16);
                    prop_assert!(range.start % align == 0);
                    prop_assert!(range.end % align == 0 || range.end == size);
                }
            }
            for (expected, copied) in expected.iter().zip(copied) {
                match expected {
                    ExtentKind::Data => prop_assert_eq!(copied, Some(ExtentKind::Data)),
                    ExtentKind::Zero => prop_assert!(copied.is_some()),
                    ExtentKind::Below => prop_assert!(copied != Some(ExtentKind::Zero)),
                }
            }
        }
    }
}
