//! The chain of backing files of a disk in use: what a job needs to shorten it.
//!
//! The content stays the same at every instant. So this work passes no gate of changes, saves no
//! old data and invalidates nothing that was read ahead.

use image::{Image, qcow2::Populated};
use policy::request::Direction;

use super::{AdmissionPermit, Disk};
use crate::recorder::DiskOperation;
use reactor::error::{Error, Result};

impl Disk {
    /// Copies what `length` bytes at `offset` read from the images between the disk's image and
    /// `base`, or from all images below it, into its image: see
    /// [`Qcow2Image::populate`](image::Qcow2Image::populate). The permit is one of
    /// [`Disk::admit_background`].
    ///
    /// # Errors
    /// The image's error; [`Error::UNSUPPORTED`] if the image has no backing files.
    pub async fn populate(
        &self,
        _: AdmissionPermit,
        offset: u64,
        length: u64,
        base: Option<&Image>,
    ) -> Result<Populated> {
        // The image is released only when no work is in flight.
        let _guard = self.enter().await?;
        // The controller of a latency target on the device sees this load as the disk's.
        let meter = &self.latency_meter;
        let _in_flight = meter.begin(Direction::Read, 1, length);
        let image = self.image.get();
        let Image::Qcow2(qcow2) = &**image else { return Err(Error::UNSUPPORTED) };
        let populated = qcow2.populate(offset, length, base).await?;
        meter.complete(DiskOperation::Read, 1, populated.copied_bytes);
        Ok(populated)
    }
}
