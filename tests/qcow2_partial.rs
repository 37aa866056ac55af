//! `weir image` on partly damaged images, and intended differences from qemu-img.

use std::{
    fs::File,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
};

use crate::harness::{Scratch, assert_contains, qemu_img, qemu_io, text, weir_image as weir};

fn image(scratch: &Scratch, name: &str, options: &str) -> PathBuf {
    let path = scratch.path(name);
    qemu_img(["create", "-q", "-f", "qcow2", "-o", options, text(&path), "8M"]).succeeds();
    path
}

fn number(path: &Path, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    File::open(path).unwrap().read_exact_at(&mut bytes, offset).unwrap();
    u64::from_be_bytes(bytes)
}

fn put(path: &Path, offset: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, offset).unwrap();
}

/// Offset of the second entry of the snapshot table.
fn second_snapshot(path: &Path) -> u64 {
    let table = number(path, 64);
    let lengths = number(path, table + 12) >> 32;
    let names = (lengths >> 16) + (lengths & 0xffff);
    let extra = number(path, table + 32) & 0xffff_ffff;
    table + (40 + extra + names).next_multiple_of(8)
}

#[test]
fn damaged_snapshot_does_not_affect_other_snapshots() {
    let scratch = Scratch::new();
    // An L1 table inside a cluster; more extra data than QEMU accepts, which hides the third entry.
    let damages: [(u64, &[u8], &str, &str); 2] =
        [(6, &[2, 0], "is not aligned to a cluster", "three"), (36, &[0, 1, 0, 0], "extra data", "one")];
    for (at, bytes, fault, readable) in damages {
        let path = image(&scratch, "disk.qcow2", "cluster_size=64k");
        for (name, pattern) in [("one", 1), ("two", 2), ("three", 3)] {
            qemu_io(["-f", "qcow2"], [format!("write -P {pattern} 0 1M")], &path);
            qemu_img(["snapshot", "-c", name, text(&path)]).succeeds();
        }
        put(&path, second_snapshot(&path) + at, bytes);
        let before = std::fs::read(&path).unwrap();
        for command in [&["info"][..], &["snapshot", "-l"]] {
            let shown = weir(command).arg(&path).run();
            assert_eq!(shown.code(), 0, "{}", shown.stderr());
            assert_contains(&shown.stderr(), &[text(&path), "its snapshot table is damaged", fault]);
            assert!(shown.stdout().contains(readable), "{}", shown.stdout());
        }
        let copy = scratch.path("copy.raw");
        let convert = ["convert", "-f", "qcow2", "-O", "raw", "-l", readable, text(&path), text(&copy)];
        assert_contains(&weir(&convert).run().stderr(), &["its snapshot table is damaged"]);
        let pattern = if readable == "one" { 1 } else { 3 };
        qemu_io(["-f", "raw"], [format!("read -P {pattern} 0 1M")], &copy);
        let lost = ["convert", "-f", "qcow2", "-O", "raw", "-l", "two", text(&path), text(&copy)];
        weir(&lost).fails();
        for repair in [&[][..], &["-r", "leaks"], &["-r", "all"], &["-r", "all", "--force"]] {
            let check = weir(&["check"]).args(repair).arg(&path).run();
            assert_eq!(check.code(), 2, "{repair:?}: {}", check.stderr());
            assert_contains(&check.stderr(), &[fault, "Nothing is freed or reported as leaked"]);
            assert!(!check.stderr().contains("Leaked") && !check.stdout().contains("leaked clusters"));
            assert!(check.stdout().contains("clusters may be leaked"), "{}", check.stdout());
        }
        assert!(weir(&["check", "--json"]).arg(&path).run().stdout().contains("possible-leaks"));
        for change in [["-c", "four"], ["-d", "one"], ["-a", "one"]] {
            assert_contains(&weir(&["snapshot"]).args(change).arg(&path).fails(), &[fault]);
        }
        // QEMU's images may end inside a cluster. Opening for writing extends the file to its end.
        assert!(std::fs::read(&path).unwrap().starts_with(&before), "nothing changes");
    }
}

#[test]
fn disk_of_an_image_with_too_many_snapshots_can_be_read() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.qcow2", "compat=0.10");
    qemu_io(["-f", "qcow2"], ["write -P 7 0 1M"], &path);
    // Twice QEMU's maximum; entries of zeroes are valid in version 2.
    put(&path, 60, &0x2_0000_u32.to_be_bytes());
    put(&path, 64, &(16_u64 << 20).to_be_bytes());
    File::options().write(true).open(&path).unwrap().set_len((16 << 20) + 40 * 0x2_0000).unwrap();
    let fault = "131072 snapshots; the maximum is 65536";
    assert_contains(&weir(&["info"]).arg(&path).run().stderr(), &[fault]);
    weir(&["map", "-f", "qcow2", text(&path)]).succeeds();
    let copy = scratch.path("copy.raw");
    weir(&["convert", "-f", "qcow2", "-O", "raw", text(&path), text(&copy)]).succeeds();
    qemu_io(["-f", "raw"], ["read -P 7 0 1M", "read -P 0 1M 7M"], &copy);
    for repair in [&[][..], &["-r", "all", "--force"]] {
        let check = weir(&["check"]).args(repair).arg(&path).run();
        assert_eq!(check.code(), 2, "{}", check.stderr());
        assert_contains(&check.stderr(), &[fault]);
        assert_eq!(number(&path, 60) >> 32, 0x2_0000, "no entry is dropped");
    }
    assert_contains(&weir(&["snapshot", "-c", "one"]).arg(&path).fails(), &[fault]);
}

#[test]
fn cluster_of_an_ambiguous_entry_is_not_leaked() {
    let scratch = Scratch::new();
    for options in ["cluster_size=64k", "cluster_size=64k,extended_l2=on"] {
        let path = image(&scratch, "disk.qcow2", options);
        qemu_io(["-f", "qcow2"], ["write -P 1 0 64k"], &path);
        let l2 = number(&path, number(&path, 40)) & !(1 << 63);
        put(&path, l2, &(number(&path, l2) | 0x200).to_be_bytes());
        let check = weir(&["check", "-r", "leaks", "--json"]).arg(&path).run();
        assert_eq!(check.code(), 2, "{}", check.stderr());
        let report: serde_json::Value = serde_json::from_str(&check.stdout()).unwrap();
        assert_eq!((&report["leaks"], &report["possible-leaks"]), (&serde_json::Value::Null, &1.into()));
        assert_contains(
            &check.stderr(),
            &["1 errors are left: a repair of leaks only frees leaked clusters"],
        );
    }
}

#[test]
fn repair_reports_cleared_flags() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.qcow2", "cluster_size=64k");
    put(&path, 72, &2_u64.to_be_bytes());
    let check = weir(&["check", "-r", "all"]).arg(&path).run();
    assert_eq!((check.code(), number(&path, 72)), (0, 0), "{}", check.stderr());
    assert_contains(&check.stderr(), &["no longer marked corrupt"]);
    let tip = weir(&["check", "--repair", "all"]).arg(&path).fails();
    assert_contains(&tip, &["--repair=all"]);
}

#[test]
fn layer_is_copied_before_its_backing_file_is_set() {
    let scratch = Scratch::new();
    let base = image(&scratch, "base.qcow2", "cluster_size=64k");
    qemu_io(["-f", "qcow2"], ["write -P 1 0 8M"], &base);
    let create = |name: &str, options: &str, backing: Option<&Path>| {
        let path = scratch.path(name);
        let mut create = qemu_img(["create", "-q", "-f", "qcow2", "-o", options]);
        if let Some(backing) = backing {
            create = create.args(["-F", "qcow2", "-b", text(backing)]);
        }
        create.args([text(&path), "8M"]).succeeds();
        path
    };
    let layer = create("layer.qcow2", "cluster_size=64k", Some(&base));
    qemu_io(["-f", "qcow2"], ["write -P 2 0 1M", "write -z 2M 1M", "write -P 0 4M 1M"], &layer);
    let convert = ["convert", "-n", "-f", "qcow2", "-O", "qcow2", "-B", text(&base), text(&layer)];
    for options in ["cluster_size=64k", "compat=0.10", "cluster_size=2M", "extended_l2=on"] {
        let target = create("target.qcow2", options, None);
        let copied = weir(&convert).arg(&target).run();
        assert_eq!(copied.code(), 0, "{options}: {}", copied.stderr());
        assert_contains(&copied.stderr(), &["has no backing file yet", "weir image rebase -u"]);
        qemu_img(["rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&target)]).succeeds();
        qemu_img(["compare", text(&layer), text(&target)]).succeeds();
        let at_depth_0 = qemu_img(["map", "--output=json", text(&target)]).json();
        assert!(at_depth_0.as_array().unwrap().iter().any(|part| part["depth"] == 1), "{options}");
        weir(&["check", "-q", text(&target)]).succeeds();
    }
    let other = image(&scratch, "other.qcow2", "cluster_size=64k");
    let target = create("target.qcow2", "cluster_size=64k", Some(&other));
    assert_contains(&weir(&convert).arg(&target).fails(), &["the target has the backing file", "rebase -u"]);
    let target = create("target.qcow2", "cluster_size=64k", None);
    assert_contains(&weir(&convert).arg("--target-is-zero").arg(&target).fails(), &["--target-is-zero"]);
}

/// Offsets and lengths of the data extents.
fn data(path: &Path) -> Vec<(u64, u64)> {
    let map = qemu_img(["map", "--output=json", text(path)]).json();
    let parts = map.as_array().unwrap().iter().filter(|part| part["data"] == true);
    parts.map(|part| (part["start"].as_u64().unwrap(), part["length"].as_u64().unwrap())).collect()
}

#[test]
fn stored_zeroes_between_holes_are_left_out_of_a_copy() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.qcow2", "cluster_size=1k");
    qemu_io(["-f", "qcow2"], ["write -P 0 0 64k", "write -P 5 8k 1k", "write -P 0 65k 1k"], &path);
    let copy = scratch.path("copy.qcow2");
    for compress in [&[][..], &["-c"]] {
        let convert = weir(&["convert", "-f", "qcow2", "-O", "qcow2", "-o", "cluster_size=1k"]);
        convert.args(compress).arg(&path).arg(&copy).succeeds();
        assert_eq!(data(&copy), [(8 << 10, 1 << 10)], "{compress:?}");
    }
}

#[test]
fn one_damaged_bitmap_is_dropped_and_qemu_reads_the_other() {
    let scratch = Scratch::new();
    let path = image(&scratch, "disk.qcow2", "cluster_size=64k");
    qemu_io(["-f", "qcow2"], ["write -P 7 0 1M"], &path);
    for name in ["one", "two"] {
        qemu_img(["bitmap", "--add", text(&path), name]).succeeds();
    }
    // Find the bitmap directory by its extension, and damage the size of the first table.
    let header = std::fs::read(&path).unwrap();
    let extension = header.windows(4).position(|window| window == 0x2385_2875_u32.to_be_bytes()).unwrap();
    let directory = number(&path, extension as u64 + 24);
    put(&path, directory + 8, &7_u32.to_be_bytes());
    qemu_img(["check", text(&path)]).fails();
    weir(&["info"]).arg(&path).succeeds();
    let copy = scratch.path("copy.raw");
    weir(&["convert", "-f", "qcow2", "-O", "raw", text(&path), text(&copy)]).succeeds();
    qemu_io(["-f", "raw"], ["read -P 7 0 1M"], &copy);
    assert_eq!(weir(&["check", "-q"]).arg(&path).run().code(), 2);
    let repaired = weir(&["check", "-r", "all"]).arg(&path).run();
    assert_eq!(repaired.code(), 0, "{}", repaired.stderr());
    assert_contains(&repaired.stderr(), &["\"one\"", "this bitmap is dropped"]);
    qemu_img(["check", "-q", text(&path)]).succeeds();
    let info = qemu_img(["info", "--output=json", text(&path)]).json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap().clone();
    assert_eq!(bitmaps.iter().map(|bitmap| &bitmap["name"]).collect::<Vec<_>>(), ["two"]);
}
