//! `weir advise`: from a noisy neighbour to a limit that holds, over the wire; and traces that are
//! invalid or truncated.
//!
//! Asserts only facts that do not depend on the machine's speed: the recording yields advice, each
//! printed command can be pasted into a shell, and its settings are then in force and hold. The
//! accuracy of predicted latencies is a row of `make bench`, `advise-predicts`.

use std::{
    fmt::Write as _,
    fs,
    process::{Child, Command, Stdio},
    time::Instant,
};

use serde_json::Value;

use crate::{
    harness::{
        DEADLINE, Scratch, TestClient, TestOutcome, WEIR, Weir, assert_contains, need,
        operator::{find, run_json, run_ok, serve, socket, start, status},
        pause, search_path, text, weir,
    },
    record::RunningRecorder,
};

const DEVICE: &str = "iops=400,shared=ssd";

/// A client that reads with 64 in flight until it is dropped.
struct NoisyClient(Child);

impl NoisyClient {
    fn on(weir: &Weir, disk: &str) -> Self {
        need("fio");
        let mut command = Command::new("fio");
        command.env("PATH", search_path()).stdout(Stdio::null()).stderr(Stdio::null());
        command.args(["--name=noise", "--ioengine=nbd", "--rw=randread", "--bs=4096", "--size=16M"]);
        command.args(["--time_based", "--runtime=1000", "--iodepth=64"]);
        command.arg(format!("--uri={}", weir.uri(disk)));
        Self(command.spawn().expect("the command can be started"))
    }
}

impl Drop for NoisyClient {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends `requests` reads at twenty a second, regardless of earlier completions.
#[track_caller]
fn run_quiet_client(weir: &Weir, disk: &str, requests: u32) {
    let load = ["bench", "--rate-iops", "20", "-s", "4K", "--random", "--count", &requests.to_string()];
    TestClient::new(WEIR).args(load).arg(weir.uri(disk)).succeeds();
}

fn requests(scratch: &Scratch, disk: &str) -> u64 {
    let status = status(scratch, "0");
    find(&status, "disks", disk)["reads"]["requests"].as_u64().unwrap_or(0)
}

fn advise(arguments: &[&str]) -> TestOutcome {
    weir(&["advise"]).args(arguments).run()
}

/// Runs a printed line unchanged, with this `weir` in the PATH and the daemon of this test.
#[track_caller]
fn run_pasted(scratch: &Scratch, line: &str) {
    let directory = std::path::Path::new(WEIR).parent().expect("it lies in one");
    let shell =
        TestClient::new("sh").args(["-ec", line]).with_path(directory).env("WEIR_QMP", socket(scratch));
    shell.succeeds();
}

#[test]
fn noisy_neighbour_from_recording_to_verified_limit() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &["--rate", DEVICE]);
    let file = scratch.path("both.recording");
    let recorder = RunningRecorder::begin(&scratch, &file, &[]);
    let noisy = NoisyClient::on(&weir, "b");
    let end = Instant::now() + DEADLINE;
    while requests(&scratch, "b") < 200 {
        assert!(Instant::now() < end, "the noisy client does not start");
        pause();
    }
    run_quiet_client(&weir, "a", 200);
    recorder.end();

    let new = scratch.path("new.toml");
    let options = ["--rate", DEVICE, "--for", "a", "--keep", "p99=25ms", "--write-config", text(&new)];
    let outcome = advise(&[&[text(&file), "--json"][..], &options].concat());
    let report: Value = serde_json::from_str(&outcome.stdout()).expect("it is JSON");
    let (a, b) = (find(&report, "tenants", "a"), find(&report, "tenants", "b"));
    assert_eq!((a["requests"].as_u64(), a["has-target"].as_bool()), (Some(200), Some(true)));
    assert_eq!((a["kept"].as_bool(), outcome.status()), (Some(true), Some(0)), "{}", outcome.stderr());
    // Behind 64 requests in flight, each would wait for 160 ms.
    let p99 = |line: &Value, when: &str| line[when]["latency-ns"].as_u64().expect("a time");
    assert!(p99(a, "before") > 100_000_000 && p99(a, "after") <= 25_500_000, "{report:#}");
    assert!(b["requests"].as_u64() >= Some(200));
    assert!(
        a["smallest-iops"]["unsure"].as_str().is_some_and(|why| why.starts_with("the trace is too short"))
    );
    self::weir(&["check-config", text(&new)]).succeeds();

    // The tables show the same results.
    let printed = advise(&[&[text(&file)][..], &options].concat()).stdout();
    assert_contains(&printed, &["SMALLEST FOR", "as it is", "kept", "no target", "To set it:\n\n"]);
    let commands = report["commands"].as_array().expect("a list");
    assert!(!commands.is_empty());
    for command in commands.iter().map(|command| command.as_str().expect("a line")) {
        assert!(printed.contains(&format!("{command}\n")), "{command:?} is not in {printed}");
        run_pasted(&scratch, command);
    }
    if let Some(set) = b["set"].as_object() {
        let shown = run_json(&scratch, &["throttle", "b", "--json"]);
        for (name, value) in set {
            let in_force = &shown["throttle"]["limits"][name];
            let in_force = if in_force.is_null() { &shown["limits"][name] } else { in_force };
            assert!(in_force == value || name.ends_with("-length"), "{name}: {shown:#}");
        }
    }

    let waits = || {
        let status = status(&scratch, "0");
        find(&status, "disks", "b")["throttle"]["waiting"]["reads"].as_u64() > Some(0)
    };
    while !waits() {
        assert!(Instant::now() < end, "the noisy client is not throttled");
        pause();
    }
    let verify = TestClient::new(WEIR).args(["verify", "--for", "4s", "--qmp", &socket(&scratch)]).run();
    assert_eq!(verify.status(), Some(0), "{}{}", verify.stdout(), verify.stderr());
    drop(noisy);
    weir.stop();
}

const HEADER: &str = "time_ns,disk,op,offset,length\n";

/// Two disks, each with one request a millisecond, and more requests in between.
fn trace(requests: u64) -> String {
    let mut text = HEADER.to_owned();
    for number in 0..requests {
        let (at, disk) = (number * 500_000 + number % 7 * 1000, number % 2);
        writeln!(text, "{at},vm{disk},read,{},4096", number % 1000 * 4096).expect("it is a string");
    }
    text
}

#[test]
fn truncated_recording_is_used_up_to_its_last_complete_block() {
    let scratch = Scratch::new();
    let csv = scratch.file("day.csv", trace(150_000));
    let recording = scratch.path("day.recording");
    weir(&["trace", "convert", text(&csv), text(&recording)]).succeeds();
    let bytes = fs::read(&recording).expect("it was written");
    let torn = scratch.file("torn.recording", &bytes[..bytes.len() - 10]);
    let outcome = advise(&[text(&torn), "--json"]);
    assert_eq!(outcome.status(), Some(1));
    assert_contains(&outcome.stderr(), &["weir: not read to the end: ", "ends within a block"]);
    let report: Value = serde_json::from_str(&outcome.stdout()).expect("it is JSON");
    let read: u64 = report["tenants"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|tenant| tenant["requests"].as_u64())
        .sum();
    assert_eq!(read, 131_072, "the trace has two complete blocks");
    assert_contains(
        report["partial"].as_str().expect("the report names the truncation"),
        &["131072 requests before it are complete"],
    );
    assert_eq!(report["commands"].as_array().map(Vec::len), Some(2));
}

#[test]
fn invalid_trace_or_target_is_one_error() {
    let scratch = Scratch::new();
    let day = scratch.file("day.csv", trace(2000));
    let empty = scratch.file("empty.csv", "");
    let none = scratch.file("none.csv", HEADER);
    let config =
        scratch.file("weir.toml", "[disk.vm0]\nimage = \"null:1G\"\n[disk.vm2]\nimage = \"null:1G\"\n");
    for (arguments, status, expect) in [
        (&[text(&empty)][..], 1, "the trace is empty"),
        (&[text(&none)], 1, "the trace has no request"),
        (&[text(&day), "--for", "vm3"], 1, "vm3: the trace has no requests of it (did you mean vm"),
        (&[text(&day), "--keep", "p99"], 2, "is not of the form pPERCENT=TIME"),
        (&[text(&day), "--over", "0"], 2, "--over: a burst cannot be spread over no time"),
        (&[text(&day), "--pack"], 2, "--device"),
        (&[text(&day), "--device", "read=1ms", "--device", "read=2ms"], 2, "--device: several are given"),
        (&[text(&day), "--config", text(&config)], 1, "the disk \"vm1\" is not in"),
        (&[text(&day), "--device", "read=1ms", "--keep", "p99=0"], 1, "the target cannot be met for all"),
    ] {
        let outcome = advise(arguments);
        assert_eq!(outcome.status(), Some(status), "{arguments:?}: {}", outcome.stderr());
        assert_contains(&outcome.stderr(), &["weir: ", expect]);
        assert_eq!(outcome.stderr().matches("weir: ").count(), 1, "{}", outcome.stderr());
    }
}

#[test]
fn advice_for_groups_keeps_the_rest_of_the_config() {
    let scratch = Scratch::new();
    let day = scratch.file("day.csv", trace(20_000));
    let config = scratch.file(
        "weir.toml",
        "# Ours.\n\
         [group.gold]\n\
         weight = 50\n\
         iops-total = 100 # too little\n\
         \n\
         [disk.vm0]\n\
         image = \"null:1G\"\n\
         group = \"gold\"\n\
         [disk.vm1]\n\
         image = \"null:1G\"\n\
         group = \"gold\"\n",
    );
    let new = scratch.path("new.toml");
    let outcome = advise(&[text(&day), "--config", text(&config), "--write-config", text(&new), "--json"]);
    assert_eq!(outcome.status(), Some(0), "{}", outcome.stderr());
    let report: Value = serde_json::from_str(&outcome.stdout()).expect("it is JSON");
    let gold = find(&report, "tenants", "gold");
    assert_eq!((gold["kind"].as_str(), gold["requests"].as_u64()), (Some("group"), Some(20_000)));
    assert_eq!(gold["kept"].as_bool(), Some(true));
    // Its demand is 2,000 a second; it was limited to 100.
    assert!(gold["before"]["wait-ns"].as_u64() > Some(1_000_000_000), "{gold:#}");
    assert!(gold["set"]["iops-total"].as_u64().is_some_and(|rate| (2000..2200).contains(&rate)), "{gold:#}");
    let after = fs::read_to_string(&new).expect("it was written");
    assert_contains(&after, &["# Ours.\n[group.gold]\nweight = 50\niops-total = 2", " # too little\n"]);
    weir(&["check-config", text(&new)]).succeeds();
}

/// One disk keeps its device busy all the time; the second sends bursts of 60 requests, four times
/// in three seconds.
fn busy_neighbour() -> String {
    let mut requests = Vec::new();
    for tick in 0..300_u64 {
        requests.extend((0..85).map(|number| (tick * 100_000_000 + number * 1_170_000, "b")));
        if tick % 30 < 4 {
            requests.extend((0..60).map(|number| (tick * 100_000_000 + number * 80_000 + 1, "a")));
        }
    }
    requests.sort_unstable();
    let mut text = HEADER.to_owned();
    for (at, disk) in requests {
        writeln!(text, "{at},{disk},read,0,4096").expect("it is a string");
    }
    text
}

/// A disk that shares its group with the noisy disk is protected by settings within that group.
#[test]
fn noisy_neighbour_in_the_same_group_is_found() {
    let scratch = Scratch::new();
    let day = scratch.file("day.csv", busy_neighbour());
    let rate = "iops=1000,shared=ssd";
    let config = |name: &str, group: &str, disk: &str| {
        let disk = |name: &str| format!("[disk.{name}]\nimage = \"null:1G\"\ngroup = \"all\"\n{disk}\n");
        scratch.file(name, format!("[group.all]\n{group}\n{}{}", disk("a"), disk("b")))
    };
    let run = |more: &[&str]| advise(&[&[text(&day)][..], more].concat());
    let on_device = config("device.toml", "", &format!("rate = \"{rate}\""));
    let printed = run(&["--config", text(&on_device), "--for", "all", "--keep", "p99=5ms"]).stdout();
    let but_device_limits =
        "but a limit of a disk in the group may (give --for with the disk that must meet the target, ";
    assert_contains(&printed, &["no limit of the group shortens it, ", but_device_limits]);
    let new = scratch.path("new.toml");
    for (arguments, command) in [
        (&["--rate", rate][..], None),
        (&["--config", text(&on_device)], Some("weir throttle b --iops-total ")),
        // Here both disks contend for the group's limit.
        (
            &["--config", text(&config("limited.toml", "iops-total = 900", ""))],
            Some("weir throttle a --weight "),
        ),
    ] {
        let more = ["--for", "a", "--keep", "p99=80ms", "--write-config", text(&new)];
        let outcome = run(&[arguments, &more].concat());
        assert_eq!(outcome.status(), Some(0), "{arguments:?}: {}", outcome.stderr());
        let printed = outcome.stdout();
        assert_contains(&printed, &["To set it:", "no target"]);
        if let Some(command) = command {
            assert_contains(&printed, &[&format!("\n{command}")]);
            assert_contains(&fs::read_to_string(&new).expect("it was written"), &["group = \"all\""]);
            weir(&["check-config", text(&new)]).succeeds();
        }
    }
    let both = run(&["--config", text(&on_device), "--for", "a", "--for", "all"]);
    assert_contains(
        &both.stderr(),
        &["all: so is a disk in it (--for takes a group or disks of it, not both)"],
    );
}

#[test]
fn measured_figures_are_shown_if_the_simulation_deviates() {
    let scratch = Scratch::new();
    // Sequential or random; at a rate above the device's.
    let day = |stride: u64, took_ns: u64| {
        let mut text = "time_ns,disk,op,offset,length,admitted_ns,completed_ns,bucket\n".to_owned();
        for number in 0..2000_u64 {
            let (at, offset) = (number * 5_000_000, number * stride % 8192 * 65_536);
            writeln!(text, "{at},backup,write,{offset},65536,{at},{},", at + took_ns)
                .expect("it is a string");
        }
        scratch.file("day.csv", text)
    };
    let printed = |file: &std::path::Path, rate: &str| advise(&[text(file), "--rate", rate]).stdout();
    let remark = "backup: its p99 is ";
    let merged = printed(&day(1, 3_000_000), "iops=100");
    let why = "most of its requests are sequential: weir merges these, unlike the simulation";
    assert_contains(&merged, &[remark, " in the simulation, and was 3.0ms when it was recorded: ", why]);
    let faster = printed(&day(77, 3_000_000), "iops=100");
    assert_contains(&faster, &[remark, "the device is faster than specified"]);
    let slower = printed(&day(77, 700_000_000), "iops=1000");
    assert_contains(&slower, &[remark, "the device is slower than specified"]);
    // No remark if the simulation is close enough, or if the trace has no measured times.
    let matching = printed(&day(77, 1_200_000), "iops=1000");
    assert!(!matching.contains(remark), "{matching}");
    let untimed = printed(&scratch.file("bare.csv", trace(2000)), "iops=100");
    assert!(!untimed.contains("when it was recorded"), "{untimed}");
}

#[test]
fn advised_weights_are_accepted_unchanged() {
    let scratch = Scratch::new();
    let day = scratch.file("day.csv", busy_neighbour());
    // Here b has a limit that is not part of the advice, and a has a weight.
    let disk = |name: &str, more: &str| {
        let listen = text(&scratch.socket(name)).to_owned();
        format!(
            "[disk.{name}]\nimage = \"memory:16M\"\nrate = \"iops=1000,shared=ssd\"\n{more}\n\
             export = [{{ type = \"nbd\", listen = \"unix:{listen}\" }}]\n"
        )
    };
    let config = scratch.file(
        "weir.toml",
        format!(
            "[daemon]\nqmp = \"{}\"\n{}{}",
            socket(&scratch),
            disk("a", "weight = 50\niops-reservation = 3"),
            disk("b", "iops-total = 950\niops-total-max = 990")
        ),
    );
    let daemon = serve(&scratch, &config);
    let new = scratch.path("new.toml");
    let options = ["--config", text(&config), "--for", "a", "--keep", "p99=150ms"];
    let outcome = advise(&[&[text(&day), "--json", "--write-config", text(&new)][..], &options].concat());
    assert_eq!(outcome.status(), Some(0), "{}", outcome.stderr());
    let report: Value = serde_json::from_str(&outcome.stdout()).expect("it is JSON");
    let (joins, commands) = (&find(&report, "tenants", "a")["joins"], report["commands"].to_string());
    let weight = joins["weight"].as_u64().expect("the advice adds the disk to a group");
    assert!(weight > 100 && joins["group"] == "shared", "{report:#}");
    assert!(commands.contains(&format!("weir throttle a --weight {weight} --iops-reservation 0 --group")));
    let printed = advise(&[&[text(&day)][..], &options].concat()).stdout();
    assert_contains(
        &printed,
        &[&format!("weight {weight} in shared"), "weight 100 in shared", "shared: iops-total "],
    );

    for command in report["commands"].as_array().expect("a list") {
        run_pasted(&scratch, command.as_str().expect("a line"));
    }
    let shown = |name: &str| run_json(&scratch, &["throttle", name, "--json"]);
    let (a, b) = (shown("a"), shown("b"));
    assert_eq!((a["weight"].as_u64(), &a["group"]), (Some(weight), &Value::from("shared")), "{a:#}");
    assert_eq!((b["weight"].as_u64(), &b["limits"]), (Some(100), &serde_json::json!({})), "{b:#}");
    // The file contains the same settings as the commands: a reload changes nothing.
    fs::copy(&new, &config).expect("it was written");
    assert_contains(&run_ok(&scratch, &["reload"]), &["nothing has changed"]);
    daemon.stop();
}

#[test]
fn packing_uses_the_fewest_devices() {
    let scratch = Scratch::new();
    let mut csv = HEADER.to_owned();
    for number in 0..6000_u64 {
        writeln!(csv, "{},vm{},read,0,4096", number * 1_000_000, number % 6).expect("it is a string");
    }
    let day = scratch.file("day.csv", csv);
    // Each disk's demand is a sixth of 1,000 a second; a device serves 400.
    let printed = weir(&["advise", text(&day), "--pack", "--device", "read=2500us,parallel=1"]).succeeds();
    assert_contains(
        &printed,
        &[
            "DEVICE",
            "BUSIEST",
            "6 disks fit on 3 of these devices with p99 <= 10ms, and fewer do not suffice.",
        ],
    );
    let printed = advise(&[text(&day), "--pack", "--device", "read=100ms,parallel=1"]);
    assert_eq!(printed.status(), Some(1));
    assert_contains(&printed.stdout(), &["No device meets the target for: vm0, vm1, vm2, vm3, vm4, vm5."]);
}
