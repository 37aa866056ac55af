//! The handshake on any bytes: no panic, well-formed replies, and the same result for any split of
//! the input.
#![no_main]

use export::nbd::{
    BlockSizes, ExportInfo, ExportTable, Features, Handshake, HandshakeEvent, TlsPolicy, proto,
};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;

fn exports() -> ExportTable {
    let export = |name: &str| ExportInfo {
        name: Arc::from(name),
        description: Arc::from("a disk"),
        size_bytes: 1 << 20,
        features: Features { flush: true, dont_fragment: true, ..Features::default() },
        sizes: BlockSizes::default(),
        bitmaps: [Arc::from("b0")].into(),
    };
    ExportTable::new(vec![export("disk"), export("")])
}

/// The replies and the last event, with the input in pieces of `piece` bytes.
fn talk(policy: TlsPolicy, input: &[u8], piece: usize) -> (Vec<u8>, HandshakeEvent) {
    let exports = exports();
    let mut out = Vec::new();
    let mut handshake = Handshake::start(policy, &mut out);
    let (mut start, mut end) = (0, 0);
    loop {
        let step = handshake.advance(&input[start..end], &exports, &mut out);
        start += step.consumed;
        match step.event {
            HandshakeEvent::NeedInput => {
                assert_eq!(start, end, "input left behind");
                if end == input.len() {
                    return (out, step.event);
                }
                end = input.len().min(end + piece);
            }
            HandshakeEvent::Replied => {}
            HandshakeEvent::StartTls => handshake.tls_established(),
            last @ (HandshakeEvent::Transmission(_) | HandshakeEvent::Close(_)) => return (out, last),
        }
    }
}

/// Asserts that the replies are complete, up to the final reply of EXPORT_NAME.
fn check(out: &[u8], last: HandshakeEvent) {
    let mut rest = &out[18..];
    while rest.starts_with(&proto::OPTION_REPLY_MAGIC.to_be_bytes()) {
        let length = u32::from_be_bytes(rest[16..20].try_into().unwrap()) as usize;
        rest = &rest[20 + length..];
    }
    let export_name = [10, 10 + proto::EXPORT_NAME_PADDING].contains(&rest.len());
    assert!(rest.is_empty() || export_name && matches!(last, HandshakeEvent::Transmission(_)));
}

fuzz_target!(|data: &[u8]| {
    let Some((&control, input)) = data.split_first() else { return };
    let policy = [TlsPolicy::Off, TlsPolicy::Allowed, TlsPolicy::Required][usize::from(control % 3)];
    let whole = talk(policy, input, usize::MAX / 2);
    check(&whole.0, whole.1);
    assert_eq!(whole, talk(policy, input, 1 + usize::from(control / 3)));
});
