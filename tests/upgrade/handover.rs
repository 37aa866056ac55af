//! Images that are handed over between hosts (`--handover`): an upgrade keeps the locks of images
//! in use by a front end, and does not lock unused ones.

use std::{
    fs::File,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};

use super::{UPGRADE_FAILED, UpgradedDaemon, control, proxy::UpgradeStep};
use crate::{
    bench::bench,
    harness::{MIB, Scratch, Serve, qemu_img, text},
};

/// True if the image is open for writing, according to QEMU's lock bytes.
fn is_locked(image: &File) -> bool {
    const WRITES: i64 = 101;
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: WRITES,
        l_len: 1,
        l_pid: 0,
    };
    fcntl(image, FcntlArg::F_OFD_GETLK(&mut lock)).unwrap();
    lock.l_type != libc::F_UNLCK as i16
}

fn image(path: &Path) {
    qemu_img(["create", "-q", "-f", "qcow2", text(path), "4M"]).succeeds();
    qemu_img(["bitmap", "--add", "-g", "64k", text(path), "b"]).succeeds();
}

#[test]
fn lock_of_a_handover_image_in_use_is_kept() {
    let scratch = Scratch::new();
    let (disk, socket) = (scratch.path("disk.qcow2"), scratch.socket("machine"));
    image(&disk);
    let listen_option = format!("unix:{},queues=2", text(&socket));
    let arguments = [text(&disk), "-f", "qcow2", "--handover", "--vhost-user-blk", &listen_option];
    let fixture = UpgradedDaemon::new(scratch, &[&arguments[..], &["--iops-total", "1000"]].concat());
    let mut current = fixture.serve().start();
    let file = File::options().read(true).write(true).open(&disk).unwrap();
    assert!(!is_locked(&file), "the image is locked without a front end");
    current = fixture.upgrade(current).0;
    assert!(!is_locked(&file), "the image is locked after the upgrade without a front end");
    let stopped = Arc::new(AtomicBool::new(false));
    let load = {
        let (target, stopped) = (format!("vhost-user:{}", text(&socket)), Arc::clone(&stopped));
        thread::spawn(move || {
            bench("-w --pattern 90 -c 2048 -d 24 -s 2K --flush-interval 100", &target).succeeds();
            stopped.store(true, SeqCst);
        })
    };
    while !is_locked(&file) {
        thread::yield_now();
    }
    let watch = {
        let stopped = Arc::clone(&stopped);
        // True if the image was unlocked while the front end ran: it is locked again, or the load
        // continues.
        thread::spawn(move || {
            while is_locked(&file) {
                thread::yield_now();
            }
            while !stopped.load(SeqCst) {
                if is_locked(&file) {
                    return true;
                }
                thread::yield_now();
            }
            false
        })
    };
    let mut round = 0;
    while !stopped.load(SeqCst) || round < UpgradeStep::ALL.len() {
        fixture.fail_at(round);
        current.wait_for_log(UPGRADE_FAILED);
        current = fixture.upgrade(current).0;
        round += 1;
    }
    load.join().expect("the front end was not disturbed");
    assert!(!watch.join().unwrap(), "the image was unlocked for a moment");
    // The image is unlocked and complete while the daemon runs.
    let file = File::options().read(true).write(true).open(&disk).unwrap();
    while is_locked(&file) {
        thread::yield_now();
    }
    qemu_img(["check", "-q", text(&disk)]).succeeds();
    let copy = fixture.scratch.path("copy.raw");
    qemu_img(["convert", "-O", "raw", text(&disk), text(&copy)]).succeeds();
    assert!(std::fs::read(copy).unwrap() == vec![90; 4 * MIB as usize], "{round} upgrades");
    let info = qemu_img(["info", "--output=json", text(&disk)]).json();
    let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
    assert_eq!(bitmap["flags"], serde_json::json!(["auto"]), "{info}");
    current.stop();
    let map = crate::qcow2_bitmaps::map_of(
        "b",
        &["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", "b", text(&disk), "]"],
    );
    let map: serde_json::Value = serde_json::from_str(&map).unwrap();
    assert_eq!((&map[0]["length"], &map[0]["type"]), (&(4 * MIB).into(), &1.into()), "{map}");
}

#[test]
fn handover_must_match_in_both_processes() {
    let scratch = Scratch::new();
    let disk = scratch.sparse("disk.raw", MIB);
    let listen_option = format!("unix:{}", text(&scratch.socket("machine")));
    let arguments = [text(&disk), "-f", "raw", "--vhost-user-blk", &listen_option];
    let fixture = UpgradedDaemon::new(scratch, &arguments);
    let first = fixture.serve().start();
    let new_process = Serve::new(&fixture.scratch).args(arguments).args(["--handover", "--takeover"]);
    let stderr = new_process.env("WEIR_QMP", control(&fixture)).fails();
    assert!(
        stderr.contains(
            "disk disk: the running daemon serves it without handover (use the same setting, or restart)"
        ),
        "{stderr}"
    );
    first.nbdsh("disk", "h.pwrite(b'x' * 512, 0)\n");
    first.stop();
}
