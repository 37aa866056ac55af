//! `weir disk move`: two daemons, one etcd, one image that both can reach. The tests compare
//! states, and assert that at most one burst plus the rate is admitted since the first request,
//! which holds on slow hosts as well.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Stdio,
    thread::{self, JoinHandle},
    time::Instant,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{
    cluster::{EtcdServer, until},
    harness::{
        MIB, Qmp, Scratch, Serve, TestClient, TestOutcome, Weir, assert_contains, nbdsh_command, qemu_img,
        qemu_io, text, weir,
    },
};

const GROUPS: &str = "[group.gold]\ncluster = true\n[group.small]\niops-total = 100\n";

struct MigrationHost {
    scratch: Scratch,
    weir: Option<Weir>,
}

impl MigrationHost {
    fn start(name: &str, etcd: &EtcdServer, images: &Scratch, more: &str) -> Self {
        Self::start_with(name, etcd, images, &format!("[disk.base]\nimage = \"memory:1M\"\n{more}"))
    }

    fn start_with(name: &str, etcd: &EtcdServer, images: &Scratch, more: &str) -> Self {
        let scratch = Scratch::new();
        let nbd = scratch.socket("nbd");
        let config = format!(
            "[daemon]\n\
             nbd = \"unix:{}\"\n\
             state = \"{}\"\n\
             image-root = \"{}\"\n\
             [cluster]\n\
             name = \"lab\"\n\
             host = \"{name}\"\n\
             etcd = \"{}\"\n\
             {more}",
            text(&nbd),
            text(&scratch.path("state")),
            text(&images.path("")),
            etcd.url()
        );
        scratch.file("weir.toml", config);
        let mut host = Self { scratch, weir: None };
        host.restart();
        until("the host has joined", || host.run(&["cluster", "status", "--json"]).json()["joined"] == true);
        host
    }

    fn restart(&mut self) {
        self.weir = Some(self.serve().start());
    }

    fn serve(&self) -> Serve {
        let (file, control) = (self.scratch.path("weir.toml"), format!("unix:{}", text(&self.control())));
        Serve::new(&self.scratch).at_given_addresses().args(["--config", text(&file), "--qmp", &control])
    }

    fn stop(&mut self) {
        self.weir.take().unwrap().stop();
    }

    fn control(&self) -> PathBuf {
        self.scratch.socket("control")
    }

    fn weir(&self) -> &Weir {
        self.weir.as_ref().unwrap()
    }

    fn run(&self, arguments: &[&str]) -> TestClient {
        weir(arguments).args(["--qmp", &format!("unix:{}", text(&self.control()))])
    }

    fn disk(&self, name: &str) -> Option<Value> {
        let status = self.run(&["status", "--json", "--interval", "0"]).json();
        status["disks"].as_array().unwrap().iter().find(|disk| disk["name"] == name).cloned()
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", text(&self.scratch.socket("nbd")))
    }

    fn io(&self, commands: &[&str]) -> String {
        qemu_io(["-f", "raw"], commands, self.uri("vm"))
    }

    fn move_to(&self, host: &str) -> TestClient {
        self.run(&["disk", "move", "vm", "--to", host])
    }
}

#[test]
fn migration_keeps_settings_and_used_burst() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.path("vm.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "4M"]).succeeds();
    let disk = format!(
        "{GROUPS}[disk.vm]\n\
         image = \"{}\"\n\
         cache = \"none\"\n\
         group = \"gold\"\n\
         weight = 300\n\
         iops-total = 5\n\
         iops-total-max = 100\n\
         bps-total-per-gib = \"64G\"\n\
         write-quota = \"1G per month\"\n\
         quota-rate = \"1M\"\n\
         schedule = [{{ when = \"00:00-24:00\", iops-total = 5 }}]\n\
         prefetch = \"auto\"\n\
         l2-cache-size = \"1M\"\n\
         on-read-error = \"stop\"\n",
        text(&image)
    );
    let a = MigrationHost::start("a", &etcd, &scratch, &disk);
    let b = MigrationHost::start("b", &etcd, &scratch, GROUPS);
    let before = a.disk("vm").unwrap();
    let since = Instant::now();
    a.io(&["write -P 7 0 64k"]);
    a.io(&vec!["read 0 512"; 100]);
    let stdout = a.move_to("b").succeeds();
    assert_contains(&stdout, &["disk vm: moved\n", "vm: b serves it until its daemon ends", "[disk.vm]"]);
    assert_eq!(a.disk("vm"), None);
    let after = b.disk("vm").unwrap();
    for key in [
        "format",
        "cache",
        "group",
        "weight",
        "limits",
        "configured-limits",
        "schedule",
        "write-quota",
        "quota-rate",
        "prefetch",
        "size",
        "read-only",
    ] {
        assert_eq!(after[key], before[key], "{key}");
    }
    assert_eq!(after["image"], before["image"]);
    assert_eq!(after["quota-status"]["writes"]["used-bytes"], 65_536, "{after}");
    b.io(&["read -P 7 0 64k"]);
    b.io(&vec!["read 0 512"; 20]);
    // A request may overrun the bucket, and clients send requests when they connect and disconnect.
    let passed = 122.0;
    let max_passed = 101.0 + 5.0 * since.elapsed().as_secs_f64();
    assert!(passed <= max_passed, "{passed} were admitted, at most {max_passed} are permitted");
    // Move it back, while a client is connected, which will be disconnected.
    let script =
        format!("import sys\nh.connect_uri({:?})\nprint('here', flush=True)\nsys.stdin.read()", b.uri("vm"));
    let mut connected = nbdsh_command(&script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(connected.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "here\n");
    let refused = b.move_to("a").fails();
    b.move_to("a").args(["--force"]).succeeds();
    connected.kill().unwrap();
    connected.wait().unwrap();
    assert_contains(&refused, &["clients use it", "--force"]);
    a.io(&["read -P 7 0 64k"]);
    // `--save` removes the disk's section from the config file.
    a.move_to("b").args(["--save"]).succeeds();
    assert!(!fs::read_to_string(a.scratch.path("weir.toml")).unwrap().contains("[disk.vm]"));
    assert!(b.disk("vm").is_some());
    qemu_img(["check", "-U", text(&image)]).succeeds();
}

#[test]
fn last_disk_migrates_to_an_empty_host_and_back() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let section = format!("{GROUPS}[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\n", text(&image));
    let mut a = MigrationHost::start_with("a", &etcd, &scratch, &section);
    let b = MigrationHost::start_with("b", &etcd, &scratch, GROUPS);
    let mut c = MigrationHost::start_with("c", &etcd, &scratch, GROUPS);
    // A host without an NBD listener.
    let config = fs::read_to_string(c.scratch.path("weir.toml")).unwrap();
    c.stop();
    fs::write(c.scratch.path("weir.toml"), config.replacen("nbd = ", "# nbd = ", 1)).unwrap();
    c.restart();
    // The command waits until the host has joined.
    let stderr = a.move_to("c").fails();
    assert_contains(&stderr, &["c refuses it: it is exported over NBD, and that host has no NBD server"]);
    let stderr = a.move_to("c").args(["--nbd", "unix:n.sock"]).fails();
    assert_contains(&stderr, &["that host has no NBD server (start weir there with --nbd unix:n.sock)"]);
    a.io(&["write -P 3 0 4k"]);
    let stdout = a.move_to("b").args(["--save"]).succeeds();
    assert_contains(
        &stdout,
        &["vm: b serves it until its daemon ends (add [disk.vm] to the config file there)\n"],
    );
    b.io(&["read -P 3 0 4k"]);
    a.stop();
    a.restart();
    assert_eq!(a.disk("vm"), None);
    b.move_to("a").succeeds();
    a.io(&["read -P 3 0 4k"]);
    // The disk is in neither config file: all keys about the move are removed.
    let left = || etcd.control(&["get", "--prefix", "--keys-only", "/weir/v1/lab/host/"]).succeeds();
    until("all keys of the move are removed", || !left().contains("/move"));
    // A disk that was added by a command moves like one of the config file.
    a.run(&["disk", "add", "raw", text(&scratch.sparse("other.raw", MIB)), "-f", "raw"]).succeeds();
    a.run(&["disk", "move", "raw", "--to", "b"]).succeeds();
    assert_eq!(b.disk("raw").unwrap()["format"], "raw");
}

#[test]
fn start_omits_migrated_disks() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let section = format!("{GROUPS}[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\n", text(&image));
    let mut a = MigrationHost::start("a", &etcd, &scratch, &section);
    let mut b = MigrationHost::start("b", &etcd, &scratch, GROUPS);
    let stdout = a.move_to("b").succeeds();
    assert_contains(&stdout, &["add [disk.vm] to the config file there; remove [disk.vm] from the one here"]);
    // A reload omits the moved disk as well, and applies all remaining changes.
    let assert_omitted = |a: &MigrationHost| {
        let file = a.scratch.path("weir.toml");
        let before = fs::read_to_string(&file).unwrap();
        fs::write(&file, before.replace("iops-total = 100\n", "iops-total = 200\n")).unwrap();
        for arguments in [&["reload", "--dry-run"][..], &["reload"]] {
            let stdout = a.run(arguments).succeeds();
            assert_contains(&stdout, &["iops-total: 100 → 200", "skipped: it was moved to host b"]);
        }
        fs::write(&file, before).unwrap();
        assert_contains(&a.run(&["reload"]).succeeds(), &["iops-total: 200 → 100"]);
        assert!(a.disk("vm").is_none() && a.disk("base").is_some());
    };
    assert_omitted(&a);
    a.stop();
    a.restart();
    a.weir().wait_for_log("disk vm: it has moved to host b, and is not served here");
    assert!(a.disk("vm").is_none() && a.disk("base").is_some());
    assert_omitted(&a);
    // The disk is in this host's file and was never in the target's.
    assert!(b.move_to("a").succeeds().contains("vm: a serves it\n"));
    a.stop();
    a.restart();
    assert!(a.disk("vm").is_some());
    // Once the target has left the cluster, its disk belongs to this host again.
    a.move_to("b").succeeds();
    a.stop();
    b.stop();
    a.restart();
    assert!(a.disk("vm").is_some());
    // The ownership is written to etcd with a delay.
    let keys = || etcd.control(&["get", "--prefix", "--keys-only", ""]).succeeds();
    until("the disk belongs to this host", || !keys().contains("host/a/moved/vm"));
    // The target respects the ownership, although the disk is in its config file by now.
    let file = b.scratch.path("weir.toml");
    let before = fs::read_to_string(&file).unwrap();
    let disk = &section[GROUPS.len()..];
    fs::write(&file, format!("{before}{disk}")).unwrap();
    b.restart();
    b.weir().wait_for_log("disk vm: it has moved to host a, and is not served here");
    b.stop();
    fs::write(&file, before).unwrap();
    b.restart();
    a.move_to("b").succeeds();
    // Without etcd the lock of the image shows that another host serves it; the limits are unknown
    // as well.
    a.stop();
    etcd.kill();
    let stderr = a.serve().args(["--log", "error"]).fails();
    assert_contains(
        &stderr,
        &["locked for writing", "the disk may have moved to another host of the cluster"],
    );
    b.stop();
    a.restart();
    assert!(a.disk("vm").is_some());
    etcd.restart();
    until("the host has joined", || a.run(&["cluster", "status", "--json"]).json()["joined"] == true);
}

#[test]
fn failed_migration_keeps_serving() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let section = format!("[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\n", text(&image));
    let a = MigrationHost::start("a", &etcd, &scratch, &format!("{GROUPS}[group.here]\n{section}"));
    let _b = MigrationHost::start("b", &etcd, &scratch, &format!("{GROUPS}[disk.vm]\nimage = \"null:1M\"\n"));
    let c = MigrationHost::start("c", &etcd, &scratch, "[group.gold]\n[group.small]\niops-total = 100\n");
    a.io(&["write -P 9 0 4k"]);
    let refused = |to: &str, expect: &[&str]| {
        assert_contains(&a.move_to(to).fails(), expect);
        a.io(&["read -P 9 0 4k"]);
    };
    refused("a", &["it is on a already"]);
    refused("nowhere", &["is called \"nowhere\"", "weir cluster status"]);
    refused("b", &["b refuses it", "has this name already"]);
    a.run(&["throttle", "vm", "--group", "here"]).succeeds();
    refused("c", &["c refuses it: group here: no group has this name"]);
    a.run(&["throttle", "vm", "--group", "gold"]).succeeds();
    refused("c", &["group gold: its limits are cluster-wide on only one of both hosts"]);
    // The reservation does not fit there.
    c.run(&["disk", "add", "busy", "null:1M", "--group", "small", "--iops-reservation", "80"]).succeeds();
    a.run(&["throttle", "vm", "--group", "small", "--iops-reservation", "70"]).succeeds();
    refused("c", &["c refuses it", "iops-reservation"]);
    a.run(&["throttle", "vm", "--group", "none", "--iops-reservation", "0"]).run();
    let stderr = a.run(&["disk", "move", "base", "--to", "c"]).fails();
    assert_contains(&stderr, &["disk base: its data is in this process's memory"]);
    // The image does not exist at that path on the target.
    let elsewhere = scratch.path("elsewhere.raw");
    fs::rename(&image, &elsewhere).unwrap();
    a.run(&["throttle", "vm", "--iops-reservation", "0"]).succeeds();
    refused("c", &["c refuses it", "vm.raw"]);
    fs::rename(&elsewhere, &image).unwrap();
    // Garbage, and an invalid offer.
    etcd.control(&["put", "/weir/v1/lab/host/c/move/x", "garbage"]).succeeds();
    c.weir().wait_for_log("was not written by weir");
    // Names that are invalid in a config file are logged once and ignored.
    for key in ["host/c/move/a\tb", "host/c/move/..", "host/c/move/.."] {
        etcd.control(&["put", &format!("/weir/v1/lab/{key}"), "{}"]).succeeds();
    }
    etcd.control(&["put", "/weir/v1/lab/host/c/move/last", "garbage"]).succeeds();
    c.weir().wait_for_log("host/c/move/last");
    for key in [r"move/a\tb", "move/.."] {
        let lines = c.weir().log_text().lines().filter(|line| line.contains(key)).count();
        assert_eq!(lines, 1, "{key}");
    }
    let offer = json!({
        "version": 1, "from": "ghost", "run": 1, "number": 1, "given": false,
        "described": { "keys": { "image": "/nowhere", "x\ny": 1 }, "group": null, "exports": [], "listen": null,
            "doors": [], "filled": null },
    });
    etcd.control(&["put", "/weir/v1/lab/host/c/move/y", &offer.to_string()]).succeeds();
    let reply = |disk: &str| {
        let key = format!("/weir/v1/lab/host/ghost/moved/{disk}");
        etcd.control(&["get", "--print-value-only", &key]).succeeds()
    };
    until("the offer is rejected", || reply("y").contains("the offer cannot be parsed"));
    // An offer that can no longer be claimed, because a later run of the source has started, is
    // rejected without looking for the image. The waiting command receives an answer.
    let mut late = offer;
    late["given"] = json!(true);
    late["described"]["keys"] = json!({ "image": scratch.path("nowhere.raw"), "format": "raw" });
    etcd.control(&["put", "/weir/v1/lab/host/c/move/z", &late.to_string()]).succeeds();
    c.weir().wait_for_log("the disk stays on its host: ghost has withdrawn its offer");
    until("the reply is in etcd", || reply("z").contains("rejoined the cluster (move the disk again)"));
    assert!(c.disk("z").is_none() && c.disk("y").is_none());
    // A suspended host does not answer; after it resumes, the offer is withdrawn.
    c.weir().signal(Signal::SIGSTOP);
    refused("c", &["c does not answer within 20 s"]);
    c.weir().signal(Signal::SIGCONT);
    a.move_to("c").succeeds();
    c.io(&["read -P 9 0 4k"]);
}

#[test]
fn reservation_and_vhost_user_socket_migrate() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let socket = scratch.socket("machine");
    let disk = format!(
        "{GROUPS}[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\ngroup = \"gold\"\n\
         export = [{{ type = \"vhost-user-blk\", listen = \"unix:{}\", queues = 2 }}]\n",
        text(&image),
        text(&socket)
    );
    let a = MigrationHost::start("a", &etcd, &scratch, &disk);
    // The sandbox permits new sockets in directories that have one at the start.
    let by = format!(
        "{GROUPS}[disk.by]\nimage = \"null:1M\"\ngroup = \"gold\"\n\
         export = [{{ type = \"vhost-user-blk\", listen = \"unix:{}\" }}]\n",
        text(&scratch.socket("by"))
    );
    let (b, c) =
        (MigrationHost::start("b", &etcd, &scratch, &by), MigrationHost::start("c", &etcd, &scratch, GROUPS));
    assert_contains(&a.move_to("c").fails(), &["c refuses it: no socket can be created in the directory of"]);
    a.run(&["throttle", "gold", "--cluster", "--iops-total", "3000"]).succeeds();
    let has_limit = |host: &MigrationHost| {
        host.run(&["status", "--json", "--interval", "0"]).json()["groups"][0]["limits"]["iops-total"] != 0
    };
    until("both hosts have the group", || has_limit(&a) && has_limit(&b));
    a.run(&["throttle", "vm", "--iops-reservation", "2000"]).succeeds();
    let reserved = |host: &MigrationHost| {
        host.run(&["cluster", "status", "--json"]).json()["groups"][0]["reserved"]["iops"].as_u64()
    };
    until("the second host has the reservation", || reserved(&b) == Some(2000));
    assert!(UnixStream::connect(&socket).is_ok());
    // During the move the reservation counts once: twice would exceed the limit.
    a.move_to("b").succeeds();
    let disk = b.disk("vm").unwrap();
    assert_eq!((&disk["iops-reservation"], &disk["group"]), (&json!(2000), &json!("gold")));
    until("all hosts have the new owner of the reservation", || {
        reserved(&a) == Some(2000) && reserved(&b) == Some(2000)
    });
    assert!(UnixStream::connect(&socket).is_ok());
    drop(c);
    // The source has no room for a further reservation.
    a.run(&["disk", "add", "late", "null:1M", "--group", "gold"]).succeeds();
    a.run(&["throttle", "late", "--iops-reservation", "1500"]).fails();
    b.move_to("a").succeeds();
    assert!(UnixStream::connect(&socket).is_ok());
}

/// Waits until the field `given` of the offer at `key` has the wanted value; returns the offer.
fn offer_once(etcd: &EtcdServer, key: &str, is_given: bool) -> Value {
    let read = || etcd.control(&["get", "--print-value-only", key]).succeeds();
    let condition =
        |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|offer| offer["given"] == is_given);
    until("an offer exists", || condition(&read()));
    serde_json::from_str(&read()).unwrap()
}

/// Key of the offer to a host that does not run.
const OFFERED: &str = "/weir/v1/lab/host/ghost/move/vm";

/// Starts a migration to `ghost`, a host that exists only as keys in etcd, and lets the host give
/// up the disk. No process continues the migration. Returns the running command and the offer.
fn offer_to_ghost(host: &MigrationHost, etcd: &EtcdServer) -> (JoinHandle<TestOutcome>, Value) {
    etcd.control(&["put", "/weir/v1/lab/host/ghost/name", "{}"]).succeeds();
    let moving = thread::spawn({
        let control = format!("unix:{}", text(&host.control()));
        move || weir(&["disk", "move", "vm", "--to", "ghost", "--qmp", &control]).run()
    });
    let offer = offer_once(etcd, OFFERED, false);
    // A second move of the same disk is rejected.
    assert_contains(&host.move_to("ghost").fails(), &["it is already being migrated"]);
    let reply = json!({ "version": 1, "by": "ghost", "number": offer["number"], "said": "ready" });
    etcd.control(&["put", "/weir/v1/lab/host/a/moved/vm", &reply.to_string()]).succeeds();
    (moving, offer_once(etcd, OFFERED, true))
}

#[test]
fn loss_of_target_or_etcd_during_migration_loses_nothing() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let section = format!(
        "[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\ngroup = \"small\"\niops-total = 1000\n",
        text(&image)
    );
    let a = MigrationHost::start("a", &etcd, &scratch, &format!("{GROUPS}{section}"));
    a.io(&["write -P 5 0 4k"]);
    let begin = || {
        let (moving, offer) = offer_to_ghost(&a, &etcd);
        assert_eq!(offer["described"]["keys"]["iops-total"], 1000);
        assert!(offer["described"]["filled"]["levels"].is_array(), "{offer}");
        // Neither host serves the disk, and its image is unlocked.
        assert_eq!(a.disk("vm"), None);
        // A failed migration adds the disk to its group again.
        assert_contains(&a.run(&["group", "remove", "small"]).fails(), &["group small: vm is a member"]);
        qemu_io(["-f", "raw"], ["read -P 5 0 4k"], &image);
        moving
    };
    // The target dies.
    let outcome = begin().join().unwrap();
    assert_contains(&outcome.stderr(), &["ghost has not claimed it within 20 s; it is served here again"]);
    assert_eq!(a.disk("vm").unwrap()["group"], "small");
    assert_eq!(etcd.control(&["get", OFFERED]).succeeds(), "");
    a.io(&["read -P 5 0 4k"]);
    // etcd fails: after its return the disk is served by the source.
    let moving = begin();
    etcd.kill();
    a.weir().wait_for_log("migration failed, resuming the disk here");
    assert_eq!(a.disk("vm"), None);
    etcd.restart();
    assert_contains(&moving.join().unwrap().stderr(), &["it is served here again"]);
    a.io(&["read -P 5 0 4k"]);
    drop(etcd);
}

#[test]
fn offers_of_an_earlier_run_cannot_be_claimed() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let section = format!("[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\n", text(&image));
    let mut a = MigrationHost::start("a", &etcd, &scratch, &format!("{GROUPS}{section}"));
    let (moving, offer) = offer_to_ghost(&a, &etcd);
    // The revision that the target compares when it claims the disk.
    let run = || {
        let found = etcd.control(&["get", "-w", "json", "/weir/v1/lab/host/a/name"]).json();
        found["kvs"][0]["mod_revision"].as_i64()
    };
    assert_eq!(run(), offer["run"].as_i64());
    a.weir.take().unwrap().kill();
    moving.join().unwrap();
    // The start ends at the lock of the image, after the host's key was rewritten.
    let other = Scratch::new();
    let holder = Serve::new(&other).args([text(&image), "--format", "raw"]).start();
    assert_contains(&a.serve().args(["--log", "error"]).fails(), &["locked for writing"]);
    assert_ne!(run(), offer["run"].as_i64(), "the offer of the earlier run could still be claimed");
    holder.stop();
    a.restart();
    assert!(a.disk("vm").is_some());
    until("the host has joined", || a.run(&["cluster", "status", "--json"]).json()["joined"] == true);
}

#[test]
fn range_of_an_image_survives_migrations() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("whole.raw", 4 * MIB);
    let (a, b) = (
        MigrationHost::start("a", &etcd, &scratch, GROUPS),
        MigrationHost::start("b", &etcd, &scratch, GROUPS),
    );
    qemu_io(["-f", "raw"], ["write -P 1 0 1M", "write -P 2 1M 1M", "write -P 3 2M 2M"], &image);
    let mut qmp = Qmp::negotiated(&a.control());
    let node = json!({
        "driver": "raw", "node-name": "vm", "offset": MIB, "size": MIB, "discard": "ignore",
        "file": { "driver": "file", "filename": text(&image) },
    });
    qmp.command("blockdev-add", node);
    let export = json!({ "type": "nbd", "id": "vm", "node-name": "vm", "name": "vm", "writable": true });
    qmp.command("block-export-add", export);
    let check = |host: &MigrationHost| {
        assert_eq!(host.disk("vm").unwrap()["size"], MIB);
        host.io(&["read -P 2 0 1M"]);
    };
    check(&a);
    a.move_to("b").succeeds();
    check(&b);
    b.io(&["write -P 2 0 1M"]);
    b.move_to("a").succeeds();
    check(&a);
    qemu_io(["-r", "-U", "-f", "raw"], ["read -P 1 0 1M", "read -P 2 1M 1M", "read -P 3 2M 2M"], &image);
    // Properties of an image that cannot be transferred are rejected by name.
    let backing = scratch.sparse("backing.raw", MIB);
    let above = scratch.path("above.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&backing), text(&above)];
    qemu_img(create).succeeds();
    let node = json!({
        "driver": "qcow2", "node-name": "alone", "backing": null,
        "file": { "driver": "file", "filename": text(&above) },
    });
    qmp.command("blockdev-add", node);
    let stderr = a.run(&["disk", "move", "alone", "--to", "b"]).fails();
    assert_contains(&stderr, &["disk alone: backing: cannot be migrated"]);
    assert!(a.disk("alone").is_some());
}

#[test]
fn local_groups_have_separate_bursts() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let group = "[group.own]\niops-total = 1\niops-total-max = 100\n";
    let disk = format!(
        "{group}[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\ngroup = \"own\"\niops-total = 1\n\
         iops-total-max = 100\n",
        text(&image)
    );
    let a = MigrationHost::start("a", &etcd, &scratch, &disk);
    let b = MigrationHost::start("b", &etcd, &scratch, group);
    let tokens = |throttled: &Value| throttled["throttle"]["tokens"]["iops-total"].as_u64().unwrap();
    let of_group = |host: &MigrationHost| {
        let status = host.run(&["status", "--json", "--interval", "0"]).json();
        let groups = status["groups"].as_array().unwrap().clone();
        tokens(groups.iter().find(|group| group["name"] == "own").unwrap())
    };
    let before = of_group(&b);
    a.io(&vec!["read 0 512"; 80]);
    assert!(of_group(&a) <= before - 40, "the burst was used");
    a.move_to("b").succeeds();
    // The disk has used its own burst; the bursts of the group on that host are unused.
    assert_eq!(of_group(&b), before);
    assert!(tokens(&b.disk("vm").unwrap()) <= before - 40);
}

#[test]
fn etcd_decides_the_owner_after_a_crash() {
    let scratch = Scratch::new();
    let etcd = EtcdServer::start(&scratch);
    let image = scratch.sparse("vm.raw", MIB);
    let section = format!("{GROUPS}[disk.vm]\nimage = \"{}\"\nformat = \"raw\"\n", text(&image));
    let mut a = MigrationHost::start("a", &etcd, &scratch, &section);
    a.io(&["write -P 4 0 4k"]);
    let die = |a: &mut MigrationHost| {
        let (moving, _) = offer_to_ghost(a, &etcd);
        a.weir.take().unwrap().kill();
        moving.join().unwrap();
    };
    // Its lease ends before the target claims the disk: the offer is deleted, neither host serves
    // it.
    die(&mut a);
    let found = etcd.control(&["get", "-w", "json", "/weir/v1/lab/host/a/name"]).json();
    let lease = format!("{:x}", found["kvs"][0]["lease"].as_i64().unwrap());
    etcd.control(&["lease", "revoke", &lease]).succeeds();
    assert_eq!(etcd.control(&["get", OFFERED]).succeeds(), "");
    let mut ghost = MigrationHost::start("ghost", &etcd, &scratch, GROUPS);
    assert_eq!(ghost.disk("vm"), None);
    a.restart();
    a.io(&["read -P 4 0 4k"]);
    until("the host has joined", || a.run(&["cluster", "status", "--json"]).json()["joined"] == true);
    ghost.stop();
    // The target claims it within the lease: it keeps the disk, whatever this host's file says.
    die(&mut a);
    ghost.restart();
    // The target has opened the disk before it claims the offer; a start of the source would
    // withdraw it.
    ghost.weir().wait_for_log("the disk was migrated here");
    a.restart();
    a.weir().wait_for_log("disk vm: it has moved to host ghost, and is not served here");
    assert_eq!(a.disk("vm"), None);
    ghost.io(&["read -P 4 0 4k", "write -P 5 0 4k"]);
    ghost.move_to("a").succeeds();
    a.io(&["read -P 5 0 4k"]);
}
