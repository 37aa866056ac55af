//! TLS for connections on this thread, with the keys and the protocol's code of NBD's.
//!
//! ```text
//!   socket ─► feed ─►┌───────────────────┐─► read ──► requests
//!                    │ export::nbd's TLS │
//!   socket ◄─────────└───────────────────┘◄─ write ◄─ answers
//! ```

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use export::nbd::{TlsRead, TlsServer, TlsStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connections::Stream;

/// Ciphertext that is received at a time, in bytes.
const AT_ONCE: usize = 16 << 10;

/// A connection that is encrypted.
pub(super) struct Encrypted {
    stream: Box<dyn Stream>,
    tls: TlsStream,
    /// Ciphertext that could not be fed yet, from `start` on.
    received: Vec<u8>,
    start: usize,
    has_ended: bool,
    is_closing: bool,
}

/// Waits until the client has said hello as it has to.
pub(super) async fn accept(stream: Box<dyn Stream>, keys: &TlsServer) -> io::Result<Encrypted> {
    let tls = keys.accept().map_err(io::Error::other)?;
    let mut new =
        Encrypted { stream, tls, received: Vec::new(), start: 0, has_ended: false, is_closing: false };
    poll_fn(|context| new.shake_hands(context)).await?;
    Ok(new)
}

impl Encrypted {
    fn shake_hands(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let done = self.tls.handshake().map_err(io::Error::other);
            // Also why it failed.
            ready!(self.send(context))?;
            if done? {
                return Poll::Ready(Ok(()));
            }
            ready!(self.receive(context))?;
            if self.has_ended {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    /// Feeds some more, at least a byte unless there are none any more.
    fn receive(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.start == self.received.len() {
            self.received.resize(AT_ONCE, 0);
            let mut into = ReadBuf::new(&mut self.received);
            let received = Pin::new(&mut self.stream).poll_read(context, &mut into);
            let count = into.filled().len();
            self.received.truncate(count);
            self.start = 0;
            ready!(received)?;
            self.has_ended = count == 0;
        }
        self.start += self.tls.feed(&self.received[self.start..]);
        Poll::Ready(Ok(()))
    }

    /// All that is outgoing.
    fn send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.tls.outgoing().is_empty() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(context, self.tls.outgoing()))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.tls.sent(sent);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Encrypted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if into.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            match this.tls.read(into.initialize_unfilled()).map_err(io::Error::other)? {
                TlsRead::Bytes(count) => {
                    into.advance(count);
                    return Poll::Ready(Ok(()));
                }
                TlsRead::Closed => return Poll::Ready(Ok(())),
                TlsRead::NeedInput => {}
            }
            // Reading may have to answer; who takes no answers is found when something is written.
            if let Poll::Ready(Err(error)) = this.send(context) {
                return Poll::Ready(Err(error));
            }
            ready!(this.receive(context))?;
            if this.has_ended {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }
}

impl AsyncWrite for Encrypted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        // Room first: what is taken cannot be given back.
        ready!(self.send(context))?;
        Poll::Ready(self.tls.write(bytes).map_err(io::Error::other))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.send(context))?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !std::mem::replace(&mut self.is_closing, true) {
            self.tls.close();
        }
        ready!(self.send(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
