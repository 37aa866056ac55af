//! Image locks, against QEMU itself: each side refuses what the other has open, and says so.
//!
//! Needs `qemu-nbd` and `qemu-img` (Debian: qemu-utils).

use std::{
    path::Path,
    process::{Command, Output},
};

use block::storage::{OpenOptions, open};

fn qemu(program: &str, arguments: &[&str]) -> Output {
    Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error} (install the package qemu-utils)"))
}

/// Fails unless the command was refused with this message.
fn refused(program: &str, arguments: &[&str], message: &str) {
    let output = qemu(program, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains(message), "{program} {arguments:?}: {errors}");
}

fn image(directory: &Path) -> String {
    let path = directory.join("disk.raw");
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(1 << 20).expect("a size");
    path.to_str().expect("UTF-8").to_owned()
}

#[test]
fn qemu_refuses_what_weir_serves() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = image(directory.path());
    let copy = directory.path().join("copy.raw");
    let copy = copy.to_str().expect("UTF-8");
    let served = open(&path, OpenOptions::default()).expect("opens");
    refused("qemu-img", &["resize", "-f", "raw", &path, "2M"], "Failed to get \"write\" lock");
    refused(
        "qemu-img",
        &["convert", "-f", "raw", "-O", "raw", &path, copy],
        "Failed to get shared \"write\" lock",
    );
    let shared = qemu("qemu-img", &["convert", "-U", "-f", "raw", "-O", "raw", &path, copy]);
    assert!(shared.status.success(), "{}", String::from_utf8_lossy(&shared.stderr));
    drop(served);
    let resized = qemu("qemu-img", &["resize", "-f", "raw", &path, "2M"]);
    assert!(resized.status.success(), "{}", String::from_utf8_lossy(&resized.stderr));
}

#[test]
fn weir_refuses_what_qemu_has_open_and_names_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = image(directory.path());
    let of = |name: &str| directory.path().join(name).to_str().expect("UTF-8").to_owned();
    let (socket, pid_file) = (of("socket"), of("pid"));
    // With --fork it returns once the image is open and the socket listens.
    let started = qemu(
        "qemu-nbd",
        &["--fork", "--persistent", "-f", "raw", "--pid-file", &pid_file, "-k", &socket, &path],
    );
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    let pid: i32 = std::fs::read_to_string(&pid_file).expect("written").trim().parse().expect("a process id");
    let writing = open(&path, OpenOptions::default());
    let reading = open(&path, OpenOptions { read_only: true, ..OpenOptions::default() });
    let sharing = open(&path, OpenOptions { read_only: true, force_share: true, ..OpenOptions::default() });
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGTERM).expect("it runs");
    for error in [writing.expect_err("locked"), reading.expect_err("locked")] {
        let expected =
            format!("{path}: locked for writing by another process (pid {pid}, qemu-nbd) (stop it");
        assert!(error.to_string().starts_with(&expected), "{error}");
    }
    sharing.expect("reading beside a writer was asked for");
}
