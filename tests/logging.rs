//! A log that cannot be written: the daemon lives, and serves.

use std::{
    fs::File,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use crate::harness::{Client, DEADLINE, MIB, Scratch, WEIR, text};

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + DEADLINE;
    while !is_so() {
        assert!(Instant::now() < until, "not until the deadline: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A daemon whose standard error is this; and where it serves.
fn serve(scratch: &Scratch, log: impl Into<Stdio>) -> (Child, String) {
    let socket = scratch.socket("nbd");
    let image = scratch.sparse("disk.raw", MIB);
    let weir = Command::new(WEIR)
        .args(["serve", "--no-control", "--log", "debug", "--name", "disk", "--nbd"])
        .arg(format!("unix:{}", text(&socket)))
        .arg(image)
        .stderr(log)
        .spawn()
        .expect("it starts");
    wait_until("it listens", || socket.exists());
    (weir, format!("nbd+unix:///disk?socket={}", text(&socket)))
}

#[test]
fn a_full_file_system_ends_no_daemon() {
    let scratch = Scratch::new();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (mut weir, uri) = serve(&scratch, full);
    for _ in 0..3 {
        Client::new("nbdinfo").arg(&uri).succeeds();
    }
    assert_eq!(weir.try_wait().unwrap(), None, "it has ended");
    weir.kill().unwrap();
    weir.wait().unwrap();
}

#[test]
fn a_reader_who_has_gone_ends_no_daemon() {
    let scratch = Scratch::new();
    let (reader, writer) = std::io::pipe().unwrap();
    let (mut weir, uri) = serve(&scratch, writer);
    drop(reader);
    for _ in 0..3 {
        Client::new("nbdinfo").arg(&uri).succeeds();
    }
    assert_eq!(weir.try_wait().unwrap(), None, "it has ended");
    weir.kill().unwrap();
    weir.wait().unwrap();
}

#[test]
fn a_reader_who_stands_still_keeps_nobody_waiting_and_hears_what_is_missing() {
    let scratch = Scratch::new();
    let (reader, writer) = std::io::pipe().unwrap();
    // A page: full after a few clients.
    nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let (mut weir, uri) = serve(&scratch, writer);
    for _ in 0..20 {
        Client::new("nbdinfo").arg(&uri).succeeds();
    }
    // What is read makes room, and what comes after that says how much is missing.
    let mut lines = BufReader::new(reader).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(!first.contains("left_out"), "{first}");
    let tells = |line: &std::io::Result<String>| line.as_ref().unwrap().contains("were left out left_out=");
    let found = thread::spawn(move || lines.any(|line| tells(&line)));
    wait_until("it says what is missing", || {
        Client::new("nbdinfo").arg(&uri).succeeds();
        found.is_finished()
    });
    assert!(found.join().unwrap());
    weir.kill().unwrap();
    weir.wait().unwrap();
}
