//! Copy-before-write: keeps the content that a disk had at one instant, while clients change it.
//! And write tracking, which passes the same gate: marks what clients change, for a copy that
//! follows.
//!
//! ```text
//!   change ─► gate ─► no point in time ───────────────────────────────► image
//!                └──► point in time ─► reads the old data of clusters    │
//!                                      that no copy has yet, keeps it ───┘
//!                                                        │
//!   backup ◄── old data of changed clusters ◄────────────┘
//!          ◄── all other clusters, read from the image
//!
//!   change ─► gate ─► image ─► write tracker marks its clusters ─► gate is left
//!   mirror ◄── marked clusters, read from the image
//! ```
//!
//! All changes of an image pass the gate. A point in time begins while no change is in flight, so
//! its content is that of one instant. Without a job a change pays for the gate (an atomic
//! increment and decrement on a cache line of its thread, and three loads of lines that are rarely
//! written) and one load of the flag below; reads pay nothing. A write tracker uses the same gate
//! and flag.
//!
//! A change that a client has cancelled may take effect after the instant. The client never
//! received a reply, so either content is valid, as after a crash.
//!
//! A change waits for reads of its old data, by itself or by another task that copies the same
//! clusters, and for the begin of a point in time, which waits until earlier changes have
//! completed. It never waits for the target of a backup, for limits, or for room in the buffer.
//!
//! Never fails a change: if its old data cannot be read, is too large, or finds no room in the
//! buffer, the point in time fails.

mod clusters;
mod point;
mod tracker;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use storage::epoch_gate::{EpochGate, ExclusiveGuard, RequestGuard};

pub(crate) use point::{ChangeKind, Saved};
pub use point::{OldData, PointFailure, PointInTime, PointOptions};
pub(crate) use tracker::TrackedChange;
pub use tracker::{DirtyClusters, TrackerOptions, WriteTracker};

/// The gate of a disk's changes, and what must see them: its point in time and its write tracker,
/// if there are any.
#[derive(Debug, Default)]
pub(crate) struct CopyBeforeWrite {
    gate: EpochGate,
    /// True while there is an observer. Changes only while the gate is closed, or to false.
    is_active: AtomicBool,
    place: Mutex<ObserverPlace>,
}

/// Observers of the changes of a disk, which belong to its job.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChangeObservers {
    /// Keeps the content from before the changes.
    pub(crate) point: Option<Arc<PointInTime>>,
    /// Marks what was changed.
    pub(crate) tracker: Option<Arc<WriteTracker>>,
}

impl ChangeObservers {
    fn is_empty(&self) -> bool {
        self.point.is_none() && self.tracker.is_none()
    }

    /// Ends them, because the content of the disk will not be available.
    pub(crate) fn fail(&self, failure: PointFailure) {
        if let Some(point) = &self.point {
            point.fail(failure);
        }
        if let Some(tracker) = &self.tracker {
            tracker.fail(failure);
        }
    }
}

/// Place for the observers of one job.
#[derive(Debug, Default)]
struct ObserverPlace {
    observers: ChangeObservers,
    /// True while none may begin, because the disk is suspended for another process.
    is_suspended: bool,
}

impl ObserverPlace {
    fn check(&self) -> Result<(), PointFailure> {
        match self {
            Self { is_suspended: true, .. } => Err(PointFailure::Suspended),
            Self { observers, .. } if !observers.is_empty() => Err(PointFailure::Busy),
            Self { .. } => Ok(()),
        }
    }
}

impl CopyBeforeWrite {
    /// Begins a change that nothing observes; `None` if there is an observer, or the gate is
    /// closed.
    pub(crate) fn try_enter(&self) -> Option<RequestGuard<'_>> {
        let guard = self.gate.try_enter()?;
        // After entering: the flag is set only while no change is inside.
        (!self.is_active.load(Ordering::Acquire)).then_some(guard)
    }

    /// Begins a change. The old data of its range must be [saved](PointInTime::save) for the point
    /// in time that is returned, and the tracker must [mark](WriteTracker::mark) the range before
    /// the guard is dropped.
    pub(crate) async fn enter(&self) -> (RequestGuard<'_>, ChangeObservers) {
        let guard = self.gate.enter().await;
        let observers = self.current();
        (guard, observers)
    }

    /// Waits until no change is in flight; later changes wait until the guard is dropped.
    pub(crate) async fn close(&self) -> ExclusiveGuard<'_> {
        self.gate.close().await
    }

    /// True if the guard is of this gate, so that no change is in flight.
    pub(crate) fn is_closed_by(&self, guard: &ExclusiveGuard<'_>) -> bool {
        guard.is_of(&self.gate)
    }

    /// The observers.
    pub(crate) fn current(&self) -> ChangeObservers {
        self.lock().observers.clone()
    }

    /// True if there is an observer.
    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }

    /// Checks that [`CopyBeforeWrite::set`] would succeed now.
    ///
    /// # Errors
    /// [`PointFailure::Busy`], [`PointFailure::Suspended`].
    pub(crate) fn check(&self) -> Result<(), PointFailure> {
        self.lock().check()
    }

    /// Sets the observers of a job. The gate must be closed.
    ///
    /// # Errors
    /// As [`CopyBeforeWrite::check`].
    pub(crate) fn set(&self, observers: ChangeObservers, _: &ExclusiveGuard<'_>) -> Result<(), PointFailure> {
        let mut place = self.lock();
        place.check()?;
        place.observers = observers;
        self.is_active.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends this point in time; no effect if it has ended.
    pub(crate) fn clear(&self, point: &Arc<PointInTime>) {
        self.clear_if(|observers| {
            observers.point.as_ref().is_some_and(|current| Arc::ptr_eq(current, point))
        });
    }

    /// True while the disk is suspended for another process.
    pub(crate) fn is_suspended(&self) -> bool {
        self.lock().is_suspended
    }

    /// Ends this write tracker; no effect if it has ended.
    pub(crate) fn clear_tracker(&self, tracker: &Arc<WriteTracker>) {
        self.clear_if(|observers| {
            observers.tracker.as_ref().is_some_and(|current| Arc::ptr_eq(current, tracker))
        });
    }

    /// Removes the observers of a job.
    fn clear_if(&self, is_of_job: impl FnOnce(&ChangeObservers) -> bool) {
        let mut place = self.lock();
        if is_of_job(&place.observers) {
            let ended = std::mem::take(&mut place.observers);
            self.is_active.store(false, Ordering::Release);
            drop(place);
            // Dropped without the lock.
            drop(ended);
        }
    }

    /// Prevents that observers begin, or permits it again; returns the present ones.
    pub(crate) fn suspend(&self, is_suspended: bool) -> ChangeObservers {
        let mut place = self.lock();
        place.is_suspended = is_suspended;
        place.observers.clone()
    }

    fn lock(&self) -> MutexGuard<'_, ObserverPlace> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
