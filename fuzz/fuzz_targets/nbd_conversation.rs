//! A whole connection: handshake, then requests with their payloads, on storage without data.
//!
//! The first byte selects the client's beginning: a handshake of one of the three styles, so that
//! the fuzzer need not find one, or nothing. The rest is the client's input. Each request must get
//! exactly one reply of the negotiated style, with its cookie, well-formed chunks, and DONE on the
//! last one only; payloads of rejected requests must be skipped.
#![no_main]

use export::nbd::proto::{self, opt, reply_flag};
use export::nbd::request;
use export::nbd::{
    BlockSizes, Errno, ExportInfo, ExportTable, Features, Handshake, HandshakeEvent, NbdCommand, NbdExtent,
    NbdReplyEncoder, NbdRequest, NbdSession, Parsed, ReplyStyle, TlsPolicy,
};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

const SIZE: u64 = 1 << 20;
/// Smaller than inputs, so that payloads may exceed it.
const MAX_PAYLOAD: u32 = 4096;

fn exports() -> ExportTable {
    let export = |name: &str, read_only| ExportInfo {
        name: Arc::from(name),
        description: Arc::from(""),
        size_bytes: SIZE,
        features: Features {
            read_only,
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            dont_fragment: true,
            cache: true,
            multi_conn: true,
            rotational: false,
        },
        sizes: BlockSizes::new(512, 4096, MAX_PAYLOAD).unwrap(),
        bitmaps: Arc::default(),
    };
    ExportTable::new(vec![export("disk", false), export("", true)])
}

fn negotiate(input: &mut &[u8]) -> Option<NbdSession> {
    let mut out = Vec::new();
    let mut handshake = Handshake::start(TlsPolicy::Allowed, &mut out);
    loop {
        let step = handshake.advance(input, &exports(), &mut out);
        *input = &input[step.consumed..];
        match step.event {
            HandshakeEvent::Replied => {}
            HandshakeEvent::StartTls => handshake.tls_established(),
            HandshakeEvent::Transmission(session) => return Some(session),
            HandshakeEvent::NeedInput | HandshakeEvent::Close(_) => return None,
        }
    }
}

/// One reply, in all forms of chunks that its style has.
fn answer(session: &NbdSession, request: NbdRequest, payload: &[u8]) -> Vec<u8> {
    let (encoder, tag) = (NbdReplyEncoder::new(session), request.tag);
    let mut out = Vec::new();
    match request.command {
        NbdCommand::Read { offset, length, dont_fragment } => {
            let half = length / 2;
            match encoder.hole(tag, offset, half, false).filter(|_| half > 0 && !dont_fragment) {
                Some(hole) => {
                    out.extend_from_slice(hole.as_bytes());
                    let rest = encoder.data(tag, offset + u64::from(half), length - half, true);
                    out.extend_from_slice(rest.as_bytes());
                    out.resize(out.len() + (length - half) as usize, 0);
                }
                None => {
                    out.extend_from_slice(encoder.data(tag, offset, length, true).as_bytes());
                    out.resize(out.len() + length as usize, 0);
                }
            }
        }
        NbdCommand::BlockStatus(query) => {
            let extents = [1, 512, 3 << 32, 7].map(|length| NbdExtent { length, flags: 3 });
            let last = query.contexts.len() - 1;
            for (number, context) in query.contexts.iter().enumerate() {
                encoder.block_status(tag, &query, context, &extents, number == last, &mut out);
            }
        }
        NbdCommand::BlockStatusPayload { one, .. } => {
            match request::status_payload(payload, tag, one, session, SIZE) {
                Ok(command) => return answer(session, NbdRequest { tag, command }, &[]),
                Err(refused) => encoder.error(tag, refused.errno, refused.why, &mut out),
            }
        }
        NbdCommand::Trim { .. } => encoder.error(tag, Errno::from_linux(tag.cookie as i32), "é", &mut out),
        NbdCommand::Cache { offset, .. } => encoder.error_at(tag, Errno::Io, "bad", offset, &mut out),
        _ => out.extend_from_slice(encoder.success(tag).as_bytes()),
    }
    out
}

/// Asserts that the output is exactly one reply.
fn check(out: &[u8], style: ReplyStyle, cookie: u64, read_bytes: usize) {
    if style == ReplyStyle::Simple {
        assert_eq!(out[..4], proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
        assert_eq!(out[8..16], cookie.to_be_bytes());
        assert_eq!(out.len(), 16 + read_bytes);
        return;
    }
    let (magic, header) = match style {
        ReplyStyle::Extended => (proto::EXTENDED_REPLY_MAGIC, 32),
        _ => (proto::STRUCTURED_REPLY_MAGIC, 20),
    };
    let mut rest = out;
    loop {
        assert_eq!(rest[..4], magic.to_be_bytes());
        assert_eq!(rest[8..16], cookie.to_be_bytes());
        let length = u32::from_be_bytes(rest[header - 4..header].try_into().unwrap()) as usize;
        let done = rest[5] & reply_flag::DONE as u8 != 0;
        rest = &rest[header + length..];
        assert_eq!(done, rest.is_empty());
        if done {
            return;
        }
    }
}

/// The beginning of the client: flags, the options of the style, GO with or without block sizes.
fn opening(control: u8) -> Vec<u8> {
    let option = |option: u32, data: &[u8]| {
        let length = data.len() as u32;
        [&proto::OPTION_MAGIC.to_be_bytes(), &option.to_be_bytes()[..], &length.to_be_bytes(), data].concat()
    };
    let style = match control % 4 {
        0 => return Vec::new(),
        1 => Vec::new(),
        2 => option(opt::STRUCTURED_REPLY, b""),
        _ => option(opt::EXTENDED_HEADERS, b""),
    };
    let name: &[u8] = if control & 4 == 0 { b"\0\0\0\x04disk" } else { b"\0\0\0\0" };
    let sizes: &[u8] = if control & 8 == 0 { b"\0\x01\0\x03" } else { b"\0\0" };
    let queries = b"\0\0\0\x01\0\0\0\x0fbase:allocation";
    let contexts = option(opt::SET_META_CONTEXT, &[name, queries].concat());
    [3u32.to_be_bytes().to_vec(), style, contexts, option(opt::GO, &[name, sizes].concat())].concat()
}

fuzz_target!(|data: &[u8]| {
    let Some((&control, data)) = data.split_first() else { return };
    let bytes = [&opening(control), data].concat();
    let mut input = &bytes[..];
    let Some(session) = negotiate(&mut input) else { return };
    loop {
        let (request, skip) = match request::parse(input, &session, SIZE) {
            Parsed::Incomplete | Parsed::Close(_) => return,
            Parsed::Request(NbdRequest { command: NbdCommand::Disconnect, .. }) => return,
            Parsed::Request(request) => (Ok(request), request.command.payload_bytes()),
            Parsed::Refused(refused) => (Err(refused), refused.skip),
        };
        let rest = &input[session.style.request_bytes()..];
        let Some((payload, rest)) = rest.split_at_checked(skip as usize) else { return };
        input = rest;
        match request {
            Ok(request) => {
                let read_bytes = match request.command {
                    NbdCommand::Read { length, .. } => length as usize,
                    _ => 0,
                };
                check(&answer(&session, request, payload), session.style, request.tag.cookie, read_bytes);
            }
            Err(refused) => {
                let mut out = Vec::new();
                NbdReplyEncoder::new(&session).error(refused.tag, refused.errno, refused.why, &mut out);
                check(&out, session.style, refused.tag.cookie, 0);
            }
        }
    }
});
