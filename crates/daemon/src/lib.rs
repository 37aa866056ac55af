//! The daemon, `weir serve`: from the command line or the config file to disks that clients use,
//! and back to nothing.
//!
//! ```text
//!   serve/      start and end: options (arguments/), whether it would start (check), signals
//!   on_event/   the process that hands events on to a webhook or a command
//!   pid_file    the process's number, for scripts
//! ```
//!
//! The control sockets, disks, groups and exports are in the crate `control`, metrics and the page
//! in `http`, quota leases in `cluster`.
//!
//! Never touches a request: between a client and its disk there is only what `export` and `block`
//! do.

mod on_event;
mod pid_file;
pub mod serve;

pub use on_event::run as run_on_event;
