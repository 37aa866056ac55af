//! FUSE: a disk as one regular file of this host, mounted over an existing file.
//!
//! ```text
//!   program ─► kernel: one file ══ /dev/fuse ══ queue ─► block::disk
//!                                                 on one worker
//! ```
//!
//! Where to start: [`mount`](FuseMount) mounts the file and returns the descriptor of `/dev/fuse`;
//! [`server`](FuseExportServer) answers INIT ([`negotiate`]) and starts the queues; `queue.rs`
//! receives messages into the buffers of `receive_buffer.rs`, [`message`] parses them, and
//! `execute.rs` executes the requests. `channel.rs` is the seam to the kernel: in simulation, that
//! is a kernel in memory.
//!
//! [The guide](../../../../docs/devices.md) lists the behaviour of the file by operation.
//!
//! Never accesses an image except through its disk, and caches no data.

mod channel;
mod device;
mod encode;
mod execute;
mod file_end;
pub mod fuzzing;
mod incoming;
mod interrupts;
pub mod message;
mod mount;
pub mod negotiate;
mod queue;
mod receive_buffer;
mod server;
#[cfg(test)]
mod simulation;

pub use device::{FuseExport, FuseFileOwner, FuseFileState};
pub use mount::{FuseMount, FuseMountOptions, NotMounted, TransferredMount, served_at};
pub use server::{FuseExportServer, FuseStatistics, QuiescedFuseFile};
