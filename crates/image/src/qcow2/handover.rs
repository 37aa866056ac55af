//! Use of an image by several processes in turn: in a handover between hosts, and in an upgrade.
//!
//! ```text
//!   open_for_handover ─► take_over ─► in use ─► hand_over ─► other process ─► take_over ─► …
//!        header          all tables             all written
//! ```
//!
//! The parameters of the format and the backing file stay the same; all tables are read again.
//! Never takes locks: the caller must hold them.

use std::sync::atomic::Ordering::Release;

use super::{
    OpenFailure, Qcow2Image,
    header::{Qcow2Header, autoclear, incompatible},
    metadata_io,
    open::{ResidentTables, check_openable},
    read_header,
};
use reactor::error::Result;

impl Qcow2Image {
    /// Writes all metadata, so that another process can use the image. This process must not use it
    /// before [`Qcow2Image::take_over`].
    ///
    /// # Errors
    /// Errors of the file; the image then remains usable.
    pub(crate) async fn hand_over(&self) -> Result<()> {
        self.close().await?;
        self.invalidate_recording();
        Ok(())
    }

    /// Reads the tables that another process may have changed. This process may not have used the
    /// image since [`Qcow2Image::hand_over`] or [`Qcow2Image::write_for_handover`]; bitmaps
    /// recorded before that are still in memory. Metadata that could not be written then, or that
    /// changed since, is written first: no other process uses the image.
    ///
    /// # Errors
    /// [`OpenFailure`]; the previous process must then continue with the image.
    pub(crate) async fn take_over(&self) -> std::result::Result<(), OpenFailure> {
        // A read-ahead may still be in flight, and would insert old metadata into the cache.
        let _freeing = self.freeing.exclusive(0..1).await;
        let _closed = self.gate.close().await;
        if self.is_dirty() {
            self.flush_remaining_metadata().await?;
        }
        let storage = self.file.storage();
        let header = read_header(storage).await?;
        if invariant_parts(&header) != invariant_parts(&self.file.header()) {
            return Err(OpenFailure::Changed);
        }
        // The corrupt and dirty bits were not checked when the image was opened for handover.
        check_openable(&header, false, self.data.is_some(), self.cipher.is_some())?;
        let first = metadata_io::read(storage, 0, header.cluster_bytes() as usize).await?;
        self.file.reset_cached_header(header.clone(), &first);
        let ResidentTables { l1, refcounts, regions: places } =
            ResidentTables::read(&self.file, &header, self.shape).await?;
        self.overlap.replace(&places);
        self.overlap.check_disjoint(&places)?;
        self.refcounts.replace(&header, refcounts);
        {
            // Under the lock: cache and L1 table must change together.
            let _pending = self.pending();
            self.cache.load().clear();
            self.l1.store(l1.into());
        }
        self.size.store(header.size_bytes, Release);
        self.prepare(&header, false).await
    }
}

/// Copy of a header without the parts that another process may change.
fn invariant_parts(header: &Qcow2Header) -> Qcow2Header {
    Qcow2Header {
        size_bytes: 0,
        l1_offset: 0,
        l1_entries: 0,
        refcount_table_offset: 0,
        refcount_table_clusters: 0,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: header.incompatible & !(incompatible::DIRTY | incompatible::CORRUPT),
        autoclear: header.autoclear & autoclear::RAW_DATA_FILE,
        compatible: 0,
        bitmaps: None,
        encryption: None,
        unknown_extensions: Vec::new(),
        later_fields: Vec::new(),
        ..header.clone()
    }
}
