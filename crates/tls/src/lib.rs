//! TLS for all servers and clients: NBD, the web interface, etcd.
//!
//! ```text
//!   files ──► server, client: contexts ──► session: one connection without a socket (NBD)
//!                                     └──► tokio-openssl (HTTP, etcd)
//!   session ──► peer_name: name that a client proved
//! ```
//!
//! The layout of the files is that of QEMU, libnbd and nbdkit. Never opens a socket, and never
//! decides which peers are allowed: `policy::access` does.

#![forbid(unsafe_code)]

mod client;
mod files;
mod peer_name;
mod server;
mod session;

pub use client::TlsClient;
pub use files::{CredentialsError, certificates, set_identity};
pub use peer_name::peer_name;
pub use server::TlsServer;
pub use session::{TlsError, TlsRead, TlsStream};
