//! Carrying out requests: each waits for its limits, does its I/O, and is answered once.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    rc::Rc,
    task::{Context, Poll},
};

use block::{
    buffer::Segments,
    disk::Pass,
    error::{Error, Result},
    reactor,
    storage::{Durability, ResizeError, ZeroOptions},
};
use event_listener::EventListener;
use policy::{request::Direction, throttle::Cost};

use super::{
    interrupts::Interruptible,
    message::{Changes, Operation, Reply},
    queue::Queue,
    work::{Incoming, Work},
};
use crate::intake::Mergeable as _;

/// A disk's sector: its length is a multiple of this, and not 0.
const SECTOR_BYTES: u64 = 512;
/// Zeroed at a time: a range may be as long as the disk.
const ZERO_PART: u64 = 1 << 30;
/// Looked up at a time for a hole or for data.
const SEEK_PART: u64 = 1 << 34;

/// Why a request is not carried out.
enum Denied {
    /// These of the requests that waited together are not waited for any more.
    Interrupted(Vec<u64>),
    /// The device stops.
    Stopped,
    /// The device comes to rest.
    Resting,
}

/// Of a request of several steps that is to begin anew once the rest is over. The kernel takes no
/// such number (`ERESTARTSYS`), and no disk has it.
const RESTING: Error = Error::from_errno(512);

impl Queue {
    pub(super) async fn carry_out(self: Rc<Self>, incoming: Incoming) {
        let Incoming { unique, kept, work } = incoming;
        match work {
            Work::Read { offset, length } => self.read(unique, kept, offset, length).await,
            Work::Write { offset, data, durability } => {
                self.write_one(unique, kept, offset, data, durability).await;
            }
            // Apart, because every read and write has room for what is not.
            work @ Work::Extend { .. } => Box::pin(self.extend_one(Incoming { unique, kept, work })).await,
            Work::Other(operation) => match Box::pin(self.other(unique, operation)).await {
                Err(RESTING) => self.put_back(Incoming { unique, kept, work }),
                reply => self.answer(unique, kept, reply),
            },
        }
    }

    async fn read(&self, unique: u64, kept: usize, offset: u64, length: usize) {
        let cost = Cost::one(length as u64);
        let pass = match self.admit(&[unique], Direction::Read, cost).await {
            Ok(pass) => pass,
            Err(denied) => {
                let work = Work::Read { offset, length };
                return self.deny(Incoming { unique, kept, work }, &denied);
            }
        };
        let result = self.device.disk().read(pass, offset, length).await;
        self.answer_read(unique, kept, result);
    }

    /// Reads that follow each other on the disk: one I/O, its data divided among them.
    pub(super) async fn read_merged(self: Rc<Self>, parts: Vec<Incoming>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.candidate().length).collect();
        let cost = Cost::merged(&lengths);
        let (offset, total) = (parts[0].candidate().offset, cost.bytes() as usize);
        let pass = match self.admit(&uniques(&parts), Direction::Read, cost).await {
            Ok(pass) => pass,
            Err(denied) => return self.go_on_without(parts, denied),
        };
        match self.device.disk().read(pass, offset, total).await {
            Ok(mut rest) => {
                for (part, length) in parts.into_iter().zip(lengths) {
                    let tail = rest.split_off(length as usize);
                    self.answer_read(part.unique, part.kept, Ok(std::mem::replace(&mut rest, tail)));
                }
            }
            Err(error) => self.retry_apart(parts, error).await,
        }
    }

    /// Which of several merged reads failed is not known, so each is tried alone.
    async fn retry_apart(&self, parts: Vec<Incoming>, error: Error) {
        let disk = self.device.disk();
        tracing::debug!(disk = %disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for part in parts {
            let (offset, length) = (part.candidate().offset, part.candidate().length);
            match self.admit(&[part.unique], Direction::Read, Cost::one(length)).await {
                Ok(pass) => {
                    let result = disk.retry_read(pass, offset, length as usize).await;
                    self.answer_read(part.unique, part.kept, result);
                }
                Err(denied) => self.deny(part, &denied),
            }
        }
    }

    fn answer_read(&self, unique: u64, kept: usize, result: Result<Segments>) {
        match result {
            Ok(data) => {
                self.reply(&Reply::data(unique, data.len()), &data);
                self.ended(kept);
            }
            Err(error) => self.answer(unique, kept, Err(error)),
        }
    }

    async fn write_one(&self, unique: u64, kept: usize, offset: u64, data: Segments, durability: Durability) {
        let bytes = data.len();
        let pass = match self.admit(&[unique], Direction::Write, Cost::one(bytes as u64)).await {
            Ok(pass) => pass,
            Err(denied) => {
                let work = Work::Write { offset, data, durability };
                return self.deny(Incoming { unique, kept, work }, &denied);
            }
        };
        let result = self.write_to_disk(pass, offset, data, durability).await;
        self.answer(unique, kept, result.map(|()| Reply::written(unique, bytes as u32)));
    }

    /// Writes that follow each other on the disk: one I/O that gathers their data. All fail
    /// together, because a failed write leaves its range undefined anyway.
    pub(super) async fn write_merged(self: Rc<Self>, parts: Vec<Incoming>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.candidate().length).collect();
        let offset = parts[0].candidate().offset;
        let cost = Cost::merged(&lengths);
        let pass = match self.admit(&uniques(&parts), Direction::Write, cost).await {
            Ok(pass) => pass,
            Err(denied) => return self.go_on_without(parts, denied),
        };
        let mut all = Segments::default();
        let mut durable = Durability::Cached;
        let mut answers = Vec::with_capacity(parts.len());
        for Incoming { unique, kept, work } in parts {
            let Work::Write { data, durability, .. } = work else { unreachable!("planned as writes") };
            answers.push((unique, kept, data.len() as u32));
            durable = durability;
            all.append(data);
        }
        let result = self.write_to_disk(pass, offset, all, durable).await;
        for (unique, kept, bytes) in answers {
            self.answer(unique, kept, result.map(|()| Reply::written(unique, bytes)));
        }
    }

    async fn write_to_disk(
        &self,
        pass: Pass,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<()> {
        // Also where it fails, some of it may have been written.
        self.device.has_changed();
        self.device.disk().write(pass, offset, data, durability).await
    }

    /// Requests that waited together, of which some are given up: the others wait alone.
    fn go_on_without(self: Rc<Self>, parts: Vec<Incoming>, denied: Denied) {
        let is_over = |unique: u64| match &denied {
            Denied::Interrupted(requests) => requests.contains(&unique),
            Denied::Stopped | Denied::Resting => true,
        };
        for part in parts {
            if is_over(part.unique) {
                self.deny(part, &denied);
            } else {
                reactor::spawn(Rc::clone(&self).carry_out(part));
            }
        }
    }

    async fn extend_one(&self, incoming: Incoming) {
        let cost = Cost::one(incoming.work.data_bytes());
        let pass = match self.admit(&[incoming.unique], Direction::Write, cost).await {
            Ok(pass) => pass,
            Err(denied) => return self.deny(incoming, &denied),
        };
        let Incoming { unique, kept, work } = incoming;
        let written = self.extend(pass, work).await;
        self.answer(unique, kept, written.map(|bytes| Reply::written(unique, bytes)));
    }

    /// A write that ends past the disk's end as it was seen, or begins there; how many bytes were
    /// written. A disk that keeps its size takes what fits.
    async fn extend(&self, pass: Pass, work: Work) -> Result<u32> {
        let Work::Extend { offset, mut data, durability, may_grow } = work else {
            unreachable!("what it is called for")
        };
        let disk = self.device.disk();
        let _turn = self.device.growth.exclusive(0..1).await;
        let size = disk.size_bytes();
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
        self.write_to_disk(pass, offset, data, durability).await?;
        Ok(bytes)
    }

    /// Gives the disk the least size that has room for so many bytes.
    async fn resize(&self, bytes: u64) -> Result<()> {
        let too_large = Error::from_errno(libc::EFBIG);
        let size = bytes.max(1).checked_next_multiple_of(SECTOR_BYTES).ok_or(too_large)?;
        self.device.has_changed();
        self.device.disk().resize(size).await.map_err(|refused| {
            tracing::debug!(disk = %self.device.disk().name(), size, %refused, "the disk does not take another size");
            match refused {
                ResizeError::ReadOnly => Error::from_errno(libc::EROFS),
                ResizeError::TooLarge { .. } => too_large,
                ResizeError::Failed(error) => error,
                ResizeError::Device { .. }
                | ResizeError::Part { .. }
                | ResizeError::Remote { .. }
                | ResizeError::Unaligned { .. } => {
                    Error::INVALID
                }
            }
        })
    }

    /// Requests that move no data.
    async fn other(&self, unique: u64, operation: Operation) -> Result<Reply> {
        match operation {
            Operation::Sync => {
                let patience = &self.device.patience;
                self.device.disk().flush_for(Some(patience)).await.map(|()| Reply::done(unique))
            }
            Operation::Allocate { offset, length, mode } => {
                self.allocate(unique, offset, length, mode).await.map(|()| Reply::done(unique))
            }
            Operation::Seek { offset, whence } => {
                self.seek(unique, offset, whence).await.map(|place| Reply::place(unique, place))
            }
            Operation::SetAttributes(changes) => {
                self.change_size(unique, &changes).await?;
                self.device.change_owner(&changes);
                Ok(Reply::attributes(unique, &self.device.attributes()))
            }
            // To be truncated.
            Operation::Open { .. } => {
                self.change_size(unique, &Changes { size: Some(0), ..Changes::default() }).await?;
                self.device.opened();
                Ok(Reply::opened(unique, super::negotiate::OPEN_FLAGS))
            }
            _ => Err(Error::from_errno(libc::ENOSYS)),
        }
    }

    /// What is cut off is discarded, and passes the limits as that.
    async fn change_size(&self, unique: u64, changes: &Changes) -> Result<()> {
        let now = self.device.disk().size_bytes();
        let Some(size) = changes.size.filter(|size| *size != now) else { return Ok(()) };
        if self.device.export.read_only {
            return Err(Error::from_errno(libc::EROFS));
        }
        if !self.device.export.growable {
            return Err(Error::NOT_PERMITTED);
        }
        self.pay(unique, now.saturating_sub(size)).await?;
        let _turn = self.device.growth.exclusive(0..1).await;
        match self.device.disk().size_bytes() == size {
            true => Ok(()),
            false => self.resize(size).await,
        }
    }

    /// Waits until so many bytes may be discarded: an operation each [`ZERO_PART`], and one where
    /// there are none.
    async fn pay(&self, unique: u64, mut bytes: u64) -> Result<()> {
        loop {
            self.check_going()?;
            let part = ZERO_PART.min(bytes);
            let admitted = self.admit(&[unique], Direction::Write, Cost::one(part)).await;
            drop(admitted.map_err(|denied| denied.error())?);
            bytes -= part;
            if bytes == 0 {
                return Ok(());
            }
        }
    }

    /// `fallocate(2)`. Blocks are not reserved: an image has its own.
    async fn allocate(&self, unique: u64, offset: u64, length: u64, mode: u32) -> Result<()> {
        const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
        const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE;
        const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE;
        if self.device.export.read_only {
            return Err(Error::from_errno(libc::EROFS));
        }
        let mode = mode as i32;
        let zeroes = match mode & !KEEP_SIZE {
            PUNCH_HOLE if mode & KEEP_SIZE != 0 => Some(true),
            ZERO_RANGE => Some(false),
            0 => None,
            _ => return Err(Error::UNSUPPORTED),
        };
        let end = offset.checked_add(length).ok_or(Error::from_errno(libc::EFBIG))?;
        let mut size = self.device.disk().size_bytes();
        if end > size && mode & KEEP_SIZE == 0 {
            if !self.device.export.growable {
                return Err(Error::NO_SPACE);
            }
            self.pay(unique, 0).await?;
            let _turn = self.device.growth.exclusive(0..1).await;
            size = self.device.disk().size_bytes();
            if end > size {
                self.resize(end).await?;
                if zeroes.is_none() && offset >= size {
                    // What was added is all that was asked for.
                    return Ok(());
                }
                size = self.device.disk().size_bytes();
            }
        }
        match zeroes {
            Some(may_unmap) => self.zero(unique, offset..end.min(size), may_unmap).await,
            None => Err(Error::UNSUPPORTED),
        }
    }

    async fn zero(&self, unique: u64, mut range: std::ops::Range<u64>, may_unmap: bool) -> Result<()> {
        let options = ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
        while range.start < range.end {
            self.check_going()?;
            let part = ZERO_PART.min(range.end - range.start);
            let admitted = self.admit(&[unique], Direction::Write, Cost::one(part)).await;
            let pass = admitted.map_err(|denied| denied.error())?;
            self.device.has_changed();
            self.device.disk().write_zeroes(pass, range.start, part, options).await?;
            range.start += part;
        }
        Ok(())
    }

    /// `lseek(2)` to data or to a hole: a hole is what reads as zeroes without being looked at.
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
            self.check_going()?;
            let left = disk.size_bytes().saturating_sub(at);
            if left == 0 {
                // Behind the last byte is a hole.
                return if for_data || at == offset { Err(NOTHING) } else { Ok(at) };
            }
            // What is read for it are tables.
            let admitted = self.admit(&[unique], Direction::Read, Cost::one(0)).await;
            let pass = admitted.map_err(|denied| denied.error())?;
            let extents = disk.block_status(&pass, at, left.min(SEEK_PART)).await?;
            for extent in &extents {
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

    /// Fails where what takes many steps is not to take the next.
    fn check_going(&self) -> Result<()> {
        match () {
            () if self.device.is_stopping() => Err(Error::SHUTDOWN),
            () if self.device.is_resting() => Err(RESTING),
            () => Ok(()),
        }
    }

    /// A request that has waited for its limits and is not carried out, now or ever.
    fn deny(&self, incoming: Incoming, denied: &Denied) {
        match denied {
            Denied::Resting => self.put_back(incoming),
            denied => self.answer(incoming.unique, incoming.kept, Err(denied.error())),
        }
    }

    /// Sends the reply, or the error.
    fn answer(&self, unique: u64, kept: usize, result: Result<Reply>) {
        match result {
            Ok(reply) => self.reply(&reply, &Segments::default()),
            Err(error) => {
                tracing::debug!(disk = %self.device.disk().name(), %error, "a request failed");
                self.refuse(unique, error.errno());
            }
        }
        self.ended(kept);
    }

    /// Waits for the disk's limits.
    async fn admit(
        &self,
        requests: &[u64],
        direction: Direction,
        cost: Cost,
    ) -> std::result::Result<Pass, Denied> {
        let mut admission = pin!(self.device.disk().admit(direction, cost));
        // Made only for a request that has to wait.
        let mut waiting = None;
        let admitted = poll_fn(|context| {
            if let Poll::Ready(pass) = admission.as_mut().poll(context) {
                return Poll::Ready(Ok(pass));
            }
            let waiting = waiting.get_or_insert_with(|| Waiting::new(self, requests));
            waiting.poll_denied(self, context).map(Err)
        })
        .await;
        admitted.map(|pass| pass.while_awaited(&self.device.patience))
    }
}

/// What may end the wait for limits.
struct Waiting<'a> {
    interruptible: Interruptible<'a>,
    interruption: EventListener,
    stop: EventListener,
}

impl<'a> Waiting<'a> {
    fn new(queue: &'a Queue, requests: &[u64]) -> Self {
        let interruptible = queue.device.interrupts.allow(requests.to_vec());
        let interruption = interruptible.listen();
        Self { interruptible, interruption, stop: queue.device.stop.listen() }
    }

    fn poll_denied(&mut self, queue: &Queue, context: &mut Context<'_>) -> Poll<Denied> {
        loop {
            if queue.device.is_stopping() {
                return Poll::Ready(Denied::Stopped);
            }
            if queue.device.is_resting() {
                return Poll::Ready(Denied::Resting);
            }
            if Pin::new(&mut self.stop).poll(context).is_pending() {
                break;
            }
            self.stop = queue.device.stop.listen();
        }
        let is_interrupted = Pin::new(&mut self.interruption).poll(context).is_ready();
        let requests = self.interruptible.interrupted();
        if is_interrupted || !requests.is_empty() {
            return Poll::Ready(Denied::Interrupted(requests));
        }
        Poll::Pending
    }
}

impl Denied {
    fn error(&self) -> Error {
        match self {
            Self::Interrupted(_) => Error::from_errno(libc::EINTR),
            Self::Stopped => Error::SHUTDOWN,
            Self::Resting => RESTING,
        }
    }
}

fn uniques(parts: &[Incoming]) -> Vec<u64> {
    parts.iter().map(|part| part.unique).collect()
}
