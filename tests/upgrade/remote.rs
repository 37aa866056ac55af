//! Upgrades with disks on other NBD servers: each process has its own connection, and the server
//! must guarantee that both see the same data.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{CONTINUES, FORMAT, UpgradePeer, UpgradedDaemon, control, load, proxy::UpgradeStep};
use crate::harness::{MIB, Scratch, Serve, TestClient, need, pause, qemu_img, text, weir};

#[test]
fn remote_disk_changes_its_connection() {
    for format in ["raw", "qcow2"] {
        let (behind, scratch) = (Scratch::new(), Scratch::new());
        let image = behind.path("image");
        qemu_img(["create", "-q", "-f", format, text(&image), "17M"]).succeeds();
        let grown = format == "qcow2";
        if grown {
            // An export does not grow by writes.
            let file = fs::File::options().write(true).open(&image).unwrap();
            file.set_len(32 * MIB).unwrap();
        }
        let server = Serve::new(&behind).args(["-f", "raw", "--name", "back", text(&image)]).start();
        let arguments = [&server.uri("back"), "--name", "disk", "-f", format, "--iops-total", "2000"];
        let house = UpgradedDaemon::new(scratch, &arguments);
        let mut current = house.serve().start();
        let load = load(current.uri("disk"), &house.scratch, 0, 1);
        let mut turn = 0;
        while !load.is_finished() || turn < UpgradeStep::ALL.len() {
            house.fail_at(turn);
            current.wait_for_log(CONTINUES);
            current = house.upgrade(current).0;
            turn += 1;
        }
        load.join().expect("the load was not disturbed");
        current.nbdsh("disk", "h.pwrite(b'x' * 512, 16 << 20)");
        current.stop();
        server.stop();
        if grown {
            qemu_img(["check", "-q", text(&image)]).succeeds();
        }
        TestClient::new("qemu-io").args(["-f", format]).run_qemu_io(["read -P 0x78 16M 512"], text(&image));
    }
}

/// A server that ends on drop.
struct NbdkitServer {
    process: Pid,
    uri: String,
}

impl NbdkitServer {
    fn start(scratch: &Scratch, words: &[&str]) -> Self {
        need("nbdkit");
        let (at, pid) = (scratch.socket("nbdkit"), scratch.path("pid"));
        TestClient::new("nbdkit").args(["-U", text(&at), "-P", text(&pid)]).args(words).succeeds();
        // Written by the background process, possibly after the starter has exited.
        let process = loop {
            match fs::read_to_string(&pid).ok().filter(|text| text.ends_with('\n')) {
                Some(text) => break text.trim().parse().expect("a number"),
                None => pause(),
            }
        };
        Self { process: Pid::from_raw(process), uri: format!("nbd+unix:///?socket={}", text(&at)) }
    }
}

impl Drop for NbdkitServer {
    fn drop(&mut self) {
        let _ = kill(self.process, Signal::SIGTERM);
    }
}

#[test]
fn server_without_multi_conn_prevents_the_upgrade() {
    let (behind, scratch) = (Scratch::new(), Scratch::new());
    let back =
        Serve::new(&behind).args(["-f", "raw", "--name", "back"]).arg(behind.sparse("image", MIB)).start();
    // Without a flush, another connection need not see an acknowledged write.
    for cache in ["unsafe", "writeback"] {
        let server = back.uri("back");
        let house =
            UpgradedDaemon::new(Scratch::new(), &[&server, "--name", "disk", "-f", "raw", "--cache", cache]);
        let first = house.serve().start();
        first.nbdsh("disk", "h.pwrite(b'x' * 512, 0)\n");
        if cache == "unsafe" {
            let said = house.new_process().fails();
            assert!(
                said.contains(
                    "disk disk: cannot be taken over (remove it with `weir disk remove`, or \
                     restart weir): its image is at an NBD server"
                ),
                "{said}"
            );
            first.nbdsh("disk", "assert h.pread(512, 0) == b'x' * 512\n");
            first.stop();
        } else {
            house.upgrade(first).0.stop();
        }
    }
    let server =
        NbdkitServer::start(&scratch, &["--filter=multi-conn", "memory", "1M", "multi-conn-mode=disable"]);
    let house = UpgradedDaemon::new(scratch, &[&server.uri, "--name", "disk", "-f", "raw"]);
    let first = house.serve().start();
    let said = house.new_process().fails();
    assert!(said.contains("at an NBD server without CAN_MULTI_CONN"), "{said}");
    first.nbdsh("disk", "h.pwrite(b'x' * 512, 0)\n");
    first.stop();
}

/// A server with an image of 1 MiB, and the path of a pipe: while it exists, a flush waits until
/// the pipe is opened for writing.
fn holding(scratch: &Scratch) -> (NbdkitServer, PathBuf) {
    let (image, held) = (scratch.sparse("image", MIB), scratch.path("held"));
    let plugin = scratch.file(
        "plugin",
        format!(
            r#"#!/bin/sh
case "$1" in
    thread_model) echo parallel ;;
    get_size) echo {MIB} ;;
    can_write | can_flush | can_multi_conn) exit 0 ;;
    can_fua) echo emulate ;;
    pread) dd if={image} iflag=skip_bytes,count_bytes skip="$4" count="$3" status=none ;;
    pwrite) dd of={image} oflag=seek_bytes conv=notrunc seek="$4" status=none ;;
    flush) [ ! -p {held} ] || cat {held} >/dev/null ;;
    *) exit 2 ;;
esac
"#,
            image = text(&image),
            held = text(&held)
        ),
    );
    fs::set_permissions(&plugin, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    (NbdkitServer::start(scratch, &["sh", text(&plugin)]), held)
}

fn hold(held: &Path) {
    nix::unistd::mkfifo(held, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

/// Releases the waiting flush; later ones do not wait.
fn release_flush(held: &Path) {
    let held_up = fs::File::options().write(true).open(held).unwrap();
    fs::remove_file(held).unwrap();
    drop(held_up);
}

#[test]
fn blocked_flush_delays_no_other_client() {
    let scratch = Scratch::new();
    let (server, held) = holding(&scratch);
    let house = UpgradedDaemon::new(scratch, &[&server.uri, "--name", "disk", "-f", "raw"]);
    let first = house.serve().start();
    first.nbdsh("disk", "h.pwrite(b'x' * 512, 0)");
    hold(&held);
    std::thread::scope(|scope| {
        let newcomer = scope.spawn(|| house.new_process().args(["--log", "warn"]).fails());
        first.wait_for_log("an upgrade to a new process begins");
        first.nbdsh("disk", "assert h.pread(512, 0) == b'x' * 512");
        let said = newcomer.join();
        release_flush(&held);
        let said = said.unwrap();
        assert!(said.contains("disk disk: its storage takes too long to write buffered data"), "{said}");
    });
    first.nbdsh("disk", "assert h.pread(512, 0) == b'x' * 512");
    house.upgrade(first).0.stop();
}

/// The disk is in no list any more; its unwritten data would be lost with the old process.
#[test]
fn a_disk_that_is_being_removed_is_closed_first() {
    let scratch = Scratch::new();
    let (server, held) = holding(&scratch);
    let plain = scratch.sparse("plain.raw", MIB);
    let house = UpgradedDaemon::new(scratch, &[text(&plain), "--sandbox", "off"]);
    let first = house.serve().start();
    let ask = |words: &[&str]| weir(words).env("WEIR_QMP", control(&house));
    ask(&["disk", "add", "held", &server.uri, "-f", "raw"]).succeeds();
    first.nbdsh("held", "h.pwrite(b'x' * 512, 0)");
    hold(&held);
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| ask(&["disk", "remove", "held"]).succeeds());
        let is_listed = || ask(&["status", "--interval", "0"]).succeeds().contains("held");
        while is_listed() {
            pause();
        }
        let said = house.new_process().args(["--log", "warn"]).fails();
        release_flush(&held);
        assert!(said.contains("disk held is being removed at this moment"), "{said}");
        first.wait_for_log("upgrade rejected, this process continues");
        removal.join().unwrap();
    });
    house.upgrade(first).0.stop();
}

#[test]
fn unreadable_image_after_a_failed_upgrade_is_retried() {
    let scratch = Scratch::new();
    let image = scratch.path("image");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "1M"]).succeeds();
    // An export does not grow by writes.
    fs::File::options().write(true).open(&image).unwrap().set_len(4 * MIB).unwrap();
    let bad = scratch.path("bad");
    let while_bad = format!("error-file={}", text(&bad));
    let fails = ["error-pread=EIO", "error-pread-rate=100%", &while_bad];
    let server =
        NbdkitServer::start(&scratch, &[&["--filter=error", "file", text(&image)], &fails[..]].concat());
    let house = UpgradedDaemon::new(scratch, &[&server.uri, "--name", "disk", "-f", "qcow2"]);
    let first = house.serve().start();
    first.nbdsh("disk", "h.pwrite(b'x' * 65536, 0)");
    let mut stranger = UpgradePeer::ask(&house.control(), FORMAT).expect("it may");
    stranger.receive();
    stranger.send("prepared");
    // The daemon is suspended.
    stranger.receive();
    fs::write(&bad, "").unwrap();
    drop(stranger);
    first.wait_for_log("cannot be read again after the takeover that failed");
    first.nbdsh("disk", "h.pwrite(b'y' * 512, 512)");
    fs::remove_file(&bad).unwrap();
    first.wait_for_log("its image can be read again");
    let read = "assert h.pread(1024, 0) == b'x' * 512 + b'y' * 512";
    first.nbdsh("disk", read);
    let (second, _) = house.upgrade(first);
    second.nbdsh("disk", read);
    second.stop();
}

#[test]
fn new_process_ends_after_the_old_one_gives_up() {
    let (behind, scratch) = (Scratch::new(), Scratch::new());
    let back =
        Serve::new(&behind).args(["-f", "raw", "--name", "back"]).arg(behind.sparse("image", MIB)).start();
    let near = scratch.sparse("near.raw", MIB);
    let config = scratch.file(
        "weir.toml",
        format!(
            "[disk.far]\nimage = \"{}\"\nformat = \"raw\"\nopen-timeout = \"1h\"\nreconnect-delay = \"1h\"\n\
             [disk.near]\nimage = \"{}\"\nformat = \"raw\"\n",
            back.uri("back"),
            text(&near)
        ),
    );
    let house = UpgradedDaemon::new(scratch, &["--config", text(&config)]);
    let old = house.serve().start();
    back.crash();
    let new = house.new_process().spawn_unready();
    old.wait_for_log("an upgrade to a new process begins");
    new.wait_for_log("still being opened, and waited for");
    // As after its time limit of a minute: the channel to the new process is closed.
    old.crash();
    let (status, said) = new.wait();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("the old process ended or gave up the upgrade"), "{said}");
}
