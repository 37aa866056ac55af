//! Execution of a client's commands. Each waits for admission, does its I/O and queues exactly one
//! reply, or is counted out because the client has disconnected.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use policy::{merge::MergeCandidate, request::Direction, throttle::RequestCost};

use super::{
    connection::NbdConnection,
    context::MetaContext,
    errno::Errno,
    incoming::NbdIncomingRequest,
    proto, reply,
    request::{self, NbdCommand, StatusQuery},
    session::RequestTag,
};
use crate::batch::Mergeable as _;
use block::disk::AdmissionPermit;
use reactor::{
    buffer::{Segment, Segments},
    error::{Error, Result},
};
use storage::{Durability, Extent, ZeroOptions};

/// Largest number of segments of a read for which holes are sent as chunks. With more (clusters of
/// 512 bytes), chunks would cost more than they save.
const MAX_CHUNKS: usize = 1024;

impl NbdConnection {
    pub(super) async fn run(self: Rc<Self>, incoming: NbdIncomingRequest) {
        let NbdIncomingRequest { tag, command, data } = incoming;
        match command {
            NbdCommand::Read { offset, length, dont_fragment } => {
                self.read(offset, length, dont_fragment, tag).await;
            }
            NbdCommand::Write { offset, fua, .. } => {
                // The reader starts a WRITE only after its payload has arrived.
                let data = data.expect("parsed with its payload");
                let length = data.len();
                self.write(offset, data.into(), fua, &[(tag, length)]).await;
            }
            NbdCommand::Flush => self.answer(tag, self.disk.flush_for(Some(&self.cancel_token)).await, 0),
            NbdCommand::Trim { offset, length, fua } => {
                let Some(permit) = self.admit(Direction::Write, RequestCost::one(length), 1, 0).await else {
                    return self.return_unstarted(tag, command, None);
                };
                self.answer(tag, self.disk.discard(permit, offset, length, durability(fua)).await, 0);
            }
            NbdCommand::Cache { offset, length } => self.cache(offset, length, tag).await,
            NbdCommand::WriteZeroes { offset, length, fua, no_hole, fast } => {
                let Some(permit) = self.admit(Direction::Write, RequestCost::one(length), 1, 0).await else {
                    return self.return_unstarted(tag, command, None);
                };
                let options =
                    ZeroOptions { may_unmap: !no_hole, only_if_fast: fast, durability: durability(fua) };
                let result = self.disk.write_zeroes(permit, offset, length, options).await;
                self.answer_zeroes(tag, result, fast);
            }
            NbdCommand::BlockStatus(query) => self.block_status(tag, query, 0).await,
            NbdCommand::BlockStatusPayload { one, .. } => {
                let data = data.expect("parsed with its payload");
                let (bytes, size_bytes) = (data.len(), self.disk.size_bytes());
                match request::status_payload(&data, tag, one, &self.session, size_bytes) {
                    Ok(NbdCommand::BlockStatus(query)) => self.block_status(tag, query, bytes).await,
                    Ok(_) => self.answer(tag, Ok(()), bytes),
                    Err(refused) => self.fail(tag, refused.errno, refused.why, bytes),
                }
            }
            NbdCommand::Empty => self.outbox.push_header(&self.replier.success(tag), 0),
            // `receive_until_rest` ends at DISC, so no task is started for it.
            NbdCommand::Disconnect => unreachable!("the reader keeps it"),
        }
    }

    async fn read(&self, offset: u64, length: u32, dont_fragment: bool, tag: RequestTag) {
        let bytes = length as usize;
        let cost = RequestCost::one(u64::from(length));
        let Some(permit) = self.admit(Direction::Read, cost, 1, bytes).await else {
            return self.return_unstarted(tag, NbdCommand::Read { offset, length, dont_fragment }, None);
        };
        match self.disk.read(permit, offset, bytes).await {
            Ok(data) => self.answer_read(tag, offset, data, dont_fragment),
            Err(error) => self.fail(tag, errno(error), "reading failed", bytes),
        }
    }

    /// Queues the data of a read. Segments known to be zero are sent as holes, unless the client
    /// set DF or did not negotiate chunks. The data is not scanned and no metadata is looked up:
    /// zeroes that the image does not report are sent as data.
    fn answer_read(&self, tag: RequestTag, offset: u64, mut data: Segments, dont_fragment: bool) {
        let bytes = data.len();
        let mut at = offset;
        let parts = data.as_slice();
        if !dont_fragment
            && parts.len() <= MAX_CHUNKS
            && self.session.style.has_chunks()
            && parts.iter().any(Segment::is_known_zero)
        {
            loop {
                let (is_zero, length) = first_run(data.as_slice());
                let last = length == data.len();
                let rest = data.split_off(length);
                // Cannot truncate: a read's length has 32 bits.
                let hole = self.replier.hole(tag, at, length as u32, last).filter(|_| is_zero);
                match hole {
                    Some(hole) if last => return self.outbox.push_header(&hole, bytes),
                    Some(hole) => self.outbox.push_part(&hole, Segments::default()),
                    None if last => break,
                    None => self.outbox.push_part(&self.replier.data(tag, at, length as u32, false), data),
                }
                at += length as u64;
                data = rest;
            }
        }
        let header = self.replier.data(tag, at, data.len() as u32, true);
        self.outbox.push_data(&header, data, bytes);
    }

    /// Reads the range into the page cache in parts of 1 MiB. Each part is admitted like a read, so
    /// requests behind a hint for a whole disk do not wait for all of it.
    async fn cache(&self, offset: u64, length: u64, tag: RequestTag) {
        const PART: u64 = 1 << 20;
        // A hint may be ignored; without a page cache to fill it succeeds at once.
        let mut rest = if self.disk.can_read_ahead() { offset..offset + length } else { 0..0 };
        while !rest.is_empty() && !self.abandoned.get() {
            let part = PART.min(rest.end - rest.start);
            let Some(permit) = self.admit(Direction::Read, RequestCost::one(part), 1, 0).await else {
                return self.return_unstarted(tag, NbdCommand::Cache { offset, length }, None);
            };
            self.disk.will_need(permit, rest.start, part).await;
            rest.start += part;
        }
        self.answer(tag, Ok(()), 0);
    }

    /// Executes adjacent reads as one I/O and divides its data among them.
    pub(super) async fn read_merged(self: Rc<Self>, parts: Vec<NbdIncomingRequest>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.candidate().length).collect();
        let cost = RequestCost::merged(&lengths);
        let total = cost.bytes() as usize;
        let Some(permit) = self.admit(Direction::Read, cost, parts.len(), total).await else {
            return parts.into_iter().for_each(|part| self.return_unstarted(part.tag, part.command, None));
        };
        let result = self.disk.read(permit, parts[0].candidate().offset, total).await;
        let mut rest = match result {
            Ok(data) => data,
            Err(error) => return self.retry_separately(parts, error).await,
        };
        for part in parts {
            let MergeCandidate { offset, length, .. } = part.candidate();
            let tail = rest.split_off(length as usize);
            self.answer_read(part.tag, offset, std::mem::replace(&mut rest, tail), wants_unfragmented(&part));
        }
    }

    /// Retries each read on its own, because a failed merged read does not show which part failed.
    async fn retry_separately(&self, parts: Vec<NbdIncomingRequest>, error: Error) {
        tracing::debug!(disk = %self.disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for part in parts {
            let MergeCandidate { offset, length, .. } = part.candidate();
            let admitted = self.admit(Direction::Read, RequestCost::one(length), 1, length as usize).await;
            let Some(permit) = admitted else {
                self.return_unstarted(part.tag, part.command, None);
                continue;
            };
            match self.disk.retry_read(permit, offset, length as usize).await {
                Ok(data) => self.answer_read(part.tag, offset, data, wants_unfragmented(&part)),
                Err(error) => self.fail(part.tag, errno(error), "reading failed", length as usize),
            }
        }
    }

    /// Executes adjacent writes as one gathered I/O.
    pub(super) async fn write_merged(self: Rc<Self>, parts: Vec<NbdIncomingRequest>) {
        let NbdCommand::Write { offset, fua, .. } = parts[0].command else {
            unreachable!("planned as writes");
        };
        let mut data = Segments::default();
        let mut replies = Vec::with_capacity(parts.len());
        for part in parts {
            let payload = part.data.expect("parsed with its payload");
            replies.push((part.tag, payload.len()));
            data.push(payload);
        }
        self.write(offset, data, fua, &replies).await;
    }

    /// Writes `data` for the requests in `replies`, each with the length of its payload. All of
    /// them fail together, because a failed write leaves its range undefined anyway.
    async fn write(&self, mut offset: u64, mut data: Segments, fua: bool, replies: &[(RequestTag, usize)]) {
        let cost = match replies {
            [(_, length)] => RequestCost::one(*length as u64),
            _ => RequestCost::merged(&replies.iter().map(|&(_, length)| length as u64).collect::<Vec<_>>()),
        };
        let bytes = data.len();
        let Some(permit) = self.admit(Direction::Write, cost, replies.len(), bytes).await else {
            for &(tag, bytes) in replies {
                let tail = data.split_off(bytes);
                // Cannot truncate: the length was parsed from 32 bits.
                let length = bytes as u32;
                let payload = std::mem::replace(&mut data, tail).joined();
                self.return_unstarted(tag, NbdCommand::Write { offset, length, fua }, Some(payload));
                offset += bytes as u64;
            }
            return;
        };
        let result = self.disk.write(permit, offset, data, durability(fua)).await;
        for &(tag, length) in replies {
            self.answer(tag, result, length);
        }
    }

    async fn block_status(&self, tag: RequestTag, query: StatusQuery, bytes: usize) {
        // An operation without bytes: metadata reads count against IOPS limits, or status queries
        // would be a way around them.
        let Some(permit) = self.admit(Direction::Read, RequestCost::one(0), 1, bytes).await else {
            return self.return_unstarted(tag, NbdCommand::BlockStatus(query), None);
        };
        let mut reply = Vec::new();
        let contexts = query.contexts.len();
        for (index, context) in query.contexts.iter().enumerate() {
            let last = index + 1 == contexts;
            let extents = match self.status_of(&permit, context, &query).await {
                Ok(extents) => extents,
                // Chunks of other contexts may already precede the error chunk.
                Err(error) => {
                    return self.fail_after(
                        tag,
                        errno(error),
                        "reading the block status failed",
                        reply,
                        bytes,
                    );
                }
            };
            self.replier.block_status(tag, &query, context, &extents, last, &mut reply);
        }
        self.outbox.push_bytes(&reply, bytes);
    }

    /// Extents of the queried range in one context.
    async fn status_of(
        &self,
        permit: &AdmissionPermit,
        context: MetaContext,
        query: &StatusQuery,
    ) -> Result<Vec<reply::NbdExtent>> {
        match context {
            MetaContext::BaseAllocation => {
                let extents = self.disk.block_status(permit, query.offset, query.length).await?;
                let flags = |extent: &Extent| {
                    let hole = if extent.hole { proto::state::HOLE } else { 0 };
                    let zero = if extent.zero { proto::state::ZERO } else { 0 };
                    hole | zero
                };
                Ok(extents
                    .iter()
                    .map(|extent| reply::NbdExtent { length: extent.length, flags: flags(extent) })
                    .collect())
            }
            MetaContext::AllocationDepth => {
                let runs = self.disk.allocation_depth(permit, query.offset, query.length).await?;
                Ok(runs.iter().map(|run| reply::NbdExtent { length: run.length, flags: run.depth }).collect())
            }
            MetaContext::DirtyBitmap(index) => {
                // Only contexts of the export can have been selected.
                let bitmap = self.bitmaps.get(usize::from(index)).ok_or(Error::INVALID)?;
                let runs = bitmap.marked(query.offset, query.length).await?;
                Ok(runs
                    .iter()
                    .map(|run| reply::NbdExtent { length: run.length, flags: u32::from(run.dirty) })
                    .collect())
            }
        }
    }

    /// Queues success or the error; `bytes` were counted in with the request.
    fn answer(&self, tag: RequestTag, result: Result<()>, bytes: usize) {
        match result {
            Ok(()) => self.outbox.push_header(&self.replier.success(tag), bytes),
            Err(error) => self.fail(tag, errno(error), "the disk failed the request", bytes),
        }
    }

    fn answer_zeroes(&self, tag: RequestTag, result: Result<()>, fast: bool) {
        match result {
            Err(error) if fast => {
                self.fail(tag, Errno::from_linux_fast_zero(error.errno()), "zeroing failed", 0);
            }
            result => self.answer(tag, result, 0),
        }
    }

    fn fail(&self, tag: RequestTag, errno: Errno, failure: &str, bytes: usize) {
        self.fail_after(tag, errno, failure, Vec::new(), bytes);
    }

    /// [`fail`](Self::fail) behind chunks of the same reply.
    fn fail_after(&self, tag: RequestTag, errno: Errno, failure: &str, mut reply: Vec<u8>, bytes: usize) {
        tracing::debug!(disk = %self.disk.name(), ?errno, failure, offset = tag.offset, "request failed");
        self.replier.error(tag, errno, failure, &mut reply);
        self.outbox.push_bytes(&reply, bytes);
    }

    /// Waits for admission by the disk's limits. `None` if the client disconnected meanwhile,
    /// because its requests must not use tokens that other members of its group could use; or if
    /// the connection quiesces, and then the caller puts the request back.
    async fn admit(
        &self,
        direction: Direction,
        cost: RequestCost,
        requests: usize,
        bytes: usize,
    ) -> Option<AdmissionPermit> {
        let mut admission = pin!(self.disk.admit(direction, cost));
        // Created only if the request has to wait: most are admitted at the first poll.
        let mut abandonment = None;
        let permit = poll_fn(|context| {
            if let Poll::Ready(permit) = admission.as_mut().poll(context) {
                return Poll::Ready(Some(permit));
            }
            let abandonment = abandonment.get_or_insert_with(|| self.abandonment.listen());
            let is_abandoned = Pin::new(abandonment).poll(context).is_ready()
                || self.abandoned.get()
                || self.quiescing.get();
            if is_abandoned { Poll::Ready(None) } else { Poll::Pending }
        })
        .await;
        if permit.is_none() {
            self.count_out(requests, bytes, 0);
        }
        permit.map(|permit| permit.with_cancel_token(&self.cancel_token))
    }
}

/// Length of the first run of segments that are all known to be zero, or all not.
fn first_run(parts: &[Segment]) -> (bool, usize) {
    let is_zero = parts.iter().find(|part| !part.is_empty()).is_some_and(Segment::is_known_zero);
    let alike = |part: &&Segment| part.is_empty() || part.is_known_zero() == is_zero;
    (is_zero, parts.iter().take_while(alike).map(Segment::len).sum())
}

fn wants_unfragmented(read: &NbdIncomingRequest) -> bool {
    matches!(read.command, NbdCommand::Read { dont_fragment: true, .. })
}

fn durability(fua: bool) -> Durability {
    if fua { Durability::Synchronous } else { Durability::Cached }
}

fn errno(error: Error) -> Errno {
    Errno::from_linux(error.errno())
}
