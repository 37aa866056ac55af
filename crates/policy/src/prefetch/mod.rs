//! Prefetching: who reads in sequence, how far to read ahead, and what to keep.
//!
//! ```text
//!   read ──► extents.rs: in memory? ── yes ──► chunk.rs: has been read ──► its stream ──┐
//!               │ no                                                                   │
//!               ▼                                                                      ▼
//!            expectations.rs: was it expected? ── for the third time ──► streams.rs: how far ahead of it
//!               │ no                                                        │  window.rs: how much, how early
//!               ▼                                                           │  gate.rs: does it pay?
//!            expects what may follow                                        ▼  congestion.rs: is there room?
//!                                                                         ahead.rs: to be read
//!
//!   memory is full ──► lists.rs: which chunk to evict
//!   write ──► cache.rs: what it overlaps is not found any more, also if it is still in flight
//! ```
//!
//! The rules and defaults are those of pcache (KVM Forum 2016): keep only data that was read ahead,
//! never data that was asked for; ignore requests above a size; when memory is short, evict data
//! that has been read first. Beyond pcache: streams are found by place and not by client, also
//! backward and strided ones; each has a window that adapts (AMP, FAST 2007); memory is divided by
//! what pays (SARC, FAST 2005); a gate closes if the data is not used; readers take turns on a
//! device that cannot serve them all.
//!
//! Never does I/O, keeps no data and knows no clock: the caller's word for a chunk's data goes in
//! and comes out, and time is an argument.

mod cache;
mod chunk;
mod congestion;
mod expectations;
mod extents;
mod gate;
mod lists;
mod settings;
mod stats;
mod streams;
mod window;
mod writes;

use core::ops::Range;

use crate::throttle::Cost;
use chunk::BLOCK_BYTES;
use streams::StreamId;

pub use cache::{Cache, Cached, Fetch, FetchId, Found, Part};
pub use settings::{Invalid, Mode, Setting, Settings, UnknownMode};
pub use stats::Stats;
pub use writes::WriteId;

/// What is to be read ahead: one range of a sequential stream, several of a strided one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    stream: StreamId,
    first: u64,
    length: u64,
    step: i64,
    count: u64,
    size_bytes: u64,
    on_trial: bool,
}

impl Ahead {
    #[cfg(test)]
    const NOTHING: Self = Self {
        stream: StreamId::NONE,
        first: 0,
        length: BLOCK_BYTES,
        step: 0,
        count: 0,
        size_bytes: 0,
        on_trial: false,
    };

    /// The ranges, in the order in which they will be needed: whole blocks of the disk, not empty.
    ///
    /// Blocks, because a reader may have a part of what he asks for from memory and the rest from the image, while somebody writes to both. Then each
    /// sector must still be old or new as a whole.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { first, length, step, count, size_bytes, .. } = *self;
        (0..count.cast_signed()).map(move |index| {
            let offset = first.wrapping_add_signed(step * index);
            let Range { start, end } = whole_blocks(&(offset..offset + length));
            start..end.min(size_bytes)
        })
    }

    /// What reading it costs: an operation for each range.
    pub const fn cost(&self) -> Cost {
        Cost::equal(self.count, self.range_bytes())
    }

    /// Bytes of each range, at most: as a whole they are as many as lie in its blocks.
    const fn range_bytes(&self) -> u64 {
        let is_aligned =
            self.first.is_multiple_of(BLOCK_BYTES) && self.step.unsigned_abs().is_multiple_of(BLOCK_BYTES);
        let begins_inside = if is_aligned { 0 } else { BLOCK_BYTES };
        self.length.next_multiple_of(BLOCK_BYTES) + begins_inside
    }
}

/// The blocks that a range touches. What is read ahead, and what a change drops, are whole blocks: see [`Ahead::ranges`].
pub fn whole_blocks(range: &Range<u64>) -> Range<u64> {
    let start = range.start / BLOCK_BYTES * BLOCK_BYTES;
    start..range.end.checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX)
}
