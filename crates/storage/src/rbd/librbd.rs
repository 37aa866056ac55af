//! [`RbdBackend`] by librbd: the only module that calls a C library.
//!
//! - `library`: the functions, found by name;
//! - `cluster`: connections, shared by images;
//! - `image`: an open image, its other clients, its lock;
//! - `operation`: a request in flight, which owns its memory until the callback.
//!
//! Each call that waits for the cluster runs on its own thread, and each image makes one such call
//! at a time: a cluster that does not answer never blocks the threads of other blocking calls.
//!
//! Never passes guest memory to the library, which could see bytes change between the checksum and
//! the transmission. Guest memory is copied, which the counter of copies includes.

mod cluster;
mod image;
mod library;
mod operation;

use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use self::{
    image::RbdImage,
    operation::{RbdOperation, RbdOperationKind},
};
pub use self::{
    image::{abandon_closing, wait_for_closing},
    library::{is_loaded, load, remedy},
};
use super::{
    RbdAddress, RbdOptions,
    backend::{RbdBackend, ResumeOutcome},
    resize_notifier::ResizeNotifier,
    slots::RbdRequestSlot,
};
use reactor::{
    buffer::{IoBuffer, Segment, Segments},
    error::{Error, Result},
};

use crate::OpenError;

/// Maximum number of segments in one call, as for the kernel (UIO_MAXIOV).
const MAX_SEGMENTS: usize = 1024;

/// An image that is open until [`RbdBackend::close`].
pub struct Librbd {
    /// `None` after it was closed.
    image: Mutex<Option<Arc<RbdImage>>>,
    resize_notifier: Arc<ResizeNotifier>,
    cache_bytes: u64,
    key: String,
    is_passed: bool,
    closed: async_channel::Receiver<Result<()>>,
}

impl fmt::Debug for Librbd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Librbd")
    }
}

impl Librbd {
    /// Opens an image and returns it with its size in bytes. Blocks.
    pub(super) fn open(
        address: &RbdAddress,
        options: &RbdOptions,
    ) -> std::result::Result<(Self, u64), OpenError> {
        let (sender, closed) = async_channel::bounded(1);
        let image = RbdImage::open(address, options, sender)?;
        let (resize_notifier, size_bytes, cache_bytes) =
            (Arc::clone(&image.resize_notifier), image.size_bytes, image.cache_bytes());
        let (key, is_passed) = (image.key.clone(), image.is_passed);
        let image = Mutex::new(Some(Arc::new(image)));
        Ok((Self { image, resize_notifier, cache_bytes, key, is_passed, closed }, size_bytes))
    }

    /// Identity of the image, independent of its name.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// True if another process has it open and passes it.
    pub(super) fn is_passed(&self) -> bool {
        self.is_passed
    }

    /// Reads the first `count` bytes, or fewer if the image is smaller. Blocks.
    pub(super) fn first_bytes(&self, count: usize) -> Result<Vec<u8>> {
        self.image()?.first_bytes(count)
    }

    /// Maximum size of the library's cache of this image, in bytes.
    pub(super) fn cache_bytes(&self) -> u64 {
        self.cache_bytes
    }

    fn image(&self) -> Result<Arc<RbdImage>> {
        let image = self.image.lock().unwrap_or_else(PoisonError::into_inner);
        image.as_ref().map(Arc::clone).ok_or(Error::SHUTDOWN)
    }

    async fn run(
        &self,
        operation: RbdOperationKind,
        slot: RbdRequestSlot,
        segments: Segments,
    ) -> (Result<u64>, Segments) {
        let image = match self.image() {
            Ok(image) => image,
            Err(error) => return (Err(error), segments),
        };
        RbdOperation::start(&image, operation, slot, segments).await
    }

    /// Runs a call on its own thread. If the future is dropped, the thread continues.
    async fn run_on_thread<T: Send + 'static>(
        &self,
        call: impl FnOnce(&RbdImage) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let image = self.image()?;
        let (sender, receiver) = async_channel::bounded(1);
        let thread = std::thread::Builder::new().name("rbd call".to_owned());
        let started = thread.spawn(move || {
            // Fails only if the caller was cancelled.
            let _ = sender.try_send(call(&image));
        });
        started.map_err(Error::from)?;
        receiver.recv().await.unwrap_or(Err(Error::IO))
    }
}

/// True if the segments can be passed to the library without a copy.
fn are_plain(segments: &Segments) -> bool {
    segments.as_slice().len() <= MAX_SEGMENTS
        && segments.iter().all(|segment| matches!(segment, Segment::Own(_)))
}

impl RbdBackend for Librbd {
    async fn read(
        &self,
        slot: RbdRequestSlot,
        offset: u64,
        mut target: Segments,
    ) -> (Result<usize>, Segments) {
        let count = |result: Result<u64>| result.map(|count| usize::try_from(count).unwrap_or(usize::MAX));
        if are_plain(&target) {
            let (result, target) = self.run(RbdOperationKind::Read { offset }, slot, target).await;
            return (count(result), target);
        }
        let bounce = IoBuffer::new(target.len());
        let (result, bounce) = self.run(RbdOperationKind::Read { offset }, slot, bounce.into()).await;
        if result.is_ok() {
            target.copy_from(&bounce.joined());
        }
        (count(result), target)
    }

    async fn write(&self, slot: RbdRequestSlot, offset: u64, data: Segments) -> Result<()> {
        let data = if are_plain(&data) { data } else { data.joined().into() };
        self.run(RbdOperationKind::Write { offset }, slot, data).await.0.map(drop)
    }

    async fn flush(&self, slot: RbdRequestSlot) -> Result<()> {
        self.run(RbdOperationKind::Flush, slot, Segments::default()).await.0.map(drop)
    }

    async fn write_zeroes(
        &self,
        slot: RbdRequestSlot,
        offset: u64,
        length: u64,
        is_thick: bool,
    ) -> Result<()> {
        let operation = RbdOperationKind::WriteZeroes { offset, length, is_thick };
        self.run(operation, slot, Segments::default()).await.0.map(drop)
    }

    async fn discard(&self, slot: RbdRequestSlot, offset: u64, length: u64) -> Result<()> {
        self.run(RbdOperationKind::Discard { offset, length }, slot, Segments::default()).await.0.map(drop)
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        self.run_on_thread(move |image| image.resize(size_bytes)).await
    }

    async fn size_bytes(&self) -> Result<u64> {
        self.run_on_thread(RbdImage::current_size).await
    }

    async fn stored_size(&self) -> Result<Option<u64>> {
        self.run_on_thread(RbdImage::stored_size).await
    }

    async fn allocated(&self, range: Range<u64>, max_pieces: usize) -> Result<Option<Vec<Range<u64>>>> {
        self.run_on_thread(move |image| image.allocated(&range, max_pieces)).await
    }

    async fn release_lock(&self) -> Result<()> {
        self.run_on_thread(RbdImage::release_lock).await
    }

    async fn resume(&self, new_clients: &[u64]) -> Result<ResumeOutcome> {
        let new_clients = new_clients.to_vec();
        self.run_on_thread(move |image| image.resume(&new_clients)).await
    }

    async fn blocklist(&self, clients: &[u64]) -> Result<()> {
        let clients = clients.to_vec();
        self.run_on_thread(move |image| image.blocklist(&clients)).await
    }

    fn resize_notifier(&self) -> &Arc<ResizeNotifier> {
        &self.resize_notifier
    }

    async fn close(&self) -> Result<()> {
        let image = self.image.lock().unwrap_or_else(PoisonError::into_inner).take();
        if image.is_none() {
            return Ok(());
        }
        drop(image);
        self.closed.recv().await.unwrap_or(Ok(()))
    }
}
