//! Queue of replies. All replies that are ready when the socket is free leave in one message,
//! headers and payloads as separate segments.
//!
//! ```text
//!   headers   ▕ h1 │ h2 │ h3 │ h4 ▏        written one behind the other into one block
//!   payloads        ▕─ d2 ─▏   ▕─ d4 ─▏    as the storage filled them
//!   message   ▕ h1 h2 ▏▕─ d2 ─▏▕ h3 h4 ▏▕─ d4 ─▏
//! ```
//!
//! Also counts a client's requests and bytes in flight, from acceptance until the reply was sent.
//! That bounds the memory of a client that does not read its replies.

use std::cell::{Cell, RefCell};

use super::reply::ReplyHeader;
use reactor::{
    Signal,
    buffer::{IoBuffer, Segments},
};

/// Bound on the requests of a client in flight; QEMU's server allows 16.
pub(super) const MAX_REQUESTS: usize = 512;
/// Bound on the payload of a client in flight, in bytes: two requests of the largest size.
pub(super) const MAX_BYTES: usize = 64 << 20;
/// Bytes of unsent replies above which no further request is started. Storage in memory would
/// otherwise answer a whole batch into cold buffers before the first byte is sent: 16 MiB for
/// nbdcopy, at a little over half the throughput.
const MAX_READY: usize = 256 << 10;
const HEADER_BLOCK: usize = 4096;
/// Largest number of segments of one message; the kernel takes at most 1024 (IOV_MAX). A payload
/// with more segments is split over several messages.
const MAX_SEGMENTS: usize = 1000;

#[derive(Debug, Default)]
pub(super) struct ReplyBatch {
    pub(super) segments: Segments,
    pub(super) requests: usize,
    pub(super) bytes: usize,
}

#[derive(Debug, Default)]
struct OutboxQueue {
    full: std::collections::VecDeque<ReplyBatch>,
    /// Excludes the headers that are still in `headers`.
    open: ReplyBatch,
    headers: Option<IoBuffer>,
    /// Bytes used in `headers`.
    written: usize,
}

#[derive(Debug, Default)]
pub(super) struct NbdOutbox {
    queue: RefCell<OutboxQueue>,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    /// Bytes of replies that are queued or being sent.
    ready: Cell<usize>,
    /// Raised when a reply is queued or no further one will be.
    pub(super) changed: Signal,
    /// Raised when a message was sent.
    pub(super) room: Signal,
}

impl NbdOutbox {
    /// True if a request with this payload may be accepted. A client without requests in flight may
    /// always send one.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.requests.get() == 0
            || (self.requests.get() < MAX_REQUESTS && self.bytes.get() + bytes <= MAX_BYTES)
    }

    pub(super) fn count_in(&self, bytes: usize) {
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
    }

    /// True if enough reply bytes are ready that starting more requests would only queue more.
    pub(super) fn is_congested(&self) -> bool {
        self.ready.get() >= MAX_READY
    }

    #[cfg(test)]
    pub(super) fn in_flight(&self) -> (usize, usize) {
        (self.requests.get(), self.bytes.get())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.requests.get() == 0
    }

    /// True if the message covers every request in flight.
    pub(super) fn covers_all(&self, message: &ReplyBatch) -> bool {
        self.requests.get() == message.requests
    }

    pub(super) fn push_header(&self, header: &ReplyHeader, bytes: usize) {
        self.push(header.as_bytes(), Segments::default(), 1, bytes);
    }

    /// Queues a reply: its header, then its payload. `bytes` were counted in by
    /// [`NbdOutbox::count_in`].
    pub(super) fn push_data(&self, header: &ReplyHeader, payload: Segments, bytes: usize) {
        self.push(header.as_bytes(), payload, 1, bytes);
    }

    /// Queues a part of a reply. The caller queues the last part by another function
    /// before it yields, so that no other reply comes between.
    pub(super) fn push_part(&self, header: &ReplyHeader, payload: Segments) {
        self.push(header.as_bytes(), payload, 0, 0);
    }

    /// Queues an encoded reply: errors with messages, and block status.
    pub(super) fn push_bytes(&self, reply: &[u8], bytes: usize) {
        // Short replies share the header block; a long one gets a buffer, or it would waste the
        // block.
        if reply.len() <= HEADER_BLOCK / 8 {
            self.push(reply, Segments::default(), 1, bytes);
        } else {
            self.push(&[], IoBuffer::copy_of(reply).into(), 1, bytes);
        }
    }

    fn push(&self, header: &[u8], payload: Segments, requests: usize, bytes: usize) {
        // Counted before the message is built, so that the reader sees congestion at once.
        self.ready.set(self.ready.get() + header.len() + payload.len());
        {
            let mut queue = self.queue.borrow_mut();
            queue.close_if_full();
            queue.write_header(header);
            if !payload.is_empty() {
                queue.close_headers();
                for segment in payload {
                    queue.close_if_full();
                    queue.open.segments.push(segment);
                }
            }
            queue.open.requests += requests;
            queue.open.bytes += bytes;
        }
        self.changed.raise();
    }

    /// Removes all ready replies as one message; `None` if there is none.
    pub(super) fn take_batch(&self) -> Option<ReplyBatch> {
        let mut queue = self.queue.borrow_mut();
        if let Some(message) = queue.full.pop_front() {
            return Some(message);
        }
        queue.close_headers();
        (queue.open.requests > 0).then(|| std::mem::take(&mut queue.open))
    }

    /// Counts out a sent message: its `requests` and `bytes`, and its length on the wire.
    pub(super) fn sent(&self, requests: usize, bytes: usize, length: usize) {
        self.requests.set(self.requests.get() - requests);
        self.bytes.set(self.bytes.get() - bytes);
        self.ready.set(self.ready.get() - length);
        self.room.raise();
    }
}

impl OutboxQueue {
    fn write_header(&mut self, header: &[u8]) {
        // A header is never split over two blocks.
        if self.headers.as_ref().is_some_and(|block| block.len() - self.written < header.len()) {
            self.close_headers();
            self.headers = None;
        }
        let block = self.headers.get_or_insert_with(|| IoBuffer::new(HEADER_BLOCK));
        block[self.written..self.written + header.len()].copy_from_slice(header);
        self.written += header.len();
    }

    /// Begins another message if this one cannot take three more segments: the headers before a
    /// payload, the payload's segment and the headers behind it.
    fn close_if_full(&mut self) {
        if self.open.segments.as_slice().len() + 3 > MAX_SEGMENTS {
            self.close_headers();
            self.full.push_back(std::mem::take(&mut self.open));
        }
    }

    /// Moves the headers written so far into the message; later headers use the rest of the block.
    fn close_headers(&mut self) {
        if self.written == 0 {
            return;
        }
        let Some(mut block) = self.headers.take() else { return };
        let rest = block.split_off(self.written);
        self.open.segments.push(block);
        self.written = 0;
        self.headers = (!rest.is_empty()).then_some(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(message: &ReplyBatch) -> Vec<u8> {
        let mut bytes = vec![0; message.segments.len()];
        message.segments.copy_to(&mut bytes);
        bytes
    }

    /// All queued bytes, in messages that the kernel accepts.
    fn drained(outbox: &NbdOutbox) -> Vec<u8> {
        let mut sent = Vec::new();
        while let Some(message) = outbox.take_batch() {
            assert!(message.segments.as_slice().len() <= 1024);
            sent.extend(text(&message));
            outbox.sent(message.requests, message.bytes, message.segments.len());
        }
        assert!(outbox.is_idle());
        sent
    }

    #[test]
    fn headers_without_payload_share_a_segment() {
        let outbox = NbdOutbox::default();
        for _ in 0..3 {
            outbox.count_in(2);
        }
        outbox.push_bytes(b"one ", 2);
        outbox.push_bytes(b"two ", 2);
        outbox.push(b"three ", IoBuffer::copy_of(b"data").into(), 1, 2);
        let message = outbox.take_batch().expect("three replies");
        assert_eq!(text(&message), b"one two three data");
        assert_eq!(message.segments.as_slice().len(), 2);
        assert!(!outbox.is_idle());
        outbox.sent(message.requests, message.bytes, message.segments.len());
        assert!(outbox.is_idle());
        assert!(outbox.take_batch().is_none());
    }

    #[test]
    fn many_replies_make_several_messages() {
        let outbox = NbdOutbox::default();
        let mut expected = Vec::new();
        for number in 0..3000_u32 {
            outbox.count_in(4);
            outbox.push(&number.to_be_bytes(), IoBuffer::copy_of(&number.to_le_bytes()).into(), 1, 4);
            expected.extend(number.to_be_bytes());
            expected.extend(number.to_le_bytes());
        }
        assert_eq!(drained(&outbox), expected);
    }

    #[test]
    fn a_payload_of_many_pieces_makes_several_messages() {
        let outbox = NbdOutbox::default();
        let mut expected = Vec::new();
        for length in [999, 3000, 1, 1000] {
            let bytes: Vec<u8> = (0..length).map(|number| number as u8).collect();
            let mut payload = Segments::default();
            bytes.iter().for_each(|byte| payload.push(IoBuffer::copy_of(&[*byte])));
            outbox.count_in(length);
            outbox.push(b"head", payload, 1, length);
            expected.extend(b"head");
            expected.extend(bytes);
        }
        assert_eq!(drained(&outbox), expected);
        assert_eq!(outbox.ready.get(), 0);
    }

    #[test]
    fn single_client_may_always_send_one_request() {
        let outbox = NbdOutbox::default();
        assert!(outbox.has_room(usize::MAX));
        outbox.count_in(MAX_BYTES);
        assert!(!outbox.has_room(1));
    }
}
