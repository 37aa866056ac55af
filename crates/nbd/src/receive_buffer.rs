//! Received bytes that are not parsed yet. One receive may return many requests.

use std::{io, sync::Arc};

use super::stream::NbdStream;
use reactor::{
    buffer::IoBuffer,
    memory::{ConnectionMemory, MemoryBudget},
};

/// Receive size during the handshake, and for a client that sends little: a hundred requests
/// without payload.
pub const SMALL_BYTES: usize = 4 << 10;
/// Receive size for a client one of whose last receives returned more than half of
/// [`SMALL_BYTES`]. Not larger: each of a thousand busy clients has a buffer. Not smaller: in front
/// of an NBD server, a receive of half this size gathers fewer writes for each message.
pub const USUAL_BYTES: usize = 64 << 10;
/// Receive size for a busy server: a number of replies with data.
const REPLIES_BYTES: usize = 256 << 10;
/// Number of smaller receives in succession that switch back to the small size. A client that
/// alternates reads and writes keeps the larger size, because each change costs a receive.
const QUIET_RECEIVES: u8 = 64;

/// Receive buffer of one stream.
#[derive(Debug)]
pub struct ReceiveBuffer {
    /// `None` while a receive is in flight.
    buffer: Option<IoBuffer>,
    start: usize,
    end: usize,
    /// Size for a busy peer; [`SMALL_BYTES`] during the handshake.
    busy_bytes: usize,
    is_busy: bool,
    /// Budget that the size for a busy peer is charged to; `None` on the client side.
    budget: Option<Arc<MemoryBudget>>,
    /// The charge, while that size is in use.
    charge: Option<ConnectionMemory>,
    /// Number of small receives in succession.
    quiet: u8,
    /// Length of the last receive.
    received: usize,
    /// Received part of a payload whose receive was interrupted.
    unfinished: Vec<u8>,
    /// Number of bytes to skip.
    skip_bytes: usize,
}

impl ReceiveBuffer {
    /// Creates the buffer of a handshake.
    // No `Default`: the size is that of a handshake, which the caller should state.
    #[allow(clippy::new_without_default, reason = "it is for a handshake, and says so")]
    pub fn new() -> Self {
        Self {
            busy_bytes: SMALL_BYTES,
            is_busy: false,
            budget: None,
            charge: None,
            quiet: 0,
            buffer: Some(IoBuffer::new(SMALL_BYTES)),
            start: 0,
            end: 0,
            received: 0,
            unfinished: Vec::new(),
            skip_bytes: 0,
        }
    }

    /// Creates the buffer of a connection that continues: it starts with `bytes`, and skips the
    /// next `skip` received ones.
    pub fn with_content(bytes: &[u8], skip: usize) -> Self {
        let mut inbox = Self::new();
        // A continued connection may bring more bytes than the buffer of a handshake holds.
        if bytes.len() > SMALL_BYTES {
            inbox.buffer = Some(IoBuffer::new(bytes.len()));
        }
        if let Some(buffer) = &mut inbox.buffer {
            buffer[..bytes.len()].copy_from_slice(bytes);
        }
        Self { end: bytes.len(), skip_bytes: skip, ..inbox }
    }

    /// Removes the state of an interrupted receive: the partial payload, the bytes behind it, and
    /// the number of bytes still to skip.
    pub fn take_rest(&mut self) -> (Vec<u8>, Vec<u8>, usize) {
        let received = self.bytes().to_vec();
        self.consume(received.len());
        (std::mem::take(&mut self.unfinished), received, std::mem::take(&mut self.skip_bytes))
    }

    /// Adapts the receive size to the client from now on, after the handshake. A size above
    /// [`SMALL_BYTES`] is charged to `budget`, and is not used while the budget is exhausted.
    pub fn adapt_to_requests(&mut self, budget: &Arc<MemoryBudget>) {
        self.busy_bytes = USUAL_BYTES;
        self.budget = Some(Arc::clone(budget));
    }

    /// Adapts the receive size to the server from now on, after the handshake.
    pub fn adapt_to_replies(&mut self) {
        self.busy_bytes = REPLIES_BYTES;
    }

    /// Makes the next receive a small one: no reply is outstanding.
    pub fn expect_nothing(&mut self) {
        (self.is_busy, self.charge, self.received) = (false, None, 0);
    }

    /// Chooses the size of the next buffer by the length of the last receive.
    fn adapt(&mut self) -> usize {
        if self.received > SMALL_BYTES / 2 {
            self.quiet = 0;
            if !self.is_busy {
                let more_bytes = (self.busy_bytes - SMALL_BYTES) as u64;
                self.charge =
                    self.budget.as_ref().and_then(|budget| ConnectionMemory::new(budget, more_bytes));
                self.is_busy = self.budget.is_none() || self.charge.is_some();
            }
        } else if self.is_busy {
            self.quiet += 1;
            if self.quiet == QUIET_RECEIVES {
                (self.is_busy, self.charge) = (false, None);
            }
        }
        if self.is_busy { self.busy_bytes } else { SMALL_BYTES }
    }

    /// The bytes that are not consumed yet.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[self.start..self.end])
    }

    /// Consumes the first `count` bytes.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "consuming more than was received");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives more bytes. Returns false if the peer has closed the stream.
    ///
    /// # Errors
    /// As reported by the stream.
    pub async fn fill(&mut self, stream: &NbdStream) -> io::Result<bool> {
        let mut buffer = self.buffer.take().expect("one receive at a time");
        // At most the beginning of a request or an option is left, so this moves a few bytes.
        let idle_bytes = self.adapt();
        let unread = self.end - self.start;
        let capacity = if unread < idle_bytes {
            idle_bytes
        } else if unread < buffer.len() {
            buffer.len()
        } else {
            2 * unread
        };
        // A buffer that has the right size already is reused.
        if capacity == buffer.len() {
            buffer.copy_within(self.start..self.end, 0);
        } else {
            let mut other = IoBuffer::new(capacity);
            other[..self.end - self.start].copy_from_slice(&buffer[self.start..self.end]);
            buffer = other;
        }
        (self.start, self.end) = (0, self.end - self.start);
        let (result, buffer) = stream.receive(buffer, self.end).await;
        self.buffer = Some(buffer);
        let count = result?;
        self.end += count;
        self.received = count;
        Ok(count > 0)
    }

    /// Returns the next `length` bytes: buffered bytes are copied, the rest is received in place.
    ///
    /// # Errors
    /// As reported by the stream; `UnexpectedEof` if it ends before.
    pub async fn payload(&mut self, length: usize, stream: &NbdStream) -> io::Result<IoBuffer> {
        self.payload_in_parts(length, stream, |_| {}).await
    }

    /// As [`ReceiveBuffer::payload`]; calls `on_progress` with the length of each received part.
    ///
    /// # Errors
    /// As [`ReceiveBuffer::payload`].
    pub async fn payload_in_parts(
        &mut self,
        length: usize,
        stream: &NbdStream,
        on_progress: impl Fn(usize),
    ) -> io::Result<IoBuffer> {
        let mut payload = IoBuffer::new(length);
        let mut filled = self.take(&mut payload);
        on_progress(filled);
        while filled < length {
            let (result, buffer) = stream.receive(payload, filled).await;
            payload = buffer;
            match result {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    filled += count;
                    on_progress(count);
                }
                Err(error) => {
                    // Kept for `take_rest`: another process may continue the connection here.
                    self.unfinished = payload[..filled].to_vec();
                    return Err(error);
                }
            }
        }
        Ok(payload)
    }

    /// True if a payload of this length is buffered already.
    pub fn has_payload(&self, length: usize) -> bool {
        self.end - self.start >= length
    }

    /// Skips the next `length` bytes.
    ///
    /// # Errors
    /// As reported by the stream; `UnexpectedEof` if it ends before.
    pub async fn skip(&mut self, length: usize, stream: &NbdStream) -> io::Result<()> {
        self.skip_bytes += length;
        loop {
            let skipped = self.skip_bytes.min(self.bytes().len());
            self.consume(skipped);
            self.skip_bytes -= skipped;
            if self.skip_bytes == 0 {
                return Ok(());
            }
            if !self.fill(stream).await? {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    fn take(&mut self, target: &mut [u8]) -> usize {
        let count = target.len().min(self.bytes().len());
        target[..count].copy_from_slice(&self.bytes()[..count]);
        self.consume(count);
        count
    }
}
