//! Requests of the transmission phase: a header in, a validated command out.
//!
//! Every rule of "Request types", "Command flags" and "Size constraints" is checked here, so a
//! command can be passed to a disk unchanged. A rejected request carries the length of the payload
//! to skip, so that the stream stays in step.
//!
//! ```text
//!  header ─► magic? ─► payload too long? ─► command, flags, permission, length, range, alignment
//!              │no          │yes                  │ first that fails
//!              ▼            ▼                     ▼
//!            Close        Close              Refused { errno, why, skip }
//! ```
//!
//! Runs for each request: never allocates or copies.
//!
//! With extended headers the payload of a WRITE always follows, whatever its flags are. The
//! specification requires `NBD_CMD_FLAG_PAYLOAD_LEN` there and permits a server to reject the
//! request without it, but QEMU's client (8.2 to 11.1) does not set the flag. A server that relies
//! on the flag parses data of the guest as requests.

use super::context::{MetaContext, MetaContexts};
use super::errno::Errno;
use super::proto::{self, cmd, cmd_flag, export_flag};
use super::session::{NbdSession, ReplyStyle, RequestTag};
use super::wire::WireFields;

/// A validated command; `fua` means "durable before the reply".
///
/// Ranges, in bytes, are not empty, are multiples of the minimum block, and lie inside the export's
/// size at the time of parsing. READ and WRITE are at most the session's payload long; other
/// commands may cover the whole export.
#[allow(missing_docs, reason = "the variants explain their fields")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NbdCommand {
    /// With `dont_fragment`, answered with at most one content chunk.
    Read { offset: u64, length: u32, dont_fragment: bool },
    /// Write the `length` bytes that follow the header.
    Write { offset: u64, length: u32, fua: bool },
    /// Complete the requests in flight and close; there is no reply.
    Disconnect,
    /// Make every answered write durable.
    Flush,
    /// Discard the range's data.
    Trim { offset: u64, length: u64, fua: bool },
    /// Hint that the range will be read soon; executing none or a part of it is a success.
    Cache { offset: u64, length: u64 },
    /// Zero the range; with `no_hole` it stays allocated. With `fast`, fail with [`Errno::NotSup`]
    /// if zeroing would take as long as writing.
    WriteZeroes { offset: u64, length: u64, fua: bool, no_hole: bool, fast: bool },
    /// Report the extents of a range for each of the query's contexts, in one chunk a context.
    BlockStatus(StatusQuery),
    /// Block status of the contexts that the payload names: read `payload` bytes (at most 8 and 4
    /// for each of the session's contexts), then call [`status_payload`].
    BlockStatusPayload { offset: u64, payload: u32, one: bool },
    /// Empty range: answer success ([`super::NbdReplyEncoder::success`]) without I/O.
    Empty,
}

impl NbdCommand {
    /// Length of this request's payload behind the header, in bytes.
    pub const fn payload_bytes(self) -> u32 {
        match self {
            Self::Write { length, .. } => length,
            Self::BlockStatusPayload { payload, .. } => payload,
            _ => 0,
        }
    }
}

/// Parameters of a BLOCK_STATUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusQuery {
    /// First byte.
    pub offset: u64,
    /// Length in bytes; a hint, unless `one`.
    pub length: u64,
    /// True to report one extent for each context, no longer than `length`.
    pub one: bool,
    /// Contexts to report, at least one.
    pub contexts: MetaContexts,
}

/// A request that was accepted.
#[allow(missing_docs, reason = "the types are self-explanatory")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NbdRequest {
    pub tag: RequestTag,
    pub command: NbdCommand,
}

/// A rejected request; the connection continues.
#[allow(missing_docs, reason = "the types are self-explanatory")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejectedRequest {
    pub tag: RequestTag,
    pub errno: Errno,
    /// Reason for the client's log; sent if the reply can carry a message.
    pub why: &'static str,
    /// Bytes to skip after the header.
    pub skip: u32,
}

/// A violation after which the stream cannot be parsed further.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolViolation {
    #[error("wrong request magic {0:#010x}")]
    Magic(u32),
    #[error("payload of {0} bytes: too many to skip")]
    Payload(u64),
}

/// Result of [`parse`]. For a request or a rejection, the caller consumes the header's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The input is shorter than a header.
    Incomplete,
    /// Execute the request.
    Request(NbdRequest),
    /// Send the error and skip the payload.
    Refused(RejectedRequest),
    /// Close the connection ("Terminating the transmission phase").
    Close(ProtocolViolation),
}

struct NbdRequestHeader {
    magic: u32,
    flags: u16,
    kind: u16,
    tag: RequestTag,
    length: u64,
    /// True if `length` is that of a payload behind the header, not of a range.
    has_payload: bool,
}

impl NbdRequestHeader {
    fn read(input: &[u8], style: ReplyStyle) -> Option<Self> {
        let mut fields = WireFields::new(input);
        let (magic, flags, kind) = (fields.u32()?, fields.u16()?, fields.u16()?);
        let tag = RequestTag { cookie: fields.u64()?, offset: fields.u64()? };
        let (length, has_flag) = match style {
            ReplyStyle::Extended => (fields.u64()?, flags & cmd_flag::PAYLOAD_LEN != 0),
            ReplyStyle::Simple | ReplyStyle::Structured => (u64::from(fields.u32()?), false),
        };
        // A WRITE always has a payload: QEMU's client negotiates extended headers and omits the
        // flag.
        let has_payload = has_flag || kind == cmd::WRITE;
        Some(Self { magic, flags, kind, tag, length, has_payload })
    }
}

type Refusal = (Errno, &'static str);

/// Parses and validates the request at the start of `input`; `size_bytes` is the export's current
/// size.
pub fn parse(input: &[u8], session: &NbdSession, size_bytes: u64) -> Parsed {
    let Some(header) = NbdRequestHeader::read(input, session.style) else { return Parsed::Incomplete };
    let magic = match session.style {
        ReplyStyle::Extended => proto::EXTENDED_REQUEST_MAGIC,
        ReplyStyle::Simple | ReplyStyle::Structured => proto::REQUEST_MAGIC,
    };
    if header.magic != magic {
        return Parsed::Close(ProtocolViolation::Magic(header.magic));
    }
    let tag = header.tag;
    // Before any check: a disconnect has no reply, so an error could not be sent.
    if header.kind == cmd::DISC {
        return Parsed::Request(NbdRequest { tag, command: NbdCommand::Disconnect });
    }
    let payload = if header.has_payload { header.length } else { 0 };
    // Payloads up to 32 MiB "SHOULD NOT be considered a denial of service attack, even if that
    // length is larger than the advertised maximum payload size", so they are skipped.
    let max_payload = session.maximum_payload.max(proto::DEFAULT_MAX_PAYLOAD);
    let skip = match u32::try_from(payload) {
        Ok(payload) if payload <= max_payload => payload,
        _ => return Parsed::Close(ProtocolViolation::Payload(payload)),
    };
    match check(&header, session, size_bytes) {
        Ok(command) => Parsed::Request(NbdRequest { tag, command }),
        Err((errno, why)) => Parsed::Refused(RejectedRequest { tag, errno, why, skip }),
    }
}

fn check(header: &NbdRequestHeader, session: &NbdSession, size_bytes: u64) -> Result<NbdCommand, Refusal> {
    check_flags(header, session)?;
    let range = RequestRange { offset: header.tag.offset, length: header.length, size_bytes, session };
    let fua = header.flags & cmd_flag::FUA != 0;
    match header.kind {
        cmd::READ => read(header, &range),
        cmd::WRITE => write(&range, fua),
        cmd::FLUSH => flush(header, session),
        cmd::TRIM => {
            // EPERM before other checks: a read-only export does not offer TRIM at all, but the
            // error that clients expect is EPERM.
            writable(session)?;
            offered(session, export_flag::SEND_TRIM, "this export does not offer TRIM")?;
            range.inside(Errno::Inval)?;
            Ok(range.or_nothing(NbdCommand::Trim { offset: range.offset, length: range.length, fua }))
        }
        cmd::CACHE => {
            offered(session, export_flag::SEND_CACHE, "this export does not offer CACHE")?;
            range.inside(Errno::Inval)?;
            Ok(range.or_nothing(NbdCommand::Cache { offset: range.offset, length: range.length }))
        }
        cmd::WRITE_ZEROES => write_zeroes(header, &range, fua),
        cmd::BLOCK_STATUS => block_status(header, &range),
        _ => Err((Errno::Inval, "unknown command")),
    }
}

/// All violations are EINVAL ("Error values").
fn check_flags(header: &NbdRequestHeader, session: &NbdSession) -> Result<(), Refusal> {
    let flag_if = |flag, offered| if session.offers(offered) { flag } else { 0 };
    let allowed_flags = match header.kind {
        cmd::READ => flag_if(cmd_flag::DF, export_flag::SEND_DF),
        cmd::WRITE if session.style == ReplyStyle::Extended => cmd_flag::PAYLOAD_LEN,
        cmd::WRITE_ZEROES => cmd_flag::NO_HOLE | flag_if(cmd_flag::FAST_ZERO, export_flag::SEND_FAST_ZERO),
        cmd::BLOCK_STATUS => {
            cmd_flag::REQ_ONE | flag_if(cmd_flag::PAYLOAD_LEN, export_flag::BLOCK_STATUS_PAYLOAD)
        }
        _ => 0,
    };
    // Valid on every command once offered: existing clients set it on reads too.
    let allowed = allowed_flags | flag_if(cmd_flag::FUA, export_flag::SEND_FUA);
    // "Command flags": unknown or unoffered flags are EINVAL, never ignored.
    if header.flags & !allowed != 0 {
        return Err((
            Errno::Inval,
            "a command flag is unknown, was not offered, or does not belong to this command",
        ));
    }
    Ok(())
}

fn writable(session: &NbdSession) -> Result<(), Refusal> {
    if session.offers(export_flag::READ_ONLY) {
        return Err((Errno::Perm, "the export is read-only"));
    }
    Ok(())
}

fn offered(session: &NbdSession, flag: u16, why: &'static str) -> Result<(), Refusal> {
    if session.offers(flag) { Ok(()) } else { Err((Errno::Inval, why)) }
}

struct RequestRange<'a> {
    offset: u64,
    length: u64,
    size_bytes: u64,
    session: &'a NbdSession,
}

impl RequestRange<'_> {
    /// Fails with `errno` if the range ends past the export.
    fn inside(&self, errno: Errno) -> Result<(), Refusal> {
        let end = self.offset.checked_add(self.length);
        if end.is_none_or(|end| end > self.size_bytes) {
            return Err((errno, "the range ends beyond the export"));
        }
        // The minimum block is a power of two of at least 1.
        let mask = u64::from(self.session.minimum_block) - 1;
        if (self.offset | self.length) & mask != 0 {
            return Err((Errno::Inval, "offset or length is not a multiple of the minimum block size"));
        }
        Ok(())
    }

    /// Length of a READ or WRITE; fails if it exceeds the maximum payload.
    fn payload(&self, too_long: Errno) -> Result<u32, Refusal> {
        match u32::try_from(self.length) {
            Ok(length) if length <= self.session.maximum_payload => Ok(length),
            _ => Err((too_long, "the length exceeds the maximum payload size")),
        }
    }

    fn or_nothing(&self, command: NbdCommand) -> NbdCommand {
        if self.length == 0 { NbdCommand::Empty } else { command }
    }
}

fn read(header: &NbdRequestHeader, range: &RequestRange<'_>) -> Result<NbdCommand, Refusal> {
    // EOVERFLOW is for clients that understand chunks (READ, "Structured replies").
    let too_long = if range.session.style.has_chunks() { Errno::Overflow } else { Errno::Inval };
    let length = range.payload(too_long)?;
    range.inside(Errno::Inval)?;
    let dont_fragment = header.flags & cmd_flag::DF != 0;
    Ok(range.or_nothing(NbdCommand::Read { offset: range.offset, length, dont_fragment }))
}

fn write(range: &RequestRange<'_>, fua: bool) -> Result<NbdCommand, Refusal> {
    writable(range.session)?;
    let length = range.payload(Errno::Inval)?;
    // Writes past the end fail with ENOSPC, reads with EINVAL ("Error values").
    range.inside(Errno::NoSpc)?;
    Ok(range.or_nothing(NbdCommand::Write { offset: range.offset, length, fua }))
}

fn flush(header: &NbdRequestHeader, session: &NbdSession) -> Result<NbdCommand, Refusal> {
    offered(session, export_flag::SEND_FLUSH, "this export does not offer FLUSH")?;
    // "NBD_CMD_FLUSH": both are reserved, and MUST be zero.
    if header.length != 0 || header.tag.offset != 0 {
        return Err((Errno::Inval, "offset and length of a FLUSH must be zero"));
    }
    Ok(NbdCommand::Flush)
}

fn write_zeroes(
    header: &NbdRequestHeader,
    range: &RequestRange<'_>,
    fua: bool,
) -> Result<NbdCommand, Refusal> {
    writable(range.session)?;
    offered(range.session, export_flag::SEND_WRITE_ZEROES, "this export does not offer WRITE_ZEROES")?;
    range.inside(Errno::NoSpc)?;
    Ok(range.or_nothing(NbdCommand::WriteZeroes {
        offset: range.offset,
        length: range.length,
        fua,
        no_hole: header.flags & cmd_flag::NO_HOLE != 0,
        fast: header.flags & cmd_flag::FAST_ZERO != 0,
    }))
}

fn block_status(header: &NbdRequestHeader, range: &RequestRange<'_>) -> Result<NbdCommand, Refusal> {
    let contexts = range.session.contexts;
    if contexts.is_empty() {
        return Err((Errno::Inval, "BLOCK_STATUS needs a metadata context selected during the handshake"));
    }
    let one = header.flags & cmd_flag::REQ_ONE != 0;
    if header.has_payload {
        let wrong = (Errno::Inval, "the BLOCK_STATUS payload is not a length and one to all of the contexts");
        let payload = u32::try_from(header.length).map_err(|_| wrong)?;
        // A longer list has repeated or unknown contexts, so it need not be read.
        let max_payload = 8 + 4 * contexts.len() as u32;
        if !(12..=max_payload).contains(&payload) || !payload.is_multiple_of(4) {
            return Err(wrong);
        }
        return Ok(NbdCommand::BlockStatusPayload { offset: range.offset, payload, one });
    }
    status_of(range, one, contexts)
}

fn status_of(range: &RequestRange<'_>, one: bool, contexts: MetaContexts) -> Result<NbdCommand, Refusal> {
    if range.length == 0 {
        return Err((Errno::Inval, "BLOCK_STATUS of an empty range"));
    }
    range.inside(Errno::Inval)?;
    Ok(NbdCommand::BlockStatus(StatusQuery { offset: range.offset, length: range.length, one, contexts }))
}

/// Converts the payload of a [`NbdCommand::BlockStatusPayload`] to a [`NbdCommand::BlockStatus`].
/// Rejects contexts that are repeated or were not selected.
pub fn status_payload(
    payload: &[u8],
    tag: RequestTag,
    one: bool,
    session: &NbdSession,
    size_bytes: u64,
) -> Result<NbdCommand, RejectedRequest> {
    selected(payload, session)
        .and_then(|(length, contexts)| {
            status_of(&RequestRange { offset: tag.offset, length, size_bytes, session }, one, contexts)
        })
        .map_err(|(errno, why)| RejectedRequest { tag, errno, why, skip: 0 })
}

fn selected(payload: &[u8], session: &NbdSession) -> Result<(u64, MetaContexts), Refusal> {
    let wrong = (Errno::Inval, "a context of the BLOCK_STATUS payload is repeated or was not selected");
    let mut fields = WireFields::new(payload);
    let length = fields.u64().ok_or(wrong)?;
    let mut contexts = MetaContexts::NONE;
    while !fields.is_empty() {
        let context = fields.u32().and_then(MetaContext::from_id).ok_or(wrong)?;
        if !session.contexts.contains(context) || !contexts.insert(context) {
            return Err(wrong);
        }
    }
    if contexts.is_empty() { Err(wrong) } else { Ok((length, contexts)) }
}

/// Encodes the request that [`parse`] parsed to `command`, without its payload. A block status with
/// a subset of the session's contexts is encoded with the payload that selects them.
pub(super) fn encode(tag: RequestTag, command: NbdCommand, session: &NbdSession, out: &mut Vec<u8>) {
    let flag_if = |flag: u16, set: bool| if set { flag } else { 0 };
    let fua_flag = |fua| flag_if(cmd_flag::FUA, fua);
    let is_extended = session.style == ReplyStyle::Extended;
    let mut trailing_payload = Vec::new();
    let (kind, flags, length) = match command {
        NbdCommand::Read { length, dont_fragment, .. } => {
            (cmd::READ, flag_if(cmd_flag::DF, dont_fragment), u64::from(length))
        }
        NbdCommand::Write { length, fua, .. } => {
            (cmd::WRITE, fua_flag(fua) | flag_if(cmd_flag::PAYLOAD_LEN, is_extended), u64::from(length))
        }
        NbdCommand::Disconnect => (cmd::DISC, 0, 0),
        NbdCommand::Flush => (cmd::FLUSH, 0, 0),
        NbdCommand::Trim { length, fua, .. } => (cmd::TRIM, fua_flag(fua), length),
        NbdCommand::Cache { length, .. } => (cmd::CACHE, 0, length),
        NbdCommand::WriteZeroes { length, fua, no_hole, fast, .. } => {
            let flags = flag_if(cmd_flag::NO_HOLE, no_hole) | flag_if(cmd_flag::FAST_ZERO, fast);
            (cmd::WRITE_ZEROES, fua_flag(fua) | flags, length)
        }
        NbdCommand::BlockStatus(query) if query.contexts == session.contexts => {
            (cmd::BLOCK_STATUS, flag_if(cmd_flag::REQ_ONE, query.one), query.length)
        }
        NbdCommand::BlockStatus(query) => {
            trailing_payload.extend(query.length.to_be_bytes());
            trailing_payload.extend(query.contexts.iter().flat_map(|context| context.id().to_be_bytes()));
            let flags = cmd_flag::PAYLOAD_LEN | flag_if(cmd_flag::REQ_ONE, query.one);
            (cmd::BLOCK_STATUS, flags, trailing_payload.len() as u64)
        }
        NbdCommand::BlockStatusPayload { payload, one, .. } => {
            let flags = cmd_flag::PAYLOAD_LEN | flag_if(cmd_flag::REQ_ONE, one);
            (cmd::BLOCK_STATUS, flags, u64::from(payload))
        }
        // An empty request has no effect, so its type does not matter.
        NbdCommand::Empty => (cmd::READ, 0, 0),
    };
    let magic = if is_extended { proto::EXTENDED_REQUEST_MAGIC } else { proto::REQUEST_MAGIC };
    out.extend(magic.to_be_bytes());
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(tag.cookie.to_be_bytes());
    out.extend(tag.offset.to_be_bytes());
    match u32::try_from(length) {
        Ok(length) if !is_extended => out.extend(length.to_be_bytes()),
        _ => out.extend(length.to_be_bytes()),
    }
    out.extend(trailing_payload);
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
