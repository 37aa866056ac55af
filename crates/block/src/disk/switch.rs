//! Replacement of a disk's image while clients use the disk.
//!
//! ```text
//!   quiesce ─► flush_quiesced ─► switch_image ─► guard dropped: changes continue, in the new image
//!                                     │
//!   reads, flushes ── in flight ──► end on the old image, which they hold
//!                     later ──────► new image
//! ```
//!
//! The new image has the same content at that instant: an overlay over the old image, or a copy of
//! it. So a read that is in flight returns the same bytes from either, and prefetched data stays
//! valid.
//!
//! A flush covers the changes that completed before it was sent. Those made before the switch are
//! durable when the caller switches, those made after it are in the new image: so a flush of the
//! new image covers both, and a flush that is in flight on the old image covers all that it must.
//!
//! Never opens, closes or compares images.

use std::sync::Arc;

use super::{Disk, QuiescedDisk};
use image::Image;
use reactor::error::{Error, Result};

impl Disk {
    /// Makes all completed changes durable in the present image, before [`Disk::switch_image`]. No
    /// later change is unflushed until the guard is dropped. Waits for the storage without a
    /// timeout.
    ///
    /// # Errors
    /// The image's error, or [`Error::IO`] if an earlier flush has failed and writes were lost: the
    /// disk must not be switched.
    pub async fn flush_quiesced(&self, quiesced: &QuiescedDisk<'_>) -> Result<()> {
        self.check_guard(quiesced);
        let image = self.image.get();
        image.flush().await?;
        // A later flush succeeds although the page cache has lost the writes. The new image's
        // storage would hide that.
        if image.storage().has_lost_writes() { Err(Error::IO) } else { Ok(()) }
    }

    /// Replaces the image by `new`, and returns the previous one. Requests in flight end on the
    /// previous image, later ones use `new`.
    ///
    /// The caller guarantees:
    /// - `new` has the size and the content of the disk at this instant, and is as writable;
    /// - all completed changes are durable in `new`: after [`Disk::flush_quiesced`] if it is an
    ///   overlay, after a flush of `new` if it is a copy;
    /// - the memory of its caches is [reserved](Disk::reserve_memory_for);
    /// - the previous image is not changed while requests, a point in time or an overlay use it. It
    ///   may be closed when no other owner of it is left ([`Arc::strong_count`]). Changes that
    ///   clients have cancelled may still be in flight there, until it is not
    ///   [busy](Image::is_busy).
    ///
    /// A point in time goes on: its content is that of the previous image. A disk with handover is
    /// [held](Disk::hold), and the locks of `new` are taken.
    ///
    /// # Panics
    /// Panics if the guard is that of another disk.
    pub fn switch_image(&self, quiesced: &QuiescedDisk<'_>, new: Arc<Image>) -> Arc<Image> {
        self.check_guard(quiesced);
        let old_size = self.size_bytes();
        new.watch_backing();
        let old = self.image.replace(new);
        self.prefetch.follow_image();
        // Equal, unless the image was resized from outside in the meantime.
        self.notify_size(old_size, self.size_bytes());
        old
    }

    fn check_guard(&self, quiesced: &QuiescedDisk<'_>) {
        assert!(self.copy_before_write.is_closed_by(&quiesced.0), "the guard is that of another disk");
    }
}

#[cfg(test)]
#[path = "switch_tests.rs"]
mod tests;
