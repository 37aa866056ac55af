//! The driver in memory: requests that wait, tags that wait for a request or have one, processes
//! that start and end.
//!
//! Checks that each request is answered once, and only before it is committed.

use std::{
    cell::RefCell,
    collections::VecDeque,
    future::{Future, poll_fn},
    io,
    pin::Pin,
    rc::Rc,
    sync::{Arc, atomic::AtomicU64},
    task::{Poll, Waker},
};

use reactor::{
    guest::{GuestBytes, GuestMemory, Region},
    sim,
    ublk::{RegisteredData, UblkData, UblkDescriptor},
};

use super::super::channel::TagStep;

/// Result of a tag's next step.
pub(in super::super) type Next = Pin<Box<dyn Future<Output = io::Result<()>>>>;

/// A request until it is answered.
struct SimulatedUblkRequest {
    descriptor: UblkDescriptor,
    bytes: usize,
    /// Data of a write, which the kernel copies to the process; data of a read, copied from it.
    data: Vec<u8>,
    reads: bool,
    result: Option<i32>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct SimulatedUblkTag {
    is_fetched: bool,
    in_hand: Option<usize>,
    descriptor: UblkDescriptor,
    waker: Option<Waker>,
}

struct SimulatedUblkState {
    requests: Vec<SimulatedUblkRequest>,
    waiting: VecDeque<usize>,
    tags: Vec<SimulatedUblkTag>,
    memory: GuestMemory,
    max_request_bytes: usize,
    /// True with zero copy; the data of some requests is in no registered buffer nevertheless.
    is_zero_copy: bool,
    /// Number of processes before the current one.
    process: usize,
    is_stopped: bool,
    reissued: u64,
}

/// A device with one queue.
#[derive(Clone)]
pub(in super::super) struct SimulatedUblkDriver(Rc<RefCell<SimulatedUblkState>>);

/// The part of the device that a process sees.
pub(in super::super) struct SimulatedUblkChannel {
    state: Rc<RefCell<SimulatedUblkState>>,
    process: usize,
    /// Memory of this process, also after its end.
    memory: GuestMemory,
    max_request_bytes: usize,
    is_zero_copy: bool,
    copied: Arc<AtomicU64>,
}

impl std::fmt::Debug for SimulatedUblkChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Channel of process {}", self.process)
    }
}

impl SimulatedUblkDriver {
    pub(in super::super) fn new(depth: u16, max_request_bytes: usize, is_zero_copy: bool) -> Self {
        Self(Rc::new(RefCell::new(SimulatedUblkState {
            requests: Vec::new(),
            waiting: VecDeque::new(),
            tags: (0..depth).map(|_| SimulatedUblkTag::default()).collect(),
            memory: queue_memory(depth, max_request_bytes),
            max_request_bytes,
            is_zero_copy,
            process: 0,
            is_stopped: false,
            reissued: 0,
        })))
    }

    /// Channel for the next process, which counts copied bytes in `copied`.
    pub(in super::super) fn channel(&self, copied: &Arc<AtomicU64>) -> SimulatedUblkChannel {
        let SimulatedUblkState { process, memory, max_request_bytes: most_bytes, is_zero_copy, .. } =
            &*self.0.borrow();
        SimulatedUblkChannel {
            state: Rc::clone(&self.0),
            process: *process,
            memory: memory.clone(),
            max_request_bytes: *most_bytes,
            is_zero_copy: *is_zero_copy,
            copied: Arc::clone(copied),
        }
    }

    /// Sends a request; returns its result and the data that was read.
    pub(in super::super) async fn ask(
        &self,
        descriptor: UblkDescriptor,
        data: Vec<u8>,
        reads: usize,
    ) -> (i32, Vec<u8>) {
        let number = {
            let state = &mut *self.0.borrow_mut();
            let bytes = reads.max(data.len());
            let request =
                SimulatedUblkRequest { descriptor, bytes, data, reads: reads > 0, result: None, waker: None };
            state.requests.push(request);
            state.waiting.push_back(state.requests.len() - 1);
            state.requests.len() - 1
        };
        self.dispatch();
        poll_fn(|context| {
            let request = &mut self.0.borrow_mut().requests[number];
            let Some(result) = request.result else {
                request.waker = Some(context.waker().clone());
                return Poll::Pending;
            };
            Poll::Ready((result, std::mem::take(&mut request.data)))
        })
        .await
    }

    /// Ends the process at any point; its uncommitted requests are issued again to the next.
    pub(in super::super) fn end_process(&self) {
        let wakers = {
            let state = &mut *self.0.borrow_mut();
            state.process += 1;
            state.memory = queue_memory(state.tags.len() as u16, state.max_request_bytes);
            let mut wakers = Vec::new();
            // Reversed, because each is pushed to the front: the original order is kept.
            for tag in state.tags.iter_mut().rev() {
                let before = std::mem::take(tag);
                wakers.extend(before.waker);
                if let Some(number) = before.in_hand {
                    state.reissued += 1;
                    state.waiting.push_front(number);
                }
            }
            wakers
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Stops the device; no request may be uncommitted.
    pub(in super::super) fn stop(&self) {
        self.0.borrow_mut().is_stopped = true;
        assert!(self.0.borrow().tags.iter().all(|tag| tag.in_hand.is_none()), "stopped too early");
        self.end_process();
    }

    pub(in super::super) fn is_zero_copy(&self) -> bool {
        self.0.borrow().is_zero_copy
    }

    pub(in super::super) fn reissued(&self) -> u64 {
        self.0.borrow().reissued
    }

    /// Assigns waiting requests to fetched tags.
    fn dispatch(&self) {
        dispatch(&self.0);
    }
}

fn queue_memory(depth: u16, max_request_bytes: usize) -> GuestMemory {
    GuestMemory::new(vec![Region::on_heap(0, 0, usize::from(depth) * max_request_bytes)]).expect("one region")
}

fn dispatch(state: &RefCell<SimulatedUblkState>) {
    let mut wakers = Vec::new();
    {
        let state = &mut *state.borrow_mut();
        for (index, tag) in state.tags.iter_mut().enumerate() {
            if !tag.is_fetched || state.waiting.is_empty() {
                continue;
            }
            let number = state.waiting.pop_front().expect("there is one");
            let request = &state.requests[number];
            (tag.is_fetched, tag.in_hand, tag.descriptor) = (false, Some(number), request.descriptor);
            if !request.reads && !request.data.is_empty() {
                tag_buffer(&state.memory, state.max_request_bytes, index, request.bytes)
                    .write(0, &request.data);
            }
            wakers.extend(tag.waker.take());
        }
    }
    wakers.into_iter().for_each(Waker::wake);
}

fn tag_buffer(memory: &GuestMemory, max_request_bytes: usize, tag: usize, bytes: usize) -> GuestBytes {
    memory.range((tag * max_request_bytes) as u64, bytes).expect("inside")
}

impl SimulatedUblkChannel {
    pub(in super::super) fn descriptor(&self, tag: u16) -> UblkDescriptor {
        self.state.borrow().tags[usize::from(tag)].descriptor
    }

    pub(in super::super) fn is_zero_copy(&self) -> bool {
        self.is_zero_copy
    }

    pub(in super::super) fn data(&self, tag: u16, bytes: usize) -> UblkData {
        let buffer = tag_buffer(&self.memory, self.max_request_bytes, usize::from(tag), bytes);
        if !self.is_zero_copy {
            return UblkData::Copied(buffer);
        }
        let is_registered = sim::random(|random| random.u8(..8)) > 0;
        UblkData::Registered(RegisteredData::simulated(buffer, is_registered, &self.copied))
    }

    pub(in super::super) fn step(&self, tag: u16, step: TagStep) -> Next {
        let (state, process) = (Rc::clone(&self.state), self.process);
        if let TagStep::Commit(result) = step {
            self.commit(tag, result);
        }
        if self.is_there() {
            self.state.borrow_mut().tags[usize::from(tag)].is_fetched = true;
        }
        dispatch(&self.state);
        Box::pin(poll_fn(move |context| {
            let state = &mut *state.borrow_mut();
            if state.process != process {
                return Poll::Ready(Err(io::Error::from_raw_os_error(libc::ENODEV)));
            }
            let tag = &mut state.tags[usize::from(tag)];
            if tag.in_hand.is_some() {
                return Poll::Ready(Ok(()));
            }
            tag.waker = Some(context.waker().clone());
            Poll::Pending
        }))
    }

    fn is_there(&self) -> bool {
        let state = self.state.borrow();
        state.process == self.process && !state.is_stopped
    }

    fn commit(&self, tag: u16, result: i32) {
        if !self.is_there() {
            // A commit of an ended process is ignored.
            return;
        }
        let waker = {
            let state = &mut *self.state.borrow_mut();
            let in_hand = state.tags[usize::from(tag)].in_hand.take();
            let number = in_hand.expect("an answer to a request that is in hand");
            let request = &mut state.requests[number];
            assert!(request.result.is_none(), "answered twice");
            if request.reads && result > 0 {
                let buffer =
                    tag_buffer(&state.memory, state.max_request_bytes, usize::from(tag), request.bytes);
                request.data = vec![0; request.bytes];
                buffer.read(0, &mut request.data);
            }
            request.result = Some(result);
            request.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
