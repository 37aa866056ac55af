//! A block device of the kernel's NBD client, served by this process over pairs of sockets.
//!
//! ```text
//!   /dev/nbdN ── kernel's client ══ pair of sockets ══ Connection, on one of the workers
//!                     ▲
//!   Server ── control ┘  connect; new sockets for those that end; another length; disconnect
//! ```
//!
//! There is no handshake: what it would agree on, the kernel is told with the sockets. If this
//! process dies, the device and its requests wait for so long as it was told, and whoever comes
//! with the same identity takes it over. A process that lives can be taken over from too: our ends
//! of the sockets go to the other ([`Rested`]), and the kernel sees nothing of it.
//!
//! Never lets go of a device that others have open by itself: who closes it has looked.

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
use policy::{access::Access, time::Duration};
use reactor::{Worker, op::Fd};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

use self::control::{Control, Device};
use super::{
    connection::{Connection, End},
    context::MetaContexts,
    inbox::Inbox,
    live, proto,
    rest::{self, Rest, Stage},
    session::{ReplyStyle, Session},
    stop::StopSignal,
    stream::Stream,
};
use crate::race::{First, first};

/// Between a connection's end and the attempt to replace it: at first, and at most.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A disk to be a device of this host.
#[derive(Clone, Debug)]
pub struct Export {
    /// What the log calls it.
    pub id: Arc<str>,
    /// The disk, whose length is a multiple of `block_bytes`.
    pub disk: Arc<Disk>,
    /// What the kernel's requests are multiples of: a power of two from 512 bytes to a page.
    pub block_bytes: u32,
    /// Refuse to write, whatever the disk allows.
    pub read_only: bool,
    /// The `N` of `/dev/nbdN`; `None`: the first that is free.
    pub number: Option<u32>,
    /// Pairs of sockets, at least one.
    pub connections: u16,
    /// How long the kernel waits for an answer before it gives a connection up, and before it asks
    /// again what it asked over one that ended. 0: 30 s, but that an only one is never given up
    /// (`nbd_set_cmd_timeout`, `nbd_xmit_timeout`).
    pub timeout_s: u32,
    /// How long requests wait for this process to come back.
    pub dead_timeout_s: u32,
    /// What the device is known by when this process comes back: the same for the same data, and
    /// never the same for others.
    pub identity: String,
}

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no NBD client.
    #[error(
        "this kernel has no NBD client (load it with `modprobe nbd`; where there is no such module, the kernel lacks CONFIG_BLK_DEV_NBD)"
    )]
    NoDriver,
    /// The caller may not.
    #[error(
        "no permission to make a block device of the kernel's NBD client (be root, or have CAP_SYS_ADMIN)"
    )]
    NotPermitted,
    /// Somebody else has the device.
    #[error("/dev/nbd{0} is in use by another server (name another device, or auto for one that is free)")]
    Busy(u32),
    /// Anything else.
    #[error("the kernel's NBD client: {0}")]
    Kernel(#[from] io::Error),
}

/// Takes the device of this number away, whoever serves it; what it has not written is lost. One
/// that nobody serves is no error.
///
/// # Errors
/// As for making one.
pub fn disconnect(number: u32) -> Result<(), Error> {
    let gone = || -> io::Result<()> {
        let control = Control::open()?;
        if control.is_connected(number)? { control.disconnect(number) } else { Ok(()) }
    };
    gone().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => Error::NoDriver,
        _ => Error::of(error, Some(number)),
    })
}

impl Error {
    fn of(error: io::Error, number: Option<u32>) -> Self {
        match (error.raw_os_error(), number) {
            (Some(libc::EPERM | libc::EACCES), _) => Self::NotPermitted,
            (Some(libc::EBUSY), Some(number)) => Self::Busy(number),
            _ => Self::Kernel(error),
        }
    }
}

/// A device at rest: what another process goes on with.
#[derive(Debug)]
pub struct Rested {
    /// The `N` of `/dev/nbdN`.
    pub number: u32,
    /// All that it is served over.
    pub connections: Vec<RestedConnection>,
}

/// One of its connections, between two requests.
#[derive(Clone, Debug)]
pub struct RestedConnection {
    /// Our end of a pair. Nobody receives or sends there.
    pub socket: Fd,
    /// Received, from the beginning of a request on.
    pub bytes: Vec<u8>,
    /// So many bytes are dropped before what comes behind `bytes`, which are none then.
    pub skip: u64,
}

impl From<OwnedFd> for RestedConnection {
    /// A new one.
    fn from(socket: OwnedFd) -> Self {
        Self { socket: socket.into(), bytes: Vec::new(), skip: 0 }
    }
}

/// What became of a device so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Pairs of sockets at work.
    pub sockets: usize,
    /// Connections that were replaced because they had ended.
    pub replaced: u64,
}

/// How a server is to end.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Course {
    Serve,
    /// The device goes.
    Close,
    /// The device stays for who comes next.
    Leave,
}

/// A device at work.
#[derive(Debug)]
pub struct Server {
    id: Arc<str>,
    disk: Arc<Disk>,
    session: Session,
    control: Arc<Control>,
    device: Arc<Device>,
    number: u32,
    /// Our ends, until they are served.
    sockets: Mutex<Vec<RestedConnection>>,
    rest: Arc<Rest>,
    /// Connections that are served, or being replaced.
    attended: AtomicUsize,
    live: Mutex<Vec<(Fd, Arc<StopSignal>)>>,
    /// The device is there, and ours.
    there: AtomicBool,
    course: AtomicU8,
    resizes: AtomicUsize,
    replaced: AtomicU64,
    /// Any of these has changed.
    changed: Event,
}

impl Server {
    /// Makes the device, or takes over the one of the same identity. Requests wait until it is
    /// served. It goes when the server is dropped before that.
    ///
    /// # Errors
    /// [`Error`]; then there is no device.
    pub async fn connect(export: Export) -> Result<Arc<Self>, Error> {
        live::look_at_size(&export.disk).await;
        let (wanted, connections) = (Arc::new(device(&export)), export.connections);
        let made = {
            let wanted = Arc::clone(&wanted);
            // The kernel makes the device while the call lasts.
            reactor::blocking(move || make(&wanted, connections)).await
        };
        let (control, number, sockets) = made?;
        let sockets = sockets.into_iter().map(Into::into).collect();
        Ok(Self::new(&export, wanted, control, Rested { number, connections: sockets }, true))
    }

    /// Goes on with a device that another process serves, once that has given it up: nothing
    /// happens to it before [`Server::serve`].
    ///
    /// # Errors
    /// [`Error`].
    pub fn adopt(export: &Export, rested: Rested) -> Result<Arc<Self>, Error> {
        let control = Control::open().map_err(|error| Error::of(error, None))?;
        Ok(Self::new(export, Arc::new(device(export)), control, rested, false))
    }

    fn new(
        export: &Export,
        device: Arc<Device>,
        control: Control,
        rested: Rested,
        is_there: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            id: Arc::clone(&export.id),
            disk: Arc::clone(&export.disk),
            session: session(device.flags),
            control: Arc::new(control),
            device,
            number: rested.number,
            sockets: Mutex::new(rested.connections),
            rest: Arc::default(),
            attended: AtomicUsize::new(0),
            live: Mutex::default(),
            there: AtomicBool::new(is_there),
            course: AtomicU8::new(Course::Serve as u8),
            resizes: AtomicUsize::new(0),
            replaced: AtomicU64::new(0),
            changed: Event::new(),
        })
    }

    /// The device's node.
    pub fn path(&self) -> String {
        format!("/dev/nbd{}", self.number)
    }

    /// Serves the device, each pair of sockets on one of the workers, until [`Server::close`] or
    /// [`Server::leave`], or until somebody else lets the device go.
    ///
    /// # Errors
    /// The kernel does not let it go; then nobody serves it any more.
    pub async fn serve(self: Arc<Self>, workers: Rc<Vec<Worker>>) -> io::Result<()> {
        let (ended, all_ended) = async_channel::bounded::<()>(1);
        self.there.store(true, SeqCst);
        let sockets = std::mem::take(&mut *lock(&self.sockets));
        for (turn, socket) in sockets.into_iter().enumerate() {
            let (server, ended) = (Arc::clone(&self), ended.clone());
            self.attended.fetch_add(1, SeqCst);
            workers[turn % workers.len()].spawn(move || async move {
                // What the kernel writes to get memory must not wait for memory. Only root may.
                let _ = reactor::serves_writeback();
                server.attend(socket, turn as u64).await;
                server.attended.fetch_sub(1, SeqCst);
                server.changed.notify(usize::MAX);
                drop(ended);
            });
        }
        drop(ended);
        let result = self.until_over(&all_ended).await;
        let _ = all_ended.recv().await;
        self.there.store(false, SeqCst);
        self.changed.notify(usize::MAX);
        result
    }

    /// Until every connection has ended, or all are told to.
    async fn until_over(&self, all_ended: &async_channel::Receiver<()>) -> io::Result<()> {
        let mut resizes = 0;
        loop {
            let changed = self.changed.listen();
            if self.is_on(Course::Close) {
                let (control, number) = (Arc::clone(&self.control), self.number);
                let gone = reactor::blocking(move || control.disconnect(number)).await;
                if gone.is_err() {
                    self.hang_up();
                }
                return gone;
            }
            if self.is_on(Course::Leave) {
                self.hang_up();
                return Ok(());
            }
            let wanted = self.resizes.load(SeqCst);
            if wanted != resizes {
                resizes = wanted;
                self.resize().await;
            }
            if let First::One(_) = first(all_ended.recv(), changed).await {
                return Ok(());
            }
        }
    }

    /// One while the device is there.
    pub fn connections(&self) -> usize {
        self.there.load(SeqCst).into()
    }

    /// Whether there has ever been a device: always.
    pub fn has_served(&self) -> bool {
        true
    }

    /// What became of it so far.
    pub fn statistics(&self) -> Statistics {
        Statistics { sockets: lock(&self.live).len(), replaced: self.replaced.load(SeqCst) }
    }

    /// The disk may have another length: the kernel is told.
    pub fn look_at_size(&self) {
        self.resizes.fetch_add(1, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Lets the device go, whoever has it open: what they still ask for fails.
    pub fn close(&self) {
        self.set_out(Course::Close);
    }

    /// Ends without letting the device go: it waits for who comes next, and its requests with it.
    pub fn leave(&self) {
        self.set_out(Course::Leave);
    }

    /// Waits until `busy` is false: it is asked now, and whenever something has changed.
    pub async fn wait_while(&self, busy: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed.listen();
            if !busy(self) {
                return;
            }
            changed.await;
        }
    }

    /// Has every connection come to rest: what it has in flight is finished and answered, what
    /// waits for limits is put back. Returns false if that takes longer than `patience`.
    pub async fn come_to_rest(&self, patience: Duration) -> bool {
        self.rest.set(Stage::Still);
        reactor::timeout(patience, async {
            loop {
                let (changed, rest) = (self.changed.listen(), self.rest.listen_to_progress());
                if self.rest.rested().len() == self.attended.load(SeqCst) {
                    return;
                }
                first(changed, rest).await;
            }
        })
        .await
        .is_ok()
    }

    /// What another process goes on with, once it has come to rest.
    pub fn rested(&self) -> Rested {
        let rested = self.rest.rested().values().flatten().cloned().collect::<Vec<_>>();
        let connection = |rest::Rested { socket, bytes, skip, .. }| RestedConnection { socket, bytes, skip };
        Rested { number: self.number, connections: rested.into_iter().map(connection).collect() }
    }

    /// Goes on after [`Server::come_to_rest`] as if nothing had been.
    pub fn go_on(&self) {
        self.rest.set(Stage::Open);
    }

    /// The first that is asked for.
    fn set_out(&self, course: Course) {
        // Who is at rest has its part to finish.
        self.rest.set(Stage::Open);
        let _ = self.course.compare_exchange(Course::Serve as u8, course as u8, SeqCst, SeqCst);
        self.changed.notify(usize::MAX);
    }

    fn is_on(&self, course: Course) -> bool {
        self.course.load(SeqCst) == course as u8
    }

    /// As if the process had ended, but that what is in flight is answered.
    fn hang_up(&self) {
        for (socket, stop) in &*lock(&self.live) {
            stop.raise();
            // Fails where the kernel has closed already.
            let _ = shutdown(socket, Shutdown::Read);
        }
    }

    async fn resize(&self) {
        let (size_bytes, block_bytes) = (self.disk.size_bytes(), self.device.block_bytes);
        let (control, device, number) = (Arc::clone(&self.control), Arc::clone(&self.device), self.number);
        if !size_bytes.is_multiple_of(block_bytes.into()) {
            tracing::warn!(export = %self.id, size_bytes, "the device keeps its length: the disk's is no multiple of {block_bytes}");
            return;
        }
        let resized = reactor::blocking(move || control.resize(number, &device, size_bytes)).await;
        if let Err(error) = resized {
            tracing::warn!(export = %self.id, %error, "the device keeps its length");
        }
    }

    /// Serves one connection, and those that replace it, until the device has gone.
    async fn attend(&self, mut connection: RestedConnection, number: u64) {
        loop {
            match self.converse(connection, number).await {
                // The kernel took its leave, which is of the device, or has been hung up on.
                Ok(End::Orderly | End::Resting) => return,
                Ok(End::Vanished) => {
                    tracing::debug!(export = %self.id, "the kernel closed a connection");
                }
                Err(error) => tracing::warn!(export = %self.id, %error, "a connection to the kernel ended"),
            }
            let Some(next) = self.replace().await else { return };
            connection = next.into();
            self.replaced.fetch_add(1, SeqCst);
        }
    }

    async fn converse(
        &self,
        connection: RestedConnection,
        number: u64,
    ) -> Result<End, super::connection::Broken> {
        let RestedConnection { socket, bytes, skip } = connection;
        let stop = Arc::<StopSignal>::default();
        lock(&self.live).push((socket.clone(), Arc::clone(&stop)));
        // Told to between the two, it would otherwise not hear.
        if self.is_on(Course::Leave) {
            self.hang_up();
        }
        let stream = Stream::Plain(socket);
        let disk = Arc::clone(&self.disk);
        let connection = Connection::new(stream, disk, Arc::default(), self.session, Arc::clone(&stop));
        let inbox = Inbox::holding(&bytes, usize::try_from(skip).unwrap_or(usize::MAX));
        drop(bytes);
        let ended = connection.of_server(&self.rest, number).serve(inbox).await;
        lock(&self.live).retain(|(_, other)| !Arc::ptr_eq(other, &stop));
        ended
    }

    /// The socket of a new connection; `None` where there is to be none.
    async fn replace(&self) -> Option<OwnedFd> {
        let mut pause = PAUSE;
        loop {
            let changed = self.changed.listen();
            if !self.is_on(Course::Serve) {
                return None;
            }
            let _ = reactor::timeout(pause, changed).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            let (control, device, number) =
                (Arc::clone(&self.control), Arc::clone(&self.device), self.number);
            let replaced = reactor::blocking(move || {
                let (ours, kernels) = pairs(1)?;
                control.reconnect(number, &device, &kernels).map(|()| ours)
            });
            match replaced.await {
                Ok(ours) => return ours.into_iter().next(),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return None,
                Err(error) => tracing::warn!(export = %self.id, %error, "a connection cannot be replaced"),
            }
        }
    }
}

impl Drop for Server {
    /// A device that nobody has served stays in nobody's way.
    fn drop(&mut self) {
        if self.there.load(SeqCst) && !self.is_on(Course::Leave) {
            let _ = self.control.disconnect(self.number);
        }
    }
}

/// What the kernel is told of an export.
fn device(export: &Export) -> Device {
    let offered = live::Export {
        name: Arc::clone(&export.id),
        description: Arc::from(""),
        disk: Arc::clone(&export.disk),
        read_only: export.read_only,
        bitmaps: Arc::default(),
        access: Access::default(),
    };
    let offered = offered.info();
    Device {
        number: export.number,
        size_bytes: offered.size_bytes,
        block_bytes: export.block_bytes,
        flags: offered.features.flags(ReplyStyle::Simple, false),
        timeout_s: export.timeout_s,
        dead_timeout_s: export.dead_timeout_s,
        backend: export.identity.clone(),
    }
}

/// What a handshake would have agreed on.
fn session(flags: u16) -> Session {
    Session {
        export: 0,
        style: ReplyStyle::Simple,
        flags,
        contexts: MetaContexts::NONE,
        sizes_acknowledged: false,
        minimum_block: 1,
        maximum_payload: proto::DEFAULT_MAX_PAYLOAD,
    }
}

fn make(device: &Device, connections: u16) -> Result<(Control, u32, Vec<OwnedFd>), Error> {
    let control = Control::open().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT) => Error::NoDriver,
        _ => Error::of(error, None),
    })?;
    let (ours, kernels) = pairs(connections)?;
    let left_behind = control::left_behind(device.number, &device.backend);
    if let Some(number) = left_behind
        && control.is_connected(number).map_err(|error| Error::of(error, Some(number)))?
    {
        tracing::info!(device = number, "taking over the device that an earlier weir left");
        if control::block_bytes(number).is_some_and(|bytes| bytes != u64::from(device.block_bytes)) {
            tracing::warn!(device = number, "the size of its blocks is as it was made");
        }
        let taken = control.reconnect(number, device, &kernels).and_then(|()| {
            match control::size_bytes(number) == Some(device.size_bytes) {
                true => Ok(()),
                false => control.resize(number, device, device.size_bytes),
            }
        });
        taken.map_err(|error| Error::of(error, Some(number)))?;
        return Ok((control, number, ours));
    }
    let number = control.connect(device, &kernels).map_err(|error| Error::of(error, device.number))?;
    Ok((control, number, ours))
}

/// Our ends, and the kernel's.
fn pairs(count: u16) -> io::Result<(Vec<OwnedFd>, Vec<OwnedFd>)> {
    let pair = |_| socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
    let pairs = (0..count).map(pair).collect::<Result<Vec<_>, _>>()?;
    Ok(pairs.into_iter().unzip())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
