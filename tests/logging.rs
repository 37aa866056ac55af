//! A log that cannot be written: the daemon survives and serves.

use std::{
    cell::{Cell, RefCell},
    fs::File,
    io::Read as _,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use serde_json::json;

use crate::harness::{
    DEADLINE, MIB, Qmp, Scratch, TestClient, WEIR, assert_contains,
    fuse_server::{FLUSH, FuseServer, OPEN, RELEASE, WRITE},
    text, weir,
};

fn wait_for(label: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < until, "deadline exceeded: {label}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A daemon with this standard error, and its URI.
fn serve(scratch: &Scratch, log: impl Into<Stdio>) -> (Child, String) {
    let socket = scratch.socket("nbd");
    let image = scratch.sparse("disk.raw", MIB);
    let weir = Command::new(WEIR)
        .args(["serve", "--qmp", "none", "--log", "debug", "--name", "disk", "--nbd"])
        .arg(format!("unix:{}", text(&socket)))
        .arg(image)
        .stderr(log)
        .spawn()
        .expect("weir can be run");
    wait_for("it listens", || socket.exists());
    (weir, format!("nbd+unix:///disk?socket={}", text(&socket)))
}

#[test]
fn full_log_file_system_does_not_end_the_daemon() {
    let scratch = Scratch::new();
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (mut weir, uri) = serve(&scratch, full);
    for _ in 0..3 {
        TestClient::new("nbdinfo").arg(&uri).succeeds();
    }
    assert_eq!(weir.try_wait().unwrap(), None, "the daemon has ended");
    weir.kill().unwrap();
    weir.wait().unwrap();
}

#[test]
fn closed_log_pipe_does_not_end_the_daemon() {
    let scratch = Scratch::new();
    let (reader, writer) = std::io::pipe().unwrap();
    let (mut weir, uri) = serve(&scratch, writer);
    drop(reader);
    for _ in 0..3 {
        TestClient::new("nbdinfo").arg(&uri).succeeds();
    }
    assert_eq!(weir.try_wait().unwrap(), None, "the daemon has ended");
    weir.kill().unwrap();
    weir.wait().unwrap();
}

#[test]
fn stalled_log_reader_blocks_nothing_and_drops_are_counted() {
    let scratch = Scratch::new();
    let (reader, writer) = std::io::pipe().unwrap();
    // One page, which is full after a few clients.
    nix::fcntl::fcntl(&writer, nix::fcntl::FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
    let (mut weir, uri) = serve(&scratch, writer);
    for _ in 0..20 {
        TestClient::new("nbdinfo").arg(&uri).succeeds();
    }
    // Read one pipe's content every two seconds: the log drops lines after waiting for a second.
    let (reader, text, last) = (RefCell::new(reader), RefCell::new(String::new()), Cell::new(Instant::now()));
    wait_for("dropped lines are counted", || {
        TestClient::new("nbdinfo").arg(&uri).succeeds();
        if last.get().elapsed() > Duration::from_secs(2) {
            last.set(Instant::now());
            let mut content = [0; 4096];
            let count = reader.borrow_mut().read(&mut content).unwrap();
            *text.borrow_mut() += &String::from_utf8_lossy(&content[..count]);
        }
        text.borrow().contains("could not be written suppressed=")
    });
    let text = text.into_inner();
    assert!(!text.lines().next().unwrap().contains("suppressed"), "{text}");
    weir.kill().unwrap();
    weir.wait().unwrap();
}

#[test]
fn hung_log_file_system_blocks_no_thread() {
    let scratch = Scratch::new();
    let fuse = FuseServer::mount(&scratch.path("mount"), MIB as usize);
    let (socket, image, control) =
        (scratch.socket("nbd"), scratch.sparse("disk.raw", MIB), scratch.socket("control"));
    let at = |socket| format!("unix:{}", text(socket));
    let mut weir = Command::new(WEIR)
        .args(["serve", "--log", "debug", "--name", "disk", "--nbd", &at(&socket), "--qmp", &at(&control)])
        .args(["--format", "raw", "--log-file", text(&fuse.file())])
        .arg(image)
        .spawn()
        .expect("weir can be run");
    let log = || String::from_utf8_lossy(&fuse.content()[MIB as usize..]).into_owned();
    wait_for("it is ready", || log().contains(" ready "));
    let uri = format!("nbd+unix:///disk?socket={}", text(&socket));
    fuse.block_requests(&[WRITE]);
    TestClient::new("nbdinfo").arg(&uri).succeeds();
    fuse.wait_until_blocked(WRITE);
    for _ in 0..3 {
        TestClient::new("nbdinfo").arg(&uri).succeeds();
    }
    assert!(Qmp::negotiated(&control).command_reply("query-block", json!({}))["return"].is_array());
    // Reopening the log does not wait for the writer thread, and neither does a reload.
    kill(Pid::from_raw(weir.id() as i32), Signal::SIGHUP).unwrap();
    TestClient::new("nbdinfo").arg(&uri).succeeds();
    fuse.unblock();
    wait_for("later lines are written", || log().contains("SIGHUP"));
    kill(Pid::from_raw(weir.id() as i32), Signal::SIGTERM).unwrap();
    assert!(weir.wait().unwrap().success());
    assert!(log().contains("stopped"), "{}", log());
}

/// The log is reopened, and lines reach it, while the close of its former file hangs.
#[test]
fn hung_close_of_the_log_delays_no_line() {
    let scratch = Scratch::new();
    let fuse = FuseServer::mount(&scratch.path("mount"), MIB as usize);
    let mut weir = Command::new(WEIR)
        .args(["serve", "memory:1M", "--qmp", "none", "--nbd"])
        .args([&format!("unix:{}", text(&scratch.socket("nbd"))), "--log-file", text(&fuse.file())])
        .spawn()
        .expect("weir can be run");
    let log = || String::from_utf8_lossy(&fuse.content()[MIB as usize..]).into_owned();
    let signal = |signal| kill(Pid::from_raw(weir.id() as i32), signal).unwrap();
    wait_for("it is ready", || log().contains(" ready "));
    fuse.block_requests(&[FLUSH, RELEASE]);
    signal(Signal::SIGUSR1);
    fuse.wait_until_blocked(FLUSH);
    let opened = "SIGUSR1: the request to reopen the log file was handled";
    wait_for("a line is written", || log().contains(opened));
    signal(Signal::SIGUSR1);
    wait_for("later lines are written", || log().matches(opened).count() == 2);
    fuse.unblock();
    // The open hangs: the next request does not block, and is carried out later.
    fuse.block_requests(&[OPEN]);
    signal(Signal::SIGUSR1);
    fuse.wait_until_blocked(OPEN);
    signal(Signal::SIGUSR1);
    wait_for("the second request returns", || log().contains("SIGUSR1: the log's file system"));
    assert_eq!(log().matches(opened).count(), 2);
    fuse.unblock();
    wait_for("it is opened", || log().matches(opened).count() == 3);
    signal(Signal::SIGTERM);
    assert!(weir.wait().unwrap().success());
}

#[test]
fn background_daemon_logs_to_a_file_that_can_be_rotated() {
    let scratch = Scratch::new();
    let (socket, log, pid) = (scratch.socket("nbd"), scratch.path("weir.log"), scratch.path("pid"));
    let at = format!("unix:{}", text(&socket));
    let serve =
        ["serve", "memory:1M", "--qmp", "none", "--name", "disk", "--iops-total", "100", "--nbd", &at];
    let logging = ["--daemonize", "--pid-file", text(&pid), "--log-file", text(&log)];
    let outcome = weir(&[&serve[..], &logging].concat()).run();
    assert_eq!(
        (outcome.status(), outcome.stderr().as_str()),
        (Some(0), ""),
        "nothing is written to standard error"
    );
    let number = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap_or_default();
    let ready = read(&log);
    let line = ready.lines().find(|line| line.contains(" ready ")).unwrap_or_else(|| panic!("{ready}"));
    assert!(line.contains("limits=\"disk: iops 100\"") && !line.contains('\x1b'), "{line}");
    let moved = scratch.path("weir.log.1");
    std::fs::rename(&log, &moved).unwrap();
    let signal = |signal| kill(Pid::from_raw(number), signal).unwrap();
    signal(Signal::SIGUSR1);
    wait_for("the new file has later lines", || read(&log).contains("SIGUSR1"));
    assert!(!read(&moved).contains("SIGUSR1"), "{}", read(&moved));
    std::fs::remove_file(&log).unwrap();
    signal(Signal::SIGHUP);
    wait_for("SIGHUP opens it again, too", || read(&log).contains("SIGHUP"));
    signal(Signal::SIGTERM);
    wait_for("it ends", || !pid.exists());
    let refused = weir(&[&serve[..], &["--log-file", text(&scratch.path("no/such/directory"))]].concat());
    assert_contains(&refused.fails(), &["log-file", "cannot be written"]);
}
