//! The detected streams, each with the position of its reader and of its read-ahead.
//!
//! ```text
//!            head               ahead
//!   ─ read ────┤── read ahead ────┤──────► later           forward; backward is mirrored
//! ```
//!
//! A stream is a position and a rule, not a client: any request that matches continues it. If all
//! slots are in use, one is replaced by the second-chance (clock) algorithm. Independent of the
//! contents of the cache.

use super::read_ahead::{BLOCK_BYTES, ReadAhead, StreamId};
use super::window::ReadAheadWindow;
use alloc::vec::Vec;

/// Maximum number of ranges of a strided stream that are read ahead at a time.
const MAX_STRIDED_RANGES: u64 = 64;
/// Distance in bytes within which a new scan joins an existing stream: as far as requests of a deep
/// queue overtake each other.
const NEAR_BYTES: u64 = 512 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanStep {
    /// Each request begins at the end of its predecessor.
    Forward,
    /// Each request ends at the beginning of its predecessor.
    Backward,
    /// Each request begins this many bytes after the beginning of its predecessor. Not 0; may be
    /// negative.
    Stride(i32),
}

impl ScanStep {
    /// True if there are unread bytes between the requests.
    pub(super) const fn has_gaps(self) -> bool {
        matches!(self, Self::Stride(_))
    }

    /// Offset of the request after one at `offset`; `None` if that lies outside of any disk.
    pub(super) fn next(self, offset: u64, length: u64) -> Option<u64> {
        match self {
            Self::Forward => offset.checked_add(length),
            Self::Backward => offset.checked_sub(length),
            Self::Stride(step) => offset.checked_add_signed(step.into()),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct PrefetchStream {
    step: ScanStep,
    /// Length of its requests in bytes.
    length: u64,
    head: u64,
    ahead: u64,
    is_at_end: bool,
    pub(super) window: ReadAheadWindow,
    unread_bytes: u64,
    used_bytes: u64,
    wasted_bytes: u64,
    generation: u32,
    was_continued: bool,
}

impl PrefetchStream {
    pub(super) fn advance(&mut self, offset: u64, length: u64) {
        self.was_continued = true;
        let end = offset.saturating_add(length);
        match self.step {
            // A request that was overtaken does not move the head back.
            ScanStep::Forward => self.head = self.head.max(end),
            ScanStep::Backward => self.head = self.head.min(offset),
            ScanStep::Stride(step) => {
                self.length = length;
                let next = self.step.next(offset, length).unwrap_or(self.head);
                if is_before(self.head, next, step) {
                    self.head = next;
                }
            }
        }
        // The reader has passed its read-ahead, which continues at the reader without any lead.
        let overtaken = match self.step {
            ScanStep::Forward => self.ahead < self.head,
            ScanStep::Backward => self.ahead > self.head,
            ScanStep::Stride(step) => is_before(self.ahead, self.head, step),
        };
        if overtaken {
            self.ahead = self.head;
        }
    }

    /// True if at least `bytes` were used in excess of the wasted ones.
    pub(super) const fn has_proven_use(&self, bytes: u64) -> bool {
        self.used_bytes >= bytes + self.wasted_bytes
    }

    pub(super) fn next(&self, length: u64) -> Option<u64> {
        match self.step {
            ScanStep::Forward | ScanStep::Stride(_) => Some(self.head),
            ScanStep::Backward => self.head.checked_sub(length),
        }
    }

    pub(super) const fn step(&self) -> ScanStep {
        self.step
    }

    /// Bytes read ahead that the reader has not reached.
    pub(super) fn lead_bytes(&self) -> u64 {
        let distance = self.head.abs_diff(self.ahead);
        match self.step {
            ScanStep::Forward | ScanStep::Backward => distance,
            ScanStep::Stride(step) => {
                distance / u64::from(step.unsigned_abs()) * self.length.max(BLOCK_BYTES)
            }
        }
    }

    /// The next read-ahead: about `bytes`, inside the disk; `None` at its end.
    pub(super) fn plan(&self, id: StreamId, bytes: u64, size_bytes: u64) -> Option<ReadAhead> {
        let (first, length, step, count) = match self.step {
            ScanStep::Forward => {
                // Ends at a block boundary, so that the next one is aligned.
                let end = (self.ahead.saturating_add(bytes) / BLOCK_BYTES * BLOCK_BYTES).min(size_bytes);
                (self.ahead, end.checked_sub(self.ahead)?, 0, 1)
            }
            ScanStep::Backward => {
                let start = self.ahead.saturating_sub(bytes).next_multiple_of(BLOCK_BYTES).min(self.ahead);
                (start, self.ahead - start, 0, 1)
            }
            ScanStep::Stride(step) => {
                // Whole blocks are read and cached, so a short request costs a block.
                let max_count = bytes.div_ceil(self.length.max(BLOCK_BYTES)).min(MAX_STRIDED_RANGES);
                let available = if step > 0 {
                    // The last range must end inside the disk.
                    let room = size_bytes.checked_sub(self.ahead.checked_add(self.length)?)?;
                    room / u64::from(step.unsigned_abs()) + 1
                } else {
                    self.ahead / u64::from(step.unsigned_abs()) + 1
                };
                (self.ahead, self.length, step.into(), max_count.min(available))
            }
        };
        let is_inside = first.checked_add(length).is_some_and(|end| end <= size_bytes);
        (length > 0 && count > 0 && is_inside && !self.is_at_end).then_some(ReadAhead {
            stream: id,
            first,
            length,
            step,
            count,
            size_bytes,
            on_trial: false,
        })
    }

    pub(super) fn advance_read_ahead(&mut self, ahead: &ReadAhead) {
        self.ahead = match self.step {
            ScanStep::Forward => ahead.first + ahead.length,
            ScanStep::Backward => ahead.first,
            ScanStep::Stride(step) => {
                let distance = i64::from(step) * ahead.count.cast_signed();
                let next = ahead.first.checked_add_signed(distance);
                self.is_at_end = next.is_none();
                next.unwrap_or(0)
            }
        };
    }

    fn is_near(&self, step: ScanStep, next: u64) -> bool {
        let (low, high) = (self.head.min(self.ahead), self.head.max(self.ahead));
        step == self.step && next.saturating_add(NEAR_BYTES) >= low && next <= high.saturating_add(NEAR_BYTES)
    }
}

/// True if `position` comes before `other` in the direction of the stride.
const fn is_before(position: u64, other: u64, step: i32) -> bool {
    if step > 0 { position < other } else { position > other }
}

#[derive(Debug)]
pub(super) struct StreamTable {
    slots: Vec<PrefetchStream>,
    max_streams: usize,
    clock_hand: usize,
    /// Number of streams with unread data.
    unread_streams: u32,
    next_generation: u32,
}

impl StreamTable {
    pub(super) const fn new(max_streams: u32) -> Self {
        Self {
            slots: Vec::new(),
            max_streams: max_streams as usize,
            clock_hand: 0,
            unread_streams: 0,
            next_generation: 0,
        }
    }

    /// Forgets all streams and limits their number to `max_streams`.
    pub(super) fn reset(&mut self, max_streams: u32) {
        // Generations continue, so that no old ID finds a new stream.
        *self = Self { next_generation: self.next_generation, ..Self::new(max_streams) };
    }

    pub(super) fn get_mut(&mut self, id: StreamId) -> Option<&mut PrefetchStream> {
        self.slots.get_mut(id.index as usize).filter(|stream| stream.generation == id.generation)
    }

    pub(super) const fn streams_with_unread(&self) -> u32 {
        self.unread_streams
    }

    pub(super) fn count_unread(&mut self, id: StreamId, bytes: u64) {
        let Some(stream) = self.get_mut(id) else { return };
        let begins = stream.unread_bytes == 0 && bytes > 0;
        stream.unread_bytes += bytes;
        self.unread_streams += u32::from(begins);
    }

    pub(super) fn count_used(&mut self, id: StreamId, bytes: u64) {
        self.reduce_unread(id, bytes, |stream| stream.used_bytes += bytes);
    }

    pub(super) fn count_wasted(&mut self, id: StreamId, bytes: u64) {
        self.reduce_unread(id, bytes, |stream| stream.wasted_bytes += bytes);
    }

    fn reduce_unread(&mut self, id: StreamId, bytes: u64, count: impl FnOnce(&mut PrefetchStream)) {
        let Some(stream) = self.get_mut(id) else { return };
        count(stream);
        let unread_bytes = stream.unread_bytes.saturating_sub(bytes);
        let has_no_more_unread = stream.unread_bytes > 0 && unread_bytes == 0;
        stream.unread_bytes = unread_bytes;
        self.unread_streams -= u32::from(has_no_more_unread);
    }

    /// Returns the stream of a scan that has reached `next`: an existing one nearby, or a new one.
    pub(super) fn find_or_add(
        &mut self,
        step: ScanStep,
        next: u64,
        length: u64,
        window: ReadAheadWindow,
    ) -> StreamId {
        // A linear search, but a rare one: once for each scan that is detected.
        if let Some(index) = self.slots.iter().position(|stream| stream.is_near(step, next)) {
            return StreamId { index: index as u32, generation: self.slots[index].generation };
        }
        self.next_generation = self.next_generation.wrapping_add(1);
        let generation = self.next_generation;
        let stream = PrefetchStream {
            step,
            length,
            head: next,
            ahead: next,
            is_at_end: false,
            window,
            unread_bytes: 0,
            used_bytes: 0,
            wasted_bytes: 0,
            generation,
            was_continued: false,
        };
        if self.slots.len() < self.max_streams {
            self.slots.push(stream);
            return StreamId { index: (self.slots.len() - 1) as u32, generation };
        }
        let index = self.replaceable_slot();
        self.unread_streams -= u32::from(self.slots[index].unread_bytes > 0);
        self.slots[index] = stream;
        StreamId { index: index as u32, generation }
    }

    // Terminates after one round at the latest: it clears the mark of every stream that it passes.
    fn replaceable_slot(&mut self) -> usize {
        loop {
            let index = self.clock_hand;
            self.clock_hand = (self.clock_hand + 1) % self.slots.len();
            if !core::mem::take(&mut self.slots[index].was_continued) {
                return index;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: u64 = 1 << 30;
    const BLOCK: u64 = 4096;

    fn streams() -> StreamTable {
        StreamTable::new(2)
    }

    fn plan(streams: &mut StreamTable, id: StreamId, bytes: u64) -> Option<(u64, u64, u64)> {
        let stream = streams.get_mut(id).unwrap();
        let ahead = stream.plan(id, bytes, DISK)?;
        stream.advance_read_ahead(&ahead);
        Some((ahead.first, ahead.length, ahead.count))
    }

    #[test]
    fn each_step_plans_its_read_ahead() {
        let mut streams = StreamTable::new(3);
        let window = ReadAheadWindow::new(128 << 10, 1 << 20);
        let forward = streams.find_or_add(ScanStep::Forward, 5 * BLOCK, BLOCK, window);
        assert_eq!(plan(&mut streams, forward, 8 * BLOCK), Some((5 * BLOCK, 8 * BLOCK, 1)));
        assert_eq!(plan(&mut streams, forward, 8 * BLOCK), Some((13 * BLOCK, 8 * BLOCK, 1)));
        let backward = streams.find_or_add(ScanStep::Backward, 5 * BLOCK, BLOCK, window);
        assert_eq!(plan(&mut streams, backward, 3 * BLOCK), Some((2 * BLOCK, 3 * BLOCK, 1)));
        assert_eq!(plan(&mut streams, backward, 3 * BLOCK), Some((0, 2 * BLOCK, 1)));
        assert_eq!(plan(&mut streams, backward, 3 * BLOCK), None, "the beginning of the disk");
        let strided = streams.find_or_add(ScanStep::Stride(65536), DISK - 2 * 65536, BLOCK, window);
        assert_eq!(plan(&mut streams, strided, 8 * BLOCK), Some((DISK - 2 * 65536, BLOCK, 2)));
        assert_eq!(plan(&mut streams, strided, 8 * BLOCK), None, "the end of the disk");
        let mut streams = StreamTable::new(1);
        let strided = streams.find_or_add(ScanStep::Stride(-65536), 3 * 65536 + 512, 512, window);
        assert_eq!(plan(&mut streams, strided, 8 * BLOCK), Some((3 * 65536 + 512, 512, 4)));
        assert_eq!(plan(&mut streams, strided, 8 * BLOCK), None, "the beginning of the disk");
    }

    #[test]
    fn reordered_request_does_not_move_the_head_back() {
        let mut streams = streams();
        let id = streams.find_or_add(
            ScanStep::Forward,
            5 * BLOCK,
            BLOCK,
            ReadAheadWindow::new(128 << 10, 1 << 20),
        );
        plan(&mut streams, id, 8 * BLOCK);
        let stream = streams.get_mut(id).unwrap();
        stream.advance(7 * BLOCK, BLOCK);
        assert_eq!(stream.lead_bytes(), 5 * BLOCK);
        stream.advance(6 * BLOCK, BLOCK);
        assert_eq!(stream.lead_bytes(), 5 * BLOCK);
        stream.advance(20 * BLOCK, BLOCK);
        assert_eq!((stream.lead_bytes(), stream.next(BLOCK)), (0, Some(21 * BLOCK)));
    }

    #[test]
    fn nearby_scan_joins_the_stream() {
        let mut streams = streams();
        let window = ReadAheadWindow::new(128 << 10, 1 << 20);
        let first = streams.find_or_add(ScanStep::Forward, DISK / 2, BLOCK, window);
        assert_eq!(streams.find_or_add(ScanStep::Forward, DISK / 2 + 40 * BLOCK, BLOCK, window), first);
        assert_ne!(streams.find_or_add(ScanStep::Backward, DISK / 2, BLOCK, window), first);
    }

    #[test]
    fn recently_continued_stream_is_kept() {
        let mut streams = streams();
        let window = ReadAheadWindow::new(128 << 10, 1 << 20);
        let ids = [0, 1].map(|place| streams.find_or_add(ScanStep::Forward, place * DISK / 4, BLOCK, window));
        streams.count_unread(ids[1], 4096);
        assert_eq!(streams.streams_with_unread(), 1);
        streams.get_mut(ids[0]).unwrap().advance(0, BLOCK);
        let third = streams.find_or_add(ScanStep::Forward, DISK / 2, BLOCK, window);
        assert!(streams.get_mut(ids[0]).is_some() && streams.get_mut(ids[1]).is_none());
        assert!(streams.get_mut(third).is_some());
        assert_eq!(streams.streams_with_unread(), 0, "unread data of the replaced stream");
    }
}
