//! `weir serve --takeover` under load: fio's checksums prove that no request is lost or repeated,
//! and a client that never reconnects proves that connections survive.
//!
//! Never asserts the length of a pause; `make soak`, which upgrades 200 times (`WEIR_UPGRADES`),
//! prints it. Upper bounds of limits are asserted: a slow host only lowers the work.

mod added;
mod bitmaps;
mod config_differences;
mod counters;
mod handover;
mod hostile_front_ends;
mod identity;
mod proxy;
mod remote;
mod unresponsive_clients;

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::{
        fs::{FileExt as _, PermissionsExt as _},
        net::{UnixDatagram, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::mpsc,
    thread,
    time::Instant,
};

use proxy::{UpgradeStep, kill_new_process};

use serde_json::{Value, json};

use crate::{
    bench::bench,
    fuse::can_mount,
    harness::{
        DEADLINE, MIB, Qmp, Scratch, Serve, TestClient, Weir, nbdsh_command, pause, qemu_img, text, weir,
    },
    vhost_user::{features, front_end},
};

/// Version of the message format.
const FORMAT: u64 = 8;
/// Log message of the old process after a failed upgrade.
const UPGRADE_FAILED: &str = "the upgrade failed, this process continues";

/// Limit in bytes per second, and its maximum overrun in bytes: the longest I/O that requests are
/// merged into.
const LIMIT: f64 = 40e6;
const MAX_OVERRUN: f64 = 2e6;

/// A daemon that is upgraded repeatedly, always with the same arguments.
struct UpgradedDaemon {
    scratch: Scratch,
    arguments: Vec<String>,
    on_tcp: bool,
}

impl UpgradedDaemon {
    fn new(scratch: Scratch, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Self { scratch, arguments, on_tcp: false }
    }

    fn control(&self) -> PathBuf {
        self.scratch.socket("the-control")
    }

    fn serve(&self) -> Serve {
        let control = format!("unix:{}", self.control().display());
        let serve = Serve::new(&self.scratch).args(&self.arguments).env("WEIR_QMP", control);
        if self.on_tcp { serve.on_tcp() } else { serve }
    }

    fn new_process(&self) -> Serve {
        self.serve().arg("--takeover")
    }

    #[track_caller]
    fn kill_new_process(&self, step: UpgradeStep) {
        kill_new_process(self.serve(), &self.control(), &self.scratch.socket("between"), step);
    }

    /// Starts a new process that fails. Successive numbers kill it at successive steps; then peers
    /// disconnect after some messages.
    #[track_caller]
    fn fail_at(&self, number: usize) {
        let scripts: [&[&str]; 3] = [&[], &["prepared"], &["prepared", "nonsense"]];
        let number = number % (UpgradeStep::ALL.len() + scripts.len());
        let Some(messages) = number.checked_sub(UpgradeStep::ALL.len()).map(|at| scripts[at]) else {
            return self.kill_new_process(UpgradeStep::ALL[number]);
        };
        let mut peer =
            UpgradePeer::connect(&self.control(), FORMAT).expect("the daemon accepts the upgrade request");
        peer.receive();
        for message in messages {
            peer.send(message);
            if *message == "prepared" {
                peer.receive();
            }
        }
    }

    /// Upgrades; the old process must exit on its own, cleanly.
    #[track_caller]
    fn upgrade(&self, old: Weir) -> (Weir, u64) {
        let new = self.new_process().start();
        let (status, log) = old.wait();
        assert!(status.success() && !log.contains("panicked"), "the old process ended with {status}:\n{log}");
        assert!(log.contains("a new process has taken over"), "{log}");
        let line = new.wait_for_log("taken over");
        let pause = line.split("pause_us=").nth(1).unwrap_or_default();
        let digits: String = pause.chars().take_while(char::is_ascii_digit).collect();
        (new, digits.parse().unwrap_or_else(|_| panic!("no pause in {line:?}")))
    }
}

/// A client over TLS that writes its own blocks, and reconnects after each disconnect. Acknowledged
/// blocks must be present at the end. Prints the number of disconnects, each of which must be
/// orderly.
const TLS_CLIENT: &str = "\
import os, sys
uri, offset, stop = arguments[0], int(arguments[1]), arguments[2]
BLOCKS, disconnected, written = 256, 0, {}
def connect():
    h = nbd.NBD()
    h.set_uri_allow_local_file(True)
    h.connect_uri(uri)
    return h
def retried(operation):
    global h, disconnected
    while True:
        try:
            if h is None:
                h = connect()
            return operation()
        except nbd.Error as error:
            assert 'non-properly' not in error.string, error.string
            disconnected += h is not None
            h = None
h, number = connect(), 0
while number < BLOCKS or not os.path.exists(stop):
    at = number % BLOCKS
    written[at] = number.to_bytes(8, 'little') * 64
    retried(lambda: h.pwrite(written[at], offset + at * 512))
    number += 1
for at in range(BLOCKS):
    assert retried(lambda: h.pread(512, offset + at * 512)) == written[at], at
print(disconnected)
";
/// Offset of the blocks of the TLS client, beyond those of all loads with fio.
const TLS_OFFSET: u64 = 32 * MIB;

fn tls_client(weir: &Weir, fixture: &UpgradedDaemon) -> Child {
    let (keys, stop) = (fixture.scratch.path(KEYS), fixture.scratch.path("stop"));
    let (uri, mark) = (weir.uri("disk"), if fixture.on_tcp { "?" } else { "&" });
    let uri = uri.replacen("nbd", "nbds", 1).replacen("://", "://alice@", 1);
    let uri = format!("{uri}{mark}tls-psk-file={}", keys.display());
    let arguments = format!("arguments = [{uri:?}, {:?}, {:?}]\n", TLS_OFFSET.to_string(), text(&stop));
    let mut client = nbdsh_command(&format!("{arguments}{TLS_CLIENT}"));
    client.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nbdsh was found")
}

/// Stops the client; returns the number of its disconnects.
#[track_caller]
fn end_tls_client(client: Child, fixture: &UpgradedDaemon) -> usize {
    fixture.scratch.file("stop", "");
    let output = client.wait_with_output().expect("the child can be waited for");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the client with TLS: {stderr}");
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap_or_else(|_| panic!("no number: {output:?}"))
}

/// File with the key of `alice`.
const KEYS: &str = "keys.psk";

fn make_keys(scratch: &Scratch) -> PathBuf {
    let keys = scratch.path(KEYS);
    TestClient::new("psktool").args(["-u", "alice", "-p"]).arg(&keys).succeeds();
    keys
}

/// fio on 16 MiB of an export: it reads and writes, and then verifies its writes. One loop only:
/// over several loops fio expects wrong bytes, with any server.
fn load(uri: String, scratch: &Scratch, offset: u64, seed: usize) -> thread::JoinHandle<()> {
    let client = TestClient::new("fio")
        .args(["--ioengine=nbd", "--rw=randrw", "--size=16M", "--iodepth=16", "--bsrange=512-60k"])
        .args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--blockalign=512"])
        .args(["--serialize_overlap=1", "--fsync=50"])
        .args([format!("--name=at{offset}"), format!("--randseed={seed}"), format!("--uri={uri}")])
        .arg(format!("--offset={offset}"))
        .arg(format!("--aux-path={}", scratch.path("").display()));
    thread::spawn(move || drop(client.succeeds()))
}

#[test]
fn recording_continues_after_an_upgrade() {
    let scratch = Scratch::new();
    let (disk, directory) = (scratch.filled("disk.raw", MIB), scratch.path("kept"));
    fs::create_dir(&directory).expect("the directory can be created");
    let fixture = UpgradedDaemon::new(scratch, &[text(&disk), "--record", text(&directory)]);
    let read = |weir: &Weir| weir.nbdsh("disk", "for i in range(10): h.pread(4096, 0)");
    let first = fixture.serve().start();
    read(&first);
    let (second, _) = fixture.upgrade(first);
    read(&second);
    second.stop();
    let files = fs::read_dir(&directory)
        .expect("the directory exists")
        .map(|file| file.expect("it can be read").path());
    let info = TestClient::new(crate::harness::WEIR).args(["trace", "info", "--json"]).args(files).json();
    assert_eq!(info["disks"]["disk"]["reads"], 20, "{info:#}");
}

#[test]
fn connection_and_negotiated_features_survive() {
    let scratch = Scratch::new();
    let disk = scratch.filled("disk.raw", MIB);
    let fixture = UpgradedDaemon::new(scratch, &[disk.to_str().unwrap()]);
    let first = fixture.serve().start();
    let script = "\
import sys
def step(): print('there', flush=True); sys.stdin.readline()
h.add_meta_context('base:allocation')
h.connect_uri(arguments[0])
before = h.pread(4096, 8192)
h.pwrite(b'x' * 4096, 4096)
step()
assert h.aio_is_ready()
assert h.pread(4096, 8192) == before
assert h.pread(4096, 4096) == b'x' * 4096
h.pwrite(b'y' * 4096, 0)
h.flush()
extents = []
h.block_status(65536, 0, lambda context, offset, entries, error: extents.append((context, len(entries))))
assert extents and extents[0][0] == 'base:allocation', extents
step()
assert h.pread(4096, 0) == b'y' * 4096
h.shutdown()
";
    let mut client = nbdsh_command(&format!("arguments = [{:?}]\n{script}", first.uri("disk")));
    client.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = client.spawn().expect("nbdsh was found");
    let mut stdout = client.stdout.take().expect("piped");
    let mut wait_for_line = move || stdout.read_exact(&mut [0; 6]).expect("the client connects");
    wait_for_line();
    let status =
        |fixture: &UpgradedDaemon| weir(&["status", "--json"]).env("WEIR_QMP", control(fixture)).json();
    let before = status(&fixture)["disks"][0].clone();
    let (second, _) = fixture.upgrade(first);
    let after = status(&fixture)["disks"][0].clone();
    for counted in ["reads", "writes", "read-bytes", "written-bytes"] {
        assert_eq!(after[counted], before[counted], "{counted}: {after}");
    }
    let finish = |client: &mut Child| {
        client.stdin.as_mut().expect("piped").write_all(b"\n").expect("the client waits for input");
    };
    finish(&mut client);
    wait_for_line();
    let (_third, _) = fixture.upgrade(second);
    finish(&mut client);
    assert!(client.wait().expect("the child can be waited for").success());
}

fn control(fixture: &UpgradedDaemon) -> String {
    format!("unix:{}", fixture.control().display())
}

#[test]
fn untransferable_state_is_named_and_the_old_process_continues() {
    let scratch = Scratch::new();
    let (first_image, second_image) = (scratch.sparse("one.raw", MIB), scratch.sparse("two.raw", MIB));
    let (first_image, second_image) =
        (first_image.to_str().unwrap().to_owned(), second_image.to_str().unwrap().to_owned());
    let fixture = UpgradedDaemon::new(scratch, &[&first_image, &second_image]);
    let refused = |arguments: &[&str], expect: &str| {
        let new_process = Serve::new(&fixture.scratch).args(arguments).arg("--takeover");
        let stderr = new_process.env("WEIR_QMP", control(&fixture)).fails();
        assert!(stderr.contains(expect), "{stderr}");
    };
    refused(&[&first_image], "no process listens there (start without --takeover)");
    let first = fixture.serve().start();
    refused(&[&first_image], "disk two: the running daemon has it, but this config does not");
    refused(
        &[&first_image, &second_image, "--cache", "none"],
        "has it open with cache=writeback, writethrough or unsafe",
    );
    refused(&[&first_image, &second_image, "--read-only"], "one.raw: locked for writing by another process");
    refused(&[&first_image, "/nonexistent"], "/nonexistent: no such file");
    first.nbdsh("one", "h.pwrite(b'x' * 512, 0)\n");
    first.stop();
    let memory = UpgradedDaemon::new(fixture.scratch, &["memory:1M"]);
    let first = memory.serve().start();
    let stderr = memory.new_process().fails();
    assert!(
        stderr.contains(
            "disk memory: cannot be taken over (remove it with `weir disk remove`, or restart \
             weir): its data is in memory"
        ),
        "{stderr}"
    );
    first.nbdsh("memory", "h.pwrite(b'x' * 512, 0)\n");
    first.stop();
    if can_mount() {
        let mounted_file = memory.scratch.file("spot", "");
        let files = UpgradedDaemon::new(memory.scratch, &[&first_image, "--fuse", text(&mounted_file)]);
        let first = files.serve().start();
        let other =
            Serve::new(&files.scratch).args([&first_image, "--takeover"]).env("WEIR_QMP", control(&files));
        let stderr = other.fails();
        assert!(stderr.contains("spot, but this config does not"), "{stderr}");
        assert_eq!(fs::metadata(&mounted_file).unwrap().len(), MIB);
        first.stop();
    }
}

/// Programs keep the file open, requests wait for a limit during every upgrade, and some new
/// processes fail.
#[test]
fn fuse_export_survives() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let (disk, mounted_file) = (scratch.sparse("disk.raw", 16 * MIB), scratch.file("spot", ""));
    let fixture =
        UpgradedDaemon::new(scratch, &[text(&disk), "--fuse", text(&mounted_file), "--iops-total", "3000"]);
    let mut current = fixture.serve().start();
    fs::set_permissions(&mounted_file, fs::Permissions::from_mode(0o640)).unwrap();
    let open = fs::OpenOptions::new().read(true).write(true).open(&mounted_file).unwrap();
    let load = TestClient::new("fio")
        .args(["--name=file", "--ioengine=libaio", "--direct=1", "--iodepth=16", "--size=16M"])
        .args(["--rw=randrw", "--bsrange=512-60k", "--blockalign=512", "--serialize_overlap=1"])
        .args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--fsync=50"])
        .arg(format!("--filename={}", text(&mounted_file)))
        .arg(format!("--aux-path={}", fixture.scratch.path("").display()));
    let load = thread::spawn(move || drop(load.succeeds()));
    let mut failed = 0;
    while !load.is_finished() || failed < UpgradeStep::ALL.len() {
        fixture.fail_at(failed);
        failed += 1;
        current.wait_for_log(UPGRADE_FAILED);
        current = fixture.upgrade(current).0;
    }
    load.join().expect("the load was not disturbed");
    open.write_all_at(b"weir", 8192).unwrap();
    open.sync_all().unwrap();
    assert_eq!(fs::metadata(&mounted_file).unwrap().permissions().mode() & 0o777, 0o640);
    let modified = fs::metadata(&mounted_file).unwrap().modified().unwrap();
    let current = fixture.upgrade(current).0;
    assert_eq!(fs::metadata(&mounted_file).unwrap().modified().unwrap(), modified);
    let mut read = [0; 4];
    open.read_exact_at(&mut read, 8192).unwrap();
    assert_eq!(&read, b"weir");
    let status = Qmp::negotiated(&fixture.control()).command_reply("x-weir-query-status", json!({}));
    let exports = status["return"]["exports"].as_array().expect("a list");
    let file = exports.iter().find(|export| export["type"] == "fuse").expect("the entry exists");
    assert_eq!(file["openers"], 1, "{file}");
    drop(open);
    // The watcher of the first process also watches the last one.
    current.kill();
    while fs::metadata(&mounted_file).is_err() || fs::metadata(&mounted_file).unwrap().len() > 0 {
        pause();
    }
}

/// Requests wait for a limit during every upgrade, and some new processes fail.
#[test]
fn virtqueues_survive() {
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.sparse("disk.raw", 4 * MIB), scratch.socket("machine"));
    let listen_option = format!("unix:{},queues=2", text(&socket));
    let arguments = [text(&disk), "--vhost-user-blk", &listen_option, "--iops-total", "3000"];
    let fixture = UpgradedDaemon::new(scratch, &arguments);
    let mut current = fixture.serve().start();
    let target = format!("vhost-user:{}", text(&socket));
    // Writes each block once.
    let load = move || bench("-w --pattern 90 -c 2048 -d 24 -s 2K --flush-interval 100", &target).succeeds();
    let load = thread::spawn(load);
    let mut upgrades = 0;
    while !load.is_finished() {
        if upgrades % 3 == 1 {
            let mut peer = UpgradePeer::connect(&fixture.control(), FORMAT)
                .expect("the daemon accepts the upgrade request");
            assert_eq!(peer.receive()["machines"][0]["disk"], "disk");
            peer.send("prepared");
            // The virtqueues are suspended; they resume after the failure.
            let state = peer.receive();
            let front_ends = state["still"]["machines"].as_array();
            assert!(front_ends.is_some_and(|machines| machines.len() <= 1), "{state}");
            drop(peer);
            current.wait_for_log(UPGRADE_FAILED);
        }
        current = fixture.upgrade(current).0;
        upgrades += 1;
    }
    load.join().expect("the front end was not disturbed");
    assert!(fs::read(&disk).unwrap().iter().all(|byte| *byte == 90), "{upgrades} upgrades");
    // A front end that connects after the upgrades is accepted, a second one beside it is not.
    let mut stream = front_end(&socket);
    features(&mut stream);
    let current = fixture.upgrade(current).0;
    features(&mut stream);
    let (status, log) = {
        let other = Serve::new(&fixture.scratch).args([text(&disk), "--takeover"]);
        (other.env("WEIR_QMP", format!("unix:{}", fixture.control().display())).fails(), current)
    };
    assert!(status.contains("the running daemon has it, but this config does not"), "{status}");
    features(&mut stream);
    drop(stream);
    log.stop();
    assert!(!socket.exists(), "the last process removes the socket");
}

/// A peer of the upgrade protocol that sends arbitrary messages.
struct UpgradePeer(UnixStream);

impl UpgradePeer {
    fn connect(control: &Path, format: u64) -> Result<Self, String> {
        Self::connect_as(control, format, "0.0.0")
    }

    fn connect_as(control: &Path, format: u64, version: &str) -> Result<Self, String> {
        let (local, remote) = UnixStream::pair().unwrap();
        let mut qmp = Qmp::negotiated(control);
        let arguments = json!({ "format": format, "version": version });
        let reply = qmp.command_with_descriptor(&remote, "x-weir-takeover", &arguments);
        match reply["error"]["desc"].as_str() {
            Some(why) => Err(why.to_owned()),
            None => Ok(Self(local)),
        }
    }

    fn send(&mut self, message: &str) {
        let text = format!("{message:?}");
        let lengths = [text.len() as u64, 0, 0].map(u64::to_le_bytes).concat();
        self.0.write_all(&[lengths.as_slice(), text.as_bytes()].concat()).unwrap();
    }

    /// Receives a message; the kernel closes descriptors that are not received.
    fn receive(&mut self) -> Value {
        let mut lengths = [[0; 8]; 3];
        lengths.iter_mut().for_each(|length| self.0.read_exact(length).unwrap());
        let [text, bytes, descriptors] = lengths.map(|length| u64::from_le_bytes(length) as usize);
        let mut message = vec![0; text + bytes + descriptors.div_ceil(250)];
        self.0.read_exact(&mut message).unwrap();
        serde_json::from_slice(&message[..text]).unwrap()
    }
}

/// Waits until clients have read from this number of disks.
fn until_all_are_read(fixture: &UpgradedDaemon, count: usize) {
    let mut qmp = Qmp::negotiated(&fixture.control());
    let is_read = |disk: &Value| disk["stats"]["rd_operations"].as_u64() > Some(0);
    loop {
        let reply = qmp.command_reply("query-blockstats", json!({}));
        let disks = reply["return"].as_array().expect("a list");
        if disks.iter().filter(|disk| is_read(disk)).count() == count {
            return;
        }
        pause();
    }
}

#[test]
fn failure_at_any_step_changes_nothing() {
    let scratch = Scratch::new();
    let (raw, qcow2) = (scratch.sparse("raw.raw", 16 * MIB), scratch.path("qcow2.qcow2"));
    qemu_img(["create", "-q", "-f", "qcow2"]).arg(&qcow2).arg("16M").succeeds();
    let config = format!(
        "[disk.raw]\nimage = {raw:?}\nexport = [{{ type = \"nbd\", listen = \"unix:{socket}\" }}]\n\
         [disk.qcow2]\nimage = {qcow2:?}\nformat = \"qcow2\"\nbps-total = \"10M\"\n\
         export = [{{ type = \"nbd\", listen = \"unix:{socket}\" }}]\n",
        socket = scratch.socket("nbd").display()
    );
    let config = scratch.file("weir.toml", config);
    let mut fixture = UpgradedDaemon::new(scratch, &["--config", config.to_str().unwrap()]);
    fixture.arguments.extend(["--log".to_owned(), "debug".to_owned()]);
    let serve = |takeover: bool| {
        let serve = fixture.serve().at_given_addresses();
        if takeover { serve.arg("--takeover") } else { serve }
    };
    let daemon = serve(false).start();
    let uri =
        |export: &str| format!("nbd+unix:///{export}?socket={}", fixture.scratch.socket("nbd").display());
    let loads = ["raw", "qcow2"].map(|export| load(uri(export), &fixture.scratch, 0, 1));

    until_all_are_read(&fixture, 2);
    let why = UpgradePeer::connect(&fixture.control(), 999).err().expect("an unknown format is rejected");
    assert!(why.contains("uses upgrade format 999") && why.contains("(restart it)"), "{why}");
    // Each disconnects after sending these messages.
    let steps: [&[&str]; 5] =
        [&[], &["prepared"], &["prepared", "refused"], &["prepared", "ready?"], &["ready"]];
    for (number, messages) in steps.into_iter().enumerate() {
        let mut peer =
            UpgradePeer::connect(&fixture.control(), FORMAT).expect("the daemon accepts the upgrade request");
        let offer = peer.receive();
        assert_eq!(offer["disks"].as_array().map(Vec::len), Some(2), "{offer}");
        for message in messages {
            peer.send(message);
            if *message == "prepared" {
                let state = peer.receive();
                assert!(state["still"]["clients"].is_array(), "{state}");
            }
        }
        // A disconnect without a message is noticed too.
        drop(peer);
        daemon.wait_for_logs(UPGRADE_FAILED, number + 1);
    }
    for (number, step) in UpgradeStep::ALL.into_iter().enumerate() {
        kill_new_process(serve(false), &fixture.control(), &fixture.scratch.socket("between"), step);
        daemon.wait_for_logs(UPGRADE_FAILED, steps.len() + number + 1);
    }
    for load in loads {
        load.join().expect("the load was not disturbed");
    }
    let new_daemon = serve(true).start();
    let (status, log) = daemon.wait();
    assert!(status.success(), "{log}");
    new_daemon.stop();
    qemu_img(["check", "-q"]).arg(&qcow2).succeeds();
    assert!(!fixture.control().exists(), "the last process has removed its files");
}

#[test]
fn tls_connection_is_closed_cleanly_and_can_reconnect() {
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", MIB);
    let keys = make_keys(&scratch);
    let arguments = [disk.to_str().unwrap(), "--tls", "required", "--tls-psk", keys.to_str().unwrap()];
    let fixture = UpgradedDaemon::new(scratch, &arguments);
    let first = fixture.serve().start();
    let uri = format!(
        "nbds+unix://alice@/disk?socket={}&tls-psk-file={}",
        first.socket().display(),
        keys.display()
    );
    let script = "\
import sys
h.set_uri_allow_local_file(True)
h.connect_uri(arguments[0])
h.pwrite(b'x' * 512, 0)
print('there', flush=True)
sys.stdin.readline()
try:
    h.pread(512, 0)
except nbd.Error as error:
    h = nbd.NBD()
    h.set_uri_allow_local_file(True)
    h.connect_uri(arguments[0])
    assert h.pread(512, 0) == b'x' * 512
else:
    raise AssertionError('the connection is still there')
";
    let mut client = nbdsh_command(&format!("arguments = [{uri:?}]\n{script}"));
    client.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = client.spawn().expect("nbdsh was found");
    client.stdout.as_mut().expect("piped").read_exact(&mut [0; 6]).expect("the client connects");
    let (_second, _) = fixture.upgrade(first);
    client.stdin.as_mut().expect("piped").write_all(b"\n").expect("the client waits for input");
    assert!(client.wait().expect("the child can be waited for").success());
}

#[test]
fn service_manager_is_notified_of_the_new_main_pid() {
    let scratch = Scratch::new();
    let (disk, pid_file) = (scratch.sparse("disk.raw", MIB), scratch.path("pid"));
    let notify_path = scratch.socket("notify");
    let manager = UnixDatagram::bind(&notify_path).unwrap();
    let (sender, notifications) = mpsc::channel();
    // The old process exits only after its last notification was read.
    thread::spawn(move || {
        let mut text = [0; 256];
        while let Ok(length) = manager.recv(&mut text)
            && sender.send(String::from_utf8_lossy(&text[..length]).trim().to_owned()).is_ok()
        {}
    });
    let next = |prefix: &str| loop {
        let notification = notifications.recv_timeout(DEADLINE).expect("a notification arrives in time");
        if notification.starts_with(prefix) {
            return notification;
        }
    };
    let arguments = [disk.to_str().unwrap(), "--pid-file", pid_file.to_str().unwrap()];
    let fixture = UpgradedDaemon::new(scratch, &arguments);
    // Only the first process has the watchdog in its environment.
    let first = fixture.serve().env("NOTIFY_SOCKET", &notify_path).env("WATCHDOG_USEC", "50000").start();
    next("WATCHDOG=1");
    let second = fixture.new_process().env("NOTIFY_SOCKET", &notify_path).start();
    let (status, log) = first.wait();
    assert!(status.success(), "{log}");
    assert_eq!(next("MAINPID="), format!("MAINPID={}", second.pid()));
    next("READY=1");
    next("WATCHDOG=1");
    assert_eq!(fs::read_to_string(&pid_file).unwrap(), format!("{}\n", second.pid()));
    second.stop();
    assert!(!pid_file.exists(), "the daemon must remove its PID file");
}

/// If each new process began with empty buckets, far more would be admitted than the duration of
/// the upgrades permits.
#[test]
fn upgrade_grants_no_new_burst() {
    const BURST: u64 = 200;
    const UPGRADES: u64 = 5;
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", MIB);
    let burst = BURST.to_string();
    let limits = ["--iops-total", "1", "--iops-total-max", &burst];
    let mut arguments = vec![text(&disk), "--group", "gold"];
    arguments.extend(limits);
    let fixture = UpgradedDaemon::new(scratch, &arguments);
    let mut current = fixture.serve().start();
    let start = Instant::now();
    let target = current.uri("disk");
    let load = thread::spawn(move || bench("-c 2000 -d 64 -s 512", &target).succeeds());
    let reads = || {
        let status = weir(&["status", "--json"]).env("WEIR_QMP", control(&fixture)).json();
        status["disks"][0]["reads"]["requests"].as_u64().expect("a number")
    };
    // The burst is used up, and all further requests wait.
    while reads() < BURST {
        pause();
    }
    for _ in 0..UPGRADES {
        current = fixture.upgrade(current).0;
    }
    let (passed, seconds) = (reads(), start.elapsed().as_secs());
    assert!(passed <= BURST + seconds + 2, "{passed} in {seconds} s, after {UPGRADES} upgrades");
    weir(&["throttle", "gold", "--iops-total", "0"]).env("WEIR_QMP", control(&fixture)).succeeds();
    load.join().expect("the load was not disturbed");
    assert_eq!(reads(), 2000);
    current.stop();
}

/// Every format and type of socket in turn, beside a client over TLS, with limits, so that requests
/// wait during every upgrade.
#[test]
#[allow(clippy::print_stdout, reason = "what was measured is what a soak is for")]
fn clients_notice_neither_upgrades_nor_failures() {
    let upgrades = std::env::var("WEIR_UPGRADES").ok().map_or(6, |text| text.parse().expect("a number"));
    let (mut pauses, mut failed, mut disconnected) = (Vec::new(), 0_usize, 0);
    for round in 0_usize.. {
        if round >= 4 && pauses.len() >= upgrades {
            break;
        }
        let scratch = Scratch::new();
        let format = if round % 2 == 0 { "raw" } else { "qcow2" };
        let (image, keys) = (scratch.path("disk"), make_keys(&scratch));
        qemu_img(["create", "-q", "-f", format]).arg(&image).arg("33M").succeeds();
        let cache = if round % 3 == 0 { "none" } else { "writeback" };
        let limit = LIMIT.to_string();
        let arguments = [text(&image), "-f", format, "--cache", cache, "--bps-total", &limit];
        let arguments = [&arguments[..], &["--prefetch", "on", "--tls", "on", "--tls-psk", text(&keys)]];
        let arguments = arguments.concat().into_iter().map(str::to_owned).collect();
        let fixture = UpgradedDaemon { scratch, arguments, on_tcp: round % 4 >= 2 };
        let mut current = fixture.serve().start();
        let start = Instant::now();
        let with_tls = tls_client(&current, &fixture);
        let loads = [0, 16 * MIB].map(|offset| load(current.uri("disk"), &fixture.scratch, offset, round));
        let before = pauses.len();
        while !loads.iter().all(thread::JoinHandle::is_finished) {
            // Successive new processes fail at successive steps.
            if pauses.len() % 3 == 1 {
                fixture.fail_at(failed);
                failed += 1;
                current.wait_for_log(UPGRADE_FAILED);
            }
            let (next, pause) = fixture.upgrade(current);
            current = next;
            pauses.push(pause);
        }
        for load in loads {
            load.join().expect("the load was not disturbed");
        }
        let reply = Qmp::negotiated(&fixture.control()).command_reply("query-blockstats", json!({}));
        let stats = &reply["return"][0]["stats"];
        let moved = ["rd_bytes", "wr_bytes"].map(|name| stats[name].as_f64().expect("a number"));
        // The burst, a tenth of a second's worth, counts once.
        let allowed = LIMIT * (0.1 + start.elapsed().as_secs_f64()) + MAX_OVERRUN;
        assert!(moved[0] + moved[1] <= allowed, "{moved:?} of {allowed} after {} upgrades", pauses.len());
        let times = end_tls_client(with_tls, &fixture);
        assert!(times <= pauses.len() - before, "it was disconnected {times} times");
        disconnected += times;
        current.stop();
        if format == "qcow2" {
            qemu_img(["check", "-q"]).arg(&image).succeeds();
        }
    }
    assert!(disconnected > 0, "no TLS client was connected during an upgrade");
    pauses.sort_unstable();
    let at = |percent: usize| pauses[(pauses.len() * percent / 100).min(pauses.len() - 1)];
    println!(
        "{} upgrades, {failed} failed upgrades, {disconnected} TLS clients disconnected: pause p50 \
         {} µs, p99 {} µs, longest {} µs",
        pauses.len(),
        at(50),
        at(99),
        at(100)
    );
}
