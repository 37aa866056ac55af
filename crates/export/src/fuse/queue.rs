//! A queue: one descriptor of the FUSE device on one worker, from which messages are read and to
//! which replies are written.
//!
//! ```text
//!   readable ─► take: read ─► parse ─► merge ─► one task per I/O ─► disk ─► reply
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
//! are put back, and no further message is read.

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
    Launcher, Signal,
    buffer::{Segment, Segments},
    error::Error,
    memory::MemoryFlow,
};
use rustix::io::Errno;
use smallvec::SmallVec;
use storage::Durability;

use super::{
    channel::{Channel, NoMessage},
    device::Device,
    letter::{Letter, kept_bytes},
    message::{Malformed, Operation, Reply, Request},
    negotiate::{MOST_BYTES, OPEN_FLAGS},
    told,
    work::{Incoming, Work},
};
use crate::{
    intake::Intake,
    race::{First, first},
};

/// Number of requests read in one turn, so that completions are not delayed for long.
const MOST_TAKEN: usize = 64;
/// Number of requests in flight in one queue.
const MOST_REQUESTS: usize = 512;
/// Number of parts of a reply; with more, the data is copied into one.
const MOST_PARTS: usize = 512;

/// Reason for the end of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It was ordered to stop.
    Stopped,
    /// The file system was unmounted, or its connection was aborted.
    Gone,
    /// The device failed.
    Failed(Errno),
}

pub(super) struct Queue {
    pub(super) device: Arc<Device>,
    channel: Channel,
    /// Number of the queue, unique in the process.
    number: usize,
    in_flight: Cell<usize>,
    /// Share of the disk's memory while requests wait for it.
    flow: MemoryFlow,
    /// Requests that were not started when the queue quiesced.
    put_back: RefCell<Vec<Incoming>>,
    /// Raised when a request has ended.
    news: Signal,
}

impl Queue {
    pub(super) fn new(device: Arc<Device>, channel: Channel) -> Rc<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let (in_flight, put_back) = (Cell::new(0), RefCell::default());
        let (flow, news) = (MemoryFlow::default(), Signal::default());
        Rc::new(Self { device, channel, number, in_flight, flow, put_back, news })
    }

    /// Serves until the device is stopped or gone; then no request is in flight.
    pub(super) async fn serve(self: Rc<Self>) -> Ended {
        let ended = self.run().await;
        // One failed or ended queue ends the export: the kernel gives requests to any descriptor.
        self.device.stop();
        while self.in_flight.get() > 0 {
            self.news.wait().await;
        }
        ended
    }

    async fn run(self: &Rc<Self>) -> Ended {
        let mut letter = Letter::new();
        let mut intake = Intake::default();
        let mut launcher = Launcher::new();
        let mut stop = self.device.stop.listen();
        for message in self.device.take_left() {
            self.accept_again(&message, &mut letter, &mut intake).await;
        }
        while !self.device.is_stopping() {
            if self.device.is_resting() {
                self.start(&mut intake, &mut launcher, Self::carry_out);
                self.rest(&mut intake).await;
                continue;
            }
            let taken = self.take(&mut letter, &mut intake).await;
            // Requests that were read before the end are started too.
            self.start(&mut intake, &mut launcher, Self::carry_out);
            match taken {
                Err(NoMessage::Ever) => return Ended::Gone,
                Err(NoMessage::Failed(errno)) => return Ended::Failed(errno),
                // Yields, so that a busy queue cannot starve the worker's other tasks.
                Ok(MOST_TAKEN) => reactor::yield_now().await,
                Ok(_) | Err(NoMessage::Yet) => {
                    let more = async {
                        while !self.has_room() {
                            self.news.wait().await;
                        }
                        self.channel.readable().await;
                    };
                    if let First::One(()) = first(&mut stop, more).await {
                        stop = self.device.stop.listen();
                    }
                }
            }
        }
        Ended::Stopped
    }

    /// Waits while the device is quiesced. Requests that were put back are accepted again
    /// afterwards.
    async fn rest(self: &Rc<Self>, intake: &mut Intake<Incoming>) {
        let mut is_at_rest = false;
        loop {
            let changed = self.device.stop.listen();
            if !self.device.is_resting() || self.device.is_stopping() {
                break;
            }
            if self.in_flight.get() == 0 && !is_at_rest {
                is_at_rest = true;
                let messages = self.put_back.borrow().iter().flat_map(told::message).collect();
                // Published once nothing is in flight; requests that were put back go along as
                // messages.
                self.device.lie_down(self.number, messages);
            }
            first(self.news.wait(), changed).await;
        }
        self.device.get_up(self.number);
        for incoming in self.put_back.take() {
            self.take_in(incoming, intake).await;
        }
    }

    /// Keeps a request that was not started, and is not to be started now.
    pub(super) fn put_back(&self, incoming: Incoming) {
        let kept = incoming.kept;
        self.put_back.borrow_mut().push(incoming);
        self.ended(kept);
    }

    fn has_room(&self) -> bool {
        self.in_flight.get() < MOST_REQUESTS
    }

    /// Reads available messages; returns their number.
    async fn take(
        self: &Rc<Self>,
        letter: &mut Letter,
        intake: &mut Intake<Incoming>,
    ) -> Result<usize, NoMessage> {
        let mut taken = 0;
        let outcome = loop {
            if taken == MOST_TAKEN || !self.has_room() {
                break Ok(());
            }
            let received = self.channel.receive(&mut letter.places());
            let length = match received {
                Ok(length) => length,
                Err(NoMessage::Yet) => break Ok(()),
                Err(why) => break Err(why),
            };
            taken += 1;
            match letter.read(length) {
                Ok(request) => self.accept(request, letter, intake).await,
                Err(Malformed { unique: Some(unique) }) => self.refuse(unique, libc::EINVAL),
                Err(Malformed { unique: None }) => {}
            }
        };
        self.device.requests.fetch_add(taken as u64, Relaxed);
        outcome.map(|()| taken)
    }

    async fn accept(self: &Rc<Self>, request: Request, letter: &mut Letter, intake: &mut Intake<Incoming>) {
        let Request { unique, operation } = request;
        let (kept, work) = match operation {
            Operation::Read { offset, length } => {
                let left = self.device.file_bytes().saturating_sub(offset);
                let length = u64::from(length.min(MOST_BYTES)).min(left) as usize;
                if length == 0 {
                    return self.reply(&Reply::data(unique, 0), &Segments::default());
                }
                (length, Work::Read { offset, length })
            }
            Operation::Write { .. } if self.device.export.read_only => {
                return self.refuse(unique, libc::EROFS);
            }
            Operation::Write { length: 0, .. } => {
                return self.reply(&Reply::written(unique, 0), &Segments::default());
            }
            Operation::Write { offset, length, flags, cached } => {
                let length = length as usize;
                (kept_bytes(length), self.write(offset, flags, cached, letter.take_data(length)))
            }
            Operation::Sync
            | Operation::Allocate { .. }
            | Operation::Seek { .. }
            | Operation::GetAttributes => (0, Work::Other(operation)),
            Operation::SetAttributes(changes) if changes.size.is_some() => (0, Work::Other(operation)),
            // O_TRUNC on a disk of fixed size keeps size and content, as on a block device.
            Operation::Open { flags } if flags & libc::O_TRUNC as u32 != 0 && self.device.export.growable => {
                (0, Work::Other(operation))
            }
            Operation::Interrupt { of } => {
                // The interrupted request may still be in the batch, so that is started first.
                self.start_as_tasks(intake);
                return self.device.interrupts.interrupt(of);
            }
            _ => return self.answer_at_once(unique, operation),
        };
        self.take_in(Incoming { unique, kept, work }, intake).await;
    }

    /// Accepts a message that the old process had read.
    async fn accept_again(
        self: &Rc<Self>,
        message: &[u8],
        letter: &mut Letter,
        intake: &mut Intake<Incoming>,
    ) {
        match letter.copy(message) {
            Ok(request) => self.accept(request, letter, intake).await,
            Err(Malformed { unique: Some(unique) }) => self.refuse(unique, libc::EINVAL),
            Err(Malformed { unique: None }) => {}
        }
    }

    async fn take_in(self: &Rc<Self>, incoming: Incoming, intake: &mut Intake<Incoming>) {
        if self.make_room(incoming.kept, intake).await {
            self.in_flight.set(self.in_flight.get() + 1);
            self.device.in_flight.fetch_add(1, Relaxed);
            intake.push(incoming);
        } else if self.device.is_stopping() {
            self.refuse(incoming.unique, Error::SHUTDOWN.errno());
        } else {
            self.put_back.borrow_mut().push(incoming);
        }
    }

    fn write(&self, offset: u64, flags: u32, cached: bool, data: Segments) -> Work {
        let has = |flag: i32| flags & flag as u32 != 0;
        let durability = if has(libc::O_DSYNC) { Durability::Synchronous } else { Durability::Cached };
        // O_APPEND: the kernel's idea of the end may be stale. Written-back pages have a fixed
        // offset.
        let appends = has(libc::O_APPEND) && !cached;
        let end = offset.checked_add(data.len() as u64);
        if !appends && end.is_some_and(|end| end <= self.device.file_bytes()) {
            return Work::Write { offset, data, durability };
        }
        // A mapped page must not extend a file that was shrunk meanwhile.
        let may_grow = self.device.export.growable && !cached;
        Work::Extend { offset: (!appends).then_some(offset), data, durability, may_grow }
    }

    /// Waits for memory after starting earlier requests. False if the device stops or quiesces
    /// before.
    async fn make_room(self: &Rc<Self>, bytes: usize, intake: &mut Intake<Incoming>) -> bool {
        let memory = self.device.disk().memory();
        if bytes == 0 || memory.try_take(bytes as u64) {
            return true;
        }
        self.start_as_tasks(intake);
        let stop = self.device.stop.listen();
        if self.device.is_stopping() || self.device.is_resting() {
            return false;
        }
        matches!(first(memory.take(&self.flow, bytes as u64), stop).await, First::One(()))
    }

    fn start_as_tasks(self: &Rc<Self>, intake: &mut Intake<Incoming>) {
        self.start(intake, &mut Launcher::new(), Self::carry_out);
    }

    fn start<F>(
        self: &Rc<Self>,
        intake: &mut Intake<Incoming>,
        launcher: &mut Launcher<F>,
        carry_out: impl Fn(Rc<Self>, Incoming) -> F,
    ) where
        F: Future<Output = ()> + 'static,
    {
        intake.start(
            launcher,
            |only| carry_out(Rc::clone(self), only),
            |parts| Rc::clone(self).read_merged(parts),
            |parts| Rc::clone(self).write_merged(parts),
        );
    }

    /// Answers requests that need no I/O.
    fn answer_at_once(&self, unique: u64, operation: Operation) {
        let device = &self.device;
        let reply = match operation {
            Operation::Forget | Operation::Interrupt { .. } => return,
            Operation::SetAttributes(changes) => {
                device.change_owner(&changes);
                Reply::attributes(unique, &device.attributes())
            }
            Operation::Open { .. } => {
                device.opened();
                Reply::opened(unique, OPEN_FLAGS)
            }
            Operation::Release => {
                device.closed();
                Reply::done(unique)
            }
            Operation::StatFs => Reply::file_system(unique, device.file_bytes()),
            Operation::Destroy => Reply::done(unique),
            Operation::Lookup => Reply::error(unique, libc::ENOTDIR),
            Operation::Ioctl => Reply::error(unique, libc::ENOTTY),
            // A second INIT.
            Operation::Init(_) => Reply::error(unique, libc::EIO),
            _ => Reply::error(unique, libc::ENOSYS),
        };
        self.reply(&reply, &Segments::default());
    }

    /// Counts out an answered request.
    pub(super) fn ended(&self, kept: usize) {
        if kept > 0 {
            self.device.disk().memory().give_back(kept as u64);
        }
        self.in_flight.set(self.in_flight.get() - 1);
        self.device.in_flight.fetch_sub(1, Relaxed);
        self.news.raise();
    }

    pub(super) fn refuse(&self, unique: u64, errno: i32) {
        self.reply(&Reply::error(unique, errno), &Segments::default());
    }

    /// Sends a reply with its data.
    pub(super) fn reply(&self, reply: &Reply, data: &Segments) {
        let sent = if data.as_slice().len() < MOST_PARTS {
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
                tracing::warn!(export = %self.device.export.id, %errno, "the kernel does not take a reply");
            }
        }
    }
}
