//! What was read of a cgroup, its processes, their files and the disks below, each with the file it
//! was read from.
//!
//! ```text
//!   cgroup ──► levels, from itself to the root: controllers, limits            levels.rs
//!     └─ processes ──► open files, shared mappings ──► file system ──► disk    uses.rs, mounts.rs, disks.rs
//!                          └─ who else writes to them                          sharing.rs
//!   swap, io.cost, io.latency, schedulers                                      beside.rs
//!   what the processes wrote, and what the cgroup was charged with             accounts.rs
//! ```
//!
//! Findings are made of this alone, so a table of constructed trees tests every one of them. Facts
//! that a finding cites keep their [`Evidence`].
//!
//! Collecting reads and nothing else: no file is written, no device opened.

mod accounts;
mod beside;
mod collect;
mod disks;
mod levels;
mod mounts;
mod reader;
mod rows;
mod sharing;
mod uses;

use std::{path::PathBuf, time::SystemTime};

use block::device::Number;
pub(crate) use collect::{Subject, collect, spot};

use policy::steering::Rates;

use crate::{control_group::Version, nature::Nature};

/// A file and what it says, for somebody to look at it himself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Evidence {
    /// The file's path, or what else was looked at.
    pub(crate) file: String,
    /// Its text, or the line of it that counts.
    pub(crate) value: String,
}

impl Evidence {
    pub(crate) fn new(file: impl Into<String>, value: impl Into<String>) -> Self {
        Self { file: file.into(), value: value.into() }
    }
}

#[derive(Debug)]
pub(crate) struct Facts {
    /// The cgroup's name from its mount, such as `/system.slice/nginx.service`.
    pub(crate) name: String,
    /// The only process that was asked about, if one was.
    pub(crate) only: Option<i32>,
    pub(crate) version: Version,
    /// Where the hierarchy with the block I/O controller is mounted.
    pub(crate) hierarchy: Option<Evidence>,
    pub(crate) kernel: Kernel,
    /// The cgroup and those above it, the root last.
    pub(crate) levels: Vec<Level>,
    /// Cgroups below it that hold processes.
    pub(crate) inner: Vec<Level>,
    pub(crate) memory: Memory,
    pub(crate) processes: Vec<Process>,
    /// What nobody has open, but a limit is for: uses of the file systems on limited disks.
    pub(crate) possible: Vec<Use>,
    pub(crate) file_systems: Vec<FileSystem>,
    pub(crate) disks: Vec<Disk>,
    pub(crate) swaps: Vec<Swap>,
    /// What the cgroup has in swap space, where that is counted.
    pub(crate) swapped: Option<Evidence>,
    /// Pages waiting to be written in the name of a cgroup without processes.
    pub(crate) left_dirty: Option<Evidence>,
    /// What was written, and in whose name.
    pub(crate) accounts: Option<Accounts>,
    pub(crate) beside: Vec<Beside>,
    pub(crate) gaps: Vec<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// Such as (6, 12, 9); (0, 0, 0) where it is not told.
    pub(crate) release: (u32, u32, u32),
    pub(crate) evidence: Evidence,
}

/// Where the memory controller is, which says whose a dirty page is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Memory {
    Unified,
    Legacy(Evidence),
    Absent(Evidence),
}

/// A cgroup on the way to the root.
#[derive(Debug, Clone)]
pub(crate) struct Level {
    pub(crate) name: String,
    pub(crate) root: bool,
    pub(crate) has_limits: bool,
    /// Version 2: what it has.
    pub(crate) controllers: Option<Evidence>,
    /// Version 2: what its children have.
    pub(crate) subtree: Option<Evidence>,
    /// Version 2: cgroup.type, if not `domain`.
    pub(crate) kind: Option<Evidence>,
    pub(crate) limits: Vec<Limit>,
    /// The files of limits, whatever they say.
    pub(crate) files: Vec<Evidence>,
}

impl Level {
    /// Whether it has this controller (version 2).
    pub(crate) fn has(&self, controller: &str) -> bool {
        lists(self.controllers.as_ref(), controller)
    }

    /// Whether its children have it (version 2).
    pub(crate) fn gives(&self, controller: &str) -> bool {
        lists(self.subtree.as_ref(), controller)
    }

    pub(crate) fn limit(&self, disk: Number) -> Option<&Limit> {
        self.limits.iter().find(|limit| limit.disk == disk)
    }
}

fn lists(text: Option<&Evidence>, controller: &str) -> bool {
    text.is_some_and(|text| text.value.split_ascii_whitespace().any(|word| word == controller))
}

#[derive(Debug, Clone)]
pub(crate) struct Limit {
    pub(crate) disk: Number,
    pub(crate) rates: Rates,
    /// Version 1 has a file for each rate.
    pub(crate) evidence: Vec<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) name: String,
    pub(crate) began: Option<SystemTime>,
    /// The cgroup it is in, which may be below the one that was asked about.
    pub(crate) group: String,
    pub(crate) kernel: Option<Evidence>,
    pub(crate) uses: Vec<Use>,
    pub(crate) swapped: Option<Evidence>,
}

/// A way in which a process reads or writes something.
#[derive(Debug, Clone)]
pub(crate) struct Use {
    pub(crate) place: Place,
    /// The file, as the process sees it.
    pub(crate) path: String,
    pub(crate) way: Way,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    pub(crate) evidence: Evidence,
    /// Which file it is, if it is written to.
    pub(crate) identity: Option<Identity>,
    /// When the file was made, if it is written through the page cache and that is told.
    pub(crate) created: Option<SystemTime>,
    /// That the file, which is written through the page cache, is older than every process of the
    /// cgroup.
    pub(crate) older: Option<Evidence>,
    /// Processes of other cgroups that write to it through the page cache too.
    pub(crate) others: Vec<Other>,
}

/// What tells a file from all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The file system's, or the disk's.
    device: Number,
    inode: Option<u64>,
    /// Where the inode is not told.
    path: Option<PathBuf>,
}

/// How requests come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Through the page cache.
    Buffered,
    /// Past it: `O_DIRECT`.
    Direct,
    /// Through it, but each write waits for the disk: `O_SYNC` or `O_DSYNC`.
    Synchronous,
    /// By writing to a shared mapping.
    Mapped,
}

/// A process of another cgroup with the same file open for writing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) pid: i32,
    pub(crate) group: String,
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In this one of [`Facts::file_systems`].
    FileSystem(usize),
    /// It is a disk, or a part of one.
    Disk(Number),
}

/// A file system that is used, or could be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileSystem {
    /// Its own number, which tells it from others wherever it is mounted.
    pub(crate) number: Number,
    pub(crate) kind: String,
    pub(crate) point: String,
    pub(crate) super_options: String,
    pub(crate) nature: Nature,
    pub(crate) evidence: Evidence,
    pub(crate) below: Below,
    pub(crate) partition: Option<Evidence>,
    /// Whether a file of it is open, or a limit is for its disk.
    pub(crate) used: bool,
    /// The overlay through which it was reached.
    pub(crate) overlay: Option<Evidence>,
}

/// What a file system stores its data on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Below {
    Disk(Number),
    /// No disk, by the nature of the file system.
    NoDisk,
    /// One that was not found.
    Unknown(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Disk {
    pub(crate) number: Number,
    pub(crate) node: String,
    pub(crate) kind: DiskKind,
    pub(crate) parts: Vec<Number>,
    pub(crate) evidence: Vec<Evidence>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DiskKind {
    /// The bottom, as far as this machine knows.
    Plain,
    /// In memory: zram or brd.
    Memory,
    Mapper(Mapper),
    /// Software RAID, by its level, such as `raid5`.
    Raid(String),
    Loop {
        /// Which file system the file is in, among [`Facts::file_systems`].
        on: Option<usize>,
        /// Whether it is read and written past the page cache.
        direct: bool,
    },
    Gone,
}

/// What a device mapper does, as far as its names tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mapper {
    /// It encrypts, and writes by threads of its own.
    Crypt,
    /// RAID of some level, as LVM makes it.
    Raid,
    Other,
}

#[derive(Debug, Clone)]
pub(crate) struct Swap {
    pub(crate) disk: Option<Number>,
    pub(crate) evidence: Evidence,
}

/// Counts of what the processes of a cgroup wrote, and of what it was charged with.
#[derive(Debug, Clone)]
pub(crate) struct Accounts {
    /// What its processes wrote, to disks or into the page cache.
    pub(crate) written_bytes: u64,
    pub(crate) charged_bytes: u64,
    /// What waits to be written in its name.
    pub(crate) waiting_bytes: u64,
    pub(crate) evidence: Vec<Evidence>,
}

/// Less than this may be missing for many reasons: metadata, processes that came from elsewhere,
/// counts read one after the other.
const LEAST_MISSING_BYTES: u64 = 16 << 20;

impl Accounts {
    /// Whether a good part of what was written was charged to somebody else.
    pub(crate) fn charged_elsewhere(&self) -> bool {
        let told = self.charged_bytes.saturating_add(self.waiting_bytes);
        let missing = self.written_bytes.saturating_sub(told);
        missing >= LEAST_MISSING_BYTES && missing > self.written_bytes / 4
    }
}

/// Something else that holds back I/O of the same disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Beside {
    pub(crate) what: BesideKind,
    pub(crate) disk: Number,
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BesideKind {
    Cost,
    Latency,
    Bfq,
}

impl Facts {
    pub(crate) fn disk(&self, number: Number) -> Option<&Disk> {
        self.disks.iter().find(|disk| disk.number == number)
    }

    pub(crate) fn node(&self, number: Number) -> String {
        self.disk(number).map_or_else(|| number.to_string(), |disk| disk.node.clone())
    }

    pub(crate) fn disk_of(&self, place: Place) -> Option<Number> {
        match place {
            Place::Disk(number) => Some(number),
            Place::FileSystem(index) => match self.file_systems[index].below {
                Below::Disk(number) => Some(number),
                Below::NoDisk | Below::Unknown(_) => None,
            },
        }
    }

    pub(crate) fn own(&self) -> &Level {
        &self.levels[0]
    }

    pub(crate) fn level_of(&self, group: &str) -> &Level {
        self.inner.iter().find(|level| level.name == group).unwrap_or_else(|| self.own())
    }
}
