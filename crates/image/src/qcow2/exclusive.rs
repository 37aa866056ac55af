//! Changes of the whole image: exclusive access, writing all metadata, and parts that several of
//! them share.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::Ordering::{Acquire, Release},
    },
};

use super::{
    Qcow2Image, bitmap::BitmapError, drained::ExclusiveImage, header::Qcow2Header, l1::L1,
    refcounts::FreedContent,
};
use reactor::error::{Error, Result};

impl Qcow2Image {
    /// Blocks new requests, waits for those in flight, and writes all metadata.
    pub(super) async fn quiesce(&self) -> Result<ExclusiveImage<'_>> {
        let exclusive = self.drain().await;
        self.flush_all_metadata().await?;
        Ok(exclusive)
    }

    /// Writes all dirty metadata, durably. Requires that no request is in flight or no cluster is
    /// being freed.
    pub(super) async fn flush_all_metadata(&self) -> Result<()> {
        if self.read_only.load(Acquire) {
            return Ok(());
        }
        self.flush_remaining_metadata().await?;
        self.flush_files().await
    }

    pub(super) async fn flush_remaining_metadata(&self) -> Result<()> {
        loop {
            self.write_tables().await?;
            // Without requests in flight, unused clusters can be freed at once. That dirties
            // refcounts again, so repeat.
            self.free_unreferenced_exclusive().await?;
            if !self.is_dirty() {
                return Ok(());
            }
        }
    }

    /// Writes everything for the new process of an upgrade, which shares the page cache. Of the
    /// last writes, only dirty bitmaps are made durable. Neither process may use the image before
    /// [`Qcow2Image::take_over`].
    ///
    /// # Errors
    /// Errors of the file, also if a bitmap cannot be stored; the image then remains usable and
    /// continues to record.
    pub(crate) async fn write_for_handover(&self) -> Result<()> {
        let _freeing = self.freeing.exclusive(0..1).await;
        let _closed = self.gate.close().await;
        self.flush_remaining_metadata().await?;
        let Some((name, why)) = self.store_recorded_bitmaps().await.pop() else {
            return self.flush_remaining_metadata().await;
        };
        let image = self.file.storage().description();
        tracing::warn!(image, bitmap = name, "the bitmap cannot be stored, and continues to record: {why}");
        Err(if let BitmapError::Failed(error) = why { error } else { Error::IO })
    }

    /// Makes everything durable, including dirty bitmaps, after the changes in flight, those of
    /// cancelled requests included. Unused clusters are freed at once: nothing changes the file
    /// later unless the disk is changed.
    ///
    /// # Errors
    /// As [`Qcow2Image::write_for_handover`]; the image remains writable.
    pub(crate) async fn settle(&self) -> Result<()> {
        self.write_for_handover().await?;
        self.flush_files().await
    }

    /// Writes everything, including dirty bitmaps, and truncates the file after its last cluster.
    /// The image must not be used afterwards.
    ///
    /// # Errors
    /// Errors of the file; flushed data is not affected.
    pub async fn close(&self) -> Result<()> {
        // Another owner, such as a disk, still uses it, or closes it.
        if let Some(backing) = self.shared_backing().filter(|backing| Arc::strong_count(backing) == 1) {
            Box::pin(backing.close()).await?;
        }
        if self.is_read_only() {
            return Ok(());
        }
        let _quiesced = self.quiesce().await?;
        for (name, why) in self.store_recorded_bitmaps().await {
            self.warn_of_loss(&name, &why);
        }
        let end = self.refcounts.used_end(&self.file).await?;
        self.file.truncate(end).await?;
        self.file.flush().await
    }

    /// Allocates consecutive clusters for metadata, and protects them from guest data.
    pub(super) async fn allocate(&self, clusters: u64) -> Result<u64> {
        let allocated = self.refcounts.allocate_all(&self.file, &self.overlap, clusters).await?;
        self.overlap.add(allocated.offset, clusters << self.shape.cluster_bits);
        Ok(allocated.offset)
    }

    /// Adds `by` (1 or -1) to the refcounts of all clusters that these bytes touch. Clusters that
    /// reach zero are freed and no longer protected as metadata.
    pub(super) async fn change_refcount(&self, offset: u64, length: u64, by: i64) -> Result<()> {
        let clusters = self.clusters_of(offset, length);
        if by < 0 {
            return self
                .refcounts
                .free_clusters(&self.file, &self.overlap, clusters, FreedContent::Metadata)
                .await;
        }
        self.refcounts.increment(&self.file, clusters).await
    }

    /// All clusters that these bytes touch; at least one.
    pub(super) fn clusters_of(&self, offset: u64, length: u64) -> Range<u64> {
        let bits = self.shape.cluster_bits;
        offset >> bits..((offset + length.max(1) - 1) >> bits) + 1
    }

    /// Refcount of the cluster at `offset`.
    pub(super) async fn refcount(&self, offset: u64) -> Result<u64> {
        self.refcounts.get(&self.file, offset >> self.shape.cluster_bits).await
    }

    /// Writes metadata directly to the file, bypassing the caches.
    pub(super) async fn write_metadata(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write(offset, bytes).await
    }

    /// Reads metadata directly from the file, bypassing the caches.
    pub(super) async fn read_metadata(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        self.file.read(offset, length).await
    }

    /// Makes written metadata durable, refcounts first.
    pub(super) async fn flush_metadata(&self) -> Result<()> {
        self.write_tables().await?;
        self.file.flush().await
    }

    /// Changes the header, durably.
    pub(super) async fn update_header(&self, change: impl FnOnce(&mut Qcow2Header)) -> Result<()> {
        self.file.update_header(change).await
    }

    /// Drops the cached mapping and reads the L1 table that the header names. Requires that no
    /// request is in flight.
    pub(super) async fn reload(&self) -> Result<()> {
        let header = self.file.header();
        let bytes = self.file.read(header.l1_offset, u64::from(header.l1_entries) * 8).await?;
        let l1 = L1::parse(header.l1_offset, &bytes, self.shape, self.file.size_bytes())
            .map_err(|invalid| self.file.report_invalid(&invalid))?;
        self.replace_l1(l1);
        self.size.store(header.size_bytes, Release);
        Ok(())
    }

    /// Switches to another L1 table. Requires that no request is in flight.
    pub(super) fn replace_l1(&self, l1: L1) {
        let tables = l1.tables().map(|table| (table, 1 << self.shape.cluster_bits));
        let regions: Vec<_> = tables.chain([(l1.offset, l1.len() as u64 * 8)]).collect();
        self.overlap.add_all(&regions);
        let _pending = self.pending();
        self.cache.load().clear();
        self.l1.store(l1.into());
    }

    /// Clears the `copied` flags in memory, after they were cleared in the file. Requires that no
    /// request is in flight.
    pub(super) fn clear_copied_flags(&self) {
        let _pending = self.pending();
        self.cache.load().clear();
        self.l1.load().clear_copied();
    }
}
