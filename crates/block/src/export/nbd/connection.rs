//! One client's connection, from its first byte to its last reply.
//!
//! ```text
//!            ┌──────────── reader ────────────┐      tasks, one an I/O       ┌─ writer ─┐
//!   stream ─►│ receive many ─► parse ─► merge │─► disk.read ─► disk.write ─► │  outbox  │─► stream
//!            └────────────────────────────────┘                              └──────────┘
//! ```
//!
//! The reader takes in all the requests that one receive brought, joins what may be joined and starts a task for each I/O. An
//! I/O that completes at once never waits in a queue. The writer sends whatever replies are ready in one message.
//!
//! A client can harm itself only: malformed bytes end its connection, a client that reads no replies is not read from, and when
//! it goes, what it had in flight is completed and answered to nobody.

use std::{
    cell::Cell,
    io,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use policy::{
    merge::{Bounds, Candidate, Operation, Planner},
    throttle::Cost,
    time::Duration,
};

use super::{
    errno::Errno,
    inbox::Inbox,
    outbox::{Message, Outbox},
    proto,
    reply::{self, Replier},
    request::{self, Breach, Command, Parsed, Refused, StatusQuery},
    session::{Session, Tag},
    stream::Stream,
};
use crate::{
    buffer::{Buffer, Segments},
    disk::Disk,
    error::{Error, Result},
    reactor,
    storage::{Durability, ZeroOptions},
};

/// How far adjacent requests are joined. Longer I/O gains nothing on today's devices (the kernel splits it again), and makes
/// the first of the requests wait for the last.
const MERGE: Bounds = Bounds { segments: 256, bytes: 256 << 10 };

/// How long a server that stops waits for a client to take the next of its replies; as long as for a handshake.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Why a connection ended before the client took its leave.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error(transparent)]
    Protocol(#[from] Breach),
    #[error(transparent)]
    Stream(#[from] io::Error),
}

/// A request that was accepted, on its way to the disk.
struct Incoming {
    tag: Tag,
    command: Command,
    /// A write's payload.
    data: Option<Buffer>,
}

/// The transmission phase of one client.
pub(super) struct Connection {
    stream: Stream,
    disk: Arc<Disk>,
    session: Session,
    replier: Replier,
    outbox: Outbox,
    /// Set by the server, from another thread, when no more requests are wanted.
    stop: Arc<AtomicBool>,
    /// Replies can no longer be sent: the client is gone.
    broken: Cell<bool>,
    /// No more replies will come.
    finished: Cell<bool>,
}

impl Connection {
    pub(super) fn new(stream: Stream, disk: Arc<Disk>, session: Session, stop: Arc<AtomicBool>) -> Rc<Self> {
        Rc::new(Self {
            stream,
            disk,
            session,
            replier: Replier::new(&session),
            outbox: Outbox::default(),
            stop,
            broken: Cell::new(false),
            finished: Cell::new(false),
        })
    }

    /// Requests and bytes that are accepted and not answered yet.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> (usize, usize) {
        self.outbox.in_flight()
    }

    /// Serves the client until it leaves, breaks the protocol, or `stop` is set and its receiving ended. `inbox` has what arrived
    /// behind the handshake.
    pub(super) async fn serve(self: Rc<Self>, mut inbox: Inbox) -> std::result::Result<(), Broken> {
        let writer = reactor::spawn_joinable(Rc::clone(&self).send_replies());
        let mut intake = Intake::default();
        let outcome = self.receive_requests(&mut inbox, &mut intake).await;
        // However receiving ended, also by `stop` in the middle of a batch: what was taken in is in flight.
        intake.start(&self).await;
        self.drain().await;
        self.finished.set(true);
        self.outbox.news.raise();
        writer.await;
        self.stream.finish().await;
        self.stream.close();
        outcome
    }

    /// Waits until everything in flight is answered, and the answers have left.
    ///
    /// A client that takes none of them may wait for ever, but not keep the server from stopping.
    async fn drain(&self) {
        while !self.outbox.is_idle() {
            let stalled = reactor::timeout(PATIENCE, self.outbox.room.wait()).await.is_err();
            if stalled && self.stop.load(Ordering::Relaxed) && self.outbox.has_unsent() {
                tracing::debug!(disk = %self.disk.name(), "the client takes no replies, and the server stops");
                self.stream.close();
            }
        }
    }

    async fn receive_requests(
        self: &Rc<Self>,
        inbox: &mut Inbox,
        intake: &mut Intake,
    ) -> std::result::Result<(), Broken> {
        while !self.stop.load(Ordering::Relaxed) {
            let parsed = request::parse(inbox.bytes(), &self.session, self.disk.size_bytes());
            if !matches!(parsed, Parsed::Incomplete | Parsed::Close(_)) {
                inbox.consume(self.session.style.request_bytes());
            }
            match parsed {
                Parsed::Incomplete => {
                    intake.start(self).await;
                    if !inbox.fill(&self.stream).await? {
                        break;
                    }
                }
                Parsed::Close(breach) => return Err(breach.into()),
                Parsed::Refused(refused) => {
                    self.make_room(intake, 0).await;
                    self.refuse(&refused);
                    intake.start(self).await;
                    inbox.skip(refused.skip as usize, &self.stream).await?;
                }
                Parsed::Request(request::Request { command: Command::Disconnect, .. }) => break,
                Parsed::Request(request) => {
                    let command = request.command;
                    self.make_room(intake, bytes_in_flight(command)).await;
                    let length = command.payload_bytes() as usize;
                    if !inbox.holds(length) {
                        intake.start(self).await;
                    }
                    let data =
                        if length > 0 { Some(inbox.payload(length, &self.stream).await?) } else { None };
                    self.outbox.begin(bytes_in_flight(command));
                    intake.batch.push(Incoming { tag: request.tag, command, data });
                }
            }
        }
        Ok(())
    }

    /// Waits until one more request may be in flight. What was taken in before must not wait for it.
    async fn make_room(self: &Rc<Self>, intake: &mut Intake, bytes: usize) {
        while !self.outbox.has_room(bytes) {
            if intake.batch.is_empty() {
                self.outbox.room.wait().await;
            } else {
                // This may wait for replies to leave, and so make the room.
                intake.start(self).await;
            }
        }
    }

    async fn wait_while_congested(&self) {
        while self.outbox.is_congested() {
            self.outbox.room.wait().await;
        }
    }

    fn refuse(&self, refused: &Refused) {
        tracing::debug!(disk = %self.disk.name(), errno = ?refused.errno, why = refused.why, "request refused");
        self.outbox.begin(0);
        let mut reply = Vec::new();
        self.replier.error(refused.tag, refused.errno, refused.why, &mut reply);
        self.outbox.push_bytes(&reply, 0);
    }

    async fn send_replies(self: Rc<Self>) {
        loop {
            let Some(message) = self.outbox.take() else {
                if self.finished.get() {
                    return;
                }
                self.outbox.news.wait().await;
                continue;
            };
            if self.is_behind(&message) {
                reactor::linger();
            }
            let length = message.segments.len();
            if !self.broken.get()
                && let Err(error) = self.stream.send(message.segments).await
            {
                tracing::debug!(disk = %self.disk.name(), %error, "the client takes no more replies");
                self.broken.set(true);
                self.stop.store(true, Ordering::Relaxed);
                self.stream.close();
            }
            self.outbox.sent(message.requests, message.bytes, length);
        }
    }

    /// Whether the client has so many replies to read that it will not run dry while requests gather.
    ///
    /// Such a client gains nothing from being answered one request at a time, and everything from being answered cheaply:
    /// at depth 32 from memory, lingering raised 104k IOPS to 159k at 57 % of the CPU time a request. At depth 4 it would halve them, hence the
    /// number: eight replies like these, and what the kernel adds to each message.
    fn is_behind(&self, message: &Message) -> bool {
        const REPLIES: usize = 8;
        const OVERHEAD: usize = 256;
        let reply = message.segments.len() / message.requests.max(1);
        self.stream.unread_bytes() > REPLIES * (reply + OVERHEAD)
    }

    async fn run(self: Rc<Self>, incoming: Incoming) {
        let Incoming { tag, command, data } = incoming;
        match command {
            Command::Read { offset, length, .. } => self.read(offset, length, tag).await,
            Command::Write { offset, fua, .. } => {
                let data = data.expect("parsed with its payload");
                let (bytes, cost) = (data.len(), Cost::one(data.len() as u64));
                let result = self.disk.write(offset, data.into(), durability(fua), cost).await;
                self.answer(tag, result, bytes);
            }
            Command::Flush => self.answer(tag, self.disk.flush().await, 0),
            Command::Trim { offset, length, fua } => {
                self.answer(tag, self.disk.discard(offset, length, durability(fua)).await, 0);
            }
            Command::Cache { offset, length } => {
                self.disk.will_need(offset, length).await;
                self.answer(tag, Ok(()), 0);
            }
            Command::WriteZeroes { offset, length, fua, no_hole, fast } => {
                let options =
                    ZeroOptions { may_unmap: !no_hole, only_if_fast: fast, durability: durability(fua) };
                let result = self.disk.write_zeroes(offset, length, options).await;
                self.answer_zeroes(tag, result, fast);
            }
            Command::BlockStatus(query) => self.block_status(tag, query, 0).await,
            Command::BlockStatusPayload { one, .. } => {
                let data = data.expect("parsed with its payload");
                let (bytes, size_bytes) = (data.len(), self.disk.size_bytes());
                match request::status_payload(&data, tag, one, &self.session, size_bytes) {
                    Ok(Command::BlockStatus(query)) => self.block_status(tag, query, bytes).await,
                    Ok(_) => self.answer(tag, Ok(()), bytes),
                    Err(refused) => self.fail(tag, refused.errno, refused.why, bytes),
                }
            }
            Command::Nothing => self.outbox.push_header(&self.replier.success(tag), 0),
            Command::Disconnect => unreachable!("the reader keeps it"),
        }
    }

    async fn read(&self, offset: u64, length: u32, tag: Tag) {
        let bytes = length as usize;
        match self.disk.read(offset, Buffer::new(bytes), Cost::one(u64::from(length))).await {
            Ok(data) => {
                self.outbox.push_data(&self.replier.data(tag, offset, length, true), data, bytes);
            }
            Err(error) => self.fail(tag, errno(error), "reading failed", bytes),
        }
    }

    /// Reads that follow each other on the disk: one I/O, its buffer divided among them.
    async fn read_merged(self: Rc<Self>, parts: Vec<Incoming>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.candidate().length).collect();
        let cost = Cost::merged(&lengths);
        let total = cost.bytes() as usize;
        let result = self.disk.read(parts[0].candidate().offset, Buffer::new(total), cost).await;
        let mut rest = match result {
            Ok(data) => data,
            Err(error) => return self.retry_apart(parts, error).await,
        };
        for part in parts {
            let Candidate { offset, length, .. } = part.candidate();
            let tail = rest.split_off(length as usize);
            // A merge is at most `MERGE.bytes` long, so lengths fit.
            let header = self.replier.data(part.tag, offset, length as u32, true);
            self.outbox.push_data(&header, std::mem::replace(&mut rest, tail), length as usize);
        }
    }

    /// Which of several merged reads failed is not known, so each is tried alone: a bad sector is one client request's trouble.
    async fn retry_apart(&self, parts: Vec<Incoming>, error: Error) {
        tracing::debug!(disk = %self.disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for part in parts {
            let Candidate { offset, length, .. } = part.candidate();
            let result = self.disk.retry_read(offset, Buffer::new(length as usize)).await;
            match result {
                Ok(data) => {
                    let header = self.replier.data(part.tag, offset, length as u32, true);
                    self.outbox.push_data(&header, data, length as usize);
                }
                Err(error) => self.fail(part.tag, errno(error), "reading failed", length as usize),
            }
        }
    }

    /// Writes that follow each other on the disk: one I/O that gathers their payloads.
    async fn write_merged(self: Rc<Self>, parts: Vec<Incoming>) {
        let Command::Write { offset, fua, .. } = parts[0].command else {
            unreachable!("planned as writes");
        };
        let mut data = Segments::default();
        let mut answers = Vec::with_capacity(parts.len());
        for part in parts {
            let payload = part.data.expect("parsed with its payload");
            answers.push((part.tag, payload.len()));
            data.push(payload);
        }
        let lengths: Vec<u64> = answers.iter().map(|&(_, length)| length as u64).collect();
        let result = self.disk.write(offset, data, durability(fua), Cost::merged(&lengths)).await;
        for (tag, bytes) in answers {
            self.answer(tag, result, bytes);
        }
    }

    async fn block_status(&self, tag: Tag, query: StatusQuery, bytes: usize) {
        let extents = match self.disk.block_status(query.offset, query.length).await {
            Ok(extents) => extents,
            Err(error) => return self.fail(tag, errno(error), "the status is not to be had", bytes),
        };
        let extents: Vec<reply::Extent> = extents
            .iter()
            .map(|extent| {
                let hole = if extent.hole { proto::state::HOLE } else { 0 };
                let zero = if extent.zero { proto::state::ZERO } else { 0 };
                reply::Extent { length: extent.length, flags: hole | zero }
            })
            .collect();
        let mut reply = Vec::new();
        let contexts = query.contexts.len();
        for (index, context) in query.contexts.iter().enumerate() {
            let last = index + 1 == contexts;
            self.replier.block_status(tag, &query, context, &extents, last, &mut reply);
        }
        self.outbox.push_bytes(&reply, bytes);
    }

    /// Success, or the error; `bytes` were counted in with the request.
    fn answer(&self, tag: Tag, result: Result<()>, bytes: usize) {
        match result {
            Ok(()) => self.outbox.push_header(&self.replier.success(tag), bytes),
            Err(error) => self.fail(tag, errno(error), "the disk refused it", bytes),
        }
    }

    fn answer_zeroes(&self, tag: Tag, result: Result<()>, fast: bool) {
        match result {
            Err(error) if fast => {
                self.fail(tag, Errno::from_linux_fast_zero(error.errno()), "zeroing failed", 0);
            }
            result => self.answer(tag, result, 0),
        }
    }

    fn fail(&self, tag: Tag, errno: Errno, what: &str, bytes: usize) {
        tracing::debug!(disk = %self.disk.name(), ?errno, what, offset = tag.offset, "request failed");
        let mut reply = Vec::new();
        self.replier.error(tag, errno, what, &mut reply);
        self.outbox.push_bytes(&reply, bytes);
    }
}

impl Incoming {
    fn candidate(&self) -> Candidate {
        match self.command {
            Command::Read { offset, length, .. } => {
                Candidate { operation: Operation::Read, offset, length: u64::from(length), key: 0 }
            }
            Command::Write { offset, length, fua } => Candidate {
                operation: Operation::Write,
                offset,
                length: u64::from(length),
                key: u32::from(fua),
            },
            _ => Candidate { operation: Operation::Barrier, offset: 0, length: 0, key: 0 },
        }
    }
}

/// Requests taken in together, and the memory to plan their merging.
#[derive(Default)]
struct Intake {
    batch: Vec<Incoming>,
    taken: Vec<Option<Incoming>>,
    candidates: Vec<Candidate>,
    planner: Planner,
}

impl Intake {
    /// Starts everything that was taken in.
    async fn start(&mut self, connection: &Rc<Connection>) {
        if self.batch.len() < 2 {
            if let Some(only) = self.batch.pop() {
                connection.wait_while_congested().await;
                reactor::spawn(Rc::clone(connection).run(only));
            }
            return;
        }
        self.candidates.clear();
        self.candidates.extend(self.batch.iter().map(Incoming::candidate));
        self.taken.extend(self.batch.drain(..).map(Some));
        let plan = self.planner.plan(&self.candidates, MERGE);
        for group in plan.groups() {
            connection.wait_while_congested().await;
            let mut parts = group.iter().map(|&index| self.taken[index].take().expect("planned once"));
            if let [_] = group {
                let only = parts.next().expect("a group of one");
                reactor::spawn(Rc::clone(connection).run(only));
                continue;
            }
            let parts: Vec<Incoming> = parts.collect();
            match parts[0].command {
                Command::Read { .. } => reactor::spawn(Rc::clone(connection).read_merged(parts)),
                _ => reactor::spawn(Rc::clone(connection).write_merged(parts)),
            }
        }
        self.taken.clear();
    }
}

/// Memory a request needs while it is in flight.
fn bytes_in_flight(command: Command) -> usize {
    match command {
        Command::Read { length, .. } => length as usize,
        command => command.payload_bytes() as usize,
    }
}

fn durability(fua: bool) -> Durability {
    if fua { Durability::Synchronous } else { Durability::Cached }
}

fn errno(error: Error) -> Errno {
    Errno::from_linux(error.errno())
}
