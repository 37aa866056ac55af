//! Reload: reads the config file again, and applies its difference to the running state as one
//! change.
//!
//! ```text
//!   read ─► difference ─► open images, bind sockets      nothing has changed yet
//!                              │
//!        settings, groups, disks, exports                each can be rolled back
//!                              │
//!        removed disks, groups and servers are closed    no client uses them
//! ```
//!
//! A reload holds the exclusive lock ([`structure_lock`](super::structure_lock)): one reload at a
//! time, and commands that change disks, groups, exports or servers wait until it is applied or
//! rolled back. Hence no client uses a name that the reload frees, or a server or group that it
//! creates, before the reload is final.

mod credentials;
mod unavailable;

use std::{collections::BTreeMap, fs, path::Path, rc::Rc};

use anyhow::{Context as _, ensure};
use api::ReloadChange;
use cluster::actor::ChangeOrigin;
use credentials::RenewedCredentials;
use settings::{DesiredState, Diagnostics, ParsedConfig, RecordingConfig, config, schedule};

use super::{
    assemble,
    change::RegistryChange,
    loaded_config::LoadedConfig,
    planned_export,
    reconcile::{
        CompletedStep, PlanDifference, ReconcileReason, Reconciliation, change_report, source::FreshStart,
    },
    recording,
    registry::Registry,
};

/// Reads the config file again and applies it. Returns the changes in their order.
///
/// # Errors
/// A mistake in the file, with line and key; a change that is impossible at run time; a failed
/// step. Nothing has changed then.
pub async fn reload(registry: &Rc<Registry>) -> anyhow::Result<Vec<ReloadChange>> {
    let reloading = async {
        let result = reload_locked(registry).await;
        registry.notify(&RegistryChange::Reloaded);
        result
    };
    ChangeOrigin::reload_for_current().attribute(reloading).await
}

/// Dry run of [`reload`]: returns the changes that it would report. Changes nothing.
///
/// # Errors
/// Reason for which a reload would fail, as far as that is visible before its effects.
pub(crate) async fn dry_run(registry: &Rc<Registry>) -> anyhow::Result<Vec<ReloadChange>> {
    let _guard = registry.lock_structure().await?;
    let loaded = loaded_config(registry)?;
    let (parsed, plan, moved, unopened) = read_plan(registry, &loaded, true).await?;
    let difference = PlanDifference::find(registry, &loaded.plan, &parsed, &plan).await?;
    let recorded = recording_changes(&loaded.plan, &parsed, &plan).await?;
    let renewed = RenewedCredentials::read(&plan).await?;
    let mut reports = new_reconciliation(registry, &loaded, &plan).dry_run(&difference).await?;
    reports.extend(renewed.reports());
    reports.extend(recorded);
    reports.extend(moved);
    reports.extend(unopened.reports(registry));
    Ok(reports)
}

fn new_reconciliation<'a>(
    registry: &'a Rc<Registry>,
    loaded: &LoadedConfig,
    plan: &'a DesiredState,
) -> Reconciliation<'a> {
    let (tls, budgets) = (loaded.tls.clone(), loaded.budgets.clone());
    Reconciliation::new(ReconcileReason::Reload, registry, plan, tls, budgets)
}

fn loaded_config(registry: &Registry) -> anyhow::Result<Rc<LoadedConfig>> {
    let loaded = registry.loaded.borrow().clone();
    // During an upgrade the config is in force only after the old process has ended.
    let is_starting = loaded.is_none() && registry.config.is_some();
    ensure!(!is_starting, "an upgrade is in progress, and the old process has not ended yet (try again)");
    let loaded = loaded.context(
        "weir was started without a config file, so there is nothing to reload (start it with --config FILE)",
    )?;
    ensure!(!registry.lifecycle.is_upgrading.get(), "an upgrade is in progress (try again)");
    Ok(loaded)
}

/// Changes of the permanent recording.
///
/// # Errors
/// The new directory is unusable.
async fn recording_changes(
    before: &DesiredState,
    parsed: &ParsedConfig,
    after: &DesiredState,
) -> anyhow::Result<Vec<ReloadChange>> {
    let (before, after) = (before.process.record.as_ref(), after.process.record.as_ref());
    if let Some(wanted) = after.filter(|_| after != before).cloned() {
        let origin = parsed.daemon.origin_of_given("record").map(ToString::to_string);
        let own = before.cloned();
        let checked = reactor::run_blocking(move || recording::check_directory(&wanted, own.as_ref())).await;
        checked.with_context(|| origin.unwrap_or_default())?;
    }
    let values =
        |record: Option<&RecordingConfig>| vec![("record", record.map(RecordingConfig::to_string).into())];
    Ok(change_report::setting_reports("daemon", "", values(before), values(after)).collect())
}

async fn reload_locked(registry: &Rc<Registry>) -> anyhow::Result<Vec<ReloadChange>> {
    let _guard = registry.lifecycle.structure_lock.lock().await;
    let loaded = loaded_config(registry)?;
    let (parsed, plan, moved, unopened) = read_plan(registry, &loaded, false).await?;
    let difference = PlanDifference::find(registry, &loaded.plan, &parsed, &plan).await?;
    let recorded = recording_changes(&loaded.plan, &parsed, &plan).await?;
    let renewed = RenewedCredentials::read(&plan).await?;
    let mut work = new_reconciliation(registry, &loaded, &plan);
    work.reconcile(&difference, &mut FreshStart).await?;
    // From here on nothing is rolled back, so withheld events are sent.
    for done in std::mem::take(&mut work.completed) {
        if let CompletedStep::ExportRemoved { deletion: Some(gone), .. } = done {
            registry.notify(&gone);
        }
    }
    for name in std::mem::take(&mut work.changed_names) {
        registry.notify(&RegistryChange::SettingsChanged { name });
    }
    let mut unavailable_reports = unopened.reports(registry);
    // First: unavailable disks may still refer to groups that are removed below.
    let full_plan = unopened.apply(registry);
    for (name, image) in std::mem::take(&mut work.unavailable) {
        unavailable_reports.push(change_report::object_report("disk", &name, "unavailable"));
        registry.retry_later(&name, Rc::clone(&full_plan), image);
        registry.report_unavailable_disk(&name);
    }
    work.remove_old(&difference, &loaded.plan).await;
    let groups = plan.groups.iter().map(|group| (&group.name, group.settings));
    for (name, settings) in groups.chain(plan.disks.iter().map(|disk| (&disk.name, disk.settings))) {
        // A changed or removed reservation replaces the unmet one.
        if !registry.is_unmet(name, settings.to_group_settings().share) {
            registry.forget_unmet(name);
        }
    }
    let mut reports = work.reports;
    reports.extend(renewed.reports());
    renewed.apply(registry, &loaded);
    if !recorded.is_empty() {
        registry.recordings.change_directory(plan.process.record.as_ref()).await;
        reports.extend(recorded);
    }
    reports.extend(moved);
    reports.extend(unavailable_reports);
    assemble::log_remarks(&full_plan);
    // Includes servers without a config entry that only exports of clients keep open.
    let old = loaded.plan.servers.iter().map(|server| (&server.endpoint, None));
    for (endpoint, standard) in
        old.chain(plan.servers.iter().map(|new| (&new.endpoint, new.default_read_only)))
    {
        if let Some(serving) = planned_export::find_server(registry, endpoint) {
            serving.default_for_disks.set(standard);
        }
    }
    let LoadedConfig { file, options, inherited, tls, budgets, .. } = &*loaded;
    let (file, options, inherited) = (file.clone(), options.clone(), *inherited);
    let (tls, budgets) = (tls.clone(), budgets.clone());
    registry.loaded.replace(Some(Rc::new(LoadedConfig {
        file,
        options,
        inherited,
        plan: full_plan,
        tls,
        budgets,
    })));
    Ok(reports)
}

/// Reads the file. The plan excludes disks that are on other hosts, returned as reports, and
/// unavailable disks. On another thread: the file may be on a network file system.
async fn read_plan(
    registry: &Registry,
    loaded: &LoadedConfig,
    is_dry_run: bool,
) -> anyhow::Result<(ParsedConfig, DesiredState, Vec<ReloadChange>, unavailable::UnavailablePlan)> {
    let (file, options, inherited) = (loaded.file.clone(), loaded.options.clone(), loaded.inherited);
    let reading = reactor::run_blocking(move || {
        // A pipe or device would block every later reload.
        let is_file = fs::metadata(&file).with_context(|| file.display().to_string())?.is_file();
        ensure!(is_file, "{}: is no regular file (put the config file back there)", file.display());
        let diagnostics = Diagnostics::default();
        schedule::refresh_zones();
        let parsed = config::load_with_options(&file, &options, &diagnostics);
        let parsed = diagnostics.finish_first(parsed)?;
        let plan = DesiredState::new(parsed.clone(), inherited)?;
        anyhow::Ok((parsed, plan))
    });
    let (parsed, mut plan) = reading.await?;
    let moved = exclude_moved(registry, &mut plan).await;
    let unopened = unavailable::exclude_unavailable(registry, loaded, &mut plan, is_dry_run).await?;
    Ok((parsed, plan, moved, unopened))
}

/// Excludes disks that other hosts of the cluster have taken, as a start does, and reports their
/// hosts. A disk is kept if its image is a file without a lock; for other images nothing prevents
/// two hosts from writing.
async fn exclude_moved(registry: &Registry, plan: &mut DesiredState) -> Vec<ReloadChange> {
    let moved = registry.cluster().map(|cluster| cluster.moved()).unwrap_or_default();
    let mut out = BTreeMap::new();
    for (disk, host) in moved.into_iter().filter(|(disk, _)| registry.disks.get(disk).is_err()) {
        let Some(planned) = plan.disks.iter().find(|planned| planned.name == disk) else { continue };
        let is_free = match planned.image.path().map(Path::to_owned) {
            Some(path) => {
                let read_only = planned.read_only;
                let is_free =
                    // An unreadable file counts as in use: nothing is known about its lock.
                    move || fs::File::open(&path).is_ok() && storage::find_user(&path, read_only).is_none();
                reactor::run_blocking(is_free).await
            }
            None => false,
        };
        if !is_free {
            out.insert(disk, host);
        }
    }
    plan.remove_disks(|disk| out.contains_key(disk));
    out.iter().map(|(disk, host)| change_report::moved_disk_report(disk, host)).collect()
}
