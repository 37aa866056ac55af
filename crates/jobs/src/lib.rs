//! Jobs: operations on a disk that take long, while clients use it.
//!
//! ```text
//!   control ─► Job (state, progress, cancel) ◄─ backup ─► point in time of the disk ─► block
//!                                            ◄─ mirror ─► changes of the disk ───────► block
//!                                                    └──► target image ──────────────► image
//! ```
//!
//! - [`job`] has the states of all jobs, their transitions, and what an operator can do with them.
//! - [`backup`] copies a disk as it was at one instant.
//! - [`mirror`] copies a disk while it changes, and moves it to the copy.
//! - [`target`] is the image that they write to.
//! - [`stream`] copies backing files into the disk's image, so that its chain becomes shorter.
//!
//! The I/O of a job on its disk is admitted like a client's, as background work of the disk's group
//! ([`block::layer::throttle::BackgroundMember`]).
//!
//! Never opens or creates an image, never reads a configuration, and never makes a client's request
//! fail.

#![forbid(unsafe_code)]

pub mod backup;
mod chain_walk;
pub mod job;
pub mod mirror;
pub mod stream;
pub mod target;
mod tasks;
