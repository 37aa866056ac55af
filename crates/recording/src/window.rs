//! Reorders records that are nearly sorted.
//!
//! ```text
//!             a record not before the previous one ─► run ──┐
//!   push ─────┤                                             ├─► the earlier of the two ─► pop
//!             an earlier one ─────────────────────► late ───┘
//! ```
//!
//! Tracers on several processors, and servers that log completions, write records slightly out of
//! order. The output is sorted if no record is displaced by more than the window. A sorted trace
//! never uses the heap; records of equal time keep their order.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, VecDeque},
};

use super::record::TraceRecord;

pub(super) struct ReorderWindow {
    run: VecDeque<TraceRecord>,
    late: BinaryHeap<Reverse<LateRecord>>,
    /// Time of the last record that was returned, in the trace's clock.
    left_ns: u64,
    /// Only for the error message.
    window: usize,
}

struct LateRecord(TraceRecord);

impl ReorderWindow {
    pub(super) fn new(window: usize) -> Self {
        Self { run: VecDeque::new(), late: BinaryHeap::new(), left_ns: 0, window }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.run.len() + self.late.len()
    }

    pub(super) fn first_ns(&self) -> Option<u64> {
        // The earliest record is at the front of the run or at the top of the heap.
        let late = self.late.peek().map(|late| late.0.0.time_ns);
        self.run.front().map(|first| first.time_ns).into_iter().chain(late).min()
    }

    /// Adds a record, whose time is in the trace's clock.
    #[inline(always)]
    pub(super) fn push(&mut self, record: TraceRecord) -> Result<(), String> {
        // The second condition matters when the run is empty: a record may still precede the last
        // returned one.
        if self.run.back().is_none_or(|last| last.time_ns <= record.time_ns) && record.time_ns >= self.left_ns
        {
            self.run.push_back(record);
            return Ok(());
        }
        self.push_late(record)
    }

    #[cold]
    fn push_late(&mut self, record: TraceRecord) -> Result<(), String> {
        // A later record was already returned, so this one cannot be put in order.
        if record.time_ns < self.left_ns {
            return Err(format!(
                "the time {} ns is before {} ns, and displaced by more than {} records (--window N \
                 sorts within a larger window; or sort the trace by time)",
                record.time_ns, self.left_ns, self.window
            ));
        }
        self.late.push(Reverse(LateRecord(record)));
        Ok(())
    }

    #[inline]
    pub(super) fn pop(&mut self) -> Option<TraceRecord> {
        let record = if self.late.is_empty() { self.run.pop_front() } else { self.pop_earlier() }?;
        self.left_ns = record.time_ns;
        Some(record)
    }

    fn pop_earlier(&mut self) -> Option<TraceRecord> {
        let late = self.late.peek()?;
        // Equal times are in the order of their lines, which `order` includes.
        if self.run.front().is_some_and(|first| first.order() < late.0.0.order()) {
            return self.run.pop_front();
        }
        self.late.pop().map(|Reverse(LateRecord(record))| record)
    }
}

impl Ord for LateRecord {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.order().cmp(&other.0.order())
    }
}

impl PartialOrd for LateRecord {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for LateRecord {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for LateRecord {}
