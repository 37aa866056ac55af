//! Resolves a device named on the command line to a whole disk. Never opens the device.
//!
//! ```text
//!   /dev/vda, a link to it          the disk
//!   /dev/vda1                       its disk, with a notice
//!   254:0                           the disk with that number
//!   /srv, /srv/a-file               the disk of the file system there; for an overlay, of its upper directory
//! ```
//!
//! The kernel limits whole disks only. If another process or host does the I/O (network, memory,
//! FUSE, ZFS's threads), the error names what to limit instead.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail};
use block::device::{DeviceIdentity, DeviceNumber};

use super::{
    file_system_class::FileSystemClass,
    hierarchy::KernelRoots,
    kernel::{
        self,
        mountinfo::{self, Mount},
    },
};

/// The kernel stacks at most two file systems (FILESYSTEM_MAX_STACK_DEPTH); a device follows.
const MAX_STEPS: usize = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResolvedDisk {
    pub(crate) identity: DeviceIdentity,
    pub(crate) notices: Vec<String>,
}

pub(crate) fn resolve(roots: &KernelRoots, text: &str) -> anyhow::Result<ResolvedDisk> {
    let mut notices = Vec::new();
    let number = match kernel::number(text) {
        Some(number) => number,
        None => number_of_path(roots, text, &mut notices)?,
    };
    // Maps a partition to its disk: `io.max` accepts no partitions.
    let identity = DeviceIdentity::resolve(number, &roots.device_roots()).map_err(|error| {
        anyhow!(
            "device {text:?}: no disk with number {number} here: {error} (`lsblk` lists disks and \
             their numbers)"
        )
    })?;
    // File systems without a device (Btrfs, NFS, tmpfs) have an anonymous number with major 0.
    if number.major != 0 && identity.number() != number {
        let part =
            device_name(roots, number).map_or_else(|| number.to_string(), |name| format!("/dev/{name}"));
        let disk = identity.node();
        notices.push(format!("{part} is a partition; limits are for the whole disk {disk}"));
    }
    Ok(ResolvedDisk { identity, notices })
}

fn number_of_path(
    roots: &KernelRoots,
    text: &str,
    notices: &mut Vec<String>,
) -> anyhow::Result<DeviceNumber> {
    let mut path = PathBuf::from(text);
    // Each step replaces the path by one that is closer to the device: an overlay by its upper
    // directory, a mount by its source. The loop ends at a block device.
    let mut of_btrfs = false;
    for _ in 0..MAX_STEPS {
        let metadata = fs::metadata(&path).map_err(|error| {
            let path = path.display();
            anyhow!(
                "device {text:?}: {path}: {error} (give a disk such as /dev/vda, its number such \
                 as 254:0, or a path on it)"
            )
        })?;
        let kind = metadata.file_type();
        if kind.is_block_device() {
            let number = DeviceNumber::unpack(metadata.rdev());
            if of_btrfs {
                notices.extend(btrfs_devices_notice(roots, text, number));
            }
            return Ok(number);
        }
        if kind.is_char_device() {
            bail!(
                "device {text:?}: {} is a character device, not a block device (`lsblk` lists disks)",
                path.display()
            );
        }
        // A file or directory: the number of its file system, unless this has no device.
        let number = DeviceNumber::unpack(metadata.dev());
        if number.major != 0 {
            return Ok(number);
        }
        // Mount points are compared with absolute paths without symbolic links.
        let real = path.canonicalize().with_context(|| format!("device {text:?}"))?;
        let mounts = roots.mounts()?;
        let Some(mount) = mount_of(&mounts, number, &real) else {
            bail!("device {text:?}: its file system is unknown (give the disk itself)");
        };
        path = next_path(text, mount)?;
        of_btrfs = mount.kind == "btrfs";
        if mount.kind == "overlay" {
            let upper = path.display();
            notices.push(format!(
                "{text} is on an overlay; limits are for the disk of its upper directory {upper}"
            ));
        }
    }
    bail!("device {text:?}: too many stacked overlays (give the disk itself)")
}

/// The mount that contains a path. The fallback to any mount is for Btrfs, where each subvolume
/// has its own anonymous device number.
fn mount_of<'a>(mounts: &'a [Mount], number: DeviceNumber, path: &Path) -> Option<&'a Mount> {
    let of_number = mounts.iter().filter(|mount| mount.number == number);
    mountinfo::mount_containing(of_number, path).or_else(|| mountinfo::mount_containing(mounts, path))
}

/// Next path to resolve for a file system without a device: its source, or an overlay's upper
/// directory.
fn next_path(text: &str, mount: &Mount) -> anyhow::Result<PathBuf> {
    let at = mount.point.display();
    let source = &mount.source;
    let kind = mount.kind.as_str();
    match FileSystemClass::of(kind) {
        _ if kind == "overlay" => match mount.option("upperdir") {
            Some(upper) if upper.is_dir() => Ok(upper),
            Some(upper) => bail!(
                "device {text:?}: it is on an overlay, whose upper directory {} is not visible \
                 here (give the disk of that directory, on the host)",
                upper.display()
            ),
            None => bail!(
                "device {text:?}: it is on a read-only overlay (give the disk of its lower directories)"
            ),
        },
        FileSystemClass::Network => bail!(
            "device {text:?}: {at} is on another machine ({kind}, {source}), not on a disk of this \
             one (limit it there)"
        ),
        FileSystemClass::Zfs => bail!(
            "device {text:?}: {at} is on ZFS, whose kernel threads do the I/O in the root cgroup \
             (no limit applies to it; ZFS volumes and other file systems can be limited)"
        ),
        FileSystemClass::Memory => bail!(
            "device {text:?}: {at} is in memory ({kind}), on no disk (swapping it out can be \
             limited: give the disk with the swap)"
        ),
        // `fuseblk` has a block device as source.
        FileSystemClass::Fuse if kind != "fuseblk" => bail!(
            "device {text:?}: {at} is on FUSE ({kind}, {source}): its daemon does the I/O (limit \
             the daemon's cgroup on the disk it uses)"
        ),
        _ if source.starts_with("/dev/") => Ok(source.into()),
        _ => bail!(
            "device {text:?}: {at} is on no disk, its file system is {kind} (give a disk such as \
             /dev/vda, its number such as 254:0, or a path on it)"
        ),
    }
}

/// A notice for a Btrfs on several devices, of which mountinfo names only one.
fn btrfs_devices_notice(roots: &KernelRoots, text: &str, number: DeviceNumber) -> Option<String> {
    let device = device_name(roots, number)?;
    // sysfs lists the devices of each Btrfs by its UUID; the right one contains this device.
    let systems = fs::read_dir(roots.sys.join("fs/btrfs")).ok()?;
    let devices = systems.flatten().find_map(|system| {
        let links = fs::read_dir(system.path().join("devices")).ok()?;
        let mut names: Vec<_> =
            // sysfs replaces the slashes in names such as `cciss/c0d0`.
            links.flatten().map(|link| link.file_name().to_string_lossy().replace('!', "/")).collect();
        names.sort();
        names.contains(&device).then_some(names)
    })?;
    let others: Vec<_> =
        devices.iter().filter(|name| **name != device).map(|name| format!("/dev/{name}")).collect();
    (!others.is_empty()).then(|| {
        format!(
            "{text} is on a Btrfs of several devices; limits are for /dev/{device} only, not for {}",
            others.join(", ")
        )
    })
}

fn device_name(roots: &KernelRoots, number: DeviceNumber) -> Option<String> {
    let directory = roots.sys.join("dev/block").join(number.to_string()).canonicalize().ok()?;
    Some(directory.file_name()?.to_str()?.replace('!', "/"))
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
