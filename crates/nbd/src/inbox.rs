//! Bytes received and not yet parsed. One receive may bring many requests.

use std::{io, sync::Arc};

use super::stream::Stream;
use reactor::{
    buffer::Buffer,
    memory::{Budget, ConnectionMemory},
};

/// Receive size during the handshake, and for a client that sends little. A hundred requests
/// without payload fit.
pub const SMALL_BYTES: usize = 4 << 10;
/// Receive size for a client whose last receives returned more than half of [`SMALL_BYTES`].
pub const USUAL_BYTES: usize = 32 << 10;
/// Number of smaller receives in succession that switch back to the small size. A client that
/// alternates reads and writes keeps the larger size, because each change costs a receive.
const QUIET_RECEIVES: u8 = 64;
/// Received at a time from a client that has sent so much: what a Unix socket holds by default.
const BUSY_BYTES: usize = 256 << 10;

/// Of one stream.
#[derive(Debug)]
pub struct Inbox {
    /// `None` while the kernel has it.
    buffer: Option<Buffer>,
    start: usize,
    end: usize,
    /// The size of a buffer that waits for the client.
    idle_bytes: usize,
    /// Budget that [`USUAL_BYTES`] are charged to; `None` during the handshake and on the client
    /// side.
    budget: Option<Arc<Budget>>,
    /// The charge, while [`USUAL_BYTES`] are in use.
    larger: Option<ConnectionMemory>,
    /// Number of small receives in succession.
    quiet: u8,
    /// What the last receive brought.
    received: usize,
    /// What has come of a payload whose receiving ended early.
    unfinished: Vec<u8>,
    /// Still to be dropped.
    to_skip: usize,
}

impl Inbox {
    /// For a handshake.
    // No default: what it is for says its size.
    #[allow(clippy::new_without_default, reason = "it is for a handshake, and says so")]
    pub fn new() -> Self {
        let idle_bytes = SMALL_BYTES;
        Self {
            budget: None,
            larger: None,
            quiet: 0,
            buffer: Some(Buffer::new(idle_bytes)),
            start: 0,
            end: 0,
            idle_bytes,
            received: 0,
            unfinished: Vec::new(),
            to_skip: 0,
        }
    }

    /// Of a connection that goes on: it begins with those bytes, and drops the next `skip`.
    pub fn holding(bytes: &[u8], skip: usize) -> Self {
        let mut inbox = Self::new();
        if bytes.len() > inbox.idle_bytes {
            inbox.buffer = Some(Buffer::new(bytes.len()));
        }
        if let Some(buffer) = &mut inbox.buffer {
            buffer[..bytes.len()].copy_from_slice(bytes);
        }
        Self { end: bytes.len(), to_skip: skip, ..inbox }
    }

    /// What an interrupted receiving leaves: what there is of a payload, what comes behind it, and
    /// how much is still to be dropped.
    pub fn rest(&mut self) -> (Vec<u8>, Vec<u8>, usize) {
        let behind = self.bytes().to_vec();
        self.consume(behind.len());
        (std::mem::take(&mut self.unfinished), behind, std::mem::take(&mut self.to_skip))
    }

    /// Adapts the receive size to the client from now on, after the handshake. A size above
    /// [`SMALL_BYTES`] is charged to `budget`.
    pub fn await_requests(&mut self, budget: &Arc<Budget>) {
        self.budget = Some(Arc::clone(budget));
    }

    /// Chooses the size of the next buffer by the length of the last receive. It remains small
    /// while memory is used up.
    fn adapt(&mut self) {
        let Some(budget) = &self.budget else { return };
        if self.received > SMALL_BYTES / 2 {
            self.quiet = 0;
            if self.larger.is_none() {
                self.larger = ConnectionMemory::new(budget, (USUAL_BYTES - SMALL_BYTES) as u64);
            }
        } else if self.larger.is_some() {
            self.quiet += 1;
            if self.quiet == QUIET_RECEIVES {
                self.larger = None;
            }
        }
        self.idle_bytes = if self.larger.is_some() { USUAL_BYTES } else { SMALL_BYTES };
    }

    /// What is there.
    pub fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[self.start..self.end])
    }

    /// Forgets the first `count` bytes.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "consuming more than was received");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives more behind what is there. False when the other end has closed.
    ///
    /// # Errors
    /// The stream's.
    pub async fn fill(&mut self, stream: &Stream) -> io::Result<bool> {
        let mut buffer = self.buffer.take().expect("one receive at a time");
        // Only the beginning of a request is ever left, or of an option, so this moves a few bytes.
        self.adapt();
        let room = self.room(stream);
        if room == buffer.len() {
            buffer.copy_within(self.start..self.end, 0);
        } else {
            let mut other = Buffer::new(room);
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

    /// The size of the buffer for the next receive: a large one where more is known to wait, so
    /// that none is held for a client that has nothing to say.
    fn room(&self, stream: &Stream) -> usize {
        let left = self.end - self.start;
        let waiting = if self.received >= self.idle_bytes / 2 { stream.waiting_bytes() } else { 0 };
        if left + waiting > self.idle_bytes {
            BUSY_BYTES
        } else if left == self.idle_bytes {
            2 * left
        } else {
            self.idle_bytes
        }
    }

    /// The next `length` bytes: what is here is copied, the rest is received in place.
    ///
    /// # Errors
    /// The stream's, or its end.
    pub async fn payload(&mut self, length: usize, stream: &Stream) -> io::Result<Buffer> {
        self.payload_in_parts(length, stream, |_| {}).await
    }

    /// The same; `moved` is called with the length of each part that is there.
    ///
    /// # Errors
    /// The stream's, or its end.
    pub async fn payload_in_parts(
        &mut self,
        length: usize,
        stream: &Stream,
        moved: impl Fn(usize),
    ) -> io::Result<Buffer> {
        let mut payload = Buffer::new(length);
        let mut filled = self.take(&mut payload);
        moved(filled);
        while filled < length {
            let (result, buffer) = stream.receive(payload, filled).await;
            payload = buffer;
            match result {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    filled += count;
                    moved(count);
                }
                Err(error) => {
                    self.unfinished = payload[..filled].to_vec();
                    return Err(error);
                }
            }
        }
        Ok(payload)
    }

    /// Whether a payload of this length needs no receiving.
    pub fn holds(&self, length: usize) -> bool {
        self.end - self.start >= length
    }

    /// Drops the next `length` bytes.
    ///
    /// # Errors
    /// The stream's, or its end.
    pub async fn skip(&mut self, length: usize, stream: &Stream) -> io::Result<()> {
        self.to_skip += length;
        loop {
            let here = self.to_skip.min(self.bytes().len());
            self.consume(here);
            self.to_skip -= here;
            if self.to_skip == 0 {
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
