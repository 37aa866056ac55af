//! Writes that a server has acknowledged, and that no flush has covered yet: what has to be written
//! again if the server is another one after a break.
//!
//! A server that was killed has lost what only its memory had, and a later flush would succeed
//! without it. So each write is kept until a flush that began after its answer has succeeded. How
//! much is kept has a bound ([`MOST_BYTES`]): past it, whoever writes flushes first.
//!
//! - What has not been answered is not written again from here: whoever asked asks again, and gets
//!   that answer, whatever it is.
//! - The order is that of the answers: what was asked for after an answer comes behind it.
//! - What is durable by itself is kept only where something older would be written over it.
//!
//! Decides what is kept, and in which order it is written again. Never does I/O.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use nbd::proto::cmd_flag;
use reactor::buffer::Frozen;

/// Bytes of memory kept for one disk at most, and what one more write has.
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
            Self::Data { data, .. } => ENTRY_BYTES + data.held_bytes() as u64,
            Self::Zeroes { .. } => ENTRY_BYTES,
        }
    }
}

/// What is written again.
#[derive(Clone, Debug)]
pub(super) struct Again {
    pub(super) change: Change,
    /// It was durable at once, and is so again.
    pub(super) force: bool,
    /// Somebody was told that it is there.
    pub(super) is_promised: bool,
}

#[derive(Debug)]
struct Entry {
    again: Again,
    /// The first flush that began behind its answer.
    flush: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Unflushed {
    /// Not answered yet, by their numbers, and whether they are durable by themselves.
    asked: BTreeMap<u64, (Change, bool)>,
    /// In the order of their answers.
    answered: VecDeque<Entry>,
    /// Of those, and of what was asked and is to be kept.
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
        self.answered.iter().any(|entry| entry.again.change.overlaps(change))
    }

    /// A change that is about to be sent; returns its number. With `force` it will be durable once
    /// it is answered.
    pub(super) fn begin(&mut self, change: Change, force: bool) -> u64 {
        self.bytes += if force { 0 } else { change.bytes() };
        let number = self.next_number;
        self.next_number += 1;
        self.asked.insert(number, (change, force));
        number
    }

    /// It has taken effect, at a server that may forget it until it is flushed, or may not.
    pub(super) fn answered(&mut self, number: u64, may_be_forgotten: bool) {
        if let Some((change, force)) = self.forget(number) {
            self.keep(Again { change, force, is_promised: true }, may_be_forgotten);
        }
    }

    /// Nobody waits for its answer any more: it may have taken effect.
    pub(super) fn abandoned(&mut self, number: u64) {
        if let Some((change, force)) = self.forget(number) {
            self.keep(Again { change, force, is_promised: false }, true);
        }
    }

    /// It has failed: what is there now, nobody is promised.
    pub(super) fn failed(&mut self, number: u64) {
        self.forget(number);
    }

    fn forget(&mut self, number: u64) -> Option<(Change, bool)> {
        let (change, force) = self.asked.remove(&number)?;
        self.bytes -= if force { 0 } else { change.bytes() };
        Some((change, force))
    }

    fn keep(&mut self, mut again: Again, may_be_forgotten: bool) {
        if (again.force || !may_be_forgotten) && !self.overlaps(&again.change) {
            return;
        }
        if let Change::Zeroes { flags, .. } = &mut again.change {
            // It was done then, so now it has to be.
            *flags &= !cmd_flag::FAST_ZERO;
        }
        self.bytes += again.change.bytes();
        self.answered.push_back(Entry { again, flush: None });
    }

    /// A flush is about to be sent; returns its number.
    pub(super) fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        for entry in &mut self.answered {
            entry.flush.get_or_insert(self.flushes);
        }
        self.flushes
    }

    /// It has succeeded: what was answered before it began is durable.
    pub(super) fn flushed(&mut self, number: u64) {
        self.retain(|entry| entry.flush.is_none_or(|flush| flush > number));
    }

    /// All of it was written again to a server that forgets nothing.
    pub(super) fn settled(&mut self) {
        self.retain(|_| false);
    }

    fn retain(&mut self, is_left: impl Fn(&Entry) -> bool) {
        let mut gone = 0;
        self.answered.retain(|entry| {
            let stays = is_left(entry);
            gone += if stays { 0 } else { entry.again.change.bytes() };
            stays
        });
        self.bytes -= gone;
    }

    /// What to write again, in this order: those of one batch at once, since none of them overlap.
    pub(super) fn batches(&self, most: usize) -> Vec<Vec<Again>> {
        let mut batches: Vec<Vec<Again>> = Vec::new();
        for Entry { again, .. } in &self.answered {
            let is_apart = |batch: &[Again]| !batch.iter().any(|other| other.change.overlaps(&again.change));
            match batches.last_mut() {
                Some(batch) if batch.len() < most && is_apart(batch) => batch.push(again.clone()),
                _ => batches.push(vec![again.clone()]),
            }
        }
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::buffer::Buffer;

    fn data(offset: u64, length: usize) -> Change {
        Change::Data { offset, data: Arc::new(Buffer::zeroed(length).freeze()) }
    }

    fn answered(unflushed: &mut Unflushed, change: Change, force: bool) {
        let number = unflushed.begin(change, force);
        unflushed.answered(number, true);
    }

    fn offsets(unflushed: &Unflushed) -> Vec<Vec<u64>> {
        let of_batch = |batch: Vec<Again>| batch.iter().map(|again| again.change.range().start).collect();
        unflushed.batches(3).into_iter().map(of_batch).collect()
    }

    #[test]
    fn a_flush_covers_what_was_answered_before_it_began() {
        let mut unflushed = Unflushed::default();
        let (one, two) = (unflushed.begin(data(0, 512), false), unflushed.begin(data(512, 512), false));
        unflushed.answered(one, true);
        let flush = unflushed.begin_flush();
        unflushed.answered(two, true);
        unflushed.flushed(flush);
        assert_eq!(offsets(&unflushed), [[512]]);
        let (failing, flush) = (unflushed.begin_flush(), unflushed.begin_flush());
        assert!(failing < flush);
        unflushed.flushed(flush);
        assert_eq!((unflushed.answered.len(), unflushed.bytes()), (0, 0));
    }

    #[test]
    fn only_what_was_answered_is_written_again_and_in_that_order() {
        let mut unflushed = Unflushed::default();
        let failed = unflushed.begin(data(0, 512), false);
        let late =
            unflushed.begin(Change::Zeroes { offset: 4096, length: 512, flags: cmd_flag::FAST_ZERO }, false);
        let early = unflushed.begin(Change::Zeroes { offset: 4100, length: 512, flags: 0 }, false);
        let in_flight = unflushed.begin(data(9000, 1), false);
        let abandoned = unflushed.begin(Change::Zeroes { offset: 0, length: 1, flags: 0 }, false);
        unflushed.failed(failed);
        unflushed.answered(early, true);
        unflushed.answered(late, true);
        unflushed.abandoned(abandoned);
        assert_eq!(offsets(&unflushed), [vec![4100], vec![4096, 0]]);
        let again = unflushed.batches(3).concat();
        assert_eq!(again.iter().map(|again| again.is_promised).collect::<Vec<_>>(), [true, true, false]);
        assert!(matches!(again[1].change, Change::Zeroes { flags: 0, .. }), "it may be slow now");
        unflushed.failed(in_flight);
        assert_eq!(unflushed.bytes(), 3 * ENTRY_BYTES);
    }

    #[test]
    fn what_is_durable_is_kept_where_something_older_would_be_written_over_it() {
        let mut unflushed = Unflushed::default();
        answered(&mut unflushed, data(0, 512), true);
        let number = unflushed.begin(data(0, 512), false);
        unflushed.answered(number, false);
        assert_eq!((offsets(&unflushed), unflushed.bytes()), (Vec::<Vec<u64>>::new(), 0));
        let durable = unflushed.begin(data(511, 1), true);
        // Answered while the other is in flight.
        answered(&mut unflushed, data(0, 512), false);
        unflushed.answered(durable, true);
        assert_eq!(offsets(&unflushed), [[0], [511]]);
        assert!(unflushed.batches(3)[1][0].force);
        unflushed.settled();
        assert_eq!(unflushed.bytes(), 0);
    }

    #[test]
    fn what_overlaps_is_written_one_after_the_other() {
        let mut unflushed = Unflushed::default();
        for (offset, length) in [(0, 512), (512, 512), (500, 20), (4096, 1), (4097, 1), (4098, 1), (0, 1)] {
            answered(&mut unflushed, data(offset, length), false);
        }
        assert_eq!(offsets(&unflushed), [vec![0, 512], vec![500, 4096, 4097], vec![4098, 0]]);
    }

    #[test]
    fn there_is_a_bound() {
        let mut unflushed = Unflushed::default();
        for place in 0..32 {
            assert!(unflushed.has_room(), "{place} MiB");
            answered(&mut unflushed, data(place << 20, 1 << 20), false);
        }
        assert!(!unflushed.has_room());
    }

    #[test]
    fn small_writes_count_with_the_memory_that_they_have() {
        let mut unflushed = Unflushed::default();
        let mut part = Buffer::zeroed(1 << 20);
        part.truncate(1);
        answered(&mut unflushed, Change::Data { offset: 0, data: Arc::new(part.freeze()) }, false);
        answered(&mut unflushed, data(1, 1), false);
        assert_eq!(unflushed.bytes(), (1 << 20) + 4096 + 2 * ENTRY_BYTES);
    }
}
