//! `weir trace`: converts traces, summarizes them, and draws recordings for `weir report`.
//!
//! The crate `recording` does the parsing.

mod arguments;
pub mod convert;
mod held_by;
mod info;
mod output;
mod recorded_limits;
pub(crate) mod recording_charts;

pub(crate) use arguments::ReadingArgs;
pub(crate) use output::TraceOutput;
