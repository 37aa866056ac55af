//! One connection's TLS as a value: ciphertext in and out, plaintext on the other side. No socket.
//!
//! ```text
//!   socket ──► feed ──►┌─────────┐──► read ──► handshake, requests
//!                      │ OpenSSL │
//!   socket ◄─ outgoing └─────────┘◄── write ◄─ replies
//! ```
//!
//! OpenSSL runs over two bounded queues in memory and reports that it would block where one is
//! empty.

use openssl::{
    error::ErrorStack,
    ssl::{ErrorCode, Ssl, SslRef, SslStream, SslVerifyMode},
    x509::X509VerifyResult,
};
use std::io;

/// Ciphertext kept in each direction, in bytes: four records of the largest size (RFC 8446 §5.2).
const MAX_QUEUE_BYTES: usize = 4 * RECORD_BYTES;
/// The largest TLS record with its overhead.
const RECORD_BYTES: usize = (16 << 10) + 512;
/// Plaintext that is encrypted in one call: one record.
const MAX_WRITE_BYTES: usize = 16 << 10;

/// What is wrong with a TLS connection.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("TLS: {0}")]
    OpenSsl(#[from] ErrorStack),
    /// The peer broke the protocol, or did not prove who it is.
    #[error("TLS: {0}")]
    Peer(#[from] openssl::ssl::Error),
    /// The peer's certificate is not taken.
    #[error("TLS: certificate verify failed: {0}")]
    Certificate(&'static str),
    /// The peer wants more than is done at once.
    #[error("TLS: {0}")]
    Limit(&'static str),
}

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    start: usize,
}

impl Queue {
    fn waiting(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 && self.bytes.len() + bytes.len() > self.bytes.capacity() {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn drop_front(&mut self, count: usize) {
        self.start += count.min(self.bytes.len() - self.start);
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }
}

/// What OpenSSL takes for its socket.
#[derive(Debug, Default)]
struct Wire {
    incoming: Queue,
    outgoing: Queue,
}

impl io::Read for Wire {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let waiting = self.incoming.waiting();
        let count = waiting.len().min(into.len());
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        into[..count].copy_from_slice(&waiting[..count]);
        self.incoming.drop_front(count);
        Ok(count)
    }
}

impl io::Write for Wire {
    /// Takes everything: the bound is kept by [`TlsStream::write`], because a write OpenSSL could
    /// not finish would have to be repeated with the same bytes.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What [`TlsStream::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsRead {
    /// So many bytes of plaintext, at least 1.
    Bytes(usize),
    /// Feed more ciphertext first.
    NeedInput,
    /// The peer said that it sends nothing more. A connection that ends without it was cut.
    Closed,
}

/// One end of a TLS connection. After each call but [`TlsStream::feed`] there may be
/// ciphertext to send ([`TlsStream::outgoing`]), also after a failure: the alert that says why.
#[derive(Debug)]
pub struct TlsStream {
    stream: SslStream<Wire>,
}

impl TlsStream {
    /// The server's end, of a connection prepared as `ssl`.
    ///
    /// # Errors
    /// OpenSSL's.
    pub(crate) fn server(mut ssl: Ssl) -> Result<Self, TlsError> {
        ssl.set_accept_state();
        Ok(Self { stream: SslStream::new(ssl, Wire::default())? })
    }

    /// The client's end, of a connection prepared as `ssl`.
    ///
    /// # Errors
    /// OpenSSL's.
    pub(crate) fn client(mut ssl: Ssl) -> Result<Self, TlsError> {
        ssl.set_connect_state();
        Ok(Self { stream: SslStream::new(ssl, Wire::default())? })
    }

    /// Takes ciphertext and returns how much of it: less than all once reading lags behind.
    pub fn feed(&mut self, ciphertext: &[u8]) -> usize {
        let incoming = &mut self.stream.get_mut().incoming;
        let count = ciphertext.len().min(MAX_QUEUE_BYTES.saturating_sub(incoming.waiting().len()));
        incoming.push(&ciphertext[..count]);
        count
    }

    /// Ciphertext to send; tell [`TlsStream::sent`] how much of it went out.
    pub fn outgoing(&self) -> &[u8] {
        self.stream.get_ref().outgoing.waiting()
    }

    /// So many bytes of [`TlsStream::outgoing`] were sent.
    pub fn sent(&mut self, count: usize) {
        self.stream.get_mut().outgoing.drop_front(count);
    }

    /// True once the TLS handshake is complete, false where it needs more input. An error is final:
    /// send what is outgoing and close.
    pub fn handshake(&mut self) -> Result<bool, TlsError> {
        match self.stream.do_handshake() {
            Ok(()) => Ok(true),
            Err(error) if error.code() == ErrorCode::WANT_READ => Ok(false),
            Err(error) => {
                let ssl = self.stream.ssl();
                match ssl.verify_result() {
                    result if result != X509VerifyResult::OK && ssl.verify_mode() != SslVerifyMode::NONE => {
                        Err(TlsError::Certificate(result.error_string()))
                    }
                    _ => Err(error.into()),
                }
            }
        }
    }

    /// Decrypts into `plaintext`, which is not empty. One feed may hold many records.
    pub fn read(&mut self, plaintext: &mut [u8]) -> Result<TlsRead, TlsError> {
        // Reading may answer (alerts, key updates), and the peer may not take the answers.
        if self.outgoing().len() > 2 * MAX_QUEUE_BYTES {
            return Err(TlsError::Limit("the peer sends, but takes no answers"));
        }
        match self.stream.ssl_read(plaintext) {
            Ok(0) => Ok(TlsRead::NeedInput),
            Ok(count) => Ok(TlsRead::Bytes(count)),
            Err(error) => match error.code() {
                ErrorCode::WANT_READ => Ok(TlsRead::NeedInput),
                ErrorCode::ZERO_RETURN => Ok(TlsRead::Closed),
                _ => Err(error.into()),
            },
        }
    }

    /// Encrypts from the front of `plaintext` and returns how much of it: less than all where what
    /// is outgoing has to be sent first.
    pub fn write(&mut self, plaintext: &[u8]) -> Result<usize, TlsError> {
        let mut written = 0;
        while written < plaintext.len() && self.outgoing().len() < MAX_QUEUE_BYTES {
            let rest = &plaintext[written..];
            written += self.stream.ssl_write(&rest[..rest.len().min(MAX_WRITE_BYTES)])?;
        }
        Ok(written)
    }

    /// The connection as OpenSSL knows it: who the peer is, once the handshake is complete.
    pub fn ssl(&self) -> &SslRef {
        self.stream.ssl()
    }

    /// Tells the peer that nothing more comes; send what is outgoing, then close the socket.
    pub fn close(&mut self) {
        // It is being closed anyway.
        let _ = self.stream.shutdown();
    }
}
