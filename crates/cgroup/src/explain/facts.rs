//! The state of a cgroup, its processes, their files and the disks below, each with its source
//! file.
//!
//! ```text
//!   cgroup ──► levels, from itself to the root: controllers, limits            levels.rs
//!     └─ processes ──► open files, shared mappings ──► file system ──► disk    uses.rs, mounts.rs, disks.rs
//!                          └─ other writers of these files                     sharing.rs
//!   swap, io.cost, io.latency, schedulers                                      beside.rs
//!   bytes that the processes wrote, bytes that the cgroup was charged with     accounts.rs
//! ```
//!
//! The input of `findings`, which tests construct. Collecting never writes and opens no disk.

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

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

use block::device::Number;
pub(crate) use collect::{Subject, collect, spot};

use policy::steering::Rates;

use crate::{control_group::Version, nature::Nature};

/// A file and its content, which a finding cites.
#[derive(Debug, Clone, PartialEq, Eq)]
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
pub(crate) struct Facts {
    /// Path from the mount, such as `/system.slice/nginx.service`.
    pub(crate) name: String,
    /// The only process to examine; `None` for all processes of the cgroup.
    pub(crate) only: Option<i32>,
    pub(crate) version: Version,
    /// Mount of the controller of block I/O.
    pub(crate) hierarchy: Option<Evidence>,
    pub(crate) kernel: Kernel,
    /// The cgroup, then its ancestors up to the root.
    pub(crate) levels: Vec<Level>,
    pub(crate) inner: Vec<Level>,
    pub(crate) memory: Memory,
    pub(crate) processes: Vec<Process>,
    /// Hypothetical uses of the file systems on limited disks, if no process has a file open.
    pub(crate) possible: Vec<Use>,
    pub(crate) file_systems: Vec<FileSystem>,
    pub(crate) disks: Vec<Disk>,
    pub(crate) swaps: Vec<Swap>,
    pub(crate) swapped: Option<Evidence>,
    /// Dirty pages charged to a cgroup that has no process any more.
    pub(crate) left_dirty: Option<Evidence>,
    pub(crate) accounts: Option<Accounts>,
    pub(crate) beside: Vec<Beside>,
    pub(crate) gaps: Vec<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// `(6, 12, 9)` for 6.12.9; (0, 0, 0) if unknown.
    pub(crate) release: (u32, u32, u32),
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Memory {
    Unified,
    Legacy(Evidence),
    Absent(Evidence),
}

#[derive(Debug, Clone)]
pub(crate) struct Level {
    pub(crate) name: String,
    pub(crate) root: bool,
    pub(crate) has_limits: bool,
    pub(crate) controllers: Option<Evidence>,
    pub(crate) subtree: Option<Evidence>,
    pub(crate) kind: Option<Evidence>,
    pub(crate) limits: Vec<Limit>,
    pub(crate) files: Vec<Evidence>,
}

impl Level {
    pub(crate) fn has(&self, controller: &str) -> bool {
        lists(self.controllers.as_ref(), controller)
    }

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
    pub(crate) evidence: Vec<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    pub(crate) name: String,
    pub(crate) began: Option<SystemTime>,
    pub(crate) group: String,
    pub(crate) kernel: Option<Evidence>,
    pub(crate) uses: Vec<Use>,
    pub(crate) swapped: Option<Evidence>,
}

#[derive(Debug, Clone)]
pub(crate) struct Use {
    pub(crate) place: Place,
    /// Path in the mount namespace of the process.
    pub(crate) path: String,
    pub(crate) way: Way,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    pub(crate) evidence: Evidence,
    /// Set if the file is written to.
    pub(crate) identity: Option<Identity>,
    /// Set if the file is written through the page cache.
    pub(crate) created: Option<SystemTime>,
    /// Set if a file written through the page cache is older than every process of the cgroup.
    pub(crate) older: Option<Evidence>,
    pub(crate) others: Vec<Other>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    device: Number,
    inode: Option<u64>,
    /// Stands in for an unknown inode.
    path: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Buffered,
    /// `O_DIRECT`.
    Direct,
    /// Through the page cache; each write waits for the disk: `O_SYNC` or `O_DSYNC`.
    Synchronous,
    Mapped,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) pid: i32,
    pub(crate) group: String,
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Index in [`Facts::file_systems`].
    FileSystem(usize),
    Disk(Number),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub(crate) number: Number,
    pub(crate) kind: String,
    pub(crate) point: String,
    pub(crate) super_options: String,
    pub(crate) nature: Nature,
    pub(crate) evidence: Evidence,
    pub(crate) below: Below,
    pub(crate) partition: Option<Evidence>,
    pub(crate) used: bool,
    pub(crate) overlay: Option<Evidence>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Below {
    Disk(Number),
    NoDisk,
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
    Plain,
    /// zram or brd.
    Memory,
    Mapper(Mapper),
    /// The RAID level, such as `raid5`.
    Raid(String),
    Loop {
        /// Index in [`Facts::file_systems`].
        on: Option<usize>,
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
pub(crate) struct Swap {
    pub(crate) disk: Option<Number>,
    pub(crate) evidence: Evidence,
}

#[derive(Debug, Clone)]
pub(crate) struct Accounts {
    pub(crate) written_bytes: u64,
    pub(crate) charged_bytes: u64,
    pub(crate) waiting_bytes: u64,
    pub(crate) evidence: Vec<Evidence>,
}

/// Threshold below which a difference proves nothing: metadata, processes that were moved here, and
/// counters read at different times explain as much.
const LEAST_MISSING_BYTES: u64 = 16 << 20;

impl Accounts {
    pub(crate) fn charged_elsewhere(&self) -> bool {
        // Bytes that wait in the page cache are charged only when they are written.
        let told = self.charged_bytes.saturating_add(self.waiting_bytes);
        let missing = self.written_bytes.saturating_sub(told);
        // The second condition allows for counters that are incomplete in proportion to the volume.
        missing >= LEAST_MISSING_BYTES && missing > self.written_bytes / 4
    }
}

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
