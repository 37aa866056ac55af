//! What the host's own programs do for an attachment: modules, loop devices, mounts, udev.
//!
//! mount(8) knows helpers, options and fstab; losetup(8) the races between those who look for a
//! free loop device. None of it is done again here.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use control::users::Users;
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};

use super::Mount;

/// What programs have as standard input, where that is not nothing.
static HANDED: OnceLock<fs::File> = OnceLock::new();

/// Has the programs that this process runs from now on hold an empty file open until they end: its
/// lock then tells whether all have that this process, which may be killed, was to wait for.
pub(super) fn hand_to_programs(file: fs::File) {
    let _ = HANDED.set(file);
}

/// Runs a program to its end; what it printed.
///
/// # Errors
/// What it complained of, or that it is not there.
fn run(program: &str, package: &str, arguments: &[&str]) -> anyhow::Result<String> {
    // Users, and helpers that mount(8) calls, are not told of the administrator's directories.
    let inherited = std::env::var("PATH").unwrap_or_else(|_| "/usr/bin:/bin".to_owned());
    let path = format!("{inherited}:/usr/local/sbin:/usr/sbin:/sbin");
    let shared = HANDED.get().and_then(|file| file.try_clone().ok());
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", path)
        .stdin(shared.map_or_else(Stdio::null, Stdio::from))
        .output();
    let output = output.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => anyhow!("{program}: not found (install {package})"),
        _ => anyhow!("{program}: {error}"),
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let line = said.lines().map(str::trim).find(|line| !line.is_empty());
        bail!("{}", line.map_or_else(|| format!("{program}: {}", output.status), str::to_owned));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Whether the kernel has the module now.
pub(super) fn load_module(name: &str) -> bool {
    Uid::effective().is_root() && run("modprobe", "kmod", &["-q", name]).is_ok()
}

pub(super) fn may_make_loops() -> bool {
    Uid::effective().is_root() && (Path::new("/dev/loop-control").exists() || load_module("loop"))
}

/// A loop device that was made: a name, which another may have later, and the number that the
/// kernel gives to what is behind a name, and to nothing else until the next boot (`diskseq`, from
/// Linux 5.15 on).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Loop {
    name: String,
    sequence: String,
}

impl Loop {
    /// What has this name now.
    pub(super) fn of(device: &Path) -> Option<Self> {
        let name = device.file_name()?.to_str()?.to_owned();
        let sequence = fs::read_to_string(format!("/sys/block/{name}/diskseq")).ok()?;
        Some(Self { name, sequence })
    }

    /// Its node, while it is there.
    pub(super) fn device(&self) -> Option<PathBuf> {
        self.is_there().then(|| Path::new("/dev").join(&self.name))
    }

    fn is_there(&self) -> bool {
        Self::of(Path::new(&self.name)).as_ref() == Some(self)
    }
}

/// A loop device over a file, and devices of its partitions. Past the page cache where the file
/// allows it: it would hold the data a second time.
pub(super) fn make_loop(file: &Path, read_only: bool) -> anyhow::Result<PathBuf> {
    let file = file.to_str().context("the file's path is not UTF-8")?;
    let make = |direct: &str| {
        let mut arguments = vec!["--find", "--show", "--partscan", direct];
        if read_only {
            arguments.push("--read-only");
        }
        arguments.push(file);
        run("losetup", "mount", &arguments)
    };
    let made = make("--direct-io=on").or_else(|_| make("--direct-io=off"))?;
    Ok(PathBuf::from(made))
}

/// Unmounts a device wherever this process sees it mounted, also under those who work there: what
/// is left of a mount whose device goes takes what is written to it, and loses it.
pub(super) fn unmount_everywhere(device: &Path) {
    // What was mounted last may lie in what was mounted before.
    for directory in Users::of(device).mounts.iter().rev() {
        unmount_at_last(directory);
    }
}

/// The same of one directory.
pub(super) fn unmount_at_last(directory: &Path) {
    // In order first, which leaves nothing for later.
    if unmount(directory).is_err() {
        let _ = run("umount", "mount", &["-l", "--", &directory.to_string_lossy()]);
    }
}

/// Removes the loop devices over a file, and the one that was made over it, which a file that was
/// unmounted below it shows as one over nothing. One that was removed already may be somebody
/// else's by now, so whoever else removes them waits meanwhile: see [`Place::changing_loops`]. What
/// is mounted of them is unmounted before.
///
/// [`Place::changing_loops`]: super::place::Place::changing_loops
pub(super) fn remove_loops(file: &Path, made: Option<&Loop>) {
    let mut names = Users::loops(file);
    names.extend(
        made.filter(|made| made.is_there() && !names.contains(&made.name)).map(|made| made.name.clone()),
    );
    for name in names {
        let device = PathBuf::from(format!("/dev/{name}"));
        unmount_everywhere(&device);
        // With its last user it goes by itself.
        let is_going = fs::read(format!("/sys/block/{name}/loop/autoclear")).is_ok_and(|flag| flag == b"1\n");
        if !is_going {
            let _ = run("losetup", "mount", &["--detach", &device.to_string_lossy()]);
        }
    }
}

/// The type of the file system on a device.
///
/// # Errors
/// If there is none that is known.
fn fstype(device: &Path) -> anyhow::Result<String> {
    let mut head = Vec::new();
    let read = fs::File::open(device).and_then(|file| file.take(128 << 10).read_to_end(&mut head));
    read.with_context(|| format!("{}", device.display()))?;
    magic(&head).map(str::to_owned).ok_or_else(|| {
        let text = "no file system that is known is on the disk (make one, or name its type with --fstype; of a partition of the disk, attach without --mount)";
        anyhow!("{}: {text}", device.display())
    })
}

/// What a device begins with, for those file systems that disks of machines have.
fn magic(head: &[u8]) -> Option<&'static str> {
    let at = |offset: usize, magic: &[u8]| head.get(offset..offset + magic.len()) == Some(magic);
    if at(0x438, &[0x53, 0xef]) {
        // Its features tell ext2, 3 and 4 apart; the driver of the last mounts them all.
        Some("ext4")
    } else if at(0, b"XFSB") {
        Some("xfs")
    } else if at(0x10040, b"_BHRfS_M") {
        Some("btrfs")
    } else if at(0x400, &[0x10, 0x20, 0xf5, 0xf2]) {
        Some("f2fs")
    } else if at(3, b"NTFS    ") {
        Some("ntfs3")
    } else if at(3, b"EXFAT   ") {
        Some("exfat")
    } else if at(82, b"FAT32") || at(54, b"FAT1") {
        Some("vfat")
    } else if at(0, b"hsqs") {
        Some("squashfs")
    } else if at(0x8001, b"CD001") {
        Some("iso9660")
    } else {
        None
    }
}

pub(super) fn mount(device: &Path, mount: &Mount, read_only: bool) -> anyhow::Result<()> {
    ensure!(Uid::effective().is_root(), "only root may mount a device (be root, or attach without --mount)");
    let fstype = match &mount.fstype {
        Some(fstype) => fstype.clone(),
        None => fstype(device)?,
    };
    let mut options: Vec<&str> = mount.options.as_deref().into_iter().collect();
    if read_only {
        options.push("ro");
        if fstype == "xfs" || fstype == "ext4" {
            // What is not clean needs its log written, which a read-only disk cannot have.
            options.push(if fstype == "xfs" { "norecovery" } else { "noload" });
        }
    }
    let options = options.join(",");
    let (device, directory) = (device.to_string_lossy(), mount.directory.to_string_lossy());
    let mut arguments = vec!["-t", &fstype];
    if !options.is_empty() {
        arguments.extend(["-o", &options]);
    }
    arguments.extend(["--", &device, &directory]);
    run("mount", "mount", &arguments).map(drop)
}

pub(super) fn unmount(directory: &Path) -> anyhow::Result<()> {
    run("umount", "mount", &["--", &directory.to_string_lossy()]).map(drop)
}

/// Removes what a FUSE server that died has left of its mount.
pub(super) fn unmount_fuse(file: &Path) {
    let file = file.to_string_lossy();
    // Whichever may: root, or who mounted it.
    let _ = run("umount", "mount", &["-l", "--", &file])
        .or_else(|_| run("fusermount3", "fuse3", &["-u", "-z", "--", &file]));
}

/// Waits until udev is through with a device.
pub(super) fn settle(device: &Path) -> anyhow::Result<()> {
    run("udevadm", "udev", &["settle", "--timeout=30"])?;
    ensure!(device.exists(), "{}: udev made no node (does it run?)", device.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_known_by_how_they_begin() {
        let check = |offset: usize, bytes: &[u8], expect| {
            let mut head = vec![0; 128 << 10];
            assert_eq!(magic(&head), None);
            head[offset..offset + bytes.len()].copy_from_slice(bytes);
            assert_eq!(magic(&head), Some(expect));
        };
        check(0x438, &[0x53, 0xef], "ext4");
        check(0, b"XFSB", "xfs");
        check(0x10040, b"_BHRfS_M", "btrfs");
        check(82, b"FAT32   ", "vfat");
        assert_eq!(magic(b"XFS"), None);
    }
}
