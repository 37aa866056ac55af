//! Brings the running state to a desired one: the difference between both, as one change.
//!
//! ```text
//!   difference ─► open images, bind sockets              nothing has changed yet
//!                        │
//!      settings, groups, disks                           each step can be rolled back
//!                        │
//!      reservations ─► cluster                           it confirms or refuses them
//!                        │
//!      exports                                           can be rolled back as well
//!                        │
//!      removed disks, groups and servers are closed      no client uses them
//! ```
//!
//! Commands that change the structure of the running state wait for the end of a reload:
//! [`structure_lock`](super::structure_lock). Clients of exports may still connect or disconnect
//! between two steps, and devices may be removed externally. Steps that depend on these check the
//! running state again.

pub(crate) mod change_report;
pub(crate) mod difference;
mod dry_run;
mod image_checks;
mod images;
mod nested_targets;
pub(crate) mod placements;
mod roll_back;
pub mod source;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeSet, HashSet},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, bail};
use api::ReloadChange;
use block::layer::throttle::{GroupSettings, ThrottleGroup};
pub use difference::PlanDifference;
use export::nbd::{self, Removal};
use image::Image;
pub(crate) use images::check_secret_files;
use placements::{GroupOrDisk, MemberPlacement, without_reservation};
use policy::throttle::NodeShare;
pub(crate) use roll_back::CompletedStep;
use roll_back::apply_config;
use settings::{DesiredState, DiskConfig, DiskWithOrigins, ListenEndpoint};
use source::StartSource;
use storage::rate::RateBudgets;

use super::{
    assemble::{self, DiskAssembly},
    image_opening::UnavailableImage,
    listen,
    planned_export::{self, PlannedEndpoint, PlannedExport, RunningExportIndex},
    registry::{EndpointParameters, Registry, RegistryError, RunningDisk},
    running_server::RunningServer,
    schedules::scheduled_now,
};

/// Reason for a reconciliation. It determines which steps may wait without a time limit, and which
/// reservations are rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileReason {
    /// From an empty registry. Reservations that do not fit beside those of other hosts of the
    /// cluster stay unmet.
    Start,
    /// From the running state. The config is applied completely or not at all.
    Reload,
    /// The image of an unavailable disk is open now. Its reservations are booked afterwards.
    Retry,
    /// A client adds a disk or a group. The reservations of a disk are rejected if they exceed the
    /// measured capacity of its device.
    Add,
    /// As `Add`, by a client of the old process of an upgrade, where the reservations are in force.
    Transfer,
}

impl ReconcileReason {
    /// True if a client describes the object. Its passphrases are read by
    /// [`assemble::client_passphrase`]: from no file outside the image directory, if there is one,
    /// and from no pipe. A file system is not awaited without bound, and no config file is the
    /// origin of a key.
    const fn is_of_client(self) -> bool {
        matches!(self, Self::Add | Self::Transfer)
    }

    /// True if a refusal of the cluster rejects the change. Otherwise its reservations are in force
    /// already, or may stay unmet.
    const fn needs_confirmation(self) -> bool {
        matches!(self, Self::Reload | Self::Add)
    }
}

/// Change of the running state in progress: its input, and the steps done so far.
pub struct Reconciliation<'a> {
    registry: &'a Rc<Registry>,
    occasion: ReconcileReason,
    plan: &'a DesiredState,
    /// Credentials of new NBD servers.
    tls: Option<nbd::NbdServerTls>,
    assembly: DiskAssembly,
    /// Completed steps; rolled back in reverse order.
    pub(crate) completed: Vec<CompletedStep>,
    /// Disks and groups with changed settings. Their events are sent once no roll-back can follow.
    pub(crate) changed_names: BTreeSet<String>,
    /// Changes, in the form that the requesting client receives.
    pub(crate) reports: Vec<ReloadChange>,
    /// New disks whose storage does not answer.
    pub(crate) unavailable: Vec<(String, UnavailableImage)>,
    /// URIs of new exports.
    uris: Vec<String>,
}

impl<'a> Reconciliation<'a> {
    /// Starts a reconciliation; `tls` has the credentials of new NBD servers, `budgets` the rate
    /// budgets that several disks share.
    pub fn new(
        occasion: ReconcileReason,
        registry: &'a Rc<Registry>,
        plan: &'a DesiredState,
        tls: Option<nbd::NbdServerTls>,
        budgets: RateBudgets,
    ) -> Self {
        let assembly = DiskAssembly::new(registry.image_root().cloned(), budgets);
        Self {
            registry,
            occasion,
            plan,
            tls,
            assembly,
            completed: Vec::new(),
            changed_names: BTreeSet::new(),
            reports: Vec::new(),
            unavailable: Vec::new(),
            uris: Vec::new(),
        }
    }

    /// Uses images that the old process of an upgrade has open.
    pub fn with_source_files(mut self, source: &dyn StartSource) -> Self {
        self.assembly = self.assembly.with_passed_files(source.passed().cloned());
        self
    }

    /// Returns the URIs of exports added since the last call.
    pub fn take_uris(&mut self) -> Vec<String> {
        std::mem::take(&mut self.uris)
    }

    /// Puts the new disks whose storage did not answer into the retry queue, with their configs in
    /// `plan`.
    pub fn retry_later(&mut self, plan: &Rc<DesiredState>) {
        for (name, image) in std::mem::take(&mut self.unavailable) {
            self.registry.retry_later(&name, Rc::clone(plan), image);
        }
    }
}

impl Reconciliation<'_> {
    /// Opens the new images and applies the difference. A failure leaves the running state
    /// unchanged.
    ///
    /// # Errors
    /// The first step that fails, with its origin in the config file.
    pub(crate) async fn reconcile(
        &mut self,
        difference: &PlanDifference,
        source: &mut dyn StartSource,
    ) -> anyhow::Result<()> {
        let images = self.open(difference, source).await?;
        self.apply_or_roll_back(difference, images, source).await
    }

    /// Applies the difference, with the images that [`Self::open`] opened. A failure leaves the
    /// running state unchanged.
    ///
    /// # Errors
    /// The first step that fails.
    pub(crate) async fn apply_or_roll_back(
        &mut self,
        difference: &PlanDifference,
        images: Vec<(usize, Image)>,
        source: &mut dyn StartSource,
    ) -> anyhow::Result<()> {
        let Err(error) = self.apply(difference, images, source).await else {
            if let Some(cluster) = self.registry.cluster() {
                for &index in &difference.new_disks {
                    // A disk that was migrated away belongs to this host again.
                    cluster.forget_moved(&self.plan.disks[index].name);
                }
            }
            return Ok(());
        };
        let failed = self.roll_back().await;
        // Publishes the released reservations, so that other hosts can book the capacity.
        if let Some(cluster) = self.registry.cluster() {
            cluster.record_rolled_back_reservations(&**self.registry).await;
        }
        match failed {
            Some(failed) if self.occasion.is_of_client() && self.is_object_left(difference) => {
                bail!("{error:#}; and it could not be removed again: {failed:#}")
            }
            _ => Err(error),
        }
    }

    /// True if a new disk or group is listed. After a roll-back, its removal has failed.
    fn is_object_left(&self, difference: &PlanDifference) -> bool {
        let (disks, groups) = (&self.registry.disks, &self.registry.groups);
        difference.new_disks.iter().any(|&index| disks.get(&self.plan.disks[index].name).is_ok())
            || difference.new_groups.iter().any(|&index| groups.get(&self.plan.groups[index].name).is_ok())
    }

    /// Applies the difference, with the images that [`Self::open`] opened. After an error,
    /// [`Self::roll_back`] rolls back the applied steps.
    ///
    /// # Errors
    /// The first step that fails.
    pub async fn apply(
        &mut self,
        difference: &PlanDifference,
        images: Vec<(usize, Image)>,
        source: &mut dyn StartSource,
    ) -> anyhow::Result<()> {
        // Sockets first: a bind error is the most likely one, and undoing it affects no client.
        // Rolled back like later steps, because a passed socket can be received only once.
        let servers = self.bind(difference, source)?;
        for &index in &difference.kept_disks {
            let planned = &self.plan.disks[index];
            self.configure(&self.registry.disks.get(&planned.name)?, planned).await?;
        }
        self.place_members(difference, images)?;
        self.confirm_reservations().await?;
        for serving in &servers {
            self.registry.add_server(serving);
        }
        // Old exports before new ones: a changed export is both, and needs its name and address
        // free.
        self.remove_exports(difference).await?;
        self.add_exports(difference, source).await?;
        // Last, so that the first client finds all exports.
        for serving in servers {
            self.registry.accept(&serving);
        }
        Ok(())
    }

    /// Has the cluster confirm the booked reservations: another host may have booked the capacity
    /// at the same time.
    ///
    /// Runs without an `await` after they are booked; otherwise the cluster's tick would record
    /// them first, and a refusal would not reach this change. Runs before the exports, so that
    /// clients never use a disk that is refused.
    async fn confirm_reservations(&self) -> anyhow::Result<()> {
        match self.registry.cluster().filter(|_| self.occasion.needs_confirmation()) {
            Some(cluster) => {
                cluster.record_reservations_now(&**self.registry).await.map_err(anyhow::Error::msg)
            }
            None => Ok(()),
        }
    }

    async fn remove_exports(&mut self, difference: &PlanDifference) -> anyhow::Result<()> {
        if difference.old_exports.is_empty() {
            return Ok(());
        }
        let running = RunningExportIndex::of(self.registry);
        for planned in &difference.old_exports {
            let Some(export) = running.find(planned) else { continue };
            let report = change_report::export_report(self.registry, planned, "removed");
            // A client may have connected while images were opened.
            export.check_unused().await?;
            // Passed only once; the new export, or the roll-back, needs it again.
            let socket = planned.passed_socket().and_then(|name| Some((name, export.try_clone_socket()?)));
            let change = self.registry.begin_removal(&export.id, Removal::IfUnused)?.await;
            self.give_back(socket);
            let (planned, id) = (Box::new(planned.clone()), export.id.clone());
            self.reports.push(report);
            self.completed.push(CompletedStep::ExportRemoved { planned, id, deletion: change });
        }
        Ok(())
    }

    async fn add_exports(
        &mut self,
        difference: &PlanDifference,
        source: &mut dyn StartSource,
    ) -> anyhow::Result<()> {
        let unavailable: HashSet<_> = self.unavailable.iter().map(|(disk, _)| disk.as_str()).collect();
        for planned in difference.new_exports.iter().filter(|wanted| !unavailable.contains(&*wanted.disk)) {
            // Reported as if it were open: the old process still serves it.
            if source.opens_later(planned, self.registry) {
                self.uris.push(planned.address(self.registry));
                continue;
            }
            let mut socket = planned.passed_socket().map(str::to_owned);
            if let Some((name, passed)) = source.passed_socket(planned) {
                // The daemon keeps one socket of a client, for the export that is added next.
                self.registry.exports.endpoint_parameters()?.inherited.borrow_mut().add(&name, passed);
                socket = None;
            }
            let export =
                planned.add(self.registry).await.map_err(|error| self.with_export_origin(planned, error))?;
            export.is_added.set(self.occasion.is_of_client());
            self.uris.extend(planned_export::export_uris(&export, &self.plan.process.tls));
            self.completed.push(CompletedStep::ExportAdded { export: Rc::clone(&export), socket });
            self.reports.push(change_report::export_report(self.registry, planned, "added"));
        }
        Ok(())
    }

    /// Fails if the sandbox would prevent an endpoint from opening. Runs before any step.
    fn check_sandbox(&self, difference: &PlanDifference) -> anyhow::Result<()> {
        let Some(sandbox) = self.registry.sandbox() else { return Ok(()) };
        for planned in &difference.new_exports {
            if let PlannedEndpoint::Separate(target) = &planned.endpoint {
                sandbox.check_export(target).map_err(|error| self.with_export_origin(planned, error))?;
            }
        }
        Ok(())
    }

    /// Adds the export's origin in the config file and its disk to an error.
    fn with_export_origin(&self, planned: &PlannedExport, error: anyhow::Error) -> anyhow::Error {
        if !self.is_of_config_file() {
            return error;
        }
        let origin = difference::export_origin(self.plan, planned);
        let origin = origin.map(|place| format!("{place}: ")).unwrap_or_default();
        let address = match &planned.endpoint {
            PlannedEndpoint::Separate(target) => target.address(),
            PlannedEndpoint::Nbd { endpoint, .. } => endpoint.to_string(),
        };
        // Not named twice if the error already begins with the address.
        let at = match error.to_string().starts_with(&address) {
            true => String::new(),
            false => format!(" at {address}"),
        };
        error.context(format!("{origin}disk {}{at}", planned.disk))
    }

    /// Origin in the config of the first export at a server that does not run yet.
    fn first_export_origin(&self, server: &settings::NbdServerSpec) -> String {
        let disk = server.exports.first().map(|export| &self.plan.disks[export.disk]);
        let Some(disk) = disk else { return "daemon".to_owned() };
        if !disk.exports.is_empty() {
            let export = disk.nbd_exports().find(|(_, export)| export.listen == server.endpoint);
            let origin = export.and_then(|(index, _)| disk.item_origin("export", index, ""));
            return format!("{}: disk {}", origin.unwrap_or_else(|| disk.origin("name")), disk.name);
        }
        if !self.plan.process.nbd.is_empty() {
            return "daemon.nbd".to_owned();
        }
        let address = match &server.endpoint {
            ListenEndpoint::Address(address) => address.to_string(),
            ListenEndpoint::Inherited | ListenEndpoint::Passed(_) => {
                "the sockets that were passed".to_owned()
            }
        };
        format!(
            "{}: has no export, and [daemon] no nbd, so it is for NBD at {address} (write its \
             export, such as {{ type = \"nbd\", listen = \"unix:PATH\" }})",
            disk.origin("name")
        )
    }

    /// Binds the new servers. All addresses are bound before one of them accepts a client.
    fn bind(
        &mut self,
        difference: &PlanDifference,
        source: &mut dyn StartSource,
    ) -> anyhow::Result<Vec<Rc<RunningServer>>> {
        if difference.new_servers.is_empty() {
            return Ok(Vec::new());
        }
        let (registry, plan) = (self.registry, self.plan);
        let EndpointParameters { workers, inherited, .. } = registry.exports.endpoint_parameters()?;
        let service = &plan.process;
        let mut open = |server: &settings::NbdServerSpec| {
            let endpoint = &server.endpoint;
            if let (Some(sandbox), ListenEndpoint::Address(address)) = (registry.sandbox(), endpoint) {
                sandbox.check_address(address)?;
            }
            match source.listeners(endpoint)? {
                Some(listeners) => Ok(listeners),
                None => listen::open_listeners(endpoint, &service.sockets, &mut inherited.borrow_mut()),
            }
        };
        let mut all = Vec::new();
        for &index in &difference.new_servers {
            let planned = &plan.servers[index];
            let listeners = open(planned);
            let listeners = match self.occasion {
                ReconcileReason::Start => listeners?,
                _ => listeners.with_context(|| self.first_export_origin(planned))?,
            };
            let server = nbd::NbdServer::new(
                self.tls.clone(),
                assemble::nbd_server_terms(service, &self.registry.events),
            );
            // Reserves their numbers: the first export is the server's default even before it is
            // added.
            server.reserve(planned.exports.iter().map(|export| export.name.clone()));
            let serving = RunningServer::new(server, planned.endpoint.clone(), listeners, workers);
            serving.default_for_disks.set(planned.default_read_only);
            self.completed.push(CompletedStep::ServerAdded(Rc::clone(&serving)));
            all.push(serving);
        }
        Ok(all)
    }

    /// Applies the settings of a disk that can change at run time, except limits, shares and group.
    async fn configure(&mut self, running: &Rc<RunningDisk>, planned: &DiskConfig) -> anyhow::Result<()> {
        let before = running.current_config();
        let (now, wanted) =
            (change_report::disk_only_values(&before), change_report::disk_only_values(planned));
        if now == wanted {
            return Ok(());
        }
        let name = running.disk.name();
        // Pushed first: a failure may leave some of these settings applied.
        self.completed.push(CompletedStep::Configured(Rc::clone(running), Box::new(before)));
        apply_config(running, planned).await.with_context(|| format!("disk {name}"))?;
        self.changed_names.insert(name.to_string());
        self.reports.extend(change_report::setting_reports("disk", name, now, wanted));
        Ok(())
    }

    /// Applies limits, shares, reservations, groups and disks in one step without `await`, so that
    /// no command sees or changes an intermediate state.
    fn place_members(
        &mut self,
        difference: &PlanDifference,
        images: Vec<(usize, Image)>,
    ) -> anyhow::Result<()> {
        self.check_nested_targets(difference)?;
        let groups = self.add_groups(difference)?;
        let mut member_placements = Vec::new();
        for (index, group) in groups {
            let planned = &self.plan.groups[index];
            if self.leaves_unmet(Some(&group)) {
                assemble::book_reservations(self.registry, &planned.name, &planned.settings)?;
                if !planned.schedule.entries.is_empty() {
                    group.set_scheduled(scheduled_now(&planned.schedule, false))?;
                }
                continue;
            }
            let now = MemberPlacement::current(&GroupOrDisk::Group(group));
            member_placements.push(MemberPlacement {
                settings: self.group_settings(planned, &now.settings),
                scheduled: scheduled_now(&planned.schedule, now.scheduled.is_quota_used_up),
                ..now
            });
        }
        for &index in &difference.kept_disks {
            let planned = &self.plan.disks[index];
            let disk = Arc::clone(&self.registry.disks.get(&planned.name)?.disk);
            self.registry.quotas.count_before_change(&disk);
            let is_quota_used_up = disk.throttle().scheduled().is_quota_used_up;
            member_placements.push(MemberPlacement {
                node: GroupOrDisk::Disk(disk),
                settings: self.disk_settings(planned),
                scheduled: scheduled_now(&planned.schedule, is_quota_used_up),
                group: self.group_of(planned)?,
            });
        }
        self.apply_placements(difference, member_placements)?;
        for (index, image) in images {
            self.list_disk(&self.plan.disks[index], image)?;
        }
        // Reservations may exceed the measured capacity of a device.
        match self.occasion {
            ReconcileReason::Start | ReconcileReason::Reload => self.registry.check_devices(),
            ReconcileReason::Add => {
                let mut new_disks = difference.new_disks.iter().map(|&index| &self.plan.disks[index].name);
                new_disks.try_for_each(|name| self.registry.check_device_of(name))
            }
            ReconcileReason::Retry | ReconcileReason::Transfer => Ok(()),
        }
    }

    fn list_disk(&mut self, planned: &DiskWithOrigins, image: Image) -> anyhow::Result<()> {
        let group = self.group_of(planned)?;
        let group = group.as_ref();
        let leaves_unmet = self.leaves_unmet(group);
        let mut disk = match leaves_unmet || self.occasion == ReconcileReason::Retry {
            true => assemble::build_disk(&assemble::without_disk_reservations(planned), group, image)?,
            false => assemble::build_disk(planned, group, image)?,
        };
        if self.occasion.is_of_client() {
            disk.is_added = true;
            // Filled by `blockdev-add` commands that put nodes above it.
            disk.creation_commands = Some(Vec::new());
        }
        self.registry.add_disk(disk)?;
        if leaves_unmet {
            assemble::book_reservations(self.registry, &planned.name, &planned.settings)?;
        }
        self.completed.push(CompletedStep::DiskAdded(planned.name.clone()));
        self.reports.push(change_report::object_report("disk", &planned.name, "added"));
        Ok(())
    }

    /// True if a reservation in this group stays unmet instead of failing the change.
    fn leaves_unmet(&self, group: Option<&Arc<ThrottleGroup>>) -> bool {
        self.occasion == ReconcileReason::Start && self.registry.shared_group(group).is_some()
    }

    fn group_of(&self, planned: &DiskWithOrigins) -> anyhow::Result<Option<Arc<ThrottleGroup>>> {
        Ok(planned.group.as_ref().map(|group| self.registry.groups.get(group)).transpose()?)
    }

    /// True if errors name the origin in the config file.
    fn is_of_config_file(&self) -> bool {
        self.registry.config.is_some() && !self.occasion.is_of_client()
    }

    fn group_settings(&self, planned: &settings::GroupWithOrigins, now: &GroupSettings) -> GroupSettings {
        let mut settings = planned.settings.to_group_settings();
        settings.share = self.without_unmet(&planned.name, settings.share);
        if planned.cluster {
            // The limits in force are the cluster's, not the file's.
            settings.limits = now.limits;
        }
        settings
    }

    fn disk_settings(&self, planned: &DiskWithOrigins) -> GroupSettings {
        let mut settings = planned.settings.to_group_settings();
        settings.share = self.without_unmet(&planned.name, settings.share);
        settings
    }

    /// Keeps an unmet reservation unmet if it is unchanged, so that it does not fail a reload.
    fn without_unmet(&self, name: &str, share: NodeShare) -> NodeShare {
        if self.registry.is_unmet(name, share) { without_reservation(share) } else { share }
    }

    /// Groups to configure, with their indices in the plan. New groups have no reservation yet.
    fn add_groups(
        &mut self,
        difference: &PlanDifference,
    ) -> anyhow::Result<Vec<(usize, Arc<ThrottleGroup>)>> {
        let kept = difference.kept_groups.iter();
        let kept = kept.map(|&index| Ok((index, self.registry.groups.get(&self.plan.groups[index].name)?)));
        let mut groups = kept.collect::<Result<Vec<_>, RegistryError>>()?;
        for &index in &difference.new_groups {
            let planned = &self.plan.groups[index];
            let wanted = planned.settings.to_group_settings();
            let unreserved = GroupSettings { share: without_reservation(wanted.share), ..wanted };
            let parent = planned.group.as_ref().map(|parent| self.registry.groups.get(parent)).transpose()?;
            let group = ThrottleGroup::new(&planned.name, unreserved, parent.as_ref())
                .with_context(|| format!("group {}", planned.name))?;
            self.registry.add_group(&group)?;
            if let Some(cluster) = self.registry.cluster().filter(|_| planned.cluster) {
                // Sets the limits of the group from the cluster, before any disk enters it.
                cluster.add_group(&group)?;
            }
            self.completed.push(CompletedStep::GroupAdded(planned.name.clone()));
            self.reports.push(change_report::object_report("group", &planned.name, "added"));
            groups.push((index, group));
        }
        // In the order of the plan, which has parents before their members.
        groups.sort_unstable_by_key(|(index, _)| *index);
        Ok(groups)
    }

    /// Applies the placements that differ from the running state, and records the changes of
    /// existing objects.
    fn apply_placements(
        &mut self,
        difference: &PlanDifference,
        member_placements: Vec<MemberPlacement>,
    ) -> anyhow::Result<()> {
        let new_groups = difference.new_groups.iter().map(|&index| self.plan.groups[index].name.as_str());
        let new_groups: HashSet<_> = new_groups.collect();
        let (mut before, mut after, mut reports) = (Vec::new(), Vec::new(), Vec::new());
        for placement in member_placements {
            let (kind, name) = placement.kind_and_name();
            let now = MemberPlacement::current(&placement.node);
            let differences: Vec<_> =
                change_report::setting_reports(kind, &name, now.values(), placement.values()).collect();
            if !differences.is_empty() {
                reports.extend(differences.into_iter().filter(|_| !new_groups.contains(&*name)));
                before.push(now);
                after.push(placement);
            }
        }
        self.changed_names.extend(after.iter().map(|placement| placement.kind_and_name().1));
        // Objects that will be removed give up their reservations for those that stay.
        for placement in self.removed_placements(difference)? {
            after.push(placement.clone().without_reservations());
            before.push(placement);
        }
        // A roll-back of placements checks all devices.
        if after.is_empty() {
            return Ok(());
        }
        // Pushed first: `apply_all` may fail halfway; applying the previous placements undoes it.
        self.completed.push(CompletedStep::MembersPlaced(before));
        placements::apply_all(&after)?;
        self.reports.extend(reports);
        Ok(())
    }

    /// Current placements of the disks and groups that will be removed.
    fn removed_placements(&self, difference: &PlanDifference) -> anyhow::Result<Vec<MemberPlacement>> {
        let disk = |name: &String| Ok(GroupOrDisk::Disk(Arc::clone(&self.registry.disks.get(name)?.disk)));
        let group = |name: &String| Ok(GroupOrDisk::Group(self.registry.groups.get(name)?));
        let disks = difference.old_disks.iter().map(disk);
        let nodes = disks.chain(difference.old_groups.iter().map(group));
        nodes.map(|node| node.map(|node| MemberPlacement::current(&node))).collect()
    }

    /// Removes a disk whose exports are already removed. Their last requests may still be in
    /// flight.
    async fn remove_old_disk(&self, name: &str) -> Result<(), RegistryError> {
        let exports = self.registry.exports.of_disk(name);
        if let Some(export) = exports.iter().find(|export| !export.is_ending()) {
            return Err(RegistryError::Exported { disk: name.to_owned(), export: export.id.clone() });
        }
        drop(exports);
        self.registry.remove_disk_and_exports(name, Removal::IfUnused).await
    }

    /// Closes objects that the plan no longer contains and no client uses: disks and groups of the
    /// difference, and servers of `before`, the previous plan.
    pub(crate) async fn remove_old(&mut self, difference: &PlanDifference, before: &DesiredState) {
        let endpoints: HashSet<&ListenEndpoint> =
            self.plan.servers.iter().map(|server| &server.endpoint).collect();
        for server in &before.servers {
            let Some(serving) = planned_export::find_server(self.registry, &server.endpoint) else {
                continue;
            };
            // A server of the file stays while exports that clients added are at it.
            if !endpoints.contains(&server.endpoint) && !self.registry.exports.has_export_at(&serving) {
                self.registry.exports.remove_server(&serving);
                serving.stop().await;
            }
        }
        for name in &difference.old_disks {
            match self.remove_old_disk(name).await {
                Ok(()) => self.reports.push(change_report::object_report("disk", name, "removed")),
                Err(refused) => tracing::warn!("a disk that the config file no longer has stays: {refused}"),
            }
        }
        for name in &difference.old_groups {
            match self.registry.remove_group(name) {
                Ok(()) => self.reports.push(change_report::object_report("group", name, "removed")),
                Err(refused) => tracing::warn!("a group that the config file no longer has stays: {refused}"),
            }
        }
    }
}
