//! Jobs: operations on a disk that take long, while clients use it.
//!
//! ```text
//!   control ─► Job (state, progress, cancel) ◄─ backup ─► point in time of the disk ─► block
//!                                                    └──► target image ──────────────► image
//! ```
//!
//! - [`job`] has the states of all jobs, their transitions, and what an operator can do with them.
//! - [`backup`] copies a disk as it was at one instant.
//!
//! The I/O of a job on its disk is admitted like a client's, as background work of the disk's group
//! ([`block::layer::throttle::BackgroundMember`]).
//!
//! Never opens or creates an image, never reads a configuration, and never makes a client's request
//! fail.

#![forbid(unsafe_code)]

pub mod backup;
pub mod job;
