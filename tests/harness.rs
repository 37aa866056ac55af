//! The harness of the end-to-end tests: a scratch directory, a daemon that must end cleanly, and
//! clients under a deadline.
//!
//! ```text
//!   Scratch ─── directories of one test, removed on drop
//!   Serve ────► Weir ─── a running daemon; dropping it sends SIGTERM and asserts a clean end
//!   TestClient ───► TestOutcome ─── an external program under a deadline, its status and output
//!   RawNbdClient, Qmp ── clients of NBD and QMP that can also violate the protocol
//!   peer ─── one script run with a program of QEMU and with weir
//!   operator ─── weir's client commands on a daemon's control socket
//!   BlkioGroup ── a control group of the host's kernel
//!   Terminal ─── the program on a pseudo-terminal, with keys to press
//! ```
//!
//! The harness waits for log lines, ends of processes and bytes of sockets. It polls only sources
//! that send no notification of a change.

mod blkio_group;
mod client;
mod daemon;
pub(crate) mod fuse_server;
mod log;
mod loop_device;
pub(crate) mod operator;
pub(crate) mod peer;
mod qmp;
mod scratch;
mod terminal;
pub(crate) mod wire;

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use nix::unistd::Pid;

pub(crate) use blkio_group::{BlkioGroup, remove_emptied};
pub(crate) use client::{
    TestClient, TestOutcome, WEIR, create_encrypted, export_size, nbdsh, nbdsh_command, need, qemu_img,
    qemu_io, search_path, weir, weir_image,
};
pub(crate) use daemon::{Serve, Weir};
pub(crate) use loop_device::LoopDevice;
pub(crate) use qmp::Qmp;
pub(crate) use scratch::{Scratch, pattern, text};
pub(crate) use terminal::Terminal;
pub(crate) use wire::RawNbdClient;

pub(crate) const MIB: u64 = 1 << 20;

/// Time after which a wait has failed; the tests never assert how long a wait took.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);

/// The number in an environment variable that changes the amount of a test.
pub(crate) fn env_number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// Sleeps between two polls of a source without notifications. Polling without a pause would take
/// CPU time from the process that the test waits for.
pub(crate) fn pause() {
    thread::sleep(Duration::from_millis(3));
}

/// Polls until the closure returns a value; fails at the deadline.
#[track_caller]
pub(crate) fn poll_until<T>(poll: impl Fn() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        match poll() {
            Some(found) => return found,
            None => assert!(Instant::now() < end, "the condition did not become true"),
        }
        pause();
    }
}

/// Prepares a script for its own mount namespace: it first unmounts the mounts of parallel tests,
/// whose copies in this namespace would keep their devices in use after an unmount outside.
pub(crate) fn script_without_foreign_mounts(script: &str) -> String {
    let mounts = r"grep -oE ' /[^ ]*(/e2e[.]|/weir/attached/)[^ ]* ' /proc/self/mountinfo";
    format!("for at in $({mounts}); do umount -l $at 2>&1 || true; done >/dev/null\n{script}")
}

/// Child processes of a process that it has not waited for. Reads each process's `PPid` rather than
/// `/proc/PID/task/TID/children`: children of a thread that ends move to another thread.
pub(crate) fn children(pid: Pid) -> impl Iterator<Item = Pid> {
    let parent = format!("PPid:\t{pid}");
    let processes = fs::read_dir("/proc").expect("it is mounted").flatten();
    let of_parent = move |status: String| status.lines().any(|line| line == parent);
    processes
        .filter(move |process| fs::read_to_string(process.path().join("status")).is_ok_and(&of_parent))
        .filter_map(|process| process.file_name().to_str()?.parse().ok().map(Pid::from_raw))
}

/// Waits until each child of the test process has called `exec`. Until then the child holds all
/// descriptors that were open at the fork, so a device or mount stays in use after a test closed
/// it.
pub(crate) fn wait_for_programs() {
    let program = |pid: Pid| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let own_program = program(Pid::this());
    for child in children(Pid::this()) {
        while own_program.is_some() && program(child) == own_program {
            thread::yield_now();
        }
    }
}

/// Fails unless the tests run as root.
#[track_caller]
pub(crate) fn need_root(subject: &str) {
    let is_root = nix::unistd::geteuid().is_root();
    assert!(is_root, "{subject} need root (run the tests as root, as `make test` in CI does)");
}

/// Fails unless `text` contains each of `parts`; the message shows all of `text`.
#[track_caller]
pub(crate) fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
}
