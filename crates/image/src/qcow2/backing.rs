//! What is below an image: naming another backing file, leaving all data to it, and noticing that
//! it changes.
//!
//! Never reads or opens a backing file: the caller makes sure that the disk stays the same.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use policy::time::Duration;

use super::{Qcow2, header::Backing};
use reactor::error::{Error, Result};
use storage::Stamp;

use crate::Image;

/// How often it is looked whether a backing file has changed.
const LOOK_EVERY: Duration = Duration::from_secs(2);

impl Qcow2 {
    /// Looks from now on, every two seconds, whether a file below was written to by somebody who
    /// keeps to no locks. From then on what would be read from there fails with [`Error::IO`]: it
    /// would be neither what the disk had nor what somebody meant it to have. What the image has
    /// itself stays as it was, and can be written.
    ///
    /// # Panics
    /// Without a reactor on this thread.
    pub fn watch_backing(&self) {
        if !self.images_below().any(|image| image.storage().has_stamp()) {
            return;
        }
        let image = Arc::downgrade(&self.0);
        reactor::spawn(async move {
            // The first stamp of each image that has one.
            let mut first: Vec<Option<Stamp>> = Vec::new();
            loop {
                let Some(image) = image.upgrade().map(Self) else { return };
                // In sequence: a file system that does not answer blocks only this task.
                for (at, below) in image.images_below().enumerate() {
                    let now = below.storage().stamp().await;
                    first.resize(first.len().max(at + 1), None);
                    match (first[at], now) {
                        (Some(before), Some(now)) if before != now => return image.lose_backing(below),
                        (None, Some(now)) => first[at] = Some(now),
                        // An error shows no change of the file.
                        _ => {}
                    }
                }
                drop(image);
                reactor::sleep_until(reactor::now() + LOOK_EVERY).await;
            }
        });
    }

    /// Whether that has happened, here or further below.
    pub fn has_changed_below(&self) -> bool {
        self.backing_changed.load(Relaxed) || self.backing().is_some_and(Image::has_changed_below)
    }

    fn images_below(&self) -> impl Iterator<Item = &Image> {
        self.backing().into_iter().flat_map(Image::chain)
    }

    fn lose_backing(&self, changed: &Image) {
        self.backing_changed.store(true, Relaxed);
        tracing::error!(
            image = self.description(),
            "its backing file was written to by somebody else ({}): what it does not have itself cannot be read any more (end the disk, see what \
             became of the backing file, and start again)",
            changed.description()
        );
    }

    /// Names another backing file in the header, or none. The image as it is open goes on reading
    /// from the one it was opened with.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if it is read-only; [`Error::INVALID`] if the name does not fit, or
    /// the image may have none (a raw data file); or the file's.
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

    /// Makes the image as if nothing had ever been written to it: what is below shows everywhere.
    /// Snapshots keep what they have.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if it is read-only, or the file's; then a part of the image is
    /// empty.
    pub async fn make_empty(&self) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let _quiet = self.quiesce().await?;
        self.forget(0, self.size_bytes()).await
    }
}
