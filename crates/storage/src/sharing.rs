//! A storage that several processes use, together or in turn: locks, passed descriptors, and the
//! suspension of RBD images. An upgrade, a migration and a handover to another host use it.

use std::io;

use reactor::error::Result;

use super::{FileStorage, OpenError, PassedFile, Storage, nbd::NbdStorage, rbd::RbdStorage};

impl Storage {
    /// True if other processes may write to it: it was opened despite another writer, or the file
    /// system has no locks.
    pub fn has_other_writers(&self) -> bool {
        self.bottom_file().is_some_and(|file| !file.is_protected())
            || self.bottom_nbd().is_some_and(NbdStorage::is_shared)
    }

    /// See [`OpenOptions::handover`](crate::OpenOptions::handover).
    pub fn has_handover(&self) -> bool {
        self.bottom_file().is_some_and(FileStorage::has_handover)
    }

    /// Tries to lock a file that was opened without locks (see
    /// [`OpenOptions::handover`](crate::OpenOptions::handover)). Returns false if another process
    /// holds them. Blocks, for longer on the `last` attempt, which returns an error instead of
    /// false.
    pub fn try_lock(&self, last: bool) -> std::result::Result<bool, OpenError> {
        self.bottom_file().map_or(Ok(true), |file| file.try_lock(last))
    }

    /// Releases the locks for another process. The file must not be used any more.
    pub fn release_locks(&self) {
        if let Some(file) = self.bottom_file() {
            file.release_locks();
        }
    }

    /// Makes a file read-only for good: later changes fail, and other processes may read it as by
    /// QEMU. No change may be in flight, and all must be durable. Blocks. No effect on other
    /// storage.
    pub fn make_read_only(&self) {
        if let Some(file) = self.bottom_file() {
            file.make_read_only();
        }
    }

    /// Descriptors to pass to the new process of an upgrade; `None` if the bottom is not a file, or
    /// is read-only.
    pub fn descriptors(&self) -> Option<io::Result<PassedFile>> {
        self.bottom_file().filter(|_| !self.read_only()).map(FileStorage::descriptors)
    }

    /// True if another process had it open before: a passed file, or a shared NBD export or RBD
    /// image.
    pub fn is_passed(&self) -> bool {
        self.bottom_file().is_some_and(FileStorage::is_passed)
            || self.bottom_nbd().is_some_and(NbdStorage::is_passed)
            || self.bottom_rbd().is_some_and(RbdStorage::is_passed)
    }

    /// True if it is passed ([`Storage::is_passed`]) and the process that passed it may resume
    /// using it.
    pub fn may_be_resumed_elsewhere(&self) -> bool {
        self.bottom_file().is_some_and(FileStorage::may_be_resumed_elsewhere)
            || self.bottom_nbd().is_some_and(NbdStorage::may_be_resumed_elsewhere)
            || self.bottom_rbd().is_some_and(RbdStorage::may_be_resumed_elsewhere)
    }

    /// True if the Ceph cluster has blocklisted this client, so that every request fails.
    pub fn is_blocklisted(&self) -> bool {
        self.bottom_rbd().is_some_and(RbdStorage::is_lost)
    }

    /// Writes cached data back to the server or the cluster, where another process sees it.
    ///
    /// # Errors
    /// As reported by the server or the cluster.
    pub async fn write_back(&self) -> Result<()> {
        match self.bottom_rbd() {
            Some(image) if !self.read_only() => image.write_back().await,
            None if self.bottom_nbd().is_some() => self.flush().await,
            _ => Ok(()),
        }
    }

    /// Suspends an RBD image so that another process can open it. It must not be used before
    /// [`Storage::resume`].
    ///
    /// # Errors
    /// As reported by the cluster; the image can be resumed.
    pub async fn suspend(&self) -> Result<()> {
        match self.bottom_rbd() {
            Some(image) => image.suspend().await,
            None => Ok(()),
        }
    }

    /// Resumes an RBD image that was suspended, in this process or in another one. `new_clients`
    /// are clients of another process that it was suspended for, but that must not use it: they are
    /// [blocklisted](Storage::blocklist) first.
    ///
    /// # Errors
    /// The reason why it cannot be opened.
    pub async fn resume(&self, new_clients: &[u64]) -> std::result::Result<(), OpenError> {
        match self.bottom_rbd() {
            Some(image) => image.resume(new_clients).await,
            None => Ok(()),
        }
    }

    /// Blocklists clients of the Ceph cluster, by their numbers, that still have this image open
    /// for writing.
    ///
    /// # Errors
    /// As reported by the cluster.
    pub async fn blocklist(&self, clients: &[u64]) -> Result<()> {
        match self.bottom_rbd() {
            Some(image) => image.blocklist(clients).await,
            None => Ok(()),
        }
    }

    /// True if other processes read data that was written and flushed here.
    pub fn has_shared_flushes(&self) -> bool {
        self.bottom_file().is_some() || self.bottom_nbd().is_some_and(NbdStorage::has_shared_flushes)
    }

    /// Records that another process has written, perhaps without a flush: the next flush must reach
    /// the device.
    pub fn note_external_writes(&self) {
        match self {
            Self::File(file) => file.was_changed(),
            Self::Nbd(nbd) => nbd.was_changed(),
            Self::Rbd(image) => image.was_changed(),
            Self::Wrapped(wrapped) => wrapped.inner().note_external_writes(),
            Self::Memory(_) | Self::Null(_) | Self::Simulated(_) => {}
        }
    }
}
