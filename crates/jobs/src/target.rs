//! Target of a job (`JobTarget`): an image that receives the content of a disk.
//!
//! Zeroes inside of copied data are written as zeroes, which the target can store without
//! allocating space.
//!
//! Never reads the target, and never opens or closes it.

use std::{ops::Range, sync::Arc};

use image::{Image, Qcow2Image};
use reactor::{
    buffer::{Segments, zero},
    error::Error,
};
use storage::{Durability, ZeroOptions};

/// Longest write-zeroes, in bytes.
const ZERO_BYTES: u64 = 64 << 20;
/// Unit in bytes in which zeroes inside of copied data are detected: a block of most file systems.
const ZERO_UNIT: usize = 4096;

/// Target of a job.
#[derive(Clone, Debug)]
pub struct JobTarget {
    /// The image, which is open for writing and has the size that the job requires.
    pub image: Arc<Image>,
    /// True if all of it reads as zeroes at first, because it was just created.
    pub is_zero: bool,
    /// True if it is a qcow2 image whose backing file is not open. Only whole clusters are written.
    pub is_overlay: bool,
    /// True if zeroes may be stored without allocated space.
    pub may_unmap: bool,
}

/// Failure of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// It failed a write.
    #[error("the target cannot be written at offset {offset}: {error}{}", full_remedy(*error))]
    Write {
        /// Offset in bytes.
        offset: u64,
        /// Error of the target.
        error: Error,
    },
    /// It failed a flush.
    #[error("the target cannot be flushed: {error}{}", full_remedy(*error))]
    Flush {
        /// Error of the target.
        error: Error,
    },
}

fn full_remedy(error: Error) -> &'static str {
    if error == Error::NO_SPACE { " (free space, or use another target)" } else { "" }
}

impl JobTarget {
    /// The image, if it is an overlay.
    fn overlay(&self) -> Option<&Qcow2Image> {
        match &*self.image {
            Image::Qcow2(image) if self.is_overlay => Some(image),
            Image::Qcow2(_) | Image::Raw(_) => None,
        }
    }

    /// Unit in bytes in which it is written, at least.
    pub(crate) fn unit_bytes(&self) -> u64 {
        self.overlay().map_or(1, |overlay| overlay.header().cluster_bytes())
    }

    /// Writes `bytes` at `offset`, of which `segments` returns parts without copying them. Zeroes
    /// are skipped in a target that is [zero](JobTarget::is_zero), else written as zeroes. Returns
    /// the number of bytes that were written as data.
    pub(crate) async fn write(
        &self,
        offset: u64,
        bytes: &[u8],
        segments: impl Fn(Range<usize>) -> Segments,
    ) -> Result<u64, TargetError> {
        let unit = ZERO_UNIT.max(self.unit_bytes() as usize);
        let mut copied_bytes = 0;
        for (range, is_data) in zero::runs(bytes, offset, unit, 0) {
            let (start, length) = (offset + range.start as u64, range.len() as u64);
            if is_data {
                let written = self.image.write(start, segments(range), Durability::Cached).await;
                written.map_err(|error| TargetError::Write { offset: start, error })?;
                copied_bytes += length;
            } else if !self.is_zero {
                self.write_zeroes(start..start + length).await?;
            }
        }
        Ok(copied_bytes)
    }

    /// Writes zeroes.
    pub(crate) async fn write_zeroes(&self, range: Range<u64>) -> Result<(), TargetError> {
        let may_unmap = self.may_unmap;
        let options = ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
        let mut offset = range.start;
        while offset < range.end {
            let length = ZERO_BYTES.min(range.end - offset);
            let written = match self.overlay() {
                // An unallocated cluster would show the backing file.
                Some(overlay) => {
                    let end = (offset + length).next_multiple_of(self.unit_bytes());
                    overlay.write_zero_clusters(offset, end.min(self.image.size_bytes()) - offset).await
                }
                None => self.image.write_zeroes(offset, length, options).await,
            };
            written.map_err(|error| TargetError::Write { offset, error })?;
            offset += length;
        }
        Ok(())
    }

    /// Makes everything that was written durable.
    pub(crate) async fn flush(&self) -> Result<(), TargetError> {
        self.image.flush().await.map_err(|error| TargetError::Flush { error })
    }
}
