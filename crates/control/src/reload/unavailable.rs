//! Unavailable disks in a reload: their config changes without effect on running objects, and is
//! used once their images open.

use std::{collections::BTreeMap, rc::Rc};

use anyhow::Context as _;
use api::ReloadChange;
use settings::{DesiredState, DiskWithOrigins};

use crate::{
    assemble::DiskAssembly,
    image_opening::{
        ImageOpenAttempt, ImageOpenRequest, ImageOpenTask, UnavailableImage, UnavailableImageState,
    },
    loaded_config::LoadedConfig,
    reconcile::{change_report, check_secret_files, difference},
    registry::Registry,
    trial_open,
};

/// Unavailable disks of the new config.
pub(super) struct UnavailablePlan {
    /// The plan including the unavailable disks.
    pub(super) plan: Rc<DesiredState>,
    /// Disks whose images must be opened with other options, with the first attempt; `None` if that
    /// failed with a transient error.
    openings: BTreeMap<String, (ImageOpenRequest, Option<ImageOpenTask>)>,
}

/// Removes unavailable disks from the plan.
///
/// # Errors
/// A disk with changed options cannot be opened, and the error is not transient.
pub(super) async fn exclude_unavailable(
    registry: &Registry,
    loaded: &LoadedConfig,
    plan: &mut DesiredState,
    is_dry_run: bool,
) -> anyhow::Result<UnavailablePlan> {
    let mut unavailable_plan = UnavailablePlan { plan: Rc::new(plan.clone()), openings: BTreeMap::new() };
    let mut assembly = DiskAssembly::new(registry.image_root().cloned(), loaded.budgets.clone());
    let (mut excluded, mut attempts) = (Vec::new(), Vec::new());
    for before in registry.unavailable_configs() {
        let Some(planned) = plan.disks.iter().find(|planned| planned.name == before.name) else { continue };
        // Other keys take effect when the disk is listed, without opening the image anew.
        if !difference::fixed_differences(&before, planned).is_empty() {
            let origin = || planned.origin("image").to_string();
            registry.check_image(&planned.image).await.with_context(origin)?;
            check_secret_files(planned).await?;
            let read_only_config = is_dry_run.then(|| trial_open::trial_config(planned));
            let request = assembly
                .open_request(read_only_config.as_ref().unwrap_or(planned))
                .await
                .with_context(origin)?;
            attempts.push((
                before.name.clone(),
                origin(),
                request.clone(),
                ImageOpenAttempt::begin(request, false),
            ));
        }
        excluded.push(before.name.clone());
    }
    for (name, origin, request, attempt) in attempts {
        let opened = match attempt.outcome().await {
            Ok(opened) => {
                let opened = opened.map_err(|error| registry.with_holder_if_lock_error(error, []));
                let image = opened.context(origin)?;
                Some(reactor::spawn_joinable(async { Ok(image) }))
            }
            Err(UnavailableImage { state: UnavailableImageState::Opening(opened), .. }) => Some(opened),
            Err(_) => None,
        };
        unavailable_plan.openings.insert(name, (request, opened));
    }
    plan.remove_disks(|disk| excluded.iter().any(|name| name == disk));
    Ok(unavailable_plan)
}

impl UnavailablePlan {
    fn contains_disk(&self, disk: &str) -> bool {
        self.plan.disks.iter().any(|planned| planned.name == disk)
    }

    /// Reports: each unavailable disk is still not open, or removed.
    pub(super) fn reports(&self, registry: &Registry) -> Vec<ReloadChange> {
        let report = |disk: DiskWithOrigins| {
            change_report::object_report(
                "disk",
                &disk.name,
                if self.contains_disk(&disk.name) { "unavailable" } else { "removed" },
            )
        };
        registry.unavailable_configs().into_iter().map(report).collect()
    }

    /// Puts the new config in force; returns the plan with all disks.
    pub(super) fn apply(mut self, registry: &Rc<Registry>) -> Rc<DesiredState> {
        for disk in registry.unavailable_configs() {
            let name = &disk.name;
            if self.contains_disk(name) {
                registry.replan_unavailable(name, Rc::clone(&self.plan), self.openings.remove(name));
            } else {
                registry.abandon_unavailable(name);
            }
        }
        self.plan
    }
}
