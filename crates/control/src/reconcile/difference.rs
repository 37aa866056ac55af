//! What is different between what runs and what the config file says now; and what of that cannot
//! be while it runs.
//!
//! What came and went over the control socket is not the file's: a disk that neither the old file
//! nor the new one has stays. Settings are compared with those in force, so that a change that was
//! not saved is taken back.
//!
//! Changes nothing.

use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use settings::{
    DiskConfig, ParsedConfig, ExportConfig, KeyTable as _, Origin, ConfigWithOrigins, PlacedDisk, PlacedGroup, DesiredState, ProcessSpec,
    key::ChangePolicy,
};

use crate::{
    registry::{Refused, Registry, RunningDisk, RunningExport},
    wanted::{Running, Wanted, Way},
};

const REMEDY: &str = "take the disk out of the file and reload, and put it back then; or restart weir";

/// By their index in the plan, or by name where it is not in there any more.
#[derive(Debug, Default)]
pub struct Difference {
    pub(crate) new_groups: Vec<usize>,
    pub(crate) kept_groups: Vec<usize>,
    /// Those inside others first.
    pub(crate) old_groups: Vec<String>,
    pub(crate) new_disks: Vec<usize>,
    pub(crate) kept_disks: Vec<usize>,
    pub(crate) old_disks: Vec<String>,
    /// Without a server that runs.
    pub(crate) new_servers: Vec<usize>,
    pub(crate) new_exports: Vec<Wanted>,
    pub(crate) old_exports: Vec<Wanted>,
}

impl Difference {
    /// Between what runs, of which `before` came from the file, and what `plan` says.
    ///
    /// # Errors
    /// What cannot be changed, with its place; what is in use.
    pub(crate) async fn find(
        registry: &Registry,
        before: &DesiredState,
        (draft, plan): (&ParsedConfig, &DesiredState),
    ) -> anyhow::Result<Self> {
        check_service(&before.process, &plan.process, draft)?;
        Self::of(registry, Some(before), plan).await
    }

    /// From a registry that has nothing of the plan, in two parts: the second has the disks for
    /// which `is_late` returns true, with their exports, and is applied after the first.
    ///
    /// # Errors
    /// A name that is in use.
    pub async fn from_empty(
        registry: &Registry,
        plan: &DesiredState,
        is_late: impl Fn(&PlacedDisk) -> bool,
    ) -> anyhow::Result<(Self, Self)> {
        let mut first = Self::of(registry, None, plan).await?;
        let (late, new_disks) = first.new_disks.into_iter().partition(|&index| is_late(&plan.disks[index]));
        first.new_disks = new_disks;
        let mut second = Self { new_disks: late, ..Self::default() };
        let names: HashSet<_> = second.new_disks.iter().map(|&index| &plan.disks[index].name).collect();
        let (late, new_exports) = first.new_exports.into_iter().partition(|one| names.contains(&one.disk));
        (first.new_exports, second.new_exports) = (new_exports, late);
        Ok((first, second))
    }

    /// True if there are images to open.
    pub fn has_new_disks(&self) -> bool {
        !self.new_disks.is_empty()
    }

    /// One disk of the plan with its exports, for which nothing else is missing.
    pub(crate) fn of_disk(plan: &DesiredState, name: &str) -> Self {
        let new_disks = plan.disks.iter().position(|disk| disk.name == name).into_iter().collect();
        let new_exports = Wanted::all(plan).into_iter().filter(|export| export.disk == name).collect();
        Self { new_disks, new_exports, ..Self::default() }
    }

    pub(super) async fn of(registry: &Registry, before: Option<&DesiredState>, plan: &DesiredState) -> anyhow::Result<Self> {
        let mut found = Self::default();
        found.of_groups(registry, before, plan)?;
        found.of_disks(registry, before, plan)?;
        let is_new =
            |(_, server): &(usize, &settings::NbdServerSpec)| registry.exports.server_at(&server.endpoint).is_none();
        found.new_servers = plan.servers.iter().enumerate().filter(is_new).map(|(index, _)| index).collect();
        let (old, new) = (before.map(Wanted::all).unwrap_or_default(), Wanted::all(plan));
        let (of_old, of_new) = (by_disk(&old), by_disk(&new));
        let is_in = |all: &HashMap<&str, Vec<&Wanted>>, one: &Wanted| {
            all.get(one.disk.as_str()).is_some_and(|all| all.contains(&one))
        };
        let running = Running::of(registry);
        let is_there = |wanted: &Wanted| running.find(wanted).is_some();
        let is_old = |one: &&Wanted| !is_in(&of_new, one) && is_there(one);
        found.old_exports = old.iter().filter(is_old).cloned().collect();
        let is_new = |one: &&Wanted| !is_in(&of_old, one) || !is_there(one);
        found.new_exports = new.iter().filter(is_new).cloned().collect();
        // What came over the control socket may be what the file asks for.
        found.new_exports.retain(|one| !is_there(one) || found.old_exports.iter().any(|old| old.is_at(one)));
        found.check_unused(registry, &running, plan).await?;
        Ok(found)
    }

    fn of_groups(&mut self, registry: &Registry, before: Option<&DesiredState>, plan: &DesiredState) -> anyhow::Result<()> {
        for (index, group) in plan.groups.iter().enumerate() {
            let place = group.own_origin();
            let Ok(running) = registry.groups.get(&group.name) else {
                registry.check_name(&group.name).with_context(|| place.to_string())?;
                self.new_groups.push(index);
                continue;
            };
            ensure!(
                registry.cluster_of(&group.name).is_some() == group.cluster,
                "{}: cluster: cannot be changed while the group is there (give it another name, and its disks that as their group; or restart weir)",
                place
            );
            ensure!(
                running.parent().map(|parent| parent.name()) == group.group.as_deref(),
                "{}: group: a group stays in the one that it was made in (give it another name, and its disks that as their group)",
                place
            );
            self.kept_groups.push(index);
        }
        let is_old = |group: &&PlacedGroup| plan.groups.iter().all(|new| new.name != group.name);
        let before = before.map(|before| &*before.groups).unwrap_or_default();
        let old = before.iter().filter(is_old).map(|group| group.name.clone());
        self.old_groups = old.filter(|name| registry.groups.get(name).is_ok()).collect();
        // A plan has them in the order in which they can be made.
        self.old_groups.reverse();
        Ok(())
    }

    fn of_disks<'p>(
        &mut self,
        registry: &Registry,
        before: Option<&'p DesiredState>,
        plan: &'p DesiredState,
    ) -> anyhow::Result<()> {
        let named = |disks: &'p [PlacedDisk]| disks.iter().map(|disk| (disk.name.as_str(), disk));
        let before = before.map(|before| &*before.disks).unwrap_or_default();
        let (known, new): (HashMap<_, _>, HashMap<_, _>) =
            (named(before).collect(), named(&plan.disks).collect());
        let old = before.iter().map(|disk| disk.name.clone());
        let old = old.filter(|name| !new.contains_key(name.as_str()));
        self.old_disks = old.filter(|name| registry.disks.get(name).is_ok()).collect();
        for (index, disk) in plan.disks.iter().enumerate() {
            let place = disk.origin("name");
            let Ok(running) = registry.disks.get(&disk.name) else {
                registry.check_name(&disk.name).with_context(|| place.to_string())?;
                let has_image = |old: &&String| {
                    disk.image.path().is_some()
                        && registry.disks.get(old).is_ok_and(|old| old.config.image == disk.image)
                };
                if let Some(old) = self.old_disks.iter().find(has_image) {
                    bail!(disk.origin("image").error(format!(
                        "the disk {old:?} has this image until it is removed (take that out and reload first)"
                    )));
                }
                self.new_disks.push(index);
                continue;
            };
            let old = known.get(disk.name.as_str());
            let keys = old.map_or_else(|| fixed_of_running(&running, disk), |old| fixed(old, disk));
            if !keys.is_empty() {
                let rule =
                    format!("{}: cannot be changed while the disk is served ({REMEDY})", keys.join(", "));
                bail!(place.error(rule));
            }
            self.kept_disks.push(index);
        }
        Ok(())
    }

    /// Nobody uses what is to go.
    async fn check_unused(&self, registry: &Registry, running: &Running, plan: &DesiredState) -> anyhow::Result<()> {
        let mut old = Vec::new();
        for one in &self.old_exports {
            let Some(export) = running.find(one) else { continue };
            let unused = export.check_unused().await;
            match self.new_exports.iter().find(|new| new.is_at(one)) {
                Some(new) => unused.with_context(|| {
                    let keys = one.differences(new).join(", ");
                    format!("{}: {keys}: cannot be changed now", shown(place_of(plan, new)))
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
                bail!(Refused::Exported { disk: name.clone(), export: export.id.clone() });
            }
        }
        let planned: HashMap<_, _> = plan.disks.iter().map(|disk| (disk.name.as_str(), disk)).collect();
        let removed: HashSet<_> = self.old_disks.iter().chain(&self.old_groups).collect();
        let leaves = |member: &String, group: &str| {
            let disk = planned.get(member.as_str());
            let moves = disk.is_some_and(|disk| disk.group.as_deref() != Some(group));
            moves || removed.contains(member)
        };
        let mut all_members = registry.members();
        for name in &self.old_groups {
            let members = all_members.remove(&Arc::as_ptr(&registry.groups.get(name)?)).unwrap_or_default();
            if let Some(member) = members.into_iter().find(|member| !leaves(member, name)) {
                bail!(Refused::HasMembers { group: name.clone(), member });
            }
        }
        Ok(())
    }
}

fn by_disk(all: &[Wanted]) -> HashMap<&str, Vec<&Wanted>> {
    let mut by_disk: HashMap<_, Vec<_>> = HashMap::new();
    for wanted in all {
        by_disk.entry(wanted.disk.as_str()).or_default().push(wanted);
    }
    by_disk
}

/// Where the file asks for an export.
pub(crate) fn place_of<'p>(plan: &'p DesiredState, wanted: &Wanted) -> Option<&'p Origin> {
    let disk = plan.disks.iter().find(|disk| disk.name == wanted.disk)?;
    let is_it = |export: &ExportConfig| match (export, &wanted.way) {
        (ExportConfig::Target(door), Way::Own(wanted)) => door == wanted,
        (ExportConfig::Nbd(export), Way::Nbd { endpoint, .. }) => export.listen == *endpoint,
        _ => false,
    };
    let place = disk.exports.iter().position(is_it).and_then(|index| disk.item_origin("export", index, ""));
    Some(place.unwrap_or_else(|| disk.origin("name")))
}

fn shown(place: Option<&Origin>) -> String {
    place.map(Origin::to_string).unwrap_or_default()
}

/// The keys by which a disk differs that cannot be changed while it is served.
pub(crate) fn fixed(old: &DiskConfig, new: &DiskConfig) -> Vec<&'static str> {
    old.differences(new).filter(|key| key.change == ChangePolicy::Reject).map(|key| key.name).collect()
}

/// The same of a disk that was added over the control socket. The file may leave the format open,
/// and name the passphrase that was a secret object there.
fn fixed_of_running(running: &RunningDisk, new: &DiskConfig) -> Vec<&'static str> {
    let old = &running.config;
    let is_same_file = match (old.image.path(), new.image.path()) {
        (Some(old), Some(new)) => std::path::absolute(old).ok() == std::path::absolute(new).ok(),
        _ => false,
    };
    let mut new = DiskConfig { format: new.format.or(old.format), ..new.clone() };
    if is_same_file {
        new.image.clone_from(&old.image);
    }
    let has_secret = running.only_here == Some("key-secret") && !new.qcow2.secrets.is_empty();
    if has_secret {
        new.qcow2.secrets.clone_from(&old.qcow2.secrets);
    }
    fixed(old, &new).into_iter().chain(running.only_here.filter(|_| !has_secret)).collect()
}

/// Refuses a change of a key of the process that cannot change while it runs. `draft` has the
/// places of the new keys.
fn check_service(old: &ProcessSpec, new: &ProcessSpec, draft: &ParsedConfig) -> anyhow::Result<()> {
    let place = |place: Option<&Origin>, key| place.map_or_else(|| format!("daemon: {key}"), Origin::to_string);
    let fixed = old.differences(new).filter(|key| key.change == ChangePolicy::Reject);
    let mut keys: Vec<_> = fixed.map(|key| place(draft.daemon.origin_of_given(key.name), key.name)).collect();
    if old.cluster != new.cluster {
        keys.push(place(draft.cluster.as_ref().map(ConfigWithOrigins::own_origin), "[cluster]"));
    }
    ensure!(
        keys.is_empty(),
        "{}: cannot be changed while weir runs (restart it, or put back what was there)",
        keys.join(", ")
    );
    Ok(())
}
