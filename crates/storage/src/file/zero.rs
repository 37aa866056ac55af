//! Zeroing and discarding: by a system call if the file system has one, else by writing zeroes.
//!
//! Effect of each call:
//!
//! | | regular file | block device |
//! | --- | --- | --- |
//! | PUNCH_HOLE | deallocates | write-zeroes with unmap, rejected if the device cannot |
//! | ZERO_RANGE | zeroes, stays allocated | write-zeroes; the kernel writes them itself if the device cannot, so not fast |
//! | PUNCH_HOLE, then allocate | as ZERO_RANGE, for tmpfs and others without it | – |
//!
//! A call that was rejected as unsupported is not tried again. Never changes the size of a file
//! (FALLOC_FL_KEEP_SIZE).

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::{FileKind, FileStorage, is_unsupported, retried};
use reactor::{
    buffer::IoBuffer,
    error::{Error, Result},
    operation::{self, Fd},
};

use crate::{Durability, ZeroOptions, align::AlignedDevice};

/// Size of the writes of zeroes, in bytes.
const PIECE: u64 = 1 << 20;

/// Calls that the file system turned out not to support.
#[derive(Debug, Default)]
pub(super) struct UnsupportedCalls {
    punch: AtomicBool,
    zero_range: AtomicBool,
    allocate: AtomicBool,
}

impl UnsupportedCalls {
    /// True if a call remains that is faster than writing zeroes.
    pub(super) fn has_fast_call(&self, kind: FileKind) -> bool {
        let punch = !self.punch.load(Relaxed);
        match kind {
            FileKind::Regular => punch || !self.zero_range.load(Relaxed),
            FileKind::BlockDevice => punch,
        }
    }
}

impl FileStorage {
    /// See [`Storage::write_zeroes`](crate::Storage::write_zeroes).
    pub(super) async fn zero(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        if length == 0 {
            return Ok(());
        }
        let end = offset + length;
        // Devices zero whole logical blocks only, also through the page cache. The edges are
        // written.
        let first = offset.next_multiple_of(self.zero_alignment).min(end);
        let last = (end - end % self.zero_alignment).max(first);
        if first < last && !self.zero_by_call(first, last - first, options).await? {
            if options.only_if_fast {
                return Err(Error::UNSUPPORTED);
            }
            self.write_zero_pieces(first, last).await?;
        }
        self.write_zero_pieces(offset, first).await?;
        self.write_zero_pieces(last, end).await?;
        if self.durability(options.durability) == Durability::Synchronous {
            self.sync_file().await
        } else {
            Ok(())
        }
    }

    /// Zeroes by a system call; false if none is supported.
    async fn zero_by_call(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<bool> {
        let refused = &self.zeroing;
        // ZERO_RANGE on a block device may make the kernel write zeroes itself: not fast.
        let zero_range_is_fast = self.kind == FileKind::Regular;
        if options.may_unmap && self.call(&refused.punch, libc::FALLOC_FL_PUNCH_HOLE, offset, length).await? {
            return Ok(true);
        }
        if (zero_range_is_fast || !options.only_if_fast)
            && self.call(&refused.zero_range, libc::FALLOC_FL_ZERO_RANGE, offset, length).await?
        {
            return Ok(true);
        }
        if options.may_unmap || self.kind == FileKind::BlockDevice || refused.allocate.load(Relaxed) {
            return Ok(false);
        }
        // Punching alone would leave a hole, but without `may_unmap` the range must stay allocated.
        Ok(self.call(&refused.punch, libc::FALLOC_FL_PUNCH_HOLE, offset, length).await?
            && self.call(&refused.allocate, 0, offset, length).await?)
    }

    /// One call of `fallocate`; false if it is unsupported, which is recorded in `refused`.
    async fn call(&self, refused: &AtomicBool, mode: i32, offset: u64, length: u64) -> Result<bool> {
        if refused.load(Relaxed) {
            return Ok(false);
        }
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        if self.kind == FileKind::Regular && !(offset | length).is_multiple_of(self.page_bytes) {
            // The file system zeroes partial pages in the page cache.
            self.syncs.used_page_cache();
        }
        let allocate = async |fd: Fd| retried(|| operation::allocate(&fd, mode, offset, length)).await;
        match self.isolation.operate(&self.changing_fd, allocate).await {
            Ok(()) => Ok(true),
            Err(error) if is_unsupported(&std::io::Error::from_raw_os_error(error.errno())) => {
                refused.store(true, Relaxed);
                Ok(false)
            }
            // Some file systems return EINVAL for an unsuitable alignment. Fall back for this
            // request only; the call may succeed for the next one.
            Err(Error::INVALID) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// See [`Storage::can_reserve`](crate::Storage::can_reserve).
    pub(crate) fn can_reserve(&self) -> bool {
        self.kind == FileKind::Regular && !self.zeroing.allocate.load(Relaxed)
    }

    /// See [`Storage::reserve`](crate::Storage::reserve).
    pub(crate) async fn reserve(&self, offset: u64, length: u64) -> Result<()> {
        if self.read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        if !self.can_reserve() {
            return Err(Error::UNSUPPORTED);
        }
        match self.call(&self.zeroing.allocate, 0, offset, length).await? {
            false => Err(Error::UNSUPPORTED),
            true if self.durability(Durability::Cached) == Durability::Synchronous => self.sync_file().await,
            true => Ok(()),
        }
    }

    async fn write_zero_pieces(&self, mut offset: u64, end: u64) -> Result<()> {
        while offset < end {
            let piece = PIECE.min(end - offset);
            let zeroes = IoBuffer::zeroed(piece as usize);
            // The caller syncs once for all pieces.
            self.write(offset, zeroes.into(), Durability::Cached).await?;
            offset += piece;
        }
        Ok(())
    }

    /// See [`Storage::discard`](crate::Storage::discard).
    pub(super) async fn discard_range(&self, offset: u64, length: u64) -> Result<()> {
        let first = offset.next_multiple_of(self.zero_alignment);
        let last = (offset + length) / self.zero_alignment * self.zero_alignment;
        if first >= last {
            return Ok(());
        }
        // A discard is a hint: if it is unsupported, it succeeds and does nothing.
        let punched = self.call(&self.zeroing.punch, libc::FALLOC_FL_PUNCH_HOLE, first, last - first).await?;
        if punched && self.durability(Durability::Cached) == Durability::Synchronous {
            return self.sync_file().await;
        }
        Ok(())
    }
}
