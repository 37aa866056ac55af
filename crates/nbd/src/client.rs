//! An NBD client, for exports that are used as storage and for measurements of servers.
//!
//! ```text
//!   read, write, flush ──► outgoing ──► sender ───► stream
//!          ▲                                          │
//!          └─────── woken by its cookie ◄── receiver ◄┘
//! ```
//!
//! One connection, with as many requests in flight as there are callers. Requests that are
//! submitted during a send are sent together by the next one. Replies arrive in any order, simple
//! or structured, and are matched to their request by cookie.
//!
//! The server is not trusted. Data longer than requested is rejected before memory is allocated for
//! it. An unknown cookie, or any other violation of the protocol, ends the connection, and all
//! requests in flight fail. Requests have no timeout, since a disk may be slow: a caller with a
//! deadline drops the request, or the client.
//!
//! Never reconnects by itself, and never negotiates extended headers.

mod connect;
mod handshake;
mod list;
mod outgoing;
mod pieces;
mod reply;

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    rc::Rc,
    task::{Poll, Waker},
};

use async_channel::Receiver;
use policy::time::Duration;
use slab::Slab;

pub use self::{
    connect::{
        EstablishedConnection, NbdAddress, NbdEndpoint, connect, dial_any, resolve, shake_hands, with_timeout,
    },
    handshake::{HandshakeOptions, NbdConnectError, NbdExportInfo},
    list::{ListedExport, list},
};
use self::{
    outgoing::Outgoing,
    pieces::ReceivedPieces,
    reply::{ChunkLimits, ClientReplyHeader, EXTENT_BYTES, ReplyChunk},
};
use super::{
    proto::{self, cmd, cmd_flag},
    receive_buffer::ReceiveBuffer,
    stream::NbdStream,
    wire::WireFields,
};
use reactor::{
    JoinHandle, Signal,
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    spawn_joinable, timeout,
};

/// Error of requests after the connection is lost; [`NbdClient::fault`] returns the reason.
pub const CONNECTION_LOST: Error = Error::from_errno(libc::ENOTCONN);

/// Maximum number of error chunks in one reply. A server may send one for each part of a large
/// request.
const MAX_ERRORS: u32 = 1024;

/// Maximum number of extents kept from one reply; a server may send many more.
const MAX_EXTENTS: usize = 1024;

const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection to an export, on the reactor that it was created on; dropping it ends the
/// connection.
#[derive(Debug)]
pub struct NbdClient {
    connection: OpenConnection,
    sender: JoinHandle<()>,
    /// Yields the receive buffer when the receiving task ends. The task is detached: it ends with
    /// its reactor, which ends the connection.
    returned_buffer: Receiver<ReceiveBuffer>,
}

/// Closes the connection when dropped.
#[derive(Debug)]
struct OpenConnection(Option<Rc<ClientConnection>>);

impl OpenConnection {
    /// Returns the connection without closing it.
    fn into_inner(mut self) -> Rc<ClientConnection> {
        self.0.take().expect("the connection is taken only here")
    }
}

impl std::ops::Deref for OpenConnection {
    type Target = Rc<ClientConnection>;

    fn deref(&self) -> &Rc<ClientConnection> {
        self.0.as_ref().expect("the connection is present until into_inner")
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.stream.close();
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum ConnectionFault {
    #[error("the server has closed the connection")]
    Closed,
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
    #[error("the server violated the protocol: {0}")]
    ProtocolViolation(&'static str),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the thread that served the connection has ended")]
    Ended,
}

type FaultResult<T> = std::result::Result<T, ConnectionFault>;

#[derive(Debug)]
struct ClientConnection {
    stream: NbdStream,
    export: NbdExportInfo,
    in_flight: RefCell<Slab<PendingRequest>>,
    /// Distinguishes successive requests in one slot of the slab.
    sequence: Cell<u32>,
    outgoing: RefCell<Outgoing>,
    send_signal: Signal,
    is_disconnecting: Cell<bool>,
    /// True while [`NbdClient::into_established`] stops both tasks, so that another thread can
    /// continue the connection.
    is_stopping: Cell<bool>,
    fault: RefCell<Option<ConnectionFault>>,
    /// Waker of the task that waits for the end of the connection.
    close_waker: RefCell<Option<Waker>>,
}

#[derive(Debug)]
struct PendingRequest {
    cookie: u64,
    expects: ExpectedReply,
    error: Option<Error>,
    errors: u32,
    is_answered: bool,
    /// True if the caller was cancelled; the reply is still expected.
    is_cancelled: bool,
    waker: Option<Waker>,
}

/// Expected content of a reply, and the part received so far.
#[derive(Debug)]
enum ExpectedReply {
    Nothing,
    Data(PendingRead),
    Extents { asked: u32, found: Vec<RawExtent> },
}

/// A range with one allocation status, as reported by the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawExtent {
    /// Length in bytes, never 0; the last extent of a reply may extend beyond the requested range.
    pub length: u32,
    /// Flags of the context `base:allocation` (`proto::state`).
    pub flags: u32,
}

#[derive(Debug)]
struct PendingRead {
    offset: u64,
    length: usize,
    pieces: ReceivedPieces,
    data: Option<IoBuffer>,
}

impl NbdClient {
    /// Starts the client's tasks on this thread, after the handshake.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn start(established: EstablishedConnection) -> Self {
        let (stream, export, mut receive_buffer) = established.into_parts();
        receive_buffer.adapt_to_replies();
        let connection = Rc::new(ClientConnection {
            stream,
            export,
            in_flight: RefCell::default(),
            sequence: Cell::new(0),
            outgoing: RefCell::default(),
            send_signal: Signal::default(),
            is_disconnecting: Cell::new(false),
            is_stopping: Cell::new(false),
            fault: RefCell::default(),
            close_waker: RefCell::default(),
        });
        // `disconnect` and `into_established` join the sender; the receiver is detached.
        let sender = spawn_joinable(Rc::clone(&connection).send());
        let (buffer_sender, buffer_receiver) = async_channel::bounded(1);
        let receiving = Rc::clone(&connection);
        spawn_joinable(async move {
            let receive_buffer = receiving.receive(receive_buffer).await;
            // Fails only if the client was dropped: then nothing needs the buffer.
            let _ = buffer_sender.try_send(receive_buffer);
        })
        .detach();
        Self { connection: OpenConnection(Some(connection)), sender, returned_buffer: buffer_receiver }
    }

    /// Properties of the export.
    pub fn export(&self) -> &NbdExportInfo {
        &self.connection.export
    }

    /// Reason why the connection is lost; `None` while it is open.
    pub fn fault(&self) -> Option<String> {
        self.connection.fault.borrow().as_ref().map(ToString::to_string)
    }

    /// True if no request waits for its reply.
    pub fn is_idle(&self) -> bool {
        self.connection.in_flight.borrow().is_empty()
    }

    /// Waits until the connection is lost. Only one task at a time may wait.
    pub async fn closed(&self) {
        poll_fn(|context| {
            if self.connection.fault.borrow().is_some() {
                return Poll::Ready(());
            }
            *self.connection.close_waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Reads `length` bytes at `offset`.
    ///
    /// # Errors
    /// The server's error, or [`CONNECTION_LOST`]; [`Error::INVALID`] for more than
    /// [`NbdExportInfo::maximum_payload`].
    pub async fn read(&self, offset: u64, length: usize) -> Result<IoBuffer> {
        let read = PendingRead { offset, length, pieces: ReceivedPieces::default(), data: None };
        let fields = RequestFields { command: cmd::READ, flags: 0, offset, length };
        match self.connection.request(fields, ExpectedReply::Data(read), None).await? {
            ExpectedReply::Data(PendingRead { data: Some(data), .. }) => Ok(data),
            _ => Err(Error::IO),
        }
    }

    /// Writes `data` at `offset`. With `fua` the data is durable when the call returns,
    /// otherwise after a flush. `fua` requires [`NbdExportInfo::can_fua`].
    ///
    /// # Errors
    /// As for reads; [`Error::NOT_PERMITTED`], without a request, if the export is read-only.
    pub async fn write(&self, offset: u64, data: Segments, fua: bool) -> Result<()> {
        let flags = if fua { cmd_flag::FUA } else { 0 };
        self.request_write(
            RequestFields { command: cmd::WRITE, flags, offset, length: data.len() },
            Some(data),
        )
        .await
    }

    /// Zeroes a range. `flags` are those of the command (`proto::cmd_flag`). Requires
    /// [`NbdExportInfo::can_zero`].
    ///
    /// # Errors
    /// As for writes.
    pub async fn write_zeroes(&self, offset: u64, length: u32, flags: u16) -> Result<()> {
        self.request_write(
            RequestFields { command: cmd::WRITE_ZEROES, flags, offset, length: length as usize },
            None,
        )
        .await
    }

    /// Discards a range. Requires [`NbdExportInfo::can_trim`].
    ///
    /// # Errors
    /// As for writes.
    pub async fn trim(&self, offset: u64, length: u32) -> Result<()> {
        self.request_write(
            RequestFields { command: cmd::TRIM, flags: 0, offset, length: length as usize },
            None,
        )
        .await
    }

    /// Returns the allocation status of a range: one or more consecutive extents from `offset`,
    /// which may end before the range does. Requires [`NbdExportInfo::has_allocation`].
    ///
    /// # Errors
    /// The server's error, or [`CONNECTION_LOST`].
    pub async fn extents(&self, offset: u64, length: u32) -> Result<Vec<RawExtent>> {
        let fields = RequestFields { command: cmd::BLOCK_STATUS, flags: 0, offset, length: length as usize };
        let expects = ExpectedReply::Extents { asked: length, found: Vec::new() };
        match self.connection.request(fields, expects, None).await? {
            ExpectedReply::Extents { found, .. } => Ok(found),
            _ => Err(Error::IO),
        }
    }

    async fn request_write(&self, fields: RequestFields, payload: Option<Segments>) -> Result<()> {
        if self.export().is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        self.connection.request(fields, ExpectedReply::Nothing, payload).await.map(drop)
    }

    /// Makes acknowledged writes durable. Does nothing if the server does not support flushes.
    ///
    /// # Errors
    /// The server's error, or [`CONNECTION_LOST`].
    pub async fn flush(&self) -> Result<()> {
        if !self.export().can_flush() {
            return Ok(());
        }
        let fields = RequestFields { command: cmd::FLUSH, flags: 0, offset: 0, length: 0 };
        self.connection.request(fields, ExpectedReply::Nothing, None).await.map(drop)
    }

    /// Disconnects. Waits until the disconnect request is sent, for [`DISCONNECT_TIMEOUT`] at most,
    /// but not for requests in flight.
    pub async fn disconnect(self) {
        let Self { connection, sender, returned_buffer: _left } = self;
        // DISC has no reply ("Request types"), so only the sending is awaited.
        connection.outgoing.borrow_mut().push(cmd::DISC, 0, 0, 0, 0, None);
        connection.is_disconnecting.set(true);
        connection.send_signal.raise();
        let _ = timeout(DISCONNECT_TIMEOUT, sender).await;
    }

    /// Stops both tasks and returns the open connection, so that another thread can continue it.
    /// The caller ensures that no request is in flight or made meanwhile; `None` if the connection
    /// is lost.
    pub async fn into_established(self) -> Option<EstablishedConnection> {
        let Self { connection, sender, returned_buffer: buffer_receiver } = self;
        connection.is_stopping.set(true);
        connection.send_signal.raise();
        // The sender ends when everything queued is sent.
        sender.await;
        // The receiver waits for a reply that will not arrive: interrupt it to get its receive
        // buffer.
        connection.stream.interrupt();
        let mut receive_buffer = buffer_receiver.recv().await.ok()?;
        if connection.fault.borrow().is_some() {
            return None;
        }
        let (unfinished, behind, skip) = receive_buffer.take_rest();
        // Both tasks have ended, so this is the last reference.
        let ClientConnection { stream, export: about, .. } = Rc::try_unwrap(connection.into_inner()).ok()?;
        // Without requests in flight, the server must not send anything: a partial payload would
        // violate the protocol. Complete bytes are parsed, and rejected, after the transfer.
        (unfinished.is_empty() && skip == 0).then_some(EstablishedConnection {
            stream,
            export: about,
            received: behind,
        })
    }
}

/// Fields of a request's header.
struct RequestFields {
    command: u16,
    flags: u16,
    offset: u64,
    length: usize,
}

/// Fails the requests in flight if the reactor ends.
struct ReactorEndGuard(Rc<ClientConnection>);

impl Drop for ReactorEndGuard {
    fn drop(&mut self) {
        if !self.0.is_stopping.get() {
            self.0.fail_all(ConnectionFault::Ended);
        }
    }
}

impl ClientConnection {
    async fn request(
        &self,
        fields: RequestFields,
        expects: ExpectedReply,
        payload: Option<Segments>,
    ) -> Result<ExpectedReply> {
        if self.fault.borrow().is_some() {
            return Err(CONNECTION_LOST);
        }
        let RequestFields { command, flags, offset, length } = fields;
        let max_length = match command {
            cmd::READ | cmd::WRITE => self.export.maximum_payload,
            _ => u32::MAX,
        };
        // Compact headers have 32-bit lengths; the server's maximum applies to payloads only.
        let length =
            u32::try_from(length).ok().filter(|&length| length <= max_length).ok_or(Error::INVALID)?;
        let pending = self.register(expects);
        self.outgoing.borrow_mut().push(command, flags, pending.cookie, offset, length, payload);
        self.send_signal.raise();
        pending.wait().await
    }

    fn register(&self, expects: ExpectedReply) -> PendingReply<'_> {
        let mut in_flight = self.in_flight.borrow_mut();
        let entry = in_flight.vacant_entry();
        let key = entry.key();
        // A late or forged reply to an earlier request in the same slot has another sequence
        // number.
        let sequence = self.sequence.replace(self.sequence.get().wrapping_add(1));
        let cookie = u64::from(sequence) << 32 | key as u64;
        entry.insert(PendingRequest {
            cookie,
            expects,
            error: None,
            errors: 0,
            is_answered: false,
            is_cancelled: false,
            waker: None,
        });
        PendingReply { connection: self, key, cookie }
    }

    async fn send(self: Rc<Self>) {
        loop {
            let batch = self.outgoing.borrow_mut().take();
            match batch {
                Some(batch) => {
                    if let Err(error) = self.stream.send_now(batch).await {
                        self.stream.close();
                        self.fail_all(error.into());
                        return;
                    }
                }
                // Ends only with an empty queue, so that no request is lost.
                None if self.is_disconnecting.get() || self.is_stopping.get() => return,
                None if self.fault.borrow().is_some() => return,
                None => self.send_signal.wait().await,
            }
        }
    }

    async fn receive(self: Rc<Self>, mut receive_buffer: ReceiveBuffer) -> ReceiveBuffer {
        let end_guard = ReactorEndGuard(Rc::clone(&self));
        let fault = loop {
            match self.reply(&mut receive_buffer).await {
                Ok(()) => {}
                // Interrupted by `into_established`, before any byte of a reply.
                Err(ConnectionFault::Broken(error))
                    if self.is_stopping.get() && error.raw_os_error() == Some(libc::ECANCELED) =>
                {
                    drop(end_guard);
                    return receive_buffer;
                }
                Err(fault) => break fault,
            }
        };
        self.stream.close();
        self.fail_all(fault);
        self.send_signal.raise();
        receive_buffer
    }

    /// Records the end of the connection and wakes all waiting requests; the first reason is kept.
    fn fail_all(&self, fault: ConnectionFault) {
        self.fault.borrow_mut().get_or_insert(fault);
        // Collected first: a woken task may borrow `in_flight`.
        let waiting: Vec<Waker> =
            self.in_flight.borrow_mut().iter_mut().filter_map(|(_, entry)| entry.waker.take()).collect();
        let watching = self.close_waker.borrow_mut().take();
        waiting.into_iter().chain(watching).for_each(Waker::wake);
    }

    /// Processes one reply, or one chunk of a structured reply.
    async fn reply(&self, receive_buffer: &mut ReceiveBuffer) -> FaultResult<()> {
        let (header, length) = loop {
            let limits_of = |cookie| self.chunk_limits(cookie);
            match reply::parse(receive_buffer.bytes(), self.export.structured, limits_of)
                .map_err(ConnectionFault::ProtocolViolation)?
            {
                Some(found) => break found,
                // An idle connection holds no large buffer.
                None if self.in_flight.borrow().is_empty() => receive_buffer.expect_nothing(),
                None => {}
            }
            if !receive_buffer.fill(&self.stream).await? {
                return Err(ConnectionFault::Closed);
            }
        };
        // Only the header is consumed; a payload is received in place below.
        receive_buffer.consume(length);
        match header {
            ClientReplyHeader::Simple { cookie, error: 0 } => {
                let key = self.key_of_reply(cookie)?;
                let length = match &self.in_flight.borrow()[key].expects {
                    ExpectedReply::Data(read) => Some(read.length),
                    ExpectedReply::Nothing => None,
                    ExpectedReply::Extents { .. } => {
                        return Err(ConnectionFault::ProtocolViolation(
                            "a simple reply to a block status request",
                        ));
                    }
                };
                if let Some(length) = length {
                    // With structured replies, a server must not answer a READ with a simple reply.
                    if self.export.structured {
                        return Err(ConnectionFault::ProtocolViolation(
                            "a simple reply to a read, although structured replies were negotiated",
                        ));
                    }
                    let data = receive_buffer.payload(length, &self.stream).await?;
                    self.store_data(key, 0, data)?;
                }
                self.finish(key)
            }
            ClientReplyHeader::Simple { cookie, error } => {
                let key = self.key_of_reply(cookie)?;
                self.record_error(key, error)?;
                self.finish(key)
            }
            ClientReplyHeader::Chunk { cookie, last, chunk } => {
                self.chunk(receive_buffer, cookie, last, chunk).await
            }
        }
    }

    async fn chunk(
        &self,
        receive_buffer: &mut ReceiveBuffer,
        cookie: u64,
        last: bool,
        chunk: ReplyChunk,
    ) -> FaultResult<()> {
        let key = self.key_of_reply(cookie)?;
        match chunk {
            ReplyChunk::None => {}
            ReplyChunk::Data { offset, length } => {
                let at = self.chunk_offset(key, offset, length)?;
                let data = receive_buffer.payload(length, &self.stream).await?;
                self.store_data(key, at, data)?;
            }
            ReplyChunk::Hole { offset, length } => {
                let at = self.chunk_offset(key, offset, length)?;
                self.store_data(key, at, IoBuffer::zeroed(length))?;
            }
            // The text of the error is skipped; only its number reaches the caller.
            ReplyChunk::Error { error, rest } => {
                self.record_error(key, error)?;
                receive_buffer.skip(rest, &self.stream).await?;
            }
            ReplyChunk::Status { context, length } => {
                self.extents(receive_buffer, key, context, length).await?;
            }
        }
        if last { self.finish(key) } else { Ok(()) }
    }

    async fn extents(
        &self,
        receive_buffer: &mut ReceiveBuffer,
        key: usize,
        context: u32,
        length: usize,
    ) -> FaultResult<()> {
        let requested = match &self.in_flight.borrow()[key].expects {
            ExpectedReply::Extents { asked, found }
                // One context was negotiated, so a reply may have one status chunk, with the
                // context's ID.
                if found.is_empty() && Some(context) == self.export.allocation =>
            {
                *asked
            }
            ExpectedReply::Extents { .. } => {
                return Err(ConnectionFault::ProtocolViolation("extents twice, or of a context that \
                                                               was not negotiated"));
            }
            _ => return Err(ConnectionFault::ProtocolViolation("extents in a reply to a request \
                                                                other than block status")),
        };
        // Extents beyond the limit are dropped, but their bytes must be consumed.
        let stored_bytes = length.min(MAX_EXTENTS * EXTENT_BYTES);
        let bytes = receive_buffer.payload(stored_bytes, &self.stream).await?;
        receive_buffer.skip(length - stored_bytes, &self.stream).await?;
        let mut found = Vec::with_capacity(stored_bytes / EXTENT_BYTES);
        let mut fields = WireFields::new(&bytes);
        while let Some((length, flags)) = fields.u32().zip(fields.u32()) {
            if length == 0 {
                return Err(ConnectionFault::ProtocolViolation("an extent of length 0"));
            }
            found.push(RawExtent { length, flags });
        }
        self.in_flight.borrow_mut()[key].expects = ExpectedReply::Extents { asked: requested, found };
        Ok(())
    }

    fn key_of_reply(&self, cookie: u64) -> FaultResult<usize> {
        self.key_of(cookie).map_err(ConnectionFault::ProtocolViolation)
    }

    fn key_of(&self, cookie: u64) -> std::result::Result<usize, &'static str> {
        // The lower half is an index in the slab.
        let key = (cookie & u64::from(u32::MAX)) as usize;
        let in_flight = self.in_flight.borrow();
        let found = in_flight.get(key).is_some_and(|entry| entry.cookie == cookie && !entry.is_answered);
        if found { Ok(key) } else { Err("a reply to an unknown or already answered request") }
    }

    /// Limits of the chunks in the reply to a request in flight.
    fn chunk_limits(&self, cookie: u64) -> std::result::Result<ChunkLimits, &'static str> {
        let key = self.key_of(cookie)?;
        Ok(match &self.in_flight.borrow()[key].expects {
            ExpectedReply::Nothing => ChunkLimits::default(),
            ExpectedReply::Data(read) => ChunkLimits { data: read.length, extents: 0 },
            ExpectedReply::Extents { asked, .. } => ChunkLimits { data: 0, extents: *asked as usize },
        })
    }

    /// Offset of a chunk in a read's buffer, if it fits.
    fn chunk_offset(&self, key: usize, offset: u64, length: usize) -> FaultResult<usize> {
        let in_flight = self.in_flight.borrow();
        let ExpectedReply::Data(read) = &in_flight[key].expects else {
            return Err(ConnectionFault::ProtocolViolation("data in a reply to a request other than a read"));
        };
        let at = offset.checked_sub(read.offset).and_then(|at| usize::try_from(at).ok());
        let fits = at.filter(|&at| at <= read.length && length <= read.length - at);
        fits.ok_or(ConnectionFault::ProtocolViolation("more data than requested"))
    }

    /// Copies data into a read's buffer. Data of the full length becomes the buffer without a copy.
    fn store_data(&self, key: usize, at: usize, data: IoBuffer) -> FaultResult<()> {
        let mut in_flight = self.in_flight.borrow_mut();
        let ExpectedReply::Data(read) = &mut in_flight[key].expects else {
            return Err(ConnectionFault::ProtocolViolation("data in a reply to a request other than a read"));
        };
        // Each byte may arrive once, so that a server cannot replace data.
        read.pieces.add(at..at + data.len()).map_err(ConnectionFault::ProtocolViolation)?;
        if data.len() == read.length {
            read.data = Some(data);
        } else {
            let data_buffer = read.data.get_or_insert_with(|| IoBuffer::zeroed(read.length));
            data_buffer[at..at + data.len()].copy_from_slice(&data);
        }
        Ok(())
    }

    fn record_error(&self, key: usize, error: u32) -> FaultResult<()> {
        let error = Error::from_errno(proto::to_linux(error));
        // ESHUTDOWN: the server replies to no other request ("Error values").
        if error == Error::SHUTDOWN {
            return Err(ConnectionFault::ShuttingDown);
        }
        let entry = &mut self.in_flight.borrow_mut()[key];
        entry.error.get_or_insert(error);
        entry.errors += 1;
        if entry.errors > MAX_ERRORS {
            Err(ConnectionFault::ProtocolViolation("more than 1024 errors in one reply"))
        } else {
            Ok(())
        }
    }

    fn finish(&self, key: usize) -> FaultResult<()> {
        let mut in_flight = self.in_flight.borrow_mut();
        let entry = &mut in_flight[key];
        let is_complete = match &entry.expects {
            ExpectedReply::Nothing => true,
            ExpectedReply::Data(read) => read.pieces.covers(read.length),
            ExpectedReply::Extents { found, .. } => !found.is_empty(),
        };
        // After an error the content is irrelevant; a success must be complete.
        if entry.error.is_none() && !is_complete {
            return Err(ConnectionFault::ProtocolViolation("less data than requested"));
        }
        entry.is_answered = true;
        let waiting = entry.waker.take();
        if entry.is_cancelled {
            in_flight.remove(key);
        }
        drop(in_flight);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
        Ok(())
    }
}

/// Reply that the caller of a request waits for. Dropping it cancels the wait, not the request.
struct PendingReply<'a> {
    connection: &'a ClientConnection,
    key: usize,
    cookie: u64,
}

impl PendingReply<'_> {
    async fn wait(self) -> Result<ExpectedReply> {
        poll_fn(|context| {
            let mut in_flight = self.connection.in_flight.borrow_mut();
            let entry = &mut in_flight[self.key];
            if entry.is_answered {
                let outcome = std::mem::replace(&mut entry.expects, ExpectedReply::Nothing);
                return Poll::Ready(entry.error.map_or(Ok(outcome), Err));
            }
            if self.connection.fault.borrow().is_some() {
                return Poll::Ready(Err(CONNECTION_LOST));
            }
            entry.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl Drop for PendingReply<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.connection.in_flight.borrow_mut();
        let entry = &mut in_flight[self.key];
        // Without a reply the slot stays reserved: a late reply to an unknown cookie would end the
        // connection.
        if entry.is_answered {
            in_flight.remove(self.key);
        } else {
            entry.is_cancelled = true;
        }
    }
}
