//! Extended headers (64-bit lengths), which Debian's libnbd lacks: "Extended headers" and "Request
//! message" of the specification.

use crate::harness::{
    MIB, RawNbdClient, Scratch, Serve, Weir, pattern, text,
    wire::{
        CMD_BLOCK_STATUS, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, CMD_WRITE_ZEROES, EINVAL, ENOSPC, EPERM,
        FLAG_FUA, FLAG_PAYLOAD_LEN, FLAG_REQ_ONE, OPT_EXTENDED_HEADERS, OPT_STRUCTURED_REPLY, RawNbdRequest,
    },
};

/// Chunk types: "Structured reply types".
const NONE: u16 = 0;
const OFFSET_DATA: u16 = 1;
const BLOCK_STATUS_EXT: u16 = 6;
const ERROR: u16 = (1 << 15) + 1;
/// NBD_REP_ERR_EXT_HEADER_REQD.
const REP_ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;

fn disk() -> Weir {
    Serve::filled(2 * MIB).start()
}

fn send_request(wire: &mut RawNbdClient, flags: u16, kind: u16, offset: u64, length: u64) {
    wire.send(&RawNbdRequest { flags, kind, cookie: 77, offset, length }.extended());
}

fn error(wire: &mut RawNbdClient) -> (u32, String) {
    let chunk = wire.chunk();
    assert!(chunk.done && chunk.kind == ERROR && chunk.cookie == 77, "{chunk:?}");
    let number = u32::from_be_bytes(chunk.payload[..4].try_into().expect("four bytes"));
    (number, String::from_utf8_lossy(&chunk.payload[6..]).into_owned())
}

fn assert_done(wire: &mut RawNbdClient) {
    let chunk = wire.chunk();
    assert!(chunk.done && chunk.kind == NONE && chunk.cookie == 77, "{chunk:?}");
}

#[test]
fn reads_and_writes_have_64_bit_headers() {
    let weir = disk();
    let (mut wire, size) = RawNbdClient::negotiated_extended(weir.socket(), "disk");
    assert_eq!(size, 2 * MIB);

    send_request(&mut wire, FLAG_PAYLOAD_LEN | FLAG_FUA, CMD_WRITE, 1000, 5);
    wire.send(b"hello");
    assert_done(&mut wire);

    send_request(&mut wire, 0, CMD_READ, 998, 9);
    let chunk = wire.chunk();
    let original = pattern(2 << 20);
    let expected = [&original[998..1000], b"hello", &original[1005..1007]].concat();
    assert_eq!(
        (chunk.kind, chunk.done, &chunk.payload[..8]),
        (OFFSET_DATA, true, &998_u64.to_be_bytes()[..])
    );
    assert_eq!(chunk.payload[8..], expected);

    send_request(&mut wire, 0, CMD_FLUSH, 0, 0);
    assert_done(&mut wire);
}

#[test]
fn one_request_zeroes_or_describes_a_whole_disk() {
    let weir = Serve::sparse(6 << 30).start();
    let (mut wire, size) = RawNbdClient::negotiated_extended(weir.socket(), "disk");
    assert_eq!(size, 6 << 30);

    send_request(&mut wire, FLAG_PAYLOAD_LEN, CMD_WRITE, 5 << 30, 4);
    wire.send(b"data");
    assert_done(&mut wire);
    send_request(&mut wire, 0, CMD_WRITE_ZEROES, 0, 6 << 30);
    assert_done(&mut wire);
    send_request(&mut wire, 0, CMD_READ, 5 << 30, 4);
    assert_eq!(wire.chunk().payload[8..], [0; 4]);
    send_request(&mut wire, 0, CMD_TRIM, 0, 6 << 30);
    assert_done(&mut wire);

    send_request(&mut wire, FLAG_REQ_ONE, CMD_BLOCK_STATUS, 0, 6 << 30);
    let chunk = wire.chunk();
    assert_eq!((chunk.kind, chunk.done), (BLOCK_STATUS_EXT, true));
    let number = |at: usize| u64::from_be_bytes(chunk.payload[at..at + 8].try_into().expect("eight bytes"));
    assert_eq!(chunk.payload[4..8], 1_u32.to_be_bytes(), "one extent");
    assert_eq!((number(8), number(16)), (6 << 30, 3), "a hole that reads as zeroes, longer than 4 GiB");
}

#[test]
fn invalid_requests_are_rejected_in_extended_chunks() {
    let weir = disk();
    let (mut wire, size) = RawNbdClient::negotiated_extended(weir.socket(), "disk");

    send_request(&mut wire, 0, CMD_READ, size - 1, 2);
    assert_eq!(error(&mut wire), (EINVAL, "the range ends beyond the export".to_owned()));
    send_request(&mut wire, 0, CMD_TRIM, 1, u64::MAX);
    assert_eq!(error(&mut wire).0, EINVAL, "an overflowing sum is beyond the end");
    send_request(&mut wire, 0, 99, 0, 512);
    assert_eq!(error(&mut wire), (EINVAL, "unknown command".to_owned()));
    // None of them had a payload, so the stream is in step.
    send_request(&mut wire, 0, CMD_READ, 0, 1);
    assert_eq!(wire.chunk().payload.len(), 9);
}

/// QEMU's client negotiates extended headers and omits the flag.
#[test]
fn write_without_the_payload_flag_is_performed() {
    let weir = disk();
    let (mut wire, size) = RawNbdClient::negotiated_extended(weir.socket(), "disk");
    send_request(&mut wire, FLAG_FUA, CMD_WRITE, 1000, 5);
    wire.send(b"hello");
    assert_done(&mut wire);
    send_request(&mut wire, 0, CMD_READ, 1000, 5);
    assert_eq!(wire.chunk().payload[8..], *b"hello");

    // The payload of a rejected request is skipped, even if it looks like a request.
    let zeroes = RawNbdRequest { flags: 0, kind: CMD_WRITE_ZEROES, cookie: 78, offset: 0, length: size };
    let payload = zeroes.extended();
    send_request(&mut wire, 0, CMD_WRITE, size, payload.len() as u64);
    wire.send(&payload);
    assert_eq!(error(&mut wire).0, ENOSPC);
    send_request(&mut wire, 0, CMD_READ, 1000, 5);
    assert_eq!(wire.chunk().payload[8..], *b"hello");
}

/// A read-only export beside a writable one.
#[test]
fn export_may_be_read_only() {
    let scratch = Scratch::new();
    let (vhost_socket, socket) = (scratch.socket("vm.sock"), scratch.socket("backup.sock"));
    let nbd = format!("unix:{},read-only", text(&socket));
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .args(["memory:1M", "--name", "disk", "--nbd", &nbd])
        .args(["--vhost-user-blk", &format!("unix:{}", text(&vhost_socket))])
        .start();
    let (mut wire, _) = RawNbdClient::negotiated_extended(&socket, "disk");
    send_request(&mut wire, 0, CMD_WRITE, 0, 5);
    wire.send(b"hello");
    assert_eq!(error(&mut wire), (EPERM, "the export is read-only".to_owned()));
    send_request(&mut wire, 0, CMD_READ, 0, 5);
    let chunk = wire.chunk();
    assert!(chunk.done && chunk.kind != ERROR, "{chunk:?}");
    drop(weir);
}

#[test]
fn payload_too_long_to_skip_ends_the_connection() {
    let weir = disk();
    let (mut wire, _) = RawNbdClient::negotiated_extended(weir.socket(), "disk");
    send_request(&mut wire, FLAG_PAYLOAD_LEN, CMD_WRITE, 0, 1 << 40);
    wire.wait_for_close();
}

#[test]
fn compact_headers_are_out_of_step_afterwards() {
    let weir = disk();
    let (mut wire, _) = RawNbdClient::negotiated_extended(weir.socket(), "disk");
    wire.send(&RawNbdRequest { flags: 0, kind: CMD_READ, cookie: 1, offset: 0, length: 1 }.compact());
    wire.send(&[0; 4]);
    wire.wait_for_close();
}

#[test]
fn extended_headers_take_precedence_over_structured_replies() {
    let weir = disk();
    let mut wire = RawNbdClient::greet(weir.socket());
    wire.option(OPT_EXTENDED_HEADERS, &[]);
    assert_eq!(wire.option(OPT_STRUCTURED_REPLY, &[])[0].0, REP_ERR_EXT_HEADER_REQD);
}
