//! A disk whose image passes between processes: the two ends of a live migration, on one host or
//! with shared storage.
//!
//! ```text
//!   opened ─► released ◄── the last holder releases: all written, nothing in flight, unlocked
//!                │                                        ▲
//!                └─ the first holder: locks, metadata read again ─► held
//! ```
//!
//! The image's locks decide which process may use it, so there are never two writers. A holder is
//! a caller that sends requests, such as an export with clients. While the image is released no
//! request reaches it: a request without a holder fails, and closing writes nothing.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use policy::time::{Duration, Instant};

use super::Disk;
use crate::layer::copy_before_write::PointFailure;
use image::Image;
use reactor::error::{Error, Result};
use storage::{OpenError, RangeGuard, RangeLocks};

/// Interval at which the locks are tried. The kernel does not notify when they are released.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Time after which the log reports that the disk waits for another process.
const LOG_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct Handover {
    /// True if the locks are held and cached metadata is valid. Changes only while no request is in
    /// flight.
    held: AtomicBool,
    in_flight: RangeLocks,
    /// Serializes acquiring and releasing.
    transition: RangeLocks,
    holders: Mutex<usize>,
}

/// Reason why a disk cannot be held.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoldError {
    /// Another process holds the image, or its content is unusable.
    #[error(transparent)]
    Image(#[from] OpenError),
    /// `is_wanted` returned false.
    #[error("the request was cancelled")]
    Cancelled,
}

impl Handover {
    /// Begins a request, which ends when the guard is dropped. Fails with [`Error::SHUTDOWN`] while
    /// the image is released.
    pub(super) async fn enter(&self) -> Result<RangeGuard<'_>> {
        let guard = self.in_flight.shared(0..1).await;
        if self.held.load(SeqCst) { Ok(guard) } else { Err(Error::SHUTDOWN) }
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.load(SeqCst)
    }

    fn change_holders(&self, change: impl FnOnce(&mut usize)) -> usize {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut holders);
        *holders
    }
}

impl Disk {
    /// True if its image was opened for [handover](storage::OpenOptions::handover), so that it must
    /// be [held](Disk::hold) for requests.
    pub fn has_handover(&self) -> bool {
        self.handover.is_some()
    }

    /// Acquires the image, if this disk has handover, for a caller that is about to send requests.
    /// Each success must be followed by one call of [`Disk::release`]. Waits for the process that
    /// holds the image, for `timeout` at most and while `is_wanted` returns true. The future must
    /// not be dropped before it completes.
    ///
    /// # Errors
    /// [`HoldError`].
    pub async fn hold(
        &self,
        timeout: Duration,
        is_wanted: impl Fn() -> bool,
    ) -> std::result::Result<(), HoldError> {
        let Some(handover) = &self.handover else { return Ok(()) };
        let began = reactor::now();
        let _transition = handover.transition.exclusive(0..1).await;
        if !handover.is_held() {
            // Locks first, then the metadata: the previous process may write until it has released
            // them.
            self.acquire_locks(began, timeout, is_wanted).await?;
            let result = {
                let _drained = handover.in_flight.exclusive(0..1).await;
                // Declared as a change of the whole disk, so that prefetched data from before is
                // discarded.
                let image = self.image();
                let result = self.prefetch.change(0, u64::MAX, image.take_over(&[])).await;
                // Another process may have resized the image.
                self.follow_size();
                handover.held.store(result.is_ok(), SeqCst);
                result
            };
            if let Err(error) = result {
                self.release_locks().await;
                return Err(error.into());
            }
            // Debug level: a guest triggers this whenever it resets its disk.
            tracing::debug!(disk = %self.name, "acquired the image");
        }
        // Counted only once the image is usable.
        handover.change_holders(|holders| *holders += 1);
        Ok(())
    }

    async fn acquire_locks(
        &self,
        began: Instant,
        timeout: Duration,
        is_wanted: impl Fn() -> bool,
    ) -> std::result::Result<(), HoldError> {
        let mut is_logged = false;
        loop {
            let waited: Duration = reactor::now() - began;
            // On a blocking thread: locking makes system calls on the file. The attempt after the
            // timeout is the last: it returns an error instead of false.
            let (image, last) = (self.image(), waited >= timeout);
            if reactor::run_blocking(move || image.take_locks(last)).await? {
                return Ok(());
            }
            if !is_wanted() {
                return Err(HoldError::Cancelled);
            }
            if waited >= LOG_AFTER && !std::mem::replace(&mut is_logged, true) {
                tracing::info!(
                    disk = %self.name,
                    "another process holds the image; waiting for its release"
                );
            }
            reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
        }
    }

    /// Releases what [`Disk::hold`] acquired. When the last holder has released, everything is
    /// written and another process can acquire the image. If writing failed, the image stays held,
    /// and the log reports it.
    pub async fn release(&self) {
        let Some(handover) = &self.handover else { return };
        let _transition = handover.transition.exclusive(0..1).await;
        // Other holders remain.
        if handover.change_holders(|holders| *holders -= 1) > 0 {
            return;
        }
        // The guest moves to another process; a backup must not delay that: a large change in
        // flight saves no more old data.
        self.fail_job(PointFailure::HandedOver);
        // Waits for the requests in flight; later ones wait here and fail once `held` is false.
        let _drained = handover.in_flight.exclusive(0..1).await;
        // One may have begun before the image was drained.
        self.fail_job(PointFailure::HandedOver);
        // Written before the locks are released, or the next process would read stale metadata.
        if let Err(error) = self.image().hand_over().await {
            tracing::error!(
                disk = %self.name, %error,
                "the image stays locked, so other processes cannot open it: its pending changes \
                 cannot be written"
            );
            return;
        }
        // Before the locks are released: requests must fail from now on.
        handover.held.store(false, SeqCst);
        self.release_locks().await;
        tracing::debug!(disk = %self.name, "the image is free for another process");
    }

    /// Adds a holder, so that the image stays in this process after the current holders release it.
    /// Returns false if there is no holder, or the disk has no handover.
    pub async fn retain(&self) -> bool {
        let Some(handover) = self.handover.as_ref().filter(|handover| handover.is_held()) else {
            return false;
        };
        // A release in progress finishes first.
        let _transition = handover.transition.exclusive(0..1).await;
        let is_held = handover.is_held();
        if is_held {
            handover.change_holders(|holders| *holders += 1);
        }
        is_held
    }

    /// Makes the caller a holder of an image that was received, with its locks, from a process that
    /// held it. Does nothing without handover, or if the image is held already.
    pub(super) fn mark_held(&self) {
        if let Some(handover) = self.handover.as_ref().filter(|handover| !handover.is_held()) {
            handover.change_holders(|holders| *holders += 1);
            handover.held.store(true, SeqCst);
        }
    }

    async fn release_locks(&self) {
        // Operations of cancelled requests may still be in flight. They end soon, without
        // notification.
        while self.image.with(Image::is_busy) {
            reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
        }
        let image = self.image();
        reactor::run_blocking(move || image.release_locks()).await;
    }

    /// Begins a request; `None` if the disk has no handover.
    pub(super) async fn enter(&self) -> Result<Option<RangeGuard<'_>>> {
        match &self.handover {
            None => Ok(None),
            Some(handover) => handover.enter().await.map(Some),
        }
    }

    /// True if the image is released, so that another process may hold it.
    pub fn is_released(&self) -> bool {
        self.handover.as_ref().is_some_and(|handover| !handover.is_held())
    }
}

#[cfg(test)]
#[path = "handover_tests.rs"]
mod tests;
