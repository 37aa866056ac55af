//! Control plane of the daemon: the running state, and every way to change it.
//!
//! ```text
//!   serve ─────────► Registry ◄───────── control socket
//!   starts and ends     │ by name: disks, groups, servers, exports
//!                       ▼
//!                  the parts of the data path
//! ```
//!
//! ```text
//!   reconcile/  brings the running state to a plan: start, reload, retry, dry run
//!   reload/     reads the config file again and reconciles
//!   upgrade/    upgrade: a new process continues for the old one
//!   migration/  migration: a disk moves to another host of the cluster
//!   qmp/        control socket: stream ─► session ─► command ─► commands/, one file per subject
//!   listen/     sockets that clients connect to
//!   events/     event ring, rate limits, event types
//!   recording/  recordings of requests
//!   notify      messages to the service manager
//!   openers     mounts, other devices and processes that use a device of this host
//! ```
//!
//! The QMP command `block_set_io_throttle` is in `qmp/commands/throttle.rs`; the table of all
//! commands is in `commands.rs`.
//!
//! The [`Registry`](registry::Registry) is the only list of running objects. It belongs to the main
//! thread. Never used by the data path.

mod add_objects;
pub mod assemble;
mod backups;
mod bitmaps;
mod chains;
pub mod change;
mod cluster_hooks;
pub mod devices;
pub mod endpoints;
pub mod events;
pub mod exports;
pub mod fdsets;
mod image_opening;
mod job_start;
mod job_target;
pub mod latency_targets;
pub mod listen;
pub mod loaded_config;
pub mod migration;
mod mirror_switch;
mod mirrors;
pub mod notify;
pub mod openers;
pub mod planned_export;
pub mod qmp;
pub mod quotas;
pub mod reconcile;
pub mod recording;
pub mod registry;
pub mod reload;
mod retry_queue;
pub mod running_disk;
pub mod running_server;
pub mod schedules;
mod snapshots;
mod structure_lock;
mod throttle_log;
mod trial_open;
mod unavailable_disk;
mod unmet_reservation;
mod unmet_reservations;
pub mod upgrade;
pub mod watch;

#[doc(hidden)]
pub use qmp::fuzzing;
pub use qmp::qemu_release;
