//! qcow2 images with backing files, created by qemu-img, served and written by weir, and checked by
//! qemu-img.

use std::{
    fs::{self, Permissions},
    os::{
        fd::AsRawFd as _,
        unix::fs::{PermissionsExt as _, symlink},
    },
    path::Path,
};

use serde_json::{Value, json};

use crate::harness::{self, MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, qemu_io, text};

fn qemu_img(directory: &Path, arguments: &str) -> String {
    let directory = text(directory);
    let arguments = arguments.split(' ').map(|argument| argument.replace("DIR", directory));
    harness::qemu_img(arguments).succeeds()
}

/// `base.raw` (smaller than its overlay) ◄ `sub/middle.qcow2` ◄ `top.qcow2`, each with its own
/// pattern.
fn chain(scratch: &Scratch) -> std::path::PathBuf {
    let directory = scratch.path("");
    fs::create_dir(scratch.path("sub")).unwrap();
    scratch.file("base.raw", vec![1; 3 << 20]);
    qemu_img(&directory, "create -q -f qcow2 -b ../base.raw -F raw DIR/sub/middle.qcow2 6M");
    qemu_io(["-f", "qcow2"], ["write -P 2 1M 1M"], text(&scratch.path("sub/middle.qcow2")));
    qemu_img(&directory, "create -q -f qcow2 -b sub/middle.qcow2 -F qcow2 DIR/top.qcow2 8M");
    qemu_io(["-f", "qcow2"], ["write -P 3 5M 100k"], text(&scratch.path("top.qcow2")));
    directory
}

fn serve(scratch: &Scratch, image: &str) -> Serve {
    Serve::new(scratch).arg(scratch.path(image)).args(["--format", "qcow2"])
}

#[test]
fn only_the_top_image_of_a_chain_is_written() {
    let scratch = Scratch::new();
    let directory = chain(&scratch);
    // Copies of the lower layers, which must not change.
    let below = ["base.raw", "sub/middle.qcow2"].map(|name| fs::read(scratch.path(name)).unwrap());
    for cache in ["writeback", "none"] {
        let weir = serve(&scratch, "top.qcow2").args(["--cache", cache]).start();
        // Data of each layer, and zeroes beyond the ends of the shorter ones.
        let commands = [
            "read -P 1 0 1000k",
            "read -P 2 1028k 996k",
            "read -P 1 2M 1M",
            "read -P 0 3M 2M",
            "read -P 3 5M 100k",
            "read -P 0 6M 2M",
            "write -P 4 1000k 2000",
            "flush",
        ];
        qemu_io(["-f", "raw"], commands, weir.uri("top"));
        qemu_io(["-f", "raw"], ["read -P 4 1000k 2000", "read -P 1 900k 100k"], weir.uri("top"));
        weir.stop();
        qemu_img(&directory, "check -q -f qcow2 DIR/top.qcow2");
        let top = scratch.path("top.qcow2");
        qemu_io(
            ["-f", "qcow2"],
            ["read -P 4 1000k 2000", "read -P 2 1028k 996k", "read -P 3 5M 100k"],
            text(&top),
        );
    }
    let after = ["base.raw", "sub/middle.qcow2"].map(|name| fs::read(scratch.path(name)).unwrap());
    assert!(below == after, "a backing file was written to");
}

#[test]
fn backing_file_in_use_is_write_locked() {
    let scratch = Scratch::new();
    chain(&scratch);
    let weir = serve(&scratch, "top.qcow2").start();
    let middle = scratch.path("sub/middle.qcow2");
    let stderr = TestClient::new("qemu-io").args(["-f", "qcow2", "-c", "write 0 512", text(&middle)]).fails();
    assert_contains(&stderr, &["lock"]);
    let other = Serve::new(&scratch).at_given_addresses().arg(&middle).args(["--format", "qcow2", "--nbd"]);
    let stderr = other.arg(format!("unix:{}", text(&scratch.socket("other")))).fails();
    assert_contains(&stderr, &["middle.qcow2", "locked"]);
    weir.stop();
}

#[test]
fn error_names_the_missing_backing_file() {
    let scratch = Scratch::new();
    let directory = chain(&scratch);
    // Without an explicit format, a header written by a guest could name files of the host.
    let stderr = Serve::new(&scratch).arg(scratch.path("top.qcow2")).fails();
    assert_contains(&stderr, &["top.qcow2: looks like qcow2 and names other files", "--format qcow2"]);
    fs::rename(scratch.path("base.raw"), scratch.path("gone.raw")).unwrap();
    let stderr = serve(&scratch, "top.qcow2").fails();
    assert_contains(&stderr, &["middle.qcow2: its backing file", "base.raw: no such file"]);
    // A chain that contains itself.
    qemu_img(&directory, "rebase -u -f qcow2 -b ../top.qcow2 -F qcow2 DIR/sub/middle.qcow2");
    let stderr = serve(&scratch, "top.qcow2").fails();
    assert_contains(&stderr, &["middle.qcow2: its backing file", "is already in the chain"]);
}

#[test]
fn image_root_confines_names_in_images() {
    let scratch = Scratch::new();
    let directory = chain(&scratch);
    let inside = |image: &str, root: &str| serve(&scratch, image).arg("--image-root").arg(scratch.path(root));
    inside("top.qcow2", "").start().stop();
    let stderr = inside("sub/middle.qcow2", "sub").fails();
    assert_contains(&stderr, &["middle.qcow2: its backing file", "lies outside of the image root"]);
    let stderr = inside("top.qcow2", "sub").fails();
    assert_contains(&stderr, &["top.qcow2: lies outside of the image root"]);
    // A symlink inside of the image root that leads outside.
    symlink(scratch.path("base.raw"), scratch.path("sub/link.raw")).unwrap();
    qemu_img(&directory, "rebase -u -f qcow2 -b link.raw -F raw DIR/sub/middle.qcow2");
    let stderr = inside("sub/middle.qcow2", "sub").fails();
    assert_contains(&stderr, &["sub/link.raw: lies outside of the image root"]);
}

#[test]
fn data_file_is_served_with_its_image() {
    let scratch = Scratch::new();
    let directory = scratch.path("");
    for raw in ["off", "on"] {
        qemu_img(
            &directory,
            &format!("create -q -f qcow2 -o data_file=DIR/disk.data,data_file_raw={raw} DIR/disk.qcow2 4M"),
        );
        let weir = serve(&scratch, "disk.qcow2").start();
        qemu_io(["-f", "raw"], ["write -P 9 1M 100k", "read -P 9 1M 100k", "flush"], weir.uri("disk"));
        weir.stop();
        qemu_img(&directory, "check -q -f qcow2 DIR/disk.qcow2");
        qemu_io(["-f", "qcow2"], ["read -P 9 1M 100k", "read -P 0 0 1M"], text(&scratch.path("disk.qcow2")));
        // With data_file_raw=on the data file has the content of the disk.
        if raw == "on" {
            qemu_io(["-f", "raw"], ["read -P 9 1M 100k"], text(&scratch.path("disk.data")));
        }
    }
}

const OPENED: &str = "driver=qcow2,file.filename=DIR/e.qcow2,encrypt.key-secret=s";

fn encrypted(scratch: &Scratch, commands: &[&str]) {
    let secret = format!("secret,id=s,file={}", text(&scratch.path("key")));
    let opened = OPENED.replace("DIR", text(&scratch.path("")));
    qemu_io(["--object", &secret, "--image-opts"], commands, &opened);
}

#[test]
fn encrypted_images_are_served_with_their_passphrase() {
    let scratch = Scratch::new();
    let directory = scratch.path("");
    let key = scratch.file("key", "geheim");
    qemu_img(
        &directory,
        "create -q -f qcow2 --object secret,id=s,file=DIR/key -o \
         encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 DIR/e.qcow2 4M",
    );
    encrypted(&scratch, &["write -P 5 1M 1M"]);
    let weir = serve(&scratch, "e.qcow2").arg("--secret-file").arg(&key).start();
    qemu_io(
        ["-f", "raw"],
        ["read -P 5 1M 1M", "read -P 0 0 1M", "write -P 6 100 70000", "flush"],
        weir.uri("e"),
    );
    weir.stop();
    let secret = format!("secret,id=s,file={}", text(&key));
    let opened = OPENED.replace("DIR", text(&directory));
    harness::qemu_img(["check", "--object", &secret, "--image-opts", &opened]).succeeds();
    encrypted(&scratch, &["read -P 6 100 70000", "read -P 5 1M 1M", "read -P 0 0 100"]);
    let stderr = serve(&scratch, "e.qcow2").fails();
    assert_contains(&stderr, &["e.qcow2: is encrypted with LUKS", "--secret-file"]);
    // A trailing line break is a part of the passphrase.
    let wrong = scratch.file("wrong", "geheim\n");
    fs::set_permissions(&wrong, Permissions::from_mode(0o600)).unwrap();
    let stderr = serve(&scratch, "e.qcow2").arg("--secret-file").arg(wrong).fails();
    assert_contains(&stderr, &["the passphrase does not unlock any of its 1 key slots", "line break"]);
    let file = fs::File::open(&key).unwrap();
    // A descriptor that the program inherits; the standard library sets close-on-exec on its own.
    nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
    serve(&scratch, "e.qcow2").arg("--secret-fd").arg(file.as_raw_fd().to_string()).start().stop();
}

fn disk(qmp: &mut Qmp) -> Value {
    qmp.command("x-weir-query-status", json!({}))["disks"][0].take()
}

fn start_with_control(scratch: &Scratch, serve: Serve) -> (Weir, Qmp) {
    let socket = scratch.socket("qmp");
    let weir = serve.args(["--qmp", &format!("unix:{}", text(&socket))]).start();
    let qmp = Qmp::negotiated(&socket);
    (weir, qmp)
}

#[test]
fn caches_are_sized_counted_and_changed() {
    let scratch = Scratch::new();
    let directory = scratch.path("");
    qemu_img(&directory, "create -q -f qcow2 -o cluster_size=4k,preallocation=metadata DIR/disk.qcow2 64M");
    let (weir, mut qmp) =
        start_with_control(&scratch, serve(&scratch, "disk.qcow2").args(["--l2-cache-size", "16K"]));
    let uri = weir.uri("disk");
    // 16 KiB of entries cover 8 MiB, so a scan of 64 MiB must evict.
    qemu_io(["-f", "raw"], ["read 0 64M"], &uri);
    let small = disk(&mut qmp);
    assert_eq!((&small["format"], &small["l2-cache"]["limit"]), (&json!("qcow2"), &json!(16384)), "{small}");
    assert_eq!(small["l2-cache"]["covered"], 8 * MIB, "2048 cached entries cover 4 KiB each");
    assert!(small["l2-cache"]["evictions"].as_u64() > Some(0), "{small}");
    qmp.command("x-weir-set", json!({"name": "disk", "l2-cache-size": "full"}));
    qemu_io(["-f", "raw"], ["read 0 64M", "read 0 64M"], &uri);
    let full = disk(&mut qmp);
    assert_eq!(
        (&full["l2-cache"]["covered"], &full["l2-cache"]["evictions"]),
        (&json!(64 * MIB), &json!(0)),
        "{full}"
    );
    let (_, message) = qmp.command_error(
        "x-weir-set",
        json!({"name": "disk", "cache-size": 1 << 20, "refcount-cache-size": 65536}),
    );
    assert_contains(&message, &["cache-size, l2-cache-size and refcount-cache-size may not be set together"]);
    let shown = harness::weir(&["status", "--all", "--qmp"]);
    let shown = shown.arg(format!("unix:{}", text(&scratch.socket("qmp")))).succeeds();
    assert_contains(&shown, &["HITS", "COVERS", "100%"]);
    weir.stop();
}

#[test]
fn nodes_over_qcow2_are_added_and_deleted() {
    let scratch = Scratch::new();
    let directory = chain(&scratch);
    let key = scratch.file("key", "geheim");
    qemu_img(
        &directory,
        "create -q -f qcow2 --object secret,id=s,file=DIR/key -o \
         encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 DIR/e.qcow2 4M",
    );
    let serve = Serve::new(&scratch).args(["memory:1M", "--image-root"]).arg(&directory);
    let (weir, mut qmp) = start_with_control(&scratch, serve);
    let node = |name: &str, image: &str| {
        let file = json!({"driver": "file", "filename": scratch.path(image)});
        json!({"driver": "qcow2", "node-name": name, "file": file})
    };
    qmp.command("blockdev-add", node("top", "top.qcow2"));
    let export = |node: &str| json!({"type": "nbd", "id": node, "node-name": node, "writable": true});
    qmp.command("block-export-add", export("top"));
    qemu_io(["-f", "raw"], ["read -P 2 1M 1M", "write -P 8 0 64k"], weir.uri("top"));
    let blocks = qmp.command("query-block", json!({}));
    let top = blocks.as_array().unwrap().iter().find(|block| block["device"] == "top").unwrap();
    let inserted = &top["inserted"];
    assert_eq!(
        (&inserted["drv"], &inserted["backing_file_depth"]),
        (&json!("qcow2"), &json!(2)),
        "{inserted}"
    );
    assert_eq!(inserted["image"]["backing-filename"], "sub/middle.qcow2");
    assert_eq!(inserted["image"]["cluster-size"], 65536);
    assert_eq!(inserted["image"]["format-specific"]["data"]["refcount-bits"], 16);
    let (_, message) = qmp.command_error("blockdev-add", node("e", "e.qcow2"));
    assert_contains(&message, &["Could not open", "is encrypted with LUKS"]);
    qmp.command("object-add", json!({"qom-type": "secret", "id": "s0", "file": key}));
    let mut e = node("e", "e.qcow2");
    e["encrypt"] = json!({"format": "luks", "key-secret": "s0"});
    qmp.command("blockdev-add", e);
    // The open node keeps its key when the secret is removed.
    qmp.command("object-del", json!({"id": "s0"}));
    qmp.command("block-export-del", json!({"id": "top", "mode": "hard"}));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.command("blockdev-del", json!({"node-name": "top"}));
    // After the deletion the image is consistent and unlocked.
    qemu_img(&directory, "check -q -f qcow2 DIR/top.qcow2");
    qemu_io(["-f", "qcow2"], ["read -P 8 0 64k"], text(&scratch.path("top.qcow2")));
    weir.stop();
}

#[test]
fn bitmaps_are_metadata_contexts() {
    let scratch = Scratch::new();
    let directory = scratch.path("");
    qemu_img(&directory, "create -q -f qcow2 DIR/disk.qcow2 4M");
    qemu_img(&directory, "bitmap --add DIR/disk.qcow2 backup");
    let image = text(&scratch.path("disk.qcow2")).to_owned();
    qemu_io(["-f", "qcow2"], ["write -P 1 1M 128k", "write -P 1 3M 1"], &image);
    let stderr = serve(&scratch, "disk.qcow2").args(["--read-only", "--bitmap", "other"]).fails();
    assert_contains(&stderr, &["there is no bitmap \"other\""]);
    let (weir, mut qmp) = start_with_control(
        &scratch,
        serve(&scratch, "disk.qcow2").args(["--read-only", "--bitmap", "backup"]),
    );
    let extents = |export: &str| -> Vec<(u64, u64)> {
        let map = TestClient::new("nbdinfo")
            .args(["--json", "--map=qemu:dirty-bitmap:backup", &weir.uri(export)])
            .json();
        let extent =
            |extent: &Value| (extent["length"].as_u64().unwrap() >> 16, extent["type"].as_u64().unwrap());
        map.as_array().unwrap().iter().map(extent).collect()
    };
    assert_eq!(extents("disk"), [(16, 0), (2, 1), (30, 0), (1, 1), (15, 0)]);
    let listed = TestClient::new("nbdinfo").arg(weir.uri("disk")).succeeds();
    assert_contains(&listed, &["base:allocation", "qemu:dirty-bitmap:backup"]);
    let export =
        json!({"type": "nbd", "id": "e", "node-name": "disk", "name": "again", "bitmaps": ["backup"]});
    qmp.command("block-export-add", export);
    assert_eq!(extents("again").len(), 5);
    let export = json!({"type": "nbd", "id": "f", "node-name": "disk", "name": "f", "bitmaps": ["none"]});
    let (_, message) = qmp.command_error("block-export-add", export);
    assert_contains(&message, &["there is no bitmap \"none\""]);
    weir.stop();
    // After a read-only open the bitmap is still consistent.
    qemu_img(&directory, "bitmap --disable DIR/disk.qcow2 backup");
}

#[test]
fn qcow2_settings_are_rejected_for_raw() {
    let scratch = Scratch::new();
    let raw = scratch.sparse("disk.raw", MIB);
    let stderr =
        Serve::new(&scratch).arg(&raw).args(["--format", "raw", "--l2-cache-size", "1M"]).rejects_usage();
    assert_contains(&stderr, &["--l2-cache-size", "is for qcow2 images"]);
    let stderr = Serve::new(&scratch).arg(&raw).args(["--cache-size", "1M"]).fails();
    assert_contains(&stderr, &["--cache-size", "is for qcow2 images"]);
    let config = scratch.file(
        "weir.toml",
        "[disk.d]\n\
         image = \"disk.raw\"\n\
         l2-cache-size = \"full\"\n\
         refcount-cache-size = 1\n\
         cache-size = \"1M\"\n",
    );
    let stderr = Serve::new(&scratch).arg("--config").arg(config).fails();
    assert_contains(&stderr, &["weir.toml:5: disk.d.cache-size", "may not be set together"]);
}

#[test]
fn modified_backing_file_is_not_read() {
    let scratch = Scratch::new();
    let directory = chain(&scratch);
    let weir = serve(&scratch, "top.qcow2").start();
    let commands = ["read -P 1 0 1000k", "write -P 4 0 64k", "read -P 3 5M 100k"];
    qemu_io(["-f", "raw"], commands, weir.uri("top"));
    // Locks are advisory, so another process can write nevertheless.
    let base = fs::OpenOptions::new().write(true).open(scratch.path("base.raw")).unwrap();
    std::os::unix::fs::FileExt::write_at(&base, b"other", 512 << 10).unwrap();
    let line = weir.wait_for_log("was changed by another process");
    assert_contains(&line, &["base.raw"]);
    let uri = weir.uri("top");
    let refused = TestClient::new("qemu-io").args(["-f", "raw", "-c", "read 512k 64k", &uri]).run();
    assert_contains(&refused.stdout(), &["read failed: Input/output error"]);
    // Ranges that the overlay has allocated are still served.
    qemu_io(["-f", "raw"], ["read -P 4 0 64k", "write -P 5 5M 64k", "read -P 5 5M 64k", "flush"], &uri);
    weir.stop();
    qemu_img(&directory, "check -q -f qcow2 DIR/top.qcow2");
}
