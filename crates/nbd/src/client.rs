//! An NBD client: the other half of the protocol, so that what a server has can be a disk here, and
//! so that a server can be measured as its clients see it.
//!
//! ```text
//!   read, write, flush ──► outgoing ──► sender ───► stream
//!          ▲                                          │
//!          └─────── woken by its cookie ◄── receiver ◄┘
//! ```
//!
//! One connection, as many requests in flight as there are callers. What callers ask for between
//! two sends goes out in one message. Replies come in any order, simple or structured, and find
//! their request by its cookie.
//!
//! The server is not trusted: a length is never more than what was asked for, a cookie that was not
//! sent, or any other breach of the protocol, ends the connection, and whatever is in flight then
//! fails. There is no bound on how long a request may take: a disk may be slow. Whoever has waited
//! long enough drops the request, or the client.
//!
//! Never connects again by itself, and never asks for extended headers.

mod connect;
mod handshake;
mod list;
mod outgoing;
mod pieces;
mod reply;

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    rc::Rc,
    task::{Poll, Waker},
};

use async_channel::Receiver;
use policy::time::Duration;
use slab::Slab;

pub use self::{
    connect::{Address, Endpoint, Established, addresses, connect, dial_any, shake_hands, within},
    handshake::{About, NotConnected, Wanted},
    list::{Listed, list},
};
use self::{
    outgoing::Outgoing,
    pieces::Pieces,
    reply::{Chunk, EXTENT_BYTES, Header, Longest},
};
use super::{
    inbox::Inbox,
    proto::{self, cmd, cmd_flag},
    stream::Stream,
    wire::Fields,
};
use reactor::{
    JoinHandle, Signal,
    buffer::{Buffer, Segments},
    error::{Error, Result},
    spawn_joinable, timeout,
};

/// What requests fail with once the connection is gone; [`Client::fault`] says why it is.
pub const GONE: Error = Error::from_errno(libc::ENOTCONN);

/// Errors that one reply may tell: one for each part of a large request.
const MOST_ERRORS: u32 = 1024;

/// Extents that are kept of one answer; a server may send many more.
const MOST_EXTENTS: usize = 1024;

const FAREWELL: Duration = Duration::from_secs(1);

/// A connection to an export, on the reactor it was made on; dropping it ends the connection.
#[derive(Debug)]
pub struct Client {
    connection: Open,
    sender: JoinHandle<()>,
    /// What the task that receives leaves as it ends. Nobody holds that task: so it goes with its
    /// reactor, and takes the connection with it.
    left: Receiver<Inbox>,
}

/// Held, the connection is open.
#[derive(Debug)]
struct Open(Option<Rc<Connection>>);

impl Open {
    /// Leaves it open.
    fn taken(mut self) -> Rc<Connection> {
        self.0.take().expect("only this takes it")
    }
}

impl std::ops::Deref for Open {
    type Target = Rc<Connection>;

    fn deref(&self) -> &Rc<Connection> {
        self.0.as_ref().expect("it is taken at its end")
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            connection.stream.close();
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("the server has closed the connection")]
    Closed,
    #[error("the connection broke: {0}")]
    Broken(#[from] io::Error),
    #[error("the server broke the protocol: {0}")]
    Breach(&'static str),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the thread that had the connection has ended")]
    Ended,
}

type Taken<T> = std::result::Result<T, Fault>;

#[derive(Debug)]
struct Connection {
    stream: Stream,
    about: About,
    in_flight: RefCell<Slab<InFlight>>,
    /// Tells successive requests in one slot of the slab apart.
    sequence: Cell<u32>,
    outgoing: RefCell<Outgoing>,
    something_to_send: Signal,
    leaving: Cell<bool>,
    /// Whoever has the connection goes on with it elsewhere.
    retiring: Cell<bool>,
    fault: RefCell<Option<Fault>>,
    /// Who waits for the connection to be gone.
    watching: RefCell<Option<Waker>>,
}

#[derive(Debug)]
struct InFlight {
    cookie: u64,
    expects: Expects,
    error: Option<Error>,
    errors: u32,
    answered: bool,
    /// Nobody waits for the answer, which comes all the same.
    abandoned: bool,
    waiting: Option<Waker>,
}

/// What a reply brings, and what there is of it.
#[derive(Debug)]
enum Expects {
    Nothing,
    Data(Read),
    Extents { asked: u32, found: Vec<RawExtent> },
}

/// A run of an export that is alike: its length in bytes, never 0, and the flags that the server
/// has for it (`proto::state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawExtent {
    /// Bytes; the last of an answer may reach past what was asked about.
    pub length: u32,
    /// Of the context `base:allocation`.
    pub flags: u32,
}

#[derive(Debug)]
struct Read {
    offset: u64,
    length: usize,
    pieces: Pieces,
    data: Option<Buffer>,
}

impl Client {
    /// Goes on after the handshake, on this thread.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn start(established: Established) -> Self {
        let (stream, about, inbox) = established.taken();
        let connection = Rc::new(Connection {
            stream,
            about,
            in_flight: RefCell::default(),
            sequence: Cell::new(0),
            outgoing: RefCell::default(),
            something_to_send: Signal::default(),
            leaving: Cell::new(false),
            retiring: Cell::new(false),
            fault: RefCell::default(),
            watching: RefCell::default(),
        });
        let sender = spawn_joinable(Rc::clone(&connection).send());
        let (leave, left) = async_channel::bounded(1);
        let receiving = Rc::clone(&connection);
        spawn_joinable(async move {
            let inbox = receiving.receive(inbox).await;
            // Nobody waits for it where the connection is gone.
            let _ = leave.try_send(inbox);
        })
        .detach();
        Self { connection: Open(Some(connection)), sender, left }
    }

    /// What the server said of the export.
    pub fn about(&self) -> &About {
        &self.connection.about
    }

    /// Why the connection is gone.
    pub fn fault(&self) -> Option<String> {
        self.connection.fault.borrow().as_ref().map(ToString::to_string)
    }

    /// Whether no request waits for its answer.
    pub fn is_idle(&self) -> bool {
        self.connection.in_flight.borrow().is_empty()
    }

    /// Returns once the connection is gone. For one task at a time.
    pub async fn gone(&self) {
        poll_fn(|context| {
            if self.connection.fault.borrow().is_some() {
                return Poll::Ready(());
            }
            *self.connection.watching.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Reads `length` bytes at `offset`.
    ///
    /// # Errors
    /// The server's, or [`GONE`]; [`Error::INVALID`] for more than [`About::maximum_payload`].
    pub async fn read(&self, offset: u64, length: usize) -> Result<Buffer> {
        let read = Read { offset, length, pieces: Pieces::default(), data: None };
        let ask = Ask { command: cmd::READ, flags: 0, offset, length };
        match self.connection.request(ask, Expects::Data(read), None).await? {
            Expects::Data(Read { data: Some(data), .. }) => Ok(data),
            _ => Err(Error::IO),
        }
    }

    /// Writes `data` at `offset`; with `force` it is durable once answered, and else when it is
    /// flushed. `force` only where [`About::can_force`].
    ///
    /// # Errors
    /// As for reads; [`Error::NOT_PERMITTED`], without asking, where the export is read-only.
    pub async fn write(&self, offset: u64, data: Segments, force: bool) -> Result<()> {
        let flags = if force { cmd_flag::FUA } else { 0 };
        self.change(Ask { command: cmd::WRITE, flags, offset, length: data.len() }, Some(data)).await
    }

    /// Makes a range zero, of any length that fits 32 bits. `flags` are the command's
    /// (`proto::cmd_flag`). Only where [`About::can_zero`].
    ///
    /// # Errors
    /// As for writes.
    pub async fn write_zeroes(&self, offset: u64, length: u32, flags: u16) -> Result<()> {
        self.change(Ask { command: cmd::WRITE_ZEROES, flags, offset, length: length as usize }, None).await
    }

    /// Says that a range is not needed any more. Only where [`About::can_trim`].
    ///
    /// # Errors
    /// As for writes.
    pub async fn trim(&self, offset: u64, length: u32) -> Result<()> {
        self.change(Ask { command: cmd::TRIM, flags: 0, offset, length: length as usize }, None).await
    }

    /// What a range is made of, from its beginning on: at least one extent, perhaps not to its
    /// end. Only where [`About::tells_allocation`].
    ///
    /// # Errors
    /// The server's, or [`GONE`].
    pub async fn extents(&self, offset: u64, length: u32) -> Result<Vec<RawExtent>> {
        let ask = Ask { command: cmd::BLOCK_STATUS, flags: 0, offset, length: length as usize };
        let expects = Expects::Extents { asked: length, found: Vec::new() };
        match self.connection.request(ask, expects, None).await? {
            Expects::Extents { found, .. } => Ok(found),
            _ => Err(Error::IO),
        }
    }

    async fn change(&self, ask: Ask, payload: Option<Segments>) -> Result<()> {
        if self.about().is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        self.connection.request(ask, Expects::Nothing, payload).await.map(drop)
    }

    /// Makes what was answered durable. Where the server knows no flush there is nothing to do.
    ///
    /// # Errors
    /// The server's, or [`GONE`].
    pub async fn flush(&self) -> Result<()> {
        if !self.about().can_flush() {
            return Ok(());
        }
        let ask = Ask { command: cmd::FLUSH, flags: 0, offset: 0, length: 0 };
        self.connection.request(ask, Expects::Nothing, None).await.map(drop)
    }

    /// Takes leave, and waits up to a second for that to be sent, but not for requests in flight.
    pub async fn disconnect(self) {
        let Self { connection, sender, left: _left } = self;
        connection.outgoing.borrow_mut().push(cmd::DISC, 0, 0, 0, 0, None);
        connection.leaving.set(true);
        connection.something_to_send.raise();
        let _ = timeout(FAREWELL, sender).await;
    }

    /// Leaves the conversation as it is, for another thread to go on with. Whoever calls this has
    /// seen to it that no request is in flight, and that none comes; `None` if the connection is
    /// gone.
    pub async fn retire(self) -> Option<Established> {
        let Self { connection, sender, left } = self;
        connection.retiring.set(true);
        connection.something_to_send.raise();
        sender.await;
        connection.stream.interrupt();
        let mut inbox = left.recv().await.ok()?;
        if connection.fault.borrow().is_some() {
            return None;
        }
        let (unfinished, behind, skip) = inbox.rest();
        let Connection { stream, about, .. } = Rc::try_unwrap(connection.taken()).ok()?;
        // The server says nothing of its own, so there is nothing, or it breaks the protocol.
        (unfinished.is_empty() && skip == 0).then_some(Established { stream, about, behind })
    }
}

/// A request's header.
struct Ask {
    command: u16,
    flags: u16,
    offset: u64,
    length: usize,
}

/// Fails what is in flight if the reactor ends.
struct Ending(Rc<Connection>);

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.0.retiring.get() {
            self.0.lose(Fault::Ended);
        }
    }
}

impl Connection {
    async fn request(&self, ask: Ask, expects: Expects, payload: Option<Segments>) -> Result<Expects> {
        if self.fault.borrow().is_some() {
            return Err(GONE);
        }
        let Ask { command, flags, offset, length } = ask;
        let most = match command {
            cmd::READ | cmd::WRITE => self.about.maximum_payload,
            _ => u32::MAX,
        };
        let length = u32::try_from(length).ok().filter(|&length| length <= most).ok_or(Error::INVALID)?;
        let ticket = self.enter(expects);
        self.outgoing.borrow_mut().push(command, flags, ticket.cookie, offset, length, payload);
        self.something_to_send.raise();
        ticket.answer().await
    }

    fn enter(&self, expects: Expects) -> Ticket<'_> {
        let mut in_flight = self.in_flight.borrow_mut();
        let entry = in_flight.vacant_entry();
        let key = entry.key();
        let sequence = self.sequence.replace(self.sequence.get().wrapping_add(1));
        let cookie = u64::from(sequence) << 32 | key as u64;
        entry.insert(InFlight {
            cookie,
            expects,
            error: None,
            errors: 0,
            answered: false,
            abandoned: false,
            waiting: None,
        });
        Ticket { connection: self, key, cookie }
    }

    async fn send(self: Rc<Self>) {
        loop {
            let batch = self.outgoing.borrow_mut().take();
            match batch {
                Some(batch) => {
                    if let Err(error) = self.stream.send_now(batch).await {
                        self.stream.close();
                        self.lose(error.into());
                        return;
                    }
                }
                None if self.leaving.get() || self.retiring.get() => return,
                None if self.fault.borrow().is_some() => return,
                None => self.something_to_send.wait().await,
            }
        }
    }

    async fn receive(self: Rc<Self>, mut inbox: Inbox) -> Inbox {
        let ending = Ending(Rc::clone(&self));
        let fault = loop {
            match self.reply(&mut inbox).await {
                Ok(()) => {}
                // Interrupted by us, and nothing of a reply has come.
                Err(Fault::Broken(error))
                    if self.retiring.get() && error.raw_os_error() == Some(libc::ECANCELED) =>
                {
                    drop(ending);
                    return inbox;
                }
                Err(fault) => break fault,
            }
        };
        self.stream.close();
        self.lose(fault);
        self.something_to_send.raise();
        inbox
    }

    /// Fails everything that is in flight; the first reason counts.
    fn lose(&self, fault: Fault) {
        self.fault.borrow_mut().get_or_insert(fault);
        let waiting: Vec<Waker> =
            self.in_flight.borrow_mut().iter_mut().filter_map(|(_, entry)| entry.waiting.take()).collect();
        let watching = self.watching.borrow_mut().take();
        waiting.into_iter().chain(watching).for_each(Waker::wake);
    }

    /// One reply, or one chunk of one.
    async fn reply(&self, inbox: &mut Inbox) -> Taken<()> {
        let (header, length) = loop {
            let longest = |cookie| self.longest(cookie);
            match reply::parse(inbox.bytes(), self.about.structured, longest).map_err(Fault::Breach)? {
                Some(found) => break found,
                None if inbox.fill(&self.stream).await? => {}
                None => return Err(Fault::Closed),
            }
        };
        inbox.consume(length);
        match header {
            Header::Simple { cookie, error: 0 } => {
                let key = self.find(cookie)?;
                let length = match &self.in_flight.borrow()[key].expects {
                    Expects::Data(read) => Some(read.length),
                    Expects::Nothing => None,
                    Expects::Extents { .. } => {
                        return Err(Fault::Breach("a simple reply to what has extents for an answer"));
                    }
                };
                if let Some(length) = length {
                    if self.about.structured {
                        return Err(Fault::Breach(
                            "a simple reply to a read, after structured ones were agreed on",
                        ));
                    }
                    let data = inbox.payload(length, &self.stream).await?;
                    self.cover(key, 0, data)?;
                }
                self.finish(key)
            }
            Header::Simple { cookie, error } => {
                let key = self.find(cookie)?;
                self.fail(key, error)?;
                self.finish(key)
            }
            Header::Chunk { cookie, last, chunk } => self.chunk(inbox, cookie, last, chunk).await,
        }
    }

    async fn chunk(&self, inbox: &mut Inbox, cookie: u64, last: bool, chunk: Chunk) -> Taken<()> {
        let key = self.find(cookie)?;
        match chunk {
            Chunk::None => {}
            Chunk::Data { offset, length } => {
                let at = self.place(key, offset, length)?;
                let data = inbox.payload(length, &self.stream).await?;
                self.cover(key, at, data)?;
            }
            Chunk::Hole { offset, length } => {
                let at = self.place(key, offset, length)?;
                self.cover(key, at, Buffer::zeroed(length))?;
            }
            Chunk::Error { error, rest } => {
                self.fail(key, error)?;
                inbox.skip(rest, &self.stream).await?;
            }
            Chunk::Status { context, length } => self.extents(inbox, key, context, length).await?,
        }
        if last { self.finish(key) } else { Ok(()) }
    }

    async fn extents(&self, inbox: &mut Inbox, key: usize, context: u32, length: usize) -> Taken<()> {
        let asked = match &self.in_flight.borrow()[key].expects {
            Expects::Extents { asked, found }
                if found.is_empty() && Some(context) == self.about.allocation =>
            {
                *asked
            }
            Expects::Extents { .. } => {
                return Err(Fault::Breach("extents twice, or of a context that was not agreed on"));
            }
            _ => return Err(Fault::Breach("extents in a reply to a request other than block status")),
        };
        let kept = length.min(MOST_EXTENTS * EXTENT_BYTES);
        let bytes = inbox.payload(kept, &self.stream).await?;
        inbox.skip(length - kept, &self.stream).await?;
        let mut found = Vec::with_capacity(kept / EXTENT_BYTES);
        let mut fields = Fields::new(&bytes);
        while let Some((length, flags)) = fields.u32().zip(fields.u32()) {
            if length == 0 {
                return Err(Fault::Breach("an extent without a length"));
            }
            found.push(RawExtent { length, flags });
        }
        self.in_flight.borrow_mut()[key].expects = Expects::Extents { asked, found };
        Ok(())
    }

    fn find(&self, cookie: u64) -> Taken<usize> {
        self.key_of(cookie).map_err(Fault::Breach)
    }

    fn key_of(&self, cookie: u64) -> std::result::Result<usize, &'static str> {
        // The lower half is a place in the slab.
        let key = (cookie & u64::from(u32::MAX)) as usize;
        let in_flight = self.in_flight.borrow();
        let found = in_flight.get(key).is_some_and(|entry| entry.cookie == cookie && !entry.answered);
        if found { Ok(key) } else { Err("a reply to a request that was not sent") }
    }

    /// The longest chunks that the answer to a request in flight can have.
    fn longest(&self, cookie: u64) -> std::result::Result<Longest, &'static str> {
        let key = self.key_of(cookie)?;
        Ok(match &self.in_flight.borrow()[key].expects {
            Expects::Nothing => Longest::default(),
            Expects::Data(read) => Longest { data: read.length, extents: 0 },
            Expects::Extents { asked, .. } => Longest { data: 0, extents: *asked as usize },
        })
    }

    /// Where in a read's buffer a chunk belongs.
    fn place(&self, key: usize, offset: u64, length: usize) -> Taken<usize> {
        let in_flight = self.in_flight.borrow();
        let Expects::Data(read) = &in_flight[key].expects else {
            return Err(Fault::Breach("data in a reply to a request other than a read"));
        };
        let at = offset.checked_sub(read.offset).and_then(|at| usize::try_from(at).ok());
        let fits = at.filter(|&at| at <= read.length && length <= read.length - at);
        fits.ok_or(Fault::Breach("more data than was asked for"))
    }

    /// Puts data into a read's buffer, where it fits; a whole one becomes the buffer.
    fn cover(&self, key: usize, at: usize, data: Buffer) -> Taken<()> {
        let mut in_flight = self.in_flight.borrow_mut();
        let Expects::Data(read) = &mut in_flight[key].expects else {
            return Err(Fault::Breach("data in a reply to a request other than a read"));
        };
        read.pieces.add(at..at + data.len()).map_err(Fault::Breach)?;
        if data.len() == read.length {
            read.data = Some(data);
        } else {
            let whole = read.data.get_or_insert_with(|| Buffer::zeroed(read.length));
            whole[at..at + data.len()].copy_from_slice(&data);
        }
        Ok(())
    }

    fn fail(&self, key: usize, error: u32) -> Taken<()> {
        let error = Error::from_errno(proto::to_linux(error));
        // Such a server waits for its clients to leave ("Error values"), and answers nothing else.
        if error == Error::SHUTDOWN {
            return Err(Fault::ShuttingDown);
        }
        let entry = &mut self.in_flight.borrow_mut()[key];
        entry.error.get_or_insert(error);
        entry.errors += 1;
        if entry.errors > MOST_ERRORS {
            Err(Fault::Breach("more errors than one reply can have"))
        } else {
            Ok(())
        }
    }

    fn finish(&self, key: usize) -> Taken<()> {
        let mut in_flight = self.in_flight.borrow_mut();
        let entry = &mut in_flight[key];
        let is_whole = match &entry.expects {
            Expects::Nothing => true,
            Expects::Data(read) => read.pieces.are_all_of(read.length),
            Expects::Extents { found, .. } => !found.is_empty(),
        };
        if entry.error.is_none() && !is_whole {
            return Err(Fault::Breach("less data than was asked for"));
        }
        entry.answered = true;
        let waiting = entry.waiting.take();
        if entry.abandoned {
            in_flight.remove(key);
        }
        drop(in_flight);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
        Ok(())
    }
}

/// The right to a request's answer.
struct Ticket<'a> {
    connection: &'a Connection,
    key: usize,
    cookie: u64,
}

impl Ticket<'_> {
    async fn answer(self) -> Result<Expects> {
        poll_fn(|context| {
            let mut in_flight = self.connection.in_flight.borrow_mut();
            let entry = &mut in_flight[self.key];
            if entry.answered {
                let answer = std::mem::replace(&mut entry.expects, Expects::Nothing);
                return Poll::Ready(entry.error.map_or(Ok(answer), Err));
            }
            if self.connection.fault.borrow().is_some() {
                return Poll::Ready(Err(GONE));
            }
            entry.waiting = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        let mut in_flight = self.connection.in_flight.borrow_mut();
        let entry = &mut in_flight[self.key];
        if entry.answered {
            in_flight.remove(self.key);
        } else {
            entry.abandoned = true;
        }
    }
}
