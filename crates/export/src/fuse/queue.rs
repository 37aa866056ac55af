//! A queue: one descriptor of the FUSE device on one worker, from which messages are read and to
//! which replies are written.
//!
//! ```text
//!   readable ─► read messages ─► parse ─► merge ─► one task per I/O ─► disk ─► reply
//!      ▲           until none is left,   │
//!      │           or the bound is hit   └─► without I/O: answered at once
//!      └─────────────── sleep
//! ```
//!
//! All queues of an export read from one list in the kernel; each reply goes to the descriptor that
//! its request was read from. Requests in flight are bounded: at the bound nothing is read, and
//! processes wait.
//!
//! A queue quiesces for an upgrade: started requests are answered, requests that wait for limits
//! are kept without being started, for the new process or for a resume, and no further message is
//! read.

use std::{
    cell::{Cell, RefCell},
    future::Future,
    io::IoSlice,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use reactor::{
    Signal, TaskSpawner,
    buffer::{Segment, Segments},
    error::Error,
    memory::FairQueueFlow,
    select::{FirstReady, first},
};
use rustix::io::Errno;
use smallvec::SmallVec;
use storage::Durability;

use super::{
    channel::{FuseChannel, NoMessage},
    device::FuseDevice,
    encode,
    incoming::{FuseIncomingRequest, FuseWork},
    message::{FuseOperation, FuseReply, FuseRequest, MalformedFuseMessage},
    negotiate::{MAX_REQUEST_BYTES, OPEN_FLAGS},
    receive_buffer::{FuseReceiveBuffer, charged_bytes},
};
use crate::batch::MergeBatch;

/// Maximum number of requests read in one turn, so that completions are not delayed for long.
const MAX_MESSAGES_PER_TURN: usize = 64;
/// Maximum number of requests in flight in one queue.
const MAX_REQUESTS_IN_FLIGHT: usize = 512;
/// Maximum number of parts of a reply; with more, the data is copied into one.
const MAX_REPLY_PARTS: usize = 512;

/// Reason for the end of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FuseQueueEnd {
    /// It was ordered to stop.
    Stopped,
    /// The file system was unmounted, or its connection was aborted.
    Gone,
    /// The device failed.
    Failed(Errno),
}

pub(super) struct FuseQueue {
    pub(super) device: Arc<FuseDevice>,
    channel: FuseChannel,
    /// Number of the queue, unique in the process.
    number: usize,
    in_flight: Cell<usize>,
    /// Share of the disk's memory while requests wait for it.
    flow: FairQueueFlow,
    /// Requests that were not started when the queue quiesced.
    put_back: RefCell<Vec<FuseIncomingRequest>>,
    /// Raised when a request has completed, or was kept without being started.
    request_done: Signal,
}

impl FuseQueue {
    pub(super) fn new(device: Arc<FuseDevice>, channel: FuseChannel) -> Rc<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let (in_flight, put_back) = (Cell::new(0), RefCell::default());
        let (flow, request_done) = (FairQueueFlow::default(), Signal::default());
        Rc::new(Self { device, channel, number, in_flight, flow, put_back, request_done })
    }

    /// Serves until the device is stopped or gone; then no request is in flight.
    pub(super) async fn serve(self: Rc<Self>) -> FuseQueueEnd {
        let end = self.run().await;
        // The end of one queue ends the export: the kernel gives requests to any descriptor, so
        // those of this queue would not be served.
        self.device.stop();
        while self.in_flight.get() > 0 {
            self.request_done.wait().await;
        }
        end
    }

    async fn run(self: &Rc<Self>) -> FuseQueueEnd {
        let mut receive_buffer = FuseReceiveBuffer::new();
        let mut batch = MergeBatch::default();
        let mut spawner = TaskSpawner::new();
        let mut stop = self.device.state_changed.listen();
        for message in self.device.take_inherited_messages() {
            self.accept_again(&message, &mut receive_buffer, &mut batch).await;
        }
        while !self.device.is_stopping() {
            if self.device.is_quiescing() {
                self.start(&mut batch, &mut spawner, Self::execute);
                self.quiesce_until_resumed(&mut batch).await;
                continue;
            }
            let taken = self.read_messages(&mut receive_buffer, &mut batch).await;
            // Requests that were read before the end are started too.
            self.start(&mut batch, &mut spawner, Self::execute);
            match taken {
                Err(NoMessage::Ever) => return FuseQueueEnd::Gone,
                Err(NoMessage::Failed(errno)) => return FuseQueueEnd::Failed(errno),
                // Yields, so that a busy queue cannot starve the worker's other tasks.
                Ok(MAX_MESSAGES_PER_TURN) => reactor::yield_now().await,
                Ok(_) | Err(NoMessage::Yet) => {
                    let more = async {
                        while !self.has_room() {
                            self.request_done.wait().await;
                        }
                        self.channel.readable().await;
                    };
                    if let FirstReady::One(()) = first(&mut stop, more).await {
                        stop = self.device.state_changed.listen();
                    }
                }
            }
        }
        FuseQueueEnd::Stopped
    }

    /// Waits while the device is quiesced. Requests that were kept are accepted again afterwards.
    async fn quiesce_until_resumed(self: &Rc<Self>, batch: &mut MergeBatch<FuseIncomingRequest>) {
        let mut is_at_rest = false;
        loop {
            let changed = self.device.state_changed.listen();
            if !self.device.is_quiescing() || self.device.is_stopping() {
                break;
            }
            if self.in_flight.get() == 0 && !is_at_rest {
                is_at_rest = true;
                let messages = self.put_back.borrow().iter().flat_map(encode::encode).collect();
                // Published once nothing is in flight. Requests that were not started are included
                // as messages.
                self.device.publish_quiesced(self.number, messages);
            }
            first(self.request_done.wait(), changed).await;
        }
        self.device.withdraw_quiesced(self.number);
        for incoming in self.put_back.take() {
            self.accept_request(incoming, batch).await;
        }
    }

    /// Stores a request that must not be started while the device is quiesced.
    pub(super) fn put_back(&self, incoming: FuseIncomingRequest) {
        let charged = incoming.charged_bytes;
        self.put_back.borrow_mut().push(incoming);
        self.count_out(charged);
    }

    fn has_room(&self) -> bool {
        self.in_flight.get() < MAX_REQUESTS_IN_FLIGHT
    }

    /// Reads available messages; returns their number.
    async fn read_messages(
        self: &Rc<Self>,
        receive_buffer: &mut FuseReceiveBuffer,
        batch: &mut MergeBatch<FuseIncomingRequest>,
    ) -> Result<usize, NoMessage> {
        let mut taken = 0;
        let outcome = loop {
            if taken == MAX_MESSAGES_PER_TURN || !self.has_room() {
                break Ok(());
            }
            let received = self.channel.receive(&mut receive_buffer.io_slices());
            let length = match received {
                Ok(length) => length,
                Err(NoMessage::Yet) => break Ok(()),
                Err(reason) => break Err(reason),
            };
            taken += 1;
            match receive_buffer.parse(length) {
                Ok(request) => self.accept(request, receive_buffer, batch).await,
                Err(MalformedFuseMessage { unique: Some(unique) }) => self.reply_error(unique, libc::EINVAL),
                Err(MalformedFuseMessage { unique: None }) => {}
            }
        };
        self.device.requests.fetch_add(taken as u64, Relaxed);
        outcome.map(|()| taken)
    }

    async fn accept(
        self: &Rc<Self>,
        request: FuseRequest,
        receive_buffer: &mut FuseReceiveBuffer,
        batch: &mut MergeBatch<FuseIncomingRequest>,
    ) {
        let FuseRequest { unique, operation } = request;
        let (charged, work) = match operation {
            FuseOperation::Read { offset, length } => {
                let remaining = self.device.file_bytes().saturating_sub(offset);
                let length = u64::from(length.min(MAX_REQUEST_BYTES)).min(remaining) as usize;
                if length == 0 {
                    return self.reply(&FuseReply::data(unique, 0), &Segments::default());
                }
                (length, FuseWork::Read { offset, length })
            }
            FuseOperation::Write { .. } if self.device.export.read_only => {
                return self.reply_error(unique, libc::EROFS);
            }
            FuseOperation::Write { length: 0, .. } => {
                return self.reply(&FuseReply::written(unique, 0), &Segments::default());
            }
            FuseOperation::Write { offset, length, flags, cached } => {
                let length = length as usize;
                (charged_bytes(length), self.write(offset, flags, cached, receive_buffer.take_data(length)))
            }
            FuseOperation::Sync
            | FuseOperation::Allocate { .. }
            | FuseOperation::Seek { .. }
            | FuseOperation::GetAttributes => (0, FuseWork::Other(operation)),
            FuseOperation::SetAttributes(changes) if changes.size.is_some() => {
                (0, FuseWork::Other(operation))
            }
            // O_TRUNC on a disk of fixed size keeps size and content, as on a block device.
            FuseOperation::Open { flags }
                if flags & libc::O_TRUNC as u32 != 0 && self.device.export.growable =>
            {
                (0, FuseWork::Other(operation))
            }
            FuseOperation::Interrupt { unique: interrupted } => {
                // The interrupted request may still be in the batch, so that is started first.
                self.start_as_tasks(batch);
                return self.device.interrupts.interrupt(interrupted);
            }
            _ => return self.answer_at_once(unique, operation),
        };
        self.accept_request(FuseIncomingRequest { unique, charged_bytes: charged, work }, batch).await;
    }

    /// Accepts a message that the old process had read.
    async fn accept_again(
        self: &Rc<Self>,
        message: &[u8],
        receive_buffer: &mut FuseReceiveBuffer,
        batch: &mut MergeBatch<FuseIncomingRequest>,
    ) {
        match receive_buffer.copy(message) {
            Ok(request) => self.accept(request, receive_buffer, batch).await,
            Err(MalformedFuseMessage { unique: Some(unique) }) => self.reply_error(unique, libc::EINVAL),
            Err(MalformedFuseMessage { unique: None }) => {}
        }
    }

    async fn accept_request(
        self: &Rc<Self>,
        incoming: FuseIncomingRequest,
        batch: &mut MergeBatch<FuseIncomingRequest>,
    ) {
        if self.reserve_memory(incoming.charged_bytes, batch).await {
            self.in_flight.set(self.in_flight.get() + 1);
            self.device.in_flight.fetch_add(1, Relaxed);
            batch.push(incoming);
        } else if self.device.is_stopping() {
            self.reply_error(incoming.unique, Error::SHUTDOWN.errno());
        } else {
            self.put_back.borrow_mut().push(incoming);
        }
    }

    fn write(&self, offset: u64, flags: u32, cached: bool, data: Segments) -> FuseWork {
        let is_set = |flag: i32| flags & flag as u32 != 0;
        let durability = if is_set(libc::O_DSYNC) { Durability::Synchronous } else { Durability::Cached };
        // O_APPEND: the kernel's value of the end may be stale. Written-back pages have a fixed
        // offset.
        let appends = is_set(libc::O_APPEND) && !cached;
        let end = offset.checked_add(data.len() as u64);
        if !appends && end.is_some_and(|end| end <= self.device.file_bytes()) {
            return FuseWork::Write { offset, data, durability };
        }
        // A mapped page must not extend a file that was shrunk meanwhile.
        let may_grow = self.device.export.growable && !cached;
        FuseWork::Extend { offset: (!appends).then_some(offset), data, durability, may_grow }
    }

    /// Waits for memory after starting earlier requests. False if the device stops or quiesces
    /// before.
    async fn reserve_memory(
        self: &Rc<Self>,
        bytes: usize,
        batch: &mut MergeBatch<FuseIncomingRequest>,
    ) -> bool {
        let memory = self.device.disk().memory();
        if bytes == 0 || memory.try_acquire(bytes as u64) {
            return true;
        }
        self.start_as_tasks(batch);
        let stop = self.device.state_changed.listen();
        if self.device.is_stopping() || self.device.is_quiescing() {
            return false;
        }
        matches!(first(memory.acquire(&self.flow, bytes as u64), stop).await, FirstReady::One(()))
    }

    fn start_as_tasks(self: &Rc<Self>, batch: &mut MergeBatch<FuseIncomingRequest>) {
        self.start(batch, &mut TaskSpawner::new(), Self::execute);
    }

    fn start<F>(
        self: &Rc<Self>,
        batch: &mut MergeBatch<FuseIncomingRequest>,
        spawner: &mut TaskSpawner<F>,
        execute_one: impl Fn(Rc<Self>, FuseIncomingRequest) -> F,
    ) where
        F: Future<Output = ()> + 'static,
    {
        batch.start(
            spawner,
            |only| execute_one(Rc::clone(self), only),
            |parts| Rc::clone(self).read_merged(parts),
            |parts| Rc::clone(self).write_merged(parts),
        );
    }

    /// Answers requests that need no I/O.
    fn answer_at_once(&self, unique: u64, operation: FuseOperation) {
        let device = &self.device;
        let reply = match operation {
            FuseOperation::Forget | FuseOperation::Interrupt { .. } => return,
            FuseOperation::SetAttributes(changes) => {
                device.change_owner(&changes);
                FuseReply::attributes(unique, &device.attributes())
            }
            FuseOperation::Open { .. } => {
                device.count_open();
                FuseReply::opened(unique, OPEN_FLAGS)
            }
            FuseOperation::Release => {
                device.count_close();
                FuseReply::done(unique)
            }
            FuseOperation::StatFs => FuseReply::file_system(unique, device.file_bytes()),
            FuseOperation::Destroy => FuseReply::done(unique),
            FuseOperation::Lookup => FuseReply::error(unique, libc::ENOTDIR),
            FuseOperation::Ioctl => FuseReply::error(unique, libc::ENOTTY),
            // A second INIT.
            FuseOperation::Init(_) => FuseReply::error(unique, libc::EIO),
            _ => FuseReply::error(unique, libc::ENOSYS),
        };
        self.reply(&reply, &Segments::default());
    }

    /// Returns the memory of a request that was answered or put back, and removes it from those in
    /// flight.
    pub(super) fn count_out(&self, charged: usize) {
        if charged > 0 {
            self.device.disk().memory().release(charged as u64);
        }
        self.in_flight.set(self.in_flight.get() - 1);
        self.device.in_flight.fetch_sub(1, Relaxed);
        self.request_done.raise();
    }

    pub(super) fn reply_error(&self, unique: u64, errno: i32) {
        self.reply(&FuseReply::error(unique, errno), &Segments::default());
    }

    /// Sends a reply with its data.
    pub(super) fn reply(&self, reply: &FuseReply, data: &Segments) {
        let sent = if data.as_slice().len() < MAX_REPLY_PARTS {
            let bytes: SmallVec<[_; 4]> = data.iter().map(Segment::bytes).collect();
            let head = [IoSlice::new(reply.as_bytes())];
            let parts = head.into_iter().chain(bytes.iter().map(|bytes| IoSlice::new(bytes)));
            self.channel.reply(&parts.collect::<SmallVec<[_; 5]>>())
        } else {
            self.channel.reply(&[IoSlice::new(reply.as_bytes()), IoSlice::new(&data.to_vec())])
        };
        match sent {
            // The process was interrupted, or the device is gone.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED) => {}
            Err(errno) => {
                tracing::warn!(export = %self.device.export.id, %errno, "the kernel rejected a reply");
            }
        }
    }
}
