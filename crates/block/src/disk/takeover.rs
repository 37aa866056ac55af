//! A disk whose image goes over to another process of this host, which goes on with it: an upgrade
//! of the daemon.
//!
//! ```text
//!   this process                         the other
//!   in use ── stay_away? ── lay_down ─►  take_up ── in use
//!             └── nobody is inside ──┘
//!   in use ◄────────── take_up            (where the other fails before)
//! ```
//!
//! Descriptors pass between them with their locks. What the page cache has is everybody's, so
//! nothing is flushed but what a format orders. Never decides who goes on: both processes agree on
//! that, and only one of them uses the image.

use std::io;

use policy::time::Duration;

use super::Disk;
use crate::{
    error::Error,
    reactor,
    storage::{OpenError, PassedFile},
};

/// How often it is looked again whether the kernel is done. It tells nobody.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How long storage may take while everybody waits: for what nobody waited for to end, and for
/// servers to make durable what came last.
const AT_REST: Duration = Duration::from_secs(5);
/// How long an image may take to be written while it is still in use: whoever takes over waits.
const TO_LIGHTEN: Duration = Duration::from_secs(20);

/// Why a disk cannot go over to another process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// Its data is in this process alone.
    #[error("its data is in memory of this process")]
    Memory,
    /// The library that has it open cannot pass it on.
    #[error("its image is in a Ceph cluster, which has it locked for this process")]
    Cluster,
    /// Clients wait until somebody lets it go on.
    #[error("an error has stopped it (`weir resume` lets it go on)")]
    Stopped,
    /// Another client of it may read what was there before.
    #[error(
        "its image is at an NBD server, and that what one client writes another reads is only certain with CAN_MULTI_CONN, and not with cache=unsafe"
    )]
    Remote,
    /// Nothing is written to it any more.
    #[error("its image was found corrupt, or its writes were lost")]
    Broken,
}

impl Disk {
    /// Whether it can go over to another process, as it is now.
    ///
    /// # Errors
    /// [`NotTaken`].
    pub fn check_takeover(&self) -> Result<(), NotTaken> {
        if self.image.storage().is_memory() {
            return Err(NotTaken::Memory);
        }
        if self.image.storage().is_in_cluster() {
            return Err(NotTaken::Cluster);
        }
        let mut remote = self.image.files().filter(|storage| storage.remote().is_some());
        if !self.image.is_read_only() && remote.any(|storage| !storage.is_common()) {
            return Err(NotTaken::Remote);
        }
        if self.failures.stopped_by().is_some() {
            return Err(NotTaken::Stopped);
        }
        if self.image.storage().has_lost_writes() {
            return Err(NotTaken::Broken);
        }
        Ok(())
    }

    /// Other descriptors of the files that it has open to write to.
    ///
    /// # Errors
    /// Where there are no more to be had.
    pub fn descriptors(&self) -> io::Result<Vec<PassedFile>> {
        self.image.descriptors()
    }

    /// Whether another process has its files, so that [`Disk::take_up`] comes before the first
    /// request.
    pub fn is_passed(&self) -> bool {
        self.image.is_passed()
    }

    /// Whether another process has it, and goes on with it for all that is known here: it is not to
    /// be written to, flushed or closed.
    pub fn is_anothers(&self) -> bool {
        self.image.is_anothers()
    }

    /// Writes what a format keeps in memory, and what a server has not written yet, while it is
    /// still in use, so that [`Disk::lay_down`] has little to do. No longer than [`TO_LIGHTEN`].
    ///
    /// # Errors
    /// The image's; [`Error::TIMED_OUT`].
    pub async fn lighten(&self) -> Result<(), Error> {
        let written = async {
            // What comes while a server flushes for long is little beside that.
            for _ in 0..2 {
                if let crate::image::Image::Qcow2(qcow2) = &*self.image {
                    qcow2.flush().await?;
                }
                if !self.image.is_read_only() {
                    self.image.flush_servers().await?;
                }
            }
            Ok(())
        };
        reactor::timeout(TO_LIGHTEN, written).await.unwrap_or(Err(Error::TIMED_OUT))
    }

    /// Brings what is in memory to the files, so that another process can take it up. Nobody sends
    /// requests, until [`Disk::take_up`]. One that is handed over is [held](Disk::keep_held). Storage
    /// that does not answer is waited for twice [`AT_REST`].
    ///
    /// # Errors
    /// The image's, [`Error::TIMED_OUT`]; it can be taken up again.
    pub async fn lay_down(&self) -> Result<(), Error> {
        let is_quiet = async {
            self.prefetch.stop().await;
            // What nobody waited for may still be on its way. It ends soon, and tells nobody.
            while self.image.is_busy() {
                reactor::sleep_until(reactor::now() + LOOK_AGAIN).await;
            }
        };
        reactor::timeout(AT_REST, is_quiet).await.map_err(|_| Error::TIMED_OUT)?;
        if self.image.is_read_only() {
            return Ok(());
        }
        self.image.lay_down().await?;
        reactor::timeout(AT_REST, self.image.flush_servers()).await.unwrap_or(Err(Error::TIMED_OUT))
    }

    /// Reads what is in the files, here or in another process than the one that laid it down. One
    /// that is handed over is held since, by the one who has called this and is to let it
    /// [go](Disk::let_go).
    ///
    /// # Errors
    /// [`OpenError`]: it is not to be used.
    pub async fn take_up(&self) -> Result<(), OpenError> {
        if !self.image.is_read_only() {
            self.image.take_over().await?;
        }
        self.come_held();
        self.prefetch.go_on();
        Ok(())
    }
}
