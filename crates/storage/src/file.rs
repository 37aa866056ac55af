//! Regular files and block devices, through io_uring, in QEMU's five cache modes.
//!
//! | mode | O_DIRECT | a write, zeroing or discard completes when | flush |
//! | --- | --- | --- | --- |
//! | writeback | no | it is in the page cache | fdatasync |
//! | writethrough | no | it is on stable storage | fdatasync |
//! | none | yes | the device has it, perhaps in its cache | fdatasync |
//! | directsync | yes | it is on stable storage | fdatasync |
//! | unsafe | no | it is in the page cache, also with FUA | nothing |
//!
//! In the direct modes a second, buffered descriptor serves the tail of a file whose size is not a
//! multiple of the block size; see [`align`](super::align).
//!
//! Reading past the end of a file that another process has truncated fails with EIO: the bytes are
//! lost, and zeroes would hide that. Never makes a file longer, unless it is resized.

mod cache_mode;
mod calls;
mod direct;
mod isolation;
mod open;
mod passed;
mod resize;
mod space;
mod status;
mod sync;
#[cfg(test)]
mod sync_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod transfer_tests;
mod zero;

use std::{
    os::fd::{AsFd as _, BorrowedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

pub(super) use self::open::{FileOptions, KINDS, not_an_image, open};
pub use self::{
    cache_mode::CacheMode,
    passed::{PassedFile, PassedFiles},
};
use isolation::FileIsolation;
use space::SpaceCount;
use sync::Syncs;

use super::{
    BlockSize, Durability, Extent, FileStamp, ZeroOptions,
    align::{AlignedDevice, Alignment, ZeroCopyDevice},
    lock,
    open_error::OpenError,
    resize::{ResizeError, SECTOR},
};
use reactor::{
    buffer::{IoBuffer, Segment, Segments},
    coarse_now, debug_assert_may_block,
    error::{Error, Result},
    guest::GuestBytes,
    log_rate_limit::LogRateLimit,
    operation::{self, CloseHook, Fd, MAX_SEGMENTS},
    ublk::RegisteredData,
    yield_now,
};

/// Maximum number of attempts of a request that the kernel cannot execute now (EAGAIN). Other tasks
/// run between the attempts.
const MAX_ATTEMPTS: u32 = 1000;
/// Number of owners of an idle file's main descriptor: the [`FileStorage`], its descriptor for
/// changes, and [`BufferedCloser`].
const MAIN_OWNERS: usize = 3;
/// Number of owners of an idle file's buffered descriptor: the [`FileStorage`], and its descriptor
/// for changes.
const BUFFERED_OWNERS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    Regular,
    BlockDevice,
}

/// Identity of a file, independent of its path: equal for two names of one file, and for two device
/// nodes of one block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity(u64, u64);

impl std::fmt::Display for FileIdentity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self(device, 0) => write!(f, "device {device}"),
            Self(device, inode) => write!(f, "file {inode} of device {device}"),
        }
    }
}

impl FileIdentity {
    pub(crate) fn from_numbers(device: u64, inode: u64, device_number: u64, is_device: bool) -> Self {
        // (n, 0) identifies a device and cannot be a file: inode numbers begin at 1.
        if is_device { Self(device_number, 0) } else { Self(device, inode) }
    }

    /// Identity of the file that a path resolves to now; `None` if it does not exist.
    pub fn of_path(path: &std::path::Path) -> Option<Self> {
        debug_assert_may_block();
        use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
        let metadata = std::fs::metadata(path).ok()?;
        let is_device = metadata.file_type().is_block_device();
        Some(Self::from_numbers(metadata.dev(), metadata.ino(), metadata.rdev(), is_device))
    }
}

/// An open file or block device. Its locks are held until it is closed.
#[derive(Debug)]
pub struct FileStorage {
    /// Opened with O_DIRECT in the direct modes.
    fd: Fd,
    /// Opened without O_DIRECT, through the page cache.
    buffered: Fd,
    /// The same two descriptors for operations that change the file, whose owners are counted.
    changing_fd: Fd,
    changing_buffered: Fd,
    isolation: Arc<FileIsolation>,
    syncs: Arc<Syncs>,
    kind: FileKind,
    identity: FileIdentity,
    /// Device number, in the form of stat(2): of the device itself, or of the file's file system.
    device_number: u64,
    ending: Arc<FileCloser>,
    cache: CacheMode,
    /// Changes only from false to true: see [`FileStorage::make_read_only`].
    read_only: AtomicBool,
    /// True if locks exclude other writers whenever it is in use.
    is_protected: bool,
    /// True if its locks are acquired and released while it is open.
    handover: bool,
    alignment: Alignment,
    /// Alignment of zeroing and discarding, in bytes; 1 for regular files.
    zero_alignment: u64,
    page_bytes: u64,
    size_bytes: AtomicU64,
    space: Arc<SpaceCount>,
    name: String,
    /// Set if another process passed it, with the locks.
    passed_files: Option<PassedFiles>,
    zeroing: zero::UnsupportedCalls,
    dsync_refused: AtomicBool,
    truncation_log: LogRateLimit,
}

/// Closes a file: releases the locks after the last operation, which may still write, and before
/// the descriptor is closed.
#[derive(Debug)]
struct FileCloser {
    /// True if the locks belong to this process, so that closing releases them.
    releases: AtomicBool,
    /// Dropped, and thereby closed, with the last descriptor.
    _closed: async_channel::Sender<()>,
    closed: async_channel::Receiver<()>,
}

impl FileCloser {
    fn new() -> Arc<Self> {
        let (sender, closed) = async_channel::bounded(1);
        Arc::new(Self { releases: AtomicBool::new(false), _closed: sender, closed })
    }
}

impl CloseHook for FileCloser {
    fn before_close(&self, fd: BorrowedFd<'_>) {
        if self.releases.load(Relaxed) {
            lock::release(fd);
        }
    }
}

/// Closes the buffered descriptor. The main one holds the locks and must be closed later, because
/// an operation on either may still change the file.
#[derive(Debug)]
struct BufferedCloser {
    _main: Fd,
}

impl CloseHook for BufferedCloser {
    fn before_close(&self, _: BorrowedFd<'_>) {}
}

impl Drop for FileStorage {
    fn drop(&mut self) {
        // Read by `before_close`, which runs when the last clone of the descriptor is dropped.
        self.ending.releases.store(!self.may_be_resumed_elsewhere(), Relaxed);
    }
}

impl FileStorage {
    /// Path that it was opened by.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn cache(&self) -> CacheMode {
        self.cache
    }

    pub(crate) fn is_protected(&self) -> bool {
        self.is_protected
    }

    pub(crate) fn has_handover(&self) -> bool {
        self.handover
    }

    pub(crate) fn is_passed(&self) -> bool {
        self.passed_files.is_some()
    }

    pub(crate) fn may_be_resumed_elsewhere(&self) -> bool {
        self.passed_files.as_ref().is_some_and(|passed| !passed.is_owner())
    }

    // New descriptors of the same open files. They are not clones of `Fd`, whose owners are counted
    // to see whether the file is busy.
    pub(crate) fn descriptors(&self) -> std::io::Result<PassedFile> {
        let another = |fd: &Fd| fd.as_fd().try_clone_to_owned();
        Ok(PassedFile { main: another(&self.fd)?, buffered: another(&self.buffered)? })
    }

    /// See [`Storage::try_lock`](crate::Storage::try_lock).
    pub(crate) fn try_lock(&self, last: bool) -> std::result::Result<bool, OpenError> {
        match lock::try_acquire(&self.fd, &self.name, lock::LockMode::new(self.read_only(), false)) {
            Ok(true) => {}
            Ok(false) => {
                let why = "this file system does not support locks, so two processes could write at once";
                return Err(OpenError::new(&self.name, why, "serve it without handover"));
            }
            Err(conflict) if last => return Err(conflict.into_error(&self.fd, &self.name)),
            Err(_) => return Ok(false),
        }
        // The page cache of this host may be older than the writes of another host.
        calls::drop_clean_pages(&self.buffered);
        Ok(true)
    }

    /// Releases the locks, unless they still belong to another process.
    pub(crate) fn release_locks(&self) {
        if !self.may_be_resumed_elsewhere() {
            lock::release(&self.fd);
        }
    }

    /// True if the kernel may have an operation in flight: a descriptor has more owners than at
    /// rest.
    pub(crate) fn is_busy(&self) -> bool {
        !(self.fd.has_reference_count(MAIN_OWNERS) && self.buffered.has_reference_count(BUFFERED_OWNERS))
            || self.is_changing()
    }

    /// True if the kernel may have an operation in flight that changes the file.
    pub(crate) fn is_changing(&self) -> bool {
        !(self.changing_fd.has_reference_count(1) && self.changing_buffered.has_reference_count(1))
    }

    /// See [`Storage::make_read_only`](crate::Storage::make_read_only).
    pub(crate) fn make_read_only(&self) {
        self.read_only.store(true, Relaxed);
        // With handover, the locks of a released image must stay released.
        if !self.handover && !self.may_be_resumed_elsewhere() {
            lock::release_write(&self.fd);
        }
    }

    pub(crate) fn can_grow(&self) -> bool {
        self.kind != FileKind::BlockDevice
    }

    pub(crate) fn writes_through(&self) -> bool {
        self.durability(Durability::Cached) == Durability::Synchronous
    }

    /// Durability of a request, after the cache mode is applied.
    fn durability(&self, requested: Durability) -> Durability {
        match self.cache {
            CacheMode::Writethrough | CacheMode::Directsync => Durability::Synchronous,
            CacheMode::Unsafe => Durability::Cached,
            CacheMode::Writeback | CacheMode::None => requested,
        }
    }

    /// See [`Storage::has_lost_writes`](crate::Storage::has_lost_writes).
    pub(crate) fn has_lost_writes(&self) -> bool {
        self.syncs.has_lost_writes()
    }

    /// Flushes everything to stable storage, whatever the cache mode.
    async fn sync_file(&self) -> Result<()> {
        self.syncs.run(&self.buffered, &self.isolation).await
    }

    /// Number of the block device, or of the device of a file's file system, in the form of
    /// stat(2).
    pub fn device_number(&self) -> u64 {
        self.device_number
    }

    /// Identity of the file, independent of its path.
    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// See [`Storage::stamp`](crate::Storage::stamp). `None` for a block device.
    pub(crate) async fn stamp(&self) -> Option<FileStamp> {
        match self.kind {
            FileKind::Regular => self.isolation.call(&self.buffered, |fd| calls::stamp(fd)).await.ok(),
            FileKind::BlockDevice => None,
        }
    }

    /// See [`Storage::allocated_bytes`](crate::Storage::allocated_bytes).
    pub(crate) async fn allocated_bytes(&self) -> Result<u64> {
        let bytes = self.isolation.call(&self.buffered, |fd| calls::allocated_bytes(fd)).await?;
        self.space.set(bytes);
        Ok(bytes)
    }

    /// Last known value.
    pub(crate) fn last_allocated_bytes(&self) -> u64 {
        self.space.bytes()
    }

    /// See [`Storage::ping`](crate::Storage::ping).
    pub(crate) async fn ping(&self) -> Result<()> {
        self.isolation.ping(&self.buffered, |fd| calls::ping(fd)).await
    }

    /// See [`Storage::abandon`](crate::Storage::abandon).
    pub(crate) fn abandon(&self) {
        self.isolation.abandon();
    }

    /// Channel whose other end is closed once the file is closed and its locks are released: see
    /// [`FilesClosed`](crate::FilesClosed).
    pub(crate) fn closed(&self) -> async_channel::Receiver<()> {
        self.ending.closed.clone()
    }

    /// True if there is a page cache to fill: false with O_DIRECT.
    pub(super) fn can_read_ahead(&self) -> bool {
        !self.cache.is_direct()
    }

    /// See [`Storage::will_need`](crate::Storage::will_need).
    pub(super) async fn will_need(&self, offset: u64, length: u64) {
        if !self.can_read_ahead() {
            return;
        }
        let read_ahead = async |fd: Fd| Ok(operation::read_ahead(&fd, offset, length).await?);
        if let Err(error) = self.isolation.operate(&self.fd, read_ahead).await {
            tracing::debug!(file = self.name, %error, "a read-ahead failed");
        }
    }

    async fn read_all(&self, fd: &Fd, offset: u64, target: Segments) -> Result<Segments> {
        if target.is_empty() {
            return Ok(target);
        }
        if self.isolation.bounds_transfers() {
            // Boxed: the unusual path must not enlarge the future of every read.
            return Box::pin(self.read_bounced(fd, offset, target)).await;
        }
        self.read_whole(fd, offset, target).await
    }

    /// Reads through a bounce buffer, which the kernel may fill late: after the file was abandoned,
    /// a guest uses its memory for other data. Only a request that holds a slot of the isolation
    /// has a buffer, so their number is bounded.
    async fn read_bounced(&self, fd: &Fd, offset: u64, mut target: Segments) -> Result<Segments> {
        if !target.iter().any(|segment| matches!(segment, Segment::Guest(_))) {
            let read = async |fd: Fd| self.read_whole(&fd, offset, target).await;
            return self.isolation.operate(fd, read).await;
        }
        let length = target.len();
        let read = async |fd: Fd| {
            let bounce = Segments::from(IoBuffer::new(length));
            self.read_whole(&fd, offset, bounce).await
        };
        target.copy_from(&self.isolation.operate(fd, read).await?.joined());
        Ok(target)
    }

    async fn read_whole(&self, fd: &Fd, offset: u64, target: Segments) -> Result<Segments> {
        let length = target.len();
        let (result, target) = operation::read_at(fd, target, 0, offset).await;
        match result {
            Ok(count) if count == length => Ok(target),
            other => Box::pin(self.read_slow(fd, offset, target, other)).await,
        }
    }

    /// Slow path of a read: short, interrupted, of many segments, or at the end of the file.
    async fn read_slow(
        &self,
        fd: &Fd,
        offset: u64,
        mut target: Segments,
        mut last: std::io::Result<usize>,
    ) -> Result<Segments> {
        let length = target.len();
        let mut done = 0;
        let mut attempts = 0;
        loop {
            match last {
                Ok(count) if count > 0 => done += count,
                Ok(_) => return Err(self.past_the_end(offset + done as u64)),
                Err(error) => check_retry(error.into(), &mut attempts).await?,
            }
            if done == length {
                return Ok(target);
            }
            // O_DIRECT stops inside a block only at the end of the file, and the rest would be
            // unaligned.
            if !(done as u64).is_multiple_of(self.alignment.offset) {
                return Err(self.past_the_end(offset + done as u64));
            }
            (last, target) = operation::read_at(fd, target, done, offset + done as u64).await;
        }
    }

    fn past_the_end(&self, end: u64) -> Error {
        if end >= self.size_bytes() {
            // Resized while the request was in flight. Same result as for a request after the
            // resize.
            return Error::INVALID;
        }
        if let Some(suppressed) = self.truncation_log.try_log(coarse_now()) {
            let what = "read past the end: the file was truncated while in use";
            tracing::warn!(file = self.name, end, suppressed, "{what}");
        }
        Error::IO
    }

    /// Writes through one of the two descriptors.
    async fn write_all(&self, fd: &Fd, offset: u64, data: Segments, requested: Durability) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let required = self.durability(requested);
        // A buffered RWF_DSYNC write would consume writeback errors of other writes (see `sync`).
        let write_durability = if self.has_synchronous_writes(fd) { required } else { Durability::Cached };
        let achieved = if self.isolation.bounds_transfers() {
            Box::pin(self.write_bounced(fd, offset, data, write_durability)).await?
        } else {
            self.write_whole(fd, offset, data, write_durability).await?
        };
        self.make_durable(required, achieved).await
    }

    /// Writes through a bounce buffer, which the kernel may read late: after the file was
    /// abandoned, a guest uses its memory for other data, which must not reach the file. Buffers
    /// are bounded as in [`FileStorage::read_bounced`].
    async fn write_bounced(
        &self,
        fd: &Fd,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<Durability> {
        let write_copy = async |fd: Fd| {
            let guest_segments = || {
                data.iter().filter_map(|segment| match segment {
                    Segment::Guest(guest_bytes) => Some(guest_bytes),
                    Segment::Own(_) => None,
                })
            };
            if guest_segments().next().is_none() {
                return self.write_whole(&fd, offset, data, durability).await;
            }
            let mut bounce = IoBuffer::new(data.len());
            data.copy_to(&mut bounce);
            if guest_segments().any(GuestBytes::is_lost) {
                // The guest's memory was truncated, so the copy has zeroes in its place.
                return Err(Error::FAULT);
            }
            self.write_whole(&fd, offset, bounce.into(), durability).await
        };
        self.isolation.operate(fd, write_copy).await
    }

    /// Syncs if a write has not reached the durability that it requests.
    async fn make_durable(&self, required: Durability, achieved: Durability) -> Result<()> {
        match (required, achieved) {
            (Durability::Synchronous, Durability::Cached) => Box::pin(self.sync_file()).await,
            _ => Ok(()),
        }
    }

    /// True if one call can write durably and does not consume the errors of other writes, which
    /// the next sync must see: see [`sync`].
    fn has_synchronous_writes(&self, fd: &Fd) -> bool {
        self.cache.is_direct() && fd.is_same(&self.fd) && !self.dsync_refused.load(Relaxed)
    }

    /// Writes all data and returns the durability that was reached.
    async fn write_whole(
        &self,
        fd: &Fd,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<Durability> {
        if data.as_slice().len() > MAX_SEGMENTS {
            Box::pin(self.write_slow(fd, offset, data, durability, None)).await?;
            return Ok(durability);
        }
        let length = data.len();
        let (result, data) = operation::write_at(fd, data, offset, durability).await;
        match result {
            Ok(count) if count == length => {}
            Err(error) if durability == Durability::Synchronous && is_unsupported(&error) => {
                // No RWF_DSYNC on this file system: from now on, write and then sync.
                self.dsync_refused.store(true, Relaxed);
                Box::pin(self.write_slow(fd, offset, data, Durability::Cached, None)).await?;
                return Ok(Durability::Cached);
            }
            other => Box::pin(self.write_slow(fd, offset, data, durability, Some(other))).await?,
        }
        Ok(durability)
    }

    /// Slow path of a write: short, interrupted, or of many segments. `last` is the result of an
    /// attempt already made.
    async fn write_slow(
        &self,
        fd: &Fd,
        mut offset: u64,
        mut data: Segments,
        durability: Durability,
        mut last: Option<std::io::Result<usize>>,
    ) -> Result<()> {
        loop {
            let batch: usize = data.iter().take(MAX_SEGMENTS).map(Segment::len).sum();
            let next_batch = data.split_off(batch);
            self.write_batch(fd, offset, data, durability, last.take()).await?;
            if next_batch.is_empty() {
                return Ok(());
            }
            offset += batch as u64;
            data = next_batch;
        }
    }

    /// Writes one batch of segments until all of it is written.
    async fn write_batch(
        &self,
        fd: &Fd,
        mut offset: u64,
        mut data: Segments,
        durability: Durability,
        mut last: Option<std::io::Result<usize>>,
    ) -> Result<()> {
        let mut attempts = 0;
        loop {
            match last {
                Some(Ok(count)) => {
                    // Continuing inside a block would be unaligned, so the partial block is written
                    // again.
                    let aligned_count = count - count % self.alignment.offset as usize;
                    if aligned_count == 0 {
                        return Err(Error::IO);
                    }
                    offset += aligned_count as u64;
                    data.advance(aligned_count);
                }
                Some(Err(error)) => check_retry(error.into(), &mut attempts).await?,
                None => {}
            }
            if data.is_empty() {
                return Ok(());
            }
            let (result, remaining) = operation::write_at(fd, data, offset, durability).await;
            (last, data) = (Some(result), remaining);
        }
    }
}

/// Zero copy. Not for files that may be abandoned, which use bounce buffers: the kernel may access
/// a request's own memory after the request has failed.
impl ZeroCopyDevice for FileStorage {
    async fn read_registered(&self, offset: u64, buffer: &RegisteredData) -> Option<Result<()>> {
        if self.isolation.bounds_transfers() {
            return None;
        }
        self.read_registered_by(&self.fd, offset, buffer).await
    }

    async fn write_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        requested: Durability,
    ) -> Option<Result<()>> {
        if self.isolation.bounds_transfers() {
            return None;
        }
        let required = self.durability(requested);
        let write_durability =
            if self.has_synchronous_writes(&self.fd) { required } else { Durability::Cached };
        let written = self.write_registered_by(&self.changing_fd, offset, buffer, write_durability).await;
        match written {
            Some(Ok(())) => Some(self.make_durable(required, write_durability).await),
            other => other,
        }
    }
}

impl FileStorage {
    async fn read_registered_by(&self, fd: &Fd, offset: u64, buffer: &RegisteredData) -> Option<Result<()>> {
        let (mut done, mut attempts) = (0, 0);
        while done < buffer.bytes() {
            let at = offset + done as u64;
            match buffer.read_at(fd, done, at).await {
                Ok(count) if count > 0 && count.is_multiple_of(self.alignment.offset as usize) => {
                    done += count;
                }
                // A count that is no multiple of the block ends at the end of the file.
                Ok(count) => return Some(Err(self.past_the_end(at + count as u64))),
                Err(error) if needs_copy(&error) => return None,
                Err(error) => {
                    if let Err(error) = check_retry(error.into(), &mut attempts).await {
                        return Some(Err(error));
                    }
                }
            }
        }
        Some(Ok(()))
    }

    async fn write_registered_by(
        &self,
        fd: &Fd,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Option<Result<()>> {
        let (mut done, mut attempts) = (0, 0);
        while done < buffer.bytes() {
            match buffer.write_at(fd, done, offset + done as u64, durability).await {
                // A partial block is written again.
                Ok(count) if count as u64 >= self.alignment.offset => {
                    done += count - count % self.alignment.offset as usize;
                }
                Ok(_) => return Some(Err(Error::IO)),
                Err(error) if needs_copy(&error) => return None,
                Err(error) => {
                    if let Err(error) = check_retry(error.into(), &mut attempts).await {
                        return Some(Err(error));
                    }
                }
            }
        }
        Some(Ok(()))
    }
}

/// True if the kernel cannot do this request without a copy, rather than failing at it: the request
/// has no registered buffer, its pages are unsuitable for the device, or the operation is missing.
fn needs_copy(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EFAULT | libc::EINVAL)) || is_unsupported(error)
}

/// True if the kernel, the file system or the device lacks the operation, rather than failing at
/// it.
fn is_unsupported(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY))
}

/// Returns the error of a failed request that must not be retried; otherwise yields to the other
/// tasks and returns.
async fn check_retry(error: Error, attempts: &mut u32) -> Result<()> {
    *attempts += 1;
    if !matches!(error.errno(), libc::EINTR | libc::EAGAIN) || *attempts >= MAX_ATTEMPTS {
        return Err(error);
    }
    yield_now().await;
    Ok(())
}

/// Repeats a request while it is interrupted.
async fn retried<F: Future<Output = std::io::Result<()>>>(attempt: impl Fn() -> F) -> Result<()> {
    let mut attempts = 0;
    loop {
        match attempt().await {
            Ok(()) => return Ok(()),
            Err(error) => check_retry(error.into(), &mut attempts).await?,
        }
    }
}

impl AlignedDevice for FileStorage {
    fn alignment(&self) -> Alignment {
        self.alignment
    }

    fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    async fn refresh_size(&self) -> Result<u64> {
        let size = self.isolation.call(&self.buffered, |fd| calls::size(fd)).await?;
        self.size_bytes.store(size, Relaxed);
        Ok(size)
    }

    /// 1 for regular files, whose unaligned tail goes through the page cache.
    fn size_multiple(&self) -> u64 {
        match self.kind {
            FileKind::Regular => 1,
            FileKind::BlockDevice => self.zero_alignment.max(SECTOR),
        }
    }

    async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        self.set_size(size_bytes).await
    }

    fn description(&self) -> String {
        let kind = match self.kind {
            FileKind::Regular => "file",
            FileKind::BlockDevice => "block device",
        };
        let access = if self.read_only() { ", read-only" } else { "" };
        format!("{kind} {}, cache {}{access}", self.name, self.cache)
    }

    fn read_only(&self) -> bool {
        self.read_only.load(Relaxed)
    }

    fn block_size(&self) -> BlockSize {
        let minimum = self.alignment.offset as u32;
        BlockSize { minimum, preferred: minimum.max(4096) }
    }

    fn can_zero_fast(&self) -> bool {
        self.zeroing.has_fast_call(self.kind)
    }

    async fn read(&self, offset: u64, target: Segments) -> Result<Segments> {
        self.read_all(&self.fd, offset, target).await
    }

    async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        self.write_all(&self.changing_fd, offset, data, durability).await
    }

    async fn read_buffered(&self, offset: u64, target: Segments) -> Result<Segments> {
        self.read_all(&self.buffered, offset, target).await
    }

    async fn write_buffered(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        // Recorded before the write: a failed sync from now on may lose this data.
        self.syncs.used_page_cache();
        self.write_all(&self.changing_buffered, offset, data, durability).await
    }

    async fn flush(&self) -> Result<()> {
        if self.cache == CacheMode::Unsafe || self.read_only() {
            return Ok(());
        }
        self.sync_file().await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        self.zero(offset, length, options).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.discard_range(offset, length).await
    }

    async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        if self.kind == FileKind::BlockDevice {
            return Ok(vec![Extent { length, hole: false, zero: false }]);
        }
        self.isolation.call(&self.buffered, move |fd| status::extents(fd, offset, length)).await
    }
}
