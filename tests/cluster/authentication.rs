//! Authentication with etcd: passwords and certificates that are changed while weir runs.

use std::{fs, path::Path};

use nix::sys::signal::Signal;

use super::{ClusterTestHost, EtcdServer, until};
use crate::harness::{Scratch, TestClient, WEIR, assert_contains, text};

#[test]
fn changed_password_is_reported_and_reloaded() {
    let scratch = Scratch::new();
    let mut etcd = EtcdServer::start(&scratch);
    let change = |etcd: &EtcdServer, password: &str| {
        let arguments = ["--user", "root:secret", "user", "passwd", "weir", "--interactive=false"];
        etcd.control(&arguments).with_stdin(password).succeeds();
    };
    for arguments in [
        "role add lab",
        "role grant-permission lab readwrite --prefix /weir/v1/lab/",
        "user add weir:first",
        "user grant-role weir lab",
        "role add look",
        "role grant-permission look read --prefix /weir/v1/lab/",
        "user add reader:first",
        "user grant-role reader look",
        "user add root:secret",
        "user grant-role root root",
        "auth enable",
    ] {
        etcd.control(&arguments.split(' ').collect::<Vec<_>>()).succeeds();
    }
    let host_scratch = Scratch::new();
    let password = host_scratch.file("password", "first\n");
    let reader = format!("user = \"reader\"\npassword-file = \"{}\"", text(&password));
    let file = ClusterTestHost::config(&host_scratch, "x", &etcd.url(), &reader);
    assert_contains(
        &TestClient::new(WEIR).args(["check-config", text(&file)]).fails(),
        &["permission denied", "a role that reads and writes /weir/v1/lab/"],
    );
    assert_contains(
        &ClusterTestHost::serve(&host_scratch, &file, &host_scratch.socket("control")).fails(),
        &["permission denied"],
    );
    let more = format!("user = \"weir\"\npassword-file = \"{}\"", text(&password));
    let file = ClusterTestHost::config(&host_scratch, "x", &etcd.url(), &more);
    let socket = host_scratch.socket("control");
    let weir = Some(ClusterTestHost::serve(&host_scratch, &file, &socket).start());
    let host = ClusterTestHost { scratch: host_scratch, weir, control: socket };
    until("the host has joined", || host.cluster()["joined"] == true);
    // The first error is different: etcd is unreachable.
    host.weir().signal(Signal::SIGSTOP);
    change(&etcd, "second\n");
    etcd.kill();
    host.weir().signal(Signal::SIGCONT);
    host.weir().wait_for_log("partitioned from cluster lab");
    etcd.child = EtcdServer::spawn(&etcd.data, etcd.ports, None);
    let expect = "rejects the user and password of [cluster]: etcdserver: authentication failed";
    host.weir().wait_for_log(expect);
    until("the status contains the reason", || {
        host.status()["cluster"]["reason"].as_str().is_some_and(|why| why.contains(expect))
    });
    assert_eq!(
        host.weir().log_text().matches(expect).count(),
        1,
        "the connection is retried, and its error logged once"
    );
    // A reload reads the file again, although nothing else has changed.
    replace_file(&password, "second\n");
    assert_eq!(host.run(&["reload"]).succeeds(), "nothing has changed\n");
    until("the host has joined again", || host.cluster()["joined"] == true);
    fs::remove_file(&password).unwrap();
    assert_contains(&host.run(&["reload"]).fails(), &["cluster lab: password-file", "No such file"]);
    assert_eq!(host.cluster()["joined"], true);
}

#[test]
fn members_of_two_etcd_clusters_are_rejected() {
    let (first, second) = (Scratch::new(), Scratch::new());
    let (first, second) = (EtcdServer::start(&first), EtcdServer::start(&second));
    let host_scratch = Scratch::new();
    let file =
        ClusterTestHost::config(&host_scratch, "x", &format!("{}\", \"{}", first.url(), second.url()), "");
    let text = fs::read_to_string(&file).unwrap();
    let lines = text.lines().map(|line| match line.strip_prefix("etcd = ") {
        Some(urls) => format!("etcd = [{urls}]\n"),
        None => format!("{line}\n"),
    });
    fs::write(&file, lines.collect::<String>()).unwrap();
    let expect = ["belong to different clusters", "etcdctl member list"];
    assert_contains(&TestClient::new(WEIR).args(["check-config", self::text(&file)]).fails(), &expect);
    let control = host_scratch.socket("control");
    let weir = Some(ClusterTestHost::serve(&host_scratch, &file, &control).start());
    let host = ClusterTestHost { scratch: host_scratch, weir, control };
    host.weir().wait_for_log("belong to different clusters");
    assert_ne!(host.cluster()["joined"], true);
}

/// Replaces a file by renaming a new one, as programs that renew credentials do.
fn replace_file(file: &Path, text: &str) {
    let replacement = file.with_extension("new");
    fs::write(&replacement, text).unwrap();
    fs::rename(replacement, file).unwrap();
}
