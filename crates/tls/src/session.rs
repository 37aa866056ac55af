//! TLS state of one connection as a value: ciphertext in and out on one side, plaintext on the
//! other. Has no socket.
//!
//! ```text
//!   socket ──► feed ──►┌─────────┐──► read ──► handshake, requests
//!                      │ OpenSSL │
//!   socket ◄─ outgoing └─────────┘◄── write ◄─ replies
//! ```
//!
//! OpenSSL reads and writes two queues in memory instead of a socket. An empty input queue makes
//! it return that it would block.

use openssl::{
    error::ErrorStack,
    ssl::{ErrorCode, Ssl, SslRef, SslStream, SslVerifyMode},
    x509::X509VerifyResult,
};
use std::io;

// Bytes of ciphertext per direction: four records of the largest size (RFC 8446 section 5.2).
const MAX_QUEUE_BYTES: usize = 4 * RECORD_BYTES;
// Largest TLS record with its overhead.
const RECORD_BYTES: usize = (16 << 10) + 512;
// Plaintext per call of OpenSSL: one record.
const MAX_WRITE_BYTES: usize = 16 << 10;

/// Fault of a TLS connection.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("TLS: {0}")]
    OpenSsl(#[from] ErrorStack),
    /// The peer violated the protocol or failed to authenticate.
    #[error("TLS: {0}")]
    Peer(#[from] openssl::ssl::Error),
    /// Verification of the peer's certificate failed.
    #[error("TLS: certificate verify failed: {0}")]
    Certificate(&'static str),
    /// The peer exceeded a bound.
    #[error("TLS: {0}")]
    Limit(&'static str),
}

#[derive(Debug, Default)]
struct CiphertextQueue {
    bytes: Vec<u8>,
    start: usize,
}

impl CiphertextQueue {
    fn waiting(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    fn push(&mut self, bytes: &[u8]) {
        // Moves the unread bytes to the front only where the vector would otherwise grow.
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

// Transport of OpenSSL in place of a socket.
#[derive(Debug, Default)]
struct MemoryTransport {
    incoming: CiphertextQueue,
    outgoing: CiphertextQueue,
}

impl io::Read for MemoryTransport {
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

impl io::Write for MemoryTransport {
    /// Accepts all bytes. [`TlsStream::write`] enforces the bound, because OpenSSL requires that
    /// an incomplete write is repeated with the same bytes (SSL_write(3)).
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Result of [`TlsStream::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsRead {
    /// Number of bytes of plaintext, at least 1.
    Bytes(usize),
    /// More ciphertext must be fed first.
    NeedInput,
    /// The peer sent close_notify (RFC 8446 section 6.1). A connection that ends without it was
    /// truncated.
    Closed,
}

/// One end of a TLS connection. After each call except [`TlsStream::feed`], ciphertext may be
/// ready to send ([`TlsStream::outgoing`]): after a failure, the alert with the reason.
#[derive(Debug)]
pub struct TlsStream {
    stream: SslStream<MemoryTransport>,
}

impl TlsStream {
    /// Server's end of a connection.
    ///
    /// # Errors
    /// Fails if OpenSSL does.
    pub(crate) fn server(mut ssl: Ssl) -> Result<Self, TlsError> {
        ssl.set_accept_state();
        Ok(Self { stream: SslStream::new(ssl, MemoryTransport::default())? })
    }

    /// Client's end of a connection.
    ///
    /// # Errors
    /// Fails if OpenSSL does.
    pub(crate) fn client(mut ssl: Ssl) -> Result<Self, TlsError> {
        ssl.set_connect_state();
        Ok(Self { stream: SslStream::new(ssl, MemoryTransport::default())? })
    }

    /// Queues ciphertext for OpenSSL. Returns the number of bytes accepted, which is less than all
    /// if the caller does not read fast enough.
    pub fn feed(&mut self, ciphertext: &[u8]) -> usize {
        let incoming = &mut self.stream.get_mut().incoming;
        let count = ciphertext.len().min(MAX_QUEUE_BYTES.saturating_sub(incoming.waiting().len()));
        incoming.push(&ciphertext[..count]);
        count
    }

    /// Ciphertext to send. The caller then reports the number of bytes sent to
    /// [`TlsStream::sent`].
    pub fn outgoing(&self) -> &[u8] {
        self.stream.get_ref().outgoing.waiting()
    }

    /// Removes this number of bytes from [`TlsStream::outgoing`].
    pub fn sent(&mut self, count: usize) {
        self.stream.get_mut().outgoing.drop_front(count);
    }

    /// Advances the handshake. Returns true once it is complete, and false if it needs more input.
    /// After an error, the caller sends the outgoing bytes and closes.
    pub fn handshake(&mut self) -> Result<bool, TlsError> {
        match self.stream.do_handshake() {
            Ok(()) => Ok(true),
            Err(error) if error.code() == ErrorCode::WANT_READ => Ok(false),
            Err(error) => {
                // The general error of OpenSSL hides the reason why a certificate was rejected.
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

    /// Decrypts into `plaintext`, which must not be empty. One call of [`TlsStream::feed`] may
    /// supply several records.
    pub fn read(&mut self, plaintext: &mut [u8]) -> Result<TlsRead, TlsError> {
        // OpenSSL answers some records while it reads (alerts, key updates). A peer that never
        // receives the replies must not make the queue grow without bound.
        if self.outgoing().len() > 2 * MAX_QUEUE_BYTES {
            return Err(TlsError::Limit("the peer sends, but does not receive replies"));
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

    /// Encrypts from the front of `plaintext`. Returns the number of bytes encrypted, which is
    /// less than all if outgoing bytes must be sent first.
    pub fn write(&mut self, plaintext: &[u8]) -> Result<usize, TlsError> {
        let mut written = 0;
        while written < plaintext.len() && self.outgoing().len() < MAX_QUEUE_BYTES {
            let rest = &plaintext[written..];
            written += self.stream.ssl_write(&rest[..rest.len().min(MAX_WRITE_BYTES)])?;
        }
        Ok(written)
    }

    /// OpenSSL's view of the connection: the peer's identity, once the handshake is complete.
    pub fn ssl(&self) -> &SslRef {
        self.stream.ssl()
    }

    /// Queues close_notify for the peer. The caller sends the outgoing bytes, then closes the
    /// socket.
    pub fn close(&mut self) {
        // The connection ends in any case.
        let _ = self.stream.shutdown();
    }
}
