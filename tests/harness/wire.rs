//! An NBD client that works in single steps: for features that other clients lack (extended headers
//! in old versions of libnbd), and for violations of the protocol.
//!
//! Written from the specification alone (NetworkBlockDevice/nbd, doc/proto.md), independently of
//! weir's codec, so that a wrong constant in one is not repeated in the other. Every read has a
//! deadline; allocations for announced sizes are limited to 64 MiB.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use super::DEADLINE;

pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_LIST: u32 = 3;
pub(crate) const OPT_STARTTLS: u32 = 5;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;
pub(crate) const OPT_SET_META_CONTEXT: u32 = 10;
pub(crate) const OPT_EXTENDED_HEADERS: u32 = 11;

pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_META_CONTEXT: u32 = 4;
pub(crate) const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
pub(crate) const REP_ERR_POLICY: u32 = (1 << 31) + 2;
pub(crate) const REP_ERR_INVALID: u32 = (1 << 31) + 3;
pub(crate) const REP_ERR_TLS_REQD: u32 = (1 << 31) + 5;
pub(crate) const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
pub(crate) const REP_ERR_TOO_BIG: u32 = (1 << 31) + 9;

pub(crate) const CMD_READ: u16 = 0;
pub(crate) const CMD_WRITE: u16 = 1;
pub(crate) const CMD_FLUSH: u16 = 3;
pub(crate) const CMD_TRIM: u16 = 4;
pub(crate) const CMD_WRITE_ZEROES: u16 = 6;
pub(crate) const CMD_BLOCK_STATUS: u16 = 7;

pub(crate) const FLAG_FUA: u16 = 1;
pub(crate) const FLAG_REQ_ONE: u16 = 1 << 3;
pub(crate) const FLAG_PAYLOAD_LEN: u16 = 1 << 5;

pub(crate) const EPERM: u32 = 1;
pub(crate) const EINVAL: u32 = 22;
pub(crate) const ENOSPC: u32 = 28;

const INIT_MAGIC: u64 = u64::from_be_bytes(*b"NBDMAGIC");
pub(crate) const OPTION_MAGIC: u64 = u64::from_be_bytes(*b"IHAVEOPT");
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

const CLIENT_FLAGS: u32 = 3;
/// Maximum size of a reply.
const MAX_BYTES: u32 = 64 << 20;

/// The header of a request; all fields may be invalid.
#[derive(Clone, Copy)]
pub(crate) struct RawNbdRequest {
    pub(crate) flags: u16,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl RawNbdRequest {
    pub(crate) fn compact(self) -> Vec<u8> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        self.append_middle(&mut bytes);
        bytes.extend((self.length as u32).to_be_bytes());
        bytes
    }

    pub(crate) fn extended(self) -> Vec<u8> {
        let mut bytes = EXTENDED_REQUEST_MAGIC.to_be_bytes().to_vec();
        self.append_middle(&mut bytes);
        bytes.extend(self.length.to_be_bytes());
        bytes
    }

    fn append_middle(self, bytes: &mut Vec<u8>) {
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.kind.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RawNbdChunk {
    pub(crate) done: bool,
    pub(crate) kind: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) payload: Vec<u8>,
}

pub(crate) struct RawNbdClient(UnixStream);

impl RawNbdClient {
    #[track_caller]
    pub(crate) fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).expect("the daemon listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a deadline is not zero");
        stream.set_write_timeout(Some(DEADLINE)).expect("a deadline is not zero");
        Self(stream)
    }

    #[track_caller]
    pub(crate) fn greet(socket: &Path) -> Self {
        let mut wire = Self::connect(socket);
        // The greeting: NBDMAGIC, IHAVEOPT, handshake flags; then the client's flags.
        assert_eq!(wire.receive_u64(), INIT_MAGIC);
        assert_eq!(wire.receive_u64(), OPTION_MAGIC);
        let flags = u16::from_be_bytes(wire.receive());
        assert_eq!(flags & 3, 3, "fixed newstyle and no zeroes are offered");
        wire.send(&CLIENT_FLAGS.to_be_bytes());
        wire
    }

    /// A client in the transmission phase with simple replies, and the size of the export.
    #[track_caller]
    pub(crate) fn negotiated(socket: &Path, export: &str) -> (Self, u64) {
        let mut wire = Self::greet(socket);
        let size = wire.start(export);
        (wire, size)
    }

    /// A client in the transmission phase with extended headers and `base:allocation`.
    #[track_caller]
    pub(crate) fn negotiated_extended(socket: &Path, export: &str) -> (Self, u64) {
        let mut wire = Self::greet(socket);
        // Metadata contexts require extended headers (or structured replies) first.
        assert_eq!(wire.option(OPT_EXTENDED_HEADERS, &[]), [(REP_ACK, vec![])]);
        let query = [string(export), 1_u32.to_be_bytes().to_vec(), string("base:allocation")].concat();
        let replies = wire.option(OPT_SET_META_CONTEXT, &query);
        assert_eq!(replies.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [REP_META_CONTEXT, REP_ACK]);
        let size = wire.start(export);
        (wire, size)
    }

    #[track_caller]
    fn start(&mut self, export: &str) -> u64 {
        let replies = self.option(OPT_GO, &go_data(export));
        let (last, information) = replies.split_last().expect("an option has an answer");
        assert_eq!(last.0, REP_ACK, "GO: {}", String::from_utf8_lossy(&last.1));
        // NBD_INFO_EXPORT is type 0: size and flags.
        let export_info = information.iter().find(|(kind, data)| *kind == REP_INFO && data[..2] == [0, 0]);
        let (_, export_info) = export_info.expect("GO describes the export");
        u64::from_be_bytes(export_info[2..10].try_into().expect("eight bytes"))
    }

    /// Sends an option; returns all replies, the last of which is an ACK or an error.
    #[track_caller]
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(&option_header(option, data.len() as u32));
        self.send(data);
        self.replies(option)
    }

    #[track_caller]
    pub(crate) fn replies(&mut self, option: u32) -> Vec<(u32, Vec<u8>)> {
        let mut replies = Vec::new();
        loop {
            assert_eq!(self.receive_u64(), OPTION_REPLY_MAGIC);
            assert_eq!(self.receive_u32(), option, "a reply names its option");
            let kind = self.receive_u32();
            let length = self.receive_u32();
            replies.push((kind, self.receive_many(length)));
            // An ACK or an error (bit 31) ends the replies to an option.
            if kind == REP_ACK || kind >> 31 == 1 {
                return replies;
            }
        }
    }

    #[track_caller]
    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("the daemon reads");
    }

    /// Sends bytes; true while the daemon receives them.
    pub(crate) fn try_send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).is_ok()
    }

    /// Limits a send to a second, after which it fails, if the daemon does not read.
    pub(crate) fn limit_writing(&self) {
        self.0.set_write_timeout(Some(Duration::from_secs(1))).expect("a second is not zero");
    }

    #[track_caller]
    pub(crate) fn request(&mut self, request: RawNbdRequest, payload: &[u8]) {
        self.send(&request.compact());
        self.send(payload);
    }

    #[track_caller]
    pub(crate) fn simple_reply(&mut self) -> (u32, u64) {
        assert_eq!(self.receive_u32(), SIMPLE_REPLY_MAGIC);
        (self.receive_u32(), self.receive_u64())
    }

    /// The next simple reply; `None` if the daemon has closed the connection.
    pub(crate) fn next_simple_reply(&mut self) -> Option<(u32, u64)> {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).ok()?;
        let error = u32::from_be_bytes(reply[4..8].try_into().expect("four bytes"));
        Some((error, u64::from_be_bytes(reply[8..].try_into().expect("eight bytes"))))
    }

    #[track_caller]
    pub(crate) fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>, u32> {
        // The cookie is the offset, so that the reply can be checked without state.
        let request =
            RawNbdRequest { flags: 0, kind: CMD_READ, cookie: offset, offset, length: length.into() };
        self.request(request, &[]);
        match self.simple_reply() {
            (0, cookie) => {
                assert_eq!(cookie, offset);
                Ok(self.receive_many(length))
            }
            (error, _) => Err(error),
        }
    }

    #[track_caller]
    pub(crate) fn chunk(&mut self) -> RawNbdChunk {
        assert_eq!(self.receive_u32(), EXTENDED_REPLY_MAGIC);
        let flags = u16::from_be_bytes(self.receive());
        let kind = u16::from_be_bytes(self.receive());
        let cookie = self.receive_u64();
        let offset = self.receive_u64();
        let length = self.receive_u64().try_into().expect("payloads have 32 bits");
        RawNbdChunk { done: flags & 1 == 1, kind, cookie, offset, payload: self.receive_many(length) }
    }

    #[track_caller]
    pub(crate) fn receive<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).expect("the daemon answers");
        bytes
    }

    #[track_caller]
    fn receive_u32(&mut self) -> u32 {
        u32::from_be_bytes(self.receive())
    }

    #[track_caller]
    fn receive_u64(&mut self) -> u64 {
        u64::from_be_bytes(self.receive())
    }

    #[track_caller]
    pub(crate) fn receive_many(&mut self, length: u32) -> Vec<u8> {
        assert!(length <= MAX_BYTES, "a reply of {length} bytes");
        let mut bytes = vec![0; length as usize];
        self.0.read_exact(&mut bytes).expect("the daemon answers");
        bytes
    }

    /// Waits until the daemon closes the connection; discards received data.
    #[track_caller]
    pub(crate) fn wait_for_close(&mut self) {
        let mut dropped = [0; 4096];
        loop {
            match self.0.read(&mut dropped) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
                Err(error) => panic!("the daemon should have closed the connection: {error}"),
            }
        }
    }

    pub(crate) fn into_stream(self) -> UnixStream {
        self.0
    }

    pub(crate) fn shutdown_write(&self) {
        self.0.shutdown(Shutdown::Write).expect("the socket is connected");
    }
}

pub(crate) fn option_header(option: u32, length: u32) -> Vec<u8> {
    [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes()].concat()
}

pub(crate) fn go_data(export: &str) -> Vec<u8> {
    [string(export), vec![0, 0]].concat()
}

pub(crate) fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}
