//! Compares the bytes that the cgroup's processes wrote with the bytes that the cgroup was charged.
//!
//! ```text
//!   /proc/PID/io      write_bytes − cancelled_write_bytes    pages that they dirtied, direct writes
//!   memory.stat       file_dirty + file_writeback            pages that are not written back yet
//!   io.stat           wbytes                                 writes charged to the cgroup
//! ```
//!
//! A page belongs to the cgroup that first used it, and an inode to the cgroup that wrote most of
//! its pages (cgroup-v2.rst, "Writeback"). Writes to an older file may therefore be charged to
//! another cgroup; only these counters show it. The cgroup's counter includes processes that have
//! exited, so a difference may be missed but is never invented.

use std::time::Duration;

use super::{Evidence, ExaminedProcess, WriteAccounting, reader::FactReader};
use crate::{
    control_group::{ControlGroup, Version},
    kernel::{io_stat, memory_stat, proc_io},
};

/// Counters of version 2. `None` for the root, which is charged for all unattributed I/O.
pub(super) fn collect_accounting(
    reader: &mut FactReader<'_>,
    group: &ControlGroup,
    processes: &[ExaminedProcess],
) -> Option<WriteAccounting> {
    if group.version == Version::V1 || group.is_root() {
        return None;
    }
    let mut accounts =
        WriteAccounting { written_bytes: 0, charged_bytes: 0, dirty_bytes: 0, evidence: Vec::new() };
    for process in processes {
        let file = reader.hierarchy.roots.proc.join(process.pid.to_string()).join("io");
        let Some(io) = reader.text(&file).and_then(|text| proc_io::parse(&text).ok()) else {
            continue;
        };
        // Pages that were truncated before writeback never reach the disk.
        let bytes = io.write_bytes.saturating_sub(io.cancelled_write_bytes);
        accounts.written_bytes = accounts.written_bytes.saturating_add(bytes);
        accounts.evidence.push(Evidence::of(&file, format!("write_bytes {}", io.write_bytes)));
    }
    // Read after the processes' counters: a write in between can only hide a difference.
    let charged = group.read("io.stat").ok()?;
    let usages = io_stat::parse(&charged).ok()?;
    accounts.charged_bytes = usages.iter().map(|(_, usage)| usage.written_bytes).sum();
    let waiting = group.read("memory.stat").unwrap_or_default();
    accounts.dirty_bytes = memory_stat::parse(&waiting).unwrap_or_default().total();
    let cited = format!("wbytes of all disks {}", accounts.charged_bytes);
    accounts.evidence.insert(0, Evidence::of(&group.directory.join("io.stat"), cited));
    Some(accounts)
}

/// Start times have the resolution of clock ticks, file times that of seconds; the boot time is
/// rounded.
const CLOCK_ERROR: Duration = Duration::from_secs(2);

/// Marks the files that are older than every process: another cgroup may have used them first.
pub(super) fn mark_older(processes: &mut [ExaminedProcess]) {
    let Some(first) = processes.iter().filter_map(|process| process.started).min() else {
        return;
    };
    for used in processes.iter_mut().flat_map(|process| &mut process.uses) {
        let Some(created) = used.created else {
            continue;
        };
        let before = first.duration_since(created).unwrap_or_default();
        if before > CLOCK_ERROR {
            let value = format!("made {} s before the first process of the cgroup began", before.as_secs());
            used.older_than_processes = Some(Evidence::new(used.path.clone(), value));
        }
    }
}
