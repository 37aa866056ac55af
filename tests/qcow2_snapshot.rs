//! `weir image snapshot` and `weir image bitmap` on images made by QEMU, verified by QEMU.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::harness::{Scratch, assert_contains, qemu_img, qemu_io, text, weir_image};

fn image(scratch: &Scratch, options: &str) -> PathBuf {
    let path = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", "-o", options, text(&path), "8M"]).succeeds();
    path
}

#[track_caller]
fn assert_valid(path: &Path) {
    qemu_img(["check", "-q", text(path)]).succeeds();
    weir_image(&["check", "-q", text(path)]).succeeds();
}

#[test]
fn snapshots_are_interchangeable_with_qemu() {
    let scratch = Scratch::new();
    for options in ["cluster_size=64k", "compat=0.10", "cluster_size=512", "cluster_size=16k,extended_l2=on"]
    {
        let path = image(&scratch, options);
        qemu_io(["-f", "qcow2"], ["write -P 1 0 3M", "write -c -P 9 6M 64k"], &path);
        weir_image(&["snapshot", "-c", "ours", text(&path)]).succeeds();
        assert_valid(&path);
        qemu_io(["-f", "qcow2"], ["write -P 2 1M 3M"], &path);
        qemu_img(["snapshot", "-c", "theirs", text(&path)]).succeeds();
        qemu_io(["-f", "qcow2"], ["write -P 3 2M 3M", "write -z 0 64k"], &path);
        assert_valid(&path);
        weir_image(&["snapshot", "-a", "theirs", text(&path)]).succeeds();
        assert_valid(&path);
        qemu_io(
            ["-f", "qcow2"],
            ["read -P 1 0 1M", "read -P 2 1M 3M", "read -P 0 4M 2M", "read -P 9 6M 64k"],
            &path,
        );
        qemu_img(["snapshot", "-a", "ours", text(&path)]).succeeds();
        qemu_io(["-f", "qcow2"], ["read -P 1 0 3M", "read -P 0 3M 3M", "read -P 9 6M 64k"], &path);
        weir_image(&["snapshot", "-d", "1", text(&path)]).succeeds();
        assert_valid(&path);
        weir_image(&["snapshot", "-d", "theirs", text(&path)]).succeeds();
        assert_valid(&path);
        qemu_io(
            ["-f", "qcow2"],
            ["write -P 4 1M 1M", "read -P 1 2M 1M", "read -P 4 1M 1M", "read -P 9 6M 64k"],
            &path,
        );
        assert_valid(&path);
        let stderr = weir_image(&["snapshot", "-a", "theirs", text(&path)]).fails();
        assert_contains(&stderr, &["there is no snapshot \"theirs\""]);
    }
}

fn bitmaps(path: &Path) -> Value {
    qemu_img(["info", "--output=json", text(path)]).json()["format-specific"]["data"]["bitmaps"].clone()
}

#[test]
fn bitmaps_are_interchangeable_with_qemu() {
    let scratch = Scratch::new();
    for options in ["cluster_size=64k", "cluster_size=512"] {
        let path = image(&scratch, options);
        weir_image(&["bitmap", "--add", "-g", "64K", text(&path), "ours"]).succeeds();
        assert_valid(&path);
        // A write by QEMU, which marks the enabled bitmap.
        qemu_io(["-f", "qcow2"], ["write -P 1 1M 1M"], &path);
        qemu_img(["bitmap", "--add", "--disable", "-g", "4k", text(&path), "theirs"]).succeeds();
        weir_image(&["bitmap", "--merge", "ours", text(&path), "theirs"]).succeeds();
        assert_valid(&path);
        weir_image(&["bitmap", "--disable", "--clear", text(&path), "ours"]).succeeds();
        assert_valid(&path);
        assert_eq!(
            bitmaps(&path),
            serde_json::json!([
                { "name": "ours", "granularity": 65536, "flags": [] },
                { "name": "theirs", "granularity": 4096, "flags": [] },
            ])
        );
        weir_image(&["bitmap", "--enable", text(&path), "ours"]).succeeds();
        weir_image(&["bitmap", "--remove", text(&path), "ours"]).succeeds();
        assert_valid(&path);
        assert_contains(
            &weir_image(&["bitmap", "--add", text(&path), "theirs"]).fails(),
            &["there is a bitmap \"theirs\" already"],
        );
        weir_image(&["bitmap", "--remove", text(&path), "theirs"]).succeeds();
        assert_valid(&path);
        assert_eq!(bitmaps(&path), Value::Null);
    }
}

#[test]
fn resize_of_an_old_image_with_snapshots_explains_its_failure() {
    let scratch = Scratch::new();
    let path = image(&scratch, "compat=0.10");
    qemu_img(["snapshot", "-c", "one", text(&path)]).succeeds();
    let stderr = weir_image(&["resize", "-f", "qcow2", text(&path), "16M"]).fails();
    assert_contains(
        &stderr,
        &["disk.qcow2: its snapshots do not record the size", "compat=1.1", "snapshot -d"],
    );
    qemu_img(["amend", "-f", "qcow2", "-o", "compat=1.1", text(&path)]).succeeds();
    weir_image(&["resize", "-f", "qcow2", text(&path), "16M"]).succeeds();
    assert_valid(&path);
}
