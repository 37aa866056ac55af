//! Latency targets of running disks and groups: the rule for targets inside each other, and their
//! status.
//!
//! `block`'s `LatencySampler` measures and controls; see `devices.rs` for its place.

use std::{iter, sync::Arc};

use api::LatencyControlStatus;
use block::{device::TargetReport, layer::throttle::ThrottleGroup};
use policy::{
    latency_target::{LatencySettings, TargetState},
    throttle::{LimitKind, Limits},
};

use crate::registry::Registry;

/// Checks that a disk or a group with these settings, inside `group`, has no target inside another
/// one: a group's target covers all its disks together.
///
/// # Errors
/// Returns the rule that it breaks.
pub fn check_above(latency: &LatencySettings, group: Option<&Arc<ThrottleGroup>>) -> Result<(), String> {
    let has_target = |group: &&Arc<ThrottleGroup>| group.settings().latency.target.is_some();
    let above = iter::successors(group, |group| group.parent()).find(has_target);
    match above.filter(|_| latency.target.is_some()) {
        Some(above) => Err(settings::nested_target_rule(above.name())),
        None => Ok(()),
    }
}

/// Checks that a running group with these settings has no target around another one.
///
/// # Errors
/// Returns the rule that it breaks.
pub fn check_below(
    registry: &Registry,
    latency: &LatencySettings,
    group: &ThrottleGroup,
) -> Result<(), String> {
    if latency.target.is_none() {
        return Ok(());
    }
    let is_inside = |parent: Option<Arc<ThrottleGroup>>| {
        iter::successors(parent, |above| above.parent().cloned()).any(|above| std::ptr::eq(&*above, group))
    };
    let disks = registry.disks.block_disks();
    let disk = disks.iter().find(|disk| {
        disk.throttle().settings().latency.target.is_some() && is_inside(disk.throttle().group())
    });
    let groups = registry.groups.all();
    let inner = groups
        .iter()
        .find(|inner| inner.settings().latency.target.is_some() && is_inside(inner.parent().cloned()));
    let name = disk.map(|disk| &**disk.name()).or_else(|| inner.map(|inner| inner.name()));
    name.map_or(Ok(()), |name| Err(outer_target_rule(name)))
}

/// Rule of a latency target of a group around the disk or group `inner`, which has one.
pub(crate) fn outer_target_rule(inner: &str) -> String {
    format!(
        "cannot be set for a group around {inner:?}, which has a latency-target of its own (remove one \
         of them)"
    )
}

/// Status of the disk or group `name`, which has this cap.
pub fn status(registry: &Registry, name: &str, cap: Option<Limits>) -> LatencyControlStatus {
    let report = registry.latency_report(name);
    LatencyControlStatus {
        state: report.map(|report| state_name(report.state).to_owned()),
        target_ns: report.map(|report| report.target.bound_ns()),
        measured_ns: report.and_then(|report| report.measured_ns),
        alone_ns: report.as_ref().and_then(alone_ns),
        cap_iops: cap.map(|cap| cap.limit(LimitKind::IopsTotal).rate),
    }
}

/// Name of a state, in status and metrics.
const fn state_name(state: TargetState) -> &'static str {
    match state {
        TargetState::Met => "met",
        TargetState::Controlling => "controlling",
        TargetState::CannotBeMet { .. } => "cannot-be-met",
    }
}

/// The percentile with all others at their minimum, if the target cannot be met.
pub(crate) const fn alone_ns(report: &TargetReport) -> Option<u64> {
    match report.state {
        TargetState::CannotBeMet { alone_ns, .. } => Some(alone_ns),
        TargetState::Met | TargetState::Controlling => None,
    }
}
