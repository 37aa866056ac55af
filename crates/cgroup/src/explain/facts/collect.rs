//! Collects all facts, from the cgroup outwards.
//!
//! A process that exits meanwhile is skipped. Files without read permission, and items beyond a
//! bound, are recorded as gaps, which a finding reports.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use block::device::DeviceNumber;

use super::{
    AccessMode, BackingDisk, CgroupFacts, Evidence, ExaminedProcess, FileUse, IoLocation, KernelRelease,
    MemoryController, MountedFileSystem, levels,
    mounts::MountTable,
    other_controls, other_writers,
    reader::{FactReader, has_ended},
    uses, write_accounting,
};
use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::{CgroupHierarchy, KernelRoots},
    kernel::proc_stat,
};

const MAX_PROCESSES: usize = 4096;
const MAX_GROUPS: usize = 4096;
const KTHREADD: i32 = 2;

#[derive(Debug, Clone)]
pub(crate) struct ExplainSubject {
    pub(crate) group: ControlGroup,
    pub(crate) pid: Option<i32>,
    pub(crate) limits: PathBuf,
}

pub(crate) fn collect(hierarchy: &CgroupHierarchy, subject: &ExplainSubject) -> anyhow::Result<CgroupFacts> {
    let roots = &hierarchy.roots;
    let group = &subject.group;
    let mut reader = FactReader::new(hierarchy);
    let mut levels =
        levels::ancestors(&mut reader, group).with_context(|| format!("cgroup {}", group.name.display()))?;
    // weir's limits file overrides the kernel's present values where `watch` changes them.
    levels::apply_configured_limits(hierarchy, &subject.limits, &mut levels);
    // A limit of a cgroup applies to its descendants in v2, so their processes are examined as
    // well.
    let groups = descend(&mut reader, group);
    let inner =
        groups[1..].iter().map(|group| levels::read_level(&mut reader, group)).collect::<Result<Vec<_>, _>>();
    let inner = inner.with_context(|| format!("cgroups below {}", group.name.display()))?;
    let mut mounts = MountTable::new(&mut reader, "self");
    let mut processes = Vec::new();
    for group in &groups {
        processes.extend(processes_of_group(&mut reader, group, subject.pid, &mut mounts));
    }
    // `find_other_writers` needs the file identities of all processes, `mark_older` their start
    // times.
    other_writers::find_other_writers(&mut reader, group, &mut processes, &mut mounts);
    write_accounting::mark_older(&mut processes);
    let accounts = write_accounting::collect_accounting(&mut reader, group, &processes);
    let limited: Vec<DeviceNumber> =
        levels.iter().chain(&inner).flat_map(|level| &level.limits).map(|limit| limit.disk).collect();
    // Limited disks are entered before mounts are matched with them, including vanished disks.
    reader.disks.insert_limited(&limited);
    let hypothetical = hypothetical_uses(&mut reader, &mut mounts, &limited, &processes);
    let swaps = other_controls::swaps(&mut reader, &mut mounts);
    // A loop device's file may be on a file system that was found last, so all mounts are known
    // here.
    mounts.follow_loops(&mut reader.disks);
    let beside = other_controls::controls(&mut reader, group, &limited);
    let left_dirty = other_controls::remaining_dirty_pages(&mut reader, group, processes.is_empty());
    Ok(CgroupFacts {
        name: group.name.display().to_string(),
        pid: subject.pid,
        version: group.version,
        hierarchy: hierarchy.root().map(|root| {
            let kind = if group.version == Version::V1 { "cgroup (v1), blkio" } else { "cgroup2" };
            Evidence::of(&roots.mountinfo(), format!("{} is {kind}", root.display()))
        }),
        kernel: kernel(roots),
        levels,
        descendants: inner
            .into_iter()
            .filter(|level| {
                processes.iter().any(|process| process.group == level.name) || !level.limits.is_empty()
            })
            .collect(),
        memory: memory(hierarchy),
        processes,
        hypothetical_uses: hypothetical,
        file_systems: mounts.found,
        disks: reader.disks.known,
        swaps,
        swapped: other_controls::swapped_bytes(group),
        orphaned_dirty_pages: left_dirty,
        write_accounting: accounts,
        other_controls: beside,
        unexamined: reader.gaps,
    })
}

fn kernel(roots: &KernelRoots) -> KernelRelease {
    let file = roots.proc.join("sys/kernel/osrelease");
    let text = fs::read_to_string(&file).unwrap_or_default();
    // `6.12.9+deb12-amd64`: the distribution's suffix follows the third number.
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    let release = (next(), next(), next());
    KernelRelease { release, evidence: Evidence::of(&file, text.trim()) }
}

fn memory(hierarchy: &CgroupHierarchy) -> MemoryController {
    let root = hierarchy.unified.as_ref().map(|root| root.join("cgroup.controllers"));
    let text = root.as_ref().and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
    let controllers =
        Evidence::new(root.map_or_else(String::new, |file| file.display().to_string()), text.trim());
    if text.split_ascii_whitespace().any(|controller| controller == "memory") {
        return MemoryController::Unified;
    }
    match &hierarchy.memory_v1 {
        Some(mount) => MemoryController::Legacy(Evidence::of(
            &hierarchy.roots.mountinfo(),
            format!("{} is cgroup (v1), memory", mount.display()),
        )),
        None => MemoryController::Absent(controllers),
    }
}

fn descend(reader: &mut FactReader<'_>, group: &ControlGroup) -> Vec<ControlGroup> {
    let mut found = vec![group.clone()];
    let mut next = 0;
    while next < found.len() {
        match found[next].children() {
            // A cgroup that was removed since its parent was listed is no gap.
            Ok(children) => found.extend(children),
            Err(error) if has_ended(&error) => {}
            Err(error) => {
                reader.gap(&found[next].directory, error.to_string());
            }
        }
        next += 1;
        if found.len() > MAX_GROUPS {
            found.truncate(MAX_GROUPS);
            reader.gap(
                &group.directory,
                format!("more than {MAX_GROUPS} cgroups below it: the rest were not examined"),
            );
            break;
        }
    }
    found
}

fn processes_of_group(
    reader: &mut FactReader<'_>,
    group: &ControlGroup,
    pid_filter: Option<i32>,
    mounts: &mut MountTable,
) -> Vec<ExaminedProcess> {
    let mut pids = match group.processes() {
        Ok(pids) => pids,
        Err(error) => {
            if !has_ended(&error) {
                let file = group.directory.join("cgroup.procs");
                reader.gap(&file, error.to_string());
            }
            Vec::new()
        }
    };
    // Before the bound, so that a single process is found among any number.
    pids.retain(|pid| pid_filter.is_none_or(|only| *pid == only));
    if pids.len() > MAX_PROCESSES {
        let text = format!("more than {MAX_PROCESSES} processes: the rest were not examined");
        reader.gap(&group.directory.join("cgroup.procs"), text);
        pids.truncate(MAX_PROCESSES);
    }
    pids.into_iter().filter_map(|pid| process(reader, group, pid, mounts)).collect()
}

fn process(
    reader: &mut FactReader<'_>,
    group: &ControlGroup,
    pid: i32,
    mounts: &mut MountTable,
) -> Option<ExaminedProcess> {
    let directory = reader.hierarchy.roots.proc.join(pid.to_string());
    let file = directory.join("stat");
    let text = reader.text(&file)?;
    let stat = proc_stat::parse(&text).ok()?;
    // Kernel threads are children of kthreadd and have no files.
    let kernel = (stat.parent == KTHREADD || stat.pid == KTHREADD)
        .then(|| Evidence::of(&file, format!("{} ({}) … ppid {}", stat.pid, stat.name, stat.parent)));
    let uses = if kernel.is_some() { Vec::new() } else { uses::file_uses(reader, &directory, mounts) };
    let status = directory.join("status");
    // Evidence that the process has pages in swap space.
    let swapped = reader.text(&status).and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("VmSwap:"))?;
        let kib = line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()?;
        (kib > 0).then(|| Evidence::of(&status, line.split_ascii_whitespace().collect::<Vec<_>>().join(" ")))
    });
    let began = reader.clock.start_time(stat.start_ticks);
    Some(ExaminedProcess {
        pid,
        started: began,
        name: stat.name,
        group: group.name.display().to_string(),
        kernel,
        uses,
        swapped,
    })
}

/// Direct and buffered I/O on each limited disk, for a cgroup whose processes have no file there.
fn hypothetical_uses(
    reader: &mut FactReader<'_>,
    mounts: &mut MountTable,
    limited: &[DeviceNumber],
    processes: &[ExaminedProcess],
) -> Vec<FileUse> {
    if processes.iter().any(|process| !process.uses.is_empty()) {
        return Vec::new();
    }
    let mut hypothetical = Vec::new();
    for index in mounts.file_systems_on(&mut reader.disks, limited) {
        let (point, evidence) = mounts.point_and_evidence(index);
        // Direct and buffered I/O differ most in the cgroup that is charged.
        for access_mode in [AccessMode::Direct, AccessMode::Buffered] {
            hypothetical.push(FileUse {
                location: IoLocation::FileSystem(index),
                path: point.clone(),
                access_mode,
                reads: true,
                writes: true,
                evidence: evidence.clone(),
                identity: None,
                created: None,
                older_than_processes: None,
                other_writers: Vec::new(),
            });
        }
    }
    hypothetical
}

#[derive(Debug)]
pub(crate) struct DirectoryDisks {
    /// The disk and those below it, the uppermost first.
    pub(crate) stack: Vec<DeviceNumber>,
    pub(crate) file_system: Option<MountedFileSystem>,
}

pub(crate) fn disks_of_directory(hierarchy: &CgroupHierarchy, directory: &Path) -> DirectoryDisks {
    let mut reader = FactReader::new(hierarchy);
    let mut mounts = MountTable::new(&mut reader, "self");
    let directory = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
    let found = mounts.of_path(&mut reader.disks, &directory).map(|index| mounts.found[index].clone());
    mounts.follow_loops(&mut reader.disks);
    let stack = match found.as_ref().map(|found| &found.backing_disk) {
        Some(BackingDisk::Disk(disk)) => [*disk].into_iter().chain(reader.disks.lower_disks(*disk)).collect(),
        _ => Vec::new(),
    };
    DirectoryDisks { stack, file_system: found }
}
