//! An image that another process has for a while, as the other end of a live migration does.
//!
//! ```text
//!   open_for_handover ─► take_over ─► in use ─► hand_over ─► another's ─► take_over ─► …
//!        header          all tables             all written
//! ```
//!
//! What the image is (its format's parameters, its backing file) stays; where everything lies in it
//! is read again. Never takes locks: who has them calls this.

use std::sync::atomic::Ordering::Release;

use super::{
    OpenFailure, Qcow2, bytes,
    header::{Header, autoclear, incompatible},
    open::{Tables, check_openable},
    read_header,
};
use reactor::error::Result;

impl Qcow2 {
    /// Writes everything, so that another may take the image over. It is not to be used before
    /// [`Qcow2::take_over`].
    ///
    /// # Errors
    /// The file's; it can be used on.
    pub(crate) async fn hand_over(&self) -> Result<()> {
        self.close().await?;
        self.forget_bitmaps();
        Ok(())
    }

    /// Reads what another may have written. Nobody else uses the image, and nobody has since it was
    /// handed over, or laid down: what bitmaps recorded before that is in memory then. What could
    /// not be written then, or came since, is written first, as nobody else has the image.
    ///
    /// # Errors
    /// [`OpenFailure`]; it is still not to be used, but by whoever had it before.
    pub(crate) async fn take_over(&self) -> std::result::Result<(), OpenFailure> {
        // Somebody who reads ahead may still be inside, and would keep what he finds.
        let _giving = self.giving.exclusive(0..1).await;
        let _closed = self.gate.close().await;
        if self.is_dirty() {
            self.write_what_is_left().await?;
        }
        let storage = self.file.storage();
        let header = read_header(storage).await?;
        if lasting(&header) != lasting(&self.file.header()) {
            return Err(OpenFailure::Changed);
        }
        check_openable(&header, false, self.data.is_some(), self.cipher.is_some())?;
        let first = bytes::read(storage, 0, header.cluster_bytes() as usize).await?;
        self.file.changed_hands(header.clone(), &first);
        let Tables { l1, refcounts, places } = Tables::read(&self.file, &header, self.shape).await?;
        self.overlap.replace(&places);
        self.overlap.check_apart(&places)?;
        self.refcounts.replace(&header, refcounts);
        {
            let _pending = self.pending();
            self.cache.load().clear();
            self.l1.store(l1.into());
        }
        self.size.store(header.size_bytes, Release);
        self.make_ready(&header, false).await
    }
}

/// What does not change while an image is in use.
fn lasting(header: &Header) -> Header {
    Header {
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
        others: Vec::new(),
        later_fields: Vec::new(),
        ..header.clone()
    }
}
