//! Changes of a disk's content: the gate that they pass, points in time of the content, and the
//! tracking of changes.
//!
//! ```text
//!   write, write-zeroes, discard, shrink ─► begin_change ─► image ─► ChangeGuard is dropped
//!                                               ▲
//!   begin_point_in_time ─┬─► quiesce: the gate is closed, no change is in flight ─► opened
//!   begin_tracking ──────┘
//! ```
//!
//! Every call of an image's method that changes its content is preceded by `begin_change`. Never
//! returns an error to a client: a failure ends the point in time or the tracking.

use std::{ops::Range, sync::Arc};

use policy::{request::Direction, time::Duration};

use super::{AdmissionPermit, Disk};
use crate::{
    current_image::ImageHandle,
    layer::{
        copy_before_write::{
            ChangeKind, ChangeObservers, OldData, PointFailure, PointInTime, PointOptions, Saved,
            TrackedChange,
        },
        throttle::BackgroundMember,
    },
    recorder::DiskOperation,
};
use reactor::error::{Error, Result};
use storage::{
    Extent,
    epoch_gate::{ExclusiveGuard, RequestGuard},
};

/// Timeout of [`Disk::begin_point_in_time`] and [`Disk::begin_tracking`]: clients' changes wait for
/// as long.
pub(super) const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);

/// A change in flight, and the image that it must be made in. The gate is closed while the image is
/// switched, so the image is the current one until the guard is dropped.
pub(super) type ImageChange<'a> = (ChangeGuard<'a>, Arc<ImageHandle>);

/// Guard of a change in flight. If it is dropped before it [ends](ChangeGuard::end), the change was
/// cancelled.
#[derive(Debug)]
pub(super) struct ChangeGuard<'a> {
    /// Dropped before the gate is left, which a mirror waits for. Boxed, since it is rare.
    tracked: Option<Box<TrackedChange>>,
    _inside: RequestGuard<'a>,
}

impl ChangeGuard<'_> {
    /// Ends a change with its result. A part of a change that has failed may still be in flight, as
    /// of a cancelled one.
    pub(super) fn end<T, E>(self, result: std::result::Result<T, E>) -> std::result::Result<T, E> {
        if let (Some(tracked), Ok(_)) = (self.tracked, &result) {
            tracked.end();
        }
        result
    }
}

impl<'a> From<RequestGuard<'a>> for ChangeGuard<'a> {
    fn from(inside: RequestGuard<'a>) -> Self {
        Self { tracked: None, _inside: inside }
    }
}

/// Guard of a disk without changes in flight. Changes wait until it is dropped.
#[derive(Debug)]
pub struct QuiescedDisk<'a>(pub(super) ExclusiveGuard<'a>);

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
    /// changes wait until those in flight have completed, for [`QUIESCE_TIMEOUT`] at most; they do
    /// not wait if it is refused for another reason.
    ///
    /// # Errors
    /// [`PointFailure`]: one exists already, the storage does not answer, another process may have
    /// the image, the disk is too large, or the memory budget is exhausted.
    pub async fn begin_point_in_time(
        self: &Arc<Self>,
        member: Arc<BackgroundMember>,
        options: PointOptions,
    ) -> std::result::Result<DiskPoint, PointFailure> {
        let nothing = async |_: &PointInTime| Ok(());
        self.begin_point_in_time_with(member, options, nothing).await.map(|(point, ())| point)
    }

    /// As [`Disk::begin_point_in_time`]; calls `at_instant` at the instant and returns its result
    /// too. Clients' changes wait for it, for [`QUIESCE_TIMEOUT`] at most; then it is dropped.
    ///
    /// # Errors
    /// As [`Disk::begin_point_in_time`], or the error of `at_instant`.
    pub async fn begin_point_in_time_with<T, E: From<PointFailure>>(
        self: &Arc<Self>,
        member: Arc<BackgroundMember>,
        options: PointOptions,
        at_instant: impl AsyncFnOnce(&PointInTime) -> std::result::Result<T, E>,
    ) -> std::result::Result<(DiskPoint, T), E> {
        // Excludes the release of the image until the point in time is set. Before the gate is
        // closed, the order in which requests enter: a release waits for requests, which may wait
        // for the gate.
        let _guard = self.enter().await.map_err(|_| PointFailure::Released)?;
        self.copy_before_write.check()?;
        let create = || PointInTime::new(&self.image(), Arc::clone(&member), &self.memory, options);
        let mut point = create()?;
        let not_quiet = |_| PointFailure::NotQuiet { timeout_s: QUIESCE_TIMEOUT.as_secs() };
        let quiesced = self.quiesce(QUIESCE_TIMEOUT).await.map_err(not_quiet)?;
        if point.size_bytes() != self.size_bytes() || !point.is_of(&self.image()) {
            // Resized or switched since. The memory of the first one is free for the second one.
            drop(point);
            point = create()?;
        }
        let result = reactor::timeout(QUIESCE_TIMEOUT, at_instant(&point)).await;
        let result = result.unwrap_or_else(|_| Err(not_quiet(Error::TIMED_OUT).into()))?;
        let observers = ChangeObservers { point: Some(Arc::clone(&point)), tracker: None };
        self.copy_before_write.set(observers, &quiesced.0)?;
        Ok((DiskPoint { disk: Arc::clone(self), point }, result))
    }

    /// True if there is a point in time, or changes are tracked: a job is running.
    pub fn has_job(&self) -> bool {
        self.copy_before_write.is_active()
    }

    /// Waits until background work of `bytes` on this disk is admitted, and charges it.
    pub async fn admit_background(&self, member: &BackgroundMember, bytes: u64) -> AdmissionPermit {
        member.admit(&self.member, bytes).await;
        AdmissionPermit::background()
    }

    /// As [`Disk::admit_background`], for work that must not wait, because clients wait for it: the
    /// next work is charged for it as well.
    pub fn charge_background_later(&self, member: &BackgroundMember, bytes: u64) -> AdmissionPermit {
        member.charge_later(bytes);
        AdmissionPermit::background()
    }

    /// Begins a write of `length` bytes at `offset` of the returned image, which ends when the
    /// guard is dropped. Saves their old data first if there is a point in time.
    pub(super) async fn begin_change(&self, offset: u64, length: u64) -> ImageChange<'_> {
        self.begin_change_of(ChangeKind::Write, offset, length).await
    }

    /// As [`Disk::begin_change`], for a change that replaces any amount of data by zeroes or
    /// removes it.
    pub(super) async fn begin_removal(&self, offset: u64, length: u64) -> ImageChange<'_> {
        self.begin_change_of(ChangeKind::Removal, offset, length).await
    }

    async fn begin_change_of(&self, kind: ChangeKind, offset: u64, length: u64) -> ImageChange<'_> {
        let guard = match self.copy_before_write.try_enter() {
            Some(guard) => guard.into(),
            // Boxed: the unusual path must not enlarge the future of every change.
            None => Box::pin(self.save_and_enter(offset..offset.saturating_add(length), kind)).await.0,
        };
        // Inside the gate, which is closed while the image is switched.
        (guard, self.image.get())
    }

    /// As [`Disk::begin_change`], for a change of the allocation that leaves the content as it is.
    pub(super) async fn begin_allocation(&self) -> ImageChange<'_> {
        let (guard, _) = self.copy_before_write.enter().await;
        (guard.into(), self.image.get())
    }

    /// As [`Disk::begin_change`], for a discard. `None` if it must not be executed, because the
    /// buffer has no room for the old data, or too little of it is left for writes.
    pub(super) async fn begin_discard(&self, offset: u64, length: u64) -> Option<ImageChange<'_>> {
        if let Some(guard) = self.copy_before_write.try_enter() {
            return Some((guard.into(), self.image.get()));
        }
        let range = offset..offset.saturating_add(length);
        let (guard, saved) = Box::pin(self.save_and_enter(range, ChangeKind::Discard)).await;
        (saved == Saved::Proceed).then(|| (guard, self.image.get()))
    }

    async fn save_and_enter(&self, range: Range<u64>, kind: ChangeKind) -> (ChangeGuard<'_>, Saved) {
        let (inside, ChangeObservers { point, tracker }) = self.copy_before_write.enter().await;
        let saved = match point {
            Some(point) => point.save(range.clone(), kind).await,
            None => Saved::Proceed,
        };
        let tracked = tracker.map(|tracker| Box::new(TrackedChange::new(tracker, range)));
        (ChangeGuard { tracked, _inside: inside }, saved)
    }

    /// Ends the point in time or the tracking, if there is one, because its content will not be
    /// available.
    pub(super) fn fail_job(&self, failure: PointFailure) {
        self.copy_before_write.current().fail(failure);
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
        // The image is released only when no read is in flight.
        let _guard = self.disk.enter().await.map_err(|_| PointFailure::Released)?;
        // The controller of a latency target on the device sees this load as the disk's.
        let meter = &self.disk.latency_meter;
        let _in_flight = meter.begin(Direction::Read, 1, range.end - range.start);
        let data = self.point.read(range).await?;
        meter.complete(DiskOperation::Read, 1, data.iter().map(OldData::length_bytes).sum());
        Ok(data)
    }

    /// Allocation status of the disk's present content, which is that of the instant for all
    /// clusters that are not saved afterwards.
    ///
    /// # Errors
    /// [`PointFailure`].
    pub async fn block_status(&self, range: Range<u64>) -> std::result::Result<Vec<Extent>, PointFailure> {
        let _guard = self.disk.enter().await.map_err(|_| PointFailure::Released)?;
        self.point.block_status(range).await
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
