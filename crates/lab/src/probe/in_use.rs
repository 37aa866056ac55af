//! Checks that a device is unused and empty before it is written to.
//!
//! Four checks, in this order: the device is not mounted; no other device is built on it; no user
//! in the kernel, such as swap or RAID, has opened it exclusively; it does not begin with a known
//! signature. The exclusive open also prevents later use; the checks before it only give better
//! messages. `--force` overrides the signature only. Reading needs the exclusive open only.

use std::{fs, io, os::unix::fs::OpenOptionsExt as _, path::Path};

use anyhow::{Context as _, bail};
use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use nix::{errno::Errno, fcntl::OFlag};
use storage::probe::{HEADER_BYTES, Probed, probe_header};

/// Exclusive open of a device: prevents mounting.
#[derive(Debug)]
pub(crate) struct ExclusiveDevice {
    _file: fs::File,
}

/// Claims an unused device for writing. `force` overrides signatures.
pub(crate) fn claim(path: &Path, device_number: u64, force: bool) -> anyhow::Result<ExclusiveDevice> {
    let name = path.display();
    let number = DeviceNumber::unpack(device_number);
    let roots = SysfsRoots::default();
    let mounts = fs::read_to_string(&roots.mounts).context("the list of mounts cannot be read")?;
    // A disk with a mounted partition is in use as well.
    let parts = parts_of(number, &roots);
    for part in parts.iter().chain([&number]) {
        if let Some(place) = mounted_at(&mounts, *part) {
            bail!(
                "{name}: is mounted at {place}, so it is not written to (unmount it, or leave out --write)"
            );
        }
        if let Some(holder) = holder_of(*part, &roots) {
            bail!("{name}: {holder} uses it, so it is not written to (stop that, or leave out --write)");
        }
    }
    // O_EXCL without O_CREAT on a block device fails with EBUSY while the kernel uses it (open(2)).
    let opened = fs::OpenOptions::new().read(true).write(true).custom_flags(OFlag::O_EXCL.bits()).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {
            bail!(
                "{name}: the system holds it, as swap or a RAID member perhaps (free it, or leave \
                 out --write)"
            )
        }
        Err(error) => return Err(error).with_context(|| format!("{name}: cannot be opened for writing")),
    };
    // Last, under the exclusive open: the content cannot change in between.
    if let (Some(content), false) =
        (signature(&file).with_context(|| format!("{name}: cannot be read"))?, force)
    {
        bail!(
            "{name}: has the signature of {content}, which writing would destroy (add --force if it \
             is not needed)"
        );
    }
    Ok(ExclusiveDevice { _file: file })
}

/// Claims a device for reading: I/O of other users would be measured as well.
pub(crate) fn claim_to_read(path: &Path) -> anyhow::Result<ExclusiveDevice> {
    let name = path.display();
    match fs::OpenOptions::new().read(true).custom_flags(OFlag::O_EXCL.bits()).open(path) {
        Ok(file) => Ok(ExclusiveDevice { _file: file }),
        Err(error) if error.raw_os_error() == Some(Errno::EBUSY as i32) => {
            bail!(
                "{name}: the system holds it, as a mounted file system or swap perhaps, and what \
                 happens there would be measured too (free it first)"
            )
        }
        Err(error) => Err(error).with_context(|| format!("{name}: cannot be opened for reading")),
    }
}

fn parts_of(number: DeviceNumber, roots: &SysfsRoots) -> Vec<DeviceNumber> {
    let Ok(identity) = DeviceIdentity::resolve(number, roots) else { return Vec::new() };
    // A partition has no partitions.
    if identity.number() != number {
        return Vec::new();
    }
    let Ok(entries) = fs::read_dir(identity.directory()) else { return Vec::new() };
    let part = |entry: io::Result<fs::DirEntry>| {
        let path = entry.ok()?.path();
        path.join("partition").exists().then_some(())?;
        let text = fs::read_to_string(path.join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
    };
    entries.filter_map(part).collect()
}

/// Mount point in the text of proc_pid_mountinfo(5): the third field is the number, the fifth the
/// mount point.
fn mounted_at(mounts: &str, number: DeviceNumber) -> Option<&str> {
    let number = number.to_string();
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ');
        (fields.nth(2)? == number).then(|| fields.nth(1))?
    })
}

/// Device that is built on this one, such as a logical volume.
fn holder_of(number: DeviceNumber, roots: &SysfsRoots) -> Option<String> {
    let directory = roots.sys.join("dev/block").join(number.to_string()).join("holders");
    let holder = fs::read_dir(directory).ok()?.next()?.ok()?;
    Some(holder.file_name().to_string_lossy().into_owned())
}

/// Offset, signature and owner; from each format's own description.
const SIGNATURES: [(usize, &[u8], &str); 13] = [
    (510, b"\x55\xaa", "a partition table or a boot sector"),
    (512, b"EFI PART", "a partition table"),
    (0, b"XFSB", "an XFS file system"),
    (0x438, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (0x10040, b"_BHRfS_M", "a Btrfs file system"),
    (0x400, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (0x8001, b"CD001", "an ISO 9660 file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (0x200, b"LABELONE", "an LVM volume"),
    (0x1018, b"\xc6\x85\x73\xf6", "a bcache device"),
    (0x1000, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (0, b"\xfc\x4e\x2b\xa9", "a RAID member"),
];
/// Length of the beginning of a device that contains all signatures.
const SIGNATURE_BYTES: usize = 0x10048;

fn signature(file: &fs::File) -> io::Result<Option<&'static str>> {
    use std::os::unix::fs::FileExt as _;
    let mut start = vec![0; SIGNATURE_BYTES];
    let mut length = 0;
    while length < start.len() {
        match file.read_at(&mut start[length..], length as u64)? {
            0 => break,
            count => length += count,
        }
    }
    start.truncate(length);
    Ok(known(&start))
}

fn known(start: &[u8]) -> Option<&'static str> {
    // Disk images and LUKS volumes, with the same detection as when an image is opened.
    if let Probed::Format(_) = probe_header(&start[..start.len().min(HEADER_BYTES)]) {
        return Some("a disk image or an encrypted volume");
    }
    let here =
        |(at, bytes, _): &&(usize, &[u8], &str)| start.get(*at..).is_some_and(|rest| rest.starts_with(bytes));
    SIGNATURES.iter().find(here).map(|(_, _, content)| *content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_signature_is_found_at_its_offset() {
        for (at, bytes, content) in SIGNATURES {
            let mut start = vec![0; SIGNATURE_BYTES];
            start[at..at + bytes.len()].copy_from_slice(bytes);
            assert_eq!(known(&start), Some(content));
            assert_eq!(known(&start[..at]), None, "cut off before it");
        }
        assert_eq!(known(b"QFI\xfb"), Some("a disk image or an encrypted volume"));
        assert_eq!(known(&[0; SIGNATURE_BYTES]), None);
        assert_eq!(known(&[]), None);
    }

    #[test]
    fn mount_is_found_by_device_number() {
        let mounts =
            "24 1 254:0 / / rw - ext4 /dev/root rw\n25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\ngarbage\n";
        let at = |major, minor| mounted_at(mounts, DeviceNumber { major, minor });
        assert_eq!(at(254, 0), Some("/"));
        assert_eq!(at(254, 1), None);
        assert_eq!(at(0, 23), Some("/dev/shm"));
    }
}
