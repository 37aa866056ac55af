//! The data path: every byte and every system call of a disk.
//!
//! ```text
//!   export ─► Disk ─► layer ────────────► image ────────► storage ─────────► reactor
//!             disk    layer/throttle      image/raw       storage/file       io_uring, or
//!                     layer/prefetch      image/qcow2     storage/memory …   a simulation
//! ```
//!
//! The way through it:
//! - [`disk`] composes the rest: a request enters there, and nowhere else. It has been validated by
//!   its export.
//! - [`layer`] is what a request passes: limits, and reading ahead. What is decided there is
//!   decided in `policy`.
//! - [`image`] maps the disk's bytes to bytes of a file: [`image::raw`](image::Raw),
//!   [`image::qcow2`]. [`image::open`] goes from a name to an image with everything behind it.
//! - [`storage`] does the I/O, and owns what a cache mode means.
//! - [`nbd`] is the protocol of servers whose exports are storage.
//! - [`reactor`] runs tasks on one io_uring a thread, or on a virtual clock; [`buffer`] is memory
//!   for I/O, and [`guest`] that of virtual machines, which they change while we work on it.
//! - [`memory`] is the budget of all that, and who has it.
//! - [`device`] looks at the physical disk below, for watermarks; [`measures`] counts how
//!   long requests take, [`recorder`] passes on what each was; [`seldom`] keeps the log short, and
//!   [`plain`](mod@plain) makes names of others fit for it; [`regular`] opens small files that a user
//!   names.
//!
//! Each module knows those to its right in the drawing, and none to its left.
//!
//! Never decides who may pass or what to read ahead, never serves a client's protocol, and never
//! reads a configuration: those are `policy`, `export`, and the crates above. `unsafe` lives in
//! [`reactor`], [`buffer`], [`guest`] and where [`storage::rbd`] calls librbd alone.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod buffer;
pub mod device;
pub mod disk;
pub mod error;
#[allow(unsafe_code)]
pub mod guest;
pub mod image;
pub mod layer;
pub mod measures;
pub mod memory;
pub mod nbd;
pub mod plain;
#[allow(unsafe_code)]
pub mod reactor;
pub mod recorder;
pub mod regular;
pub mod seldom;
pub mod storage;
