//! The daemon, `weir serve`: from the command line or the config file to disks that clients use,
//! and back to nothing.
//!
//! ```text
//!   serve/      start and end: options (arguments/), whether it would start (check), signals
//!   listen/     the sockets that clients connect to
//!   cluster/    groups whose limits hold over many hosts: etcd, reports, grants
//!   control/    what runs (registry), and how it is changed while it runs
//!     reload/   the config file read again: its difference to what runs, as one change
//!     takeover/ another daemon goes on where this one stops
//!     qmp/      the control socket: stream ─► session ─► command ─► commands/, a file a subject
//!   events/     what has happened: the last of it, and who asked for it
//!   http/       what Prometheus and the page ask for, on a thread of its own
//!   on_event/   the process that starts a command for each event
//!   sandbox/    rights that are given up once all is open
//!   notify      what the service manager is told
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
