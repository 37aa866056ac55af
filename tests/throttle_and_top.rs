//! Changing and watching a running daemon: `weir status`, `weir throttle` and `weir top`.

use std::{fs, thread, time::Instant};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{
    Scratch, Terminal, TestClient, assert_contains,
    operator::{self, find, run_failing, run_misused, run_ok, serve, socket, start, status, wait_until},
    text,
};

/// The rates of a disk over half a second; asserts at most the limit plus a tenth of a second's
/// worth.
#[track_caller]
fn assert_limited(scratch: &Scratch, disk: &str, limit: f64) -> Value {
    let began = Instant::now();
    let status = status(scratch, "500ms");
    let seconds = began.elapsed().as_secs_f64();
    let rate = &find(&status, "disks", disk)["rate"];
    let interval = rate["interval-ns"].as_f64().expect("a time") / 1e9;
    let passed = rate["reads"]["iops"].as_f64().expect("a rate") * interval;
    let max = limit * seconds + limit / 10.0 + 1.0;
    assert!(passed <= max, "{passed} reads in {seconds} s, {max} permitted: {status:#}");
    let share = rate["limited"].as_f64().expect("a share");
    assert!((0.0..=1.0).contains(&share), "{status:#}");
    status
}

#[test]
fn limit_changes_under_load_and_status_shows_the_cause() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &["--iops-total", "500"]);
    let uri = weir.uri("a");
    thread::scope(|scope| {
        let load = TestClient::new("fio")
            .args(["--name=load", "--ioengine=nbd", "--rw=randread", "--bs=4096", "--iodepth=64"])
            .args(["--time_based", "--runtime=10m"])
            .arg(format!("--uri={uri}"));
        let load = scope.spawn(|| load.run());
        wait_until(&scratch, |status| {
            find(status, "disks", "a")["throttle"]["throttle-cause"] == "iops-total"
        });
        while !run_ok(&scratch, &["status"]).contains("iops-total\n") {
            assert!(!load.is_finished(), "the throttle cause is missing under load");
        }
        let status = assert_limited(&scratch, "a", 500.0);
        let disk = find(&status, "disks", "a");
        assert_eq!(disk["connections"], 1);
        let [p50, p99, max] =
            ["p50", "p99", "max"].map(|key| disk["throttle"]["wait-ns"][key].as_u64().expect("it waited"));
        assert!(p50 <= p99 && p99 <= max && max > 0, "{disk:#}");
        for latency in [&disk["latency-ns"], &disk["rate"]["latency-ns"]] {
            let [p50, p99] =
                ["p50", "p99"].map(|key| latency[key].as_u64().expect("requests have completed"));
            assert!(0 < p50 && p50 <= p99, "{disk:#}");
        }
        let wait_p99 = disk["rate"]["wait-ns"]["p99"].as_u64().expect("it waited");
        let latency_p99 = disk["rate"]["latency-ns"]["p99"].as_u64();
        assert!(0 < wait_p99 && Some(wait_p99) <= latency_p99, "the latency must include the wait: {disk:#}");
        let idle = find(&status, "disks", "b");
        assert_eq!(
            (&idle["rate"]["limited"], &idle["throttle"]["throttle-cause"]),
            (&0.0.into(), &Value::Null)
        );
        assert_contains(
            &run_ok(&scratch, &["status"]),
            &["last ", "DISK", "WAIT P99 (", "HELD BY", "iops 500"],
        );

        let stdout = run_ok(&scratch, &["throttle", "a", "--total-iops-sec", "1500"]);
        assert_eq!(stdout, "a: iops-total: 500 → 1500\n");
        assert_limited(&scratch, "a", 1500.0);
        // A rate close to zero and one close to unlimited: requests are throttled at once, and
        // admitted at once.
        run_ok(&scratch, &["throttle", "a", "--total-iops-sec", "1"]);
        let reads = |status: &Value| find(status, "disks", "a")["throttle"]["reads"]["requests"].as_u64();
        wait_until(&scratch, |status| find(status, "disks", "a")["throttle"]["waiting"]["reads"] == 64);
        let held = reads(&operator::status(&scratch, "0"));
        run_ok(&scratch, &["throttle", "a", "--total-iops-sec", "1000000"]);
        // At the old rate each read would have waited for a second.
        wait_until(&scratch, |status| reads(status) > held.map(|held| held + 1000));
        weir.stop();
    });
}

#[test]
fn rejected_change_has_no_effect() {
    let scratch = Scratch::new();
    let _weir = start(&scratch, &["--iops-total", "500"]);
    let before = run_ok(&scratch, &["throttle", "a"]);
    assert_contains(&before, &["disk a\n", "  iops-total  500\n"]);
    let stderr = run_failing(&scratch, &["throttle", "a", "--weight", "7", "--iops-total-max", "20"]);
    assert_contains(&stderr, &["iops-total-max", "20", "500"]);
    let stderr = run_failing(&scratch, &["throttle", "a", "--weight", "7", "--group", "absent"]);
    assert_contains(&stderr, &["weir: a: there is no group \"absent\" (`weir status` lists them; "]);
    let stderr = run_failing(&scratch, &["throttle", "a", "--group", "b"]);
    assert_contains(&stderr, &["weir: a: \"b\" is a disk, not a group"]);
    assert_eq!(run_ok(&scratch, &["throttle", "a"]), before);
    assert_contains(&run_failing(&scratch, &["throttle", "aa"]), &["aa: no disk and no group has this name"]);
    assert_contains(&run_failing(&scratch, &["status", "c"]), &["c: no disk and no group has this name"]);
    for command in ["status", "throttle", "prefetch"] {
        assert_contains(&run_failing(&scratch, &[command, ""]), &["weir: the name is empty"]);
    }
}

#[test]
fn invalid_value_is_wrong_usage_without_a_daemon_too() {
    let scratch = Scratch::new();
    for (option, value, expect) in [
        ("--weight", "0", "--weight 0: is out of range; a weight is from 1 to 10000"),
        ("--watermark", "101", "--watermark 101: is out of range; a watermark is from 0 to 100 percent"),
        ("--iops-total", "2000000000000000", "--iops-total 2000000000000000: "),
        ("--bps-reservation", "7E", "--bps-reservation 8070450532247928832: is too large"),
        ("--iops-total", "-1", "is not a whole number of 0 or more"),
    ] {
        assert_contains(&run_misused(&scratch, &["throttle", "a", option, value]), &[expect]);
    }
}

/// A config file with two disks, a group, and comments.
fn config(scratch: &Scratch) -> String {
    format!(
        "# tenants\n\
         [daemon]\n\
         qmp = \"{}\"\n\
         nbd = \"unix:{}\"\n\
         \n\
         [group.gold] # pays\n\
         iops-total = 100   # a little\n\
         \n\
         [disk.a]\n\
         image = \"memory:1M\"\n\
         # since Tuesday\n\
         group = \"gold\"\n\
         \n\
         [disk.b]\n\
         image = \"memory:1M\"\n",
        socket(scratch),
        text(&scratch.socket("nbd"))
    )
}

#[test]
fn saved_change_persists_across_a_restart() {
    let scratch = Scratch::new();
    let before = config(&scratch);
    let file = scratch.file("weir.toml", &before);
    let weir = serve(&scratch, &file);
    let group = run_ok(&scratch, &["throttle", "gold", "--iops-total", "200", "--save"]);
    assert_contains(&group, &["gold: iops-total: 100 → 200\n", "gold: saved in ", "/weir.toml\n"]);
    run_ok(&scratch, &["throttle", "a", "--no-group", "--weight", "300", "--save"]);
    run_ok(&scratch, &["throttle", "b", "--group", "gold", "--bps-read", "1M", "--save"]);
    let expect =
        before.replace("= 100 ", "= 200 ").replace("group = \"gold\"\n\n", "weight = 300\n\n").replace(
            "[disk.b]\nimage = \"memory:1M\"\n",
            "[disk.b]\nimage = \"memory:1M\"\nbps-read = \"1M\"\ngroup = \"gold\"\n",
        );
    assert_eq!(fs::read_to_string(&file).expect("the file exists"), expect);
    let live = ["gold", "a", "b"].map(|name| run_ok(&scratch, &["throttle", name]));
    weir.stop();
    let _weir = serve(&scratch, &file);
    assert_eq!(["gold", "a", "b"].map(|name| run_ok(&scratch, &["throttle", name])), live);
}

#[test]
fn change_that_cannot_be_saved_is_not_applied() {
    let scratch = Scratch::new();
    let file = scratch.file("weir.toml", config(&scratch));
    let _weir = serve(&scratch, &file);
    let before = run_ok(&scratch, &["throttle", "gold"]);
    let other = scratch.file("other.toml", "[disk.a]\nimage = \"memory:1M\"\n");
    let stderr =
        run_failing(&scratch, &["throttle", "gold", "--iops-total", "9", "--save", "--config", text(&other)]);
    assert_contains(&stderr, &["other.toml: has no [group.gold]"]);
    // Rejected by the daemon only, after the new file was prepared.
    let stderr = run_failing(&scratch, &["throttle", "gold", "--group", "a", "--save"]);
    assert_contains(&stderr, &["group"]);
    assert_eq!(fs::read_to_string(&file).expect("the file exists"), config(&scratch));
    assert_eq!(run_ok(&scratch, &["throttle", "gold"]), before);
}

#[test]
fn save_without_a_config_file_is_rejected() {
    let scratch = Scratch::new();
    let _weir = start(&scratch, &[]);
    let stderr = run_failing(&scratch, &["throttle", "a", "--iops-total", "9", "--save"]);
    assert_contains(&stderr, &["started without a config file", "--config FILE"]);
    assert!(!run_ok(&scratch, &["throttle", "a"]).contains("iops-total"), "nothing was changed");
}

#[test]
fn missing_daemon_is_reported() {
    let scratch = Scratch::new();
    for command in [&["status"][..], &["throttle", "a"]] {
        assert_contains(&run_failing(&scratch, command), &["no daemon listens there", "--qmp"]);
    }
    let _weir = start(&scratch, &[]);
    assert_contains(
        &run_failing(&scratch, &["top"]),
        &["must be a terminal (`weir status` prints the same without one)"],
    );
}

#[test]
fn top_draws_edits_suspends_and_restores_the_terminal() {
    let scratch = Scratch::new();
    let _weir = start(&scratch, &["--iops-total", "500"]);
    let socket = socket(&scratch);
    let arguments = ["top", "--interval", "100ms", "--qmp", &socket];
    let mut top = Terminal::weir(arguments);
    top.wait_for(env!("CARGO_PKG_VERSION"));
    top.press("t");
    top.wait_for("iops-total=500");
    top.press("iops-total-max=20\r");
    top.wait_for("iops-total-max (20) is below iops-total (500)");
    top.press("\u{1b}");
    top.wait_for("a IOPS: ");
    top.press("tiops-total-max=1000\r");
    top.wait_for("iops-total-max:");
    assert_contains(&run_ok(&scratch, &["throttle", "a"]), &["iops-total-max  1000"]);

    top.signal(Signal::SIGTSTP);
    top.wait_for_stop();
    top.wait_until_restored();
    top.signal(Signal::SIGCONT);
    top.wait_for(env!("CARGO_PKG_VERSION"));
    top.press("q");
    top.wait_until_restored();
    assert!(top.wait().success());

    let top = Terminal::weir(arguments);
    top.wait_for(env!("CARGO_PKG_VERSION"));
    top.signal(Signal::SIGTERM);
    top.wait_until_restored();
    assert!(top.wait().success());
}

#[test]
fn top_shows_a_job_until_it_is_cancelled() {
    let scratch = Scratch::new();
    let root = scratch.path("");
    let weir = start(&scratch, &["--image-root", text(&root)]);
    let target = scratch.path("a.raw");
    weir.nbdsh("a", "h.pwrite(b'x' * (1 << 20), 0)");
    run_ok(&scratch, &["backup", "a", "--to", text(&target), "--detach", "--bps-total", "1"]);
    let socket = socket(&scratch);
    let top = Terminal::weir(["top", "--interval", "100ms", "--qmp", &socket]);
    top.wait_for("░");
    top.wait_for("backup-a");
    top.wait_for("bps-total");
    run_ok(&scratch, &["job", "cancel", "backup-a"]);
    top.wait_until_gone("backup-a");
}

#[test]
fn top_waits_for_a_daemon_that_was_restarted() {
    let scratch = Scratch::new();
    let weir = start(&scratch, &[]);
    let socket = socket(&scratch);
    let top = Terminal::weir(["top", "--interval", "100ms", "--qmp", &socket]);
    top.wait_for(env!("CARGO_PKG_VERSION"));
    weir.stop();
    top.wait_for("no response, retrying");
    let _weir = start(&scratch, &["--group", "g"]);
    top.wait_for("1 group");
}
