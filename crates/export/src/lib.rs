//! How clients reach a disk: a module for each protocol, and none knows another.
//!
//! ```text
//!   client ─► export ─► block::disk
//!             nbd
//!             vhost_user_blk
//!             ublk
//!             fuse
//! ```
//!
//! The way through it: [`nbd`] opens with a drawing of the protocol. `nbd/server.rs` accepts
//! connections, `nbd/connection.rs` is one of them, `nbd/execute.rs` carries out its commands;
//! [`nbd::client`] is the other side, for measuring servers. [`vhost_user_blk`] sets up the rings
//! that a virtual machine shares with us; the crate `virtio` is those rings, and the requests in
//! them.
//! [`ublk`] is a block device of this host, [`fuse`] shows a disk as a file of it.
//!
//! A protocol's messages are parsed and validated here, before anything else sees them, so that the
//! layers below only meet requests that lie inside the disk. What exports share is the disk behind
//! them.
//!
//! Never decides about limits, caching or placement, and never does I/O on an image but through a
//! disk.

#![forbid(unsafe_code)]

mod afterwards;
pub mod fuse;
mod intake;
pub mod nbd;
mod process;
mod race;
pub mod ublk;
pub mod vhost_user_blk;

#[cfg(test)]
mod draw;
#[cfg(test)]
#[allow(dead_code, reason = "others need more of it")]
#[path = "../../block/tests/simulation/model.rs"]
mod model;
#[cfg(test)]
#[path = "../../block/tests/simulation/passed.rs"]
mod passed;
#[cfg(test)]
#[path = "../../block/tests/simulation/seeds.rs"]
mod seeds;
