//! An upgrade is rejected if a disk of the same name has a different image; the daemon continues.

use std::fs;

use super::{UpgradedDaemon, control};
use crate::harness::{MIB, Scratch, Serve, qemu_img, text};

#[test]
fn different_disk_is_rejected_by_name() {
    let scratch = Scratch::new();
    let (a, b) = (scratch.filled("a.raw", MIB), scratch.sparse("b.raw", MIB));
    let (q, over) = (scratch.path("q.qcow2"), scratch.path("over.qcow2"));
    qemu_img(["create", "-q", "-f", "qcow2"]).arg(&q).arg("1M").succeeds();
    qemu_img(["snapshot", "-c", "s1"]).arg(&q).succeeds();
    qemu_img(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&b).arg(&over).succeeds();
    let (a, b, q, over) = (text(&a), text(&b), text(&q), text(&over));
    let mut scratch = Some(scratch);
    let mut refused = |old: &[&str], new: &[&str], why: &str| {
        let fixture = UpgradedDaemon::new(
            scratch.take().expect("the previous case has returned the scratch directory"),
            old,
        );
        let daemon = fixture.serve().args(["--name", "disk"]).start();
        let new_process = Serve::new(&fixture.scratch).args(new).args(["--name", "disk", "--takeover"]);
        let stderr = new_process.env("WEIR_QMP", control(&fixture)).fails();
        assert!(
            stderr.contains(&format!("disk disk: the running daemon serves it {why}")),
            "{old:?}, {new:?}: {stderr}"
        );
        daemon.nbdsh("disk", "h.pread(512, 0)\n");
        daemon.wait_for_log("the upgrade failed, this process continues");
        daemon.stop();
        scratch = Some(fixture.scratch);
    };
    refused(&[a], &[b], &format!("with another image: {a}, not {b}"));
    refused(&[a], &[q], &format!("with another image: {a}, not {q}"));
    refused(&[a, "--read-only"], &[b, "--read-only"], "with another image: ");
    refused(&[q], &[q, "-f", "raw"], "with its image in the format qcow2, not raw");
    refused(&[a], &[a, "-o", "offset=512"], "with another part of its image");
    refused(&[a], &[a, "-o", "size=4K"], "with another part of its image");
    refused(&[a], &[a, "--cache", "unsafe"], "in the cache mode writeback, not unsafe");
    refused(&[a, "--cache", "writethrough"], &[a], "in the cache mode writethrough, not writeback");
    refused(&[q, "--read-only"], &[q, "--read-only", "--snapshot", "s1"], "with another internal snapshot");
    refused(&["null:1M"], &["null:2M"], "with another image: null");
    // The backing file was renamed meanwhile.
    let fixture = UpgradedDaemon::new(
        scratch.take().expect("the last case has returned the scratch directory"),
        &[over, "-f", "qcow2"],
    );
    let daemon = fixture.serve().start();
    fs::rename(a, b).unwrap();
    let stderr = fixture.new_process().fails();
    let expect =
        format!("disk over: the running daemon serves it with another backing file: {b} was replaced since");
    assert!(stderr.contains(&expect), "{stderr}");
    daemon.nbdsh("over", "assert h.pread(512, 0) == bytes(512)\n");
    daemon.stop();
}

#[test]
fn permitted_differences_and_other_paths_of_a_file() {
    let scratch = Scratch::new();
    let (disk, other) = (scratch.sparse("disk.raw", MIB), scratch.path("other.raw"));
    fs::hard_link(&disk, &other).unwrap();
    let fixture = UpgradedDaemon::new(scratch, &[text(&disk)]);
    let first = fixture.serve().start();
    // Another process has extended the image.
    fs::File::options().write(true).open(&disk).unwrap().set_len(2 * MIB).unwrap();
    let differing = ["--name", "disk", "--iops-total", "1000", "--prefetch", "on", "--delay", "read=1us"];
    let new_process = Serve::new(&fixture.scratch).arg(text(&other)).args(differing).arg("--takeover");
    let second = new_process.env("WEIR_QMP", control(&fixture)).start();
    assert!(first.wait().0.success());
    second.nbdsh("disk", "assert h.get_size() == 2 << 20\n");
    second.stop();
}
