//! `weir cgroup run` on the host's own cgroups: each test in a cgroup that the command creates and
//! removes.
//!
//! Needs root, and a hierarchy with a controller of block I/O, of either version.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

use crate::harness::{Scratch, TestClient, WEIR, assert_contains, need_root, remove_emptied, text, weir};

/// Mount point of the hierarchy that limits block I/O.
pub(crate) fn root() -> PathBuf {
    need_root("cgroups");
    let [v1, v2] = ["/sys/fs/cgroup/blkio", "/sys/fs/cgroup"].map(Path::new);
    let root = if v1.is_dir() { v1 } else { v2 };
    assert!(root.join("cgroup.procs").is_file(), "{}: no cgroups are mounted there", root.display());
    root.to_owned()
}

/// A name that is unique to one test and run.
pub(crate) fn name(test: &str) -> String {
    format!("test-{test}-{}", std::process::id())
}

pub(crate) fn directory(name: &str) -> PathBuf {
    root().join("weir").join(name)
}

fn run(scratch: &Scratch, name: &str, options: &[&str]) -> TestClient {
    root();
    weir(&["cgroup", "run", "--name", name]).args(options).inside(&scratch.path(""))
}

#[test]
fn status_streams_and_arguments_are_passed_through() {
    let scratch = Scratch::new();
    let name = name("status");
    let script = "cat; echo \"$1\"; echo to error >&2; cat /proc/self/cgroup; exit 3";
    let outcome =
        run(&scratch, &name, &["--", "sh", "-c", script, "sh", "--json"]).with_stdin("from input\n").run();
    assert_eq!(outcome.code(), 3);
    assert!(outcome.stdout().starts_with("from input\n--json\n"), "{}", outcome.stdout());
    assert_contains(&outcome.stdout(), &[&format!(":/weir/{name}\n")]);
    let stderr = outcome.stderr();
    assert!(stderr.starts_with("to error\n"), "{stderr}");
    assert_contains(&stderr, &[&format!("weir: /weir/{name} in "), ", status 3\n", "\nwaited for I/O: "]);
    assert!(!directory(&name).exists());

    for (command, status) in [("kill -TERM $$", 143), ("exit 0", 0)] {
        assert_eq!(run(&scratch, &name, &["sh", "-c", command]).run().code(), status);
    }
    let missing = run(&scratch, &name, &["no-such-program"]).run();
    assert_eq!(missing.code(), 127);
    assert_contains(&missing.stderr(), &["weir: no-such-program: cannot be run: No such file"]);
    assert_eq!(run(&scratch, &name, &["/"]).run().code(), 126);
    assert!(!directory(&name).exists());
}

#[test]
fn limit_holds_and_summary_counts() {
    let scratch = Scratch::new();
    let (name, output) = (name("limit"), scratch.path("summary.json"));
    let dd = "dd if=/dev/zero of=data bs=64K count=64 oflag=direct";
    let options = ["--bps-write", "2M", "--json", "--output", text(&output), "--", "sh", "-c", dd];
    run(&scratch, &name, &options).succeeds();
    let summary: Value = serde_json::from_slice(&fs::read(&output).unwrap()).unwrap();
    assert_eq!(
        summary["settings"],
        serde_json::json!({ "bps-write": 2 << 20, "bps-write-max": 0, "bps-write-max-length": 1 })
    );
    let device = &summary["devices"][0];
    assert_eq!((&device["limited"], &summary["status"]), (&Value::Bool(true), &Value::from(0)));
    let (bytes, bps) =
        (device["writes"]["bytes"].as_u64().unwrap(), device["writes"]["bps"].as_f64().unwrap());
    // The file system may write metadata in addition.
    assert!((4 << 20..6 << 20).contains(&bytes), "{summary:#}");
    // The kernel admits the first tenth of a second's worth immediately.
    assert!(bps < 1.2 * f64::from(2 << 20), "{summary:#}");
    assert!(!directory(&name).exists());
}

/// A shell that runs in a cgroup and waits for its input. Dropping it ends the shell.
pub(crate) struct CgroupShell<'a> {
    child: Child,
    _scratch: &'a Scratch,
}

impl<'a> CgroupShell<'a> {
    pub(crate) fn start(scratch: &'a Scratch, name: &str, options: &[&str], script: &str) -> Self {
        root();
        // A shell cannot trap a signal that was ignored when it started, which is the case for
        // SIGINT in the background of a script.
        let mut child = Command::new("env")
            .args(["--default-signal", WEIR, "cgroup", "run", "--name", name])
            .args(options)
            .args(["--", "sh", "-c", script])
            .current_dir(scratch.path(""))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("cargo built the program");
        let mut line = String::new();
        let printed = child.stdout.as_mut().expect("it is a pipe");
        BufReader::new(printed).read_line(&mut line).expect("it is a pipe");
        let running = Self { child, _scratch: scratch };
        assert_eq!(line, "ready\n");
        running
    }

    fn status(&mut self) -> Option<i32> {
        // Keep stdin open: `wait` closes it, which would end the shell before the signal does.
        let _input = self.child.stdin.take();
        self.child.wait().expect("it is a child").code()
    }

    #[track_caller]
    pub(crate) fn stop(mut self) {
        drop(self.child.stdin.take());
        assert!(self.status().is_some(), "the shell ends at the end of its input");
    }
}

impl Drop for CgroupShell<'_> {
    fn drop(&mut self) {
        // Still running: the test has failed.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
            let _ = self.child.wait();
        }
    }
}

#[test]
fn signals_are_forwarded_and_the_cgroup_removed() {
    let scratch = Scratch::new();
    for (signal, trapped) in [(Signal::SIGTERM, "TERM"), (Signal::SIGINT, "INT"), (Signal::SIGHUP, "HUP")] {
        let name = name(trapped);
        // A builtin: the signal would not reach a child of the shell.
        let script = format!("trap 'exit 7' {trapped}; echo ready; read line");
        let mut running = CgroupShell::start(&scratch, &name, &[], &script);
        assert!(directory(&name).is_dir());
        kill(Pid::from_raw(running.child.id().cast_signed()), signal).unwrap();
        assert_eq!(running.status(), Some(7), "{signal}");
        assert!(!directory(&name).exists(), "{signal}");
    }
}

/// A process that is not a child of the test. Dropping it kills it and removes its cgroup.
struct SurvivingProcess {
    pid: Pid,
    directory: PathBuf,
}

impl Drop for SurvivingProcess {
    fn drop(&mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        // Already removed if the end of the command removed it.
        let _ = remove_emptied(&self.directory);
    }
}

#[test]
fn surviving_processes_keep_the_cgroup_or_are_killed() {
    let scratch = Scratch::new();
    let command = ["--", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"];
    let group_name = name("kept");
    let outcome = run(&scratch, &group_name, &[&["--bps-write", "1M"], &command[..]].concat()).run();
    let pid = outcome.stdout();
    let directory = directory(&group_name);
    let outlived =
        SurvivingProcess { pid: Pid::from_raw(pid.trim().parse().unwrap()), directory: directory.clone() };
    assert_contains(
        &outcome.stderr(),
        &["the cgroup stays with its limits for a process that", pid.trim(), "--kill"],
    );
    assert_eq!(fs::read_to_string(directory.join("cgroup.procs")).unwrap(), pid);
    drop(outlived);
    assert!(!directory.exists());

    let killed = name("killed");
    let outcome = run(&scratch, &killed, &[&["--kill"], &command[..]].concat()).run();
    assert!(!outcome.stderr().contains("the cgroup stays"), "{}", outcome.stderr());
    assert!(!self::directory(&killed).exists());
}

#[test]
fn invalid_options_leave_nothing() {
    let scratch = Scratch::new();
    let name = name("wrong");
    let check = |options: &[&str], status, parts: &[&str]| {
        let outcome = run(&scratch, &name, &[options, &["--", "true"]].concat()).run();
        assert_eq!(outcome.code(), status, "{}", outcome.stderr());
        assert_contains(&outcome.stderr(), parts);
        assert!(!directory(&name).exists());
    };
    check(&["--bps-write-max", "2M"], 2, &["weir: --bps-write-max (2097152) is set without bps-write"]);
    check(&["--watermark", "101"], 2, &["--watermark", "101 is not in 0..=100"]);
    check(&["--device", "/nowhere"], 1, &["weir: device \"/nowhere\": ", "No such file"]);
    check(&["--device", "/proc"], 1, &["weir: device \"/proc\""]);
    check(&["--parent", "/no-such-cgroup"], 1, &["no-such-cgroup"]);
    if root().ends_with("blkio") {
        check(&["--bps-write", "1M", "--bps-write-max", "2M"], 1, &["bursts", "need cgroup v2"]);
    }
    let without = weir(&["cgroup", "run", "--bps-write", "1M"]).run();
    assert_eq!(without.code(), 2);
    assert_contains(&without.stderr(), &["COMMAND"]);

    let denied = TestClient::new("setpriv")
        .args(["--reuid=65534", "--clear-groups", WEIR, "cgroup", "run"])
        .args(["--name", &name, "--device", "/", "true"])
        .fails();
    assert_contains(
        &denied,
        &["weir: cgroup /weir", "cannot be created", "Permission denied", "run as root"],
    );
}
