//! Export endpoints of a single disk: a vhost-user socket for a virtual machine, a block device or
//! a file on this host.
//!
//! ```text
//!   settings::ExportTarget ─► open_endpoint ─► ExportEndpoint: address, server, serving task
//!                                   │            accept, close, stop: the same for every kind
//!                                   └── one file per kind: its creation, its counters
//! ```
//!
//! All of this runs on the main thread; the queues of an export live on the workers. Never handles
//! a request.

mod fuse;
mod nbd_device;
mod ublk;
mod vhost_user_blk;

use std::{
    any::Any,
    cell::{Cell, RefCell},
    io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::net::UnixListener,
    },
    path::{Path, PathBuf},
    pin::Pin,
    rc::Rc,
    sync::Arc,
};

use anyhow::{anyhow, ensure};
use api::ExportCounters;
use block::disk::Disk;
use policy::time::Duration;
use reactor::{JoinHandle, ReactorWorker};
use settings::{ExportTarget, SocketAccess};

use super::running_disk::RunningDisk;
use crate::{
    events::EventLog,
    listen::{InheritedSockets, ListeningSocket},
    openers::DeviceOpeners,
};

type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Operations that the servers of all single-disk endpoints have in common; see
/// `export::vhost_user_blk::VhostUserServer`.
pub trait EndpointServer {
    /// Number of connected clients. A device counts as one while it exists.
    fn connections(&self) -> usize;
    /// True if a client was ever connected.
    fn has_served(&self) -> bool;
    /// Checks the disk's size again, which may have changed.
    fn refresh_size(&self);
    /// Stops accepting clients and lets requests in flight complete.
    fn close(&self);
    /// As [`EndpointServer::close`], at the end of this process: a device in use may wait for its
    /// next server.
    fn hand_over(&self) {
        self.close();
    }
    /// Waits until `busy` returns false. It is evaluated at once and after every change of the
    /// number of clients.
    fn wait_while<'a>(&'a self, busy: Box<dyn Fn() -> bool + 'a>) -> LocalFuture<'a, ()>;
    /// Its counters.
    fn counters(&self) -> ExportCounters;
    /// Adds the counters of the old process.
    fn count_on(&self, before: &ExportCounters);
}

/// Implements [`EndpointServer`] for a server by its methods of the same names. The counters, and
/// whether a device can outlive the process, differ between servers.
macro_rules! attended {
    ($server:ty, $counters:expr, $count_on:expr $(, $leave:ident)?) => {
        impl crate::endpoints::EndpointServer for $server {
            fn connections(&self) -> usize {
                <$server>::connections(self)
            }

            fn has_served(&self) -> bool {
                <$server>::has_served(self)
            }

            fn refresh_size(&self) {
                <$server>::refresh_size(self);
            }

            fn close(&self) {
                <$server>::close(self);
            }

            $(fn hand_over(&self) {
                <$server>::$leave(self);
            })?

            fn wait_while<'a>(
                &'a self,
                busy: Box<dyn Fn() -> bool + 'a>,
            ) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'a>> {
                Box::pin(<$server>::wait_while(self, move |_| busy()))
            }

            fn counters(&self) -> api::ExportCounters {
                $counters(<$server>::statistics(self))
            }

            fn count_on(&self, before: &api::ExportCounters) {
                $count_on(self, before);
            }
        }
    };
}
use attended;

/// Parameters for opening an endpoint.
pub(crate) struct EndpointOptions<'a> {
    pub(crate) id: &'a str,
    pub(crate) disk: &'a RunningDisk,
    /// Read-only by the disk's config or the client's request. The endpoint's own settings may also
    /// make it read-only.
    pub(crate) read_only: bool,
    /// Owner and mode of sockets.
    pub(crate) access: &'a SocketAccess,
    /// Sockets that were passed to the daemon.
    pub(crate) inherited: &'a RefCell<InheritedSockets>,
    pub(crate) workers: &'a Rc<Vec<ReactorWorker>>,
    pub(crate) events: &'a EventLog,
    /// Transferred state, if the old process of an upgrade served this endpoint.
    pub(crate) transferred: Cell<Option<TransferredEndpoint>>,
}

/// Device or file of this host, as the old process leaves it.
pub(crate) enum TransferredEndpoint {
    /// No state: the driver holds it, and the old server has ended or is about to end.
    Ublk,
    NbdDevice(export::nbd::kernel_client::QuiescedNbdDevice),
    Fuse(export::fuse::QuiescedFuseFile),
}

/// Endpoint of one export, accepting clients or prepared to.
pub struct ExportEndpoint {
    kind: &'static str,
    address: String,
    /// Device node or file, for a device of this host.
    device: Option<PathBuf>,
    /// Block size in bytes; the disk's size must be a multiple of it.
    block_bytes: Option<u32>,
    /// The server.
    pub server: Arc<dyn EndpointServer>,
    /// Socket and server, for a virtual machine.
    vhost_user: Option<VhostUserEndpoint>,
    /// Server, for a device or file of this host.
    host: Option<HostEndpoint>,
    /// The serving task, until [`ExportEndpoint::accept`] starts it.
    unstarted_task: Cell<Option<LocalFuture<'static, io::Result<()>>>>,
    /// Completes after the server has stopped.
    serving: RefCell<Option<JoinHandle<()>>>,
    closed: Cell<bool>,
    /// Resource that is released when the endpoint closes, such as a socket's file.
    held_resource: RefCell<Option<Box<dyn Any>>>,
    /// Keeps the worker threads alive; they end, and their clients with them, after the last
    /// reference is dropped.
    _workers: Rc<Vec<ReactorWorker>>,
}

/// Opens an endpoint. Creating a device waits for the kernel. Clients are accepted only after
/// [`ExportEndpoint::accept`].
pub(crate) async fn open_endpoint(
    target: &ExportTarget,
    terms: &EndpointOptions<'_>,
) -> anyhow::Result<Rc<ExportEndpoint>> {
    let is_device = !matches!(target, ExportTarget::VhostUserBlk(_));
    ensure!(
        !(is_device && terms.disk.disk.has_handover()),
        "disk {}: handover is for virtual machines, and {} is on this host (leave it out)",
        terms.disk.disk.name(),
        target.address()
    );
    check_size(&terms.disk.disk, target)?;
    let endpoint = match target {
        ExportTarget::VhostUserBlk(settings) => vhost_user_blk::open(settings, terms)?,
        ExportTarget::Ublk(settings) => ublk::open(settings, terms).await?,
        ExportTarget::Fuse(settings) => fuse::open(settings, terms).await?,
        ExportTarget::NbdDevice(settings) => nbd_device::open(settings, terms).await?,
    };
    Ok(Rc::new(ExportEndpoint { block_bytes: target.logical_block().map(|(bytes, _)| bytes), ..endpoint }))
}

impl ExportEndpoint {
    /// Endpoint of this kind (a name of QEMU's `BlockExportType`) served by `serving`, which
    /// completes after `server` is closed or the device was removed externally.
    fn new(
        kind: &'static str,
        address: String,
        server: Arc<dyn EndpointServer>,
        serving: impl Future<Output = io::Result<()>> + 'static,
        terms: &EndpointOptions<'_>,
    ) -> Self {
        Self {
            kind,
            address,
            device: None,
            block_bytes: None,
            server,
            vhost_user: None,
            host: None,
            unstarted_task: Cell::new(Some(Box::pin(serving))),
            serving: RefCell::default(),
            closed: Cell::new(false),
            held_resource: RefCell::default(),
            _workers: Rc::clone(terms.workers),
        }
    }

    /// Marks it as a device or file of this host, at its address.
    fn with_device(self, host: HostEndpoint) -> Self {
        Self { device: Some(PathBuf::from(&self.address)), host: Some(host), ..self }
    }

    /// Marks it as an endpoint for a virtual machine.
    fn with_vhost_user(self, machine: VhostUserEndpoint) -> Self {
        Self { vhost_user: Some(machine), ..self }
    }

    /// Holds a resource until the endpoint closes.
    fn with_resource(self, resource: impl Any) -> Self {
        self.held_resource.replace(Some(Box::new(resource)));
        self
    }

    /// Starts accepting clients. Calls its argument if serving ends before the endpoint is closed:
    /// with an error, or with `Ok` if the device was removed externally.
    pub(crate) fn accept(self: &Rc<Self>, on_end: impl FnOnce(io::Result<()>) + 'static) {
        // Idempotent: an accepting endpoint is unchanged.
        let Some(task) = self.unstarted_task.take() else { return };
        let endpoint = Rc::downgrade(self);
        *self.serving.borrow_mut() = Some(reactor::spawn_joinable(async move {
            let result = task.await;
            // An orderly close ends the task as well, and is no event.
            if endpoint.upgrade().is_some_and(|endpoint| !endpoint.closed.get()) {
                on_end(result);
            }
        }));
    }

    pub(crate) fn kind(&self) -> &'static str {
        self.kind
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Device node or file, for a device of this host.
    pub fn device(&self) -> Option<&Path> {
        self.device.as_deref()
    }

    /// Block size that the disk's size must be a multiple of while this endpoint exists.
    pub(crate) fn block_bytes(&self) -> Option<u32> {
        self.block_bytes
    }

    /// Socket and server, for a virtual machine.
    pub(crate) fn vhost_user(&self) -> Option<&VhostUserEndpoint> {
        self.vhost_user.as_ref()
    }

    /// Server, for a device or file of this host.
    pub fn host_endpoint(&self) -> Option<&HostEndpoint> {
        self.host.as_ref()
    }

    /// Stops accepting clients and lets requests in flight complete.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        // Drops the serving task if it never ran, with everything it owns.
        self.unstarted_task.take();
        self.held_resource.take();
        self.server.close();
    }

    /// As [`ExportEndpoint::close`], at the end of this process: a device in use is left to the
    /// next process if its driver supports that.
    pub fn close_or_hand_over(&self) {
        // Reads /proc synchronously, which only the end of the process permits.
        let is_used = |device: &Path| !DeviceOpeners::of_device(device).with_processes().is_empty();
        if self.device().is_some_and(is_used) {
            self.closed.set(true);
            self.server.hand_over();
        } else {
            self.close();
        }
    }

    /// Waits until the last client has disconnected and its requests have completed.
    pub async fn until_unused(&self) {
        self.server.wait_while(Box::new(|| self.server.connections() > 0)).await;
    }

    /// Closes the endpoint if necessary, then waits until it is unused and its task has ended.
    pub async fn stop(&self) {
        if !self.closed.get() {
            self.close();
        }
        self.until_unused().await;
        let serving = self.serving.take();
        if let Some(serving) = serving {
            if self.device.is_some() {
                // Not cancelled: the task still has to remove the device.
                serving.await;
            } else {
                serving.cancel().await;
            }
        }
    }
}

/// vhost-user endpoint, with what an upgrade transfers.
pub(crate) struct VhostUserEndpoint {
    pub(crate) server: Arc<export::vhost_user_blk::VhostUserServer>,
    /// Configured address and listening socket, if this side listens.
    pub(crate) listening: Option<(String, ListeningSocket)>,
}

impl VhostUserEndpoint {
    /// Another descriptor of the listening socket, if it has one.
    pub(crate) fn try_clone_socket(&self) -> Option<OwnedFd> {
        let (_, (socket, _)) = self.listening.as_ref()?;
        socket.as_fd().try_clone_to_owned().ok()
    }

    /// Path of the listening socket, if it has one.
    pub(crate) fn listening_path(&self) -> Option<PathBuf> {
        Some(UnixListener::from(self.try_clone_socket()?).local_addr().ok()?.as_pathname()?.to_owned())
    }
}

/// Device or file of this host, with what an upgrade transfers.
#[derive(Clone)]
pub enum HostEndpoint {
    /// A ublk device.
    Ublk(Arc<export::ublk::UblkServer>),
    /// An NBD device of the kernel.
    NbdDevice(Arc<export::nbd::kernel_client::NbdDeviceServer>),
    /// A file over FUSE.
    Fuse(Arc<export::fuse::FuseExportServer>),
}

impl HostEndpoint {
    /// Quiesces the server. Returns false if its requests do not complete in time.
    pub(crate) async fn quiesce(&self, timeout: Duration) -> bool {
        match self {
            Self::Ublk(server) => server.quiesce(timeout).await,
            Self::NbdDevice(server) => server.quiesce(timeout).await,
            Self::Fuse(server) => server.quiesce(timeout).await,
        }
    }

    /// Resumes after [`HostEndpoint::quiesce`]; used if an upgrade fails.
    pub(crate) fn resume(&self) {
        match self {
            Self::Ublk(server) => server.resume(),
            Self::NbdDevice(server) => server.resume(),
            Self::Fuse(server) => server.resume(),
        }
    }
}

/// Identity of a device's data, by which the next process finds it again. A disk in memory does not
/// survive this process, so its identity is unique.
fn data_identity(running: &RunningDisk) -> anyhow::Result<String> {
    Ok(match running.config().image.path() {
        // Absolute: the next process may run in another directory.
        Some(path) => format!("weir:{}", std::path::absolute(path)?.display()),
        None => format!("weir:{}:{}", std::process::id(), running.disk.name()),
    })
}

/// Fails if this host lacks the driver, device or file of an endpoint. Changes nothing. Blocking.
pub fn check_host_support(target: &ExportTarget) -> anyhow::Result<()> {
    let check_exists = |path: &Path, remedy: &str| match path.exists() {
        true => Ok(()),
        false => Err(anyhow!("{}: does not exist ({remedy})", path.display())),
    };
    match target {
        ExportTarget::VhostUserBlk(_) => Ok(()),
        ExportTarget::Ublk(_) => {
            check_exists(Path::new("/dev/ublk-control"), "`modprobe ublk_drv`; it needs Linux 6.1")
        }
        ExportTarget::NbdDevice(device) => {
            let path = device.path().unwrap_or_else(|| "/dev/nbd0".into());
            check_exists(&path, "`modprobe nbd`")
        }
        ExportTarget::Fuse(fuse) => {
            check_exists(Path::new("/dev/fuse"), "`modprobe fuse`")?;
            check_exists(&fuse.file, "create an empty file; the disk is mounted over it")?;
            ensure!(
                fuse.file.is_file(),
                "{}: not a regular file (name one, which may be empty; the disk is mounted over \
                 it)",
                fuse.file.display()
            );
            Ok(())
        }
    }
}

/// Fails if the disk's size is not a multiple of the endpoint's block size: the client could not
/// reach the bytes after the last whole block.
pub fn check_size(disk: &Disk, target: &ExportTarget) -> anyhow::Result<()> {
    let Some((block_bytes, client)) = target.logical_block() else { return Ok(()) };
    let (size, block) = (disk.size_bytes(), u64::from(block_bytes));
    let (rounded_up, rest) = (size.next_multiple_of(block), size % block);
    ensure!(
        rest == 0,
        "disk {}: has {size} bytes, which is not a multiple of {block}, and {client} would not see \
         the last {rest} (make that {rounded_up}: `weir image resize`, or size= where it is a part of \
         its image)",
        disk.name()
    );
    Ok(())
}
