//! Types of the objects that the daemon sends over its control socket and over HTTP, and of the
//! results that commands print with `--json`.
//!
//! ```text
//!   daemon ─► DaemonStatus ────► JSON on the control socket ─► DaemonStatus ─► weir status, …
//!         └─► DiskActivity, … ─► JSON over HTTP ────────────► the web page, other programs
//! ```
//!
//! Keys are in kebab-case and end with their unit (`wait-ns`, `unflushed-bytes`). A client accepts
//! responses of older and newer daemons: it ignores unknown keys, and an absent key has the default
//! of its type.
//!
//! Depends on no other crate of the workspace. Never opens a socket, and never formats text for a
//! user.

#![forbid(unsafe_code)]

mod activity;
mod cluster;
mod commands;
mod export_status;
mod quota;
mod status;
mod status_json;

pub use activity::*;
pub use cluster::*;
pub use commands::*;
pub use export_status::*;
pub use quota::*;
pub use status::*;
