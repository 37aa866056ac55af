//! Disks that are not open yet when the config file is read again: nothing of them runs that could
//! differ from it. What it says of them holds once they are.

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

/// What the file says of them.
pub(super) struct Said {
    /// With them.
    pub(super) plan: Rc<DesiredState>,
    /// Those that are to be opened in another way than so far.
    openings: BTreeMap<String, Opening>,
}

/// Leaves those out that the file still has.
///
/// # Errors
/// One that is to be opened in another way cannot be.
pub(super) async fn leave_out(registry: &Registry, loaded: &Loaded, plan: &mut DesiredState) -> anyhow::Result<Said> {
    let mut said = Said { plan: Rc::new(plan.clone()), openings: BTreeMap::new() };
    let mut assembly = Assembly::new(registry.image_root().cloned(), loaded.budgets.clone());
    let mut out = Vec::new();
    for before in registry.unopened_disks() {
        let Some(planned) = plan.disks.iter().find(|planned| planned.name == before.name) else { continue };
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

    /// What is told of them: they are not open yet, or given up.
    pub(super) fn told(&self, registry: &Registry) -> Vec<Value> {
        let tell = |disk: PlacedDisk| {
            applied::listed("disk", &disk.name, if self.has(&disk.name) { "unopened" } else { "removed" })
        };
        registry.unopened_disks().into_iter().map(tell).collect()
    }

    /// Puts it in force; returns the plan with all disks.
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
