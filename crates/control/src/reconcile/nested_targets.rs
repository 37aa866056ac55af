//! Latency targets inside each other, as a difference would leave them: rejected before any
//! setting changes.
//!
//! The config has been checked by itself. Here, one of the two targets is usually of a disk or
//! group that a client added.

use std::{collections::BTreeMap, iter, sync::Arc};

use block::layer::throttle::ThrottleGroup;
use settings::{Origin, ThrottleConfig};

use super::{PlanDifference, Reconciliation};
use crate::latency_targets;

/// A disk or group of the difference.
struct PlacedTarget<'a> {
    has_target: bool,
    parent: Option<&'a str>,
    /// Origin of its target in the config.
    origin: &'a Origin,
    is_group: bool,
}

/// Disks and groups of a difference by name; they share one namespace.
type PlacedTargets<'a> = BTreeMap<&'a str, PlacedTarget<'a>>;

impl Reconciliation<'_> {
    /// Checks that the difference leaves no target inside another one.
    ///
    /// # Errors
    /// The rule that it breaks, with the origin in the config.
    pub(super) fn check_nested_targets(&self, difference: &PlanDifference) -> anyhow::Result<()> {
        let placed = self.placed_targets(difference);
        let with_target = || placed.iter().filter(|(_, placed)| placed.has_target);
        for (_, object) in with_target() {
            if let Some(outer) = self.target_above(object.parent.map(str::to_owned), &placed) {
                return Err(object.origin.error(settings::nested_target_rule(&outer)).into());
            }
        }
        // The pass over all running objects is for groups only, so that adding a disk visits no
        // other disk.
        if with_target().any(|(_, placed)| placed.is_group) {
            self.check_running_targets(difference, &placed)?;
        }
        Ok(())
    }

    /// Checks the targets of running objects that the difference does not contain.
    fn check_running_targets(
        &self,
        difference: &PlanDifference,
        placed: &PlacedTargets<'_>,
    ) -> anyhow::Result<()> {
        let parent_name = |parent: Option<&Arc<ThrottleGroup>>| parent.map(|group| group.name().to_owned());
        let groups = self.registry.groups.all().into_iter().filter_map(|group| {
            let target = group.settings().latency.target;
            target.map(|_| (group.name().to_owned(), parent_name(group.parent())))
        });
        let disks = self.registry.disks.block_disks().into_iter().filter_map(|disk| {
            let throttle = disk.throttle();
            let target = throttle.settings().latency.target;
            target.map(|_| (disk.name().to_string(), parent_name(throttle.group().as_ref())))
        });
        for (name, parent) in groups.chain(disks) {
            let is_changed = placed.contains_key(&*name)
                || difference.old_groups.contains(&name)
                || difference.old_disks.contains(&name);
            if is_changed {
                continue;
            }
            if let Some(outer) = self.target_above(parent, placed).and_then(|outer| placed.get(&*outer)) {
                return Err(outer.origin.error(latency_targets::outer_target_rule(&name)).into());
            }
        }
        Ok(())
    }

    /// The closest group with a target, from this parent upwards, after the change.
    fn target_above(&self, parent: Option<String>, placed: &PlacedTargets<'_>) -> Option<String> {
        let group = |name: &str| match placed.get(name) {
            Some(group) => Some((group.has_target, group.parent.map(str::to_owned))),
            None => {
                let group = self.registry.groups.get(name).ok()?;
                let parent = group.parent().map(|parent| parent.name().to_owned());
                Some((group.settings().latency.target.is_some(), parent))
            }
        };
        iter::successors(parent, |name| group(name)?.1)
            .find(|name| group(name).is_some_and(|(has_target, _)| has_target))
    }

    fn placed_targets(&self, difference: &PlanDifference) -> PlacedTargets<'_> {
        let placed = |settings: &ThrottleConfig, is_group, parent, origin| PlacedTarget {
            has_target: settings.latency.to_running().target.is_some(),
            parent,
            origin,
            is_group,
        };
        let groups = difference.kept_groups.iter().chain(&difference.new_groups).map(|&index| {
            let group = &self.plan.groups[index];
            let origin = group.origin("latency-target");
            (&*group.name, placed(&group.settings, true, group.group.as_deref(), origin))
        });
        let disks = difference.kept_disks.iter().chain(&difference.new_disks).map(|&index| {
            let disk = &self.plan.disks[index];
            let origin = disk.origin("latency-target");
            (&*disk.name, placed(&disk.settings, false, disk.group.as_deref(), origin))
        });
        groups.chain(disks).collect()
    }
}
