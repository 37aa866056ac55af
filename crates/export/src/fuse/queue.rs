//! A queue: one descriptor of the FUSE device on one worker, from which messages are taken and to
//! which replies go.
//!
//! ```text
//!   readable ─► take: read ─► parse ─► merge ─► tasks, one an I/O ─► disk ─► reply
//!      ▲           until there is none,  │
//!      │           or enough is in flight└─► what needs no I/O is answered at once
//!      └─────────────── sleep
//! ```
//!
//! All queues of an export take from one list of the kernel's; each reply goes where its request
//! came from. What is in flight is bounded: past it nothing is taken, and processes wait.
//!
//! A queue comes to rest where another process may go on: what has begun is answered, what waits
//! for its limits is put back, and nothing more is taken.

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

/// Requests that are taken in one go, so that completions are not kept waiting for long.
const MOST_TAKEN: usize = 64;
/// Requests in flight in one queue.
const MOST_REQUESTS: usize = 512;
/// Parts of a reply that the kernel takes; a reply has few.
const MOST_PARTS: usize = 512;

/// Why a queue came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It was told to.
    Stopped,
    /// The file system was unmounted, or its connection was cut.
    Gone,
    /// The device failed.
    Failed(Errno),
}

pub(super) struct Queue {
    pub(super) device: Arc<Device>,
    channel: Channel,
    /// Of all queues of the process.
    number: usize,
    in_flight: Cell<usize>,
    /// Its share of the disk's memory while requests wait for it.
    flow: MemoryFlow,
    /// Requests that did not begin when it came to rest.
    put_back: RefCell<Vec<Incoming>>,
    /// One request less is in flight.
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

    /// Serves until the device is stopped, or has gone; nothing is in flight then.
    pub(super) async fn serve(self: Rc<Self>) -> Ended {
        let ended = self.run().await;
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
            // Also those that came before the end.
            self.start(&mut intake, &mut launcher, Self::carry_out);
            match taken {
                Err(NoMessage::Ever) => return Ended::Gone,
                Err(NoMessage::Failed(errno)) => return Ended::Failed(errno),
                // However much there is to do here, others have their turn.
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

    /// Until it is to go on, or stops. Requests that were put back are taken in again then.
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
                self.device.lie_down(self.number, messages);
            }
            first(self.news.wait(), changed).await;
        }
        self.device.get_up(self.number);
        for incoming in self.put_back.take() {
            self.take_in(incoming, intake).await;
        }
    }

    /// A request that has not begun, and is not to begin now.
    pub(super) fn put_back(&self, incoming: Incoming) {
        let kept = incoming.kept;
        self.put_back.borrow_mut().push(incoming);
        self.ended(kept);
    }

    fn has_room(&self) -> bool {
        self.in_flight.get() < MOST_REQUESTS
    }

    /// Takes what there is; how many.
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
            // A disk of one size keeps it, and what is in it, as a block device does.
            Operation::Open { flags } if flags & libc::O_TRUNC as u32 != 0 && self.device.export.growable => {
                (0, Work::Other(operation))
            }
            Operation::Interrupt { of } => {
                // It may be the last that was taken.
                self.start_as_tasks(intake);
                return self.device.interrupts.interrupt(of);
            }
            _ => return self.answer_at_once(unique, operation),
        };
        self.take_in(Incoming { unique, kept, work }, intake).await;
    }

    /// A message that another process has taken.
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
        // The kernel appends where it believes the end to be; what it writes back has a place.
        let appends = has(libc::O_APPEND) && !cached;
        let end = offset.checked_add(data.len() as u64);
        if !appends && end.is_some_and(|end| end <= self.device.file_bytes()) {
            return Work::Write { offset, data, durability };
        }
        // What is mapped has an end, which may have been cut off meanwhile.
        let may_grow = self.device.export.growable && !cached;
        Work::Extend { offset: (!appends).then_some(offset), data, durability, may_grow }
    }

    /// Waits for memory; what was taken before does not wait. `false` if the device stops or comes
    /// to rest meanwhile.
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

    /// What takes no I/O.
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
            // INIT a second time.
            Operation::Init(_) => Reply::error(unique, libc::EIO),
            _ => Reply::error(unique, libc::ENOSYS),
        };
        self.reply(&reply, &Segments::default());
    }

    /// A request has been answered.
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
            // Whoever asked has gone, or the whole device.
            Ok(()) | Err(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED) => {}
            Err(errno) => {
                tracing::warn!(export = %self.device.export.id, %errno, "the kernel does not take a reply");
            }
        }
    }
}
