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
//! nothing is flushed but what a format orders. An image of a cluster both have open; its lock is
//! given up by the one and taken by the other, or by the one again, and in between its requests
//! wait. Never decides who goes on: both processes agree on
//! that, and only one of them uses the image.

use std::io;

use policy::time::Duration;

use super::Disk;
use reactor::error::Error;
use storage::{OpenError, PassedFile};

/// How often it is looked again whether the kernel is done. It tells nobody.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How long storage may take while everybody waits: for what nobody waited for to end, and for
/// servers to make durable what came last, or clusters to have it and let go of it.
const AT_REST: Duration = Duration::from_secs(5);
/// How long it may take to close what nobody here uses any more, while whoever goes on may wait.
const TO_LEAVE: Duration = Duration::from_secs(2);
/// How long an image may take to be written while it is still in use: whoever takes over waits.
const TO_LIGHTEN: Duration = Duration::from_secs(20);

/// Why a disk cannot go over to another process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// Its data is in this process alone.
    #[error("its data is in memory of this process")]
    Memory,
    /// Clients wait until somebody lets it go on.
    #[error("an error has stopped it (`weir resume` lets it go on)")]
    Stopped,
    /// Another client of it may read what was there before.
    #[error(
        "its image is at an NBD server, and that what one client writes another reads is only certain with CAN_MULTI_CONN, and not with cache=unsafe"
    )]
    Remote,
    /// Nothing is written to it any more.
    #[error("its image was found corrupt, its writes were lost, or its cluster has shut weir out")]
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
        let mut remote = self.image.files().filter(|storage| storage.remote().is_some());
        if !self.image.is_read_only() && remote.any(|storage| !storage.is_common()) {
            return Err(NotTaken::Remote);
        }
        if self.failures.stopped_by().is_some() {
            return Err(NotTaken::Stopped);
        }
        if self.image.storage().has_lost_writes() || self.is_lost() {
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

    /// Whether a cluster has shut this process out: then nothing brings its image back.
    pub fn is_lost(&self) -> bool {
        self.image.is_lost()
    }

    /// Has a cluster take nothing more from clients that still have its image open to write to it.
    /// They are told by their numbers there, as they have [announced](storage::Passed) them.
    ///
    /// # Errors
    /// What the cluster says.
    pub async fn shut_out(&self, clients: &[u64]) -> Result<(), Error> {
        self.image.shut_out(clients).await
    }

    /// Closes what is this process's own although another goes on with the image: what it has open
    /// in a cluster, which would see it there for 30 s. No longer than [`TO_LEAVE`].
    pub async fn leave(&self) {
        // Whether that can be done or not, the other goes on.
        let _ = reactor::timeout(TO_LEAVE, self.image.close_own()).await;
    }

    /// Writes what a format keeps in memory, and what a server or a cluster does not have yet,
    /// while it is still in use, so that [`Disk::lay_down`] has little to do. No longer than
    /// [`TO_LIGHTEN`].
    ///
    /// # Errors
    /// The image's; [`Error::TIMED_OUT`].
    pub async fn lighten(&self) -> Result<(), Error> {
        let written = async {
            // What comes while a server flushes for long is little beside that.
            for _ in 0..2 {
                if let image::Image::Qcow2(qcow2) = &*self.image {
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
        let elsewhere = async {
            self.image.flush_servers().await?;
            self.image.leave_clusters().await
        };
        reactor::timeout(AT_REST, elsewhere).await.unwrap_or(Err(Error::TIMED_OUT))
    }

    /// Reads what is in the files, here or in another process than the one that laid it down. One
    /// that is handed over is held since, by the one who has called this and is to let it
    /// [go](Disk::let_go). One whose image is in a cluster waits for that as long as it takes, if it
    /// is not [another's](Disk::is_anothers); `heirs` are those that it was laid down for there and
    /// that are not to have it: they are [shut out](Disk::shut_out) first.
    ///
    /// # Errors
    /// [`OpenError`]: it is not to be used.
    pub async fn take_up(&self, heirs: &[u64]) -> Result<(), OpenError> {
        if !self.image.is_read_only() {
            let before = self.size_bytes();
            self.image.take_over(heirs).await?;
            if self.image.storage().is_in_cluster() {
                self.heard_of_size(before, self.size_bytes());
            }
        }
        self.come_held();
        self.prefetch.go_on();
        Ok(())
    }
}
