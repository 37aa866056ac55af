//! `weir cgroup limit`: limits of a control group on a disk.
//!
//! ```text
//!   CGROUP, DEV ──► change of the limits file ──► rates without bursts ──► io.max, systemd       at once
//!                        (limits_file.rs)        (settling.rs)            (write.rs)
//!                           └──────────────────► weir cgroup watch: bursts, watermarks, groups   within a tenth of a second
//! ```
//!
//! A new limit is written to the kernel first and stored only if the kernel accepts it. A removal
//! is stored first and rolled back if the kernel refuses. A change applies to all members of a
//! group, or to none.

pub(crate) mod any_device;
pub(crate) mod arguments;
pub(crate) mod configured;
pub(crate) mod latency_target;
pub(crate) mod limits_file;
pub(crate) mod locks;
mod outcome;
pub(crate) mod pools;
pub(crate) mod restored;
pub(crate) mod settling;
pub(crate) mod weight;
pub(crate) mod write;

use std::path::Path;

use anyhow::{Context as _, anyhow, bail};
use block::device::{DeviceIdentity, DeviceNumber};
use configured::ConfiguredLimits;
use console::{CommandFailure, print, print_json, signals::BlockedSignals};
use latency_target::PlannedTarget;
use limits_file::{CgroupEntry, LimitsChange, LimitsFile};
use locks::{LockedLimitsFile, WatchLock};
use outcome::{KernelLimits, LimitReport};
use policy::{steering::IoMaxRates, throttle::Limits, time::Instant, watermark::Watermark};
use pools::LimitPool;
use weight::PlannedWeight;
use write::LimitWrite;

use super::{
    control_group::{ControlGroup, Version},
    device,
    hierarchy::{CgroupHierarchy, KernelRoots},
    target,
};
use crate::limit::arguments::CgroupLimitArgs;

pub(crate) fn run(arguments: CgroupLimitArgs) -> Result<(), CommandFailure> {
    let change = arguments.settings.change();
    if arguments.remove && !change.is_empty() {
        return Err(CommandFailure::Usage(anyhow!(
            "--remove removes all limits (leave the other settings out)"
        )));
    }
    // A signal in the middle would leave half of a change.
    let _signals = BlockedSignals::block().context("signals cannot be blocked")?;
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
    let group = target::resolve(&hierarchy, &arguments.cgroup);
    if arguments.device == any_device::ANY {
        return any_device::run(&hierarchy, &arguments, &group?, &change);
    }
    let device = device::resolve(&hierarchy.roots, &arguments.device);
    let (group, device) = match (group, device) {
        (Ok(group), Ok(device)) => (group, device),
        // A removal must work even if the cgroup or the disk no longer exists: then only the file
        // is changed.
        (Err(resolve_error), device) if arguments.remove => {
            let known = device.ok().map(|device| device.identity.number());
            return remove_stale_entries(&hierarchy, &arguments, known, resolve_error);
        }
        (_, Err(resolve_error)) if arguments.remove => {
            return remove_stale_entries(&hierarchy, &arguments, None, resolve_error);
        }
        (Err(resolve_error), _) | (_, Err(resolve_error)) => return Err(resolve_error.into()),
    };
    let mut outcome = if arguments.remove {
        let file = arguments.limits_file.path();
        any_device::check_removal_of_one(&LimitsFile::load(file)?, &group, &device.identity)?;
        remove_limits(&hierarchy, file, &group, &device.identity)?
    } else if change.is_empty() {
        current_limits(arguments.limits_file.path(), &group, &device.identity)?
    } else {
        set_limits(&hierarchy, arguments.limits_file.path(), &group, &device.identity, &change)?
    };
    // Notices about the device come first.
    outcome.notices.splice(0..0, device.notices);
    if target::is_process(&arguments.cgroup) && !arguments.remove && !change.is_empty() {
        let (name, all) = (group.name.display(), group.processes().map_or(0, |all| all.len()));
        outcome
            .notices
            .insert(0, format!("the limit is for all of {name}, where that process is one of {all}"));
    }
    if arguments.json {
        print_json(&outcome)?;
    } else {
        print(&outcome.text())?;
    }
    Ok(())
}

/// The limits in force in the kernel, and those in the limits file.
fn current_limits(file: &Path, group: &ControlGroup, device: &DeviceIdentity) -> anyhow::Result<LimitReport> {
    let limits_file = LimitsFile::load(file)?;
    let configured = ConfiguredLimits::of(&limits_file, &group.name, device.number());
    let kernel = KernelLimits {
        rates: write::read_limits(group, device.number())?,
        latency_target_us: latency_target::read(group, device.number())?,
    };
    Ok(LimitReport::new(group, device, kernel, configured, Vec::new()))
}

/// Changes the limits of a control group on a device and stores them; rolls back on an error.
pub(crate) fn set_limits(
    hierarchy: &CgroupHierarchy,
    file: &Path,
    group: &ControlGroup,
    device: &DeviceIdentity,
    change: &LimitsChange,
) -> anyhow::Result<LimitReport> {
    if group.is_root() {
        bail!("the root cgroup has no limits (limit a cgroup below it, or several with --group)");
    }
    let mut locked = LockedLimitsFile::open(file)?;
    let before = locked.limits_file.clone();
    let place = (device.number(), device.key());
    let is_new = before.entry(group, device.number()).is_none();
    // Without the io controller the cgroup has no limits file.
    let has_limits = group.version == Version::V1 || group.has_file("io.max");
    // Limits that another program set, which this change could overwrite.
    let found =
        if is_new && has_limits { write::read_limits(group, device.number())? } else { IoMaxRates::NONE };
    let mut notices = Vec::new();
    if let (true, Some(name)) =
        (found != IoMaxRates::NONE, change.group.as_ref().filter(|name| !name.is_empty()))
    {
        notices
            .push(format!("its limits that another program had set are replaced by those of group {name}"));
    } else if found != IoMaxRates::NONE {
        // Unnamed limits stay in force, even if another program set them.
        locked.limits_file.change(group, place, &LimitsChange::of_rates(found))?;
        notices.push(
            "another program had set limits: weir keeps and manages those that were not given".to_owned(),
        );
    }
    locked.limits_file.change(group, place, change)?;
    let entry = locked.limits_file.entry(group, device.number()).context("a change keeps its entry")?;
    if group.version == Version::V1 {
        reject_unsupported_on_v1(&locked.limits_file.limits_of(entry).limits()?, change)?;
        notices.push(V1.to_owned());
    } else {
        // The controllers must be enabled before the first limit is written.
        enable_controllers(group, &mut notices)?;
    }
    // Planned before anything is written: an invalid weight or a target that the kernel cannot keep
    // must not leave half of a change.
    let planned = PlannedValues {
        weight: weight::plan(hierarchy, group, device, change.weight, entry.group.is_some())?,
        target: latency_target::plan(group, device.number(), change.latency_target_us)?,
    };
    // The kernel first, the file last: an error up to here leaves the file unchanged.
    let rates =
        settling::apply_change(hierarchy, &before, &locked.limits_file, Some((group, device.number())))?;
    let written = planned.write(hierarchy, group, device, [&before, &locked.limits_file], || locked.save());
    match written {
        Ok(written) => notices.extend(written),
        Err(error) => {
            // Best effort: the kernel accepted these values a moment ago. The first error is
            // reported.
            let _ = settling::apply_change(hierarchy, &locked.limits_file, &before, None);
            if is_new {
                let device_and_node = (device.number(), device.node());
                let limit_write =
                    LimitWrite { group: group.clone(), device: device_and_node, rates: found, before: found };
                let _ = write::write_all(hierarchy, &[limit_write]);
            }
            return Err(error);
        }
    }
    add_notices(&before, &locked.limits_file, file, (group, device.number()), &mut notices)?;
    if hierarchy.has_systemd() && write::is_user_unit(group) {
        notices.push("it is a unit of a user's systemd, which may undo this change at any time".to_owned());
    }
    let configured = ConfiguredLimits::of(&locked.limits_file, &group.name, device.number());
    // The change is made and stored: an unreadable target must not make it fail.
    let latency_target_us = latency_target::read(group, device.number()).unwrap_or_else(|error| {
        notices.push(format!("the latency target in force is unknown: {error:#}"));
        None
    });
    let kernel = KernelLimits { rates: rates.unwrap_or(IoMaxRates::NONE), latency_target_us };
    Ok(LimitReport::new(group, device, kernel, configured, notices))
}

/// Values that the kernel keeps beside the rates, checked and not written yet.
#[derive(Clone, Copy)]
struct PlannedValues {
    weight: Option<PlannedWeight>,
    target: Option<PlannedTarget>,
}

impl PlannedValues {
    /// Writes the values to the kernel and to systemd, and then calls `store`. On an error, rolls
    /// back what was begun. Returns notices. The files are those before and after the change.
    fn write(
        self,
        hierarchy: &CgroupHierarchy,
        group: &ControlGroup,
        device: &DeviceIdentity,
        [before, after]: [&LimitsFile; 2],
        store: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<String>> {
        let Self { weight, target } = self;
        let mut is_target_begun = false;
        let mut write_all = || -> anyhow::Result<Vec<String>> {
            let weight = weight.map(|weight| weight.write(hierarchy, group, &device.node())).transpose()?;
            is_target_begun = true;
            let target = target.map(|target| target.write(hierarchy, group, device, after)).transpose()?;
            Ok(weight.into_iter().chain(target.flatten()).collect())
        };
        let written = write_all().and_then(|notices| store().map(|()| notices));
        if written.is_err() {
            if let Some(target) = target.filter(|_| is_target_begun) {
                target.roll_back(hierarchy, group, device, before);
            }
            if let Some(weight) = weight {
                weight.roll_back(hierarchy, group, device, before);
            }
        }
        written
    }
}

/// Removes all limits of a control group on a device, in the kernel and in the limits file.
pub(crate) fn remove_limits(
    hierarchy: &CgroupHierarchy,
    file: &Path,
    group: &ControlGroup,
    device: &DeviceIdentity,
) -> anyhow::Result<LimitReport> {
    let mut locked = LockedLimitsFile::open(file)?;
    let before = locked.limits_file.clone();
    // Only a weight and a latency target that weir set are reset.
    let weighted = before.entry(group, device.number()).and_then(CgroupEntry::given_weight);
    let targeted = before.entry(group, device.number()).and_then(CgroupEntry::latency_target_us);
    let kernel_rates = write::read_limits(group, device.number())?;
    let foreign_target = match targeted {
        Some(_) => None,
        None => latency_target::read(group, device.number()).unwrap_or_default(),
    };
    let foreign = foreign_target.map(|target_us| {
        format!(
            "its latency target of {} was set by another program and stays (--latency-target 0 removes it)",
            latency_target::text(target_us)
        )
    });
    if !locked.limits_file.remove(group, device.number()) && kernel_rates == IoMaxRates::NONE {
        let foreign = foreign.map_or_else(String::new, |foreign| format!("; {foreign}"));
        bail!("{} has no limit on {} (see `weir cgroup show`){foreign}", group.name.display(), device.node());
    }
    let device_and_node = (device.number(), device.node());
    // Roll back to the settled rates: the present value may be a burst of `watch`.
    let settled = settling::settled_rates(hierarchy, &before)?.into_iter();
    let mut settled = settled.filter(|(other, number, _)| other == group && *number == device.number());
    let before_rates = settled.next().map_or(kernel_rates, |(.., rates)| rates);
    let limit_write = LimitWrite {
        group: group.clone(),
        device: device_and_node,
        rates: IoMaxRates::NONE,
        before: before_rates,
    };
    // Stored first: `watch` would otherwise write the old limits again until it reads the change.
    locked.save()?;
    let removed = write::write_all(hierarchy, &[limit_write])
        .and_then(|()| settling::apply_change(hierarchy, &before, &locked.limits_file, None))
        .and_then(|_| match weighted {
            Some(_) => weight::reset(hierarchy, group, device, &locked.limits_file),
            None => Ok(()),
        })
        .and_then(|()| match targeted {
            Some(_) => latency_target::reset(hierarchy, group, device, &locked.limits_file),
            None => Ok(()),
        });
    if let Err(error) = removed {
        // Roll back: the old limits are in force and stored again. Best effort; the first error is
        // reported.
        let after = std::mem::replace(&mut locked.limits_file, before);
        let device_and_node = (device.number(), device.node());
        let limit_write = LimitWrite {
            group: group.clone(),
            device: device_and_node,
            rates: before_rates,
            before: before_rates,
        };
        let _ = write::write_all(hierarchy, &[limit_write]);
        let _ = settling::apply_change(hierarchy, &after, &locked.limits_file, None);
        if let Ok(Some(weight)) = weight::plan(hierarchy, group, device, weighted, true) {
            let _ = weight.write(hierarchy, group, &device.node());
        }
        if let Ok(Some(target)) = latency_target::plan(group, device.number(), targeted) {
            let _ = target.write(hierarchy, group, device, &locked.limits_file);
        }
        let _ = locked.save();
        return Err(error);
    }
    let kernel = KernelLimits { latency_target_us: foreign_target, ..KernelLimits::default() };
    Ok(LimitReport::new(group, device, kernel, None, foreign.into_iter().collect()))
}

/// Removes the entries of a cgroup or disk that no longer exists, and redistributes their share;
/// returns `resolve_error` if there is no such entry.
fn remove_stale_entries(
    hierarchy: &CgroupHierarchy,
    arguments: &CgroupLimitArgs,
    known: Option<DeviceNumber>,
    resolve_error: anyhow::Error,
) -> Result<(), CommandFailure> {
    let (cgroup, device) = (arguments.cgroup.as_str(), arguments.device.as_str());
    let mut locked = LockedLimitsFile::open(arguments.limits_file.path())?;
    let before = locked.limits_file.clone();
    let is_gone = |entry: &CgroupEntry| {
        let group_exists = hierarchy.group(&entry.cgroup).is_ok_and(|group| group.exists());
        !group_exists
            || entry
                .device()
                .is_ok_and(|number| !hierarchy.roots.sys.join(format!("dev/block/{number}")).exists())
    };
    // A name can only be guessed: the cgroup or the disk no longer exists to resolve it.
    let forgotten = locked.limits_file.remove_where(|entry| {
        is_gone(entry)
            && target::could_have_named(hierarchy, cgroup, &entry.cgroup)
            && entry.could_be_on(device, known)
    });
    if forgotten.is_empty() {
        return Err(resolve_error.into());
    }
    // Several entries could be meant, and removing the wrong one cannot be undone.
    if forgotten.len() > 1 {
        let describe = |entry: &CgroupEntry| format!("{} on {}", entry.cgroup.display(), entry.device_text());
        let all: Vec<String> = forgotten.iter().map(describe).collect();
        let error = anyhow!(
            "cgroup {cgroup:?} on {device:?}: ambiguous, {} removed ones match: {} (give the path \
             of one, and its disk's number)",
            all.len(),
            all.join(", ")
        );
        return Err(error.into());
    }
    locked.save()?;
    settling::apply_change(hierarchy, &before, &locked.limits_file, None)?;
    let names: Vec<String> = forgotten.iter().map(|entry| entry.cgroup.display().to_string()).collect();
    if arguments.json {
        return Ok(print_json(&serde_json::json!({ "forgotten": names }))?);
    }
    let line = |cgroup: &String| format!("{cgroup} does not exist, and its limits were removed\n");
    Ok(print(&names.iter().map(line).collect::<String>())?)
}

const V1: &str = "cgroup v1 limits direct I/O and reads; buffered writes escape it \
                  (`weir cgroup explain` shows it; boot with systemd.unified_cgroup_hierarchy=1 for v2)";

/// Rejects settings that need `watch`, which supports v2 only.
fn reject_unsupported_on_v1(limits: &Limits, change: &LimitsChange) -> anyhow::Result<()> {
    // The same decision as in `watch`: bursts and totals need steering.
    let mut pool = policy::steering::SteeringPool::new(limits, Instant::ZERO);
    pool.add(policy::steering::SteeredMember::new(limits_file::DEFAULT_WEIGHT));
    let features = if pool.is_steered() {
        "bursts and limits on reads and writes together"
    } else if change.watermark.is_some_and(|percent| percent > 0) {
        "watermarks"
    } else if change.group.as_ref().is_some_and(|group| !group.is_empty()) {
        "groups"
    } else if change.weight.is_some() {
        "weights"
    } else if change.latency_target_us.is_some_and(|target_us| target_us > 0) {
        "latency targets"
    } else {
        return Ok(());
    };
    bail!(
        "{features} need cgroup v2, and this machine limits block I/O with v1 (set --bps-read, \
         --bps-write, --iops-read and --iops-write alone)"
    )
}

/// Enables the required controllers: io, and memory, which attributes buffered writes.
fn enable_controllers(group: &ControlGroup, notices: &mut Vec<String>) -> anyhow::Result<()> {
    // Without io there is no limit at all; without memory only buffered writes escape.
    group.enable_controllers(&["io"])?;
    if let Err(error) = group.enable_controllers(&["memory"]) {
        notices.push(format!("buffered writes escape this limit: {error:#}"));
    }
    Ok(())
}

fn add_notices(
    before: &LimitsFile,
    limits_file: &LimitsFile,
    file: &Path,
    (group, device): (&ControlGroup, DeviceNumber),
    notices: &mut Vec<String>,
) -> anyhow::Result<()> {
    // The group that this entry belongs to now.
    let is_own = |entry: &CgroupEntry| {
        entry.cgroup == group.name && entry.device().is_ok_and(|number| number == device)
    };
    let pool = LimitPool::all(limits_file)?.into_iter().find(|sharing| sharing.members.iter().any(is_own));
    let Some(pool) = pool else { return Ok(()) };
    let group_name = limits_file.entry(group, device).and_then(|entry| entry.group.as_ref());
    let alone_before = before.entry(group, device).filter(|entry| entry.group.is_none());
    if let (Some(name), Some(alone)) = (group_name, alone_before)
        && !before.limits_of(alone).limits()?.is_unlimited()
    {
        notices.push(format!("its own limits are replaced by those of group {name}"));
    }
    let is_enforced_by_kernel = notices.iter().any(|notice| notice.contains("to enforce"));
    if pool.limits.is_unlimited() && is_enforced_by_kernel && pool.watermark == Watermark::ALWAYS {
        // The kernel enforces a weight or a latency target alone, without limits.
    } else if let Some(name) = group_name.filter(|_| pool.cluster && pool.limits.is_unlimited()) {
        notices.push(format!(
            "the cluster has no limits for group {name} yet, or this host has not received them \
             (set them: `weir throttle {name} --cluster --bps-write 20M`)"
        ));
    } else if pool.limits.is_unlimited() {
        let subject = group_name.map_or_else(|| "it".to_owned(), |name| format!("group {name}"));
        notices.push(format!(
            "{subject} has no limits yet: a watermark, a weight or a group has no effect without one \
             (set one, such as --bps-write 20M)"
        ));
    } else if pool.needs_watch() && !WatchLock::is_taken(file) {
        notices.push(
            "bursts, watermarks, totals and groups need `weir cgroup watch`, which is not running: \
             until then limits are enforced without bursts, totals in equal halves, and groups by \
             weight"
                .to_owned(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
