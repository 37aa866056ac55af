//! Image formats: map offsets of a disk to offsets in storage.
//!
//! One enum instead of a trait, for the same reason as [`Storage`]. Methods and contract are those
//! of [`Storage`], with offsets of the disk. Never throttles, merges or caches data: `block` does
//! that.

#![forbid(unsafe_code)]

mod identity;
pub mod open;
pub mod qcow2;
mod raw;
pub mod secret;

use std::io;

use policy::time::Duration;

use self::qcow2::{OpenFailure, header::incompatible};
pub use self::{
    identity::LayerIdentity,
    qcow2::Qcow2Image,
    raw::{RawImage, open_raw},
    secret::Secret,
};
use reactor::{
    buffer::{ReadTarget, Segments},
    error::{Error, Result},
    guest::GuestBytes,
    ublk::RegisteredData,
};
use storage::{
    BlockSize, Durability, Extent, FilesClosed, ImageFormat, OpenError, PassedFile, ResizeError, Storage,
    ZeroOptions,
};

/// Interval at which changes in flight are looked for.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// An image of any format.
#[derive(Debug)]
pub enum Image {
    /// Offsets of the disk are offsets of the storage.
    Raw(RawImage),
    /// Copy-on-write clusters, mapped by tables in the file.
    Qcow2(Qcow2Image),
}

/// Contiguous guest bytes that one image of the backing chain provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainDepthRun {
    /// Length in bytes, never zero.
    pub length: u64,
    /// 1 for the image itself, 2 for its backing file and so on; 0 if no image of the chain
    /// allocates it.
    pub depth: u32,
}

impl Image {
    /// Format that the image was opened as.
    pub fn format(&self) -> ImageFormat {
        match self {
            Self::Raw(_) => ImageFormat::Raw,
            Self::Qcow2(_) => ImageFormat::Qcow2,
        }
    }

    /// See [`Storage::size_bytes`].
    pub fn size_bytes(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.storage().size_bytes(),
            Self::Qcow2(qcow2) => qcow2.size_bytes(),
        }
    }

    /// See [`Storage::poll_size`]. Returns the stored size for a format that stores its
    /// size.
    pub async fn probe_size(&self) -> Result<u64> {
        if let Self::Raw(raw) = self {
            raw.storage().poll_size().await?;
        }
        self.refresh_size().await
    }

    /// See [`Storage::refresh_size`]. Returns the stored size for a format that stores its
    /// size.
    pub async fn refresh_size(&self) -> Result<u64> {
        match self {
            Self::Raw(raw) => raw.storage().refresh_size().await,
            Self::Qcow2(qcow2) => Ok(qcow2.size_bytes()),
        }
    }

    /// See [`Storage::size_multiple`]. The unit of a qcow2 image is a sector.
    pub fn size_multiple(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.storage().size_multiple(),
            Self::Qcow2(_) => 512,
        }
    }

    /// See [`Storage::resize`].
    ///
    /// # Errors
    /// Errors of [`Storage::resize`]; [`ResizeError::ReadOnly`] if the image was opened
    /// read-only; EPERM if the remaining bytes would look like another format.
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        match self {
            Self::Raw(raw) => raw.resize(size_bytes).await,
            Self::Qcow2(qcow2) => qcow2.resize(size_bytes).await,
        }
    }

    /// Storage that holds guest data: the external data file, if there is one.
    pub fn storage(&self) -> &Storage {
        match self {
            Self::Raw(raw) => raw.storage(),
            Self::Qcow2(qcow2) => qcow2.storage(),
        }
    }

    /// Fails if an image that was opened read-only could not be opened for writing because
    /// of its header's marks. `name` is the name in the error message.
    ///
    /// # Errors
    /// The image is marked corrupt.
    pub fn check_marks(&self, name: &str) -> std::result::Result<(), OpenError> {
        match self {
            Self::Qcow2(qcow2) if qcow2.header().incompatible & incompatible::CORRUPT != 0 => {
                Err(open::open_error(name, &OpenFailure::Corrupt))
            }
            Self::Qcow2(_) | Self::Raw(_) => Ok(()),
        }
    }

    /// Image that unallocated clusters are read from.
    pub fn backing(&self) -> Option<&Self> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(qcow2) => qcow2.backing(),
        }
    }

    /// The backing chain, beginning with the image itself.
    pub fn chain(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |image| image.backing())
    }

    /// Upper bound, in bytes, of the metadata caches of the whole chain and of the
    /// libraries below it.
    pub fn max_cache_bytes(&self) -> u64 {
        let below: u64 = self.chain().flat_map(Self::files).map(Storage::max_cache_bytes).sum();
        let caches = self.chain().map(|image| match image {
            Self::Raw(_) => 0,
            Self::Qcow2(qcow2) => {
                qcow2.cache_statistics().limit_bytes + qcow2.refcount_statistics().limit_bytes
            }
        });
        below + caches.sum::<u64>()
    }

    /// True if another process wrote to a backing file after it was opened. Reads of its
    /// data then fail.
    pub fn has_changed_below(&self) -> bool {
        match self {
            Self::Raw(_) => false,
            Self::Qcow2(qcow2) => qcow2.has_changed_below(),
        }
    }

    /// Starts detection of writes to backing files: see [`Qcow2Image::watch_backing`].
    pub fn watch_backing(&self) {
        if let Self::Qcow2(qcow2) = self {
            qcow2.watch_backing();
        }
    }

    /// Format and storage, as text for logs.
    pub fn description(&self) -> String {
        match self {
            Self::Raw(raw) => format!("raw, {}", raw.storage().description()),
            Self::Qcow2(qcow2) => qcow2.description(),
        }
    }

    /// True if writes fail with
    /// [`Error::NOT_PERMITTED`](reactor::error::Error::NOT_PERMITTED).
    pub fn is_read_only(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.is_read_only(),
            Self::Qcow2(qcow2) => qcow2.is_read_only(),
        }
    }

    /// See [`Storage::block_size`].
    pub fn block_size(&self) -> BlockSize {
        match self {
            Self::Raw(raw) => raw.storage().block_size(),
            Self::Qcow2(qcow2) => qcow2.block_size(),
        }
    }

    /// See [`Storage::can_zero_fast`].
    pub fn can_zero_fast(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().can_zero_fast(),
            Self::Qcow2(qcow2) => qcow2.can_zero_fast(),
        }
    }

    /// Reads `length` bytes at `offset`: see [`Storage::read`]. Storage in memory shares
    /// its pages instead of copying them.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Segments> {
        self.read_to(offset, ReadTarget::Anywhere(length)).await
    }

    /// Reads `target.len()` bytes at `offset` into the memory that `target` names: see
    /// [`Storage::read_into`].
    pub async fn read_to(&self, offset: u64, target: ReadTarget) -> Result<Segments> {
        match self {
            Self::Raw(raw) => {
                if let ReadTarget::Anywhere(length) = target
                    && let Some(data) = raw.storage().read_shared(offset, length)
                {
                    return Ok(data);
                }
                raw.storage().read_into(offset, target.into_memory()).await
            }
            // Boxed: otherwise the future of every raw read would have the size of qcow2's.
            Self::Qcow2(qcow2) => Box::pin(qcow2.read_to(offset, target)).await,
        }
    }

    /// True if the kernel can move data between the file and a request's pages without a
    /// copy: see [`Image::read_registered`].
    pub fn takes_registered(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().supports_registered(),
            Self::Qcow2(_) => false,
        }
    }

    /// Reads like [`Image::read_to`] into the pages of a ublk request; falls back to a copy
    /// if the storage or format does not support registered buffers.
    pub async fn read_registered(&self, offset: u64, buffer: &RegisteredData) -> Result<()> {
        if let Self::Raw(raw) = self
            && let Some(result) = raw.storage().read_registered(offset, buffer).await
        {
            return result;
        }
        buffer.copy_in_segments(&Box::pin(self.read(offset, buffer.bytes())).await?)
    }

    /// Writes like [`Image::write`] from the pages of a ublk request; falls back to a copy
    /// if the storage or format does not support registered buffers.
    ///
    /// # Errors
    /// Errors of [`Image::write`].
    pub async fn write_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Result<()> {
        if let Self::Raw(raw) = self
            && let Some(result) = raw.write_registered(offset, buffer, durability).await
        {
            return result;
        }
        Box::pin(self.write(offset, buffer.copy_out()?.into(), durability)).await
    }

    /// True if reads and writes complete without waiting: see [`Image::read_now`].
    pub fn is_instant(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.is_instant(),
            Self::Qcow2(_) => false,
        }
    }

    /// Reads synchronously if the image [is instant](Image::is_instant), `None` otherwise:
    /// see [`Storage::read_now`].
    pub fn read_now(&self, offset: u64, into: &[GuestBytes]) -> Option<Result<()>> {
        match self {
            Self::Raw(raw) if raw.is_instant() => raw.storage().read_now(offset, into),
            _ => None,
        }
    }

    /// Writes synchronously if the image [is instant](Image::is_instant), `None` otherwise:
    /// see [`Storage::write_now`].
    pub fn write_now(&self, offset: u64, from: &[GuestBytes]) -> Option<Result<()>> {
        match self {
            Self::Raw(raw) if raw.is_instant() => match raw.is_read_only() {
                true => Some(Err(Error::NOT_PERMITTED)),
                false => raw.storage().write_now(offset, from),
            },
            _ => None,
        }
    }

    /// See [`Storage::write`].
    ///
    /// # Errors
    /// Errors of [`Storage::write`];
    /// [`Error::NOT_PERMITTED`](reactor::error::Error::NOT_PERMITTED) also for a write that
    /// would make a raw image look like another format.
    pub async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.write(offset, data, durability).await,
            Self::Qcow2(qcow2) => qcow2.write(offset, data, durability).await,
        }
    }

    /// See [`Storage::can_read_ahead`]. False for formats that map: translating a hint
    /// would cost the metadata reads that a hint must not cause.
    pub fn can_read_ahead(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().can_read_ahead(),
            Self::Qcow2(_) => false,
        }
    }

    /// See [`Storage::will_need`].
    pub async fn advise_willneed(&self, offset: u64, length: u64) {
        match self {
            Self::Raw(raw) => raw.storage().will_need(offset, length).await,
            Self::Qcow2(_) => {}
        }
    }

    /// True if killing this process now would lose an acknowledged write: its data, or the
    /// metadata that leads to it, exists only in this process until the next flush.
    pub fn has_volatile_writes(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().has_volatile_writes(),
            Self::Qcow2(qcow2) => qcow2.has_volatile_writes() || qcow2.storage().has_volatile_writes(),
        }
    }

    /// See [`Storage::flush`].
    pub async fn flush(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.storage().flush().await,
            Self::Qcow2(qcow2) => qcow2.flush().await,
        }
    }

    /// Writes the metadata that the format holds in memory and closes the storage. Must be
    /// the last call on an image.
    pub async fn close(&self) -> Result<()> {
        match self {
            Self::Raw(_) => {}
            Self::Qcow2(qcow2) => qcow2.close().await?,
        }
        self.close_local_handles().await
    }

    /// True if the image was opened for handover: see
    /// [`OpenOptions::handover`](storage::OpenOptions::handover).
    pub fn is_handed_over(&self) -> bool {
        self.files().any(Storage::has_handover)
    }

    /// Tries to take the locks of an image that was opened for handover. Takes those of all
    /// its files or none: see [`Storage::try_lock`].
    pub fn take_locks(&self, last: bool) -> std::result::Result<bool, OpenError> {
        for storage in self.files() {
            match storage.try_lock(last) {
                Ok(true) => {}
                other => {
                    // All or none: a process that holds some of the locks would block the
                    // other process forever.
                    self.release_locks();
                    return other;
                }
            }
        }
        Ok(true)
    }

    /// Releases the locks of all its files.
    pub fn release_locks(&self) {
        self.files().for_each(Storage::release_locks);
    }

    /// See [`Storage::is_busy`].
    pub fn is_busy(&self) -> bool {
        self.files().any(Storage::is_busy)
    }

    /// See [`Storage::descriptors`], for all files that are written to.
    pub fn descriptors(&self) -> io::Result<Vec<PassedFile>> {
        self.files().filter_map(Storage::descriptors).collect()
    }

    /// See [`Storage::is_passed`].
    pub fn is_passed(&self) -> bool {
        self.files().any(Storage::is_passed)
    }

    /// True if another process holds its locks.
    pub fn is_locked_elsewhere(&self) -> bool {
        self.files().any(Storage::may_be_resumed_elsewhere)
    }

    /// Files of this image alone, without those of its backing chain.
    pub fn files(&self) -> Box<dyn Iterator<Item = &Storage> + '_> {
        match self {
            Self::Raw(raw) => Box::new(std::iter::once(raw.storage())),
            Self::Qcow2(qcow2) => Box::new(qcow2.files()),
        }
    }

    /// Returns when the file systems of all files of the chain have answered. `timeout`
    /// applies to each file, so a long chain does not time out earlier than a single file.
    ///
    /// # Errors
    /// [`Error::TIMED_OUT`](reactor::error::Error::TIMED_OUT) if one does not answer in
    /// time, or after [`Image::abandon`].
    pub async fn request_within(&self, timeout: Duration) -> Result<()> {
        for storage in self.chain().flat_map(Self::files) {
            reactor::timeout(timeout, storage.ping()).await.unwrap_or(Err(Error::TIMED_OUT))?;
        }
        Ok(())
    }

    /// See [`Storage::abandon`], for all files of the chain.
    pub fn abandon(&self) {
        self.chain().flat_map(Self::files).for_each(Storage::abandon);
    }

    /// Notification that all files of the chain are closed.
    pub fn closed(&self) -> FilesClosed {
        FilesClosed::of(self.chain().flat_map(Self::files))
    }

    /// Names of the dirty bitmaps that record writes.
    pub fn recorded_bitmaps(&self) -> Vec<String> {
        match self {
            Self::Raw(_) => Vec::new(),
            Self::Qcow2(qcow2) => qcow2.recorded_names(),
        }
    }

    /// Writes the metadata that the format holds in memory to the file, for the new process of an
    /// upgrade, which shares the page cache. Does not make guest data durable.
    pub async fn write_metadata_for_handover(&self) -> Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.write_for_handover().await,
        }
    }

    /// Makes everything durable, including dirty bitmaps, and ends all work that would change the
    /// files later, so that the image may [become read-only](Image::make_read_only). No change may
    /// begin meanwhile. The image remains writable.
    ///
    /// # Errors
    /// Errors of the file, also if a bitmap cannot be stored.
    pub async fn settle(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.storage().flush().await,
            Self::Qcow2(qcow2) => qcow2.settle().await,
        }
    }

    /// Makes the image read-only for good, after [`Image::settle`] and without a change in between:
    /// changes fail, and other processes may read its files. Blocks.
    pub fn make_read_only(&self) {
        match self {
            Self::Raw(raw) => raw.make_read_only(),
            Self::Qcow2(qcow2) => qcow2.make_read_only(),
        }
        self.files().for_each(Storage::make_read_only);
    }

    /// See [`Storage::is_changing`].
    pub fn is_changing(&self) -> bool {
        self.files().any(Storage::is_changing)
    }

    /// Waits until [`Image::is_changing`] is false. There is no notification.
    pub async fn await_changes(&self) {
        while self.is_changing() {
            reactor::sleep_until(reactor::now() + POLL_INTERVAL).await;
        }
    }

    /// Makes written data on servers and clusters visible to other processes; there is no
    /// shared page cache.
    pub async fn flush_servers(&self) -> Result<()> {
        for storage in self.files() {
            storage.write_back().await?;
        }
        Ok(())
    }

    /// See [`Storage::suspend`]. The last step of the old process in an upgrade.
    pub async fn suspend_clusters(&self) -> Result<()> {
        for storage in self.files() {
            storage.suspend().await?;
        }
        Ok(())
    }

    /// See [`Storage::blocklist`].
    pub async fn blocklist(&self, clients: &[u64]) -> Result<()> {
        for storage in self.files() {
            storage.blocklist(clients).await?;
        }
        Ok(())
    }

    /// See [`Storage::is_blocklisted`].
    pub fn is_blocklisted(&self) -> bool {
        self.files().any(Storage::is_blocklisted)
    }

    /// Closes the connections of this process to storage clusters, when another process
    /// continues to use the image.
    pub async fn close_local_handles(&self) -> Result<()> {
        let mut outcome = Ok(());
        for storage in self.files() {
            outcome = outcome.and(storage.close().await);
        }
        outcome
    }

    /// Writes and flushes everything, so that another process can use the image in a handover.
    pub async fn hand_over(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.storage().flush().await,
            Self::Qcow2(qcow2) => qcow2.hand_over().await,
        }
    }

    /// Takes the locks of clusters and reads again what another process may have written. The locks
    /// of files must have been taken. `new_clients` are those of [`Storage::resume`].
    pub async fn take_over(&self, new_clients: &[u64]) -> std::result::Result<(), OpenError> {
        let name = self.files().next().and_then(Storage::path).unwrap_or_default();
        let to_open_error = |failure| open::open_error(name, &failure);
        for storage in self.files() {
            // Order: a cluster's lock protects the size that is read next. `take_over` below then
            // reads metadata, which must not come from pages that were cached before.
            storage.resume(new_clients).await?;
            storage.refresh_size().await.map_err(|error| to_open_error(error.into()))?;
            storage.note_external_writes();
        }
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.take_over().await.map_err(to_open_error),
        }
    }

    /// See [`Storage::write_zeroes`].
    ///
    /// # Errors
    /// Errors of [`Storage::write_zeroes`] and [`Image::write`].
    pub async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.write_zeroes(offset, length, options).await,
            Self::Qcow2(qcow2) => qcow2.write_zeroes(offset, length, options).await,
        }
    }

    /// See [`Storage::can_reserve`].
    pub fn can_reserve(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().can_reserve(),
            Self::Qcow2(_) => false,
        }
    }

    /// See [`Storage::reserve`]. Unsupported for qcow2, which allocates clusters when they
    /// are written.
    ///
    /// # Errors
    /// Errors of [`Storage::reserve`].
    pub async fn reserve(&self, offset: u64, length: u64) -> Result<()> {
        match self {
            Self::Raw(raw) if raw.is_read_only() => Err(Error::NOT_PERMITTED),
            Self::Raw(raw) => raw.storage().reserve(offset, length).await,
            Self::Qcow2(_) => Err(Error::UNSUPPORTED),
        }
    }

    /// Bytes of storage that the disk's content occupies, by [`Storage::allocated_bytes`].
    /// For a mapping format it is the sum over all files of the chain, including metadata,
    /// limited to the disk's size.
    ///
    /// # Errors
    /// Errors of [`Storage::allocated_bytes`].
    pub async fn allocated_bytes(&self) -> Result<u64> {
        if let Self::Raw(raw) = self {
            return raw.storage().allocated_bytes().await;
        }
        let mut allocated_bytes = 0_u64;
        for storage in self.chain().flat_map(Self::files) {
            allocated_bytes = allocated_bytes.saturating_add(storage.allocated_bytes().await?);
        }
        Ok(allocated_bytes.min(self.size_bytes()))
    }

    /// Refreshes [`Image::last_allocated_bytes`], within `timeout` for all files of the
    /// chain together.
    pub async fn count_allocated_bytes(&self, timeout: Duration) {
        let deadline = reactor::now() + timeout;
        for storage in self.chain().flat_map(Self::files) {
            storage.allocated_bytes_before(deadline).await;
        }
    }

    /// Last known value of [`Image::allocated_bytes`]. Never waits.
    pub fn last_allocated_bytes(&self) -> u64 {
        if let Self::Raw(raw) = self {
            return raw.storage().last_allocated_bytes();
        }
        let files = self.chain().flat_map(Self::files);
        let allocated_bytes = files.map(Storage::last_allocated_bytes).fold(0, u64::saturating_add);
        allocated_bytes.min(self.size_bytes())
    }

    /// See [`Storage::discard`].
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.discard(offset, length).await,
            Self::Qcow2(qcow2) => qcow2.discard(offset, length).await,
        }
    }

    /// See [`Storage::block_status`].
    pub async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        match self {
            Self::Raw(raw) => raw.storage().block_status(offset, length).await,
            Self::Qcow2(qcow2) => qcow2.block_status(offset, length).await,
        }
    }

    /// Position in the chain of the image that allocates each part of a range, counted as
    /// by QEMU. Returns 1 to [`MAX_EXTENTS`](storage::MAX_EXTENTS) contiguous runs from
    /// `offset` on, which cover at most `length` bytes and may end earlier. `length` must
    /// not be zero.
    pub async fn allocation_depth(&self, offset: u64, length: u64) -> Result<Vec<ChainDepthRun>> {
        match self {
            Self::Raw(_) => Ok(vec![ChainDepthRun { length, depth: 1 }]),
            Self::Qcow2(qcow2) => qcow2.allocation_depth(offset, length).await,
        }
    }
}
