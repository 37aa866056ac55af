//! A disk as a file whose requests come over io_uring. The tests of `fuse.rs` run over it too where
//! the kernel has it switched on, which these do not do themselves: others would be disturbed.
//!
//!     echo Y > /sys/module/fuse/parameters/enable_uring

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
};

use nix::libc;
use serde_json::{Value, json};

use crate::{
    fuse::{can_mount, is_mounted, spot, wait_until_unmounted},
    harness::{Client, MIB, Qmp, Scratch, Serve, assert_says, pattern, text},
};

pub(crate) fn is_switched_on() -> bool {
    fs::read("/sys/module/fuse/parameters/enable_uring").is_ok_and(|value| value.starts_with(b"Y"))
}

macro_rules! need_ring {
    () => {
        if !can_have_ring() {
            return;
        }
    };
}

#[allow(clippy::print_stderr, reason = "a test that does not run says so")]
fn can_have_ring() -> bool {
    if !is_switched_on() {
        eprintln!(
            "skipped: the kernel's FUSE has io_uring switched off, or does not know it (fuse.enable_uring)"
        );
    }
    is_switched_on() && can_mount()
}

fn serve(scratch: &Scratch, image: &Path, file: &Path) -> Serve {
    let control = format!("unix:{}", text(&scratch.socket("qmp")));
    Serve::new(scratch)
        .arg(image)
        .arg("--fuse")
        .arg(format!("{},io-uring", text(file)))
        .env("WEIR_QMP", control)
}

fn export(qmp: &mut Qmp) -> Value {
    let status = qmp.command("x-weir-query-status", json!({}));
    let exports = status["exports"].as_array().expect("a list");
    exports.iter().find(|export| export["type"] == "fuse").unwrap_or_else(|| panic!("{status}")).clone()
}

#[test]
fn it_is_used_where_the_kernel_has_it() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let file = spot(&scratch, "file");
    let image = scratch.filled("disk.raw", 4 * MIB);
    let weir = serve(&scratch, &image, &file).start();
    assert!(fs::read(&file).expect("it can be read") == pattern(4 * MIB as usize));
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    assert_eq!(export(&mut qmp)["io-uring"], json!(is_switched_on()));
    weir.stop();
    assert!(!is_mounted(&file));
}

#[test]
fn what_is_written_with_many_at_a_time_is_read_again() {
    need_ring!();
    let scratch = Scratch::new();
    let file = spot(&scratch, "file");
    let image = scratch.sparse("disk.raw", 64 * MIB);
    let weir = serve(&scratch, &image, &file).args(["--format", "raw"]).start();
    // No whole pages, and longer than one request may be; more at a time than there are entries.
    for (name, block) in [("small", "--bs=4608"), ("large", "--bs=1536k")] {
        Client::new("fio")
            .args(["--ioengine=io_uring", "--direct=1", "--rw=randrw", "--iodepth=64", block])
            .args(["--size=9M", "--offset_increment=9M", "--numjobs=4"])
            .args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--group_reporting"])
            .arg(format!("--name={name}"))
            .arg(format!("--filename={}", text(&file)))
            .arg(format!("--aux-path={}", scratch.path("").display()))
            .succeeds();
    }
    weir.stop();
}

#[test]
fn whoever_has_it_open_is_told_when_it_ends() {
    need_ring!();
    let scratch = Scratch::new();
    let file = spot(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    let weir = serve(&scratch, &image, &file).start();
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let opened = File::open(&file).expect("it is there");
    opened.read_exact_at(&mut [0; 512], 0).expect("it is served");
    let id = export(&mut qmp)["id"].clone();
    qmp.command("block-export-del", json!({ "id": id, "mode": "hard" }));
    qmp.event("BLOCK_EXPORT_DELETED");
    // The kernel keeps the entries, so somebody has to answer.
    for _ in 0..200 {
        let error = opened.read_at(&mut [0; 512], 0).expect_err("nobody serves it");
        let errors = [libc::ENOTCONN, libc::ECONNABORTED];
        assert!(error.raw_os_error().is_some_and(|errno| errors.contains(&errno)), "{error}");
    }
    let again = json!({ "type": "fuse", "id": "again", "node-name": "disk", "mountpoint": text(&file),
        "io-uring": true });
    qmp.command("block-export-add", again);
    assert!(fs::read(&file).expect("it can be read") == pattern(MIB as usize));
    drop(opened);
    assert!(fs::read(&file).expect("it can be read") == pattern(MIB as usize));
    assert_eq!(export(&mut qmp)["io-uring"], true);
    weir.stop();
}

#[test]
fn a_connection_that_is_cut_ends_it() {
    need_ring!();
    let scratch = Scratch::new();
    let file = spot(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    let weir = serve(&scratch, &image, &file).args(["--iops-total", "10"]).start();
    let opened = File::open(&file).expect("it is there");
    let device =
        fs::metadata(&file).map(|file| std::os::unix::fs::MetadataExt::dev(&file)).expect("it is there");
    // Some wait for their limit meanwhile.
    let load = Client::new("fio")
        .args([
            "--name=cut",
            "--ioengine=io_uring",
            "--direct=1",
            "--rw=randread",
            "--iodepth=16",
            "--size=1M",
        ])
        .args(["--time_based", "--runtime=600", &format!("--filename={}", text(&file))]);
    let load = std::thread::spawn(move || drop(load.fails()));
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    while export(&mut qmp)["in-flight"].as_u64() < Some(8) {
        std::thread::yield_now();
    }
    let connections = Path::new("/sys/fs/fuse/connections");
    if !connections.join(device.to_string()).exists() {
        Client::new("mount").args(["-t", "fusectl", "none", text(connections)]).succeeds();
    }
    fs::write(connections.join(format!("{device}/abort")), "1").expect("it is there, and ours");
    weir.wait_for_log("the file was unmounted from outside");
    load.join().expect("it ends");
    opened.read_at(&mut [0; 512], 0).expect_err("it was cut");
    drop(opened);
    wait_until_unmounted(&file);
    // The disk is served on.
    weir.nbdsh("disk", "assert h.get_size() == 1 << 20");
    weir.stop();
}

#[test]
fn a_newcomer_is_told_that_it_cannot_go_on_with_it() {
    need_ring!();
    let scratch = Scratch::new();
    let file = spot(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    let weir = serve(&scratch, &image, &file).start();
    let said = serve(&scratch, &image, &file).arg("--takeover").fails();
    assert_says(&said, &["come over io_uring", "restart weir, or serve it without io-uring"]);
    assert!(fs::read(&file).expect("it can be read") == pattern(MIB as usize));
    weir.stop();
    assert!(!is_mounted(&file));
}
