//! `weir verify`: checks of limits and reservations of a daemon with real clients.

use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Instant,
};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::{
    bench::interrupted,
    harness::{
        DEADLINE, Scratch, Serve, TestClient, TestOutcome, WEIR, Weir, assert_contains, need,
        operator::{socket, start},
        pause, search_path, text,
    },
};

/// A client that reads until it is dropped.
struct RandomReadLoad(Child);

impl RandomReadLoad {
    /// Random reads with `depth` in flight.
    fn on(weir: &Weir, disk: &str, depth: u32) -> Self {
        need("fio");
        let mut command = Command::new("fio");
        command.env("PATH", search_path()).stdout(Stdio::null()).stderr(Stdio::null());
        command.args(["--name=load", "--ioengine=nbd", "--rw=randread", "--bs=4096", "--size=16M"]);
        command.args(["--time_based", "--runtime=1000", &format!("--iodepth={depth}")]);
        command.arg(format!("--uri={}", weir.uri(disk)));
        Self(command.spawn().expect("the command can be started"))
    }
}

impl Drop for RandomReadLoad {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn verify(scratch: &Scratch, more: &[&str]) -> TestOutcome {
    TestClient::new(WEIR).args(["verify", "--qmp", &socket(scratch)]).args(more).run()
}

fn has_waiting_requests(scratch: &Scratch, disk: &str) -> bool {
    let status = ["status", disk, "--json", "--interval", "0", "--qmp", &socket(scratch)];
    let status = TestClient::new(WEIR).args(status).json();
    status["disks"][0]["throttle"]["waiting"]["reads"].as_u64() > Some(0)
}

/// Guarantee, name and verdict of each line.
fn verdicts(outcome: &TestOutcome) -> Vec<[String; 3]> {
    let report: Value = serde_json::from_str(&outcome.stdout()).expect("it is JSON");
    let string = |value: &Value| value.as_str().expect("a word").to_owned();
    let lines = report["guarantees"].as_array().expect("a list").iter();
    let name = |line: &Value| string(line.get("disk").unwrap_or(&line["group"]));
    lines.map(|line| [string(&line["guarantee"]), name(line), string(&line["verdict"])]).collect()
}

#[test]
fn limits_and_shares_hold_under_load_and_waits_are_reported() {
    let scratch = Scratch::new();
    let group = ["--group", "gold", "--iops-total", "100", "--weight", "300"];
    let weir = start(&scratch, &group);
    let qmp = socket(&scratch);
    TestClient::new(WEIR).args(["throttle", "b", "--weight", "100", "--qmp", &qmp]).succeeds();
    // Enough in flight that both have requests waiting, even if their clients do not run for most
    // of a second.
    let loads = ["a", "b"].map(|disk| RandomReadLoad::on(&weir, disk, 64));
    let end = Instant::now() + DEADLINE;
    while ["a", "b"].iter().any(|disk| !has_waiting_requests(&scratch, disk)) {
        assert!(Instant::now() < end, "the requests of a disk are not throttled");
        pause();
    }
    let outcome = verify(&scratch, &["--for", "6s", "--json"]);
    let line = |guarantee: &str, name: &str| [guarantee, name, "held"].map(str::to_owned);
    let verdicts_held = verdicts(&outcome);
    for expected in [line("iops-total", "gold"), line("share", "a"), line("share", "b")] {
        assert!(verdicts_held.contains(&expected), "{expected:?} is not in {verdicts_held:?}");
    }
    assert_eq!(outcome.status(), Some(0), "{}", outcome.stderr());
    let report: Value = serde_json::from_str(&outcome.stdout()).expect("it is JSON");
    let gold = report["guarantees"].as_array().expect("a list").iter().find(|line| line["group"] == "gold");
    let figures = &gold.expect("a line")["figures"];
    assert_eq!((figures["rate"].as_f64(), figures["burst"].as_f64()), (Some(100.0), Some(10.0)));
    assert!(figures["passed"].as_f64() > Some(75.0), "{figures:#}");
    let outcome = verify(&scratch, &["a", "--for", "2s", "--wait-p99", "1us"]);
    assert_eq!(outcome.status(), Some(1));
    assert_contains(&outcome.stderr(), &["1 of ", " guarantees did not hold"]);
    assert!(!outcome.stdout().contains("gold"), "{}", outcome.stdout());
    // 64 in flight at 75 a second: no reply within a millisecond, all within a minute.
    for (limit, status, verdict) in [("1ms", 1, "broken"), ("60s", 0, "held")] {
        let outcome = verify(&scratch, &["a", "--for", "2s", "--latency-p99", limit, "--json"]);
        assert_eq!(outcome.status(), Some(status), "{}", outcome.stdout());
        assert!(verdicts(&outcome).contains(&["latency-p99", "a", verdict].map(str::to_owned)));
    }
    // With a reservation for one disk, the shares by weight are undetermined.
    TestClient::new(WEIR).args(["throttle", "b", "--iops-reservation", "50", "--qmp", &qmp]).succeeds();
    let outcome = verify(&scratch, &["gold", "--for", "3s"]);
    assert!(outcome.stdout().contains("not checked: a disk of its group has a reservation"));
    drop(loads);
    weir.stop();
}

#[test]
fn config_is_compared_with_the_settings_in_force() {
    let scratch = Scratch::new();
    let nbd = text(&scratch.socket("nbd")).to_owned();
    let config = scratch.file(
        "weir.toml",
        format!(
            "[disk.vm1]\nimage = \"memory:16M\"\niops-total = 500\n\
             export = [{{ type = \"nbd\", listen = \"unix:{nbd}\" }}]\n"
        ),
    );
    let arguments = ["--config", text(&config), "--qmp", &socket(&scratch)];
    let weir = Serve::new(&scratch).at_given_addresses().args(arguments).start();
    let compare = || verify(&scratch, &["--for", "1s", "--config", text(&config), "--json"]);
    let outcome = compare();
    assert_eq!(outcome.status(), Some(0), "{}", outcome.stderr());
    assert_eq!(verdicts(&outcome)[0], ["config", "vm1", "held"].map(str::to_owned));
    let text_of_file = fs::read_to_string(&config).expect("the file can be opened");
    fs::write(&config, text_of_file.replace("500", "600")).expect("the file can be written");
    let outcome = compare();
    assert_eq!(outcome.status(), Some(1));
    assert_eq!(verdicts(&outcome), [["config", "vm1", "broken"], ["iops-total", "vm1", "no load"]]);
    assert!(outcome.stdout().contains("iops-total is 500, in the file 600"), "{}", outcome.stdout());
    weir.stop();
}

#[test]
fn deviations_of_a_disk_are_listed_line_by_line() {
    let scratch = Scratch::new();
    let image = scratch.sparse("vm1.raw", 1 << 20);
    let nbd = text(&scratch.socket("nbd")).to_owned();
    let written = |of_group: &str, of_disk: &str| {
        format!(
            "[group.gold]\niops-total = 500\n{of_group}[disk.vm1]\nimage = \"vm1.raw\"\n{of_disk}\
             export = [{{ type = \"nbd\", listen = \"unix:{nbd}\" }}]\n"
        )
    };
    let of_disk = "cache = \"writeback\"\nformat = \"raw\"\ngroup = \"gold\"\n";
    let config = scratch.file("weir.toml", written("", of_disk));
    // Started with a path that is relative to its working directory.
    let inside = ["env", "--chdir", text(config.parent().expect("it is in a directory"))];
    let serve = Serve::new(&scratch).at_given_addresses().wrapped_by(inside);
    let weir = serve.args(["--config", "weir.toml", "--qmp", &socket(&scratch)]).start();
    let compare = || verify(&scratch, &["--for", "1s", "--config", text(&config), "--json"]);
    assert_eq!(verdicts(&compare())[1], ["config", "vm1", "held"].map(str::to_owned));
    let link = scratch.path("link.raw");
    std::os::unix::fs::symlink(&image, &link).expect("the path is unused");
    let other = "cache = \"writeback\"\nimage = \"link.raw\"\ngroup = \"gold\"\n";
    fs::write(&config, written("", other).replace("image = \"vm1.raw\"\n", ""))
        .expect("the file can be written");
    assert_eq!(
        verdicts(&compare())[1],
        ["config", "vm1", "held"].map(str::to_owned),
        "both paths name the same file"
    );
    let other = "cache = \"none\"\nformat = \"qcow2\"\nprefetch = \"off\"\nread-only = true\n\
                 on-write-error = \"stop\"\n";
    let changed = written("watermark = 90\n", other).replace("vm1.raw", "vm2.raw");
    fs::write(&config, changed).expect("the file can be written");
    let outcome = compare();
    assert_eq!(outcome.status(), Some(1));
    let [running, named] = ["vm1.raw", "vm2.raw"].map(|name| text(&scratch.path(name)).to_owned());
    assert_contains(
        &outcome.stdout(),
        &[
            "watermark is none, in the file 90",
            &format!("image is {running}, in the file {named}"),
            "format is raw, in the file qcow2",
            "cache is writeback, in the file none",
            "read-only is false, in the file true",
            "on-write-error is report, in the file stop",
            "group is gold, in the file none",
            "prefetch is auto, in the file off",
        ],
    );
    weir.stop();
}

#[test]
fn interrupted_run_prints_its_results() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &["--iops-total", "500"]);
    let mut command = Command::new(WEIR);
    command.args(["verify", "--for", "1h", "--qmp", &socket(&scratch)]);
    let child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command can be started");
    let end = Instant::now() + DEADLINE;
    while !blocks_signal(&child, Signal::SIGINT) {
        assert!(Instant::now() < end, "the process does not block the signal");
        pause();
    }
    let [printed, stderr] = interrupted(child);
    assert_contains(&stderr, &["interrupted: the results are of the first "]);
    assert!(printed.contains("iops-total") && printed.contains("no load"), "{printed}");
    weir.stop();
}

/// True if the process blocks the signal, as it does before it waits for it: an earlier signal
/// would kill the process.
fn blocks_signal(child: &Child, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).expect("the process is running");
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).expect("a line");
    let blocked = u64::from_str_radix(blocked.trim(), 16).expect("a mask");
    blocked >> (signal as u32 - 1) & 1 == 1
}

#[test]
fn nothing_to_verify_is_a_failure() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &["--iops-total", "500"]);
    let outcome = verify(&scratch, &["--for", "1s"]);
    assert_eq!(outcome.status(), Some(1));
    assert_contains(&outcome.stderr(), &["nothing could be checked"]);
    assert!(outcome.stdout().contains("no load"), "{}", outcome.stdout());
    let outcome = verify(&scratch, &["c"]);
    assert_eq!(outcome.status(), Some(1));
    assert_contains(&outcome.stderr(), &["c: no disk and no group has this name"]);
    weir.stop();
}
