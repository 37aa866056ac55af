//! Tracking of a disk's changes, for a job that keeps a copy equal to the disk.
//!
//! Never writes to the copy: see `jobs::mirror`.

use std::{ops::Range, sync::Arc};

use policy::request::Direction;

use super::{AdmissionPermit, Disk, QuiescedDisk, changes::QUIESCE_TIMEOUT};
use crate::{
    layer::copy_before_write::{ChangeObservers, PointFailure, TrackerOptions, WriteTracker},
    recorder::DiskOperation,
};
use image::Image;
use reactor::{buffer::FrozenBuffer, error::Error};
use storage::Extent;

/// A disk whose changes are tracked, until this [ends](TrackedDisk::end) or is dropped.
#[derive(Debug)]
pub struct TrackedDisk {
    disk: Arc<Disk>,
    tracker: Arc<WriteTracker>,
}

impl Disk {
    /// Begins to track changes; at first, the copy has nothing. Clients' changes wait as for
    /// [`Disk::begin_point_in_time`].
    ///
    /// # Errors
    /// [`PointFailure`]: a job is running already, the storage does not answer, another process may
    /// have the image, the disk is too large, or the memory budget is exhausted.
    pub async fn begin_tracking(
        self: &Arc<Self>,
        options: TrackerOptions,
    ) -> Result<TrackedDisk, PointFailure> {
        // As for a point in time: excludes the release of the image, before the gate is closed.
        let _guard = self.enter().await.map_err(|_| PointFailure::Released)?;
        self.copy_before_write.check()?;
        let tracker = WriteTracker::new(self.size_bytes(), self.memory.budget(), options)?;
        let not_quiet = |_| PointFailure::NotQuiet { timeout_s: QUIESCE_TIMEOUT.as_secs() };
        let quiesced = self.quiesce(QUIESCE_TIMEOUT).await.map_err(not_quiet)?;
        let unseen = reactor::timeout(QUIESCE_TIMEOUT, self.await_cancelled()).await;
        unseen.map_err(|_| not_quiet(Error::TIMED_OUT))?;
        if tracker.size_bytes() != self.size_bytes() {
            return Err(PointFailure::Resized);
        }
        let observers = ChangeObservers { point: None, tracker: Some(Arc::clone(&tracker)) };
        self.copy_before_write.set(observers, &quiesced.0)?;
        Ok(TrackedDisk { disk: Arc::clone(self), tracker })
    }

    /// Waits until no operation of a change that was cancelled before is in flight: it would take
    /// effect unseen. No change may be in flight.
    async fn await_cancelled(&self) {
        let image = self.image();
        if let Image::Qcow2(qcow2) = &*image {
            // An operation of the format may consist of several of the file.
            drop(qcow2.drain().await);
        }
        image.await_changes().await;
    }

    /// Ends the tracking, if there is one.
    pub(super) fn fail_tracking(&self, failure: PointFailure) {
        if let Some(tracker) = self.copy_before_write.current().tracker {
            tracker.fail(failure);
        }
    }
}

impl TrackedDisk {
    /// The disk.
    pub fn disk(&self) -> &Arc<Disk> {
        &self.disk
    }

    /// The tracker.
    pub fn tracker(&self) -> &Arc<WriteTracker> {
        &self.tracker
    }

    /// Waits until no operation of a change that was cancelled is in flight. The future may be
    /// dropped, to wait for a limited time; reads wait meanwhile if the format has to be drained.
    ///
    /// # Panics
    /// Panics if the guard is that of another disk.
    pub async fn await_cancelled(&self, quiesced: &QuiescedDisk<'_>) {
        self.disk.check_guard(quiesced);
        self.disk.await_cancelled().await;
    }

    /// Ends the tracking. A second call has no effect.
    pub fn end(&self) {
        self.tracker.fail(PointFailure::Closed);
        self.disk.copy_before_write.clear_tracker(&self.tracker);
    }

    /// Reads a range into one buffer, as background work; `None` if it reads as zeroes. The permit
    /// is one of [`Disk::admit_background`] or [`Disk::charge_background_later`].
    ///
    /// # Errors
    /// [`PointFailure::Read`], [`PointFailure::Released`].
    pub async fn read(
        &self,
        _: AdmissionPermit,
        range: Range<u64>,
    ) -> Result<Option<FrozenBuffer>, PointFailure> {
        let length_bytes = self.check(&range)?;
        // The image is released only when no read is in flight.
        let _guard = self.disk.enter().await.map_err(|_| PointFailure::Released)?;
        // The controller of a latency target on the device sees this load as the disk's.
        let meter = &self.disk.latency_meter;
        let _in_flight = meter.begin(Direction::Read, 1, length_bytes);
        let image = self.disk.image.get();
        let data = reactor::in_background(image.read(range.start, length_bytes as usize)).await;
        let data = data.map_err(|error| PointFailure::Read { offset: range.start, error })?;
        meter.complete(DiskOperation::Read, 1, length_bytes);
        Ok(if data.is_zero() { None } else { Some(data.joined().freeze()) })
    }

    /// Allocation status of the disk.
    ///
    /// # Errors
    /// [`PointFailure::Read`], [`PointFailure::Released`].
    pub async fn block_status(&self, range: Range<u64>) -> Result<Vec<Extent>, PointFailure> {
        let length_bytes = self.check(&range)?;
        let _guard = self.disk.enter().await.map_err(|_| PointFailure::Released)?;
        let image = self.disk.image.get();
        let status = image.block_status(range.start, length_bytes).await;
        status.map_err(|error| PointFailure::Read { offset: range.start, error })
    }

    /// Length of a range, which must lie inside the image: it may have been truncated.
    fn check(&self, range: &Range<u64>) -> Result<u64, PointFailure> {
        match range.end <= self.disk.size_bytes() {
            true => Ok(range.end - range.start),
            false => Err(PointFailure::Read { offset: range.start, error: Error::INVALID }),
        }
    }
}

impl Drop for TrackedDisk {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
#[path = "tracking_tests.rs"]
mod tests;
