//! What a client sends, received in large pieces and handed out in small ones.
//!
//! One receive usually brings many requests. A large payload goes past this buffer straight into
//! its own; the buffer never exceeds [`CAPACITY`] bytes.

use std::io;

use compio::buf::{BufResult, IntoInner, IoBuf, IoBufMut};
use compio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use compio::net::UnixStream;

use crate::buffer::View;

/// 32 writes of 4 KiB with room to spare.
const CAPACITY: usize = 256 << 10;

pub(crate) struct Inbox {
    stream: UnixStream,
    /// Those before `taken` have been handed out.
    bytes: Vec<u8>,
    taken: usize,
}

impl Inbox {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self { stream, bytes: Vec::with_capacity(CAPACITY), taken: 0 }
    }

    pub(crate) fn stream(&self) -> UnixStream {
        self.stream.clone()
    }

    /// `None` where the client closed the connection before the first byte.
    pub(crate) async fn next<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        if !self.fill(N).await? {
            return Ok(None);
        }
        let start = self.taken;
        self.taken += N;
        Ok(self.bytes[start..].first_chunk().copied())
    }

    /// As [`Inbox::next`], where the client has no reason to close.
    pub(crate) async fn expect<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        self.next().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// The caller bounds `length`.
    pub(crate) async fn bytes(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let buffered = self.drain_into(&mut bytes);
        let BufResult(outcome, rest) = self.stream.read_exact(bytes.slice(buffered..)).await;
        outcome.map(|()| rest.into_inner())
    }

    /// First from the buffer, then directly from the socket.
    pub(crate) async fn read_payload(&mut self, mut payload: View) -> io::Result<View> {
        let buffered = self.drain_into(&mut payload);
        if buffered == payload.len() {
            return Ok(payload);
        }
        let BufResult(outcome, rest) = self.stream.read_exact(payload.slice(buffered..)).await;
        outcome.map(|()| rest.into_inner())
    }

    /// For the negotiation, where nothing else is sending.
    pub(crate) async fn send(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.stream.write_all(bytes).await.0
    }

    fn drain_into(&mut self, target: &mut [u8]) -> usize {
        let ready = &self.bytes[self.taken..];
        let count = ready.len().min(target.len());
        target[..count].copy_from_slice(&ready[..count]);
        self.taken += count;
        count
    }

    /// False where the connection closed before the first byte.
    async fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        while self.bytes.len() - self.taken < wanted {
            // At most `wanted - 1` bytes move, and usually none.
            self.bytes.drain(..self.taken);
            self.taken = 0;
            let bytes = std::mem::take(&mut self.bytes);
            let BufResult(outcome, view) = self.stream.read(bytes.uninit()).await;
            self.bytes = view.into_inner();
            match outcome? {
                0 if self.bytes.is_empty() => return Ok(false),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                _ => {}
            }
        }
        Ok(true)
    }
}
