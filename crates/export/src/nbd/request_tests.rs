//! Requests against the specification: `accepts` and `refuses`, one line a rule.

use super::*;
use proptest::prelude::*;

const SIZE: u64 = 1 << 30;
const MAX_PAYLOAD: u32 = 1 << 20;
const COOKIE: u64 = 0x0123_4567_89ab_cdef;
/// All flags except READ_ONLY and ROTATIONAL.
const ALL: u16 = 0x1ffd & !export_flag::ROTATIONAL;

fn session(style: ReplyStyle) -> NbdSession {
    let mut contexts = MetaContexts::NONE;
    contexts.insert(MetaContext::BaseAllocation);
    let flags = match style {
        ReplyStyle::Simple => ALL & !export_flag::SEND_DF & !export_flag::BLOCK_STATUS_PAYLOAD,
        ReplyStyle::Structured => ALL & !export_flag::BLOCK_STATUS_PAYLOAD,
        ReplyStyle::Extended => ALL,
    };
    NbdSession {
        export: 0,
        style,
        flags,
        contexts,
        sizes_acknowledged: true,
        minimum_block: 512,
        maximum_payload: MAX_PAYLOAD,
    }
}

/// Fields of a request on the wire.
#[derive(Clone, Copy)]
struct RawNbdRequest {
    flags: u16,
    kind: u16,
    offset: u64,
    length: u64,
}

fn raw(kind: u16, offset: u64, length: u64) -> RawNbdRequest {
    RawNbdRequest { flags: 0, kind, offset, length }
}

impl RawNbdRequest {
    fn with(self, flags: u16) -> Self {
        Self { flags, ..self }
    }

    fn bytes(self, style: ReplyStyle) -> Vec<u8> {
        let extended = style == ReplyStyle::Extended;
        let magic = if extended { proto::EXTENDED_REQUEST_MAGIC } else { proto::REQUEST_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend_from_slice(&self.flags.to_be_bytes());
        bytes.extend_from_slice(&self.kind.to_be_bytes());
        bytes.extend_from_slice(&COOKIE.to_be_bytes());
        bytes.extend_from_slice(&self.offset.to_be_bytes());
        if extended {
            bytes.extend_from_slice(&self.length.to_be_bytes());
        } else {
            bytes.extend_from_slice(&u32::try_from(self.length).unwrap().to_be_bytes());
        }
        bytes
    }
}

fn run(session: &NbdSession, raw: RawNbdRequest) -> Parsed {
    let bytes = raw.bytes(session.style);
    assert_eq!(bytes.len(), session.style.request_bytes());
    for cut in 0..bytes.len() {
        assert_eq!(parse(&bytes[..cut], session, SIZE), Parsed::Incomplete);
    }
    parse(&bytes, session, SIZE)
}

#[track_caller]
fn accepts(session: &NbdSession, raw: RawNbdRequest, command: NbdCommand) {
    let tag = RequestTag { cookie: COOKIE, offset: raw.offset };
    assert_eq!(run(session, raw), Parsed::Request(NbdRequest { tag, command }));
}

#[track_caller]
fn refuses(session: &NbdSession, raw: RawNbdRequest, errno: Errno, skip: u32) {
    match run(session, raw) {
        Parsed::Refused(refused) => {
            assert_eq!((refused.errno, refused.skip), (errno, skip), "{}", refused.why);
            assert_eq!(refused.tag, RequestTag { cookie: COOKIE, offset: raw.offset });
            assert!(!refused.why.is_empty());
        }
        other => panic!("not refused: {other:?}"),
    }
}

fn simple() -> NbdSession {
    session(ReplyStyle::Simple)
}

fn structured() -> NbdSession {
    session(ReplyStyle::Structured)
}

fn extended() -> NbdSession {
    session(ReplyStyle::Extended)
}

fn without(session: NbdSession, flag: u16) -> NbdSession {
    NbdSession { flags: session.flags & !flag, ..session }
}

fn read_only(session: NbdSession) -> NbdSession {
    NbdSession { flags: session.flags | export_flag::READ_ONLY, ..session }
}

#[test]
fn each_command_is_understood() {
    for s in [simple(), structured(), extended()] {
        let payload = if s.style == ReplyStyle::Extended { cmd_flag::PAYLOAD_LEN } else { 0 };
        let (offset, length) = (4096, 512);
        accepts(&s, raw(cmd::READ, 4096, 512), NbdCommand::Read { offset, length, dont_fragment: false });
        accepts(
            &s,
            raw(cmd::WRITE, 4096, 512).with(payload),
            NbdCommand::Write { offset, length, fua: false },
        );
        accepts(
            &s,
            raw(cmd::WRITE, 4096, 512).with(payload | cmd_flag::FUA),
            NbdCommand::Write { offset, length, fua: true },
        );
        let length = 512;
        accepts(&s, raw(cmd::FLUSH, 0, 0), NbdCommand::Flush);
        accepts(&s, raw(cmd::DISC, 0, 0), NbdCommand::Disconnect);
        accepts(&s, raw(cmd::TRIM, 4096, 512), NbdCommand::Trim { offset, length, fua: false });
        accepts(&s, raw(cmd::CACHE, 4096, 512), NbdCommand::Cache { offset, length });
        accepts(
            &s,
            raw(cmd::WRITE_ZEROES, 4096, 512).with(cmd_flag::NO_HOLE | cmd_flag::FAST_ZERO | cmd_flag::FUA),
            NbdCommand::WriteZeroes { offset, length, fua: true, no_hole: true, fast: true },
        );
        accepts(
            &s,
            raw(cmd::BLOCK_STATUS, 4096, 512).with(cmd_flag::REQ_ONE),
            NbdCommand::BlockStatus(StatusQuery { offset, length, one: true, contexts: s.contexts }),
        );
    }
}

#[test]
fn a_wrong_magic_closes() {
    for s in [simple(), extended()] {
        let mut bytes = raw(cmd::READ, 0, 512).bytes(s.style);
        bytes[0] ^= 1;
        assert!(matches!(parse(&bytes, &s, SIZE), Parsed::Close(ProtocolViolation::Magic(_))));
    }
    // A header of a style that was not negotiated.
    let compact = raw(cmd::READ, 0, 512).bytes(ReplyStyle::Simple);
    assert!(matches!(parse(&[compact, vec![0; 4]].concat(), &extended(), SIZE), Parsed::Close(_)));
    let wide = raw(cmd::READ, 0, 512).bytes(ReplyStyle::Extended);
    assert!(matches!(parse(&wide, &structured(), SIZE), Parsed::Close(_)));
}

#[test]
fn unknown_commands_are_refused() {
    for kind in [8, 9, 100, u16::MAX] {
        refuses(&simple(), raw(kind, 0, 512), Errno::Inval, 0);
        refuses(&extended(), raw(kind, 0, 512), Errno::Inval, 0);
        refuses(&extended(), raw(kind, 0, 512).with(cmd_flag::PAYLOAD_LEN), Errno::Inval, 512);
    }
}

#[test]
fn flags_are_valid_only_where_they_belong() {
    let valid = [
        (cmd::READ, cmd_flag::DF),
        (cmd::WRITE_ZEROES, cmd_flag::NO_HOLE),
        (cmd::WRITE_ZEROES, cmd_flag::FAST_ZERO),
        (cmd::BLOCK_STATUS, cmd_flag::REQ_ONE),
    ];
    for kind in [cmd::READ, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES, cmd::BLOCK_STATUS] {
        for bit in 1..16 {
            let request = raw(kind, 0, 512).with(1 << bit);
            if valid.contains(&(kind, 1 << bit)) {
                assert!(matches!(run(&structured(), request), Parsed::Request(_)), "{kind} {bit}");
            } else {
                refuses(&structured(), request, Errno::Inval, 0);
            }
        }
    }
    // The payload of a write is skipped whatever is wrong with the header.
    refuses(&structured(), raw(cmd::WRITE, 0, 512).with(cmd_flag::DF), Errno::Inval, 512);
    refuses(&structured(), raw(cmd::WRITE, 0, 512).with(cmd_flag::PAYLOAD_LEN), Errno::Inval, 512);
}

#[test]
fn fua_is_valid_on_every_command_where_it_is_offered() {
    for kind in [cmd::READ, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES, cmd::BLOCK_STATUS] {
        let request = raw(kind, 0, 512).with(cmd_flag::FUA);
        assert!(matches!(run(&simple(), request), Parsed::Request(_)), "{kind}");
        refuses(&without(simple(), export_flag::SEND_FUA), request, Errno::Inval, 0);
    }
    accepts(&simple(), raw(cmd::FLUSH, 0, 0).with(cmd_flag::FUA), NbdCommand::Flush);
}

#[test]
fn requests_without_their_offered_flag_are_rejected() {
    for (kind, flag) in [
        (cmd::TRIM, export_flag::SEND_TRIM),
        (cmd::CACHE, export_flag::SEND_CACHE),
        (cmd::WRITE_ZEROES, export_flag::SEND_WRITE_ZEROES),
    ] {
        refuses(&without(simple(), flag), raw(kind, 0, 512), Errno::Inval, 0);
    }
    refuses(&without(simple(), export_flag::SEND_FLUSH), raw(cmd::FLUSH, 0, 0), Errno::Inval, 0);
    refuses(&simple(), raw(cmd::READ, 0, 512).with(cmd_flag::DF), Errno::Inval, 0);
    let slow = without(simple(), export_flag::SEND_FAST_ZERO);
    refuses(&slow, raw(cmd::WRITE_ZEROES, 0, 512).with(cmd_flag::FAST_ZERO), Errno::Inval, 0);
    let none = NbdSession { contexts: MetaContexts::NONE, ..structured() };
    refuses(&none, raw(cmd::BLOCK_STATUS, 0, 512), Errno::Inval, 0);
}

#[test]
fn past_the_end_is_invalid_to_read_and_no_space_to_write() {
    for (offset, length) in
        [(SIZE, 512), (SIZE - 512, 1024), (u64::MAX - 511, 512), (u64::MAX, u64::from(u16::MAX))]
    {
        for kind in [cmd::READ, cmd::TRIM, cmd::CACHE, cmd::BLOCK_STATUS] {
            refuses(&simple(), raw(kind, offset, length), Errno::Inval, 0);
        }
        refuses(&simple(), raw(cmd::WRITE_ZEROES, offset, length), Errno::NoSpc, 0);
        refuses(&simple(), raw(cmd::WRITE, offset, length), Errno::NoSpc, length as u32);
    }
    refuses(&extended(), raw(cmd::TRIM, 512, u64::MAX), Errno::Inval, 0);
    refuses(&extended(), raw(cmd::WRITE_ZEROES, 512, u64::MAX), Errno::NoSpc, 0);
    let (offset, length) = (SIZE - 512, 512);
    accepts(
        &simple(),
        raw(cmd::READ, offset, 512),
        NbdCommand::Read { offset, length, dont_fragment: false },
    );
}

#[test]
fn a_disk_may_shrink_and_grow_under_a_session() {
    let bytes = raw(cmd::READ, 4096, 512).bytes(ReplyStyle::Simple);
    assert!(matches!(parse(&bytes, &simple(), 4096), Parsed::Refused(_)));
    assert!(matches!(parse(&bytes, &simple(), 8192), Parsed::Request(_)));
    assert!(matches!(parse(&bytes, &simple(), 0), Parsed::Refused(_)));
}

#[test]
fn writing_to_a_read_only_export_is_not_permitted() {
    let s = read_only(simple());
    refuses(&s, raw(cmd::WRITE, 0, 512), Errno::Perm, 512);
    refuses(&s, raw(cmd::TRIM, 0, 512), Errno::Perm, 0);
    refuses(&s, raw(cmd::WRITE_ZEROES, 0, 512), Errno::Perm, 0);
    // Also if the export offers none of these commands, as a read-only export does.
    let s = without(s, export_flag::SEND_TRIM | export_flag::SEND_WRITE_ZEROES);
    refuses(&s, raw(cmd::TRIM, 0, 512), Errno::Perm, 0);
    refuses(&s, raw(cmd::WRITE_ZEROES, 0, 512), Errno::Perm, 0);
    assert!(matches!(run(&s, raw(cmd::READ, 0, 512)), Parsed::Request(_)));
}

#[test]
fn unaligned_to_the_advertised_minimum_is_invalid() {
    for (offset, length) in [(1, 512), (0, 511), (256, 256)] {
        for kind in [cmd::READ, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES, cmd::BLOCK_STATUS] {
            refuses(&simple(), raw(kind, offset, length), Errno::Inval, 0);
        }
        refuses(&simple(), raw(cmd::WRITE, offset, length), Errno::Inval, length as u32);
    }
    let free = NbdSession { minimum_block: 1, sizes_acknowledged: false, ..simple() };
    accepts(&free, raw(cmd::READ, 1, 3), NbdCommand::Read { offset: 1, length: 3, dont_fragment: false });
}

#[test]
fn payloads_have_a_limit_and_ranges_do_not() {
    let long = u64::from(MAX_PAYLOAD) + 512;
    refuses(&simple(), raw(cmd::READ, 0, long), Errno::Inval, 0);
    refuses(&structured(), raw(cmd::READ, 0, long), Errno::Overflow, 0);
    refuses(&extended(), raw(cmd::READ, 0, 1 << 40), Errno::Overflow, 0);
    refuses(&simple(), raw(cmd::WRITE, 0, long), Errno::Inval, long as u32);
    accepts(&simple(), raw(cmd::TRIM, 0, SIZE), NbdCommand::Trim { offset: 0, length: SIZE, fua: false });
    let command =
        NbdCommand::WriteZeroes { offset: 0, length: SIZE, fua: false, no_hole: false, fast: false };
    accepts(&extended(), raw(cmd::WRITE_ZEROES, 0, SIZE), command);
}

#[test]
fn up_to_32_mib_is_skipped_and_more_closes() {
    let max_payload = u64::from(proto::DEFAULT_MAX_PAYLOAD);
    refuses(&simple(), raw(cmd::WRITE, 0, max_payload), Errno::Inval, max_payload as u32);
    assert_eq!(
        run(&simple(), raw(cmd::WRITE, 0, max_payload + 1)),
        Parsed::Close(ProtocolViolation::Payload(max_payload + 1))
    );
    let payload = cmd_flag::PAYLOAD_LEN;
    refuses(&extended(), raw(cmd::TRIM, 0, max_payload).with(payload), Errno::Inval, max_payload as u32);
    for length in [max_payload + 1, 1 << 32, u64::MAX] {
        let request = raw(cmd::TRIM, 0, length).with(payload);
        assert_eq!(run(&extended(), request), Parsed::Close(ProtocolViolation::Payload(length)));
    }
    // A server with a larger maximum payload also skips larger ones.
    let large = NbdSession { maximum_payload: 1 << 26, ..read_only(simple()) };
    refuses(&large, raw(cmd::WRITE, 0, 1 << 26), Errno::Perm, 1 << 26);
}

#[test]
fn requests_of_length_zero_do_no_io() {
    for kind in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES] {
        accepts(&simple(), raw(kind, 512, 0), NbdCommand::Empty);
    }
    refuses(&structured(), raw(cmd::BLOCK_STATUS, 0, 0), Errno::Inval, 0);
    refuses(&simple(), raw(cmd::READ, SIZE + 512, 0), Errno::Inval, 0);
    refuses(&read_only(simple()), raw(cmd::WRITE, 0, 0), Errno::Perm, 0);
}

#[test]
fn a_flush_has_neither_offset_nor_length() {
    refuses(&simple(), raw(cmd::FLUSH, 512, 0), Errno::Inval, 0);
    refuses(&simple(), raw(cmd::FLUSH, 0, 512), Errno::Inval, 0);
}

#[test]
fn disconnect_ignores_its_other_fields() {
    accepts(&extended(), raw(cmd::DISC, 7, u64::MAX).with(u16::MAX), NbdCommand::Disconnect);
}

#[test]
fn payload_len_means_a_payload_with_extended_headers() {
    for kind in [cmd::READ, cmd::FLUSH, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES] {
        refuses(&extended(), raw(kind, 0, 512).with(cmd_flag::PAYLOAD_LEN), Errno::Inval, 512);
    }
}

/// QEMU's client sends a WRITE without PAYLOAD_LEN.
#[test]
fn extended_write_has_a_payload_without_payload_len() {
    let (offset, length) = (4096, 512);
    let write = raw(cmd::WRITE, offset, 512);
    accepts(&extended(), write, NbdCommand::Write { offset, length, fua: false });
    accepts(&extended(), write.with(cmd_flag::FUA), NbdCommand::Write { offset, length, fua: true });
    refuses(&read_only(extended()), write, Errno::Perm, 512);
    refuses(&extended(), write.with(cmd_flag::DF), Errno::Inval, 512);
    refuses(&extended(), raw(cmd::WRITE, SIZE, 512), Errno::NoSpc, 512);
    let max_payload = u64::from(proto::DEFAULT_MAX_PAYLOAD);
    refuses(&extended(), raw(cmd::WRITE, 0, max_payload), Errno::Inval, max_payload as u32);
    assert_eq!(
        run(&extended(), raw(cmd::WRITE, 0, max_payload + 1)),
        Parsed::Close(ProtocolViolation::Payload(max_payload + 1))
    );
}

#[test]
fn df_returns_one_chunk() {
    let command = NbdCommand::Read { offset: 0, length: MAX_PAYLOAD, dont_fragment: true };
    accepts(&structured(), raw(cmd::READ, 0, u64::from(MAX_PAYLOAD)).with(cmd_flag::DF), command);
}

fn status_with(length: u64) -> RawNbdRequest {
    raw(cmd::BLOCK_STATUS, 512, length).with(cmd_flag::PAYLOAD_LEN | cmd_flag::REQ_ONE)
}

#[test]
fn block_status_payload_selects_contexts() {
    let command = NbdCommand::BlockStatusPayload { offset: 512, payload: 12, one: true };
    accepts(&extended(), status_with(12), command);
    assert_eq!(command.payload_bytes(), 12);
    for length in [0, 8, 11, 13, 16, 4096] {
        refuses(&extended(), status_with(length), Errno::Inval, length as u32);
    }
    refuses(&without(extended(), export_flag::BLOCK_STATUS_PAYLOAD), status_with(12), Errno::Inval, 12);
}

/// Parses a payload for BLOCK_STATUS against the session, with errors reduced to their number.
fn status(length: u64, ids: &[u32]) -> Result<NbdCommand, Errno> {
    let mut payload = length.to_be_bytes().to_vec();
    ids.iter().for_each(|id| payload.extend_from_slice(&id.to_be_bytes()));
    status_payload(&payload, RequestTag { cookie: 1, offset: 512 }, true, &extended(), SIZE)
        .map_err(|refused| refused.errno)
}

#[test]
fn the_contexts_of_a_payload_are_checked() {
    let contexts = extended().contexts;
    let query = StatusQuery { offset: 512, length: 1024, one: true, contexts };
    assert_eq!(status(1024, &[1]), Ok(NbdCommand::BlockStatus(query)));
    assert_eq!(status(1024, &[]), Err(Errno::Inval));
    assert_eq!(status(1024, &[1, 1]), Err(Errno::Inval));
    assert_eq!(status(1024, &[0]), Err(Errno::Inval));
    assert_eq!(status(0, &[1]), Err(Errno::Inval));
    assert_eq!(status(SIZE, &[1]), Err(Errno::Inval));
    assert_eq!(status(u64::MAX, &[1]), Err(Errno::Inval));
    assert_eq!(status(1, &[1]), Err(Errno::Inval));
    let short = status_payload(&[0; 7], RequestTag { cookie: 1, offset: 0 }, false, &extended(), SIZE);
    assert!(short.is_err());
}

fn any_style() -> impl Strategy<Value = ReplyStyle> {
    prop::sample::select(vec![ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended])
}

/// Numbers near the edges, and arbitrary ones.
fn edge_numbers() -> impl Strategy<Value = u64> {
    let edges = vec![0, 512, 4096, SIZE - 512, SIZE, 1 << 20, 1 << 25, (1 << 32) - 512, 1 << 32, u64::MAX];
    prop_oneof![prop::sample::select(edges), any::<u64>(), (0..SIZE / 512).prop_map(|n| n * 512)]
}

proptest! {
    #[test]
    fn accepted_requests_lie_inside_the_export(
        style in any_style(), flags in 0u16..64, kind in 0u16..10, offset in edge_numbers(), length in edge_numbers(),
        offers in any::<u16>(), block in 0u32..=16,
    ) {
        let length = if style == ReplyStyle::Extended { length } else { length.min(u64::from(u32::MAX)) };
        let minimum_block = 1 << block;
        let s = NbdSession { flags: offers, minimum_block, ..session(style) };
        let request = RawNbdRequest { flags, kind, offset, length };
        let command = match parse(&request.bytes(style), &s, SIZE) {
            Parsed::Incomplete => panic!("a whole header"),
            Parsed::Request(request) => request.command,
            Parsed::Refused(refused) => {
                prop_assert!(refused.skip <= proto::DEFAULT_MAX_PAYLOAD);
                // Either there is no payload, or all of it is skipped.
                prop_assert!(refused.skip == 0 || u64::from(refused.skip) == length);
                return Ok(());
            }
            Parsed::Close(violation) => {
                prop_assert_eq!(violation, ProtocolViolation::Payload(length));
                return Ok(());
            }
        };
        prop_assert!(command.payload_bytes() <= MAX_PAYLOAD);
        let (start, bytes) = match command {
            NbdCommand::Read { offset, length, .. } | NbdCommand::Write { offset, length, .. } => {
                prop_assert!(length <= MAX_PAYLOAD);
                (offset, u64::from(length))
            }
            NbdCommand::Trim { offset, length, .. }
            | NbdCommand::Cache { offset, length }
            | NbdCommand::WriteZeroes { offset, length, .. }
            | NbdCommand::BlockStatus(StatusQuery { offset, length, .. }) => (offset, length),
            NbdCommand::Disconnect | NbdCommand::Flush | NbdCommand::Empty | NbdCommand::BlockStatusPayload { .. } => {
                return Ok(());
            }
        };
        prop_assert!(bytes > 0 && start.checked_add(bytes).unwrap() <= SIZE);
        prop_assert!((start | bytes) % u64::from(minimum_block) == 0);
        if matches!(command, NbdCommand::Write { .. } | NbdCommand::Trim { .. } | NbdCommand::WriteZeroes { .. }) {
            prop_assert!(!s.offers(export_flag::READ_ONLY));
        }
    }

    #[test]
    fn any_bytes_are_parsed_without_panic(style in any_style(), bytes in prop::collection::vec(any::<u8>(), 0..64), size in any::<u64>()) {
        parse(&bytes, &session(style), size);
        let tag = RequestTag { cookie: 0, offset: size };
        let _ = status_payload(&bytes, tag, true, &session(style), size);
    }
}

proptest! {
    /// A request that was put back is parsed to an equal one by the new process.
    #[test]
    fn encoded_requests_round_trip(
        style in prop_oneof![Just(ReplyStyle::Simple), Just(ReplyStyle::Structured), Just(ReplyStyle::Extended)],
        kind in 0_u16..8,
        flags in 0_u16..128,
        offset in 0..SIZE / 512,
        length in 0..4096_u64,
    ) {
        let session = session(style);
        let length = if kind == cmd::FLUSH { 0 } else { length * 512 };
        let offset = if kind == cmd::FLUSH { 0 } else { offset * 512 };
        let first = parse(&raw(kind, offset, length).with(flags).bytes(style), &session, SIZE);
        if let Parsed::Request(NbdRequest { tag, command }) = first {
            let mut bytes = Vec::new();
            encode(tag, command, &session, &mut bytes);
            let reparsed = parse(&bytes, &session, SIZE);
            match command {
                // An empty request has no effect, so its encoding may differ.
                NbdCommand::Empty | NbdCommand::Disconnect => prop_assert!(matches!(reparsed, Parsed::Request(_))),
                _ => prop_assert_eq!(reparsed, first),
            }
        }
    }
}

#[test]
fn partial_block_status_is_requested_again() {
    let mut session = session(ReplyStyle::Extended);
    session.contexts.insert(MetaContext::AllocationDepth);
    let mut contexts = MetaContexts::NONE;
    contexts.insert(MetaContext::AllocationDepth);
    let (offset, length, one) = (512, 4096, true);
    let requested = NbdCommand::BlockStatus(StatusQuery { offset, length, one, contexts });
    let tag = RequestTag { cookie: COOKIE, offset };
    let mut bytes = Vec::new();
    encode(tag, requested, &session, &mut bytes);
    let parsed = parse(&bytes, &session, SIZE);
    let command = NbdCommand::BlockStatusPayload { offset, payload: 12, one };
    assert_eq!(parsed, Parsed::Request(NbdRequest { tag, command }));
    let payload = &bytes[proto::EXTENDED_REQUEST_BYTES..];
    assert_eq!(status_payload(payload, tag, one, &session, SIZE), Ok(requested));
}
