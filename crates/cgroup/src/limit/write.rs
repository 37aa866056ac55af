//! Writes limits of a control group on a device to the kernel and to systemd: all four or none.
//!
//! ```text
//!   cgroup v2   io.max                         one write(2), which the kernel applies whole or not at all
//!   cgroup v1   blkio.throttle.*_device × 4    one write each; if one fails, the earlier ones are rolled back
//!   systemd     IOReadBandwidthMax= × 4        as properties as well, or it would undo the change when it next updates the unit
//! ```

use std::{
    fmt, io,
    path::{Component, Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};
use block::device::{DeviceIdentity, DeviceNumber};
use policy::steering::IoMaxRates;

use super::limits_file::{CgroupEntry, LimitsFile};
use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::CgroupHierarchy,
    kernel::{blkio, io_max},
    limit_files,
};

/// Operation rates have 32 bits in the kernel (block/blk-throttle.c, tg_set_limit); the maximum
/// means no limit.
const MAX_IOPS: u64 = u32::MAX as u64;

/// These rates as the kernel will print them.
pub(crate) fn as_printed_by_kernel(IoMaxRates { bps, iops }: IoMaxRates) -> IoMaxRates {
    IoMaxRates { bps, iops: iops.map(|rate| rate.filter(|rate| *rate < MAX_IOPS)) }
}

/// Limits in force in the kernel; no limits for a cgroup without the controller, such as the root.
pub(crate) fn read_limits(group: &ControlGroup, device: DeviceNumber) -> anyhow::Result<IoMaxRates> {
    let files = limit_files::read(group).with_context(|| format!("cgroup {}", group.name.display()))?;
    for name in limit_files::names(group.version) {
        if files.iter().any(|file| file.name == *name) {
            continue;
        }
        match group.read(name) {
            // In version 2 the controller may be disabled for an existing cgroup.
            Err(error)
                if group.version == Version::V2
                    && error.kind() == io::ErrorKind::NotFound
                    && group.exists() => {}
            text => drop(text.with_context(|| file_context(group, name))?),
        }
    }
    Ok(limit_files::merged(&files).get(&device).copied().unwrap_or_default())
}

/// Writes rates to the kernel; if it refuses, the old ones remain.
pub(crate) fn write_limits(
    group: &ControlGroup,
    device: DeviceNumber,
    rates: IoMaxRates,
) -> anyhow::Result<()> {
    match group.version {
        Version::V2 if rates == IoMaxRates::NONE && !group.has_file("io.max") && group.exists() => Ok(()),
        Version::V2 => {
            let line = io_max::line(as_printed_by_kernel(rates), device);
            group.write("io.max", &line).map_err(|error| refusal(group, "io.max", &line, &error))
        }
        Version::V1 => {
            // Version 1 has a file for each rate, so a change is not atomic.
            let before = read_limits(group, device)?;
            write_limits_v1(group, device, rates).inspect_err(|_| {
                // Best effort: the kernel accepted these values a moment ago. The first error is
                // reported.
                let _ = write_limits_v1(group, device, before);
            })
        }
    }
}

fn write_limits_v1(group: &ControlGroup, device: DeviceNumber, rates: IoMaxRates) -> anyhow::Result<()> {
    for (file, rate) in blkio::LIMITS.into_iter().zip(io_max::in_order(as_printed_by_kernel(rates))) {
        // 0 removes a limit in version 1.
        let line = format!("{device} {}", rate.unwrap_or(0));
        group.write(file, &line).map_err(|error| refusal(group, file, &line, &error))?;
    }
    Ok(())
}

/// New rates of a control group on a device, which is given with its node for systemd.
#[derive(Clone, Debug)]
pub(crate) struct LimitWrite {
    pub(crate) group: ControlGroup,
    pub(crate) device: (DeviceNumber, String),
    pub(crate) rates: IoMaxRates,
    /// Rates for a rollback, without bursts, which systemd must not store.
    pub(crate) before: IoMaxRates,
}

/// Writes several changes, in this order, to the kernel and to systemd. If one is refused, all are
/// rolled back.
pub(crate) fn write_all(hierarchy: &CgroupHierarchy, all: &[LimitWrite]) -> anyhow::Result<()> {
    let write_one = |limit_write: &LimitWrite, rates| {
        let LimitWrite { group, device: (number, node), .. } = limit_write;
        write_limits(group, *number, rates)?;
        set_systemd_limits(hierarchy, group, node, rates)
    };
    for (index, limit_write) in all.iter().enumerate() {
        if let Err(error) = write_one(limit_write, limit_write.rates) {
            // Best effort: these values were in force a moment ago. The first error is reported.
            // The failed change is included: its rates may have been written to the kernel before
            // systemd refused them.
            for done in all[..=index].iter().rev() {
                let _ = write_one(done, done.before);
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Sets the properties if systemd is running and the control group is one of its units.
pub(crate) fn set_systemd_limits(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    node: &str,
    rates: IoMaxRates,
) -> anyhow::Result<()> {
    set_properties(hierarchy, group, &properties(node, rates))
}

/// These properties of a control group on a device, unless systemd has one of them: then none is
/// missing. It stores each property in a file in /run (systemd.unit(5), "Unit File Load Path").
pub(super) fn missing_properties(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    node: &str,
    properties: Vec<String>,
) -> Vec<String> {
    // No unit: systemd does not manage it, so nothing is missing.
    let Some(unit) = unit_of(group) else { return Vec::new() };
    let names_node = |path: PathBuf| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.split(['=', ' ', '\n']).any(|token| token == node)
    };
    let is_known = ["system.control", "transient"].iter().any(|directory_name| {
        let directory = hierarchy.roots.run.join("systemd").join(directory_name).join(format!("{unit}.d"));
        let mut names =
            properties.iter().filter_map(|property| property.split_once('=')).map(|(name, _)| name);
        names.any(|name| names_node(directory.join(format!("50-{name}.conf"))))
    });
    if is_known { Vec::new() } else { properties }
}

/// Sets properties of a unit until the next reboot (`--runtime`).
pub(super) fn set_properties(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    properties: &[String],
) -> anyhow::Result<()> {
    let Some(unit) = unit_of(group).filter(|_| hierarchy.has_systemd()) else { return Ok(()) };
    let output = Command::new("systemctl")
        .args(["--no-ask-password", "set-property", "--runtime", "--", unit])
        .args(properties)
        .output()
        .with_context(|| {
            format!("systemctl cannot be run, without which systemd would undo a change to {unit}")
        })?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!("systemctl set-property {unit}: {} (see `systemctl status {unit}`)", stderr.trim());
    }
    Ok(())
}

/// Unit of the system's systemd that a control group belongs to, if all its ancestors are slices.
/// Deeper cgroups belong to a user's or a container's manager. Source: systemd.resource-control(5).
pub(crate) fn unit_of(group: &ControlGroup) -> Option<&str> {
    let mut above = group.name.parent()?.components();
    let is_slice = |component: Component<'_>| match component {
        Component::RootDir => true,
        other => Path::new(other.as_os_str()).extension().is_some_and(|suffix| suffix == "slice"),
    };
    if !above.all(is_slice) {
        return None;
    }
    // systemd prefixes `_` to names that could collide with the kernel's files.
    let name = group.name.file_name()?.to_str()?;
    let name = name.strip_prefix('_').unwrap_or(name);
    let suffix = Path::new(name).extension()?;
    ["service", "scope", "slice", "mount", "swap", "socket"]
        .iter()
        .any(|known| suffix == *known)
        .then_some(name)
}

/// True if the cgroup belongs to a user's systemd, which the system's properties do not reach.
pub(super) fn is_user_unit(group: &ControlGroup) -> bool {
    // Such as `user@1000.service`.
    let of_user = |component: Component<'_>| component.as_os_str().to_string_lossy().starts_with("user@");
    group.name.parent().is_some_and(|above| above.components().any(of_user))
}

/// Clears a property of the device that a change removed. systemd can only clear the values of all
/// devices at once, so `value_of` gives those of the cgroup's other entries, which are set again
/// (systemd.resource-control(5)).
pub(super) fn reset_device_property(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    property: &str,
    limits_file: &LimitsFile,
    value_of: impl Fn(&CgroupEntry, &DeviceIdentity) -> Option<String>,
) -> anyhow::Result<()> {
    let roots = hierarchy.roots.device_roots();
    let mut properties = vec![format!("{property}=")];
    for entry in limits_file.limits.iter().filter(|entry| entry.cgroup == group.name) {
        let device = entry.device().ok().and_then(|number| DeviceIdentity::resolve(number, &roots).ok());
        properties.extend(device.and_then(|device| value_of(entry, &device)));
    }
    set_properties(hierarchy, group, &properties)
}

/// Plain numbers, because systemd's K is 1000.
pub(super) fn properties(node: &str, IoMaxRates { bps, iops }: IoMaxRates) -> Vec<String> {
    let text = |rate: Option<u64>| rate.map_or_else(|| "infinity".to_owned(), |rate| rate.to_string());
    let rates = bps.into_iter().chain(iops);
    PROPERTIES.iter().zip(rates).map(|(property, rate)| format!("{property}={node} {}", text(rate))).collect()
}

const PROPERTIES: [&str; 4] =
    ["IOReadBandwidthMax", "IOWriteBandwidthMax", "IOReadIOPSMax", "IOWriteIOPSMax"];

pub(crate) fn file_context(group: &ControlGroup, file: &str) -> String {
    format!("cgroup {}: {file}", group.name.display())
}

/// A value that the kernel refused.
#[derive(Debug)]
pub(super) struct KernelRefusal {
    message: String,
    errno: Option<nix::errno::Errno>,
}

impl KernelRefusal {
    /// True if the device or the cgroup was removed.
    pub(super) fn is_of_removed(&self) -> bool {
        matches!(self.errno, Some(nix::errno::Errno::ENODEV))
    }
}

impl fmt::Display for KernelRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for KernelRefusal {}

pub(super) fn refusal(group: &ControlGroup, file: &str, line: &str, error: &io::Error) -> anyhow::Error {
    let errno = error.raw_os_error().map(nix::errno::Errno::from_raw);
    let remedy = match errno {
        Some(nix::errno::Errno::ENOENT) if group.is_root() => {
            "the root has no limits: limit a cgroup below it"
        }
        Some(nix::errno::Errno::ENOENT | nix::errno::Errno::EACCES)
            if group.exists() && group.version == Version::V2 =>
        {
            "is the io controller enabled for it, and are you root? `weir cgroup explain` looks"
        }
        Some(nix::errno::Errno::ENOENT) => "it has been removed",
        Some(nix::errno::Errno::EACCES | nix::errno::Errno::EPERM) => {
            "run as root, or have the cgroup delegated"
        }
        Some(nix::errno::Errno::ENODEV) => "the device or the cgroup was removed",
        Some(nix::errno::Errno::EROFS) => "cgroups are mounted read-only here: do it on the host",
        _ => "is it a whole disk?",
    };
    let message = format!("{}: \"{line}\" is refused: {error} ({remedy})", file_context(group, file));
    KernelRefusal { message, errno }.into()
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
