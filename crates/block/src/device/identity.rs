//! Which physical disk something is on, and a name for that disk that stays.
//!
//! A file is in a file system, that is on a partition, and that on a disk. The disk has a capacity
//! and statistics. A device number of any of these leads to the disk, through the kernel's tree in
//! sysfs(5). What is below the disk (the members of a device mapper's or RAID's device, the file of
//! a loop device) is not followed, because requests wait for the whole.
//!
//! Numbers and names (`254:0`, `vda`) change at every boot. So measurements of a disk are stored
//! under what the disk says of itself ([`Identity::key`]).
//!
//! Reads sysfs and procfs only; never opens the device.

use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

/// Longest text taken from an attribute, in bytes: NVMe's names, the longest there are, have 223.
const MAX_ATTRIBUTE_BYTES: usize = 256;

/// Where the kernel's trees are; another place in tests.
#[derive(Clone, Debug)]
pub struct Roots {
    /// `/sys`.
    pub sys: PathBuf,
    /// `/proc/self/mountinfo`.
    pub mounts: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self { sys: "/sys".into(), mounts: "/proc/self/mountinfo".into() }
    }
}

/// A device's number, as stat(2) gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Number {
    /// The driver's part.
    pub major: u64,
    /// The device's.
    pub minor: u64,
}

impl Number {
    /// From the form that stat(2) packs it in.
    pub fn unpack(packed: u64) -> Self {
        Self { major: nix::sys::stat::major(packed), minor: nix::sys::stat::minor(packed) }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// A whole disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    number: Number,
    /// Its directory in sysfs.
    directory: PathBuf,
    name: String,
    key: String,
}

impl Identity {
    /// The disk that a device of this number is, or is a part of, or (of a file system without a
    /// number of its own, such as Btrfs) is mounted from.
    ///
    /// # Errors
    /// If there is none: the file system is in memory, on the network, or a layer over others.
    pub fn resolve(number: Number, roots: &Roots) -> io::Result<Self> {
        let number = match number.major {
            0 => mounted_from(number, &roots.mounts)?,
            _ => number,
        };
        let link = roots.sys.join("dev/block").join(number.to_string());
        let mut directory = link.canonicalize()?;
        if directory.join("partition").exists() {
            directory.pop();
        }
        let whole = attribute(&directory, "dev").and_then(|text| parse_number(&text)).unwrap_or(number);
        // In sysfs a slash, which a name may have, is written as an exclamation mark.
        let name = directory.file_name().unwrap_or_default().to_string_lossy().replace('!', "/");
        let key = key(&directory, whole);
        Ok(Self { number: whole, directory, name, key })
    }

    /// The number at present.
    pub fn number(&self) -> Number {
        self.number
    }

    /// The device's node, such as `/dev/vda`, at present.
    pub fn node(&self) -> String {
        format!("/dev/{}", self.name)
    }

    /// What it is called for good, with its size: `wwid eui.0025385b71b00d12, 512110190592 bytes`.
    /// A disk that says nothing of itself is called by its number, and may be mistaken for another
    /// of the same size.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Whether it can be the disk that had this [`key`](Identity::key). One that was made longer or
    /// shorter since still is, as is a loop device with another file; and of one that says nothing
    /// of itself nothing else is known.
    pub fn can_be(&self, key: &str) -> bool {
        let who = |key: &str| key.rsplit_once(", ").map_or_else(|| key.to_owned(), |(who, _)| who.to_owned());
        let now = who(&self.key);
        now.starts_with("number ") || now.starts_with("file ") || now == who(key)
    }

    /// Its directory in sysfs.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

fn key(directory: &Path, number: Number) -> String {
    // The most unique first. All are documented in the kernel's Documentation/ABI, sysfs-block and
    // its drivers'.
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
    let who = found.unwrap_or_else(|| format!("number {number}"));
    // Sectors of 512 bytes, whatever the disk's own are.
    let sectors = attribute(directory, "size").and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    format!("{who}, {} bytes", sectors.saturating_mul(512))
}

/// The text of an attribute, if it says anything.
fn attribute(directory: &Path, path: &str) -> Option<String> {
    let text = fs::read(directory.join(path)).ok()?;
    let text = String::from_utf8_lossy(&text[..text.len().min(MAX_ATTRIBUTE_BYTES)]).into_owned();
    // Not `plain`: keys that were stored would be found no more.
    let text: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    (!text.is_empty()).then_some(text)
}

fn parse_number(text: &str) -> Option<Number> {
    let (major, minor) = text.split_once(':')?;
    Some(Number { major: major.parse().ok()?, minor: minor.parse().ok()? })
}

/// The device that a file system without a device's number is mounted from (proc_pid_mountinfo(5):
/// the third field is the number, the second after the hyphen the source).
fn mounted_from(number: Number, mounts: &Path) -> io::Result<Number> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "the file system is on no disk of this machine");
    let text = fs::read_to_string(mounts)?;
    let source = text.lines().find_map(|line| {
        let (mount, what) = line.split_once(" - ")?;
        let here = parse_number(mount.split(' ').nth(2)?)? == number;
        let source = what.split(' ').nth(1)?;
        (here && source.starts_with("/dev/")).then_some(source)
    });
    let metadata = fs::metadata(source.ok_or_else(none)?)?;
    let number = Number::unpack(metadata.rdev());
    if number.major == 0 { Err(none()) } else { Ok(number) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A sysfs of one disk with a partition.
    struct Machine {
        directory: tempfile::TempDir,
    }

    impl Machine {
        fn new(attributes: &[(&str, &str)]) -> Self {
            let machine = Self { directory: tempfile::tempdir().expect("a directory") };
            let standard =
                [("dev", "259:0\n"), ("size", "2048\n"), ("p1/dev", "259:1\n"), ("p1/partition", "1\n")];
            for (path, text) in standard.iter().chain(attributes) {
                let path = machine.disk().join(path);
                fs::create_dir_all(path.parent().expect("inside")).expect("created");
                fs::write(path, text).expect("written");
            }
            let numbers = machine.roots().sys.join("dev/block");
            fs::create_dir_all(&numbers).expect("created");
            symlink(machine.disk(), numbers.join("259:0")).expect("linked");
            symlink(machine.disk().join("p1"), numbers.join("259:1")).expect("linked");
            machine
        }

        fn disk(&self) -> PathBuf {
            self.directory.path().join("devices/pci/block/cciss!c0d0")
        }

        fn roots(&self) -> Roots {
            Roots { sys: self.directory.path().into(), mounts: self.directory.path().join("mountinfo") }
        }

        fn resolve(&self, major: u64, minor: u64) -> io::Result<Identity> {
            Identity::resolve(Number { major, minor }, &self.roots())
        }
    }

    #[test]
    fn a_partition_lies_on_its_disk() {
        let machine = Machine::new(&[]);
        let (disk, part) = (machine.resolve(259, 0).expect("there"), machine.resolve(259, 1).expect("there"));
        assert_eq!(disk, part);
        assert_eq!(
            (disk.node().as_str(), disk.number()),
            ("/dev/cciss/c0d0", Number { major: 259, minor: 0 })
        );
        assert!(machine.resolve(7, 7).is_err());
    }

    #[test]
    fn a_disk_is_called_by_what_it_says_of_itself() {
        let key = |attributes: &[(&str, &str)]| {
            Machine::new(attributes).resolve(259, 0).expect("there").key().to_owned()
        };
        assert_eq!(key(&[]), "number 259:0, 1048576 bytes");
        assert_eq!(key(&[("serial", "abc \n")]), "serial abc, 1048576 bytes");
        assert_eq!(key(&[("serial", "abc"), ("device/wwid", "naa.5\n")]), "wwid naa.5, 1048576 bytes");
        assert_eq!(key(&[("serial", "\n"), ("dm/uuid", "LVM-1")]), "uuid LVM-1, 1048576 bytes");
        let long = key(&[("serial", &"x".repeat(10_000))]);
        assert!(long.len() < 300, "{long}");
    }

    #[test]
    fn a_file_system_without_a_number_is_on_what_it_was_mounted_from() {
        let machine = Machine::new(&[]);
        let mounts = |text: &str| fs::write(machine.roots().mounts, text).expect("written");
        mounts("25 24 0:33 / /dev/shm rw - tmpfs tmpfs rw\n");
        let none = machine.resolve(0, 33).expect_err("in memory");
        assert_eq!(none.to_string(), "the file system is on no disk of this machine");
        mounts("25 24 0:34 / /data rw shared:1 - btrfs /dev/null rw\n");
        // Not a block device, but it has a number: found, and then not in this machine's tree.
        assert_eq!(machine.resolve(0, 34).expect_err("no such disk").kind(), io::ErrorKind::NotFound);
        mounts("garbage\n\n25\n");
        assert!(machine.resolve(0, 34).is_err());
    }

    #[test]
    fn the_disk_below_this_very_test_is_found_or_there_is_none() {
        let here = fs::metadata(".").expect("a directory");
        if let Ok(identity) = Identity::resolve(Number::unpack(here.dev()), &Roots::default()) {
            assert!(identity.directory().join("stat").exists(), "{identity:?}");
            assert!(identity.node().starts_with("/dev/"));
        }
    }
}
