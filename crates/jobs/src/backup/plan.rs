//! Plan of a backup (`Plan`): divides what remains into zeroes, which need no copy, and pieces of
//! data.
//!
//! Walks over the disk once, by its allocation status, and again over clusters that changes had
//! begun to save and did not. Never plans a piece twice while a task works on it.

use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    ops::Range,
};

use block::{
    disk::DiskPoint,
    layer::copy_before_write::{PointFailure, PointInTime},
};
use event_listener::Event;
use storage::RangeLocks;

/// Longest range of one query of the allocation status, in bytes.
const QUERY_BYTES: u64 = 1 << 30;

/// Piece of work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// Reads as zeroes.
    Zeroes(Range<u64>),
    /// Data, a copy at most.
    Data(Range<u64>),
}

/// The plan.
#[derive(Debug)]
pub(super) struct Plan {
    max_piece_bytes: u64,
    cursor: Cell<u64>,
    pieces: RefCell<VecDeque<Piece>>,
    /// Number of pieces that tasks work on.
    in_progress: Cell<usize>,
    /// Notified when a task has finished a piece.
    finished: Event,
    /// Held by the task that extends the plan.
    turn: RangeLocks,
}

/// A piece that a task works on, until it is dropped.
#[derive(Debug)]
pub(super) struct PlannedPiece<'a> {
    plan: &'a Plan,
    piece: Piece,
}

impl Plan {
    /// A plan with pieces of data of at most `max_piece_bytes`, a multiple of the cluster size.
    pub(super) fn new(max_piece_bytes: u64) -> Self {
        Self {
            max_piece_bytes,
            cursor: Cell::new(0),
            pieces: RefCell::default(),
            in_progress: Cell::new(0),
            finished: Event::new(),
            turn: RangeLocks::default(),
        }
    }

    /// The next piece; `None` if everything is saved.
    pub(super) async fn next(&self, disk: &DiskPoint) -> Result<Option<PlannedPiece<'_>>, PointFailure> {
        let point = disk.point();
        let _turn = self.turn.exclusive(0..1).await;
        loop {
            let piece = self.pieces.borrow_mut().pop_front();
            if let Some(piece) = piece {
                self.in_progress.set(self.in_progress.get() + 1);
                return Ok(Some(PlannedPiece { plan: self, piece }));
            }
            if let Some(range) = self.next_unsaved(point) {
                match self.extend(disk, range.clone()).await {
                    Ok(()) => {}
                    // A shrink has saved a part of the range and removed it meanwhile.
                    Err(_) if self.next_unsaved(point) != Some(range) => {}
                    Err(failure) => return Err(failure),
                }
                continue;
            }
            // Clusters before the cursor may be unsaved: tasks work on them, or have given up.
            let finished = self.finished.listen();
            if self.in_progress.get() > 0 {
                finished.await;
                continue;
            }
            self.cursor.set(0);
            let is_complete = point.wait_for(|point| match point.unsaved_bytes() {
                0 => Some(true),
                // Otherwise changes save the rest.
                _ => point.next_unsaved(0, 1).map(|_| false),
            });
            if is_complete.await? {
                return Ok(None);
            }
        }
    }

    fn next_unsaved(&self, point: &PointInTime) -> Option<Range<u64>> {
        point.next_unsaved(self.cursor.get(), QUERY_BYTES)
    }

    /// Plans the beginning of `range`, whole clusters, as far as one query shows its status.
    async fn extend(&self, disk: &DiskPoint, range: Range<u64>) -> Result<(), PointFailure> {
        let point = disk.point();
        let extents = disk.block_status(range.clone()).await?;
        let mut zeroes: Vec<Range<u64>> = Vec::new();
        let mut at = range.start;
        for extent in extents {
            let end = (at + extent.length).min(range.end);
            match zeroes.last_mut() {
                // A hole beside allocated zeroes.
                Some(last) if extent.zero && last.end == at => last.end = end,
                _ if extent.zero => zeroes.push(at..end),
                _ => {}
            }
            at = end;
        }
        // The rest of a cluster whose status is known in part belongs to the next query, unless
        // that would be the same one.
        let known = match point.whole_clusters(&(range.start..at)) {
            known if known.is_empty() => (range.start + point.cluster_bytes()).min(range.end),
            known => known.end,
        };
        let mut planned = range.start;
        for zeroes in zeroes {
            let zeroes = point.whole_clusters(&zeroes);
            if !zeroes.is_empty() && zeroes.end <= known {
                self.plan_data(planned..zeroes.start);
                planned = zeroes.end;
                self.pieces.borrow_mut().push_back(Piece::Zeroes(zeroes));
            }
        }
        self.plan_data(planned..known);
        self.cursor.set(known);
        Ok(())
    }

    fn plan_data(&self, range: Range<u64>) {
        let mut start = range.start;
        while start < range.end {
            let end = (start + self.max_piece_bytes).min(range.end);
            self.pieces.borrow_mut().push_back(Piece::Data(start..end));
            start = end;
        }
    }
}

impl PlannedPiece<'_> {
    pub(super) fn kind(&self) -> &Piece {
        &self.piece
    }
}

impl Drop for PlannedPiece<'_> {
    fn drop(&mut self) {
        self.plan.in_progress.set(self.plan.in_progress.get() - 1);
        self.plan.finished.notify(usize::MAX);
    }
}
