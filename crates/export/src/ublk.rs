//! ublk: a disk as a block device of this host, `/dev/ublkbN`. Its requests come from the kernel's
//! driver, by one thread for each queue.
//!
//! ```text
//!   programs, file systems                        this process
//!     │ read, write, flush, discard                  server      makes the device, ends it
//!     ▼                                              │
//!   /dev/ublkbN ─► ublk_drv ─► queue 0 ── channel ─► queue       one on a worker
//!                           └► queue 1 ── channel ─► queue ─► request ─► intake ─► execute ─► disk
//! ```
//!
//! Where the kernel can, and the disk is a raw image in a file, data stays where it is: in pages of
//! whoever asked, which reads and writes of the file name by the number of a buffer, and nobody
//! copies them. Else the kernel copies a write's data into memory that we lend it, one piece for
//! each request that may be in flight, and a read's data out of it. Both ways a request costs one
//! entry of the ring beside its I/O: its answer, with which the next is awaited.
//!
//! **Recovery.** A device outlives the process that serves it: whoever uses it waits. Requests in
//! hand are given again to whoever takes it over, which [`Server`] does if the device shows the
//! same image ([`mark`]). Where nobody does so in time, its [`guard`] removes it, if it has one.
//!
//! - [`node`]: devices as such: found, made, taken over, removed. [`server`]: one at work.
//! - [`channel`]: the seam between a queue and the kernel, or its simulated twin.
//!
//! Never looks at data, and knows nothing of who uses the device.

mod channel;
mod device;
mod execute;
pub mod guard;
mod known;
pub mod mark;
pub mod node;
mod queue;
mod request;
pub mod server;
#[cfg(test)]
mod simulation;

pub use device::{Export, Offer};
pub use node::{Found, Refused};
pub use server::{Server, Statistics};
