//! Difference between the running state and the config file, and the changes that are impossible at
//! run time.
//!
//! Objects that clients added over the control socket do not belong to the file: a disk that is in
//! neither the old nor the new file stays. Settings are compared with those in force, so a reload
//! reverts a change at run time that was not saved.
//!
//! Changes nothing.

use std::{
    collections::{HashMap, HashSet},
    path::{PathBuf, absolute},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use settings::{
    ConfigKey, ConfigWithOrigins, DesiredState, DiskConfig, DiskWithOrigins, ExportConfig, GroupWithOrigins,
    KeyTable as _, Origin, ParsedConfig, ProcessSpec, key::ChangePolicy,
};
use storage::FileIdentity;

use crate::{
    image_opening::OPEN_TIMEOUT,
    planned_export::{PlannedEndpoint, PlannedExport, RunningExportIndex},
    registry::{Registry, RegistryError, RunningDisk, RunningExport},
    snapshots::chain_files,
};

const REMEDY: &str = "remove the disk from the file, reload, and add it again; or restart weir";

/// Difference, by index in the new plan, or by name for objects that are not in it.
#[derive(Debug, Default)]
pub struct PlanDifference {
    pub(crate) new_groups: Vec<usize>,
    pub(crate) kept_groups: Vec<usize>,
    /// Nested groups before those that contain them.
    pub(crate) old_groups: Vec<String>,
    pub(crate) new_disks: Vec<usize>,
    pub(crate) kept_disks: Vec<usize>,
    pub(crate) old_disks: Vec<String>,
    /// Servers of the plan that do not run.
    pub(crate) new_servers: Vec<usize>,
    pub(crate) new_exports: Vec<PlannedExport>,
    pub(crate) old_exports: Vec<PlannedExport>,
}

impl PlanDifference {
    /// Difference between the running state, which `before` was applied to, and `plan`.
    ///
    /// # Errors
    /// A change that is impossible at run time, with its origin; an object to remove is in use.
    pub(crate) async fn find(
        registry: &Registry,
        before: &DesiredState,
        parsed: &ParsedConfig,
        plan: &DesiredState,
    ) -> anyhow::Result<Self> {
        check_service(&before.process, &plan.process, parsed)?;
        Self::between(registry, Some(before), plan).await
    }

    /// Difference from a registry without the plan's objects, in two parts. The second part has the
    /// disks for which `is_late` returns true, with their exports; it is applied after the first.
    ///
    /// # Errors
    /// A name is in use.
    pub async fn from_empty(
        registry: &Registry,
        plan: &DesiredState,
        is_late: impl Fn(&DiskWithOrigins) -> bool,
    ) -> anyhow::Result<(Self, Self)> {
        let mut first = Self::between(registry, None, plan).await?;
        let (late, new_disks) = first.new_disks.into_iter().partition(|&index| is_late(&plan.disks[index]));
        first.new_disks = new_disks;
        let mut second = Self { new_disks: late, ..Self::default() };
        let names: HashSet<_> = second.new_disks.iter().map(|&index| &plan.disks[index].name).collect();
        let (late, new_exports) =
            first.new_exports.into_iter().partition(|export| names.contains(&export.disk));
        (first.new_exports, second.new_exports) = (new_exports, late);
        Ok((first, second))
    }

    /// True if there are images to open.
    pub fn has_new_disks(&self) -> bool {
        !self.new_disks.is_empty()
    }

    /// Difference that adds one disk of the plan with its exports.
    pub(crate) fn of_disk(plan: &DesiredState, name: &str) -> Self {
        let new_disks = plan.disks.iter().position(|disk| disk.name == name).into_iter().collect();
        Self { new_disks, new_exports: PlannedExport::of_disk(plan, name), ..Self::default() }
    }

    /// Difference that adds all objects of a plan, whose NBD servers run.
    pub(crate) fn of_all(plan: &DesiredState) -> Self {
        Self {
            new_groups: (0..plan.groups.len()).collect(),
            new_disks: (0..plan.disks.len()).collect(),
            new_exports: PlannedExport::all(plan),
            ..Self::default()
        }
    }

    pub(super) async fn between(
        registry: &Registry,
        before: Option<&DesiredState>,
        plan: &DesiredState,
    ) -> anyhow::Result<Self> {
        let mut found = Self::default();
        found.compare_groups(registry, before, plan)?;
        found.compare_disks(registry, before, plan).await?;
        let is_new = |(_, server): &(usize, &settings::NbdServerSpec)| {
            registry.exports.server_at(&server.endpoint).is_none()
        };
        found.new_servers = plan.servers.iter().enumerate().filter(is_new).map(|(index, _)| index).collect();
        // An export with other settings is in both lists: removed, then added.
        let (old, new) = (before.map(PlannedExport::all).unwrap_or_default(), PlannedExport::all(plan));
        let (of_old, of_new) = (by_disk(&old), by_disk(&new));
        let is_in = |all: &HashMap<&str, Vec<&PlannedExport>>, export: &PlannedExport| {
            all.get(export.disk.as_str()).is_some_and(|all| all.contains(&export))
        };
        let running = RunningExportIndex::of(registry);
        let is_running = |wanted: &PlannedExport| running.find(wanted).is_some();
        let is_old = |export: &&PlannedExport| !is_in(&of_new, export) && is_running(export);
        found.old_exports = old.iter().filter(is_old).cloned().collect();
        let is_new = |export: &&PlannedExport| !is_in(&of_old, export) || !is_running(export);
        found.new_exports = new.iter().filter(is_new).cloned().collect();
        // An export that a client added may equal one of the file.
        found.new_exports.retain(|export| {
            !is_running(export) || found.old_exports.iter().any(|old| old.has_same_endpoint(export))
        });
        found.check_unused(registry, &running, plan).await?;
        Ok(found)
    }

    fn compare_groups(
        &mut self,
        registry: &Registry,
        before: Option<&DesiredState>,
        plan: &DesiredState,
    ) -> anyhow::Result<()> {
        for (index, group) in plan.groups.iter().enumerate() {
            let origin = group.own_origin();
            let Ok(running) = registry.groups.get(&group.name) else {
                registry.check_name(&group.name).with_context(|| origin.to_string())?;
                self.new_groups.push(index);
                continue;
            };
            ensure!(
                registry.cluster_of(&group.name).is_some() == group.cluster,
                "{}: cluster: cannot be changed at run time (move its disks to a new group with \
                 another name, or restart weir)",
                origin
            );
            ensure!(
                running.parent().map(|parent| parent.name()) == group.group.as_deref(),
                "{}: group: the parent of a group cannot be changed (move its disks to a new group \
                 with another name)",
                origin
            );
            self.kept_groups.push(index);
        }
        let is_old = |group: &&GroupWithOrigins| plan.groups.iter().all(|new| new.name != group.name);
        let before = before.map(|before| &*before.groups).unwrap_or_default();
        let old = before.iter().filter(is_old).map(|group| group.name.clone());
        self.old_groups = old.filter(|name| registry.groups.get(name).is_ok()).collect();
        // Plans list parents first; removal needs the reverse order.
        self.old_groups.reverse();
        Ok(())
    }

    async fn compare_disks<'p>(
        &mut self,
        registry: &Registry,
        before: Option<&'p DesiredState>,
        plan: &'p DesiredState,
    ) -> anyhow::Result<()> {
        let named = |disks: &'p [DiskWithOrigins]| disks.iter().map(|disk| (disk.name.as_str(), disk));
        let before = before.map(|before| &*before.disks).unwrap_or_default();
        let (known, new): (HashMap<_, _>, HashMap<_, _>) =
            (named(before).collect(), named(&plan.disks).collect());
        let old = before.iter().map(|disk| disk.name.clone());
        let old = old.filter(|name| !new.contains_key(name.as_str()));
        self.old_disks = old.filter(|name| registry.disks.get(name).is_ok()).collect();
        for (index, disk) in plan.disks.iter().enumerate() {
            let origin = disk.origin("name");
            let Ok(running) = registry.disks.get(&disk.name) else {
                registry.check_name(&disk.name).with_context(|| origin.to_string())?;
                let has_image = |old: &&String| {
                    disk.image.path().is_some()
                        && registry.disks.get(old).is_ok_and(|old| old.config().image == disk.image)
                };
                // The old disk is removed last: the new disk would find the image locked.
                if let Some(old) = self.old_disks.iter().find(has_image) {
                    bail!(disk.origin("image").error(format!(
                        "the disk {old:?} uses this image until it is removed (remove it from the \
                         file and reload first)"
                    )));
                }
                self.new_disks.push(index);
                continue;
            };
            let old = known.get(disk.name.as_str());
            let keys = old.map_or_else(
                || fixed_differences_of_running(&running, disk),
                |old| fixed_differences(old, disk),
            );
            if keys.contains(&"image")
                && let Some(top) = top_of_chain_with(&running, disk).await?
            {
                // A start with the old image would change it under its overlay.
                bail!(disk.origin("image").error(format!(
                    "is a backing file of the disk since a snapshot (set image = {top:?} and \
                     format = \"qcow2\" here; do not restart weir before)"
                )));
            }
            if !keys.is_empty() {
                let rule =
                    format!("{}: cannot be changed while the disk is served ({REMEDY})", keys.join(", "));
                bail!(origin.error(rule));
            }
            self.kept_disks.push(index);
        }
        Ok(())
    }

    /// Fails if an object to remove is in use.
    async fn check_unused(
        &self,
        registry: &Registry,
        running: &RunningExportIndex,
        plan: &DesiredState,
    ) -> anyhow::Result<()> {
        let mut old = Vec::new();
        for old_export in &self.old_exports {
            let Some(export) = running.find(old_export) else { continue };
            let unused = export.check_unused().await;
            match self.new_exports.iter().find(|new| new.has_same_endpoint(old_export)) {
                Some(new) => unused.with_context(|| {
                    let keys = old_export.differences(new).join(", ");
                    format!("{}: {keys}: cannot be changed now", origin_text(export_origin(plan, new)))
                })?,
                None => unused?,
            }
            old.push(export);
        }
        for name in &self.old_disks {
            let stays = |export: &&Rc<RunningExport>| {
                !export.is_ending() && !old.iter().any(|old| Rc::ptr_eq(old, export))
            };
            if let Some(export) = registry.exports.of_disk(name).iter().find(stays) {
                bail!(RegistryError::Exported { disk: name.clone(), export: export.id.clone() });
            }
            registry.jobs.check_idle(name)?;
        }
        let planned: HashMap<_, _> = plan.disks.iter().map(|disk| (disk.name.as_str(), disk)).collect();
        let removed: HashSet<_> = self.old_disks.iter().chain(&self.old_groups).collect();
        // A member is no obstacle if the same plan moves or removes it.
        let leaves = |member: &String, group: &str| {
            let disk = planned.get(member.as_str());
            let moves = disk.is_some_and(|disk| disk.group.as_deref() != Some(group));
            moves || removed.contains(member)
        };
        // Collected once: a query per group would visit all disks each time.
        let mut all_members = registry.members();
        for name in &self.old_groups {
            let members = all_members.remove(&Arc::as_ptr(&registry.groups.get(name)?)).unwrap_or_default();
            let member = members.into_iter().find(|member| !leaves(member, name));
            if let Some(member) = member.or_else(|| registry.disks.migrating_member_of(name)) {
                bail!(RegistryError::HasMembers { group: name.clone(), member });
            }
        }
        Ok(())
    }
}

fn by_disk(all: &[PlannedExport]) -> HashMap<&str, Vec<&PlannedExport>> {
    let mut by_disk: HashMap<_, Vec<_>> = HashMap::new();
    for export in all {
        by_disk.entry(export.disk.as_str()).or_default().push(export);
    }
    by_disk
}

/// Origin of an export in the config file.
pub(crate) fn export_origin<'p>(plan: &'p DesiredState, planned: &PlannedExport) -> Option<&'p Origin> {
    let disk = plan.disks.iter().find(|disk| disk.name == planned.disk)?;
    let is_match = |export: &ExportConfig| match (export, &planned.endpoint) {
        (ExportConfig::Target(target), PlannedEndpoint::Separate(wanted)) => target == wanted,
        (ExportConfig::Nbd(export), PlannedEndpoint::Nbd { endpoint, .. }) => export.listen == *endpoint,
        _ => false,
    };
    let origin =
        disk.exports.iter().position(is_match).and_then(|index| disk.item_origin("export", index, ""));
    Some(origin.unwrap_or_else(|| disk.origin("name")))
}

fn origin_text(place: Option<&Origin>) -> String {
    place.map(Origin::to_string).unwrap_or_default()
}

/// Differing keys that cannot change at run time. Two paths of one file do not differ.
pub(crate) fn fixed_differences(old: &DiskConfig, new: &DiskConfig) -> Vec<&'static str> {
    let is_same_file = absolute_path(old).is_some_and(|path| Some(path) == absolute_path(new));
    let is_fixed = |key: &&ConfigKey<DiskConfig>| {
        key.change == ChangePolicy::Reject && !(is_same_file && key.name == "image")
    };
    old.differences(new).filter(is_fixed).map(|key| key.name).collect()
}

fn absolute_path(disk: &DiskConfig) -> Option<PathBuf> {
    absolute(disk.image.path()?).ok()
}

/// Image of the running disk, if the file names a backing file of it, by whatever path.
///
/// # Errors
/// The file system of the path does not answer.
async fn top_of_chain_with(running: &RunningDisk, new: &DiskConfig) -> anyhow::Result<Option<String>> {
    let Some(path) = absolute_path(new) else { return Ok(None) };
    let image = running.disk.image();
    let mut below = image.chain().skip(1).filter_map(|image| image.files().next()).peekable();
    if below.peek().is_none() {
        return Ok(None);
    }
    let identify = reactor::run_blocking(move || FileIdentity::of_path(&path));
    let named = reactor::timeout(OPEN_TIMEOUT, identify).await;
    let named = named.ok().with_context(|| {
        let (image, seconds) = (&new.image, OPEN_TIMEOUT.as_secs());
        format!("{image}: no answer in {seconds} s (check its file system, and reload again)")
    })?;
    let is_named = named.is_some() && below.any(|storage| storage.file_identity() == named);
    Ok(chain_files(&image).into_iter().next().filter(|_| is_named))
}

/// As [`fixed_differences`], for a disk that was added over the control socket: the file may omit
/// the format, and have the passphrase in a file instead of a secret object.
fn fixed_differences_of_running(running: &RunningDisk, new: &DiskConfig) -> Vec<&'static str> {
    let old = &*running.config();
    let mut new = DiskConfig { format: new.format.or(old.format), ..new.clone() };
    let has_secret = running.host_local_option == Some("key-secret") && !new.qcow2.secrets.is_empty();
    if has_secret {
        new.qcow2.secrets.clone_from(&old.qcow2.secrets);
    }
    fixed_differences(old, &new)
        .into_iter()
        .chain(running.host_local_option.filter(|_| !has_secret))
        .collect()
}

/// Fails if a key of the process changed that is fixed at run time. The parsed config has the
/// origins of the new keys.
fn check_service(old: &ProcessSpec, new: &ProcessSpec, parsed: &ParsedConfig) -> anyhow::Result<()> {
    let text_of =
        |origin: Option<&Origin>, key| origin.map_or_else(|| format!("daemon: {key}"), Origin::to_string);
    let fixed = old.differences(new).filter(|key| key.change == ChangePolicy::Reject);
    let mut keys: Vec<_> =
        fixed.map(|key| text_of(parsed.daemon.origin_of_given(key.name), key.name)).collect();
    // The table of the cluster is not in the list of keys, so it is compared separately.
    if old.cluster != new.cluster {
        keys.push(text_of(parsed.cluster.as_ref().map(ConfigWithOrigins::own_origin), "[cluster]"));
    }
    ensure!(
        keys.is_empty(),
        "{}: cannot be changed while weir runs (restart it, or restore the old value)",
        keys.join(", ")
    );
    Ok(())
}
