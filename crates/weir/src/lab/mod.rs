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

mod bench;
mod interruption;
mod latencies;
mod load;
mod report;
mod result;
mod simulate;
mod statistics;
pub(crate) mod trace;
mod tune;

pub(crate) use bench::{BenchTarget, run as bench};
pub(crate) use load::Spacing;
pub(crate) use report::run as report;
pub(crate) use simulate::{DeviceSpec, Sweep, Workload, generators, run as simulate};
pub(crate) use trace::Format as TraceFormat;
pub(crate) use tune::{Goal, Preset, run as tune};
