//! A running export and its endpoint: a name at an NBD server, or a socket, device or file of its
//! own. Independent of other exports: the [registry](super::registry) checks that names are unique.
//! Belongs to the main thread.

use std::{
    cell::Cell,
    os::fd::OwnedFd,
    path::{self, Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use anyhow::ensure;
use export::nbd::{NotRemoved, Removal};
use image::qcow2::bitmap::BitmapView;
use policy::access::AccessRules;

use super::{endpoints::ExportEndpoint, running_disk::RunningDisk, running_server::RunningServer};
use crate::openers::DeviceOpeners;

/// Running export of a disk.
pub struct RunningExport {
    /// Unique id.
    pub id: String,
    /// Export name that clients request; unique at its server.
    pub(crate) name: String,
    /// The exported disk.
    pub disk: Rc<RunningDisk>,
    /// The endpoint.
    pub endpoint: RunningEndpoint,
    /// Configuration of the endpoint, if it is not at an NBD server.
    pub endpoint_config: Option<settings::ExportTarget>,
    /// Parameters that it was added with, if it is at an NBD server.
    pub(crate) nbd_parameters: Option<NewNbdExport>,
    pub(crate) read_only: bool,
    /// True if a client of the control socket added it and it is in no config file.
    pub(crate) is_added: Cell<bool>,
    pub(super) is_ending_flag: Cell<bool>,
}

/// Endpoint of a running export.
pub enum RunningEndpoint {
    /// NBD server, and the export's number there.
    Nbd(Rc<RunningServer>, usize),
    /// Socket, device or file of this export alone.
    Separate(Rc<ExportEndpoint>),
}

impl RunningEndpoint {
    /// Name in QEMU's `BlockExportType`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nbd(..) => "nbd",
            Self::Separate(endpoint) => endpoint.kind(),
        }
    }

    pub(crate) fn address(&self) -> String {
        match self {
            Self::Nbd(serving, _) => serving.address(),
            Self::Separate(endpoint) => endpoint.address().to_owned(),
        }
    }

    fn connections(&self) -> usize {
        match self {
            Self::Nbd(serving, number) => serving.server.connections_of(*number),
            Self::Separate(endpoint) => endpoint.server.connections(),
        }
    }

    /// Removes the export from its endpoint. Before [`Removal::IfUnused`] the caller has checked
    /// the openers of a device: that check blocks, and must not run here.
    pub(super) fn remove(&self, removal: Removal) -> Result<(), NotRemoved> {
        match self {
            Self::Nbd(serving, number) => serving.server.remove(*number, removal),
            Self::Separate(endpoint) => match (removal, endpoint.server.connections()) {
                // A device counts as one connection while it exists, so the count does not show
                // whether it has openers.
                (Removal::IfUnused, connections @ 1..) if endpoint.device().is_none() => {
                    Err(NotRemoved::InUse { connections })
                }
                _ => {
                    endpoint.close();
                    Ok(())
                }
            },
        }
    }

    pub(super) async fn wait_until_unused(&self) {
        match self {
            Self::Nbd(serving, number) => serving.server.wait_until_unused(*number).await,
            Self::Separate(endpoint) => endpoint.stop().await,
        }
    }
}

impl RunningExport {
    /// The endpoint, unless the export is at an NBD server.
    pub(crate) fn own_endpoint(&self) -> Option<&Rc<ExportEndpoint>> {
        match &self.endpoint {
            RunningEndpoint::Separate(endpoint) => Some(endpoint),
            RunningEndpoint::Nbd(..) => None,
        }
    }

    /// Another descriptor of the listening socket of a vhost-user endpoint, if it has one.
    pub(crate) fn try_clone_socket(&self) -> Option<OwnedFd> {
        self.own_endpoint()?.vhost_user()?.try_clone_socket()
    }

    /// Absolute path of the endpoint, if it is a socket or file of this export alone.
    pub(crate) fn endpoint_path(&self) -> Option<PathBuf> {
        path::absolute(self.endpoint_config.as_ref()?.path()?).ok()
    }

    pub(crate) fn connections(&self) -> usize {
        self.endpoint.connections()
    }

    /// Block size that the disk's size must be a multiple of while this export exists.
    pub(crate) fn block_bytes(&self) -> Option<u32> {
        match &self.endpoint {
            RunningEndpoint::Nbd(..) => None,
            RunningEndpoint::Separate(endpoint) => endpoint.block_bytes(),
        }
    }

    /// Connected clients, as text.
    pub(crate) fn clients_text(&self) -> String {
        match &self.endpoint {
            RunningEndpoint::Nbd(serving, number) => serving.server.clients_of(*number),
            RunningEndpoint::Separate(endpoint) => match endpoint.server.counters().front_end {
                Some(process) => process.to_string(),
                // The process id is unknown if the front end is in another PID namespace.
                None => "a virtual machine".to_owned(),
            },
        }
    }

    /// Fails if a client is connected, or if a device of this host is mounted, claimed or open.
    pub(crate) async fn check_unused(&self) -> anyhow::Result<()> {
        let (id, disk) = (&self.id, self.disk.disk.name());
        // Only devices have openers; sockets count their connections.
        let device = match &self.endpoint {
            RunningEndpoint::Separate(endpoint) => endpoint.device().map(Path::to_owned),
            RunningEndpoint::Nbd(..) => None,
        };
        let Some(device) = device else {
            ensure!(
                self.connections() == 0,
                "export {id} of disk {disk}: in use: {} (disconnect it first)",
                self.clients_text()
            );
            return Ok(());
        };
        // On another thread: reads /proc of all processes, and opens the device, which this process
        // serves.
        let users =
            reactor::run_blocking(move || DeviceOpeners::of_device(&device).with_processes().with_claims())
                .await;
        ensure!(users.is_empty(), "export {id} of disk {disk}: in use: {users} (disconnect it first)");
        Ok(())
    }

    /// True if it was removed and its last clients are disconnecting.
    pub(crate) fn is_ending(&self) -> bool {
        self.is_ending_flag.get()
    }
}

/// Parameters of an export at an NBD server.
#[derive(Clone, Debug)]
pub struct NewNbdExport {
    pub(crate) id: String,
    pub(crate) name: String,
    /// Description for people; may be empty.
    pub(crate) description: String,
    pub(crate) access: AccessRules,
    pub(crate) disk: String,
    pub(crate) read_only: bool,
    pub(crate) bitmaps: Arc<[BitmapView]>,
}
