//! Attachments whose server ends cleanly or is upgraded.

use std::fs;

use nix::sys::signal::{Signal, kill};

use super::{Attachment, attach, is_mounted, mountable, name};
use crate::harness::{MIB, Scratch, Serve, TestClient, assert_contains, need_root, text, weir};

/// More data than the kernel writes back at once; nothing has flushed it.
fn content() -> Vec<u8> {
    vec![7; 3 << 20]
}

#[test]
fn writes_survive_a_clean_end_of_the_server() {
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let options = ["--mount", text(&directory)];
    let attached = attach("ended-alone", &image, &options);
    fs::write(directory.join("file"), content()).expect("there is room");
    kill(attached.server(), Signal::SIGTERM).expect("the process is running");
    attached.wait_until_gone();
    assert!(!is_mounted(&directory));
    let reattached = attach("ended-alone", &image, &options);
    assert_eq!(fs::read(directory.join("file")).expect("the file exists"), content());
    reattached.detach().succeeds();
    TestClient::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}

#[test]
fn attachment_survives_an_upgrade_of_the_daemon() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let base = scratch.sparse("base.raw", MIB);
    let address = format!("unix:{}", text(&scratch.socket("qmp")));
    let serve = || Serve::new(&scratch).arg(&base).args(["--qmp", &address, "--sandbox", "off"]);
    let mut daemon = serve().start();
    let name = name("taken-over");
    let options = ["attach", "--fuse", "--json", "--format", "raw", "--mount", text(&directory)];
    let said = weir(&options).args(["--name", &name, "--qmp", &address]).arg(&image).json();
    let attached = Attachment { report: said, name };
    for round in ["first", "second"] {
        fs::write(directory.join(round), content()).expect("there is room");
        let next = serve().arg("--takeover").start();
        let (status, log) = daemon.wait();
        assert!(status.success(), "{log}");
        daemon = next;
        fs::write(directory.join("after"), content()).expect("it is still mounted");
        assert_eq!(fs::read(directory.join(round)).expect("the file exists"), content());
    }
    let listed = weir(&["attach", "--list"]).succeeds();
    assert_contains(&listed, &[&attached.name, text(&directory)]);
    // Detaches by the image: after the upgrades the attachment must still have the identity of the
    // image, and its keeper must watch the new process.
    weir(&["detach", text(&image)]).succeeds();
    attached.assert_removed();
    daemon.stop();
    TestClient::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}

#[test]
fn replaced_image_file_is_not_served() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let address = format!("unix:{}", text(&scratch.socket("qmp")));
    let served = ["-f", "raw", "--fuse", text(&image), "--qmp", &address, "--sandbox", "off"];
    let daemon = Serve::new(&scratch).arg(&image).args(served).start();
    weir(&["detach", text(&image), "--qmp", &address]).succeeds();
    daemon.stop();
}

#[test]
fn detach_of_an_unknown_device_fails() {
    for other in ["/dev/null", "/nowhere", &name("nothing")] {
        assert_contains(&weir(&["detach", other]).fails(), &["not attached"]);
    }
    let missing = ["attach", "--list", "--qmp", "unix:/nowhere/qmp"];
    assert_contains(&weir(&missing).fails(), &["no daemon listens"]);
}
