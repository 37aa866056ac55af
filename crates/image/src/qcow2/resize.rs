//! Changes of the disk's size.
//!
//! Growing needs an L1 table with more entries: a new one is written elsewhere, and one sector of
//! the header switches to it. Shrinking first frees the clusters beyond the new end and keeps the
//! table. Bitmaps are resized with the disk.

use super::{
    Qcow2Image,
    header::{MAX_L1, autoclear},
    l1::{L1, padded},
    metadata_io,
};
use reactor::error::Result;
use storage::{Durability, ResizeError, ZeroOptions};

impl Qcow2Image {
    /// Changes the size of the disk to a multiple of 512 bytes; added bytes read as zeroes.
    ///
    /// # Errors
    /// [`ResizeError`]; the size is then unchanged.
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        if self.is_read_only() {
            return Err(ResizeError::ReadOnly);
        }
        if size_bytes == 0 || !size_bytes.is_multiple_of(512) {
            return Err(ResizeError::Unaligned { multiple: 512 });
        }
        // Before requests wait.
        self.check_size(size_bytes).await?;
        let _quiesced = self.quiesce().await?;
        // A bitmap or a snapshot may have been added meanwhile.
        self.check_size(size_bytes).await?;
        // Read under exclusive access: another resize may have completed meanwhile.
        let from = self.size_bytes();
        if size_bytes < from {
            self.shrink(size_bytes, from).await?;
        } else if size_bytes > from {
            self.grow(size_bytes, from).await?;
        }
        Ok(())
    }

    /// Fails if the image cannot have this size.
    async fn check_size(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        let header = self.file.header();
        let mut largest = (MAX_L1 / 8) << (header.cluster_bits + header.l2_bits());
        if header.bitmaps.is_some() || self.has_recorded_bitmaps() {
            largest = largest.min(self.largest_with_bitmaps().await?).max(header.size_bytes);
        }
        if size_bytes > largest {
            return Err(ResizeError::TooLarge { largest });
        }
        if header.snapshots > 0 && header.version < 3 {
            return Err(ResizeError::SnapshotsWithoutSize);
        }
        Ok(())
    }

    async fn shrink(&self, to: u64, from: u64) -> Result<()> {
        // The bytes that are cut off change before the size does, so dirty bitmaps must record
        // that.
        self.mark_recording_in_use().await?;
        let first = to.next_multiple_of(1 << self.shape.cluster_bits).min(from);
        let shrunk = self.unmap_tail(first, to, from).await;
        if shrunk.is_err() {
            // After a failure the range is still part of the disk, and its content may have
            // changed.
            self.mark_recorded(first, from - first);
        }
        shrunk
    }

    async fn unmap_tail(&self, first: u64, to: u64, from: u64) -> Result<()> {
        if first < from {
            self.unmap_clusters(first, from).await?;
            self.refcounts.drop_empty_blocks(&self.file, &self.overlap).await?;
            self.flush_all_metadata().await?;
        }
        self.set_size(from, to).await?;
        // The header no longer refers to the bytes that are cut off.
        if let Some(data) = &self.data {
            metadata_io::set_size(data, to).await?;
        }
        Ok(())
    }

    async fn grow(&self, to: u64, from: u64) -> Result<()> {
        // A data file that is longer than the disk is never truncated by growing.
        if let Some(data) = &self.data
            && data.size_bytes() < to
        {
            metadata_io::set_size(data, to).await?;
        }
        let header = self.file.header();
        let raw = self.data.is_some() && header.autoclear & autoclear::RAW_DATA_FILE != 0;
        let entries = header.l1_entries_for(to);
        if entries > u64::from(header.l1_entries) {
            self.move_l1(entries).await?;
        }
        // The last cluster, or a larger backing file, may contain old bytes beyond the old end.
        // They must read as zeroes before the end moves.
        let end = if self.backing_bytes(from) > 0 {
            to
        } else {
            to.min(from.next_multiple_of(1 << self.shape.cluster_bits))
        };
        if end > from && !raw {
            let options =
                ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
            self.zero_inside(from, end - from, options).await?;
        }
        if raw {
            // The raw data file is readable without the image, so the mapping must agree with it:
            // old bytes beyond the old end, zeroes where the file grew.
            self.preallocate_inside(from, to, None).await?;
        }
        self.flush_all_metadata().await?;
        self.set_size(from, to).await
    }

    /// Changes the size in the header. Requires that no request is in flight.
    async fn set_size(&self, from: u64, to: u64) -> Result<()> {
        // QEMU refuses to open an image with a bitmap of another size, unless the bitmap is marked
        // in use.
        let suspended = self.suspend_bitmaps().await?;
        let changed = self.update_header(|header| header.size_bytes = to).await;
        let size_bytes = if changed.is_ok() { to } else { from };
        self.size.store(size_bytes, std::sync::atomic::Ordering::Release);
        self.resize_bitmaps(from, size_bytes, &suspended).await;
        changed
    }

    /// Moves the L1 table to an area with space for `entries` entries.
    async fn move_l1(&self, entries: u64) -> Result<()> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let (old, mut bytes) = {
            let l1 = self.l1.load();
            (l1.offset, l1.bytes())
        };
        let old_bytes = bytes.len() as u64;
        bytes.resize(entries as usize * 8, 0);
        let clusters = (bytes.len() as u64).div_ceil(cluster_bytes);
        let offset = self.allocate(clusters).await?;
        let table = L1::parse(offset, &bytes, self.shape, self.file.size_bytes())
            .map_err(|invalid| self.file.report_invalid(&invalid))?;
        self.write_metadata(offset, &padded(bytes)).await?;
        // The new table must be durable before the header refers to it.
        self.flush_metadata().await?;
        self.update_header(|header| {
            header.l1_offset = offset;
            header.l1_entries = entries as u32;
        })
        .await?;
        self.replace_l1(table);
        if old_bytes > 0
            // Only a leak: the header already refers to the new table.
            && let Err(error) = self.change_refcount(old, old_bytes, -1).await
        {
            tracing::warn!(image = self.description(), "the old L1 table could not be freed: {error}");
        }
        self.flush_metadata().await
    }
}
