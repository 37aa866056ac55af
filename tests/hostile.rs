//! Clients that are broken, hostile or gone: each affects only itself.
//!
//! Every test has a second, well-behaved client, which must be served throughout.

use std::{thread, time::Instant};

use serde_json::Value;

use crate::harness::{
    DEADLINE, MIB, RawNbdClient, Scratch, Serve, Weir, operator, pattern, pause,
    wire::{
        self, CMD_READ, CMD_WRITE, EINVAL, EPERM, OPT_ABORT, OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_LIST,
        OPT_SET_META_CONTEXT, OPT_STARTTLS, OPTION_MAGIC, REP_ACK, REP_ERR_INVALID, REP_ERR_POLICY,
        REP_ERR_TOO_BIG, REP_ERR_UNKNOWN, REP_ERR_UNSUP, RawNbdRequest,
    },
};

struct DaemonWithIdleClient {
    weir: Weir,
    idle_client: RawNbdClient,
}

impl DaemonWithIdleClient {
    fn new() -> Self {
        let weir = Serve::filled(4 * MIB).start();
        let (idle_client, _) = RawNbdClient::negotiated(weir.socket(), "disk");
        Self { weir, idle_client }
    }

    fn greet(&self) -> RawNbdClient {
        RawNbdClient::greet(self.weir.socket())
    }

    fn go(&self) -> RawNbdClient {
        RawNbdClient::negotiated(self.weir.socket(), "disk").0
    }

    #[track_caller]
    fn assert_served(&mut self) {
        for client in [&mut self.idle_client, &mut RawNbdClient::negotiated(self.weir.socket(), "disk").0] {
            assert_eq!(client.read(4096, 4096).as_deref(), Ok(&pattern(8192)[4096..]));
        }
    }
}

/// Sends the bytes; asserts that only this client is disconnected.
#[track_caller]
fn assert_disconnected(daemon: &mut DaemonWithIdleClient, mut client: RawNbdClient, bytes: &[u8]) {
    client.send(bytes);
    client.wait_for_close();
    daemon.assert_served();
}

#[test]
fn non_nbd_client_is_disconnected() {
    let mut daemon = DaemonWithIdleClient::new();
    // Before the greeting: another protocol, arbitrary bytes, and flags that do not exist.
    for nonsense in [&b"GET / HTTP/1.1\r\nHost: weir\r\n\r\n"[..], &[0xff; 64], &[0, 0, 0, 4, 1, 2, 3, 4]] {
        let client = RawNbdClient::connect(daemon.weir.socket());
        assert_disconnected(&mut daemon, client, nonsense);
    }
    // During option negotiation: a wrong magic number, and an export that does not exist.
    let option = [&(OPTION_MAGIC + 1).to_be_bytes()[..], &[0; 8]].concat();
    let name = [&wire::option_header(OPT_EXPORT_NAME, 4)[..], b"nope"].concat();
    for wrong in [option, name] {
        let client = daemon.greet();
        assert_disconnected(&mut daemon, client, &wrong);
    }
    // During transmission.
    let client = daemon.go();
    assert_disconnected(&mut daemon, client, &[0xaa; 28]);
}

#[test]
fn invalid_options_are_rejected_and_the_handshake_continues() {
    let mut daemon = DaemonWithIdleClient::new();
    let mut client = daemon.greet();
    let refusals = [
        (4242, &b"what is this?"[..], REP_ERR_UNSUP),
        (OPT_LIST, b"data", REP_ERR_INVALID),
        (OPT_STARTTLS, b"", REP_ERR_POLICY),
        (OPT_GO, b"", REP_ERR_INVALID),
        (OPT_GO, &[0xff, 0xff, 0xff, 0xff, 0, 0], REP_ERR_INVALID),
        (OPT_INFO, &[0, 0, 0, 1, 0xff, 0, 0], REP_ERR_INVALID),
        (OPT_SET_META_CONTEXT, &[0, 0, 0, 0, 0, 0, 0, 0], REP_ERR_INVALID),
        (OPT_GO, &[0, 0, 0, 1, b'?', 0, 0], REP_ERR_UNKNOWN),
    ];
    for (option, data, expected) in refusals {
        let replies = client.option(option, data);
        assert_eq!(replies.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [expected], "option {option}");
    }
    assert_eq!(client.option(OPT_GO, &wire::go_data("disk")).last().map(|(kind, _)| *kind), Some(REP_ACK));
    assert_eq!(client.read(0, 8).as_deref(), Ok(&pattern(8)[..]));
    daemon.assert_served();
}

#[test]
fn huge_option_is_skipped_or_ends_the_handshake() {
    let mut daemon = DaemonWithIdleClient::new();
    let mut client = daemon.greet();
    assert_eq!(client.option(OPT_GO, &vec![b'x'; 100_000])[0].0, REP_ERR_TOO_BIG);
    client.send(&wire::option_header(OPT_GO, u32::MAX));
    client.wait_for_close();
    daemon.assert_served();
}

#[test]
fn abort_is_acknowledged() {
    let daemon = DaemonWithIdleClient::new();
    let mut client = daemon.greet();
    assert_eq!(client.option(OPT_ABORT, &[]), [(REP_ACK, vec![])]);
    client.wait_for_close();
}

#[test]
fn slow_handshake_is_disconnected() {
    let mut daemon = DaemonWithIdleClient::new();
    let began = Instant::now();
    let mut silent_client = RawNbdClient::connect(daemon.weir.socket());
    let mut slow = daemon.greet();
    slow.send(&wire::option_header(OPT_GO, 10)[..7]);
    silent_client.wait_for_close();
    slow.wait_for_close();
    let elapsed = began.elapsed();
    assert!(elapsed.as_secs() >= 10, "a handshake may take 10 s, but was disconnected after {elapsed:?}");
    daemon.assert_served();
}

#[test]
fn unknown_command_is_rejected_and_the_connection_continues() {
    let mut daemon = DaemonWithIdleClient::new();
    let mut client = daemon.go();
    client.request(RawNbdRequest { flags: 0, kind: 1000, cookie: 5, offset: 0, length: 512 }, &[]);
    assert_eq!(client.simple_reply(), (EINVAL, 5));
    assert_eq!(client.read(0, 8).as_deref(), Ok(&pattern(8)[..]));
    daemon.assert_served();
}

#[test]
fn payload_of_a_rejected_write_is_skipped() {
    let weir = Serve::filled(MIB).arg("--read-only").start();
    let (mut client, _) = RawNbdClient::negotiated(weir.socket(), "disk");
    // The payload looks like requests: if it were not skipped, they would be answered.
    let forged = RawNbdRequest { flags: 0, kind: CMD_READ, cookie: 666, offset: 0, length: 1 }.compact();
    let payload = forged.repeat(1000);
    client.request(
        RawNbdRequest { flags: 0, kind: CMD_WRITE, cookie: 1, offset: 0, length: payload.len() as u64 },
        &payload,
    );
    assert_eq!(client.simple_reply(), (EPERM, 1));
    assert_eq!(client.read(0, 8).as_deref(), Ok(&pattern(8)[..]));
}

#[test]
fn disconnect_at_any_point_leaves_no_state() {
    let mut daemon = DaemonWithIdleClient::new();
    let write = RawNbdRequest { flags: 0, kind: CMD_WRITE, cookie: 1, offset: MIB, length: 65_536 }.compact();
    drop(RawNbdClient::connect(daemon.weir.socket()));
    drop(daemon.greet());
    drop(daemon.go());
    for bytes in [&write[..13], &write[..], &[&write[..], &[7; 1000]].concat()] {
        let mut client = daemon.go();
        client.send(bytes);
        drop(client);
    }
    // Half a payload is not written.
    let untouched = &pattern(MIB as usize + 65_536)[MIB as usize..];
    assert_eq!(daemon.idle_client.read(MIB, 65_536).as_deref(), Ok(untouched));
    daemon.assert_served();
}

#[test]
fn half_closed_client_receives_its_replies() {
    let daemon = DaemonWithIdleClient::new();
    let mut client = daemon.go();
    for cookie in 0..50 {
        client.request(
            RawNbdRequest { flags: 0, kind: CMD_READ, cookie, offset: cookie * 4096, length: 8 },
            &[],
        );
    }
    client.shutdown_write();
    // The client has shut down its sending half; the replies must still arrive.
    let mut answered: Vec<u64> = (0..50)
        .map(|_| {
            let (error, cookie) = client.simple_reply();
            assert_eq!(error, 0);
            let at = cookie as usize * 4096;
            assert_eq!(client.receive::<8>(), pattern(at + 8)[at..]);
            cookie
        })
        .collect();
    answered.sort_unstable();
    assert_eq!(answered, (0..50).collect::<Vec<_>>());
    client.wait_for_close();
}

#[test]
fn client_that_never_reads_is_not_read_from() {
    let mut daemon = DaemonWithIdleClient::new();
    let mut stalled = daemon.go();
    let sent = thread::scope(|scope| {
        // Sends far more requests than the queues hold; the daemon must stop reading.
        let requests = scope.spawn(|| {
            let read =
                RawNbdRequest { flags: 0, kind: CMD_READ, cookie: 9, offset: 0, length: 4 * MIB }.compact();
            stalled.limit_writing();
            (0..1_000_000_u64).take_while(|_| stalled.try_send(&read)).count()
        });
        for _ in 0..20 {
            daemon.assert_served();
        }
        requests.join().expect("the client only sends")
    });
    assert!(sent < 1_000_000, "the daemon received requests for 4 TB of replies");
    let resident = daemon.weir.resident_bytes();
    assert!(resident < 512 * MIB, "{} MiB for one client that does not read", resident / MIB);
    drop(stalled);
    daemon.assert_served();
}

#[test]
fn surplus_clients_wait() {
    let weir = Serve::with_own_scratch().arg("memory:1M").args(["--max-connections", "2"]).start();
    let first = RawNbdClient::negotiated(weir.socket(), "memory").0;
    let mut second = RawNbdClient::negotiated(weir.socket(), "memory").0;
    let third = thread::scope(|scope| {
        // The kernel's backlog accepts it; the daemon greets it when a connection ends.
        let third = scope.spawn(|| RawNbdClient::negotiated(weir.socket(), "memory").0);
        assert_eq!(second.read(0, 1).as_deref(), Ok(&[0][..]));
        assert!(!third.is_finished(), "a third client was served, although two are allowed");
        drop(first);
        third.join()
    });
    assert_eq!(third.expect("it is served in the end").read(0, 1).as_deref(), Ok(&[0][..]));
}

#[test]
fn silent_clients_yield_to_active_ones() {
    for max in [1, 5, 20] {
        let max_connections = max.to_string();
        let weir = Serve::with_own_scratch()
            .arg("memory:1M")
            .args(["--max-connections", &max_connections, "--log", "debug"])
            .start();
        let silent_clients: Vec<_> = (0..3 * max).map(|_| RawNbdClient::connect(weir.socket())).collect();
        // Behind three times as many silent clients, each of which could stay for ten seconds.
        assert_eq!(RawNbdClient::negotiated(weir.socket(), "memory").0.read(0, 1).as_deref(), Ok(&[0][..]));
        drop(silent_clients);
        let log = weir.stop();
        assert!(log.contains("others wait"), "no silent client was disconnected early:\n{log}");
    }
}

#[test]
fn idle_client_costs_little() {
    const CLIENTS: u64 = 500;
    let weir = Serve::with_own_scratch().arg("memory:1M").args(["--max-connections", "0"]).start();
    drop(RawNbdClient::negotiated(weir.socket(), "memory"));
    let growth = |since: u64| weir.resident_bytes().saturating_sub(since);
    let begin = weir.resident_bytes();
    let silent_clients: Vec<_> = (0..CLIENTS).map(|_| RawNbdClient::greet(weir.socket())).collect();
    let each = growth(begin) / CLIENTS;
    assert!(each <= 16 << 10, "{each} bytes for a client without a handshake");
    let idle: Vec<_> = (0..CLIENTS).map(|_| RawNbdClient::negotiated(weir.socket(), "memory").0).collect();
    let each = growth(begin) / CLIENTS - each;
    assert!(each <= 16 << 10, "{each} bytes for an idle client");
    drop((silent_clients, idle));
    for _ in 0..10_000 {
        drop(RawNbdClient::connect(weir.socket()));
    }
    // The memory is returned shortly after the last client has left.
    let until = Instant::now() + DEADLINE;
    while growth(begin) > 20 * MIB {
        assert!(Instant::now() < until, "{} MiB are kept for disconnected clients", growth(begin) / MIB);
        pause();
    }
    weir.stop();
}

#[test]
fn clients_that_hold_memory_delay_no_other_disk() {
    let scratch = Scratch::new();
    let more = ["memory:64M", "--name", "large", "--memory", "192M", "--workers", "1"];
    let weir = operator::start(&scratch, &more);
    let mut other = RawNbdClient::negotiated(weir.socket(), "b").0;
    let mut stalled: Vec<_> = (0..8).map(|_| RawNbdClient::negotiated(weir.socket(), "large").0).collect();
    let write = RawNbdRequest { flags: 0, kind: CMD_WRITE, cookie: 1, offset: 0, length: 32 << 20 };
    stalled[0].send(&[write.compact(), vec![1; 16 << 20]].concat());
    for client in &mut stalled[1..] {
        client.send(&write.compact());
    }
    let bytes = |status: &Value, name: &str| status["memory"][name].as_u64().expect("a number");
    operator::wait_until(&scratch, |status| bytes(status, "waiting") == 7);
    for length in [4096, 1 << 20] {
        assert_eq!(other.read(0, length).map(|data| data.len()), Ok(length as usize));
    }
    let status = operator::status(&scratch, "0");
    assert!(bytes(&status, "requests") <= bytes(&status, "max-requests"), "{status}");
    assert_eq!(bytes(&status, "total"), 192 * MIB);
    drop(stalled);
    weir.stop();
}

/// Clients that hold memory without progress delay neither a small request of another client of
/// their disk, nor the end of the daemon, while more such clients wait.
#[test]
fn clients_that_hold_memory_delay_no_other_client_of_their_disk() {
    let scratch = Scratch::new();
    let more = ["memory:64M", "--name", "large", "--memory", "192M", "--max-connections", "0"];
    let weir = operator::start(&scratch, &more);
    let write = RawNbdRequest { flags: 0, kind: CMD_WRITE, cookie: 1, offset: 0, length: 32 << 20 };
    let hostile: Vec<_> = (0..100)
        .map(|_| {
            let mut client = RawNbdClient::negotiated(weir.socket(), "large").0;
            client.send(&[&write.compact()[..], &[1]].concat());
            client
        })
        .collect();
    let bytes = |status: &Value, name: &str| status["memory"][name].as_u64().expect("a number");
    operator::wait_until(&scratch, |status| bytes(status, "waiting") >= 50);
    let mut client = RawNbdClient::negotiated(weir.socket(), "large").0;
    for _ in 0..3 {
        assert_eq!(client.read(0, 4096).map(|data| data.len()), Ok(4096));
    }
    let status = operator::status(&scratch, "0");
    // The client was served before most hostile clients were disconnected one by one.
    assert!(bytes(&status, "waiting") >= 50, "{status}");
    assert!(bytes(&status, "connections") >= 50 * 4096, "{status}");
    weir.stop();
    drop(hostile);
}

/// A client whose reads take ten minutes at one operation a second: longer than any timeout here.
fn ten_minutes(more: &[&str]) -> (Weir, RawNbdClient) {
    let weir = Serve::filled(4 * MIB).args(["--iops-total", "1"]).args(more).start();
    let (mut client, _) = RawNbdClient::negotiated(weir.socket(), "disk");
    for cookie in 0..600 {
        client.request(RawNbdRequest { flags: 0, kind: CMD_READ, cookie, offset: 0, length: 1 }, &[]);
    }
    assert_eq!(client.simple_reply(), (0, 0), "the first request is within the limit");
    (weir, client)
}

#[test]
fn disconnect_cancels_throttled_requests() {
    let (weir, client) = ten_minutes(&["--max-connections", "1"]);
    drop(client);
    // One connection is allowed: a second handshake proves that the first client's state is gone.
    drop(RawNbdClient::negotiated(weir.socket(), "disk"));
    weir.stop();
}

#[test]
fn stop_does_not_wait_for_limits() {
    let (weir, _client) = ten_minutes(&[]);
    weir.stop();
}
