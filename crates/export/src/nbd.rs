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
//!    │◄── replies, then ACK or an error ────────│    Event::Replied
//!    │        … as often as it likes …          │
//!    │─── STARTTLS ────────────────────────────►│
//!    │◄── ACK ──────────────────────────────────│    Event::StartTls: from here on through a TlsStream,
//!    │◄══ TLS handshake ═══════════════════════►│    and everything negotiated before is forgotten
//!    │─── GO (or EXPORT_NAME) ─────────────────►│
//!    │◄── export's size, flags, ACK ────────────│    Event::Transmission(Session)
//!    │                                          │
//!    │─── request, request + payload, … ───────►│  request::parse against the Session
//!    │◄── replies, in any order ────────────────│  reply::Replier of the Session's style
//!    │─── DISC ────────────────────────────────►│  Command::Disconnect
//! ```
//!
//! Bytes that the handshake does not consume belong to whoever is next: the handshake again, the
//! TLS stream after [`Event::StartTls`], or the requests. The other side, and what both have
//! in common, is `nbd`. Where the client is this host's kernel, there is no handshake:
//! [`kernel`].
//!
//! No input panics, hangs, or makes the parsers hold more than [`negotiate::MAX_OPTION_BYTES`];
//! parsing a request and writing its reply allocate nothing. Deadlines, limits on connections and
//! on requests in flight are the connection's.

mod admission;
pub mod catalog;
#[cfg(test)]
mod client_tests;
mod connection;
pub mod context;
pub mod errno;
mod execute;
#[cfg(test)]
mod extents_tests;
mod holding;
mod incoming;
pub mod kernel;
mod live;
pub mod negotiate;
mod option;
mod outbox;
pub mod reply;
pub mod request;
mod rest;
pub mod server;
pub mod session;
#[cfg(test)]
mod simulation;
mod stop;
#[cfg(test)]
mod storage_simulation;
mod unread;
mod visit;

pub use admission::Refused;
pub use catalog::{BlockSizes, ExportInfo, ExportTable, Exports, Features};
pub use context::{MOST_BITMAPS, MetaContext, MetaContexts};
pub use errno::Errno;
pub use live::Export;
#[cfg(test)]
use nbd::pipe;
pub use nbd::{client, proto};
use nbd::{inbox, stream, wire};
pub use negotiate::{Close, Event, Handshake, Step, TlsPolicy};
pub use reply::{Extent, Replier, ReplyHeader};
pub use request::{Command, Parsed, Request};
pub use rest::Rested;
pub use server::{NotRemoved, Removal, Server, Terms, Tls};
pub use session::{ReplyStyle, Session, Tag};
pub use visit::{Visit, Visited};
