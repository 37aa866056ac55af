//! Random operations on a disk's file over FUSE, each checked against a model: `fsx/exercise.py`.
//!
//! A run has `WEIR_FSX_OPERATIONS` operations for each format and cache mode, by default 2500;
//! `WEIR_SEED` repeats one. If the file ends between two sectors of a qcow2 image, the image ends
//! at the next sector, after zeroes.

use std::{fs, path::Path};

use crate::{
    fuse::{can_mount, mount_point},
    harness::{MIB, Scratch, Serve, TestClient, env_number, qemu_img, text},
};

const EXERCISE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fsx/exercise.py");
const MAX_FILE_BYTES: u64 = 256 << 10;
/// Operations of one run of the program. Each run continues with the file of the previous one,
/// because the harness limits the run time of a client.
const SLICE: u64 = 10_000;

/// Exercises `file`; returns the content that the model expects.
#[allow(clippy::print_stderr, reason = "a failure is repeated by its seed")]
fn exercise(scratch: &Scratch, file: &Path) -> Vec<u8> {
    let model = scratch.path("model");
    let seed = env_number("WEIR_SEED", fastrand::u64(..1 << 32));
    eprintln!("WEIR_SEED={seed}");
    let mut left = env_number("WEIR_FSX_OPERATIONS", 2500);
    for part in 0.. {
        let operations = left.min(SLICE);
        TestClient::new("python3")
            .args([EXERCISE, text(file), "--model-to", text(&model)])
            .args(["--seed", &(seed + part).to_string(), "--largest", &MAX_FILE_BYTES.to_string()])
            .args(["--operations", &operations.to_string()])
            .succeeds();
        left -= operations;
        if left == 0 {
            break;
        }
    }
    fs::read(model).expect("it was written")
}

fn file_and_image_are_the_model(format: &str, cache: &str) {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let (image, file) = (scratch.path(&format!("disk.{format}")), mount_point(&scratch, "file"));
    qemu_img(["create", "-q", "-f", format]).arg(&image).arg("64K").succeeds();
    let weir = Serve::new(&scratch)
        .arg(&image)
        .args(["--format", format, "--cache", cache])
        .args(["--fuse", &format!("{},growable", text(&file))])
        .start();
    let mut model = exercise(&scratch, &file);
    assert!(fs::read(&file).expect("it is served") == model, "the file differs from the model");
    weir.stop();
    let content = if format == "raw" {
        image
    } else {
        qemu_img(["check", "-q", "-f", format]).arg(&image).succeeds();
        let content = scratch.path("content.raw");
        qemu_img(["convert", "-f", format, "-O", "raw"]).arg(&image).arg(&content).succeeds();
        model.resize(model.len().max(1).next_multiple_of(512), 0);
        content
    };
    if model.is_empty() {
        model.resize(512, 0);
    }
    assert!(
        fs::metadata(&content).expect("the file exists").len() < MIB,
        "the image is longer than its maximum"
    );
    assert!(fs::read(content).expect("the file exists") == model, "the image differs from the model");
}

#[test]
fn raw_image_through_the_page_cache() {
    file_and_image_are_the_model("raw", "writeback");
}

#[test]
fn raw_image_past_the_page_cache() {
    file_and_image_are_the_model("raw", "none");
}

#[test]
fn qcow2_image_through_the_page_cache() {
    file_and_image_are_the_model("qcow2", "writeback");
}

#[test]
fn qcow2_image_past_the_page_cache() {
    file_and_image_are_the_model("qcow2", "none");
}
