//! Settled limits: limits without bursts or watermark, divided by weight among the existing
//! members. `weir cgroup limit` writes them at once; `watch`, its guard and their successors fall
//! back to them.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
};

use block::device::{Identity, Number, Roots};
use console::complain;
use policy::{steering::Rates, time::Instant};

use super::{
    kept::{Entry, Kept},
    locks::Unchanged,
    pools::Sharing,
    tell::{self, Telling},
};
use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::Hierarchy,
};

pub(crate) type Settled = (ControlGroup, Number, Rates);

/// Settled rates of each existing control group. The share of a control group whose disk is gone or
/// replaced goes to the other members.
pub(crate) fn settled(hierarchy: &Hierarchy, kept: &Kept) -> anyhow::Result<Vec<Settled>> {
    let mut all = Vec::new();
    for sharing in Sharing::all(kept)? {
        all.extend(settled_of(hierarchy, sharing)?);
    }
    Ok(all)
}

pub(crate) fn settled_of(hierarchy: &Hierarchy, sharing: Sharing) -> anyhow::Result<Vec<Settled>> {
    let roots = hierarchy.roots.of_devices();
    let sharing = sharing.of_those(|entry| {
        hierarchy
            .group(&entry.cgroup)
            .is_ok_and(|group| group.exists() && same_disk(&group, entry, &roots).is_ok())
    });
    let rates = sharing.pool(Instant::ZERO).settled();
    let place = |entry: &Entry| -> anyhow::Result<(ControlGroup, Number)> {
        Ok((hierarchy.group(&entry.cgroup)?, entry.device()?))
    };
    let held = sharing.members.iter().zip(rates);
    held.map(|(entry, rates)| place(entry).map(|(group, device)| (group, device, rates))).collect()
}

/// Fails if an entry's disk is gone or its number belongs to another disk. A limit in the kernel
/// proves the disk, because limits vanish with their disk; identifying the disk itself may block.
pub(crate) fn same_disk(group: &ControlGroup, entry: &Entry, roots: &Roots) -> anyhow::Result<()> {
    let number = entry.device()?;
    if tell::told(group, number).is_ok_and(|told| told != Rates::NONE) {
        return Ok(());
    }
    entry.disk(roots).map(drop)
}

/// Writes the settled rates after a change to the kernel and to systemd, wherever they differ from
/// before; decreases come first, so that the sum never exceeds the limit. Returns the rates of
/// `of`. On an error all are rolled back.
pub(super) fn change(
    hierarchy: &Hierarchy,
    before: &Kept,
    after: &Kept,
    of: Option<(&ControlGroup, Number)>,
) -> anyhow::Result<Option<Rates>> {
    let before = settled(hierarchy, before)?;
    let before: HashMap<_, _> =
        before.into_iter().map(|(group, device, rates)| ((group, device), rates)).collect();
    let is_asked = |group: &ControlGroup, number| of == Some((group, number));
    let mut changes: Vec<((ControlGroup, Number), Rates)> = settled(hierarchy, after)?
        .into_iter()
        .map(|(group, device, rates)| ((group, device), rates))
        .collect();
    let shared = of.map(|of| sharing_with(after, of)).transpose()?.unwrap_or_default();
    let differs = |(group, number): &(ControlGroup, Number), rates: &Rates| {
        // Members of the same pool may have other rates at present: `of` was absent for a while.
        shared.contains(&(group.name.clone(), *number))
            && tell::told(group, *number).is_ok_and(|told| told != *rates)
    };
    changes.retain(|(place, rates)| {
        is_asked(&place.0, place.1) || before.get(place) != Some(rates) || differs(place, rates)
    });
    changes.sort_by_key(|(place, rates)| before.get(place).is_none_or(|was| sum(rates) >= sum(was)));
    let found = changes.iter().find(|(place, _)| is_asked(&place.0, place.1)).map(|(_, rates)| *rates);
    let telling = |((group, number), rates): ((ControlGroup, Number), Rates)| {
        let place = (group, number);
        // An unknown cgroup may have a limit of another program; a rollback restores it.
        let found = || tell::told(&place.0, number).unwrap_or(Rates::NONE);
        let before = before.get(&place).copied().unwrap_or_else(found);
        Telling { group: place.0, device: (number, node(hierarchy, number)), rates, before }
    };
    let changes: Vec<Telling> = changes.into_iter().map(telling).collect();
    tell::tell_all(hierarchy, &changes)?;
    Ok(found)
}

fn sharing_with(
    kept: &Kept,
    (group, number): (&ControlGroup, Number),
) -> anyhow::Result<Vec<(PathBuf, Number)>> {
    let place = |entry: &Entry| Some((entry.cgroup.clone(), entry.device().ok()?));
    let asked = (group.name.clone(), number);
    let all = Sharing::all(kept)?.into_iter();
    let mut places = all.map(|sharing| sharing.members.iter().filter_map(place).collect::<Vec<_>>());
    Ok(places.find(|places| places.contains(&asked)).unwrap_or_default())
}

/// Sum of all four rates, which orders changes by decrease and increase.
fn sum(Rates { bps, iops }: &Rates) -> u128 {
    bps.iter().chain(iops).map(|rate| rate.map_or(u128::from(u64::MAX), u128::from)).sum()
}

/// Sets every control group to its settled rates. Continues after an error; returns the last one
/// and prints the others.
pub(crate) fn settle(hierarchy: &Hierarchy, kept: &Kept) -> anyhow::Result<()> {
    let mut failed: Option<anyhow::Error> = None;
    // One failure must not leave other control groups in a burst.
    for (group, device, rates) in settled(hierarchy, kept)? {
        // The entry has a weight only: limits of other programs stay.
        if rates == Rates::NONE {
            continue;
        }
        let Err(error) = hold(&group, device, rates) else { continue };
        if let Some(earlier) = failed.replace(error) {
            complain(&earlier);
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Settles the file's present limits, or `last` if the file is unreadable, under the change lock.
pub(crate) fn settle_latest(hierarchy: &Hierarchy, path: &Path, last: &Kept) -> anyhow::Result<()> {
    let _unchanged = Unchanged::take(path);
    settle(hierarchy, &Kept::latest(path, last))
}

/// Settles quota leased by a cluster. Does not wait for a concurrent change; settles once more
/// after it, in case the change overwrote the rates.
pub(crate) fn settle_lent(hierarchy: &Hierarchy, path: &Path, last: &Kept) -> anyhow::Result<()> {
    // At once: other hosts may use the quota from now on.
    let at_once = settle(hierarchy, &Kept::latest(path, last).of_clusters());
    let _unchanged = Unchanged::take(path);
    at_once.and(settle(hierarchy, &Kept::latest(path, last).of_clusters()))
}

/// Enables the controllers and writes the rates, unless they are in force already.
pub(crate) fn hold(group: &ControlGroup, device: Number, rates: Rates) -> anyhow::Result<()> {
    hand_down(group)?;
    tell_if_different(group, device, rates)
}

/// Enables missing controllers, as after a reboot.
pub(crate) fn hand_down(group: &ControlGroup) -> anyhow::Result<()> {
    if group.version == Version::V1 || group.has("io.stat") {
        return Ok(());
    }
    group.enable(&["io"])?;
    // Without memory, buffered writes escape; the other limits still work.
    let _ = group.enable(&["memory"]);
    Ok(())
}

/// Sets the limits in systemd that it lacks: systemd disables a controller that none of its units
/// requests, and the limits with it (seen with version 252). Returns false during a concurrent
/// change, to be retried.
pub(crate) fn tell_systemd(hierarchy: &Hierarchy, path: &Path, group: &ControlGroup) -> anyhow::Result<bool> {
    let unchanged = Unchanged::take(path);
    if !unchanged.is_held() {
        return Ok(false);
    }
    // Read under the lock: the limits may have been removed since the caller looked.
    let among = HashSet::from([group.name.clone()]);
    for Telling { group, device: (_, node), rates, .. } in
        unknown_to_systemd(hierarchy, &Kept::load(path)?, &among)?
    {
        tell::of_systemd(hierarchy, &group, &node, rates)?;
    }
    Ok(true)
}

/// Limits that systemd lacks, for those of the cgroups `among` that exist with their disk. Each has
/// its settled rates among all members, existing or not.
pub(crate) fn unknown_to_systemd(
    hierarchy: &Hierarchy,
    kept: &Kept,
    among: &HashSet<PathBuf>,
) -> anyhow::Result<Vec<Telling>> {
    let mut unknown = Vec::new();
    if !hierarchy.systemd() {
        return Ok(unknown);
    }
    let roots = hierarchy.roots.of_devices();
    for sharing in Sharing::all(kept)? {
        // Computed for all members, because each one's share depends on their number.
        let rates = sharing.pool(Instant::ZERO).settled();
        for (entry, rates) in sharing.members.iter().zip(rates) {
            if rates == Rates::NONE || !among.contains(&entry.cgroup) {
                continue;
            }
            let group = hierarchy.group(&entry.cgroup)?;
            // Not `same_disk`: a limit in the kernel may be systemd's own.
            let Some(number) = entry.disk(&roots).ok().filter(|_| group.exists()) else { continue };
            let device = (number, node(hierarchy, number));
            if !tell::is_known_to_systemd(hierarchy, &group, &device.1) {
                unknown.push(Telling { group, device, rates, before: rates });
            }
        }
    }
    Ok(unknown)
}

/// Writes rates unless they are in force: each write restarts the kernel's slice, at some loss of
/// precision.
pub(crate) fn tell_if_different(group: &ControlGroup, device: Number, rates: Rates) -> anyhow::Result<()> {
    tell_after(group, device, tell::told(group, device).ok(), rates)
}

pub(crate) fn tell_after(
    group: &ControlGroup,
    device: Number,
    told: Option<Rates>,
    rates: Rates,
) -> anyhow::Result<()> {
    if told == Some(tell::as_kept(rates)) { Ok(()) } else { tell::tell(group, device, rates) }
}

/// The device's node, for systemd; a path by number if the device is gone.
pub(super) fn node(hierarchy: &Hierarchy, number: Number) -> String {
    Identity::resolve(number, &hierarchy.roots.of_devices())
        .map_or_else(|_| format!("/dev/block/{number}"), |identity| identity.node())
}
