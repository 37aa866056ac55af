//! A well-behaved client with many requests in flight in its own region. Each reply is compared
//! with the data that the client wrote there.
//!
//! Two requests in flight never overlap if one of them writes, so each reply is determined. After a
//! failed write or a trim, content is unknown until it is written again.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ops::Range,
    rc::Rc,
};

use super::{
    super::{
        errno::Errno,
        proto::{self, cmd, cmd_flag, reply_flag, reply_type, state},
        session::ReplyStyle,
    },
    MAX_CLIENTS, REGION, SIZE, chance, some_time,
    wire::{NbdTestWire, StreamEnded, request, u16_at, u32_at, u64_at},
};
use reactor::{Signal, now, sim, sleep_until, spawn_joinable};

pub(super) struct SimulatedNbdClient {
    pub(super) wire: NbdTestWire,
    /// First byte of its region.
    pub(super) start: u64,
    /// True if requests may fail with EIO.
    pub(super) faults: bool,
    /// True once the server was stopped: it sends no further replies.
    pub(super) stopped: Rc<Cell<bool>>,
    pub(super) answered: Rc<Cell<u64>>,
}

#[derive(Clone, Debug)]
enum ClientOperation {
    Read,
    Write(Vec<u8>),
    Zeroes,
    Trim,
    /// Leaves the content unchanged and returns no data. FLUSH for an empty range, else CACHE.
    FlushOrCache,
    Status {
        one: bool,
    },
    /// Reads past the end.
    WrongRead,
    /// Writes past the end; the server must skip the payload instead of parsing it as requests.
    WrongWrite(Vec<u8>),
}

#[derive(Clone, Debug)]
struct PendingNbdRequest {
    operation: ClientOperation,
    range: Range<u64>,
    /// Bytes of data or extents received so far.
    covered: u64,
    failed: bool,
}

struct SimulatedNbdSession {
    client: SimulatedNbdClient,
    style: ReplyStyle,
    depth: usize,
    /// `None` for unknown content.
    content: RefCell<Vec<Option<u8>>>,
    pending: RefCell<BTreeMap<u64, PendingNbdRequest>>,
    next_cookie: Cell<u64>,
    received: Signal,
}

impl SimulatedNbdClient {
    pub(super) async fn run(mut self) {
        use ReplyStyle::{Extended, Simple, Structured};
        let style = sim::random(|random| [Simple, Structured, Extended][random.usize(..3)]);
        match self.wire.handshake(style).await {
            Ok(export_info) => assert!((MAX_CLIENTS * REGION..=SIZE).contains(&export_info.size_bytes)),
            Err(StreamEnded) => return assert!(self.stopped.get(), "the handshake ended early"),
        }
        let session = Rc::new(SimulatedNbdSession {
            style,
            depth: sim::random(|random| 1 << random.u32(..6)),
            content: RefCell::new(vec![Some(0); REGION as usize]),
            pending: RefCell::default(),
            next_cookie: Cell::new(sim::random(|random| random.u64(..))),
            received: Signal::default(),
            client: self,
        });
        let receiving = spawn_joinable(Rc::clone(&session).receive());
        // A stopped server accepts no further request.
        if session.send_all().await.is_err() {
            assert!(session.client.stopped.get(), "the connection ended early");
        }
        receiving.await;
        session.client.wire.close();
    }
}

impl SimulatedNbdSession {
    async fn send_all(&self) -> Result<(), StreamEnded> {
        for _ in 0..sim::random(|random| random.usize(1..25)) {
            while self.pending.borrow().len() >= self.depth {
                self.received.wait().await;
                if self.client.stopped.get() {
                    return Ok(());
                }
            }
            self.client.wire.send(&self.burst()).await?;
            if chance(20) {
                sleep_until(now() + some_time()).await;
            }
        }
        while chance(50) && !self.pending.borrow().is_empty() && !self.client.stopped.get() {
            self.received.wait().await;
        }
        // Requests in flight at DISC are still answered.
        self.client.wire.send(&request(self.style, cmd::DISC, 0, 0, 0, 0)).await
    }

    /// Requests to send together: either unrelated ones, or adjacent reads or writes that the
    /// server may merge.
    fn burst(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let count = sim::random(|random| random.u64(1..=8));
        if chance(50) {
            let (length, writes) = (sim::random(|random| random.u64(1..500)), chance(50));
            let first = self.client.start + sim::random(|random| random.u64(..REGION - count * length));
            for number in 0..count {
                let at = first + number * length;
                let operation =
                    if writes { ClientOperation::Write(random_bytes(length)) } else { ClientOperation::Read };
                bytes.extend(self.begin(operation, at..at + length));
            }
            return bytes;
        }
        for _ in 0..count {
            let (operation, range) = self.draw();
            bytes.extend(self.begin(operation, range));
        }
        bytes
    }

    fn draw(&self) -> (ClientOperation, Range<u64>) {
        let longest = if chance(5) { REGION } else { 2000 };
        let start = sim::random(|random| random.u64(..REGION));
        let end = sim::random(|random| random.u64(start + 1..=REGION.min(start + longest)));
        let range = self.client.start + start..self.client.start + end;
        let operation = match sim::random(|random| random.u32(..100)) {
            0..35 => ClientOperation::Read,
            35..65 => ClientOperation::Write(random_bytes(end - start)),
            65..75 => ClientOperation::Zeroes,
            75..80 => ClientOperation::Trim,
            80..85 => return (ClientOperation::FlushOrCache, 0..0),
            85..90 => return (ClientOperation::FlushOrCache, range),
            90..95 if self.style.has_chunks() => ClientOperation::Status { one: chance(50) },
            _ => {
                let excess = sim::random(|random| random.u64(1..100));
                let operation = if chance(50) {
                    ClientOperation::WrongRead
                } else {
                    ClientOperation::WrongWrite(random_bytes(5 + excess))
                };
                return (operation, SIZE - 5..SIZE + excess);
            }
        };
        (operation, range)
    }

    /// Registers the request and returns its bytes; none if it conflicts with one in flight.
    fn begin(&self, what: ClientOperation, range: Range<u64>) -> Vec<u8> {
        let changes = |what: &ClientOperation| {
            matches!(what, ClientOperation::Write(_) | ClientOperation::Zeroes | ClientOperation::Trim)
        };
        // A conflict would make the expected content depend on the order of execution.
        let conflicts = |other: &PendingNbdRequest| {
            let overlap = range.start < other.range.end && other.range.start < range.end;
            // Overlapping reads are fine: neither changes the expected content.
            overlap && (changes(&what) || changes(&other.operation))
        };
        if self.pending.borrow().values().any(conflicts) {
            return Vec::new();
        }
        let cookie = self.next_cookie.get();
        self.next_cookie.set(cookie.wrapping_add(1));
        let flags = if chance(15) { cmd_flag::FUA } else { 0 };
        let (kind, flags) = match &what {
            ClientOperation::Read | ClientOperation::WrongRead => (cmd::READ, flags),
            ClientOperation::Write(_) | ClientOperation::WrongWrite(_) => (cmd::WRITE, flags),
            ClientOperation::Zeroes => {
                (cmd::WRITE_ZEROES, flags | if chance(30) { cmd_flag::NO_HOLE } else { 0 })
            }
            ClientOperation::Trim => (cmd::TRIM, flags),
            ClientOperation::FlushOrCache if range.is_empty() => (cmd::FLUSH, 0),
            ClientOperation::FlushOrCache => (cmd::CACHE, 0),
            ClientOperation::Status { one } => (cmd::BLOCK_STATUS, if *one { cmd_flag::REQ_ONE } else { 0 }),
        };
        let mut bytes = request(self.style, kind, flags, cookie, range.start, range.end - range.start);
        if let ClientOperation::Write(data) | ClientOperation::WrongWrite(data) = &what {
            bytes.extend(data);
        }
        let pending = PendingNbdRequest { operation: what, range, covered: 0, failed: false };
        self.pending.borrow_mut().insert(cookie, pending);
        bytes
    }

    async fn receive(self: Rc<Self>) {
        let mut wire = self.client.wire.clone();
        loop {
            let reply = match self.style {
                ReplyStyle::Simple => self.simple_reply(&mut wire).await,
                _ => self.chunk(&mut wire).await,
            };
            // Also at the end of the stream: the sender may be waiting for a reply.
            self.received.raise();
            if reply == Err(StreamEnded) {
                break;
            }
        }
        assert_eq!(wire.left_over(), 0, "the connection ended within a reply");
        let pending = self.pending.borrow();
        assert!(pending.is_empty() || self.client.stopped.get(), "never answered: {pending:?}");
    }

    async fn simple_reply(&self, wire: &mut NbdTestWire) -> Result<(), StreamEnded> {
        let header = wire.take(16).await?;
        assert_eq!(u32_at(&header, 0), proto::SIMPLE_REPLY_MAGIC);
        let (errno, cookie) = (u32_at(&header, 4), u64_at(&header, 8));
        let mut pending = self.pending(cookie);
        if errno != 0 {
            self.fail(&mut pending, errno);
        } else if matches!(pending.operation, ClientOperation::Read) {
            let data = wire.take((pending.range.end - pending.range.start) as usize).await?;
            let offset = pending.range.start;
            self.compare(&mut pending, offset, &data);
        }
        self.finish(cookie, &pending);
        Ok(())
    }

    async fn chunk(&self, wire: &mut NbdTestWire) -> Result<(), StreamEnded> {
        let extended = self.style == ReplyStyle::Extended;
        let header = wire.take(if extended { 32 } else { 20 }).await?;
        let magic = if extended { proto::EXTENDED_REPLY_MAGIC } else { proto::STRUCTURED_REPLY_MAGIC };
        assert_eq!(u32_at(&header, 0), magic);
        let (flags, kind, cookie) = (u16_at(&header, 4), u16_at(&header, 6), u64_at(&header, 8));
        let length = if extended { u64_at(&header, 24) } else { u64::from(u32_at(&header, 16)) };
        let mut pending = self.pending(cookie);
        assert!(!extended || u64_at(&header, 16) == pending.range.start, "the offset is repeated");
        let payload = wire.take(length as usize).await?;
        match kind {
            reply_type::NONE => assert!(payload.is_empty()),
            reply_type::OFFSET_DATA => self.compare(&mut pending, u64_at(&payload, 0), &payload[8..]),
            reply_type::OFFSET_HOLE => {
                let zeroes = vec![0; u32_at(&payload, 8) as usize];
                self.compare(&mut pending, u64_at(&payload, 0), &zeroes);
            }
            reply_type::ERROR => self.fail(&mut pending, u32_at(&payload, 0)),
            reply_type::BLOCK_STATUS => self.extents(&mut pending, &payload[4..], 8),
            reply_type::BLOCK_STATUS_EXT => self.extents(&mut pending, &payload[8..], 16),
            _ => panic!("a chunk of kind {kind}"),
        }
        if flags & reply_flag::DONE != 0 {
            self.finish(cookie, &pending);
        } else {
            self.pending.borrow_mut().insert(cookie, pending);
        }
        Ok(())
    }

    fn pending(&self, cookie: u64) -> PendingNbdRequest {
        self.pending.borrow().get(&cookie).cloned().expect("a reply to a request in flight")
    }

    fn fail(&self, pending: &mut PendingNbdRequest, errno: u32) {
        pending.failed = true;
        match pending.operation {
            ClientOperation::WrongRead => assert_eq!(errno, Errno::Inval.code()),
            ClientOperation::WrongWrite(_) => assert_eq!(errno, Errno::NoSpc.code()),
            _ => assert!(self.client.faults && errno == Errno::Io.code(), "{pending:?} failed with {errno}"),
        }
    }

    fn content_range(&self, range: Range<u64>) -> Range<usize> {
        (range.start - self.client.start) as usize..(range.end - self.client.start) as usize
    }

    fn compare(&self, pending: &mut PendingNbdRequest, offset: u64, data: &[u8]) {
        assert!(matches!(pending.operation, ClientOperation::Read), "data for {pending:?}");
        // The specification allows chunks in any order; this server sends them in ascending order.
        assert_eq!(offset, pending.range.start + pending.covered);
        pending.covered += data.len() as u64;
        assert!(offset + data.len() as u64 <= pending.range.end, "more data than requested");
        let content = self.content.borrow();
        for (at, (known, &byte)) in
            content[self.content_range(offset..offset + data.len() as u64)].iter().zip(data).enumerate()
        {
            assert!(known.is_none_or(|known| known == byte), "byte {at} at {offset}: {byte}, not {known:?}");
        }
    }

    /// Checks extents: pairs of length and flags, each half of `width` bytes.
    fn extents(&self, pending: &mut PendingNbdRequest, extents: &[u8], width: usize) {
        let ClientOperation::Status { one } = pending.operation else {
            panic!("block status for {pending:?}")
        };
        let count = extents.len() / width;
        assert!(count > 0 && count * width == extents.len() && (!one || count == 1));
        for extent in extents.chunks(width) {
            let (length, flags) = match width {
                8 => (u64::from(u32_at(extent, 0)), u64::from(u32_at(extent, 4))),
                _ => (u64_at(extent, 0), u64_at(extent, 8)),
            };
            let start = pending.range.start + pending.covered;
            pending.covered += length;
            assert!(length > 0 && start < pending.range.end && (!one || start + length <= pending.range.end));
            if flags & u64::from(state::ZERO) != 0 {
                let content = self.content.borrow();
                let reported = self.content_range(start..(start + length).min(pending.range.end));
                assert!(
                    content[reported].iter().all(|known| known.is_none_or(|byte| byte == 0)),
                    "data reported as zeroes"
                );
            }
        }
    }

    fn finish(&self, cookie: u64, pending: &PendingNbdRequest) {
        self.pending.borrow_mut().remove(&cookie);
        self.client.answered.set(self.client.answered.get() + 1);
        let length = pending.range.end - pending.range.start;
        let mut content = self.content.borrow_mut();
        match &pending.operation {
            ClientOperation::Read if !pending.failed => {
                assert_eq!(pending.covered, length, "some data is missing");
            }
            ClientOperation::Status { .. } if !pending.failed => assert!(pending.covered > 0, "no status"),
            ClientOperation::Write(data) if !pending.failed => {
                for (known, &byte) in content[self.content_range(pending.range.clone())].iter_mut().zip(data)
                {
                    *known = Some(byte);
                }
            }
            ClientOperation::Zeroes if !pending.failed => {
                content[self.content_range(pending.range.clone())].fill(Some(0));
            }
            ClientOperation::Write(_) | ClientOperation::Zeroes | ClientOperation::Trim => {
                // A failed change may have been executed in part; a trim may or may not zero.
                content[self.content_range(pending.range.clone())].fill(None);
            }
            ClientOperation::WrongRead | ClientOperation::WrongWrite(_) => {
                assert!(pending.failed, "a request that breaks a rule succeeded: {pending:?}");
            }
            ClientOperation::Read | ClientOperation::Status { .. } | ClientOperation::FlushOrCache => {}
        }
    }
}

fn random_bytes(length: u64) -> Vec<u8> {
    sim::random(|random| (0..length).map(|_| random.u8(..)).collect())
}
