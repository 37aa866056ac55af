//! ublk: a disk as a block device of this host, `/dev/ublkbN`. The kernel's driver passes its
//! requests to one thread for each queue.
//!
//! ```text
//!   programs, file systems                        this process
//!     │ read, write, flush, discard                  server      makes the device, ends it
//!     ▼                                              │
//!   /dev/ublkbN ─► ublk_drv ─► queue 0 ── channel ─► queue       one on a worker
//!                           └► queue 1 ── channel ─► queue ─► request ─► batch ─► execute ─► disk
//! ```
//!
//! If the kernel supports it, and the disk is a raw image in a file, data is not copied (zero
//! copy): it stays in pages of the requesting process, which reads and writes of the file reference
//! by a registered buffer. Otherwise the kernel copies a write's data into memory that this process
//! lends, one piece for each possible request in flight, and a read's data out of it. Either way a
//! request costs one entry of the ring in addition to its I/O: commit and fetch in one.
//!
//! **Recovery.** A device outlives the process that serves it; meanwhile its openers wait. Requests
//! that are not committed are issued again to the process that takes it over, which [`UblkServer`]
//! does if the device shows the same image ([`mark`]). If no process does so in time, its [`guard`]
//! removes it, if it has one.
//!
//! - [`node`]: devices: find, create, take over, remove. [`server`]: a running device.
//! - [`channel`]: the seam between a queue and the kernel, or its simulated twin.
//!
//! Never reads data, and never depends on the openers of the device.

mod channel;
mod device;
mod devices;
mod execute;
pub mod guard;
pub mod mark;
pub mod node;
mod queue;
mod request;
pub mod server;
#[cfg(test)]
mod simulation;

pub use device::{UblkExport, UblkOffer};
pub use node::{UblkDeviceInfo, UblkError};
pub use server::{UblkServer, UblkStatistics};
