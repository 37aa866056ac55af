//! The client's handshake ("Fixed newstyle negotiation"). Keeps at most [`MAX_OPTION_BYTES`] of
//! what the server says; the caller bounds its time.

use std::io;

use super::super::{
    inbox::Inbox,
    negotiate::MAX_OPTION_BYTES,
    proto::{self, MAX_STRING_BYTES, client_flag, export_flag, handshake_flag, info, opt, rep},
    stream::Stream,
    wire::Fields,
};
use block::buffer::Buffer;

/// Bytes of the server's greeting: two magic numbers and its flags.
const GREETING_BYTES: usize = 18;
/// Bytes of a reply's header: magic, option, type, length.
const REPLY_BYTES: usize = 20;

/// What the server said of an export.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    pub size_bytes: u64,
    /// Offsets and lengths are to be multiples of this many bytes; at least 1.
    pub minimum_block: u32,
    /// Longest payload of a read or write, in bytes.
    pub maximum_payload: u32,
    flags: u16,
    pub(super) structured: bool,
}

impl About {
    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.flags & export_flag::READ_ONLY != 0
    }

    /// Whether there is something to flush.
    pub fn can_flush(&self) -> bool {
        self.flags & export_flag::SEND_FLUSH != 0
    }
}

/// Why there is no connection.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum NotConnected {
    #[error("cannot be connected to")]
    Io(#[from] io::Error),
    #[error("has no address")]
    NoAddress,
    #[error("did not answer within {0} seconds")]
    TooLate(u64),
    #[error("refused export {export:?}: {why}")]
    Refused { export: String, why: String },
    #[error("does not speak NBD as it should: {0}")]
    Breach(&'static str),
}

/// What the server sends behind the handshake stays in `inbox`.
pub(super) async fn negotiate(
    stream: &Stream,
    inbox: &mut Inbox,
    export: &str,
) -> Result<About, NotConnected> {
    let mut negotiation = Negotiation::new(stream, inbox);
    negotiation.greet().await?;
    let structured = negotiation.ask_for_chunks().await?;
    negotiation.go(export, structured).await
}

pub(super) struct Negotiation<'a> {
    stream: &'a Stream,
    inbox: &'a mut Inbox,
}

pub(super) struct Reply {
    pub(super) kind: u32,
    pub(super) data: Buffer,
}

impl<'a> Negotiation<'a> {
    pub(super) fn new(stream: &'a Stream, inbox: &'a mut Inbox) -> Self {
        Self { stream, inbox }
    }

    pub(super) async fn greet(&mut self) -> Result<(), NotConnected> {
        let greeting = self.receive(GREETING_BYTES).await?;
        let mut fields = Fields::new(&greeting);
        if fields.u64() != Some(proto::INIT_MAGIC) {
            return Err(NotConnected::Breach("it does not greet as an NBD server does"));
        }
        let is_new = fields.u64() == Some(proto::OPTION_MAGIC);
        let flags = fields.u16().filter(|flags| is_new && flags & handshake_flag::FIXED_NEWSTYLE != 0);
        let flags = flags.ok_or(NotConnected::Breach("it is too old for fixed newstyle negotiation"))?;
        let no_zeroes = if flags & handshake_flag::NO_ZEROES == 0 { 0 } else { client_flag::NO_ZEROES };
        self.send(&(client_flag::FIXED_NEWSTYLE | no_zeroes).to_be_bytes()).await
    }

    /// Whether replies come in chunks.
    pub(super) async fn ask_for_chunks(&mut self) -> Result<bool, NotConnected> {
        self.option(opt::STRUCTURED_REPLY, &[]).await?;
        let reply = self.reply(opt::STRUCTURED_REPLY).await?;
        match reply.kind {
            rep::ACK => Ok(true),
            kind if kind >= rep::ERR_UNSUP => Ok(false),
            _ => Err(NotConnected::Breach("it answers an option with something else")),
        }
    }

    async fn go(&mut self, export: &str, structured: bool) -> Result<About, NotConnected> {
        let length = u32::try_from(export.len()).unwrap_or(u32::MAX);
        let mut data = length.to_be_bytes().to_vec();
        data.extend_from_slice(export.as_bytes());
        // One kind of information: the block sizes.
        data.extend_from_slice(&1_u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        self.option(opt::GO, &data).await?;
        // What holds where the server says nothing ("Size constraints").
        let (mut about, mut sizes) = (None, (1, proto::DEFAULT_MAX_PAYLOAD));
        loop {
            let Reply { kind, data } = self.reply(opt::GO).await?;
            let mut fields = Fields::new(&data);
            match kind {
                rep::ACK => break,
                rep::INFO => match fields.u16() {
                    Some(info::EXPORT) => about = fields.u64().zip(fields.u16()),
                    Some(info::BLOCK_SIZE) => {
                        // The one in the middle is what the server prefers.
                        let told = fields.u32().zip(fields.u32()).zip(fields.u32());
                        sizes = told.map_or(sizes, |((minimum, _), maximum)| (minimum.max(1), maximum));
                    }
                    _ => {}
                },
                kind if kind >= rep::ERR_UNSUP => return Err(refused(export, kind, &data)),
                _ => return Err(NotConnected::Breach("it answers an option with something else")),
            }
        }
        let (size_bytes, flags) = about.ok_or(NotConnected::Breach("it does not tell the export's size"))?;
        let (minimum_block, maximum_payload) = sizes;
        Ok(About { size_bytes, flags, structured, minimum_block, maximum_payload })
    }

    pub(super) async fn option(&mut self, option: u32, data: &[u8]) -> Result<(), NotConnected> {
        let mut message = proto::OPTION_MAGIC.to_be_bytes().to_vec();
        message.extend_from_slice(&option.to_be_bytes());
        message.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
        message.extend_from_slice(data);
        self.send(&message).await
    }

    pub(super) async fn reply(&mut self, expect: u32) -> Result<Reply, NotConnected> {
        let header = self.receive(REPLY_BYTES).await?;
        let mut fields = Fields::new(&header);
        let magic = fields.u64();
        let option = fields.u32();
        let rest = fields.u32().zip(fields.u32());
        let Some((kind, length)) = rest.filter(|_| magic == Some(proto::OPTION_REPLY_MAGIC)) else {
            return Err(NotConnected::Breach("what should be a reply has another magic number"));
        };
        if option != Some(expect) {
            return Err(NotConnected::Breach("it answers an option that was not sent"));
        }
        let length = usize::try_from(length).ok().filter(|&length| length <= MAX_OPTION_BYTES);
        let length = length.ok_or(NotConnected::Breach("a reply is longer than any option needs"))?;
        Ok(Reply { kind, data: self.receive(length).await? })
    }

    async fn receive(&mut self, length: usize) -> Result<Buffer, NotConnected> {
        Ok(self.inbox.payload(length, self.stream).await?)
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), NotConnected> {
        Ok(self.stream.send(Buffer::copy_of(bytes).into()).await?)
    }
}

pub(super) fn refused(export: &str, kind: u32, data: &[u8]) -> NotConnected {
    let meaning = match kind {
        rep::ERR_UNSUP => "the server is too old: it does not know the option GO",
        rep::ERR_POLICY => "not permitted",
        rep::ERR_TLS_REQD => "the server wants TLS, which this client does not speak",
        rep::ERR_UNKNOWN => "no such export",
        rep::ERR_SHUTDOWN => "the server is ending",
        _ => "the server gives no reason",
    };
    // What a stranger sends may go to somebody's terminal.
    let said =
        String::from_utf8_lossy(&data[..data.len().min(MAX_STRING_BYTES)]).replace(char::is_control, "?");
    let why = if said.is_empty() || kind == rep::ERR_TLS_REQD { meaning.to_owned() } else { said };
    NotConnected::Refused { export: export.to_owned(), why }
}
