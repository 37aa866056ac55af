//! A point in time of a disk (`PointInTime`): the clusters whose content a job still needs, and the
//! old data of those that clients have changed since.
//!
//! ```text
//!   client's change ─► save ─► reads a cluster ─► buffer ─► next_old_data ─► job
//!   job ─────────────► read ─► reads clusters that no change has saved ────► job
//!                      skip_zeroes: clusters that read as zeroes
//! ```
//!
//! A cluster is read once, by a change or by the job. A task claims the clusters that it reads;
//! changes of them wait until it has finished. The content of a cluster that is not saved is that
//! of the instant, so its allocation status is too.
//!
//! The buffer has a bound. If a change does not find room in it, the point in time fails and the
//! change proceeds. A discard, which is a hint, is not executed instead; discards fill a part of
//! the buffer only ([`DISCARD_PARTS`]), so that the next write finds room. A large write-zeroes or
//! shrink would wait until all of its old data is read, one read after the other, so it fails the
//! point in time too ([`REMOVAL_PARTS`]).
//!
//! Never writes to the image.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use event_listener::{Event, EventListener};

use super::clusters::{ClusterStates, FirstUnsaved};
use crate::layer::throttle::BackgroundMember;
use image::Image;
use reactor::{
    buffer::{FrozenBuffer, IoBuffer, Segments},
    error::Error,
    memory::{MemoryAccount, MemoryReservation, OutOfBudget},
};
use storage::Extent;

/// Longest read of old data, in bytes: the time that a change waits for one.
const MAX_SAVE_BYTES: u64 = 1 << 20;
/// Length in bytes from which on a change queries the allocation status first: such a change is a
/// write-zeroes or a discard, and holes need no copy.
const MIN_QUERY_BYTES: u64 = 1 << 20;
/// Longest range of one query of the allocation status, in bytes.
const MAX_QUERY_BYTES: u64 = 1 << 30;
/// Memory in bytes that an entry without data is charged, so that their number is bounded as well.
const ENTRY_BYTES: u64 = 256;
/// Divisor of the buffer for the part that discards may fill: one quarter.
const DISCARD_PARTS: u64 = 4;
/// Divisor of the buffer for the old data that is read for one write-zeroes or shrink: one half.
/// By default these are 32 MiB, which a hard disk reads in less than a second.
const REMOVAL_PARTS: u64 = 2;
/// Largest number of clusters: 64 TiB in clusters of 64 KiB, whose states need 128 MiB.
pub(super) const MAX_CLUSTERS: u64 = 1 << 30;

/// Size and memory of a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PointOptions {
    /// Size of a cluster in bytes, a power of two: the unit in which old data is copied.
    pub cluster_bytes: u64,
    /// Bound of the buffer for old data, in bytes. A write that exceeds it fails the point in time;
    /// so does a write-zeroes or shrink that exceeds it, or that replaces more data than one half
    /// of it. A discard that exceeds one quarter of it is not executed.
    pub max_buffer_bytes: u64,
    /// Memory in bytes for data that the job itself has in flight.
    pub copy_bytes: u64,
}

/// Reason why a point in time or a write tracker has ended, or cannot begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PointFailure {
    /// The disk's own image failed a read.
    #[error("the disk cannot be read at offset {offset}: {error}")]
    Read {
        /// Offset of the read in bytes.
        offset: u64,
        /// Error of the image.
        error: Error,
    },
    /// The job is slower than the clients' changes.
    #[error(
        "the clients changed data faster than its old content could be written to the target: the \
         buffer of {} MiB is full (use a faster target, or a time with fewer writes)",
        max_buffer_bytes >> 20
    )]
    BufferFull {
        /// Bound of the buffer in bytes.
        max_buffer_bytes: u64,
    },
    /// One change replaces more data than can be read before it.
    #[error(
        "a client zeroed or cut off more than {} MiB of data at once, which cannot be kept (repeat \
         the backup)",
        max_bytes >> 20
    )]
    LargeRemoval {
        /// Largest amount of data of one change, in bytes.
        max_bytes: u64,
    },
    /// The disk has too many clusters.
    #[error("the disk is larger than {} TiB, which one job can copy", max_bytes >> 40)]
    TooLarge {
        /// Largest size in bytes.
        max_bytes: u64,
    },
    /// The budget has no memory for it.
    #[error(transparent)]
    Memory(#[from] OutOfBudget),
    /// There is one already.
    #[error("another job of the disk is running (`weir jobs` lists it)")]
    Busy,
    /// Another process has the image.
    #[error("no client uses the disk, so its image is free for another process")]
    Released,
    /// The image passes to another process.
    #[error("the image was passed to another process")]
    HandedOver,
    /// The disk is suspended for another process.
    #[error("the disk is being passed to another process (try again when that has finished)")]
    Suspended,
    /// Requests in flight did not complete in time.
    #[error("requests in flight did not complete within {timeout_s} s: the storage does not answer")]
    NotQuiet {
        /// Time in seconds.
        timeout_s: u64,
    },
    /// The size of the disk has changed, which a write tracker does not follow.
    #[error("the disk was resized (start again)")]
    Resized,
    /// The disk was closed, or the owner of the point in time has ended it.
    #[error("the disk was closed")]
    Closed,
}

/// A point in time. See the head of this file.
#[derive(Debug)]
pub struct PointInTime {
    image: Arc<Image>,
    size_bytes: u64,
    cluster_bytes: u64,
    max_buffer_bytes: u64,
    member: Arc<BackgroundMember>,
    state: Mutex<PointState>,
    /// Notified after each change of the state.
    changed: Event,
    _memory: MemoryReservation,
}

#[derive(Debug)]
struct PointState {
    clusters: ClusterStates,
    old_data: VecDeque<BufferedData>,
    /// Bytes in the buffer: read, queued, or in flight to the target.
    buffered_bytes: u64,
    failure: Option<PointFailure>,
}

#[derive(Debug)]
struct BufferedData {
    bytes: Range<u64>,
    /// `None` for zeroes.
    data: Option<FrozenBuffer>,
    charged_bytes: u64,
}

/// Old content of a range. Occupies the buffer until it is dropped.
#[derive(Debug)]
pub struct OldData {
    point: Arc<PointInTime>,
    bytes: Range<u64>,
    data: Option<Arc<FrozenBuffer>>,
    charged_bytes: u64,
}

/// Kind of a change: the amount of old data that it may save, and what happens beyond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeKind {
    /// A write, which is as long as a request can be. The point in time fails.
    Write,
    /// A write-zeroes or a shrink, which may be as large as the disk. The point in time fails.
    Removal,
    /// A discard. It is a hint, and is not executed.
    Discard,
}

/// Result of [`PointInTime::save`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saved {
    /// The change can be executed.
    Proceed,
    /// The change must not be executed: its old data is not saved.
    Skip,
}

/// Clusters that a task reads; free again if it is dropped before they are saved.
struct ClusterClaim {
    point: Arc<PointInTime>,
    clusters: Range<u64>,
    charged_bytes: u64,
}

enum NextSave {
    Done,
    Wait(EventListener),
    Read(ClusterClaim),
}

impl PointInTime {
    /// Creates a point in time of the present content of `image`. Its I/O is charged to `member`.
    ///
    /// # Errors
    /// [`PointFailure::TooLarge`], [`PointFailure::Memory`].
    pub(crate) fn new(
        image: &Arc<Image>,
        member: Arc<BackgroundMember>,
        memory: &MemoryAccount,
        options: PointOptions,
    ) -> Result<Arc<Self>, PointFailure> {
        let PointOptions { cluster_bytes, max_buffer_bytes, copy_bytes } = options;
        let size_bytes = image.size_bytes();
        let count = size_bytes.div_ceil(cluster_bytes);
        if count > MAX_CLUSTERS {
            return Err(PointFailure::TooLarge { max_bytes: MAX_CLUSTERS.saturating_mul(cluster_bytes) });
        }
        let bytes = ClusterStates::memory_bytes(count) + max_buffer_bytes + copy_bytes;
        let memory = MemoryReservation::new(memory.budget(), "the buffers of a backup", bytes)?;
        Ok(Arc::new(Self {
            image: Arc::clone(image),
            size_bytes,
            cluster_bytes,
            max_buffer_bytes,
            member,
            state: Mutex::new(PointState {
                clusters: ClusterStates::new(count),
                old_data: VecDeque::new(),
                buffered_bytes: 0,
                failure: None,
            }),
            changed: Event::new(),
            _memory: memory,
        }))
    }

    /// Selects the clusters that a job needs: `run` returns, for a range of bytes, the length of
    /// its first part that is needed or not, and true if it is needed. The others count as saved.
    /// Must precede all other calls.
    ///
    /// Changes of clients wait for it, so its cost is bounded: two calls of `run` at most for each
    /// cluster, of which only a bitmap that marks every second cluster needs as many; a long run is
    /// one call, and one step for each 64 clusters.
    pub fn select(&self, run: impl Fn(u64, u64) -> (u64, bool)) {
        let mut state = self.lock();
        let mut at = 0;
        while at < self.size_bytes {
            let (length, is_needed) = run(at, self.size_bytes);
            let unneeded = match is_needed {
                true => 0..0,
                false => self.clusters_inside(&(at..at + length)),
            };
            if !unneeded.is_empty() {
                state.clusters.save(unneeded);
            }
            at += length;
            if is_needed {
                // A needed part needs its whole cluster, however fine the rest of it is.
                at = at.next_multiple_of(self.cluster_bytes);
            }
        }
    }

    /// Size of the disk at the instant, in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Size of a cluster in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    /// Member of the throttle tree that its I/O is charged to.
    pub fn member(&self) -> &Arc<BackgroundMember> {
        &self.member
    }

    /// Bytes in the buffer for old data.
    pub fn buffered_bytes(&self) -> u64 {
        self.lock().buffered_bytes
    }

    /// True if it is a point in time of this image.
    pub(crate) fn is_of(&self, image: &Arc<Image>) -> bool {
        Arc::ptr_eq(&self.image, image)
    }

    /// Ends it: later reads fail, and changes need not save anything.
    pub(crate) fn fail(&self, failure: PointFailure) {
        let mut state = self.lock();
        state.failure.get_or_insert(failure);
        let dropped = std::mem::take(&mut state.old_data);
        state.buffered_bytes -= dropped.iter().map(|entry| entry.charged_bytes).sum::<u64>();
        drop(state);
        drop(dropped);
        self.changed.notify(usize::MAX);
    }

    /// Saves the old data of `range`, before a change of it. Waits only for reads of the image.
    pub(crate) async fn save(self: &Arc<Self>, range: Range<u64>, kind: ChangeKind) -> Saved {
        let exceeded = |failure| match kind {
            ChangeKind::Discard => Saved::Skip,
            ChangeKind::Write | ChangeKind::Removal => {
                self.fail(failure);
                Saved::Proceed
            }
        };
        let buffer_full = PointFailure::BufferFull { max_buffer_bytes: self.max_buffer_bytes };
        let (max_buffered_bytes, max_bytes) = self.bounds(kind);
        let clusters = range.start / self.cluster_bytes..range.end.div_ceil(self.cluster_bytes);
        let mut read_bytes = 0;
        loop {
            let mut claim = match self.next_save(&clusters) {
                NextSave::Done => return Saved::Proceed,
                NextSave::Wait(listener) => {
                    listener.await;
                    continue;
                }
                NextSave::Read(claim) => claim,
            };
            if claim.length_bytes() >= MIN_QUERY_BYTES {
                let zeroes = self.zero_clusters(&claim).await;
                claim.narrow(if zeroes > 0 { zeroes } else { self.clusters_in(MAX_SAVE_BYTES) });
                if zeroes > 0 {
                    if !claim.charge(ENTRY_BYTES, max_buffered_bytes) {
                        return exceeded(buffer_full);
                    }
                    claim.keep(None);
                    continue;
                }
            }
            let length_bytes = claim.length_bytes();
            read_bytes += length_bytes;
            if read_bytes > max_bytes {
                return exceeded(PointFailure::LargeRemoval { max_bytes });
            }
            if !claim.charge(length_bytes.max(ENTRY_BYTES), max_buffered_bytes) {
                return exceeded(buffer_full);
            }
            match claim.read(&self.image).await {
                Ok(data) => {
                    self.member.charge_later(length_bytes);
                    claim.keep(data);
                }
                Err(failure) => {
                    self.fail(failure);
                    return Saved::Proceed;
                }
            }
        }
    }

    /// Most bytes in the buffer after a change has saved its old data, and most bytes that it
    /// reads.
    fn bounds(&self, kind: ChangeKind) -> (u64, u64) {
        let max_buffer_bytes = self.max_buffer_bytes;
        match kind {
            ChangeKind::Write => (max_buffer_bytes, u64::MAX),
            // A cluster is read whole, even for a change of a single byte.
            ChangeKind::Removal => {
                (max_buffer_bytes, (max_buffer_bytes / REMOVAL_PARTS).max(2 * self.cluster_bytes))
            }
            ChangeKind::Discard => {
                let part_bytes = max_buffer_bytes / DISCARD_PARTS;
                (part_bytes, part_bytes)
            }
        }
    }

    fn next_save(self: &Arc<Self>, clusters: &Range<u64>) -> NextSave {
        let mut state = self.lock();
        if state.failure.is_some() {
            return NextSave::Done;
        }
        match state.clusters.first_unsaved(clusters.clone()) {
            FirstUnsaved::None => NextSave::Done,
            // Under the lock, so that the end of the claim is not missed.
            FirstUnsaved::Claimed(_) => NextSave::Wait(self.changed.listen()),
            FirstUnsaved::Free(run) => {
                let end = run.end.min(run.start + self.clusters_in(MAX_QUERY_BYTES));
                NextSave::Read(self.claim(&mut state, run.start..end))
            }
        }
    }

    fn claim(self: &Arc<Self>, state: &mut PointState, clusters: Range<u64>) -> ClusterClaim {
        state.clusters.claim(clusters.clone());
        ClusterClaim { point: Arc::clone(self), clusters, charged_bytes: 0 }
    }

    /// Number of clusters in `bytes`, at least one.
    fn clusters_in(&self, bytes: u64) -> u64 {
        (bytes / self.cluster_bytes).max(1)
    }

    /// Number of clusters at the beginning of a claim that read as zeroes, as far as the image's
    /// allocation status shows.
    async fn zero_clusters(&self, claim: &ClusterClaim) -> u64 {
        let bytes = claim.bytes();
        // An error shows up when the data is read.
        let Ok(extents) = self.image.block_status(bytes.start, bytes.end - bytes.start).await else {
            return 0;
        };
        let zeroes: u64 = extents.iter().take_while(|extent| extent.zero).map(|extent| extent.length).sum();
        match bytes.start + zeroes {
            end if end >= bytes.end => claim.clusters.end - claim.clusters.start,
            end => end / self.cluster_bytes - claim.clusters.start,
        }
    }

    fn bytes_of(&self, clusters: &Range<u64>) -> Range<u64> {
        clusters.start * self.cluster_bytes..(clusters.end * self.cluster_bytes).min(self.size_bytes)
    }

    /// Bytes of the clusters that lie wholly in a range of bytes.
    pub fn whole_clusters(&self, bytes: &Range<u64>) -> Range<u64> {
        self.bytes_of(&self.clusters_inside(bytes))
    }

    /// Clusters that lie wholly in a range of bytes; the last cluster may exceed the disk.
    fn clusters_inside(&self, bytes: &Range<u64>) -> Range<u64> {
        let end = if bytes.end >= self.size_bytes {
            self.size_bytes.div_ceil(self.cluster_bytes)
        } else {
            bytes.end / self.cluster_bytes
        };
        let start = bytes.start.div_ceil(self.cluster_bytes);
        start..end.max(start)
    }

    /// Bytes of clusters that are not saved, claimed ones included.
    pub fn unsaved_bytes(&self) -> u64 {
        let state = self.lock();
        let (count, unsaved) = (state.clusters.count(), state.clusters.unsaved());
        let has_last = count > 0 && state.clusters.first_unsaved(count - 1..count) != FirstUnsaved::None;
        let excess_bytes = if has_last { count * self.cluster_bytes - self.size_bytes } else { 0 };
        unsaved * self.cluster_bytes - excess_bytes
    }

    /// The first bytes from `from` on, at most `max_bytes`, that must still be copied and that no
    /// task reads.
    pub fn next_unsaved(&self, from: u64, max_bytes: u64) -> Option<Range<u64>> {
        let state = self.lock();
        let run = state.clusters.first_free(from / self.cluster_bytes..state.clusters.count())?;
        drop(state);
        let end = run.end.min(run.start + self.clusters_in(max_bytes));
        Some(self.bytes_of(&(run.start..end)))
    }

    /// See [`DiskPoint::block_status`](crate::disk::DiskPoint::block_status).
    pub(crate) async fn block_status(&self, range: Range<u64>) -> Result<Vec<Extent>, PointFailure> {
        if let Some(failure) = self.lock().failure {
            return Err(failure);
        }
        let status = self.image.block_status(range.start, range.end - range.start).await;
        let failure = |error| PointFailure::Read { offset: range.start, error };
        // If it has ended, that is the reason.
        status.map_err(|error| self.lock().failure.unwrap_or(failure(error)))
    }

    /// Marks the clusters that lie wholly in `range`, which reads as zeroes, as saved. Returns the
    /// bytes that this concerns, without those that another task has saved or reads.
    pub fn skip_zeroes(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut clusters = self.clusters_inside(range);
        let mut state = self.lock();
        let mut skipped = Vec::new();
        while let Some(run) = state.clusters.first_free(clusters.clone()) {
            state.clusters.save(run.clone());
            clusters.start = run.end;
            skipped.push(self.bytes_of(&run));
        }
        drop(state);
        self.changed.notify(usize::MAX);
        skipped
    }

    /// Reads those clusters of `range` that are not saved and that no other task reads. The permit
    /// is one of [`BackgroundMember`]'s owner: see [`Disk::admit_background`].
    ///
    /// [`Disk::admit_background`]: crate::disk::Disk::admit_background
    ///
    /// # Errors
    /// [`PointFailure`], which has ended the point in time.
    pub(crate) async fn read(self: &Arc<Self>, range: Range<u64>) -> Result<Vec<OldData>, PointFailure> {
        let mut clusters = range.start / self.cluster_bytes..range.end.div_ceil(self.cluster_bytes);
        let mut pieces = Vec::new();
        loop {
            let claim = {
                let mut state = self.lock();
                if let Some(failure) = state.failure {
                    return Err(failure);
                }
                let Some(run) = state.clusters.first_free(clusters.clone()) else { return Ok(pieces) };
                clusters.start = run.end;
                self.claim(&mut state, run)
            };
            match reactor::in_background(claim.read(&self.image)).await {
                Ok(data) => pieces.push(claim.take(data)),
                Err(failure) => {
                    self.fail(failure);
                    return Err(failure);
                }
            }
        }
    }

    /// Waits for old data that a change has saved. `None` after the last: all clusters are saved.
    ///
    /// # Errors
    /// [`PointFailure`], which has ended the point in time.
    pub async fn next_old_data(self: &Arc<Self>) -> Result<Option<OldData>, PointFailure> {
        loop {
            let listener = {
                let mut state = self.lock();
                if let Some(failure) = state.failure {
                    return Err(failure);
                }
                if let Some(BufferedData { bytes, data, charged_bytes }) = state.old_data.pop_front() {
                    let data = data.map(Arc::new);
                    return Ok(Some(OldData { point: Arc::clone(self), bytes, data, charged_bytes }));
                }
                if state.clusters.unsaved() == 0 {
                    return Ok(None);
                }
                self.changed.listen()
            };
            listener.await;
        }
    }

    /// Waits until the state has changed in any way since `seen` returned a value that the caller
    /// cannot use.
    ///
    /// # Errors
    /// [`PointFailure`], which has ended the point in time.
    pub async fn wait_for<T>(&self, seen: impl Fn(&Self) -> Option<T>) -> Result<T, PointFailure> {
        loop {
            let listener = self.changed.listen();
            if let Some(failure) = self.lock().failure {
                return Err(failure);
            }
            if let Some(value) = seen(self) {
                return Ok(value);
            }
            listener.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, PointState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClusterClaim {
    fn bytes(&self) -> Range<u64> {
        self.point.bytes_of(&self.clusters)
    }

    fn length_bytes(&self) -> u64 {
        let bytes = self.bytes();
        bytes.end - bytes.start
    }

    /// Gives up all but the first `count` clusters.
    fn narrow(&mut self, count: u64) {
        let end = self.clusters.end.min(self.clusters.start + count);
        if end < self.clusters.end {
            self.point.lock().clusters.narrow(&self.clusters, end);
            self.clusters.end = end;
            self.point.changed.notify(usize::MAX);
        }
    }

    /// Reserves room in the buffer; false if it would hold more than `max_buffered_bytes`.
    fn charge(&mut self, bytes: u64, max_buffered_bytes: u64) -> bool {
        let mut state = self.point.lock();
        let fits = bytes <= max_buffered_bytes.saturating_sub(state.buffered_bytes);
        if fits {
            state.buffered_bytes += bytes;
            self.charged_bytes += bytes;
        }
        fits
    }

    /// Reads the clusters; `None` if they are zeroes.
    async fn read(&self, image: &Image) -> Result<Option<FrozenBuffer>, PointFailure> {
        let bytes = self.bytes();
        let failure = |error| PointFailure::Read { offset: bytes.start, error };
        // The image may have been truncated from outside.
        if bytes.end > image.size_bytes() {
            return Err(failure(Error::INVALID));
        }
        let data = image.read(bytes.start, (bytes.end - bytes.start) as usize).await.map_err(failure)?;
        Ok(if data.is_zero() { None } else { Some(data.joined().freeze()) })
    }

    /// Marks the clusters as saved, and keeps their content for the job.
    fn keep(mut self, data: Option<FrozenBuffer>) {
        let (bytes, mut charged_bytes) = (self.bytes(), std::mem::take(&mut self.charged_bytes));
        let mut state = self.point.lock();
        if data.is_none() {
            // Zeroes occupy no memory, so they leave room for data.
            state.buffered_bytes -= charged_bytes - ENTRY_BYTES;
            charged_bytes = ENTRY_BYTES;
        }
        if state.failure.is_some() {
            // The job has ended: the content is not needed.
            state.buffered_bytes -= charged_bytes;
        } else {
            state.old_data.push_back(BufferedData { bytes, data, charged_bytes });
        }
        self.save(&mut state);
    }

    /// Marks the clusters as saved, and returns their content.
    fn take(self, data: Option<FrozenBuffer>) -> OldData {
        let (point, bytes) = (Arc::clone(&self.point), self.bytes());
        self.save(&mut point.lock());
        OldData { point: Arc::clone(&point), bytes, data: data.map(Arc::new), charged_bytes: 0 }
    }

    fn save(&self, state: &mut PointState) {
        state.clusters.save(self.clusters.clone());
    }
}

impl Drop for ClusterClaim {
    fn drop(&mut self) {
        let mut state = self.point.lock();
        state.clusters.narrow(&self.clusters, self.clusters.start);
        state.buffered_bytes -= self.charged_bytes;
        drop(state);
        self.point.changed.notify(usize::MAX);
    }
}

impl OldData {
    /// Offset in bytes.
    pub fn offset(&self) -> u64 {
        self.bytes.start
    }

    /// Length in bytes.
    pub fn length_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// The bytes; `None` if all are zeroes.
    pub fn data(&self) -> Option<&[u8]> {
        self.data.as_ref().map(|data| &***data)
    }

    /// A part of the bytes, for a write. Shares their memory.
    pub fn segments(&self, range: Range<usize>) -> Segments {
        let Some(data) = &self.data else { return IoBuffer::zeroed(range.len()).into() };
        let mut view = IoBuffer::view_of_frozen(data);
        view.advance(range.start);
        view.truncate(range.len());
        view.into()
    }
}

impl Drop for OldData {
    fn drop(&mut self) {
        self.point.lock().buffered_bytes -= self.charged_bytes;
        self.point.changed.notify(usize::MAX);
    }
}
