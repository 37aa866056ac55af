//! The daemon: `weir serve`, from the command line or the config file to disks that clients use, and back to nothing.
//!
//! ```text
//!   serve/      start and end: options, the plan, disks, threads, signals
//!   listen/     the sockets clients come to
//!   control/    what runs, and how it is changed while it runs; qmp/ is the control socket
//!   pid_file    the process's number, for scripts
//! ```
//!
//! Never touches a request: between a client and its disk there is only what `export` and `block` do.

mod control;
mod listen;
mod pid_file;
pub mod serve;

#[doc(hidden)]
pub use control::qmp::fuzzing;
