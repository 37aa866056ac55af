//! A disk whose file system does not answer, as a hung NFS or FUSE server has it.
//!
//! Requests wait for the file system as long as it takes, because it may answer again. Only what
//! must end in bounded time looks whether it answers at all: the end of the daemon, and the removal
//! of a disk. A flush that takes long is no reason to give up: a device may have much to write.

use policy::time::Duration;

use super::Disk;
use crate::{
    error::{Error, Result},
    reactor,
};

/// A file system that takes longer to tell a file's length does not answer.
const SILENT: Duration = Duration::from_secs(10);
/// Between two questions.
const AGAIN: Duration = Duration::from_secs(1);

/// Tells when the files of a disk are closed: see [`Disk::closed`].
#[derive(Debug)]
pub struct Closed(Vec<async_channel::Receiver<()>>);

impl Closed {
    /// Waits until all files are closed and their locks are released, but no longer than
    /// `patience`; whether they are.
    pub async fn within(self, patience: Duration) -> bool {
        let closed = async {
            for file in self.0 {
                // Nothing is ever sent.
                let _ = file.recv().await;
            }
        };
        reactor::timeout(patience, closed).await.is_ok()
    }
}

impl Disk {
    /// Waits until a file system below the disk has not answered for ten seconds. Then fails the
    /// requests that wait for the files of the disk, and all later ones, with [`Error::TIMED_OUT`].
    pub async fn give_up_once_silent(&self) {
        while reactor::timeout(SILENT, self.image.ask()).await.is_ok() {
            reactor::sleep_until(reactor::now() + AGAIN).await;
        }
        let patience_s = SILENT.as_secs();
        tracing::error!(disk = %self.name, patience_s, "its file system does not answer: the disk is given up");
        self.image.give_up();
    }

    /// Does `work`, and gives the disk up once a file system below it does not answer, so that
    /// `work` fails instead of waiting.
    ///
    /// # Errors
    /// As `work`.
    pub async fn unless_silent<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        let mut giving_up = std::pin::pin!(self.give_up_once_silent());
        let mut is_given_up = false;
        std::future::poll_fn(|context| {
            if !is_given_up {
                is_given_up = giving_up.as_mut().poll(context).is_ready();
            }
            work.as_mut().poll(context)
        })
        .await
    }

    /// Tells when the files of the disk are closed, once nothing uses it any more.
    pub fn closed(&self) -> Closed {
        Closed(self.image.closed())
    }

    /// Reads the size anew as [`Disk::refresh_size`] does, but waits no longer than `patience` for
    /// the file system.
    ///
    /// # Errors
    /// As there; [`Error::TIMED_OUT`], and [`Disk::size_bytes`] is the last known size.
    pub async fn refresh_size_within(&self, patience: Duration) -> Result<u64> {
        reactor::timeout(patience, self.refresh_size()).await.unwrap_or(Err(Error::TIMED_OUT))
    }
}
