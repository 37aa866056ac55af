//! Imitated devices as a client observes them: slower, narrower, failing.

use std::time::Instant;

use crate::harness::{MIB, Scratch, Serve, TestClient, assert_contains, nbdsh, text};

#[test]
fn delayed_device_is_as_slow_as_configured() {
    let weir = Serve::with_own_scratch().args(["memory:1M", "--delay", "read=200ms,parallel=4"]).start();
    nbdsh(
        "
import time
h.connect_uri(arguments[0])
h.pwrite(b'x' * 4096, 0)
began = time.monotonic()
# Eight reads, four in flight, with gaps so that none are merged.
cookies = [h.aio_pread(nbd.Buffer(512), number * 100_000) for number in range(8)]
while cookies:
    h.poll(-1)
    cookies = [cookie for cookie in cookies if not h.aio_command_completed(cookie)]
took = time.monotonic() - began
# Twice the latency, with four in flight.
assert took >= 0.4, took
",
        [weir.uri("memory")],
    );
}

#[test]
fn rate_of_a_device_bounds_throughput() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).args(["memory:32M", "--rate", "bytes=10M"]).start();
    let source = scratch.filled("source", 5 * MIB);
    let began = Instant::now();
    TestClient::new("nbdcopy").args([text(&source), &weir.uri("memory")]).succeeds();
    let seconds = began.elapsed().as_secs_f64();
    assert!(seconds >= 0.5, "5 MiB at 10 MiB a second took {seconds:.2} s");
}

#[test]
fn faults_occur_as_configured() {
    let rule = "kind=read,offset=64K-128K,error=EIO,count=2";
    let weir = Serve::with_own_scratch()
        .args(["memory:1M", "--fault", rule, "--fault", "kind=flush,error=ENOSPC,count=1"])
        .start();
    let script = "
def error_of(call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        return error.errno
assert error_of(h.pread, 4096, 0) is None
assert error_of(h.pread, 4096, 65536) == 'EIO'
assert error_of(h.pwrite, b'x', 65536) is None
assert error_of(h.pread, 70000, 0) == 'EIO', 'it overlaps'
assert error_of(h.pread, 4096, 65536) is None, 'the rule is used up'
assert error_of(h.flush) == 'ENOSPC'
assert error_of(h.flush) is None
";
    weir.nbdsh("memory", script);
}

#[test]
fn bad_sector_fails_only_its_own_request() {
    let weir = Serve::with_own_scratch().args(["memory:1M", "--fault", "kind=read,offset=512K-516K"]).start();
    let script = "
# Adjacent and sent together, so that they are merged.
errors = {}
def done(number):
    def note(error):
        errors[number] = error.value
        return 1
    return note
for number in range(100, 156):
    h.aio_pread(nbd.Buffer(4096), number * 4096, done(number))
while h.aio_in_flight():
    h.poll(-1)
assert sorted(errors) == list(range(100, 156))
failed = [number for number, error in errors.items() if error]
assert failed == [128], failed
";
    weir.nbdsh("memory", script);
}

#[test]
fn invalid_device_option_names_key_value_and_rule() {
    let scratch = Scratch::new();
    for (option, value, parts) in [
        ("--delay", "read=fast", &["read=fast"][..]),
        ("--rate", "bytes=0", &["bytes=0"]),
        ("--fault", "kind=telepathy", &["kind=telepathy", "read, write"]),
        ("--fault", "colour=red", &["colour", "no such key"]),
    ] {
        let stderr = Serve::new(&scratch).args(["memory:1M", option, value]).rejects_usage();
        assert_contains(&stderr, &[option]);
        assert_contains(&stderr, parts);
    }
}
