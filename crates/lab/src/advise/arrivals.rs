//! The requests of a trace in memory, about six bytes each: time, operation and length.
//!
//! ```text
//!   traces ─► MergedTraces ─► a stream for each disk ─► of one disk, or of several by time
//! ```
//!
//! A search iterates over the requests of a disk some ten times, so they are stored by disk instead
//! of being read again. Offsets are not stored: no limit and no modelled device depends on them.
//! Beyond [`MAX_BYTES`] reading stops, and the result is marked as partial.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::atomic::{AtomicBool, Ordering},
};

use console::figures;
use recording::{RecordSource, RecordedOutcome, RequestOp, TraceRecord};

use crate::{
    latencies::{self, Latencies},
    simulate::MAX_DISKS,
};

/// Some 70 million requests: a vector may need twice its size while it grows.
const MAX_BYTES: usize = 400 << 20;
const BATCH: usize = 4096;
/// Peaks are measured in slots of 2 to this power in nanoseconds, about an eighth of a second.
const SLOT_BITS: u32 = 27;
pub(super) const SLOT_NS: u64 = 1 << SLOT_BITS;

#[derive(Debug, Default)]
pub(super) struct TraceArrivals {
    pub(super) streams: Vec<DiskArrivals>,
    pub(super) requests: u64,
    /// Time from the first request to the last.
    pub(super) length_ns: u64,
    /// Reason why the trace was not read completely.
    pub(super) partial: Option<String>,
    bytes: usize,
}

/// Requests of one disk.
#[derive(Debug, Default)]
pub(super) struct DiskArrivals {
    pub(super) name: String,
    /// Requests that move data; only these are limited.
    pub(super) requests: u64,
    pub(super) flushes: u64,
    pub(super) moved_bytes: u64,
    /// End of the highest range that was accessed.
    pub(super) end_bytes: u64,
    pub(super) last_ns: u64,
    /// Requests that begin at the end of the previous one.
    pub(super) sequential: u64,
    /// Recorded latencies of the requests that move data, if the trace has them.
    pub(super) measured: Option<Latencies>,
    /// Number of those that were throttled.
    pub(super) throttled: u64,
    /// Maxima of operations and bytes in one slot.
    pub(super) peak: [u64; 2],
    slot: u64,
    in_slot: [u64; 2],
    last_length: u64,
    last_end: u64,
    encoded: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TraceArrival {
    pub(super) at_ns: u64,
    pub(super) op: RequestOp,
    pub(super) length: u64,
}

impl TraceArrivals {
    /// Reads to the end, to an error, or until `stop`. Fails if there is no request at all.
    pub(super) fn read(
        source: &mut dyn RecordSource,
        stop: &AtomicBool,
        report_progress: &dyn Fn(u64),
    ) -> anyhow::Result<Self> {
        let (mut arrivals, mut records) = (Self::default(), Vec::with_capacity(BATCH));
        loop {
            records.clear();
            let filled = source.fill(&mut records, BATCH);
            let disks = source.disks();
            for record in &records {
                if record.disk.index() >= MAX_DISKS {
                    anyhow::bail!("there are more than {MAX_DISKS} disks (split the trace)");
                }
                arrivals.push(record, &disks[record.disk.index()]);
            }
            // Flushes have no admission, so their latencies would distort the comparison.
            for record in records.iter().filter(|record| record.op != RequestOp::Flush) {
                if let Some(measured) = source.measured(record) {
                    arrivals.measure(record, measured);
                }
            }
            report_progress(arrivals.requests);
            // An error after the first request leaves a usable, partial trace.
            match filled {
                Err(error) if arrivals.requests == 0 => return Err(error),
                Err(error) => arrivals.partial = Some(format!("{error:#}")),
                Ok(()) if stop.load(Ordering::Relaxed) => arrivals.partial = Some("interrupted".to_owned()),
                Ok(()) if arrivals.bytes > MAX_BYTES => {
                    arrivals.partial = Some(format!(
                        "memory has no place for more than the first {} requests (split the trace)",
                        figures::count(arrivals.requests as f64)
                    ));
                }
                Ok(()) if !records.is_empty() => continue,
                Ok(()) => {}
            }
            anyhow::ensure!(arrivals.requests > 0, "the trace has no request");
            return Ok(arrivals);
        }
    }

    pub(super) fn push(&mut self, record: &TraceRecord, name: &str) {
        let index = record.disk.index();
        // Disks are numbered in order of appearance, but one record may introduce several.
        if self.streams.len() <= index {
            self.streams.resize_with(index + 1, DiskArrivals::default);
        }
        let stream = &mut self.streams[index];
        if stream.name.is_empty() {
            name.clone_into(&mut stream.name);
        }
        // Counted by the encoded size, which the memory bound is about.
        let before = stream.encoded.len();
        stream.push(record);
        self.bytes += stream.encoded.len() - before;
        self.requests += 1;
        self.length_ns = self.length_ns.max(record.time_ns);
    }

    /// Adds the recorded result of a request.
    fn measure(&mut self, record: &TraceRecord, measured: RecordedOutcome) {
        let stream = &mut self.streams[record.disk.index()];
        stream.throttled += u64::from(measured.was_held);
        latencies::note(stream.measured.get_or_insert_with(latencies::growing), measured.latency_ns);
    }

    /// Requests of these disks by time, each with its disk; at equal times in the order of `disks`.
    pub(super) fn merged(&self, disks: &[usize]) -> MergedArrivals<'_> {
        let mut together =
            MergedArrivals { sources: Vec::with_capacity(disks.len()), next: BinaryHeap::new() };
        for (place, &disk) in disks.iter().enumerate() {
            let mut iter = self.streams[disk].iter();
            if let Some(arrival) = iter.next() {
                together.next.push(Reverse((arrival.at_ns, place)));
                together.sources.push((disk, iter, arrival));
            } else {
                // A placeholder that is never read: the heap has no entry for it.
                together.sources.push((
                    disk,
                    iter,
                    TraceArrival { at_ns: 0, op: RequestOp::Flush, length: 0 },
                ));
            }
        }
        together
    }
}

impl DiskArrivals {
    fn push(&mut self, record: &TraceRecord) {
        let TraceRecord { time_ns, op, offset, length, .. } = *record;
        let is_same = length == self.last_length;
        let kind = RequestOp::ALL.iter().position(|known| *known == op).unwrap_or(0) as u128;
        // The lowest bit marks a repeated length, three bits the operation, the rest the time
        // difference. 128 bits, because the difference of two 64-bit times is shifted by four bits.
        let ahead = u128::from(time_ns.saturating_sub(self.last_ns));
        encode_varint(&mut self.encoded, ahead << 4 | kind << 1 | u128::from(is_same));
        if !is_same {
            encode_varint(&mut self.encoded, u128::from(length));
        }
        (self.last_ns, self.last_length) = (time_ns.max(self.last_ns), length);
        self.end_bytes = self.end_bytes.max(offset.saturating_add(length));
        if op == RequestOp::Flush {
            self.flushes += 1;
            return;
        }
        self.requests += 1;
        self.sequential += u64::from(offset == self.last_end);
        self.last_end = offset.saturating_add(length);
        self.moved_bytes = self.moved_bytes.saturating_add(length);
        // Times never decrease within a disk, so only the current slot has to be stored.
        let slot = time_ns >> SLOT_BITS;
        if slot != self.slot {
            (self.slot, self.in_slot) = (slot, [0; 2]);
        }
        for (kind, units) in [1, length].into_iter().enumerate() {
            self.in_slot[kind] = self.in_slot[kind].saturating_add(units);
            self.peak[kind] = self.peak[kind].max(self.in_slot[kind]);
        }
    }

    pub(super) fn iter(&self) -> Iter<'_> {
        Iter { rest: &self.encoded, at_ns: 0, length: 0 }
    }
}

#[derive(Debug)]
pub(super) struct Iter<'a> {
    rest: &'a [u8],
    at_ns: u64,
    length: u64,
}

impl Iterator for Iter<'_> {
    type Item = TraceArrival;

    #[inline]
    fn next(&mut self) -> Option<TraceArrival> {
        let head = decode_varint(&mut self.rest)?;
        // Cannot overflow for encoded input: each sum is a 64-bit time that was pushed.
        self.at_ns = self.at_ns.wrapping_add((head >> 4) as u64);
        if head & 1 == 0 {
            self.length = decode_varint(&mut self.rest)? as u64;
        }
        let op = RequestOp::ALL[(head >> 1 & 7) as usize % RequestOp::ALL.len()];
        Some(TraceArrival { at_ns: self.at_ns, op, length: self.length })
    }
}

#[derive(Debug)]
pub(super) struct MergedArrivals<'a> {
    sources: Vec<(usize, Iter<'a>, TraceArrival)>,
    next: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Iterator for MergedArrivals<'_> {
    type Item = (usize, TraceArrival);

    #[inline]
    fn next(&mut self) -> Option<(usize, TraceArrival)> {
        let mut first = self.next.peek_mut()?;
        let place = first.0.1;
        // Replacing the top of the heap in place costs one sift instead of a pop and a push.
        let (disk, iter, arrival) = &mut self.sources[place];
        let earliest = (*disk, *arrival);
        match iter.next() {
            Some(next) => {
                *arrival = next;
                *first = Reverse((next.at_ns, place));
            }
            None => drop(std::collections::binary_heap::PeekMut::pop(first)),
        }
        Some(earliest)
    }
}

fn encode_varint(bytes: &mut Vec<u8>, mut value: u128) {
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
}

#[inline]
fn decode_varint(bytes: &mut &[u8]) -> Option<u128> {
    // Fast path: nearly all values fit into nine bytes and thus into 64 bits.
    let mut value = 0_u64;
    for (index, &byte) in bytes.iter().take(9).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte < 0x80 {
            *bytes = &bytes[index + 1..];
            return Some(value.into());
        }
    }
    decode_long_varint(bytes)
}

#[cold]
fn decode_long_varint(bytes: &mut &[u8]) -> Option<u128> {
    let mut value = 0_u128;
    for (index, &byte) in bytes.iter().enumerate().take(18) {
        value |= u128::from(byte & 0x7f) << (7 * index);
        if byte < 0x80 {
            *bytes = &bytes[index + 1..];
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use recording::DiskId;

    proptest! {
        #[test]
        fn encoded_arrivals_are_decoded(
            records in prop::collection::vec((any::<u64>(), 0..3_u32, 0..5_usize, prop::option::of(any::<u64>())), 1..60)
        ) {
            let mut records = records;
            records.sort_by_key(|record| record.0);
            let mut arrivals = TraceArrivals::default();
            let mut expected: Vec<(usize, TraceArrival)> = Vec::new();
            for (time_ns, disk, op, length) in records {
                let (op, length) = (RequestOp::ALL[op], length.unwrap_or(4096));
                let record = TraceRecord { time_ns, offset: 0, length, line: 1, disk: DiskId(disk), file: 0, op };
                arrivals.push(&record, &disk.to_string());
                expected.push((disk as usize, TraceArrival { at_ns: time_ns, op, length }));
            }
            let all: Vec<usize> = (0..arrivals.streams.len()).collect();
            expected.sort_by_key(|(disk, arrival)| (arrival.at_ns, *disk));
            prop_assert_eq!(arrivals.merged(&all).collect::<Vec<_>>(), expected);
        }
    }
}
