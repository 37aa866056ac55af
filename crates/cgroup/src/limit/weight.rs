//! Weights: written to the kernel if it divides a device by weight, otherwise used by weir to
//! divide the limits of a group.
//!
//! ```text
//!   io.cost on the device   io.weight        enable=1 in the root's io.cost.qos
//!   BFQ on the device       io.bfq.weight    bfq is the queue's scheduler
//!   neither                 weir divides a group's limits by weight; without a group a weight has no effect
//! ```
//!
//! Source: cgroup-v2.rst, "IO Interface Files"; Documentation/block/bfq-iosched.rst.

use anyhow::{Context as _, bail};
use block::device::{DeviceIdentity, DeviceNumber};

use super::{
    limits_file::{CgroupEntry, LimitsFile},
    write::{file_context, reset_device_property, set_properties},
};
use crate::{
    control_group::ControlGroup,
    hierarchy::CgroupHierarchy,
    kernel::weight::{cost_enabled, scheduler},
};

/// Property of systemd.resource-control(5).
const PROPERTY: &str = "IODeviceWeight";

/// The kernel's mechanism that divides a device by weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightMechanism {
    IoCost,
    Bfq,
}

impl WeightMechanism {
    /// File, display name and maximum weight.
    fn parts(self) -> (&'static str, &'static str, u32) {
        match self {
            Self::IoCost => ("io.weight", "io.cost", 10_000),
            Self::Bfq => ("io.bfq.weight", "BFQ", 1000),
        }
    }
}

/// A weight with the mechanism that enforces it; without one it applies in weir's groups only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedWeight {
    weight: u32,
    device: DeviceNumber,
    mechanism: Option<WeightMechanism>,
    /// The kernel's weight of the device before the change, for a rollback.
    before: Option<u32>,
}

/// Determines how a weight is enforced; fails if nothing would enforce it.
pub(super) fn plan(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    device: &DeviceIdentity,
    weight: Option<u32>,
    in_group: bool,
) -> anyhow::Result<Option<PlannedWeight>> {
    let Some(weight) = weight else { return Ok(None) };
    let mechanism = find_mechanism(hierarchy, device)?;
    if mechanism.is_none() && !in_group {
        bail!(
            "weight {weight} for cgroup {}: nothing divides {} by weight, as neither io.cost nor \
             BFQ is active there (name a --group with limits, whose parts then go by weight; or \
             enable io.cost or BFQ)",
            group.name.display(),
            device.node()
        );
    }
    let before = mechanism.and_then(|mechanism| kernel_weight(group, device.number(), mechanism));
    Ok(Some(PlannedWeight { weight, device: device.number(), mechanism, before }))
}

/// The weight of a device in the kernel's file; `None` if the default applies.
fn kernel_weight(group: &ControlGroup, device: DeviceNumber, mechanism: WeightMechanism) -> Option<u32> {
    let text = group.read(mechanism.parts().0).unwrap_or_default();
    let prefix = format!("{device} ");
    text.lines().find_map(|line| line.strip_prefix(&prefix)?.trim().parse().ok())
}

pub(crate) fn find_mechanism(
    hierarchy: &CgroupHierarchy,
    device: &DeviceIdentity,
) -> anyhow::Result<Option<WeightMechanism>> {
    let root = hierarchy.root_group()?;
    // A kernel without io.cost lacks the file.
    let cost = root.read("io.cost.qos").unwrap_or_default();
    if cost_enabled(&cost)?.contains(&(device.number(), true)) {
        return Ok(Some(WeightMechanism::IoCost));
    }
    let path = device.directory().join("queue/scheduler");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    Ok((scheduler(&text)? == Some("bfq")).then_some(WeightMechanism::Bfq))
}

impl PlannedWeight {
    /// Writes the weight to the kernel if it has a mechanism. Returns a notice about the
    /// enforcement.
    pub(super) fn write(
        self,
        hierarchy: &CgroupHierarchy,
        group: &ControlGroup,
        node: &str,
    ) -> anyhow::Result<String> {
        let weight = self.weight;
        let Some((mechanism, written_weight)) = self.write_to_kernel(group)? else {
            return Ok(format!(
                "weight {weight} divides only the limits of its group, as neither io.cost nor BFQ \
                 is active on {node}"
            ));
        };
        set_properties(hierarchy, group, &[format!("{PROPERTY}={node} {written_weight}")])?;
        let (file, mechanism_name, _) = mechanism.parts();
        let capped = if written_weight < weight {
            format!(" (written as {written_weight}, the maximum)")
        } else {
            String::new()
        };
        Ok(format!("weight {weight}{capped} is {mechanism_name}'s to enforce ({file})"))
    }

    /// Best effort, after another part of the change failed. `before` has the weights of the cgroup
    /// on other disks.
    pub(super) fn roll_back(
        self,
        hierarchy: &CgroupHierarchy,
        group: &ControlGroup,
        device: &DeviceIdentity,
        before: &LimitsFile,
    ) {
        let _ = match self.before {
            Some(weight) => Self { weight, ..self }.write(hierarchy, group, &device.node()).map(drop),
            None if self.mechanism.is_some() => reset(hierarchy, group, device, before),
            None => Ok(()),
        };
    }

    fn write_to_kernel(self, group: &ControlGroup) -> anyhow::Result<Option<(WeightMechanism, u32)>> {
        let Some(mechanism) = self.mechanism else { return Ok(None) };
        let (file, _, max_weight) = mechanism.parts();
        // The maximum of BFQ is below that of io.cost.
        let written_weight = self.weight.min(max_weight);
        group
            .write(file, &format!("{} {written_weight}", self.device))
            .with_context(|| file_context(group, file))?;
        Ok(Some((mechanism, written_weight)))
    }
}

/// Writes a weight that the kernel lost at a reboot or when the control group was created again.
pub(super) fn restore(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    device: &DeviceIdentity,
    entry: &CgroupEntry,
) -> anyhow::Result<()> {
    let weight = plan(hierarchy, group, device, entry.given_weight(), entry.group.is_some())?;
    let Some(weight @ PlannedWeight { mechanism: Some(divider), .. }) = weight else { return Ok(()) };
    // A different weight was set by another program and stays.
    if kernel_weight(group, device.number(), divider).is_some() {
        return Ok(());
    }
    weight.write_to_kernel(group).map(drop)
}

/// The property of systemd for an entry whose weight is in force; `None` if the kernel has none or
/// another one.
pub(super) fn property_in_force(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    device: &DeviceIdentity,
    entry: &CgroupEntry,
) -> Option<String> {
    let mechanism = find_mechanism(hierarchy, device).ok().flatten()?;
    let written_weight = entry.given_weight()?.min(mechanism.parts().2);
    let is_in_force = kernel_weight(group, device.number(), mechanism) == Some(written_weight);
    is_in_force.then(|| format!("{PROPERTY}={} {written_weight}", device.node()))
}

pub(super) fn reset(
    hierarchy: &CgroupHierarchy,
    group: &ControlGroup,
    device: &DeviceIdentity,
    limits_file: &LimitsFile,
) -> anyhow::Result<()> {
    let Some(file) = find_mechanism(hierarchy, device)?.map(|mechanism| mechanism.parts().0) else {
        return Ok(());
    };
    // The kernel first; afterwards systemd forgets the weight as well.
    group.write(file, &format!("{} default", device.number())).with_context(|| file_context(group, file))?;
    let others = |entry: &CgroupEntry, other: &DeviceIdentity| {
        let weight = entry.given_weight()?;
        // A device that cannot be examined has no weight in systemd either.
        let max = find_mechanism(hierarchy, other).ok().flatten()?.parts().2;
        Some(format!("{PROPERTY}={} {}", other.node(), weight.min(max)))
    };
    reset_device_property(hierarchy, group, PROPERTY, limits_file, others)
}
