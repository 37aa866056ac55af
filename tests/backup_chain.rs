//! Incremental backups with `weir backup --bitmap`: chains that QEMU restores and compares.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::harness::{
    self, MIB, Qmp, Scratch, Serve, Weir, assert_contains,
    operator::{run_failing, run_json, run_misused, run_ok, serve as serve_config, socket},
    poll_until, qemu_img, text,
};

const SIZE: u64 = 32 * MIB;

fn image(scratch: &Scratch) -> PathBuf {
    let (content, path) = (scratch.filled("content.raw", SIZE), scratch.path("a.qcow2"));
    qemu_img(["convert", "-O", "qcow2", text(&content), text(&path)]).succeeds();
    path
}

fn serve(scratch: &Scratch, image: &Path, more: &[&str]) -> Weir {
    let root = scratch.path("");
    let arguments = ["--name", "vm1", "--qmp", &socket(scratch)];
    Serve::new(scratch).arg(image).args(arguments).args(["--image-root", text(&root)]).args(more).start()
}

/// The disk as it is now.
fn content(scratch: &Scratch, weir: &Weir, name: &str) -> PathBuf {
    let path = scratch.path(name);
    qemu_img(["convert", "-f", "raw", "-O", "raw", &weir.uri("vm1"), text(&path)]).succeeds();
    path
}

fn write(weir: &Weir, commands: &[&str]) {
    harness::qemu_io(["-f", "raw", "-d", "unmap"], commands, weir.uri("vm1"));
}

fn compare(backup: &Path, expected: &Path) {
    qemu_img(["compare", "-q", "-f", "qcow2", "-F", "raw", text(backup), text(expected)]).succeeds();
}

fn count(scratch: &Scratch) -> u64 {
    let list = run_json(scratch, &["bitmap", "vm1", "list", "--json"]);
    list[0]["count"].as_u64().unwrap_or_else(|| panic!("{list}"))
}

#[test]
fn chain_of_backups_restores_each_instant() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    let [full, second, third] = ["full.qcow2", "second.qcow2", "third.qcow2"].map(|name| scratch.path(name));
    let full_instant = content(&scratch, &weir, "full.raw");
    run_ok(&scratch, &["backup", "vm1", "--to", text(&full), "--bitmap", "daily"]);
    assert_eq!(count(&scratch), 0, "it begins with the backup");

    write(&weir, &["write -P 7 3M 1000k", "write -z 8M 1M", "discard 12M 1M", "write -P 8 31M 1M"]);
    let changed = count(&scratch);
    let second_instant = content(&scratch, &weir, "second.raw");
    let command = ["backup", "vm1", "--to", text(&second), "--bitmap", "daily", "--incremental", "--json"];
    let job = run_json(&scratch, &[&command[..], &["--backing", text(&full)]].concat());
    assert_eq!(job["total-bytes"], changed);
    assert!(job["copied-bytes"].as_u64() <= Some(changed), "{job}");
    assert_eq!(count(&scratch), 0);
    let allocated = fs::metadata(&second).expect("it is complete").blocks() * 512;
    assert!(allocated < 6 * MIB, "{allocated} bytes are allocated");

    write(&weir, &["write -P 9 8M 64k", "write -z 3M 128k", "write -P 9 20M 64k"]);
    let third_instant = content(&scratch, &weir, "third.raw");
    let command = ["backup", "vm1", "--to", text(&third), "--bitmap", "daily", "--incremental"];
    run_ok(&scratch, &[&command[..], &["--backing", text(&second)]].concat());

    write(&weir, &["write -P 1 0 32M"]);
    weir.stop();
    for (backup, instant) in [(&full, &full_instant), (&second, &second_instant), (&third, &third_instant)] {
        qemu_img(["check", "-q", text(backup)]).succeeds();
        compare(backup, instant);
    }
    // Names in the chain are relative, so the backups can be moved together.
    let moved = scratch.path("moved");
    fs::create_dir(&moved).expect("it is new");
    for backup in [&full, &second, &third] {
        fs::rename(backup, moved.join(backup.file_name().expect("a file"))).expect("it exists");
    }
    compare(&moved.join("third.qcow2"), &third_instant);
}

#[test]
fn failed_backup_loses_no_mark() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    let [full, second] = ["full.qcow2", "second.qcow2"].map(|name| scratch.path(name));
    run_ok(&scratch, &["backup", "vm1", "--to", text(&full), "--bitmap", "daily"]);
    write(&weir, &["write -P 7 3M 2M"]);
    let target = ["--bitmap", "daily", "--incremental", "--backing", text(&full)];
    let slow = ["backup", "vm1", "--to", text(&second), "--bps-total", "64K", "--detach"];
    run_ok(&scratch, &[&slow[..], &target].concat());
    for action in ["remove", "clear"] {
        let refused = run_failing(&scratch, &["bitmap", "vm1", action, "daily"]);
        assert_contains(&refused, &["the bitmap \"daily\" is in use by a backup"]);
    }
    write(&weir, &["write -P 8 10M 64k"]);
    run_ok(&scratch, &["job", "cancel", "backup-vm1"]);
    poll_until(|| (run_json(&scratch, &["jobs", "--json"])[0]["state"] == "concluded").then_some(()));
    run_ok(&scratch, &["job", "dismiss", "backup-vm1"]);
    assert_eq!(count(&scratch), 2 * MIB + 65536);
    fs::remove_file(&second).expect("it is incomplete");

    // A crash during a backup: the bitmap is inconsistent, or has all marks.
    run_ok(&scratch, &[&slow[..], &target].concat());
    write(&weir, &["write -P 9 11M 64k"]);
    weir.crash();
    let weir = serve(&scratch, &path, &[]);
    fs::remove_file(&second).expect("it is incomplete");
    let refused = run_failing(&scratch, &[&["backup", "vm1", "--to", text(&second)], &target[..]].concat());
    assert_contains(&refused, &["the bitmap \"daily\" is inconsistent", "weir bitmap vm1 remove daily"]);
    assert!(!second.exists(), "a backup that was refused leaves no file");
    run_ok(&scratch, &["bitmap", "vm1", "remove", "daily"]);
    fs::remove_file(&full).expect("it is replaced");
    let instant = content(&scratch, &weir, "instant.raw");
    run_ok(&scratch, &["backup", "vm1", "--to", text(&full), "--bitmap", "daily"]);
    weir.stop();
    compare(&full, &instant);
}

#[test]
fn bitmap_of_a_failed_full_backup_is_removed() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &["--sandbox", "off"]);
    let other = Scratch::new();
    let bad = ["null:32M", "--name", "bad", "--fault", "kind=write,error=ENOSPC"];
    let server = Serve::new(&other).args(bad).start();
    let command = ["backup", "vm1", "--to", &server.uri("bad"), "--bitmap", "daily"];
    assert_contains(&run_failing(&scratch, &command), &["the target cannot be written"]);
    assert_eq!(run_ok(&scratch, &["bitmap", "vm1", "list"]), "vm1: no bitmaps\n");
    server.stop();
    weir.stop();
}

#[test]
fn bitmap_of_an_incomplete_full_backup_marks_everything() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    let [full, next] = ["full.qcow2", "next.qcow2"].map(|name| scratch.path(name));
    let slow = ["backup", "vm1", "--to", text(&full), "--bitmap", "daily", "--bps-total", "64K", "--detach"];
    run_ok(&scratch, &slow);
    assert_eq!(count(&scratch), SIZE, "the backup has no data yet");
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let export =
        json!({ "type": "nbd", "id": "e", "node-name": "vm1", "name": "again", "bitmaps": ["daily"] });
    let (_, refused) = qmp.command_error("block-export-add", export);
    assert_contains(&refused, &["bitmap \"daily\" is in use by a backup"]);
    weir.crash();
    fs::remove_file(&full).expect("it is incomplete");
    // A consistent bitmap, because the disk has not changed.
    let weir = serve(&scratch, &path, &[]);
    assert_eq!(count(&scratch), SIZE);
    qemu_img(["create", "-q", "-f", "qcow2", text(&full), &SIZE.to_string()]).succeeds();
    let instant = content(&scratch, &weir, "instant.raw");
    let command = ["backup", "vm1", "--to", text(&next), "--bitmap", "daily", "--incremental"];
    run_ok(&scratch, &[&command[..], &["--backing", text(&full)]].concat());
    assert_eq!(count(&scratch), 0);
    weir.stop();
    compare(&next, &instant);
}

#[test]
fn bitmap_below_a_snapshot_needs_a_full_backup() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &[]);
    let [full, next] = ["full.qcow2", "next.qcow2"].map(|name| scratch.path(name));
    let backup = ["backup", "vm1", "--bitmap", "daily", "--to"];
    run_ok(&scratch, &[&backup[..], &[text(&full)]].concat());
    run_ok(&scratch, &["snapshot", "vm1"]);
    let incremental = [text(&next), "--incremental", "--backing", text(&full)];
    let refused = run_failing(&scratch, &[&backup[..], &incremental].concat());
    assert_contains(
        &refused,
        &["the bitmap \"daily\" is in ", "a file below the image", "make a full backup"],
    );
    run_ok(&scratch, &[&backup[..], &[text(&next)]].concat());
    weir.stop();
}

#[test]
fn incremental_backup_updates_an_image_in_place() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let other = Scratch::new();
    let copy = other.sparse("copy.raw", SIZE);
    let server = Serve::new(&other).arg(&copy).args(["--name", "copy", "--format", "raw"]).start();
    let target = server.uri("copy");
    let weir = serve(&scratch, &path, &["--sandbox", "off"]);
    run_ok(&scratch, &["backup", "vm1", "--to", &target, "--bitmap", "b"]);
    write(&weir, &["write -P 7 3M 1M", "write -z 8M 1M"]);
    let job =
        run_json(&scratch, &["backup", "vm1", "--to", &target, "--bitmap", "b", "--incremental", "--json"]);
    assert_eq!(job["total-bytes"], 2 * MIB);
    let instant = content(&scratch, &weir, "instant.raw");
    weir.stop();
    server.stop();
    qemu_img(["compare", "-q", "-f", "raw", "-F", "raw", text(&copy), text(&instant)]).succeeds();
}

#[test]
fn wrong_requests_for_an_incremental_backup_change_nothing() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let weir = serve(&scratch, &path, &["memory:1M", "--name", "raw", "--sandbox", "off"]);
    let [full, new, raw] = ["full.qcow2", "new.qcow2", "new.raw"].map(|name| scratch.path(name));
    run_ok(&scratch, &["backup", "vm1", "--to", text(&full), "--bitmap", "daily"]);
    run_ok(&scratch, &["bitmap", "vm1", "add", "off", "--disabled"]);
    let no_image = scratch.file("no-image.qcow2", "text");
    let directory = scratch.path("");
    let other = Scratch::new();
    let server = Serve::new(&other).args(["memory:32M", "--name", "t"]).start();
    let remote = server.uri("t");
    let incremental = |to, backing| {
        vec!["backup", "vm1", "--to", to, "--bitmap", "daily", "--incremental", "--backing", backing]
    };
    let mut cases = vec![
        (vec!["backup", "raw", "--to", text(&raw), "--bitmap", "b"], "raw, which has no bitmaps"),
        (
            vec!["backup", "vm1", "--to", text(&new), "--bitmap", "daily", "--incremental"],
            "needs the last backup",
        ),
        (incremental(text(&raw), text(&full)), "is qcow2 (name it *.qcow2"),
        (incremental(text(&new), "none.qcow2"), "none.qcow2: cannot be the backing file"),
        (incremental(text(&new), text(&directory)), "it is no file"),
        (incremental(text(&new), text(&no_image)), "the signature of qcow2 is missing"),
        (incremental(text(&new), text(&path)), "is the image of the disk itself"),
        (incremental(text(&full), text(&full)), "exists already"),
        (incremental(&remote, text(&full)), "leave out --backing"),
    ];
    for (bitmap, expected) in [("none", "there is no bitmap \"none\""), ("off", "does not record writes")] {
        let mut command = incremental(text(&new), text(&full));
        command[5] = bitmap;
        cases.push((command, expected));
    }
    for (command, expected) in cases {
        assert_contains(&run_failing(&scratch, &command), &[expected]);
        assert!(!new.exists() && !raw.exists(), "weir {command:?} leaves a file");
    }
    for command in [
        &["backup", "vm1", "--to", text(&new), "--incremental"][..],
        &["backup", "vm1", "--to", text(&new), "--bitmap", "daily", "--backing", text(&full)],
    ] {
        run_misused(&scratch, command);
    }
    assert_eq!(count(&scratch), 0);
    server.stop();
    weir.stop();
}

#[test]
fn blockdev_backup_copies_to_a_node() {
    let scratch = Scratch::new();
    let path = image(&scratch);
    let copy = scratch.sparse("copy.raw", SIZE);
    let weir = serve(&scratch, &path, &[]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let file = json!({ "driver": "file", "filename": text(&copy) });
    qmp.command("blockdev-add", json!({ "driver": "raw", "node-name": "t", "file": file }));
    let bitmap = json!({ "node": "vm1", "name": "b", "persistent": true, "granularity": 65536 });
    qmp.command("block-dirty-bitmap-add", bitmap);
    let backup = |sync: &str, mode: &str, more: Value| {
        let mut arguments = json!({
            "job-id": "j", "device": "vm1", "target": "t", "sync": sync, "bitmap": "b", "bitmap-mode": mode,
        });
        arguments.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
        arguments
    };
    qmp.command("blockdev-backup", backup("full", "on-success", json!({ "speed": 65536 })));
    let uri = json!({ "type": "nbd", "id": "e", "node-name": "t" });
    let (_, refused) = qmp.command_error("block-export-add", uri.clone());
    assert_contains(&refused, &["the job j uses it"]);
    let (_, refused) = qmp.command_error("blockdev-del", json!({ "node-name": "t" }));
    assert_contains(&refused, &["the job j uses it"]);
    qmp.command("block-job-set-speed", json!({ "device": "j", "speed": 0 }));
    assert_eq!(qmp.event("BLOCK_JOB_COMPLETED")["device"], "j");
    assert_eq!(qmp.command("query-jobs", json!({})), json!([]), "it is dismissed");
    write(&weir, &["write -P 7 3M 64k"]);
    qmp.command("blockdev-backup", backup("bitmap", "never", json!({})));
    assert_eq!(qmp.event("BLOCK_JOB_COMPLETED")["len"], 65536);
    assert_eq!(count(&scratch), 65536);
    write(&weir, &["write -P 8 5M 64k"]);
    qmp.command("blockdev-backup", backup("incremental", "on-success", json!({ "auto-dismiss": false })));
    assert_eq!(qmp.event("BLOCK_JOB_COMPLETED")["len"], 131_072);
    assert_eq!(count(&scratch), 0);
    qmp.command("job-dismiss", json!({ "id": "j" }));
    for (arguments, expected) in [
        (backup("top", "never", json!({})), "Parameter 'sync' does not accept value 'top'"),
        (backup("incremental", "never", json!({})), "Parameter 'bitmap-mode' is 'on-success'"),
        (backup("full", "on-success", json!({ "target": "none" })), "Cannot find device='none' nor"),
        (backup("full", "on-success", json!({ "target": "vm1" })), "it is the disk itself"),
        (backup("full", "on-success", json!({ "compress": true })), "Parameter 'compress' is always false"),
        (
            json!({ "job-id": "j", "device": "vm1", "target": "t", "sync": "incremental" }),
            "Parameter 'bitmap' is missing",
        ),
        (backup("full", "on-success", json!({ "bitmap": "new" })), "there is no bitmap \"new\""),
    ] {
        let (class, why) = qmp.command_error("blockdev-backup", arguments);
        assert_eq!(class, "GenericError");
        assert_contains(&why, &[expected]);
    }
    qmp.command("blockdev-backup", json!({ "device": "vm1", "target": "t", "sync": "full" }));
    assert_eq!(qmp.event("BLOCK_JOB_COMPLETED")["device"], "vm1", "the name of the device");
    qmp.command("blockdev-del", json!({ "node-name": "t" }));
    let instant = content(&scratch, &weir, "instant.raw");
    weir.stop();
    qemu_img(["compare", "-q", "-f", "raw", "-F", "raw", text(&copy), text(&instant)]).succeeds();
}

#[test]
fn disk_that_may_pass_to_another_process_is_no_target() {
    let scratch = Scratch::new();
    for name in ["a.raw", "passing.raw"] {
        scratch.sparse(name, MIB);
    }
    let config = format!(
        "[daemon]\nqmp = \"{}\"\n\n[disk.vm1]\nimage = \"a.raw\"\nformat = \"raw\"\n\n[disk.passing]\nimage \
         = \"passing.raw\"\nformat = \"raw\"\nhandover = true\nexport = [{{ type = \"vhost-user-blk\", listen = \
         \"unix:{}\" }}]\n",
        socket(&scratch),
        text(&scratch.socket("front-end")),
    );
    let daemon = serve_config(&scratch, &scratch.file("weir.toml", config));
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let backup = json!({ "device": "vm1", "target": "passing", "sync": "full" });
    let (_, refused) = qmp.command_error("blockdev-backup", backup);
    assert_contains(&refused, &["disk passing: handover: its image may pass to another process"]);
    daemon.stop();
}
