//! Walk over what a range of depths of a backing chain provides (`ChainWalk`), in pieces.
//!
//! Reads metadata only, as far as the job has taken the pieces. Never returns a piece twice.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    ops::Range,
};

use block::disk::{AdmissionPermit, Disk};
use reactor::error::Result;
use storage::RangeLocks;

/// Longest range of one query, in bytes.
const QUERY_BYTES: u64 = 1 << 30;
/// Longest piece of data, in bytes.
pub(crate) const COPY_BYTES: u64 = 512 << 10;
/// Longest piece of zeroes, in bytes.
const ZERO_BYTES: u64 = 64 << 20;

/// Part of the disk that the job works on at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChainPiece {
    /// Whole clusters, except at the end of the disk.
    pub(crate) range: Range<u64>,
    pub(crate) is_zero: bool,
    /// Length of the part that counts as its progress.
    pub(crate) progress_bytes: u64,
}

/// What a walk looks for.
#[derive(Clone, Debug)]
pub(crate) struct WalkOptions {
    /// Depths of the images, counted as by [`Disk::allocation_depth`].
    pub(crate) depths: Range<u32>,
    /// True if zeroes need no work.
    pub(crate) skips_zeroes: bool,
    /// True if zeroes are written like data.
    pub(crate) writes_zeroes: bool,
    /// Unit of the pieces in bytes, a power of two.
    pub(crate) unit_bytes: u64,
}

/// The walk.
#[derive(Debug)]
pub(crate) struct ChainWalk {
    options: WalkOptions,
    end: u64,
    cursor: Cell<u64>,
    /// End of the last piece.
    planned: Cell<u64>,
    pieces: RefCell<VecDeque<ChainPiece>>,
    /// Held by the task that extends the plan.
    turn: RangeLocks,
}

/// Result of a step of the walk.
#[derive(Debug)]
pub(crate) struct WalkStep {
    /// The next piece; `None` at the end.
    pub(crate) piece: Option<ChainPiece>,
    /// Bytes before it that need no work.
    pub(crate) skipped_bytes: u64,
}

impl ChainWalk {
    /// A walk over the first `end` bytes of a disk.
    pub(crate) fn new(end: u64, options: WalkOptions) -> Self {
        Self {
            options,
            end,
            cursor: Cell::new(0),
            planned: Cell::new(0),
            pieces: RefCell::default(),
            turn: RangeLocks::default(),
        }
    }

    /// The next piece. `admit` is called before each query.
    pub(crate) async fn next(
        &self,
        disk: &Disk,
        admit: impl AsyncFn() -> AdmissionPermit,
    ) -> Result<WalkStep> {
        let _turn = self.turn.exclusive(0..1).await;
        let mut skipped_bytes = 0;
        loop {
            if let Some(piece) = self.pieces.borrow_mut().pop_front() {
                return Ok(WalkStep { piece: Some(piece), skipped_bytes });
            }
            let at = self.cursor.get();
            // What was cut off meanwhile needs no work; what is added has no content below.
            let end = self.end.min(disk.size_bytes());
            if at >= end {
                self.cursor.set(self.end);
                skipped_bytes += self.end.saturating_sub(at);
                return Ok(WalkStep { piece: None, skipped_bytes });
            }
            let permit = admit().await;
            match self.extend(disk, &permit, at..end).await {
                Ok(planned_bytes) => skipped_bytes += self.cursor.get() - at - planned_bytes,
                // A shrink has cut off the range.
                Err(_) if disk.size_bytes() < end => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Plans the beginning of `range`. Returns the progress of the pieces.
    async fn extend(&self, disk: &Disk, permit: &AdmissionPermit, range: Range<u64>) -> Result<u64> {
        let mut planned_bytes = 0;
        let mut at = range.start;
        let length = QUERY_BYTES.min(range.end - at);
        for run in disk.allocation_depth(permit, at, length).await? {
            let end = at + run.length;
            let mut from = at;
            while self.options.depths.contains(&run.depth) && from < end {
                for extent in disk.block_status(permit, from, end - from).await? {
                    let part = from..end.min(from + extent.length);
                    from = part.end;
                    if !(extent.zero && self.options.skips_zeroes) {
                        planned_bytes +=
                            self.plan(part, extent.zero && !self.options.writes_zeroes, range.end);
                    }
                }
            }
            at = end;
            self.cursor.set(at);
        }
        Ok(planned_bytes)
    }

    /// Adds pieces for a part, extended to whole units; `end` is the end of the disk.
    fn plan(&self, part: Range<u64>, is_zero: bool, end: u64) -> u64 {
        let unit = self.options.unit_bytes;
        let mut start = self.planned.get().max(part.start & !(unit - 1));
        let end = end.min(part.end.next_multiple_of(unit));
        let longest = if is_zero { ZERO_BYTES } else { COPY_BYTES.max(unit) };
        let mut planned_bytes = 0;
        while start < end {
            let next = end.min((start / longest + 1) * longest);
            let progress_bytes = next.min(part.end).saturating_sub(start.max(part.start));
            planned_bytes += progress_bytes;
            self.pieces.borrow_mut().push_back(ChainPiece { range: start..next, is_zero, progress_bytes });
            self.planned.set(next);
            start = next;
        }
        planned_bytes
    }
}
