//! Formats over storage: where the bytes of the disk are among the stored bytes.
//!
//! It is one enum, for the same reason as [`Storage`]. Methods and contract are Storage's, with
//! offsets of the disk.

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
    identity::Layer,
    qcow2::Qcow2,
    raw::{Raw, open_raw},
    secret::Secret,
};
use reactor::{
    buffer::{Segments, Target},
    error::{Error, Result},
    guest::Place,
    ublk::Registered,
};
use storage::{
    BlockSize, Durability, Extent, Format, OpenError, PassedFile, ResizeError, Storage, ZeroOptions,
};

/// An image of any format.
#[derive(Debug)]
pub enum Image {
    /// The bytes are the disk.
    Raw(Raw),
    /// Copy-on-write clusters.
    Qcow2(Qcow2),
}

/// A run of a disk that lies in one file of the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Bytes, never zero.
    pub length: u64,
    /// 1 is the image itself, 2 its backing file and so on; 0 is no file.
    pub depth: u32,
}

impl Image {
    /// Its format.
    pub fn format(&self) -> Format {
        match self {
            Self::Raw(_) => Format::Raw,
            Self::Qcow2(_) => Format::Qcow2,
        }
    }

    /// See [`Storage::size_bytes`].
    pub fn size_bytes(&self) -> u64 {
        match self {
            Self::Raw(raw) => raw.storage().size_bytes(),
            Self::Qcow2(qcow2) => qcow2.size_bytes(),
        }
    }

    /// See [`Storage::look_again`]. A format that stores its size has no other.
    pub async fn look_again(&self) -> Result<u64> {
        if let Self::Raw(raw) = self {
            raw.storage().look_again().await?;
        }
        self.refresh_size().await
    }

    /// See [`Storage::refresh_size`]. A format that stores its size has no other.
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
    /// Those of [`Storage::resize`]; also if the image was opened read-only, or would look like one
    /// of another format.
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        match self {
            Self::Raw(raw) => raw.resize(size_bytes).await,
            Self::Qcow2(qcow2) => qcow2.resize(size_bytes).await,
        }
    }

    /// Where a guest's data lies, for those who look at the device below.
    pub fn storage(&self) -> &Storage {
        match self {
            Self::Raw(raw) => raw.storage(),
            Self::Qcow2(qcow2) => qcow2.storage(),
        }
    }

    /// Whether the image, which was opened to be read alone, lets itself be written to: as its
    /// opening for that judges. `name` is what the user calls it.
    ///
    /// # Errors
    /// It is marked corrupt.
    pub fn check_marks(&self, name: &str) -> std::result::Result<(), OpenError> {
        match self {
            Self::Qcow2(qcow2) if qcow2.header().incompatible & incompatible::CORRUPT != 0 => {
                Err(open::said(name, &OpenFailure::Corrupt))
            }
            Self::Qcow2(_) | Self::Raw(_) => Ok(()),
        }
    }

    /// What the image reads from where it has nothing itself.
    pub fn backing(&self) -> Option<&Self> {
        match self {
            Self::Raw(_) => None,
            Self::Qcow2(qcow2) => qcow2.backing(),
        }
    }

    /// The image, and one after the other those that it reads from where it has nothing itself.
    pub fn chain(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |image| image.backing())
    }

    /// The most that the metadata caches of the whole chain, and libraries below it, may take, in
    /// bytes.
    pub fn most_cache_bytes(&self) -> u64 {
        let below: u64 = self.chain().flat_map(Self::files).map(Storage::most_cache_bytes).sum();
        let caches = self.chain().map(|image| match image {
            Self::Raw(_) => 0,
            Self::Qcow2(qcow2) => {
                qcow2.cache_statistics().limit_bytes + qcow2.refcount_statistics().limit_bytes
            }
        });
        below + caches.sum::<u64>()
    }

    /// Whether a file below was changed by others since it was opened, so that what was read from
    /// it is not to be had any more.
    pub fn has_changed_below(&self) -> bool {
        match self {
            Self::Raw(_) => false,
            Self::Qcow2(qcow2) => qcow2.has_changed_below(),
        }
    }

    /// For an image that is in use for long: see [`Qcow2::watch_backing`].
    pub fn watch_backing(&self) {
        if let Self::Qcow2(qcow2) = self {
            qcow2.watch_backing();
        }
    }

    /// Format and storage, for people.
    pub fn description(&self) -> String {
        match self {
            Self::Raw(raw) => format!("raw, {}", raw.storage().description()),
            Self::Qcow2(qcow2) => qcow2.description(),
        }
    }

    /// Whether writes fail with [`Error::NOT_PERMITTED`](reactor::error::Error::NOT_PERMITTED).
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

    /// Reads `length` bytes at `offset`: see [`Storage::read`]. What is in memory already is lent.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Segments> {
        self.read_to(offset, Target::Anywhere(length)).await
    }

    /// Reads as many bytes as `target` wants, which are returned where it wants them: see
    /// [`Storage::read_into`].
    pub async fn read_to(&self, offset: u64, target: Target) -> Result<Segments> {
        match self {
            Self::Raw(raw) => {
                if let Target::Anywhere(length) = target
                    && let Some(data) = raw.storage().lend(offset, length)
                {
                    return Ok(data);
                }
                raw.storage().read_into(offset, target.memory()).await
            }
            // Apart, because every read of a raw image has room for what is not.
            Self::Qcow2(qcow2) => Box::pin(qcow2.read_to(offset, target)).await,
        }
    }

    /// Whether data may move between its file and where a request's is, and nobody copies it: see
    /// [`Image::read_registered`].
    pub fn takes_registered(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().takes_registered(),
            Self::Qcow2(_) => false,
        }
    }

    /// Reads as [`Image::read_to`], with the data where a request's is: copied there, where it
    /// cannot come by itself.
    pub async fn read_registered(&self, offset: u64, buffer: &Registered) -> Result<()> {
        if let Self::Raw(raw) = self
            && let Some(result) = raw.storage().read_registered(offset, buffer).await
        {
            return result;
        }
        buffer.put_all(&Box::pin(self.read(offset, buffer.bytes())).await?)
    }

    /// Writes as [`Image::write`], of a request's data where it is: of a copy, where it cannot go
    /// by itself.
    ///
    /// # Errors
    /// As there.
    pub async fn write_registered(
        &self,
        offset: u64,
        buffer: &Registered,
        durability: Durability,
    ) -> Result<()> {
        if let Self::Raw(raw) = self
            && let Some(result) = raw.write_registered(offset, buffer, durability).await
        {
            return result;
        }
        Box::pin(self.write(offset, buffer.take()?.into(), durability)).await
    }

    /// Whether reads and writes are done without waiting: see [`Image::read_now`].
    pub fn is_instant(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.is_instant(),
            Self::Qcow2(_) => false,
        }
    }

    /// Reads without waiting, if it [is instant](Image::is_instant): see [`Storage::read_now`].
    pub fn read_now(&self, offset: u64, into: &[Place]) -> Option<Result<()>> {
        match self {
            Self::Raw(raw) if raw.is_instant() => raw.storage().read_now(offset, into),
            _ => None,
        }
    }

    /// Writes without waiting, if it [is instant](Image::is_instant): see [`Storage::write_now`].
    pub fn write_now(&self, offset: u64, from: &[Place]) -> Option<Result<()>> {
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
    /// As there; [`Error::NOT_PERMITTED`](reactor::error::Error::NOT_PERMITTED) also for a header
    /// that would change what the image is.
    pub async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.write(offset, data, durability).await,
            Self::Qcow2(qcow2) => qcow2.write(offset, data, durability).await,
        }
    }

    /// See [`Storage::can_read_ahead`]. A format that maps takes no hints: to find what they mean
    /// would be the work that a hint should not make.
    pub fn can_read_ahead(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().can_read_ahead(),
            Self::Qcow2(_) => false,
        }
    }

    /// See [`Storage::will_need`].
    pub async fn will_need(&self, offset: u64, length: u64) {
        match self {
            Self::Raw(raw) => raw.storage().will_need(offset, length).await,
            Self::Qcow2(_) => {}
        }
    }

    /// Whether a write that was acknowledged would be lost if this process were killed now, while
    /// its client lives on: its data, or what leads to it, is nowhere else until the next flush.
    pub fn would_lose(&self) -> bool {
        match self {
            Self::Raw(raw) => raw.storage().would_lose(),
            Self::Qcow2(qcow2) => qcow2.would_lose() || qcow2.storage().would_lose(),
        }
    }

    /// See [`Storage::flush`].
    pub async fn flush(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.storage().flush().await,
            Self::Qcow2(qcow2) => qcow2.flush().await,
        }
    }

    /// The last thing that is done with an image: what a format keeps in memory reaches the file.
    pub async fn close(&self) -> Result<()> {
        match self {
            Self::Raw(_) => {}
            Self::Qcow2(qcow2) => qcow2.close().await?,
        }
        self.close_own().await
    }

    /// Whether it was opened for handover: see
    /// [`OpenOptions::handover`](storage::OpenOptions::handover).
    pub fn is_handed_over(&self) -> bool {
        self.files().any(Storage::is_handed_over)
    }

    /// Tries to take the locks of an image that was opened for handover, of all its files or none:
    /// see [`Storage::take_locks`].
    pub fn take_locks(&self, last: bool) -> std::result::Result<bool, OpenError> {
        for storage in self.files() {
            match storage.take_locks(last) {
                Ok(true) => {}
                other => {
                    self.release_locks();
                    return other;
                }
            }
        }
        Ok(true)
    }

    /// Lets others have it.
    pub fn release_locks(&self) {
        self.files().for_each(Storage::release_locks);
    }

    /// See [`Storage::is_busy`].
    pub fn is_busy(&self) -> bool {
        self.files().any(Storage::is_busy)
    }

    /// See [`Storage::descriptors`], of all files that are written to.
    pub fn descriptors(&self) -> io::Result<Vec<PassedFile>> {
        self.files().filter_map(Storage::descriptors).collect()
    }

    /// See [`Storage::is_passed`].
    pub fn is_passed(&self) -> bool {
        self.files().any(Storage::is_passed)
    }

    /// Whether another process has its locks.
    pub fn is_anothers(&self) -> bool {
        self.files().any(Storage::is_anothers)
    }

    /// Those of its own, not of the images that it reads from.
    pub fn files(&self) -> Box<dyn Iterator<Item = &Storage> + '_> {
        match self {
            Self::Raw(raw) => Box::new(std::iter::once(raw.storage())),
            Self::Qcow2(qcow2) => Box::new(qcow2.files()),
        }
    }

    /// Returns once the file systems of all files of the chain have answered. Each of them has
    /// `timeout` for its answer, so that a long chain has no less time than one file.
    ///
    /// # Errors
    /// [`Error::TIMED_OUT`](reactor::error::Error::TIMED_OUT) if one has not answered, or after
    /// [`Image::give_up`].
    pub async fn ask_within(&self, timeout: Duration) -> Result<()> {
        for storage in self.chain().flat_map(Self::files) {
            reactor::timeout(timeout, storage.ask()).await.unwrap_or(Err(Error::TIMED_OUT))?;
        }
        Ok(())
    }

    /// See [`Storage::give_up`], of all files of the chain.
    pub fn give_up(&self) {
        self.chain().flat_map(Self::files).for_each(Storage::give_up);
    }

    /// See [`Storage::closed`], of all files of the chain.
    pub fn closed(&self) -> Vec<async_channel::Receiver<()>> {
        self.chain().flat_map(Self::files).filter_map(Storage::closed).collect()
    }

    /// The names of the bitmaps that take down what is written to it.
    pub fn recorded_bitmaps(&self) -> Vec<String> {
        match self {
            Self::Raw(_) => Vec::new(),
            Self::Qcow2(qcow2) => qcow2.recorded_names(),
        }
    }

    /// What a format keeps in memory reaches the file, for a process on this host, which sees the
    /// same page cache: of data, nothing is made durable that was not.
    pub async fn lay_down(&self) -> Result<()> {
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.lay_down().await,
        }
    }

    /// What servers and clusters have of it is where other processes see it: there is no page
    /// cache.
    pub async fn flush_servers(&self) -> Result<()> {
        for storage in self.files() {
            storage.write_back().await?;
        }
        Ok(())
    }

    /// See [`Storage::lay_down`], which comes last.
    pub async fn leave_clusters(&self) -> Result<()> {
        for storage in self.files() {
            storage.lay_down().await?;
        }
        Ok(())
    }

    /// See [`Storage::shut_out`].
    pub async fn shut_out(&self, clients: &[u64]) -> Result<()> {
        for storage in self.files() {
            storage.shut_out(clients).await?;
        }
        Ok(())
    }

    /// See [`Storage::is_lost`].
    pub fn is_lost(&self) -> bool {
        self.files().any(Storage::is_lost)
    }

    /// Closes what is this process's own although another goes on with the image: what it has open
    /// in clusters.
    pub async fn close_own(&self) -> Result<()> {
        let mut outcome = Ok(());
        for storage in self.files() {
            outcome = outcome.and(storage.close().await);
        }
        outcome
    }

    /// Everything reaches the file, for another to take over.
    pub async fn hand_over(&self) -> Result<()> {
        match self {
            Self::Raw(raw) => raw.storage().flush().await,
            Self::Qcow2(qcow2) => qcow2.hand_over().await,
        }
    }

    /// Once the locks of files are taken: takes those of clusters, and reads what another may have
    /// written. `heirs`: see [`Storage::take_up`].
    pub async fn take_over(&self, heirs: &[u64]) -> std::result::Result<(), OpenError> {
        let name = self.files().next().and_then(Storage::path).unwrap_or_default();
        let said = |failure| open::said(name, &failure);
        for storage in self.files() {
            storage.take_up(heirs).await?;
            storage.refresh_size().await.map_err(|error| said(error.into()))?;
            storage.was_changed();
        }
        match self {
            Self::Raw(_) => Ok(()),
            Self::Qcow2(qcow2) => qcow2.take_over().await.map_err(said),
        }
    }

    /// See [`Storage::write_zeroes`].
    ///
    /// # Errors
    /// As there, and as for [`Image::write`].
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

    /// See [`Storage::reserve`]. Clusters of a qcow2 image are allocated when they are written.
    ///
    /// # Errors
    /// Those of [`Storage::reserve`].
    pub async fn reserve(&self, offset: u64, length: u64) -> Result<()> {
        match self {
            Self::Raw(raw) if raw.is_read_only() => Err(Error::NOT_PERMITTED),
            Self::Raw(raw) => raw.storage().reserve(offset, length).await,
            Self::Qcow2(_) => Err(Error::UNSUPPORTED),
        }
    }

    /// Space that stores the disk's content, in bytes, by [`Storage::allocated_bytes`]. For a
    /// mapping format it is the sum over all files of the chain, metadata included, and at most the
    /// disk's size.
    ///
    /// # Errors
    /// Those of [`Storage::allocated_bytes`].
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

    /// Counts [`Image::allocated_bytes`] again, for `timeout` at most for all files of the chain.
    pub async fn count_allocated_bytes(&self, timeout: Duration) {
        let deadline = reactor::now() + timeout;
        for storage in self.chain().flat_map(Self::files) {
            storage.allocated_bytes_before(deadline).await;
        }
    }

    /// As [`Image::allocated_bytes`], as last counted. Never waits.
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

    /// Which file of the chain a range is allocated in, as QEMU counts: from one to
    /// [`MOST_EXTENTS`](storage::MOST_EXTENTS) runs that begin at `offset`, follow each
    /// other and together cover no more than `length`, perhaps less. `length` is not zero.
    pub async fn allocation_depth(&self, offset: u64, length: u64) -> Result<Vec<Depth>> {
        match self {
            Self::Raw(_) => Ok(vec![Depth { length, depth: 1 }]),
            Self::Qcow2(qcow2) => qcow2.allocation_depth(offset, length).await,
        }
    }
}
