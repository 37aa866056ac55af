//! libnbd through nbdsh: every command with every flag, and invalid ones with the error that the
//! specification requires.
//!
//! `refused` expects an error by name; libnbd's own checks are off where the server must reject.

use std::fs;

use crate::harness::{MIB, Scratch, Serve, TestClient, nbdsh, pattern};

const ASSERT_REJECTED: &str = r#"
import errno
def refused(name, call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except nbd.Error as error:
        assert error.errno == name, f"{error.errno} instead of {name}: {error.string}"
    else:
        raise AssertionError(f"{call.__name__} should have failed with {name}")
"#;

/// Runs a script on a connected handle `h`; `uri` is the export's.
#[track_caller]
fn script(uri: &str, body: &str) {
    nbdsh(
        &format!(
            "{ASSERT_REJECTED}\nuri = arguments[0]\nh.add_meta_context('base:allocation')\nh.connect_uri(uri)\n{body}"
        ),
        [uri],
    );
}

/// Like [`script`], without libnbd's client-side checks.
#[track_caller]
fn unchecked(uri: &str, body: &str) {
    script(uri, &format!("h.set_strict_mode(0)\n{body}"));
}

#[test]
fn writes_are_read_back_at_any_offset() {
    // Unaligned offsets on O_DIRECT.
    let weir = Serve::sparse(4 * MIB).args(["--cache", "none"]).start();
    let body = "
data = bytes(range(256)) * 257
for offset in (0, 1, 511, 4097, 123_457, 4 * 1048576 - len(data)):
    h.pwrite(data, offset)
    assert h.pread(len(data), offset) == data, offset
    assert h.pread(3, offset + 5) == data[5:8], offset
";
    script(&weir.uri("disk"), body);
}

#[test]
fn fua_and_flush_write_to_the_file() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let weir = Serve::new(&scratch).arg(&image).start();
    let body = "
h.pwrite(b'durable!' * 512, 4096, nbd.CMD_FLAG_FUA)
h.zero(4096, 0, nbd.CMD_FLAG_FUA)
h.trim(4096, 65536, nbd.CMD_FLAG_FUA)
h.flush()
";
    script(&weir.uri("disk"), body);
    assert_eq!(fs::read(image).unwrap()[4096..8192], *b"durable!".repeat(512));
}

#[test]
fn zeroes_are_zeroes_with_and_without_a_hole() {
    let weir = Serve::filled(4 * MIB).start();
    let body = "
M = 1048576
before = h.pread(4 * M, 0)
h.zero(M, 0)
h.zero(M + 2, M - 1, nbd.CMD_FLAG_NO_HOLE)
expected = bytes(2 * M + 1) + before[2 * M + 1:]
assert h.pread(4 * M, 0) == expected
def flags_at(offset):
    found = []
    h.block_status(1, offset, lambda context, start, entries, error: found.extend(entries), nbd.CMD_FLAG_REQ_ONE)
    return found[1]
assert flags_at(0) == nbd.STATE_HOLE | nbd.STATE_ZERO, flags_at(0)
assert not flags_at(M + 65536) & nbd.STATE_HOLE, 'NO_HOLE leaves it allocated'
";
    script(&weir.uri("disk"), body);
}

#[test]
fn fast_zero_is_fast_or_rejected() {
    let scratch = Scratch::new();
    // Fast zeroing may be unsupported, but it must not fall back to writing.
    let weir = Serve::new(&scratch)
        .args([scratch.filled("disk.raw", 4 * MIB).to_str().unwrap(), "memory:4M"])
        .start();
    for export in ["disk", "memory"] {
        let body = "
assert h.can_fast_zero()
h.pwrite(b'x' * 1048576, 0)
try:
    h.zero(1048576, 0, nbd.CMD_FLAG_FAST_ZERO)
    assert h.pread(1048576, 0) == bytes(1048576)
except nbd.Error as error:
    assert error.errno == 'ENOTSUP', error
    assert h.pread(1048576, 0) == b'x' * 1048576, 'a rejected request changed data'
";
        script(&weir.uri(export), body);
    }
}

#[test]
fn trim_frees_space() {
    let weir = Serve::filled(4 * MIB).start();
    let body = "
M = 1048576
kept = h.pread(M, 2 * M)
h.trim(M, M)
assert h.pread(M, 2 * M) == kept
found = []
h.block_status(M, M, lambda context, start, entries, error: found.extend(entries))
assert found == [M, nbd.STATE_HOLE | nbd.STATE_ZERO], found
";
    script(&weir.uri("disk"), body);
}

#[test]
fn block_status_covers_the_request() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch)
        .args([scratch.sparse("disk.raw", 4 * MIB).to_str().unwrap(), "memory:4M"])
        .start();
    for export in ["disk", "memory"] {
        let body = "
M = 1048576
for i in range(0, 4, 2):
    h.pwrite(b'd' * M, i * M)
h.flush()
def status(length, offset, flags=0):
    found = []
    def extents(context, start, entries, error):
        assert (context, start) == ('base:allocation', offset)
        found.extend(zip(entries[::2], entries[1::2]))
    h.block_status(length, offset, extents, flags)
    return found
HOLE = nbd.STATE_HOLE | nbd.STATE_ZERO
assert status(4 * M, 0) == [(M, 0), (M, HOLE), (M, 0), (M, HOLE)], status(4 * M, 0)
assert status(4 * M, 0, nbd.CMD_FLAG_REQ_ONE) == [(M, 0)]
one = status(65536, M, nbd.CMD_FLAG_REQ_ONE)
assert one == [(65536, HOLE)], 'REQ_ONE gives no more than was asked'
assert status(1, 4 * M - 1, nbd.CMD_FLAG_REQ_ONE) == [(1, HOLE)]
";
        script(&weir.uri(export), body);
    }
}

#[test]
fn cache_command_is_accepted() {
    let weir = Serve::filled(MIB).start();
    let body = "before = h.pread(1 << 20, 0)\nh.cache(1 << 20, 0)\nassert h.pread(1 << 20, 0) == before";
    script(&weir.uri("disk"), body);
}

#[test]
fn read_with_df_is_one_chunk() {
    let weir = Serve::sparse(4 * MIB).start();
    let body = "
h.pwrite(b'y' * 4096, 1 << 20)
chunks = []
def chunk(data, offset, status, error):
    chunks.append((offset, len(data), status))
data = h.pread_structured(4 << 20, 0, chunk, nbd.CMD_FLAG_DF)
assert chunks == [(0, 4 << 20, nbd.READ_DATA)], chunks
assert data[1 << 20:(1 << 20) + 4096] == b'y' * 4096 and not any(data[:1 << 20])
";
    script(&weir.uri("disk"), body);
}

#[test]
fn largest_request_is_served_and_a_larger_one_rejected() {
    let weir = Serve::with_own_scratch().arg("memory:80M").start();
    let body = "
most = h.get_block_size(nbd.SIZE_MAXIMUM)
assert most == 32 << 20, most
data = bytes(range(256)) * (most // 256)
h.pwrite(data, 12345)
assert h.pread(most, 12345) == data
refused('EOVERFLOW', h.pread, most + 1, 0)
assert h.pread(5, 12345) == data[:5], 'the connection goes on'
";
    unchecked(&weir.uri("memory"), body);
}

#[test]
fn requests_beyond_the_end_fail_as_specified() {
    let weir = Serve::filled(MIB).start();
    let body = "
end = h.get_size()
refused('EINVAL', h.pread, 1, end)
refused('EINVAL', h.pread, 2, end - 1)
refused('EINVAL', h.pread, 512, (1 << 63) + 512)
refused('ENOSPC', h.pwrite, b'xx', end - 1)
refused('ENOSPC', h.pwrite, b'x', end)
refused('ENOSPC', h.zero, 2, end - 1)
refused('EINVAL', h.trim, 2, end - 1)
refused('EINVAL', h.cache, 2, end - 1)
refused('EINVAL', h.block_status, 2, end - 1, lambda *about: 0)
h.pwrite(b'x', end - 1)
assert h.pread(1, end - 1) == b'x'
";
    unchecked(&weir.uri("disk"), body);
}

#[test]
fn unknown_flags_and_misplaced_ones_are_refused() {
    let weir = Serve::filled(MIB).start();
    let body = "
before = h.pread(4096, 0)
UNKNOWN = 1 << 15
refused('EINVAL', h.pread, 512, 0, UNKNOWN)
refused('EINVAL', h.pwrite, b'x' * 512, 0, UNKNOWN)
refused('EINVAL', h.pwrite, b'x' * 512, 0, nbd.CMD_FLAG_DF)
refused('EINVAL', h.flush, UNKNOWN)
refused('EINVAL', h.trim, 512, 0, nbd.CMD_FLAG_NO_HOLE)
refused('EINVAL', h.zero, 512, 0, nbd.CMD_FLAG_REQ_ONE)
refused('EINVAL', h.cache, 512, 0, nbd.CMD_FLAG_FAST_ZERO)
refused('EINVAL', h.block_status, 512, 0, lambda *about: 0, nbd.CMD_FLAG_DF)
assert h.pread(4096, 0) == before, 'a rejected request changed data'
";
    unchecked(&weir.uri("disk"), body);
}

#[test]
fn read_only_export_rejects_writes_with_eperm() {
    let scratch = Scratch::new();
    let image = scratch.filled("disk.raw", MIB);
    let weir = Serve::new(&scratch).arg(&image).arg("--read-only").start();
    let body = "
assert h.is_read_only()
refused('EPERM', h.pwrite, b'x' * 4096, 0)
refused('EPERM', h.trim, 4096, 0)
refused('EPERM', h.zero, 4096, 0)
assert len(h.pread(4096, 0)) == 4096
h.flush()
";
    unchecked(&weir.uri("disk"), body);
    assert!(fs::read(image).unwrap() == pattern(MIB as usize), "the image changed");
}

#[test]
fn empty_requests_do_nothing() {
    let weir = Serve::filled(MIB).start();
    let body = "
before = h.pread(1 << 20, 0)
h.pwrite(b'', 0)
h.trim(0, 4096)
h.zero(0, 4096)
h.cache(0, 4096)
refused('EINVAL', h.block_status, 0, 0, lambda *about: 0)
assert h.pread(1 << 20, 0) == before
";
    unchecked(&weir.uri("disk"), body);
}

#[test]
fn clients_without_structured_replies_are_served() {
    let weir = Serve::filled(MIB).start();
    nbdsh(
        &format!(
            "{ASSERT_REJECTED}
h.set_request_structured_replies(False)
h.connect_uri(arguments[0])
h.set_strict_mode(0)
assert not h.get_structured_replies_negotiated() and not h.can_df()
h.pwrite(b'simple', 7)
assert h.pread(6, 7) == b'simple'
refused('EINVAL', h.pread, 2, h.get_size() - 1)
refused('EINVAL', h.pread, 512, 0, nbd.CMD_FLAG_DF)
refused('EINVAL', h.block_status, 512, 0, lambda *about: 0)
assert h.pread(6, 7) == b'simple'
"
        ),
        [weir.uri("disk")],
    );
}

#[test]
fn clients_of_the_old_handshake_are_served() {
    let weir = Serve::filled(MIB).start();
    nbdsh(
        "
h.set_handshake_flags(0)
h.connect_uri(arguments[0])
assert h.get_protocol() == 'newstyle', h.get_protocol()
h.pwrite(b'old', 3)
assert h.pread(3, 3) == b'old'
",
        [weir.uri("disk")],
    );
}

#[test]
fn flushed_writes_are_visible_to_other_connections() {
    // With multi-conn, a completed write is visible on all connections.
    let weir = Serve::sparse(MIB).args(["--cache", "none"]).start();
    let body = "
other = nbd.NBD()
other.connect_uri(uri)
assert h.can_multi_conn()
for turn in range(50):
    data = bytes([turn + 1]) * 1000
    h.pwrite(data, turn * 777)
    assert other.pread(1000, turn * 777) == data
    other.flush()
";
    script(&weir.uri("disk"), body);
}

#[test]
fn many_requests_in_flight_are_each_answered_once() {
    let weir = Serve::filled(16 * MIB).args(["--cache", "none"]).start();
    let body = "
import random
random.seed(11)
original = h.pread(16 << 20, 0)
answered = 0
def check(buffer, offset):
    def done(error):
        global answered
        answered += 1
        assert error.value == 0 and buffer.to_bytearray() == original[offset:offset + len(buffer)], offset
        return 1
    return done
total = 3000
for number in range(total):
    while h.aio_in_flight() >= 200:
        h.poll(-1)
    # Adjacent often enough that some are merged.
    offset = number * 4096 if number % 3 else random.randrange(15 << 20)
    buffer = nbd.Buffer(random.choice([1, 512, 4096, 70000]))
    h.aio_pread(buffer, offset % (15 << 20), check(buffer, offset % (15 << 20)))
while h.aio_in_flight():
    h.poll(-1)
assert answered == total, answered
";
    script(&weir.uri("disk"), body);
}

#[test]
fn error_messages_reach_the_client() {
    let weir = Serve::filled(MIB).start();
    let stderr =
        TestClient::new("nbdsh").args(["--connect", &weir.uri("nothing")]).arg("-c").arg("pass").fails();
    assert!(stderr.contains("nothing"), "{stderr}");
}
