//! The host's programs for attachments: modules, loop devices, mounts, udev.
//!
//! mount(8) implements helpers, options and fstab; losetup(8) handles races for a free loop device.
//! Neither is reimplemented here.

use std::{
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use control::openers::DeviceOpeners;
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};

use super::AttachMount;

/// Standard input of the programs that this process runs; /dev/null if it is unset.
static INHERITED: OnceLock<fs::File> = OnceLock::new();

/// Makes all further programs inherit this file as standard input. Its lock stays held until they
/// end, even if this process is killed before.
pub(super) fn inherit_to_programs(file: fs::File) {
    let _ = INHERITED.set(file);
}

/// Runs a program to its end and returns its output.
///
/// # Errors
/// The first line of its standard error, or that it is not installed.
fn run(program: &str, package: &str, arguments: &[&str]) -> anyhow::Result<String> {
    // A user's PATH often lacks the sbin directories, which mount(8)'s helpers need as well.
    let inherited = std::env::var("PATH").unwrap_or_else(|_| "/usr/bin:/bin".to_owned());
    let path = format!("{inherited}:/usr/local/sbin:/usr/sbin:/sbin");
    let shared = INHERITED.get().and_then(|file| file.try_clone().ok());
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
        let stderr = String::from_utf8_lossy(&output.stderr);
        // umount(8) and mount(8) add hints on further lines; the first one has the cause.
        let line = stderr.lines().map(str::trim).find(|line| !line.is_empty());
        bail!("{}", line.map_or_else(|| format!("{program}: {}", output.status), str::to_owned));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Loads a kernel module. True if the module is loaded or built in.
pub(super) fn load_module(name: &str) -> bool {
    Uid::effective().is_root() && run("modprobe", "kmod", &["-q", name]).is_ok()
}

pub(super) fn may_make_loops() -> bool {
    Uid::effective().is_root() && (Path::new("/dev/loop-control").exists() || load_module("loop"))
}

/// A loop device: its name, which the kernel reuses, and its sequence number (`diskseq`, Linux
/// 5.15), which is unique until the next boot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AttachedLoop {
    name: String,
    sequence: String,
}

impl AttachedLoop {
    /// The loop device that has this name now.
    pub(super) fn of(device: &Path) -> Option<Self> {
        let name = device.file_name()?.to_str()?.to_owned();
        let sequence = fs::read_to_string(format!("/sys/block/{name}/diskseq")).ok()?;
        Some(Self { name, sequence })
    }

    /// Device node, if the loop device still exists.
    pub(super) fn device(&self) -> Option<PathBuf> {
        self.is_there().then(|| Path::new("/dev").join(&self.name))
    }

    fn is_there(&self) -> bool {
        Self::of(Path::new(&self.name)).as_ref() == Some(self)
    }
}

/// Makes a loop device over a file, with devices of its partitions. Uses direct I/O if the file
/// allows it: the page cache would hold the data twice.
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
    // losetup fails with direct I/O if the file system or an older kernel does not support it.
    let device = make("--direct-io=on").or_else(|_| make("--direct-io=off"))?;
    Ok(PathBuf::from(device))
}

/// Unmounts a device at all mount points of this namespace, even if they are in use: a mount whose
/// device is gone accepts writes and loses them.
pub(super) fn unmount_everywhere(device: &Path) {
    // In reverse: a later mount may lie inside an earlier one.
    for directory in DeviceOpeners::of_device(device).mounts.iter().rev() {
        unmount_lazily(directory);
    }
}

/// Unmounts one directory, lazily if it is in use.
pub(super) fn unmount_lazily(directory: &Path) {
    // A regular unmount first: it is complete when it returns.
    if unmount(directory).is_err() {
        let _ = run("umount", "mount", &["-l", "--", &directory.to_string_lossy()]);
    }
}

/// Removes the loop devices over a file, including the recorded one, which shows no file after the
/// file below it was unmounted. Their mounts are unmounted first. The name of a removed device may
/// already belong to another process, so `AttachmentRecord::lock_loops` serializes removals.
pub(super) fn remove_loops(file: &Path, attached_loop: Option<&AttachedLoop>) {
    let mut names = DeviceOpeners::loops(file);
    names.extend(
        attached_loop
            .filter(|attached_loop| attached_loop.is_there() && !names.contains(&attached_loop.name))
            .map(|made| made.name.clone()),
    );
    for name in names {
        let device = PathBuf::from(format!("/dev/{name}"));
        unmount_everywhere(&device);
        // With `autoclear` the kernel removes it when its last user closes it.
        // losetup --detach on a device in use only sets autoclear, so a second one would not help.
        let is_autoclear =
            fs::read(format!("/sys/block/{name}/loop/autoclear")).is_ok_and(|flag| flag == b"1\n");
        if !is_autoclear {
            let _ = run("losetup", "mount", &["--detach", &device.to_string_lossy()]);
        }
    }
}

/// Type of the file system on a device.
///
/// # Errors
/// If no known file system is found.
fn fstype(device: &Path) -> anyhow::Result<String> {
    let mut head = Vec::new();
    let read = fs::File::open(device).and_then(|file| file.take(128 << 10).read_to_end(&mut head));
    read.with_context(|| format!("{}", device.display()))?;
    detect_fstype(&head).map(str::to_owned).ok_or_else(|| {
        let text = "no known file system found on the disk (make one, or give its type with \
                    --fstype; for a partition, attach without --mount)";
        anyhow!("{}: {text}", device.display())
    })
}

/// Detects the file systems that virtual disks usually have, by their magic numbers.
fn detect_fstype(head: &[u8]) -> Option<&'static str> {
    let at = |offset: usize, magic: &[u8]| head.get(offset..offset + magic.len()) == Some(magic);
    if at(0x438, &[0x53, 0xef]) {
        // ext2, ext3 and ext4 differ in feature flags only; the ext4 driver mounts all of them.
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

pub(super) fn mount(device: &Path, mount: &AttachMount, read_only: bool) -> anyhow::Result<()> {
    ensure!(
        Uid::effective().is_root(),
        "only root may mount a device (run it as root, or attach without --mount)"
    );
    let fstype = match &mount.fstype {
        Some(fstype) => fstype.clone(),
        None => fstype(device)?,
    };
    let mut options: Vec<&str> = mount.options.as_deref().into_iter().collect();
    if read_only {
        options.push("ro");
        if fstype == "xfs" || fstype == "ext4" {
            // Replaying the log of an unclean file system would write to a read-only disk.
            options.push(if fstype == "xfs" { "norecovery" } else { "noload" });
        }
    }
    let options = options.join(",");
    let (device, directory) = (device.to_string_lossy(), mount.directory.to_string_lossy());
    let mut arguments = vec!["-t", &fstype];
    if !options.is_empty() {
        arguments.extend(["-o", &options]);
    }
    // A path that begins with a dash must not be read as an option.
    arguments.extend(["--", &device, &directory]);
    run("mount", "mount", &arguments).map(drop)
}

pub(super) fn unmount(directory: &Path) -> anyhow::Result<()> {
    run("umount", "mount", &["--", &directory.to_string_lossy()]).map(drop)
}

/// Removes the mount of a FUSE server that died.
pub(super) fn unmount_fuse(file: &Path) {
    let file = file.to_string_lossy();
    // umount works for root, fusermount3 for the mounting user.
    let _ = run("umount", "mount", &["-l", "--", &file])
        .or_else(|_| run("fusermount3", "fuse3", &["-u", "-z", "--", &file]));
}

/// Waits until udev has processed a device.
pub(super) fn settle_udev(device: &Path) -> anyhow::Result<()> {
    run("udevadm", "udev", &["settle", "--timeout=30"])?;
    ensure!(device.exists(), "{}: udev made no device node (is udev running?)", device.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_detected_by_magic() {
        let check = |offset: usize, bytes: &[u8], expect| {
            let mut head = vec![0; 128 << 10];
            assert_eq!(detect_fstype(&head), None);
            head[offset..offset + bytes.len()].copy_from_slice(bytes);
            assert_eq!(detect_fstype(&head), Some(expect));
        };
        check(0x438, &[0x53, 0xef], "ext4");
        check(0, b"XFSB", "xfs");
        check(0x10040, b"_BHRfS_M", "btrfs");
        check(82, b"FAT32   ", "vfat");
        assert_eq!(detect_fstype(b"XFS"), None);
    }
}
