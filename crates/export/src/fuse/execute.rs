//! Execution of requests: each waits for admission, does its I/O, and is answered once.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll},
};

use block::disk::AdmissionPermit;
use event_listener::EventListener;
use policy::{request::Direction, throttle::RequestCost};
use reactor::{
    buffer::Segments,
    error::{Error, Result},
};
use storage::{Durability, RangeGuard, ZeroOptions};

use super::{
    file_end::{disk_bytes_for, errno_of},
    incoming::{FuseIncomingRequest, FuseWork},
    interrupts::Interruptible,
    message::{AttributeChanges, FuseOperation, FuseReply},
    queue::FuseQueue,
};
use crate::batch::Mergeable as _;

/// Bytes that are zeroed at once: a range may be as long as the disk.
const ZERO_PART: u64 = 1 << 30;
/// Largest number of parts of a range. A longer range has longer parts: a sparse file may have 8
/// EiB.
const MAX_PARTS: u64 = 1024;
/// Bytes that are queried at once for a hole or for data.
const SEEK_PART: u64 = 1 << 34;

/// Reason why a request is not executed.
enum AdmissionDenied {
    /// These requests of a merged I/O were interrupted.
    Interrupted(Vec<u64>),
    /// The device stops.
    Stopped,
    /// The device quiesces.
    Resting,
}

/// Internal error of a request of several steps that is to be restarted after the quiesce. The
/// kernel rejects this number in a reply (`ERESTARTSYS`), and no disk returns it.
const QUIESCING: Error = Error::from_errno(512);

impl FuseQueue {
    pub(super) async fn execute(self: Rc<Self>, incoming: FuseIncomingRequest) {
        let FuseIncomingRequest { unique, charged_bytes: charged, work } = incoming;
        match work {
            FuseWork::Read { offset, length } => self.read(unique, charged, offset, length).await,
            FuseWork::Write { offset, data, durability } => {
                self.write_one(unique, charged, offset, data, durability).await;
            }
            // Boxed, because the future of every read and write would otherwise be as large as the
            // largest arm.
            work @ FuseWork::Extend { .. } => {
                Box::pin(self.extend_one(FuseIncomingRequest { unique, charged_bytes: charged, work })).await;
            }
            FuseWork::Other(operation) => match Box::pin(self.other(unique, operation)).await {
                Err(QUIESCING) => self.put_back(FuseIncomingRequest { unique, charged_bytes: charged, work }),
                reply => self.answer(unique, charged, reply),
            },
        }
    }

    async fn read(&self, unique: u64, charged: usize, offset: u64, length: usize) {
        let cost = RequestCost::one(length as u64);
        let permit = match self.admit(&[unique], Direction::Read, cost).await {
            Ok(permit) => permit,
            Err(denied) => {
                let work = FuseWork::Read { offset, length };
                return self.deny(FuseIncomingRequest { unique, charged_bytes: charged, work }, &denied);
            }
        };
        let result = match self.device.disk().read(permit, offset, length).await {
            Err(Error::INVALID) => self.read_remaining(offset, length).await,
            result => result,
        };
        self.answer_read(unique, charged, result);
    }

    /// Repeats a read that failed because the disk was shrunk while it was in flight, for the part
    /// that is inside the file now.
    async fn read_remaining(&self, offset: u64, length: usize) -> Result<Segments> {
        let remaining = self.device.file_bytes().saturating_sub(offset).min(length as u64) as usize;
        if remaining == length {
            return Err(Error::INVALID);
        }
        if remaining == 0 {
            return Ok(Segments::default());
        }
        let permit = self.admit_anyway(Direction::Read, remaining as u64);
        self.device.disk().retry_read(permit, offset, remaining).await
    }

    /// Executes adjacent reads as one I/O and divides its data among them.
    pub(super) async fn read_merged(self: Rc<Self>, parts: Vec<FuseIncomingRequest>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.candidate().length).collect();
        let cost = RequestCost::merged(&lengths);
        let (offset, total) = (parts[0].candidate().offset, cost.bytes() as usize);
        let permit = match self.admit(&uniques(&parts), Direction::Read, cost).await {
            Ok(permit) => permit,
            Err(denied) => return self.continue_without(parts, denied),
        };
        match self.device.disk().read(permit, offset, total).await {
            Ok(mut rest) => {
                for (part, length) in parts.into_iter().zip(lengths) {
                    let tail = rest.split_off(length as usize);
                    self.answer_read(part.unique, part.charged_bytes, Ok(std::mem::replace(&mut rest, tail)));
                }
            }
            Err(error) => self.retry_separately(parts, error).await,
        }
    }

    /// Retries each read on its own, because a failed merged read does not show which part failed.
    async fn retry_separately(&self, parts: Vec<FuseIncomingRequest>, error: Error) {
        let disk = self.device.disk();
        tracing::debug!(disk = %disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for part in parts {
            let (offset, length) = (part.candidate().offset, part.candidate().length);
            match self.admit(&[part.unique], Direction::Read, RequestCost::one(length)).await {
                Ok(permit) => {
                    let result = match disk.retry_read(permit, offset, length as usize).await {
                        Err(Error::INVALID) => self.read_remaining(offset, length as usize).await,
                        result => result,
                    };
                    self.answer_read(part.unique, part.charged_bytes, result);
                }
                Err(denied) => self.deny(part, &denied),
            }
        }
    }

    fn answer_read(&self, unique: u64, charged: usize, result: Result<Segments>) {
        match result {
            Ok(data) => {
                self.reply(&FuseReply::data(unique, data.len()), &data);
                self.count_out(charged);
            }
            Err(error) => self.answer(unique, charged, Err(error)),
        }
    }

    async fn write_one(
        &self,
        unique: u64,
        charged: usize,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) {
        let bytes = data.len();
        let permit = match self.admit(&[unique], Direction::Write, RequestCost::one(bytes as u64)).await {
            Ok(permit) => permit,
            Err(denied) => {
                let work = FuseWork::Write { offset, data, durability };
                return self.deny(FuseIncomingRequest { unique, charged_bytes: charged, work }, &denied);
            }
        };
        let result = self.write_inside(permit, offset, data, durability).await;
        self.answer(unique, charged, result.map(|()| FuseReply::written(unique, bytes as u32)));
    }

    /// Executes adjacent writes as one gathered I/O. All of them fail together, because a failed
    /// write leaves its range undefined anyway.
    pub(super) async fn write_merged(self: Rc<Self>, parts: Vec<FuseIncomingRequest>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.candidate().length).collect();
        let offset = parts[0].candidate().offset;
        let cost = RequestCost::merged(&lengths);
        let permit = match self.admit(&uniques(&parts), Direction::Write, cost).await {
            Ok(permit) => permit,
            Err(denied) => return self.continue_without(parts, denied),
        };
        let mut all = Segments::default();
        let mut durable = Durability::Cached;
        let mut replies = Vec::with_capacity(parts.len());
        for FuseIncomingRequest { unique, charged_bytes: charged, work } in parts {
            let FuseWork::Write { data, durability, .. } = work else { unreachable!("planned as writes") };
            replies.push((unique, charged, data.len() as u32));
            durable = durability;
            all.append(data);
        }
        let result = self.write_inside(permit, offset, all, durable).await;
        for (unique, charged, bytes) in replies {
            self.answer(unique, charged, result.map(|()| FuseReply::written(unique, bytes)));
        }
    }

    /// Writes data that was inside the file when the request was received. If the file was shrunk
    /// meanwhile, the part past its end is dropped, as if the write had preceded the shrink.
    async fn write_inside(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        mut data: Segments,
        durability: Durability,
    ) -> Result<()> {
        let _steady = self.lock_size().await;
        if self.device.export.growable {
            // Under `lock_size`, so the length cannot change before the write has ended.
            let available = self.device.file_bytes().saturating_sub(offset);
            if available == 0 {
                return Ok(());
            }
            if available < data.len() as u64 {
                drop(data.split_off(available as usize));
            }
        }
        self.write_to_disk(permit, offset, data, durability).await
    }

    /// Guard that keeps clients of the file from changing its size; not needed if they cannot.
    async fn lock_size(&self) -> Option<RangeGuard<'_>> {
        if !self.device.export.growable {
            return None;
        }
        let steady = self.device.size_lock.shared(0..1).await;
        self.device.end.forget_stale(self.device.disk());
        Some(steady)
    }

    async fn write_to_disk(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<()> {
        // Set even if the write fails: a part of it may have been written.
        self.device.mark_changed();
        self.device.disk().write(permit, offset, data, durability).await
    }

    /// Denies the requests of a merged I/O that `denied` applies to, and executes each remaining
    /// one separately.
    fn continue_without(self: Rc<Self>, parts: Vec<FuseIncomingRequest>, denied: AdmissionDenied) {
        let is_denied = |unique: u64| match &denied {
            AdmissionDenied::Interrupted(requests) => requests.contains(&unique),
            AdmissionDenied::Stopped | AdmissionDenied::Resting => true,
        };
        for part in parts {
            if is_denied(part.unique) {
                self.deny(part, &denied);
            } else {
                reactor::spawn(Rc::clone(&self).execute(part));
            }
        }
    }

    async fn extend_one(&self, incoming: FuseIncomingRequest) {
        let cost = RequestCost::one(incoming.work.data_bytes());
        let permit = match self.admit(&[incoming.unique], Direction::Write, cost).await {
            Ok(permit) => permit,
            Err(denied) => return self.deny(incoming, &denied),
        };
        let FuseIncomingRequest { unique, charged_bytes: charged, work } = incoming;
        let written = self.extend(permit, work).await;
        self.answer(unique, charged, written.map(|bytes| FuseReply::written(unique, bytes)));
    }

    /// Executes a write that extends past the disk's end as it was received; returns the number of
    /// bytes written. A disk of fixed size takes the part that fits.
    async fn extend(&self, permit: AdmissionPermit, work: FuseWork) -> Result<u32> {
        let FuseWork::Extend { offset, mut data, durability, may_grow } = work else {
            unreachable!("what it is called for")
        };
        // Exclusive: no write may run between reading the end and moving it.
        let _size_lock = self.device.size_lock.exclusive(0..1).await;
        self.device.end.forget_stale(self.device.disk());
        let size = self.device.file_bytes();
        let offset = offset.unwrap_or(size);
        let end = offset.checked_add(data.len() as u64).ok_or(Error::from_errno(libc::EFBIG))?;
        if end > size {
            if may_grow {
                self.resize(end).await?;
            } else if offset < size {
                drop(data.split_off((size - offset) as usize));
            } else {
                return Err(Error::NO_SPACE);
            }
        }
        let bytes = data.len() as u32;
        self.write_to_disk(permit, offset, data, durability).await?;
        Ok(bytes)
    }

    /// Sets the length of the file, and shrinks or grows the disk to the smallest size that can
    /// hold it. The caller holds `size_lock` of the device exclusively.
    async fn resize(&self, bytes: u64) -> Result<()> {
        let (device, disk) = (&self.device, self.device.disk());
        let size = disk_bytes_for(disk, bytes).ok_or(Error::from_errno(libc::EFBIG))?;
        let is_cut = bytes < device.file_bytes();
        device.mark_changed();
        if size != disk.size_bytes() {
            disk.resize(size).await.map_err(|refused| {
                tracing::debug!(disk = %disk.name(), size, %refused, "the disk does not take another size");
                Error::from_errno(errno_of(&refused))
            })?;
        }
        if bytes == size {
            device.end.set(None);
            return Ok(());
        }
        if is_cut {
            // Zeroed before the end is moved: after a failure the file is longer, with unchanged
            // bytes.
            let permit = self.admit_anyway(Direction::Write, size - bytes);
            let options =
                ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
            disk.write_zeroes(permit, bytes, size - bytes, options).await?;
        }
        device.end.set(Some(bytes));
        Ok(())
    }

    /// Executes requests that move no data.
    async fn other(&self, unique: u64, operation: FuseOperation) -> Result<FuseReply> {
        match operation {
            FuseOperation::Sync => {
                let cancel_token = &self.device.cancel_token;
                self.device.disk().flush_for(Some(cancel_token)).await.map(|()| FuseReply::done(unique))
            }
            FuseOperation::Allocate { offset, length, mode } => {
                self.allocate(unique, offset, length, mode).await.map(|()| FuseReply::done(unique))
            }
            FuseOperation::Seek { offset, whence } => {
                self.seek(unique, offset, whence).await.map(|position| FuseReply::offset(unique, position))
            }
            FuseOperation::GetAttributes => {
                self.device.count_space().await;
                Ok(FuseReply::attributes(unique, &self.device.attributes()))
            }
            FuseOperation::SetAttributes(changes) => {
                self.change_size(unique, &changes).await?;
                self.device.change_owner(&changes);
                self.device.count_space().await;
                Ok(FuseReply::attributes(unique, &self.device.attributes()))
            }
            // OPEN reaches this function only with O_TRUNC.
            FuseOperation::Open { .. } => {
                self.change_size(unique, &AttributeChanges { size: Some(0), ..AttributeChanges::default() })
                    .await?;
                self.device.count_open();
                Ok(FuseReply::opened(unique, super::negotiate::OPEN_FLAGS))
            }
            _ => Err(Error::from_errno(libc::ENOSYS)),
        }
    }

    /// Changes the length of the file; a removed tail is charged as a discard.
    async fn change_size(&self, unique: u64, changes: &AttributeChanges) -> Result<()> {
        let current_bytes = self.device.file_bytes();
        let Some(size) = changes.size.filter(|size| *size != current_bytes) else { return Ok(()) };
        if self.device.export.read_only {
            return Err(Error::from_errno(libc::EROFS));
        }
        if !self.device.export.growable {
            return Err(Error::NOT_PERMITTED);
        }
        // Admission before the lock: a request that waits for limits must not block other changes.
        drop(self.admit_discard(unique, current_bytes.saturating_sub(size)).await?);
        let _size_lock = self.device.size_lock.exclusive(0..1).await;
        match self.device.file_bytes() == size {
            true => Ok(()),
            false => self.resize(size).await,
        }
    }

    /// Waits for admission of a discard of `bytes`: one operation for each part, and one for no
    /// bytes.
    async fn admit_discard(&self, unique: u64, mut bytes: u64) -> Result<AdmissionPermit> {
        let max_part = part_bytes(bytes);
        loop {
            self.check_not_ending()?;
            let part = max_part.min(bytes);
            let admitted = self.admit(&[unique], Direction::Write, RequestCost::one(part)).await;
            let permit = admitted.map_err(|denied| denied.error())?;
            bytes -= part;
            // The permit of the last part; those of earlier parts were charged and dropped.
            if bytes == 0 {
                return Ok(permit);
            }
            reactor::yield_now().await;
        }
    }

    /// `fallocate(2)`.
    async fn allocate(&self, unique: u64, offset: u64, length: u64, mode: u32) -> Result<()> {
        const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
        const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE;
        const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE;
        if self.device.export.read_only {
            return Err(Error::from_errno(libc::EROFS));
        }
        let mode = mode as i32;
        let keeps_size = mode & KEEP_SIZE != 0;
        let end = offset.checked_add(length).ok_or(Error::from_errno(libc::EFBIG))?;
        match mode & !KEEP_SIZE {
            PUNCH_HOLE if keeps_size => self.zero(unique, offset..end, true).await,
            ZERO_RANGE => {
                if !keeps_size {
                    self.extend_to(unique, end).await?;
                }
                self.zero(unique, offset..end, false).await?;
                let past_end = offset.max(self.device.file_bytes())..end;
                let may_reserve = self.device.export.growable && self.device.disk().image().can_reserve();
                match may_reserve && !past_end.is_empty() {
                    true => self.reserve(unique, past_end, true).await,
                    false => Ok(()),
                }
            }
            0 => self.reserve(unique, offset..end, keeps_size).await,
            _ => Err(Error::UNSUPPORTED),
        }
    }

    /// Extends the file to at least this length.
    async fn extend_to(&self, unique: u64, end: u64) -> Result<()> {
        if end <= self.device.file_bytes() {
            return Ok(());
        }
        if !self.device.export.growable {
            return Err(Error::NO_SPACE);
        }
        drop(self.admit_discard(unique, 0).await?);
        let _size_lock = self.device.size_lock.exclusive(0..1).await;
        match end <= self.device.file_bytes() {
            true => Ok(()),
            false => self.resize(end).await,
        }
    }

    /// Reserves space, then extends the file if the range is past its end. In this order, a disk
    /// that cannot reserve keeps its size.
    async fn reserve(&self, unique: u64, range: std::ops::Range<u64>, keeps_size: bool) -> Result<()> {
        let is_past_end = |queue: &Self| range.end > queue.device.file_bytes();
        if is_past_end(self) && !self.device.export.growable {
            return Err(Error::NO_SPACE);
        }
        let disk = self.device.disk();
        if !disk.image().can_reserve() {
            return Err(Error::UNSUPPORTED);
        }
        // Moves no data, so no bytes are charged.
        let permit = self.admit_discard(unique, 0).await?;
        let _size_lock = self.device.size_lock.exclusive(0..1).await;
        disk.reserve(permit, range.start, range.end - range.start).await?;
        match is_past_end(self) && !keeps_size {
            true => self.resize(range.end).await,
            false => Ok(()),
        }
    }

    async fn zero(&self, unique: u64, mut range: std::ops::Range<u64>, may_unmap: bool) -> Result<()> {
        let options = ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
        let max_part = part_bytes(range.end.min(self.device.file_bytes()).saturating_sub(range.start));
        loop {
            self.check_not_ending()?;
            let inside = |queue: &Self| range.end.min(queue.device.file_bytes()).saturating_sub(range.start);
            let part = max_part.min(inside(self));
            if part == 0 {
                return Ok(());
            }
            let admitted = self.admit(&[unique], Direction::Write, RequestCost::one(part)).await;
            let permit = admitted.map_err(|denied| denied.error())?;
            let _steady = self.lock_size().await;
            // The file may have been shrunk while this request waited.
            let part = part.min(inside(self));
            if part == 0 {
                return Ok(());
            }
            self.device.mark_changed();
            self.device.disk().write_zeroes(permit, range.start, part, options).await?;
            range.start += part;
            reactor::yield_now().await;
        }
    }

    /// `lseek(2)` to data or to a hole. Ranges that are known to be zero without reading data count
    /// as holes.
    async fn seek(&self, unique: u64, offset: u64, whence: u32) -> Result<u64> {
        const NOTHING: Error = Error::from_errno(libc::ENXIO);
        let for_data = match i32::try_from(whence) {
            Ok(libc::SEEK_DATA) => true,
            Ok(libc::SEEK_HOLE) => false,
            _ => return Err(Error::INVALID),
        };
        let disk = self.device.disk();
        let mut at = offset;
        loop {
            self.check_not_ending()?;
            let remaining = self.device.file_bytes().saturating_sub(at);
            if remaining == 0 {
                // The end of the file counts as a hole.
                return if for_data || at == offset { Err(NOTHING) } else { Ok(at) };
            }
            // Only metadata is read.
            let admitted = self.admit(&[unique], Direction::Read, RequestCost::one(0)).await;
            let permit = admitted.map_err(|denied| denied.error())?;
            let extents = disk.block_status(&permit, at, remaining.min(SEEK_PART)).await?;
            for extent in &extents {
                // The first extent of the wanted kind, or the requested offset inside of it.
                if extent.zero != for_data {
                    return Ok(at);
                }
                at += extent.length;
            }
            if extents.is_empty() {
                return Err(Error::IO);
            }
            reactor::yield_now().await;
        }
    }

    /// Fails if a request of several steps must not begin its next step.
    fn check_not_ending(&self) -> Result<()> {
        match () {
            () if self.device.is_stopping() => Err(Error::SHUTDOWN),
            () if self.device.is_quiescing() => Err(QUIESCING),
            () => Ok(()),
        }
    }

    /// Ends a request that was not admitted: puts it back, or fails it.
    fn deny(&self, incoming: FuseIncomingRequest, denied: &AdmissionDenied) {
        match denied {
            AdmissionDenied::Resting => self.put_back(incoming),
            denied => self.answer(incoming.unique, incoming.charged_bytes, Err(denied.error())),
        }
    }

    /// Sends the reply, or the error.
    fn answer(&self, unique: u64, charged: usize, result: Result<FuseReply>) {
        match result {
            Ok(reply) => self.reply(&reply, &Segments::default()),
            Err(error) => {
                tracing::debug!(disk = %self.device.disk().name(), %error, "a request failed");
                self.reply_error(unique, error.errno());
            }
        }
        self.count_out(charged);
    }

    /// Charges a further step of an admitted request without waiting.
    fn admit_anyway(&self, direction: Direction, bytes: u64) -> AdmissionPermit {
        let permit = self.device.disk().charge_unconditionally(direction, &RequestCost::one(bytes));
        permit.with_cancel_token(&self.device.cancel_token)
    }

    /// Waits for admission by the disk's limits.
    async fn admit(
        &self,
        requests: &[u64],
        direction: Direction,
        cost: RequestCost,
    ) -> std::result::Result<AdmissionPermit, AdmissionDenied> {
        let mut admission = pin!(self.device.disk().admit(direction, cost));
        // Created only for a request that has to wait: most are admitted at the first poll.
        let mut waiting = None;
        let admitted = poll_fn(|context| {
            if let Poll::Ready(permit) = admission.as_mut().poll(context) {
                return Poll::Ready(Ok(permit));
            }
            let waiting = waiting.get_or_insert_with(|| AdmissionWait::new(self, requests));
            waiting.poll_denied(self, context).map(Err)
        })
        .await;
        admitted.map(|permit| permit.with_cancel_token(&self.device.cancel_token))
    }
}

/// Conditions that end a wait for limits.
struct AdmissionWait<'a> {
    interruptible: Interruptible<'a>,
    interruption: EventListener,
    stop: EventListener,
}

impl<'a> AdmissionWait<'a> {
    fn new(queue: &'a FuseQueue, requests: &[u64]) -> Self {
        let interruptible = queue.device.interrupts.allow(requests.to_vec());
        let interruption = interruptible.listen();
        Self { interruptible, interruption, stop: queue.device.state_changed.listen() }
    }

    fn poll_denied(&mut self, queue: &FuseQueue, context: &mut Context<'_>) -> Poll<AdmissionDenied> {
        loop {
            if queue.device.is_stopping() {
                return Poll::Ready(AdmissionDenied::Stopped);
            }
            if queue.device.is_quiescing() {
                return Poll::Ready(AdmissionDenied::Resting);
            }
            if Pin::new(&mut self.stop).poll(context).is_pending() {
                break;
            }
            self.stop = queue.device.state_changed.listen();
        }
        let is_interrupted = Pin::new(&mut self.interruption).poll(context).is_ready();
        let requests = self.interruptible.interrupted();
        if is_interrupted || !requests.is_empty() {
            return Poll::Ready(AdmissionDenied::Interrupted(requests));
        }
        Poll::Pending
    }
}

impl AdmissionDenied {
    fn error(&self) -> Error {
        match self {
            Self::Interrupted(_) => Error::from_errno(libc::EINTR),
            Self::Stopped => Error::SHUTDOWN,
            Self::Resting => QUIESCING,
        }
    }
}

/// Length of a part of a long range.
fn part_bytes(bytes: u64) -> u64 {
    ZERO_PART.max(bytes.div_ceil(MAX_PARTS))
}

fn uniques(parts: &[FuseIncomingRequest]) -> Vec<u64> {
    parts.iter().map(|part| part.unique).collect()
}
