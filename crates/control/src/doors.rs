//! A door of one disk's own at work: a socket for a virtual machine, a block device or a file on
//! this host.
//!
//! ```text
//!   settings::Door ─► open ─► Entrance: where it is, its server, the task that serves
//!                       │        accept, close, stop: the same for every kind
//!                       └── one file a kind: what it takes to make it, what status tells of it
//! ```
//!
//! Everything here happens on the main thread; an export's queues live on the workers. Never
//! touches a request.

mod fuse;
mod nbd_device;
mod ublk;
mod vhost_user_blk;

use std::{
    any::Any,
    cell::{Cell, RefCell},
    io,
    os::{fd::AsFd as _, unix::net::UnixListener},
    path::{Path, PathBuf},
    pin::Pin,
    rc::Rc,
    sync::Arc,
};

use anyhow::ensure;
use api::ExportCounters;
use block::disk::Disk;
use policy::time::Duration;
use reactor::{JoinHandle, ReactorWorker};
use settings::{ExportTarget, SocketAccess};

use super::running::RunningDisk;
use crate::{
    events::Events,
    listen::{Inherited, Listening},
    users::Users,
};

type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What every server of an own door can do; see `export::vhost_user_blk::Server`.
pub trait Attended {
    /// Clients now. A device counts as one while it is there.
    fn connections(&self) -> usize;
    /// Whether there has ever been one.
    fn has_served(&self) -> bool;
    /// The disk may have another length.
    fn look_at_size(&self);
    /// Lets nobody in any more, and has requests in flight end.
    fn close(&self);
    /// The same where this process ends, and a device that is in use may wait for the next.
    fn leave(&self) {
        self.close();
    }
    /// Waits until `busy` is false: it is asked now, and whenever clients have come or gone.
    fn wait_while<'a>(&'a self, busy: Box<dyn Fn() -> bool + 'a>) -> Local<'a, ()>;
    /// Its counters.
    fn counters(&self) -> ExportCounters;
    /// Counts on from what another daemon has counted.
    fn count_on(&self, before: &ExportCounters);
}

/// Each server has these by the same names; only what it tells is its own, and whether it can
/// leave a device behind.
macro_rules! attended {
    ($server:ty, $counters:expr, $count_on:expr $(, $leave:ident)?) => {
        impl crate::doors::Attended for $server {
            fn connections(&self) -> usize {
                <$server>::connections(self)
            }

            fn has_served(&self) -> bool {
                <$server>::has_served(self)
            }

            fn look_at_size(&self) {
                <$server>::look_at_size(self);
            }

            fn close(&self) {
                <$server>::close(self);
            }

            $(fn $leave(&self) {
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

/// What an own door is made with.
pub(crate) struct Terms<'a> {
    pub(crate) id: &'a str,
    pub(crate) disk: &'a RunningDisk,
    /// What the disk or whoever asks says; the door's own settings may say it too.
    pub(crate) read_only: bool,
    /// Who may connect to sockets.
    pub(crate) access: &'a SocketAccess,
    /// Sockets that were passed to the daemon.
    pub(crate) inherited: &'a RefCell<Inherited>,
    pub(crate) workers: &'a Rc<Vec<ReactorWorker>>,
    pub(crate) events: &'a Events,
    /// What it is made of, where another daemon had it.
    pub(crate) taken: Cell<Option<Taken>>,
}

/// A device or a file of this host, as another daemon leaves it.
pub(crate) enum Taken {
    /// It has ended, or is about to have: the kernel has all that there is.
    Ublk,
    NbdDevice(export::nbd::kernel_client::QuiescedNbdDevice),
    Fuse(export::fuse::QuiescedFuseFile),
}

/// A door that is open, or about to be.
pub struct Entrance {
    kind: &'static str,
    address: String,
    /// Of a device of this host: its node, or the file.
    device: Option<PathBuf>,
    /// What the disk's length is a multiple of there.
    block_bytes: Option<u32>,
    /// The server.
    pub server: Arc<dyn Attended>,
    /// Of virtual machines.
    machine: Option<Machine>,
    /// Of this host.
    host: Option<Host>,
    /// Until clients are let in.
    opening: Cell<Option<Local<'static, io::Result<()>>>>,
    /// Ends by itself once the server has stopped.
    serving: RefCell<Option<JoinHandle<()>>>,
    closed: Cell<bool>,
    /// What goes when the door is closed, such as a socket's file.
    kept: RefCell<Option<Box<dyn Any>>>,
    /// The threads end, and the clients with them, once nobody holds these.
    _workers: Rc<Vec<ReactorWorker>>,
}

/// Makes a door. Of a device this takes the kernel's time; nobody is let in before
/// [`Entrance::accept`].
pub(crate) async fn open(door: &ExportTarget, terms: &Terms<'_>) -> anyhow::Result<Rc<Entrance>> {
    let is_device = !matches!(door, ExportTarget::VhostUserBlk(_));
    ensure!(
        !(is_device && terms.disk.disk.has_handover()),
        "disk {}: handover is for virtual machines, and {} is on this host (leave it out)",
        terms.disk.disk.name(),
        door.address()
    );
    check_size(&terms.disk.disk, door)?;
    let entrance = match door {
        ExportTarget::VhostUserBlk(settings) => vhost_user_blk::open(settings, terms)?,
        ExportTarget::Ublk(settings) => ublk::open(settings, terms).await?,
        ExportTarget::Fuse(settings) => fuse::open(settings, terms).await?,
        ExportTarget::NbdDevice(settings) => nbd_device::open(settings, terms).await?,
    };
    Ok(Rc::new(Entrance { block_bytes: door.logical_block().map(|(bytes, _)| bytes), ..entrance }))
}

impl Entrance {
    /// A door of this kind, as QEMU's `BlockExportType` calls it, that `serving` serves: it ends
    /// after `server` is closed, or when a device has gone from outside.
    fn new(
        kind: &'static str,
        address: String,
        server: Arc<dyn Attended>,
        serving: impl Future<Output = io::Result<()>> + 'static,
        terms: &Terms<'_>,
    ) -> Self {
        Self {
            kind,
            address,
            device: None,
            block_bytes: None,
            server,
            machine: None,
            host: None,
            opening: Cell::new(Some(Box::pin(serving))),
            serving: RefCell::default(),
            closed: Cell::new(false),
            kept: RefCell::default(),
            _workers: Rc::clone(terms.workers),
        }
    }

    /// It is a device of this host, or a file, at its address.
    fn of_device(self, host: Host) -> Self {
        Self { device: Some(PathBuf::from(&self.address)), host: Some(host), ..self }
    }

    /// It is for a virtual machine.
    fn of_machine(self, machine: Machine) -> Self {
        Self { machine: Some(machine), ..self }
    }

    /// Keeps something until the door is closed.
    fn keeping(self, kept: impl Any) -> Self {
        self.kept.replace(Some(Box::new(kept)));
        self
    }

    /// Lets clients in. Calls `ended` if that ends before it should: with an error, or without one
    /// where the device has gone from outside.
    pub(crate) fn accept(self: &Rc<Self>, ended: impl FnOnce(io::Result<()>) + 'static) {
        let Some(serving) = self.opening.take() else { return };
        let entrance = Rc::downgrade(self);
        *self.serving.borrow_mut() = Some(reactor::spawn_joinable(async move {
            let result = serving.await;
            if entrance.upgrade().is_some_and(|entrance| !entrance.closed.get()) {
                ended(result);
            }
        }));
    }

    pub(crate) fn kind(&self) -> &'static str {
        self.kind
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The node or the file of a device of this host.
    pub fn device(&self) -> Option<&Path> {
        self.device.as_deref()
    }

    /// What the disk's length is to be a multiple of, as long as this is there.
    pub(crate) fn block_bytes(&self) -> Option<u32> {
        self.block_bytes
    }

    /// Where it is for a virtual machine.
    pub(crate) fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// What it is on this host.
    pub fn host(&self) -> Option<&Host> {
        self.host.as_ref()
    }

    /// Lets nobody in any more, and has requests in flight end.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        self.opening.take();
        self.kept.take();
        self.server.close();
    }

    /// The same at the end of this process: a device that is in use is left to the next one, if it
    /// can be.
    pub fn leave(&self) {
        let is_used = |device: &Path| !Users::of(device).with_processes().is_empty();
        if self.device().is_some_and(is_used) {
            self.closed.set(true);
            self.server.leave();
        } else {
            self.close();
        }
    }

    /// Waits until the last client has gone, and with it all that it asked for.
    pub async fn until_unused(&self) {
        self.server.wait_while(Box::new(|| self.server.connections() > 0)).await;
    }

    /// The same, where nobody else is let in, and then until it has ended.
    pub async fn stop(&self) {
        if !self.closed.get() {
            self.close();
        }
        self.until_unused().await;
        let serving = self.serving.take();
        if let Some(serving) = serving {
            if self.device.is_some() {
                // It has the device's end to see to.
                serving.await;
            } else {
                serving.cancel().await;
            }
        }
    }
}

/// The door of a virtual machine, as another daemon takes it over.
pub(crate) struct Machine {
    pub(crate) server: Arc<export::vhost_user_blk::VhostUserServer>,
    /// Where it listens, if it does, as it was asked for.
    pub(crate) listening: Option<(String, Listening)>,
}

impl Machine {
    /// Where it listens, if that has a path.
    pub(crate) fn path(&self) -> Option<PathBuf> {
        let (_, (socket, _)) = self.listening.as_ref()?;
        let socket = UnixListener::from(socket.as_fd().try_clone_to_owned().ok()?);
        Some(socket.local_addr().ok()?.as_pathname()?.to_owned())
    }
}

/// A device or a file of this host, as another daemon takes it over.
#[derive(Clone)]
pub enum Host {
    /// A ublk device.
    Ublk(Arc<export::ublk::UblkServer>),
    /// An NBD device of the kernel.
    NbdDevice(Arc<export::nbd::kernel_client::NbdDeviceServer>),
    /// A file over FUSE.
    Fuse(Arc<export::fuse::FuseExportServer>),
}

impl Host {
    /// Has what was begun end, and nothing more begin. Returns false if that takes longer.
    pub(crate) async fn come_to_rest(&self, patience: Duration) -> bool {
        match self {
            Self::Ublk(server) => server.quiesce(patience).await,
            Self::NbdDevice(server) => server.quiesce(patience).await,
            Self::Fuse(server) => server.quiesce(patience).await,
        }
    }

    /// Goes on as if nothing had been.
    pub(crate) fn go_on(&self) {
        match self {
            Self::Ublk(server) => server.resume(),
            Self::NbdDevice(server) => server.resume(),
            Self::Fuse(server) => server.resume(),
        }
    }
}

/// What a device is known by when this process comes back for it: its data. What lies in memory
/// does not come back, and is like nothing else.
fn identity(running: &RunningDisk) -> anyhow::Result<String> {
    Ok(match running.config.image.path() {
        Some(path) => format!("weir:{}", std::path::absolute(path)?.display()),
        None => format!("weir:{}:{}", std::process::id(), running.disk.name()),
    })
}

/// Whoever is behind a door counts in blocks, and would never see what lies behind the last whole
/// one.
pub fn check_size(disk: &Disk, door: &ExportTarget) -> anyhow::Result<()> {
    let Some((block_bytes, who)) = door.logical_block() else { return Ok(()) };
    let (size, block) = (disk.size_bytes(), u64::from(block_bytes));
    let (whole, rest) = (size.next_multiple_of(block), size % block);
    ensure!(
        rest == 0,
        "disk {}: has {size} bytes, which is no multiple of {block}, and {who} would not see the last {rest} (make that {whole}: `weir image resize`, or size= where it is a part of its image)",
        disk.name()
    );
    Ok(())
}
