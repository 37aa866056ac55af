//! Virtio without I/O: rings in guest memory, and the requests of block devices in them. No
//! sockets, no events, no disk, no threads.
//!
//! The specification is "Virtual I/O Device (VIRTIO) Version 1.3"; comments name its sections. The
//! log with which a ring survives a crash is "Inflight I/O tracking" of the vhost-user
//! specification.
//!
//! ```text
//!   driver, in the guest                       device, here
//!     │  chain of descriptors, index ─────────►│  Virtqueue::take
//!     │                                        │    block::parse ─► BlkRequest, or a status at once
//!     │                                        │    … the disk …
//!     │◄───────────────── status, used entry ──│  BlkRequest::finish, Virtqueue::complete
//!     │◄───────────────── a call, if wanted ───│  Virtqueue::wants_call
//! ```
//!
//! The guest is not trusted, and may change its memory at any time: everything is copied once, and
//! the copy is validated. No content of that memory causes a panic or a hang, or determines the
//! size of an allocation beyond the ring's own.

#![forbid(unsafe_code)]

pub mod block;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod ring;

#[cfg(test)]
#[path = "../../block/tests/simulation/seeds.rs"]
mod seeds;
