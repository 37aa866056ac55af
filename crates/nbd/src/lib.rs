//! The NBD protocol, as both servers and clients use it, and a client.
//!
//! ```text
//!   storage::nbd, weir bench ─► client ─► receive_buffer, wire ─► stream ─► socket, TLS, pipe
//!                      export's server ─┘
//! ```
//!
//! The constants ([`proto`]), the parsing of received bytes ([`receive_buffer`], [`wire`]) and the
//! transport ([`stream`], over the crate `tls`) are common to servers and clients. The client is
//! [`client`], through which a disk uses an export of another server; weir's own server is in the
//! crate `export`. `docs/decisions/0045` explains the split.
//!
//! The specification is `doc/proto.md` of github.com/NetworkBlockDevice/nbd. Comments name its
//! sections in quotation marks.
//!
//! Never decides about access, and never reconnects by itself: `storage::nbd` does.

#![forbid(unsafe_code)]

pub mod client;
pub mod pipe;
pub mod proto;
pub mod receive_buffer;
pub mod stream;
pub mod uri;
pub mod wire;
