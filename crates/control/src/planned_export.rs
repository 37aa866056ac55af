//! Export of a config file or command line, and the steps that add it to the running state.

use std::{
    collections::{BTreeSet, HashMap},
    rc::Rc,
};

use anyhow::{Context as _, bail};
use policy::access::AccessRules;
use settings::{
    DesiredState, ExportSpec, ExportTarget, ListenEndpoint, TlsConfig, VhostUserBlkConfig, VhostUserSocket,
};

use super::{
    bitmaps,
    endpoints::{TransferredEndpoint, VhostUserEndpoint},
    registry::{self, NewNbdExport, Registry, RunningExport},
    running_server::RunningServer,
};

/// Planned export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedExport {
    /// Name of the disk.
    pub disk: String,
    pub(crate) read_only: bool,
    pub(crate) endpoint: PlannedEndpoint,
}

/// Planned endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlannedEndpoint {
    Nbd {
        endpoint: ListenEndpoint,
        name: String,
        description: String,
        access: AccessRules,
        bitmaps: Vec<String>,
    },
    Separate(ExportTarget),
}

impl PlannedExport {
    /// All exports of a plan, NBD exports first.
    pub fn all(plan: &DesiredState) -> Vec<Self> {
        Self::of(plan, |_| true)
    }

    /// Exports of one disk of a plan, NBD exports first.
    pub(crate) fn of_disk(plan: &DesiredState, name: &str) -> Vec<Self> {
        let index = plan.disks.iter().position(|disk| disk.name == name);
        Self::of(plan, |disk| Some(disk) == index)
    }

    /// Name of the passed socket that this export alone uses.
    pub(crate) fn passed_socket(&self) -> Option<&str> {
        match &self.endpoint {
            PlannedEndpoint::Separate(target) => target.inherited_name(),
            PlannedEndpoint::Nbd { .. } => None,
        }
    }

    /// Exports of the disks whose index satisfies `is_wanted`.
    fn of(plan: &DesiredState, is_wanted: impl Fn(usize) -> bool + Copy) -> Vec<Self> {
        let DesiredState { disks, servers, exports, .. } = plan;
        let of_disk = |index: usize, read_only, planned_endpoint| {
            let disk = &disks[index];
            Self {
                disk: disk.name.clone(),
                read_only: read_only || disk.read_only,
                endpoint: planned_endpoint,
            }
        };
        let nbd = servers.iter().flat_map(|server| {
            server.exports.iter().filter(move |export| is_wanted(export.disk)).map(|export| {
                let disk = &disks[export.disk];
                let planned_endpoint = PlannedEndpoint::Nbd {
                    endpoint: server.endpoint.clone(),
                    name: export.name.clone(),
                    description: disk.description.clone(),
                    access: disk.access.clone(),
                    bitmaps: disk.qcow2.bitmaps.clone(),
                };
                of_disk(export.disk, export.read_only, planned_endpoint)
            })
        });
        let separate = exports.iter().filter(|export| is_wanted(export.disk));
        let separate = separate.map(|ExportSpec { target, disk }| {
            of_disk(*disk, false, PlannedEndpoint::Separate(target.clone()))
        });
        nbd.chain(separate).collect()
    }

    /// True if the running export is this one and is not ending.
    fn matches(&self, export: &RunningExport) -> bool {
        let is_same_endpoint = match (&self.endpoint, &export.endpoint) {
            (PlannedEndpoint::Nbd { endpoint, name, .. }, registry::RunningEndpoint::Nbd(serving, _)) => {
                serving.endpoint == *endpoint && export.name == *name
            }
            (PlannedEndpoint::Separate(target), registry::RunningEndpoint::Separate(..)) => {
                export.endpoint_config.as_ref() == Some(target)
            }
            _ => false,
        };
        is_same_endpoint && !export.is_ending()
    }

    /// True if both exports have the same name at the same server, or the same endpoint.
    pub(crate) fn has_same_endpoint(&self, other: &Self) -> bool {
        match (&self.endpoint, &other.endpoint) {
            (
                PlannedEndpoint::Nbd { endpoint, name, .. },
                PlannedEndpoint::Nbd { endpoint: other_endpoint, name: other_name, .. },
            ) => (endpoint, name) == (other_endpoint, other_name),
            (PlannedEndpoint::Separate(target), PlannedEndpoint::Separate(other)) => {
                // Devices without an address, such as automatically numbered ones, never coincide.
                let address = (target.path(), target.inherited_name());
                address != (None, None) && address == (other.path(), other.inherited_name())
            }
            _ => false,
        }
    }

    /// Keys by which an export of the same disk at the same endpoint differs.
    pub(crate) fn differences(&self, other: &Self) -> Vec<String> {
        let mut keys = Vec::new();
        let mut add = |key: &str, differs: bool| keys.extend(differs.then(|| key.to_owned()));
        add("disk", self.disk != other.disk);
        add("read-only", self.read_only != other.read_only);
        match (&self.endpoint, &other.endpoint) {
            (
                PlannedEndpoint::Nbd { description, access, bitmaps, .. },
                PlannedEndpoint::Nbd {
                    description: other_description,
                    access: other_access,
                    bitmaps: other_bitmaps,
                    ..
                },
            ) => {
                add("description", description != other_description);
                add("allow, deny, tls-authz", access != other_access);
                add("bitmap", bitmaps != other_bitmaps);
            }
            (PlannedEndpoint::Separate(target), PlannedEndpoint::Separate(other)) => {
                // Compared in the syntax of the command line: the address, then each non-default
                // key.
                let options_of = |target: &ExportTarget| {
                    target.to_string().split(',').skip(1).map(str::to_owned).collect()
                };
                let (one, other): (BTreeSet<_>, BTreeSet<_>) = (options_of(target), options_of(other));
                for option in one.symmetric_difference(&other) {
                    let key = option.split('=').next().unwrap_or_default().to_owned();
                    if !keys.contains(&key) {
                        keys.push(key);
                    }
                }
            }
            _ => {}
        }
        keys
    }

    /// Adds it to the running state, at a running server or at its own endpoint.
    pub async fn add(&self, registry: &Rc<Registry>) -> anyhow::Result<Rc<RunningExport>> {
        let id = match &self.endpoint {
            PlannedEndpoint::Nbd { endpoint, name, .. } => {
                // An export may have the empty name, but no export the empty id.
                let name = if name.is_empty() { &self.disk } else { name };
                registry.exports.free_id(name, &require_server(registry, endpoint)?.address())
            }
            PlannedEndpoint::Separate(target) => registry.exports.free_id(&self.disk, &target.address()),
        };
        self.add_with_id(registry, id).await
    }

    /// As [`PlannedExport::add`], with a free id.
    pub(crate) async fn add_with_id(
        &self,
        registry: &Rc<Registry>,
        id: String,
    ) -> anyhow::Result<Rc<RunningExport>> {
        let disk = registry.disks.get(&self.disk)?;
        match &self.endpoint {
            PlannedEndpoint::Nbd { endpoint, name, description, access, bitmaps } => {
                let new = NewNbdExport {
                    id: id.clone(),
                    name: name.clone(),
                    description: description.clone(),
                    access: access.clone(),
                    disk: self.disk.clone(),
                    read_only: self.read_only,
                    bitmaps: bitmaps::find_bitmaps(&disk, bitmaps).await?,
                };
                registry.add_export(&require_server(registry, endpoint)?, new)?;
            }
            PlannedEndpoint::Separate(target) => {
                registry.add_endpoint(id.clone(), disk, self.read_only, target, None).await?;
            }
        }
        Ok(registry.exports.get(&id)?)
    }

    /// Opens a separate endpoint under this id, with transferred state of the old process.
    pub(crate) async fn add_transferred(
        &self,
        registry: &Rc<Registry>,
        id: String,
        taken: TransferredEndpoint,
    ) -> anyhow::Result<String> {
        let PlannedEndpoint::Separate(target) = &self.endpoint else {
            bail!("it has no endpoint of its own")
        };
        registry.add_endpoint(id, registry.disks.get(&self.disk)?, self.read_only, target, Some(taken)).await
    }

    /// True if clients of the endpoint cannot write.
    pub(crate) fn is_read_only(&self, registry: &Registry) -> anyhow::Result<bool> {
        let of_target = matches!(&self.endpoint, PlannedEndpoint::Separate(target) if target.read_only());
        Ok(self.read_only || of_target || registry.disks.get(&self.disk)?.disk.image().is_read_only())
    }

    /// Export name for reports; for a separate endpoint, the disk's name.
    pub(crate) fn shown_name(&self) -> &str {
        match &self.endpoint {
            PlannedEndpoint::Nbd { name, .. } => name,
            PlannedEndpoint::Separate(_) => &self.disk,
        }
    }

    /// Address for reports.
    pub(crate) fn address(&self, registry: &Registry) -> String {
        match &self.endpoint {
            PlannedEndpoint::Nbd { endpoint: ListenEndpoint::Address(address), .. } => address.to_string(),
            PlannedEndpoint::Nbd { endpoint, .. } => {
                find_server(registry, endpoint).map_or_else(String::new, |serving| serving.address())
            }
            PlannedEndpoint::Separate(target) => target.address(),
        }
    }
}

/// Running exports at one moment, indexed to find planned ones.
pub(crate) struct RunningExportIndex(HashMap<String, Vec<Rc<RunningExport>>>);

impl RunningExportIndex {
    pub(crate) fn of(registry: &Registry) -> Self {
        let mut of_disks: HashMap<_, Vec<_>> = HashMap::new();
        for export in registry.exports.all() {
            of_disks.entry(export.disk.disk.name().to_string()).or_default().push(export);
        }
        Self(of_disks)
    }

    pub(crate) fn find(&self, planned: &PlannedExport) -> Option<Rc<RunningExport>> {
        let of_disk = self.0.get(&planned.disk)?;
        of_disk.iter().find(|export| planned.matches(export)).cloned()
    }
}

/// URIs by which clients reach a running export.
pub fn export_uris(export: &RunningExport, tls: &TlsConfig) -> Vec<String> {
    let endpoint = match &export.endpoint {
        registry::RunningEndpoint::Nbd(serving, _) => {
            // The config's TLS mode applies to servers of the config only.
            let is_plain = serving.added.get().is_some_and(|added| !added.has_objects);
            return serving.uris(&export.name, if is_plain { &TlsConfig::Off } else { tls });
        }
        registry::RunningEndpoint::Separate(endpoint) => endpoint,
    };
    let address = endpoint.address();
    vec![match &export.endpoint_config {
        // The front end listens, and only weir connects: there is no URI for clients.
        Some(ExportTarget::VhostUserBlk(config)) if config.client => format!("{address},client"),
        Some(ExportTarget::VhostUserBlk(VhostUserBlkConfig { socket: VhostUserSocket::Path(_), .. })) => {
            address.replacen("unix:", "vhost-user:", 1)
        }
        // The path of a passed socket is known to the kernel only.
        Some(ExportTarget::VhostUserBlk(_)) => {
            match endpoint.vhost_user().and_then(VhostUserEndpoint::listening_path) {
                Some(path) => format!("vhost-user:{}", path.display()),
                None => address.to_owned(),
            }
        }
        _ => address.to_owned(),
    }]
}

fn require_server(registry: &Registry, endpoint: &ListenEndpoint) -> anyhow::Result<Rc<RunningServer>> {
    find_server(registry, endpoint).context("no server listens there")
}

/// The server of an endpoint.
pub(crate) fn find_server(registry: &Registry, endpoint: &ListenEndpoint) -> Option<Rc<RunningServer>> {
    registry.exports.server_at(endpoint)
}
