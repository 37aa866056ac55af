//! Changes to the bitmaps of an open image.
//!
//! Never writes over a directory that the header names, but for the flag that says that a bitmap is in use: a new one is written elsewhere, and
//! the header changes to it in one sector.

use super::{flag, read};
use crate::{
    error::Result,
    image::qcow2::{Invalid, MetadataError, Qcow2, header::autoclear},
};

impl Qcow2 {
    /// Has every bitmap say that it may be wrong, since nobody records in it what is written from now on. QEMU then uses none of them.
    pub(in crate::image::qcow2) async fn mark_bitmaps_in_use(&self) -> Result<()> {
        let header = self.header();
        let Some(bitmaps) = header.bitmaps.filter(|_| header.autoclear & autoclear::BITMAPS != 0) else {
            return Ok(());
        };
        match read(self.file.storage(), &header, bitmaps).await {
            Ok(mut entries) => {
                if entries.iter().all(|entry| entry.flags & flag::IN_USE != 0) {
                    return Ok(());
                }
                entries.iter_mut().for_each(|entry| entry.flags |= flag::IN_USE);
                let mut directory = super::encode(&entries);
                // The last one's padding may be missing.
                directory.truncate(bitmaps.directory.length as usize);
                self.write_metadata(bitmaps.directory.offset, &directory).await?;
                self.file.flush().await
            }
            Err(MetadataError::Storage(error)) => Err(error),
            Err(MetadataError::Invalid(invalid)) => self.drop_mark(&invalid).await,
        }
    }

    async fn drop_mark(&self, why: &Invalid) -> Result<()> {
        let image = self.file.storage().description();
        tracing::warn!(image, "its bitmaps cannot be used, and are marked so: {why}");
        self.update_header(|header| header.autoclear &= !autoclear::BITMAPS).await
    }
}
