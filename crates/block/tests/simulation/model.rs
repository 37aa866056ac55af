//! Model of the possible content of each byte of a disk: now, and after a crash. Deliberately
//! simple: it records every change and applies the storage contract, sentence by sentence, to
//! determine which of them may be visible.
//!
//! ```text
//!   disk    ▕─── cell ───│─ cell ─│──── cell ────▏    divided where a change or a block begins or ends: each
//!   changes   base 3 7 9   base 3    base 9           cell has the content of exactly one change
//! ```
//!
//! A change `a` is **superseded** by a change `b` that succeeded, if `b` began after `a` had ended.
//! Two changes that overlapped in time may take effect in either order, and a cancelled one never
//! ends: it is never superseded.
//!
//! - A read may return a change that, when the read began, was not superseded by one that had
//!   ended.
//! - A crash may leave a change that is not superseded by a durable one: acknowledged with FUA, or
//!   ended before the beginning of a flush that succeeded.
//!
//! A failed change, and a discard, may be visible like any other, but supersedes none. The
//! simulated disk, unlike a page cache, keeps the writes that a failed flush did not write, so a
//! later flush covers them.

use std::{collections::BTreeMap, ops::Range};

/// Position in the order of all beginnings and ends.
type Moment = u64;

#[derive(Clone, Copy, Debug)]
enum Content {
    /// Initial content, or the content after the last crash.
    Base,
    Zeroes,
    /// Bytes that identify the change that wrote them, and their position.
    Pattern(u64),
}

#[derive(Debug)]
struct Change {
    content: Content,
    began: Moment,
    completed: Option<Moment>,
    /// True if it was applied for certain.
    certain: bool,
    /// True if it was acknowledged with FUA.
    durable: bool,
}

#[derive(Clone, Debug)]
struct Cell {
    end: usize,
    changes: Vec<usize>,
}

/// Result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Acknowledged.
    Applied,
    /// Acknowledged as durable.
    Durable,
    /// Failed, or a hint: it may be applied in part.
    Open,
}

/// The model of one disk.
#[derive(Debug)]
pub(crate) struct Model {
    clock: Moment,
    next_pattern: u64,
    base: Vec<u8>,
    block_bytes: usize,
    changes: Vec<Change>,
    cells: BTreeMap<usize, Cell>,
    /// Changes that ended before this are durable.
    flushed: Moment,
}

impl Model {
    /// Creates the model of a disk with content `base`, whose writes tear at multiples of
    /// `block_bytes`.
    pub(crate) fn new(base: Vec<u8>, block_bytes: usize) -> Self {
        let mut model = Self {
            clock: 0,
            next_pattern: 0,
            base,
            block_bytes,
            changes: Vec::new(),
            cells: BTreeMap::new(),
            flushed: 0,
        };
        model.forget_changes();
        model
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.base.len()
    }

    /// Records the beginning of an operation that changes nothing: a read, a flush.
    pub(crate) fn begin(&mut self) -> Moment {
        self.clock += 1;
        self.clock
    }

    /// Records the beginning of a write; returns its number and its data.
    pub(crate) fn begin_write(&mut self, range: Range<usize>) -> (usize, Vec<u8>) {
        self.next_pattern += 1;
        let content = Content::Pattern(self.next_pattern);
        let data = range.clone().map(|at| self.byte(content, at)).collect();
        (self.begin_change(range, content), data)
    }

    /// Records the beginning of zeroing or discarding; returns its number.
    pub(crate) fn begin_zeroes(&mut self, range: Range<usize>) -> usize {
        self.begin_change(range, Content::Zeroes)
    }

    fn begin_change(&mut self, range: Range<usize>, content: Content) -> usize {
        let began = self.begin();
        let number = self.changes.len();
        self.changes.push(Change { content, began, completed: None, certain: false, durable: false });
        self.cut(range.start);
        self.cut(range.end);
        for (_, cell) in self.cells.range_mut(range) {
            cell.changes.push(number);
        }
        number
    }

    /// Records the end of a change. A cancelled one never ends.
    pub(crate) fn end_change(&mut self, number: usize, outcome: Outcome) {
        let completed = self.begin();
        let change = &mut self.changes[number];
        change.completed = Some(completed);
        change.certain = outcome != Outcome::Open;
        change.durable = outcome == Outcome::Durable;
    }

    /// Records the success of a flush that began at `began`.
    pub(crate) fn end_flush(&mut self, began: Moment) {
        self.flushed = self.flushed.max(began);
    }

    /// Panics unless a read that began at `began` may return `found` at `offset`.
    pub(crate) fn check_read(&self, began: Moment, offset: usize, found: &[u8]) {
        self.check("a read", offset, found, |change| {
            change.certain && change.completed.is_some_and(|completed| completed < began)
        });
    }

    /// Panics unless a crash may leave `found`, which becomes the base.
    pub(crate) fn crash(&mut self, found: Vec<u8>) {
        let flushed = self.flushed;
        self.check("a crash", 0, &found, |change| {
            change.certain
                && (change.durable || change.completed.is_some_and(|completed| completed < flushed))
        });
        self.base = found;
        self.forget_changes();
    }

    fn forget_changes(&mut self) {
        self.changes = vec![Change {
            content: Content::Base,
            began: self.clock,
            completed: Some(self.clock),
            certain: true,
            durable: true,
        }];
        // A cell for each block, since a crash tears writes at blocks.
        let starts = (0..self.base.len()).step_by(self.block_bytes);
        self.cells =
            starts.map(|start| (start, Cell { end: start + self.block_bytes, changes: vec![0] })).collect();
        self.flushed = self.clock;
    }

    /// Splits a cell at `at`.
    fn cut(&mut self, at: usize) {
        let Some((_, cell)) = self.cells.range_mut(..at).next_back() else { return };
        if at < cell.end {
            let upper = cell.clone();
            cell.end = at;
            self.cells.insert(at, upper);
        }
    }

    /// Checks `found`; `rules` selects the changes that supersede others.
    fn check(&self, event: &str, offset: usize, found: &[u8], rules: impl Fn(&Change) -> bool) {
        let end = offset + found.len();
        // The cell that contains `offset`.
        let first = self.cells.range(..=offset).next_back().map_or(0, |(&start, _)| start);
        for (&start, cell) in self.cells.range(first..end) {
            let (from, to) = (start.max(offset), cell.end.min(end));
            let found_part = &found[from - offset..to - offset];
            let changes = || cell.changes.iter().map(|&number| (number, &self.changes[number]));
            // A change that ended before this beginning is superseded.
            let latest = changes().filter(|(_, change)| rules(change)).map(|(_, change)| change.began).max();
            let matches = |change: &Change| {
                found_part.iter().zip(from..).all(|(&byte, at)| byte == self.byte(change.content, at))
            };
            let was_overwritten = |change: &Change| {
                change.completed.is_some_and(|completed| latest.is_some_and(|latest| completed < latest))
            };
            if changes().any(|(_, change)| !was_overwritten(change) && matches(change)) {
                continue;
            }
            let stale: Vec<_> = changes().filter(|(_, change)| matches(change)).collect();
            let allowed: Vec<_> = changes().filter(|(_, change)| !was_overwritten(change)).collect();
            panic!(
                "{event} found in {from}..{to} what may not be there, {:02x?}…: shows {stale:?}, \
                 allowed are {allowed:?}",
                &found_part[..found_part.len().min(8)]
            );
        }
    }

    fn byte(&self, content: Content, at: usize) -> u8 {
        match content {
            Content::Base => self.base[at],
            Content::Zeroes => 0,
            // The top byte of products with odd constants differs for neighbouring numbers and
            // positions. Never 0.
            Content::Pattern(number) => {
                let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    ^ (at as u64).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
                (mixed >> 56) as u8 | 1
            }
        }
    }
}

/// Tests of the model: contents that it must reject. The simulations show the accepted ones.
#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Model {
        Model::new(vec![9; 1024], 512)
    }

    fn write(model: &mut Model, range: Range<usize>, outcome: Outcome) -> Vec<u8> {
        let (number, data) = model.begin_write(range);
        model.end_change(number, outcome);
        data
    }

    #[test]
    #[should_panic(expected = "a read found in 10..20")]
    fn a_read_may_not_miss_a_completed_write() {
        let mut model = model();
        write(&mut model, 10..20, Outcome::Applied);
        let began = model.begin();
        model.check_read(began, 0, &[9; 1024]);
    }

    #[test]
    fn concurrent_read_may_miss_a_write_and_a_crash_unflushed_data() {
        let mut model = model();
        let began = model.begin();
        write(&mut model, 10..20, Outcome::Applied);
        model.check_read(began, 0, &[9; 1024]);
        model.crash(vec![9; 1024]);
    }

    #[test]
    #[should_panic(expected = "a crash found in 10..20")]
    fn crash_must_not_lose_flushed_data() {
        let mut model = model();
        write(&mut model, 10..20, Outcome::Applied);
        let began = model.begin();
        model.end_flush(began);
        model.crash(vec![9; 1024]);
    }

    #[test]
    fn crash_may_lose_writes_completed_during_the_flush() {
        let mut model = model();
        let (number, _) = model.begin_write(10..20);
        let began = model.begin();
        model.end_change(number, Outcome::Applied);
        model.end_flush(began);
        model.crash(vec![9; 1024]);
    }

    #[test]
    #[should_panic(expected = "a crash found in 500..512")]
    fn crash_must_not_restore_durably_replaced_data() {
        let mut model = model();
        let mut old = vec![9; 1024];
        let data = write(&mut model, 500..520, Outcome::Applied);
        old[500..520].copy_from_slice(&data);
        write(&mut model, 0..512, Outcome::Durable);
        let (number, data) = model.begin_write(0..500);
        old[..500].copy_from_slice(&data);
        model.end_change(number, Outcome::Open);
        model.crash(old);
    }

    #[test]
    #[should_panic(expected = "what may not be there")]
    fn a_change_shows_as_a_whole_between_two_blocks() {
        let mut model = model();
        let mut torn = vec![9; 1024];
        let data = write(&mut model, 0..512, Outcome::Applied);
        torn[..100].copy_from_slice(&data[..100]);
        model.crash(torn);
    }
}
