//! Bytes received and not yet parsed. One receive may bring many requests.

use std::io;

use super::stream::Stream;
use crate::buffer::Buffer;

/// Received at a time from a client that may have nothing to say: all that an idle one costs.
const IDLE_BYTES: usize = 32 << 10;
/// The same during the handshake, when nobody knows yet who it is.
const HANDSHAKE_BYTES: usize = 4 << 10;
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
        let idle_bytes = HANDSHAKE_BYTES;
        Self {
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

    /// For the requests behind the handshake, as far as they have not arrived.
    pub fn await_requests(&mut self) {
        self.idle_bytes = IDLE_BYTES;
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
        let mut payload = Buffer::new(length);
        let mut filled = self.take(&mut payload);
        while filled < length {
            let (result, buffer) = stream.receive(payload, filled).await;
            payload = buffer;
            match result {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
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
