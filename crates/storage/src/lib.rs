//! Storage: where the bytes of an image are. A storage reads, writes, flushes, zeroes and discards,
//! and implements the cache mode.
//!
//! ```text
//!   fault ─► rate ─► delay ─► part ─► (align ─► file │ rbd │ nbd │ simulated; memory; null)
//!   wrappers, each optional                 bottom
//! ```
//!
//! One enum rather than a trait object: the futures of the hot path then live inside the request's
//! own task and cost no allocation. Wrappers box the inner future, since they nest.
//!
//! Contract of every storage:
//! - Offsets and lengths are inside [`Storage::size_bytes`]. They need no alignment; `align` adapts
//!   them to the device's.
//! - `read` fills the whole buffer, or fails. Holes read as zeroes.
//! - A write is visible to reads that start after it completed. It survives a crash once a later
//!   flush has completed, or at once if it was made with [`Durability::Synchronous`].
//! - Overlapping requests in flight may take effect in any order, but never change bytes outside
//!   their own range.
//! - Workers share a storage; a future belongs to the thread that polls it.
//! - Dropping a request's future leaves the outcome of that request undefined, and of no other.

#![deny(unsafe_code)]

pub mod align;
pub mod delay;
pub mod epoch_gate;
pub mod fault;
pub mod file;
mod files_closed;
mod flushes;
mod identity;
mod invalid_value;
mod lock;
pub mod memory;
pub mod nbd;
pub mod new_file;
pub mod null;
mod open;
mod open_error;
mod options;
mod own_mounts;
mod part;
pub mod probe;
mod range_lock;
pub mod rate;
pub mod rbd;
mod resize;
mod root;
mod sharing;
pub mod simulated;
mod spec;
mod wrapped;

pub use file::FileIdentity;
pub use file::{CacheMode, FileStorage, PassedFile, PassedFiles};
pub use files_closed::FilesClosed;
pub use identity::StorageIdentity;
pub use invalid_value::InvalidValue;
pub use lock::find_user;
pub use open::{OpenOptions, open_storage, probe_anywhere};
pub use open::{add_wrappers, open_async, open_bottom};
pub use open_error::OpenError;
pub use options::InvalidOption;
pub use own_mounts::OwnMount;
pub use part::StoragePart;
pub use probe::ImageFormat;
pub use range_lock::RangeLockGuard as RangeGuard;
pub use range_lock::RangeLocks;
pub use resize::ResizeError;
pub use root::Root;
pub use spec::{StorageSpec, parse_duration, parse_size, show_duration};
pub use wrapped::Wrapped;

use std::sync::Arc;

use policy::time::{Duration, Instant};

use self::{
    align::{Align, AlignedDevice as _},
    memory::MemoryStorage,
    nbd::NbdStorage,
    null::NullStorage,
    rbd::RbdStorage,
    simulated::SimulatedStorage,
};
pub use reactor::operation::Durability;
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    guest::GuestBytes,
    ublk::RegisteredData,
};

/// Options of [`Storage::write_zeroes`]: NBD's flags of `NBD_CMD_WRITE_ZEROES`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroOptions {
    /// True if the range may be deallocated, as long as it reads as zeroes afterwards.
    pub may_unmap: bool,
    /// Fail with [`Error::UNSUPPORTED`](reactor::error::Error::UNSUPPORTED) at once if it would be
    /// no faster than writing.
    pub only_if_fast: bool,
    /// As for [`Storage::write`].
    pub durability: Durability,
}

/// A run of bytes with the same allocation status: NBD's `base:allocation`, SEEK_HOLE and
/// SEEK_DATA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes; never zero.
    pub length: u64,
    /// True if the range is not allocated.
    pub hole: bool,
    /// True if the range reads as zeroes.
    pub zero: bool,
}

/// Maximum number of extents in one result of [`Storage::block_status`]. It bounds the memory and
/// the time of one request.
pub const MAX_EXTENTS: usize = 256;

/// Request sizes that cost least, in bytes; both are powers of two. Any request is correct,
/// whatever its alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// A smaller or unaligned write costs a read and a write of the blocks at its edges. 1 if
    /// alignment makes no difference.
    pub minimum: u32,
    /// Requests of at least this size, aligned to it, perform best.
    pub preferred: u32,
}

/// Modification time and size of a file, which change with its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    modified_s: i64,
    modified_ns: i64,
    size_bytes: i64,
}

/// A storage of any type.
#[derive(Debug)]
pub enum Storage {
    /// A regular file or block device.
    File(Align<FileStorage>),
    /// Memory, allocated on first write.
    Memory(MemoryStorage),
    /// An export of an NBD server.
    Nbd(Align<NbdStorage>),
    /// Reads zeroes and discards writes.
    Null(NullStorage),
    /// An image of a Ceph cluster.
    Rbd(Align<RbdStorage>),
    /// A simulated disk, which tears, loses and reorders writes that were not flushed.
    Simulated(Align<SimulatedStorage>),
    /// Another storage behind a wrapper: a part of it, slower, or with injected failures.
    Wrapped(Box<Wrapped>),
}

/// Evaluates the same expression for every variant.
macro_rules! each {
    ($storage:expr, $inner:ident => $call:expr) => {
        match $storage {
            Storage::File($inner) => $call,
            Storage::Memory($inner) => $call,
            Storage::Nbd($inner) => $call,
            Storage::Null($inner) => $call,
            Storage::Rbd($inner) => $call,
            Storage::Simulated($inner) => $call,
            Storage::Wrapped($inner) => $call,
        }
    };
}

impl Storage {
    /// Creates a memory storage of `size_bytes`. Pages are allocated on first write.
    ///
    /// # Panics
    /// Panics above 256 TiB.
    pub fn memory(size_bytes: u64) -> Self {
        Self::Memory(MemoryStorage::new(size_bytes).expect("at most 256 TiB"))
    }

    /// Creates a memory storage with this content, of at least 512 bytes.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub async fn with_content(content: &[u8]) -> Self {
        let storage = Self::memory((content.len() as u64).max(512));
        if !content.is_empty() {
            let written = storage.write(0, IoBuffer::copy_of(content).into(), Durability::Cached).await;
            written.expect("memory takes it");
        }
        storage
    }

    /// Reads the whole content into memory. For small storage only.
    ///
    /// # Errors
    /// As [`Storage::read`].
    pub async fn read_all(&self) -> Result<Vec<u8>> {
        Ok(self.read(0, IoBuffer::new(self.size_bytes() as usize)).await?.to_vec())
    }

    /// Last known size in bytes. Never waits.
    pub fn size_bytes(&self) -> u64 {
        each!(self, inner => inner.size_bytes())
    }

    /// Reads the size again, in case the storage was resized from outside, and returns it in bytes.
    /// [`Storage::size_bytes`] returns the new size from then on. Waits for the file system.
    ///
    /// # Errors
    /// As reported by the file system.
    pub async fn refresh_size(&self) -> Result<u64> {
        each!(self, inner => inner.refresh_size().await)
    }

    /// Granularity of the sizes that [`Storage::resize`] accepts, in bytes: 1 for regular files and
    /// memory, else 512 or the device's block size.
    pub fn size_multiple(&self) -> u64 {
        match self {
            Self::File(file) => file.device().size_multiple(),
            Self::Nbd(nbd) => nbd.device().size_multiple(),
            Self::Rbd(image) => image.device().size_multiple(),
            Self::Simulated(disk) => disk.device().size_multiple(),
            Self::Memory(_) | Self::Null(_) => 1,
            Self::Wrapped(wrapped) => wrapped.inner().size_multiple(),
        }
    }

    /// Resizes the storage while it is in use. Bytes beyond a smaller size are lost; added bytes
    /// read as zeroes. The size is a non-zero multiple of [`Storage::size_multiple`]. For a block
    /// device only its current size is valid, and the kernel's value is read again.
    ///
    /// # Errors
    /// [`ResizeError`]; the size is then unchanged.
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        match self {
            Self::File(file) => file.resize(size_bytes).await,
            Self::Rbd(image) => image.resize(size_bytes).await,
            Self::Simulated(disk) => disk.resize(size_bytes).await,
            Self::Memory(memory) => memory.resize(size_bytes),
            Self::Nbd(nbd) => nbd.resize(size_bytes).await,
            Self::Null(null) => null.resize(size_bytes),
            Self::Wrapped(wrapped) => Box::pin(wrapped.resize(size_bytes)).await,
        }
    }

    /// True if only its owner can enlarge it: a block device, or an export of an NBD server.
    pub fn has_fixed_size(&self) -> bool {
        self.bottom_nbd().is_some() || self.bottom_file().is_some_and(|file| !file.can_grow())
    }

    /// The file below all wrappers; `None` if the bottom is not a file.
    fn bottom_file(&self) -> Option<&FileStorage> {
        match self {
            Self::File(file) => Some(file.device()),
            Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => None,
            Self::Wrapped(wrapped) => wrapped.inner().bottom_file(),
        }
    }

    /// The NBD export below all wrappers; `None` if the bottom is not an export.
    fn bottom_nbd(&self) -> Option<&NbdStorage> {
        match self {
            Self::Nbd(nbd) => Some(nbd.device()),
            Self::File(_) | Self::Memory(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => None,
            Self::Wrapped(wrapped) => wrapped.inner().bottom_nbd(),
        }
    }

    /// The NBD server or the pool of a Ceph cluster that stores the bytes; `None` if they are on
    /// this host. Disks with the same one share its performance.
    pub fn server(&self) -> Option<String> {
        let pool = self.bottom_rbd().and_then(RbdStorage::cluster_pool);
        pool.or_else(|| self.bottom_nbd()?.server())
    }

    /// State of the connections to the NBD server; `None` if the bottom is not an export.
    pub fn remote_status(&self) -> Option<nbd::NbdLinkStatus> {
        self.bottom_nbd().map(NbdStorage::remote)
    }

    /// Identity of the file at the bottom; `None` if the bottom is not a file.
    pub fn file_identity(&self) -> Option<FileIdentity> {
        self.bottom_file().map(FileStorage::identity)
    }

    /// Stamp of the file at the bottom. `None` if the bottom is not a file, or the file system does
    /// not report it now.
    pub async fn stamp(&self) -> Option<FileStamp> {
        match self.bottom_file() {
            Some(file) => file.stamp().await,
            None => None,
        }
    }

    /// True if the lowest layer is a regular file.
    pub fn has_stamp(&self) -> bool {
        self.bottom_file().is_some_and(FileStorage::can_grow)
    }

    /// Bytes that the file system has allocated to the file at the bottom, writes before the call
    /// included; `None` if the bottom is not a file. The last known number if the file system
    /// reports an error, or does not answer before `deadline`.
    pub async fn allocated_bytes_before(&self, deadline: Instant) -> Option<u64> {
        match self.bottom_file() {
            Some(file) => Some(file.allocated_bytes_before(deadline).await),
            None => None,
        }
    }

    /// Last value of [`Storage::allocated_bytes`]. Never waits.
    pub fn last_allocated_bytes(&self) -> u64 {
        match self {
            Self::File(file) if file.device().can_grow() => file.device().last_allocated_bytes(),
            Self::Memory(memory) => memory.allocated_bytes(),
            Self::Wrapped(wrapped) => wrapped.inner().last_allocated_bytes(),
            Self::File(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => {
                self.size_bytes()
            }
        }
    }

    /// Queries the file system of the file at the bottom and returns once it has replied: a health
    /// check. Returns at once if the bottom is not a file.
    pub async fn ping(&self) -> Result<()> {
        match self.bottom_file() {
            Some(file) => file.ping().await,
            None => Ok(()),
        }
    }

    /// Abandons the file at the bottom, whose file system does not answer: waiting requests and all
    /// later ones fail with [`Error::TIMED_OUT`](reactor::error::Error::TIMED_OUT). Reads and
    /// writes are failed if the file system does not support non-blocking attempts; other
    /// operations end by themselves.
    pub fn abandon(&self) {
        if let Some(file) = self.bottom_file() {
            file.abandon();
        }
    }

    /// Description for display: type, path or address, cache mode, wrappers.
    pub fn description(&self) -> String {
        each!(self, inner => inner.description())
    }

    /// Path of the file or device at the bottom; `None` if the bottom is not a file.
    pub fn path(&self) -> Option<&str> {
        self.bottom_file().map(FileStorage::name)
    }

    /// True if writes fail with [`Error::NOT_PERMITTED`](reactor::error::Error::NOT_PERMITTED).
    pub fn read_only(&self) -> bool {
        each!(self, inner => inner.read_only())
    }

    /// True if every write is durable when it completes, whatever durability it requests: the cache
    /// modes `writethrough` and `directsync`.
    pub fn writes_through(&self) -> bool {
        match self {
            Self::Rbd(image) => image.device().writes_through(),
            Self::Wrapped(wrapped) => wrapped.inner().writes_through(),
            _ => {
                self.bottom_file().is_some_and(FileStorage::writes_through)
                    || self.bottom_nbd().is_some_and(NbdStorage::writes_through)
            }
        }
    }

    /// The RBD image below all wrappers.
    fn bottom_rbd(&self) -> Option<&RbdStorage> {
        match self {
            Self::Rbd(image) => Some(image.device()),
            Self::Wrapped(wrapped) => wrapped.inner().bottom_rbd(),
            Self::File(_) | Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Simulated(_) => None,
        }
    }

    /// True if acknowledged writes exist only in librbd's cache in this process. Memory storage,
    /// all of which is in this process, does not count.
    pub fn has_volatile_writes(&self) -> bool {
        self.bottom_rbd().is_some_and(RbdStorage::has_volatile_writes)
    }

    /// True if its bytes are in a Ceph cluster.
    pub fn is_in_cluster(&self) -> bool {
        self.bottom_rbd().is_some()
    }

    /// True if its bytes are on another host: RBD or NBD.
    pub fn is_remote(&self) -> bool {
        self.bottom_rbd().is_some() || self.bottom_nbd().is_some()
    }

    /// Age of the oldest request in flight, for RBD and NBD. It grows while the cluster or the
    /// server does not answer.
    pub fn oldest_request(&self) -> Option<Duration> {
        self.bottom_rbd()
            .and_then(RbdStorage::oldest_request)
            .or_else(|| self.bottom_nbd().and_then(NbdStorage::oldest_request_age))
    }

    /// Notification (`ResizeNotifier`) that another client may have resized the image; the reaction
    /// is [`Storage::poll_size`]. `None` if the storage does not notify.
    pub fn resize_notifier(&self) -> Option<&Arc<rbd::ResizeNotifier>> {
        self.bottom_rbd().map(RbdStorage::resize_notifier)
    }

    /// Interval at which to call [`Storage::poll_size`] if the storage may not notify about a
    /// resize; `None` if it does.
    pub fn poll_interval(&self) -> Option<Duration> {
        self.bottom_rbd().and_then(RbdStorage::poll_interval)
    }

    /// As [`Storage::refresh_size`], but queries a cluster too, which may take a while.
    ///
    /// # Errors
    /// The size cannot be read.
    pub async fn poll_size(&self) -> Result<u64> {
        if let Some(image) = self.bottom_rbd() {
            image.poll_size().await?;
        }
        self.refresh_size().await
    }

    /// Maximum size of librbd's cache for this image in this process, in bytes.
    pub fn max_cache_bytes(&self) -> u64 {
        self.bottom_rbd().map_or(0, RbdStorage::max_cache_bytes)
    }

    /// Closes an RBD image, so that other clients can open it. Must be the last call. Other storage
    /// is closed by dropping it.
    ///
    /// # Errors
    /// As reported by the cluster; flushed data is durable nonetheless.
    pub async fn close(&self) -> Result<()> {
        match self.bottom_rbd() {
            Some(image) => image.close().await,
            None => Ok(()),
        }
    }

    /// True if the page cache has lost writes. Flushes fail from then on.
    pub fn has_lost_writes(&self) -> bool {
        self.bottom_file().is_some_and(FileStorage::has_lost_writes)
            || self.bottom_nbd().is_some_and(NbdStorage::has_lost_writes)
    }

    /// True if an operation of a cancelled request may still take effect: it is in flight in the
    /// kernel or in a library, or is a read-modify-write or a resize, which continues.
    pub fn is_busy(&self) -> bool {
        match self {
            Self::File(file) => file.has_detached() || file.device().is_busy(),
            Self::Nbd(export) => export.has_detached(),
            Self::Rbd(image) => image.has_detached() || image.device().oldest_request().is_some(),
            Self::Simulated(disk) => disk.has_detached() || disk.device().is_busy(),
            Self::Memory(_) | Self::Null(_) => false,
            Self::Wrapped(wrapped) => wrapped.inner().is_busy(),
        }
    }

    /// True if a change of a cancelled request may still take effect: see [`Storage::is_busy`].
    pub fn is_changing(&self) -> bool {
        match self {
            Self::File(file) => file.has_detached() || file.device().is_changing(),
            Self::Rbd(image) => image.has_detached() || image.device().is_changing(),
            Self::Wrapped(wrapped) => wrapped.inner().is_changing(),
            other => other.is_busy(),
        }
    }

    /// True if its bytes are in the memory of this process only.
    pub fn is_memory(&self) -> bool {
        match self {
            Self::Memory(_) => true,
            Self::Wrapped(wrapped) => wrapped.inner().is_memory(),
            Self::File(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => false,
        }
    }

    /// True if a resize can enlarge it and the added bytes read as zeroes. Not so for a block
    /// device: its owner enlarges it, and the added range keeps its old content.
    pub fn can_grow(&self) -> bool {
        self.bottom_file().is_none_or(FileStorage::can_grow) && self.bottom_nbd().is_none()
    }

    /// Alignment that costs least.
    pub fn block_size(&self) -> BlockSize {
        each!(self, inner => inner.block_size())
    }

    /// True if zeroing is, as far as is known, faster than writing zeroes. May become false after
    /// the file system has rejected it.
    pub fn can_zero_fast(&self) -> bool {
        each!(self, inner => inner.can_zero_fast())
    }

    /// Reads at `offset` until `buffer` is full.
    ///
    /// # Errors
    /// [`Error::IO`](reactor::error::Error::IO) from the device, or if a file was truncated by
    /// another process. Never returns stale memory as data.
    pub async fn read(&self, offset: u64, buffer: IoBuffer) -> Result<IoBuffer> {
        Ok(self.read_into(offset, buffer.into()).await?.joined())
    }

    /// As [`Storage::read`], into segments. If a segment is guest memory and the future is dropped,
    /// the kernel may write to it until the operation has ended.
    ///
    /// # Errors
    /// As [`Storage::read`]; the content of the segments is then undefined.
    pub async fn read_into(&self, offset: u64, target: Segments) -> Result<Segments> {
        each!(self, inner => inner.read(offset, target).await)
    }

    /// True if [`Storage::read_registered`] and [`Storage::write_registered`] may be supported. A
    /// single call can still return `None`.
    pub fn supports_registered(&self) -> bool {
        matches!(self, Self::File(_) | Self::Simulated(_))
    }

    /// As [`Storage::read_into`], directly into the registered buffer of a ublk request (zero
    /// copy). `None` if this request needs a copy; then nothing has been read.
    ///
    /// # Errors
    /// As [`Storage::read_into`].
    pub async fn read_registered(&self, offset: u64, buffer: &RegisteredData) -> Option<Result<()>> {
        match self {
            Self::File(file) => file.read_registered(offset, buffer).await,
            Self::Simulated(disk) => disk.read_registered(offset, buffer).await,
            _ => None,
        }
    }

    /// As [`Storage::write`], directly from the registered buffer of a ublk request; `None` as
    /// [`Storage::read_registered`].
    ///
    /// # Errors
    /// As [`Storage::write`].
    pub async fn write_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Option<Result<()>> {
        match self {
            Self::File(file) => file.write_registered(offset, buffer, durability).await,
            Self::Simulated(disk) => disk.write_registered(offset, buffer, durability).await,
            _ => None,
        }
    }

    /// References to the bytes that [`Storage::read`] would return, without waiting and without a
    /// copy. Later writes do not change them. `None` if the storage is not memory, and outside the
    /// disk.
    pub fn read_shared(&self, offset: u64, length: usize) -> Option<Segments> {
        match self {
            Self::Memory(memory) => memory.read_shared(offset, length),
            _ => None,
        }
    }

    /// True if reads and writes never wait: see [`Storage::read_now`].
    pub fn is_instant(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::Null(_))
    }

    /// Reads into guest memory as [`Storage::read_into`], synchronously; `None` if the storage may
    /// wait.
    pub fn read_now(&self, offset: u64, into: &[GuestBytes]) -> Option<Result<()>> {
        match self {
            Self::Memory(memory) => Some(memory.read_now(offset, into)),
            Self::Null(_) => Some(Ok(())),
            _ => None,
        }
    }

    /// Writes from guest memory as [`Storage::write`], synchronously; `None` if the storage may
    /// wait.
    pub fn write_now(&self, offset: u64, from: &[GuestBytes]) -> Option<Result<()>> {
        match self {
            Self::Memory(memory) => Some(memory.write_now(offset, from)),
            Self::Null(_) => Some(Ok(())),
            _ => None,
        }
    }

    /// Writes the segments in order, beginning at `offset`.
    ///
    /// # Errors
    /// As reported by the device; [`Error::NO_SPACE`](reactor::error::Error::NO_SPACE) if the file
    /// system is full. A part may have been written.
    pub async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        each!(self, inner => inner.write(offset, data, durability).await)
    }

    /// True if [`Storage::will_need`] has an effect: only files behind the page cache read ahead.
    pub fn can_read_ahead(&self) -> bool {
        match self {
            Self::File(file) => file.device().can_read_ahead(),
            Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) => false,
            Self::Simulated(_) => true,
            Self::Wrapped(wrapped) => wrapped.inner().can_read_ahead(),
        }
    }

    /// Hints that a range will be read soon. The storage may read it ahead, up to the whole range.
    pub async fn will_need(&self, offset: u64, length: u64) {
        match self {
            Self::File(file) => file.device().will_need(offset, length).await,
            Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) => {}
            Self::Simulated(disk) => disk.device().will_need(length).await,
            Self::Wrapped(wrapped) => Box::pin(wrapped.will_need(offset, length)).await,
        }
    }

    /// Returns once every write that completed before the call is on stable storage.
    ///
    /// # Errors
    /// As reported by the device; some of those writes may then be lost.
    pub async fn flush(&self) -> Result<()> {
        each!(self, inner => inner.flush().await)
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As for writes; [`Error::UNSUPPORTED`](reactor::error::Error::UNSUPPORTED) only with
    /// `only_if_fast`, and then nothing has changed.
    pub async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        each!(self, inner => inner.write_zeroes(offset, length, options).await)
    }

    /// False if [`Storage::reserve`] is known to be unsupported, for example by the file system.
    pub fn can_reserve(&self) -> bool {
        self.bottom_file().is_some_and(FileStorage::can_reserve)
    }

    /// Reserves space for a range, which may lie past the end: later writes there do not fail for
    /// lack of space. Neither content nor size changes.
    ///
    /// # Errors
    /// [`Error::UNSUPPORTED`](reactor::error::Error::UNSUPPORTED) except for regular files on most
    /// file systems. Otherwise as for writes.
    pub async fn reserve(&self, offset: u64, length: u64) -> Result<()> {
        match self {
            Self::File(file) => file.device().reserve(offset, length).await,
            Self::Wrapped(wrapped) => Box::pin(wrapped.reserve(offset, length)).await,
            Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => {
                Err(Error::UNSUPPORTED)
            }
        }
    }

    /// Space that stores the content, in bytes: `st_blocks` of a regular file, the written pages of
    /// memory. For storage without a count it is the whole size.
    ///
    /// # Errors
    /// As reported by the file system.
    pub async fn allocated_bytes(&self) -> Result<u64> {
        match self {
            Self::File(file) if !file.device().can_grow() => Ok(self.size_bytes()),
            Self::File(file) => file.device().allocated_bytes().await,
            Self::Memory(memory) => Ok(memory.allocated_bytes()),
            Self::Wrapped(wrapped) => Box::pin(wrapped.allocated_bytes()).await,
            Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => Ok(self.size_bytes()),
        }
    }

    /// Discards a range, whose content is unspecified from then on. A hint: storage that cannot
    /// discard succeeds and does nothing.
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        each!(self, inner => inner.discard(offset, length).await)
    }

    /// Allocation status of a range: from one to [`MAX_EXTENTS`] adjacent extents that begin at
    /// `offset` and together cover at most `length` bytes, perhaps fewer. `length` is not zero.
    pub async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        each!(self, inner => inner.block_status(offset, length).await)
    }
}

/// Appends an extent, joining it to the last one if they are alike.
pub fn push_extent(extents: &mut Vec<Extent>, extent: Extent) {
    match extents.last_mut() {
        Some(last) if (last.hole, last.zero) == (extent.hole, extent.zero) => last.length += extent.length,
        _ => extents.push(extent),
    }
}

/// True if `offset..offset + length` lies inside `size`, without overflow.
fn within(offset: u64, length: u64, size: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= size)
}
