//! The cgroup and its ancestors: controllers and limits, version 1 and 2.

use std::path::Path;

use policy::steering::IoMaxRates;

use super::{CgroupLevel, Evidence, LevelLimit, reader::FactReader};
use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::CgroupHierarchy,
    kernel::io_max,
    limit::{
        configured::ConfiguredLimits,
        limits_file::{CgroupEntry, LimitsFile},
        locks::WatchLock,
        pools::LimitPool,
        settling, write,
    },
    limit_files::{self, LimitFile},
};

pub(super) fn ancestors(
    reader: &mut FactReader<'_>,
    group: &ControlGroup,
) -> anyhow::Result<Vec<CgroupLevel>> {
    let chain = std::iter::successors(Some(group.clone()), ControlGroup::parent);
    let levels = chain.map(|group| read_level(reader, &group)).collect::<Result<Vec<_>, _>>()?;
    if let Some(top) = levels.last().filter(|top| !top.root) {
        let text = "the topmost cgroup that can be seen has others above it, whose limits hold too";
        reader.gaps.push(Evidence::new(top.name.clone(), text));
    }
    Ok(levels)
}

/// Replaces the kernel's values by those of weir's limits file where `watch` varies them (bursts,
/// watermarks, groups).
pub(super) fn apply_configured_limits(hierarchy: &CgroupHierarchy, file: &Path, levels: &mut [CgroupLevel]) {
    // `watch` reports an unreadable file.
    let Ok(limits_file) = LimitsFile::load(file) else { return };
    let steered_pools =
        LimitPool::all(&limits_file).unwrap_or_default().into_iter().filter(LimitPool::needs_watch);
    let steered_entries: Vec<CgroupEntry> = steered_pools.flat_map(|pool| pool.members).collect();
    // Without a running `watch`, the kernel's values remain in force.
    if steered_entries.is_empty() || !WatchLock::is_taken(file) {
        return;
    }
    for (group, disk, rates) in settling::settled_rates(hierarchy, &limits_file).unwrap_or_default() {
        let is_same_limit = |entry: &CgroupEntry| {
            entry.cgroup == group.name && entry.device().is_ok_and(|number| number == disk)
        };
        if !steered_entries.iter().any(is_same_limit) {
            continue;
        }
        let name = group.name.display().to_string();
        let Some(level) = levels.iter_mut().find(|level| level.name == name) else { continue };
        let kernel_rates = level
            .limits
            .iter()
            .find(|limit| limit.disk == disk)
            .map_or(IoMaxRates::NONE, |limit| limit.rates);
        let rates = write::as_printed_by_kernel(rates);
        // The kernel's value equals the configured limit: its own evidence is enough.
        if kernel_rates == rates {
            continue;
        }
        let configured = ConfiguredLimits::of(&limits_file, &group.name, disk)
            .map(|limits| limits.text())
            .unwrap_or_default();
        let now = Evidence::of(
            &group.directory.join(io_max::FILE),
            format!("{} (now)", io_max::line(kernel_rates, disk)),
        );
        let evidence = vec![Evidence::of(file, configured), now];
        level.limits.retain(|limit| limit.disk != disk);
        level.limits.push(LevelLimit { disk, rates, evidence });
    }
}

pub(super) fn read_level(reader: &mut FactReader<'_>, group: &ControlGroup) -> anyhow::Result<CgroupLevel> {
    let mut files = Vec::new();
    let limits = limits_of(group, &mut files)?;
    let name = group.name.display().to_string();
    let mut cited = |file: &str| {
        let path = group.directory.join(file);
        let text = reader.text(&path)?;
        Some(Evidence::of(&path, text.trim()))
    };
    let (controllers, subtree, kind) = match group.version {
        Version::V1 => (None, None, None),
        Version::V2 => (cited("cgroup.controllers"), cited("cgroup.subtree_control"), cited("cgroup.type")),
    };
    // The root of the hierarchy has no cgroup.type; the root of a cgroup namespace has one.
    // `domain` is the default type and explains nothing.
    let root = group.is_root() && kind.is_none();
    let kind = kind.filter(|kind| kind.value != "domain");
    Ok(CgroupLevel {
        name,
        root,
        has_limits: !files.is_empty(),
        controllers,
        subtree_control: subtree,
        kind,
        limits,
        files,
    })
}

fn limits_of(group: &ControlGroup, files: &mut Vec<Evidence>) -> anyhow::Result<Vec<LevelLimit>> {
    let mut limits: Vec<LevelLimit> = Vec::new();
    for LimitFile { name, text, limits: all } in limit_files::read(group)? {
        let file = group.directory.join(name).display().to_string();
        let shown = if text.trim().is_empty() { "(empty)" } else { text.trim() };
        files.push(Evidence::new(file.clone(), shown));
        for (disk, rates) in all.into_iter().filter(|(_, rates)| *rates != IoMaxRates::NONE) {
            let line = match group.version {
                Version::V1 => {
                    format!("{disk} {}", io_max::in_order(rates).into_iter().flatten().sum::<u64>())
                }
                Version::V2 => io_max::line(rates, disk),
            };
            let evidence = Evidence::new(file.clone(), line);
            match limits.iter_mut().find(|limit| limit.disk == disk) {
                Some(limit) => {
                    limit_files::merge_rates(&mut limit.rates, rates);
                    limit.evidence.push(evidence);
                }
                None => limits.push(LevelLimit { disk, rates, evidence: vec![evidence] }),
            }
        }
    }
    Ok(limits)
}
