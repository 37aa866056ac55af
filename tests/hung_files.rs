//! An image on a file system that stops answering: its clients wait, and nothing else is delayed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::harness::{
    MIB, Qmp, RawNbdClient, Scratch, Serve, TestClient, WEIR, Weir,
    fuse_server::{ALL, FALLOCATE, FSYNC, FuseServer, GETATTR, LSEEK, READ, WRITE},
    qemu_img, text,
    wire::{CMD_BLOCK_STATUS, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, FLAG_FUA, RawNbdRequest},
};

const BYTES: u64 = 16 * MIB;
/// With `REQUESTS`, more requests than the kernel's default number of threads for file I/O.
const CLIENTS: u64 = 8;
const REQUESTS: u64 = 16;
/// NBD_EIO.
const EIO: u32 = 5;

/// A daemon with disk `a`, and disk `h` on the file system that can be stopped.
struct HungFileDaemon {
    // Dropped before the daemon, which cannot exit while its requests are blocked.
    fuse: FuseServer,
    weir: Weir,
    scratch: Scratch,
}

impl HungFileDaemon {
    fn new(more: &[&str]) -> Self {
        let scratch = Scratch::new();
        let fuse = FuseServer::mount(&scratch.path("mount"), BYTES as usize);
        let a = scratch.sparse("a.raw", BYTES);
        let control = format!("unix:{}", text(&scratch.socket("control")));
        let weir = Serve::new(&scratch)
            .args([text(&a), text(&fuse.file()), "--format", "raw", "--workers", "2", "--qmp", &control])
            .args(more)
            .start();
        Self { fuse, weir, scratch }
    }

    fn control(&self) -> PathBuf {
        self.scratch.socket("control")
    }

    fn clients(&self, disk: &str) -> Vec<RawNbdClient> {
        (0..CLIENTS).map(|_| RawNbdClient::negotiated(self.weir.socket(), disk).0).collect()
    }

    /// Asserts that a connected client, a new client and the control socket are served.
    #[track_caller]
    fn assert_others_served(&self, client: &mut RawNbdClient) {
        use_all_commands(client);
        use_all_commands(&mut RawNbdClient::negotiated(self.weir.socket(), "a").0);
        let mut control = Qmp::negotiated(&self.control());
        for command in ["query-block", "query-named-block-nodes", "query-blockstats", "x-weir-query-status"] {
            let reply = control.command_reply(command, json!({}));
            assert!(reply["return"].to_string().contains("\"h\""), "{command}: {reply}");
        }
    }
}

fn request(kind: u16, flags: u16, offset: u64, length: u64) -> RawNbdRequest {
    RawNbdRequest { flags, kind, cookie: offset, offset, length }
}

#[track_caller]
pub(crate) fn use_all_commands(client: &mut RawNbdClient) {
    assert_eq!(client.read(4096, 4096).map(|data| data.len()), Ok(4096));
    for (kind, flags, length) in [(CMD_WRITE, FLAG_FUA, 512), (CMD_TRIM, 0, 65_536), (CMD_FLUSH, 0, 0)] {
        let payload = vec![7; if kind == CMD_WRITE { 512 } else { 0 }];
        client.request(request(kind, flags, 0, length), &payload);
        assert_eq!(client.simple_reply(), (0, 0), "request {kind}");
    }
}

/// Clients of `h` send requests of `kind` with this length, while the file system blocks requests
/// of kind `held`. Disk `a` and the control socket are used meanwhile.
fn test_hung_requests(held: u32, kind: u16, length: u64) {
    let daemon = HungFileDaemon::new(&[]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    let mut clients = daemon.clients("h");
    daemon.fuse.block_requests(&[held]);
    for (number, client) in (0..).zip(&mut clients) {
        for round in 0..REQUESTS {
            let offset = if kind == CMD_FLUSH { 0 } else { (number * REQUESTS + round) * 65_536 };
            let payload = vec![7; if kind == CMD_WRITE { length as usize } else { 0 }];
            client.request(request(kind, 0, offset, length), &payload);
        }
    }
    daemon.fuse.wait_until_blocked(held);
    daemon.assert_others_served(&mut other);
    daemon.fuse.unblock();
    for client in &mut clients {
        for _ in 0..REQUESTS {
            assert_eq!(client.simple_reply().0, 0);
            if kind == CMD_READ {
                client.receive_many(length as u32);
            }
        }
    }
    drop((clients, other));
    daemon.weir.stop();
}

#[test]
fn hung_reads_delay_no_other_disk() {
    test_hung_requests(READ, CMD_READ, 4096);
}

#[test]
fn hung_writes_delay_no_other_disk() {
    test_hung_requests(WRITE, CMD_WRITE, 4096);
}

#[test]
fn hung_discards_delay_no_other_disk() {
    test_hung_requests(FALLOCATE, CMD_TRIM, 4096);
}

#[test]
fn hung_flushes_delay_no_other_disk() {
    let daemon = HungFileDaemon::new(&[]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    let mut clients = daemon.clients("h");
    daemon.fuse.block_requests(&[FSYNC]);
    // Writes come first: the kernel blocks writes to a file during its fsync.
    for client in &mut clients {
        client.request(request(CMD_WRITE, 0, 0, 512), &[7; 512]);
        assert_eq!(client.simple_reply(), (0, 0));
    }
    for client in &mut clients {
        client.request(request(CMD_FLUSH, 0, 0, 0), &[]);
    }
    daemon.fuse.wait_until_blocked(FSYNC);
    daemon.assert_others_served(&mut other);
    daemon.fuse.unblock();
    clients.iter_mut().for_each(|client| assert_eq!(client.simple_reply(), (0, 0)));
    drop((clients, other));
    daemon.weir.stop();
}

#[test]
fn flush_fails_although_a_synchronous_write_collected_the_error() {
    let daemon = HungFileDaemon::new(&[]);
    let mut client = RawNbdClient::negotiated(daemon.weir.socket(), "h").0;
    client.request(request(CMD_WRITE, 0, 0, 512), &[7; 512]);
    assert_eq!(client.simple_reply(), (0, 0));
    daemon.fuse.fail_once(FSYNC);
    client.request(request(CMD_WRITE, FLAG_FUA, 65_536, 512), &[7; 512]);
    assert_eq!(client.simple_reply(), (EIO, 65_536));
    // The kernel reports a writeback error once, so a later flush must fail too: data may be lost.
    client.request(request(CMD_FLUSH, 0, 0, 0), &[]);
    assert_eq!(client.simple_reply().0, EIO);
    drop(client);
    let (status, log) = daemon.weir.wait_signalling(Signal::SIGTERM);
    assert!(!status.success() && log.contains("the last flush failed"), "{log}");
}

#[test]
fn hung_block_status_delays_no_other_disk() {
    let daemon = HungFileDaemon::new(&[]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    let mut clients: Vec<_> =
        (0..CLIENTS).map(|_| RawNbdClient::negotiated_extended(daemon.weir.socket(), "h").0).collect();
    daemon.fuse.block_requests(&[LSEEK]);
    for client in &mut clients {
        client.send(&request(CMD_BLOCK_STATUS, 0, 0, MIB).extended());
    }
    daemon.fuse.wait_until_blocked(LSEEK);
    daemon.assert_others_served(&mut other);
    daemon.fuse.unblock();
    for client in &mut clients {
        client.chunk();
    }
    drop((clients, other));
    daemon.weir.stop();
}

#[test]
fn handshake_uses_the_last_known_size_of_a_hung_file() {
    let daemon = HungFileDaemon::new(&["--http", "127.0.0.1:0"]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    daemon.fuse.block_requests(&[GETATTR]);
    let clients: Vec<_> = (0..CLIENTS).map(|_| RawNbdClient::negotiated(daemon.weir.socket(), "h")).collect();
    daemon.fuse.wait_until_blocked(GETATTR);
    assert!(clients.iter().all(|(_, size)| *size == BYTES));
    daemon.assert_others_served(&mut other);
    daemon.fuse.unblock();
    drop((clients, other));
    daemon.weir.stop();
}

#[test]
fn signal_ends_the_daemon_despite_a_hung_file_system() {
    let daemon = HungFileDaemon::new(&[]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    let mut client = RawNbdClient::negotiated(daemon.weir.socket(), "h").0;
    daemon.fuse.block_requests(&ALL);
    // Not at either end of the file, which the open has read into the page cache.
    client.request(request(CMD_READ, 0, BYTES / 2, 4096), &[]);
    client.request(request(CMD_WRITE, 0, 4096, 512), &[7; 512]);
    daemon.fuse.wait_until_blocked(READ);
    other.request(request(CMD_WRITE, 0, 0, 512), &[9; 512]);
    assert_eq!(other.simple_reply(), (0, 0));
    daemon.weir.signal(Signal::SIGTERM);
    daemon.weir.wait_for_log("the file system does not answer: the disk is abandoned");
    daemon.weir.wait_for_log("the last flush failed");
    daemon.weir.wait_for_log("stopped");
    // The kernel delays the exit of a process with requests in flight at its file system.
    drop(daemon.fuse);
    let (status, log) = daemon.weir.wait();
    assert!(!status.success(), "{log}");
    assert_eq!(fs::read(daemon.scratch.path("a.raw")).expect("the file exists")[..512], [9; 512]);
}

#[test]
fn hung_disk_is_removed_and_added_again() {
    let scratch = Scratch::new();
    let control = scratch.socket("control");
    let weir = Serve::new(&scratch)
        .arg(scratch.sparse("a.raw", BYTES))
        .args(["--format", "raw", "--qmp", &format!("unix:{}", text(&control))])
        .start();
    // Dropped before the daemon, which cannot exit while its requests are blocked.
    let fuse = FuseServer::mount(&scratch.path("mount"), BYTES as usize);
    let mut qmp = Qmp::negotiated(&control);
    let add = json!({"driver": "file", "node-name": "h", "filename": text(&fuse.file())});
    assert_eq!(qmp.command_reply("blockdev-add", add.clone())["return"], json!({}));
    fuse.block_requests(&ALL);
    qmp.send(r#"{"execute": "blockdev-del", "arguments": {"node-name": "h"}}"#);
    use_all_commands(&mut RawNbdClient::negotiated(weir.socket(), "a").0);
    let status = Qmp::negotiated(&control).command_reply("x-weir-query-status", json!({}));
    assert!(status["return"].is_object(), "{status}");
    assert_eq!(qmp.next_reply()["return"], json!({}));
    weir.wait_for_log("the files of a disk that was removed are still open");
    fuse.unblock();
    assert_eq!(qmp.command_reply("blockdev-add", add)["return"], json!({}));
    weir.stop();
}

#[test]
fn disk_is_removed_while_requests_of_a_removed_export_are_in_flight() {
    let daemon = HungFileDaemon::new(&[]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    let mut client = RawNbdClient::negotiated(daemon.weir.socket(), "h").0;
    daemon.fuse.block_requests(&ALL);
    client.request(request(CMD_READ, 0, BYTES / 2, 4096), &[]);
    client.request(request(CMD_WRITE, 0, 4096, 512), &[7; 512]);
    daemon.fuse.wait_until_blocked(READ);
    let mut qmp = Qmp::negotiated(&daemon.control());
    let exports = qmp.command_reply("query-block-exports", json!({}));
    let of_h = exports["return"].as_array().into_iter().flatten().find(|export| export["node-name"] == "h");
    let id = of_h.unwrap_or_else(|| panic!("{exports}"))["id"].clone();
    assert_eq!(qmp.command_reply("block-export-del", json!({"id": id, "mode": "hard"}))["return"], json!({}));
    qmp.send(r#"{"execute": "x-weir-remove-disk", "arguments": {"name": "h"}}"#);
    use_all_commands(&mut other);
    let removed = qmp.next_reply();
    assert_eq!(removed["return"], json!({}), "{removed}");
    daemon.weir.wait_for_log("the file system does not answer: the disk is abandoned");
    qmp.command_reply("query-block-exports", json!({}));
    assert_eq!(qmp.count_events("BLOCK_EXPORT_DELETED"), 1);
    use_all_commands(&mut other);
    daemon.fuse.unblock();
    drop((client, other));
    daemon.weir.stop();
}

#[test]
fn failed_query_is_not_a_backing_file_change() {
    let scratch = Scratch::new();
    let fuse = FuseServer::mount(&scratch.path("mount"), BYTES as usize);
    let overlay = scratch.path("overlay.qcow2");
    let backing = fuse.file();
    qemu_img(["create", "-f", "qcow2", "-F", "raw", "-b", text(&backing), text(&overlay)]).succeeds();
    let weir = Serve::new(&scratch).arg(&overlay).args(["--format", "qcow2"]).start();
    fuse.fail_once(GETATTR);
    fuse.wait_until_failed(GETATTR);
    // A further query proves that the image is still watched.
    fuse.block_requests(&[GETATTR]);
    fuse.wait_until_blocked(GETATTR);
    fuse.unblock();
    let mut client = RawNbdClient::negotiated(weir.socket(), "overlay").0;
    assert_eq!(client.read(MIB, 4096).map(|data| data.len()), Ok(4096));
    drop(client);
    weir.stop();
}

#[test]
fn upgrade_rejects_an_unresponsive_disk() {
    let daemon = HungFileDaemon::new(&[]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    daemon.fuse.block_requests(&[GETATTR, READ]);
    let control = format!("unix:{}", text(&daemon.control()));
    let stderr = TestClient::new(WEIR)
        .args(["serve", text(&daemon.scratch.path("a.raw")), text(&daemon.fuse.file())])
        .args(["--format", "raw", "--qmp", &control, "--takeover"])
        .fails();
    assert!(stderr.contains("disk h: its size cannot be read"), "{stderr}");
    daemon.assert_others_served(&mut other);
    daemon.fuse.unblock();
    drop(other);
    daemon.weir.stop();
}

/// Reads the file of a FUSE export.
fn reader(file: &Path) -> Child {
    Command::new("dd")
        .args([&format!("if={}", text(file)), "of=/dev/null", "bs=64k", "count=16", "iflag=direct"])
        .stderr(Stdio::null())
        .spawn()
        .expect("dd is there")
}

#[test]
fn hung_image_of_a_fuse_export_delays_no_other_disk() {
    let shown = Scratch::new();
    let (a, h) = (shown.file("a", []), shown.file("h", []));
    let daemon = HungFileDaemon::new(&["--fuse", text(&a), "--fuse", text(&h)]);
    let mut other = RawNbdClient::negotiated(daemon.weir.socket(), "a").0;
    daemon.fuse.block_requests(&[READ]);
    let mut waiting: Vec<_> = (0..CLIENTS).map(|_| reader(&h)).collect();
    daemon.fuse.wait_until_blocked(READ);
    assert!(reader(&a).wait().expect("the child can be waited for").success());
    daemon.assert_others_served(&mut other);
    daemon.fuse.unblock();
    for reader in &mut waiting {
        assert!(reader.wait().expect("the child can be waited for").success());
    }
    drop(other);
    daemon.weir.stop();
}
