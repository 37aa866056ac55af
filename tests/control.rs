//! The control socket from outside: disks and exports that come, change and go while the daemon serves.
//!
//! Nothing here sleeps: what is waited for is an answer, an event, or the end of a connection.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::unix::net::UnixStream,
};

use serde_json::{Value, json};

use crate::harness::plain::{Daemon, Scratch, weir};

/// A client of the control socket.
struct Control {
    socket: BufReader<UnixStream>,
    events: Vec<Value>,
}

impl Control {
    fn connect(scratch: &Scratch) -> Self {
        let socket = UnixStream::connect(scratch.path("qmp")).unwrap();
        let mut control = Self { socket: BufReader::new(socket), events: Vec::new() };
        assert!(control.next()["QMP"]["version"].is_object());
        control.ask("qmp_capabilities", json!({})).unwrap();
        control
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.socket.read_line(&mut line).unwrap() > 0, "the daemon hung up");
        serde_json::from_str(&line).unwrap()
    }

    /// The answer to a command, or the description of its error.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, String> {
        // In one piece: a daemon that is told to quit no longer listens to what comes behind the last bracket.
        let request = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        self.socket.get_mut().write_all(request.as_bytes()).unwrap();
        loop {
            let message = self.next();
            if message.get("event").is_some() {
                self.events.push(message);
                continue;
            }
            return match message.get("error") {
                Some(error) => Err(error["desc"].as_str().unwrap().to_owned()),
                None => Ok(message["return"].clone()),
            };
        }
    }

    fn done(&mut self, command: &str, arguments: Value) {
        assert_eq!(self.ask(command, arguments), Ok(json!({})), "{command}");
    }

    #[track_caller]
    fn refused(&mut self, command: &str, arguments: Value, description: &str) {
        assert_eq!(self.ask(command, arguments).unwrap_err(), description);
    }

    /// Waits for an event; its data.
    fn event(&mut self, name: &str) -> Value {
        loop {
            if let Some(place) = self.events.iter().position(|event| event["event"] == name) {
                return self.events.remove(place)["data"].clone();
            }
            let message = self.next();
            self.events.push(message);
        }
    }
}

fn start(test: &str) -> (Scratch, Daemon, Control) {
    let scratch = Scratch::new(test);
    let mut command = weir();
    command.args(["serve", "null:1M", "--group", "gold", "--iops-total", "100000"]);
    command.arg("--nbd").arg(scratch.address("nbd")).arg("--qmp").arg(scratch.address("qmp"));
    let daemon = Daemon::start(&mut command);
    let control = Control::connect(&scratch);
    (scratch, daemon, control)
}

/// A client of an export, in the oldest style, and the size it is told; `None` if there is no such export.
fn choose(scratch: &Scratch, export: &str) -> Option<(u64, UnixStream)> {
    let mut socket = UnixStream::connect(scratch.path("nbd")).unwrap();
    socket.read_exact(&mut [0; 18]).unwrap();
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    bytes.extend(*b"IHAVEOPT\0\0\0\x01");
    bytes.extend(u32::try_from(export.len()).unwrap().to_be_bytes());
    bytes.extend(export.as_bytes());
    socket.write_all(&bytes).unwrap();
    let mut answer = [0; 10];
    socket.read_exact(&mut answer).ok()?;
    Some((u64::from_be_bytes(answer[..8].try_into().unwrap()), socket))
}

/// The error of a request of 512 bytes; 0 is none. A write is of zeroes.
fn request(socket: &mut UnixStream, kind: u16, offset: u64) -> u32 {
    let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(7_u64.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(512_u32.to_be_bytes());
    if kind == WRITE {
        bytes.extend([0; 512]);
    }
    socket.write_all(&bytes).unwrap();
    let mut reply = [0; 16];
    socket.read_exact(&mut reply).unwrap();
    let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
    if kind == READ && error == 0 {
        socket.read_exact(&mut [0; 512]).unwrap();
    }
    error
}

const READ: u16 = 0;
const WRITE: u16 = 1;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;

#[test]
fn a_disk_comes_is_served_and_goes() {
    let (scratch, _daemon, mut control) = start("comes");
    assert!(choose(&scratch, "vm2").is_none());
    let memory = json!({"driver": "x-weir-memory", "node-name": "vm2", "size": 1 << 20});
    control.done("blockdev-add", memory.clone());
    control.refused("blockdev-add", memory, "Duplicate nodes with node-name='vm2'");
    let export = json!({"type": "nbd", "id": "e", "node-name": "vm2", "writable": true});
    control.done("block-export-add", export.clone());
    control.refused("block-export-add", export, "Block export id 'e' is already in use");
    let (size_bytes, client) = choose(&scratch, "vm2").unwrap();
    assert_eq!(size_bytes, 1 << 20);
    control.refused(
        "block-export-del",
        json!({"id": "e"}),
        "export 'e' still in use by 1 clients (use mode 'hard' to disconnect them)",
    );
    control.refused(
        "blockdev-del",
        json!({"node-name": "vm2"}),
        "Node vm2 is in use (it is exported as 'e')",
    );
    control.done("block-export-del", json!({"id": "e", "mode": "hard"}));
    assert_eq!({ client }.read(&mut [0; 1]).unwrap(), 0, "disconnected");
    assert_eq!(control.event("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    assert!(choose(&scratch, "vm2").is_none());
    control.done("blockdev-del", json!({"node-name": "vm2"}));
    control.refused("blockdev-del", json!({"node-name": "vm2"}), "Failed to find node with node-name='vm2'");
    assert!(choose(&scratch, "null").is_some(), "the others are served");
}

#[test]
fn a_disk_is_resized_under_its_clients() {
    let (scratch, _daemon, mut control) = start("resized");
    let image = scratch.path("image.raw");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    control.done("blockdev-add", json!({"driver": "file", "node-name": "vm", "filename": image}));
    control.done("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "vm", "writable": true}));
    let (_, mut client) = choose(&scratch, "vm").unwrap();
    assert_eq!(request(&mut client, WRITE, (1 << 20) - 512), 0);
    control.done("block_resize", json!({"node-name": "vm", "size": 65536}));
    assert_eq!(fs::metadata(&image).unwrap().len(), 65536);
    assert_eq!(request(&mut client, READ, 65536), EINVAL);
    assert_eq!(request(&mut client, WRITE, 65536), ENOSPC);
    assert_eq!(request(&mut client, READ, 0), 0, "it is served on");
    assert_eq!(choose(&scratch, "vm").unwrap().0, 65536);
    control.done("block_resize", json!({"device": "vm", "size": 1 << 20}));
    assert_eq!(request(&mut client, READ, (1 << 20) - 512), 0);
    control.refused(
        "block_resize",
        json!({"node-name": "vm", "size": 1000}),
        "Parameter 'size' (1000) cannot be: a size is a multiple of 512 bytes, and not 0 (round it)",
    );
    assert_eq!(fs::metadata(&image).unwrap().len(), 1 << 20);
}

#[test]
fn a_chain_of_nodes_is_one_disk() {
    let (scratch, _daemon, mut control) = start("chain");
    let image = scratch.path("image.raw");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    control.done("blockdev-add", json!({"driver": "file", "node-name": "f0", "filename": image}));
    control.done("blockdev-add", json!({"driver": "raw", "node-name": "r0", "file": "f0"}));
    let throttle =
        |group: &str| json!({"driver": "throttle", "node-name": "t0", "throttle-group": group, "file": "r0"});
    control.refused("blockdev-add", throttle("tin"), "Throttle group 'tin' does not exist");
    control.done("blockdev-add", throttle("gold"));
    control.refused("blockdev-del", json!({"node-name": "f0"}), "Block device f0 is in use");
    control.done("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "t0"}));
    let exports = control.ask("query-block-exports", json!({})).unwrap();
    let expected = json!({"id": "e", "type": "nbd", "node-name": "t0", "shutting-down": false});
    assert_eq!(exports[0], expected);
    let (_, mut client) = choose(&scratch, "t0").unwrap();
    assert_eq!(request(&mut client, WRITE, 0), 1, "writable is false unless asked for");
    drop(client);
    control.done("block-export-del", json!({"id": "e", "mode": "hard"}));
    control.event("BLOCK_EXPORT_DELETED");
    for node in ["t0", "r0", "f0"] {
        control.done("blockdev-del", json!({"node-name": node}));
    }
    control.done("blockdev-add", json!({"driver": "file", "node-name": "f0", "filename": image}));
}

#[test]
fn quit_is_as_orderly_as_a_signal() {
    let (scratch, mut daemon, mut control) = start("quit");
    control.done("quit", json!({}));
    assert_eq!(control.event("SHUTDOWN"), json!({"guest": false, "reason": "host-qmp-quit"}));
    assert_eq!(daemon.wait(), Some(0));
    assert!(!scratch.path("qmp").exists() && !scratch.path("nbd").exists());
}
