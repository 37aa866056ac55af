//! Replies of the transmission phase, in each of the three styles.
//!
//! Headers are small arrays and payloads are not copied: the connection sends both with one
//! `writev`. Errors with a message and block status are appended to a buffer of the caller.
//!
//! ```text
//!  simple      magic errno cookie                              16 bytes, then the data of a READ
//!  structured  magic flags type cookie length                  20 bytes, then the chunk
//!  extended    magic flags type cookie offset length           32 bytes, then the chunk
//!  chunks      data: offset, bytes │ hole: offset, length │ error: errno, message │ status: context, extents
//! ```
//!
//! Once chunks are negotiated every reply is a chunk, also where the specification allows a simple
//! reply. The last chunk of a reply has the flag DONE (`last` in the functions below).

use super::context::MetaContext;
use super::errno::Errno;
use super::proto::{self, reply_flag, reply_type};
use super::request::StatusQuery;
use super::session::{NbdSession, ReplyStyle, RequestTag};
use super::wire;

/// Longest extent of a 32-bit chunk, in bytes: a multiple of every possible minimum block.
const MAX_EXTENT_32: u64 = u32::MAX as u64 & !0xffff;

/// Header before a payload, or a whole reply.
#[derive(Clone, Copy, Debug)]
pub struct ReplyHeader {
    bytes: [u8; Self::MAX_BYTES],
    length: u8,
}

impl ReplyHeader {
    /// Longest header: an extended one with the fields of a hole.
    pub const MAX_BYTES: usize = 44;

    const fn new() -> Self {
        Self { bytes: [0; Self::MAX_BYTES], length: 0 }
    }

    /// Appends a field. Callers stay within [`ReplyHeader::MAX_BYTES`].
    fn put<const N: usize>(mut self, field: [u8; N]) -> Self {
        let start = usize::from(self.length);
        self.bytes[start..start + N].copy_from_slice(&field);
        self.length += N as u8;
        self
    }

    /// Encoded bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

/// One extent of a block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdExtent {
    /// Length in bytes.
    pub length: u64,
    /// Flags of the context: [`proto::state`] for `base:allocation`.
    pub flags: u32,
}

/// Encoder of one session's replies.
#[derive(Clone, Copy, Debug)]
pub struct NbdReplyEncoder {
    style: ReplyStyle,
    max_extents: usize,
}

impl NbdReplyEncoder {
    /// Creates the encoder for requests of this session.
    pub fn new(session: &NbdSession) -> Self {
        let extent_bytes = if session.style == ReplyStyle::Extended { 16 } else { 8 };
        // The variable part of a chunk must not exceed the payload bound either ("Structured reply
        // types").
        let fitting = session.maximum_payload as usize / extent_bytes;
        Self { style: session.style, max_extents: fitting.clamp(1, proto::MAX_EXTENTS) }
    }

    /// Success without a payload: every command except READ and BLOCK_STATUS, and empty reads.
    pub fn success(self, tag: RequestTag) -> ReplyHeader {
        match self.style {
            ReplyStyle::Simple => simple(tag, 0),
            _ => self.chunk(tag, reply_type::NONE, 0, true),
        }
    }

    /// Header before `length` bytes of data read at `offset`. A simple reply has one header for the
    /// whole request. With chunks `length` is from 1 to `u32::MAX - 8`, and may be a part of the
    /// request unless the client set DF.
    pub fn data(self, tag: RequestTag, offset: u64, length: u32, last: bool) -> ReplyHeader {
        match self.style {
            ReplyStyle::Simple => simple(tag, 0),
            _ => self
                .chunk(tag, reply_type::OFFSET_DATA, u64::from(length) + 8, last)
                .put(offset.to_be_bytes()),
        }
    }

    /// Chunk that reports `length` bytes at `offset` of a READ without DF as zero; `length` is at
    /// least 1. `None` in the simple style.
    pub fn hole(self, tag: RequestTag, offset: u64, length: u32, last: bool) -> Option<ReplyHeader> {
        self.style.has_chunks().then(|| {
            self.chunk(tag, reply_type::OFFSET_HOLE, 12, last)
                .put(offset.to_be_bytes())
                .put(length.to_be_bytes())
        })
    }

    /// Appends an error reply to `out`; `message` is clipped to 4096 bytes.
    pub fn error(self, tag: RequestTag, errno: Errno, message: &str, out: &mut Vec<u8>) {
        let message = wire::truncated(message);
        self.error_chunk(tag, reply_type::ERROR, 6, errno, message, out);
    }

    /// [`NbdReplyEncoder::error`] with the offset of the failed byte, which lies in the request's
    /// range.
    pub fn error_at(self, tag: RequestTag, errno: Errno, message: &str, offset: u64, out: &mut Vec<u8>) {
        self.error_chunk(tag, reply_type::ERROR_OFFSET, 14, errno, wire::truncated(message), out);
        if self.style.has_chunks() {
            out.extend_from_slice(&offset.to_be_bytes());
        }
    }

    fn error_chunk(
        self,
        tag: RequestTag,
        kind: u16,
        fixed: usize,
        errno: Errno,
        message: &str,
        out: &mut Vec<u8>,
    ) {
        if self.style == ReplyStyle::Simple {
            out.extend_from_slice(simple(tag, errno.code()).as_bytes());
            return;
        }
        out.extend_from_slice(self.chunk(tag, kind, (fixed + message.len()) as u64, true).as_bytes());
        out.extend_from_slice(&errno.code().to_be_bytes());
        // Cannot truncate: a clipped message is at most 4096 bytes.
        out.extend_from_slice(&(message.len() as u16).to_be_bytes());
        out.extend_from_slice(message.as_bytes());
    }

    /// Appends one context's block status to `out`: consecutive `extents` from the query's offset.
    ///
    /// Omits extents past the requested length, all but the first with `one`, lengths that 32 bits
    /// cannot hold, and extents past 2²⁰. If none is left, the range is reported as allocated data,
    /// which is always correct. Appends nothing in the simple style, whose sessions have no
    /// contexts.
    pub fn block_status(
        self,
        tag: RequestTag,
        query: &StatusQuery,
        context: MetaContext,
        extents: &[NbdExtent],
        last: bool,
        out: &mut Vec<u8>,
    ) {
        let wide = match self.style {
            ReplyStyle::Simple => return,
            ReplyStyle::Structured => false,
            ReplyStyle::Extended => true,
        };
        // Encoded once only for its length, which depends on the style.
        let header = self.chunk(tag, reply_type::NONE, 0, last).as_bytes().len();
        let fixed = if wide { 8 } else { 4 };
        // The count is known after the extents are written, so the front is filled in afterwards.
        let start = out.len();
        out.resize(start + header + fixed, 0);
        let max_extents = if query.one { 1 } else { self.max_extents };
        let count = put_extents(wide, query, max_extents, extents, out);
        let payload = (out.len() - start - header) as u64;
        let kind = if wide { reply_type::BLOCK_STATUS_EXT } else { reply_type::BLOCK_STATUS };
        let mut front = self.chunk(tag, kind, payload, last).put(context.id().to_be_bytes());
        if wide {
            front = front.put(count.to_be_bytes());
        }
        out[start..start + header + fixed].copy_from_slice(front.as_bytes());
    }

    fn chunk(self, tag: RequestTag, kind: u16, length: u64, last: bool) -> ReplyHeader {
        let flags = if last { reply_flag::DONE } else { 0 };
        let (magic, extended) = match self.style {
            ReplyStyle::Extended => (proto::EXTENDED_REPLY_MAGIC, true),
            _ => (proto::STRUCTURED_REPLY_MAGIC, false),
        };
        let header = ReplyHeader::new()
            .put(magic.to_be_bytes())
            .put(flags.to_be_bytes())
            .put(kind.to_be_bytes())
            .put(tag.cookie.to_be_bytes());
        if extended {
            header.put(tag.offset.to_be_bytes()).put(length.to_be_bytes())
        } else {
            header.put((length as u32).to_be_bytes())
        }
    }
}

fn simple(tag: RequestTag, errno: u32) -> ReplyHeader {
    ReplyHeader::new()
        .put(proto::SIMPLE_REPLY_MAGIC.to_be_bytes())
        .put(errno.to_be_bytes())
        .put(tag.cookie.to_be_bytes())
}

/// Appends extents; returns their number, at least 1.
fn put_extents(
    wide: bool,
    query: &StatusQuery,
    max_extents: usize,
    extents: &[NbdExtent],
    out: &mut Vec<u8>,
) -> u32 {
    let unknown = [NbdExtent { length: query.length, flags: 0 }];
    // A chunk needs at least one extent, so an empty result is reported as data of the whole range.
    let known = extents.iter().any(|extent| extent.length > 0);
    let usable = if known { extents } else { &unknown };
    // Only the last extent may extend past the query, and with `one` not even that.
    let cap = if query.one { query.length } else { u64::MAX };
    let cap = if wide { cap } else { cap.min(MAX_EXTENT_32) };
    let (mut covered, mut count) = (0u64, 0u32);
    for extent in usable.iter().filter(|extent| extent.length > 0).take(max_extents) {
        if covered >= query.length {
            break;
        }
        let reported = extent.length.min(cap);
        if wide {
            out.extend_from_slice(&reported.to_be_bytes());
            out.extend_from_slice(&u64::from(extent.flags).to_be_bytes());
        } else {
            out.extend_from_slice(&(reported as u32).to_be_bytes());
            out.extend_from_slice(&extent.flags.to_be_bytes());
        }
        count += 1;
        if reported < extent.length {
            // The extents behind a clipped one would be at the wrong offset for the client.
            break;
        }
        covered = covered.saturating_add(reported);
    }
    count
}

#[cfg(test)]
#[path = "reply_tests.rs"]
mod tests;
