//! A server that has other properties after each restart: fewer features, more, or failing
//! requests. It records every request that the client should not have sent.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use policy::time::Duration;

use super::super::{
    pipe::Pipe,
    proto::{self, cmd, cmd_flag, export_flag, handshake_flag, info, opt, rep, reply_flag, reply_type},
    stream::NbdStream,
};
use nbd::{receive_buffer::ReceiveBuffer, wire::WireFields};
use reactor::{buffer::IoBuffer, now, sim, sleep_until, spawn};

const ENOSPC: u32 = 28;
const ENOTSUP: u32 = 95;

/// Properties of a server, and how often its requests fail.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServerProperties {
    pub(super) size: usize,
    pub(super) flags: u16,
    pub(super) minimum_block: u32,
    pub(super) maximum_payload: u32,
    pub(super) structured: bool,
    /// Percentage of changes that fail with ENOSPC.
    pub(super) refuses: u32,
    /// True if no request may be sent to it.
    pub(super) is_unfit: bool,
}

/// All features of the protocol.
pub(super) const EVERYTHING: u16 = export_flag::HAS_FLAGS
    | export_flag::SEND_FLUSH
    | export_flag::SEND_FUA
    | export_flag::SEND_TRIM
    | export_flag::SEND_WRITE_ZEROES
    | export_flag::SEND_FAST_ZERO;

pub(super) struct ChangingServer {
    pub(super) ways: ServerProperties,
    /// Content that a client sees; `disk` is the part that survives a loss of power.
    memory: Vec<u8>,
    pub(super) disk: Vec<u8>,
    pub(super) faults: Vec<String>,
    pub(super) refused: u64,
    pub(super) is_up: bool,
    pipes: Vec<Pipe>,
    open: Arc<AtomicUsize>,
}

pub(super) type Shared = Arc<Mutex<ChangingServer>>;

pub(super) fn lock(server: &Shared) -> MutexGuard<'_, ChangingServer> {
    server.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ChangingServer {
    pub(super) fn new(properties: ServerProperties) -> Shared {
        Arc::new(Mutex::new(Self {
            ways: properties,
            memory: vec![0; properties.size],
            disk: vec![0; properties.size],
            faults: Vec::new(),
            refused: 0,
            is_up: true,
            pipes: Vec::new(),
            open: Arc::default(),
        }))
    }

    pub(super) fn cut(&mut self) {
        self.pipes.drain(..).for_each(|pipe| pipe.close());
    }

    pub(super) fn lose_power(&mut self) {
        self.cut();
        self.is_up = false;
        self.memory.clone_from(&self.disk);
    }

    pub(super) fn restart(&mut self, properties: ServerProperties) {
        self.cut();
        self.is_up = true;
        self.ways = properties;
    }
}

/// Client's end of a new connection; refused until the old connections have ended.
pub(super) fn dial(server: &Shared) -> std::io::Result<NbdStream> {
    let mut state = lock(server);
    if !state.is_up || state.open.load(Relaxed) > 0 {
        return Err(std::io::ErrorKind::ConnectionRefused.into());
    }
    let (client_end, server_end) = Pipe::pair();
    state.pipes.push(server_end.clone());
    let (open, properties, server) = (Arc::clone(&state.open), state.ways, Arc::clone(server));
    open.fetch_add(1, Relaxed);
    spawn(async move {
        let mut conversation = Conversation {
            server,
            properties,
            stream: NbdStream::Simulated(server_end.clone()),
            inbox: ReceiveBuffer::new(),
            structured: false,
            context: None,
        };
        // The end of the connection is an error like any other.
        if let Ok(true) = conversation.shake_hands().await {
            while conversation.serve().await.is_ok_and(|continues| continues) {}
        }
        server_end.close();
        open.fetch_sub(1, Relaxed);
    });
    Ok(NbdStream::Simulated(client_end))
}

struct Conversation {
    server: Shared,
    properties: ServerProperties,
    stream: NbdStream,
    inbox: ReceiveBuffer,
    structured: bool,
    context: Option<u32>,
}

type Io<T> = std::io::Result<T>;

impl Conversation {
    async fn send(&self, parts: &[&[u8]]) -> Io<()> {
        self.stream.send(IoBuffer::copy_of(&parts.concat()).into()).await
    }

    async fn option_reply(&self, option: u32, kind: u32, data: &[u8]) -> Io<()> {
        let head = [option, kind, data.len() as u32].map(u32::to_be_bytes).concat();
        self.send(&[&proto::OPTION_REPLY_MAGIC.to_be_bytes(), &head, data]).await
    }

    /// True if the client has chosen the export.
    async fn shake_hands(&mut self) -> Io<bool> {
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        let magic = [proto::INIT_MAGIC, proto::OPTION_MAGIC].map(u64::to_be_bytes).concat();
        self.send(&[&magic, &flags.to_be_bytes()]).await?;
        self.inbox.payload(4, &self.stream).await?;
        loop {
            let header = self.inbox.payload(proto::OPTION_BYTES, &self.stream).await?;
            let mut fields = WireFields::new(&header);
            let (_, option, length) = (fields.u64(), fields.u32().unwrap(), fields.u32().unwrap());
            self.inbox.payload(length as usize, &self.stream).await?;
            let properties = self.properties;
            match option {
                opt::STRUCTURED_REPLY if properties.structured => {
                    self.structured = true;
                    self.option_reply(option, rep::ACK, &[]).await?;
                }
                opt::SET_META_CONTEXT if self.structured => {
                    // Another number for each connection: the client must not reuse the old one.
                    let context = sim::random(|random| random.u32(..));
                    self.context = Some(context);
                    let named = [&context.to_be_bytes()[..], b"base:allocation"].concat();
                    self.option_reply(option, rep::META_CONTEXT, &named).await?;
                    self.option_reply(option, rep::ACK, &[]).await?;
                }
                opt::GO => {
                    let size = (properties.size as u64).to_be_bytes();
                    let export =
                        [&info::EXPORT.to_be_bytes()[..], &size, &properties.flags.to_be_bytes()].concat();
                    self.option_reply(option, rep::INFO, &export).await?;
                    let sizes = [properties.minimum_block, 4096, properties.maximum_payload]
                        .map(u32::to_be_bytes)
                        .concat();
                    let blocks = [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat();
                    self.option_reply(option, rep::INFO, &blocks).await?;
                    self.option_reply(option, rep::ACK, &[]).await?;
                    return Ok(true);
                }
                _ => self.option_reply(option, rep::ERR_UNSUP, &[]).await?,
            }
        }
    }

    async fn simple(&self, cookie: u64, error: u32, data: &[u8]) -> Io<()> {
        let head = [proto::SIMPLE_REPLY_MAGIC, error].map(u32::to_be_bytes).concat();
        self.send(&[&head, &cookie.to_be_bytes(), data]).await
    }

    async fn chunk(&self, cookie: u64, kind: u16, parts: &[&[u8]]) -> Io<()> {
        let data = parts.concat();
        let head =
            [&proto::STRUCTURED_REPLY_MAGIC.to_be_bytes()[..], &reply_flag::DONE.to_be_bytes()].concat();
        let length = (data.len() as u32).to_be_bytes();
        self.send(&[&head, &kind.to_be_bytes(), &cookie.to_be_bytes(), &length, &data]).await
    }

    /// Serves one request; false after DISC.
    async fn serve(&mut self) -> Io<bool> {
        let header = self.inbox.payload(proto::REQUEST_BYTES, &self.stream).await?;
        let mut fields = WireFields::new(&header);
        let (_, flags, command) = (fields.u32(), fields.u16().unwrap(), fields.u16().unwrap());
        let (cookie, offset) = (fields.u64().unwrap(), fields.u64().unwrap() as usize);
        let length = fields.u32().unwrap() as usize;
        if command == cmd::DISC {
            return Ok(false);
        }
        let payload = match command {
            cmd::WRITE => Some(self.inbox.payload(length, &self.stream).await?),
            _ => None,
        };
        self.check_request(command, flags, offset, length);
        self.pause().await;
        let range = offset..offset + length;
        let error = self.execute(command, flags, range.clone(), payload.as_deref());
        self.pause().await;
        match command {
            cmd::READ => {
                let data = lock(&self.server).memory[range].to_vec();
                if self.structured {
                    let at = (offset as u64).to_be_bytes();
                    self.chunk(cookie, reply_type::OFFSET_DATA, &[&at, &data]).await?;
                } else {
                    self.simple(cookie, 0, &data).await?;
                }
            }
            cmd::BLOCK_STATUS => {
                let extent = [self.context.unwrap_or(0), length as u32, 0].map(u32::to_be_bytes).concat();
                self.chunk(cookie, reply_type::BLOCK_STATUS, &[&extent]).await?;
            }
            _ => self.simple(cookie, error, &[]).await?,
        }
        Ok(true)
    }

    async fn pause(&self) {
        let micros = sim::random(|random| random.u64(..400));
        sleep_until(now() + Duration::from_micros(micros)).await;
    }

    /// Records a request that the client should not have sent.
    fn check_request(&self, command: u16, flags: u16, offset: usize, length: usize) {
        let properties = self.properties;
        let lacks = |flag: u16| properties.flags & flag == 0;
        let block = properties.minimum_block as usize;
        let fault = match command {
            _ if properties.is_unfit => Some("a request to a server that cannot be taken"),
            _ if !offset.is_multiple_of(block) || !length.is_multiple_of(block) => Some("parts of blocks"),
            _ if offset + length > properties.size => Some("a request past the end"),
            _ if flags & cmd_flag::FUA != 0 && lacks(export_flag::SEND_FUA) => Some("FUA"),
            _ if flags & cmd_flag::FAST_ZERO != 0 && lacks(export_flag::SEND_FAST_ZERO) => Some("fast zero"),
            cmd::READ | cmd::WRITE if length > properties.maximum_payload as usize => {
                Some("more than it takes")
            }
            cmd::FLUSH if lacks(export_flag::SEND_FLUSH) => Some("a flush"),
            cmd::TRIM if lacks(export_flag::SEND_TRIM) => Some("a trim"),
            cmd::WRITE_ZEROES if lacks(export_flag::SEND_WRITE_ZEROES) => Some("zeroes"),
            cmd::BLOCK_STATUS if self.context.is_none() => Some("where data is"),
            _ => None,
        };
        if let Some(fault) = fault {
            lock(&self.server).faults.push(format!("{fault} ({length} bytes at {offset}): {properties:?}"));
        }
    }

    /// Executes a command; returns an error number, or 0.
    fn execute(&self, command: u16, flags: u16, range: std::ops::Range<usize>, data: Option<&[u8]>) -> u32 {
        let mut state = lock(&self.server);
        let state = &mut *state;
        let is_change = matches!(command, cmd::WRITE | cmd::WRITE_ZEROES);
        if flags & cmd_flag::FAST_ZERO != 0 && sim::random(fastrand::Rng::bool) {
            state.refused += 1;
            return ENOTSUP;
        }
        if is_change && sim::random(|random| random.u32(..100)) < self.properties.refuses {
            state.refused += 1;
            return ENOSPC;
        }
        if is_change {
            match data {
                Some(data) => state.memory[range.clone()].copy_from_slice(data),
                None => state.memory[range.clone()].fill(0),
            }
            // Without FLUSH the server has no cache; with it, it may write back at any time.
            let has_cache = self.properties.flags & export_flag::SEND_FLUSH != 0;
            if !has_cache || flags & cmd_flag::FUA != 0 || sim::random(|random| random.u32(..4)) == 0 {
                state.disk[range.clone()].copy_from_slice(&state.memory[range]);
            }
        } else if command == cmd::FLUSH {
            state.disk.clone_from(&state.memory);
        }
        0
    }
}
