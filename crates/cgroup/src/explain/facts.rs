//! State of a cgroup, its processes, their files and the disks below. Each fact names the kernel's
//! file that it was read from.
//!
//! ```text
//!   cgroup ──► levels, from itself to the root: controllers, limits            levels.rs
//!     └─ processes ──► open files, shared mappings ──► file system ──► disk    uses.rs, mounts.rs, disks.rs
//!                          └─ other writers of these files                     other_writers.rs
//!   swap, io.cost, io.latency, schedulers                                      other_controls.rs
//!   bytes that the processes wrote, bytes that the cgroup was charged with     write_accounting.rs
//! ```
//!
//! Input of `findings`, whose tests construct these types themselves. Collecting never writes and
//! opens no disk.

mod collect;
mod disks;
mod levels;
mod mount_rows;
mod mounts;
mod other_controls;
mod other_writers;
mod reader;
mod uses;
mod write_accounting;

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use block::device::DeviceNumber;
pub(crate) use collect::{ExplainSubject, collect, disks_of_directory};

use policy::steering::IoMaxRates;
use serde::Serialize;

use crate::{control_group::Version, file_system_class::FileSystemClass};

/// A file and its content, which a finding cites.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Evidence {
    pub(crate) file: String,
    /// The whole text, or the relevant line.
    pub(crate) value: String,
}

impl Evidence {
    pub(crate) fn new(file: impl Into<String>, value: impl Into<String>) -> Self {
        Self { file: file.into(), value: value.into() }
    }

    pub(crate) fn of(file: &Path, value: impl Into<String>) -> Self {
        Self::new(file.display().to_string(), value)
    }
}

#[derive(Debug)]
pub(crate) struct CgroupFacts {
    /// Path from the mount, such as `/system.slice/nginx.service`.
    pub(crate) name: String,
    /// The only process to examine; `None` for all processes of the cgroup.
    pub(crate) pid: Option<i32>,
    pub(crate) version: Version,
    /// Mount of the hierarchy that has the block I/O controller (`io` in v2, `blkio` in v1).
    pub(crate) hierarchy: Option<Evidence>,
    pub(crate) kernel: KernelRelease,
    /// The cgroup, then its ancestors up to the root.
    pub(crate) levels: Vec<CgroupLevel>,
    /// Descendants that have examined processes or limits.
    pub(crate) descendants: Vec<CgroupLevel>,
    pub(crate) memory: MemoryController,
    pub(crate) processes: Vec<ExaminedProcess>,
    /// Hypothetical uses of the file systems on limited disks, if no process has a file open.
    pub(crate) hypothetical_uses: Vec<FileUse>,
    pub(crate) file_systems: Vec<MountedFileSystem>,
    pub(crate) disks: Vec<DiskFacts>,
    pub(crate) swaps: Vec<SwapArea>,
    pub(crate) swapped: Option<Evidence>,
    /// Dirty pages charged to a cgroup that has no process any more.
    pub(crate) orphaned_dirty_pages: Option<Evidence>,
    /// Bytes that the processes wrote, compared with bytes that the cgroup was charged for.
    pub(crate) write_accounting: Option<WriteAccounting>,
    pub(crate) other_controls: Vec<OtherControl>,
    /// Files that could not be read, and other limits of the examination.
    pub(crate) unexamined: Vec<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct KernelRelease {
    /// `(6, 12, 9)` for 6.12.9; (0, 0, 0) if unknown.
    pub(crate) release: (u32, u32, u32),
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemoryController {
    Unified,
    Legacy(Evidence),
    Absent(Evidence),
}

#[derive(Debug, Clone)]
pub(crate) struct CgroupLevel {
    pub(crate) name: String,
    pub(crate) root: bool,
    pub(crate) has_limits: bool,
    pub(crate) controllers: Option<Evidence>,
    /// Content of cgroup.subtree_control.
    pub(crate) subtree_control: Option<Evidence>,
    pub(crate) kind: Option<Evidence>,
    pub(crate) limits: Vec<LevelLimit>,
    pub(crate) files: Vec<Evidence>,
}

impl CgroupLevel {
    pub(crate) fn has(&self, controller: &str) -> bool {
        lists_controller(self.controllers.as_ref(), controller)
    }

    pub(crate) fn enables_for_children(&self, controller: &str) -> bool {
        lists_controller(self.subtree_control.as_ref(), controller)
    }

    pub(crate) fn limit(&self, disk: DeviceNumber) -> Option<&LevelLimit> {
        self.limits.iter().find(|limit| limit.disk == disk)
    }
}

fn lists_controller(text: Option<&Evidence>, controller: &str) -> bool {
    text.is_some_and(|text| text.value.split_ascii_whitespace().any(|name| name == controller))
}

#[derive(Debug, Clone)]
pub(crate) struct LevelLimit {
    pub(crate) disk: DeviceNumber,
    pub(crate) rates: IoMaxRates,
    pub(crate) evidence: Vec<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct ExaminedProcess {
    pub(crate) pid: i32,
    pub(crate) name: String,
    pub(crate) started: Option<SystemTime>,
    pub(crate) group: String,
    /// Set if it is a kernel thread.
    pub(crate) kernel: Option<Evidence>,
    pub(crate) uses: Vec<FileUse>,
    pub(crate) swapped: Option<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct FileUse {
    pub(crate) location: IoLocation,
    /// Path in the mount namespace of the process.
    pub(crate) path: String,
    pub(crate) access_mode: AccessMode,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    pub(crate) evidence: Evidence,
    /// Set if the file is written to.
    pub(crate) identity: Option<WrittenFileId>,
    /// Creation time; set if the file is written through the page cache.
    pub(crate) created: Option<SystemTime>,
    /// Set if a file written through the page cache is older than every process of the cgroup.
    pub(crate) older_than_processes: Option<Evidence>,
    pub(crate) other_writers: Vec<OtherWriter>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WrittenFileId {
    device: DeviceNumber,
    inode: Option<u64>,
    /// Stands in for an unknown inode.
    path: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessMode {
    Buffered,
    /// `O_DIRECT`.
    Direct,
    /// Through the page cache; each write waits for the disk: `O_SYNC` or `O_DSYNC`.
    Synchronous,
    Mapped,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OtherWriter {
    pub(crate) pid: i32,
    pub(crate) group: String,
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IoLocation {
    /// Index in [`CgroupFacts::file_systems`].
    FileSystem(usize),
    Disk(DeviceNumber),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountedFileSystem {
    pub(crate) number: DeviceNumber,
    pub(crate) kind: String,
    pub(crate) mount_point: String,
    pub(crate) super_options: String,
    pub(crate) class: FileSystemClass,
    pub(crate) evidence: Evidence,
    pub(crate) backing_disk: BackingDisk,
    pub(crate) partition: Option<Evidence>,
    pub(crate) used: bool,
    pub(crate) overlay: Option<Evidence>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BackingDisk {
    Disk(DeviceNumber),
    NoDisk,
    Unknown(String),
}

#[derive(Debug, Clone)]
pub(crate) struct DiskFacts {
    pub(crate) number: DeviceNumber,
    pub(crate) node: String,
    pub(crate) kind: DiskKind,
    /// Disks directly below, such as the members of an array.
    pub(crate) lower_disks: Vec<DeviceNumber>,
    pub(crate) evidence: Vec<Evidence>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DiskKind {
    Plain,
    /// zram or brd.
    Memory,
    Mapper(Mapper),
    /// The RAID level, such as `raid5`.
    Raid(String),
    Loop {
        /// Index in [`CgroupFacts::file_systems`].
        file_system: Option<usize>,
        direct: bool,
    },
    Gone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapper {
    Crypt,
    Raid,
    Other,
}

#[derive(Debug, Clone)]
pub(crate) struct SwapArea {
    pub(crate) disk: Option<DeviceNumber>,
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone)]
pub(crate) struct WriteAccounting {
    pub(crate) written_bytes: u64,
    pub(crate) charged_bytes: u64,
    pub(crate) dirty_bytes: u64,
    pub(crate) evidence: Vec<Evidence>,
}

/// Threshold below which a difference proves nothing: metadata, processes that were moved here, and
/// counters read at different times can cause as much.
const MIN_MISSING_BYTES: u64 = 16 << 20;

impl WriteAccounting {
    pub(crate) fn charged_elsewhere(&self) -> bool {
        // Bytes that wait in the page cache are charged only when they are written.
        let accounted = self.charged_bytes.saturating_add(self.dirty_bytes);
        let missing = self.written_bytes.saturating_sub(accounted);
        // The second condition allows for counters that are incomplete in proportion to the volume.
        missing >= MIN_MISSING_BYTES && missing > self.written_bytes / 4
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OtherControl {
    pub(crate) kind: OtherControlKind,
    pub(crate) disk: DeviceNumber,
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherControlKind {
    Cost,
    /// A latency target of the cgroup itself.
    LatencyTarget,
    /// A latency target of a sibling of the cgroup or of an ancestor.
    SiblingLatencyTarget,
    Bfq,
}

impl CgroupFacts {
    pub(crate) fn disk(&self, number: DeviceNumber) -> Option<&DiskFacts> {
        self.disks.iter().find(|disk| disk.number == number)
    }

    pub(crate) fn node(&self, number: DeviceNumber) -> String {
        self.disk(number).map_or_else(|| number.to_string(), |disk| disk.node.clone())
    }

    pub(crate) fn disk_of(&self, location: IoLocation) -> Option<DeviceNumber> {
        match location {
            IoLocation::Disk(number) => Some(number),
            IoLocation::FileSystem(index) => match self.file_systems[index].backing_disk {
                BackingDisk::Disk(number) => Some(number),
                BackingDisk::NoDisk | BackingDisk::Unknown(_) => None,
            },
        }
    }

    pub(crate) fn own(&self) -> &CgroupLevel {
        &self.levels[0]
    }

    /// Level of a descendant cgroup; the cgroup itself for all others.
    pub(crate) fn level_of(&self, group: &str) -> &CgroupLevel {
        self.descendants.iter().find(|level| level.name == group).unwrap_or_else(|| self.own())
    }
}
