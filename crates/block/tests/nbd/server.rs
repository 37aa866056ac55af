//! A blocking NBD server over the codec: one thread a connection, memory for a disk.

use block::export::nbd::proto::state;
use block::export::nbd::request::{self, Parsed, StatusQuery};
use block::export::nbd::{
    BlockSizes, Command, Errno, Event, ExportInfo, ExportTable, Exports, Extent, Features, Handshake,
    Replier, Request, Session, Tag, TlsPolicy, TlsRead, TlsServer, TlsStream,
};
use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) const SIZE: usize = 8 << 20;

/// A directory that goes away with the test.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("weir-nbd-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("create a scratch directory");
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Left behind where it fails: no reason to fail a test that passed.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What all connections share.
pub(crate) struct Server {
    policy: TlsPolicy,
    tls: Option<TlsServer>,
    exports: ExportTable,
    disk: Mutex<Vec<u8>>,
    pub(crate) scratch: Scratch,
}

impl Server {
    pub(crate) fn new(policy: TlsPolicy, tls: Option<TlsServer>) -> Arc<Self> {
        let features = Features {
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            dont_fragment: true,
            cache: true,
            multi_conn: true,
            ..Features::default()
        };
        let export = |name: &str, description: &str, read_only| ExportInfo {
            name: Arc::from(name),
            description: Arc::from(description),
            size_bytes: SIZE as u64,
            features: Features { read_only, ..features },
            sizes: BlockSizes::default(),
        };
        let exports = ExportTable::new(vec![
            export("", "the default disk", false),
            export("disk", "a disk", false),
            export("frozen", "a read-only disk", true),
        ]);
        Arc::new(Self { policy, tls, exports, disk: Mutex::new(vec![0; SIZE]), scratch: Scratch::new() })
    }

    /// Serves on a Unix socket until the process ends; returns the socket's path.
    pub(crate) fn listen_unix(self: &Arc<Self>) -> String {
        let path = self.scratch.0.join("nbd.sock");
        let listener = UnixListener::bind(&path).expect("bind a Unix socket");
        let server = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                std::thread::spawn(move || server.connection(stream));
            }
        });
        path.to_str().expect("a UTF-8 path").to_owned()
    }

    /// Serves on a free TCP port of the loopback interface; returns the port.
    pub(crate) fn listen_tcp(self: &Arc<Self>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind a TCP port");
        let port = listener.local_addr().expect("an address").port();
        let server = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                std::thread::spawn(move || server.connection(stream));
            }
        });
        port
    }

    /// A client that goes away or breaks the protocol ends its own connection only.
    fn connection(&self, socket: impl Read + Write) {
        let mut wire = Wire { socket, tls: None, input: Vec::new() };
        if let Ok(Some(session)) = self.handshake(&mut wire) {
            let _ = self.transmission(&mut wire, &session);
        }
        wire.close();
    }

    fn handshake(&self, wire: &mut Wire<impl Read + Write>) -> io::Result<Option<Session>> {
        let mut out = Vec::new();
        let mut handshake = Handshake::start(self.policy, &mut out);
        loop {
            let input = std::mem::take(&mut wire.input);
            let step = handshake.advance(&input, &self.exports, &mut out);
            wire.input = input[step.consumed..].to_vec();
            wire.send(&out)?;
            out.clear();
            match step.event {
                Event::Replied => {}
                Event::NeedInput => wire.receive()?,
                Event::StartTls => {
                    wire.start_tls(self.tls.as_ref().expect("TLS is configured"))?;
                    handshake.tls_established();
                }
                Event::Transmission(session) => return Ok(Some(session)),
                Event::Close(_) => return Ok(None),
            }
        }
    }

    fn transmission(&self, wire: &mut Wire<impl Read + Write>, session: &Session) -> io::Result<()> {
        let replier = Replier::new(session);
        loop {
            let size = self.exports.get(session.export).map_or(0, |export| export.size_bytes);
            match request::parse(&wire.input, session, size) {
                Parsed::Incomplete => wire.receive()?,
                Parsed::Close(_) => return Ok(()),
                Parsed::Refused(refused) => {
                    wire.take(session.style.request_bytes())?;
                    wire.take(refused.skip as usize)?;
                    let mut out = Vec::new();
                    replier.error(refused.tag, refused.errno, refused.why, &mut out);
                    wire.send(&out)?;
                }
                Parsed::Request(Request { command: Command::Disconnect, .. }) => return Ok(()),
                Parsed::Request(request) => {
                    wire.take(session.style.request_bytes())?;
                    let payload = wire.take(request.command.payload_bytes() as usize)?;
                    wire.send(&self.execute(session, replier, request, &payload))?;
                }
            }
        }
    }

    fn execute(&self, session: &Session, replier: Replier, request: Request, payload: &[u8]) -> Vec<u8> {
        let mut disk = self.disk.lock().expect("no other connection panicked");
        let tag = request.tag;
        let range = |offset: u64, length: u64| offset as usize..(offset + length) as usize;
        match request.command {
            Command::Read { offset, length, dont_fragment } => {
                let data = &disk[range(offset, u64::from(length))];
                let zero = data.iter().all(|byte| *byte == 0);
                match replier.hole(tag, offset, length, true).filter(|_| zero && !dont_fragment) {
                    Some(hole) => return hole.as_bytes().to_vec(),
                    None => return [replier.data(tag, offset, length, true).as_bytes(), data].concat(),
                }
            }
            Command::Write { offset, length, .. } => {
                disk[range(offset, u64::from(length))].copy_from_slice(payload);
            }
            Command::Trim { offset, length, .. } | Command::WriteZeroes { offset, length, .. } => {
                disk[range(offset, length)].fill(0);
            }
            Command::BlockStatus(query) => return status(&disk, replier, tag, &query),
            Command::BlockStatusPayload { one, .. } => {
                return match request::status_payload(payload, tag, one, session, SIZE as u64) {
                    Ok(command) => {
                        drop(disk);
                        self.execute(session, replier, Request { tag, command }, &[])
                    }
                    Err(refused) => {
                        let mut out = Vec::new();
                        replier.error(tag, refused.errno, refused.why, &mut out);
                        out
                    }
                };
            }
            Command::Disconnect | Command::Flush | Command::Cache { .. } | Command::Nothing => {}
        }
        replier.success(tag).as_bytes().to_vec()
    }
}

/// Block status in steps of 64 KiB.
fn status(disk: &[u8], replier: Replier, tag: Tag, query: &StatusQuery) -> Vec<u8> {
    let mut out = Vec::new();
    let mut extents: Vec<Extent> = Vec::new();
    let (mut offset, end) = (query.offset, query.offset + query.length);
    while offset < end {
        let next = ((offset / 65536 + 1) * 65536).min(SIZE as u64);
        let zero = disk[offset as usize..next as usize].iter().all(|byte| *byte == 0);
        let flags = if zero { state::HOLE | state::ZERO } else { 0 };
        match extents.last_mut() {
            Some(last) if last.flags == flags => last.length += next - offset,
            _ => extents.push(Extent { length: next - offset, flags }),
        }
        offset = next;
    }
    let last = query.contexts.len();
    for (number, context) in query.contexts.iter().enumerate() {
        replier.block_status(tag, query, context, &extents, number + 1 == last, &mut out);
    }
    if last == 0 {
        replier.error(tag, Errno::Inval, "no context", &mut out);
    }
    out
}

/// A socket, in the clear or through TLS, and what arrived on it.
struct Wire<S> {
    socket: S,
    tls: Option<TlsStream>,
    input: Vec<u8>,
}

impl<S: Read + Write> Wire<S> {
    /// Waits until there is more input.
    fn receive(&mut self) -> io::Result<()> {
        let mut buffer = [0; 64 << 10];
        let Some(tls) = &mut self.tls else {
            let count = self.socket.read(&mut buffer)?;
            self.input.extend_from_slice(&buffer[..count]);
            return if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) };
        };
        loop {
            match tls.read(&mut buffer).map_err(io::Error::other)? {
                TlsRead::Bytes(count) => {
                    self.input.extend_from_slice(&buffer[..count]);
                    return Ok(());
                }
                TlsRead::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
                TlsRead::NeedInput => feed(&mut self.socket, tls)?,
            }
        }
    }

    /// The next bytes of the input, once they are there.
    fn take(&mut self, count: usize) -> io::Result<Vec<u8>> {
        while self.input.len() < count {
            self.receive()?;
        }
        let rest = self.input.split_off(count);
        Ok(std::mem::replace(&mut self.input, rest))
    }

    fn send(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        let Some(tls) = &mut self.tls else { return self.socket.write_all(bytes) };
        while !bytes.is_empty() {
            bytes = &bytes[tls.write(bytes).map_err(io::Error::other)?..];
            flush(&mut self.socket, tls)?;
        }
        Ok(())
    }

    fn start_tls(&mut self, server: &TlsServer) -> io::Result<()> {
        let mut tls = server.accept().map_err(io::Error::other)?;
        let early = std::mem::take(&mut self.input);
        assert_eq!(tls.feed(&early), early.len(), "a client hello fits");
        loop {
            let outcome = tls.handshake();
            flush(&mut self.socket, &mut tls)?;
            if outcome.map_err(io::Error::other)? {
                self.tls = Some(tls);
                return Ok(());
            }
            feed(&mut self.socket, &mut tls)?;
        }
    }

    fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close();
            let _ = flush(&mut self.socket, tls);
        }
    }
}

fn feed(socket: &mut impl Read, tls: &mut TlsStream) -> io::Result<()> {
    let mut buffer = [0; 16 << 10];
    let count = socket.read(&mut buffer)?;
    if count == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    assert_eq!(tls.feed(&buffer[..count]), count, "it asked for input");
    Ok(())
}

fn flush(socket: &mut impl Write, tls: &mut TlsStream) -> io::Result<()> {
    while !tls.outgoing().is_empty() {
        let count = socket.write(tls.outgoing())?;
        tls.sent(count);
    }
    Ok(())
}
