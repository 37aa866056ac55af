//! Reloads of the config file while the daemon serves.

use std::{
    fs,
    os::unix::net::{UnixDatagram, UnixListener},
    path::PathBuf,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    harness::{
        DEADLINE, MIB, Qmp, RawNbdClient, Scratch, Serve, TestClient, TestOutcome, Weir, assert_contains,
        operator::{self, find, run_failing, run_json, run_ok, serve, socket, status},
        text, weir,
    },
    vhost_user::{features, front_end},
};

/// A daemon with a config file that tests rewrite.
struct ReloadedDaemon {
    scratch: Scratch,
    file: PathBuf,
    weir: Weir,
}

const BEFORE: &str = "
[group.gold]
iops-total = 1000

[disk.a]
image = \"memory:1M\"
group = \"gold\"
iops-reservation = 600

[disk.b]
image = \"memory:1M\"
group = \"gold\"
iops-reservation = 400
";

impl ReloadedDaemon {
    fn new(disks: &str) -> Self {
        let scratch = Scratch::new();
        let file = scratch.file("weir.toml", with_daemon(&scratch, disks));
        let weir = serve(&scratch, &file);
        Self { scratch, file, weir }
    }

    fn write(&self, disks: &str) {
        fs::write(&self.file, with_daemon(&self.scratch, disks)).unwrap();
    }

    fn names(&self, list: &str) -> Vec<String> {
        let status = status(&self.scratch, "0");
        let entries = status[list].as_array().unwrap();
        entries.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect()
    }

    /// A setting in force of a disk or a group.
    fn setting(&self, list: &str, name: &str, key: &str) -> Value {
        find(&status(&self.scratch, "0"), list, name)[key].clone()
    }

    /// Asserts that the reload fails, and that the dry run reports the same errors.
    #[track_caller]
    fn assert_rejected(&self, disks: &str, expect: &[&str]) {
        self.assert_rejected_on_apply(disks, expect);
        assert_contains(&run_failing(&self.scratch, &["reload", "--dry-run"]), expect);
    }

    /// Asserts that the reload fails with errors that a dry run cannot detect.
    #[track_caller]
    fn assert_rejected_on_apply(&self, disks: &str, expect: &[&str]) {
        let before = without_counters(status(&self.scratch, "0"));
        self.write(disks);
        let _ = weir(&["reload", "--dry-run", "--qmp", &socket(&self.scratch)]).run();
        assert_eq!(without_counters(status(&self.scratch, "0")), before, "nothing was to change");
        assert_contains(&run_failing(&self.scratch, &["reload"]), expect);
        assert_eq!(without_counters(status(&self.scratch, "0")), before, "nothing has changed");
    }
}

/// The status without counters.
fn without_counters(mut status: Value) -> Value {
    let members = status.as_object_mut().unwrap();
    members.retain(|key, _| ["disks", "groups", "exports"].contains(&key.as_str()));
    for entry in members.values_mut().flat_map(|list| list.as_array_mut().unwrap()) {
        entry
            .as_object_mut()
            .unwrap()
            .retain(|key, _| !["rate", "throttle", "memory"].contains(&key.as_str()));
    }
    status
}

/// A config with the addresses of the test's daemon, and these disks.
pub(crate) fn with_daemon(scratch: &Scratch, disks: &str) -> String {
    let nbd = text(&scratch.socket("nbd")).to_owned();
    let qmp = socket(scratch);
    // The sandbox must allow images that are added later.
    format!("[daemon]\nqmp = \"{qmp}\"\nnbd = \"unix:{nbd}\"\nimage-root = \".\"\n{disks}")
}

#[test]
fn reload_applies_the_difference_as_one_change() {
    let daemon = ReloadedDaemon::new(BEFORE);
    let uri = format!("nbd+unix:///a?socket={}", text(&daemon.scratch.socket("nbd")));
    let (mut wire, _) = RawNbdClient::negotiated(&daemon.scratch.socket("nbd"), "a");
    assert_eq!(run_ok(&daemon.scratch, &["reload", "--dry-run"]), "nothing would change\n");
    assert_eq!(run_ok(&daemon.scratch, &["reload"]), "nothing has changed\n");
    // Reservations are swapped, which does not fit one after another; b is removed and c added,
    // with a new image; a gets a limit; a change that was not saved is undone.
    run_ok(&daemon.scratch, &["throttle", "gold", "--weight", "7"]);
    daemon.scratch.sparse("c.raw", MIB);
    daemon.write(
        "
[group.gold]
iops-total = 1000

[group.silver]
bps-total = \"5M\"

[disk.a]
image = \"memory:1M\"
group = \"gold\"
iops-reservation = 300
iops-read = 50
prefetch = false
on-write-error = \"stop\"

[disk.c]
image = \"c.raw\"
format = \"raw\"
group = \"gold\"
iops-reservation = 700
",
    );
    let expect = "\
TYPE    NAME    CHANGE
disk    a       prefetch: auto → off
disk    a       on-write-error: report → stop
group   silver  added
group   gold    weight: 7 → 100
disk    a       iops-read: none → 50
disk    a       iops-reservation: 600 → 300
disk    c       added
";
    let before = without_counters(status(&daemon.scratch, "0"));
    let previewed = run_ok(&daemon.scratch, &["reload", "--dry-run"]);
    assert_eq!(without_counters(status(&daemon.scratch, "0")), before, "nothing was to change");
    let stdout = run_ok(&daemon.scratch, &["reload"]);
    assert_eq!(previewed, stdout);
    assert_contains(&stdout, &expect.lines().collect::<Vec<_>>());
    assert_contains(
        &stdout,
        &["export  b       removed at unix:", "export  c       added at unix:", "disk    b       removed\n"],
    );
    assert_eq!(
        (daemon.names("disks"), daemon.names("groups")),
        (vec!["a".into(), "c".into()], vec!["gold".into(), "silver".into()])
    );
    assert_eq!(daemon.setting("disks", "a", "limits"), json!({ "iops-read": 50 }));
    assert_eq!(daemon.setting("disks", "c", "iops-reservation"), 700);
    // Connected clients stay connected, and new ones see the new exports.
    wire.read(0, 512).unwrap();
    drop(wire);
    let list = TestClient::new("nbdinfo").args(["--list", &uri]).succeeds();
    assert!(list.contains("export=\"c\"") && !list.contains("export=\"b\""), "{list}");
    assert_eq!(run_json(&daemon.scratch, &["reload", "--json"]), json!([]));
    // Back to the first config, by SIGHUP.
    daemon.write(BEFORE);
    daemon.weir.signal(Signal::SIGHUP);
    daemon.weir.wait_for_log("the config file was read again");
    assert_eq!(daemon.names("disks"), ["a", "b"]);
    assert_eq!(daemon.setting("disks", "a", "iops-reservation"), 600);
    let log = daemon.weir.stop();
    assert_contains(&log, &["reloaded"]);
}

/// Random groups and disks, whose reservations may exceed the limits.
fn random_config(random: &mut fastrand::Rng) -> String {
    let mut text = "\n[group.host]\niops-total = 1000\n".to_owned();
    let groups: Vec<_> = ["gold", "silver", "tin"].into_iter().filter(|_| random.bool()).collect();
    for group in &groups {
        let (reserved, limit) = (random.u32(0..5) * 100, random.u32(1..5) * 200);
        text += &format!(
            "\n[group.{group}]\ngroup = \"host\"\niops-reservation = {reserved}\niops-total = {limit}\n"
        );
    }
    text += "\n[disk.always]\nimage = \"memory:1M\"\n";
    for disk in ["a", "b", "c"] {
        if random.bool() {
            continue;
        }
        let (weight, reserved) = (random.u32(1..4) * 100, random.u32(0..4) * 100);
        let group = groups.get(random.usize(..=groups.len())).unwrap_or(&"host");
        text += &format!(
            "\n\
             [disk.{disk}]\n\
             image = \"memory:1M\"\n\
             group = \"{group}\"\n\
             weight = {weight}\n\
             iops-reservation = {reserved}\n"
        );
        if random.bool() {
            text += "prefetch = false\non-write-error = \"stop\"\nbps-read = \"1M\"\n";
        }
        if random.bool() {
            text += "export = [{ type = \"nbd\", listen = \"unix:own\" }]\n";
        }
    }
    text
}

#[test]
fn reload_and_start_yield_the_same_state() {
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let daemon = ReloadedDaemon::new("\n[disk.always]\nimage = \"memory:1M\"\n");
    let found = |scratch: &Scratch| {
        let mut status = without_counters(status(scratch, "0"));
        for export in status["exports"].as_array_mut().unwrap() {
            // The directories differ.
            let address = export["address"].as_str().unwrap();
            export["address"] = address.rsplit('/').next().unwrap().into();
        }
        status
    };
    for round in 0..10 {
        let disks = random_config(&mut random);
        let before = found(&daemon.scratch);
        daemon.write(&disks);
        let at = format!("seed {seed}, round {round}: {disks}");
        let is_right = weir(&["check-config", text(&daemon.file)]).run().code() == 0;
        let control = socket(&daemon.scratch);
        let previewed = weir(&["reload", "--dry-run", "--json", "--qmp", &control]).run();
        assert_eq!(found(&daemon.scratch), before, "{at}: nothing was to change");
        let reloaded = weir(&["reload", "--json", "--qmp", &control]).run();
        let result_of = |outcome: &TestOutcome| (outcome.code(), outcome.stdout(), outcome.stderr());
        assert_eq!(result_of(&previewed), result_of(&reloaded), "{at}");
        assert_eq!(reloaded.code() == 0, is_right, "{at}: {}", reloaded.stderr());
        if !is_right {
            assert_eq!(found(&daemon.scratch), before, "{at}: nothing has changed");
            continue;
        }
        let scratch = Scratch::new();
        let file = scratch.file("weir.toml", with_daemon(&scratch, &disks));
        let _fresh = serve(&scratch, &file);
        assert_eq!(found(&daemon.scratch), found(&scratch), "{at}");
    }
    daemon.weir.stop();
}

#[test]
fn invalid_config_is_named_and_changes_nothing() {
    let daemon = ReloadedDaemon::new(BEFORE);
    let line = |old: &str, new: &str| {
        assert_eq!(BEFORE.matches(old).count(), 1, "{old}");
        // The invalid line comes with a valid change, which must not be applied.
        BEFORE.replace(old, new).replace("iops-total = 1000", "iops-total = 2000")
    };
    daemon.assert_rejected(
        &line("iops-reservation = 600", "iops-reservatin = 600"),
        &["weir.toml:12: disk.a.iops-reservatin: unknown key"],
    );
    daemon.assert_rejected(
        &line("iops-reservation = 400", "iops-reservation = 1900"),
        &["weir.toml:17: disk.b.iops-reservation = 1900", "would be reserved"],
    );
    daemon.assert_rejected(
        &line("iops-reservation = 400", "cache = \"none\""),
        &["weir.toml:14: disk.b: cache: cannot be changed while the disk is served"],
    );
    daemon.assert_rejected(
        &format!("{}\n[disk.c]\nimage = \"c.raw\"\nformat = \"raw\"\n", line("iops-reservation = 400", "")),
        &["c.raw: no such file (create it first"],
    );
    let pipe = daemon.scratch.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let secret = "\n[disk.c]\nimage = \"c.qcow2\"\nformat = \"qcow2\"\nsecret-file = \"pipe\"\n";
    daemon.assert_rejected(
        &(line("iops-reservation = 400", "") + secret),
        &["disk c: secret-file:", "pipe is no regular file, and only a start waits for a pipe"],
    );
    for (key, expect) in [
        ("workers = 7", "daemon.workers = 7: cannot be changed while weir runs"),
        ("metrics = \"unix:m\"", "daemon.metrics = \"unix:m\": cannot be changed while weir runs"),
        ("on-event = \"/bin/true\"", "daemon.on-event = \"/bin/true\": cannot be changed while weir runs"),
        ("record = { directory = \"nowhere\" }", "daemon.record"),
    ] {
        let file = format!("{key}\n{BEFORE}");
        daemon.assert_rejected(&file, &[&format!("weir.toml:5: {expect}")]);
    }
    let export_lines = "\n\
                [disk.d]\n\
                image = \"memory:1M\"\n\
                export = [{ type = \"nbd\", listen = \"unix:other\" }, \
                { type = \"fuse\", file = \"none\" }]\n";
    daemon.assert_rejected(
        &(line("iops-reservation = 400", "") + export_lines),
        &[
            "weir.toml:21: disk.d.export[1].file",
            "disk d at ",
            "the sandbox does not allow this daemon to create devices",
        ],
    );
    // The last step fails, after an export was removed and two were added.
    let mut qmp = Qmp::negotiated(&daemon.scratch.socket("qmp"));
    let _taken = UnixListener::bind(daemon.scratch.path("taken")).unwrap();
    let export_lines = "\n\
                [disk.d]\n\
                image = \"memory:1M\"\n\
                export = [{ type = \"nbd\", listen = \"unix:other\" }, \
                { type = \"vhost-user-blk\", listen = \"unix:taken\" }]\n";
    daemon.assert_rejected_on_apply(
        &(line("iops-reservation = 400", "description = \"another\"") + export_lines),
        &["weir.toml:21: disk.d.export[1].listen", "disk d: unix:", "taken: a socket exists there"],
    );
    assert!(!daemon.scratch.path("other").exists(), "the export's socket was removed");
    let client = "\n\
                  [disk.d]\n\
                  image = \"memory:1M\"\n\
                  export = [{ type = \"vhost-user-blk\", listen = \"unix:vm\", client = true }]\n";
    daemon.assert_rejected(
        &(line("iops-reservation = 400", "") + client),
        &[
            "disk d at unix:",
            "connect to a front end (start it with such an export, or start it with --sandbox off)",
        ],
    );
    let events = qmp.command("x-weir-query-events", json!({}));
    assert_eq!(qmp.count_events("X_WEIR_SETTINGS_CHANGED"), 0, "no limit has changed");
    assert_eq!(qmp.count_events("BLOCK_EXPORT_DELETED"), 0, "an event was sent, but the export exists");
    let kinds = events.as_array().unwrap().iter().map(|event| event["kind"].as_str().unwrap());
    let kinds: Vec<_> = kinds.filter(|kind| kind.contains("added") || kind.contains("changed")).collect();
    assert!(kinds.is_empty(), "no event was sent: {kinds:?}");
    let (busy, _) = RawNbdClient::negotiated(&daemon.scratch.socket("nbd"), "b");
    let without_b = BEFORE.split("[disk.b]").next().unwrap();
    daemon.assert_rejected(
        without_b,
        &["export b of disk b: in use: client ", &format!("({})", std::process::id())],
    );
    drop(busy);
    daemon.weir.stop();
}

#[test]
fn rolled_back_exports_are_unchanged() {
    let disk = |more: &str, last: &str| {
        let listens =
            ["one", "two", "three"].map(|end| format!("{{ type = \"nbd\", listen = \"unix:{end}\" }}"));
        let exports = listens.join(", ") + last;
        format!("{BEFORE}[disk.d]\nimage = \"memory:1M\"\n{more}\nexport = [{exports}]\n")
    };
    let daemon = ReloadedDaemon::new(&disk("", ""));
    let _taken = UnixListener::bind(daemon.scratch.path("taken")).unwrap();
    daemon.assert_rejected_on_apply(
        &disk("description = \"another\"", ", { type = \"vhost-user-blk\", listen = \"unix:taken\" }"),
        &["taken: a socket exists there"],
    );
    daemon.weir.stop();
}

#[test]
fn change_of_an_export_in_use_is_rejected_with_line_and_keys() {
    let disk = |more: &str| {
        let export = format!("export = {{ type = \"vhost-user-blk\", listen = \"unix:vm\"{more} }}");
        format!("\n[disk.b]\nimage = \"memory:1M\"\n\n[disk.a]\nimage = \"memory:1M\"\n{export}\n")
    };
    let daemon = ReloadedDaemon::new(&disk(""));
    let mut stream = front_end(&daemon.scratch.path("vm"));
    features(&mut stream);
    daemon.assert_rejected(
        &disk(", queues = 4, discard = false"),
        &[
            "disk.a.export",
            ": discard, queues: cannot be changed now: export a of disk a: in use: ",
            &format!("({}) (disconnect it first)", std::process::id()),
        ],
    );
    drop(stream);
    daemon.weir.stop();
}

#[test]
fn disk_without_export_and_listener_is_reported() {
    let scratch = Scratch::new();
    let vm =
        "[disk.vm]\nimage = \"memory:1M\"\nexport = { type = \"vhost-user-blk\", listen = \"unix:vm\" }\n";
    let config = format!("[daemon]\nqmp = \"{}\"\n{vm}", socket(&scratch));
    let file = scratch.file("weir.toml", &config);
    let weir = serve(&scratch, &file);
    fs::write(&file, format!("{config}\n[disk.new]\nimage = \"memory:1M\"\n")).unwrap();
    assert_contains(
        &run_failing(&scratch, &["reload"]),
        &[
            "weir.toml:7: disk.new: has no export",
            "[daemon] no nbd",
            "(write its export, such as { type = \"nbd\", listen = \"unix:PATH\" })",
            "the sandbox does not allow TCP sockets",
        ],
    );
    let other =
        "\n[disk.new]\nimage = \"memory:1M\"\nexport = { type = \"nbd\", listen = \"localhost:1\" }\n";
    fs::write(&file, format!("{config}{other}")).unwrap();
    assert_contains(
        &run_failing(&scratch, &["reload"]),
        &["weir.toml:9: disk.new.export.listen", ": disk new: "],
    );
    weir.stop();
}

#[test]
fn exports_follow_their_listeners() {
    let disk = "\n[disk.a]\nimage = \"memory:1M\"\n";
    let daemon = ReloadedDaemon::new(disk);
    let other = daemon.scratch.path("other");
    let address = format!("unix:{}", text(&daemon.scratch.socket("nbd")));
    let both = format!(
        "export = [{{ type = \"nbd\", listen = \"{address}\" }}, {{ type = \"nbd\", listen = \
         \"unix:other\", name = \"x\" }}]\n"
    );
    let second = "\n[disk.b]\nimage = \"memory:1M\"\n";
    daemon.write(&format!("{disk}{both}{second}"));
    assert_contains(&run_ok(&daemon.scratch, &["reload"]), &["export  x     added at unix:"]);
    let size = |uri: &str| TestClient::new("nbdinfo").args(["--size", uri]).succeeds();
    assert_eq!(size(&format!("nbd+unix:///x?socket={}", text(&other))), "1048576\n");
    daemon.write(&format!("{disk}description = \"the first\"\n{second}"));
    let mut qmp = Qmp::negotiated(&daemon.scratch.socket("qmp"));
    let stdout = run_ok(&daemon.scratch, &["reload"]);
    let deleted = [(); 2].map(|()| qmp.event("BLOCK_EXPORT_DELETED"));
    assert_eq!(deleted, [json!({ "id": "a" }), json!({ "id": "x" })]);
    assert_contains(
        &stdout,
        &["export  x     removed at unix:", "export  a     removed at unix:", "export  a     added at unix:"],
    );
    assert!(!other.exists(), "no listener");
    let list = TestClient::new("nbdinfo")
        .args(["--list", &format!("nbd+unix:///?socket={}", text(&daemon.scratch.socket("nbd")))])
        .succeeds();
    assert_contains(&list, &["the first"]);
    daemon.weir.stop();
}

#[test]
fn config_adopts_a_disk_added_over_qmp() {
    let daemon = ReloadedDaemon::new("\n[disk.a]\nimage = \"memory:1M\"\n");
    let mut qmp = Qmp::negotiated(&daemon.scratch.socket("qmp"));
    qmp.command(
        "blockdev-add",
        json!({ "driver": "x-weir-memory", "size": MIB, "node-name": "b", "discard": "ignore" }),
    );
    let with =
        |keys: &str| format!("\n[disk.a]\nimage = \"memory:1M\"\n\n[disk.b]\nimage = \"memory:1M\"\n{keys}");
    let refused = |keys: &str, why: &str| {
        let rule = format!("disk.b: {why}: cannot be changed while the disk is served");
        daemon.assert_rejected(&with(keys), &[&rule]);
    };
    refused("", "discard");
    refused("detect-zeroes = \"on\"\ndelay = \"read=1ms\"\n", "discard, detect-zeroes, delay");
    refused("discard = \"ignore\"\noptions = \"size=512\"\n", "options");
    daemon.write(&with("discard = \"ignore\"\n"));
    assert_contains(&run_ok(&daemon.scratch, &["reload"]), &["export  b     added at unix:"]);
    daemon.weir.stop();
}

#[test]
fn service_manager_is_notified_of_a_reload() {
    let scratch = Scratch::new();
    let notify = scratch.socket("notify");
    let socket = UnixDatagram::bind(&notify).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    let notification = || {
        let mut message = [0; 256];
        let length = socket.recv(&mut message).expect("a message in time");
        String::from_utf8_lossy(&message[..length]).into_owned()
    };
    let file = scratch.file("weir.toml", with_daemon(&scratch, "[disk.a]\nimage = \"memory:1M\"\n"));
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .arg("--config")
        .arg(&file)
        .env("NOTIFY_SOCKET", &notify)
        .start();
    assert_eq!(notification().trim_end(), "READY=1");
    // An error in the file does not stop the daemon.
    fs::write(&file, "[disk.a]\n").unwrap();
    for expect in ["nothing has changed: ", "nothing has changed: "] {
        weir.signal(Signal::SIGHUP);
        assert_contains(&notification(), &["RELOADING=1", "MONOTONIC_USEC="]);
        assert_eq!(notification().trim_end(), "READY=1");
        assert_contains(&weir.wait_for_log(expect), &["weir.toml:1: disk.a: no image"]);
    }
    weir.stop();
}

#[test]
fn reload_without_a_config_file_is_rejected() {
    let scratch = Scratch::new();
    let weir = operator::start(&scratch, &[]);
    assert_contains(&run_failing(&scratch, &["reload"]), &["started without a config file", "--config FILE"]);
    weir.stop();
}

#[test]
fn commands_wait_for_the_end_of_a_reload() {
    let daemon = ReloadedDaemon::new("sandbox = \"off\"\n[disk.a]\nimage = \"memory:1M\"\n");
    let server = UnixListener::bind(daemon.scratch.socket("back")).unwrap();
    let image = format!("nbd+unix:///?socket={}", text(&daemon.scratch.socket("back")));
    daemon.write(&format!(
        "sandbox = \"off\"\n\
         [disk.b]\n\
         image = \"{image}\"\n\
         format = \"raw\"\n\
         [disk.c]\n\
         image = \"memory:2M\"\n\
         [group.g]\n"
    ));
    let path = daemon.scratch.socket("qmp");
    let mut clients = [(); 4].map(|()| Qmp::negotiated(&path));
    let [reload, disk, node, group] = &mut clients;
    let send = |client: &mut Qmp, command: &str, arguments: Value| {
        client.send(json!({ "execute": command, "arguments": arguments }).to_string());
    };
    send(reload, "x-weir-reload", json!({}));
    // The reload has begun, and opens its images.
    let connection = server.accept().unwrap();
    send(disk, "x-weir-add-disk", json!({ "name": "c", "keys": { "image": "memory:4M" } }));
    send(
        node,
        "blockdev-add",
        json!({ "driver": "null-co", "node-name": "c", "size": 1 << 20, "read-zeroes": true }),
    );
    send(group, "x-weir-add-group", json!({ "name": "g", "keys": { "iops-total": 9 } }));
    // Status queries do not wait for the reload.
    assert_eq!(daemon.names("disks"), ["a"]);
    assert_eq!(daemon.names("groups"), [""; 0]);
    drop((connection, server));
    let changes = reload.next_reply();
    assert!(changes["return"].is_array(), "{changes}");
    for client in [disk, node, group] {
        let refused = client.next_reply();
        assert!(refused["error"]["desc"].is_string(), "{refused}");
    }
    assert_eq!(daemon.names("disks"), ["c"]);
    let status = status(&daemon.scratch, "0");
    assert_eq!(find(&status, "disks", "c")["size"], 2 << 20);
    assert_ne!(find(&status, "groups", "g")["limits"]["iops-total"], 9);
    daemon.weir.stop();
}
