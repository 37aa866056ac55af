//! Syncs of one file, whose failures are never forgotten.
//!
//! The kernel keeps writeback errors for each open file and reports each of them to one caller
//! (`errseq_t`). After that it regards the pages as clean although the device does not have them,
//! so a later sync would succeed and acknowledge data that is lost. Therefore:
//!
//! - All syncs go through the buffered descriptor. No other operation on it consumes errors. A
//!   synchronous write (`RWF_DSYNC`), which consumes them, is made only on a descriptor with
//!   O_DIRECT; through the page cache it is a write and a sync.
//! - One sync runs at a time. Of two at once, the error of a page that both cover would fail only
//!   one of them.
//! - A sync runs to its end, also if its caller is cancelled, so that its result is always seen.
//! - After a failed sync, all later ones fail, if anything was written through the page cache.
//!   Direct writes do not depend on a sync: the device has the data that it accepted.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI32, Ordering::SeqCst},
};

use super::{isolation::FileIsolation, retried};
use reactor::{
    coarse_now,
    error::{Error, Result},
    log_rate_limit::LogRateLimit,
    operation::{self, Fd},
};

use crate::flushes::Flushes;

/// State of the syncs of one open file.
#[derive(Debug)]
pub(super) struct Syncs {
    /// Path of the file, for the log.
    name: String,
    flushes: Flushes,
    /// True if data of the file may be in the page cache only.
    uses_page_cache: AtomicBool,
    /// Error number of a failed sync; zero if none failed.
    lost: AtomicI32,
    failures: LogRateLimit,
}

impl Syncs {
    pub(super) fn new(name: String, uses_page_cache: bool) -> Arc<Self> {
        Arc::new(Self {
            name,
            flushes: Flushes::default(),
            uses_page_cache: uses_page_cache.into(),
            lost: AtomicI32::new(0),
            failures: LogRateLimit::default(),
        })
    }

    /// Records that data was written through the page cache.
    pub(super) fn used_page_cache(&self) {
        if !self.uses_page_cache.load(SeqCst) {
            self.uses_page_cache.store(true, SeqCst);
        }
    }

    /// True if data was lost, so that all later syncs fail.
    pub(super) fn has_lost_writes(&self) -> bool {
        self.lost.load(SeqCst) != 0
    }

    /// Returns once all writes that completed before the call are on stable storage. `fd` is the
    /// buffered descriptor.
    ///
    /// # Errors
    /// As reported by the kernel. If data may be lost, all later calls fail with the same error.
    pub(super) async fn run(self: &Arc<Self>, fd: &Fd, isolation: &Arc<FileIsolation>) -> Result<()> {
        self.check_lost()?;
        // Counts as a change, so that a sync already in progress does not satisfy this call: it
        // does not cover all of these writes.
        drop(self.flushes.begin_change());
        let (syncs, fd, isolation) = (Arc::clone(self), fd.clone(), Arc::clone(isolation));
        let task = async move {
            syncs.flushes.run(|| syncs.sync(&fd, &isolation)).await?;
            syncs.check_lost()
        };
        // Cancelled: the reactor is shutting down and drops its tasks.
        reactor::spawn_detached(task).await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn sync(&self, fd: &Fd, isolation: &FileIsolation) -> Result<()> {
        let sync = async |fd: Fd| retried(|| operation::sync(&fd)).await;
        let result = isolation.operate(fd, sync).await;
        if let Err(error) = result
            // After `abandon` the failure is a timeout of the isolation, not an error of the
            // device.
            && !isolation.is_abandoned()
        {
            self.record_failure(error);
        }
        result
    }

    pub(super) fn record_failure(&self, error: Error) {
        if let Some(suppressed) = self.failures.try_log(coarse_now()) {
            let what = "sync failed: writes since the last one may be lost";
            tracing::error!(file = self.name, %error, suppressed, "{what}");
        }
        if self.uses_page_cache.load(SeqCst) {
            self.lost.store(error.errno(), SeqCst);
        }
    }

    fn check_lost(&self) -> Result<()> {
        match self.lost.load(SeqCst) {
            0 => Ok(()),
            errno => Err(Error::from_errno(errno)),
        }
    }
}
