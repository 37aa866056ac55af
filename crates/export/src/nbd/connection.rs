//! One client's connection, from its first byte to its last reply.
//!
//! ```text
//!            ┌──────────── reader ────────────┐      one task per I/O        ┌─ writer ─┐
//!   stream ─►│ receive many ─► parse ─► merge │─► disk.read ─► disk.write ─► │  outbox  │─► stream
//!            └────────────────────────────────┘                              └──────────┘
//! ```
//!
//! The reader parses all requests of one receive into a batch, merges adjacent ones and starts a
//! task for each I/O (`execute`). The writer sends all ready replies in one message.
//!
//! Never affects another client: malformed bytes end only this connection, and the reader stops
//! while the client does not read its replies. After a disconnect, requests in flight are completed
//! and requests that wait for limits are dropped.

use std::{
    cell::{Cell, RefCell},
    io,
    rc::Rc,
    sync::Arc,
};

use event_listener::Event;

use policy::time::Duration;

use super::{
    incoming::{NbdIncomingRequest, bytes_in_flight},
    outbox::{NbdOutbox, ReplyBatch},
    quiesce::{ConnectionQuiesce, QuiesceStage, QuiescedNbdConnection},
    receive_buffer::ReceiveBuffer,
    reply::NbdReplyEncoder,
    request::{self, NbdCommand, Parsed, ProtocolViolation, RejectedRequest},
    session::{NbdSession, RequestTag},
    stop_signal::StopSignal,
    stream::NbdStream,
    transfers::ClientTransfers,
};
use crate::batch::{MergeBatch, MergedRequest};
use block::disk::{CancelToken, Disk};
use image::qcow2::bitmap::BitmapView;
use reactor::{
    buffer::{IoBuffer, Segments},
    memory::{FairQueueFlow, MemoryAccount},
    select::{FirstReady, first},
};

const FINISH_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval of checking a client that has reached its bound in flight: a stopped disk may hold all
/// of its requests.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Longest piece of a message that is sent at once, in bytes. Messages of usual clients are
/// shorter.
const PART_BYTES: usize = 4 << 20;

/// Interval of interrupting a connection that has to quiesce.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(1);

/// Failure that ended a connection before the client disconnected.
#[derive(Debug, thiserror::Error)]
pub(super) enum NbdConnectionError {
    #[error(transparent)]
    Protocol(#[from] ProtocolViolation),
    #[error(transparent)]
    Stream(#[from] io::Error),
}

pub(super) struct NbdConnection {
    stream: NbdStream,
    pub(super) disk: Arc<Disk>,
    /// Bitmaps by the index of their context.
    pub(super) bitmaps: Arc<[BitmapView]>,
    pub(super) session: NbdSession,
    pub(super) replier: NbdReplyEncoder,
    pub(super) outbox: NbdOutbox,
    /// Set by the server, from another thread.
    stop: Arc<StopSignal>,
    /// True if sending failed: the client has disconnected.
    broken: Cell<bool>,
    /// True if no further reply will be queued.
    finished: Cell<bool>,
    /// True if the client has disconnected: requests that wait for limits are dropped.
    pub(super) abandoned: Cell<bool>,
    pub(super) abandonment: Event,
    /// Quiesce state of the server (`ConnectionQuiesce`), and the number of this connection in it.
    quiesce: Option<(Arc<ConnectionQuiesce>, u64)>,
    /// True while the connection quiesces: no request is started.
    pub(super) quiescing: Cell<bool>,
    /// Requests that were parsed but not started when the connection quiesced.
    put_back: RefCell<Vec<NbdIncomingRequest>>,
    sending: Cell<bool>,
    /// True while the reader may be in a receive.
    receiving: Cell<bool>,
    /// Progress of transfers, for the memory budget.
    transfers: Arc<ClientTransfers>,
    /// Share of the disk's memory while requests wait for it.
    flow: FairQueueFlow,
    /// Cancel token of the connection's requests at the disk. Cancelled when the client has
    /// disconnected or the server ends the connection, so that a stopped disk does not hold them.
    pub(super) cancel_token: Arc<CancelToken>,
}

/// Memory of a request that is being received; returned on drop.
struct ReceivingMemory<'a> {
    memory: &'a MemoryAccount,
    bytes: usize,
}

impl ReceivingMemory<'_> {
    /// Leaves the memory charged: the request is in flight, and [`NbdConnection::count_out`]
    /// returns it.
    fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for ReceivingMemory<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.memory.release(self.bytes as u64);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NbdConnectionEnd {
    /// The client sent DISC, or the server ends the connection; the last replies are still sent.
    Orderly,
    /// The client closed the stream without DISC ("hard disconnect").
    HardDisconnect,
    /// Not an end: the connection quiesced.
    Quiesced,
}

impl NbdConnection {
    pub(super) fn new(
        stream: NbdStream,
        disk: Arc<Disk>,
        bitmaps: Arc<[BitmapView]>,
        session: NbdSession,
        stop: Arc<StopSignal>,
    ) -> Rc<Self> {
        let transfers = ClientTransfers::with(&stream, &disk);
        Rc::new(Self {
            stream,
            transfers,
            flow: FairQueueFlow::default(),
            disk,
            bitmaps,
            session,
            replier: NbdReplyEncoder::new(&session),
            outbox: NbdOutbox::default(),
            stop,
            broken: Cell::new(false),
            finished: Cell::new(false),
            abandoned: Cell::new(false),
            abandonment: Event::new(),
            cancel_token: Arc::default(),
            quiesce: None,
            quiescing: Cell::new(false),
            put_back: RefCell::default(),
            sending: Cell::new(false),
            receiving: Cell::new(true),
        })
    }

    /// Registers the connection with a server that may quiesce it.
    pub(super) fn with_quiesce(self: Rc<Self>, quiesce: &Arc<ConnectionQuiesce>, number: u64) -> Rc<Self> {
        let this = Rc::into_inner(self).expect("made for this");
        Rc::new(Self { quiesce: Some((Arc::clone(quiesce), number)), ..this })
    }

    /// Progress of transfers, for other threads.
    pub(super) fn transfers(&self) -> &Arc<ClientTransfers> {
        &self.transfers
    }

    /// Serves the client until it disconnects, breaks the protocol, or `stop` is raised and its
    /// receive has ended. `inbox` has the bytes that arrived behind the handshake.
    pub(super) async fn serve(
        self: Rc<Self>,
        mut inbox: ReceiveBuffer,
    ) -> Result<NbdConnectionEnd, NbdConnectionError> {
        let writer = reactor::spawn_joinable(Rc::clone(&self).send_replies());
        let quiesce_watcher = reactor::spawn_joinable(Rc::clone(&self).watch_quiesce());
        let mut batch = MergeBatch::default();
        // From here on the receive size adapts to the client, and a larger buffer is charged.
        inbox.adapt_to_requests(self.disk.memory().budget());
        let outcome = loop {
            let outcome = self.receive_requests(&mut inbox, &mut batch).await;
            // Parsed requests are started however receiving ended: each was accepted and needs a
            // reply.
            self.start(&mut batch).await;
            if !matches!(outcome, Ok(NbdConnectionEnd::Quiesced))
                || !self.quiesce_until_resumed(&mut inbox).await
            {
                break outcome;
            }
        };
        // Cancelled before the last replies are sent, which a quiesce must not interrupt.
        quiesce_watcher.cancel().await;
        if self.stop.is_raised() {
            self.cancel_token.cancel();
        }
        let watch = match outcome {
            Ok(NbdConnectionEnd::Orderly) => {
                Some(reactor::spawn_joinable(Rc::clone(&self).watch_disconnect()))
            }
            Ok(NbdConnectionEnd::HardDisconnect) | Err(_) => {
                self.abandon();
                None
            }
            // The new process continues the connection, unless it uses TLS, whose state cannot
            // move.
            Ok(NbdConnectionEnd::Quiesced) => None,
        };
        // Replies in flight are sent even after DISC: "Terminating the transmission phase".
        while !self.outbox.is_idle() {
            self.outbox.room.wait().await;
        }
        self.finished.set(true);
        self.outbox.changed.raise();
        writer.await;
        if !matches!(outcome, Ok(NbdConnectionEnd::Quiesced)) || self.stream.is_tls() {
            // Bounded, so that a client that does not read cannot occupy its slot.
            let _ = reactor::timeout(FINISH_TIMEOUT, self.stream.finish()).await;
            self.stream.close();
        }
        if let Some(watch) = watch {
            watch.cancel().await;
        }
        outcome
    }

    /// Detects that a client which sent DISC closes its socket before its last replies are sent.
    async fn watch_disconnect(self: Rc<Self>) {
        // A stopping server has shut down receiving itself, so the end of the stream says nothing
        // about the client.
        if self.stop.is_raised() {
            return;
        }
        let mut buffer = IoBuffer::new(1);
        loop {
            let (result, returned) = self.stream.receive(buffer, 0).await;
            buffer = returned;
            if !matches!(result, Ok(1..)) {
                break;
            }
        }
        if !self.stop.is_raised() {
            self.abandon();
        }
    }

    fn abandon(&self) {
        self.abandoned.set(true);
        self.abandonment.notify(usize::MAX);
        self.cancel_token.cancel();
    }

    async fn receive_requests(
        self: &Rc<Self>,
        inbox: &mut ReceiveBuffer,
        batch: &mut MergeBatch<NbdIncomingRequest>,
    ) -> Result<NbdConnectionEnd, NbdConnectionError> {
        match self.receive_until_rest(inbox, batch).await {
            Err(NbdConnectionError::Stream(error)) if self.is_interruption(&error) => {
                Ok(NbdConnectionEnd::Quiesced)
            }
            outcome => outcome,
        }
    }

    async fn receive_until_rest(
        self: &Rc<Self>,
        inbox: &mut ReceiveBuffer,
        batch: &mut MergeBatch<NbdIncomingRequest>,
    ) -> Result<NbdConnectionEnd, NbdConnectionError> {
        // The rest of a payload whose receiving was interrupted by an earlier quiesce.
        inbox.skip(0, &self.stream).await?;
        while !self.stop.is_raised() {
            if self.quiescing.get() {
                return Ok(NbdConnectionEnd::Quiesced);
            }
            let parsed = request::parse(inbox.bytes(), &self.session, self.disk.size_bytes());
            // The header is consumed before its payload is read from the same buffer.
            if !matches!(parsed, Parsed::Incomplete | Parsed::Close(_)) {
                inbox.consume(self.session.style.request_bytes());
            }
            match parsed {
                Parsed::Incomplete => {
                    self.start(batch).await;
                    if !inbox.fill(&self.stream).await? && !self.stop.is_raised() {
                        return Ok(NbdConnectionEnd::HardDisconnect);
                    }
                }
                Parsed::Close(violation) => return Err(violation.into()),
                Parsed::Refused(refused) => {
                    if let Some(nothing) = self.reserve_memory(batch, 0).await {
                        nothing.keep();
                    }
                    self.start(batch).await;
                    // The payload is skipped before the error is sent: libnbd takes a reply to a
                    // request that it still sends for an unknown cookie and closes the connection.
                    // Only if the skip is interrupted is the error sent at once, because the new
                    // process receives the rest without the request.
                    let skipped = inbox.skip(refused.skip as usize, &self.stream).await;
                    self.reject(&refused);
                    skipped?;
                }
                Parsed::Request(request::NbdRequest { command: NbdCommand::Disconnect, .. }) => break,
                Parsed::Request(request) => {
                    let command = request.command;
                    let Some(memory) = self.reserve_memory(batch, bytes_in_flight(command)).await else {
                        // The loop continues with the request, or ends because the connection
                        // stops.
                        self.return_unstarted(request.tag, command, None);
                        continue;
                    };
                    let data = match command.payload_bytes() as usize {
                        0 => None,
                        // The payload has arrived: it is taken from the receive buffer without
                        // another receive.
                        length if inbox.has_payload(length) => {
                            Some(inbox.payload(length, &self.stream).await?)
                        }
                        length => {
                            // Parsed requests start first: the client may wait for their replies
                            // before it sends the payload.
                            self.start(batch).await;
                            let receiving = self.transfers.receives();
                            let moved = |bytes| receiving.moved(bytes);
                            let payload = inbox.payload_in_parts(length, &self.stream, moved).await;
                            if payload.is_err() {
                                self.return_unstarted(request.tag, command, None);
                            }
                            Some(payload?)
                        }
                    };
                    memory.keep();
                    // Counted in only after its payload has arrived: an incomplete request has no
                    // reply.
                    self.outbox.count_in(bytes_in_flight(command));
                    batch.push(NbdIncomingRequest { tag: request.tag, command, data });
                }
            }
        }
        Ok(NbdConnectionEnd::Orderly)
    }

    fn is_interruption(&self, error: &io::Error) -> bool {
        self.quiescing.get() && error.raw_os_error() == Some(libc::ECANCELED)
    }

    /// Quiesces the connection whenever the server enters [`QuiesceStage::Quiescing`].
    async fn watch_quiesce(self: Rc<Self>) {
        let Some((quiesce, _)) = &self.quiesce else { return };
        loop {
            quiesce.wait_for_stage(|stage| stage >= QuiesceStage::Quiescing).await;
            let generation = quiesce.generation();
            self.quiescing.set(true);
            // Wakes requests that wait for limits; they are put back.
            self.abandonment.notify(usize::MAX);
            self.stop.interrupt();
            // The server may quiesce and resume between two polls of this task.
            while self.quiescing.get() && self.receiving.get() {
                if !self.sending.get() {
                    self.stream.interrupt();
                }
                // Repeated: an interrupt between two receives has no effect.
                reactor::sleep_until(reactor::now() + INTERRUPT_INTERVAL).await;
            }
            if quiesce.wait_for_end_of_quiesce(generation).await {
                return;
            }
        }
    }

    /// Waits until no request is in flight, publishes the connection's state, and waits for the
    /// server to resume. False if another process has taken the connection over.
    async fn quiesce_until_resumed(&self, inbox: &mut ReceiveBuffer) -> bool {
        let Some((quiesce, number)) = &self.quiesce else { return false };
        self.receiving.set(false);
        while !self.outbox.is_idle() {
            self.outbox.room.wait().await;
        }
        // Bytes to be transferred: an interrupted payload, then unparsed bytes. Or a number of
        // bytes to skip.
        let (unfinished, unparsed, skip) = inbox.take_rest();
        let mut bytes = Vec::new();
        // A request whose payload was interrupted must be last, directly before the bytes of its
        // payload that follow in the stream; it was put back first.
        let mut put_back = self.put_back.take();
        let interrupted = put_back.iter().position(NbdIncomingRequest::is_unfinished);
        let last = interrupted.map(|at| put_back.remove(at));
        for request in put_back.into_iter().chain(last) {
            request.write(&self.session, &mut bytes);
        }
        bytes.extend(unfinished);
        bytes.extend(unparsed);
        *inbox = ReceiveBuffer::with_content(&bytes, skip);
        inbox.adapt_to_requests(self.disk.memory().budget());
        let (tls, session) = (self.stream.is_tls(), self.session);
        let stream_socket = self.stream.socket().cloned();
        let quiesced = stream_socket.map(|socket| QuiescedNbdConnection {
            socket,
            tls,
            session,
            bytes,
            skip: skip as u64,
        });
        let is_transferred = quiesce.publish_until_resumed(*number, quiesced).await;
        self.quiescing.set(false);
        self.receiving.set(true);
        !is_transferred
    }

    /// Keeps a request that was not started for the process that continues the connection.
    pub(super) fn return_unstarted(&self, tag: RequestTag, command: NbdCommand, data: Option<IoBuffer>) {
        if self.quiescing.get() {
            self.put_back.borrow_mut().push(NbdIncomingRequest { tag, command, data });
        }
    }

    async fn start(self: &Rc<Self>, batch: &mut MergeBatch<NbdIncomingRequest>) {
        if batch.is_empty() {
            return;
        }
        if let Some(only) = batch.take_only() {
            self.wait_while_congested().await;
            reactor::spawn(Rc::clone(self).run(only));
            return;
        }
        for joined in batch.take_merged() {
            self.wait_while_congested().await;
            let this = Rc::clone(self);
            match joined {
                MergedRequest::One(only) => reactor::spawn(this.run(only)),
                MergedRequest::Reads(parts) => reactor::spawn(this.read_merged(parts)),
                MergedRequest::Writes(parts) => reactor::spawn(this.write_merged(parts)),
            }
        }
    }

    /// Waits until one more request may be in flight and memory is available for it. Starts parsed
    /// requests first. `None` if the connection stops or quiesces before.
    async fn reserve_memory(
        self: &Rc<Self>,
        batch: &mut MergeBatch<NbdIncomingRequest>,
        bytes: usize,
    ) -> Option<ReceivingMemory<'_>> {
        let memory = self.disk.memory();
        if !self.outbox.has_room(bytes) {
            self.start(batch).await;
            while !self.outbox.has_room(bytes) {
                let waited = reactor::timeout(CHECK_INTERVAL, self.outbox.room.wait()).await;
                let is_ending = || self.stop.is_raised() || self.stream.is_closed_by_peer();
                if waited.is_err() && is_ending() {
                    self.cancel_token.cancel();
                }
            }
        }
        if bytes > 0 && !memory.try_acquire(bytes as u64) {
            self.start(batch).await;
            loop {
                let interrupted = self.stop.listen();
                if self.stop.is_raised() || self.quiescing.get() {
                    return None;
                }
                if let FirstReady::One(()) =
                    first(memory.acquire(&self.flow, bytes as u64), interrupted).await
                {
                    break;
                }
            }
        }
        Some(ReceivingMemory { memory, bytes })
    }

    /// Counts out requests that were answered or dropped; see [`NbdOutbox::sent`].
    pub(super) fn count_out(&self, requests: usize, bytes: usize, length: usize) {
        self.outbox.sent(requests, bytes, length);
        if bytes > 0 {
            self.disk.memory().release(bytes as u64);
        }
    }

    async fn wait_while_congested(&self) {
        while self.outbox.is_congested() {
            self.outbox.room.wait().await;
        }
    }

    fn reject(&self, refused: &RejectedRequest) {
        tracing::debug!(disk = %self.disk.name(), errno = ?refused.errno, why = refused.why, "request refused");
        self.outbox.count_in(0);
        let mut reply = Vec::new();
        self.replier.error(refused.tag, refused.errno, refused.why, &mut reply);
        self.outbox.push_bytes(&reply, 0);
    }

    async fn send_replies(self: Rc<Self>) {
        loop {
            // A failed connection still takes messages and counts them out, so that `is_idle` is
            // reached.
            let Some(message) = self.outbox.take_batch() else {
                if self.finished.get() {
                    return;
                }
                self.outbox.changed.wait().await;
                continue;
            };
            // Lets more completions join before the send; the client stays busy with unread
            // replies.
            if self.is_behind(&message) {
                reactor::linger();
            }
            let length = message.segments.len();
            self.sending.set(true);
            if !self.broken.get()
                && let Err(error) = self.send(message.segments).await
            {
                tracing::debug!(disk = %self.disk.name(), %error, "the client takes no more replies");
                self.broken.set(true);
                // Ends the reader too, so that no request is accepted whose reply cannot be sent.
                self.stop.raise();
                self.stream.close();
                self.abandon();
            }
            self.sending.set(false);
            self.count_out(message.requests, message.bytes, length);
        }
    }

    /// Sends a message. A long one is sent in parts, so that progress of a slow client is visible.
    async fn send(&self, mut message: Segments) -> io::Result<()> {
        let sending = self.transfers.sends(message.len().min(PART_BYTES));
        while message.len() > PART_BYTES {
            let rest = message.split_off(PART_BYTES);
            self.stream.send(message).await?;
            message = rest;
            sending.continues(message.len().min(PART_BYTES));
        }
        self.stream.send(message).await
    }

    /// True if the client has enough unread replies to stay busy while requests gather: eight like
    /// these, with the kernel's overhead for each message. At depth 32 from memory, lingering
    /// raised 104k IOPS to 159k at 57 % of the CPU time a request; at depth 4 it would halve them.
    /// False while the storage has requests: their completions would wait too (over another NBD
    /// server, that took 8 % of the IOPS).
    fn is_behind(&self, message: &ReplyBatch) -> bool {
        const REPLIES: usize = 8;
        const OVERHEAD: usize = 256;
        let reply = message.segments.len() / message.requests.max(1);
        self.outbox.covers_all(message) && self.stream.unread_bytes() > REPLIES * (reply + OVERHEAD)
    }
}
