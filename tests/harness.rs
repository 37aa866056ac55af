//! What every end-to-end test stands on: a place for files, a daemon that must end well, clients
//! that must end at all.
//!
//! ```text
//!   Scratch ─── directories of one test, gone with it
//!   Serve ────► Weir ─── a running daemon; dropping it asks it to end and fails the test unless it ends cleanly
//!   Client ───► Outcome ─── a foreign program under a deadline, and what it said
//!   Wire, Qmp ── clients of our own, that can also misbehave
//!   peer ─── a script with a program of QEMU's and with weir in its place
//!   operator ─── the program's own commands at a daemon's control socket
//!   BlkioGroup ── a control group of this machine's kernel
//!   Terminal ─── the program on a screen of its own, with keys to press
//! ```
//!
//! It awaits lines of a log, ends of processes and bytes of sockets; only at what says nothing when
//! it changes does it look again and again.

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
    TestClient, TestOutcome, WEIR, create_encrypted, export_size, nbdsh, nbdsh_command, need, qemu_img, qemu_io,
    search_path, weir, weir_image,
};
pub(crate) use daemon::{Serve, Weir};
pub(crate) use loop_device::LoopDevice;
pub(crate) use qmp::Qmp;
pub(crate) use scratch::{Scratch, pattern, text};
pub(crate) use terminal::Terminal;
pub(crate) use wire::RawNbdClient;

pub(crate) const MIB: u64 = 1 << 20;

/// When a test stops waiting for something, and has failed; none judges how long it has waited.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);

/// Between two looks at what says nothing when it changes: a test that looks all the time keeps a
/// processor from what it waits for.
pub(crate) fn pause() {
    thread::sleep(Duration::from_millis(3));
}

/// What there is once it is there; asks again and again, and fails at the deadline.
#[track_caller]
pub(crate) fn poll_until<T>(look: impl Fn() -> Option<T>) -> T {
    let end = Instant::now() + DEADLINE;
    loop {
        match look() {
            Some(found) => return found,
            None => assert!(Instant::now() < end, "it did not come to be"),
        }
        pause();
    }
}

/// A script for a mount namespace of its own, where it first lets go of what tests beside it have
/// mounted: a copy of a mount keeps its device in use when it was unmounted outside.
pub(crate) fn script_without_foreign_mounts(script: &str) -> String {
    let mounts = r"grep -oE ' /[^ ]*(/e2e[.]|/weir/attached/)[^ ]* ' /proc/self/mountinfo";
    format!("for at in $({mounts}); do umount -l $at 2>&1 || true; done >/dev/null\n{script}")
}

/// The processes that a process has started and not waited for. Which of its threads is their
/// parent, as `/proc/PID/task/TID/children` has it, changes: those of a thread that ends are handed
/// to another.
pub(crate) fn children(pid: Pid) -> impl Iterator<Item = Pid> {
    let parent = format!("PPid:\t{pid}");
    let processes = fs::read_dir("/proc").expect("it is mounted").flatten();
    let of_parent = move |status: String| status.lines().any(|line| line == parent);
    processes
        .filter(move |process| fs::read_to_string(process.path().join("status")).is_ok_and(&of_parent))
        .filter_map(|process| process.file_name().to_str()?.parse().ok().map(Pid::from_raw))
}

/// Waits until each child of the tests' process runs its own program. Until then it has open what
/// was open here when it was made, and a device or a mount stays in use, though a test has closed
/// it.
pub(crate) fn wait_for_programs() {
    let program = |pid: Pid| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let ours = program(Pid::this());
    for child in children(Pid::this()) {
        while ours.is_some() && program(child) == ours {
            thread::yield_now();
        }
    }
}

/// Fails unless the tests run as root.
#[track_caller]
pub(crate) fn need_root(what: &str) {
    let is_root = nix::unistd::geteuid().is_root();
    assert!(is_root, "{what} need root (run the tests as root, as `make test` in CI does)");
}

/// Fails unless `text` contains each of `parts`, and shows all of it.
#[track_caller]
pub(crate) fn assert_contains(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing in:\n{text}");
    }
}
