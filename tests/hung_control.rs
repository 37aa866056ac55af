//! Control operations while the file system of one disk blocks one kind of call: all other disks
//! and the control socket are served.
//!
//! Each test blocks one kind of FUSE request. Clients and commands use the disk so that every kind
//! occurs, and wait. Then every control operation runs beside them. Finally the file system stops
//! answering altogether, and the daemon still ends.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::{
    bench::bench,
    harness::{
        DEADLINE, MIB, Qmp, RawNbdClient, Scratch, Weir,
        fuse_server::{
            ALL, FALLOCATE, FLUSH, FSYNC, FuseServer, GETATTR, LOOKUP, LSEEK, OPEN, READ, RELEASE, SETATTR,
            SETLK, STATFS, WRITE,
        },
        operator::{run_ok, serve, socket},
        text,
        wire::{CMD_BLOCK_STATUS, CMD_FLUSH, CMD_READ, CMD_TRIM, CMD_WRITE, RawNbdRequest},
    },
    hung_files::use_all_commands,
};

const BYTES: u64 = 16 * MIB;

/// A daemon with disks `a`, `v` (over vhost-user-blk), and `h` on the file system that can block.
struct HungDisk {
    // Dropped before the daemon, which cannot exit while its requests are blocked.
    fuse: FuseServer,
    weir: Weir,
    scratch: Scratch,
}

impl HungDisk {
    fn new() -> Self {
        let scratch = Scratch::new();
        let fuse = FuseServer::mount(&scratch.path("mount"), BYTES as usize);
        let (a, h, vhost_socket) = (scratch.sparse("a.raw", BYTES), fuse.file(), scratch.socket("machine"));
        let config = format!(
            "[daemon]\n\
             qmp = \"{}\"\n\
             nbd = \"unix:{}\"\n\
             http = \"127.0.0.1:0\"\n\
             metrics = \"unix:{}\"\n\
             workers = 2\n\
             [disk.a]\n\
             image = \"{}\"\n\
             format = \"raw\"\n\
             [disk.h]\n\
             image = \"{}\"\n\
             format = \"raw\"\n\
             [disk.v]\n\
             image = \"memory:16M\"\n\
             export = [{{ type = \"vhost-user-blk\", listen = \"unix:{}\" }}]\n",
            socket(&scratch),
            text(&scratch.socket("nbd")),
            text(&scratch.socket("metrics")),
            text(&a),
            text(&h),
            text(&vhost_socket),
        );
        let weir = serve(&scratch, &scratch.file("weir.toml", config));
        Self { fuse, weir, scratch }
    }

    fn client(&self, disk: &str) -> RawNbdClient {
        RawNbdClient::negotiated(&self.scratch.socket("nbd"), disk).0
    }

    fn control(&self) -> Qmp {
        Qmp::negotiated(&self.scratch.socket("qmp"))
    }

    /// Adds the file of `h` a second time, read-only.
    fn add_reader(&self, name: &str) -> Qmp {
        let mut control = self.control();
        let file = text(&self.fuse.file()).to_owned();
        let node = json!({
            "execute": "blockdev-add",
            "arguments": {
                "driver": "raw", "node-name": name, "read-only": true, "force-share": true,
                "file": { "driver": "file", "filename": file },
            },
        });
        control.send(node.to_string());
        control
    }

    /// Starts requests and commands of every kind on the blocked file system, without awaiting
    /// them.
    fn send_requests(&self) -> (Vec<RawNbdClient>, Vec<Qmp>) {
        let mut client = self.client("h");
        // Not at either end of the file, which the open has read into the page cache.
        for (kind, offset, length) in
            [(CMD_WRITE, 0, 4096), (CMD_READ, BYTES / 2, 4096), (CMD_TRIM, 65_536, 65_536), (CMD_FLUSH, 0, 0)]
        {
            let payload = vec![7; if kind == CMD_WRITE { 4096 } else { 0 }];
            client.request(RawNbdRequest { flags: 0, kind, cookie: offset, offset, length }, &payload);
        }
        let (mut status, _) = RawNbdClient::negotiated_extended(&self.scratch.socket("nbd"), "h");
        let request = RawNbdRequest { flags: 0, kind: CMD_BLOCK_STATUS, cookie: 1, offset: 0, length: MIB };
        status.send(&request.extended());
        let mut resize = self.control();
        resize.send(
            json!({"execute": "block_resize", "arguments": {"node-name": "h", "size": BYTES}}).to_string(),
        );
        let mut remove = self.control();
        remove.send(json!({"execute": "blockdev-del", "arguments": {"node-name": "known"}}).to_string());
        (vec![client, status], vec![resize, remove, self.add_reader("new")])
    }

    fn get(mut stream: impl Read + Write, path: &str) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("the daemon listens");
        let mut response = String::new();
        stream.read_to_string(&mut response).expect("it answers");
        assert!(response.starts_with("HTTP/1.1 200"), "{path}: {response}");
    }
}

fn test_beside_hung_requests(held: u32) {
    let daemon = HungDisk::new();
    let line = daemon.weir.wait_for_log("page at=");
    let address = line.split_once("at=").expect("an address").1.split(' ').next().expect("a word");
    let mut other = daemon.client("a");
    let added = daemon.add_reader("known").next_reply();
    assert_eq!(added["return"], json!({}), "{added}");
    daemon.fuse.block_requests(&[held]);
    let waiting = daemon.send_requests();
    daemon.fuse.wait_until_blocked(held);

    use_all_commands(&mut other);
    use_all_commands(&mut daemon.client("a"));
    let mut control = daemon.control();
    for command in ["query-block", "query-named-block-nodes", "query-blockstats", "x-weir-query-status"] {
        let reply = control.command_reply(command, json!({}));
        assert!(reply["return"].to_string().contains("\"h\""), "{command}: {reply}");
    }
    for path in ["/api/v1/overview", "/api/v1/events", "/api/v1/openapi.json", "/api/v1/disks/h/history"] {
        let stream = TcpStream::connect(address).expect("the daemon listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket");
        HungDisk::get(stream, path);
    }
    let stream = UnixStream::connect(daemon.scratch.socket("metrics")).expect("the daemon listens");
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket");
    HungDisk::get(stream, "/metrics");
    bench("-w -c 16 -d 4 -s 4K", format!("vhost-user:{}", text(&daemon.scratch.socket("machine"))))
        .succeeds();
    run_ok(&daemon.scratch, &["disk", "add", "b", "memory:1M"]);
    assert_eq!(daemon.client("b").read(0, 512).map(|data| data.len()), Ok(512));
    run_ok(&daemon.scratch, &["disk", "remove", "b"]);
    run_ok(&daemon.scratch, &["reload"]);
    daemon.weir.signal(Signal::SIGHUP);
    daemon.weir.wait_for_log("SIGHUP: the config file was read again");
    use_all_commands(&mut other);

    // The file system stops answering altogether; the end of the daemon must not wait for it.
    daemon.fuse.block_requests(&ALL);
    daemon.weir.signal(Signal::SIGTERM);
    daemon.weir.wait_for_log("stopped");
    // The kernel delays the exit of a process with requests in flight at its file system.
    drop(daemon.fuse);
    daemon.weir.wait();
    drop(waiting);
}

macro_rules! beside_held {
    ($($test:ident: $kind:expr,)*) => {
        $(
            #[test]
            fn $test() {
                test_beside_hung_requests($kind);
            }
        )*
    };
}

beside_held! {
    a_held_lookup_stops_no_control_operation: LOOKUP,
    a_held_getattr_stops_no_control_operation: GETATTR,
    a_held_setattr_stops_no_control_operation: SETATTR,
    a_held_open_stops_no_control_operation: OPEN,
    a_held_read_stops_no_control_operation: READ,
    a_held_write_stops_no_control_operation: WRITE,
    a_held_statfs_stops_no_control_operation: STATFS,
    a_held_release_stops_no_control_operation: RELEASE,
    a_held_fsync_stops_no_control_operation: FSYNC,
    a_held_flush_stops_no_control_operation: FLUSH,
    a_held_lock_stops_no_control_operation: SETLK,
    a_held_fallocate_stops_no_control_operation: FALLOCATE,
    a_held_lseek_stops_no_control_operation: LSEEK,
}
