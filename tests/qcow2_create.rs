//! `weir image create` and `info`: QEMU opens the images, and both programs describe them equally.

use std::path::Path;

use crate::harness::{Scratch, assert_contains, create_encrypted, qemu_img, qemu_io, text, weir_image};

#[track_caller]
fn assert_described_equally(path: &Path, more: &[&str]) {
    let theirs = qemu_img(["info", "--output=json"]).args(more).arg(path).json();
    let ours = weir_image(&["info", "--output=json"]).args(more).arg(path).json();
    assert_eq!(ours, theirs);
}

#[test]
fn qemu_opens_created_images() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let data = scratch.path("data.raw");
    for options in [
        "lazy_refcounts=off",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=512,refcount_bits=1,preallocation=full",
        "cluster_size=2M,refcount_bits=64,extended_l2=on",
        "compression_type=zstd,lazy_refcounts=on",
        "preallocation=metadata",
        "preallocation=metadata,extended_l2=on",
        "preallocation=falloc,refcount_bits=2",
        "data_file=DATA",
        "data_file=DATA,data_file_raw=on",
        "data_file=DATA,preallocation=full,extended_l2=on",
    ] {
        let options = options.replace("DATA", text(&data));
        weir_image(&["create", "-q", "-f", "qcow2", "-o", &options, text(&path), "9M"]).succeeds();
        qemu_img(["check", "-q", text(&path)]).succeeds();
        qemu_io(["-f", "qcow2"], ["read -P 0 0 9M", "write -P 5 1M 3M"], &path);
        qemu_img(["check", "-q", text(&path)]).succeeds();
        assert_described_equally(&path, &[]);
    }
}

#[test]
fn backing_chain_is_described_as_by_qemu() {
    let scratch = Scratch::new();
    let (base, top) = (scratch.path("base.qcow2"), scratch.path("top.qcow2"));
    weir_image(&["create", "-q", "-f", "qcow2", text(&base), "5M"]).succeeds();
    weir_image(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", text(&top)]).succeeds();
    qemu_img(["snapshot", "-c", "one", text(&base)]).succeeds();
    qemu_img(["bitmap", "--add", text(&base), "changes"]).succeeds();
    for more in [&["--backing-chain"][..], &[]] {
        assert_described_equally(&top, more);
    }
    assert_contains(
        &weir_image(&["info", text(&base)]).succeeds(),
        &["virtual size: 5 MiB (5242880 bytes)", "one", "changes"],
    );
    let listed = weir_image(&["snapshot", "-l", text(&base)]).succeeds();
    assert_contains(&listed, &["Snapshot list:", "1   one"]);
}

#[test]
fn description_of_an_encrypted_image_matches_qemu() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    create_encrypted(&path);
    assert_described_equally(&path, &[]);
}

#[test]
fn qemu_opens_what_weir_encrypts() {
    let scratch = Scratch::new();
    let (path, key) = (scratch.path("disk.qcow2"), scratch.file("key", "a passphrase"));
    let object = format!("secret,id=key,file={}", text(&key));
    let source = format!("driver=qcow2,encrypt.key-secret=key,file.filename={}", text(&path));
    for more in [
        &["-o", "encrypt.iter-time=10", "--secret-file", text(&key)][..],
        &["-o", "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10", "--object", &object],
        &[
            "-o",
            "preallocation=metadata,encrypt.iter-time=10,encrypt.cipher-alg=aes-128",
            "--secret-file",
            text(&key),
        ],
    ] {
        weir_image(&["create", "-q", "-f", "qcow2"]).args(more).args([text(&path), "4M"]).succeeds();
        let commands = ["read -P 0 0 4M", "write -P 5 1M 1M", "read -P 5 1M 1M"];
        qemu_io(["--object", &object, "--image-opts"], commands, &source);
        weir_image(&["check", "-q", text(&path)]).succeeds();
    }
    let stderr = weir_image(&["create", "-f", "qcow2", "--object", "secret,id=key,data=abc"])
        .args(["-o", "encrypt.format=luks,encrypt.key-secret=key", text(&path), "4M"])
        .fails();
    assert_contains(&stderr, &["every user of this machine can read it"]);
}

#[test]
fn invalid_options_leave_no_file() {
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    for (arguments, expect) in [
        (&["-o", "lazy_refcounts=on,compat=0.10", "FILE", "1M"][..], "lazy_refcounts=on: needs compat=1.1"),
        (&["-o", "nonsense=1", "FILE", "1M"], "nonsense=1: is not an option of qcow2"),
        (&["-o", "cluster_size=512", "FILE", "1T"], "too large for clusters of 512 bytes"),
        (&["-b", "missing", "-F", "raw", "FILE"], "no such file"),
        (&["-b", "missing", "FILE", "1M"], "format of the backing file is missing"),
        (&["FILE"], "the size is missing"),
    ] {
        let arguments: Vec<_> = arguments
            .iter()
            .map(|argument| if *argument == "FILE" { text(&path) } else { argument })
            .collect();
        let stderr = weir_image(&["create", "-f", "qcow2"]).args(arguments).fails();
        assert_contains(&stderr, &[expect]);
        assert!(!path.exists(), "{expect}");
    }
}
