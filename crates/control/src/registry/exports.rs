//! Registry of exports and NBD servers. Holds state only: changes that notify listeners are methods
//! of [`Registry`](super::Registry).

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{self, PathBuf},
    rc::Rc,
};

use anyhow::{Context as _, bail};
use export::nbd;
use reactor::ReactorWorker;
use settings::{ListenEndpoint, SocketAccess, TlsConfig};

use super::{NameMap, RegistryError};
use crate::{
    endpoints::ExportEndpoint,
    exports::{RunningEndpoint, RunningExport},
    listen::InheritedSockets,
    running_disk::RunningDisk,
    running_server::RunningServer,
};

/// Parameters of endpoints and servers that are added at run time.
pub(crate) struct EndpointParameters {
    pub(crate) workers: Rc<Vec<ReactorWorker>>,
    /// Owner and mode of sockets.
    pub(crate) access: SocketAccess,
    /// Limits of servers that are added later.
    pub(crate) nbd: nbd::NbdServerTerms,
    /// Sockets that were passed to the daemon.
    pub(crate) inherited: RefCell<InheritedSockets>,
    /// TLS mode of the daemon's own servers.
    pub(crate) tls: TlsConfig,
}

/// All exports and NBD servers of a daemon.
#[derive(Default)]
pub struct ExportRegistry {
    listed: NameMap<Rc<RunningExport>>,
    /// Ids of each disk's exports, by the disk's name.
    of_disks: RefCell<BTreeMap<String, BTreeSet<String>>>,
    /// The export whose endpoint is this path, for endpoints of one export alone.
    endpoints: RefCell<BTreeMap<PathBuf, String>>,
    /// Endpoints that open once the old process has released them, by the ids of their exports.
    pub awaited_endpoints: RefCell<BTreeMap<String, settings::ExportTarget>>,
    /// Disks for which a device of this host is being created, once per [`OpeningDevice`].
    opening_devices: RefCell<Vec<String>>,
    servers: RefCell<Vec<Rc<RunningServer>>>,
    /// The first server of each endpoint.
    servers_at: RefCell<HashMap<ListenEndpoint, Rc<RunningServer>>>,
    /// Parameters of endpoints; set by [`ExportRegistry::set_endpoint_parameters`].
    endpoint_parameters: OnceCell<EndpointParameters>,
}

/// Device of this host that is being created, until its export is listed.
pub(super) struct OpeningDevice<'a> {
    registry: &'a ExportRegistry,
    disk: String,
}

impl Drop for OpeningDevice<'_> {
    fn drop(&mut self) {
        let mut opening = self.registry.opening_devices.borrow_mut();
        if let Some(at) = opening.iter().position(|disk| *disk == self.disk) {
            opening.swap_remove(at);
        }
    }
}

impl ExportRegistry {
    pub(super) fn begin_opening_device(&self, disk: &str) -> OpeningDevice<'_> {
        self.opening_devices.borrow_mut().push(disk.to_owned());
        OpeningDevice { registry: self, disk: disk.to_owned() }
    }

    /// True if a device of this host is being created for the disk.
    pub(crate) fn is_opening_device(&self, disk: &str) -> bool {
        self.opening_devices.borrow().iter().any(|opening| opening == disk)
    }

    pub(super) fn insert_server(&self, serving: &Rc<RunningServer>) {
        self.servers.borrow_mut().push(Rc::clone(serving));
        let mut servers_at = self.servers_at.borrow_mut();
        servers_at.entry(serving.endpoint.clone()).or_insert_with(|| Rc::clone(serving));
    }

    pub(super) fn contains(&self, id: &str) -> bool {
        self.listed.contains(id)
    }

    pub(super) fn find(&self, id: &str) -> Option<Rc<RunningExport>> {
        self.listed.get(id)
    }

    /// All NBD servers.
    pub fn servers(&self) -> Vec<Rc<RunningServer>> {
        self.servers.borrow().clone()
    }

    /// Returns the server of an endpoint.
    pub(crate) fn server_at(&self, endpoint: &ListenEndpoint) -> Option<Rc<RunningServer>> {
        self.servers_at.borrow().get(endpoint).cloned()
    }

    /// Servers for exports without an explicit address; excludes servers of specific disks.
    pub(crate) fn default_servers(&self) -> Vec<Rc<RunningServer>> {
        let mut servers = self.servers();
        servers.retain(|serving| serving.default_for_disks.get().is_some());
        servers
    }

    /// Servers that have exports of this disk only.
    pub(crate) fn servers_of_disk_only(&self, disk: &str) -> Vec<Rc<RunningServer>> {
        let mut servers: Vec<Rc<RunningServer>> = Vec::new();
        for export in self.of_disk(disk) {
            if let RunningEndpoint::Nbd(at, _) = &export.endpoint
                && !servers.iter().any(|known| Rc::ptr_eq(known, at))
            {
                servers.push(Rc::clone(at));
            }
        }
        if servers.is_empty() {
            return servers;
        }
        // Visits all exports, so only disks with NBD exports pay for it.
        for export in self.all() {
            if let RunningEndpoint::Nbd(at, _) = &export.endpoint
                && **export.disk.disk.name() != *disk
            {
                servers.retain(|serving| !Rc::ptr_eq(serving, at));
            }
        }
        servers
    }

    /// Removes a server from the list. The caller stops it.
    pub(crate) fn remove_server(&self, serving: &Rc<RunningServer>) {
        let (mut servers, mut servers_at) = (self.servers.borrow_mut(), self.servers_at.borrow_mut());
        servers.retain(|known| !Rc::ptr_eq(known, serving));
        servers_at.remove(&serving.endpoint);
        let next = servers.iter().find(|known| known.endpoint == serving.endpoint);
        // Another server may have the same endpoint; it becomes the first.
        servers_at.extend(next.map(|next| (next.endpoint.clone(), Rc::clone(next))));
    }

    pub(crate) fn has_export_at(&self, serving: &Rc<RunningServer>) -> bool {
        let is_at = |export: &Rc<RunningExport>| matches!(&export.endpoint, RunningEndpoint::Nbd(at, _) if Rc::ptr_eq(at, serving));
        self.listed.any(is_at)
    }

    /// Number of connected clients of all exports.
    pub fn connections(&self) -> usize {
        let nbd: usize = self.servers.borrow().iter().map(|serving| serving.server.connections()).sum();
        nbd + self.own_endpoints().iter().map(|endpoint| endpoint.server.connections()).sum::<usize>()
    }

    /// Endpoints of single exports.
    pub fn own_endpoints(&self) -> Vec<Rc<ExportEndpoint>> {
        let own_endpoint = |export: &Rc<RunningExport>| match &export.endpoint {
            RunningEndpoint::Separate(endpoint) => Some(Rc::clone(endpoint)),
            RunningEndpoint::Nbd(..) => None,
        };
        self.listed.all().iter().filter_map(own_endpoint).collect()
    }

    /// Notifies the clients of single-disk endpoints that the disk's size may have changed.
    pub(super) fn refresh_size(&self, disk: &Rc<RunningDisk>) {
        for export in self.of_disk(disk.disk.name()) {
            if let RunningEndpoint::Separate(endpoint) = &export.endpoint {
                endpoint.server.refresh_size();
            }
        }
    }

    /// All exports, including those that are ending.
    pub fn all(&self) -> Vec<Rc<RunningExport>> {
        self.listed.all()
    }

    pub(crate) fn get(&self, id: &str) -> Result<Rc<RunningExport>, RegistryError> {
        self.listed.get(id).ok_or_else(|| RegistryError::UnknownExport(id.to_owned()))
    }

    /// True if an export with this id exists or is planned.
    pub(crate) fn has_id(&self, id: &str) -> bool {
        self.listed.contains(id) || self.awaited_endpoints.borrow().contains_key(id)
    }

    /// Returns the id, or if it is in use, the id with the address appended.
    pub(crate) fn free_id(&self, id: &str, address: &str) -> String {
        if self.has_id(id) { format!("{id}@{address}") } else { id.to_owned() }
    }

    /// Sets the workers that run queues, the owner and mode of sockets, and the limits of servers.
    pub fn set_endpoint_parameters(
        &self,
        workers: &Rc<Vec<ReactorWorker>>,
        access: &SocketAccess,
        nbd: nbd::NbdServerTerms,
        inherited: InheritedSockets,
        tls: &TlsConfig,
    ) {
        let (workers, access, tls) = (Rc::clone(workers), access.clone(), tls.clone());
        let inherited = RefCell::new(inherited);
        let _ = self.endpoint_parameters.set(EndpointParameters { workers, access, nbd, inherited, tls });
    }

    /// Parameters set by [`ExportRegistry::set_endpoint_parameters`].
    ///
    /// # Errors
    /// They are not set yet.
    pub(crate) fn endpoint_parameters(&self) -> anyhow::Result<&EndpointParameters> {
        self.endpoint_parameters.get().context("the daemon has not started yet")
    }

    /// Fails if another export listens at this path. Probing the socket, as at a start, would
    /// connect to this daemon itself.
    pub(super) fn check_path_free(&self, target: &settings::ExportTarget) -> anyhow::Result<()> {
        let Some(new_path) = target.path().and_then(|path| path::absolute(path).ok()) else { return Ok(()) };
        let existing = self.endpoints.borrow().get(&new_path).and_then(|id| self.listed.get(id));
        match existing.filter(|export| !export.is_ending()) {
            Some(export) => bail!(
                "{}: the export {} uses this path (give each export a path of its own)",
                target.address(),
                export.id
            ),
            None => Ok(()),
        }
    }

    /// Exports of one disk, including those that wait for their last clients to disconnect.
    pub(crate) fn of_disk(&self, disk: &str) -> Vec<Rc<RunningExport>> {
        let ids = self.of_disks.borrow();
        ids.get(disk).into_iter().flatten().filter_map(|id| self.listed.get(id)).collect()
    }

    pub(super) fn insert(&self, export: RunningExport) {
        let (id, disk) = (export.id.clone(), export.disk.disk.name().to_string());
        if let Some(path) = export.endpoint_path() {
            self.endpoints.borrow_mut().insert(path, id.clone());
        }
        self.of_disks.borrow_mut().entry(disk).or_default().insert(id.clone());
        self.listed.insert(id, Rc::new(export));
    }

    pub(super) fn remove(&self, export: &RunningExport) {
        let RunningExport { id, disk, .. } = export;
        if let Some(path) = export.endpoint_path() {
            let mut endpoints = self.endpoints.borrow_mut();
            // A newer export may use the path by now.
            if endpoints.get(&path) == Some(id) {
                endpoints.remove(&path);
            }
        }
        let (mut of_disks, disk) = (self.of_disks.borrow_mut(), disk.disk.name());
        if let Some(ids) = of_disks.get_mut(&**disk) {
            ids.remove(id);
            if ids.is_empty() {
                of_disks.remove(&**disk);
            }
        }
        self.listed.remove(id);
    }
}
