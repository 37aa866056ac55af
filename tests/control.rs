//! The control socket as a client sees it: disks and exports are added, changed and removed while
//! the daemon serves.

use std::fs;

use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, RawNbdClient, Scratch, Serve, Weir, operator, qemu_img, text,
    wire::{CMD_WRITE, EINVAL, ENOSPC, EPERM, OPT_GO, REP_ERR_UNKNOWN, RawNbdRequest, go_data},
};

/// A daemon with a disk and a group, and a client of its control socket.
struct ControlledDaemon {
    scratch: Scratch,
    weir: Weir,
    control: Qmp,
}

impl ControlledDaemon {
    fn new() -> Self {
        let scratch = Scratch::new();
        let limits = ["--group", "gold", "--iops-total", "100000"];
        let qmp = operator::socket(&scratch);
        let serve = Serve::new(&scratch).arg("null:1M").args(limits).args(["--qmp", &qmp]);
        // The sandbox must allow images that are added later.
        let weir = serve.arg("--image-root").arg(scratch.path("")).start();
        let control = Qmp::negotiated(&scratch.socket("qmp"));
        Self { scratch, weir, control }
    }

    #[track_caller]
    fn command(&mut self, command: &str, arguments: Value) {
        assert_eq!(self.control.command(command, arguments), json!({}), "{command}");
    }

    #[track_caller]
    fn refused(&mut self, command: &str, arguments: Value, description: &str) {
        assert_eq!(self.control.command_error(command, arguments).1, description);
    }

    #[track_caller]
    fn go(&self, export: &str) -> (RawNbdClient, u64) {
        RawNbdClient::negotiated(self.weir.socket(), export)
    }

    #[track_caller]
    fn go_reply(&self, export: &str) -> u32 {
        let replies = RawNbdClient::greet(self.weir.socket()).option(OPT_GO, &go_data(export));
        replies.last().expect("an option has an answer").0
    }
}

/// Error code of a write of 512 zeroes; 0 on success.
#[track_caller]
fn write(client: &mut RawNbdClient, offset: u64) -> u32 {
    client.request(RawNbdRequest { flags: 0, kind: CMD_WRITE, cookie: 7, offset, length: 512 }, &[0; 512]);
    client.simple_reply().0
}

#[test]
fn disk_is_added_served_and_removed() {
    let mut daemon = ControlledDaemon::new();
    assert_eq!(daemon.go_reply("vm2"), REP_ERR_UNKNOWN);
    let memory = json!({"driver": "x-weir-memory", "node-name": "vm2", "size": 1 << 20});
    daemon.command("blockdev-add", memory.clone());
    daemon.refused("blockdev-add", memory, "Duplicate nodes with node-name='vm2'");
    let export = json!({"type": "nbd", "id": "e", "node-name": "vm2", "writable": true});
    daemon.command("block-export-add", export.clone());
    daemon.refused("block-export-add", export, "Block export id 'e' is already in use");
    let (mut client, size) = daemon.go("vm2");
    assert_eq!(size, MIB);
    let name = fs::read_to_string("/proc/self/comm").unwrap();
    let test_process = format!("{} ({})", name.trim_end(), std::process::id());
    daemon.refused(
        "block-export-del",
        json!({"id": "e"}),
        &format!(
            "export 'e' still in use: client 2 of {test_process} (use mode 'hard' to remove it all the same)"
        ),
    );
    daemon.refused("blockdev-del", json!({"node-name": "vm2"}), "Node vm2 is in use (it is exported as 'e')");
    // Mode `hard` disconnects the client.
    daemon.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    client.wait_for_close();
    assert_eq!(daemon.control.event("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    assert_eq!(daemon.go_reply("vm2"), REP_ERR_UNKNOWN);
    daemon.command("blockdev-del", json!({"node-name": "vm2"}));
    daemon.refused("blockdev-del", json!({"node-name": "vm2"}), "Failed to find node with node-name='vm2'");
    daemon.go("null");
}

#[test]
fn disk_is_resized_while_clients_are_connected() {
    let mut daemon = ControlledDaemon::new();
    let image = daemon.scratch.sparse("image.raw", MIB);
    daemon.command("blockdev-add", json!({"driver": "file", "node-name": "vm", "filename": image}));
    daemon
        .command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "vm", "writable": true}));
    let (mut client, _) = daemon.go("vm");
    assert_eq!(write(&mut client, MIB - 512), 0);
    // Shrink below the last write and grow again: the old data must not come back.
    daemon.command("block_resize", json!({"node-name": "vm", "size": 65536}));
    assert_eq!(fs::metadata(&image).unwrap().len(), 65536);
    assert_eq!(client.read(65536, 512), Err(EINVAL));
    assert_eq!(write(&mut client, 65536), ENOSPC);
    assert_eq!(client.read(0, 512), Ok(vec![0; 512]), "the resized disk is still served");
    assert_eq!(daemon.go("vm").1, 65536);
    daemon.command("block_resize", json!({"device": "vm", "size": 1 << 20}));
    assert_eq!(client.read(MIB - 512, 512), Ok(vec![0; 512]));
    daemon.refused(
        "block_resize",
        json!({"node-name": "vm", "size": 1000}),
        "Parameter 'size' (1000) is not possible: the size must be a multiple of 512 bytes, and \
         not 0 (round it)",
    );
    assert_eq!(fs::metadata(&image).unwrap().len(), 1 << 20);
    drop(client);
    let log = daemon.weir.stop();
    assert_eq!(log.matches("the disk was truncated").count(), 1, "a rejected size truncates nothing: {log}");
}

#[test]
fn chain_of_nodes_is_one_disk() {
    let mut daemon = ControlledDaemon::new();
    let image = daemon.scratch.sparse("image.raw", MIB);
    daemon.command("blockdev-add", json!({"driver": "file", "node-name": "f0", "filename": image}));
    daemon.command("blockdev-add", json!({"driver": "raw", "node-name": "r0", "file": "f0"}));
    let throttle =
        |group: &str| json!({"driver": "throttle", "node-name": "t0", "throttle-group": group, "file": "r0"});
    daemon.refused("blockdev-add", throttle("tin"), "Throttle group 'tin' does not exist");
    daemon.command("blockdev-add", throttle("gold"));
    // A node below another one cannot be removed.
    daemon.refused("blockdev-del", json!({"node-name": "f0"}), "Block device f0 is in use");
    daemon.command("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "t0"}));
    let exports = daemon.control.command("query-block-exports", json!({}));
    let expected = json!({"id": "e", "type": "nbd", "node-name": "t0", "shutting-down": false});
    assert_eq!(exports[0], expected);
    let (mut client, _) = daemon.go("t0");
    assert_eq!(write(&mut client, 0), EPERM, "an export is read-only by default");
    drop(client);
    daemon.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    daemon.control.event("BLOCK_EXPORT_DELETED");
    // Removed from the top of the chain down.
    for node in ["t0", "r0", "f0"] {
        daemon.command("blockdev-del", json!({"node-name": node}));
    }
    daemon.command("blockdev-add", json!({"driver": "file", "node-name": "f0", "filename": image}));
}

#[test]
fn format_node_over_a_node_is_reversible() {
    let mut daemon = ControlledDaemon::new();
    let image = daemon.scratch.path("image.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "64M"]).succeeds();
    daemon.command("blockdev-add", json!({"driver": "file", "node-name": "f0", "filename": image}));
    let export_of = |node: &str| json!({"type": "nbd", "id": "e", "node-name": node, "writable": true});
    let over = |file: &str| json!({"driver": "qcow2", "node-name": "q0", "file": file});
    let sizes = |daemon: &ControlledDaemon, name: &str| daemon.go(name).1;

    daemon.command("block-export-add", export_of("f0"));
    daemon.refused("blockdev-add", over("f0"), "Node f0 is in use (it is exported as 'e')");
    assert!(sizes(&daemon, "f0") < MIB, "the size of the file node");
    daemon.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    daemon.control.event("BLOCK_EXPORT_DELETED");

    daemon.command("blockdev-add", over("f0"));
    daemon.refused("blockdev-del", json!({"node-name": "f0"}), "Block device f0 is in use");
    daemon.refused("blockdev-add", over("f0"), "Duplicate nodes with node-name='q0'");
    daemon.command("block-export-add", export_of("q0"));
    assert_eq!(sizes(&daemon, "q0"), 64 * MIB);
    daemon.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    daemon.control.event("BLOCK_EXPORT_DELETED");
    daemon.refused(
        "blockdev-add",
        json!({"driver": "qcow2", "node-name": "q1", "file": "q0"}),
        "Parameter 'file' must be a file; the node 'q0' has a format or is a device",
    );
    daemon.command("blockdev-del", json!({"node-name": "q0"}));
    daemon.command("block-export-add", export_of("f0"));
    assert!(sizes(&daemon, "f0") < MIB, "the export has the size of the file node again");
    daemon.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    daemon.control.event("BLOCK_EXPORT_DELETED");

    // A file that is not an image leaves the node unchanged.
    let plain = daemon.scratch.sparse("plain.raw", MIB);
    daemon.command("blockdev-add", json!({"driver": "file", "node-name": "p0", "filename": plain}));
    let (_, message) = daemon
        .control
        .command_error("blockdev-add", json!({"driver": "qcow2", "node-name": "q1", "file": "p0"}));
    assert!(message.contains("plain.raw"), "{message}");
    daemon.command("block-export-add", export_of("p0"));
    assert_eq!(sizes(&daemon, "p0"), MIB);
}

#[test]
fn quit_ends_cleanly() {
    let mut daemon = ControlledDaemon::new();
    daemon.command("quit", json!({}));
    assert_eq!(daemon.control.event("SHUTDOWN"), json!({"guest": false, "reason": "host-qmp-quit"}));
    let ControlledDaemon { scratch, weir, .. } = daemon;
    let (status, log) = weir.wait();
    assert!(status.success(), "{status}: {log}");
    assert!(!scratch.socket("qmp").exists() && !scratch.socket("nbd").exists());
}
