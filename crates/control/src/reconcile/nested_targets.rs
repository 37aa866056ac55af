//! Latency targets inside each other, as a difference would leave them: rejected before any
//! setting changes.
//!
//! The config has been checked by itself. Here, one of the two targets is usually of a disk or
//! group that a client added.

use std::{collections::BTreeMap, iter, sync::Arc};

use block::layer::throttle::ThrottleGroup;
use policy::latency_target::LatencySettings;
use settings::{Origin, ThrottleConfig};

use super::{PlanDifference, Reconciliation};
use crate::latency_targets;

/// A disk or group after the change.
struct PlacedTarget<'a> {
    has_target: bool,
    parent: Option<String>,
    /// Origin of its target in the config; `None` if the difference does not contain the object.
    origin: Option<&'a Origin>,
}

/// All disks and groups by name; they share one namespace.
type PlacedTargets<'a> = BTreeMap<String, PlacedTarget<'a>>;

impl Reconciliation<'_> {
    /// Checks that the difference leaves no target inside another one.
    ///
    /// # Errors
    /// The rule that it breaks, with the origin in the config.
    pub(super) fn check_nested_targets(&self, difference: &PlanDifference) -> anyhow::Result<()> {
        let all = self.placed_targets(difference);
        for (name, placed) in all.iter().filter(|(_, placed)| placed.has_target) {
            let parent = |name: &&String| all.get(*name).and_then(|placed| placed.parent.as_ref());
            let mut above = iter::successors(placed.parent.as_ref(), parent);
            let outer = above.find_map(|name| all.get_key_value(name).filter(|(_, group)| group.has_target));
            let Some((outer_name, outer)) = outer else { continue };
            if let Some(origin) = placed.origin {
                return Err(origin.error(settings::nested_target_rule(outer_name)).into());
            }
            if let Some(origin) = outer.origin {
                return Err(origin.error(latency_targets::outer_target_rule(name)).into());
            }
        }
        Ok(())
    }

    /// The running state with the difference.
    fn placed_targets(&self, difference: &PlanDifference) -> PlacedTargets<'_> {
        let mut all = PlacedTargets::new();
        let mut insert_running =
            |name: &str, latency: LatencySettings, parent: Option<&Arc<ThrottleGroup>>| {
                let parent = parent.map(|group| group.name().to_owned());
                let placed = PlacedTarget { has_target: latency.target.is_some(), parent, origin: None };
                all.insert(name.to_owned(), placed);
            };
        for group in self.registry.groups.all() {
            insert_running(group.name(), group.settings().latency, group.parent());
        }
        for disk in self.registry.disks.block_disks() {
            let throttle = disk.throttle();
            insert_running(disk.name(), throttle.settings().latency, throttle.group().as_ref());
        }
        for name in difference.old_groups.iter().chain(&difference.old_disks) {
            all.remove(name);
        }
        let planned = |settings: &ThrottleConfig, group: &Option<String>, origin| PlacedTarget {
            has_target: settings.latency.to_running().target.is_some(),
            parent: group.clone(),
            origin: Some(origin),
        };
        for &index in difference.kept_groups.iter().chain(&difference.new_groups) {
            let group = &self.plan.groups[index];
            let placed = planned(&group.settings, &group.group, group.origin("latency-target"));
            all.insert(group.name.clone(), placed);
        }
        for &index in difference.kept_disks.iter().chain(&difference.new_disks) {
            let disk = &self.plan.disks[index];
            let placed = planned(&disk.settings, &disk.group, disk.origin("latency-target"));
            all.insert(disk.name.clone(), placed);
        }
        all
    }
}
