//! An export of an NBD server as a storage: `nbd://HOST/EXPORT` and similar URIs
//! ([`Uri`]).
//!
//! | cache mode | a write completes when | flush |
//! | --- | --- | --- |
//! | writeback, none | the server has replied | sent to the server |
//! | writethrough, directsync | it is durable: FUA, or a flush after it | sent to the server |
//! | unsafe | the server has replied, also with FUA | nothing |
//!
//! There is no cache between a disk and its server here, so `none` is the same as `writeback`. The
//! server may cache as it likes. NBD has no locks: other clients may open the same export. Unless
//! it was opened with `force_share`, this client assumes that it is the only writer.
//!
//! Requests respect the server's block sizes ([`Align`](super::align::Align)); the disk ends at the
//! last whole block. A request beyond the server's maximum is split, and a command that the server
//! does not support is replaced by others: see `operation`, which decides for each request.
//!
//! ```text
//!   nbd          storage operations as NBD commands
//!   operation    requests that may be sent again, adapted to the capabilities of the server
//!   link         sessions, disconnects, reconnecting
//!   connection   a connection and the threads that use it
//!   unflushed    writes to repeat after a disconnect
//! ```
//!
//! Requests have no timeout, as with a disk; `status` shows the age of the oldest one. The protocol
//! itself is in [`nbd`].

mod connection;
mod link;
mod open;
mod operation;
mod unflushed;

use std::sync::Arc;

pub use self::link::NbdLinkStatus;
pub(super) use self::open::open;
pub use self::open::{NbdOptions, ResolvedServerCache, SimulatedDialer, simulated};
use policy::time::Duration;

use self::{link::NbdLink, operation::NbdOperation, unflushed::NbdChange};
use super::{
    BlockSize, CacheMode, Durability, Extent, MAX_EXTENTS, PassedFiles, ZeroOptions,
    align::{AlignedDevice, Alignment},
    push_extent,
    resize::ResizeError,
};
use nbd::{
    client::NbdExportInfo,
    proto::{cmd_flag, state},
    uri::Uri,
};
use reactor::{
    buffer::{Segment, Segments},
    error::{Error, Result},
    spawn_detached,
};

/// Maximum bytes of one request to zero, trim or query: a multiple of any block size.
const MAX_REQUEST_BYTES: u64 = 1 << 30;
/// Maximum bytes of one zeroing request if the zeroes must be sent as data.
const MAX_SENT_ZEROES: u64 = 16 << 20;
/// Minimum bytes that one reply to a query of the allocation status covers; the range behind the
/// server's extents is reported as data. It is a cluster of most images, and bounds the round trips
/// that short extents can cause.
const MIN_STATUS_BYTES: u64 = 64 << 10;

/// An NBD export that is used as a disk.
#[derive(Debug)]
pub struct NbdStorage {
    link: Arc<NbdLink>,
    name: String,
    cache: CacheMode,
    read_only: bool,
    /// True if opened with `force_share`: another client may write to it.
    is_shared: bool,
    /// Another process may have it open too. It may resume until [`PassedFiles::take_ownership`] is
    /// called.
    passed_files: Option<PassedFiles>,
    /// Properties of the export when it was opened; its block sizes stay in force.
    opened_export: NbdExportInfo,
}

impl NbdStorage {
    /// State of the connections to the server.
    pub(super) fn remote(&self) -> NbdLinkStatus {
        self.link.remote()
    }

    /// The server, without the name of the export.
    pub(super) fn server(&self) -> Option<String> {
        Uri::parse(&self.name).ok().map(|uri| format!("NBD server {:?}", uri.server))
    }

    /// Time for which the oldest request in flight has waited; `None` if there is none.
    pub(super) fn oldest_request_age(&self) -> Option<Duration> {
        self.link.oldest_request()
    }

    /// True if other clients read data that was flushed here.
    pub(super) fn has_shared_flushes(&self) -> bool {
        self.cache != CacheMode::Unsafe && self.link.export().can_multi_conn()
    }

    pub(super) fn is_passed(&self) -> bool {
        self.passed_files.is_some()
    }

    pub(super) fn may_be_resumed_elsewhere(&self) -> bool {
        self.passed_files.as_ref().is_some_and(|passed| !passed.is_owner())
    }

    pub(super) fn is_shared(&self) -> bool {
        self.is_shared
    }

    pub(super) fn writes_through(&self) -> bool {
        !self.cache.has_write_cache()
    }

    pub(super) fn has_lost_writes(&self) -> bool {
        self.link.has_lost_writes()
    }

    /// Durability of a request, after the cache mode is applied.
    fn durability(&self, requested: Durability) -> Durability {
        match self.cache {
            CacheMode::Writethrough | CacheMode::Directsync => Durability::Synchronous,
            CacheMode::Unsafe => Durability::Cached,
            CacheMode::Writeback | CacheMode::None => requested,
        }
    }

    /// Returns whether a request needs FUA, and whether a flush must follow because the server has
    /// no FUA.
    fn durability_flags(&self, requested: Durability) -> (bool, bool) {
        let durable = self.durability(requested) == Durability::Synchronous;
        let can_fua = self.link.export().can_fua();
        (durable && can_fua, durable && !can_fua)
    }

    /// Splits a range into parts of at most `max_length` bytes, in order.
    fn parts(offset: u64, length: u64, max_length: u64) -> impl Iterator<Item = (u64, u32)> {
        let end = offset + length;
        std::iter::successors(Some(offset), move |at| Some(at + max_length))
            .take_while(move |at| *at < end)
            .map(move |at| (at, u32::try_from((end - at).min(max_length)).unwrap_or(u32::MAX)))
    }
}

impl AlignedDevice for NbdStorage {
    fn alignment(&self) -> Alignment {
        Alignment { offset: u64::from(self.opened_export.minimum_block), memory: 1 }
    }

    fn page_bytes(&self) -> u64 {
        1
    }

    fn size_bytes(&self) -> u64 {
        self.link.size_bytes()
    }

    /// Returns the known size: the protocol has no command for it. See [`AlignedDevice::resize`].
    async fn refresh_size(&self) -> Result<u64> {
        Ok(self.size_bytes())
    }

    /// NBD cannot resize an export. But its owner may have resized it at the server, so this
    /// reconnects and reads the current size.
    async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        let link = Arc::clone(&self.link);
        spawn_detached(async move { link.reopen().await }).await.unwrap_or(Err(Error::SHUTDOWN))?;
        let now = self.size_bytes();
        if now == size_bytes { Ok(()) } else { Err(ResizeError::NbdExport { size_bytes: now }) }
    }

    fn description(&self) -> String {
        let mode = if self.read_only { ", read-only" } else { "" };
        format!("{}, cache={}{mode}", self.name, self.cache)
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn block_size(&self) -> BlockSize {
        BlockSize { minimum: self.opened_export.minimum_block, preferred: self.opened_export.preferred_block }
    }

    fn can_zero_fast(&self) -> bool {
        self.link.export().can_fast_zero()
    }

    async fn read(&self, offset: u64, mut target: Segments) -> Result<Segments> {
        if target.is_empty() {
            return Ok(target);
        }
        let operation = NbdOperation::Read { offset, length: target.len() };
        let data = self.link.execute(operation).await?.data()?;
        // A single own buffer can be replaced by the received one without a copy.
        if matches!(target.as_slice(), [Segment::Own(_)]) {
            return Ok(data.into());
        }
        target.copy_from(&data);
        Ok(target)
    }

    async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let (force, flush) = self.durability_flags(durability);
        if !data.is_empty() {
            self.link.write(offset, data, force).await?;
        }
        if flush { self.link.flush().await } else { Ok(()) }
    }

    /// Unreachable: the size ends at a whole block, so there is no tail.
    async fn read_buffered(&self, _offset: u64, _target: Segments) -> Result<Segments> {
        Err(Error::INVALID)
    }

    async fn write_buffered(&self, _offset: u64, _data: Segments, _durability: Durability) -> Result<()> {
        Err(Error::INVALID)
    }

    async fn flush(&self) -> Result<()> {
        // A read-only client has nothing to flush, even while the server is disconnected.
        if self.read_only { Ok(()) } else { self.link.flush().await }
    }

    async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let export = self.link.export();
        let (force, flush) = self.durability_flags(options.durability);
        let mut flags = if options.may_unmap { 0 } else { cmd_flag::NO_HOLE };
        if options.only_if_fast {
            flags |= cmd_flag::FAST_ZERO;
        }
        // Shorter requests if the zeroes are sent as data, so that a disconnect repeats less.
        let max_length = if export.can_zero() { MAX_REQUEST_BYTES } else { MAX_SENT_ZEROES };
        for (offset, length) in Self::parts(offset, length, max_length) {
            self.link.change(NbdChange::Zeroes { offset, length, flags }, force).await?;
            // The first part succeeded; the range must not be left half zeroed because of
            // FAST_ZERO.
            flags &= !cmd_flag::FAST_ZERO;
        }
        if flush { self.link.flush().await } else { Ok(()) }
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        if !self.link.export().can_trim() {
            return Ok(());
        }
        for (offset, length) in Self::parts(offset, length, MAX_REQUEST_BYTES) {
            self.link.execute(NbdOperation::Trim { offset, length }).await?;
        }
        Ok(())
    }

    async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        if !self.link.export().has_allocation() {
            return Ok(vec![Extent { length, hole: false, zero: false }]);
        }
        // The query is extended to whole blocks; the extents are clipped to the requested range.
        let block = u64::from(self.opened_export.minimum_block);
        let end = offset + length.min(MAX_REQUEST_BYTES - block);
        let first = offset & !(block - 1);
        let length_to_query = u32::try_from(end.next_multiple_of(block).min(self.size_bytes()) - first);
        let operation = NbdOperation::Extents { offset: first, length: length_to_query.unwrap_or(u32::MAX) };
        let (mut at, mut extents) = (first, Vec::new());
        for extent in self.link.execute(operation).await?.extents()? {
            let next = at + u64::from(extent.length);
            let (from, to) = (at.max(offset), next.min(end));
            at = next;
            if from < to {
                let has_flag = |flag: u32| extent.flags & flag != 0;
                let (hole, zero) = (has_flag(state::HOLE), has_flag(state::ZERO));
                push_extent(&mut extents, Extent { length: to - from, hole, zero });
            }
            // Room for one more extent, the data below.
            if at >= end || extents.len() == MAX_EXTENTS - 1 {
                break;
            }
        }
        if extents.is_empty() {
            return Err(Error::IO);
        }
        let min_end = end.min(offset + MIN_STATUS_BYTES);
        if at < min_end {
            push_extent(&mut extents, Extent { length: min_end - at, hole: false, zero: false });
        }
        Ok(extents)
    }
}
