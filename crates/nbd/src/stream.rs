//! The bidirectional byte stream to the peer: a socket, TLS over a socket, or a simulated pipe.
//!
//! One task receives and one task sends; both may do so at the same time.

use std::{cell::RefCell, io};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::socket::{Shutdown, shutdown},
};

use super::pipe::Pipe;
use reactor::{
    buffer::{IoBuffer, Segments},
    operation::{self, Fd},
};
use std::os::fd::{AsFd, AsRawFd};
use tls::{TlsError, TlsRead, TlsStream};

/// Receive size of ciphertext, in bytes.
const CIPHERTEXT_BYTES: usize = 64 << 10;

/// Transport of a connection.
#[derive(Debug)]
pub enum NbdStream {
    /// A socket without encryption.
    Plain(Fd),
    /// TLS over a socket.
    Tls {
        /// The socket.
        fd: Fd,
        /// State of the TLS session.
        tls: RefCell<Box<TlsStream>>,
    },
    /// A pipe of the simulation.
    Simulated(Pipe),
}

impl NbdStream {
    /// Receives behind the first `filled` bytes of `buffer`; 0 if the peer has closed the stream.
    pub async fn receive(&self, buffer: IoBuffer, filled: usize) -> (io::Result<usize>, IoBuffer) {
        match self {
            Self::Plain(fd) => operation::receive(fd, buffer, filled).await,
            Self::Tls { fd, tls } => receive_tls(fd, tls, buffer, filled).await,
            Self::Simulated(pipe) => pipe.receive(buffer, filled).await,
        }
    }

    /// Sends everything.
    ///
    /// # Errors
    /// The socket's error; a part may have been sent.
    pub async fn send(&self, segments: Segments) -> io::Result<()> {
        match self {
            Self::Plain(fd) => send_plain(fd, segments).await,
            Self::Tls { fd, tls } => {
                for segment in segments.iter() {
                    encrypt(fd, tls, &segment.bytes()).await?;
                }
                Ok(())
            }
            Self::Simulated(pipe) => pipe.send(segments).await,
        }
    }

    /// As [`NbdStream::send`], for data that the peer should process early: it is submitted before
    /// the current turn of the reactor ends.
    ///
    /// # Errors
    /// As [`NbdStream::send`].
    pub async fn send_now(&self, mut segments: Segments) -> io::Result<()> {
        if let Self::Plain(fd) = self {
            // A socket usually accepts everything at once; the rest is sent below.
            let (result, unsent) = operation::send_now(fd, segments).await;
            segments = unsent;
            segments.advance(sent_bytes(result)?);
        }
        self.send(segments).await
    }

    /// Bytes, with the kernel's overhead, that the client has not read yet. Available for Unix
    /// sockets only; for TCP it counts the bytes that the peer's *kernel* has not acknowledged.
    pub fn unread_bytes(&self) -> usize {
        match self {
            Self::Plain(fd) | Self::Tls { fd, .. } => operation::unread_bytes(fd).unwrap_or(0),
            Self::Simulated(_) => 0,
        }
    }

    /// True if the client has closed its sending side. Does not consume data that has arrived.
    pub fn is_closed_by_peer(&self) -> bool {
        match self {
            Self::Plain(fd) | Self::Tls { fd, .. } => {
                let mut polled = [PollFd::new(fd.as_fd(), PollFlags::from_bits_retain(libc::POLLRDHUP))];
                poll(&mut polled, PollTimeout::ZERO).is_ok_and(|count| count > 0)
            }
            Self::Simulated(_) => false,
        }
    }

    /// Interrupts the receive of this thread, which returns the available bytes, or `ECANCELED`.
    /// Not while a send is in flight.
    pub fn interrupt(&self) {
        match self {
            Self::Plain(fd) | Self::Tls { fd, .. } => operation::cancel_all_on(fd),
            Self::Simulated(pipe) => pipe.interrupt(),
        }
    }

    /// True if it is encrypted.
    pub fn is_tls(&self) -> bool {
        matches!(self, Self::Tls { .. })
    }

    /// Ends all receiving and sending.
    pub fn close(&self) {
        match self {
            Self::Plain(fd) | Self::Tls { fd, .. } => shut_down(fd),
            Self::Simulated(pipe) => pipe.close(),
        }
    }

    /// The socket, if there is one.
    pub fn socket(&self) -> Option<&Fd> {
        match self {
            Self::Plain(fd) | Self::Tls { fd, .. } => Some(fd),
            Self::Simulated(_) => None,
        }
    }

    /// State of the TLS session, if there is one.
    pub fn tls(&self) -> Option<&RefCell<Box<TlsStream>>> {
        match self {
            Self::Tls { tls, .. } => Some(tls),
            _ => None,
        }
    }

    /// Sends TLS's closure alert (`close_notify`); does nothing without TLS.
    pub async fn finish(&self) {
        if let Self::Tls { fd, tls } = self {
            tls.borrow_mut().close();
            let _ = send_outgoing(fd, tls).await;
        }
    }

    /// Starts TLS, as client or server; `received` are the bytes received after the agreement to
    /// start.
    ///
    /// # Errors
    /// Errors of the handshake and of the socket.
    pub async fn start_tls(self, tls: TlsStream, mut received: &[u8]) -> Result<Self, TlsFailure> {
        let Self::Plain(fd) = self else { return Err(TlsFailure::NotPlain) };
        let tls = RefCell::new(Box::new(tls));
        loop {
            // Ciphertext received with the agreement comes first, then the socket's.
            let consumed = tls.borrow_mut().feed(received);
            received = &received[consumed..];
            let progress = tls.borrow_mut().handshake();
            // Sent also after a failure: the alert tells the peer the reason.
            send_outgoing(&fd, &tls).await?;
            if progress? {
                break;
            }
            if received.is_empty() {
                feed_from_socket(&fd, &tls).await?;
            }
        }
        // The peer may send data directly after its last handshake message.
        let consumed = tls.borrow_mut().feed(received);
        if consumed < received.len() {
            return Err(TlsFailure::Flood);
        }
        Ok(Self::Tls { fd, tls })
    }
}

/// Ends all receiving and sending on a socket.
pub fn shut_down(socket: &Fd) {
    // Fails only if the peer has closed already.
    let _ = shutdown(socket.as_fd().as_raw_fd(), Shutdown::Both);
}

/// Reason of a failed TLS handshake.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum TlsFailure {
    #[error("TLS cannot be started: the stream is not a plain socket")]
    NotPlain,
    #[error("the peer sent more behind its TLS handshake than fits")]
    Flood,
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Socket(#[from] io::Error),
}

async fn send_plain(fd: &Fd, mut segments: Segments) -> io::Result<()> {
    while !segments.is_empty() {
        let (result, unsent) = operation::send(fd, segments).await;
        segments = unsent;
        segments.advance(sent_bytes(result)?);
    }
    Ok(())
}

/// Number of bytes sent; 0 if a signal interrupted the call.
fn sent_bytes(sent: io::Result<usize>) -> io::Result<usize> {
    match sent {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        sent => sent,
    }
}

async fn encrypt(fd: &Fd, tls: &RefCell<Box<TlsStream>>, mut plaintext: &[u8]) -> io::Result<()> {
    while !plaintext.is_empty() {
        let written = tls.borrow_mut().write(plaintext).map_err(io::Error::other)?;
        plaintext = &plaintext[written..];
        // Sent after each write, so that the session buffers a bounded amount.
        send_outgoing(fd, tls).await?;
    }
    Ok(())
}

async fn send_outgoing(fd: &Fd, tls: &RefCell<Box<TlsStream>>) -> io::Result<()> {
    let outgoing = {
        let mut tls = tls.borrow_mut();
        let outgoing = IoBuffer::copy_of(tls.outgoing());
        tls.sent(outgoing.len());
        outgoing
    };
    send_plain(fd, outgoing.into()).await
}

async fn feed_from_socket(fd: &Fd, tls: &RefCell<Box<TlsStream>>) -> io::Result<()> {
    let (result, buffer) = operation::receive(fd, IoBuffer::new(CIPHERTEXT_BYTES), 0).await;
    let count = result?;
    if count == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let consumed = tls.borrow_mut().feed(&buffer[..count]);
    // The session is drained before more is fed, so one receive always fits.
    assert_eq!(consumed, count, "the queue of ciphertext holds less than one receive");
    Ok(())
}

async fn receive_tls(
    fd: &Fd,
    tls: &RefCell<Box<TlsStream>>,
    mut buffer: IoBuffer,
    filled: usize,
) -> (io::Result<usize>, IoBuffer) {
    loop {
        let outcome = tls.borrow_mut().read(&mut buffer[filled..]);
        let result = match outcome {
            Ok(TlsRead::Bytes(count)) => Ok(count),
            Ok(TlsRead::Closed) => Ok(0),
            Err(error) => Err(io::Error::other(error)),
            Ok(TlsRead::NeedInput) => match feed_from_socket(fd, tls).await {
                Ok(()) => continue,
                Err(error) => Err(error),
            },
        };
        return (result, buffer);
    }
}
