//! A queue of a device, on one worker from its start to its end.
//!
//! ```text
//!   a tag's next request ─► parse ─► arrived ─► wakeup ─┐
//!                                                       ▼
//!   commit, and fetch ◄── answer ◄── disk ◄── merge ◄── turn
//! ```
//!
//! Every tag is fetched again once its request is committed. Requests that arrive in one turn of
//! the reactor are planned together, so adjacent requests become one I/O.
//!
//! A queue ends when the kernel has aborted all tags, or when the device is left: then no further
//! request is started, and those not started stay with the kernel. A queue can also quiesce:
//! started requests are answered, and all others wait until it resumes or its process ends.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    io,
    rc::Rc,
    sync::{
        Arc,
        atomic::Ordering::{Relaxed, SeqCst},
    },
};

use event_listener::Event;
use policy::merge::{MergeCandidate, MergeOperation};

use super::{
    channel::{TagStep, UblkChannel},
    device::{UblkDevice, UblkShutdown},
    request::{UblkOperation, UblkRequest, parse},
};
use crate::batch::{MergeBatch, Mergeable};
use block::disk::CancelToken;
use reactor::{Signal, TaskSpawner};
use storage::Durability;

/// A request that was fetched and is not committed.
pub(super) struct UblkIncomingRequest {
    pub(super) tag: u16,
    pub(super) request: UblkRequest,
    /// True with zero copy: not merged, because an I/O references one registered buffer.
    is_alone: bool,
}

impl Mergeable for UblkIncomingRequest {
    fn candidate(&self) -> MergeCandidate {
        let UblkRequest { kind, offset, bytes } = self.request;
        match kind {
            _ if self.is_alone => {
                MergeCandidate { operation: MergeOperation::Barrier, offset: 0, length: 0, key: 0 }
            }
            UblkOperation::Read => {
                MergeCandidate { operation: MergeOperation::Read, offset, length: bytes, key: 0 }
            }
            UblkOperation::Write(durability) => {
                let key = u32::from(durability == Durability::Synchronous);
                MergeCandidate { operation: MergeOperation::Write, offset, length: bytes, key }
            }
            _ => MergeCandidate { operation: MergeOperation::Barrier, offset: 0, length: 0, key: 0 },
        }
    }
}

pub(super) struct UblkIoQueue {
    pub(super) device: Arc<UblkDevice>,
    pub(super) channel: UblkChannel,
    depth: u16,
    arrived: RefCell<MergeBatch<UblkIncomingRequest>>,
    wakeup: Signal,
    /// Number of requests that were fetched and are not committed.
    in_flight: Cell<u64>,
    /// Number of tags that the kernel has not aborted.
    tags: Cell<u16>,
    /// Error of the first aborted tag.
    abort_error: Cell<Option<io::Error>>,
    is_leaving: Cell<bool>,
    quiescing: Cell<bool>,
    /// Wakes requests that wait for limits.
    pub(super) leave: Event,
    pub(super) cancel_token: Arc<CancelToken>,
}

impl UblkIoQueue {
    pub(super) fn new(channel: UblkChannel, depth: u16, device: Arc<UblkDevice>) -> Rc<Self> {
        Rc::new(Self {
            device,
            channel,
            depth,
            arrived: RefCell::default(),
            wakeup: Signal::default(),
            in_flight: Cell::new(0),
            tags: Cell::new(depth),
            abort_error: Cell::new(None),
            is_leaving: Cell::new(false),
            quiescing: Cell::new(false),
            leave: Event::new(),
            cancel_token: Arc::default(),
        })
    }

    /// Fetches the first request of every tag.
    ///
    /// # Errors
    /// Fails if the kernel rejects the fetch.
    pub(super) async fn begin(self: &Rc<Self>) -> io::Result<()> {
        for tag in 0..self.depth {
            self.submit_step(tag, TagStep::Fetch);
        }
        self.channel.begun().await?;
        // Lets the tasks of rejected tags run before their error is read.
        reactor::yield_now().await;
        self.abort_error.take().map_or(Ok(()), Err)
    }

    /// Serves until the device has stopped, or is left.
    pub(super) async fn serve(self: Rc<Self>) {
        let watcher = reactor::spawn_joinable(Rc::clone(&self).watch());
        let mut spawner = TaskSpawner::new();
        let mut taken = MergeBatch::default();
        while !self.is_over() {
            if self.quiescing.get() {
                self.quiesce_until_resumed().await;
                continue;
            }
            // Swapped, because executing a request may make the next one arrive.
            std::mem::swap(&mut taken, &mut *self.arrived.borrow_mut());
            self.start(&mut taken, &mut spawner, Self::execute);
            self.wakeup.wait().await;
        }
        watcher.cancel().await;
    }

    /// Quiesces, and waits until the device resumes.
    async fn quiesce_until_resumed(&self) {
        while self.quiescing.get() && self.in_flight.get() > self.waiting() {
            self.wakeup.wait().await;
        }
        // Waits until the kernel has received all commits; a process that ends now loses none.
        let submitted = self.channel.begun().await;
        if !self.quiescing.get() || submitted.is_err() {
            return;
        }
        self.device.quiesced_queues.fetch_add(1, SeqCst);
        self.device.changed.notify(usize::MAX);
        while self.quiescing.get() {
            self.wakeup.wait().await;
        }
        self.device.quiesced_queues.fetch_sub(1, SeqCst);
    }

    /// Number of fetched requests that were not started.
    fn waiting(&self) -> u64 {
        self.arrived.borrow().len() as u64
    }

    fn is_over(&self) -> bool {
        self.in_flight.get() == 0 && (self.tags.get() == 0 || self.is_leaving.get())
    }

    fn start<F: Future<Output = ()> + 'static>(
        self: &Rc<Self>,
        taken: &mut MergeBatch<UblkIncomingRequest>,
        spawner: &mut TaskSpawner<F>,
        execute_one: impl Fn(Rc<Self>, UblkIncomingRequest) -> F,
    ) {
        taken.start(
            spawner,
            |only| execute_one(Rc::clone(self), only),
            |parts| Rc::clone(self).read_merged(parts),
            |parts| Rc::clone(self).write_merged(parts),
        );
    }

    /// Follows the state of the export.
    async fn watch(self: Rc<Self>) {
        loop {
            let changed = self.device.changed.listen();
            if self.device.is_shutting_down(UblkShutdown::Stop) {
                self.cancel_token.cancel();
            }
            if self.device.is_shutting_down(UblkShutdown::Leave) && !self.is_leaving.replace(true) {
                self.cancel_token.cancel();
                self.leave.notify(usize::MAX);
                // Not committed, so the driver issues them again to the next server.
                let waiting = std::mem::take(self.arrived.borrow_mut().all());
                waiting.iter().for_each(|_| self.count_out());
                self.wakeup.raise();
            }
            let quiescing = self.device.is_quiescing();
            if self.quiescing.replace(quiescing) != quiescing {
                self.leave.notify(usize::MAX);
                self.wakeup.raise();
            }
            changed.await;
        }
    }

    /// Submits a step of a tag, and waits for its next request.
    fn submit_step(self: &Rc<Self>, tag: u16, step: TagStep) {
        let next = self.channel.step(tag, step);
        let this = Rc::clone(self);
        reactor::spawn(async move {
            match next.await {
                Ok(()) => this.arrive(tag),
                Err(error) => {
                    // The kernel has aborted the tag: the device stops.
                    this.tags.set(this.tags.get() - 1);
                    this.abort_error.set(this.abort_error.take().or(Some(error)));
                    this.wakeup.raise();
                }
            }
        });
    }

    fn arrive(&self, tag: u16) {
        if self.is_leaving.get() {
            // Not counted: the driver issues it again to the next server.
            return;
        }
        let request = parse(self.channel.descriptor(tag), &self.device.rules());
        let is_alone = self.channel.is_zero_copy();
        self.arrived.borrow_mut().push(UblkIncomingRequest { tag, request, is_alone });
        self.in_flight.set(self.in_flight.get() + 1);
        self.device.count(1);
        self.wakeup.raise();
    }

    /// Commits a result and fetches the next request.
    pub(super) fn commit(self: &Rc<Self>, tag: u16, result: i32) {
        self.submit_step(tag, TagStep::Commit(result));
        self.count_out();
    }

    /// Keeps a request that waited for limits and is not to be started now.
    pub(super) fn postpone(&self, incoming: UblkIncomingRequest) {
        if self.is_leaving.get() {
            return self.count_out();
        }
        self.arrived.borrow_mut().push(incoming);
        self.wakeup.raise();
    }

    /// Counts out a request that was committed, or is left to the next server.
    pub(super) fn count_out(&self) {
        self.in_flight.set(self.in_flight.get() - 1);
        self.device.in_flight.fetch_sub(1, Relaxed);
        if self.is_over() || self.quiescing.get() {
            self.wakeup.raise();
        }
    }

    /// True if no request is to be started.
    pub(super) fn is_holding_back(&self) -> bool {
        self.is_leaving.get() || self.quiescing.get()
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.get()
    }
}
