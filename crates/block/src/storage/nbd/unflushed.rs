//! Writes that a server has, or may have, and that no flush has covered yet: what has to be written
//! again if the server is another one after a break.
//!
//! A server that was killed has lost what only its memory had, and a later flush would succeed
//! without it. So each write is kept until a flush that began after its answer has succeeded. How
//! much is kept has a bound ([`MOST_BYTES`]): past it, whoever writes flushes first.
//!
//! Decides what is kept, and in which order it is written again. Never does I/O.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use crate::buffer::Frozen;

/// Bytes kept for one disk at most, and what one more write has.
pub(super) const MOST_BYTES: u64 = 32 << 20;
/// What a kept request costs beside its data, in bytes.
const ENTRY_BYTES: u64 = 128;

/// A change of the disk.
#[derive(Clone, Debug)]
pub(super) enum Change {
    Data { offset: u64, data: Arc<Frozen> },
    Zeroes { offset: u64, length: u32, flags: u16 },
}

impl Change {
    pub(super) fn range(&self) -> Range<u64> {
        match self {
            Self::Data { offset, data } => *offset..offset + data.len() as u64,
            Self::Zeroes { offset, length, .. } => *offset..offset + u64::from(*length),
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (one, other) = (self.range(), other.range());
        one.start < other.end && other.start < one.end
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Data { data, .. } => ENTRY_BYTES + data.len() as u64,
            Self::Zeroes { .. } => ENTRY_BYTES,
        }
    }
}

#[derive(Debug)]
struct Entry {
    number: u64,
    change: Change,
    /// The server has answered it.
    is_answered: bool,
    /// The first flush that began behind its answer.
    flush: Option<u64>,
}

/// In the order in which they were asked for.
#[derive(Debug, Default)]
pub(super) struct Unflushed {
    entries: VecDeque<Entry>,
    bytes: u64,
    next_number: u64,
    flushes: u64,
}

impl Unflushed {
    pub(super) fn has_room(&self) -> bool {
        self.bytes < MOST_BYTES
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether something that is kept has a byte of this range.
    pub(super) fn overlaps(&self, change: &Change) -> bool {
        self.entries.iter().any(|entry| entry.change.overlaps(change))
    }

    /// A change that is about to be sent; returns its number.
    pub(super) fn begin(&mut self, change: Change) -> u64 {
        self.bytes += change.bytes();
        let number = self.next_number;
        self.next_number += 1;
        self.entries.push_back(Entry { number, change, is_answered: false, flush: None });
        number
    }

    /// It has taken effect, or may have.
    pub(super) fn answered(&mut self, number: u64) {
        if let Some(at) = self.find(number) {
            self.entries[at].is_answered = true;
        }
    }

    /// It has failed: what is there now, nobody is promised.
    pub(super) fn failed(&mut self, number: u64) {
        if let Some(entry) = self.find(number).and_then(|at| self.entries.remove(at)) {
            self.bytes -= entry.change.bytes();
        }
    }

    fn find(&self, number: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&number, |entry| entry.number).ok()
    }

    /// A flush is about to be sent; returns its number.
    pub(super) fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        for entry in self.entries.iter_mut().filter(|entry| entry.is_answered) {
            entry.flush.get_or_insert(self.flushes);
        }
        self.flushes
    }

    /// It has succeeded: what was answered before it began is durable.
    pub(super) fn flushed(&mut self, number: u64) {
        let is_left = |entry: &Entry| entry.flush.is_none_or(|flush| flush > number);
        self.entries.retain(is_left);
        self.bytes = self.entries.iter().map(|entry| entry.change.bytes()).sum();
    }

    /// What to write again, in this order: those of one batch at once, since none of them overlap.
    pub(super) fn batches(&self, most: usize) -> Vec<Vec<Change>> {
        let mut batches: Vec<Vec<Change>> = Vec::new();
        for Entry { change, .. } in &self.entries {
            match batches.last_mut() {
                Some(batch) if batch.len() < most && !batch.iter().any(|other| other.overlaps(change)) => {
                    batch.push(change.clone());
                }
                _ => batches.push(vec![change.clone()]),
            }
        }
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;

    fn data(offset: u64, length: usize) -> Change {
        Change::Data { offset, data: Arc::new(Buffer::zeroed(length).freeze()) }
    }

    fn offsets(unflushed: &Unflushed) -> Vec<Vec<u64>> {
        let of_batch = |batch: Vec<Change>| batch.iter().map(|change| change.range().start).collect();
        unflushed.batches(3).into_iter().map(of_batch).collect()
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_began() {
        let mut unflushed = Unflushed::default();
        let (one, two) = (unflushed.begin(data(0, 512)), unflushed.begin(data(512, 512)));
        unflushed.answered(one);
        let flush = unflushed.begin_flush();
        unflushed.answered(two);
        unflushed.flushed(flush);
        assert_eq!(offsets(&unflushed), [[512]]);
        let (failing, flush) = (unflushed.begin_flush(), unflushed.begin_flush());
        assert!(failing < flush);
        unflushed.flushed(flush);
        assert_eq!((unflushed.entries.len(), unflushed.bytes()), (0, 0));
    }

    #[test]
    fn what_failed_is_not_written_again() {
        let mut unflushed = Unflushed::default();
        let one = unflushed.begin(data(0, 512));
        unflushed.begin(Change::Zeroes { offset: 4096, length: 512, flags: 0 });
        unflushed.failed(one);
        assert_eq!((offsets(&unflushed), unflushed.bytes()), (vec![vec![4096]], ENTRY_BYTES));
    }

    #[test]
    fn what_overlaps_is_written_one_after_the_other() {
        let mut unflushed = Unflushed::default();
        for (offset, length) in [(0, 512), (512, 512), (500, 20), (4096, 1), (4097, 1), (4098, 1), (0, 1)] {
            unflushed.begin(data(offset, length));
        }
        assert_eq!(offsets(&unflushed), [vec![0, 512], vec![500, 4096, 4097], vec![4098, 0]]);
    }

    #[test]
    fn there_is_a_bound() {
        let mut unflushed = Unflushed::default();
        for place in 0..32 {
            assert!(unflushed.has_room(), "{place} MiB");
            unflushed.begin(data(place << 20, 1 << 20));
        }
        assert!(!unflushed.has_room());
    }
}
