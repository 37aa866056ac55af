//! An export at work: its file system, from INIT to the end, and the queues that serve it.
//!
//! ```text
//!   INIT ─► a queue on a worker ─► … ─┬─► closed: unmounted lazily, so that what is mapped is
//!                                    │           written back, then the queues are stopped
//!                                    └─► gone:   unmounted from outside, the queues have ended
//! ```

use std::{
    io::{self, IoSlice},
    rc::Rc,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

use block::reactor::{self, Worker, op::Fd};

use super::{
    channel::{Channel, NoMessage},
    device::{Device, Export},
    letter::Letter,
    message::{Operation, Reply, Request},
    mount::Mount,
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

/// One export of a disk as a file.
#[derive(Debug)]
pub struct Server {
    device: Arc<Device>,
    queues: AtomicUsize,
    closing: AtomicBool,
}

impl Server {
    /// Nobody is served before [`Server::serve`].
    pub fn new(export: Export) -> Arc<Self> {
        Arc::new(Self {
            device: Arc::new(Device::new(export)),
            queues: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
        })
    }

    /// Serves the file until [`Server::close`], or until it was unmounted from outside. It is
    /// unmounted when this returns, and also when the future is dropped.
    ///
    /// # Errors
    /// A kernel whose FUSE is too old, or a device that fails.
    pub async fn serve(self: Arc<Self>, mount: Mount, workers: Rc<Vec<Worker>>) -> io::Result<()> {
        let id = Arc::clone(&self.device.export.id);
        let mount = Arc::new(mount);
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
        match first(greet(&channel), self.wait_while(|server| !server.is_closing())).await {
            First::One(greeted) => {
                if !greeted? {
                    return Ok(());
                }
            }
            First::Other(()) => return Ok(()),
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
    let queue = Queue::new(Arc::clone(&server.device), Channel::Device(device));
    let ended = queue.serve().await;
    server.queues.fetch_sub(1, Relaxed);
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
