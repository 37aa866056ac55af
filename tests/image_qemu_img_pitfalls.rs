//! Pitfalls of `weir image` for scripts written for qemu-img: accepted and rejected options, and
//! disks whose content must not change under `convert -B`, `rebase` and `commit`.

use std::{fs, os::unix::fs::MetadataExt as _};

use crate::harness::{MIB, Scratch, assert_contains, qemu_img, qemu_io, text, weir_image};

#[test]
fn options_are_accepted_or_rejected_as_by_qemu_img() {
    let scratch = Scratch::new();
    scratch.sparse("empty.raw", 0);
    scratch.sparse("base.raw", MIB);
    let inside = scratch.path("");
    qemu_img(["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top.q"])
        .inside(&inside)
        .succeeds();
    for (taken, line) in [
        (true, "create -f qcow2 -o size=1M,size=2M -o cluster_size=4k,nocow=on,encryption=off a.q"),
        (true, "create -f raw -o extent_size_hint=1M,nocow=off a.raw 1M"),
        (true, "create -f raw a.raw 0"),
        (true, "create -f qcow2 -o size=1M,help a.q"),
        (false, "create -f qcow2 -o size=1M a.q 2M"),
        (false, "create -f qcow2 -o backing_file= a.q 2M"),
        (false, "create -f qcow2 -o encryption=on a.q 2M"),
        (false, "create -f qcow2 -o nocow=maybe a.q 2M"),
        (true, "info empty.raw"),
        (true, "info --output=json -f raw empty.raw"),
        (true, "map -f raw empty.raw"),
        (true, "convert -f raw -O raw empty.raw a.raw"),
        (true, "compare -f raw -F raw empty.raw a.raw"),
        (true, "resize -f raw a.raw 1M"),
        (true, "convert -n -f qcow2 -O qcow2 -B base.raw -F raw top.q top2.q"),
        (false, "convert -f raw -O qcow2 -B base.raw -F raw base.raw base.raw a.q"),
        (false, "resize -f qcow2 --preallocation=metadata top.q 1M"),
    ] {
        qemu_img(["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "top2.q"])
            .inside(&inside)
            .succeeds();
        let arguments: Vec<_> = line.split(' ').collect();
        assert_eq!(qemu_img(&arguments).inside(&inside).run().code() == 0, taken, "qemu-img {line}");
        let ours = weir_image(&arguments).inside(&inside).run();
        assert_eq!(ours.code() == 0, taken, "weir image {line}: {}", ours.stderr());
    }
    assert_eq!(weir_image(&["info", "--json", "empty.raw"]).inside(&inside).json()["virtual-size"], 0);
    assert_contains(&weir_image(&["info", "--version"]).succeeds(), &[env!("CARGO_PKG_VERSION")]);
    let stderr = weir_image(&["create", "-f", "qcow2", "-b", "", "a.q", "1M"]).inside(&inside).fails();
    assert_contains(&stderr, &["the backing file has no name"]);
    // qemu-img would leave ranges that the source does not allocate to the target's backing file.
    let stderr = weir_image(&["convert", "-n", "-O", "qcow2", "-f", "qcow2", "-B", "empty.raw", "-F", "raw"])
        .args(["top.q", "top2.q"])
        .inside(&inside)
        .fails();
    assert_contains(&stderr, &["the target has the backing file"]);
}

/// A chain in its own directory: `top` on `middle` on `base`; and the raw content of `top`.
fn chain(scratch: &Scratch) {
    let inside = scratch.path("");
    let create = |arguments: &[&str]| {
        qemu_img(["create", "-q", "-f", "qcow2"]).args(arguments).inside(&inside).succeeds();
    };
    create(&["base", "4M"]);
    qemu_io(["-f", "qcow2"], ["write -P 1 0 4M"], scratch.path("base"));
    create(&["-b", "base", "-F", "qcow2", "middle", "1M"]);
    create(&["-b", "middle", "-F", "qcow2", "top", "2M"]);
    qemu_io(["-f", "qcow2"], ["write -P 2 64k 64k"], scratch.path("top"));
    qemu_img(["convert", "-f", "qcow2", "-O", "raw", "top", "disk.raw"]).inside(&inside).succeeds();
}

#[test]
fn content_below_a_shorter_image_stays_hidden() {
    let scratch = Scratch::new();
    chain(&scratch);
    // Run from a different directory: the base's name is relative to the image.
    weir_image(&["commit", "-q", "-f", "qcow2", "-b", "base", text(&scratch.path("top"))]).succeeds();
    let inside = scratch.path("");
    for image in ["top", "base"] {
        let commands = ["read -P 1 0 64k", "read -P 2 64k 64k", "read -P 1 128k 896k", "read -P 0 1M 1M"];
        qemu_io(["-f", "qcow2"], commands, scratch.path(image));
    }
    qemu_io(["-f", "qcow2"], ["read -P 1 2M 2M"], scratch.path("base"));
    let stderr = weir_image(&["commit", "-f", "qcow2", "-b", "../base", "top"]).inside(&inside).fails();
    assert_contains(&stderr, &["../base is not in the backing chain"]);
}

#[test]
fn copy_with_a_backing_file_is_the_same_disk() {
    let scratch = Scratch::new();
    chain(&scratch);
    let inside = scratch.path("");
    // `alone` has no backing file, so its unallocated ranges are zeroes.
    qemu_img(["create", "-q", "-f", "qcow2", "alone", "2M"]).inside(&inside).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 3 1M 64k"], scratch.path("alone"));
    for (source, backing) in [("top", "middle"), ("alone", "base")] {
        let option = format!("backing_file={backing},backing_fmt=qcow2");
        for backing_options in [["-B", backing, "-F", "qcow2"].as_slice(), &["-o", &option]] {
            let convert = weir_image(&["convert", "-f", "qcow2", "-O", "qcow2"]).args(backing_options);
            convert.args([source, "copy"]).inside(&inside).succeeds();
            qemu_img(["compare", "-f", "qcow2", "-F", "qcow2", source, "copy"]).inside(&inside).succeeds();
            let bytes = fs::metadata(scratch.path("copy")).unwrap().blocks() * 512;
            assert!(
                bytes < MIB / 2,
                "{source} {backing_options:?}: {bytes} bytes, but its own layer has 64 KiB"
            );
        }
    }
}

#[test]
fn rebase_hides_content_with_unallocated_zeroes() {
    let scratch = Scratch::new();
    let inside = scratch.path("");
    scratch.filled("full.raw", 64 * MIB);
    for options in ["", ",extended_l2=on", ",cluster_size=2M"] {
        let options = format!("lazy_refcounts=off{options}");
        qemu_img(["create", "-q", "-f", "qcow2", "-o", &options, "image", "65M"]).inside(&inside).succeeds();
        qemu_io(["-f", "qcow2"], ["write -P 7 100k 8k"], scratch.path("image"));
        qemu_img(["convert", "-f", "qcow2", "-O", "raw", "image", "disk.raw"]).inside(&inside).succeeds();
        let size = || fs::metadata(scratch.path("image")).unwrap().blocks() * 512;
        let before = size();
        weir_image(&["rebase", "-f", "qcow2", "-b", "full.raw", "-F", "raw", "image"])
            .inside(&inside)
            .succeeds();
        qemu_img(["compare", "-f", "raw", "-F", "qcow2", "disk.raw", "image"]).inside(&inside).succeeds();
        qemu_img(["check", "-q", "-f", "qcow2", "image"]).inside(&inside).succeeds();
        let more = size().saturating_sub(before);
        assert!(more < MIB, "{options}: {more} bytes for zeroes");
    }
}

#[test]
fn map_reports_holes_below_allocated_clusters() {
    let scratch = Scratch::new();
    let inside = scratch.path("");
    let create = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", "image", "4M"];
    qemu_img(create).inside(&inside).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 5 1M 64k"], scratch.path("image"));
    for output in ["json", "human"] {
        let output = format!("--output={output}");
        let arguments = ["map", &output, "-f", "qcow2", "image"];
        let theirs = qemu_img(arguments).inside(&inside).succeeds();
        // Versions after 7.2 print "compressed" in addition.
        let ours = weir_image(&arguments).inside(&inside).succeeds().replace(", \"compressed\": false", "");
        assert_eq!(ours.trim(), theirs.trim().replace(", \"compressed\": false", ""));
    }
}

/// Programs parse the last entry of the map, so an empty image needs one.
#[test]
fn map_of_an_empty_image_has_one_entry() {
    let scratch = Scratch::new();
    let inside = scratch.path("");
    for format in ["raw", "qcow2"] {
        qemu_img(["create", "-q", "-f", format, "image", "0"]).inside(&inside).succeeds();
        for start in ["0", "1M"] {
            let arguments = ["map", "--output=json", "-f", format, "-s", start, "image"];
            let theirs = qemu_img(arguments).inside(&inside).succeeds();
            let ours =
                weir_image(&arguments).inside(&inside).succeeds().replace(", \"compressed\": false", "");
            assert_eq!(ours.trim(), theirs.trim().replace(", \"compressed\": false", ""), "{format}");
        }
    }
}

#[test]
fn compressed_clusters_are_not_preallocated() {
    let scratch = Scratch::new();
    let inside = scratch.path("");
    scratch.filled("full.raw", MIB);
    let convert = |preallocation: &str| {
        let options = format!("preallocation={preallocation}");
        weir_image(&["convert", "-f", "raw", "-O", "qcow2", "-c", "-o", &options, "full.raw", "image"])
            .inside(&inside)
    };
    for preallocation in ["metadata", "falloc", "full"] {
        let stderr = convert(preallocation).fails();
        assert_contains(&stderr, &["image: -c: compressed clusters cannot be preallocated (leave out"]);
        assert!(!scratch.path("image").exists());
    }
    convert("off").succeeds();
}
