//! A start that continues without disks whose servers do not answer, and opens them later.

use std::{
    fs,
    os::unix::net::UnixListener,
    path::PathBuf,
    process::{Command, Stdio},
};

use nix::sys::signal::Signal;
use serde_json::json;

use super::{BackgroundNbdServer, half_filled, uri};
use crate::harness::{
    MIB, Scratch, Serve, TestClient, WEIR, Weir, assert_contains,
    operator::{find, run_failing, run_json, run_ok, serve, socket, status, wait_until},
    text, weir,
};

/// A daemon with a local disk, and a disk on a server that accepts connections and sends nothing.
struct DaemonWithUnavailableDisk {
    scratch: Scratch,
    silent_listener: UnixListener,
    weir: Weir,
}

impl DaemonWithUnavailableDisk {
    fn new() -> Self {
        let scratch = Scratch::new();
        let silent_listener = UnixListener::bind(scratch.socket("back")).unwrap();
        scratch.sparse("near.raw", MIB);
        let file = write(&scratch, &unavailable_disk(&scratch, "iops-total = 1000"));
        let weir = serve(&scratch, &file);
        Self { scratch, silent_listener, weir }
    }
}

fn write(scratch: &Scratch, disks: &str) -> PathBuf {
    let (qmp, nbd) = (socket(scratch), text(&scratch.socket("nbd")).to_owned());
    let daemon = format!("[daemon]\nqmp = \"{qmp}\"\nnbd = \"unix:{nbd}\"\nsandbox = \"require\"\n");
    scratch.file("weir.toml", format!("{daemon}[disk.near]\nimage = \"near.raw\"\nformat = \"raw\"\n{disks}"))
}

fn unavailable_disk(scratch: &Scratch, more: &str) -> String {
    let image = uri(&scratch.socket("back"), "");
    format!(
        "[group.gold]\n\
         [disk.far]\n\
         image = \"{image}\"\n\
         format = \"raw\"\n\
         group = \"gold\"\n\
         open-timeout = \"1m\"\n\
         {more}\n"
    )
}

fn at(scratch: &Scratch, name: &str) -> String {
    format!("nbd+unix:///{name}?socket={}", text(&scratch.socket("nbd")))
}

#[test]
fn unavailable_disk_opens_later_with_the_current_config() {
    let DaemonWithUnavailableDisk { scratch, silent_listener: silent, weir } =
        DaemonWithUnavailableDisk::new();
    TestClient::new("qemu-io").args(["-f", "raw", "-c", "write -P 1 0 4k", &at(&scratch, "near")]).succeeds();
    let reported = status(&scratch, "0");
    assert!(find(&reported, "unavailable", "far")["age-ns"].as_u64() > Some(7_000_000_000), "{reported:#}");
    assert_contains(&run_ok(&scratch, &["status", "far"]), &["UNAVAILABLE", "far", "no response yet"]);
    assert_contains(
        &weir.wait_for_log("disk_unavailable"),
        &["disk far: ", "does not answer; everything else is served meanwhile"],
    );
    // The name is reserved, and commands for the unavailable disk explain why they fail.
    let late = ["is not available yet", "weir status"];
    assert_contains(&run_failing(&scratch, &["throttle", "far", "--iops-total", "5"]), &late);
    assert_contains(
        &run_failing(&scratch, &["disk", "add", "far", "memory:1M"]),
        &["a disk or a group has this name already"],
    );
    assert_contains(&run_failing(&scratch, &["group", "remove", "gold"]), &["far is a member"]);
    // A reload applies to all other disks, and to the settings that the unavailable disk will have.
    assert_contains(&run_ok(&scratch, &["reload", "--dry-run"]), &["far", "its image is not available yet"]);
    write(
        &scratch,
        &format!("{}[disk.more]\nimage = \"memory:1M\"\n", unavailable_disk(&scratch, "iops-total = 2000")),
    );
    let changes = run_json(&scratch, &["reload", "--json"]);
    let disks = changes.as_array().unwrap().iter().filter(|change| change["kind"] == "disk");
    let disks: Vec<_> = disks.map(|change| (change["name"].clone(), change["change"].clone())).collect();
    assert_eq!(disks, [(json!("more"), json!("added")), (json!("far"), json!("unavailable"))]);
    // The server starts to answer.
    let file = half_filled(&scratch);
    drop(silent);
    let server = BackgroundNbdServer::nbdkit(&scratch, &scratch.socket("back"), &["file", text(&file)]);
    wait_until(&scratch, |reported| reported["unavailable"].is_null());
    wait_until(&scratch, |reported| {
        reported["exports"].as_array().unwrap().iter().any(|export| export["disk"] == "far")
    });
    TestClient::new("qemu-io")
        .args(["-f", "raw", "-c", "write -P 7 0 4k", "-c", "flush", &at(&scratch, "far")])
        .succeeds();
    let reported = status(&scratch, "0");
    let disk = find(&reported, "disks", "far");
    assert_eq!((&disk["limits"]["iops-total"], &disk["group"]), (&json!(2000), &json!("gold")));
    assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    weir.wait_for_log("disk_added");
    weir.stop();
    server.crash();
    assert!(fs::read(&file).unwrap()[..4096].iter().all(|&byte| byte == 7));
}

#[test]
fn unavailable_disk_can_be_removed_or_replaced() {
    let DaemonWithUnavailableDisk { scratch, silent_listener: silent, weir } =
        DaemonWithUnavailableDisk::new();
    run_ok(&scratch, &["disk", "remove", "far"]);
    // The retries end, including the attempt in progress.
    silent.set_nonblocking(true).unwrap();
    for connection in std::iter::from_fn(|| silent.accept().ok()) {
        connection.0.set_nonblocking(false).unwrap();
        std::io::copy(&mut &connection.0, &mut std::io::sink())
            .expect("the daemon has closed the connection");
    }
    assert!(status(&scratch, "0")["unavailable"].is_null());
    assert_contains(&run_failing(&scratch, &["disk", "remove", "far"]), &["no disk has this name"]);
    // The config file may use the name for another disk immediately.
    write(&scratch, "[disk.far]\nimage = \"memory:1M\"\n");
    run_ok(&scratch, &["reload"]);
    TestClient::new("qemu-io").args(["-f", "raw", "-c", "read -P 0 0 4k", &at(&scratch, "far")]).succeeds();
    weir.stop();
    drop(silent);
}

#[test]
fn changed_image_of_an_unavailable_disk_is_opened() {
    let DaemonWithUnavailableDisk { scratch, silent_listener: silent, weir } =
        DaemonWithUnavailableDisk::new();
    let elsewhere = Scratch::new();
    let other = elsewhere.sparse("other.raw", MIB);
    write(
        &scratch,
        &format!(
            "[group.gold]\n\
             [disk.far]\n\
             image = \"memory:1M\"\n\
             [disk.file]\n\
             image = \"{}\"\n\
             format = \"raw\"\n",
            text(&other)
        ),
    );
    // The sandbox permits only directories with images that were known at the start.
    assert_contains(&run_failing(&scratch, &["reload"]), &["other.raw"]);
    // A reload is rejected if the image cannot be opened for a reason that does not pass.
    for (image, why) in [("none.raw", "no such file"), ("near.raw", "near")] {
        write(&scratch, &format!("[group.gold]\n[disk.far]\nimage = \"{image}\"\nformat = \"raw\"\n"));
        for arguments in [&["reload"][..], &["reload", "--dry-run"]] {
            assert_contains(&run_failing(&scratch, arguments), &["disk.far.image", why]);
        }
        assert_eq!(status(&scratch, "0")["unavailable"][0]["name"], "far");
    }
    write(&scratch, "[group.gold]\n[disk.far]\nimage = \"memory:1M\"\n");
    assert_contains(&run_ok(&scratch, &["reload"]), &["far", "its image is not available yet"]);
    wait_until(&scratch, |reported| reported["unavailable"].is_null());
    wait_until(&scratch, |reported| {
        reported["exports"].as_array().unwrap().iter().any(|export| export["disk"] == "far")
    });
    TestClient::new("qemu-io").args(["-f", "raw", "-c", "read -P 0 0 4k", &at(&scratch, "far")]).succeeds();
    assert_eq!(run_ok(&scratch, &["reload"]), "nothing has changed\n");
    weir.stop();
    drop(silent);
}

/// Two disks, the first of which is on a server.
fn boot_first(scratch: &Scratch, exports: &str) -> PathBuf {
    let image = uri(&scratch.socket("back"), "");
    let (qmp, nbd) = (socket(scratch), text(&scratch.socket("nbd")).to_owned());
    scratch.file(
        "weir.toml",
        format!(
            "[daemon]\n\
             qmp = \"{qmp}\"\n\
             nbd = \"unix:{nbd}\"\n\
             [disk.boot]\n\
             image = \"{image}\"\n\
             format = \"raw\"\n\
             {exports}[disk.other]\n\
             image = \"memory:1M\"\n"
        ),
    )
}

#[test]
fn default_export_is_the_first_disk_even_if_unavailable() {
    let scratch = Scratch::new();
    let file = half_filled(&scratch);
    let size = fs::metadata(&file).unwrap().len();
    let config = boot_first(&scratch, "");
    // No listener: reported at once, as a warning and not as an error of the file.
    assert_contains(&weir(&["check-config", text(&config)]).succeeds(), &["1 warning"]);
    let weir = serve(&scratch, &config);
    let size_of = |name: &str| TestClient::new("nbdinfo").args(["--size", &at(&scratch, name)]);
    assert_contains(&run_ok(&scratch, &["status", "boot"]), &["UNAVAILABLE", "No such file or directory"]);
    size_of("").fails();
    assert_eq!(size_of("other").succeeds().trim(), MIB.to_string());
    let server = BackgroundNbdServer::nbdkit(&scratch, &scratch.socket("back"), &["file", text(&file)]);
    wait_until(&scratch, |status| status["unavailable"].is_null());
    wait_until(&scratch, |status| status["exports"].as_array().unwrap().len() == 2);
    assert_eq!(size_of("").succeeds().trim(), size.to_string());
    weir.stop();
    server.crash();
    let weir = serve(&scratch, &config);
    size_of("").fails();
    // Removing the unavailable disk makes the next one the default export.
    run_ok(&scratch, &["disk", "remove", "boot"]);
    assert_eq!(size_of("").succeeds().trim(), MIB.to_string());
    weir.stop();
}

#[test]
fn unavailable_disk_opens_with_all_exports_in_its_position() {
    let scratch = Scratch::new();
    let file = half_filled(&scratch);
    let (nbd, taken) = (scratch.socket("nbd"), scratch.socket("machine"));
    let exports = format!(
        "export = [{{ type = \"nbd\", listen = \"unix:{}\" }}, {{ type = \"vhost-user-blk\", \
         listen = \"unix:{}\" }}]\n",
        text(&nbd),
        text(&taken)
    );
    let config = boot_first(&scratch, &exports);
    let weir = serve(&scratch, &config);
    // Another process listens at the address of one of its exports.
    let other_listener = UnixListener::bind(&taken).unwrap();
    let server = BackgroundNbdServer::nbdkit(&scratch, &scratch.socket("back"), &["file", text(&file)]);
    weir.wait_for_logs("cannot be opened, retrying", 2);
    let size_of = |name: &str| TestClient::new("nbdinfo").args(["--size", &at(&scratch, name)]);
    size_of("boot").fails();
    size_of("").fails();
    size_of("other").succeeds();
    drop(other_listener);
    fs::remove_file(&taken).unwrap();
    wait_until(&scratch, |status| status["exports"].as_array().unwrap().len() == 3);
    assert_eq!(size_of("").succeeds(), size_of("boot").succeeds());
    weir.stop();
    server.crash();
}

#[test]
fn reload_does_not_wait_for_an_unavailable_disk() {
    let scratch = Scratch::new();
    scratch.sparse("near.raw", MIB);
    let silent_listener = UnixListener::bind(scratch.socket("back")).unwrap();
    let file = write(&scratch, "");
    // In the sandbox the daemon may connect only to servers known at the start.
    let at_start = fs::read_to_string(&file).unwrap().replace("sandbox = \"require\"", "sandbox = \"off\"");
    fs::write(&file, &at_start).unwrap();
    let weir = serve(&scratch, &file);
    fs::write(&file, format!("{at_start}{}", unavailable_disk(&scratch, ""))).unwrap();
    assert_contains(&run_ok(&scratch, &["reload", "--dry-run"]), &["far", "its image is not available yet"]);
    assert_contains(&run_ok(&scratch, &["reload"]), &["gold", "far", "its image is not available yet"]);
    weir.wait_for_log("disk_unavailable");
    fs::write(
        &file,
        format!("{at_start}{}[disk.more]\nimage = \"memory:1M\"\n", unavailable_disk(&scratch, "")),
    )
    .unwrap();
    assert_contains(&run_ok(&scratch, &["reload"]), &["more", "added", "its image is not available yet"]);
    fs::write(&file, &at_start).unwrap();
    assert_contains(&run_ok(&scratch, &["reload"]), &["removed"]);
    assert!(status(&scratch, "0")["unavailable"].is_null());
    weir.stop();
    drop(silent_listener);
}

#[test]
fn reservation_of_an_unavailable_disk_blocks_no_other() {
    let scratch = Scratch::new();
    let file = half_filled(&scratch);
    scratch.sparse("near.raw", MIB);
    let config = unavailable_disk(&scratch, "iops-reservation = 250")
        .replace("[group.gold]", "group = \"gold\"\n[group.gold]\niops-total = 1000");
    let weir = serve(&scratch, &write(&scratch, &config));
    run_ok(&scratch, &["throttle", "near", "--iops-reservation", "900"]);
    let server = BackgroundNbdServer::nbdkit(&scratch, &scratch.socket("back"), &["file", text(&file)]);
    weir.wait_for_log("reservation_unmet");
    let unmet = |reported: &serde_json::Value| find(reported, "disks", "far")["unmet-reservation"].clone();
    assert_eq!(unmet(&status(&scratch, "0"))["iops-reservation"], 250);
    // The reservation comes into force as soon as there is room.
    run_ok(&scratch, &["throttle", "near", "--iops-reservation", "100"]);
    weir.wait_for_log("reservation_in_force");
    assert_eq!(find(&status(&scratch, "0"), "disks", "far")["iops-reservation"], 250);
    weir.stop();
    server.crash();
}

#[test]
fn single_disk_is_waited_for_until_a_signal() {
    let scratch = Scratch::new();
    let silent_listener = UnixListener::bind(scratch.socket("back")).unwrap();
    let image = uri(&scratch.socket("back"), "");
    let weir = Serve::new(&scratch).args(["-f", "raw", "--open-timeout", "1m", &image]).spawn_unready();
    weir.wait_for_log("its image is still being opened");
    let (status, log) = weir.wait_signalling(Signal::SIGTERM);
    assert!(status.success(), "{log}");
    assert_contains(&log, &["stopping before all disks are open"]);
    drop(silent_listener);
}

#[test]
fn shutdown_does_not_wait_for_a_disk_being_added() {
    let scratch = Scratch::new();
    let silent_listener = UnixListener::bind(scratch.socket("back")).unwrap();
    let weir = Serve::new(&scratch)
        .args(["memory:1M", "--name", "near", "--sandbox", "off", "--qmp", &socket(&scratch)])
        .start();
    let image = uri(&scratch.socket("back"), "");
    let arguments = ["disk", "add", "far", &image, "-f", "raw", "--open-timeout", "10m", "--qmp"];
    let mut adding =
        Command::new(WEIR).args(arguments).arg(socket(&scratch)).stderr(Stdio::null()).spawn().unwrap();
    let connection = silent_listener.accept().unwrap();
    weir.signal(Signal::SIGTERM);
    let (status, log) = weir.wait();
    assert!(status.success(), "{log}");
    assert_contains(&log, &["ending while commands of clients are still running", "stopped"]);
    assert!(!adding.wait().unwrap().success());
    drop(connection);
}

#[test]
fn upgrade_continues_without_an_unavailable_disk() {
    let DaemonWithUnavailableDisk { scratch, silent_listener: silent, weir } =
        DaemonWithUnavailableDisk::new();
    let file = scratch.path("weir.toml");
    let new = Serve::new(&scratch).at_given_addresses().arg("--takeover").arg("--config").arg(file).start();
    let (status, log) = weir.wait();
    assert!(status.success(), "{log}");
    wait_until(&scratch, |reported| reported["unavailable"][0]["name"] == "far");
    TestClient::new("qemu-io").args(["-f", "raw", "-c", "read -P 0 0 4k", &at(&scratch, "near")]).succeeds();
    let file = half_filled(&scratch);
    drop(silent);
    let server = BackgroundNbdServer::nbdkit(&scratch, &scratch.socket("back"), &["file", text(&file)]);
    wait_until(&scratch, |reported| reported["unavailable"].is_null());
    new.stop();
    server.crash();
}
