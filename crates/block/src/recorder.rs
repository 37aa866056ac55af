//! Records of the requests of recorded disks, with their times, for a collector.
//!
//! ```text
//!   worker ─► its own ring ─┐
//!   worker ─► its own ring ─┼─► Collector ─► a file, a page
//! ```
//!
//! No request waits for the collector. If a ring is full, records are dropped and counted for each
//! disk, because the recording of one disk is not affected by the losses of another. A disk that is
//! not recorded pays one load of a number. Never uses the name of a disk, nor decides about the
//! collected records.

use std::{
    cell::RefCell,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use policy::{request::Direction, throttle::LevelCause, time::Instant};
use rtrb::{Consumer, Producer, RingBuffer};

/// Number of records in a ring: 65 ms at half a million requests a second.
const RING: usize = 1 << 15;

/// Type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskOperation {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Write zeroes.
    WriteZeroes,
    /// Flush.
    Flush,
    /// Discard.
    Discard,
}

impl DiskOperation {
    /// Direction of the limits that apply; flushes are not throttled.
    pub(crate) fn direction(self) -> Direction {
        if self == Self::Read { Direction::Read } else { Direction::Write }
    }
}

/// Record of a completed request.
#[derive(Clone, Copy, Debug)]
pub struct RequestRecord {
    /// Number that the disk was given by [`RecordingSwitch::set`].
    pub disk: u32,
    /// Type of the request.
    pub operation: DiskOperation,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes, of all merged requests.
    pub length: u64,
    /// Number of adjacent client requests of equal length that were merged.
    pub requests: u32,
    /// True if the client received an error.
    pub has_failed: bool,
    /// Arrival.
    pub arrived: Instant,
    /// Admission by the limits.
    pub admitted: Instant,
    /// Throttle cause: the limit that it waited for last, if any.
    pub throttle_cause: Option<LevelCause>,
    /// Completion.
    pub completed: Instant,
}

/// Recording state of a disk.
#[derive(Debug, Default)]
pub struct RecordingSwitch {
    /// The disk's number plus one; 0 if it is not recorded.
    disk_plus_one: AtomicU32,
    dropped: Arc<DroppedRecords>,
}

/// Number of records of a disk that were dropped because a ring was full.
#[derive(Debug, Default)]
pub struct DroppedRecords(AtomicU64);

impl DroppedRecords {
    /// Number of dropped records since the last call.
    pub fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }

    /// Adds to the number.
    pub fn add(&self, requests: u64) {
        self.0.fetch_add(requests, Ordering::Relaxed);
    }
}

impl RecordingSwitch {
    /// Records its requests from now on as those of `disk`; `None` ends the recording.
    ///
    /// # Panics
    /// Panics if the number is [`u32::MAX`].
    pub fn set(&self, disk: Option<u32>) {
        let number = disk.map_or(0, |disk| disk.checked_add(1).expect("there are fewer disks"));
        self.disk_plus_one.store(number, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Option<u32> {
        self.disk_plus_one.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Its dropped records. Read it after [`Collector::take`] has returned true.
    pub fn dropped(&self) -> &Arc<DroppedRecords> {
        &self.dropped
    }
}

thread_local! {
    static PRODUCER: RefCell<Option<RecordProducer>> = const { RefCell::new(None) };
}

/// Rings of the current collector; its number, 0 for none.
static COLLECTED: Mutex<Vec<RecordRing>> = Mutex::new(Vec::new());
static COLLECTOR: AtomicU64 = AtomicU64::new(0);
static HAS_COLLECTOR: AtomicBool = AtomicBool::new(false);

/// The producer of a thread.
struct RecordProducer {
    collector: u64,
    ring: Producer<RequestRecord>,
    has_lost: Arc<AtomicBool>,
}

/// The collector's end of a ring.
struct RecordRing {
    ring: Consumer<RequestRecord>,
    has_lost: Arc<AtomicBool>,
}

/// Records a request of the disk of `recorded`, if there is a collector.
pub fn record(finished: RequestRecord, recorded: &RecordingSwitch) {
    if !HAS_COLLECTOR.load(Ordering::Relaxed) {
        return;
    }
    PRODUCER.with_borrow_mut(|producer| {
        let collector = COLLECTOR.load(Ordering::Relaxed);
        // A new collector: the ring belongs to the previous one, so this thread creates another.
        if producer.as_ref().is_none_or(|producer| producer.collector != collector) {
            *producer = Some(RecordProducer::new(collector));
        }
        let producer = producer.as_mut().expect("it was made");
        if producer.ring.push(finished).is_err() {
            recorded.dropped.add(finished.requests.max(1).into());
            // Release: a collector that sees the flag sees the count.
            producer.has_lost.store(true, Ordering::Release);
        }
    });
}

impl RecordProducer {
    fn new(collector: u64) -> Self {
        let (producer, ring) = RingBuffer::new(RING);
        let has_lost = Arc::new(AtomicBool::new(false));
        let mut rings = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
        // Another collector may have begun meanwhile. Then this ring is not registered, and the
        // next request creates another.
        if COLLECTOR.load(Ordering::Relaxed) == collector {
            rings.push(RecordRing { ring, has_lost: Arc::clone(&has_lost) });
        }
        Self { collector, ring: producer, has_lost }
    }
}

/// Receives the records of all threads; at most one exists in a process.
#[derive(Debug)]
pub struct Collector(());

impl Collector {
    /// Creates the collector; `None` if there is one already.
    pub fn begin() -> Option<Self> {
        let mut rings = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
        if HAS_COLLECTOR.load(Ordering::Relaxed) {
            return None;
        }
        rings.clear();
        // The new number makes each thread create a new ring.
        COLLECTOR.fetch_add(1, Ordering::Relaxed);
        HAS_COLLECTOR.store(true, Ordering::Relaxed);
        Some(Self(()))
    }

    /// Calls `each` for all records since the last call, thread by thread. Returns true if records
    /// were dropped since then; [`RecordingSwitch::dropped`] of each disk returns how many.
    pub fn take(&mut self, mut each: impl FnMut(&RequestRecord)) -> bool {
        let mut have_lost = false;
        for RecordRing { ring, has_lost } in
            COLLECTED.lock().unwrap_or_else(PoisonError::into_inner).iter_mut()
        {
            // Read once: a producer that keeps adding must not make this loop endless.
            let ready = ring.slots();
            if let Ok(chunk) = ring.read_chunk(ready) {
                let (first, second) = chunk.as_slices();
                first.iter().chain(second).for_each(&mut each);
                chunk.commit_all();
            }
            // Acquire pairs with the producer's Release.
            have_lost |= has_lost.swap(false, Ordering::Acquire);
        }
        have_lost
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let mut rings = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
        // Threads keep their producers, unused, until the next collector or their end.
        HAS_COLLECTOR.store(false, Ordering::Relaxed);
        rings.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_records_are_counted_per_disk() {
        let mut collector = Collector::begin().expect("no other test has one");
        let (full, other) = (RecordingSwitch::default(), RecordingSwitch::default());
        let merged = RequestRecord {
            disk: 0,
            operation: DiskOperation::Read,
            offset: 0,
            length: 12288,
            requests: 3,
            has_failed: false,
            arrived: Instant::ZERO,
            admitted: Instant::ZERO,
            throttle_cause: None,
            completed: Instant::ZERO,
        };
        for _ in 0..RING + 5 {
            record(merged, &full);
        }
        let mut received = 0;
        assert!(collector.take(|_| received += 1));
        assert_eq!((received, full.dropped().take(), other.dropped().take()), (RING, 15, 0));
        record(merged, &other);
        assert!(!collector.take(|_| received += 1));
        assert_eq!((received, full.dropped().take()), (RING + 1, 0));
    }
}
