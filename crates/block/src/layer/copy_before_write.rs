//! Copy-before-write: keeps the content that a disk had at one instant, while clients change it.
//!
//! ```text
//!   change ─► gate ─► no point in time ───────────────────────────────► image
//!                └──► point in time ─► reads the old data of clusters    │
//!                                      that no copy has yet, keeps it ───┘
//!                                                        │
//!   backup ◄── old data of changed clusters ◄────────────┘
//!          ◄── all other clusters, read from the image
//! ```
//!
//! All changes of an image pass the gate. A point in time begins while no change is in flight, so
//! its content is that of one instant. Without a point in time a change pays for the gate (an
//! atomic increment and decrement on a cache line of its thread, and three loads of lines that are
//! rarely written) and one load of the flag below; reads pay nothing.
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

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use storage::epoch_gate::{EpochGate, ExclusiveGuard, RequestGuard};

pub(crate) use point::{ChangeKind, Saved};
pub use point::{OldData, PointFailure, PointInTime, PointOptions};

/// The gate of a disk's changes, and its point in time if there is one.
#[derive(Debug, Default)]
pub(crate) struct CopyBeforeWrite {
    gate: EpochGate,
    /// True while there is a point in time. Changes only while the gate is closed, or to false.
    is_active: AtomicBool,
    place: Mutex<PointPlace>,
}

/// Place for one point in time.
#[derive(Debug, Default)]
struct PointPlace {
    point: Option<Arc<PointInTime>>,
    /// True while none may begin, because the disk is suspended for another process.
    is_suspended: bool,
}

impl PointPlace {
    fn check(&self) -> Result<(), PointFailure> {
        match self {
            Self { is_suspended: true, .. } => Err(PointFailure::Suspended),
            Self { point: Some(_), .. } => Err(PointFailure::Busy),
            Self { .. } => Ok(()),
        }
    }
}

impl CopyBeforeWrite {
    /// Begins a change that nothing must precede; `None` if there is a point in time, or the gate
    /// is closed.
    pub(crate) fn try_enter(&self) -> Option<RequestGuard<'_>> {
        let guard = self.gate.try_enter()?;
        // After entering: the flag is set only while no change is inside.
        (!self.is_active.load(Ordering::Acquire)).then_some(guard)
    }

    /// Begins a change. The old data of its range must be [saved](PointInTime::save) for the point
    /// in time that is returned.
    pub(crate) async fn enter(&self) -> (RequestGuard<'_>, Option<Arc<PointInTime>>) {
        let guard = self.gate.enter().await;
        let point = self.current();
        (guard, point)
    }

    /// Waits until no change is in flight; later changes wait until the guard is dropped.
    pub(crate) async fn close(&self) -> ExclusiveGuard<'_> {
        self.gate.close().await
    }

    /// True if the guard is of this gate, so that no change is in flight.
    pub(crate) fn is_closed_by(&self, guard: &ExclusiveGuard<'_>) -> bool {
        guard.is_of(&self.gate)
    }

    /// The point in time.
    pub(crate) fn current(&self) -> Option<Arc<PointInTime>> {
        self.lock().point.clone()
    }

    /// True if there is a point in time.
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

    /// Sets the point in time. The gate must be closed.
    ///
    /// # Errors
    /// As [`CopyBeforeWrite::check`].
    pub(crate) fn set(&self, point: Arc<PointInTime>, _: &ExclusiveGuard<'_>) -> Result<(), PointFailure> {
        let mut place = self.lock();
        place.check()?;
        place.point = Some(point);
        self.is_active.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends this point in time; no effect if it has ended.
    pub(crate) fn clear(&self, point: &Arc<PointInTime>) {
        let mut place = self.lock();
        let ended = place.point.take_if(|current| Arc::ptr_eq(current, point));
        if ended.is_some() {
            self.is_active.store(false, Ordering::Release);
        }
        drop(place);
        // Dropped without the lock.
        drop(ended);
    }

    /// True while the disk is suspended for another process.
    pub(crate) fn is_suspended(&self) -> bool {
        self.lock().is_suspended
    }

    /// Prevents that a point in time begins, or permits it again; returns the present one.
    pub(crate) fn suspend(&self, is_suspended: bool) -> Option<Arc<PointInTime>> {
        let mut place = self.lock();
        place.is_suspended = is_suspended;
        place.point.clone()
    }

    fn lock(&self) -> MutexGuard<'_, PointPlace> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
