//! The client's handshake ("Fixed newstyle negotiation"). Keeps at most [`MAX_OPTION_BYTES`] of the
//! server's replies; the caller bounds its time.

use std::io;

use super::super::{
    proto::{self, MAX_STRING_BYTES, client_flag, export_flag, handshake_flag, info, opt, rep},
    receive_buffer::ReceiveBuffer,
    stream::{NbdStream, TlsFailure},
    wire::WireFields,
};
use reactor::{buffer::IoBuffer, sanitize::sanitize};
use tls::{TlsClient, TlsError};

/// Maximum length of a reply to an option, in bytes; weir's server has the same limit for options.
const MAX_OPTION_BYTES: usize = 64 << 10;
/// The context of allocation status ("Metadata querying").
const ALLOCATION: &str = "base:allocation";
/// Maximum number of contexts in a reply to a query for one.
const MAX_CONTEXTS: usize = 16;
/// Minimum of a server's maximum payload, in bytes, unless its export is smaller: with less, one
/// request would be split into thousands.
const MIN_MAX_PAYLOAD: u32 = 4096;
/// Length of the server's greeting: two magic numbers and its flags.
const GREETING_BYTES: usize = 18;
/// Length of a reply's header: magic, option, type, length.
const REPLY_BYTES: usize = 20;

/// Parameters of the negotiation.
#[derive(Clone, Debug, Default)]
pub struct HandshakeOptions {
    /// Name of the export.
    pub export: String,
    /// Requires TLS with these credentials.
    pub tls: Option<TlsClient>,
    /// Negotiates allocation status, if the server supports it.
    pub allocation: bool,
}

/// Properties of an export, as negotiated.
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdExportInfo {
    pub size_bytes: u64,
    /// Granularity of offsets and lengths, in bytes; at least 1.
    pub minimum_block: u32,
    /// Preferred request size of the server, in bytes; a power of two.
    pub preferred_block: u32,
    /// Maximum payload of a read or write, in bytes; a non-zero multiple of the minimum block.
    pub maximum_payload: u32,
    flags: u16,
    pub(super) structured: bool,
    /// Id of the context of allocation status, if negotiated.
    pub(super) allocation: Option<u32>,
}

impl NbdExportInfo {
    /// True if both describe the same export, as far as is visible. Context ids are ignored, since
    /// they differ between connections.
    pub fn is_same_export(&self, other: &Self) -> bool {
        let without_context_id =
            |export: &Self| Self { allocation: export.allocation.map(|_| 0), ..export.clone() };
        without_context_id(self) == without_context_id(other)
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & export_flag::HAS_FLAGS != 0 && self.flags & flag != 0
    }

    /// True if writes are rejected.
    pub fn is_read_only(&self) -> bool {
        self.has(export_flag::READ_ONLY)
    }

    /// True if the server supports flushes.
    pub fn can_flush(&self) -> bool {
        self.has(export_flag::SEND_FLUSH)
    }

    /// True if the server supports FUA.
    pub fn can_fua(&self) -> bool {
        self.has(export_flag::SEND_FUA)
    }

    /// True if the server supports TRIM.
    pub fn can_trim(&self) -> bool {
        self.has(export_flag::SEND_TRIM)
    }

    /// True if the server supports WRITE_ZEROES.
    pub fn can_zero(&self) -> bool {
        self.has(export_flag::SEND_WRITE_ZEROES)
    }

    /// True if the server supports FAST_ZERO: it fails a slow zeroing at once.
    pub fn can_fast_zero(&self) -> bool {
        self.has(export_flag::SEND_FAST_ZERO)
    }

    /// True if a flush on one connection covers the writes of all (multi-conn).
    pub fn can_multi_conn(&self) -> bool {
        self.has(export_flag::CAN_MULTI_CONN)
    }

    /// True if the server reports allocation status.
    pub fn has_allocation(&self) -> bool {
        self.allocation.is_some()
    }
}

/// Reason of a failed connection.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum NbdConnectError {
    #[error("cannot connect")]
    Io(#[from] io::Error),
    #[error("has no address")]
    NoAddress,
    #[error("did not answer within {0} seconds")]
    TimedOut(u64),
    #[error("refused export {export:?}: {why}")]
    Refused { export: String, why: String },
    #[error("violates the NBD protocol: {0}")]
    ProtocolViolation(&'static str),
    #[error("TLS failed: {0}")]
    Tls(String),
    /// A server that requires a client certificate disconnects like this without a valid one.
    #[error("closed the connection during TLS")]
    Disconnected(#[source] io::Error),
}

impl NbdConnectError {
    /// The message with the system's error, if there is one.
    pub fn full_message(&self) -> String {
        let cause = std::error::Error::source(self).map(|cause| format!(": {cause}")).unwrap_or_default();
        format!("{self}{cause}")
    }
}

impl From<TlsFailure> for NbdConnectError {
    fn from(failure: TlsFailure) -> Self {
        Self::Tls(match failure {
            TlsFailure::Socket(error) => {
                format!("the server closed the connection in the handshake: {error}")
            }
            failure => failure.to_string(),
        })
    }
}

/// Performs the negotiation. Bytes after the handshake stay in the receive buffer.
pub(super) async fn negotiate(
    stream: NbdStream,
    options: &HandshakeOptions,
) -> Result<(NbdStream, NbdExportInfo, ReceiveBuffer), NbdConnectError> {
    let mut negotiation = Negotiation::new(stream);
    negotiation.greet().await?;
    if let Some(tls) = &options.tls {
        negotiation = negotiation.start_tls(tls).await?;
    }
    // The first message under TLS: a server that requires a client certificate disconnects here.
    let structured = negotiation.negotiate_structured_replies().await.map_err(|error| match error {
        NbdConnectError::Io(error) if options.tls.is_some() => NbdConnectError::Disconnected(error),
        error => error,
    })?;
    let allocation = match options.allocation && structured {
        true => negotiation.negotiate_allocation(&options.export).await?,
        false => None,
    };
    let export_info = negotiation.go(&options.export, structured, allocation).await?;
    Ok((negotiation.stream, export_info, negotiation.inbox))
}

pub(super) struct Negotiation {
    stream: NbdStream,
    inbox: ReceiveBuffer,
}

pub(super) struct OptionReply {
    pub(super) kind: u32,
    pub(super) data: IoBuffer,
}

impl Negotiation {
    pub(super) fn new(stream: NbdStream) -> Self {
        Self { stream, inbox: ReceiveBuffer::new() }
    }

    /// Starts TLS and discards everything received in plaintext, which an attacker may have
    /// injected.
    async fn start_tls(mut self, tls: &TlsClient) -> Result<Self, NbdConnectError> {
        self.option(opt::STARTTLS, &[]).await?;
        let reply = self.reply(opt::STARTTLS).await?;
        if reply.kind != rep::ACK {
            let message = server_text(&reply.data);
            return Err(NbdConnectError::Tls(if message.is_empty() {
                "the server has no TLS".to_owned()
            } else {
                message
            }));
        }
        let connection = tls.connect().map_err(|error| NbdConnectError::Tls(error.to_string()))?;
        let stream =
            self.stream.start_tls(connection, self.inbox.bytes()).await.map_err(|failure| match failure {
                TlsFailure::Tls(TlsError::Certificate(_)) if tls.has_key() => NbdConnectError::Tls(
                    "the server presents a certificate instead of the pre-shared key".to_owned(),
                ),
                failure => failure.into(),
            })?;
        // A new receive buffer: nothing received before TLS is kept.
        Ok(Self::new(stream))
    }

    /// Negotiates allocation status; returns the id of the context, `None` without support.
    async fn negotiate_allocation(&mut self, export: &str) -> Result<Option<u32>, NbdConnectError> {
        let string = |text: &str| {
            let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
            [&length.to_be_bytes(), text.as_bytes()].concat()
        };
        let query = [string(export), 1_u32.to_be_bytes().to_vec(), string(ALLOCATION)].concat();
        self.option(opt::SET_META_CONTEXT, &query).await?;
        let mut found = None;
        for _ in 0..MAX_CONTEXTS {
            let OptionReply { kind, data } = self.reply(opt::SET_META_CONTEXT).await?;
            match kind {
                rep::ACK => return Ok(found),
                rep::META_CONTEXT => {
                    let id = WireFields::new(&data).u32();
                    // A 32-bit id, then the name.
                    if data.get(4..) == Some(ALLOCATION.as_bytes()) {
                        found = id;
                    }
                }
                // Unsupported: the client works without allocation status.
                kind if kind >= rep::ERR_UNSUP => return Ok(None),
                _ => {
                    return Err(NbdConnectError::ProtocolViolation(
                        "it sends an unexpected reply to an option",
                    ));
                }
            }
        }
        Err(NbdConnectError::ProtocolViolation("it has more contexts than requested"))
    }

    pub(super) async fn greet(&mut self) -> Result<(), NbdConnectError> {
        let greeting = self.receive(GREETING_BYTES).await?;
        let mut fields = WireFields::new(&greeting);
        if fields.u64() != Some(proto::INIT_MAGIC) {
            return Err(NbdConnectError::ProtocolViolation("it does not send an NBD greeting"));
        }
        // A server with oldstyle negotiation sends another second magic number.
        let is_new = fields.u64() == Some(proto::OPTION_MAGIC);
        let flags = fields.u16().filter(|flags| is_new && flags & handshake_flag::FIXED_NEWSTYLE != 0);
        let flags = flags
            .ok_or(NbdConnectError::ProtocolViolation("it is too old for fixed newstyle negotiation"))?;
        let no_zeroes = if flags & handshake_flag::NO_ZEROES == 0 { 0 } else { client_flag::NO_ZEROES };
        self.send(&(client_flag::FIXED_NEWSTYLE | no_zeroes).to_be_bytes()).await
    }

    /// Negotiates structured replies; returns whether the server supports them.
    pub(super) async fn negotiate_structured_replies(&mut self) -> Result<bool, NbdConnectError> {
        self.option(opt::STRUCTURED_REPLY, &[]).await?;
        let reply = self.reply(opt::STRUCTURED_REPLY).await?;
        match reply.kind {
            rep::ACK => Ok(true),
            kind if kind >= rep::ERR_UNSUP => Ok(false),
            _ => Err(NbdConnectError::ProtocolViolation("it sends an unexpected reply to an option")),
        }
    }

    async fn go(
        &mut self,
        export: &str,
        structured: bool,
        allocation: Option<u32>,
    ) -> Result<NbdExportInfo, NbdConnectError> {
        let length = u32::try_from(export.len()).unwrap_or(u32::MAX);
        let mut data = length.to_be_bytes().to_vec();
        data.extend_from_slice(export.as_bytes());
        // One information request: the block sizes.
        data.extend_from_slice(&1_u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        self.option(opt::GO, &data).await?;
        // Defaults without information from the server ("Size constraints").
        let (mut size_and_flags, mut sizes) = (None, ((1, 4096), proto::DEFAULT_MAX_PAYLOAD));
        loop {
            let OptionReply { kind, data } = self.reply(opt::GO).await?;
            let mut fields = WireFields::new(&data);
            match kind {
                rep::ACK => break,
                rep::INFO => match fields.u16() {
                    Some(info::EXPORT) => size_and_flags = fields.u64().zip(fields.u16()),
                    Some(info::BLOCK_SIZE) => {
                        // A truncated one is ignored, since the defaults are always safe.
                        sizes = fields.u32().zip(fields.u32()).zip(fields.u32()).unwrap_or(sizes);
                    }
                    _ => {}
                },
                kind if kind >= rep::ERR_UNSUP => return Err(refused_error(export, kind, &data)),
                _ => {
                    return Err(NbdConnectError::ProtocolViolation(
                        "it sends an unexpected reply to an option",
                    ));
                }
            }
        }
        let (size_bytes, flags) = size_and_flags
            .ok_or(NbdConnectError::ProtocolViolation("it does not report the export's size"))?;
        // Most servers and Linux use signed offsets.
        if i64::try_from(size_bytes).is_err() {
            return Err(NbdConnectError::ProtocolViolation("it reports a size of 8 EiB or more"));
        }
        let ((minimum, preferred), maximum) = sizes;
        // "Size constraints": the minimum is a power of two of at most 64 KiB, and the preferred
        // size a larger one. An invalid preferred size is replaced by a safe default.
        let minimum_block = minimum.max(1);
        if !minimum_block.is_power_of_two() || minimum_block > proto::MAX_MINIMUM_BLOCK {
            return Err(NbdConnectError::ProtocolViolation(
                "its minimum block is not a power of two up to 64 KiB",
            ));
        }
        // Rounded down, so that the parts of a split request stay aligned.
        let maximum_payload = maximum & !(minimum_block - 1);
        let is_valid = preferred.is_power_of_two() && preferred <= maximum_payload;
        let preferred = if is_valid { preferred } else { 4096 };
        if maximum_payload == 0 {
            return Err(NbdConnectError::ProtocolViolation(
                "its maximum payload is smaller than its minimum block",
            ));
        }
        if u64::from(maximum_payload) < u64::from(MIN_MAX_PAYLOAD).min(size_bytes) {
            return Err(NbdConnectError::ProtocolViolation("its maximum payload is smaller than 4096 bytes"));
        }
        let preferred_block = preferred.max(minimum_block);
        Ok(NbdExportInfo {
            size_bytes,
            minimum_block,
            preferred_block,
            maximum_payload,
            flags,
            structured,
            allocation,
        })
    }

    pub(super) async fn option(&mut self, option: u32, data: &[u8]) -> Result<(), NbdConnectError> {
        let mut message = proto::OPTION_MAGIC.to_be_bytes().to_vec();
        message.extend_from_slice(&option.to_be_bytes());
        message.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
        message.extend_from_slice(data);
        self.send(&message).await
    }

    pub(super) async fn reply(&mut self, expect: u32) -> Result<OptionReply, NbdConnectError> {
        let header = self.receive(REPLY_BYTES).await?;
        let mut fields = WireFields::new(&header);
        let magic = fields.u64();
        let option = fields.u32();
        let kind_and_length = fields.u32().zip(fields.u32());
        let Some((kind, length)) = kind_and_length.filter(|_| magic == Some(proto::OPTION_REPLY_MAGIC))
        else {
            return Err(NbdConnectError::ProtocolViolation("a reply has a wrong magic number"));
        };
        // One option is in flight at a time, so its replies come next.
        if option != Some(expect) {
            return Err(NbdConnectError::ProtocolViolation("it answers an option that was not sent"));
        }
        let length = usize::try_from(length).ok().filter(|&length| length <= MAX_OPTION_BYTES);
        let length =
            length.ok_or(NbdConnectError::ProtocolViolation("a reply is longer than any option needs"))?;
        Ok(OptionReply { kind, data: self.receive(length).await? })
    }

    async fn receive(&mut self, length: usize) -> Result<IoBuffer, NbdConnectError> {
        Ok(self.inbox.payload(length, &self.stream).await?)
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<(), NbdConnectError> {
        Ok(self.stream.send(IoBuffer::copy_of(bytes).into()).await?)
    }
}

pub(super) fn refused_error(export: &str, kind: u32, data: &[u8]) -> NbdConnectError {
    let default_message = match kind {
        rep::ERR_UNSUP => "the server is too old: it does not support the option GO",
        rep::ERR_POLICY => "not permitted",
        rep::ERR_TLS_REQD => "the server requires TLS (nbds://)",
        rep::ERR_UNKNOWN => "no such export",
        rep::ERR_SHUTDOWN => "the server is shutting down",
        _ => "the server gives no reason",
    };
    let message = server_text(data);
    let why =
        if message.is_empty() || kind == rep::ERR_TLS_REQD { default_message.to_owned() } else { message };
    NbdConnectError::Refused { export: export.to_owned(), why }
}

/// Escapes text of the server, which may be written to a terminal.
fn server_text(data: &[u8]) -> String {
    sanitize(&String::from_utf8_lossy(&data[..data.len().min(MAX_STRING_BYTES)]))
}
