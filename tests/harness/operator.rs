//! weir's client commands for a daemon's control socket, `qmp` in the scratch directory.

use std::{path::Path, time::Instant};

use serde_json::Value;

use super::{DEADLINE, Scratch, Serve, TestClient, Weir, pause, scratch::text, weir};

pub(crate) fn socket(scratch: &Scratch) -> String {
    format!("unix:{}", text(&scratch.socket("qmp")))
}

/// A daemon with two disks in memory, `a` and `b`.
pub(crate) fn start(scratch: &Scratch, more: &[&str]) -> Weir {
    let disks = ["memory:16M", "memory:16M", "--name", "a", "--name", "b"];
    Serve::new(scratch).args(disks).args(["--qmp", &socket(scratch)]).args(more).start()
}

pub(crate) fn serve(scratch: &Scratch, file: &Path) -> Weir {
    Serve::new(scratch).at_given_addresses().arg("--config").arg(file).start()
}

fn command(scratch: &Scratch, arguments: &[&str]) -> TestClient {
    weir(&[]).args(arguments).args(["--qmp", &socket(scratch)])
}

#[track_caller]
pub(crate) fn run_ok(scratch: &Scratch, arguments: &[&str]) -> String {
    let printed = command(scratch, arguments).succeeds();
    assert!(!printed.contains(char::REPLACEMENT_CHARACTER), "the output is not UTF-8");
    printed
}

#[track_caller]
pub(crate) fn run_json(scratch: &Scratch, arguments: &[&str]) -> Value {
    serde_json::from_str(&run_ok(scratch, arguments)).expect("it prints JSON")
}

/// Asserts exit status 1; returns the messages of the command.
#[track_caller]
pub(crate) fn run_failing(scratch: &Scratch, arguments: &[&str]) -> String {
    refused(scratch, arguments, 1)
}

/// Asserts exit status 2 (wrong usage); returns the messages of the command.
#[track_caller]
pub(crate) fn run_misused(scratch: &Scratch, arguments: &[&str]) -> String {
    refused(scratch, arguments, 2)
}

#[track_caller]
fn refused(scratch: &Scratch, arguments: &[&str], code: i32) -> String {
    let outcome = command(scratch, arguments).run();
    let stderr = outcome.stderr();
    assert_eq!(outcome.code(), code, "weir {arguments:?}: {stderr}");
    assert!(stderr.starts_with("weir: "), "{stderr}");
    stderr
}

/// `weir status --json` of everything, with rates over `interval`.
#[track_caller]
pub(crate) fn status(scratch: &Scratch, interval: &str) -> Value {
    run_json(scratch, &["status", "--json", "--interval", interval])
}

#[track_caller]
pub(crate) fn find<'a>(status: &'a Value, list: &str, name: &str) -> &'a Value {
    let entries = status[list].as_array().expect("a list");
    entries.iter().find(|entry| entry["name"] == name).expect("the entry exists")
}

#[track_caller]
pub(crate) fn wait_until(scratch: &Scratch, condition: impl Fn(&Value) -> bool) {
    let until = Instant::now() + DEADLINE;
    while !condition(&status(scratch, "0")) {
        assert!(Instant::now() < until, "{:#}", status(scratch, "0"));
        pause();
    }
}
