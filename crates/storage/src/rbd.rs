//! Images of a Ceph cluster, through librbd.
//!
//! ```text
//!   RbdStorage      slots, durability, splitting, extents, a lost lock
//!    │            (ownership: writes wait while another process has the image)
//!    │ RbdBackend
//!    ├─ librbd      the library, loaded when the first image is opened; its callbacks wake tasks
//!    └─ fake        in-memory fake, for tests
//! ```
//!
//! | mode | librbd's cache | a write completes when | flush |
//! | --- | --- | --- | --- |
//! | writeback | on | it is in the cache | writes the cache back |
//! | writethrough | on, holds nothing dirty | the cluster has it | as above |
//! | none | off | the cluster has it | waits for requests in flight |
//! | directsync | off | the cluster has it | as above |
//! | unsafe | on, dirty from the first write on | it is in the cache, also with FUA | nothing |
//!
//! That is QEMU's mapping (`rbd_cache` of Ceph's documentation). An image that is opened for
//! writing is locked, so that no other client of librbd writes to it: see [`librbd`]. If another
//! client breaks that lock, the cluster blocklists this client. From then on nothing is written,
//! and every request fails.
//!
//! During an upgrade the new process opens the image without the lock ([`PassedFiles`]), while the
//! old one has it open. The old process [suspends it](RbdStorage::suspend): all data is in the
//! cluster and the lock is free. Then one of the two [resumes it](RbdStorage::resume). In between
//! nothing is written, and requests wait.
//!
//! Never gives a request a time limit: an abandoned write could still take effect, on top of a
//! later one. The age of the oldest request shows that a cluster does not answer.

mod address;
mod backend;
#[cfg(test)]
mod fake;
#[allow(unsafe_code)]
mod librbd;
mod ownership;
mod resize_notifier;
mod slots;
#[cfg(test)]
mod tests;

use std::{
    future::Future,
    ops::Range,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use policy::time::Duration;

pub use self::librbd::Librbd;
pub use self::librbd::{abandon_closing, is_loaded, load, remedy, wait_for_closing};
pub use self::{address::RbdAddress, resize_notifier::ResizeNotifier};
use self::{
    backend::{RbdBackend, ResumeOutcome},
    ownership::ImageOwnership,
    slots::RbdRequestSlots,
};
use super::{
    BlockSize, CacheMode, Durability, Extent, MAX_EXTENTS, OpenError, PassedFiles, RangeLocks, ZeroOptions,
    align::{AlignedDevice, Alignment},
    probe::{HEADER_BYTES, Probed, probe_ends},
    push_extent,
    resize::ResizeError,
};
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    log_rate_limit::LogRateLimit,
};

/// Maximum bytes of one zeroing or discard request. librbd sends one operation to each object at
/// once: 64 objects of the usual 4 MiB.
const MAX_REQUEST_BYTES: u64 = 256 << 20;
/// Alignment of thick zeroes. librbd (16) splits an unaligned request in three and counts the parts
/// as in flight before it may start them. If another client shrinks the image in that moment, its
/// flush waits for the parts, which wait for it: a deadlock. The unaligned edges are written.
const SECTOR: u64 = 512;
/// Interval at which a read-only image is checked for removal. Until a check, reads may return data
/// that is no longer of the image.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of acquiring the lock while another process can still resume the image.
const RESUME_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum allocation size of OSDs (`bluestore_min_alloc_size`).
const BLOCK: BlockSize = BlockSize { minimum: 4096, preferred: 4096 };

/// An open image, of a cluster or of the fake.
#[derive(Debug)]
pub struct RbdStorage<B = Librbd> {
    backend: B,
    name: String,
    /// Identity: the same for all its names.
    key: String,
    /// Set if another process has it open, which may resume it until
    /// [`PassedFiles::take_ownership`].
    passed_files: Option<PassedFiles>,
    ownership: ImageOwnership,
    cache: CacheMode,
    read_only: bool,
    /// True for a snapshot, which never changes.
    is_snapshot: bool,
    size_bytes: AtomicU64,
    in_flight: Arc<RbdRequestSlots>,
    /// Serializes calls that block a thread of the library for long.
    slow_calls: RangeLocks,
    /// True if another client has broken the lock, or the image was removed.
    is_lost: AtomicBool,
    failures: LogRateLimit,
    /// Number of writes that are only in the library's cache, since the image was opened; and how
    /// many of them a flush has covered.
    cached_writes: AtomicU64,
    flushed_writes: AtomicU64,
}

/// Options of opening an image.
#[derive(Clone, Debug)]
pub(super) struct RbdOptions {
    pub(super) cache: CacheMode,
    pub(super) read_only: bool,
    pub(super) force_share: bool,
    /// Set if another process may have this image open, for images that are opened for writing.
    pub(super) passed: Option<PassedFiles>,
}

/// Opens an image, and probes its first bytes if `probes`. Blocks: if the cluster does not answer,
/// for `client_mount_timeout`.
pub(super) fn open(
    address: &RbdAddress,
    options: RbdOptions,
    probes: bool,
) -> std::result::Result<(RbdStorage, Probed), OpenError> {
    let options = RbdOptions { read_only: options.read_only || address.snapshot.is_some(), ..options };
    let (backend, size_bytes) = Librbd::open(address, &options)?;
    let probed = if probes {
        let header =
            backend.first_bytes(HEADER_BYTES.min(usize::try_from(size_bytes).unwrap_or(HEADER_BYTES)));
        probe_ends(
            &header.map_err(|error| {
                let why = format!("its first bytes cannot be read: {error}");
                OpenError::new(&address.name(), why, "check the cluster with `ceph -s`")
            })?,
            &[],
        )
    } else {
        Probed::Raw
    };
    let key = backend.key().to_owned();
    let options = RbdOptions { passed: options.passed.filter(|_| backend.is_passed()), ..options };
    Ok((RbdStorage::new(backend, address, key, options, size_bytes), probed))
}

impl RbdStorage {
    /// Maximum size of librbd's cache of this image, in bytes.
    pub(super) fn max_cache_bytes(&self) -> u64 {
        self.backend.cache_bytes()
    }
}

impl<B: RbdBackend> RbdStorage<B> {
    fn new(backend: B, address: &RbdAddress, key: String, options: RbdOptions, size_bytes: u64) -> Self {
        Self {
            backend,
            name: address.name(),
            key,
            ownership: ImageOwnership::new(options.passed.is_none()),
            passed_files: options.passed,
            cache: options.cache,
            read_only: options.read_only,
            is_snapshot: address.snapshot.is_some(),
            size_bytes: AtomicU64::new(size_bytes),
            in_flight: RbdRequestSlots::new(),
            slow_calls: RangeLocks::default(),
            is_lost: AtomicBool::new(false),
            failures: LogRateLimit::default(),
            cached_writes: AtomicU64::new(0),
            flushed_writes: AtomicU64::new(0),
        }
    }

    /// True if every write is durable when it has completed.
    pub(super) fn writes_through(&self) -> bool {
        !self.cache.has_write_cache()
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Identity, independent of its name.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// The pool and its cluster, without the image: see `librbd/image.rs` for the identity's form.
    pub(super) fn cluster_pool(&self) -> Option<String> {
        let (pool, cluster) = self.key.split_once(" in pool ")?.1.split_once(" of cluster ")?;
        let (number, _namespace) = pool.split_once('/')?;
        Some(format!("pool {number} of cluster {}", cluster.split(' ').next()?))
    }

    pub(super) fn cache(&self) -> CacheMode {
        self.cache
    }

    pub(super) fn is_passed(&self) -> bool {
        self.passed_files.is_some()
    }

    pub(super) fn may_be_resumed_elsewhere(&self) -> bool {
        self.passed_files.as_ref().is_some_and(|passed| !passed.is_owner())
    }

    /// True if another client has broken the lock, or the image was removed.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost.load(Relaxed)
    }

    /// Age of the oldest request in flight.
    pub(super) fn oldest_request(&self) -> Option<Duration> {
        self.in_flight.oldest_age(reactor::now())
    }

    /// True if a request in flight changes the image.
    pub(super) fn is_changing(&self) -> bool {
        self.in_flight.has_changes()
    }

    /// See [`Storage::has_volatile_writes`](super::Storage::has_volatile_writes).
    pub(super) fn has_volatile_writes(&self) -> bool {
        self.cached_writes.load(Acquire) != self.flushed_writes.load(Acquire)
    }

    /// Notification that the image may have been resized.
    pub(super) fn resize_notifier(&self) -> &Arc<ResizeNotifier> {
        self.backend.resize_notifier()
    }

    /// Interval at which [`RbdStorage::poll_size`] is due even without a notification.
    pub(super) fn poll_interval(&self) -> Option<Duration> {
        self.read_only.then_some(POLL_INTERVAL)
    }

    /// Checks whether it was resized from outside; returns its size in bytes.
    pub(super) async fn poll_size(&self) -> Result<u64> {
        let _guard = self.slow_calls.exclusive(0..1).await;
        if !self.ownership.is_ours() {
            // Not while it is suspended: resuming reads the size, and the image may be closed by
            // now.
            return Ok(self.size_bytes());
        }
        if self.read_only {
            return self.poll_header().await;
        }
        let size_bytes = self.map_error(self.backend.size_bytes().await)?;
        self.size_bytes.store(size_bytes, Relaxed);
        Ok(size_bytes)
    }

    /// Reads the size from the image's header. librbd does not notify read-only clients: it would
    /// read a removed image as zeroes, and a removed snapshot as the image's current content.
    async fn poll_header(&self) -> Result<u64> {
        match self.backend.stored_size().await {
            Ok(Some(stored)) if !self.is_lost() => {
                // A smaller size applies. Added bytes cannot be read: the library keeps the old
                // size.
                self.size_bytes.fetch_min(stored, Relaxed);
                Ok(self.size_bytes())
            }
            Err(error) if error.errno() == libc::ENOENT => {
                if !self.is_lost.swap(true, Relaxed) {
                    let subject = if self.is_snapshot { "the snapshot" } else { "the image" };
                    tracing::error!(
                        image = self.name,
                        "{subject} was removed: every request fails from now on"
                    );
                }
                Ok(self.size_bytes())
            }
            Ok(_) => Ok(self.size_bytes()),
            // Closed, or the cluster has blocklisted this client; requests report that.
            Err(Error::SHUTDOWN) => Ok(self.size_bytes()),
            Err(error) => self.map_error(Err(error)),
        }
    }

    /// Writes the library's cache back to the cluster, whatever the cache mode.
    // Read before the flush: writes that complete during it may not be covered.
    pub(super) async fn write_back(&self) -> Result<()> {
        let cached = self.cached_writes.load(Acquire);
        self.run_as_owner(|slot| self.backend.flush(slot)).await?;
        self.flushed_writes.fetch_max(cached, Release);
        Ok(())
    }

    /// Suspends the image so that another process can resume it. Requests in flight have completed;
    /// later writes wait until it is resumed here.
    ///
    /// # Errors
    /// As reported by the cluster; the image can be resumed.
    pub(super) async fn suspend(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.write_back().await?;
        let _guard = self.slow_calls.exclusive(0..1).await;
        // After the write-back: writes from here on wait for `ownership`, so nothing is dirty when
        // the lock is released.
        self.ownership.release();
        self.backend.release_lock().await
    }

    /// Resumes the image, here or in another process than the one that suspended it, with its
    /// current size. `new_clients`: see [`Storage::resume`](super::Storage::resume).
    ///
    /// A third client that holds the lock and keeps it may have written. Then the image is lost for
    /// the process that had it before.
    ///
    /// # Errors
    /// The reason why it cannot be resumed; it can be tried again.
    pub(super) async fn resume(&self, new_clients: &[u64]) -> std::result::Result<(), OpenError> {
        if self.read_only {
            return Ok(());
        }
        let _guard = self.slow_calls.exclusive(0..1).await;
        if self.ownership.is_ours() {
            return Ok(());
        }
        let resuming = self.backend.resume(new_clients);
        let result = match self.may_be_resumed_elsewhere() {
            // A timeout is safe here: the old process can still resume it.
            true => reactor::timeout(RESUME_TIMEOUT, resuming).await.unwrap_or(Err(Error::TIMED_OUT)),
            // No timeout: an abandoned attempt could still acquire the lock at any time.
            false => resuming.await,
        };
        let why = match result {
            Ok(ResumeOutcome::Resumed(size_bytes)) => {
                self.size_bytes.store(size_bytes, Relaxed);
                self.ownership.acquire();
                return Ok(());
            }
            Ok(ResumeOutcome::LockedElsewhere(owner)) => {
                let owner = owner.unwrap_or_else(|| "its address is unknown".to_owned());
                format!("another client has taken its lock: {owner}")
            }
            Err(error) if error.errno() == libc::ESHUTDOWN => {
                "the cluster has blocklisted this client".to_owned()
            }
            Err(error) => {
                let why = format!("its lock cannot be acquired: {error}");
                return Err(OpenError::new(&self.name, why, "`ceph -s` shows the state of the cluster"));
            }
        };
        if !self.may_be_resumed_elsewhere() {
            self.mark_lost(&why);
        }
        Err(OpenError::new(&self.name, why, "`rbd lock ls` and `rbd status` show its lock and its clients"))
    }

    /// See [`Storage::blocklist`](super::Storage::blocklist).
    pub(super) async fn blocklist(&self, clients: &[u64]) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        let _guard = self.slow_calls.exclusive(0..1).await;
        self.backend.blocklist(clients).await
    }

    /// Marks the image as lost: nothing is written any more, and every request fails.
    fn mark_lost(&self, why: &str) {
        if !self.is_lost.swap(true, Relaxed) {
            tracing::error!(
                image = self.name,
                "{why}: writes have stopped (once no other client writes to it, remove the disk \
                 and add it again)"
            );
        }
        // Waiting requests continue, and fail.
        self.ownership.acquire();
    }

    /// See [`Storage::close`](super::Storage::close).
    pub(super) async fn close(&self) -> Result<()> {
        self.backend.close().await
    }

    /// Maps a result of the library to the one for clients, and logs its cause.
    fn map_error<T>(&self, result: Result<T>) -> Result<T> {
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        // ESHUTDOWN is Ceph's EBLOCKLISTED; EROFS means that another client holds the lock.
        let is_lost = matches!(error.errno(), libc::ESHUTDOWN | libc::EROFS) && !self.read_only;
        if is_lost {
            self.mark_lost(
                "another client has broken the lock of the image, or of another image on the same \
                 connection, and the cluster has blocklisted this client",
            );
        } else if let Some(suppressed) = self.failures.try_log(reactor::coarse_now()) {
            tracing::warn!(image = self.name, %error, suppressed, "the cluster failed a request");
        }
        Err(match error.errno() {
            libc::ENOSPC | libc::EDQUOT => Error::NO_SPACE,
            libc::EINVAL | libc::ENOMEM | libc::EOPNOTSUPP => error,
            _ => Error::IO,
        })
    }

    /// Runs a request in its own slot.
    async fn run<T, F: Future<Output = Result<T>>>(
        &self,
        request: impl FnOnce(slots::RbdRequestSlot) -> F,
    ) -> Result<T> {
        // The cluster would return the same error, after a round trip or a long wait.
        if self.is_lost() {
            return Err(Error::IO);
        }
        let slot = self.in_flight.acquire().await;
        self.map_error(request(slot).await)
    }

    /// As [`RbdStorage::run`], for a request that changes the image. Waits while the image is
    /// suspended.
    async fn run_write<T, F: Future<Output = Result<T>>>(
        &self,
        request: impl FnOnce(slots::RbdRequestSlot) -> F,
    ) -> Result<T> {
        self.run_as_owner(|slot| request(slot.for_change())).await
    }

    /// As [`RbdStorage::run`], for a request that only the owner of the image may send. Waits while
    /// the image is suspended.
    async fn run_as_owner<T, F: Future<Output = Result<T>>>(
        &self,
        request: impl FnOnce(slots::RbdRequestSlot) -> F,
    ) -> Result<T> {
        self.run(async |slot| {
            self.ownership.wait().await;
            if self.is_lost() { Err(Error::IO) } else { request(slot).await }
        })
        .await
    }

    /// Splits a range into pieces of [`MAX_REQUEST_BYTES`] and runs them in sequence.
    async fn in_pieces<F: Future<Output = Result<()>>>(
        &self,
        offset: u64,
        length: u64,
        request: impl Fn(slots::RbdRequestSlot, u64, u64) -> F,
    ) -> Result<()> {
        let end = offset + length;
        let mut at = offset;
        while at < end {
            // Piece boundaries are aligned, so that no object is in two pieces.
            let next = (at / MAX_REQUEST_BYTES + 1) * MAX_REQUEST_BYTES;
            let piece = next.min(end) - at;
            self.run_write(|slot| request(slot, at, piece)).await?;
            at += piece;
        }
        Ok(())
    }

    async fn ensure_durable(&self, requested: Durability) -> Result<()> {
        let must_flush = requested == Durability::Synchronous && self.cache != CacheMode::Unsafe;
        if must_flush || self.writes_through() {
            return self.run_as_owner(|slot| self.backend.flush(slot)).await;
        }
        if self.cache == CacheMode::Writeback {
            self.cached_writes.fetch_add(1, Release);
        }
        Ok(())
    }
}

impl<B: RbdBackend> AlignedDevice for RbdStorage<B> {
    fn alignment(&self) -> Alignment {
        Alignment::NONE
    }

    fn page_bytes(&self) -> u64 {
        1
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    /// Returns the last known size: reading it would wait for the cluster.
    /// [`RbdStorage::poll_size`] reads it.
    async fn refresh_size(&self) -> Result<u64> {
        Ok(self.size_bytes())
    }

    async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        if self.read_only {
            return Err(ResizeError::ReadOnly);
        }
        self.ownership.wait().await;
        let _guard = self.slow_calls.exclusive(0..1).await;
        let old = self.size_bytes();
        if size_bytes < old {
            // Before the resize, so that no new request reads there.
            self.size_bytes.store(size_bytes, Relaxed);
        }
        let result = self.map_error(self.backend.resize(size_bytes).await);
        self.size_bytes.store(if result.is_ok() { size_bytes } else { old }, Relaxed);
        Ok(result?)
    }

    fn description(&self) -> String {
        let how = if self.read_only { ", read-only" } else { "" };
        format!("{}, cache {}{how}", self.name, self.cache)
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn block_size(&self) -> BlockSize {
        BLOCK
    }

    fn can_zero_fast(&self) -> bool {
        true
    }

    async fn read(&self, offset: u64, target: Segments) -> Result<Segments> {
        let length = target.len();
        if length == 0 {
            return Ok(target);
        }
        self.run(async |slot| {
            let (result, target) = self.backend.read(slot, offset, target).await;
            // Short: the image was shrunk while the request was in flight.
            if result? == length { Ok(target) } else { Err(Error::INVALID) }
        })
        .await
    }

    async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        if !data.is_empty() {
            self.run_write(|slot| self.backend.write(slot, offset, data)).await?;
        }
        self.ensure_durable(durability).await
    }

    async fn read_buffered(&self, offset: u64, target: Segments) -> Result<Segments> {
        self.read(offset, target).await
    }

    async fn write_buffered(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        self.write(offset, data, durability).await
    }

    async fn flush(&self) -> Result<()> {
        if self.cache == CacheMode::Unsafe || self.read_only {
            return Ok(());
        }
        self.write_back().await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let is_thick = !options.may_unmap;
        if is_thick && options.only_if_fast {
            // librbd writes thick zeroes as data.
            return Err(Error::UNSUPPORTED);
        }
        let end = offset.checked_add(length).filter(|&end| end <= self.size_bytes()).ok_or(Error::INVALID)?;
        // A range within one sector has an empty middle.
        let start = if is_thick { offset.next_multiple_of(SECTOR).min(end) } else { offset };
        let stop = if is_thick { (end / SECTOR * SECTOR).max(start) } else { end };
        for part in [offset..start, stop..end] {
            if !part.is_empty() {
                let zeroes = IoBuffer::zeroed((part.end - part.start) as usize);
                self.run_write(|slot| self.backend.write(slot, part.start, zeroes.into())).await?;
            }
        }
        self.in_pieces(start, stop - start, |slot, at, piece| {
            self.backend.write_zeroes(slot, at, piece, is_thick)
        })
        .await?;
        self.ensure_durable(options.durability).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.in_pieces(offset, length, |slot, at, piece| self.backend.discard(slot, at, piece)).await
    }

    async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        if self.is_lost() {
            return Err(Error::IO);
        }
        let range = offset..offset + length;
        let _guard = self.slow_calls.exclusive(0..1).await;
        // Each piece may have a hole before it, so half of the extents are pieces.
        let max_pieces = MAX_EXTENTS / 2;
        let allocated = self.map_error(self.backend.allocated(range.clone(), max_pieces).await)?;
        Ok(match allocated {
            Some(pieces) => extents(&range, &pieces, pieces.len() >= max_pieces),
            None => vec![Extent { length, hole: false, zero: false }],
        })
    }
}

/// The extents of a range, given its allocated pieces. If the list is truncated (`is_truncated`),
/// they end with the last piece.
fn extents(range: &Range<u64>, pieces: &[Range<u64>], is_truncated: bool) -> Vec<Extent> {
    let mut extents = Vec::new();
    let mut at = range.start;
    for piece in pieces {
        let (start, end) = (piece.start.clamp(at, range.end), piece.end.clamp(at, range.end));
        if start > at {
            push_extent(&mut extents, Extent { length: start - at, hole: true, zero: true });
        }
        if end > start {
            push_extent(&mut extents, Extent { length: end - start, hole: false, zero: false });
        }
        at = end;
    }
    if at < range.end && !is_truncated {
        push_extent(&mut extents, Extent { length: range.end - at, hole: true, zero: true });
    }
    extents
}
