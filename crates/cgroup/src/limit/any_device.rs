//! `--device any`: a control group's limit on every disk of the machine, and on those that appear.
//!
//! ```text
//!   limits file: any-device ──► disks of /sys/dev/block without a limit ──► set_limits, for each disk
//!                                     ▲
//!                 weir cgroup watch: its start, and each disk that appears
//! ```
//!
//! Each disk gets an entry of its own in the limits file, which is independent from then on: a
//! changed limit on one disk stays. Without the watch, disks that appear are not limited. Every
//! disk counts, not only those in use: a limit that follows the first request would admit that
//! request.
//!
//! Never limits memory (ram, zram) and devices without a size (unused loop devices), nor disks
//! whose I/O all comes from a device above that is limited itself (dm, md): one request would count
//! on both.

use std::{collections::HashSet, fs, path::Path};

use anyhow::{Context as _, bail};
use block::device::{DeviceIdentity, DeviceNumber};
use console::{CommandFailure, print, print_json};

use super::{
    current_limits,
    limits_file::{CgroupEntry, LimitsChange, LimitsFile},
    locks::LockedLimitsFile,
    outcome::LimitReport,
    remove_limits, set_limits,
    write::KernelRefusal,
};
use crate::{
    control_group::ControlGroup,
    hierarchy::{CgroupHierarchy, KernelRoots},
    kernel,
    limit::arguments::CgroupLimitArgs,
};

/// Name of all disks, in place of a device.
pub(crate) const ANY: &str = "any";
/// Drivers of devices in memory: their I/O reaches no disk.
const MEMORY_DRIVERS: [&str; 2] = ["ram", "zram"];

/// Disks of the machine that can carry a limit, and those that are left out with the reason.
#[derive(Debug, Default)]
pub(crate) struct MachineDisks {
    pub(crate) disks: Vec<DeviceIdentity>,
    notices: Vec<String>,
}

impl MachineDisks {
    /// Reads the present disks. A device that vanishes meanwhile is left out.
    pub(crate) fn of(roots: &KernelRoots) -> anyhow::Result<Self> {
        let directory = roots.sys.join("dev/block");
        let entries = fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
        let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut numbers: Vec<_> = names.filter_map(|name| kernel::number(&name)).collect();
        numbers.sort_by_key(|number| (number.major, number.minor));
        let of_number = |number: &DeviceNumber| directory.join(number.to_string());
        let used_above: HashSet<DeviceNumber> =
            numbers.iter().flat_map(|number| lower_devices(&of_number(number))).collect();
        let mut all = Self::default();
        for number in numbers {
            let device = of_number(&number);
            if device.join("partition").exists() || !has_size(&device) || is_memory(&device) {
                continue;
            }
            let Ok(identity) = DeviceIdentity::resolve(number, &roots.device_roots()) else { continue };
            let parts = partitions(&device);
            let is_used_by_parts = !parts.is_empty() && parts.iter().all(|part| used_above.contains(part));
            if used_above.contains(&number) || is_used_by_parts {
                let node = identity.node();
                all.notices.push(format!("{node} is left out: the device above it (dm, md) has the limit"));
                continue;
            }
            if parts.iter().any(|part| used_above.contains(part)) {
                let node = identity.node();
                all.notices.push(format!(
                    "{node} is used directly and by a device above it (dm, md): requests to that device \
                     count on both"
                ));
            }
            all.disks.push(identity);
        }
        Ok(all)
    }
}

/// Devices below a dm or md device.
fn lower_devices(device: &Path) -> Vec<DeviceNumber> {
    let lower = fs::read_dir(device.join("slaves")).into_iter().flatten().flatten();
    lower.filter_map(|lower| number_in(&lower.path())).collect()
}

fn partitions(device: &Path) -> Vec<DeviceNumber> {
    let entries = fs::read_dir(device).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.join("partition").exists()).filter_map(|path| number_in(&path)).collect()
}

fn number_in(device: &Path) -> Option<DeviceNumber> {
    kernel::number(fs::read_to_string(device.join("dev")).ok()?.trim())
}

fn has_size(device: &Path) -> bool {
    fs::read_to_string(device.join("size")).is_ok_and(|size| size.trim() != "0")
}

fn is_memory(device: &Path) -> bool {
    let Ok(path) = device.canonicalize() else { return false };
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    MEMORY_DRIVERS.contains(&name.trim_end_matches(|c: char| c.is_ascii_digit()))
}

/// Runs `weir cgroup limit CGROUP --device any`.
pub(super) fn run(
    hierarchy: &CgroupHierarchy,
    arguments: &CgroupLimitArgs,
    group: &ControlGroup,
    change: &LimitsChange,
) -> Result<(), CommandFailure> {
    let file = arguments.limits_file.path();
    let mut outcome = if arguments.remove {
        remove(hierarchy, file, group)?
    } else if change.is_empty() {
        show(hierarchy, file, group)?
    } else {
        set(hierarchy, file, group, change)?
    };
    if arguments.json {
        print_json(&serde_json::json!({ "limits": outcome.reports, "notices": outcome.notices }))?;
    } else {
        print(&outcome.text())?;
    }
    match outcome.take_failure() {
        Some(failure) => Err(failure.into()),
        None => Ok(()),
    }
}

/// Limits of all disks.
#[derive(Debug, Default)]
pub(crate) struct AnyDeviceReport {
    pub(crate) reports: Vec<LimitReport>,
    pub(crate) notices: Vec<String>,
    /// Nodes of the disks in `reports`.
    done: Vec<String>,
    /// Nodes of the disks with an error, and the first one.
    failed: Vec<String>,
    failure: Option<anyhow::Error>,
}

impl AnyDeviceReport {
    fn text(&self) -> String {
        let reports = self.reports.iter().map(LimitReport::text);
        reports.chain(self.notices.iter().map(|notice| format!("note: {notice}\n"))).collect()
    }

    /// Notes a disk's result. A disk that was removed meanwhile needs no limit.
    fn add(
        &mut self,
        roots: &KernelRoots,
        group: &ControlGroup,
        disk: &DeviceIdentity,
        result: anyhow::Result<LimitReport>,
    ) {
        match result {
            Ok(mut report) => {
                for notice in std::mem::take(&mut report.notices) {
                    if !self.notices.contains(&notice) {
                        self.notices.push(notice);
                    }
                }
                self.reports.push(report);
                self.done.push(disk.node());
            }
            Err(error) if is_gone(roots, group, disk.number(), &error) => {
                self.notices.push(format!("{} was removed meanwhile, and is left out", disk.node()));
            }
            Err(error) => {
                self.failed.push(disk.node());
                self.failure.get_or_insert(error);
            }
        }
    }

    /// The first error, with the disks that it concerns, and those that were changed nevertheless.
    fn take_failure(&mut self) -> Option<anyhow::Error> {
        let (failed, done) = (self.failed.join(", "), self.done.join(", "));
        let done = if done.is_empty() { "on no disk".to_owned() } else { format!("on {done}") };
        self.failure.take().map(|error| error.context(format!("failed on {failed}; changed {done}")))
    }
}

/// True if the disk was removed between the list of disks and the write. The kernel may know that
/// before the entry in sysfs disappears; it returns the same error for a removed cgroup.
fn is_gone(roots: &KernelRoots, group: &ControlGroup, number: DeviceNumber, error: &anyhow::Error) -> bool {
    let refusal = error.downcast_ref::<KernelRefusal>();
    refusal.is_some_and(|refusal| refusal.is_of_removed() && group.exists())
        || !roots.sys.join(format!("dev/block/{number}")).exists()
}

/// Rejects the removal of one disk's limit while the control group has a limit on any device: the
/// watch would set it again.
pub(super) fn check_removal_of_one(
    limits_file: &LimitsFile,
    group: &ControlGroup,
    disk: &DeviceIdentity,
) -> anyhow::Result<()> {
    if limits_file.any_device.iter().any(|entry| entry.cgroup == group.name) {
        let (cgroup, node) = (group.name.display(), disk.node());
        bail!(
            "{cgroup} has limits on any device, and the watch would set them on {node} again (set other \
             limits on this disk, of which 0 is none: `weir cgroup limit {cgroup} --device {node} \
             --bps-write 0`; or remove those of all disks: `weir cgroup limit {cgroup} --device any --remove`)"
        );
    }
    Ok(())
}

/// Sets the limit on all present disks, and stores it for those that appear.
pub(crate) fn set(
    hierarchy: &CgroupHierarchy,
    file: &Path,
    group: &ControlGroup,
    change: &LimitsChange,
) -> anyhow::Result<AnyDeviceReport> {
    let MachineDisks { disks, notices } = MachineDisks::of(&hierarchy.roots)?;
    if group.is_root() {
        bail!("the root cgroup has no limits (limit a cgroup below it, or several with --group)");
    }
    let mut report = AnyDeviceReport { notices, ..AnyDeviceReport::default() };
    for disk in &disks {
        report.add(&hierarchy.roots, group, disk, set_limits(hierarchy, file, group, disk, change));
    }
    // A setting that breaks a rule fails on each disk, and must not be stored.
    if report.reports.is_empty()
        && let Some(failure) = report.failure
    {
        return Err(failure);
    }
    let mut locked = LockedLimitsFile::open(file)?;
    locked.limits_file.change_any_device(group, change)?;
    locked.save()?;
    drop(locked);
    if !super::locks::WatchLock::is_taken(file) {
        report.notices.push(
            "disks that appear need `weir cgroup watch`, which is not running: until then they have no limit"
                .to_owned(),
        );
    }
    Ok(report)
}

/// Limits of all disks that have one.
fn show(hierarchy: &CgroupHierarchy, file: &Path, group: &ControlGroup) -> anyhow::Result<AnyDeviceReport> {
    let MachineDisks { disks, notices } = MachineDisks::of(&hierarchy.roots)?;
    let mut report = AnyDeviceReport { notices, ..AnyDeviceReport::default() };
    for disk in &disks {
        report.add(&hierarchy.roots, group, disk, current_limits(file, group, disk));
    }
    let has_any = LimitsFile::load(file)?.any_device.iter().any(|entry| entry.cgroup == group.name);
    let state = if has_any { "get the limit, too" } else { "get no limit" };
    report.notices.push(format!("disks that appear {state}"));
    Ok(report)
}

/// Removes the limits of a control group on all disks, and for those that appear.
pub(crate) fn remove(
    hierarchy: &CgroupHierarchy,
    file: &Path,
    group: &ControlGroup,
) -> anyhow::Result<AnyDeviceReport> {
    let mut locked = LockedLimitsFile::open(file)?;
    let had_any = locked.limits_file.remove_any_device(&group.name);
    let entries = locked.limits_file.limits.iter().filter(|entry| entry.cgroup == group.name);
    let numbers: Vec<_> = entries.filter_map(|entry| entry.device().ok()).collect();
    if !had_any && numbers.is_empty() {
        bail!("{} has no limits (see `weir cgroup show`)", group.name.display());
    }
    // First, so that the watch adds no disk meanwhile.
    locked.save()?;
    drop(locked);
    let mut report = AnyDeviceReport::default();
    let mut absent = Vec::new();
    for number in numbers {
        match DeviceIdentity::resolve(number, &hierarchy.roots.device_roots()) {
            Ok(disk) => {
                report.add(&hierarchy.roots, group, &disk, remove_limits(hierarchy, file, group, &disk));
            }
            Err(_) => absent.push(number),
        }
    }
    let mut locked = LockedLimitsFile::open(file)?;
    let is_absent = |entry: &CgroupEntry| {
        entry.cgroup == group.name && entry.device().is_ok_and(|number| absent.contains(&number))
    };
    if !locked.limits_file.remove_where(is_absent).is_empty() {
        locked.save()?;
    }
    Ok(report)
}

/// Sets the stored limits on disks that have none yet; returns the number of new limits. For the
/// watch.
pub(crate) fn extend(hierarchy: &CgroupHierarchy, file: &Path) -> anyhow::Result<usize> {
    let limits_file = LimitsFile::load(file)?;
    if limits_file.any_device.is_empty() {
        return Ok(0);
    }
    let MachineDisks { disks, .. } = MachineDisks::of(&hierarchy.roots)?;
    let mut report = AnyDeviceReport::default();
    for any_device in &limits_file.any_device {
        // A cgroup that does not exist gets its limits when it is set again.
        let Ok(group) = hierarchy.group(&any_device.cgroup) else { continue };
        if !group.exists() {
            continue;
        }
        let change = any_device.change_for_new_disk()?;
        for disk in &disks {
            // An entry of an earlier disk with this number is replaced.
            let has_entry = limits_file.entry(&group, disk.number());
            if has_entry.is_some_and(|entry| entry.disk(&hierarchy.roots.device_roots()).is_ok()) {
                continue;
            }
            report.add(&hierarchy.roots, &group, disk, set_limits(hierarchy, file, &group, disk, &change));
        }
    }
    match report.take_failure() {
        Some(failure) => Err(failure),
        None => Ok(report.reports.len()),
    }
}

#[cfg(test)]
#[path = "any_device_tests.rs"]
mod tests;
