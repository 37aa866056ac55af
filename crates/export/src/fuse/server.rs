//! An export at work: its file system, from INIT to the end, and the queues that serve it.
//!
//! ```text
//!   INIT ─► a queue on a worker ─► … ─┬─► closed: unmounted lazily, so that what is mapped is
//!                                    │           written back, then the queues are stopped
//!                                    └─► gone:   unmounted from outside, the queues have ended
//! ```
//!
//! Another process can go on with it: the kernel's side of a file system lasts as long as somebody
//! holds its descriptor ([`Rested`]).

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
use reactor::{Worker, op::Fd};

use super::{
    channel::{Channel, NoMessage},
    device::{Device, Export, Standing},
    letter::Letter,
    message::{Operation, Reply, Request},
    mount::{Mount, Told},
    negotiate::{Answer, negotiate},
    queue::{Ended, Queue},
};
use crate::race::{First, first};

/// Queues of an export. With two the kernel wakes now one, now the other, and one request after the
/// other takes twice as long; many at a time are no faster (docs/decisions/0021).
const QUEUES: usize = 1;
/// The worker of the next export, counted on.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// What an export did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Queues that serve it now.
    pub queues: usize,
    /// How many have the file open.
    pub openers: usize,
    /// Messages of the kernel that were taken.
    pub requests: u64,
    /// Requests that are being carried out.
    pub in_flight: u64,
}

/// A file at rest: what another process goes on with.
#[derive(Debug)]
pub struct Rested {
    /// What the kernel has of it.
    pub mount: Told,
    /// What else there is.
    pub standing: Standing,
}

/// One export of a disk as a file.
#[derive(Debug)]
pub struct Server {
    device: Arc<Device>,
    queues: AtomicUsize,
    closing: AtomicBool,
    /// The kernel and a process have agreed on how they speak.
    greeted: AtomicBool,
    /// While it is served.
    mount: Mutex<Weak<Mount>>,
}

impl Server {
    /// Nobody is served before [`Server::serve`].
    pub fn new(export: Export) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::new(Device::new(export)),
            queues: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            greeted: AtomicBool::new(false),
            mount: Mutex::default(),
        })
    }

    /// One that goes on with what another process has left, once that has given it up.
    ///
    /// # Errors
    /// What that was asked is not understood.
    pub fn adopt(export: Export, standing: &Standing) -> io::Result<Arc<Self>> {
        let server = Self::new(export);
        server.greeted.store(true, SeqCst);
        match server.device.take_up(standing) {
            true => Ok(server),
            false => Err(io::Error::other("what the other was asked is not understood")),
        }
    }

    /// Has every queue come to rest: what has begun is answered, what waits for limits is put back.
    /// Returns false if that takes longer than `patience`.
    pub async fn come_to_rest(&self, patience: Duration) -> bool {
        self.device.rest(true);
        let is_moving = |server: &Self| {
            !server.greeted.load(SeqCst) || server.device.queues_at_rest() < server.queues.load(SeqCst)
        };
        reactor::timeout(patience, self.wait_while(is_moving)).await.is_ok()
    }

    /// What another process goes on with, once it has come to rest; nothing where the file was
    /// unmounted from outside.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn rested(&self) -> io::Result<Option<Rested>> {
        let mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let Some(mount) = mount else { return Ok(None) };
        Ok(Some(Rested { mount: mount.told()?, standing: self.device.standing() }))
    }

    /// Goes on after [`Server::come_to_rest`] as if nothing had been.
    pub fn go_on(&self) {
        self.device.rest(false);
    }

    /// Serves the file until [`Server::close`], or until it was unmounted from outside. It is
    /// unmounted when this returns, and also when the future is dropped.
    ///
    /// # Errors
    /// A kernel whose FUSE is too old, or a device that fails.
    pub async fn serve(self: Arc<Self>, mount: Mount, workers: Rc<Vec<Worker>>) -> io::Result<()> {
        let id = Arc::clone(&self.device.export.id);
        let mount = Arc::new(mount);
        mount.is_ours();
        *self.mount.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&mount);
        let result = self.attend(&mount, &workers).await;
        // The connection ends with its descriptors; whoever still has the file open is told so.
        let path = mount.path().display().to_string();
        let last = Arc::into_inner(mount);
        reactor::blocking(move || drop(last)).await;
        self.device.forget_openers();
        match &result {
            Ok(()) if self.is_closing() => {}
            Ok(()) => tracing::info!(export = %id, path, "the file was unmounted from outside"),
            Err(error) => tracing::warn!(export = %id, path, %error, "the file cannot be served any more"),
        }
        result
    }

    /// How many have the file open.
    pub fn connections(&self) -> usize {
        self.device.openers.load(SeqCst)
    }

    /// Whether anybody has ever opened the file.
    pub fn has_served(&self) -> bool {
        self.device.served.load(SeqCst)
    }

    /// Counts on from the requests that another process has taken.
    pub fn count_on(&self, requests: u64) {
        self.device.requests.fetch_add(requests, Relaxed);
    }

    /// What it did so far.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            queues: self.queues.load(Relaxed),
            openers: self.connections(),
            requests: self.device.requests.load(Relaxed),
            in_flight: self.device.in_flight.load(Relaxed),
        }
    }

    /// The disk may have another length. Nothing is to be done: the kernel keeps no attributes.
    pub fn look_at_size(&self) {}

    /// Unmounts the file. Requests in flight are finished, those that wait for limits fail then.
    /// [`Server::serve`] ends.
    pub fn close(&self) {
        self.closing.store(true, SeqCst);
        self.device.clients.notify(usize::MAX);
    }

    /// Waits until `busy` is false: it is asked now, and whenever something has changed.
    pub async fn wait_while(&self, busy: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.device.clients.listen();
            if !busy(self) {
                return;
            }
            changed.await;
        }
    }

    fn is_closing(&self) -> bool {
        self.closing.load(SeqCst)
    }

    async fn attend(self: &Arc<Self>, mount: &Arc<Mount>, workers: &[Worker]) -> io::Result<()> {
        let channel = Channel::Device(mount.device().clone());
        if !self.greeted.load(SeqCst) {
            match first(greet(&channel), self.wait_while(|server| !server.is_closing())).await {
                First::One(greeted) => {
                    if !greeted? {
                        return Ok(());
                    }
                }
                First::Other(()) => return Ok(()),
            }
        }
        let (reports, ended) = async_channel::unbounded();
        let turn = NEXT.fetch_add(1, Relaxed) % workers.len().max(1);
        for (number, worker) in workers.iter().cycle().skip(turn).take(QUEUES).enumerate() {
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
        self.greeted.store(true, SeqCst);
        self.device.clients.notify(usize::MAX);
        let closing = async {
            self.wait_while(|server| !server.is_closing()).await;
            // While it is served, so that what was written to mapped memory comes here.
            let mount = Arc::clone(mount);
            reactor::blocking(move || mount.unmount()).await;
            self.device.stop();
            std::future::pending::<()>().await;
        };
        let all_ended = async {
            let mut result = Ok(());
            while let Ok(queue) = ended.recv().await {
                if let Ended::Failed(errno) = queue {
                    result = Err(errno.into());
                }
            }
            result
        };
        match first(all_ended, closing).await {
            First::One(result) => result,
            First::Other(()) => Ok(()),
        }
    }
}

async fn serve_queue(server: Arc<Server>, device: Fd, reports: async_channel::Sender<Ended>) {
    if let Err(error) = reactor::serves_writeback() {
        // Under a loop device, what the kernel writes to get memory comes here.
        tracing::debug!(export = %server.device.export.id, %error, "where memory is short, this thread may wait for its own file");
    }
    let queue = Queue::new(Arc::clone(&server.device), Channel::Device(device));
    let ended = queue.serve().await;
    server.queues.fetch_sub(1, Relaxed);
    server.device.clients.notify(usize::MAX);
    let _ = reports.try_send(ended);
}

/// Answers INIT. `false` if the file system has gone before.
pub(super) async fn greet(channel: &Channel) -> io::Result<bool> {
    let mut letter = Letter::new();
    loop {
        channel.readable().await;
        let length = match channel.receive(&mut letter.places()) {
            Ok(length) => length,
            Err(NoMessage::Yet) => continue,
            Err(NoMessage::Ever) => return Ok(false),
            Err(NoMessage::Failed(errno)) => return Err(errno.into()),
        };
        let answer = |reply: Reply| channel.reply(&[IoSlice::new(reply.as_bytes())]);
        match letter.read(length) {
            Ok(Request { unique, operation: Operation::Init(init) }) => match negotiate(&init) {
                Answer::Agreed(reply) => {
                    answer(Reply::init(unique, &reply))?;
                    return Ok(true);
                }
                Answer::AskAgain(reply) => answer(Reply::init(unique, &reply))?,
                Answer::TooOld => {
                    answer(Reply::error(unique, libc::EPROTO))?;
                    return Err(io::Error::other(format!(
                        "the kernel's FUSE is version {}.{} (weir needs Linux 6.1)",
                        init.major, init.minor
                    )));
                }
            },
            Ok(Request { unique, .. }) => answer(Reply::error(unique, libc::EIO))?,
            Err(_) => {}
        }
    }
}
