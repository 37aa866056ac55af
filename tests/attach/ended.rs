//! A server of what is attached that ends in order, or that another takes over from.

use std::fs;

use nix::sys::signal::{Signal, kill};

use super::{Attached, attach, is_mounted, mountable, name};
use crate::harness::{Client, MIB, Scratch, Serve, assert_says, need_root, text, weir};

/// More than the kernel writes by itself within a moment, and nobody has flushed it.
fn content() -> Vec<u8> {
    vec![7; 3 << 20]
}

#[test]
fn what_was_written_before_its_server_ended_in_order_is_there() {
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let options = ["--mount", text(&directory)];
    let attached = attach("ended-alone", &image, &options);
    fs::write(directory.join("file"), content()).expect("there is room");
    kill(attached.server(), Signal::SIGTERM).expect("it runs");
    attached.wait_until_gone();
    assert!(!is_mounted(&directory));
    let again = attach("ended-alone", &image, &options);
    assert_eq!(fs::read(directory.join("file")).expect("it is there"), content());
    again.detach().succeeds();
    Client::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}

#[test]
fn a_daemon_that_is_taken_over_keeps_what_is_attached() {
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
    let attached = Attached { said, name };
    for turn in ["first", "second"] {
        fs::write(directory.join(turn), content()).expect("there is room");
        let next = serve().arg("--takeover").start();
        let (status, log) = daemon.wait();
        assert!(status.success(), "{log}");
        daemon = next;
        fs::write(directory.join("after"), content()).expect("it is still mounted");
        assert_eq!(fs::read(directory.join(turn)).expect("it is there"), content());
    }
    let listed = weir(&["attach", "--list"]).succeeds();
    assert_says(&listed, &[&attached.name, text(&directory)]);
    // By its image, as nobody else has it; its keeper has not lost sight of it.
    weir(&["detach", text(&image)]).succeeds();
    attached.is_gone();
    daemon.stop();
    Client::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}

#[test]
fn a_file_in_place_of_its_own_image_is_not_used_by_its_server() {
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
fn what_is_not_attached_is_nobodys_to_detach() {
    for other in ["/dev/null", "/nowhere", &name("nothing")] {
        assert_says(&weir(&["detach", other]).fails(), &["not attached"]);
    }
    let missing = ["attach", "--list", "--qmp", "unix:/nowhere/qmp"];
    assert_says(&weir(&missing).fails(), &["no daemon listens"]);
}
