//! The data path put together: a disk, its layers, and the device below.
//!
//! ```text
//!   export ─► disk ─► layer ────────────► image ────────► storage ────────► reactor
//!                     layer/throttle      raw             file, memory,     io_uring, or
//!                     layer/prefetch      qcow2           NBD, RBD …        a simulation
//!                     layer/copy_before_write
//! ```
//!
//! - [`disk`] composes the rest: every request enters there. Its export has validated it.
//! - [`layer`] contains the layers that a request passes: throttling, prefetch and
//!   copy-before-write. `policy` makes the decisions.
//! - [`device`] samples the physical disk below, for watermarks.
//! - [`measures`] counts requests and their latency; [`recorder`] passes each request on to a
//!   recording.
//!
//! `image`, `storage`, `nbd` and `reactor` are crates below this one. In the drawing, each part
//! depends on those to its right, and on none to its left.
//!
//! Never admits a request or chooses what to read ahead (`policy` does), never serves a client's
//! protocol (`export` does), and never reads a configuration.

#![forbid(unsafe_code)]

mod current_image;
pub mod device;
pub mod disk;
pub mod layer;
pub mod measures;
pub mod recorder;
