//! Changes of a disk's content: the gate that they pass, and points in time of the content.
//!
//! ```text
//!   write, write-zeroes, discard, shrink ─► begin_change ─► image
//!                                               ▲
//!   begin_point_in_time ─► quiesce: the gate is closed, no change is in flight ─► opened
//! ```
//!
//! Every call of an image's method that changes its content is preceded by `begin_change`. Never
//! returns an error to a client: a failure ends the point in time.

use std::{ops::Range, sync::Arc};

use policy::time::Duration;

use super::{AdmissionPermit, Disk};
use crate::layer::{
    copy_before_write::{OldData, OnFullBuffer, PointFailure, PointInTime, PointOptions, Saved},
    throttle::BackgroundMember,
};
use reactor::error::{Error, Result};
use storage::epoch_gate::{ExclusiveGuard, RequestGuard};

/// Timeout of [`Disk::begin_point_in_time`]: clients' changes wait for as long.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);

/// Guard of a disk without changes in flight. Changes wait until it is dropped.
#[derive(Debug)]
pub struct QuiescedDisk<'a>(ExclusiveGuard<'a>);

/// A point in time of a disk, which [ends](DiskPoint::end) when it is dropped at the latest.
#[derive(Debug)]
pub struct DiskPoint {
    disk: Arc<Disk>,
    point: Arc<PointInTime>,
}

impl Disk {
    /// Waits until no change of the content is in flight, for `timeout` at most; later changes wait
    /// until the guard is dropped. Reads and flushes continue. A change that its client has
    /// cancelled may still take effect.
    ///
    /// # Errors
    /// [`Error::TIMED_OUT`].
    pub async fn quiesce(&self, timeout: Duration) -> Result<QuiescedDisk<'_>> {
        let closed = reactor::timeout(timeout, self.copy_before_write.close()).await;
        closed.map(QuiescedDisk).map_err(|_| Error::TIMED_OUT)
    }

    /// Begins a point in time of the present content; its I/O is charged to `member`. Clients'
    /// changes wait until those in flight have completed, for [`QUIESCE_TIMEOUT`] at most.
    ///
    /// # Errors
    /// [`PointFailure`]: one exists already, the storage does not answer, another process may have
    /// the image, the disk is too large, or the memory budget is exhausted.
    pub async fn begin_point_in_time(
        self: &Arc<Self>,
        member: Arc<BackgroundMember>,
        options: PointOptions,
    ) -> std::result::Result<DiskPoint, PointFailure> {
        // Checked first, so that clients do not wait in vain, and again when no other can begin.
        if self.has_point_in_time() {
            return Err(PointFailure::Busy);
        }
        let not_quiet = |_| PointFailure::NotQuiet { timeout_s: QUIESCE_TIMEOUT.as_secs() };
        let quiesced = self.quiesce(QUIESCE_TIMEOUT).await.map_err(not_quiet)?;
        // Excludes the release of the image until the point in time is set.
        let _guard = self.enter().await.map_err(|_| PointFailure::Released)?;
        if self.has_point_in_time() {
            return Err(PointFailure::Busy);
        }
        let point = PointInTime::new(&self.image, member, &self.memory, options)?;
        self.copy_before_write.set(Arc::clone(&point), &quiesced.0);
        Ok(DiskPoint { disk: Arc::clone(self), point })
    }

    /// True if there is a point in time: a backup is running.
    pub fn has_point_in_time(&self) -> bool {
        self.copy_before_write.is_active()
    }

    /// Waits until background work of `bytes` on this disk is admitted, and charges it.
    pub async fn admit_background(&self, member: &BackgroundMember, bytes: u64) -> AdmissionPermit {
        member.admit(&self.member, bytes).await;
        // Not recorded and not measured: it is no request of a client.
        AdmissionPermit { requests: 1, cancel_token: None, times: None, lengths: None, _in_flight: None }
    }

    /// Begins a change of `length` bytes at `offset`, which ends when the guard is dropped. Saves
    /// their old data first if there is a point in time.
    pub(super) async fn begin_change(&self, offset: u64, length: u64) -> RequestGuard<'_> {
        match self.copy_before_write.try_enter() {
            Some(guard) => guard,
            // Boxed: the unusual path must not enlarge the future of every change.
            None => {
                Box::pin(self.save_and_enter(offset..offset.saturating_add(length), OnFullBuffer::FailPoint))
                    .await
                    .0
            }
        }
    }

    /// As [`Disk::begin_change`], for a discard. `None` if it must not be executed, because the
    /// buffer has no room for the old data.
    pub(super) async fn begin_discard(&self, offset: u64, length: u64) -> Option<RequestGuard<'_>> {
        if let Some(guard) = self.copy_before_write.try_enter() {
            return Some(guard);
        }
        let range = offset..offset.saturating_add(length);
        let (guard, saved) = Box::pin(self.save_and_enter(range, OnFullBuffer::SkipChange)).await;
        (saved == Saved::Proceed).then_some(guard)
    }

    async fn save_and_enter(&self, range: Range<u64>, on_full: OnFullBuffer) -> (RequestGuard<'_>, Saved) {
        let (guard, point) = self.copy_before_write.enter().await;
        let saved = match point {
            Some(point) => point.save(range, on_full).await,
            None => Saved::Proceed,
        };
        (guard, saved)
    }

    /// Ends the point in time, if there is one, because its content will not be available.
    pub(super) fn fail_point_in_time(&self, failure: PointFailure) {
        if let Some(point) = self.copy_before_write.current() {
            point.fail(failure);
        }
    }
}

impl DiskPoint {
    /// The disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The point in time.
    pub fn point(&self) -> &Arc<PointInTime> {
        &self.point
    }

    /// Ends the point in time. A second call has no effect.
    pub fn end(&self) {
        // Also ends the waits of changes that are about to save old data.
        self.point.fail(PointFailure::Closed);
        self.disk.copy_before_write.clear(&self.point);
    }

    /// Reads those clusters of `range` that must still be copied and that no other task reads. The
    /// permit is one of [`Disk::admit_background`].
    ///
    /// # Errors
    /// [`PointFailure`], which has ended the point in time.
    pub async fn read(
        &self,
        _: AdmissionPermit,
        range: Range<u64>,
    ) -> std::result::Result<Vec<OldData>, PointFailure> {
        self.point.read(range).await
    }
}

impl Drop for DiskPoint {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
#[path = "changes_tests.rs"]
mod tests;
