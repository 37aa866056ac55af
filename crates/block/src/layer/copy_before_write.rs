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
//! its content is that of one instant. Without a point in time a change pays for the gate (two
//! atomic operations on a cache line of its thread) and one load; reads pay nothing.
//!
//! A change that a client has cancelled may take effect after the instant. The client never
//! received a reply, so either content is valid, as after a crash.
//!
//! Never delays a change for anything except the read of its old data, and never fails it: if the
//! old data cannot be read, or the buffer is full, the point in time fails.

mod clusters;
mod point;

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use storage::epoch_gate::{EpochGate, ExclusiveGuard, RequestGuard};

pub use point::{OldData, PointFailure, PointInTime, PointOptions};
pub(crate) use point::{OnFullBuffer, Saved};

/// The gate of a disk's changes, and its point in time if there is one.
#[derive(Debug, Default)]
pub(crate) struct CopyBeforeWrite {
    gate: EpochGate,
    /// True while there is a point in time. Changes only while the gate is closed, or to false.
    is_active: AtomicBool,
    point: Mutex<Option<Arc<PointInTime>>>,
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
        let point = self.lock().clone();
        (guard, point)
    }

    /// Waits until no change is in flight; later changes wait until the guard is dropped.
    pub(crate) async fn close(&self) -> ExclusiveGuard<'_> {
        self.gate.close().await
    }

    /// The point in time.
    pub(crate) fn current(&self) -> Option<Arc<PointInTime>> {
        self.lock().clone()
    }

    /// True if there is a point in time.
    pub(crate) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }

    /// Sets the point in time. The gate must be closed.
    pub(crate) fn set(&self, point: Arc<PointInTime>, _closed: &ExclusiveGuard<'_>) {
        let mut current = self.lock();
        *current = Some(point);
        self.is_active.store(true, Ordering::Release);
    }

    /// Ends this point in time; no effect if it has ended.
    pub(crate) fn clear(&self, point: &Arc<PointInTime>) {
        let mut current = self.lock();
        let ended = current.take_if(|current| Arc::ptr_eq(current, point));
        if ended.is_some() {
            self.is_active.store(false, Ordering::Release);
        }
        drop(current);
        // Dropped without the lock.
        drop(ended);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<PointInTime>>> {
        self.point.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
