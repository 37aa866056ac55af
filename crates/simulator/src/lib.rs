//! The simulator: disks, groups and modelled devices in virtual time. `policy` decides.
//!
//! ```text
//!   WorldSpec ─► engine: clients or recorded requests ─► limits ─► prefetch ─► device ─► statistics
//!   preview:     recorded requests ─► engine with other limits ─► their times under these limits
//! ```
//!
//! Used by `weir simulate` and `weir advise` (crate `lab`) and by the preview of the web page
//! (crate `http`). Time jumps from event to event. Never performs I/O, reads a clock or starts a
//! thread.

pub mod backlog;
pub mod bucket;
pub mod client;
pub mod cluster_values;
pub mod device;
pub mod engine;
mod flow;
pub mod latencies;
mod latency_target;
pub mod limit_preview;
pub mod over_time;
mod prefetch;
mod recorded_device;
pub mod request;
mod state;
pub mod tally;
mod watermark;
pub mod world;
