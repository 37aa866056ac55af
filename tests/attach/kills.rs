//! Attachments whose processes are killed: the command, the keeper, the server, the command that
//! detaches. Leftovers are listed, and removed or continued.

use std::{
    fs::{self, File},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{Attachment, attach, command, disk_sequence, is_mounted, mountable, name, wait_until_removed};
use crate::harness::{MIB, Scratch, TestClient, WEIR, assert_contains, children, need_root, text, weir};

#[test]
fn killed_attach_leaves_all_or_nothing() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    need_root("devices of this host");
    let name = name("gone");
    for _ in 0..5 {
        let mut child = Command::new(WEIR)
            .args(["attach", "--fuse", "--alone", "--name", &name, "--format", "raw"])
            .arg(&image)
            .spawn()
            .expect("weir can be run");
        child.kill().expect("it can be killed");
        child.wait().expect("the killed child can be waited for");
        // The keeper may be starting, complete, or rolling back. In the end there must be either no
        // attachment or a complete one, and a new attachment must succeed.
        let attached = Attachment { name: name.clone(), report: Value::Null };
        if let Ok(lock) = File::open(attached.directory().join("lock"))
            && attached.directory().join("attached.json").exists()
        {
            drop(lock);
            attached.detach().run();
        }
        attached.wait_until_gone_or_whole();
    }
    let reattached = Attachment { report: command(&name, &image, &[]).json(), name };
    reattached.detach().succeeds();
    reattached.assert_removed();
}

impl Attachment {
    /// Waits for a keeper whose command was killed.
    fn wait_until_gone_or_whole(&self) {
        while let Ok(lock) = File::open(self.directory().join("lock")) {
            if self.directory().join("attached.json").exists() {
                self.detach().run();
                continue;
            }
            let _kept = Flock::lock(lock, FlockArg::LockShared);
            if self.directory().exists() && !self.directory().join("attached.json").exists() {
                // Killed half-way: the next attachment removes the leftovers.
                return;
            }
        }
    }
}

#[test]
fn killed_server_ends_the_attachment() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let attached = attach("killed", &image, &[]);
    let device = attached.device();
    let sequence = disk_sequence(&device);
    kill(attached.server(), Signal::SIGKILL).expect("the process is running");
    attached.wait_until_gone();
    wait_until_removed(&device, &sequence);
    let reattached = attach("killed", &image, &[]);
    reattached.detach().succeeds();
    reattached.assert_removed();
}

/// Number of mounts at this very directory, including covered ones.
fn mounts_at(directory: &Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("procfs is mounted");
    mounts.lines().filter(|line| line.split(' ').nth(1) == Some(text(directory))).count()
}

/// A mount whose server was killed would accept writes and lose them.
#[test]
fn killed_server_leaves_no_writable_mount() {
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let attached = attach("inside", &image, &["--mount", text(&directory)]);
    let also = scratch.path("also");
    fs::create_dir(&also).expect("the directory can be created");
    TestClient::new("mount").arg(attached.device()).arg(&also).succeeds();
    let inside = File::create(directory.join("open")).expect("the file can be created");
    let inside_also = File::open(also.join("open")).expect("the file exists");
    kill(attached.server(), Signal::SIGKILL).expect("the process is running");
    attached.wait_until_gone();
    assert!(!is_mounted(&directory) && !is_mounted(&also));
    let reattached = attach("inside", &image, &["--mount", text(&directory)]);
    assert_eq!(mounts_at(&directory), 1);
    fs::write(directory.join("new"), "content").expect("it can be written to");
    drop((inside, inside_also));
    reattached.detach().succeeds();
    reattached.assert_removed();
    assert!(!is_mounted(&directory));
    TestClient::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}

#[test]
fn stale_mount_is_not_covered() {
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let options = ["--mount", text(&directory)];
    let attached = attach("over", &image, &options);
    let inside = File::create(directory.join("open")).expect("the file can be created");
    let (keeper, server) =
        (attached.report["keeper"].as_i64().expect("the report has this field"), attached.server());
    for process in [Pid::from_raw(keeper as i32), server] {
        kill(process, Signal::SIGKILL).expect("the process is running");
    }
    let lock = File::open(attached.directory().join("lock")).expect("the killed keeper's lock file remains");
    drop(Flock::lock(lock, FlockArg::LockShared).expect("the lock is free"));
    // With the same options, the attachment is continued.
    let recovered =
        Attachment { name: attached.name.clone(), report: command(&attached.name, &image, &options).json() };
    assert_eq!(mounts_at(&directory), 1);
    fs::write(directory.join("new"), "content").expect("it can be written to");
    drop(inside);
    recovered.detach().succeeds();
    recovered.assert_removed();
    assert!(!is_mounted(&directory));
}

#[test]
fn leftovers_of_a_killed_keeper_are_removed() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let attached = attach("keeper", &image, &[]);
    let keeper = attached.report["keeper"].as_i64().expect("the report has this field");
    kill(Pid::from_raw(keeper as i32), Signal::SIGKILL).expect("the process is running");
    let lock = File::open(attached.directory().join("lock")).expect("the killed keeper's lock file remains");
    drop(Flock::lock(lock, FlockArg::LockShared).expect("the lock is free"));
    // Its server is still running.
    File::open(attached.device()).expect("it can be opened");
    let stderr = command(&attached.name, &image, &["--iops-total", "5"]).fails();
    assert_contains(&stderr, &["its keeper process was killed", "--recover"]);
    attached.detach().succeeds();
    attached.assert_removed();
}

#[test]
fn leftovers_of_killed_keeper_and_server_are_removed() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let attached = attach("both", &image, &[]);
    let (device, server) = (attached.device(), attached.server());
    let sequence = disk_sequence(&device);
    let keeper = attached.report["keeper"].as_i64().expect("the report has this field");
    for process in [Pid::from_raw(keeper as i32), server] {
        kill(process, Signal::SIGKILL).expect("the process is running");
    }
    // Anticipates the watcher, which unmounts a mount without a server: the file below the loop
    // device becomes unreachable.
    TestClient::new("umount").args(["-l", text(&attached.directory().join("disk"))]).run();
    attached.detach().succeeds();
    attached.assert_removed();
    wait_until_removed(&device, &sequence);
}

/// Delays after which a process is killed: from zero to longer than the operation takes.
fn moments(count: u32, last: Duration) -> impl Iterator<Item = Duration> {
    (0..count).map(move |index| last * index / (count - 1))
}

/// Spins until an instant; a sleep would not be exact enough.
fn spin_until(instant: Instant) {
    while Instant::now() < instant {
        std::hint::spin_loop();
    }
}

/// Names of the files in a directory, for assertion messages.
fn remaining_files(place: &Path) -> Vec<std::ffi::OsString> {
    fs::read_dir(place).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect()
}

#[test]
fn keeper_killed_at_any_time_leaves_removable_state() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let name = name("half");
    let attached = Attachment { name: name.clone(), report: Value::Null };
    for after in moments(32, Duration::from_millis(160)) {
        let mut child = Command::new(WEIR)
            .args(["attach", "--fuse", "--alone", "--format", "raw", "--name", &name])
            .args([&image, Path::new("--mount"), &directory])
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("weir can be run");
        let requester = Pid::from_raw(child.id().cast_signed());
        let keeper = loop {
            if let Some(keeper) = children(requester).next() {
                break keeper;
            }
            if child.try_wait().expect("the child can be waited for").is_some() {
                // The command has ended before the test found its keeper: the PID is in the record
                // of the attachment.
                let record = fs::read(attached.directory().join("attached.json"))
                    .expect("a complete attachment has a record");
                let record: Value = serde_json::from_slice(&record).expect("it is JSON");
                break Pid::from_raw(record["keeper"].as_i64().expect("the report has this field") as i32);
            }
            std::hint::spin_loop();
        };
        spin_until(Instant::now() + after);
        // A child is not reaped before its parent ends, so the PID is not reused.
        kill(keeper, Signal::SIGKILL).expect("the process exists");
        child.wait().expect("the child can be waited for");
        if let Ok(lock) = File::open(attached.directory().join("lock")) {
            drop(Flock::lock(lock, FlockArg::LockShared).expect("the lock is free"));
        }
        let exists = attached.directory().exists();
        let is_whole = attached.directory().join("attached.json").exists();
        let listed = weir(&["attach", "--list", "--json"]).json();
        let row = listed.as_array().expect("a list").iter().find(|row| row["name"] == name.as_str());
        assert_eq!(
            row.is_some(),
            exists,
            "{after:?}: {:?}: {listed}",
            remaining_files(&attached.directory())
        );
        if let Some(row) = row {
            assert_eq!(row.get("broken"), (!is_whole).then_some(&json!(true)), "{after:?}: {row}");
            attached.detach().succeeds();
        }
        attached.assert_removed();
        assert!(!is_mounted(&directory), "{after:?}");
        // The image is not locked any more.
        TestClient::new("qemu-io").args(["-f", "raw", "-c", "write 63M 512", text(&image)]).succeeds();
    }
    TestClient::new("e2fsck").args(["-fy", text(&image)]).run();
    let reattached = Attachment { report: command(&name, &image, &[]).json(), name };
    reattached.detach().succeeds();
    reattached.assert_removed();
}

#[test]
fn killed_detach_can_be_repeated() {
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    for (index, after) in moments(24, Duration::from_millis(120)).enumerate() {
        let attached = attach("undone", &image, &["--mount", text(&directory)]);
        let keeper = attached.report["keeper"].as_i64().expect("the report has this field");
        let mut detaching = Command::new(WEIR)
            .args(["detach", &attached.name])
            .stderr(Stdio::null())
            .spawn()
            .expect("weir can be run");
        spin_until(Instant::now() + after);
        // Kill the keeper, or the detaching command, or both.
        if index % 3 != 0 {
            // Already ended.
            let _ = kill(Pid::from_raw(keeper as i32), Signal::SIGKILL);
        }
        if index % 3 != 1 {
            detaching.kill().expect("the child can be killed");
        }
        detaching.wait().expect("the child can be waited for");
        while attached.directory().exists() {
            attached.detach().run();
            if let Ok(lock) = File::open(attached.directory().join("lock"))
                && !attached.directory().join("attached.json").exists()
            {
                drop(Flock::lock(lock, FlockArg::LockShared));
            }
        }
        attached.assert_removed();
        assert!(!is_mounted(&directory), "{after:?}");
    }
    TestClient::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}
