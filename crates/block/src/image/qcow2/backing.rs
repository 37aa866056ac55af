//! What lies below an image: naming another backing file, and leaving everything to it.
//!
//! Never reads a backing file, and never opens one: whether the disk is still the same afterwards is the caller's to see to.

use super::{Qcow2, header::Backing};
use crate::error::{Error, Result};

impl Qcow2 {
    /// Names another backing file in the header, or none. The image as it is open goes on reading from the one it was opened with.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if it is read-only; [`Error::INVALID`] if the name does not fit, or the image may have none (a raw data file);
    /// or the file's.
    pub async fn set_backing(&self, backing: Option<Backing>) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let mut changed = self.header();
        changed.backing.clone_from(&backing);
        changed.encode().map_err(|_| Error::INVALID)?;
        let _quiet = self.quiesce().await?;
        self.update_header(|header| header.backing = backing).await
    }

    /// Makes the image as if nothing had ever been written to it: what is below shows everywhere. Snapshots keep what they have.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if it is read-only, or the file's; then a part of the image is empty.
    pub async fn make_empty(&self) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let _quiet = self.quiesce().await?;
        self.forget(0, self.size_bytes()).await
    }
}
