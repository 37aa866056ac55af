//! Unavailable disks in a reload: their config changes without effect on running objects, and is
//! used once their images open.

use std::{collections::BTreeMap, rc::Rc};

use anyhow::Context as _;
use serde_json::Value;
use settings::{PlacedDisk, DesiredState};

use crate::{
    assemble::Assembly,
    loaded::Loaded,
    looking,
    opening::{Opened, Opening, Silent, State, Trial},
    reconcile::{applied, check_secrets, difference},
    registry::Registry,
};

/// Unavailable disks of the new config.
pub(super) struct Said {
    /// The plan including the unavailable disks.
    pub(super) plan: Rc<DesiredState>,
    /// Those that are to be opened in another way than so far, with the first attempt.
    openings: BTreeMap<String, (Opening, Option<Opened>)>,
}

/// Leaves those out that the file still has.
///
/// # Errors
/// One that is to be opened in another way cannot be.
pub(super) async fn leave_out(
    registry: &Registry,
    loaded: &Loaded,
    plan: &mut DesiredState,
    is_dry_run: bool,
) -> anyhow::Result<Said> {
    let mut said = Said { plan: Rc::new(plan.clone()), openings: BTreeMap::new() };
    let mut assembly = Assembly::new(registry.image_root().cloned(), loaded.budgets.clone());
    let (mut out, mut trials) = (Vec::new(), Vec::new());
    for before in registry.unopened_disks() {
        let Some(planned) = plan.disks.iter().find(|planned| planned.name == before.name) else { continue };
        // Other keys take effect when the disk is listed, without opening the image anew.
        if !difference::fixed(&before, planned).is_empty() {
            let place = || planned.origin("image").to_string();
            registry.check_image(&planned.image).await.with_context(place)?;
            check_secrets(planned).await?;
            let looked = is_dry_run.then(|| looking::alone(planned));
            let opening = assembly.opening(looked.as_ref().unwrap_or(planned)).await.with_context(place)?;
            trials.push((before.name.clone(), place(), opening.clone(), Trial::begin(opening, false)));
        }
        out.push(before.name.clone());
    }
    for (name, place, opening, trial) in trials {
        let opened = match trial.outcome().await {
            Ok(opened) => {
                let opened = opened.map_err(|error| registry.naming_holder_of(error, []));
                let image = opened.context(place)?;
                Some(reactor::spawn_joinable(async { Ok(image) }))
            }
            Err(Silent { state: State::Trying(opened), .. }) => Some(opened),
            Err(_) => None,
        };
        said.openings.insert(name, (opening, opened));
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
            applied::listed("disk", &disk.name, if self.has(&disk.name) { "unavailable" } else { "removed" })
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
