//! Files named by a user are opened without blocking: named pipes, devices and directories are
//! rejected where a file is expected; a pipe that the shell passes as a descriptor is read.

use crate::harness::{Scratch, TestClient, WEIR, assert_contains, need, text, weir};

#[test]
fn named_pipe_is_rejected_as_config_or_token() {
    let scratch = Scratch::new();
    let pipe = scratch.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let pipe = text(&pipe);
    let page = ["serve", "memory:1M", "--qmp", "none", "--http", "127.0.0.1:0", "--http-token-file", pipe];
    for arguments in [
        &["check-config", pipe][..],
        &["serve", "--config", pipe],
        &["serve", "--check", "--config", pipe],
        &["simulate", "--workload", "random:iops=10,seconds=1", "--config", pipe],
        &page,
    ] {
        let outcome = weir(arguments).run();
        assert_contains(&outcome.stderr(), &[pipe, "is a named pipe, not a file"]);
        assert_ne!(outcome.status(), Some(0), "{arguments:?}");
    }
    for arguments in [["image", "info", pipe], ["image", "check", pipe]] {
        assert_contains(&weir(&arguments).fails(), &[pipe, "is a pipe or a socket"]);
    }
    let directory = text(&scratch.path("")).to_owned();
    assert_contains(&weir(&["check-config", &directory]).fails(), &["is a directory, not a file"]);
    assert_contains(&weir(&["check-config", "/dev/zero"]).fails(), &["is a device, not a file"]);
}

#[test]
fn shell_pipe_is_read_as_config() {
    need("bash");
    let script = format!("{WEIR} check-config <(printf '[disk.a]\\nimage = \"memory:1M\"\\n')");
    let printed = TestClient::new("bash").args(["-c", &script]).succeeds();
    assert_contains(&printed, &["1 disk, 0 groups", "no errors"]);
}

#[test]
fn serve_without_a_disk_reports_the_missing_arguments() {
    let outcome = weir(&["serve", "--iops-total", "5"]).run();
    assert_eq!(outcome.code(), 2);
    let stderr = outcome.stderr();
    assert_contains(
        &stderr,
        &["weir: neither an image nor a config file is given (name an IMAGE", "--config FILE)"],
    );
    assert!(!stderr.contains("--blockdev"), "{stderr}");
}
