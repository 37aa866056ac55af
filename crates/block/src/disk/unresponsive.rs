//! Disks whose file system does not answer, such as one of a hung NFS or FUSE server.
//!
//! Requests wait for the file system without a time limit, because it may answer again. Only the
//! operations that must end in bounded time check whether it answers: the end of the daemon, and
//! the removal of a disk. A slow flush alone is no failure: a device may have much to write.

use policy::time::Duration;

use image::Image;
use storage::FilesClosed;

use super::Disk;
use reactor::error::{Error, Result};

/// Time without a reply to a query of a file's length after which a file system is unresponsive.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

impl Disk {
    /// Waits until a file system below the disk has not answered for ten seconds. Then fails the
    /// requests that wait for the files of the disk, and all later ones, with [`Error::TIMED_OUT`].
    pub async fn abandon_when_unresponsive(&self) {
        while self.responds_within(RESPONSE_TIMEOUT).await {
            reactor::sleep_until(reactor::now() + CHECK_INTERVAL).await;
        }
        let timeout_s = RESPONSE_TIMEOUT.as_secs();
        tracing::error!(
            disk = %self.name, timeout_s,
            "the file system does not answer: the disk is abandoned"
        );
        self.image.in_use().iter().for_each(|image| image.abandon());
    }

    /// True if all files have answered, also those of an image that was replaced and still has
    /// requests.
    async fn responds_within(&self, timeout: Duration) -> bool {
        for image in self.image.in_use() {
            if image.request_within(timeout).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Runs `work`. Abandons the disk if a file system below it stops answering, so that `work`
    /// fails instead of waiting.
    ///
    /// # Errors
    /// Errors of `work`.
    pub async fn run_unless_unresponsive<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        let mut abandoning = std::pin::pin!(self.abandon_when_unresponsive());
        let mut is_abandoned = false;
        // The work is polled in any case: after the disk is abandoned it ends with an error.
        std::future::poll_fn(|context| {
            if !is_abandoned {
                is_abandoned = abandoning.as_mut().poll(context).is_ready();
            }
            work.as_mut().poll(context)
        })
        .await
    }

    /// Returns the notification that the disk's files are closed, which follows its last use.
    pub fn closed(&self) -> FilesClosed {
        let images = self.image.in_use();
        FilesClosed::of(images.iter().flat_map(|image| image.chain()).flat_map(Image::files))
    }

    /// Reads the size again, as [`Disk::refresh_size`] does, but waits for the file system for at
    /// most `timeout`.
    ///
    /// # Errors
    /// Errors of [`Disk::refresh_size`], and [`Error::TIMED_OUT`]. Then [`Disk::size_bytes`] is the
    /// last known size.
    pub async fn refresh_size_within(&self, timeout: Duration) -> Result<u64> {
        reactor::timeout(timeout, self.refresh_size()).await.unwrap_or(Err(Error::TIMED_OUT))
    }
}
