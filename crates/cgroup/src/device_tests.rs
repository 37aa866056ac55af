//! Texts of users, and the disks that they resolve to.

use super::{super::fake_machine::FakeMachine, *};

fn machine() -> FakeMachine {
    let machine = FakeMachine::v2("io");
    machine.disk("254:0", "vda");
    machine.disk("254:1", "vda/vda1");
    machine.disk("254:16", "vdb");
    machine
}

/// Mounts a different file system, given as type, source and options, on `/proc`.
fn mounted(file_system: &str) -> FakeMachine {
    let machine = machine();
    fs::write(machine.roots().mountinfo(), format!("30 25 0:999999 / /proc rw - {file_system}\n"))
        .expect("written");
    machine
}

#[track_caller]
fn check(machine: &FakeMachine, text: &str, disk: &str, notices: &[&str]) {
    let target = resolve(&machine.roots(), text).unwrap_or_else(|error| panic!("{text}: {error:#}"));
    assert_eq!(target.identity.node(), disk);
    assert_eq!(target.notices, notices);
}

#[track_caller]
fn refused(machine: &FakeMachine, text: &str, expect: &str) {
    let error = format!("{:#}", resolve(&machine.roots(), text).expect_err(text));
    assert!(error.starts_with(&format!("device {text:?}: ")) && error.contains(expect), "{error}");
}

#[test]
fn partition_number_resolves_to_its_disk() {
    let machine = machine();
    check(&machine, "254:16", "/dev/vdb", &[]);
    check(
        &machine,
        "254:1",
        "/dev/vda",
        &["/dev/vda1 is a partition; limits are for the whole disk /dev/vda"],
    );
    refused(&machine, "8:0", "no disk with number 8:0 here: No such file or directory");
    refused(&machine, "0:7", "no disk with number 0:7 here: the file system is not on a local disk");
}

#[test]
fn non_disk_is_rejected() {
    let machine = machine();
    refused(
        &machine,
        "/dev/null",
        "/dev/null is a character device, not a block device (`lsblk` lists disks)",
    );
    refused(&machine, "/no/such/path", "No such file or directory");
    refused(&machine, "", "No such file or directory");
    refused(&machine, "8:", "No such file or directory");
    refused(&machine, "/proc/self", "its file system is unknown");
}

#[test]
fn path_without_a_local_disk_is_rejected_with_a_remedy() {
    for (file_system, expect) in [
        (
            "nfs4 server:/home rw",
            "/proc is on another machine (nfs4, server:/home), not on a disk of this one",
        ),
        ("virtiofs share rw", "/proc is on another machine (virtiofs, share)"),
        (
            "fuse.sshfs host:/ rw",
            "/proc is on FUSE (fuse.sshfs, host:/): its daemon does the I/O (limit the daemon's",
        ),
        ("fuse /dev/fuse rw", "/proc is on FUSE (fuse, /dev/fuse)"),
        ("tmpfs tmpfs rw,size=4k", "/proc is in memory (tmpfs), on no disk"),
        ("zfs tank/data rw", "/proc is on ZFS, whose kernel threads do the I/O"),
        ("proc proc rw", "/proc is on no disk, its file system is proc (give a disk"),
        ("overlay overlay rw,lowerdir=/a:/b", "give the disk of its lower directories"),
        (
            "overlay overlay rw,lowerdir=/a,upperdir=/no/such/diff",
            "whose upper directory /no/such/diff is not visible here",
        ),
        ("overlay overlay rw,lowerdir=/a,upperdir=/proc/self", "too many stacked overlays"),
        ("btrfs /dev/no-such-disk rw", "/dev/no-such-disk: No such file or directory"),
        ("btrfs /dev/null rw", "/dev/null is a character device"),
    ] {
        refused(&mounted(file_system), "/proc/self/stat", expect);
    }
}

#[test]
fn path_resolves_to_its_disk_even_below_an_overlay() {
    let upper = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
    let number = DeviceNumber::unpack(fs::metadata(upper.path()).expect("there").dev());
    // File systems such as overlay have no device number that a fake machine could have.
    if number.major == 0 {
        return;
    }
    let path = upper.path().to_str().expect("UTF-8");
    let machine = mounted(&format!("overlay overlay rw,lowerdir=/a,upperdir={path},workdir=/w"));
    machine.disk(&number.to_string(), "sdz");
    check(&machine, path, "/dev/sdz", &[]);
    let link = upper.path().join("link");
    std::os::unix::fs::symlink("/proc/self/stat", &link).expect("linked");
    for text in ["/proc/self/stat", link.to_str().expect("UTF-8")] {
        let notice =
            format!("{text} is on an overlay; limits are for the disk of its upper directory {path}");
        check(&machine, text, "/dev/sdz", &[&notice]);
    }
}

#[test]
fn mount_is_found_by_device_number_before_path() {
    let text =
        "1 0 0:5 / /a rw - tmpfs one rw\n2 1 0:6 / /a/b rw - nfs two rw\n3 1 0:7 / /a rw - btrfs three rw\n";
    let mounts = mountinfo::parse(text).expect("known");
    let source = |minor| {
        let mount =
            mount_of(&mounts, DeviceNumber { major: 0, minor }, Path::new("/a/b/c")).expect("mounted");
        mount.source.as_str()
    };
    assert_eq!((source(5), source(6), source(7)), ("one", "two", "three"));
    assert_eq!(source(99), "two", "a subvolume's own number is in no mount");
}

#[test]
fn multi_device_btrfs_is_limited_on_one_device_with_a_warning() {
    let machine = machine();
    let notice = |minor| btrfs_devices_notice(&machine.roots(), "/srv", DeviceNumber { major: 254, minor });
    assert_eq!(notice(0), None, "no Btrfs is known");
    for device in ["vda1", "vdb"] {
        fs::create_dir_all(machine.path("sys/fs/btrfs/4a-uuid/devices").join(device)).expect("made");
    }
    fs::create_dir_all(machine.path("sys/fs/btrfs/features")).expect("made");
    assert_eq!(notice(0), None, "this one lies on others");
    let expect = "/srv is on a Btrfs of several devices; limits are for /dev/vda1 only, not for /dev/vdb";
    assert_eq!(notice(1).as_deref(), Some(expect));
    fs::remove_dir(machine.path("sys/fs/btrfs/4a-uuid/devices/vdb")).expect("removed");
    assert_eq!(notice(1), None);
}

#[test]
fn disk_of_the_test_directory_resolves_or_explains() {
    match resolve(&KernelRoots::default(), env!("CARGO_MANIFEST_DIR")) {
        Ok(target) => assert!(target.identity.directory().join("stat").exists(), "{target:?}"),
        Err(error) => assert!(error.to_string().starts_with("device \""), "{error:#}"),
    }
}
