//! A block device of the kernel's NBD client, served by this process over socket pairs.
//!
//! ```text
//!   /dev/nbdN ── kernel's client ══ pair of sockets ══ NbdConnection, on one of the workers
//!                      ▲
//!   NbdDeviceServer ───┘  connect; replace closed sockets; resize; disconnect
//! ```
//!
//! There is no handshake: the kernel receives the parameters together with the sockets. If this
//! process dies, the kernel keeps the device and its requests for the dead-connection timeout, and
//! a process with the same identity takes the device over. In an upgrade, the old process passes
//! its ends of the sockets to the new one ([`QuiescedNbdDevice`]), which the kernel does not
//! notice.
//!
//! Never removes a device by itself because others have it open: the caller that closes the server
//! checks for openers first.

mod control;
mod netlink;

use std::{
    io,
    os::fd::OwnedFd,
    rc::Rc,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
};

use block::disk::Disk;
use event_listener::Event;
use policy::{access::AccessRules, time::Duration};
use reactor::{
    ReactorWorker,
    operation::Fd,
    select::{FirstReady, first},
};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

use self::control::{NbdDeviceParameters, NbdNetlinkControl};
use super::{
    connection::{NbdConnection, NbdConnectionEnd},
    context::MetaContexts,
    exports, proto,
    quiesce::{self, ConnectionQuiesce, QuiesceStage},
    receive_buffer::ReceiveBuffer,
    session::{NbdSession, ReplyStyle},
    stop_signal::StopSignal,
    stream::NbdStream,
};

/// Pause between the end of a connection and the attempt to replace it: the first, and the longest.
const PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// A disk to be served as a block device of this host.
#[derive(Clone, Debug)]
pub struct NbdDeviceExport {
    /// Name in the log.
    pub id: Arc<str>,
    /// The disk; its length is a multiple of `block_bytes`.
    pub disk: Arc<Disk>,
    /// Logical block size: a power of two from 512 bytes to a page.
    pub block_bytes: u32,
    /// Reject writes even if the disk is writable.
    pub read_only: bool,
    /// The `N` of `/dev/nbdN`; `None` selects the first free device.
    pub number: Option<u32>,
    /// Number of socket pairs, at least one.
    pub connections: u16,
    /// Time after which the kernel gives up a connection that does not answer, and after which it
    /// resends the requests of a closed one. 0 means 30 s, and that a single connection is never
    /// given up (`nbd_set_cmd_timeout`, `nbd_xmit_timeout`).
    pub timeout_s: u32,
    /// Time for which requests wait for this process to return.
    pub dead_timeout_s: u32,
    /// Identity by which a restarted process finds the device: equal for the same data, and
    /// different for different data.
    pub identity: String,
}

/// Failure to create, take over or remove a device.
#[derive(Debug, thiserror::Error)]
pub enum NbdDeviceError {
    /// The kernel has no NBD client.
    #[error(
        "this kernel has no NBD client (load it with `modprobe nbd`; where there is no such \
         module, the kernel lacks CONFIG_BLK_DEV_NBD)"
    )]
    NoDriver,
    /// The caller lacks the capability.
    #[error(
        "no permission to create a block device of the kernel's NBD client (run as root, or with \
         CAP_SYS_ADMIN)"
    )]
    NotPermitted,
    /// Another server uses the device.
    #[error("/dev/nbd{0} is in use by another server (name another device, or auto for one that is free)")]
    Busy(u32),
    /// Any other error of the kernel.
    #[error("the kernel's NBD client: {0}")]
    Kernel(#[from] io::Error),
}

/// Disconnects the device of this number from any server; unwritten data is lost. A device without
/// a server is no error.
///
/// # Errors
/// As for [`NbdDeviceServer::connect`].
pub fn disconnect(number: u32) -> Result<(), NbdDeviceError> {
    let try_disconnect = || -> io::Result<()> {
        let control = NbdNetlinkControl::open()?;
        if control.is_connected(number)? { control.disconnect(number) } else { Ok(()) }
    };
    try_disconnect().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => NbdDeviceError::NoDriver,
        _ => NbdDeviceError::of(error, Some(number)),
    })
}

impl NbdDeviceError {
    fn of(error: io::Error, number: Option<u32>) -> Self {
        match (error.raw_os_error(), number) {
            (Some(libc::EPERM | libc::EACCES), _) => Self::NotPermitted,
            (Some(libc::EBUSY), Some(number)) => Self::Busy(number),
            _ => Self::Kernel(error),
        }
    }
}

/// State of a quiesced device, for the new process of an upgrade.
#[derive(Debug)]
pub struct QuiescedNbdDevice {
    /// The `N` of `/dev/nbdN`.
    pub number: u32,
    /// All connections of the device.
    pub connections: Vec<QuiescedNbdSocket>,
}

/// State of one connection, between two requests.
#[derive(Clone, Debug)]
pub struct QuiescedNbdSocket {
    /// This process's end of a socket pair. No task receives or sends on it.
    pub socket: Fd,
    /// Received bytes, from the beginning of a request.
    pub bytes: Vec<u8>,
    /// Number of bytes to drop from the socket; if above zero, `bytes` is empty.
    pub skip: u64,
}

impl From<OwnedFd> for QuiescedNbdSocket {
    /// State of a new connection.
    fn from(socket: OwnedFd) -> Self {
        Self { socket: socket.into(), bytes: Vec::new(), skip: 0 }
    }
}

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NbdDeviceStatistics {
    /// Socket pairs that are being served.
    pub sockets: usize,
    /// Connections that were replaced because they had ended.
    pub replaced: u64,
}

/// Requested shutdown of the server.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum NbdDeviceShutdown {
    Serve,
    /// Disconnect the device.
    Close,
    /// Keep the device for the next process.
    Leave,
}

/// A device that is being served.
#[derive(Debug)]
pub struct NbdDeviceServer {
    id: Arc<str>,
    disk: Arc<Disk>,
    session: NbdSession,
    control: Arc<NbdNetlinkControl>,
    device: Arc<NbdDeviceParameters>,
    number: u32,
    /// This process's ends of the socket pairs, until they are served.
    sockets: Mutex<Vec<QuiescedNbdSocket>>,
    quiesce_state: Arc<ConnectionQuiesce>,
    /// Connections that are served or being replaced.
    served_connections: AtomicUsize,
    live: Mutex<Vec<(Fd, Arc<StopSignal>)>>,
    /// True if the device exists and is served by this server.
    is_connected: AtomicBool,
    shutdown: AtomicU8,
    resizes: AtomicUsize,
    replaced: AtomicU64,
    /// Notified on every change of the fields above.
    changed: Event,
}

impl NbdDeviceServer {
    /// Creates the device, or takes over the one with the same identity. Its requests wait until
    /// [`NbdDeviceServer::serve`]. Dropping the server before that disconnects the device.
    ///
    /// # Errors
    /// [`NbdDeviceError`]; then no device was created.
    pub async fn connect(export: NbdDeviceExport) -> Result<Arc<Self>, NbdDeviceError> {
        exports::refresh_size(&export.disk).await;
        let (parameters, connections) = (Arc::new(device(&export)), export.connections);
        let created = {
            let parameters = Arc::clone(&parameters);
            // The netlink call returns after the kernel has created the device.
            reactor::run_blocking(move || create_or_take_over(&parameters, connections)).await
        };
        let (control, number, sockets) = created?;
        let sockets = sockets.into_iter().map(Into::into).collect();
        Ok(Self::new(&export, parameters, control, QuiescedNbdDevice { number, connections: sockets }, true))
    }

    /// Continues with a device of another process after that has quiesced it. The device is not
    /// touched before [`NbdDeviceServer::serve`].
    ///
    /// # Errors
    /// [`NbdDeviceError`].
    pub fn adopt(export: &NbdDeviceExport, quiesced: QuiescedNbdDevice) -> Result<Arc<Self>, NbdDeviceError> {
        let control = NbdNetlinkControl::open().map_err(|error| NbdDeviceError::of(error, None))?;
        Ok(Self::new(export, Arc::new(device(export)), control, quiesced, false))
    }

    fn new(
        export: &NbdDeviceExport,
        device: Arc<NbdDeviceParameters>,
        control: NbdNetlinkControl,
        quiesced: QuiescedNbdDevice,
        is_there: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: Arc::clone(&export.id),
            disk: Arc::clone(&export.disk),
            session: session(device.flags),
            control: Arc::new(control),
            device,
            number: quiesced.number,
            sockets: Mutex::new(quiesced.connections),
            quiesce_state: Arc::default(),
            served_connections: AtomicUsize::new(0),
            live: Mutex::default(),
            is_connected: AtomicBool::new(is_there),
            shutdown: AtomicU8::new(NbdDeviceShutdown::Serve as u8),
            resizes: AtomicUsize::new(0),
            replaced: AtomicU64::new(0),
            changed: Event::new(),
        })
    }

    /// Path of the device node.
    pub fn path(&self) -> String {
        format!("/dev/nbd{}", self.number)
    }

    /// Serves the device, each socket pair on one of the workers, until [`NbdDeviceServer::close`]
    /// or [`NbdDeviceServer::leave`], or until another process disconnects the device.
    ///
    /// # Errors
    /// Fails if the kernel does not disconnect the device; it is no longer served.
    pub async fn serve(self: Arc<Self>, workers: Rc<Vec<ReactorWorker>>) -> io::Result<()> {
        let (alive, all_ended) = async_channel::bounded::<()>(1);
        self.is_connected.store(true, SeqCst);
        let sockets = std::mem::take(&mut *lock(&self.sockets));
        for (index, socket) in sockets.into_iter().enumerate() {
            let (server, alive) = (Arc::clone(&self), alive.clone());
            self.served_connections.fetch_add(1, SeqCst);
            // Connections are distributed over the workers; the kernel distributes requests by CPU.
            workers[index % workers.len()].spawn(move || async move {
                // Writeback to this device must not wait for memory that only writeback can free.
                // Needs root; without it, serving works as before.
                let _ = reactor::set_io_flusher();
                server.serve_and_replace(socket, index as u64).await;
                server.served_connections.fetch_sub(1, SeqCst);
                server.changed.notify(usize::MAX);
                drop(alive);
            });
        }
        drop(alive);
        let result = self.until_all_ended(&all_ended).await;
        let _ = all_ended.recv().await;
        self.is_connected.store(false, SeqCst);
        self.changed.notify(usize::MAX);
        result
    }

    /// Returns when every connection has ended or was ended by `close` or `leave`.
    async fn until_all_ended(&self, all_ended: &async_channel::Receiver<()>) -> io::Result<()> {
        let mut resizes = 0;
        loop {
            let changed = self.changed.listen();
            if self.is_shutting_down(NbdDeviceShutdown::Close) {
                let (control, number) = (Arc::clone(&self.control), self.number);
                let result = reactor::run_blocking(move || control.disconnect(number)).await;
                if result.is_err() {
                    self.shut_down_connections();
                }
                return result;
            }
            if self.is_shutting_down(NbdDeviceShutdown::Leave) {
                self.shut_down_connections();
                return Ok(());
            }
            let requested = self.resizes.load(SeqCst);
            if requested != resizes {
                resizes = requested;
                self.resize().await;
            }
            if let FirstReady::One(_) = first(all_ended.recv(), changed).await {
                return Ok(());
            }
        }
    }

    /// 1 while the device exists, otherwise 0.
    pub fn connections(&self) -> usize {
        self.is_connected.load(SeqCst).into()
    }

    /// Always true: the device was there from the start.
    pub fn has_served(&self) -> bool {
        true
    }

    /// Current counters.
    pub fn statistics(&self) -> NbdDeviceStatistics {
        NbdDeviceStatistics { sockets: lock(&self.live).len(), replaced: self.replaced.load(SeqCst) }
    }

    /// Reports the disk's length to the kernel if it has changed.
    pub fn refresh_size(&self) {
        // A counter instead of a flag: a change during a resize starts another one.
        self.resizes.fetch_add(1, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Disconnects the device, even if processes have it open: their requests fail.
    pub fn close(&self) {
        self.begin_shutdown(NbdDeviceShutdown::Close);
    }

    /// Ends without disconnecting the device: its requests wait for the next process.
    pub fn leave(&self) {
        self.begin_shutdown(NbdDeviceShutdown::Leave);
    }

    /// Waits until `busy` is false; `busy` is evaluated now and after every change.
    pub async fn wait_while(&self, busy: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed.listen();
            if !busy(self) {
                return;
            }
            changed.await;
        }
    }

    /// Quiesces every connection: requests in flight are completed and answered, requests that wait
    /// for limits are kept without being started. Returns false after the timeout.
    pub async fn quiesce(&self, timeout: Duration) -> bool {
        self.quiesce_state.set(QuiesceStage::Quiescing);
        reactor::timeout(timeout, async {
            loop {
                let (changed, progress) = (self.changed.listen(), self.quiesce_state.listen_to_progress());
                if self.quiesce_state.lock_quiesced_states().len() == self.served_connections.load(SeqCst) {
                    return;
                }
                first(changed, progress).await;
            }
        })
        .await
        .is_ok()
    }

    /// State for the new process; complete after [`NbdDeviceServer::quiesce`].
    pub fn quiesced_state(&self) -> QuiescedNbdDevice {
        let states =
            self.quiesce_state.lock_quiesced_states().values().flatten().cloned().collect::<Vec<_>>();
        let connection = |quiesce::QuiescedNbdConnection { socket, bytes, skip, .. }| QuiescedNbdSocket {
            socket,
            bytes,
            skip,
        };
        QuiescedNbdDevice { number: self.number, connections: states.into_iter().map(connection).collect() }
    }

    /// Resumes all connections after [`NbdDeviceServer::quiesce`].
    pub fn resume(&self) {
        self.quiesce_state.set(QuiesceStage::Open);
    }

    /// Sets how the server ends; the first call decides.
    fn begin_shutdown(&self, shutdown: NbdDeviceShutdown) {
        // Quiesced connections must run to end.
        self.quiesce_state.set(QuiesceStage::Open);
        // A `leave` after a `close` must not keep a device that is being disconnected.
        let _ =
            self.shutdown.compare_exchange(NbdDeviceShutdown::Serve as u8, shutdown as u8, SeqCst, SeqCst);
        self.changed.notify(usize::MAX);
    }

    fn is_shutting_down(&self, shutdown: NbdDeviceShutdown) -> bool {
        self.shutdown.load(SeqCst) == shutdown as u8
    }

    /// Ends all connections as the death of the process would, except that requests in flight are
    /// answered.
    fn shut_down_connections(&self) {
        for (socket, stop) in &*lock(&self.live) {
            stop.raise();
            // Fails if the kernel has already closed its end.
            let _ = shutdown(socket, Shutdown::Read);
        }
    }

    async fn resize(&self) {
        let (size_bytes, block_bytes) = (self.disk.size_bytes(), self.device.block_bytes);
        let (control, device, number) = (Arc::clone(&self.control), Arc::clone(&self.device), self.number);
        if !size_bytes.is_multiple_of(block_bytes.into()) {
            tracing::warn!(
                export = %self.id, size_bytes,
                "the device keeps its length: the disk's length is not a multiple of {block_bytes} \
                 bytes"
            );
            return;
        }
        let resized = reactor::run_blocking(move || control.resize(number, &device, size_bytes)).await;
        if let Err(error) = resized {
            tracing::warn!(export = %self.id, %error, "the device keeps its length");
        }
    }

    /// Serves one connection and its replacements until the device is disconnected.
    async fn serve_and_replace(&self, mut connection: QuiescedNbdSocket, number: u64) {
        loop {
            match self.serve_connection(connection, number).await {
                // The kernel sent DISC, which concerns the whole device, or `shut_down_connections`
                // ended the connection.
                Ok(NbdConnectionEnd::Orderly | NbdConnectionEnd::Quiesced) => return,
                Ok(NbdConnectionEnd::HardDisconnect) => {
                    tracing::debug!(export = %self.id, "the kernel closed a connection");
                }
                Err(error) => tracing::warn!(export = %self.id, %error, "a connection to the kernel ended"),
            }
            let Some(next) = self.replace().await else { return };
            connection = next.into();
            self.replaced.fetch_add(1, SeqCst);
        }
    }

    async fn serve_connection(
        &self,
        connection: QuiescedNbdSocket,
        number: u64,
    ) -> Result<NbdConnectionEnd, super::connection::NbdConnectionError> {
        let QuiescedNbdSocket { socket, bytes, skip } = connection;
        // One signal a connection: replacements start with a fresh one.
        let stop = Arc::<StopSignal>::default();
        lock(&self.live).push((socket.clone(), Arc::clone(&stop)));
        // `leave` between the check in `replace` and the registration above would be missed
        // otherwise.
        if self.is_shutting_down(NbdDeviceShutdown::Leave) {
            self.shut_down_connections();
        }
        let stream = NbdStream::Plain(socket);
        let disk = Arc::clone(&self.disk);
        let connection = NbdConnection::new(stream, disk, Arc::default(), self.session, Arc::clone(&stop));
        let inbox = ReceiveBuffer::with_content(&bytes, usize::try_from(skip).unwrap_or(usize::MAX));
        drop(bytes);
        let result = connection.with_quiesce(&self.quiesce_state, number).serve(inbox).await;
        lock(&self.live).retain(|(_, other)| !Arc::ptr_eq(other, &stop));
        result
    }

    /// Socket of a new connection; `None` if none is to be made.
    async fn replace(&self) -> Option<OwnedFd> {
        let mut pause = PAUSE;
        loop {
            // Created before the check, so that a change between check and wait is not missed.
            let changed = self.changed.listen();
            if !self.is_shutting_down(NbdDeviceShutdown::Serve) {
                return None;
            }
            let _ = reactor::timeout(pause, changed).await;
            // Backs off, because a kernel that rejects the sockets would reject them at once again.
            pause = (pause * 2).min(MAX_PAUSE);
            let (control, device, number) =
                (Arc::clone(&self.control), Arc::clone(&self.device), self.number);
            let replaced = reactor::run_blocking(move || {
                let (sockets, kernel_sockets) = pairs(1)?;
                control.reconnect(number, &device, &kernel_sockets).map(|()| sockets)
            });
            match replaced.await {
                Ok(sockets) => return sockets.into_iter().next(),
                // EINVAL: the device was disconnected, or belongs to another backend.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return None,
                Err(error) => tracing::warn!(export = %self.id, %error, "a connection cannot be replaced"),
            }
        }
    }
}

impl Drop for NbdDeviceServer {
    /// Disconnects a device that was never served or has lost its server.
    fn drop(&mut self) {
        if self.is_connected.load(SeqCst) && !self.is_shutting_down(NbdDeviceShutdown::Leave) {
            let _ = self.control.disconnect(self.number);
        }
    }
}

/// Parameters of the device for the kernel.
fn device(export: &NbdDeviceExport) -> NbdDeviceParameters {
    let offered = exports::NbdServerExport {
        name: Arc::clone(&export.id),
        description: Arc::from(""),
        disk: Arc::clone(&export.disk),
        read_only: export.read_only,
        bitmaps: Arc::default(),
        access: AccessRules::default(),
    };
    let offered = offered.info();
    NbdDeviceParameters {
        number: export.number,
        size_bytes: offered.size_bytes,
        block_bytes: export.block_bytes,
        flags: offered.features.flags(ReplyStyle::Simple, false),
        timeout_s: export.timeout_s,
        dead_timeout_s: export.dead_timeout_s,
        backend: export.identity.clone(),
    }
}

/// Session that a handshake would have negotiated; the kernel's client uses simple replies only.
fn session(flags: u16) -> NbdSession {
    NbdSession {
        export: 0,
        style: ReplyStyle::Simple,
        flags,
        contexts: MetaContexts::NONE,
        sizes_acknowledged: false,
        minimum_block: 1,
        maximum_payload: proto::DEFAULT_MAX_PAYLOAD,
    }
}

fn create_or_take_over(
    device: &NbdDeviceParameters,
    connections: u16,
) -> Result<(NbdNetlinkControl, u32, Vec<OwnedFd>), NbdDeviceError> {
    let control = NbdNetlinkControl::open().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT) => NbdDeviceError::NoDriver,
        _ => NbdDeviceError::of(error, None),
    })?;
    let (sockets, kernel_sockets) = pairs(connections)?;
    // Found by identity, not by number: another server may have taken the number meanwhile.
    let orphaned = control::find_orphaned(device.number, &device.backend);
    if let Some(number) = orphaned
        && control.is_connected(number).map_err(|error| NbdDeviceError::of(error, Some(number)))?
    {
        tracing::info!(device = number, "taking over an orphaned device");
        if control::block_bytes(number).is_some_and(|bytes| bytes != u64::from(device.block_bytes)) {
            tracing::warn!(
                device = number,
                "the device keeps its block size (it cannot change while the device exists)"
            );
        }
        // The kernel keeps the length of the earlier server, so it is corrected before requests
        // resume.
        let taken_over = control.reconnect(number, device, &kernel_sockets).and_then(|()| {
            match control::size_bytes(number) == Some(device.size_bytes) {
                true => Ok(()),
                false => control.resize(number, device, device.size_bytes),
            }
        });
        taken_over.map_err(|error| NbdDeviceError::of(error, Some(number)))?;
        return Ok((control, number, sockets));
    }
    let number =
        control.connect(device, &kernel_sockets).map_err(|error| NbdDeviceError::of(error, device.number))?;
    Ok((control, number, sockets))
}

/// Creates `count` socket pairs; returns this process's ends and the kernel's ends.
fn pairs(count: u16) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
    let pair = |_| socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let pairs = (0..count).map(pair).collect::<Result<Vec<_>, _>>()?;
    Ok(pairs.into_iter().unzip())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
