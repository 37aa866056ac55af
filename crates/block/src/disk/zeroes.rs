//! Detection of writes that contain only zeroes. They are written as zeroes, which an image can
//! store without allocating space.

use super::{AdmissionPermit, Discards, Disk, DiskOperation};
use reactor::error::Result;
use storage::{Durability, ZeroOptions};

/// Detection of zeroes in writes: QEMU's `detect-zeroes` (`BlockdevOptions` in its
/// qapi/block-core.json).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DetectZeroes {
    /// No detection.
    #[default]
    Off,
    /// A write of zeroes becomes a write-zeroes.
    On,
    /// As [`DetectZeroes::On`], and the storage may deallocate the space.
    Unmap,
}

impl DetectZeroes {
    /// All values.
    pub const ALL: [Self; 3] = [Self::Off, Self::On, Self::Unmap];

    /// Name in options and config.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Unmap => "unmap",
        }
    }
}

impl Disk {
    /// True if a write-zeroes may deallocate, given the request's flag.
    pub(super) fn may_unmap(&self, is_requested: bool) -> bool {
        is_requested && self.discards == Discards::Unmap
    }

    /// Writes data that was found to be zeroes. If a guest changes its memory after the check,
    /// either content is valid.
    pub(super) async fn write_detected_zeroes(
        &self,
        permit: &AdmissionPermit,
        range: (u64, u64),
        durability: Durability,
    ) -> Result<()> {
        let may_unmap = self.may_unmap(self.detect_zeroes == DetectZeroes::Unmap);
        let options = ZeroOptions { may_unmap, only_if_fast: false, durability };
        // Counted and reported as a write, which the client sent.
        self.zero(DiskOperation::Write, permit, range, options).await
    }

    /// Makes a range read as zeroes.
    pub(super) async fn zero(
        &self,
        operation: DiskOperation,
        permit: &AdmissionPermit,
        (offset, length): (u64, u64),
        options: ZeroOptions,
    ) -> Result<()> {
        let zero = async || {
            let (change, image) = match operation {
                // As long as a write.
                DiskOperation::Write => self.begin_change(offset, length).await,
                _ => self.begin_removal(offset, length).await,
            };
            change
                .end(self.prefetch.change(offset, length, image.write_zeroes(offset, length, options)).await)
        };
        self.run_until_done(operation, (offset, length), permit, zero).await
    }
}
