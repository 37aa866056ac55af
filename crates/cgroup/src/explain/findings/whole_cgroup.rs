//! Findings that are not about one request: swap space, limits above, other controls, and notes.
//!
//! A note reports no failure of a limit; it explains a measurement that would surprise.

use std::collections::BTreeSet;

use block::device::DeviceNumber;
use console::figures;
use policy::steering::IoMaxRates;

use super::{
    Cause, Coverage, CoverageFinding, Io, RequestVerdict, charge,
    limit_search::{self, LimitSearch},
    merge_finding, wording,
};
use crate::{
    control_group::Version,
    explain::facts::{
        AccessMode, BackingDisk, CgroupFacts, DiskKind, Evidence, ExaminedProcess, IoLocation,
        MemoryController, OtherControlKind,
    },
    kernel::io_max,
};

/// Release from which swapped pages are charged to their owner (commit 0d1e0c7cdeb7); before, to
/// the task that reclaims.
const SWAP_CHARGES: (u32, u32, u32) = (4, 19, 0);

pub(super) fn swapping(facts: &CgroupFacts, process: &ExaminedProcess, found: &mut Vec<CoverageFinding>) {
    let Some(swapped) = process.swapped.as_ref().or(facts.swapped.as_ref()) else {
        return;
    };
    for swap in &facts.swaps {
        let evidence = vec![swapped.clone(), swap.evidence.clone()];
        let Some(disk) = swap.disk else {
            let verdict = RequestVerdict {
                coverage: Coverage::Note,
                cause: Cause::UnknownDisk,
                evidence,
                detail: swap.evidence.value.clone(),
            };
            merge_finding(facts, found, verdict, None, Some(process.pid), Io::Swapping);
            continue;
        };
        let verdict = swapping_on(facts, process, disk, evidence);
        merge_finding(facts, found, verdict, Some(IoLocation::Disk(disk)), Some(process.pid), Io::Swapping);
    }
}

fn swapping_on(
    facts: &CgroupFacts,
    process: &ExaminedProcess,
    disk: DeviceNumber,
    mut evidence: Vec<Evidence>,
) -> RequestVerdict {
    let detail = facts.node(disk);
    // zram and brd are memory: swapping to them does no I/O on a disk.
    if facts.disk(disk).is_some_and(|disk| disk.kind == DiskKind::Memory) {
        return RequestVerdict { coverage: Coverage::Note, cause: Cause::InMemory, evidence, detail };
    }
    // Swap-out is charged by the owner of the page, so only the location of a limit is looked up.
    let own_charge = charge::ChargedCgroup::Own(Vec::new());
    match limit_search::find_limit(facts, &process.group, disk, Io::Swapping, own_charge) {
        (_, LimitSearch::Limit(limit)) => {
            let charged = facts.version == Version::V2
                && facts.memory == MemoryController::Unified
                && facts.kernel.release >= SWAP_CHARGES;
            evidence.extend(limit.evidence);
            if charged {
                RequestVerdict {
                    coverage: Coverage::Covered,
                    cause: Cause::Covered,
                    evidence,
                    detail: limit.rate,
                }
            } else {
                evidence.push(facts.kernel.evidence.clone());
                RequestVerdict { coverage: Coverage::Escapes, cause: Cause::SwapNotCharged, evidence, detail }
            }
        }
        (_, LimitSearch::Nothing(verdict)) => {
            evidence.extend(verdict.evidence);
            // Swap space on another disk needs other advice than a file there.
            let (coverage, cause) = match verdict.cause {
                Cause::OtherDisk | Cause::DiskWithoutLimit => (Coverage::Escapes, Cause::SwapElsewhere),
                cause => (verdict.coverage, cause),
            };
            RequestVerdict { coverage, cause, evidence, detail }
        }
    }
}

pub(super) fn add_cgroup_findings(facts: &CgroupFacts, found: &mut Vec<CoverageFinding>) {
    whole_cgroup(facts, found);
    memory_not_enabled(facts, found);
    lower_above(facts, found);
    file_systems(facts, found);
    page_cache(facts, found);
    older_files(facts, found);
    for control in &facts.other_controls {
        let (cause, detail) = match control.kind {
            OtherControlKind::Cost => (Cause::OtherControl, "io.cost"),
            OtherControlKind::LatencyTarget => (Cause::LatencyTarget, ""),
            OtherControlKind::SiblingLatencyTarget => (Cause::SiblingLatencyTarget, ""),
            OtherControlKind::Bfq => (Cause::OtherControl, "BFQ"),
        };
        found.push(note(facts, cause, detail, Some(control.disk), vec![control.evidence.clone()]));
    }
    for level in facts.levels.iter().chain(&facts.descendants) {
        for limit in &level.limits {
            if facts.disk(limit.disk).is_some_and(|disk| disk.kind == DiskKind::Gone) {
                let evidence = facts.disk(limit.disk).map(|disk| disk.evidence.clone()).unwrap_or_default();
                let evidence = limit.evidence.iter().cloned().chain(evidence).collect();
                found.push(note(facts, Cause::DiskGone, &level.name, Some(limit.disk), evidence));
            }
        }
    }
    let threads = facts.processes.iter().filter_map(|process| Some((process, process.kernel.clone()?)));
    let (names, evidence): (Vec<&str>, Vec<Evidence>) =
        threads.map(|(process, evidence)| (process.name.as_str(), evidence)).unzip();
    if let Some(first) = names.first() {
        let description = if names.len() == 1 {
            (*first).to_owned()
        } else {
            format!("{first} and {}", figures::counted(names.len() as u64 - 1, "other"))
        };
        let evidence = evidence.into_iter().take(super::MAX_EVIDENCE).collect();
        found.push(note(facts, Cause::KernelThread, &description, None, evidence));
    }
    if let Some(evidence) = &facts.orphaned_dirty_pages {
        found.push(note(facts, Cause::LeftDirty, &facts.name, None, vec![evidence.clone()]));
    }
    if !facts.unexamined.is_empty() {
        let mut gaps = facts.unexamined.clone();
        gaps.truncate(super::MAX_EVIDENCE);
        found.push(note(facts, Cause::NotSeen, &facts.unexamined.len().to_string(), None, gaps));
    }
}

fn note(
    facts: &CgroupFacts,
    cause: Cause,
    detail: &str,
    disk: Option<DeviceNumber>,
    evidence: Vec<Evidence>,
) -> CoverageFinding {
    let (explanation, remedy) = wording::cause_and_remedy(facts, cause, detail);
    let place = disk.map_or_else(String::new, |disk| facts.node(disk));
    CoverageFinding {
        coverage: Coverage::Note,
        cause,
        acts: BTreeSet::new(),
        disk,
        location: place,
        explanation,
        evidence,
        remedy,
    }
}

fn whole_cgroup(facts: &CgroupFacts, found: &mut Vec<CoverageFinding>) {
    let own_level = facts.own();
    let is_reported = |cause: Cause| found.iter().any(|finding| finding.cause == cause);
    let limited = facts.levels.iter().chain(&facts.descendants).any(|level| !level.limits.is_empty());
    let escape = |cause: Cause, detail: &str, evidence: Vec<Evidence>| {
        let mut finding = note(facts, cause, detail, None, evidence);
        finding.coverage = Coverage::Escapes;
        finding
    };
    let is_v2 = facts.version == Version::V2;
    if is_v2 && own_level.root {
        if !is_reported(Cause::RootCgroup) {
            found.push(escape(Cause::RootCgroup, "", own_level.subtree_control.iter().cloned().collect()));
        }
    // Processes without files yield no finding, so the lack of a limit has to be reported here.
    } else if !limited {
        let has_cause =
            [Cause::NoLimit, Cause::IoNotEnabled, Cause::NoThrottling].into_iter().any(is_reported);
        if !has_cause {
            let disk = DeviceNumber { major: 0, minor: 0 };
            let verdict = limit_search::explain_missing_limit(
                facts,
                &own_level.name,
                &limit_search::in_force(facts, &own_level.name),
                disk,
            );
            found.push(escape(verdict.cause, &verdict.detail, verdict.evidence));
        }
    }
}

/// If `io` is enabled without `memory`, the kernel enables memory implicitly, without its files.
fn memory_not_enabled(facts: &CgroupFacts, found: &mut Vec<CoverageFinding>) {
    let own_level = facts.own();
    let is_memory_implicit = facts.version == Version::V2
        && facts.memory == MemoryController::Unified
        && !own_level.root
        && own_level.has("io")
        && !own_level.has("memory");
    if is_memory_implicit {
        let evidence = own_level.controllers.iter().cloned().collect();
        found.push(note(facts, Cause::MemoryNotEnabled, &own_level.name, None, evidence));
    }
}

fn lower_above(facts: &CgroupFacts, found: &mut Vec<CoverageFinding>) {
    if facts.version == Version::V1 {
        return;
    }
    let own_level = facts.own();
    for limit in &own_level.limits {
        let above = facts.levels[1..].iter().filter_map(|level| Some((level, level.limit(limit.disk)?)));
        for (level, above) in above.filter(|(_, above)| lower(above.rates, limit.rates)) {
            let evidence = limit.evidence.iter().chain(&above.evidence).cloned().collect();
            // In version 2 the lowest limit on the path to the root is in force.
            found.push(note(facts, Cause::LowerAbove, &level.name, Some(limit.disk), evidence));
        }
    }
}

fn lower(rates: IoMaxRates, reference: IoMaxRates) -> bool {
    let pairs = io_max::in_order(rates).into_iter().zip(io_max::in_order(reference));
    pairs.into_iter().any(|pair| matches!(pair, (Some(this), Some(that)) if this < that))
}

fn file_systems(facts: &CgroupFacts, found: &mut Vec<CoverageFinding>) {
    for file_system in facts.file_systems.iter().filter(|file_system| file_system.used) {
        let BackingDisk::Disk(disk) = file_system.backing_disk else {
            continue;
        };
        let disk = Some(disk);
        if let Some(overlay) = &file_system.overlay {
            let evidence = vec![overlay.clone(), file_system.evidence.clone()];
            found.push(note(facts, Cause::Overlay, &file_system.mount_point, disk, evidence));
        }
        if let Some(partition) = &file_system.partition {
            found.push(note(
                facts,
                Cause::Partition,
                &file_system.mount_point,
                disk,
                vec![partition.clone()],
            ));
        }
        let journal = matches!(file_system.kind.as_str(), "ext3" | "ext4");
        if journal && facts.version == Version::V2 {
            let evidence = vec![file_system.evidence.clone()];
            found.push(note(facts, Cause::JournalThread, &file_system.mount_point, disk, evidence));
        }
    }
}

fn page_cache(facts: &CgroupFacts, found: &mut Vec<CoverageFinding>) {
    let covered = found
        .iter()
        .find(|finding| finding.coverage == Coverage::Covered && finding.ios().contains(&Io::Reads));
    let Some(disk) = covered.map(|finding| finding.disk) else {
        return;
    };
    let uses = facts.processes.iter().flat_map(|process| &process.uses).chain(&facts.hypothetical_uses);
    let evidence = uses
        .filter(|used| used.reads && used.access_mode != AccessMode::Direct)
        .map(|used| used.evidence.clone());
    let evidence = evidence.take(1).collect();
    found.push(note(facts, Cause::PageCache, "", disk, evidence));
}

/// Notes that files predate the cgroup's processes, unless the write counters already decided it.
fn older_files(facts: &CgroupFacts, found: &mut Vec<CoverageFinding>) {
    if found.iter().any(|finding| finding.cause == Cause::EarlierOwner) {
        return;
    }
    let covered = |disk| {
        let is_covered =
            |finding: &&CoverageFinding| finding.disk == disk && finding.coverage == Coverage::Covered;
        found.iter().filter(is_covered).any(|finding| finding.ios().contains(&Io::BufferedWrites))
    };
    let uses = facts.processes.iter().flat_map(|process| &process.uses);
    let older = uses.filter(|used| covered(facts.disk_of(used.location)));
    let evidence: Vec<Evidence> =
        older.filter_map(|used| used.older_than_processes.clone()).take(super::MAX_EVIDENCE).collect();
    if !evidence.is_empty() && facts.version == Version::V2 {
        found.push(note(facts, Cause::EarlierOwner, "", None, evidence));
    }
}
