//! Settled limits: limits without bursts or watermark, divided by weight among the existing
//! members. `weir cgroup limit` writes them at once; `watch`, its guard and their successors fall
//! back to them.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use console::print_error;
use policy::{steering::IoMaxRates, time::Instant};

use super::{
    latency_target,
    limits_file::{CgroupEntry, LimitsFile},
    locks::ChangeLock,
    pools::LimitPool,
    weight,
    write::{self, LimitWrite},
};
use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::CgroupHierarchy,
};

pub(crate) type SettledRates = (ControlGroup, DeviceNumber, IoMaxRates);

/// Settled rates of each existing control group. The share of a control group whose disk was
/// removed or replaced is divided among the remaining members.
pub(crate) fn settled_rates(
    hierarchy: &CgroupHierarchy,
    limits_file: &LimitsFile,
) -> anyhow::Result<Vec<SettledRates>> {
    let mut all = Vec::new();
    for pool in LimitPool::all(limits_file)? {
        all.extend(settled_rates_of_pool(hierarchy, pool)?);
    }
    Ok(all)
}

pub(crate) fn settled_rates_of_pool(
    hierarchy: &CgroupHierarchy,
    pool: LimitPool,
) -> anyhow::Result<Vec<SettledRates>> {
    let roots = hierarchy.roots.device_roots();
    let pool = pool.retain_members(|entry| {
        hierarchy
            .group(&entry.cgroup)
            .is_ok_and(|group| group.exists() && verify_disk(&group, entry, &roots).is_ok())
    });
    let rates = pool.pool(Instant::ZERO).rates_without_steering();
    let member = |entry: &CgroupEntry| -> anyhow::Result<(ControlGroup, DeviceNumber)> {
        Ok((hierarchy.group(&entry.cgroup)?, entry.device()?))
    };
    let members_with_rates = pool.members.iter().zip(rates);
    members_with_rates
        .map(|(entry, rates)| member(entry).map(|(group, device)| (group, device, rates)))
        .collect()
}

/// Fails if an entry's disk was removed or its number belongs to another disk. A limit in the
/// kernel proves the disk, because limits vanish with their disk; identifying the disk itself may
/// block.
pub(crate) fn verify_disk(
    group: &ControlGroup,
    entry: &CgroupEntry,
    roots: &SysfsRoots,
) -> anyhow::Result<()> {
    let number = entry.device()?;
    if write::read_limits(group, number).is_ok_and(|kernel_rates| kernel_rates != IoMaxRates::NONE) {
        return Ok(());
    }
    entry.disk(roots).map(drop)
}

/// Writes the settled rates after a change to the kernel and to systemd, wherever they differ from
/// before; decreases come first, so that the sum never exceeds the limit. Returns the rates of
/// `target`. On an error all are rolled back.
pub(super) fn apply_change(
    hierarchy: &CgroupHierarchy,
    before: &LimitsFile,
    after: &LimitsFile,
    target: Option<(&ControlGroup, DeviceNumber)>,
) -> anyhow::Result<Option<IoMaxRates>> {
    let before = settled_rates(hierarchy, before)?;
    let before: HashMap<_, _> =
        before.into_iter().map(|(group, device, rates)| ((group, device), rates)).collect();
    let is_target = |group: &ControlGroup, number| target == Some((group, number));
    let mut changes: Vec<((ControlGroup, DeviceNumber), IoMaxRates)> = settled_rates(hierarchy, after)?
        .into_iter()
        .map(|(group, device, rates)| ((group, device), rates))
        .collect();
    let shared = target.map(|target| pool_members(after, target)).transpose()?.unwrap_or_default();
    let differs = |(group, number): &(ControlGroup, DeviceNumber), rates: &IoMaxRates| {
        // Members of the same pool may have other rates at present, if `target` was absent for a
        // while.
        shared.contains(&(group.name.clone(), *number))
            && write::read_limits(group, *number).is_ok_and(|kernel_rates| kernel_rates != *rates)
    };
    changes.retain(|(key, rates)| {
        is_target(&key.0, key.1) || before.get(key) != Some(rates) || differs(key, rates)
    });
    changes.sort_by_key(|(key, rates)| before.get(key).is_none_or(|was| sum(rates) >= sum(was)));
    let found = changes.iter().find(|(key, _)| is_target(&key.0, key.1)).map(|(_, rates)| *rates);
    let limit_write = |((group, number), rates): ((ControlGroup, DeviceNumber), IoMaxRates)| {
        let key = (group, number);
        // An unknown cgroup may have a limit of another program; a rollback restores it.
        let found = || write::read_limits(&key.0, number).unwrap_or(IoMaxRates::NONE);
        let before = before.get(&key).copied().unwrap_or_else(found);
        LimitWrite { group: key.0, device: (number, node(hierarchy, number)), rates, before }
    };
    let changes: Vec<LimitWrite> = changes.into_iter().map(limit_write).collect();
    write::write_all(hierarchy, &changes)?;
    Ok(found)
}

fn pool_members(
    limits_file: &LimitsFile,
    (group, number): (&ControlGroup, DeviceNumber),
) -> anyhow::Result<Vec<(PathBuf, DeviceNumber)>> {
    let member = |entry: &CgroupEntry| Some((entry.cgroup.clone(), entry.device().ok()?));
    let target = (group.name.clone(), number);
    let all = LimitPool::all(limits_file)?.into_iter();
    let mut pools = all.map(|pool| pool.members.iter().filter_map(member).collect::<Vec<_>>());
    Ok(pools.find(|members| members.contains(&target)).unwrap_or_default())
}

/// Sum of all four rates, which orders changes by decrease and increase.
fn sum(IoMaxRates { bps, iops }: &IoMaxRates) -> u128 {
    bps.iter().chain(iops).map(|rate| rate.map_or(u128::from(u64::MAX), u128::from)).sum()
}

/// Sets every control group to its settled rates. Continues after an error; returns the last one
/// and prints earlier ones.
pub(crate) fn settle(hierarchy: &CgroupHierarchy, limits_file: &LimitsFile) -> anyhow::Result<()> {
    let mut failed: Option<anyhow::Error> = None;
    // One failure must not leave other control groups in a burst.
    for (group, device, rates) in settled_rates(hierarchy, limits_file)? {
        // The entry has a weight only: limits of other programs stay.
        if rates == IoMaxRates::NONE {
            continue;
        }
        let Err(error) = enforce(&group, device, rates) else { continue };
        if let Some(earlier) = failed.replace(error) {
            print_error(&earlier);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Settles the file's present limits, or `last` if the file is unreadable, under the change lock.
pub(crate) fn settle_latest(
    hierarchy: &CgroupHierarchy,
    path: &Path,
    last: &LimitsFile,
) -> anyhow::Result<()> {
    let _unchanged = ChangeLock::take(path);
    settle(hierarchy, &LimitsFile::latest(path, last))
}

/// Settles quota leased by a cluster. Does not wait for a concurrent change; settles once more
/// after it, in case the change overwrote the rates.
pub(crate) fn settle_leased(
    hierarchy: &CgroupHierarchy,
    path: &Path,
    last: &LimitsFile,
) -> anyhow::Result<()> {
    // At once: other hosts may use the quota from now on.
    let at_once = settle(hierarchy, &LimitsFile::latest(path, last).only_cluster_entries());
    let _unchanged = ChangeLock::take(path);
    at_once.and(settle(hierarchy, &LimitsFile::latest(path, last).only_cluster_entries()))
}

/// Enables the controllers and writes the rates, unless they are in force already.
pub(crate) fn enforce(group: &ControlGroup, device: DeviceNumber, rates: IoMaxRates) -> anyhow::Result<()> {
    enable_controllers(group)?;
    write_if_different(group, device, rates)
}

/// Enables missing controllers, as after a reboot.
pub(crate) fn enable_controllers(group: &ControlGroup) -> anyhow::Result<()> {
    if group.version == Version::V1 || group.has_file("io.stat") {
        return Ok(());
    }
    group.enable_controllers(&["io"])?;
    // Without memory, buffered writes escape; all else is limited.
    let _ = group.enable_controllers(&["memory"]);
    Ok(())
}

/// Sets the limits in systemd that it lacks: systemd disables a controller that none of its units
/// requests, and the limits with it (seen with version 252). Returns false during a concurrent
/// change, to be retried.
pub(crate) fn update_systemd(
    hierarchy: &CgroupHierarchy,
    path: &Path,
    group: &ControlGroup,
) -> anyhow::Result<bool> {
    let unchanged = ChangeLock::take(path);
    if !unchanged.is_held() {
        return Ok(false);
    }
    // Read under the lock: the limits may have been removed since the caller looked.
    let cgroups = HashSet::from([group.name.clone()]);
    for MissingProperties { group, properties } in
        missing_in_systemd(hierarchy, &LimitsFile::load(path)?, &cgroups)?
    {
        write::set_properties(hierarchy, &group, &properties)?;
    }
    Ok(true)
}

/// Properties of a control group on a disk that systemd lacks.
#[derive(Debug)]
pub(crate) struct MissingProperties {
    pub(crate) group: ControlGroup,
    pub(super) properties: Vec<String>,
}

/// Limits, weights and latency targets that systemd lacks, for those of `cgroups` that exist with
/// their disk. Each limit has its settled rates among all members, existing or not.
pub(crate) fn missing_in_systemd(
    hierarchy: &CgroupHierarchy,
    limits_file: &LimitsFile,
    cgroups: &HashSet<PathBuf>,
) -> anyhow::Result<Vec<MissingProperties>> {
    let mut unknown = Vec::new();
    if !hierarchy.has_systemd() {
        return Ok(unknown);
    }
    let roots = hierarchy.roots.device_roots();
    for pool in LimitPool::all(limits_file)? {
        // Computed for all members, because each one's share depends on their number.
        let rates = pool.pool(Instant::ZERO).rates_without_steering();
        for (entry, rates) in pool.members.iter().zip(rates) {
            if !cgroups.contains(&entry.cgroup) {
                continue;
            }
            let group = hierarchy.group(&entry.cgroup)?;
            // Not `verify_disk`: a limit in the kernel may be systemd's own.
            let Some(number) = entry.disk(&roots).ok().filter(|_| group.exists()) else { continue };
            let node = node(hierarchy, number);
            // An entry without limits has a weight or a latency target only.
            let limits = if rates == IoMaxRates::NONE { Vec::new() } else { write::properties(&node, rates) };
            let mut properties = write::missing_properties(hierarchy, &group, &node, limits);
            if let Ok(device) = DeviceIdentity::resolve(number, &roots) {
                let weight = weight::property_in_force(hierarchy, &group, &device, entry);
                let target = latency_target::property_in_force(&group, &device, entry);
                for property in [weight, target].into_iter().flatten() {
                    properties.extend(write::missing_properties(hierarchy, &group, &node, vec![property]));
                }
            }
            if !properties.is_empty() {
                unknown.push(MissingProperties { group, properties });
            }
        }
    }
    Ok(unknown)
}

/// Writes rates unless they are in force: each write restarts the kernel's slice, at some loss of
/// precision.
pub(crate) fn write_if_different(
    group: &ControlGroup,
    device: DeviceNumber,
    rates: IoMaxRates,
) -> anyhow::Result<()> {
    write_unless_equal(group, device, write::read_limits(group, device).ok(), rates)
}

pub(crate) fn write_unless_equal(
    group: &ControlGroup,
    device: DeviceNumber,
    kernel_rates: Option<IoMaxRates>,
    rates: IoMaxRates,
) -> anyhow::Result<()> {
    if kernel_rates == Some(write::as_printed_by_kernel(rates)) {
        Ok(())
    } else {
        write::write_limits(group, device, rates)
    }
}

/// The device's node, for systemd; a path by number if the device was removed.
pub(super) fn node(hierarchy: &CgroupHierarchy, number: DeviceNumber) -> String {
    DeviceIdentity::resolve(number, &hierarchy.roots.device_roots())
        .map_or_else(|_| format!("/dev/block/{number}"), |identity| identity.node())
}
