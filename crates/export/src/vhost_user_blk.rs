//! vhost-user for block devices: a disk for virtual machines that share their memory with this
//! process.
//!
//! A front end (QEMU, Cloud Hypervisor, Firecracker, crosvm) connects to a Unix socket and passes
//! file descriptors of its guest's memory and of eventfds. Requests then travel through virtqueues
//! in that memory, and never through the socket: the messages here only set the queues up.
//!
//! ```text
//!  front end                               back end
//!    │─── GET_FEATURES, SET_FEATURES … ──────►│  negotiation, any number of times
//!    │◄── features of the export ─────────────│    features, config_space
//!    │─── SET_MEM_TABLE, ADD_MEM_REG ────────►│  the guest's memory
//!    │─── GET_INFLIGHT_FD, SET_INFLIGHT_FD ──►│  a record that survives this process: inflight
//!    │─── SET_VRING_NUM, ADDR, BASE, KICK … ─►│  one ring: vring
//!    │─── SET_VRING_ENABLE 1 ────────────────►│    Effect::Start
//!    │═══ requests, through memory ══════════►│    the owner's queues
//!    │─── GET_VRING_BASE ────────────────────►│    Effect::Stop, answered when the ring has ended
//!    │◄── CONFIG_CHANGE_MSG ──────────────────│  the disk was resized: VhostUserConnection::resize
//! ```
//!
//! The specification is `docs/interop/vhost-user.rst` of QEMU; comments name its sections in
//! quotation marks.
//!
//! - [`message`]: bytes and values. [`session`]: the state of a front end, without I/O.
//! - [`connection`]: a session behind a socket. [`front_ends`]: accepting front ends.
//! - [`client`]: a front end, for measuring servers.
//!
//! A connection's owner takes [`Effect`]s from [`VhostUserConnection::next`] in order and
//! executes them. The session does no I/O itself.
//!
//! Never reads rings or requests, and never uses a disk.

mod back_end_channel;
mod backoff;
mod busy_polling;
pub mod client;
pub mod config_space;
pub mod connection;
mod device;
mod events;
mod execute;
pub mod features;
pub mod front_ends;
mod futile_attempts;
pub mod fuzzing;
mod immediate;
pub mod inflight;
pub mod message;
mod migration;
mod pieces;
mod queue;
pub mod server;
pub mod session;
#[cfg(test)]
mod simulation;
pub mod vring;
mod vring_event;

pub use connection::{FrontEndEnd, QuiescedFrontEnd, VhostUserConnection};
pub use device::VhostUserExport;
pub use events::{ExportObserver, FrontEndEvent, PeerProcess};
pub use features::VhostUserOffer;
pub use front_ends::FrontEnds;
pub use server::{Threads, VhostUserServer, VhostUserStatistics};
pub use session::{Effect, EventKind, RequestRejection, SessionMessage, SessionOutput, VhostUserSession};
pub use vring::{RingAreas, RingSettings, VringFault};
