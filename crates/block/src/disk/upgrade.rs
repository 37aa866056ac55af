//! Transfer of a disk's image to another process of this host: an upgrade of the daemon.
//!
//! ```text
//!   old process                          new process
//!   in use ── quiesced ── suspend ───►   resume ── in use
//!             (no request in flight)
//!   in use ◄────────── resume             (if the new process fails before it resumes)
//! ```
//!
//! File descriptors are passed with their locks. Both processes share the page cache, so only the
//! format's metadata is written. An RBD image is open in both processes: `suspend` releases its
//! lock, `resume` acquires it again, in either process, and requests wait in between. Never decides
//! which process continues: both agree on that, and only one of them uses the image.

use std::io;

use policy::time::Duration;

use super::Disk;
use crate::layer::copy_before_write::PointFailure;
use image::Image;
use reactor::error::Error;
use storage::{OpenError, PassedFile};

/// Interval at which operations in flight in the kernel are checked. There is no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Timeout of each of the two waits in [`Disk::suspend`]. The first is for operations of cancelled
/// requests. The second is for the storage: NBD servers flush the last writes, and Ceph clusters
/// store them and release the lock.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of [`Disk::close_own`]; the new process may wait meanwhile.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of [`Disk::preflush`]. The disk is still in use, but the new process waits.
const PREFLUSH_TIMEOUT: Duration = Duration::from_secs(20);

/// Reason why a disk cannot be transferred to another process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UpgradeRefusal {
    /// Its data is in the memory of this process.
    #[error("its data is in memory of this process")]
    Memory,
    /// The disk is stopped by an error, and clients wait for `resume`.
    #[error("an error has stopped it (`weir resume` continues it)")]
    Stopped,
    /// A job is running, whose state is in this process.
    #[error("a job of it is running (`weir job cancel` ends it)")]
    Job,
    /// The new process, another client of the server, may read stale data.
    #[error(
        "its image is on an NBD server without NBD_FLAG_CAN_MULTI_CONN, or uses cache=unsafe, so \
         the new process might read stale data"
    )]
    Remote,
    /// The image is not writable any more.
    #[error(
        "its image is not writable any more: it is corrupt, writes to it were lost, or the Ceph \
         cluster has blocklisted weir"
    )]
    Broken,
}

impl Disk {
    /// Checks that the disk can be transferred now.
    ///
    /// # Errors
    /// [`UpgradeRefusal`].
    pub fn check_upgrade(&self) -> Result<(), UpgradeRefusal> {
        let image = self.image();
        if image.storage().is_memory() {
            return Err(UpgradeRefusal::Memory);
        }
        if self.has_job() {
            return Err(UpgradeRefusal::Job);
        }
        // The new process must read what this process has written to a server.
        let mut remote = image.files().filter(|storage| storage.remote_status().is_some());
        if !image.is_read_only() && remote.any(|storage| !storage.has_shared_flushes()) {
            return Err(UpgradeRefusal::Remote);
        }
        if self.failures.stopped_by().is_some() {
            return Err(UpgradeRefusal::Stopped);
        }
        if image.storage().has_lost_writes() || self.is_blocklisted() {
            return Err(UpgradeRefusal::Broken);
        }
        Ok(())
    }

    /// Duplicates of the descriptors of files that are open for writing, to be sent to the new
    /// process.
    ///
    /// # Errors
    /// The process has too many open files.
    pub fn duplicate_descriptors(&self) -> io::Result<Vec<PassedFile>> {
        self.image.with(Image::descriptors)
    }

    /// True if another process had the disk's files open before; then [`Disk::resume`] must precede
    /// the first request.
    pub fn is_passed(&self) -> bool {
        self.image.with(Image::is_passed)
    }

    /// True if another process may still resume the disk: this process must not write, flush or
    /// close it.
    pub fn may_be_resumed_elsewhere(&self) -> bool {
        self.image.with(Image::is_locked_elsewhere)
    }

    /// True if a Ceph cluster has blocklisted this process, which is permanent.
    pub fn is_blocklisted(&self) -> bool {
        self.image.with(Image::is_blocklisted)
    }

    /// Blocklists clients that still have the disk's RBD image open for writing, by the client
    /// numbers that they have [announced](storage::PassedFiles).
    ///
    /// # Errors
    /// As reported by the cluster.
    pub async fn blocklist(&self, clients: &[u64]) -> Result<(), Error> {
        self.image().blocklist(clients).await
    }

    /// Closes the RBD images that this process has open, after another process has continued the
    /// disk. Otherwise the cluster would see this client for another 30 s. Takes at most
    /// [`CLOSE_TIMEOUT`].
    pub async fn close_own(&self) {
        // The new process continues in any case, so the result is ignored.
        let _ = reactor::timeout(CLOSE_TIMEOUT, self.image().close_local_handles()).await;
    }

    /// Writes cached metadata, and flushes to servers and clusters, while the disk is still in use,
    /// so that [`Disk::suspend`] is fast. Takes at most [`PREFLUSH_TIMEOUT`].
    ///
    /// # Errors
    /// The image's error; [`Error::TIMED_OUT`].
    pub async fn preflush(&self) -> Result<(), Error> {
        let image = self.image();
        let written = async {
            // The second flush is short: it covers only writes that arrived during the first.
            for _ in 0..2 {
                if let Image::Qcow2(qcow2) = &*image {
                    qcow2.flush().await?;
                }
                if !image.is_read_only() {
                    image.flush_servers().await?;
                }
            }
            Ok(())
        };
        reactor::timeout(PREFLUSH_TIMEOUT, written).await.unwrap_or(Err(Error::TIMED_OUT))
    }

    /// Suspends the disk: writes cached data to the files, so that another process can resume it.
    /// No request may be in flight or made until [`Disk::resume`]. A job fails, and none can begin
    /// until then: [`Disk::check_upgrade`] has refused those before. A disk with handover
    /// is [held](Disk::retain). Storage that does not answer is waited for at most twice
    /// [`QUIESCE_TIMEOUT`].
    ///
    /// # Errors
    /// The image's error, [`Error::TIMED_OUT`]; the disk can be resumed.
    pub async fn suspend(&self) -> Result<(), Error> {
        self.copy_before_write.suspend(true).fail(PointFailure::HandedOver);
        let is_quiet = async {
            self.prefetch.stop().await;
            // Operations of cancelled requests may still be in flight. They end soon, without
            // notification.
            while self.image.with(Image::is_busy) {
                reactor::sleep_until(reactor::now() + POLL_INTERVAL).await;
            }
        };
        reactor::timeout(QUIESCE_TIMEOUT, is_quiet).await.map_err(|_| Error::TIMED_OUT)?;
        let image = self.image();
        if image.is_read_only() {
            return Ok(());
        }
        // Metadata first: flushing servers and leaving clusters must cover it.
        image.write_metadata_for_handover().await?;
        let remote = async {
            image.flush_servers().await?;
            image.suspend_clusters().await
        };
        reactor::timeout(QUIESCE_TIMEOUT, remote).await.unwrap_or(Err(Error::TIMED_OUT))
    }

    /// Resumes the disk and reads the files' metadata again, in the process that suspended it or in
    /// another one. A disk with handover is then held, and the caller must release it by
    /// [`Disk::release`]. An RBD image waits for the cluster without a timeout, unless another
    /// process [can resume it](Disk::may_be_resumed_elsewhere). `new_clients` are the RBD clients
    /// of the process that the disk was suspended for, if that process must not use the disk any
    /// more. They are [blocklisted](Disk::blocklist) first.
    ///
    /// # Errors
    /// [`OpenError`]: the disk must not be used.
    pub async fn resume(&self, new_clients: &[u64]) -> Result<(), OpenError> {
        let image = self.image();
        if !image.is_read_only() {
            let old_size = self.size_bytes();
            image.take_over(new_clients).await?;
            self.follow_size();
            // Another client may have resized the image in between.
            if image.storage().is_in_cluster() {
                self.notify_size(old_size, self.size_bytes());
            }
        }
        // After the metadata is read: requests are accepted from now on.
        self.copy_before_write.suspend(false);
        self.mark_held();
        self.prefetch.restart();
        Ok(())
    }
}
