//! Replies as a client reads them: bytes in, headers out ("Simple reply message", "Structured reply
//! chunk message").
//!
//! Never allocates, and no length passes that the rules of its chunk do not allow.

use super::super::{
    proto::{self, MAX_STRING_BYTES, reply_flag, reply_type},
    wire::Fields,
};

const SIMPLE_BYTES: usize = 16;
const CHUNK_BYTES: usize = 20;
const OFFSET_BYTES: usize = 8;
/// Bytes of an error's number and its message's length.
const ERROR_BYTES: usize = 6;
/// Set in the type of every error chunk, also an unknown one ("Structured reply types").
const IS_ERROR: u16 = 1 << 15;

/// The beginning of a reply or of a chunk. Data follows a simple reply to a read if `error` is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    Simple { cookie: u64, error: u32 },
    Chunk { cookie: u64, last: bool, chunk: Chunk },
}

/// What a chunk has; lengths in bytes. Data of `length`, or an error's message of `rest`, follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    None,
    Data { offset: u64, length: usize },
    Hole { offset: u64, length: usize },
    Error { error: u32, rest: usize },
}

/// The header that `bytes` begin with, and its length; `None` if it is not all there yet.
pub(super) fn parse(bytes: &[u8], structured: bool) -> Result<Option<(Header, usize)>, &'static str> {
    let mut fields = Fields::new(bytes);
    match fields.u32() {
        None => Ok(None),
        Some(proto::SIMPLE_REPLY_MAGIC) => Ok(simple(fields).map(|header| (header, SIMPLE_BYTES))),
        Some(proto::STRUCTURED_REPLY_MAGIC) if structured => chunk(fields),
        Some(proto::STRUCTURED_REPLY_MAGIC) => Err("a structured reply, which was not agreed on"),
        Some(_) => Err("what should be a reply has another magic number"),
    }
}

fn simple(mut fields: Fields<'_>) -> Option<Header> {
    Some(Header::Simple { error: fields.u32()?, cookie: fields.u64()? })
}

fn chunk(mut fields: Fields<'_>) -> Result<Option<(Header, usize)>, &'static str> {
    let mut head = || Some((fields.u16()?, fields.u16()?, fields.u64()?, fields.u32()? as usize));
    let Some((flags, kind, cookie, length)) = head() else { return Ok(None) };
    let last = flags & reply_flag::DONE != 0;
    let found = match kind {
        reply_type::NONE if length == 0 && last => Some((Chunk::None, 0)),
        reply_type::NONE => return Err("an empty chunk that is not empty, or not the last"),
        reply_type::OFFSET_DATA if length > OFFSET_BYTES => {
            fields.u64().map(|offset| (Chunk::Data { offset, length: length - OFFSET_BYTES }, OFFSET_BYTES))
        }
        reply_type::OFFSET_DATA => return Err("a chunk of data without any"),
        reply_type::OFFSET_HOLE if length == OFFSET_BYTES + 4 => hole(fields)?,
        reply_type::OFFSET_HOLE => return Err("a hole's chunk of a length that none has"),
        kind if kind & IS_ERROR == 0 => return Err("a chunk of a type that was not asked for"),
        _ if (ERROR_BYTES..=ERROR_BYTES + MAX_STRING_BYTES + OFFSET_BYTES).contains(&length) => {
            fields.u32().map(|error| (Chunk::Error { error, rest: length - 4 }, 4))
        }
        _ => return Err("an error's chunk of a length that none has"),
    };
    Ok(found.map(|(chunk, more)| (Header::Chunk { cookie, last, chunk }, CHUNK_BYTES + more)))
}

fn hole(mut fields: Fields<'_>) -> Result<Option<(Chunk, usize)>, &'static str> {
    let mut read = || Some((fields.u64()?, fields.u32()? as usize));
    match read() {
        Some((_, 0)) => Err("a hole without a length"),
        read => Ok(read.map(|(offset, length)| (Chunk::Hole { offset, length }, OFFSET_BYTES + 4))),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::super::{Errno, Replier, Session, Tag, context::MetaContexts, session::ReplyStyle},
        *,
    };

    fn replier(style: ReplyStyle) -> Replier {
        Replier::new(&Session {
            export: 0,
            style,
            flags: 0,
            contexts: MetaContexts::NONE,
            sizes_acknowledged: false,
            minimum_block: 1,
            maximum_payload: 1 << 20,
        })
    }

    const TAG: Tag = Tag { cookie: 7, offset: 0 };

    /// What the server writes is understood, and only once it is complete.
    fn check(bytes: &[u8], structured: bool, expect: Header) {
        let (found, length) = parse(bytes, structured).unwrap().unwrap();
        assert_eq!(found, expect);
        for end in 0..length {
            assert_eq!(parse(&bytes[..end], structured), Ok(None), "{end} of {length} bytes");
        }
    }

    #[test]
    fn what_the_server_writes_is_understood() {
        let simple = replier(ReplyStyle::Simple);
        let ours = |chunk, last| Header::Chunk { cookie: 7, last, chunk };
        check(simple.success(TAG).as_bytes(), false, Header::Simple { cookie: 7, error: 0 });
        check(simple.success(TAG).as_bytes(), true, Header::Simple { cookie: 7, error: 0 });
        let chunks = replier(ReplyStyle::Structured);
        check(chunks.success(TAG).as_bytes(), true, ours(Chunk::None, true));
        let data = Chunk::Data { offset: 512, length: 9 };
        check(chunks.data(TAG, 512, 9, false).as_bytes(), true, ours(data, false));
        let hole = Chunk::Hole { offset: 512, length: 9 };
        check(chunks.hole(TAG, 512, 9, true).unwrap().as_bytes(), true, ours(hole, true));
        let mut error = Vec::new();
        chunks.error(TAG, Errno::NoSpc, "full", &mut error);
        check(&error, true, ours(Chunk::Error { error: 28, rest: 6 }, true));
    }

    #[test]
    fn what_breaks_the_rules_is_refused() {
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
            (chunk(0, reply_type::OFFSET_HOLE, 13), "a hole's chunk"),
            (chunk(0, reply_type::OFFSET_HOLE, 12), "a hole without a length"),
            (chunk(1, reply_type::BLOCK_STATUS, 12), "a chunk of a type"),
            (chunk(1, reply_type::ERROR, 5), "an error's chunk"),
            (chunk(1, reply_type::ERROR, u32::MAX), "an error's chunk"),
            (vec![0; 16], "what should be a reply"),
        ] {
            let refused = parse(&bytes, true).expect_err(why);
            assert!(refused.starts_with(why), "{refused}, not {why}");
        }
        assert!(parse(&chunk(1, reply_type::NONE, 0), false).is_err());
    }
}
