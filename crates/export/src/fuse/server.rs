//! A running export: its file system from INIT to the end, and the queues that serve it.
//!
//! ```text
//!   INIT ─► a queue on a worker ─► … ─┬─► closed: unmounted lazily, so that mapped pages are
//!                                    │           written back, then the queues are stopped
//!                                    └─► gone:   unmounted from outside, the queues have ended
//! ```
//!
//! Another process can take it over: the kernel keeps the file system while any process holds its
//! descriptor ([`QuiescedFuseFile`]).

use std::{
    io::{self, IoSlice},
    rc::Rc,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

use policy::time::Duration;
use reactor::{
    ReactorWorker,
    operation::Fd,
    select::{FirstReady, first},
};

use super::{
    channel::{FuseChannel, NoMessage},
    device::{FuseDevice, FuseExport, FuseFileState},
    message::{FuseOperation, FuseReply, FuseRequest},
    mount::{FuseMount, TransferredMount},
    negotiate::{InitOutcome, negotiate},
    queue::{FuseQueue, FuseQueueEnd},
    receive_buffer::FuseReceiveBuffer,
};

/// Number of queues of an export. With two, the kernel wakes them alternately and sequential
/// requests take twice as long; parallel ones are no faster (docs/decisions/0022).
const QUEUES: usize = 1;
/// Counter that distributes exports over workers.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Counters of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuseStatistics {
    /// Queues that serve it now.
    pub queues: usize,
    /// Open file descriptions.
    pub openers: usize,
    /// Messages received from the kernel.
    pub requests: u64,
    /// Requests in flight.
    pub in_flight: u64,
}

/// State of a quiesced file for the new process.
#[derive(Debug)]
pub struct QuiescedFuseFile {
    /// The mount and its descriptors.
    pub mount: TransferredMount,
    /// State of the file.
    pub state: FuseFileState,
}

/// One export of a disk as a file.
#[derive(Debug)]
pub struct FuseExportServer {
    device: Arc<FuseDevice>,
    queues: AtomicUsize,
    closing: AtomicBool,
    /// True if INIT was negotiated, by this process or an earlier one.
    is_initialized: AtomicBool,
    /// The mount while it is served.
    mount: Mutex<Weak<FuseMount>>,
}

impl FuseExportServer {
    /// Creates a server; requests wait until [`FuseExportServer::serve`].
    pub fn new(export: FuseExport) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::new(FuseDevice::new(export)),
            queues: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            is_initialized: AtomicBool::new(false),
            mount: Mutex::default(),
        })
    }

    /// Creates a server that continues after another process has quiesced.
    ///
    /// # Errors
    /// Fails if the requests from the old process are malformed.
    pub fn adopt(export: FuseExport, state: &FuseFileState) -> io::Result<Arc<Self>> {
        let server = Self::new(export);
        server.is_initialized.store(true, SeqCst);
        match server.device.restore(state) {
            true => Ok(server),
            false => Err(io::Error::other("the requests of the old process are malformed")),
        }
    }

    /// Quiesces every queue: started requests are answered, requests that wait for limits are put
    /// back. False after the timeout.
    pub async fn quiesce(&self, timeout: Duration) -> bool {
        self.device.set_quiescing(true);
        let is_active = |server: &Self| {
            !server.is_initialized.load(SeqCst)
                || server.device.quiesced_queue_count() < server.queues.load(SeqCst)
        };
        reactor::timeout(timeout, self.wait_while(is_active)).await.is_ok()
    }

    /// State for the new process, once quiesced; `None` if the file was unmounted from outside.
    ///
    /// # Errors
    /// Fails if no file descriptor is available.
    pub fn quiesced_state(&self) -> io::Result<Option<QuiescedFuseFile>> {
        let mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let Some(mount) = mount else { return Ok(None) };
        Ok(Some(QuiescedFuseFile { mount: mount.transfer_state()?, state: self.device.state() }))
    }

    /// Resumes after [`FuseExportServer::quiesce`].
    pub fn resume(&self) {
        self.device.set_quiescing(false);
    }

    /// Serves the file until [`FuseExportServer::close`], or until it is unmounted from outside. It
    /// is unmounted when this returns, and also when the future is dropped.
    ///
    /// # Errors
    /// Fails if the kernel's FUSE is too old, or the device fails.
    pub async fn serve(self: Arc<Self>, mount: FuseMount, workers: Rc<Vec<ReactorWorker>>) -> io::Result<()> {
        let id = Arc::clone(&self.device.export.id);
        let mount = Arc::new(mount);
        mount.take_ownership();
        *self.mount.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&mount);
        let result = self.serve_queues(&mount, &workers).await;
        // Dropping the last descriptor aborts the connection; processes with the file open get
        // errors.
        let path = mount.path().display().to_string();
        let last = Arc::into_inner(mount);
        reactor::run_blocking(move || drop(last)).await;
        self.device.forget_openers();
        match &result {
            Ok(()) if self.is_closing() => {}
            Ok(()) => tracing::info!(export = %id, path, "the file was unmounted from outside"),
            Err(error) => tracing::warn!(export = %id, path, %error, "the file cannot be served any more"),
        }
        result
    }

    /// Number of open file descriptions.
    pub fn connections(&self) -> usize {
        self.device.openers.load(SeqCst)
    }

    /// True if the file has ever been opened.
    pub fn has_served(&self) -> bool {
        self.device.was_opened.load(SeqCst)
    }

    /// Adds the number of requests of the old process.
    pub fn add_counts(&self, requests: u64) {
        self.device.requests.fetch_add(requests, Relaxed);
    }

    /// Current counters.
    pub fn statistics(&self) -> FuseStatistics {
        FuseStatistics {
            queues: self.queues.load(Relaxed),
            openers: self.connections(),
            requests: self.device.requests.load(Relaxed),
            in_flight: self.device.in_flight.load(Relaxed),
        }
    }

    /// Does nothing: the kernel caches no attributes.
    pub fn refresh_size(&self) {}

    /// Unmounts the file. Requests in flight complete, requests that wait for limits fail;
    /// [`FuseExportServer::serve`] then returns.
    pub fn close(&self) {
        self.closing.store(true, SeqCst);
        self.device.clients_changed.notify(usize::MAX);
    }

    /// Waits until `busy` is false; `busy` is evaluated now and after every change.
    pub async fn wait_while(&self, busy: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.device.clients_changed.listen();
            if !busy(self) {
                return;
            }
            changed.await;
        }
    }

    fn is_closing(&self) -> bool {
        self.closing.load(SeqCst)
    }

    async fn serve_queues(
        self: &Arc<Self>,
        mount: &Arc<FuseMount>,
        workers: &[ReactorWorker],
    ) -> io::Result<()> {
        let channel = FuseChannel::Device(mount.device().clone());
        if !self.is_initialized.load(SeqCst) {
            match first(answer_init(&channel), self.wait_while(|server| !server.is_closing())).await {
                FirstReady::One(agreed) => {
                    if !agreed? {
                        return Ok(());
                    }
                }
                FirstReady::Other(()) => return Ok(()),
            }
        }
        let (reports, queue_ends) = async_channel::unbounded();
        let first_worker = NEXT.fetch_add(1, Relaxed) % workers.len().max(1);
        for (number, worker) in workers.iter().cycle().skip(first_worker).take(QUEUES).enumerate() {
            // The first queue uses the mount's own descriptor; the new process of an upgrade
            // inherits that.
            let device = if number == 0 { Ok(mount.device().clone()) } else { mount.another_device() };
            let device = match device {
                Ok(device) => device,
                Err(error) => {
                    tracing::debug!(export = %self.device.export.id, %error, "fewer queues");
                    break;
                }
            };
            let (server, reports) = (Arc::clone(self), reports.clone());
            self.queues.fetch_add(1, Relaxed);
            worker.spawn(move || serve_queue(server, device, reports));
        }
        drop(reports);
        // Only now can the export quiesce: before INIT there is no state to transfer.
        self.is_initialized.store(true, SeqCst);
        self.device.clients_changed.notify(usize::MAX);
        let closing = async {
            self.wait_while(|server| !server.is_closing()).await;
            // Unmounted while queues still serve, so that mapped pages can be written back.
            let mount = Arc::clone(mount);
            reactor::run_blocking(move || mount.unmount()).await;
            self.device.stop();
            std::future::pending::<()>().await;
        };
        let all_ended = async {
            let mut result = Ok(());
            while let Ok(queue) = queue_ends.recv().await {
                if let FuseQueueEnd::Failed(errno) = queue {
                    result = Err(errno.into());
                }
            }
            result
        };
        match first(all_ended, closing).await {
            FirstReady::One(result) => result,
            FirstReady::Other(()) => Ok(()),
        }
    }
}

async fn serve_queue(
    server: Arc<FuseExportServer>,
    device: Fd,
    reports: async_channel::Sender<FuseQueueEnd>,
) {
    if let Err(error) = reactor::set_io_flusher() {
        // Under a loop device, writeback for memory reclaim arrives here and must not wait for
        // memory.
        tracing::debug!(
            export = %server.device.export.id, %error,
            "no writeback privilege: if memory is short, this thread may wait for its own file"
        );
    }
    let queue = FuseQueue::new(Arc::clone(&server.device), FuseChannel::Device(device));
    let end = queue.serve().await;
    server.queues.fetch_sub(1, Relaxed);
    server.device.clients_changed.notify(usize::MAX);
    let _ = reports.try_send(end);
}

/// Answers INIT; false if the file system was unmounted before INIT arrived.
pub(super) async fn answer_init(channel: &FuseChannel) -> io::Result<bool> {
    let mut receive_buffer = FuseReceiveBuffer::new();
    loop {
        channel.readable().await;
        let length = match channel.receive(&mut receive_buffer.io_slices()) {
            Ok(length) => length,
            Err(NoMessage::Yet) => continue,
            Err(NoMessage::Ever) => return Ok(false),
            Err(NoMessage::Failed(errno)) => return Err(errno.into()),
        };
        let send_reply = |reply: FuseReply| channel.reply(&[IoSlice::new(reply.as_bytes())]);
        match receive_buffer.parse(length) {
            Ok(FuseRequest { unique, operation: FuseOperation::Init(init) }) => match negotiate(&init) {
                InitOutcome::Agreed(reply) => {
                    send_reply(FuseReply::init(unique, &reply))?;
                    return Ok(true);
                }
                InitOutcome::RetryVersion(reply) => send_reply(FuseReply::init(unique, &reply))?,
                InitOutcome::TooOld => {
                    send_reply(FuseReply::error(unique, libc::EPROTO))?;
                    return Err(io::Error::other(format!(
                        "the kernel's FUSE is version {}.{} (weir needs Linux 6.1)",
                        init.major, init.minor
                    )));
                }
            },
            Ok(FuseRequest { unique, .. }) => send_reply(FuseReply::error(unique, libc::EIO))?,
            Err(_) => {}
        }
    }
}
