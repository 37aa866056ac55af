//! The image that a disk's requests use now, which can be replaced while clients use the disk.
//!
//! ```text
//!   request of thread 1 ─► slot 1 ─► ImageHandle ─┐
//!   request of thread 2 ─► slot 2 ─► ImageHandle ─┴─► Image
//! ```
//!
//! A request holds the image until it ends, so an image that was replaced lives as long as a
//! request uses it. A reference count that all threads change would cost each request two transfers
//! of a cache line; each thread has a handle of its own instead. A slot is filled by the first
//! request of its thread, so an idle disk has no handles.
//!
//! Never decides when an image may be replaced: see
//! [`Disk::switch_image`](crate::disk::Disk::switch_image).

use std::{
    ops::Deref,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Release},
        },
    },
};

use arc_swap::{ArcSwapOption, Guard};

use image::Image;
use storage::epoch_gate::{slot_of_thread, slots};

/// The current image of a disk. See the head of this file.
#[derive(Debug)]
pub(crate) struct CurrentImage {
    slots: Box<[ArcSwapOption<ImageHandle>]>,
    /// Number of replacements that have completed.
    replacements: AtomicU64,
    images: Mutex<DiskImages>,
}

/// The image, for requests of one batch that do not wait. See [`CurrentImage::for_batch`].
#[derive(Debug)]
pub(crate) struct BatchImage {
    handle: Guard<Option<Arc<ImageHandle>>>,
    replacements: u64,
}

impl BatchImage {
    pub(crate) fn image(&self) -> &Image {
        self.handle.as_deref().expect("filled by `for_batch`")
    }
}

#[derive(Debug)]
struct DiskImages {
    current: Arc<Image>,
    /// Images that were replaced, which requests in flight may still use.
    replaced: Vec<Weak<Image>>,
}

/// The image, held by requests of one thread. Their count is on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct ImageHandle(Arc<Image>);

impl Deref for ImageHandle {
    type Target = Image;

    fn deref(&self) -> &Image {
        &self.0
    }
}

impl CurrentImage {
    pub(crate) fn new(image: Image) -> Self {
        Self {
            slots: (0..slots()).map(|_| ArcSwapOption::empty()).collect(),
            replacements: AtomicU64::new(0),
            images: Mutex::new(DiskImages { current: Arc::new(image), replaced: Vec::new() }),
        }
    }

    /// The image, for a request. A change must call this after it has passed the gate, or it could
    /// reach an image that was replaced while the change waited.
    pub(crate) fn get(&self) -> Arc<ImageHandle> {
        let slot = self.slot();
        slot.load_full().unwrap_or_else(|| self.fill(slot))
    }

    /// Calls `look` with the image; cheaper than [`CurrentImage::get`], for what does not wait.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&Image) -> T) -> T {
        let slot = self.slot();
        match &*slot.load() {
            Some(handle) => look(handle),
            None => look(&self.fill(slot)),
        }
    }

    /// The image, for a batch of requests that do not wait and have all been taken from their
    /// client. A change must check [`CurrentImage::is_current`] after it has passed the gate.
    pub(crate) fn for_batch(&self) -> BatchImage {
        // Loaded before the image, and increased after the slots have been cleared: so the image is
        // at least as new as the count.
        let replacements = self.replacements.load(Acquire);
        let handle = self.slot().load();
        let handle = match *handle {
            Some(_) => handle,
            None => Guard::from_inner(Some(self.fill(self.slot()))),
        };
        BatchImage { handle, replacements }
    }

    /// True if `image` has not been replaced. A replacement in progress is not noticed: the gate
    /// excludes it.
    pub(crate) fn is_current(&self, image: &BatchImage) -> bool {
        self.replacements.load(Acquire) == image.replacements
    }

    /// The image, for callers that keep it or are rare.
    pub(crate) fn shared(&self) -> Arc<Image> {
        Arc::clone(&self.lock().current)
    }

    /// The image, and replaced ones that are still in use outside of its backing chain.
    pub(crate) fn in_use(&self) -> Vec<Arc<Image>> {
        let images = self.lock();
        let is_below = |old: &Arc<Image>| images.current.chain().any(|image| std::ptr::eq(image, &**old));
        let replaced = images.replaced.iter().filter_map(Weak::upgrade).filter(|old| !is_below(old));
        std::iter::once(Arc::clone(&images.current)).chain(replaced).collect()
    }

    /// Replaces the image and returns the previous one. Requests that begin after the call use
    /// `new`.
    pub(crate) fn replace(&self, new: Arc<Image>) -> Arc<Image> {
        let mut images = self.lock();
        let old = std::mem::replace(&mut images.current, new);
        images.replaced.retain(|image| image.strong_count() > 0);
        images.replaced.push(Arc::downgrade(&old));
        // Under the lock: a concurrent `fill` must not put the old image back.
        self.slots.iter().for_each(|slot| slot.store(None));
        self.replacements.fetch_add(1, Release);
        old
    }

    fn slot(&self) -> &ArcSwapOption<ImageHandle> {
        &self.slots[slot_of_thread()]
    }

    #[cold]
    fn fill(&self, slot: &ArcSwapOption<ImageHandle>) -> Arc<ImageHandle> {
        let images = self.lock();
        let handle = Arc::new(ImageHandle(Arc::clone(&images.current)));
        slot.store(Some(Arc::clone(&handle)));
        handle
    }

    fn lock(&self) -> MutexGuard<'_, DiskImages> {
        // Valid after each step of a change.
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use image::RawImage;
    use reactor::sim;
    use storage::Storage;

    use super::*;

    fn image(bytes: u64) -> Image {
        Image::Raw(RawImage::new(Storage::memory(bytes)))
    }

    #[test]
    fn requests_in_flight_keep_their_image_and_later_ones_use_the_new_one() {
        sim::run(1, async {
            let current = CurrentImage::new(image(512));
            let in_flight = current.get();
            let old = current.replace(Arc::new(image(1024)));
            assert_eq!((in_flight.size_bytes(), old.size_bytes()), (512, 512));
            assert_eq!(current.get().size_bytes(), 1024);
            assert_eq!(current.with(Image::size_bytes), 1024);
            assert_eq!(current.shared().size_bytes(), 1024);
            let elsewhere = std::thread::scope(|scope| {
                scope.spawn(|| current.with(Image::size_bytes)).join().expect("no panic")
            });
            assert_eq!(elsewhere, 1024, "each thread");
            assert_eq!(Arc::strong_count(&old), 2, "the request in flight");
            drop(in_flight);
            assert_eq!(Arc::strong_count(&old), 1, "no slot has it");
        });
    }

    #[test]
    fn batches_notice_a_replacement() {
        sim::run(1, async {
            let current = CurrentImage::new(image(512));
            let batch = current.for_batch();
            assert!(current.is_current(&batch));
            current.replace(Arc::new(image(1024)));
            assert_eq!((batch.image().size_bytes(), current.is_current(&batch)), (512, false));
            let later = current.for_batch();
            assert_eq!((later.image().size_bytes(), current.is_current(&later)), (1024, true));
        });
    }

    #[test]
    fn replaced_images_are_in_use_until_the_last_request_ends() {
        sim::run(1, async {
            let current = CurrentImage::new(image(512));
            let in_flight = current.get();
            drop(current.replace(Arc::new(image(1024))));
            assert_eq!(current.in_use().len(), 2);
            drop(in_flight);
            assert_eq!(current.in_use().len(), 1);
        });
    }
}
