//! Clients of the control socket that are broken, hostile or do not read: each affects only itself.
//!
//! Every test ends with a well-behaved client, which must be answered.

use std::path::{Path, PathBuf};

use serde_json::json;

use crate::harness::{MIB, Qmp, Scratch, Serve, Weir, text};

fn serve() -> (Weir, PathBuf) {
    let scratch = Scratch::new();
    let path = scratch.socket("qmp");
    let weir =
        Serve::owning(scratch).args(["memory:1M", "--qmp"]).arg(format!("unix:{}", text(&path))).start();
    (weir, path)
}

#[track_caller]
fn assert_running(path: &Path) {
    assert_eq!(Qmp::negotiated(path).command("query-status", json!({}))["running"], true);
}

#[test]
fn invalid_json_is_answered_and_the_next_line_parsed() {
    let (_weir, path) = serve();
    let mut client = Qmp::negotiated(&path);
    for nonsense in [
        "GET / HTTP/1.1\r\n",
        "}\n",
        "{'execute': 'quit'}\n",
        "{\"execute\": \"quit\"]\n",
        "{\"execute\": \"quit\",}",
        "{\"execute\": \"quit\", \"execute\": \"quit\"}",
        "[1, 2, 3]",
        "\"quit\n",
        "nul ",
        "{\"execute\": \"quit\u{1}",
    ] {
        client.send(nonsense);
        assert_eq!(client.message()["error"]["class"], "GenericError", "{nonsense:?}");
        client.send("\n{\"execute\":\"query-name\",\"id\":\"after\"}");
        loop {
            let message = client.message();
            if message["id"] == "after" {
                assert_eq!(message["return"], json!({}));
                break;
            }
            assert_eq!(message["error"]["class"], "GenericError", "{nonsense:?}: {message}");
        }
    }
    assert_running(&path);
}

#[test]
fn nesting_and_length_are_bounded() {
    let (weir, path) = serve();
    let mut client = Qmp::negotiated(&path);
    let before = weir.resident_bytes();
    client.send("[".repeat(1 << 20));
    assert_eq!(client.message()["error"]["class"], "GenericError");
    client.send("\n{\"execute\":\"");
    let piece = "x".repeat(1 << 20);
    for _ in 0..32 {
        client.send(&piece);
    }
    client.send("\"}\n");
    assert_eq!(
        client.message()["error"]["desc"],
        "JSON parse error, the message is longer than 1048576 bytes"
    );
    client.send("{\"execute\":\"query-name\"}");
    assert_eq!(client.message(), json!({"return": {}}));
    let grown = weir.resident_bytes().saturating_sub(before);
    assert!(grown < 16 * MIB, "{grown} bytes more");
    assert_running(&path);
}

#[test]
fn client_that_never_reads_delays_no_other() {
    let (weir, path) = serve();
    let before = weir.resident_bytes();
    let mut stalled = Qmp::connect(&path);
    stalled.send("{\"execute\":\"qmp_capabilities\"}");
    // More replies than the socket buffers, then more events than the daemon queues for one client.
    stalled.send("{\"execute\":\"query-commands\"}".repeat(500));
    let mut client = Qmp::negotiated(&path);
    for round in 0..10_000 {
        client.command("x-weir-set", json!({"name": "memory", "weight": 1 + round % 2}));
    }
    let grown = weir.resident_bytes().saturating_sub(before);
    assert!(grown < 16 * MIB, "{grown} bytes more");
    assert_running(&path);
    weir.wait_for_log("a QMP client that does not read was disconnected");
    assert!(stalled.drain() > 0);
}

#[test]
fn many_clients_at_once_are_each_answered() {
    let (_weir, path) = serve();
    let mut clients: Vec<_> = (0..20).map(|_| Qmp::negotiated(&path)).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.send(json!({"execute": "query-version", "id": number}).to_string());
    }
    for (number, client) in clients.iter_mut().enumerate().rev() {
        assert_eq!(client.next_reply()["id"], number);
    }
}

#[test]
fn disconnect_within_a_token_leaves_no_state() {
    let (_weir, path) = serve();
    for cut in ["", "{", "{\"execute\":\"quit", "{\"execute\":\"query-block\"}"] {
        for _ in 0..40 {
            let mut client = Qmp::connect(&path);
            client.send("{\"execute\":\"qmp_capabilities\"}");
            client.send(cut);
        }
    }
    assert_running(&path);
}
