//! The control socket, with QEMU's own clients and with the harness's client.

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, operator::wait_until, qemu_io, text,
};

fn serve(scratch: &Scratch) -> (Weir, PathBuf) {
    let path = scratch.socket("qmp");
    let weir = Serve::new(scratch)
        .args([scratch.sparse("a.raw", 4 * MIB), scratch.sparse("b.raw", 8 * MIB)])
        .arg("--qmp")
        .arg(format!("unix:{}", text(&path)))
        .start();
    (weir, path)
}

/// Arguments of `block_set_io_throttle`: the six mandatory rates are zero unless the second
/// argument sets them.
fn throttle(disk: &str, overrides: Value) -> Value {
    let mut arguments =
        json!({"device": disk, "bps": 0, "bps_rd": 0, "bps_wr": 0, "iops": 0, "iops_rd": 0, "iops_wr": 0});
    if let Value::Object(overrides) = overrides {
        arguments.as_object_mut().expect("an object").extend(overrides);
    }
    arguments
}

fn inserted(client: &mut Qmp, disk: &str) -> Value {
    let list = client.command("query-block", json!({}));
    let found = list.as_array().expect("a list").iter().find(|entry| entry["device"] == disk);
    found.unwrap_or_else(|| panic!("{disk} is missing in {list}"))["inserted"].clone()
}

#[test]
fn qemus_library_works() {
    let scratch = Scratch::new();
    let (weir, path) = serve(&scratch);
    let script = scratch.file(
        "client.py",
        r#"
import asyncio, sys
from qemu.qmp import QMPClient, ExecuteError

async def main():
    client, other = QMPClient("test"), QMPClient("other")
    await client.connect(sys.argv[1])
    await other.connect(sys.argv[1])
    version = await client.execute("query-version")
    assert version["package"].startswith("weir "), version
    names = {command["name"] for command in await client.execute("query-commands")}
    assert {"qmp_capabilities", "block_set_io_throttle", "object-add", "quit"} <= names, names
    devices = await client.execute("query-block")
    assert [device["device"] for device in devices] == ["a", "b"], devices
    limits = dict.fromkeys(["bps", "bps_rd", "bps_wr", "iops_rd", "iops_wr"], 0)
    with other.listener("X_WEIR_SETTINGS_CHANGED") as listener:
        await client.execute("block_set_io_throttle", {"device": "a", "iops": 100, **limits})
        event = await asyncio.wait_for(listener.get(), 300)
        assert event["data"] == {"name": "a"}, event
    try:
        await other.execute("block_set_io_throttle", {"device": "a"})
    except ExecuteError as error:
        assert str(error) == "Parameter 'bps' is missing", error
    else:
        raise AssertionError("should have failed")
    answers = await asyncio.gather(*(client.execute("query-status") for _ in range(50)))
    assert all(answer["running"] for answer in answers)
    with other.listener("SHUTDOWN") as listener:
        await client.execute("quit")
        event = await asyncio.wait_for(listener.get(), 300)
        assert event["data"] == {"guest": False, "reason": "host-qmp-quit"}, event

asyncio.run(main())
"#,
    );
    TestClient::new("qmp-python").arg(script).arg(&path).succeeds();
    let (status, log) = weir.wait();
    assert!(status.success(), "{log}");
    assert!(!path.exists(), "the daemon must remove its socket");
}

#[test]
fn qmp_shell_works() {
    let scratch = Scratch::new();
    let (_weir, path) = serve(&scratch);
    let script = "object-add qom-type=throttle-group id=gold limits={\"iops-total\":500}\n\
                  block_set_io_throttle device=b bps=0 bps_rd=0 bps_wr=0 iops=700 iops_rd=0 \
                  iops_wr=0 group=gold\n\
                  qom-get path=/objects/gold property=x-iops-total\n\
                  nonsense\n";
    let stdout = TestClient::new("qmp-shell").arg(&path).with_stdin(script).succeeds();
    assert_contains(
        &stdout,
        &["{\"return\": {}}", "{\"return\": 700}", "The command nonsense has not been found"],
    );
}

#[test]
fn limits_are_set_shared_and_lifted() {
    let scratch = Scratch::new();
    let (_weir, path) = serve(&scratch);
    let mut client = Qmp::negotiated(&path);
    client.command(
        "block_set_io_throttle",
        throttle("a", json!({"iops": 100, "iops_max": 500, "iops_size": 4096})),
    );
    let a = inserted(&mut client, "a");
    assert_eq!((&a["iops"], &a["iops_max"], &a["iops_max_length"]), (&json!(100), &json!(500), &json!(1)));
    assert_eq!((&a["iops_size"], &a["group"]), (&json!(4096), &json!("a")));
    // Two disks in one group: the last setting wins, for both.
    for (disk, iops) in [("a", 300), ("b", 200)] {
        client.command("block_set_io_throttle", throttle(disk, json!({"iops": iops, "group": "gold"})));
    }
    for disk in ["a", "b"] {
        let shown = inserted(&mut client, disk);
        assert_eq!((&shown["iops"], &shown["group"]), (&json!(200), &json!("gold")));
        assert_eq!(shown.get("iops_max"), None);
    }
    // For a disk in a group, a command without `group` changes the limits of its group.
    client.command("block_set_io_throttle", throttle("a", json!({"bps_rd": 1 << 20})));
    assert_eq!(inserted(&mut client, "b")["bps_rd"], 1 << 20);
    client.command("block_set_io_throttle", throttle("a", json!({})));
    assert_eq!(inserted(&mut client, "a").get("group"), None);
    assert_eq!(inserted(&mut client, "b")["group"], "gold");
}

#[test]
fn rejected_change_has_no_effect() {
    let scratch = Scratch::new();
    let (_weir, path) = serve(&scratch);
    let mut client = Qmp::negotiated(&path);
    client.command("block_set_io_throttle", throttle("a", json!({"iops": 100})));
    let before = inserted(&mut client, "a");
    for (wrong, expected) in [
        (
            json!({"iops": 100, "iops_max": 50}),
            "Parameter 'iops_max': iops-total-max (50) is below iops-total (100); a burst rate \
             must be at least the rate",
        ),
        (
            json!({"iops": 7, "iops_rd": 7}),
            "Parameter 'iops': iops-total (7) cannot be set together with iops-read (7); use \
             either the total or read and write",
        ),
        (json!({"iops": 1.5}), "Invalid parameter type for 'iops', expected: integer"),
        (json!({"iops": -1}), "Parameter 'iops' (-1) is out of range; it is from 0 to 1000000000000000"),
        (
            json!({"iops": 1, "iops_maxx": 2}),
            "Parameter 'iops_maxx' is unexpected (did you mean 'iops_max'?)",
        ),
        (json!({"iops": 1, "id": "a"}), "Need exactly one of 'device' and 'id'"),
        (json!({"iops": 1, "group": "b"}), "b: a disk or a group has this name already (choose another)"),
    ] {
        let refused = client.command_error("block_set_io_throttle", throttle("a", wrong));
        assert_eq!(refused, ("GenericError".to_owned(), expected.to_owned()));
        assert_eq!(inserted(&mut client, "a"), before);
    }
    let missing = client.command_error("block_set_io_throttle", throttle("nope", json!({})));
    assert_eq!(missing, ("DeviceNotFound".to_owned(), "Device 'nope' not found".to_owned()));
}

#[test]
fn weirs_own_settings_are_set_atomically() {
    let scratch = Scratch::new();
    let (_weir, path) = serve(&scratch);
    let mut client = Qmp::negotiated(&path);
    let status = |client: &mut Qmp| client.command("x-weir-query-status", json!({}));
    client.command(
        "object-add",
        json!({"qom-type": "throttle-group", "id": "host", "limits": {"iops-total": 1000}}),
    );
    client.command(
        "object-add",
        json!({"qom-type": "throttle-group", "id": "gold", "x-weir-parent": "host", "x-weir-weight": 300}),
    );
    client.command(
        "x-weir-set",
        json!({"name": "a", "group": "gold", "iops-read": 50, "weight": 7, "iops-reservation": 900}),
    );
    let shown = status(&mut client)["disks"][0].clone();
    assert_eq!(
        (&shown["group"], &shown["weight"], &shown["iops-reservation"]),
        (&json!("gold"), &json!(7), &json!(900))
    );
    assert_eq!(shown["limits"], json!({"iops-read": 50}));
    // 900 of 1000 are reserved: another 200 exceed the limit by 100, so the whole command fails.
    let (_, why) = client.command_error(
        "x-weir-set",
        json!({"name": "b", "group": "gold", "weight": 9, "iops-reservation": 200}),
    );
    assert_contains(&why, &["1100", "1000", "100"]);
    let b = status(&mut client)["disks"][1].clone();
    assert_eq!((b.get("group"), &b["weight"]), (None, &json!(100)));
    client.command("x-weir-set", json!({"name": "a", "group": ""}));
    assert_eq!(status(&mut client)["disks"][0].get("group"), None);
    client.command("object-del", json!({"id": "gold"}));
    let (_, why) = client.command_error("x-weir-set", json!({"name": "a", "weight": 0}));
    assert_eq!(why, "Parameter 'weight' (0) is out of range; it is from 1 to 10000");
}

#[test]
fn requests_are_counted() {
    let scratch = Scratch::new();
    let (weir, path) = serve(&scratch);
    let mut client = Qmp::negotiated(&path);
    client.command("block_set_io_throttle", throttle("a", json!({"iops": 1000})));
    // Latencies are measured from the first query on.
    client.command("query-blockstats", json!({}));
    qemu_io(["-f", "raw"], ["write 4k 64k", "read 0 4k", "discard 512k 16k", "flush"], weir.uri("a"));
    let stats = client.command("query-blockstats", json!({}));
    assert_eq!(stats[0]["device"], "a");
    let counted = &stats[0]["stats"];
    let expected = json!({
        "rd_operations": 1, "rd_bytes": 4 << 10,
        "wr_operations": 1, "wr_bytes": 64 << 10, "wr_highest_offset": 68 << 10,
        "unmap_operations": 1, "unmap_bytes": 16 << 10,
        "account_failed": false, "timed_stats": [],
    });
    for (member, value) in expected.as_object().expect("an object") {
        assert_eq!(counted[member], *value, "{member}: {counted:#}");
    }
    for member in ["flush_operations", "rd_total_time_ns", "wr_total_time_ns", "flush_total_time_ns"] {
        assert!(counted[member].as_u64() > Some(0), "{member}: {counted:#}");
    }
    assert_eq!(stats[1]["stats"]["rd_operations"], 0);
    let status = client.command("x-weir-query-status", json!({}));
    let throttle = &status["disks"][0]["throttle"];
    assert_eq!(throttle["writes"]["bytes"], (64 + 16) << 10);
    assert!(throttle["tokens"]["iops-total"].as_u64().is_some(), "{throttle}");
    // The daemon notices the disconnect with a delay.
    wait_until(&scratch, |status| status["exports"][0]["connections"] == 0);
}

#[test]
fn socket_is_private_to_its_owner() {
    let scratch = Scratch::new();
    let (_weir, path) = serve(&scratch);
    assert_eq!(fs::metadata(&path).expect("the file exists").permissions().mode() & 0o777, 0o600);
    // Also if the mode permits all users: the daemon checks the peer's user ID.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("the mode can be set");
    fs::set_permissions(path.parent().expect("a directory"), fs::Permissions::from_mode(0o755))
        .expect("the mode can be set");
    let connect =
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(4096))";
    let other_user = TestClient::new("setpriv").args([
        "--reuid=65534",
        "--clear-groups",
        "/usr/bin/python3",
        "-c",
        connect,
    ]);
    assert_contains(
        &other_user.arg(&path).succeeds(),
        &["this socket is for root and the user with the number 0"],
    );
    Qmp::negotiated(&path);
}

#[test]
fn signal_ends_the_daemon_with_an_event() {
    let scratch = Scratch::new();
    let (weir, path) = serve(&scratch);
    let mut client = Qmp::negotiated(&path);
    weir.stop();
    assert_eq!(client.event("SHUTDOWN"), json!({"guest": false, "reason": "host-signal"}));
    assert_eq!(client.drain(), 0);
}
