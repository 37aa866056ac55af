//! What is shipped beside the program: units of systemd, and the lines of fstab that the documents
//! have, as systemd itself reads them.

use std::{fs, os::unix::fs::symlink, path::Path, process};

use crate::harness::{Client, MIB, Scratch, WEIR, assert_says, need, need_root, text, weir};

/// Where Debian has it.
const FSTAB_GENERATOR: &str = "/usr/lib/systemd/system-generators/systemd-fstab-generator";

/// As in docs/containers.md.
const FSTAB: &str = "\
/dev/ublkb7            /srv/db   ext4  x-systemd.requires=weir-attach@db.service    0 2
/srv/images/vm1.qcow2  /mnt/vm1  weir  iops-total=2000,noatime           0 0
/srv/images/vm2.qcow2  /mnt/vm2  weir  noauto,x-systemd.automount                   0 0
/mnt/nfs/vm3.qcow2     /mnt/vm3  weir  _netdev,nofail                               0 0
";

/// The units as they would be installed, but for the program's place, and mounts made of `FSTAB`.
fn installed() -> Scratch {
    let scratch = Scratch::new();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    for entry in fs::read_dir(shipped).expect("units are shipped") {
        let path = entry.expect("it can be read").path();
        let unit = fs::read_to_string(&path).expect("a unit is a text").replace("/usr/bin/weir", WEIR);
        scratch.file(text(Path::new(path.file_name().expect("it is a file"))), unit);
    }
    let (fstab, units) = (scratch.file("fstab", FSTAB), text(&scratch.path("")).to_owned());
    let variable = format!("SYSTEMD_FSTAB={}", text(&fstab));
    Client::new("env").args([&variable, FSTAB_GENERATOR, &units, &units, &units]).succeeds();
    scratch
}

/// What systemd complains of in a unit and in all that it brings along.
fn complaints(scratch: &Scratch, unit: &str) -> String {
    // The colon at the end: beside systemd's own.
    let variable = format!("SYSTEMD_UNIT_PATH={}:", text(&scratch.path("")));
    let said = Client::new("env")
        .args([&variable, "systemd-analyze", "verify", "--man=no", "--recursive-errors=yes", unit])
        .run()
        .said();
    // Of this machine's own units it may say what it likes.
    let ours = ["weir", "srv-db", "mnt-vm"];
    said.lines().filter(|line| ours.iter().any(|name| line.contains(name))).collect::<Vec<_>>().join("\n")
}

#[test]
fn systemd_takes_the_units() {
    need("systemd-analyze");
    let scratch = installed();
    for unit in ["weir-attach@db.service", "weir-docker-plugin.service", "weir-docker-plugin.socket"] {
        assert_eq!(complaints(&scratch, unit), "", "{unit}");
    }
    let unit = fs::read_to_string(scratch.path("weir-docker-plugin.service")).unwrap();
    scratch.file("weir-docker-plugin.service", unit.replace("KillMode=process", "KillMode=nobody"));
    assert_ne!(complaints(&scratch, "weir-docker-plugin.service"), "", "it would say so");
}

#[test]
fn a_device_is_there_before_the_mounts_that_need_it() {
    need("systemd-analyze");
    let scratch = installed();
    let mount = fs::read_to_string(scratch.path("srv-db.mount")).unwrap();
    assert!(mount.contains("After=weir-attach@db.service"), "{mount}");
    // `basic.target` comes after all mounts, and most services after that.
    assert_eq!(complaints(&scratch, "basic.target"), "");
    let unit = fs::read_to_string(scratch.path("weir-attach@.service")).unwrap();
    scratch.file("weir-attach@.service", unit.replace("DefaultDependencies=no\n", ""));
    let cycle = complaints(&scratch, "basic.target");
    assert!(cycle.contains("weir-attach@db.service"), "it would wait for what waits for it: {cycle}");
}

#[test]
fn the_lines_of_fstab_are_the_documents() {
    let document = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/containers.md");
    let document = fs::read_to_string(document).expect("it is a text");
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let written: Vec<_> = document.lines().map(words).collect();
    for line in FSTAB.lines().map(words) {
        assert!(written.contains(&line), "{line}");
    }
}

#[test]
fn the_mount_helper_mounts_an_image() {
    need_root("mounts");
    let scratch = Scratch::new();
    let (helper, directory) = (scratch.path("mount.weir"), scratch.path("directory"));
    symlink(WEIR, &helper).unwrap();
    fs::create_dir(&directory).unwrap();
    let image = scratch.sparse("disk.raw", 16 * MIB);
    Client::new("mkfs.ext4").args(["-q", "-F", text(&image)]).succeeds();
    // As mount(8) calls it, and by what every machine has.
    let options = format!("rw,noatime,fuse,alone,format=raw,iops-total=100000,name=helper-{}", process::id());
    let mount = |flags: &str| {
        let words = [text(&helper), text(&image), text(&directory), flags, "-o", &options];
        let outcome = Client::new("env").arg("PATH=/usr/bin:/bin").args(words).run();
        let said = outcome.said();
        outcome.succeeded() + &said
    };
    mount("-f");
    assert!(options_of(&directory).is_none(), "it was to do nothing");
    assert_eq!(mount("-n"), "", "mount(8) says nothing where all is well");
    assert_eq!(mount("-n"), "", "it is mounted there already");
    let mounted = options_of(&directory).expect("it is mounted");
    assert!(mounted.split(',').any(|option| option == "noatime"), "{mounted}");
    fs::write(directory.join("file"), "kept").unwrap();
    weir(&["detach", text(&directory)]).succeeds();
    assert!(options_of(&directory).is_none());
    assert_says(&mount("-v"), &["by FUSE", "/dev/loop"]);
    weir(&["detach", text(&directory)]).succeeds();
    let found = Client::new("debugfs").args(["-R", "cat /file", text(&image)]).succeeds();
    assert_eq!(found, "kept");
}

/// Of what is mounted there.
fn options_of(directory: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("procfs is mounted");
    let mut lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    lines.find(|fields| fields[1] == text(directory)).map(|fields| fields[3].to_owned())
}
