//! What holds when nobody steers: limits without bursts or watermark, divided by weight among who
//! is there. `weir cgroup limit` tells this at once, and a watch, its guard, and their successors
//! fall back to it.

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

/// Of each control group that is there. One whose disk is gone or replaced leaves its part to the
/// others.
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

/// Whether an entry's disk is there, and no other by now. It is if the kernel has a limit there:
/// limits go with their disk. Asking the disk itself may take time.
pub(crate) fn same_disk(group: &ControlGroup, entry: &Entry, roots: &Roots) -> anyhow::Result<()> {
    let number = entry.device()?;
    if tell::told(group, number).is_ok_and(|told| told != Rates::NONE) {
        return Ok(());
    }
    entry.disk(roots).map(drop)
}

/// Tells the kernel, and systemd, what holds after a change, wherever that differs from before; who
/// gets less first. Returns what `of` was told. On an error all are as they were.
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
        // Who shares with it may be held to another rate: it was alone for a while.
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
        // What nobody here knew of may have a limit all the same.
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

/// All four rates together, to tell who loses.
fn sum(Rates { bps, iops }: &Rates) -> u128 {
    bps.iter().chain(iops).map(|rate| rate.map_or(u128::from(u64::MAX), u128::from)).sum()
}

/// Holds every control group to its limits without bursts. Errors do not stop it; the last is
/// returned, and the others are printed.
pub(crate) fn settle(hierarchy: &Hierarchy, kept: &Kept) -> anyhow::Result<()> {
    let mut failed: Option<anyhow::Error> = None;
    for (group, device, rates) in settled(hierarchy, kept)? {
        // With a weight alone, what somebody else has set there stays.
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

/// The same with the file's limits now, or `last` if that cannot be used, while nobody changes it.
pub(crate) fn settle_latest(hierarchy: &Hierarchy, path: &Path, last: &Kept) -> anyhow::Result<()> {
    let _unchanged = Unchanged::take(path);
    settle(hierarchy, &Kept::latest(path, last))
}

/// The same of what a cluster has lent. Whoever changes limits is not waited for, and what it may
/// have undone is settled once more when it has ended.
pub(crate) fn settle_lent(hierarchy: &Hierarchy, path: &Path, last: &Kept) -> anyhow::Result<()> {
    let at_once = settle(hierarchy, &Kept::latest(path, last).of_clusters());
    let _unchanged = Unchanged::take(path);
    at_once.and(settle(hierarchy, &Kept::latest(path, last).of_clusters()))
}

/// Hands the controllers down and tells the kernel, unless it has been told the same.
pub(crate) fn hold(group: &ControlGroup, device: Number, rates: Rates) -> anyhow::Result<()> {
    hand_down(group)?;
    tell_if_different(group, device, rates)
}

/// The controllers may be missing after the machine's start.
pub(crate) fn hand_down(group: &ControlGroup) -> anyhow::Result<()> {
    if group.version == Version::V1 || group.has("io.stat") {
        return Ok(());
    }
    group.enable(&["io"])?;
    // Without it buffered writes are missed, which is no reason to miss the others.
    let _ = group.enable(&["memory"]);
    Ok(())
}

/// Tells systemd what it has not been told of a control group: it takes back a controller that none
/// of its units asks for, and the limits with it (seen with version 252). False if somebody changes
/// limits meanwhile: to be tried again.
pub(crate) fn tell_systemd(hierarchy: &Hierarchy, path: &Path, group: &ControlGroup) -> anyhow::Result<bool> {
    let unchanged = Unchanged::take(path);
    if !unchanged.is_held() {
        return Ok(false);
    }
    // What was to be told may have been removed since.
    let among = HashSet::from([group.name.clone()]);
    for Telling { group, device: (_, node), rates, .. } in
        unknown_to_systemd(hierarchy, &Kept::load(path)?, &among)?
    {
        tell::of_systemd(hierarchy, &group, &node, rates)?;
    }
    Ok(true)
}

/// What systemd has not been told of these control groups, of those that are there with their disk;
/// with the rates of each beside all others, there or not.
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
        let rates = sharing.pool(Instant::ZERO).settled();
        for (entry, rates) in sharing.members.iter().zip(rates) {
            if rates == Rates::NONE || !among.contains(&entry.cgroup) {
                continue;
            }
            let group = hierarchy.group(&entry.cgroup)?;
            // Not `same_disk`: that something is limited there may be systemd's own doing.
            let Some(number) = entry.disk(&roots).ok().filter(|_| group.exists()) else { continue };
            let device = (number, node(hierarchy, number));
            if !tell::is_known_to_systemd(hierarchy, &group, &device.1) {
                unknown.push(Telling { group, device, rates, before: rates });
            }
        }
    }
    Ok(unknown)
}

/// Not if it has been told the same: each time costs it some precision.
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

/// The device's node, for systemd; its number if it is gone.
pub(super) fn node(hierarchy: &Hierarchy, number: Number) -> String {
    Identity::resolve(number, &hierarchy.roots.of_devices())
        .map_or_else(|_| format!("/dev/block/{number}"), |identity| identity.node())
}
