//! FUSE: a disk as one regular file of this host, seen in place of a file that is there.
//!
//! ```text
//!   program ─► kernel: one file ══ /dev/fuse ══ queue ─► block::disk
//!                                                 on one worker
//! ```
//!
//! The way through it: [`mount`](Mount) has the kernel show the file and gives a descriptor;
//! [`server`](Server) answers INIT ([`negotiate`]) and starts the queues; `queue.rs` takes messages
//! (`letter.rs` is the memory for one, [`message`] its bytes as values) and `execute.rs` carries
//! them out. `channel.rs` is the seam to the kernel: in simulation, that is a kernel in memory.
//!
//! The file behaves as [the guide](../../../../docs/devices.md) says, operation by operation.
//!
//! Never touches an image but through its disk, and keeps no data.

mod channel;
mod device;
mod execute;
pub mod fuzzing;
mod interrupts;
mod letter;
pub mod message;
mod mount;
pub mod negotiate;
mod queue;
mod server;
#[cfg(test)]
mod simulation;
mod size;
mod told;
mod work;

pub use device::{Export, Owner, Standing};
pub use mount::{Mount, NotMounted, Options, Told, served_at};
pub use server::{Rested, Server, Statistics};
