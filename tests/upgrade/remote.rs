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

use super::{FORMAT, UPGRADE_FAILED, UpgradePeer, UpgradedDaemon, control, load, proxy::UpgradeStep};
use crate::harness::{MIB, Scratch, Serve, TestClient, need, pause, qemu_img, text, weir};

#[test]
fn remote_disk_changes_its_connection() {
    for format in ["raw", "qcow2"] {
        let (server_scratch, scratch) = (Scratch::new(), Scratch::new());
        let image = server_scratch.path("image");
        qemu_img(["create", "-q", "-f", format, text(&image), "17M"]).succeeds();
        let grown = format == "qcow2";
        if grown {
            // An export does not grow by writes.
            let file = fs::File::options().write(true).open(&image).unwrap();
            file.set_len(32 * MIB).unwrap();
        }
        let server = Serve::new(&server_scratch).args(["-f", "raw", "--name", "back", text(&image)]).start();
        let arguments = [&server.uri("back"), "--name", "disk", "-f", format, "--iops-total", "2000"];
        let fixture = UpgradedDaemon::new(scratch, &arguments);
        let mut current = fixture.serve().start();
        let load = load(current.uri("disk"), &fixture.scratch, 0, 1);
        let mut round = 0;
        while !load.is_finished() || round < UpgradeStep::ALL.len() {
            fixture.fail_at(round);
            current.wait_for_log(UPGRADE_FAILED);
            current = fixture.upgrade(current).0;
            round += 1;
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
    fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        need("nbdkit");
        let (at, pid) = (scratch.socket("nbdkit"), scratch.path("pid"));
        TestClient::new("nbdkit").args(["-U", text(&at), "-P", text(&pid)]).args(arguments).succeeds();
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
    let (server_scratch, scratch) = (Scratch::new(), Scratch::new());
    let back_server = Serve::new(&server_scratch)
        .args(["-f", "raw", "--name", "back"])
        .arg(server_scratch.sparse("image", MIB))
        .start();
    // Without a flush, another connection need not see an acknowledged write.
    for cache in ["unsafe", "writeback"] {
        let server = back_server.uri("back");
        let fixture =
            UpgradedDaemon::new(Scratch::new(), &[&server, "--name", "disk", "-f", "raw", "--cache", cache]);
        let first = fixture.serve().start();
        first.nbdsh("disk", "h.pwrite(b'x' * 512, 0)\n");
        if cache == "unsafe" {
            let stderr = fixture.new_process().fails();
            assert!(
                stderr.contains(
                    "disk disk: cannot be taken over (remove it with `weir disk remove`, or \
                     restart weir): its image is on an NBD server"
                ),
                "{stderr}"
            );
            first.nbdsh("disk", "assert h.pread(512, 0) == b'x' * 512\n");
            first.stop();
        } else {
            fixture.upgrade(first).0.stop();
        }
    }
    let server =
        NbdkitServer::start(&scratch, &["--filter=multi-conn", "memory", "1M", "multi-conn-mode=disable"]);
    let fixture = UpgradedDaemon::new(scratch, &[&server.uri, "--name", "disk", "-f", "raw"]);
    let first = fixture.serve().start();
    let stderr = fixture.new_process().fails();
    assert!(stderr.contains("on an NBD server without NBD_FLAG_CAN_MULTI_CONN"), "{stderr}");
    first.nbdsh("disk", "h.pwrite(b'x' * 512, 0)\n");
    first.stop();
}

/// A server with an image of 1 MiB, and the path of a pipe: while it exists, a flush waits until
/// the pipe is opened for writing.
fn server_with_blockable_flush(scratch: &Scratch) -> (NbdkitServer, PathBuf) {
    let (image, pipe) = (scratch.sparse("image", MIB), scratch.path("held"));
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
    flush) [ ! -p {pipe} ] || cat {pipe} >/dev/null ;;
    *) exit 2 ;;
esac
"#,
            image = text(&image),
            pipe = text(&pipe)
        ),
    );
    fs::set_permissions(&plugin, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    (NbdkitServer::start(scratch, &["sh", text(&plugin)]), pipe)
}

fn create_pipe(pipe: &Path) {
    nix::unistd::mkfifo(pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

/// Releases the waiting flush; later ones do not wait.
fn release_flush(pipe: &Path) {
    let writer = fs::File::options().write(true).open(pipe).unwrap();
    fs::remove_file(pipe).unwrap();
    drop(writer);
}

#[test]
fn blocked_flush_delays_no_other_client() {
    let scratch = Scratch::new();
    let (server, pipe) = server_with_blockable_flush(&scratch);
    let fixture = UpgradedDaemon::new(scratch, &[&server.uri, "--name", "disk", "-f", "raw"]);
    let first = fixture.serve().start();
    first.nbdsh("disk", "h.pwrite(b'x' * 512, 0)");
    create_pipe(&pipe);
    std::thread::scope(|scope| {
        let new_process = scope.spawn(|| fixture.new_process().args(["--log", "warn"]).fails());
        first.wait_for_log("an upgrade to a new process begins");
        first.nbdsh("disk", "assert h.pread(512, 0) == b'x' * 512");
        let stderr = new_process.join();
        release_flush(&pipe);
        let stderr = stderr.unwrap();
        assert!(stderr.contains("disk disk: its storage takes too long to write buffered data"), "{stderr}");
    });
    first.nbdsh("disk", "assert h.pread(512, 0) == b'x' * 512");
    fixture.upgrade(first).0.stop();
}

/// The disk is in no list any more; its unwritten data would be lost with the old process.
#[test]
fn disk_being_removed_is_closed_before_the_upgrade() {
    let scratch = Scratch::new();
    let (server, pipe) = server_with_blockable_flush(&scratch);
    let plain = scratch.sparse("plain.raw", MIB);
    let fixture = UpgradedDaemon::new(scratch, &[text(&plain), "--sandbox", "off"]);
    let first = fixture.serve().start();
    let command = |arguments: &[&str]| weir(arguments).env("WEIR_QMP", control(&fixture));
    command(&["disk", "add", "held", &server.uri, "-f", "raw"]).succeeds();
    first.nbdsh("held", "h.pwrite(b'x' * 512, 0)");
    create_pipe(&pipe);
    std::thread::scope(|scope| {
        let removal = scope.spawn(|| command(&["disk", "remove", "held"]).succeeds());
        let is_listed = || command(&["status", "--interval", "0"]).succeeds().contains("held");
        while is_listed() {
            pause();
        }
        let stderr = fixture.new_process().args(["--log", "warn"]).fails();
        release_flush(&pipe);
        assert!(stderr.contains("held is being removed at this moment"), "{stderr}");
        first.wait_for_log("upgrade rejected, this process continues");
        removal.join().unwrap();
    });
    fixture.upgrade(first).0.stop();
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
    let fixture = UpgradedDaemon::new(scratch, &[&server.uri, "--name", "disk", "-f", "qcow2"]);
    let first = fixture.serve().start();
    first.nbdsh("disk", "h.pwrite(b'x' * 65536, 0)");
    let mut peer =
        UpgradePeer::connect(&fixture.control(), FORMAT).expect("the daemon accepts the upgrade request");
    peer.receive();
    peer.send("prepared");
    // The daemon is suspended.
    peer.receive();
    fs::write(&bad, "").unwrap();
    drop(peer);
    first.wait_for_log("cannot be read again after the takeover that failed");
    first.nbdsh("disk", "h.pwrite(b'y' * 512, 512)");
    fs::remove_file(&bad).unwrap();
    first.wait_for_log("its image can be read again");
    let read = "assert h.pread(1024, 0) == b'x' * 512 + b'y' * 512";
    first.nbdsh("disk", read);
    let (second, _) = fixture.upgrade(first);
    second.nbdsh("disk", read);
    second.stop();
}

#[test]
fn new_process_ends_after_the_old_one_gives_up() {
    let (server_scratch, scratch) = (Scratch::new(), Scratch::new());
    let back_server = Serve::new(&server_scratch)
        .args(["-f", "raw", "--name", "back"])
        .arg(server_scratch.sparse("image", MIB))
        .start();
    let local_image = scratch.sparse("near.raw", MIB);
    let config = scratch.file(
        "weir.toml",
        format!(
            "[disk.far]\nimage = \"{}\"\nformat = \"raw\"\nopen-timeout = \"1h\"\nreconnect-delay = \"1h\"\n\
             [disk.near]\nimage = \"{}\"\nformat = \"raw\"\n",
            back_server.uri("back"),
            text(&local_image)
        ),
    );
    let fixture = UpgradedDaemon::new(scratch, &["--config", text(&config)]);
    let old = fixture.serve().start();
    back_server.crash();
    let new = fixture.new_process().spawn_unready();
    old.wait_for_log("an upgrade to a new process begins");
    new.wait_for_log("its image is still being opened");
    // As after its time limit of a minute: the channel to the new process is closed.
    old.crash();
    let (status, log) = new.wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("the old process ended or gave up the upgrade"), "{log}");
}
