//! `weir bitmap` and QMP's commands for dirty bitmaps: bitmaps of a disk that clients use, as QEMU
//! reads them afterwards.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::{
    harness::{
        self, MIB, Qmp, Scratch, Serve, Weir, assert_contains,
        operator::{run_failing, run_json, run_misused, run_ok, socket},
        qemu_img, text,
    },
    qcow2_bitmaps::map_of,
};

const SIZE: u64 = 8 * MIB;
const GRANULE: u64 = 64 << 10;

fn image(scratch: &Scratch) -> PathBuf {
    let path = scratch.path("a.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&path), &SIZE.to_string()]).succeeds();
    path
}

fn serve(scratch: &Scratch, image: &Path, more: &[&str]) -> Weir {
    let arguments = ["--name", "vm1", "--qmp", &socket(scratch)];
    Serve::new(scratch).arg(image).args(arguments).args(more).start()
}

/// Writes a granule of the disk.
fn write(weir: &Weir, granule: u64) {
    let command = format!("write -P 7 {} {GRANULE}", granule * GRANULE);
    harness::qemu_io(["-f", "raw"], [command], weir.uri("vm1"));
}

fn bitmap(scratch: &Scratch, arguments: &[&str]) -> String {
    run_ok(scratch, &[&["bitmap", "vm1"], arguments].concat())
}

/// A bitmap of the list.
fn listed(scratch: &Scratch, name: &str) -> Value {
    let list = run_json(scratch, &["bitmap", "vm1", "list", "--json"]);
    let found = list.as_array().expect("a list").iter().find(|bitmap| bitmap["name"] == name);
    found.cloned().unwrap_or_else(|| panic!("{name} is not in {list}"))
}

/// Numbers of the granules that QEMU reads as marked.
fn marked(path: &Path, name: &str) -> Vec<u64> {
    let map = map_of(name, &["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, text(path), "]"]);
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let dirty = map.as_array().expect("a list").iter().filter(|extent| extent["type"] == 1);
    let numbers = dirty.flat_map(|extent| {
        let (offset, length) = (extent["offset"].as_u64().unwrap(), extent["length"].as_u64().unwrap());
        offset / GRANULE..(offset + length) / GRANULE
    });
    numbers.collect()
}

#[test]
fn bitmaps_change_while_the_disk_is_used() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    assert_eq!(bitmap(&scratch, &["list"]), "vm1: no bitmaps\n");
    assert_eq!(bitmap(&scratch, &["add", "a"]), "vm1: a: added\n");
    bitmap(&scratch, &["add", "b", "--granularity", "4K"]);
    bitmap(&scratch, &["add", "c", "--disabled"]);
    write(&weir, 3);
    assert_eq!(listed(&scratch, "a")["count"], GRANULE);
    assert_eq!(listed(&scratch, "c")["count"], 0);
    bitmap(&scratch, &["disable", "a"]);
    bitmap(&scratch, &["enable", "c"]);
    write(&weir, 5);
    assert_eq!(
        (&listed(&scratch, "a")["count"], &listed(&scratch, "c")["count"]),
        (&GRANULE.into(), &GRANULE.into())
    );
    bitmap(&scratch, &["enable", "a"]);
    bitmap(&scratch, &["clear", "b"]);
    write(&weir, 7);
    bitmap(&scratch, &["disable", "c"]);
    bitmap(&scratch, &["merge", "c", "a", "b"]);
    bitmap(&scratch, &["add", "d"]);
    bitmap(&scratch, &["remove", "d"]);
    let expected = json!({
        "name": "b", "count": GRANULE, "granularity": 4096, "recording": true, "busy": false,
        "persistent": true,
    });
    assert_eq!(listed(&scratch, "b"), expected);
    assert_contains(&bitmap(&scratch, &["list"]), &["BITMAP", "recording", "disabled"]);
    weir.stop();
    qemu_img(["check", "-q", text(&path)]).succeeds();
    assert_eq!(marked(&path, "a"), [3, 7]);
    assert_eq!(marked(&path, "b"), [7]);
    assert_eq!(marked(&path, "c"), [3, 5, 7]);
    let weir = serve(&scratch, &path, &[]);
    write(&weir, 9);
    assert_eq!(listed(&scratch, "a")["count"], 3 * GRANULE, "it records after a restart");
    weir.stop();
}

#[test]
fn transient_bitmap_ends_with_the_daemon() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    bitmap(&scratch, &["add", "t", "--transient"]);
    write(&weir, 1);
    let t = listed(&scratch, "t");
    assert_eq!((&t["count"], &t["persistent"]), (&GRANULE.into(), &false.into()));
    bitmap(&scratch, &["disable", "t"]);
    write(&weir, 2);
    assert_eq!(listed(&scratch, "t")["count"], GRANULE);
    weir.stop();
    let weir = serve(&scratch, &path, &[]);
    assert_eq!(bitmap(&scratch, &["list"]), "vm1: no bitmaps\n");
    weir.stop();
}

#[test]
fn bitmap_is_inconsistent_after_a_crash_and_can_be_removed() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    bitmap(&scratch, &["add", "a"]);
    bitmap(&scratch, &["add", "off", "--disabled"]);
    write(&weir, 3);
    weir.crash();
    let weir = serve(&scratch, &path, &[]);
    assert_eq!(listed(&scratch, "a")["inconsistent"], true);
    assert_contains(&bitmap(&scratch, &["list"]), &["inconsistent", "disabled"]);
    for action in ["clear", "enable", "disable"] {
        let refused = run_failing(&scratch, &["bitmap", "vm1", action, "a"]);
        assert_contains(
            &refused,
            &["disk vm1: the bitmap \"a\" is inconsistent", "weir bitmap vm1 remove a"],
        );
    }
    bitmap(&scratch, &["remove", "a"]);
    bitmap(&scratch, &["add", "a"]);
    weir.stop();
    let _ = qemu_img(["check", "-q", "-r", "leaks", text(&path)]).run();
    qemu_img(["check", "-q", text(&path)]).succeeds();
    assert_eq!(marked(&path, "a"), [0_u64; 0]);
}

#[test]
fn upgrade_keeps_an_added_bitmap() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    bitmap(&scratch, &["add", "a"]);
    write(&weir, 3);
    let qmp = socket(&scratch);
    let next = Serve::new(&scratch)
        .arg(&path)
        .args(["--name", "vm1", "--qmp", &qmp])
        .arg(format!("--takeover={qmp}"))
        .start();
    weir.wait();
    write(&next, 4);
    assert_eq!(listed(&scratch, "a")["count"], 2 * GRANULE);
    next.stop();
    assert_eq!(marked(&path, "a"), [3, 4]);
}

#[test]
fn growing_the_disk_marks_the_added_space() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    bitmap(&scratch, &["add", "a"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    qmp.command("block_resize", json!({ "node-name": "vm1", "size": SIZE - GRANULE }));
    qmp.command("block_resize", json!({ "node-name": "vm1", "size": SIZE }));
    assert_eq!(listed(&scratch, "a")["count"], GRANULE);
    weir.stop();
    assert_eq!(marked(&path, "a"), [SIZE / GRANULE - 1]);
}

#[test]
fn wrong_requests_change_no_bitmap() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let small = scratch.path("small.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&small), "1M"]).succeeds();
    let weir = serve(&scratch, &path, &[text(&small), "--name", "small", "memory:1M", "--name", "raw"]);
    bitmap(&scratch, &["add", "a"]);
    run_ok(&scratch, &["bitmap", "small", "add", "s"]);
    write(&weir, 3);
    let long = "n".repeat(1024);
    for (arguments, expected) in [
        (&["bitmap", "vm9", "list"][..], "no disk has this name"),
        (&["bitmap", "raw", "add", "a"], "raw, which has no bitmaps"),
        (&["bitmap", "vm1", "add", "a"], "there is a bitmap \"a\" already"),
        (&["bitmap", "vm1", "add", &long], "must have 1 to 1023"),
        (&["bitmap", "vm1", "add", ""], "must have 1 to 1023"),
        (&["bitmap", "vm1", "add", "b", "-g", "100"], "a power of two from 512"),
        (&["bitmap", "vm1", "remove", "b"], "there is no bitmap \"b\" (`weir bitmap vm1 list`"),
        (&["bitmap", "vm1", "clear", "b"], "there is no bitmap \"b\""),
        (&["bitmap", "vm1", "enable", "b"], "there is no bitmap \"b\""),
        (&["bitmap", "vm1", "disable", "b"], "there is no bitmap \"b\""),
        (&["bitmap", "vm1", "merge", "a", "b"], "there is no bitmap \"b\""),
        (&["bitmap", "vm1", "merge", "b", "a"], "there is no bitmap \"b\""),
    ] {
        assert_contains(&run_failing(&scratch, arguments), &[expected]);
    }
    run_misused(&scratch, &["bitmap", "vm1", "merge", "a"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let from_small = json!({ "node": "vm1", "target": "a", "bitmaps": [{ "node": "small", "name": "s" }] });
    for (command, arguments, expected) in [
        ("block-dirty-bitmap-add", json!({ "node": "none", "name": "x" }), "Cannot find device='none' nor"),
        ("block-dirty-bitmap-add", json!({ "node": "vm1" }), "Parameter 'name' is missing"),
        (
            "block-dirty-bitmap-merge",
            json!({ "node": "vm1", "target": "a" }),
            "Parameter 'bitmaps' is missing",
        ),
        (
            "block-dirty-bitmap-merge",
            json!({ "node": "vm1", "target": "a", "bitmaps": [7] }),
            "BlockDirtyBitmapOrStr",
        ),
        ("block-dirty-bitmap-merge", from_small, "the source covers 1048576 bytes"),
    ] {
        let (class, why) = qmp.command_error(command, arguments);
        assert_eq!(class, "GenericError");
        assert_contains(&why, &[expected]);
    }
    assert_eq!(listed(&scratch, "a")["count"], GRANULE, "nothing has changed");
    weir.stop();
}

#[test]
fn exported_bitmap_is_not_changed() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    qemu_img(["bitmap", "--add", text(&path), "a"]).succeeds();
    let weir = serve(&scratch, &path, &["--bitmap", "a"]);
    for action in ["remove", "clear", "disable"] {
        let refused = run_failing(&scratch, &["bitmap", "vm1", action, "a"]);
        assert_contains(&refused, &["offers the bitmap \"a\" to clients", "remove the export first"]);
    }
    bitmap(&scratch, &["add", "b"]);
    bitmap(&scratch, &["merge", "b", "a"]);
    weir.stop();
}

#[test]
fn merge_takes_bitmaps_of_other_disks() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let other = scratch.path("b.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&other), &SIZE.to_string()]).succeeds();
    let weir = serve(&scratch, &path, &[text(&other), "--name", "vm2"]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    for (node, name) in [("vm1", "a"), ("vm1", "sum"), ("vm2", "b")] {
        qmp.command("block-dirty-bitmap-add", json!({ "node": node, "name": name, "granularity": 65536 }));
    }
    qmp.command("block-dirty-bitmap-disable", json!({ "node": "vm1", "name": "sum" }));
    write(&weir, 3);
    harness::qemu_io(["-f", "raw"], ["write 0 64k"], weir.uri("vm2"));
    let bitmaps = json!(["a", { "node": "vm2", "name": "b" }]);
    qmp.command("block-dirty-bitmap-merge", json!({ "node": "vm1", "target": "sum", "bitmaps": bitmaps }));
    let nodes = qmp.command("query-named-block-nodes", json!({}));
    let node =
        nodes.as_array().expect("a list").iter().find(|node| node["node-name"] == "vm1").expect("ours");
    let sum = node["dirty-bitmaps"].as_array().expect("a list").iter().find(|bitmap| bitmap["name"] == "sum");
    let expected = json!({
        "name": "sum", "count": 2 * GRANULE, "granularity": 65536, "recording": false, "busy": false,
        "persistent": false,
    });
    assert_eq!(sum, Some(&expected));
    weir.stop();
}
