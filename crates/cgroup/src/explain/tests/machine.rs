//! A fake machine in a temporary directory: cgroups, processes, mounts and disks.
//!
//! Initially healthy: cgroup v2 with io and memory at every level, `/app` limited on `/dev/vda` to
//! 4 MB/s of writes and reads, ext4 on `/data`.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use super::super::{
    facts::{self, CgroupFacts, ExplainSubject},
    findings::{self, Cause, Coverage, CoverageFinding},
};
use crate::{limit::locks::WatchLock, target};

pub(super) const LIMITS: &str = "run/weir/cgroups.json";
/// Mount id of /data.
pub(super) const DATA: u32 = 40;

pub(super) struct ExplainMachine {
    base: crate::fake_machine::FakeMachine,
    mounts: Vec<String>,
    watched: Option<WatchLock>,
}

impl ExplainMachine {
    pub(super) fn new() -> Self {
        let mut machine =
            Self::on(crate::fake_machine::FakeMachine::v2("cpu io memory"), "6.12.117+deb12-amd64");
        machine.group("/", "cpu io memory", "cpu io memory").group("/app", "io memory", "");
        machine.write("cgroup/app/io.max", "254:0 rbps=4000000 wbps=4000000 riops=max wiops=max\n");
        machine
    }

    pub(super) fn version_one() -> Self {
        let mut machine = Self::on(crate::fake_machine::FakeMachine::v1(), "5.10.0");
        machine.group_one("/", "").group_one("/app", "254:0 20971520\n");
        machine
    }

    fn on(base: crate::fake_machine::FakeMachine, release: &str) -> Self {
        let mounts = fs::read_to_string(base.roots().mountinfo()).unwrap();
        let mut machine = Self { base, mounts: mounts.lines().map(str::to_owned).collect(), watched: None };
        machine.disk("254:0", "vda").release(release);
        machine.mount(DATA, "254:0", "/data", "ext4", "/dev/vda", "rw");
        machine
    }

    /// Path of a file; a path that begins with `cgroup/` is below the cgroup mount.
    pub(super) fn path(&self, path: &str) -> PathBuf {
        // The mount point of cgroup v2 on real machines.
        let below = if path.starts_with("cgroup/") { "sys/fs" } else { "" };
        self.base.path(below).join(path.trim_start_matches('/'))
    }

    pub(super) fn write(&mut self, path: &str, text: &str) -> &mut Self {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub(super) fn remove(&mut self, path: &str) -> &mut Self {
        fs::remove_file(self.path(path)).unwrap();
        self
    }

    pub(super) fn release(&mut self, release: &str) -> &mut Self {
        self.write("proc/sys/kernel/osrelease", &format!("{release}\n"))
    }

    pub(super) fn watched(&mut self) -> &mut Self {
        self.watched = WatchLock::take(&self.path(LIMITS)).unwrap();
        self
    }

    /// Adds a mount, or replaces the one with this id.
    pub(super) fn mount(
        &mut self,
        id: u32,
        number: &str,
        point: &str,
        kind: &str,
        source: &str,
        options: &str,
    ) -> &mut Self {
        let place = format!(" / {point} ");
        // By mount point, because each point has one mount here.
        self.mounts.retain(|mount| !mount.contains(&place));
        self.mounts
            .push(format!("{id} 20 {number} / {point} rw,relatime shared:1 - {kind} {source} {options}"));
        self
    }

    /// Adds a disk, or with a slash in its name a partition: `vda`, `vda/vda1`.
    pub(super) fn disk(&mut self, number: &str, name: &str) -> &mut Self {
        self.base.disk(number, name);
        let link = self.path("sys/class/block").join(Path::new(name).file_name().unwrap());
        fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(self.path("sys/devices").join(name), link).unwrap();
        self.write(&format!("sys/devices/{name}/queue/scheduler"), "[none] mq-deadline\n")
    }

    pub(super) fn made_of(&mut self, disk: &str, part: &str) -> &mut Self {
        let slaves = self.path(&format!("sys/devices/{disk}/slaves"));
        fs::create_dir_all(&slaves).unwrap();
        symlink(self.path(&format!("sys/class/block/{part}")), slaves.join(part)).unwrap();
        self
    }

    pub(super) fn group(&mut self, name: &str, controllers: &str, subtree: &str) -> &mut Self {
        let at = format!("cgroup{}", name.trim_end_matches('/'));
        self.write(&format!("{at}/cgroup.controllers"), &format!("{controllers}\n"));
        self.write(&format!("{at}/cgroup.subtree_control"), &format!("{subtree}\n"));
        self.write(&format!("{at}/cgroup.procs"), "");
        if name != "/" {
            self.write(&format!("{at}/cgroup.type"), "domain\n");
            if controllers.contains("io") {
                self.write(&format!("{at}/io.max"), "");
            }
        }
        self
    }

    /// Adds a cgroup of version 1 with a limit on bytes written.
    pub(super) fn group_one(&mut self, name: &str, write_bps: &str) -> &mut Self {
        let at = format!("cgroup/blkio{}", name.trim_end_matches('/'));
        for file in crate::kernel::blkio::LIMITS {
            self.write(
                &format!("{at}/{file}"),
                if file.ends_with("write_bps_device") { write_bps } else { "" },
            );
        }
        self.write(&format!("{at}/cgroup.procs"), "")
    }

    pub(super) fn process(&mut self, pid: i32, name: &str, group: &str) -> &mut Self {
        let zeros = "0 ".repeat(60);
        self.write(&format!("proc/{pid}/stat"), &format!("{pid} ({name}) S 1 {zeros}\n"));
        self.write(&format!("proc/{pid}/status"), &format!("Name:\t{name}\nVmSwap:\t0 kB\n"));
        self.write(&format!("proc/{pid}/maps"), "7f00-7f01 r-xp 00000000 fe:00 12 /usr/bin/x\n");
        self.write(&format!("proc/{pid}/cgroup"), &format!("7:blkio:{group}\n0::{group}\n"));
        for tree in ["cgroup", "cgroup/blkio"] {
            let file = format!("{tree}{}/cgroup.procs", group.trim_end_matches('/'));
            if let Ok(text) = fs::read_to_string(self.path(&file)) {
                self.write(&file, &format!("{text}{pid}\n"));
            }
        }
        fs::create_dir_all(self.path(&format!("proc/{pid}/fd"))).unwrap();
        self
    }

    /// Adds an open file to a process, on a mount, with flags of open(2).
    pub(super) fn opens(&mut self, pid: i32, path: &str, mount: u32, flags: i32) -> &mut Self {
        let inode = path.bytes().map(u64::from).sum::<u64>();
        self.opens_inode(pid, path, mount, flags, inode)
    }

    pub(super) fn opens_inode(
        &mut self,
        pid: i32,
        path: &str,
        mount: u32,
        flags: i32,
        inode: u64,
    ) -> &mut Self {
        let directory = self.path(&format!("proc/{pid}/fd"));
        let number = fs::read_dir(&directory).unwrap().count();
        symlink(path, directory.join(number.to_string())).unwrap();
        let info = format!("pos:\t0\nflags:\t0{flags:o}\nmnt_id:\t{mount}\nino:\t{inode}\n");
        self.write(&format!("proc/{pid}/fdinfo/{number}"), &info)
    }

    pub(super) fn memory_in_version_one(&mut self) -> &mut Self {
        let point = self.path("memory");
        self.mounts.push(format!("31 20 0:31 / {} rw - cgroup cgroup rw,memory", point.display()));
        self
    }

    /// Stacks a disk on vda below /data, with a sysfs file that shows its type.
    pub(super) fn stacked(&mut self, name: &str, file: &str, text: &str) -> &mut Self {
        self.disk("253:0", name).made_of(name, "vda").write(&format!("sys/devices/{name}/{file}"), text);
        self.mount(DATA, "253:0", "/data", "ext4", "/dev/mapper/x", "rw")
    }

    /// Mounts a loop device on /data whose file is in /images, on vda.
    pub(super) fn loop_device(&mut self, direct: &str) -> &mut Self {
        if !self.mounts.iter().any(|mount| mount.contains(" /images ")) {
            self.mount(43, "254:0", "/images", "ext4", "/dev/vda", "rw");
        }
        self.disk("7:0", "loop0").write("sys/devices/loop0/loop/backing_file", "/images/disk.raw\n");
        self.write("sys/devices/loop0/loop/dio", &format!("{direct}\n"));
        self.mount(DATA, "7:0", "/data", "ext4", "/dev/loop0", "rw")
    }

    pub(super) fn swaps(&mut self, device: &str) -> &mut Self {
        self.write("proc/100/status", "Name:\tdd\nVmSwap:\t    512 kB\n");
        self.write("proc/swaps", &format!("Filename Type Size Used Priority\n{device} partition 9 1 -2\n"))
    }

    /// Process 100, a `dd` in /app that writes /data/out through the page cache.
    pub(super) fn dd(&mut self) -> &mut Self {
        self.dd_in("/app", WRITE)
    }

    pub(super) fn dd_in(&mut self, group: &str, flags: i32) -> &mut Self {
        self.process(100, "dd", group).opens(100, "/data/out", DATA, flags)
    }

    /// Process 100, a `dd` that writes an older file, with the bytes written and the bytes charged
    /// to the cgroup.
    pub(super) fn dd_to_an_old_file(&mut self, written: u64, charged: u64) -> &mut Self {
        let file = self.path("old");
        self.write("old", "").process(100, "dd", "/app");
        self.opens(100, file.to_str().unwrap(), DATA, WRITE);
        // Boot time an hour in the future, so that the file is older than its processes.
        let booted = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() + 3600;
        self.write("proc/stat", &format!("cpu 0\nbtime {booted}\n"));
        self.write("proc/100/io", &format!("rchar: 0\nwrite_bytes: {written}\ncancelled_write_bytes: 0\n"));
        self.write(
            "cgroup/app/io.stat",
            &format!("254:0 rbytes=0 wbytes={charged} rios=0 wios=9 dbytes=0 dios=0\n"),
        );
        self.write("cgroup/app/memory.stat", "file_dirty 1048576\nfile_writeback 0\n")
    }

    pub(super) fn facts(&mut self, subject: &str) -> CgroupFacts {
        let text = self.mounts.join("\n") + "\n";
        let processes: Vec<String> = fs::read_dir(self.path("proc"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
            .collect();
        for process in processes.iter().map(String::as_str).chain(["self"]) {
            self.write(&format!("proc/{process}/mountinfo"), &text);
        }
        let hierarchy = self.base.hierarchy();
        let group = target::resolve(&hierarchy, subject).unwrap();
        let limits = self.path(LIMITS);
        facts::collect(&hierarchy, &ExplainSubject { group, pid: subject.parse().ok(), limits }).unwrap()
    }

    pub(super) fn explain(&mut self) -> Vec<CoverageFinding> {
        findings::find(&self.facts("/app"))
    }

    pub(super) fn alarms(&mut self) -> Vec<(Coverage, Cause)> {
        let findings = self.explain();
        let alarms = findings.iter().filter(|finding| finding.coverage.is_failure());
        alarms.map(|finding| (finding.coverage, finding.cause)).collect()
    }
}

pub(super) const READ: i32 = 0;
pub(super) const WRITE: i32 = 1;
pub(super) const DIRECT: i32 = nix::libc::O_DIRECT;
pub(super) const SYNC: i32 = nix::libc::O_SYNC;
