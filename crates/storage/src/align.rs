//! Requests of any alignment over a device that requires blocks: O_DIRECT files, block devices,
//! simulated disks.
//!
//! ```text
//!   a request        ▕░░░░░████████████████░░░▏         ▕░░░▏ other bytes in the same block
//!   the device   │ block │ block │ block │ block │
//!                  ▲ read, patched, written ▲
//! ```
//!
//! - An aligned request is passed through. A write then holds a shared range lock, which is two
//!   atomic additions ([`RangeLocks`]).
//! - An unaligned read uses a larger aligned buffer.
//! - An unaligned write reads the blocks at its edges, patches them and writes whole blocks, with
//!   its blocks locked exclusively. It runs as its own task: if its client disconnects half way, it
//!   still holds the lock until the kernel is done. With an earlier release, another write could
//!   complete and then be overwritten with old bytes by the late one.
//! - Zeroing is passed on for whole blocks; the edges are written. Discarding skips partial blocks:
//!   it is a hint.
//! - A file whose size is not a multiple of the block ends in a **tail** that the device cannot
//!   write without extending the file. The tail begins at the last multiple of block *and* page
//!   size below the end, and goes through the page cache ([`AlignedDevice::read_buffered`]), to the
//!   byte. Thus no page mixes bytes of both paths: the late writeback of a page cannot undo a
//!   direct write beside it.
//! - A resize locks everything exclusively. So a request that changes bytes checks its range again
//!   once it holds its lock: a write in flight when a file was truncated would extend it again.
//!
//! Never passes an unaligned request to a device.

use std::{ops::Range, sync::Arc};

use super::{
    BlockSize, Durability, Extent, RangeLocks, ZeroOptions,
    flushes::Flushes,
    resize::{self, ResizeError},
    within,
};
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    ublk::RegisteredData,
};

/// A read-modify-write up to this many bytes reads all its blocks at once, rather than those at its
/// edges one by one.
const MAX_SINGLE_READ: usize = 64 << 10;

/// Alignment that a device requires. Both values are powers of two; 1 means no requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of offsets and lengths, in bytes.
    pub offset: u64,
    /// Alignment of each segment's memory, in bytes; at most
    /// [`ALIGNMENT`](reactor::buffer::ALIGNMENT).
    pub memory: usize,
}

impl Alignment {
    /// No requirement.
    pub const NONE: Self = Self { offset: 1, memory: 1 };

    /// True if a transfer of these segments at `offset` is aligned.
    fn is_aligned(self, offset: u64, segments: &Segments) -> bool {
        let mut bits = offset & (self.offset - 1);
        for segment in segments.iter() {
            bits |= segment.len() as u64 & (self.offset - 1);
            bits |= (segment.source().addr() & (self.memory - 1)) as u64;
        }
        bits == 0
    }

    fn down(self, offset: u64) -> u64 {
        offset & !(self.offset - 1)
    }

    /// Cannot overflow: offsets are within sizes of real devices.
    fn up(self, offset: u64) -> u64 {
        self.down(offset + self.offset - 1)
    }
}

/// The device under [`Align`]. The contract is that of [`Storage`](super::Storage), except that
/// reads, writes, zeroes and discards are aligned to [`AlignedDevice::alignment`], which never
/// changes.
#[expect(async_fn_in_trait, reason = "futures stay on the thread that polls them, so they need not be Send")]
pub trait AlignedDevice: Send + Sync + 'static {
    /// The alignment that it requires.
    fn alignment(&self) -> Alignment;
    /// Page size of the page cache beside the device, in bytes; bounds the tail.
    fn page_bytes(&self) -> u64;
    /// See [`Storage::size_bytes`](super::Storage::size_bytes).
    fn size_bytes(&self) -> u64;
    /// See [`Storage::refresh_size`](super::Storage::refresh_size).
    async fn refresh_size(&self) -> Result<u64>;
    /// See [`Storage::size_multiple`](super::Storage::size_multiple).
    fn size_multiple(&self) -> u64 {
        self.alignment().offset.max(resize::SECTOR)
    }
    /// See [`Storage::resize`](super::Storage::resize). No request that changes bytes is in flight.
    /// The size is a multiple of [`AlignedDevice::size_multiple`], or the current size.
    async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError>;
    /// See [`Storage::description`](super::Storage::description).
    fn description(&self) -> String;
    /// See [`Storage::read_only`](super::Storage::read_only).
    fn read_only(&self) -> bool;
    /// See [`Storage::block_size`](super::Storage::block_size).
    fn block_size(&self) -> BlockSize;
    /// See [`Storage::can_zero_fast`](super::Storage::can_zero_fast).
    fn can_zero_fast(&self) -> bool;
    /// Reads; the request is aligned.
    async fn read(&self, offset: u64, target: Segments) -> Result<Segments>;
    /// Writes; the request is aligned.
    async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()>;
    /// Reads without alignment, through the page cache; used for the tail only.
    async fn read_buffered(&self, offset: u64, target: Segments) -> Result<Segments>;
    /// As [`AlignedDevice::read_buffered`].
    async fn write_buffered(&self, offset: u64, data: Segments, durability: Durability) -> Result<()>;
    /// See [`Storage::flush`](super::Storage::flush); covers direct and buffered writes.
    async fn flush(&self) -> Result<()>;
    /// Zeroes; the request is aligned.
    async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()>;
    /// Discards; the request is aligned.
    async fn discard(&self, offset: u64, length: u64) -> Result<()>;
    /// Accepts any alignment. See [`Storage::block_status`](super::Storage::block_status).
    async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>>;
}

/// A device that supports zero copy from and to the registered buffer of a ublk request. Returns
/// `None`, with nothing done, if a request needs a copy.
#[expect(async_fn_in_trait, reason = "as for AlignedDevice")]
pub trait ZeroCopyDevice: AlignedDevice {
    /// Reads; the request is aligned.
    async fn read_registered(&self, offset: u64, buffer: &RegisteredData) -> Option<Result<()>>;
    /// Writes; the request is aligned.
    async fn write_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Option<Result<()>>;
}

/// Accepts requests of any alignment for a device.
#[derive(Debug)]
pub struct Align<D> {
    shared: Arc<AlignShared<D>>,
    alignment: Alignment,
}

/// State that a read-modify-write keeps alive after its client has disconnected.
#[derive(Debug)]
struct AlignShared<D> {
    device: D,
    locks: RangeLocks,
    flushes: Flushes,
}

impl<D: AlignedDevice> Align<D> {
    /// Wraps `device`.
    pub fn new(device: D) -> Self {
        let alignment = device.alignment();
        assert!(alignment.offset.is_power_of_two() && alignment.memory.is_power_of_two());
        Self {
            shared: Arc::new(AlignShared {
                device,
                locks: RangeLocks::default(),
                flushes: Flushes::default(),
            }),
            alignment,
        }
    }

    /// The device, for operations that need no alignment.
    pub fn device(&self) -> &D {
        &self.shared.device
    }

    /// True while a read-modify-write or a resize continues whose request may have been cancelled.
    pub(super) fn has_detached(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }

    /// See [`Storage::size_bytes`](super::Storage::size_bytes).
    pub fn size_bytes(&self) -> u64 {
        self.device().size_bytes()
    }

    /// See [`Storage::refresh_size`](super::Storage::refresh_size).
    pub async fn refresh_size(&self) -> Result<u64> {
        // Excludes a resize, or a size that was read before it could replace the new one. A resize
        // locks the whole range; the last offset is part of no file, so no other request does.
        let _no_resize = self.shared.locks.shared(u64::MAX - 1..u64::MAX).await;
        self.device().refresh_size().await
    }

    /// See [`Storage::resize`](super::Storage::resize).
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        if size_bytes != self.size_bytes() {
            resize::check_size(size_bytes, self.device().size_multiple())?;
        }
        // Runs to its end even if the caller is cancelled: the device may change the size late, and
        // writes are excluded until then.
        let shared = Arc::clone(&self.shared);
        let task = async move {
            let _everything = shared.locks.exclusive(0..u64::MAX).await;
            let _change = shared.flushes.begin_change();
            shared.device.resize(size_bytes).await
        };
        reactor::spawn_detached(task).await.unwrap_or_else(|| Err(Error::SHUTDOWN.into()))
    }

    /// See [`Storage::description`](super::Storage::description).
    pub fn description(&self) -> String {
        self.device().description()
    }

    /// See [`Storage::read_only`](super::Storage::read_only).
    pub fn read_only(&self) -> bool {
        self.device().read_only()
    }

    /// See [`Storage::block_size`](super::Storage::block_size).
    pub fn block_size(&self) -> BlockSize {
        self.device().block_size()
    }

    /// See [`Storage::can_zero_fast`](super::Storage::can_zero_fast).
    pub fn can_zero_fast(&self) -> bool {
        self.device().can_zero_fast()
    }

    /// See [`Storage::flush`](super::Storage::flush).
    pub async fn flush(&self) -> Result<()> {
        self.shared.flushes.run(|| self.device().flush()).await
    }

    /// See [`Storage::note_external_writes`](super::Storage::note_external_writes).
    pub(super) fn was_changed(&self) {
        drop(self.shared.flushes.begin_change());
    }

    /// See [`Storage::block_status`](super::Storage::block_status).
    pub async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        if length == 0 || !within(offset, length, self.size_bytes()) {
            return Err(Error::INVALID);
        }
        self.device().block_status(offset, length).await
    }

    /// See [`Storage::read_into`](super::Storage::read_into).
    pub async fn read(&self, offset: u64, target: Segments) -> Result<Segments> {
        let length = target.len() as u64;
        if !within(offset, length, self.size_bytes()) {
            return Err(Error::INVALID);
        }
        if self.alignment.is_aligned(offset, &target) && offset + length <= self.tail_start() {
            return self.device().read(offset, target).await;
        }
        Box::pin(self.read_unaligned(offset, target)).await
    }

    async fn read_unaligned(&self, offset: u64, mut target: Segments) -> Result<Segments> {
        let end = offset + target.len() as u64;
        // The part before `direct_end` is read from the device, the part behind it is in the tail.
        let direct_end = end.min(self.tail_start()).max(offset);
        let mut tail = target.split_off((direct_end - offset) as usize);
        if !target.is_empty() {
            let first = self.alignment.down(offset);
            let bounce = IoBuffer::new((self.alignment.up(direct_end) - first) as usize);
            let bounce = self.device().read(first, bounce.into()).await?.joined();
            let skip = (offset - first) as usize;
            target.copy_from(&bounce[skip..skip + target.len()]);
        }
        if !tail.is_empty() {
            tail = self.device().read_buffered(direct_end, tail).await?;
        }
        target.append(tail);
        Ok(target)
    }

    /// See [`Storage::write`](super::Storage::write).
    pub async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let length = data.len() as u64;
        if self.read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        if !within(offset, length, self.size_bytes()) {
            return Err(Error::INVALID);
        }
        if !self.alignment.is_aligned(offset, &data) || offset + length > self.tail_start() {
            return Box::pin(self.write_unaligned(offset, data, durability)).await;
        }
        let _guard = self.lock_for_change(offset..offset + length).await?;
        let _change = self.shared.flushes.begin_change();
        self.device().write(offset, data, durability).await
    }

    /// Locks out read-modify-writes and resizes; fails if the range is no longer inside.
    async fn lock_for_change(&self, range: Range<u64>) -> Result<super::range_lock::RangeLockGuard<'_>> {
        let guard = self.shared.locks.shared(range.clone()).await;
        if range.end > self.size_bytes() { Err(Error::INVALID) } else { Ok(guard) }
    }

    async fn write_unaligned(&self, offset: u64, mut data: Segments, durability: Durability) -> Result<()> {
        let end = offset + data.len() as u64;
        let direct_end = end.min(self.tail_start()).max(offset);
        let tail = data.split_off((direct_end - offset) as usize);
        if !data.is_empty() {
            if self.alignment.down(offset) == offset && self.alignment.down(direct_end) == direct_end {
                // Whole blocks in unaligned memory: a copy is enough, no other byte is touched.
                let mut bounce = IoBuffer::new(data.len());
                data.copy_to(&mut bounce);
                let _guard = self.lock_for_change(offset..direct_end).await?;
                let _change = self.shared.flushes.begin_change();
                self.device().write(offset, bounce.into(), durability).await?;
            } else {
                self.modify(offset, data, durability).await?;
            }
        }
        if tail.is_empty() {
            return Ok(());
        }
        let _guard = self.lock_for_change(direct_end..end).await?;
        let _change = self.shared.flushes.begin_change();
        self.device().write_buffered(direct_end, tail, durability).await
    }

    /// Runs a read-modify-write to its end, even if this future is dropped.
    async fn modify(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let (shared, alignment) = (Arc::clone(&self.shared), self.alignment);
        let task = async move { shared.read_modify_write(alignment, offset, data, durability).await };
        // Cancelled: the reactor is shutting down and drops its tasks.
        reactor::spawn_detached(task).await.unwrap_or(Err(Error::SHUTDOWN))
    }

    /// See [`Storage::write_zeroes`](super::Storage::write_zeroes).
    pub async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        if self.read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        if !within(offset, length, self.size_bytes()) {
            return Err(Error::INVALID);
        }
        if length == 0 {
            return Ok(());
        }
        let end = offset + length;
        let Range { start: first, end: last } = self.whole_blocks(offset, end);
        if first >= last {
            return self.write_zero_bytes(offset..end, options.durability).await;
        }
        {
            let _guard = self.lock_for_change(first..last).await?;
            let _change = self.shared.flushes.begin_change();
            self.device().write_zeroes(first, last - first, options).await?;
        }
        // The edges last: the middle may fail as unsupported, and then nothing may have changed.
        self.write_zero_bytes(offset..first, options.durability).await?;
        self.write_zero_bytes(last..end, options.durability).await
    }

    /// The part of a range that consists of whole blocks before the tail; empty (or reversed) if
    /// there is none.
    fn whole_blocks(&self, offset: u64, end: u64) -> Range<u64> {
        self.alignment.up(offset)..self.alignment.down(end).min(self.tail_start())
    }

    /// Writes the zeroes that are not whole blocks: less than two blocks and a tail.
    async fn write_zero_bytes(&self, range: Range<u64>, durability: Durability) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let zeroes = IoBuffer::zeroed((range.end - range.start) as usize);
        Box::pin(self.write_unaligned(range.start, zeroes.into(), durability)).await
    }

    /// See [`Storage::discard`](super::Storage::discard).
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        if self.read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        if !within(offset, length, self.size_bytes()) {
            return Err(Error::INVALID);
        }
        let Range { start: first, end: last } = self.whole_blocks(offset, offset + length);
        if first >= last {
            return Ok(());
        }
        let _guard = self.lock_for_change(first..last).await?;
        let _change = self.shared.flushes.begin_change();
        self.device().discard(first, last - first).await
    }

    /// Start of the tail; the size if there is none.
    fn tail_start(&self) -> u64 {
        let size = self.size_bytes();
        if self.alignment.down(size) == size {
            return size;
        }
        // The device's block and the page size are powers of two, so their maximum is a multiple of
        // both.
        size & !(self.alignment.offset.max(self.device().page_bytes()) - 1)
    }
}

impl<D: ZeroCopyDevice> Align<D> {
    /// See [`Storage::read_registered`](super::Storage::read_registered).
    pub(super) async fn read_registered(&self, offset: u64, buffer: &RegisteredData) -> Option<Result<()>> {
        match self.is_whole_blocks(offset, buffer.bytes()) {
            true => self.device().read_registered(offset, buffer).await,
            false => None,
        }
    }

    /// See [`Storage::write_registered`](super::Storage::write_registered).
    pub(super) async fn write_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Option<Result<()>> {
        if self.read_only() || !self.is_whole_blocks(offset, buffer.bytes()) {
            return None;
        }
        let _guard = match self.lock_for_change(offset..offset + buffer.bytes() as u64).await {
            Ok(guard) => guard,
            Err(error) => return Some(Err(error)),
        };
        let _change = self.shared.flushes.begin_change();
        self.device().write_registered(offset, buffer, durability).await
    }

    /// True if the range is inside the device and consists of whole blocks. The device checks the
    /// alignment of the memory.
    fn is_whole_blocks(&self, offset: u64, length: usize) -> bool {
        let bits = (offset | length as u64) & (self.alignment.offset - 1);
        bits == 0 && within(offset, length as u64, self.tail_start())
    }
}

impl<D: AlignedDevice> AlignShared<D> {
    /// Writes `data`, and the unchanged bytes around it in the same blocks.
    async fn read_modify_write(
        &self,
        alignment: Alignment,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<()> {
        let end = offset + data.len() as u64;
        let (first, last) = (alignment.down(offset), alignment.up(end));
        // The lock is held from before the read to after the write; the size is checked under it.
        let _guard = self.locks.exclusive(first..last).await;
        if last > self.device.size_bytes() {
            return Err(Error::INVALID);
        }
        let mut blocks = IoBuffer::new((last - first) as usize);
        let block = alignment.offset;
        // Up to two blocks are both edges anyway. For a long write only the edges are read.
        if blocks.len() <= MAX_SINGLE_READ.max(2 * block as usize) {
            blocks = self.device.read(first, blocks.into()).await?.joined();
        } else {
            if offset > first {
                let head = self.device.read(first, IoBuffer::new(block as usize).into()).await?.joined();
                blocks[..head.len()].copy_from_slice(&head);
            }
            if end < last {
                let tail = IoBuffer::new(block as usize);
                let tail = self.device.read(last - block, tail.into()).await?.joined();
                let at = blocks.len() - tail.len();
                blocks[at..].copy_from_slice(&tail);
            }
        }
        data.copy_to(&mut blocks[(offset - first) as usize..]);
        let _change = self.flushes.begin_change();
        self.device.write(first, blocks.into(), durability).await
    }
}

#[cfg(test)]
#[path = "align_tests.rs"]
mod tests;
