//! NBD as both of its ends have it, and the end that asks.
//!
//! ```text
//!   storage::nbd, `weir bench` ──► client ──► inbox, wire, proto ──► stream ──► socket, TLS, pipe
//!                                   export's server ──┘
//! ```
//!
//! The protocol's numbers ([`proto`]), the bytes that come ([`inbox`], [`wire`]) and what carries
//! them ([`stream`], over the crate `tls`) are the same for servers and clients. The client is
//! [`client`], so that a disk of another server can be a storage; the server is `export`, above.
//! `docs/decisions/0045` says why they are here.
//!
//! The specification is `doc/proto.md` of github.com/NetworkBlockDevice/nbd. Comments name its
//! sections in quotation marks.
//!
//! Never judges who may have what, and never connects again by itself: that is `storage::nbd`.

#![forbid(unsafe_code)]

pub mod client;
pub mod inbox;
pub mod pipe;
pub mod proto;
pub mod stream;
pub mod uri;
pub mod wire;
