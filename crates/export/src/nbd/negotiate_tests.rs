//! The handshake against the specification: each test is one rule, as a conversation.

use super::*;
use crate::nbd::catalog::{BlockSizes, ExportInfo, ExportTable, Features};
use crate::nbd::context::{MetaContext, MetaContexts};
use crate::nbd::proto::{export_flag, info};
use crate::nbd::session::ReplyStyle;
use proptest::prelude::*;
use std::sync::Arc;

const GREETING_BYTES: usize = 18;
const BOTH: u32 = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;

#[derive(Clone)]
struct HandshakeInput(Vec<u8>);

impl HandshakeInput {
    fn new(flags: u32) -> Self {
        Self(flags.to_be_bytes().to_vec())
    }

    fn fixed() -> Self {
        Self::new(BOTH)
    }

    fn option(self, option: u32, data: &[u8]) -> Self {
        let length = data.len() as u32;
        self.header(option, length).raw(data)
    }

    fn header(self, option: u32, length: u32) -> Self {
        self.raw(&proto::OPTION_MAGIC.to_be_bytes()).raw(&option.to_be_bytes()).raw(&length.to_be_bytes())
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

/// The data of INFO and GO.
fn about(name: &str, kinds: &[u16]) -> Vec<u8> {
    let mut data = text(name);
    data.extend_from_slice(&(kinds.len() as u16).to_be_bytes());
    kinds.iter().for_each(|kind| data.extend_from_slice(&kind.to_be_bytes()));
    data
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
fn queries(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&text(query)));
    data
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

fn export(name: &str, description: &str, size_bytes: u64) -> ExportInfo {
    ExportInfo {
        name: Arc::from(name),
        description: Arc::from(description),
        size_bytes,
        features: Features { flush: true, fua: true, dont_fragment: true, ..Features::default() },
        sizes: BlockSizes::new(512, 4096, 1 << 20).unwrap(),
        bitmaps: ["b0".into()].into(),
    }
}

/// Two exports, the second the default one.
fn table() -> ExportTable {
    ExportTable::new(vec![export("disk", "a disk", 1 << 20), export("", "", 4096 + 1)])
}

#[derive(Debug, PartialEq)]
struct HandshakeTranscript {
    out: Vec<u8>,
    /// Bytes behind the last one that the handshake consumed.
    left: usize,
    last: HandshakeEvent,
    tls: usize,
}

impl HandshakeTranscript {
    /// Each option reply as (option, kind, data).
    fn replies(&self) -> Vec<(u32, u32, Vec<u8>)> {
        let mut rest = &self.out[GREETING_BYTES..];
        let mut replies = Vec::new();
        while !rest.is_empty() {
            assert_eq!(&rest[..8], &proto::OPTION_REPLY_MAGIC.to_be_bytes());
            let number = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().unwrap());
            let (option, kind, length) = (number(8), number(12), number(16) as usize);
            replies.push((option, kind, rest[20..20 + length].to_vec()));
            rest = &rest[20 + length..];
        }
        replies
    }

    fn kinds(&self) -> Vec<u32> {
        self.replies().iter().map(|reply| reply.1).collect()
    }

    fn session(&self) -> NbdSession {
        match self.last {
            HandshakeEvent::Transmission(session) => session,
            other => panic!("no transmission: {other:?}"),
        }
    }
}

/// Feeds the input in pieces of these lengths, cyclically.
fn transcript_in(
    policy: TlsPolicy,
    exports: &ExportTable,
    input: &[u8],
    pieces: &[usize],
) -> HandshakeTranscript {
    let mut out = Vec::new();
    let mut handshake = Handshake::start(policy, &mut out);
    let (mut start, mut tls) = (0, 0);
    let mut pieces = pieces.iter().copied().cycle();
    let mut end = 0;
    loop {
        let step = handshake.advance(&input[start..end], exports, &mut out);
        start += step.consumed;
        assert!(handshake.buffer.len() <= MAX_OPTION_BYTES);
        match step.event {
            HandshakeEvent::NeedInput => {
                assert_eq!(start, end, "input left behind");
                if end == input.len() {
                    return HandshakeTranscript { out, left: 0, last: HandshakeEvent::NeedInput, tls };
                }
                end = input.len().min(end + pieces.next().unwrap());
            }
            HandshakeEvent::Replied => {}
            HandshakeEvent::StartTls => {
                let repeated = handshake.advance(&input[start..end], exports, &mut out);
                // Until `tls_established`, the handshake accepts nothing.
                assert_eq!(
                    repeated,
                    HandshakeStep { consumed: 0, event: HandshakeEvent::StartTls },
                    "went on without TLS"
                );
                handshake.tls_established();
                tls += 1;
            }
            last @ (HandshakeEvent::Transmission(_) | HandshakeEvent::Close(_)) => {
                assert_eq!(
                    handshake.advance(b"more", exports, &mut out),
                    HandshakeStep { consumed: 0, event: last }
                );
                return HandshakeTranscript { out, left: input.len() - start, last, tls };
            }
        }
    }
}

fn transcript_with(policy: TlsPolicy, client: &HandshakeInput) -> HandshakeTranscript {
    transcript_in(policy, &table(), &client.0, &[usize::MAX / 2])
}

fn transcript_of(client: &HandshakeInput) -> HandshakeTranscript {
    transcript_with(TlsPolicy::Off, client)
}

/// The kinds of replies to one option of a client without TLS.
fn kinds(option: u32, data: &[u8]) -> Vec<u32> {
    transcript_of(&HandshakeInput::fixed().option(option, data)).kinds()
}

#[test]
fn greeting_matches_the_specification() {
    let out = transcript_of(&HandshakeInput(Vec::new())).out;
    assert_eq!(out, b"NBDMAGICIHAVEOPT\0\x03");
}

#[test]
fn flags_that_were_not_offered_close() {
    assert_eq!(
        transcript_of(&HandshakeInput::new(4)).last,
        HandshakeEvent::Close(HandshakeClose::ClientFlags(4))
    );
    // GET_FEATURES and SET_OWNER of vhost-user, in little-endian order.
    for flags in [0x0100_0000, 0x0300_0000] {
        assert_eq!(
            transcript_of(&HandshakeInput::new(flags)).last,
            HandshakeEvent::Close(HandshakeClose::VhostUser)
        );
    }
    assert_eq!(
        transcript_of(&HandshakeInput::new(u32::MAX)).last,
        HandshakeEvent::Close(HandshakeClose::ClientFlags(u32::MAX))
    );
}

#[test]
fn export_name_answers_size_flags_and_124_zeroes() {
    let flags = export_flag::HAS_FLAGS | export_flag::SEND_FLUSH | export_flag::SEND_FUA;
    let reply = [&(1u64 << 20).to_be_bytes()[..], &flags.to_be_bytes()].concat();

    let padded = transcript_of(&HandshakeInput::new(1).option(opt::EXPORT_NAME, b"disk").raw(b"next"));
    assert_eq!(padded.out[GREETING_BYTES..], [reply.clone(), vec![0; 124]].concat());
    assert_eq!(padded.left, 4, "the first request belongs to the next phase");

    let plain = transcript_of(&HandshakeInput::fixed().option(opt::EXPORT_NAME, b"disk"));
    assert_eq!(plain.out[GREETING_BYTES..], reply);
    let session = plain.session();
    assert_eq!((session.export, session.style, session.flags), (0, ReplyStyle::Simple, flags));
    assert_eq!((session.sizes_acknowledged, session.minimum_block), (false, 1));
}

#[test]
fn without_fixed_newstyle_only_export_name_is_allowed() {
    assert_eq!(transcript_of(&HandshakeInput::new(0).option(opt::EXPORT_NAME, b"disk")).session().export, 0);
    for option in [opt::LIST, opt::GO, opt::STARTTLS, opt::ABORT, 99] {
        let transcript = transcript_of(&HandshakeInput::new(client_flag::NO_ZEROES).option(option, b""));
        assert_eq!(transcript.last, HandshakeEvent::Close(HandshakeClose::NotFixedNewstyle(option)));
        assert_eq!(transcript.kinds(), [0_u32; 0]);
    }
}

#[test]
fn export_name_closes_where_it_cannot_succeed() {
    for name in [&b"other"[..], b"\xff", b"di\0sk"] {
        let transcript = transcript_of(&HandshakeInput::fixed().option(opt::EXPORT_NAME, name));
        assert!(matches!(transcript.last, HandshakeEvent::Close(HandshakeClose::ExportName(_))), "{name:?}");
        assert_eq!(transcript.kinds(), [0_u32; 0]);
    }
    let long = transcript_of(&HandshakeInput::fixed().header(opt::EXPORT_NAME, 4097));
    assert!(matches!(long.last, HandshakeEvent::Close(HandshakeClose::ExportName(_))));
    let extended =
        HandshakeInput::fixed().option(opt::EXTENDED_HEADERS, b"").option(opt::EXPORT_NAME, b"disk");
    assert!(matches!(transcript_of(&extended).last, HandshakeEvent::Close(HandshakeClose::ExportName(_))));
}

#[test]
fn abort_is_acknowledged_with_any_payload() {
    for data in [&b""[..], b"bye"] {
        let transcript = transcript_of(&HandshakeInput::fixed().option(opt::ABORT, data));
        assert_eq!(
            (transcript.last, transcript.kinds()),
            (HandshakeEvent::Close(HandshakeClose::Aborted), vec![rep::ACK])
        );
    }
}

#[test]
fn wrong_option_magic_closes() {
    let transcript = transcript_of(&HandshakeInput::fixed().raw(b"GET / HTTP/1.1\r\n"));
    assert_eq!(
        transcript.last,
        HandshakeEvent::Close(HandshakeClose::OptionMagic(u64::from_be_bytes(*b"GET / HT")))
    );
}

#[test]
fn unknown_options_are_refused_and_skipped() {
    let client = HandshakeInput::fixed().option(4, b"peek").option(77, &[1; 100_000]).option(opt::LIST, b"");
    assert_eq!(
        transcript_of(&client).kinds(),
        [rep::ERR_UNSUP, rep::ERR_UNSUP, rep::SERVER, rep::SERVER, rep::ACK]
    );
}

#[test]
fn oversized_option_is_rejected_and_huge_one_disconnects() {
    let big = HandshakeInput::fixed().option(opt::GO, &vec![0; MAX_OPTION_BYTES + 1]).option(opt::LIST, b"");
    assert_eq!(transcript_of(&big).kinds(), [rep::ERR_TOO_BIG, rep::SERVER, rep::SERVER, rep::ACK]);
    for option in [opt::GO, opt::ABORT, 77] {
        let huge = HandshakeInput::fixed().header(option, MAX_SKIPPED_BYTES + 1);
        let length = MAX_SKIPPED_BYTES + 1;
        assert_eq!(
            transcript_of(&huge).last,
            HandshakeEvent::Close(HandshakeClose::OptionTooLong { option, length })
        );
    }
}

#[test]
fn the_number_of_options_is_limited() {
    let mut client = HandshakeInput::fixed();
    for _ in 0..=MAX_OPTIONS {
        client = client.option(opt::STRUCTURED_REPLY, b"");
    }
    let transcript = transcript_of(&client);
    assert_eq!(transcript.last, HandshakeEvent::Close(HandshakeClose::TooManyOptions));
    assert_eq!(transcript.kinds().len() as u32, MAX_OPTIONS);
}

#[test]
fn data_is_rejected_on_options_without_data() {
    for option in [opt::LIST, opt::STARTTLS, opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS] {
        let client = HandshakeInput::fixed().option(option, b"x").option(option, b"");
        let kinds = transcript_with(TlsPolicy::Allowed, &client).kinds();
        assert_eq!(kinds[0], rep::ERR_INVALID, "option {option}");
        assert_eq!(*kinds.last().unwrap(), rep::ACK, "option {option}");
    }
}

#[test]
fn list_names_every_export() {
    let transcript = transcript_of(&HandshakeInput::fixed().option(opt::LIST, b""));
    let replies = transcript.replies();
    assert_eq!(replies[0], (opt::LIST, rep::SERVER, [text("disk"), b"a disk".to_vec()].concat()));
    assert_eq!(replies[1], (opt::LIST, rep::SERVER, text("")));
    assert_eq!(replies[2], (opt::LIST, rep::ACK, vec![]));
}

#[test]
fn long_list_is_sent_in_parts() {
    let long = "d".repeat(3000);
    let exports = ExportTable::new((0..1000).map(|n| export(&format!("disk{n}"), &long, 0)).collect());
    let mut out = Vec::new();
    let mut handshake = Handshake::start(TlsPolicy::Off, &mut out);
    let client = HandshakeInput::fixed().option(opt::LIST, b"");
    let mut step = handshake.advance(&client.0, &exports, &mut out);
    assert_eq!(step.consumed, client.0.len());
    let mut all = out.clone();
    while step.event == HandshakeEvent::Replied {
        assert!(out.len() < LIST_BATCH_BYTES + 8192);
        out.clear();
        step = handshake.advance(b"", &exports, &mut out);
        all.extend_from_slice(&out);
    }
    let transcript = HandshakeTranscript { out: all, left: 0, last: step.event, tls: 0 };
    assert_eq!(transcript.kinds().len(), 1001);
    assert_eq!(transcript.last, HandshakeEvent::NeedInput);
}

#[test]
fn names_the_protocol_cannot_carry_are_not_listed() {
    let exports = ExportTable::new(vec![export(&"n".repeat(4097), "", 0), export("a\0b", "", 0)]);
    let client = HandshakeInput::fixed().option(opt::LIST, b"").option(opt::GO, &about("x", &[]));
    let transcript = transcript_in(TlsPolicy::Off, &exports, &client.0, &[1]);
    assert_eq!(transcript.kinds(), [rep::ACK, rep::ERR_UNKNOWN]);
}

#[test]
fn info_has_the_requested_items_and_always_size_and_flags() {
    let data = about("disk", &[info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 99]);
    let transcript = transcript_of(&HandshakeInput::fixed().option(opt::INFO, &data));
    let items: Vec<_> = transcript.replies().into_iter().map(|(_, kind, data)| (kind, data)).collect();
    let flags = export_flag::HAS_FLAGS | export_flag::SEND_FLUSH | export_flag::SEND_FUA;
    let item = |kind: u16, parts: &[&[u8]]| (rep::INFO, [&kind.to_be_bytes(), &parts.concat()[..]].concat());
    assert_eq!(
        items,
        [
            item(info::EXPORT, &[&(1u64 << 20).to_be_bytes(), &flags.to_be_bytes()]),
            item(info::NAME, &[b"disk"]),
            item(info::DESCRIPTION, &[b"a disk"]),
            item(
                info::BLOCK_SIZE,
                &[&512u32.to_be_bytes(), &4096u32.to_be_bytes(), &(1u32 << 20).to_be_bytes()]
            ),
            (rep::ACK, vec![]),
        ]
    );
    assert_eq!(transcript.last, HandshakeEvent::NeedInput, "INFO does not start transmission");
}

#[test]
fn client_without_block_size_request_may_use_any_alignment() {
    let replies = transcript_of(&HandshakeInput::fixed().option(opt::INFO, &about("disk", &[]))).replies();
    let sizes = &replies[1].2;
    assert_eq!(sizes[..2], info::BLOCK_SIZE.to_be_bytes());
    assert_eq!(sizes[2..6], 1u32.to_be_bytes());
}

#[test]
fn the_default_export_has_the_empty_name() {
    let transcript = transcript_of(&HandshakeInput::fixed().option(opt::GO, &about("", &[info::NAME])));
    assert_eq!(transcript.session().export, 1);
    assert!(transcript.replies().contains(&(opt::GO, rep::INFO, info::NAME.to_be_bytes().to_vec())));
}

#[test]
fn go_with_block_sizes_enforces_alignment() {
    let bound = transcript_of(&HandshakeInput::fixed().option(opt::GO, &about("disk", &[info::BLOCK_SIZE])))
        .session();
    assert_eq!((bound.sizes_acknowledged, bound.minimum_block), (true, 512));
    let free = transcript_of(&HandshakeInput::fixed().option(opt::GO, &about("disk", &[]))).session();
    assert_eq!((free.sizes_acknowledged, free.minimum_block), (false, 1));
    assert_eq!(free.maximum_payload, 1 << 20);
    // The default export's size is odd: its last byte must stay within reach.
    let odd =
        transcript_of(&HandshakeInput::fixed().option(opt::GO, &about("", &[info::BLOCK_SIZE]))).session();
    assert_eq!((odd.sizes_acknowledged, odd.minimum_block), (true, 1));
}

#[test]
fn info_does_not_acknowledge_sizes() {
    let request = about("disk", &[info::BLOCK_SIZE]);
    let client = HandshakeInput::fixed().option(opt::INFO, &request).option(opt::GO, &about("disk", &[]));
    assert!(!transcript_of(&client).session().sizes_acknowledged);
}

#[test]
fn unknown_exports_are_rejected_and_negotiation_continues() {
    let client = HandshakeInput::fixed()
        .option(opt::GO, &about("other", &[]))
        .option(opt::INFO, &about("other", &[]))
        .option(opt::LIST_META_CONTEXT, &queries("other", &[]))
        .option(opt::GO, &about("disk", &[]));
    let transcript = transcript_of(&client);
    assert_eq!(transcript.kinds()[..3], [rep::ERR_UNKNOWN; 3]);
    assert_eq!(transcript.session().export, 0);
}

#[test]
fn malformed_info_is_invalid() {
    let good = about("disk", &[info::NAME]);
    for cut in 0..good.len() {
        assert_eq!(kinds(opt::INFO, &good[..cut]), [rep::ERR_INVALID], "cut to {cut}");
        assert_eq!(kinds(opt::GO, &good[..cut]), [rep::ERR_INVALID], "cut to {cut}");
    }
    let longer = [&good[..], b"\0"].concat();
    assert_eq!(kinds(opt::GO, &longer), [rep::ERR_INVALID]);
    let huge_name = [&u32::MAX.to_be_bytes()[..], b"disk\0\0"].concat();
    assert_eq!(kinds(opt::GO, &huge_name), [rep::ERR_INVALID]);
    assert_eq!(kinds(opt::GO, &about("a\0b", &[])), [rep::ERR_INVALID]);
    assert_eq!(kinds(opt::GO, &about(&"n".repeat(4097), &[])), [rep::ERR_INVALID]);
    assert_eq!(kinds(opt::GO, &about(&"n".repeat(4096), &[])), [rep::ERR_UNKNOWN]);
}

#[test]
fn structured_replies_and_extended_headers_are_negotiated_once() {
    let go = about("disk", &[]);
    let client =
        HandshakeInput::fixed().option(opt::STRUCTURED_REPLY, b"").option(opt::STRUCTURED_REPLY, b"");
    let structured_transcript = transcript_of(&client.clone().option(opt::GO, &go));
    assert_eq!(structured_transcript.kinds()[..2], [rep::ACK, rep::ERR_INVALID]);
    assert_eq!(structured_transcript.session().style, ReplyStyle::Structured);
    assert!(structured_transcript.session().offers(export_flag::SEND_DF));

    let client = client.option(opt::EXTENDED_HEADERS, b"").option(opt::EXTENDED_HEADERS, b"");
    let talk2 = transcript_of(&client.clone().option(opt::STRUCTURED_REPLY, b"").option(opt::GO, &go));
    assert_eq!(talk2.kinds()[2..5], [rep::ACK, rep::ERR_INVALID, rep::ERR_EXT_HEADER_REQD]);
    assert_eq!(talk2.session().style, ReplyStyle::Extended);

    let alone =
        transcript_of(&HandshakeInput::fixed().option(opt::EXTENDED_HEADERS, b"").option(opt::GO, &go));
    assert_eq!(alone.session().style, ReplyStyle::Extended);
    assert!(!alone.session().offers(export_flag::BLOCK_STATUS_PAYLOAD), "no context was selected");
}

#[test]
fn contexts_are_listed_by_name_namespace_or_without_a_query() {
    let listed = [rep::META_CONTEXT, rep::ACK];
    for queried in [
        &["base:"][..],
        &["base:allocation"],
        &["x:", "base:allocation", "base:"],
        &["qemu:allocation-depth"],
        &["qemu:dirty-bitmap:"],
    ] {
        assert_eq!(kinds(opt::LIST_META_CONTEXT, &queries("disk", queried)), listed, "{queried:?}");
    }
    let all = [rep::META_CONTEXT, rep::META_CONTEXT, rep::META_CONTEXT, rep::ACK];
    assert_eq!(kinds(opt::LIST_META_CONTEXT, &queries("disk", &[])), all);
    assert_eq!(kinds(opt::LIST_META_CONTEXT, &queries("disk", &["qemu:"])), all[1..]);
    for queried in [&["qemu:dirty-bitmap"][..], &["base:other"], &["base"], &[""]] {
        assert_eq!(kinds(opt::LIST_META_CONTEXT, &queries("disk", queried)), [rep::ACK], "{queried:?}");
    }
    let replies =
        transcript_of(&HandshakeInput::fixed().option(opt::LIST_META_CONTEXT, &queries("", &[]))).replies();
    assert_eq!(replies[0].2, b"\0\0\0\0base:allocation");
    assert_eq!(replies[1].2, b"\0\0\0\0qemu:allocation-depth");
    assert_eq!(replies[2].2, b"\0\0\0\0qemu:dirty-bitmap:b0");
}

/// The contexts in force on the export `go` after a SET_META_CONTEXT for each of `sets`.
fn contexts_after(sets: &[Vec<u8>], go: &str) -> MetaContexts {
    let mut client = HandshakeInput::fixed().option(opt::STRUCTURED_REPLY, b"");
    for set in sets {
        client = client.option(opt::SET_META_CONTEXT, set);
    }
    transcript_of(&client.option(opt::GO, &about(go, &[]))).session().contexts
}

#[test]
fn contexts_are_selected_by_full_name_for_one_export() {
    let allocation = queries("disk", &["base:allocation", "qemu:dirty-bitmap:b", "base:allocation"]);
    assert!(contexts_after(std::slice::from_ref(&allocation), "disk").contains(MetaContext::BaseAllocation));
    assert!(contexts_after(std::slice::from_ref(&allocation), "").is_empty(), "selected for another export");
    assert!(contexts_after(&[], "disk").is_empty());
    for unmatched in [&["base:"][..], &[], &["x-y:z"]] {
        assert!(contexts_after(&[queries("disk", unmatched)], "disk").is_empty(), "{unmatched:?}");
    }
    // Each selection replaces the earlier one, also if it fails.
    for failing in [queries("disk", &[]), queries("other", &[]), vec![1], vec![0; MAX_OPTION_BYTES + 1]] {
        assert!(contexts_after(&[allocation.clone(), failing], "disk").is_empty());
    }
}

#[test]
fn a_selected_context_is_named_once_with_its_number() {
    let set = queries("disk", &["base:allocation", "base:allocation"]);
    let client =
        HandshakeInput::fixed().option(opt::EXTENDED_HEADERS, b"").option(opt::SET_META_CONTEXT, &set);
    let transcript = transcript_of(&client.option(opt::GO, &about("disk", &[])));
    assert_eq!(transcript.kinds()[1..3], [rep::META_CONTEXT, rep::ACK]);
    assert_eq!(transcript.replies()[1].2, b"\0\0\0\x01base:allocation");
    assert!(transcript.session().offers(export_flag::BLOCK_STATUS_PAYLOAD));
}

#[test]
fn selecting_contexts_needs_chunks() {
    assert_eq!(kinds(opt::SET_META_CONTEXT, &queries("disk", &["base:allocation"])), [rep::ERR_INVALID]);
}

#[test]
fn malformed_queries_are_invalid() {
    let good = queries("disk", &["base:allocation"]);
    for cut in 0..good.len() {
        assert_eq!(kinds(opt::LIST_META_CONTEXT, &good[..cut]), [rep::ERR_INVALID], "cut to {cut}");
    }
    let counted = [&text("disk")[..], &u32::MAX.to_be_bytes()].concat();
    assert_eq!(kinds(opt::LIST_META_CONTEXT, &counted), [rep::ERR_INVALID]);
    assert_eq!(kinds(opt::LIST_META_CONTEXT, &[&good[..], b"\0"].concat()), [rep::ERR_INVALID]);
}

#[test]
fn tls_is_refused_where_it_is_off() {
    assert_eq!(kinds(opt::STARTTLS, b""), [rep::ERR_POLICY]);
}

#[test]
fn starttls_discards_earlier_negotiation() {
    let client = HandshakeInput::fixed()
        .option(opt::STRUCTURED_REPLY, b"")
        .option(opt::SET_META_CONTEXT, &queries("disk", &["base:allocation"]))
        .option(opt::STARTTLS, b"")
        .option(opt::STARTTLS, b"")
        .option(opt::GO, &about("disk", &[]));
    for policy in [TlsPolicy::Allowed, TlsPolicy::Required] {
        let transcript = transcript_with(policy, &client);
        assert_eq!(transcript.tls, 1);
        assert!(transcript.replies().contains(&(opt::STARTTLS, rep::ACK, vec![])));
        assert!(transcript.replies().iter().any(|r| (r.0, r.1) == (opt::STARTTLS, rep::ERR_INVALID)));
        let session = transcript.session();
        assert_eq!((session.style, session.contexts.is_empty()), (ReplyStyle::Simple, true));
    }
}

#[test]
fn extended_headers_do_not_survive_tls() {
    let client = HandshakeInput::fixed()
        .option(opt::EXTENDED_HEADERS, b"")
        .option(opt::STARTTLS, b"")
        .option(opt::EXPORT_NAME, b"disk");
    assert_eq!(transcript_with(TlsPolicy::Allowed, &client).session().style, ReplyStyle::Simple);
}

#[test]
fn required_tls_rejects_other_options_first() {
    for option in [opt::LIST, opt::INFO, opt::GO, opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS, 4, 99] {
        let transcript = transcript_with(TlsPolicy::Required, &HandshakeInput::fixed().option(option, b""));
        assert_eq!(transcript.kinds(), [rep::ERR_TLS_REQD], "option {option}");
    }
    let named = HandshakeInput::fixed().option(opt::EXPORT_NAME, b"disk");
    assert!(matches!(
        transcript_with(TlsPolicy::Required, &named).last,
        HandshakeEvent::Close(HandshakeClose::ExportName(_))
    ));
    let abort = HandshakeInput::fixed().option(opt::ABORT, b"");
    assert_eq!(transcript_with(TlsPolicy::Required, &abort).kinds(), [rep::ACK]);
    let plain = HandshakeInput::fixed().option(opt::GO, &about("disk", &[]));
    assert_eq!(transcript_with(TlsPolicy::Allowed, &plain).session().export, 0);
}

#[test]
fn bytes_behind_starttls_are_not_taken_for_options() {
    // An attacker on the network could insert them; the TLS handshake will fail on them.
    let client = HandshakeInput::fixed().option(opt::STARTTLS, b"");
    let clear = client.0.len();
    let client = client.option(opt::LIST, b"");
    let mut out = Vec::new();
    let mut handshake = Handshake::start(TlsPolicy::Allowed, &mut out);
    let step = handshake.advance(&client.0, &table(), &mut out);
    assert_eq!(step, HandshakeStep { consumed: clear, event: HandshakeEvent::StartTls });
}

/// An option with valid, nearly valid, or arbitrary data.
fn any_option() -> impl Strategy<Value = (u32, Vec<u8>)> {
    let name = prop_oneof![Just("disk"), Just(""), Just("other")];
    let query = prop_oneof![Just("base:"), Just("base:allocation"), Just("qemu:x"), Just("")];
    let go =
        (prop_oneof![Just(opt::INFO), Just(opt::GO)], name.clone(), prop::collection::vec(0u16..6, 0..4))
            .prop_map(|(option, name, kinds)| (option, about(name, &kinds)));
    let contexts = (9u32..=10, name, prop::collection::vec(query, 0..3))
        .prop_map(|(option, name, texts)| (option, queries(name, &texts)));
    let plain =
        prop::sample::select(vec![opt::LIST, opt::STARTTLS, opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS])
            .prop_map(|option| (option, Vec::new()));
    let wild = (0u32..14, prop::collection::vec(any::<u8>(), 0..40));
    prop_oneof![go, contexts, plain, wild]
}

fn any_policy() -> impl Strategy<Value = TlsPolicy> {
    prop::sample::select(vec![TlsPolicy::Off, TlsPolicy::Allowed, TlsPolicy::Required])
}

proptest! {
    #[test]
    fn split_of_input_does_not_matter(
        policy in any_policy(),
        options in prop::collection::vec(any_option(), 0..12),
        tail in prop::collection::vec(any::<u8>(), 0..30),
        pieces in prop::collection::vec(1usize..50, 1..20),
    ) {
        let client = options.iter().fold(HandshakeInput::fixed(), |client, (option, data)| client.option(*option, data));
        let client = client.raw(&tail);
        let unsplit = transcript_in(policy, &table(), &client.0, &[usize::MAX / 2]);
        let split = transcript_in(policy, &table(), &client.0, &pieces);
        prop_assert_eq!(unsplit, split);
    }

    #[test]
    fn any_bytes_are_parsed_without_panic(policy in any_policy(), bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        transcript_in(policy, &table(), &bytes, &[7]);
        transcript_in(policy, &table(), &HandshakeInput::fixed().raw(&bytes).0, &[64]);
    }

    #[test]
    fn every_option_has_one_final_reply(options in prop::collection::vec(any_option(), 0..12)) {
        // Up to the option that ends the negotiation.
        let client = options.iter().fold(HandshakeInput::fixed(), |client, (option, data)| client.option(*option, data));
        let transcript = transcript_with(TlsPolicy::Allowed, &client);
        if transcript.last == HandshakeEvent::NeedInput {
            let finals = transcript.kinds().into_iter().filter(|kind| *kind == rep::ACK || kind >> 31 == 1).count();
            prop_assert_eq!(finals, options.len());
        }
    }
}
