//! Guest ranges in a report: ambiguous content, and content that was discarded.
//!
//! Adjacent ranges of one disk are merged, which keeps the list short if a whole table is
//! affected.

use std::fmt;

/// Bytes of the disk, or of the disk in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GuestRange {
    /// Name of the snapshot; `None` for the disk itself.
    pub snapshot: Option<String>,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes; not 0.
    pub length: u64,
}

impl fmt::Display for GuestRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { snapshot, offset, length } = self;
        write!(f, "{length} bytes at {offset:#x} of the disk")?;
        match snapshot {
            Some(name) => write!(f, " in snapshot {name:?}"),
            None => Ok(()),
        }
    }
}

// Limit of slots for the ranges of a report: an image may claim billions of ranges.
const MAX_SLOTS: usize = 100_000;
// A range takes one slot, and one more for each 64 bytes of the snapshot's name, which may have 64
// KiB.
const SLOT_BYTES: usize = 64;

/// Number of slots that a range in this snapshot, or in the disk itself, takes.
pub(super) fn slots(snapshot: Option<&str>) -> usize {
    1 + snapshot.map_or(0, str::len) / SLOT_BYTES
}

/// Ranges in the order in which they were found.
#[derive(Debug, Default)]
pub(super) struct GuestRanges {
    ranges: Vec<GuestRange>,
    slots: usize,
    is_full: bool,
}

impl GuestRanges {
    /// True if ranges with this number of slots can be added.
    pub(super) fn has_room(&mut self, more: usize) -> bool {
        if !self.is_full && self.slots.saturating_add(more) > MAX_SLOTS {
            join(&mut self.ranges);
            self.slots = self.ranges.iter().map(GuestRange::slots).sum();
            // If merging hardly shortens the list it counts as full; otherwise each addition would
            // sort it again.
            self.is_full = self.slots > MAX_SLOTS / 2;
        }
        !self.is_full && self.slots.saturating_add(more) <= MAX_SLOTS
    }

    /// Adds a range, or extends the last one if they are adjacent. Drops the range if the list is
    /// full.
    pub(super) fn add(&mut self, range: GuestRange) {
        let continued = self.ranges.last_mut();
        let continued =
            continued.filter(|last| last.snapshot == range.snapshot && last.end() == range.offset);
        if let Some(last) = continued {
            last.length = last.length.saturating_add(range.length);
        } else if self.has_room(range.slots()) {
            self.slots += range.slots();
            self.ranges.push(range);
        }
    }

    /// Returns the ranges, sorted, with adjacent and overlapping ones merged.
    pub(super) fn finish(mut self) -> Vec<GuestRange> {
        join(&mut self.ranges);
        self.ranges
    }
}

/// Sorts the ranges and merges adjacent and overlapping ones.
fn join(ranges: &mut Vec<GuestRange>) {
    ranges.sort();
    let mut joined: Vec<GuestRange> = Vec::new();
    for range in ranges.drain(..) {
        match joined.last_mut() {
            Some(last) if last.snapshot == range.snapshot && last.end() >= range.offset => {
                last.length = last.end().max(range.end()) - last.offset;
            }
            _ => joined.push(range),
        }
    }
    *ranges = joined;
}

impl GuestRange {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    fn slots(&self) -> usize {
        slots(self.snapshot.as_deref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_ranges_are_one() {
        let range = |snapshot: Option<&str>, offset, length| GuestRange {
            snapshot: snapshot.map(str::to_owned),
            offset,
            length,
        };
        let mut ranges = GuestRanges::default();
        ranges.add(range(Some("a"), 0, 5));
        ranges.add(range(Some("a"), 5, 5));
        ranges.add(range(None, 10, 10));
        ranges.add(range(Some("a"), 10, 1));
        ranges.add(range(None, 0, 12));
        assert_eq!(ranges.ranges.len(), 4);
        let ranges = ranges.finish();
        assert_eq!(ranges, [range(None, 0, 20), range(Some("a"), 0, 11)]);
    }

    #[test]
    fn number_of_ranges_is_bounded() {
        let mut ranges = GuestRanges::default();
        for number in 0..2 * MAX_SLOTS as u64 {
            ranges.add(GuestRange { snapshot: None, offset: number * 2, length: 1 });
        }
        assert!(!ranges.has_room(1));
        assert!(ranges.finish().len() <= MAX_SLOTS);
        let mut ranges = GuestRanges::default();
        for number in 0..2 * MAX_SLOTS as u64 {
            let snapshot = (number % 2 == 0).then(String::new);
            ranges.add(GuestRange { snapshot, offset: number / 2, length: 1 });
        }
        assert_eq!(ranges.finish().len(), 2, "joined when there is no room");
    }

    #[test]
    fn long_names_use_more_memory() {
        let name = "n".repeat(65_535);
        let mut ranges = GuestRanges::default();
        for number in 0..1000 {
            let snapshot = Some(name.clone());
            ranges.add(GuestRange { snapshot, offset: number * 2, length: 1 });
        }
        let found = ranges.finish();
        assert!(!found.is_empty() && found.len() * name.len() <= MAX_SLOTS * SLOT_BYTES, "{}", found.len());
    }
}
