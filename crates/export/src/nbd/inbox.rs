//! Bytes received and not yet parsed. One receive may bring many requests.

use std::io;

use super::stream::Stream;
use block::buffer::Buffer;

/// Received at a time: what a Unix socket holds by default.
const INBOX_BYTES: usize = 256 << 10;

#[derive(Debug)]
pub(super) struct Inbox {
    /// `None` while the kernel has it.
    buffer: Option<Buffer>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self { buffer: Some(Buffer::new(INBOX_BYTES)), start: 0, end: 0 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer[self.start..self.end])
    }

    pub(super) fn consume(&mut self, count: usize) {
        assert!(count <= self.end - self.start, "consuming more than was received");
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Receives more behind what is there. False when the client has closed.
    pub(super) async fn fill(&mut self, stream: &Stream) -> io::Result<bool> {
        let mut buffer = self.buffer.take().expect("one receive at a time");
        if self.start > 0 {
            // Only the beginning of a request's header is ever left, so this moves a few bytes.
            buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let (result, buffer) = stream.receive(buffer, self.end).await;
        self.buffer = Some(buffer);
        let count = result?;
        self.end += count;
        Ok(count > 0)
    }

    /// The next `length` bytes: what is here is copied, the rest is received in place.
    pub(super) async fn payload(&mut self, length: usize, stream: &Stream) -> io::Result<Buffer> {
        let mut payload = Buffer::new(length);
        let mut filled = self.take(&mut payload);
        while filled < length {
            let (result, buffer) = stream.receive(payload, filled).await;
            payload = buffer;
            match result? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        Ok(payload)
    }

    /// Whether a payload of this length needs no receiving.
    pub(super) fn holds(&self, length: usize) -> bool {
        self.end - self.start >= length
    }

    pub(super) async fn skip(&mut self, mut length: usize, stream: &Stream) -> io::Result<()> {
        loop {
            let here = length.min(self.bytes().len());
            self.consume(here);
            length -= here;
            if length == 0 {
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
