//! `weir cgroup show` and `top` beside commands that run under `weir cgroup run` in cgroups of the
//! host.
//!
//! Needs root, and a hierarchy with a controller of block I/O, of either version.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Instant,
};

use serde_json::Value;

use crate::{
    cgroup_run::{CgroupShell, directory, name, root},
    harness::{DEADLINE, Scratch, Terminal, assert_contains, weir},
};

/// A shell in a cgroup that writes 64 KiB at a time to the disk, limited to a MiB per second, until
/// its input ends. Returns after the first write.
fn writing<'a>(scratch: &'a Scratch, name: &str) -> CgroupShell<'a> {
    let dd = "dd if=/dev/zero of=data bs=64K count=100000 oflag=direct conv=notrunc 2>/dev/null";
    CgroupShell::start(
        scratch,
        name,
        &["--kill", "--bps-write", "1M"],
        &format!("{dd} & while ! [ -s data ]; do :; done; echo ready; read line; kill $!"),
    )
}

#[test]
fn json_lists_cgroups_devices_and_tasks() {
    let scratch = Scratch::new();
    let name = name("show");
    let running = writing(&scratch, &name);
    let path = format!("weir/{name}");
    let show = |options: &[&str]| -> Value {
        weir(&["cgroup", "show", &path, "--json"]).args(options).inside(&scratch.path("")).json()
    };
    let tasks = |report: &Value| report["cgroups"][0]["tasks"].as_array().expect("a list").clone();
    let dd = |report: &Value| tasks(report).into_iter().find(|task| task["name"] == "dd");
    let writes = |rated: &Value| rated["rate"]["writes"]["bps"].as_f64().expect("it was measured");
    // The speed depends on the disk; an interval may see no write at all.
    let until = Instant::now() + DEADLINE;
    let mut began = Instant::now();
    let mut report = show(&["--device", ".", "--tasks", "--all", "--interval", "300ms"]);
    while writes(&report["cgroups"][0]["devices"][0]) == 0.0
        || dd(&report).is_none_or(|dd| writes(&dd) == 0.0)
    {
        assert!(Instant::now() < until, "{report:#}");
        began = Instant::now();
        report = show(&["--device", ".", "--tasks", "--all", "--interval", "300ms"]);
    }
    let seconds = began.elapsed().as_secs_f64();
    let group = &report["cgroups"][0];
    assert_eq!(group["name"], format!("/weir/{name}"));
    let device = &group["devices"][0];
    assert_eq!(device["limits"], serde_json::json!({ "bps-write": 1 << 20 }));
    let interval = report["interval-ns"].as_f64().expect("the report has an interval") / 1e9;
    // At most the limit over the whole time, plus slices of a tenth of a second at both ends.
    let max = f64::from(1 << 20) * (seconds + 0.2) * 1.05;
    assert!(writes(device) * interval <= max, "{max} bytes may be: {report:#}");
    let dd = dd(&report).expect("dd was running in the interval");
    assert!(dd["writes"]["bytes"].as_u64() > Some(0), "{report:#}");
    assert!(tasks(&report).iter().any(|task| task["name"] == "sh"), "{report:#}");
    if report["task-waits-counted"] == false && group["pressure"].is_null() {
        assert_eq!((&dd["waited-ns"], &group["waited-share"]), (&Value::Null, &Value::Null));
    } else {
        let share = group["waited-share"].as_f64().expect("it is counted");
        assert!((0.0..=1.0).contains(&share), "{report:#}");
    }
    let totals = show(&["--interval", "0"]);
    let group = &totals["cgroups"][0];
    assert_eq!((&totals["interval-ns"], &group["devices"][0]["rate"]), (&Value::Null, &Value::Null));
    assert_eq!(group["tasks"], serde_json::json!([]));
    running.stop();
}

#[test]
fn table_shows_limited_or_active_cgroups() {
    let scratch = Scratch::new();
    let name = name("table");
    let running = writing(&scratch, &name);
    let printed = weir(&["cgroup", "show", "--tasks", "--interval", "500ms"]).succeeds();
    let line = printed
        .lines()
        .find(|line| line.starts_with(&format!("/weir/{name} ")))
        .unwrap_or_else(|| panic!("{printed}"));
    assert_contains(line, &["/dev/", "bps-w 1M"]);
    assert!(
        printed.lines().any(|line| line.contains("  dd ") && line.ends_with(&format!("/weir/{name}"))),
        "{printed}"
    );
    running.stop();
    let stderr = weir(&["cgroup", "show", &format!("weir/{name}")]).fails();
    assert_contains(&stderr, &[&name]);
}

#[test]
fn appearing_and_disappearing_cgroups_are_no_error() {
    let parent = root().join(name("churn"));
    fs::create_dir(&parent).unwrap();
    let stopped = AtomicBool::new(false);
    let children = || (0..20).map(|child| parent.join(child.to_string()));
    let outcomes: Vec<_> = thread::scope(|scope| {
        scope.spawn(|| {
            while !stopped.load(Ordering::Relaxed) {
                children().for_each(|child| drop(fs::create_dir(child)));
                children().for_each(|child| drop(fs::remove_dir(child)));
            }
        });
        let group = format!("/{}", name("churn"));
        let outcomes =
            (0..20).map(|_| weir(&["cgroup", "show", &group, "--all", "--interval", "1ms"]).run()).collect();
        stopped.store(true, Ordering::Relaxed);
        outcomes
    });
    fs::remove_dir(&parent).unwrap();
    for outcome in outcomes {
        assert_eq!((outcome.code(), outcome.stderr().as_str()), (0, ""));
    }
}

#[test]
fn missing_cgroup_is_reported() {
    root();
    assert_contains(&weir(&["cgroup", "show", "no-such-cgroup"]).fails(), &["weir: ", "no-such-cgroup"]);
    assert_contains(&weir(&["cgroup", "show", "--device", "/proc"]).fails(), &["weir: device \"/proc\""]);
    assert_contains(
        &weir(&["cgroup", "top"]).fails(),
        &["output must be terminals (`weir cgroup show` prints the same)"],
    );
    let usage = weir(&["cgroup", "top", "--interval", "10ms"]).run();
    assert_eq!(usage.code(), 2);
    assert_contains(&usage.stderr(), &["is too short; the minimum is 100ms"]);
}

#[test]
fn top_shows_cgroups_and_restores_the_terminal() {
    let scratch = Scratch::new();
    let name = name("top");
    let running = writing(&scratch, &name);
    let mut top = Terminal::weir(["cgroup", "top", &format!("weir/{name}"), "--interval", "100ms"]);
    top.wait_for(&format!("/weir/{name}"));
    top.press("\r");
    top.wait_for(&format!("tasks in /weir/{name}"));
    top.wait_for(" dd ");
    running.stop();
    top.wait_for("removed meanwhile");
    top.press("\u{7f}q");
    top.wait_until_restored();
    assert!(top.wait().success());
    assert!(!directory(&name).exists());
}
