//! Queue of requests to send, in order; at most one for each caller. All queued requests are sent
//! in one message.

use std::collections::VecDeque;

use super::super::proto;
use reactor::buffer::{IoBuffer, Segment, Segments};

/// Maximum number of segments in one message; the kernel's limit is 1024 (IOV_MAX).
const MAX_SEGMENTS: usize = 1000;

#[derive(Debug, Default)]
pub(super) struct Outgoing {
    /// Headers after everything in `segments`.
    headers: Vec<u8>,
    segments: VecDeque<Segment>,
}

impl Outgoing {
    /// Appends a request ("Request message", compact).
    pub(super) fn push(
        &mut self,
        command: u16,
        flags: u16,
        cookie: u64,
        offset: u64,
        length: u32,
        payload: Option<Segments>,
    ) {
        let mut header = [0; proto::REQUEST_BYTES];
        header[..4].copy_from_slice(&proto::REQUEST_MAGIC.to_be_bytes());
        header[4..6].copy_from_slice(&flags.to_be_bytes());
        header[6..8].copy_from_slice(&command.to_be_bytes());
        header[8..16].copy_from_slice(&cookie.to_be_bytes());
        header[16..24].copy_from_slice(&offset.to_be_bytes());
        header[24..].copy_from_slice(&length.to_be_bytes());
        self.headers.extend_from_slice(&header);
        if let Some(payload) = payload {
            // A payload must follow its own header, so the headers so far become a segment.
            self.end_headers();
            self.segments.extend(payload);
        }
    }

    pub(super) fn take(&mut self) -> Option<Segments> {
        self.end_headers();
        // The rest follows in the next message.
        let count = self.segments.len().min(MAX_SEGMENTS);
        let mut message = Segments::default();
        self.segments.drain(..count).for_each(|segment| message.push(segment));
        (count > 0).then_some(message)
    }

    fn end_headers(&mut self) {
        if !self.headers.is_empty() {
            self.segments.push_back(IoBuffer::copy_of(&self.headers).into());
            self.headers.clear();
        }
    }
}
