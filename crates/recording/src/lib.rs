//! Recordings and traces: requests to disks with their times, and the limits in force.
//!
//! ```text
//!   file ─► input ─► lines ─► format/… ─► window ─► TraceReader ─┐
//!           gzip,    blocks   requests    order                  ├─► MergedTraces ─► records by time
//!           zstd              of a line             TraceReader ─┘
//!   RecordingWriter (file/) ─► a recording: weir's own binary format, with waiting and service times
//! ```
//!
//! Everything streams: memory holds a block of text, the reordering window and the names of disks.
//! A line that cannot be parsed is an error, reported after all records before it. Traces are
//! untrusted: none makes a reader panic, hang or allocate without bound
//! (`fuzz/fuzz_targets/trace.rs`).
//!
//! Used by the daemon to record and by the lab to read. Never opens disks, reads a clock, or
//! evaluates the requests.

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
pub use file::{LimitChange, LimitOwner, RecordedTimes, RecordingEntry, RecordingWriter};
pub use format::{ColumnSpec, HEADER, MORE_COLUMNS, TraceFormat};
pub use merge::{MergedTraces, RecordSource, RecordedOutcome};
pub use outcome::RequestOutcome;
pub use reader::TraceOptions;
pub use record::{CompletedRequest, DiskId, RequestOp, TraceRecord};
