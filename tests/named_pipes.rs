//! Files that a user names are opened without waiting: named pipes, devices and directories are
//! refused where a file is expected; a pipe that the shell passes by its number is read.

use crate::harness::{Client, Scratch, WEIR, assert_says, need, text, weir};

#[test]
fn a_named_pipe_is_refused_where_a_config_or_a_token_is_expected() {
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
        assert_says(&outcome.said(), &[pipe, "is a named pipe, not a file"]);
        assert_ne!(outcome.ended(), Some(0), "{arguments:?}");
    }
    for arguments in [["image", "info", pipe], ["image", "check", pipe]] {
        assert_says(&weir(&arguments).fails(), &[pipe, "is a pipe or a socket"]);
    }
    let directory = text(&scratch.path("")).to_owned();
    assert_says(&weir(&["check-config", &directory]).fails(), &["is a directory, not a file"]);
    assert_says(&weir(&["check-config", "/dev/zero"]).fails(), &["is a device, not a file"]);
}

#[test]
fn a_pipe_of_the_shell_is_read_as_a_config() {
    need("bash");
    let script = format!("{WEIR} check-config <(printf '[disk.a]\\nimage = \"memory:1M\"\\n')");
    let printed = Client::new("bash").args(["-c", &script]).succeeds();
    assert_says(&printed, &["1 disk, 0 groups", "nothing is wrong"]);
}

#[test]
fn serve_without_a_disk_reports_the_missing_arguments() {
    let outcome = weir(&["serve", "--iops-total", "5"]).run();
    assert_eq!(outcome.code(), 2);
    let said = outcome.said();
    assert_says(
        &said,
        &["weir: neither an image nor a config file is given (name an IMAGE", "--config FILE)"],
    );
    assert!(!said.contains("--blockdev"), "{said}");
}
