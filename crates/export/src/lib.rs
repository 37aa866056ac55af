//! Exports: the protocols by which clients reach a disk. One module each; none depends on another.
//!
//! ```text
//!   client ─► export ─► block::disk
//!             nbd
//!             vhost_user_blk
//!             ublk
//!             fuse
//! ```
//!
//! Where to start: [`nbd`] opens with a drawing of the protocol. `nbd/server.rs` accepts
//! connections, `nbd/connection.rs` is one connection, `nbd/execute.rs` executes its commands.
//! [`nbd::client`] is a client, for measuring servers. [`vhost_user_blk`] sets up the virtqueues
//! that a virtual machine shares with this process; the crate `virtio` reads them and parses their
//! requests.
//! [`ublk`] is a block device of this host, [`fuse`] presents a disk as a file of this host.
//!
//! Each export parses and validates its protocol's messages first, so the layers below only receive
//! requests that lie inside the disk. Exports share nothing but the disk.
//!
//! Never decides about limits, caching or placement, and never does I/O on an image except through
//! a disk.

#![forbid(unsafe_code)]

mod batch;
pub mod fuse;
pub mod nbd;
mod peer_process;
mod trim;
pub mod ublk;
pub mod vhost_user_blk;

#[cfg(test)]
#[allow(dead_code, reason = "others need more of it")]
#[path = "../../block/tests/simulation/model.rs"]
mod model;
#[cfg(test)]
#[path = "../../block/tests/simulation/group_samples.rs"]
mod passed;
#[cfg(test)]
mod random;
#[cfg(test)]
#[path = "../../block/tests/simulation/seeds.rs"]
mod seeds;
