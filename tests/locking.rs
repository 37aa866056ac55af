//! Image locks, shared with QEMU: which processes may open an image, and the errors of rejected
//! ones.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
};

use crate::harness::{
    MIB, Scratch, Serve, TestClient, assert_contains, need, qemu_img, qemu_io, text, weir, weir_image,
};

/// A qemu-io with an open image; dropping it closes the image.
struct OpenQemuIo {
    child: Child,
    input: ChildStdin,
}

impl OpenQemuIo {
    #[track_caller]
    fn open(options: &[&str], image: &Path) -> Self {
        need("qemu-io");
        let mut child = Command::new("qemu-io")
            .args(options)
            .arg(image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .expect("qemu-io was found");
        let mut input = child.stdin.take().expect("standard input is piped");
        writeln!(input, "length").expect("qemu-io reads its commands");
        let output = BufReader::new(child.stdout.take().expect("standard output is piped"));
        // `length` prints once the image is open.
        let answered = output.lines().map_while(Result::ok).any(|line| line.contains("MiB"));
        assert!(answered, "qemu-io could not open the image");
        Self { child, input }
    }
}

impl Drop for OpenQemuIo {
    fn drop(&mut self) {
        let _ = writeln!(self.input, "quit");
        let _ = self.child.wait();
    }
}

#[test]
fn qemu_refuses_an_image_that_is_served_and_names_the_lock() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let _weir = Serve::new(&scratch).arg(&image).start();
    let copy = scratch.path("copy.raw");
    let reads = qemu_img(["convert", "-f", "raw", "-O", "raw", text(&image), text(&copy)]);
    assert_contains(
        &reads.fails(),
        &["Failed to get shared \"write\" lock", "Is another process using the image"],
    );
    let writes = TestClient::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k", text(&image)]);
    assert_contains(&writes.fails(), &["Failed to get \"write\" lock"]);
}

#[test]
fn qemu_img_info_needs_force_share_for_a_served_image() {
    let scratch = Scratch::new();
    // `qemu-img info` of a raw image reads no data and takes no lock, hence qcow2.
    let image = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "1M"]).succeeds();
    let _weir = Serve::new(&scratch).arg(&image).args(["--format", "raw"]).start();
    let info = |more: &[&str]| qemu_img(["info"]).args(more).arg(&image);
    assert_contains(
        &info(&[]).fails(),
        &["Failed to get shared \"write\" lock", "Is another process using the image"],
    );
    assert_contains(&info(&["-U"]).succeeds(), &["virtual size: 1 MiB"]);
}

#[test]
fn qemu_may_read_an_image_that_is_served_read_only() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let _weir = Serve::new(&scratch).arg(&image).arg("--read-only").start();
    qemu_io(["-r", "-f", "raw"], ["read 0 4k"], &image);
    let stderr = TestClient::new("qemu-io").args(["-f", "raw", "-c", "write 0 4k", text(&image)]).fails();
    assert_contains(&stderr, &["Failed to get \"write\" lock"]);
}

#[test]
fn lock_ends_with_the_daemon() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    Serve::new(&scratch).arg(&image).start().stop();
    qemu_io(["-f", "raw"], ["write 0 4k"], &image);
    for _ in 0..3 {
        Serve::new(&scratch).arg(&image).start().crash();
    }
    Serve::new(&scratch).arg(&image).start().stop();
}

#[test]
fn image_written_by_qemu_is_rejected_by_name() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let qemu = OpenQemuIo::open(&["-f", "raw"], &image);
    let pid = qemu.child.id().to_string();
    let stderr = Serve::new(&scratch).arg(&image).fails();
    assert_contains(
        &stderr,
        &["disk.raw: locked for writing by another process", &pid, "qemu-io", "--force-share"],
    );
    let stderr = Serve::new(&scratch).arg(&image).arg("--read-only").fails();
    assert_contains(&stderr, &["locked for writing by another process"]);
    // `--check` checks locks as well.
    let socket = format!("unix:{}", text(&scratch.path("another")));
    let check = || weir(&["serve", "--check", text(&image), "--nbd", &socket]);
    assert_contains(&check().fails(), &["disk.raw: locked for writing by another process", &pid]);
    drop(qemu);
    let weir = Serve::new(&scratch).arg(&image).start();
    let holder = format!("(pid {}, weir)", weir.pid());
    assert_contains(&check().fails(), &["disk.raw: locked for writing by another process", &holder]);
    weir.stop();
    check().succeeds();
}

#[test]
fn snapshot_of_an_image_in_use_is_rejected_with_a_remedy() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").succeeds();
    let weir = Serve::new(&scratch).arg(&image).args(["--format", "qcow2"]).start();
    for (option, advice) in [("-c", "`weir image convert` from an NBD export"), ("-d", "stop it first")] {
        let stderr = weir_image(&["snapshot", option, "one", text(&image)]).fails();
        assert_contains(&stderr, &["locked for writing", advice]);
        assert!(!stderr.contains("force-share"), "{stderr}");
    }
    weir.stop();
}

#[test]
fn change_of_an_image_in_use_is_rejected_with_a_remedy() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").succeeds();
    let control = format!("unix:{}", text(&scratch.socket("control")));
    let weir = Serve::new(&scratch).arg(&image).args(["--format", "qcow2", "--qmp", &control]).start();
    let add = || weir_image(&["bitmap", "--add", text(&image), "monday"]);
    let rebase = || weir_image(&["rebase", "-u", "-f", "qcow2", "-b", "", text(&image)]);
    for refused in [add(), rebase()] {
        let remedy = "weir) (stop it first, or take the disk from it with `weir disk remove`)";
        assert_contains(&refused.fails(), &["locked for writing by another process", remedy]);
    }
    crate::harness::weir(&["disk", "remove", "disk", "--qmp", &control]).succeeds();
    add().succeeds();
    weir.stop();
    let _qemu = OpenQemuIo::open(&["-f", "qcow2"], &image);
    assert_contains(&add().fails(), &["locked for writing by another process", "qemu-io) (stop it first)"]);
}

#[test]
fn force_share_reads_an_image_that_qemu_writes() {
    let scratch = Scratch::new();
    let image = scratch.filled("disk.raw", MIB);
    let _qemu = OpenQemuIo::open(&["-f", "raw"], &image);
    let weir = Serve::new(&scratch).arg(&image).args(["--read-only", "--force-share"]).start();
    weir.nbdsh("disk", "assert h.is_read_only()\nassert len(set(h.pread(4096, 0))) > 1");
}

#[test]
fn served_image_is_resized_by_its_daemon() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "1M"]).succeeds();
    let directory = image.parent().expect("the path has a parent");
    let control = scratch.socket("control");
    let address = format!("unix:{}", text(&control));
    let weir = Serve::new(&scratch)
        .wrapped_by(["env", "-C", text(directory)])
        // A path relative to the daemon's working directory.
        .args(["disk.qcow2", "-f", "qcow2", "--name", "vm1", "--qmp", &address])
        .start();
    let size = || TestClient::new("nbdinfo").args(["--size", &weir.uri("vm1")]).succeeds();
    let resize =
        |options: &[&str]| weir_image(&["resize"]).args(options).arg(&image).env("WEIR_QMP", &address);
    let stdout = resize(&[]).arg("+1M").succeeds();
    assert_contains(&stdout, &[&format!("by the daemon at {address}, which serves it as vm1")]);
    assert_eq!(size().trim(), (2 * MIB).to_string());
    let refused = resize(&[]).arg("1M").run();
    assert_eq!(refused.code(), 2);
    assert_contains(&refused.stderr(), &["loses the data beyond it", "--shrink"]);
    assert_eq!(resize(&["--shrink", "--quiet"]).arg("1536K").succeeds(), "");
    assert_eq!(size().trim(), (3 * MIB / 2).to_string());
    for (options, why) in [
        (&["-f", "raw"][..], "serves it as qcow2, not as raw"),
        (&["--preallocation", "falloc"], "cannot preallocate"),
    ] {
        let refused = resize(options).arg("+1M").run();
        assert_eq!(refused.code(), 2);
        assert_contains(&refused.stderr(), &[why]);
    }
    // The daemon that is asked does not serve the image; another one does.
    let elsewhere = resize(&[]).arg("+1M").env("WEIR_QMP", format!("unix:{}", text(&scratch.path("none"))));
    assert_contains(&elsewhere.fails(), &["disk.qcow2: locked for writing", "WEIR_QMP", "`block_resize`"]);
    assert_eq!(size().trim(), (3 * MIB / 2).to_string());
    weir.stop();
    assert_contains(&weir_image(&["info", text(&image)]).succeeds(), &["1572864"]);
}

#[test]
fn image_read_by_qemu_is_not_written() {
    let scratch = Scratch::new();
    // A read-only raw image does not forbid other writers in QEMU, hence qcow2.
    let image = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "1M"]).succeeds();
    let _qemu = OpenQemuIo::open(&["-r", "-f", "qcow2"], &image);
    let serve = || Serve::new(&scratch).arg(&image).args(["--format", "raw"]);
    assert_contains(
        &serve().fails(),
        &["disk.qcow2: another process has locked it against writing", "qemu-io"],
    );
    serve().arg("--read-only").start().stop();
}

#[test]
fn two_daemons_share_an_image_only_for_reading() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let image = scratch.sparse("disk.raw", MIB);
    let writer = Serve::new(&scratch).arg(&image).start();
    let stderr = Serve::new(&other).arg(&image).fails();
    assert_contains(
        &stderr,
        &["disk.raw: locked for writing by another process", &writer.pid().to_string(), "weir"],
    );
    let stderr = weir_image(&["resize", "-f", "raw", text(&image), "2M"]).fails();
    assert_contains(&stderr, &["disk.raw: locked for writing by another process", "`block_resize`"]);
    writer.stop();
    let first = Serve::new(&scratch).arg(&image).arg("--read-only").start();
    let second = Serve::new(&other).arg(&image).arg("--read-only").start();
    for weir in [&first, &second] {
        TestClient::new("nbdinfo").args(["--size", &weir.uri("disk")]).succeeds();
    }
}

#[test]
fn force_share_is_read_only() {
    let stderr = Serve::sparse(MIB).arg("--force-share").rejects_usage();
    assert_contains(&stderr, &["--force-share", "read-only"]);
}

/// The message names no process, because no other one is involved.
#[test]
fn lock_of_the_same_process_is_not_reported_as_a_foreign_one() {
    let scratch = Scratch::new();
    let (first, second) = (scratch.path("one.qcow2"), scratch.path("two.qcow2"));
    for (image, below) in [(&second, &first), (&first, &second)] {
        qemu_img(["create", "-q", "-f", "qcow2", "-u", "-F", "qcow2", "-b", text(below)])
            .args([text(image), "1M"])
            .succeeds();
    }
    let raw = scratch.sparse("disk.raw", MIB);
    let link = scratch.path("link.raw");
    fs::hard_link(&raw, &link).unwrap();
    let over = scratch.path("over.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&raw), text(&over)]).succeeds();
    for (arguments, expected) in [
        (vec!["commit", "-f", "qcow2", text(&first)], "which is a loop"),
        (vec!["commit", "-f", "qcow2", "-b", text(&first), text(&first)], "which is a loop"),
        (vec!["convert", "-f", "raw", text(&raw), text(&link)], "is both source and target"),
        (vec!["convert", "-f", "qcow2", text(&over), text(&raw)], "under another name"),
        (vec!["convert", "-f", "qcow2", "-n", text(&over), text(&link)], "under another name"),
        (vec!["create", "-f", "qcow2", "-F", "raw", "-b", text(&raw), text(&link)], "its own backing file"),
    ] {
        let stderr = weir_image(&arguments).fails();
        assert!(stderr.contains(expected) && !stderr.contains("another process"), "{arguments:?}: {stderr}");
    }
}
