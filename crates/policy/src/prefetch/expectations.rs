//! Expected offsets: candidates for streams, before a scan is detected.
//!
//! A request that belongs to no stream records where the next request of a scan would begin:
//!
//! ```text
//!   backward scan   offset − length
//!   forward scan    offset + length
//!   strided scan    offset + stride; stride = offset − offset of a recent request
//! ```
//!
//! The table is searched for the exact offset of the next request. Interleaved requests of other
//! readers therefore do not matter, nor does reordering in a deep queue. Expectations of random
//! reads are overwritten: the table has a fixed size, and a request costs a few stores.

use super::read_ahead::StreamId;
use super::streams::ScanStep;
use alloc::boxed::Box;
use alloc::vec;

/// Number of slots, a power of two. At four slots for each request, an expectation survives about
/// 500 random requests.
const SLOTS: usize = 2048;
/// Age in requests above which an expectation is ignored: a match would be a coincidence.
const LIFETIME_REQUESTS: u32 = 2048;
/// Number of recent requests from which strides are measured. As many strided scans may be
/// interleaved.
const RECENT_REQUESTS: usize = 2;
/// Maximum stride in bytes: a slot has 32 bits for it.
const MAX_STRIDE: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpectedRequest {
    pub(super) step: ScanStep,
    pub(super) scan_length: u8,
    pub(super) stream: StreamId,
}

/// One slot of the table, aligned so that it never crosses a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(32))]
struct ExpectationSlot {
    offset: u64,
    recorded_at: u32,
    request: ExpectedRequest,
}

const _: () = assert!(size_of::<ExpectationSlot>() == 32);

#[derive(Debug)]
pub(super) struct Expectations {
    /// [`SLOTS`] entries; empty until the first expectation, because they need 64 KiB.
    slots: Box<[ExpectationSlot]>,
    request_count: u32,
    recent: [u64; RECENT_REQUESTS],
    next_recent: usize,
}

impl Expectations {
    pub(super) fn new() -> Self {
        Self { slots: Box::default(), request_count: 0, recent: [u64::MAX; RECENT_REQUESTS], next_recent: 0 }
    }

    /// Counts a request, and returns and removes the expectation that its `offset` meets.
    pub(super) fn take_match(&mut self, offset: u64) -> Option<ExpectedRequest> {
        self.request_count = self.request_count.wrapping_add(1);
        let slot = self.slots.get_mut(slot_index(offset))?;
        if slot.offset != offset || self.request_count.wrapping_sub(slot.recorded_at) > LIFETIME_REQUESTS {
            return None;
        }
        // An expectation is met only once: a repeated read of the same offset is not a scan.
        slot.offset = u64::MAX;
        Some(slot.request)
    }

    /// Records an expectation. Keeps an unexpired one of a longer scan in the same slot. At the
    /// same offset, a scan without gaps takes precedence over a strided one: requests of
    /// interleaved readers resemble a strided scan.
    pub(super) fn expect(&mut self, offset: u64, request: ExpectedRequest) {
        if self.slots.is_empty() {
            self.slots = empty_slots();
        }
        let slot = &mut self.slots[slot_index(offset)];
        let is_young = self.request_count.wrapping_sub(slot.recorded_at) <= LIFETIME_REQUESTS;
        if slot.offset != u64::MAX && is_young {
            // Order at the same offset: scans without gaps first, then the longer scan.
            let preference = |expected: &ExpectedRequest| (!expected.step.has_gaps(), expected.scan_length);
            let keeps_old = if slot.offset == offset {
                preference(&slot.request) > preference(&request)
            } else {
                slot.request.scan_length > request.scan_length
            };
            if keeps_old {
                return;
            }
        }
        *slot = ExpectationSlot { offset, recorded_at: self.request_count, request };
    }

    /// Records the requests that would follow a request of no known stream: the next one of a
    /// strided, a backward and a forward scan.
    pub(super) fn expect_scans(&mut self, offset: u64, length: u64) {
        let first_of_scan = |step| ExpectedRequest { step, scan_length: 1, stream: StreamId::NONE };
        for recent in self.recent {
            let distance = offset.abs_diff(recent);
            // Smaller distances are sequential scans or overlaps; larger ones do not fit into a
            // slot.
            if recent == u64::MAX || distance <= length || distance > MAX_STRIDE {
                continue;
            }
            let step = ScanStep::Stride(offset.wrapping_sub(recent) as i32);
            if let Some(next) = step.next(offset, length) {
                self.expect(next, first_of_scan(step));
            }
        }
        self.recent[self.next_recent] = offset;
        self.next_recent = (self.next_recent + 1) % RECENT_REQUESTS;
        if let Some(next) = offset.checked_sub(length) {
            self.expect(next, first_of_scan(ScanStep::Backward));
        }
        self.expect_forward(offset.saturating_add(length));
    }

    pub(super) fn expect_forward(&mut self, offset: u64) {
        self.expect(
            offset,
            ExpectedRequest { step: ScanStep::Forward, scan_length: 1, stream: StreamId::NONE },
        );
    }
}

#[cold]
fn empty_slots() -> Box<[ExpectationSlot]> {
    let request = ExpectedRequest { step: ScanStep::Forward, scan_length: 0, stream: StreamId::NONE };
    // No request begins at u64::MAX.
    vec![ExpectationSlot { offset: u64::MAX, recorded_at: 0, request }; SLOTS].into()
}

/// Fibonacci hashing, because requests are aligned and their low bits are mostly zero.
fn slot_index(offset: u64) -> usize {
    let mixed = (offset >> 9).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> (64 - SLOTS.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(offsets: impl IntoIterator<Item = u64>) -> Option<ExpectedRequest> {
        let mut table = Expectations::new();
        let mut last = None;
        for offset in offsets {
            last = table.take_match(offset);
            match last {
                None => table.expect_scans(offset, 4096),
                Some(met) => {
                    if let Some(next) = met.step.next(offset, 4096) {
                        table.expect(next, ExpectedRequest { scan_length: met.scan_length + 1, ..met });
                    }
                    if met.step.has_gaps() {
                        table.expect_forward(offset + 4096);
                    }
                }
            }
        }
        last
    }

    #[test]
    fn scans_are_detected_after_two_or_three_requests() {
        let expect = |offsets: [u64; 5], step, run| {
            let expected = ExpectedRequest { step, scan_length: run, stream: StreamId::NONE };
            assert_eq!(follow(offsets.map(|block| block * 4096)), Some(expected), "{offsets:?}");
        };
        expect([10, 11, 12, 13, 14], ScanStep::Forward, 4);
        expect([14, 13, 12, 11, 10], ScanStep::Backward, 4);
        expect([0, 16, 32, 48, 64], ScanStep::Stride(65536), 3);
        expect([64, 48, 32, 16, 0], ScanStep::Stride(-65536), 3);
        assert_eq!(follow([5, 700, 3, 80, 41].map(|block| block * 4096)), None);
    }

    #[test]
    fn a_disk_without_requests_has_no_table() {
        let mut table = Expectations::new();
        assert_eq!(table.take_match(0), None);
        assert!(table.slots.is_empty());
        table.expect_scans(0, 4096);
        assert_eq!(table.take_match(4096).map(|met| met.step), Some(ScanStep::Forward));
    }

    #[test]
    fn old_expectations_expire() {
        let mut table = Expectations::new();
        table.expect_scans(4096, 4096);
        for other in 0..u64::from(LIFETIME_REQUESTS) {
            assert_eq!(table.take_match((1 << 40) + other * 512), None);
        }
        assert_eq!(table.take_match(8192), None);
    }
}
