//! Control plane of the daemon: the running state, and every way to change it.
//!
//! ```text
//!   serve ─────────► Registry ◄───────── control socket
//!   starts and ends     │ by name: disks, groups, servers, exports
//!                       ▼
//!                  the parts of the data path
//! ```
//!
//! ```text
//!   reconcile/  brings the running state to a plan: start, reload, retry, dry run
//!   reload/     reads the config file again and reconciles
//!   takeover/   upgrade: a new process continues for the old one
//!   moving/     migration: a disk moves to another host of the cluster
//!   qmp/        the control socket: stream ─► session ─► command ─► commands/, one file per subject
//!   listen/     the sockets that clients connect to
//!   events/     event ring, rate limits, event types
//!   recording/  recordings of requests
//!   notify      messages to the service manager
//!   users       openers of devices of this host: mounts, other devices, processes
//! ```
//!
//! The QMP command `block_set_io_throttle` is in `qmp/commands/throttle.rs`; the table of all
//! commands is in `commands.rs`.
//!
//! The [`Registry`](registry::Registry) is the only list of running objects. It belongs to the main
//! thread. Never used by the data path.

mod adding;
mod around_cluster;
pub mod assemble;
mod bitmaps;
pub mod change;
mod coming_up;
pub mod devices;
pub mod doors;
pub mod events;
pub mod exports;
pub mod fdsets;
mod held_back;
mod left_out;
pub mod listen;
pub mod loaded;
mod looking;
pub mod moving;
pub mod notify;
mod opening;
mod promises;
pub mod qmp;
pub mod reconcile;
pub mod recording;
pub mod registry;
pub mod reload;
pub mod running;
pub mod serving;
pub mod takeover;
mod turns;
mod unopened;
pub mod users;
pub mod wanted;
pub mod watch;

#[doc(hidden)]
pub use qmp::fuzzing;
pub use qmp::qemu_release;
