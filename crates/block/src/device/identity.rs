//! Identity of the physical disk below a file, and a stable name for it.
//!
//! A file is in a file system on a partition of a disk. The disk has a capacity and statistics. The
//! kernel's tree in sysfs(5) leads from any of their device numbers to the disk. Devices below the
//! disk (the members of a device-mapper or RAID device, the file of a loop device) are not
//! followed, because requests wait for the whole.
//!
//! Numbers and names (`254:0`, `vda`) change at every boot. So measurements of a disk are stored
//! under the disk's own identifier ([`DeviceIdentity::key`]).
//!
//! Reads sysfs and procfs only; never opens the device.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// Maximum length of an attribute, in bytes; NVMe names, the longest, have 223.
const MAX_ATTRIBUTE_BYTES: usize = 256;

/// Paths of the kernel's trees; tests use others.
#[derive(Clone, Debug)]
pub struct SysfsRoots {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/proc/self/mountinfo`.
    pub mounts: PathBuf,
}

impl Default for SysfsRoots {
    fn default() -> Self {
        Self { sys: "/sys".into(), mounts: "/proc/self/mountinfo".into() }
    }
}

/// Number of a device, as in stat(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceNumber {
    /// Number of the driver.
    pub major: u64,
    /// Number of the device.
    pub minor: u64,
}

impl DeviceNumber {
    /// Unpacks the form of stat(2).
    pub fn unpack(packed: u64) -> Self {
        Self { major: nix::sys::stat::major(packed), minor: nix::sys::stat::minor(packed) }
    }
}

impl fmt::Display for DeviceNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// A whole disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceIdentity {
    number: DeviceNumber,
    /// Directory in sysfs.
    directory: PathBuf,
    name: String,
    key: String,
}

impl DeviceIdentity {
    /// Resolves a device number to its disk: the device itself, the disk of a partition, or (for a
    /// file system with an anonymous device number, such as Btrfs) the disk that it is mounted
    /// from.
    ///
    /// # Errors
    /// There is none: the file system is in memory, on the network, or an overlay.
    pub fn resolve(number: DeviceNumber, roots: &SysfsRoots) -> io::Result<Self> {
        // Major 0 is anonymous: the file system has no single device (Btrfs), or none.
        let number = match number.major {
            0 => mounted_from(number, &roots.mounts)?,
            _ => number,
        };
        let link = roots.sys.join("dev/block").join(number.to_string());
        let mut directory = link.canonicalize()?;
        // A partition's directory is inside its disk's.
        if directory.join("partition").exists() {
            directory.pop();
        }
        let disk_number = attribute(&directory, "dev").and_then(|text| parse_number(&text)).unwrap_or(number);
        // sysfs replaces a slash in a name by an exclamation mark.
        let name = directory.file_name().unwrap_or_default().to_string_lossy().replace('!', "/");
        let key = key(&directory, disk_number);
        Ok(Self { number: disk_number, directory, name, key })
    }

    /// Current number.
    pub fn number(&self) -> DeviceNumber {
        self.number
    }

    /// Current device node, such as `/dev/vda`.
    pub fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }

    /// Stable identifier, with the size: `wwid eui.0025385b71b00d12, 512110190592 bytes`. A disk
    /// without an identifier has its number instead, and may be mistaken for another disk of the
    /// same size.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// True if it may be the disk that had this [`key`](DeviceIdentity::key). A resized disk still
    /// matches, as does a loop device with another file; a disk without an identifier always
    /// matches.
    pub fn may_match(&self, key: &str) -> bool {
        let without_size =
            |key: &str| key.rsplit_once(", ").map_or_else(|| key.to_owned(), |(who, _)| who.to_owned());
        // A number or a backing file identifies no disk, so it cannot rule one out.
        let now = without_size(&self.key);
        now.starts_with("number ") || now.starts_with("file ") || now == without_size(key)
    }

    /// Directory in sysfs.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

fn key(directory: &Path, number: DeviceNumber) -> String {
    // The most specific first. All are documented in the kernel's Documentation/ABI, sysfs-block
    // and its drivers'.
    const ATTRIBUTES: [(&str, &str); 7] = [
        ("wwid", "wwid"),
        ("wwid", "device/wwid"),
        ("uuid", "dm/uuid"),
        ("uuid", "md/uuid"),
        ("serial", "serial"),
        ("serial", "device/serial"),
        ("file", "loop/backing_file"),
    ];
    let found =
        ATTRIBUTES.iter().find_map(|(kind, path)| Some(format!("{kind} {}", attribute(directory, path)?)));
    let identity = found.unwrap_or_else(|| format!("number {number}"));
    // sysfs counts in sectors of 512 bytes, whatever the disk's sector size.
    let sectors = attribute(directory, "size").and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    format!("{identity}, {} bytes", sectors.saturating_mul(512))
}

/// Text of an attribute; `None` if it is missing or empty.
fn attribute(directory: &Path, path: &str) -> Option<String> {
    let text = fs::read(directory.join(path)).ok()?;
    let text = String::from_utf8_lossy(&text[..text.len().min(MAX_ATTRIBUTE_BYTES)]).into_owned();
    // Not `sanitize`, which would change the keys of stored measurements.
    let text: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    (!text.is_empty()).then_some(text)
}

fn parse_number(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.split_once(':')?;
    Some(DeviceNumber { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

/// The device that a file system with an anonymous device number is mounted from
/// (proc_pid_mountinfo(5): the third field is the number, the second after the hyphen the source).
fn mounted_from(number: DeviceNumber, mounts: &Path) -> io::Result<DeviceNumber> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "the file system is not on a local disk");
    let text = fs::read_to_string(mounts)?;
    let source = text.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let matches = parse_number(mount.split(' ').nth(2)?)? == number;
        let source = file_system.split(' ').nth(1)?;
        (matches && source.starts_with("/dev/")).then_some(source)
    });
    // The number of the device node itself (rdev), not of the file system that it is in.
    let metadata = fs::metadata(source.ok_or_else(none)?)?;
    let number = DeviceNumber::unpack(metadata.rdev());
    if number.major == 0 { Err(none()) } else { Ok(number) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs with one disk that has a partition.
    struct FakeSysfs {
        directory: tempfile::TempDir,
    }

    impl FakeSysfs {
        fn new(attributes: &[(&str, &str)]) -> Self {
            let sysfs = Self { directory: tempfile::tempdir().expect("a directory") };
            let standard =
                [("dev", "259:0\n"), ("size", "2048\n"), ("p1/dev", "259:1\n"), ("p1/partition", "1\n")];
            for (path, text) in standard.iter().chain(attributes) {
                let path = sysfs.disk().join(path);
                fs::create_dir_all(path.parent().expect("inside")).expect("created");
                fs::write(path, text).expect("written");
            }
            let numbers = sysfs.roots().sys.join("dev/block");
            fs::create_dir_all(&numbers).expect("created");
            symlink(sysfs.disk(), numbers.join("259:0")).expect("linked");
            symlink(sysfs.disk().join("p1"), numbers.join("259:1")).expect("linked");
            sysfs
        }

        fn disk(&self) -> PathBuf {
            self.directory.path().join("devices/pci/block/cciss!c0d0")
        }

        fn roots(&self) -> SysfsRoots {
            SysfsRoots { sys: self.directory.path().into(), mounts: self.directory.path().join("mountinfo") }
        }

        fn resolve(&self, major: u64, minor: u64) -> io::Result<DeviceIdentity> {
            DeviceIdentity::resolve(DeviceNumber { major, minor }, &self.roots())
        }
    }

    #[test]
    fn a_partition_lies_on_its_disk() {
        let sysfs = FakeSysfs::new(&[]);
        let (disk, part) = (sysfs.resolve(259, 0).expect("there"), sysfs.resolve(259, 1).expect("there"));
        assert_eq!(disk, part);
        assert_eq!(
            (disk.node().as_str(), disk.number()),
            ("/dev/cciss/c0d0", DeviceNumber { major: 259, minor: 0 })
        );
        assert!(sysfs.resolve(7, 7).is_err());
    }

    #[test]
    fn key_prefers_stable_identifiers() {
        let key = |attributes: &[(&str, &str)]| {
            FakeSysfs::new(attributes).resolve(259, 0).expect("there").key().to_owned()
        };
        assert_eq!(key(&[]), "number 259:0, 1048576 bytes");
        assert_eq!(key(&[("serial", "abc \n")]), "serial abc, 1048576 bytes");
        assert_eq!(key(&[("serial", "abc"), ("device/wwid", "naa.5\n")]), "wwid naa.5, 1048576 bytes");
        assert_eq!(key(&[("serial", "\n"), ("dm/uuid", "LVM-1")]), "uuid LVM-1, 1048576 bytes");
        let long = key(&[("serial", &"x".repeat(10_000))]);
        assert!(long.len() < 300, "{long}");
    }

    #[test]
    fn anonymous_file_system_resolves_to_its_source() {
        let sysfs = FakeSysfs::new(&[]);
        let mounts = |text: &str| fs::write(sysfs.roots().mounts, text).expect("written");
        mounts("25 24 0:33 / /dev/shm rw - tmpfs tmpfs rw\n");
        let none = sysfs.resolve(0, 33).expect_err("in memory");
        assert_eq!(none.to_string(), "the file system is not on a local disk");
        mounts("25 24 0:34 / /data rw shared:1 - btrfs /dev/null rw\n");
        // Not a block device, but it has a device number: resolved, but missing in this machine's
        // tree.
        assert_eq!(sysfs.resolve(0, 34).expect_err("no such disk").kind(), io::ErrorKind::NotFound);
        mounts("garbage\n\n25\n");
        assert!(sysfs.resolve(0, 34).is_err());
    }

    #[test]
    fn the_disk_below_this_very_test_is_found_or_there_is_none() {
        let here = fs::metadata(".").expect("a directory");
        if let Ok(identity) =
            DeviceIdentity::resolve(DeviceNumber::unpack(here.dev()), &SysfsRoots::default())
        {
            assert!(identity.directory().join("stat").exists(), "{identity:?}");
            assert!(identity.node().starts_with("/dev/"));
        }
    }
}
