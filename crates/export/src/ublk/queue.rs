//! A queue of a device, on one worker from its start to its end.
//!
//! ```text
//!   a tag's next request ─► parse ─► arrived ─► news ─┐
//!                                                     ▼
//!   commit, and fetch ◄── answer ◄── disk ◄── merge ◄─ turn
//! ```
//!
//! Every tag is fetched all the time, but for the requests in hand. What arrives in one turn of the
//! reactor is planned together, so adjacent requests become one I/O.
//!
//! A queue ends when the kernel has taken all tags back, or when it is left: then nothing more is
//! begun, and what has not begun stays the kernel's. It comes to rest in between: what has begun is
//! answered, and all else waits, until it goes on or its process ends.

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
use policy::merge::{Candidate, Operation};

use super::{
    channel::{Channel, Step},
    device::{Device, Parting},
    request::{Kind, Request, parse},
};
use crate::intake::{Intake, Mergeable};
use block::disk::Patience;
use reactor::{Launcher, Signal};
use storage::Durability;

/// A request in hand.
pub(super) struct Incoming {
    pub(super) tag: u16,
    pub(super) request: Request,
    /// Its data stays where it is, and goes alone: an I/O names one buffer.
    is_alone: bool,
}

impl Mergeable for Incoming {
    fn candidate(&self) -> Candidate {
        let Request { kind, offset, bytes } = self.request;
        match kind {
            _ if self.is_alone => Candidate { operation: Operation::Barrier, offset: 0, length: 0, key: 0 },
            Kind::Read => Candidate { operation: Operation::Read, offset, length: bytes, key: 0 },
            Kind::Write(durability) => {
                let key = u32::from(durability == Durability::Synchronous);
                Candidate { operation: Operation::Write, offset, length: bytes, key }
            }
            _ => Candidate { operation: Operation::Barrier, offset: 0, length: 0, key: 0 },
        }
    }
}

pub(super) struct Queue {
    pub(super) device: Arc<Device>,
    pub(super) channel: Channel,
    depth: u16,
    arrived: RefCell<Intake<Incoming>>,
    news: Signal,
    /// Requests in hand.
    in_flight: Cell<u64>,
    /// Tags that the kernel has not taken back.
    tags: Cell<u16>,
    /// What it said of the first that it has.
    over: Cell<Option<io::Error>>,
    leaving: Cell<bool>,
    resting: Cell<bool>,
    /// For those that wait for their limits.
    pub(super) leave: Event,
    pub(super) patience: Arc<Patience>,
}

impl Queue {
    pub(super) fn new(channel: Channel, depth: u16, device: Arc<Device>) -> Rc<Self> {
        Rc::new(Self {
            device,
            channel,
            depth,
            arrived: RefCell::default(),
            news: Signal::default(),
            in_flight: Cell::new(0),
            tags: Cell::new(depth),
            over: Cell::new(None),
            leaving: Cell::new(false),
            resting: Cell::new(false),
            leave: Event::new(),
            patience: Arc::default(),
        })
    }

    /// Asks for the first request of every tag.
    ///
    /// # Errors
    /// The kernel does not give any.
    pub(super) async fn begin(self: &Rc<Self>) -> io::Result<()> {
        for tag in 0..self.depth {
            self.go_on(tag, Step::Fetch);
        }
        self.channel.begun().await?;
        // What was refused has been told by now.
        reactor::yield_now().await;
        self.over.take().map_or(Ok(()), Err)
    }

    /// Serves until the device has stopped, or is left.
    pub(super) async fn serve(self: Rc<Self>) {
        let watching = reactor::spawn_joinable(Rc::clone(&self).watch());
        let mut launcher = Launcher::new();
        let mut taken = Intake::default();
        while !self.is_over() {
            if self.resting.get() {
                self.rest().await;
                continue;
            }
            // What is carried out at once may bring the next.
            std::mem::swap(&mut taken, &mut *self.arrived.borrow_mut());
            self.start(&mut taken, &mut launcher, Self::carry_out);
            self.news.wait().await;
        }
        watching.cancel().await;
    }

    /// Until it is to go on.
    async fn rest(&self) {
        while self.resting.get() && self.in_flight.get() > self.waiting() {
            self.news.wait().await;
        }
        // What was answered, the kernel knows by then.
        let submitted = self.channel.begun().await;
        if !self.resting.get() || submitted.is_err() {
            return;
        }
        self.device.at_rest.fetch_add(1, SeqCst);
        self.device.changed.notify(usize::MAX);
        while self.resting.get() {
            self.news.wait().await;
        }
        self.device.at_rest.fetch_sub(1, SeqCst);
    }

    /// Requests in hand that have not begun.
    fn waiting(&self) -> u64 {
        self.arrived.borrow().len() as u64
    }

    fn is_over(&self) -> bool {
        self.in_flight.get() == 0 && (self.tags.get() == 0 || self.leaving.get())
    }

    fn start<F: Future<Output = ()> + 'static>(
        self: &Rc<Self>,
        taken: &mut Intake<Incoming>,
        launcher: &mut Launcher<F>,
        carry_out: impl Fn(Rc<Self>, Incoming) -> F,
    ) {
        taken.start(
            launcher,
            |only| carry_out(Rc::clone(self), only),
            |parts| Rc::clone(self).read_merged(parts),
            |parts| Rc::clone(self).write_merged(parts),
        );
    }

    /// Does as the export is told to.
    async fn watch(self: Rc<Self>) {
        loop {
            let changed = self.device.changed.listen();
            if self.device.parts(Parting::Stop) {
                self.patience.lose();
            }
            if self.device.parts(Parting::Leave) && !self.leaving.replace(true) {
                self.patience.lose();
                self.leave.notify(usize::MAX);
                let waiting = std::mem::take(self.arrived.borrow_mut().all());
                waiting.iter().for_each(|_| self.forget());
                self.news.raise();
            }
            let resting = self.device.is_resting();
            if self.resting.replace(resting) != resting {
                self.leave.notify(usize::MAX);
                self.news.raise();
            }
            changed.await;
        }
    }

    /// Takes a step with a tag, and waits for its next request.
    fn go_on(self: &Rc<Self>, tag: u16, step: Step) {
        let next = self.channel.step(tag, step);
        let this = Rc::clone(self);
        reactor::spawn(async move {
            match next.await {
                Ok(()) => this.arrive(tag),
                Err(why) => {
                    this.tags.set(this.tags.get() - 1);
                    this.over.set(this.over.take().or(Some(why)));
                    this.news.raise();
                }
            }
        });
    }

    fn arrive(&self, tag: u16) {
        if self.leaving.get() {
            // Whoever takes the device over is given it.
            return;
        }
        let request = parse(self.channel.descriptor(tag), &self.device.rules());
        let is_alone = self.channel.is_zero_copy();
        self.arrived.borrow_mut().push(Incoming { tag, request, is_alone });
        self.in_flight.set(self.in_flight.get() + 1);
        self.device.count(1);
        self.news.raise();
    }

    /// Answers a request, and asks for the next.
    pub(super) fn commit(self: &Rc<Self>, tag: u16, result: i32) {
        self.go_on(tag, Step::Commit(result));
        self.forget();
    }

    /// A request that waits for its limits does not begin now.
    pub(super) fn put_off(&self, incoming: Incoming) {
        if self.leaving.get() {
            return self.forget();
        }
        self.arrived.borrow_mut().push(incoming);
        self.news.raise();
    }

    /// A request is left to whoever takes the device over.
    pub(super) fn forget(&self) {
        self.in_flight.set(self.in_flight.get() - 1);
        self.device.in_flight.fetch_sub(1, Relaxed);
        if self.is_over() || self.resting.get() {
            self.news.raise();
        }
    }

    /// Whether nothing is to begin.
    pub(super) fn holds_back(&self) -> bool {
        self.leaving.get() || self.resting.get()
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.get()
    }
}
