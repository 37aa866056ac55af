//! Reading traces: what requests came to which disks, and when, whoever recorded it.
//!
//! ```text
//!   file ─► input ─► lines ─► format/… ─► window ─► Reader ─┐
//!           gzip,    blocks   a line's    the order         ├─► Merged ─► records by time
//!           zstd              requests              Reader ─┘
//! ```
//!
//! Everything streams: memory holds a block of text, the reordering window and the disks' names. A
//! line that does not parse is an error after all records before it. Traces are untrusted: nothing
//! in them makes a reader panic, hang or allocate without bound (`fuzz/fuzz_targets/trace.rs`).

mod arguments;
pub mod convert;
mod disks;
pub(crate) mod drawn;
mod error;
mod fields;
mod format;
#[doc(hidden)]
pub mod fuzzing;
mod held_by;
mod info;
mod input;
mod limit_history;
mod lines;
mod merge;
mod outcome;
mod output;
mod reader;
mod record;
mod recorded_limits;
pub mod recording;
#[cfg(test)]
mod tests;
mod window;
mod write;

pub(crate) use arguments::ReadingArgs;
pub(crate) use fields::push_decimal;
pub(crate) use format::{Columns, Format, HEADER, MORE_COLUMNS};
pub(crate) use merge::{Measured, Merged, Source};
pub(crate) use outcome::Outcome;
pub(crate) use output::Output;
pub(crate) use reader::Options;
pub(crate) use record::{DiskId, Op, Record};
pub(crate) use write::{push_request, quoted};
