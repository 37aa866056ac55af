//! Unavailable disks in a reload: their config changes without effect on running objects, and is
//! used once their images open.

use std::{collections::BTreeMap, rc::Rc};

use anyhow::Context as _;
use serde_json::Value;
use settings::{PlacedDisk, DesiredState};

use crate::{
    assemble::Assembly,
    loaded::Loaded,
    opening::Opening,
    reconcile::{applied, check_secrets, difference},
    registry::Registry,
};

/// Unavailable disks of the new config.
pub(super) struct Said {
    /// The plan including the unavailable disks.
    pub(super) plan: Rc<DesiredState>,
    /// Disks whose images must be opened with other options.
    openings: BTreeMap<String, Opening>,
}

/// Removes unavailable disks from the plan.
///
/// # Errors
/// A disk with changed options cannot be opened in principle.
pub(super) async fn leave_out(registry: &Registry, loaded: &Loaded, plan: &mut DesiredState) -> anyhow::Result<Said> {
    let mut said = Said { plan: Rc::new(plan.clone()), openings: BTreeMap::new() };
    let mut assembly = Assembly::new(registry.image_root().cloned(), loaded.budgets.clone());
    let mut out = Vec::new();
    for before in registry.unopened_disks() {
        let Some(planned) = plan.disks.iter().find(|planned| planned.name == before.name) else { continue };
        // Other keys take effect when the disk is listed, without opening the image anew.
        if !difference::fixed(&before, planned).is_empty() {
            let place = || planned.origin("image").to_string();
            registry.check_image(&planned.image).await.with_context(place)?;
            check_secrets(planned).await?;
            said.openings.insert(before.name.clone(), assembly.opening(planned).await.with_context(place)?);
        }
        out.push(before.name.clone());
    }
    plan.remove_disks(|disk| out.iter().any(|name| name == disk));
    Ok(said)
}

impl Said {
    fn has(&self, disk: &str) -> bool {
        self.plan.disks.iter().any(|planned| planned.name == disk)
    }

    /// Reports: each unavailable disk is still not open, or removed.
    pub(super) fn told(&self, registry: &Registry) -> Vec<Value> {
        let tell = |disk: PlacedDisk| {
            applied::listed("disk", &disk.name, if self.has(&disk.name) { "unopened" } else { "removed" })
        };
        registry.unopened_disks().into_iter().map(tell).collect()
    }

    /// Puts the new config in force; returns the plan with all disks.
    pub(super) fn settle(mut self, registry: &Rc<Registry>) -> Rc<DesiredState> {
        for disk in registry.unopened_disks() {
            let name = &disk.name;
            if self.has(name) {
                registry.plan_unopened(name, Rc::clone(&self.plan), self.openings.remove(name));
            } else {
                registry.give_up_unopened(name);
            }
        }
        self.plan
    }
}
