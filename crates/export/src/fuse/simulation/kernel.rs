//! The kernel's side of a FUSE device, in memory: a list of messages that any descriptor may read,
//! and requests with processes that wait for them.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    io::{IoSlice, IoSliceMut},
    rc::Rc,
};

use event_listener::Event;
use reactor::sim;
use rustix::io::Errno;

/// One descriptor of the device.
#[derive(Debug)]
pub(in crate::fuse) struct SimulatedFuseDescriptor {
    connection: Rc<SimulatedFuseConnection>,
    number: usize,
}

#[derive(Debug, Default)]
pub(in crate::fuse) struct SimulatedFuseConnection {
    messages: RefCell<VecDeque<Vec<u8>>>,
    requests: RefCell<HashMap<u64, WaitingFuseRequest>>,
    next_unique: Cell<u64>,
    descriptors: Cell<usize>,
    is_gone: Cell<bool>,
    /// Notified when a message was sent, and at an unmount.
    readable: Event,
    /// Notified when a request was answered.
    answered: Event,
}

#[derive(Debug)]
struct WaitingFuseRequest {
    /// The descriptor that it was read from.
    read_by: Option<usize>,
    answer: Option<Answer>,
}

/// An error number, or the body of the reply.
pub(in crate::fuse) type Answer = Result<Vec<u8>, i32>;

impl SimulatedFuseConnection {
    pub(in crate::fuse) fn descriptor(self: &Rc<Self>) -> SimulatedFuseDescriptor {
        let number = self.descriptors.get();
        self.descriptors.set(number + 1);
        SimulatedFuseDescriptor { connection: Rc::clone(self), number }
    }

    /// A descriptor that was passed to another process.
    pub(in crate::fuse) fn descriptor_with_number(self: &Rc<Self>, number: usize) -> SimulatedFuseDescriptor {
        SimulatedFuseDescriptor { connection: Rc::clone(self), number }
    }

    /// Sends a message; returns its unique number.
    pub(in crate::fuse) fn send(&self, opcode: u32, body: &[u8], data: &[u8], is_answered: bool) -> u64 {
        // Even, as the kernel's numbers are.
        let unique = self.next_unique.get() + 2;
        self.next_unique.set(unique);
        let length = 40 + body.len() + data.len();
        let mut message = Vec::with_capacity(length);
        message.extend((length as u32).to_ne_bytes());
        message.extend(opcode.to_ne_bytes());
        message.extend(unique.to_ne_bytes());
        message.resize(40, 0);
        message.extend(body);
        message.extend(data);
        if is_answered {
            let answer = self.is_gone.get().then_some(Err(libc::ENOTCONN));
            self.requests.borrow_mut().insert(unique, WaitingFuseRequest { read_by: None, answer });
        }
        self.send_raw(message);
        unique
    }

    /// Sends bytes without waiting for a reply.
    pub(in crate::fuse) fn send_raw(&self, message: Vec<u8>) {
        if self.is_gone.get() {
            return;
        }
        self.messages.borrow_mut().push_back(message);
        self.readable.notify(1);
    }

    /// Waits for the reply; `ENOTCONN` after an unmount.
    pub(in crate::fuse) async fn answer(&self, unique: u64) -> Answer {
        loop {
            let answered = self.answered.listen();
            let answer = self.requests.borrow_mut().get_mut(&unique).expect("it waits").answer.take();
            if let Some(answer) = answer {
                self.requests.borrow_mut().remove(&unique);
                return answer;
            }
            answered.await;
        }
    }

    /// Unmounts: drops all messages and fails all waiting requests.
    pub(in crate::fuse) fn unmount(&self) {
        self.is_gone.set(true);
        self.messages.borrow_mut().clear();
        for request in self.requests.borrow_mut().values_mut() {
            request.answer.get_or_insert(Err(libc::ENOTCONN));
        }
        self.readable.notify(usize::MAX);
        self.answered.notify(usize::MAX);
    }

    /// Number of requests that were read and not answered.
    pub(in crate::fuse) fn unanswered(&self) -> usize {
        let requests = self.requests.borrow();
        requests.values().filter(|request| request.read_by.is_some() && request.answer.is_none()).count()
    }

    fn note_reader(&self, message: &[u8], number: usize) {
        let unique = message.get(8..16).and_then(|bytes| bytes.try_into().ok()).map(u64::from_ne_bytes);
        if let Some(unique) = unique
            && let Some(request) = self.requests.borrow_mut().get_mut(&unique)
        {
            request.read_by = Some(number);
        }
    }
}

impl SimulatedFuseDescriptor {
    pub(in crate::fuse) fn receive(&self, buffers: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
        let connection = &self.connection;
        if connection.is_gone.get() {
            return Err(Errno::NODEV);
        }
        // Sometimes another descriptor has read the message first.
        let message = if sim::random(|random| random.u8(..10)) == 0 {
            None
        } else {
            connection.messages.borrow_mut().pop_front()
        };
        let Some(message) = message else {
            if !connection.messages.borrow().is_empty() {
                connection.readable.notify(1);
            }
            return Err(Errno::AGAIN);
        };
        connection.note_reader(&message, self.number);
        let mut rest = &message[..];
        for buffer in buffers {
            let (part, remaining) = rest.split_at(rest.len().min(buffer.len()));
            buffer[..part.len()].copy_from_slice(part);
            rest = remaining;
        }
        assert!(rest.is_empty(), "the kernel needs room for the longest message");
        Ok(message.len())
    }

    pub(in crate::fuse) fn reply(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        let reply: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
        let number =
            |range: std::ops::Range<usize>| u32::from_ne_bytes(reply[range].try_into().expect("four"));
        let unique = u64::from_ne_bytes(reply[8..16].try_into().expect("eight"));
        assert_eq!(number(0..4) as usize, reply.len(), "a reply says how long it is");
        let error = number(4..8) as i32;
        assert!(error <= 0 && error > -512, "{error} is no error number");
        if self.connection.is_gone.get() {
            return Err(Errno::NODEV);
        }
        let mut requests = self.connection.requests.borrow_mut();
        // As the kernel: a reply to an unknown or interrupted request fails with ENOENT.
        let Some(request) = requests.get_mut(&unique) else { return Err(Errno::NOENT) };
        assert_eq!(request.read_by, Some(self.number), "answered where it was not read");
        assert!(request.answer.is_none(), "answered twice");
        request.answer = Some(if error == 0 { Ok(reply[16..].to_vec()) } else { Err(-error) });
        drop(requests);
        self.connection.answered.notify(usize::MAX);
        Ok(())
    }

    pub(in crate::fuse) async fn readable(&self) {
        loop {
            let readable = self.connection.readable.listen();
            if self.connection.is_gone.get() || !self.connection.messages.borrow().is_empty() {
                return;
            }
            readable.await;
        }
    }
}
