//! Where bytes live. A storage reads, writes, flushes, zeroes and discards, and owns what the cache
//! mode means.
//!
//! ```text
//!   fault ─► rate ─► delay ─► part ─► (align ─► file │ rbd │ nbd │ simulated; memory; null)
//!   wrappers, each optional      what is at the bottom
//! ```
//!
//! One enum rather than a trait object: the futures of the hot path then live inside the request's
//! own task and cost no allocation. Wrappers box the future of what they wrap, since they nest.
//!
//! Contract of every storage:
//! - Offsets and lengths are inside [`Storage::size_bytes`] and aligned to nothing; `align` sees to
//!   what the device wants.
//! - `read` fills the whole buffer, or fails. Holes read as zeroes.
//! - A write is visible to reads that start after it completed. It survives a crash once a later
//!   flush has completed, or at once if it was made with [`Durability::Synchronous`].
//! - Overlapping requests in flight may take effect in any order, but never change bytes outside
//!   their own range.
//! - A storage is shared by the workers; a future belongs to the thread that polls it.
//! - A request's future that is dropped leaves the outcome of that request open, and of no other.

#![deny(unsafe_code)]

pub mod align;
pub mod delay;
pub mod fault;
pub mod file;
mod flushes;
mod identity;
mod invalid_value;
mod lock;
pub mod memory;
pub mod nbd;
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
pub mod simulated;
mod spec;
mod wrapped;

pub use file::FileIdentity;
pub use file::{CacheMode, File, Passed, PassedFile};
pub use identity::Identity;
pub use invalid_value::InvalidValue;
pub use lock::in_use;
pub use open::{OpenOptions, open_storage, probe_anywhere};
pub use open::{open_any, open_bottom, wrapped};
pub use open_error::OpenError;
pub use options::InvalidOption;
pub use own_mounts::OwnMount;
pub use part::Part;
pub use probe::Format;
pub use range_lock::Guard as RangeGuard;
pub use range_lock::RangeLocks;
pub use resize::ResizeError;
pub use root::Root;
pub use spec::{Spec, parse_duration, parse_size, show_duration};
pub use wrapped::Wrapped;

use std::{io, sync::Arc};

use policy::time::{Duration, Instant};

use self::{
    align::{Align, Device as _},
    memory::Memory,
    nbd::Nbd,
    null::Null,
    rbd::Rbd,
    simulated::Simulated,
};
pub use reactor::op::Durability;
use reactor::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
    guest::Place,
    ublk::Registered,
};

/// How zeroes may come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroOptions {
    /// The range may be deallocated, as long as it reads as zeroes afterwards.
    pub may_unmap: bool,
    /// Fail with [`Error::UNSUPPORTED`](reactor::error::Error::UNSUPPORTED) at once if it would be no
    /// faster than writing.
    pub only_if_fast: bool,
    /// As for writes.
    pub durability: Durability,
}

/// A run of a disk that is alike: NBD's `base:allocation`, SEEK_HOLE and SEEK_DATA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes, never zero.
    pub length: u64,
    /// Nothing is allocated there.
    pub hole: bool,
    /// It reads as zeroes.
    pub zero: bool,
}

/// Most extents in one answer to [`Storage::block_status`]: it bounds memory and the time of one
/// request.
pub const MOST_EXTENTS: usize = 256;

/// What requests cost least with, in bytes; both powers of two. Any request is correct, whatever
/// its alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// Below this, or not aligned to it, a write costs a read and a write of the blocks at its
    /// edges. 1 where it makes no difference.
    pub minimum: u32,
    /// At least this much, and aligned to it, is best.
    pub preferred: u32,
}

/// When a file was last written to, and how long it then was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    modified_s: i64,
    modified_ns: i64,
    size_bytes: i64,
}

/// Storage of any kind.
#[derive(Debug)]
pub enum Storage {
    /// A regular file or block device.
    File(Align<File>),
    /// Memory, allocated as it is written.
    Memory(Memory),
    /// What another server has.
    Nbd(Align<Nbd>),
    /// Reads zeroes, forgets writes.
    Null(Null),
    /// An image of a Ceph cluster.
    Rbd(Align<Rbd>),
    /// A disk in the simulation, which tears, loses and reorders what was not flushed.
    Simulated(Align<Simulated>),
    /// Another storage, made slower or failing on purpose.
    Wrapped(Box<Wrapped>),
}

/// The same expression for every kind of storage.
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
    /// Memory of so many bytes, which takes room as it is written.
    ///
    /// # Panics
    /// Above 256 TiB.
    pub fn memory(size_bytes: u64) -> Self {
        Self::Memory(Memory::new(size_bytes).expect("at most 256 TiB"))
    }

    /// Memory with this content, and of 512 bytes at least.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn holding(content: &[u8]) -> Self {
        let storage = Self::memory((content.len() as u64).max(512));
        if !content.is_empty() {
            let written = storage.write(0, Buffer::copy_of(content).into(), Durability::Cached).await;
            written.expect("memory takes it");
        }
        storage
    }

    /// All of it. For what is small.
    ///
    /// # Errors
    /// As [`Storage::read`].
    pub async fn content(&self) -> Result<Vec<u8>> {
        Ok(self.read(0, Buffer::new(self.size_bytes() as usize)).await?.to_vec())
    }

    /// The size in bytes as last seen; never waits.
    pub fn size_bytes(&self) -> u64 {
        each!(self, inner => inner.size_bytes())
    }

    /// Reads the size anew, in case the storage was resized from outside; returns the size in
    /// bytes, which [`Storage::size_bytes`] repeats from now on. A file's size takes as long as its
    /// file system takes to answer.
    ///
    /// # Errors
    /// The file system's.
    pub async fn refresh_size(&self) -> Result<u64> {
        each!(self, inner => inner.refresh_size().await)
    }

    /// Multiple of the sizes that [`Storage::resize`] accepts, in bytes: 1 where a size is kept to
    /// the byte, which regular files and memory do; elsewhere 512, or the device's block.
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

    /// Gives it another size, while it is used: what is cut off is lost, what is added reads as
    /// zeroes. A size is a multiple of [`Storage::size_multiple`], and not 0. A block device takes
    /// none but its own, which is read again.
    ///
    /// # Errors
    /// [`ResizeError`]; the size is then what it was.
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

    /// True if only its owner can make it larger: a block device, or a disk at an NBD server.
    pub fn keeps_size(&self) -> bool {
        self.nbd().is_some() || self.file().is_some_and(|file| !file.can_grow())
    }

    /// The file at the bottom, whatever is around it; none where that is no file.
    fn file(&self) -> Option<&File> {
        match self {
            Self::File(file) => Some(file.device()),
            Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => None,
            Self::Wrapped(wrapped) => wrapped.inner().file(),
        }
    }

    /// The export at the bottom, whatever is around it; none where that is none.
    fn nbd(&self) -> Option<&Nbd> {
        match self {
            Self::Nbd(nbd) => Some(nbd.device()),
            Self::File(_) | Self::Memory(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => None,
            Self::Wrapped(wrapped) => wrapped.inner().nbd(),
        }
    }

    /// How it stands with the server that has it; none where it is on this host.
    pub fn remote(&self) -> Option<nbd::Remote> {
        self.nbd().map(Nbd::remote)
    }

    /// Which file is at the bottom; none where that is no file.
    pub fn file_identity(&self) -> Option<FileIdentity> {
        self.file().map(File::identity)
    }

    /// Stamp of the file at the bottom, which changes with the content. `None` if the bottom is not
    /// a file, or the file system does not report it now.
    pub async fn stamp(&self) -> Option<Stamp> {
        match self.file() {
            Some(file) => file.stamp().await,
            None => None,
        }
    }

    /// True if the lowest layer is a regular file.
    pub fn has_stamp(&self) -> bool {
        self.file().is_some_and(File::can_grow)
    }

    /// Bytes that the file system has allocated to the file at the bottom, writes before the call
    /// included; `None` if the bottom is not a file. The last known number if the file system
    /// reports an error, or does not answer before `deadline`.
    pub async fn allocated_bytes_before(&self, deadline: Instant) -> Option<u64> {
        match self.file() {
            Some(file) => Some(file.allocated_bytes_before(deadline).await),
            None => None,
        }
    }

    /// As [`Storage::allocated_bytes`], as last counted. Never waits.
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

    /// Returns once the file system of the file at the bottom has answered; at once where that is
    /// no file.
    pub async fn ask(&self) -> Result<()> {
        match self.file() {
            Some(file) => file.ask().await,
            None => Ok(()),
        }
    }

    /// Fails the requests that wait for the file at the bottom, and all later ones, with
    /// [`Error::TIMED_OUT`](reactor::error::Error::TIMED_OUT): its file system does not answer, and
    /// it is to be closed. Reads and writes are failed if the file system does not support
    /// non-blocking attempts; others end by themselves.
    pub fn give_up(&self) {
        if let Some(file) = self.file() {
            file.give_up();
        }
    }

    /// Channel whose other end is closed once the file at the bottom is closed and its locks are
    /// released; `None` if the bottom is not a file.
    pub fn closed(&self) -> Option<async_channel::Receiver<()>> {
        self.file().map(File::closed)
    }

    /// What it is, for people: kind, place, cache mode, wrappers.
    pub fn description(&self) -> String {
        each!(self, inner => inner.description())
    }

    /// The path of the file or device at the bottom; `None` where there is none.
    pub fn path(&self) -> Option<&str> {
        self.file().map(File::name)
    }

    /// Whether writes fail with [`Error::NOT_PERMITTED`](reactor::error::Error::NOT_PERMITTED).
    pub fn read_only(&self) -> bool {
        each!(self, inner => inner.read_only())
    }

    /// Whether every write is durable when it has completed, whatever it asked for: the cache modes
    /// `writethrough` and `directsync`.
    pub fn writes_through(&self) -> bool {
        match self {
            Self::Rbd(image) => image.device().writes_through(),
            Self::Wrapped(wrapped) => wrapped.inner().writes_through(),
            _ => self.file().is_some_and(File::writes_through) || self.nbd().is_some_and(Nbd::writes_through),
        }
    }

    /// The image of a cluster at the bottom, whatever is around it.
    fn rbd(&self) -> Option<&Rbd> {
        match self {
            Self::Rbd(image) => Some(image.device()),
            Self::Wrapped(wrapped) => wrapped.inner().rbd(),
            Self::File(_) | Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Simulated(_) => None,
        }
    }

    /// Whether writes that were acknowledged are in this process alone: in the cache of a library.
    /// Memory, which all is in, does not count.
    pub fn would_lose(&self) -> bool {
        self.rbd().is_some_and(Rbd::would_lose)
    }

    /// Whether its bytes are in a Ceph cluster.
    pub fn is_in_cluster(&self) -> bool {
        self.rbd().is_some()
    }

    /// Whether its bytes are on no device of this host.
    pub fn is_far(&self) -> bool {
        self.rbd().is_some() || self.nbd().is_some()
    }

    /// How long the oldest request has been under way, where that is known: with a cluster or a
    /// server that stands still it becomes long.
    pub fn oldest_request(&self) -> Option<Duration> {
        self.rbd().and_then(Rbd::oldest_request).or_else(|| self.nbd().and_then(Nbd::oldest_request))
    }

    /// Rings once others may have given it another size: then [`Storage::look_again`]. None where
    /// nobody says so.
    pub fn bell(&self) -> Option<&Arc<rbd::Bell>> {
        self.rbd().map(Rbd::bell)
    }

    /// How often [`Storage::look_again`] is due where nobody may say so; none where somebody does.
    pub fn look_every(&self) -> Option<Duration> {
        self.rbd().and_then(Rbd::look_every)
    }

    /// As [`Storage::refresh_size`], and asks also where that takes a while.
    ///
    /// # Errors
    /// It cannot be seen.
    pub async fn look_again(&self) -> Result<u64> {
        if let Some(image) = self.rbd() {
            image.look_again().await?;
        }
        self.refresh_size().await
    }

    /// What a library keeps of it in this process's memory, at most, in bytes.
    pub fn most_cache_bytes(&self) -> u64 {
        self.rbd().map_or(0, Rbd::most_cache_bytes)
    }

    /// The last thing that is done with it: others may have it then. Only of what more is to be
    /// done for than to drop it.
    ///
    /// # Errors
    /// What the cluster says; what was flushed is safe nonetheless.
    pub async fn close(&self) -> Result<()> {
        match self.rbd() {
            Some(image) => image.close().await,
            None => Ok(()),
        }
    }

    /// Whether the page cache has lost writes, so that flushes fail from now on.
    pub fn has_lost_writes(&self) -> bool {
        self.file().is_some_and(File::has_lost_writes) || self.nbd().is_some_and(Nbd::has_lost_writes)
    }

    /// Whether others may write to it meanwhile, for all that is known here: it was opened although
    /// somebody does, or the file system has no locks.
    pub fn may_be_written_by_others(&self) -> bool {
        self.file().is_some_and(|file| !file.is_protected()) || self.nbd().is_some_and(Nbd::is_shared)
    }

    /// See [`OpenOptions::handover`].
    pub fn is_handed_over(&self) -> bool {
        self.file().is_some_and(File::is_handed_over)
    }

    /// Takes the locks of a file that was opened without (see [`OpenOptions::handover`]), if they
    /// are to be had now. Blocks, and for longer on the `last` attempt,
    /// which fails where others would return false.
    pub fn take_locks(&self, last: bool) -> std::result::Result<bool, OpenError> {
        self.file().map_or(Ok(true), |file| file.take_locks(last))
    }

    /// Lets others have the file, which is not to be used any more.
    pub fn release_locks(&self) {
        if let Some(file) = self.file() {
            file.release_locks();
        }
    }

    /// Whether the kernel may be at work on it, also for those who do not wait for that.
    pub fn is_busy(&self) -> bool {
        self.file().is_some_and(File::is_busy) || self.rbd().and_then(Rbd::oldest_request).is_some()
    }

    /// Its descriptors, for a process that takes over; none of what is no file, or only read.
    pub fn descriptors(&self) -> Option<io::Result<PassedFile>> {
        self.file().filter(|_| !self.read_only()).map(File::descriptors)
    }

    /// Whether its bytes are in this process alone.
    pub fn is_memory(&self) -> bool {
        match self {
            Self::Memory(_) => true,
            Self::Wrapped(wrapped) => wrapped.inner().is_memory(),
            Self::File(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) | Self::Simulated(_) => false,
        }
    }

    /// Whether another process has it, which passed it on where it is a file.
    pub fn is_passed(&self) -> bool {
        self.file().is_some_and(File::is_passed)
            || self.nbd().is_some_and(Nbd::is_passed)
            || self.rbd().is_some_and(Rbd::is_passed)
    }

    /// The same, and the other may go on.
    pub fn is_anothers(&self) -> bool {
        self.file().is_some_and(File::is_anothers)
            || self.nbd().is_some_and(Nbd::is_anothers)
            || self.rbd().is_some_and(Rbd::is_anothers)
    }

    /// Whether its cluster has shut this process out, so that every request fails.
    pub fn is_lost(&self) -> bool {
        self.rbd().is_some_and(Rbd::is_lost)
    }

    /// Brings what is written to where another process sees it: a server, or a cluster.
    ///
    /// # Errors
    /// What these say.
    pub async fn write_back(&self) -> Result<()> {
        match self.rbd() {
            Some(image) if !self.read_only() => image.write_back().await,
            None if self.nbd().is_some() => self.flush().await,
            _ => Ok(()),
        }
    }

    /// Lets another process have an image of a cluster, which is not to be used before
    /// [`Storage::take_up`].
    ///
    /// # Errors
    /// What the cluster says; it can be taken up again.
    pub async fn lay_down(&self) -> Result<()> {
        match self.rbd() {
            Some(image) => image.lay_down().await,
            None => Ok(()),
        }
    }

    /// Takes an image of a cluster up that was laid down, here or in another process. `heirs` are
    /// clients that it was laid down for and that are not to have it: first they are
    /// [shut out](Storage::shut_out).
    ///
    /// # Errors
    /// Why it cannot be had.
    pub async fn take_up(&self, heirs: &[u64]) -> std::result::Result<(), OpenError> {
        match self.rbd() {
            Some(image) => image.take_up(heirs).await,
            None => Ok(()),
        }
    }

    /// Has a cluster take nothing more from clients of it, by their numbers, that still have this
    /// image open to write to it.
    ///
    /// # Errors
    /// What the cluster says.
    pub async fn shut_out(&self, clients: &[u64]) -> Result<()> {
        match self.rbd() {
            Some(image) => image.shut_out(clients).await,
            None => Ok(()),
        }
    }

    /// Whether another process reads what was written to it and flushed.
    pub fn is_common(&self) -> bool {
        self.file().is_some() || self.nbd().is_some_and(Nbd::has_common_flushes)
    }

    /// Another process has written to it, perhaps without a flush: the next one is the device's.
    pub fn was_changed(&self) {
        match self {
            Self::File(file) => file.was_changed(),
            Self::Nbd(nbd) => nbd.was_changed(),
            Self::Rbd(image) => image.was_changed(),
            Self::Wrapped(wrapped) => wrapped.inner().was_changed(),
            Self::Memory(_) | Self::Null(_) | Self::Simulated(_) => {}
        }
    }

    /// Whether it is made longer by asking, and then reads as zeroes behind its old end. A block
    /// device is not: its owner makes it longer, and it has there whatever it had before.
    pub fn can_grow(&self) -> bool {
        self.file().is_none_or(File::can_grow) && self.nbd().is_none()
    }

    /// The alignment that costs least.
    pub fn block_size(&self) -> BlockSize {
        each!(self, inner => inner.block_size())
    }

    /// Whether zeroing is, as far as is known, faster than writing zeroes. May turn false when the
    /// file system has refused it once.
    pub fn can_zero_fast(&self) -> bool {
        each!(self, inner => inner.can_zero_fast())
    }

    /// Fills `buffer` with what is at `offset`.
    ///
    /// # Errors
    /// [`Error::IO`](reactor::error::Error::IO) from the device, or where a file has been truncated
    /// underneath; never old memory.
    pub async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer> {
        Ok(self.read_into(offset, buffer.into()).await?.joined())
    }

    /// The same into segments, which come back filled. Where one is a guest's memory and the future
    /// is dropped, the kernel may write to it until the operation has ended.
    ///
    /// # Errors
    /// As [`Storage::read`]; what is in the segments is then undefined.
    pub async fn read_into(&self, offset: u64, target: Segments) -> Result<Segments> {
        each!(self, inner => inner.read(offset, target).await)
    }

    /// Whether data may move between it and where a request's is: see
    /// [`Storage::read_registered`]. Not all of it can, always.
    pub fn takes_registered(&self) -> bool {
        matches!(self, Self::File(_) | Self::Simulated(_))
    }

    /// As [`Storage::read_into`], with the data where a request's is, so that nobody copies it.
    /// `None`, and nothing has happened: that cannot be, and the data is to be copied there.
    ///
    /// # Errors
    /// As there.
    pub async fn read_registered(&self, offset: u64, buffer: &Registered) -> Option<Result<()>> {
        match self {
            Self::File(file) => file.read_registered(offset, buffer).await,
            Self::Simulated(disk) => disk.read_registered(offset, buffer).await,
            _ => None,
        }
    }

    /// As [`Storage::write`], of a request's data where it is; `None` as
    /// [`Storage::read_registered`].
    ///
    /// # Errors
    /// As there.
    pub async fn write_registered(
        &self,
        offset: u64,
        buffer: &Registered,
        durability: Durability,
    ) -> Option<Result<()>> {
        match self {
            Self::File(file) => file.write_registered(offset, buffer, durability).await,
            Self::Simulated(disk) => disk.write_registered(offset, buffer, durability).await,
            _ => None,
        }
    }

    /// What [`Storage::read`] would read, without waiting and without copying it; `None` from
    /// storage that does not keep its bytes in memory, and outside the disk. Writes that come later
    /// do not change it.
    pub fn lend(&self, offset: u64, length: usize) -> Option<Segments> {
        match self {
            Self::Memory(memory) => memory.lend(offset, length),
            _ => None,
        }
    }

    /// Whether reads and writes are done without waiting: see [`Storage::read_now`].
    pub fn is_instant(&self) -> bool {
        matches!(self, Self::Memory(_) | Self::Null(_))
    }

    /// Reads into a guest's memory as [`Storage::read_into`], without waiting, where the storage
    /// never does; `None` from any other.
    pub fn read_now(&self, offset: u64, into: &[Place]) -> Option<Result<()>> {
        match self {
            Self::Memory(memory) => Some(memory.read_now(offset, into)),
            Self::Null(_) => Some(Ok(())),
            _ => None,
        }
    }

    /// Writes from a guest's memory as [`Storage::write`], without waiting, as
    /// [`Storage::read_now`].
    pub fn write_now(&self, offset: u64, from: &[Place]) -> Option<Result<()>> {
        match self {
            Self::Memory(memory) => Some(memory.write_now(offset, from)),
            Self::Null(_) => Some(Ok(())),
            _ => None,
        }
    }

    /// Writes the segments one after the other, beginning at `offset`.
    ///
    /// # Errors
    /// What the device says; [`Error::NO_SPACE`](reactor::error::Error::NO_SPACE) where the file
    /// system is full. A part may have been written.
    pub async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        each!(self, inner => inner.write(offset, data, durability).await)
    }

    /// Whether [`Storage::will_need`] reads anything: only files behind the page cache have a use
    /// for it.
    pub fn can_read_ahead(&self) -> bool {
        match self {
            Self::File(file) => file.device().can_read_ahead(),
            Self::Memory(_) | Self::Nbd(_) | Self::Null(_) | Self::Rbd(_) => false,
            Self::Simulated(_) => true,
            Self::Wrapped(wrapped) => wrapped.inner().can_read_ahead(),
        }
    }

    /// Says that a range will be read soon. A hint, which may read as much.
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
    /// What the device says; then some of those writes may be lost.
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
        self.file().is_some_and(File::can_reserve)
    }

    /// Reserves space for a range, which may lie past the end: later writes there do not fail for
    /// want of it. Neither content nor size changes.
    ///
    /// # Errors
    /// [`Error::UNSUPPORTED`](reactor::error::Error::UNSUPPORTED) where nothing can be reserved: only
    /// regular files can, on most file systems. Otherwise as for writes.
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

    /// Tells the storage that a range is no longer needed. Its content is unspecified from then on.
    /// A hint: storage that has no use for it succeeds without doing anything.
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        each!(self, inner => inner.discard(offset, length).await)
    }

    /// What the range is made of: from one to [`MOST_EXTENTS`] extents that begin at `offset`,
    /// follow each other and together cover no more than `length`, perhaps less. `length` is not
    /// zero.
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

/// Whether `offset..offset + length` lies inside `size`, without overflow.
fn within(offset: u64, length: u64, size: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= size)
}
