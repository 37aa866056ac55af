//! The cgroup that a request is charged to: that of the process, or another.
//!
//! ```text
//!   direct I/O, reads, O_SYNC, fsync   submitted by the process                          its own cgroup
//!   buffered writes, shared mappings   written back later by a kernel worker             the owner of the inode …
//!                                                                          … or the root, unless all of these hold:
//!                                         io and memory both in version 2's hierarchy    (fs.h, inode_cgwb_enabled)
//!                                         the file system supports it                    (SB_I_CGROUPWB)
//! ```
//!
//! Sources: cgroup-v2.rst, "Writeback" and "Filesystem Support for Writeback"; `inode_cgwb_enabled`
//! in include/linux/backing-dev.h. A bio without an explicit owner is charged to the task that
//! submits it (`bio_associate_blkg`): hence fsync(2) and `O_SYNC` are charged to the process.

use super::{Cause, Coverage, Io, RequestVerdict};
use crate::{
    control_group::Version,
    explain::facts::{CgroupFacts, Evidence, FileUse, IoLocation, MemoryController, MountedFileSystem},
    file_system_class::FileSystemClass,
};

#[derive(Debug, Clone)]
pub(super) enum ChargedCgroup {
    Own(Vec<Evidence>),
    /// The process's cgroup, or another one that writes to the same file.
    Several(Cause, Vec<Evidence>),
    Elsewhere(Cause, Vec<Evidence>),
}

/// File systems that charge writeback to the owner, with the first release: ext2 and ext4 (which
/// also mounts ext3) 4.2 and 4.3, Btrfs 4.3, f2fs 4.16 (commit 578c647879f7), XFS 5.3 (commit
/// adfb5fb46af0). Cgroup v2 is official since 4.5.
const CHARGE_WRITEBACK: [(&str, (u32, u32, u32)); 6] = [
    ("ext2", (4, 2, 0)),
    ("ext3", (4, 3, 0)),
    ("ext4", (4, 3, 0)),
    ("btrfs", (4, 3, 0)),
    ("f2fs", (4, 16, 0)),
    ("xfs", (5, 3, 0)),
];

fn without_disk(nature: FileSystemClass) -> Option<Cause> {
    match nature {
        FileSystemClass::Network => Some(Cause::NetworkFileSystem),
        FileSystemClass::Fuse => Some(Cause::Fuse),
        FileSystemClass::Zfs => Some(Cause::Zfs),
        FileSystemClass::Memory | FileSystemClass::Pseudo => Some(Cause::InMemory),
        FileSystemClass::Disk => None,
    }
}

/// The cgroup charged for this kind of I/O, as far as cgroup and file system decide it; the disks
/// below may change it (`limit_search`).
pub(super) fn charged_cgroup(facts: &CgroupFacts, used: &FileUse, io: Io) -> ChargedCgroup {
    let file_system = match used.location {
        IoLocation::FileSystem(index) => Some(&facts.file_systems[index]),
        IoLocation::Disk(_) => None,
    };
    // Without a disk below, no limit can apply.
    if let Some(file_system) = file_system
        && let Some(cause) = without_disk(file_system.class)
    {
        return ChargedCgroup::Elsewhere(cause, vec![file_system.evidence.clone()]);
    }
    // In this mode ext4's direct I/O goes through the page cache (admin-guide/ext4.rst,
    // `data=journal`), and the journal's thread writes it.
    let journaled = file_system.filter(|file_system| is_data_journal(file_system));
    if let Some(file_system) = journaled.filter(|_| io.writes()) {
        return ChargedCgroup::Elsewhere(Cause::DataJournal, vec![file_system.evidence.clone()]);
    }
    // The process itself submits these requests, in the name of its cgroup.
    if !io.written_back() {
        return ChargedCgroup::Own(Vec::new());
    }
    let mut evidence = match writeback_charge(facts, file_system) {
        Ok(evidence) => evidence,
        Err((cause, evidence)) => return ChargedCgroup::Elsewhere(cause, evidence),
    };
    // An old file alone proves nothing: only with bytes missing from the cgroup's counter is the
    // earlier owner likely.
    if used.other_writers.is_empty() {
        let accounts = facts.write_accounting.as_ref().filter(|accounts| accounts.charged_elsewhere());
        return match (&used.older_than_processes, accounts) {
            (Some(older), Some(accounts)) => {
                evidence.push(older.clone());
                evidence.extend(accounts.evidence.iter().cloned());
                ChargedCgroup::Several(Cause::EarlierOwner, evidence)
            }
            _ => ChargedCgroup::Own(evidence),
        };
    }
    evidence.push(used.evidence.clone());
    evidence.extend(used.other_writers.iter().map(|other| other.evidence.clone()));
    ChargedCgroup::Several(Cause::SeveralCgroups, evidence)
}

/// Succeeds if writeback is charged to the owner of the inode; the error is the cause why not.
pub(super) fn writeback_charge(
    facts: &CgroupFacts,
    file_system: Option<&MountedFileSystem>,
) -> Result<Vec<Evidence>, (Cause, Vec<Evidence>)> {
    if facts.version == Version::V1 {
        return Err((
            Cause::VersionOne,
            facts.hierarchy.iter().chain([&facts.kernel.evidence]).cloned().collect(),
        ));
    }
    // Only the memory controller records the owner of a page.
    match &facts.memory {
        MemoryController::Unified => {}
        MemoryController::Legacy(evidence) => {
            return Err((Cause::MemoryInVersionOne, vec![evidence.clone()]));
        }
        MemoryController::Absent(evidence) => {
            return Err((Cause::NoMemoryController, vec![evidence.clone()]));
        }
    }
    // Pages of a block device are charged too: SB_I_CGROUPWB is set for `bdev` (block/bdev.c).
    let Some(file_system) = file_system else {
        return Ok(Vec::new());
    };
    let mut evidence = vec![file_system.evidence.clone()];
    if charges_writeback(&file_system.kind, facts.kernel.release) {
        return Ok(evidence);
    }
    evidence.push(facts.kernel.evidence.clone());
    Err((Cause::NoCgroupWriteback, evidence))
}

fn charges_writeback(kind: &str, release: (u32, u32, u32)) -> bool {
    CHARGE_WRITEBACK.iter().any(|&(name, since)| name == kind && release >= since)
}

fn is_data_journal(file_system: &MountedFileSystem) -> bool {
    matches!(file_system.kind.as_str(), "ext3" | "ext4")
        && file_system.super_options.split(',').any(|option| option == "data=journal")
}

impl ChargedCgroup {
    pub(super) fn with_evidence(mut self, more: Vec<Evidence>) -> Self {
        let (Self::Own(evidence) | Self::Several(_, evidence) | Self::Elsewhere(_, evidence)) = &mut self;
        evidence.extend(more);
        self
    }

    pub(super) fn without_disk(self, used: &FileUse) -> RequestVerdict {
        let (cause, mut evidence) = match self {
            Self::Elsewhere(cause, evidence) => (cause, evidence),
            Self::Own(evidence) | Self::Several(_, evidence) => (Cause::UnknownDisk, evidence),
        };
        // Not a failure of a limit: there is no disk, or it is unknown.
        let coverage = match cause {
            Cause::InMemory | Cause::UnknownDisk => Coverage::Note,
            _ => Coverage::Escapes,
        };
        evidence.push(used.evidence.clone());
        RequestVerdict { coverage, cause, evidence, detail: used.path.clone() }
    }
}
