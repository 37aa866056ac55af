//! Changes to an image as a whole, and their common parts: nobody inside, nothing unwritten.

use std::{ops::Range, sync::atomic::Ordering::Release};

use super::{Qcow2, bitmap::BitmapError, gate::Closed, header::Header, l1::L1, refcounts::Held};
use reactor::error::{Error, Result};
use storage::RangeGuard;

/// Nobody is inside, and all metadata is in the file, until this is dropped.
#[derive(Debug)]
pub(super) struct Quiesced<'a> {
    _closed: Closed<'a>,
    _giving: RangeGuard<'a>,
}

impl Qcow2 {
    /// Waits until nobody is inside, and keeps newcomers out; writes all metadata.
    pub(super) async fn quiesce(&self) -> Result<Quiesced<'_>> {
        let giving = self.giving.exclusive(0..1).await;
        let closed = self.gate.close().await;
        self.write_everything().await?;
        Ok(Quiesced { _closed: closed, _giving: giving })
    }

    /// Writes metadata until there is none left, and makes it durable. Nobody is inside, or nothing
    /// is given back.
    pub(super) async fn write_everything(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.write_what_is_left().await?;
        self.flush_files().await
    }

    pub(super) async fn write_what_is_left(&self) -> Result<()> {
        loop {
            self.write_tables().await?;
            // Nobody is inside: what is not used can be given back at once, which changes refcounts
            // again.
            self.give_back_quietly().await?;
            if !self.is_dirty() {
                return Ok(());
            }
        }
    }

    /// Writes everything for a process that sees the same page cache; of what is written last,
    /// only what bitmaps recorded is made durable. Not to be used before [`Qcow2::take_over`], here
    /// or there.
    ///
    /// # Errors
    /// The file's, also where a bitmap cannot be stored; it can be used on, and records on.
    pub(crate) async fn lay_down(&self) -> Result<()> {
        let _giving = self.giving.exclusive(0..1).await;
        let _closed = self.gate.close().await;
        self.write_what_is_left().await?;
        let Some((name, why)) = self.lay_down_bitmaps().await.pop() else {
            return self.write_what_is_left().await;
        };
        let image = self.file.storage().description();
        tracing::warn!(image, bitmap = name, "the bitmap cannot be stored, and records on: {why}");
        Err(if let BitmapError::Failed(error) = why { error } else { Error::IO })
    }

    /// Writes everything, also what bitmaps recorded, and cuts off what the file has behind its
    /// last cluster. The image must not be used afterwards.
    ///
    /// # Errors
    /// The file's; what was flushed before is safe.
    pub async fn close(&self) -> Result<()> {
        if let Some(backing) = self.backing() {
            Box::pin(backing.close()).await?;
        }
        if self.read_only || self.file.is_corrupt() {
            return Ok(());
        }
        let _quiet = self.quiesce().await?;
        for (name, why) in self.lay_down_bitmaps().await {
            self.warn_of_loss(&name, &why);
        }
        let end = self.refcounts.end_of_use(&self.file).await?;
        self.file.cut(end).await?;
        self.file.flush().await
    }

    /// Takes clusters that follow each other, for metadata.
    pub(super) async fn allocate(&self, clusters: u64) -> Result<u64> {
        let found = self.refcounts.take_all(&self.file, &self.overlap, clusters).await?;
        self.overlap.add(found.offset, clusters << self.shape.cluster_bits);
        Ok(found.offset)
    }

    /// Adds 1 to, or takes it from, the refcounts of all clusters that these bytes touch; those
    /// that come to zero are free, and no metadata.
    pub(super) async fn change_refcount(&self, offset: u64, length: u64, by: i64) -> Result<()> {
        let clusters = self.clusters_of(offset, length);
        if by < 0 {
            return self.refcounts.give_back(&self.file, &self.overlap, clusters, Held::Metadata).await;
        }
        self.refcounts.raise(&self.file, clusters).await
    }

    /// Every cluster that these bytes touch, one at least.
    pub(super) fn clusters_of(&self, offset: u64, length: u64) -> Range<u64> {
        let bits = self.shape.cluster_bits;
        offset >> bits..((offset + length.max(1) - 1) >> bits) + 1
    }

    /// The refcount of the cluster at `offset`.
    pub(super) async fn refcount(&self, offset: u64) -> Result<u64> {
        self.refcounts.get(&self.file, offset >> self.shape.cluster_bits).await
    }

    /// Metadata, straight to the file.
    pub(super) async fn write_metadata(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write(offset, bytes).await
    }

    /// Metadata, straight from the file; not what is still in the caches.
    pub(super) async fn read_metadata(&self, offset: u64, length: u64) -> Result<Vec<u8>> {
        self.file.read(offset, length).await
    }

    /// Makes what was written durable, refcounts first.
    pub(super) async fn flush_metadata(&self) -> Result<()> {
        self.write_tables().await?;
        self.file.flush().await
    }

    /// Changes the header; durable when this returns.
    pub(super) async fn update_header(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        self.file.update_header(change).await
    }

    /// Forgets what is in memory of the mapping, and reads the L1 table that the header names now.
    /// Only while quiet.
    pub(super) async fn reload(&self) -> Result<()> {
        let header = self.file.header();
        let bytes = self.file.read(header.l1_offset, u64::from(header.l1_entries) * 8).await?;
        let l1 = L1::parse(header.l1_offset, &bytes, self.shape, self.file.size_bytes())
            .map_err(|invalid| self.file.found(&invalid))?;
        self.replace_l1(l1);
        self.size.store(header.size_bytes, Release);
        Ok(())
    }

    /// Another L1 table is in force. Only while quiet.
    pub(super) fn replace_l1(&self, l1: L1) {
        let tables = l1.tables().map(|table| (table, 1 << self.shape.cluster_bits));
        let places: Vec<_> = tables.chain([(l1.offset, l1.len() as u64 * 8)]).collect();
        self.overlap.add_all(&places);
        let _pending = self.pending();
        self.cache.load().clear();
        self.l1.store(l1.into());
    }

    /// Forgets that anything belongs to the active L1 table alone, as the file does not say so any
    /// more. Only while quiet.
    pub(super) fn forget_copied(&self) {
        let _pending = self.pending();
        self.cache.load().clear();
        self.l1.load().clear_copied();
    }
}
