//! Disks by number, the disks they are built from, and the disk of a file system.
//!
//! ```text
//!   /sys/dev/block/253:0 → …/dm-0     slaves/ (lower disks)   dm/uuid (CRYPT-…)   md/level   loop/backing_file, loop/dio
//! ```
//!
//! Source: Documentation/ABI/testing/sysfs-block, -dm, -loop; Documentation/admin-guide/md.rst.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use block::device::{DeviceIdentity, DeviceNumber};

use super::{
    BackingDisk, DiskFacts, DiskKind, Evidence, Mapper, MountedFileSystem,
    mount_rows::{MountRow, mount_containing},
};
use crate::{file_system_class::FileSystemClass, hierarchy::KernelRoots, kernel, kernel::mountinfo::Mount};

/// Number of overlays on top of each other that are followed to the file system below. The kernel
/// permits 2 (FILESYSTEM_MAX_STACK_DEPTH).
const MAX_LAYERS: usize = 3;
/// Number of disks below each other that are followed.
const MAX_DEPTH: usize = 8;

pub(super) struct DiskStack<'a> {
    roots: &'a KernelRoots,
    pub(super) known: Vec<DiskFacts>,
}

impl<'a> DiskStack<'a> {
    pub(super) fn new(roots: &'a KernelRoots) -> Self {
        Self { roots, known: Vec::new() }
    }

    pub(super) fn disk_of_node(&mut self, path: &Path) -> Option<DeviceNumber> {
        // sysfs writes `!` for `/` in names such as `cciss/c0d0`.
        let name = path.strip_prefix("/dev").ok()?.to_str()?.replace('/', "!");
        // From sysfs first: a container may lack the device node.
        let file = self.roots.sys.join("class/block").join(name).join("dev");
        let number = match fs::read_to_string(file) {
            Ok(text) => kernel::number(text.trim())?,
            Err(_) => number_of_node(path)?,
        };
        self.whole_disk(number)
    }

    fn whole_disk(&mut self, number: DeviceNumber) -> Option<DeviceNumber> {
        let identity = self.identity(number)?;
        let disk = identity.number();
        self.insert(&identity, 0);
        Some(disk)
    }

    fn identity(&self, number: DeviceNumber) -> Option<DeviceIdentity> {
        DeviceIdentity::resolve(number, &self.roots.device_roots()).ok()
    }

    fn insert(&mut self, identity: &DeviceIdentity, depth: usize) {
        let number = identity.number();
        if depth > MAX_DEPTH || self.known.iter().any(|disk| disk.number == number) {
            return;
        }
        let directory = identity.directory().to_owned();
        let (kind, mut evidence) = kind(&directory, identity.node().trim_start_matches("/dev/"));
        // Entered before its lower disks, which ends the recursion if sysfs shows a cycle.
        self.known.push(DiskFacts {
            number,
            node: identity.node(),
            kind,
            lower_disks: Vec::new(),
            evidence: Vec::new(),
        });
        let mut parts = Vec::new();
        for entry in fs::read_dir(directory.join("slaves")).into_iter().flatten().flatten() {
            let text = fs::read_to_string(entry.path().join("dev")).unwrap_or_default();
            let Some(part) = kernel::number(text.trim()).and_then(|number| self.identity(number)) else {
                continue;
            };
            self.insert(&part, depth + 1);
            // Two partitions of a disk can both be members of an array.
            if !parts.contains(&part.number()) {
                parts.push(part.number());
            }
            evidence.push(Evidence::of(
                &directory.join("slaves"),
                entry.file_name().to_string_lossy().into_owned(),
            ));
        }
        let disk = self.known.iter_mut().find(|disk| disk.number == number).expect("entered above");
        (disk.lower_disks, disk.evidence) = (parts, evidence);
    }

    pub(super) fn lower_disks(&self, disk: DeviceNumber) -> Vec<DeviceNumber> {
        // Breadth first: the result is ordered from the uppermost disk to the lowest.
        let mut found = vec![disk];
        let mut next = 0;
        while next < found.len() {
            let parts = self
                .known
                .iter()
                .find(|known| known.number == found[next])
                .map(|disk| disk.lower_disks.clone());
            for part in parts.unwrap_or_default() {
                if !found.contains(&part) {
                    found.push(part);
                }
            }
            next += 1;
        }
        found.split_off(1)
    }

    /// The file system of a mount; for an overlay, that of its upper directory.
    pub(super) fn file_system(
        &mut self,
        own_mounts: &[MountRow],
        file: &str,
        row: &MountRow,
    ) -> MountedFileSystem {
        let (mut row, mut file) = (row, file.to_owned());
        let number = row.mount.number;
        let overlay = (row.mount.kind == "overlay").then(|| Evidence::new(file.clone(), row.line.clone()));
        for _ in 0..MAX_LAYERS {
            if row.mount.kind != "overlay" {
                break;
            }
            // The options of an overlay name its directories in the mount namespace of the host.
            let Some(below) =
                row.mount.option("upperdir").and_then(|upper| mount_containing(own_mounts, &upper))
            else {
                break;
            };
            row = below;
            file = self.roots.mountinfo().display().to_string();
        }
        let mount = &row.mount;
        let (below, partition) = self.below_file_system(mount);
        MountedFileSystem {
            number,
            kind: mount.kind.clone(),
            class: FileSystemClass::of(&mount.kind),
            mount_point: mount.point.display().to_string(),
            super_options: mount.super_options.clone(),
            evidence: Evidence::new(file, row.line.clone()),
            backing_disk: below,
            partition,
            used: false,
            overlay,
        }
    }

    fn below_file_system(&mut self, mount: &Mount) -> (BackingDisk, Option<Evidence>) {
        if FileSystemClass::of(&mount.kind) != FileSystemClass::Disk {
            return (BackingDisk::NoDisk, None);
        }
        let unknown = || (BackingDisk::Unknown(mount.source.clone()), None);
        let number = match mount.number.major {
            // Anonymous number (Btrfs): the source names a device of the file system.
            0 => match self.disk_of_node(Path::new(&mount.source)) {
                Some(number) => return (BackingDisk::Disk(number), None),
                None => return unknown(),
            },
            _ => mount.number,
        };
        let Some(disk) = self.whole_disk(number) else {
            return unknown();
        };
        let partition = (disk != number).then(|| {
            let file = self.roots.sys.join("dev/block").join(number.to_string()).join("partition");
            let text = fs::read_to_string(&file).unwrap_or_default();
            Evidence::of(&file, text.trim())
        });
        (BackingDisk::Disk(disk), partition)
    }

    pub(super) fn insert_limited(&mut self, limited: &[DeviceNumber]) {
        for &number in limited {
            if self.whole_disk(number).is_none() && !self.known.iter().any(|disk| disk.number == number) {
                let directory = self.roots.sys.join("dev/block").join(number.to_string());
                let evidence = vec![Evidence::of(&directory, "does not exist")];
                let (node, parts) = (number.to_string(), Vec::new());
                self.known.push(DiskFacts {
                    number,
                    node,
                    kind: DiskKind::Gone,
                    lower_disks: parts,
                    evidence,
                });
            }
        }
    }
}

fn kind(directory: &Path, name: &str) -> (DiskKind, Vec<Evidence>) {
    let read = |file: &str| {
        let path = directory.join(file);
        let text = fs::read_to_string(&path).ok()?;
        Some(Evidence::of(&path, text.trim()))
    };
    if let Some(uuid) = read("dm/uuid") {
        // cryptsetup prefixes the UUID with CRYPT-. LVM names the legs of a RAID `…_rimage_N`.
        let legs = fs::read_dir(directory.join("slaves")).into_iter().flatten().flatten();
        let legs = legs.map(|entry| entry.path().join("dm/name"));
        let legs = legs.filter_map(|file| Some((fs::read_to_string(&file).ok()?, file)));
        let leg = legs.into_iter().find(|(name, _)| name.contains("_rimage_"));
        if let Some((name, file)) = leg {
            let evidence = vec![uuid, Evidence::of(&file, name.trim())];
            return (DiskKind::Mapper(Mapper::Raid), evidence);
        }
        let mapper = if uuid.value.starts_with("CRYPT-") { Mapper::Crypt } else { Mapper::Other };
        return (DiskKind::Mapper(mapper), vec![uuid]);
    }
    if let Some(level) = read("md/level") {
        return (DiskKind::Raid(level.value.clone()), vec![level]);
    }
    if let Some(file) = read("loop/backing_file") {
        let direct = read("loop/dio");
        let kind = DiskKind::Loop {
            file_system: None,
            direct: direct.as_ref().is_some_and(|direct| direct.value == "1"),
        };
        return (kind, [Some(file), direct].into_iter().flatten().collect());
    }
    if name.starts_with("zram") || name.starts_with("ram") {
        return (DiskKind::Memory, Vec::new());
    }
    (DiskKind::Plain, Vec::new())
}

/// Number of a block device node whose name is not in sysfs.
fn number_of_node(path: &Path) -> Option<DeviceNumber> {
    let metadata = fs::metadata(path).ok()?;
    metadata.file_type().is_block_device().then(|| DeviceNumber::unpack(metadata.rdev()))
}
