//! `--measure`: tests the limit on each I/O path.
//!
//! ```text
//!   weir ─── moves, controls ──► weir cgroup load, in a cgroup beside the examined one, with its limits    temporary_cgroup.rs, worker.rs, load.rs
//!    │                               │ writes and reads small files: direct, buffered, flushed, from the page cache   path_tests.rs
//!    ├── io.stat of that cgroup ◄────┤ bytes charged to it
//!    ├── the disk's statistics ◄─────┤ bytes that arrived
//!    └── a separate trace ◄──────────┘ tasks that submitted, tasks that were throttled                      trace.rs
//! ```
//!
//! If writeback is charged to the cgroup, its memory.high is set so low that the writer soon waits
//! for writeback workers, as every long-running writer does; weir then flushes the remaining dirty
//! pages from outside of the cgroup, which is still charged for them. Otherwise syncfs(2) starts
//! writeback at once; limits of other cgroups cannot delay it, because their writeback is not
//! throttled either. The cgroup and the trace are removed at the end, also on a signal; the files
//! are unlinked from the beginning.

mod load;
mod path_tests;
mod report;
mod temporary_cgroup;
mod trace;
mod worker;

use std::{
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use anyhow::{Context as _, bail};
use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use console::signal_cleanup::SignalCleanup;
pub(crate) use load::run as run_load;
use policy::steering::IoMaxRates;
pub(super) use report::{MeasurementReport, report, text};

use self::{
    path_tests::PathTests,
    temporary_cgroup::TemporaryCgroup,
    trace::{TraceInstance, TraceTotals},
    worker::LoadWorker,
};
use super::{
    facts::{self, CgroupFacts},
    findings,
};
use crate::{
    control_group::{ControlGroup, Version},
    device,
    hierarchy::CgroupHierarchy,
};

#[derive(Debug, Clone)]
pub(super) struct MeasureOptions<'a> {
    /// Directory of the test files; by default on a limited disk.
    pub(super) directory: Option<&'a Path>,
    /// Upper bound of the bytes on each path.
    pub(super) max_bytes: u64,
    /// Duration of each path if the limit is enforced.
    pub(super) time: Duration,
    pub(super) quiet: bool,
}

#[derive(Debug)]
pub(super) struct MeasuredPaths {
    pub(super) directory: PathBuf,
    pub(super) node: String,
    pub(super) untraced: Option<String>,
    pub(super) paths: Vec<PathResult>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct PathResult {
    pub(super) name: &'static str,
    /// Bytes per second.
    pub(super) limit_bps: Option<u64>,
    pub(super) result: Result<PathFigures, String>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PathFigures {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    /// Duration of the calls alone; less than `seconds` if data was written back later.
    pub(super) calls_seconds: f64,
    pub(super) charged_bytes: u64,
    /// Bytes that all processes moved on the disk.
    pub(super) disk_bytes: u64,
    traced: Option<TraceTotals>,
    pub(super) compliance: LimitCompliance,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LimitCompliance {
    Yes,
    No,
    /// The I/O was slower than the limit for another reason.
    Slower,
    /// No limit to compare with.
    NotLimited,
    /// The path does no I/O.
    NoIo,
}

impl PathFigures {
    pub(super) fn bps(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9)
    }
}

pub(super) fn measure(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    facts: &CgroupFacts,
    options: &MeasureOptions<'_>,
) -> anyhow::Result<MeasuredPaths> {
    let directory = match options.directory {
        Some(directory) => directory.to_owned(),
        None => default_directory(facts)?,
    };
    let shown = directory.display().to_string();
    let target = device::resolve(&hierarchy.roots, &shown)?;
    let node = target.identity.node();
    let stack = facts::disks_of_directory(hierarchy, &directory);
    let Some((disk, rates)) = limit_in_force(facts, &stack.stack) else {
        bail!("{shown}: its disk {node} has no limit (set one, or choose another --directory)");
    };
    let sysfs_roots = SysfsRoots { sys: hierarchy.roots.sys.clone(), mounts: hierarchy.roots.mountinfo() };
    let identity =
        DeviceIdentity::resolve(disk, &sysfs_roots).with_context(|| format!("the limited disk {disk}"))?;
    // Each resource registers its removal for the signal handler in the same step that creates it.
    let cleanup = SignalCleanup::start()?;
    let name = format!("weir-explain-{}", process::id());
    // The worker's cgroup is beside the examined one, so only its own limits have to be copied.
    let own_limits = facts.own().limits.iter().filter(|limit| stack.stack.contains(&limit.disk));
    let own_limits: Vec<(DeviceNumber, IoMaxRates)> =
        own_limits.map(|limit| (limit.disk, limit.rates)).collect();
    let cgroup = cleanup.with_cleanup(|| {
        let cgroup = TemporaryCgroup::beside(group, &name, &own_limits)?;
        let removal = cgroup.removal();
        Ok((cgroup, removal))
    })?;
    let worker = cleanup.with_cleanup(|| {
        let worker = LoadWorker::start(&directory)?;
        let end = worker.end();
        Ok((worker, end))
    })?;
    // Moved before its first request: the kernel does not move charges along with a process.
    cgroup.enter(worker.process())?;
    let trace = cleanup.with_cleanup(|| {
        let trace = start_trace(hierarchy, &name, disk)?;
        let removal = trace.removal();
        Ok((trace, removal))
    });
    // A missing trace is no error: the report then lacks the tasks that submitted requests.
    let untraced = trace.as_ref().err().map(|error| format!("{error:#}"));
    let charged =
        stack.file_system.is_some_and(|file_system| findings::charges_writeback(facts, &file_system));
    let (trace, options) = (trace.ok(), options.clone());
    let mut path_tests = PathTests {
        directory: directory.clone(),
        worker,
        cgroup,
        trace,
        disk,
        identity,
        rates,
        charged,
        options,
    };
    let paths = path_tests.all();
    Ok(MeasuredPaths { directory, node, untraced, paths })
}

fn default_directory(facts: &CgroupFacts) -> anyhow::Result<PathBuf> {
    let limited = |disk: DeviceNumber| facts.levels.iter().any(|level| level.limit(disk).is_some());
    let on_limited = facts.file_systems.iter().filter(|file_system| file_system.used).find(
        |file_system| matches!(file_system.backing_disk, facts::BackingDisk::Disk(disk) if limited(disk)),
    );
    match on_limited {
        Some(file_system) => Ok(PathBuf::from(&file_system.mount_point)),
        None => bail!("--measure: no file system on a limited disk is known (name a --directory)"),
    }
}

/// The uppermost limited disk of a stack, and the lowest rates in force on it.
fn limit_in_force(facts: &CgroupFacts, stack: &[DeviceNumber]) -> Option<(DeviceNumber, IoMaxRates)> {
    // Version 1 has no inherited limits.
    let levels = if facts.version == Version::V1 { &facts.levels[..1] } else { &facts.levels[..] };
    stack.iter().find_map(|&disk| {
        let mut limits =
            levels.iter().filter_map(|level| level.limit(disk)).map(|limit| limit.rates).peekable();
        limits.peek()?;
        Some((disk, findings::lowest_of(limits)))
    })
}

fn start_trace(hierarchy: &CgroupHierarchy, name: &str, disk: DeviceNumber) -> anyhow::Result<TraceInstance> {
    let mounts = hierarchy.roots.mounts()?;
    let tracefs = mounts.iter().find(|mount| mount.kind == "tracefs").context("no tracefs is mounted")?;
    TraceInstance::begin(&tracefs.point, name, disk).with_context(|| tracefs.point.display().to_string())
}
