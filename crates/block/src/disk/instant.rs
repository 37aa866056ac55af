//! Requests to a disk that never waits (storage in memory), which complete at once when their front
//! end has taken them from the client. Creating, moving and polling futures was a third of such a
//! request's cost.
//!
//! Looking the image up is a considerable part of the rest, so it is done once for a batch. Never
//! executes a request that has to wait for a limit.

use policy::{request::Direction, throttle::RequestCost};

use super::{AdmissionPermit, AdmissionTimes, DetectZeroes, Disk};
use crate::{current_image::BatchImage, recorder::DiskOperation};
use reactor::{error::Result, guest::GuestBytes};

/// A disk for one batch of requests that wait for nothing but limits. See [`Disk::instant`].
#[derive(Debug)]
pub struct InstantDisk<'a> {
    disk: &'a Disk,
    image: BatchImage,
}

impl Disk {
    /// The disk for a batch of requests; `None` if its reads and writes may wait for more than
    /// limits. The caller has taken all requests of the batch from their client before, and drops
    /// the result before it waits.
    pub fn instant(&self) -> Option<InstantDisk<'_>> {
        if self.may_wait()
            || self.prefetch.is_on()
            || self.copy_before_write.is_active()
            || self.detect_zeroes != DetectZeroes::Off
        {
            return None;
        }
        let image = self.image.for_batch();
        image.image().is_instant().then_some(InstantDisk { disk: self, image })
    }
}

impl InstantDisk<'_> {
    /// As [`Disk::admit`], for a batch of requests, without waiting. Calls `on_decision` for each
    /// in order, with a permit if it is admitted and charged, else `None`.
    pub fn try_admit_batch(
        &self,
        requests: impl Iterator<Item = (Direction, RequestCost)>,
        mut on_decision: impl FnMut(Option<AdmissionPermit>),
    ) {
        let times = self.disk.clock().map(AdmissionTimes::at);
        self.disk.member.try_admit_batch(requests, |cost, is_admitted| {
            on_decision(is_admitted.then(|| AdmissionPermit {
                requests: cost.requests(),
                cancel_token: None,
                times,
                lengths: None,
                // The request completes before anything can observe it.
                _in_flight: None,
            }));
        });
    }

    /// As [`Disk::read_to`], synchronously; `None` if the request must be sent to the disk.
    pub fn read(&self, permit: &AdmissionPermit, offset: u64, into: &[GuestBytes]) -> Option<Result<()>> {
        let result = self.image.image().read_now(offset, into)?;
        Some(self.disk.finish_once(DiskOperation::Read, (offset, bytes(into)), permit, result))
    }

    /// As [`Disk::write`], synchronously; `None` if the request must be sent to the disk.
    pub fn write(&self, permit: &AdmissionPermit, offset: u64, from: &[GuestBytes]) -> Option<Result<()>> {
        let disk = self.disk;
        // Another thread may have begun a point in time, or switched the image, since the batch
        // began.
        let _change = disk.copy_before_write.try_enter()?;
        if !disk.image.is_current(&self.image) {
            return None;
        }
        let length = bytes(from);
        // The change begins before the write and ends after it, so that no reader caches old data.
        let change = disk.prefetch.begin_change(offset, length);
        let result = self.image.image().write_now(offset, from);
        disk.prefetch.end_change(change);
        Some(disk.finish_once(DiskOperation::Write, (offset, length), permit, result?))
    }
}

fn bytes(data: &[GuestBytes]) -> u64 {
    data.iter().map(GuestBytes::bytes).sum::<usize>() as u64
}
