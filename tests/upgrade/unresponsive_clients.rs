//! Clients that cannot be transferred, and new processes that cannot serve them: neither affects
//! other clients.

use std::{
    io::{Read as _, Write as _},
    process::{Child, Stdio},
};

use serde_json::{Value, json};

use super::{UpgradedDaemon, control};
use crate::harness::{MIB, Qmp, Scratch, Serve, nbdsh_command, need_root, text};

/// A client that prints a line at each step, and waits for a line before it continues.
struct SteppingClient(Child);

impl SteppingClient {
    fn start(uri: &str, script: &str) -> Self {
        let step = "import sys\ndef step(): print('there', flush=True); sys.stdin.readline()\n";
        let mut client = nbdsh_command(&format!("{step}uri = {uri:?}\n{script}"));
        client.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut client = Self(client.spawn().expect("nbdsh was found"));
        client.0.stdout.as_mut().expect("piped").read_exact(&mut [0; 6]).expect("the client connects");
        client
    }

    #[track_caller]
    fn finish(mut self) {
        self.0.stdin.as_mut().expect("piped").write_all(b"\n").expect("the client waits for input");
        assert!(self.0.wait().expect("the child can be waited for").success());
    }
}

/// ID and type of each event.
fn events(fixture: &UpgradedDaemon) -> Vec<(u64, String)> {
    let reply = Qmp::negotiated(&fixture.control()).command_reply("x-weir-query-events", json!({}));
    let id_and_kind = |event: &Value| Some((event["id"].as_u64()?, event["kind"].as_str()?.to_owned()));
    reply["return"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|event| id_and_kind(event).expect("an event"))
        .collect()
}

#[test]
fn only_a_client_that_does_not_read_is_disconnected() {
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", 4 * MIB);
    let fixture = UpgradedDaemon::new(scratch, &[text(&disk)]);
    let first = fixture.serve().start();
    let reads = SteppingClient::start(
        &first.uri("disk"),
        "h.connect_uri(uri)\nh.pwrite(b'x' * 512, 0)\nstep()\nassert h.pread(512, 0) == b'x' * 512\n",
    );
    let does_not = SteppingClient::start(
        &first.uri("disk"),
        "h.connect_uri(uri)\nbuffers = [nbd.Buffer(1 << 20) for _ in range(32)]\n\
         for buffer in buffers: h.aio_pread(buffer, 0)\nstep()\n\
         try:\n    while h.aio_in_flight(): h.poll(-1)\n    h.pread(512, 0)\n\
         except nbd.Error: pass\nelse: raise AssertionError('it is still connected')\n",
    );
    let before = events(&fixture);
    let second = fixture.new_process().start();
    let (status, log) = first.wait();
    assert!(status.success() && log.contains("a new process has taken over"), "{log}");
    let named = "it does not read replies, so it cannot be transferred client=\"client 2 at export disk\"";
    assert!(log.contains(named), "{log}");
    // A transferred client has not disconnected.
    assert!(!log.contains("client 1 has left"), "{log}");
    second.wait_for_log("kind=\"taken_over\"");
    let mut after = events(&fixture);
    let known = after.iter().filter(|event| before.contains(event)).count();
    assert_eq!(known, before.len(), "earlier events are known: {after:?}");
    let last = before.last().expect("two events have arrived").0;
    // The old process may report the disconnect of the second client; the new one reports neither.
    let ended = after.iter().filter(|(id, kind)| *id > last && kind == "session_ended").count();
    assert!(ended <= 1, "{after:?}");
    after.retain(|(id, kind)| *id > last && kind != "session_ended");
    assert!(after.iter().all(|(_, kind)| kind != "session_started" && kind != "session_ended"), "{after:?}");
    assert!(after.iter().any(|(_, kind)| kind == "taken_over"), "{after:?}");
    reads.finish();
    does_not.finish();
    second.stop();
}

#[test]
fn unresponsive_image_is_named_before_suspending() {
    let scratch = Scratch::new();
    let (disk, slow) = (scratch.sparse("disk.raw", MIB), scratch.sparse("slow.raw", MIB));
    let fixture = UpgradedDaemon::new(scratch, &[text(&disk), text(&slow), "--delay", "read=3600s"]);
    let first = fixture.serve().start();
    // The log has started by then.
    let stderr = fixture.new_process().args(["--log", "warn"]).fails();
    let why = "disk disk: its image has not answered a read for 5 s, so requests in flight would not end";
    assert!(stderr.contains(&format!("the old process continues: {why}")), "{stderr}");
    first.wait_for_log(why);
    first.stop();
}

#[test]
fn too_low_descriptor_limit_is_reported() {
    const CLIENTS: usize = 60;
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", MIB);
    // The numbers of threads and their descriptors must not depend on the host.
    let arguments = [text(&disk), "--max-connections", "0", "--workers", "1"];
    let fixture = UpgradedDaemon::new(scratch, &arguments);
    let first = fixture.serve().start();
    let clients = SteppingClient::start(
        &first.uri("disk"),
        &format!(
            "clients = [nbd.NBD() for _ in range({CLIENTS})]\n\
             for client in clients: client.connect_uri(uri)\nstep()\n\
             for client in clients: client.pread(512, 0)\n"
        ),
    );
    let new_process = Serve::new(&fixture.scratch).wrapped_by(["prlimit", "--nofile=75:75"]).args(arguments);
    let stderr = new_process.arg("--takeover").env("WEIR_QMP", control(&fixture)).fails();
    assert!(stderr.contains("`ulimit -n` or LimitNOFILE= must be larger"), "{stderr}");
    let (second, _) = fixture.upgrade(first);
    clients.finish();
    second.stop();
}

#[test]
fn daemon_of_another_user_is_not_trusted() {
    need_root("sockets of other users");
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", MIB);
    let fixture = UpgradedDaemon::new(scratch, &[text(&disk)]);
    let script = "\
import os, socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(uri)
os.seteuid(65534)
listener.listen()
step()
";
    let stalled = SteppingClient::start(text(&fixture.control()), script);
    let stderr = fixture.new_process().fails();
    assert!(stderr.contains("the daemon there runs as another user, 65534"), "{stderr}");
    stalled.finish();
}
