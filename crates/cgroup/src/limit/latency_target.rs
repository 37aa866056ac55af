//! Latency targets of cgroups: io.latency, which the kernel enforces.
//!
//! ```text
//!   CGROUP exceeds its target ──► the kernel lowers the queue depth of its siblings on that disk
//! ```
//!
//! The kernel judges windows of at least 100 ms: their mean latency on rotational disks, and
//! whether a tenth of their requests are late on others. Siblings with a lower target, and cgroups
//! of other parents, are not throttled. So a percentile is not kept, unlike by the controller of
//! weir's own disks (`policy::latency_target`), which needs the latency of each request; the kernel
//! does not count latencies of cgroups.
//!
//! Source: cgroup-v2.rst, "IO Latency"; the comments at the top of block/blk-iolatency.c.

use std::io;

use anyhow::{Context as _, bail};
use block::device::{DeviceIdentity, DeviceNumber};
use settings::{LatencyConfig, LatencySetting};

use super::{
    limits_file::{CgroupEntry, LimitsFile},
    write::{file_context, refusal, reset_device_property, set_properties},
};
use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::CgroupHierarchy,
    kernel::io_latency,
};

pub(crate) const FILE: &str = "io.latency";
/// Property of systemd.resource-control(5).
const PROPERTY: &str = "IODeviceLatencyTargetSec";

/// Parses a target as `weir throttle --latency-target` does; returns microseconds, 0 for none.
pub(super) fn parse(text: &str) -> Result<u64, String> {
    let mut config = LatencyConfig::default();
    config.read(LatencySetting::Target, text)?;
    Ok(config.target_ns.div_ceil(1000))
}

/// Text of a target, such as `5ms`; [`parse`] reads it.
pub(crate) fn text(target_us: u64) -> String {
    let config = LatencyConfig { target_ns: target_us.saturating_mul(1000), ..LatencyConfig::default() };
    config.text(LatencySetting::Target)
}

/// Part of a list of limits.
pub(crate) fn part(target_us: u64) -> String {
    format!("latency {}", text(target_us))
}

/// Target in force in the kernel, in microseconds; `None` without one, or if the kernel has no
/// io.latency.
pub(crate) fn read(group: &ControlGroup, device: DeviceNumber) -> anyhow::Result<Option<u64>> {
    if group.version == Version::V1 {
        return Ok(None);
    }
    let text = match group.read(FILE) {
        Err(error) if crate::limit_files::is_missing(&error) => return Ok(None),
        text => text.with_context(|| file_context(group, FILE))?,
    };
    let targets = io_latency::targets(&text).with_context(|| file_context(group, FILE))?;
    Ok(targets.into_iter().find(|(number, target_us)| *number == device && *target_us > 0).map(|(_, us)| us))
}

/// A new target for the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedTarget {
    /// In microseconds; 0 removes the target.
    target_us: u64,
    /// The kernel's target before the change, for a rollback.
    before_us: u64,
}

/// Checks that the kernel can keep a target. `None` changes nothing.
pub(super) fn plan(
    group: &ControlGroup,
    device: DeviceNumber,
    target_us: Option<u64>,
) -> anyhow::Result<Option<PlannedTarget>> {
    let Some(target_us) = target_us else { return Ok(None) };
    if !group.has_file(FILE) {
        if target_us == 0 {
            return Ok(None);
        }
        bail!(
            "latency target {} for cgroup {}: this kernel has no {FILE}, as it was built without \
             CONFIG_BLK_CGROUP_IOLATENCY, like Debian's (for disks that weir serves, weir keeps a \
             percentile itself: `weir throttle DISK --latency-target`; or give the other control \
             groups limits)",
            text(target_us),
            group.name.display()
        );
    }
    let before_us = read(group, device)?.unwrap_or(0);
    Ok(Some(PlannedTarget { target_us, before_us }))
}

impl PlannedTarget {
    /// Writes the target to the kernel and to systemd. Returns a notice about its enforcement.
    pub(super) fn write(
        self,
        hierarchy: &CgroupHierarchy,
        group: &ControlGroup,
        device: &DeviceIdentity,
        limits_file: &LimitsFile,
    ) -> anyhow::Result<Option<String>> {
        if self.target_us == 0 {
            return reset(hierarchy, group, device, limits_file).map(|()| None);
        }
        write_to_kernel(group, device.number(), self.target_us)?;
        set_properties(hierarchy, group, &[property(device, self.target_us)])?;
        let parent = group.name.parent().map_or_else(String::new, |parent| parent.display().to_string());
        Ok(Some(format!(
            "latency target {} is the kernel's to enforce ({FILE}): it throttles other children of \
             {parent} by their queue depth on {}, by the mean latency of 100 ms or more on rotational \
             disks, and else once a tenth of the requests are late; it keeps no percentile",
            text(self.target_us),
            device.node()
        )))
    }

    /// Best effort, after another part of the change failed.
    pub(super) fn roll_back(
        self,
        hierarchy: &CgroupHierarchy,
        group: &ControlGroup,
        device: &DeviceIdentity,
        before: &LimitsFile,
    ) {
        let old = Self { target_us: self.before_us, before_us: self.target_us };
        let _ = old.write(hierarchy, group, device, before);
    }
}

/// Removes the target in the kernel and in systemd. `limits_file` has the targets of the cgroup on
/// other disks, which stay.
pub(super) fn reset(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    device: &DeviceIdentity,
    limits_file: &LimitsFile,
) -> anyhow::Result<()> {
    if !group.has_file(FILE) {
        return Ok(());
    }
    write_to_kernel(group, device.number(), 0)?;
    let others = |entry: &CgroupEntry, other: &DeviceIdentity| {
        let target_us = entry.latency_target_us().filter(|_| other.number() != device.number())?;
        Some(property(other, target_us))
    };
    reset_device_property(hierarchy, group, PROPERTY, limits_file, others)
}

/// Writes a target that the kernel lost at a reboot or when the control group was created again. A
/// different target was set by another program and stays.
pub(super) fn restore(group: &ControlGroup, device: DeviceNumber, target_us: u64) -> anyhow::Result<()> {
    match read(group, device)? {
        Some(_) => Ok(()),
        None => write_to_kernel(group, device, target_us),
    }
}

/// The property of systemd for an entry whose target is in force; `None` if the kernel has none or
/// another one.
pub(super) fn property_in_force(
    group: &ControlGroup,
    device: &DeviceIdentity,
    entry: &CgroupEntry,
) -> Option<String> {
    let target_us = entry.latency_target_us()?;
    let in_force = read(group, device.number()).ok().flatten();
    (in_force == Some(target_us)).then(|| property(device, target_us))
}

fn write_to_kernel(group: &ControlGroup, device: DeviceNumber, target_us: u64) -> anyhow::Result<()> {
    let line = format!("{device} target={target_us}");
    group.write(FILE, &line).map_err(|error: io::Error| refusal(group, FILE, &line, &error))
}

fn property(device: &DeviceIdentity, target_us: u64) -> String {
    format!("{PROPERTY}={} {target_us}us", device.node())
}

#[cfg(test)]
#[path = "latency_target_tests.rs"]
mod tests;
