//! A request header on any session: an accepted request is valid without further checks.
#![no_main]

use export::nbd::proto::{self, export_flag};
use export::nbd::request::{self, StatusQuery};
use export::nbd::{MetaContext, MetaContexts, NbdCommand, NbdSession, Parsed, ReplyStyle};
use libfuzzer_sys::fuzz_target;

const SIZE: u64 = 1 << 30;
const MAX_PAYLOAD: u32 = 1 << 20;

/// Range of the command in the export: first byte, length, true if it writes.
fn range(command: NbdCommand) -> Option<(u64, u64, bool)> {
    Some(match command {
        NbdCommand::Read { offset, length, .. } => (offset, length.into(), false),
        NbdCommand::Write { offset, length, .. } => (offset, length.into(), true),
        NbdCommand::Trim { offset, length, .. } | NbdCommand::WriteZeroes { offset, length, .. } => {
            (offset, length, true)
        }
        NbdCommand::Cache { offset, length } => (offset, length, false),
        NbdCommand::BlockStatus(StatusQuery { offset, length, .. }) => (offset, length, false),
        _ => return None,
    })
}

fn check(command: NbdCommand, session: &NbdSession) {
    assert!(command.payload_bytes() <= MAX_PAYLOAD);
    if let Some((offset, length, writes)) = range(command) {
        assert!(length > 0 && offset.checked_add(length).is_some_and(|end| end <= SIZE));
        assert_eq!((offset | length) % u64::from(session.minimum_block), 0);
        assert!(!(writes && session.offers(export_flag::READ_ONLY)));
    }
}

fuzz_target!(|data: &[u8]| {
    let [style, flags @ .., block] =
        data.get(..4).and_then(|head| <[u8; 4]>::try_from(head).ok()).unwrap_or_default();
    let Some(input) = data.get(4..) else { return };
    let style = [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended][usize::from(style % 3)];
    let mut contexts = MetaContexts::NONE;
    contexts.insert(MetaContext::BaseAllocation);
    let session = NbdSession {
        export: 0,
        style,
        flags: u16::from_be_bytes(flags),
        contexts,
        sizes_acknowledged: true,
        minimum_block: 1 << (block % 17),
        maximum_payload: MAX_PAYLOAD,
    };
    match request::parse(input, &session, SIZE) {
        Parsed::Incomplete => assert!(input.len() < style.request_bytes()),
        Parsed::Close(_) => {}
        Parsed::Refused(refused) => assert!(refused.skip <= proto::DEFAULT_MAX_PAYLOAD),
        Parsed::Request(request) => {
            check(request.command, &session);
            if let NbdCommand::BlockStatusPayload { payload, one, .. } = request.command {
                let rest = &input[style.request_bytes()..];
                let rest = &rest[..rest.len().min(payload as usize)];
                if let Ok(command) = request::status_payload(rest, request.tag, one, &session, SIZE) {
                    check(command, &session);
                }
            }
        }
    }
});
