//! `weir snapshot`: chains that QEMU reads, of disks that clients change meanwhile; the config
//! file; QEMU's commands for snapshots.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
};

use serde_json::{Value, json};

use crate::harness::{
    self, LoopDevice, MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, nbdsh_command,
    operator::{find, run_failing, run_json, run_misused, run_ok, serve as serve_config, socket, status},
    pattern, poll_until, qemu_img, qemu_io, text,
};

const SIZE: u64 = 16 * MIB;

/// A daemon with the disks `a` (raw) and `b` (qcow2), which have the bytes of [`pattern`].
fn serve(scratch: &Scratch, more: &[&str]) -> Weir {
    create_images(scratch);
    let (a, b) = (scratch.path("a.raw"), scratch.path("b.qcow2"));
    let root = scratch.path("");
    Serve::new(scratch)
        .args([text(&a), text(&b), "--name", "a", "--name", "b"])
        .args(["--qmp", &socket(scratch), "--image-root", text(&root)])
        .args(more)
        .start()
}

fn create_images(scratch: &Scratch) {
    let a = scratch.filled("a.raw", SIZE);
    let b = scratch.path("b.qcow2");
    qemu_img(["convert", "-O", "qcow2", text(&a), text(&b)]).succeeds();
}

fn check(image: &Path) {
    qemu_img(["check", "-q", text(image)]).succeeds();
}

/// Compares the content of an image, including its backing chain.
fn compare(format: &str, image: &Path, content: &Path) {
    qemu_img(["compare", "-q", "-f", format, "-F", "raw", text(image), text(content)]).succeeds();
}

/// The files of a disk's chain, by their names.
fn chain(scratch: &Scratch, disk: &str) -> Vec<String> {
    let status = status(scratch, "0");
    let files = find(&status, "disks", disk)["chain"].as_array().cloned().unwrap_or_default();
    let name = |file: &Value| PathBuf::from(file.as_str().unwrap()).file_name().unwrap().to_owned();
    files.iter().map(|file| name(file).into_string().unwrap()).collect()
}

#[test]
fn disk_continues_in_an_overlay_and_its_image_stays() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &[]);
    let before = scratch.filled("before.raw", SIZE);
    weir.nbdsh("a", "h.pwrite(b'1' * 65536, 0); h.zero(65536, 1 << 20)");
    let written = run_ok(&scratch, &["snapshot", "a"]);
    assert_contains(&written, &["a: ", "a.raw has the snapshot; the disk continues in", "a.snap-1.qcow2"]);
    assert_eq!(chain(&scratch, "a"), ["a.snap-1.qcow2", "a.raw"]);
    let instant = scratch.path("instant.raw");
    fs::copy(scratch.path("a.raw"), &instant).unwrap();
    weir.nbdsh(
        "a",
        "
assert h.pread(4, 0) == b'1111' and h.pread(4, 1 << 20) == bytes(4)
h.pwrite(b'2' * 4096, 4096); h.zero(4096, 2 << 20); h.trim(65536, 3 << 20); h.flush()
assert h.pread(2, 4095) == b'12' and h.pread(4, 2 << 20) == bytes(4)
",
    );
    assert_eq!(fs::read(scratch.path("a.raw")).unwrap(), fs::read(&instant).unwrap(), "it is not written");
    assert_ne!(fs::read(&instant).unwrap(), fs::read(&before).unwrap());
    // Other programs may read the base now, and none may write to it.
    qemu_io(["-r", "-f", "raw"], ["read 0 64k"], scratch.path("a.raw"));
    let refused = TestClient::new("qemu-io")
        .args(["-f", "raw", "-c", "write 0 64k", text(&scratch.path("a.raw"))])
        .fails();
    assert_contains(&refused, &["lock"]);
    // A second one, of an overlay.
    run_ok(&scratch, &["snapshot", "a"]);
    assert_eq!(chain(&scratch, "a"), ["a.snap-2.qcow2", "a.snap-1.qcow2", "a.raw"]);
    weir.nbdsh("a", "h.pwrite(b'3' * 4096, 0); h.flush(); assert h.pread(2, 4095) == b'32'");
    let now = scratch.path("now.raw");
    qemu_img(["convert", "-O", "raw", &weir.uri("a"), text(&now)]).succeeds();
    weir.stop();
    for overlay in ["a.snap-1.qcow2", "a.snap-2.qcow2"] {
        check(&scratch.path(overlay));
    }
    compare("qcow2", &scratch.path("a.snap-2.qcow2"), &now);
    compare("raw", &scratch.path("a.raw"), &instant);
    let mode = fs::metadata(scratch.path("a.snap-1.qcow2")).unwrap().permissions().mode();
    assert_eq!(mode, fs::metadata(scratch.path("a.raw")).unwrap().permissions().mode());
}

#[test]
fn disks_are_snapshotted_at_one_instant_and_survive_a_kill() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &[]);
    // Writes a number to `a`, then the same to `b`, and prints it when both are flushed.
    let script = format!(
        "
import sys
h.connect_uri('{}')
other = nbd.NBD()
other.connect_uri('{}')
for number in range(1, 1 << 30):
    data = number.to_bytes(8, 'big') * 512
    at = number % 64 * 4096
    h.pwrite(data, at)
    other.pwrite(data, at)
    if number % 16 == 0:
        h.flush(); other.flush()
        print(number); sys.stdout.flush()
",
        weir.uri("a"),
        weir.uri("b")
    );
    let mut client = nbdsh_command(&script).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(client.stdout.take().unwrap()));
    let mut flushed = || -> u64 { lines.next().unwrap().unwrap().trim().parse().unwrap() };
    flushed();
    for _ in 0..3 {
        run_ok(&scratch, &["snapshot", "a", "--disks", "b"]);
        flushed();
    }
    let acknowledged = flushed();
    weir.crash();
    let _ = client.kill();
    client.wait().unwrap();
    let image = |disk: &str, number: usize| match number {
        0 if disk == "a" => scratch.path("a.raw"),
        0 => scratch.path("b.qcow2"),
        number => scratch.path(&format!("{disk}.snap-{number}.qcow2")),
    };
    let newest = |disk: &str, number: usize| {
        let image = image(disk, number);
        let format = if image.extension().is_some_and(|suffix| suffix == "raw") { "raw" } else { "qcow2" };
        if format == "qcow2" {
            check(&image);
        }
        let raw = scratch.path("content.raw");
        qemu_img(["convert", "-f", format, "-O", "raw", text(&image), text(&raw)]).succeeds();
        let content = fs::read(&raw).unwrap();
        let initial = pattern(SIZE as usize);
        let numbers =
            (0..64).map(|slot| slot * 4096).filter(|&at| content[at..at + 8] != initial[at..at + 8]);
        numbers.map(|at| u64::from_be_bytes(content[at..at + 8].try_into().unwrap())).max().unwrap_or(0)
    };
    for number in 0..3 {
        let (a, b) = (newest("a", number), newest("b", number));
        // The client writes to `a` first.
        assert!(a == b || a == b + 1, "snapshot {number} is not of one instant: {a} and {b}");
    }
    assert!(newest("a", 3) >= acknowledged && newest("b", 3) >= acknowledged, "flushed data is lost");
}

#[test]
fn overlay_of_a_block_device_needs_a_file() {
    let scratch = Scratch::new();
    let device = LoopDevice::attach(&scratch.filled("a.raw", SIZE), 512);
    let weir = Serve::new(&scratch)
        .args([text(device.path()), "--format", "raw", "--name", "a", "--qmp", &socket(&scratch)])
        .args(["--sandbox", "off"])
        .start();
    let refused = run_failing(&scratch, &["snapshot", "a"]);
    assert_contains(&refused, &[text(device.path()), "is a block device", "--to FILE"]);
    let beside = PathBuf::from(format!("{}.snap-1.qcow2", text(device.path())));
    let refused = run_failing(&scratch, &["snapshot", "a", "--to", text(&beside)]);
    assert_contains(&refused, &["is in the file system of /dev"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let arguments = json!({ "device": "a", "snapshot-file": text(&beside) });
    let (_, error) = qmp.command_error("blockdev-snapshot-sync", arguments);
    assert_contains(&error, &["is in the file system of /dev"]);
    let refused = run_failing(&scratch, &["backup", "a", "--to", text(&beside)]);
    assert_contains(&refused, &["is in the file system of /dev"]);
    assert!(!beside.exists() && chain(&scratch, "a").is_empty());
    let overlay = scratch.path("o.qcow2");
    run_ok(&scratch, &["snapshot", "a", "--to", text(&overlay)]);
    weir.nbdsh("a", "h.pwrite(b'new!', 0); h.flush()");
    weir.stop();
    check(&overlay);
    let [mode, of_device] =
        [&overlay, device.path()].map(|path| fs::metadata(path).unwrap().permissions().mode());
    assert_eq!(mode & 0o777, of_device & 0o666);
}

#[test]
fn overlay_outside_of_the_image_root_is_refused() {
    let (scratch, outside) = (Scratch::new(), Scratch::new());
    let weir = serve(&scratch, &["--sandbox", "off"]);
    let overlay = outside.path("o.qcow2");
    let refused = run_failing(&scratch, &["snapshot", "a", "--to", text(&overlay)]);
    assert_contains(&refused, &["lies outside of the image root"]);
    assert!(!overlay.exists(), "nothing is left behind");
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let arguments = json!({ "device": "a", "snapshot-file": text(&overlay) });
    let (_, error) = qmp.command_error("blockdev-snapshot-sync", arguments);
    assert_contains(&error, &["cannot be created", "lies outside of the image root"]);
    assert!(!overlay.exists() && chain(&scratch, "a").is_empty());
    weir.stop();
}

#[test]
fn caches_of_an_overlay_need_memory() {
    let scratch = Scratch::new();
    let image = scratch.path("a.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "4T"]).succeeds();
    let weir = Serve::new(&scratch)
        .args([text(&image), "--format", "qcow2", "--name", "a", "--qmp", &socket(&scratch)])
        .args(["--l2-cache-size", "128M", "--memory", "256M"])
        .start();
    let refused = run_failing(&scratch, &["snapshot", "a"]);
    assert_contains(&refused, &["disk a: ", "its metadata caches", "--memory"]);
    assert!(!scratch.path("a.snap-1.qcow2").exists() && chain(&scratch, "a").is_empty());
    weir.nbdsh("a", "h.pwrite(b'new!', 0); h.flush()");
    weir.stop();
    check(&image);
}

#[test]
fn disk_keeps_its_group_and_its_limits() {
    let scratch = Scratch::new();
    create_images(&scratch);
    let file = config(&scratch);
    let text_of_file = fs::read_to_string(&file).unwrap();
    let limited = "\n[group.gold]\niops-total = 6000\n";
    let keys =
        "group = \"gold\"\nweight = 300\niops-total = 4000\niops-total-max = 5000\nprefetch = \"on\"\n";
    fs::write(&file, format!("{text_of_file}{keys}{limited}")).unwrap();
    let daemon = serve_config(&scratch, &file);
    let settings = || {
        let status = status(&scratch, "0");
        let disk = find(&status, "disks", "a");
        ["group", "limits", "weight", "cache"].map(|key| disk[key].clone())
    };
    let before = settings();
    assert!(before[0] == "gold" && before[2] == 300, "{before:?}");
    run_ok(&scratch, &["snapshot", "a", "--save"]);
    assert_eq!(settings(), before);
    let reloaded = run_json(&scratch, &["reload", "--json"]);
    assert_eq!(reloaded.as_array().map(Vec::len), Some(0), "{reloaded}");
    daemon.stop();
}

#[test]
fn end_of_the_daemon_during_a_snapshot_leaves_a_valid_config() {
    let scratch = Scratch::new();
    create_images(&scratch);
    let file = config(&scratch);
    let daemon = serve_config(&scratch, &file);
    nbdsh(&scratch, "h.pwrite(b'new!', 0); h.flush()");
    // The daemon stops before the request.
    let command = format!("f() {{ [ $1 = thaw ] || kill {}; }}; f", daemon.pid());
    run_failing(&scratch, &["snapshot", "a", "--save", "--quiesce-command", &command]);
    daemon.wait();
    let saved = fs::read_to_string(&file).unwrap();
    let has_overlay = saved.contains("a.snap-1.qcow2");
    assert_eq!(has_overlay, scratch.path("a.snap-1.qcow2").exists(), "{saved}");
    let daemon = serve_config(&scratch, &file);
    nbdsh(&scratch, "assert h.pread(4, 0) == b'new!'");
    run_ok(&scratch, &["snapshot", "a", "--save"]);
    daemon.stop();
}

#[test]
fn node_below_an_overlay_is_not_opened_again() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &["--sandbox", "off"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let image = scratch.path("c.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "1M"]).succeeds();
    qmp.command("blockdev-add", json!({ "driver": "file", "node-name": "f", "filename": text(&image) }));
    qmp.command("blockdev-add", json!({ "driver": "qcow2", "node-name": "q", "file": "f" }));
    let overlay = scratch.path("o.qcow2");
    let arguments = json!({ "device": "q", "snapshot-file": text(&overlay), "snapshot-node-name": "sn" });
    qmp.command("blockdev-snapshot-sync", arguments);
    for (node, expected) in [("q", "the disk continues on"), ("f", "in use")] {
        let (_, error) = qmp.command_error("blockdev-del", json!({ "node-name": node }));
        assert_contains(&error, &[&format!("Block device {node} is in use"), expected]);
    }
    assert_eq!(chain(&scratch, "q"), ["o.qcow2", "c.qcow2"]);
    // All files are closed with the topmost node; the other names exist until they are deleted.
    qmp.command("blockdev-del", json!({ "node-name": "sn" }));
    check(&overlay);
    let again = json!({ "driver": "null-co", "node-name": "q", "size": 4096 });
    assert_contains(&qmp.command_error("blockdev-add", again).1, &["Duplicate nodes", "q"]);
    for node in ["q", "f"] {
        qmp.command("blockdev-del", json!({ "node-name": node }));
        let (_, error) = qmp.command_error("blockdev-del", json!({ "node-name": node }));
        assert_contains(&error, &["Failed to find node", node]);
    }
    // All names are free.
    for node in ["f", "q", "sn"] {
        qmp.command("blockdev-add", json!({ "driver": "null-co", "node-name": node, "size": 4096 }));
    }
    weir.stop();
}

/// A config file with the disk `a`.
fn config(scratch: &Scratch) -> PathBuf {
    let text = format!(
        "[daemon]\nnbd = [\"unix:{}\"]\nqmp = \"{}\"\nsandbox = \"off\"\n\n[disk.a]\nimage = \"a.raw\" # ours\nformat = \"raw\"\n",
        text(&scratch.socket("nbd")),
        socket(scratch)
    );
    scratch.file("weir.toml", text)
}

fn nbdsh(scratch: &Scratch, script: &str) {
    let uri = format!("nbd+unix:///a?socket={}", text(&scratch.socket("nbd")));
    harness::nbdsh(&format!("h.connect_uri(arguments[0])\n{script}"), [&uri]);
}

#[test]
fn saved_snapshot_survives_a_restart_and_a_reload() {
    let scratch = Scratch::new();
    create_images(&scratch);
    let file = config(&scratch);
    let daemon = serve_config(&scratch, &file);
    let before = fs::read_to_string(&file).unwrap();
    let refused = run_failing(&scratch, &["snapshot", "a"]);
    assert_contains(&refused, &["the next start would open a.raw", "--save"]);
    assert!(!scratch.path("a.snap-1.qcow2").exists(), "nothing is left behind");
    let other = scratch.file("other.toml", &before);
    let refused = run_failing(&scratch, &["snapshot", "a", "--save", "--config", text(&other)]);
    assert_contains(&refused, &["the daemon was started with", "weir.toml"]);
    assert!(!scratch.path("a.snap-1.qcow2").exists() && fs::read_to_string(&other).unwrap() == before);
    run_ok(&scratch, &["snapshot", "a", "--save", "--config", text(&file)]);
    let saved = fs::read_to_string(&file).unwrap();
    assert_contains(&saved, &["image = \"a.snap-1.qcow2\" # ours", "format = \"qcow2\""]);
    nbdsh(&scratch, "h.pwrite(b'new!', 0); h.flush()");
    let reloaded = run_json(&scratch, &["reload", "--json"]);
    assert_eq!(reloaded.as_array().map(Vec::len), Some(0), "{reloaded}");
    // The old file again, as from a backup of the configuration.
    fs::write(&file, &before).unwrap();
    let refused = run_failing(&scratch, &["reload"]);
    assert_contains(&refused, &["is a backing file of the disk since a snapshot", "a.snap-1.qcow2"]);
    // The same file by another path.
    std::os::unix::fs::symlink(scratch.path("a.raw"), scratch.path("link")).unwrap();
    fs::write(&file, before.replace("\"a.raw\"", "\"link\"")).unwrap();
    let refused = run_failing(&scratch, &["reload"]);
    assert_contains(&refused, &["is a backing file of the disk since a snapshot", "a.snap-1.qcow2"]);
    nbdsh(&scratch, "assert h.pread(4, 0) == b'new!'");
    fs::write(&file, &saved).unwrap();
    run_ok(&scratch, &["reload"]);
    daemon.kill();
    let daemon = serve_config(&scratch, &file);
    nbdsh(&scratch, "assert h.pread(4, 0) == b'new!'");
    assert_eq!(chain(&scratch, "a"), ["a.snap-1.qcow2", "a.raw"]);
    run_ok(&scratch, &["snapshot", "a", "--save"]);
    daemon.stop();
    assert_contains(&fs::read_to_string(&file).unwrap(), &["image = \"a.snap-2.qcow2\" # ours"]);
    check(&scratch.path("a.snap-1.qcow2"));
}

#[test]
fn upgrade_continues_the_chain() {
    let scratch = Scratch::new();
    create_images(&scratch);
    let file = config(&scratch);
    let old = serve_config(&scratch, &file);
    run_ok(&scratch, &["snapshot", "a", "--save"]);
    nbdsh(&scratch, "h.pwrite(b'new!', 0)");
    // A node with a name.
    let named = scratch.path("named.qcow2");
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let arguments = json!({ "device": "a", "snapshot-file": text(&named), "snapshot-node-name": "sn" });
    qmp.command("blockdev-snapshot-sync", arguments);
    let saved = fs::read_to_string(&file).unwrap();
    fs::write(&file, saved.replace("a.snap-1.qcow2", "named.qcow2")).unwrap();
    let new = Serve::new(&scratch)
        .args(["--config", text(&file), &format!("--takeover={}", socket(&scratch))])
        .at_given_addresses()
        .start();
    let (ended, log) = old.wait();
    assert!(ended.success(), "{log}");
    nbdsh(&scratch, "assert h.pread(4, 0) == b'new!'; h.pwrite(b'more', 4096)");
    assert_eq!(chain(&scratch, "a"), ["named.qcow2", "a.snap-1.qcow2", "a.raw"]);
    // The node has its name still.
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let other = json!({ "driver": "null-co", "node-name": "sn", "size": 4096 });
    qmp.command_error("blockdev-add", other);
    let second = scratch.path("second.qcow2");
    qmp.command("blockdev-snapshot-sync", json!({ "node-name": "sn", "snapshot-file": text(&second) }));
    nbdsh(&scratch, "assert h.pread(4, 0) == b'new!' and h.pread(4, 4096) == b'more'");
    new.stop();
    for image in ["a.snap-1.qcow2", "named.qcow2", "second.qcow2"] {
        check(&scratch.path(image));
    }
}

#[test]
fn internal_snapshot_keeps_the_content_inside_the_image() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &[]);
    let printed = run_ok(&scratch, &["snapshot", "b", "--internal", "monday"]);
    assert_contains(&printed, &["b.qcow2 has the internal snapshot \"monday\""]);
    weir.nbdsh("b", "h.pwrite(b'new!', 0); h.flush()");
    let refused = run_failing(&scratch, &["snapshot", "b", "--internal", "monday"]);
    assert_contains(&refused, &["it has a snapshot \"monday\" already"]);
    let refused = run_failing(&scratch, &["snapshot", "a", "--internal", "monday"]);
    assert_contains(&refused, &["its image is raw, and only qcow2 images have internal snapshots"]);
    // All or none.
    let refused = run_failing(&scratch, &["snapshot", "b", "--disks", "a", "--internal", "tuesday"]);
    assert_contains(&refused, &["is raw"]);
    weir.stop();
    let image = scratch.path("b.qcow2");
    check(&image);
    let listed = qemu_img(["snapshot", "-l", text(&image)]).succeeds();
    assert_contains(&listed, &["monday"]);
    assert!(!listed.contains("tuesday"), "{listed}");
    let instant = scratch.filled("instant.raw", SIZE);
    let kept = scratch.path("kept.raw");
    qemu_img(["convert", "-l", "monday", "-O", "raw", text(&image), text(&kept)]).succeeds();
    compare("raw", &kept, &instant);
}

#[test]
fn wrong_requests_change_nothing() {
    let scratch = Scratch::new();
    let more = ["memory:1M", "--name", "m", "--sandbox", "off"];
    let weir = serve(&scratch, &more);
    let exists = scratch.path("b.qcow2");
    let absent = scratch.path("none/o.qcow2");
    let overlay = scratch.path("o.qcow2");
    for (arguments, expected) in [
        (&["snapshot", "c"][..], "c"),
        (&["snapshot", "m"], "is not a file of this host"),
        (&["snapshot", "a", "--disks", "m"], "is not a file of this host"),
        (&["snapshot", "a", "--to", text(&exists)], "exists already"),
        (&["snapshot", "a", "--to", text(&absent)], "cannot be created"),
        (&["snapshot", "a", "--save"], "without a config file"),
        (&["snapshot", "a", "--quiesce-command", "false"], "`false freeze` failed"),
    ] {
        assert_contains(&run_failing(&scratch, arguments), &[expected]);
        assert!(!scratch.path("a.snap-1.qcow2").exists(), "weir {arguments:?} leaves a file");
        assert_eq!(chain(&scratch, "a"), Vec::<String>::new());
    }
    for (arguments, expected) in [
        (&["snapshot", "a", "--disks", "a"][..], "named twice"),
        (&["snapshot", "a", "--disks", "b", "--to", "x"], "cannot be used with"),
        (&["snapshot", "a", "--internal", "x", "--save"], "cannot be used with"),
        (&["snapshot", "a", "--quiesce-timeout", "1s"], "--quiesce-command"),
    ] {
        assert_contains(&run_misused(&scratch, arguments), &[expected]);
    }
    // Overlays that a client has created wrongly.
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let base = scratch.path("a.raw");
    let other = scratch.filled("other.raw", SIZE);
    let create = |more: &[&str]| {
        let _ = fs::remove_file(&overlay);
        let arguments = ["create", "-q", "-f", "qcow2"].into_iter().chain(more.iter().copied());
        qemu_img(arguments.map(str::to_owned).chain([text(&overlay).to_owned(), SIZE.to_string()]))
            .succeeds();
    };
    let mut rejected = |expected: &str| {
        let snapshots = json!([{ "name": "a", "overlay": text(&overlay) }]);
        let (_, error) = qmp.command_error("x-weir-snapshot", json!({ "snapshots": snapshots }));
        assert_contains(&error, &[expected]);
    };
    create(&[]);
    rejected("names no backing file");
    create(&["-b", text(&other), "-F", "raw"]);
    rejected("which is not the present image");
    create(&["-u", "-b", text(&base), "-F", "qcow2"]);
    rejected("names the format qcow2 of its backing file, which is open as raw");
    create(&["-b", text(&base), "-F", "raw"]);
    qemu_img(["resize", "-q", text(&overlay), "+1M"]).succeeds();
    rejected("and the disk");
    create(&["-b", text(&base), "-F", "raw"]);
    qemu_io(["-f", "qcow2"], ["write 0 64k"], &overlay);
    rejected("contains data");
    fs::remove_file(&overlay).unwrap();
    rejected("no such file");
    weir.stop();
}

#[test]
fn job_and_snapshot_exclude_each_other() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &[]);
    let target = scratch.path("backup.raw");
    run_ok(&scratch, &["backup", "a", "--to", text(&target), "--bps-total", "64K", "--detach"]);
    let refused = run_failing(&scratch, &["snapshot", "b", "--disks", "a"]);
    assert_contains(&refused, &["the job backup-a uses it"]);
    assert!(chain(&scratch, "b").is_empty() && !scratch.path("b.snap-1.qcow2").exists());
    run_ok(&scratch, &["job", "cancel", "backup-a"]);
    poll_until(|| {
        let jobs = run_json(&scratch, &["jobs", "--json"]);
        (jobs[0]["state"] == "concluded").then_some(())
    });
    run_ok(&scratch, &["snapshot", "b", "--disks", "a"]);
    weir.stop();
}

#[test]
fn export_with_bitmaps_prevents_an_overlay() {
    let scratch = Scratch::new();
    create_images(&scratch);
    let b = scratch.path("b.qcow2");
    qemu_img(["bitmap", "--add", text(&b), "since"]).succeeds();
    let weir = Serve::new(&scratch)
        .args([text(&b), "--format", "qcow2", "--name", "b", "--qmp", &socket(&scratch), "--bitmap", "since"])
        .start();
    let refused = run_failing(&scratch, &["snapshot", "b"]);
    assert_contains(&refused, &["provides dirty bitmaps, and an overlay has none"]);
    assert!(!scratch.path("b.snap-1.qcow2").exists());
    run_ok(&scratch, &["snapshot", "b", "--internal", "s"]);
    weir.nbdsh("b", "h.pwrite(b'new!', 0); h.flush()");
    weir.stop();
    check(&b);
    let info = qemu_img(["info", "--output=json", text(&b)]).succeeds();
    assert!(!info.contains("in-use"), "the bitmap is consistent: {info}");
}

#[test]
fn full_file_system_leaves_the_disk_as_it_is() {
    let scratch = Scratch::new();
    create_images(&scratch);
    let b = scratch.path("b.qcow2");
    let weir = Serve::new(&scratch)
        .args([text(&b), "--format", "qcow2", "--name", "b", "--qmp", &socket(&scratch), "--sandbox", "off"])
        .args(["--fault", "kind=flush,error=ENOSPC"])
        .start();
    let refused = run_failing(&scratch, &["snapshot", "b"]);
    assert_contains(&refused, &["it cannot be flushed"]);
    assert!(!scratch.path("b.snap-1.qcow2").exists());
    assert!(chain(&scratch, "b").is_empty());
    weir.nbdsh("b", "assert h.get_size() == 16 << 20 and len(h.pread(4096, 0)) == 4096");
    // Its last flush fails as well.
    weir.kill();
}

#[test]
fn quiesce_command_freezes_and_thaws_also_after_a_kill() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &[]);
    let log = scratch.path("log");
    let command = format!("f() {{ echo \"$1 $WEIR_DISKS\" >>{}; }}; f", text(&log));
    run_ok(&scratch, &["snapshot", "a", "--disks", "b", "--quiesce-command", &command]);
    assert_eq!(fs::read_to_string(&log).unwrap(), "freeze a b\nthaw a b\n");
    fs::write(&log, "").unwrap();
    // The freeze ends when the pipe gets a writer.
    let pipe = scratch.path("pipe");
    TestClient::new("mkfifo").arg(&pipe).succeeds();
    let (to, from) = (text(&log), text(&pipe));
    let hanging =
        format!("f() {{ echo $1 >>{to}; [ $1 = thaw ] || {{ cat {from}; echo frozen >>{to}; }}; }}; f");
    let mut client = std::process::Command::new(env!("CARGO_BIN_EXE_weir"))
        .args(["snapshot", "a", "--qmp", &socket(&scratch), "--quiesce-command", &hanging])
        .args(["--quiesce-timeout", "900s"])
        .spawn()
        .unwrap();
    poll_until(|| (fs::read_to_string(&log).ok()? == "freeze\n").then_some(()));
    client.kill().unwrap();
    client.wait().unwrap();
    drop(fs::OpenOptions::new().write(true).open(&pipe).unwrap());
    // The freeze continues after the kill, and the thaw follows it.
    poll_until(|| (fs::read_to_string(&log).ok()?.lines().count() == 3).then_some(()));
    assert_eq!(fs::read_to_string(&log).unwrap(), "freeze\nfrozen\nthaw\n");
    weir.stop();
}

#[test]
fn no_snapshot_is_taken_after_the_deadline() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &[]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let snapshot = |deadline_ms: u64| json!({ "snapshots": [{ "name": "b", "internal": "s" }], "deadline-ms": deadline_ms });
    let (_, error) = qmp.command_error("x-weir-snapshot", snapshot(0));
    assert_contains(&error, &["the time for the snapshots is over"]);
    // The earlier one of two deadlines.
    let mut late = snapshot(600_000);
    late["deadline-uptime-ms"] = 1.into();
    let (_, error) = qmp.command_error("x-weir-snapshot", late);
    assert_contains(&error, &["the time for the snapshots is over"]);
    // The name is free, and the disk accepts changes.
    weir.nbdsh("b", "h.pwrite(b'new!', 0); h.flush()");
    qmp.command("x-weir-snapshot", snapshot(600_000));
    weir.stop();
    check(&scratch.path("b.qcow2"));
}

#[test]
fn event_reports_a_snapshot() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &[]);
    run_ok(&scratch, &["snapshot", "a"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let events = qmp.command("x-weir-query-events", json!({}));
    let text = events.to_string();
    assert_contains(&text, &["snapshot_taken", "a.snap-1.qcow2", "a.raw"]);
    weir.stop();
}

#[test]
fn qmp_commands_have_the_semantics_of_qemu() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &["--sandbox", "off"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    // As libvirt: a prepared overlay, opened without its backing file, becomes the new top.
    let (a, overlay) = (scratch.path("a.raw"), scratch.path("sn1.qcow2"));
    qemu_img(["create", "-q", "-f", "qcow2", "-b", text(&a), "-F", "raw", text(&overlay)]).succeeds();
    let file = json!({ "driver": "file", "node-name": "sn1-storage", "filename": text(&overlay) });
    let node = json!({ "driver": "qcow2", "node-name": "sn1", "file": file, "backing": null });
    qmp.command("blockdev-add", node);
    weir.nbdsh("a", "h.pwrite(b'old!', 0); h.flush()");
    let bitmap = json!({ "node": "sn1", "name": "t" });
    qmp.command("block-dirty-bitmap-add", bitmap.clone());
    let (_, error) = qmp.command_error("blockdev-snapshot", json!({ "node": "a", "overlay": "sn1" }));
    assert_contains(&error, &["contains bitmaps"]);
    qmp.command("block-dirty-bitmap-remove", bitmap);
    let actions = json!([{ "type": "blockdev-snapshot", "data": { "node": "a", "overlay": "sn1" } }]);
    let properties = json!({ "completion-mode": "individual" });
    qmp.command("transaction", json!({ "actions": actions, "properties": properties }));
    assert_eq!(chain(&scratch, "a"), ["sn1.qcow2", "a.raw"]);
    weir.nbdsh("a", "assert h.pread(4, 0) == b'old!'; h.pwrite(b'new!', 0); h.flush()");
    // The node names the disk from now on; the daemon creates this overlay.
    let second = scratch.path("sn2.qcow2");
    let arguments = json!({
        "node-name": "sn1", "snapshot-file": text(&second), "snapshot-node-name": "sn2", "format": "qcow2",
    });
    qmp.command("blockdev-snapshot-sync", arguments.clone());
    assert_eq!(chain(&scratch, "a"), ["sn2.qcow2", "sn1.qcow2", "a.raw"]);
    let (class, error) = qmp.command_error("blockdev-snapshot-sync", arguments);
    assert_eq!(class, "GenericError");
    assert_contains(&error, &["sn2"]);
    // Internal snapshots.
    qmp.command("blockdev-snapshot-internal-sync", json!({ "device": "b", "name": "s" }));
    let (_, error) =
        qmp.command_error("blockdev-snapshot-internal-sync", json!({ "device": "b", "name": "s" }));
    assert_contains(&error, &["already"]);
    let deleted =
        qmp.command("blockdev-snapshot-delete-internal-sync", json!({ "device": "b", "name": "s" }));
    assert_eq!(
        (&deleted["id"], &deleted["name"], &deleted["vm-state-size"]),
        (&"1".into(), &"s".into(), &0.into())
    );
    for (command, arguments, expected) in [
        (
            "blockdev-snapshot",
            json!({ "node": "x", "overlay": "b" }),
            "Cannot find device='x' nor node-name='x'",
        ),
        (
            "blockdev-snapshot",
            json!({ "node": "a", "overlay": "x" }),
            "Cannot find device='x' nor node-name='x'",
        ),
        ("blockdev-snapshot-sync", json!({ "snapshot-file": "x" }), "Parameter 'device' is missing"),
        ("blockdev-snapshot-internal-sync", json!({ "device": "b", "name": "" }), "Name is empty"),
        ("blockdev-snapshot-delete-internal-sync", json!({ "device": "b" }), "Name or id must be provided"),
        (
            "blockdev-snapshot-delete-internal-sync",
            json!({ "device": "b", "name": "s" }),
            "Snapshot with id '' and name 's' does not exist on device 'b'",
        ),
        ("transaction", json!({ "actions": [{ "type": "drive-backup", "data": {} }] }), "actions[0].type"),
    ] {
        assert_contains(&qmp.command_error(command, arguments).1, &[expected]);
    }
    weir.stop();
    check(&overlay);
    check(&second);
}

#[test]
fn transaction_takes_all_snapshots_or_none() {
    let scratch = Scratch::new();
    let weir = serve(&scratch, &["--sandbox", "off"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let (a, overlay) = (scratch.path("a.raw"), scratch.path("sn1.qcow2"));
    qemu_img(["create", "-q", "-f", "qcow2", "-b", text(&a), "-F", "raw", text(&overlay)]).succeeds();
    let file = json!({ "driver": "file", "filename": text(&overlay) });
    let node = json!({ "driver": "qcow2", "node-name": "sn1", "file": file, "backing": null });
    qmp.command("blockdev-add", node);
    let created = scratch.path("b.new.qcow2");
    let snapshots = [
        json!({ "type": "blockdev-snapshot", "data": { "node": "a", "overlay": "sn1" } }),
        json!({ "type": "blockdev-snapshot-sync", "data": { "device": "b", "snapshot-file": text(&created) } }),
    ];
    let abort = json!({ "type": "abort", "data": {} });
    let raw = json!({ "type": "blockdev-snapshot-internal-sync", "data": { "device": "a", "name": "s" } });
    for (last, expected) in [(abort, "Transaction aborted using Abort action"), (raw, "named twice")] {
        let actions: Vec<Value> = snapshots.iter().cloned().chain([last]).collect();
        let (class, error) = qmp.command_error("transaction", json!({ "actions": actions }));
        assert_eq!(class, "GenericError");
        assert_contains(&error, &[expected]);
        assert!(chain(&scratch, "a").is_empty() && chain(&scratch, "b").is_empty());
        assert!(!created.exists(), "its file is removed");
    }
    // Both actions name their nodes alike.
    let named = |disk: &str, file: &str| {
        let path = scratch.path(file);
        let data = json!({ "device": disk, "snapshot-file": text(&path), "snapshot-node-name": "twice" });
        json!({ "type": "blockdev-snapshot-sync", "data": data })
    };
    let actions = json!([named("a", "a.twice.qcow2"), named("b", "b.twice.qcow2")]);
    let (_, error) = qmp.command_error("transaction", json!({ "actions": actions }));
    assert_contains(&error, &["twice"]);
    assert!(chain(&scratch, "a").is_empty() && !scratch.path("a.twice.qcow2").exists());
    // The node is a disk of its own again.
    qmp.command("transaction", json!({ "actions": snapshots }));
    assert_eq!(chain(&scratch, "a"), ["sn1.qcow2", "a.raw"]);
    assert_eq!(chain(&scratch, "b"), ["b.new.qcow2", "b.qcow2"]);
    weir.nbdsh("b", "h.pwrite(b'new!', 0); h.flush()");
    weir.stop();
    check(&created);
}
