//! Writes of zeroes, with detection of zeroes enabled.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use serde_json::{Value, json};

use crate::harness::{MIB, Qmp, Scratch, Serve, qemu_img, text};

/// Overwrites data with zeroes, writes a megabyte of zeroes with one byte of data, and flushes.
const SCRIPT: &str = "
h.pwrite(bytes(2 << 20), 2 << 20)
h.pwrite(b'x' + bytes((1 << 20) - 1), 5 << 20)
assert not any(h.pread(2 << 20, 2 << 20))
h.flush()
";

fn allocated(file: &Path) -> u64 {
    fs::metadata(file).unwrap().blocks() * 512
}

/// Asserts that the disk reads as [`SCRIPT`] leaves it.
fn check(before: &[u8], after: &[u8]) {
    let mut expect = before.to_vec();
    expect[2 << 20..4 << 20].fill(0);
    expect[5 << 20..6 << 20].fill(0);
    expect[5 << 20] = b'x';
    assert!(expect == after, "the data differs from the writes");
}

#[test]
fn zeroes_free_space_of_a_raw_image_on_request() {
    for (mode, freed) in [("off", 0), ("on", 0), ("unmap", 2 * MIB)] {
        let scratch = Scratch::new();
        let file = scratch.filled("disk.raw", 8 * MIB);
        let (bytes, before) = (fs::read(&file).unwrap(), allocated(&file));
        let weir = Serve::new(&scratch).arg(&file).args(["--name", "disk", "--detect-zeroes", mode]).start();
        weir.nbdsh("disk", SCRIPT);
        weir.stop();
        check(&bytes, &fs::read(&file).unwrap());
        assert_eq!(before - allocated(&file), freed, "{mode}");
    }
}

/// The extents of an image that are zero and have no data, according to QEMU.
fn zeroes(image: &Path) -> Vec<(u64, u64)> {
    let map = qemu_img(["map", "--output=json", text(image)]).json();
    let range_of = |extent: &Value| (extent["start"].as_u64().unwrap(), extent["length"].as_u64().unwrap());
    let is_zero = |extent: &&Value| extent["zero"] == true && extent["data"] == false;
    map.as_array().unwrap().iter().filter(is_zero).map(range_of).collect()
}

#[test]
fn zeroes_become_zero_clusters_in_qcow2() {
    for (mode, expect) in [("off", vec![]), ("on", vec![(2 * MIB, 2 * MIB)])] {
        let scratch = Scratch::new();
        let base = scratch.filled("base.raw", 8 * MIB);
        let image = scratch.path("disk.qcow2");
        qemu_img(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&base), text(&image)]).succeeds();
        let weir = Serve::new(&scratch)
            .args(["--format", "qcow2", "--name", "disk", "--detect-zeroes", mode])
            .arg(&image)
            .start();
        weir.nbdsh("disk", SCRIPT);
        weir.stop();
        assert_eq!(zeroes(&image), expect, "{mode}");
        let raw = scratch.path("copy.raw");
        qemu_img(["convert", "-O", "raw", text(&image), text(&raw)]).succeeds();
        check(&fs::read(&base).unwrap(), &fs::read(&raw).unwrap());
    }
}

#[test]
fn zero_detection_is_set_per_node() {
    let scratch = Scratch::new();
    let file = scratch.filled("disk.raw", 8 * MIB);
    let (bytes, before) = (fs::read(&file).unwrap(), allocated(&file));
    let path = scratch.socket("qmp");
    let weir = Serve::new(&scratch)
        .args(["memory:1M", "--image-root", text(&scratch.path("")), "--qmp"])
        .arg(format!("unix:{}", text(&path)))
        .start();
    let mut client = Qmp::negotiated(&path);
    let storage = json!({"driver": "file", "filename": text(&file)});
    let mut node = json!({"driver": "raw", "node-name": "d", "file": storage,
        "detect-zeroes": "unmap", "discard": "ignore"});
    let (_, message) = client.command_error("blockdev-add", node.clone());
    assert!(message.contains("'detect-zeroes' cannot be 'unmap'"), "{message}");
    node["discard"] = json!("unmap");
    client.command("blockdev-add", node);
    client.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "d", "writable": true}));
    let blocks = client.command("query-block", json!({}));
    let detect_zeroes_of = |name: &str| {
        let all = blocks.as_array().unwrap();
        let block = all.iter().find(|block| block["inserted"]["node-name"] == name).unwrap();
        block["inserted"]["detect_zeroes"].clone()
    };
    assert_eq!((detect_zeroes_of("d"), detect_zeroes_of("memory")), (json!("unmap"), json!("off")));
    weir.nbdsh("d", SCRIPT);
    weir.stop();
    check(&bytes, &fs::read(&file).unwrap());
    assert_eq!(before - allocated(&file), 2 * MIB);
}

#[test]
fn reserved_space_is_not_freed_by_zeroes() {
    let scratch = Scratch::new();
    let file = scratch.filled("disk.raw", MIB);
    let serve = Serve::new(&scratch).arg(&file).args(["--discard", "ignore", "--detect-zeroes", "unmap"]);
    let stderr = serve.rejects_usage();
    let expect = "--detect-zeroes unmap: frees space, and --discard ignore keeps it (use on instead)";
    assert!(stderr.contains(expect), "{stderr}");
}
