//! Image names with QEMU's prefix `file:`, references in images that are not paths, and compressed
//! files that contain an image.

use std::{fs, process::Command};

use crate::harness::{MIB, Scratch, Serve, assert_contains, qemu_img, qemu_io, text, weir, weir_image};

#[test]
fn file_prefix_is_removed_from_names() {
    let scratch = Scratch::new();
    let inside = scratch.path(".");
    let image = |arguments: &[&str]| weir_image(arguments).inside(&inside);
    image(&["create", "-q", "-f", "qcow2", "file:a:b.qcow2", "1M"]).succeeds();
    assert!(scratch.path("a:b.qcow2").exists() && !scratch.path("file:a:b.qcow2").exists());
    let info = image(&["info", "--output=json", "file:a:b.qcow2"]).json();
    assert_eq!(info["virtual-size"], MIB);
    // QEMU rejects the name without the prefix, as weir does.
    qemu_img(["info", "file:a:b.qcow2"]).inside(&inside).succeeds();
    for arguments in [
        &["check", "-q", "file:a:b.qcow2"][..],
        &["map", "file:a:b.qcow2"],
        &["measure", "file:a:b.qcow2"],
        &["snapshot", "-c", "one", "file:a:b.qcow2"],
        &["bitmap", "--add", "file:a:b.qcow2", "bits"],
        &["resize", "-q", "file:a:b.qcow2", "2M"],
        &["convert", "-O", "raw", "file:a:b.qcow2", "file:c:d.raw"],
        &["compare", "-q", "file:a:b.qcow2", "file:c:d.raw"],
        &["create", "-q", "-f", "qcow2", "-b", "file:c:d.raw", "-F", "raw", "file:top"],
        &["info", "--backing-chain", "top"],
        &["commit", "-q", "-f", "qcow2", "file:top"],
        &["rebase", "-q", "-f", "qcow2", "-b", "file:a:b.qcow2", "-F", "qcow2", "file:top"],
        &["create", "-q", "-f", "raw", "file:nbd:x", "1M"],
    ] {
        image(arguments).succeeds();
    }
    assert!(scratch.path("nbd:x").exists() && scratch.path("c:d.raw").exists());
    qemu_img(["check", "-q", "top"]).inside(&inside).succeeds();
    weir(&["bench", "-q", "-c", "10", "-f", "qcow2", "file:a:b.qcow2"]).inside(&inside).succeeds();
    let refused = image(&["info", "file:"]).fails();
    assert!(refused.contains("no path follows `file:`"), "{refused}");
}

#[test]
fn names_in_images_contact_no_server() {
    let scratch = Scratch::new();
    let inside = scratch.path(".");
    let server = Serve::new(&scratch).arg("memory:1M").start();
    for address in [&server.uri("memory")[..], "rbd:pool/image", "json:{}"] {
        let create = ["create", "-q", "-f", "qcow2", "-u", "-b", address, "-F", "raw", "top.qcow2", "1M"];
        weir_image(&create).inside(&inside).succeeds();
        for arguments in [
            &["map", "-f", "qcow2", "top.qcow2"][..],
            &["info", "--backing-chain", "top.qcow2"],
            &["convert", "-f", "qcow2", "-O", "raw", "top.qcow2", "copy.raw"],
            &["commit", "-q", "-f", "qcow2", "top.qcow2"],
            &["rebase", "-q", "-f", "qcow2", "-b", "", "top.qcow2"],
            &["create", "-q", "-f", "qcow2", "-b", address, "-F", "raw", "other.qcow2"],
        ] {
            let refused = weir_image(arguments).inside(&inside).fails();
            assert!(refused.contains("only paths are supported"), "{arguments:?}: {refused}");
        }
        weir_image(&["info", "top.qcow2"]).inside(&inside).succeeds();
    }
}

/// Runs a program that writes its results beside its input.
fn run(program: &str, arguments: &[&str], scratch: &Scratch) {
    let status = Command::new(program).args(arguments).current_dir(scratch.path(".")).status();
    assert!(status.unwrap_or_else(|error| panic!("{program}: {error}")).success(), "{program} {arguments:?}");
}

#[test]
fn compressed_image_is_reported_with_its_unpacker() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&disk), "1M"]).succeeds();
    run("gzip", &["-k", "disk.qcow2"], &scratch);
    run("tar", &["-cf", "disk.ova", "disk.qcow2"], &scratch);
    for (name, magic) in [
        ("disk.qcow2.xz", &b"\xfd7zXZ\0"[..]),
        ("disk.qcow2.bz2", b"BZh9\x31\x41\x59\x26\x53\x59"),
        ("disk.zst", b"\x28\xb5\x2f\xfd"),
        ("disk.zip", b"PK\x03\x04"),
    ] {
        scratch.file(name, [magic, &[0; 2000]].concat());
    }
    for form in ["vmdk", "vdi", "vpc", "vhdx"] {
        let path = scratch.path(&format!("disk.{form}"));
        qemu_img(["convert", "-f", "qcow2", "-O", form, text(&disk), text(&path)]).succeeds();
    }
    for (name, expect, is_error) in [
        ("disk.qcow2.gz", "gzip, which a guest cannot use as a disk (convert it: gunzip)", false),
        ("disk.qcow2.xz", "(convert it: unxz)", false),
        ("disk.qcow2.bz2", "(convert it: bunzip2)", false),
        ("disk.zst", "(convert it: unzstd)", false),
        ("disk.zip", "(convert it: unzip)", false),
        ("disk.ova", "(convert it: tar -xf, ", false),
        ("disk.vmdk", "qemu-img convert -f vmdk -O qcow2", true),
        ("disk.vdi", "qemu-img convert -f vdi -O qcow2", true),
        ("disk.vpc", "qemu-img convert -f vpc -O qcow2", true),
        ("disk.vhdx", "qemu-img convert -f vhdx -O qcow2", true),
    ] {
        let path = scratch.path(name);
        for command in ["info", "map"] {
            let outcome = weir_image(&[command, text(&path)]).run();
            assert_eq!(outcome.code() != 0, is_error, "{command} {name}: {}", outcome.stderr());
            assert_contains(&outcome.stderr(), &[name, expect]);
            let with_format = weir_image(&[command, "-f", "raw", text(&path)]).run();
            assert_eq!(
                (with_format.code(), with_format.stderr().matches(expect).count()),
                (0, 1),
                "{}",
                with_format.stderr()
            );
        }
        // With an explicit format it is served as raw data.
        let weir = Serve::new(&scratch).arg(&path).args(["--format", "raw", "--read-only"]).start();
        let size = fs::metadata(&path).unwrap().len().min(512);
        let export = path.file_stem().unwrap().to_str().unwrap();
        qemu_io(["-f", "raw", "-r"], [format!("read 0 {size}")], weir.uri(export));
        weir.stop();
    }
    let plain = weir_image(&["info", text(&disk)]).run();
    assert!(!plain.stderr().contains("looks like"), "{}", plain.stderr());
}

#[test]
fn guest_may_store_an_archive_on_its_disk() {
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", MIB);
    // The format is probed each time.
    for _ in 0..2 {
        let weir = Serve::new(&scratch).arg(&disk).start();
        weir.nbdsh("disk", "h.pwrite(b'\\x1f\\x8b\\x08' + bytes(509), 0)\nh.flush()");
        weir.stop();
    }
    assert_eq!(fs::read(&disk).unwrap()[..3], *b"\x1f\x8b\x08");
}
