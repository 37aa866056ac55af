//! A session behind a socket: bytes and descriptors come in, replies go out, and what is left is
//! for the owner of rings and disk.
//!
//! One message is taken at a time, and never a byte of the next: so descriptors belong to the
//! message that they came with. Messages are few, and a front end waits for most replies.
//!
//! A descriptor is judged when it arrives, and kept only if it cannot hold anything else: an event
//! is an eventfd, memory is a regular file in memory, and the channel for changes is one of an
//! unnamed pair of sockets ([`super::channel`]). A front end that passes the other end of its own
//! connection would otherwise never hang up, and its export would stay locked after its process has
//! ended. The last 128 descriptors of the process are not given to front ends.

use std::{
    collections::VecDeque,
    future::Future,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd as _, OwnedFd},
    sync::Arc,
};

use policy::time::{Duration, Instant};
use reactor::{op, op::Fd, seldom::Seldom};
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
        SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
    },
};

use super::{
    inflight::Loss,
    message::{self, HEADER_BYTES, Header, MAX_DESCRIPTORS, Malformed, Reply, Request},
    session::{Effect, Output, Refusal, Said, Session},
};

/// Time for a message, from its first byte to its last.
const PATIENCE: Duration = Duration::from_secs(10);
/// Memory kept for the next message.
const KEPT_BYTES: usize = 64;

/// Why a connection ended.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    #[error("the front end has disconnected")]
    Left,
    #[error("the rest of a message did not come within {} s", PATIENCE.as_secs())]
    HalfMessage,
    #[error(
        "a message came with more descriptors than any has, or than are left to one client (`ulimit -n` or LimitNOFILE= must be larger)"
    )]
    Descriptors,
    #[error("not a message: {0}")]
    Header(Malformed),
    #[error("{request}: {why}")]
    Refused { request: &'static str, why: Refusal },
    #[error("the front end does not read its replies")]
    NotReading,
    #[error(transparent)]
    Socket(#[from] io::Error),
}

impl Ended {
    /// Itself, unless the front end has just left.
    pub(super) fn fault(&self) -> Option<&Self> {
        (!matches!(self, Self::Left)).then_some(self)
    }
}

/// A front end that is connected.
///
/// Its owner turns until [`Connection::next`] fails; what that returns it carries out in order:
///
/// ```text
///   effect from next()  ──► start or stop a queue, give it other memory or events, switch the cache
///   a queue has ended   ──► stopped(ring, base)
///   the disk has grown  ──► resize(size_bytes)
/// ```
///
/// When it is over, the owner ends the rings that still run ([`Connection::running`]), as
/// [`Effect::Stop`] would.
#[derive(Debug)]
pub struct Connection {
    export: Arc<str>,
    socket: Fd,
    session: Session,
    inbox: Inbox,
    outputs: VecDeque<Output>,
    refusals: Seldom,
}

impl Connection {
    /// A front end that has just connected; `export` is its name in the log.
    pub fn new(export: Arc<str>, socket: Fd, session: Session) -> Self {
        let (inbox, outputs, refusals) = Default::default();
        Self { export, socket, session, inbox, outputs, refusals }
    }

    /// One that has come here, with a session that another process had.
    pub(super) fn taken_over(export: Arc<str>, arrived: Arrived) -> Self {
        let Arrived { socket, session, outputs, inbox, used_ns: _ } = arrived;
        let deadline = (inbox.filled > 0).then(|| reactor::now() + PATIENCE);
        Self { outputs, inbox: Inbox { deadline, ..inbox }, ..Self::new(export, socket, session) }
    }

    /// Stops all rings; nothing more is received once [`Connection::is_at_rest`].
    pub(super) fn rest(&mut self) {
        self.session.rest(&mut self.outputs);
    }

    /// Whether it was told to rest.
    pub(super) fn is_resting(&self) -> bool {
        self.session.is_resting()
    }

    /// Whether no ring runs any more, and nothing is to be sent.
    pub(super) fn is_at_rest(&self) -> bool {
        self.session.is_at_rest() && self.outputs.is_empty()
    }

    /// Goes on as before it rested.
    pub(super) fn wake(&mut self) {
        self.session.wake(&mut self.outputs);
    }

    /// The front end as another process can go on with it, and for how long it has used the disk.
    pub(super) fn told(&self, used_ns: Option<u64>) -> io::Result<Rested> {
        let (bytes, descriptors) = self.inbox.told()?;
        Ok(Rested { socket: self.socket.clone(), said: self.session.told()?, bytes, descriptors, used_ns })
    }

    /// What is to happen next. May be dropped while it waits, and called again: nothing is lost.
    ///
    /// While a reply depends on rings that have yet to stop, or when it is at rest, it waits for
    /// nothing but the front end's end.
    ///
    /// # Errors
    /// [`Ended`]: the connection is over.
    ///
    /// # Panics
    /// Outside a reactor.
    pub async fn next(&mut self) -> Result<Effect, Ended> {
        loop {
            if let Some(effect) = self.step().await? {
                return Ok(effect);
            }
        }
    }

    /// The same, but no further than to the end of a message.
    pub(super) async fn step(&mut self) -> Result<Option<Effect>, Ended> {
        let has_outputs = !self.outputs.is_empty();
        while let Some(output) = self.outputs.pop_front() {
            match output {
                Output::Act(effect) => return Ok(Some(effect)),
                Output::Reply(reply) => self.send(&reply)?,
                Output::ConfigChanged => self.tell_change(),
                Output::Refused { request, why } => self.log(request, &why),
                Output::Close { request, why } => return Err(Ended::Refused { request, why }),
            }
        }
        if has_outputs && self.is_at_rest() {
            // With the last of them it came to rest, which its owner has to see.
            return Ok(None);
        }
        if self.session.is_waiting() || self.is_at_rest() {
            op::hung_up(&self.socket).await?;
            return Err(Ended::Left);
        }
        let Received { header, payload, descriptors } = self.inbox.receive(&self.socket).await?;
        let request = Request::parse(header.code, &payload, descriptors);
        self.session.receive(header.code, header.need_reply, request, &mut self.outputs);
        // However fast messages come, others have their turn.
        reactor::yield_now().await;
        Ok(None)
    }

    /// Waits until the front end hangs up, whatever of it is still to be received.
    pub fn hung_up(&self) -> impl Future<Output = io::Result<()>> + use<> {
        let socket = self.socket.clone();
        async move { op::hung_up(&socket).await }
    }

    /// See [`Session::stopped`].
    pub fn stopped(&mut self, ring: u16, base: u32) {
        self.session.stopped(ring, base, &mut self.outputs);
    }

    /// Rings that run, or have yet to stop.
    pub fn running(&self) -> impl Iterator<Item = u16> {
        self.session.running()
    }

    /// See [`Session::queues_asked_for`].
    pub fn queues_asked_for(&self) -> Option<u16> {
        self.session.queues_asked_for()
    }

    /// See [`Session::loss`].
    pub fn loss(&self) -> Option<&Arc<Loss>> {
        self.session.loss()
    }

    /// See [`Session::write_cache`].
    pub fn write_cache(&self) -> bool {
        self.session.write_cache()
    }

    /// The disk has another length: tells the front end, if it has given us a channel for that.
    pub fn resize(&mut self, size_bytes: u64) {
        if self.session.resize(size_bytes).is_some() {
            self.tell_change();
        }
    }

    fn tell_change(&self) {
        let Some(channel) = self.session.channel() else { return };
        let message = message::config_change();
        let sent = sendmsg(
            channel,
            &[IoSlice::new(&message)],
            &mut SendAncillaryBuffer::default(),
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
        match sent {
            // With a full channel it has yet to read the same message.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => {
                tracing::debug!(export = %self.export, %error, "the front end was not told of a resize");
            }
        }
    }

    fn log(&self, request: &str, why: &Refusal) {
        if let Some(left_out) = self.refusals.line(reactor::recently()) {
            tracing::warn!(export = %self.export, request, %why, left_out, "a front end's request was refused");
        }
    }

    /// A reply is small, and its front end waits for it: if there is no room for it, many were not
    /// read.
    fn send(&self, reply: &Reply) -> Result<(), Ended> {
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
            Ok(_) | Err(Errno::AGAIN) => Err(Ended::NotReading),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Ended::Left),
            Err(error) => Err(Ended::Socket(error.into())),
        }
    }
}

/// A front end at rest: its socket, and what it would say to be where it is.
#[derive(Debug)]
pub struct Rested {
    /// What is still to come.
    pub socket: Fd,
    /// See [`Session::told`].
    pub said: Vec<Said>,
    /// What has come of a message that is not whole.
    pub bytes: Vec<u8>,
    /// What came beside that.
    pub descriptors: Vec<OwnedFd>,
    /// For how long it has used the disk, if it has: nanoseconds.
    pub used_ns: Option<u64>,
}

/// A front end that has come from another process.
#[derive(Debug)]
pub(super) struct Arrived {
    pub(super) socket: Fd,
    pub(super) session: Session,
    pub(super) outputs: VecDeque<Output>,
    pub(super) inbox: Inbox,
    /// See [`Rested::used_ns`].
    pub(super) used_ns: Option<u64>,
}

struct Received {
    header: Header,
    payload: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

/// What has arrived of a message.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    /// As long as the message will be, as far as that is known.
    bytes: Vec<u8>,
    filled: usize,
    /// Once it is whole.
    header: Option<Header>,
    descriptors: Vec<OwnedFd>,
    /// Since the first byte.
    deadline: Option<Instant>,
}

impl Inbox {
    /// What has come of a message.
    fn told(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let descriptors = self.descriptors.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        Ok((self.bytes[..self.filled].to_vec(), descriptors))
    }

    /// The same where it goes on.
    pub(super) fn of(bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> Result<Self, Malformed> {
        let header = bytes.first_chunk().map(Header::parse).transpose()?;
        Ok(Self { filled: bytes.len(), bytes, header, descriptors, deadline: None })
    }

    async fn receive(&mut self, socket: &Fd) -> Result<Received, Ended> {
        loop {
            if self.deadline.is_some_and(|deadline| reactor::now() >= deadline) {
                return Err(Ended::HalfMessage);
            }
            match self.fill(socket) {
                Ok(Some(received)) => return Ok(received),
                Ok(None) => {}
                Err(Ended::Socket(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(socket).await?;
                }
                Err(Ended::Socket(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(Ended::Socket(error)) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(Ended::Left);
                }
                Err(ended) => return Err(ended),
            }
        }
    }

    async fn wait(&self, socket: &Fd) -> Result<(), Ended> {
        let readable = op::readable(socket);
        match self.deadline {
            None => Ok(readable.await?),
            Some(deadline) => {
                let left = deadline - reactor::now();
                reactor::timeout(left, readable).await.map_err(|reactor::Timeout| Ended::HalfMessage)??;
                Ok(())
            }
        }
    }

    /// Takes what is there, up to the end of the header or of the message; the message, if that is
    /// all of it.
    fn fill(&mut self, socket: &Fd) -> Result<Option<Received>, Ended> {
        let due = HEADER_BYTES + self.header.map_or(0, |header| header.payload_bytes);
        self.bytes.resize(due, 0);
        if self.filled < due {
            let count = self.receive_once(socket)?;
            self.deadline = self.deadline.or_else(|| Some(reactor::now() + PATIENCE));
            self.filled += count;
        }
        if self.descriptors.len() > MAX_DESCRIPTORS {
            return Err(Ended::Descriptors);
        }
        if self.filled < due {
            return Ok(None);
        }
        let Some(header) = self.header else {
            let header = self.bytes.first_chunk().map(Header::parse);
            let header = header.transpose().map_err(Ended::Header)?;
            self.header = header;
            return if header.is_some_and(|header| header.payload_bytes == 0) {
                self.fill(socket)
            } else {
                Ok(None)
            };
        };
        let received = Received {
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

    fn receive_once(&mut self, socket: &Fd) -> Result<usize, Ended> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut self.bytes[self.filled..])],
            &mut control,
            RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        );
        let had = self.descriptors.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        let received = received.map_err(io::Error::from)?;
        // The kernel has closed those that did not fit.
        let is_short = self.descriptors.len() > had && !op::descriptors_left_to_others();
        if received.flags.contains(ReturnFlags::CTRUNC) || is_short {
            return Err(Ended::Descriptors);
        }
        if received.bytes == 0 { Err(Ended::Left) } else { Ok(received.bytes) }
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
