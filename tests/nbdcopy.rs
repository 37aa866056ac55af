//! nbdcopy: many requests in flight, several connections, and holes that stay holes.

use std::{fs, os::unix::fs::MetadataExt as _};

use crate::harness::{MIB, Scratch, Serve, TestClient, pattern};

#[test]
fn image_survives_a_round_trip() {
    let scratch = Scratch::new();
    let original = scratch.filled("original", 24 * MIB + 4321);
    let weir = Serve::new(&scratch)
        .arg(scratch.sparse("disk.raw", 24 * MIB + 4321))
        .args(["--cache", "none"])
        .start();
    let copied_back = scratch.path("back");
    let copy = |connections: &str, from: &str, to: &str| {
        TestClient::new("nbdcopy").args(["--connections", connections, "--flush", from, to]).succeeds();
    };
    copy("4", original.to_str().unwrap(), &weir.uri("disk"));
    copy("2", &weir.uri("disk"), copied_back.to_str().unwrap());
    assert_eq!(fs::read(&copied_back).unwrap(), fs::read(&original).unwrap());
    weir.stop();
    assert_eq!(fs::read(scratch.path("disk.raw")).unwrap(), fs::read(&original).unwrap());
}

#[test]
fn holes_stay_holes() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch)
        .args([scratch.sparse("from.raw", 64 * MIB), scratch.filled("to.raw", 64 * MIB)])
        .start();
    TestClient::new("nbdsh")
        .arg("-c")
        .arg(format!("h.connect_uri({:?}); h.pwrite(b'weir' * 16384, 32 << 20); h.flush()", weir.uri("from")))
        .succeeds();
    TestClient::new("nbdcopy").args(["--flush", &weir.uri("from"), &weir.uri("to")]).succeeds();
    let (from, to) = (scratch.path("from.raw"), scratch.path("to.raw"));
    weir.stop();
    assert!(fs::read(from).unwrap() == fs::read(&to).unwrap(), "the copy differs");
    let allocated = fs::metadata(to).unwrap().blocks() * 512;
    assert!(allocated <= 2 * MIB, "64 KiB of data take {allocated} bytes: the holes were written");
}

#[test]
fn file_survives_a_copy_to_memory_and_back() {
    let scratch = Scratch::new();
    let original = scratch.filled("original", 16 * MIB);
    let weir = Serve::new(&scratch).arg("memory:16M").start();
    let uri = weir.uri("memory");
    TestClient::new("nbdcopy").args(["--requests", "128", original.to_str().unwrap(), &uri]).succeeds();
    let copied_back = scratch.path("back");
    TestClient::new("nbdcopy")
        .args(["--request-size", "4096", &uri, copied_back.to_str().unwrap()])
        .succeeds();
    assert!(fs::read(copied_back).unwrap() == pattern(16 << 20), "the copy differs");
}
