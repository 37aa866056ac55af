//! Attachments with obstacles: a stopped keeper or daemon, a full file system, no descriptors. No
//! command waits forever, messages name the obstacle, and nothing is left half-done.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, net::UnixListener},
    path::{Path, PathBuf},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{Attachment, attach, attachment_directory, command, name};
use crate::harness::{
    MIB, Scratch, TestClient, WEIR, assert_contains, need_root, script_without_foreign_mounts, text, weir,
};

#[test]
fn stopped_keeper_is_named_and_killed_by_force() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let attached = attach("still", &image, &[]);
    let keeper = Pid::from_raw(attached.report["keeper"].as_i64().expect("the report has this field") as i32);
    kill(keeper, Signal::SIGSTOP).expect("the process is running");
    let diagnosis = format!("{}: its keeper, process {keeper} (weir), is stopped", attached.name);
    let remedies = [format!("kill -CONT {keeper}"), format!("weir detach --force {}", attached.name)];
    let [continue_remedy, force_remedy] = remedies.each_ref();
    assert_contains(&attached.detach().fails(), &[&diagnosis, continue_remedy, force_remedy]);
    assert_contains(
        &command(&attached.name, &image, &[]).fails(),
        &[&diagnosis, continue_remedy, force_remedy],
    );
    fs::File::open(attached.device()).expect("nothing is undone");
    weir(&["detach", "--force", &attached.name]).succeeds();
    attached.assert_removed();
}

/// A search path with a losetup(8) that stops its parent once, while a marker file exists.
fn losetup_that_stops_its_parent(scratch: &Scratch) -> (String, PathBuf) {
    let directory = scratch.path("stopping");
    fs::create_dir(&directory).expect("the directory can be created");
    let script = "#!/bin/sh\nrm \"${0%/*}/once\" 2>/dev/null && kill -STOP $PPID\n\
                  PATH=${PATH#*:} exec losetup \"$@\"\n";
    let program = directory.join("losetup");
    fs::write(&program, script).expect("it can be written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("it can be set");
    let path = std::env::var("PATH").expect("PATH is set");
    (format!("{}:{path}", directory.display()), directory.join("once"))
}

#[test]
fn keeper_stopped_during_attach_leaves_nothing() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let (path, once) = losetup_that_stops_its_parent(&scratch);
    let attached = Attachment { name: name("begun"), report: Value::Null };
    for is_forced in [false, true] {
        fs::write(&once, "").expect("it can be written");
        let refused = command(&attached.name, &image, &[]).env("PATH", &path).fails();
        assert_contains(&refused, &[&attached.name, "its keeper, process ", "is stopped", "kill -CONT"]);
        let named = attached.detach().fails();
        let stopped = "(weir), is stopped";
        assert_contains(&named, &[&attached.name, stopped, "--force"]);
        let stderr = command(&attached.name, &image, &[]).fails();
        assert_contains(&stderr, &[&attached.name, stopped, "--force"]);
        if is_forced {
            weir(&["detach", "--force", &attached.name]).succeeds();
            attached.assert_removed();
        } else {
            let keeper = named.split_once("kill -CONT ").and_then(|(_, rest)| rest.split_once('`'));
            let keeper = keeper.and_then(|(keeper, _)| keeper.parse().ok()).expect("it is named");
            kill(Pid::from_raw(keeper), Signal::SIGCONT).expect("the process exists");
            attached.wait_until_gone();
        }
    }
}

#[test]
fn unresponsive_daemon_is_named_and_skipped() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    // As with a stopped daemon: the kernel accepts the connection.
    let socket = scratch.socket("qmp");
    let _listens = UnixListener::bind(&socket).expect("it can listen");
    let address = format!("unix:{}", text(&socket));
    let name = name("silent-daemon");
    let attach = ["attach", "--fuse", "--json", "--group", "gold", "--format", "raw", "--name", &name];
    let done = weir(&attach).arg(&image).env("WEIR_QMP", &address).run();
    let does_not = format!("the daemon at {address} does not respond");
    assert_contains(
        &done.stderr(),
        &[&does_not, "by a private process", "the group gold consists of this disk only"],
    );
    let said = serde_json::from_str(&done.succeeded()).expect("it is JSON");
    let attached = Attachment { report: said, name };
    assert_eq!(attached.report["daemon"], json!(false));
    attached.detach().succeeds();
    attached.assert_removed();
}

/// Limits the inodes and then the pages of the file system, so that each step of an attachment in
/// turn is the first to run out of space.
#[test]
fn full_file_system_is_named_and_no_files_remain() {
    need_root("a mount namespace of its own");
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let script = r#"
        # True if the attachment succeeds, as it does once there is space.
        is_done() {
            if stderr=$("$1" attach --fuse --alone --name full -f raw "$2" 2>&1); then
                "$1" detach full
                return
            fi
            case $stderr in
                *"No space left on device ("*|*"the file system is full"*) ;;
                *) echo "$stderr"; exit 1 ;;
            esac
            find /run/weir/attached -mindepth 1
            false
        }
        for inodes in $(seq 3 40); do
            mount -t tmpfs -o nr_inodes=$inodes none /run
            is_done "$@" && break
            umount -l /run
        done
        umount -l /run
        page=$(getconf PAGESIZE)
        mount -t tmpfs -o size=$((16 * page)) none /run
        for pages in $(seq 16 -1 0); do
            rm -f /run/fill
            head -c $((pages * page)) /dev/zero >/run/fill
            is_done "$@" && exit
        done
        echo "an attachment needs more space"
    "#;
    let script = script_without_foreign_mounts(script);
    let arguments = ["--mount", "sh", "-c", &script, "sh", WEIR, text(&image)];
    assert_eq!(TestClient::new("unshare").args(arguments).succeeds(), "");
}

#[test]
fn too_low_descriptor_limit_is_reported_with_a_remedy() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let name = name("few");
    for max_files in ["5", "9", "10", "12", "24"] {
        let script = r#"ulimit -n "$1"; exec "$2" attach --fuse --alone --name "$3" -f raw "$4""#;
        let attach = ["-c", script, "sh", max_files, WEIR, &name, text(&image)];
        let refused = TestClient::new("sh").args(attach).fails();
        assert_contains(&refused, &["Too many open files", "`ulimit -n`", "LimitNOFILE="]);
        assert!(!Path::exists(&attachment_directory(&name)), "{max_files}: something is left");
    }
}
