//! Another size for the disk.
//!
//! Growing needs an L1 table with more entries: a new one is written elsewhere, and the header
//! changes to it in one sector. Shrinking first releases what is behind the new end, and keeps the
//! table. Bitmaps get the size of the disk.

use super::{
    Qcow2, bytes,
    header::{LARGEST_L1, autoclear},
    l1::{L1, padded},
};
use reactor::error::Result;
use storage::{Durability, ResizeError, ZeroOptions};

impl Qcow2 {
    /// Gives the disk another size, a multiple of 512 bytes; what is added reads as zeroes.
    ///
    /// # Errors
    /// [`ResizeError`]; the size is then what it was.
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        if self.is_read_only() {
            return Err(ResizeError::ReadOnly);
        }
        if size_bytes == 0 || !size_bytes.is_multiple_of(512) {
            return Err(ResizeError::Unaligned { multiple: 512 });
        }
        let header = self.file.header();
        let mut largest = (LARGEST_L1 / 8) << (header.cluster_bits + header.l2_bits());
        if header.bitmaps.is_some() {
            largest = largest.min(self.largest_with_bitmaps().await?).max(header.size_bytes);
        }
        if size_bytes > largest {
            return Err(ResizeError::TooLarge { largest });
        }
        if header.snapshots > 0 && header.version < 3 {
            return Err(ResizeError::Snapshots);
        }
        let _quiet = self.quiesce().await?;
        let from = self.size_bytes();
        if size_bytes < from {
            self.shrink(size_bytes, from).await?;
        } else if size_bytes > from {
            self.grow(size_bytes, from).await?;
        }
        Ok(())
    }

    async fn shrink(&self, to: u64, from: u64) -> Result<()> {
        // What is cut off changes before the disk's size does.
        self.begin_recording().await?;
        let first = to.next_multiple_of(1 << self.shape.cluster_bits).min(from);
        let shrunk = self.cut_off(first, to, from).await;
        if shrunk.is_err() {
            // It stays a part of the disk, and is another one by now.
            self.mark_recorded(first, from - first);
        }
        shrunk
    }

    async fn cut_off(&self, first: u64, to: u64, from: u64) -> Result<()> {
        if first < from {
            self.forget(first, from).await?;
            self.refcounts.drop_empty_blocks(&self.file, &self.overlap).await?;
            self.write_everything().await?;
        }
        self.set_size(from, to).await?;
        if let Some(data) = &self.data {
            bytes::set_size(data, to).await?;
        }
        Ok(())
    }

    async fn grow(&self, to: u64, from: u64) -> Result<()> {
        // What a data file has behind the disk's end already stays: it is never cut.
        if let Some(data) = &self.data
            && data.size_bytes() < to
        {
            bytes::set_size(data, to).await?;
        }
        let header = self.file.header();
        let raw = self.data.is_some() && header.autoclear & autoclear::RAW_DATA_FILE != 0;
        let entries = header.l1_entries_for(to);
        if entries > u64::from(header.l1_entries) {
            self.move_l1(entries).await?;
        }
        // What the last cluster and a larger backing file hold behind the old end must not come to
        // light, so it goes before that end does.
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
            // Readers of the raw file see what is in it, so the image says the same: what was there
            // behind the old end, and zeroes where the file has grown.
            self.preallocate_inside(from, to, None).await?;
        }
        self.write_everything().await?;
        self.set_size(from, to).await
    }

    /// Only while quiet.
    async fn set_size(&self, from: u64, to: u64) -> Result<()> {
        // A bitmap whose size is not the disk's keeps QEMU from opening the image, unless it is in
        // use.
        let suspended = self.suspend_bitmaps().await?;
        let changed = self.update_header(|header| header.size_bytes = to).await;
        let size_bytes = if changed.is_ok() { to } else { from };
        self.size.store(size_bytes, std::sync::atomic::Ordering::Release);
        self.resize_bitmaps(from, size_bytes, &suspended).await;
        changed
    }

    /// Writes the L1 table to where it has room for so many entries.
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
            .map_err(|invalid| self.file.found(&invalid))?;
        self.write_metadata(offset, &padded(bytes)).await?;
        self.flush_metadata().await?;
        self.update_header(|header| {
            header.l1_offset = offset;
            header.l1_entries = entries as u32;
        })
        .await?;
        self.replace_l1(table);
        if old_bytes > 0
            && let Err(error) = self.change_refcount(old, old_bytes, -1).await
        {
            tracing::warn!(image = self.description(), "the old L1 table could not be given back: {error}");
        }
        self.flush_metadata().await
    }
}
