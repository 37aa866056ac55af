//! Parser of replies: bytes in, headers out ("Simple reply message", "Structured reply chunk
//! message").
//!
//! Never allocates, and rejects any length that exceeds the limits of its chunk or its request.

use super::super::{
    proto::{self, MAX_STRING_BYTES, reply_flag, reply_type},
    wire::WireFields,
};

const SIMPLE_BYTES: usize = 16;
const CHUNK_BYTES: usize = 20;
const OFFSET_BYTES: usize = 8;
/// Length of an extent: its length and its flags.
pub(super) const EXTENT_BYTES: usize = 8;
/// Minimum length of an error chunk's payload: error number and length of the message.
const ERROR_BYTES: usize = 6;
/// Bit in the type of every error chunk, also an unknown one ("Structured reply types").
const IS_ERROR: u16 = 1 << 15;

/// The header of a simple reply or of a chunk. Data follows a simple reply to a read if `error` is
/// 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientReplyHeader {
    Simple { cookie: u64, error: u32 },
    Chunk { cookie: u64, last: bool, chunk: ReplyChunk },
}

/// Content of a chunk; lengths in bytes. Data or extents of `length`, or an error message of
/// `rest`, follow the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplyChunk {
    None,
    Data {
        offset: u64,
        length: usize,
    },
    Hole {
        offset: u64,
        length: usize,
    },
    Error {
        error: u32,
        rest: usize,
    },
    /// Extents of `length` bytes in total.
    Status {
        context: u32,
        length: usize,
    },
}

/// Limits of the chunks in the reply to one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ChunkLimits {
    /// Maximum bytes of data: the length of a read; 0 for all other requests.
    pub(super) data: usize,
    /// Maximum number of extents: one for each byte of a block-status request; 0 for all other
    /// requests.
    pub(super) extents: usize,
}

/// Parses the header at the beginning of `bytes` and returns it with its length; `None` if it is
/// incomplete. `longest` returns the limits for the cookie of a chunk, so that a length beyond them
/// is rejected before its data arrives.
///
/// # Errors
/// A violation of the protocol, also one that `longest` reports.
pub(super) fn parse(
    bytes: &[u8],
    structured: bool,
    longest: impl FnOnce(u64) -> Result<ChunkLimits, &'static str>,
) -> Result<Option<(ClientReplyHeader, usize)>, &'static str> {
    let mut fields = WireFields::new(bytes);
    match fields.u32() {
        None => Ok(None),
        Some(proto::SIMPLE_REPLY_MAGIC) => Ok(simple(fields).map(|header| (header, SIMPLE_BYTES))),
        Some(proto::STRUCTURED_REPLY_MAGIC) if structured => chunk(fields, longest),
        Some(proto::STRUCTURED_REPLY_MAGIC) => Err("a structured reply, which was not negotiated"),
        Some(_) => Err("a reply has a wrong magic number"),
    }
}

fn simple(mut fields: WireFields<'_>) -> Option<ClientReplyHeader> {
    Some(ClientReplyHeader::Simple { error: fields.u32()?, cookie: fields.u64()? })
}

fn chunk(
    mut fields: WireFields<'_>,
    longest: impl FnOnce(u64) -> Result<ChunkLimits, &'static str>,
) -> Result<Option<(ClientReplyHeader, usize)>, &'static str> {
    let mut head = || Some((fields.u16()?, fields.u16()?, fields.u64()?, fields.u32()? as usize));
    let Some((flags, kind, cookie, length)) = head() else { return Ok(None) };
    // Looked up before the payload arrives: an unknown cookie is rejected at once.
    let longest = longest(cookie)?;
    let last = flags & reply_flag::DONE != 0;
    let found = match kind {
        reply_type::NONE if length == 0 && last => Some((ReplyChunk::None, 0)),
        reply_type::NONE => return Err("an empty chunk with a payload, or not the last"),
        reply_type::OFFSET_DATA | reply_type::OFFSET_HOLE if longest.data == 0 => {
            return Err("data in a reply to a request other than a read");
        }
        reply_type::OFFSET_DATA if length > OFFSET_BYTES => {
            if length - OFFSET_BYTES > longest.data {
                return Err("more data than requested");
            }
            fields
                .u64()
                .map(|offset| (ReplyChunk::Data { offset, length: length - OFFSET_BYTES }, OFFSET_BYTES))
        }
        reply_type::OFFSET_DATA => return Err("a chunk of data without any"),
        reply_type::OFFSET_HOLE if length == OFFSET_BYTES + 4 => hole(fields)?,
        reply_type::OFFSET_HOLE => return Err("a hole chunk of invalid length"),
        reply_type::BLOCK_STATUS if longest.extents == 0 => {
            return Err("extents in a reply to a request other than block status");
        }
        reply_type::BLOCK_STATUS if is_status(length) => {
            if (length - 4) / EXTENT_BYTES > longest.extents {
                return Err("more extents than bytes in the request");
            }
            fields.u32().map(|context| (ReplyChunk::Status { context, length: length - 4 }, 4))
        }
        reply_type::BLOCK_STATUS => return Err("a chunk of extents of invalid length"),
        kind if kind & IS_ERROR == 0 => return Err("a chunk of a type that was not requested"),
        _ if (ERROR_BYTES..=ERROR_BYTES + MAX_STRING_BYTES + OFFSET_BYTES).contains(&length) => {
            fields.u32().map(|error| (ReplyChunk::Error { error, rest: length - 4 }, 4))
        }
        _ => return Err("an error chunk of invalid length"),
    };
    Ok(found.map(|(chunk, body_bytes)| {
        (ClientReplyHeader::Chunk { cookie, last, chunk }, CHUNK_BYTES + body_bytes)
    }))
}

/// True if a chunk of this length has a context and a valid number of extents, at least one.
fn is_status(length: usize) -> bool {
    let extents = length.saturating_sub(4);
    extents > 0 && extents.is_multiple_of(EXTENT_BYTES) && extents <= proto::MAX_EXTENTS * EXTENT_BYTES
}

fn hole(mut fields: WireFields<'_>) -> Result<Option<(ReplyChunk, usize)>, &'static str> {
    let mut read = || Some((fields.u64()?, fields.u32()? as usize));
    match read() {
        Some((_, 0)) => Err("a hole without a length"),
        read => Ok(read.map(|(offset, length)| (ReplyChunk::Hole { offset, length }, OFFSET_BYTES + 4))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: ChunkLimits = ChunkLimits { data: 1000, extents: 1000 };

    fn parse(bytes: &[u8], structured: bool) -> Result<Option<(ClientReplyHeader, usize)>, &'static str> {
        super::parse(bytes, structured, |_| Ok(LONGEST))
    }

    /// Checks that the header is parsed, and only if it is complete.
    #[track_caller]
    fn check(bytes: &[u8], expect: ClientReplyHeader) {
        let (found, length) = parse(bytes, true).unwrap().unwrap();
        assert_eq!(found, expect);
        for end in 0..length {
            assert_eq!(parse(&bytes[..end], true), Ok(None), "{end} of {length} bytes");
        }
    }

    #[test]
    fn each_reply_type_is_parsed() {
        let chunk = |flags: u16, kind: u16, data: &[u8]| {
            let head = [&proto::STRUCTURED_REPLY_MAGIC.to_be_bytes()[..], &flags.to_be_bytes()].concat();
            let length = data.len() as u32;
            [&head, &kind.to_be_bytes()[..], &7_u64.to_be_bytes(), &length.to_be_bytes(), data].concat()
        };
        let expected = |chunk, last| ClientReplyHeader::Chunk { cookie: 7, last, chunk };
        let simple = [proto::SIMPLE_REPLY_MAGIC, 0, 0, 7].map(u32::to_be_bytes).concat();
        check(&simple, ClientReplyHeader::Simple { cookie: 7, error: 0 });
        check(&chunk(1, reply_type::NONE, &[]), expected(ReplyChunk::None, true));
        let at = 512_u64.to_be_bytes();
        let data = [&at[..], &[1; 9]].concat();
        check(
            &chunk(0, reply_type::OFFSET_DATA, &data),
            expected(ReplyChunk::Data { offset: 512, length: 9 }, false),
        );
        let hole = [&at[..], &9_u32.to_be_bytes()].concat();
        check(
            &chunk(1, reply_type::OFFSET_HOLE, &hole),
            expected(ReplyChunk::Hole { offset: 512, length: 9 }, true),
        );
        let error = [&28_u32.to_be_bytes()[..], &4_u16.to_be_bytes(), b"full"].concat();
        check(&chunk(1, reply_type::ERROR, &error), expected(ReplyChunk::Error { error: 28, rest: 6 }, true));
        let status = [3_u32, 4096, 1, 512, 0].map(u32::to_be_bytes).concat();
        check(
            &chunk(1, reply_type::BLOCK_STATUS, &status),
            expected(ReplyChunk::Status { context: 3, length: 16 }, true),
        );
    }

    #[test]
    fn protocol_violations_are_rejected() {
        let chunk = |flags: u16, kind: u16, length: u32| {
            let mut bytes = proto::STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(flags.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend([0; 8]);
            bytes.extend(length.to_be_bytes());
            bytes.extend([0; 12]);
            bytes
        };
        for (bytes, why) in [
            (chunk(1, reply_type::NONE, 1), "an empty chunk"),
            (chunk(0, reply_type::NONE, 0), "an empty chunk"),
            (chunk(0, reply_type::OFFSET_DATA, 8), "a chunk of data without any"),
            (chunk(0, reply_type::OFFSET_HOLE, 13), "a hole chunk"),
            (chunk(0, reply_type::OFFSET_HOLE, 12), "a hole without a length"),
            (chunk(1, reply_type::BLOCK_STATUS, 4), "a chunk of extents"),
            (chunk(1, reply_type::BLOCK_STATUS, 13), "a chunk of extents"),
            (chunk(1, reply_type::BLOCK_STATUS, u32::MAX - 3), "a chunk of extents"),
            (chunk(1, reply_type::BLOCK_STATUS_EXT, 20), "a chunk of a type"),
            (chunk(1, reply_type::ERROR, 5), "an error chunk"),
            (chunk(1, reply_type::ERROR, u32::MAX), "an error chunk"),
            (chunk(1, reply_type::OFFSET_DATA, 1009), "more data than"),
            (chunk(1, reply_type::OFFSET_DATA, u32::MAX), "more data than"),
            (chunk(1, reply_type::BLOCK_STATUS, 4 + 8 * 1001), "more extents than"),
            (vec![0; 16], "a reply has a wrong magic number"),
        ] {
            // The header is enough to reject it, unless the error is behind it.
            let head =
                if why == "a hole without a length" { bytes.len() } else { bytes.len().min(CHUNK_BYTES) };
            let error = parse(&bytes[..head], true).expect_err(why);
            assert!(error.starts_with(why), "{error}, not {why}");
        }
        assert!(parse(&chunk(1, reply_type::NONE, 0), false).is_err());
        let data = chunk(1, reply_type::OFFSET_DATA, 9);
        let status = chunk(1, reply_type::BLOCK_STATUS, 12);
        for (bytes, why) in [(data, "data in a reply"), (status, "extents in a reply")] {
            let error = super::parse(&bytes[..CHUNK_BYTES], true, |_| Ok(ChunkLimits::default()));
            assert!(error.expect_err(why).starts_with(why));
        }
    }
}
