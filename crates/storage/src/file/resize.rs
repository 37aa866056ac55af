//! Resizing a file that is being served.
//!
//! The caller ([`Align`](crate::align::Align)) excludes all writes, because a write in flight would
//! extend a file that has just been truncated.

use std::sync::atomic::Ordering::Relaxed;

use super::{FileKind, FileStorage, calls};
use crate::{align::AlignedDevice as _, resize::ResizeError};

impl FileStorage {
    /// See [`Storage::resize`](crate::Storage::resize).
    pub(super) async fn set_size(&self, size_bytes: u64) -> Result<(), ResizeError> {
        if self.kind == FileKind::BlockDevice {
            let actual = self.refresh_size().await?;
            return if actual == size_bytes {
                Ok(())
            } else {
                Err(ResizeError::BlockDevice { size_bytes: actual })
            };
        }
        if self.read_only() {
            return Err(ResizeError::ReadOnly);
        }
        let largest = i64::MAX as u64;
        let size = i64::try_from(size_bytes).map_err(|_| ResizeError::TooLarge { largest })?;
        let old = self.size_bytes();
        if !old.is_multiple_of(self.alignment.offset) {
            // The unaligned tail went through the page cache. With another size it may be read with
            // O_DIRECT, so it must reach the device first.
            self.sync_file().await?;
        }
        if size_bytes < old {
            // Before truncating, so that no new request reads there.
            self.size_bytes.store(size_bytes, Relaxed);
        }
        if !size_bytes.is_multiple_of(self.page_bytes) || !old.is_multiple_of(self.page_bytes) {
            // The file system zeroes the rest of the last page, old or new, in the page cache.
            self.syncs.used_page_cache();
        }
        match self.isolation.call(&self.changing_buffered, move |fd| calls::truncate(fd, size)).await {
            Ok(()) => {
                self.size_bytes.store(size_bytes, Relaxed);
                Ok(())
            }
            Err(error) => {
                self.size_bytes.store(old, Relaxed);
                Err(error.into())
            }
        }
    }
}
