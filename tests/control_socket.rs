//! The default control socket: bound without an option, and never another daemon's.

use std::{
    fs,
    os::unix::fs::{PermissionsExt as _, chown},
    path::Path,
};

use serde_json::json;

use crate::harness::{Qmp, Scratch, Serve, TestClient, WEIR, assert_contains, need_root, text};

/// A daemon without options for the control socket; `socket` is its default address.
fn serve(socket: &Path) -> Serve {
    Serve::with_own_scratch().arg("memory:1M").env("WEIR_QMP", format!("unix:{}", text(socket)))
}

#[track_caller]
fn disks(socket: &Path) -> usize {
    let status = Qmp::negotiated(socket).command("x-weir-query-status", json!({}));
    status["disks"].as_array().expect("a list").len()
}

#[test]
fn default_socket_of_a_user_is_found() {
    need_root("other users");
    let scratch = Scratch::new();
    let runtime = scratch.socket("runtime");
    fs::create_dir(&runtime).unwrap();
    // Owned by user 65534, the unprivileged user of most distributions.
    chown(&runtime, Some(65534), Some(65534)).unwrap();
    fs::set_permissions(runtime.parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let _weir = Serve::with_own_scratch()
        .wrapped_by(user)
        .args(["memory:1M", "--name", "a", "--nbd", "127.0.0.1:0"])
        .at_given_addresses()
        .env("WEIR_QMP", "")
        .env("XDG_RUNTIME_DIR", &runtime)
        .start();
    let directory = runtime.join("weir");
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o777, 0o700);
    let status = TestClient::new("setpriv").args(&user[1..]).args([WEIR, "status", "--interval", "0"]);
    let printed = status.env("WEIR_QMP", "").env("XDG_RUNTIME_DIR", &runtime).succeeds();
    assert_contains(&printed, &["DISK", "a "]);
}

#[test]
fn second_daemon_leaves_the_default_socket_to_the_first() {
    let scratch = Scratch::new();
    let socket = scratch.socket("usual");
    let first = serve(&socket).start();
    let second = serve(&socket).args(["memory:1M", "--name", "a", "--name", "b"]).start();
    assert_contains(
        &second.wait_for_log("control"),
        &[
            "in use: another process listens there",
            "(name a control socket of its own with --qmp unix:PATH, or use --qmp none)",
        ],
    );
    assert_eq!(disks(&socket), 1, "the socket belongs to the first daemon");
    second.stop();
    assert_eq!(disks(&socket), 1, "the socket still belongs to the first daemon");
    assert_contains(
        &serve(&socket).args(["--qmp", "default"]).fails(),
        &["in use: another process listens there"],
    );
    // A stale socket of a killed daemon is replaced.
    first.crash();
    assert!(socket.exists());
    let third = serve(&socket).args(["memory:1M", "--name", "a", "--name", "b"]).start();
    assert_eq!(disks(&socket), 2);
    third.stop();
    assert!(!socket.exists());
}

#[test]
fn unavailable_default_socket_is_a_warning_unless_required() {
    let missing = Path::new("/nonexistent/qmp.sock");
    let weir = serve(missing).start();
    assert_contains(&weir.wait_for_log("control"), &["WARN", "the directory /nonexistent does not exist"]);
    assert_contains(
        &serve(missing).args(["--qmp", "default"]).fails(),
        &["the directory /nonexistent does not exist (create it)"],
    );
    let scratch = Scratch::new();
    let socket = scratch.socket("usual");
    let weir = serve(&socket).args(["--qmp", "none"]).start();
    assert!(!socket.exists());
    weir.stop();
    // The deprecated options.
    let weir = serve(&socket).arg("--no-control").start();
    assert_contains(&weir.wait_for_log("deprecated"), &["WARN", "--qmp none"]);
    assert!(!socket.exists());
    weir.stop();
    let (status, log) = serve(missing).arg("--control").spawn_unready().wait();
    assert_eq!(status.code(), Some(1), "{log}");
    assert_contains(&log, &["--control are deprecated", "the directory /nonexistent does not exist"]);
    let both = ["--qmp", "none", "--qmp", "unix:s"];
    assert_contains(
        &serve(&socket).args(both).rejects_usage(),
        &["--qmp none: conflicts with a named control socket"],
    );
    // An explicit control socket replaces the default one.
    let named = scratch.socket("named");
    let _weir = serve(&socket).arg("--qmp").arg(format!("unix:{}", text(&named))).start();
    assert_eq!((disks(&named), socket.exists()), (1, false));
}

#[test]
fn socket_option_adds_to_those_of_the_config() {
    let scratch = Scratch::new();
    let (usual, named) = (scratch.socket("usual"), scratch.socket("named"));
    let content = format!("[daemon]\nqmp = \"unix:{}\"\n[disk.a]\nimage = \"memory:1M\"\n", text(&named));
    let config = scratch.file("weir.toml", content);
    let at = format!("unix:{}", text(&usual));
    let serve = || Serve::new(&scratch).args(["--config", text(&config)]).env("WEIR_QMP", &at);
    let weir = serve().arg("--control").start();
    assert_contains(&weir.wait_for_log("deprecated"), &["WARN", "--qmp default"]);
    assert_eq!((disks(&named), disks(&usual)), (1, 1));
    weir.stop();
    // Keys of the config file.
    for (qmp, is_warning) in [
        (format!("[\"default\", \"unix:{}\"]", text(&named)), false),
        (format!("\"unix:{}\"\ncontrol = true", text(&named)), true),
    ] {
        fs::write(&config, format!("[daemon]\nqmp = {qmp}\n[disk.a]\nimage = \"memory:1M\"\n")).unwrap();
        let weir = serve().start();
        assert_eq!((disks(&named), disks(&usual)), (1, 1));
        assert_eq!(weir.stop().contains("deprecated"), is_warning);
    }
}
