//! Framing of the handshake, from the greeting to the start of transmission, one option at a time.
//!
//! ```text
//!              ┌────────────────────────────────────────────┐
//!              ▼                                            │
//!  Flags ─► Header ─┬─► Data ──► option::answer ─┬─► replied ┤
//!                   │                            ├─► Listing ┘   (in batches)
//!                   ├─► Skip ──► refusal ────────┼──────────┘
//!                   │      └───► ACK ─► Over     ├─► Tls ─► Header, negotiated state discarded
//!                   └─► Over                     └─► Over (transmission, or closed)
//! ```
//!
//! The header alone decides whether an option is read, skipped or fatal: an announced length costs
//! nothing until the bytes arrive, and never more than [`MAX_OPTION_BYTES`].
//!
//! Never waits, and never answers two options in one step, so a caller buffers the replies of one.

use super::catalog::ExportCatalog;
use super::option::{self, NegotiatedTerms, OptionOutcome, OptionRejection, OptionReplies};
use super::proto::{self, client_flag, handshake_flag, opt, rep};
use super::session::NbdSession;
use super::wire::WireFields;

/// Longest option data that is buffered, in bytes; a longer option is rejected with ERR_TOO_BIG. A
/// list of metadata queries fits; INFO and GO need a tenth.
pub const MAX_OPTION_BYTES: usize = 64 << 10;
/// Longest option data that is skipped to reject an option, in bytes; beyond it the connection is
/// closed ("Termination of the session during option haggling").
pub const MAX_SKIPPED_BYTES: u32 = 1 << 20;
/// Number of options that a client may send: enough to describe thousands of exports one by one.
pub const MAX_OPTIONS: u32 = 1 << 14;
/// Bytes of a LIST's replies after which a step ends, so that a long list is sent in batches and a
/// client that does not read it costs little memory.
const LIST_BATCH_BYTES: usize = 2 << 10;

/// Use of TLS on a connection ("TLS support").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsPolicy {
    /// STARTTLS is rejected (the specification's NOTLS).
    Off,
    /// The client chooses (SELECTIVETLS with no TLS-only export).
    Allowed,
    /// Only STARTTLS and ABORT are accepted before TLS (FORCEDTLS).
    Required,
}

/// First four bytes of a vhost-user front end, GET_FEATURES or SET_OWNER, where an NBD client sends
/// its flags ("Vhost-user Protocol", header: native byte order, which is little-endian).
const VHOST_USER: [u32; 2] = [1_u32.swap_bytes(), 3_u32.swap_bytes()];

/// Reason for the end of a connection during the handshake. All but [`HandshakeClose::Aborted`] are
/// breaches by the client.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeClose {
    #[error("the client ended the negotiation")]
    Aborted,
    #[error("client flags {0:#x}: not offered by the server")]
    ClientFlags(u32),
    #[error(
        "the client speaks vhost-user, and this socket is for NBD (connect virtual machines to a \
         socket of --vhost-user-blk)"
    )]
    VhostUser,
    #[error("option magic {0:#018x}: not an NBD client")]
    OptionMagic(u64),
    #[error("option {option}: {length} bytes of data are too many to skip")]
    OptionTooLong { option: u32, length: u32 },
    #[error("more than {MAX_OPTIONS} options in one handshake")]
    TooManyOptions,
    #[error("option {0}: only EXPORT_NAME is allowed without fixed newstyle")]
    NotFixedNewstyle(u32),
    #[error("EXPORT_NAME: {0}")]
    ExportName(&'static str),
}

/// Action of the caller after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeEvent {
    /// Send the output, then call again with more bytes.
    NeedInput,
    /// Send the output, then call again with the bytes that were not consumed.
    Replied,
    /// Send the output, run a TLS handshake on the bytes that were not consumed and on those that
    /// follow, call [`Handshake::tls_established`], then call again with plaintext.
    StartTls,
    /// Send the output; the bytes that were not consumed begin the first request.
    Transmission(NbdSession),
    /// Send the output and close.
    Close(HandshakeClose),
}

/// The outcome of [`Handshake::advance`].
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeStep {
    pub consumed: usize,
    pub event: HandshakeEvent,
}

#[derive(Clone, Copy, Debug)]
enum HandshakePhase {
    Flags,
    Header,
    Data { option: u32, length: usize },
    Skip { option: u32, left: u32, then: AfterSkip },
    Listing { next: usize },
    Tls,
    Over(HandshakeEvent),
}

/// Reply to an option whose data was skipped.
#[derive(Clone, Copy, Debug)]
enum AfterSkip {
    Refuse(OptionRejection),
    Abort,
}

/// Server side of one connection's handshake: [`Handshake::start`] once, then
/// [`Handshake::advance`] until an event ends it. The caller limits its duration.
#[derive(Clone, Debug)]
pub struct Handshake {
    policy: TlsPolicy,
    phase: HandshakePhase,
    /// Incomplete message; never longer than [`MAX_OPTION_BYTES`].
    buffer: Vec<u8>,
    options: u32,
    terms: NegotiatedTerms,
}

impl Handshake {
    /// Starts a handshake: appends the greeting to `out`.
    pub fn start(policy: TlsPolicy, out: &mut Vec<u8>) -> Self {
        // "Fixed newstyle negotiation": NBDMAGIC, IHAVEOPT, then the server's handshake flags.
        out.extend_from_slice(&proto::INIT_MAGIC.to_be_bytes());
        out.extend_from_slice(&proto::OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        out.extend_from_slice(&flags.to_be_bytes());
        Self {
            policy,
            phase: HandshakePhase::Flags,
            buffer: Vec::new(),
            options: 0,
            terms: NegotiatedTerms::default(),
        }
    }

    /// Processes input and appends replies to `out`, for one option at most. Once an event has
    /// ended the handshake, every call returns it again and consumes nothing.
    pub fn advance(&mut self, input: &[u8], exports: &dyn ExportCatalog, out: &mut Vec<u8>) -> HandshakeStep {
        let mut rest = input;
        let event = loop {
            if let Some(event) = self.step(&mut rest, exports, out) {
                break event;
            }
        };
        // Kept, so that a further call cannot restart the handshake.
        if matches!(event, HandshakeEvent::Transmission(_) | HandshakeEvent::Close(_)) {
            self.phase = HandshakePhase::Over(event);
        }
        HandshakeStep { consumed: input.len() - rest.len(), event }
    }

    /// Continues after the TLS handshake that [`HandshakeEvent::StartTls`] requested.
    pub fn tls_established(&mut self) {
        if matches!(self.phase, HandshakePhase::Tls) {
            self.phase = HandshakePhase::Header;
        }
    }

    /// Advances by one phase; `None` if the next phase can proceed without a caller's action.
    fn step(
        &mut self,
        rest: &mut &[u8],
        exports: &dyn ExportCatalog,
        out: &mut Vec<u8>,
    ) -> Option<HandshakeEvent> {
        match self.phase {
            HandshakePhase::Flags => match self.gather(rest, 4) {
                Some(bytes) => self.client_flags(WireFields::new(&bytes)),
                None => Some(HandshakeEvent::NeedInput),
            },
            HandshakePhase::Header => match self.gather(rest, proto::OPTION_BYTES) {
                Some(bytes) => self.option_header(WireFields::new(&bytes)),
                None => Some(HandshakeEvent::NeedInput),
            },
            HandshakePhase::Data { option, length } => match self.gather(rest, length) {
                Some(data) => Some(self.option_data(option, &data, exports, out)),
                None => Some(HandshakeEvent::NeedInput),
            },
            HandshakePhase::Skip { option, left, then } => Some(self.skip(rest, option, left, then, out)),
            HandshakePhase::Listing { next } => Some(self.list(next, exports, out)),
            HandshakePhase::Tls => Some(HandshakeEvent::StartTls),
            HandshakePhase::Over(event) => Some(event),
        }
    }

    /// Moves bytes from `rest` to the buffer; returns the message once it has `length` bytes.
    fn gather(&mut self, rest: &mut &[u8], length: usize) -> Option<Vec<u8>> {
        let missing = length - self.buffer.len();
        let (taken, left) = rest.split_at(missing.min(rest.len()));
        self.buffer.extend_from_slice(taken);
        *rest = left;
        (self.buffer.len() == length).then(|| std::mem::take(&mut self.buffer))
    }

    fn client_flags(&mut self, mut bytes: WireFields<'_>) -> Option<HandshakeEvent> {
        let flags = bytes.u32()?;
        // Recognized for a better message: a frequent mistake is to connect QEMU's vhost-user to
        // NBD.
        if VHOST_USER.contains(&flags) {
            return Some(HandshakeEvent::Close(HandshakeClose::VhostUser));
        }
        // A flag that the server did not offer ends the connection ("Client flags").
        if flags & !(client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES) != 0 {
            return Some(HandshakeEvent::Close(HandshakeClose::ClientFlags(flags)));
        }
        self.terms.fixed_newstyle = flags & client_flag::FIXED_NEWSTYLE != 0;
        self.terms.no_zeroes = flags & client_flag::NO_ZEROES != 0;
        self.phase = HandshakePhase::Header;
        None
    }

    fn option_header(&mut self, mut bytes: WireFields<'_>) -> Option<HandshakeEvent> {
        let (magic, option, length) = (bytes.u64()?, bytes.u32()?, bytes.u32()?);
        if magic != proto::OPTION_MAGIC {
            return Some(HandshakeEvent::Close(HandshakeClose::OptionMagic(magic)));
        }
        // Options are cheap for a client, so their number is bounded as well as their time.
        self.options += 1;
        if let Err(close) = self.admissible(option, length) {
            return Some(HandshakeEvent::Close(close));
        }
        if option == opt::SET_META_CONTEXT {
            // The earlier selection is discarded "including when this command fails".
            self.terms.contexts = None;
        }
        self.phase = match self.early_rejection(option, length) {
            Some(then) => HandshakePhase::Skip { option, left: length, then },
            None => HandshakePhase::Data { option, length: length as usize },
        };
        None
    }

    fn admissible(&self, option: u32, length: u32) -> Result<(), HandshakeClose> {
        if self.options > MAX_OPTIONS {
            return Err(HandshakeClose::TooManyOptions);
        }
        if length > MAX_SKIPPED_BYTES {
            return Err(HandshakeClose::OptionTooLong { option, length });
        }
        if option != opt::EXPORT_NAME {
            return if self.terms.fixed_newstyle {
                Ok(())
            } else {
                Err(HandshakeClose::NotFixedNewstyle(option))
            };
        }
        // EXPORT_NAME has no error reply, so an invalid one ends the connection.
        if self.needs_tls() {
            Err(HandshakeClose::ExportName("TLS is required (the client must send STARTTLS first)"))
        } else if self.terms.extended {
            Err(HandshakeClose::ExportName("not allowed once extended headers are negotiated (use GO)"))
        } else if length as usize > proto::MAX_STRING_BYTES {
            Err(HandshakeClose::ExportName("the name is longer than 4096 bytes"))
        } else {
            Ok(())
        }
    }

    /// Rejection of an option that the header alone decides; its data is then skipped.
    fn early_rejection(&self, option: u32, length: u32) -> Option<AfterSkip> {
        let refuse = |kind, why| Some(AfterSkip::Refuse(OptionRejection { kind, why }));
        // ABORT is acknowledged whatever data it carries ("NBD_OPT_ABORT").
        if option == opt::ABORT {
            return Some(AfterSkip::Abort);
        }
        if self.needs_tls() && option != opt::STARTTLS {
            return refuse(rep::ERR_TLS_REQD, "this server requires TLS (send STARTTLS first)");
        }
        match option {
            opt::EXPORT_NAME | opt::INFO | opt::GO | opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                (length as usize > MAX_OPTION_BYTES).then_some(AfterSkip::Refuse(OptionRejection {
                    kind: rep::ERR_TOO_BIG,
                    why: "the option is too long",
                }))
            }
            // Data on these options is an error, but not a reason to lose step: it is skipped.
            opt::LIST | opt::STARTTLS | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS if length > 0 => {
                refuse(rep::ERR_INVALID, "this option takes no data")
            }
            opt::STARTTLS if self.policy == TlsPolicy::Off => {
                refuse(rep::ERR_POLICY, "TLS is not configured on this server")
            }
            opt::LIST | opt::STARTTLS | opt::STRUCTURED_REPLY | opt::EXTENDED_HEADERS => None,
            _ => refuse(rep::ERR_UNSUP, "unknown option"),
        }
    }

    fn needs_tls(&self) -> bool {
        self.policy == TlsPolicy::Required && !self.terms.secured
    }

    fn option_data(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn ExportCatalog,
        out: &mut Vec<u8>,
    ) -> HandshakeEvent {
        self.phase = HandshakePhase::Header;
        match option::answer(&mut self.terms, option, data, exports, out) {
            OptionOutcome::Replied => HandshakeEvent::Replied,
            OptionOutcome::List => self.list(0, exports, out),
            OptionOutcome::StartTls => {
                self.phase = HandshakePhase::Tls;
                HandshakeEvent::StartTls
            }
            OptionOutcome::Transmission(session) => HandshakeEvent::Transmission(session),
            // EXPORT_NAME has no error reply.
            OptionOutcome::NoExport(why) => HandshakeEvent::Close(HandshakeClose::ExportName(why)),
        }
    }

    fn skip(
        &mut self,
        rest: &mut &[u8],
        option: u32,
        left: u32,
        then: AfterSkip,
        out: &mut Vec<u8>,
    ) -> HandshakeEvent {
        let skipped = rest.len().min(left as usize);
        *rest = &rest[skipped..];
        let left = left - skipped as u32;
        if left > 0 {
            self.phase = HandshakePhase::Skip { option, left, then };
            return HandshakeEvent::NeedInput;
        }
        self.phase = HandshakePhase::Header;
        let mut replies = OptionReplies::new(option, out);
        match then {
            AfterSkip::Refuse(refusal) => {
                replies.reject(refusal);
                HandshakeEvent::Replied
            }
            AfterSkip::Abort => {
                replies.ack();
                HandshakeEvent::Close(HandshakeClose::Aborted)
            }
        }
    }

    fn list(&mut self, mut next: usize, exports: &dyn ExportCatalog, out: &mut Vec<u8>) -> HandshakeEvent {
        let start = out.len();
        let mut replies = OptionReplies::new(opt::LIST, out);
        while let Some((number, export)) = exports.next(next) {
            replies.server(&export);
            // Numbers only grow, so exports that are added or removed between batches do not
            // confuse the list.
            next = number.saturating_add(1);
            if replies.len() - start >= LIST_BATCH_BYTES {
                self.phase = HandshakePhase::Listing { next };
                return HandshakeEvent::Replied;
            }
        }
        replies.ack();
        self.phase = HandshakePhase::Header;
        HandshakeEvent::Replied
    }
}

#[cfg(test)]
#[path = "negotiate_tests.rs"]
mod tests;
