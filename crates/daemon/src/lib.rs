//! The daemon, `weir serve`: from the command line or the config file to disks that clients use,
//! and to an orderly end.
//!
//! ```text
//!   serve/      start and end: options (arguments/), checks without a start (check), signals
//!   listen/     the sockets that clients connect to
//!   cluster/    groups whose limits hold over many hosts: etcd, reports, grants
//!   control/    the running state (registry), and changes to it
//!     reload/   the config file read again: its difference to the running state, as one change
//!     upgrade/  another daemon continues for this one
//!     qmp/      the control socket: stream ─► session ─► command ─► commands/, a file a subject
//!   events/     the most recent events, and the actors that caused them
//!   http/       metrics for Prometheus and the page, on a separate thread
//!   on_event/   the process that starts a command for each event
//!   sandbox/    rights that are dropped once everything is open
//!   notify      messages to the service manager
//!   pid_file    the process ID, for scripts
//! ```
//!
//! The control sockets, disks, groups and exports are in the crate `control`, metrics and the page
//! in `http`, quota leases in `cluster`.
//!
//! Never touches a request: only `export` and `block` are between a client and its disk.

mod on_event;
mod pid_file;
pub mod serve;

pub use on_event::run as run_on_event;
