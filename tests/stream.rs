//! `weir stream`: chains that become shorter while clients use the disk, read by QEMU; limits,
//! cancellation and a killed daemon; QEMU's `block-stream`.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Stdio},
};

use serde_json::{Value, json};

use crate::harness::{
    self, MIB, Qmp, Scratch, Serve, Weir, assert_contains, nbdsh_command,
    operator::{find, run_failing, run_json, run_ok, serve as serve_config, socket, status},
    qemu_img, qemu_io, text,
};

const SIZE: u64 = 16 * MIB;

/// Creates `base.raw`, and the overlays `mid.qcow2`, `low.qcow2` and `top.qcow2` over it, with
/// different data, zeroes and cluster sizes.
fn create_chain(scratch: &Scratch) {
    scratch.filled("base.raw", SIZE);
    let overlay = |name: &str, backing: &str, format: &str, options: &str| {
        let backing = scratch.path(backing);
        let arguments = ["create", "-q", "-f", "qcow2", "-b", text(&backing), "-F", format, "-o", options];
        qemu_img(arguments.into_iter().chain([text(&scratch.path(name))])).succeeds();
    };
    let change = |name: &str, changes: &[&str]| {
        qemu_io(["-f", "qcow2"], changes, scratch.path(name));
    };
    overlay("low.qcow2", "base.raw", "raw", "cluster_size=64k");
    change("low.qcow2", &["write -P 1 1M 1M", "write -z 3M 1M"]);
    overlay("mid.qcow2", "low.qcow2", "qcow2", "cluster_size=4k");
    change("mid.qcow2", &["write -P 2 1500k 100k", "write -P 3 5M 7k", "write -z 6M 100k"]);
    overlay("top.qcow2", "mid.qcow2", "qcow2", "cluster_size=128k,extended_l2=on");
    change("top.qcow2", &["write -P 4 2M 5k", "write -z 7M 4k"]);
}

/// A daemon with the disk `vm1`, whose image is `top.qcow2`.
fn serve(scratch: &Scratch) -> Weir {
    Serve::new(scratch)
        .args([text(&scratch.path("top.qcow2")), "--format", "qcow2", "--name", "vm1"])
        .args(["--qmp", &socket(scratch)])
        .start()
}

/// The files of the chain, by their names, as weir reports it.
fn chain(scratch: &Scratch) -> Vec<String> {
    let status = status(scratch, "0");
    let files = find(&status, "disks", "vm1")["chain"].as_array().cloned().unwrap_or_default();
    let name = |file: &Value| PathBuf::from(file.as_str().unwrap()).file_name().unwrap().to_owned();
    files.iter().map(|file| name(file).into_string().unwrap()).collect()
}

/// The files of the chain, by their names, as QEMU reads it.
fn chain_in_files(scratch: &Scratch) -> Vec<String> {
    let info =
        qemu_img(["info", "-U", "--backing-chain", "--output=json", text(&scratch.path("top.qcow2"))]).json();
    let name = |image: &Value| Path::new(image["filename"].as_str().unwrap()).file_name().unwrap().to_owned();
    info.as_array().unwrap().iter().map(|image| name(image).into_string().unwrap()).collect()
}

/// The content of the chain before the daemon, as a raw file.
fn content(scratch: &Scratch, name: &str) -> PathBuf {
    let copy = scratch.path(name);
    qemu_img(["convert", "-O", "raw", text(&scratch.path("top.qcow2")), text(&copy)]).succeeds();
    copy
}

/// Checks the image, and compares its chain with a raw file.
fn compare(scratch: &Scratch, content: &Path) {
    let top = scratch.path("top.qcow2");
    qemu_img(["check", "-q", text(&top)]).succeeds();
    qemu_img(["compare", "-q", "-f", "qcow2", "-F", "raw", text(&top), text(content)]).succeeds();
}

/// The only job.
fn job(scratch: &Scratch) -> Value {
    run_json(scratch, &["jobs", "--json"])[0].clone()
}

/// A client that changes the disk at random and compares what it reads, until its input ends. Then
/// it writes the content that the disk must have to a file.
struct Load(Child);

impl Load {
    fn start(weir: &Weir, before: &Path, after: &Path) -> Self {
        let script = format!(
            "
import random, select, sys
h.connect_uri('{}')
model = bytearray(open('{}', 'rb').read())
print('ready'); sys.stdout.flush()
count = 0
while not select.select([sys.stdin], [], [], 0)[0] or count < 200:
    count += 1
    at = random.randrange(len(model) - 1)
    length = min(random.randrange(1, 300000), len(model) - at)
    kind = random.randrange(10)
    if kind < 4:
        data = bytes([random.randrange(256)]) * length
        h.pwrite(data, at)
        model[at:at + length] = data
    elif kind < 6:
        h.zero(length, at)
        model[at:at + length] = bytes(length)
    elif kind < 7:
        h.trim(length, at)
        found = h.pread(length, at)
        model[at:at + length] = found
    elif kind < 8:
        h.flush()
    else:
        assert h.pread(length, at) == model[at:at + length], (at, length)
assert h.pread(len(model), 0) == model
h.flush()
open('{}', 'wb').write(model)
print('done')
",
            weir.uri("vm1"),
            text(before),
            text(after)
        );
        let mut command = nbdsh_command(&script);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("nbdsh");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        Self(child)
    }

    fn finish(mut self) {
        self.0.stdin.take().expect("piped").write_all(b"end\n").expect("it reads");
        let output = self.0.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn chain_becomes_shorter_under_load() {
    let scratch = Scratch::new();
    create_chain(&scratch);
    let (before, after) = (content(&scratch, "before.raw"), scratch.path("after.raw"));
    let low = fs::read(scratch.path("low.qcow2")).unwrap();
    let weir = serve(&scratch);
    assert_eq!(chain(&scratch), ["top.qcow2", "mid.qcow2", "low.qcow2", "base.raw"]);
    let load = Load::start(&weir, &before, &after);
    let job = run_json(&scratch, &["stream", "vm1", "--up-to", text(&scratch.path("low.qcow2")), "--json"]);
    assert_eq!((&job["kind"], &job["state"]), (&json!("stream"), &json!("concluded")), "{job}");
    assert_eq!(chain(&scratch), ["top.qcow2", "low.qcow2", "base.raw"]);
    assert_eq!(chain_in_files(&scratch), chain(&scratch));
    // The removed file is closed, and its lock released.
    qemu_io(["-f", "qcow2"], ["write -P 9 0 64k"], scratch.path("mid.qcow2"));
    let printed = run_ok(&scratch, &["stream", "vm1"]);
    assert_contains(&printed, &["vm1: ", " copied to ", "top.qcow2 in "]);
    assert!(chain(&scratch).is_empty(), "no backing file remains");
    assert_eq!(chain_in_files(&scratch), ["top.qcow2"]);
    assert_eq!(fs::read(scratch.path("low.qcow2")).unwrap(), low, "it is not written");
    for removed in ["mid.qcow2", "low.qcow2", "base.raw"] {
        fs::remove_file(scratch.path(removed)).unwrap();
    }
    load.finish();
    assert_contains(&run_failing(&scratch, &["stream", "vm1"]), &["vm1: its image has no backing file"]);
    weir.stop();
    compare(&scratch, &after);
}

#[test]
fn thin_stays_thin() {
    let scratch = Scratch::new();
    let (base, top) = (scratch.sparse("base.raw", 1 << 30), scratch.path("top.qcow2"));
    qemu_io(["-f", "raw"], ["write -P 1 100M 1M", "write -P 0 200M 1M"], &base);
    qemu_img(["create", "-q", "-f", "qcow2", "-b", text(&base), "-F", "raw", text(&top)]).succeeds();
    let weir = serve(&scratch);
    let job = run_json(&scratch, &["stream", "vm1", "--json"]);
    assert_eq!((&job["copied-bytes"], &job["done-bytes"]), (&json!(MIB), &json!(1_u64 << 30)), "{job}");
    weir.stop();
    let size = fs::metadata(&top).unwrap().len();
    assert!(size < 2 * MIB, "{size}");
    qemu_img(["compare", "-q", text(&top), text(&base)]).succeeds();
}

#[test]
fn cancelled_and_killed_streams_leave_the_chain() {
    let scratch = Scratch::new();
    create_chain(&scratch);
    let before = content(&scratch, "before.raw");
    let weir = serve(&scratch);
    run_ok(&scratch, &["stream", "vm1", "--bps-total", "256k", "--detach"]);
    for arguments in [&["snapshot", "vm1"][..], &["stream", "vm1"], &["disk", "remove", "vm1"]] {
        assert_contains(&run_failing(&scratch, arguments), &["the job stream-vm1 uses it"]);
    }
    run_ok(&scratch, &["job", "pause", "stream-vm1"]);
    run_ok(&scratch, &["job", "resume", "stream-vm1"]);
    run_ok(&scratch, &["job", "cancel", "stream-vm1"]);
    harness::poll_until(|| (job(&scratch)["state"] == "concluded").then_some(()));
    run_ok(&scratch, &["job", "dismiss", "stream-vm1"]);
    assert_eq!(chain(&scratch).len(), 4);
    run_ok(&scratch, &["stream", "vm1", "--bps-total", "1M", "--detach"]);
    harness::poll_until(|| (job(&scratch)["copied-bytes"].as_u64() > Some(0)).then_some(()));
    weir.kill();
    assert_eq!(chain_in_files(&scratch).len(), 4);
    qemu_img(["check", "-q", "-r", "leaks", text(&scratch.path("top.qcow2"))]).succeeds();
    compare(&scratch, &before);
    // A later stream finishes the work.
    let weir = serve(&scratch);
    run_ok(&scratch, &["stream", "vm1"]);
    weir.stop();
    assert_eq!(chain_in_files(&scratch), ["top.qcow2"]);
    compare(&scratch, &before);
}

#[test]
fn reload_and_upgrade_continue_the_shorter_chain() {
    let scratch = Scratch::new();
    create_chain(&scratch);
    let before = content(&scratch, "before.raw");
    let config = format!(
        "[daemon]\nqmp = \"{}\"\n\n[disk.vm1]\nimage = \"top.qcow2\"\nformat = \"qcow2\"\n",
        socket(&scratch)
    );
    let file = scratch.file("weir.toml", config);
    let old = serve_config(&scratch, &file);
    let low = scratch.path("low.qcow2");
    let stream = ["stream", "vm1", "--up-to", text(&low)];
    run_ok(&scratch, &[&stream[..], &["--bps-total", "64k", "--detach"]].concat());
    let takeover = format!("--takeover={}", socket(&scratch));
    let upgrade = || Serve::new(&scratch).args(["--config", text(&file), &takeover]).at_given_addresses();
    assert_contains(&upgrade().fails(), &["the job stream-vm1 uses it"]);
    run_ok(&scratch, &["job", "set", "stream-vm1", "--bps-total", "0"]);
    harness::poll_until(|| (job(&scratch)["state"] == "concluded").then_some(()));
    let chain_now = ["top.qcow2", "low.qcow2", "base.raw"];
    assert_eq!(chain(&scratch), chain_now);
    run_ok(&scratch, &["reload"]);
    let new = upgrade().start();
    let (ended, log) = old.wait();
    assert!(ended.success(), "{log}");
    assert_eq!(chain(&scratch), chain_now);
    run_ok(&scratch, &["stream", "vm1"]);
    new.stop();
    assert_eq!(chain_in_files(&scratch), ["top.qcow2"]);
    compare(&scratch, &before);
}

#[test]
fn stream_names_what_prevents_it() {
    let scratch = Scratch::new();
    create_chain(&scratch);
    let path = |name: &str| scratch.path(name);
    qemu_img(["snapshot", "-c", "one", text(&path("top.qcow2"))]).succeeds();
    let plain = path("plain.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&plain), "1M"]).succeeds();
    let weir = Serve::new(&scratch)
        .args([text(&path("top.qcow2")), text(&plain), "--name", "vm1", "--name", "plain"])
        .args(["--format", "qcow2", "--qmp", &socket(&scratch)])
        .start();
    for (arguments, expected) in [
        (&["stream", "vm1"][..], "its image has internal snapshots"),
        (&["stream", "plain"], "its image has no backing file"),
        (&["stream", "none"], "none"),
        (
            &["stream", "vm1", "--up-to", text(&path("other.qcow2"))],
            "it is not in the chain of backing files",
        ),
        (
            &["stream", "vm1", "--up-to", text(&path("mid.qcow2"))],
            "no file is between it and the disk's image",
        ),
        (&["stream", "vm1", "--weight", "50"], "is in no group"),
    ] {
        assert_contains(&run_failing(&scratch, arguments), &[expected]);
    }
    weir.stop();
    assert_eq!(chain_in_files(&scratch).len(), 4);
}

#[test]
fn qmp_streams_like_qemu() {
    let scratch = Scratch::new();
    create_chain(&scratch);
    let before = content(&scratch, "before.raw");
    let weir = serve(&scratch);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let low = text(&scratch.path("low.qcow2")).to_owned();
    let stream =
        json!({ "job-id": "s", "device": "vm1", "base": low, "speed": 65536, "auto-dismiss": false });
    qmp.command("block-stream", stream);
    assert_eq!(qmp.event("JOB_STATUS_CHANGE")["status"], "created");
    assert_eq!(qmp.event("JOB_STATUS_CHANGE")["status"], "running");
    let jobs = qmp.command("query-block-jobs", json!({}));
    assert_eq!((&jobs[0]["type"], &jobs[0]["device"]), (&json!("stream"), &json!("s")), "{jobs}");
    let (_, refused) = qmp.command_error("block-stream", json!({ "device": "vm1" }));
    assert_contains(&refused, &["the job s uses it"]);
    qmp.command("block-job-set-speed", json!({ "device": "s", "speed": 0 }));
    let completed = qmp.event("BLOCK_JOB_COMPLETED");
    assert_eq!((&completed["type"], &completed["len"]), (&json!("stream"), &json!(SIZE)), "{completed}");
    assert_eq!(completed["offset"], SIZE);
    assert_eq!(qmp.event("JOB_STATUS_CHANGE")["status"], "concluded");
    qmp.command("job-dismiss", json!({ "id": "s" }));
    assert_eq!(chain_in_files(&scratch), ["top.qcow2", "low.qcow2", "base.raw"]);
    for (arguments, expected) in [
        (json!({ "device": "none" }), "Cannot find device='none' nor node-name='none'"),
        (json!({ "device": "vm1", "base-node": "x" }), "Parameter 'base-node'"),
        (json!({ "device": "vm1", "on-error": "stop" }), "Parameter 'on-error' does not accept value 'stop'"),
        (json!({ "device": "vm1", "base": "/none" }), "it is not in the chain of backing files"),
    ] {
        let (class, why) = qmp.command_error("block-stream", arguments);
        assert_eq!(class, "GenericError");
        assert_contains(&why, &[expected]);
    }
    qmp.command("block-stream", json!({ "device": "vm1" }));
    assert_eq!(qmp.event("BLOCK_JOB_COMPLETED")["device"], "vm1", "the name of the device");
    weir.stop();
    assert_eq!(chain_in_files(&scratch), ["top.qcow2"]);
    compare(&scratch, &before);
}
