//! The lab: measuring disks through the very code that serves them, without a daemon and without clients; and predicting, by the very
//! decisions that are made there, what limits would do.
//!
//! ```text
//!   bench ──────► load ─────────────┐                      ┌─► text, JSON
//!   tune ───────► load, statistics ─┼─► result: Findings ──┼─► FILE.json ─► report, which compares two
//!   simulate ───► trace, policy ────┘                      └─► report: FILE.html
//! ```
//!
//! Never changes how the data path works in order to measure it.

pub mod bench;
mod interruption;
mod latencies;
mod load;
pub mod probe;
pub mod report;
mod result;
pub mod simulate;
mod statistics;
mod trace;
pub mod tune;

#[doc(hidden)]
pub use trace::fuzzing;
