//! `weir mirror` and `weir job complete`: disks that move to another image while clients write,
//! compared by QEMU.

use std::{fs, path::Path, thread};

use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, Weir, assert_contains,
    operator::{run_failing, run_json, run_ok, socket, status},
    poll_until, qemu_img, qemu_io, text,
};

const SIZE: u64 = 32 * MIB;

/// A daemon with the disk `vm1` and further arguments.
fn serve(scratch: &Scratch, image: &Path, format: &str, more: &[&str]) -> Weir {
    let arguments = ["--name", "vm1", "--format", format, "--qmp", &socket(scratch)];
    Serve::new(scratch).arg(image).args(arguments).args(more).start()
}

fn compare(format: &str, image: &Path, expected_format: &str, expected: &Path) {
    let formats = ["compare", "-q", "-f", format, "-F", expected_format];
    qemu_img(formats.into_iter().chain([text(image), text(expected)])).succeeds();
}

/// Writes, zeroes and discards, and reads everything back: all of it is the client's own.
const LOAD: &str = "
import random
random.seed(7)
expected = bytearray(h.pread(32 << 20, 0))
def change(count):
    for number in range(count):
        at, length = random.randrange(0, 8000) * 4096, 4096 * random.randrange(1, 17)
        if random.randrange(4) == 0:
            h.zero(length, at)
            expected[at:at + length] = bytes(length)
        else:
            h.pwrite(bytes([number % 255 + 1]) * length, at)
            expected[at:at + length] = bytes([number % 255 + 1]) * length
        if number % 10 == 0:
            h.flush()
            assert h.pread(length, at) == expected[at:at + length]
";

#[test]
fn disk_moves_while_a_client_writes() {
    for (format, name, other) in [("raw", "new.qcow2", "qcow2"), ("qcow2", "new.raw", "raw")] {
        let scratch = Scratch::new();
        let content = scratch.filled("content.raw", SIZE);
        let image = scratch.path("image");
        qemu_img(["convert", "-O", format, text(&content), text(&image)]).succeeds();
        let weir = serve(&scratch, &image, format, &[]);
        let (target, copy) = (scratch.path(name), scratch.path("copy.raw"));
        let script = format!(
            "{LOAD}\nchange(3000)\nh.flush()\nassert h.pread(32 << 20, 0) == expected\n\
             open({:?}, 'wb').write(expected)\n",
            text(&copy)
        );
        thread::scope(|scope| {
            let client = scope.spawn(|| weir.nbdsh("vm1", &script));
            let printed = run_ok(&scratch, &["mirror", "vm1", "--to", text(&target)]);
            assert_contains(&printed, &["new.", " follows it; `weir job complete mirror-vm1`"]);
            let refused = run_failing(&scratch, &["job", "pause", "mirror-vm1"]);
            assert_contains(&refused, &["the job is ready and cannot be paused"]);
            let moved = run_ok(&scratch, &["job", "complete", "mirror-vm1"]);
            assert_contains(&moved, &["vm1: the disk continues on ", name]);
            client.join().expect("all data is read as written");
        });
        assert_eq!(run_ok(&scratch, &["jobs"]), "no jobs\n");
        let disk = &status(&scratch, "0")["disks"][0];
        assert_eq!((&disk["path"], &disk["format"]), (&text(&target).into(), &other.into()), "{disk}");
        // The previous image is free, and has the content of the switch.
        qemu_io(["-f", format], ["read 0 4096"], &image);
        let log = weir.stop();
        assert_contains(&log, &["a mirror has started", "a mirror is complete"]);
        compare(other, &target, "raw", &copy);
        if other == "qcow2" {
            qemu_img(["check", "-q", text(&target)]).succeeds();
        }
    }
}

#[test]
fn cancelled_mirror_leaves_the_disk_where_it_is() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", SIZE);
    let weir = serve(&scratch, &image, "raw", &[]);
    let target = scratch.path("b.raw");
    let started =
        run_ok(&scratch, &["mirror", "vm1", "--to", text(&target), "--bps-total", "64K", "--detach"]);
    assert_eq!(started, "mirror-vm1: started\n");
    let refused = run_failing(&scratch, &["job", "complete", "mirror-vm1"]);
    assert_contains(&refused, &["job mirror-vm1: it is running and cannot be completed"]);
    let refused = run_failing(&scratch, &["disk", "remove", "vm1"]);
    assert_contains(&refused, &["the job mirror-vm1 uses it"]);
    run_ok(&scratch, &["job", "cancel", "mirror-vm1"]);
    poll_until(|| (run_json(&scratch, &["jobs", "--json"])[0]["state"] == "concluded").then_some(()));
    assert_eq!(status(&scratch, "0")["disks"][0]["path"], text(&image));
    let refused = run_failing(&scratch, &["mirror", "vm1", "--to", text(&image)]);
    assert_contains(&refused, &["exists already"]);
    let small = Scratch::new();
    let server = Serve::new(&small).args(["memory:1M", "--name", "small"]).start();
    weir.stop();
    let weir = serve(&scratch, &image, "raw", &["--sandbox", "off"]);
    let refused = run_failing(&scratch, &["mirror", "vm1", "--to", &server.uri("small")]);
    assert_contains(&refused, &["the target has 1048576 bytes", "use a target of the same size"]);
    weir.stop();
    server.stop();
}

#[test]
fn moved_disk_of_a_config_file_is_saved_and_starts_from_its_target() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", MIB);
    let config = scratch.path("weir.toml");
    fs::write(&config, "# My disks.\n[disk.vm1]\nimage = \"a.raw\" # first\nformat = \"raw\"\n")
        .expect("written");
    let start = || {
        let nbd = ["--qmp", &socket(&scratch)];
        Serve::new(&scratch).args(["--config", text(&config)]).args(nbd).start()
    };
    let weir = start();
    let target = scratch.path("b.qcow2");
    run_ok(&scratch, &["mirror", "vm1", "--to", text(&target)]);
    let refused = run_failing(&scratch, &["job", "complete", "mirror-vm1"]);
    assert_contains(&refused, &["the next start would open a.raw", "--save"]);
    run_ok(&scratch, &["job", "complete", "mirror-vm1", "--save"]);
    let saved = fs::read_to_string(&config).expect("readable");
    assert_eq!(saved, "# My disks.\n[disk.vm1]\nimage = \"b.qcow2\" # first\nformat = \"qcow2\"\n");
    run_ok(&scratch, &["reload"]);
    weir.stop();
    let weir = start();
    assert_eq!(status(&scratch, "0")["disks"][0]["format"], "qcow2");
    weir.stop();
    compare("qcow2", &target, "raw", &image);
}

#[test]
fn qmp_completes_a_mirror_or_ends_it_with_a_copy_of_the_instant() {
    let scratch = Scratch::new();
    let image = scratch.filled("a.raw", MIB);
    let weir = serve(&scratch, &image, "raw", &["--image-root", text(&scratch.path(""))]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    for (command, event, moved) in [
        ("block-job-cancel", "BLOCK_JOB_COMPLETED", false),
        ("block-job-complete", "BLOCK_JOB_COMPLETED", true),
    ] {
        let target = scratch.sparse(if moved { "c.raw" } else { "b.raw" }, MIB);
        let arguments = json!({ "name": "vm1", "target": text(&target), "format": "raw", "id": "m" });
        qmp.command("x-weir-mirror", arguments);
        let ready = qmp.event("BLOCK_JOB_READY");
        assert_eq!((&ready["type"], &ready["device"]), (&"mirror".into(), &"m".into()));
        qmp.command(command, json!({ "device": "m" }));
        let ended = qmp.event(event);
        assert_eq!(ended["error"], Value::Null);
        poll_until(|| (run_json(&scratch, &["jobs", "--json"])[0]["state"] == "concluded").then_some(()));
        compare("raw", &target, "raw", &image);
        let expected = if moved { &target } else { &image };
        poll_until(|| (status(&scratch, "0")["disks"][0]["path"] == text(expected)).then_some(()));
        qmp.command("job-dismiss", json!({ "id": "m" }));
    }
    weir.stop();
}
