//! Storage errors while a disk is served: the client gets the matching error, the daemon continues.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, TestClient, WEIR, Weir, assert_contains, nbdsh, nbdsh_command, need_root,
    qemu_io, script_without_foreign_mounts, text, weir as weir_command,
};

/// Starts the daemon in a mount namespace, with an image of 8 MiB on a tmpfs of 2 MiB at `$0`.
const ON_A_SMALL_FILE_SYSTEM: &str =
    r#"mount -t tmpfs -o size=2M tmpfs "$0" && truncate -s 8M "$0/disk.raw" && exec "$@""#;

#[test]
fn full_file_system_is_enospc_for_the_client() {
    let scratch = Scratch::new();
    need_root("mounts");
    let mount = scratch.path("small");
    fs::create_dir(&mount).unwrap();
    let weir = Serve::new(&scratch)
        .wrapped_by([
            "unshare",
            "--mount",
            "sh",
            "-c",
            &script_without_foreign_mounts(ON_A_SMALL_FILE_SYSTEM),
            text(&mount),
        ])
        .arg(mount.join("disk.raw"))
        .start();
    let script = "
M = 1 << 20
written = 0
try:
    while written < 8 * M:
        h.pwrite(b'x' * 65536, written)
        written += 65536
    raise AssertionError('8 MiB fit into 2')
except nbd.Error as error:
    assert error.errno == 'ENOSPC', error
assert M <= written <= 2 * M, written
# Earlier writes are present, and freeing space helps.
assert h.pread(65536, written - 65536) == b'x' * 65536
h.trim(M, 0)
h.pwrite(b'y' * 65536, written)
assert h.pread(65536, written) == b'y' * 65536
";
    weir.nbdsh("disk", script);
}

/// Waits until the disk is stopped because its file system is full.
fn await_stop(qmp: &mut Qmp) {
    let expect = json!({
        "qom-path": "", "device": "disk", "node-name": "disk", "operation": "write", "action": "stop",
        "nospace": true, "reason": "No space left on device (os error 28)",
    });
    assert_eq!(qmp.event("BLOCK_IO_ERROR"), expect);
    qmp.event("STOP");
}

fn make_room_and_resume(weir: &Weir, mount: &Path, control: &Path, qmp: &mut Qmp) {
    // Still full: the disk stops again.
    let address = format!("unix:{}", control.display());
    for disks in [&["disk"][..], &[]] {
        let stderr = weir_command(&[&["resume", "--qmp", &address], disks].concat()).fails();
        assert_contains(&stderr, &["disk: stopped again: No space left on device"]);
        qmp.event("RESUME");
        await_stop(qmp);
    }
    // The mount is in the daemon's mount namespace.
    let inside =
        ["--mount", "--target", &weir.pid().to_string(), "mount", "-o", "remount,size=16M", text(mount)];
    TestClient::new("nsenter").args(inside).succeeds();
    let control = format!("unix:{}", control.display());
    let resume = |disks: &[&str]| weir_command(&[&["resume", "--qmp", &control], disks].concat());
    assert_contains(&resume(&["other"]).fails(), &["other: no disk has this name"]);
    let resumed: Value = serde_json::from_str(&resume(&["disk", "--json"]).succeeds()).expect("JSON");
    assert_eq!(resumed, json!([{ "name": "disk" }]));
    qmp.event("RESUME");
    assert_eq!(resume(&["disk"]).succeeds(), "disk: was not stopped\n");
    assert_eq!(resume(&["--json"]).succeeds(), "[]\n");
    assert_eq!(resume(&[]).succeeds(), "no disk was stopped\n");
}

#[test]
fn full_file_system_stops_the_disk_until_there_is_space() {
    let scratch = Scratch::new();
    need_root("mounts");
    let mount = scratch.path("small");
    fs::create_dir(&mount).unwrap();
    let control = scratch.path("qmp.sock");
    let weir = Serve::new(&scratch)
        .wrapped_by([
            "unshare",
            "--mount",
            "sh",
            "-c",
            &script_without_foreign_mounts(ON_A_SMALL_FILE_SYSTEM),
            text(&mount),
        ])
        .arg(mount.join("disk.raw"))
        .args(["--on-write-error", "enospc", "--qmp", &format!("unix:{}", control.display())])
        .start();
    let mut qmp = Qmp::negotiated(&control);
    let blocks = qmp.command_reply("query-block", json!({}));
    assert_eq!(blocks["return"][0]["io-status"], "ok", "{blocks}");
    let script = format!(
        "
h.connect_uri({:?})
for number in range(64):
    h.pwrite(bytes([number]) * 65536, number * 65536)
h.flush()
for number in range(64):
    assert h.pread(65536, number * 65536) == bytes([number]) * 65536, number
print('done')
",
        weir.uri("disk")
    );
    let client = nbdsh_command(&script).stdout(Stdio::piped()).spawn().expect("nbdsh was found");
    await_stop(&mut qmp);
    assert_eq!(
        qmp.command_reply("query-status", json!({}))["return"],
        json!({"running": false, "status": "io-error"})
    );
    assert_eq!(qmp.command_reply("query-block", json!({}))["return"][0]["io-status"], "nospace");
    let stats = qmp.command_reply("query-blockstats", json!({}));
    assert_eq!(stats["return"][0]["stats"]["failed_wr_operations"], 1, "{stats}");
    make_room_and_resume(&weir, &mount, &control, &mut qmp);
    let output = client.wait_with_output().expect("the child can be waited for");
    assert!(output.status.success() && output.stdout == b"done\n", "the client has received an error");
    assert_eq!(qmp.command_reply("query-status", json!({}))["return"]["running"], true);
}

#[test]
fn full_file_system_stops_a_vhost_user_disk_until_there_is_space() {
    let scratch = Scratch::new();
    need_root("mounts");
    let mount = scratch.path("small");
    fs::create_dir(&mount).unwrap();
    let (control, vhost_socket) = (scratch.path("qmp.sock"), scratch.socket("vm"));
    let weir = Serve::new(&scratch)
        .wrapped_by([
            "unshare",
            "--mount",
            "sh",
            "-c",
            &script_without_foreign_mounts(ON_A_SMALL_FILE_SYSTEM),
            text(&mount),
        ])
        .arg(mount.join("disk.raw"))
        .args(["--vhost-user-blk", &format!("unix:{}", text(&vhost_socket))])
        .args(["--on-write-error", "enospc", "--qmp", &format!("unix:{}", control.display())])
        .start();
    let mut qmp = Qmp::negotiated(&control);
    // One request at a time, so that exactly one fails.
    let client = Command::new(WEIR)
        .args(["bench", "-q", "-w", "--pattern", "90", "-c", "64", "-d", "1", "-s", "64K", "-f", "raw"])
        .arg(format!("vhost-user:{}", text(&vhost_socket)))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("weir can be run");
    await_stop(&mut qmp);
    assert_eq!(qmp.command_reply("query-block", json!({}))["return"][0]["io-status"], "nospace");
    make_room_and_resume(&weir, &mount, &control, &mut qmp);
    let output = client.wait_with_output().expect("the child can be waited for");
    assert!(output.status.success(), "the front end has received an error: {output:?}");
    qemu_io(["-f", "raw"], ["read -P 90 0 4M"], weir.uri("disk"));
}

/// A disk over vhost-user-blk all of whose writes fail, with this error policy; and its target for
/// `weir bench`.
fn disk_with_failing_writes(scratch: &Scratch, policy: &str) -> (Weir, Qmp, String) {
    let (control, vhost_socket) = (scratch.path("qmp.sock"), scratch.socket("vm"));
    let weir = Serve::new(scratch)
        .args(["memory:1M", "--fault", "kind=write,error=EIO", "--on-write-error", policy])
        .args(["--vhost-user-blk", &format!("unix:{}", text(&vhost_socket))])
        .args(["--qmp", &format!("unix:{}", control.display())])
        .start();
    (weir, Qmp::negotiated(&control), format!("vhost-user:{}", text(&vhost_socket)))
}

#[test]
fn held_requests_of_a_stopped_disk_stay_unanswered_at_the_end() {
    let scratch = Scratch::new();
    let (weir, mut qmp, target) = disk_with_failing_writes(&scratch, "stop");
    let client = Command::new(WEIR)
        .args(["bench", "-q", "-w", "-c", "1", "-d", "1", "-f", "raw", &target])
        .stderr(Stdio::piped())
        .spawn()
        .expect("weir can be run");
    qmp.event("STOP");
    weir.signal(Signal::SIGTERM);
    let (status, log) = weir.wait();
    assert!(status.success(), "{log}");
    let output = client.wait_with_output().expect("the child can be waited for");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("the connection was closed") && !stderr.contains("Input/output error"),
        "{stderr}"
    );
}

#[test]
fn error_reported_to_a_guest_is_an_event() {
    let scratch = Scratch::new();
    let (weir, mut qmp, target) = disk_with_failing_writes(&scratch, "report");
    let stderr = weir_command(&["bench", "-w", "-c", "1", "-d", "1", "-f", "raw", &target]).fails();
    assert_contains(&stderr, &["vhost-user:"]);
    let error_event = qmp.event("BLOCK_IO_ERROR");
    assert_eq!(
        (
            &error_event["node-name"],
            &error_event["operation"],
            &error_event["action"],
            &error_event["nospace"]
        ),
        (&json!("memory"), &json!("write"), &json!("report"), &json!(false))
    );
    weir.stop();
}

#[test]
fn shutdown_does_not_wait_for_a_stopped_disk() {
    let scratch = Scratch::new();
    let control = scratch.path("qmp.sock");
    let weir = Serve::new(&scratch)
        .args(["memory:1M", "--fault", "kind=write,error=EIO", "--on-write-error", "stop"])
        // The last flush is slow, so that the signal arrives while the daemon is shutting down.
        .args(["--delay", "flush=1s"])
        .args(["--qmp", &format!("unix:{}", control.display())])
        .start();
    let mut qmp = Qmp::negotiated(&control);
    let script = format!(
        "
h.connect_uri({:?})
try:
    h.pwrite(b'x' * 512, 0)
    raise AssertionError('the device fails')
except nbd.Error as error:
    assert error.errno == 'EIO', error
print('reported')
",
        weir.uri("memory")
    );
    let client = nbdsh_command(&script).stdout(Stdio::piped()).spawn().expect("nbdsh was found");
    qmp.event("STOP");
    // As a service manager does after a client has sent `quit`.
    assert_eq!(qmp.command_reply("quit", json!({}))["return"], json!({}));
    weir.wait_for_log("stopping");
    weir.signal(Signal::SIGTERM);
    let (status, log) = weir.wait();
    assert!(status.success(), "{log}");
    let output = client.wait_with_output().expect("the child can be waited for");
    assert!(output.status.success() && output.stdout == b"reported\n", "{output:?}");
}

#[test]
fn truncated_image_is_an_error_and_not_old_memory() {
    let scratch = Scratch::new();
    for cache in ["writeback", "none"] {
        let image = scratch.filled("disk.raw", 4 * MIB);
        let weir = Serve::new(&scratch).arg(&image).args(["--cache", cache]).start();
        let ready = scratch.path("truncated");
        nbdsh(
            "
import os
h.connect_uri(arguments[0])
assert any(h.pread(4096, 3 << 20))
os.truncate(arguments[1], 1 << 20)
try:
    assert not any(h.pread(4096, 3 << 20)), 'old memory'
except nbd.Error as error:
    assert error.errno in ('EIO', 'EINVAL'), error
assert any(h.pread(4096, 0)), 'the rest is still served'
",
            [weir.uri("disk").as_str(), text(&image), text(&ready)],
        );
    }
}

#[test]
fn client_killed_during_writes_affects_no_other() {
    use std::io::{BufRead as _, BufReader};

    let weir = Serve::with_own_scratch().args(["memory:64M", "--delay", "write=20ms"]).start();
    let script = format!(
        "
h.connect_uri({:?})
for number in range(64):
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b'k' * 1000000)), number * 1000000)
print('busy', flush=True)
while h.aio_in_flight():
    h.poll(-1)
",
        weir.uri("memory")
    );
    let mut killed_client = nbdsh_command(&script).stdout(Stdio::piped()).spawn().expect("nbdsh was found");
    let mut line = String::new();
    BufReader::new(killed_client.stdout.take().expect("piped")).read_line(&mut line).expect("it prints");
    assert_eq!(line.trim(), "busy");
    killed_client.kill().expect("the child can be killed");
    killed_client.wait().expect("the child can be waited for");
    let script = "
h.pwrite(b'survivor', 0)
h.flush()
assert h.pread(8, 0) == b'survivor'
";
    weir.nbdsh("memory", script);
}
