//! A bitmap that begins anew at an instant, for a backup of that instant.
//!
//! ```text
//!   marks     earlier ──────┬─ kept ──────────── success: dropped │ failure: added again
//!                           └─ none ── later ─────────────────────┴────────────────────►
//!                        instant                             end of the backup
//! ```
//!
//! The earlier marks are those of the parts that the backup must copy. Until the backup has
//! succeeded they belong to the bitmap: whatever stores it stores both. Nothing is written at the
//! instant: the file has the marks of before or marks the bitmap as in use.
//!
//! Never drops marks without a call that says so.

use std::sync::Arc;

use super::{BitmapError, RecordingBitmap, live::LiveBits};
use reactor::error::Error;

use crate::qcow2::drained::ExclusiveImage;

/// A bitmap that has begun anew. Its drop adds the earlier marks again.
#[derive(Debug)]
pub struct RotatedBitmap {
    bitmap: Arc<RecordingBitmap>,
    earlier: Arc<LiveBits>,
    are_dropped: bool,
}

impl ExclusiveImage<'_> {
    /// Lets a bitmap begin anew without marks.
    ///
    /// # Errors
    /// [`BitmapError`]: the bitmap does not exist or does not record, a backup uses it already, or
    /// the memory budget is exhausted.
    pub fn rotate_bitmap(&self, name: &str) -> Result<RotatedBitmap, BitmapError> {
        if !self.image.has_loaded_bitmaps() {
            return Err(Error::SHUTDOWN.into());
        }
        let bitmap =
            self.image.recorded_bitmap(name).ok_or_else(|| BitmapError::NotFound(name.to_owned()))?;
        let earlier = bitmap.begin_rotation()?;
        Ok(RotatedBitmap { bitmap, earlier, are_dropped: false })
    }
}

impl RotatedBitmap {
    /// Length of the run of bytes, from `at` up to `end`, that were marked before or were not; true
    /// if they were.
    pub fn earlier_run(&self, at: u64, end: u64) -> (u64, bool) {
        self.earlier.run(at, end)
    }

    /// Name of the bitmap, which commands have given as text.
    pub fn name(&self) -> &str {
        std::str::from_utf8(self.bitmap.name()).unwrap_or_default()
    }

    /// Drops the earlier marks: the backup has all of their data, durably.
    pub fn drop_earlier(mut self) {
        self.are_dropped = true;
    }
}

impl Drop for RotatedBitmap {
    fn drop(&mut self) {
        self.bitmap.end_rotation(self.are_dropped);
    }
}
