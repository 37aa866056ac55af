//! A storage around another one: restricts it to a part, delays its requests, limits their rate, or
//! injects failures.
//!
//! For images inside of files, for imitating devices and for tests. Never changes data that is read
//! or written.

use std::{pin::Pin, sync::Arc};

use policy::request::Direction;

use super::{
    BlockSize, Durability, Extent, ResizeError, Storage, StoragePart, ZeroOptions,
    delay::{Delay, DelayOptions},
    fault::{FaultInjector, FaultRule, StorageRequestKind},
    rate::RateBudget,
};
use reactor::{
    buffer::Segments,
    error::{Error, Result},
    now, sleep_until,
};

/// A storage and its wrapper.
#[derive(Debug)]
pub struct Wrapped {
    inner: Storage,
    wrapper: Wrapper,
}

#[derive(Debug)]
enum Wrapper {
    Delay(Delay),
    Rate(Arc<RateBudget>),
    Fault(FaultInjector),
    Part(StoragePart),
}

impl Storage {
    fn wrapped(self, wrapper: Wrapper) -> Self {
        Self::Wrapped(Box::new(Wrapped { inner: self, wrapper }))
    }

    /// Restricts it to a part.
    pub fn part(self, part: StoragePart) -> Self {
        self.wrapped(Wrapper::Part(part))
    }

    /// Adds latency.
    pub fn delayed(self, options: DelayOptions) -> Self {
        self.wrapped(Wrapper::Delay(Delay::new(options)))
    }

    /// Limits its bandwidth by a budget, which other storages may share.
    pub fn with_rate(self, budget: Arc<RateBudget>) -> Self {
        self.wrapped(Wrapper::Rate(budget))
    }

    /// Injects failures by rules, in this order.
    pub fn with_faults(self, rules: Vec<FaultRule>) -> Self {
        self.wrapped(Wrapper::Fault(FaultInjector::new(rules)))
    }
}

/// Future of a request to the inner storage. Boxed, since wrappers nest.
type InnerFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + 'a>>;

impl Wrapped {
    /// The inner storage.
    pub fn inner(&self) -> &Storage {
        &self.inner
    }

    /// The budget that limits its bandwidth, if this wrapper does.
    pub fn budget(&self) -> Option<&Arc<RateBudget>> {
        match &self.wrapper {
            Wrapper::Rate(budget) => Some(budget),
            Wrapper::Delay(_) | Wrapper::Fault(_) | Wrapper::Part(_) => None,
        }
    }

    /// The part of the inner storage, if this wrapper restricts it to one.
    pub(crate) fn as_part(&self) -> Option<StoragePart> {
        match self.wrapper {
            Wrapper::Part(part) => Some(part),
            Wrapper::Delay(_) | Wrapper::Rate(_) | Wrapper::Fault(_) => None,
        }
    }

    fn part(&self) -> StoragePart {
        self.as_part().unwrap_or_default()
    }

    /// Offset in the inner storage. Cannot overflow for valid requests, which lie inside the size.
    fn inner_offset(&self, offset: u64) -> u64 {
        self.part().offset.saturating_add(offset)
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.part().size_in(self.inner.size_bytes())
    }

    pub(super) async fn refresh_size(&self) -> Result<u64> {
        Ok(self.part().size_in(Box::pin(self.inner.refresh_size()).await?))
    }

    pub(super) async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        match self.part().size {
            Some(size_bytes) => Err(ResizeError::Part { size_bytes }),
            None => self.inner.resize(self.inner_offset(size_bytes)).await,
        }
    }

    pub(super) async fn allocated_bytes(&self) -> Result<u64> {
        Ok(self.inner.allocated_bytes().await?.min(self.part().size.unwrap_or(u64::MAX)))
    }

    pub(super) async fn reserve(&self, offset: u64, length: u64) -> Result<()> {
        let end = offset.saturating_add(length);
        match self.part().size {
            Some(size_bytes) if end > size_bytes => Err(Error::UNSUPPORTED),
            _ => self.inner.reserve(self.inner_offset(offset), length).await,
        }
    }

    pub(super) async fn will_need(&self, offset: u64, length: u64) {
        self.inner.will_need(self.inner_offset(offset), length).await;
    }

    pub(super) fn description(&self) -> String {
        let effect = match &self.wrapper {
            Wrapper::Delay(_) => "delayed",
            Wrapper::Rate(_) => "rate limited",
            Wrapper::Fault(_) => "with faults",
            Wrapper::Part(_) => "a part",
        };
        format!("{}, {effect}", self.inner.description())
    }

    pub(super) fn read_only(&self) -> bool {
        self.inner.read_only()
    }

    pub(super) fn block_size(&self) -> BlockSize {
        let BlockSize { minimum, preferred } = self.inner.block_size();
        // Blocks of a part coincide with blocks of the inner storage only up to the alignment of
        // the part's first byte.
        let aligned = 1_u32.checked_shl(self.part().offset.trailing_zeros()).unwrap_or(u32::MAX);
        BlockSize { minimum, preferred: preferred.min(aligned) }
    }

    pub(super) fn can_zero_fast(&self) -> bool {
        self.inner.can_zero_fast()
    }

    /// Runs a request of this kind and range on the inner storage, through the wrapper.
    async fn run<T>(
        &self,
        kind: StorageRequestKind,
        offset: u64,
        length: u64,
        below: InnerFuture<'_, T>,
    ) -> Result<T> {
        match &self.wrapper {
            Wrapper::Part(_) => below.await,
            Wrapper::Delay(delay) => {
                let latency = match kind {
                    StorageRequestKind::Read => delay.options.read,
                    StorageRequestKind::Write => delay.options.write,
                    StorageRequestKind::Zero | StorageRequestKind::Discard => delay.options.zero,
                    StorageRequestKind::Flush => delay.options.flush,
                    StorageRequestKind::Status => return below.await,
                };
                let _permit = delay.acquire(latency).await;
                below.await
            }
            Wrapper::Rate(budget) => {
                let (direction, bytes) = match kind {
                    StorageRequestKind::Read => (Direction::Read, length),
                    StorageRequestKind::Write => (Direction::Write, length),
                    // A zeroing request transfers no data to a device.
                    StorageRequestKind::Zero | StorageRequestKind::Discard => (Direction::Write, 0),
                    StorageRequestKind::Flush | StorageRequestKind::Status => return below.await,
                };
                // The request runs first and its time counts as part of the budget's, so a slower
                // storage below adds nothing.
                let began = now();
                let done = budget.charge(direction, bytes);
                let result = below.await;
                sleep_until(done).await;
                budget.count(direction, bytes, now() - began);
                result
            }
            Wrapper::Fault(faults) => {
                // A flush has no range.
                let range =
                    (kind != StorageRequestKind::Flush).then(|| offset..offset.saturating_add(length));
                faults.check(kind, range.as_ref())?;
                below.await
            }
        }
    }

    pub(super) async fn read(&self, offset: u64, target: Segments) -> Result<Segments> {
        let length = target.len() as u64;
        let below = Box::pin(self.inner.read_into(self.inner_offset(offset), target));
        self.run(StorageRequestKind::Read, offset, length, below).await
    }

    pub(super) async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let length = data.len() as u64;
        self.run(
            StorageRequestKind::Write,
            offset,
            length,
            Box::pin(self.inner.write(self.inner_offset(offset), data, durability)),
        )
        .await
    }

    pub(super) async fn flush(&self) -> Result<()> {
        self.run(StorageRequestKind::Flush, 0, 0, Box::pin(self.inner.flush())).await
    }

    pub(super) async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let below = Box::pin(self.inner.write_zeroes(self.inner_offset(offset), length, options));
        self.run(StorageRequestKind::Zero, offset, length, below).await
    }

    pub(super) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.run(
            StorageRequestKind::Discard,
            offset,
            length,
            Box::pin(self.inner.discard(self.inner_offset(offset), length)),
        )
        .await
    }

    pub(super) async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        self.run(
            StorageRequestKind::Status,
            offset,
            length,
            Box::pin(self.inner.block_status(self.inner_offset(offset), length)),
        )
        .await
    }
}
