//! An upgrade transfers disks, groups and exports that were added over the control socket.

use std::{fs::File, io::Write as _, process::Stdio};

use serde_json::{Value, json};

use super::{UpgradedDaemon, control};
use crate::{
    harness::{
        MIB, Qmp, Scratch, TestClient, assert_contains, create_encrypted, nbdsh_command, pause, qemu_img,
        qemu_io, text, weir,
    },
    vhost_user::{features, front_end},
};

fn stdout_of(fixture: &UpgradedDaemon, arguments: &[&str]) -> String {
    weir(arguments).env("WEIR_QMP", control(fixture)).succeeds()
}

/// These keys of all entries of a list, without counters.
fn entries_with_keys(fixture: &UpgradedDaemon, list: &str, keys: &[&str]) -> Vec<Value> {
    let status = Qmp::negotiated(&fixture.control()).command("x-weir-query-status", json!({}));
    let entries = status[list].as_array().expect("a list").clone();
    let keep = |entry: Value| keys.iter().map(|key| ((*key).to_owned(), entry[key].clone())).collect();
    entries.into_iter().map(keep).collect()
}

const DISK_KEYS: [&str; 9] =
    ["name", "image", "cache", "limits", "group", "weight", "prefetch", "on-write-error", "read-only"];
const GROUP_KEYS: [&str; 5] = ["name", "limits", "weight", "group", "watermark"];
const EXPORT_KEYS: [&str; 6] = ["id", "name", "type", "disk", "address", "read-only"];

fn all_entries(fixture: &UpgradedDaemon) -> [Vec<Value>; 3] {
    [
        entries_with_keys(fixture, "disks", &DISK_KEYS),
        entries_with_keys(fixture, "groups", &GROUP_KEYS),
        entries_with_keys(fixture, "exports", &EXPORT_KEYS),
    ]
}

/// A volume name of Kubernetes: longer than QEMU permits for node names.
const VOLUME: &str = "pvc-0f0a2c4e-6b7d-4c1e-9f00-3d2b1a765432";

#[test]
fn added_disks_groups_and_exports_are_transferred() {
    let scratch = Scratch::new();
    let [first, plain, layered, base] =
        ["first.raw", "plain.raw", "layered.qcow2", "base.raw"].map(|name| scratch.path(name));
    for raw in [&first, &plain, &base] {
        File::create(raw).unwrap().set_len(4 * MIB).unwrap();
    }
    qemu_img(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&layered).succeeds();
    let fixture = UpgradedDaemon::new(scratch, &[text(&first)]);
    let mut current = fixture.serve().start();
    let (used, unused) = (fixture.scratch.socket("used"), fixture.scratch.socket("unused"));
    stdout_of(&fixture, &["group", "add", "gold", "--iops-total", "4000", "--iops-total-max", "9000"]);
    stdout_of(&fixture, &["group", "add", "inner", "--group", "gold", "--weight", "300"]);
    let added = ["--group", "inner", "--bps-total", "40M", "--prefetch", "on", "--on-write-error", "stop"];
    stdout_of(&fixture, &[&["disk", "add", VOLUME, text(&plain), "-f", "raw"][..], &added].concat());
    let mut qmp = Qmp::negotiated(&fixture.control());
    // A node on another node, which closes the file of the lower one.
    let file = json!({"driver": "file", "node-name": "f0", "filename": text(&layered)});
    qmp.command("blockdev-add", file);
    let format = json!({"driver": "qcow2", "node-name": "q0", "file": "f0", "l2-cache-size": 65536});
    qmp.command("blockdev-add", format);
    let over = json!({"driver": "throttle", "node-name": "t0", "file": "q0", "throttle-group": "gold"});
    qmp.command("blockdev-add", over);
    for (id, node, socket) in [("x2", "t0", &used), ("x3", VOLUME, &unused)] {
        let addr = json!({"type": "unix", "path": text(socket)});
        let export = json!({"type": "vhost-user-blk", "id": id, "node-name": node, "addr": addr,
            "num-queues": 2, "discard": false});
        qmp.command("block-export-add", export);
    }
    let export = json!({"type": "nbd", "id": "n", "node-name": "t0", "name": "of t0", "writable": true,
        "description": "added", "x-weir-deny": ["10.0.0.0/8"]});
    qmp.command("block-export-add", export);
    drop(qmp);
    let before = all_entries(&fixture);
    let mut stream = front_end(&used);
    let offered = features(&mut stream);
    // This connection survives all upgrades.
    let script = "h.connect_uri(arguments[0])\nimport sys\nfor turn in range(3):\n \
                  h.pwrite(bytes([65 + turn]) * 512, 512 * turn)\n print('there', flush=True)\n \
                  sys.stdin.readline()\n";
    let uri = current.uri("of%20t0");
    let mut client = nbdsh_command(&format!("arguments = [{uri:?}]\n{script}h.flush()\nh.shutdown()\n"));
    let mut client = client.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("nbdsh was found");
    let mut stdout = std::io::BufReader::new(client.stdout.take().expect("piped"));
    for round in 0..3 {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
        assert_eq!(line, "there\n", "turn {round}");
        if round < 2 {
            current = fixture.upgrade(current).0;
            let line = current.wait_for_log("transferred although no config has it");
            assert_contains(
                &line,
                &["group gold, group inner", "disk pvc-", "disk t0", "export n", "export x3"],
            );
            // The ready line of the new process lists them for waiting programs.
            let sockets = [&used, &unused].map(|socket| format!("vhost-user:{}", text(socket)));
            assert_contains(current.ready_line(), &["of%20t0", &sockets[0], &sockets[1]]);
            assert_eq!(all_entries(&fixture), before);
            assert_eq!(features(&mut stream), offered);
        }
        client.stdin.as_mut().expect("piped").write_all(b"\n").unwrap();
    }
    assert!(client.wait().expect("the child can be waited for").success());
    assert_eq!(features(&mut front_end(&unused)) & offered, offered & !(1 << 5) | offered & (1 << 5));
    // Nodes on top can be removed as before the upgrade.
    let mut qmp = Qmp::negotiated(&fixture.control());
    drop(stream);
    for (command, arguments) in
        [("block-export-del", json!({"id": "n"})), ("block-export-del", json!({"id": "x2", "mode": "hard"}))]
    {
        qmp.command(command, arguments);
        qmp.event("BLOCK_EXPORT_DELETED");
    }
    for node in ["t0", "q0", "f0"] {
        qmp.command("blockdev-del", json!({"node-name": node}));
    }
    let current = fixture.upgrade(current).0;
    assert!(!current.log_text().contains("disk t0"), "the removed node was transferred");
    stdout_of(&fixture, &["disk", "remove", VOLUME]).clear();
    current.stop();
    let written =
        TestClient::new("qemu-io").args(["-r", "-f", "qcow2", "-c", "read -P 67 1024 512"]).arg(&layered);
    assert!(written.succeeds().contains("512/512"));
    assert!(!used.exists() && !unused.exists(), "the last process removes the sockets");
}

#[test]
fn added_disks_with_access_rules_and_groups_with_names_of_a_config_are_transferred() {
    let scratch = Scratch::new();
    let [first, second] = ["first.raw", "second.raw"].map(|name| scratch.sparse(name, MIB));
    let fixture =
        UpgradedDaemon { on_tcp: true, ..UpgradedDaemon::new(scratch, &[text(&first), "--format", "raw"]) };
    let current = fixture.serve().start();
    // Unlike identifiers of QEMU, which begin with a letter.
    stdout_of(&fixture, &["group", "add", "7-gold", "--iops-total", "4000"]);
    let added = ["-f", "raw", "--group", "7-gold", "--allow", "127.0.0.0/8", "--description", "second"];
    stdout_of(&fixture, &[&["disk", "add", "second", text(&second)][..], &added].concat());
    let before = all_entries(&fixture);
    let current = fixture.upgrade(current).0;
    assert_eq!(all_entries(&fixture), before);
    qemu_io(["-f", "raw"], ["write -P 1 0 4k", "read -P 1 0 4k"], current.uri("second"));
    let current = fixture.upgrade(current).0;
    assert_eq!(all_entries(&fixture), before);
    current.stop();
}

#[test]
fn untransferable_additions_are_named_with_a_remedy() {
    let scratch = Scratch::new();
    let (first, locked) = (scratch.sparse("first.raw", MIB), scratch.path("locked.qcow2"));
    create_encrypted(&locked);
    let key = scratch.file("key", "abc");
    let fixture = UpgradedDaemon::new(scratch, &[text(&first)]);
    let daemon = fixture.serve().start();
    stdout_of(&fixture, &["disk", "add", "locked", text(&locked), "--secret-file", text(&key)]);
    let stderr = fixture.new_process().fails();
    assert_contains(
        &stderr,
        &[
            "disk locked",
            "cannot be transferred: only the old process has its passphrase",
            "add it to this command line",
        ],
    );
    daemon.wait_for_log(super::UPGRADE_FAILED);
    stdout_of(&fixture, &["disk", "remove", "locked"]);
    let mut qmp = Qmp::negotiated(&fixture.control());
    let passed = File::options().read(true).write(true).open(&first).unwrap();
    let other = tempfile::tempfile_in(fixture.scratch.path("")).unwrap();
    other.set_len(MIB).unwrap();
    drop(passed);
    let set = qmp.command_with_descriptor(&other, "add-fd", &json!({"fdset-id": 1}));
    assert_eq!(set["return"]["fdset-id"], 1, "{set}");
    let node = json!({"driver": "file", "node-name": "f", "filename": "/dev/fdset/1"});
    qmp.command("blockdev-add", node);
    drop(qmp);
    assert_contains(
        &fixture.new_process().fails(),
        &["disk f", "its file was passed to the old process by add-fd"],
    );
    daemon.stop();
}

/// If the new process has the disk in its config, the config applies.
#[test]
fn saved_additions_use_the_config() {
    let scratch = Scratch::new();
    let (first_image, second_image) = (scratch.sparse("one.raw", MIB), scratch.sparse("two.raw", MIB));
    let (nbd, socket) = (scratch.socket("nbd"), scratch.socket("machine"));
    let config = format!(
        "[daemon]\nnbd = \"unix:{}\"\n[disk.one]\nimage = {first_image:?}\nformat = \"raw\"\n",
        text(&nbd)
    );
    let config = scratch.file("weir.toml", config);
    let fixture = UpgradedDaemon::new(scratch, &["--config", text(&config)]);
    let serve = || fixture.serve().at_given_addresses();
    let first = serve().start();
    stdout_of(
        &fixture,
        &["disk", "add", "two", text(&second_image), "-f", "raw", "--iops-total", "500", "--save"],
    );
    let addr = json!({"type": "unix", "path": text(&socket)});
    let export = json!({"type": "vhost-user-blk", "id": "by-hand", "node-name": "two", "addr": addr});
    Qmp::negotiated(&fixture.control()).command("block-export-add", export);
    let mut stream = front_end(&socket);
    features(&mut stream);
    // With another ID at the same address.
    let config_text = std::fs::read_to_string(&config).unwrap();
    let listen_option = format!(
        "{{ type = \"vhost-user-blk\", listen = \"unix:{}\", queues = 1, read-only = true }}",
        text(&socket)
    );
    let nbd = format!("{{ type = \"nbd\", listen = \"unix:{}\" }}", text(&nbd));
    std::fs::write(&config, format!("{config_text}export = [{nbd}, {listen_option}]\n")).unwrap();
    let second = serve().arg("--takeover").start();
    let (status, log) = first.wait();
    assert!(status.success(), "{log}");
    features(&mut stream);
    assert!(!second.log_text().contains("transferred although no config has it"), "{}", second.log_text());
    let exports = entries_with_keys(&fixture, "exports", &["id", "disk"]);
    assert!(exports.iter().all(|export| export["id"] != "by-hand"), "{exports:?}");
    drop(stream);
    second.stop();
}

#[test]
fn node_above_an_added_disk_is_transferred_except_to_older_versions() {
    let scratch = Scratch::new();
    let (first, second) = (scratch.sparse("first.raw", MIB), scratch.sparse("second.raw", MIB));
    let fixture = UpgradedDaemon::new(scratch, &[text(&first)]);
    let daemon = fixture.serve().start();
    stdout_of(&fixture, &["disk", "add", "second", text(&second), "-f", "raw", "--iops-total", "500"]);
    let refused = super::UpgradePeer::connect_as(&fixture.control(), super::FORMAT, "0.1.0")
        .err()
        .expect("an older version is rejected");
    let own_version = env!("CARGO_PKG_VERSION");
    assert_contains(
        &refused,
        &[
            "disk second",
            &format!("weir 0.1.0 cannot take over from weir {own_version}"),
            "stop this weir and start",
        ],
    );
    let mut qmp = Qmp::negotiated(&fixture.control());
    qmp.command("block-export-del", json!({ "id": "second" }));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.command("blockdev-add", json!({ "driver": "raw", "node-name": "over", "file": "second" }));
    let export = json!({ "type": "nbd", "id": "e", "node-name": "over", "name": "over", "writable": true });
    qmp.command("block-export-add", export);
    drop(qmp);
    stdout_of(&fixture, &["throttle", "over", "--bps-total", "7M"]);
    let before = all_entries(&fixture);
    let mut current = daemon;
    for byte in ["1", "2"] {
        let write = format!("write -P {byte} 0 4k");
        qemu_io(["-f", "raw"], [&write], current.uri("over"));
        current = fixture.upgrade(current).0;
        assert_eq!(all_entries(&fixture), before);
        qemu_io(["-f", "raw"], [&format!("read -P {byte} 0 4k")], current.uri("over"));
    }
    let mut qmp = Qmp::negotiated(&fixture.control());
    // weir notices the disconnect of the last client with a short delay.
    let is_used = |disk: &Value| disk["name"] == "over" && disk["connections"] != 0;
    while qmp.command("x-weir-query-status", json!({}))["disks"].as_array().unwrap().iter().any(is_used) {
        pause();
    }
    qmp.command("block-export-del", json!({ "id": "e" }));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.command("blockdev-del", json!({ "node-name": "over" }));
    drop(qmp);
    let disks = entries_with_keys(&fixture, "disks", &["name", "limits"]);
    let second = disks.iter().find(|disk| disk["name"] == "second").expect("the disk is transferred");
    let limits = &second["limits"];
    assert_eq!([&limits["iops-total"], &limits["bps-total"]], [&json!(500), &json!(7 << 20)]);
    fixture.upgrade(current).0.stop();
}
