//! Replies byte by byte, against the layouts of the specification.

use super::*;
use crate::nbd::context::MetaContexts;
use proptest::prelude::*;

const TAG: RequestTag = RequestTag { cookie: 0x1122_3344_5566_7788, offset: 0x99 };
const COOKIE: &str = "1122334455667788";

fn session(style: ReplyStyle, maximum_payload: u32) -> NbdSession {
    NbdSession {
        export: 0,
        style,
        flags: 1,
        contexts: MetaContexts::NONE,
        sizes_acknowledged: false,
        minimum_block: 1,
        maximum_payload,
    }
}

fn replier(style: ReplyStyle) -> NbdReplyEncoder {
    NbdReplyEncoder::new(&session(style, proto::DEFAULT_MAX_PAYLOAD))
}

const SIMPLE: ReplyStyle = ReplyStyle::Simple;
const STRUCTURED: ReplyStyle = ReplyStyle::Structured;
const EXTENDED: ReplyStyle = ReplyStyle::Extended;

#[track_caller]
fn check(bytes: &[u8], expect: &str) {
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, expect.replace(' ', "").replace("COOKIE", COOKIE));
}

#[test]
fn success() {
    check(replier(SIMPLE).success(TAG).as_bytes(), "67446698 00000000 COOKIE");
    check(replier(STRUCTURED).success(TAG).as_bytes(), "668e33ef 0001 0000 COOKIE 00000000");
    check(
        replier(EXTENDED).success(TAG).as_bytes(),
        "6e8a278c 0001 0000 COOKIE 0000000000000099 0000000000000000",
    );
}

#[test]
fn data() {
    check(replier(SIMPLE).data(TAG, 0x200, 0x1000, true).as_bytes(), "67446698 00000000 COOKIE");
    check(
        replier(STRUCTURED).data(TAG, 0x200, 0x1000, true).as_bytes(),
        "668e33ef 0001 0001 COOKIE 00001008 0000000000000200",
    );
    check(
        replier(STRUCTURED).data(TAG, 0x200, u32::MAX - 8, false).as_bytes(),
        "668e33ef 0000 0001 COOKIE ffffffff 0000000000000200",
    );
    check(
        replier(EXTENDED).data(TAG, 0x200, 0x1000, true).as_bytes(),
        "6e8a278c 0001 0001 COOKIE 0000000000000099 0000000000001008 0000000000000200",
    );
}

#[test]
fn hole() {
    assert!(replier(SIMPLE).hole(TAG, 0, 512, true).is_none());
    check(
        replier(STRUCTURED).hole(TAG, 0x200, 0x1000, false).unwrap().as_bytes(),
        "668e33ef 0000 0002 COOKIE 0000000c 0000000000000200 00001000",
    );
    let longest = replier(EXTENDED).hole(TAG, 0x200, 0x1000, true).unwrap();
    check(
        longest.as_bytes(),
        "6e8a278c 0001 0002 COOKIE 0000000000000099 000000000000000c 0000000000000200 00001000",
    );
    assert_eq!(longest.as_bytes().len(), ReplyHeader::MAX_BYTES);
}

fn error(style: ReplyStyle, message: &str) -> Vec<u8> {
    let mut out = Vec::new();
    replier(style).error(TAG, Errno::NoSpc, message, &mut out);
    out
}

#[test]
fn errors() {
    check(&error(SIMPLE, "no room"), "67446698 0000001c COOKIE");
    check(&error(STRUCTURED, ""), "668e33ef 0001 8001 COOKIE 00000006 0000001c 0000");
    check(&error(STRUCTURED, "full"), "668e33ef 0001 8001 COOKIE 0000000a 0000001c 0004 66756c6c");
    check(
        &error(EXTENDED, "full"),
        "6e8a278c 0001 8001 COOKIE 0000000000000099 000000000000000a 0000001c 0004 66756c6c",
    );
}

#[test]
fn errors_with_an_offset() {
    let at = |style| {
        let mut out = Vec::new();
        replier(style).error_at(TAG, Errno::Io, "bad", 0x4000, &mut out);
        out
    };
    check(&at(SIMPLE), "67446698 00000005 COOKIE");
    check(&at(STRUCTURED), "668e33ef 0001 8002 COOKIE 00000011 00000005 0003 626164 0000000000004000");
    check(
        &at(EXTENDED),
        "6e8a278c 0001 8002 COOKIE 0000000000000099 0000000000000011 00000005 0003 626164 0000000000004000",
    );
}

#[test]
fn messages_are_clipped_to_4096_bytes() {
    let long = error(STRUCTURED, &"x".repeat(5000));
    assert_eq!(long.len(), 20 + 6 + 4096);
    // The chunk's length, then that of the message.
    assert_eq!(long[16..20], (6u32 + 4096).to_be_bytes());
    assert_eq!(long[24..26], 4096u16.to_be_bytes());
}

fn query(length: u64, one: bool) -> StatusQuery {
    StatusQuery { offset: 0, length, one, contexts: MetaContexts::NONE }
}

fn status(style: ReplyStyle, query: StatusQuery, extents: &[(u64, u32)]) -> Vec<u8> {
    let extents: Vec<_> = extents.iter().map(|&(length, flags)| NbdExtent { length, flags }).collect();
    let mut out = b"before".to_vec();
    replier(style).block_status(TAG, &query, MetaContext::BaseAllocation, &extents, true, &mut out);
    assert_eq!(out[..6], *b"before", "what was in the buffer stays");
    out.split_off(6)
}

#[test]
fn block_status() {
    assert_eq!(status(SIMPLE, query(4096, false), &[(4096, 0)]), [0_u8; 0]);
    check(
        &status(STRUCTURED, query(8192, false), &[(4096, 3), (4096, 0)]),
        "668e33ef 0001 0005 COOKIE 00000014 00000001 00001000 00000003 00001000 00000000",
    );
    check(
        &status(EXTENDED, query(8192, false), &[(4096, 3), (1 << 40, 0)]),
        "6e8a278c 0001 0006 COOKIE 0000000000000099 0000000000000028 00000001 00000002 \
         0000000000001000 0000000000000003 0000010000000000 0000000000000000",
    );
}

/// The extents of an encoded reply.
fn encoded_extents(style: ReplyStyle, query: StatusQuery, extents: &[(u64, u32)]) -> Vec<(u64, u32)> {
    let bytes = status(style, query, extents);
    let front = if style == EXTENDED { 40 } else { 24 };
    let size = if style == EXTENDED { 16 } else { 8 };
    bytes[front..]
        .chunks_exact(size)
        .map(|extent| {
            let (length, flags) = extent.split_at(size / 2);
            let number = |bytes: &[u8]| bytes.iter().fold(0, |n, byte| n << 8 | u64::from(*byte));
            (number(length), number(flags) as u32)
        })
        .collect()
}

#[test]
fn only_the_last_extent_reaches_beyond_the_query() {
    let extents = [(4096, 0), (8192, 3), (4096, 0)];
    assert_eq!(encoded_extents(STRUCTURED, query(4096, false), &extents), extents[..1]);
    assert_eq!(encoded_extents(STRUCTURED, query(4097, false), &extents), extents[..2]);
    assert_eq!(encoded_extents(EXTENDED, query(1 << 30, false), &extents), extents);
}

#[test]
fn req_one_returns_one_extent_within_the_range() {
    for style in [STRUCTURED, EXTENDED] {
        assert_eq!(encoded_extents(style, query(512, true), &[(4096, 3), (4096, 0)]), [(512, 3)]);
        assert_eq!(encoded_extents(style, query(1 << 20, true), &[(4096, 3), (4096, 0)]), [(4096, 3)]);
    }
}

#[test]
fn an_extent_longer_than_32_bits_is_cut_and_ends_the_chunk() {
    let extents = [(5 << 30, 3), (4096, 0)];
    assert_eq!(encoded_extents(STRUCTURED, query(6 << 30, false), &extents), [(0xffff_0000, 3)]);
    assert_eq!(encoded_extents(EXTENDED, query(6 << 30, false), &extents), extents);
}

#[test]
fn unknown_allocation_is_reported_as_data() {
    for style in [STRUCTURED, EXTENDED] {
        assert_eq!(encoded_extents(style, query(4096, false), &[]), [(4096, 0)]);
        assert_eq!(encoded_extents(style, query(4096, false), &[(0, 3)]), [(4096, 0)]);
        assert_eq!(encoded_extents(style, query(4096, false), &[(0, 3), (512, 1)]), [(512, 1)]);
    }
}

#[test]
fn a_chunk_holds_no_more_extents_than_the_payload_allows() {
    let extents: Vec<_> = (0..100).map(|_| NbdExtent { length: 512, flags: 0 }).collect();
    for (style, expect) in [(STRUCTURED, 20 + 4 + 512), (EXTENDED, 32 + 8 + 512)] {
        let mut out = Vec::new();
        let replier = NbdReplyEncoder::new(&session(style, 512));
        replier.block_status(
            TAG,
            &query(1 << 20, false),
            MetaContext::BaseAllocation,
            &extents,
            true,
            &mut out,
        );
        assert_eq!(out.len(), expect);
    }
}

proptest! {
    #[test]
    fn a_status_always_keeps_the_specification_s_rules(
        wide in any::<bool>(), one in any::<bool>(), length in 1u64..(1 << 34),
        extents in prop::collection::vec((0u64..(1 << 34), 0u32..4), 0..20),
    ) {
        let style = if wide { EXTENDED } else { STRUCTURED };
        let reported = encoded_extents(style, query(length, one), &extents);
        prop_assert!(!reported.is_empty());
        prop_assert!(reported.iter().all(|extent| extent.0 > 0));
        let before_last: u64 = reported[..reported.len() - 1].iter().map(|extent| extent.0).sum();
        prop_assert!(before_last < length);
        if one {
            prop_assert!(reported.len() == 1 && reported[0].0 <= length);
        }
        // The reply is a prefix of the known extents: equal flags at equal offsets.
        let known: Vec<_> = extents.iter().filter(|extent| extent.0 > 0).collect();
        if !known.is_empty() {
            for (reply_extent, known) in reported.iter().zip(&known) {
                prop_assert!(reply_extent.1 == known.1 && reply_extent.0 <= known.0);
            }
            prop_assert!(reported.iter().zip(&known).rev().skip(1).all(|(reply_extent, known)| reply_extent.0 == known.0));
        }
    }
}
