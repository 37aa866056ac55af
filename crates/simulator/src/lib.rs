//! The simulator: disks, groups and modelled devices in virtual time. `policy` decides.
//!
//! ```text
//!   World ──► Engine: clients or recorded requests ─► limits ─► prefetch ─► device ─► Tally
//!   preview:  recorded requests ─► Engine with other limits ─► the times that they would have had
//! ```
//!
//! `weir simulate` and `weir advise` (crate `lab`) and the preview of the page (crate `http`) run
//! it. Time jumps from event to event. It performs no I/O, reads no clock and starts no thread.

pub mod backlog;
pub mod bucket;
pub mod client;
pub mod cluster_values;
pub mod device;
pub mod engine;
mod flow;
pub mod latencies;
pub mod over_time;
mod prefetch;
pub mod preview;
pub mod request;
mod state;
pub mod tally;
mod watermark;
pub mod world;
