//! The backing chain of an image: replacing it while the image is used, changing the name in the
//! header, emptying the image, and detecting that a file of the chain changed.
//!
//! ```text
//!   request ─► Qcow2Image ─┬─► Qcow2State ─► current link     one for all: caches, locks, file
//!                          └─► BackingLink ─► Image ─► …      that of the request
//! ```
//!
//! An image and the same image with another chain share everything but the link. The link changes
//! while no request is in flight. A request that was sent before and begins after that uses the
//! [current one](Qcow2Image::current): a cluster that is unallocated since then must not read from
//! the earlier chain. Its files are closed when nothing refers to it any more.
//!
//! Never opens or reads a backing file: the caller ensures that the disk's content stays the same.

use std::{
    borrow::Cow,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use policy::time::Duration;

use super::{
    Qcow2Image,
    drained::ExclusiveImage,
    header::{BackingReference, Qcow2Header},
};
use reactor::error::{Error, Result};
use storage::FileStamp;

use crate::Image;

// Interval at which the backing files are checked for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The current link of an image.
#[derive(Debug, Default)]
pub(super) struct CurrentBacking {
    /// Number of changes of the link.
    generation: AtomicU64,
    link: Mutex<Option<Arc<BackingLink>>>,
}

/// What unallocated clusters are read from.
#[derive(Debug)]
pub(super) struct BackingLink {
    image: Arc<Image>,
    /// True if another process wrote to a file of the chain. Reads of its data then fail.
    is_changed: AtomicBool,
    /// First known stamp of each image of the chain, if it has one.
    first_stamps: Mutex<Vec<Option<FileStamp>>>,
}

impl Qcow2Image {
    /// Makes `below`, which is open already, the image that unallocated clusters are read from;
    /// returns the image over it. The image must have been opened without its backing file, and be
    /// [empty](Qcow2Image::is_empty), unused and [suitable](crate::open::check_overlay).
    ///
    /// # Panics
    /// Panics if it has a backing image.
    #[must_use]
    pub fn attach_backing(&self, below: Arc<Image>) -> Self {
        assert!(self.current().below.is_none(), "it was opened with its backing file");
        self.replace_link(Some(below))
    }

    /// Replaces the link. No request may be in flight.
    pub(super) fn replace_link(&self, below: Option<Arc<Image>>) -> Self {
        let below = below.map(|image| Arc::new(BackingLink::new(image)));
        let CurrentBacking { generation, link } = &self.current_backing;
        let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
        link.clone_from(&below);
        let generation = generation.fetch_add(1, Release) + 1;
        Self { state: Arc::clone(&self.state), below, generation }
    }

    /// The image with the current link, which a request must use once it has passed the gate.
    pub(super) fn current(&self) -> Cow<'_, Self> {
        let CurrentBacking { generation, link } = &self.current_backing;
        if generation.load(Acquire) == self.generation {
            return Cow::Borrowed(self);
        }
        let link = link.lock().unwrap_or_else(PoisonError::into_inner);
        let (below, generation) = (link.clone(), generation.load(Acquire));
        Cow::Owned(Self { state: Arc::clone(&self.state), below, generation })
    }

    /// The image for a caller that reads no guest data, and does not keep the chain open.
    pub(super) fn without_chain(&self) -> Self {
        Self { state: Arc::clone(&self.state), below: None, generation: 0 }
    }

    /// Image that unallocated clusters are read from, for callers that keep it.
    pub fn shared_backing(&self) -> Option<&Arc<Image>> {
        self.below.as_deref().map(|link| &link.image)
    }

    /// Starts a task that checks every two seconds whether a file of the backing chain was written
    /// to by a program that ignores locks. After that, reads from the backing chain fail with
    /// [`Error::IO`], because they would mix old and new data. Data in this image remains readable
    /// and writable.
    ///
    /// # Panics
    /// Panics without a reactor on this thread.
    pub fn watch_backing(&self) {
        let Some(link) = &self.below else { return };
        if !link.image.chain().any(|image| image.storage().has_stamp()) {
            return;
        }
        let (link, description) = (Arc::downgrade(link), self.description());
        reactor::spawn(async move {
            loop {
                let Some(link) = link.upgrade() else { return };
                if link.check(&description).await {
                    return;
                }
                drop(link);
                reactor::sleep_until(reactor::now() + CHECK_INTERVAL).await;
            }
        });
    }

    /// Checks at once what the task of [`Qcow2Image::watch_backing`] checks in intervals; returns
    /// whether a backing file of this chain was changed.
    pub async fn check_below(&self) -> bool {
        if let Some(link) = &self.below {
            link.check(&self.description()).await;
        }
        self.has_changed_below()
    }

    /// True if a backing file of this chain was changed: see [`Qcow2Image::watch_backing`].
    pub fn has_changed_below(&self) -> bool {
        self.is_backing_changed() || self.backing().is_some_and(Image::has_changed_below)
    }

    /// As [`Qcow2Image::has_changed_below`], for what the task of this image has found.
    pub(super) fn is_backing_changed(&self) -> bool {
        self.below.as_ref().is_some_and(|link| link.is_changed.load(Relaxed))
    }

    /// Changes the backing file's name in the header, or removes it. The open image continues to
    /// read from the backing file that it was opened with.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if the image is read-only; [`Error::INVALID`] if the name does not
    /// fit or the image must not have a backing file (raw data file); or the file's error.
    pub async fn set_backing(&self, backing: Option<BackingReference>) -> Result<()> {
        self.check_reference(backing.as_ref())?;
        let _quiesced = self.quiesce().await?;
        self.update_header(|header| header.backing = backing).await
    }

    /// Fails if the header cannot name this backing file.
    fn check_reference(&self, backing: Option<&BackingReference>) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let changed = Qcow2Header { backing: backing.cloned(), ..self.header() };
        changed.encode().map(|_| ()).map_err(|_| Error::INVALID)
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

impl ExclusiveImage<'_> {
    /// Replaces the backing image and its name in the header, durably, or removes both; returns the
    /// image over it. All unallocated clusters must have the same content as before.
    ///
    /// # Errors
    /// As [`Qcow2Image::set_backing`]; nothing has changed.
    pub async fn replace_backing(&self, new: Option<(Arc<Image>, BackingReference)>) -> Result<Qcow2Image> {
        let (below, reference) = new.unzip();
        self.image.check_reference(reference.as_ref())?;
        self.image.flush_all_metadata().await?;
        self.image.update_header(|header| header.backing = reference).await?;
        Ok(self.image.replace_link(below))
    }
}

impl BackingLink {
    fn new(image: Arc<Image>) -> Self {
        Self { image, is_changed: AtomicBool::new(false), first_stamps: Mutex::default() }
    }

    /// Compares the stamps of the chain with the first ones; returns whether one has changed.
    async fn check(&self, image: &str) -> bool {
        // One file at a time: at most one call waits for an unresponsive file system.
        for (at, below) in self.image.chain().enumerate() {
            let now = below.storage().stamp().await;
            let mut first = self.first_stamps.lock().unwrap_or_else(PoisonError::into_inner);
            let count = first.len().max(at + 1);
            first.resize(count, None);
            match (first[at], now) {
                (Some(before), Some(now)) if before != now => {
                    drop(first);
                    self.mark_changed(image, below);
                    return true;
                }
                (None, Some(now)) => first[at] = Some(now),
                // An error does not prove a change of the file.
                _ => {}
            }
        }
        false
    }

    fn mark_changed(&self, image: &str, changed: &Image) {
        if self.is_changed.swap(true, Relaxed) {
            return;
        }
        tracing::error!(
            image,
            "its backing file was changed by another process ({}): reads of its data fail from now on \
             (stop the disk, check the backing file, and start the disk again)",
            changed.description()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        RawImage,
        qcow2::{
            Qcow2Components,
            create::{CreateOptions, create},
        },
    };
    use reactor::{buffer::IoBuffer, sim};
    use storage::{Durability, Storage};

    const CLUSTER: u64 = 4096;

    /// An empty overlay of four clusters over a base of three with data.
    async fn overlay(version: u32) -> Qcow2Image {
        let base = Storage::with_content(&[0x11; 3 * CLUSTER as usize]).await;
        let backing = Some(BackingReference { name: "base".into(), format: Some("raw".into()) });
        let size_bytes = 4 * CLUSTER;
        let options = CreateOptions {
            version,
            size_bytes,
            cluster_bytes: CLUSTER,
            backing,
            ..CreateOptions::default()
        };
        let storage = Storage::with_content(&[]).await;
        create(&storage, None, &options).await.expect("valid");
        let backing = Some(Arc::new(Image::Raw(RawImage::of(base, false, true))));
        Qcow2Image::open(Qcow2Components { backing, ..Qcow2Components::of(storage) }).await.expect("valid")
    }

    async fn content(image: &Qcow2Image) -> Vec<u8> {
        image.read(0, 4 * CLUSTER as usize).await.expect("memory").to_vec()
    }

    #[test]
    fn requests_of_before_use_the_chain_of_after() {
        for version in [2, 3] {
            sim::run(1, async move {
                let before = overlay(version).await;
                let all = content(&before).await;
                let populated = before.populate(0, 4 * CLUSTER, None).await.expect("memory");
                assert_eq!(populated.copied_bytes, 3 * CLUSTER, "zeroes are not allocated");
                let replaced = before.drain().await.replace_backing(None).await;
                let after = replaced.expect("memory");
                assert!(after.backing().is_none() && after.header().backing.is_none());
                assert_eq!(content(&after).await, all, "the content is the same");
                // Unallocated since then: it must not read from the earlier chain again.
                after.discard(0, 2 * CLUSTER).await.expect("memory");
                let data = IoBuffer::copy_of(&[0x22; 100]);
                before.write(0, data.into(), Durability::Cached).await.expect("memory");
                let mut expected = all;
                expected[..2 * CLUSTER as usize].fill(0);
                expected[..100].fill(0x22);
                assert_eq!(content(&before).await, expected);
                assert_eq!(content(&after).await, expected);
                let status = before.block_status(CLUSTER, CLUSTER).await.expect("memory");
                assert!(status[0].zero, "{status:?}");
            });
        }
    }

    #[test]
    fn data_and_zeroes_of_the_image_stay() {
        sim::run(1, async {
            let image = overlay(3).await;
            let data = IoBuffer::copy_of(&[0x33; 10]);
            image.write(5, data.into(), Durability::Cached).await.expect("memory");
            image.write_zero_clusters(CLUSTER, CLUSTER).await.expect("memory");
            let all = content(&image).await;
            let populated = image.populate(0, 4 * CLUSTER, None).await.expect("memory");
            assert_eq!(populated.copied_bytes, CLUSTER, "the rest is allocated");
            let again = image.populate(0, 4 * CLUSTER, None).await.expect("memory");
            assert_eq!(again.copied_bytes, 0);
            assert_eq!(content(&image).await, all);
        });
    }
}
