//! The sandbox from outside: it applies to every thread, serving continues, and errors explain
//! rejected operations. `crates/sandbox/src/tests.rs` tests the rights of a thread.

use std::{
    fs,
    os::unix::{
        fs::MetadataExt as _,
        net::{UnixListener, UnixStream},
    },
};

use serde_json::json;

use crate::harness::{
    MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, need_root,
    operator::{run_failing, run_ok, socket},
    text,
};

/// The distinct values of a field of every thread's status.
fn of_threads(weir: &Weir, field: &str) -> Vec<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", weir.pid())).unwrap();
    let field = format!("{field}:");
    let mut values: Vec<String> = threads
        .map(|thread| fs::read_to_string(thread.unwrap().path().join("status")).unwrap())
        .map(|status| status.lines().find_map(|line| line.strip_prefix(&field)).unwrap().trim().to_owned())
        .collect();
    values.dedup();
    values
}

fn assert_served(weir: &Weir, export: &str) {
    let script = "h.pwrite(b'x' * 65536, 4096)\nh.flush()\nassert h.pread(65536, 4096) == b'x' * 65536";
    weir.nbdsh(export, script);
}

#[test]
fn all_threads_are_sandboxed_and_outside_files_rejected_by_name() {
    need_root("capabilities");
    let (scratch, other) = (Scratch::new(), Scratch::new());
    let image = scratch.sparse("a.raw", MIB);
    let serve = Serve::new(&scratch).arg(&image).args(["--format", "raw", "--qmp", &socket(&scratch)]);
    let weir = serve.args(["--sandbox", "require"]).start();
    assert_served(&weir, "a");
    assert_eq!(of_threads(&weir, "Seccomp"), ["2"]);
    assert_eq!(of_threads(&weir, "NoNewPrivs"), ["1"]);
    // DAC_OVERRIDE, DAC_READ_SEARCH and NET_BIND_SERVICE.
    assert_eq!(of_threads(&weir, "CapEff"), ["0000000000000406"]);
    assert_eq!(of_threads(&weir, "CapPrm"), ["0000000000000406"]);
    let (inside, outside) = (scratch.sparse("b.raw", MIB), other.sparse("c.raw", MIB));
    run_ok(&scratch, &["disk", "add", "b", text(&inside), "-f", "raw"]);
    assert_served(&weir, "b");
    let refused = run_failing(&scratch, &["disk", "add", "c", text(&outside), "-f", "raw"]);
    assert_contains(&refused, &["c.raw: the sandbox allows images only in ", "--image-root"]);
    let (image, vhost_address) = (scratch.sparse("d.raw", MIB), format!("unix:{}", text(&other.path("vm"))));
    let add = ["disk", "add", "d", text(&image), "-f", "raw", "--vhost-user-blk", &vhost_address];
    let expect = format!("{vhost_address}: the sandbox allows sockets only in ");
    assert_contains(
        &run_failing(&scratch, &add),
        &[&expect, text(image.parent().unwrap()), "(choose one of these, "],
    );
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let (pipe, stale) = (scratch.path("pipe"), scratch.socket("stale"));
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    drop(UnixListener::bind(&stale).unwrap());
    let stale_address = json!({"type": "unix", "path": stale});
    for (command, arguments, expect) in [
        (
            "block-export-add",
            json!({"type": "fuse", "id": "f", "node-name": "b", "mountpoint": inside}),
            "the sandbox does not allow this daemon to create devices and mounts on this host",
        ),
        ("object-add", json!({"qom-type": "secret", "id": "s", "file": "/etc/shadow"}), "ermission denied"),
        ("object-add", json!({"qom-type": "secret", "id": "s", "file": pipe}), "is a named pipe, not a file"),
        (
            "block-export-add",
            json!({"type": "vhost-user-blk", "id": "v", "node-name": "b", "addr": stale_address}),
            "a sandboxed daemon cannot check whether a process listens there (remove it if none does",
        ),
    ] {
        let (_, refused) = qmp.command_error(command, arguments);
        assert_contains(&refused, &[expect]);
    }
    weir.stop();
}

#[test]
fn unprivileged_user_serves_files_opened_by_root() {
    need_root("another user");
    let scratch = Scratch::new();
    let image = scratch.sparse("a.raw", MIB);
    let qmp = socket(&scratch);
    let pid_file = scratch.socket("pid");
    let serve = Serve::new(&scratch).arg(&image).args(["--format", "raw", "--qmp", &qmp, "--user", "nobody"]);
    let weir = serve.arg("--pid-file").arg(&pid_file).start();
    assert_served(&weir, "a");
    let nobody = nix::unistd::User::from_name("nobody").unwrap().unwrap().uid;
    assert_eq!(of_threads(&weir, "Uid"), [[nobody; 4].map(|uid| uid.to_string()).join("\t")]);
    assert_eq!(of_threads(&weir, "CapPrm"), ["0000000000000000"]);
    assert_eq!(fs::metadata(weir.socket()).unwrap().uid(), nobody.as_raw());
    // Root can still use the control socket.
    assert!(run_ok(&scratch, &["status", "--interval", "0"]).contains("a "));
    assert_eq!(fs::read_to_string(&pid_file).unwrap(), format!("{}\n", weir.pid()));
    weir.stop();
    // Only root may remove the file from its directory, so it is truncated.
    assert_eq!(fs::read_to_string(&pid_file).unwrap(), "");
}

#[test]
fn invalid_user_is_named() {
    let scratch = Scratch::new();
    let serve = |more: &[&str]| Serve::new(&scratch).arg("memory:1M").args(more);
    let stderr = serve(&["--user", "no-such-user"]).fails();
    assert_contains(
        &stderr,
        &["user: there is no user \"no-such-user\" (create it with `useradd --system no-such-user`)"],
    );
    let stderr = serve(&["--user", ":root"]).rejects_usage();
    assert_contains(&stderr, &["'--user <USER[:GROUP]>': has no user"]);
    let file = scratch.sparse("file", 0);
    let stderr = serve(&["--user", "nobody", "--fuse", text(&file)]).fails();
    assert_contains(&stderr, &["needs root while the daemon runs (leave one of them out)"]);
    assert_contains(&serve(&["--sandbox", "maybe"]).rejects_usage(), &["(on, require, off)"]);
}

#[test]
fn sandbox_off_restricts_nothing() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).arg("memory:1M").args(["--name", "a", "--sandbox", "off"]).start();
    assert_served(&weir, "a");
    assert_eq!(of_threads(&weir, "NoNewPrivs"), ["0"]);
    assert_eq!(TestClient::new("nbdinfo").args(["--size", &weir.uri("a")]).succeeds(), format!("{MIB}\n"));
    weir.stop();
}

#[test]
fn earlier_connections_are_accepted_after_the_sandbox() {
    let scratch = Scratch::new();
    let path = scratch.socket("machine");
    let listener = UnixListener::bind(&path).unwrap();
    let _machine = UnixStream::connect(&path).unwrap();
    let script = "exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" \"$@\"";
    let serve =
        Serve::with_own_scratch().at_given_addresses().wrapped_by(["sh", "-c", script]).reading(listener);
    let weir = serve.args(["memory:1M", "--vhost-user-blk", "fd:3"]).start();
    weir.wait_for_log("a front end has connected");
    let log = weir.stop();
    let at = |text_in_log: &str| log.find(text_in_log).unwrap_or_else(|| panic!("{text_in_log}: {log}"));
    assert!(at("sandboxed") < at("a front end has connected"), "{log}");
}
