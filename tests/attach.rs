//! `weir attach` and `weir detach` over FUSE and a loop device: the devices and mounts they make,
//! their removal, and that nothing is left behind.
//!
//! ublk and the kernel's NBD client are tested in `tests/guest/block-devices`.

mod kills;
mod obstacles;
mod server_end;

use std::{
    fs::{self, File},
    os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::{
        signal::{Signal, kill},
        stat::{Mode, SFlag, mknod},
    },
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, TestClient, WEIR, assert_contains, children, need_root, poll_until,
    script_without_foreign_mounts, text, wait_for_programs, weir,
};

/// A disk attached by root; dropping it detaches the disk.
struct Attachment {
    name: String,
    report: Value,
}

impl Attachment {
    fn device(&self) -> PathBuf {
        self.report["device"].as_str().expect("the report has this field").into()
    }

    fn directory(&self) -> PathBuf {
        attachment_directory(&self.name)
    }

    /// Waits until the keeper process has ended.
    #[track_caller]
    fn wait_until_gone(&self) {
        if let Ok(lock) = File::open(self.directory().join("lock")) {
            let _kept = Flock::lock(lock, FlockArg::LockShared).expect("it can be locked");
        }
        self.assert_removed();
    }

    #[track_caller]
    fn assert_removed(&self) {
        assert!(!self.directory().exists(), "{} is left", self.directory().display());
        let mounts = fs::read_to_string("/proc/self/mounts").expect("procfs is mounted");
        assert!(!mounts.contains(text(&self.directory())), "{mounts}");
        let backing_files =
            TestClient::new("losetup").args(["--list", "--noheadings", "--output=BACK-FILE"]).succeeds();
        assert!(!backing_files.contains(text(&self.directory())), "{backing_files}");
    }

    fn detach(&self) -> TestClient {
        detach(&self.name)
    }

    /// PID of the process that serves the disk: the child of the keeper.
    fn server(&self) -> Pid {
        let keeper = self.report["keeper"].as_u64().expect("the report has this field");
        let keeper = Pid::from_raw(keeper.try_into().expect("it is a PID"));
        children(keeper).next().expect("the keeper has a server")
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if self.directory().exists() {
            let _ = Command::new(WEIR).args(["detach", "--force", &self.name]).output();
        }
    }
}

fn attachment_directory(name: &str) -> PathBuf {
    Path::new("/run/weir/attached").join(name)
}

/// A name that is unique to one test and run.
fn name(label: &str) -> String {
    format!("t{}-{label}", std::process::id())
}

fn command(name: &str, image: &Path, options: &[&str]) -> TestClient {
    need_root("devices of this host");
    weir(&["attach", "--fuse", "--alone", "--json", "--name", name, "--format", "raw", text(image)])
        .args(options)
}

#[track_caller]
fn attach(label: &str, image: &Path, options: &[&str]) -> Attachment {
    let name = name(label);
    let report = command(&name, image, options).json();
    Attachment { name, report }
}

#[track_caller]
fn make_file_system(device: &Path) {
    TestClient::new("mkfs.ext4").args(["-q", "-F", text(device)]).succeeds();
}

fn is_mounted(directory: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("procfs is mounted");
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(text(directory)))
}

#[track_caller]
/// Detaches after the files closed by this process are closed in the kernel as well.
fn detach(target: &str) -> TestClient {
    wait_for_programs();
    weir(&["detach", target])
}

fn unmount(directory: &Path) {
    wait_for_programs();
    TestClient::new("umount").arg(directory).succeeds();
}

#[test]
fn writes_to_the_device_are_in_the_image() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 64 * MIB);
    let attached = attach("device", &image, &["--iops-total", "100000"]);
    assert!(attached.device().starts_with("/dev"), "{}", attached.report);
    make_file_system(&attached.device());
    let scanned =
        Path::new("/sys/block").join(attached.device().file_name().expect("the path has a file name"));
    let scanned = fs::read_to_string(scanned.join("loop/partscan")).expect("it is a loop device");
    assert_eq!(scanned.trim(), "1", "the kernel looks for partitions");
    let listed = weir(&["attach", "--list", "--json"]).json();
    let row = listed.as_array().expect("a list").iter().find(|row| row["name"] == attached.name.as_str());
    let row = row.expect("it is listed");
    assert_eq!((&row["size"], &row["alive"]), (&json!(64 * MIB), &json!(true)));
    assert_contains(&weir(&["attach", "--list"]).succeeds(), &[&attached.name, "fuse", text(&image)]);
    attached.detach().succeeds();
    attached.assert_removed();
    TestClient::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}

#[test]
fn attachment_ends_with_the_unmount() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 64 * MIB);
    make_file_system(&image);
    let directory = scratch.path("mnt");
    fs::create_dir(&directory).expect("the directory can be created");
    let attached = attach("mount", &image, &["--mount", text(&directory), "--mount-options", "noatime"]);
    assert!(is_mounted(&directory));
    fs::write(directory.join("file"), "content").expect("it can be written to");
    unmount(&directory);
    // Immediately, while the first attachment is still being removed.
    let reattached = attach("mount", &image, &["--mount", text(&directory)]);
    unmount(&directory);
    reattached.wait_until_gone();
    drop(attached);

    let reattached = attach("mount", &image, &["--mount", text(&directory), "--read-only"]);
    assert_eq!(fs::read_to_string(directory.join("file")).expect("the file exists"), "content");
    assert!(fs::write(directory.join("other"), "").is_err());
    let inside = File::open(directory.join("file")).expect("it can be opened");
    let in_use = format!("in use: open in {} ({})", comm(), std::process::id());
    assert_contains(&detach(text(&directory)).fails(), &[&in_use, "--force"]);
    drop(inside);
    // Detaching by the mount directory unmounts it.
    detach(text(&directory)).succeeds();
    reattached.assert_removed();
    assert!(!is_mounted(&directory));
}

#[test]
fn device_in_use_is_kept_and_its_openers_named() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 64 * MIB);
    let attached = attach("used", &image, &[]);
    let open = File::open(attached.device()).expect("it can be opened");
    let open_here = format!("open in {} ({})", comm(), std::process::id());
    assert_contains(&attached.detach().fails(), &[&attached.name, "in use", &open_here, "--force"]);
    drop(open);
    make_file_system(&attached.device());
    let directory = scratch.path("mnt");
    fs::create_dir(&directory).expect("the directory can be created");
    TestClient::new("mount").arg(attached.device()).arg(&directory).succeeds();
    let mounted = format!("mounted at {}", directory.display());
    assert_contains(&attached.detach().fails(), &["in use", &mounted]);
    assert!(is_mounted(&directory) && attached.directory().exists());
    // `weir detach DIRECTORY` unmounts it before it detaches the disk.
    detach(text(&directory)).succeeds();
    assert!(!is_mounted(&directory));
    attached.assert_removed();
}

#[test]
fn mount_directory_may_be_named_by_a_symlink() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 64 * MIB);
    make_file_system(&image);
    let (directory, link) = (scratch.path("mnt"), scratch.path("link"));
    fs::create_dir(&directory).expect("the directory can be created");
    std::os::unix::fs::symlink(&directory, &link).expect("the link can be created");
    let attached = attach("link", &image, &["--mount", text(&link)]);
    assert!(is_mounted(&directory));
    unmount(&link);
    attached.wait_until_gone();
    let reattached = attach("link", &image, &["--mount", text(&link)]);
    detach(text(&link)).succeeds();
    reattached.assert_removed();
}

fn comm() -> String {
    fs::read_to_string("/proc/self/comm").expect("procfs is mounted").trim_end().to_owned()
}

#[test]
fn openers_through_another_node_or_loop_device_are_found() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let attached = attach("beneath", &image, &[]);
    // A second device node, as in a container, which has nodes of its own. Not in the scratch
    // directory, whose file system may be mounted `nodev`.
    let node = ExtraDeviceNode::of(&attached.device(), &format!("/dev/{}", name("node")));
    let open = File::open(&node.0).expect("it can be opened");
    let open_here = format!("open in {} ({})", comm(), std::process::id());
    assert_contains(&attached.detach().fails(), &["in use", &open_here]);
    drop((open, node));
    let over = TestClient::new("losetup").args(["--find", "--show"]).arg(attached.device()).succeeds();
    let over = over.trim_end();
    let holder = format!("held by {}", over.trim_start_matches("/dev/"));
    let refused = attached.detach().fails();
    let backing = format!("/sys/block/{}/loop/backing_file", over.trim_start_matches("/dev/"));
    let backing_file = fs::read_to_string(&backing).expect("it is attached");
    TestClient::new("losetup").args(["--detach", over]).succeeds();
    // The kernel detaches it at its last close; a `losetup` of another test may have it open.
    poll_until(|| (fs::read_to_string(&backing).ok().as_ref() != Some(&backing_file)).then_some(()));
    assert_contains(&refused, &["in use", &holder]);
    attached.detach().succeeds();
    attached.assert_removed();
}

/// A second node of a device, removed on drop.
struct ExtraDeviceNode(PathBuf);

impl ExtraDeviceNode {
    fn of(device: &Path, path: &str) -> Self {
        let number = fs::metadata(device).expect("the file exists").rdev();
        mknod(path, SFlag::S_IFBLK, Mode::S_IRUSR, number).expect("the file can be created");
        Self(path.into())
    }
}

impl Drop for ExtraDeviceNode {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn partitions_are_devices() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 64 * MIB);
    let mut table = [0; 512];
    // One Linux partition: start 1 MiB, length 32 MiB, in sectors of 512 bytes.
    table[446 + 4] = 0x83;
    table[446 + 8..446 + 12].copy_from_slice(&2048_u32.to_le_bytes());
    table[446 + 12..446 + 16].copy_from_slice(&65536_u32.to_le_bytes());
    table[510..].copy_from_slice(&[0x55, 0xaa]);
    File::options()
        .write(true)
        .open(&image)
        .expect("the file exists")
        .write_all_at(&table, 0)
        .expect("there is room");
    let attached = attach("parts", &image, &[]);
    let device = attached.device();
    let name = device.file_name().expect("it has a name").display();
    let scanned = fs::read_to_string(format!("/sys/block/{name}/loop/partscan")).expect("a loop device");
    assert_eq!(scanned.trim_end(), "1");
    // Not every kernel scans partition tables on its own.
    TestClient::new("partx").arg("--update").arg(&device).succeeds();
    let first = PathBuf::from(format!("{}p1", device.display()));
    make_file_system(&first);
    let directory = scratch.path("mnt");
    fs::create_dir(&directory).expect("the directory can be created");
    TestClient::new("mount").args([&first, &directory]).succeeds();
    assert_contains(&attached.detach().fails(), &["in use", text(&directory)]);
    unmount(&directory);
    attached.detach().succeeds();
    attached.assert_removed();
    assert!(!first.exists(), "{} is left", first.display());
}

#[test]
fn partial_last_sector_is_reported() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB + 65);
    let name = name("odd");
    let done = command(&name, &image, &[]).run();
    detach(&name).succeeds();
    assert_contains(&done.stderr(), &[&name, "lacks the last 65 bytes"]);
}

#[test]
fn second_attachment_is_rejected() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let first = attach("first", &image, &[]);
    assert_contains(&command(&first.name, &image, &[]).fails(), &[&first.name, "is attached already"]);
    let second = name("second");
    assert_contains(&command(&second, &image, &[]).fails(), &[text(&image), "lock"]);
    assert!(!attachment_directory(&second).exists(), "the second attachment has left files");
    // The first attachment is not affected.
    File::open(first.device()).expect("it can be opened");
    first.detach().succeeds();
}

#[test]
fn failed_attach_leaves_nothing() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let directory = scratch.path("mnt");
    fs::create_dir(&directory).expect("the directory can be created");
    let (mnt, file) = (text(&directory), scratch.file("file", ""));
    for (step, image, options, expect) in [
        ("image", Path::new("/none.raw"), &[][..], "none.raw"),
        ("no-fs", &image, &["--mount", mnt], "no known file system"),
        ("fstype", &image, &["--mount", mnt, "--fstype", "ext4"], "mnt"),
        ("no-dir", &image, &["--mount", text(&file)], "is not a directory"),
        ("option", &image, &["--l2-cache-size", "1M"], "qcow2"),
    ] {
        let name = name(step);
        assert_contains(&command(&name, image, options).fails(), &[expect]);
        assert!(!attachment_directory(&name).exists(), "{step}: something is left");
        assert!(!is_mounted(&directory));
    }
    let full = File::options().write(true).open("/dev/full").expect("every Linux has it");
    let unreported = name("unheard");
    let mut command_line = Command::new(WEIR);
    command_line.args(["attach", "--fuse", "--alone", "--name", &unreported, "--format", "raw"]).arg(&image);
    let status = command_line.stdout(full).status().expect("weir can be run");
    assert_eq!(status.code(), Some(1));
    assert!(!attachment_directory(&unreported).exists(), "an attachment whose name was not reported remains");
    for bad in ["../x", "a b", ""] {
        let refused = command(bad, &image, &[]).run();
        assert_eq!(refused.code(), 2, "{bad:?}");
    }
}

/// Waits until the device with this sequence number is gone. A process that enumerates all devices
/// of the host, such as a parallel test, delays the removal, and the kernel sends no notification.
fn wait_until_removed(device: &Path, sequence: &str) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while disk_sequence(device) == sequence {
        assert!(Instant::now() < deadline, "{} is left", device.display());
        thread::sleep(Duration::from_millis(10));
    }
}

/// The kernel's `diskseq`: unique to one instance of a loop device.
fn disk_sequence(device: &Path) -> String {
    let name = device.file_name().expect("the path has a file name");
    let file = Path::new("/sys/block").join(name).join("diskseq");
    fs::read_to_string(file).expect("the kernel numbers disks")
}

/// An image with a file system, and a directory to mount it at.
fn mountable(scratch: &Scratch) -> (PathBuf, PathBuf) {
    let (image, directory) = (scratch.sparse("disk.raw", 64 * MIB), scratch.path("mnt"));
    make_file_system(&image);
    fs::create_dir(&directory).expect("the directory can be created");
    (image, directory)
}

#[test]
fn forced_detach_unmounts() {
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let attached = attach("force", &image, &["--mount", text(&directory)]);
    let inside = File::create(directory.join("open")).expect("the file can be created");
    weir(&["detach", "--force", &attached.name]).succeeds();
    attached.assert_removed();
    assert!(!is_mounted(&directory));
    drop(inside);
}

#[test]
fn openers_of_a_lazily_unmounted_file_system_are_named() {
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let options = ["--mount", text(&directory)];
    let in_use = format!("in use: open in {} ({})", comm(), std::process::id());
    let attached = attach("lazy", &image, &options);
    let inside = File::create(directory.join("open")).expect("the file can be created");
    TestClient::new("umount").arg("-l").arg(&directory).succeeds();
    assert_contains(&attached.detach().fails(), &[&attached.name, &in_use, "--force"]);
    let stderr = command(&attached.name, &image, &options).fails();
    assert_contains(&stderr, &[&attached.name, "was unmounted", &in_use, "--force"]);
    let listed = weir(&["attach", "--list"]).succeeds();
    let row = listed.lines().find(|line| line.starts_with(&attached.name)).expect("it is listed");
    assert!(row.contains(&format!("{} ({})", comm(), std::process::id())), "{listed}");
    // The attachment ends with its last opener, as a lazily unmounted file system does.
    drop(inside);
    attached.wait_until_gone();
    let reattached = attach("lazy", &image, &options);
    let inside = File::create(directory.join("open")).expect("the file can be created");
    TestClient::new("umount").arg("-l").arg(&directory).succeeds();
    weir(&["detach", "--force", &reattached.name]).succeeds();
    reattached.assert_removed();
    drop(inside);
}

#[test]
fn keeper_closes_inherited_descriptors() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    need_root("devices of this host");
    let (lock, name) = (scratch.file("lock", ""), name("inherited"));
    let script = r#"exec 9>"$1" 8<>"$4"; flock -n 9; exec "$2" attach --fuse --alone --json --name "$3" -f raw /dev/fd/8"#;
    let client = TestClient::new("sh").args(["-ec", script, "sh", text(&lock), WEIR, &name, text(&image)]);
    let attached = Attachment { report: client.json(), name };
    let lock = File::open(&lock).expect("the file exists");
    Flock::lock(lock, FlockArg::LockExclusiveNonblock).expect("the lock is free");
    // The keeper has closed the inherited lock file; descriptor 8, its image, is still open.
    make_file_system(&attached.device());
    attached.detach().succeeds();
    attached.assert_removed();
    TestClient::new("e2fsck").args(["-fn", text(&image)]).succeeds();
}

#[test]
fn unresponsive_server_is_named_and_killed_by_force() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let attached = attach("silent", &image, &[]);
    let server = attached.server();
    kill(server, Signal::SIGSTOP).expect("the process is running");
    let stderr = attached.detach().fails();
    assert_contains(&stderr, &[&format!("its server, process {server}, does not respond"), "--force"]);
    assert!(attached.directory().exists(), "the attachment must not be rolled back");
    weir(&["detach", "--force", &attached.name]).succeeds();
    attached.assert_removed();
}

#[test]
fn attachment_ends_with_its_daemon() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let (base, image) = (scratch.sparse("base.raw", MIB), scratch.sparse("disk.raw", 8 * MIB));
    let qmp = scratch.socket("qmp");
    let address = format!("unix:{}", text(&qmp));
    // In the sandbox the daemon creates only devices that it was started with.
    let daemon = Serve::new(&scratch).arg(&base).args(["--qmp", &address, "--sandbox", "off"]).start();
    let name = name("ended");
    let options = ["attach", "--fuse", "--json", "--format", "raw", "--name", &name];
    // A path relative to the caller's directory; the keeper works in a different one.
    let from = qmp.parent().expect("the path has a parent");
    let said = weir(&options).args(["--qmp", "unix:qmp"]).arg(&image).inside(from).json();
    let attached = Attachment { report: said, name };
    assert_eq!(attached.report["qmp"], address.as_str());
    let device = attached.device();
    let sequence = disk_sequence(&device);
    daemon.stop();
    attached.wait_until_gone();
    wait_until_removed(&device, &sequence);
}

#[test]
fn daemon_serves_attachments_in_its_groups() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let (base, image) = (scratch.sparse("base.raw", MIB), scratch.sparse("disk.raw", 8 * MIB));
    let qmp = scratch.socket("qmp");
    let address = format!("unix:{}", text(&qmp));
    let daemon = Serve::new(&scratch)
        .arg(&base)
        .args(["--group", "gold", "--iops-total", "5000", "--qmp", &address, "--sandbox", "off"])
        .start();
    let name = name("daemon");
    let attach = |group: &str| {
        let options = ["attach", "--fuse", "--json", "--format", "raw", "--weight", "300"];
        weir(&options).args(["--qmp", &address, "--name", &name, "--group", group]).arg(&image)
    };
    assert_contains(&attach("silver").fails(), &["there is no group \"silver\""]);
    assert!(!attachment_directory(&name).exists());
    let attached = Attachment { report: attach("gold").json(), name: name.clone() };
    let status = weir(&["status", "--qmp", &address, "--json", "--interval", "0"]).json();
    let disk = status["disks"].as_array().expect("a list").iter().find(|disk| disk["name"] == name.as_str());
    let disk = disk.expect("the daemon has the disk");
    assert_eq!((&disk["group"], &disk["weight"]), (&json!("gold"), &json!(300)));
    let loops = attached.device();
    let loop_name = loops.file_name().expect("it has a name").to_string_lossy().into_owned();
    let table = weir(&["status", "--all", "--qmp", &address, "--interval", "0"]).succeeds();
    assert_contains(&table, &["HOST DEVICE", &loop_name]);
    let mut control = Qmp::negotiated(&qmp);
    let (_, refused) = control.command_error("block-export-del", json!({ "id": name }));
    assert_contains(&refused, &["still in use", &loop_name]);
    attached.detach().succeeds();
    attached.assert_removed();
    let disks = weir(&["status", "--qmp", &address, "--json", "--interval", "0"]).json();
    assert_eq!(disks["disks"].as_array().expect("a list").len(), 1);
    drop(control);
    daemon.stop();
}

/// The daemon runs in its default sandbox, in which it creates no devices.
#[test]
fn daemon_without_device_rights_is_not_used() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let (image, directory) = mountable(&scratch);
    let address = format!("unix:{}", text(&scratch.socket("qmp")));
    let daemon = Serve::new(&scratch)
        .arg(scratch.sparse("base.raw", MIB))
        .args(["--group", "gold", "--iops-total", "5000", "--qmp", &address])
        .start();
    let name = name("unasked");
    let attach = |options: &[&str]| {
        let attach = ["attach", "--fuse", "--json", "--format", "raw", "--name", &name, text(&image)];
        weir(&attach).args(options).env("WEIR_QMP", &address)
    };
    let makes_none = format!("the daemon at {address} makes no devices");
    let done = attach(&[]).run();
    assert_contains(&done.stderr(), &[&name, "by a private process", &makes_none]);
    let said = serde_json::from_str(&done.succeeded()).expect("it is JSON");
    let attached = Attachment { report: said, name: name.clone() };
    assert_eq!(
        (&attached.report["daemon"], attached.report["qmp"] == address.as_str()),
        (&json!(false), false)
    );
    attached.detach().succeeds();
    attached.assert_removed();

    let done = attach(&["--group", "silver"]).run();
    assert_contains(&done.stderr(), &["has no such group", "the group silver consists of this disk only"]);
    done.succeeded();
    attached.detach().succeeds();

    // Options that only the daemon can fulfil fail without it; the error explains how to permit
    // devices.
    for (options, why) in [(["--group", "gold"], "group gold exists only there"), (["--qmp", &address], "")] {
        let refused = attach(&options).fails();
        assert_contains(&refused, &[&makes_none, why, "--sandbox off", "weir.service", "--alone"]);
        assert!(!attachment_directory(&name).exists());
    }
    let attached = Attachment { report: attach(&["--group", "gold", "--alone"]).json(), name: name.clone() };
    attached.detach().succeeds();

    // mount(8) calls the helper like this for a line of fstab.
    let helper = scratch.path("mount.weir");
    std::os::unix::fs::symlink(WEIR, &helper).expect("the link can be created");
    let options = format!("rw,fuse,format=raw,name={name}");
    let mount = TestClient::new(text(&helper)).args([text(&image), text(&directory), "-o", &options]);
    assert_eq!(mount.env("WEIR_QMP", &address).run().stderr(), "");
    assert!(is_mounted(&directory));
    unmount(&directory);
    attached.wait_until_gone();
    daemon.stop();
}

#[test]
fn name_of_a_daemons_disk_cannot_be_attached() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let name = name("own");
    let (own_image, image) = (scratch.sparse("own.raw", MIB), scratch.sparse("disk.raw", 8 * MIB));
    let address = format!("unix:{}", text(&scratch.socket("qmp")));
    let daemon = Serve::new(&scratch)
        .args([text(&own_image), "--name", &name, "--qmp", &address, "--sandbox", "off"])
        .start();
    let mut control = Qmp::negotiated(&scratch.socket("qmp"));
    // No client uses the disk, and it has no export that would prevent its removal.
    control.command("block-export-del", json!({ "id": name, "mode": "hard" }));
    control.event("BLOCK_EXPORT_DELETED");
    let attach = ["attach", "--fuse", "--qmp", &address, "--format", "raw", "--name", &name, text(&image)];
    assert_contains(&weir(&attach).fails(), &[&name, "has a disk or an export of this name", "--name"]);
    assert!(!attachment_directory(&name).exists());
    let status = control.command("x-weir-query-status", json!({}));
    let disks = status["disks"].as_array().expect("a list");
    assert_eq!((disks.len(), &disks[0]["image"]), (1, &json!(text(&own_image))), "{status}");
    drop(control);
    daemon.stop();
}

/// Also in a sandbox, because the daemon was started with a device.
#[test]
fn daemon_started_with_a_device_creates_more() {
    need_root("devices of this host");
    let scratch = Scratch::new();
    let (base, image) = (scratch.sparse("base.raw", MIB), scratch.sparse("disk.raw", 8 * MIB));
    let address = format!("unix:{}", text(&scratch.socket("qmp")));
    let daemon = Serve::new(&scratch)
        .args([text(&base), "--fuse", text(&base), "--group", "gold", "--qmp", &address])
        .start();
    let name = name("beside");
    let attach = ["attach", "--fuse", "--json", "--format", "raw", "--group", "gold", "--name", &name];
    let said = weir(&attach).arg(&image).env("WEIR_QMP", &address).json();
    let attached = Attachment { report: said, name };
    assert_eq!((&attached.report["daemon"], &attached.report["qmp"]), (&json!(true), &json!(address)));
    attached.detach().succeeds();
    attached.assert_removed();
    daemon.stop();
}

#[test]
fn users_other_than_root_get_a_file() {
    need_root("another user");
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let directory = scratch.path("run");
    fs::create_dir(&directory).expect("the directory can be created");
    let parent = fs::metadata(&directory).expect("the file exists").mode();
    let world_writable = fs::Permissions::from_mode(parent | 0o777);
    for path in [&directory, &image, &directory.parent().expect("the path has a parent").to_owned()] {
        fs::set_permissions(path, world_writable.clone()).expect("it can be set");
    }
    // As udev sets it up: every user may open /dev/fuse.
    let script = r#"
        mknod "$2/fuse" c 10 229 && chmod 666 "$2/fuse" && mount --bind "$2/fuse" /dev/fuse
        exec setpriv --reuid=65534 --regid=65534 --clear-groups sh -ec '
            export XDG_RUNTIME_DIR=$2
            "$1" attach --alone --fuse --name n -f raw "$3"
            ls -l "$2/weir/attached/n/disk"
            ! "$1" attach --alone --fuse --name m -f raw "$3"
            "$1" detach n
            ! "$1" attach --alone --fuse --name n -f raw "$3" --mount "$2"
            ls "$2/weir/attached"
        ' sh "$@"
    "#;
    let script = script_without_foreign_mounts(script);
    let arguments = ["--mount", "sh", "-ec", &script, "sh", WEIR, text(&directory), text(&image)];
    let outcome = TestClient::new("unshare").args(arguments).run();
    let stderr = outcome.stderr();
    let file = format!("{}/weir/attached/n/disk", text(&directory));
    assert_contains(&outcome.succeeded(), &[&file, &format!(" {} ", 8 * MIB)]);
    assert_contains(&stderr, &["lock", "root"]);
    assert_eq!(fs::read_dir(directory.join("weir/attached")).expect("the directory exists").count(), 0);
}

#[test]
fn missing_host_support_is_reported() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", 8 * MIB);
    let exists = |path: &str| Path::new(path).exists();
    for (export_option, module, is_available) in [
        ("--ublk", "ublk_drv", exists("/dev/ublk-control")),
        ("--nbd-device", "nbd", exists("/sys/module/nbd")),
    ] {
        let refused = weir(&["attach", export_option, "--alone", "-f", "raw", text(&image)]);
        let loadable = Command::new("modprobe").args(["-n", "-q", module]).status();
        if !is_available && !loadable.is_ok_and(|status| status.success()) {
            assert_contains(&refused.fails(), &[&format!("modprobe {module}"), "CONFIG_BLK_DEV_"]);
        }
    }
    for (command, option) in [
        (["--list", "--iops-total", "5"], "--iops-total"),
        (["--list", "--name", "a"], "--name"),
        (["--recover", "--qmp", "unix:/x"], "--qmp"),
    ] {
        let refused = weir(&["attach"]).args(command).run();
        assert_eq!(refused.code(), 2);
        assert_contains(&refused.stderr(), &[option, command[0], "cannot be used with"]);
    }
    let unknown = weir(&["detach", "/dev/nothing"]).fails();
    assert_contains(&unknown, &["/dev/nothing: not attached"]);
}
