//! Finds the limit of the charged cgroup on the path of a request: on this disk, or on a lower one.
//!
//! ```text
//!   file system ──► dm-0 (linear) ──► vda      a limit on dm-0 or on vda: the request keeps its owner on its way down
//!               ──► md0  (raid5)  ──► vdb …    on vdb: a kernel thread writes stripes, charged to the root
//!               ──► loop0 ──► file ──► vda     on vda: since 5.14 the loop driver charges the submitter
//! ```
//!
//! RAID without parity clones the request, and a clone keeps the owner (`__bio_clone` in
//! block/bio.c). RAID 4, 5 and 6 submit requests from a kernel thread (`ops_run_io` in
//! drivers/md/raid5.c), charged to the root. Device mapper lost the owner of writeback from 5.18
//! (commit ca522482e3ea) to commit 2df8b310bcfe, which also gave dm-crypt's writes an owner.
//!
//! In version 2 the limits of all cgroups up to the root apply (cgroup-v2.rst, "Limits"); in
//! version 1 only those of the process's own cgroup (`throtl_pd_init` in block/blk-throttle.c;
//! cgroup-v1/blkio-controller.rst, "Hierarchical Cgroups").

use std::path::Path;

use block::device::DeviceNumber;
use policy::steering::IoMaxRates;

use super::{
    Cause, Coverage, Io, RequestVerdict,
    charge::{ChargedCgroup, writeback_charge},
    wording,
};
use crate::{
    control_group::Version,
    explain::facts::{CgroupFacts, CgroupLevel, DiskFacts, DiskKind, Evidence, LevelLimit, Mapper},
};

/// Maximum number of stacked layers, more than in real setups; also ends the recursion in a cycle.
const MAX_DEPTH: usize = 8;

/// Release from which a loop device's I/O on its file is charged to the submitter (commit
/// c74d40e8b5e2); direct I/O since 4.15 (commit d4478e92d618).
const LOOP_CHARGES: (u32, u32, u32) = (5, 14, 0);
const DIRECT_LOOP_CHARGES: (u32, u32, u32) = (4, 15, 0);

/// Release from which device mapper loses the owner of writeback …
const MAPPER_REGRESSION: (u32, u32, u32) = (5, 18, 0);
/// … and the first fixed release of each stable series; 7.0 is fixed (commit 2df8b310bcfe).
const MAPPER_FIXED: [(u32, u32, u32); 5] = [(6, 1, 165), (6, 6, 128), (6, 12, 75), (6, 18, 16), (6, 19, 6)];

fn mapper_mended((major, minor, patch): (u32, u32, u32)) -> bool {
    major >= 7 || MAPPER_FIXED.iter().any(|fixed| (fixed.0, fixed.1) == (major, minor) && patch >= fixed.2)
}

pub(super) enum LimitSearch {
    Limit(FoundLimit),
    Nothing(RequestVerdict),
}

pub(super) struct FoundLimit {
    pub(super) evidence: Vec<Evidence>,
    pub(super) rate: String,
    /// True if the limit is on a lower disk.
    pub(super) below: bool,
}

/// Searches a limit from `disk` downwards. The charged cgroup may change on the way.
pub(super) fn find_limit(
    facts: &CgroupFacts,
    group: &str,
    disk: DeviceNumber,
    io: Io,
    charge: ChargedCgroup,
) -> (ChargedCgroup, LimitSearch) {
    let levels = in_force(facts, group);
    if let Some(found_limit) = limit_on(&levels, disk, io) {
        return (charge, LimitSearch::Limit(found_limit));
    }
    let mut disks_above = Vec::new();
    // A limit on the uppermost disk acts before any driver changes the owner; lower ones act after.
    if let Some((found_limit, lower_charge)) = find_limit_below(facts, &levels, disk, io, &mut disks_above) {
        let charge = match (charge, lower_charge) {
            (ChargedCgroup::Own(own) | ChargedCgroup::Several(_, own), Some(lower_charge)) => {
                lower_charge.with_evidence(own)
            }
            (charge, _) => charge,
        };
        return (charge, LimitSearch::Limit(found_limit));
    }
    (charge, LimitSearch::Nothing(explain_missing_limit(facts, group, &levels, disk)))
}

pub(super) fn in_force<'a>(facts: &'a CgroupFacts, group: &str) -> Vec<&'a CgroupLevel> {
    match facts.version {
        Version::V1 => vec![facts.level_of(group)],
        Version::V2 => {
            let inner = facts.descendants.iter().filter(|level| Path::new(group).starts_with(&level.name));
            inner.chain(&facts.levels).collect()
        }
    }
}

fn limit_on(levels: &[&CgroupLevel], disk: DeviceNumber, io: Io) -> Option<FoundLimit> {
    let limits: Vec<&LevelLimit> =
        levels.iter().filter_map(|level| level.limit(disk)).filter(|limit| holds(limit.rates, io)).collect();
    let evidence: Vec<Evidence> = limits.iter().flat_map(|limit| limit.evidence.clone()).collect();
    (!limits.is_empty()).then(|| FoundLimit {
        evidence,
        rate: wording::lowest(limits.iter().map(|limit| limit.rates)),
        below: false,
    })
}

fn holds(rates: IoMaxRates, io: Io) -> bool {
    io.reads() && (rates.bps[0].or(rates.iops[0]).is_some())
        || io.writes() && (rates.bps[1].or(rates.iops[1]).is_some())
}

/// The first limit below a disk, and the charge there if a driver changes it.
fn find_limit_below(
    facts: &CgroupFacts,
    levels: &[&CgroupLevel],
    disk: DeviceNumber,
    io: Io,
    disks_above: &mut Vec<DeviceNumber>,
) -> Option<(FoundLimit, Option<ChargedCgroup>)> {
    // `disks_above` detects a cycle, which would otherwise recurse without end.
    if disks_above.len() >= MAX_DEPTH || disks_above.contains(&disk) {
        return None;
    }
    disks_above.push(disk);
    let disk = facts.disk(disk)?;
    // The driver is the same for all parts.
    let lower_charge = charge_below(facts, disk, io);
    disk.lower_disks.iter().find_map(|&part| {
        if let Some(mut found_limit) = limit_on(levels, part, io) {
            found_limit.evidence.splice(0..0, disk.evidence.iter().cloned());
            found_limit.below = true;
            return Some((found_limit, lower_charge.clone()));
        }
        let (mut found_limit, deeper_charge) = find_limit_below(facts, levels, part, io, disks_above)?;
        found_limit.evidence.splice(0..0, disk.evidence.iter().cloned());
        // The uppermost change of owner decides: from there on, requests belong to another cgroup.
        Some((found_limit, lower_charge.clone().or(deeper_charge)))
    })
}

/// Charge of the requests that a disk's driver submits to lower disks, if not to the submitter.
fn charge_below(facts: &CgroupFacts, disk: &DiskFacts, io: Io) -> Option<ChargedCgroup> {
    let because = |cause| Some(ChargedCgroup::Elsewhere(cause, disk.evidence.clone()));
    let of_kernel =
        |cause| because(cause).map(|charge| charge.with_evidence(vec![facts.kernel.evidence.clone()]));
    match &disk.kind {
        // A dm-raid mirror keeps the owner of direct requests, parity RAID does not; the level is
        // unknown here.
        DiskKind::Mapper(Mapper::Raid) if io.writes() => {
            Some(ChargedCgroup::Several(Cause::RaidThreads, disk.evidence.clone()))
        }
        DiskKind::Mapper(mapper) => {
            let release = facts.kernel.release;
            let cause = match () {
                () if mapper_mended(release) || !io.writes() => return None,
                () if *mapper == Mapper::Crypt => Cause::CryptThreads,
                () if release >= MAPPER_REGRESSION && io.written_back() => Cause::MapperWriteback,
                () => return None,
            };
            of_kernel(cause)
        }
        // Reads of a healthy array are cloned, and clones keep their owner.
        DiskKind::Raid(level) if io.writes() && matches!(level.as_str(), "raid4" | "raid5" | "raid6") => {
            because(Cause::RaidThreads)
        }
        DiskKind::Loop { file_system: on, direct } => {
            let since = if *direct { DIRECT_LOOP_CHARGES } else { LOOP_CHARGES };
            if facts.kernel.release < since {
                return of_kernel(Cause::OldLoop);
            }
            if *direct || !io.writes() {
                return None;
            }
            let file_system = on.map(|index| &facts.file_systems[index]);
            let cited = disk.evidence.clone();
            Some(match writeback_charge(facts, file_system) {
                // Charged to the cgroup that wrote to the file first; ownership moves to the
                // submitter slowly.
                Ok(evidence) => ChargedCgroup::Several(Cause::BufferedLoop, cited).with_evidence(evidence),
                Err((_, evidence)) => {
                    ChargedCgroup::Elsewhere(Cause::BufferedLoop, cited).with_evidence(evidence)
                }
            })
        }
        DiskKind::Plain | DiskKind::Memory | DiskKind::Raid(_) | DiskKind::Gone => None,
    }
}

pub(super) fn explain_missing_limit(
    facts: &CgroupFacts,
    group: &str,
    levels: &[&CgroupLevel],
    disk: DeviceNumber,
) -> RequestVerdict {
    let new_verdict =
        |coverage, cause, evidence| RequestVerdict { coverage, cause, evidence, detail: facts.node(disk) };
    let own_level = facts.level_of(group);
    let all = facts.levels.iter().chain(&facts.descendants);
    let evidence = |levels: &[&CgroupLevel], disk: DeviceNumber| -> Vec<Evidence> {
        levels.iter().filter_map(|level| level.limit(disk)).flat_map(|limit| limit.evidence.clone()).collect()
    };
    if facts.version == Version::V2 && own_level.root {
        let evidence = own_level.subtree_control.iter().cloned().collect();
        return new_verdict(Coverage::Escapes, Cause::RootCgroup, evidence);
    }
    // From the most specific cause to the most general: the order of these checks decides.
    let here: Vec<&CgroupLevel> =
        levels.iter().copied().filter(|level| level.limit(disk).is_some()).collect();
    if !here.is_empty() {
        return new_verdict(Coverage::Unlimited, Cause::OtherDirection, evidence(&here, disk));
    }
    if facts.version == Version::V1 {
        let above: Vec<&CgroupLevel> = all.clone().filter(|level| level.limit(disk).is_some()).collect();
        if !above.is_empty() {
            return new_verdict(Coverage::Escapes, Cause::NotInherited, evidence(&above, disk));
        }
    }
    if facts.version == Version::V2 && !own_level.has("io") {
        return not_enabled(facts, own_level, new_verdict);
    }
    if facts.version == Version::V2 && !own_level.has_limits {
        let evidence = own_level.controllers.iter().cloned().collect();
        return new_verdict(Coverage::Escapes, Cause::NoThrottling, evidence);
    }
    let limited: Vec<(&CgroupLevel, &LevelLimit)> =
        levels.iter().flat_map(|level| level.limits.iter().map(move |limit| (*level, limit))).collect();
    // A limit on a disk above: the requests enter below it.
    if let Some((_, limit)) = limited.iter().find(|(_, limit)| is_stacked_on(facts, limit.disk, disk, 0)) {
        let mut evidence = limit.evidence.clone();
        evidence.extend(facts.disk(limit.disk).into_iter().flat_map(|disk| disk.evidence.clone()));
        return new_verdict(Coverage::Escapes, Cause::LimitAbove, evidence);
    }
    let Some((_, other)) = limited.first() else {
        let evidence = levels.iter().flat_map(|level| level.files.clone()).collect();
        return new_verdict(Coverage::Escapes, Cause::NoLimit, evidence);
    };
    let evidence = other.evidence.clone();
    let used = |disk: DeviceNumber| {
        facts.disks_in_use().any(|used| used == disk || is_stacked_on(facts, used, disk, 0))
    };
    // Another disk in use has a limit, so the lack of one here may be intended.
    if limited.iter().any(|(_, limit)| used(limit.disk)) {
        return new_verdict(Coverage::Unlimited, Cause::DiskWithoutLimit, evidence);
    }
    new_verdict(Coverage::Escapes, Cause::OtherDisk, evidence)
}

fn not_enabled(
    facts: &CgroupFacts,
    own_level: &CgroupLevel,
    new_verdict: impl Fn(Coverage, Cause, Vec<Evidence>) -> RequestVerdict,
) -> RequestVerdict {
    // Evidence in the order of the explanation: the missing controller, then its cause.
    let mut evidence: Vec<Evidence> = own_level.controllers.iter().cloned().collect();
    // From the root down: the first level that has `io` and does not enable it for its children.
    let blocking_level =
        facts.levels.iter().rev().find(|level| {
            level.name != own_level.name && level.has("io") && !level.enables_for_children("io")
        });
    evidence.extend(blocking_level.and_then(|level| level.subtree_control.clone()));
    evidence.extend(own_level.kind.clone());
    let mut verdict = new_verdict(Coverage::Escapes, Cause::IoNotEnabled, evidence);
    verdict.detail = match (blocking_level, &own_level.kind) {
        (_, Some(kind)) if kind.value == "threaded" => "threaded".to_owned(),
        (Some(level), _) => level.name.clone(),
        (None, _) => String::new(),
    };
    verdict
}

fn is_stacked_on(facts: &CgroupFacts, upper: DeviceNumber, lower: DeviceNumber, depth: usize) -> bool {
    let parts = facts.disk(upper).map_or(&[][..], |disk| &disk.lower_disks);
    depth < MAX_DEPTH
        && parts.iter().any(|&part| part == lower || is_stacked_on(facts, part, lower, depth + 1))
}

impl CgroupFacts {
    fn disks_in_use(&self) -> impl Iterator<Item = DeviceNumber> {
        let uses = self.processes.iter().flat_map(|process| &process.uses);
        uses.filter_map(|used| self.disk_of(used.location))
    }
}
