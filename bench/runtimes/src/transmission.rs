//! The transmission phase: requests in, tasks, replies out.
//!
//! Three kinds of task share a connection. The reader spawns a task per request; that does the I/O
//! and posts its reply; the sender gathers all posted replies into one vectored send. The reader
//! waits at [`IN_FLIGHT`] requests, so a client that reads no replies costs bounded memory.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Poll, Waker};

use compio::buf::BufResult;
use compio::io::AsyncWriteExt;
use compio::net::UnixStream;

use crate::Served;
use crate::buffer::{Buffer, HEADER, Pool, View};
use crate::inbox::Inbox;
use crate::negotiation::invalid;
use crate::storage::Storage;

const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const REQUEST_LENGTH: usize = 28;

const COMMAND_READ: u16 = 0;
const COMMAND_WRITE: u16 = 1;
const COMMAND_DISCONNECT: u16 = 2;
const COMMAND_FLUSH: u16 = 3;

const NBD_EIO: u32 = 5;
const NBD_EINVAL: u32 = 22;
const NBD_ENOSPC: u32 = 28;

/// Bytes; with [`IN_FLIGHT`] it bounds a connection's memory.
pub(crate) const LONGEST_REQUEST: u32 = 1 << 20;
const IN_FLIGHT: usize = 64;

struct Request {
    flags: u16,
    command: u16,
    cookie: [u8; 8],
    offset: u64,
    length: u32,
}

impl Request {
    fn parse(bytes: &[u8; REQUEST_LENGTH]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (command, rest) = rest.split_first_chunk()?;
        let (cookie, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let length = rest.first_chunk()?;
        (u32::from_be_bytes(*magic) == REQUEST_MAGIC).then(|| Self {
            flags: u16::from_be_bytes(*flags),
            command: u16::from_be_bytes(*command),
            cookie: *cookie,
            offset: u64::from_be_bytes(*offset),
            length: u32::from_be_bytes(*length),
        })
    }

    fn refusal(&self, storage: &Storage) -> Option<u32> {
        if self.flags != 0 {
            return Some(NBD_EINVAL);
        }
        if self.command == COMMAND_FLUSH {
            return None;
        }
        let block = u64::from(storage.block_size());
        let length = u64::from(self.length);
        let known = matches!(self.command, COMMAND_READ | COMMAND_WRITE);
        let aligned = self.offset.is_multiple_of(block) && length.is_multiple_of(block);
        if !known || !aligned || length == 0 || self.length > LONGEST_REQUEST {
            return Some(NBD_EINVAL);
        }
        let inside = self.offset.checked_add(length).is_some_and(|end| end <= storage.size());
        let past_the_end = if self.command == COMMAND_WRITE { NBD_ENOSPC } else { NBD_EINVAL };
        (!inside).then_some(past_the_end)
    }
}

struct Connection {
    storage: Rc<Storage>,
    pool: Pool,
    served: Served,
    /// Replies posted and not yet being sent.
    replies: RefCell<Vec<View>>,
    in_flight: Cell<usize>,
    finished: Cell<bool>,
    sender: Cell<Option<Waker>>,
    reader: Cell<Option<Waker>>,
}

impl Connection {
    fn post(&self, buffer: Buffer, cookie: [u8; 8], error: u32, length: usize) {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
        header[4..8].copy_from_slice(&error.to_be_bytes());
        header[8..].copy_from_slice(&cookie);
        self.replies.borrow_mut().push(buffer.into_reply(header, length));
        wake(&self.sender);
    }
}

fn wake(slot: &Cell<Option<Waker>>) {
    if let Some(waker) = slot.take() {
        waker.wake();
    }
}

/// Serves one client until its last reply is sent. `InvalidData` means that it broke the protocol.
pub(crate) async fn serve_requests(inbox: Inbox, storage: Rc<Storage>, served: Served) -> io::Result<()> {
    let connection = Rc::new(Connection {
        storage,
        pool: Pool::default(),
        served,
        replies: RefCell::default(),
        in_flight: Cell::new(0),
        finished: Cell::new(false),
        sender: Cell::new(None),
        reader: Cell::new(None),
    });
    compio::runtime::spawn(send_replies(inbox.stream(), connection.clone())).detach();
    let outcome = read_requests(inbox, &connection).await;
    connection.finished.set(true);
    wake(&connection.sender);
    outcome
}

async fn read_requests(mut inbox: Inbox, connection: &Rc<Connection>) -> io::Result<()> {
    while let Some(bytes) = inbox.next().await? {
        let request = Request::parse(&bytes).ok_or_else(|| invalid("a request without the request magic"))?;
        if request.command == COMMAND_DISCONNECT {
            break;
        }
        let has_payload = request.command == COMMAND_WRITE;
        if has_payload && request.length > LONGEST_REQUEST {
            return Err(invalid("a write longer than the maximum that was advertised"));
        }
        wait_for_room(connection).await;
        let refusal = request.refusal(&connection.storage);
        // A flush's length is arbitrary: it must not be allocated.
        let is_read = request.command == COMMAND_READ && refusal.is_none();
        let carries = if has_payload || is_read { request.length as usize } else { 0 };
        let mut buffer = connection.pool.take(carries);
        if has_payload {
            // Also for a refused write: the next request begins after its payload.
            buffer = Buffer::from_view(inbox.read_payload(buffer.into_payload(carries)).await?);
        }
        connection.in_flight.update(|count| count + 1);
        if let Some(error) = refusal {
            connection.post(buffer, request.cookie, error, 0);
        } else {
            compio::runtime::spawn(answer(request, buffer, connection.clone())).detach();
        }
    }
    Ok(())
}

async fn wait_for_room(connection: &Connection) {
    poll_fn(|context| {
        if connection.in_flight.get() < IN_FLIGHT {
            return Poll::Ready(());
        }
        connection.reader.set(Some(context.waker().clone()));
        Poll::Pending
    })
    .await;
}

async fn answer(request: Request, buffer: Buffer, connection: Rc<Connection>) {
    let storage = &connection.storage;
    let length = request.length as usize;
    let (outcome, buffer, returned) = match request.command {
        COMMAND_READ => {
            let (outcome, buffer) = storage.read(buffer, request.offset, length).await;
            (outcome, buffer, length)
        }
        COMMAND_WRITE => {
            let (outcome, buffer) = storage.write(buffer, request.offset, length).await;
            (outcome, buffer, 0)
        }
        _ => (storage.flush().await, buffer, 0),
    };
    match outcome {
        Ok(()) => connection.post(buffer, request.cookie, 0, returned),
        Err(error) => connection.post(buffer, request.cookie, wire_error(&error), 0),
    }
}

fn wire_error(error: &io::Error) -> u32 {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => NBD_ENOSPC,
        _ => NBD_EIO,
    }
}

/// Ends when the connection is finished and nothing is in flight.
async fn send_replies(mut stream: UnixStream, connection: Rc<Connection>) {
    let mut batch = Vec::new();
    let mut connected = true;
    while next_batch(&connection, &mut batch).await {
        // After a failed send replies are only counted, so that reader and requests can end.
        if connected {
            let BufResult(outcome, sent) = stream.write_vectored_all(batch).await;
            connected = outcome.is_ok();
            batch = sent;
        }
        connection.in_flight.update(|count| count - batch.len());
        connection.served.update(|count| count + batch.len() as u64);
        batch.drain(..).for_each(|view| connection.pool.give(Buffer::from_view(view)));
        wake(&connection.reader);
    }
}

/// False once no replies will follow.
async fn next_batch(connection: &Connection, batch: &mut Vec<View>) -> bool {
    poll_fn(|context| {
        if !connection.replies.borrow().is_empty() {
            std::mem::swap(batch, &mut connection.replies.borrow_mut());
            return Poll::Ready(true);
        }
        if connection.finished.get() && connection.in_flight.get() == 0 {
            return Poll::Ready(false);
        }
        connection.sender.set(Some(context.waker().clone()));
        Poll::Pending
    })
    .await
}
