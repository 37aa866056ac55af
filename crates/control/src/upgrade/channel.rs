//! Messages with descriptors between two daemons, over a dedicated Unix socket; the sides send
//! alternately.
//!
//! ```text
//!   a message   ▕ lengths │ count ▏▕ JSON ▏▕ bytes ▏ ▕ · ▏▕ · ▏ …    each with up to 250 descriptors
//! ```
//!
//! The peer has the same user, but may be another version, or die at any byte: sizes are bounded,
//! and every receive has a deadline. Independent of the content of messages.

use std::{
    cell::Cell,
    io::{self, ErrorKind, IoSlice, IoSliceMut, Read as _, Write as _},
    mem::MaybeUninit,
    net::Shutdown,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use nix::{
    sys::socket::{
        self, getsockopt,
        sockopt::{PeerCredentials, SockType},
    },
    unistd::{Uid, User, geteuid},
};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::{Serialize, de::DeserializeOwned};

/// Maximum bytes of JSON: a thousand for each of a hundred thousand clients.
const MAX_JSON_BYTES: u64 = 128 << 20;
/// Maximum bytes that clients have sent and no server has parsed.
const MAX_BYTES: u64 = 16 << 30;
const MAX_DESCRIPTORS: u64 = 1 << 20;
/// Descriptors per message; the kernel allows 253 (SCM_MAX_FD).
const DESCRIPTORS_PER_MESSAGE: usize = 250;

/// One end of the connection.
#[derive(Debug)]
pub(super) struct UpgradeChannel(UnixStream);

/// Bytes and descriptors of a message.
#[derive(Debug, Default)]
pub(super) struct MessageAttachments {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl MessageAttachments {
    /// Reader of the bytes and descriptors, in the order of the message.
    pub(super) fn pieces(&mut self) -> AttachmentReader<'_> {
        AttachmentReader { bytes: &self.bytes, descriptors: self.descriptors.drain(..) }
    }
}

/// Remaining bytes and descriptors of a message.
pub(super) struct AttachmentReader<'a> {
    bytes: &'a [u8],
    descriptors: std::vec::Drain<'a, OwnedFd>,
}

impl<'a> AttachmentReader<'a> {
    /// Takes the next bytes.
    pub(super) fn bytes(&mut self, count: usize) -> anyhow::Result<&'a [u8]> {
        let (taken, rest) =
            self.bytes.split_at_checked(count).context("fewer bytes arrived than announced")?;
        self.bytes = rest;
        Ok(taken)
    }

    /// Takes the next descriptor.
    pub(super) fn descriptor(&mut self) -> anyhow::Result<OwnedFd> {
        self.descriptors.next().context("fewer descriptors arrived than announced")
    }

    /// Takes the next `count` descriptors.
    pub(super) fn descriptors(&mut self, count: usize) -> anyhow::Result<Vec<OwnedFd>> {
        ensure!(self.descriptors.len() >= count, "fewer descriptors arrived than announced");
        Ok(self.descriptors.by_ref().take(count).collect())
    }
}

/// User and process of the peer.
fn peer(socket: &UnixStream) -> Option<(Uid, u32)> {
    let peer = getsockopt(socket, PeerCredentials).ok()?;
    Some((Uid::from_raw(peer.uid()), u32::try_from(peer.pid()).ok()?))
}

fn is_trusted(user: Uid) -> bool {
    user.is_root() || user == geteuid()
}

/// Fails unless the listener is root, the own user, or `user`, as which the new process continues.
/// The daemon of another user could pass sockets to which this process would then export images.
pub(super) fn check_listener(socket: &UnixStream, user: Option<&str>) -> anyhow::Result<()> {
    let (listener, _) = peer(socket).context("the user of the socket is unknown")?;
    let named = user.and_then(|name| match name.parse() {
        Ok(number) => Some(Uid::from_raw(number)),
        Err(_) => User::from_name(name).ok().flatten().map(|user| user.uid),
    });
    ensure!(
        is_trusted(listener) || named == Some(listener),
        "the daemon there runs as another user, {listener} (it must run as root, as this user or as --user)"
    );
    Ok(())
}

impl From<UpgradeChannel> for OwnedFd {
    fn from(channel: UpgradeChannel) -> Self {
        channel.0.into()
    }
}

impl UpgradeChannel {
    /// Creates a channel and the descriptor of its other end.
    pub(super) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (here, there) = UnixStream::pair()?;
        Ok((Self(here), there.into()))
    }

    /// Channel over a socket that a peer passed; fails if the peer is of another user.
    pub(super) fn from_passed(socket: OwnedFd) -> anyhow::Result<Self> {
        // Any descriptor may be passed, so its type is checked first.
        let kind = getsockopt(&socket, SockType).context("the passed descriptor is not a socket")?;
        ensure!(kind == socket::SockType::Stream, "the passed descriptor is not a stream socket");
        let socket = UnixStream::from(socket);
        // The flag belongs to the open file description, and the peer may have set it.
        socket.set_nonblocking(false)?;
        let (user, _) = peer(&socket).context("the user of the socket is unknown")?;
        ensure!(is_trusted(user), "it belongs to another user (only root and the daemon's user can upgrade)");
        Ok(Self(socket))
    }

    /// Duplicates this end.
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }

    /// Process id of the peer.
    pub(super) fn process(&self) -> Option<u32> {
        peer(&self.0).map(|(_, process)| process)
    }

    /// Sends a message, on another thread.
    pub(super) async fn send_in_background<T: Serialize + Send + 'static>(
        self,
        message: T,
        bytes: Vec<u8>,
        descriptors: Vec<OwnedFd>,
    ) -> anyhow::Result<Self> {
        reactor::run_blocking(move || {
            self.send(&message, &bytes, &descriptors)?;
            Ok(self)
        })
        .await
    }

    /// Sends a message on this thread.
    pub(super) fn send_now<T: Serialize>(&self, message: &T) -> anyhow::Result<()> {
        self.send(message, &[], &[])
    }

    /// Receives a message on another thread; fails after the timeout.
    pub(super) async fn receive_in_background<T: DeserializeOwned + Send + 'static>(
        self,
        timeout: Duration,
    ) -> anyhow::Result<(Self, T, MessageAttachments)> {
        reactor::run_blocking(move || {
            let (message, attachments) = self.receive(timeout)?;
            Ok((self, message, attachments))
        })
        .await
    }

    /// Receives a message on this thread; fails after the timeout.
    pub(super) fn receive_now<T: DeserializeOwned>(
        self,
        timeout: Duration,
    ) -> anyhow::Result<(Self, T, MessageAttachments)> {
        let (message, attachments) = self.receive(timeout)?;
        Ok((self, message, attachments))
    }

    /// As [`UpgradeChannel::receive_in_background`]. After a failure the peer cannot have sent the
    /// message: either it is received here, or sending it fails there.
    pub(super) async fn receive_or_close<T: DeserializeOwned + Send + 'static>(
        self,
        timeout: Duration,
    ) -> anyhow::Result<(Self, T, MessageAttachments)> {
        reactor::run_blocking(move || {
            let (message, attachments) = self.receive_or(timeout, DeadlineAction::Close)?;
            Ok((self, message, attachments))
        })
        .await
    }

    /// Waits until the peer has closed the connection, at most for the timeout.
    pub(super) async fn wait_for_end(self, timeout: Duration) {
        reactor::run_blocking(move || {
            let _ = self.0.set_read_timeout(Some(timeout));
            let _ = (&self.0).read(&mut [0]);
        })
        .await;
    }

    fn send<T: Serialize>(&self, message: &T, bytes: &[u8], descriptors: &[OwnedFd]) -> anyhow::Result<()> {
        let text = serde_json::to_vec(message)?;
        let mut socket = &self.0;
        // A timeout for each write; a peer that reads slowly but steadily is tolerated.
        socket.set_write_timeout(Some(SEND_TIMEOUT))?;
        for number in [text.len(), bytes.len(), descriptors.len()] {
            socket.write_all(&(number as u64).to_le_bytes())?;
        }
        socket.write_all(&text)?;
        socket.write_all(bytes)?;
        // One byte for each batch: SCM_RIGHTS needs at least one byte of data (unix(7)).
        for batch in descriptors.chunks(DESCRIPTORS_PER_MESSAGE) {
            send_with(socket, b".", batch)?;
        }
        Ok(())
    }

    fn receive<T: DeserializeOwned>(&self, timeout: Duration) -> anyhow::Result<(T, MessageAttachments)> {
        self.receive_or(timeout, DeadlineAction::Fail)
    }

    fn receive_or<T: DeserializeOwned>(
        &self,
        timeout: Duration,
        at_last: DeadlineAction,
    ) -> anyhow::Result<(T, MessageAttachments)> {
        let reader = DeadlineReader {
            socket: &self.0,
            end: Cell::new(Instant::now() + timeout),
            on_deadline: Cell::new(at_last),
        };
        let [text, bytes, count] = [reader.read_number()?, reader.read_number()?, reader.read_number()?];
        ensure!(
            text <= MAX_JSON_BYTES && bytes <= MAX_BYTES && count <= MAX_DESCRIPTORS,
            "the peer sent an invalid message"
        );
        let text = reader.read_bytes(text)?;
        let bytes = reader.read_bytes(bytes)?;
        let mut descriptors = Vec::new();
        while (descriptors.len() as u64) < count {
            let expected = (count - descriptors.len() as u64).min(DESCRIPTORS_PER_MESSAGE as u64) as usize;
            let batch = reader.read_descriptors()?;
            // The kernel drops descriptors beyond this process's limit without an error.
            ensure!(
                batch.len() >= expected,
                "descriptors are missing: {count} were sent (`ulimit -n` or LimitNOFILE= must be larger)"
            );
            // The batch size is fixed, so an excess is a protocol error.
            ensure!(batch.len() == expected, "the peer sent more descriptors than announced");
            descriptors.extend(batch);
        }
        let message = serde_json::from_slice(&text).context("the message of the peer cannot be parsed")?;
        Ok((message, MessageAttachments { bytes, descriptors }))
    }
}

/// Receives one message with a deadline for all of it: a peer that sends single bytes must not
/// extend the wait.
struct DeadlineReader<'a> {
    socket: &'a UnixStream,
    end: Cell<Instant>,
    on_deadline: Cell<DeadlineAction>,
}

/// Action at the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeadlineAction {
    Fail,
    /// Shuts the connection down, so that the peer can send no more, then reads the data already in
    /// the receive queue: it may hold the rest of a partially read message.
    Close,
}

impl io::Read for &DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.set_remaining_timeout()?;
            let mut socket = self.socket;
            match socket.read(buffer) {
                // Timed out: `set_remaining_timeout` decides whether that is final.
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }
}

impl DeadlineReader<'_> {
    fn set_remaining_timeout(&self) -> io::Result<()> {
        // Recomputed before every system call, so that the deadline covers the whole message.
        let mut left = self.end.get().saturating_duration_since(Instant::now());
        if left.is_zero() {
            if self.on_deadline.replace(DeadlineAction::Fail) == DeadlineAction::Fail {
                return Err(ErrorKind::WouldBlock.into());
            }
            // Data that has arrived remains readable after a shutdown of a Unix socket.
            self.socket.shutdown(Shutdown::Both)?;
            // For the data in the receive queue; no more can arrive.
            left = SEND_TIMEOUT;
            self.end.set(Instant::now() + left);
        }
        self.socket.set_read_timeout(Some(left))
    }

    fn read_number(&self) -> io::Result<u64> {
        let mut number = [0; 8];
        let mut reader = self;
        reader.read_exact(&mut number).map_err(readable_error)?;
        Ok(u64::from_le_bytes(number))
    }

    /// Reads `count` bytes. Allocates as they arrive: `count` is not trusted.
    fn read_bytes(&self, count: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.take(count).read_to_end(&mut bytes).map_err(readable_error)?;
        if bytes.len() as u64 == count { Ok(bytes) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }

    fn read_descriptors(&self) -> anyhow::Result<Vec<OwnedFd>> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let flags = RecvFlags::CMSG_CLOEXEC;
        self.set_remaining_timeout().map_err(readable_error)?;
        let received = recvmsg(self.socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)
            .map_err(|errno| readable_error(errno.into()))?;
        ensure!(received.bytes == 1, "the peer disconnected while sending descriptors");
        let passed = control.drain().flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
            _ => Vec::new(),
        });
        Ok(passed.collect())
    }
}

/// Sends bytes, with up to 250 descriptors on the first; returns the number of bytes sent.
pub(super) fn send_with(socket: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) -> anyhow::Result<usize> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(OwnedFd::as_fd).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_MESSAGE))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "too many descriptors at once");
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Time limit for the peer to read a message.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// Error for users: the kernel reports a timeout as EAGAIN.
fn readable_error(error: io::Error) -> io::Error {
    match error.kind() {
        ErrorKind::WouldBlock => io::Error::new(ErrorKind::TimedOut, "no answer in time"),
        ErrorKind::UnexpectedEof => {
            io::Error::new(ErrorKind::UnexpectedEof, "the peer has closed the connection")
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Seek as _};

    use super::*;

    fn pair() -> (UpgradeChannel, UpgradeChannel) {
        let (one, other) = UnixStream::pair().unwrap();
        (UpgradeChannel(one), UpgradeChannel(other))
    }

    #[test]
    fn text_bytes_and_many_descriptors_arrive() {
        let (one, other) = pair();
        let file = tempfile::tempfile().unwrap();
        // Three batches: 250, 250 and 100.
        let descriptors: Vec<OwnedFd> = (0..600).map(|_| file.try_clone().unwrap().into()).collect();
        let sending = std::thread::spawn(move || {
            one.send(&"hello", &[7; 300_000], &descriptors).unwrap();
            one.send(&[1, 2], &[], &[]).unwrap();
        });
        let (text, attachments): (String, _) = other.receive(SEND_TIMEOUT).unwrap();
        assert_eq!((text.as_str(), attachments.bytes), ("hello", vec![7; 300_000]));
        assert_eq!(attachments.descriptors.len(), 600);
        File::from(attachments.descriptors.into_iter().next_back().unwrap()).write_all(b"x").unwrap();
        assert_eq!((&file).stream_position().unwrap(), 1, "the same open file");
        let (numbers, _): (Vec<u32>, _) = other.receive(SEND_TIMEOUT).unwrap();
        assert_eq!(numbers, [1, 2]);
        sending.join().unwrap();
    }

    #[test]
    fn message_sent_in_time_is_received_after_the_deadline() {
        const OVER: Duration = Duration::ZERO;
        let text = serde_json::to_vec("yours").unwrap();
        let message = [[text.len() as u64, 0, 0].map(u64::to_le_bytes).concat(), text].concat();
        // The deadline passes after each number of bytes.
        for read in 0..message.len() {
            let (one, other) = pair();
            one.send(&"yours", &[], &[]).unwrap();
            let reader = DeadlineReader {
                socket: &other.0,
                end: Cell::new(Instant::now() + SEND_TIMEOUT),
                on_deadline: Cell::new(DeadlineAction::Close),
            };
            assert_eq!(reader.read_bytes(read as u64).unwrap(), message[..read]);
            reader.end.set(Instant::now() + OVER);
            assert_eq!(reader.read_bytes((message.len() - read) as u64).unwrap(), message[read..]);
            one.send(&"more", &[], &[]).unwrap_err();
        }
        // After a partial message the rest cannot be sent.
        let (one, other) = pair();
        (&one.0).write_all(&message[..9]).unwrap();
        other.receive_or::<String>(OVER, DeadlineAction::Close).unwrap_err();
        (&one.0).write_all(&message[9..]).unwrap_err();
    }

    #[test]
    fn closed_invalid_and_silent_peers_are_errors() {
        let error_of = |bytes: &[u8]| {
            let (one, other) = pair();
            (&one.0).write_all(bytes).unwrap();
            drop(one);
            format!("{:#}", other.receive::<String>(SEND_TIMEOUT).unwrap_err())
        };
        assert_eq!(error_of(b""), "the peer has closed the connection");
        assert_eq!(error_of(&[0; 23]), "the peer has closed the connection");
        assert_eq!(error_of(&[255; 24]), "the peer sent an invalid message");
        let lengths = |text: u64, count: u64| [text, 0, count].map(u64::to_le_bytes).concat();
        assert!(error_of(&[lengths(2, 0), b"{}".to_vec()].concat()).contains("cannot be parsed"));
        assert_eq!(error_of(&[lengths(100 << 20, 0), b"\"".to_vec()].concat()), "unexpected end of file");
        assert!(error_of(&[lengths(2, 1), b"\"\".".to_vec()].concat()).contains("descriptors are missing"));
        let (_one, other) = pair();
        let error = other.receive::<String>(Duration::from_millis(1)).unwrap_err();
        assert_eq!(error.to_string(), "no answer in time");
        // A peer that sends bytes faster than the deadline, of a message that never ends.
        let (slow, other) = pair();
        let slow = std::thread::spawn(move || while (&slow.0).write_all(&[1]).is_ok() {});
        let end = Instant::now() + Duration::from_millis(50);
        let reader = DeadlineReader {
            socket: &other.0,
            end: Cell::new(end),
            on_deadline: Cell::new(DeadlineAction::Fail),
        };
        let late = reader.read_bytes(u64::MAX).unwrap_err();
        assert_eq!(late.to_string(), "no answer in time");
        drop(other);
        slow.join().unwrap();
    }
}
