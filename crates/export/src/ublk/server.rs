//! A running device: its queues, each on one worker, from its start to its end.
//!
//! It ends by [`UblkServer::close`] or [`UblkServer::leave`], or when it is removed from outside;
//! then [`UblkServer::until_ended_or_left`] returns.

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
};

use async_channel::{Receiver, Sender};
use event_listener::Event;
use policy::time::Duration;

use super::{
    UblkError, UblkExport,
    channel::UblkChannel,
    device::{UblkDevice, UblkShutdown},
    node::{UblkNode, kernel},
    queue::UblkIoQueue,
    request::SECTOR_BYTES,
};
use reactor::{
    ReactorWorker,
    memory::{MemoryBudget, OutOfBudget},
    operation::Fd,
    select::{FirstReady, first},
    ublk::{self, UblkInfo, UblkParams},
};

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkStatistics {
    /// Queues that are served.
    pub queues: usize,
    /// Requests received.
    pub requests: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// True if the device was taken over from another process.
    pub is_taken_over: bool,
    /// True if the device outlives this process and waits for the next one.
    pub survives: bool,
    /// Bytes reserved for the data of requests: lent to the kernel, or for data that has to be
    /// copied.
    pub lent_bytes: u64,
    /// True with zero copy.
    pub is_zero_copy: bool,
    /// Bytes that were copied nevertheless: see [`block::disk::Disk::read_registered`].
    pub copied_bytes: u64,
}

/// A block device.
#[derive(Debug)]
pub struct UblkServer {
    device: Arc<UblkDevice>,
    node: UblkNode,
    queues: AtomicUsize,
    has_ended: AtomicBool,
    /// Notified when the device stops or has ended, and when the disk was resized.
    changed: Event,
    resizes: AtomicU64,
    queue_memory: QueueMemory,
}

/// Memory that is reserved until this is dropped.
#[derive(Debug)]
struct QueueMemory(u64);

impl QueueMemory {
    const WHAT: &'static str = "request buffers of a block device";

    fn of(info: &UblkInfo) -> Result<Self, OutOfBudget> {
        let bytes = u64::from(info.queues) * u64::from(info.depth) * u64::from(info.max_request_bytes);
        MemoryBudget::process().reserve(Self::WHAT, 0, bytes)?;
        Ok(Self(bytes))
    }
}

impl Drop for QueueMemory {
    fn drop(&mut self) {
        // Reducing a reservation cannot fail.
        let _ = MemoryBudget::process().reserve(Self::WHAT, self.0, 0);
    }
}

impl UblkServer {
    /// Creates a device for a disk, or takes over the orphaned one of its image; the device exists
    /// when this returns. Queues are distributed over the workers.
    ///
    /// # Errors
    /// [`UblkError`]. An orphaned device stays.
    pub async fn open(export: UblkExport, workers: &[ReactorWorker]) -> Result<Arc<Self>, UblkError> {
        let node_export = export.clone();
        let node = reactor::run_blocking(move || UblkNode::open(&node_export)).await?;
        Self::with(node, export, workers).await
    }

    /// Takes over the device of a process that is about to end; waits until it has ended.
    ///
    /// # Errors
    /// [`UblkError`]. The device stays and waits.
    pub async fn recover(export: UblkExport, workers: &[ReactorWorker]) -> Result<Arc<Self>, UblkError> {
        let node_export = export.clone();
        let node = reactor::run_blocking(move || UblkNode::recover(&node_export)).await?;
        Self::with(node, export, workers).await
    }

    async fn with(
        node: UblkNode,
        export: UblkExport,
        workers: &[ReactorWorker],
    ) -> Result<Arc<Self>, UblkError> {
        let queue_memory = match QueueMemory::of(&node.info) {
            Ok(queue_memory) => queue_memory,
            Err(error) => {
                discard_node(node).await;
                return Err(error.into());
            }
        };
        let device = Arc::new(UblkDevice::new(&export, &node.info, &node.params));
        let server = Arc::new(Self {
            device,
            node,
            queues: AtomicUsize::new(0),
            has_ended: AtomicBool::new(false),
            changed: Event::new(),
            resizes: AtomicU64::new(0),
            queue_memory,
        });
        let (ending, queue_ends) = async_channel::unbounded();
        // A device that was taken over may have openers, so it is left for a later attempt.
        if let Err(error) = server.start(workers, ending).await {
            if server.node.is_taken_over {
                server.device.shut_down(UblkShutdown::Leave);
            } else {
                server.device.shut_down(UblkShutdown::Stop);
                server.call_driver(UblkNode::stop).await;
                server.until_ended(&queue_ends).await;
                server.call_driver(UblkNode::delete).await;
            }
            return Err(error);
        }
        server.log_start(&export);
        reactor::spawn(Arc::clone(&server).handle_changes(queue_ends));
        Ok(server)
    }

    /// N of `/dev/ublkbN`.
    pub fn number(&self) -> u32 {
        self.node.info.number
    }

    /// Path of the block device.
    pub fn path(&self) -> PathBuf {
        self.node.path()
    }

    /// Waits until the device is removed, or left to another process.
    pub async fn until_ended_or_left(self: Arc<Self>) -> io::Result<()> {
        self.wait_while(|server| server.connections() > 0).await;
        Ok(())
    }

    /// 1 while the device exists, otherwise 0.
    pub fn connections(&self) -> usize {
        usize::from(!self.has_ended.load(SeqCst))
    }

    /// Always true: a device is in use from its start.
    pub fn has_served(&self) -> bool {
        true
    }

    /// Adds the requests of the old process, and the bytes that it has
    /// [copied](UblkStatistics::copied_bytes).
    pub fn add_counts(&self, requests: u64, copied_bytes: u64) {
        self.device.requests.fetch_add(requests, Relaxed);
        self.device.copied.fetch_add(copied_bytes, Relaxed);
    }

    /// Current counters.
    pub fn statistics(&self) -> UblkStatistics {
        UblkStatistics {
            queues: self.queues.load(Relaxed),
            requests: self.device.requests.load(Relaxed),
            in_flight: self.device.in_flight.load(Relaxed),
            is_taken_over: self.node.is_taken_over,
            survives: self.survives(),
            lent_bytes: self.queue_memory.0,
            is_zero_copy: self.node.info.is_zero_copy(),
            copied_bytes: self.device.copied.load(Relaxed),
        }
    }

    /// True if the device outlives this process.
    pub fn survives(&self) -> bool {
        self.node.info.features & ublk::feature::USER_RECOVERY != 0
    }

    /// Reports the disk's size to the kernel if it has changed.
    pub fn refresh_size(&self) {
        self.resizes.fetch_add(1, SeqCst);
        self.changed.notify(usize::MAX);
    }

    /// Removes the device even if it has openers: fetched requests complete, later ones fail.
    pub fn close(&self) {
        if !self.device.is_shutting_down(UblkShutdown::Leave) {
            self.device.shut_down(UblkShutdown::Stop);
            self.changed.notify(usize::MAX);
        }
    }

    /// Leaves the device to a later process, if it can outlive this one; its openers wait. No
    /// further request is started.
    pub fn leave(&self) {
        if self.survives() { self.device.shut_down(UblkShutdown::Leave) } else { self.close() }
    }

    /// Quiesces every queue: started requests are answered, and no further one is started. Another
    /// process may then use the disk, and takes the device over once this one has ended. False
    /// after the timeout.
    pub async fn quiesce(&self, timeout: Duration) -> bool {
        self.device.set_quiescing(true);
        reactor::timeout(timeout, async {
            loop {
                let (changed, server_changed) = (self.device.changed.listen(), self.changed.listen());
                if self.device.quiesced_queues.load(SeqCst) >= self.queues.load(SeqCst) {
                    return;
                }
                first(changed, server_changed).await;
            }
        })
        .await
        .is_ok()
    }

    /// Resumes after [`UblkServer::quiesce`].
    pub fn resume(&self) {
        self.device.set_quiescing(false);
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

    /// Makes every queue fetch, and then starts the device.
    async fn start(self: &Arc<Self>, workers: &[ReactorWorker], ending: Sender<()>) -> Result<(), UblkError> {
        let operation = || format!("{}: cannot receive its requests", self.path().display());
        let number = self.number();
        // One open file for all queues: the driver allows a single one.
        let channel = reactor::run_blocking(move || ublk::UblkQueue::open_device(number)).await;
        let channel = kernel(operation(), channel)?;
        let (ready, all_ready) = async_channel::unbounded();
        for number in 0..self.node.info.queues {
            let (server, channel) = (Arc::clone(self), channel.clone());
            let (ready, ending) = (ready.clone(), ending.clone());
            self.queues.fetch_add(1, SeqCst);
            let worker = &workers[usize::from(number) % workers.len()];
            worker.spawn(move || server.serve_queue(number, channel, ready, ending));
        }
        drop((ready, channel));
        let mut queues = 0;
        while let Ok(started) = all_ready.recv().await {
            kernel(operation(), started)?;
            queues += 1;
            // START_DEV blocks until every tag of every queue was fetched, so it comes last.
            if queues == self.node.info.queues {
                break;
            }
        }
        let server = Arc::clone(self);
        reactor::run_blocking(move || server.node.start()).await
    }

    async fn serve_queue(
        self: Arc<Self>,
        number: u16,
        channel: Fd,
        ready: Sender<io::Result<()>>,
        ending: Sender<()>,
    ) {
        if let Err(error) = reactor::set_io_flusher() {
            tracing::debug!(
                export = %self.device.id, %error,
                "no writeback privilege: if memory is short, this thread may wait for its own \
                 device"
            );
        }
        let info = &self.node.info;
        match ublk::UblkQueue::new(channel, info, number, &self.device.copied) {
            Ok(queue) => {
                let queue =
                    UblkIoQueue::new(UblkChannel::Driver(queue), info.depth, Arc::clone(&self.device));
                // Fails if another queue has failed before.
                let _ = ready.try_send(queue.begin().await);
                queue.serve().await;
            }
            Err(error) => {
                let _ = ready.try_send(Err(error));
            }
        }
        // Decremented before `ending`, so that the count is right when the event is handled.
        self.queues.fetch_sub(1, SeqCst);
        self.changed.notify(usize::MAX);
        let _ = ending.try_send(());
    }

    fn log_start(&self, export: &UblkExport) {
        let Self { device, node, .. } = self;
        let (id, path) = (&device.id, node.path());
        let (queues, depth) = (node.info.queues, node.info.depth);
        let zero_copy = node.info.is_zero_copy();
        if node.is_taken_over {
            tracing::info!(export = %id, device = %path.display(), queues, depth, zero_copy, "took over an orphaned device");
            let size_bytes = export.disk.size_bytes();
            let offered = export.offer.params(size_bytes);
            let settings = |params: &UblkParams| (params.attributes, params.logical_block_shift);
            // Parameters of a device cannot change while it exists.
            if settings(&offered) != settings(&node.params) {
                tracing::warn!(
                    export = %id,
                    "the device keeps the settings that it was created with: read-only, write \
                     cache and block size"
                );
            }
            if size_bytes / SECTOR_BYTES != node.params.sectors {
                self.refresh_size();
            }
        } else {
            tracing::info!(export = %id, device = %path.display(), queues, depth, zero_copy, "created a device");
        }
    }

    /// Handles changes until the device has ended.
    async fn handle_changes(self: Arc<Self>, queue_ends: Receiver<()>) {
        let (mut resizes, mut is_stopped) = (0, false);
        while self.queues.load(SeqCst) > 0 {
            let changed = self.changed.listen();
            if resizes != self.resizes.load(SeqCst) {
                resizes = self.resizes.load(SeqCst);
                self.resize().await;
                continue;
            }
            if self.device.is_shutting_down(UblkShutdown::Stop) && !is_stopped {
                is_stopped = true;
                self.call_driver(UblkNode::stop).await;
                continue;
            }
            if let FirstReady::One(_) = first(queue_ends.recv(), changed).await {
                // One aborted queue means that the kernel has stopped the device, so all of them
                // end.
                self.until_ended(&queue_ends).await;
            }
        }
        let path = self.path();
        if self.device.is_shutting_down(UblkShutdown::Leave) {
            tracing::warn!(
                export = %self.device.id, device = %path.display(),
                "the device is in use and is kept: its openers wait until weir serves its image \
                 again"
            );
        } else {
            self.call_driver(UblkNode::delete).await;
            tracing::info!(export = %self.device.id, device = %path.display(), "the device was removed");
        }
        self.has_ended.store(true, SeqCst);
        self.changed.notify(usize::MAX);
    }

    async fn until_ended(&self, queue_ends: &Receiver<()>) {
        while self.queues.load(SeqCst) > 0 {
            let Ok(()) = queue_ends.recv().await else { return };
        }
    }

    async fn resize(self: &Arc<Self>) {
        let size_bytes = self.device.disk().size_bytes();
        let block = 1_u64 << self.node.params.logical_block_shift;
        if !size_bytes.is_multiple_of(block) {
            tracing::warn!(
                export = %self.device.id, size_bytes,
                "the device keeps its length: the disk's length is not a multiple of {block} bytes"
            );
        } else if self.node.can_resize() {
            self.call_driver(move |node| node.resize(size_bytes)).await;
        } else {
            tracing::warn!(
                export = %self.device.id, device = %self.path().display(), size_bytes,
                "the device keeps its length until it is created again (Linux 6.16 or later \
                 changes it at once)"
            );
        }
    }

    /// Calls the driver on a blocking thread; logs a failure.
    async fn call_driver(
        self: &Arc<Self>,
        call: impl FnOnce(&UblkNode) -> Result<(), UblkError> + Send + 'static,
    ) {
        let server = Arc::clone(self);
        if let Err(error) = reactor::run_blocking(move || call(&server.node)).await {
            tracing::error!(export = %self.device.id, %error, "the ublk driver has failed");
        }
    }
}

/// Removes a device that was not started, and leaves one that was taken over.
async fn discard_node(node: UblkNode) {
    if !node.is_taken_over {
        let _ = reactor::run_blocking(move || node.delete()).await;
    }
}
