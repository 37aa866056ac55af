//! What each request of recorded disks was and how long it took, for whoever keeps it.
//!
//! ```text
//!   worker ─► ring of its own ─┐
//!   worker ─► ring of its own ─┼─► Collector ─► a file, a page
//! ```
//!
//! Nothing waits for the collector: where a ring is full, what does not fit is counted, for each
//! disk by itself, since a recording of one has nothing to do with what another loses. A disk that
//! is not recorded pays one load of a number. Never knows the name of a disk, nor what becomes of
//! what it collects.

use std::{
    cell::RefCell,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
};

use policy::{request::Direction, throttle::Held, time::Instant};
use rtrb::{Consumer, Producer, RingBuffer};

/// Requests in a ring: 65 ms of half a million a second.
const RING: usize = 1 << 15;

/// What a request was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
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

impl Operation {
    /// Whose limits it meets, but for a flush, which meets none.
    pub(crate) fn direction(self) -> Direction {
        if self == Self::Read { Direction::Read } else { Direction::Write }
    }
}

/// A request that has come to its end.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    /// As its disk was told to be called.
    pub disk: u32,
    /// What it did.
    pub operation: Operation,
    /// Bytes.
    pub offset: u64,
    /// Bytes; of all that were merged.
    pub length: u64,
    /// How many requests of a client's, all as long, that follow each other were merged.
    pub requests: u32,
    /// Whether its client had an error.
    pub has_failed: bool,
    /// When it came.
    pub arrived: Instant,
    /// When its limits let it pass.
    pub admitted: Instant,
    /// The limit that it waited for last, if for any.
    pub held: Option<Held>,
    /// When it was answered.
    pub ended: Instant,
}

/// Whether and as what a disk is recorded.
#[derive(Debug, Default)]
pub struct Recorded {
    /// One more than its number; 0 if it is not.
    number: AtomicU32,
    lost: Arc<Lost>,
}

/// Requests of a disk that found no room.
#[derive(Debug, Default)]
pub struct Lost(AtomicU64);

impl Lost {
    /// How many there were since the last time.
    pub fn take(&self) -> u64 {
        self.0.swap(0, Ordering::Relaxed)
    }

    /// So many more.
    pub fn add(&self, requests: u64) {
        self.0.fetch_add(requests, Ordering::Relaxed);
    }
}

impl Recorded {
    /// Records its requests from now on as those of `disk`; `None` ends that.
    ///
    /// # Panics
    /// Where the number is [`u32::MAX`].
    pub fn set(&self, disk: Option<u32>) {
        let number = disk.map_or(0, |disk| disk.checked_add(1).expect("there are fewer disks"));
        self.number.store(number, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Option<u32> {
        self.number.load(Ordering::Relaxed).checked_sub(1)
    }

    /// What of it found no room: to be asked for once [`Collector::take`] says that there is some.
    pub fn lost(&self) -> &Arc<Lost> {
        &self.lost
    }
}

thread_local! {
    static TAP: RefCell<Option<Tap>> = const { RefCell::new(None) };
}

/// The rings of the collector there is; its number, 0 for none.
static COLLECTED: Mutex<Vec<Ring>> = Mutex::new(Vec::new());
static COLLECTOR: AtomicU64 = AtomicU64::new(0);
static IS_THERE_ONE: AtomicBool = AtomicBool::new(false);

/// A thread's end.
struct Tap {
    collector: u64,
    ring: Producer<Finished>,
    has_lost: Arc<AtomicBool>,
}

/// The collector's end.
struct Ring {
    ring: Consumer<Finished>,
    has_lost: Arc<AtomicBool>,
}

/// Tells the collector, if there is one, of a request of the disk that `recorded` is of.
pub fn tell(finished: Finished, recorded: &Recorded) {
    if !IS_THERE_ONE.load(Ordering::Relaxed) {
        return;
    }
    TAP.with_borrow_mut(|tap| {
        let collector = COLLECTOR.load(Ordering::Relaxed);
        if tap.as_ref().is_none_or(|tap| tap.collector != collector) {
            *tap = Some(Tap::new(collector));
        }
        let tap = tap.as_mut().expect("it was made");
        if tap.ring.push(finished).is_err() {
            recorded.lost.add(finished.requests.max(1).into());
            // Whoever sees it sees the count.
            tap.has_lost.store(true, Ordering::Release);
        }
    });
}

impl Tap {
    fn new(collector: u64) -> Self {
        let (ours, ring) = RingBuffer::new(RING);
        let has_lost = Arc::new(AtomicBool::new(false));
        let mut rings = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
        // Another may have begun meanwhile: then this ring is nobody's, and the next request makes
        // another.
        if COLLECTOR.load(Ordering::Relaxed) == collector {
            rings.push(Ring { ring, has_lost: Arc::clone(&has_lost) });
        }
        Self { collector, ring: ours, has_lost }
    }
}

/// Takes what is told, of all threads; there is one at a time in a process.
#[derive(Debug)]
pub struct Collector(());

impl Collector {
    /// `None` while there is another.
    pub fn begin() -> Option<Self> {
        let mut rings = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
        if IS_THERE_ONE.load(Ordering::Relaxed) {
            return None;
        }
        rings.clear();
        COLLECTOR.fetch_add(1, Ordering::Relaxed);
        IS_THERE_ONE.store(true, Ordering::Relaxed);
        Some(Self(()))
    }

    /// Hands over all that was told since the last time, thread by thread; returns whether some
    /// could not be kept since then: of which disk, and how many, each [`Recorded::lost`] tells.
    pub fn take(&mut self, mut each: impl FnMut(&Finished)) -> bool {
        let mut have_lost = false;
        for Ring { ring, has_lost } in COLLECTED.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let ready = ring.slots();
            if let Ok(chunk) = ring.read_chunk(ready) {
                let (first, second) = chunk.as_slices();
                first.iter().chain(second).for_each(&mut each);
                chunk.commit_all();
            }
            have_lost |= has_lost.swap(false, Ordering::Acquire);
        }
        have_lost
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let mut rings = COLLECTED.lock().unwrap_or_else(PoisonError::into_inner);
        IS_THERE_ONE.store(false, Ordering::Relaxed);
        rings.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_finds_no_room_is_counted_for_its_disk_each_request_of_those_that_were_merged() {
        let mut collector = Collector::begin().expect("no other test has one");
        let (full, other) = (Recorded::default(), Recorded::default());
        let merged = Finished {
            disk: 0,
            operation: Operation::Read,
            offset: 0,
            length: 12288,
            requests: 3,
            has_failed: false,
            arrived: Instant::ZERO,
            admitted: Instant::ZERO,
            held: None,
            ended: Instant::ZERO,
        };
        for _ in 0..RING + 5 {
            tell(merged, &full);
        }
        let mut kept = 0;
        assert!(collector.take(|_| kept += 1));
        assert_eq!((kept, full.lost().take(), other.lost().take()), (RING, 15, 0));
        tell(merged, &other);
        assert!(!collector.take(|_| kept += 1));
        assert_eq!((kept, full.lost().take()), (RING + 1, 0));
    }
}
