//! Counters of a disk's requests, for status, metrics and upgrades.
//!
//! Only requests that succeeded count, as clients made them, before merging. Never counts a failed
//! request: see [`Failures`](super::Failures).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use policy::request::Direction;

/// Counters of the requests that succeeded since the disk was opened.
#[derive(Debug, Default)]
pub(super) struct DiskCounters {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    merged_requests: AtomicU64,
}

/// Snapshot of a disk's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskTotals {
    /// Reads.
    pub reads: u64,
    /// Writes, write-zeroes and discards.
    pub writes: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Bytes of the writes, write-zeroes and discards.
    pub written_bytes: u64,
    /// Requests saved by merging: a merge of `n` requests saves `n - 1`.
    pub merged_requests: u64,
}

impl DiskCounters {
    /// Counts requests of a client, which were merged if there are several.
    pub(super) fn count(&self, direction: Direction, requests: u64, bytes: u64) {
        let (request_counter, byte_counter) = match direction {
            Direction::Read => (&self.reads, &self.read_bytes),
            Direction::Write => (&self.writes, &self.written_bytes),
        };
        request_counter.fetch_add(requests, Relaxed);
        byte_counter.fetch_add(bytes, Relaxed);
        if requests > 1 {
            self.merged_requests.fetch_add(requests - 1, Relaxed);
        }
    }

    /// Counters so far.
    pub(super) fn totals(&self) -> DiskTotals {
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        DiskTotals {
            reads: get(&self.reads),
            writes: get(&self.writes),
            read_bytes: get(&self.read_bytes),
            written_bytes: get(&self.written_bytes),
            merged_requests: get(&self.merged_requests),
        }
    }

    /// Adds the counters of another process that served the disk before.
    pub(super) fn add(&self, totals: &DiskTotals) {
        let add = |counter: &AtomicU64, amount: u64| {
            let _ = counter.fetch_add(amount, Relaxed);
        };
        add(&self.reads, totals.reads);
        add(&self.writes, totals.writes);
        add(&self.read_bytes, totals.read_bytes);
        add(&self.written_bytes, totals.written_bytes);
        add(&self.merged_requests, totals.merged_requests);
    }
}
