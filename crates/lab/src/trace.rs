//! `weir trace`: converts traces, sums them up, and draws recordings for `weir report`.
//!
//! Parsing belongs to the crate `recording`.

mod arguments;
pub mod convert;
pub(crate) mod drawn;
mod held_by;
mod info;
mod output;
mod recorded_limits;

pub(crate) use arguments::ReadingArgs;
pub(crate) use output::Output;
