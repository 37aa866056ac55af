//! Replacement of a disk's image while clients use the disk.
//!
//! ```text
//!   quiesce ─► flush_quiesced ─► switch_image ─► guard dropped: changes continue, in the new image
//!                                     │
//!   reads, flushes ── in flight ──► end on the old image, which they hold
//!                     later ──────► new image
//! ```
//!
//! The new image has the same content at that instant: an overlay over the old image, a copy of it,
//! or the same image with a shorter chain. So a read that is in flight returns the same bytes from
//! either, and prefetched data stays valid.
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
    /// Makes all completed changes durable in the present image, before [`Disk::switch_image`], and
    /// waits for the changes of cancelled requests and for all other work that would change its
    /// files later. Waits for the storage without a timeout: the caller flushes most of it before,
    /// and may drop the future. The image is then settled nonetheless, and its requests wait until
    /// that ends.
    ///
    /// # Errors
    /// The image's error, also if a dirty bitmap cannot be stored, or [`Error::IO`] if an earlier
    /// flush has failed and writes were lost: the disk must not be switched.
    pub async fn flush_quiesced(&self, quiesced: &QuiescedDisk<'_>) -> Result<()> {
        self.check_guard(quiesced);
        let image = self.image.shared();
        let settling = Arc::clone(&image);
        // Detached: if it ended in the middle, requests would be admitted while clusters are being
        // freed, and stored bitmaps would count as consistent while their image changes.
        let settled = reactor::spawn_detached(async move { settling.settle().await });
        settled.await.unwrap_or(Err(Error::SHUTDOWN))?;
        // A change that its client has cancelled is not unflushed data of any client, but it
        // changes the file.
        image.await_changes().await;
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
    /// - all completed changes are durable in `new`: after [`Disk::flush_quiesced`], or after a
    ///   flush of `new` if it is a copy. This does not apply to the same image [over another
    ///   chain](image::qcow2::ExclusiveImage::replace_backing), whose flush covers them;
    /// - the memory of its caches is [reserved](Disk::reserve_memory_for);
    /// - the previous image is not changed while requests, a point in time or an overlay use it,
    ///   except by `new` if it is the same image. It may be closed when it has no other owner any
    ///   more ([`Arc::strong_count`]);
    /// - the disk has no handover, which belongs to the files of the previous image;
    /// - `new` has the cache mode of the disk: clients learn when they connect whether they must
    ///   flush.
    ///
    /// A point in time goes on: its content is that of the previous image.
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

    pub(super) fn check_guard(&self, quiesced: &QuiescedDisk<'_>) {
        assert!(self.copy_before_write.is_closed_by(&quiesced.0), "the guard is that of another disk");
    }
}

#[cfg(test)]
#[path = "switch_tests.rs"]
mod tests;
