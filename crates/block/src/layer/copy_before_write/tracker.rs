//! A write tracker of a disk (`WriteTracker`): the clusters that a copy of the disk lacks, while
//! clients change it and a job copies.
//!
//! ```text
//!   change ─► gate ─► image ─► mark: unsaved ─► gate is left ─► reply to the client
//!   job ────► claim: saved, and claimed ─► read ─► write to the target ─► done: free
//! ```
//!
//! All clusters are unsaved at first. A change marks its clusters after it has taken effect and
//! before its client receives the reply. A claim makes clusters saved before they are read, so a
//! change during the copy marks them again: they are copied again afterwards. A claimed cluster
//! waits until its copy has finished, so older data never overwrites newer data in the target.
//!
//! So if the gate is closed, and no cluster is unsaved or claimed, the target equals the disk,
//! except for changes that were cancelled or have failed: these may take effect later. Their
//! clusters are noted, and are copied once more after all of them have taken effect. Otherwise a
//! client could read the content after such a change, and after the switch the content before it.
//!
//! Never reads or writes an image, and never makes a change wait or fail.

use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use event_listener::Event;

use super::{
    clusters::ClusterStates,
    point::{MAX_CLUSTERS, PointFailure},
};
use reactor::memory::{MemoryBudget, MemoryReservation};

/// Sizes and memory of a write tracker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrackerOptions {
    /// Size of a cluster in bytes, a power of two: the unit in which changes are marked.
    pub cluster_bytes: u64,
    /// Memory in bytes for the data that the job has in flight.
    pub copy_bytes: u64,
}

/// A write tracker. See the head of this file.
#[derive(Debug)]
pub struct WriteTracker {
    size_bytes: u64,
    cluster_bytes: u64,
    state: Mutex<TrackerState>,
    /// Notified after each change of the state.
    changed: Event,
    _memory: MemoryReservation,
}

#[derive(Debug)]
struct TrackerState {
    clusters: ClusterStates,
    /// Saved: they were copied at least once.
    visited: ClusterStates,
    /// Unsaved: changes of them that were cancelled or have failed may take effect later.
    settled: ClusterStates,
    failure: Option<PointFailure>,
}

/// Clusters that a task copies. They are unsaved again if this is dropped before it is
/// [done](DirtyClusters::done).
#[derive(Debug)]
pub struct DirtyClusters {
    tracker: Arc<WriteTracker>,
    clusters: Range<u64>,
    is_first: bool,
    is_done: bool,
}

/// A change in flight, whose drop marks its range.
#[derive(Debug)]
pub(crate) struct TrackedChange {
    tracker: Arc<WriteTracker>,
    range: Range<u64>,
    has_succeeded: bool,
}

impl TrackedChange {
    pub(crate) fn new(tracker: Arc<WriteTracker>, range: Range<u64>) -> Self {
        Self { tracker, range, has_succeeded: false }
    }

    /// The change has succeeded. Otherwise it has failed or was cancelled.
    pub(crate) fn end(mut self) {
        self.has_succeeded = true;
    }
}

impl Drop for TrackedChange {
    fn drop(&mut self) {
        // A failed or cancelled change may have taken effect in part.
        self.tracker.mark(&self.range, self.has_succeeded);
    }
}

impl WriteTracker {
    /// Creates a tracker for a disk of `size_bytes`; all clusters are unsaved.
    ///
    /// # Errors
    /// [`PointFailure::TooLarge`], [`PointFailure::Memory`].
    pub(crate) fn new(
        size_bytes: u64,
        budget: &Arc<MemoryBudget>,
        options: TrackerOptions,
    ) -> Result<Arc<Self>, PointFailure> {
        let TrackerOptions { cluster_bytes, copy_bytes } = options;
        let count = size_bytes.div_ceil(cluster_bytes);
        if count > MAX_CLUSTERS {
            return Err(PointFailure::TooLarge { max_bytes: MAX_CLUSTERS.saturating_mul(cluster_bytes) });
        }
        let bytes = 3 * ClusterStates::memory_bytes(count) + copy_bytes;
        let memory = MemoryReservation::new(budget, "the buffers of a mirror", bytes)?;
        Ok(Arc::new(Self {
            size_bytes,
            cluster_bytes,
            state: Mutex::new(TrackerState {
                clusters: ClusterStates::new(count),
                visited: ClusterStates::new(count),
                settled: ClusterStates::all_saved(count),
                failure: None,
            }),
            changed: Event::new(),
            _memory: memory,
        }))
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes of clusters that the target lacks, because they are unsaved or a task copies them. A
    /// cluster that was changed during its copy counts twice.
    pub fn missing_bytes(&self) -> u64 {
        let state = self.lock();
        let count = state.clusters.unsaved() + state.clusters.claimed();
        drop(state);
        count.saturating_mul(self.cluster_bytes).min(self.size_bytes)
    }

    /// Bytes of clusters that were never copied.
    pub fn unvisited_bytes(&self) -> u64 {
        self.lock().visited.unsaved().saturating_mul(self.cluster_bytes).min(self.size_bytes)
    }

    /// Claims the first unsaved clusters from `from` on, or from the start if there are none: at
    /// most `max_bytes` (but at least one cluster), which either were all copied before, or none.
    pub fn claim(self: &Arc<Self>, from: u64, max_bytes: u64) -> Option<DirtyClusters> {
        let mut state = self.lock();
        if state.clusters.unsaved() == 0 {
            // Without a search, since each change of a client wakes a task that claims.
            return None;
        }
        let (first, count) = (from / self.cluster_bytes, state.clusters.count());
        let found = state.clusters.first_free(first..count).or_else(|| state.clusters.first_free(0..first));
        let mut run = found?;
        run.end = run.end.min(run.start + (max_bytes / self.cluster_bytes).max(1));
        let unvisited = state.visited.first_free(run.clone());
        let is_first = unvisited.as_ref().is_some_and(|unvisited| unvisited.start == run.start);
        if let Some(unvisited) = unvisited {
            run.end = if is_first { unvisited.end } else { unvisited.start };
        }
        state.clusters.claim(run.clone());
        state.clusters.save(run.clone());
        Some(DirtyClusters { tracker: Arc::clone(self), clusters: run, is_first, is_done: false })
    }

    /// Marks the clusters of a range of bytes as changed; the part beyond the size has none. If the
    /// change has not succeeded, they are marked [again](WriteTracker::mark_cancelled) later.
    fn mark(&self, range: &Range<u64>, has_succeeded: bool) {
        let end = range.end.min(self.size_bytes).div_ceil(self.cluster_bytes);
        let start = range.start / self.cluster_bytes;
        if start < end {
            let mut state = self.lock();
            state.clusters.unsave(start..end);
            if !has_succeeded {
                state.settled.unsave(start..end);
            }
            drop(state);
            self.changed.notify(usize::MAX);
        }
    }

    /// Marks the clusters of cancelled changes again. No operation of such a change may be in
    /// flight: see [`TrackedDisk::await_cancelled`](crate::disk::TrackedDisk::await_cancelled).
    pub fn mark_cancelled(&self) {
        let mut state = self.lock();
        if state.settled.unsaved() == 0 {
            return;
        }
        let count = state.clusters.count();
        while let Some(run) = state.settled.first_free(0..count) {
            state.settled.save(run.clone());
            state.clusters.unsave(run);
        }
        drop(state);
        self.changed.notify(usize::MAX);
    }

    /// Ends it: the waits of the job end with this failure.
    pub(crate) fn fail(&self, failure: PointFailure) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify(usize::MAX);
    }

    /// Checks that it has not ended.
    ///
    /// # Errors
    /// [`PointFailure`], which has ended the tracker.
    pub fn check(&self) -> Result<(), PointFailure> {
        self.lock().failure.map_or(Ok(()), Err)
    }

    /// Waits until the state has changed in any way since `seen` returned a value that the caller
    /// cannot use.
    ///
    /// # Errors
    /// [`PointFailure`], which has ended the tracker.
    pub async fn wait_for<T>(&self, seen: impl Fn() -> Option<T>) -> Result<T, PointFailure> {
        loop {
            let listener = self.changed.listen();
            if let Some(failure) = self.lock().failure {
                return Err(failure);
            }
            if let Some(value) = seen() {
                return Ok(value);
            }
            listener.await;
        }
    }

    fn bytes_of(&self, clusters: &Range<u64>) -> Range<u64> {
        clusters.start * self.cluster_bytes..(clusters.end * self.cluster_bytes).min(self.size_bytes)
    }

    fn lock(&self) -> MutexGuard<'_, TrackerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DirtyClusters {
    /// Their bytes.
    pub fn bytes(&self) -> Range<u64> {
        self.tracker.bytes_of(&self.clusters)
    }

    /// True if none of them was copied before.
    pub fn is_first(&self) -> bool {
        self.is_first
    }

    /// Gives up all but the clusters that begin before `bytes` from the start, at least one.
    pub fn narrow(&mut self, bytes: u64) {
        let count = bytes.div_ceil(self.tracker.cluster_bytes).max(1);
        let end = self.clusters.end.min(self.clusters.start + count);
        if end < self.clusters.end {
            let mut state = self.tracker.lock();
            state.clusters.narrow(&self.clusters, end);
            state.clusters.unsave(end..self.clusters.end);
            drop(state);
            self.clusters.end = end;
            self.tracker.changed.notify(usize::MAX);
        }
    }

    /// The target has them.
    pub fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for DirtyClusters {
    fn drop(&mut self) {
        let mut state = self.tracker.lock();
        if !self.is_done {
            state.clusters.unsave(self.clusters.clone());
        } else if self.is_first {
            state.visited.save(self.clusters.clone());
        }
        state.clusters.narrow(&self.clusters, self.clusters.start);
        drop(state);
        self.tracker.changed.notify(usize::MAX);
    }
}
