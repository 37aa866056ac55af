//! The daemon, `weir serve`: from the command line or the config file to disks that clients use,
//! and to an orderly end.
//!
//! ```text
//!   serve/      start and end: options (arguments), checks without a start (check), signals
//!   on_event/   process that starts a command for each event
//!   pid_file    file with the process ID, for scripts
//! ```
//!
//! The running state and all changes to it (reload, upgrade, control sockets) are in the crate
//! `control`, metrics and the page in `http`, quota leases in `cluster`, and the rights that the
//! daemon keeps after its start in `sandbox`.
//!
//! Never touches a request: only `export` and `block` are between a client and its disk.

mod on_event;
mod pid_file;
pub mod serve;

pub use on_event::run as run_on_event;
