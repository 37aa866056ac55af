//! Weights: told to the kernel where something divides by them, otherwise kept for a group's
//! division.
//!
//! ```text
//!   io.cost on the device   io.weight        its root's io.cost.qos says enable=1
//!   BFQ on the device       io.bfq.weight    its queue's scheduler is bfq
//!   neither                 a group's limits are divided by weight; a weight without a group would mean nothing
//! ```
//!
//! Source: cgroup-v2.rst, "IO Interface Files"; Documentation/block/bfq-iosched.rst.

use std::path::Path;

use anyhow::{Context as _, bail};
use block::device::{Identity, Number};
use console::complain;

use super::{
    kept::{Entry, Kept},
    settling::hand_down,
    tell::{about, set_properties},
};
use crate::{
    control_group::ControlGroup,
    hierarchy::Hierarchy,
    kernel::weight::{cost_enabled, scheduler},
};

/// What divides by weight on a device, in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Divider {
    IoCost,
    Bfq,
}

impl Divider {
    /// Its file, its name, and its largest weight.
    fn parts(self) -> (&'static str, &'static str, u32) {
        match self {
            Self::IoCost => ("io.weight", "io.cost", 10_000),
            Self::Bfq => ("io.bfq.weight", "BFQ", 1000),
        }
    }
}

/// A weight to tell the kernel, or one that is kept for weir's own division.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight {
    weight: u32,
    device: Number,
    divider: Option<Divider>,
}

/// What becomes of a weight; an error if nothing would go by it.
pub(super) fn plan(
    hierarchy: &Hierarchy,
    group: &ControlGroup,
    device: &Identity,
    weight: Option<u32>,
    in_group: bool,
) -> anyhow::Result<Option<Weight>> {
    let Some(weight) = weight else { return Ok(None) };
    let divider = divider(hierarchy, device)?;
    if divider.is_none() && !in_group {
        bail!(
            "weight {weight} for cgroup {}: nothing divides {} by weight, as neither io.cost nor BFQ is active there \
             (name a --group with limits, whose parts then go by weight; or enable io.cost or BFQ)",
            group.name.display(),
            device.node()
        );
    }
    Ok(Some(Weight { weight, device: device.number(), divider }))
}

pub(crate) fn divider(hierarchy: &Hierarchy, device: &Identity) -> anyhow::Result<Option<Divider>> {
    let root = hierarchy.root_group()?;
    // Without io.cost in the kernel there is no such file.
    let cost = root.read("io.cost.qos").unwrap_or_default();
    if cost_enabled(&cost)?.contains(&(device.number(), true)) {
        return Ok(Some(Divider::IoCost));
    }
    let path = device.directory().join("queue/scheduler");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    Ok((scheduler(&text)? == Some("bfq")).then_some(Divider::Bfq))
}

impl Weight {
    /// Tells the kernel, if something there goes by it. Says what does.
    pub(super) fn tell(
        self,
        hierarchy: &Hierarchy,
        group: &ControlGroup,
        node: &str,
    ) -> anyhow::Result<String> {
        let weight = self.weight;
        let Some((divider, told)) = self.tell_kernel(group)? else {
            return Ok(format!("weight {weight} decides the parts of its group's limits"));
        };
        set_properties(hierarchy, group, &[format!("IODeviceWeight={node} {told}")])?;
        let (file, who, _) = divider.parts();
        let capped = if told < weight { format!(" (as {told}, its largest)") } else { String::new() };
        Ok(format!("weight {weight}{capped} is {who}'s to enforce ({file})"))
    }

    fn tell_kernel(self, group: &ControlGroup) -> anyhow::Result<Option<(Divider, u32)>> {
        let Some(divider) = self.divider else { return Ok(None) };
        let (file, _, most) = divider.parts();
        let told = self.weight.min(most);
        group.write(file, &format!("{} {told}", self.device)).with_context(|| about(group, file))?;
        Ok(Some((divider, told)))
    }
}

/// Tells the kernel weights that it has forgotten, since the machine's start or since a control
/// group was made again. The last error is returned, and the others are printed.
pub(crate) fn tell_again(
    hierarchy: &Hierarchy,
    kept: &Kept,
    is_among: impl Fn(&Path) -> bool,
) -> anyhow::Result<()> {
    let roots = hierarchy.roots.of_devices();
    let again = |entry: &Entry, weight: u32| -> anyhow::Result<()> {
        let group = hierarchy.group(&entry.cgroup)?;
        let there = entry.disk(&roots).ok().and_then(|number| Identity::resolve(number, &roots).ok());
        let Some(device) = there.filter(|_| group.exists()) else { return Ok(()) };
        hand_down(&group)?;
        let weight = plan(hierarchy, &group, &device, Some(weight), entry.group.is_some())?;
        let Some(weight @ Weight { divider: Some(divider), .. }) = weight else { return Ok(()) };
        let told = group.read(divider.parts().0).unwrap_or_default();
        let own = format!("{} ", device.number());
        // Where it has another by now, somebody has changed it.
        if told.lines().any(|line| line.starts_with(&own)) {
            return Ok(());
        }
        weight.tell_kernel(&group).map(drop)
    };
    let mut failed: Option<anyhow::Error> = None;
    for entry in kept.limits.iter().filter(|entry| is_among(&entry.cgroup)) {
        let Some(weight) = entry.given_weight() else { continue };
        let Err(error) = again(entry, weight) else { continue };
        let named = error.context(format!("the weight of {}", entry.cgroup.display()));
        if let Some(earlier) = failed.replace(named) {
            complain(&earlier);
        }
    }
    failed.map_or(Ok(()), Err)
}

pub(super) fn reset(
    hierarchy: &Hierarchy,
    group: &ControlGroup,
    device: &Identity,
    kept: &Kept,
) -> anyhow::Result<()> {
    let Some(file) = divider(hierarchy, device)?.map(|divider| divider.parts().0) else { return Ok(()) };
    group.write(file, &format!("{} default", device.number())).with_context(|| about(group, file))?;
    // systemd can only forget those of all devices at once: it is told the others' again
    // (systemd.resource-control(5)).
    let mut properties = vec!["IODeviceWeight=".to_owned()];
    let roots = hierarchy.roots.of_devices();
    for entry in kept.limits.iter().filter(|entry| entry.cgroup == group.name) {
        let other = entry.device().ok().and_then(|number| Identity::resolve(number, &roots).ok());
        let Some((weight, other)) = entry.given_weight().zip(other) else { continue };
        // Of one that cannot be looked at, systemd has been told nothing either.
        if let Ok(Some(divider)) = divider(hierarchy, &other) {
            properties.push(format!("IODeviceWeight={} {}", other.node(), weight.min(divider.parts().2)));
        }
    }
    set_properties(hierarchy, group, &properties)
}
