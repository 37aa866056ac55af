//! Signals: acknowledged writes are in the file, requests in flight complete, and a second signal
//! ends the daemon at once.

use std::{fs, os::unix::process::ExitStatusExt as _};

use nix::sys::signal::Signal;

use crate::harness::{
    MIB, RawNbdClient, Scratch, Serve, TestClient, Weir, assert_contains,
    wire::{CMD_READ, CMD_WRITE, RawNbdRequest},
};

#[test]
fn writes_acknowledged_before_sigterm_are_in_the_file() {
    const BLOCK: u64 = 4096;
    let scratch = Scratch::new();
    for cache in ["writeback", "none"] {
        let image = scratch.sparse("disk.raw", 16 * MIB);
        let weir = Serve::new(&scratch).arg(&image).args(["--cache", cache]).start();
        let (mut client, _) = RawNbdClient::negotiated(weir.socket(), "disk");
        let block = |number: u64| vec![(number % 255 + 1) as u8; BLOCK as usize];
        let mut acknowledged = Vec::new();
        let mut sent = 0;
        // Sixteen writes are in flight until the daemon disconnects. The signal arrives in between.
        loop {
            let more = sent < 16 + acknowledged.len() as u64 && sent < 4096;
            let taken = more && {
                let request = RawNbdRequest {
                    flags: 0,
                    kind: CMD_WRITE,
                    cookie: sent,
                    offset: sent * BLOCK,
                    length: BLOCK,
                };
                client.try_send(&[request.compact(), block(sent)].concat())
            };
            if taken {
                sent += 1;
                continue;
            }
            let Some((error, cookie)) = client.next_simple_reply() else { break };
            if error == 0 {
                acknowledged.push(cookie);
            }
            if acknowledged.len() == 500 {
                weir.signal(Signal::SIGTERM);
            }
        }
        assert!(acknowledged.len() >= 500, "only {} writes were acknowledged", acknowledged.len());
        let (status, log) = weir.wait();
        assert!(status.success(), "{status}: {log}");
        let content = fs::read(&image).unwrap();
        for number in acknowledged {
            let at = (number * BLOCK) as usize;
            assert_eq!(content[at..at + BLOCK as usize], block(number), "{cache}: write {number}");
        }
    }
}

/// A client whose write the daemon has received, and delays.
#[track_caller]
fn writing(weir: &Weir) -> RawNbdClient {
    let (mut client, _) = RawNbdClient::negotiated(weir.socket(), "memory");
    client.request(RawNbdRequest { flags: 0, kind: CMD_WRITE, cookie: 1, offset: 0, length: 4 }, b"last");
    // The reply to this read proves that the write before it was received.
    client.request(RawNbdRequest { flags: 0, kind: CMD_READ, cookie: 2, offset: 65_536, length: 4 }, &[]);
    assert_eq!(client.simple_reply(), (0, 2));
    assert_eq!(client.receive::<4>(), [0; 4]);
    client
}

#[test]
fn requests_in_flight_complete_before_the_end() {
    let weir = Serve::with_own_scratch().args(["memory:1M", "--delay", "write=1s"]).start();
    let mut client = writing(&weir);
    weir.signal(Signal::SIGTERM);
    assert_eq!(client.simple_reply(), (0, 1));
    client.wait_for_close();
    assert!(weir.wait().0.success());
}

/// As coreutils' `timeout` does: it signals its child and then its process group.
#[test]
fn two_simultaneous_signals_count_once() {
    let weir = Serve::with_own_scratch().args(["memory:1M", "--delay", "write=1s"]).start();
    let mut client = writing(&weir);
    // Different signals: a second one of the same kind could be coalesced.
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGCONT] {
        weir.signal(signal);
    }
    assert_eq!(client.simple_reply(), (0, 1), "the write completes before the end");
    client.wait_for_close();
    let (status, log) = weir.wait();
    assert!(status.success(), "{status}: {log}");
}

#[test]
fn second_signal_ends_the_daemon_immediately() {
    let scratch = Scratch::new();
    for second in [Signal::SIGTERM, Signal::SIGINT] {
        let weir = Serve::new(&scratch).args(["memory:1M", "--delay", "write=1000s"]).start();
        let _client = writing(&weir);
        weir.signal(Signal::SIGTERM);
        // The shutdown has begun, and waits for the write.
        weir.wait_for_log("SIGTERM");
        // A signal within a second of the first is ignored, so it is repeated.
        let (status, log) = weir.wait_signalling(second);
        assert_eq!(status.code(), Some(1), "{log}");
        assert_contains(&log, &[&format!("weir: {second}: ended at once after a second request")]);
    }
}

#[test]
fn idle_client_does_not_delay_the_end() {
    let weir = Serve::with_own_scratch().arg("memory:1M").start();
    let mut idle = RawNbdClient::negotiated(weir.socket(), "memory").0;
    let mut greeted = RawNbdClient::greet(weir.socket());
    let mut silent_client = RawNbdClient::connect(weir.socket());
    weir.stop();
    for client in [&mut idle, &mut greeted, &mut silent_client] {
        client.wait_for_close();
    }
}

#[test]
fn sigint_and_sigterm_end_the_daemon_and_sighup_does_not() {
    let weir = Serve::with_own_scratch().arg("memory:1M").start();
    weir.signal(Signal::SIGHUP);
    weir.wait_for_log("SIGHUP");
    TestClient::new("nbdinfo").args(["--size", &weir.uri("memory")]).succeeds();
    weir.signal(Signal::SIGINT);
    let (status, log) = weir.wait();
    assert_eq!((status.code(), status.signal()), (Some(0), None), "{log}");
}

#[test]
fn flushed_data_survives_a_crash() {
    let scratch = Scratch::new();
    for cache in ["writeback", "writethrough", "none", "directsync", "unsafe"] {
        let image = scratch.sparse("disk.raw", MIB);
        let weir = Serve::new(&scratch).arg(&image).args(["--cache", cache]).start();
        weir.nbdsh("disk", "h.pwrite(b'kept' * 100, 4000)\nh.flush()");
        weir.crash();
        assert_eq!(fs::read(&image).unwrap()[4000..4400], *b"kept".repeat(100), "{cache}");
    }
}

#[test]
fn client_that_does_not_read_does_not_delay_the_end() {
    let weir = Serve::with_own_scratch().arg("memory:64M").start();
    let (mut stalled, _) = RawNbdClient::negotiated(weir.socket(), "memory");
    stalled.limit_writing();
    let read = RawNbdRequest { flags: 0, kind: CMD_READ, cookie: 1, offset: 0, length: 8 * MIB }.compact();
    // More requests than the daemon receives, so that some are pending when it is stopped.
    while stalled.try_send(&read) {}
    weir.stop();
}
