//! Exports and NBD servers of a registry, from their opening to the end of their last client.
//!
//! An id names one export, also while the export is ending. No client is accepted before the daemon
//! is ready. With `--exit-when-idle`, requests the end of the daemon after its last client has
//! disconnected. Never opens an image.

use std::{cell::Cell, path, rc::Rc, sync::Arc};

use anyhow::anyhow;
use export::nbd::{self, NotRemoved, Removal};

use super::{DaemonEnd, EndpointParameters, Registry, RegistryError};
use crate::{
    change::RegistryChange,
    endpoints::{self, ExportEndpoint, TransferredEndpoint},
    exports::{NewNbdExport, RunningEndpoint, RunningExport},
    running_disk::RunningDisk,
    running_server::RunningServer,
    unavailable_disk::ReservedEndpoint,
};

impl Registry {
    /// Delays the acceptance of clients until [`Registry::accept_clients`]. Devices of this host
    /// are excepted: the kernel reads a device to create it.
    pub fn delay_clients(&self) {
        self.lifecycle.are_clients_delayed.set(true);
    }

    /// Accepts clients at all current and later endpoints.
    pub fn accept_clients(self: &Rc<Self>) {
        self.lifecycle.are_clients_delayed.set(false);
        for serving in self.exports.servers() {
            self.accept(&serving);
        }
        for export in self.exports.all() {
            if let RunningEndpoint::Separate(endpoint) = &export.endpoint {
                self.accept_at_endpoint(&export.id, endpoint);
            }
        }
    }

    /// Accepts NBD clients at this server, unless acceptance is delayed.
    pub(crate) fn accept(&self, serving: &RunningServer) {
        if !self.lifecycle.are_clients_delayed.get() {
            let request_end = Rc::clone(&self.lifecycle.request_end);
            serving.accept(move |error| request_end(DaemonEnd::Broken(error)));
        }
    }

    /// Adds an NBD server. Its clients are accepted by [`Registry::accept`].
    pub fn add_server(self: &Rc<Self>, serving: &Rc<RunningServer>) {
        self.exports.insert_server(serving);
        if self.lifecycle.ends_when_idle.get() {
            // A weak reference: the task may wait as long as the server exists, and must not keep
            // the registry alive.
            let (server, registry) = (Arc::clone(&serving.server), Rc::downgrade(self));
            reactor::spawn(async move {
                server.wait_while(|_| registry.upgrade().is_some_and(|registry| !registry.is_idle())).await;
                if let Some(registry) = registry.upgrade() {
                    (registry.lifecycle.request_end)(DaemonEnd::Idle);
                }
            });
        }
    }

    /// Removes a server with all its exports; returns after its last client has disconnected.
    pub(crate) async fn stop_server(self: &Rc<Self>, serving: &Rc<RunningServer>) {
        self.exports.remove_server(serving);
        serving.close();
        for export in self.exports.all() {
            if matches!(&export.endpoint, RunningEndpoint::Nbd(of, _) if Rc::ptr_eq(of, serving)) {
                let _ = self.remove_export(&export.id, Removal::Hard);
            }
        }
        serving.stop().await;
    }

    /// True if clients were served, or a device was removed externally, no client is connected, and
    /// no job runs.
    fn is_idle(&self) -> bool {
        let served = || {
            self.exports.servers().iter().any(|serving| serving.server.has_served())
                || self.exports.own_endpoints().iter().any(|endpoint| endpoint.server.has_served())
        };
        let is_unused = self.exports.connections() == 0 && self.jobs.running().is_empty();
        is_unused && (self.lifecycle.was_device_removed.get() || served())
    }

    /// Ends the daemon if it is idle and was started to end then.
    pub(crate) fn end_if_idle(&self) {
        if self.lifecycle.ends_when_idle.get() && self.is_idle() {
            (self.lifecycle.request_end)(DaemonEnd::Idle);
        }
    }

    /// Fails if this export name at this server is reserved for an unavailable disk other than
    /// `disk`.
    pub(crate) fn check_reserved_name(
        &self,
        serving: &RunningServer,
        name: &str,
        disk: &str,
    ) -> Result<(), RegistryError> {
        let reserved = ReservedEndpoint::NbdExportName(serving.endpoint.clone(), name.to_owned());
        self.disks.holder_of_reserved(&reserved, disk).map_or(Ok(()), |disk| {
            Err(RegistryError::ExportReserved { name: name.to_owned(), address: serving.address(), disk })
        })
    }

    /// Fails if the path of an endpoint with one export is reserved for another disk than `disk`.
    fn check_reserved_endpoint(
        &self,
        target: &settings::ExportTarget,
        disk: &str,
    ) -> Result<(), RegistryError> {
        let Some(path) = target.path().and_then(|path| path::absolute(path).ok()) else { return Ok(()) };
        self.disks.holder_of_reserved(&ReservedEndpoint::EndpointPath(path), disk).map_or(Ok(()), |holder| {
            let (name, address) = (disk.to_owned(), target.address());
            Err(RegistryError::ExportReserved { name, address, disk: holder })
        })
    }

    pub(crate) fn add_export(
        &self,
        serving: &Rc<RunningServer>,
        new: NewNbdExport,
    ) -> Result<(), RegistryError> {
        let disk = self.disks.get(&new.disk)?;
        self.jobs.check_no_target(&new.disk)?;
        if !new.bitmaps.is_empty() {
            // The overlay of a snapshot has none.
            self.jobs.check_no_snapshot(&new.disk)?;
        }
        if self.exports.has_id(&new.id) {
            return Err(RegistryError::IdTaken(new.id));
        }
        self.check_reserved_name(serving, &new.name, &new.disk)?;
        let export = nbd::NbdServerExport {
            name: new.name.as_str().into(),
            description: new.description.as_str().into(),
            disk: Arc::clone(&disk.disk),
            read_only: new.read_only,
            bitmaps: Arc::clone(&new.bitmaps),
            access: new.access.clone(),
        };
        // The server rejects a duplicate name, so no separate check is needed.
        let Some(number) = serving.server.add(export) else {
            return Err(RegistryError::ExportNameTaken { name: new.name, address: serving.address() });
        };
        let export = RunningExport {
            id: new.id.clone(),
            name: new.name.clone(),
            disk,
            endpoint: RunningEndpoint::Nbd(Rc::clone(serving), number),
            endpoint_config: None,
            read_only: new.read_only,
            is_added: Cell::new(false),
            is_ending_flag: Cell::new(false),
            nbd_parameters: Some(new),
        };
        self.exports.insert(export);
        Ok(())
    }

    /// Adds an export at an endpoint of its own, which is open when this returns. `transferred` is
    /// the endpoint's state from the old process. Returns the address.
    pub(crate) async fn add_endpoint(
        self: &Rc<Self>,
        id: String,
        disk: Rc<RunningDisk>,
        read_only: bool,
        target: &settings::ExportTarget,
        transferred: Option<TransferredEndpoint>,
    ) -> anyhow::Result<String> {
        if self.exports.has_id(&id) {
            return Err(RegistryError::IdTaken(id).into());
        }
        self.jobs.check_no_target(disk.disk.name())?;
        // A device belongs to the image that the disk has while it is created.
        let is_device =
            matches!(target, settings::ExportTarget::Ublk(_) | settings::ExportTarget::NbdDevice(_));
        if is_device {
            self.jobs.check_no_snapshot(disk.disk.name())?;
        }
        let _opening = is_device.then(|| self.exports.begin_opening_device(disk.disk.name()));
        self.check_reserved_endpoint(target, disk.disk.name())?;
        if transferred.is_none() {
            self.exports.check_path_free(target)?;
        }
        self.sandbox().map_or(Ok(()), |sandbox| sandbox.check_export(target))?;
        let EndpointParameters { workers, access, inherited, .. } = self.exports.endpoint_parameters()?;
        let read_only = read_only || target.read_only() || disk.disk.image().is_read_only();
        // Transferred endpoints start when the old process has released them.
        let is_new = transferred.is_none();
        let transferred = Cell::new(transferred);
        let events = &self.events;
        let options = endpoints::EndpointOptions {
            id: &id,
            disk: &disk,
            read_only,
            access,
            inherited,
            workers,
            events,
            transferred,
        };
        let entrance = endpoints::open_endpoint(target, &options).await.map_err(|error| {
            match (self.sandbox(), target) {
                (Some(sandbox), settings::ExportTarget::VhostUserBlk(config)) if !config.client => {
                    // The sandbox's reason explains the error better than the failed system call.
                    config.socket.path().and_then(|path| sandbox.check_socket(path).err()).unwrap_or(error)
                }
                _ => error,
            }
        })?;
        let address = entrance.address().to_owned();
        // The kernel reads a new device's partition table before its creation returns.
        if (is_new && entrance.device().is_some()) || !self.lifecycle.are_clients_delayed.get() {
            self.accept_at_endpoint(&id, &entrance);
        }
        // Opening a device awaits; other tasks may have removed the disk or used the id in the
        // meantime.
        let name = disk.disk.name().to_string();
        let rejection = match self.disks.get(&name) {
            Ok(current) if Rc::ptr_eq(&current, &disk) && !self.exports.contains(&id) => None,
            Ok(still) if Rc::ptr_eq(&still, &disk) => Some(RegistryError::IdTaken(id.clone())),
            _ => Some(RegistryError::UnknownDisk(name.clone())),
        };
        if let Some(refused) = rejection {
            entrance.stop().await;
            return Err(refused.into());
        }
        if self.lifecycle.ends_when_idle.get() {
            let (server, registry) = (Arc::clone(&entrance.server), Rc::downgrade(self));
            reactor::spawn(async move {
                let busy = || registry.upgrade().is_some_and(|registry| !registry.is_idle());
                server.wait_while(Box::new(busy)).await;
                if let Some(registry) = registry.upgrade() {
                    (registry.lifecycle.request_end)(DaemonEnd::Idle);
                }
            });
        }
        let export = RunningExport {
            id: id.clone(),
            name,
            disk,
            endpoint: RunningEndpoint::Separate(entrance),
            endpoint_config: Some(target.clone()),
            nbd_parameters: None,
            read_only,
            is_added: Cell::new(false),
            is_ending_flag: Cell::new(false),
        };
        self.exports.insert(export);
        Ok(address)
    }

    fn accept_at_endpoint(self: &Rc<Self>, id: &str, endpoint: &Rc<ExportEndpoint>) {
        let (registry, id) = (Rc::downgrade(self), id.to_owned());
        endpoint.accept(move |result| {
            if let Some(registry) = registry.upgrade() {
                registry.endpoint_ended(&id, result);
            }
        });
    }

    /// Handles the end of an endpoint that this process did not close: its device was removed
    /// externally, or it cannot accept clients any more.
    fn endpoint_ended(self: &Rc<Self>, id: &str, result: std::io::Result<()>) {
        let Ok(export) = self.exports.get(id) else { return };
        let RunningEndpoint::Separate(endpoint) = &export.endpoint else { return };
        let address = endpoint.address();
        if endpoint.device().is_none() {
            if let Err(error) = result {
                let error = anyhow!("{address}: front ends cannot connect any more: {error} (restart weir)");
                (self.lifecycle.request_end)(DaemonEnd::Broken(error));
            }
            return;
        }
        match result {
            Ok(()) => tracing::info!(export = id, device = address, "the device was removed"),
            Err(error) => tracing::error!(export = id, device = address, %error, "the device failed"),
        }
        self.lifecycle.was_device_removed.set(true);
        // The device is gone, so it has no clients; the removal cannot be refused.
        let _ = self.remove_export(id, Removal::Hard);
    }

    /// Removes an export. New clients cannot connect to it after this returns. Its id and its disk
    /// stay in use until its last client disconnects and [`RegistryChange::ExportDeleted`] follows.
    pub(crate) fn remove_export(self: &Rc<Self>, id: &str, removal: Removal) -> Result<(), RegistryError> {
        let (registry, removal) = (Rc::clone(self), self.begin_removal(id, removal)?);
        reactor::spawn(async move {
            let change = removal.await;
            change.iter().for_each(|change| registry.notify(change));
        });
        Ok(())
    }

    /// Begins the removal of an export, as [`Registry::remove_export`]. The future completes after
    /// the export's last client has disconnected, also for an export that is already being removed,
    /// and returns the change to announce. It returns `None` if the export was never announced, or
    /// if an earlier removal announces its end.
    pub(crate) fn begin_removal(
        self: &Rc<Self>,
        id: &str,
        removal: Removal,
    ) -> Result<impl Future<Output = Option<RegistryChange>> + 'static, RegistryError> {
        let export = self.exports.get(id)?;
        let was_ending = match export.endpoint.remove(removal) {
            Ok(()) => false,
            // The export is already being removed, so the removal cannot be refused.
            Err(NotRemoved::Unknown) => true,
            Err(NotRemoved::InUse { .. }) => {
                return Err(RegistryError::HasClients { id: id.to_owned(), clients: export.clients_text() });
            }
        };
        export.is_ending_flag.set(true);
        let registry = Rc::clone(self);
        Ok(async move {
            export.endpoint.wait_until_unused().await;
            let is_listed =
                registry.exports.find(&export.id).is_some_and(|known| Rc::ptr_eq(&known, &export));
            if is_listed {
                registry.exports.remove(&export);
            }
            if was_ending {
                return None;
            }
            // Checked here as well: an export without clients ends without a disconnection.
            registry.end_if_idle();
            // An export of an incomplete disk was never announced.
            let is_announced = !registry.disks.is_incomplete(export.disk.disk.name());
            is_announced.then(|| RegistryChange::ExportDeleted { id: export.id.clone() })
        })
    }

    /// Removes all of `exports` and waits until their last clients have disconnected; removes none
    /// if `removal` is refused for one with clients. Exports that were ending before stay removed
    /// in either case, and a refused removal does not wait for them.
    pub(crate) async fn remove_exports(
        self: &Rc<Self>,
        exports: &[Rc<RunningExport>],
        removal: Removal,
    ) -> Result<(), RegistryError> {
        let mut removals = Vec::new();
        // NBD exports first: they can be added again if a later one has clients.
        let (nbd, separate): (Vec<_>, Vec<_>) =
            exports.iter().partition(|export| matches!(export.endpoint, RunningEndpoint::Nbd(..)));
        let mut refused = None;
        for export in nbd.iter().chain(&separate) {
            let was_ending = export.is_ending();
            match self.begin_removal(&export.id, removal) {
                Ok(end) => removals.push((export, was_ending, end)),
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        for (export, was_ending, end) in removals {
            // An earlier removal is not rolled back.
            if was_ending && refused.is_some() {
                continue;
            }
            let change = end.await;
            if refused.is_some()
                && let (RunningEndpoint::Nbd(serving, _), Some(new)) =
                    (&export.endpoint, &export.nbd_parameters)
            {
                match self.add_export(serving, new.clone()).and_then(|()| self.exports.get(&export.id)) {
                    Ok(restored) => {
                        restored.is_added.set(export.is_added.get());
                        continue;
                    }
                    // Another export has taken its name or ID in the meantime.
                    Err(error) => {
                        tracing::error!(export = %export.id, "the export cannot be restored: {error}");
                    }
                }
            }
            change.iter().for_each(|change| self.notify(change));
        }
        refused.map_or(Ok(()), Err)
    }

    /// Removes a disk and all its exports. If its file system stops answering while requests of the
    /// exports are in flight, the disk is abandoned, which fails those requests.
    ///
    /// # Errors
    /// [`Removal::IfUnused`] is refused if an export has clients, and any removal if a job runs;
    /// then nothing is removed.
    pub(crate) async fn remove_disk_and_exports(
        self: &Rc<Self>,
        name: &str,
        removal: Removal,
    ) -> Result<(), RegistryError> {
        // Before its exports are removed, which may take long: no job may start meanwhile.
        let _blocked = self.jobs.block_starts(name)?;
        let exports = self.exports.of_disk(name);
        let data = Arc::clone(&self.disks.get(name)?.disk);
        data.run_unless_unresponsive(self.remove_exports(&exports, removal)).await?;
        // With these references `remove_disk` would find the disk in use.
        drop((exports, data));
        self.remove_disk(name).await
    }
}
