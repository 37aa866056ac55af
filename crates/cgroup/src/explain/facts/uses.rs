//! Open files and shared mappings of processes: files on disks, and disks themselves.
//!
//! ```text
//!   /proc/PID/fd/3        → /data/log                       path
//!   /proc/PID/fdinfo/3    flags: 02100001  mnt_id: 36       open flags and mount (proc_pid_fdinfo(5))
//!   /proc/PID/mountinfo   36 25 254:16 / /data … ext4 …     file system of that mount
//!   /proc/PID/maps        … rw-s … fe:10 131 /data/map      writable shared mappings
//! ```
//!
//! Pipes, sockets, /proc and memory files are omitted. Of several files that are only read, in the
//! same way and on the same file system, the first represents all.

use std::{
    fs,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
};

use block::device::Number;
use nix::fcntl::OFlag;

use super::{
    Evidence, Identity, Place, Use, Way,
    mounts::MountTable,
    reader::{Reader, is_gone},
    rows::Row,
};
use crate::nature::Nature;

const MAX_FILES: usize = 65_536;

pub(super) struct Open {
    pub(super) path: PathBuf,
    pub(super) flags: OFlag,
    pub(super) mount: Option<u64>,
    /// Since Linux 5.14.
    pub(super) inode: Option<u64>,
    /// The link in /proc/PID/fd, which reaches the file even if its path is not visible here.
    link: PathBuf,
    pub(super) evidence: Evidence,
}

pub(super) fn open(reader: &mut Reader<'_>, process: &Path) -> Vec<Open> {
    let directory = process.join("fd");
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) => {
            if !is_gone(&error) {
                reader.gap(&directory, error.to_string());
            }
            return Vec::new();
        }
    };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        if files.len() == MAX_FILES {
            let text = format!("more than {MAX_FILES} open files: the others were not looked at");
            reader.gap(&directory, text);
            break;
        }
        // Pipes and sockets have no path: their links read `pipe:[1]`.
        let Some(path) = fs::read_link(entry.path()).ok().filter(|path| path.is_absolute()) else {
            continue;
        };
        files.extend(file(process, &entry.file_name().to_string_lossy(), path));
    }
    files
}

fn file(process: &Path, number: &str, path: PathBuf) -> Option<Open> {
    let info = process.join("fdinfo").join(number);
    let text = fs::read_to_string(&info).ok()?;
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let flags = field("flags")?;
    // proc_pid_fdinfo(5) prints flags in octal.
    let bits = i32::from_str_radix(flags, 8).ok()?;
    let shown = path.display();
    Some(Open {
        flags: OFlag::from_bits_truncate(bits),
        mount: field("mnt_id").and_then(|id| id.parse().ok()),
        inode: field("ino").and_then(|inode| inode.parse().ok()),
        evidence: Evidence::of(&info, format!("{shown}: flags {flags}{}", named(bits))),
        link: process.join("fd").join(number),
        path,
    })
}

fn named(bits: i32) -> String {
    let flags = OFlag::from_bits_truncate(bits);
    let access = match bits & OFlag::O_ACCMODE.bits() {
        bits if bits == OFlag::O_WRONLY.bits() => "O_WRONLY",
        bits if bits == OFlag::O_RDWR.bits() => "O_RDWR",
        _ => "O_RDONLY",
    };
    let mut text = format!(" ({access}");
    for (flag, name) in
        [(OFlag::O_DIRECT, "O_DIRECT"), (OFlag::O_SYNC, "O_SYNC"), (OFlag::O_DSYNC, "O_DSYNC")]
    {
        // O_SYNC includes the bits of O_DSYNC.
        if flags.contains(flag) && !(flag == OFlag::O_DSYNC && flags.contains(OFlag::O_SYNC)) {
            text += "|";
            text += name;
        }
    }
    text + ")"
}

impl Open {
    pub(super) fn way(&self) -> Way {
        if self.flags.contains(OFlag::O_DIRECT) {
            Way::Direct
        } else if self.flags.contains(OFlag::O_DSYNC) {
            Way::Synchronous
        } else {
            Way::Buffered
        }
    }

    pub(super) fn writes(&self) -> bool {
        self.flags.bits() & OFlag::O_ACCMODE.bits() != OFlag::O_RDONLY.bits()
    }

    fn reads(&self) -> bool {
        self.flags.bits() & OFlag::O_ACCMODE.bits() != OFlag::O_WRONLY.bits()
    }
}

pub(super) fn of(reader: &mut Reader<'_>, process: &Path, mounts: &mut MountTable) -> Vec<Use> {
    mounts.turn_to(reader, process);
    let mut uses: Vec<Use> = Vec::new();
    for open in open(reader, process) {
        // O_PATH descriptors permit no I/O.
        if open.flags.intersects(OFlag::O_PATH | OFlag::O_DIRECTORY) {
            continue;
        }
        let Some(place) = place(reader, mounts, process, &open.path, open.mount) else {
            continue;
        };
        let metadata = metadata(mounts, place, &open.link);
        // Character devices and FIFOs cause no block I/O.
        if metadata
            .as_ref()
            .is_some_and(|metadata| !metadata.is_file() && !metadata.file_type().is_block_device())
        {
            continue;
        }
        let path = open.path.display().to_string();
        let (way, reads, writes) = (open.way(), open.reads(), open.writes());
        let identity = writes.then(|| identity(mounts, place, open.inode, &open.path));
        let same = |known: &Use| {
            known.place == place && known.way == way && (known.reads, known.writes) == (reads, writes)
        };
        // Written files stay separate: each may have other writers.
        if uses.iter().any(|known| same(known) && (!writes || known.path == path)) {
            continue;
        }
        // Only buffered writes may be charged to an earlier user of the file.
        let cached = writes && way == Way::Buffered;
        let created = metadata.filter(|_| cached).and_then(|metadata| metadata.created().ok());
        uses.push(Use {
            place,
            path,
            way,
            reads,
            writes,
            identity,
            created,
            evidence: open.evidence,
            older: None,
            others: Vec::new(),
        });
    }
    uses.extend(mapped(reader, process, mounts));
    uses
}

/// Metadata of an open file. `None` on network file systems and FUSE, where stat(2) may block.
fn metadata(mounts: &MountTable, place: Place, link: &Path) -> Option<fs::Metadata> {
    let Place::FileSystem(index) = place else {
        return None;
    };
    let near = matches!(mounts.found[index].nature, Nature::Disk | Nature::Memory);
    near.then(|| fs::metadata(link).ok()).flatten()
}

fn mapped(reader: &mut Reader<'_>, process: &Path, mounts: &mut MountTable) -> Vec<Use> {
    let file = process.join("maps");
    let Some(text) = reader.text(&file) else {
        return Vec::new();
    };
    let mut uses: Vec<Use> = Vec::new();
    for line in text.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(mode), Some(device), Some(inode)) = (fields.nth(1), fields.nth(1), fields.next()) else {
            continue;
        };
        let path = line.find('/').map(|start| PathBuf::from(&line[start..]));
        // Writable and shared, as in `rw-s`: writes to private mappings never reach the file.
        let (Some(path), true) = (path, mode.get(1..2) == Some("w") && mode.get(3..4) == Some("s")) else {
            continue;
        };
        let Some(number) = hexadecimal(device) else {
            continue;
        };
        let Some(row) = mounts.row_of_number(number) else {
            continue;
        };
        let Some(place) = placed(reader, mounts, process, &row) else {
            continue;
        };
        let identity = Some(identity(mounts, place, inode.parse().ok(), &path));
        let path = path.display().to_string();
        // A file is often mapped in several parts.
        if uses.iter().any(|known| known.place == place && known.path == path) {
            continue;
        }
        let shown = format!("{mode} {device} {path}");
        let evidence = Evidence::of(&file, shown);
        uses.push(Use {
            place,
            path,
            way: Way::Mapped,
            reads: false,
            writes: true,
            identity,
            created: None,
            evidence,
            older: None,
            others: Vec::new(),
        });
    }
    uses
}

fn hexadecimal(text: &str) -> Option<Number> {
    let (major, minor) = text.split_once(':')?;
    Some(Number { major: u64::from_str_radix(major, 16).ok()?, minor: u64::from_str_radix(minor, 16).ok()? })
}

/// Location of an open file; `None` for pseudo file systems.
fn place(
    reader: &mut Reader<'_>,
    mounts: &mut MountTable,
    process: &Path,
    path: &Path,
    id: Option<u64>,
) -> Option<Place> {
    if let Some(disk) = reader.disks.of_node(path) {
        return Some(Place::Disk(disk));
    }
    let row = mounts.row(id, path)?;
    placed(reader, mounts, process, &row)
}

fn placed(reader: &mut Reader<'_>, mounts: &mut MountTable, process: &Path, row: &Row) -> Option<Place> {
    if Nature::of(&row.mount.kind) == Nature::Pseudo {
        return None;
    }
    let file = process.join("mountinfo").display().to_string();
    let index = mounts.enter(&mut reader.disks, &file, row);
    // Unused file systems are not reported.
    mounts.found[index].used = true;
    Some(Place::FileSystem(index))
}

fn identity(mounts: &MountTable, place: Place, inode: Option<u64>, path: &Path) -> Identity {
    match (place, inode) {
        // Several device nodes of a disk share one page cache.
        (Place::Disk(disk), _) => Identity { device: disk, inode: None, path: None },
        (Place::FileSystem(index), Some(_)) => {
            Identity { device: mounts.found[index].number, inode, path: None }
        }
        (Place::FileSystem(index), None) => {
            Identity { device: mounts.found[index].number, inode, path: Some(path.to_owned()) }
        }
    }
}

/// Identity of an open file; `None` for pseudo file systems.
pub(super) fn identify(
    reader: &mut Reader<'_>,
    mounts: &mut MountTable,
    process: &Path,
    open: &Open,
) -> Option<Identity> {
    mounts.turn_to(reader, process);
    let place = place(reader, mounts, process, &open.path, open.mount)?;
    Some(identity(mounts, place, open.inode, &open.path))
}
