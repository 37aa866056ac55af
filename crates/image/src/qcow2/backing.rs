//! The backing file of an image: changing its name, emptying the image, and detecting that the
//! file changed.
//!
//! Never opens or reads a backing file: the caller ensures that the disk's content stays the same.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use policy::time::Duration;

use super::{Qcow2Image, header::BackingReference};
use reactor::error::{Error, Result};
use storage::FileStamp;

use crate::Image;

// Interval at which the backing files are checked for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

impl Qcow2Image {
    /// Starts a task that checks every two seconds whether a file of the backing chain was written
    /// to by a program that ignores locks. After that, reads from the backing chain fail with
    /// [`Error::IO`], because they would mix old and new data. Data in this image remains readable
    /// and writable.
    ///
    /// # Panics
    /// Panics without a reactor on this thread.
    pub fn watch_backing(&self) {
        if !self.images_below().any(|image| image.storage().has_stamp()) {
            return;
        }
        let image = Arc::downgrade(&self.0);
        reactor::spawn(async move {
            // First known stamp of each image of the chain, if it has one.
            let mut first: Vec<Option<FileStamp>> = Vec::new();
            loop {
                let Some(image) = image.upgrade().map(Self) else { return };
                // One file at a time: at most one call waits for an unresponsive file system.
                for (at, below) in image.images_below().enumerate() {
                    let now = below.storage().stamp().await;
                    first.resize(first.len().max(at + 1), None);
                    match (first[at], now) {
                        (Some(before), Some(now)) if before != now => {
                            return image.mark_backing_changed(below);
                        }
                        (None, Some(now)) => first[at] = Some(now),
                        // An error does not prove a change of the file.
                        _ => {}
                    }
                }
                drop(image);
                reactor::sleep_until(reactor::now() + CHECK_INTERVAL).await;
            }
        });
    }

    /// True if a backing file of this chain was changed: see [`Qcow2Image::watch_backing`].
    pub fn has_changed_below(&self) -> bool {
        self.backing_changed.load(Relaxed) || self.backing().is_some_and(Image::has_changed_below)
    }

    fn images_below(&self) -> impl Iterator<Item = &Image> {
        self.backing().into_iter().flat_map(Image::chain)
    }

    fn mark_backing_changed(&self, changed: &Image) {
        self.backing_changed.store(true, Relaxed);
        tracing::error!(
            image = self.description(),
            "its backing file was changed by another process ({}): reads of its data fail from now on \
             (stop the disk, check the backing file, and start the disk again)",
            changed.description()
        );
    }

    /// Makes `below`, which is open already, the image that unallocated clusters are read from. The
    /// image must have been opened without its backing file, and be
    /// [empty](Qcow2Image::is_empty), unused and [suitable](crate::open::check_overlay).
    ///
    /// # Panics
    /// Panics if it has a backing image.
    pub fn attach_backing(&self, below: Arc<Image>) {
        self.backing.set(below).expect("opened without its backing file");
    }

    /// Changes the backing file's name in the header, or removes it. The open image continues to
    /// read from the backing file that it was opened with.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if the image is read-only; [`Error::INVALID`] if the name does not
    /// fit or the image must not have a backing file (raw data file); or the file's error.
    pub async fn set_backing(&self, backing: Option<BackingReference>) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let mut changed = self.header();
        changed.backing.clone_from(&backing);
        changed.encode().map_err(|_| Error::INVALID)?;
        let _quiesced = self.quiesce().await?;
        self.update_header(|header| header.backing = backing).await
    }

    /// Makes all clusters of the disk unallocated, so that the backing file becomes visible.
    /// Snapshots are unchanged.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if the image is read-only, or the file's error; part of the image
    /// may then be empty.
    pub async fn make_empty(&self) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let _quiesced = self.quiesce().await?;
        self.unmap_clusters(0, self.size_bytes()).await
    }
}
