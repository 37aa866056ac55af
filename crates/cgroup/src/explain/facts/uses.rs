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

use block::device::DeviceNumber;
use nix::fcntl::OFlag;

use super::{
    AccessMode, Evidence, FileUse, IoLocation, WrittenFileId,
    mount_rows::MountRow,
    mounts::MountTable,
    reader::{FactReader, has_ended},
};
use crate::file_system_class::FileSystemClass;

const MAX_FILES: usize = 65_536;

pub(super) struct OpenFile {
    pub(super) path: PathBuf,
    pub(super) flags: OFlag,
    pub(super) mount: Option<u64>,
    /// Inode number, which fdinfo shows since Linux 5.14.
    pub(super) inode: Option<u64>,
    /// The link in /proc/PID/fd, which reaches the file even if its path is not visible here.
    link: PathBuf,
    pub(super) evidence: Evidence,
}

pub(super) fn open_files(reader: &mut FactReader<'_>, process: &Path) -> Vec<OpenFile> {
    let directory = process.join("fd");
    let entries = match fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) => {
            if !has_ended(&error) {
                reader.gap(&directory, error.to_string());
            }
            return Vec::new();
        }
    };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        if files.len() == MAX_FILES {
            let text = format!("more than {MAX_FILES} open files: the rest were not examined");
            reader.gap(&directory, text);
            break;
        }
        // Pipes and sockets have no path: their links read `pipe:[1]`.
        let Some(path) = fs::read_link(entry.path()).ok().filter(|path| path.is_absolute()) else {
            continue;
        };
        files.extend(open_file(process, &entry.file_name().to_string_lossy(), path));
    }
    files
}

fn open_file(process: &Path, number: &str, path: PathBuf) -> Option<OpenFile> {
    let info = process.join("fdinfo").join(number);
    let text = fs::read_to_string(&info).ok()?;
    let field =
        |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let flags = field("flags")?;
    // proc_pid_fdinfo(5) prints flags in octal.
    let bits = i32::from_str_radix(flags, 8).ok()?;
    let shown = path.display();
    Some(OpenFile {
        flags: OFlag::from_bits_truncate(bits),
        mount: field("mnt_id").and_then(|id| id.parse().ok()),
        inode: field("ino").and_then(|inode| inode.parse().ok()),
        evidence: Evidence::of(&info, format!("{shown}: flags {flags}{}", flag_names(bits))),
        link: process.join("fd").join(number),
        path,
    })
}

fn flag_names(bits: i32) -> String {
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

impl OpenFile {
    pub(super) fn access_mode(&self) -> AccessMode {
        if self.flags.contains(OFlag::O_DIRECT) {
            AccessMode::Direct
        } else if self.flags.contains(OFlag::O_DSYNC) {
            AccessMode::Synchronous
        } else {
            AccessMode::Buffered
        }
    }

    pub(super) fn writes(&self) -> bool {
        self.flags.bits() & OFlag::O_ACCMODE.bits() != OFlag::O_RDONLY.bits()
    }

    fn reads(&self) -> bool {
        self.flags.bits() & OFlag::O_ACCMODE.bits() != OFlag::O_WRONLY.bits()
    }
}

pub(super) fn file_uses(
    reader: &mut FactReader<'_>,
    process: &Path,
    mounts: &mut MountTable,
) -> Vec<FileUse> {
    mounts.select_process(reader, process);
    let mut uses: Vec<FileUse> = Vec::new();
    for open in open_files(reader, process) {
        // O_PATH descriptors permit no I/O.
        if open.flags.intersects(OFlag::O_PATH | OFlag::O_DIRECTORY) {
            continue;
        }
        let Some(location) = location_of_file(reader, mounts, process, &open.path, open.mount) else {
            continue;
        };
        let metadata = metadata(mounts, location, &open.link);
        // Character devices and FIFOs cause no block I/O.
        if metadata
            .as_ref()
            .is_some_and(|metadata| !metadata.is_file() && !metadata.file_type().is_block_device())
        {
            continue;
        }
        let path = open.path.display().to_string();
        let (access_mode, reads, writes) = (open.access_mode(), open.reads(), open.writes());
        let identity = writes.then(|| file_id(mounts, location, open.inode, &open.path));
        let same = |known: &FileUse| {
            known.location == location
                && known.access_mode == access_mode
                && (known.reads, known.writes) == (reads, writes)
        };
        // Written files stay separate: each may have other writers.
        if uses.iter().any(|known| same(known) && (!writes || known.path == path)) {
            continue;
        }
        // The kernel may charge buffered writes, but no others, to an earlier user of the file.
        let cached = writes && access_mode == AccessMode::Buffered;
        let created = metadata.filter(|_| cached).and_then(|metadata| metadata.created().ok());
        uses.push(FileUse {
            location,
            path,
            access_mode,
            reads,
            writes,
            identity,
            created,
            evidence: open.evidence,
            older_than_processes: None,
            other_writers: Vec::new(),
        });
    }
    uses.extend(mapped_files(reader, process, mounts));
    uses
}

/// Metadata of an open file. `None` on network file systems and FUSE, where stat(2) may block.
fn metadata(mounts: &MountTable, location: IoLocation, link: &Path) -> Option<fs::Metadata> {
    let IoLocation::FileSystem(index) = location else {
        return None;
    };
    let is_local = matches!(mounts.found[index].class, FileSystemClass::Disk | FileSystemClass::Memory);
    is_local.then(|| fs::metadata(link).ok()).flatten()
}

fn mapped_files(reader: &mut FactReader<'_>, process: &Path, mounts: &mut MountTable) -> Vec<FileUse> {
    let file = process.join("maps");
    let Some(text) = reader.text(&file) else {
        return Vec::new();
    };
    let mut uses: Vec<FileUse> = Vec::new();
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
        let Some(location) = location_of_mount(reader, mounts, process, &row) else {
            continue;
        };
        let identity = Some(file_id(mounts, location, inode.parse().ok(), &path));
        let path = path.display().to_string();
        // A file is often mapped in several parts.
        if uses.iter().any(|known| known.location == location && known.path == path) {
            continue;
        }
        let shown = format!("{mode} {device} {path}");
        let evidence = Evidence::of(&file, shown);
        uses.push(FileUse {
            location,
            path,
            access_mode: AccessMode::Mapped,
            reads: false,
            writes: true,
            identity,
            created: None,
            evidence,
            older_than_processes: None,
            other_writers: Vec::new(),
        });
    }
    uses
}

fn hexadecimal(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.split_once(':')?;
    Some(DeviceNumber {
        major: u64::from_str_radix(major, 16).ok()?,
        minor: u64::from_str_radix(minor, 16).ok()?,
    })
}

/// Location of an open file; `None` for pseudo file systems.
fn location_of_file(
    reader: &mut FactReader<'_>,
    mounts: &mut MountTable,
    process: &Path,
    path: &Path,
    id: Option<u64>,
) -> Option<IoLocation> {
    if let Some(disk) = reader.disks.disk_of_node(path) {
        return Some(IoLocation::Disk(disk));
    }
    let row = mounts.row(id, path)?;
    location_of_mount(reader, mounts, process, &row)
}

fn location_of_mount(
    reader: &mut FactReader<'_>,
    mounts: &mut MountTable,
    process: &Path,
    row: &MountRow,
) -> Option<IoLocation> {
    if FileSystemClass::of(&row.mount.kind) == FileSystemClass::Pseudo {
        return None;
    }
    let file = process.join("mountinfo").display().to_string();
    let index = mounts.enter(&mut reader.disks, &file, row);
    // Unused file systems are not reported.
    mounts.found[index].used = true;
    Some(IoLocation::FileSystem(index))
}

fn file_id(mounts: &MountTable, location: IoLocation, inode: Option<u64>, path: &Path) -> WrittenFileId {
    match (location, inode) {
        // Several device nodes of a disk share one page cache.
        (IoLocation::Disk(disk), _) => WrittenFileId { device: disk, inode: None, path: None },
        (IoLocation::FileSystem(index), Some(_)) => {
            WrittenFileId { device: mounts.found[index].number, inode, path: None }
        }
        (IoLocation::FileSystem(index), None) => {
            WrittenFileId { device: mounts.found[index].number, inode, path: Some(path.to_owned()) }
        }
    }
}

/// Identity of an open file; `None` for pseudo file systems.
pub(super) fn identify(
    reader: &mut FactReader<'_>,
    mounts: &mut MountTable,
    process: &Path,
    open: &OpenFile,
) -> Option<WrittenFileId> {
    mounts.select_process(reader, process);
    let location = location_of_file(reader, mounts, process, &open.path, open.mount)?;
    Some(file_id(mounts, location, open.inode, &open.path))
}
