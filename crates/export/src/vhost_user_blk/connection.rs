//! A session behind a socket: receives messages with descriptors, sends replies, and returns the
//! effects that concern rings and disk to the owner.
//!
//! Receives one message at a time and never a byte of the next, so that descriptors belong to the
//! message that they arrived with. Messages are few, and a front end waits for most replies.
//!
//! A descriptor is checked when it arrives, and accepted only if it cannot keep another file open:
//! an event is an eventfd, memory is a regular file in memory, and the channel for changes is one
//! of an unnamed pair of sockets ([`super::back_end_channel`]). A front end that passes the other
//! end of its own connection would otherwise never hang up, and its export would stay locked after
//! its process has ended. The last 128 descriptors of the process are not available to front ends.

use std::{
    collections::VecDeque,
    future::Future,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use policy::time::{Duration, Instant};
use reactor::{log_rate_limit::LogRateLimit, operation, operation::Fd};
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};

use super::{
    inflight::UnflushedWrites,
    message::{
        self, HEADER_BYTES, MAX_DESCRIPTORS, MalformedVhostUserMessage, VhostUserHeader, VhostUserReply,
        VhostUserRequest,
    },
    session::{Effect, RequestRejection, SessionMessage, SessionOutput, VhostUserSession},
};

/// Time for a message, from its first byte to its last.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Buffer capacity kept for the next message.
const KEPT_BYTES: usize = 64;

/// Reason for the end of a connection.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum FrontEndEnd {
    #[error("the front end has disconnected")]
    Disconnected,
    #[error("a message was still incomplete after {} s", MESSAGE_TIMEOUT.as_secs())]
    IncompleteMessage,
    #[error(
        "too many file descriptors in one message, or too few left in this process (raise \
         `ulimit -n` or LimitNOFILE=)"
    )]
    Descriptors,
    #[error("not a message: {0}")]
    Header(MalformedVhostUserMessage),
    #[error("{request}: {why}")]
    Rejected { request: &'static str, why: RequestRejection },
    #[error("the front end does not read its replies")]
    NotReading,
    #[error(transparent)]
    Socket(#[from] io::Error),
}

impl FrontEndEnd {
    /// The error, unless the front end has just disconnected.
    pub(super) fn fault(&self) -> Option<&Self> {
        (!matches!(self, Self::Disconnected)).then_some(self)
    }
}

/// A connected front end.
///
/// The owner calls [`VhostUserConnection::next`] until that fails, and executes the effects in
/// order:
///
/// ```text
///   effect from next()  ──► start or stop a queue, replace its memory or events, switch the cache
///   a queue has ended   ──► stopped(ring, base)
///   the disk was resized ─► resize(size_bytes)
/// ```
///
/// After the end, the owner stops the rings that still run ([`VhostUserConnection::running`]), as
/// [`Effect::Stop`] would.
#[derive(Debug)]
pub struct VhostUserConnection {
    export: Arc<str>,
    socket: Fd,
    session: VhostUserSession,
    inbox: VhostUserInbox,
    outputs: VecDeque<SessionOutput>,
    refusals: LogRateLimit,
}

impl VhostUserConnection {
    /// Creates a connection with a new front end; `export` is its name in the log.
    pub fn new(export: Arc<str>, socket: Fd, session: VhostUserSession) -> Self {
        let (inbox, outputs, refusals) = Default::default();
        Self { export, socket, session, inbox, outputs, refusals }
    }

    /// Continues a connection with the session of another process.
    pub(super) fn from_transferred(export: Arc<str>, transferred: TransferredFrontEnd) -> Self {
        let TransferredFrontEnd { socket, session, outputs, inbox, used_ns: _ } = transferred;
        let deadline = (inbox.filled > 0).then(|| reactor::now() + MESSAGE_TIMEOUT);
        Self { outputs, inbox: VhostUserInbox { deadline, ..inbox }, ..Self::new(export, socket, session) }
    }

    /// Stops all rings; nothing more is received once [`VhostUserConnection::is_quiesced`].
    pub(super) fn quiesce(&mut self) {
        self.session.quiesce(&mut self.outputs);
    }

    /// True if the connection is quiescing or quiesced.
    pub(super) fn is_quiescing(&self) -> bool {
        self.session.is_quiescing()
    }

    /// True if no ring runs and no output is queued.
    pub(super) fn is_quiesced(&self) -> bool {
        self.session.is_quiesced() && self.outputs.is_empty()
    }

    /// Resumes after a quiesce.
    pub(super) fn resume(&mut self) {
        self.session.resume(&mut self.outputs);
    }

    /// State of the front end for the new process, and the time for which it has used the disk.
    pub(super) fn transferred_state(&self, used_ns: Option<u64>) -> io::Result<QuiescedFrontEnd> {
        let (bytes, descriptors) = self.inbox.copy_incomplete()?;
        Ok(QuiescedFrontEnd {
            socket: self.socket.clone(),
            messages: self.session.to_messages()?,
            bytes,
            descriptors,
            used_ns,
        })
    }

    /// Returns the next effect. Cancel safe: dropping the future loses nothing.
    ///
    /// While a reply depends on rings that have yet to stop, or after a quiesce, it only waits for
    /// the front end to disconnect.
    ///
    /// # Errors
    /// [`FrontEndEnd`]: the connection is over.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn next(&mut self) -> Result<Effect, FrontEndEnd> {
        loop {
            if let Some(effect) = self.step().await? {
                return Ok(effect);
            }
        }
    }

    /// Advances like [`Self::next`], but at most to the end of one message.
    pub(super) async fn step(&mut self) -> Result<Option<Effect>, FrontEndEnd> {
        let has_outputs = !self.outputs.is_empty();
        while let Some(output) = self.outputs.pop_front() {
            match output {
                SessionOutput::Effect(effect) => return Ok(Some(effect)),
                SessionOutput::Reply(reply) => self.send(&reply)?,
                SessionOutput::ConfigChanged => self.send_config_change(),
                SessionOutput::Rejected { request, why } => self.log(request, &why),
                SessionOutput::Close { request, why } => return Err(FrontEndEnd::Rejected { request, why }),
            }
        }
        if has_outputs && self.is_quiesced() {
            // The last output completed the quiesce; the owner has to see that.
            return Ok(None);
        }
        // A later message could depend on the pending reply, so none is received before it.
        if self.session.is_waiting_for_rings() || self.is_quiesced() {
            operation::peer_shut_down(&self.socket).await?;
            return Err(FrontEndEnd::Disconnected);
        }
        let VhostUserMessage { header, payload, descriptors } = self.inbox.receive(&self.socket).await?;
        // A malformed payload is no reason to close by itself: the session decides.
        let request = VhostUserRequest::parse(header.code, &payload, descriptors);
        self.session.receive(header.code, header.need_reply, request, &mut self.outputs);
        // Yields after each message, so that a fast front end cannot starve the worker's other
        // tasks.
        reactor::yield_now().await;
        Ok(None)
    }

    /// Waits until the front end disconnects, even if messages are still unread.
    pub fn hung_up(&self) -> impl Future<Output = io::Result<()>> + use<> {
        let socket = self.socket.clone();
        async move { operation::peer_shut_down(&socket).await }
    }

    /// See [`VhostUserSession::ring_stopped`].
    pub fn stopped(&mut self, ring: u16, base: u32) {
        self.session.ring_stopped(ring, base, &mut self.outputs);
    }

    /// Rings that run or have yet to stop.
    pub fn running(&self) -> impl Iterator<Item = u16> {
        self.session.running()
    }

    /// See [`VhostUserSession::queried_queue_count`].
    pub fn requested_queues(&self) -> Option<u16> {
        self.session.queried_queue_count()
    }

    /// See [`VhostUserSession::loss`].
    pub fn loss(&self) -> Option<&Arc<UnflushedWrites>> {
        self.session.loss()
    }

    /// See [`VhostUserSession::write_cache`].
    pub fn write_cache(&self) -> bool {
        self.session.write_cache()
    }

    /// Updates the disk's size and sends CONFIG_CHANGE_MSG if the front end has passed a channel.
    pub fn resize(&mut self, size_bytes: u64) {
        if self.session.resize(size_bytes).is_some() {
            self.send_config_change();
        }
    }

    fn send_config_change(&self) {
        let Some(channel) = self.session.channel() else { return };
        let message = message::config_change();
        let sent = sendmsg(
            channel,
            &[IoSlice::new(&message)],
            &mut SendAncillaryBuffer::default(),
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
        match sent {
            // A full channel holds an unread copy of the same message.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => {
                tracing::debug!(export = %self.export, %error, "cannot notify the front end of a resize");
            }
        }
    }

    fn log(&self, request: &str, why: &RequestRejection) {
        if let Some(suppressed) = self.refusals.try_log(reactor::coarse_now()) {
            tracing::warn!(
                export = %self.export, request, %why, suppressed,
                "a front end's request was rejected"
            );
        }
    }

    /// Sends a reply without waiting. Replies are small and the front end waits for each, so a full
    /// socket buffer means that many were not read.
    fn send(&self, reply: &VhostUserReply) -> Result<(), FrontEndEnd> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptor = reply.descriptor.as_ref().map(|descriptor| [descriptor.as_fd()]);
        if let Some(descriptor) = &descriptor {
            let fits = control.push(SendAncillaryMessage::ScmRights(descriptor));
            assert!(fits, "there is room for one");
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&self.socket, &[IoSlice::new(&reply.bytes)], &mut control, flags) {
            Ok(sent) if sent == reply.bytes.len() => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(FrontEndEnd::NotReading),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(FrontEndEnd::Disconnected),
            Err(error) => Err(FrontEndEnd::Socket(error.into())),
        }
    }
}

/// State of a quiesced front end: its socket, and the messages that recreate its session.
#[derive(Debug)]
pub struct QuiescedFrontEnd {
    /// Source of messages that have not arrived yet.
    pub socket: Fd,
    /// See [`VhostUserSession::to_messages`].
    pub messages: Vec<SessionMessage>,
    /// Received bytes of an incomplete message.
    pub bytes: Vec<u8>,
    /// Descriptors that arrived with `bytes`.
    pub descriptors: Vec<OwnedFd>,
    /// Time for which the front end has used the disk, in nanoseconds; `None` if it has not.
    pub used_ns: Option<u64>,
}

/// State of a front end that another process has transferred.
#[derive(Debug)]
pub(super) struct TransferredFrontEnd {
    pub(super) socket: Fd,
    pub(super) session: VhostUserSession,
    pub(super) outputs: VecDeque<SessionOutput>,
    pub(super) inbox: VhostUserInbox,
    /// See [`QuiescedFrontEnd::used_ns`].
    pub(super) used_ns: Option<u64>,
}

struct VhostUserMessage {
    header: VhostUserHeader,
    payload: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// An incomplete message.
#[derive(Debug, Default)]
pub(super) struct VhostUserInbox {
    /// As long as the message, as far as its length is known.
    bytes: Vec<u8>,
    filled: usize,
    /// Set once the header is complete.
    header: Option<VhostUserHeader>,
    descriptors: Vec<OwnedFd>,
    /// Set at the first byte.
    deadline: Option<Instant>,
}

impl VhostUserInbox {
    /// Copy of the incomplete message for another process.
    fn copy_incomplete(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let descriptors = self.descriptors.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        Ok((self.bytes[..self.filled].to_vec(), descriptors))
    }

    /// Recreates an incomplete message from another process.
    pub(super) fn of(bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> Result<Self, MalformedVhostUserMessage> {
        let header = bytes.first_chunk().map(VhostUserHeader::parse).transpose()?;
        Ok(Self { filled: bytes.len(), bytes, header, descriptors, deadline: None })
    }

    async fn receive(&mut self, socket: &Fd) -> Result<VhostUserMessage, FrontEndEnd> {
        loop {
            if self.deadline.is_some_and(|deadline| reactor::now() >= deadline) {
                return Err(FrontEndEnd::IncompleteMessage);
            }
            match self.fill(socket) {
                Ok(Some(received)) => return Ok(received),
                Ok(None) => {}
                Err(FrontEndEnd::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(socket).await?;
                }
                Err(FrontEndEnd::Socket(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(FrontEndEnd::Socket(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(FrontEndEnd::Disconnected);
                }
                Err(end) => return Err(end),
            }
        }
    }

    async fn wait(&self, socket: &Fd) -> Result<(), FrontEndEnd> {
        let readable = operation::readable(socket);
        match self.deadline {
            None => Ok(readable.await?),
            Some(deadline) => {
                let remaining = deadline - reactor::now();
                reactor::timeout(remaining, readable)
                    .await
                    .map_err(|reactor::Timeout| FrontEndEnd::IncompleteMessage)??;
                Ok(())
            }
        }
    }

    /// Receives available bytes up to the end of the header or of the message; returns the message
    /// once it is complete.
    fn fill(&mut self, socket: &Fd) -> Result<Option<VhostUserMessage>, FrontEndEnd> {
        let message_bytes = HEADER_BYTES + self.header.map_or(0, |header| header.payload_bytes);
        self.bytes.resize(message_bytes, 0);
        if self.filled < message_bytes {
            let count = self.receive_once(socket)?;
            // Set once at the first byte: a slow front end cannot extend it by sending single
            // bytes.
            self.deadline = self.deadline.or_else(|| Some(reactor::now() + MESSAGE_TIMEOUT));
            self.filled += count;
        }
        if self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(FrontEndEnd::Descriptors);
        }
        if self.filled < message_bytes {
            return Ok(None);
        }
        let Some(header) = self.header else {
            let header = self.bytes.first_chunk().map(VhostUserHeader::parse);
            let header = header.transpose().map_err(FrontEndEnd::Header)?;
            self.header = header;
            return if header.is_some_and(|header| header.payload_bytes == 0) {
                self.fill(socket)
            } else {
                Ok(None)
            };
        };
        let received = VhostUserMessage {
            header,
            payload: self.bytes[HEADER_BYTES..].to_vec(),
            descriptors: std::mem::take(&mut self.descriptors),
        };
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        bytes.shrink_to(KEPT_BYTES);
        *self = Self { bytes, ..Self::default() };
        Ok(Some(received))
    }

    fn receive_once(&mut self, socket: &Fd) -> Result<usize, FrontEndEnd> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut self.bytes[self.filled..])],
            &mut control,
            RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        );
        // Descriptors are collected before any error is returned, so that each is closed on drop.
        let previous_count = self.descriptors.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        let received = received.map_err(io::Error::from)?;
        // The kernel has closed the descriptors that did not fit. Descriptors near the limit are
        // left to the rest of the process, so their sender is disconnected.
        let is_short = self.descriptors.len() > previous_count && !operation::has_shared_descriptors();
        if received.flags.contains(ReturnFlags::CTRUNC) || is_short {
            return Err(FrontEndEnd::Descriptors);
        }
        if received.bytes == 0 { Err(FrontEndEnd::Disconnected) } else { Ok(received.bytes) }
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
