//! `weir probe`: leaves no files behind, and never writes to a device in use. Needs root.

use std::fs;

use serde_json::Value;

use crate::harness::{LoopDevice, MIB, Scratch, TestClient, assert_contains, text, weir};

/// A short probe with a state directory of the test.
fn probe(scratch: &Scratch) -> TestClient {
    let state = scratch.path("state");
    weir(&["probe", "--seconds", "1", "--accept", "--state", text(&state)])
}

#[test]
fn directory_is_measured_and_left_unchanged() {
    let scratch = Scratch::new();
    let directory = scratch.path("images");
    fs::create_dir(&directory).unwrap();
    let report = probe(&scratch).args(["--size", "16M", "--json", text(&directory)]).json();
    let loads = report["loads"].as_array().unwrap();
    let name = |load: &Value| ["pattern", "direction", "block-bytes"].map(|key| load[key].to_string());
    let mut names: Vec<_> = loads.iter().map(name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), 8, "{names:?}");
    assert!(loads.iter().all(|load| load["iops"].is_u64() && load["spread"].is_number()), "{report:#}");
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "nothing is left");
    if let Some(record_path) = report["kept"].as_str() {
        let record: Value = serde_json::from_str(&fs::read_to_string(record_path).unwrap()).unwrap();
        assert_eq!(record["capacity"], report["capacity"]);
        assert_eq!(record["key"], report["device"]["key"]);
    }
}

#[test]
fn device_is_written_only_on_request() {
    let scratch = Scratch::new();
    let file = scratch.filled("device", 16 * MIB);
    let before = fs::read(&file).unwrap();
    let device = LoopDevice::attach(&file, 512);
    let printed = probe(&scratch).arg(device.path()).succeeds();
    assert_contains(&printed, &["random read", "not measured: writes: they would destroy", "saved in "]);
    assert!(!printed.contains("random write"), "{printed}");
    assert!(fs::read(&file).unwrap() == before, "reading changes nothing");
    let printed = probe(&scratch).arg("--write").arg(device.path()).succeeds();
    assert_contains(&printed, &["sequential write"]);
    drop(device);
    assert!(fs::read(&file).unwrap() != before, "the device was not written");
}

#[test]
fn device_in_use_is_not_written() {
    let scratch = Scratch::new();
    let file = scratch.sparse("device", 16 * MIB);
    let below = LoopDevice::attach(&file, 512);
    // A signature of swap space is recognized.
    let mut start = vec![0; 4096];
    start[4086..].copy_from_slice(b"SWAPSPACE2");
    fs::write(below.path(), &start).unwrap();
    let refused = probe(&scratch).arg("--write").arg(below.path()).fails();
    assert_contains(
        &refused,
        &["has the signature of swap space, which writing would destroy", "(add --force"],
    );
    let forced = probe(&scratch).args(["--write", "--force"]).arg(below.path()).succeeds();
    assert_contains(&forced, &["random write"]);
}

#[test]
fn usage_errors_have_status_2() {
    let scratch = Scratch::new();
    assert_eq!(probe(&scratch).args(["--force", "/"]).run().code(), 2);
    assert_eq!(probe(&scratch).args(["--write", "--read-only", "/"]).run().code(), 2);
    let file = scratch.filled("a.raw", MIB);
    let refused = probe(&scratch).arg(&file).fails();
    assert_contains(&refused, &["weir: ", "is neither a directory nor a block device"]);
}
