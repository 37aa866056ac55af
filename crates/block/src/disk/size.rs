//! Size of a disk: changes by its clients and by the daemon, and changes of its image from outside.
//!
//! Never reads beyond a new end: each change of the size invalidates what was read ahead.

use std::sync::atomic::Ordering::Relaxed;

use super::{AdmissionPermit, Disk};
use crate::layer::copy_before_write::PointFailure;
use reactor::error::Result;
use storage::ResizeError;

impl Disk {
    /// Resizes the disk: see [`Image::resize`](image::Image::resize).
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        let _guard = self.enter().await?;
        // A shrink changes everything beyond the new end.
        let (_change, image) = self.begin_removal(size_bytes, u64::MAX).await;
        let old = self.size_bytes();
        // Before the change: one that fails or is cancelled may have changed a part.
        self.size_changes.fetch_add(1, Relaxed);
        // Invalidates everything: the image may have been truncated from outside too, unnoticed.
        self.prefetch.change(0, u64::MAX, image.resize(size_bytes)).await?;
        self.follow_size();
        if size_bytes != old {
            self.fail_tracking(PointFailure::Resized);
            self.resized.notify(usize::MAX);
        }
        // Rate-limited: a client of an export as a file may resize it at any rate.
        if size_bytes < old
            && let Some(suppressed) = self.shrink_log.try_log(reactor::coarse_now())
        {
            tracing::warn!(
                disk = %self.name,
                old,
                new = size_bytes,
                suppressed,
                "the disk was truncated: data beyond its new end is lost"
            );
        }
        Ok(())
    }

    /// Number of changes of the size that have begun since the disk was created, successful or not.
    pub fn size_changes(&self) -> u64 {
        self.size_changes.load(Relaxed)
    }

    /// Reserves space for a range, which may lie past the end: see
    /// [`Image::reserve`](image::Image::reserve).
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`](reactor::error::Error::NOT_PERMITTED) on a read-only disk, or the
    /// image's error.
    pub async fn reserve(&self, _: AdmissionPermit, offset: u64, length: u64) -> Result<()> {
        self.check_writable()?;
        let _guard = self.enter().await?;
        let (_change, image) = self.begin_allocation().await;
        image.reserve(offset, length).await
    }

    /// Checks whether the image was resized from outside; returns its size in bytes.
    ///
    /// # Errors
    /// The storage does not report its size.
    pub async fn refresh_size(&self) -> Result<u64> {
        let old_size = self.size_bytes();
        let size_bytes = self.image.get().refresh_size().await?;
        self.compare_size(old_size, size_bytes);
        Ok(size_bytes)
    }

    /// As [`Disk::refresh_size`], after a notification of the storage; also notifies clients.
    ///
    /// # Errors
    /// The size cannot be read.
    pub async fn poll_size(&self) -> Result<u64> {
        let old_size = self.size_bytes();
        let size_bytes = self.image.get().probe_size().await?;
        self.notify_size(old_size, size_bytes);
        Ok(size_bytes)
    }

    pub(super) fn notify_size(&self, old_size: u64, size_bytes: u64) {
        self.compare_size(old_size, size_bytes);
        if size_bytes != old_size {
            self.resized.notify(usize::MAX);
        }
    }

    fn compare_size(&self, old_size: u64, size_bytes: u64) {
        if size_bytes != old_size {
            tracing::warn!(
                disk = %self.name,
                old = old_size,
                new = size_bytes,
                "the size of the image was changed from outside: new clients see the new size"
            );
            self.prefetch.invalidate_all();
            self.size_changes.fetch_add(1, Relaxed);
            self.fail_tracking(PointFailure::Resized);
        }
        // Also without a difference: a resize that was cancelled may have changed the size before.
        self.follow_size();
    }

    /// Puts the limits for the present size in force. Reads the size itself, so that concurrent
    /// resizes end with the limits of the last one.
    pub(super) fn follow_size(&self) {
        // Rate-limited: a client of an export as a file may resize it at any rate.
        if let Err(error) = self.member.set_size(|| self.size_bytes())
            && let Some(suppressed) = self.shrink_log.try_log(reactor::coarse_now())
        {
            tracing::warn!(
                disk = %self.name,
                suppressed,
                "the limits for each GiB stay those of the previous size: {error}"
            );
        }
    }
}
