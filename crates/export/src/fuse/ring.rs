//! Requests that come over io_uring, where the kernel has that switched on: entries that a request
//! comes to, and its reply goes from, with no system call for either.
//!
//! ```text
//!   registered ─► a request is there ─► arrived ─► taken, in hand ─► answered: committed ─┐
//!        ▲                                                                               │
//!        └───────────────────── its next request, or the end ◄───────────────────────────┘
//! ```
//!
//! INTERRUPT and FORGET go on coming by the device, and so does all else until the kernel has every
//! entry, or if it does not want them; so both are listened to.
//!
//! An entry cannot be taken back from the kernel: it ends with the file system or with the
//! reactor. Where a queue ends before, and somebody has the file open, its entries go on refusing
//! what is asked, as the kernel does where nobody serves ([`Ring::end`]).
//!
//! Never waits for a reply to be taken, and believes no length that the kernel says.

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, VecDeque},
    future::Future,
    io::{self, IoSlice, IoSliceMut},
    rc::Rc,
};

use reactor::{
    FuseRing, JoinHandle, Signal,
    op::{self, Fd},
};

use super::{
    message::{HEADER_BYTES, Reply},
    negotiate::MOST_BYTES,
};

/// Requests that the kernel's queues hold together, about; each has room for the longest, which is
/// memory only once it was used.
const ENTRIES: u16 = 64;
/// Of one queue: a client's usual depth, and some where there are many processors.
const MOST_DEPTH: u16 = 32;
const LEAST_DEPTH: u16 = 4;

/// `struct fuse_uring_req_header`: a message's header, or the reply's; what the operation says; and
/// what is said of the entry itself (flags, number, bytes of data).
const OPERATION_AT: usize = 128;
const OPERATION_BYTES: usize = 128;
const NUMBER_AT: usize = 256 + 8;
const DATA_BYTES_AT: usize = 256 + 16;
const REPLY_HEADER_BYTES: usize = 16;

/// The header of an entry that has a request.
pub(super) struct Head(pub(super) [u8; FuseRing::HEADER_BYTES]);

impl Head {
    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(std::array::from_fn(|byte| self.0[at + byte]))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_ne_bytes(std::array::from_fn(|byte| self.0[at + byte]))
    }

    /// What the request is answered by.
    pub(super) fn unique(&self) -> u64 {
        self.u64(8)
    }

    /// What the kernel knows the request by.
    fn number(&self) -> u64 {
        self.u64(NUMBER_AT)
    }

    /// The bytes of a message that stand in the header, and of its data; `None` where they do not
    /// make up as many as it says that it has.
    pub(super) fn parts(&self) -> Option<([&[u8]; 2], usize)> {
        let (all, data) = (self.u32(0) as usize, self.u32(DATA_BYTES_AT) as usize);
        let said = all.checked_sub(HEADER_BYTES)?.checked_sub(data)?;
        if said > OPERATION_BYTES || data > MOST_BYTES as usize {
            return None;
        }
        Some(([&self.0[..HEADER_BYTES], &self.0[OPERATION_AT..OPERATION_AT + said]], data))
    }
}

/// A request that was taken and has no answer.
struct InHand {
    entry: usize,
    number: u64,
}

pub(super) struct Ring {
    entries: FuseRing,
    /// Of them the kernel has, or had, so many.
    alive: Cell<usize>,
    device: Fd,
    arrived: RefCell<VecDeque<usize>>,
    /// By what they are answered by.
    in_hand: RefCell<HashMap<u64, InHand>>,
    /// Something may be read from the device.
    is_readable: Cell<bool>,
    was_read: Signal,
    news: Signal,
    /// Nobody takes anything any more.
    is_over: Cell<bool>,
    watching: RefCell<Option<JoinHandle<()>>>,
}

impl Ring {
    /// Gives the kernel all entries. It goes on without where that fails.
    ///
    /// # Errors
    /// There is no memory for them, or the kernel takes none.
    pub(super) async fn begin(device: &Fd) -> io::Result<Rc<Self>> {
        let entries = match FuseRing::new(device, depth, MOST_BYTES as usize) {
            Ok(entries) => entries,
            Err(error) => {
                FuseRing::decline(device).await;
                return Err(error);
            }
        };
        let this = Rc::new(Self {
            alive: Cell::new(entries.entries()),
            entries,
            device: device.clone(),
            arrived: RefCell::default(),
            in_hand: RefCell::default(),
            is_readable: Cell::new(true),
            was_read: Signal::default(),
            news: Signal::default(),
            is_over: Cell::new(false),
            watching: RefCell::default(),
        });
        for entry in 0..this.entries.entries() {
            this.go_on(entry, this.entries.register(entry));
        }
        // What the kernel refuses has come back by then: it is given in one turn, and told of in
        // the next.
        for _ in 0..2 {
            reactor::yield_now().await;
        }
        if this.alive.get() == 0 {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let watching = reactor::spawn_joinable(Rc::clone(&this).watch());
        *this.watching.borrow_mut() = Some(watching);
        Ok(this)
    }

    /// The next message that has come to an entry; how long it is. `None` if there is none.
    pub(super) fn receive(self: &Rc<Self>, places: &mut [IoSliceMut<'_>]) -> Option<usize> {
        loop {
            let entry = self.arrived.borrow_mut().pop_front()?;
            let head = self.head(entry);
            let (unique, number) = (head.unique(), head.number());
            if let Some((said, data)) = head.parts()
                && !self.in_hand.borrow().contains_key(&unique)
            {
                self.copy(entry, said, data, places);
                self.in_hand.borrow_mut().insert(unique, InHand { entry, number });
                return Some(said.iter().map(|part| part.len()).sum::<usize>() + data);
            }
            self.put_reply(entry, number, &[IoSlice::new(Reply::error(unique, libc::EINVAL).as_bytes())]);
        }
    }

    /// Whether the device is to be looked at.
    pub(super) fn is_readable(&self) -> bool {
        self.is_readable.get()
    }

    /// There is nothing more to read from the device for now.
    pub(super) fn was_read(&self) {
        self.is_readable.set(false);
        self.was_read.raise();
    }

    /// Answers a request; `false` if it has not come here.
    pub(super) fn reply(self: &Rc<Self>, parts: &[IoSlice<'_>]) -> bool {
        let head = parts.first().and_then(|head| head.get(8..REPLY_HEADER_BYTES));
        let unique = head.and_then(|unique| unique.try_into().ok()).map(u64::from_ne_bytes);
        let in_hand = unique.and_then(|unique| self.in_hand.borrow_mut().remove(&unique));
        let Some(InHand { entry, number }) = in_hand else { return false };
        self.put_reply(entry, number, parts);
        true
    }

    /// Waits until there may be a message, or none any more.
    pub(super) async fn readable(&self) {
        while self.arrived.borrow().is_empty() && !self.is_readable.get() {
            self.news.wait().await;
        }
    }

    /// Refuses whatever comes from now on. All that was taken has been answered.
    pub(super) async fn end(self: &Rc<Self>) {
        self.is_over.set(true);
        let waiting = std::mem::take(&mut *self.arrived.borrow_mut());
        waiting.into_iter().for_each(|entry| self.refuse(entry));
        let watching = self.watching.take();
        if let Some(watching) = watching {
            watching.cancel().await;
        }
    }

    /// Listens to the device.
    async fn watch(self: Rc<Self>) {
        loop {
            while self.is_readable.get() {
                self.was_read.wait().await;
            }
            // What went wrong shows in the read that follows.
            drop(op::readable_by_one(&self.device).await);
            self.is_readable.set(true);
            self.news.raise();
        }
    }

    /// Waits for an entry's next request.
    fn go_on(self: &Rc<Self>, entry: usize, next: impl Future<Output = io::Result<()>> + 'static) {
        let this = Rc::clone(self);
        reactor::spawn(async move {
            match next.await {
                Ok(()) if this.is_over.get() => this.refuse(entry),
                Ok(()) => {
                    this.arrived.borrow_mut().push_back(entry);
                    this.news.raise();
                }
                // The file system has gone, or is served without: the device says which.
                Err(error) => {
                    this.alive.set(this.alive.get() - 1);
                    tracing::trace!(entry, %error, "an entry of the ring has ended");
                }
            }
        });
    }

    /// As the kernel does where nobody serves.
    fn refuse(self: &Rc<Self>, entry: usize) {
        let head = self.head(entry);
        let reply = Reply::error(head.unique(), libc::ENOTCONN);
        self.put_reply(entry, head.number(), &[IoSlice::new(reply.as_bytes())]);
    }

    fn head(&self, entry: usize) -> Head {
        let mut head = Head([0; FuseRing::HEADER_BYTES]);
        self.entries.header(entry).read(0, &mut head.0);
        head
    }

    /// Copies a message, of which some stands in the header, one part behind the other.
    fn copy(&self, entry: usize, said: [&[u8]; 2], data: usize, places: &mut [IoSliceMut<'_>]) {
        let from = self.entries.data(entry, data);
        let [mut head, mut operation] = said;
        let mut copied = 0;
        for place in places {
            let mut rest = &mut place[..];
            for part in [&mut head, &mut operation] {
                let (here, after) = part.split_at(part.len().min(rest.len()));
                let (to, room) = rest.split_at_mut(here.len());
                to.copy_from_slice(here);
                (*part, rest) = (after, room);
            }
            let bytes = rest.len().min(data - copied);
            from.read(copied, &mut rest[..bytes]);
            copied += bytes;
        }
    }

    /// Puts a reply where the kernel takes it from, and has it taken.
    fn put_reply(self: &Rc<Self>, entry: usize, number: u64, parts: &[IoSlice<'_>]) {
        let Some((first, rest)) = parts.split_first() else { return };
        let (head, body) = first.split_at(REPLY_HEADER_BYTES);
        let bytes = body.len() + rest.iter().map(|part| part.len()).sum::<usize>();
        let header = self.entries.header(entry);
        header.write(0, head);
        header.write(DATA_BYTES_AT, &(bytes as u32).to_ne_bytes());
        // No more than was asked for, which is no more than there is room for.
        let data = self.entries.data(entry, bytes);
        let mut at = 0;
        for part in [body].into_iter().chain(rest.iter().map(|part| &part[..])) {
            data.write(at, part);
            at += part.len();
        }
        self.go_on(entry, self.entries.commit(entry, number));
    }
}

/// Entries of each of so many queues.
fn depth(queues: u16) -> u16 {
    (ENTRIES / queues.max(1)).clamp(LEAST_DEPTH, MOST_DEPTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(all: u32, data: u32) -> Head {
        let mut head = Head([0; FuseRing::HEADER_BYTES]);
        head.0[..4].copy_from_slice(&all.to_ne_bytes());
        head.0[8..16].copy_from_slice(&77_u64.to_ne_bytes());
        head.0[OPERATION_AT] = 5;
        head.0[NUMBER_AT..NUMBER_AT + 8].copy_from_slice(&78_u64.to_ne_bytes());
        head.0[DATA_BYTES_AT..DATA_BYTES_AT + 4].copy_from_slice(&data.to_ne_bytes());
        head
    }

    #[test]
    fn a_message_is_as_long_as_its_parts() {
        let write = head(80 + 4096, 4096);
        assert_eq!((write.unique(), write.number()), (77, 78));
        let ([header, operation], data) = write.parts().expect("a write of 4 KiB");
        assert_eq!((header.len(), operation.len(), operation[0], data), (40, 40, 5, 4096));
        let longest = head(80 + MOST_BYTES, MOST_BYTES);
        assert_eq!(longest.parts().map(|(_, data)| data), Some(MOST_BYTES as usize));
        for (all, data) in
            [(0, 0), (39, 0), (40, 1), (80, 4096), (40 + 129, 0), (u32::MAX, 0), (u32::MAX, u32::MAX)]
        {
            assert!(head(all, data).parts().is_none(), "{all} bytes with {data} of data");
        }
        assert!(head(80 + MOST_BYTES + 1, MOST_BYTES + 1).parts().is_none());
    }

    #[test]
    fn few_processors_have_many_entries_each_and_many_have_some() {
        assert_eq!([1, 2, 4, 8, 64, 512].map(depth), [32, 32, 16, 8, 4, 4]);
    }
}
