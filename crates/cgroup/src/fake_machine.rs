//! A fake machine made of files, for tests: mounts, cgroups, processes and disks.
//!
//! ```text
//!   proc/self/mountinfo    proc/PID/cgroup
//!   sys/fs/cgroup/…        cgroups are directories with the files that a test writes; files of the kernel do not appear
//!   sys/dev/block/8:0 ──►  sys/devices/sda
//! ```
//!
//! Accepts writes that a kernel would refuse; the guest tests cover refusals.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use super::{
    control_group::{ControlGroup, Version},
    hierarchy::{CgroupHierarchy, KernelRoots},
};

#[derive(Debug)]
pub(crate) struct FakeMachine {
    directory: tempfile::TempDir,
    version: Version,
}

impl FakeMachine {
    /// A machine with cgroup v2 only, whose root has these controllers: `cpu io memory`.
    pub(crate) fn v2(controllers: &str) -> Self {
        let machine = Self::empty(Version::V2);
        machine.mount(&machine.root(), "/", "cgroup2 cgroup2 rw,nsdelegate");
        machine.write("/", "cgroup.controllers", &format!("{controllers}\n"));
        machine
    }

    /// A machine with blkio and memory in cgroup v1, and a cgroup v2 without block I/O.
    pub(crate) fn v1() -> Self {
        let machine = Self::empty(Version::V1);
        let place = |name: &str| machine.path("sys/fs/cgroup").join(name);
        machine.mount(&place("unified"), "/", "cgroup2 cgroup2 rw");
        machine.mount(&place("systemd"), "/", "cgroup cgroup rw,xattr,name=systemd");
        machine.mount(&place("memory"), "/", "cgroup cgroup rw,memory");
        machine.mount(&machine.root(), "/", "cgroup cgroup rw,blkio");
        fs::write(place("unified").join("cgroup.controllers"), "hugetlb\n").expect("written");
        machine
    }

    fn empty(version: Version) -> Self {
        let machine = Self { directory: tempfile::tempdir().expect("a directory"), version };
        fs::create_dir_all(machine.path("proc/self")).expect("made");
        fs::create_dir_all(machine.path("sys/dev/block")).expect("made");
        fs::write(machine.path("proc/self/mountinfo"), "").expect("written");
        machine
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    pub(crate) fn roots(&self) -> KernelRoots {
        KernelRoots { proc: self.path("proc"), sys: self.path("sys"), run: self.path("run") }
    }

    pub(crate) fn hierarchy(&self) -> CgroupHierarchy {
        CgroupHierarchy::discover(self.roots()).expect("discovered")
    }

    /// Mount point of the hierarchy that limits block I/O.
    pub(crate) fn root(&self) -> PathBuf {
        self.path(match self.version {
            Version::V1 => "sys/fs/cgroup/blkio",
            Version::V2 => "sys/fs/cgroup",
        })
    }

    /// Adds a mount: directory `root` of a file system given as type, source and options.
    pub(crate) fn mount(&self, point: &Path, root: &str, file_system: &str) {
        fs::create_dir_all(point).expect("made");
        let path = self.path("proc/self/mountinfo");
        let text = fs::read_to_string(&path).expect("there");
        let line = format!("30 25 0:26 {root} {} rw,nosuid shared:9 - {file_system}\n", point.display());
        fs::write(path, text + &line).expect("written");
    }

    pub(crate) fn group(&self, name: &str) -> ControlGroup {
        let directory = self.root().join(name.trim_start_matches('/'));
        fs::create_dir_all(&directory).expect("made");
        ControlGroup { version: self.version, directory, name: name.into() }
    }

    pub(crate) fn write(&self, group: &str, file: &str, text: &str) {
        fs::write(self.root().join(group.trim_start_matches('/')).join(file), text).expect("written");
    }

    /// Adds a process with the content of its /proc/PID/cgroup.
    pub(crate) fn process(&self, pid: i32, memberships: &str) {
        let directory = self.path("proc").join(pid.to_string());
        fs::create_dir_all(&directory).expect("made");
        fs::write(directory.join("cgroup"), memberships).expect("written");
    }

    /// Adds a disk of 1 MiB, or a partition: `vda`, `vda/vda1`; replaces one with the same number.
    pub(crate) fn disk(&self, number: &str, name: &str) {
        let directory = self.path("sys/devices").join(name);
        fs::create_dir_all(&directory).expect("made");
        fs::write(directory.join("dev"), format!("{number}\n")).expect("written");
        fs::write(directory.join("size"), "2048\n").expect("written");
        if name.contains('/') {
            fs::write(directory.join("partition"), "1\n").expect("written");
        }
        let link = self.path("sys/dev/block").join(number);
        let _ = fs::remove_file(&link);
        symlink(&directory, link).expect("linked");
    }
}
