//! The lab: measures disks through the code that serves them, without a daemon and clients, and
//! predicts the effect of limits with the daemon's own decisions.
//!
//! ```text
//!   bench ──────► load ─────────────┐                      ┌─► text, JSON
//!   tune ───────► load, statistics ─┼─► result: Findings ──┼─► FILE.json ─► report, which compares two
//!   simulate ───► trace, policy ────┘                      └─► report: FILE.html
//! ```
//!
//! Never changes the data path for a measurement.

pub mod advise;
pub mod bench;
mod duration;
pub mod interruption;
mod latencies;
mod limit_lines;
mod load;
pub mod probe;
pub mod report;
mod result;
pub mod simulate;
mod statistics;
pub mod trace;
pub mod tune;
