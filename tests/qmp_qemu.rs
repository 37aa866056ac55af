//! weir's replies beside QEMU's: the same commands to both, and the replies compared.
//!
//! `block_set_io_throttle` goes to a virtual machine that is never started, throttle groups go to
//! the storage daemon. Errors are compared by class, replies in full as far as limits are
//! concerned.

use std::{
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};

use crate::harness::{MIB, Qmp, Scratch, Serve, Weir, need, search_path, text};

struct QemuProcess(Child);

impl Drop for QemuProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Its monitor is the listening socket on standard input, so a client can connect immediately.
fn start(program: &str, arguments: &[String], monitor: &Path) -> QemuProcess {
    need(program);
    let listener = UnixListener::bind(monitor).expect("the socket can be bound");
    // Two of QEMU's threads may wake for one client; the later one must not block in accept.
    listener.set_nonblocking(true).expect("a socket can be set to non-blocking");
    let mut command = Command::new(program);
    command.args(["--chardev", "socket,id=c,fd=0,server=on,wait=off"]).args(arguments);
    command.env("PATH", search_path());
    command.stdin(OwnedFd::from(listener)).stdout(Stdio::null()).stderr(Stdio::null());
    QemuProcess(command.spawn().expect("it was found"))
}

/// weir and QEMU, each with a disk named `disk`.
struct QmpPair {
    _weir: Weir,
    _qemu: QemuProcess,
    ours: Qmp,
    theirs: Qmp,
}

impl QmpPair {
    fn new(scratch: &Scratch, program: &str, arguments: impl FnOnce(PathBuf) -> Vec<String>) -> Self {
        let (ours, theirs) = (scratch.socket("ours"), scratch.socket("theirs"));
        let weir = Serve::new(scratch)
            .arg(scratch.sparse("disk.raw", MIB))
            .arg("--qmp")
            .arg(format!("unix:{}", text(&ours)))
            .start();
        let qemu = start(program, &arguments(scratch.sparse("theirs.raw", MIB)), &theirs);
        let (ours, theirs) = (Qmp::negotiated(&ours), Qmp::negotiated(&theirs));
        Self { _weir: weir, _qemu: qemu, ours, theirs }
    }

    fn machine(scratch: &Scratch) -> Self {
        Self::new(scratch, "qemu-system-x86_64", |image| {
            let drive = format!("if=none,id=disk,file={},format=raw", text(&image));
            let fixed = ["-display", "none", "-S", "-nodefaults", "-accel", "tcg", "-device"];
            let rest = ["virtio-blk-pci,drive=disk", "-drive", &drive, "-mon", "chardev=c,mode=control"];
            fixed.into_iter().chain(rest).map(ToOwned::to_owned).collect()
        })
    }

    fn storage_daemon(scratch: &Scratch) -> Self {
        Self::new(scratch, "qemu-storage-daemon", |_| ["--monitor", "c"].map(ToOwned::to_owned).to_vec())
    }

    /// Compares successful replies after `view`, and errors by class; returns QEMU's reply.
    #[track_caller]
    fn compare(&mut self, command: &str, arguments: &Value, view: fn(&Value) -> Value) -> Value {
        let ours = self.ours.command_reply(command, arguments.clone());
        let theirs = self.theirs.command_reply(command, arguments.clone());
        let shown = format!("{command} {arguments}\nweir: {ours}\nQEMU: {theirs}");
        assert_eq!(ours["error"]["class"], theirs["error"]["class"], "{shown}");
        if theirs.get("error").is_none() {
            assert_eq!(view(&ours["return"]), view(&theirs["return"]), "{shown}");
        }
        theirs
    }
}

/// The members of the only disk's `inserted` that describe limits.
fn limits(devices: &Value) -> Value {
    let inserted = devices[0]["inserted"].as_object().expect("a disk");
    let is_limit = |key: &str| key.starts_with("bps") || key.starts_with("iops") || key == "group";
    inserted
        .iter()
        .filter(|(key, _)| is_limit(key))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

#[test]
fn device_throttling_matches_qemu() {
    let scratch = Scratch::new();
    let mut pair = QmpPair::machine(&scratch);
    let rates = |overrides: Value| {
        let mut all = json!({"bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
        all.as_object_mut().expect("an object").extend(overrides.as_object().expect("an object").clone());
        all
    };
    let commands = [
        json!({"device": "disk", "iops": 100}),
        json!({"device": "disk", "iops": 100, "iops_max": 500, "iops_max_length": 10, "iops_size": 4096}),
        json!({"device": "disk", "iops": 100, "iops_max": 50}),
        json!({"device": "disk", "iops": 100, "iops_rd": 50}),
        json!({"device": "disk", "iops": 100, "iops_max": 500, "iops_max_length": 0}),
        json!({"device": "disk", "iops": 100, "iops_max_length": 5}),
        json!({"device": "disk", "iops_size": 4096}),
        json!({"device": "disk", "bps_rd": 1_000_000, "bps_wr": 2_000_000, "bps_wr_max": 3_000_000, "group": "gold"}),
        json!({"device": "disk", "iops_rd": 7}),
        json!({"device": "disk", "iops_wr": 8, "group": "silver"}),
        json!({"device": "disk", "iops": 1_000_000_000_000_000_u64}),
        json!({"device": "disk", "iops": 1_000_000_000_000_001_u64}),
        json!({"device": "disk", "iops": -1}),
        json!({"device": "disk", "iops": 1.5}),
        json!({"device": "disk", "iops": "5"}),
        json!({"device": "disk", "iops": 1, "nonsense": 1}),
        json!({"device": "disk", "iops": 1, "group": "disk"}),
        json!({"device": "disk"}),
        json!({"device": "disk"}),
        json!({"device": "nope", "iops": 1}),
        json!({"id": "nope", "iops": 1}),
        json!({"id": "disk", "device": "disk", "iops": 1}),
        json!({"iops": 1}),
    ];
    for command in commands {
        pair.compare("block_set_io_throttle", &rates(command), Value::clone);
        pair.compare("query-block", &json!({}), limits);
    }
    pair.compare("block_set_io_throttle", &json!({"device": "disk", "iops": 1}), Value::clone);
}

#[test]
fn disk_description_matches_qemu() {
    let scratch = Scratch::new();
    let mut pair = QmpPair::machine(&scratch);
    for (command, at) in
        [("query-block", "/0/inserted"), ("query-named-block-nodes", "/0"), ("query-blockstats", "/0/stats")]
    {
        let ours = pair.ours.command(command, json!({}));
        let theirs = pair.theirs.command(command, json!({}));
        let (ours, theirs) = (ours.pointer(at).expect("a disk"), theirs.pointer(at).expect("a disk"));
        for (key, value) in ours.as_object().expect("an object") {
            // `active` was added in QEMU 10.0, after Debian 12's version.
            if key == "active" || key.starts_with("x-weir-") {
                continue;
            }
            let other = &theirs[key];
            let same = matches!(
                (value, other),
                (Value::Bool(_), Value::Bool(_))
                    | (Value::Number(_), Value::Number(_))
                    | (Value::String(_), Value::String(_))
                    | (Value::Object(_), Value::Object(_))
                    | (Value::Array(_), Value::Array(_))
            );
            assert!(same, "{command}: {key} is {value} here and {other} in QEMU");
        }
        for key in ["drv", "ro", "cache", "backing_file_depth", "detect_zeroes", "rd_bytes"] {
            assert_eq!(ours.get(key), theirs.get(key), "{command}: {key}");
        }
    }
}

/// Sorts a list of properties or children by name, without weir's own.
fn by_name(list: &Value) -> Value {
    let Some(list) = list.as_array() else { return list.clone() };
    let mut list: Vec<_> = list
        .iter()
        .filter(|entry| !entry["name"].as_str().unwrap_or_default().starts_with("x-weir-"))
        .cloned()
        .collect();
    list.sort_by_key(|entry| entry["name"].to_string());
    Value::Array(list)
}

#[test]
fn throttle_group_objects_match_qemu() {
    let scratch = Scratch::new();
    let mut pair = QmpPair::storage_daemon(&scratch);
    let group = |overrides: Value| {
        let mut all = json!({"qom-type": "throttle-group", "id": "gold"});
        all.as_object_mut().expect("an object").extend(overrides.as_object().expect("an object").clone());
        all
    };
    let get = |property: &str| json!({"path": "/objects/gold", "property": property});
    let set = |property: &str, value: Value| json!({"path": "gold", "property": property, "value": value});
    let commands = [
        ("object-add", json!({"qom-type": "throttle-group"})),
        ("object-add", json!({"id": "gold"})),
        ("object-add", group(json!({"qom-type": "nonsense"}))),
        ("object-add", group(json!({"id": "0gold"}))),
        ("object-add", group(json!({"limits": {"iops-total": 100, "nonsense": 1}}))),
        ("object-add", group(json!({"limits": {"iops-total": 100, "iops-read": 1}}))),
        ("object-add", group(json!({"limits": 5}))),
        ("object-add", group(json!({"limits": {"iops-total": 100}, "x-iops-total-max": 200}))),
        ("object-add", group(json!({}))),
        ("object-add", group(json!({"id": "silver", "x-bps-read": 4096}))),
        ("qom-list", json!({"path": "/objects"})),
        ("qom-list", json!({"path": "/objects/gold"})),
        ("qom-list", json!({"path": "gold"})),
        ("qom-list", json!({"path": "/objects/nope"})),
        ("qom-get", get("type")),
        ("qom-get", get("limits")),
        ("qom-get", get("x-iops-total")),
        ("qom-get", get("nonsense")),
        ("qom-get", json!({"path": "nope", "property": "limits"})),
        ("qom-set", set("limits", json!({"iops-total": 7, "iops-total-max": 9}))),
        ("qom-get", get("limits")),
        // Members that are not named keep their values.
        ("qom-set", set("limits", json!({"iops-size": 4096}))),
        ("qom-get", get("limits")),
        ("qom-set", set("limits", json!({"iops-read": 4096}))),
        ("qom-set", set("limits", json!({"nonsense": 1}))),
        ("qom-set", set("limits", json!(3))),
        ("qom-set", set("x-iops-total", json!(3))),
        ("qom-set", set("type", json!("x"))),
        ("qom-set", set("nonsense", json!(3))),
        ("qom-set", json!({"path": "gold", "property": "limits"})),
        ("qom-get", get("limits")),
        ("object-del", json!({"id": "nope"})),
        ("object-del", json!({"id": 1})),
        ("object-del", json!({"id": "gold"})),
        ("object-del", json!({"id": "gold"})),
    ];
    for (command, arguments) in commands {
        pair.compare(command, &arguments, by_name);
    }
}

#[test]
fn invalid_request_has_the_same_class_and_keeps_the_connection() {
    let scratch = Scratch::new();
    let mut pair = QmpPair::storage_daemon(&scratch);
    for request in [
        r#"{"execute":"nonsense"}"#,
        r#"{"execute":5}"#,
        r#"{"id":3}"#,
        r#"[1]"#,
        r#"{"execute":"query-version","arguments":5}"#,
        r#"{"execute":"query-version","arguments":{"a":1}}"#,
        r#"{"execute":"query-version","nonsense":1}"#,
        r#"{"execute":"qmp_capabilities"}"#,
        "{nonsense}\n",
        "}\n",
        "{\"a\" 1}\n",
    ] {
        pair.ours.send(request);
        pair.theirs.send(request);
        let (ours, theirs) = (pair.ours.next_reply(), pair.theirs.next_reply());
        assert_eq!(
            ours["error"]["class"], theirs["error"]["class"],
            "{request}\nweir: {ours}\nQEMU: {theirs}"
        );
        assert_eq!(ours.get("id"), theirs.get("id"), "{request}");
    }
    pair.compare("query-version", &json!({}), |version| {
        json!(version["qemu"].as_object().map(serde_json::Map::len))
    });
}
