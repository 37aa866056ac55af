//! Recordings and traces: requests to disks with their times, and the limits in force.
//!
//! ```text
//!   file ─► input ─► lines ─► format/… ─► window ─► Reader ─┐
//!           gzip,    blocks   a line's    the order         ├─► Merged ─► records by time
//!           zstd              requests              Reader ─┘
//!   Writer (file/) ─► a recording: weir's own binary format, which keeps waiting and service times
//! ```
//!
//! Everything streams: memory holds a block of text, the reordering window and the disks' names. A
//! line that does not parse is an error after all records before it. Traces are untrusted: nothing
//! in them makes a reader panic, hang or allocate without bound (`fuzz/fuzz_targets/trace.rs`).
//!
//! The daemon records with this crate and the lab reads with it. It does not open disks, keeps no
//! clock, and does not evaluate what it reads.

pub mod disks;
pub mod error;
mod fields;
pub mod file;
pub mod format;
#[doc(hidden)]
pub mod fuzzing;
pub mod input;
pub mod limit_history;
pub mod lines;
pub mod merge;
pub mod outcome;
pub mod reader;
pub mod record;
#[cfg(test)]
mod tests;
mod window;
pub mod write;

pub use fields::push_decimal;
pub use file::{Entry, LimitChange, LimitOwner, Times, Writer};
pub use format::{Columns, Format, HEADER, MORE_COLUMNS};
pub use merge::{Measured, Merged, Source};
pub use outcome::Outcome;
pub use reader::Options;
pub use record::{DiskId, Op, Past, Record};
