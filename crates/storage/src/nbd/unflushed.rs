//! Writes that a server has acknowledged and that no flush has covered yet. They must be repeated
//! if the server is a new one after a break.
//!
//! A server that was killed has lost the data in its memory, and a later flush would succeed
//! without it. So each write is kept until a flush that began after its reply has succeeded. Kept
//! data is bounded ([`MAX_BYTES`]): beyond that, the writer flushes first.
//!
//! - A write without a reply is not repeated from here: its caller sends it again, and gets that
//!   result.
//! - The order is that of the replies: a write that was made after a reply follows that write.
//! - A durable write is kept only if repeating an older write would overwrite it.
//!
//! Decides which writes are kept, and their order when they are repeated. Never does I/O.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use nbd::proto::cmd_flag;
use reactor::buffer::FrozenBuffer;

/// Maximum bytes of kept memory for one disk; the last write may exceed it.
pub(super) const MAX_BYTES: u64 = 32 << 20;
/// Memory of a kept request in addition to its data, in bytes.
const ENTRY_BYTES: u64 = 128;

/// A change of the disk.
#[derive(Clone, Debug)]
pub(super) enum NbdChange {
    Data { offset: u64, data: Arc<FrozenBuffer> },
    Zeroes { offset: u64, length: u32, flags: u16 },
}

impl NbdChange {
    pub(super) fn range(&self) -> Range<u64> {
        match self {
            Self::Data { offset, data } => *offset..offset + data.len() as u64,
            Self::Zeroes { offset, length, .. } => *offset..offset + u64::from(*length),
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (own_range, other_range) = (self.range(), other.range());
        own_range.start < other_range.end && other_range.start < own_range.end
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Data { data, .. } => ENTRY_BYTES + data.memory_bytes() as u64,
            Self::Zeroes { .. } => ENTRY_BYTES,
        }
    }
}

/// A change to write again.
#[derive(Clone, Debug)]
pub(super) struct ReplayedChange {
    pub(super) change: NbdChange,
    /// True if it was a FUA write, and is one again.
    pub(super) force: bool,
    /// True if the client received its acknowledgement.
    pub(super) is_acknowledged: bool,
}

#[derive(Debug)]
struct UnflushedEntry {
    change: ReplayedChange,
    /// The first flush that began after its reply.
    flush: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Unflushed {
    /// Changes without a reply, by number, with their FUA flag.
    in_flight: BTreeMap<u64, (NbdChange, bool)>,
    /// Acknowledged changes, in the order of their replies.
    acknowledged: VecDeque<UnflushedEntry>,
    /// Memory of the acknowledged changes, and of those in flight that will be kept.
    bytes: u64,
    next_number: u64,
    flushes: u64,
}

impl Unflushed {
    pub(super) fn has_room(&self) -> bool {
        self.bytes < MAX_BYTES
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if a kept change overlaps this one.
    pub(super) fn overlaps(&self, change: &NbdChange) -> bool {
        self.acknowledged.iter().any(|entry| entry.change.change.overlaps(change))
    }

    /// Records a change that is about to be sent; returns its number. With `force` it will be
    /// durable when it is acknowledged.
    pub(super) fn begin(&mut self, change: NbdChange, force: bool) -> u64 {
        self.bytes += if force { 0 } else { change.bytes() };
        let number = self.next_number;
        self.next_number += 1;
        self.in_flight.insert(number, (change, force));
        number
    }

    /// Records that a change is acknowledged; `may_be_forgotten` if the server may lose it before a
    /// flush.
    pub(super) fn answered(&mut self, number: u64, may_be_forgotten: bool) {
        if let Some((change, force)) = self.remove_in_flight(number) {
            self.keep(ReplayedChange { change, force, is_acknowledged: true }, may_be_forgotten);
        }
    }

    /// Records that the caller of a change was cancelled: the change may have taken effect.
    pub(super) fn cancel(&mut self, number: u64) {
        if let Some((change, force)) = self.remove_in_flight(number) {
            self.keep(ReplayedChange { change, force, is_acknowledged: false }, true);
        }
    }

    /// Records that a change failed. The contents of its range are undefined.
    pub(super) fn fail(&mut self, number: u64) {
        self.remove_in_flight(number);
    }

    fn remove_in_flight(&mut self, number: u64) -> Option<(NbdChange, bool)> {
        let (change, force) = self.in_flight.remove(&number)?;
        self.bytes -= if force { 0 } else { change.bytes() };
        Some((change, force))
    }

    fn keep(&mut self, mut replayed: ReplayedChange, may_be_forgotten: bool) {
        if (replayed.force || !may_be_forgotten) && !self.overlaps(&replayed.change) {
            return;
        }
        if let NbdChange::Zeroes { flags, .. } = &mut replayed.change {
            // It succeeded then, so now it must succeed even if it is slow.
            *flags &= !cmd_flag::FAST_ZERO;
        }
        self.bytes += replayed.change.bytes();
        self.acknowledged.push_back(UnflushedEntry { change: replayed, flush: None });
    }

    /// Records that a flush is about to be sent; returns its number.
    pub(super) fn begin_flush(&mut self) -> u64 {
        self.flushes += 1;
        for entry in &mut self.acknowledged {
            // Only entries acknowledged after the last flush began have none yet.
            entry.flush.get_or_insert(self.flushes);
        }
        self.flushes
    }

    /// Records that a flush succeeded: changes that were acknowledged before it began are durable.
    pub(super) fn end_flush(&mut self, number: u64) {
        self.retain(|entry| entry.flush.is_none_or(|flush| flush > number));
    }

    /// Records that everything was written again to a server that loses nothing.
    pub(super) fn clear(&mut self) {
        self.retain(|_| false);
    }

    fn retain(&mut self, must_stay: impl Fn(&UnflushedEntry) -> bool) {
        let mut removed_bytes = 0;
        self.acknowledged.retain(|entry| {
            let is_kept = must_stay(entry);
            removed_bytes += if is_kept { 0 } else { entry.change.change.bytes() };
            is_kept
        });
        self.bytes -= removed_bytes;
    }

    /// Changes to write again, in this order. Changes of one batch do not overlap, so they may be
    /// in flight together.
    pub(super) fn batches(&self, max_changes: usize) -> Vec<Vec<ReplayedChange>> {
        let mut batches: Vec<Vec<ReplayedChange>> = Vec::new();
        for UnflushedEntry { change: replayed, .. } in &self.acknowledged {
            // Only the last batch is tried: an earlier one could overlap changes in between.
            let is_disjoint =
                |batch: &[ReplayedChange]| !batch.iter().any(|other| other.change.overlaps(&replayed.change));
            match batches.last_mut() {
                Some(batch) if batch.len() < max_changes && is_disjoint(batch) => {
                    batch.push(replayed.clone());
                }
                _ => batches.push(vec![replayed.clone()]),
            }
        }
        batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::buffer::IoBuffer;

    fn data(offset: u64, length: usize) -> NbdChange {
        NbdChange::Data { offset, data: Arc::new(IoBuffer::zeroed(length).freeze()) }
    }

    fn answered(unflushed: &mut Unflushed, change: NbdChange, force: bool) {
        let number = unflushed.begin(change, force);
        unflushed.answered(number, true);
    }

    fn offsets(unflushed: &Unflushed) -> Vec<Vec<u64>> {
        let batch_offsets =
            |batch: Vec<ReplayedChange>| batch.iter().map(|replayed| replayed.change.range().start).collect();
        unflushed.batches(3).into_iter().map(batch_offsets).collect()
    }

    #[test]
    fn a_flush_covers_changes_acknowledged_before_it_began() {
        let mut unflushed = Unflushed::default();
        let (first, second) = (unflushed.begin(data(0, 512), false), unflushed.begin(data(512, 512), false));
        unflushed.answered(first, true);
        let flush = unflushed.begin_flush();
        unflushed.answered(second, true);
        unflushed.end_flush(flush);
        assert_eq!(offsets(&unflushed), [[512]]);
        let (failing, flush) = (unflushed.begin_flush(), unflushed.begin_flush());
        assert!(failing < flush);
        unflushed.end_flush(flush);
        assert_eq!((unflushed.acknowledged.len(), unflushed.bytes()), (0, 0));
    }

    #[test]
    fn acknowledged_changes_are_repeated_in_order() {
        let mut unflushed = Unflushed::default();
        let failed = unflushed.begin(data(0, 512), false);
        let late = unflushed
            .begin(NbdChange::Zeroes { offset: 4096, length: 512, flags: cmd_flag::FAST_ZERO }, false);
        let early = unflushed.begin(NbdChange::Zeroes { offset: 4100, length: 512, flags: 0 }, false);
        let in_flight = unflushed.begin(data(9000, 1), false);
        let cancelled = unflushed.begin(NbdChange::Zeroes { offset: 0, length: 1, flags: 0 }, false);
        unflushed.fail(failed);
        unflushed.answered(early, true);
        unflushed.answered(late, true);
        unflushed.cancel(cancelled);
        assert_eq!(offsets(&unflushed), [vec![4100], vec![4096, 0]]);
        let replayed = unflushed.batches(3).concat();
        assert_eq!(
            replayed.iter().map(|change| change.is_acknowledged).collect::<Vec<_>>(),
            [true, true, false]
        );
        assert!(matches!(replayed[1].change, NbdChange::Zeroes { flags: 0, .. }), "it may be slow now");
        unflushed.fail(in_flight);
        assert_eq!(unflushed.bytes(), 3 * ENTRY_BYTES);
    }

    #[test]
    fn fua_change_is_kept_over_an_older_overlapping_one() {
        let mut unflushed = Unflushed::default();
        answered(&mut unflushed, data(0, 512), true);
        let number = unflushed.begin(data(0, 512), false);
        unflushed.answered(number, false);
        assert_eq!((offsets(&unflushed), unflushed.bytes()), (Vec::<Vec<u64>>::new(), 0));
        let durable = unflushed.begin(data(511, 1), true);
        // Acknowledged while the FUA write is in flight.
        answered(&mut unflushed, data(0, 512), false);
        unflushed.answered(durable, true);
        assert_eq!(offsets(&unflushed), [[0], [511]]);
        assert!(unflushed.batches(3)[1][0].force);
        unflushed.clear();
        assert_eq!(unflushed.bytes(), 0);
    }

    #[test]
    fn overlapping_changes_are_in_separate_batches() {
        let mut unflushed = Unflushed::default();
        for (offset, length) in [(0, 512), (512, 512), (500, 20), (4096, 1), (4097, 1), (4098, 1), (0, 1)] {
            answered(&mut unflushed, data(offset, length), false);
        }
        assert_eq!(offsets(&unflushed), [vec![0, 512], vec![500, 4096, 4097], vec![4098, 0]]);
    }

    #[test]
    fn kept_bytes_are_bounded() {
        let mut unflushed = Unflushed::default();
        for mebibyte in 0..32 {
            assert!(unflushed.has_room(), "{mebibyte} MiB");
            answered(&mut unflushed, data(mebibyte << 20, 1 << 20), false);
        }
        assert!(!unflushed.has_room());
    }

    #[test]
    fn small_writes_count_with_the_memory_that_they_have() {
        let mut unflushed = Unflushed::default();
        let mut buffer = IoBuffer::zeroed(1 << 20);
        buffer.truncate(1);
        answered(&mut unflushed, NbdChange::Data { offset: 0, data: Arc::new(buffer.freeze()) }, false);
        answered(&mut unflushed, data(1, 1), false);
        assert_eq!(unflushed.bytes(), (1 << 20) + 4096 + 2 * ENTRY_BYTES);
    }
}
