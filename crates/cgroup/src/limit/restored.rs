//! Restores what the kernel keeps with a cgroup beside its limits: weights and latency targets.
//!
//! The kernel loses them at a reboot, and when a cgroup is created again. Never overwrites values
//! that another program set.

use std::path::Path;

use block::device::DeviceIdentity;
use console::print_error;

use super::{
    latency_target,
    limits_file::{CgroupEntry, LimitsFile},
    settling::enable_controllers,
    weight,
};
use crate::hierarchy::CgroupHierarchy;

/// Writes the weights and latency targets of the chosen cgroups. Returns the last error and prints
/// earlier ones.
pub(crate) fn restore_weights_and_targets(
    hierarchy: &CgroupHierarchy,
    limits_file: &LimitsFile,
    is_among: impl Fn(&Path) -> bool,
) -> anyhow::Result<()> {
    let roots = hierarchy.roots.device_roots();
    let restore = |entry: &CgroupEntry| -> anyhow::Result<[anyhow::Result<()>; 2]> {
        let group = hierarchy.group(&entry.cgroup)?;
        // A missing disk or cgroup gets its values when it appears.
        let found = entry.disk(&roots).ok().and_then(|number| DeviceIdentity::resolve(number, &roots).ok());
        let Some(device) = found.filter(|_| group.exists()) else { return Ok([Ok(()), Ok(())]) };
        enable_controllers(&group)?;
        let weight = weight::restore(hierarchy, &group, &device, entry);
        let target = entry
            .latency_target_us()
            .map_or(Ok(()), |target_us| latency_target::restore(&group, device.number(), target_us));
        Ok([weight, target])
    };
    let has_values =
        |entry: &CgroupEntry| entry.given_weight().is_some() || entry.latency_target_us().is_some();
    let mut failed: Option<anyhow::Error> = None;
    for entry in limits_file.limits.iter().filter(|entry| has_values(entry) && is_among(&entry.cgroup)) {
        let results = restore(entry).unwrap_or_else(|error| [Err(error), Ok(())]);
        // One failure must not prevent the remaining values.
        for error in results.into_iter().filter_map(Result::err) {
            let named = error.context(format!("weight and latency target of {}", entry.cgroup.display()));
            if let Some(earlier) = failed.replace(named) {
                print_error(&earlier);
            }
        }
    }
    failed.map_or(Ok(()), Err)
}
