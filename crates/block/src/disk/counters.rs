//! Counters of a disk's requests, for status, metrics and upgrades.
//!
//! Only requests that succeeded count, as clients made them, before merging. Never counts a failed
//! request: see [`Failures`](super::Failures).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use policy::request::Direction;

use super::failures::RequestInfo;
use crate::recorder::DiskOperation;

/// Counters of the requests that succeeded since the disk was opened.
#[derive(Debug, Default)]
pub(super) struct DiskCounters {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    merged_requests: AtomicU64,
    merged_reads: AtomicU64,
    discards: AtomicU64,
    discarded_bytes: AtomicU64,
    flushes: AtomicU64,
    highest_write_end: AtomicU64,
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
    /// The part of [`DiskTotals::merged_requests`] that is reads.
    pub merged_reads: u64,
    /// Discards, which are also in [`DiskTotals::writes`].
    pub discards: u64,
    /// Bytes of the discards.
    pub discarded_bytes: u64,
    /// Flushes.
    pub flushes: u64,
    /// End of the write or write-zeroes with the highest offset, in bytes.
    pub highest_write_end: u64,
}

impl DiskCounters {
    /// Counts requests of a client, which were merged if there are several.
    pub(super) fn count(&self, request: &RequestInfo<'_>) {
        let RequestInfo { operation, offset, length, requests, .. } = *request;
        if operation == DiskOperation::Flush {
            self.flushes.fetch_add(requests, Relaxed);
            return;
        }
        let (request_counter, byte_counter) = match operation.direction() {
            Direction::Read => (&self.reads, &self.read_bytes),
            Direction::Write => (&self.writes, &self.written_bytes),
        };
        request_counter.fetch_add(requests, Relaxed);
        byte_counter.fetch_add(length, Relaxed);
        if requests > 1 {
            self.merged_requests.fetch_add(requests - 1, Relaxed);
        }
        match operation {
            DiskOperation::Read => {
                if requests > 1 {
                    self.merged_reads.fetch_add(requests - 1, Relaxed);
                }
            }
            DiskOperation::Write | DiskOperation::WriteZeroes => self.raise_write_end(offset + length),
            DiskOperation::Discard => {
                self.discards.fetch_add(requests, Relaxed);
                self.discarded_bytes.fetch_add(length, Relaxed);
            }
            DiskOperation::Flush => {}
        }
    }

    fn raise_write_end(&self, end: u64) {
        // Usually only read, so that the threads of a disk share the cache line.
        if self.highest_write_end.load(Relaxed) < end {
            self.highest_write_end.fetch_max(end, Relaxed);
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
            merged_reads: get(&self.merged_reads),
            discards: get(&self.discards),
            discarded_bytes: get(&self.discarded_bytes),
            flushes: get(&self.flushes),
            highest_write_end: get(&self.highest_write_end),
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
        add(&self.merged_reads, totals.merged_reads);
        add(&self.discards, totals.discards);
        add(&self.discarded_bytes, totals.discarded_bytes);
        add(&self.flushes, totals.flushes);
        self.raise_write_end(totals.highest_write_end);
    }
}
