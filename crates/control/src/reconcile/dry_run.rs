//! Dry run: a reconciliation without effects, which returns the changes that a reload would report.
//!
//! Opens no image for writing and binds no address. It misses errors that only the effects show: an
//! address that another program uses, reservations beyond a device's measured capacity or beside
//! those of disks that clients added, caches without memory.

use std::collections::BTreeSet;

use anyhow::Context as _;
use api::ReloadChange;
use settings::{ListenAddress, ListenEndpoint};

use super::{
    PlanDifference, Reconciliation, change_report,
    placements::{GroupOrDisk, MemberPlacement},
};
use crate::{
    endpoints,
    listen::{self, AddressConflictRule},
    planned_export::{PlannedEndpoint, PlannedExport},
    schedules::scheduled_now,
};

impl Reconciliation<'_> {
    /// Changes that a reload would report, in its order.
    ///
    /// # Errors
    /// Reason for which a reload would fail.
    pub(crate) async fn dry_run(&mut self, difference: &PlanDifference) -> anyhow::Result<Vec<ReloadChange>> {
        self.check_sandbox(difference)?;
        self.check_nested_targets(difference)?;
        let (unavailable, found) = self.check_images(difference, AddressConflictRule::Rejected).await?;
        // A reload stops at the first error, too.
        if let Some(first) = found.into_iter().next() {
            return Err(first);
        }
        let unavailable: BTreeSet<_> =
            unavailable.into_iter().map(|(index, _)| &self.plan.disks[index].name).collect();
        self.check_sockets(difference)?;
        self.check_host_files(difference).await?;
        let mut all = Vec::new();
        for &index in &difference.kept_disks {
            let planned = &self.plan.disks[index];
            let now =
                change_report::disk_only_values(&self.registry.disks.get(&planned.name)?.current_config());
            all.extend(change_report::setting_reports(
                "disk",
                &planned.name,
                now,
                change_report::disk_only_values(planned),
            ));
        }
        let groups = &self.plan.groups;
        for (index, planned) in groups.iter().enumerate() {
            if difference.new_groups.binary_search(&index).is_ok() {
                all.push(change_report::object_report("group", &planned.name, "added"));
            }
        }
        for (index, planned) in groups.iter().enumerate() {
            if difference.new_groups.binary_search(&index).is_err() {
                let node = GroupOrDisk::Group(self.registry.groups.get(&planned.name)?);
                // A reload never moves a group.
                let now = MemberPlacement::current(&node);
                let wanted = MemberPlacement {
                    settings: self.group_settings(planned, &now.settings),
                    scheduled: scheduled_now(&planned.schedule, now.scheduled.is_quota_used_up),
                    ..now.clone()
                };
                all.extend(change_report::setting_reports(
                    "group",
                    &planned.name,
                    now.values(),
                    wanted.values(),
                ));
            }
        }
        for &index in &difference.kept_disks {
            let planned = &self.plan.disks[index];
            let now = MemberPlacement::current(&GroupOrDisk::Disk(
                self.registry.disks.get(&planned.name)?.disk.clone(),
            ));
            let group = planned.group.as_deref().unwrap_or("");
            let wanted =
                change_report::disk_throttle_values(&self.disk_settings(planned), &planned.schedule, group);
            all.extend(change_report::setting_reports("disk", &planned.name, now.values(), wanted));
        }
        let new_disks = difference.new_disks.iter().map(|&index| &self.plan.disks[index].name);
        let becomes = |name| if unavailable.contains(name) { "unavailable" } else { "added" };
        all.extend(new_disks.map(|name| change_report::object_report("disk", name, becomes(name))));
        let is_open = |export: &&PlannedExport| !unavailable.contains(&export.disk);
        let new_exports: Vec<_> = difference.new_exports.iter().filter(is_open).cloned().collect();
        let exports = [(&difference.old_exports, "removed"), (&new_exports, "added")];
        for (wanted, change) in
            exports.into_iter().flat_map(|(list, change)| list.iter().map(move |export| (export, change)))
        {
            all.push(change_report::export_report(self.registry, wanted, change));
        }
        all.extend(
            difference.old_disks.iter().map(|name| change_report::object_report("disk", name, "removed")),
        );
        all.extend(
            difference.old_groups.iter().map(|name| change_report::object_report("group", name, "removed")),
        );
        Ok(all)
    }

    /// Checks that this host has the devices and files that new exports need.
    async fn check_host_files(&self, difference: &PlanDifference) -> anyhow::Result<()> {
        for planned in &difference.new_exports {
            let PlannedEndpoint::Separate(target) = &planned.endpoint else { continue };
            let owned_target = target.clone();
            let checked = reactor::run_blocking(move || endpoints::check_host_support(&owned_target)).await;
            checked.map_err(|error| self.with_export_origin(planned, error))?;
        }
        Ok(())
    }

    fn check_sockets(&self, difference: &PlanDifference) -> anyhow::Result<()> {
        for &index in &difference.new_servers {
            let server = &self.plan.servers[index];
            let ListenEndpoint::Address(address) = &server.endpoint else { continue };
            let origin = || self.first_export_origin(server);
            if let Some(sandbox) = self.registry.sandbox() {
                sandbox.check_address(address).with_context(origin)?;
            }
            listen::check(address, AddressConflictRule::Tolerated).with_context(origin)?;
        }
        for planned in &difference.new_exports {
            if let PlannedEndpoint::Separate(settings::ExportTarget::VhostUserBlk(config)) = &planned.endpoint
                && let Some(path) = config.socket.path().filter(|_| !config.client)
            {
                let address = ListenAddress::Unix(path.to_owned());
                if let Some(sandbox) = self.registry.sandbox() {
                    sandbox
                        .check_address(&address)
                        .map_err(|error| self.with_export_origin(planned, error))?;
                }
                listen::check(&address, AddressConflictRule::Tolerated)
                    .map_err(|error| self.with_export_origin(planned, error))?;
            }
        }
        Ok(())
    }
}
