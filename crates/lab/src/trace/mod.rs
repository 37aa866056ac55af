//! Reading traces: what requests came to which disks, and when, whoever recorded it.
//!
//! ```text
//!   file ─► input ─► lines ─► format/… ─► window ─► Reader ─┐
//!           gzip,    blocks   a line's    the order         ├─► Merged ─► records by time
//!           zstd              requests              Reader ─┘
//! ```
//!
//! Everything streams, so that a trace may be larger than memory; what is held is a block of text,
//! the window of records that are put in order, and the names of the disks. A line that does not
//! parse is an error with its number, never skipped: what a simulation says of half a trace looks
//! like what it says of the whole. What comes before such a line is handed out first, so that
//! results so far can be kept.
//!
//! Traces are files of strangers. Nothing in them makes a reader panic, hang or allocate without
//! bound; `fuzz/fuzz_targets/trace.rs` tries.

mod disks;
mod error;
mod fields;
mod format;
#[doc(hidden)]
pub mod fuzzing;
mod input;
mod lines;
mod merge;
mod reader;
mod record;
#[cfg(test)]
mod tests;
mod window;
mod write;

pub(crate) use fields::push_decimal;
pub(crate) use format::{Format, HEADER};
pub(crate) use merge::{Merged, Source};
pub(crate) use reader::Options;
pub(crate) use record::{DiskId, Op, Record};
pub(crate) use write::{push_request, quoted};
