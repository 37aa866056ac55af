//! Messages of `weir serve` to systemd: readiness, the watchdog, and log lines with priorities.

use std::{
    fs::{self, File},
    os::{linux::fs::MetadataExt as _, unix::net::UnixDatagram},
    process::{Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::harness::{DEADLINE, Scratch, WEIR, text};

/// A command whose standard error is this file, announced as the journal by `JOURNAL_STREAM`.
fn logging_to(log: &File) -> Command {
    let metadata = log.metadata().expect("it is an open file");
    let mut command = Command::new(WEIR);
    command
        .env("JOURNAL_STREAM", format!("{}:{}", metadata.st_dev(), metadata.st_ino()))
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stderr(log.try_clone().expect("it is open"));
    command
}

#[test]
fn watchdog_is_notified_and_journal_lines_have_priorities() {
    let scratch = Scratch::new();
    let (notify_path, log) = (scratch.socket("notify"), scratch.path("log"));
    let socket = UnixDatagram::bind(&notify_path).unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    let next = || {
        let mut text = [0; 256];
        let length = socket.recv(&mut text).expect("a notification arrives in time");
        String::from_utf8_lossy(&text[..length]).trim().to_owned()
    };
    let mut weir = logging_to(&File::create(&log).unwrap())
        .args(["serve", "null:1M", "--workers", "2", "--qmp", "none", "--nbd"])
        .arg(format!("unix:{}", text(&scratch.socket("nbd"))))
        .env("NOTIFY_SOCKET", &notify_path)
        .env("WATCHDOG_USEC", "50000")
        .spawn()
        .expect("cargo built the program");
    assert_eq!(next(), "READY=1");
    assert_eq!(next(), "WATCHDOG=1");
    assert_eq!(next(), "WATCHDOG=1");
    kill(Pid::from_raw(weir.id().cast_signed()), Signal::SIGTERM).unwrap();
    let last = std::iter::repeat_with(next).find(|message| message != "WATCHDOG=1");
    assert_eq!(last.unwrap(), "STOPPING=1");
    assert!(weir.wait().unwrap().success());
    let log = fs::read_to_string(&log).unwrap();
    for line in log.lines() {
        assert!(line.starts_with("<6> INFO "), "a line must begin with a priority and no time: {log}");
    }
    assert!(log.contains("ready"), "{log}");
}

#[test]
fn error_priority_is_only_in_the_journal() {
    let scratch = Scratch::new();
    let log = scratch.path("log");
    let mut weir = logging_to(&File::create(&log).unwrap());
    weir.args(["serve", text(&scratch.path("nowhere.raw"))]);
    assert!(!weir.status().unwrap().success());
    let logged = fs::read_to_string(&log).unwrap();
    assert!(logged.starts_with("<3>weir: "), "{logged}");
    // A child of a service inherits `JOURNAL_STREAM`, but may have a different standard error.
    let output = weir.stderr(Stdio::piped()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.starts_with("weir: "), "{stderr}");
}
