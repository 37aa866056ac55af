//! Adds to the new process of an upgrade the objects that clients of the control socket added to
//! the old process.
//!
//! Runs inside the sandbox: whatever the old process sends has no more effect than commands of a
//! client of the control socket.

use std::rc::Rc;

use anyhow::Context as _;
use block::layer::throttle::GroupSettings;
use export::nbd;
use reactor::ReactorWorker;
use serde_json::{Map, Value};
use settings::ListenEndpoint;
use storage::PassedFiles;

use super::{
    added_objects::parse_endpoint,
    messages::{
        AddedDiskState, AddedExportState, ObjectOrigin, OfferedDevice, OfferedExport, OfferedVhostUser,
    },
    new_process::{NewProcess, find_export, find_vhost_user},
};
use crate::{
    add_objects::{self, NewDisk},
    planned_export::{PlannedEndpoint, PlannedExport},
    reconcile::{ReconcileReason, source::StartSource as _},
    registry::Registry,
    running_server::{AddedServer, RunningServer},
};

impl NewProcess {
    /// Adds the old process's added objects that are not in this config; returns their names.
    /// `perform` executes a command of the control socket, `add_disk` adds a disk from these nodes
    /// and passed files.
    ///
    /// # Errors
    /// An object cannot be added.
    pub async fn add_transferred(
        &mut self,
        registry: &Rc<Registry>,
        workers: &Rc<Vec<ReactorWorker>>,
        perform: impl AsyncFn(&str, Map<String, Value>) -> Result<(), String>,
        add_disk: impl AsyncFn(&[Map<String, Value>], PassedFiles) -> Result<(), String>,
    ) -> anyhow::Result<Vec<String>> {
        let mut added = Vec::new();
        for group in &self.offer.groups {
            // The new config may contain it by now; its settings win.
            if registry.groups.get(&group.name).is_ok() {
                continue;
            }
            let named =
                || format!("group {}: it was added at run time, and cannot be added here", group.name);
            let config =
                add_objects::group_config(&group.name, &GroupSettings::default(), group.parent.clone());
            let addition = add_objects::add_group_object(registry, ReconcileReason::Transfer, config);
            addition.await.with_context(named)?;
            registry.groups.added_by_clients.borrow_mut().insert(group.name.clone());
            let set = perform("x-weir-set", group.settings.clone()).await;
            set.map_err(anyhow::Error::msg).with_context(named)?;
            added.push(format!("group {}", group.name));
        }
        for at in 0..self.offer.servers.len() {
            let address = self.offer.servers[at].endpoint.clone();
            let ObjectOrigin::Added(max_connections) = self.offer.servers[at].origin else { continue };
            // A server of the new config has already taken the sockets.
            if self.sockets[at].is_empty() {
                continue;
            }
            let endpoint = match address.strip_prefix("fd:") {
                Some(name) => ListenEndpoint::Passed(name.to_owned()),
                None => ListenEndpoint::Address(address.parse().map_err(anyhow::Error::msg)?),
            };
            let listeners = self
                .listeners(&endpoint)?
                .with_context(|| format!("server {address}: its sockets are missing"))?;
            let standard = registry.exports.endpoint_parameters()?.nbd.clone();
            let server = nbd::NbdServer::new(None, nbd::NbdServerTerms { max_connections, ..standard });
            let serving = RunningServer::new(server, endpoint, listeners, workers);
            // Not a standard server: later disks without explicit exports must not appear there.
            serving.added.set(Some(AddedServer { max_connections, has_objects: false }));
            serving.default_for_disks.set(Some(false));
            registry.add_server(&serving);
            added.push(format!("server {address}"));
        }
        for offered in &self.offer.disks {
            let ObjectOrigin::Added(AddedDiskState { nodes, settings, keys, lowest_name: bottom }) =
                &offered.origin
            else {
                continue;
            };
            if registry.disks.get(&offered.name).is_ok() {
                continue;
            }
            let named =
                || format!("disk {}: it was added at run time, and cannot be added here", offered.name);
            if let Some(keys) = keys.clone() {
                // Its exports are transferred separately.
                let name = bottom.as_ref().unwrap_or(&offered.name).clone();
                let exports = Some(Vec::new());
                let new = NewDisk { name, keys, exports, sockets: Vec::new() };
                new.add_transferred(registry, self.passed.clone()).await.with_context(named)?;
            }
            if keys.is_none() || !nodes.is_empty() {
                let addition = add_disk(nodes, self.passed.clone()).await;
                addition.map_err(anyhow::Error::msg).with_context(named)?;
                let set = perform("x-weir-set", settings.clone()).await;
                set.map_err(anyhow::Error::msg).with_context(named)?;
            }
            added.push(format!("disk {}", offered.name));
        }
        for offered in &self.offer.exports {
            let ObjectOrigin::Added(state) = &offered.origin else { continue };
            // Exports of the new config are already there.
            if find_export(registry, &offered.endpoint, &offered.name).is_none() {
                let named =
                    || format!("export {}: it was added at run time, and cannot be added here", state.id);
                added.push(add_export(registry, offered, state).await.with_context(named)?);
            }
        }
        for offered in &self.offer.machines {
            let ObjectOrigin::Added(text) = &offered.origin else { continue };
            if find_vhost_user(registry, offered).is_none() {
                let named =
                    || format!("export {}: it was added at run time, and cannot be added here", offered.id);
                added.push(add_vhost_user(registry, offered, text).await.with_context(named)?);
            }
        }
        for OfferedDevice { id, kind, disk, read_only, .. } in self.devices.plan_added(registry)? {
            added.push(format!(
                "export {id} ({kind} of disk {disk}{})",
                if read_only { ", read-only" } else { "" }
            ));
        }
        Ok(added)
    }
}

async fn add_export(
    registry: &Rc<Registry>,
    offered: &OfferedExport,
    state: &AddedExportState,
) -> anyhow::Result<String> {
    let OfferedExport { endpoint, name, disk, read_only, bitmaps, .. } = offered;
    let mut servers = registry.exports.servers().into_iter();
    let serving = servers.find(|serving| super::endpoint_name(&serving.endpoint) == *endpoint);
    let serving = serving.with_context(|| format!("{endpoint} is not in this config"))?;
    let planned = PlannedExport {
        disk: disk.clone(),
        read_only: *read_only,
        endpoint: PlannedEndpoint::Nbd {
            endpoint: serving.endpoint.clone(),
            name: name.clone(),
            description: state.description.clone(),
            access: state.access.to_access()?,
            bitmaps: bitmaps.clone(),
        },
    };
    add_planned(registry, &planned, &state.id, &serving.address()).await
}

async fn add_vhost_user(
    registry: &Rc<Registry>,
    offered: &OfferedVhostUser,
    text: &str,
) -> anyhow::Result<String> {
    let OfferedVhostUser { id, disk, read_only, .. } = offered;
    let target = parse_endpoint("vhost-user-blk", text)?;
    let address = target.address();
    let planned = PlannedExport {
        disk: disk.clone(),
        read_only: *read_only,
        endpoint: PlannedEndpoint::Separate(target),
    };
    add_planned(registry, &planned, id, &address).await
}

/// Adds an export under its id in the old process, or under a similar one if that is in use.
async fn add_planned(
    registry: &Rc<Registry>,
    planned: &PlannedExport,
    id: &str,
    address: &str,
) -> anyhow::Result<String> {
    let export = planned.add_with_id(registry, registry.exports.free_id(id, address)).await?;
    export.is_added.set(true);
    Ok(format!("export {}", export.id))
}
