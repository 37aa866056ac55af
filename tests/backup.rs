//! `weir backup`: copies of disks that clients change meanwhile, compared by QEMU; jobs and their
//! errors.

use std::{
    fs,
    os::unix::{
        fs::{OpenOptionsExt as _, PermissionsExt as _},
        net::UnixListener,
    },
    path::Path,
    process::{Command, Stdio},
    thread,
};

use nix::{
    libc,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::harness::{
    LoopDevice, MIB, Qmp, Scratch, Serve, TestClient, WEIR, Weir, assert_contains,
    operator::{run_failing, run_json, run_misused, run_ok, socket, status},
    poll_until, qemu_img, qemu_io, text, weir,
};

const SIZE: u64 = 32 * MIB;

/// A daemon with the disk `vm1` and further arguments.
fn serve(scratch: &Scratch, image: &Path, format: &str, more: &[&str]) -> Weir {
    let root = scratch.path("");
    let arguments = ["--name", "vm1", "--format", format, "--qmp", &socket(scratch)];
    Serve::new(scratch).arg(image).args(arguments).args(["--image-root", text(&root)]).args(more).start()
}

fn jobs(scratch: &Scratch) -> Value {
    run_json(scratch, &["jobs", "--json"])
}

/// Waits until the job has ended; returns it.
fn ended(scratch: &Scratch, id: &str) -> Value {
    poll_until(|| {
        let jobs = jobs(scratch);
        let job = jobs.as_array()?.iter().find(|job| job["id"] == id)?.clone();
        (job["state"] == "concluded").then_some(job)
    })
}

fn compare(format: &str, backup: &Path, instant: &Path) {
    let formats = ["compare", "-q", "-f", format, "-F", "raw"];
    qemu_img(formats.into_iter().chain([text(backup), text(instant)])).succeeds();
}

#[test]
fn backup_has_the_content_of_its_instant_while_a_client_writes() {
    for (format, target) in [("raw", "backup.qcow2"), ("qcow2", "backup.raw")] {
        let scratch = Scratch::new();
        let instant = scratch.filled("instant.raw", SIZE);
        let image = scratch.path("image");
        qemu_img(["convert", "-O", format, text(&instant), text(&image)]).succeeds();
        let weir = serve(&scratch, &image, format, &[]);
        let target = scratch.path(target);
        // Slow, so that the client changes most of the disk before it is copied.
        let started =
            run_ok(&scratch, &["backup", "vm1", "--to", text(&target), "--bps-total", "1M", "--detach"]);
        assert_eq!(started, "backup-vm1: started\n");
        weir.nbdsh(
            "vm1",
            "
for at in range(0, 32 << 20, 1 << 20):
    h.pwrite(b'new!' * 1024, at + 4096)
    h.zero(65536, at + 131072)
    h.trim(65536, at + 262144)
h.pwrite(b'a' * (1 << 20), 3 << 20)
h.flush()
",
        );
        let now = jobs(&scratch);
        assert_eq!((&now[0]["state"], &now[0]["bps-total"]), (&"running".into(), &MIB.into()));
        run_ok(&scratch, &["job", "set", "backup-vm1", "--bps-total", "0"]);
        let job = ended(&scratch, "backup-vm1");
        assert_eq!((&job["error"], &job["done-bytes"]), (&Value::Null, &SIZE.into()), "{job}");
        let other = if format == "raw" { "qcow2" } else { "raw" };
        compare(other, &target, &instant);
        if other == "qcow2" {
            qemu_img(["check", "-q", text(&target)]).succeeds();
        }
        run_ok(&scratch, &["job", "dismiss", "backup-vm1"]);
        assert_eq!(run_ok(&scratch, &["jobs"]), "no jobs\n");
        // The client's changes are in the disk itself.
        weir.nbdsh("vm1", "assert h.pread(4, 4096) == b'new!' and h.pread(1, 3 << 20) == b'a'");
        weir.stop();
    }
}

#[test]
fn command_waits_and_keeps_the_target_thin() {
    let scratch = Scratch::new();
    let image = scratch.sparse("thin.raw", 64 * MIB);
    qemu_io(["-f", "raw"], ["write -P 7 10M 1M"], &image);
    let weir = serve(&scratch, &image, "raw", &[]);
    let target = scratch.path("thin-backup.raw");
    let printed = run_ok(&scratch, &["backup", "vm1", "--to", text(&target)]);
    assert_contains(&printed, &["vm1: ", " copied to ", "thin-backup.raw"]);
    compare("raw", &target, &image);
    let metadata = fs::metadata(&target).expect("it is complete");
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (64 * MIB, 0o600));
    let allocated = std::os::unix::fs::MetadataExt::blocks(&metadata) * 512;
    assert!(allocated <= 2 * MIB, "{allocated} bytes are allocated");
    assert_eq!(jobs(&scratch), json!([]), "the command has read the result");
    let log = weir.stop();
    assert_contains(&log, &["a backup has started", "a backup is complete"]);
}

#[test]
fn backup_to_an_nbd_server_overwrites_it() {
    let scratch = Scratch::new();
    let image = scratch.sparse("a.raw", SIZE);
    qemu_io(["-f", "raw"], ["write -P 7 10M 1M"], &image);
    let other = Scratch::new();
    let target = other.filled("target.raw", SIZE + MIB);
    let server = Serve::new(&other).arg(&target).args(["--name", "t", "--format", "raw"]).start();
    let weir = serve(&scratch, &image, "raw", &["--sandbox", "off"]);
    run_ok(&scratch, &["backup", "vm1", "--to", &server.uri("t")]);
    server.nbdsh(
        "t",
        "
assert h.pread(4, 10 << 20) == bytes([7] * 4) and h.pread(1 << 20, 0) == bytes(1 << 20)
assert h.pread(1 << 20, 31 << 20) == bytes(1 << 20) and h.pread(1 << 20, 32 << 20) != bytes(1 << 20)
",
    );
    weir.stop();
    server.stop();
}

#[test]
fn cancelled_backup_leaves_no_file_and_a_job_protects_its_disk() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let weir = serve(&scratch, &image, "raw", &[]);
    let target = scratch.path("b.raw");
    let qmp = socket(&scratch);
    let command = ["backup", "vm1", "--to", text(&target), "--bps-total", "64K", "--qmp", &qmp];
    thread::scope(|scope| {
        let waiting = scope.spawn(move || weir_outcome(&command));
        poll_until(|| (!jobs(&scratch).as_array()?.is_empty()).then_some(()));
        let refused = run_failing(&scratch, &["disk", "remove", "vm1"]);
        assert_contains(&refused, &["the job backup-vm1 uses it", "weir job cancel backup-vm1"]);
        let second = scratch.path("c.raw");
        let refused = run_failing(&scratch, &["backup", "vm1", "--to", text(&second)]);
        assert_contains(&refused, &["disk vm1: the job backup-vm1 uses it"]);
        assert!(!second.exists(), "a backup that was refused leaves no file");
        assert_eq!(run_ok(&scratch, &["job", "pause", "backup-vm1"]), "backup-vm1: paused\n");
        assert_eq!(status(&scratch, "0")["jobs"][0]["state"], "paused");
        let refused = run_failing(&scratch, &["job", "pause", "backup-vm1"]);
        assert_contains(&refused, &["the job is paused and cannot be paused"]);
        run_ok(&scratch, &["job", "resume", "backup-vm1"]);
        run_ok(&scratch, &["job", "cancel", "backup-vm1"]);
        let (code, stderr) = waiting.join().expect("it ends");
        assert_eq!(code, 1);
        assert_contains(&stderr, &["vm1: the backup to ", "was cancelled (the file was removed)"]);
    });
    assert!(!target.exists());
    run_ok(&scratch, &["disk", "remove", "vm1"]);
    weir.stop();
}

fn weir_outcome(command: &[&str]) -> (i32, String) {
    let outcome = weir(command).run();
    (outcome.code(), outcome.stderr())
}

#[test]
fn wrong_requests_change_nothing() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", MIB);
    let weir = serve(&scratch, &image, "raw", &["memory:64K", "--name", "small", "--sandbox", "off"]);
    let own = weir.uri("small");
    let other = Scratch::new();
    let server = Serve::new(&other).args(["memory:64K", "--name", "small"]).start();
    let small = server.uri("small");
    let pipe = scratch.path("pipe");
    TestClient::new("mkfifo").arg(&pipe).succeeds();
    let here = scratch.path("");
    let absent = scratch.path("none/b.raw");
    let new = scratch.path("b.raw");
    let target = text(&new);
    for (arguments, expected) in [
        (&["backup", "vm9", "--to", target][..], "vm9"),
        (&["backup", "vm1", "--to", text(&image)], "exists already"),
        (&["backup", "vm1", "--to", text(&here)], "is a directory"),
        (&["backup", "vm1", "--to", text(&pipe)], "neither a file nor a block device"),
        (&["backup", "vm1", "--to", "/dev/null"], "neither a file nor a block device"),
        (&["backup", "vm1", "--to", "memory:1M"], "is no target (use"),
        (&["backup", "vm1", "--to", "null:1M"], "is no target (use"),
        (&["backup", "vm1", "--to", &own], "is an NBD server of this daemon"),
        (&["backup", "vm1", "--to", text(&absent)], "cannot be created"),
        (&["backup", "vm1", "--to", &small], "the target has 65536 bytes, and the disk 1048576"),
        (&["backup", "vm1", "--to", target, "--weight", "5"], "is in no group"),
        (&["backup", "vm1", "--to", target, "--id", "a/b"], "an id has"),
        (&["job", "cancel", "none"], "no job has this id"),
        (&["job", "set", "none", "--bps-total", "1M"], "no job has this id"),
    ] {
        let refused = run_failing(&scratch, arguments);
        assert_contains(&refused, &[expected]);
        assert!(!new.exists(), "weir {arguments:?} leaves a file");
    }
    for (arguments, expected) in [
        (&["backup", "vm1", "--to", target, "--weight", "0"][..], "is not a weight"),
        (&["job", "set", "none"], "nothing to change"),
    ] {
        assert_contains(&weir_outcome(arguments).1, &[expected]);
    }
    assert_contains(&run_misused(&scratch, &["job", "set", "none"]), &["nothing to change"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    for (command, arguments, expected) in [
        ("x-weir-backup", json!({ "name": "vm1", "target": "memory:1M" }), "is no target"),
        ("x-weir-backup", json!({ "name": "vm1", "target": "null:1M" }), "is no target"),
        ("x-weir-job-set", json!({ "id": "none" }), "nothing to change"),
    ] {
        assert_contains(&qmp.command_error(command, arguments).1, &[expected]);
    }
    assert_eq!(jobs(&scratch), json!([]));
    server.stop();
    weir.stop();
}

#[test]
fn device_in_use_by_the_kernel_is_no_target() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", MIB);
    let file = scratch.filled("target.raw", MIB);
    let before = fs::read(&file).expect("it exists");
    let device = LoopDevice::attach(&file, 512);
    let weir = Serve::new(&scratch)
        .arg(&image)
        .args(["--name", "vm1", "--format", "raw", "--qmp", &socket(&scratch), "--sandbox", "off"])
        .start();
    // As a mount would.
    let claim = fs::OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(device.path());
    let claim = claim.expect("the device is unused");
    let command = ["backup", "vm1", "--to", text(device.path())];
    assert_contains(&run_failing(&scratch, &command), &["is mounted or in use by the kernel"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let arguments = json!({ "name": "vm1", "target": text(device.path()), "format": "raw" });
    let (_, refused) = qmp.command_error("x-weir-backup", arguments);
    assert_contains(&refused, &["is mounted or in use by the kernel"]);
    drop(claim);
    assert_eq!(fs::read(&file).expect("it exists"), before);
    run_ok(&scratch, &command);
    weir.stop();
    drop(device);
    compare("raw", &file, &image);
}

#[test]
fn backup_without_a_report_of_its_end_keeps_the_file() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let weir = serve(&scratch, &image, "raw", &[]);
    let target = scratch.path("b.raw");
    let qmp = socket(&scratch);
    let command = ["backup", "vm1", "--to", text(&target), "--bps-total", "64K", "--qmp", &qmp];
    thread::scope(|scope| {
        let waiting = scope.spawn(move || weir_outcome(&command));
        poll_until(|| (!jobs(&scratch).as_array()?.is_empty()).then_some(()));
        weir.kill();
        let (code, stderr) = waiting.join().expect("it ends");
        assert_eq!(code, 1);
        assert_contains(&stderr, &["is unknown", "b.raw", "weir jobs", "the file is kept"]);
    });
    assert!(target.exists());
}

#[test]
fn signal_ends_a_command_whose_target_does_not_answer() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", MIB);
    let weir = serve(&scratch, &image, "raw", &["--sandbox", "off"]);
    let silent = scratch.path("silent.sock");
    let listener = UnixListener::bind(&silent).expect("a new socket");
    let target = format!("nbd+unix:///x?socket={}", text(&silent));
    let command = ["backup", "vm1", "--to", &target, "--qmp", &socket(&scratch)];
    let child = Command::new(WEIR).args(command).stderr(Stdio::piped()).spawn().expect("it starts");
    // The daemon has connected, and waits for the greeting.
    let _connection = listener.accept().expect("the daemon connects");
    let refused = run_failing(&scratch, &["disk", "remove", "vm1"]);
    assert_contains(&refused, &["the job backup-vm1 is starting"]);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).expect("it runs");
    let outcome = child.wait_with_output().expect("it ends");
    assert_eq!(outcome.status.code(), Some(1));
    assert_contains(
        &String::from_utf8_lossy(&outcome.stderr),
        &["is unknown", "interrupted before the daemon has answered", "weir jobs"],
    );
    weir.stop();
}

#[test]
fn idle_daemon_ends_after_its_jobs() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let weir = serve(&scratch, &image, "raw", &["--exit-when-idle"]);
    let target = scratch.path("b.raw");
    run_ok(&scratch, &["backup", "vm1", "--to", text(&target), "--bps-total", "64K", "--detach"]);
    weir.nbdsh("vm1", "assert h.get_size() == 32 << 20");
    run_ok(&scratch, &["job", "set", "backup-vm1", "--bps-total", "0"]);
    let (status, log) = weir.wait();
    assert!(status.success(), "{log}");
    assert_contains(&log, &["a backup is complete"]);
    compare("raw", &target, &image);
}

#[test]
fn full_target_fails_the_backup_and_not_the_disk() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", MIB);
    let weir = serve(&scratch, &image, "raw", &["--sandbox", "off"]);
    let other = Scratch::new();
    let bad = ["null:1M", "--name", "bad", "--fault", "kind=write,error=ENOSPC"];
    let server = Serve::new(&other).args(bad).start();
    let refused = run_failing(&scratch, &["backup", "vm1", "--to", &server.uri("bad")]);
    assert_contains(
        &refused,
        &["vm1: no backup to nbd", "the target cannot be written at offset", "free space"],
    );
    weir.nbdsh("vm1", "assert h.get_size() == 1 << 20");
    server.stop();
    weir.stop();
}

#[test]
fn qmp_jobs_have_the_members_of_qapi() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let weir = serve(&scratch, &image, "raw", &[]);
    let target = scratch.path("b.raw");
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let (class, _) = qmp.command_error("block-job-cancel", json!({ "device": "none" }));
    assert_eq!(class, "DeviceNotActive");
    let (class, _) = qmp.command_error("job-cancel", json!({ "id": "none" }));
    assert_eq!(class, "GenericError");
    run_ok(
        &scratch,
        &["backup", "vm1", "--to", text(&target), "--bps-total", "64K", "--detach", "--id", "j"],
    );
    let changed = |qmp: &mut Qmp| qmp.event("JOB_STATUS_CHANGE")["status"].as_str().map(str::to_owned);
    assert_eq!(qmp.command("query-block-jobs", json!({}))[0]["speed"], 65536);
    assert_eq!(changed(&mut qmp).as_deref(), Some("created"));
    assert_eq!(changed(&mut qmp).as_deref(), Some("running"));
    qmp.command("block-job-pause", json!({ "device": "j" }));
    assert_eq!(changed(&mut qmp).as_deref(), Some("paused"));
    let job = qmp.command("query-jobs", json!({}))[0].take();
    assert_eq!((&job["id"], &job["type"], &job["status"]), (&"j".into(), &"backup".into(), &"paused".into()));
    assert_eq!(job["total-progress"], SIZE);
    qmp.command("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
    qmp.command("job-resume", json!({ "id": "j" }));
    assert_eq!(changed(&mut qmp).as_deref(), Some("running"));
    let ended = qmp.event("BLOCK_JOB_COMPLETED");
    let expected = json!({ "type": "backup", "device": "j", "len": SIZE, "offset": SIZE, "speed": 0 });
    assert_eq!(ended, expected);
    assert_eq!(changed(&mut qmp).as_deref(), Some("concluded"));
    compare("raw", &target, &image);
    qmp.command("job-dismiss", json!({ "id": "j" }));
    assert_eq!(changed(&mut qmp).as_deref(), Some("null"));
    assert_eq!(qmp.command("query-jobs", json!({})), json!([]));
    weir.stop();
}

#[test]
fn upgrade_is_refused_while_a_backup_runs() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let weir = serve(&scratch, &image, "raw", &[]);
    let target = scratch.path("b.raw");
    run_ok(&scratch, &["backup", "vm1", "--to", text(&target), "--bps-total", "64K", "--detach"]);
    let qmp = socket(&scratch);
    let upgrade = TestClient::new(env!("CARGO_BIN_EXE_weir"))
        .args(["serve", text(&image), "--name", "vm1", "--format", "raw", "--qmp", &qmp])
        .arg(format!("--takeover={qmp}"))
        .args(["--nbd", &format!("unix:{}", text(weir.socket()))]);
    assert_contains(&upgrade.fails(), &["the job backup-vm1 uses it", "weir job cancel backup-vm1"]);
    run_ok(&scratch, &["job", "cancel", "backup-vm1"]);
    ended(&scratch, "backup-vm1");
    weir.stop();
}

#[test]
fn end_of_the_daemon_names_the_incomplete_target() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let weir = serve(&scratch, &image, "raw", &[]);
    let target = scratch.path("b.raw");
    run_ok(&scratch, &["backup", "vm1", "--to", text(&target), "--bps-total", "64K", "--detach"]);
    assert_contains(&weir.stop(), &["a job ends with the daemon: its target is incomplete", "b.raw"]);
}
