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

use super::catalog::Exports;
use super::option::{self, Outcome, Refusal, Replies, Terms};
use super::proto::{self, client_flag, handshake_flag, opt, rep};
use super::session::Session;
use super::wire::Fields;

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

/// When a connection uses TLS ("TLS support").
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

/// Reason for the end of a connection during the handshake. All but [`Close::Aborted`] are breaches
/// by the client.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Close {
    #[error("the client ended the negotiation")]
    Aborted,
    #[error("client flags {0:#x}: not offered by the server")]
    ClientFlags(u32),
    #[error(
        "it speaks vhost-user, as the monitor of a virtual machine does, and this socket is for NBD (--vhost-user-blk has one for machines)"
    )]
    VhostUser,
    #[error("option magic {0:#018x}: not an NBD client")]
    OptionMagic(u64),
    #[error("option {option}: {length} bytes of data are too many to skip")]
    OptionTooLong { option: u32, length: u32 },
    #[error("more than {MAX_OPTIONS} options: taken for an attack")]
    TooManyOptions,
    #[error("option {0}: only EXPORT_NAME is allowed without fixed newstyle")]
    NotFixedNewstyle(u32),
    #[error("EXPORT_NAME: {0}")]
    ExportName(&'static str),
}

/// Action of the caller after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// Send the output, then call again with more bytes.
    NeedInput,
    /// Send the output, then call again with the bytes that were not consumed.
    Replied,
    /// Send the output, run a TLS handshake on the bytes that were not consumed and on those that
    /// follow, call [`Handshake::tls_established`], then call again with plaintext.
    StartTls,
    /// Send the output; the bytes that were not consumed begin the first request.
    Transmission(Session),
    /// Send the output and close.
    Close(Close),
}

/// The outcome of [`Handshake::advance`].
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub consumed: usize,
    pub event: Event,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    Flags,
    Header,
    Data { option: u32, length: usize },
    Skip { option: u32, left: u32, then: Then },
    Listing { next: usize },
    Tls,
    Over(Event),
}

/// Reply to an option whose data was skipped.
#[derive(Clone, Copy, Debug)]
enum Then {
    Refuse(Refusal),
    Abort,
}

/// Server side of one connection's handshake: [`Handshake::start`] once, then
/// [`Handshake::advance`] until an event ends it. The caller limits its duration.
#[derive(Clone, Debug)]
pub struct Handshake {
    policy: TlsPolicy,
    phase: Phase,
    /// Incomplete message; never longer than [`MAX_OPTION_BYTES`].
    buffer: Vec<u8>,
    options: u32,
    terms: Terms,
}

impl Handshake {
    /// Starts a handshake: appends the greeting to `out`.
    pub fn start(policy: TlsPolicy, out: &mut Vec<u8>) -> Self {
        // "Fixed newstyle negotiation": NBDMAGIC, IHAVEOPT, then the server's handshake flags.
        out.extend_from_slice(&proto::INIT_MAGIC.to_be_bytes());
        out.extend_from_slice(&proto::OPTION_MAGIC.to_be_bytes());
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        out.extend_from_slice(&flags.to_be_bytes());
        Self { policy, phase: Phase::Flags, buffer: Vec::new(), options: 0, terms: Terms::default() }
    }

    /// Processes input and appends replies to `out`, for one option at most. Once an event has
    /// ended the handshake, every call returns it again and consumes nothing.
    pub fn advance(&mut self, input: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Step {
        let mut rest = input;
        let event = loop {
            if let Some(event) = self.step(&mut rest, exports, out) {
                break event;
            }
        };
        // Kept, so that a further call cannot restart the handshake.
        if matches!(event, Event::Transmission(_) | Event::Close(_)) {
            self.phase = Phase::Over(event);
        }
        Step { consumed: input.len() - rest.len(), event }
    }

    /// Continues after the TLS handshake that [`Event::StartTls`] asked for.
    pub fn tls_established(&mut self) {
        if matches!(self.phase, Phase::Tls) {
            self.phase = Phase::Header;
        }
    }

    /// Advances by one phase; `None` if the next phase can proceed without a caller's action.
    fn step(&mut self, rest: &mut &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Option<Event> {
        match self.phase {
            Phase::Flags => match self.gather(rest, 4) {
                Some(bytes) => self.client_flags(Fields::new(&bytes)),
                None => Some(Event::NeedInput),
            },
            Phase::Header => match self.gather(rest, proto::OPTION_BYTES) {
                Some(bytes) => self.option_header(Fields::new(&bytes)),
                None => Some(Event::NeedInput),
            },
            Phase::Data { option, length } => match self.gather(rest, length) {
                Some(data) => Some(self.option_data(option, &data, exports, out)),
                None => Some(Event::NeedInput),
            },
            Phase::Skip { option, left, then } => Some(self.skip(rest, option, left, then, out)),
            Phase::Listing { next } => Some(self.list(next, exports, out)),
            Phase::Tls => Some(Event::StartTls),
            Phase::Over(event) => Some(event),
        }
    }

    /// Moves bytes from `rest` to the buffer; returns the message once it has `want` bytes.
    fn gather(&mut self, rest: &mut &[u8], want: usize) -> Option<Vec<u8>> {
        let missing = want - self.buffer.len();
        let (taken, left) = rest.split_at(missing.min(rest.len()));
        self.buffer.extend_from_slice(taken);
        *rest = left;
        (self.buffer.len() == want).then(|| std::mem::take(&mut self.buffer))
    }

    fn client_flags(&mut self, mut bytes: Fields<'_>) -> Option<Event> {
        let flags = bytes.u32()?;
        // Recognized for a better message: a frequent mistake is to connect QEMU's vhost-user to
        // NBD.
        if VHOST_USER.contains(&flags) {
            return Some(Event::Close(Close::VhostUser));
        }
        // A flag that the server did not offer ends the connection ("Client flags").
        if flags & !(client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES) != 0 {
            return Some(Event::Close(Close::ClientFlags(flags)));
        }
        self.terms.fixed_newstyle = flags & client_flag::FIXED_NEWSTYLE != 0;
        self.terms.no_zeroes = flags & client_flag::NO_ZEROES != 0;
        self.phase = Phase::Header;
        None
    }

    fn option_header(&mut self, mut bytes: Fields<'_>) -> Option<Event> {
        let (magic, option, length) = (bytes.u64()?, bytes.u32()?, bytes.u32()?);
        if magic != proto::OPTION_MAGIC {
            return Some(Event::Close(Close::OptionMagic(magic)));
        }
        // Options are cheap for a client, so their number is bounded as well as their time.
        self.options += 1;
        if let Err(close) = self.admissible(option, length) {
            return Some(Event::Close(close));
        }
        if option == opt::SET_META_CONTEXT {
            // The earlier selection is discarded "including when this command fails".
            self.terms.contexts = None;
        }
        self.phase = match self.refusal(option, length) {
            Some(then) => Phase::Skip { option, left: length, then },
            None => Phase::Data { option, length: length as usize },
        };
        None
    }

    fn admissible(&self, option: u32, length: u32) -> Result<(), Close> {
        if self.options > MAX_OPTIONS {
            return Err(Close::TooManyOptions);
        }
        if length > MAX_SKIPPED_BYTES {
            return Err(Close::OptionTooLong { option, length });
        }
        if option != opt::EXPORT_NAME {
            return if self.terms.fixed_newstyle { Ok(()) } else { Err(Close::NotFixedNewstyle(option)) };
        }
        // EXPORT_NAME has no error reply, so an invalid one ends the connection.
        if self.needs_tls() {
            Err(Close::ExportName("TLS is required (the client must send STARTTLS first)"))
        } else if self.terms.extended {
            Err(Close::ExportName("not allowed once extended headers are negotiated (use GO)"))
        } else if length as usize > proto::MAX_STRING_BYTES {
            Err(Close::ExportName("the name is longer than 4096 bytes"))
        } else {
            Ok(())
        }
    }

    /// Rejection of an option that the header alone decides; its data is then skipped.
    fn refusal(&self, option: u32, length: u32) -> Option<Then> {
        let refuse = |kind, why| Some(Then::Refuse(Refusal { kind, why }));
        // ABORT is acknowledged whatever data it carries ("NBD_OPT_ABORT").
        if option == opt::ABORT {
            return Some(Then::Abort);
        }
        if self.needs_tls() && option != opt::STARTTLS {
            return refuse(rep::ERR_TLS_REQD, "this server requires TLS (send STARTTLS first)");
        }
        match option {
            opt::EXPORT_NAME | opt::INFO | opt::GO | opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT => {
                (length as usize > MAX_OPTION_BYTES).then_some(Then::Refuse(Refusal {
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

    fn option_data(&mut self, option: u32, data: &[u8], exports: &dyn Exports, out: &mut Vec<u8>) -> Event {
        self.phase = Phase::Header;
        match option::answer(&mut self.terms, option, data, exports, out) {
            Outcome::Replied => Event::Replied,
            Outcome::List => self.list(0, exports, out),
            Outcome::StartTls => {
                self.phase = Phase::Tls;
                Event::StartTls
            }
            Outcome::Transmission(session) => Event::Transmission(session),
            // EXPORT_NAME has no error reply.
            Outcome::NoExport(why) => Event::Close(Close::ExportName(why)),
        }
    }

    fn skip(&mut self, rest: &mut &[u8], option: u32, left: u32, then: Then, out: &mut Vec<u8>) -> Event {
        let skipped = rest.len().min(left as usize);
        *rest = &rest[skipped..];
        let left = left - skipped as u32;
        if left > 0 {
            self.phase = Phase::Skip { option, left, then };
            return Event::NeedInput;
        }
        self.phase = Phase::Header;
        let mut replies = Replies::new(option, out);
        match then {
            Then::Refuse(refusal) => {
                replies.refuse(refusal);
                Event::Replied
            }
            Then::Abort => {
                replies.ack();
                Event::Close(Close::Aborted)
            }
        }
    }

    fn list(&mut self, mut next: usize, exports: &dyn Exports, out: &mut Vec<u8>) -> Event {
        let start = out.len();
        let mut replies = Replies::new(opt::LIST, out);
        while let Some((number, export)) = exports.next(next) {
            replies.server(&export);
            // Numbers only grow, so exports that are added or removed between batches do not
            // confuse the list.
            next = number.saturating_add(1);
            if replies.len() - start >= LIST_BATCH_BYTES {
                self.phase = Phase::Listing { next };
                return Event::Replied;
            }
        }
        replies.ack();
        self.phase = Phase::Header;
        Event::Replied
    }
}

#[cfg(test)]
#[path = "negotiate_tests.rs"]
mod tests;
