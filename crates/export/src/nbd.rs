//! The NBD protocol as values: bytes in, decisions out. No sockets, no clock, no disk, no threads.
//!
//! The specification is `doc/proto.md` of github.com/NetworkBlockDevice/nbd, and for extended
//! headers the same file on its branch `extension-ext-header`. Comments name its sections in
//! quotation marks.
//!
//! ```text
//!  client                                    server
//!    │◄── magic, IHAVEOPT, handshake flags ─────│  Handshake::start
//!    │─── client flags ────────────────────────►│
//!    │                                          │
//!    │─── option ──────────────────────────────►│  Handshake::advance, once for each option:
//!    │◄── replies, then ACK or an error ────────│    HandshakeEvent::Replied
//!    │        … any number of options …         │
//!    │─── STARTTLS ────────────────────────────►│
//!    │◄── ACK ──────────────────────────────────│    HandshakeEvent::StartTls: from here on through a TlsStream,
//!    │◄══ TLS handshake ═══════════════════════►│    and earlier negotiation is discarded
//!    │─── GO (or EXPORT_NAME) ─────────────────►│
//!    │◄── export's size, flags, ACK ────────────│    HandshakeEvent::Transmission(NbdSession)
//!    │                                          │
//!    │─── request, request + payload, … ───────►│  request::parse against the NbdSession
//!    │◄── replies, in any order ────────────────│  reply::NbdReplyEncoder in the session's style
//!    │─── DISC ────────────────────────────────►│  NbdCommand::Disconnect
//! ```
//!
//! Bytes that the handshake does not consume belong to the next stage: the handshake again, the
//! TLS stream after [`HandshakeEvent::StartTls`], or the requests. The crate `nbd` has the client
//! and the constants of both sides. [`kernel_client`] serves this host's kernel, which has no
//! handshake.
//!
//! No input panics, hangs, or makes the parsers hold more than [`negotiate::MAX_OPTION_BYTES`];
//! parsing a request and writing its reply allocate nothing. The connection, not the parsers,
//! enforces deadlines and the bounds on connections and requests in flight.

mod admission;
pub mod catalog;
mod client_observer;
#[cfg(test)]
mod client_tests;
mod connection;
pub mod context;
pub mod errno;
mod execute;
mod exports;
#[cfg(test)]
mod extents_tests;
mod incoming;
pub mod kernel_client;
pub mod negotiate;
mod option;
mod outbox;
mod quiesce;
pub mod reply;
pub mod request;
pub mod server;
pub mod session;
#[cfg(test)]
mod simulation;
mod stalled_readers;
mod stop_signal;
#[cfg(test)]
mod storage_simulation;
mod transfers;

pub use admission::RejectedClientCounts;
pub use catalog::{BlockSizes, ExportCatalog, ExportInfo, ExportTable, Features};
pub use client_observer::{ClientObserver, NbdClientInfo};
pub use context::{MAX_BITMAPS, MetaContext, MetaContexts};
pub use errno::Errno;
pub use exports::NbdServerExport;
#[cfg(test)]
use nbd::pipe;
pub use nbd::{client, proto};
use nbd::{receive_buffer, stream, wire};
pub use negotiate::{Handshake, HandshakeClose, HandshakeEvent, HandshakeStep, TlsPolicy};
pub use quiesce::QuiescedNbdConnection;
pub use reply::{NbdExtent, NbdReplyEncoder, ReplyHeader};
pub use request::{NbdCommand, NbdRequest, Parsed};
pub use server::{NbdServer, NbdServerTerms, NbdServerTls, NotRemoved, Removal};
pub use session::{NbdSession, ReplyStyle, RequestTag};
